"""Where windows lie and what filters are made of: shapes and layouts, no arithmetic on images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """One axis of a correlation: `count` windows whose centres start at pixel `first` of `length`, `stride` apart.

    A window takes the pixels up to `radius` times `dilation` on both sides of its centre.
    """

    length: int
    first: int
    stride: int
    count: int
    dilation: int
    radius: int

    @property
    def reach(self) -> int:
        """Pixels from a centre to the last tap of the largest window."""
        return self.dilation * self.radius

    @property
    def last(self) -> int:
        """The centre of the last window."""
        return self.first + (self.count - 1) * self.stride

    @property
    def beyond(self) -> tuple[int, int]:
        """How far the largest windows reach beyond the image, before and after it; negative where they stay inside."""
        return self.reach - self.first, self.last + self.reach + 1 - self.length

    @property
    def border(self) -> tuple[int, int]:
        """The zeros that the image needs, before and after it."""
        return max(0, self.beyond[0]), max(0, self.beyond[1])

    @property
    def period(self) -> int:
        """The shortest even period at which no window sees the image twice.

        The first window reaches `reach - first` beyond the image, and the last no further: padding is the same on both
        sides. The length may be a symbol (torch.export), so that it is compared with nothing here.
        """
        return 2 * ((self.length + max(0, self.reach - self.first) + 1) // 2)

    def padded(self, border: int) -> Axis:
        """The same windows in an image that has a border."""
        return replace(self, length=self.length + 2 * border, first=self.first + border)

    def tile(self, count: int) -> Axis:
        """The axis of one tile that gives `count` outputs by itself."""
        return replace(self, length=(count - 1) * self.stride + 1 + 2 * self.reach, first=self.reach, count=count)


Axes = tuple[Axis, Axis]  # rows and columns
Maximum = tuple[Tensor, Tensor | None]  # the largest responses and, where it is wanted, the index of the winner


@dataclass(frozen=True)
class Geometry:
    """The arguments of a convolution, each a pair (rows, columns), as `nn.Conv2d` means them.

    An image that was padded before is the same problem with less padding, so that `padding` may be negative.
    """

    kernel_size: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the output for an image: exactly that of `nn.Conv2d` with `kernel_size`."""
        room = [2 * p - d * (self.kernel_size - 1) - 1 for p, d in zip(self.padding, self.dilation, strict=True)]
        return (height + room[0]) // self.stride[0] + 1, (width + room[1]) // self.stride[1] + 1

    def axes(self, height: int, width: int, sizes: Sequence[int]) -> Axes:
        """Where windows of these sizes lie in an image; all sizes share the centres."""
        first = [d * (self.kernel_size // 2) - padding for d, padding in zip(self.dilation, self.padding, strict=True)]
        counts, radius = self.output_size(height, width), max(sizes) // 2
        rows, columns = map(Axis, (height, width), first, self.stride, counts, self.dilation, (radius, radius))
        return rows, columns


@dataclass(frozen=True)
class Filters:
    """Filters at several scales, in the one form that every algorithm takes.

    A filter is its weights times a fixed basis (Eq. 3 of the paper), or, without a basis, the weights are the finished
    taps. Windows of all scales are flattened and lie side by side; T is the sum of `sizes` squared.

    Attributes:
        weights: `(O, C / groups, D)`.
        basis: `(D, T)`, or None, and D is T.
        sizes: The window of each scale, odd.
        symmetric: Whether every filter is point-symmetric, W(-x) = W(x). The fast engines then do half of the work. It
            is taken at its word: of filters that are not, they would see some part only.
    """

    weights: Tensor
    basis: Tensor | None
    sizes: tuple[int, ...]
    symmetric: bool = True

    @property
    def areas(self) -> list[int]:
        """Taps of each scale."""
        return [n * n for n in self.sizes]

    def finished(self) -> Filters:
        """The same filters without a basis."""
        if self.basis is None:
            return self
        # Half precision is for convolutions; the filters themselves are made in float32 at least.
        work = torch.promote_types(self.weights.dtype, torch.float32)
        with no_autocast(self.weights.device):
            taps = (self.weights.to(work) @ self.basis.to(work)).to(self.weights.dtype)
        return replace(self, weights=taps, basis=None)

    def windows(self) -> tuple[Tensor, ...]:
        """The filter at each scale: `(O, C / groups, n, n)`."""
        parts = self.finished().weights.split(self.areas, dim=-1)
        return tuple(part.unflatten(-1, (n, n)) for part, n in zip(parts, self.sizes, strict=True))

    def supports(self) -> Tensor:
        """The taps that can be other than zero, at each scale in the largest window: `(S, n, n)`, boolean."""
        source = self.weights.flatten(0, 1) if self.basis is None else self.basis
        parts = zip((source.detach() != 0).any(0).split(self.areas), self.sizes, strict=True)
        return torch.stack([F.pad(p.unflatten(0, (n, n)), [(max(self.sizes) - n) // 2] * 4) for p, n in parts])


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast would turn every product into half precision, also those that make filters and transforms."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
