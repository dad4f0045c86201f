"""The networks of the paper's experiments: SS-CNN and what it is compared with, at equal numbers of parameters.

All have three convolutions and two fully connected layers. What the paper's appendix leaves open is the same for all:
convolution with bias, (maximum over scales,) ReLU, max-pooling, batch normalisation, three times; fully connected 256,
batch normalisation, ReLU, dropout 0.7, fully connected.
"""

from __future__ import annotations

import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import _checks, baselines
from scalesteer.harmonics import PAPER_SCALES, LogRadialBasis
from scalesteer.nn import ScaleSteerableConv2d

Builder = Callable[..., nn.Sequential]
Scales = tuple[float, ...]


class Task(NamedTuple):
    """What a dataset asks of a network."""

    image_size: tuple[int, int]
    classes: int


DATASETS = {
    "mnist-scale": Task((28, 28), 10),
    "fmnist-scale": Task((28, 28), 10),
    "mnist-scale-local-2": Task((28, 40), 10),
}


@dataclass(frozen=True)
class Plan:
    """What a builder needs to know: the size of the images that reach the features, the widths and the upsampling."""

    image_size: tuple[int, int]
    widths: tuple[int, ...]
    upsample: int

    @property
    def pools(self) -> tuple[tuple[int, int], ...]:
        """Window and padding of each pooling: the last covers the same part of the image whatever the upsampling."""
        return (2, 0), (2, 0), (4 * self.upsample, self.upsample)

    @property
    def cells(self) -> int:
        """Pixels that are left of each channel: 2 x 2 of 28 x 28, 2 x 3 of 28 x 40, with either upsampling."""
        height, width = self.image_size
        for window, padding in self.pools:
            height, width = ((n + 2 * padding - window) // window + 1 for n in (height, width))
        return height * width


_MODELS: dict[str, tuple[Builder, int, tuple[int, ...]]] = {}  # with the usual upsampling and widths


def register_model(
    name: str, *, upsample: int = 1, widths: tuple[int, ...] = (30, 60, 90)
) -> Callable[[Builder], Builder]:
    """Make a builder of features known to :func:`create_model` by name.

    The builder takes a :class:`Plan` and its own options as keywords; its result, from an image with one channel,
    has `widths[-1]` channels of `plan.cells` pixels, and its first convolution is called ``conv1``. `upsample` is that
    of the input that the paper used for the network, `widths` the channels of the three convolutions.
    """
    if name in _MODELS:
        raise ValueError(f"a model named {name!r} is registered already.")

    def add(build: Builder) -> Builder:
        _MODELS[name] = build, upsample, widths
        return build

    return add


def list_models() -> list[str]:
    """The names that :func:`create_model` knows, in the order of the alphabet."""
    return sorted(_MODELS)


def create_model(name: str, dataset: str = "mnist-scale", upsample: int | None = None, **options: Any) -> Network:
    """Build a network, with new weights, for a dataset.

    Args:
        name: One of :func:`list_models`.
        dataset: ``"mnist-scale"``, ``"fmnist-scale"`` (1 x 28 x 28) or ``"mnist-scale-local-2"`` (1 x 28 x 40).
        upsample: Enlarge the input by 1 or 2; None for what the paper used (2 for SS-CNN, 1 for the others).
        options: For every network `widths` (of the three convolutions), `hidden` (256) and `dropout` (0.7); `scales`
            where a method has them; `basis` (a LogRadialBasis or the name of a preset) and `backend` for ``"ss-cnn"``;
            `antialias` where images are resized.

    Example:
        >>> model = create_model("ss-cnn", basis="area")
        >>> model(torch.rand(2, 1, 28, 28)).shape, count_parameters(model)
        (torch.Size([2, 10]), 443078)
    """
    build, usual_upsample, usual_widths = _MODELS[_checks.choice("name", name, list_models())]
    task = DATASETS[_checks.choice("dataset", dataset, list(DATASETS))]
    upsample = usual_upsample if upsample is None else _checks.integer("upsample", upsample, minimum=1)
    if upsample not in (1, 2):
        raise ValueError(f"`upsample` must be 1 or 2 (got {upsample}).")
    own = [p.name for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        try:
            _checks.choice("options", option, [*own, "widths", "hidden", "dropout"])
        except ValueError as error:
            raise TypeError(f"{name} has no option {option!r}: {error}") from None
    widths = options.pop("widths", usual_widths)
    if not isinstance(widths, (tuple, list)) or len(widths) != len(usual_widths):
        raise ValueError(f"`widths` must be {len(usual_widths)} integers, one for each convolution (got {widths!r}).")
    hidden, dropout = options.pop("hidden", 256), options.pop("dropout", 0.7)
    widths = tuple(_checks.integer(f"widths[{i}]", w, minimum=1) for i, w in enumerate(widths))
    plan = Plan((task.image_size[0] * upsample, task.image_size[1] * upsample), widths, upsample)
    return Network(build(plan, **options), task, plan, hidden, dropout)


def count_parameters(model: nn.Module) -> int:
    """How many numbers are learned."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


class Network(nn.Module):
    """Divide by the standard deviation, upsample, extract features, classify.

    Shape:
        `(B, 1, H, W)` -> `(B, classes)`, logits.

    Attributes:
        features: The convolutional part, an `nn.Sequential` with names: conv1, relu1, pool1, norm1, conv2, …
        classifier: The fully connected part.
        input_std: The number the input is divided by, 1 until training code sets it to that of the training set; in
            the state dict, so that a checkpoint is complete.
        first: The first convolution; ``model.first(model.prepare(x))`` is its response, except behind a spatial
            transformer, which shows it another image.
    """

    input_std: Tensor

    def __init__(self, features: nn.Sequential, task: Task, plan: Plan, hidden: int, dropout: float) -> None:
        super().__init__()
        hidden, dropout = _checks.integer("hidden", hidden, minimum=1), _checks.real("dropout", dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"`dropout` must be from 0 to below 1 (got {dropout}).")
        self.upsample, self.image_size = plan.upsample, task.image_size
        self.register_buffer("input_std", torch.ones(()))
        self.features = features
        self.classifier = nn.Sequential(
            OrderedDict(
                flatten=nn.Flatten(),
                fc1=nn.Linear(plan.widths[-1] * plan.cells, hidden),
                norm=nn.BatchNorm1d(hidden),
                relu=nn.ReLU(),
                dropout=nn.Dropout(dropout),
                fc2=nn.Linear(hidden, task.classes),
            )
        )

    @property
    def first(self) -> nn.Module:
        """The first convolution."""
        return self.features.get_submodule("conv1")

    def prepare(self, x: Tensor) -> Tensor:
        """What the features see of the input: divided by the standard deviation and upsampled (bilinear)."""
        _checks.images(x, 1, self.input_std)
        if tuple(x.shape[-2:]) != self.image_size:
            height, width = self.image_size
            raise ValueError(f"the input must have shape (B, 1, {height}, {width}) (got {tuple(x.shape)}).")
        x = x / self.input_std
        return x if self.upsample == 1 else F.interpolate(x, scale_factor=self.upsample, mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        """Logits for a batch of images."""
        logits: Tensor = self.classifier(self.features(self.prepare(x)))
        return logits


def _scalar_features(plan: Plan, conv: Callable[[int, int], nn.Module]) -> OrderedDict[str, nn.Module]:
    """Three times convolution, ReLU, max-pooling and batch normalisation."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, ((fan_in, fan_out), (window, padding)) in enumerate(_stages(plan), start=1):
        layers[f"conv{i}"] = conv(fan_in, fan_out)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.MaxPool2d(window, padding=padding)
        layers[f"norm{i}"] = nn.BatchNorm2d(fan_out)
    return layers


def _stages(plan: Plan) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return list(zip(itertools.pairwise((1, *plan.widths)), plan.pools, strict=True))


@register_model("ss-cnn", upsample=2)
def ss_cnn(
    plan: Plan, *, scales: Scales = PAPER_SCALES, basis: LogRadialBasis | str = "paper", backend: str = "auto"
) -> nn.Sequential:
    """The paper's network: scale-steerable filters of size 7 to 17 in every layer."""
    conv = partial(ScaleSteerableConv2d, padding="same", scales=scales, basis=basis, backend=backend)
    return nn.Sequential(_scalar_features(plan, conv))


@register_model("plain-cnn")
def plain_cnn(plan: Plan) -> nn.Sequential:
    """Ordinary 7 x 7 convolutions."""
    return nn.Sequential(_scalar_features(plan, partial(nn.Conv2d, kernel_size=7, padding=3)))


@register_model("locally-scale-invariant-cnn")
def locally_scale_invariant_cnn(
    plan: Plan, *, scales: Scales = baselines.KANAZAWA_SCALES, antialias: bool = False
) -> nn.Sequential:
    """7 x 7 filters on resized images (Kanazawa et al. 2014)."""
    conv = partial(baselines.LocallyScaleInvariantConv2d, padding="same", scales=scales, antialias=antialias)
    return nn.Sequential(_scalar_features(plan, conv))


@register_model("vector-field-cnn", widths=(22, 44, 66))
def vector_field_cnn(plan: Plan, *, scales: Scales = baselines.MARCOS_SCALES, antialias: bool = True) -> nn.Sequential:
    """Vector fields of response and scale (Marcos et al. 2018); narrower, since vectors need twice the filters."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, ((fan_in, fan_out), (window, padding)) in enumerate(_stages(plan), start=1):
        # The ReLU is inside: lengths are not negative.
        layers[f"conv{i}"] = baselines.VectorFieldConv2d(
            fan_in, fan_out, padding="same", scales=scales, antialias=antialias, vector_input=i > 1
        )
        layers[f"pool{i}"] = baselines.VectorMaxPool2d(window, padding=padding)
        layers[f"norm{i}"] = baselines.VectorBatchNorm2d(fan_out)
    layers["magnitude"] = baselines.VectorMagnitude()
    return nn.Sequential(layers)


@register_model("spatial-transformer")
def spatial_transformer(plan: Plan) -> nn.Sequential:
    """The plain CNN behind a spatial transformer (Jaderberg et al. 2015), which localises at the original size."""
    transformer = baselines.SpatialTransformer2d(1, plan.image_size, shrink=plan.upsample)
    layers = _scalar_features(plan, partial(nn.Conv2d, kernel_size=7, padding=3))
    return nn.Sequential(OrderedDict(transformer=transformer, **layers))
