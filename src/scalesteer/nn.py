"""Layers that hold the coefficients of scale-steerable filters."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from scalesteer import _checks, functional, harmonics
from scalesteer._checks import Device, Dtype, IntPair
from scalesteer.geometry import Filters, Geometry, no_autocast
from scalesteer.harmonics import LogRadialBasis
from scalesteer.initialisation import initial_mixing

ARGUMENTS = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_FIXED = frozenset({*ARGUMENTS, "scales", "geometry", "sizes", "basis", "reach"})


class MultiScaleConv2d(nn.Module):
    """What every convolution at several scales shares with `nn.Conv2d`: arguments, attributes and output shape.

    The base of the layers here and in :mod:`scalesteer.baselines`, which say how responses are made. Attributes have
    the names and values of `nn.Conv2d`. They cannot be changed later, because filters and buffers depend on them.
    """

    transposed = False
    output_padding = (0, 0)
    bias: Tensor | None
    _derived: tuple[str, ...] = ()  # the buffers that `reset_buffers` makes

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntPair,
        stride: IntPair,
        padding: str | IntPair,
        dilation: IntPair,
        groups: int,
        padding_mode: str,
        scales: Sequence[float],
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.groups = _checks.channels(in_channels, out_channels, groups)
        size = _checks.kernel_size(kernel_size)
        self.kernel_size = (size, size)
        self.stride = _checks.pair("stride", stride, minimum=1)
        self.dilation = _checks.pair("dilation", dilation, minimum=1)
        border = _checks.padding(padding, size, self.stride, self.dilation)
        self.padding = padding if isinstance(padding, str) else border
        self.padding_mode = _checks.choice("padding_mode", padding_mode, functional.PADDING_MODES)
        self.geometry = Geometry(size, self.stride, border, self.dilation, self.groups, self.padding_mode)
        self.scales = _checks.ascending("scales", scales)
        self.register_load_state_dict_post_hook(_renew_buffers)  # type: ignore[no-untyped-call]

    def _add_parameters(self, name: str, shape: Sequence[int], bias: bool, device: Device, dtype: Dtype) -> None:
        """The second half of construction: what is learned, without numbers yet."""
        learned, place = _checks.boolean("bias", bias), _checks.place(device, dtype)
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, **place)))
        self.register_parameter("bias", nn.Parameter(torch.empty(self.out_channels, **place)) if learned else None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in self.__dict__:
            steered = name in ("scales", "sizes") and hasattr(self, "with_scales")
            hint = "use layer.with_scales(scales)" if steered else "build a new layer"
            raise AttributeError(f"`{name}` is fixed when the layer is built, its filters depend on it: {hint}.")
        super().__setattr__(name, value)

    def reset_buffers(self) -> None:
        """Make what is derived from the arguments again, like the parameters; needed if one is exchanged by hand."""

    def _folded(self) -> MultiScaleConv2d | None:
        """The same layer with finished filters, for :func:`fold`; None if there is nothing to finish."""
        return None

    def _stored_filters(self) -> Filters:
        """The filters as the layer holds them; the weights have the layer's dtype and device."""
        raise NotImplementedError

    def _like(self) -> Tensor:
        """A tensor with the layer's dtype and device, without computing a parametrization."""
        return next(itertools.chain(self.parameters(), self.buffers()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def apply(tensor: Tensor) -> Tensor:
            if tensor.ndim != 5:
                return fn(tensor)
            flat = tensor.flatten(2)  # five axes would look like a video, which "channels last" cannot order
            changed = fn(flat)
            return tensor if changed is flat else changed.unflatten(2, tensor.shape[2:])

        before = [self._buffers[name] for name in self._derived]
        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        # A conversion would keep the rounding of the old dtype, and `to_empty` leaves no numbers at all.
        if any(self._buffers[name] is not old for name, old in zip(self._derived, before, strict=True)):
            self.reset_buffers()
        return self

    def _check_input(self, x: Tensor, weight: Tensor, *, vectors: bool = False) -> None:
        """Raise a named error unless `x` is a batch that this layer can take."""
        _checks.images(x, self.in_channels, weight, vectors=vectors)
        for name in self._derived:
            if (found := getattr(self, name).device) != weight.device:
                raise RuntimeError(
                    f"`{name}` is on {found} but the parameters are on {weight.device}: call layer.reset_buffers()."
                )
        height, width = x.shape[-2:]
        if min(self.geometry.output_size(height, width)) < 1:
            raise ValueError(
                f"an image of {height} x {width} is too small for kernel_size={self.geometry.kernel_size} with padding="
                f"{self.geometry.padding} and dilation={self.geometry.dilation}: the output would be empty."
            )

    if TYPE_CHECKING:  # so that a call has the types of `forward`

        @overload
        def __call__(self, x: Tensor, return_scales: Literal[False] = False) -> Tensor: ...

        @overload
        def __call__(self, x: Tensor, return_scales: Literal[True]) -> tuple[Tensor, Tensor]: ...

        def __call__(self, x: Tensor, return_scales: bool = False) -> Tensor | tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, x: Tensor, return_scales: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, return_scales: Literal[True]) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, return_scales: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer.

        Args:
            x: Images, or vector fields for a layer with `vector_input`; the class says which shapes.
            return_scales: Also return the index into `scales` of the winner at each pixel (int64); the lowest on a
                tie, so also where even the largest filter sees zeros only.
        """
        if not isinstance(x, Proxy):
            return self._convolve(x, return_scales)
        # Under `torch.fx.symbolic_trace` the layer is one node, as the layers of `torch.nn` are.
        name = x.tracer.path_of_module(self)
        if not name:
            raise TypeError(f"a {type(self).__name__} alone cannot be traced by torch.fx: put it in an nn.Sequential.")
        return x.tracer.create_proxy("call_module", name, (x,), {"return_scales": True} if return_scales else {})

    def _convolve(self, x: Tensor, return_scales: bool) -> Tensor | tuple[Tensor, Tensor]:
        """The forward pass on tensors."""
        raise NotImplementedError

    def _shown(self) -> dict[str, tuple[Any, Any]]:
        """What :meth:`extra_repr` shows: names with values and defaults."""
        now = {**vars(self), "bias": self.bias is not None}
        usual = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "bias": True}
        return {name: (now[name], default) for name, default in {**usual, "padding_mode": "zeros"}.items()}

    def extra_repr(self) -> str:
        """Arguments that differ from the defaults."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.geometry.kernel_size}"]
        parts += [f"{name}={value!r}" for name, (value, default) in self._shown().items() if value != default]
        return ", ".join([*parts, "scales=(" + ", ".join(f"{s:.4g}" for s in self.scales) + ")"])


