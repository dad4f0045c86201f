"""Backends against a naive loop and against each other; the maximum over scales; what must survive."""

import gc
import itertools
import math

import numpy as np
import pytest
import torch

from scalesteer import LogRadialBasis, ScaleSteerableConv2d, fast, fold, functional
from scalesteer.fast.maximum import running_maximum
from scalesteer.fast.memory import Cache
from scalesteer.geometry import Filters, Geometry
from scalesteer.harmonics import PAPER_SCALES
from tests import reference

SCALES = (0.6, 1.0, 1.8)  # windows of 3, 5 and 9 for a kernel of 5
SHAPES = ((13, 13), (14, 14), (13, 16), (16, 15))
MODES = functional.PADDING_MODES
BACKENDS = ("direct", "fast")
# One lobe, so that filters are not point-symmetric; two orientations are opposite, one has no mirror image.
ONE_LOBE = LogRadialBasis(orientations=(0.3, 0.3 + math.pi, 2.0), sigma=0.6, lobes="single")
both_symmetries = pytest.mark.parametrize("basis", ["paper", ONE_LOBE], ids=["symmetric", "one lobe"])


def build(backend="direct", dtype=torch.float64, channels=4, **arguments):
    torch.manual_seed(1)
    arguments = {"kernel_size": 5, "scales": SCALES, "padding": 2, "basis": "paper", **arguments}
    layer = ScaleSteerableConv2d(channels, 6, dtype=dtype, backend=backend, **arguments)
    torch.nn.init.normal_(layer.bias)
    return layer


def largest_difference(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kernel_size", [3, 7])
def test_the_default_layer_has_the_same_numbers_with_both_backends(channels, kernel_size):
    layer = ScaleSteerableConv2d(channels, 4, kernel_size, padding="same", dtype=torch.float64)
    x, results = torch.randn(2, channels, 24, 21, dtype=torch.float64), []
    for layer.backend in BACKENDS:
        layer.zero_grad()
        y, winner = layer(x, return_scales=True)
        y.square().sum().backward()
        results.append((y, winner.double(), layer.coefficients.grad))
    for expected, actual in zip(*results, strict=True):
        assert largest_difference(actual, expected) < 1e-10
    assert len(results[0][1].unique()) > 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("stride", "dilation", "groups"), [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 2)])
@both_symmetries
def test_direct_equals_a_naive_loop(stride, dilation, groups, mode, basis):
    layer = build(stride=stride, dilation=dilation, groups=groups, padding_mode=mode, reduce=None, basis=basis)
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64)
    filters = [f.detach().numpy() for f in layer.filters()]
    expected = reference.convolve(x.numpy(), filters, stride, 2, dilation, groups, mode, 5)
    expected = np.stack(expected, axis=2) + layer.bias.detach().numpy()[:, None, None, None]
    assert largest_difference(layer(x), torch.tensor(expected)) < 1e-10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@both_symmetries
def test_fast_equals_direct(mode, shape, dtype, tolerance, basis):
    for stride, dilation, groups, reduce in itertools.product((1, 2), (1, 2), (1, 2), ("max", None)):
        arguments = {"stride": stride, "dilation": dilation, "groups": groups, "padding_mode": mode, "reduce": reduce}
        x = torch.randn(2, 4, *shape, dtype=dtype)
        direct, fast = (build(backend, dtype, basis=basis, **arguments)(x) for backend in BACKENDS)
        assert fast.dtype == dtype
        assert largest_difference(fast, direct) < tolerance, arguments


@pytest.mark.parametrize("padding", ["same", "valid", 0, 1, (3, 0), (0, 4)])
@pytest.mark.parametrize("dilation", [1, (2, 1)])
def test_output_shape_is_that_of_conv2d_and_backends_agree(padding, dilation):
    x = torch.randn(1, 4, 17, 14, dtype=torch.float64)
    plain = torch.nn.Conv2d(4, 6, 5, padding=padding, dilation=dilation, dtype=torch.float64)(x)
    direct, fast = (build(backend, padding=padding, dilation=dilation)(x) for backend in BACKENDS)
    assert direct.shape == fast.shape == plain.shape
    assert largest_difference(fast, direct) < 1e-10


def test_one_scale_without_steering_is_conv2d():
    layer = build(scales=(1.0,))
    x = torch.randn(2, 4, 11, 12, dtype=torch.float64)
    plain = torch.nn.functional.conv2d(x, layer.filters()[0], layer.bias, padding=2)
    torch.testing.assert_close(layer(x), plain)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 4)])
