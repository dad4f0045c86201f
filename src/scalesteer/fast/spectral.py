r"""Correlation as products in the frequency domain: the engine for many input channels.

Images are small and filters are large, so everything is a matrix product, with the pixel axes first and (batch,
channel) last, and nothing is transposed on the way:

1. The image is transformed once: rows, then columns. Zero padding and the choice of wanted pixels are part of the
   matrices, so that the period only has to be image + reach, not image + window.
2. Every filter is point-symmetric. With its centre as origin the transform of a filter is real, so that each
   frequency is one real product :math:`[re; im] (2B \times C) \cdot (C \times O)`.
3. The result is transformed back to the wanted pixels.

Frequencies are half-integers, :math:`u = \frac12, \frac32, \dots`: a real image has then no self-conjugate frequency,
so that zero and Nyquist need no special case. (Such a transform extends the image with period N and a change of sign;
only pixels that no window reads are reached by the extension.) For positive u and both signs of v,

.. math:: a_\pm = \sum x \cos(u h \pm v w), \quad b_\pm = \sum x \sin(u h \pm v w)

are the real numbers kept, in the order (u, sign, v, {a, b}). The backward pass is made of the same products transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.fast.common import (
    ScaleByScale,
    Workspace,
    batched_product,
    cached_on,
    holds_numbers,
    keep_for_cuda_graph,
)
from scalesteer.geometry import Axes, Axis, Filters


def _arange(count: int) -> Tensor:
    """Matrices are made in float64 on the CPU, whatever the defaults are, and moved once."""
    return torch.arange(count, dtype=torch.float64, device="cpu")


def angles(axis: Axis, positions: Tensor) -> Tensor:
    """u times position for the positive half-integer frequencies: `(period / 2, positions)`."""
    u = (_arange(axis.period // 2) + 0.5) * (2 * math.pi / axis.period)
    return u[:, None] * positions


def _waves(axis: Axis, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine and sine `(period, positions)`, each frequency twice, and where it comes first `(period, 1)`."""
    # In this order from the start: joining two axes of which one is a symbol would make torch.export constrain it.
    k = _arange(axis.period)
    turns = ((k / 2).floor() + 0.5)[:, None] * (2 * math.pi / axis.period) * positions
    return turns.cos(), turns.sin(), (k % 2 == 0)[:, None]


def _row_matrix(axis: Axis, positions: Tensor) -> Tensor:
    """Cosine and sine of each row frequency: `(u {c, s}, positions)`."""
    c, s, first = _waves(axis, positions)
    return torch.where(first, c, s)


def _column_matrix(axis: Axis, positions: Tensor) -> Tensor:
    """From the rows' {c, s} to a and b of both signs: `({+, -} v {a, b}, {c, s} positions)`."""
    c, s, first = _waves(axis, positions)
    plus = torch.cat([torch.where(first, c, s), torch.where(first, -s, c)], dim=1)
    minus = torch.cat([torch.where(first, c, -s), torch.where(first, s, c)], dim=1)
    return torch.cat([plus, minus])


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
MOST_PLANS = 64


def plan_for(axes: Axes, sizes: tuple[int, ...], like: Tensor) -> Plan:
    """The matrices for these axes in the dtype and on the device of a tensor, kept for the next call."""
    if torch.compiler.is_compiling() or not holds_numbers(like):
        return _make_plan(axes, sizes, like)
    key = (axes, sizes, like.dtype, like.device)
    plan = _plans.get(key)
    if plan is None:
        with torch.inference_mode(False), torch.no_grad():  # whoever comes next may want gradients
            plan = _make_plan(axes, sizes, like)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return keep_for_cuda_graph(plan, like.device)