def _renew_buffers(layer: MultiScaleConv2d, _: Any) -> None:
    """After loading: ``assign=True`` brings parameters with a device and a dtype of their own."""
    like = layer._like()
    if any((t := layer.get_buffer(n)).device != like.device or t.dtype != like.dtype for n in layer._derived):
        layer.reset_buffers()


class _ScaleConv2d(MultiScaleConv2d):
    """What a layer and its folded form share: the forward pass."""

    sizes: tuple[int, ...]
    reduce: Literal["max"] | None
    backend: str

    def filters(self) -> tuple[Tensor, ...]:
        """The real filters, ascending in scale: a tuple of `(out_channels, in_channels / groups, n, n)`."""
        return self._stored_filters().windows()

    def _convolve(self, x: Tensor, return_scales: bool) -> Tensor | tuple[Tensor, Tensor]:
        if return_scales and self.reduce is None:
            raise ValueError("`return_scales` needs reduce='max' (got reduce=None): without a maximum no scale wins.")
        filters = self._stored_filters()
        self._check_input(x, filters.weights)
        return functional.scale_conv2d(
            x, filters, self.bias, self.geometry, reduce=self.reduce, backend=self.backend, return_scales=return_scales
        )

    def _shown(self) -> dict[str, tuple[Any, Any]]:
        return {**super()._shown(), "reduce": (self.reduce, "max"), "backend": (self.backend, "auto")}


