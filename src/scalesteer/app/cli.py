"""The command line. A command is a frozen dataclass: its fields are the flags, `run()` does the work.

To add one, decorate the dataclass with `@app.command(NAME)`; :mod:`scalesteer.app.commands` has the rest. Nothing here
imports torch before a command runs, so that help comes at once.
"""

import json
import logging
import os
import shutil
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from scalesteer._text import nearest, printable, printable_lines
from scalesteer.app import settings
from scalesteer.app.cli_data import data
from scalesteer.app.cli_networks import networks
from scalesteer.app.commands import Commands, OmitArgPrefixes, Positional, arg, given, percent
from scalesteer.app.flags import Address, Device, Engine, GpusPerRun, Originals, OwnNetwork, RunsFolder, ValueRange
from scalesteer.app.memory import keep_memory

if TYPE_CHECKING:
    from scalesteer.app import Run

log = logging.getLogger("scalesteer")
app = Commands("Image classifiers that also work at sizes of objects that training did not show.", keep_memory)
app.known["data"] = data

PLACEHOLDERS = {"images": "FOLDER|CSV", "image_size": "HEIGHT WIDTH", "sizes": "TRAIN VAL TEST", "channels": "SCALE..."}
PLACEHOLDERS |= {"value_range": "BLACK WHITE", "percentiles": "LOW HIGH", "planes": "PLANE..."}
PLACEHOLDERS |= dict.fromkeys(("resize", "scale_range", "train_sizes"), "LOW HIGH")
PLACEHOLDERS |= dict.fromkeys(("model", "basis", "readout"), "NAME")
PLACEHOLDERS |= {"test_sizes": "SIZE...", "test_channels": "SCALE...", "scales": "SCALE...", "orders": "K..."}
PICTURES = (
    "Your own pictures: a folder with a sub-folder for each class, or a CSV file with the columns path and label. By "
    "default a built-in dataset, see --dataset."
)


@app.command("train", PLACEHOLDERS)
@dataclass(frozen=True)
class Train:
    """Train one network on your own pictures or on a built-in dataset, test it once, and keep the model.

    Your own pictures are those of a folder with a sub-folder for each class. Whole folders named train, val and test
    inside it are used as such; otherwise 70, 15 and 15 % of the pictures are drawn by their paths, and the run's
    split.csv says which. Pictures that cannot be read are named and left out.

    The same flags give the same run, in a directory of its own under --runs: repeat the command to go on after an
    interruption. Several GPUs train one network with `torchrun --nproc-per-node N -m scalesteer train`; --batch-size
    stays that of all of them together.

    Example: scalesteer train photos --epochs 30 --flip

    Example: scalesteer train photos --model pooled-cnn --channels 0.5 1 2

    Example: scalesteer train photos --network timm:resnet18 --pretrained

    Example: scalesteer train --model ss-cnn --split 3
    """

    pictures: Positional[Annotated[str | None, arg(metavar="[FOLDER|CSV]", help=PICTURES)]] = None
    your_pictures: OmitArgPrefixes[settings.Pictures] = field(default_factory=settings.Pictures)
    network: OmitArgPrefixes[settings.Network] = field(default_factory=settings.Network)
    training: OmitArgPrefixes[settings.Training] = field(default_factory=settings.Training)
    dataset: OmitArgPrefixes[settings.Dataset] = field(default_factory=settings.Dataset)
    own_network: OwnNetwork = None
    tensorboard: Annotated[Path | None, arg(metavar="DIR")] = None  # Also write the curves here, for TensorBoard.
    device: Device = "auto"
    data_dir: Originals = None
    runs: RunsFolder = Path("runs")

    @property
    def made(self) -> "Run":
        """The run that the flags describe; what is wrong with them is a ValueError or a TypeError."""
        from scalesteer.app import make_run
        from scalesteer.datasets import DATASETS, SIZED_DATASETS

        groups = (self.your_pictures, self.network, self.training, self.dataset)
        flags = {name: value for group in groups for name, value in given(group).items()}
        if self.own_network is not None:
            from scalesteer.models.external import register_network

            if "model" in flags:
                raise ValueError(f"give one network (got --network {self.own_network} and --model {flags['model']}).")
            flags["model"] = register_network(self.own_network)
        if self.pictures is None:
            return make_run(**flags)
        if "images" in flags:
            raise ValueError(f"give your pictures once (got {self.pictures!r} and --images {flags['images']!r}).")
        near = nearest(self.pictures, [*DATASETS, *SIZED_DATASETS])
        if near and not os.path.exists(self.pictures):
            raise ValueError(
                f"there is no folder {self.pictures!r}; if you mean the built-in dataset, type --dataset {near}."
            )
        return make_run(images=self.pictures, **flags)

    def run(self) -> None:
        from scalesteer import app as training
        from scalesteer.app.distributed import started
        from scalesteer.app.loggers import TensorBoard

        made = self.made
        directory = self.runs / made.name
        loggers = [] if self.tensorboard is None or started().rank else [TensorBoard(self.tensorboard / made.name)]
        result = training.train(made, directory, device=self.device, data_dir=self.data_dir, loggers=loggers)
        if started().rank:  # by torchrun: the first process speaks
            return
        if result["status"] != "finished":
            raise training.RunError(f"{made.name} failed: {result['reason']}.")
        tested = "not tested" if made.training.tuning else f"test error {percent(result['test_error'])}"
        chosen = f"validation {percent(result['val_error'])} at epoch {result['best_epoch'] + 1}"
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
                run, *told = _describe_run(directory)
                flags = run.command.removeprefix("scalesteer train").strip()
            except (OSError, *results.MALFORMED):
                told, flags = ["cannot be read", "", ""], ""
            rows.append([printable(cell) for cell in (directory.name, *told, when, flags)])
        print(sweep.align(rows))


