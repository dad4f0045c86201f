"""Correlation as products with pairs of pixels: the engine for few input channels.

Between frequencies their products would be so small that the transforms back are all the work.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.fast.spectral import Engine, batched_product
from scalesteer.geometry import Axes, Filters


@lru_cache(maxsize=64)
def half_window(size: int) -> tuple[tuple[int, int], ...]:
    """Offsets of one half of a window, from the centre outwards ring by ring: a smaller window is a prefix."""
    radius = size // 2
    every = [(dy, dx) for dy in range(radius + 1) for dx in range(-radius, radius + 1) if dy > 0 or dx >= 0]
    return tuple(sorted(every, key=lambda d: (max(abs(d[0]), abs(d[1])), d)))


@lru_cache(maxsize=64)
def half_taps(sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The taps of the half windows of all scales, and their mirror images, as places on the axis T of `Filters`."""
    taps, mirrored, start = [], [], 0
    for n in sizes:
        for dy, dx in half_window(n):
            place = (n // 2 + dy) * n + n // 2 + dx
            taps.append(start + place)
            mirrored.append(start + n * n - 1 - place)
        start += n * n
    return taps, mirrored


@lru_cache(maxsize=64)
def _pair_slices(axes: Axes) -> list[tuple[Any, Any]]:
    """For each offset of the half window: the padded image's pixels at it, and opposite to it, from every centre."""

    def slices(*offsets: int) -> tuple[Any, ...]:
        starts = [a.border[0] + a.first + a.dilation * offset for a, offset in zip(axes, offsets, strict=True)]
        return (..., *(slice(s, s + a.last - a.first + 1, a.stride) for s, a in zip(starts, axes, strict=True)))

    return [(slices(dy, dx), slices(-dy, -dx)) for dy, dx in half_window(2 * axes[0].radius + 1)]


class Taps(Engine):
    """Responses as one product per scale with pairs of pixels x(p + d) + x(p - d). Its maps are `(B, O, H' W')`.

    A filter is point-symmetric, so that half of its taps is enough; and a window is a prefix of every larger one. Where
    a window sees zeros only, its response is exactly zero.
    """

    def __init__(self, filters: Filters, axes: Axes, groups: int, like: Tensor, pieces: int = 0, budget: int = 0):
        super().__init__(filters, axes, groups, like, pieces, budget)
        self.counts = (axes[0].count, axes[1].count)
        self.slices = _pair_slices(axes)
        self.padding = (*axes[1].border, *axes[0].border)
        self.padded_shape: tuple[int, ...] = ()
        weights, taps = filters.weights, half_taps(filters.sizes)[0]
        self.table = self.from_basis(("taps",), lambda basis: basis[:, taps].to(like))  # (D, T / 2)
        half = weights[..., taps] if self.table is None else weights @ self.table
        pairs = [(area + 1) // 2 for area in filters.areas]
        self.matrices = [part.transpose(1, 2).flatten(1) for part in half.split(pairs, dim=2)]  # (O, pairs C)

    @staticmethod
    def floats(filters: Filters, axes: Axes, groups: int = 1) -> tuple[int, int]:
        out_channels, channels = filters.weights.shape[:2]
        pairs = channels * (max(filters.areas) + 1) // 2
        return 0, axes[0].count * axes[1].count * (pairs + 3 * out_channels)  # filters take little

    def load_batch(self, x: Tensor, kept: Tensor | None = None) -> None:
        batch, channels = x.shape[:2]
        padded = self.space.buffer("padded", batch, channels, *(a.length + sum(a.border) for a in self.axes))
        pairs = self.space.buffer("pairs", batch, len(self.slices), channels, *self.counts)
        if padded is None or pairs is None:
            padded = F.pad(x, self.padding)
            opposite = (padded[one] + padded[other] for one, other in self.slices[1:])
            pairs = torch.stack([padded[self.slices[0][0]], *opposite], dim=1)
        else:
            if padded.shape != self.padded_shape:  # the last piece is smaller: other views, and its border is not zero
                padded.zero_()
                self.views = [(padded[one], padded[other], pairs[:, k]) for k, (one, other) in enumerate(self.slices)]
            left, _, top, _ = self.padding
            padded[..., top : top + x.shape[-2], left : left + x.shape[-1]] = x
            for one, other, pair in self.views[1:]:
                torch.add(one, other, out=pair)
            self.views[0][2].copy_(self.views[0][0])
        self.padded_shape = padded.shape
        self.pairs = pairs.flatten(3).flatten(1, 2)  # (B, pairs C, H' W')
        self.grad_pairs: Tensor | None = None

    def inwards(self, maps: Tensor) -> Tensor:
        return maps.flatten(2)

    def outwards(self, maps: Tensor) -> Tensor:
        return maps.view(*maps.shape[:2], *self.counts)

    def response(self, i: int) -> Tensor:
        matrix = self.matrices[i]
        batch, _, pixels = self.pairs.shape
        buffer = self.space.buffer("best" if i == 0 else "response", batch, matrix.shape[0], pixels)
        return batched_product(matrix, self.pairs[:, : matrix.shape[1]], buffer)

    def pull_back(self, i: int, grad: Tensor, image: bool, weights: bool) -> None:
        matrix = self.matrices[i]
        if image:
            if self.grad_pairs is None:
                buffer = self.space.buffer("grad_pairs", *self.pairs.shape)
                self.grad_pairs = torch.zeros_like(self.pairs) if buffer is None else buffer.zero_()
            self.grad_pairs[:, : matrix.shape[1]].baddbmm_(matrix.T.expand(len(grad), -1, -1), grad)
        if weights:
            self.add_weight_gradient(torch.bmm(self.pairs[:, : matrix.shape[1]], grad.mT).sum(0), i)  # (pairs C, O)

    def weight_gradient(self) -> Tensor:
        weights = self.filters.weights
        grads = torch.cat([self.weight_grads[i] for i in range(len(self.matrices))])
        found = grads.view(-1, weights.shape[1], weights.shape[0]).permute(2, 1, 0)  # (O, C, T / 2)
        if self.table is not None:
            return found @ self.table.T
        result = torch.zeros_like(weights)
        for places in half_taps(self.filters.sizes):  # a tap and its mirror image share the gradient
            result.index_add_(2, torch.tensor(places, device=weights.device), found, alpha=0.5)
        return result

    def image_gradient(self) -> Tensor:
        batch, channels = self.padded_shape[:2]
        grads = self.grad_pairs.view(batch, len(self.slices), channels, *self.counts).unbind(1)  # type: ignore[union-attr]
        padded = grads[0].new_zeros(self.padded_shape)
        padded[self.slices[0][0]] += grads[0]
        for (one, other), grad in zip(self.slices[1:], grads[1:], strict=True):
            padded[one] += grad
            padded[other] += grad
        return F.pad(padded, [-p for p in self.padding])
