"""Digits of many sizes in one picture, found and named by a network that was trained on digits of one size.

    python examples/mixed_sizes.py --data-dir DIRECTORY     # with MNIST's files; left out, they are downloaded

A fully convolutional network learns from single digits in their usual frame of 28 x 28 pixels. `ScaleChannels` then
lets it look at a picture of 256 x 256 at several sizes. It finds digits of 14 to 112 pixels and says how large each is.
Takes a minute or two on a CPU core, prints how many digits are found, and draws one picture as mixed-sizes.png.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import ScaleChannels
from scalesteer.datasets.sources import fetch
from scalesteer.instances import find_centres
from scalesteer.resize import resize

FRAME = 28  # pixels of a digit's square frame in training
STRIDE = 4  # pixels from one place of the network's map to the next
SIZES = (0.5, 4.0)  # of the digits in a picture, relative to training
SCALES = tuple(2 ** (k / 3) for k in range(-7, 5))  # a scale of 1/4 shows digits of size 4 as they were in training


class Finder(nn.Module):
    """Images `(B, 1, H, W)` -> maps `(B, 11, H / 4, W / 4)`: "nothing here", then a digit with its centre here.

    The logit of "nothing here" is zero, so that the others are log-odds and mean the same at every size.
    """

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, fan_out, kernel, stride in (
            *((1, 16, 5, 2), (16, 32, 3, 1), (32, width, 3, 2)),
            *((width, width, 3, 1), (width, width, 3, 1), (width, width, 3, 1)),
        ):
            layers += [nn.Conv2d(fan_in, fan_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(fan_out)]
            layers += [nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 10, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.layers(x), (0, 0, 0, 0, 1, 0))


class Digit(NamedTuple):
    """One digit of a picture: its name, the centre of its frame in pixels, and its size relative to training."""

    name: int
    row: float
    column: float
    size: float


def load(data_dir: str | None = None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """MNIST in random order: 60,000 digits to train with, 10,000 others for pictures; labels are 1 to 10."""
    pool = fetch("mnist", data_dir)
    order = np.random.default_rng(0).permutation(len(pool.images))
    images = torch.from_numpy(pool.images[order]).float() / 255
    labels = torch.from_numpy(pool.labels[order]).long() + 1
    return (images[:60_000], labels[:60_000]), (images[60_000:], labels[60_000:])


def training_batch(images: Tensor, labels: Tensor, rng: np.random.Generator, side: int = 48) -> tuple[Tensor, Tensor]:
    """Single digits at random places, `(B, 1, side, side)`, and what the map should say, `(B, side / 4, side / 4)`.

    A place says the digit's name if its centre is at most 3 pixels away, nothing if it is more than 7 pixels away, and
    is not judged in between (-100). All digits have one size. Their sharpness varies, because a small digit that is
    enlarged has no more detail than before: every digit is shrunk to 14 to 28 pixels and back.
    """
    x = torch.zeros(len(images), 1, side, side)
    target = torch.zeros(len(images), side // STRIDE, side // STRIDE, dtype=torch.long)
    places = torch.arange(side // STRIDE) * STRIDE
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        row, column = rng.integers(0, side - FRAME + 1, 2).tolist()
        n = int(rng.integers(FRAME // 2, FRAME + 1))
        blurred = resize(resize(image[None, None], (n, n)).clamp(0, 1), (FRAME, FRAME)).clamp(0, 1)
        x[i, :, row : row + FRAME, column : column + FRAME] = blurred[0]
        centre = FRAME / 2 - 0.5
        away = torch.maximum((places - row - centre).abs()[:, None], (places - column - centre).abs()[None])
        target[i] = torch.where(away <= 3, label, torch.where(away > 7, 0, -100))
    return x, target


def train(images: Tensor, labels: Tensor, *, steps: int, batch: int = 32, seed: int = 0) -> Finder:
    """A network for digits of one size; `images` `(N, 28, 28)` from 0 to 1, `labels` 1 to 10 for the digits 0 to 9."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    net = Finder()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.from_numpy(rng.integers(0, len(images), batch))
        x, target = training_batch(images[chosen], labels[chosen], rng)
        loss = F.cross_entropy(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def make_picture(
    images: Tensor, labels: Tensor, rng: np.random.Generator, *, side: int = 256, count: int = 8
) -> tuple[Tensor, list[Digit]]:
    """A picture `(1, 1, side, side)` with digits that do not overlap, of sizes from one end of `SIZES` to the other."""
    picture, digits = torch.zeros(1, 1, side, side), []
    low, high = map(math.log, SIZES)
    for k in reversed(range(count)):  # the largest first, while there is room
        size = math.exp(low + (high - low) * (k + rng.random()) / count)
        n = round(FRAME * size)
        for _ in range(1000):
            row, column = rng.integers(0, side - n + 1, 2).tolist()
            patch = picture[:, :, row : row + n, column : column + n]
            if not patch.any():
                break
        else:
            continue
        i = int(rng.integers(0, len(images)))
        patch += resize(images[i][None, None], (n, n)).clamp(0, 1) + 1e-6  # the frame counts as taken
        digits.append(Digit(int(labels[i]) - 1, row + (n - 1) / 2, column + (n - 1) / 2, n / FRAME))
    return picture, digits


def find(model: nn.Module, picture: Tensor, threshold: float = -1.0) -> tuple[list[Digit], Tensor, Tensor]:
    """The digits in a picture, with the maps of log-odds and of sizes they are read from.

    The clearest place names a digit; what lies within its frame is then not asked again. The odds are a mean over the
    channels: one channel alone has to be much surer than the `threshold`.
    """
    with torch.no_grad():
        logits, sizes = model(picture, return_scales=True)
    centres = find_centres(logits[0, 1:], sizes[0], FRAME, stride=STRIDE, threshold=threshold)
    found = [Digit(centre.label, centre.row, centre.column, centre.size) for centre in centres]
    return found, logits[0, 1:].amax(0), sizes[0]


def compare(found: list[Digit], true: list[Digit]) -> list[Digit | None]:
    """For each true digit the clearest one found whose centre is within a quarter of its frame, or None."""
    left, matches = list(found), []
    for digit in true:
        reach = FRAME * digit.size / 4
        match = next((f for f in left if max(abs(f.row - digit.row), abs(f.column - digit.column)) <= reach), None)
        if match is not None:
            left.remove(match)
        matches.append(match)
    return matches


class Score(NamedTuple):
    """Counts over several pictures: digits, those found, found and named, found with a size within a factor of 1.3."""

    digits: int
    found: int
    named: int
    sized: int
    false_alarms: int


def evaluate(model: nn.Module, images: Tensor, labels: Tensor, *, pictures: int = 20, seed: int = 2) -> Score:
    """Find the digits in random pictures and count what is right."""
    rng, total = np.random.default_rng(seed), np.zeros(5, int)
    for _ in range(pictures):
        picture, true = make_picture(images, labels, rng)
        found, _, _ = find(model, picture)
        pairs = [(f, t) for f, t in zip(compare(found, true), true, strict=True) if f is not None]
        named = sum(f.name == t.name for f, t in pairs)
        sized = sum(abs(math.log(f.size / t.size)) <= math.log(1.3) for f, t in pairs)
        total += (len(true), len(pairs), named, sized, len(found) - len(pairs))
    return Score(*total.tolist())


def draw(model: nn.Module, picture: Tensor, path: Path) -> None:
    """The picture with what was found in it, and the map of sizes beside it."""
    from matplotlib import colors
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    found, odds, sizes = find(model, picture)
    figure = Figure(figsize=(9.2, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    height, width = picture.shape[-2:]
    scale, extent = colors.LogNorm(*SIZES), (-STRIDE / 2, width - STRIDE / 2, height - STRIDE / 2, -STRIDE / 2)
    # Opaque where a digit is likelier than nothing: elsewhere no size has a meaning.
    shown = right.imshow(sizes.numpy(), cmap="viridis", norm=scale, alpha=(odds + 1).sigmoid().numpy(), extent=extent)
    left.imshow(picture[0, 0].numpy(), cmap="gray_r", vmin=0, vmax=1)
    for digit in found:
        side = FRAME * digit.size
        corner, colour = (digit.column - side / 2, digit.row - side / 2), shown.cmap(scale(digit.size))
        left.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=colour, linewidth=1.6))
        ink = "black" if digit.size > 2 else "white"  # viridis ends in a bright yellow
        left.text(*corner, f"{digit.name}", color=ink, fontsize=9, va="bottom", backgroundcolor=colour)
    left.set_title("found and named", fontsize=10)
    right.set_title("its estimated size", fontsize=10)
    for axis in (left, right):
        axis.set(xticks=[], yticks=[], xlim=extent[:2], ylim=extent[2:])
    bar = figure.colorbar(shown, ax=right, label="size relative to training")
    bar.ax.minorticks_off()
    bar.set_ticks([0.5, 1, 2, 4], labels=["0.5", "1", "2", "4"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200, metadata={"Software": None})  # no version: the same figure, the same bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a directory with MNIST's files in a subdirectory mnist")
    parser.add_argument("--steps", type=int, default=1200, help="of training (default 1200)")
    parser.add_argument("--pictures", type=int, default=20, help="that are searched for digits (default 20)")
    parser.add_argument("--out", type=Path, default=Path("mixed-sizes.png"), help="where the drawing goes")
    options = parser.parse_args()
    (images, labels), others = load(options.data_dir)
    net = train(images, labels, steps=options.steps)
    model = ScaleChannels(net, SCALES).eval()
    score = evaluate(model, *others, pictures=options.pictures)
    print(
        f"{score.digits} digits from {SIZES[0]} to {SIZES[1]} times the size of training, in {options.pictures} "
        f"pictures: {score.found} found, {score.named} found and named, {score.sized} with a size within a factor "
        f"of 1.3; {score.false_alarms} false alarms."
    )
    draw(model, make_picture(*others, np.random.default_rng(3))[0], options.out)
    print(f"drawn: {options.out}")


if __name__ == "__main__":
    main()
