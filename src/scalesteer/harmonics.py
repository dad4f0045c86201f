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
from collections.abc import Sequence
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

# a * s is a product of floats: 3.5 * (8 / 7) must count as 4, not as 3.999...
_ROUNDING = 1e-9
# A basis of 24 functions then takes 100 MB: scales that come from a file cannot ask for all memory.
_LARGEST_WINDOW = 511
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(20)


@dataclass(frozen=True)
class LogRadialBasis:
    r"""A family of log-radial harmonics: every choice that defines the filters, and nothing learned.

    Eq. 1 of the paper, one complex function for each order k and orientation phi_j:

    .. math:: S_{kj}(r, \phi) = r^{-m} \left(K(\phi, \phi_j) + K(\phi, \phi_j + \pi)\right) e^{i (k \log r + \beta)}

    with :math:`K(\phi, \phi_j) = \exp(-d(\phi, \phi_j)^2 / 2 \sigma^2)`, d the angle between two directions.

    The defaults are the paper's. ``LogRadialBasis.preset(name)`` gives the named families: ``"paper"``, ``"area"`` (the
    same, averaged over pixels) and ``"released-code"`` (what the authors' code computes).

    Args:
        orders: The k. A function of order k repeats when it is scaled by exp(2 pi / k).
        orientations: The phi_j in radians, counter-clockwise from the direction of growing columns.
        sigma: Angular width of a lobe in radians.
        beta: Phase at r = 1 in radians.
        m: Radial decay. Larger m concentrates the filter at its centre.
        sampling: ``"point"`` takes the value at each pixel's centre; ``"area"`` averages the continuous function over
            each pixel's square, which needs m < 2 so that the centre pixel is integrable.
        centre: The value at r = 0 where Eq. 1 is undefined, for point sampling: ``"one"`` as the paper says, or
            ``"angular"``, the angular factor at angle 0 times exp(i beta).
        lobes: ``"sum"`` of the two lobes as in Eq. 1, or the ``"max"`` of them.
        order_unit: ``"radian"`` uses k as it stands in Eq. 1; ``"period"`` means k periods of log r between 1 and the
            corner of the largest window, k_eff = 2 pi k / log(r_max).
        gain: Whether steering multiplies by s^(m-2) (Eq. 3) or by the phase alone.
        normalization: ``"none"``; ``"unit"``, one factor for each complex function that gives it unit energy on the
            unscaled window, which keeps steering exact; or ``"parts"``, which gives the real and the imaginary part
            unit energy each on the largest window and breaks exact steering.
        support: ``"disc"`` keeps the pixels with r <= a s; ``"crop"`` cuts square windows out of the disc of the
            largest window.
        reference_size: The window size at which the coefficients are the unsteered ones; ``None`` means the layer's
            `kernel_size`.
        window: The largest window, in pixels. Needed by ``order_unit="period"``, ``support="crop"`` and
            ``normalization="parts"``; a layer fills it in when it is built, and keeps it.

    Example:
        >>> basis = LogRadialBasis.preset("area")
        >>> basis.shape
        (3, 8)
    """

    orders: tuple[float, ...] = (0.5, 1.0, 2.0)
    orientations: tuple[float, ...] = tuple(j * math.pi / 8 for j in range(1, 9))
    sigma: float = math.pi / 16
    beta: float = 0.0
    m: float = 1.0
    sampling: Literal["point", "area"] = "point"
    centre: Literal["one", "angular"] = "one"
    lobes: Literal["sum", "max"] = "sum"
    order_unit: Literal["radian", "period"] = "radian"
    gain: bool = True
    normalization: Literal["none", "unit", "parts"] = "none"
    support: Literal["disc", "crop"] = "disc"
    reference_size: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        for name in ("orders", "orientations"):
            put(name, _checks.reals(name, getattr(self, name)))
        for name in ("sigma", "beta", "m"):
            put(name, _checks.real(name, getattr(self, name)))
        if self.sigma <= 0:
            raise ValueError(f"`sigma` must be positive (got {self.sigma}): it is the width of a lobe in radians.")
        for name, options in _CHOICES.items():
            _checks.choice(name, getattr(self, name), options)
        put("gain", _checks.boolean("gain", self.gain))
        for name in ("reference_size", "window"):
            if getattr(self, name) is not None:
                put(name, _checks.integer(name, getattr(self, name), minimum=3))
        if self.sampling == "area":
            if self.m >= 2:
                raise ValueError(f"`m` must be below 2 with sampling='area' (got {self.m}): r^-m has no mean around 0.")
            if self.sigma < 1e-3:
                raise ValueError(f"`sigma` must be at least 0.001 with sampling='area' (got {self.sigma}).")
            if self.centre != "one":
                raise ValueError(f"`centre` (got {self.centre!r}) applies to sampling='point' only; leave it at 'one'.")

    @classmethod
    def preset(cls, name: str) -> LogRadialBasis:
        """Return a named family: ``"paper"``, ``"area"`` or ``"released-code"``.

        The layer of the authors' code also has no bias, and its parts-wise normalisation makes steering inexact.
        """
        return PRESETS[_checks.choice("preset", name, tuple(PRESETS))]

    @classmethod
    def of(cls, basis: LogRadialBasis | str) -> LogRadialBasis:
        """Return a basis as it is, or the preset that a name stands for."""
        if isinstance(basis, str):
            return PRESETS[_checks.choice("basis", basis, tuple(PRESETS))]
        if not isinstance(basis, LogRadialBasis):
            raise TypeError(f"`basis` must be a LogRadialBasis or the name of a preset (got {basis!r}).")
        return basis

    @property
    def shape(self) -> tuple[int, int]:
        """Number of orders and of orientations."""
        return len(self.orders), len(self.orientations)

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
    "released-code": LogRadialBasis(
        orientations=tuple(j * math.pi / 8 for j in range(9)),
        beta=-math.pi / 4,
        centre="angular",
        lobes="max",
        order_unit="period",
        gain=False,
        normalization="parts",
        support="crop",
        reference_size=11,
    ),
}


