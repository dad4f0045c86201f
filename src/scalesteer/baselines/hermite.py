"""The basis of Sosnovik, Szmaja and Smeulders (2020), scale-equivariant steerable networks, arXiv:1910.11093."""

import math
from dataclasses import dataclass

import numpy as np

from scalesteer import _checks, harmonics
from scalesteer.harmonics import Float


@dataclass(frozen=True)
class HermiteBasis:
    r"""Hermite polynomials in x and y times a Gaussian, for :class:`~scalesteer.ScaleGroupConv2d`.

    .. math:: \psi^s_{nm}(x, y) = \frac{A_{nm}}{s^2} H_n\Big(\frac{x}{s\sigma}\Big) H_m\Big(\frac{y}{s\sigma}\Big)
              \exp\Big(-\frac{x^2 + y^2}{2 s^2 \sigma^2}\Big)

    A makes them orthonormal in the plane, times :math:`\sigma`. They are sampled at the centres of pixels.

    Note:
        The paper leaves sigma open. By default it is a quarter of the radius a = kernel_size / 2, with which responses
        to enlarged blobs change least (docs/evidence/group.md): wider functions are cut by the window, narrower ones
        have no room on the grid.

    Args:
        orders: Of n and of m, from 0: the basis has their square.
        width: sigma over the radius a.

    Example:
        >>> HermiteBasis().sample(7, 1.0).shape
        (6, 6, 7, 7)
    """

    orders: int = 6
    width: float = 0.25
    point_symmetric = False

    def __post_init__(self) -> None:
        _checks.integer("orders", self.orders, minimum=1)
        if _checks.real("width", self.width) <= 0:
            raise ValueError(f"`width` must be positive (got {self.width}).")

    def sample(self, kernel_size: int, scale: float) -> Float:
        """The functions on the window of a scale, `(n, m, rows, columns)`; y grows upwards."""
        size = harmonics.window_size(kernel_size, scale, harmonics.PRESETS["smooth"])
        t = (np.arange(size) - size // 2) / (scale * self.width * kernel_size / 2)
        along = [np.exp(-(t**2) / 2) * math.pi**-0.25, math.sqrt(2) * t * np.exp(-(t**2) / 2) * math.pi**-0.25]
        for n in range(2, self.orders):  # the recurrence of orthonormal Hermite functions
            along.append(math.sqrt(2 / n) * t * along[n - 1] - math.sqrt((n - 1) / n) * along[n - 2])
        functions = np.stack(along[: self.orders])  # (N, size)
        return np.asarray(np.einsum("nx,my->nmyx", functions, functions[:, ::-1]) / scale**2)
