"""The networks: those of the paper's experiments, and those that take images of any size.

The paper's (SS-CNN and what it is compared with, at equal numbers of parameters) flatten a grid of cells into a fully
connected layer, so that each is built for one size of image. All have three convolutions and two fully connected
layers. What the paper's appendix leaves open is the same for all: convolution with bias, (maximum over scales,) ReLU,
max-pooling, batch normalisation, three times; fully connected 256, batch normalisation, ReLU, dropout 0.7, fully
connected.

The others (``"steered-cnn"``, ``"steered-cnn-large"``, ``"steered-resnet"``, and for each a plain twin with as many
weights whose name begins with ``"pooled"``) score the classes at every place and pool the scores over space: the answer
does not depend on the size of the image, and without the pooling it is a map of classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import _checks, baselines
from scalesteer.channels import ScaleChannels, at_sizes, halve
from scalesteer.harmonics import PAPER_SCALES, LogRadialBasis
from scalesteer.nn import MultiScaleConv2d, ScaleSteerableConv2d

Builder = Callable[..., nn.Sequential]
Convolution = nn.Conv2d | MultiScaleConv2d
Scales = tuple[float, ...]

# The filters of networks for any size. Six directions instead of the preset's eight, and lobes as much wider, are 24
# coefficients for each pair of channels, one fewer than a plain 5 x 5 has. They still come near all edges and bars (one
# order alone does not), and one scale is enough: other sizes come from `channels`.
STEERED_BASIS = dataclasses.replace(
    LogRadialBasis.preset("smooth"), orientations=tuple(j * math.pi / 3 for j in range(1, 7)), sigma=math.pi / 6
)
STEERED_SCALES: Scales = (1.0,)
READOUTS = ("max", "mean", "logsumexp")
OF_CHANNELS = ("join", "drop", "border", "border_mode")  # options that `ScaleChannels` takes by the same name


class Task(NamedTuple):
    """What a dataset asks of a network."""

    in_chans: int
    num_classes: int
    image_size: tuple[int, int] | None  # that a network is meant for; None if it is meant for all
    classes: tuple[str, ...] = ()  # their names in the order of the logits; empty if they have none
    fit: str = "pad"  # how pictures of another size are brought to `image_size`: "pad", "crop" or "resize"


DATASETS = {
    "mnist-scale": Task(1, 10, (28, 28)),
    "fmnist-scale": Task(1, 10, (28, 28)),
    "mnist-scale-local-2": Task(1, 10, (28, 40)),
    "stir-mnist": Task(1, 10, (64, 64)),
    "stir-emoji": Task(1, 36, (64, 64)),
    "mnist-large-scale": Task(1, 10, (112, 112)),
    "rescaled-cifar10": Task(3, 10, (64, 64)),
}


@dataclass(frozen=True)
class Plan:
    """What a builder of features needs to know. Its fields beside the task's are options of :func:`create_model`.

    A subclass adds what its kind of network has, and :meth:`network` says how features become one.
    """

    in_chans: int = 1
    num_classes: int = 10
    image_size: tuple[int, int] | None = None
    widths: tuple[int, ...] = (16,)
    hidden: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        own = vars(self)  # to put checked values in the place of what was given
        for name, minimum in (("in_chans", 1), ("num_classes", 1), ("hidden", 0)):
            own[name] = _checks.integer(name, own[name], minimum=minimum)
        if self.image_size is not None:
            own["image_size"] = _checks.pair("image_size", self.image_size, minimum=1)
        if not isinstance(self.widths, (tuple, list)) or not self.widths:
            raise ValueError(f"`widths` must be one integer or more, one for each stage (got {self.widths!r}).")
        own["widths"] = tuple(_checks.integer(f"widths[{i}]", w, minimum=1) for i, w in enumerate(self.widths))
        own["dropout"] = _checks.real("dropout", self.dropout)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be from 0 to below 1 (got {self.dropout}).")

    def network(self, features: nn.Sequential) -> nn.Module:
        """The whole network, with new weights behind the features."""
        raise NotImplementedError


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


@dataclass(frozen=True)
class PooledPlan(Plan):
    """A network that pools over space and takes images of any size from `smallest` on.

    Attributes:
        image_size: The size of image that the network is meant for, or None; other sizes are taken too.
        widths: Channels of each stage.
        hidden: Channels of a layer between the features and the scores, 0 for none.
        kernel_size: Side of the filters, at scale 1 where they are steered: one number, or one for each stage.
        subsample: After which stages, counted from 1, maps are halved (:class:`BlurPool2d`).
        readout: How scores are pooled over space: their ``"max"``, their ``"mean"``, or ``"logsumexp"``: the logarithm
            of the mean of their exponentials, between the two.
        dense: Leave the pooling out: the output is a map of scores, `(B, classes, h, w)`.
        channels: Sizes at which the network looks at the image, as factors; the result is then a
            `scalesteer.channels.ScaleChannels` around the network.
        join: How the answers at these sizes become one; None for the default of `ScaleChannels`, as for the next three.
        drop: Share of these sizes that is left out at random in training.
        border: Pixels that the image gets on all four sides where it is looked at smaller.
        border_mode: What the border shows.
    """

    kernel_size: int | tuple[int, ...] = 7
    subsample: tuple[int, ...] = ()
    readout: str = "max"
    dense: bool = False
    channels: Scales | None = None
    join: str | None = None
    drop: float | None = None
    border: int | None = None
    border_mode: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        own, stages = vars(self), len(self.widths)
        if isinstance(self.kernel_size, (tuple, list)):
            if len(self.kernel_size) != stages:
                rule = f"one number or {stages}, one for each stage"
                raise ValueError(f"`kernel_size` must be {rule} (got {self.kernel_size!r}).")
            own["kernel_size"] = tuple(_checks.kernel_size(size) for size in self.kernel_size)
        else:
            own["kernel_size"] = _checks.kernel_size(self.kernel_size)
        positions = self.subsample if isinstance(self.subsample, (tuple, list)) else (None,)
        if [stage for stage in range(1, stages + 1) if stage in positions] != [*positions]:
            raise ValueError(f"`subsample` must be ascending stages from 1 to {stages} (got {self.subsample!r}).")
        own["subsample"] = tuple(self.subsample)
        _checks.choice("readout", self.readout, READOUTS)
        own["dense"] = _checks.boolean("dense", self.dense)
        for name in OF_CHANNELS:
            if self.channels is None and own[name] is not None:
                raise ValueError(f"`{name}` (got {own[name]!r}) needs `channels`, the sizes to look at.")
        if self.image_size is not None and min(self.image_size) < self.smallest:
            least = f"at least {self.smallest} x {self.smallest}"
            raise ValueError(f"`image_size` must be {least} for this network (got {self.image_size}).")

    @property
    def kernel_sizes(self) -> tuple[int, ...]:
        return self.kernel_size if isinstance(self.kernel_size, tuple) else (self.kernel_size,) * len(self.widths)

    @property
    def stride(self) -> int:
        """Pixels of the image from one place of the last maps to the next."""
        return 1 << len(self.subsample)

    @property
    def grid(self) -> tuple[int, float]:
        """Stride and offset of the last maps: place i looks at pixel ``offset + i * stride``."""
        return self.stride, (self.stride - 1) / 2

    @property
    def smallest(self) -> int:
        """The least height and width of an image: it holds a filter, and one place of the last maps."""
        return max(*self.kernel_sizes, self.stride)

    def network(self, features: nn.Sequential) -> nn.Module:
        """Features, then scores and the pooling; inside `ScaleChannels` if there are channels."""
        network = PooledNetwork(features, self)
        if self.channels is None:
            return network
        given = {name: value for name in OF_CHANNELS if (value := getattr(self, name)) is not None}
        return ScaleChannels(network, self.channels, **given, grid=self.grid)


_MODELS: dict[str, tuple[Builder, Plan]] = {}  # with the usual options


def register_model(name: str, plan: type[Plan] = FlatPlan, **usual: Any) -> Callable[[Builder], Builder]:
    """Make a builder of features known to :func:`create_model` by name.

    The builder takes a plan, of the kind that is named here, and its own options as keywords. Its result is an
    `nn.Sequential` whose first convolution is called ``conv1``. It takes images with `plan.in_chans` channels and
    leaves `plan.widths[-1]`; for a :class:`FlatPlan` (images of `plan.feature_size`) of `plan.cells` pixels each.
    `usual` are options that differ from the plan's defaults.
    """
    if name in _MODELS:
        raise ValueError(f"a model named {name!r} is registered already.")

    def add(build: Builder) -> Builder:
        _MODELS[name] = build, plan(**usual)
        return build

    return add


def list_models() -> list[str]:
    """The names that :func:`create_model` knows, in the order of the alphabet."""
    return sorted(_MODELS)


def list_options(name: str) -> list[str]:
    """The options that :func:`create_model` takes for a network, beside channels, classes and size of the images."""
    build, usual = _MODELS[_checks.choice("name", name, list_models())]
    own = [p.name for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return [*own, *(f.name for f in dataclasses.fields(usual) if f.name not in Task._fields)]


def create_model(
    name: str,
    dataset: str | None = None,
    *,
    in_chans: int | None = None,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    **options: Any,
) -> nn.Module:
    """Build a network, with new weights, for images of your own or for a dataset.

    Args:
        name: One of :func:`list_models`.
        dataset: One of `DATASETS`, a short way to say the next three; what is given of them counts more.
        in_chans: Channels of the images, by default 1.
        num_classes: By default 10.
        image_size: Height and width of the images, or one number for both. The paper's networks are built for it, by
            default 28; the others take any size, and know by it only what they are meant for.
        options: Those of the network, :func:`list_options`; None for the default. The paper's networks have `widths`
            (of the three convolutions), `hidden` (256), `dropout` (0.7) and `upsample` (enlarge the input by 1 or 2;
            SS-CNN 2, the others 1); the others what :class:`PooledPlan` has. Beside these, `scales` where a method
            has them; `basis` (a LogRadialBasis, its fields as a mapping, or the name of a preset) and `backend` where
            filters are steered; `antialias` where images are resized.

    Returns:
        The network, with two attributes. `task` says what it is for (:class:`Task`). `arguments` are those that make
        the same network again, ready for JSON; they hold defaults too, so that another default later changes nothing.

    Example:
        >>> model = create_model("ss-cnn", basis="area")
        >>> model(torch.rand(2, 1, 28, 28)).shape, count_parameters(model)
        (torch.Size([2, 10]), 443078)
        >>> model = create_model("pooled-cnn", in_chans=3, num_classes=5)
        >>> model(torch.rand(2, 3, 40, 50)).shape
        torch.Size([2, 5])
        >>> create_model(**model.arguments).task
        Task(in_chans=3, num_classes=5, image_size=None, classes=(), fit='pad')
    """
    known = list_options(name)
    options = {option: value for option, value in options.items() if value is not None}
    for option in options:
        try:
            _checks.choice("options", option, known)
        except ValueError as error:
            raise TypeError(f"{name} has no option {option!r}: {error}") from None
    given = {"in_chans": in_chans, "num_classes": num_classes, "image_size": image_size}
    usual_task = None if dataset is None else DATASETS[_checks.choice("dataset", dataset, list(DATASETS))]
    task: dict[str, Any] = {key: getattr(usual_task, key, None) if n is None else n for key, n in given.items()}
    build, usual = _MODELS[name]
    shared = {f.name: options.pop(f.name) for f in dataclasses.fields(usual) if f.name in options}
    plan = dataclasses.replace(usual, **shared, **{key: value for key, value in task.items() if value is not None})
    if isinstance(options.get("basis"), Mapping):
        options["basis"] = LogRadialBasis(**options["basis"])
    own = [p for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
    model = plan.network(build(plan, **options))
    network = network_of(model)
    network.task = Task(plan.in_chans, plan.num_classes, plan.image_size)
    arguments = {"name": name, **vars(plan), **{p.name: p.default for p in own}, **options}
    arguments |= dict.fromkeys(("channels", *OF_CHANNELS))  # which `ScaleChannels` adds as they are
    arguments = {key: value for key, value in arguments.items() if value is not None}
    network.arguments = json.loads(json.dumps(arguments, default=_to_plain))
    return model


def _to_plain(value: Any) -> Any:
    """For what JSON does not know."""
    if isinstance(value, LogRadialBasis):
        return {key: part for key, part in vars(value).items() if part is not None}
    return value.item() if isinstance(value, np.generic) else list(value)


def network_of(model: nn.Module) -> Network:
    """The network of :func:`create_model` that a model is, or that looks at several sizes in it."""
    network = model.net if isinstance(model, ScaleChannels) else model
    if not isinstance(network, Network):
        raise TypeError(f"`model` must be a network of create_model (got {type(network).__name__}).")
    return network


def count_parameters(model: nn.Module) -> int:
    """How many numbers are learned."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def set_input_statistics(model: nn.Module, std: Any, mean: Any = 0.0) -> None:
    """Have a network, also one inside `ScaleChannels`, bring its input to the standard deviation and mean of 1 and 0.

    Args:
        model: Made by :func:`create_model`.
        std: Of the training images, a number; or one for each channel, of which the paper's networks take the mean.
        mean: Likewise; the paper's networks do not subtract it.
    """
    network = network_of(model)
    for name, numbers in (("std", std), ("mean", mean)):
        buffer, value = network._buffers.get(f"input_{name}"), torch.as_tensor(numbers)
        if buffer is None:
            continue
        if buffer.ndim == 0 and value.shape == (network.in_chans,):
            value = value.mean()
        if value.ndim and value.shape != buffer.shape:
            raise ValueError(f"`{name}` must be one number or have shape {tuple(buffer.shape)} (got {numbers!r}).")
        if not value.isfinite().all() or (name == "std" and not (value > 0).all()):
            raise ValueError(f"`{name}` must be finite, and a deviation positive (got {numbers!r}).")
        buffer.copy_(value)


