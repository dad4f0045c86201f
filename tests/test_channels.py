"""One network at several sizes of the image: resizing, joining, the size that answered, dropping, copies, errors."""

import copy
import doctest
import io
import math
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scalesteer import ScaleChannels, ScaleSteerableConv2d, create_model
from scalesteer.channels import JOINS
from scalesteer.resize import resize

SCALES = (0.5, 1.0, 1.7)


class Flat(nn.Module):
    """A small network of several modules that takes any size."""

    def __init__(self, classes=5):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Linear(6, classes)
        self.register_buffer("input_std", torch.tensor(0.5))

    def forward(self, x):
        return self.head(self.features(x / self.input_std).mean((2, 3)))


class Prefers(nn.Module):
    """Answers by the size of the image alone: class 1 wins, and the more so the nearer the image is to `side`."""

    def __init__(self, side):
        super().__init__()
        self.side = side

    def forward(self, x):
        level = -8 * math.log(x.shape[-1] / self.side) ** 2
        return torch.tensor([level - 1, level, level - 2]).expand(len(x), 3)


def spots(side, *where):
    """A picture with Gaussian spots, (row, column, width, height of the spot) each."""
    row, column = torch.arange(float(side))[:, None], torch.arange(float(side))[None]
    return sum(h * (-((row - r) ** 2 + (column - c) ** 2) / (2 * w**2)).exp() for r, c, w, h in where)[None, None]


# Sizes of the channels


def test_each_axis_has_its_own_factor():
    seen = []
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.register_forward_pre_hook(lambda _, x: seen.append(tuple(x[0].shape[-2:])))
    ScaleChannels(net, (0.5, 0.7, 1.0, 1.3)).eval()(torch.rand(1, 2, 21, 33))
    assert seen == [(11, 17), (15, 23), (21, 33), (27, 43)]  # 10.5 and 16.5 are rounded up
    seen.clear()
    ScaleChannels(net, (0.7, 2**0.5)).eval()(torch.rand(1, 2, 45, 35))
    assert seen == [(32, 25), (64, 49)]  # 31.5 and 24.5, although 45 * 0.7 is less in floating point
    row = torch.arange(21.0)[:, None].expand(21, 33)[None, None]
    places = (torch.arange(10) + 0.5) * 2.1 - 0.5  # where the centres of ten pixels lie among 21
    torch.testing.assert_close(resize(row, (10, 16))[0, 0, 2:-2, 5], places[2:-2], rtol=0, atol=0.005)


# Joining


@pytest.mark.parametrize("join", JOINS)
def test_joined_logits_are_those_of_a_loop_over_channels(join):
    net, x = Flat().double().eval(), torch.randn(4, 3, 12, 16, dtype=torch.float64)
    sides = [(6, 8), (12, 16), (20, 27)]
    z = [net(F.interpolate(x, size=s, mode="bicubic", antialias=True) if s != (12, 16) else x).tolist() for s in sides]

    def chance(row, k):
        return math.exp(row[k]) / sum(map(math.exp, row))

    def joined_by_hand(rows):  # what each channel says of one image
        columns = list(zip(*rows, strict=True))
        if join == "confident":
            return max(rows, key=lambda row: max(chance(row, k) for k in range(5)))
        return {
            "mean": [sum(column) / 3 for column in columns],
            "max": list(map(max, columns)),
            "logsumexp": [math.log(sum(map(math.exp, column)) / 3) for column in columns],
            "softmax": [math.log(sum(chance(row, k) for row in rows) / 3) for k in range(5)],
        }[join]

    expected = torch.tensor([joined_by_hand([z[c][b] for c in range(3)]) for b in range(4)], dtype=x.dtype)
    with torch.no_grad():
        joined, sizes = ScaleChannels(net, SCALES, join)(x, return_scales=True)
    torch.testing.assert_close(joined, expected)
    for b in range(4):
        k = int(expected[b].argmax())
        scores = [math.log(chance(z[c][b], k)) if join == "softmax" else z[c][b][k] for c in range(3)]
        if join == "confident":
            scores = [max(chance(z[c][b], k) for k in range(5)) for c in range(3)]
        weights = [math.exp(score - max(scores)) for score in scores]
        mean = sum(-w * math.log(s) for w, s in zip(weights, SCALES, strict=True)) / sum(weights)
        size = 1 / SCALES[scores.index(max(scores))] if join in ("max", "confident") else math.exp(mean)
        assert sizes[b].item() == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize("join", JOINS)
