"""A fitted join, and no more scale channels than needed: errors, sizes and costs on four kinds of pictures.

    python examples/fewer_channels.py --output fewer-channels.json

Four networks look at pictures at five sizes, 0.5 to 2: `digits` and `garments`, which come with the package, on MNIST
and Fashion-MNIST; a small network for twelve icons in colour, and one for digits on textured grounds, which are trained
here, at one size. All pictures are shown at half to twice their size. The join is fitted, and the value of `sure` is
chosen, on pictures for validation. Errors are those of pictures for testing. Some minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import ScaleChannels, from_pretrained
from scalesteer.app.device import commit
from scalesteer.app.evaluation import rank_correlation
from scalesteer.datasets import ImageSet, load_split
from scalesteer.datasets.icons import draw_icon
from scalesteer.datasets.packages import fetch_package
from scalesteer.files import write_atomically
from scalesteer.fitting import Looks, calibration_error, choose, look, weigh_sure
from scalesteer.joining import Calibration, find_size, join
from scalesteer.resize import resize

SIZES = CHANNELS = (0.5, 2**-0.5, 1.0, 2**0.5, 2.0)
JOIN = "logsumexp"
SURE = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99, 0.995, 0.999, 1.0)
LOOKED_AT = 500  # pictures for testing, on which a coarser list of values was tried
POINTS = 0.003  # of error that fewer channels may cost
COUNTS = (10_000, 1_000, 10_000)  # of the splits that `digits` and `garments` learned from
CANVAS = 48
Pictures = tuple[Tensor, Tensor]  # (N, C, H, W) from 0 to 1, (N,)


class Trial(NamedTuple):
    """A network with channels, and pictures that it was not trained on."""

    model: ScaleChannels
    val: Pictures
    test: Pictures


def shipped(name: str, dataset: str, count: int, data_dir: Path | None) -> Trial:
    """A network of the package, on originals of its dataset's split, which are as large as the largest it learned."""
    parts = {}
    for part in ("val", "test"):
        options: Any = {"scale_range": (1.0, 1.0), "sizes": COUNTS, "data_dir": data_dir}
        images = load_split(dataset, 0, part, **options)
        first = LOOKED_AT if part == "test" else 0
        parts[part] = images.take(slice(first, first + count))
    model = from_pretrained(name)
    return Trial(ScaleChannels(network_alone(model), CHANNELS), **parts)


def network_alone(model: nn.Module) -> nn.Module:
    return model.net if isinstance(model, ScaleChannels) else model


def icons(count: int, train: int, draw: torch.Generator) -> Iterator[Pictures]:
    """Twelve icons of 28 pixels in any colour on grounds of another: to train with, to validate and to test."""
    texts = [text.tobytes().rstrip(b"\0").decode() for text in fetch_package("fontawesome").images[::3]]
    shapes = torch.from_numpy(np.stack([draw_icon(text, 28) for text in texts]))[:, None] / 255  # (12, 1, 28, 28)
    for number in (train, count, count):
        labels = torch.arange(number) % len(shapes)
        ground = torch.rand(number, 3, 1, 1, generator=draw).expand(-1, -1, CANVAS, CANVAS)
        yield paste(shapes[labels], ground, draw), labels


def textured(count: int, train: int, draw: torch.Generator, digits: Callable[[str], ImageSet]) -> Iterator[Pictures]:
    """Digits of 28 pixels in any colour on smooth noise."""
    for part, number in (("train", train), ("val", count), ("test", count)):
        images = digits(part)
        x, labels = images.take(slice(0, min(number, len(images))))
        layers = [torch.rand(len(x), 3, cells, cells, generator=draw) for cells in (3, 6, 12)]
        ground = torch.stack([resize(layer, (CANVAS, CANVAS)) for layer in layers]).mean(0).clamp(0, 1)
        yield paste(x, ground, draw), labels


def paste(masks: Tensor, grounds: Tensor, draw: torch.Generator) -> Tensor:
    """Things in colours that differ from what is around them, near the middle of each picture."""
    side, room = masks.shape[-1], 4
    colours = torch.rand(len(masks), 3, 1, 1, generator=draw)
    means = grounds.mean((2, 3), keepdim=True)
    colours = torch.where((colours - means).abs().amax(1, keepdim=True) < 0.35, (means + 0.5) % 1, colours)
    placed = torch.zeros(len(masks), 1, CANVAS, CANVAS)
    moves = torch.randint(-room, room + 1, (len(masks), 2), generator=draw)
    for mask, (down, right), target in zip(masks, moves.tolist(), placed, strict=True):
        top, left = (CANVAS - side) // 2 + down, (CANVAS - side) // 2 + right
        target[:, top : top + side, left : left + side] = mask
    return placed * colours + (1 - placed) * grounds


