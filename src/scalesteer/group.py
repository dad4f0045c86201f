"""Convolutions that keep the axis of scales, so that whole networks are equivariant to scale.

Where an object grows by one step of the scales, its features move by one place along the axis of scales and grow in
space. Batch normalisation (`nn.BatchNorm3d`), ReLU and dropout keep that as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, Self, overload, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from scalesteer import _checks, fast, functional, harmonics
from scalesteer._checks import Device, Dtype, IntPair
from scalesteer.fast.memory import cached_on
from scalesteer.geometry import Filters, no_autocast
from scalesteer.harmonics import Float, LogRadialBasis
from scalesteer.initialisation import sum_zero_mixing
from scalesteer.nn import ARGUMENTS, MultiScaleConv2d, take_finished, twin
from scalesteer.resize import cubic, matrix, multiply

OCTAVE: tuple[float, ...] = tuple(2 ** (i / 3) for i in range(4))
"""The scales of the layer's default: from 1 to 2, three steps to the octave."""
ENDS = ("zeros", "replicate")
LEAST_ENERGY = 0.01
"""Of sums of functions that are learned like all others, as a share of the largest; see :func:`balance`."""
LEAST_TAPS, MANY_CHANNELS = 49, 60
"""With so many channels on both sides "fast" needs fewer taps to win: measured in float32 on one core of an AMD EPYC,
1.1 times as fast at 49 taps and 1.3 to 1.9 times at 81; with 32 channels it is slower at both."""


@runtime_checkable
class Basis(Protocol):
    """What filters can be made of instead of log-radial harmonics: :mod:`scalesteer.baselines` has two.

    It has functions for every scale, also for 1, at which a layer balances them.
    """

    @property
    def point_symmetric(self) -> bool:
        """Whether every function is the same on both sides of its centre."""

    def sample(self, kernel_size: int, scale: float) -> Float:
        """The functions enlarged by `scale`, `(..., n, n)`, n that of :func:`window_size`."""


def window_size(kernel_size: int, scale: float) -> int:
    """Width of the window of a :class:`Basis`: that of every pixel which the disc of radius a s touches."""
    return harmonics.window_size(kernel_size, scale, harmonics.PRESETS["smooth"])


