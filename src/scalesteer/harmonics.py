"""Log-radial harmonics (Eq. 1 of the paper) on a pixel grid, and the rule that steers them in scale.

Pure functions of a frozen :class:`LogRadialBasis`; numpy, float64. The paper's symbols, once: k is an order, phi_j an
orientation, sigma the angular width, beta the phase, m the radial decay, s a scale and a the radius of the unscaled
filter.

Conventions (docs/conventions.md): pixels have unit pitch, the origin is the centre of the middle pixel, x grows to the
right, y grows upwards, angle zero points right and angles turn counter-clockwise as seen.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from scalesteer import _checks

Float = NDArray[np.float64]
Complex = NDArray[np.complex128]

PAPER_SCALES: tuple[float, ...] = tuple(size / 7 for size in range(7, 18, 2))
"""The scales of the paper: windows of 7, 9, ..., 17 pixels for a filter of 7."""

WIDE_STEP = 1.36
WIDE_SCALES: tuple[float, ...] = tuple(WIDE_STEP**i for i in range(-4, 7))
"""Those of the layer's default: eleven, 0.29 to 6.3; with a filter of 7, windows of 3 to 45 pixels.

With larger steps or fewer of them a trained layer has more than half of a plain one's equivariance error.
"""

# a * s is a product of floats: 3.5 * (8 / 7) must count as 4, not as 3.999...
_ROUNDING = 1e-9
# A basis of 24 functions then takes 100 MB: scales that come from a file cannot ask for all memory.
_LARGEST_WINDOW = 511
_LEAST_CORE = 0.05  # pixels; less cannot be averaged over pixels with care
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_FEW_NODES, _FEW_WEIGHTS = np.polynomial.legendre.leggauss(12)


@dataclass(frozen=True)
class LogRadialBasis:
    r"""A family of log-radial harmonics: every choice that defines the filters, and nothing learned.

    Eq. 1 of the paper, one complex function for each order k and orientation phi_j:

    .. math:: S_{kj}(r, \phi) = r^{-m} \left(K(\phi, \phi_j) + K(\phi, \phi_j + \pi)\right) e^{i (k \log r + \beta)}

    with :math:`K(\phi, \phi_j) = \exp(-d(\phi, \phi_j)^2 / 2 \sigma^2)`, d the angle between two directions.

    The defaults are the paper's. ``LogRadialBasis.preset(name)`` gives the named families: ``"paper"``; ``"area"``, the
    same averaged over pixels; ``"released-code"``, those of the authors' program; and ``"smooth"``, which steers best
    on real grids and sees the two sides of an edge: one lobe, a smooth core, and pixels averaged to the edge.

    Args:
        orders: The k. A function of order k repeats when it is scaled by exp(2 pi / k).
        orientations: The phi_j in radians, counter-clockwise from the direction of growing columns. Half a turn holds
            all directions of two lobes, a full turn those of one.
        sigma: Angular width of a lobe in radians.
        beta: Phase at r = 1 in radians.
        m: Radial decay. Larger m concentrates the filter at its centre.
        sampling: ``"point"`` takes the value at each pixel's centre; ``"area"`` averages the continuous function over
            each pixel's square, which needs m < 2 so that the centre pixel is integrable.
        centre: The value at r = 0 where Eq. 1 is undefined, for point sampling: ``"one"`` as the paper says; or the
            angular factor of one direction, ``"right"`` (angle 0) or ``"up"`` (angle pi / 2), times exp(i beta).
        lobes: ``"sum"`` of the two lobes as in Eq. 1, the ``"max"`` of them, or ``"single"``, K(phi, phi_j) alone. Two
            lobes make every filter point-symmetric; with one, a filter can tell the two sides of an edge.
        order_unit: ``"radian"`` uses k as it stands in Eq. 1; ``"period"`` means k periods of log r between 1 and the
            corner of the largest window, k_eff = 2 pi k / log(r_max).
        gain: Whether steering multiplies by s^(m-2) (Eq. 3) or by the phase alone.
        normalization: ``"none"``; ``"unit"``, one factor for each complex function that gives it unit energy on the
            unscaled window, which keeps steering exact; or ``"parts"``, which gives the real and the imaginary part
            unit energy each on the largest window and breaks exact steering.
        support: ``"disc"`` keeps the pixels with r <= a s; ``"crop"`` cuts square windows out of the disc of the
            largest window; ``"averaged"``, for ``sampling="area"``, takes the function as zero beyond a s and averages
            that over each pixel, so that a pixel on the edge counts by its share.
        reference_size: The window size at which the coefficients are the unsteered ones; ``None`` means the layer's
            `kernel_size`.
        window: The largest window, in pixels. Needed by ``order_unit="period"``, ``support="crop"`` and
            ``normalization="parts"``; a layer fills it in when it is built, and keeps it.
        core: Radius in pixels, at scale 1, within which the function is smooth instead of singular; 0 as in Eq. 1. It
            grows with the scale, so that the filter at every scale is the enlarged filter exactly;
            :func:`evaluate` has the formula.

    Example:
        >>> basis = LogRadialBasis.preset("smooth")
        >>> basis.shape
        (2, 8)
        >>> lean = replace(basis, orders=(1.0,))  # 16 coefficients for each pair of channels instead of 32
    """

    orders: tuple[float, ...] = (0.5, 1.0, 2.0)
    orientations: tuple[float, ...] = tuple(j * math.pi / 8 for j in range(1, 9))
    sigma: float = math.pi / 16
    beta: float = 0.0
    m: float = 1.0
    sampling: Literal["point", "area"] = "point"
    centre: Literal["one", "right", "up"] = "one"
    lobes: Literal["sum", "max", "single"] = "sum"
    order_unit: Literal["radian", "period"] = "radian"
    gain: bool = True
    normalization: Literal["none", "unit", "parts"] = "none"
    support: Literal["disc", "crop", "averaged"] = "disc"
    reference_size: int | None = None
    window: int | None = None
    core: float = 0.0

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        for name in ("orders", "orientations"):
            put(name, _checks.reals(name, getattr(self, name)))
        for name in ("sigma", "beta", "m", "core"):
            put(name, _checks.real(name, getattr(self, name)))
        if self.sigma <= 0:
            raise ValueError(f"`sigma` must be positive (got {self.sigma}): it is the width of a lobe in radians.")
        for name, options in _CHOICES.items():
            _checks.choice(name, getattr(self, name), options)
        put("gain", _checks.boolean("gain", self.gain))
        for name in ("reference_size", "window"):
            if getattr(self, name) is not None:
                put(name, _checks.integer(name, getattr(self, name), minimum=3))
        if self.core < 0:
            raise ValueError(f"`core` must not be negative (got {self.core}): it is a radius in pixels.")
        if 0 < self.core < _LEAST_CORE or (self.core > 0 and self.sigma < 0.02):
            raise ValueError(
                f"`core` must be 0 or at least {_LEAST_CORE} pixels, with `sigma` at least 0.02 (got core={self.core}, "
                f"sigma={self.sigma}): less cannot be averaged over pixels with care."
            )
        if self.support == "averaged" and self.sampling == "point":
            raise ValueError(
                "support='averaged' needs sampling='area' (got 'point'): its edge is averaged over pixels."
            )
        if self.sampling == "area":
            if self.m >= 2 and self.core == 0:
                raise ValueError(f"`m` must be below 2 with sampling='area' (got {self.m}): r^-m has no mean around 0.")
            if self.sigma < 1e-3:
                raise ValueError(f"`sigma` must be at least 0.001 with sampling='area' (got {self.sigma}).")
        if self.centre != "one" and (self.sampling == "area" or self.core > 0):
            raise ValueError(
                f"`centre` (got {self.centre!r}) applies to sampling='point' without `core` only; leave it at 'one'."
            )

    @classmethod
    def preset(cls, name: str) -> LogRadialBasis:
        """Return a named family: ``"paper"``, ``"area"``, ``"released-code"`` or ``"smooth"``.

        ``"released-code"`` has the functions of the authors' program for MNIST-Scale, pixel by pixel; its parts-wise
        normalisation makes steering inexact. The layer of that program also has no bias.
        """
        return PRESETS[_checks.lookup("preset", name, tuple(PRESETS))]

    @classmethod
    def of(cls, basis: LogRadialBasis | str) -> LogRadialBasis:
        """Return a basis as it is, or the preset that a name stands for."""
        if isinstance(basis, str):
            return PRESETS[_checks.lookup("basis", basis, tuple(PRESETS))]
        if not isinstance(basis, LogRadialBasis):
            raise TypeError(f"`basis` must be a LogRadialBasis or the name of a preset (got {basis!r}).")
        return basis

    @property
    def shape(self) -> tuple[int, int]:
        """Number of orders and of orientations."""
        return len(self.orders), len(self.orientations)

    @property
    def point_symmetric(self) -> bool:
        """Whether every function is the same on both sides of its centre, S(-x) = S(x)."""
        return self.lobes != "single"

    @property
    def frequencies(self) -> Float:
        """The k that multiply log r, in radians: the orders, or 2 pi k / log r_max if given in periods."""
        if self.order_unit == "radian":
            return np.asarray(self.orders)
        corner = math.sqrt(2) * (self._need_window() // 2)
        return 2 * math.pi * np.asarray(self.orders) / math.log(corner)

    def resolve(self, window: int) -> LogRadialBasis:
        """Return this basis with the largest window filled in, where the definition depends on it."""
        depends = self.order_unit == "period" or self.support == "crop" or self.normalization == "parts"
        if not depends or self.window is not None:
            return self
        if window < 3:
            raise ValueError(
                f"the largest window must be at least 3 for this basis (got {window}): use larger `scales`."
            )
        return replace(self, window=window)

    def _need_window(self) -> int:
        if self.window is None:
            raise ValueError(
                "`window` is not set: order_unit='period', support='crop' and normalization='parts' depend on the "
                "largest window; use basis.resolve(window) or give `window`."
            )
        return self.window


_CHOICES = {name: get_args(t) for name, t in get_type_hints(LogRadialBasis).items() if get_origin(t) is Literal}

PRESETS = {
    "paper": LogRadialBasis(),
    "area": LogRadialBasis(sampling="area"),
    # The authors' angles begin at the top and turn clockwise: the vertical bar is there twice, as their 0 and pi, and
    # has the largest value at the centre.
    "released-code": LogRadialBasis(
        orientations=tuple(math.pi / 2 - j * math.pi / 8 for j in range(9)),
        beta=-math.pi / 4,
        centre="up",
        lobes="max",
        order_unit="period",
        gain=False,
        normalization="parts",
        support="crop",
        reference_size=11,
    ),
    # By measurement: docs/guide/maths.md has rank and steering error of this choice and of its neighbours.
    "smooth": LogRadialBasis(
        orders=(0.5, 2.0),
        orientations=tuple(j * math.pi / 4 for j in range(1, 9)),
        sigma=math.pi / 8,
        sampling="area",
        lobes="single",
        support="averaged",
        core=0.75,
    ),
}


def window_size(kernel_size: int, scale: float, basis: LogRadialBasis | None = None) -> int:
    """Width of the window that holds every pixel with r <= a s, a = kernel_size / 2: 2 floor(a s) + 1.

    A basis with ``support="averaged"`` needs every pixel whose square the disc touches: 2 ceil(a s - 1/2) + 1.

    Example:
        >>> [window_size(7, s) for s in PAPER_SCALES]
        [7, 9, 11, 13, 15, 17]
    """
    radius = kernel_size / 2 * scale
    if basis and basis.support == "averaged":
        return 2 * math.ceil(radius - 0.5 - _ROUNDING) + 1
    return 2 * math.floor(radius + _ROUNDING) + 1


def window_sizes(kernel_size: int, scales: Sequence[float], basis: LogRadialBasis | None = None) -> tuple[int, ...]:
    """The window of each scale; raises an error or warns where scales make no sense together."""
    if kernel_size * scales[0] < 2 - _ROUNDING:
        raise ValueError(
            f"the window of scale {scales[0]:.4g} is a single pixel with kernel_size={kernel_size}, which holds no "
            f"pattern: use scales of at least {2 / kernel_size:.4g} or a larger `kernel_size`."
        )
    wide = kernel_size * scales[-1] >= _LARGEST_WINDOW + 1
    sizes = () if wide else tuple(window_size(kernel_size, s, basis) for s in scales)
    if wide or sum(n * n for n in sizes) > _LARGEST_WINDOW**2:
        raise ValueError(
            f"the windows of {len(scales)} scales up to {scales[-1]:.4g} with kernel_size={kernel_size} have more taps "
            f"together than one of {_LARGEST_WINDOW} x {_LARGEST_WINDOW} pixels, which is the limit: use smaller or "
            "fewer `scales` or a smaller `kernel_size`."
        )
    # Scales may be dense; but a filter that should be a fifth larger, and is not, has no room. An averaged edge grows
    # within its pixels.
    stuck = any(sizes[i] == sizes[i + 1] and scales[i + 1] > 1.2 * scales[i] for i in range(len(scales) - 1))
    if stuck and not (basis and basis.support == "averaged"):
        warnings.warn(
            f"scales that are far apart share a window (kernel_size={kernel_size} gives windows of "
            f"{', '.join(map(str, sizes))} pixels): use a larger `kernel_size` or fewer `scales`.",
            stacklevel=3,
        )
    return sizes


def recommended_scales(basis: LogRadialBasis, kernel_size: int) -> tuple[float, ...]:
    """`WIDE_SCALES` for a basis with an averaged edge, `PAPER_SCALES` for others; without those that have no room.

    A scale has no room if its window would be a single pixel or, without an averaged edge, that of the scale before.

    Example:
        >>> [round(s, 2) for s in recommended_scales(LogRadialBasis.preset("smooth"), 3)]
        [0.74, 1.0, 1.36, 1.85, 2.52, 3.42, 4.65, 6.33]
        >>> recommended_scales(LogRadialBasis(), 7) == PAPER_SCALES
        True
    """
    if basis.support == "averaged":
        return tuple(s for s in WIDE_SCALES if kernel_size * s >= 2)
    return tuple({window_size(kernel_size, s): s for s in reversed(PAPER_SCALES)}.values())[::-1]


def grid(size: int) -> tuple[Float, Float]:
    """Coordinates (x, y) of the pixel centres of a `size` x `size` window; y grows upwards, rows downwards.

    Example:
        >>> x, y = grid(3)
        >>> x[0].tolist(), y[:, 0].tolist()
        ([-1.0, 0.0, 1.0], [1.0, 0.0, -1.0])
    """
    ticks = np.arange(size) - (size - 1) / 2
    x, y = np.meshgrid(ticks, ticks[::-1])
    return x, y


def angular_factor(basis: LogRadialBasis, angle: Float) -> Float:
    """K(phi, phi_j) alone, with K(phi, phi_j + pi), or the larger of the two, by `lobes`; `(...)` -> `(J, ...)`."""
    phi_j = np.reshape(basis.orientations, (-1,) + (1,) * np.ndim(angle))
    towards = np.abs(np.mod(angle - phi_j + math.pi, 2 * math.pi) - math.pi)  # d(phi, phi_j), in [0, pi]
    near, far = (np.exp(-((d / basis.sigma) ** 2) / 2) for d in (towards, math.pi - towards))
    if basis.lobes == "single":
        return np.asarray(near)
    return np.asarray(near + far if basis.lobes == "sum" else np.maximum(near, far))


@lru_cache(maxsize=64)
def _angular_series(sigma: float, lobes: Literal["sum", "max", "single"]) -> Float:
    """The a_n of sum_n a_n cos n(phi - phi_j), the angular factor; up to an n where a Gaussian's are below 1e-14."""
    count = math.ceil(8 / sigma) + 4
    pieces = 2 * math.ceil(math.pi / (4 * sigma))  # even, so that a kink at pi / 2 lies between two
    phi = ((np.arange(pieces)[:, None] + (_NODES + 1) / 2) * math.pi / pieces).ravel()
    weight = np.tile(_WEIGHTS / pieces, pieces) * np.where(np.arange(count + 1) > 0, 1.0, 0.5)[:, None]
    lobe = angular_factor(LogRadialBasis(orientations=(0.0,), sigma=sigma, lobes=lobes), phi)[0]
    return np.asarray((np.cos(np.arange(count + 1)[:, None] * phi) * weight) @ lobe)