def test_images_smaller_than_the_filter_give_right_values(backend, mode, shape):
    layer = build(backend, padding_mode=mode, reduce=None)
    x = torch.randn(2, 4, *shape, dtype=torch.float64)
    expected = reference.convolve(x.numpy(), [f.detach().numpy() for f in layer.filters()], 1, 2, 1, 1, mode, 5)
    expected = np.stack(expected, axis=2) + layer.bias.detach().numpy()[:, None, None, None]
    assert largest_difference(layer(x), torch.tensor(expected)) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("mode", "small", "enough"), [("reflect", 4, 5), ("circular", 3, 4)])
def test_images_too_small_for_reflect_and_circular_name_the_limit(backend, mode, small, enough):
    layer = build(backend, padding_mode=mode)
    message = rf"padding_mode='{mode}' cannot fill 4 rows and 4 columns beyond an image of {small} x 9"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(1, 4, small, 9, dtype=torch.float64))
    assert layer(torch.randn(1, 4, enough, 9, dtype=torch.float64)).shape[-2] == enough


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("mode", "basis"), [("zeros", ONE_LOBE), ("zeros", "paper"), ("circular", "paper")])
def test_gradcheck_and_gradgradcheck(backend, mode, basis):
    layer = ScaleSteerableConv2d(
        2, 2, 3, 2, 1, 1, 2, padding_mode=mode, scales=(1.0, 5 / 3), basis=basis, dtype=torch.float64, backend=backend
    )
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    coefficients = torch.randn_like(layer.coefficients, requires_grad=True)
    bias = torch.randn_like(layer.bias, requires_grad=True)

    def apply(x, coefficients, bias):
        return torch.func.functional_call(layer, {"coefficients": coefficients, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(apply, (x, coefficients, bias))
    assert torch.autograd.gradgradcheck(apply, (x, coefficients, bias))


@both_symmetries
def test_gradients_of_backends_agree(basis):
    x = torch.randn(3, 4, 14, 15, dtype=torch.float64)
    grads = []
    for name in BACKENDS:
        layer = build(name, basis=basis)
        layer(x).square().sum().backward()
        grads.append(layer.coefficients.grad)
    assert largest_difference(grads[1], grads[0]) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
def test_winner_is_the_scale_of_the_largest_response(backend):
    x = torch.randn(2, 4, 14, 13, dtype=torch.float64)
    everything = build(backend, reduce=None)(x)
    best, winner = build(backend)(x, return_scales=True)
    assert winner.dtype == torch.int64
    torch.testing.assert_close(best, everything.amax(2))
    assert torch.equal(winner, everything.argmax(2))
    assert len(winner.unique()) == 3


def test_ties_go_to_the_lowest_scale_with_the_whole_gradient():
    responses = [torch.zeros(1, 1, 2, 2, requires_grad=True) for _ in range(3)]
    best, winner = running_maximum(iter(responses), 3, return_scales=True)
    best.sum().backward()
    assert torch.equal(winner, torch.zeros(1, 1, 2, 2, dtype=torch.int64))
    assert torch.equal(responses[0].grad, torch.ones(1, 1, 2, 2))
    assert not responses[1].grad.any()
    assert not responses[2].grad.any()


@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 2, "stride": 2}, {"padding": 9, "dilation": 2}, {"padding": "valid"}, {"padding_mode": "reflect"}],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lowest_scale_wins_where_the_window_is_blank(backend, options):
    layer = build(backend, **options)
    x = torch.zeros(2, 4, 40, 44, dtype=torch.float64)
    x[0, 1, 8:11, 30:34] = 1
    _, winner = layer(x, return_scales=True)
    assert not winner[1].any()
    reaches = build("direct", reduce=None, **options)
    reaches.load_state_dict(layer.state_dict())
    torch.nn.init.zeros_(reaches.bias)
    blank = (reaches(x) == 0).all(2)
    assert 0.5 < blank.double().mean() < 1
    assert not winner[blank].any()


def results(layer, image):
    """Winners, and gradients of image and coefficients."""
    image = image.clone().requires_grad_()
    layer.zero_grad()
    out, winner = layer(image, return_scales=True)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    (out * weight).sum().backward()
    return winner, image.grad, layer.coefficients.grad


def assert_same_ties(image, **arguments):
    direct, quick = (results(build(backend, image.dtype, image.shape[1], **arguments), image) for backend in BACKENDS)
    assert torch.equal(quick[0], direct[0])
    for found, expected in zip(quick[1:], direct[1:], strict=True):
        assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("channels", [1, 8, 30, 60])
