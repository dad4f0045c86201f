"""A folder of pictures in which things appear larger and smaller than in training, to train networks on.

    python examples/own_images.py photos
    scalesteer train photos/list.csv --epochs 30 --flip --channels 1
    scalesteer train photos/list.csv --epochs 30 --flip --channels 0.5 0.71 1 1.41 2 --one-size-epochs 20

The first command writes photographs of CIFAR-10, pasted at random places on textured backgrounds: 5,000 pictures of
64 x 64 for training and 1,000 for validation, in which the photographs are 27 to 38 pixels wide, and 5,000 for testing:
1,000 others, each 16, 23, 32, 45 and 64 pixels wide. They lie in the folders train, val and test of photos;
photos/list.csv also says how large each is, so that training on it gives the error by size. The second command trains a
plain network, the third the same network at five sizes of the image, of which the first 20 epochs see one. To look at
the errors again, or to gather those of all runs:

    scalesteer evaluate runs/NAME
    python examples/own_images.py photos --gather runs --output own-images.json
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from scalesteer.datasets.packages import CIFAR_CLASSES, fetch_package
from scalesteer.files import write_atomically

CANVAS = 64
TRAIN_SIZES = (2**-0.25, 2**0.25)  # of a photograph, relative to its own 32 pixels
TEST_SIZES = (0.5, 2**-0.5, 1.0, 2**0.5, 2.0)
COUNTS = (5000, 1000, 1000)  # photographs for training, validation and testing, of which each test size shows all
GRAINS = (4, 8, 16, 32)  # cells of the noise that makes a background, along a side
Pixels = NDArray[np.uint8]


class Exhibit(NamedTuple):
    """A picture to make: which photograph, for which part, how large."""

    photo: int
    part: str
    size: float


def texture(rng: np.random.Generator) -> Image.Image:
    """A background: spots of two colours that flow into each other, coarse and fine in random shares."""
    layers = [Image.fromarray(rng.integers(0, 256, (grain, grain), np.uint8)) for grain in GRAINS]
    smooth = [np.asarray(layer.resize((CANVAS, CANVAS), Image.Resampling.BICUBIC)) for layer in layers]
    mixed = np.tensordot(rng.dirichlet(np.ones(len(GRAINS))), smooth, 1)  # (CANVAS, CANVAS)
    share = (mixed - mixed.min()) / np.ptp(mixed)
    one, other = rng.integers(40, 216, (2, 3))
    return Image.fromarray((one + share[..., None] * (other - one)).astype(np.uint8))


def paste(photo: Pixels, size: float, rng: np.random.Generator) -> Image.Image:
    """A photograph, `(3, H, W)`, resized without aliasing, at a random place on a background."""
    side = round(photo.shape[-1] * size)
    picture = texture(rng)
    left, top = rng.integers(0, CANVAS - side + 1, 2).tolist()
    small = Image.fromarray(photo.transpose(1, 2, 0)).resize((side, side), Image.Resampling.BICUBIC)
    picture.paste(small, (left, top))
    return picture


def plan(photos: int, counts: tuple[int, int, int], rng: np.random.Generator) -> Iterator[Exhibit]:
    """Which photographs are shown where: all different, and those for testing at every test size."""
    train, val, test = np.split(rng.permutation(photos)[: sum(counts)], np.cumsum(counts)[:2])
    low, high = map(math.log, TRAIN_SIZES)
    for part, chosen in (("train", train), ("val", val)):
        for photo in chosen.tolist():
            yield Exhibit(photo, part, math.exp(rng.uniform(low, high)))
    for photo in test.tolist():
        yield from (Exhibit(photo, "test", size) for size in TEST_SIZES)


def write_pictures(
    photos: Pixels, labels: Pixels, folder: Path, *, counts: tuple[int, int, int] = COUNTS, seed: int = 0
) -> int:
    """Write the pictures and the list of them into a folder, and return how many they are.

    Args:
        photos: `(N, 3, 32, 32)`.
        labels: `(N,)`, the positions of their classes in `CIFAR_CLASSES`.
        folder: Made if it is not there.
        counts: How many photographs are for training, validation and testing.
        seed: Of everything random.
    """
    rng, rows = np.random.default_rng(seed), []
    for photo, part, size in plan(len(photos), counts, rng):
        name = CIFAR_CLASSES[labels[photo]]
        path = folder / part / name / f"{photo:05d}-{size:.2f}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        paste(photos[photo], size, rng).save(path, quality=92)
        rows.append((path.relative_to(folder).as_posix(), name, part, f"{size:.3g}"))
    with open(folder / "list.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("path", "label", "part", "size"))
        writer.writerows(rows)
    return len(rows)


def gather(runs: Path) -> list[dict[str, Any]]:
    """What finished runs on a list of pictures found: their settings, errors by size in %, and what they rest on."""
    found = []
    for path in sorted(runs.glob("*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "test_error_by_scale" not in result:  # it failed, or its pictures have no sizes
            continue
        settings = ("model", "channels", "one_size_epochs", "resize", "seed", "epochs")
        made = result["run"]["network"] | result["run"]["training"]
        config = {name: made[name] for name in settings}
        errors = {f"{row['from']:.3g}": 100 * row["error"] for row in result["test_error_by_scale"]}
        about = {name: result["environment"].get(name) for name in ("commit", "device", "torch", "command")}
        found.append({**config, "errors": errors, **about, "data": result["environment"]["data"]["digest"]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--data-dir", help="a directory with the files of CIFAR-10 (binary version)")
    parser.add_argument(
        "--gather", type=Path, metavar="RUNS", help="write no pictures: gather the errors of these runs"
    )
    parser.add_argument("--output", type=Path, default=Path("own-images.json"), help="where they go")
    options = parser.parse_args()
    if options.gather is not None:
        write_atomically(options.output, (json.dumps(gather(options.gather), indent=1) + "\n").encode())
        print(options.output)
        return
    pool = fetch_package("cifar10", options.data_dir)
    print(f"{write_pictures(pool.images, pool.labels, options.folder):,} pictures: {options.folder}")


if __name__ == "__main__":
    main()
