"""Layers that hold the coefficients of scale-steerable filters."""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from scalesteer import _checks, functional, harmonics
from scalesteer.geometry import Filters, Geometry, no_autocast
from scalesteer.harmonics import PAPER_SCALES, LogRadialBasis


class _ScaleConv2d(nn.Module):
    """What a layer and its folded form share: the arguments, the checks of the input and the forward pass."""

    in_channels: int
    out_channels: int
    geometry: Geometry
    scales: tuple[float, ...]
    sizes: tuple[int, ...]
    reduce: Literal["max"] | None
    backend: str
    bias: Tensor | None

    def _stored_filters(self) -> Filters:
        """The filters as the layer holds them; the weights have the layer's dtype and device."""
        raise NotImplementedError

    def filters(self) -> tuple[Tensor, ...]:
        """The real filters, ascending in scale: a tuple of `(out_channels, in_channels / groups, n, n)`."""
        return self._stored_filters().windows()

    def forward(self, x: Tensor, return_scales: bool = False) -> Any:
        """Apply the layer.

        Args:
            x: Images.
            return_scales: Also return the index into `scales` of the winner at each pixel (int64); the lowest where
                even the largest filter sees zeros only.

        Shape:
            `(B, C_in, H, W)` -> `(B, C_out, H', W')`, or `(B, C_out, S, H', W')` with ``reduce=None``.
        """
        if return_scales and self.reduce is None:
            raise ValueError("`return_scales` needs reduce='max' (got reduce=None): without a maximum no scale wins.")
        filters = self._stored_filters()
        self._check_input(x, filters.weights)
        return functional.scale_conv2d(
            x,
            filters,
            self.bias,
            self.geometry,
            reduce=self.reduce,
            backend=self.backend,
            return_scales=return_scales,
        )

    def _check_input(self, x: Tensor, weight: Tensor) -> None:
        _checks.images(x, self.in_channels, weight)
        height, width = x.shape[-2:]
        if min(self.geometry.output_size(height, width)) < 1:
            raise ValueError(
                f"an image of {height} x {width} is too small for kernel_size={self.geometry.kernel_size} with padding="
                f"{self.geometry.padding} and dilation={self.geometry.dilation}: the output would be empty."
            )

    def extra_repr(self) -> str:
        """Arguments that differ from the defaults."""
        g = self.geometry
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={g.kernel_size}"]
        shown = {
            "stride": (g.stride, (1, 1)),
            "padding": (g.padding, _checks.padding("same", g.kernel_size, (1, 1), g.dilation)),
            "dilation": (g.dilation, (1, 1)),
            "groups": (g.groups, 1),
            "bias": (self.bias is not None, True),
            "padding_mode": (g.padding_mode, "zeros"),
            "reduce": (self.reduce, "max"),
            "backend": (self.backend, "auto"),
        }
        parts += [f"{name}={value!r}" for name, (value, default) in shown.items() if value != default]
        parts.append("scales=(" + ", ".join(f"{s:.4g}" for s in self.scales) + ")")
        return ", ".join(parts)


