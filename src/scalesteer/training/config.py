"""What a run is. Its configuration is its identity: it gives the directory and, on a CPU, always the same result."""

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

    model: str = "ss-cnn"  # The network; `scalesteer models` lists them.
    dataset: str = "mnist-scale"  # mnist-scale, fmnist-scale or mnist-scale-local-2.
    split: int = 0  # Which draw of the dataset; the paper has 0 to 5.
    seed: int = 0  # Seed of the first weights, the order of the images and dropout.
    epochs: int = 60  # Passes over the training images.
    batch_size: int = 128  # Images per step; the last, smaller batch of an epoch is left out.
    lr: float = 0.005  # Largest learning rate of AdamW.
    weight_decay: float = 0.01  # Weight decay of AdamW.
    label_smoothing: float = 0.1  # Share of each label that is spread over all classes.
    schedule: Schedule = "one-cycle"
    """Learning rate over time: up for 30 % then down to zero; down to zero; a tenth after a half and after three
    quarters; or constant."""
    precision: Precision = "float32"  # Arithmetic: full, TF32 products on the GPU, or bfloat16 autocast.
    upsample: int | None = None  # Enlarge the input by 1 or 2; by default what the paper used for the model.
    basis: str | None = None  # Preset of the filters of ss-cnn: paper, area or released-code; by default paper.
    train_images: int | None = None  # Use only the first so many training images; by default all.
    scale_range: tuple[float, float] | None = None  # Factors that images are shrunk by; by default the dataset's own.
    sizes: tuple[int, int, int] | None = None
    """Training, validation and test images to draw; by default the dataset's own."""
    resampler: Literal["bilinear", "antialias"] = "bilinear"  # How images are shrunk.
    scales: tuple[float, ...] | None = None  # Scales of the filters of ss-cnn; by default the paper's six.
    orders: tuple[float, ...] | None = None
    """Orders k of the filters of ss-cnn; by default the preset's, as with the next two."""
    m: float | None = None  # Radial decay of the filters of ss-cnn.
    support: Literal["disc", "crop"] | None = None
    """Pixels that belong to the filters of ss-cnn: a disc that grows with the scale, or crops of the largest one."""
    tuning: bool = False  # Choose settings: the test set is not looked at.

    def __post_init__(self) -> None:
        own = vars(self)  # where values become plain ones, whatever they came as
        _checks.choice("model", self.model, list_models())
        _checks.choice("schedule", self.schedule, get_args(Schedule))
        _checks.choice("precision", self.precision, get_args(Precision))
        for name, minimum in (("epochs", 1), ("batch_size", 2), ("seed", 0), ("upsample", 1), ("train_images", 1)):
            if own[name] is not getattr(RunConfig, name):  # the default, which may be None
                own[name] = _checks.integer(name, own[name], minimum=minimum)
        for name in ("lr", "weight_decay", "label_smoothing"):
            own[name] = _checks.real(name, own[name])
        own["tuning"] = _checks.boolean("tuning", self.tuning)
        for name in ("basis", "scales", *BASIS_FIELDS):
            if own[name] is not None and self.model != "ss-cnn":
                raise ValueError(f"`{name}` (got {own[name]!r}) applies to model='ss-cnn' only (got {self.model!r}).")
        if self.scales is not None:
            own["scales"] = _checks.scales(self.scales)
        data, basis = self.data, self.model_options.get("basis")
        for source, names in ((data, ("split", "scale_range", "sizes")), (basis, BASIS_FIELDS)):
            own |= {name: getattr(source, name) for name in names if own[name] is not None}

        images, scales, orders = self.train_images or data.sizes[0], self.scales or (1.0,), self.orders or ()
        limits = {
            "seed": (self.seed < 2**63, "be below 2**63"),
            # Beyond these a step of AdamW is no number of single precision.
            "lr": (0 < self.lr <= 1e30, "be positive and at most 1e30"),
            "weight_decay": (0 <= self.weight_decay <= 1e6, "not be negative and at most 1e6"),
            "label_smoothing": (0 <= self.label_smoothing < 1, "be from 0 to below 1"),
            "upsample": (self.upsample in (None, 1, 2), "be 1 or 2"),
            "train_images": (images <= data.sizes[0], f"be at most {data.sizes[0]}, the split's"),
            "batch_size": (self.batch_size <= images, f"be at most {images}, the training images"),
            "sizes": (min(data.sizes) > 0, "leave images for validation and test"),
        }
        for name, (sound, rule) in limits.items():
            if not sound:
                raise ValueError(f"`{name}` must {rule} (got {own[name]}).")
        # Whoever opens a checkpoint builds its filters: they must not take all memory.
        if len(orders) > MOST_VALUES:
            raise ValueError(f"`orders` must be at most {MOST_VALUES} numbers (got {len(orders)}).")
        if scales[-1] > LARGEST_SCALE or len(scales) > MOST_VALUES:
            got = f"{len(scales)}, the largest {scales[-1]:g}"
            raise ValueError(f"`scales` must be at most {MOST_VALUES} numbers up to {LARGEST_SCALE} (got {got}).")

    @property
    def data(self) -> SplitSpec:
        """The split this run trains on."""
        options: Any = self.scale_range, self.resampler, self.sizes  # None for the dataset's own
        return SplitSpec(self.dataset, self.split, *options)

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
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """A readable directory name that ends in the identity."""
        return f"{self.dataset}-{self.model}-s{self.split}-{self.identity}"

    @property
    def command(self) -> str:
        """The command line that makes this run.

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
