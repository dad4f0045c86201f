"""Resampling by matrices: an image of another size is one product with a matrix along each of its axes.

A matrix reads a line of pixels at other places. It is made in float64, and its rows add up to 1. Products with it are
batched and deterministic, forward and backward, and need no control flow that depends on data. Scale channels, the
meters of :mod:`scalesteer.testing`, the compared methods and augmentation share what is here.

The built-in datasets do not: their weights are whole numbers, so that every machine makes the same bytes
(`scalesteer.datasets.scale`, `scalesteer.datasets.sized`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.fast import being_exported, being_traced
from scalesteer.fast.memory import Cache, holds_numbers
from scalesteer.geometry import no_autocast

BORDERS = {"zeros": "constant", "replicate": "replicate", "reflect": "reflect"}  # as `F.pad` calls them
PARTS = 2**6 * 3**2 * 5**6 * 7  # of a scale, to compute sizes: decimals and simple fractions are whole numbers of them
LARGE, PIECE = 2048, 256  # a side, in pixels, from which an image is resized in pieces; places of a piece
Kernel = Callable[[Tensor], Tensor]  # the weight of a pixel by its distance from the place that is read


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Images at another size, anti-aliased: `(B, C, H, W)` -> `(B, C, *size)`.

    Pixels are unit squares and the image's edges stay where they are (``align_corners=False``); each axis has its own
    factor. Deterministic, forward and backward. An axis that keeps its length is left as it is.

    Example:
        >>> resize(torch.ones(1, 1, 4, 6), (2, 9)).shape
        torch.Size([1, 1, 2, 9])
    """
    matrices = []
    if not (x.requires_grad or being_traced()) and holds_numbers(x) and max(*x.shape[-2:], *size) > LARGE:
        return _resize_axis(x, 2, size[0], lambda rows: _resize_axis(rows, 3, size[1]))
    for length, count in zip(x.shape[-2:], size, strict=True):
        step = length / count
        matrices.append(None if equal(length, count) else matrix(x, step / 2 - 0.5, step, count, length, cubic))
    return multiply(x, *matrices)


