r"""The fast algorithm behind :mod:`scalesteer.functional`: correlation as products in the frequency domain.

Images are small and filters are large, so everything is a matrix product, with the pixel axes first and (batch,
channel) last, and nothing is transposed on the way:

1. The image is transformed once: rows, then columns. Zero padding and the choice of wanted pixels are part of the
   matrices, so that the period only has to be image + reach, not image + window.
2. Every filter is point-symmetric. With its centre as origin the transform of a filter is real, so that each
   frequency is one real product :math:`[re; im] (2B \times C) \cdot (C \times O)`.
3. The result is transformed back to the wanted pixels, and the maximum is taken as scales come.

Frequencies are half-integers, :math:`u = \frac12, \frac32, \dots`: a real image has then no self-conjugate frequency,
so that zero and Nyquist need no special case. (Such a transform extends the image with period N and a change of sign;
only pixels that nobody reads are reached by the extension.) For positive u and both signs of v,

.. math:: a_\pm = \sum x \cos(u h \pm v w), \quad b_\pm = \sum x \sin(u h \pm v w)

are the real numbers kept, in the order (u, sign, v, {a, b}). The backward pass consists of the same products
transposed; it recomputes transforms and keeps only the image, the filters and the winning scale.

Images of one or two channels have so few products a frequency that the transforms back would be all the work; they take
one product a scale with pairs of pixels instead (:class:`Taps`). For the maximum over scales, large images are cut into
overlapping tiles and large batches into pieces, so that memory stays within :data:`memory_budget`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from scalesteer.functional import Geometry


def _arange(count: int) -> Tensor:
    """Matrices are made in float64 on the CPU, whatever the defaults are, and moved once."""
    return torch.arange(count, dtype=torch.float64, device="cpu")


memory_budget = 1 << 28
"""Bytes that one piece of work may take beside its input and output, roughly; set it to trade speed for memory. Where
no gradient is wanted, nothing else is kept, and a piece may take four times as much."""


@dataclass(frozen=True)
class Axis:
    """One axis of a correlation: `count` windows whose centres start at pixel `first` of `length`, `stride` apart."""

    length: int
    first: int
    stride: int
    count: int
    dilation: int
    radius: int

    @property
    def period(self) -> int:
        """The shortest even period at which no wanted window sees the image twice."""
        reach = self.dilation * self.radius
        last = self.first + (self.count - 1) * self.stride
        shortest = max(last + reach + 1, self.length + reach - self.first, self.length)
        return shortest + shortest % 2

    @property
    def pixels(self) -> Tensor:
        return _arange(self.length)

    @property
    def centres(self) -> Tensor:
        return self.first + self.stride * _arange(self.count)

    def angles(self, positions: Tensor) -> Tensor:
        """u times position for the positive half-integer frequencies: `(period / 2, positions)`."""
        u = (_arange(self.period // 2) + 0.5) * (2 * math.pi / self.period)
        return u[:, None] * positions

    def row_matrix(self, positions: Tensor) -> Tensor:
        """Cosine and sine of each row frequency: `(u {c, s}, positions)`."""
        angles = self.angles(positions)
        return torch.stack([angles.cos(), angles.sin()], dim=1).flatten(0, 1)

    def column_matrix(self, positions: Tensor) -> Tensor:
        """From the rows' {c, s} to a and b of both signs: `({+, -} v {a, b}, {c, s} positions)`."""
        angles = self.angles(positions)
        c, s = angles.cos(), angles.sin()
        blocks = ((c, -s), (s, c), (c, s), (-s, c))  # a+, b+, a-, b-
        plus, minus = (torch.stack([torch.cat(b, dim=1) for b in pair], dim=1) for pair in (blocks[:2], blocks[2:]))
        return torch.cat([plus, minus]).flatten(0, 1)


@dataclass(frozen=True)
class Plan:
    """The matrices of a correlation. Shapes: N, M the periods of rows and columns; u = N / 2, v = M / 2."""

    analyse_rows: Tensor  # (N, H)
    analyse_columns: Tensor  # (2M, 2W)
    restore_rows: Tensor  # (H', N)
    restore_columns: Tensor  # (2W', 2M)
    filter_columns: tuple[Tensor, ...]  # (M, n) for each scale
    filter_rows: tuple[Tensor, ...]  # (N, 2 (n // 2 + 1)) for each scale: the middle row and those below it
    window_rows: tuple[Tensor, ...]  # (N, 2n) for each scale: all rows


_plans: dict[tuple[Any, ...], Plan] = {}


def plan_for(rows: Axis, columns: Axis, sizes: tuple[int, ...], like: Tensor) -> Plan:
    """The matrices for these axes in the dtype and on the device of a tensor, kept for the next call."""
    # Tracers and fake tensors get matrices of their own: theirs hold no numbers, and ours would not fit theirs.
    if torch.compiler.is_compiling() or type(like) not in (Tensor, torch.nn.Parameter):
        return _make_plan(rows, columns, sizes, like)
    key = (rows, columns, sizes, like.dtype, like.device)
    plan = _plans.get(key)
    if plan is None:
        with torch.inference_mode(False), torch.no_grad():  # whoever comes next may want gradients
            plan = _make_plan(rows, columns, sizes, like)
        if len(_plans) >= 64:
            _plans.clear()
        _plans[key] = plan
    return plan


