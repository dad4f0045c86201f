"""Which backend and which engine: by measured costs, from shapes."""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from scalesteer.fast.engine import Engine
from scalesteer.fast.spectral import Frequencies
from scalesteer.fast.taps import Taps
from scalesteer.geometry import Axes, Filters

# All were measured in training, float32: on two CPU cores and, where CUDA is named, on an H200.
FEW_CHANNELS, FEW_CHANNELS_CUDA = 2, 4  # up to so many, taps; on CUDA measured for one, counted for the others
FEW_TAPS = 400  # on a CPU and unless filters are symmetric, taps only up to so many of the largest window
TILE, TILE_REACHES = 32, 4  # outputs of a tile: at least so many, about so many times the reach; the optimum is flat
MORE_THAN_TILES = 2.5  # from so many tiles along an axis on, an image is cut
# What each backend costs: nanoseconds for each unit of `work`, in training and without gradients. Fitted by
# `python -m speed costs` to layers of every shape, on one thread of a CPU, in a run before that of results/bench.
COSTS: dict[str, dict[str, tuple[float, ...]]] = {
    "training": {
        "direct": (0.063, 0.0843, 0.905, 0.257, 0.953, 1.16, 0.0),
        "taps": (0.0231, 2.23, 1.88, 40900.0),
        "frequencies": (0.137, 0.0344, 9.19, 1.71, 14.7, 138000.0),
    },
    "inference": {
        "direct": (0.0193, 0.0173, 0.2, 0.00128, 0.427, 0.41, 0.0),
        "taps": (0.02, 0.406, 0.458, 0.0),
        "frequencies": (0.0338, 0.0127, 4.05, 0.232, 4.12, 83000.0),
    },
}
# On CUDA: with few channels, up to this window "direct" is as fast, for symmetric filters, and for others. Then the
# multiply-adds that a direct convolution does in the time of one of ours; few channels slow it down, and groups of few
# more so. The first of these holds on an H200 (docs/speed.md); the others are not measured there.
SMALL_WINDOW, SMALL_WINDOW_ONE_SIDED = 3, 9
RELATIVE_COST, RELATIVE_COST_OF_FEW, RELATIVE_COST_IN_GROUPS, FEW_IN_GROUP = 4.0, 1.0, 0.25, 8
MOST_PIXELS = 1 << 19  # a CUDA grid has at most 65,535 programs along an axis: blocks of 16 pixels
KERNELS_RUN_ON = {"cuda"}  # tests add the CPU, where Triton interprets the kernels


