"""What a run is: its images, its network, its training. That is its identity: it gives the directory and, on a CPU,
always the same result."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, get_args

from scalesteer import _checks, files
from scalesteer.app.data import Data, built_in
from scalesteer.app.folder import FolderSpec
from scalesteer.app.settings import (
    Beyond,
    Dataset,
    Filters,
    FitJoin,
    Join,
    Network,
    Pictures,
    Precision,
    Schedule,
    Training,
)
from scalesteer.harmonics import PRESETS, LogRadialBasis
from scalesteer.models import list_models, list_options
from scalesteer.models.external import is_external
from scalesteer.models.network import Task
from scalesteer.models.pooled import READOUTS, STEERED_BASIS
from scalesteer.models.registered import BUILDERS
from scalesteer.pretrained import LARGEST, MOST_VALUES

BASIS = ("orders", "m", "support")  # fields of LogRadialBasis, which a run may set apart from the preset
BATCH, FEW_STEPS = 128, 5  # images of a step; steps of an epoch that are too few
LARGEST_SCALE, LARGEST_WINDOW = LARGEST["scales"], 113  # of the filters
LARGEST_BLUR = 32  # in pixels
# Fields that only networks with a certain option of `create_model` have, with that option.
NEEDS = dict.fromkeys(("basis", "scales", *BASIS), "basis")
NEEDS |= dict.fromkeys(("channels", "drop", "border", "one_size_epochs", "test_channels", "multiple"), "channels")
NEEDS |= {name: name for name in ("upsample", "kernel_size", "readout", "widths", "dropout", "pretrained")}
# How your own pictures are trained, by default (docs/evidence/photographs.md says what else was tried): at one size,
# resized at random; tested at several. With `channels` the last epochs train in these, gently.
OWN_MODEL, OWN_RESIZE, OWN_CHANNELS = "pooled-deep", (0.5, 2.0), (0.5, 0.71, 1.0, 1.41, 2.0)
OWN_DROP, OWN_SHARE, OWN_RATE = 0.4, 1 / 6, 0.2  # the last two: of the epochs and of the learning rate, with channels
PLAIN: dict[str, Any] = {
    "resize": (1.0, 1.0), "test_channels": (), "drop": 0.0, "one_size_epochs": 0, "channels_lr": 0.0,
}  # fmt: skip
"""The same of all runs before there were such defaults, and of datasets."""
EARLIER_CHANNELS = (0.5, 0.71, 1.0, 1.41)  # of own pictures, of runs that did not say


def _usual(*groups: Any) -> dict[str, Any]:
    return {part.name: part.default for group in groups for part in fields(group) if part.name != "filters"}


NETWORK, TRAINING = _usual(Network, Filters), _usual(Training)
FOLDER, DATASET = _usual(Pictures), _usual(Dataset)
USUAL = NETWORK | TRAINING | FOLDER | DATASET
"""All settings by name, with their defaults; None where the default depends on others."""


def _range(name: str, value: Any) -> tuple[float, ...]:
    numbers = _checks.reals(name, value)
    if len(numbers) != 2 or not 0 < numbers[0] <= numbers[1]:
        raise ValueError(f"`{name}` must be (low, high) with 0 < low <= high (got {numbers}).")
    low, high = numbers
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


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise TypeError(f"`{name}` must be the path of a file (got {value!r}).")
    return str(os.fspath(value))


def _channels(name: str, value: Any) -> tuple[float, ...]:
    return (
        ()
        if isinstance(value, (tuple, list)) and not value
        else _checks.ascending(name, sorted(_checks.reals(name, value)))
    )


# How the value of a setting is checked and made plain, if it is not the default.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **{name: partial(_checks.choice, options=get_args(kind))
       for name, kind in (("schedule", Schedule), ("precision", Precision), ("join", Join), ("beyond", Beyond),
                          ("fit_join", FitJoin), ("resize_resampler", Literal["antialias", "bilinear"]))},
    **{name: partial(_checks.integer, minimum=minimum)
       for name, minimum in (("epochs", 1), ("batch_size", 2), ("seed", 0), ("upsample", 1), ("train_images", 1),
                             ("shift", 0), ("border", 0), ("one_size_epochs", 0), ("multiple", 1), ("patience", 1),
                             ("accumulate", 1))},
    **dict.fromkeys(("lr", "weight_decay", "label_smoothing", "drop", "dropout", "channels_lr", "clip"), _checks.real),
    **dict.fromkeys(("rotate", "colour", "blur"), _checks.real),
    **dict.fromkeys(("tuning", "flip", "class_weights", "pretrained"), _checks.boolean),
    **dict.fromkeys(("channels", "test_channels"), _channels), "scales": _checks.ascending, "weights": _path,
    "resize": _range, "widths": _widths, "kernel_size": _kernel_size,
    "readout": partial(_checks.choice, options=READOUTS),
    "basis": partial(_checks.lookup, options=tuple(PRESETS)),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training of one network on some images: settings that fit together, as plain values.

    What depends on the images, as the model, is filled in. :func:`make_run` makes one from the names of flags.
    """

    data: Data
    network: Network = field(default_factory=Network)
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        own = vars(self.network) | vars(self.network.filters) | vars(self.training)
        pictures = isinstance(self.data, FolderSpec)
        if own["model"] is None:
            own["model"] = OWN_MODEL if pictures else "ss-cnn"
        options = _options_of(own)
        silent = own["channels"] is None
        own["channels"] = () if silent else own["channels"]
        if own["batch_size"] is None and not pictures:
            own["batch_size"] = BATCH
        if pictures:
            recipe = _recipe(own, silent and "channels" in options)
            own |= {name: value for name, value in recipe.items() if own[name] is None}
        own |= {name: PLAIN[name] for name in ("drop", "one_size_epochs", "channels_lr") if own[name] is None}
        for name, check in CHECKS.items():
            if own[name] is not USUAL[name]:
                own[name] = check(name, own[name])
        for name, option in NEEDS.items():
            if own[name] not in (USUAL[name], (), PLAIN.get(name)) and option not in options:
                suited = ", ".join(model for model in list_models() if option in list_options(model))
                suited = suited or f"networks with an option `{option}`"
                raise ValueError(f"`{name}` (got {own[name]!r}) applies to {suited} only (got model={own['model']!r}).")
        if pictures and "readout" not in options and own["model"] not in BUILDERS:
            suited = ", ".join(model for model in list_models() if "readout" in list_options(model))
            raise ValueError(f"`model` must be one that takes any size for your own images: {suited} "
                             f"(got {own['model']!r}).")  # fmt: skip
        basis = _basis(own["model"], own)
        own |= {name: getattr(basis, name) for name in BASIS if own[name] is not None}
        _check_limits(own)
        pick = {kind: {name: own[name] for name in _usual(kind)} for kind in (Network, Filters, Training)}
        network = Network(**pick[Network], filters=Filters(**pick[Filters]))
        vars(self).update(network=network, training=Training(**pick[Training]))
        if self.data.count is not None:
            check_count(self.training, self.data.count)

    @property
    def settings(self) -> dict[str, Any]:
        """All that is not the default, by the names of flags; :func:`make_run` makes the run again from it."""
        data = self.data.describe()
        least: dict[str, Any] = {name: data[name] for name in ("images", "dataset") if name in data}
        usual = USUAL | make_data(least).describe()
        own = vars(self.network) | vars(self.network.filters) | vars(self.training)
        own = data | {name: own[name] for name in NETWORK | TRAINING}
        given = {name: own[name] for name in USUAL if name in own and own[name] != usual[name]}
        if "dataset" in least:
            given = _without_plain(given)
        return least | given

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready; the inverse of :meth:`from_dict`."""
        groups = {"data": self.data.describe(), "network": asdict(self.network), "training": asdict(self.training)}
        return json.loads(json.dumps(groups))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, values: Any) -> Run:
        """A run from plain values, also of earlier versions; an unknown name, as of a newer one, is a ValueError."""
        if not isinstance(values, dict):
            raise ValueError(f"a configuration must be a mapping (got {type(values).__name__}).")
        if values.keys() == {"data", "network", "training"}:
            groups = [values["data"], dict(values["network"]), values["training"]]
            given = {name: value for group in (*groups, groups[1].pop("filters", {})) for name, value in group.items()}
        else:
            given = _earlier(values)
        given |= {name: value for name, value in PLAIN.items() if given.get(name) is None and given.get("images")}
        return make_run(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None})

    def with_model(self, name: str) -> Run:
        """The same run with another network; what belongs to the usual one alone is left out."""
        kept = {key: value for key, value in self.settings.items() if key not in ("model", "readout")}
        return make_run(**kept, model=name)

    @property
    def identity(self) -> str:
        """A short digest of everything that is not the default, so that a setting added later changes no identity."""
        return files.combined_digest(_without_plain(self.settings))[:12]

    @property
    def name(self) -> str:
        """A readable directory name that ends in the identity."""
        split = f"-s{self.data.describe()['split']}" if "split" in self.data.describe() else ""
        word = re.sub(r"[^\w.-]+", "-", self.data.name).strip("-.")[:40]
        model = re.sub(r"[^\w.-]+", "-", self.network.model or "")[:80]
        return f"{word or 'images'}-{model}{split}-{self.identity}"

    @property
    def command(self) -> str:
        """The command line that makes this run.

        >>> make_run(split=3, sizes=(200, 50, 50), batch_size=50).command
        'scalesteer train --batch-size 50 --split 3 --sizes 200 50 50'
        """
        given, words = self.settings, ["scalesteer train"]
        if given.get("dataset") == DATASET["dataset"]:
            del given["dataset"]
        for name in ("model", "readout", "channels", "batch_size", *PLAIN):  # what follows from the rest goes unsaid
            rest = {key: value for key, value in given.items() if key != name}
            with suppress(ValueError):  # of settings that are not for the usual model
                given = rest if make_run(**rest) == self else given
        for name, value in given.items():
            if name == "images":
                words.insert(1, shlex.quote(f"./{value}" if value.startswith("-") else value))
                continue
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            quoted = [shlex.quote(str(word)) for word in values] or ["none"] * (value == ())
            flag = "network" if name == "model" and is_external(value) else name.replace("_", "-")
            words.append(" ".join([f"--{flag}", *quoted]))
        return " ".join(words)


def _options_of(own: dict[str, Any]) -> list[str]:
    """The options of a run's network, whose name is made plain; all of one that nobody has imported yet."""
    if is_external(own["model"]) and own["model"] not in BUILDERS:
        return list(NEEDS.values())
    own["model"] = _checks.lookup("model", own["model"], list_models())
    return list_options(own["model"])


