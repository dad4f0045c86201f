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
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from scalesteer.functional import Geometry


def _arange(count: int) -> Tensor:
    """Matrices are made in float64 on the CPU, whatever the defaults are, and moved once."""
    return torch.arange(count, dtype=torch.float64, device="cpu")


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


def plan_for(rows: Axis, columns: Axis, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Plan:
    """The matrices for these axes, kept for the next call (but not while a compiler traces)."""
    key = (rows, columns, sizes, dtype, device)
    if not torch.compiler.is_compiling() and key in _plans:
        return _plans[key]

    def place(matrix: Tensor) -> Tensor:
        return matrix.to(device=device, dtype=dtype).contiguous()

    with torch.no_grad():
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
        plan = Plan(
            place(rows.row_matrix(rows.pixels)),
            place(columns.column_matrix(columns.pixels)),
            place(scale * rows.row_matrix(rows.centres).T),
            place(columns.column_matrix(columns.centres).T),
            tuple(filter_rows),
            tuple(filter_columns),
        )
    # Never keep what a tracer made: its tensors hold no numbers.
    if type(plan.analyse_rows) is Tensor and not torch.compiler.is_compiling():
        if len(_plans) >= 64:
            _plans.clear()
        _plans[key] = plan
    return plan


def make_plan(
    x: Tensor, margin: tuple[int, int], sizes: tuple[int, ...], geometry: Geometry, dtype: torch.dtype
) -> Plan:
    """The plan for images `(B, C, H, W)` that already have a border of `margin` around them."""
    height, width = x.shape[-2] - 2 * margin[0], x.shape[-1] - 2 * margin[1]
    counts = geometry.output_size(height, width)
    rows, columns = (
        Axis(
            length=x.shape[axis - 2],
            first=geometry.dilation[axis] * (geometry.kernel_size // 2) - geometry.padding[axis] + margin[axis],
            stride=geometry.stride[axis],
            count=counts[axis],
            dilation=geometry.dilation[axis],
            radius=max(sizes) // 2,
        )
        for axis in (0, 1)
    )
    return plan_for(rows, columns, sizes, dtype, x.device)


def transform(x: Tensor, row_matrix: Tensor, column_matrix: Tensor) -> Tensor:
    """Pixels to frequencies: `(H, W, R)` -> `(u, K, R)`, with matrices `(2u, H)` and `(K, 2W)`."""
    along_rows = row_matrix @ x.flatten(1)  # (u {c, s}, W R)
    return _each(column_matrix, along_rows.view(row_matrix.shape[0] // 2, column_matrix.shape[1], x.shape[2]))


def restore(spectrum: Tensor, row_matrix: Tensor, column_matrix: Tensor) -> Tensor:
    """Frequencies to pixels: `(u, K, R)` -> `(H, W, R)`, with matrices `(H, 2u)` and `(2W, K)`."""
    width, rest = column_matrix.shape[0] // 2, spectrum.shape[2]
    along_rows = _each(column_matrix, spectrum).view(row_matrix.shape[1], width * rest)  # (u {c, s}, W R)
    return (row_matrix @ along_rows).view(row_matrix.shape[0], width, rest)


def _each(matrix: Tensor, batch: Tensor) -> Tensor:
    """One matrix times each of a batch; `matmul` would fold the batch into columns and transpose it on the way."""
    return torch.bmm(matrix.expand(batch.shape[0], *matrix.shape), batch)


def image_spectrum(x: Tensor, plan: Plan, groups: int) -> Tensor:
    """Images `(H, W, B, C)` to frequencies `(f, 2B, C)`, or `(f, G, 2B, C / G)`: f = (u, v, sign)."""
    height, width, batch, channels = x.shape
    spectrum = transform(x.reshape(height, width, batch * channels), plan.analyse_rows, plan.analyse_columns)
    return _by_frequency(spectrum, batch, channels, groups)


def filter_spectrum(weight: Tensor, plan: Plan, scale: int, groups: int) -> Tensor:
    """Point-symmetric filters `(O, C / G, n, n)` to frequencies `(f, C, O)`, or `(f, G, C / G, O / G)`."""
    out_channels, per_group, n, _ = weight.shape
    half = weight[:, :, n // 2 :].unflatten(0, (groups, -1)).permute(3, 4, 0, 2, 1)  # (n/2, n, G, C/G, O/G)
    spectrum = transform(
        half.reshape(n // 2 + 1, n, out_channels * per_group), plan.filter_rows[scale], plan.filter_columns[scale]
    )
    frequencies = spectrum.shape[0] * spectrum.shape[1]
    if groups == 1:
        return spectrum.view(frequencies, per_group, out_channels)
    return spectrum.view(frequencies, groups, per_group, out_channels // groups)


def respond(spectrum: Tensor, transfer: Tensor, plan: Plan, batch: int, channels: int) -> Tensor:
    """The response of one scale: `(H', W', B O)`."""
    product = spectrum @ transfer  # (f, 2B, O), or (f, G, 2B, O / G)
    return restore(_by_row(product, plan, batch * channels), plan.restore_rows, plan.restore_columns)


def _by_frequency(spectrum: Tensor, batch: int, channels: int, groups: int) -> Tensor:
    """`(u, v {+, -} {a, b}, B C)` -> `(f, 2B, C)`, or `(f, G, 2B, C / G)`."""
    frequencies = spectrum.shape[0] * spectrum.shape[1] // 2
    if groups == 1:
        return spectrum.flatten().view(frequencies, 2 * batch, channels)
    return spectrum.flatten().view(frequencies, 2 * batch, groups, channels // groups).transpose(1, 2).contiguous()


def _by_row(product: Tensor, plan: Plan, rest: int) -> Tensor:
    """The inverse of :func:`_by_frequency`."""
    if product.ndim == 4:
        product = product.transpose(1, 2)
    # By way of one long axis: a direct view makes torch.export constrain the batch size.
    return product.flatten().view(plan.restore_rows.shape[1] // 2, plan.restore_columns.shape[1], rest)


def _setting(x: Tensor, filters: Sequence[Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the result, and that of the work: half precision is for products of convolutions, not for these."""
    dtype = torch.promote_types(x.dtype, filters[0].dtype)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return dtype, torch.promote_types(dtype, torch.float32)


def _pixels_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.permute(2, 3, 0, 1).to(dtype)


def _pixels_last(x: Tensor, batch: int, channels: int) -> Tensor:
    """`(H, W, B C)` -> `(B, C, H, W)`, a view."""
    return x.view(x.shape[0], x.shape[1], batch, channels).permute(2, 3, 0, 1)


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
    batch, channels = x.shape[0], filters[0].shape[0]
    with torch.autocast(x.device.type, enabled=False):
        plan = make_plan(x, margin, tuple(w.shape[-1] for w in filters), geometry, work)
        spectrum = image_spectrum(_pixels_first(x, work), plan, geometry.groups)
        for i, weight in enumerate(filters):
            transfer = filter_spectrum(weight.to(work), plan, i, geometry.groups)
            response = respond(spectrum, transfer, plan, batch, channels)
            yield _pixels_last(response, batch, channels).contiguous().to(dtype)


def max_response(
    x: Tensor, margin: tuple[int, int], filters: Sequence[Tensor], geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """The largest response over scales and the index of the winner (uint8), with a backward pass of the same kind.

    Shape: as :func:`responses`, both `(B, O, H', W')`.
    """
    dtype, work = _setting(x, filters)
    with torch.autocast(x.device.type, enabled=False):
        best, winner = _MaxResponse.apply(  # type: ignore[no-untyped-call]
            x.to(work), margin, geometry, *(w.to(work) for w in filters)
        )
    return best.to(dtype), winner


class _MaxResponse(torch.autograd.Function):
    """The maximum over scales in the frequency domain; saves the image, the filters and the winner only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, margin: tuple[int, int], geometry: Geometry, *filters: Tensor
    ) -> tuple[Tensor, Tensor]:
        plan = make_plan(x, margin, tuple(w.shape[-1] for w in filters), geometry, x.dtype)
        batch, channels = x.shape[0], filters[0].shape[0]
        spectrum = image_spectrum(_pixels_first(x, x.dtype), plan, geometry.groups)
        for i, weight in enumerate(filters):
            response = respond(spectrum, filter_spectrum(weight, plan, i, geometry.groups), plan, batch, channels)
            if i == 0:
                best = response
                winner = torch.zeros_like(best, dtype=torch.uint8)
                continue
            wins = response > best
            if i == len(filters) - 1:  # a non-finite response always shows: see functional.max_over_scales
                wins |= ~torch.isfinite(response)
            torch.where(wins, response, best, out=best)
            winner.masked_fill_(wins, i)
        ctx.save_for_backward(x, winner, *filters)
        ctx.margin, ctx.geometry = margin, geometry
        best, out_winner = (_pixels_last(t, batch, channels).contiguous() for t in (best, winner))
        ctx.mark_non_differentiable(out_winner)
        return best, out_winner

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, winner, *filters = ctx.saved_tensors
        margin, geometry = ctx.margin, ctx.geometry
        if torch.is_grad_enabled():  # a second derivative goes through plain operations
            picked = _pixels_last(winner, x.shape[0], filters[0].shape[0])
            every = enumerate(responses(x, margin, filters, geometry))
            best = sum((r.where(picked == i, torch.zeros_like(r)) for i, r in every), torch.zeros(()).to(x))
            wanted = [t for t, need in zip((x, *filters), _needs(ctx), strict=True) if need]
            found = iter(torch.autograd.grad(best, wanted, grads[0], create_graph=True))
            first, *rest = (next(found) if need else None for need in _needs(ctx))
            return first, None, None, *rest
        groups, batch = geometry.groups, x.shape[0]
        plan = make_plan(x, margin, tuple(w.shape[-1] for w in filters), geometry, x.dtype)
        spectrum = image_spectrum(_pixels_first(x, x.dtype), plan, groups).mT
        incoming = _pixels_first(grads[0], x.dtype).reshape(winner.shape)
        need_x, *need_filters = _needs(ctx)
        grad_spectrum = None
        grad_filters: list[Tensor | None] = []
        for i, weight in enumerate(filters):
            routed = incoming * (winner == i)
            grad_product = transform(routed, plan.restore_rows.T, plan.restore_columns.T)
            grad_product = _by_frequency(grad_product, batch, weight.shape[0], groups)
            if need_x:
                transfer = filter_spectrum(weight, plan, i, groups).mT
                if grad_spectrum is None:
                    grad_spectrum = grad_product @ transfer
                elif groups == 1:
                    grad_spectrum.baddbmm_(grad_product, transfer)
                else:
                    grad_spectrum += grad_product @ transfer
            grad_filters.append(_filter_gradient(spectrum @ grad_product, plan, i, weight) if need_filters[i] else None)
        grad_x = None
        if grad_spectrum is not None:
            spectrum = _by_row(grad_spectrum, plan, batch * x.shape[1])
            grad_x = _pixels_last(restore(spectrum, plan.analyse_rows.T, plan.analyse_columns.T), batch, x.shape[1])
        return grad_x, None, None, *grad_filters


def _needs(ctx: Any) -> tuple[bool, ...]:
    return ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]


def _filter_gradient(grad_transfer: Tensor, plan: Plan, scale: int, weight: Tensor) -> Tensor:
    """The adjoint of :func:`filter_spectrum`: gradients arrive at the half of the rows that was read."""
    out_channels, per_group, n, _ = weight.shape
    groups = 1 if grad_transfer.ndim == 3 else grad_transfer.shape[1]
    row_matrix, column_matrix = plan.filter_rows[scale].T, plan.filter_columns[scale].T
    half = restore(
        grad_transfer.reshape(row_matrix.shape[1] // 2, column_matrix.shape[1], -1), row_matrix, column_matrix
    )
    half = half.view(n // 2 + 1, n, groups, per_group, out_channels // groups).permute(2, 4, 3, 0, 1)
    grad = weight.new_zeros(weight.shape)
    grad[:, :, n // 2 :] = half.reshape(out_channels, per_group, n // 2 + 1, n)
    return grad


# Multiply-adds of a direct convolution that cost as much as one frequency of one scale. Measured on two CPU cores,
# batch 32, float32, for windows of 3 to 33 taps, 1 to 90 channels and images of 14 to 96 pixels.
_TAPS_A_FREQUENCY = 50


def choose_backend(image_size: tuple[int, int], sizes: Sequence[int], geometry: Geometry) -> str:
    """The backend that the measured cost favours for static shapes; the batch size does not enter.

    Args:
        image_size: Height and width of the image.
        sizes: The window size of each scale.
        geometry: Stride, padding, dilation and groups.
    """
    rows, columns = geometry.output_size(*image_size)
    direct = rows * columns * sum(n * n for n in sizes)
    reach = geometry.reach(max(sizes))
    area = (image_size[0] + 2 * max(reach[0], 0)) * (image_size[1] + 2 * max(reach[1], 0))
    return "spectral" if direct > _TAPS_A_FREQUENCY * len(sizes) * area else "direct"
