"""The meters measure: what is right passes, what is broken on purpose fails."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from scalesteer import PAPER_SCALES, ScaleSteerableConv2d, fold, harmonics
from scalesteer.testing import (
    _interpolation,
    _random_blobs,
    assert_scale_equivariant,
    assert_steerable,
    equivariance_error,
    steering_error,
)


def layer(name="area", kernel_size=7, scales=PAPER_SCALES, seed=0):
    """64 filters with complex-normal coefficients."""
    torch.manual_seed(seed)
    built = ScaleSteerableConv2d(1, 64, kernel_size, padding="same", scales=scales, basis=name)
    nn.init.normal_(built.coefficients)
    return built


@pytest.mark.parametrize("seed", range(5))
def test_area_sampling_steers_within_8_percent_and_point_sampling_does_not(seed):
    area, point = steering_error(layer("area", seed=seed)), steering_error(layer("paper", seed=seed))
    assert len(area) == 5
    assert max(area) < 0.08
    assert min(point) > 0.12
    assert max(point) > 0.3


@pytest.mark.parametrize("seed", range(5))
def test_area_sampling_of_large_windows_steers_within_1_5_percent(seed):
    assert steering_error(layer("area", 17, (1.0, 33 / 17), seed))[0] < 0.015
    assert steering_error(layer("paper", 17, (1.0, 33 / 17), seed))[0] > 0.15


def test_steering_error_is_the_norm_ratio_written_out():
    built = layer(scales=(1.0, 9 / 7))
    responses = []
    for size, weight in zip((7, 9), built.filters(), strict=True):
        u, total = size / 17, torch.zeros(64, dtype=torch.float64)
        for row in range(size):
            for column in range(size):
                x, y = column - size // 2, size // 2 - row
                blob = math.exp(-((x / u - 2) ** 2 + (y / u + 1.5) ** 2) / 8)
                blob += math.exp(-((x / u + 3) ** 2 + (y / u - 2) ** 2) / 10)
                total += weight[:, 0, row, column].detach().double() * blob
        responses.append(total)
    expected = (responses[1] - responses[0]).norm() / responses[0].norm()
    assert steering_error(built)[0] == pytest.approx(expected.item(), rel=1e-9)


class WrongPhase(ScaleSteerableConv2d):
    """Steers with e^(+ik log s): the right phase after coefficients that were turned by twice that angle."""

    def filters(self):
        orders = torch.tensor(self.basis.orders)[:, None]
        result = []
        for scale in self.scales:
            turn = torch.polar(torch.ones_like(orders), 2 * orders * math.log(scale))
            turned = torch.view_as_real(torch.view_as_complex(self.coefficients) * turn)
            steered = torch.tensor(harmonics.steered_basis(self.basis, 7, scale), dtype=turned.dtype)
            result.append(torch.einsum("ockjp,kjpab->ocab", turned, steered))
        return tuple(result)


class NoGain(ScaleSteerableConv2d):
    """Forgets s^(m-2)."""

    def filters(self):
        return tuple(f * s for f, s in zip(super().filters(), self.scales, strict=True))


class Unsteered(ScaleSteerableConv2d):
    """Pads the first filter with zeros instead of enlarging it."""

    def filters(self):
        first = super().filters()[0]
        return tuple(nn.functional.pad(first, ((n - 7) // 2,) * 4) for n in self.sizes)


@pytest.mark.parametrize("broken", [WrongPhase, NoGain, Unsteered])
def test_broken_layers_fail_the_steering_meter(broken):
    arguments = {"scales": PAPER_SCALES, "basis": "area"}
    good = ScaleSteerableConv2d(1, 64, **arguments)
    assert_steerable(good)
    assert_steerable(fold(good))
    bad = broken(1, 64, **arguments)
    bad.load_state_dict(good.state_dict())
    with pytest.raises(AssertionError, match=r"steering error above 0\.2: by scale 1\.29: "):
        assert_steerable(bad)


def test_steering_error_needs_two_scales():
    with pytest.raises(ValueError, match=r"at least two scales to compare \(got scales=\(1.0,\)\)"):
        steering_error(ScaleSteerableConv2d(1, 1, scales=(1.0,)))


@pytest.mark.parametrize("module", [nn.Conv2d(1, 1, 7), nn.Sequential(ScaleSteerableConv2d(1, 1)), 3])
def test_steering_error_is_for_our_layers_only(module):
    with pytest.raises(TypeError, match=rf"`layer` must be a ScaleSteerableConv2d .*\(got {type(module).__name__}\)"):
        steering_error(module)


def test_steering_error_falls_with_the_size_of_the_kernel():
    """What the layer's documentation says about the choice of `kernel_size`."""
    errors = [
        np.mean([steering_error(ScaleSteerableConv2d(1, 64, k, scales=(1.0, 1.5))) for _ in range(5)])
        for k in (3, 5, 7, 9, 11, 15)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == pytest.approx(0.47, abs=0.08)
    assert errors[1] == pytest.approx(0.12, abs=0.03)
    assert errors[2] == pytest.approx(0.04, abs=0.01)
    assert errors[4] == pytest.approx(0.016, abs=0.005)


def test_the_default_layer_steers_from_a_window_of_seven_pixels_on():
    built = ScaleSteerableConv2d(1, 64)
    assert_steerable(built.with_scales([s for s in built.scales if s >= 1]), tolerance=0.1)
    with pytest.raises(AssertionError, match=r"steering error above 0\.1: by scale 0\.398: "):
        assert_steerable(built, tolerance=0.1)


def test_meters_leave_the_module_as_it_was():
    conv = nn.utils.parametrizations.spectral_norm(ScaleSteerableConv2d(2, 3), "coefficients")
    model = nn.Sequential(conv, nn.BatchNorm2d(3), nn.Dropout(0.5), nn.ReLU().eval())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    first = equivariance_error(model, 1.2, channels=2)
    steering_error(conv)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert equivariance_error(model.eval(), 1.2, channels=2) == first


def test_modes_are_restored_after_an_error():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    model = nn.Sequential(Broken())
    with pytest.raises(RuntimeError, match="no"):
        equivariance_error(model, 1.5, channels=1)
    assert model.training
    assert model[0].training


@pytest.mark.parametrize(
    ("wrap", "got"),
    [
        (lambda x: (x, x), "tuple"),
        (lambda x: {"out": x}, "dict"),
        (lambda x: x[0], r"shape \(1, 97, 97\)"),
        (lambda x: x.unsqueeze(2), r"shape \(4, 1, 1, 97, 97\)"),
    ],
)
def test_outputs_that_cannot_be_measured_are_named(wrap, got):
    class Wrapped(nn.Module):
        def forward(self, x):
            return wrap(x)

    with pytest.raises(TypeError, match=rf"`module` must return one tensor .*\(got {got}\)"):
        equivariance_error(Wrapped(), 1.5, channels=1)


def test_what_is_not_a_number_fails_both_asserts():
    built = layer()
    nn.init.constant_(built.coefficients, math.nan)
    with pytest.raises(AssertionError, match=r"steering error above 0\.2: by scale 1\.29: nan"):
        assert_steerable(built)
    with pytest.raises(AssertionError, match=r"scale-equivariance error nan above 9"):
        assert_scale_equivariant(built, 1.25, 9.0)


@pytest.mark.parametrize("scale", [0.6, 1.3, 2.0])
@pytest.mark.parametrize("size", [64, 65])
def test_pointwise_modules_are_equivariant(scale, size):
    assert equivariance_error(nn.Identity(), scale, channels=2, size=size, widths=(2, 5)) < 1e-3
    assert equivariance_error(nn.Conv2d(2, 3, 1), scale, size=size, widths=(2, 5)) < 1e-3


def test_pooled_and_strided_grids_are_centred_with_the_right_parity():
    assert equivariance_error(nn.AvgPool2d(2), 1.5, channels=1, size=96, widths=(2, 5)) < 0.05
    every_second = nn.Conv2d(1, 1, 1, stride=2, bias=False)
    assert equivariance_error(every_second, 1.5, size=97, widths=(2, 5)) < 1e-3
    assert equivariance_error(every_second, 1.5, size=96, widths=(2, 5)) > 0.02


def test_global_pooling_of_a_flat_module_measures_invariance():
    class Brightest(nn.Module):
        def forward(self, x):
            return x.amax((2, 3))

    class Total(nn.Module):
        def forward(self, x):
            return x.square().sum((2, 3))

    assert equivariance_error(Total(), 1.5, channels=1) > 0.1
    assert equivariance_error(Brightest(), 0.8, channels=1, size=129, widths=(2, 5)) < 0.2


def zero_mean_conv():
    conv = nn.Conv2d(1, 16, 7, padding="same", bias=False)
    with torch.no_grad():
        conv.weight -= conv.weight.mean((2, 3), keepdim=True)
    return conv


def test_the_default_layer_has_half_the_error_of_a_plain_convolution_as_the_meter_documents():
    torch.manual_seed(0)
    layers = {
        "plain": [zero_mean_conv() for _ in range(4)],
        "paper": [ScaleSteerableConv2d(1, 16, 7, padding="same", scales=PAPER_SCALES, basis="paper")],
        "default": [ScaleSteerableConv2d(1, 16, 7, padding="same") for _ in range(2)],
    }
    documented = {"plain": (0.23, 0.43, 0.54), "paper": (0.20, 0.38, 0.49), "default": (0.09, 0.14, 0.18)}
    found = {
        name: [np.mean([equivariance_error(layer, s) for layer in alike]) for s in (1.2, 1.5, 1.8)]
        for name, alike in layers.items()
    }
    for name, expected in documented.items():
        assert found[name] == pytest.approx(expected, rel=0.12)
    assert (np.array(found["default"]) <= 0.5 * np.array(found["plain"])).all()
    wide = {name: equivariance_error(alike[0], 1.5, widths=(2, 5)) for name, alike in layers.items()}
    assert wide == pytest.approx({"plain": 0.32, "paper": 0.43, "default": 0.22}, rel=0.12)


def test_one_filter_steered_is_equivariant_between_its_scales():
    """f at scale s of the enlarged image is the enlarged f at scale 1: steering and geometry together."""

    class Pair(nn.Module):
        in_channels = 1

        def __init__(self, first, second):
            super().__init__()
            self.turn, self.first, self.second = 0, first, second

        def forward(self, x):  # the meter shows the image first, then its enlargement
            self.turn += 1
            return (self.first if self.turn == 1 else self.second)(x)

    built = ScaleSteerableConv2d(1, 32, 13, padding="same", basis="area")
    small, large = (built.with_scales((s,)) for s in (1.0, 1.5))
    right = equivariance_error(Pair(small, large), 1.5)
    assert right < 0.12
    assert equivariance_error(Pair(small, small), 1.5) > 3 * right
    assert equivariance_error(Pair(small, Shifted(large)), 1.5) > 1.5 * right


class Shifted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).roll((1, 1), (2, 3))