def test_the_number_of_channels_does_not_change_the_level(join):
    class Constant(nn.Module):
        def forward(self, x):
            return torch.tensor([1.0, 2.0]).expand(len(x), 2)

    x = torch.zeros(3, 1, 8, 8)
    for scales in ((1.0,), (0.5, 1.0), (0.5, 1.0, 2.0, 4.0)):
        expected = Constant()(x).log_softmax(1) if join == "softmax" else Constant()(x)
        torch.testing.assert_close(ScaleChannels(Constant(), scales, join)(x), expected)


def test_joined_logits_train_through_cross_entropy():
    model = ScaleChannels(Flat(), SCALES, drop=0.3)
    x, y = torch.randn(16, 3, 12, 12), torch.randint(0, 5, (16,))
    x = x + y.view(-1, 1, 1, 1) * torch.tensor([1.0, 0, -1]).view(3, 1, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(30):
        losses.append(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
    assert losses[-1] < 0.7 * losses[0]


# The size that answered


def test_a_scale_above_one_enlarges_the_image_and_answers_for_smaller_objects():
    """The object fills the image; the network was made for objects of 16 pixels."""
    for side, size in ((32, 2.0), (16, 1.0), (8, 0.5)):
        for join in ("max", "logsumexp"):
            _, sizes = ScaleChannels(Prefers(16), (0.5, 1.0, 2.0), join)(torch.zeros(2, 1, side, side), True)
            assert sizes.tolist() == pytest.approx([size] * 2, rel=0.05 if join == "logsumexp" else 1e-6)


def test_the_size_is_continuous_between_channels():
    model = ScaleChannels(Prefers(48), tuple(2 ** (k / 2) for k in range(-4, 5)))
    sides = range(30, 80, 6)
    sizes = [float(model(torch.zeros(1, 1, n, n), return_scales=True)[1]) for n in sides]
    assert sizes == pytest.approx([n / 48 for n in sides], rel=0.05)


# Dropping


def test_dropping_joins_over_the_channels_that_stay_with_a_draw_for_each_image():
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x, seen = torch.randn(400, 3, 8, 8), []
    net.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    model = ScaleChannels(net, SCALES, "mean", drop=0.6).train()
    z = [net(resize(x, (n, n))) for n in (4, 8, 14)]
    torch.manual_seed(3)
    seen.clear()
    joined = model(x)
    means = {  # of all ways to leave channels out
        kept: torch.stack([z[c] for c in range(3) if kept >> c & 1]).mean(0) for kept in range(1, 8)
    }
    drawn = [
        next(kept for kept, mean in means.items() if torch.allclose(joined[b], mean[b], atol=1e-5)) for b in range(400)
    ]
    stay = [sum(kept >> c & 1 for kept in drawn) / 400 for c in range(3)]
    assert [count / 400 for count in seen] == stay  # what is left out is not computed
    # Each stays with 0.4; all three are left out with 0.6^3, and then one of them stays after all.
    assert stay == pytest.approx([0.4 + 0.6**3 / 3] * 3, abs=0.08)
    assert not torch.equal(joined, model(x))
    wider = model.with_scales(SCALES)
    for one in (model.eval(), wider):  # which shares the network and so its mode
        assert torch.equal(one(x), ScaleChannels(net, SCALES, "mean").eval()(x))


@pytest.mark.parametrize("join", JOINS)
def test_dropping_almost_everything_leaves_one_channel(join):
    model = ScaleChannels(nn.Conv2d(1, 3, 5), (0.5, 1.0, 2.0), join, drop=0.999).train()
    joined, sizes = model(torch.randn(8, 1, 24, 24), return_scales=True)
    joined.sum().backward()
    assert joined.isfinite().all()
    assert sizes.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# Cost


def test_the_cost_is_the_sum_of_the_areas_and_that_of_the_operations():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = ScaleChannels(net, (0.25, 0.5, 1.0, 1.5))
    assert model.cost == 0.0625 + 0.25 + 1 + 2.25
    wide = ScaleChannels(net, model.scales, border=8)
    x, counts = torch.rand(1, 3, 128, 128), []
    for module in (net, model, wide):
        with FlopCounterMode(display=False) as counter:
            module(x)
        counts.append(counter.get_flop_counts()["Global"][torch.ops.aten.convolution])
    assert counts[1] / counts[0] == pytest.approx(model.cost)
    assert counts[2] / counts[0] == pytest.approx(wide.pixels(128, 128) / 128**2)
    assert wide.pixels(128, 128) == 48**2 + 80**2 + 128**2 + 192**2


# Other sizes, copies, files


def test_with_scales_shares_the_network_and_keeps_the_rest():
    model = ScaleChannels(Flat(), SCALES, "max", drop=0.25, grid=(2, 0.5), border=1, border_mode="reflect").eval()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    other = model.with_scales((0.25, 1.0))
    assert (other.scales, model.scales) == ((0.25, 1.0), SCALES)
    assert other.net is model.net
    assert (other.join, other.drop, other.grid, other.training) == ("max", 0.25, (2, 0.5), False)
    x = torch.randn(2, 3, 8, 8)
    expected = ScaleChannels(model.net, (0.25, 1.0), "max", border=1, border_mode="reflect").eval()
    torch.testing.assert_close(other(x), expected(x))
    assert calls == [1]
    assert not other.train().net.training or model.net.training  # one network: its mode is shared
    with pytest.raises(ValueError, match="`scales` must be positive and strictly ascending"):
        model.with_scales((1.0, 0.5))


def test_the_state_dict_is_that_of_the_network():
    net = Flat()
    model = ScaleChannels(net, SCALES)
    assert list(model.state_dict()) == [f"net.{key}" for key in net.state_dict()]
    other = ScaleChannels(Flat(), (0.5, 1.0))
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(other.eval()(x), model.with_scales((0.5, 1.0)).eval()(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent(duplicate):
    model = ScaleChannels(Flat(), SCALES).eval()
    x = torch.randn(2, 3, 9, 9)
    other = duplicate(model)
    assert torch.equal(other(x), model(x))
    with torch.no_grad():
        other.net.head.bias += 1
    assert not torch.equal(other(x), model(x))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), model(x))


def test_batch_norm_keeps_statistics_of_all_channels():
    net = Flat()
    net.features[1].momentum = None  # a plain mean of what it has seen
    model = ScaleChannels(net, (0.5, 1.0, 2.0)).train()
    x = torch.rand(8, 3, 16, 16)
    model(x)
    maps = [net.features[0](resize(x, (n, n)) / net.input_std) for n in (8, 16, 32)]
    pixels = torch.cat([y.movedim(1, -1).flatten(0, -2) for y in maps])
    torch.testing.assert_close(net.features[1].running_mean, pixels.mean(0), rtol=1e-4, atol=1e-5)
    assert int(net.features[1].num_batches_tracked) == 1


def test_steerable_layers_and_dense_networks_inside():
    net = nn.Sequential(ScaleSteerableConv2d(1, 4, 7, padding="same", scales=(1.0, 1.5)), nn.ReLU(), nn.Conv2d(4, 3, 1))
    joined, sizes = ScaleChannels(net, (0.5, 1.0))(torch.randn(2, 1, 30, 33), return_scales=True)
    assert joined.shape == (2, 3, 30, 33)
    assert sizes.shape == (2, 30, 33)


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scales": ()}, ValueError, "`scales` must not be empty"),
        ({"scales": (-1.0, 1.0)}, ValueError, "`scales` must be positive and strictly ascending"),
        ({"scales": (0.0,)}, ValueError, "`scales` must be positive and strictly ascending"),
        ({"scales": (1.0, 1.0)}, ValueError, "`scales` must be positive and strictly ascending"),
        ({"scales": 2.0}, TypeError, r"`scales` must be a sequence of numbers \(got 2.0\)"),
        ({"net": len}, TypeError, r"`net` must be an nn.Module \(got builtin_function_or_method\)"),
        (
            {"join": "sum"},
            ValueError,
            r"`join` must be one of 'mean', 'max', 'logsumexp', 'softmax', 'confident' \(got",
        ),
        ({"drop": 1.0}, ValueError, r"`drop` must be from 0 to below 1 \(got 1.0\)"),
        ({"drop": -0.1}, ValueError, r"`drop` must be from 0 to below 1 \(got -0.1\)"),
        ({"grid": 2}, ValueError, r"`grid` must be \(stride, offset\) \(got 2\)"),
        ({"grid": (0, 1)}, ValueError, r"the stride in `grid` must be positive \(got 0.0\)"),
        ({"border": -1}, ValueError, r"`border` must be at least 0 \(got -1\)"),
        ({"border": 1.5}, TypeError, r"`border` must be an integer \(got 1.5 of"),
        (
            {"border_mode": "circular"},
            ValueError,
            r"`border_mode` must be one of 'zeros', 'replicate', 'reflect' \(got",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        ScaleChannels(**{"net": Flat(), "scales": SCALES, **arguments})


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(3, 8, 8), ValueError, r"4 axes \(B, C, H, W\) \(got shape \(3, 8, 8\)\). add a batch axis"),
        (torch.zeros(8, 8), ValueError, r"4 axes \(B, C, H, W\) \(got shape \(8, 8\)\)"),
        ([1.0], TypeError, r"the input must be a tensor \(got list\)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), TypeError, r"floating-point tensor \(got torch.uint8\)"),
        (torch.zeros(1, 3, 1, 8), ValueError, "the channel of scale 0.25 would show images of 1 x 8 as 0 x 2 pixels"),
        (torch.zeros(1, 2, 8, 8), RuntimeError, "the channel of scale 0.25 shows `net` images of 2 x 2.*channels"),
    ],
)
def test_wrong_input_is_named(x, error, message):
    with pytest.raises(error, match=message):
        ScaleChannels(Flat(), (0.25, 1.0))(x)


def test_a_network_that_refuses_a_size_is_quoted_with_the_channel():
    x = torch.zeros(1, 3, 16, 16)
    with pytest.raises(RuntimeError, match=r"scale 0.25 shows `net` images of 4 x 4 pixels, which failed: .*[Kk]ernel"):
        ScaleChannels(nn.Conv2d(3, 2, 7), (0.25, 1.0))(x)
    layer = ScaleSteerableConv2d(3, 2, 7, scales=(1.0, 1.3))
    with pytest.raises(ValueError, match=r"scale 0.25 shows `net` images of 4 x 4 pixels.*an image of 4 x 4 is too sm"):
        ScaleChannels(layer, (0.25, 1.0))(x)
    with pytest.raises(ValueError, match=r"scale 0.5 shows `net` images of 14 x 14 pixels.*\(B, 1, 28, 28\)"):
        ScaleChannels(create_model("plain-cnn"), (0.5, 1.0))(torch.zeros(1, 1, 28, 28))


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda x: x.mean((1, 2, 3)), ValueError, r"logits \(B, classes\) or maps.*\(got shape \(2,\) from images"),
        (lambda x: x.flatten(2), ValueError, r"\(got shape \(2, 3, 64\) from images of shape \(2, 3, 8, 8\)\)"),
        (lambda x: x.mean(0), ValueError, r"logits \(B, classes\) or maps \(B, classes, h, w\)"),
        (
            lambda x: (x, x),
            TypeError,
            r"must return a tensor of logits or maps \(got tuple of 2\): choose .* by `output`",
        ),
    ],
)
def test_an_output_without_classes_is_told(answer, error, message):
    class Net(nn.Module):
        def forward(self, x):
            return answer(x)

    with pytest.raises(error, match=message):
        ScaleChannels(Net(), (0.5, 1.0))(torch.zeros(2, 3, 16, 16))


