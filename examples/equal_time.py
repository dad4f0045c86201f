"""A folder of photographs: `scalesteer train photos` against random resizing that trains for as long.

    python examples/equal_time.py --output equal-time.json

For each seed a folder is made as by examples/own_images.py, of other photographs, of four classes of CIFAR-10.
`scalesteer train` learns from it, without a flag. Then examples/random_resizing.py trains for as much CPU time as that
command took but for the start, the reading and the test, which `scalesteer evaluate` takes again: for its steps, its
validation and the fit of its join. Both have the same network, on one thread. Twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.own_images import write_pictures
from scalesteer.app.device import commit
from scalesteer.datasets.packages import CIFAR_CLASSES, fetch_package
from scalesteer.files import write_atomically

CLASSES = ("airplane", "automobile", "frog", "horse")
RANGES = ((0.5, 2.0), (0.71, 1.41))  # of random resizing alone


def run(*command: str) -> tuple[str, float]:
    """What a Python program prints, and the CPU time that it took from start to end."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *command], env=one_thread, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(
    folder: Path, runs: Path, seed: int, flags: list[str], ranges: tuple[tuple[float, float], ...]
) -> list[dict[str, Any]]:
    """Errors of both sides in % at each size, and their time."""
    pictures = str(folder / "list.csv")
    _, seconds = run("-m", "scalesteer", "train", pictures, "--runs", str(runs), *flags)
    (path,) = runs.glob("*/result.json")
    result = json.loads(path.read_text())
    errors = {f"{row['from']:.3g}": 100 * row["error"] for row in result["test_error_by_scale"]}
    seconds -= run("-m", "scalesteer", "evaluate", str(path.parent))[1]
    about = {"epochs": len(result["history"]), "cpu_seconds": seconds, "join": result["join"]["about"]}
    rows = [{"side": "scalesteer train", "errors": errors, **about, "size_correlation": result["size_correlation"]}]
    script = str(Path(__file__).with_name("random_resizing.py"))
    for low, high in ranges:
        printed, _ = run(script, pictures, str(seconds), str(low), str(high), str(seed))
        rows.append({"side": f"random resizing by {low:g} to {high:g}", **json.loads(printed)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("equal-time.json"), help="where the numbers go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--counts", type=int, nargs=3, default=[700, 150, 250], help="photographs in the three parts")
    parser.add_argument("--flags", nargs="*", default=[], help="of scalesteer train, without the dashes: epochs=3")
    parser.add_argument("--ranges", type=int, default=1, help="how many of the ranges the rival tries")
    parser.add_argument("--keep", type=Path, help="keep the folders and runs here")
    options = parser.parse_args()
    found = json.loads(options.output.read_text()) if options.output.exists() else []
    pool = fetch_package("cifar10")
    chosen = np.isin(pool.labels, [CIFAR_CLASSES.index(name) for name in CLASSES])
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as place:
            root = (options.keep or Path(place)) / f"seed-{seed}"
            write_pictures(
                pool.images[chosen], pool.labels[chosen], root / "photos", counts=tuple(options.counts), seed=seed
            )
            flags = [word for flag in options.flags for word in f"--{flag}".split("=")]
            for row in compare(root / "photos", root / "runs", seed, flags, RANGES[: options.ranges]):
                row |= {"seed": seed, "counts": options.counts, "torch": torch.__version__, "commit": commit()}
                found.append(row)
                shown = " ".join(f"{error:5.1f}" for error in row["errors"].values())
                print(f"{row['side']:<32} {shown}   {row['epochs']} epochs, {row['cpu_seconds']:.0f} s", flush=True)
        write_atomically(options.output, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