@both_symmetries
def test_where_parts_are_blank_winners_and_gradients_are_those_of_direct(channels, basis):
    x = torch.rand(2, channels, 32, 32)
    x[..., :20] = 0
    assert_same_ties(x, kernel_size=7, padding=3, scales=tuple(n / 7 for n in range(7, 18, 2)), basis=basis)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"dilation": 2, "padding": (7, 1)},
        {"groups": 2},
        {"padding": 9},
        {"padding_mode": "circular"},
        {"padding": "valid"},
        {"kernel_size": 3, "scales": (1.0, 1.7), "padding": 1},  # filters are multiplied out first
    ],
)
@both_symmetries
def test_ties_in_blank_parts_hold_for_every_geometry(options, basis):
    x = torch.rand(2, 4, 37, 34, dtype=torch.float64)
    x[..., :20] = 0
    x[0, :2] = 0  # one group is blank everywhere
    x[1, 1:3, 30:] = 0  # some channels are
    assert_same_ties(x, basis=basis, **options)


@both_symmetries
def test_ties_in_blank_parts_of_images_that_are_cut_into_tiles(basis):
    x = torch.rand(1, 4, 90, 120, dtype=torch.float64)
    x[..., 10:70] = 0
    assert_same_ties(x, basis=basis)


@pytest.mark.parametrize("channels", [1, 4])
def test_a_window_is_blank_where_a_filter_with_taps_on_one_side_sees_zeros(channels):
    sizes, geometry = (3, 5, 7), Geometry(3, padding=(1, 1))
    windows = [torch.randn(5, channels, n, n, dtype=torch.float64) for n in sizes]
    for window in windows:
        window[..., : window.shape[-1] // 2 + 1] = 0  # only what lies to the right of the centre is seen
    filters = Filters(torch.cat([w.flatten(2) for w in windows], dim=2), None, sizes, symmetric=False)
    x = torch.zeros(1, channels, 12, 20, dtype=torch.float64)
    x[..., 10] = torch.rand(12, dtype=torch.float64) + 0.1
    found = [functional.scale_conv2d(x, filters, None, geometry, backend=b, return_scales=True) for b in BACKENDS]
    torch.testing.assert_close(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])
    assert found[0][1].any()
    assert not found[1][0][..., 10:].any()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward AD
@both_symmetries
def test_ties_in_blank_parts_hold_for_plain_operations_too(basis):
    x = torch.rand(1, 4, 20, 24, dtype=torch.float64)
    x[..., :14] = 0
    tangent = torch.randn_like(x)
    found = []
    for backend in BACKENDS:
        layer = build(backend, basis=basis)
        gradient = torch.func.grad(lambda x, layer=layer: layer(x).square().sum())(x)
        found.append((gradient, torch.func.jvp(layer, (x,), (tangent,))[1]))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


def test_no_map_of_blank_windows_is_made_where_none_is_blank(monkeypatch):
    def fail(*_):
        raise AssertionError("no window is blank")

    monkeypatch.setattr(fast.spectral, "blank_scales", fail)
    x = torch.rand(2, 4, 20, 20, dtype=torch.float64) + 0.1
    x[:, 0] = 0  # not all channels are blank
    build("fast")(x, return_scales=True)
    x[:, :, 5, 5] = 0
    with pytest.raises(AssertionError, match="no window is blank"):
        build("fast")(x, return_scales=True)
    with torch.no_grad():
        build("fast")(x)


def test_more_scales_than_a_byte_can_count():
    taps = torch.linspace(-1, 1, 300, dtype=torch.float64).repeat_interleave(9).expand(1, 1, -1)
    x = torch.rand(1, 1, 6, 6, dtype=torch.float64) + 0.1
    filters, geometry = Filters(taps, None, (3,) * 300), Geometry(3, padding=(1, 1))
    for backend in BACKENDS:
        best, winner = functional.scale_conv2d(x, filters, None, geometry, backend=backend, return_scales=True)
        assert (winner == 299).all()
        torch.testing.assert_close(best, torch.nn.functional.avg_pool2d(x, 3, 1, 1) * 9)


