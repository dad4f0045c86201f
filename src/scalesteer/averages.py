"""The angular factor of log-radial harmonics, and their averages over pixels by quadrature; numpy, float64.

Symbols and conventions are those of :mod:`scalesteer.harmonics`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scalesteer.basis import LogRadialBasis

Float = NDArray[np.float64]
Complex = NDArray[np.complex128]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_FEW_NODES, _FEW_WEIGHTS = np.polynomial.legendre.leggauss(12)


def angular_factor(basis: LogRadialBasis, angle: Float) -> Float:
    """K(phi, phi_j) alone, with K(phi, phi_j + pi), or the larger of the two, by `lobes`; `(...)` -> `(J, ...)`."""
    phi_j = np.reshape(basis.orientations, (-1,) + (1,) * np.ndim(angle))
    towards = np.abs(np.mod(angle - phi_j + math.pi, 2 * math.pi) - math.pi)  # d(phi, phi_j), in [0, pi]
    near, far = (np.exp(-((d / basis.sigma) ** 2) / 2) for d in (towards, math.pi - towards))
    if basis.lobes == "single":
        return np.asarray(near)
    return np.asarray(near + far if basis.lobes == "sum" else np.maximum(near, far))


@lru_cache(maxsize=64)
def angular_series(sigma: float, lobes: Literal["sum", "max", "single"]) -> Float:
    """The a_n of sum_n a_n cos n(phi - phi_j), the angular factor; up to an n where a Gaussian's are below 1e-14."""
    count = math.ceil(8 / sigma) + 4
    pieces = 2 * math.ceil(math.pi / (4 * sigma))  # even, so that a kink at pi / 2 lies between two
    phi = ((np.arange(pieces)[:, None] + (_NODES + 1) / 2) * math.pi / pieces).ravel()
    weight = np.tile(_WEIGHTS / pieces, pieces) * np.where(np.arange(count + 1) > 0, 1.0, 0.5)[:, None]
    lobe = angular_factor(LogRadialBasis(orientations=(0.0,), sigma=sigma, lobes=lobes), phi)[0]
    return np.asarray((np.cos(np.arange(count + 1)[:, None] * phi) * weight) @ lobe)


