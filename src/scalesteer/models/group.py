"""Networks that keep the axis of scales to their end: they take images of any size, as those of :mod:`pooled` do.

Where an object grows by one step of the scales, all features move by one scale; a maximum over scales and over space
reads out.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from torch import nn

from scalesteer import _checks
from scalesteer.baselines import FittedBasis, HermiteBasis
from scalesteer.group import OCTAVE, Basis, ScaleBlurPool2d, ScaleGroupConv2d, ScaleMax
from scalesteer.harmonics import LogRadialBasis
from scalesteer.models.network import Models, Scales
from scalesteer.models.pooled import STEERED_BASIS, PooledPlan, ResidualBlock

BASES: dict[str, Basis] = {"hermite": HermiteBasis(5), "fitted": FittedBasis(24)}
"""Compared bases by name, of about as many functions as `STEERED_BASIS` has."""


def _convolution(
    scales: Scales, basis: LogRadialBasis | str, ends: str, backend: str
) -> Callable[..., ScaleGroupConv2d]:
    """Makes group convolutions without a bias, of (channels that come in, that go out, kernel size, reach)."""
    functions = BASES.get(basis, basis) if isinstance(basis, str) else basis
    conv = partial(ScaleGroupConv2d, padding="same", bias=False, scales=scales, basis=functions, ends=ends)
    return lambda fan_in, fan_out, size, reach=1: conv(fan_in, fan_out, size, reach=reach, backend=backend)


def group_cnn(
    plan: PooledPlan,
    *,
    scales: Scales = OCTAVE,
    basis: LogRadialBasis | str = STEERED_BASIS,
    reach: int = 2,
    ends: str = "zeros",
    backend: str = "auto",
) -> nn.Sequential:
    """Scale-equivariant convolutions, then the maximum over scales.

    `basis` may also be ``"hermite"`` or ``"fitted"``, those of compared methods; the first layer has a `reach` of 1.
    """
    conv = _convolution(scales, basis, ends, backend)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, ((fan_in, fan_out), size) in enumerate(zip(plan.stages, plan.kernel_sizes, strict=True), start=1):
        layers[f"conv{i}"] = conv(fan_in, fan_out, size, reach if i > 1 else 1)
        layers[f"norm{i}"], layers[f"relu{i}"] = nn.BatchNorm3d(fan_out), nn.ReLU()
        if i in plan.subsample:
            layers[f"blur{i}"] = ScaleBlurPool2d(scales)
    layers["scales"] = ScaleMax()
    return nn.Sequential(layers)


class GroupBlock(ResidualBlock):
    """A residual block of maps with an axis of scales: `(B, in_channels, S, H, W)` -> `(B, out_channels, S, H, W)`."""

    def __init__(self, body: nn.Module, in_channels: int, out_channels: int) -> None:
        super().__init__(body, out_channels, out_channels)
        if in_channels != out_channels:
            fit = nn.Conv3d(in_channels, out_channels, 1, bias=False)
            self.shortcut = nn.Sequential(fit, nn.BatchNorm3d(out_channels))


def group_resnet(
    plan: PooledPlan,
    *,
    scales: Scales = OCTAVE,
    basis: LogRadialBasis | str = STEERED_BASIS,
    reach: int = 2,
    ends: str = "zeros",
    backend: str = "auto",
    blocks: int = 1,
) -> nn.Sequential:
    """Residual blocks of two scale-equivariant convolutions, `blocks` in each stage; the second one has the `reach`."""
    conv, blocks = _convolution(scales, basis, ends, backend), _checks.integer("blocks", blocks, minimum=1)
    width = plan.widths[0]
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=conv(plan.in_chans, width, plan.kernel_sizes[0]))
    layers["norm1"], layers["relu1"] = nn.BatchNorm3d(width), nn.ReLU()
    for i, ((fan, out), size) in enumerate(
        zip(itertools.pairwise((width, *plan.widths)), plan.kernel_sizes, strict=True), start=1
    ):
        stage = nn.Sequential()
        for fan_in in (fan, *[out] * (blocks - 1)):
            body = (conv(fan_in, out, size), nn.BatchNorm3d(out), nn.ReLU(), conv(out, out, size, reach))
            stage.append(GroupBlock(nn.Sequential(*body, nn.BatchNorm3d(out)), fan_in, out))
        layers[f"stage{i}"] = stage
        if i in plan.subsample:
            layers[f"blur{i}"] = ScaleBlurPool2d(scales)
    layers["scales"] = ScaleMax()
    return nn.Sequential(layers)


MODELS: Models = {  # with the usual options
    "group-cnn": (
        group_cnn,
        PooledPlan(widths=(32, 63, 95), hidden=1024, dropout=0.7, subsample=(1, 2), readout="features"),
    ),
    "group-resnet": (group_resnet, PooledPlan(widths=(16, 32, 64), subsample=(1, 2), readout="mean")),
}
ABOUT = {
    "group-cnn": "scale-equivariant to its end, over one octave: all features keep an axis of scales",
    "group-resnet": "group-cnn with residual blocks and fewer weights",
}
