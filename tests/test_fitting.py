"""What labelled pictures teach about scale channels: a fitted join, and how many channels are needed."""

import copy
import itertools
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalesteer import ScaleChannels, create_model, fit_join, from_pretrained, save_pretrained
from scalesteer.export import export
from scalesteer.fitting import Looks, at_size, calibration_error, choose, fit_numbers, fit_size, look, measure_sure
from scalesteer.joining import JOINS, Calibration, find_size, join
from scalesteer.nn import evaluation_mode
from scalesteer.resize import border_colour, resize

SCALES = (0.5, 0.71, 1.0, 1.41)
CALIBRATION = Calibration((0.5, 2.0, 1.0), (1.0, -1.0, 0.5), (0.1, 1.5))


class Templates(nn.Module):
    """The best match of each of three patterns of 8 x 8 pixels anywhere in the image, far too certain."""

    def __init__(self, gain=40.0):
        super().__init__()
        patterns = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(5))
        patterns = resize(patterns, (8, 8))
        patterns -= patterns.mean((2, 3), keepdim=True)
        self.patterns = nn.Parameter(patterns / patterns.square().sum((2, 3), keepdim=True).sqrt())
        self.gain = gain

    def forward(self, x):
        return self.gain * F.conv2d(x, self.patterns, padding=3).amax((2, 3)) / 3