def average(basis: LogRadialBasis, x: Float, y: Float, radius: float = math.inf) -> Complex:
    r"""The average over the unit square around each point of S_kj, taken as zero beyond `radius`, to about 1e-12.

    In polar coordinates the radial integral is closed, so that only a smooth integral over angles is left:

    .. math:: \int \Phi_j(\phi) e^{i\beta} \left[\frac{r^{2 - m + ik}}{2 - m + ik}\right]_{r_1(\phi)}^{r_2(\phi)} d\phi

    where a ray at angle phi enters the square at r_1 and leaves it, or the disc, at r_2 (r_1 = 0 around the origin).
    Gauss-Legendre quadrature does the rest; with a core, also along the ray.

    Shape: `(P,)`, integer coordinates -> `(K, J, P)`.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if basis.core > 0:
        return _average_with_core(basis, x, y, radius)
    result = np.zeros((*basis.shape, x.size), dtype=np.complex128)
    for chosen, phi, weight, inner, outer in _rays_through_squares(basis, x, y, radius):
        angular = angular_factor(basis, phi) * weight  # (J, p, E-1, count, 20)
        for i, exponent in enumerate(2 - basis.m + 1j * basis.frequencies):
            radial = (_power(outer, exponent) - _power(inner, exponent)) / exponent
            result[i][:, chosen] = np.einsum("jpecn,pecn->jp", angular, radial)
    if basis.point_symmetric:
        result[..., (x == 0) & (y == 0)] *= 2
    return np.asarray(result * np.exp(1j * basis.beta))


def _average_with_core(basis: LogRadialBasis, x: Float, y: Float, radius: float) -> Complex:
    """:func:`average` of functions with a core, term by term of the angular series (see :func:`harmonics.evaluate`)."""
    # A quarter turn of a pixel turns the orientations, exchanging x and y mirrors them; one octant of pixels is enough.
    turns = np.select([(x <= 0) & (y > 0), (x < 0) & (y <= 0), (x >= 0) & (y < 0)], [1, 2, 3], 0)
    turned = (x + 1j * y) * np.array([1, -1j, -1, 1j])[turns]
    mirrored = turned.imag > turned.real
    octant, place = np.unique(np.where(mirrored, 1j * turned.conj(), turned), return_inverse=True)
    series = angular_series(basis.sigma, basis.lobes)
    k = basis.frequencies[:, None, None, None]
    parts = np.zeros((2, len(series), len(k), len(octant)), dtype=np.complex128)  # cosine and sine, (N, K, p)
    # Far from the centre the function hardly changes on a pixel: within the disc 12 x 12 points are exact, on its edge
    # rays at few angles.
    far = max(2.0, 0.4 / basis.sigma, (np.abs(basis.frequencies).max() + abs(basis.m)) / 2)
    distant = np.hypot(np.abs(octant), basis.core) >= far
    inside = distant & (np.abs(octant) + math.sqrt(0.5) <= radius)
    parts[..., inside] = _average_over_points(basis, octant[inside], len(series))
    rays = (
        (group[chosen], *ray)
        for group, few in ((np.flatnonzero(~distant), False), (np.flatnonzero(distant & ~inside), True))
        for chosen, *ray in _rays_through_squares(basis, octant.real[group], octant.imag[group], radius, few)
    )
    for chosen, phi, weight, inner, outer in rays:
        phi, weight, inner, outer = (
            np.broadcast_to(a, phi.shape).reshape(len(phi), -1) for a in (phi, weight, inner, outer)
        )
        # The function is analytic in r up to a distance of about q: pieces that are not much longer, nor turn too far.
        step = min(1.5, 4.0 / (1e-9 + np.abs(basis.frequencies).max()))
        pieces = max(1, math.ceil(((outer - inner) / (basis.core + inner)).max() / step))
        nodes = ((np.arange(pieces)[:, None] + (_FEW_NODES + 1) / 2) / pieces).ravel()
        length = (outer - inner)[..., None]
        r = inner[..., None] + length * nodes  # (p, A, R)
        log_q = np.log(np.hypot(r, basis.core))
        ratio = r * np.exp(-log_q)
        area = r * length * np.tile(_FEW_WEIGHTS / 2 / pieces, pieces) * weight[..., None]
        radial = np.exp((1j * k - basis.m) * log_q) * area  # (K, p, A, R)
        for n in range(len(series)):
            along = radial.sum(-1)  # (K, p, A)
            for part, wave in zip(parts, (np.cos(n * phi), np.sin(n * phi)), strict=True):
                part[n][:, chosen] = np.einsum("kpa,pa->kp", along, wave)
            radial *= ratio
    seen = np.reshape(basis.orientations, (-1, 1)) - turns * math.pi / 2  # (J, P), from the octant
    angle = np.arange(len(series))[:, None, None] * np.where(mirrored, math.pi / 2 - seen, seen)
    waves = series[:, None, None] * np.stack([np.cos(angle), np.sin(angle)])  # (2, N, J, P)
    return np.asarray(np.einsum("wnjp,wnkp->kjp", waves, parts[..., place]) * np.exp(1j * basis.beta))


def _average_over_points(basis: LogRadialBasis, pixels: Complex, terms: int) -> Complex:
    """The terms of the angular series, averaged over pixels by a product of Gauss rules: `(p,)` -> `(2, N, K, p)`."""
    z = pixels[:, None] + (_FEW_NODES[:, None] + 1j * _FEW_NODES).ravel() / 2  # (p, M)
    q = np.hypot(np.abs(z), basis.core)
    radial = np.exp((1j * basis.frequencies - basis.m) * np.log(q)[..., None])  # (p, M, K)
    radial *= np.multiply.outer(_FEW_WEIGHTS, _FEW_WEIGHTS).reshape(-1, 1) / 4
    waves = np.empty((2, len(z), terms, z.shape[1]))  # cosine and sine of n phi times (r / q)^n, (p, N, M)
    power = np.ones_like(z)
    for n in range(terms):
        waves[0, :, n], waves[1, :, n] = power.real, power.imag
        power *= z / q
    return np.moveaxis((waves @ radial.view(np.float64)).view(np.complex128), 1, -1)


def _rays_through_squares(
    basis: LogRadialBasis, x: Float, y: Float, radius: float, few: bool = False
) -> Iterator[tuple[NDArray[np.int64], Float, Float, Float, Float]]:
    """Quadrature over the unit squares around (x, y): pixels; angles, weights, and where rays enter and leave.

    Angles are split at the corners, where the disc's edge crosses the square's, and at the kinks of the angular factor:
    in between all is analytic. Each of the four arrays has shape `(p, E-1, count, 20)`, or 12 if `few` are enough.
    """
    if x.size == 0:
        return
    crossed = np.hypot(np.abs(x) + 0.5, np.abs(y) + 0.5) > radius
    if crossed.any() and not crossed.all():  # apart, because those on the edge have more breaks
        for kind in (np.flatnonzero(crossed), np.flatnonzero(~crossed)):
            for chosen, phi, weight, inner, outer in _rays_through_squares(basis, x[kind], y[kind], radius, few):
                yield kind[chosen], phi, weight, inner, outer
        return
    theta = np.arctan2(y, x)
    origin = (x == 0) & (y == 0)
    corners = np.array([[-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]])
    angles = np.arctan2(y[:, None] + corners[:, 1], x[:, None] + corners[:, 0]) - theta[:, None]
    angles = np.mod(angles + math.pi, 2 * math.pi) - math.pi  # (P, 4), relative to the pixel's own direction
    breaks = [angles]
    # Around the origin a full turn from -pi/4 on. Half of it sees all of a point-symmetric function, and counts twice.
    half = basis.point_symmetric and basis.core == 0
    if half:
        angles[origin] = np.array([-1, 1, 1, 3]) * math.pi / 4
    else:
        angles[origin] = np.array([-1, 1, 3, 7]) * math.pi / 4
        breaks.append(np.where(origin, 5 * math.pi / 4, angles[:, 0])[:, None])
    low, high = angles.min(1), angles.max(1)
    # The angular factor has a kink where a lobe meets the other's tail, or its own; narrow lobes have decayed to
    # nothing there, and the series of a basis with a core has none.
    kink, period, narrow = {"sum": (0.0, 1, 0.36), "max": (0.5, 1, 0.18), "single": (1.0, 2, 0.36)}[basis.lobes]
    if basis.sigma > narrow and basis.core == 0:
        kinks = np.asarray(basis.orientations)[None] + kink * math.pi - theta[:, None]
        kinks = np.mod(kinks + math.pi / 4, period * math.pi) - math.pi / 4  # the one image that a square can see
        breaks.append(np.clip(kinks, low[:, None], high[:, None]))
    if crossed.any():
        for position, right in ((x, 0.0), (y, math.pi / 2)):
            turn = np.arccos(np.clip((position[:, None] + np.array([-0.5, 0.5])) / radius, -1, 1))
            edge = np.mod(np.hstack([right - turn, right + turn]) - theta[:, None] + math.pi, 2 * math.pi) - math.pi
            breaks.append(np.clip(edge, low[:, None], high[:, None]))
    edges = np.sort(np.concatenate(breaks, axis=1), axis=1)  # (P, E)
    left, width = edges[:, :-1], np.diff(edges, axis=1)
    if crossed.any() or not half:  # many breaks coincide: empty pieces to the end, where they are cut off
        order = np.argsort(-width, axis=1, kind="stable")
        left, width = (np.take_along_axis(a, order, 1)[:, : (width > 0).sum(1).max()] for a in (left, width))
    # Pieces short enough for 20 nodes: at most 4 sigma wide, at most about 4 radians of phase.
    step = min(4 * basis.sigma, 4.0 / (1e-9 + np.abs(basis.frequencies).max()), 1.0)
    pieces = np.maximum(1, np.ceil(width.max(1) / step)).astype(int)  # (P,)
    nodes, weights = (_FEW_NODES, _FEW_WEIGHTS) if few else (_NODES, _WEIGHTS)
    for count in np.unique(pieces):
        chosen = np.flatnonzero(pieces == count)
        span = width[chosen, :, None] / count  # (p, E-1, 1)
        start = left[chosen, :, None] + span * np.arange(count)  # (p, E-1, count)
        phi = start[..., None] + span[..., None] * (nodes + 1) / 2 + theta[chosen, None, None, None]
        inner, outer = _ray_through_square(phi, x[chosen], y[chosen])
        yield chosen, phi, span[..., None] * weights / 2, np.minimum(inner, radius), np.minimum(outer, radius)


def _ray_through_square(phi: Float, x: Float, y: Float) -> tuple[Float, Float]:
    """Radii at which rays at angles phi `(P, ...)` enter and leave the unit squares around (x, y) `(P,)`."""
    near, far = np.zeros_like(phi), np.full_like(phi, np.inf)
    for position, direction in ((x, np.cos(phi)), (y, np.sin(phi))):
        position = position[:, None, None, None]
        direction = np.where(np.abs(direction) < 1e-300, 1e-300, direction)
        first, second = (position - 0.5) / direction, (position + 0.5) / direction
        near = np.maximum(near, np.minimum(first, second))
        far = np.minimum(far, np.maximum(first, second))
    return near, np.maximum(near, far)


def _power(r: Float, exponent: complex) -> Complex:
    """r ** exponent with a positive real part of the exponent, so that 0 goes to 0."""
    positive = r > 0
    return np.asarray(np.where(positive, np.exp(exponent * np.log(np.where(positive, r, 1.0))), 0.0))