def _recipe(own: Mapping[str, Any], channels: bool) -> dict[str, Any]:
    """How your own pictures are trained where a run does not say; `channels`: also at which sizes they are tested."""
    recipe = PLAIN | {"resize": OWN_RESIZE}
    if not own["channels"]:
        return recipe | ({"test_channels": OWN_CHANNELS} if channels else {})
    epochs, rate, first = own["epochs"], own["lr"], own["one_size_epochs"]
    if first is None and isinstance(epochs, int):  # what is not is refused later
        first = recipe["one_size_epochs"] = epochs - max(1, round(OWN_SHARE * epochs))
    if first and isinstance(rate, (int, float)):
        recipe["channels_lr"] = OWN_RATE * rate
    return recipe | {"drop": OWN_DROP}


def _without_plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in PLAIN or value != PLAIN[name]}


def make_run(**settings: Any) -> Run:
    """A run from settings by the names of flags; the others have their defaults.

    Example:
        >>> make_run(images="photos", epochs=30).network.model
        'pooled-deep'
    """
    if unknown := ", ".join(sorted(settings.keys() - USUAL.keys())):
        raise ValueError(f"unknown settings in the configuration: {unknown}; known are {sorted(USUAL)}.")
    pick = {
        kind: {name: settings[name] for name in _usual(kind) if name in settings}
        for kind in (Network, Filters, Training)
    }
    data = make_data({name: value for name, value in settings.items() if name in FOLDER | DATASET})
    return Run(data, Network(**pick[Network], filters=Filters(**pick[Filters])), Training(**pick[Training]))


