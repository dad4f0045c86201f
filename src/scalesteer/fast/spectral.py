r"""Correlation as products in the frequency domain: the core of the fast algorithm (:mod:`scalesteer.fast`).

Images are small and filters are large, so everything is a matrix product, with the pixel axes first and (batch,
channel) last, and nothing is transposed on the way:

1. The image is transformed once: rows, then columns. Zero padding and the choice of wanted pixels are part of the
   matrices, so that the period only has to be image + reach, not image + window.
2. Every filter is point-symmetric. With its centre as origin the transform of a filter is real, so that each
   frequency is one real product :math:`[re; im] (2B \times C) \cdot (C \times O)`.
3. The result is transformed back to the wanted pixels.

Frequencies are half-integers, :math:`u = \frac12, \frac32, \dots`: a real image has then no self-conjugate frequency,
so that zero and Nyquist need no special case. (Such a transform extends the image with period N and a change of sign;
only pixels that nobody reads are reached by the extension.) For positive u and both signs of v,

.. math:: a_\pm = \sum x \cos(u h \pm v w), \quad b_\pm = \sum x \sin(u h \pm v w)

are the real numbers kept, in the order (u, sign, v, {a, b}). The backward pass is made of the same products transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from scalesteer.functional import Geometry


Value = TypeVar("Value")


def _arange(count: int) -> Tensor:
    """Matrices are made in float64 on the CPU, whatever the defaults are, and moved once."""
    return torch.arange(count, dtype=torch.float64, device="cpu")


memory_budget = 1 << 28
"""Bytes that one piece of work may take beside its input and output, roughly; set it to trade speed for memory. On
CUDA, where no gradient is wanted, nothing else is kept, and a piece may take four times as much."""


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
    def border(self) -> tuple[int, int]:
        """How far windows reach beyond the image, before and after it."""
        reach, last = self.dilation * self.radius, self.first + (self.count - 1) * self.stride
        return max(0, reach - self.first), max(0, last + reach + 1 - self.length)

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
    return hold(plan, like.device)


_held: dict[int, Any] = {}


def hold(value: Value, device: torch.device) -> Value:
    """What a CUDA graph that is being captured reads must outlive every cache: it is kept for good."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _held[id(value)] = value
    return value


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


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Half precision is for products of convolutions, not for what happens inside."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


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


def no_space(name: str, *shape: int) -> None:
    """Every result gets memory of its own."""


def transform(
    x: Tensor,
    row_matrix: Tensor,
    column_matrix: Tensor,
    space: Callable[..., Tensor | None] = no_space,
    name: str = "spectrum",
) -> Tensor:
    """Pixels to frequencies: `(H, W, R)` -> `(u, K, R)`, with matrices `(2u, H)` and `(K, 2W)`."""
    u, width, rest = row_matrix.shape[0] // 2, column_matrix.shape[1], x.shape[2]
    along_rows = torch.mm(row_matrix, x.flatten(1), out=space("rows", 2 * u, x.shape[1] * rest))  # (u {c, s}, W R)
    del x  # if nobody else holds it, its memory is free for the result
    along_rows = _view(along_rows, u, width, rest)
    return each(column_matrix, along_rows, space(name, u, column_matrix.shape[0], rest))


def restore(
    spectrum: Tensor,
    row_matrix: Tensor,
    column_matrix: Tensor,
    space: Callable[..., Tensor | None] = no_space,
    name: str = "response",
) -> Tensor:
    """Frequencies to pixels: `(u, K, R)` -> `(H, W, R)`, with matrices `(H, 2u)` and `(2W, K)`."""
    (u, _, rest), width = spectrum.shape, column_matrix.shape[0] // 2
    along_rows = each(column_matrix, spectrum, space("rows", u, 2 * width, rest))
    del spectrum
    along_rows = _view(along_rows, row_matrix.shape[1], width * rest)  # (u {c, s}, W R)
    pixels = torch.mm(row_matrix, along_rows, out=space(name, row_matrix.shape[0], width * rest))
    return _view(pixels, row_matrix.shape[0], width, rest)


def _view(x: Tensor, *shape: int) -> Tensor:
    """Another shape, by way of one long axis: a direct view makes torch.export constrain the batch size."""
    return x.flatten().reshape(shape)


def each(matrix: Tensor, batch: Tensor, out: Tensor | None = None) -> Tensor:
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


def split_taps(coefficients: Tensor, basis: Tensor | None, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Coefficients times a basis, or taps that lie side by side, `(O, C, T)`, as one tensor `(O, C, n, n)` a scale."""
    taps = coefficients if basis is None else coefficients @ basis.to(coefficients.dtype)
    parts = taps.split([n * n for n in sizes], dim=-1)
    return tuple(part.unflatten(-1, (n, n)) for part, n in zip(parts, sizes, strict=True))


_tables: Any = WeakTensorKeyDictionary()


def derived(basis: Tensor, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
    """What is computed from a basis: made once, forgotten with the basis or when that is changed."""
    version = 0 if basis.is_inference() else basis._version
    found: tuple[int, dict[Any, Any]] | None = _tables.get(basis)
    if found is None or found[0] != version or len(found[1]) >= 16:
        found = _tables[basis] = (version, {})
    value: Value | None = found[1].get(key)
    if value is None:
        with torch.inference_mode(False), torch.no_grad():
            value = make()
        if basis.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(basis.device)  # whoever comes next may work on another stream
        found[1][key] = value
    return hold(value, basis.device)


def basis_spectra(basis: Tensor, sizes: tuple[int, ...], axes: tuple[Axis, Axis], like: Tensor) -> tuple[Tensor, ...]:
    """The transforms that :func:`make_spectra` makes, kept for the next call."""
    if type(like) not in (Tensor, torch.nn.Parameter):  # it holds no numbers: see plan_for
        return make_spectra(basis, sizes, axes, like)
    key = (sizes, axes, like.dtype, like.device)
    return derived(basis, key, lambda: make_spectra(basis, sizes, axes, like))


def make_spectra(basis: Tensor, sizes: tuple[int, ...], axes: tuple[Axis, Axis], like: Tensor) -> tuple[Tensor, ...]:
    """Transforms `(f, D)` of a basis at each scale, in the dtype and on the device of a tensor."""
    parts = basis.clone().double().split([n * n for n in sizes], dim=1)  # a clone can be used outside inference mode
    plan = _make_plan(*axes, sizes, parts[0])
    spectra = (
        filter_transform(p.unflatten(1, (n, n)), plan, i) for i, (p, n) in enumerate(zip(parts, sizes, strict=True))
    )
    return tuple(t.view(-1, len(basis)).to(device=like.device, dtype=like.dtype) for t in spectra)


def filter_transform(
    filters: Tensor, plan: Plan, i: int, space: Callable[..., Tensor | None] = no_space, name: str = "transfer"
) -> Tensor:
    """Point-symmetric filters of scale i to frequencies: `(R, n, n)` -> `(u {+, -}, v R)`."""
    half = filters[:, filters.shape[1] // 2 :].permute(1, 2, 0)  # (n/2, n, R), not moved in memory
    row_matrix, column_matrix = plan.filter_rows[i], plan.filter_columns[i]
    period, rest = column_matrix.shape[0], half.shape[2]
    along_columns = each(column_matrix, half, space("filter", half.shape[0], period, rest))
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
        self.tables = basis_spectra(filters.basis, sizes, axes, x) if isinstance(filters, Steered) else None
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
