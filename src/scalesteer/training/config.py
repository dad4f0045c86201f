"""What a run is. Its configuration is its identity: the same one gives the same directory and the same result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from scalesteer import _checks
from scalesteer.data import SplitSpec
from scalesteer.harmonics import LogRadialBasis
from scalesteer.models import list_models

Schedule = Literal["one-cycle", "cosine", "step", "constant"]
Precision = Literal["float32", "tf32", "bf16"]
BASIS_FIELDS = ("orders", "m", "support")  # of LogRadialBasis, which a run may set apart from the preset
LARGEST_SCALE, MOST_VALUES = 16, 32  # of the filters: windows of up to 113 pixels


@dataclass(frozen=True)
class RunConfig:
    """One training of one model on one split. Each field is a flag of `scalesteer train`."""

    model: str = "ss-cnn"
    """The network; `scalesteer models` lists them."""
    dataset: str = "mnist-scale"
    """mnist-scale, fmnist-scale or mnist-scale-local-2."""
    split: int = 0
    """Which draw of the dataset; the paper has 0 to 5."""
    seed: int = 0
    """Seed of the first weights, the order of the images and dropout."""
    epochs: int = 60
    """Passes over the training images."""
    batch_size: int = 128
    """Images per step; the last, smaller batch of an epoch is left out."""
    lr: float = 0.005
    """Largest learning rate of AdamW."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    label_smoothing: float = 0.1
    """Share of each label that is spread over all classes."""
    schedule: Schedule = "one-cycle"
    """Learning rate over time: up for 30 % then down to zero; down to zero; a tenth after a half and after three
    quarters; or constant."""
    precision: Precision = "float32"
    """Arithmetic: full, TF32 products on the GPU, or bfloat16 autocast."""
    upsample: int | None = None
    """Enlarge the input by 1 or 2; by default what the paper used for the model."""
    basis: str | None = None
    """Preset of the filters of ss-cnn: paper, area or released-code; by default paper."""
    train_images: int | None = None
    """Use only the first so many training images; by default all."""
    scale_range: tuple[float, float] | None = None
    """Factors that images are shrunk by; by default the dataset's own."""
    sizes: tuple[int, int, int] | None = None
    """Training, validation and test images to draw; by default the dataset's own."""
    resampler: Literal["bilinear", "antialias"] = "bilinear"
    """How images are shrunk."""
    scales: tuple[float, ...] | None = None
    """Scales of the filters of ss-cnn; by default the paper's six."""
    orders: tuple[float, ...] | None = None
    """Orders k of the filters of ss-cnn; by default the preset's, as with the next two."""
    m: float | None = None
    """Radial decay of the filters of ss-cnn."""
    support: Literal["disc", "crop"] | None = None
    """Pixels that belong to the filters of ss-cnn: a disc that grows with the scale, or crops of the largest one."""
    tuning: bool = False
    """Choose settings: the test set is not looked at."""

    def __post_init__(self) -> None:
        _checks.choice("model", self.model, list_models())
        _checks.choice("schedule", self.schedule, get_args(Schedule))
        _checks.choice("precision", self.precision, get_args(Precision))
        for name, minimum in (("epochs", 1), ("batch_size", 2), ("seed", 0)):
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), minimum=minimum))
        for name in ("lr", "weight_decay", "label_smoothing"):
            object.__setattr__(self, name, _checks.real(name, getattr(self, name)))
        if self.seed >= 2**63:
            raise ValueError(f"`seed` must be below 2**63 (got {self.seed}).")
        # Beyond these a step of AdamW is no number of single precision.
        if not 0 < self.lr <= 1e30:
            raise ValueError(f"`lr` must be positive and at most 1e30 (got {self.lr}).")
        if not 0 <= self.weight_decay <= 1e6:
            raise ValueError(f"`weight_decay` must not be negative and at most 1e6 (got {self.weight_decay}).")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"`label_smoothing` must be from 0 to below 1 (got {self.label_smoothing}).")
        object.__setattr__(self, "tuning", _checks.boolean("tuning", self.tuning))
        self._check_filters()
        if self.upsample is not None and _checks.integer("upsample", self.upsample, minimum=1) > 2:
            raise ValueError(f"`upsample` must be 1 or 2 (got {self.upsample}).")
        data = self.data
        object.__setattr__(self, "split", data.split)
        for name in ("scale_range", "sizes"):  # as plain tuples, whatever sequence they came as
            if getattr(self, name) is not None:
                object.__setattr__(self, name, getattr(data, name))
        train = data.sizes[0]
        if self.train_images is not None:
            count = _checks.integer("train_images", self.train_images, minimum=1)
            object.__setattr__(self, "train_images", count)
            if count > train:
                raise ValueError(f"`train_images` must be at most {train}, the split's (got {count}).")
            train = count
        if self.batch_size > train:
            raise ValueError(f"`batch_size` must be at most {train}, the training images (got {self.batch_size}).")
        if min(data.sizes) == 0:
            raise ValueError(f"`sizes` must leave images for validation and test (got {data.sizes}).")

    def _check_filters(self) -> None:
        for name in ("basis", "scales", *BASIS_FIELDS):
            value = getattr(self, name)
            if value is not None and self.model != "ss-cnn":
                raise ValueError(f"`{name}` (got {value!r}) applies to model='ss-cnn' only (got {self.model!r}).")
        if self.scales is not None:
            object.__setattr__(self, "scales", _checks.scales(self.scales))
            # Whoever opens a checkpoint builds its filters: they must not take all memory.
            if self.scales[-1] > LARGEST_SCALE or len(self.scales) > MOST_VALUES:
                got = f"{len(self.scales)}, the largest {self.scales[-1]:g}"
                raise ValueError(f"`scales` must be at most {MOST_VALUES} numbers up to {LARGEST_SCALE} (got {got}).")
        basis = self.model_options.get("basis")
        for name in BASIS_FIELDS:  # as plain numbers, whatever they came as
            if getattr(self, name) is not None:
                object.__setattr__(self, name, getattr(basis, name))
        if self.orders is not None and len(self.orders) > MOST_VALUES:
            raise ValueError(f"`orders` must be at most {MOST_VALUES} numbers (got {len(self.orders)}).")

    @property
    def data(self) -> SplitSpec:
        """The split this run trains on."""
        return SplitSpec(
            self.dataset,
            self.split,
            scale_range=self.scale_range,  # type: ignore[arg-type]
            resampler=self.resampler,
            sizes=self.sizes,  # type: ignore[arg-type]
        )

    @property
    def model_options(self) -> dict[str, Any]:
        """Options for `create_model` beside the dataset."""
        options: dict[str, Any] = {"upsample": self.upsample}
        if self.scales is not None:
            options["scales"] = self.scales
        changed = {name: getattr(self, name) for name in BASIS_FIELDS if getattr(self, name) is not None}
        if self.basis is not None or changed:
            options["basis"] = replace(LogRadialBasis.preset(self.basis or "paper"), **changed)
        return options

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready; the inverse of :meth:`from_dict`."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """A configuration from plain values.

        Raises:
            ValueError: If a name is unknown, as in a configuration written by a newer version.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a configuration must be a mapping (got {type(values).__name__}).")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown settings in the configuration: {', '.join(unknown)}; known are {sorted(known)}.")
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**arguments)

    @property
    def identity(self) -> str:
        """A short digest of everything that is not the default, so that a field added later changes no identity.

        Example:
            >>> RunConfig().identity == RunConfig().identity != RunConfig(seed=1).identity
            True
        """
        defaults = {field.name: field.default for field in fields(self)}
        chosen = {name: value for name, value in self.to_dict().items() if value != defaults[name]}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """A readable directory name that ends in the identity."""
        return f"{self.dataset}-{self.model}-s{self.split}-{self.identity}"

    @property
    def command(self) -> str:
        """The command line that makes this run.

        Example:
            >>> RunConfig(split=3, sizes=(200, 50, 50), batch_size=50).command
            'scalesteer train --split 3 --batch-size 50 --sizes 200 50 50'
        """
        words = ["scalesteer train"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                values = value if isinstance(value, tuple) else () if value is True else (value,)
                words.append(" ".join([f"--{field.name.replace('_', '-')}", *map(str, values)]))
        return " ".join(words)


def differences(first: RunConfig, second: RunConfig) -> str:
    """What two configurations do not agree in, as one line."""
    one, two = first.to_dict(), second.to_dict()
    return ", ".join(f"{k}: {one[k]!r} there, {two[k]!r} here" for k in one if one[k] != two[k])
