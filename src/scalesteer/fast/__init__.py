"""The fast algorithm as a whole: which form suits a layer, pieces and tiles, gradients, and when it pays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.fast import spectral
from scalesteer.fast.spectral import (
    Axis,
    Bank,
    Frequencies,
    Steered,
    first,
    make_axes,
    no_autocast,
    split_taps,
    window_sizes,
)
from scalesteer.fast.taps import Taps

if TYPE_CHECKING:
    from scalesteer.functional import Geometry

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


def steerable(x: Tensor, filters: Steered, geometry: Geometry) -> bool:
    """Whether :func:`max_response` is faster with coefficients than with the filters that are made of them."""
    if filters.basis.requires_grad or type(filters.basis) not in (Tensor, torch.nn.Parameter):
        return False  # transforms of the basis are kept, and no gradient goes through them
    if fusible(x, geometry):
        return True
    numbers = len(filters.sizes) * len(filters.basis)
    fewer = numbers <= sum(n * n for n in filters.sizes)
    return fewer and filters.coefficients.device.type == "cpu" and _kind(filters, geometry) is Frequencies


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
    """Whether :func:`max_response` has a form with kernels of its own: on CUDA in float32, where Triton runs."""
    # A kernel needs memory to read: a fake tensor has none, and neither has an empty batch.
    real = type(x) in (Tensor, torch.nn.Parameter) and x.numel() > 0
    return real and x.dtype != torch.float64 and geometry.groups == 1 and _kernels_run_on(x.device)


_FUSED_ON = {"cuda"}  # tests add the CPU, where Triton interprets the kernels


def _kernels_run_on(device: torch.device) -> bool:
    return device.type in _FUSED_ON and _has_triton(device)


@lru_cache(maxsize=64)
def _has_triton(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    if device.type != "cuda":
        return True
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # Triton needs one to launch
    return compiler is not None and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def max_response(
    x: Tensor,
    margin: tuple[int, int],
    filters: Bank,
    geometry: Geometry,
    winners: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The largest response over scales and the index of the winner (uint8), with a backward pass of the same kind.

    Args are those of :func:`responses`, or :class:`Steered` filters where :func:`steerable` says so; both results are
    `(B, O, H', W')`. Without `winners` the second may be None.
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
        bank: Bank
        if isinstance(filters, Steered):
            bank = filters._replace(coefficients=filters.coefficients.to(work))
        else:
            bank = [w.to(work) for w in filters]
        if fusible(images, geometry) and images.shape[-2] * images.shape[-1] <= _MOST_PIXELS:
            best, winner = _fused_max_response(images, margin, bank, geometry)
        else:
            if isinstance(bank, Steered) and images.device.type == "cuda":
                bank = split_taps(*bank)
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


# Programs along an axis of a grid are at most 65,535 in CUDA: images of a piece, and blocks of 16 pixels with a margin.
_MOST_IMAGES, _MOST_PIXELS = 65535, 1 << 19


def _fused_max_response(
    images: Tensor, margin: tuple[int, int], filters: Bank, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    from scalesteer.fast import triton as kernels

    sizes, (out_channels, channels) = window_sizes(filters), first(filters).shape[:2]
    axes = make_axes((images.shape[-2], images.shape[-1]), margin, sizes, geometry)
    kind = kernels.kind(channels, torch.is_grad_enabled() and images.requires_grad)
    # The filters' transforms are made for every piece: a piece should not be smaller than they are.
    fixed, each = kind.numbers(*axes, channels, out_channels, len(sizes))
    budget = max(spectral.memory_budget * (1 if torch.is_grad_enabled() else 4), images.element_size() * fixed)
    step = _step(len(images), min(_MOST_IMAGES, budget // (images.element_size() * each)))
    if isinstance(filters, Steered):
        weights, basis = filters.coefficients, filters.basis
    else:
        weights, basis = torch.cat([w.flatten(2) for w in filters], dim=2), None
    results = [
        _FusedMaxResponse.apply(piece, weights, basis, sizes, margin, geometry)  # type: ignore[no-untyped-call]
        for piece in images.split(step)
    ]
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
    most = min(_PIECE, spectral.memory_budget) if x.device.type == "cpu" else spectral.memory_budget
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
        index = torch.zeros_like(top, dtype=torch.uint8) if winners else None
        for i in range(1, count):
            response = correlator.response(i)
            keep_larger(top, index, response, i)
            if i == count - 1:  # a non-finite response always shows: see functional.max_over_scales
                top += response.sub_(response)
        best[piece] = correlator.outwards(top)
        if winner is not None and index is not None:
            winner[piece] = correlator.outwards(index)
    return best, winner


def keep_larger(best: Tensor, winner: Tensor | None, response: Tensor, i: int) -> None:
    """Let scale `i` take part in a running maximum, in place; `winner` holds bytes."""
    if winner is not None:  # a later winner has the larger index: the maximum of indices
        torch.maximum(winner, torch.gt(response, best).view(torch.uint8).mul_(i), out=winner)
    torch.maximum(best, response, out=best)


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
        ctx.basis = filters[1] if sizes else None  # by this very object its transforms are found again
        ctx.mark_non_differentiable(winner)
        return best, winner

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, winner, *filters = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[4:])
        bank: Bank = Steered(filters[0], ctx.basis, ctx.sizes) if ctx.sizes else filters
        with no_autocast(x.device):
            if torch.is_grad_enabled() or plain_only():

                def make(*filters: Tensor) -> Sequence[Tensor]:
                    return split_taps(filters[0], filters[1], ctx.sizes) if ctx.sizes else filters

                grad, *rest = _plain_gradients((x, *filters), make, winner, ctx.margin, ctx.geometry, needs, grads[0])
                return grad, None, None, None, *rest
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
    """The same on CUDA, with :mod:`scalesteer.fast.triton`; saves the image's transform too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, basis: Tensor | None, *about: Any) -> tuple[Tensor, Tensor]:
        from scalesteer.fast import triton as kernels

        ctx.about, ctx.basis = about, basis  # by this very object its transforms are found again
        with torch.cuda.device_of(x):  # Triton launches on the current device
            fused = kernels.kind(x.shape[1], ctx.needs_input_grad[0])(x, kernels.Layer(weights, basis, *about))
            spectrum = fused.read(x)
            best, winner = fused.maximum(spectrum)
        ctx.save_for_backward(x, winner, spectrum, weights, basis)
        ctx.mark_non_differentiable(winner)
        return best, winner

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from scalesteer.fast import triton as kernels

        x, winner, spectrum, weights, basis = ctx.saved_tensors
        sizes, margin, geometry = ctx.about
        needs = ctx.needs_input_grad[:2]

        def make(weights: Tensor) -> Sequence[Tensor]:
            return split_taps(weights, basis, sizes)

        with no_autocast(x.device):
            if torch.is_grad_enabled() or plain_only():
                found = _plain_gradients((x, weights), make, winner, margin, geometry, needs, grads[0])
                return *found, None, None, None, None
            fused = kernels.kind(x.shape[1], needs[0])(x, kernels.Layer(weights, ctx.basis, *ctx.about))
            return *fused.gradients(spectrum, winner, grads[0].to(x.dtype), *needs), None, None, None, None


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
# windows of 3 to 17, images of 14 to 96 pixels, and 32 groups of one channel. The first holds on CUDA too (see
# docs/speed.md); groups are not measured there.
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
        taps = geometry.kernel_size - 1
        span = [a.dilation * taps + 1 + (_tile(a) - 1) * a.stride for a in (rows, columns)]
        rows, columns = make_axes((span[0], span[1]), (0, 0), tuple(sizes), replace(geometry, padding=(0, 0)))
    pixels = rows.count * columns.count
    spectrum = rows.period * columns.period
    direct = pixels * in_channels * sum(n * n for n in sizes)
    fast = len(sizes) * (2 * spectrum * columns.count + rows.period * pixels + spectrum * in_channels)
    cost = _RELATIVE_COST_IN_GROUPS if geometry.groups > 1 and in_channels < 8 else _RELATIVE_COST
    return "spectral" if direct > cost * fast else "direct"
