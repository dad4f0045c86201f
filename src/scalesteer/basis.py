"""Which log-radial harmonics filters are made of: every choice, and the named families."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from scalesteer import _checks

LEAST_CORE = 0.05  # pixels; less cannot be averaged over pixels with care


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
        normalization: ``"none"``; or ``"parts"``, which gives the real and the imaginary part of each function unit
            energy on the largest window and breaks exact steering.
        support: ``"disc"`` keeps the pixels with r <= a s; ``"crop"`` cuts square windows out of the disc of the
            largest window; ``"averaged"``, for ``sampling="area"``, takes the function as zero beyond a s and averages
            that over each pixel, so that a pixel on the edge counts by its share.
        reference_size: The window size at which the coefficients are the unsteered ones; ``None`` means the layer's
            `kernel_size`.
        window: The largest window, in pixels. Needed by ``order_unit="period"``, ``support="crop"`` and
            ``normalization="parts"``; a layer fills it in when it is built, and keeps it.
        core: Radius in pixels, at scale 1, within which the function is smooth instead of singular; 0 as in Eq. 1. It
            grows with the scale, so that the filter at every scale is the enlarged filter exactly;
            :func:`scalesteer.harmonics.evaluate` has the formula.

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
    normalization: Literal["none", "parts"] = "none"
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
        if 0 < self.core < LEAST_CORE or (self.core > 0 and self.sigma < 0.02):
            raise ValueError(
                f"`core` must be 0 or at least {LEAST_CORE} pixels, with `sigma` at least 0.02 (got core={self.core}, "
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
    def frequencies(self) -> NDArray[np.float64]:
        """The k that multiply log r, in radians: the orders, or 2 pi k / log r_max if given in periods."""
        if self.order_unit == "radian":
            return np.asarray(self.orders)
        corner = math.sqrt(2) * (self.need_window() // 2)
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

    def need_window(self) -> int:
        """The largest window, which must be known where this is asked for."""
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
