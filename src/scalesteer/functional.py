"""Coefficients -> filters -> responses -> pooled map: tensors in, tensors out.

The plain reference, one convolution a scale, is here: the maximum is taken as responses come, so that the maps of all
scales never lie in memory together. The fast algorithm for the same numbers is in :mod:`scalesteer.fast`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer import fast
from scalesteer.fast import spectral

BACKENDS = ("auto", "direct", "spectral")
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
REDUCTIONS = ("max", None)


@dataclass(frozen=True)
class Geometry:
    """Where windows lie: the arguments of a convolution, each a pair (rows, columns), as `nn.Conv2d` means them."""

    kernel_size: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"

    def reach(self, size: int) -> tuple[int, int]:
        """How far windows of `size` taps reach beyond the image: negative where they stay inside."""
        return (
            self.padding[0] + self.dilation[0] * (size - self.kernel_size) // 2,
            self.padding[1] + self.dilation[1] * (size - self.kernel_size) // 2,
        )

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output for an image: exactly that of `nn.Conv2d` with `kernel_size`."""
        span = [d * (self.kernel_size - 1) + 1 for d in self.dilation]
        rows = (height + 2 * self.padding[0] - span[0]) // self.stride[0] + 1
        columns = (width + 2 * self.padding[1] - span[1]) // self.stride[1] + 1
        return rows, columns