class Network(nn.Module):
    """What all networks of :func:`create_model` have in common: they prepare their input, and know their first layer.

    `features` are the convolutional part, an `nn.Sequential` with names; `classifier` turns them into scores.

    Shape:
        `(B, in_chans, H, W)` -> `(B, classes)`, logits.
    """

    # What the input is divided by, 1 until training code sets it to that of the training set; in the state dict, so
    # that a checkpoint is complete.
    input_std: Tensor
    task: Task  # what the network is for
    arguments: dict[str, Any]  # of `create_model`, that make the same network again

    def __init__(self, features: nn.Sequential, plan: Plan) -> None:
        super().__init__()
        self.in_chans, self.image_size = plan.in_chans, plan.image_size
        self.features = features

    @property
    def first(self) -> nn.Module:
        """The first convolution; ``first(prepare(x))`` is its response, except behind a spatial transformer."""
        return self.features.get_submodule("conv1")

    def prepare(self, x: Tensor) -> Tensor:
        """What the features see of the input."""
        raise NotImplementedError


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


class PooledNetwork(Network):
    """Normalise, extract features, score the classes at every place, pool over space: images of any size.

    Built from a :class:`PooledPlan`, which explains the options.

    Shape:
        `(B, in_chans, H, W)` -> `(B, classes)`, logits; or `(B, classes, H // stride, W // stride)` if `dense`. Height
        and width are `smallest` or more.

    The `classifier` has convolutions of 1 x 1, so that it works at one place as at many. `dense` says whether the
    output is a map of scores instead of the pooled scores; it may be changed at any time.
    """

    input_mean: Tensor  # subtracted from the input before it is divided by `input_std`; both `(in_chans,)`

    def __init__(self, features: nn.Sequential, plan: PooledPlan) -> None:
        super().__init__(features, plan)
        self.stride, self.smallest = plan.stride, plan.smallest
        self.readout, self.dense = plan.readout, plan.dense
        self.register_buffer("input_mean", torch.zeros(plan.in_chans))
        self.register_buffer("input_std", torch.ones(plan.in_chans))
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if plan.hidden:
            layers["fc1"] = nn.Conv2d(plan.widths[-1], plan.hidden, 1, bias=False)
            layers["norm"] = nn.BatchNorm2d(plan.hidden)
            layers["relu"] = nn.ReLU()
        layers["dropout"] = nn.Dropout2d(plan.dropout)  # of whole channels: the same at all places
        layers["fc2"] = nn.Conv2d(plan.hidden or plan.widths[-1], plan.num_classes, 1)
        self.classifier = nn.Sequential(layers)

    def prepare(self, x: Tensor) -> Tensor:
        """What the features see of the input: without the mean and divided by the standard deviation."""
        _checks.images(x, self.in_chans, self.input_std)
        if any(n < self.smallest for n in x.shape[-2:]):
            least = f"at least {self.smallest} x {self.smallest} pixels"
            raise ValueError(f"the image must have {least} (got shape {tuple(x.shape)}): enlarge it or pad it.")
        x = (x - self.input_mean.view(-1, 1, 1)) / self.input_std.view(-1, 1, 1)
        return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x  # as its kernels read maps

    def forward(self, x: Tensor) -> Tensor:
        return self.at_sizes([x])[0]

    def at_sizes(self, images: Sequence[Tensor]) -> list[Tensor]:
        """The same for images of several sizes side by side; batch normalisation sees all of them as one batch."""
        maps = at_sizes(self.features, [self.prepare(x) for x in images])  # (B, C, h, w) each
        scores = at_sizes(self.classifier, maps)
        return scores if self.dense else [self._pool(x).flatten(1) for x in scores]  # (B, classes) each

    def _pool(self, x: Tensor) -> Tensor:
        """One number for each map, `(B, C, 1, 1)`."""
        if self.readout == "mean":
            return x.mean((-2, -1), keepdim=True)
        if self.readout == "max":
            return x.amax((-2, -1), keepdim=True)
        peak = x.detach().amax((-2, -1), keepdim=True)  # no exponential overflows
        return peak + (x - peak).exp().mean((-2, -1), keepdim=True).log()

    def extra_repr(self) -> str:
        return f"readout={self.readout!r}, dense={self.dense}, smallest={self.smallest}"