def evaluate(basis: LogRadialBasis, x: Float, y: Float) -> Complex:
    r"""The continuous function S_kj of Eq. 1 at points in the plane, before normalisation; `(...)` -> `(K, J, ...)`.

    At r = 0 the value is the one that `basis.centre` names. With a core c no exception is needed. With
    :math:`q = \sqrt{r^2 + c^2}` and the Fourier series :math:`\sum_n a_n \cos n(\phi - \phi_j)` of the angular factor,

    .. math:: S_{kj}(r, \phi) = q^{-m} e^{i (k \log q + \beta)} \sum_n a_n (r / q)^n \cos n(\phi - \phi_j)

    Since :math:`r^n \cos n\phi` is a polynomial in x and y, this is smooth everywhere. The angular factor keeps its
    mean a_0 at every r and fades to it at the centre; far outside the core Eq. 1 is left. The series ends where the
    coefficients of a Gaussian lobe fall below 1e-14, so that a kink opposite a very wide lobe is rounded.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    r = np.hypot(np.hypot(x, y), basis.core)
    at_centre = r == 0
    log_r = np.log(np.where(at_centre, 1.0, r))
    k = np.reshape(basis.frequencies, (-1,) + (1,) * r.ndim)
    if basis.core > 0:
        angular = np.zeros((basis.shape[1], *r.shape))
        power, turn = np.ones_like(r, dtype=np.complex128), (x + 1j * y) / r
        for n, a in enumerate(_angular_series(basis.sigma, basis.lobes)):
            angular += a * np.multiply.outer(np.exp(-1j * n * np.asarray(basis.orientations)), power).real
            power *= turn
    else:
        towards = {"one": 0.0, "right": 0.0, "up": math.pi / 2}[basis.centre]
        angular = angular_factor(basis, np.where(at_centre, towards, np.arctan2(y, x)))
    with np.errstate(over="ignore", invalid="ignore"):  # an extreme m is told where a window is known
        radial = np.exp(-basis.m * log_r + 1j * (k * log_r + basis.beta))  # (K, ...)
        values = radial[:, None] * angular[None]  # (K, J, ...)
    return np.asarray(np.where(at_centre, 1.0, values) if basis.centre == "one" else values)


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
    """:func:`average` of functions with a core, term by term of the angular series (see :func:`evaluate`)."""
    # A quarter turn of a pixel turns the orientations, exchanging x and y mirrors them; one octant of pixels is enough.
    turns = np.select([(x <= 0) & (y > 0), (x < 0) & (y <= 0), (x >= 0) & (y < 0)], [1, 2, 3], 0)
    turned = (x + 1j * y) * np.array([1, -1j, -1, 1j])[turns]
    mirrored = turned.imag > turned.real
    octant, place = np.unique(np.where(mirrored, 1j * turned.conj(), turned), return_inverse=True)
    series = _angular_series(basis.sigma, basis.lobes)
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


@lru_cache(maxsize=64)
def sample(basis: LogRadialBasis, size: int, radius: float = math.inf) -> Complex:
    """S_kj on the pixels of a window, `(K, J, size, size)`, before support and normalisation. Cached, read-only.

    An area average takes S_kj as zero beyond `radius`.
    """
    x, y = grid(size)
    if basis.sampling == "point":
        values = evaluate(basis, x, y)
    elif basis.point_symmetric and basis.core == 0:
        # S(-x) = S(x): the first half of the raster and the centre are enough.
        half = size * size // 2 + 1
        first = average(basis, x.ravel()[:half], y.ravel()[:half], radius)
        values = np.concatenate([first, first[..., -2::-1]], axis=-1).reshape(*basis.shape, size, size)
    else:
        values = average(basis, x.ravel(), y.ravel(), radius).reshape(*basis.shape, size, size)
    with np.errstate(over="ignore", invalid="ignore"):
        largest = np.abs(values).max()
    if not largest < 1e100:  # squares are summed later
        raise ValueError(f"the basis is out of range on a window of {size} pixels: `m` (={basis.m}) is too extreme.")
    values.flags.writeable = False
    return values


def support(basis: LogRadialBasis, kernel_size: int, scale: float) -> NDArray[np.bool_]:
    """The pixels of the window at `scale` that belong to the filter, by `basis.support`.

    Those with r <= a s; a crop of the largest disc; or all whose square the disc touches.
    """
    size = window_size(kernel_size, scale, basis)
    radius = max(basis._need_window(), size) // 2 if basis.support == "crop" else kernel_size / 2 * scale
    inset = 0.5 if basis.support == "averaged" else 0.0  # of the nearest point of a pixel's square
    return np.asarray(np.hypot(*(np.maximum(np.abs(c) - inset, 0) for c in grid(size))) <= radius + _ROUNDING)


def _sample_at(basis: LogRadialBasis, kernel_size: int, scale: float) -> Complex:
    """:func:`sample` on the window of a scale: core and edge have grown with it."""
    radius = kernel_size / 2 * scale if basis.support == "averaged" else math.inf
    if 0 < basis.core * scale < _LEAST_CORE:
        raise ValueError(
            f"`core` (={basis.core:g}) has {basis.core * scale:.3g} pixels at scale {scale:.4g} and must have at least "
            f"{_LEAST_CORE}: use a `core` of 0 or at least {_LEAST_CORE / scale:.3g}, or larger `scales`."
        )
    return sample(replace(basis, core=basis.core * scale), window_size(kernel_size, scale, basis), radius)


def steering_factors(basis: LogRadialBasis, scale: float) -> Complex:
    """The constants s^(m-2) e^(-i k log s) of Eq. 3, one for each order, that enlarge each function by `scale`.

    Example:
        >>> abs(steering_factors(LogRadialBasis(orders=(1.0,)), 2.0)).tolist()
        [0.5]
    """
    decay = basis.m - 2 if basis.gain else 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.exp(math.log(scale) * (decay - 1j * basis.frequencies)))


@lru_cache(maxsize=64)
def normalizers(basis: LogRadialBasis, kernel_size: int) -> Float:
    """Factors of the real and imaginary part of each function, `(K, J, 2)`, whatever the scale.

    Raises:
        ValueError: If a function vanishes on the grid, since nothing could be learned with it.
    """
    if basis.normalization == "parts":
        size = basis._need_window()
        inside = np.hypot(*grid(size)) <= size // 2 + _ROUNDING
        values = sample(basis, size)
    else:
        values, inside = _sample_at(basis, kernel_size, 1.0), support(basis, kernel_size, 1.0)
    energies = np.stack([(part[..., inside] ** 2).sum(-1) for part in (values.real, values.imag)], axis=-1)
    if basis.normalization != "parts":
        energies = np.broadcast_to(energies.sum(-1, keepdims=True), energies.shape)
    dead = np.argwhere(energies <= 1e-24 * energies.max())
    if dead.size:
        k, j = dead[0, 0], dead[0, 1]
        part = ("real part of the ", "imaginary part of the ")[dead[0, 2]] if basis.normalization == "parts" else ""
        raise ValueError(
            f"the {part}function of order {basis.orders[k]} and orientation {basis.orientations[j]:.4f} vanishes on "
            f"the grid (sigma={basis.sigma}): use a wider `sigma`, another orientation or other phase `beta`."
        )
    return np.ones_like(energies) if basis.normalization == "none" else np.asarray(energies**-0.5)


def steered_basis(basis: LogRadialBasis, kernel_size: int, scale: float) -> Float:
    r"""The real functions whose weighted sum is the filter at `scale` (the real part of Eq. 3).

    With coefficients c = c_re + i c_im, the filter on radius a s is

    .. math:: \Re \Big(s^{m-2} \sum_k e^{-ik \log s} \sum_j c_{kj} S_{kj}\Big)
              = \sum_{kj} c^{re}_{kj} B_{kj0} + c^{im}_{kj} B_{kj1}

    Shape: `(K, J, 2, n, n)` with n = ``window_size(kernel_size, scale)``.
    """
    values = _sample_at(basis, kernel_size, scale)
    factors = normalizers(basis, kernel_size)[..., None, None]
    if basis.normalization != "none":
        values = values.real * factors[:, :, 0] + 1j * values.imag * factors[:, :, 1]
    reference = kernel_size if basis.reference_size is None else basis.reference_size
    with np.errstate(over="ignore", invalid="ignore"):
        steered = values * steering_factors(basis, scale * kernel_size / reference)[:, None, None, None]
        steered = steered * support(basis, kernel_size, scale)
        largest = np.abs(steered).max()
    if not largest < 1e15:  # far from anything useful, and close to where float32 overflows
        raise ValueError(f"the filter at scale {scale} is out of range: `m` (={basis.m}) or the scale is too extreme.")
    return np.stack([steered.real, -steered.imag], axis=2)


@lru_cache(maxsize=16)
def stacked_basis(basis: LogRadialBasis, kernel_size: int, scales: tuple[float, ...]) -> Float:
    """The functions of :func:`steered_basis` at all scales side by side, `(2 K J, T)`: T taps. Cached, read-only."""
    steered = [steered_basis(basis, kernel_size, s) for s in scales]
    values = np.concatenate([b.reshape(-1, b.shape[-1] ** 2) for b in steered], axis=1)
    values.flags.writeable = False
    return values