def work(axes: Axes, filters: Filters, groups: int, batch: int, tiles: bool = True) -> dict[str, tuple[float, ...]]:
    """What "direct" and the engine behind "fast" have to do, as counts whose costs are fitted: :data:`COSTS`.

    Direct: multiply-adds, the same without input channels (few are slow), that in groups, that with a stride, maps, and
    filters. Frequencies: products, transforms, maps, filters, and what is moved for groups. Taps: multiply-adds, pixels
    that are laid out, and maps. Calls are last.
    """
    (out_channels, channels), scales = filters.weights.shape[:2], len(filters.sizes)
    rows, columns = axes
    pixels, taps, parts = batch * rows.count * columns.count, sum(filters.areas), 1 if filters.symmetric else 2
    maps = pixels * out_channels * scales
    sums = pixels * taps * (-(-out_channels // 16) * 16 if groups == 1 else out_channels)  # vectors have 16 channels
    slow = sums if groups > 1 else 0, sums if rows.stride * columns.stride > 1 else 0
    direct = sums * channels, sums, *slow, maps, out_channels * channels * taps, scales
    if channels <= FEW_CHANNELS and groups == 1 and _few_taps(filters):
        counts = pixels * out_channels * channels * taps, pixels * channels * max(filters.areas)
        return {"direct": direct, "taps": (parts * counts[0] / 2, parts * counts[1] / 2, maps, scales)}
    if tiles and (cut := tiles_of(axes)) is not None:
        batch *= -(-rows.count // cut[0].count) * -(-columns.count // cut[1].count)
        rows, columns = cut
    spectra = scales * rows.period * columns.period * out_channels
    back = scales * out_channels * rows.period * columns.count * (2 * columns.period + rows.count)
    there = channels * groups * rows.period * columns.length * (2 * columns.period + rows.length)
    products, maps = spectra * channels * parts, batch * rows.count * columns.count * out_channels * scales
    moved = batch * spectra if groups > 1 else 0
    return {"direct": direct, "frequencies": (batch * products, batch * (back + there), maps, products, moved, scales)}


def choose_backend(axes: Axes, filters: Filters, groups: int, tiles: bool = True, batch: int = 16) -> str:
    """The backend that the measured cost favours for static shapes, "fast" or "direct".

    With `tiles` a large image may be cut into tiles, as it is for the maximum over scales.
    """
    if any(isinstance(axis.length, torch.SymInt) for axis in axes):
        return "direct"  # a size that is not known yet cannot be compared, and this one is never much slower
    if filters.weights.device.type == "cuda":
        return _choose_on_cuda(axes, filters, groups, tiles)
    # A compiler may yet make a symbol of the batch, and would then compile anew for every choice.
    batch = 16 if torch.compiler.is_compiling() or isinstance(batch, torch.SymInt) else max(1, batch)
    kind = "training" if torch.is_grad_enabled() and filters.weights.requires_grad else "inference"
    found = work(axes, filters, groups, batch, tiles)
    direct, fast = (sum(c * n for c, n in zip(COSTS[kind][name], found[name], strict=True)) for name in found)
    return "fast" if direct > fast else "direct"


def _choose_on_cuda(axes: Axes, filters: Filters, groups: int, tiles: bool) -> str:
    in_channels = filters.weights.shape[1]
    if in_channels <= FEW_CHANNELS and groups == 1 and _few_taps(filters):
        small = SMALL_WINDOW if filters.symmetric else SMALL_WINDOW_ONE_SIDED
        return "fast" if max(filters.sizes) > small else "direct"
    rows, columns = (tiles_of(axes) if tiles else None) or axes
    pixels, spectrum = rows.count * columns.count, rows.period * columns.period
    direct = pixels * in_channels * sum(filters.areas)
    product = spectrum * in_channels * (1 if filters.symmetric else 2)
    fast = len(filters.sizes) * (2 * spectrum * columns.count + rows.period * pixels + product)
    of_few = RELATIVE_COST_OF_FEW if groups == 1 else RELATIVE_COST_IN_GROUPS
    cost = of_few if in_channels < FEW_IN_GROUP else RELATIVE_COST
    return "fast" if direct > cost * fast else "direct"


def _few_taps(filters: Filters) -> bool:
    return filters.symmetric or filters.weights.shape[1] * max(filters.areas) <= FEW_TAPS


def pick_engine(x: Tensor, filters: Filters, groups: int, image_gradient: bool = False) -> type[Engine]:
    """The fastest engine for a layer, where nothing is being traced."""
    channels = filters.weights.shape[1]
    # A kernel needs memory to read: an empty batch has none.
    real = x.numel() > 0 and x.shape[-2] * x.shape[-1] <= MOST_PIXELS
    suited = real and filters.weights.dtype != torch.float64 and groups == 1
    if suited and x.device.type in KERNELS_RUN_ON and has_triton(x.device):
        from scalesteer.fast import triton

        cost = channels if filters.symmetric else 2 * channels  # every tap is on its own, half of them are not spared
        return triton.FusedTaps if cost <= FEW_CHANNELS_CUDA and not image_gradient else triton.FusedFrequencies
    few = _few_taps(filters)
    # Pairs are made of hundreds of slices: a GPU would launch each.
    return Taps if few and channels <= FEW_CHANNELS and groups == 1 and x.device.type == "cpu" else Frequencies


def works_with_basis(engine: type[Engine], filters: Filters) -> bool:
    """Whether an engine is faster with weights and a basis than with the taps that are made of them."""
    basis = filters.basis
    if basis is not None and engine is Frequencies:
        return basis.device.type == "cpu" and len(filters.sizes) * len(basis) <= sum(filters.areas)
    return True


@lru_cache(maxsize=64)
def has_triton(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    if device.type != "cuda":
        return True
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # Triton needs one to launch
    return compiler is not None and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def tiles_of(axes: Axes) -> Axes | None:
    """The axes of one tile, if an image is so large that it is cut."""
    rows, columns = axes
    if max(rows.count, columns.count) <= MORE_THAN_TILES * TILE:
        return None
    counts = [max(TILE, TILE_REACHES * axis.reach) for axis in axes]
    if rows.count <= MORE_THAN_TILES * counts[0] and columns.count <= MORE_THAN_TILES * counts[1]:
        return None
    return rows.tile(counts[0]), columns.tile(counts[1])