class ScaleSteerableConv2d(_ScaleConv2d):
    r"""A convolution whose filters answer at several scales: one set of coefficients, steered exactly.

    The filter at scale s is the real part of Eq. 3 of the paper,

    .. math:: W^s = \Re\Big(s^{m-2} \sum_k e^{-ik\log s} \sum_j c_{kj} S_{kj}\Big)

    on the disc of radius a s, a = kernel_size / 2, and the output is the largest response at each pixel,
    :math:`\max_s (W^s \star x) + b`. Where an object grows, a larger filter answers as the smaller one did.

    The signature begins with that of `nn.Conv2d`, and the output has exactly the shape of `nn.Conv2d` with
    `kernel_size`, whatever the scales: larger windows share the centre of the smallest, and what they reach
    beyond `padding` is filled as `padding_mode` says.

    Note:
        Initialisation. Coefficients are drawn from a Gaussian, with two corrections. First, they are projected so
        that the filter sums to zero at every scale. After a ReLU, maps have a large mean; a filter that sees the
        mean multiplies it by the number of its taps, so that the second moment would grow several-fold a layer, and
        by a different factor in each draw. Second, one factor is set so that unit white noise that passes six such
        layers, each followed by a ReLU, keeps its second moment. The maximum over correlated scales has no closed
        form, so the factor is found by a small simulation (16 channels, fixed seed, cached a basis and scale set);
        the global random state is used for the coefficients alone. A basis that cannot sum to zero (a single real
        function) keeps plain Gaussian coefficients, with the same second correction. The bias starts at zero.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Window of the filter at scale 1, odd and at least 3; a pair is accepted when both are equal.
        stride: Step between windows, an integer or a pair.
        padding: ``"same"`` (stride 1 only), ``"valid"``, an integer or a pair.
        dilation: Distance between taps, an integer or a pair.
        groups: Number of groups that channels are divided into.
        bias: Whether to learn a bias for each output channel.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        device: Device of parameters and buffers.
        dtype: Floating-point type of parameters and buffers.
        scales: Scales of the filter, positive and ascending; a scale above 1 enlarges it.
        basis: The functions that filters are made of; ``LogRadialBasis.preset("area")`` steers best on real grids.
        reduce: ``"max"`` over scales, or None for the responses of all scales on an axis of their own.
        backend: ``"direct"`` (one convolution a scale), ``"spectral"`` (products of frequencies) or ``"auto"``. The
            numbers are the same up to rounding; what is not finite spreads further in ``"spectral"``, as NaN.
            A program exported with ``"spectral"`` has a fixed image size; the batch may be dynamic.

    Shape:
        `(B, C_in, H, W)` -> `(B, C_out, H', W')`, or `(B, C_out, S, H', W')` with ``reduce=None``.

    Attributes:
        coefficients: Learned, `(C_out, C_in / groups, K, J, 2)`; the last axis is real and imaginary part.
        bias: Learned, `(C_out,)`, or None.
        steered_basis: Fixed, `(2 K J, T)`, not in the state dict; `reset_buffers` rebuilds it.

    Example:
        >>> layer = ScaleSteerableConv2d(3, 8)
        >>> y, scale = layer(torch.randn(2, 3, 32, 32), return_scales=True)
        >>> y.shape, [f.shape[-1] for f in layer.filters()]
        (torch.Size([2, 8, 32, 32]), [7, 9, 11, 13, 15, 17])
    """

    coefficients: nn.Parameter
    steered_basis: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 7,
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = "same",
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scales: tuple[float, ...] = PAPER_SCALES,
        basis: LogRadialBasis = LogRadialBasis(),  # noqa: B008 (frozen)
        reduce: Literal["max"] | None = "max",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, groups = _checks.channels(in_channels, out_channels, groups)
        size = _checks.kernel_size(kernel_size)
        steps = _checks.pair("stride", stride, minimum=1)
        spread = _checks.pair("dilation", dilation, minimum=1)
        _checks.choice("padding_mode", padding_mode, functional.PADDING_MODES)
        self.geometry = Geometry(
            size, steps, _checks.padding(padding, size, steps, spread), spread, groups, padding_mode
        )
        self.scales = _checks.scales(scales)
        self.sizes = tuple(harmonics.window_size(size, s) for s in self.scales)
        if not isinstance(basis, LogRadialBasis):
            raise TypeError(
                f"`basis` must be a LogRadialBasis (got {basis!r}); presets come from LogRadialBasis.preset(name)."
            )
        self.basis = basis.resolve(self.sizes[-1])
        if reduce not in functional.REDUCTIONS:
            raise ValueError(f"`reduce` must be 'max' or None (got {reduce!r}).")
        self.reduce = reduce
        self.backend = _checks.choice("backend", backend, functional.BACKENDS)
        learned = _checks.boolean("bias", bias)
        place = _checks.place(device, dtype)
        shape = (self.out_channels, self.in_channels // groups, *self.basis.shape, 2)
        self.coefficients = nn.Parameter(torch.empty(shape, **place))
        self.register_parameter("bias", nn.Parameter(torch.empty(self.out_channels, **place)) if learned else None)
        self.register_buffer("steered_basis", None, persistent=False)
        self.reset_parameters()
        self.reset_buffers()

    @property
    def kernel_size(self) -> tuple[int, int]:
        """The window at scale 1."""
        return self.geometry.kernel_size, self.geometry.kernel_size

    def reset_parameters(self) -> None:
        """Draw new coefficients and set the bias to zero; the class's note explains the distribution."""
        mixing = initial_mixing(self.basis, self.geometry.kernel_size, self.scales)
        with torch.no_grad(), no_autocast(self.coefficients.device):
            unit = self.coefficients.normal_()
            work = torch.promote_types(unit.dtype, torch.float32)
            factor = torch.tensor(mixing / math.sqrt(unit.shape[1]), dtype=work, device=unit.device)
            self.coefficients.copy_((unit.flatten(2).to(work) @ factor).view_as(unit))
            if self.bias is not None:
                self.bias.zero_()

    def reset_buffers(self) -> None:
        """Rebuild what is derived from basis and scales, in the coefficients' dtype and on their device.

        Needed after a change of dtype, if full precision matters (`.double()` only converts the float32 buffer),
        and after a layer on the meta device was given memory.
        """
        size = self.geometry.kernel_size
        steered = [harmonics.steered_basis(self.basis, size, s) for s in self.scales]
        flat = np.concatenate([b.reshape(-1, b.shape[-1] ** 2) for b in steered], axis=1)  # (2 K J, T)
        self.steered_basis = torch.tensor(flat, dtype=self.coefficients.dtype, device=self.coefficients.device)

    def _stored_filters(self) -> Filters:
        return Filters(self.coefficients.flatten(2), self.steered_basis, self.sizes)

    def with_scales(self, scales: tuple[float, ...]) -> ScaleSteerableConv2d:
        """The same layer at other scales: coefficients and bias are shared with this one, not copied.

        Steering is exact, so that a trained layer can be asked for scales it was never trained at. (The preset
        ``"released-code"`` keeps the largest window it was built with; steering it beyond is inexact.)
        """
        geometry = self.geometry
        other = type(self)(
            self.in_channels,
            self.out_channels,
            geometry.kernel_size,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            geometry.groups,
            self.bias is not None,
            geometry.padding_mode,
            device="meta",
            dtype=self.coefficients.dtype,
            scales=scales,
            basis=self.basis,
            reduce=self.reduce,
            backend=self.backend,
        )
        other.coefficients = self.coefficients
        other.bias = self.bias
        other.reset_buffers()
        return other.train(self.training)

    def extra_repr(self) -> str:
        """Arguments that differ from the defaults."""
        presets = {name: LogRadialBasis.preset(name) for name in ("paper", "area", "released-code")}
        names = [name for name, preset in presets.items() if preset.resolve(self.sizes[-1]) == self.basis]
        basis = f"basis={names[0]!r}" if names else f"basis={self.basis}"
        return super().extra_repr() + ("" if names == ["paper"] else f", {basis}")


class FoldedScaleConv2d(_ScaleConv2d):
    """A :class:`ScaleSteerableConv2d` whose filters are finished: the same output, nothing left to learn.

    Made by :func:`fold`. The filters of all scales lie side by side in the buffer `taps` `(C_out, C_in / groups, T)`,
    which is in the state dict.
    """

    taps: Tensor

    def __init__(self, layer: ScaleSteerableConv2d) -> None:
        super().__init__()
        for name in ("in_channels", "out_channels", "geometry", "scales", "sizes", "reduce", "backend"):
            setattr(self, name, getattr(layer, name))
        with torch.no_grad():
            taps = layer._stored_filters().finished().weights
            bias = None if layer.bias is None else layer.bias.detach().clone()
        self.register_buffer("taps", taps)
        self.register_buffer("bias", bias)
        self.train(layer.training)

    def _stored_filters(self) -> Filters:
        return Filters(self.taps, None, self.sizes)


def fold(model: nn.Module) -> nn.Module:
    """A copy of `model` in which every :class:`ScaleSteerableConv2d` holds its finished filters, for inference.

    Example:
        >>> folded = fold(nn.Sequential(ScaleSteerableConv2d(1, 4), nn.ReLU()))
        >>> sum(p.numel() for p in folded.parameters())
        0
    """
    if isinstance(model, ScaleSteerableConv2d):
        return FoldedScaleConv2d(model)
    model = copy.deepcopy(model)
    # One folded layer for each layer, so that a layer that is used twice stays one.
    folded = {m: FoldedScaleConv2d(m) for m in model.modules() if isinstance(m, ScaleSteerableConv2d)}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, ScaleSteerableConv2d):
                parent._modules[name] = folded[child]
    return model