class _GroupConv2d(MultiScaleConv2d):
    """What a layer and its folded form share: the forward pass."""

    sizes: tuple[int, ...]
    reach: int
    ends: str
    backend: str

    def filters(self) -> tuple[Tensor, ...]:
        """The real filters, ascending in scale: a tuple of `(out_channels, in_channels / groups, reach, n, n)`.

        The first of the `reach` sees the scale that lies lowest.
        """
        return tuple(window.unflatten(1, (-1, self.reach)) for window in self._stored_filters().windows())

    def _check_input(self, x: Tensor, weight: Tensor, *, vectors: bool = False) -> None:
        count = len(self.scales)
        if isinstance(x, Tensor) and x.ndim == 5:
            if x.shape[2] != count:
                raise ValueError(
                    f"the input must have {count} scales on axis 2, as the layer has (got shape {tuple(x.shape)})."
                )
            return super()._check_input(x[:, :, 0], weight)  # what holds for images holds at each scale
        if isinstance(x, Tensor) and (x.ndim != 4 or self.reach > 1):
            also = " or, for a layer with reach=1, 4 axes (B, C, H, W)" if self.reach == 1 else ""
            raise ValueError(f"the input must have 5 axes (B, C, S, H, W){also} (got shape {tuple(x.shape)}).")
        return super()._check_input(x, weight)

    def _convolve(self, x: Tensor, return_scales: bool) -> Tensor:
        if return_scales:
            raise ValueError("`return_scales` needs a maximum over scales: put a ScaleMax behind the layer.")
        stored = self._stored_filters()  # (O, C / groups * reach, D)
        self._check_input(x, stored.weights)
        if x.ndim == 4:
            return functional.scale_conv2d(  # type: ignore[return-value]
                x, stored, self.bias, self.geometry, reduce=None, backend=self.backend
            )
        weights = stored.weights.unflatten(1, (-1, self.reach))
        # The filters of each scale: its part of the finished taps, or all coefficients with its part of the basis.
        parts: Any = [weights] * len(self.sizes) if stored.basis is not None else weights.split(stored.areas, -1)
        bases = itertools.repeat(None) if stored.basis is None else _split(stored.basis, stored.areas)
        maps = []
        for i, (size, part, basis) in enumerate(zip(self.sizes, parts, bases, strict=False)):
            seen, part = self._neighbours(i, part)
            filters = Filters(part.flatten(1, 2), basis, (size,), stored.symmetric)
            maps.append(
                functional.scale_conv2d(
                    x[:, :, seen].flatten(1, 2), filters, self.bias, self.geometry, backend=self._backend_for(filters)
                )
            )
        return torch.stack(maps, 2)  # type: ignore[arg-type]

    def _backend_for(self, filters: Filters) -> str:
        """How one scale is computed; where nothing was measured, by the rule of all layers."""
        weights = filters.weights
        known = weights.device.type == "cpu" and weights.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        known &= self.backend == "auto" and self.stride == (1, 1) and self.groups == 1
        known &= not (fast.benchmark or fast.being_traced() or torch.onnx.is_in_onnx_export())
        many = min(weights.shape[:2]) >= MANY_CHANNELS and sum(filters.areas) >= LEAST_TAPS
        return "fast" if known and many else self.backend

    def _neighbours(self, scale: int, weights: Tensor) -> tuple[slice, Tensor]:
        """The scales of the input that a scale of the output sees, and the weights for these: `(O, C, reach, D)`."""
        first = scale - (self.reach - 1) // 2
        below, above = max(0, -first), max(0, first + self.reach - len(self.scales))
        inside = weights[:, :, below : self.reach - above]
        if self.ends == "replicate" and below + above:
            # The scale at the end is seen by its own weights and by those that lie beyond it.
            low = weights[:, :, : below + 1].sum(2, keepdim=True)
            high = weights[:, :, self.reach - above - 1 :].sum(2, keepdim=True)
            if inside.shape[2] == 1:
                inside = weights.sum(2, keepdim=True)
            else:
                inside = torch.cat([low, inside[:, :, 1:-1], high], 2)
        return slice(first + below, first + self.reach - above), inside

    def _shown(self) -> dict[str, tuple[Any, Any]]:
        own = {"reach": (self.reach, 1), "ends": (self.ends, "zeros"), "backend": (self.backend, "auto")}
        return {**super()._shown(), **own}


def _split(basis: Tensor, areas: list[int]) -> tuple[Tensor, ...]:
    """The parts of a basis that belong to each scale, the same tensors in every call: by them engines know theirs."""
    if fast.being_traced():
        return tuple(basis.split(areas, -1))
    key = "scales", *areas
    return cached_on(basis, basis, key, lambda: tuple(part.clone() for part in basis.split(areas, -1)))


def _window_sizes(basis: LogRadialBasis | Basis, kernel_size: int, scales: tuple[float, ...]) -> tuple[int, ...]:
    known = basis if isinstance(basis, LogRadialBasis) else harmonics.PRESETS["smooth"]
    return harmonics.window_sizes(kernel_size, scales, known)


