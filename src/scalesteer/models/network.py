"""What all networks have in common: the task they are for, the plan they are built from, the module they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from scalesteer import _checks

if TYPE_CHECKING:
    from scalesteer.models.scaled import ScaledNetwork

FITS = ("pad", "crop", "resize")
GROUNDS = ("black", "surroundings")
LONGEST_NAME = 200  # of a class, in characters


class Task(NamedTuple):
    """What images ask of a network; it travels with the weights."""

    in_chans: int
    num_classes: int
    image_size: tuple[int, int] | None  # that a network is meant for; None if it is meant for all
    classes: tuple[str, ...] = ()  # their names in the order of the logits; empty if they have none
    fit: str = "pad"  # how pictures of another size are brought to `image_size`: one of `FITS`
    ground: str = "black"  # what is around an object: black, as around digits, or what was photographed around it
    value_range: tuple[float, float] | None = None  # numbers in a file that are black and white; None for their kind's
    scale: float | None = None  # by which pictures of training were resized to `image_size`, in the median, if known
    object_size: float | None = None  # pixels of an object in images of training, in the median, if known
    percentiles: tuple[float, float] | None = None  # of a picture's numbers that are black and white, as `value_range`
    planes: tuple[int, ...] | None = None  # of a file that are the channels, counted from 0
    pixel_size: float | None = None  # to which pictures are resized, in micrometres
    object_sizes: tuple[float, float] | None = None  # smallest and largest object that training showed, in pixels


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

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Channels that come into each stage and that go out."""
        return list(itertools.pairwise((self.in_chans, *self.widths)))

    def network(self, features: nn.Sequential) -> nn.Module:
        """The whole network, with new weights behind the features."""
        raise NotImplementedError


class Network(nn.Module):
    """What all networks of :func:`create_model` have in common: they prepare their input, and know their first layer.

    `features` are the convolutional part, an `nn.Sequential` with names; `classifier` turns them into scores.

    Shape:
        `(B, in_chans, H, W)` -> `(B, classes)`, logits.
    """

    # What the input is divided by, 1 until training code sets it to that of the training set; in the state dict, so
    # that a checkpoint is complete.
    input_std: Tensor
    grid: tuple[float, float] | None = None  # where the pixels of its maps lie: stride and offset
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

    def with_scales(self, scales: Sequence[float], **options: Any) -> ScaledNetwork:
        """This network in `ScaleChannels`, whose other options may be given; its weights are shared."""
        from scalesteer.models.scaled import ScaledNetwork

        return ScaledNetwork(self, scales, **{"grid": self.grid, **options})


Builder = Callable[..., nn.Sequential]  # of features, from a plan and its own options as keywords
Models = dict[str, tuple[Builder, Plan]]  # by name; plans have the usual options
Scales = tuple[float, ...]