@pytest.mark.parametrize(
    ("backend", "channels", "stride", "basis"),
    [
        ("fast", 4, 2, ONE_LOBE),
        ("auto", 1, 1, "paper"),
        *(pytest.param("fast", 1, stride, "paper", marks=pytest.mark.slow) for stride in (1, 2)),
        *(pytest.param("auto", 4, stride, "paper", marks=pytest.mark.slow) for stride in (1, 2)),
        pytest.param("auto", 1, 2, "paper", marks=pytest.mark.slow),
        pytest.param("fast", 4, 1, "paper", marks=pytest.mark.slow),
    ],
)
def test_exports_with_any_height_and_width(backend, channels, stride, basis):
    layer = build(backend, torch.float32, channels, stride=stride, basis=basis)
    batch, height, width = (
        torch.export.Dim(name, min=least, max=300) for name, least in (("batch", 1), ("height", 16), ("width", 16))
    )
    shapes = ({0: batch, 2: height, 3: width},)
    program = torch.export.export(layer, (torch.randn(2, channels, 40, 44),), dynamic_shapes=shapes).module()
    for size in ((40, 44), (23, 50), (64, 31)):
        x = torch.randn(3, channels, *size)
        torch.testing.assert_close(program(x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padding", [2, 12])
def test_a_window_that_lies_beyond_the_image_is_blank_too(backend, padding):
    x = torch.rand(1, 4, 20, 20, dtype=torch.float64) + 0.1
    winner, expected = (build(b, padding=padding)(x, return_scales=True)[1] for b in (backend, "direct"))
    beyond = max(0, padding - 2 - 4)  # the largest window reaches 4 pixels, the disc no further
    assert not winner[..., :beyond, :].any()
    assert torch.equal(
        winner[..., padding:-padding, padding:-padding], expected[..., padding:-padding, padding:-padding]
    )


@pytest.mark.parametrize("padding", [(12, 2), (2, 12)])
def test_a_window_may_lie_beyond_the_image_along_one_axis(padding):
    assert_same_ties(torch.rand(1, 4, 20, 20, dtype=torch.float64) + 0.1, padding=padding)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@both_symmetries
def test_non_finite_pixels_show_wherever_a_window_holds_them(backend, channels, value, basis):
    layer = build(backend, channels=channels, basis=basis)
    x = torch.randn(1, channels, 25, 25, dtype=torch.float64)
    x[0, -1, 12, 12] = value
    reached = torch.zeros(25, 25, dtype=torch.bool)
    ticks = torch.arange(25) - 12
    reached[(ticks[:, None] ** 2 + ticks**2).sqrt() <= 2.5 * SCALES[-1]] = True
    assert not layer(x)[..., reached].isfinite().any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_flat_images_give_finite_output_and_gradients(backend, value):
    layer = build(backend)
    x = torch.full((1, 4, 12, 12), value, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.isfinite().all()
    for tensor in (x, layer.coefficients, layer.bias):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduce", ["max", None])
def test_empty_batch_gives_an_empty_output_and_backward_works(backend, reduce):
    layer = build(backend, reduce=reduce)
    x = torch.empty(0, 4, 12, 12, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.shape == ((0, 6, 12, 12) if reduce else (0, 6, 3, 12, 12))
    assert x.grad.shape == x.shape
    assert not layer.coefficients.grad.any()


LAYOUTS = {
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "strided": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 4])
def test_memory_layout_does_not_matter(backend, layout, channels):
    layer = ScaleSteerableConv2d(
        channels, 6, 5, padding=2, scales=SCALES, dtype=torch.float64, backend=backend, basis="paper"
    )
    base = torch.randn(1, channels, 12, 12, dtype=torch.float64).repeat(2, 1, 1, 1)
    results = []
    for make in (lambda x: x.clone(), LAYOUTS[layout]):
        x = base.clone().requires_grad_()
        out = layer(make(x))
        out.square().sum().backward()
        expected_grad = x.grad if layout != "expanded" else x.grad.sum(0)
        results.append((out.detach(), expected_grad))
    for first, second in zip(*results, strict=True):
        assert largest_difference(second, first) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_input_is_not_modified(backend):
    x = torch.randn(2, 4, 12, 12, dtype=torch.float64)
    before = x.clone()
    build(backend)(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [1, 4])
def test_batch_of_one_equals_batch_of_many(backend, channels):
    layer = build(backend, torch.float32, channels)
    x = torch.randn(64, channels, 14, 14)
    many, winners = layer(x, return_scales=True)
    one, winner = layer(x[5:6], return_scales=True)
    assert largest_difference(one, many[5:6]) < 1e-5
    assert torch.equal(winner, winners[5:6])


def test_auto_gives_the_numbers_of_both(monkeypatch):
    x = torch.randn(1, 4, 40, 40, dtype=torch.float64)
    expected = build("direct")(x)
    for choice in BACKENDS:
        monkeypatch.setattr(fast, "choose_backend", lambda *_, choice=choice, **__: choice)
        monkeypatch.setattr(functional, "_arrangements", Cache(1))
        assert largest_difference(build("auto")(x), expected) < 1e-10


@pytest.mark.parametrize(("count", "scales", "expected"), [(3, 1, "direct"), (4, 1, "fast"), (3, 6, "fast")])
def test_auto_counts_images_where_nothing_is_shared_between_scales(count, scales, expected, monkeypatch):
    used, max_over_scales = [], fast.max_over_scales
    monkeypatch.setattr(fast, "max_over_scales", lambda *a: used.append("fast") or max_over_scales(*a))
    layer = ScaleSteerableConv2d(16, 4, 13, padding="same", scales=PAPER_SCALES[:scales], basis="paper")
    with torch.no_grad():
        layer(torch.randn(count, 16, 24, 24))
    assert (used or ["direct"]) == [expected]


@pytest.mark.parametrize(("least", "kernel_size", "scales"), [(10**6, 7, PAPER_SCALES), (0, 3, (1.0,))])
@pytest.mark.parametrize("training", [True, False])
def test_auto_may_measure_what_its_rule_only_estimates(least, kernel_size, scales, training, monkeypatch):
    """Products of frequencies gain ten times with the paper's six scales, and lose as much with one of 3 x 3."""
    for name in ("LEAST_TAPS", "LEAST_TAPS_TRAINING"):
        monkeypatch.setattr(fast.choice, name, least)  # a rule that is wrong
    timed, time_backends, fast_calls, max_over_scales = [], functional._time_backends, [], fast.max_over_scales
    monkeypatch.setattr(functional, "_time_backends", lambda *a: timed.append(1) or time_backends(*a))
    monkeypatch.setattr(fast, "max_over_scales", lambda *a: fast_calls.append(1) or max_over_scales(*a))
    monkeypatch.setattr(functional, "_arrangements", Cache(9))
    layer = ScaleSteerableConv2d(24, 24, kernel_size, padding="same", scales=scales, basis="paper")
    x = torch.randn(4, 24, 24, 24, requires_grad=training)
    with torch.set_grad_enabled(training):
        expected = layer(x)
        monkeypatch.setattr(fast, "benchmark", True)
        layer(x)
        fast_calls.clear()
        found = layer(x)
    assert len(timed) == 1
    assert len(fast_calls) == (kernel_size == 7)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert x.grad is None
    assert layer.coefficients.grad is None
    assert found.requires_grad == training


def test_what_was_found_for_one_call_serves_only_calls_like_it(monkeypatch):
    found, choose = [], fast.choose_backend
    monkeypatch.setattr(fast, "choose_backend", lambda *a: found.append(1) or choose(*a))
    monkeypatch.setattr(functional, "_arrangements", Cache(4))
    layer = build("auto", torch.float32)
    for size in (12, 13, 12, 13):
        layer(torch.randn(1, 4, size, 12))
    assert len(found) == 2
    with torch.no_grad():
        layer(torch.randn(1, 4, 12, 12))
    fold(layer)(torch.randn(1, 4, 12, 12))
    build("auto", torch.float32, padding_mode="reflect")(torch.randn(1, 4, 12, 12))
    assert len(found) == 5
    layer(torch.randn(1, 4, 14, 12))
    layer(torch.randn(1, 4, 12, 12))  # the oldest of four was this one
    assert len(found) == 7


@pytest.mark.parametrize("channels", [1, 4])
def test_deterministic_mode_gives_equal_runs(channels):
    x = torch.randn(2, channels, 16, 16)
    torch.use_deterministic_algorithms(True)
    try:
        for backend in BACKENDS:
            grads = []
            for _ in range(2):
                layer = build(backend, torch.float32, channels)
                layer(x).square().sum().backward()
                grads.append(layer.coefficients.grad)
            assert torch.equal(*grads)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_passes_do_not_accumulate_memory(backend):
    layer = build(backend)
    x = torch.randn(1, 4, 12, 12, dtype=torch.float64)
    layer(x)
    layer(x)  # views of buffers stay once no buffer is new

    def tensors():
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    before = tensors()
    for _ in range(20):
        layer(x)
    assert tensors() <= before
