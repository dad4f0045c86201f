"""More sizes at test time: the network `digits`, which comes with the package, on digits up to four times as large.

    python examples/more_sizes.py
    python examples/more_sizes.py --train-rival FOLDER   # trains `digits-resized` as it was, in two minutes

It was trained on digits shrunk to 0.3 to 1 times their size. Here it looks at digits that it never saw, from a half to
four times their size: once, and at several sizes of the image, as the page of `scalesteer demo` does. Beside it a
rival, `digits-resized`: the same network, trained for as long with random resizing, each batch at a size of its own, so
that nothing of a larger digit is cut. Nothing is trained here. It takes a minute or two on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalesteer.app import environment, make_run, train
from scalesteer.app.demo import DemoModel
from scalesteer.app.demo.asking import at_size
from scalesteer.datasets import load_split
from scalesteer.files import write_atomically
from scalesteer.resize import resize

SIZES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
COUNTS = (10_000, 1_000, 10_000)  # of the network's split: its test images were neither learned nor chosen on
RIVAL_SIZES = (0.6, 5.0)  # at which the rival is trained: better on validation digits than 0.5 to 4 with 8 epochs
RIVAL_EPOCHS = 5  # for `digits`, 8: a batch has 5.8 times the pixels in the mean, and 3.5 times in its three channels


def train_rival(folder: Path, epochs: int = RIVAL_EPOCHS) -> dict[str, Any]:
    """Train the network of `digits` without channels; each batch is resized by another random factor."""
    draw = torch.Generator().manual_seed(0)
    low, high = map(math.log, RIVAL_SIZES)

    def at_random_size(x: Tensor) -> Tensor:
        factor = math.exp(low + (high - low) * float(torch.rand((), generator=draw)))
        return resize(x, (round(x.shape[-2] * factor), round(x.shape[-1] * factor))).clamp(0, 1)

    same = {"dataset": "mnist-scale", "sizes": COUNTS, "batch_size": 64, "lr": 0.01}  # as for `digits`
    run = make_run(model="pooled-cnn", kernel_size=5, epochs=epochs, **same)
    return train(run, folder, augment=at_random_size)


@torch.no_grad()
def measure(count: int = 2000, sizes: tuple[float, ...] = SIZES) -> dict[str, Any]:
    """Errors at each size of the object, by the way in which the network looks at the image."""
    demo = DemoModel("digits")
    images = load_split("mnist-scale", 0, "test", scale_range=(1.0, 1.0), sizes=COUNTS)
    x, labels = images.take(slice(0, count))
    ways = demo.ways(*x.shape[-2:])
    wrong = {way.name: [0] * len(sizes) for way in ways}
    for i, size in enumerate(sizes):
        resized = torch.cat([at_size(one, size) for one in x])
        for batch, true in zip(resized.split(100), labels.split(100), strict=True):
            for way in ways:
                wrong[way.name][i] += int((way.model(batch).argmax(1) != true).sum())
    errors = {name: [count / len(labels) for count in counts] for name, counts in wrong.items()}
    return {"sizes": list(sizes), "images": len(labels), "errors": errors, "environment": environment(images)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the numbers here, as JSON")
    parser.add_argument("--train-rival", type=Path, metavar="FOLDER", help="train `digits-resized`, and stop")
    options = parser.parse_args()
    if options.train_rival is not None:
        print(f"test error {100 * train_rival(options.train_rival)['test_error']:.2f} %: {options.train_rival}")
        return
    result = measure()
    print(f"error in %, digits of size {'':>6}" + "".join(f"{size:>7g}" for size in result["sizes"]))
    for name, errors in result["errors"].items():
        print(f"{name:<33}" + "".join(f"{100 * error:>7.1f}" for error in errors))
    if options.output is not None:
        write_atomically(options.output, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
