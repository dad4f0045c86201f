"""The record of a published run: 43 settings side by side, whose digest is its name in results/.

Names of runs follow from these fields and their defaults, so that neither changes. What trains is a
:class:`scalesteer.app.Run`, which a record translates to.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from scalesteer import files
from scalesteer.app import Run, make_run

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Record:
    """One training of one network on one split of a built-in dataset; each field as in :mod:`scalesteer.app.settings`.

    Values that do not fit together are errors. `images`, `image_size`, `fit` and `grey` are for one's own pictures,
    which no published run has; `channels` are none by default.
    """

    model: str = "ss-cnn"
    dataset: str = "mnist-scale"
    images: None = None
    image_size: None = None
    fit: str = "pad"
    grey: bool = False
    channels: Numbers | None = None
    epochs: int = 60
    batch_size: int = 128
    lr: float = 0.005
    flip: bool = False
    shift: int = 0
    resize: tuple[float, float] | None = None
    resize_resampler: str = "antialias"
    class_weights: bool = False
    tuning: bool = False
    seed: int = 0
    split: int = 0
    weight_decay: float = 0.01
    label_smoothing: float = 0.1
    schedule: str = "one-cycle"
    precision: str = "float32"
    upsample: int | None = None
    basis: str | None = None
    train_images: int | None = None
    scale_range: tuple[float, float] | None = None
    sizes: tuple[int, int, int] | None = None
    resampler: str = "bilinear"
    scales: Numbers | None = None
    orders: Numbers | None = None
    m: float | None = None
    support: str | None = None
    train_sizes: tuple[float, float] | None = None
    test_sizes: Numbers | None = None
    widths: tuple[int, ...] | None = None
    kernel_size: int | tuple[int, ...] | None = None
    readout: str | None = None
    dropout: float | None = None
    join: str = "logsumexp"
    drop: float = 0.0
    border: int = 0
    one_size_epochs: int = 0
    test_channels: Numbers | None = None

    def __post_init__(self) -> None:
        if self.images is not None:
            raise ValueError(f"`images` (got {self.images!r}) are for runs of one's own: `scalesteer train FOLDER`.")
        made = _flat(self.run)  # values as they are checked and made plain; what was not given stays so
        own = vars(self)
        own |= {name: made[name] for name in USUAL if own[name] is not USUAL[name] and made.get(name) is not None}

    @cached_property
    def run(self) -> Run:
        """What the record says, to be trained."""
        return make_run(**{name: value for name, value in asdict(self).items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready; the inverse of :meth:`from_dict`."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, values: Any) -> Record:
        """A record from plain values; an unknown name, as of a newer version, is a ValueError."""
        if not isinstance(values, dict):
            raise ValueError(f"a configuration must be a mapping (got {type(values).__name__}).")
        if unknown := ", ".join(sorted(values.keys() - USUAL.keys())):
            raise ValueError(f"unknown settings in the configuration: {unknown}; known are {sorted(USUAL)}.")
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)

    @cached_property
    def identity(self) -> str:
        """A short digest of everything that is not the default."""
        chosen = {name: value for name, value in self.to_dict().items() if value != USUAL[name]}
        return files.combined_digest(chosen)[:12]

    @property
    def name(self) -> str:
        """Where the run stands in results/: readable, and it ends in the identity."""
        return f"{self.dataset}-{self.model}-s{self.split}-{self.identity}"


USUAL = {field.name: field.default for field in fields(Record)}
"""The values that an identity leaves out."""


def _flat(run: Run) -> dict[str, Any]:
    groups = (run.data.describe(), vars(run.network), vars(run.network.filters), vars(run.training))
    return {name: value for group in groups for name, value in group.items()}
