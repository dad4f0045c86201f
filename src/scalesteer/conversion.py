"""The convolutions of an existing network, made scale-steerable: it starts from its trained filters, not from noise."""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.weight_norm import WeightNorm

from scalesteer import _checks, harmonics
from scalesteer.harmonics import LogRadialBasis
from scalesteer.nn import ScaleSteerableConv2d

# Functions that are nearly sums of others would get huge coefficients, which cancel at scale 1 and at no other scale.
# Leaving out those below this share of the largest singular value costs random filters of 3 x 3 a residual of 4 to 5 %
# in windows of 5 and 7, nothing in 3; with them the error of steering is 1.6 to 1.8 times as large.
_SMALLEST_SHARE = 1e-2
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ConvertedLayer:
    """What became of one convolution. Where it was left alone, the numbers are None."""

    name: str  # in the model; a convolution that is used in several places has the first one
    old_kernel: tuple[int, ...]  # its window, height and width
    new_kernel: int | None = None  # the window at scale 1 of the layer in its place
    # What the basis cannot express of the old filters: the norm of the difference over the norm of the filters, at
    # scale 1; NaN without numbers (meta device).
    residual: float | None = None
    taps: float | None = (
        None  # of all scales over those of the old filter: the cost, if each scale were one convolution
    )
    reason: str = ""  # why it was left alone


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did, layer by layer, in the order of the model's modules; printed it is a table."""

    layers: tuple[ConvertedLayer, ...]

    @property
    def converted(self) -> tuple[ConvertedLayer, ...]:
        return tuple(layer for layer in self.layers if layer.new_kernel is not None)

    def __str__(self) -> str:
        rows = [("layer", "kernel", "new kernel", "residual", "taps")]
        for layer in self.layers:
            old = " x ".join(map(str, layer.old_kernel))
            if layer.new_kernel is None or layer.residual is None or layer.taps is None:
                rows.append((layer.name, old, f"left alone: {layer.reason}", "", ""))
            else:
                new = f"{layer.new_kernel} x {layer.new_kernel}"
                rows.append((layer.name, old, new, f"{100 * layer.residual:.1f} %", f"x {layer.taps:.3g}"))
        # A reason may be long: it has the rest of its line.
        widths = [max(len(row[i]) for row in rows if row[3] or i < 2) for i in range(5)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def convert(
    model: nn.Module,
    *,
    where: Callable[[str, nn.Conv2d], bool] | None = None,
    kernel_size: int | None = None,
    scales: Sequence[float] | None = None,
    basis: LogRadialBasis | str = "smooth",
) -> tuple[nn.Module, Conversion]:
    """A copy of `model` whose convolutions are scale-steerable, and what became of each of them.

    Every chosen `nn.Conv2d` becomes a :class:`~scalesteer.ScaleSteerableConv2d` with the same channels, stride,
    padding, dilation, groups and bias, hence the same output shapes. Its coefficients are those whose filter at scale
    1 is nearest to the old filter, by least squares. Dtype, device, mode, hooks and `requires_grad` are kept; what was
    shared stays shared; weight norm goes on to norm the coefficients.

    Left alone, with the reason in the report: windows of one pixel, even or rectangular ones (they have no centre, or
    no one size), transposed, lazy, one- and three-dimensional convolutions, subclasses with a forward pass of their
    own, and what is not real.

    Note:
        At ``scales=(1.0,)`` the copy answers as the model did, up to the residuals. With several scales it does not:
        a maximum over scales is larger than one response. Measure batch statistics again
        (`torch.optim.swa_utils.update_bn`) and train; docs/guide/convert.md says when that pays.

    Note:
        A converted layer has `coefficients` and `filters()`, no `weight`: code that reads ``conv.weight`` must change.

    Args:
        model: Any network, or a single convolution. It is not changed.
        where: Which ones, ``where(name, conv)``; by default all that can be. ``name`` is that of `named_modules`.
        kernel_size: Odd; smaller windows are enlarged to it, and their padding with them, so that shapes stay. By
            default every window keeps its size. A filter of 3 x 3 has hardly room to be steered.
        scales: Those of the layers; the layer's default suits the basis and the window.
        basis: The functions that filters are made of, a basis or the name of a preset. ``"paper"`` and ``"area"`` are
            point-symmetric and cannot express most trained filters: the report shows large residuals.

    Raises:
        TypeError: If the model is quantised, or a chosen convolution has a parametrization other than weight norm.
        ValueError: If no convolution was converted, or if an argument is out of its range.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1))
        >>> steered, report = convert(net, kernel_size=5, scales=(1.0, 1.4, 2.0))
        >>> print(report)
        layer  kernel  new kernel  residual  taps
        0      3 x 3   5 x 5       4.2 %     x 21.7
        2      1 x 1   left alone: one pixel has no size
        >>> steered(torch.rand(1, 3, 32, 32)).shape
        torch.Size([1, 8, 16, 16])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an nn.Module (got {type(model).__name__}).")
    smallest = 3 if kernel_size is None else _checks.kernel_size(kernel_size)
    basis, scales = LogRadialBasis.of(basis), None if scales is None else _checks.ascending("scales", scales)
    layers = []
    # What a copy finds here takes the place of the original, so that whatever is shared stays shared.
    memo: dict[int, Any] = {}
    tied: dict[tuple[int, int], nn.Parameter] = {}
    for name, conv in model.named_modules():
        # Old weight norms and pruning keep what they made last, part of a graph, which torch does not copy.
        memo |= {id(t): t.detach() for t in vars(conv).values() if isinstance(t, Tensor) and not t.is_leaf}
        _refuse_quantised(name, conv)
        if not isinstance(conv, nn.modules.conv._ConvNd):
            continue
        reason = _why_not(conv)
        if not reason and isinstance(conv, nn.Conv2d):
            if where is None or where(name, conv):
                layer, residual = _steerable(name, conv, smallest, scales, basis, memo, tied)
                memo[id(conv)] = layer
                new = layer.geometry.kernel_size
                taps = sum(n * n for n in layer.sizes) / math.prod(conv.kernel_size)
                layers.append(ConvertedLayer(name, conv.kernel_size, new, residual, taps))
                continue
            reason = "`where` did not choose it"
        layers.append(ConvertedLayer(name, tuple(conv.kernel_size), reason=reason))
    report = Conversion(tuple(layers))
    if not report.converted:
        found = f":\n{report}" if layers else " (it has no nn.Conv2d)."
        raise ValueError(f"`model` has no convolution that could be converted{found}")
    return copy.deepcopy(model, memo), report


def _why_not(conv: nn.Module) -> str:
    """Why a convolution is left alone, or ""."""
    kind = type(conv)
    if isinstance(conv, nn.modules.lazy.LazyModuleMixin) and conv.has_uninitialized_params():
        return "lazy: apply the model to an image first"
    if not isinstance(conv, nn.Conv2d):
        return f"{kind.__name__} has no scale-steerable form"
    own = "forward" in vars(conv) or any(
        getattr(kind, method) is not getattr(nn.Conv2d, method) for method in ("forward", "_conv_forward")
    )
    if own:
        return f"{kind.__name__} has a forward pass of its own"
    height, width = conv.kernel_size
    if height != width:
        return "a rectangular window has no one size"
    if height == 1:
        return "one pixel has no size"
    if height % 2 == 0:
        return "an even window has no centre pixel"
    dtype = next(itertools.chain(conv.parameters(), conv.buffers())).dtype
    return "" if dtype in _DTYPES else f"its weights are {dtype}"


def _refuse_quantised(name: str, module: nn.Module) -> None:
    kind: type = type(module)
    if not kind.__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.q", "torch.ao.nn.qat")):
        weight = module._parameters.get("weight") if isinstance(module, nn.modules.conv._ConvNd) else None
        if weight is None or type(weight) in (nn.Parameter, nn.UninitializedParameter):
            return
        kind = type(weight)  # as those of torchao, or weights that lie on several devices
    raise TypeError(
        f"`model` is quantised or distributed: {name or 'it'} has {kind.__module__}.{kind.__qualname__}. Convert the "
        "floating-point model first, then quantise or distribute the result."
    )


def _steerable(
    name: str,
    conv: nn.Conv2d,
    smallest: int,
    scales: Sequence[float] | None,
    basis: LogRadialBasis,
    memo: dict[int, Any],
    tied: dict[tuple[int, int], nn.Parameter],
) -> tuple[ScaleSteerableConv2d, float]:
    """The layer that takes the place of a convolution, and the residual of its filters."""
    norm, handle = _weight_norm(name, conv)
    weight = norm.compute_weight(conv) if isinstance(norm, WeightNorm) else conv.weight
    old, padding = conv.kernel_size[0], conv.padding
    size = max(old, smallest)
    if size > old and padding != "same":
        border = (0, 0) if isinstance(padding, str) else padding
        padding = tuple(p + d * (size - old) // 2 for p, d in zip(border, conv.dilation, strict=True))
    names = ("in_channels", "out_channels", "stride", "dilation", "groups", "padding_mode")
    arguments: dict[str, Any] = {name: getattr(conv, name) for name in names}
    arguments |= {"kernel_size": size, "padding": padding, "bias": conv.bias is not None}
    arguments |= {"device": "meta", "dtype": weight.dtype}  # no random numbers are drawn there
    try:
        layer = ScaleSteerableConv2d(**arguments, scales=scales, basis=basis)
    except ValueError as error:
        raise ValueError(f"{name or 'the convolution'} cannot be converted: {error}") from error
    start, residual = _project(weight, layer)
    trained = any(p.requires_grad for name, p in conv.named_parameters() if name != "bias")
    coefficients = nn.Parameter(start.to(weight.device), requires_grad=trained)
    learned = conv._parameters.get("weight")
    layer.coefficients = coefficients if learned is None else tied.setdefault((id(learned), size), coefficients)
    layer.bias = copy.deepcopy(conv.bias, memo)
    layer.reset_buffers()
    for attribute, value in vars(conv).items():
        if attribute.startswith(("_forward_", "_backward_", "_is_full_backward")):  # hooks
            layer.__dict__[attribute] = copy.copy(value)
    if norm is not None:
        layer._forward_pre_hooks.pop(handle, None)
        parametrizations.weight_norm(layer, "coefficients", norm.dim)
    return layer.train(conv.training), residual


def _project(weight: Tensor, layer: ScaleSteerableConv2d) -> tuple[Tensor, float]:
    """The coefficients whose filters at scale 1 are nearest to those given, and how far these are, relatively."""
    shape, size = layer.coefficients.shape, layer.geometry.kernel_size
    if weight.is_meta:
        return torch.empty(shape, dtype=weight.dtype, device="meta"), math.nan
    functions = harmonics.steered_basis(layer.basis, size, 1.0).reshape(-1, size * size)  # (D, T)
    beyond = (size - weight.shape[-1]) // 2
    wanted = F.pad(weight.detach().cpu().double(), (beyond,) * 4).flatten(2)  # (O, I, T)
    inverse = np.linalg.pinv(functions, rcond=_SMALLEST_SHARE)
    found = (wanted @ torch.from_numpy(inverse)).to(weight.dtype)
    missed = (found.double() @ torch.from_numpy(functions) - wanted).norm()
    return found.view(shape), float(missed / wanted.norm()) if wanted.any() else 0.0


def _weight_norm(name: str, conv: nn.Conv2d) -> tuple[WeightNorm | parametrizations._WeightNorm | None, int]:
    """The weight norm of a convolution, of the new kind or of the old, which is a hook with a handle; any other error.

    Raises:
        TypeError: If anything else makes the weight or the bias.
    """
    found = [(key, step, -1) for key, steps in getattr(conv, "parametrizations", {}).items() for step in steps]
    for handle, hook in conv._forward_pre_hooks.items():
        if type(hook).__module__.startswith("torch.nn.utils."):  # the old norms, and pruning
            found.append((getattr(hook, "name", ""), hook, handle))
    if not found:
        return None, -1
    (key, step, handle), *others = found
    if key == "weight" and isinstance(step, (WeightNorm, parametrizations._WeightNorm)) and not others:
        return step, handle
    shown = ", ".join(type(step).__name__ for _, step, _ in found)
    raise TypeError(
        f"`model` has a parametrization that coefficients cannot keep, {shown} of {name or 'it'}: finish it first "
        "(torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.remove_spectral_norm, "
        "torch.nn.utils.prune.remove), or leave this convolution out with `where`."
    )