def make_data(settings: Mapping[str, Any]) -> Data:
    """Which images the settings mean: a folder's if `images` is among them, otherwise those of a built-in dataset."""
    given = {name: value for name, value in settings.items() if value is not None and value != USUAL[name]}
    if (images := given.pop("images", None)) is not None:
        for name in DATASET.keys() & given.keys():
            if name == "dataset":
                raise ValueError(f"`dataset` (got {given[name]!r}) and `images` (got {images!r}) exclude each other.")
            raise ValueError(f"`{name}` (got {given[name]!r}) does not apply to your own `images`.")
        return FolderSpec(images, **given)
    for name in FOLDER.keys() & given.keys():
        raise ValueError(f"`{name}` (got {given[name]!r}) needs `images`, your own.")
    return built_in(given.pop("dataset", DATASET["dataset"]), **given)


def batch_for(training: Training, count: int) -> int:
    """The images of a step, of so many training images: `batch_size`, or what suits few pictures.

    Example:
        >>> [batch_for(Training(), count) for count in (30, 100, 5000)]
        [4, 16, 128]
    """
    few: int = 2 ** max(1, (count // FEW_STEPS).bit_length() - 1)
    return training.batch_size or min(BATCH, few)


def check_count(training: Training, count: int) -> None:
    """Raise a ValueError unless so many training images are enough."""
    images = training.train_images or count
    if images > count:
        raise ValueError(f"`train_images` must be at most {count}, the split's (got {training.train_images}).")
    if (batch := batch_for(training, images)) > images:
        raise ValueError(f"`batch_size` must be at most {images}, the training images (got {batch}).")
    if batch % training.accumulate:
        raise ValueError(f"`accumulate` must divide the images of a step, {batch} (got {training.accumulate}).")


def model_options(network: Network, task: Task) -> dict[str, Any]:
    """Options for `create_model` beside the task's."""
    names = ("upsample", "widths", "kernel_size", "readout", "dropout")
    options = {name: getattr(network, name) for name in names if getattr(network, name) is not None}
    if network.channels:
        options |= {"channels": network.channels, "join": network.join, "drop": network.drop}
        options |= channel_options(network, task)
    filters = vars(network.filters)
    options |= {"scales": filters["scales"]} if filters["scales"] is not None else {}
    basis = _basis(network.model or "", filters)
    return options if basis is None else options | {"basis": basis}


def channel_options(network: Network, task: Task) -> dict[str, Any]:
    """Options of scale channels that are the same in training and in the test."""
    options: dict[str, Any] = {"multiple": network.multiple} if network.multiple > 1 else {}
    if network.border:
        mirrored = task.ground == "surroundings"
        options |= {"border": network.border, "border_mode": "reflect" if mirrored else "zeros"}
    return options


def _basis(model: str, filters: Mapping[str, Any]) -> LogRadialBasis | None:
    """The filters that a preset and changes to it say; None for the network's own."""
    changed = {name: filters[name] for name in BASIS if filters[name] is not None}
    if filters["basis"] is None and not changed:
        return None
    start = filters["basis"] or ("paper" if model == "ss-cnn" else STEERED_BASIS)
    return replace(LogRadialBasis.of(start), **changed)


def _check_limits(own: Mapping[str, Any]) -> None:
    """Raise a ValueError unless numbers lie within limits, and fit each other."""
    looks, usual = own["channels"] or own["test_channels"], USUAL["join"]
    for name in ("drop", "border", "one_size_epochs", "channels_lr", "multiple"):
        needed = looks if name in ("border", "multiple") else own["channels"]
        if own[name] != PLAIN.get(name, USUAL[name]) and not needed:
            raise ValueError(f"`{name}` (got {own[name]}) needs `channels`.")
    moved = bool(own["resize"] or own["shift"] or own["rotate"])
    limits = {
        "seed": (own["seed"] < 2**63, "be below 2**63"),
        # Beyond these a step of AdamW is no number of single precision.
        "lr": (0 < own["lr"] <= 1e30, "be positive and at most 1e30"),
        "weight_decay": (0 <= own["weight_decay"] <= 1e6, "not be negative and at most 1e6"),
        "upsample": (own["upsample"] in (None, 1, 2), "be 1 or 2"),
        "one_size_epochs": (own["one_size_epochs"] < own["epochs"], "be fewer than `epochs`"),
        "channels_lr": (
            own["channels_lr"] == 0 or (own["one_size_epochs"] > 0 and 0 < own["channels_lr"] <= 1e30),
            "be 0, or come with `one_size_epochs` and be at most 1e30",
        ),
        "border": (own["border"] <= LARGEST["border"], f"be at most {LARGEST['border']}"),
        "multiple": (own["multiple"] <= LARGEST["border"], f"be at most {LARGEST['border']}"),
        "clip": (own["clip"] is None or 0 < own["clip"] <= 1e30, "be positive and at most 1e30"),
        "weights": (own["weights"] is None or not own["pretrained"], "not come with `pretrained`"),
        "resize_resampler": (bool(own["resize"]) or own["resize_resampler"] == "antialias", "come with `resize`"),
        "beyond": (own["beyond"] is None or moved, "come with `resize`, `shift` or `rotate`"),
        "rotate": (0 <= own["rotate"] <= 180, "be from 0 to 180 degrees"),
        "colour": (0 <= own["colour"] <= 1, "be from 0 to 1"),
        "blur": (0 <= own["blur"] <= LARGEST_BLUR, f"be from 0 to {LARGEST_BLUR} pixels"),
        "fit_join": (bool(looks) or own["fit_join"] != "yes", "come with `channels` or `test_channels`"),
        "join": (bool(looks) or own["join"] == usual, f"be {usual!r} without `channels` or `test_channels`"),
        # Whoever opens a checkpoint builds its network: it must not take all memory.
        "orders": (len(own["orders"] or ()) <= MOST_VALUES, f"be at most {MOST_VALUES} numbers"),
    }
    for name in ("label_smoothing", "dropout", "drop"):
        limits[name] = 0 <= (own[name] or 0) < 1, "be from 0 to below 1"
    for name, (sound, rule) in limits.items():
        if not sound:
            raise ValueError(f"`{name}` must {rule} (got {own[name]}).")
    for name in ("scales", "channels", "test_channels"):
        values = own[name] or (1.0,)
        if values[-1] > LARGEST_SCALE or len(values) > MOST_VALUES:
            got = f"{len(values)}, the largest {values[-1]:g}"
            raise ValueError(f"`{name}` must be at most {MOST_VALUES} numbers up to {LARGEST_SCALE} (got {got}).")
    size = own["kernel_size"]
    sides = size if isinstance(size, tuple) else (size or 7,)
    if own["scales"] is not None and max(sides) * own["scales"][-1] > LARGEST_WINDOW:
        got = f"{max(sides)} times {own['scales'][-1]:g}"
        raise ValueError(f"`kernel_size` times the largest of `scales` must be at most {LARGEST_WINDOW} (got {got}).")


def _earlier(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run that an earlier version wrote, whose 43 fields were not in groups."""
    given = dict(values)
    if given.get("images") is not None or given.get("channels", ()) is None:
        given["channels"] = given.get("channels", EARLIER_CHANNELS) or ()
    given["batch_size"] = given.get("batch_size") or None  # it was 0 where few pictures get small batches
    if given.get("images") is not None:
        given.pop("dataset", None)
    return given
