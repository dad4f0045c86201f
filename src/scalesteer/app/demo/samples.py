"""Pictures to click on: ten that come with the package, or pictures for testing of a run of one's own."""

import csv
import io
import logging
import os
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalesteer import files
from scalesteer.app.networks import CheckpointError, read_run
from scalesteer.app.pictures import PictureError, read_picture
from scalesteer.app.report import data_uri

FOLDER = Path(__file__).with_name("samples")
SIDE = 28  # pixels of a shipped picture; ten are beside each other, one of each class in their order
MOST = 12
MOST_TRIED = 100  # files of a run that may be gone
MOST_SIDE = 512  # pixels of a run's picture; a larger one is shrunk
SPLIT_FILE = "split.csv"
log = logging.getLogger("scalesteer")


def pixels(name: str) -> NDArray[np.uint8]:
    """The pictures that come with a network of this name, `(10, 28, 28)`; the k-th is of class k."""
    sheet = read_picture(FOLDER / f"{name}.png", 1)
    return np.stack(np.split(sheet, sheet.shape[1] // SIDE, axis=1))


def shipped(name: str) -> list[dict[str, Any]]:
    """The same, JSON-ready; none if none come with it."""
    if not (FOLDER / f"{name}.png").is_file():
        return []
    return [{"picture": data_uri(one), "label": label} for label, one in enumerate(pixels(name))]


def of_run(directory: Path, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Pictures for testing of a run, if its list and its pictures are still there; of all classes, JSON-ready."""
    found = list[dict[str, Any]]()
    for path, label in islice(_tests(directory), MOST_TRIED):
        if label in classes and len(found) < MOST:
            try:
                picture = read_picture(path, 3)
            except PictureError:  # it was moved, or changed
                continue
            found.append({"picture": data_uri(_shrink(picture)), "label": classes.index(label)})
    return found


def _shrink(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    image = files.require("PIL.Image").fromarray(picture.transpose(1, 2, 0))
    image.thumbnail((MOST_SIDE, MOST_SIDE))
    return np.asarray(image).transpose(2, 0, 1)


def _tests(directory: Path) -> Iterator[tuple[str, str]]:
    """Paths and classes of a run's pictures for testing, of one class after the other."""
    try:
        run = read_run(directory) if (directory / SPLIT_FILE).is_file() else None
        source = None if run is None else run.data.describe().get("images")
        if source is None:
            return
        root = os.path.expanduser(source)
        root = root if os.path.isdir(root) else os.path.dirname(root)
        text = files.read_small(directory / SPLIT_FILE).decode(errors="surrogateescape")
        by_class = dict[str, list[str]]()
        for row in csv.DictReader(io.StringIO(text)):
            if row["part"] == "test":
                by_class.setdefault(row["label"], []).append(os.path.join(root, os.path.expanduser(row["path"])))
    except (OSError, KeyError, ValueError, csv.Error, CheckpointError) as error:
        log.debug("no pictures of the run are shown: %s", error)
        return
    for paths in zip_longest(*by_class.values()):
        yield from ((path, label) for path, label in zip(paths, by_class, strict=True) if path is not None)
