"""The networks of the paper's experiments: SS-CNN and what it is compared with, at equal numbers of parameters.

They flatten a grid of cells into a fully connected layer, so that each is built for one size of image. All have three
convolutions and two fully connected layers. What the paper's appendix leaves open is the same for all: convolution with
bias, (maximum over scales,) ReLU, max-pooling, batch normalisation, three times; fully connected 256, batch
normalisation, ReLU, dropout 0.7, fully connected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import _checks, baselines
from scalesteer.harmonics import PAPER_SCALES, LogRadialBasis
from scalesteer.models.network import Models, Network, Plan, Scales
from scalesteer.nn import ScaleSteerableConv2d


@dataclass(frozen=True)
class FlatPlan(Plan):
    """A network like the paper's: three convolutions, a grid of cells, two fully connected layers."""

    image_size: tuple[int, int] = (28, 28)
    widths: tuple[int, ...] = (30, 60, 90)  # channels of the three convolutions
    hidden: int = 256  # units between the two fully connected layers
    dropout: float = 0.7
    upsample: int = 1  # by how much the input is enlarged, 1 or 2

    def __post_init__(self) -> None:
        if not isinstance(self.widths, (tuple, list)) or len(self.widths) != 3:
            raise ValueError(f"`widths` must be 3 integers, one for each convolution (got {self.widths!r}).")
        super().__post_init__()
        _checks.integer("hidden", self.hidden, minimum=1)
        if _checks.integer("upsample", self.upsample, minimum=1) > 2:
            raise ValueError(f"`upsample` must be 1 or 2 (got {self.upsample}).")
        if self.cells < 1:
            raise ValueError(f"`image_size` must be at least 8 x 8, so that a cell is left (got {self.image_size}).")

    @property
    def feature_size(self) -> tuple[int, int]:
        """Height and width of the images that reach the features."""
        return self.image_size[0] * self.upsample, self.image_size[1] * self.upsample

    @property
    def pools(self) -> tuple[tuple[int, int], ...]:
        """Window and padding of each pooling: the last covers the same part of the image whatever the upsampling."""
        return (2, 0), (2, 0), (4 * self.upsample, self.upsample)

    @property
    def cells(self) -> int:
        """Pixels that are left of each channel: 2 x 2 of 28 x 28, 2 x 3 of 28 x 40, with either upsampling."""
        height, width = self.feature_size
        for window, padding in self.pools:
            height, width = (max(0, (n + 2 * padding - window) // window + 1) for n in (height, width))
        return height * width

    def network(self, features: nn.Sequential) -> FlatNetwork:
        return FlatNetwork(features, self)


class FlatNetwork(Network):
    """Divide by the standard deviation, upsample, extract features, flatten, classify: the paper's networks.

    The names of `features` are conv1, relu1, pool1, norm1, conv2, …
    """

    def __init__(self, features: nn.Sequential, plan: FlatPlan) -> None:
        super().__init__(features, plan)
        self.upsample = plan.upsample
        self.register_buffer("input_std", torch.ones(()))
        self.classifier = nn.Sequential(
            OrderedDict(
                flatten=nn.Flatten(),
                fc1=nn.Linear(plan.widths[-1] * plan.cells, plan.hidden),
                norm=nn.BatchNorm1d(plan.hidden),
                relu=nn.ReLU(),
                dropout=nn.Dropout(plan.dropout),
                fc2=nn.Linear(plan.hidden, plan.num_classes),
            )
        )

    def prepare(self, x: Tensor) -> Tensor:
        """What the features see of the input: divided by the standard deviation and upsampled (bilinear)."""
        _checks.images(x, self.in_chans, self.input_std)
        if tuple(x.shape[-2:]) != self.image_size:
            size = ", ".join(map(str, (self.in_chans, *(self.image_size or ()))))
            raise ValueError(f"the input must have shape (B, {size}) (got {tuple(x.shape)}).")
        x = x / self.input_std
        return x if self.upsample == 1 else F.interpolate(x, scale_factor=self.upsample, mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(self.prepare(x)))
        return logits


def _flat_features(plan: FlatPlan, conv: Callable[[int, int], nn.Module]) -> nn.Sequential:
    """Three times convolution, ReLU, max-pooling and batch normalisation."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, ((fan_in, fan_out), (window, padding)) in enumerate(zip(plan.stages, plan.pools, strict=True), start=1):
        layers[f"conv{i}"] = conv(fan_in, fan_out)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.MaxPool2d(window, padding=padding)
        layers[f"norm{i}"] = nn.BatchNorm2d(fan_out)
    return nn.Sequential(layers)


def ss_cnn(
    plan: FlatPlan, *, scales: Scales = PAPER_SCALES, basis: LogRadialBasis | str = "paper", backend: str = "auto"
) -> nn.Sequential:
    """The paper's network: scale-steerable filters of size 7 to 17 in every layer."""
    conv = partial(ScaleSteerableConv2d, padding="same", scales=scales, basis=basis, backend=backend)
    return _flat_features(plan, conv)


def plain_cnn(plan: FlatPlan) -> nn.Sequential:
    """Ordinary 7 x 7 convolutions."""
    return _flat_features(plan, partial(nn.Conv2d, kernel_size=7, padding=3))


def locally_scale_invariant_cnn(
    plan: FlatPlan, *, scales: Scales = baselines.KANAZAWA_SCALES, antialias: bool = False
) -> nn.Sequential:
    """7 x 7 filters on resized images (Kanazawa et al. 2014)."""
    conv = partial(baselines.LocallyScaleInvariantConv2d, padding="same", scales=scales, antialias=antialias)
    return _flat_features(plan, conv)


def vector_field_cnn(
    plan: FlatPlan,
    conv: type[baselines.VectorFieldConv2d] = baselines.VectorFieldConv2d,
    *,
    scales: Scales = baselines.MARCOS_SCALES,
    antialias: bool = True,
) -> nn.Sequential:
    """Vector fields of response and scale (Marcos et al. 2018); narrower, since vectors need twice the filters."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, ((fan_in, fan_out), (window, padding)) in enumerate(zip(plan.stages, plan.pools, strict=True), start=1):
        # The ReLU is inside: lengths are not negative.
        layers[f"conv{i}"] = conv(
            fan_in, fan_out, padding="same", scales=scales, antialias=antialias, vector_input=i > 1
        )
        layers[f"pool{i}"] = baselines.VectorMaxPool2d(window, padding=padding)
        layers[f"norm{i}"] = baselines.VectorBatchNorm2d(fan_out)
    layers["magnitude"] = baselines.VectorMagnitude()
    return nn.Sequential(layers)


def spatial_transformer(plan: FlatPlan) -> nn.Sequential:
    """The plain CNN behind a spatial transformer (Jaderberg et al. 2015), which localises at the original size."""
    transformer = baselines.SpatialTransformer2d(plan.in_chans, plan.feature_size, shrink=plan.upsample)
    return nn.Sequential(OrderedDict(transformer=transformer, **dict(plain_cnn(plan).named_children())))


MODELS: Models = {  # with the usual options
    "ss-cnn": (ss_cnn, FlatPlan(upsample=2)),
    "plain-cnn": (plain_cnn, FlatPlan()),
    "locally-scale-invariant-cnn": (locally_scale_invariant_cnn, FlatPlan()),
    "vector-field-cnn": (vector_field_cnn, FlatPlan(widths=(22, 44, 66))),
    "spatial-transformer": (spatial_transformer, FlatPlan()),
}
ABOUT = {
    "ss-cnn": "the paper's network: scale-steerable filters of 7 to 17 pixels in every layer",
    "plain-cnn": "the same network with ordinary filters of 7 x 7, to compare with",
    "locally-scale-invariant-cnn": "a rival in the paper (LocScaleInv-CNN): ordinary filters on resized images",
    "vector-field-cnn": "a rival in the paper (LocScaleEq-CNN): passes on the strongest response and its scale",
    "spatial-transformer": "a rival in the paper: learns to move and resize the image before plain-cnn sees it",
}
