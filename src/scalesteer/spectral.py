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

are the real numbers kept, in the order (u, v, sign, {a, b}). The backward pass consists of the same products
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
        """From the rows' {c, s} to a and b of both signs: `(v {+, -} {a, b}, {c, s} positions)`."""
        angles = self.angles(positions)
        c, s = angles.cos(), angles.sin()
        blocks = ((c, -s), (s, c), (c, s), (-s, c))  # a+, b+, a-, b-
        return torch.stack([torch.cat(block, dim=1) for block in blocks], dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Plan:
    """The matrices of a correlation. Shapes: N, M the periods of rows and columns; u = N / 2, v = M / 2."""

    analyse_rows: Tensor  # (N, H)
    analyse_columns: Tensor  # (2M, 2W)
    restore_rows: Tensor  # (H', N)
    restore_columns: Tensor  # (2W', 2M)
    filter_rows: tuple[Tensor, ...]  # (N, n // 2 + 1) for each scale
    filter_columns: tuple[Tensor, ...]  # (M, 2n) for each scale


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

    filter_rows, filter_columns = [], []
    for n in sizes:
        # Half of the rows is enough, the others mirror it; the middle row stands alone.
        offsets = _arange(n // 2 + 1)
        weight = 2.0 - (offsets == 0).double()
        filter_rows.append(place(rows.row_matrix(rows.dilation * offsets) * weight))
        angles = columns.angles(columns.dilation * (_arange(n) - n // 2))
        both = [torch.cat([angles.cos(), sign * angles.sin()], dim=1) for sign in (-1, 1)]
        filter_columns.append(place(torch.stack(both, dim=1).flatten(0, 1)))
    scale = 2 / (rows.period * columns.period)
    return Plan(
        place(rows.row_matrix(rows.pixels)),
        place(columns.column_matrix(columns.pixels)),
        place(scale * rows.row_matrix(rows.centres).T),
        place(columns.column_matrix(columns.centres).T),
        tuple(filter_rows),
        tuple(filter_columns),
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


def transform(x: Tensor, row_matrix: Tensor, column_matrix: Tensor) -> Tensor:
    """Pixels to frequencies: `(H, W, R)` -> `(u, K, R)`, with matrices `(2u, H)` and `(K, 2W)`."""
    rest = x.shape[2]
    along_rows = row_matrix @ x.flatten(1)  # (u {c, s}, W R)
    del x  # if nobody else holds it, its memory is free for the result
    along_rows = _view(along_rows, row_matrix.shape[0] // 2, column_matrix.shape[1], rest)
    return _each(column_matrix, along_rows)


def restore(spectrum: Tensor, row_matrix: Tensor, column_matrix: Tensor) -> Tensor:
    """Frequencies to pixels: `(u, K, R)` -> `(H, W, R)`, with matrices `(H, 2u)` and `(2W, K)`."""
    width, rest = column_matrix.shape[0] // 2, spectrum.shape[2]
    along_rows = _view(_each(column_matrix, spectrum), row_matrix.shape[1], width * rest)  # (u {c, s}, W R)
    del spectrum
    return _view(row_matrix @ along_rows, row_matrix.shape[0], width, rest)


def _view(x: Tensor, *shape: int) -> Tensor:
    """Another shape, by way of one long axis: a direct view makes torch.export constrain the batch size."""
    return x.flatten().reshape(shape)


def _each(matrix: Tensor, batch: Tensor) -> Tensor:
    """One matrix times each of a batch; `matmul` would fold the batch into columns and transpose it on the way."""
    return torch.bmm(matrix.expand(batch.shape[0], *matrix.shape), batch)


class Frequencies:
    """Responses as products of spectra. Its maps are `(H', W', B O)`: pixels first."""

    def __init__(self, x: Tensor, margin: tuple[int, int], filters: Sequence[Tensor], geometry: Geometry) -> None:
        self.batch, self.channels = x.shape[:2]
        self.filters, self.groups = filters, geometry.groups
        sizes = tuple(w.shape[-1] for w in filters)
        axes = make_axes((x.shape[-2], x.shape[-1]), margin, sizes, geometry)
        self.plan = plan_for(*axes, sizes, x)
        spectrum = transform(self.inwards(x), self.plan.analyse_rows, self.plan.analyse_columns)
        self.spectrum = self._by_frequency(spectrum, self.channels)
        self.grad_spectrum: Tensor | None = None

    def inwards(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` -> `(H, W, B C)`."""
        return x.permute(2, 3, 0, 1).reshape(x.shape[2], x.shape[3], x.shape[0] * x.shape[1])

    def outwards(self, maps: Tensor, channels: int | None = None) -> Tensor:
        """`(H, W, B C)` -> `(B, C, H, W)`, by default with the channels of the output."""
        channels = self.filters[0].shape[0] if channels is None else channels
        maps = _view(maps, maps.shape[0], maps.shape[1], self.batch, channels)
        return maps.permute(2, 3, 0, 1).contiguous()

    def response(self, i: int) -> Tensor:
        """The response of scale i."""
        product = self.spectrum @ self._transfer(i)  # (f, 2B, O), or (f, G, 2B, O / G)
        product = self._by_row(product, self.filters[0].shape[0])
        return restore(product, self.plan.restore_rows, self.plan.restore_columns)

    def pull_back(self, i: int, grad: Tensor, need_x: bool, need_filter: bool) -> Tensor | None:
        """Add to the image's gradient that of scale i, and return the filter's."""
        grad_product = transform(grad, self.plan.restore_rows.T, self.plan.restore_columns.T)
        grad_product = self._by_frequency(grad_product, self.filters[i].shape[0])
        if need_x:
            transfer = self._transfer(i).mT
            if self.grad_spectrum is None:
                self.grad_spectrum = grad_product @ transfer
            elif self.groups == 1:
                self.grad_spectrum.baddbmm_(grad_product, transfer)
            else:
                self.grad_spectrum += grad_product @ transfer
        return self._filter_gradient(i, self.spectrum.mT @ grad_product) if need_filter else None

    def image_gradient(self) -> Tensor | None:
        """The sum of what `pull_back` added."""
        if self.grad_spectrum is None:
            return None
        spectrum = self._by_row(self.grad_spectrum, self.channels)
        pixels = restore(spectrum, self.plan.analyse_rows.T, self.plan.analyse_columns.T)
        return self.outwards(pixels, self.channels)

    def _transfer(self, i: int) -> Tensor:
        """Point-symmetric filters `(O, C / G, n, n)` to frequencies `(f, C, O)`, or `(f, G, C / G, O / G)`."""
        weight = self.filters[i]
        out_channels, per_group, n, _ = weight.shape
        half = weight[:, :, n // 2 :].unflatten(0, (self.groups, -1)).permute(3, 4, 0, 2, 1)  # (n/2, n, G, C/G, O/G)
        half = half.reshape(n // 2 + 1, n, out_channels * per_group)
        spectrum = transform(half, self.plan.filter_rows[i], self.plan.filter_columns[i])
        frequencies = spectrum.shape[0] * spectrum.shape[1]
        if self.groups == 1:
            return spectrum.view(frequencies, per_group, out_channels)
        return spectrum.view(frequencies, self.groups, per_group, out_channels // self.groups)

    def _filter_gradient(self, i: int, grad: Tensor) -> Tensor:
        """The adjoint of `_transfer`: what arrives at the half that was read is shared with its mirror image."""
        weight = self.filters[i]
        out_channels, per_group, n, _ = weight.shape
        row_matrix, column_matrix = self.plan.filter_rows[i].T, self.plan.filter_columns[i].T
        grad = grad.reshape(row_matrix.shape[1] // 2, column_matrix.shape[1], out_channels * per_group)
        half = restore(grad, row_matrix, column_matrix)
        half = half.view(n // 2 + 1, n, self.groups, per_group, out_channels // self.groups).permute(2, 4, 3, 0, 1)
        result = weight.new_zeros(weight.shape)
        result[:, :, n // 2 :] = half.reshape(out_channels, per_group, n // 2 + 1, n)
        return (result + result.flip(-1, -2)) / 2

    def _by_frequency(self, spectrum: Tensor, channels: int) -> Tensor:
        """`(u, v {+, -} {a, b}, B C)` -> `(f, 2B, C)`, or `(f, G, 2B, C / G)`."""
        frequencies = spectrum.shape[0] * spectrum.shape[1] // 2
        if self.groups == 1:
            return _view(spectrum, frequencies, 2 * self.batch, channels)
        spectrum = _view(spectrum, frequencies, 2 * self.batch, self.groups, channels // self.groups)
        return spectrum.transpose(1, 2).contiguous()

    def _by_row(self, product: Tensor, channels: int) -> Tensor:
        """The inverse of `_by_frequency`."""
        if product.ndim == 4:
            product = product.transpose(1, 2)
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
    """

    def __init__(self, x: Tensor, margin: tuple[int, int], filters: Sequence[Tensor], geometry: Geometry) -> None:
        self.filters, self.image_size = filters, x.shape[-2:]
        sizes = tuple(w.shape[-1] for w in filters)
        self.axes = make_axes((x.shape[-2], x.shape[-1]), margin, sizes, geometry)
        self.offsets = half_window(max(sizes))
        reach = [a.dilation * a.radius for a in self.axes]
        last = [a.first + (a.count - 1) * a.stride for a in self.axes]
        self.before = [max(0, r - a.first) for a, r in zip(self.axes, reach, strict=True)]
        after = [max(0, end + r + 1 - a.length) for a, r, end in zip(self.axes, reach, last, strict=True)]
        self.padding = (self.before[1], after[1], self.before[0], after[0])
        padded = F.pad(x, self.padding)
        self.padded_shape = padded.shape
        centre = padded[self._slices(0, 0)]
        parts = [(padded[self._slices(dy, dx)], padded[self._slices(-dy, -dx)]) for dy, dx in self.offsets[1:]]
        if torch.is_grad_enabled():
            pairs = torch.stack([centre, *(a + b for a, b in parts)], dim=1)
        else:  # straight to their places
            pairs = x.new_empty(x.shape[0], len(self.offsets), x.shape[1], *(a.count for a in self.axes))
            pairs[:, 0] = centre
            for k, (a, b) in enumerate(parts, start=1):
                torch.add(a, b, out=pairs[:, k])
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
        return maps.reshape(maps.shape[0], maps.shape[1], self.axes[0].count * self.axes[1].count)

    def outwards(self, maps: Tensor) -> Tensor:
        """`(B, O, H' W')` -> `(B, O, H', W')`."""
        return maps.view(maps.shape[0], maps.shape[1], self.axes[0].count, self.axes[1].count)

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
        matrix = self._matrix(i)
        return _each(matrix, self.pairs[:, : matrix.shape[1]])

    def pull_back(self, i: int, grad: Tensor, need_x: bool, need_filter: bool) -> Tensor | None:
        """Add to the image's gradient that of scale i, and return the filter's."""
        matrix = self._matrix(i)
        if need_x:
            if self.grad_pairs is None:
                self.grad_pairs = torch.zeros_like(self.pairs)
            self.grad_pairs[:, : matrix.shape[1]] += _each(matrix.T, grad)
        if not need_filter:
            return None
        weight = self.filters[i]
        found = torch.bmm(grad, self.pairs[:, : matrix.shape[1]].mT).sum(0)  # (O, T C)
        result = weight.new_zeros(weight.shape)
        rows, columns = self._indices(i)
        result[:, :, rows, columns] = found.view(weight.shape[0], len(rows), weight.shape[1]).transpose(1, 2)
        return (result + result.flip(-1, -2)) / 2

    def image_gradient(self) -> Tensor | None:
        """The sum of what `pull_back` added."""
        if self.grad_pairs is None:
            return None
        batch, channels = self.padded_shape[:2]
        counts = (self.axes[0].count, self.axes[1].count)
        grads = self.grad_pairs.view(batch, len(self.offsets), channels, *counts).unbind(1)
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


def _kind(filters: Sequence[Tensor], geometry: Geometry) -> type[Correlator]:
    # Pairs are made of hundreds of slices: a compiler would unroll them, a GPU would launch each.
    few = filters[0].shape[1] <= 2 and geometry.groups == 1 and filters[0].device.type == "cpu"
    return Taps if few and not plain_only() else Frequencies


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
            yield correlator.outwards(correlator.response(i)).to(dtype)


class Steered(NamedTuple):
    """Filters as a product: coefficients `(O, C, D)` times a fixed basis `(D, T)`; T is the sum of sizes squared."""

    coefficients: Tensor
    basis: Tensor
    sizes: tuple[int, ...]


def fusible(x: Tensor, geometry: Geometry) -> bool:
    """Whether :func:`max_response` has a form with kernels of its own: on CUDA in float32, if Triton is installed."""
    return x.device.type in _FUSED_ON and x.dtype != torch.float64 and geometry.groups == 1 and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


_FUSED_ON = {"cuda"}  # tests add the CPU, where Triton interprets the kernels


def max_response(
    x: Tensor, margin: tuple[int, int], filters: Sequence[Tensor] | Steered, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """The largest response over scales and the index of the winner (uint8), with a backward pass of the same kind.

    Args are those of :func:`responses`, or :class:`Steered` filters where :func:`fusible` says so; both results are
    `(B, O, H', W')`.
    """
    dtype, work = _setting(x, filters)
    sizes = filters.sizes if isinstance(filters, Steered) else tuple(w.shape[-1] for w in filters)
    rows, columns = whole = make_axes((x.shape[-2], x.shape[-1]), margin, sizes, geometry)
    tile = _tile(rows), _tile(columns)
    tiled = any(axis.count > 2.5 * size for axis, size in zip(whole, tile, strict=True))
    images = x
    if tiled:
        images, margin, geometry = _cut(x, whole, tile, geometry)
        rows, columns = make_axes((images.shape[-2], images.shape[-1]), margin, sizes, geometry)
    channels, out_channels = x.shape[1], filters[0].shape[0]
    fused = fusible(x, geometry)
    if fused:
        numbers = rows.count * columns.count * out_channels
        if channels > 2:
            numbers = 2 * rows.period * columns.period * len(sizes) * out_channels
    elif _kind(filters, geometry) is Taps:
        numbers = rows.count * columns.count * (channels * max(sizes) ** 2 + 4 * out_channels)
    else:
        numbers = rows.period * columns.period * (2 * channels + 3 * out_channels)
        numbers += rows.count * columns.count * 4 * out_channels
    budget = memory_budget * (1 if torch.is_grad_enabled() else 4)
    most = max(1, budget // (work.itemsize * numbers))
    step = -(-len(images) // max(1, -(-len(images) // most)))  # pieces of one size
    pieces = images.to(work).split(max(1, step))
    with no_autocast(x.device):
        if isinstance(filters, Steered):
            bank: tuple[Any, ...] = (filters.coefficients.to(work), filters.basis, sizes)
        elif fused:
            bank = (torch.cat([w.flatten(2) for w in filters], dim=2).to(work), None, sizes)
        else:
            bank = ()
        if bank:
            results = [_FusedMaxResponse.apply(piece, *bank, margin, geometry) for piece in pieces]  # type: ignore[no-untyped-call]
        else:
            weights = [w.to(work) for w in filters]
            results = [_MaxResponse.apply(piece, margin, geometry, *weights) for piece in pieces]  # type: ignore[no-untyped-call]
    best, winner = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*results, strict=True))
    if tiled:
        best, winner = (_join(maps, x.shape[0], whole) for maps in (best, winner))
    return best.to(dtype), winner


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


class _MaxResponse(torch.autograd.Function):
    """The maximum over scales; saves the image, the filters and the winner only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, margin: tuple[int, int], geometry: Geometry, *filters: Tensor
    ) -> tuple[Tensor, Tensor]:
        correlator = _kind(filters, geometry)(x, margin, filters, geometry)
        best = correlator.response(0)
        winner = torch.zeros_like(best, dtype=torch.uint8)
        for i in range(1, len(filters)):
            response = correlator.response(i)
            wins = (response > best).view(torch.uint8)  # a later winner has the larger index: the maximum of indices
            torch.maximum(winner, wins.mul_(i), out=winner)
            torch.maximum(best, response, out=best)
            if i == len(filters) - 1:  # a non-finite response always shows: see functional.max_over_scales
                best += response.sub_(response)
        best, winner = correlator.outwards(best), correlator.outwards(winner)
        if best._is_view():  # what follows may work in place, as a ReLU does
            best = best.clone()
        ctx.save_for_backward(x, winner, *filters)
        ctx.margin, ctx.geometry = margin, geometry
        ctx.mark_non_differentiable(winner)
        return best, winner

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, winner, *filters = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        with no_autocast(x.device):
            if torch.is_grad_enabled() or plain_only():
                first, *rest = _plain_gradients(
                    (x, *filters), lambda *f: f, winner, ctx.margin, ctx.geometry, needs, grads[0]
                )
                return first, None, None, *rest
            correlator = _kind(filters, ctx.geometry)(x, ctx.margin, filters, ctx.geometry)
            incoming, winner = correlator.inwards(grads[0].to(x.dtype)), correlator.inwards(winner)
            rest = [
                correlator.pull_back(i, incoming * (winner == i), needs[0], needs[i + 1]) for i in range(len(filters))
            ]
            return correlator.image_gradient(), None, None, *rest


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
            parts = (weights if basis is None else weights @ basis).split([n * n for n in sizes], dim=2)
            return [part.unflatten(2, (n, n)) for part, n in zip(parts, sizes, strict=True)]

        with no_autocast(x.device):
            if torch.is_grad_enabled() or plain_only():
                found = _plain_gradients((x, weights), make, winner, margin, geometry, needs, grads[0])
                return *found, None, None, None, None
            fused = kernels.fused(x, ctx.needs_input_grad[0], weights, basis, *ctx.about)
            return *fused.gradients(found, winner, grads[0].to(x.dtype), *needs), None, None, None, None


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