@pytest.mark.filterwarnings("ignore:scales that are far apart")
def test_where_the_largest_scale_does_not_win_the_maximum_is_equivariant():
    scale = 1.25
    built = layer(scales=tuple(scale**i for i in range(-4, 8)))
    with torch.no_grad():
        before = built(_random_blobs(2, 1, 97, 1.0, 0).float())
        after, winner = built(_random_blobs(2, 1, 97, scale, 0).float(), return_scales=True)
    matrix, keep = _interpolation(97, scale, 0.3)
    expected = (matrix @ before.double() @ matrix.T)[..., keep, :][..., keep]
    difference = after.double()[..., keep, :][..., keep] - expected
    inside = (winner >= 3) & (winner < 11)
    inside = inside[..., keep, :][..., keep]
    assert inside.float().mean() > 0.1
    assert difference[inside].norm() / expected[inside].norm() < 0.1


@pytest.mark.filterwarnings("ignore:scales that are far apart")
def test_more_scales_bring_the_layer_nearer_to_equivariance_and_a_broken_one_fails():
    torch.manual_seed(0)
    arguments = {"padding": "same", "basis": "area", "scales": tuple(1.25**i for i in range(-3, 7))}
    many = ScaleSteerableConv2d(1, 32, **arguments)
    one = many.with_scales((1.0,))
    assert equivariance_error(many, 1.25) < 0.75 * equivariance_error(one, 1.25)
    assert_scale_equivariant(many, 1.25, 0.25)
    with pytest.raises(AssertionError, match=r"scale-equivariance error 0\.\d+ above 0\.25 for scale 1\.25"):
        assert_scale_equivariant(one, 1.25, 0.25)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scale": 0}, ValueError, r"`scale` must be positive \(got 0.0\)"),
        ({"scale": math.nan}, ValueError, "`scale` must be finite"),
        ({"scale": 1.5, "border": 0.5}, ValueError, r"`border` must be at least 0 and below 0.5 \(got 0.5\)"),
        ({"scale": 0.001, "border": 0.49, "size": 64}, ValueError, "no pixel is left to compare"),
        ({"scale": 1.5, "channels": None}, ValueError, "`channels` must be given"),
        ({"scale": 1.5, "channels": 0}, ValueError, r"`channels` must be at least 1 \(got 0\)"),
        ({"scale": 1.5, "size": (64, 96)}, TypeError, r"`size` must be an integer \(got \(64, 96\)"),
        ({"scale": 1.5, "size": 0}, ValueError, r"`size` must be at least 1 \(got 0\)"),
        ({"scale": 1.5, "images": 0}, ValueError, r"`images` must be at least 1 \(got 0\)"),
        (
            {"scale": 1.5, "widths": (2, 1)},
            ValueError,
            r"`widths` must be two positive numbers, ascending \(got \(2, 1",
        ),
        ({"scale": 1.5, "widths": (0, 1)}, ValueError, r"`widths` must be two positive numbers"),
    ],
)
def test_wrong_arguments_of_the_meter_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        equivariance_error(nn.Identity(), **{"channels": 1, **arguments})


