"""The paper's networks: sizes and counts worked out by hand, every one on every dataset, options, errors, checkpoints.

The networks that take any size are in test_models_pooled.py and test_models_group.py.
"""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paper.forms import GROUP_FITTED, GROUP_HERMITE, RELEASED_ROTATION, SIX_NUMBERS
from scalesteer import LogRadialBasis, ScaleSteerableConv2d, create_model, fold, list_models, models
from scalesteer.baselines import (
    LocallyScaleInvariantConv2d,
    SpatialTransformer2d,
    VectorBatchNorm2d,
    VectorFieldConv2d,
    VectorMaxPool2d,
)
from scalesteer.models import DATASETS, count_parameters, register_features
from tests.baselines import slow

NAMES = ["locally-scale-invariant-cnn", "plain-cnn", "spatial-transformer", "ss-cnn", "vector-field-cnn"]
PAPER_DATASETS = ("mnist-scale", "fmnist-scale", "mnist-scale-local-2")
SMALL = {"widths": (2, 3, 4), "hidden": 8}


def images(model, count=2):
    return torch.rand(count, 1, *model.image_size)


def test_names_are_these():
    pooled = [f"{kind}-{net}" for kind in ("pooled", "steered") for net in ("cnn", "cnn-large", "resnet")]
    of_paper = {SIX_NUMBERS, RELEASED_ROTATION, GROUP_HERMITE, GROUP_FITTED}  # known where paper/ is imported
    ours = [name for name in list_models() if name not in of_paper]
    assert ours == sorted([*NAMES, *pooled, "pooled-deep", "group-cnn", "group-resnet"])
    assert {name: task[:3] for name, task in DATASETS.items()} == {
        "mnist-scale": (1, 10, (28, 28)),
        "fmnist-scale": (1, 10, (28, 28)),
        "mnist-scale-local-2": (1, 10, (28, 40)),
        "stir-mnist": (1, 10, (64, 64)),
        "stir-emoji": (1, 36, (64, 64)),
        "mnist-large-scale": (1, 10, (112, 112)),
        "rescaled-cifar10": (3, 10, (64, 64)),
    }


def expected_count(name, cells):
    """Weights and biases of every layer, counted by hand."""
    widths = (22, 44, 66) if name == "vector-field-cnn" else (30, 60, 90)
    taps = 48 if name == "ss-cnn" else 49  # 24 complex coefficients, or 7 x 7
    vectors = 2 if name == "vector-field-cnn" else 1
    total = widths[0] * (taps + 1)
    total += widths[1] * (widths[0] * taps * vectors + 1)
    total += widths[2] * (widths[1] * taps * vectors + 1)
    total += sum(widths) * (1 if vectors == 2 else 2)  # batch normalisation; of lengths it has no shift
    total += (widths[2] * cells + 1) * 256 + 2 * 256 + 257 * 10
    if name == "spatial-transformer":
        places = 16 if cells == 4 else 20  # 4 x 4, or 4 x 5 after three poolings of 28 x 40
        total += 16 * 26 + 16 * (16 * 25 + 1) + (16 * places + 1) * 32 + 33 * 6
    return total


@pytest.mark.parametrize("dataset", PAPER_DATASETS)
def test_parameters_are_as_many_as_counted_by_hand_and_about_as_many_in_all_networks(dataset):
    cells = 6 if dataset == "mnist-scale-local-2" else 4
    counts = {}
    for name in NAMES:
        for upsample in (1, 2):
            model = create_model(name, dataset, upsample=upsample)
            assert count_parameters(model) == expected_count(name, cells)
        counts[name] = count_parameters(model)
    assert max(counts.values()) / min(counts.values()) <= 1.10
    if cells == 4:
        assert 443_000 <= counts["ss-cnn"] <= counts["plain-cnn"] <= 451_000


@pytest.mark.parametrize("upsample", [1, 2])
@pytest.mark.parametrize("dataset", PAPER_DATASETS)
@pytest.mark.parametrize("name", NAMES)
def test_every_network_learns_from_every_dataset_at_both_sizes(name, dataset, upsample):
    if dataset == "fmnist-scale":  # the same network as for mnist-scale: building it is enough
        assert create_model(name, dataset, upsample=upsample).image_size == (28, 28)
        return
    model = create_model(name, dataset, upsample=upsample)
    x = images(model)
    out = model(x)
    assert out.shape == (2, 10)
    F.cross_entropy(out, torch.tensor([3, 7])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), key
        if not key.startswith("features.transformer.localisation"):  # behind weights that start at zero
            assert (parameter.grad != 0).any(), key


