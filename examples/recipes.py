"""Which way of training suits one's own pictures? Ways that take the same time, on three kinds of data.

    python examples/recipes.py --output recipes.json

The kinds are photographs of CIFAR-10 on textures, icons in colour on textures, and grey digits. Training shows things
at 0.84 to 1.19 times a usual size; errors are counted at 0.5 to 2 times that size, on pictures that are neither for
training nor for validation. Numbers of epochs are chosen so that all ways take about the same time; the time that each
took is written down. A quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from examples.own_images import CANVAS, TEST_SIZES, TRAIN_SIZES, paste, texture
from scalesteer import ScaleChannels
from scalesteer.app import load_model, make_run, train
from scalesteer.app.device import commit
from scalesteer.app.memory import keep_memory
from scalesteer.datasets import ImageSet
from scalesteer.datasets.icons import draw_icon
from scalesteer.datasets.packages import fetch_package
from scalesteer.datasets.sources import fetch
from scalesteer.files import write_atomically
from scalesteer.fitting import choose, look
from scalesteer.joining import Join, join

Pixels = NDArray[np.uint8]
Draw = Callable[[int, float, np.random.Generator], Pixels]  # which thing, how large: a picture (C, H, W)
FIVE = (0.5, 0.71, 1.0, 1.41, 2.0)
SMALL = 48  # side of pictures of digits


class Kind(NamedTuple):
    """Pictures of one kind."""

    draw: Draw
    labels: NDArray[Any]  # of all things
    grey: bool = False
    side: int = 64


def icon(masks: Pixels, number: int, size: float, rng: np.random.Generator) -> Pixels:
    """An icon of 32 pixels times `size`, in a colour unlike the texture that it lies on."""
    side = round(32 * size)
    mask = np.asarray(Image.fromarray(masks[number]).resize((side, side), Image.Resampling.BOX)) / 255
    ground = np.asarray(texture(rng), np.float64)
    left, top = rng.integers(0, CANVAS - side + 1, 2).tolist()
    below = ground[top : top + side, left : left + side]
    colour = (below.mean((0, 1)) + 128 + rng.uniform(-50, 50, 3)) % 256
    below += mask[..., None] * (colour - below)
    return ground.round().astype(np.uint8).transpose(2, 0, 1)


def digit(images: Pixels, number: int, size: float, rng: np.random.Generator) -> Pixels:
    """A digit of MNIST on black; its image of 28 pixels becomes 24 times `size`."""
    side = round(24 * size)
    picture = Image.new("L", (SMALL, SMALL))
    left, top = rng.integers(0, SMALL - side + 1, 2).tolist()
    picture.paste(Image.fromarray(images[number]).resize((side, side), Image.Resampling.BICUBIC), (left, top))
    return np.asarray(picture)


def draw_icons(side: int = 256) -> Pixels:
    """Twelve icons of Font Awesome, `(12, side, side)`, white on black."""
    texts = fetch_package("fontawesome").images[::3]
    return np.stack([draw_icon(text.tobytes().rstrip(b"\0").decode(), side) for text in texts])


def kinds(digits: Path | None, icons: int) -> Iterator[tuple[str, Kind]]:
    """The three."""
    photos = fetch_package("cifar10")
    yield (
        "photographs",
        Kind(lambda n, size, rng: np.asarray(paste(photos.images[n], size, rng)).transpose(2, 0, 1), photos.labels),
    )
    masks = draw_icons()
    shown = np.arange(icons) % len(masks)
    yield "icons", Kind(lambda n, size, rng: icon(masks, shown[n], size, rng), shown)
    mnist = fetch("mnist", digits)
    yield "digits", Kind(lambda n, size, rng: digit(mnist.images, n, size, rng), mnist.labels, True, SMALL)


def draw_parts(kind: Kind, counts: tuple[int, int, int], seed: int) -> dict[str, ImageSet]:
    """Pictures for training, for validation and to count errors on; of the last, each thing at every size."""
    rng = np.random.default_rng(seed)
    chosen = np.split(rng.permutation(len(kind.labels))[: sum(counts)], np.cumsum(counts)[:2])
    low, high = map(math.log, TRAIN_SIZES)
    found = {}
    for part, things in zip(("train", "val", "trial"), chosen, strict=True):
        sizes = (
            [np.exp(rng.uniform(low, high, len(things)))]
            if part != "trial"
            else [[s] * len(things) for s in TEST_SIZES]
        )
        rows = [(int(thing), float(size)) for column in sizes for thing, size in zip(things, column, strict=True)]
        images = np.stack([kind.draw(thing, size, rng) for thing, size in rows])
        labels = torch.tensor([int(kind.labels[thing]) for thing, _ in rows])
        found[part] = ImageSet(torch.from_numpy(images), labels, torch.tensor([size for _, size in rows]))
    return found


class Items(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The same as a dataset of (image, label)."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images.images[index], int(self.images.labels[index])


def ways(epochs: int) -> dict[str, dict[str, Any]]:
    """Settings of `scalesteer train` beside the defaults. An epoch in five channels, of which 40 % are left out, takes
    as long as four to five epochs at one size."""
    late: dict[str, Any] = {"channels": FIVE}
    return {
        "one size, resized by 0.5 to 2": {},
        "one size, resized by 0.71 to 1.41": {"resize": (0.71, 1.41)},
        "one size, not resized": {"resize": (1.0, 1.0)},
        "channels in the last epoch": late | {"epochs": (e := round(0.84 * epochs)), "one_size_epochs": e - 1},
        "channels in the last sixth": late | {"epochs": round(0.62 * epochs)},
        "channels in every epoch, not resized": late
        | {"epochs": round(0.21 * epochs), "one_size_epochs": 0, "channels_lr": 0.0, "resize": (1.0, 1.0)},
    }


def by_size(logits: Tensor, trial: ImageSet) -> list[float]:
    """Errors in %, from the smallest size to the largest."""
    wrong = (logits.argmax(1) != trial.labels).double().view(len(TEST_SIZES), -1)
    return (100 * wrong.mean(1)).tolist()


def errors_by_join(model: torch.nn.Module, parts: Mapping[str, ImageSet]) -> dict[str, list[float]]:
    """Errors of a trained network alone, with its join, and with others, fitted on the pictures for validation."""
    if not isinstance(model, ScaleChannels):
        raise TypeError(f"`model` must be a ScaleChannels (got {type(model).__name__}).")
    trial, calibration = parts["trial"], model.calibration
    x, _ = trial.take(slice(None))
    z = torch.cat([model.ask_channels(some) for some in x.split(50)], 1)  # (5, N, classes)
    known = look(model, *parts["val"].take(slice(None)), TEST_SIZES)
    found = {"alone": by_size(z[model.scales.index(1.0)], trial)}
    found["as trained"] = by_size(join(z, model.join, None, calibration), trial)
    found["plain join"] = by_size(join(z, "logsumexp", None), trial)
    others: dict[str, tuple[slice, Join]] = {
        "softmax": (slice(None), "softmax"),
        "confident": (slice(None), "confident"),
        "mean": (slice(None), "mean"),
        "0.71 to 1.41": (slice(1, 4), "logsumexp"),
        "0.71 to 2": (slice(1, 5), "logsumexp"),
    }
    for name, (rows, kind) in others.items():
        fit = choose(known._replace(z=known.z[rows], scales=known.scales[rows]), kind)
        found[f"fitted, {name}"] = by_size(join(z[rows], kind, None, fit.calibration), trial)
    return found


def measure(kind: Kind, settings: dict[str, Any], parts: Mapping[str, ImageSet], folder: Path) -> dict[str, Any]:
    """Train in one way, and count errors on pictures of every size."""
    data = {"train": Items(parts["train"]), "val": Items(parts["val"]), "test": Items(parts["val"])}
    run = make_run(images="trial", image_size=(kind.side, kind.side), grey=kind.grey, tuning=True, **settings)
    clock = time.process_time()
    result = train(run, folder, device="cpu", data=data)
    seconds = time.process_time() - clock
    model = load_model(folder)
    errors = errors_by_join(model, parts)
    return {"cpu_seconds": seconds, "epochs": settings["epochs"], "join": result["join"]["about"], "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("recipes.json"), help="where the numbers go")
    parser.add_argument("--digits", type=Path, help="a directory with the files of MNIST")
    parser.add_argument("--counts", type=int, nargs=3, default=(800, 150, 250), help="things in the three parts")
    parser.add_argument("--epochs", type=int, default=24, help="of the ways that train at one size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", help="by default all three")
    parser.add_argument("--ways", nargs="*", help="by default all")
    options = parser.parse_args()
    keep_memory()
    found = json.loads(options.output.read_text()) if options.output.exists() else []
    for name, kind in kinds(options.digits, sum(options.counts)):
        if options.kinds and name not in options.kinds:
            continue
        parts = draw_parts(kind, tuple(options.counts), options.seed)
        for way, settings in ways(options.epochs).items():
            row = {"kind": name, "way": way, "seed": options.seed}
            if (options.ways and way not in options.ways) or any(row.items() <= done.items() for done in found):
                continue
            with tempfile.TemporaryDirectory() as folder:
                settings = {"epochs": options.epochs, "seed": options.seed} | settings
                row |= measure(kind, settings, parts, Path(folder))
            found.append(row | {"counts": options.counts, "torch": torch.__version__, "commit": commit()})
            print(name, "|", way, f"{row['cpu_seconds']:.0f} s, {row['join']}")
            for name_of_join, errors in row["errors"].items():
                print(f"  {name_of_join:<24}", *(f"{error:5.1f}" for error in errors), flush=True)
            write_atomically(options.output, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
