"""Convolving a resized image and resizing the response back: what two of the baselines share.

Resizing is separable and linear, so that it is one product with a small fixed matrix along each axis: batched,
deterministic forward and backward, and without control flow that depends on data. Two cases need less work than to
convolve the resized image and resize the response:

- A small image with one channel that is enlarged. What a tap of the filter reads at every output pixel is a fixed
  linear map of the image: resized, shifted, resized back. All filters share these maps.
- A batch of small images with many channels. Between frequencies a convolution is one small product each; resizing is
  part of the matrices that lead there and back.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import _checks, fast, functional
from scalesteer.geometry import Geometry
from scalesteer.nn import MultiScaleConv2d


class ResizedConv2d(MultiScaleConv2d):
    r"""One filter, applied to resized copies of the image; the base of two baselines.

    At scale s the image is resized by 1 / s, convolved with the filter, and the response is resized back,

    .. math:: z_s = T_s\,(W \star T_{1/s}\,x),

    which emulates a filter that is s times as large. Output pixel p of `nn.Conv2d` has its window's centre at input
    pixel c = p stride - padding + dilation (kernel_size - 1) / 2; the response is read there at every scale. A shared
    centre and the output shape of `nn.Conv2d` follow, and for stride 1 and padding "same" both T are plain resizing.
    """

    weight: nn.Parameter

    def _add_weight(self, bias: bool, device: Any, dtype: Any, *, antialias: bool, vectors: bool = False) -> None:
        """The second half of construction: what is learned, and how images are resized."""
        self.antialias = _checks.boolean("antialias", antialias)
        self.vectors = _checks.boolean("vector_input", vectors)
        shape = (self.out_channels, self.in_channels // self.groups, *((2,) if vectors else ()), *self.kernel_size)
        self._add_parameters("weight", shape, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias as `nn.Conv2d` does: uniform within 1 / sqrt(fan-in)."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def filters(self) -> tuple[Tensor, ...]:
        """The filter at each scale: `(C_out, C_in / groups, k, k)`."""
        return (self.weight,) * len(self.scales)

    def responses(self, x: Tensor, filters: Iterable[Tensor]) -> Iterator[Tensor]:
        """The response at each scale, ascending: `(B, C, H, W)`, `(O, C / groups, k, k)` each -> `(B, O, H', W')`."""
        g, lengths = self.geometry, x.shape[-2:]
        zeros = g.padding_mode == "zeros"
        place: dict[str, Any] = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
        whole = place["dtype"] == x.dtype and not torch.is_autocast_enabled(x.device.type)
        dense = zeros and whole and g.groups == 1 and not fast.being_traced()  # a compiler's batch may have no number
        turned = None
        for scale, weight in zip(self.scales, filters, strict=True):
            axes = [_resized_axis(length, scale, g, i, self.antialias) for i, length in enumerate(lengths)]
            if zeros and x.shape[1] == 1 and _maps_pay(max(lengths), scale, g.kernel_size, self.out_channels):
                yield _multiply_taps(x, weight, *(_kept(_tap_maps, axis, **place) for axis in axes))
            elif dense and _frequencies_pay(x.shape[0], weight.shape, *axes):
                turned = x.permute(3, 2, 1, 0).contiguous() if turned is None else turned
                yield _multiply_frequencies(turned, weight, _kept(_waves, *axes, **place)).permute(3, 2, 1, 0)
            else:
                yield _convolve_resized(x, weight, g, scale, place, *axes)

    def _convolve(self, x: Tensor, return_scales: bool) -> Tensor | tuple[Tensor, Tensor]:
        """The largest response at each pixel plus the bias, and which scale it is from."""
        self._check_input(x, self.weight, vectors=self.vectors)
        x, filters = x.flatten(1, 2) if self.vectors else x, self.filters()
        responses = self.responses(x, filters)
        winner: Tensor | None
        if fast.being_traced() or len(self.scales) > 256:
            best, winner = functional.max_over_scales(responses, len(self.scales), return_scales)
        else:
            if torch.is_grad_enabled() and (x.requires_grad or any(weight.requires_grad for weight in filters)):
                best, winner = _Largest.apply(*responses)  # type: ignore[no-untyped-call]
            else:
                best, winner = _largest(responses)
            best = best.contiguous()
            winner = winner.to(torch.int64, memory_format=torch.contiguous_format) if return_scales else None
        if self.bias is not None:
            best = best + self.bias.to(best.dtype)[:, None, None]
        return best if winner is None else (best, winner)

    def _shown(self) -> dict[str, tuple[Any, Any]]:
        return {**super()._shown(), "vector_input": (self.vectors, False)}


def _largest(responses: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """What `functional.max_over_scales` gives, with one byte for the winner of each pixel."""
    for i, response in enumerate(responses):
        if i == 0:
            best, winner = response.clone(), torch.zeros_like(response, dtype=torch.uint8)
        else:
            fast.keep_larger(best, winner, response, i)
    broken = ~response.isfinite()  # of the largest scale: it always shows
    return torch.where(broken, response, best), winner.masked_fill_(broken, i)


class _Largest(torch.autograd.Function):
    """The same with a gradient, which goes where the winner says: after this, the responses may go."""

    @staticmethod
    def forward(ctx: Any, *responses: Tensor) -> tuple[Tensor, Tensor]:
        best, winner = _largest(responses)
        ctx.save_for_backward(winner)
        ctx.count = len(responses)
        ctx.mark_non_differentiable(winner)
        return best, winner

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (winner,) = ctx.saved_tensors
        return tuple(torch.where(winner == i, grads[0], 0) for i in range(ctx.count))


class _Silenced(torch.autograd.Function):
    """Exactly zero where the filter sees zeros only, so that scales tie there; the gradient is the response's own."""

    @staticmethod
    def forward(ctx: Any, response: Tensor, silent: Tensor) -> Tensor:
        return response.masked_fill(silent, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def resize_matrix(start: float, step: float, count: int, length: int, spread: float = 1.0, **place: Any) -> Tensor:
    """The matrix that reads a signal of `length` samples at start, start + step, … by linear interpolation.

    Positions beyond the signal read its first or last sample. `spread` above 1 widens the triangle, so that no sample
    is skipped where positions lie further apart than one: the anti-aliasing of ``F.interpolate(antialias=True)``.

    Shape: `(count, length)`; each row adds up to 1. It is made in float64.
    """
    work: dict[str, Any] = {"dtype": torch.float64, "device": place.get("device")}
    positions, samples = start + step * torch.arange(count, **work), torch.arange(length, **work)
    if spread <= 1:
        weights = (1 - (positions.clamp(0, length - 1)[:, None] - samples).abs()).clamp(min=0)
    else:
        weights = (1 - (positions[:, None] - samples).abs() / spread).clamp(min=0)
        weights = weights / weights.sum(1, keepdim=True)
    return weights.to(**place)


def _kept(make: Callable[..., Any], *arguments: Any, **place: Any) -> Any:
    """Fixed matrices, made once; but a compiler's tensors are not real yet: it makes them part of its graph."""
    return (make if torch.compiler.is_compiling() else partial(_cached, make))(*arguments, **place)


@lru_cache(maxsize=1024)
def _cached(make: Callable[..., Any], *arguments: Any, **place: Any) -> Any:
    with torch.inference_mode(False):  # what is made in inference mode could not be used in training later
        return make(*arguments, **place)


class ResizedAxis(NamedTuple):
    """How one axis is treated at one scale; `resize` and `back` are the arguments of matrices, or None."""

    length: int
    size: int  # the length after resizing
    taps: int
    dilation: int
    stride: int
    padding: int
    responses: int  # before they are resized back
    outputs: int
    resize: tuple[float, float, int, int, float] | None = None
    back: tuple[float, float, int, int, float] | None = None

    @property
    def period(self) -> int:
        """Of the frequencies: what lies beyond one end and what lies before the other may be the same."""
        return self.size + self.padding


def _resized_axis(length: int, scale: float, geometry: Geometry, axis: int, antialias: bool) -> ResizedAxis:
    """How an axis of `length` pixels is resized, convolved and resized back at `scale`."""
    stride, padding, dilation = geometry.stride[axis], geometry.padding[axis], geometry.dilation[axis]
    taps, count = geometry.kernel_size, geometry.output_size(length, length)[axis]
    size = max(1, round(length / scale))
    if size == length:
        return ResizedAxis(length, size, taps, dilation, stride, padding, count, count)
    same, ratio = dilation * (taps - 1) // 2, size / length
    # Centres outside the image need responses outside it; if there are none the border is clamped, as resizing does.
    outside = max(0, padding - same)
    extra = math.ceil((outside - 0.5) * ratio + 0.5) if outside else 0
    # Pixels are unit squares: the left edge of the first is the one point that resizing leaves in place.
    resize = (0.5 / ratio - 0.5, 1 / ratio, size, length, 1 / ratio if antialias else 1.0)
    first, responses = (same - padding + 0.5) * ratio - 0.5 + extra, size + 2 * extra
    back = (first, stride * ratio, count, responses, ratio if antialias else 1.0)
    return ResizedAxis(length, size, taps, dilation, 1, same + extra, responses, count, resize, back)


def _convolve_resized(
    x: Tensor, weight: Tensor, g: Geometry, scale: float, place: dict[str, Any], rows: ResizedAxis, columns: ResizedAxis
) -> Tensor:
    """The response at a scale by its definition."""
    resize, back = (
        [None if arguments is None else _kept(resize_matrix, *arguments, **place) for arguments in pair]
        for pair in ((rows.resize, columns.resize), (rows.back, columns.back))
    )
    resized = _resample(x, *resize)
    border = [rows.padding, columns.padding]
    if g.padding_mode != "zeros" and any(border):
        reason = f"{x.shape[-2]} x {x.shape[-1]} before it was resized for scale {scale:.4g}"
        _checks.border(g.padding_mode, border, resized.shape[-2:], reason)
        resized = F.pad(resized, (border[1], border[1], border[0], border[0]), mode=g.padding_mode)
        border = [0, 0]
    response = F.conv2d(resized, weight, None, (rows.stride, columns.stride), border, g.dilation, g.groups)
    return _resample(response, *back)


def _maps_pay(length: int, scale: float, kernel_size: int, out_channels: int) -> bool:
    """Whether maps of taps take fewer operations than the definition, counted for a square image."""
    ratio, taps = round(length / scale) / length, kernel_size**2
    resizing = 0 if ratio == 1 else (ratio**2 + ratio) * length
    return taps * (length + out_channels) < out_channels * (taps * ratio**2 + resizing)


def _tap_maps(axis: ResizedAxis, **place: Any) -> Tensor:
    """What each tap reads along an axis, at every output: `(k, count, length)`."""
    work = {"dtype": torch.float64, "device": place["device"]}
    resize = torch.eye(axis.length, **work) if axis.resize is None else resize_matrix(*axis.resize, **work)
    padded = F.pad(resize, (0, 0, axis.padding, axis.padding))
    starts = [axis.dilation * t for t in range(axis.taps)]
    maps = torch.stack([padded[start : len(padded) - starts[-1] + start : axis.stride] for start in starts])
    return (maps if axis.back is None else resize_matrix(*axis.back, **work) @ maps).to(**place)


def _multiply_taps(x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The response of an image with one channel, from the maps of rows and columns."""
    with torch.autocast(x.device.type, enabled=False):  # see _resample
        y = x[:, 0].to(rows.dtype) @ columns.flatten(0, 1).mT  # (B, H, columns W')
        y = y.unflatten(2, columns.shape[:2]).transpose(1, 2).flatten(0, 1)  # (B columns, H, W')
        y = rows.flatten(0, 1).expand(y.shape[0], -1, -1).bmm(y)  # (B columns, rows H', W')
    read = y.view(x.shape[0], -1, rows.shape[1], columns.shape[1]).to(x.dtype)
    return F.conv2d(read, weight.mT.flatten(1)[..., None, None])


class Waves(NamedTuple):
    """Fixed matrices that lead from an image to frequencies, resized on the way, and back. F of N frequencies of
    columns are enough, since images are real; a complex number is two real ones."""

    columns: Tensor  # (F 2, W)
    rows: Tensor  # (N 2, 2 H)
    tap_columns: Tensor  # (F 2, k)
    tap_rows: Tensor  # (N 2, 2 k)
    rows_back: Tensor  # (2 H', N 2)
    columns_back: Tensor  # (W', F 2)
    column_reach: Tensor  # (W', W), not zero where a pixel lies in an output's window
    row_reach: Tensor  # (H', H)


def _frequencies_pay(batch: int, filters: torch.Size, rows: ResizedAxis, columns: ResizedAxis) -> bool:
    """Whether frequencies take far fewer operations than the definition, and filters at most twice the images' room."""
    fan_out, fan_in, taps, _ = filters
    half = columns.period // 2 + 1
    there = 2 * half * rows.length * (columns.length + 2 * rows.period) * fan_in
    back = 2 * half * rows.outputs * (columns.outputs + 2 * rows.period) * fan_out
    product = 4 * half * rows.period * fan_in * fan_out
    made = 2 * half * taps * (taps + 2 * rows.period) * fan_in * fan_out
    frequencies = batch * (there + product + back) + made
    convolution = batch * fan_in * fan_out * taps**2 * rows.responses * columns.responses
    few = fan_in * fan_out <= batch * (fan_in + fan_out)
    return few and 2.5 * frequencies < convolution  # measured on two CPU cores: an operation costs so much more


def _waves(rows: ResizedAxis, columns: ResizedAxis, **place: Any) -> Waves:
    """The matrices of the frequency form; a complex number that comes in is multiplied by m and i m."""
    work = {"dtype": torch.float64, "device": place["device"]}
    there_1, taps_1, back_1 = _axis_waves(rows, **work)
    there_2, taps_2, back_2 = _axis_waves(columns, **work)
    half = columns.period // 2 + 1
    twice = [1.0 if f in (0, columns.period / 2) else 2.0 for f in range(half)]  # for the conjugate as well
    back_2 = back_2[:, :half] * torch.tensor(twice, **work)
    back_1, back_2 = (torch.stack([m, 1j * m], 2).flatten(1) for m in (back_1, back_2))  # (H', N 2), (W', F 2)
    found = Waves(
        _both_parts(there_2[:half]),
        _both_parts(torch.cat([there_1, 1j * there_1], 1)),
        _both_parts(taps_2[:half]),
        _both_parts(torch.cat([taps_1, 1j * taps_1], 1)),
        torch.cat([back_1.real, back_1.imag]),
        back_2.real,
        *(_tap_maps(axis, **work).sum(0) for axis in (columns, rows)),
    )
    return Waves(*(matrix.to(**place).contiguous() for matrix in found))


def _axis_waves(axis: ResizedAxis, **work: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Along an axis: pixels to frequencies `(N, length)`, taps to frequencies `(N, k)`, and back `(count, N)`."""
    turns = 2j * math.pi / axis.period * torch.arange(axis.period, **work)

    def wave(positions: Tensor) -> Tensor:
        return torch.exp(turns[:, None] * positions)

    there = wave(-torch.arange(axis.size, **work))
    taps = wave(axis.dilation * torch.arange(axis.taps, **work) - axis.padding)
    back = wave(axis.stride * torch.arange(axis.responses, **work)).T / axis.period
    if axis.resize is not None and axis.back is not None:
        there = there @ resize_matrix(*axis.resize, **work).to(there.dtype)
        back = resize_matrix(*axis.back, **work).to(back.dtype) @ back
    return there, taps, back


def _both_parts(matrix: Tensor) -> Tensor:
    """From complex results to their real and imaginary parts in turn: `(N, H)` -> `(N 2, H)`."""
    return torch.view_as_real(matrix).transpose(1, 2).flatten(0, 1)


def _multiply_frequencies(x: Tensor, weight: Tensor, waves: Waves) -> Tensor:
    """The response by way of frequencies: `(W, H, C, B)` -> `(W', H', O, B)`, so that nothing has to be rearranged.

    Rounding errors are those of the largest values of an image, everywhere in it.
    """
    (_, _, fan_in, batch), fan_out = x.shape, len(weight)
    image = _to_frequencies(x, waves.columns, waves.rows)  # (F N, 2, C, B)
    taps = _to_frequencies(weight.permute(3, 2, 0, 1).contiguous(), waves.tap_columns, waves.tap_rows)
    real, imag = taps.unbind(1)
    filters = torch.stack([torch.stack([real, -imag], 2), torch.stack([imag, real], 2)], 1)  # (F N, 2, O, 2, C)
    half, period = len(waves.columns) // 2, len(waves.rows) // 2
    y = filters.view(-1, 2 * fan_out, 2 * fan_in).bmm(image.flatten(1, 2)).view(half, 2 * period, -1)
    y = waves.rows_back.expand(half, -1, -1).bmm(y).view(2 * half, -1)
    y = (waves.columns_back @ y).view(len(waves.columns_back), -1, fan_out, batch)
    with torch.no_grad():
        seen = (waves.column_reach @ x.abs().amax(2).flatten(1)).view(len(y), -1, batch)
        silent = (waves.row_reach.expand(len(y), -1, -1).bmm(seen) == 0).unsqueeze(2)
    return _Silenced.apply(y, silent)  # type: ignore[no-untyped-call, no-any-return]


def _to_frequencies(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Transform the first two axes: `(W, H, …)` -> `(F N, 2, …)`."""
    half = len(columns) // 2
    y = (columns @ x.flatten(1)).view(half, 2 * x.shape[1], -1)
    return rows.expand(half, -1, -1).bmm(y).view(half * len(rows) // 2, 2, *x.shape[2:])


def _resample(x: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Multiply both axes of images by matrices; None leaves an axis as it is."""
    if rows is None and columns is None:
        return x
    # Half precision is for convolutions; pixels are mixed in float32 at least.
    with torch.autocast(x.device.type, enabled=False):
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        y = y if columns is None else y @ columns.mT  # (..., W) -> (..., W')
        y = y if rows is None else rows @ y  # (..., H, W') -> (..., H', W')
    return y.to(x.dtype)
