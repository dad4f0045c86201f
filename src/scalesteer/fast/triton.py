"""The engines of CUDA: all scales in each product, and Triton kernels where plain operations would only move memory.

- :class:`FusedFrequencies` is :class:`spectral.Frequencies` with one product for all scales. Its ends are kernels:
  *rows in* transforms images along their columns of pixels, and in the backward pass first gives each scale the pixels
  that it won; *rows out* transforms back and takes the maximum over scales, so that the maps of single scales are never
  written. What lies between, transforms along rows of pixels and products of spectra, is cuBLAS's.
- :class:`FusedTaps` is :class:`taps.Taps`: pixels, or for point-symmetric filters pairs x(p + d) + x(p - d), are
  gathered on the fly and multiplied with the filters of three scales at a time.

Products follow torch's switch for matrix products: TF32 where it is allowed, otherwise float32 (inside the kernels
three TF32 products, which together have its accuracy). Images in half precision, as autocast makes them, are
transformed and multiplied in it, with sums in float32. Sums are made in a fixed order. What one program of a kernel
handles is drawn in :mod:`kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.fast import kernels, transforms
from scalesteer.fast.engine import Engine
from scalesteer.fast.memory import Cache, cached_on, cast
from scalesteer.fast.taps import half_window, order_of_windows, places_in_order
from scalesteer.fast.transforms import Matrices
from scalesteer.geometry import Axes, Filters


def _fill_up(channels: int, dtype: torch.dtype, scales: int = 1) -> int:
    """The channels that a product is made for: a multiple of 4, and of all scales together whole pieces of 16 bytes.

    With other lengths cuBLAS has slower kernels only, some without tensor cores, and ours move single numbers.
    """
    piece = 16 // dtype.itemsize
    return next(n for n in range(-(-channels // 4) * 4, channels + 8, 4) if scales * n % piece == 0)


def _filled_pairs(out_channels: int, channels: int, out_step: int, step: int, device: torch.device) -> Tensor:
    """Which pair of an output and an input channel stands in each place after :func:`_fill_up`."""
    outputs, inputs = np.arange(out_step) % out_channels, np.arange(step) % channels
    return torch.from_numpy((outputs[:, None] * channels + inputs).ravel()).to(device)


def _ring_tables(radius: int, dilation: tuple[int, int], device: torch.device) -> tuple[Tensor, ...]:
    """The largest window ring by ring: places of its taps, offsets (row, column) in pixels, where rings begin."""
    dy, dx = np.mgrid[-radius : radius + 1, -radius : radius + 1].reshape(2, -1)
    rings = np.maximum(np.abs(dy), np.abs(dx))
    places = np.argsort(rings, kind="stable")
    offsets = np.stack([dilation[0] * dy[places], dilation[1] * dx[places]], axis=1)
    begins = np.searchsorted(rings[places], np.arange(radius + 2))
    tables = places.astype(np.int64), offsets.astype(np.int32), begins.astype(np.int32)
    return tuple(torch.from_numpy(table).to(device) for table in tables)


_kept_halves: Cache[tuple[Tensor, ...]] = Cache(8)


def _make_halves(
    axes: Axes, sizes: tuple[int, ...], symmetric: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """For each scale the transform of the first half of a window, 2 cos(u dy ± v dx), and last of its centre.

    They are `(f, (n n + 1) / 2)`. For filters that are not symmetric also of the odd part, together `(f, n n)`: cosines
    without the factor of two, then sin(u dy ± v dx).
    """
    (rows, columns), halves = axes, []
    for n in sizes:
        along_rows = transforms.angles(rows, n)[:, None, :, None]
        along_columns = transforms.angles(columns, n)[None, :, None, :]
        turns = torch.stack([along_rows + along_columns, along_rows - along_columns], dim=1)
        turns = turns.flatten(3).flatten(0, 2)  # from (u, sign, v, dy, dx)
        middle = n * n // 2
        half = turns[:, : middle + 1].cos()
        if symmetric:
            half[:, :-1] *= 2
        else:
            half = torch.cat([half, turns[:, :middle].sin()], dim=1)
        halves.append(half.to(device=device, dtype=dtype))
    return tuple(halves)


def _pack(even: Tensor, odd: Tensor) -> Tensor:
    """Weights of both parts in one matrix, `(O, C, E)` each -> `(E + E, O {even, odd} C)`: what is not theirs is zero.

    One product with the functions of both parts then gives transfers as `FusedFrequencies` multiplies with them. That
    is twice the work of two products, and less than to bring their results together.
    """
    packed = even.new_zeros(even.shape[2] + odd.shape[2], len(even), 2, even.shape[1])
    packed[: even.shape[2], :, 0] = even.permute(2, 0, 1)
    packed[even.shape[2] :, :, 1] = odd.permute(2, 0, 1)
    return packed.flatten(1)


def _unpack(packed: Tensor, channels: int, count: int) -> tuple[Tensor, Tensor]:
    """The adjoint of :func:`_pack`; `count` functions are even."""
    by_part = packed.view(len(packed), -1, 2, channels)
    return by_part[:count, :, 0].permute(1, 2, 0), by_part[count:, :, 1].permute(1, 2, 0)


class FrequencyTables(NamedTuple):
    """What shapes say about :class:`FusedFrequencies`.

    Matrices are those of :class:`transforms.Plan`, that of columns once for each row frequency: `(N / 2, K, 2W)`.
    """

    step: int  # channels of the input and of the output, filled up
    out_step: int
    pairs: Tensor | None  # see `_filled_pairs`; None if nothing is filled up
    ways: tuple[Matrices, ...]  # to analyse and to restore, and the adjoints of both, for gradients
    rings: tuple[Tensor, ...]  # see `_ring_tables`


class FusedFrequencies(Engine):
    """Responses as products of spectra, all scales in each. The image's transform is kept for the backward pass.

    Spectra have C' channels: C, filled up (see :func:`_fill_up`), or, if filters have odd parts, twice as many (see
    :func:`transforms.turn`).
    """

    half = adds_bias = True
    tables: FrequencyTables

    def __init__(self, filters: Filters, axes: Axes, groups: int, like: Tensor, *rest: Any) -> None:
        super().__init__(filters, axes, groups, like, *rest)
        if self.basis_tables is None:
            self.basis_tables = self.from_basis(("fused", axes), lambda _: self._make_basis_tables())
        self.precision = kernels.input_precision()

    @staticmethod
    def make_tables(filters: Filters, axes: Axes, like: Tensor) -> FrequencyTables:
        scales, (out_channels, channels) = len(filters.sizes), filters.weights.shape[:2]
        steps = _fill_up(channels, like.dtype), _fill_up(out_channels, like.dtype, scales)
        filled = steps != (channels, out_channels)
        pairs = _filled_pairs(out_channels, channels, *steps[::-1], like.device) if filled else None
        plan = transforms.plan_for(axes, (), like)

        def by_row(matrices: Matrices) -> Matrices:
            return matrices[0], matrices[1].expand(axes[0].period // 2, *matrices[1].shape)

        ways = map(by_row, (plan.analyse, plan.restore, *map(transforms.adjoint, (plan.analyse, plan.restore))))
        rings = _ring_tables(axes[0].radius, (axes[0].dilation, axes[1].dilation), like.device)
        return FrequencyTables(*steps, pairs, tuple(ways), rings)

    def _make_basis_tables(self) -> tuple[Tensor, tuple[transforms.BasisPart, ...], Tensor]:
        """The functions of all parts side by side, `(f S, E)`, the parts without tables of their own, first scales."""
        parts = transforms.basis_parts(self.filters, self.axes, self.like)
        table = torch.cat([torch.stack(part.tables, dim=1) for part in parts], dim=2).flatten(0, 1)
        return table, tuple(part._replace(tables=()) for part in parts), self._first_scales()

    def _first_scales(self) -> Tensor:
        """The first scale that has each tap of the largest window, ring by ring."""
        supports, (places, *_) = self.filters.supports(), self.tables.rings
        return (~supports).to(torch.uint8).cumprod(0).sum(0, dtype=torch.int32).flatten()[places]

    @staticmethod
    def floats(filters: Filters, axes: Axes, groups: int = 1) -> tuple[int, int]:
        out_channels, channels = filters.weights.shape[:2]
        wide = axes[0].period * axes[1].period * len(filters.sizes) * out_channels
        return wide * channels // (2 if filters.symmetric else 1), 2 * wide

    def load_batch(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        self.batch = x.shape[0]
        if kept is None:
            rows, columns = self.tables.ways[0]
            pixels, self.bright = kernels.rows_in(x, rows, self.tables.step, self.precision)
            kept = torch.bmm(columns, pixels).view(-1, 2 * self.batch, self.tables.step)  # (f, 2B, C)
        self.spectrum = kept  # (f, 2B, C'), with odd parts twice as many
        if not self.filters.symmetric:
            self.spectrum = torch.cat([kept, transforms.turn(kept)], dim=2)
        return kept

    def max_over_scales(self, best: Tensor, winner: Tensor | None) -> None:
        rows, columns = self.tables.ways[1]
        blank = None if winner is None else self.blank_scales()
        # Large tensors are handed on, not named, so that each is free as soon as the next is there: (f, 2B, S O).
        shape = columns.shape[0], columns.shape[2], -1
        maps = torch.bmm(columns, torch.bmm(self.spectrum, self._transfers().mT).view(shape))
        kernels.rows_out(maps, rows, best, self.precision, len(self.filters.sizes), winner, blank, self.bias)

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        scales, out_step, (rows, columns) = len(self.filters.sizes), self.tables.out_step, self.tables.ways[3]
        incoming = torch.bmm(columns, kernels.rows_in(grad, rows, out_step, self.precision, winner, scales)[0])
        incoming = incoming.view(-1, 2 * self.batch, scales * out_step)  # (f, 2B, S O)
        if grad_image is not None:
            back = torch.bmm(incoming, self._transfers())  # (f, 2B, C')
            if not self.filters.symmetric:
                straight, turned = back.chunk(2, dim=2)
                back = straight - transforms.turn(turned)
            rows, columns = self.tables.ways[2]
            maps = torch.bmm(columns, back.view(columns.shape[0], columns.shape[2], -1))
            kernels.rows_out(maps, rows, grad_image, self.precision)
        if weights:
            found = torch.bmm(incoming.mT, self.spectrum)  # (f, S O, C')
            self.add_weight_gradient(found.float() if self.pieces > 1 else found)

    def weight_gradient(self) -> Tensor:
        """The adjoint of `_make_transfers`: `(f, S O, C')` -> `(O, C, D)`, float32."""
        (out_channels, channels), scales = self.filters.weights.shape[:2], len(self.filters.sizes)
        grad = cast(self.weight_grads[0], self.like.dtype)
        grad = grad.view(grad.shape[0] * scales, -1)  # (f S, O C')
        if self.basis_tables is not None:
            table, parts, _ = self.basis_tables
            if self.filters.symmetric:
                found = torch.mm(grad.T, table).view(self.tables.out_step, self.tables.step, -1)
            else:
                pair = _unpack(torch.mm(table.T, grad), self.tables.step, parts[0].mix.shape[1])
                found = parts[0].pull_back(pair[0]) + parts[1].pull_back(pair[1])
        else:
            taps = []
            for g, matrix in zip(grad.unflatten(0, (-1, scales)).unbind(1), self._halves(), strict=True):
                if self.filters.symmetric:
                    half = (g.T @ matrix).view(self.tables.out_step, self.tables.step, -1)
                    head, centre = half[..., :-1] / 2, half[..., -1:]  # a tap and its mirror image have equal gradients
                    taps += [head, centre, head.flip(2)]
                else:
                    even, odd = _unpack(matrix.T @ g, self.tables.step, matrix.shape[1] // 2 + 1)
                    head = even[..., :-1]
                    taps += [head + odd, even[..., -1:], (head - odd).flip(2)]
            found = torch.cat(taps, dim=2)
        if self.tables.pairs is not None:
            found = found[:out_channels, :channels]
        return cast(found, torch.float32)

    def _transfers(self) -> Tensor:
        """The transforms of the filters: `(f, S O, C')`. Those of finished filters, which nobody trains, are kept."""
        if self.kept_transfers is None:
            filters = self.filters
            key = "transfers", self.axes, filters.sizes, filters.symmetric
            self.kept_transfers = cached_on(
                filters.weights if self.weights_stay else None, self.like, key, self._make_transfers
            )
        return self.kept_transfers

    def _make_transfers(self) -> Tensor:
        weights, scales = cast(self.filters.weights, self.like.dtype), len(self.filters.sizes)
        pairs = weights.flatten(0, 1)  # (O C, D)
        if self.tables.pairs is not None:
            # Some weights twice are as good as zeros: what they multiply is zero, or nobody reads the result.
            pairs = pairs.index_select(0, self.tables.pairs)
        shape = self.tables.out_step, self.tables.step, -1
        if self.basis_tables is not None:
            table, parts, _ = self.basis_tables
            right = [part.weights(pairs) for part in parts]
            matrix = right[0].T if self.filters.symmetric else _pack(*(part.view(shape) for part in right))
            out = torch.mm(table, matrix)  # (f S, O C')
        else:
            halves, taps_by_scale = self._halves(), pairs.view(shape).split(self.filters.areas, dim=2)
            width = pairs.shape[0] * (1 if self.filters.symmetric else 2)
            out = pairs.new_empty(len(halves[0]), scales, width)
            for i, (half, taps) in enumerate(zip(halves, taps_by_scale, strict=True)):
                middle = taps.shape[2] // 2
                if self.filters.symmetric:
                    matrix = taps[..., : middle + 1].flatten(0, 1).T
                else:
                    head, centre, tail = taps.split([middle, 1, middle], dim=2)
                    matrix = _pack(torch.cat([head + tail.flip(2), centre], dim=2), head - tail.flip(2))
                torch.mm(half, matrix, out=out[:, i])
        return out.view(-1, scales * self.tables.out_step, matrix.shape[1] // self.tables.out_step)

    def _halves(self) -> tuple[Tensor, ...]:
        key = self.axes, self.filters.sizes, self.filters.symmetric, self.like.dtype, self.like.device
        return _kept_halves.get_or_make(key, lambda: _make_halves(*key), self.like.device)

    def blank_scales(self) -> Tensor:
        _, offsets, rings = self.tables.rings
        firsts = self._first_scales() if self.basis_tables is None else self.basis_tables[2]
        return kernels.blank_scales(self.bright, offsets, firsts, rings, self.axes, len(self.filters.sizes))


def _tap_tables(
    axes: Axes, row: int, plane: int, channels: int, sizes: tuple[int, ...], symmetric: bool, device: torch.device
) -> dict[str, Tensor]:
    """Where the taps of a few-channel layer lie in an image with rows of `row` and planes of `plane` numbers.

    Taps are pairs (or, unless filters are symmetric, pixels) times channels, from the centre outwards, so that every
    window is a prefix; filled up to whole blocks with taps of weight zero.
    """
    offsets = half_window(max(sizes))
    if not symmetric:
        offsets = tuple(d for dy, dx in offsets for d in dict.fromkeys([(dy, dx), (-dy, -dx)]))
    pairs = -(-len(offsets) // kernels.TAPS_MULTIPLE) * kernels.TAPS_MULTIPLE
    steps = np.array([axes[0].dilation * dy * row + axes[1].dilation * dx for dy, dx in offsets])
    signed = np.zeros((2, pairs, channels))
    signed[:, : len(offsets)] = np.array([1, -1])[:, None, None] * steps[:, None] + plane * np.arange(channels)
    lengths = [(n * n + 1) // 2 if symmetric else n * n for n in sizes]
    places = np.concatenate([s * pairs + np.arange(length) for s, length in enumerate(lengths)])
    taps, mirrored = places_in_order(sizes, symmetric, order_of_windows(sizes))
    read, factor = np.zeros(len(sizes) * pairs), np.zeros(len(sizes) * pairs, np.float32)
    read[places], factor[places] = taps, 1.0
    if symmetric:
        factor[places[np.equal(taps, mirrored)]] = 0.5  # the centre pairs with itself
    half = np.zeros(sum(n * n for n in sizes))
    half[taps] = half[mirrored] = places
    counts = [length * channels for length in lengths]
    threes = [(s, max(counts[s : s + 3])) for s in range(0, len(sizes), 3)]  # scales that share a program
    blocks = [(s, t) for s, count in threes for t in range(0, count, kernels.TAPS_BACKWARD_BLOCKS["BT"])]
    rows, columns = (axis.stride * np.arange(axis.count) for axis in axes)
    tables = {  # P pixels, S scales
        "offsets": signed.reshape(2, -1).astype(np.int32),  # (2, taps): from a centre to a pair, in floats
        "starts": (row * rows[:, None] + columns).ravel().astype(np.int32),  # (P): from the first centre, in floats
        "counts": np.array(counts, np.int32),  # (S): the taps of each window
        "read": read.astype(np.int64),  # (S pairs): which tap of the filters a pair takes,
        "factor": factor,  # and times what: nothing beyond the window
        "beyond": (factor == 0)[:, None],  # where that is
        "half": half.astype(np.int64),  # (T): the pair of every tap of the filters
        "blocks": np.array(blocks, np.int32),  # scale and first tap of each program of the backward kernel
    }
    return {name: torch.from_numpy(table).to(device) for name, table in tables.items()}


class FusedTaps(Engine):
    """Responses as products with pixels, or pairs of them, that are never written. It has no gradient of the image.

    Where a window sees zeros only, its response is exactly zero. The image with a border is kept for the backward pass.
    """

    half = adds_bias = True
    places: dict[str, Tensor]

    def __init__(self, filters: Filters, axes: Axes, groups: int, like: Tensor, *rest: Any) -> None:
        super().__init__(filters, axes, groups, like, *rest)
        self.padding, self.origin, self.image_numbers, self.places = self.tables
        if self.basis_tables is None:
            read, factor = self.places["read"], self.places["factor"]
            self.basis_tables = self.from_basis(("fused taps",), lambda b: (b[:, read].float() * factor).T.contiguous())
        self.table: Tensor | None = self.basis_tables

    @staticmethod
    def make_tables(filters: Filters, axes: Axes, like: Tensor) -> tuple[tuple[int, ...], int, int, dict[str, Tensor]]:
        """The border of an image; the place of the first centre in an image that has it, its floats, those of taps."""
        (rows, columns), channels = axes, filters.weights.shape[1]
        height, width = (axis.length + sum(axis.border) for axis in axes)
        origin = (rows.border[0] + rows.first) * width + columns.border[0] + columns.first
        where = axes, width, height * width, channels, filters.sizes, filters.symmetric
        return (*columns.border, *rows.border), origin, channels * height * width, _tap_tables(*where, like.device)

    @staticmethod
    def floats(filters: Filters, axes: Axes, groups: int = 1) -> tuple[int, int]:
        return 0, axes[0].count * axes[1].count * len(filters.weights)  # filters take little

    def load_batch(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        self.padded = F.pad(x, self.padding).contiguous() if kept is None else kept
        self.image = self.padded.flatten()[self.origin :]  # offsets count from the centre of the first window
        return self.padded

    def max_over_scales(self, best: Tensor, winner: Tensor | None) -> None:
        weights, pairs = self._tap_weights(), self.filters.symmetric
        kernels.taps_forward(self.image, self.image_numbers, weights, self.places, pairs, self.bias, best, winner)

    def _tap_weights(self) -> Tensor:
        """The weights of each tap, `(S pairs, C O)`. Those of finished filters, which nobody trains, are kept."""

        def make() -> Tensor:
            flat = self.filters.weights.permute(2, 1, 0)  # (D, C, O)
            if self.table is not None:
                return cast(torch.mm(self.table, flat.flatten(1)), self.like.dtype)
            found: Tensor = flat[self.places["read"]] * self.places["factor"][:, None, None]
            return found.to(self.like.dtype).contiguous()

        key = "tap weights", self.filters.sizes, self.filters.symmetric
        return cached_on(self.filters.weights if self.weights_stay else None, self.like, key, make)

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        image, pairs = self.image, self.filters.symmetric
        found = kernels.taps_backward(image, self.image_numbers, self.places, pairs, winner, grad, self.budget)
        self.add_weight_gradient(found)

    def weight_gradient(self) -> Tensor:
        channels, out_channels = self.filters.weights.shape[1], len(self.filters.weights)
        found = self.weight_grads[0].view(-1, channels * out_channels)  # (S pairs, C O)
        found = found.masked_fill(self.places["beyond"], 0)  # what no block has written
        if self.table is not None:
            found = torch.mm(self.table.T, found)
        else:
            found = found[self.places["half"]] / (2 if self.filters.symmetric else 1)
        return found.view(-1, channels, out_channels).permute(2, 1, 0)
