"""Networks for images of any size: they score the classes at every place and pool the scores over space.

The answer does not depend on the size of the image, and without the pooling it is a map of classes. For each steered
network (``"steered-cnn"``, ``"steered-cnn-large"``, ``"steered-resnet"``) there is a plain twin with as many weights,
whose name begins with ``"pooled"``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import _checks
from scalesteer.harmonics import LogRadialBasis
from scalesteer.joining import Calibration
from scalesteer.joint import at_sizes
from scalesteer.models.network import Models, Network, Plan, Scales
from scalesteer.nn import MultiScaleConv2d, ScaleSteerableConv2d
from scalesteer.resize import halve

Convolution = nn.Conv2d | MultiScaleConv2d

# The filters of networks for any size. Six directions instead of the preset's eight, and lobes as much wider, are 24
# coefficients for each pair of channels, one fewer than a plain 5 x 5 has. They still come near all edges and bars (one
# order alone does not), and one scale is enough: other sizes come from `channels`.
STEERED_BASIS = dataclasses.replace(
    LogRadialBasis.preset("smooth"), orientations=tuple(j * math.pi / 3 for j in range(1, 7)), sigma=math.pi / 6
)
STEERED_SCALES: Scales = (1.0,)
READOUTS = ("max", "mean", "logsumexp", "features")
# Options of `ScaleChannels` that a plan has.
PLANNED = ("join", "drop", "border", "border_mode", "multiple", "calibration", "sure")


@dataclass(frozen=True)
class PooledPlan(Plan):
    """A network that pools over space and takes images of any size from `smallest` on.

    Attributes:
        image_size: The size of image that the network is meant for, or None; other sizes are taken too.
        widths: Channels of each stage.
        hidden: Channels of a layer between the features and the scores, 0 for none.
        kernel_size: Side of the filters, at scale 1 where they are steered: one number, or one for each stage.
        subsample: After which stages, counted from 1, maps are halved.
        halving: How: ``"blur"`` (:class:`BlurPool2d`), or by the ``"max"`` of four pixels, which is faster.
        readout: How scores are pooled over space: their ``"max"``, their ``"mean"``, or ``"logsumexp"``: the logarithm
            of the mean of their exponentials, between the two. ``"features"`` takes the largest value of each feature
            first, and scores these.
        dense: Leave the pooling out: the output is a map of scores, `(B, classes, h, w)`.
        channels: Sizes at which the network looks at the image, as factors; the result is then a
            `scalesteer.channels.ScaleChannels` around the network.
        join: How the answers at these sizes become one; None for the default of `ScaleChannels`, as for the next six.
        drop: Share of these sizes that is left out at random in training.
        border: Pixels that the image gets on all four sides where it is looked at smaller.
        border_mode: What the border shows.
        multiple: Height and width at these sizes are rounded to multiples of it.
        calibration: What :func:`scalesteer.fit_join` found; also a mapping of its fields.
        sure: The probability at which the remaining sizes are left out.
    """

    kernel_size: int | tuple[int, ...] = 7
    subsample: tuple[int, ...] = ()
    halving: str = "blur"
    readout: str = "max"
    dense: bool = False
    channels: Scales | None = None
    join: str | None = None
    drop: float | None = None
    border: int | None = None
    border_mode: str | None = None
    multiple: int | None = None
    calibration: Calibration | dict[str, Any] | None = None
    sure: float | None = None

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
        _checks.choice("halving", self.halving, tuple(HALVINGS))
        own["dense"] = _checks.boolean("dense", self.dense)
        for name in PLANNED:
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
        given = {name: value for name in PLANNED if (value := getattr(self, name)) is not None}
        return network.with_scales(self.channels, **given)


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
        self.stride, self.smallest, self.grid = plan.stride, plan.smallest, plan.grid
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
        if self.readout == "features" and not self.dense:
            maps = [x.amax((-2, -1), keepdim=True) for x in maps]
        scores = at_sizes(self.classifier, maps)
        return scores if self.dense else [self._pool(x).flatten(1) for x in scores]  # (B, classes) each

    def _pool(self, x: Tensor) -> Tensor:
        """One number for each map, `(B, C, 1, 1)`."""
        if self.readout == "mean":
            return x.mean((-2, -1), keepdim=True)
        if self.readout != "logsumexp":  # "features" has one place left
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


HALVINGS: dict[str, Callable[[], nn.Module]] = {"blur": BlurPool2d, "max": partial(nn.MaxPool2d, 2)}


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


def _pooled_features(plan: PooledPlan, conv: Callable[[int, int, int], Convolution]) -> nn.Sequential:
    """Convolution, batch normalisation, ReLU and, after some stages, a halved map."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, ((fan_in, fan_out), size) in enumerate(zip(plan.stages, plan.kernel_sizes, strict=True), start=1):
        layers[f"conv{i}"] = conv(fan_in, fan_out, size)
        layers[f"norm{i}"] = nn.BatchNorm2d(fan_out)
        layers[f"relu{i}"] = nn.ReLU()
        if i in plan.subsample:
            layers[f"blur{i}"] = HALVINGS[plan.halving]()
    return nn.Sequential(layers)


