"""What a run is. Its configuration is its identity: it gives the directory and, on a CPU, always the same result."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args

from scalesteer import _checks, files
from scalesteer.data import DATASETS, SIZED_DATASETS, FolderSpec, SizedSpec, SplitSpec
from scalesteer.harmonics import LogRadialBasis
from scalesteer.models import list_models, list_options
from scalesteer.models.pooled import READOUTS, STEERED_BASIS
from scalesteer.pretrained import LARGEST, MOST_VALUES

Schedule = Literal["one-cycle", "cosine", "step", "constant"]
Precision = Literal["float32", "tf32", "bf16"]
Join = Literal["mean", "max", "logsumexp"]
BASIS_FIELDS = ("orders", "m", "support")  # of LogRadialBasis, which a run may set apart from the preset
FEW_STEPS = 5  # in an epoch
LARGEST_SCALE, LARGEST_WINDOW = LARGEST["scales"], 113  # of the filters
# Fields that only networks with a certain option of `create_model` have, with that option.
NEEDS = dict.fromkeys(("basis", "scales", *BASIS_FIELDS), "basis")
NEEDS |= dict.fromkeys(("channels", "drop", "border", "one_size_epochs", "test_channels"), "channels")
NEEDS |= {name: name for name in ("upsample", "kernel_size", "readout")}
MODEL_FIELDS = (
    "upsample", "basis", "scales", "widths", "kernel_size", "readout", "dropout", "channels", "join", "drop", "border",
)  # that `create_model` takes by the same name  # fmt: skip
DATA_FIELDS = ("split", "scale_range", "resampler", "sizes", "train_sizes", "test_sizes")  # of the split
FOLDER_FIELDS = ("image_size", "fit", "grey")  # of your own pictures
# What your own pictures are trained with if no model is named: the network that photographs are trained with elsewhere
# here, at sizes that cover a factor of three; a channel of 2 would cost more than all of these. The mean over places
# would let the border that small pictures get have its say.
OWN_MODEL: dict[str, Any] = {"model": "pooled-resnet", "channels": (0.5, 0.71, 1.0, 1.41), "readout": "logsumexp"}


class _Default(str):
    """The value of a field that nobody gave: an equal one that somebody gave is a plain string."""


class _DefaultNumber(int):
    """The same for a number."""


def _range(name: str, value: Any) -> tuple[float, ...]:
    numbers = _checks.reals(name, value)
    if len(numbers) != 2 or not 0 < numbers[0] <= numbers[1]:
        raise ValueError(f"`{name}` must be (low, high) with 0 < low <= high (got {numbers}).")
    return numbers


def _factors(name: str, value: Any) -> tuple[float, ...]:
    low, high = _range(name, value)
    if not 1 / LARGEST_SCALE <= low <= high <= LARGEST_SCALE:
        raise ValueError(f"`{name}` must be factors from 1/{LARGEST_SCALE} to {LARGEST_SCALE} (got {(low, high)}).")
    return low, high


def _widths(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"`{name}` must be a sequence of integers (got {value!r}).")
    widths = tuple(_checks.integer(f"{name}[{i}]", width, minimum=1) for i, width in enumerate(value))
    if not 0 < len(widths) <= MOST_VALUES or max(widths) > LARGEST[name]:
        raise ValueError(f"`{name}` must be 1 to {MOST_VALUES} integers up to {LARGEST[name]} (got {widths}).")
    return widths


def _kernel_size(name: str, value: Any) -> int | tuple[int, ...]:
    sizes = tuple(map(_checks.kernel_size, value if isinstance(value, (tuple, list)) else (value,)))
    if not 0 < len(sizes) <= MOST_VALUES or max(sizes) > LARGEST[name]:
        raise ValueError(f"`{name}` must be 1 to {MOST_VALUES} integers up to {LARGEST[name]} (got {value}).")
    return sizes if isinstance(value, (tuple, list)) else sizes[0]


# How the value of a field is checked and made plain, if it is not the default.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **{name: partial(_checks.choice, options=get_args(kind))
       for name, kind in (("schedule", Schedule), ("precision", Precision), ("join", Join),
                          ("resize_resampler", Literal["antialias", "bilinear"]))},
    **{name: partial(_checks.integer, minimum=minimum)
       for name, minimum in (("epochs", 1), ("batch_size", 0), ("seed", 0), ("upsample", 1), ("train_images", 1),
                             ("shift", 0), ("border", 0), ("one_size_epochs", 0))},
    **dict.fromkeys(("lr", "weight_decay", "label_smoothing", "drop", "dropout"), _checks.real),
    **dict.fromkeys(("tuning", "flip", "grey", "class_weights"), _checks.boolean),
    **dict.fromkeys(("scales", "channels", "test_channels", "test_sizes"), _checks.ascending),
    "train_sizes": _range, "resize": _factors, "widths": _widths, "kernel_size": _kernel_size,
    "readout": partial(_checks.choice, options=READOUTS),
}  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """One training of one model on one split. Each field is a flag of `scalesteer train`, the most used first."""

    model: str = _Default("ss-cnn")
    """The network; `scalesteer models` lists them. By default ss-cnn for a dataset, and pooled-resnet with --readout
    logsumexp for your own pictures."""
    dataset: str = "mnist-scale"
    """mnist-scale, fmnist-scale, mnist-scale-local-2, stir-mnist, stir-emoji, mnist-large-scale or rescaled-cifar10."""
    images: str | None = None
    """Your own pictures: a folder with a sub-folder for each class, or a CSV file with the columns path and label."""
    image_size: tuple[int, int] | None = None  # What the pictures are fitted to, in pixels; by default 64 64.
    fit: Literal["pad", "crop", "resize"] = "pad"
    """How they are fitted. pad: keep their scale, and shrink only what is too large. crop: keep their scale and cut.
    resize: change their scale to fill the image, and cut what is left over."""
    grey: bool = False  # Make the pictures grey.
    channels: tuple[float, ...] | None = None
    """Scale channels: the sizes at which the network looks at the image (1.4: enlarged by 1.4). By default one size,
    and 0.5 0.71 1 1.41 for your own pictures without --model."""
    epochs: int = 60  # Passes over the training images.
    batch_size: int = _DefaultNumber(128)
    """Images per step; a smaller batch at the end is left out. By default 128, and 0 for your own pictures: 128, or
    fewer where that would make fewer than five steps in an epoch."""
    lr: float = 0.005  # Largest learning rate of AdamW.
    flip: bool = False  # Mirror each training image with probability 1/2.
    shift: int = 0  # Move each training image at random, by up to this many pixels.
    resize: tuple[float, float] | None = None
    """Resize each training image by a random factor between these two. By default images are not resized."""
    resize_resampler: Literal["antialias", "bilinear"] = "antialias"
    """How --resize shrinks. antialias: average the pixels that become one. bilinear: read between four of them, as
    torch's plain interpolate; suits images that were shrunk so themselves, as the paper's digits."""
    class_weights: bool = False
    """Weight the loss so that all classes count alike, however many images each has."""
    tuning: bool = False  # Leave the test set alone; use this while you choose settings.
    seed: int = 0  # Seed of the initial weights, the order of the images and dropout.
    split: int = 0  # Which draw of the dataset; 0 to 5 are the six of the paper's tables.
    weight_decay: float = 0.01  # Weight decay of AdamW.
    label_smoothing: float = 0.1  # Share of each label that is spread over all classes.
    schedule: Schedule = "one-cycle"
    """Learning rate over time. one-cycle: up for 30 % of the steps, then down to zero. cosine: down to zero. step: a
    tenth after a half, and again after three quarters."""
    precision: Precision = "float32"  # Arithmetic: full precision, TF32 products on a GPU, or bfloat16 autocast.
    upsample: int | None = None  # Enlarge the input by 1 or 2, for networks of the paper; by default as in the paper.
    basis: str | None = None
    """Preset of the filters: paper, area, released-code or smooth; by default the network's own."""
    train_images: int | None = None  # Use only the first training images, this many; by default all.
    scale_range: tuple[float, float] | None = None  # Factors to shrink images by; by default the dataset's own.
    sizes: tuple[int, int, int] | None = None
    """Numbers of images in the three parts, or of objects where each is shown at several sizes. By default the
    dataset's own."""
    resampler: Literal["bilinear", "antialias"] = "bilinear"  # How images are shrunk.
    scales: tuple[float, ...] | None = None
    """Scales of the filters; by default the network's own, for ss-cnn the paper's six."""
    orders: tuple[float, ...] | None = None
    """Orders k of the filters; by default the preset's."""
    m: float | None = None  # Radial decay of the filters; by default the preset's.
    support: Literal["disc", "crop", "averaged"] | None = None
    """Pixels that belong to a filter: a disc that grows with the scale, a crop of the largest disc, or a disc whose
    edge is averaged over pixels. By default the preset's."""
    train_sizes: tuple[float, float] | None = None
    """Smallest and largest size of the objects in training and validation images, in the dataset's unit; by default the
    dataset's own."""
    test_sizes: tuple[float, ...] | None = None  # Sizes of the objects in test images; by default all that there are.
    widths: tuple[int, ...] | None = None
    """Numbers of feature channels of the layers; by default the network's own."""
    kernel_size: int | tuple[int, ...] | None = None
    """Side of the filters of networks named pooled and steered: one number, or one for each stage."""
    readout: str | None = None  # How networks named pooled and steered pool over space: max, mean or logsumexp.
    dropout: float | None = None  # Share of the last features that are left out at random in training.
    join: Join = "logsumexp"  # How the answers of the scale channels become one.
    drop: float = 0.0  # Share of the scale channels that are left out at random in training.
    border: int = 0
    """Width in pixels of a border around the image in scale channels that make it smaller. It is black for digits and
    icons, and mirrors the image for photographs and your own pictures."""
    one_size_epochs: int = 0
    """Epochs at the beginning that train without scale channels, which is faster. The best epoch is chosen from those
    that follow."""
    test_channels: tuple[float, ...] | None = None
    """Scale channels for the test images; by default as in training."""

    def __post_init__(self) -> None:
        own = vars(self)  # where values become plain ones, whatever they came as
        if self.images is not None and isinstance(self.model, _Default):
            own |= {name: value for name, value in OWN_MODEL.items() if own[name] == getattr(RunConfig, name)}
        if self.images is not None and isinstance(self.batch_size, _DefaultNumber):
            own["batch_size"] = 0
        _checks.choice("model", self.model, list_models())
        for name, check in CHECKS.items():
            if own[name] is not getattr(RunConfig, name):
                own[name] = check(name, own[name])
        options = list_options(self.model)
        for name, option in NEEDS.items():
            if own[name] != getattr(RunConfig, name) and option not in options:
                suited = ", ".join(model for model in list_models() if option in list_options(model))
                raise ValueError(f"`{name}` (got {own[name]!r}) applies to {suited} only (got model={self.model!r}).")
        data, basis = self.data, self.model_options.get("basis")
        for name in DATA_FIELDS:
            if own[name] != getattr(RunConfig, name) and not hasattr(data, name):
                subject = f"dataset={self.dataset!r}" if self.images is None else "your own `images`"
                raise ValueError(f"`{name}` (got {own[name]!r}) does not apply to {subject}.")
        if isinstance(data, FolderSpec):
            own |= {"images": data.images, "image_size": data.image_size}
            if "readout" not in options:
                suited = ", ".join(model for model in list_models() if "readout" in list_options(model))
                raise ValueError(f"`model` must be one that takes any size for your own images: {suited} "
                                 f"(got {self.model!r}).")  # fmt: skip
        for source, names in ((data, DATA_FIELDS), (basis, BASIS_FIELDS)):
            own |= {name: getattr(source, name) for name in names if own[name] is not None and hasattr(source, name)}

        for name in ("drop", "border", "one_size_epochs"):
            if own[name] and not self.channels:
                raise ValueError(f"`{name}` (got {own[name]}) needs `channels`.")
        looks, usual = self.channels or self.test_channels, RunConfig.join
        limits = {
            "seed": (self.seed < 2**63, "be below 2**63"),
            # Beyond these a step of AdamW is no number of single precision.
            "lr": (0 < self.lr <= 1e30, "be positive and at most 1e30"),
            "weight_decay": (0 <= self.weight_decay <= 1e6, "not be negative and at most 1e6"),
            "batch_size": (self.batch_size > 1 or (self.batch_size == 0 and self.images is not None), "be at least 2"),
            "upsample": (self.upsample in (None, 1, 2), "be 1 or 2"),
            "one_size_epochs": (self.one_size_epochs < self.epochs, "be fewer than `epochs`"),
            "border": (self.border <= LARGEST["border"], f"be at most {LARGEST['border']}"),
            "resize_resampler": (bool(self.resize) or self.resize_resampler == "antialias", "come with `resize`"),
            "join": (bool(looks) or self.join == usual, f"be {usual!r} without `channels` or `test_channels`"),
            # Whoever opens a checkpoint builds its network: it must not take all memory.
            "orders": (len(self.orders or ()) <= MOST_VALUES, f"be at most {MOST_VALUES} numbers"),
        }
        for name in ("label_smoothing", "dropout", "drop"):
            limits[name] = 0 <= (own[name] or 0) < 1, "be from 0 to below 1"
        if not isinstance(data, FolderSpec):  # how many pictures a folder has is known when it is read
            self.check_count(data.sizes[0] * (1 if isinstance(data, SplitSpec) else len(data.sizes_of("train"))))
            limits["sizes"] = min(data.sizes) > 0, "leave images for validation and test"
        for name, (sound, rule) in limits.items():
            if not sound:
                raise ValueError(f"`{name}` must {rule} (got {own[name]}).")
        for name in ("scales", "channels", "test_channels"):
            values = own[name] or (1.0,)
            if values[-1] > LARGEST_SCALE or len(values) > MOST_VALUES:
                got = f"{len(values)}, the largest {values[-1]:g}"
                raise ValueError(f"`{name}` must be at most {MOST_VALUES} numbers up to {LARGEST_SCALE} (got {got}).")
        sides = self.kernel_size if isinstance(self.kernel_size, tuple) else (self.kernel_size or 7,)
        if self.scales is not None and max(sides) * self.scales[-1] > LARGEST_WINDOW:
            got = f"{max(sides)} times {self.scales[-1]:g}"
            raise ValueError(
                f"`kernel_size` times the largest of `scales` must be at most {LARGEST_WINDOW} (got {got})."
            )

    def batch_for(self, count: int) -> int:
        """The images of a step, of so many training images: `batch_size`, or what suits few pictures.

        Example:
            >>> [RunConfig(images="photos").batch_for(count) for count in (30, 100, 5000)]
            [4, 16, 128]
        """
        few = 2 ** max(1, (count // FEW_STEPS).bit_length() - 1)
        return self.batch_size or min(RunConfig.batch_size, few)

    def check_count(self, count: int) -> None:
        """Raise a ValueError unless so many training images are enough."""
        images = self.train_images or count
        if images > count:
            raise ValueError(f"`train_images` must be at most {count}, the split's (got {self.train_images}).")
        if (batch := self.batch_for(images)) > images:
            raise ValueError(f"`batch_size` must be at most {images}, the training images (got {batch}).")

    @property
    def data(self) -> SplitSpec | SizedSpec | FolderSpec:
        """The split this run trains on."""
        given = {name: getattr(self, name) for name in FOLDER_FIELDS if getattr(self, name) != getattr(RunConfig, name)}
        if self.images is not None:
            if self.dataset != RunConfig.dataset:
                raise ValueError(
                    f"`dataset` (got {self.dataset!r}) and `images` (got {self.images!r}) exclude each other."
                )
            return FolderSpec(self.images, **given)
        if given:
            raise ValueError(f"`{next(iter(given))}` (got {next(iter(given.values()))!r}) needs `images`, your own.")
        _checks.choice("dataset", self.dataset, [*DATASETS, *SIZED_DATASETS])
        kind: Any = SizedSpec if self.dataset in SIZED_DATASETS else SplitSpec
        known = {field.name for field in fields(kind)}
        chosen = {name: getattr(self, name) for name in DATA_FIELDS if name in known}
        return kind(self.dataset, **chosen)  # type: ignore[no-any-return]  # None for the dataset's own

    @property
    def photographs(self) -> bool:
        """Whether images go on beyond their edges, as photographs and your own do; digits lie on black ground."""
        return self.images is not None or getattr(SIZED_DATASETS.get(self.dataset), "in_chans", 1) > 1

    @property
    def model_options(self) -> dict[str, Any]:
        """Options for `create_model` beside the dataset."""
        names = ("upsample", "scales", "widths", "kernel_size", "readout", "dropout", "channels")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.channels is not None:
            options |= {"join": self.join, "drop": self.drop}
        if self.border:
            options |= {"border": self.border, "border_mode": "reflect" if self.photographs else "zeros"}
        changed = {name: getattr(self, name) for name in BASIS_FIELDS if getattr(self, name) is not None}
        if self.basis is not None or changed:
            start = self.basis or ("paper" if self.model == "ss-cnn" else STEERED_BASIS)
            options["basis"] = replace(LogRadialBasis.of(start), **changed)
        return options

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready; the inverse of :meth:`from_dict`."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """A configuration from plain values; an unknown name, as of a newer version, is a ValueError."""
        if not isinstance(values, dict):
            raise ValueError(f"a configuration must be a mapping (got {type(values).__name__}).")
        known = sorted(field.name for field in fields(cls))
        if unknown := ", ".join(sorted(values.keys() - known)):
            raise ValueError(f"unknown settings in the configuration: {unknown}; known are {known}.")
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**arguments)

    @property
    def identity(self) -> str:
        """A short digest of everything that is not the default, so that a field added later changes no identity."""
        defaults = {field.name: field.default for field in fields(self)}
        chosen = {name: value for name, value in self.to_dict().items() if value != defaults[name]}
        return files.combined_digest(chosen)[:12]

    @property
    def name(self) -> str:
        """A readable directory name that ends in the identity."""
        if self.images is None:
            return f"{self.dataset}-{self.model}-s{self.split}-{self.identity}"
        folder = re.sub(r"[^\w.-]+", "-", os.path.basename(self.images).removesuffix(".csv")).strip("-.")
        return f"{folder[:40] or 'images'}-{self.model}-{self.identity}"

    @property
    def command(self) -> str:
        """The command line that makes this run.

        >>> RunConfig(split=3, sizes=(200, 50, 50), batch_size=50).command
        'scalesteer train --batch-size 50 --split 3 --sizes 200 50 50'
        """
        words = ["scalesteer train"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                values = value if isinstance(value, tuple) else () if value is True else (value,)
                quoted = (shlex.quote(str(word)) for word in values)
                words.append(" ".join([f"--{field.name.replace('_', '-')}", *quoted]))
        return " ".join(words)
