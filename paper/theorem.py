"""Theorem 1 in numbers: its two sides integrated, summed on grids, broken on purpose; and how responses turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalesteer import harmonics
from scalesteer.harmonics import LogRadialBasis

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]

RADIUS = 3.5
THEOREM_ORDERS = (0.5, 1.0, 2.0)
THEOREM_SCALES = (1.25, 1.5, 2.0, 2.4)
SENSITIVITY_ORDERS = (0.5, 1.0, 2.0, 4.0)


def gaussians(x: Array, y: Array) -> Array:
    """An image known everywhere: a sum of Gaussians."""
    return np.asarray(
        np.exp(-((x - 2) ** 2 + (y + 1.5) ** 2) / 8)
        + 0.7 * np.exp(-((x + 3) ** 2 + (y - 2) ** 2) / 10)
        - 0.4 * np.exp(-(x**2 + (y - 1) ** 2) / 3)
    )


def polar_integral(order: float, radius: float, shrunk: float, nodes: int, turns: int) -> Complex:
    """The integral of S_kj times the image shrunk by `shrunk` over a disc: `(J,)`.

    Gauss-Legendre in log r with that many nodes, a trapezoid in phi.
    """
    gauss, weights = np.polynomial.legendre.leggauss(nodes)
    low, high = math.log(radius) - 26, math.log(radius)  # leaves out a disc of e^-26 times the radius
    z = (gauss + 1) / 2 * (high - low) + low
    phi = np.arange(turns) * 2 * math.pi / turns
    x, y = np.outer(np.exp(z), np.cos(phi)), np.outer(np.exp(z), np.sin(phi))
    values = _harmonic(order, x, y) * (gaussians(shrunk * x, shrunk * y) * np.exp(2 * z)[:, None])
    return np.asarray(np.einsum("jzp,z->j", values, weights) * (high - low) / 2 * 2 * math.pi / turns)


def grid_sum(order: float, radius: float, shrunk: float, pitch: float) -> Complex:
    """The same integral as a sum over a Cartesian grid, with S(0) = 1 at the centre as the paper samples it."""
    n = math.floor(radius / pitch)
    ticks = np.arange(-n, n + 1) * pitch
    x, y = np.meshgrid(ticks, ticks)
    inside = np.hypot(x, y) <= radius
    x, y = x[inside], y[inside]
    return np.asarray((_harmonic(order, x, y) * gaussians(shrunk * x, shrunk * y)).sum(-1) * pitch**2)


def _harmonic(order: float, x: Array, y: Array) -> Complex:
    return np.asarray(harmonics.evaluate(LogRadialBasis(orders=(order,)), x, y)[0])  # (J, ...)


def _deviation(left: Complex, right: Complex) -> float:
    return float(np.linalg.norm(left - right) / np.linalg.norm(left))


def _factor(order: float, scale: float, power: float = -1.0, sign: int = -1) -> complex:
    """That of Theorem 1, s^(m-2) e^(-ik log s) with m = 1, unless it is broken on purpose."""
    return complex(scale**power * np.exp(sign * 1j * order * math.log(scale)))


def theorem_deviation(order: float, scale: float) -> float:
    """How far the two sides of Theorem 1 are apart, each integrated on its own."""
    left = polar_integral(order, RADIUS, scale, nodes=150, turns=300)
    return _deviation(left, _factor(order, scale) * polar_integral(order, RADIUS * scale, 1.0, nodes=181, turns=364))


def steering_deviation(scale: float, seed: int = 0) -> float:
    """How far Eq. 3 is from enlarging: the layer's filter at `scale` against s^-2 W(p / s), evaluated anew at p / s.

    The paper's functions with complex-normal coefficients on a window of 7 pixels. The centre pixel is left out: there
    Eq. 1 is undefined.
    """
    basis, random = LogRadialBasis(), np.random.default_rng(seed)
    steered = harmonics.steered_basis(basis, 7, scale)
    real, imaginary = random.standard_normal((2, *basis.shape, 1, 1))
    x, y = harmonics.grid(steered.shape[-1])
    inside = harmonics.support(basis, 7, scale) & (np.hypot(x, y) > 0)
    filters = (real * steered[:, :, 0] + imaginary * steered[:, :, 1]).sum((0, 1))[inside]
    functions = harmonics.evaluate(basis, x[inside] / scale, y[inside] / scale)
    expected = ((real + 1j * imaginary)[..., 0] * functions).sum((0, 1)).real / scale**2
    return float(np.linalg.norm(filters - expected) / np.linalg.norm(expected))


def grid_deviations(order: float, scale: float, pitches: Sequence[float], **broken: Any) -> list[float]:
    """How far the two sides of Theorem 1 are apart on grids; `broken` changes the theorem's power or sign."""
    factor = _factor(order, scale, **broken)
    return [
        _deviation(grid_sum(order, RADIUS, scale, h), factor * grid_sum(order, RADIUS * scale, 1.0, h)) for h in pitches
    ]


def sensitivity(orders: Sequence[float], scales: Sequence[float], m: float = 1.0) -> tuple[Complex, dict[float, float]]:
    r"""How the response of each harmonic turns when the image is scaled, and the factor after which it repeats.

    The image is a smooth ring with some angular structure, I(s p) its scaled version. The response
    :math:`\int S_{kj}(p)\,I(s p)\,dp` is integrated on a dense log-polar grid; it is multiplied by s^(2-m), which
    Theorem 1 says its magnitude falls by, and divided by its magnitude at the first scale.

    Returns:
        Responses, `(K, S)`, complex; and for each order the measured period: the factor that turns the phase once.
    """
    basis = LogRadialBasis(orders=tuple(orders), orientations=(math.pi / 4,), m=m)
    growth = np.log(np.asarray(scales, float))
    z = np.linspace(-growth.max() - 3, -growth.min() + 3, 4000)  # log r
    phi = np.linspace(0, 2 * np.pi, 128, endpoint=False)
    functions = harmonics.evaluate(basis, np.outer(np.exp(z), np.cos(phi)), np.outer(np.exp(z), np.sin(phi)))
    turned = functions[:, 0] @ (1 + 0.5 * np.cos(2 * phi))  # (K, R): integrated over the angle
    rings = np.exp(-((z + growth[:, None]) ** 2) / (2 * 0.4**2) + 2 * z + (2 - m) * growth[:, None])  # (S, R)
    responses = turned @ rings.T
    responses /= np.abs(responses[:, :1])
    turns = np.polyfit(growth, np.unwrap(np.angle(responses)).T, 1)[0]  # radians per unit of log s
    return responses, {order: float(np.exp(2 * np.pi / abs(t))) for order, t in zip(orders, turns, strict=True)}