def _describe_run(directory: Path) -> "tuple[Run, str, str, str]":
    """A run, and in words how far it is, its validation error and its test error."""
    from scalesteer.app import Run
    from scalesteer.app.loop import best_epoch
    from scalesteer.files import read_small

    run = Run.from_dict(json.loads(read_small(directory / "config.json")))
    metrics, result = directory / "metrics.jsonl", directory / "result.json"
    epochs = [json.loads(line) for line in read_small(metrics).splitlines()] if metrics.exists() else []
    ended = json.loads(read_small(result)) if result.exists() else {}
    validation = percent(best_epoch(epochs, run.training.one_size_epochs)["val_error"]) if epochs else ""
    test = "failed" if ended.get("status") == "failed" else ""
    test = percent(ended["test_error"]) if "test_error" in ended else test
    return run, f"{len(epochs)} of {run.training.epochs}", validation, test


@app.command("models")
@dataclass(frozen=True)
class Models:
    """List the networks: what each is, which to take, and how many parameters each trains on each dataset.

    Example: scalesteer models
    """

    def run(self) -> None:
        from scalesteer.app.config import OWN_MODEL
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
            f"pictures take {OWN_MODEL}, the default, or pooled-resnet with a GPU; for drawings pooled-cnn.": any_size,
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


@app.command("suggest")
@dataclass(frozen=True)
class Suggest:
    """Measure how large the objects in your pictures are, and say which scale channels to train with.

    Prints a histogram of the sizes, the scale channels, kernel size and scales that follow from them, and why; then how
    long an epoch takes on this machine, measured on a few steps. The last line is the command that trains with them; it
    is left out where the sizes are not sure.

    Example: scalesteer suggest photos --boxes photos/boxes.csv
    """

    pictures: Positional[Annotated[Path, arg(metavar="FOLDER")]]  # The folder of pictures, or of folders with pictures.
    boxes: Annotated[Path | None, arg(metavar="FILE")] = None
    """Where the objects are: a CSV with path, x, y, width and height, or JSON like COCO's. By default what stands out
    from the colour of a picture's border."""
    whole: bool = False  # Each picture is one object, as a crop is.
    model: Annotated[str | None, arg(metavar="NAME")] = None
    """The network, one named pooled or steered. By default one that suits the pictures; without a GPU a small one."""
    value_range: ValueRange = None
    plot: Annotated[Path | None, arg(metavar="PNG")] = None  # Also draw the histogram; needs matplotlib.

    def run(self) -> None:
        if self.plot is not None and not self.plot.parent.is_dir():
            raise ValueError(f"`plot` must be in a folder that exists (got {str(self.plot)!r}).")
        from scalesteer import files
        from scalesteer.app import make_run, pick_device
        from scalesteer.app.estimate import describe
        from scalesteer.app.suggest import CLASSES, TRAINED, draw_histogram, suggest
        from scalesteer.models.network import Task

        if self.plot is not None:
            files.check_writable(self.plot.parent)
        found = suggest(self.pictures, self.boxes, self.value_range, self.model, self.whole)
        if found.sure:
            images, device = round(found.pictures * TRAINED), pick_device("auto")
            task = Task(1 if found.grey else 3, CLASSES, found.image_size)
            found = replace(found, time=describe(make_run(**found.settings), task, max(2, images), device))
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
    own_network: OwnNetwork = None
    device: Device = "auto"
    data_dir: Originals = None
    runs: RunsFolder = Path("runs")

    def run(self) -> None:
        from scalesteer import app as training
        from scalesteer.app import sweep
        from scalesteer.app.engines import make_runs
        from scalesteer.models.external import register_network

        if self.own_network is not None:
            register_network(self.own_network)
        settings = sweep.read_grid(self.file)
        todo = [run for setting in settings for run in setting.runs]
        print(*(printable(run.command) for run in todo), sep="\n", flush=True)
        if self.dry_run:
            return
        where = {name: getattr(self, name) for name in ("engine", "address", "gpus_per_run", "device", "data_dir")}
        made = make_runs(todo, self.runs, **where)
        print(f"\n{printable_lines(sweep.table(settings, made.results))}")
        ended = {run: result for run, result in made.results.items() if result["status"] == "finished"}
        if ended:
            best = min(ended, key=lambda run: ended[run]["val_error"])
            print(f"\nlowest validation error of one run: {printable(str(self.runs / best.name))}")
        if made.problems:
            raise training.RunError(f"not finished: {'; '.join(made.problems)}")


app.known |= networks.known


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: 0 if all went well, 2 with one line on what is wrong, 130 or 143 when stopped."""
    return app.main(argv)
