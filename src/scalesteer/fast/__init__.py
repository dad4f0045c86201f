"""The numbers of one convolution per scale, faster: the choice of an engine, pieces and tiles, gradients.

An engine is an algorithm for the maximum over scales; :class:`spectral.Engine` is what all have in common. They take
:class:`scalesteer.geometry.Filters` and the two axes along which windows lie:

- :class:`spectral.Frequencies`: products of frequencies; every device
- :class:`taps.Taps`: few input channels, CPU
- :class:`triton.FusedFrequencies`: as the first, on CUDA, all scales in each product
- :class:`triton.FusedTaps`: as the second, on CUDA
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.fast.spectral import Engine, Frequencies, holds_numbers, keep_larger
from scalesteer.fast.taps import Taps
from scalesteer.geometry import Axes, Filters, Maximum, no_autocast

__all__ = ["being_traced", "choose_backend", "keep_larger", "max_over_scales", "memory_budget", "responses"]

memory_budget = 1 << 28
"""Bytes that one piece of work may take beside its input and output, roughly; set it to trade speed for memory. On
CUDA, where no gradient is wanted, nothing else is kept, and a piece may take four times as much."""

# Thresholds. All were measured in training, float32: on two CPU cores and, where CUDA is named, on an H200.
CPU_PIECE = 48 << 20  # bytes of one piece on a CPU: with more, new pages and misses of the cache cost more than calls
FEW_CHANNELS, FEW_CHANNELS_CUDA = 2, 4  # up to so many, taps; on CUDA measured for one, counted for the others
FEW_TAPS = 400  # on a CPU and unless filters are symmetric, taps only up to so many of the largest window
TILE, TILE_REACHES = 32, 4  # outputs of a tile: at least so many, about so many times the reach; the optimum is flat
MORE_THAN_TILES = 2.5  # from so many tiles along an axis on, an image is cut
MOST_SCALES = 255  # winners are bytes
# What each backend costs: nanoseconds for each unit of `work`, in training and without gradients. Fitted by
# `python -m benchmarks costs` to layers of every shape, on one thread of a CPU.
COSTS: dict[str, dict[str, tuple[float, ...]]] = {
    "training": {
        "direct": (0.0669, 0.086, 0.931, 0.771, 5.57, 0.0),
        "taps": (0.0193, 3.43, 3.33, 0.0),
        "frequencies": (0.0673, 0.0657, 10.3, 2.18, 0.0),
    },
    "inference": {
        "direct": (0.0179, 0.0227, 0.184, 0.432, 1.18, 32400.0),
        "taps": (0.0162, 1.12, 0.925, 0.0),
        "frequencies": (0.0142, 0.0302, 2.34, 0.256, 186000.0),
    },
}
# A CUDA grid has at most 65,535 programs along an axis: images of a piece, and blocks of 16 pixels.
MOST_IMAGES, MOST_PIXELS = 65535, 1 << 19
KERNELS_RUN_ON = {"cuda"}  # tests add the CPU, where Triton interprets the kernels


def being_traced() -> bool:
    """Whether a transformation is at work that sees plain operations only: a compiler, a tracer, or `torch.func`."""
    # The last three are private names of torch (2.11 to 2.13); there are no public ones. test_fast.py guards them.
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def work(axes: Axes, filters: Filters, groups: int, batch: int, tiles: bool = True) -> dict[str, tuple[float, ...]]:
    """What "direct" and the engine behind "fast" have to do, as counts whose costs are fitted: :data:`COSTS`.

    Direct: multiply-adds, the same without input channels (few are slow), that in groups, maps, and filters.
    Frequencies: products,
    transforms, maps, and filters. Taps: multiply-adds, pixels that are laid out, and maps. Calls are last.
    """
    (out_channels, channels), scales = filters.weights.shape[:2], len(filters.sizes)
    rows, columns = axes
    maps, taps = batch * rows.count * columns.count * out_channels, sum(filters.areas)
    in_groups = maps * taps if groups > 1 else 0
    direct = maps * channels * taps, maps * taps, in_groups, maps * scales, out_channels * channels * taps, scales
    if channels <= FEW_CHANNELS and groups == 1 and _few_taps(filters):
        half = 2 if filters.symmetric else 1
        pixels = batch * rows.count * columns.count * channels * max(filters.areas) / half
        return {"direct": direct, "taps": (maps * channels * taps / half, pixels, maps * scales, scales)}
    if tiles and (cut := _tiles(axes)) is not None:
        batch *= -(-rows.count // cut[0].count) * -(-columns.count // cut[1].count)
        rows, columns = cut
    period, parts = rows.period * columns.period, 1 if filters.symmetric else 2
    products = scales * period * channels * parts * out_channels
    back = scales * out_channels * rows.period * columns.count * (2 * columns.period + rows.count)
    there = channels * groups * rows.period * columns.length * (2 * columns.period + rows.length)
    maps = batch * rows.count * columns.count * out_channels * scales
    return {"direct": direct, "frequencies": (batch * products, batch * (back + there), maps, products, scales)}


def choose_backend(axes: Axes, filters: Filters, groups: int, tiles: bool = True, batch: int = 16) -> str:
    """The backend that the measured cost favours for static shapes, "fast" or "direct".

    With `tiles` a large image may be cut into tiles, as it is for the maximum over scales.
    """
    if any(isinstance(axis.length, torch.SymInt) for axis in axes):
        return "direct"  # a size that is not known yet cannot be compared, and this one is never much slower
    batch = 16 if isinstance(batch, torch.SymInt) else max(1, batch)
    kind = "training" if torch.is_grad_enabled() and filters.weights.requires_grad else "inference"
    found = work(axes, filters, groups, batch, tiles)
    direct, fast = (sum(c * n for c, n in zip(COSTS[kind][name], found[name], strict=True)) for name in found)
    return "fast" if direct > fast else "direct"


def _few_taps(filters: Filters) -> bool:
    return filters.symmetric or filters.weights.shape[1] * max(filters.areas) <= FEW_TAPS


def pick_engine(x: Tensor, filters: Filters, groups: int) -> type[Engine]:
    """The fastest engine for a layer, where nothing is being traced."""
    channels = filters.weights.shape[1]
    # A kernel needs memory to read: a fake tensor has none, and neither has an empty batch.
    real = holds_numbers(x) and x.numel() > 0 and x.shape[-2] * x.shape[-1] <= MOST_PIXELS
    suited = real and x.dtype != torch.float64 and groups == 1
    if suited and x.device.type in KERNELS_RUN_ON and _has_triton(x.device):
        from scalesteer.fast import triton

        cost = channels if filters.symmetric else 2 * channels  # every tap is on its own, half of them are not spared
        few = cost <= FEW_CHANNELS_CUDA and not (torch.is_grad_enabled() and x.requires_grad)
        return triton.FusedTaps if few else triton.FusedFrequencies
    few = _few_taps(filters)
    # Pairs are made of hundreds of slices: a GPU would launch each.
    return Taps if few and channels <= FEW_CHANNELS and groups == 1 and x.device.type == "cpu" else Frequencies


def _works_with_basis(engine: type[Engine], filters: Filters) -> bool:
    """Whether an engine is faster with weights and a basis than with the taps that are made of them."""
    basis = filters.basis
    if basis is None or basis.requires_grad or not holds_numbers(basis):
        return False  # what is made of a basis is kept, and no gradient goes through it
    if engine is Frequencies:
        return basis.device.type == "cpu" and len(filters.sizes) * len(basis) <= sum(filters.areas)
    return True


@lru_cache(maxsize=64)
def _has_triton(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    if device.type != "cuda":
        return True
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # Triton needs one to launch
    return compiler is not None and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def result_and_work_dtype(x: Tensor, weights: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the result, as that of a convolution would be, and the dtype of the work."""
    dtype = torch.promote_types(x.dtype, weights.dtype)
    if dtype != torch.float64 and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return dtype, torch.promote_types(dtype, torch.float32)


