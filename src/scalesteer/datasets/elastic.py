"""Elastic deformation at test time (Table 2): the same distorted bytes on every machine."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from scalesteer._checks import integer, real
from scalesteer.datasets.sources import Images
from scalesteer.datasets.streams import Integers, random_bits, stream_key

ELASTIC_ALPHAS = (0.0, 10.0, 20.0, 30.0, 40.0)
ELASTIC_SIGMA = 4.0
_FINE = 256  # displacements are multiples of 1/256 pixel
_UNIT = 1 << 16  # noise and smoothing weights are multiples of 1/65536
_CHUNK = 256


def distort(
    images: Images, alpha: float, *, sigma: float = ELASTIC_SIGMA, seed: int = 0, indices: Integers | None = None
) -> Images:
    """Move every pixel by a smooth random field: out(p) = in(p + alpha * (G_sigma * noise)(p)).

    The noise is uniform in (-1, 1), one value for each pixel and axis, zero outside the image; the Gaussian sums to one
    and is cut at four sigma; the field is not renormalised. Between pixels the image is bilinear, outside it is black.
    An image's noise depends on `seed` and its index only, so that the same field grows with `alpha`, and any subset
    gives the same bytes: noise and weights are integers whose sums of products float64 holds exactly; displacements are
    rounded once, to 1/256 pixel, and grey values once, to the nearest, halves up.

    Args:
        images: What to distort; left as it is.
        alpha: Strength in pixels, 0 or more. 0 gives the images back bit for bit.
        sigma: Width of the Gaussian in pixels.
        seed: Another seed, other fields.
        indices: The index of each image; 0, 1, ... by default.

    Shape:
        images (N, H, W) uint8 -> (N, H, W) uint8

    Note:
        The paper gives alpha but not sigma; 4 pixels is the usual choice for MNIST.

    >>> digit = np.eye(28, dtype=np.uint8)[None] * 255
    >>> bool((distort(digit, 0) == digit).all()), bool((distort(digit, 20) == digit).all())
    (True, False)
    """
    if not (isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 3):
        got = f"{getattr(images, 'dtype', type(images).__name__)} {tuple(getattr(images, 'shape', ()))}"
        raise TypeError(f"`images` must be a uint8 array (N, H, W) (got {got}).")
    if not 0 <= real("alpha", alpha) <= 1000:
        raise ValueError(f"`alpha` must be 0 to 1000 pixels (got {alpha}).")
    if not 0.1 <= real("sigma", sigma) <= 100:
        raise ValueError(f"`sigma` must be 0.1 to 100 pixels (got {sigma}).")
    seed = integer("seed", seed, minimum=0)
    index = np.arange(len(images)) if indices is None else np.asarray(indices)
    if index.dtype.kind not in "iu" or (index.size and index.min() < 0):
        raise ValueError(f"`indices` must be whole numbers from 0 (got {indices!r}).")
    if index.shape != (len(images),):
        raise ValueError(f"`indices` must hold one index for each of {len(images)} images (got {index.shape}).")
    return warp(images, lambda rows: displacements(index[rows], images.shape[1:], alpha, sigma, seed))


def blurring_weights(start: int, stop: int, into: int, sigma: float) -> NDArray[np.float64]:
    """Integer weights (stop - start, into), times 65536: a Gaussian cut at four sigma at the pixels start..stop - 1."""
    radius = int(4 * sigma + 0.5)
    kernel = [math.exp(-0.5 * (step / sigma) ** 2) for step in range(radius + 1)]
    total = 2 * math.fsum(kernel) - 1
    # Rounded to 1/65536: a libm that differs in the last bit gives the same weights.
    weights = np.array([*(np.rint(_UNIT * value / total) for value in kernel), 0.0])
    distance = np.abs(np.subtract.outer(np.arange(start, stop), np.arange(into)))
    return weights[np.minimum(distance, radius + 1)]


def displacements(index: Integers, shape: tuple[int, ...], alpha: float, sigma: float, seed: int) -> NDArray[np.int32]:
    """(2, n, H, W), down and right, in 1/256 pixel."""
    height, width = shape
    keys = random_bits(stream_key("elastic", seed), index)[:, None]
    draws = random_bits(keys, np.arange(-(-2 * height * width // 4)))  # (n, draws), four values in each
    noise = draws.astype("<u8").view("<u2")[:, : 2 * height * width].astype(np.float64) * 2 - (_UNIT - 1)
    rows, columns = (blurring_weights(0, size, size, sigma) for size in shape)
    fields = rows @ noise.reshape(-1, height, width) @ columns  # both symmetric
    moves = np.rint(fields * (alpha * _FINE / _UNIT**3)).astype(np.int32)
    return moves.reshape(-1, 2, height, width).swapaxes(0, 1)


def warp(images: Images, field: Callable[[slice], NDArray[np.int32]]) -> Images:
    """Take every pixel from elsewhere in its image; `field` gives the displacements of the images in a slice."""
    count, height, width = images.shape
    # One black pixel around is all a point outside the image can see, however far out it lies.
    padded = np.pad(images, ((0, 0), (1, 2), (1, 2)))
    grid = np.indices((height, width), dtype=np.int32) * _FINE
    result = np.empty_like(images, order="C")
    for start in range(0, count, _CHUNK):
        rows = slice(start, start + _CHUNK)
        down, right = field(rows)
        row, y = np.divmod(np.clip(down + grid[0], -_FINE, height * _FINE), _FINE)
        column, x = np.divmod(np.clip(right + grid[1], -_FINE, width * _FINE), _FINE)
        flat = padded[rows].reshape(-1).astype(np.int32)
        first = np.arange(0, len(flat), padded[0].size)[:, None, None]  # pixel of each image
        corner = first + (row + 1) * (width + 3) + column + 1
        top = flat[corner] * (_FINE - x) + flat[corner + 1] * x
        corner += width + 3
        bottom = flat[corner] * (_FINE - x) + flat[corner + 1] * x
        result[rows] = (top * (_FINE - y) + bottom * y + _FINE**2 // 2) // _FINE**2
    return result
