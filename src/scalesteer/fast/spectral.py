"""Correlation as products in the frequency domain: the engine for many input channels.

:mod:`scalesteer.fast.transforms` says how images and filters get there and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scalesteer.fast.engine import Engine, batched_product, keep_larger
from scalesteer.fast.memory import cached_on, exists, holds_numbers
from scalesteer.fast.transforms import (
    BasisPart,
    Matrices,
    Signs,
    adjoint,
    basis_parts,
    blank_scales,
    by_sign,
    half_filters,
    join_signs,
    plan_for,
    restore,
    split_signs,
    transform,
    turn,
    view,
)
from scalesteer.geometry import Axes, Filters

CACHED_BYTES = 1 << 21  # of what goes from one product to the next on a CPU, for each thread
MOST_SHARED = 1 << 24  # bytes of it that several threads have together, if it is not more anyway
MANY_OUTPUTS = 128  # from so many channels on, one scale is enough for a product, and to join scales takes longer


def _slices(count: int, size: int, room: int, threads: int) -> list[slice]:
    """`count` things of `size` bytes each in slices that fit into `room`, or of one thing for each thread.

    Threads have as many things each: then one finds in its cache what it wrote in the operation before. Many threads
    share what is no larger than `MOST_SHARED`.
    """
    most = max(1, max(room, MOST_SHARED) // max(1, size))
    step = max(1, room // max(1, threads * size)) * threads
    step = count if count - step < threads and count <= most else min(step, most)
    return [slice(i, min(i + step, count)) for i in range(0, count, max(1, step))]


class Frequencies(Engine):
    """Responses as products of spectra, of all scales together.

    Row frequencies u are taken in blocks and columns of the output in strips, so that what one product gives is
    still in the processor's cache when the next one takes it. All of it is in memory once, as `(u {c, s}, W', B S O)`.
    """

    def __init__(self, filters: Filters, axes: Axes, groups: int, like: Tensor, pieces: int = 0, *rest: Any) -> None:
        super().__init__(filters, axes, groups, like, pieces, *rest)
        self.out_channels, self.per_group = filters.weights.shape[:2]
        self.scales, self.outputs = len(filters.sizes), self.out_channels // groups
        self.plan = plan_for(axes, filters.sizes, like, filters.symmetric)
        self.parts, self.every_row = len(self.plan.filters), slice(0, axes[0].period // 2)
        self.basis = self.from_basis(("frequencies", axes), lambda _: self._tables())
        if self.basis is not None:
            # (C, E, O / G): a product for each input channel, or, where groups are small, one for all, (1, E, C O / G)
            weights = [self._by_pair(part.weights(filters.weights)) for part, _ in self.basis]
            self.basis_weights = [w.mT if groups == 1 else w.flatten(0, 1).T[None] for w in weights]
        # Transfers, and their gradients, of all frequencies serve every piece, unless they take too much memory.
        self.fits = self.floats(filters, axes)[0] * like.element_size() <= self.budget // 2
        self.keeps = pieces > 1 and self.fits
        self.halves: dict[tuple[int, int], Tensor] = {}
        self.transfers: Tensor | None = None
        self.transfer_grads: Tensor | None = None

    def _tables(self) -> tuple[tuple[BasisPart, Tensor], ...]:
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
        self.x, (self.batch, self.channels) = x, x.shape[:2]
        spectrum = transform(self.inwards(x), self.plan.analyse, self.space, "spectrum")
        self.spectrum = self._by_frequency(spectrum, self.channels)
        if not self.filters.symmetric:
            buffer = self.space.buffer("both", *self.spectrum.shape[:2], 2 * self.per_group)
            self.spectrum = torch.cat([self.spectrum, turn(self.spectrum)], dim=2, out=buffer)  # (f G, 2B, 2C / G)

    def inwards(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` -> `(H, W, B C)`."""
        pixels = x.permute(2, 3, 0, 1)
        buffer = self.space.buffer("inwards", *pixels.shape)
        return (pixels if buffer is None else buffer.copy_(pixels)).flatten(2)

    def outwards(self, maps: Tensor, channels: int | None = None) -> Tensor:
        """`(H, W, B C)` -> `(B, C, H, W)`, by default with the channels of the output; a view."""
        channels = self.out_channels if channels is None else channels
        return view(maps, maps.shape[0], maps.shape[1], self.batch, channels).permute(2, 3, 0, 1)

    def response(self, i: int) -> Tensor:
        """`(H', W', B O)` of one scale, by plain operations and from finished filters."""
        parts = [self._filter_transform(i, part, self.every_row) for part in range(self.parts)]
        transfer = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # (f G, 2C / G, O / G)
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
        small = self.basis is None and self.fits and self.outputs < MANY_OUTPUTS
        if self.transfers is None and (self.keeps or small):
            self.transfers = self._keep_transfers()
        blank = None if winner is None else self.blank_scales()
        (row_matrix, column_matrix), between = self._restore(), self._between()
        for block, here in self._split(between, self._blocks(), 2):
            product, spectrum, waves, joined = self._signs(block)
            self._multiply(block, product)
            if self.groups > 1:  # (f, G, 2B, S, O / G) -> (f, 2B, S, G, O / G)
                product = product.view(-1, self.groups, 2 * self.batch, self.scales, self.outputs)
                spectrum = by_sign(product.permute(0, 2, 3, 1, 4).reshape(self._by_sign(block)))
            join_signs(spectrum, waves)
            batched_product(column_matrix, joined, here)
        top = self.like.new_empty(between.shape[1], len(row_matrix), self.batch, self.out_channels)  # columns first
        index = None if winner is None else winner.permute(3, 2, 0, 1).zero_()
        for strip, columns in self._split(between, self._strips(), dim=1):
            responses, by_scale = self._responses(strip)
            batched_product(row_matrix, columns.transpose(0, 1), responses.flatten(2))  # from (w, N, B S O)
            if blank is not None:
                scales = torch.arange(self.scales, device=blank.device).view(-1, 1, 1)
                hidden = blank[..., strip].permute(3, 2, 0, 1)[:, :, :, None, :, None] > scales
                responses.unflatten(4, (self.groups, -1)).masked_fill_(hidden, 0)
            larger, wins = top[strip].copy_(by_scale[0]), None if index is None else index[strip]
            for i in range(1, self.scales):
                keep_larger(larger, wins, by_scale[i], i)
            if self.scales > 1:  # what is not finite always shows
                larger += by_scale[-1].sub_(by_scale[-1])
        best.copy_(top.permute(2, 3, 1, 0))

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        if self.batch == 0:
            return
        if self.transfers is None and self.keeps:
            self.transfers = self._make_transfers(self.every_row, "transfers")
        row_matrix, column_matrix = adjoint(self._restore())
        between = self._between(columns_first=True)
        incoming = self.inwards(grad.mT).unflatten(2, (self.batch, -1))  # (W', H', B, O)
        index = winner.permute(3, 2, 0, 1)
        for strip in self._strips():
            here, winners, (routed, by_scale) = incoming[strip], index[strip], self._responses(strip)
            wins = torch.empty_like(winners)  # bytes: to compare bytes and get something else takes far longer
            for i, response in enumerate(by_scale):
                response.copy_(torch.eq(winners, i, out=wins)).mul_(here)
            batched_product(row_matrix, routed.flatten(2), between[strip])
        back = None
        if grad_image is not None:  # transposed, products are faster
            sizes = self.parts, len(self.spectrum), self.per_group, 2 * self.batch
            back = exists(self.space.buffer("grad_spectrum", *sizes))
            if self.merges:  # (1, f G, 2C / G, 2B)
                back = back.view(1, len(self.spectrum), -1, 2 * self.batch)
        for block, here in self._split(between, self._blocks(), 2, dim=1):
            product, spectrum, waves, joined = self._signs(block)
            batched_product(column_matrix, here.transpose(0, 1), joined)
            split_signs(waves, spectrum)
            if self.groups > 1:  # (f, 2B, S, G, O / G) -> (f, G, 2B, S, O / G)
                product = product.view(-1, 2 * self.batch, self.scales, self.groups, self.outputs)
                product = product.permute(0, 3, 1, 2, 4).reshape(-1, 2 * self.batch, self.scales * self.outputs)
            if back is not None:
                self._to_image(block, product, back[:, self._frequencies(block)])
            if weights:
                self._pull_back(block, product)
        if grad_image is not None and back is not None:
            straight, *turned = back[0].split(self.per_group, dim=1) if self.merges else back.unbind()
            found = self._by_row(straight.mT - turn(turned[0].mT) if turned else straight.mT, self.channels)
            maps = restore(found, adjoint(self.plan.analyse), self.space, "image")
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

    def _restore(self) -> Matrices:
        """Frequencies, as `join_signs` leaves them, to pixels: `(H', N)`, `(W', M)`."""
        row_matrix, column_matrix = self.plan.restore
        return row_matrix, column_matrix[: len(column_matrix) // 2, : column_matrix.shape[1] // 2]

    def _between(self, columns_first: bool = False) -> Tensor:
        """`(N, W', B S O)`, or `(W', N, B S O)`: rows are frequencies, u and {c, s}, and columns are pixels.

        What is written comes first, so that products write one matrix after the other.
        """
        first, second = self.axes[0].period, self.axes[1].count
        if columns_first:
            first, second = second, first
        rest = self.batch * self.scales * self.out_channels
        return exists(self.space.buffer("between", first, second, rest))

    def _by_sign(self, block: slice) -> tuple[int, ...]:
        """The shape of a block for `join_signs`."""
        rest = self.batch * self.scales * self.out_channels
        return block.stop - block.start, 2, self.axes[1].period // 2, 2, rest

    def _signs(self, block: slice) -> tuple[Tensor, Signs, Signs, Tensor]:
        """The buffers on both sides of `join_signs`: products, by sign, by sign, and as `(u {c, s}, M, B S O)`."""

        def make() -> tuple[Tensor, Signs, Signs, Tensor]:
            shape, frequencies = self._by_sign(block), self._frequencies(block)
            sizes = frequencies.stop - frequencies.start, 2 * self.batch, self.scales * self.outputs
            product = exists(self.space.buffer("product", *sizes))
            joined = exists(self.space.buffer("joined", *shape))
            waves = joined.view(2 * shape[0], -1, shape[4])
            return product, by_sign(product.view(shape)), by_sign(joined), waves

        key = "signs", block.stop - block.start, *self._sizes
        return self.space.views(key, make)

    def _responses(self, strip: slice) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The buffer for the responses of a strip, `(w, H', B, S, O)`, and those of each scale."""

        def make() -> tuple[Tensor, tuple[Tensor, ...]]:
            sizes = strip.stop - strip.start, self.axes[0].count, self.batch, self.scales, self.out_channels
            responses = exists(self.space.buffer("strip", *sizes))
            return responses, responses.unbind(3)

        return self.space.views(("responses", strip.stop - strip.start, *self._sizes), make)

    @property
    def _sizes(self) -> tuple[Any, ...]:
        """What the shapes of buffers depend on."""
        return self.axes, self.batch, self.groups, self.scales, self.out_channels

    def _split(self, x: Tensor, slices: list[slice], each: int = 1, dim: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Slices, and the parts of a tensor that belong to them, `each` for every thing of a slice."""
        return zip(slices, x.split([each * (s.stop - s.start) for s in slices], dim), strict=True)

    def _blocks(self) -> list[slice]:
        """Of row frequencies."""
        floats = 2 * self.batch * self.out_channels * self.scales
        if self.transfers is None:
            floats += self.out_channels * self.per_group * (self.parts * self.scales if self.merges else 1)
        size = floats * self.axes[1].period * self.like.element_size()
        return _slices(self.every_row.stop, size, *self._room(CACHED_BYTES))

    def _strips(self) -> list[slice]:
        """Of columns of the output."""
        rows, columns = self.axes
        size = rows.count * self.batch * self.scales * self.out_channels * self.like.element_size()
        return _slices(columns.count, size, *self._room(CACHED_BYTES // 2))

    def _room(self, cached: int) -> tuple[int, int]:
        """Bytes of a slice, and between how many threads it is divided."""
        if self.like.device.type != "cpu":  # each has its price
            return max(cached, self.budget // 4), 1
        threads = torch.get_num_threads()
        return threads * cached, threads

    def _rows(self, block: slice) -> slice:
        """The places of a block on the axis u {c, s}."""
        return slice(2 * block.start, 2 * block.stop)

    def _frequencies(self, block: slice, groups: int = 0) -> slice:
        """The places of a block on the axis f G."""
        each = self.axes[1].period * (groups or self.groups)
        return slice(block.start * each, block.stop * each)

    def _each(self) -> Iterator[tuple[int, int, slice, slice]]:
        """Scales, parts, and their places on the axes 2C / G and S O / G of transfers."""
        for i in range(self.scales):
            for part in range(self.parts):
                rows, columns = (slice(k * n, (k + 1) * n) for k, n in ((part, self.per_group), (i, self.outputs)))
                yield i, part, rows, columns

    def _multiply(self, block: slice, product: Tensor) -> None:
        """Write the spectrum of the image times all filters: `(f G, 2B, S O / G)`."""
        spectrum = self.spectrum[self._frequencies(block)]
        if self.merges:
            torch.bmm(spectrum, self._transfers(block), out=product)
            return
        found = exists(self.space.buffer("of scale", *spectrum.shape[:2], self.outputs))
        for i, part, rows, columns in self._each():
            _add_product(spectrum[:, :, rows], self._filter_transform(i, part, block, "transfers"), found, part == 0)
            if part == self.parts - 1:
                product[:, :, columns] = found  # torch multiplies one by one where the result is not contiguous

    def _to_image(self, block: slice, grad: Tensor, back: Tensor) -> None:
        """Write the gradient of the spectrum, for each part `(f G, C / G, 2B)`: an adjoint of `_multiply`."""
        if self.merges:
            torch.bmm(self._transfers(block), grad.mT, out=back[0])
            return
        for i, part, _, columns in self._each():
            transfer = self._filter_transform(i, part, block, "transfers")
            _add_product(transfer, grad[:, :, columns].mT, back[part], i == 0)

    def _pull_back(self, block: slice, grad: Tensor) -> None:
        """Add to the gradient of the weights, or of transfers where they are kept: the other adjoint of `_multiply`."""
        frequencies = self._frequencies(block)
        spectrum = self.spectrum[frequencies].mT
        if self.keeps:
            if self.transfer_grads is None:
                shape = len(self.spectrum), spectrum.shape[1], grad.shape[2]
                self.transfer_grads = exists(self.space.buffer("transfer_grads", *shape)).zero_()
            self.transfer_grads[frequencies].baddbmm_(spectrum, grad)
        elif self.basis is not None:
            buffer = self.space.buffer("transfer_grads", *spectrum.shape[:2], grad.shape[2])
            self._add_to_weights(block, torch.bmm(spectrum, grad, out=buffer))
        else:
            buffer = self.space.buffer("transfer_grads", len(grad), self.per_group, self.outputs)
            for i, part, rows, columns in self._each():
                self._add_to_taps(block, i, part, torch.bmm(spectrum[:, rows], grad[:, :, columns], out=buffer))

    @property
    def merges(self) -> bool:
        """Whether all scales and parts are in one product, or one after the other, so that less is moved."""
        return self.transfers is not None or self.basis is not None

    def _keep_transfers(self) -> Tensor:
        """Of all frequencies; of finished filters, as of a folded layer, for the next call too."""
        if not self.weights_stay:
            return self._make_transfers(self.every_row, "transfers")
        one = self.batch == 1  # the product with one image is faster if input channels are last in memory

        def make() -> Tensor:
            found = self._make_transfers(self.every_row)
            return found.mT.contiguous().mT if one else found

        key = "transfers", self.axes, self.filters.sizes, self.filters.symmetric, self.groups, one
        return cached_on(self.filters.weights, self.like, key, make)

    def _transfers(self, block: slice) -> Tensor:
        if self.transfers is None:
            return self._make_transfers(block, "transfers")
        return self.transfers[self._frequencies(block)]

    def _make_transfers(self, block: slice, name: str = "") -> Tensor:
        """Filters of all scales to the frequencies of a block: `(f G, C / G, S O / G)`, with odd parts `2C / G`."""
        frequencies, width = self._frequencies(block, groups=1), self.scales * self.outputs
        count, pairs = frequencies.stop - frequencies.start, self.groups * self.per_group
        buffer = self.space.buffer(name, self.parts * pairs * count * width)
        spectra = self.like.new_empty(self.parts * pairs * count * width) if buffer is None else buffer
        if self.basis is None:
            spectra = spectra.view(count * self.groups, self.parts * self.per_group, width)
            for i, part, rows, columns in self._each():
                spectra[:, rows, columns] = self._filter_transform(i, part, block, "transfer")
            return spectra
        spectra = spectra.view(self.parts, len(self.basis_weights[0]), count * self.scales, -1)
        for (_, table), weights, spectrum in zip(self.basis, self.basis_weights, spectra, strict=True):
            batched_product(table[frequencies].flatten(0, 1), weights, spectrum)
        if self.groups == 1:
            spectra = spectra.view(self.parts, self.per_group, count, width).permute(2, 0, 1, 3)
        else:
            spectra = spectra.view(self.parts, count, self.scales, self.groups, self.per_group, self.outputs)
            spectra = spectra.permute(1, 3, 0, 4, 2, 5)
        return spectra.reshape(-1, self.parts * self.per_group, width)

    def _add_to_weights(self, block: slice, grad: Tensor) -> None:
        """The adjoint of `_make_transfers`; gradients have pairs of channels first, `(C, O / G, ...)`."""
        if self.basis is None:
            for i, part, rows, columns in self._each():
                self._add_to_taps(block, i, part, grad[:, rows, columns])
            return
        grad = grad.view(-1, self.groups, self.parts, self.per_group, self.scales, self.outputs)
        grad = grad.permute((2, 1, 3, 0, 4, 5) if self.groups == 1 else (2, 0, 4, 1, 3, 5))
        grad = exists(self.space.buffer("transfers", *grad.shape)).copy_(grad)  # filters are not used any more
        for part, (_, table) in enumerate(self.basis):
            functions = table[self._frequencies(block, groups=1)].flatten(0, 1)
            shape = len(self.basis_weights[part]), len(functions), -1  # (C, f S, O / G), or (1, f S, C O / G)
            found = batched_product(functions.T, grad[part].reshape(shape)).mT
            self.add_weight_gradient(found.reshape(self.channels, self.outputs, -1), part)

    def _add_to_taps(self, block: slice, i: int, part: int, grad: Tensor) -> None:
        """The adjoint of `_filter_transform`."""
        row_matrix, column_matrix = self.plan.windows[part][i]
        grad = grad.reshape(block.stop - block.start, len(column_matrix), -1)
        taps = restore(grad, adjoint((row_matrix[self._rows(block)], column_matrix)), self.space)  # (n, n, C O / G)
        self.add_weight_gradient(taps.flatten(0, 1).T.unflatten(0, (-1, self.outputs)), i)

    def _filter_transform(self, i: int, part: int, block: slice, name: str = "") -> Tensor:
        """One part of the filters of scale i at the frequencies of a block: `(f G, C / G, O / G)`."""
        if (i, part) not in self.halves:
            windows = self._by_pair(self.filters.windows()[i]).flatten(0, 1)
            self.halves[i, part] = half_filters(windows, part, self.parts).contiguous()
        row_matrix, column_matrix = self.plan.filters[part][i]
        matrices = row_matrix[self._rows(block)], column_matrix
        return view(transform(self.halves[i, part], matrices, self.space, name), -1, self.per_group, self.outputs)

    def _by_pair(self, weights: Tensor) -> Tensor:
        """Channels of the input first: `(O, C / G, ...)` -> `(C, O / G, ...)`."""
        by_group: Tensor = weights.unflatten(0, (self.groups, -1))
        return by_group.transpose(1, 2).flatten(0, 1)

    def _by_frequency(self, spectrum: Tensor, channels: int) -> Tensor:
        """`(u, {+, -} v {a, b}, B C)` -> `(f G, 2B, C / G)`."""
        shape = spectrum.shape[0] * spectrum.shape[1] // 2, 2 * self.batch, self.groups, channels // self.groups
        return view(spectrum, *shape).transpose(1, 2).flatten(0, 1)

    def _by_row(self, product: Tensor, channels: int) -> Tensor:
        """The inverse of `_by_frequency`."""
        product = product.unflatten(0, (-1, self.groups)).transpose(1, 2)
        row_matrix, column_matrix = self.plan.restore
        return view(product, row_matrix.shape[1] // 2, column_matrix.shape[1], self.batch * channels)


def _add_product(left: Tensor, right: Tensor, out: Tensor, first: bool) -> None:
    """Write the products of matrices, or add them unless they are the first."""
    if first:
        torch.bmm(left, right, out=out)
    else:
        out.baddbmm_(left, right)
