"""Digits of many sizes in one picture, found and named by a network that was trained on digits of one size.

    python examples/mixed_sizes.py --data-dir DIRECTORY     # with MNIST's files; left out, they are downloaded
    python examples/mixed_sizes.py --pretrained             # the network `digit-finder`, which comes with the package

A fully convolutional network learns from single digits in their usual frame of 28 x 28 pixels, and from what is no
digit: noise, strokes, parts of digits. Scale channels then let it look at a picture of 256 x 256 at several sizes. It
finds digits of 14 to 112 pixels and says how large each is. Trains for a few minutes on a CPU core, prints how many
digits are found and how often it finds one where there is none, and draws one picture as mixed-sizes.png.
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import create_model, from_pretrained, save_pretrained
from scalesteer.app.device import commit
from scalesteer.datasets.sources import fetch
from scalesteer.files import tensor_digest
from scalesteer.instances import find_centres
from scalesteer.models.network import Network
from scalesteer.resize import resize

FRAME = 28  # pixels of a digit's square frame in training
STRIDE, OFFSET = 4, 1.5  # pixels from one place of the network's map to the next, and the pixel of the first place
SIDE = 56  # of a training image
SIZES = (0.5, 4.0)  # of the digits in a picture, relative to training
SCALES = tuple(2 ** (k / 2) for k in range(-5, 3))  # a scale of 1/4 shows digits of size 4 as they were in training
CAUTION = 2.0  # log-odds are lowered by so much after training, so that specks are no digits; few digits are lost
NAME = "digit-finder"
KINDS = ("noise", "specks", "scribbles")  # pictures without a digit


def make_network() -> Network:
    """Images `(B, 1, H, W)` -> maps `(B, 11, H / 4, W / 4)`: "nothing here", then a digit with its centre here."""
    net = create_model(
        "pooled-cnn", num_classes=11, widths=(16, 32, 48, 48, 48), kernel_size=(5, 3, 3, 3, 3), subsample=(1, 2),
        halving="max", dense=True,
    )  # fmt: skip
    net.task = net.task._replace(classes=("nothing", *"0123456789"), ground="black")
    return net


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


def training_batch(
    images: Tensor, labels: Tensor, rng: np.random.Generator, *, clutter: bool = True
) -> tuple[Tensor, Tensor]:
    """Digits at random places, `(B, 1, side, side)`, and what the map should say, `(B, side / 4, side / 4)`.

    A place says the digit's label if its centre is at most 3 pixels away, nothing (0) if it is more than 7 pixels away,
    and is not judged in between (-100). All digits have one size, within a quarter of an octave: channels of scale are
    half an octave apart. Their sharpness varies, because a small digit that is enlarged has no more detail than before:
    every digit is shrunk to 14 to 28 pixels and back. With `clutter` a fifth of the images has no digit, some have a
    second one, and most have around them what is nothing: noise, strokes, parts of digits and digits of other sizes.
    """
    x = torch.zeros(len(images), 1, SIDE, SIDE)
    target = torch.zeros(len(images), SIDE // STRIDE, SIDE // STRIDE, dtype=torch.long)
    places = OFFSET + torch.arange(SIDE // STRIDE) * STRIDE
    for i in range(len(images)):
        count = 1
        if clutter:
            count = int(rng.choice(3, p=(0.2, 0.55, 0.25)))
            if count == 0 or rng.random() < 0.6:
                x[i, 0] = make_clutter(images, rng, SIDE)
        taken = torch.zeros(SIDE, SIDE)
        for k in range(count):
            chosen = i if k == 0 else int(rng.integers(0, len(images)))
            n = round(FRAME * 2 ** rng.uniform(-0.25, 0.25))
            row, column = rng.integers(0, SIDE - n + 1, 2).tolist()
            window = slice(row, row + n), slice(column, column + n)
            if taken[window].any():
                continue
            taken[window] = 1
            sharp = int(rng.integers(FRAME // 2, FRAME + 1))
            digit = rescaled(rescaled(images[chosen], sharp), n)
            near = F.max_pool2d(digit[None], 9, 1, 4)[0]  # clutter keeps a distance of 4 pixels from the ink
            x[i, 0][window] = torch.maximum(digit, x[i, 0][window] * (1 - near))
            centre = (n - 1) / 2
            away = torch.maximum((places - row - centre).abs()[:, None], (places - column - centre).abs()[None])
            unsure = torch.where((away <= 7) & (target[i] == 0), -100, target[i])
            target[i] = torch.where(away <= 3, labels[chosen], unsure)
    return x, target


def rescaled(image: Tensor, side: int) -> Tensor:
    """A square image `(n, n)` at another size, from 0 to 1."""
    return resize(image[None, None], (side, side)).clamp(0, 1)[0, 0]


def make_clutter(images: Tensor, rng: np.random.Generator, side: int) -> Tensor:
    """What is no digit of the size of training, `(side, side)`: one kind or two of it."""
    seen = torch.zeros(side, side)
    for _ in range(int(rng.integers(1, 3))):
        kind = rng.choice(5, p=(0.2, 0.15, 0.25, 0.2, 0.2))
        if kind == 0:
            seen = torch.maximum(seen, make_noise(rng, side))
        elif kind == 1:
            seen = torch.maximum(seen, make_specks(rng, side, int(rng.integers(1, 12)), (0.5, 3.5)))
        elif kind == 2:
            for _ in range(int(rng.integers(1, 4))):
                seen = torch.maximum(seen, make_stroke(rng, side, rng.uniform(1, 6), rng.uniform(20, 160)))
        else:  # a part of a digit, or a digit of half the size or less, of double the size or more
            octaves = rng.uniform(-0.3, 0.3) if kind == 3 else rng.choice((-1, 1)) * rng.uniform(0.75, 1.6)
            digit = rescaled(images[int(rng.integers(0, len(images)))], round(FRAME * 2**octaves))
            paste(seen, cut(digit, rng) if kind == 3 else digit, rng)
    return seen


def make_noise(rng: np.random.Generator, side: int) -> Tensor:
    """Noise of a random grain, brightness and contrast: even, normal, or single bright pixels."""
    n = max(4, round(side * 2 ** rng.uniform(-2.5, 0.5)))
    if rng.random() < 0.4:
        field = (rng.random((n, n)) < rng.uniform(0.02, 0.5)) * rng.uniform(0.3, 1)
    elif rng.random() < 0.5:
        field = rng.random((n, n)) * rng.uniform(0.2, 1)
    else:
        field = rng.uniform(0, 0.6) + rng.normal(size=(n, n)) * rng.uniform(0.05, 0.5)
    return rescaled(torch.from_numpy(field).float().clamp(0, 1), side)


def make_specks(rng: np.random.Generator, side: int, count: int, radii: tuple[float, float]) -> Tensor:
    """Round spots at random places."""
    pixels, seen = torch.arange(float(side)), torch.zeros(side, side)
    for _ in range(count):
        row, column = rng.uniform(0, side, 2).tolist()
        far = torch.hypot((pixels - row)[:, None], (pixels - column)[None])
        seen = torch.maximum(seen, (rng.uniform(*radii) + 0.5 - far).clamp(0, 1))
    return seen


def make_stroke(rng: np.random.Generator, side: int, width: float, length: float) -> Tensor:
    """A line from border to border, or a curl of a random path that turns many times: no digit, except by chance."""
    if rng.random() < 0.25:
        ends = rng.uniform(-0.1, 1.1, (2, 2)) * side
        ends[np.arange(2), rng.integers(0, 2, 2)] = (-0.2 * side, 1.2 * side)
        points = torch.from_numpy(ends).float()
    else:
        step = max(2.0, width)
        count = max(5, round(length / step))
        bends = np.convolve(rng.normal(size=count + 4), np.ones(5) / 5, mode="valid") * rng.uniform(0.5, 2.5)
        headings = rng.uniform(0, 2 * math.pi) + np.cumsum(bends)
        path = np.cumsum(step * np.stack([np.sin(headings), np.cos(headings)], -1), 0)
        path += rng.uniform(0.1, 0.9, 2) * side - path.mean(0)
        points = torch.from_numpy(path).float()
    pixels = torch.arange(float(side))
    grid = torch.stack(torch.meshgrid(pixels, pixels, indexing="ij"), -1)[:, :, None]  # (side, side, 1, 2)
    start, along = points[:-1], points[1:] - points[:-1]
    share = ((grid - start) * along).sum(-1) / (along**2).sum(-1)
    nearest = start + share.clamp(0, 1)[..., None] * along  # on each piece of the path, (side, side, pieces, 2)
    far: Tensor = (grid - nearest).norm(dim=-1).amin(-1)
    return ((width + 1) / 2 - far).clamp(0, 1)


def cut(digit: Tensor, rng: np.random.Generator) -> Tensor:
    """The part of a digit beyond a straight line: at most 35 % of its ink."""
    pixels, angle = torch.arange(float(len(digit))), rng.uniform(0, 2 * math.pi)
    across = math.cos(angle) * pixels[:, None] + math.sin(angle) * pixels[None]
    order = across.flatten().argsort()
    ink = digit.flatten()[order].cumsum(0)
    line = across.flatten()[order[int((ink < rng.uniform(0.1, 0.35) * ink[-1]).sum())]]
    return digit * (across < line)


def paste(picture: Tensor, patch: Tensor, rng: np.random.Generator) -> None:
    """Put a square patch at a random place, in part beyond the border; the brighter pixel is kept."""
    side, n = len(picture), len(patch)
    row, column = rng.integers(-n // 3, max(side - 2 * n // 3, 1 - n // 3), 2).tolist()
    rows, columns = (slice(max(0, at), min(side, at + n)) for at in (row, column))
    part = patch[rows.start - row : rows.stop - row, columns.start - column : columns.stop - column]
    picture[rows, columns] = torch.maximum(picture[rows, columns], part)


def train(images: Tensor, labels: Tensor, *, steps: int, batch: int = 24, seed: int = 0) -> nn.Module:
    """A network for digits of one size, in scale channels; `images` `(N, 28, 28)` from 0 to 1, `labels` 1 to 10."""
    torch.manual_seed(seed)
    rng, net = np.random.default_rng(seed), make_network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for step in range(steps):
        chosen = torch.from_numpy(rng.integers(0, len(images), batch))
        x, target = training_batch(images[chosen], labels[chosen], rng)
        loss = F.cross_entropy(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 200 == 199:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
    last: Any = net.get_submodule("classifier.fc2")
    with torch.no_grad():  # "nothing here" gets the logit zero, so that the others mean the same at every size
        for parameter in last.parameters():
            parameter -= parameter[:1].clone()
        last.bias[1:] -= CAUTION
    return net.with_scales(SCALES).eval()


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


def make_empty_picture(rng: np.random.Generator, kind: str, side: int = 256) -> Tensor:
    """A picture `(1, 1, side, side)` without a digit: noise, specks on black, or scribbles."""
    if kind == "noise":
        return make_noise(rng, side)[None, None]
    if kind == "specks":
        return make_specks(rng, side, int(rng.integers(5, 60)), (0.5, 6.0))[None, None]
    picture = torch.zeros(side, side)
    for _ in range(int(rng.integers(1, 4))):
        picture = torch.maximum(picture, make_stroke(rng, side, rng.uniform(2, 10), rng.uniform(0.5, 3) * side))
    return picture[None, None]


def find(model: nn.Module, picture: Tensor, threshold: float = -1.0) -> tuple[list[Digit], Tensor, Tensor]:
    """The digits in a picture, with the maps of log-odds and of sizes they are read from.

    The clearest place names a digit; what lies within its frame is then not asked again. The odds are a mean over the
    channels: one channel alone has to be much surer than the `threshold`.
    """
    with torch.no_grad():
        logits, sizes = model(picture, return_scales=True)
    centres = find_centres(logits[0, 1:], sizes[0], FRAME, stride=STRIDE, offset=OFFSET, threshold=threshold)
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


def count_false_alarms(model: nn.Module, *, pictures: int = 200, side: int = 256, seed: int = 4) -> dict[str, int]:
    """In how many pictures without a digit one is found, by kind; there are as many of each kind, or one more."""
    rng, alarms = np.random.default_rng(seed), dict.fromkeys(KINDS, 0)
    for k in range(pictures):
        kind = KINDS[k % len(KINDS)]
        alarms[kind] += bool(find(model, make_empty_picture(rng, kind, side))[0])
    return alarms


def draw(model: nn.Module, picture: Tensor, path: Path) -> None:
    """The picture with what was found in it, and the map of sizes beside it."""
    from matplotlib import colors
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    found, odds, sizes = find(model, picture)
    figure = Figure(figsize=(9.2, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    height, width = picture.shape[-2:]
    scale, extent = colors.LogNorm(*SIZES), (-0.5, width - 0.5, height - 0.5, -0.5)
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


def describe(score: Score, alarms: dict[str, int], pictures: int, empty: int) -> str:
    """What a network finds, in a sentence or two."""
    by_kind = ", ".join(f"{count} of {kind}" for kind, count in alarms.items())
    return (
        f"{score.digits} digits from {SIZES[0]} to {SIZES[1]} times the size of training, in {pictures} pictures: "
        f"{score.found} found, {score.named} found and named, {score.sized} with a size within a factor of 1.3; "
        f"{score.false_alarms} false alarms. Of {empty} pictures without a digit (noise, specks, scribbles), "
        f"{sum(alarms.values())} have a false alarm ({by_kind})."
    )


def save(model: nn.Module, folder: Path, images: Tensor, command: str, result: str) -> None:
    """Write the network as a folder, with what a reader of its card should know."""
    card = f"""It finds digits in pictures of any size and says how large they are: `(B, 1, H, W)` -> maps
