"""Theorem 1 of the paper, each side integrated on its own, and what grids make of it."""

import math

import numpy as np
import pytest

from tests import reference

PARAMETERS = {"orientations": [j * math.pi / 8 for j in range(1, 9)], "sigma": math.pi / 16, "beta": 0.0, "m": 1.0}
ONE_LOBE = {"orientations": [j * math.pi / 4 for j in range(1, 9)], "sigma": math.pi / 8, "lobes_at": (0,)}
ORDERS = (0.5, 1.0, 2.0)
SCALES = (1.25, 1.5, 2.0, 2.4)
RADIUS = 3.5


def image(x, y):
    """A sum of Gaussians, known everywhere."""
    return (
        np.exp(-((x - 2) ** 2 + (y + 1.5) ** 2) / 8)
        + 0.7 * np.exp(-((x + 3) ** 2 + (y - 2) ** 2) / 10)
        - 0.4 * np.exp(-(x**2 + (y - 1) ** 2) / 3)
    )


def harmonic(x, y, order, **changed):
    return reference.harmonics(x, y, [order], **{**PARAMETERS, **changed})[0]  # (J, ...)


def integral(function, order, radius, nodes, turns, **changed):
    """Integral of function times S_kj over a disc: Gauss-Legendre in log r, trapezoid in phi."""
    gauss, weights = np.polynomial.legendre.leggauss(nodes)
    low, high = math.log(radius) - 26, math.log(radius)  # e^-26 of the area's radius is left out
    z = (gauss + 1) / 2 * (high - low) + low
    phi = np.arange(turns) * 2 * math.pi / turns
    x, y = np.exp(z)[:, None] * np.cos(phi), np.exp(z)[:, None] * np.sin(phi)
    values = function(x, y) * harmonic(x, y, order, **changed) * np.exp(2 * z)[:, None]
    return np.einsum("jzp,z->j", values, weights) * (high - low) / 2 * 2 * math.pi / turns


def factor(order, scale, power=-1.0, sign=-1):
    return scale**power * np.exp(sign * 1j * order * math.log(scale))


def deviation(left, right):
    return np.linalg.norm(left - right) / np.linalg.norm(left)


@pytest.mark.parametrize("lobes", [{}, ONE_LOBE], ids=["two lobes", "one lobe"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", SCALES)
def test_theorem_1_holds_when_each_side_is_integrated_on_its_own(order, scale, lobes):
    left = integral(lambda x, y: image(scale * x, scale * y), order, RADIUS, nodes=150, turns=300, **lobes)
    right = integral(image, order, RADIUS * scale, nodes=181, turns=364, **lobes)
    assert deviation(left, factor(order, scale) * right) < 1e-6
    assert deviation(left, factor(order, scale, sign=1) * right) > 0.1
    assert deviation(left, factor(order, scale, power=0) * right) > 0.1


@pytest.mark.parametrize("scale", [1.25, 2.4])
def test_with_a_core_the_theorem_holds_if_the_core_grows_with_the_scale_and_only_then(scale):
    lobe = {**ONE_LOBE, "orientations": [0.3, 2.0]}
    left = integral(lambda x, y: image(scale * x, scale * y), 2.0, RADIUS, nodes=80, turns=48, **lobe, core=0.75)
    right = integral(image, 2.0, RADIUS * scale, nodes=91, turns=56, **lobe, core=0.75 * scale)
    assert deviation(left, factor(2.0, scale) * right) < 1e-6
    fixed = integral(image, 2.0, RADIUS * scale, nodes=91, turns=56, **lobe, core=0.75)
    assert deviation(left, factor(2.0, scale) * fixed) > 0.01


def grid_sum(function, order, radius, pitch):
    """The integral as a sum over a Cartesian grid, S(0) = 1 at the centre as the paper samples it."""
    n = math.floor(radius / pitch)
    ticks = np.arange(-n, n + 1) * pitch
    x, y = np.meshgrid(ticks, ticks)
    inside = np.hypot(x, y) <= radius
    x, y = x[inside], y[inside]
    centre = (x == 0) & (y == 0)
    values = np.where(centre, 1.0, harmonic(np.where(centre, 1.0, x), y, order))
    return (values * function(x, y)).sum(-1) * pitch**2


def grid_deviations(order, scale, pitches, **broken):
    return [
        deviation(
            grid_sum(lambda x, y: image(scale * x, scale * y), order, RADIUS, h),
            factor(order, scale, **broken) * grid_sum(image, order, RADIUS * scale, h),
        )
        for h in pitches
    ]


PITCHES = [2.0**-e for e in range(1, 7)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", SCALES)
def test_on_grids_the_error_falls_with_the_first_power_of_the_pitch(order, scale):
    slope = np.polyfit(np.log(PITCHES), np.log(grid_deviations(order, scale, PITCHES)), 1)[0]
    assert slope == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("broken", [{"sign": 1}, {"power": 0.0}])
def test_with_the_sign_or_the_power_broken_the_error_stalls(broken):
    errors = grid_deviations(1.0, 1.5, PITCHES, **broken)
    assert errors[-1] > 0.5 * errors[0]
    assert errors[-1] > 0.1