def trained(parts: Iterator[Pictures], classes: int, epochs: int, batch: int = 64) -> Trial:
    """Five convolutions, trained at one size, in channels."""
    widths, layers = (3, 24, 32, 48, 64, 64), list[nn.Module]()
    for i, width in enumerate(widths[1:]):
        layers += [nn.Conv2d(widths[i], width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (i < 3)
    net = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
    (x, labels), val, test = parts
    steps = epochs * (len(x) // batch)
    optimizer = torch.optim.AdamW(net.parameters(), 0.005)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, steps)
    for step in range(steps):
        if step % (len(x) // batch) == 0:
            order = torch.randperm(len(x)).split(batch)
        rows = order[step % (len(x) // batch)]
        loss = F.cross_entropy(net(x[rows]), labels[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return Trial(ScaleChannels(net.eval(), CHANNELS), val, test)


def errors(looks: Looks, calibration: Calibration | None) -> dict[str, Any]:
    """Error and median of the estimated sizes at each size, and the rank correlation of estimated and true sizes."""
    z, count = looks.z.flatten(1, 2), len(looks.labels)
    logits = join(z, JOIN, None, calibration)
    estimates = find_size(z, logits, JOIN, None, looks.scales, calibration)
    wrong = (logits.argmax(1) != looks.labels.repeat(len(SIZES))).double()
    return {
        "error": wrong.view(-1, count).mean(1).tolist(),
        "median_size": estimates.view(-1, count).median(1).values.tolist(),
        "size_correlation": rank_correlation(estimates.numpy(), np.repeat(SIZES, count)),
        "ece": calibration_error(logits.softmax(1).amax(1), wrong == 0),
    }


def measure(trial: Trial) -> dict[str, Any]:
    """What the fit and the early stop change: decided on pictures for validation, measured on those for testing."""
    model, val, test = trial.model, *(look(trial.model, *part, SIZES) for part in (trial.val, trial.test))
    fit = choose(val, JOIN)
    model.calibration = fit.calibration
    alone = float((test.alone.argmax(1) != test.labels).double().mean())
    image = (trial.test[0].shape[-2], trial.test[0].shape[-1])
    trades = weigh_sure(model, val, image, SURE)
    return {
        "pictures": len(test.labels),
        "alone_error": alone,
        "plain": errors(test, None),
        "fitted": errors(test, fit.calibration),
        "fit": fit.to_dict(),
        "sure": next(trade.sure for trade in trades if trade.error <= trades[-1].error + POINTS),
        "trades": [trade._asdict() for trade in weigh_sure(model, test, image, SURE)],
    }


KINDS = ("digits", "garments", "icons in colour", "digits on textures")


def make_trial(kind: str, count: int, train: int, epochs: int, data_dir: Path | None) -> Trial:
    """One of the four."""
    if kind in ("digits", "garments"):
        own = kind == "digits"
        return shipped(kind, "mnist-scale" if own else "fmnist-scale", count, None if own else data_dir)
    seed = KINDS.index(kind) - 2
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    if kind == "icons in colour":
        return trained(icons(count, train, draw), 12, epochs)
    options: Any = {"scale_range": (1.0, 1.0), "sizes": COUNTS}
    digits = {part: load_split("mnist-scale", 1, part, **options) for part in ("train", "val", "test")}
    return trained(textured(count, train, draw, digits.__getitem__), 10, epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the numbers here, as JSON")
    parser.add_argument("--garments", type=Path, help="a directory with the files of Fashion-MNIST")
    parser.add_argument("--count", type=int, default=500, help="pictures for validation, and for testing")
    parser.add_argument("--train", type=int, default=3000, help="pictures to train with")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="by default all; others are kept")
    options = parser.parse_args()
    about = {"sizes": SIZES, "train": options.train, "epochs": options.epochs, "commit": commit(), "seed": 0}
    there = options.output is not None and options.output.exists() and json.loads(options.output.read_text())["trials"]
    kept = {kind: one for kind, one in (there or {}).items() if kind not in options.kinds}
    result: dict[str, Any] = {**about, "torch": torch.__version__, "trials": kept}
    for name in options.kinds:
        trial = make_trial(name, options.count, options.train, options.epochs, options.garments)
        one = result["trials"][name] = measure(trial)
        print(f"{name}: network alone {100 * one['alone_error']:.1f} % errors at size 1; join {one['fit']['about']}")
        for line in ("plain", "fitted"):
            shown = "".join(f"{100 * error:>7.1f}" for error in one[line]["error"])
            print(f"  {line:<7} error in % at {SIZES[0]:g} to {SIZES[-1]:g}: {shown}")
        for trade in one["trades"]:
            chosen = " (chosen)" if trade["sure"] == one["sure"] else ""
            shown = f"cost {trade['cost']:.2f}, error {100 * trade['error']:.2f} %"
            print(f"  sure {trade['sure']:<6g} {shown}{chosen}", flush=True)
        if options.output is not None:
            write_atomically(options.output, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