def test_what_does_not_fit_memory_names_the_channel():
    class Large(nn.Module):
        def forward(self, x):
            if x.shape[-1] > 20:
                raise torch.OutOfMemoryError("out of memory.")
            return x.mean((2, 3))

    message = r"scale 2 shows `net` images of 32 x 32 pixels.*: out of memory. Leave out the largest of 3 channels, 4"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        ScaleChannels(Large(), (1.0, 2.0, 4.0))(torch.zeros(1, 1, 16, 16))


def test_repr_shows_what_it_was_given():
    assert "scales=(0.5, 1), join='max', drop=0.2" in repr(ScaleChannels(Flat(), (0.5, 1.0), "max", drop=0.2))
    assert "border=3, border_mode='zeros'" in repr(ScaleChannels(Flat(), (0.5, 1.0), border=3))


# Why channels are resized, not steered


@pytest.mark.slow
@pytest.mark.real_data
def test_resizing_keeps_the_answers_of_a_trained_network_better_than_steering_its_filters(real_pools):
    """An object of size f: the image resized by 1 / f, or left as it is and the filters enlarged by f."""
    pool = real_pools["mnist"]
    order = torch.randperm(len(pool.images), generator=torch.Generator().manual_seed(0))[:20_000]
    images, labels = torch.from_numpy(pool.images)[order, None] / 255, torch.from_numpy(pool.labels)[order].long()

    def conv(fan_in, fan_out):
        return ScaleSteerableConv2d(fan_in, fan_out, padding="same", scales=(1.0,), basis="area")

    def canvas(x, factor, side):
        n = round(28 * factor)
        before, after = (side - n) // 2, side - n - (side - n) // 2
        return F.pad(resize(x, (n, n)).clamp(0, 1), (before, after, before, after))

    features = nn.Sequential(conv(1, 16), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), conv(16, 24))
    net = nn.Sequential(
        features, nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(24, 10)
    )
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for step in range(250):
        chosen = slice(32 * step, 32 * step + 32)
        loss = F.cross_entropy(net(canvas(images[chosen], 1, 32)), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    layers = [module for module in net.modules() if isinstance(module, ScaleSteerableConv2d)]
    x, y = images[-500:], labels[-500:]
    right = {"resized": 0, "steered": 0}
    with torch.no_grad():
        assert (net(canvas(x, 1, 32)).argmax(1) == y).float().mean() > 0.6
        for f in (0.59, 0.71, 0.84, 1.19, 1.41, 1.68):
            image = canvas(x, f, 64)
            steered = copy.deepcopy(net, {id(layer): layer.with_scales((f,)) for layer in layers})
            right["resized"] += int((net(resize(image, (round(64 / f),) * 2)).argmax(1) == y).sum())
            right["steered"] += int((steered(image).argmax(1) == y).sum())
    assert right["resized"] > right["steered"] + 20


# The guide


def test_what_the_guide_shows_is_true():
    guide = Path(__file__).parents[1] / "docs" / "guide" / "any-size.md"
    failed, tried = doctest.testfile(str(guide), module_relative=False)
    assert tried >= 7
    assert failed == 0
