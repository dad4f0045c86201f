"""Averages of harmonics over pixels against products of Gauss rules on fine grids."""

import math

import numpy as np
import pytest

from scalesteer import LogRadialBasis, averages, harmonics
from tests import reference


@pytest.mark.parametrize("lobes", ["sum", "max", "single"])
@pytest.mark.parametrize("sigma", [0.02, 0.3, 1.0, 4.0])
def test_area_average_is_accurate_for_narrow_and_wide_lobes(lobes, sigma):
    basis = LogRadialBasis(sampling="area", sigma=sigma, lobes=lobes, orders=(0.0, 9.0), orientations=(0.3, 2.0, -4.0))
    nodes, weights = np.polynomial.legendre.leggauss(6)
    u = np.concatenate([(i + (nodes + 1) / 2) / 60 - 0.5 for i in range(60)])
    w = np.tile(weights / 120, 60)
    for x, y in [(1, 0), (-1, 2), (0, -3)]:
        px, py = np.meshgrid(x + u, y + u)
        expected = np.einsum("kjab,a,b->kj", harmonics.evaluate(basis, px, py), w, w)
        actual = averages.average(basis, np.array([x]), np.array([y]))[..., 0]
        assert np.abs(actual - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("sigma", "order", "lobes"),
    [(math.pi / 16, 2.0, "sum"), (0.02, 9.0, "sum"), (0.15, 60.0, "sum"), (math.pi / 8, 2.0, "single")],
    ids=["default", "narrow lobes", "high order", "one lobe"],
)
def test_area_average_is_exact_to_1e_12(sigma, order, lobes):
    basis = LogRadialBasis(
        sampling="area", sigma=sigma, orders=(0.0, order), orientations=(0.3, 2.0, -4.0), lobes=lobes
    )
    symbols = basis.orders, basis.orientations, sigma, basis.beta, basis.m
    lobes_at = reference.TWO_LOBES if lobes == "sum" else (0,)
    nodes, weights = np.polynomial.legendre.leggauss(12)
    u = np.concatenate([(i + (nodes + 1) / 2) / 60 - 0.5 for i in range(60)])
    w = np.tile(weights / 120, 60)
    for x, y in [(1, 0), (-1, 2), (0, -3), (1, 1)]:
        px, py = np.meshgrid(x + u, y + u)
        expected = np.einsum("kjab,a,b->kj", reference.harmonics(px, py, *symbols, lobes_at), w, w)
        actual = averages.average(basis, np.array([x]), np.array([y]))[..., 0]
        assert np.abs(actual - expected).max() < 1e-12


@pytest.mark.parametrize(("core", "sigma"), [(0.05, 0.4), (0.3, 0.1), (1.0, 1.0)])
def test_area_average_with_a_core_is_exact_to_1e_12(core, sigma):
    basis = LogRadialBasis(
        sampling="area", lobes="single", core=core, sigma=sigma, orders=(0.0, 9.0), orientations=(0.3, 2.0, -4.0)
    )
    nodes, weights = np.polynomial.legendre.leggauss(12)
    u = np.concatenate([(i + (nodes + 1) / 2) / 30 - 0.5 for i in range(30)])
    w = np.tile(weights / 60, 30)
    for x, y in [(0, 0), (1, 0), (-1, 2), (5, 1), (-4, 4), (9, -2)]:  # far ones are averaged in another way
        px, py = np.meshgrid(x + u, y + u)
        expected = np.einsum("kjab,a,b->kj", harmonics.evaluate(basis, px, py), w, w)
        actual = averages.average(basis, np.array([x]), np.array([y]))[..., 0]
        assert np.abs(actual - expected).max() < 1e-12