def pictures(count=200, size=1.0, noise=0.5, seed=0):
    """A pattern of each class, at this size, amid noise on 24 x 24 pixels."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=draw)
    side = round(8 * size)
    at = resize(Templates().patterns.detach()[labels], (side, side)) * 3 * 8 / side
    x = F.pad(at, (12 - side // 2, 12 - side + side // 2) * 2)
    return x + noise * torch.randn(x.shape, generator=draw), labels


@pytest.fixture(scope="module")
def fitted():
    model = ScaleChannels(Templates(), SCALES).eval()
    before = copy.deepcopy(model)
    return before, model, fit_join(model, *pictures(400))


# The numbers


def test_a_fit_lowers_loss_and_calibration_error_on_pictures_that_it_has_not_seen(fitted):
    before, after, found = fitted
    assert found.calibration == after.calibration is not None
    losses, errors, gaps = [], [], []
    for model in (before, after):
        x, y = pictures(400, seed=1)
        with torch.no_grad():
            said = [(model(at_size(x, size)), y) for size in found.sizes]
        logits, labels = (torch.cat(column) for column in zip(*said, strict=True))
        losses.append(float(F.cross_entropy(logits, labels)))
        errors.append(float((logits.argmax(1) != labels).float().mean()))
        gaps.append(calibration_error(logits.softmax(1).amax(1), logits.argmax(1) == labels))
    assert losses[1] < 0.6 * losses[0]
    assert errors[1] <= errors[0]
    assert gaps[1] < 0.5 * gaps[0]
    # What was held out while it was fitted says the same.
    assert found.error == pytest.approx(errors, abs=0.05)
    assert found.ece == pytest.approx(gaps, abs=0.05)
    assert found.loss == pytest.approx(losses, rel=0.2, abs=0.1)


@pytest.mark.parametrize("kind", JOINS)
@pytest.mark.parametrize("known_share", [0.0, 0.9])
def test_no_small_change_of_the_numbers_has_a_lower_loss(kind, known_share):
    looks = look(ScaleChannels(Templates(), (0.5, 1.0, 2.0), kind), *pictures(60), (0.5, 1.0, 2.0))
    found = fit_numbers(looks, kind, known_share)

    def loss(temperatures, biases):
        own = []
        for f in range(3):
            z = looks.z[:, f].double()
            own.append(float(F.cross_entropy(join(z, kind, None, Calibration(temperatures, biases)), looks.labels)))
        ridge = sum(math.log(t) ** 2 for t in temperatures) + sum(b**2 for b in biases)
        return (1 - known_share) * sum(own) / 3 + known_share * own[1] + 1e-3 * ridge

    best = loss(found.temperatures, found.biases)
    assert best < loss((1.0,) * 3, (0.0,) * 3)
    if kind in ("max", "confident"):  # which are not smooth
        return
    for i, by in itertools.product(range(3), (0.9, 1.1)):
        warmer = tuple(t * by if j == i else t for j, t in enumerate(found.temperatures))
        heavier = tuple(b + by - 1 if j == i else b for j, b in enumerate(found.biases))
        assert loss(warmer, found.biases) > best
        assert kind == "mean" or loss(found.temperatures, heavier) > best


def test_weights_and_gradients_are_left_alone():
    model = ScaleChannels(Templates(), SCALES).train()
    weights = copy.deepcopy(model.state_dict())
    model.net.patterns.grad = torch.ones_like(model.net.patterns)
    with torch.no_grad():  # as loops are after training
        found = fit_join(model, *pictures(400))
    assert found.calibration is not None
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model.net.patterns.grad, torch.ones_like(model.net.patterns))
    assert model.training
    assert model.net.training
    assert model.net.patterns.requires_grad


def test_what_is_not_better_is_not_used():
    """Labels without any relation to the pictures: every fit makes more errors on those held out, or no fewer."""
    model = ScaleChannels(Templates(0.0), SCALES, calibration=None)
    found = fit_join(model, *pictures(100))
    assert model.calibration is found.calibration is None
    assert found.about == "not fitted: it would not be better on pictures held out"
    assert found.error[0] == found.error[1]
    assert found.loss[0] == found.loss[1]


def test_the_order_of_the_pictures_does_not_matter_much():
    """Every second one is of the same class: halves by that order would each miss one."""
    x, labels = pictures(300)
    chosen = torch.stack([torch.where(labels == k)[0][:80] for k in (0, 1)], 1).flatten()
    found = fit_join(ScaleChannels(Templates(), SCALES), x[chosen], labels[chosen], (1.0,))
    shuffled = chosen[torch.randperm(160, generator=torch.Generator().manual_seed(3))]
    again = fit_join(ScaleChannels(Templates(), SCALES), x[shuffled], labels[shuffled], (1.0,))
    assert found.loss == pytest.approx(again.loss, abs=0.1)
    assert found.calibration is not None
    assert again.calibration is not None


class Misled(nn.Module):
    """Knows the class in every image; in one that was shrunk it is sure of the next class."""

    def __init__(self, channel_is_right):
        super().__init__()
        self.channel_is_right = channel_is_right

    def forward(self, x):
        label = x.amax((1, 2, 3)).mul(4).round().long() - 1
        own = F.one_hot(label, 3).float()
        shrunk = x.shape[-1] < 24
        return 2 * own if self.channel_is_right or not shrunk else 9 * own.roll(1, 1)


def test_a_channel_that_is_always_wrong_gets_no_say():
    labels = torch.arange(60) % 3
    x = ((labels + 1.0) / 4).view(-1, 1, 1, 1).expand(60, 1, 24, 24)
    model = ScaleChannels(Misled(False), (0.5, 1.0))
    assert (model(x).argmax(1) != labels).all()
    found = fit_join(model, x, labels, (1.0,))
    assert (found.alone_error, found.known_error) == (0.0, (1.0, 0.0))
    assert (model(x).argmax(1) == labels).all()
    assert model.calibration.biases[0] < model.calibration.biases[1]


def test_a_fit_that_costs_more_than_half_a_point_at_the_known_size_is_not_used(monkeypatch):
    """The small channel is right at size 2, where the other guesses; at size 1 it is wrong in 3 of 100 pictures."""
    labels, rows = torch.arange(400) % 2, torch.arange(400)
    right, wrong = F.one_hot(labels, 2).float(), F.one_hot(1 - labels, 2).float()
    rarely, often = (rows % 100 < 3)[:, None], (rows // 2 % 2 == 0)[:, None]
    small = torch.stack([torch.where(rarely, 6 * wrong, 3 * right), 3 * right])
    usual = torch.stack([2 * right, 6 * torch.where(often, wrong, right)])
    looks = Looks(torch.stack([small, usual]), 2 * right, labels, (0.5, 1.0), (1.0, 2.0))
    monkeypatch.setattr("scalesteer.fitting.KNOWN_SHARES", (0.0,))
    found = choose(looks, "logsumexp")
    assert found.calibration is None or found.calibration.temperatures == (1.0, 1.0)
    assert "not fitted: at size 1 it would have more than 0.5 points more error than the network alone" in found.about
    assert found.error[0] == found.error[1] > 0.25
    assert found.known_error == (0.03, 0.03)
    monkeypatch.setattr("scalesteer.fitting.ROOM", 0.04)  # what would have been used
    assert choose(looks, "logsumexp").error[1] < 0.05


def test_a_fit_that_helps_at_the_known_size_is_used_though_the_network_alone_is_better_there(monkeypatch):
    labels = torch.arange(60) % 3
    x = ((labels + 1.0) / 4).view(-1, 1, 1, 1).expand(60, 1, 24, 24)
    monkeypatch.setattr("scalesteer.fitting.ROOM", -0.1)  # nothing is so good
    found = fit_join(ScaleChannels(Misled(False), (0.5, 1.0)), x, labels, (1.0,))
    assert found.about.startswith("fitted: better than the plain join, but at size 1 not as good as the network alone")
    assert found.known_error == (1.0, 0.0)
    again = fit_join(ScaleChannels(Misled(True), (0.5, 1.0)), x, labels, (1.0,))  # the plain join makes no error either
    assert again.about.startswith("not fitted: at size 1")


@pytest.mark.parametrize("shares", [None, (0.95,)])
def test_a_fit_that_helps_at_the_known_size_alone_is_not_used(monkeypatch, shares):
    """The small channel, which is wrong at size 1 more often, is the only one that is right at size 2."""
    labels, rows = torch.arange(400) % 2, torch.arange(400)
    right, wrong = F.one_hot(labels, 2).float(), F.one_hot(1 - labels, 2).float()
    small = torch.stack([torch.where((rows % 100 < 20)[:, None], 6 * wrong, 3 * right), 3 * right])
    usual = torch.stack([2 * right, 2 * wrong])
    looks = Looks(torch.stack([small, usual]), 2 * right, labels, (0.5, 1.0), (1.0, 2.0))
    if shares:
        monkeypatch.setattr("scalesteer.fitting.KNOWN_SHARES", shares)
    found = choose(looks, "logsumexp")
    assert found.error[1] <= found.error[0]
    assert found.known_error[1] <= found.known_error[0]


# The size


def test_sizes_are_corrected_so_that_their_medians_are_true(fitted):
    before, after, found = fitted
    assert found.size_error[1] < found.size_error[0]
    for size in (0.71, 1.0, 1.41):
        x, _ = pictures(seed=2)
        raw, own = (model(at_size(x, size), return_scales=True)[1].median().item() for model in (before, after))
        assert abs(math.log(own / size)) < 0.12
    assert raw != own


def test_the_correction_rises_with_the_size_and_changes_nothing_else():
    z = torch.randn(3, 50, 4)
    said = join(z, "logsumexp", None, CALIBRATION)
    plain = find_size(z, said, "logsumexp", None, (0.5, 1.0, 2.0), replace(CALIBRATION, size=(0.0, 1.0)))
    corrected = find_size(z, said, "logsumexp", None, (0.5, 1.0, 2.0), CALIBRATION)
    torch.testing.assert_close(corrected, math.exp(0.1) * plain**1.5)
    assert torch.equal(plain.argsort(), corrected.argsort())


def test_a_line_through_medians_is_found_again_and_none_where_sizes_hardly_differ():
    sizes = (0.5, 1.0, 2.0)
    found = torch.tensor([[0.6, 0.7, 9.0], [0.8, 1.1, 1.2], [0.01, 1.6, 1.7]]).log()  # medians 0.7, 1.1, 1.6
    offset, slope = fit_size(found, sizes)
    expected = np.polyfit(np.log([0.7, 1.1, 1.6]), np.log(sizes), 1)
    assert (slope, offset) == pytest.approx(expected)
    assert fit_size(found.flip(0), sizes) is None
    assert fit_size(0.1 * found, sizes) is None


# What a network with a calibration computes


@pytest.mark.parametrize("kind", JOINS)
@pytest.mark.parametrize("dropped", [False, True])
def test_calibrated_logits_are_those_of_a_loop(kind, dropped):
    z = torch.randn(3, 20, 4, dtype=torch.float64)
    kept = torch.rand(3, 20, 1) < 0.6 if dropped else torch.ones(3, 20, 1, dtype=torch.bool)
    kept[0] |= ~kept.any(0)
    found = join(z, kind, kept if dropped else None, CALIBRATION)
    for b in range(20):
        rows = []
        for c in range(3):
            row = [value / CALIBRATION.temperatures[c] for value in z[c, b].tolist()]
            if kind == "softmax":
                row = [value - math.log(sum(map(math.exp, row))) for value in row]
            if kept[c, b]:
                rows.append([value + CALIBRATION.biases[c] for value in row])
        weights = [math.exp(CALIBRATION.biases[c]) for c in range(3) if kept[c, b]]
        columns = list(zip(*rows, strict=True))
        expected = {
            "mean": [sum(column) / len(rows) for column in columns],
            "max": list(map(max, columns)),
            "confident": max(rows, key=lambda row: math.exp(max(row)) / sum(map(math.exp, row))),
        }.get(kind) or [math.log(sum(map(math.exp, column)) / sum(weights)) for column in columns]
        torch.testing.assert_close(found[b], torch.tensor(expected, dtype=torch.float64))


def test_the_plain_calibration_and_none_are_the_same_and_none_undoes_it(fitted):
    before, after, _ = fitted
    x, _ = pictures(20)
    with torch.no_grad():
        expected = before(x, return_scales=True)
        same = ScaleChannels(before.net, SCALES, calibration=Calibration((1.0,) * 4, (0.0,) * 4)).eval()
        torch.testing.assert_close(same(x, return_scales=True), expected)
        undone = copy.deepcopy(after)
        assert not torch.allclose(undone(x), expected[0])
        undone.calibration = None
        assert torch.equal(undone(x), expected[0])


def test_other_scales_interpolate_a_calibration_and_leave_it_out_beyond():
    model = ScaleChannels(Templates(), (0.5, 1.0, 2.0), calibration=CALIBRATION)
    assert model.with_scales((0.5, 1.0, 2.0)).calibration == CALIBRATION
    between = model.with_scales((0.5, 2**-0.5, 2.0)).calibration
    assert between.temperatures == pytest.approx((0.5, 1.25, 1.0))
    assert between.biases == pytest.approx((1.0, 0.0, 0.5))
    assert between.size == CALIBRATION.size
    assert model.with_scales((0.4, 1.0)).calibration is model.with_scales((1.0, 2.1)).calibration is None


def test_a_calibration_goes_through_torch(tmp_path):
    model = create_model("pooled-cnn", channels=(0.5, 0.7, 1.0), widths=(4,), subsample=(), kernel_size=5).eval()
    x = torch.rand(3, 1, 20, 20)
    plain = model(x)
    model.calibration = CALIBRATION
    with torch.no_grad():
        expected = model(x, return_scales=True)
        assert not torch.allclose(expected[0], plain)
        other = from_pretrained(save_pretrained(model, tmp_path / "net"))
        assert other.calibration == CALIBRATION
        assert all(map(torch.equal, other(x, return_scales=True), expected))
        assert copy.deepcopy(model).calibration == CALIBRATION
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, return_scales=True), expected)
        export(model, tmp_path / "net.pt2", to="pt2", examples=x)  # which checks it
        program = torch.export.load(tmp_path / "net.pt2").module()
        torch.testing.assert_close(program(x), expected[0])
    told = json.loads((tmp_path / "net/config.json").read_text())["arguments"]["calibration"]
    assert told == json.loads(json.dumps(asdict(CALIBRATION)))
    assert "calibration=Calibration(temperatures=(0.5, 2.0, 1.0)" in repr(model)
    assert list(model.state_dict()) == [f"net.{name}" for name in model.net.state_dict()]


def test_a_calibrated_network_trains():
    model = ScaleChannels(Templates(1.0), (0.5, 1.0, 2.0), drop=0.5, calibration=CALIBRATION).train()
    x, labels = pictures(8)
    F.cross_entropy(model(x), labels).backward()
    assert model.net.patterns.grad.abs().sum() > 0


# No more channels than needed


@pytest.mark.parametrize("kind", JOINS)
def test_a_threshold_of_one_is_the_full_network_and_a_low_one_the_cheapest_channel(kind):
    model = ScaleChannels(Templates(), SCALES, kind, calibration=Calibration((2.0, 1, 1, 3), (0, 1.0, 0, 0)))
    x, _ = pictures(30)
    with torch.no_grad():
        full = model.eval()(x, return_scales=True)
        model.sure = 1.0
        assert all(map(torch.equal, model(x, return_scales=True), full))
        model.sure = 0.01
        first = ScaleChannels(model.net, SCALES[:1], kind, calibration=model.calibration.first(1)).eval()
        for found, expected in zip(model(x, return_scales=True), first(x, return_scales=True), strict=True):
            torch.testing.assert_close(found, expected)


def test_a_channel_is_computed_only_for_images_that_are_not_sure_yet(fitted):
    _, model, _ = fitted
    seen, (x, _) = [], pictures(60, size=1.2)
    handle = model.net.register_forward_pre_hook(lambda _, inputs: seen.append((inputs[0].shape[-1], len(inputs[0]))))
    adaptive = copy.copy(model)
    adaptive.sure = 0.9
    with torch.no_grad():
        found, sizes = adaptive(x, return_scales=True)
    handle.remove()
    z, expected, counts = model.ask_channels(x), [None] * 60, [0] * 4
    for b in range(60):
        for c in range(4):
            counts[c] += 1
            said = join(z[: c + 1, b : b + 1], "logsumexp", None, model.calibration.first(c + 1))
            if said.softmax(1).max() >= 0.9:
                break
        size = find_size(
            z[: c + 1, b : b + 1], said, "logsumexp", None, SCALES[: c + 1], model.calibration.first(c + 1)
        )
        expected[b] = said[0], size[0]
    assert 60 == counts[0] > counts[2] > counts[3] > 0  # the test would be void
    assert seen == [(round(24 * s), n) for s, n in zip(SCALES, counts, strict=True)]
    torch.testing.assert_close(found, torch.stack([said for said, _ in expected]))
    torch.testing.assert_close(sizes, torch.stack([size for _, size in expected]))


def test_cost_and_error_are_those_of_the_network_itself(fitted):
    _, model, _ = fitted
    x, labels = pictures(100, size=1.2)
    adaptive, trades = copy.copy(model), measure_sure(model, x, labels, (0.6, 0.9, 1.0))
    for sure, cost, error in trades:
        pixels = []
        handle = model.net.register_forward_pre_hook(lambda _, inputs, seen=pixels: seen.append(inputs[0].numel()))
        adaptive.sure = sure
        with torch.no_grad():
            wrong = adaptive(x).argmax(1) != labels
        handle.remove()
        assert error == pytest.approx(float(wrong.float().mean()))
        assert cost == pytest.approx(sum(pixels) / (100 * model.pixels(24, 24)), rel=0.02)  # whole pixels
    costs = [cost for _, cost, _ in trades]
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(1)


def test_training_and_traced_programs_compute_all_channels(tmp_path):
    options = {"channels": (0.7, 1.0), "widths": (4,), "subsample": (), "kernel_size": 5}
    model = create_model("pooled-cnn", sure=0.01, **options).eval()
    x = torch.rand(4, 1, 20, 20)
    full = ScaleChannels(model.net, model.scales).eval()
    with torch.no_grad():
        assert not torch.allclose(model(x), full(x))
        expected = full(x)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), expected)
        export(model, tmp_path / "net.pt2", to="pt2", examples=x)
        torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(x), expected)
        assert model.sure == 0.01
    assert model.arguments["sure"] == from_pretrained(save_pretrained(model, tmp_path / "net")).sure == 0.01
    assert "sure=0.01" in repr(model)
    with torch.no_grad():
        model.train()
        torch.testing.assert_close(model(x), full.train()(x), rtol=1e-3, atol=1e-3)


# Measures and pictures


def test_calibration_error_is_that_of_a_loop_over_bins():
    draw = torch.Generator().manual_seed(0)
    confidences, right = torch.rand(500, generator=draw), torch.rand(500, generator=draw) < 0.6
    confidences[0] = 1.0
    expected = 0.0
    for i in range(15):
        rows = [b for b in range(500) if i / 15 <= confidences[b] < (i + 1) / 15 or (i == 14 and confidences[b] == 1)]
        if rows:
            gap = sum(confidences[b].item() - right[b].item() for b in rows) / len(rows)
            expected += len(rows) / 500 * abs(gap)
    assert calibration_error(confidences, right) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("size", [0.4, 0.71, 1.0, 1.3])
def test_pictures_at_another_size_stand_amid_the_colour_of_their_border(size):
    x = torch.rand(2, 3, 20, 31)
    x[..., 0, :], x[..., -1, :] = 0.25, 0.25
    found, inner = at_size(x, size), resize(x, (round(20 * size), round(31 * size)))
    assert found.shape[-2:] == (max(20, inner.shape[-2]), max(31, inner.shape[-1]))
    top, left = (found.shape[-2] - inner.shape[-2]) // 2, (found.shape[-1] - inner.shape[-1]) // 2
    box = found[..., top : top + inner.shape[-2], left : left + inner.shape[-1]]
    torch.testing.assert_close(box, inner)
    if size < 1:
        assert torch.equal(found[..., 0, 0], border_colour(x).flatten(1))
        assert torch.equal(found[..., -1, -1], border_colour(x).flatten(1))


# Errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Calibration((0.0, 1.0), (0.0, 0.0)), ValueError, r"`temperatures` must be positive \(got \(0.0, 1.0"),
        (lambda: Calibration((1.0,), (0.0, 0.0)), ValueError, r"`biases` must be as many .* \(got 2 for 1 `temper"),
        (lambda: Calibration((math.nan,), (0.0,)), ValueError, r"`temperatures\[0\]` must be finite"),
        (lambda: Calibration((1.0,), (0.0,), (0.0, -1.0)), ValueError, "`size` must be two numbers, the second posit"),
        (
            lambda: ScaleChannels(Templates(), (0.5, 1.0), calibration=CALIBRATION),
            ValueError,
            "for 2 channels, as many",
        ),
        (
            lambda: ScaleChannels(Templates(), (0.5,), calibration="yes"),
            TypeError,
            r"a Calibration or None \(got 'yes'",
        ),
        (lambda: ScaleChannels(Templates(), (0.5,), sure=0), ValueError, r"`sure` must be above 0 .* \(got 0.0\)"),
        (lambda: ScaleChannels(Templates(), (0.5,), sure=1.1), ValueError, "`sure` must be above 0 and at most 1"),
        (lambda: fit_join(Templates(), *pictures(40)), TypeError, r"must be a ScaleChannels \(got Templates\)"),
        (lambda: fit_join(channels(), *pictures(19)), ValueError, r"`images` must be at least 20 \(got 19\)"),
        (lambda: fit_join(channels(), *pictures(40), (-1.0,)), ValueError, r"`sizes` must be positive \(got"),
        (lambda: fit_join(channels(), pictures(40)[0], torch.zeros(40)), ValueError, "`labels` must be whole numbers"),
        (lambda: fit_join(ScaleChannels(nn.Conv2d(1, 3, 3), (1.0,)), *pictures(40)), ValueError, r"\(got maps, of"),
        (lambda: adaptive_maps(), ValueError, r"`sure` \(got 0.5\) is for networks that return logits"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def channels():
    return ScaleChannels(Templates(), (0.5, 1.0))


def adaptive_maps():
    with evaluation_mode(model := ScaleChannels(nn.Conv2d(1, 3, 3), (0.5, 1.0), sure=0.5)):
        return model(torch.rand(2, 1, 8, 8))
