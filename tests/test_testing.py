"""The meters measure: what is right passes, what is broken on purpose fails."""

import math

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


@pytest.mark.parametrize("scale", [0.6, 1.3, 2.0])
@pytest.mark.parametrize("size", [64, 65])
def test_pointwise_modules_are_equivariant(scale, size):
    assert equivariance_error(nn.Identity(), scale, channels=2, size=size) < 1e-3
    assert equivariance_error(nn.Conv2d(2, 3, 1), scale, size=size) < 1e-3


def test_pooled_and_strided_grids_are_centred_with_the_right_parity():
    assert equivariance_error(nn.AvgPool2d(2), 1.5, channels=1, size=96) < 0.05
    every_second = nn.Conv2d(1, 1, 1, stride=2, bias=False)
    assert equivariance_error(every_second, 1.5, size=97) < 1e-3
    assert equivariance_error(every_second, 1.5, size=96) > 0.02


def test_global_pooling_of_a_flat_module_measures_invariance():
    class Brightest(nn.Module):
        def forward(self, x):
            return x.amax((2, 3))

    class Total(nn.Module):
        def forward(self, x):
            return x.square().sum((2, 3))

    assert equivariance_error(Total(), 1.5, channels=1) > 0.2
    assert equivariance_error(Brightest(), 0.8, channels=1, size=129) < 0.2


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


@pytest.mark.filterwarnings("ignore:scales share a window")
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


@pytest.mark.filterwarnings("ignore:scales share a window")
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
    ("arguments", "message"),
    [
        ({"scale": 0}, r"`scale` must be positive \(got 0.0\)"),
        ({"scale": math.nan}, "`scale` must be finite"),
        ({"scale": 1.5, "border": 0.5}, r"`border` must be at least 0 and below 0.5 \(got 0.5\)"),
        ({"scale": 0.001, "border": 0.49, "size": 64}, "no pixel is left to compare"),
        ({"scale": 1.5, "channels": None}, "`channels` must be given"),
    ],
)
def test_wrong_arguments_of_the_meter_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        equivariance_error(nn.Identity(), **{"channels": 1, **arguments})
