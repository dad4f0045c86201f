"""A basis fitted to the grid, after Sosnovik, Moskalev and Smeulders (2021), discrete scale convolutions (DISCO)."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scalesteer import _checks, harmonics
from scalesteer.harmonics import Float

WIDTHS = (0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Standard deviations of the blobs in pixels that images are made of when the basis is fitted."""
SCALES = (2 ** (1 / 3), 2 ** (1 / 2), 2 ** (2 / 3), 2.0)
"""The scales at which the functions of scale 1 are chosen."""

LARGEST_WINDOW = 41  # the covariance between its pixels takes memory with the fourth power


@dataclass(frozen=True)
class FittedBasis:
    r"""Functions found by minimising the equivariance error on the grid, for :class:`~scalesteer.ScaleGroupConv2d`.

    Of random images f, sums of Gaussian blobs at random places, the covariance R is known. So is, without drawing any,
    the expected difference of the responses to an image and to the image enlarged by s,

    .. math:: E_s(\kappa^s, \kappa) = \mathbb{E}\Big(\sum_v \kappa^s(v) f(v / s) - \sum_u \kappa(u) f(u)\Big)^2

    The functions at scale s are those that make it least, by least squares; those at scale 1 are the generalised
    eigenvectors for which what is left, in the mean over `SCALES`, is least beside their response.

    Note:
        DISCO minimises the error by gradient descent on photographs, and takes functions with holes where a scale is
        an integer; here the minimum is computed.

    Args:
        count: How many functions there are; at most kernel_size squared.
        ridge: Noise in each pixel, as a share of the images' variance. With less of it functions become larger.

    Example:
        >>> FittedBasis(16).sample(7, 1.5).shape
        (16, 11, 11)
    """

    count: int = 32
    ridge: float = 1e-5
    point_symmetric = False

    def __post_init__(self) -> None:
        _checks.integer("count", self.count, minimum=1)
        if not 0 < _checks.real("ridge", self.ridge) < 1:
            raise ValueError(f"`ridge` must be above 0 and below 1 (got {self.ridge}).")

    def sample(self, kernel_size: int, scale: float) -> Float:
        """The functions on the window of a scale, `(count, n, n)`; at scale 1 they are fitted to themselves."""
        if self.count > kernel_size**2:
            raise ValueError(f"`count` must be at most {kernel_size**2}, the pixels of the window (got {self.count}).")
        fitted = _enlarge(kernel_size, scale, self.ridge)[0] @ _least_error(kernel_size, self.ridge)[:, : self.count]
        size = round(len(fitted) ** 0.5)
        return np.asarray(fitted.T.reshape(self.count, size, size))


def _covariance(first: Float, second: Float) -> Float:
    """Of the images' brightness at points `(P, 2)` and `(Q, 2)`: that of blobs is a Gaussian twice as wide squared."""
    squared = ((first[:, None] - second) ** 2).sum(-1)
    return np.asarray(np.mean([np.exp(-squared / (4 * width**2)) for width in WIDTHS], axis=0))


def _pixels(size: int) -> Float:
    return np.stack([axis.ravel() for axis in harmonics.grid(size)], 1)


@lru_cache(maxsize=64)
def _enlarge(kernel_size: int, scale: float, ridge: float) -> tuple[Float, Float]:
    """The matrix `(n^2, k^2)` that enlarges functions with least error, and the matrix of the error that is left."""
    window = harmonics.window_size(kernel_size, scale, harmonics.PRESETS["smooth"])
    if window > LARGEST_WINDOW:
        raise ValueError(
            f"a fitted basis has windows of at most {LARGEST_WINDOW} pixels (scale {scale:.4g} with kernel_size="
            f"{kernel_size} has {window}): use smaller `scales` or a smaller `kernel_size`."
        )
    small, large = _pixels(kernel_size), _pixels(window) / scale
    crossed = _covariance(large, small)
    matrix = np.linalg.solve(_covariance(large, large) + ridge * np.eye(len(large)), crossed)
    return np.asarray(matrix), np.asarray(_covariance(small, small) - crossed.T @ matrix)


@lru_cache(maxsize=16)
def _least_error(kernel_size: int, ridge: float) -> Float:
    """Functions on the window of scale 1, columns of `(k^2, k^2)`, from the least relative error to the largest."""
    small = _pixels(kernel_size)
    response = np.linalg.cholesky(_covariance(small, small) + ridge * np.eye(len(small)))
    left = sum(_enlarge(kernel_size, scale, ridge)[1] for scale in SCALES) + ridge * np.eye(len(small))
    whitened = np.linalg.solve(response, np.linalg.solve(response, left).T)
    _, vectors = np.linalg.eigh((whitened + whitened.T) / 2)
    return np.asarray(np.linalg.solve(response.T, vectors))
