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
from scalesteer.app.folder import FolderSpec
from scalesteer.app.settings import DefaultName, DefaultNumber, DefaultNumbers, Join, Precision, Schedule, Settings
from scalesteer.datasets import DATASETS, SIZED_DATASETS, SizedSpec, SplitSpec
from scalesteer.harmonics import PRESETS, LogRadialBasis
from scalesteer.models import list_models, list_options
from scalesteer.models.pooled import READOUTS, STEERED_BASIS
from scalesteer.pretrained import LARGEST, MOST_VALUES

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
USUAL = {field.name: None if isinstance(field.default, DefaultNumbers) else field.default for field in fields(Settings)}
"""The values that a run's identity leaves out."""
# What your own pictures are trained with if no model is named: the network that photographs are trained with elsewhere
# here. The mean over places would let the border that small pictures get have its say.
OWN_MODEL = {"model": "pooled-resnet", "readout": "logsumexp"}
# The sizes at which any network looks at them: they cover a factor of three; a channel of 2 would cost more than all.
OWN_CHANNELS = (0.5, 0.71, 1.0, 1.41)


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
class RunConfig(Settings):
    """One training of one model on one split: :class:`Settings` that fit together, as plain values."""

    def __post_init__(self) -> None:
        own = vars(self)  # where values become plain ones, whatever they came as
        if self.images is not None and isinstance(self.model, DefaultName):
            own |= {name: value for name, value in OWN_MODEL.items() if own[name] == USUAL[name]}
        if self.images is not None and isinstance(self.batch_size, DefaultNumber):
            own["batch_size"] = 0
        own["model"] = _checks.lookup("model", self.model, list_models())
        options = list_options(self.model)
        if isinstance(self.channels, DefaultNumbers):
            own["channels"] = OWN_CHANNELS if self.images is not None and "channels" in options else None
        for name, check in CHECKS.items():
            if own[name] is not USUAL[name]:
                own[name] = check(name, own[name])
        for name, option in NEEDS.items():
            if own[name] != USUAL[name] and option not in options:
                suited = ", ".join(model for model in list_models() if option in list_options(model))
                raise ValueError(f"`{name}` (got {own[name]!r}) applies to {suited} only (got model={self.model!r}).")
        if self.basis is not None:
            own["basis"] = _checks.lookup("basis", self.basis, tuple(PRESETS))
        data, basis = self.data, self.model_options.get("basis")
        own["dataset"] = getattr(data, "dataset", self.dataset)
        for name in DATA_FIELDS:
            if own[name] != USUAL[name] and not hasattr(data, name):
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
        given = {name: getattr(self, name) for name in FOLDER_FIELDS if getattr(self, name) != USUAL[name]}
        if self.images is not None:
            if self.dataset != RunConfig.dataset:
                raise ValueError(
                    f"`dataset` (got {self.dataset!r}) and `images` (got {self.images!r}) exclude each other."
                )
            return FolderSpec(self.images, **given)
        if given:
            raise ValueError(f"`{next(iter(given))}` (got {next(iter(given.values()))!r}) needs `images`, your own.")
        dataset = _checks.lookup("dataset", self.dataset, [*DATASETS, *SIZED_DATASETS])
        kind: Any = SizedSpec if dataset in SIZED_DATASETS else SplitSpec
        known = {field.name for field in fields(kind)}
        chosen = {name: getattr(self, name) for name in DATA_FIELDS if name in known}
        return kind(dataset, **chosen)  # type: ignore[no-any-return]  # None for the dataset's own

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
        chosen = {name: value for name, value in self.to_dict().items() if value != USUAL[name]}
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
        for name, usual in USUAL.items():
            value = getattr(self, name)
            if name == "channels" and self.images is not None and value is None:
                words.append("--channels none")
            elif name == "images" and value is not None:
                words.insert(1, ("--images=" if value.startswith("-") else "") + shlex.quote(value))
            elif value != usual:
                values = value if isinstance(value, tuple) else () if value is True else (value,)
                quoted = (shlex.quote(str(word)) for word in values)
                words.append(" ".join([f"--{name.replace('_', '-')}", *quoted]))
        return " ".join(words)