def _make_plan(axes: Axes, sizes: tuple[int, ...], like: Tensor) -> Plan:
    rows, columns = axes

    def place(matrix: Tensor) -> Tensor:
        return matrix.to(device=like.device, dtype=like.dtype).contiguous()

    filter_columns, filter_rows, window_rows = [], [], []
    for n in sizes:
        offsets = _arange(n) - n // 2
        turns = angles(columns, columns.dilation * offsets)
        filter_columns.append(place(torch.cat([turns.cos(), turns.sin()])))  # ({c, s} v, n)
        turns = angles(rows, rows.dilation * offsets)
        signs = [torch.stack([turns.cos(), sign * turns.sin()], dim=2) for sign in (-1, 1)]
        window = torch.stack(signs, dim=1).flatten(0, 1)  # (u {+, -}, n, {c, s})
        window_rows.append(place(window.flatten(1)))
        # Half of the rows is enough, the others mirror it; the middle row stands alone.
        weight = 2.0 - (offsets[n // 2 :] == 0).double()
        filter_rows.append(place((window[:, n // 2 :] * weight[:, None]).flatten(1)))
    pixels = [_arange(axis.length) for axis in axes]
    centres = [axis.first + axis.stride * _arange(axis.count) for axis in axes]
    scale = 2 / (rows.period * columns.period)
    return Plan(
        place(_row_matrix(rows, pixels[0])),
        place(_column_matrix(columns, pixels[1])),
        place(scale * _row_matrix(rows, centres[0]).T),
        place(_column_matrix(columns, centres[1]).T),
        tuple(filter_columns),
        tuple(filter_rows),
        tuple(window_rows),
    )


def transform(
    x: Tensor, row_matrix: Tensor, column_matrix: Tensor, space: Workspace | None = None, name: str = ""
) -> Tensor:
    """Pixels to frequencies: `(H, W, R)` -> `(u, K, R)`, with matrices `(2u, H)` and `(K, 2W)`.

    With a workspace the result lies in its buffer `name`.
    """
    space = space or Workspace(x, reuse=False)
    u, width, rest = row_matrix.shape[0] // 2, column_matrix.shape[1], x.shape[2]
    buffer = space.buffer("rows", 2 * u, x.shape[1] * rest)
    along_rows = torch.mm(row_matrix, x.flatten(1), out=buffer)  # (u {c, s}, W R)
    del x  # if nobody else holds it, its memory is free for the result
    along_rows = _view(along_rows, u, width, rest)
    return batched_product(column_matrix, along_rows, space.buffer(name, u, column_matrix.shape[0], rest))


def restore(
    spectrum: Tensor, row_matrix: Tensor, column_matrix: Tensor, space: Workspace | None = None, name: str = ""
) -> Tensor:
    """Frequencies to pixels: `(u, K, R)` -> `(H, W, R)`, with matrices `(H, 2u)` and `(2W, K)`."""
    space = space or Workspace(spectrum, reuse=False)
    (u, _, rest), width = spectrum.shape, column_matrix.shape[0] // 2
    along_rows = batched_product(column_matrix, spectrum, space.buffer("rows", u, 2 * width, rest))
    del spectrum
    along_rows = _view(along_rows, row_matrix.shape[1], width * rest)  # (u {c, s}, W R)
    pixels = torch.mm(row_matrix, along_rows, out=space.buffer(name, row_matrix.shape[0], width * rest))
    return _view(pixels, row_matrix.shape[0], width, rest)


def _view(x: Tensor, *shape: int) -> Tensor:
    """Another shape, by way of one long axis: a direct view makes torch.export constrain the batch size."""
    return x.flatten().reshape(shape)


def filter_transform(filters: Tensor, plan: Plan, i: int, space: Workspace | None = None, name: str = "") -> Tensor:
    """Point-symmetric filters of scale i to frequencies: `(R, n, n)` -> `(u {+, -}, v R)`."""
    space = space or Workspace(filters, reuse=False)
    half = filters[:, filters.shape[1] // 2 :].permute(1, 2, 0)  # (n/2, n, R), not moved in memory
    row_matrix, column_matrix = plan.filter_rows[i], plan.filter_columns[i]
    period, rest = column_matrix.shape[0], half.shape[2]
    along_columns = batched_product(column_matrix, half, space.buffer("filter", half.shape[0], period, rest))
    along_columns = _view(along_columns, row_matrix.shape[1], period // 2 * rest)  # (n/2 {c, s}, v R)
    return torch.mm(row_matrix, along_columns, out=space.buffer(name, row_matrix.shape[0], along_columns.shape[1]))


def basis_transforms(filters: Filters, axes: Axes, like: Tensor) -> tuple[Tensor, ...]:
    """Transforms `(f, D)` of a basis at each scale, made in float64, in the dtype and on the device of a tensor."""
    basis = filters.basis.clone().double()  # type: ignore[union-attr]  # a clone can be used outside inference mode
    windows = Filters(basis[:, None], None, filters.sizes).windows()  # (D, 1, n, n)
    plan = _make_plan(axes, filters.sizes, basis)
    spectra = (filter_transform(w.flatten(0, 1), plan, i) for i, w in enumerate(windows))
    return tuple(t.view(-1, len(basis)).to(device=like.device, dtype=like.dtype) for t in spectra)


def blank_scales(bright: Tensor, supports: Tensor, axes: Axes) -> Tensor:
    """How many scales, from the first on, see zeros only: `(B, groups, H, W)`, `(S, n, n)` -> `(B, groups, H', W')`.

    The responses of such scales are exactly zero, so that the first of them wins against the others. Between
    frequencies they are zero up to rounding, and rounding would choose the winner and the way of the gradient.

    Args:
        bright: 1 where a channel of the group is not zero, else 0.
        supports: The taps of each scale that can be other than zero.
        axes: Where the windows lie.
    """
    (rows, columns), (batch, groups), scales = axes, bright.shape[:2], len(supports)
    if bright.device.type == "cpu" and holds_numbers(bright):
        # In float64, whatever precision products have elsewhere: whole numbers must not be off by one half.
        plan = plan_for(axes, (supports.shape[-1],), bright.double())
        table = filter_transform(supports.double(), plan, 0).view(-1, scales)  # (f, S)
        pixels = bright.double().permute(2, 3, 0, 1).flatten(2)
        spectrum = transform(pixels, plan.analyse_rows, plan.analyse_columns)
        product = (spectrum.view(len(table), -1, 1) * table[:, None]).view(*spectrum.shape[:2], -1)  # (u, K, B G S)
        seen = restore(product, plan.restore_rows, plan.restore_columns)
        seen = seen.view(rows.count, columns.count, batch, groups, scales).permute(2, 3, 4, 0, 1)
    else:
        taps = supports.to(bright.dtype)[:, None].repeat(groups, 1, 1, 1)
        padded = F.pad(bright, (*columns.beyond, *rows.beyond))  # a negative border is cut off
        stride, dilation = (rows.stride, columns.stride), (rows.dilation, columns.dilation)
        seen = F.conv2d(padded, taps, None, stride, 0, dilation, groups).unflatten(1, (groups, -1))
    blank = (seen < 0.5).int()  # (B, groups, S, H', W'): how many bright pixels were seen is a small whole number
    return blank.cumprod(2, dtype=torch.int32).sum(2, dtype=torch.int32)


class Frequencies(ScaleByScale):
    """Responses as products of spectra. Its maps are `(H', W', B O)`: pixels first.

    For `pieces` of a batch that are loaded one after the other, nothing is kept for autograd, and what `response`
    returned is overwritten by the next call. Without, operations are plain and autograd follows them.
    """

    def __init__(self, filters: Filters, axes: Axes, groups: int, like: Tensor, pieces: int = 0, budget: int = 0):
        self.filters, self.axes, self.groups = filters, axes, groups
        self.out_channels, self.per_group = filters.weights.shape[:2]
        self.plan = plan_for(axes, filters.sizes, like)
        self.space = Workspace(like, pieces > 0)
        self.transfers: dict[int, Tensor] = {}
        self.weight_grads: dict[int, Tensor] = {}
        self.tables: tuple[Tensor, ...] | None = None
        if filters.basis is not None:
            key = ("frequencies", filters.sizes, axes)
            self.tables = cached_on(filters.basis, like, key, lambda: basis_transforms(filters, axes, like))
        # Transfers of all scales, and their gradients, serve every piece, unless they take too much memory.
        self.keeps = pieces > 1 and like.element_size() * self.floats(filters, axes)[0] <= budget // 2

    @staticmethod
    def floats(filters: Filters, axes: Axes, groups: int = 1) -> tuple[int, int]:
        """Floats at work for the filters, and for each image."""
        rows, columns = axes
        out_channels, per_group = filters.weights.shape[:2]
        period = rows.period * columns.period
        image = period * (2 * per_group * groups + out_channels)
        image += (rows.period * columns.count + 3 * rows.count * columns.count) * out_channels
        return len(filters.sizes) * out_channels * per_group * period // 2, image

    def load_batch(self, x: Tensor, kept: Tensor | None = None) -> None:
        """Transform the next piece of the batch."""
        self.x, (self.batch, self.channels) = x, x.shape[:2]
        spectrum = transform(self.inwards(x), self.plan.analyse_rows, self.plan.analyse_columns, self.space, "spectrum")
        self.spectrum = self._by_frequency(spectrum, self.channels)
        self.grad_spectrum: Tensor | None = None

    def inwards(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` -> `(H, W, B C)`."""
        batch, channels, height, width = x.shape
        same = x.dtype == self.space.like.dtype
        buffer = self.space.buffer("inwards", height, width, batch, channels) if same else None
        pixels = x.permute(2, 3, 0, 1)
        return (pixels if buffer is None else buffer.copy_(pixels)).reshape(height, width, batch * channels)

    def outwards(self, maps: Tensor, channels: int | None = None) -> Tensor:
        """`(H, W, B C)` -> `(B, C, H, W)`, by default with the channels of the output; a view."""
        channels = self.out_channels if channels is None else channels
        return _view(maps, maps.shape[0], maps.shape[1], self.batch, channels).permute(2, 3, 0, 1)

    def response(self, i: int) -> Tensor:
        """The response of scale i."""
        transfer = self._transfer(i)
        buffer = self.space.buffer("product", *self.spectrum.shape[:2], transfer.shape[1])
        product = torch.bmm(self.spectrum, transfer.mT, out=buffer)  # (f G, 2B, O / G)
        product = self._by_row(product, self.out_channels)
        name = "best" if i == 0 else "response"
        return restore(product, self.plan.restore_rows, self.plan.restore_columns, self.space, name)

    def blank_scales(self) -> Tensor | None:
        """See :func:`blank_scales`; None if no window is blank, where that can be told without waiting for a GPU."""
        x, filters, basis = self.x, self.filters, self.filters.basis
        can_tell = self.space.reuse and x.device.type == "cpu" and holds_numbers(x)
        # A window with a bright pixel at its centre is not blank; and one bright channel is enough.
        can_tell = can_tell and all(axis.first >= 0 and axis.last < axis.length for axis in self.axes)
        if can_tell and bool(x[:, :: self.channels // self.groups].all()):
            return None
        bright = (x != 0).unflatten(1, (self.groups, -1)).any(2)
        if can_tell and bool(bright.all()):
            return None
        if basis is None:
            supports = filters.supports()
        else:
            supports = cached_on(basis, x, ("supports", filters.sizes), filters.supports)
        return blank_scales(bright.to(x.dtype), supports, self.axes)

    def silence_blank(self) -> Callable[[int, Tensor], None] | None:
        """See :meth:`ScaleByScale.silence_blank`."""
        blank = self.blank_scales()
        if blank is None:
            return None
        blank = blank.permute(2, 3, 0, 1).unsqueeze(-1).contiguous()  # (H', W', B, G, 1)

        def silence(i: int, response: Tensor) -> None:
            response.view(*blank.shape[:-1], self.out_channels // self.groups).masked_fill_(blank > i, 0)

        return silence

    def pull_back(self, i: int, grad: Tensor, image: bool, weights: bool) -> None:
        """Add what arrives at the response of scale i to the gradients of the image and of the weights."""
        grad_product = transform(grad, self.plan.restore_rows.T, self.plan.restore_columns.T, self.space, "product")
        grad_product = self._by_frequency(grad_product, self.out_channels)
        if image:
            transfer = self._transfer(i)
            if self.grad_spectrum is None:
                buffer = self.space.buffer("grad_spectrum", *self.spectrum.shape)
                self.grad_spectrum = torch.bmm(grad_product, transfer, out=buffer)
            else:
                self.grad_spectrum.baddbmm_(grad_product, transfer)
        if not weights:
            return
        if self.keeps and i in self.weight_grads:
            self.weight_grads[i].baddbmm_(grad_product.mT, self.spectrum)
            return
        shape = len(grad_product), grad_product.shape[2], self.spectrum.shape[2]
        buffer = None if self.keeps else self.space.buffer("transfer", *shape)
        found = torch.bmm(grad_product.mT, self.spectrum, out=buffer)  # (f G, O / G, C / G)
        if not self.keeps:
            found = self._to_weights(i, found)
        self.weight_grads[i] = self.weight_grads[i] + found if i in self.weight_grads else found

    def weight_gradient(self) -> Tensor:
        """The sum, over pieces and scales, of what `pull_back` added for the weights."""
        grads = [self.weight_grads.pop(i) for i in range(len(self.filters.sizes))]
        if self.keeps:
            grads = [self._to_weights(i, grad) for i, grad in enumerate(grads)]
        # All scales have the coefficients in common; finished taps are those of each scale, side by side.
        return torch.cat(grads, dim=2) if self.tables is None else torch.stack(grads).sum(0)

    def image_gradient(self) -> Tensor:
        """The sum of what `pull_back` added since the piece was loaded."""
        spectrum = self._by_row(self.grad_spectrum, self.channels)  # type: ignore[arg-type]
        matrices = self.plan.analyse_rows.T, self.plan.analyse_columns.T
        return self.outwards(restore(spectrum, *matrices, self.space, "response"), self.channels)

    def _transfer(self, i: int) -> Tensor:
        """Filters to frequencies: `(f G, O / G, C / G)`."""
        if i in self.transfers:
            return self.transfers[i]
        name = "kept" if self.keeps else "transfer"
        if self.tables is not None:
            weights = self.filters.weights.flatten(0, 1).T  # (D, O C/G)
            buffer = self.space.buffer(name, len(self.tables[i]), weights.shape[1])
            spectrum = torch.mm(self.tables[i], weights, out=buffer)
        else:
            spectrum = filter_transform(self.filters.windows()[i].flatten(0, 1), self.plan, i, self.space, name)
        transfer = _view(spectrum, -1, self.out_channels // self.groups, self.per_group)
        if self.keeps:
            self.transfers[i] = transfer
            self.space.hand_over(name)
        return transfer

    def _to_weights(self, i: int, grad: Tensor) -> Tensor:
        """The adjoint of `_transfer`: `(f G, O / G, C / G)` to `(O, C / G, n n)` or `(O, C / G, D)`."""
        out_channels, per_group = self.out_channels, self.per_group
        if self.tables is not None:
            found = _view(grad, -1, out_channels * per_group).T @ self.tables[i]
            return found.view(out_channels, per_group, -1)
        n = self.filters.sizes[i]
        row_matrix, column_matrix = self.plan.window_rows[i].T, self.plan.filter_columns[i]
        grad = _view(grad, row_matrix.shape[1], column_matrix.shape[0] // 2 * out_channels * per_group)
        buffer = self.space.buffer("filter", row_matrix.shape[0], grad.shape[1])
        along_columns = torch.mm(row_matrix, grad, out=buffer)  # (n {c, s}, v O C/G)
        along_columns = along_columns.view(n, column_matrix.shape[0], out_channels * per_group)
        taps = grad.new_empty(out_channels, per_group, n, n)
        rows = taps.flatten(0, 1).transpose(0, 1)  # (n, O C/G, n)
        torch.bmm(along_columns.mT, column_matrix.expand(n, *column_matrix.shape), out=rows)
        return taps.flatten(2)

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