_plain = partial(nn.Conv2d, padding="same", bias=False)


def _steered(scales: Scales, basis: LogRadialBasis | str, backend: str) -> Callable[[int, int, int], Convolution]:
    """Makes scale-steerable convolutions; one of 3 x 3, which has no room to be steered, is plain."""
    steer = partial(ScaleSteerableConv2d, padding="same", bias=False, scales=scales, basis=basis, backend=backend)
    return lambda fan_in, fan_out, size: (steer if size > 3 else _plain)(fan_in, fan_out, size)


def steered_cnn(
    plan: PooledPlan,
    *,
    scales: Scales = STEERED_SCALES,
    basis: LogRadialBasis | str = STEERED_BASIS,
    backend: str = "auto",
) -> nn.Sequential:
    """Scale-steerable filters, and plain ones of 3 x 3 at the end."""
    return _pooled_features(plan, _steered(scales, basis, backend))


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
            layers[f"blur{i}"] = HALVINGS[plan.halving]()
    return nn.Sequential(layers)


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


def pooled_resnet(plan: PooledPlan, *, blocks: int = 2) -> nn.Sequential:
    """The plain twin of :func:`steered_resnet`: the usual residual blocks of two convolutions."""

    def body(fan_in: int, fan_out: int, size: int) -> nn.Module:
        return _normalised(_plain(fan_in, fan_out, size), _plain(fan_out, fan_out, size))

    return _residual_features(plan, _plain, blocks, body)


SMALL: dict[str, Any] = {"widths": (16, 32, 32), "subsample": (1, 2)}
LARGE: dict[str, Any] = {"widths": (32, 64, 96, 128), "subsample": (2, 3)}
DEEP: dict[str, Any] = {"widths": (24, 32, 64, 96, 96), "subsample": (1, 2, 3, 4)}
DEEP |= {"halving": "max", "readout": "features"}
RESIDUAL: dict[str, Any] = {"subsample": (1, 2), "readout": "mean"}
MODELS: Models = {  # with the usual options
    "steered-cnn": (steered_cnn, PooledPlan(kernel_size=(7, 5, 3), **SMALL)),
    "steered-cnn-large": (steered_cnn, PooledPlan(kernel_size=(7, 5, 5, 3), **LARGE)),
    "pooled-cnn": (pooled_cnn, PooledPlan(kernel_size=(5, 5, 3), **SMALL)),
    "pooled-cnn-large": (pooled_cnn, PooledPlan(kernel_size=(5, 5, 5, 3), **LARGE)),
    "pooled-deep": (pooled_cnn, PooledPlan(kernel_size=3, **DEEP)),
    "steered-resnet": (steered_resnet, PooledPlan(widths=(32, 64, 128), **RESIDUAL)),
    "pooled-resnet": (pooled_resnet, PooledPlan(widths=(32, 64, 112), kernel_size=3, **RESIDUAL)),
}
ABOUT = {
    "pooled-cnn": "small, with ordinary filters: for digits and drawings",
    "pooled-deep": "five layers of 3 x 3 filters: for photographs, on a CPU",
    "pooled-cnn-large": "pooled-cnn with a fourth layer and more channels",
    "pooled-resnet": "residual, with ordinary filters: for photographs, on a GPU",
    "steered-cnn": "pooled-cnn with scale-steerable filters and about as many weights",
    "steered-cnn-large": "pooled-cnn-large with scale-steerable filters and about as many weights",
    "steered-resnet": "pooled-resnet with scale-steerable filters and about as many weights",
}
