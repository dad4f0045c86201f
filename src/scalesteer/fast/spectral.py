"""Correlation as products in the frequency domain: the engine for many input channels.

:mod:`scalesteer.fast.transforms` says how images and filters get there and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalesteer.fast.engine import Engine
from scalesteer.fast.maximum import blank_scales, keep_largest
from scalesteer.fast.memory import cached_on, holds_numbers
from scalesteer.fast.transforms import (
    BasisPart,
    Matrices,
    adjoint,
    basis_parts,
    flat_reshape,
    half_filters,
    plan_for,
    restore,
    transform,
    turn,
)
from scalesteer.geometry import Axes, Filters

CACHED_BYTES = 1 << 21  # of what goes from one product to the next on a CPU, for each thread
MOST_SHARED = 1 << 24  # bytes of it that several threads have together, if it is not more anyway


def _slices(count: int, size: int, budget: int, threads: int) -> list[slice]:
    """`count` things of `size` bytes each in slices of at most `budget` bytes, but with one thing for each thread.

    Threads have as many things each: then one finds in its cache what it wrote in the operation before. Many threads
    share what is no larger than `MOST_SHARED`.
    """
    most = max(1, max(budget, MOST_SHARED) // max(1, size))
    step = max(1, budget // max(1, threads * size)) * threads
    step = count if count - step < threads and count <= most else min(step, most)
    return [slice(i, min(i + step, count)) for i in range(0, count, max(1, step))]


Signs = tuple[Tensor, Tensor, Tensor, Tensor]


def by_sign(x: Tensor) -> Signs:
    """`(u, {+, -}, v, {a, b}, R)` -> plus a, plus b, minus a, minus b; of cosines and sines likewise."""
    (plus_a, plus_b), (minus_a, minus_b) = x[:, 0].unbind(2), x[:, 1].unbind(2)
    return plus_a, plus_b, minus_a, minus_b


def join_signs(spectrum: Signs, out: Signs) -> None:
    """Half of the way from frequencies to columns: `(u, {+, -}, v, {a, b}, R)` -> `(u, {c, s}, v, {c, s}, R)`.

    What is left is one product with `(W', M)`, for cosines and sines of rows alike: half of the work of `(2W', 2M)`.
    """
    (plus_a, plus_b, minus_a, minus_b), (cos_cos, cos_sin, sin_cos, sin_sin) = spectrum, out
    torch.add(plus_a, minus_a, out=cos_cos)
    torch.sub(plus_b, minus_b, out=cos_sin)
    torch.add(plus_b, minus_b, out=sin_cos)
    torch.sub(minus_a, plus_a, out=sin_sin)


def split_signs(waves: Signs, out: Signs) -> None:
    """The adjoint of `join_signs`."""
    (cos_cos, cos_sin, sin_cos, sin_sin), (plus_a, plus_b, minus_a, minus_b) = waves, out
    torch.sub(cos_cos, sin_sin, out=plus_a)
    torch.add(sin_cos, cos_sin, out=plus_b)
    torch.add(cos_cos, sin_sin, out=minus_a)
    torch.sub(sin_cos, cos_sin, out=minus_b)


class Block(NamedTuple):
    """Row frequencies u that are worked on together, and their places on longer axes."""

    length: int
    rows: slice  # u {c, s}
    functions: slice  # f, all frequencies of both axes
    spectrum: slice  # f G


class BlockBuffers(NamedTuple):
    """Memory on both sides of `join_signs`, and views of it."""

    product: Tensor  # (f G, 2B, S O / G)
    spectrum: Signs  # the same by sign
    waves: Signs
    joined: Tensor  # what `waves` are views of: (u {c, s}, M, B S O)


class Frequencies(Engine):
    """Responses as products of spectra, of all scales together.

    Row frequencies u are taken in blocks and columns of the output in strips, so that what one product gives is
    still in the processor's cache when the next one takes it. All of it is in memory once, as `(u {c, s}, W', B S O)`.
    N and M are the periods of rows and columns. Spectra of images are `(f G, 2B, C / G)`, transfers, which are those of
    filters, `(f G, C / G, S O / G)`; both have twice the channels if filters have odd parts.
    """

    def __init__(self, filters: Filters, axes: Axes, groups: int, like: Tensor, pieces: int = 0, *rest: Any) -> None:
        super().__init__(filters, axes, groups, like, pieces, *rest)
        self.out_channels, self.per_group = filters.weights.shape[:2]
        self.channels, self.scales, self.outputs = (
            groups * self.per_group,
            len(filters.sizes),
            self.out_channels // groups,
        )
        self.row_period, self.column_period = (axis.period for axis in axes)
        self.plan = plan_for(axes, filters.sizes, like, filters.symmetric)
        self.parts, self.every_row = len(self.plan.filters), self._block(slice(0, self.row_period // 2))
        self.basis = self.from_basis(("frequencies", axes), lambda _: self._make_basis_tables())
        if self.basis is not None:
            # (C, E, O / G): a product for each input channel, or, where groups are small, one for all, (1, E, C O / G)
            weights = [self._by_pair(part.weights(filters.weights)) for part, _ in self.basis]
            self.basis_weights = [w.mT if groups == 1 else w.flatten(0, 1).T[None] for w in weights]
        # Transfers, and their gradients, of all frequencies serve every piece, unless they take too much memory.
        self.transfer_floats = self.parts * self.channels * self.scales * self.outputs  # of each frequency
        self.fits = self.floats(filters, axes)[0] * like.element_size() <= self.budget // 2
        self.keeps = pieces > 1 and self.fits
        self.halves: dict[tuple[int, int], Tensor] = {}
        self.transfers: Tensor | None = None
        self.transfer_grads: Tensor | None = None

    def _make_basis_tables(self) -> tuple[tuple[BasisPart, Tensor], ...]:
        """The parts of the basis, each with the tables of all scales, `(f, S, E)`."""
        parts = basis_parts(self.filters, self.axes, self.like)
        return tuple((BasisPart(part.mix, ()), torch.stack(part.tables, dim=1)) for part in parts)

    @staticmethod
    def floats(filters: Filters, axes: Axes, groups: int = 1) -> tuple[int, int]:
        rows, columns = axes
        out_channels, per_group = filters.weights.shape[:2]
        period, (parts, spectra) = rows.period * columns.period, (1, 2) if filters.symmetric else (2, 6)
        image = period * spectra * per_group * groups
        image += (len(filters.sizes) * rows.period + 3 * rows.count) * columns.count * out_channels
        return len(filters.sizes) * out_channels * per_group * parts * period // 2, image

    @staticmethod
    def empty_winner(best: Tensor) -> Tensor:
        batch, channels, height, width = best.shape
        return best.new_empty(width, height, batch, channels, dtype=torch.uint8).permute(2, 3, 1, 0)

    def load_batch(self, x: Tensor, kept: Tensor | None = None) -> None:
        self.x, self.batch = x, x.shape[0]
        spectrum = transform(self.inwards(x), self.plan.analyse, self.space, "spectrum")
        self.spectrum = self._by_frequency(spectrum, self.channels)
        if not self.filters.symmetric:
            buffer = self.space.buffer("both", *self.spectrum.shape[:2], 2 * self.per_group)
            self.spectrum = torch.cat([self.spectrum, turn(self.spectrum)], dim=2, out=buffer)

    def inwards(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` -> `(H, W, B C)`."""
        pixels = x.permute(2, 3, 0, 1)
        buffer = self.space.buffer("inwards", *pixels.shape)
        return (pixels if buffer is None else buffer.copy_(pixels)).flatten(2)

    def outwards(self, maps: Tensor, channels: int | None = None) -> Tensor:
        """`(H, W, B C)` -> `(B, C, H, W)`, by default with the channels of the output; a view."""
        channels = self.out_channels if channels is None else channels
        return flat_reshape(maps, maps.shape[0], maps.shape[1], self.batch, channels).permute(2, 3, 0, 1)

    def response(self, i: int) -> Tensor:
        """`(H', W', B O)` of one scale, by plain operations and from finished filters."""
        parts = [self._filter_transform(i, part, self.every_row) for part in range(self.parts)]
        transfer = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        product = torch.bmm(self.spectrum, transfer)  # (f G, 2B, O / G)
        return restore(self._by_row(product, self.out_channels), self.plan.restore)

    def blank_scales(self) -> Tensor | None:
        """None if no window is blank, where that can be told without waiting for a GPU."""
        x, filters = self.x, self.filters
        can_tell = self.space.like is not None and x.device.type == "cpu" and holds_numbers(x)
        # A window with a bright pixel at its centre is not blank; and one bright channel is enough.
        can_tell = can_tell and all(axis.first >= 0 and axis.last < axis.length for axis in self.axes)
        if can_tell and bool(x[:, :: self.channels // self.groups].all()):
            return None
        bright = (x != 0).unflatten(1, (self.groups, -1)).any(2)
        if can_tell and bool(bright.all()):
            return None
        supports = cached_on(filters.basis, x, ("supports", filters.sizes), filters.supports)
        return blank_scales(bright.to(x.dtype), supports, self.axes, filters.symmetric)

    def max_over_scales(self, best: Tensor, winner: Tensor | None) -> None:
        if self.batch == 0:
            return
        if self.transfers is None and (self.keeps or (self.basis is None and self.fits)):
            self.transfers = self._keep_transfers()
        blank = None if winner is None else self.blank_scales()
        (row_matrix, column_matrix), (rows, columns) = self._restoring(), self.axes
        rest = self.batch * self.scales * self.out_channels
        between = self.space.need("between", self.row_period, columns.count, rest)
        blocks, memory = self._blocks()
        buffers = self._block_buffers(blocks)
        for block in blocks:
            product, spectrum, waves, joined = buffers[block.length]
            torch.bmm(self.spectrum[block.spectrum], self._transfers(block, memory), out=product)
            if self.groups > 1:  # (f, G, 2B, S, O / G) -> (f, 2B, S, G, O / G)
                product = product.view(-1, self.groups, 2 * self.batch, self.scales, self.outputs)
                spectrum = by_sign(product.permute(0, 2, 3, 1, 4).reshape(self._sign_shape(block.length)))
            join_signs(spectrum, waves)
            torch.bmm(column_matrix[: 2 * block.length], joined, out=between[block.rows])
        top = self.like.new_empty(columns.count, rows.count, self.batch, self.out_channels)  # columns first
        index = None if winner is None else winner.permute(3, 2, 0, 1).zero_()
        strips = self._strips()
        responses_of = self._strip_buffers(strips)
        for strip in strips:
            responses, by_scale = responses_of[strip.stop - strip.start]
            torch.bmm(row_matrix[strip], between[:, strip].transpose(0, 1), out=responses.flatten(2))
            if blank is not None:
                scales = torch.arange(self.scales, device=blank.device).view(-1, 1, 1)
                hidden = blank[..., strip].permute(3, 2, 0, 1)[:, :, :, None, :, None] > scales
                responses.unflatten(4, (self.groups, -1)).masked_fill_(hidden, 0)
            largest = top[strip].copy_(by_scale[0])
            keep_largest(largest, None if index is None else index[strip], by_scale[1:])
        best.copy_(top.permute(2, 3, 1, 0))

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        if self.batch == 0:
            return
        if self.transfers is None and self.keeps:
            self.transfers = self._make_transfers(self.every_row, self._transfer_memory(self.every_row))
        (row_matrix, column_matrix), width = (matrix.mT for matrix in self._restoring()), self.axes[1].count
        rest = self.batch * self.scales * self.out_channels
        between = self.space.need("between", width, self.row_period, rest)
        incoming = self.inwards(grad.mT).unflatten(2, (self.batch, -1))  # (W', H', B, O)
        index, strips = winner.permute(3, 2, 0, 1), self._strips()
        buffers_of_strip = self._strip_buffers(strips)
        for strip in strips:
            here, winners, (routed, by_scale) = (
                incoming[strip],
                index[strip],
                buffers_of_strip[strip.stop - strip.start],
            )
            wins = torch.empty_like(winners)  # bytes: to compare bytes and get something else takes far longer
            for i, response in enumerate(by_scale):
                response.copy_(torch.eq(winners, i, out=wins)).mul_(here)
            torch.bmm(row_matrix[strip], routed.flatten(2), out=between[strip])
        back = None
        if grad_image is not None:  # transposed, products are faster
            back = self.space.need("grad_spectrum", len(self.spectrum), self.parts * self.per_group, 2 * self.batch)
        blocks, memory = self._blocks()
        buffers = self._block_buffers(blocks)
        for block in blocks:
            product, spectrum, waves, joined = buffers[block.length]
            torch.bmm(column_matrix[: 2 * block.length], between[:, block.rows].transpose(0, 1), out=joined)
            split_signs(waves, spectrum)
            if self.groups > 1:  # (f, 2B, S, G, O / G) -> (f, G, 2B, S, O / G)
                product = product.view(-1, 2 * self.batch, self.scales, self.groups, self.outputs)
                product = product.permute(0, 3, 1, 2, 4).reshape(-1, 2 * self.batch, self.scales * self.outputs)
            if back is not None:
                torch.bmm(self._transfers(block, memory), product.mT, out=back[block.spectrum])
            if weights:
                self._pull_back(block, product)
        if grad_image is not None and back is not None:
            straight, *turned = (part.mT for part in back.split(self.per_group, dim=1))
            by_row = self._by_row(straight - turn(turned[0]) if turned else straight, self.channels)
            maps = restore(by_row, adjoint(self.plan.analyse), self.space, "image")
            grad_image.copy_(self.outwards(maps, self.channels))

    def weight_gradient(self) -> Tensor:
        if self.transfer_grads is not None:
            self._add_to_weights(self.every_row, self.transfer_grads)
            self.transfer_grads = None
        grads = [self.weight_grads.pop(i) for i in range(len(self.weight_grads))]
        if not grads:  # of an empty batch
            return torch.zeros_like(self.filters.weights)
        grads = [g.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1) for g in grads]  # (O, C / G, ...)
        if self.basis is None:
            return torch.cat(grads, dim=2)  # finished taps are those of each scale, side by side
        parts = [part.pull_back(grad) for (part, _), grad in zip(self.basis, grads, strict=True)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _restoring(self) -> Matrices:
        """Frequencies, as `join_signs` leaves them, to pixels: `(W', H', N)` and `(N, W', M)`, a matrix many times."""
        row_matrix, column_matrix = self.plan.restore
        column_matrix = column_matrix[: len(column_matrix) // 2, : column_matrix.shape[1] // 2]
        return row_matrix.expand(self.axes[1].count, -1, -1), column_matrix.expand(self.row_period, -1, -1)

    def _block(self, u: slice) -> Block:
        functions = slice(u.start * self.column_period, u.stop * self.column_period)
        spectrum = slice(functions.start * self.groups, functions.stop * self.groups)
        return Block(u.stop - u.start, slice(2 * u.start, 2 * u.stop), functions, spectrum)

    def _blocks(self) -> tuple[list[Block], Tensor | None]:
        """All blocks, the largest first, and memory for the transfers of one unless those of all are kept."""
        floats = 2 * self.batch * self.out_channels * self.scales
        if self.transfers is None:
            floats += self.transfer_floats
        size, budget = floats * self.column_period * self.like.element_size(), self._slice_budget(CACHED_BYTES)
        blocks = [self._block(u) for u in _slices(self.every_row.length, size, *budget)]
        return blocks, None if self.transfers is not None else self._transfer_memory(blocks[0])

    def _strips(self) -> list[slice]:
        """Columns of the output that are worked on together."""
        rows, columns = self.axes
        size = rows.count * self.batch * self.scales * self.out_channels * self.like.element_size()
        return _slices(columns.count, size, *self._slice_budget(CACHED_BYTES // 2))

    def _slice_budget(self, cached: int) -> tuple[int, int]:
        """Bytes of a slice, and between how many threads it is divided."""
        if self.like.device.type != "cpu":  # there each operation has its price
            return max(cached, self.budget // 4), 1
        threads = torch.get_num_threads()
        return threads * cached, threads

    def _sign_shape(self, count: int) -> tuple[int, ...]:
        """The shape of a block for `join_signs`."""
        return count, 2, self.column_period // 2, 2, self.batch * self.scales * self.out_channels

    def _block_buffers(self, blocks: Iterable[Block]) -> dict[int, BlockBuffers]:
        """For each length of a block."""
        buffers = {}
        for count in dict.fromkeys(block.length for block in blocks):
            frequencies, shape = count * self.column_period * self.groups, self._sign_shape(count)
            product = self.space.need("product", frequencies, 2 * self.batch, self.scales * self.outputs)
            joined = self.space.need("joined", *shape)
            waves = joined.view(2 * count, -1, shape[4])
            buffers[count] = BlockBuffers(product, by_sign(product.view(shape)), by_sign(joined), waves)
        return buffers

    def _strip_buffers(self, strips: Iterable[slice]) -> dict[int, tuple[Tensor, tuple[Tensor, ...]]]:
        """For each length of a strip memory for responses, `(w, H', B, S, O)`, and those of each scale."""
        buffers = {}
        for width in dict.fromkeys(strip.stop - strip.start for strip in strips):
            sizes = width, self.axes[0].count, self.batch, self.scales, self.out_channels
            responses = self.space.need("strip", *sizes)
            buffers[width] = responses, responses.unbind(3)
        return buffers

    def _scales_and_parts(self) -> Iterator[tuple[int, int, slice, slice]]:
        """Scales, parts, and their places on the axes 2C / G and S O / G of transfers."""
        for i in range(self.scales):
            for part in range(self.parts):
                rows, columns = (slice(k * n, (k + 1) * n) for k, n in ((part, self.per_group), (i, self.outputs)))
                yield i, part, rows, columns

    def _pull_back(self, block: Block, grad: Tensor) -> None:
        """Add to the gradient of the weights, or of transfers where they are kept."""
        spectrum = self.spectrum[block.spectrum].mT
        if self.keeps:
            if self.transfer_grads is None:
                shape = len(self.spectrum), spectrum.shape[1], grad.shape[2]
                self.transfer_grads = self.space.need("transfer_grads", *shape).zero_()
            self.transfer_grads[block.spectrum].baddbmm_(spectrum, grad)
        else:
            buffer = self.space.need("transfer_grads", *spectrum.shape[:2], grad.shape[2])
            self._add_to_weights(block, torch.bmm(spectrum, grad, out=buffer))

    def _keep_transfers(self) -> Tensor:
        """Of all frequencies; of finished filters, as of a folded layer, for the next call too."""
        block = self.every_row
        if not self.weights_stay:
            return self._make_transfers(block, self._transfer_memory(block))
        one = self.batch == 1  # the product with one image is faster if input channels are last in memory

        def make() -> Tensor:
            made = self._make_transfers(block, self.like.new_empty(self.transfer_floats * self._frequency_count(block)))
            return made.mT.contiguous().mT if one else made

        key = "transfers", self.axes, self.filters.sizes, self.filters.symmetric, self.groups, one
        return cached_on(self.filters.weights, self.like, key, make)

    def _transfer_memory(self, block: Block) -> Tensor:
        return self.space.need("transfers", self.transfer_floats * self._frequency_count(block))

    def _frequency_count(self, block: Block) -> int:
        return block.length * self.column_period

    def _transfers(self, block: Block, memory: Tensor | None) -> Tensor:
        if self.transfers is not None:
            return self.transfers[block.spectrum]
        if memory is None:
            raise RuntimeError("transfers that are not kept need memory.")
        return self._make_transfers(block, memory)

    def _make_transfers(self, block: Block, memory: Tensor) -> Tensor:
        """Filters of all scales to the frequencies of a block: `(f G, C / G, S O / G)`, with odd parts `2C / G`."""
        count, width = self._frequency_count(block), self.scales * self.outputs
        spectra = memory[: self.transfer_floats * count]
        if self.basis is None:
            spectra = spectra.view(count * self.groups, self.parts * self.per_group, width)
            for i, part, rows, columns in self._scales_and_parts():
                spectra[:, rows, columns] = self._filter_transform(i, part, block, "transfer")
            return spectra
        spectra = spectra.view(self.parts, len(self.basis_weights[0]), count * self.scales, -1)
        for (_, table), weights, spectrum in zip(self.basis, self.basis_weights, spectra, strict=True):
            torch.bmm(table[block.functions].flatten(0, 1).expand(len(weights), -1, -1), weights, out=spectrum)
        if self.groups == 1:
            spectra = spectra.view(self.parts, self.per_group, count, width).permute(2, 0, 1, 3)
        else:
            spectra = spectra.view(self.parts, count, self.scales, self.groups, self.per_group, self.outputs)
            spectra = spectra.permute(1, 3, 0, 4, 2, 5)
        return spectra.reshape(-1, self.parts * self.per_group, width)

    def _add_to_weights(self, block: Block, grad: Tensor) -> None:
        """The adjoint of `_make_transfers`; gradients have pairs of channels first, `(C, O / G, ...)`."""
        if self.basis is None:
            for i, part, rows, columns in self._scales_and_parts():
                self._add_to_taps(block, i, part, grad[:, rows, columns])
            return
        grad = grad.view(-1, self.groups, self.parts, self.per_group, self.scales, self.outputs)
        grad = grad.permute((2, 1, 3, 0, 4, 5) if self.groups == 1 else (2, 0, 4, 1, 3, 5))
        grad = self.space.need("transfers", *grad.shape).copy_(grad)  # filters are not used any more
        for part, (_, table) in enumerate(self.basis):
            functions, count = table[block.functions].flatten(0, 1), len(self.basis_weights[part])
            by_pair = grad[part].reshape(count, len(functions), -1)  # (C, f S, O / G), or (1, f S, C O / G)
            found = torch.bmm(functions.T.expand(count, -1, -1), by_pair).mT
            self.add_weight_gradient(found.reshape(self.channels, self.outputs, -1), part)

    def _add_to_taps(self, block: Block, i: int, part: int, grad: Tensor) -> None:
        """The adjoint of `_filter_transform`."""
        row_matrix, column_matrix = self.plan.windows[part][i]
        grad = grad.reshape(block.length, len(column_matrix), -1)
        taps = restore(grad, adjoint((row_matrix[block.rows], column_matrix)), self.space)  # (n, n, C O / G)
        self.add_weight_gradient(taps.flatten(0, 1).T.unflatten(0, (-1, self.outputs)), i)

    def _filter_transform(self, i: int, part: int, block: Block, name: str = "") -> Tensor:
        """One part of the filters of scale i at the frequencies of a block: `(f G, C / G, O / G)`."""
        if (i, part) not in self.halves:
            windows = self._by_pair(self.filters.windows()[i]).flatten(0, 1)
            self.halves[i, part] = half_filters(windows, part, self.parts).contiguous()
        row_matrix, column_matrix = self.plan.filters[part][i]
        spectrum = transform(self.halves[i, part], (row_matrix[block.rows], column_matrix), self.space, name)
        return flat_reshape(spectrum, -1, self.per_group, self.outputs)

    def _by_pair(self, weights: Tensor) -> Tensor:
        """Channels of the input first: `(O, C / G, ...)` -> `(C, O / G, ...)`."""
        by_group: Tensor = weights.unflatten(0, (self.groups, -1))
        return by_group.transpose(1, 2).flatten(0, 1)

    def _by_frequency(self, spectrum: Tensor, channels: int) -> Tensor:
        """`(u, {+, -} v {a, b}, B C)` -> `(f G, 2B, C / G)`."""
        shape = spectrum.shape[0] * spectrum.shape[1] // 2, 2 * self.batch, self.groups, channels // self.groups
        return flat_reshape(spectrum, *shape).transpose(1, 2).flatten(0, 1)

    def _by_row(self, product: Tensor, channels: int) -> Tensor:
        """The inverse of `_by_frequency`."""
        product = product.unflatten(0, (-1, self.groups)).transpose(1, 2)
        row_matrix, column_matrix = self.plan.restore
        return flat_reshape(product, row_matrix.shape[1] // 2, column_matrix.shape[1], self.batch * channels)
