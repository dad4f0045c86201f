"""Maps of a network at several sizes of an image, read at the same places: those of the map of the image itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scalesteer import _checks
from scalesteer.resize import equal, matrix, multiply, triangle

Grid = tuple[float, float]  # stride and offset: place i of a map looks at pixel ``offset + i * stride``
Size = tuple[int, int]


def check_grid(grid: Any) -> Grid:
    """Stride and offset, or a ValueError that says what `grid` must be."""
    if not isinstance(grid, (tuple, list)) or len(grid) != 2:
        raise ValueError(f"`grid` must be (stride, offset) (got {grid!r}).")
    stride, offset = _checks.real("grid[0]", grid[0]), _checks.real("grid[1]", grid[1])
    if stride <= 0:
        raise ValueError(f"the stride in `grid` must be positive (got {stride}).")
    return stride, offset


def on_one_grid(
    maps: list[Tensor],
    canvases: list[Size],
    image: Size,
    scales: tuple[float, ...],
    grid: Grid | None,
    join: Callable[[Tensor], Tensor],
    reference: Size | None,
    borders: Sequence[int],
) -> tuple[list[Tensor], Tensor]:
    """The maps of all channels at the places of the reference grid; and where each channel sees, `(S, 1, 1, h, w)`.

    A place covers several pixels of a finer map. They are joined as channels are, by `join` along the first axis: an
    object smaller than a place is not averaged away.

    Args:
        maps: Of each channel, `(B, classes, h, w)`.
        canvases: Height and width at which each channel shows the image, without its border.
        image: Height and width of the image itself.
        scales: Of the channels.
        grid: Stride and offset, or None to find them from the sizes.
        join: Joins `(N, B, ...)` to `(B, ...)`.
        reference: Height and width of the network's map of the image itself, where it is known.
        borders: Pixels around the image in each channel.
    """
    parts = [math.ceil(scale) for scale in scales]  # how often a map is read within a place, along each axis
    readings: list[list[Tensor | None]] = [[] for _ in maps]
    seen: list[Tensor] = []
    for axis in (0, 1):
        lengths, counts = [canvas[axis] for canvas in canvases], [y.shape[2 + axis] for y in maps]
        known = counts, [length + 2 * border for length, border in zip(lengths, borders, strict=True)]
        if reference is not None:
            known = [*counts, reference[axis]], [*known[1], image[axis]]
        if grid is None and all(count == counts[0] for count in known[0]):  # each map covers its image in the same way
            if any(borders):
                raise ValueError(
                    f"`border` (got {max(borders)}) cannot be cut off maps of {counts[0]} places in all channels, "
                    "which tell no stride: give `grid`, (stride, offset), or border=0."
                )
            for reading in readings:
                reading.append(None)
            seen.append(torch.ones(len(maps), counts[0], dtype=torch.bool, device=maps[0].device))
            continue
        stride, offset = grid if grid is not None else find_grid(known[1], known[0])
        if reference is not None:
            target = reference[axis]
        elif 1.0 in scales and canvases[scales.index(1.0)] == image:
            target = counts[scales.index(1.0)]
        else:
            target = torch.sym_max(1, math.floor((image[axis] - 1 - 2 * offset) / stride) + 1)
        inside = []
        for y, reading, length, count, part, border in zip(
            maps, readings, lengths, counts, parts, borders, strict=True
        ):
            factor = length / image[axis]
            # Where the first place lies, in pixels of this map.
            start = (border + (offset + 0.5) * factor - 0.5 - offset) / stride
            same = not border and equal(length, image[axis]) and equal(count, target)
            first = start + factor * (0.5 / part - 0.5)
            reading.append(None if same else matrix(y, first, factor / part, target * part, count, triangle))
            places = start + factor * torch.arange(target, dtype=torch.float64, device=y.device)
            margin = torch.sym_max(1.0, factor) / 2 + 1e-6
            inside.append((places >= -margin) & (places <= count - 1 + margin))
        inside[-1] = torch.ones_like(inside[-1])  # the largest channel sees most; it answers everywhere
        seen.append(torch.stack(inside))
    kept = (seen[0][:, :, None] & seen[1][:, None, :])[:, None, None]
    read = []
    for y, reading, part in zip(maps, readings, parts, strict=True):
        y = multiply(y, *reading)
        for i, read_by in enumerate(reading):
            if read_by is not None and part > 1:
                y = join(y.unflatten(2 + i, (seen[i].shape[1], part)).movedim(3 + i, 0))
        read.append(y)
    return read, kept


def find_grid(lengths: list[int], counts: list[int]) -> Grid:
    """Stride and offset of a network that makes `counts` output pixels of images of `lengths` pixels.

    Equal padding on both sides means count - 1 = floor((length - 1 - 2 offset) / stride); each channel narrows down the
    offset, a multiple of 1/2.
    """
    ratio = (max(lengths) - min(lengths)) / (max(counts) - min(counts))
    # Few pixels let several strides fit: networks halve, and their padding is that of their filters.
    guesses = range(1, 2 * math.ceil(ratio) + 1) if ratio > 0.75 else (1 / round(1 / ratio),)
    found = []
    for stride in guesses:
        low = max(n - 1 - stride * count + min(1.0, stride) for n, count in zip(lengths, counts, strict=True))
        high = min(n - 1 - stride * (count - 1) for n, count in zip(lengths, counts, strict=True))
        if low <= high + 1e-9:
            halves = stride < 1 or stride & (stride - 1) == 0  # type: ignore[operator]
            found.append((not halves, abs(low + high) / 4, float(stride), (low + high) / 4))
    if found:
        return min(found)[2:]
    pairs = ", ".join(f"{n} -> {count}" for n, count in zip(lengths, counts, strict=True))
    raise ValueError(
        f"no stride explains the sizes of the maps ({pairs}): give `grid`, (stride, offset), so that output pixel i of "
        "`net` looks at input pixel offset + i * stride."
    )