@lru_cache(maxsize=64)
def initial_mixing(basis: LogRadialBasis, kernel_size: int, scales: tuple[float, ...]) -> harmonics.Float:
    """The matrix that turns unit Gaussian numbers into initial coefficients, before division by sqrt(fan-in).

    See the note in :class:`ScaleSteerableConv2d`. Shape: `(2 K J, 2 K J)`, symmetric.
    """
    steered = [harmonics.steered_basis(basis, kernel_size, s) for s in scales]
    steered = [b.reshape(-1, *b.shape[-2:]) for b in steered]  # (D, n, n) each
    count = len(steered[0])
    sums = np.stack([b.sum((1, 2)) for b in steered])  # (S, D): what a flat region gives
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    _, values, directions = np.linalg.svd(sums / np.where(norms > 0, norms, 1), full_matrices=False)
    directions = directions[values > 1e-3 * values[0]]
    mixing = np.eye(count) - directions.T @ directions

    def energy(matrix: harmonics.Float) -> float:
        return float(sum(np.square(matrix @ b.reshape(count, -1)).sum() for b in steered))

    if energy(mixing) < 0.01 * energy(np.eye(count)):
        mixing = np.eye(count)
    mixing /= math.sqrt(energy(mixing) / len(scales))
    gain = _simulated_gain([b.astype(np.float32) for b in steered], mixing.astype(np.float32))
    return np.asarray(mixing / math.sqrt(gain))