`(B, 11, H / {STRIDE}, W / {STRIDE})`, "nothing here", which is always 0, and the log-odds of each digit with its centre
at that place. `logits, sizes = model(picture, return_scales=True)` are read by
`scalesteer.instances.find_centres(logits[0, 1:], sizes[0], {FRAME}, stride={STRIDE}, offset={OFFSET}, threshold=-1)`.

- Data: MNIST, 60,000 of the 70,000 digits in random order, SHA-256 of them in this order {tensor_digest(images)}.
- Command: `{command}`
- Commit: {commit()}, with torch {torch.__version__}.
- Test: {result}
"""
    save_pretrained(model, folder, card=card, half=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a directory with MNIST's files in a subdirectory mnist")
    parser.add_argument("--steps", type=int, default=1500, help="of training (default 1500)")
    parser.add_argument("--pretrained", action="store_true", help=f"take the network {NAME} and train nothing")
    parser.add_argument("--pictures", type=int, default=20, help="that are searched for digits (default 20)")
    parser.add_argument("--empty", type=int, default=200, help="pictures without a digit (default 200)")
    parser.add_argument("--out", type=Path, default=Path("mixed-sizes.png"), help="where the drawing goes")
    parser.add_argument("--save", type=Path, help="a folder for the trained network")
    options = parser.parse_args()
    (images, labels), others = load(options.data_dir)
    model = from_pretrained(NAME) if options.pretrained else train(images, labels, steps=options.steps)
    score = evaluate(model, *others, pictures=options.pictures)
    result = describe(score, count_false_alarms(model, pictures=options.empty), options.pictures, options.empty)
    print(result)
    if options.save is not None:
        save(model, options.save, images, f"python examples/mixed_sizes.py --steps {options.steps}", result)
    draw(model, make_picture(*others, np.random.default_rng(3))[0], options.out)
    print(f"drawn: {options.out}")


if __name__ == "__main__":
    main()