def responses(x: Tensor, filters: Filters, axes: Axes, groups: int, exact_ties: bool = False) -> Iterator[Tensor]:
    """Responses `(B, O, H', W')` of one scale after the other, equal to those of direct convolutions; plain operations.

    With `exact_ties` they are exactly zero where windows see zeros only, as a maximum needs; their gradients stay.
    """
    dtype, work = result_and_work_dtype(x, filters.weights)
    filters = filters.finished()
    with no_autocast(x.device):
        filters = replace(filters, weights=filters.weights.to(work))
        kind = Frequencies if being_traced() or pick_engine(x, filters, groups) is not Taps else Taps
        engine = kind(filters, axes, groups, x.to(work))
        engine.load_batch(x.to(work))
        blank = engine.blank_scales() if exact_ties else None
        if blank is not None:
            blank = blank.repeat_interleave(filters.weights.shape[0] // groups, dim=1)
        for i in range(len(filters.sizes)):
            response = engine.outwards(engine.response(i))
            if blank is not None:
                response = response - torch.where(blank > i, response, 0).detach()
            yield response.to(dtype).contiguous()


def max_over_scales(x: Tensor, filters: Filters, axes: Axes, groups: int, winners: bool = True) -> Maximum:
    """The largest response over scales and the index of the winner (uint8), with a backward pass of the same kind.

    Both are `(B, O, H', W')`; without `winners` the second may be None.
    """
    dtype, work = result_and_work_dtype(x, filters.weights)
    tiles = _tiles(axes)
    with no_autocast(x.device):
        images = (x if tiles is None else _cut(x, axes, tiles)).to(work)
        engine = pick_engine(images, filters, groups)
        if not (holds_numbers(images) and _works_with_basis(engine, filters)):
            filters = filters.finished()
        weights = filters.weights.to(work)
        task = _Task.plan(engine, filters, tiles or axes, groups, images)
        if torch.is_grad_enabled() and (images.requires_grad or weights.requires_grad):
            best, winner = _MaxOverScales.apply(images, weights, task)  # type: ignore[no-untyped-call]
        else:
            best, winner = task.run(images, weights, winners)
    if tiles is not None:
        best, winner = _join(best, x.shape[0], axes), None if winner is None else _join(winner, x.shape[0], axes)
    return best.to(dtype), winner


class _Task(NamedTuple):
    """What both passes need to know beside the tensors that may have a gradient."""

    engine: type[Engine]
    basis: Tensor | None
    sizes: tuple[int, ...]
    symmetric: bool
    axes: Axes
    groups: int
    step: int  # images of a piece

    @classmethod
    def plan(cls, engine: type[Engine], filters: Filters, axes: Axes, groups: int, x: Tensor) -> _Task:
        for_filters, for_image = (x.element_size() * floats for floats in engine.floats(filters, axes, groups))
        if x.device.type == "cpu":
            room = min(CPU_PIECE, memory_budget)
        else:  # what an engine makes of the filters may be made for every piece: no piece should be smaller
            room = max(memory_budget * (1 if torch.is_grad_enabled() else 4), for_filters)
        step = _step(len(x), min(MOST_IMAGES, room // for_image))
        return cls(engine, filters.basis, filters.sizes, filters.symmetric, axes, groups, step)

    def filters(self, weights: Tensor) -> Filters:
        return Filters(weights, self.basis, self.sizes, self.symmetric)

    def start(self, x: Tensor, weights: Tensor) -> tuple[Engine, list[slice]]:
        """An engine, and the pieces of a batch."""
        pieces = [slice(i, i + self.step) for i in range(0, max(1, len(x)), self.step)]
        return self.engine(self.filters(weights), self.axes, self.groups, x, len(pieces), memory_budget), pieces

    def run(self, x: Tensor, weights: Tensor, winners: bool = True, kept: list[Any] | None = None) -> Maximum:
        """The maximum over scales; what the backward pass is to give back to the engine is added to `kept`."""
        best = x.new_empty(len(x), len(weights), self.axes[0].count, self.axes[1].count)
        winner = torch.empty_like(best, dtype=torch.uint8) if winners else None
        with torch.cuda.device_of(x):  # Triton launches on the current device
            engine, pieces = self.start(x, weights)
            for piece in pieces:
                found = engine.load_batch(x[piece])
                if kept is not None:
                    kept.append(found)
                engine.max_over_scales(best[piece], None if winner is None else winner[piece])
        return best, winner


class _MaxOverScales(torch.autograd.Function):
    """The maximum over scales; saves the image, the weights, the winner, and what the engine asks for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, task: _Task) -> tuple[Tensor, Tensor]:
        kept: list[Tensor | None] = []
        best, winner = task.run(x, weights, kept=kept)
        # Saved, a basis that changes before the backward pass is noticed; its tables are found by the very object.
        ctx.save_for_backward(x, winner, weights, task.basis, *kept)
        ctx.task = task
        ctx.mark_non_differentiable(winner)
        return best, winner  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, winner, weights, _, *kept = ctx.saved_tensors
        task: _Task = ctx.task
        image, weight = ctx.needs_input_grad[:2]
        with no_autocast(x.device):
            if torch.is_grad_enabled() or being_traced():
                return *_plain_gradients(x, weights, task, winner, (image, weight), grads[0]), None
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if image else None
            engine, pieces = task.start(x, weights)
            for piece, found in zip(pieces, kept, strict=True):
                engine.load_batch(x[piece], found)
                grad = grads[0][piece].to(x.dtype)
                engine.gradients(winner[piece], grad, None if grad_x is None else grad_x[piece], weight)
            return grad_x, engine.weight_gradient() if weight else None, None


def _plain_gradients(
    x: Tensor, weights: Tensor, task: _Task, winner: Tensor, needs: tuple[bool, bool], grad: Tensor
) -> list[Tensor | None]:
    """Gradients of image and weights that can be differentiated again: plain operations, the winners given."""
    with torch.enable_grad():
        # Aliases, so that nothing is followed from the image back to weights that it may depend on.
        inputs = x.view_as(x), weights.view_as(weights)
        best = torch.zeros((), dtype=x.dtype, device=x.device)
        for i, response in enumerate(responses(inputs[0], task.filters(inputs[1]), task.axes, task.groups)):
            best = best + response * (winner == i)
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad(best, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs]


def _step(images: int, most: int) -> int:
    """Images of a piece, `most` at most, so that all pieces are of about one size."""
    return max(1, -(-images // max(1, -(-images // max(1, most)))))


def _tiles(axes: Axes) -> Axes | None:
    """The axes of one tile, if an image is so large that it is cut."""
    rows, columns = (axis.tile(max(TILE, TILE_REACHES * axis.reach)) for axis in axes)
    large = axes[0].count > MORE_THAN_TILES * rows.count or axes[1].count > MORE_THAN_TILES * columns.count
    return (rows, columns) if large else None


def _cut(x: Tensor, axes: Axes, tiles: Axes) -> Tensor:
    """Overlapping tiles `(B ny nx, C, h, w)`, each with all that its own windows see."""
    padding: list[int] = []
    for axis, tile in zip(axes, tiles, strict=True):
        before = axis.beyond[0]
        length = (-(-axis.count // tile.count) - 1) * tile.count * axis.stride + tile.length
        padding = [before, length - before - axis.length, *padding]  # columns come first
    cut = F.pad(x, padding)
    for i, tile in enumerate(tiles):
        cut = cut.unfold(2 + i, tile.length, tile.count * tile.stride)
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)  # from (B, C, ny, nx, h, w)


def _join(maps: Tensor, batch: int, axes: Axes) -> Tensor:
    """Outputs of tiles `(B ny nx, O, h, w)` side by side: `(B, O, H', W')`."""
    channels, height, width = maps.shape[1:]
    ny, nx = -(-axes[0].count // height), -(-axes[1].count // width)
    joined = maps.view(batch, ny, nx, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    joined = joined.reshape(batch, channels, ny * height, nx * width)
    return joined[..., : axes[0].count, : axes[1].count].contiguous()