def _simulated_gain(
    steered: list[np.ndarray[Any, np.dtype[np.float32]]], mixing: np.ndarray[Any, np.dtype[np.float32]]
) -> float:
    """Mean growth of the second moment a layer, for white noise through six layers of 16 channels with ReLU."""
    channels, layers = 16, 6
    size = max(32, steered[-1].shape[-1] + 1)  # wraps around: no border, so that the image's size does not matter
    rng = np.random.default_rng(0)
    transfers = []
    for b in steered:  # every function is point-symmetric: with the centre as origin its transform is real
        n = b.shape[-1]
        padded = np.zeros((len(b), size, size), dtype=np.float32)
        padded[:, :n, :n] = b
        centred = np.roll(padded, (-(n // 2), -(n // 2)), (1, 2))
        transfers.append(np.fft.rfft2(centred).real.reshape(len(b), -1).astype(np.float32))
    transfer = np.concatenate(transfers, axis=1)  # (D, S F)
    x = rng.standard_normal((channels, size, size), dtype=np.float32)
    growth = 0.0
    for _ in range(layers):
        coefficients = rng.standard_normal((channels**2, len(mixing)), dtype=np.float32) @ mixing
        coefficients /= math.sqrt(channels)
        spectrum = np.fft.rfft2(x).reshape(channels, -1).T  # (F, C)
        parts = np.stack([spectrum.real, spectrum.imag], axis=-1).astype(np.float32)  # (F, C, 2)
        weights = (coefficients @ transfer).reshape(channels, channels, len(steered), -1)
        product = weights.transpose(2, 3, 0, 1) @ parts  # (S, F, C, 2)
        spectra = (product[..., 0] + 1j * product[..., 1]).swapaxes(1, 2).reshape(-1, channels, size, size // 2 + 1)
        best = np.maximum(np.fft.irfft2(spectra, s=(size, size)).max(0), 0)
        moment = float(np.square(best).mean())
        x = (best / math.sqrt(moment)).astype(np.float32)
        growth += math.log(moment) / layers
    # Three digits, so that rounding in the simulation does not reach the weights.
    return float(f"{math.exp(growth):.3g}")
