"""Layers with few input channels: responses as products with pairs of pixels.

Their products of spectra would be so small that the transforms back are all the work.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.fast.spectral import Axis, Bank, Space, Steered, each, first, make_axes, split_taps, window_sizes

if TYPE_CHECKING:
    from scalesteer.functional import Geometry


@lru_cache(maxsize=64)
def half_window(size: int) -> tuple[tuple[int, int], ...]:
    """Offsets of one half of a window, from the centre outwards ring by ring: a smaller window is a prefix."""
    radius = size // 2
    every = [(dy, dx) for dy in range(radius + 1) for dx in range(-radius, radius + 1) if dy > 0 or dx >= 0]
    return tuple(sorted(every, key=lambda d: (max(abs(d[0]), abs(d[1])), d)))


class Taps:
    """Responses as one product a scale with pairs of pixels x(p + d) + x(p - d). Its maps are `(B, O, H' W')`.

    A filter is point-symmetric, so that half of its taps is enough; and a window is a prefix of every larger one.
    `pieces` are those of :class:`Frequencies`.
    """

    def __init__(self, x: Tensor, margin: tuple[int, int], filters: Bank, geometry: Geometry, pieces: int = 0) -> None:
        self.filters = split_taps(*filters) if isinstance(filters, Steered) else filters
        sizes = window_sizes(filters)
        self.axes = make_axes((x.shape[-2], x.shape[-1]), margin, sizes, geometry)
        self.counts = (self.axes[0].count, self.axes[1].count)
        self.offsets = half_window(max(sizes))
        self.padding = (*self.axes[1].border, *self.axes[0].border)
        self.space = Space(x, pieces > 0)
        self.padded_shape = torch.Size()
        self.views: list[tuple[Tensor, Tensor, Tensor]] = []
        self.matrices = [self._matrix(i) for i in range(len(sizes))]
        self.filter_grads: dict[int, Tensor] = {}
        self.show(x)

    @staticmethod
    def numbers(rows: Axis, columns: Axis, channels: int, filters: Bank) -> int:
        """Numbers that one image takes at work."""
        pairs = channels * (max(window_sizes(filters)) ** 2 + 1) // 2
        return rows.count * columns.count * (pairs + 3 * first(filters).shape[0])

    def show(self, x: Tensor) -> None:
        """Take another piece of the batch."""
        batch, channels = x.shape[:2]
        padded = self.space("padded", batch, channels, *(a.length + sum(a.border) for a in self.axes))
        pairs = self.space("pairs", batch, len(self.offsets), channels, *self.counts)
        if padded is None or pairs is None:
            padded = F.pad(x, self.padding)
            opposite = (padded[self._slices(dy, dx)] + padded[self._slices(-dy, -dx)] for dy, dx in self.offsets[1:])
            pairs = torch.stack([padded[self._slices(0, 0)], *opposite], dim=1)
        else:  # straight to their places
            if padded.shape != self.padded_shape:
                padded.zero_()
                self.views = [
                    (padded[self._slices(dy, dx)], padded[self._slices(-dy, -dx)], pairs[:, k])
                    for k, (dy, dx) in enumerate(self.offsets)
                ]
            left, _, top, _ = self.padding
            padded[..., top : top + x.shape[-2], left : left + x.shape[-1]] = x
            for one, other, pair in self.views[1:]:
                torch.add(one, other, out=pair)
            self.views[0][2].copy_(self.views[0][0])
        self.padded_shape = padded.shape
        self.pairs = pairs.flatten(3).flatten(1, 2)  # (B, T C, H' W')
        self.grad_pairs: Tensor | None = None

    def _slices(self, dy: int, dx: int) -> tuple[Any, ...]:
        """The padded image's pixels at one offset from every centre."""
        slices = []
        for axis, offset in zip(self.axes, (dy, dx), strict=True):
            start = axis.border[0] + axis.first + axis.dilation * offset
            slices.append(slice(start, start + (axis.count - 1) * axis.stride + 1, axis.stride))
        return (..., *slices)

    def inwards(self, maps: Tensor) -> Tensor:
        """`(B, O, H', W')` -> `(B, O, H' W')`."""
        return maps.reshape(maps.shape[0], maps.shape[1], self.counts[0] * self.counts[1])

    def outwards(self, maps: Tensor) -> Tensor:
        """`(B, O, H' W')` -> `(B, O, H', W')`, a view."""
        return maps.view(maps.shape[0], maps.shape[1], *self.counts)

    def _indices(self, i: int) -> tuple[Tensor, Tensor]:
        n, device = self.filters[i].shape[-1], self.filters[i].device
        chosen = self.offsets[: (n * n + 1) // 2]
        rows, columns = (torch.tensor([n // 2 + d[axis] for d in chosen], device=device) for axis in (0, 1))
        return rows, columns

    def _matrix(self, i: int) -> Tensor:
        """Filters `(O, C, n, n)` as `(O, T C)`."""
        rows, columns = self._indices(i)
        return self.filters[i][:, :, rows, columns].transpose(1, 2).flatten(1)

    def response(self, i: int) -> Tensor:
        """The response of scale i."""
        matrix = self.matrices[i]
        batch, _, pixels = self.pairs.shape
        room = self.space("best" if i == 0 else "response", batch, matrix.shape[0], pixels)
        return each(matrix, self.pairs[:, : matrix.shape[1]], room)

    def pull_back(self, i: int, grad: Tensor, need_x: bool, need_filter: bool) -> None:
        """Add what arrives at the response of scale i to the gradients of the image and of the filter."""
        matrix = self.matrices[i]
        if need_x:
            if self.grad_pairs is None:
                room = self.space("grad_pairs", *self.pairs.shape)
                self.grad_pairs = torch.zeros_like(self.pairs) if room is None else room.zero_()
            self.grad_pairs[:, : matrix.shape[1]].baddbmm_(matrix.T.expand(len(grad), -1, -1), grad)
        if need_filter:
            found = torch.bmm(self.pairs[:, : matrix.shape[1]], grad.mT).sum(0)  # (T C, O)
            self.filter_grads[i] = self.filter_grads[i] + found if i in self.filter_grads else found

    def filter_gradient(self, i: int) -> Tensor | None:
        """The sum, over pieces, of what `pull_back` added for the filter of scale i."""
        found = self.filter_grads.pop(i, None)
        if found is None:
            return None
        weight = self.filters[i]
        result = weight.new_zeros(weight.shape)
        rows, columns = self._indices(i)
        result[:, :, rows, columns] = found.view(len(rows), weight.shape[1], weight.shape[0]).permute(2, 1, 0)
        return (result + result.flip(-1, -2)) / 2

    def image_gradient(self) -> Tensor | None:
        """The sum of what `pull_back` added since the piece was shown."""
        if self.grad_pairs is None:
            return None
        batch, channels = self.padded_shape[:2]
        grads = self.grad_pairs.view(batch, len(self.offsets), channels, *self.counts).unbind(1)
        padded = self.grad_pairs.new_zeros(self.padded_shape)
        padded[self._slices(0, 0)] += grads[0]
        for (dy, dx), grad in zip(self.offsets[1:], grads[1:], strict=True):
            padded[self._slices(dy, dx)] += grad
            padded[self._slices(-dy, -dx)] += grad
        return F.pad(padded, [-p for p in self.padding])