class ScaleSteerableConv2d(_ScaleConv2d):
    r"""A convolution whose filters answer at several scales: one set of coefficients, steered exactly.

    The filter at scale s is the real part of Eq. 3 of the paper,

    .. math:: W^s = \Re\Big(s^{m-2} \sum_k e^{-ik\log s} \sum_j c_{kj} S_{kj}\Big)

    on the disc of radius a s, a = kernel_size / 2, and the output is the largest response at each pixel,
    :math:`\max_s (W^s \star x) + b`. Where an object grows, a larger filter answers as the smaller one did.

    Arguments, defaults and attributes are those of `nn.Conv2d`; what is particular to this layer is keyword-only. The
    output has exactly the shape of `nn.Conv2d` with `kernel_size`, whatever the scales: larger windows share the
    centre of the smallest, and what they reach beyond `padding` is filled as `padding_mode` says.

    Note:
        What differs from `nn.Conv2d`. The learned tensor is `coefficients`, not `weight`: 32 numbers for each pair of
        channels with the default basis, whatever the kernel size. Kernels are square, odd and at least 3: keep
        `nn.Conv2d` where a network has 1 x 1 convolutions. Input has a batch axis.

    Note:
        How coefficients start. They are Gaussian, projected so that each filter sums to zero at every scale, and of a
        size that keeps the second moment of the signal through several layers with ReLU;
        :func:`scalesteer.initialisation.initial_mixing` says why. The bias starts at zero.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Window of the filter at scale 1, odd and at least 3; a pair is accepted when both are equal. Take 7
            or more: on a pixel grid a small filter has no room to change its size. At a scale of 1.5 the filters of the
            default basis miss the theory by about 47 % with a kernel of 3, 12 % with 5, 4 % with 7 and 2 % with 11
            (:func:`scalesteer.testing.steering_error`).
        stride: How many pixels the window moves from one output pixel to the next, an integer or a pair.
        padding: Rows and columns added around the image, an integer or a pair; ``"same"`` for an output as large as
            the image (stride 1 only), ``"valid"`` for none.
        dilation: Distance between the pixels that a filter reads, an integer or a pair. All scales are stretched by it.
        groups: Number of groups of channels that do not see each other; both numbers of channels are divisible by it.
        bias: Whether to learn a number for each output channel that is added after the maximum.
        padding_mode: What is beyond the image: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        device: Device of parameters and buffers.
        dtype: Floating-point type of parameters and buffers.
        scales: How much larger than at scale 1 the filter is, positive and ascending. They should reach beyond the
            sizes at which an object may appear on both sides: where the largest or the smallest filter wins, the next
            one is missing (:func:`scalesteer.app.suggest.choose_scales` and docs/guide/which-scales.md have the rule).
            The cost grows with the sum of their squares; steps of 1.2 to 1.4 are enough. None takes
            those that suit the basis and have room in the kernel (:func:`scalesteer.harmonics.recommended_scales`):
            with the default basis eleven from 0.29 to 6.3, with the paper's functions the paper's six from 1 to 2.4.
        basis: The functions that filters are made of, a :class:`~scalesteer.LogRadialBasis` or the name of a preset:
            ``"smooth"``, which steers best on real grids and can tell the two sides of an edge; ``"paper"``;
            ``"area"``, the paper's averaged over pixels; or ``"released-code"``.
        reduce: ``"max"`` over scales, or None for the responses of all scales on an axis of their own.
        backend: ``"direct"`` (one convolution for each scale), ``"fast"`` (mostly products of frequencies) or
            ``"auto"``, which takes ``"fast"`` for filters of many taps, or with ``scalesteer.fast.benchmark = True``
            the one that is faster in a trial. The numbers are the same up to rounding; what is not finite spreads
            further in ``"fast"``, as NaN. Exported programs may have dynamic batch, height and width.

    Shape:
        `(B, C_in, H, W)` -> `(B, C_out, H', W')`, or `(B, C_out, S, H', W')` with ``reduce=None``.

    Attributes:
        coefficients: Learned, `(C_out, C_in / groups, K, J, 2)`; the last axis is real and imaginary part.
        bias: Learned, `(C_out,)`, or None.
        steered_basis: Fixed, `(2 K J, T)`, not in the state dict. It is made again, from numbers in float64, whenever
            the layer is moved, converted or loaded: ``layer.double()`` has a basis of full precision.

    Raises:
        ValueError: If an argument is out of its range, if the window of a scale is a single pixel, or if the windows
            of all scales have more taps than one of 511 x 511.

    Warns:
        UserWarning: If `scales` that differ by more than a fifth share a window, as the paper's do with a kernel of 3:
            3, 3, 5, 5, 7, 7. An averaged edge, as the default basis has, grows within its pixels: no warning then.

    Example:
        >>> layer = ScaleSteerableConv2d(3, 8, 7, padding="same")
        >>> y, scale = layer(torch.randn(2, 3, 32, 32), return_scales=True)
        >>> y.shape, [f.shape[-1] for f in layer.filters()]
        (torch.Size([2, 8, 32, 32]), [3, 3, 5, 7, 7, 11, 13, 19, 25, 33, 45])
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
        scales: Sequence[float] | None = None,
        basis: LogRadialBasis | str = "smooth",
        reduce: Literal["max"] | None = "max",
        backend: str = "auto",
    ) -> None:
        conv = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
        functions = LogRadialBasis.of(basis)
        if scales is None:
            scales = harmonics.recommended_scales(functions, _checks.kernel_size(kernel_size))
        super().__init__(*conv, scales)
        self.sizes = harmonics.window_sizes(self.geometry.kernel_size, self.scales, functions)
        self.basis = functions.resolve(self.sizes[-1])
        if reduce not in ("max", None):
            raise ValueError(f"`reduce` must be 'max' or None (got {reduce!r}).")
        self.reduce = reduce
        self.backend = _checks.choice("backend", backend, functional.BACKENDS)
        shape = (self.out_channels, self.in_channels // self.groups, *self.basis.shape, 2)
        self._add_parameters("coefficients", shape, bias, device, dtype)
        self.register_buffer("steered_basis", None, persistent=False)
        self.reset_parameters()
        self.reset_buffers()

    def reset_parameters(self) -> None:
        """Draw new coefficients and set the bias to zero; the class's note explains the distribution."""
        if self.coefficients.is_meta:  # without numbers; the size of random ones would be found at some cost
            return
        mixing = initial_mixing(self.basis, self.geometry.kernel_size, self.scales)
        with torch.no_grad(), no_autocast(self.coefficients.device):
            unit = self.coefficients.normal_()
            work = torch.promote_types(unit.dtype, torch.float32)
            factor = torch.tensor(mixing / math.sqrt(unit.shape[1]), dtype=work, device=unit.device)
            self.coefficients.copy_((unit.flatten(2).to(work) @ factor).view_as(unit))
            if self.bias is not None:
                self.bias.zero_()

    def reset_buffers(self) -> None:
        """Make the steered basis again, in the parameters' dtype and on their device; moves and loading do it too."""
        like = self._like()
        numbers = harmonics.stacked_basis(self.basis, self.geometry.kernel_size, self.scales)
        self.steered_basis = torch.tensor(numbers, dtype=like.dtype, device=like.device)

    def _stored_filters(self) -> Filters:
        return Filters(self.coefficients.flatten(2), self.steered_basis, self.sizes, self.basis.point_symmetric)

    def with_scales(self, scales: Sequence[float]) -> Self:
        """The same layer at other scales: parameters are shared with this one, not copied; all else is kept.

        Steering is exact, so that a trained layer can be asked for scales it was never trained at. (The preset
        ``"released-code"`` keeps the largest window it was built with; steering it beyond is inexact.)
        """
        scales = _checks.ascending("scales", scales)
        sizes = harmonics.window_sizes(self.geometry.kernel_size, scales, self.basis)
        other = twin(self, scales=scales, sizes=sizes)
        other.reset_buffers()
        return other

    def _folded(self) -> FoldedScaleConv2d:
        return FoldedScaleConv2d(self)

    def _shown(self) -> dict[str, tuple[Any, Any]]:
        presets = (name for name, basis in harmonics.PRESETS.items() if basis.resolve(self.sizes[-1]) == self.basis)
        return {**super()._shown(), "basis": (next(presets, self.basis), "smooth")}