class ScaleGroupConv2d(_GroupConv2d):
    r"""A scale-equivariant convolution over positions and scales, its filters steered exactly.

    .. math:: y_i = \sum_{d} W_d^{s_i} \star x_{i+d} + b

    Scales are a geometric sequence. The output at scale :math:`s_i` sees the input at `reach` neighbouring scales, each
    with a filter of its own; :math:`W^s`, Eq. 3 of the paper, is the filter enlarged by s. If an image is enlarged
    by one step of the scales, the output moves by one scale and is enlarged too.

    Arguments, defaults and attributes are those of `nn.Conv2d`; those that are not listed are explained by
    :class:`~scalesteer.ScaleSteerableConv2d`. What is particular to this layer is keyword-only.

    Note:
        At the ends of the scales equivariance ends too: there an object moves to a scale that is not there, and with a
        `reach` above 1 the scales next to the ends miss a neighbour.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Window of the filter at scale 1, odd and at least 3.
        stride: How many pixels the window moves, at all scales. Aliasing breaks equivariance:
            :class:`ScaleBlurPool2d` behind the layer is more exact.
        scales: A geometric sequence, ascending.
        basis: The functions that filters are made of: a :class:`~scalesteer.LogRadialBasis`, the name of a preset, or a
            :class:`Basis`.
        reach: How many scales of the input each output sees: its own, one above, one below, and so on; of an even
            number there is one more above.
        ends: What lies beyond the ends of the scales: ``"zeros"``, left out; or ``"replicate"``, the scale at the end
            repeated.
        backend: ``"direct"`` (one convolution for each scale), ``"fast"`` or ``"auto"``, which takes the faster one at
            each scale.

    Shape:
        `(B, C_in, S, H, W)` -> `(B, C_out, S, H', W')`. With ``reach=1`` an image `(B, C_in, H, W)` is taken too, the
        same at all scales: the first layer of a network.

    Attributes:
        coefficients: Learned, `(C_out, C_in / groups, reach, K, J, 2)`, or the shape of another basis at the end; of
            the functions after :func:`balance`.
        bias: Learned, `(C_out,)`, or None.
        steered_basis: The balanced functions at each scale. Fixed, not in the state dict; made again whenever the
            layer is moved, converted or loaded.

    Raises:
        ValueError: If an argument is out of its range, or `scales` are no geometric sequence.

    Example:
        >>> first, second = ScaleGroupConv2d(3, 8, padding="same"), ScaleGroupConv2d(8, 16, padding="same", reach=3)
        >>> y = second(first(torch.randn(2, 3, 32, 32)).relu())
        >>> y.shape, ScaleMax()(y).shape
        (torch.Size([2, 16, 4, 32, 32]), torch.Size([2, 16, 32, 32]))
    """

    coefficients: nn.Parameter
    steered_basis: Tensor
    _derived = ("steered_basis",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntPair = 7,
        stride: IntPair = 1,
        padding: str | IntPair = 0,
        dilation: IntPair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Device = None,
        dtype: Dtype = None,
        *,
        scales: Sequence[float] = OCTAVE,
        basis: LogRadialBasis | Basis | str = "smooth",
        reach: int = 1,
        ends: str = "zeros",
        backend: str = "auto",
    ) -> None:
        conv = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
        super().__init__(*conv, geometric(scales))
        functions = basis if isinstance(basis, Basis) else LogRadialBasis.of(basis)
        self.sizes = _window_sizes(functions, self.geometry.kernel_size, self.scales)
        self.basis = functions.resolve(self.sizes[-1]) if isinstance(functions, LogRadialBasis) else functions
        self.reach = _checks.integer("reach", reach, minimum=1)
        if (self.reach - 1) // 2 >= len(self.scales):
            raise ValueError(f"`reach` (got {reach}) must not go beyond {len(self.scales)} scales on both sides.")
        self.ends = _checks.choice("ends", ends, ENDS)
        self.backend = _checks.choice("backend", backend, functional.BACKENDS)
        tail = self._functions(self.scales[:1])[0].shape[:-2]
        shape = (self.out_channels, self.in_channels // self.groups, self.reach, *tail)
        self._add_parameters("coefficients", shape, bias, device, dtype)
        self.register_buffer("steered_basis", None, persistent=False)
        self.reset_parameters()
        self.reset_buffers()

    def _functions(self, scales: Sequence[float]) -> list[Float]:
        """The functions that filters are made of at each scale, `(..., n, n)`."""
        size = self.geometry.kernel_size
        if isinstance(self.basis, LogRadialBasis):
            return [harmonics.steered_basis(self.basis, size, scale) for scale in scales]
        return [self.basis.sample(size, scale) for scale in scales]

    def _balance(self) -> Float:
        """:func:`balance` of this layer's functions at scale 1, so that it is the same whatever the scales."""
        (functions,) = self._functions((1.0,))
        return balance(functions.reshape(-1, functions.shape[-1] ** 2))

    def reset_parameters(self) -> None:
        """Draw new coefficients, of filters that sum to zero and keep the second moment behind a ReLU; no bias."""
        if self.coefficients.is_meta:
            return
        functions = [f.reshape(-1, *f.shape[-2:]) for f in self._functions(self.scales)]
        mixing = sum_zero_mixing(functions)
        with torch.no_grad(), no_autocast(self.coefficients.device):
            unit = self.coefficients.normal_()
            work = torch.promote_types(unit.dtype, torch.float32)
            gain = math.sqrt(2 / (unit.shape[1] * unit.shape[2]))
            factor = torch.tensor(np.linalg.solve(self._balance(), mixing.T).T * gain, dtype=work, device=unit.device)
            self.coefficients.copy_((unit.flatten(3).to(work) @ factor).view_as(unit))
            if self.bias is not None:
                self.bias.zero_()

    def reset_buffers(self) -> None:
        """Make the steered basis again, in the parameters' dtype and on their device; moves and loading do it too."""
        like = self._like()
        balanced = self._balance()
        numbers = [torch.from_numpy(balanced @ f.reshape(-1, f.shape[-1] ** 2)) for f in self._functions(self.scales)]
        self.steered_basis = torch.cat(numbers, 1).to(dtype=like.dtype, device=like.device)

    def _stored_filters(self) -> Filters:
        weights = self.coefficients.flatten(3).flatten(1, 2)
        return Filters(weights, self.steered_basis, self.sizes, self.basis.point_symmetric)

    def with_scales(self, scales: Sequence[float]) -> Self:
        """The same layer at other scales: parameters are shared with this one, not copied; all else is kept.

        The sequence should have the same step where `reach` is above 1.
        """
        scales = geometric(scales)
        other = twin(self, scales=scales, sizes=_window_sizes(self.basis, self.geometry.kernel_size, scales))
        other.reset_buffers()
        return other

    def _folded(self) -> FoldedScaleGroupConv2d:
        return FoldedScaleGroupConv2d(self)

    def _shown(self) -> dict[str, tuple[Any, Any]]:
        presets = (name for name, basis in harmonics.PRESETS.items() if basis == self.basis)
        return {**super()._shown(), "basis": (next(presets, self.basis), "smooth")}


class FoldedScaleGroupConv2d(_GroupConv2d):
    """A :class:`ScaleGroupConv2d` whose filters are finished, made by :func:`scalesteer.fold`."""

    taps: Tensor

    def __init__(self, layer: ScaleGroupConv2d) -> None:
        super().__init__(**{name: getattr(layer, name) for name in (*ARGUMENTS, "scales")})
        self.sizes, self.reach, self.ends, self.backend = layer.sizes, layer.reach, layer.ends, layer.backend
        self.symmetric = layer.basis.point_symmetric
        take_finished(self, layer, ScaleGroupConv2d)

    def _stored_filters(self) -> Filters:
        return Filters(self.taps, None, self.sizes, self.symmetric)


def balance(functions: Float) -> Float:
    """The matrix `(D, D)` that makes functions `(D, n)` nearly uncorrelated, of unit energy, and changes each least.

    Functions of a basis overlap: some of their sums have ten million times the energy of others, and an optimizer,
    which moves all coefficients alike, would hardly learn the others. What is below `LEAST_ENERGY` is enlarged less:
    pixels do not show it well. The matrix is symmetric, so that mirror images stay such, which halves the work.
    """
    values, directions = np.linalg.eigh(functions @ functions.T)
    return np.asarray(directions / np.sqrt(values.clip(0) + LEAST_ENERGY * values[-1]) @ directions.T)


def geometric(scales: Sequence[float]) -> tuple[float, ...]:
    """Return scales whose ratios are all the same, as a tuple of floats.

    Example:
        >>> geometric([1, 2, 4])
        (1.0, 2.0, 4.0)
    """
    found = _checks.ascending("scales", scales)
    ratios = [math.log(b / a) for a, b in itertools.pairwise(found)]
    if ratios and max(ratios) - min(ratios) > 1e-4 * max(ratios):
        raise ValueError(
            f"`scales` must be a geometric sequence (got {found}): an object that grows by one step must move by one "
            "scale. Take tuple(first * step**i for i in range(count))."
        )
    return found


class ScaleMax(nn.Module):
    """The maximum over scales, which does not change when objects grow within the scales.

    Shape:
        `(B, C, S, H, W)` -> `(B, C, H, W)`.

    Example:
        >>> y, scale = ScaleMax()(torch.tensor([1.0, 3.0, 2.0]).view(1, 1, 3, 1, 1), return_scales=True)
        >>> y.item(), scale.item()
        (3.0, 1)
    """

    @overload
    def forward(self, x: Tensor, return_scales: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, return_scales: Literal[True]) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, return_scales: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The maximum and, if it is asked for, the index of the scale that has it; the lowest on a tie."""
        _check_scales(x)
        best, index = x.max(2)
        return (best, index) if return_scales else best


class ScaleMean(nn.Module):
    """The mean over scales: `(B, C, S, H, W)` -> `(B, C, H, W)`."""

    def forward(self, x: Tensor) -> Tensor:
        _check_scales(x)
        return x.mean(2)


class ScaleBlurPool2d(nn.Module):
    """Fewer pixels at every scale without aliasing: smooth, then keep one pixel of `stride`.

    What is kept lies amid the pixels that it replaces, as in `F.interpolate`. Each scale is smoothed in proportion to
    itself, the first one as much as the stride needs: an object that grew is smoothed as it was before it grew.

    Args:
        scales: Those of the layer before.
        stride: Pixels of the input for each of the output.

    Shape:
        `(B, C, S, H, W)` -> `(B, C, S, H // stride, W // stride)`.

    Example:
        >>> ScaleBlurPool2d((1.0, 2.0))(torch.ones(1, 3, 2, 8, 9)).shape
        torch.Size([1, 3, 2, 4, 4])
    """

    def __init__(self, scales: Sequence[float], stride: int = 2) -> None:
        super().__init__()
        self.scales = geometric(scales)
        self.stride = _checks.integer("stride", stride, minimum=1)

    def forward(self, x: Tensor) -> Tensor:
        _check_scales(x, len(self.scales))
        steps = [(float(self.stride), n // self.stride, (self.stride - 1) / 2) for n in x.shape[-2:]]
        return _read(x, self.scales, *steps)

    def extra_repr(self) -> str:
        return f"scales=({', '.join(f'{s:.4g}' for s in self.scales)}), stride={self.stride}"


def resize_scales(x: Tensor, scales: Sequence[float], size: tuple[int, int]) -> Tensor:
    """Maps with an axis of scales at another size, anti-aliased as :class:`ScaleBlurPool2d` is; edges stay in place.

    Shape:
        `(B, C, S, H, W)` -> `(B, C, S, *size)`.

    Example:
        >>> resize_scales(torch.ones(1, 1, 2, 4, 6), (1.0, 2.0), (2, 9)).shape
        torch.Size([1, 1, 2, 2, 9])
    """
    scales = geometric(scales)
    _check_scales(x, len(scales))
    height, width = _checks.pair("size", size, minimum=1)
    steps = [(n / count, count, n / count / 2 - 0.5) for n, count in zip(x.shape[-2:], (height, width), strict=True)]
    return _read(x, scales, *steps)


def _check_scales(x: Tensor, count: int | None = None) -> None:
    """Raise an error unless `x` has an axis of scales, of `count` if it is given."""
    if not isinstance(x, Tensor) or x.ndim != 5 or count not in (None, x.shape[2]):
        scales = "" if count is None else f" with {count} scales"
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"the input must have 5 axes (B, C, S, H, W){scales} (got {found}).")


Steps = tuple[float, int, float]  # pixels from one reading to the next, how many, and where the first one lies


def _read(x: Tensor, scales: tuple[float, ...], rows: Steps, columns: Steps) -> Tensor:
    """Read maps at other places; where these lie further apart than pixels, each scale is smoothed for itself."""
    maps = []
    for i, scale in enumerate(scales):
        tables = [
            matrix(x, first, step, count, length, cubic, step * scale / scales[0] if step > 1 else 1.0)
            for length, (step, count, first) in zip(x.shape[-2:], (rows, columns), strict=True)
        ]
        maps.append(multiply(x[:, :, i], *tables))
    return torch.stack(maps, 2)