def window_size(kernel_size: int, scale: float) -> int:
    """Width of the window that holds every pixel with r <= a s, a = kernel_size / 2: 2 floor(a s) + 1.

    Example:
        >>> [window_size(7, s) for s in PAPER_SCALES]
        [7, 9, 11, 13, 15, 17]
    """
    return 2 * math.floor(kernel_size / 2 * scale + _ROUNDING) + 1


def window_sizes(kernel_size: int, scales: Sequence[float]) -> tuple[int, ...]:
    """The window of each scale; raises an error or warns where scales make no sense together."""
    if kernel_size * scales[0] < 2 - _ROUNDING:
        raise ValueError(
            f"the window of scale {scales[0]:.4g} is a single pixel with kernel_size={kernel_size}, which holds no "
            f"pattern: use scales of at least {2 / kernel_size:.4g} or a larger `kernel_size`."
        )
    wide = kernel_size * scales[-1] >= _LARGEST_WINDOW + 1
    sizes = () if wide else tuple(window_size(kernel_size, s) for s in scales)
    if wide or sum(n * n for n in sizes) > _LARGEST_WINDOW**2:
        raise ValueError(
            f"the windows of {len(scales)} scales up to {scales[-1]:.4g} with kernel_size={kernel_size} have more taps "
            f"together than one of {_LARGEST_WINDOW} x {_LARGEST_WINDOW} pixels, which is the limit: use smaller or "
            "fewer `scales` or a smaller `kernel_size`."
        )
    # Scales may be dense; but a filter that should be a fifth larger, and is not, has no room.
    if any(sizes[i] == sizes[i + 1] and scales[i + 1] > 1.2 * scales[i] for i in range(len(scales) - 1)):
        warnings.warn(
            f"scales that are far apart share a window (kernel_size={kernel_size} gives windows of "
            f"{', '.join(map(str, sizes))} pixels): use a larger `kernel_size` or fewer `scales`.",
            stacklevel=3,
        )
    return sizes


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
    """K(phi, phi_j) + K(phi, phi_j + pi), or the larger of the two, for every orientation; `(...)` -> `(J, ...)`."""
    phi_j = np.reshape(basis.orientations, (-1,) + (1,) * np.ndim(angle))
    towards = np.abs(np.mod(angle - phi_j + math.pi, 2 * math.pi) - math.pi)  # d(phi, phi_j), in [0, pi]
    near, far = (np.exp(-((d / basis.sigma) ** 2) / 2) for d in (towards, math.pi - towards))
    return np.asarray(near + far if basis.lobes == "sum" else np.maximum(near, far))