class FoldedScaleConv2d(_ScaleConv2d):
    """A :class:`ScaleSteerableConv2d` whose filters are finished: the same output, nothing left to learn.

    Made by :func:`fold`. The filters of all scales lie side by side in the buffer `taps` `(C_out, C_in / groups, T)`,
    which is in the state dict. To change it, use operations on the tensor itself: what the fast backend keeps of it
    does not see changes through `taps.data` or numpy.
    """

    taps: Tensor

    def __init__(self, layer: ScaleSteerableConv2d) -> None:
        super().__init__(**{name: getattr(layer, name) for name in (*ARGUMENTS, "scales")})
        self.sizes, self.reduce, self.backend = layer.sizes, layer.reduce, layer.backend
        self.symmetric = layer.basis.point_symmetric
        take_finished(self, layer, ScaleSteerableConv2d)

    def _stored_filters(self) -> Filters:
        return Filters(self.taps, None, self.sizes, self.symmetric)


def take_finished(folded: MultiScaleConv2d, layer: MultiScaleConv2d, original: type[MultiScaleConv2d]) -> None:
    """Give a folded layer the finished filters, the bias, the hooks and the mode of the layer that it stands for.

    Raises:
        TypeError: If the layer has a forward pass or filters of its own, other than those of the `original` class.
    """
    kind = type(layer)
    for name in ("forward", "filters", "_convolve", "_stored_filters"):
        if name in vars(layer) or getattr(kind, name) is not getattr(original, name):
            own = f"it has its own `{name}`, which a folded layer would not run"
            raise TypeError(f"a {kind.__name__} cannot be folded: {own}.")
    for name, value in vars(layer).items():
        if name.startswith(("_forward_", "_backward_", "_is_full_backward")):  # hooks
            folded.__dict__[name] = copy.copy(value)
    with evaluation_mode(layer):  # in training mode a spectral norm changes whenever it is computed
        for key, hook in layer._forward_pre_hooks.items():
            if type(hook).__module__.startswith("torch.nn.utils."):  # pruning and the like makes the coefficients
                hook(layer, ())
                del folded._forward_pre_hooks[key]
        with torch.no_grad():
            folded.register_buffer("taps", layer._stored_filters().finished().weights)
            folded.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
    folded.train(layer.training)


