"""A folder of small pictures of twelve classes: does the default network learn them in twelve epochs?

    python -m examples.badges badges --output badges.json

This writes the pictures and runs `scalesteer train badges --epochs 12` on one thread, one or two minutes. They stand in
for photographs of objects at one distance, 36 to 50 pixels wide: badges with one of twelve icons of Font Awesome, in
any two colours, turned by up to 15 degrees, on textures, in weak or strong light, out of focus and with noise. 1,900
are for training, 400 for validation and 600 for testing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from examples.equal_time import run
from examples.own_images import texture
from scalesteer.datasets.icons import draw_icon
from scalesteer.datasets.packages import ICONS, fetch_package
from scalesteer.files import write_atomically

SIDES = (36, 50)
COUNTS = {"train": 1900, "val": 400, "test": 600}
CHOSEN = ICONS[::3]  # twelve faces


def badge(mask: NDArray[np.uint8], rng: np.random.Generator) -> Image.Image:
    """One picture of an icon, `(H, W)` white on black."""
    side = int(rng.integers(SIDES[0], SIDES[1] + 1))
    shape = Image.fromarray(mask).rotate(rng.uniform(-15, 15), Image.Resampling.BICUBIC)
    shape = shape.resize((side, side), Image.Resampling.BOX)
    ground = np.asarray(texture(rng).resize((side, side)), np.float64)
    plate, ink = rng.uniform(0, 255, (2, 3))
    if np.abs(plate - ink).max() < 90:
        ink = (plate + 128) % 256
    across = (np.arange(side) - (side - 1) / 2) / (0.48 * side)
    disc = (across[:, None] ** 2 + across**2 < 1)[..., None]
    picture = np.where(disc, plate, ground)
    picture += (np.asarray(shape, np.float64) / 255)[..., None] * (ink - picture)
    lit = picture * rng.uniform(0.4, 1.1) * (1 + rng.uniform(-0.3, 0.3) * across[:, None, None])
    blurred = Image.fromarray(lit.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(rng.uniform(0, 0.9)))
    noisy = np.asarray(blurred, np.float64) + rng.normal(0, rng.uniform(0, 12), (side, side, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def write_badges(folder: Path, counts: dict[str, int], seed: int = 0) -> int:
    """Write the pictures of each part into folders by class, and return how many they are."""
    rng = np.random.default_rng(seed)
    texts = dict(zip(ICONS, fetch_package("fontawesome").images, strict=True))
    masks = {name: draw_icon(texts[name].tobytes().rstrip(b"\0").decode(), 4 * SIDES[1]) for name in CHOSEN}
    for part, count in counts.items():
        for number in range(count):
            name = CHOSEN[number % len(CHOSEN)]
            path = folder / part / name / f"{number:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            badge(masks[name], rng).save(path)
    return sum(counts.values())


def learn(folder: Path, runs: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Train on the pictures by the command, and say how well and in how much CPU time from start to end."""
    _, seconds = run("-m", "scalesteer", "train", str(folder), "--runs", str(runs), *flags)
    (path,) = runs.glob("*/result.json")
    result = json.loads(path.read_text())
    error, about = 100 * result["test_error"], result["environment"]
    found = {"flags": " ".join(flags), "error": error, "cpu_seconds": seconds, "weights": result["parameters"]}
    return found | {"epochs": len(result["history"]), "torch": about["torch"], "commit": about["commit"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--output", type=Path, help="train, and add what came out to this file")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures")
    parser.add_argument("--readout", help="another way to pool over space than the network's own")
    options = parser.parse_args()
    print(f"{write_badges(options.folder, COUNTS, options.seed):,} pictures: {options.folder}")
    if options.output is not None:
        flags = ["--epochs", "12"] + (["--readout", options.readout] if options.readout else [])
        with tempfile.TemporaryDirectory() as runs:
            row = learn(options.folder, Path(runs), flags) | {"seed": options.seed}
        print(row)
        rows = json.loads(options.output.read_text()) if options.output.exists() else []
        write_atomically(options.output, (json.dumps([*rows, row], indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