class BlurPool2d(nn.Module):
    """Halve maps without aliasing: smooth by (1, 3, 3, 1) / 8 along both axes, then keep every second pixel.

    Even taps put a pixel of the output amid four of the input, as `F.interpolate` does, so that maps of all depths
    cover the same part of the image. (Zhang 2019, "Making convolutional networks shift-invariant again".)

    Shape:
        `(B, C, H, W)` -> `(B, C, H // 2, W // 2)`.

    Example:
        >>> BlurPool2d()(torch.ones(1, 2, 8, 9)).shape
        torch.Size([1, 2, 4, 4])
    """

    def forward(self, x: Tensor) -> Tensor:
        return halve(x)


class ResidualBlock(nn.Module):
    """Add what `body` makes of the input to the input, which a 1 x 1 convolution fits where channels differ.

    Shape:
        `(B, in_channels, H, W)` -> `(B, out_channels, H, W)`.
    """

    def __init__(self, body: nn.Module, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.body, self.shortcut = body, nn.Sequential()
        if in_channels != out_channels:
            self.shortcut = _normalised(nn.Conv2d(in_channels, out_channels, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.at_sizes([x])[0]

    def at_sizes(self, images: Sequence[Tensor]) -> list[Tensor]:
        """The same for images of several sizes side by side."""
        sums = zip(at_sizes(self.body, images), at_sizes(self.shortcut, images), strict=True)
        return [F.relu(new + old) for new, old in sums]


def _normalised(*convolutions: Convolution) -> nn.Sequential:
    """Convolutions with batch normalisation each, and ReLU between them."""
    layers = [layer for conv in convolutions for layer in (conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _stages(plan: Plan) -> list[tuple[int, int]]:
    """Channels that come into each stage and that go out."""
    return list(itertools.pairwise((plan.in_chans, *plan.widths)))


def _flat_features(plan: FlatPlan, conv: Callable[[int, int], nn.Module]) -> OrderedDict[str, nn.Module]:
    """Three times convolution, ReLU, max-pooling and batch normalisation."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, ((fan_in, fan_out), (window, padding)) in enumerate(zip(_stages(plan), plan.pools, strict=True), start=1):
        layers[f"conv{i}"] = conv(fan_in, fan_out)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.MaxPool2d(window, padding=padding)
        layers[f"norm{i}"] = nn.BatchNorm2d(fan_out)
    return layers


@register_model("ss-cnn", upsample=2)
def ss_cnn(
    plan: FlatPlan, *, scales: Scales = PAPER_SCALES, basis: LogRadialBasis | str = "paper", backend: str = "auto"
) -> nn.Sequential:
    """The paper's network: scale-steerable filters of size 7 to 17 in every layer."""
    conv = partial(ScaleSteerableConv2d, padding="same", scales=scales, basis=basis, backend=backend)
    return nn.Sequential(_flat_features(plan, conv))


@register_model("plain-cnn")
def plain_cnn(plan: FlatPlan) -> nn.Sequential:
    """Ordinary 7 x 7 convolutions."""
    return nn.Sequential(_flat_features(plan, partial(nn.Conv2d, kernel_size=7, padding=3)))


@register_model("locally-scale-invariant-cnn")
def locally_scale_invariant_cnn(
    plan: FlatPlan, *, scales: Scales = baselines.KANAZAWA_SCALES, antialias: bool = False
) -> nn.Sequential:
    """7 x 7 filters on resized images (Kanazawa et al. 2014)."""
    conv = partial(baselines.LocallyScaleInvariantConv2d, padding="same", scales=scales, antialias=antialias)
    return nn.Sequential(_flat_features(plan, conv))


@register_model("vector-field-cnn", widths=(22, 44, 66))
def vector_field_cnn(
    plan: FlatPlan, *, scales: Scales = baselines.MARCOS_SCALES, antialias: bool = True
) -> nn.Sequential:
    """Vector fields of response and scale (Marcos et al. 2018); narrower, since vectors need twice the filters."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, ((fan_in, fan_out), (window, padding)) in enumerate(zip(_stages(plan), plan.pools, strict=True), start=1):
        # The ReLU is inside: lengths are not negative.
        layers[f"conv{i}"] = baselines.VectorFieldConv2d(
            fan_in, fan_out, padding="same", scales=scales, antialias=antialias, vector_input=i > 1
        )
        layers[f"pool{i}"] = baselines.VectorMaxPool2d(window, padding=padding)
        layers[f"norm{i}"] = baselines.VectorBatchNorm2d(fan_out)
    layers["magnitude"] = baselines.VectorMagnitude()
    return nn.Sequential(layers)


@register_model("spatial-transformer")
def spatial_transformer(plan: FlatPlan) -> nn.Sequential:
    """The plain CNN behind a spatial transformer (Jaderberg et al. 2015), which localises at the original size."""
    transformer = baselines.SpatialTransformer2d(plan.in_chans, plan.feature_size, shrink=plan.upsample)
    layers = _flat_features(plan, partial(nn.Conv2d, kernel_size=7, padding=3))
    return nn.Sequential(OrderedDict(transformer=transformer, **layers))


def _pooled_features(plan: PooledPlan, conv: Callable[[int, int, int], Convolution]) -> nn.Sequential:
    """Convolution, batch normalisation, ReLU and, after some stages, a halved map."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, ((fan_in, fan_out), size) in enumerate(zip(_stages(plan), plan.kernel_sizes, strict=True), start=1):
        layers[f"conv{i}"] = conv(fan_in, fan_out, size)
        layers[f"norm{i}"] = nn.BatchNorm2d(fan_out)
        layers[f"relu{i}"] = nn.ReLU()
        if i in plan.subsample:
            layers[f"blur{i}"] = BlurPool2d()
    return nn.Sequential(layers)


_plain = partial(nn.Conv2d, padding="same", bias=False)


def _steered(scales: Scales, basis: LogRadialBasis | str, backend: str) -> Callable[[int, int, int], Convolution]:
    """Makes scale-steerable convolutions; one of 3 x 3, which has no room to be steered, is plain."""
    steer = partial(ScaleSteerableConv2d, padding="same", bias=False, scales=scales, basis=basis, backend=backend)
    return lambda fan_in, fan_out, size: (steer if size > 3 else _plain)(fan_in, fan_out, size)


SMALL: dict[str, Any] = {"widths": (16, 32, 32), "subsample": (1, 2)}
LARGE: dict[str, Any] = {"widths": (32, 64, 96, 128), "subsample": (2, 3)}


@register_model("steered-cnn", PooledPlan, kernel_size=(7, 5, 3), **SMALL)
@register_model("steered-cnn-large", PooledPlan, kernel_size=(7, 5, 5, 3), **LARGE)
def steered_cnn(
    plan: PooledPlan,
    *,
    scales: Scales = STEERED_SCALES,
    basis: LogRadialBasis | str = STEERED_BASIS,
    backend: str = "auto",
) -> nn.Sequential:
    """Scale-steerable filters, and plain ones of 3 x 3 at the end."""
    return _pooled_features(plan, _steered(scales, basis, backend))


@register_model("pooled-cnn", PooledPlan, kernel_size=(5, 5, 3), **SMALL)
@register_model("pooled-cnn-large", PooledPlan, kernel_size=(5, 5, 5, 3), **LARGE)
def pooled_cnn(plan: PooledPlan) -> nn.Sequential:
    """The plain twin of :func:`steered_cnn`: a first filter of 5 x 5, so that it has as many weights."""
    return _pooled_features(plan, _plain)


def _residual_features(
    plan: PooledPlan,
    conv: Callable[[int, int, int], Convolution],
    blocks: int,
    body: Callable[[int, int, int], nn.Module],
) -> nn.Sequential:
    """A convolution, then stages of residual blocks; `body` is of (channels that come in, that go out, kernel size)."""
    blocks, width = _checks.integer("blocks", blocks, minimum=1), plan.widths[0]
    stem = (conv(plan.in_chans, width, plan.kernel_sizes[0]), nn.BatchNorm2d(width), nn.ReLU())
    layers: OrderedDict[str, nn.Module] = OrderedDict(zip(("conv1", "norm1", "relu1"), stem, strict=True))
    stages = zip(itertools.pairwise((width, *plan.widths)), plan.kernel_sizes, strict=True)
    for i, ((fan_in, fan_out), size) in enumerate(stages, start=1):
        fans = [fan_in, *[fan_out] * (blocks - 1)]
        layers[f"stage{i}"] = nn.Sequential(*(ResidualBlock(body(fan, fan_out, size), fan, fan_out) for fan in fans))
        if i in plan.subsample:
            layers[f"blur{i}"] = BlurPool2d()
    return nn.Sequential(layers)


@register_model("steered-resnet", PooledPlan, widths=(32, 64, 128), subsample=(1, 2), readout="mean")
def steered_resnet(
    plan: PooledPlan,
    *,
    scales: Scales = STEERED_SCALES,
    basis: LogRadialBasis | str = STEERED_BASIS,
    backend: str = "auto",
    blocks: int = 2,
    middle: float = 0.7,
) -> nn.Sequential:
    """Residual blocks of three convolutions: 1 x 1 to fewer channels, steered, 1 x 1 back.

    `blocks` are in each stage; `middle` is the share of the channels that the steered convolution has. It is plain in
    stages whose `kernel_size` is 3.
    """
    conv = _steered(scales, basis, backend)
    if _checks.real("middle", middle) <= 0:
        raise ValueError(f"`middle` must be positive (got {middle}).")

    def body(fan_in: int, fan_out: int, size: int) -> nn.Module:
        inner = max(1, round(middle * fan_out))
        pointwise = partial(nn.Conv2d, kernel_size=1, bias=False)
        return _normalised(pointwise(fan_in, inner), conv(inner, inner, size), pointwise(inner, fan_out))

    return _residual_features(plan, conv, blocks, body)


@register_model("pooled-resnet", PooledPlan, widths=(32, 64, 112), kernel_size=3, subsample=(1, 2), readout="mean")
def pooled_resnet(plan: PooledPlan, *, blocks: int = 2) -> nn.Sequential:
    """The plain twin of :func:`steered_resnet`: the usual residual blocks of two convolutions."""

    def body(fan_in: int, fan_out: int, size: int) -> nn.Module:
        return _normalised(_plain(fan_in, fan_out, size), _plain(fan_out, fan_out, size))

    return _residual_features(plan, _plain, blocks, body)