Twin = TypeVar("Twin", bound=nn.Module)


def twin(module: Twin, **changes: Any) -> Twin:
    """A module that shares parameters, buffers and modules with another, except for some attributes."""
    other = module.__new__(type(module))
    # Tables of parameters, buffers, modules and hooks of its own, with the same entries.
    own = {name: value.copy() if isinstance(value, (dict, set)) else value for name, value in vars(module).items()}
    other.__dict__.update(own, **changes)
    return other


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every module is in the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def fold(model: nn.Module, backend: str | None = None) -> nn.Module:
    """A copy of `model` in which every steered convolution holds its finished filters, for inference.

    Parametrizations and pruning of the coefficients are finished too; other hooks are kept.

    Args:
        model: Any module with such layers in it.
        backend: ``"direct"``, ``"fast"`` or ``"auto"``, for all of these layers; None keeps that of each. A program
            that is exported with ``"direct"`` holds convolutions alone.

    Raises:
        TypeError: If a layer is of a class with its own forward pass or filters.
        ValueError: If `backend` is none of these.

    Example:
        >>> folded = fold(nn.Sequential(ScaleSteerableConv2d(1, 4), nn.ReLU()))
        >>> sum(p.numel() for p in folded.parameters())
        0
    """
    layers = [module for module in model.modules() if isinstance(module, MultiScaleConv2d)]
    finished = {id(layer): folded for layer in layers if (folded := layer._folded()) is not None}
    if backend is not None:
        for folded in finished.values():
            folded.backend = _checks.choice("backend", backend, functional.BACKENDS)
    # What a copy finds here takes the place of the layer, so that a layer that is used twice stays one.
    return copy.deepcopy(model, finished)
