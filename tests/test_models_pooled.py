"""Networks that pool over space: any size of image, maps of scores, twins of equal size, options, errors, exports."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalesteer import LogRadialBasis, ScaleSteerableConv2d, create_model, fold
from scalesteer.channels import ScaleChannels
from scalesteer.models import DATASETS, count_parameters, list_options, set_input_statistics
from scalesteer.models.pooled import READOUTS, STEERED_BASIS, STEERED_SCALES, BlurPool2d, PooledPlan, ResidualBlock

CNNS, LARGE, RESNETS = [(f"steered-{kind}", f"pooled-{kind}") for kind in ("cnn", "cnn-large", "resnet")]
NAMES = (*CNNS, *RESNETS)  # the large ones are built as the small ones are


def tiny(name, **options):
    steered = {"kernel_size": (7, 5), "scales": (1.0, 1.5)} if name.startswith("steered") else {"kernel_size": (5, 3)}
    residual = {"blocks": 1} if name in RESNETS else {}
    return create_model(
        name, **{"in_chans": 3, "num_classes": 5, "widths": (4, 6), "subsample": (1,), **steered, **residual, **options}
    )


def expected_count(name, in_chans, classes):
    """Weights of every layer at the usual options, counted by hand."""
    steered = name.startswith("steered")
    if name not in RESNETS:
        widths = (16, 32, 32) if name in CNNS else (32, 64, 96, 128)
        taps = [24 if steered else 25] * (len(widths) - 1) + [9]  # of 5 x 5 and 3 x 3; 2 x 6 complex coefficients
        weights = sum(n * fan * width for n, fan, width in zip(taps, (in_chans, *widths), widths, strict=False))
        return weights + 2 * sum(widths) + (widths[-1] + 1) * classes
    widths, taps = ((32, 64, 128), 24) if steered else ((32, 64, 112), 9)
    total = widths[0] * (in_chans * taps + 2) + (widths[-1] + 1) * classes
    for before, width in zip((widths[0], *widths), widths, strict=False):
        for fan in (before, width):
            if steered:
                inner = {32: 22, 64: 45, 128: 90}[width]
                total += inner * (fan + 2) + inner * (inner * taps + 2) + width * (inner + 2)
            else:
                total += width * (fan * taps + 2) + width * (width * taps + 2)
            total += width * (fan + 2) if fan != width else 0
    return total


@pytest.mark.parametrize("dataset", DATASETS)
def test_parameters_are_as_many_as_counted_by_hand_and_as_in_the_twin(dataset):
    in_chans, classes, size = DATASETS[dataset][:3]
    counts = {}
    for name in (*CNNS, *LARGE, *RESNETS):
        model = create_model(name, dataset)
        assert (model.in_chans, model.image_size) == (in_chans, size)
        counts[name] = count_parameters(model)
        assert counts[name] == expected_count(name, in_chans, classes)
    for steered, plain in (CNNS, LARGE, RESNETS):
        assert counts[plain] == pytest.approx(counts[steered], rel=0.05)
    if dataset.startswith("stir"):
        assert counts["steered-cnn"] <= 27_000
        assert counts["pooled-cnn"] <= 27_000
    assert 300_000 <= counts["steered-cnn-large"] < counts["steered-resnet"] <= 700_000


@pytest.mark.parametrize("name", NAMES)
def test_images_of_any_size_are_taken_from_the_smallest_on(name):
    model = tiny(name).eval()
    assert model.smallest == (7 if name.startswith("steered") else 5)  # the largest filter
    assert model.image_size is None
    for height, width in ((model.smallest, model.smallest), (17, 40), (64, 33)):
        assert model(torch.rand(2, 3, height, width)).shape == (2, 5)
    for height, width in ((model.smallest - 1, 20), (20, model.smallest - 1)):
        with pytest.raises(ValueError, match=rf"at least {model.smallest} x {model.smallest} pixels \(got shape"):
            model(torch.rand(2, 3, height, width))


def test_smallest_image_leaves_one_place():
    model = tiny("pooled-cnn", widths=(2, 2, 2, 2), subsample=(1, 2, 3, 4), kernel_size=3, dense=True).eval()
    assert (model.smallest, model.stride) == (16, 16)
    assert model(torch.rand(1, 3, 16, 16)).shape == (1, 5, 1, 1)
    assert model(torch.rand(1, 3, 31, 48)).shape == (1, 5, 1, 3)


def pooled_by_hand(maps, readout):
    flat = maps.detach().double().flatten(2).numpy()
    if readout == "logsumexp":
        return np.log(np.exp(flat).sum(-1) / flat.shape[-1])
    return flat.max(-1) if readout == "max" else flat.mean(-1)


@pytest.mark.parametrize("readout", sorted({*READOUTS} - {"features"}))
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_pooled_maps_of_scores(name, readout):
    model = tiny(name, readout=readout, hidden=8).eval()
    x = torch.rand(2, 3, 19, 24)
    logits = model(x)
    model.dense = True
    maps = model(x)
    assert maps.shape == (2, 5, 19 // model.stride, 24 // model.stride)
    np.testing.assert_allclose(logits.detach(), pooled_by_hand(maps, readout), atol=1e-5)


@pytest.mark.parametrize("halving", ["max", "blur"])
def test_features_are_pooled_before_they_are_scored(halving):
    model = create_model("pooled-deep", in_chans=3, num_classes=5, widths=(4, 4, 6, 6, 8), halving=halving).eval()
    assert (model.readout, model.stride, model.smallest) == ("features", 16, 16)
    x = torch.rand(2, 3, 45, 64)
    features = model.features(model.prepare(x))
    assert features.shape == (2, 8, 2, 4)
    weight, bias = model.classifier.fc2.weight.flatten(1), model.classifier.fc2.bias
    assert torch.allclose(model(x), features.flatten(2).amax(-1) @ weight.T + bias, atol=1e-5)
    model.dense = True  # scores of each place by itself
    assert torch.allclose(model(x), torch.einsum("kc,bchw->bkhw", weight, features) + bias[:, None, None], atol=1e-5)
    halves = [type(layer) for layer in model.features if isinstance(layer, (BlurPool2d, nn.MaxPool2d))]
    assert halves == [{"max": nn.MaxPool2d, "blur": BlurPool2d}[halving]] * 4


def test_logsumexp_neither_overflows_nor_grows_with_the_image():
    model = tiny("pooled-cnn", readout="logsumexp").eval()
    x = torch.tensor([[[[1e4, 1e4]]], [[[-1e4, -1e4]]]])
    assert model._pool(x).flatten().tolist() == [1e4, -1e4]
    assert model._pool(torch.full((1, 1, 9, 9), 3.0)).item() == pytest.approx(3.0)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model._pool, x)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns_and_a_step_lowers_the_loss(name):
    model = tiny(name, hidden=4)
    x, labels = F.interpolate(torch.rand(8, 3, 4, 4), (16, 16), mode="bicubic"), torch.arange(8) % 5
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(x), labels)
        optimiser.zero_grad()
        loss.backward()
        for key, parameter in model.named_parameters():
            assert losses or (parameter.grad != 0).any(), key
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_layers_of_the_cnns_are_in_the_documented_order():
    kinds = {"steered-cnn": (ScaleSteerableConv2d, 7), "pooled-cnn": (nn.Conv2d, 5)}
    for name, (conv, size) in kinds.items():
        model = create_model(name, widths=(3, 4, 5), subsample=(2,))
        layers = dict(model.features.named_children())
        names = "conv1 norm1 relu1 conv2 norm2 relu2 blur2 conv3 norm3 relu3"
        assert list(layers) == names.split()
        expected = [conv, nn.BatchNorm2d, nn.ReLU] * 2 + [BlurPool2d, nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
        assert [type(layer) for layer in layers.values()] == expected
        convs = [layers[f"conv{i}"] for i in (1, 2, 3)]
        assert [layer.out_channels for layer in convs] == [3, 4, 5]
        assert [layer.kernel_size[0] for layer in convs] == [size, 5, 3]
        assert model.first is layers["conv1"]
        assert list(dict(model.classifier.named_children())) == ["dropout", "fc2"]
    hidden = create_model("pooled-cnn", hidden=7, dropout=0.25).classifier
    assert list(dict(hidden.named_children())) == ["fc1", "norm", "relu", "dropout", "fc2"]
    assert (hidden.fc1.out_channels, hidden.dropout.p) == (7, 0.25)


def test_residual_networks_are_made_of_blocks():
    for name in RESNETS:
        model = create_model(name, widths=(4, 6, 8), subsample=(2, 3), blocks=3, kernel_size=5)
        names = "conv1 norm1 relu1 stage1 stage2 blur2 stage3 blur3"
        assert list(dict(model.features.named_children())) == names.split()
        stages = [model.features.get_submodule(f"stage{i}") for i in (1, 2, 3)]
        assert [len(stage) for stage in stages] == [3, 3, 3]
        assert [len(block.shortcut) for stage in stages for block in stage] == [0, 0, 0, 2, 0, 0, 2, 0, 0]
    model = create_model("steered-resnet", widths=(4, 6, 8), middle=0.25, kernel_size=(7, 5, 3))
    convs = [block.body[3] for i in (1, 2, 3) for block in model.features.get_submodule(f"stage{i}")]
    assert [type(conv) for conv in convs] == [ScaleSteerableConv2d] * 4 + [nn.Conv2d] * 2
    assert [conv.in_channels for conv in convs] == [1, 1, 2, 2, 2, 2]
    assert [conv.kernel_size[0] for conv in convs] == [7, 7, 5, 5, 3, 3]


def test_residual_block_adds_the_input():
    x = torch.randn(2, 3, 4, 5)
    silent = nn.Conv2d(3, 3, 1)
    nn.init.zeros_(silent.weight)
    nn.init.zeros_(silent.bias)
    assert torch.equal(ResidualBlock(silent, 3, 3)(x), x.relu())
    block = ResidualBlock(nn.Conv2d(3, 4, 1), 3, 4).eval()
    torch.testing.assert_close(block(x), (block.body(x) + block.shortcut(x)).relu())
    assert block(x).shape == (2, 4, 4, 5)


@pytest.mark.parametrize("name", ["steered-cnn", "steered-resnet"])
def test_options_of_steered_layers_are_obeyed(name):
    model = create_model(name, scales=(0.8, 1.0, 1.6), basis="paper", backend="direct", kernel_size=9, widths=(2, 3))
    layers = [module for module in model.modules() if isinstance(module, ScaleSteerableConv2d)]
    assert len(layers) == (2 if name == "steered-cnn" else 5)
    for layer in layers:
        assert layer.scales == (0.8, 1.0, 1.6)
        assert layer.basis == LogRadialBasis().resolve(15)
        assert (layer.backend, layer.kernel_size, layer.padding) == ("direct", (9, 9), "same")
    usual = create_model(name).first
    assert (usual.basis, usual.scales) == (STEERED_BASIS, STEERED_SCALES)


@pytest.mark.parametrize("name", NAMES)
def test_an_option_that_is_none_keeps_its_default(name):
    model = create_model(name, upsample=None, channels=None, readout=None, in_chans=None, widths=(4, 6, 8))
    assert list(model.state_dict()) == list(create_model(name, widths=(4, 6, 8)).state_dict())
    assert {"readout", "widths", "channels", "dropout"} <= set(list_options(name))


def blurred_by_loops(image):
    (height, width), taps = image.shape, (1, 3, 3, 1)
    out = np.zeros((height // 2, width // 2))
    for i, j in np.ndindex(*out.shape):
        places = {(2 * i + di - 1, 2 * j + dj - 1): taps[di] * taps[dj] for di, dj in np.ndindex(4, 4)}
        inside = {place: w for place, w in places.items() if place in np.ndindex(height, width)}
        out[i, j] = sum(w * image[place] for place, w in inside.items()) / sum(inside.values())
    return out


@pytest.mark.parametrize("size", [(2, 2), (6, 8), (7, 9)])
def test_blur_smooths_and_halves(size):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    out = BlurPool2d().double()(x)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(out[i, j], blurred_by_loops(x[i, j].numpy()), atol=1e-12)


def test_blur_keeps_places_and_does_not_alias():
    blur, line = BlurPool2d(), torch.arange(12.0)
    ramp = blur(line.expand(1, 1, 12, 12))
    assert ramp[0, 0, 0, 1:-1].tolist() == pytest.approx([2.5, 4.5, 6.5, 8.5])  # amid pixels 2 i and 2 i + 1
    checks = (-1.0) ** line
    assert blur(checks.expand(1, 1, 12, 12))[..., 1:-1].abs().max() < 1e-6  # processors round in different ways
    assert not blur.state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_input_is_normalised_in_each_channel_by_numbers_of_the_checkpoint(name):
    model = tiny(name).eval()
    x = torch.rand(2, 3, 12, 12)
    expected = model(x)
    mean, std = torch.tensor([0.5, -1.0, 0.0]), torch.tensor([0.25, 3.0, 1.0])
    set_input_statistics(model, std, mean)
    torch.testing.assert_close(model(x * std.view(-1, 1, 1) + mean.view(-1, 1, 1)), expected, rtol=1e-4, atol=1e-5)
    other, buffer = tiny(name).eval(), io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.input_mean, mean)
    assert torch.equal(other.input_std, std)
    assert torch.equal(other(x), model(x))


def test_input_statistics_are_checked_and_reach_a_network_inside_another():
    model = tiny("pooled-cnn")
    set_input_statistics(ScaleChannels(model, (0.5, 1.0)), 0.5)
    assert (model.input_mean.tolist(), model.input_std.tolist()) == ([0] * 3, [0.5] * 3)
    flat = create_model("plain-cnn", in_chans=2)
    set_input_statistics(flat, 0.5, [0.1, 0.2])
    assert flat.input_std == 0.5
    set_input_statistics(flat, [1.0, 2.0])
    assert flat.input_std == 1.5  # one number, for all channels
    for network, std, message in (
        (model, [1.0, 2.0], r"`std` must be one number or have shape \(3,\) \(got \[1.0, 2.0\]\)"),
        (flat, [1.0, 2.0, 3.0], r"`std` must be one number or have shape \(\)"),
        (model, 0.0, r"`std` must be finite, and a deviation positive \(got 0.0\)"),
        (model, math.nan, r"`std` must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            set_input_statistics(network, std)
    with pytest.raises(TypeError, match=r"`model` must be a network of create_model \(got Linear\)"):
        set_input_statistics(nn.Linear(1, 1), 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_copies_pickles_and_states_are_the_same_in_train_and_eval(name):
    model = tiny(name)
    keys = list(model.state_dict())
    assert {"input_mean", "input_std"} <= set(keys)
    assert not [key for key in keys if "taps" in key or "steered_basis" in key]
    model(torch.rand(3, 3, 12, 12))
    model.eval()
    x = torch.rand(2, 3, 13, 12)
    expected = model(x)
    assert list(model.state_dict()) == keys
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    torch.testing.assert_close(model(x[:1]), expected[:1])
    torch.testing.assert_close(copy.deepcopy(model).double()(x.double()).float(), expected, rtol=1e-3, atol=1e-4)
    assert model(x[:0]).shape == (0, 5)


@pytest.mark.parametrize("name", ["steered-cnn", "steered-resnet"])
def test_folded_network_gives_the_same_logits(name):
    model, x = tiny(name).eval(), torch.rand(2, 3, 12, 14)
    folded = fold(model)
    torch.testing.assert_close(folded(x), model(x))
    assert not any(isinstance(module, ScaleSteerableConv2d) for module in folded.modules())


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning", "ignore:.*is deprecated.*:FutureWarning")
def test_compiles_as_one_graph():
    model = tiny("steered-resnet", readout="logsumexp", widths=(4,), kernel_size=5)  # has all kinds of layers
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    x = torch.rand(3, 3, 12, 14)
    outs = []
    for module in (model, compiled):
        outs.append(module(x))
        outs[-1].square().sum().backward()
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
    for (key, ours), theirs in zip(model.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-3, atol=1e-3, msg=key)


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning", "ignore:.*is deprecated.*:FutureWarning")
@pytest.mark.parametrize(("in_chans", "readout"), [(1, "logsumexp"), (3, "max")])
def test_exports_with_a_dynamic_batch_and_size(in_chans, readout):
    model = tiny("steered-resnet", in_chans=in_chans, readout=readout, widths=(4,), kernel_size=5).eval()
    least = {"batch": 1, "height": 16, "width": 16}
    shapes = ({i: torch.export.Dim(key, min=n, max=300) for i, (key, n) in zip((0, 2, 3), least.items(), strict=True)},)
    program = torch.export.export(model, (torch.rand(2, in_chans, 32, 40),), dynamic_shapes=shapes).module()
    for size in ((3, in_chans, 16, 31), (1, in_chans, 45, 28)):
        x = torch.rand(size)
        torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_channels_put_the_network_inside_scale_channels(name, dense):
    model = tiny(name, channels=(0.5, 1.0, 2.0), join="max", drop=0.25, dense=dense).eval()
    assert isinstance(model, ScaleChannels)
    alone = tiny(name, dense=dense)
    assert count_parameters(model) == count_parameters(alone)
    assert (model.scales, model.join, model.drop) == ((0.5, 1.0, 2.0), "max", 0.25)
    set_input_statistics(model, 0.5)
    alone.load_state_dict(model.net.state_dict())
    assert alone.input_std.tolist() == [0.5] * 3
    x = torch.rand(2, 3, 24, 32)
    assert model(x).shape == alone.eval()(x).shape
    torch.testing.assert_close(model.with_scales((1.0,))(x), alone(x))
    logits, sizes = model(x, return_scales=True)
    assert sizes.shape == logits.shape[:1] + logits.shape[2:]
    assert model.grid == PooledPlan(widths=(4, 6), subsample=(1,)).grid
    wide = tiny(name, channels=(0.5, 1.0), dense=dense, border=4, border_mode="reflect").eval()
    assert (wide.border, wide.border_mode) == (4, "reflect")
    assert wide(x).shape == alone(x).shape
    assert create_model(**wide.arguments).arguments == wide.arguments
    assert not {"border", "border_mode"} & set(model.arguments)


def test_maps_lie_where_the_plan_says():
    plan = PooledPlan(widths=(1, 1), subsample=(1, 2))
    options = {"widths": (1, 1), "subsample": (1, 2), "kernel_size": 3, "num_classes": 1}
    model = create_model("pooled-cnn", **options, dense=True).eval()
    for layer in (model.features.conv1, model.features.conv2, model.classifier.fc2):
        nn.init.zeros_(layer.weight)
        layer.weight.data[..., layer.weight.shape[-1] // 2, layer.weight.shape[-1] // 2] = 1  # hands on what it sees
    nn.init.zeros_(model.classifier.fc2.bias)
    (stride, offset), line = plan.grid, model(torch.arange(48.0).expand(1, 1, 40, 48))[0, 0, 4]
    assert (stride, len(line)) == (4, 12)
    expected = [offset + stride * i for i in range(1, 11)]
    assert line[1:-1].tolist() == pytest.approx(expected, rel=1e-4)  # batch normalisation divides by a little over 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"widths": ()}, ValueError, r"`widths` must be one integer or more, one for each stage \(got \(\)\)"),
        ({"widths": (4, 0)}, ValueError, r"`widths\[1\]` must be at least 1 \(got 0\)"),
        ({"kernel_size": 4}, ValueError, r"`kernel_size` must be odd and at least 3 \(got 4\)"),
        ({"kernel_size": (7, 5)}, ValueError, r"`kernel_size` must be one number or 3, one for .* \(got \(7, 5\)\)"),
        ({"kernel_size": (7, 5, 2)}, ValueError, r"`kernel_size` must be odd and at least 3 \(got 2\)"),
        ({"widths": (4, 6)}, ValueError, r"`kernel_size` must be one number or 2, one for .* \(got \(7, 5, 3\)\)"),
        ({"subsample": (4,)}, ValueError, r"`subsample` must be ascending stages from 1 to 3 \(got \(4,\)\)"),
        ({"subsample": (2, 1)}, ValueError, r"`subsample` must be ascending stages from 1 to 3 \(got \(2, 1\)\)"),
        ({"subsample": 1}, ValueError, r"`subsample` must be ascending stages from 1 to 3 \(got 1\)"),
        ({"readout": "avg"}, ValueError, r"`readout` must be one of 'max', .*'features' \(got 'avg'\)"),
        ({"dense": 1}, TypeError, r"`dense` must be True or False \(got 1\)"),
        ({"dense": "yes"}, TypeError, r"`dense` must be True or False \(got 'yes'\)"),
        ({"hidden": -1}, ValueError, r"`hidden` must be at least 0 \(got -1\)"),
        ({"dropout": 1.0}, ValueError, r"`dropout` must be from 0 to below 1 \(got 1.0\)"),
        ({"join": "max"}, ValueError, r"`join` \(got 'max'\) needs `channels`"),
        ({"drop": 0.5}, ValueError, r"`drop` \(got 0.5\) needs `channels`"),
        ({"border": 4}, ValueError, r"`border` \(got 4\) needs `channels`"),
        ({"image_size": (6, 20)}, ValueError, r"`image_size` must be at least 7 x 7 .*\(got \(6, 20\)\)"),
        ({"upsample": 2}, TypeError, r"steered-cnn has no option 'upsample'"),
        ({"blocks": 2}, TypeError, r"steered-cnn has no option 'blocks'"),
        ({"name": "pooled-cnn", "basis": "area"}, TypeError, r"pooled-cnn has no option 'basis'"),
        ({"name": "steered-resnet", "blocks": 0}, ValueError, r"`blocks` must be at least 1 \(got 0\)"),
        ({"name": "steered-resnet", "middle": 0}, ValueError, r"`middle` must be positive \(got 0\)"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        create_model(**{"name": "steered-cnn", **arguments})


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(3, 28, 28), ValueError, r"4 axes \(B, C, H, W\) \(got shape \(3, 28, 28\)\). add a batch axis"),
        (torch.zeros(1, 2, 28, 28), ValueError, "in_channels=3 channels on axis 1"),
        (torch.zeros(1, 3, 28, 28, dtype=torch.uint8), TypeError, r"real floating-point tensor \(got torch.uint8\)"),
        (torch.zeros(1, 3, 28, 28).double(), TypeError, "input is torch.float64 but the layer is torch.float32"),
        (np.zeros((1, 3, 28, 28)), TypeError, r"must be a tensor \(got ndarray\)"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_images_are_named(name, x, error, message):
    with pytest.raises(error, match=message):
        tiny(name)(x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_device_gives_the_numbers_of_the_cpu_and_the_same_bits_twice(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # plain convolutions are cuDNN's
    model, x, labels = tiny(name), torch.rand(8, 3, 33, 40), torch.arange(8) % 5
    results = []
    for device in ("cpu", "cuda", "cuda"):
        other = copy.deepcopy(model).to(device, torch.float64)
        loss = F.cross_entropy(other(x.to(device).double()), labels.to(device))
        loss.backward()
        results.append([loss.detach().cpu(), *(parameter.grad.cpu() for parameter in other.parameters())])
    for expected, first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, expected, rtol=1e-6, atol=1e-8)
        assert torch.equal(second, first)
    with torch.autocast("cuda", torch.bfloat16):
        assert model.cuda()(x.cuda()).isfinite().all()
