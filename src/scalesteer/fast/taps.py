"""Correlation as products with pixels, or with pairs of them: the engine for few input channels.

Between frequencies their products would be so small that the transforms back are all the work.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.fast.engine import Engine
from scalesteer.fast.maximum import keep_largest
from scalesteer.fast.memory import cached_on, has_reliable_version
from scalesteer.fast.transforms import batched_product
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


Order = tuple[tuple[int, ...], tuple[int, ...]]  # offsets as places in `half_window`, and how many each scale has


def order_of_windows(sizes: tuple[int, ...]) -> Order:
    """All offsets of the half windows, from the centre outwards."""
    counts = tuple((n * n + 1) // 2 for n in sizes)
    return tuple(range(max(counts))), counts


def order_of_supports(supports: Tensor) -> Order:
    """The offsets at which some filter can be other than zero, `(S, n, n)`: first those of the first scale, and so on.

    A disc has about four fifths of the taps of its window.
    """
    radius = supports.shape[-1] // 2
    rows, columns = (torch.tensor(half_window(2 * radius + 1)).T + radius).unbind()
    seen = (supports | supports.flip(1, 2)).cpu()[:, rows, columns].cummax(0).values  # (S, offsets)
    seen[:, 0] = True  # the centre stands alone, before the pairs
    used = seen[-1].nonzero()[:, 0]
    first = seen.int().argmax(0)[used]
    return tuple(used[first.sort(stable=True).indices].tolist()), tuple(seen.sum(1).tolist())


@lru_cache(maxsize=64)
def places_in_order(sizes: tuple[int, ...], symmetric: bool, order: Order) -> tuple[list[int], list[int]]:
    """Places on the axis T of the taps that an engine multiplies with, and those of their mirror images."""
    (offsets, counts), found, starts = order, half_taps(sizes), [0]
    for n in sizes:
        starts.append(starts[-1] + (n * n + 1) // 2)
    half, mirrored = ([p[s + k] for s, n in zip(starts, counts, strict=False) for k in offsets[:n]] for p in found)
    if symmetric:
        return half, mirrored
    both = [k for pair in zip(half, mirrored, strict=True) for k in dict.fromkeys(pair)]
    return both, both


class Taps(Engine):
    """Responses as one product per scale with pixels. Its maps are `(B, O, H' W')`.

    Of a point-symmetric filter half of the taps is enough, times pairs x(p + d) + x(p - d); of any other each tap comes
    before its mirror image. The taps of a scale are a prefix of those of every larger one; taps that are zero whatever
    the weights are left out. Where a window sees zeros only, its response is exactly zero.
    """

    def __init__(self, filters: Filters, axes: Axes, groups: int, like: Tensor, pieces: int = 0, *rest: Any) -> None:
        super().__init__(filters, axes, groups, like, pieces, *rest)
        self.counts = (axes[0].count, axes[1].count)
        self.padding = (*axes[1].border, *axes[0].border)
        order = order_of_windows(filters.sizes)
        fixed = filters.weights if filters.basis is None else filters.basis
        # Only then may taps that are zero be left out: with plain operations numbers cannot be looked at.
        self.lasts = pieces > 0 and (filters.basis is not None or has_reliable_version(fixed))
        if self.lasts:
            order = cached_on(fixed, like, ("order", filters.sizes), lambda: order_of_supports(filters.supports()))
        self._use_order(order)

    def _use_order(self, order: Order) -> None:
        """Make ready what is multiplied with: the taps in this order."""
        filters, (offsets, counts) = self.filters, order
        self.order, (half, mirrored) = order, half_taps((2 * self.axes[0].radius + 1,))
        self.pairs_of_taps = [(half[k], mirrored[k]) for k in offsets]  # places in the largest window; first the centre
        self.padded_shape: tuple[int, ...] = ()
        self.rows = len(offsets) if filters.symmetric else 2 * len(offsets) - 1  # pairs, or pixels
        taps, _ = places_in_order(filters.sizes, filters.symmetric, order)
        self.table = self.from_basis(("taps", order), lambda basis: basis[:, taps].to(self.like))  # (D, taps)
        columns = [count if filters.symmetric else 2 * count - 1 for count in counts]

        def make() -> list[Tensor]:
            used = filters.weights[..., taps] if self.table is None else filters.weights @ self.table
            return [part.transpose(1, 2).flatten(1) for part in used.split(columns, dim=2)]

        # (O, pairs C) for each scale; those of finished filters serve the next call too
        if self.table is None and self.lasts:
            key = "matrices", order, filters.sizes, filters.symmetric
            self.matrices = cached_on(filters.weights, self.like, key, make)
        else:
            self.matrices = make()

    @staticmethod
    def floats(filters: Filters, axes: Axes, groups: int = 1) -> tuple[int, int]:
        out_channels, channels = filters.weights.shape[:2]
        pairs = channels * ((max(filters.areas) + 1) // 2 if filters.symmetric else max(filters.areas))
        return 0, axes[0].count * axes[1].count * (pairs + 3 * out_channels)  # filters take little

    def load_batch(self, x: Tensor, kept: Tensor | None = None) -> None:
        self.x = x
        if self.space.like is None:
            padded = F.pad(x, self.padding)
            sources, opposite = self._sources(padded)
            if self.filters.symmetric:
                sources[1:] = [one + other for one, other in zip(sources[1:], opposite, strict=True)]
            pairs = torch.stack(sources, dim=1)
        else:
            key = "pairs", self.axes, self.order, self.filters.symmetric, *x.shape[:2]
            views = self.space.get_or_make_views(key, lambda: self._views(*x.shape[:2]))
            padded, inside, sources, opposite, pairs, targets = views
            if padded.shape != self.padded_shape:  # the border may hold anything
                padded.zero_()
            inside.copy_(x)
            targets[0].copy_(sources[0])
            if self.filters.symmetric:
                for one, other, target in zip(sources[1:], opposite, targets[1:], strict=True):
                    torch.add(one, other, out=target)
            else:
                for source, target in zip(sources[1:], targets[1:], strict=True):
                    target.copy_(source)
        self.padded_shape = padded.shape
        self.pairs = pairs.flatten(3).flatten(1, 2)  # (B, pairs C, H' W')

    def _by_tap(self, padded: Tensor) -> list[Tensor]:
        """The pixels that each tap of the largest window sees from every centre: views, `(B, C, H', W')`."""
        for dim, axis in enumerate(self.axes, start=2):
            start, width = axis.border[0] + axis.first - axis.reach, 2 * axis.reach + 1
            padded = padded.narrow(dim, start, axis.last - axis.first + width).unfold(dim, width, axis.stride)
        windows = padded[..., :: self.axes[0].dilation, :: self.axes[1].dilation]  # (B, C, H', W', n, n)
        return [pixels for row in windows.unbind(4) for pixels in row.unbind(4)]

    def _sources(self, padded: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The pixels at each offset, and those opposite to all but the first; if not symmetric, all in one list."""
        taps, ((centre, _), *pairs) = self._by_tap(padded), self.pairs_of_taps
        ones, others = [taps[one] for one, _ in pairs], [taps[other] for _, other in pairs]
        if not self.filters.symmetric:
            ones = [pixels for pair in zip(ones, others, strict=True) for pixels in pair]
        return [taps[centre], *ones], others

    def _views(self, batch: int, channels: int) -> tuple[Any, ...]:
        """Buffers of a padded image and of pairs, and views of both."""
        padded = self.space.need("padded", batch, channels, *(axis.length + sum(axis.border) for axis in self.axes))
        pairs = self.space.need("between", batch, self.rows, channels, *self.counts)
        (top, height), (left, width) = ((axis.border[0], axis.length) for axis in self.axes)
        inside = padded[..., top : top + height, left : left + width]
        return padded, inside, *self._sources(padded), pairs, pairs.unbind(1)

    def outwards(self, maps: Tensor) -> Tensor:
        return maps.view(*maps.shape[:2], *self.counts)

    def response(self, i: int, out: Tensor | None = None) -> Tensor:
        matrix = self.matrices[i]
        return batched_product(matrix, self.pairs[:, : matrix.shape[1]], out)

    def max_over_scales(self, best: Tensor, winner: Tensor | None) -> None:
        best, index = best.flatten(2), None if winner is None else winner.flatten(2).zero_()
        buffer = self.space.buffer("response", *best.shape)
        self.response(0, best)
        keep_largest(best, index, (self.response(i, buffer) for i in range(1, len(self.matrices))))

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        everything = order_of_windows(self.filters.sizes)
        if weights and self.table is None and self.order != everything:  # a tap that is zero now has a gradient too
            self._use_order(everything)
            self.load_batch(self.x)
        incoming, index = grad.flatten(2), winner.flatten(2)
        wins, routed = torch.empty_like(index), torch.empty_like(incoming)
        grad_pairs = None
        if grad_image is not None:
            grad_pairs = self.space.need("grad_pairs", *self.pairs.shape).zero_()
        for i, matrix in enumerate(self.matrices):
            torch.eq(index, i, out=wins)
            routed.copy_(wins).mul_(incoming)
            if grad_pairs is not None:
                grad_pairs[:, : matrix.shape[1]].baddbmm_(matrix.T.expand(len(grad), -1, -1), routed)
            if weights:  # in this order it takes three quarters of the time of the transposed product
                found = torch.bmm(routed, self.pairs[:, : matrix.shape[1]].mT).sum(0).T  # (pairs C, O)
                self.add_weight_gradient(found, i)
        if grad_image is not None and grad_pairs is not None:
            grad_image.copy_(self._image_gradient(grad_pairs))

    def weight_gradient(self) -> Tensor:
        weights = self.filters.weights
        grads = torch.cat([self.weight_grads[i] for i in range(len(self.matrices))])
        found = grads.view(-1, weights.shape[1], weights.shape[0]).permute(2, 1, 0)  # (O, C, T / 2)
        if self.table is not None:
            return found @ self.table.T
        result, symmetric = torch.zeros_like(weights), self.filters.symmetric
        # A tap and its mirror image share the gradient of a pair.
        for places in places_in_order(self.filters.sizes, symmetric, self.order)[: 2 if symmetric else 1]:
            result.index_add_(2, torch.tensor(places, device=weights.device), found, alpha=0.5 if symmetric else 1)
        return result

    def _image_gradient(self, grad_pairs: Tensor) -> Tensor:
        batch, channels = self.padded_shape[:2]
        centre, *opposite = grad_pairs.view(batch, self.rows, channels, *self.counts).unbind(1)
        padded = centre.new_zeros(self.padded_shape)
        taps, once = self._by_tap(padded), 1 if self.filters.symmetric else 2  # how many rows a pair of taps has
        taps[self.pairs_of_taps[0][0]].add_(centre)
        for k, (one, other) in enumerate(self.pairs_of_taps[1:]):
            taps[one].add_(opposite[once * k])
            taps[other].add_(opposite[once * k + once - 1])
        return F.pad(padded, [-p for p in self.padding])