def _resize_axis(x: Tensor, axis: int, count: int, prepare: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
    """Images with another height (axis 2) or width (3), in pieces: of a long line each place reads a few pixels.

    `prepare` changes each part of `x` that is read. So no more than a band of it is in memory in that form.
    """
    length = x.shape[axis]
    if length == count:
        return prepare(x)
    step, y = length / count, x.new_empty(0)
    for begin in range(0, count, PIECE):
        end = min(count, begin + PIECE)
        start, reach = step * (begin + 0.5) - 0.5, 2 * max(1.0, step) + 1
        low, high = max(0, int(start - reach)), min(length, int(start + step * (end - begin) + reach) + 1)
        work: dict[str, Any] = {"dtype": torch.float64, "device": x.device}
        places = (start + step * torch.arange(end - begin, **work)).clamp(-0.5, length - 0.5)
        weights = weigh(places, torch.arange(low, high, **work), cubic, max(1.0, step))
        part = prepare(x.narrow(axis, low, high - low))
        if not begin:
            y = x.new_empty([count if i == axis else n for i, n in enumerate(part.shape)])
        part = part.to(torch.promote_types(x.dtype, torch.float32))
        weights = weights.to(part.dtype)
        with no_autocast(x.device):
            y.narrow(axis, begin, end - begin).copy_(part @ weights.mT if axis == 3 else weights @ part)
    return y


def border_colour(x: Tensor) -> Tensor:
    """The median of the pixels along the border of images, channel by channel: `(B, C, H, W)` -> `(B, C, 1, 1)`.

    Of a picture that was padded to a square it is the colour of the padding, since more than half of the border shows
    it.
    """
    pixels = torch.cat([x[..., 0, :], x[..., -1, :], x[..., 1:-1, 0], x[..., 1:-1, -1]], -1)
    return pixels.sort(-1).values[..., pixels.shape[-1] // 2][..., None, None]


def image_size(x: Tensor) -> tuple[int, int]:
    """Height and width, as plain numbers for `torch.compile`: its code generator cannot order rounded dynamic sizes."""
    if torch.compiler.is_compiling() and not being_exported():
        return operator.index(x.shape[-2]), operator.index(x.shape[-1])
    return x.shape[-2], x.shape[-1]


def canvas_size(image: tuple[int, int], scale: float, multiple: int = 1) -> tuple[int, int]:
    """Height and width of an image in a channel: the nearest multiples of a number, halves up."""
    if scale == multiple == 1:
        return image  # a compiler's sizes do not say by themselves that rounding changes nothing
    # Integers alone: an exported program has the same sizes everywhere, also where it computes with single precision.
    factor, step = round(scale * PARTS), PARTS * multiple
    height, width = ((2 * length * factor + step) // (2 * step) * multiple for length in image)
    if multiple > 1:
        return torch.sym_max(height, multiple), torch.sym_max(width, multiple)
    if height < 1 or width < 1:
        raise ValueError(
            f"the channel of scale {scale:.4g} would show images of {image[0]} x {image[1]} as {height} x {width}"
            " pixels: leave out the smallest `scales` or give larger images."
        )
    return height, width


def extend(image: Tensor, border: int, mode: str) -> Tensor:
    """The image of a channel with as many more pixels on all four sides, which show what `mode` says."""
    if not border:
        return image
    if mode == "reflect" and min(image.shape[-2:]) <= border:
        shown = f"{image.shape[-2]} x {image.shape[-1]}"
        raise ValueError(
            f"`border` (got {border}) must be smaller than the images of all channels (one is {shown}) to "
            'mirror them: take a smaller one, leave out the smallest `scales`, or border_mode="replicate".'
        )
    return F.pad(image, (border,) * 4, mode=BORDERS[mode])


def halve(x: Tensor) -> Tensor:
    """Images at half their size, without aliasing: `(B, C, H, W)` -> `(B, C, H // 2, W // 2)`.

    Pixels are weighted by (1, 3, 3, 1) / 8 along both axes, a pixel of the result amid them; at the border those inside
    share the weight of those outside. An odd image has a last row or column in which no pixel of the result lies.

    Example:
        >>> halve(torch.ones(1, 2, 8, 9)).shape
        torch.Size([1, 2, 4, 4])
    """
    rows, columns = (matrix(x, 0.5, 2.0, length // 2, length, triangle) for length in x.shape[-2:])
    return multiply(x, rows, columns)


def equal(first: int, second: int) -> bool:
    """Whether two lengths are known to be equal; to ask for a dynamic one would fix it in an exported program."""
    return type(first) is int and type(second) is int and first == second


def cubic(distance: Tensor) -> Tensor:
    """Keys' function, a = -1/2: on thin strokes it misses a third to three quarters as much as a triangle."""
    d = distance.abs()
    return torch.where(d < 1, 1 + d**2 * (1.5 * d - 2.5), (2 - 4 * d + 2.5 * d**2 - 0.5 * d**3) * (d < 2))


def triangle(distance: Tensor) -> Tensor:
    """Linear interpolation: it never exceeds what it reads."""
    return (1 - distance.abs()).clamp(min=0)


def weigh(places: Tensor, pixels: Tensor, kernel: Kernel, spread: Any = 1.0) -> Tensor:
    """The weights of pixels for each place: `(..., places)`, `(pixels,)` -> `(..., places, pixels)`; rows add up to 1.

    `spread`, a number or a tensor that fits the result, stretches the kernel.
    """
    weights = kernel((places[..., None] - pixels) / spread)
    return weights / weights.sum(-1, keepdim=True)


def multiply(x: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Multiply both axes of images by matrices; None leaves an axis as it is."""
    if rows is None and columns is None:
        return x
    with no_autocast(x.device):  # half precision is for convolutions; pixels are mixed in float32 at least
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        y = y if columns is None else y @ columns.mT  # (..., W) -> (..., W')
        if rows is not None:  # (B C, H, W') -> (B C, H', W'); a batched product fixes no size of an exported program
            y = rows.expand(x.shape[0] * x.shape[1], -1, -1).bmm(y.flatten(0, 1)).unflatten(0, x.shape[:2])
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return y.to(x.dtype, memory_format=torch.channels_last if last else torch.contiguous_format)


_matrices: Cache[Tensor] = Cache(most_bytes=1 << 26)  # of all images' sizes together


def matrix(
    x: Tensor, start: float, step: float, count: int, length: int, kernel: Kernel, spread: float | None = None
) -> Tensor:
    """The matrix `(count, length)` that reads a line at start, start + step, …; kept for each size and device.

    Places beyond the line read its first or last pixel. `spread` above 1 stretches the kernel. By default it is the
    step, so that no pixel is skipped where places lie further apart than one.
    """
    spread = step if spread is None else spread
    key = (start, step, count, length, kernel, spread, torch.promote_types(x.dtype, torch.float32), x.device)
    if being_traced() or not holds_numbers(x):
        return _make_matrix(*key)
    return _matrices.get_or_make(key, lambda: _make_matrix(*key), x.device)


def _make_matrix(
    start: float,
    step: float,
    count: int,
    length: int,
    kernel: Kernel,
    spread: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    work: dict[str, Any] = {"dtype": torch.float64, "device": device}
    places = (start + step * torch.arange(count, **work)).clamp(-0.5, length - 0.5)
    return weigh(places, torch.arange(length, **work), kernel, torch.sym_max(1.0, spread)).to(dtype)