def synthesize(coefficients: Tensor, basis: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The filters of all scales from one set of coefficients: Eq. 3 as one matrix product.

    Args:
        coefficients: Learned coefficients.
        basis: The steered basis of each scale, flattened and laid side by side.
        sizes: The window size of each scale; their squares add up to T.

    Shape:
        `(O, C, K, J, 2)`, `(2 K J, T)` -> a tuple of `(O, C, n, n)`.
    """
    # Half precision is for convolutions; the filters themselves are made in float32 at least.
    work = torch.promote_types(coefficients.dtype, torch.float32)
    with spectral.no_autocast(coefficients.device):
        taps = coefficients.flatten(2).to(work) @ basis.to(work)  # (O, C, T)
    return spectral.split_taps(taps.to(coefficients.dtype), None, sizes)


def scale_conv2d(
    x: Tensor,
    filters: spectral.Bank,
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
        filters: The filter at each scale, ascending, odd sizes; or steered ones, not yet multiplied out.
        bias: Added to the result, or None.
        geometry: Stride, padding, dilation and groups.
        reduce: ``"max"`` over scales, or None for the responses of all of them.
        backend: ``"direct"``; or ``"spectral"`` or ``"auto"``, which need point-symmetric filters, as all are that a
            LogRadialBasis makes.
        return_scales: Also return the index of the winning scale at each pixel (int64).

    Shape:
        `(B, C, H, W)`, tuple of `(O, C / groups, n, n)` -> `(B, O, H', W')`, or `(B, O, S, H', W')` with
        ``reduce=None``.
    """
    sizes = spectral.window_sizes(filters)
    whole = reduce == "max" and len(sizes) < 256 and not fast.plain_only()  # the maximum as one function
    if backend == "auto":
        in_channels = spectral.first(filters).shape[1]
        backend = fast.choose_backend((x.shape[-2], x.shape[-1]), sizes, in_channels, geometry, whole)
    whole = whole and backend == "spectral"
    if not (isinstance(filters, spectral.Steered) and whole and fast.steerable(x, filters, geometry)):
        filters = _multiplied(filters)
    margin = _margin(x, sizes, geometry)
    if geometry.padding_mode == "zeros":  # both backends see zeros beyond the image; other modes need the border made
        margin = (0, 0)
    x = _pad(x, margin, geometry.padding_mode)
    if whole:
        best, index = fast.max_response(x, margin, filters, geometry, return_scales)
        if bias is not None:
            best += bias.to(best.dtype)[:, None, None]  # nobody else has seen it yet
        if not return_scales or index is None:
            return best
        return best, index.long().masked_fill_(_blank(x, margin, filters, geometry), 0)
    evaluate = fast.responses if backend == "spectral" else direct_responses
    responses = evaluate(x, margin, _multiplied(filters), geometry)
    if reduce is None:
        stacked = torch.stack(list(responses), dim=2)  # (B, O, S, H', W')
        return stacked if bias is None else stacked + bias.to(stacked.dtype)[:, None, None, None]
    best, winner = max_over_scales(responses, len(sizes), return_scales)
    if winner is not None and backend == "spectral":
        winner = winner.masked_fill(_blank(x, margin, filters, geometry), 0)
    if bias is not None:
        best = best + bias.to(best.dtype)[:, None, None]
    return best if winner is None else (best, winner)


def _blank(x: Tensor, margin: tuple[int, int], filters: spectral.Bank, geometry: Geometry) -> Tensor:
    """Where even the largest filter sees zeros only: all scales tie there, but between frequencies rounding decides.

    This is about what is reported; the gradient goes to the scale that rounding chose.
    """
    size, fan_out = spectral.window_sizes(filters)[-1], spectral.first(filters).shape[0]
    with torch.no_grad():
        last = filters.basis[:, -size * size :] if isinstance(filters, spectral.Steered) else filters[-1].flatten(0, 1)
        taps = (last.detach() != 0).any(0).view(size, size).to(x.dtype).expand(geometry.groups, 1, -1, -1)
        bright = x.detach().abs().unflatten(1, (geometry.groups, -1)).amax(2)
        same = (d * (geometry.kernel_size - 1) // 2 for d in geometry.dilation)
        centred = all(p <= s for p, s in zip(geometry.padding, same, strict=True))
        # No window is blank if no pixel is and none lies in the border alone; a GPU would have to wait for the answer.
        if centred and x.device.type == "cpu" and not fast.plain_only() and not (bright == 0).any():
            return torch.zeros((), dtype=torch.bool)
        (seen,) = direct_responses(bright, margin, [taps], geometry)
    return (seen == 0).repeat_interleave(fan_out // geometry.groups, dim=1)


def _multiplied(filters: spectral.Bank) -> Sequence[Tensor]:
    return synthesize(*filters) if isinstance(filters, spectral.Steered) else filters


def direct_responses(
    x: Tensor, margin: tuple[int, int], filters: Sequence[Tensor], geometry: Geometry
) -> Iterator[Tensor]:
    """One `F.conv2d` a scale: the reference that everything is checked against.

    Args:
        x: Images with a border of `margin` already around them.
        margin: Rows above and below, columns left and right.
        filters: The filter at each scale.
        geometry: Stride, padding, dilation and groups.

    Yields:
        Responses `(B, O, H', W')`, one a scale.
    """
    for weight in filters:
        beyond = [reach - have for reach, have in zip(geometry.reach(weight.shape[-1]), margin, strict=True)]
        top, left = (max(-b, 0) for b in beyond)
        window = x[..., top : x.shape[-2] - top, left : x.shape[-1] - left]
        pad = [max(b, 0) for b in beyond]
        yield F.conv2d(window, weight, None, geometry.stride, pad, geometry.dilation, geometry.groups)


def max_over_scales(
    responses: Iterator[Tensor], count: int, return_scales: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Running maximum over scales; on a tie the lowest scale wins and takes the gradient.

    A non-finite response of the largest scale always wins: its window holds every pixel that a smaller window
    holds, so that a NaN or an infinity in the input shows, even where a filter makes it -inf.
    """
    best = next(responses)
    winner = torch.zeros_like(best, dtype=torch.int64) if return_scales else None
    for i, response in enumerate(responses, start=1):
        wins = response > best
        if i == count - 1:
            wins = wins | ~torch.isfinite(response)
        best = torch.where(wins, response, best)
        if winner is not None:
            winner = torch.where(wins, i, winner)
    return best, winner


def _margin(x: Tensor, sizes: Sequence[int], geometry: Geometry) -> tuple[int, int]:
    """The border that the largest window needs around the image."""
    reaches = [geometry.reach(size) for size in sizes]
    rows, columns = (max(0, *(reach[axis] for reach in reaches)) for axis in (0, 1))
    limit = {"reflect": 1, "circular": 0}.get(geometry.padding_mode)
    if limit is not None and (rows > x.shape[-2] - limit or columns > x.shape[-1] - limit):
        raise ValueError(
            f"padding_mode={geometry.padding_mode!r} cannot fill {rows} rows and {columns} columns beyond an image of "
            f"{x.shape[-2]} x {x.shape[-1]}: the largest window has {sizes[-1]} taps; use "
            "padding_mode='zeros' or 'replicate', smaller `scales` or larger images."
        )
    return rows, columns


def _pad(x: Tensor, margin: tuple[int, int], mode: str) -> Tensor:
    if margin == (0, 0):
        return x
    rows, columns = margin
    return F.pad(x, (columns, columns, rows, rows), mode="constant" if mode == "zeros" else mode)
