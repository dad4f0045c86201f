"""The commands for a trained network: evaluate, predict, export, demo. Each imports torch when it runs, not before."""

import contextlib
import csv
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from scalesteer._text import printable
from scalesteer.app.commands import Commands, Positional, arg, percent
from scalesteer.app.flags import (
    MODEL,
    Channels,
    Checkpoint,
    Device,
    Join,
    Originals,
    OwnNetwork,
    Part,
    PixelSize,
    ValueRange,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from scalesteer.app import Run
    from scalesteer.datasets import ImageSet
    from scalesteer.models.network import Task

log = logging.getLogger("scalesteer")
networks = Commands()
SHARES = {"precision": "precision", "recall": "recall", "F1": "f1"}  # as they are shown


def _register(network: str | None) -> None:
    """Import the network that the user names."""
    from scalesteer.models.external import register_network

    if network is not None:
        register_network(network)


def _load(checkpoint: Path, network: str | None) -> "nn.Module":
    """A trained network, of which the user may say where its code is."""
    from scalesteer.app import load_model

    _register(network)
    return load_model(checkpoint)


@networks.command("evaluate")
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
    channels: Channels = None
    join: Join = None
    json: bool = False  # Print all numbers as one line of JSON, also precision, recall and F1 of each class.
    value_range: ValueRange = None
    own_network: OwnNetwork = None
    device: Device = "auto"
    data_dir: Originals = None

    def run(self) -> None:
        from scalesteer import app as training
        from scalesteer.app.folder import FolderSpec
        from scalesteer.models import network_of

        model, run = _load(self.checkpoint, self.own_network), training.read_run(self.checkpoint)
        device, part, task = training.pick_device(self.device), self.part or "test", network_of(model).task
        model = training.look_at(model, self.channels, self.join)
        if self.images is None:
            if self.value_range is not None:
                raise ValueError(
                    f"`value_range` (got {self.value_range}) needs `images`: the run's own have its range."
                )
            if run is None:
                raise ValueError(
                    f"{self.checkpoint} does not say which pictures it was trained on: "
                    "give the run's own directory, or --images."
                )
            data = run.data
            if isinstance(data, FolderSpec):  # the list may have another median by now
                data = replace(data, pixel_size=task.pixel_size)
            images: Any = data.open(self.data_dir, task.classes).load(part)
        else:
            images = self._other_pictures(task, run)
        precision = "float32" if run is None else run.training.precision
        images = (one.to(device) for one in images)
        images = images if self.elastic is None else (one.distorted(self.elastic) for one in images)
        found = training.evaluate(model.to(device), images, precision)
        if self.json:
            print(json.dumps(found))
            return
        rows = found["by_scale"]
        whose = f"{part} " if self.part or self.images is None else ""  # of all pictures there is no part to name
        print(f"{whose}error {percent(found['error'])} ({found['images']:,} images)")
        named = {printable(row["class"]): row for row in found["by_class"] if isinstance(row["class"], str)}
        for name, row in named.items():
            print(f"  {name:<{max(map(len, task.classes))}}  {percent(row['error']):>8}  ({row['images']:,})")
        if named:
            shares = ", ".join(f"{name} {percent(found[key])}" for name, key in SHARES.items())
            print(f"mean over classes: {shares}")
        for row in rows if len(rows) > 1 or not named else []:  # of own pictures the sizes may be unknown
            size = f"size {row['from']:g}" if row["from"] == row["to"] else f"scale {row['from']} to {row['to']}"
            print(f"  {size}  {percent(row['error']):>8}  ({row['images']:,})")
        trained_at = getattr(run.data, "train_sizes", ()) if run is not None and self.images is None else ()
        for name, error in training.by_training_size(rows, trained_at).items():
            print(f"mean {name.removeprefix('test_error_')} the training sizes {percent(error)}")
        print(f"calibration error {percent(found['ece'])}")
        if "size_correlation" in found:
            print(f"rank correlation of the size that answered with the true size {found['size_correlation']:.3f}")

    def _other_pictures(self, task: "Task", run: "Run | None") -> "list[ImageSet]":
        """What --images names, read as the network's task says."""
        from scalesteer.app.folder import FolderSpec, load_folder

        if task.ground == "black" or not task.classes or task.image_size is None:
            raise ValueError(
                f"`images` (got {str(self.images)!r}) needs a model of your own pictures: {self.checkpoint} does not "
                "know their size and the names of their classes. `scalesteer predict` takes any model."
            )
        trained = None if run is None else run.data.describe().get("images")
        if (
            self.part is None
            and trained is not None
            and os.path.realpath(str(self.images)) == os.path.realpath(trained)
        ):
            log.warning("%s: the model was trained on some of these pictures; --part test has others", self.images)
        levels = (self.value_range, None) if self.value_range else (task.value_range, task.percentiles)
        grey, more = task.in_chans == 1, (task.planes, task.pixel_size)
        spec = FolderSpec(str(self.images), task.image_size, task.fit, grey, *levels, *more)
        return [load_folder(spec, self.part, classes=task.classes)]


@networks.command("predict")
@dataclass(frozen=True)
class Predict:
    """Classify your own pictures with a trained model.

    Give pictures (PNG, JPEG, TIFF, WebP, GIF, BMP or PPM), or folders with pictures. A model that was trained on
    your own images fits them as in training; where that kept their scale, larger pictures are looked at as they are, in
    tiles if they are large, and a line says what was resized. For a model of the paper's datasets a picture is made
    grey, inverted if it is dark on light, cut to what differs from the background, resized and centred; one that has
    the model's own size already (28 x 28 for MNIST-Scale) keeps its layout. For a model of rescaled-cifar10 it is
    resized and cut to the model's size. A model with scale channels also says how large the object is: 2 is twice as
    large as usual in training, and in pixels of the picture if training could measure its objects. A file that cannot
    be used is named, the others are classified, and the exit code is 2.

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
    masks: Annotated[Path | None, arg(metavar="DIR")] = None
    """With a network of your own that makes maps, whose class 0 is the background: write an image of labels for each
    picture here, with one number for each object, and objects.csv with their classes, places and sizes."""
    fit: Literal["pad", "crop", "resize", "keep"] | None = None
    """How pictures are brought to the size of the training images: as in `train`, or keep, which only pads what is
    smaller. By default as in training, where larger pictures also keep their size if training did not resize any."""
    channels: Channels = None
    join: Join = None
    value_range: ValueRange = None
    pixel_size: PixelSize = None
    own_network: OwnNetwork = None
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
        from scalesteer.models import network_of

        if self.save_maps is not None:
            files.check_writable(self.save_maps)
        model = training.look_at(_load(self.checkpoint, self.own_network), self.channels, self.join)
        model = model.to(training.pick_device(self.device))
        network = network_of(model)
        if self.value_range is not None:
            network.task = network.task._replace(value_range=self.value_range, percentiles=None)
        if self.pixel_size is not None and network.task.pixel_size is None:
            raise ValueError(f"`pixel_size` (got {self.pixel_size}) is for a model that was trained with pixel sizes.")
        if maps.makes_maps(model) != (self.masks is not None):
            raise ValueError(f"`masks` (got {self.masks}) is for a network that makes maps, and such a one needs it.")
        if self.masks is not None:
            self._write_masks(model, self.masks)
            return
        classes = network.task.classes
        dense = None if self.save_maps is None else maps.without_readout(model)
        names, failed, shown = predicting.find_files(self.pictures), 0, list[predicting.Prediction]()
        read = predicting.reader(model, self.fit, self.pixel_size)
        found = predicting.predict_files(model, names, self.fit, self.pixel_size)
        with contextlib.ExitStack() as stack:
            table = None if self.csv is None else stack.enter_context(_table(self.csv, predicting.columns(model)))
            for path, said in files.show_progress(found, len(names)):
                try:
                    if isinstance(said, PictureError):
                        raise said
                    if self.save_maps is not None and dense is not None:
                        pixels = read(path).pixels
                        drawn = maps.draw_maps(pixels, maps.answer_maps(dense, pixels), classes)
                        sheets.save(drawn, self.save_maps / f"{names[path]}.png")
                except PictureError as error:
                    log.error("%s", printable(str(error)))
                    failed += 1
                    continue
                shown.append(said)
                record = predicting.describe(path, said, classes)
                if table is not None:
                    table(record)
                if self.json or table is None:
                    line = json.dumps(record) if self.json else predicting.to_sentence(record)
                    files.require("tqdm").tqdm.write(line, file=sys.stdout)
        if self.csv is not None and not self.json:
            print(f"{len(names) - failed:,} pictures: {printable(str(self.csv))}")
        for remark in predicting.remarks(model, shown, self.fit):
            log.warning("%s", remark)
        if failed:
            raise ValueError(f"{failed} of {len(names)} images could not be used.")

    def _write_masks(self, model: "nn.Module", folder: Path) -> None:
        from scalesteer import files
        from scalesteer.app import masks
        from scalesteer.app import predict as predicting
        from scalesteer.app.object_sizes import sample_every
        from scalesteer.app.pictures import PictureError
        from scalesteer.models import network_of

        files.check_writable(folder)
        names, failed, count = predicting.find_files(self.pictures), 0, 0
        sizes = masks.Sizes(model, sample_every(names))
        with _table(folder / "objects.csv", masks.COLUMNS) as write:
            found = masks.find_masks(model, names, own_pixel_size=self.pixel_size)
            for path, image, regions in files.show_progress(found, len(names)):
                if isinstance(regions, PictureError):
                    log.error("%s", printable(str(regions)))
                    failed += 1
                    continue
                sizes.add(image, regions)
                masks.save_labels(image, folder / f"{names[path]}.png")
                for row in masks.rows(path, regions, network_of(model).task.classes):
                    write(row)
                count += len(regions)
        print(f"{count:,} objects in {len(names) - failed:,} pictures: {printable(str(folder))}")
        for remark in sizes.remarks():
            log.warning("%s", remark)
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
        writer = csv.DictWriter(text, columns, extrasaction="ignore")
        writer.writeheader()
        yield writer.writerow
        text.detach()  # what it holds is written; the file stays open until it is safe on the disk


@networks.command("export")
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
    channels: Channels = None
    join: Join = None
    own_network: OwnNetwork = None
    half: bool = False  # Keep the weights of a folder in half precision: half the bytes, about three digits.
    data_dir: Originals = None

    def run(self) -> None:
        from scalesteer import app as training
        from scalesteer import save_pretrained
        from scalesteer.app import results
        from scalesteer.export import SUFFIXES, export
        from scalesteer.models import count_parameters

        trained, run = _load(self.checkpoint, self.own_network), training.read_run(self.checkpoint)
        model = training.look_at(trained, self.channels, self.join)
        name = self.checkpoint.resolve().name
        if self.to == "folder":
            saved = self.checkpoint / "result.json"
            told = results.read_card(saved) if saved.exists() else ""
            if told and model is not trained:
                told = f"The errors below are of the network as it was trained, before it got these sizes.\n\n{told}"
            folder = self.output or Path(f"{name}-model")
            own = run is None or "images" in run.data.describe()  # paths are nobody else's business
            save_pretrained(model, folder, card=told, half=self.half, run=None if own or run is None else run.to_dict())
            size = (folder / "model.safetensors").stat().st_size
            print(f"{printable(str(folder))}: {size / 1e6:.2f} MB, {count_parameters(model):,} parameters")
            return
        path = self.output or Path(f"{name}{SUFFIXES[self.to]}")
        done = export(model, path, to=self.to, examples=self._examples(run))
        free = "any size of image" if done.any_size else "images of " + " x ".join(map(str, done.shapes[0][2:]))
        print(f"{printable(str(path))}: {done.bytes / 1e6:.2f} MB, any batch, {free}")
        sizes = ", ".join(dict.fromkeys(" x ".join(map(str, shape[2:])) for shape in done.shapes))
        batches = " and ".join(str(n) for n in dict.fromkeys(shape[0] for shape in done.shapes))
        print(f"checked with batches of {batches} at {sizes}: answers differ by {done.difference:.1g} at most")
        for batch, spent in done.milliseconds.items():
            print(
                f"batch {batch}: {spent:.2f} ms for an image (the model in torch: {done.eager_milliseconds[batch]:.2f})"
            )

    def _examples(self, run: "Run | None") -> "Tensor | None":
        """Real images to check with, if those of the run are here."""
        from scalesteer import app as training
        from scalesteer import files

        if run is None or not (self.checkpoint / "result.json").is_file():
            return None
        try:
            return training.load(run, "val", self.data_dir).take(slice(0, 64))[0]
        except (files.DataError, OSError) as error:
            log.warning("checked with random images: those of the run are not here (%s)", error)
            return None


@networks.command("demo")
@dataclass(frozen=True)
class Demo:
    """Open a page on this machine: see a learned filter grow, draw or drop pictures, and change their size.

    The page shows what networks say when they look at an image once, and at several sizes with the same weights. Other
    programs can ask, too (docs/guide/demo.md). No other machine can reach the page, and pictures stay on this one.

    Example: scalesteer demo

    Example: scalesteer demo runs/NAME --open
    """

    checkpoint: Positional[Annotated[Path, arg(metavar="[MODEL]", help=MODEL)]] = Path("digits")
    channels: Channels = None
    join: Join = None
    port: int = 8000  # Where the page is: http://127.0.0.1:PORT. 0 takes any that is free.
    open: bool = False  # Also open the page in your web browser.
    own_network: OwnNetwork = None
    device: Device = "auto"

    def run(self) -> None:
        from scalesteer.app.demo import DemoModel, serve

        _register(self.own_network)
        serve(DemoModel(self.checkpoint, self.device, self.channels, self.join), self.port, self.open, leave=_leave)


def _leave(code: int) -> None:
    """End the process now, whatever its threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
