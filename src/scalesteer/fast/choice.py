"""Which backend and which engine: rules from shapes, with thresholds that were measured."""

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

# All were measured in float32: on two CPU cores and, where CUDA is named, on an H200.
# "fast" is faster than one convolution for each scale if all scales together have at least this number of taps: on a
# CPU without gradients (a layer of 105 is slower, one of 106 faster) and in training (at 92 most are slower, at 130 all
# faster), on two kinds of AMD EPYC; on CUDA (9 slower, 34 faster).
LEAST_TAPS, LEAST_TAPS_TRAINING, LEAST_TAPS_CUDA = 106, 100, 30
# Responses without their maximum are each transformed back. On a CPU few images or input channels are not worth it
# (group-resnet takes up to 1.7 times as long for one image; four scales of one to three channels, up to 2.9 times).
LEAST_IMAGES, LEAST_CHANNELS_TRAINING, LEAST_CHANNELS = 4, 6, 12
FEW_CHANNELS, FEW_CHANNELS_CUDA = 2, 4  # the most for products with pixels; on CUDA measured for one, else counted
FEW_TAPS = 400  # on a CPU the most for them, channels times taps of the largest window, unless filters are symmetric
TILE, TILE_REACHES = 32, 4  # a tile has at least 32 outputs along an axis, or 4 times the reach; the optimum is flat
MORE_THAN_TILES = 2.5  # an image with more outputs than 2.5 tiles along an axis is cut
MOST_PIXELS = 1 << 19  # a CUDA grid has at most 65,535 programs along an axis: blocks of 16 pixels
KERNELS_RUN_ON = {"cuda"}  # tests add the CPU, where Triton interprets the kernels


def choose_backend(axes: Axes, filters: Filters, images: int | None = None) -> str:
    """Choose "fast" where filters have many taps, otherwise "direct".

    Taps are counted over all scales, the sum of the squares of the windows' sizes. A stride divides them: only a direct
    convolution does less work then. `images`: how many, if there is no maximum over several scales.
    """
    rows, columns = axes
    if isinstance(rows.length, torch.SymInt) or isinstance(columns.length, torch.SymInt):
        return "direct"  # frequencies of a size that is not known yet take many operations
    training = torch.is_grad_enabled() and filters.weights.requires_grad
    least = LEAST_TAPS_TRAINING if training else LEAST_TAPS
    if filters.weights.device.type == "cuda":
        least = LEAST_TAPS_CUDA
    elif images is not None:
        channels = LEAST_CHANNELS_TRAINING if training else LEAST_CHANNELS
        if images < LEAST_IMAGES or (len(filters.sizes) > 1 and filters.weights.shape[1] < channels):
            return "direct"
    return "fast" if sum(filters.areas) >= least * rows.stride * columns.stride else "direct"


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
