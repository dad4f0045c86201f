"""Objects in maps: where a map of scores has its centres, and the connected regions of a mask, with their sizes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from scalesteer import _checks


class Centre(NamedTuple):
    """An object that was found by its centre."""

    label: int  # of the class
    score: float
    row: float  # of the centre, in pixels of the image
    column: float
    size: float  # relative to the objects of training


class Region(NamedTuple):
    """A connected region of one class."""

    label: int  # of the class
    row: float  # its mean place, in pixels
    column: float
    area: int  # in pixels
    height: int  # of the box around it
    width: int
    size: float  # median over its pixels, relative to the objects of training; 1 if nobody says


def find_centres(
    scores: Tensor, sizes: Tensor, extent: float, *, stride: float = 1, offset: float = 0.0, threshold: float = 0.0
) -> list[Centre]:
    """The objects whose centres a map of scores shows, the clearest first.

    The place with the largest score is an object. Places within 0.45 of its extent, along both axes, are then not asked
    again, and so on down to the threshold.

    Args:
        scores: Of each class at each place, `(classes, h, w)`: log-odds against "nothing here".
        sizes: Of the object at each place relative to training, `(h, w)`, as `ScaleChannels` returns them.
        extent: Side of an object of size 1 in pixels.
        stride: Pixels of the image from one place to the next.
        offset: The pixel that place 0 looks at.
        threshold: Scores above it are objects.

    Example:
        >>> scores = torch.full((2, 8, 8), -5.0)
        >>> scores[1, 2, 3], scores[0, 2, 4], scores[0, 6, 6] = 4.0, 3.0, 1.0
        >>> [(found.label, found.row, found.column) for found in find_centres(scores, torch.ones(8, 8), 6.0)]
        [(1, 2.0, 3.0), (0, 6.0, 6.0)]
    """
    if scores.ndim != 3 or sizes.shape != scores.shape[1:]:
        got = f"{tuple(scores.shape)} and {tuple(sizes.shape)}"
        raise ValueError(f"`scores` must have shape (classes, h, w) and `sizes` (h, w) (got {got}).")
    for name, value in (("extent", extent), ("stride", stride)):
        if not _checks.real(name, value) > 0:
            raise ValueError(f"`{name}` must be positive (got {value}).")
    left, labels = scores.max(0)
    left, found, (height, width) = left.clone(), list[Centre](), scores.shape[1:]
    rows, columns = (offset + stride * torch.arange(count, device=scores.device) for count in (height, width))
    while left.max() > threshold:
        i, j = divmod(int(left.argmax()), width)
        row, column = offset + i * stride, offset + j * stride
        centre = Centre(int(labels[i, j]), float(left[i, j]), float(row), float(column), float(sizes[i, j]))
        found.append(centre)
        reach = max(stride, 0.45 * extent * centre.size)
        left[((rows[:, None] - row).abs() <= reach) & ((columns - column).abs() <= reach)] = -math.inf
    return found


def find_regions(
    classes: NDArray[Any], sizes: NDArray[Any] | None = None, *, background: int = 0, least: int = 1
) -> tuple[NDArray[np.int32], list[Region]]:
    """The connected regions of each class in a mask, from top to bottom.

    Args:
        classes: The class of each pixel, `(H, W)`.
        sizes: Of the object at each pixel, `(H, W)`.
        background: The class that is no object.
        least: Regions of fewer pixels are left out.

    Returns:
        An image of labels `(H, W)`, 0 outside and k in the k-th region, counted from one; and the regions.

    Example:
        >>> mask = np.array([[1, 1, 0, 2], [0, 0, 0, 2], [1, 0, 0, 0]])
        >>> image, regions = find_regions(mask)
        >>> image.tolist(), [region.area for region in regions]
        ([[1, 1, 0, 2], [0, 0, 0, 2], [3, 0, 0, 0]], [2, 2, 1])
    """
    if classes.ndim != 2 or (sizes is not None and sizes.shape != classes.shape):
        raise ValueError(f"`classes` must have shape (H, W), and `sizes` the same (got {classes.shape}).")
    least, found = _checks.integer("least", least, minimum=1), list[tuple[Region, NDArray[Any], NDArray[Any]]]()
    for label in np.unique(classes[classes != background]).tolist():
        rows, columns, numbers = label_regions(classes == label)
        order = np.argsort(numbers, kind="stable")
        for own in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            if len(own) < least:
                continue
            y, x = rows[own], columns[own]
            size = 1.0 if sizes is None else float(np.median(sizes[y, x]))
            box = int(np.ptp(y)) + 1, int(np.ptp(x)) + 1
            found.append((Region(int(label), float(y.mean()), float(x.mean()), len(own), *box, size), y, x))
    found.sort(key=lambda one: (one[1][0], one[2][0]))  # by their first pixels
    image = np.zeros(classes.shape, np.int32)
    for number, (_, y, x) in enumerate(found, start=1):
        image[y, x] = number
    return image, [region for region, _, _ in found]


def label_regions(inside: NDArray[np.bool_], gap: int = 0) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Connected regions of a mask `(H, W)`: rows, columns and the number of the region of each pixel inside, `(N,)`.

    Pixels are connected to all eight around them, also over up to `2 gap` pixels outside.

    Example:
        >>> label_regions(np.array([[1, 0, 0, 1], [0, 1, 0, 1]], bool))[2].tolist()
        [0, 1, 0, 1]
    """
    wide = inside
    if gap:
        spread = F.max_pool2d(torch.from_numpy(inside).float()[None], 2 * gap + 1, 1, gap)
        wide = spread[0].numpy() > 0
    height, width = wide.shape
    # Runs of pixels along rows, as places in a flat picture whose rows have a pixel outside on both sides.
    flat = np.zeros((height, width + 2), np.int8)
    flat[:, 1:-1] = wide
    edges = np.flatnonzero(np.diff(flat.reshape(-1)))
    starts, ends = edges[::2] + 1, edges[1::2] + 1
    # A run touches those in the next row that begin before its end and end behind its start.
    first = np.searchsorted(ends, starts + width + 2)
    counts = np.maximum(np.searchsorted(starts, ends + width + 2, "right") - first, 0)
    above = np.repeat(np.arange(len(starts)), counts)
    below = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
    labels = _join_pairs(len(starts), above, below)
    flat[...] = 0
    flat[:, 1:-1] = inside
    places = np.flatnonzero(flat.reshape(-1))
    numbers = labels[np.searchsorted(starts, places, "right") - 1]
    return places // (width + 2), places % (width + 2) - 1, np.unique(numbers, return_inverse=True)[1]


def _join_pairs(count: int, one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """For each of `count` things the smallest of those that it is joined with, through any number of pairs."""
    labels = np.arange(count)
    while True:
        least = np.minimum(labels[one], labels[other])
        before = labels.copy()
        np.minimum.at(labels, labels[one], least)  # the label's own label falls, and with it all that have it
        np.minimum.at(labels, labels[other], least)
        while not np.array_equal(labels, labels[labels]):
            labels = labels[labels]
        if np.array_equal(before, labels):
            return labels