def evaluate(basis: LogRadialBasis, x: Float, y: Float) -> Complex:
    """The continuous function S_kj of Eq. 1 at points in the plane, before any normalisation; `(...)` -> `(K, J, ...)`.

    At r = 0 the value is the one that `basis.centre` names.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    r = np.hypot(x, y)
    at_centre = r == 0
    log_r = np.log(np.where(at_centre, 1.0, r))
    k = np.reshape(basis.frequencies, (-1,) + (1,) * r.ndim)
    with np.errstate(over="ignore", invalid="ignore"):  # an extreme m is told where a window is known
        radial = np.exp(-basis.m * log_r + 1j * (k * log_r + basis.beta))  # (K, ...)
        values = radial[:, None] * angular_factor(basis, np.arctan2(y, x))[None]  # (K, J, ...)
    return np.asarray(np.where(at_centre, 1.0, values) if basis.centre == "one" else values)


def average(basis: LogRadialBasis, x: Float, y: Float) -> Complex:
    r"""The average of S_kj over the unit square around each point, exact to about 1e-12.

    In polar coordinates the radial integral is closed, so that only a smooth integral over angles is left:

    .. math:: \int \Phi_j(\phi) e^{i\beta} \left[\frac{r^{2 - m + ik}}{2 - m + ik}\right]_{r_1(\phi)}^{r_2(\phi)} d\phi

    where a ray at angle phi enters the square at r_1 and leaves it at r_2 (r_1 = 0 around the origin). Between the
    angles of the corners the integrand is analytic; Gauss-Legendre quadrature does the rest.

    Shape: `(P,)`, integer coordinates -> `(K, J, P)`.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    theta = np.arctan2(y, x)
    corners = np.array([[-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]])
    angles = np.arctan2(y[:, None] + corners[:, 1], x[:, None] + corners[:, 0]) - theta[:, None]
    angles = np.mod(angles + math.pi, 2 * math.pi) - math.pi  # (P, 4), relative to the pixel's own direction
    # Half a turn sees all of the centre pixel, by point symmetry: -pi/4 to 3 pi/4, counted twice below.
    origin = (x == 0) & (y == 0)
    angles[origin] = np.array([-1, 1, 1, 3]) * math.pi / 4
    low, high = angles.min(1), angles.max(1)
    breaks = [angles]
    # The angular factor has a kink where a lobe meets the other's tail; narrow lobes have decayed to nothing there.
    turn, narrow = (0.0, 0.36) if basis.lobes == "sum" else (math.pi / 2, 0.18)
    if basis.sigma > narrow:
        kinks = np.asarray(basis.orientations)[None] + turn - theta[:, None]
        kinks = np.mod(kinks + math.pi / 4, math.pi) - math.pi / 4  # the one image that a square can see
        breaks.append(np.clip(kinks, low[:, None], high[:, None]))
    edges = np.sort(np.concatenate(breaks, axis=1), axis=1)  # (P, E)
    left, width = edges[:, :-1], np.diff(edges, axis=1)
    # Pieces short enough for 20 nodes: at most 4 sigma wide, at most about 4 radians of phase.
    step = min(4 * basis.sigma, 4.0 / (1e-9 + np.abs(basis.frequencies).max()), 1.0)
    pieces = np.maximum(1, np.ceil(width.max(1) / step)).astype(int)  # (P,)
    power = 2 - basis.m + 1j * basis.frequencies  # (K,)
    result = np.zeros((*basis.shape, x.size), dtype=np.complex128)
    for count in np.unique(pieces):
        chosen = pieces == count
        span = width[chosen, :, None] / count  # (p, E-1, 1)
        start = left[chosen, :, None] + span * np.arange(count)  # (p, E-1, count)
        phi = start[..., None] + span[..., None] * (_NODES + 1) / 2 + theta[chosen, None, None, None]
        weight = span[..., None] * _WEIGHTS / 2  # (p, E-1, 1, 20)
        inner, outer = _ray_through_square(phi, x[chosen], y[chosen])
        angular = angular_factor(basis, phi) * weight  # (J, p, E-1, count, 20)
        for i, exponent in enumerate(power):
            radial = (_power(outer, exponent) - _power(inner, exponent)) / exponent
            result[i][:, chosen] = np.einsum("jpecn,pecn->jp", angular, radial)
    result[..., origin] *= 2
    return np.asarray(result * np.exp(1j * basis.beta))


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
def sample(basis: LogRadialBasis, size: int) -> Complex:
    """S_kj on the pixels of a window, `(K, J, size, size)`, before support and normalisation. Cached, read-only."""
    x, y = grid(size)
    if basis.sampling == "point":
        values = evaluate(basis, x, y)
    else:
        # S(-x) = S(x): the first half of the raster and the centre are enough.
        half = size * size // 2 + 1
        first = average(basis, x.ravel()[:half], y.ravel()[:half])
        values = np.concatenate([first, first[..., -2::-1]], axis=-1).reshape(*basis.shape, size, size)
    with np.errstate(over="ignore", invalid="ignore"):
        largest = np.abs(values).max()
    if not largest < 1e100:  # squares are summed later
        raise ValueError(f"the basis is out of range on a window of {size} pixels: `m` (={basis.m}) is too extreme.")
    values.flags.writeable = False
    return values


def support(basis: LogRadialBasis, kernel_size: int, scale: float) -> NDArray[np.bool_]:
    """The pixels of the window at `scale` that belong to the filter: r <= a s, or a crop of the largest disc."""
    size = window_size(kernel_size, scale)
    radius = max(basis._need_window(), size) // 2 if basis.support == "crop" else kernel_size / 2 * scale
    return np.asarray(np.hypot(*grid(size)) <= radius + _ROUNDING)


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
    else:
        size, inside = kernel_size, support(basis, kernel_size, 1.0)
    values = sample(basis, size)
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
    values = sample(basis, window_size(kernel_size, scale))
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