def test_without_a_dataset_a_network_is_that_of_mnist_scale():
    models = []
    for arguments in ((), ("mnist-scale",)):
        torch.manual_seed(3)
        models.append(create_model("ss-cnn", *arguments, upsample=1))
    assert models[0].image_size == (28, 28)
    states = [list(model.state_dict().items()) for model in models]
    for (key, ours), (name, theirs) in zip(*states, strict=True):
        assert key == name
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("upsample", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_channels_classes_and_image_size_may_be_others(name, upsample):
    # 2 x 3 cells: (33 // 2 // 2 + 2 - 4) // 4 + 1 is 2, and 3 for 46.
    model = create_model(name, in_chans=3, num_classes=7, image_size=(33, 46), upsample=upsample, **SMALL).eval()
    x = torch.rand(2, 3, 33, 46)
    assert model(x).shape == (2, 7)
    assert model.features(model.prepare(x)).shape == (2, 4, 2, 3)
    assert model.input_std.shape == ()
    with pytest.raises(ValueError, match="in_channels=3 channels on axis 1"):
        model(x[:, :1])
    with pytest.raises(ValueError, match=r"shape \(B, 3, 33, 46\) \(got \(2, 3, 33, 45\)\)"):
        model(x[..., 1:])


@pytest.mark.parametrize("name", NAMES)
def test_new_datasets_fill_in_channels_classes_and_size_unless_they_are_given(name):
    for dataset in set(DATASETS) - set(PAPER_DATASETS):
        in_chans, classes, size = DATASETS[dataset][:3]
        model = create_model(name, dataset, upsample=1, **SMALL).eval()
        assert model(torch.rand(1, in_chans, *size)).shape == (1, classes)
    model = create_model(name, "stir-emoji", in_chans=2, num_classes=3, image_size=8, upsample=1, **SMALL).eval()
    assert model(torch.rand(1, 2, 8, 8)).shape == (1, 3)


@pytest.mark.parametrize("name", NAMES)
def test_training_step_lowers_the_loss(name):
    model = create_model(name, upsample=1, dropout=0.0, **SMALL)
    x, labels = F.interpolate(torch.rand(8, 1, 4, 4), (28, 28), mode="bicubic"), torch.arange(8)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(x), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_default_upsampling_is_the_papers():
    assert {name: create_model(name, **SMALL).upsample for name in NAMES} == {
        name: 2 if name == "ss-cnn" else 1 for name in NAMES
    }


@pytest.mark.parametrize(("dataset", "cells"), [("mnist-scale", (2, 2)), ("mnist-scale-local-2", (2, 3))])
@pytest.mark.parametrize("upsample", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_features_leave_two_by_two_or_two_by_three_cells(name, upsample, dataset, cells):
    model = create_model(name, dataset, upsample=upsample, **SMALL)
    assert model.features(model.prepare(images(model))).shape == (2, 4, *cells)


def test_layers_of_the_papers_network_are_in_the_documented_order():
    model = create_model("ss-cnn")
    assert list(dict(model.features.named_children())) == [
        f"{kind}{i}" for i in (1, 2, 3) for kind in ("conv", "relu", "pool", "norm")
    ]
    kinds = (ScaleSteerableConv2d, nn.ReLU, nn.MaxPool2d, nn.BatchNorm2d) * 3
    assert [type(layer) for layer in model.features] == list(kinds)
    kinds = (nn.Flatten, nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout, nn.Linear)
    assert [type(layer) for layer in model.classifier] == list(kinds)
    pools = [m for m in model.features if isinstance(m, nn.MaxPool2d)]
    assert [(p.kernel_size, p.padding) for p in pools] == [(2, 0), (2, 0), (8, 2)]
    small = [m for m in create_model("ss-cnn", upsample=1).features if isinstance(m, nn.MaxPool2d)]
    assert [(p.kernel_size, p.padding) for p in small] == [(2, 0), (2, 0), (4, 1)]
    for i in (1, 2, 3):
        conv = model.features.get_submodule(f"conv{i}")
        assert conv.sizes == (7, 9, 11, 13, 15, 17)
        assert conv.basis == LogRadialBasis().resolve(17)
        assert conv.bias is not None
    assert model.classifier.dropout.p == 0.7


def test_other_networks_are_made_of_their_methods_layers():
    kinds = {
        "plain-cnn": nn.Conv2d,
        "spatial-transformer": nn.Conv2d,
        "locally-scale-invariant-cnn": LocallyScaleInvariantConv2d,
        "vector-field-cnn": VectorFieldConv2d,
    }
    for name, kind in kinds.items():
        model = create_model(name)
        for i in (1, 2, 3):
            conv = model.features.get_submodule(f"conv{i}")
            assert type(conv) is kind
            assert conv.bias is not None
            assert conv.weight.shape[-2:] == (7, 7)
    fields = create_model("vector-field-cnn").features
    assert type(fields.pool1) is VectorMaxPool2d
    assert type(fields.norm3) is VectorBatchNorm2d
    assert [fields.get_submodule(f"conv{i}").vectors for i in (1, 2, 3)] == [False, True, True]
    assert type(create_model("spatial-transformer").features[0]) is SpatialTransformer2d


def test_upsampling_is_bilinear():
    model = create_model("ss-cnn", "mnist-scale-local-2", **SMALL).double()
    x = torch.rand(1, 1, 28, 40, dtype=torch.float64)
    expected = slow.resize(x[0, 0].numpy(), (56, 80))
    np.testing.assert_allclose(model.prepare(x)[0, 0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_input_is_divided_by_the_standard_deviation_which_is_in_the_checkpoint(name):
    model = create_model(name, upsample=1, **SMALL).eval()
    x = images(model)
    expected = model(x)
    model.input_std.fill_(0.25)
    torch.testing.assert_close(model(x * 0.25), expected)
    other = create_model(name, upsample=1, **SMALL).eval()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.input_std == 0.25
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("name", NAMES)
def test_first_convolution_is_reachable_and_so_is_what_it_sees(name):
    model = create_model(name, **SMALL).eval()
    seen = []
    model.first.register_forward_hook(lambda layer, args, out: seen.append((args[0], out)))
    x = images(model)
    model(x)
    (image, response), *rest = seen
    assert not rest
    assert torch.equal(model.prepare(x), image)  # a spatial transformer is the identity at the start
    assert torch.equal(model.first(image), response)
    assert model.first.in_channels == 1


@pytest.mark.parametrize("name", NAMES)
def test_copies_pickles_and_states_are_the_same_in_train_and_eval(name):
    model = create_model(name, upsample=1, **SMALL)
    keys = list(model.state_dict())
    assert "input_std" in keys
    model(images(model))
    model.eval()
    x = images(model)
    expected = model(x)
    assert list(model.state_dict()) == keys
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    torch.testing.assert_close(model(x[:1]), expected[:1])
    assert model(x[:0]).shape == (0, 10)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_gives_the_same_network_and_the_same_gradients(name):
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        model = create_model(name, upsample=1, **SMALL)
        model(images(model)).square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning", "ignore:.*is deprecated.*:FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_exports_with_a_dynamic_batch(name):
    scales = {} if name in ("plain-cnn", "spatial-transformer") else {"scales": (1.0, 1.5)}
    model = create_model(name, upsample=1, **scales, **SMALL).eval()
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (images(model, 4),), dynamic_shapes=({0: batch},))
    x = images(model, 3)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_folded_network_gives_the_same_logits():
    model = create_model("ss-cnn", upsample=1, **SMALL).eval()
    folded, x = fold(model), images(model)
    torch.testing.assert_close(folded(x), model(x))
    assert not isinstance(folded.first, ScaleSteerableConv2d)


def test_options_of_the_papers_network_are_obeyed():
    model = create_model("ss-cnn", basis="area", scales=(1.0, 2.0), backend="direct", **SMALL)
    for i in (1, 2, 3):
        conv = model.features.get_submodule(f"conv{i}")
        assert conv.basis == LogRadialBasis.preset("area").resolve(15)
        assert conv.scales == (1.0, 2.0)
        assert conv.backend == "direct"
    assert create_model("ss-cnn", basis=LogRadialBasis(m=0.5), **SMALL).first.basis.m == 0.5


@pytest.mark.parametrize("name", ["locally-scale-invariant-cnn", "vector-field-cnn"])
def test_options_of_networks_that_resize_are_obeyed(name):
    for antialias in (False, True):
        conv = create_model(name, scales=(0.5, 1.0), antialias=antialias, **SMALL).first
        assert conv.scales == (0.5, 1.0)
        assert conv.antialias is antialias


@pytest.mark.parametrize("name", NAMES)
def test_widths_hidden_and_dropout_are_obeyed(name):
    model = create_model(name, widths=[3, 4, 5], hidden=6, dropout=0.2)
    assert [model.features.get_submodule(f"conv{i}").out_channels for i in (1, 2, 3)] == [3, 4, 5]
    assert model.classifier.fc1.weight.shape == (6, 20)
    assert model.classifier.dropout.p == 0.2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "sscnn"}, ValueError, r"`name` must be one of .*'ss-cnn'.* \(got 'sscnn'\). Did you mean 'ss-cnn'\?"),
        ({"name": 3}, ValueError, r"`name` must be one of .* \(got 3\)"),
        (
            {"dataset": "MNISTscale"},
            ValueError,
            r"`dataset` must be one of .* \(got 'MNISTscale'\). .* 'mnist-scale'\?",
        ),
        ({"in_chans": 0}, ValueError, r"`in_chans` must be at least 1 \(got 0\)"),
        ({"num_classes": 2.5}, TypeError, r"`num_classes` must be an integer \(got 2.5"),
        ({"image_size": (8, 8, 8)}, ValueError, r"`image_size` must be an integer or a pair of them \(got \(8, 8, 8"),
        ({"image_size": (7, 28)}, ValueError, r"`image_size` must be at least 8 x 8.*\(got \(7, 28\)\)"),
        ({"readout": "max"}, TypeError, r"ss-cnn has no option 'readout'"),
        ({"channels": (1.0,)}, TypeError, r"ss-cnn has no option 'channels'"),
        ({"upsample": 3}, ValueError, r"`upsample` must be 1 or 2 \(got 3\)"),
        ({"upsample": 1.5}, TypeError, r"`upsample` must be an integer \(got 1.5"),
        ({"basi": "area"}, TypeError, r"ss-cnn has no option 'basi'.*'hidden', 'dropout'.*Did you mean 'basis'\?"),
        ({"name": "plain-cnn", "scales": (1.0,)}, TypeError, r"plain-cnn has no option 'scales'"),
        ({"basis": "aera"}, ValueError, "Did you mean 'area'"),
        ({"basis": 3}, TypeError, r"`basis` must be a LogRadialBasis or the name of a preset \(got 3\)"),
        ({"backend": "fft"}, ValueError, "`backend` must be one of"),
        ({"scales": (2.0, 1.0)}, ValueError, "strictly ascending"),
        ({"widths": (1, 2)}, ValueError, r"`widths` must be 3 integers, one for each convolution \(got \(1, 2\)\)"),
        ({"widths": (1, 2, 0)}, ValueError, r"`widths\[2\]` must be at least 1 \(got 0\)"),
        ({"hidden": 0}, ValueError, r"`hidden` must be at least 1 \(got 0\)"),
        ({"dropout": 1.0}, ValueError, r"`dropout` must be from 0 to below 1 \(got 1.0\)"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        create_model(**{"name": "ss-cnn", **arguments})


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(1, 28, 28), ValueError, r"4 axes \(B, C, H, W\) \(got shape \(1, 28, 28\)\). add a batch axis"),
        (torch.zeros(1, 3, 28, 28), ValueError, "in_channels=1 channels on axis 1"),
        (torch.zeros(1, 1, 28, 40), ValueError, r"shape \(B, 1, 28, 28\) \(got \(1, 1, 28, 40\)\)"),
        (torch.zeros(1, 1, 56, 56), ValueError, r"shape \(B, 1, 28, 28\) \(got \(1, 1, 56, 56\)\)"),
        (torch.zeros(1, 1, 28, 28, dtype=torch.uint8), TypeError, r"real floating-point tensor \(got torch.uint8\)"),
        (torch.zeros(1, 1, 28, 28).double(), TypeError, "input is torch.float64 but the layer is torch.float32"),
        (np.zeros((1, 1, 28, 28)), TypeError, r"must be a tensor \(got ndarray\)"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_images_are_named(name, x, error, message):
    with pytest.raises(error, match=message):
        create_model(name, **SMALL)(x)


def test_features_can_be_registered_once(monkeypatch):
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))

    @register_features("tiny", widths=(2, 3, 4))
    def tiny(plan, *, kernel_size=3):
        return models.flat._flat_features(plan, lambda i, o: nn.Conv2d(i, o, kernel_size, padding="same"))

    assert "tiny" in list_models()
    model = create_model("tiny", "mnist-scale-local-2", upsample=2, kernel_size=5)
    assert model(images(model)).shape == (2, 10)
    assert model.first.kernel_size == (5, 5)
    with pytest.raises(ValueError, match="a model named 'tiny' is registered already"):
        register_features("tiny")(tiny)
