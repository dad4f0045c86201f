"""Large batches in pieces, large images in tiles."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from scalesteer.geometry import Axes

THREADED_FROM = 1 << 15  # torch divides an operation on more numbers than this between threads


def in_pieces(step: int, *tensors: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """The same `step` images of every tensor, piece by piece; the first is one."""
    if step >= tensors[0].shape[0]:  # type: ignore[union-attr]
        return [tensors]
    return zip(*(repeat(None) if tensor is None else tensor.split(step) for tensor in tensors), strict=False)


def shared_step(images: int, pixels: int, threads: int) -> int:
    """The fewest images of a piece for which torch divides an operation on them between threads; 0 if there are none.

    The last piece, too, should have as many.
    """
    if threads == 1:
        return 0
    for pieces in range(images * pixels // (THREADED_FROM + 1), 0, -1):
        step = -(-images // (pieces * threads)) * threads
        if (images - (-(-images // step) - 1) * step) * pixels > THREADED_FROM:
            return step
    return 0


def images_per_piece(images: int, most: int, threads: int) -> int:
    """Images of a piece, `most` at most, so that all pieces are of about one size and threads have as many each."""
    step = max(1, -(-images // max(1, -(-images // max(1, most)))))
    if threads == 1 or step < threads:
        return step
    more = -(-step // threads) * threads
    return more if more <= most else step - step % threads


def cut_into_tiles(x: Tensor, axes: Axes, tiles: Axes) -> Tensor:
    """Overlapping tiles `(B ny nx, C, h, w)`, each with all that its own windows see."""
    padding: list[int] = []
    for axis, tile in zip(axes, tiles, strict=True):
        before = axis.beyond[0]
        length = (-(-axis.count // tile.count) - 1) * tile.count * axis.stride + tile.length
        padding = [before, length - before - axis.length, *padding]  # columns come first
    cut = F.pad(x, padding)
    for i, tile in enumerate(tiles):
        cut = cut.unfold(2 + i, tile.length, tile.count * tile.stride)
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)  # from (B, C, ny, nx, h, w)


def join_tiles(maps: Tensor, batch: int, axes: Axes) -> Tensor:
    """Outputs of tiles `(B ny nx, O, h, w)` side by side: `(B, O, H', W')`."""
    channels, height, width = maps.shape[1:]
    ny, nx = -(-axes[0].count // height), -(-axes[1].count // width)
    joined = maps.view(batch, ny, nx, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    joined = joined.reshape(batch, channels, ny * height, nx * width)
    return joined[..., : axes[0].count, : axes[1].count].contiguous()
