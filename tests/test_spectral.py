"""What is particular to the fast algorithm: few channels, tiles, pieces, caches. test_functional has the agreement."""

import copy
import itertools

import pytest
import torch

from scalesteer import ScaleSteerableConv2d, spectral
from scalesteer.functional import PADDING_MODES, Geometry

SCALES = (0.6, 1.0, 1.8)


def pair(in_channels, **arguments):
    """The same layer with both backends."""
    torch.manual_seed(2)
    arguments = {"kernel_size": 5, "scales": SCALES, "padding": 2, "dtype": torch.float64, **arguments}
    direct = ScaleSteerableConv2d(in_channels, 4, backend="direct", **arguments)
    torch.nn.init.normal_(direct.coefficients)
    fast = copy.deepcopy(direct)
    fast.backend = "spectral"
    return direct, fast


def check(direct, fast, x, tolerance=1e-10):
    """Equal outputs, winners, and gradients of image and coefficients."""
    results = []
    for layer in (direct, fast):
        image = x.clone().requires_grad_()
        out, winner = layer(image, return_scales=True)
        layer.zero_grad()
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append((out.detach(), image.grad, layer.coefficients.grad, layer.bias.grad, winner.to(out.dtype)))
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize("channels", [1, 2])
def test_few_channels_equal_direct(mode, channels):
    for stride, dilation, padding in itertools.product((1, 2), (1, 2), (0, 2, (4, 1))):
        direct, fast = pair(channels, stride=stride, dilation=dilation, padding=padding, padding_mode=mode)
        check(direct, fast, torch.randn(2, channels, 14, 17, dtype=torch.float64))


@pytest.mark.parametrize("channels", [1, 3])
def test_gradients_of_every_kind_pass_gradcheck_and_gradgradcheck(channels):
    layer = ScaleSteerableConv2d(
        channels, 2, 3, scales=(1.0, 5 / 3), dtype=torch.float64, backend="spectral", bias=False
    )
    x = torch.randn(1, channels, 4, 5, dtype=torch.float64, requires_grad=True)
    coefficients = torch.randn_like(layer.coefficients, requires_grad=True)

    def apply(x, coefficients):
        return torch.func.functional_call(layer, {"coefficients": coefficients}, (x,))

    assert torch.autograd.gradcheck(apply, (x, coefficients))
    assert torch.autograd.gradgradcheck(apply, (x, coefficients))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("stride", "padding", "mode"), [(1, "same", "zeros"), (2, 0, "zeros"), (1, 5, "reflect")])
def test_large_images_are_cut_into_tiles_with_the_same_result(channels, stride, padding, mode):
    direct, fast = pair(channels, stride=stride, padding=padding, padding_mode=mode)
    check(direct, fast, torch.randn(2, channels, 101 * stride, 41, dtype=torch.float64))


@pytest.mark.parametrize("channels", [1, 3])
def test_small_memory_budget_gives_the_same_result(channels, monkeypatch):
    direct, fast = pair(channels)
    calls = []
    original = spectral._MaxResponse.apply
    monkeypatch.setattr(spectral._MaxResponse, "apply", lambda *a: calls.append(len(a[0])) or original(*a))
    monkeypatch.setattr(spectral, "memory_budget", 200_000)
    check(direct, fast, torch.randn(7, channels, 16, 16, dtype=torch.float64))
    assert len(calls) > 1
    assert sum(calls) == 7


def test_1024_by_1024_image_is_right():
    direct, fast = pair(1, dtype=torch.float32, scales=(1.0, 1.8))
    x = torch.randn(1, 1, 1024, 1024)
    with torch.no_grad():
        expected, actual = direct(x), fast(x)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_periods_are_even_and_as_short_as_no_window_seeing_twice_allows():
    same = spectral.Axis(length=28, first=0, stride=1, count=28, dilation=1, radius=8)
    assert same.period == 36
    valid = spectral.Axis(length=28, first=8, stride=1, count=12, dilation=1, radius=8)
    assert valid.period == 28
    odd = spectral.Axis(length=27, first=0, stride=2, count=14, dilation=2, radius=3)
    assert odd.period == 34


def test_plans_are_shared_between_layers_and_not_in_their_state():
    spectral._plans.clear()
    _, fast = pair(3)
    size = len(copy.deepcopy(fast).state_dict())
    fast(torch.randn(1, 3, 12, 12, dtype=torch.float64))
    pair(3)[1](torch.randn(2, 3, 12, 12, dtype=torch.float64))
    assert len(spectral._plans) == 1
    assert len(fast.state_dict()) == size
    for height in range(12, 100):
        fast(torch.randn(1, 3, height, 12, dtype=torch.float64))
    assert len(spectral._plans) <= 64


def test_tracing_leaves_no_plan_without_numbers_behind():
    spectral._plans.clear()
    _, fast = pair(3)
    torch.export.export(fast, (torch.randn(2, 3, 12, 12, dtype=torch.float64),))
    assert not spectral._plans


def test_running_maximum_stores_one_map_for_backward_not_one_a_scale():
    layer = ScaleSteerableConv2d(8, 8, scales=tuple(1 + i / 8 for i in range(12)), backend="spectral")
    x = torch.randn(2, 8, 20, 20)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        layer(x)
    maps = 2 * 8 * 20 * 20
    filters = sum(f.numel() for f in layer.filters())
    assert sum(saved) <= 2 * maps + 2 * filters + 12 * layer.coefficients.numel()


def test_half_windows_are_prefixes_of_larger_ones():
    small, large = spectral._half_window(5), spectral._half_window(9)
    assert large[: len(small)] == small
    assert len(large) == 41
    every = {*large, *((-y, -x) for y, x in large)}
    assert every == set(itertools.product(range(-4, 5), repeat=2))


def test_choice_does_not_depend_on_what_a_batch_holds():
    assert "batch" not in spectral.choose_backend.__code__.co_varnames
    geometry = Geometry(7, padding=(3, 3))
    assert spectral.choose_backend((64, 64), (7, 17), 16, geometry) == "spectral"
