"""Log-radial harmonics (Eq. 1 of the paper) on a pixel grid, and the rule that steers them in scale.

Pure functions of a frozen :class:`~scalesteer.LogRadialBasis`; numpy, float64. The paper's symbols, once: k is an
order, phi_j an orientation, sigma the angular width, beta the phase, m the radial decay, s a scale and a the radius of
the unscaled filter.

Conventions (docs/conventions.md): pixels have unit pitch, the origin is the centre of the middle pixel, x grows to the
right, y grows upwards, angle zero points right and angles turn counter-clockwise as seen.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from scalesteer.averages import Complex as Complex
from scalesteer.averages import Float as Float
from scalesteer.averages import angular_factor as angular_factor
from scalesteer.averages import angular_series, average
from scalesteer.basis import LEAST_CORE
from scalesteer.basis import PRESETS as PRESETS
from scalesteer.basis import LogRadialBasis as LogRadialBasis

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


def evaluate(basis: LogRadialBasis, x: Float, y: Float) -> Complex:
    r"""The continuous function S_kj of Eq. 1 at points in the plane, before normalisation; `(...)` -> `(K, J, ...)`.

    At r = 0 the value is the one that `basis.centre` names. With a core c the centre is no special case. With
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
        for n, a in enumerate(angular_series(basis.sigma, basis.lobes)):
            angular += a * np.multiply.outer(np.exp(-1j * n * np.asarray(basis.orientations)), power).real
            power *= turn
    else:
        towards = {"one": 0.0, "right": 0.0, "up": math.pi / 2}[basis.centre]
        angular = angular_factor(basis, np.where(at_centre, towards, np.arctan2(y, x)))
    with np.errstate(over="ignore", invalid="ignore"):  # an extreme m is told where a window is known
        radial = np.exp(-basis.m * log_r + 1j * (k * log_r + basis.beta))  # (K, ...)
        values = radial[:, None] * angular[None]  # (K, J, ...)
    return np.asarray(np.where(at_centre, 1.0, values) if basis.centre == "one" else values)


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
    radius = max(basis.need_window(), size) // 2 if basis.support == "crop" else kernel_size / 2 * scale
    inset = 0.5 if basis.support == "averaged" else 0.0  # of the nearest point of a pixel's square
    return np.asarray(np.hypot(*(np.maximum(np.abs(c) - inset, 0) for c in grid(size))) <= radius + _ROUNDING)


def _sample_at(basis: LogRadialBasis, kernel_size: int, scale: float) -> Complex:
    """:func:`sample` on the window of a scale: core and edge have grown with it."""
    radius = kernel_size / 2 * scale if basis.support == "averaged" else math.inf
    if 0 < basis.core * scale < LEAST_CORE:
        raise ValueError(
            f"`core` (={basis.core:g}) has {basis.core * scale:.3g} pixels at scale {scale:.4g} and must have at least "
            f"{LEAST_CORE}: use a `core` of 0 or at least {LEAST_CORE / scale:.3g}, or larger `scales`."
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
    parts = basis.normalization == "parts"
    if parts:
        size = basis.need_window()
        inside = np.hypot(*grid(size)) <= size // 2 + _ROUNDING
        values = sample(basis, size)
    else:
        values, inside = _sample_at(basis, kernel_size, 1.0), support(basis, kernel_size, 1.0)
    energies = np.stack([(part[..., inside] ** 2).sum(-1) for part in (values.real, values.imag)], axis=-1)
    if not parts:
        energies = np.broadcast_to(energies.sum(-1, keepdims=True), energies.shape)
    dead = np.argwhere(energies <= 1e-24 * energies.max())
    if dead.size:
        k, j = dead[0, 0], dead[0, 1]
        part = ("real part of the ", "imaginary part of the ")[dead[0, 2]] if parts else ""
        raise ValueError(
            f"the {part}function of order {basis.orders[k]} and orientation {basis.orientations[j]:.4f} vanishes on "
            f"the grid (sigma={basis.sigma}): use a wider `sigma`, another orientation or other phase `beta`."
        )
    return np.asarray(energies**-0.5) if parts else np.ones_like(energies)


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
