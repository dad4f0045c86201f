"""Which images a run has: a folder of your own pictures, a split of a built-in dataset, or objects of known sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from scalesteer import _checks
from scalesteer.datasets import DATASETS, SIZED_DATASETS, ImageSet, SizedSpec, SplitSpec, load_split
from scalesteer.models import DATASETS as TASKS
from scalesteer.models.network import Task

TEST_BYTES = 1 << 29  # of test images in memory at a time


class OpenData(Protocol):
    """Images as they are now."""

    @property
    def task(self) -> Task:
        """What they ask of a network."""

    def load(self, part: str) -> Iterable[ImageSet]:
        """The images of "train", "val" or "test": all at once, or of the test some at a time where they are many."""


class Data(Protocol):
    """Which images, as a frozen dataclass: it can be compared and hashed, and nothing is read before it is opened."""

    @property
    def name(self) -> str:
        """A word for the directory of a run."""

    @property
    def count(self) -> int | None:
        """How many training images there are; None if that is known when they are read."""

    def describe(self) -> dict[str, Any]:
        """Plain values, by the names of the settings."""

    def open(self, data_dir: Path | None = None, classes: Sequence[str] = ()) -> OpenData:
        """The images as they are now.

        Args:
            data_dir: Where the original files of a built-in dataset are, if they are not in the cache.
            classes: What the labels of your own pictures mean to a network that is trained already.
        """


@dataclass(frozen=True)
class Split(SplitSpec):
    """A split of one of the paper's datasets."""

    @property
    def name(self) -> str:
        return self.dataset

    @property
    def count(self) -> int:
        return self.sizes[0]

    def describe(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "seed"}

    def open(self, data_dir: Path | None = None, classes: Sequence[str] = ()) -> _BuiltIn:
        return _BuiltIn(self, data_dir)


@dataclass(frozen=True)
class Sized(SizedSpec):
    """Objects that are trained at some sizes and tested at others."""

    @property
    def name(self) -> str:
        return self.dataset

    @property
    def count(self) -> int:
        return self.sizes[0] * len(self.sizes_of("train"))

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def open(self, data_dir: Path | None = None, classes: Sequence[str] = ()) -> _BuiltIn:
        return _BuiltIn(self, data_dir)


@dataclass(frozen=True)
class _BuiltIn:
    spec: Split | Sized
    data_dir: Path | None

    @property
    def task(self) -> Task:
        return TASKS[self.spec.dataset]

    def load(self, part: str) -> Iterator[ImageSet]:
        groups: list[Split | Sized] = [self.spec]
        if part == "test" and isinstance(self.spec, Sized):
            sizes, pixels = self.spec.test_sizes, math.prod(self.task.image_size or ())
            count = max(1, TEST_BYTES // (self.spec.sizes[2] * self.task.in_chans * pixels))
            groups = [replace(self.spec, test_sizes=sizes[i : i + count]) for i in range(0, len(sizes), count)]
        for spec in groups:
            yield load_split(part=part, data_dir=self.data_dir, **vars(spec))


def built_in(dataset: str, **settings: Any) -> Split | Sized:
    """The images of a built-in dataset, by the settings that it knows; another one is a ValueError."""
    dataset = _checks.lookup("dataset", dataset, [*DATASETS, *SIZED_DATASETS])
    kind: Any = Sized if dataset in SIZED_DATASETS else Split
    for name, value in settings.items():
        if name not in kind.__dataclass_fields__:
            raise ValueError(f"`{name}` (got {value!r}) does not apply to dataset={dataset!r}.")
    if "test_sizes" in settings:
        settings["test_sizes"] = _checks.ascending("test_sizes", settings["test_sizes"])
    data: Split | Sized = kind(dataset, **settings)
    if min(data.sizes) == 0:
        raise ValueError(f"`sizes` must leave images for validation and test (got {data.sizes}).")
    return data