class Powers(nn.Module):
    """The image at several scales, each twice as bright as the one before."""

    def forward(self, x):
        return torch.stack([2.0**i * x for i in range(4)], 2)


def test_an_output_with_an_axis_of_scales_is_compared_after_it_has_moved():
    step = 2**0.5
    exact = equivariance_error(nn.Identity(), step, channels=1)
    assert equivariance_error(Powers(), step, channels=1, steps=0) == pytest.approx(exact, rel=1e-6)
    for steps in (1, 2):  # what is found is 2^steps times what is expected
        for ends in (0, 1) if steps == 1 else (0,):
            found = equivariance_error(Powers(), step, channels=1, steps=steps, ends=ends)
            assert found == pytest.approx(2**steps - 1, rel=1e-3)


@pytest.mark.parametrize(
    ("module", "options", "error", "match"),
    [
        (Powers(), {}, TypeError, r"must return one tensor \(B, C, H, W\) or \(B, features\) \(got shape \(4, 1, 4"),
        (nn.Identity(), {"steps": 1}, TypeError, r"must return one tensor \(B, C, S, H, W\), as `steps` is given"),
        (Powers(), {"steps": 4}, ValueError, "no scale is left to compare of 4 with steps=4 and ends=0"),
        (Powers(), {"steps": 2, "ends": 1}, ValueError, "no scale is left to compare of 4 with steps=2 and ends=1"),
        (Powers(), {"steps": -1}, ValueError, "`steps` must be at least 0"),
    ],
)
def test_what_cannot_be_moved_is_named(module, options, error, match):
    with pytest.raises(error, match=match):
        equivariance_error(module, 1.4, channels=1, **options)
