"""Convolving a resized image and resizing the response back: what two of the baselines share."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import _checks, resize
from scalesteer.fast.maximum import running_maximum
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
        for scale, weight in zip(self.scales, filters, strict=True):
            yield self._response(x, weight, scale)

    def _response(self, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        g = self.geometry
        rows, columns = (self._along(x, axis, length, scale) for axis, length in enumerate(x.shape[-2:]))
        border = [rows[2], columns[2]]
        resized = resize.multiply(x, rows[0], columns[0])
        if g.padding_mode != "zeros" and any(border):
            reason = f"{x.shape[-2]} x {x.shape[-1]} before it was resized for scale {scale:.4g}"
            _checks.border(g.padding_mode, border, resized.shape[-2:], reason)
            resized = F.pad(resized, (border[1], border[1], border[0], border[0]), mode=g.padding_mode)
            border = [0, 0]
        stride = [s if axis[1] is None else 1 for s, axis in zip(g.stride, (rows, columns), strict=True)]
        response = F.conv2d(resized, weight, None, stride, border, g.dilation, g.groups)
        return resize.multiply(response, rows[1], columns[1])

    def _along(self, x: Tensor, axis: int, length: int, scale: float) -> tuple[Tensor | None, Tensor | None, int]:
        """The matrices that resize an axis and read its response, None where it keeps its length; and its padding."""
        g = self.geometry
        stride, padding, dilation, taps = g.stride[axis], g.padding[axis], g.dilation[axis], g.kernel_size
        count, size = g.output_size(length, length)[axis], max(1, round(length / scale))
        if size == length:
            return None, None, padding
        same, ratio = dilation * (taps - 1) // 2, size / length
        # Centres outside the image need responses outside it. Without them the border is clamped, as in resizing.
        outside = max(0, padding - same)
        extra = math.ceil((outside - 0.5) * ratio + 0.5) if outside else 0
        # Pixels are unit squares: the left edge of the first is the one point that resizing leaves in place.
        places = 0.5 / ratio - 0.5, 1 / ratio, size, length
        there = resize.matrix(x, *places, resize.triangle, spread=1 / ratio if self.antialias else 1.0)
        places = (same - padding + 0.5) * ratio - 0.5 + extra, stride * ratio, count, size + 2 * extra
        # Responses are smoothed as much as the image was enlarged, not by the stride.
        spread = ratio if self.antialias else 1.0
        return there, resize.matrix(x, *places, resize.triangle, spread=spread), same + extra

    def _convolve(self, x: Tensor, return_scales: bool) -> Tensor | tuple[Tensor, Tensor]:
        """The largest response at each pixel plus the bias, and which scale it is from."""
        self._check_input(x, self.weight, vectors=self.vectors)
        x = x.flatten(1, 2) if self.vectors else x
        best, winner = running_maximum(self.responses(x, self.filters()), len(self.scales), return_scales)
        if self.bias is not None:
            best = best + self.bias.to(best.dtype)[:, None, None]
        return best if winner is None else (best, winner)

    def _shown(self) -> dict[str, tuple[Any, Any]]:
        return {**super()._shown(), "vector_input": (self.vectors, False)}
