"""Coefficients -> filters -> responses -> pooled map: tensors in, tensors out.

The plain reference, one convolution per scale, is here: the maximum is taken as responses come, so that the maps of all
scales never lie in memory together. The fast algorithm for the same numbers is in :mod:`scalesteer.fast`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer import _checks, fast
from scalesteer.fast.maximum import running_maximum
from scalesteer.fast.memory import Cache, being_captured, holds_numbers
from scalesteer.geometry import Axes, Filters, Geometry

BACKENDS = ("auto", "direct", "fast")
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


def scale_conv2d(
    x: Tensor,
    filters: Filters,
    bias: Tensor | None,
    geometry: Geometry,
    *,
    reduce: Literal["max"] | None = "max",
    backend: str = "direct",
    return_scales: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Correlate an image with one filter at several scales and keep the strongest response at each pixel.

    All windows share one centre. What larger windows reach beyond `geometry.padding` is filled as
    `geometry.padding_mode` says.

    Args:
        x: Images.
        filters: The filter at each scale, ascending.
        bias: Added to the result, or None.
        geometry: Stride, padding, dilation and groups.
        reduce: ``"max"`` over scales, or None for the responses of all of them.
        backend: ``"direct"``, ``"fast"`` or ``"auto"``; the last two rely on `filters.symmetric`.
        return_scales: Also return the index of the winning scale at each pixel (int64).

    Shape:
        `(B, C, H, W)` -> `(B, O, H', W')`, or `(B, O, S, H', W')` with ``reduce=None``.
    """
    plain = reduce is None or len(filters.sizes) > fast.MOST_SCALES or fast.needs_plain_operations(x, backend)
    (height, width), axes, backend = _arrange(x, filters, geometry, reduce, backend)
    if height > 0 or width > 0:
        x = F.pad(x, (width, width, height, height), mode=geometry.padding_mode)
    groups = geometry.groups
    winner: Tensor | None = None
    if backend != "direct" and not plain:
        y, winner = fast.max_over_scales(x, filters, bias, axes, groups, return_scales)
    else:
        if backend == "direct":
            responses = direct_responses(x, filters, axes, groups)
        else:
            exact_ties = reduce is not None and (return_scales or torch.is_grad_enabled())
            responses = fast.responses(x, filters, axes, groups, exact_ties)
        if reduce is None:
            y = torch.stack(list(responses), dim=2)  # (B, O, S, H', W')
        else:
            y, winner = running_maximum(responses, len(filters.sizes), return_scales)
        if bias is not None:
            bias = bias.to(y.dtype).view(-1, *[1] * (y.ndim - 2))
            y = y + bias if fast.being_traced() else y.add_(bias)  # in place it takes no new memory
    return (y, winner.long().contiguous()) if return_scales and winner is not None else y


def direct_responses(x: Tensor, filters: Filters, axes: Axes, groups: int) -> Iterator[Tensor]:
    """One `F.conv2d` per scale, `(B, O, H', W')` each: the reference that everything is checked against."""
    stride, dilation = [axis.stride for axis in axes], [axis.dilation for axis in axes]
    for weight in filters.windows():
        # How far windows of this size reach beyond the image; where they stay inside, the image is cut.
        beyond = [axis.dilation * (weight.shape[-1] // 2) - axis.first for axis in axes]
        top, left = (max(-b, 0) for b in beyond)
        window = x[..., top : x.shape[-2] - top, left : x.shape[-1] - left]
        yield F.conv2d(window, weight, None, stride, [max(b, 0) for b in beyond], dilation, groups)


Arrangement = tuple[tuple[int, int], Axes, str]
_arrangements: Cache[Arrangement] = Cache(1024)


def _arrange(
    x: Tensor, filters: Filters, geometry: Geometry, reduce: Literal["max"] | None, backend: str
) -> Arrangement:
    """The border of the image, the axes of the image with its border, and "direct" or "fast"; kept for the next call.

    The border is what the largest window needs, unless it is of zeros, which are beyond every image anyway.
    """
    if fast.being_traced() or not holds_numbers(x):  # sizes may be symbols
        return _make_arrangement(x, filters, geometry, reduce, backend)
    timed = backend == "auto" and fast.benchmark and not (x.is_meta or being_captured(x.device))
    training = torch.is_grad_enabled() and filters.weights.requires_grad
    shapes = x.shape, filters.weights.shape, filters.sizes, filters.symmetric
    options = geometry, reduce, backend, training, x.device, (x.dtype, x.requires_grad) if timed else None

    def make() -> Arrangement:
        chosen = _time_backends(x, filters, geometry, reduce) if timed else backend
        return _make_arrangement(x, filters, geometry, reduce, chosen)

    return _arrangements.get_or_make((*shapes, *options), make)


def _make_arrangement(
    x: Tensor, filters: Filters, geometry: Geometry, reduce: Literal["max"] | None, backend: str
) -> Arrangement:
    axes, mode = geometry.axes(x.shape[-2], x.shape[-1], filters.sizes), geometry.padding_mode
    height, width = (0, 0) if mode == "zeros" else (max(0, axis.beyond[0]) for axis in axes)
    if height > 0 or width > 0:
        _checks.border(mode, (height, width), x.shape[-2:], f"the largest window has {2 * axes[0].radius + 1} taps")
        axes = axes[0].padded(height), axes[1].padded(width)
    if backend == "auto" and torch.onnx.is_in_onnx_export():
        backend = "direct"  # ONNX has no products between frequencies
    if backend == "auto":
        images = x.shape[0] if isinstance(x.shape[0], int) else sys.maxsize  # a symbol may not decide
        maximum = reduce is not None and len(filters.sizes) > 1
        backend = fast.choose_backend(axes, filters, None if maximum else images)
    return (height, width), axes, backend


def _time_backends(x: Tensor, filters: Filters, geometry: Geometry, reduce: Literal["max"] | None) -> str:
    """The backend that takes less time for such tensors: a pass to get ready, then the faster of two."""
    gradients = torch.is_grad_enabled()
    x = x.detach().requires_grad_(gradients and x.requires_grad)
    if gradients and filters.weights.requires_grad:
        filters = replace(filters, weights=filters.weights.detach().requires_grad_())
    wanted = [tensor for tensor in (x, filters.weights) if gradients and tensor.requires_grad]
    times: dict[str, list[float]] = {"direct": [], "fast": []}
    for backend in 3 * list(times):
        _wait(x.device)
        start = time.perf_counter()
        y = scale_conv2d(x, filters, None, geometry, reduce=reduce, backend=backend)
        if wanted:
            torch.autograd.grad(y, wanted, torch.ones_like(y))  # type: ignore[arg-type]
        _wait(x.device)
        times[backend].append(time.perf_counter() - start)
    return min(times, key=lambda backend: min(times[backend][1:]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