def _make_plan(rows: Axis, columns: Axis, sizes: tuple[int, ...], like: Tensor) -> Plan:
    def place(matrix: Tensor) -> Tensor:
        return matrix.to(device=like.device, dtype=like.dtype).contiguous()

    filter_columns, filter_rows, window_rows = [], [], []
    for n in sizes:
        offsets = _arange(n) - n // 2
        angles = columns.angles(columns.dilation * offsets)
        filter_columns.append(place(torch.cat([angles.cos(), angles.sin()])))  # ({c, s} v, n)
        angles = rows.angles(rows.dilation * offsets)
        signs = [torch.stack([angles.cos(), sign * angles.sin()], dim=2) for sign in (-1, 1)]
        window = torch.stack(signs, dim=1).flatten(0, 1)  # (u {+, -}, n, {c, s})
        window_rows.append(place(window.flatten(1)))
        # Half of the rows is enough, the others mirror it; the middle row stands alone.
        weight = 2.0 - (offsets[n // 2 :] == 0).double()
        filter_rows.append(place((window[:, n // 2 :] * weight[:, None]).flatten(1)))
    scale = 2 / (rows.period * columns.period)
    return Plan(
        place(rows.row_matrix(rows.pixels)),
        place(columns.column_matrix(columns.pixels)),
        place(scale * rows.row_matrix(rows.centres).T),
        place(columns.column_matrix(columns.centres).T),
        tuple(filter_columns),
        tuple(filter_rows),
        tuple(window_rows),
    )


def make_axes(
    size: tuple[int, int], margin: tuple[int, int], sizes: tuple[int, ...], geometry: Geometry
) -> tuple[Axis, Axis]:
    """Rows and columns of a correlation with images of `size` that already have a border of `margin` around them."""
    counts = geometry.output_size(size[0] - 2 * margin[0], size[1] - 2 * margin[1])
    rows, columns = (
        Axis(
            length=size[axis],
            first=geometry.dilation[axis] * (geometry.kernel_size // 2) - geometry.padding[axis] + margin[axis],
            stride=geometry.stride[axis],
            count=counts[axis],
            dilation=geometry.dilation[axis],
            radius=max(sizes) // 2,
        )
        for axis in (0, 1)
    )
    return rows, columns


class Space:
    """Memory for intermediate results, used again for the next scale and the next piece of a batch.

    What a large tensor costs is less its numbers than its pages, which the system hands out anew, one fault each.
    Without `reuse` every result gets memory of its own, as operations that autograd follows need.
    """

    def __init__(self, like: Tensor, reuse: bool) -> None:
        self.like, self.reuse = like, reuse
        self.held: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor | None:
        """A tensor for the argument `out` of an operation, or None."""
        if not self.reuse:
            return None
        numbers = math.prod(shape)
        if name not in self.held or self.held[name].numel() < numbers:
            self.held[name] = self.like.new_empty(numbers)
        return self.held[name][:numbers].view(shape)


def _no_space(name: str, *shape: int) -> None:
    """Every result gets memory of its own."""


def transform(
    x: Tensor,
    row_matrix: Tensor,
    column_matrix: Tensor,
    space: Callable[..., Tensor | None] = _no_space,
    name: str = "spectrum",
) -> Tensor:
    """Pixels to frequencies: `(H, W, R)` -> `(u, K, R)`, with matrices `(2u, H)` and `(K, 2W)`."""
    u, width, rest = row_matrix.shape[0] // 2, column_matrix.shape[1], x.shape[2]
    along_rows = torch.mm(row_matrix, x.flatten(1), out=space("rows", 2 * u, x.shape[1] * rest))  # (u {c, s}, W R)
    del x  # if nobody else holds it, its memory is free for the result
    along_rows = _view(along_rows, u, width, rest)
    return _each(column_matrix, along_rows, space(name, u, column_matrix.shape[0], rest))


def restore(
    spectrum: Tensor,
    row_matrix: Tensor,
    column_matrix: Tensor,
    space: Callable[..., Tensor | None] = _no_space,
    name: str = "response",
) -> Tensor:
    """Frequencies to pixels: `(u, K, R)` -> `(H, W, R)`, with matrices `(H, 2u)` and `(2W, K)`."""
    (u, _, rest), width = spectrum.shape, column_matrix.shape[0] // 2
    along_rows = _each(column_matrix, spectrum, space("rows", u, 2 * width, rest))
    del spectrum
    along_rows = _view(along_rows, row_matrix.shape[1], width * rest)  # (u {c, s}, W R)
    pixels = torch.mm(row_matrix, along_rows, out=space(name, row_matrix.shape[0], width * rest))
    return _view(pixels, row_matrix.shape[0], width, rest)


def _view(x: Tensor, *shape: int) -> Tensor:
    """Another shape, by way of one long axis: a direct view makes torch.export constrain the batch size."""
    return x.flatten().reshape(shape)


def _each(matrix: Tensor, batch: Tensor, out: Tensor | None = None) -> Tensor:
    """One matrix times each of a batch; `matmul` would fold the batch into columns and transpose it on the way."""
    return torch.bmm(matrix.expand(batch.shape[0], *matrix.shape), batch, out=out)


class Steered(NamedTuple):
    """Filters as a product: coefficients `(O, C, D)` times a fixed basis `(D, T)`; T is the sum of sizes squared."""

    coefficients: Tensor
    basis: Tensor
    sizes: tuple[int, ...]


Bank = Sequence[Tensor] | Steered


def first(filters: Bank) -> Tensor:
    """A tensor that begins with the axes `(O, C / G)`."""
    return filters.coefficients if isinstance(filters, Steered) else filters[0]


def window_sizes(filters: Bank) -> tuple[int, ...]:
    """The window size of each scale."""
    return filters.sizes if isinstance(filters, Steered) else tuple(w.shape[-1] for w in filters)


_tables: Any = WeakTensorKeyDictionary()


def _table(basis: Tensor, sizes: tuple[int, ...], axes: tuple[Axis, Axis], like: Tensor) -> tuple[Tensor, ...]:
    """Transforms `(f, D)` of a basis at each scale: made once, forgotten with the basis or when that is changed."""
    if type(like) not in (Tensor, torch.nn.Parameter):  # it holds no numbers: see plan_for
        return _make_table(basis, sizes, axes, like)
    known = _tables.setdefault(basis, {})
    key = (sizes, axes, like.dtype, like.device, 0 if basis.is_inference() else basis._version)
    if key not in known:
        with torch.inference_mode(False), torch.no_grad():
            if len(known) >= 8:
                known.clear()
            known[key] = _make_table(basis, sizes, axes, like)
    return known[key]  # type: ignore[no-any-return]


def _make_table(basis: Tensor, sizes: tuple[int, ...], axes: tuple[Axis, Axis], like: Tensor) -> tuple[Tensor, ...]:
    parts = basis.clone().double().split([n * n for n in sizes], dim=1)  # a clone can be used outside inference mode
    plan = _make_plan(*axes, sizes, parts[0])
    spectra = (
        filter_transform(p.unflatten(1, (n, n)), plan, i) for i, (p, n) in enumerate(zip(parts, sizes, strict=True))
    )
    return tuple(t.view(-1, len(basis)).to(device=like.device, dtype=like.dtype) for t in spectra)


def filter_transform(
    filters: Tensor, plan: Plan, i: int, space: Callable[..., Tensor | None] = _no_space, name: str = "transfer"
) -> Tensor:
    """Point-symmetric filters of scale i to frequencies: `(R, n, n)` -> `(u {+, -}, v R)`."""
    half = filters[:, filters.shape[1] // 2 :].permute(1, 2, 0)  # (n/2, n, R), not moved in memory
    row_matrix, column_matrix = plan.filter_rows[i], plan.filter_columns[i]
    period, rest = column_matrix.shape[0], half.shape[2]
    along_columns = _each(column_matrix, half, space("filter", half.shape[0], period, rest))
    along_columns = _view(along_columns, row_matrix.shape[1], period // 2 * rest)  # (n/2 {c, s}, v R)
    return torch.mm(row_matrix, along_columns, out=space(name, row_matrix.shape[0], along_columns.shape[1]))


class Frequencies:
    """Responses as products of spectra. Its maps are `(H', W', B O)`: pixels first.

    If so many `pieces` of a batch are to be shown one after the other, nothing is kept for autograd, and what
    `response` returned is overwritten by the next call.
    """

    def __init__(self, x: Tensor, margin: tuple[int, int], filters: Bank, geometry: Geometry, pieces: int = 0) -> None:
        self.filters, self.groups = filters, geometry.groups
        self.out_channels, self.per_group = first(filters).shape[:2]
        sizes = window_sizes(filters)
        axes = make_axes((x.shape[-2], x.shape[-1]), margin, sizes, geometry)
        self.plan = plan_for(*axes, sizes, x)
        self.counts = (axes[0].count, axes[1].count)
        self.space = Space(x, pieces > 0)
        self.kept: dict[int, Tensor] = {}
        self.filter_grads: dict[int, Tensor] = {}
        # Transfers of all scales, and their gradients, serve every piece, unless there are too many numbers.
        numbers = len(sizes) * self.out_channels * self.per_group * axes[0].period * axes[1].period // 2
        self.tables = _table(filters.basis, sizes, axes, x) if isinstance(filters, Steered) else None
        self.keeps = pieces > 1 and x.element_size() * numbers <= memory_budget // 2
        self.show(x)

    @staticmethod
    def numbers(rows: Axis, columns: Axis, channels: int, filters: Bank) -> int:
        """Numbers that one image takes at work."""
        out_channels = first(filters).shape[0]
        spectrum = rows.period * columns.period * (2 * channels + out_channels)
        return spectrum + (rows.period * columns.count + 3 * rows.count * columns.count) * out_channels

    def show(self, x: Tensor) -> None:
        """Take another piece of the batch."""
        self.batch, self.channels = x.shape[:2]
        spectrum = transform(self.inwards(x), self.plan.analyse_rows, self.plan.analyse_columns, self.space, "spectrum")
        self.spectrum = self._by_frequency(spectrum, self.channels)
        self.grad_spectrum: Tensor | None = None

    def inwards(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` -> `(H, W, B C)`."""
        batch, channels, height, width = x.shape
        held = self.space("inwards", height, width, batch, channels) if x.dtype == self.space.like.dtype else None
        pixels = x.permute(2, 3, 0, 1)
        return (pixels if held is None else held.copy_(pixels)).reshape(height, width, batch * channels)

    def outwards(self, maps: Tensor, channels: int | None = None) -> Tensor:
        """`(H, W, B C)` -> `(B, C, H, W)`, by default with the channels of the output; a view."""
        channels = self.out_channels if channels is None else channels
        return _view(maps, maps.shape[0], maps.shape[1], self.batch, channels).permute(2, 3, 0, 1)

    def response(self, i: int) -> Tensor:
        """The response of scale i."""
        transfer = self._transfer(i)
        room = self.space("product", *self.spectrum.shape[:2], transfer.shape[1])
        product = torch.bmm(self.spectrum, transfer.mT, out=room)  # (f G, 2B, O / G)
        product = self._by_row(product, self.out_channels)
        name = "best" if i == 0 else "response"
        return restore(product, self.plan.restore_rows, self.plan.restore_columns, self.space, name)

    def pull_back(self, i: int, grad: Tensor, need_x: bool, need_filter: bool) -> None:
        """Add what arrives at the response of scale i to the gradients of the image and of the filter."""
        grad_product = transform(grad, self.plan.restore_rows.T, self.plan.restore_columns.T, self.space, "product")
        grad_product = self._by_frequency(grad_product, self.out_channels)
        if need_x:
            transfer = self._transfer(i)
            if self.grad_spectrum is None:
                room = self.space("grad_spectrum", *self.spectrum.shape)
                self.grad_spectrum = torch.bmm(grad_product, transfer, out=room)
            else:
                self.grad_spectrum.baddbmm_(grad_product, transfer)
        if not need_filter:
            return
        if self.keeps and i in self.filter_grads:
            self.filter_grads[i].baddbmm_(grad_product.mT, self.spectrum)
            return
        room = (
            None
            if self.keeps
            else self.space("transfer", len(grad_product), grad_product.shape[2], self.spectrum.shape[2])
        )
        found = torch.bmm(grad_product.mT, self.spectrum, out=room)  # (f G, O / G, C / G)
        if not self.keeps:
            found = self._to_taps(i, found)
        self.filter_grads[i] = self.filter_grads[i] + found if i in self.filter_grads else found

    def filter_gradient(self, i: int) -> Tensor | None:
        """The sum, over pieces, of what `pull_back` added for the filter of scale i, or for coefficients."""
        grad = self.filter_grads.pop(i, None)
        return self._to_taps(i, grad) if self.keeps and grad is not None else grad

    def image_gradient(self) -> Tensor | None:
        """The sum of what `pull_back` added since the piece was shown."""
        if self.grad_spectrum is None:
            return None
        spectrum = self._by_row(self.grad_spectrum, self.channels)
        matrices = self.plan.analyse_rows.T, self.plan.analyse_columns.T
        return self.outwards(restore(spectrum, *matrices, self.space, "response"), self.channels)

    def _transfer(self, i: int) -> Tensor:
        """Filters to frequencies: `(f G, O / G, C / G)`."""
        if i in self.kept:
            return self.kept[i]
        name = "kept" if self.keeps else "transfer"
        if isinstance(self.filters, Steered) and self.tables is not None:
            coefficients = self.filters.coefficients.flatten(0, 1).T  # (D, O C/G)
            room = self.space(name, len(self.tables[i]), coefficients.shape[1])
            spectrum = torch.mm(self.tables[i], coefficients, out=room)
        else:
            weight: Tensor = self.filters[i]  # type: ignore[assignment]
            spectrum = filter_transform(weight.flatten(0, 1), self.plan, i, self.space, name)
        transfer = _view(spectrum, -1, self.out_channels // self.groups, self.per_group)
        if self.keeps:
            self.kept[i] = transfer
            del self.space.held[name]  # the next one needs memory of its own
        return transfer

    def _to_taps(self, i: int, grad: Tensor) -> Tensor:
        """The adjoint of `_transfer`: `(f G, O / G, C / G)` to `(O, C / G, n, n)` or `(O, C / G, D)`."""
        out_channels, per_group = self.out_channels, self.per_group
        if self.tables is not None:
            found = _view(grad, -1, out_channels * per_group).T @ self.tables[i]
            return found.view(out_channels, per_group, -1)
        n = window_sizes(self.filters)[i]
        row_matrix, column_matrix = self.plan.window_rows[i].T, self.plan.filter_columns[i]
        grad = _view(grad, row_matrix.shape[1], column_matrix.shape[0] // 2 * out_channels * per_group)
        room = self.space("filter", row_matrix.shape[0], grad.shape[1])
        along_columns = torch.mm(row_matrix, grad, out=room)  # (n {c, s}, v O C/G)
        along_columns = along_columns.view(n, column_matrix.shape[0], out_channels * per_group)
        taps = grad.new_empty(out_channels, per_group, n, n)
        rows = taps.flatten(0, 1).transpose(0, 1)  # (n, O C/G, n)
        torch.bmm(along_columns.mT, column_matrix.expand(n, *column_matrix.shape), out=rows)
        return taps

    def _by_frequency(self, spectrum: Tensor, channels: int) -> Tensor:
        """`(u, {+, -} v {a, b}, B C)` -> `(f G, 2B, C / G)`."""
        frequencies = spectrum.shape[0] * spectrum.shape[1] // 2
        if self.groups == 1:
            return _view(spectrum, frequencies, 2 * self.batch, channels)
        spectrum = _view(spectrum, frequencies, 2 * self.batch, self.groups, channels // self.groups)
        return spectrum.transpose(1, 2).flatten(0, 1)

    def _by_row(self, product: Tensor, channels: int) -> Tensor:
        """The inverse of `_by_frequency`."""
        if self.groups > 1:
            product = product.unflatten(0, (-1, self.groups)).transpose(1, 2)
        rows, columns = self.plan.restore_rows.shape[1] // 2, self.plan.restore_columns.shape[1]
        return _view(product, rows, columns, self.batch * channels)


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
        self.filters = _multiply(filters) if isinstance(filters, Steered) else filters
        sizes = window_sizes(filters)
        self.axes = make_axes((x.shape[-2], x.shape[-1]), margin, sizes, geometry)
        self.counts = (self.axes[0].count, self.axes[1].count)
        self.offsets = half_window(max(sizes))
        reach = [a.dilation * a.radius for a in self.axes]
        last = [a.first + (a.count - 1) * a.stride for a in self.axes]
        self.before = [max(0, r - a.first) for a, r in zip(self.axes, reach, strict=True)]
        after = [max(0, end + r + 1 - a.length) for a, r, end in zip(self.axes, reach, last, strict=True)]
        self.padding = (self.before[1], after[1], self.before[0], after[0])
        self._padded_axes = [(a.length, b, c) for a, b, c in zip(self.axes, self.before, after, strict=True)]
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
        padded = self.space("padded", batch, channels, *(n + a + b for n, a, b in self._padded_axes))
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
            top, left = self.before
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
        for axis, before, offset in zip(self.axes, self.before, (dy, dx), strict=True):
            start = before + axis.first + axis.dilation * offset
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
        return _each(matrix, self.pairs[:, : matrix.shape[1]], room)

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


Correlator = Frequencies | Taps


def plain_only() -> bool:
    """Whether a transformation is at work that sees plain operations only: a compiler, a tracer, or `torch.func`."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _kind(filters: Bank, geometry: Geometry) -> type[Correlator]:
    # Pairs are made of hundreds of slices: a compiler would unroll them, a GPU would launch each.
    like = first(filters)
    few = like.shape[1] <= 2 and geometry.groups == 1 and like.device.type == "cpu"
    return Taps if few and not plain_only() else Frequencies


def steerable(filters: Steered, geometry: Geometry) -> bool:
    """Whether :func:`max_response` is faster with coefficients than with the filters that are made of them."""
    numbers = len(filters.sizes) * len(filters.basis)
    return (
        _kind(filters, geometry) is Frequencies
        and not filters.basis.requires_grad
        and filters.coefficients.device.type == "cpu"
        and type(filters.basis) is Tensor
        and numbers <= sum(n * n for n in filters.sizes)
    )


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Half precision is for products of convolutions, not for what happens inside."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _setting(x: Tensor, filters: Sequence[Any]) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the result, as that of a convolution would be, and the dtype of the work."""
    dtype = torch.promote_types(x.dtype, filters[0].dtype)
    if dtype != torch.float64 and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return dtype, torch.promote_types(dtype, torch.float32)


def responses(x: Tensor, margin: tuple[int, int], filters: Sequence[Tensor], geometry: Geometry) -> Iterator[Tensor]:
    """Responses of one scale after the other, equal to those of the direct convolution; plain operations.

    Args:
        x: Images with a border of `margin` already around them.
        margin: Rows above and below, columns left and right.
        filters: The filter at each scale, point-symmetric.
        geometry: Stride, padding, dilation and groups.

    Yields:
        Responses `(B, O, H', W')`, one a scale.
    """
    dtype, work = _setting(x, filters)
    with no_autocast(x.device):
        correlator = _kind(filters, geometry)(x.to(work), margin, [w.to(work) for w in filters], geometry)
        for i in range(len(filters)):
            yield correlator.outwards(correlator.response(i)).to(dtype).contiguous()


def fusible(x: Tensor, geometry: Geometry) -> bool:
    """Whether :func:`max_response` has a form with kernels of its own: on CUDA in float32, if Triton is installed."""
    # A kernel needs memory to read: a fake tensor has none, and neither has an empty batch.
    real = type(x) in (Tensor, torch.nn.Parameter) and x.numel() > 0
    here = x.device.type in _FUSED_ON and _has_triton()
    return here and real and x.dtype != torch.float64 and geometry.groups == 1


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


_LARGEST_GRID = 65535  # of programs along one axis, in CUDA: images of a piece
_FUSED_ON = {"cuda"}  # tests add the CPU, where Triton interprets the kernels


def max_response(
    x: Tensor,
    margin: tuple[int, int],
    filters: Bank,
    geometry: Geometry,
    winners: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The largest response over scales and the index of the winner (uint8), with a backward pass of the same kind.

    Args are those of :func:`responses`, or :class:`Steered` filters where :func:`fusible` or :func:`steerable` says
    so; both results are `(B, O, H', W')`. Without `winners` the second may be None.
    """
    dtype, work = _setting(x, filters)
    sizes = window_sizes(filters)
    whole = make_axes((x.shape[-2], x.shape[-1]), margin, sizes, geometry)
    tile = _tile(whole[0]), _tile(whole[1])
    tiled = any(axis.count > 2.5 * size for axis, size in zip(whole, tile, strict=True))
    images = x
    if tiled:
        images, margin, geometry = _cut(x, whole, tile, geometry)
    best: Tensor
    winner: Tensor | None
    with no_autocast(x.device):
        images = images.to(work)
        if fusible(x, geometry):
            best, winner = _fused_max_response(images, margin, filters, geometry, sizes)
        else:
            bank: Bank
            if isinstance(filters, Steered):
                bank = filters._replace(coefficients=filters.coefficients.to(work))
            else:
                bank = [w.to(work) for w in filters]
            tensors: Sequence[Tensor] = bank[:2] if isinstance(bank, Steered) else bank
            if winners or (torch.is_grad_enabled() and any(t.requires_grad for t in (images, *tensors))):
                steered = sizes if isinstance(bank, Steered) else None
                best, winner = _MaxResponse.apply(images, margin, geometry, steered, *tensors)  # type: ignore[no-untyped-call]
            else:
                best, winner = _largest(images, margin, bank, geometry, winners=False)
    if tiled:
        best, winner = _join(best, x.shape[0], whole), None if winner is None else _join(winner, x.shape[0], whole)
    return best.to(dtype), winner


def _step(images: int, most: int) -> int:
    """Images of a piece, `most` at most, so that all pieces are of about one size."""
    return max(1, -(-images // max(1, -(-images // max(1, most)))))


def _fused_max_response(
    images: Tensor,
    margin: tuple[int, int],
    filters: Bank,
    geometry: Geometry,
    sizes: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    rows, columns = make_axes((images.shape[-2], images.shape[-1]), margin, sizes, geometry)
    numbers = rows.count * columns.count * filters[0].shape[0]
    if images.shape[1] > 2:
        numbers = 2 * rows.period * columns.period * len(sizes) * filters[0].shape[0]
    bank: tuple[Any, ...]
    if isinstance(filters, Steered):
        bank = (filters.coefficients.to(images.dtype), filters.basis, sizes)
    else:
        bank = (torch.cat([w.flatten(2) for w in filters], dim=2).to(images.dtype), None, sizes)
    budget = memory_budget * (1 if torch.is_grad_enabled() else 4)
    step = _step(len(images), min(_LARGEST_GRID, budget // (images.element_size() * numbers)))
    results = [_FusedMaxResponse.apply(piece, *bank, margin, geometry) for piece in images.split(step)]  # type: ignore[no-untyped-call]
    best, winner = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*results, strict=True))
    return best, winner


def _tile(axis: Axis) -> int:
    """Outputs of a tile: a product costs least where tiles are about four times the reach, and the optimum is flat."""
    return max(32, 4 * axis.dilation * axis.radius)


def _cut(
    x: Tensor, axes: tuple[Axis, Axis], tile: tuple[int, int], geometry: Geometry
) -> tuple[Tensor, tuple[int, int], Geometry]:
    """Overlapping tiles `(B ny nx, C, h, w)`, with the margin and geometry under which each gives its own outputs."""
    padding, spans, margin = [], [], []
    for axis, size in zip(axes, tile, strict=True):
        reach = axis.dilation * axis.radius
        before = reach - axis.first
        needed = (-(-axis.count // size) * size - 1) * axis.stride + 1 + 2 * reach
        padding.append((before, needed - before - axis.length))
        spans.append((size - 1) * axis.stride + 1 + 2 * reach)
        margin.append(reach - axis.dilation * (geometry.kernel_size // 2))
    padded = F.pad(x, (*padding[1], *padding[0]))
    tiles = padded.unfold(2, spans[0], tile[0] * axes[0].stride).unfold(3, spans[1], tile[1] * axes[1].stride)
    tiles = tiles.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)  # from (B, C, ny, nx, h, w)
    return tiles, (margin[0], margin[1]), replace(geometry, padding=(0, 0), padding_mode="zeros")


def _join(maps: Tensor, batch: int, axes: tuple[Axis, Axis]) -> Tensor:
    """Outputs of tiles `(B ny nx, O, h, w)` side by side: `(B, O, H', W')`."""
    channels, height, width = maps.shape[1:]
    ny, nx = -(-axes[0].count // height), -(-axes[1].count // width)
    joined = maps.view(batch, ny, nx, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    joined = joined.reshape(batch, channels, ny * height, nx * width)
    return joined[..., : axes[0].count, : axes[1].count].contiguous()


_PIECE = 48 << 20
"""Bytes of one piece of work on a CPU: more is slower, since new pages and misses of the cache cost more than calls."""


def _pieces(
    x: Tensor, margin: tuple[int, int], filters: Bank, geometry: Geometry
) -> Iterator[tuple[slice, Correlator]]:
    """Pieces of a batch that are small enough for memory, and for the cache, with what correlates them."""
    kind = _kind(filters, geometry)
    axes = make_axes((x.shape[-2], x.shape[-1]), margin, window_sizes(filters), geometry)
    most = min(_PIECE, memory_budget) if x.device.type == "cpu" else memory_budget
    step = _step(len(x), most // (x.element_size() * kind.numbers(*axes, x.shape[1], filters)))
    pieces = max(1, -(-len(x) // step))
    correlator: Correlator | None = None
    for start in range(0, pieces * step, step):
        piece = slice(start, start + step)
        if correlator is None:
            correlator = kind(x[piece], margin, filters, geometry, pieces)
        else:
            correlator.show(x[piece])
        yield piece, correlator


def _largest(
    x: Tensor, margin: tuple[int, int], filters: Bank, geometry: Geometry, winners: bool
) -> tuple[Tensor, Tensor | None]:
    """The largest response over scales and, if wanted, the index of the winner; on a tie the lowest scale wins."""
    count, out_channels = len(window_sizes(filters)), first(filters).shape[0]
    axes = make_axes((x.shape[-2], x.shape[-1]), margin, window_sizes(filters), geometry)
    best = x.new_empty(x.shape[0], out_channels, axes[0].count, axes[1].count)
    winner = torch.empty_like(best, dtype=torch.uint8) if winners else None
    for piece, correlator in _pieces(x, margin, filters, geometry):
        top = correlator.response(0)
        index = torch.zeros_like(top, dtype=torch.uint8)
        wins = torch.empty_like(top, dtype=torch.bool)
        for i in range(1, count):
            response = correlator.response(i)
            if winners:  # a later winner has the larger index: the maximum of indices
                torch.gt(response, top, out=wins)
                torch.maximum(index, wins.view(torch.uint8).mul_(i), out=index)
            torch.maximum(top, response, out=top)
            if i == count - 1:  # a non-finite response always shows: see functional.max_over_scales
                top += response.sub_(response)
        best[piece] = correlator.outwards(top)
        if winner is not None:
            winner[piece] = correlator.outwards(index)
    return best, winner


class _MaxResponse(torch.autograd.Function):
    """The maximum over scales; saves the image, the filters and the winner only.

    With `sizes`, coefficients and a basis take the place of filters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        margin: tuple[int, int],
        geometry: Geometry,
        sizes: tuple[int, ...] | None,
        *filters: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        bank = Steered(filters[0], filters[1], sizes) if sizes else filters
        best, winner = _largest(x, margin, bank, geometry, winners=True)
        ctx.save_for_backward(x, winner, *filters)
        ctx.margin, ctx.geometry, ctx.sizes = margin, geometry, sizes
        ctx.mark_non_differentiable(winner)
        return best, winner

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, winner, *filters = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])
        bank: Bank = Steered(filters[0], filters[1], ctx.sizes) if ctx.sizes else filters
        with no_autocast(x.device):
            if torch.is_grad_enabled() or plain_only():

                def make(*filters: Tensor) -> Sequence[Tensor]:
                    return _multiply(Steered(filters[0], filters[1], ctx.sizes)) if ctx.sizes else filters

                first, *rest = _plain_gradients((x, *filters), make, winner, ctx.margin, ctx.geometry, needs, grads[0])
                return first, None, None, None, *rest
            grad_x = torch.empty_like(x) if needs[0] else None
            scales = range(len(window_sizes(bank)))
            for piece, correlator in _pieces(x, ctx.margin, bank, ctx.geometry):
                incoming = correlator.inwards(grads[0][piece].to(x.dtype))
                index = correlator.inwards(winner[piece])
                wins, routed = torch.empty_like(index), torch.empty_like(incoming)
                for i in scales:
                    torch.eq(index, i, out=wins)
                    need_filter = needs[1] if ctx.sizes else needs[i + 1]
                    correlator.pull_back(i, routed.copy_(wins).mul_(incoming), needs[0], need_filter)
                grad_piece = correlator.image_gradient()
                if grad_x is not None and grad_piece is not None:
                    grad_x[piece] = grad_piece
            found = [correlator.filter_gradient(i) for i in scales]
            if ctx.sizes:  # all scales have the coefficients in common, and the basis is fixed
                found = [torch.stack([g for g in found if g is not None]).sum(0) if needs[1] else None, None]
            return grad_x, None, None, None, *found


class _FusedMaxResponse(torch.autograd.Function):
    """The same on CUDA, with :mod:`scalesteer.kernels`; saves the image's transform too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        basis: Tensor | None,
        sizes: tuple[int, ...],
        margin: tuple[int, int],
        geometry: Geometry,
    ) -> tuple[Tensor, Tensor]:
        from scalesteer import kernels

        ctx.about = sizes, margin, geometry
        with torch.cuda.device_of(x):  # Triton launches on the current device
            fused = kernels.fused(x, ctx.needs_input_grad[0], weights, basis, *ctx.about)
            found = fused.read(x)
            best, winner = fused.maximum(found)
        ctx.save_for_backward(x, winner, found, weights, basis)
        ctx.mark_non_differentiable(winner)
        return best, winner

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from scalesteer import kernels

        x, winner, found, weights, basis = ctx.saved_tensors
        sizes, margin, geometry = ctx.about
        needs = ctx.needs_input_grad[:2]

        def make(weights: Tensor) -> list[Tensor]:
            return _multiply(Steered(weights, basis, sizes))

        with no_autocast(x.device):
            if torch.is_grad_enabled() or plain_only():
                found = _plain_gradients((x, weights), make, winner, margin, geometry, needs, grads[0])
                return *found, None, None, None, None
            fused = kernels.fused(x, ctx.needs_input_grad[0], weights, basis, *ctx.about)
            return *fused.gradients(found, winner, grads[0].to(x.dtype), *needs), None, None, None, None


def _multiply(filters: Steered) -> list[Tensor]:
    """Steered filters, or the taps of all scales side by side, to one tensor a scale."""
    taps = filters.coefficients if filters.basis is None else filters.coefficients @ filters.basis
    parts = taps.split([n * n for n in filters.sizes], dim=2)
    return [part.unflatten(2, (n, n)) for part, n in zip(parts, filters.sizes, strict=True)]


def _plain_gradients(
    inputs: Sequence[Tensor],
    make: Callable[..., Sequence[Tensor]],
    winner: Tensor,
    margin: tuple[int, int],
    geometry: Geometry,
    needs: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """Gradients that can be differentiated again: through plain operations, the winners given.

    Args:
        inputs: The image, and what filters are made of.
        make: Makes filters of the other inputs.
        winner: The winning scale at each pixel.
        margin: The border that is already around the image.
        geometry: Stride, padding, dilation and groups.
        needs: Which gradients are wanted.
        grad: The gradient of the maximum.
    """
    with torch.enable_grad():
        # Aliases, so that nothing is followed from the image back to filters that it may depend on.
        image, *weights = aliases = [t.view_as(t) for t in inputs]
        best = torch.zeros((), dtype=image.dtype, device=image.device)
        for i, response in enumerate(responses(image, margin, make(*weights), geometry)):
            best = best + response * (winner == i)
        wanted = [t for t, need in zip(aliases, needs, strict=True) if need]
        found = iter(torch.autograd.grad(best, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs]


# Multiply-adds that a direct convolution does in the time of one of ours; few channels a group slow it down. Set so
# that the faster backend is chosen in training, batch 16, float32, two CPU cores, for nine shapes: 1 to 64 channels,
# windows of 3 to 17, images of 14 to 96 pixels, and 32 groups of one channel.
_RELATIVE_COST, _RELATIVE_COST_IN_GROUPS = 4.0, 0.25


def choose_backend(
    image_size: tuple[int, int], sizes: Sequence[int], in_channels: int, geometry: Geometry, tiles: bool = True
) -> str:
    """The backend that the measured cost favours for static shapes; the batch size does not enter.

    Args:
        image_size: Height and width of the image.
        sizes: The window size of each scale.
        in_channels: Input channels of a group.
        geometry: Stride, padding, dilation and groups.
        tiles: Whether a large image may be cut into tiles, as it is for the maximum over scales.
    """
    if in_channels <= 2 and geometry.groups == 1:
        return "spectral" if max(sizes) > 3 else "direct"
    rows, columns = make_axes(image_size, (0, 0), tuple(sizes), geometry)
    if tiles and any(axis.count > 2.5 * _tile(axis) for axis in (rows, columns)):
        tile = geometry.kernel_size - 1 + _tile(rows), geometry.kernel_size - 1 + _tile(columns)
        rows, columns = make_axes(tile, (0, 0), tuple(sizes), replace(geometry, padding=(0, 0)))
    pixels = rows.count * columns.count
    spectrum = rows.period * columns.period
    direct = pixels * in_channels * sum(n * n for n in sizes)
    fast = len(sizes) * (2 * spectrum * columns.count + rows.period * pixels + spectrum * in_channels)
    cost = _RELATIVE_COST_IN_GROUPS if geometry.groups > 1 and in_channels < 8 else _RELATIVE_COST
    return "spectral" if direct > cost * fast else "direct"
