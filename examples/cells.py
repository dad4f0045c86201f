"""Masks of cells of any size by a small U-Net that was trained on cells of one size.

    python examples/cells.py                                          # one seed
    python examples/cells.py --seeds 0 1 2 --output cells.json        # three, and the numbers as JSON

The cells are drawn: filled ones, hollow ones with a membrane, hollow ones that touch each other, and hollow ones whose
membrane keeps its thickness when they grow. The network learns to fill all of them, at radii of 5 to 6.5 pixels. It is
tested at a half, once, twice and three times that size: as it is, with resized copies of the picture whose maps are
averaged, in `ScaleChannels` with nothing trained again, and after a few more steps in them on the same cells. A
second network has learned from pictures that were resized at random. Takes a few minutes for each seed on a CPU core,
and draws one picture as cells.png.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import ScaleChannels
from scalesteer.app import environment
from scalesteer.datasets import ImageSet
from scalesteer.files import tensor_digest, write_atomically
from scalesteer.instances import find_regions
from scalesteer.resize import resize

KINDS = ("filled", "hollow", "touching", "thin")
SIZES = (0.5, 1.0, 2.0, 3.0)  # of the cells in test pictures, relative to training
SCALES = (0.35, 0.5, 0.71, 1.0, 1.41, 2.0)  # a scale of 1/3 shows cells of size 3 as they were in training
RADII = (5.0, 6.5)  # in pixels, at size 1
MEMBRANE = 1.5  # its thickness at size 1
SIDE, TEST_SIDE = 64, 128  # of pictures
RESIZED = (1 / 3, 3.0)  # factors of the network that learns from resized pictures
LEAST_PIXELS = 20  # of a cell in the table of objects


class UNet(nn.Module):
    """Images `(B, 1, H, W)` -> maps of logits `(B, 2, H, W)`; height and width are multiples of 4.

    The logit of "background" is zero, so that that of "cell" is its log-odds and means the same at every size.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.top, self.middle, self.low = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up, self.last = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        middle = self.middle(F.max_pool2d(top, 2))
        low = self.low(F.max_pool2d(middle, 2))
        y = self.up(torch.cat([F.interpolate(low, scale_factor=2.0), middle], dim=1))
        y = self.last(torch.cat([F.interpolate(y, scale_factor=2.0), top], dim=1))
        return F.pad(self.head(y), (0, 0, 0, 0, 1, 0))


def block(fan_in: int, fan_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (fan_in, fan_out):
        layers += [nn.Conv2d(channels, fan_out, 3, padding=1, bias=False), nn.BatchNorm2d(fan_out), nn.ReLU()]
    return nn.Sequential(*layers)


def draw_cells(kind: str, size: float, side: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A picture `(1, side, side)` with cells of one kind and size, and its mask `(side, side)`: 1 inside of a cell."""
    picture, mask = np.zeros((side, side)), np.zeros((side, side), np.int64)
    y, x = np.mgrid[:side, :side]
    placed: list[tuple[float, float, float]] = []
    count = max(2, round(0.16 * side**2 / (np.pi * (size * np.mean(RADII)) ** 2)))
    gap = 0.0 if kind == "touching" else 2.0
    for _ in range(60 * count):
        if len(placed) == count:
            break
        radius = size * rng.uniform(*RADII)
        if kind == "touching" and placed:  # at the side of another cell
            row, column, other = placed[rng.integers(len(placed))]
            angle = rng.uniform(0, 2 * np.pi)
            row, column = row + (radius + other) * np.sin(angle), column + (radius + other) * np.cos(angle)
        else:
            row, column = rng.uniform(-0.3 * radius, side + 0.3 * radius, 2)
        if any(np.hypot(row - r, column - c) < radius + other - 1e-6 + gap for r, c, other in placed):
            continue
        if not (0 <= row < side and 0 <= column < side):
            continue
        placed.append((row, column, radius))
        away = np.hypot(y - row, x - column)
        thickness = MEMBRANE * (1 if kind == "thin" else size)
        shape = (
            (away - radius).clip(-0.5, 0.5) if kind == "filled" else abs(away - radius + thickness / 2) - thickness / 2
        )
        picture = np.maximum(picture, (0.5 - shape).clip(0, 1) * rng.uniform(0.6, 1))
        mask[away <= radius] = 1
    picture += rng.normal(0, 0.08, picture.shape)
    return torch.from_numpy(picture[None]).float(), torch.from_numpy(mask)


def draw_batch(kinds: Sequence[str], size: float, side: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Pictures `(B, 1, side, side)` and masks `(B, side, side)`, one of each kind."""
    pictures, masks = zip(*(draw_cells(kind, size, side, rng) for kind in kinds), strict=True)
    return torch.stack(pictures), torch.stack(masks)


def resized(x: Tensor, mask: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Pictures and masks at another size, a part of them of the same number of pixels, mirrored at their borders."""
    side, n = x.shape[-1], max(8, round(x.shape[-1] * factor))
    x, mask = resize(x, (n, n)), F.interpolate(mask[:, None].float(), (n, n)).long()[:, 0]
    if n > side:
        at = (n - side) // 2
        return x[..., at : at + side, at : at + side], mask[..., at : at + side, at : at + side]
    reflected = np.pad(np.arange(n), ((side - n) // 2, side - n - (side - n) // 2), mode="symmetric")
    places = torch.from_numpy(reflected)
    return x[..., places, :][..., places], mask[..., places, :][..., places]


def train(*, steps: int, seed: int, at_random: bool = False, batch: int = 6) -> UNet:
    """A network for cells of size 1; with `at_random`, from pictures that are resized by a random factor each step."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    net = UNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
    for _ in range(steps):
        x, mask = draw_batch([str(kind) for kind in rng.choice(KINDS[:3], batch)], 1.0, SIDE, rng)
        if at_random:
            x, mask = resized(x, mask, float(np.exp(rng.uniform(*np.log(RESIZED)))))
        loss = F.cross_entropy(net(x), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def train_on(net: nn.Module, *, steps: int, seed: int, batch: int = 4) -> ScaleChannels:
    """A copy of a network that has learned a little more in scale channels, still from cells of size 1."""
    rng, model = np.random.default_rng(seed), in_channels(copy.deepcopy(net)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.01)
    for _ in range(steps):
        x, mask = draw_batch([str(kind) for kind in rng.choice(KINDS[:3], batch)], 1.0, SIDE, rng)
        loss = F.cross_entropy(model(x), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def in_channels(net: nn.Module, join: Any = "logsumexp") -> ScaleChannels:
    """The network at all sizes of the picture; nothing is trained."""
    return ScaleChannels(net, SCALES, join, multiple=4, grid=(1, 0)).eval()


def averaged(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """Averaging at test time: the probabilities of resized copies of the picture, brought back to its size."""

    def run(x: Tensor) -> Tensor:
        side, maps = x.shape[-1], []
        for scale in SCALES:
            n = 4 * round(side * scale / 4)
            maps.append(resize(net(resize(x, (n, n))).softmax(1), (side, side)))
        return torch.stack(maps).mean(0)

    return run


def overlap(found: Tensor, mask: Tensor) -> float:
    """Intersection over union of two masks of a set of pictures."""
    return float((found & mask).sum() / (found | mask).sum().clamp(min=1))


def measure(seed: int, *, steps: int = 250, pictures: int = 8) -> dict[str, dict[str, list[float]]]:
    """IoU by way, kind of cell and size, of the networks of one seed."""
    usual, any_size = train(steps=steps, seed=seed), train(steps=steps, seed=seed, at_random=True)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "U-Net": usual,
        "U-Net, averaged over resized copies": averaged(usual),
        "U-Net in scale channels": in_channels(usual),
        'U-Net in scale channels, join="max"': in_channels(usual, "max"),
        "U-Net in scale channels, trained on": train_on(usual, steps=max(1, steps // 5), seed=seed),
        "trained with random resizing": any_size,
        "trained with random resizing, in scale channels": in_channels(any_size),
    }
    found: dict[str, dict[str, list[float]]] = {way: {kind: [] for kind in KINDS} for way in ways}
    for kind in KINDS:
        for size in SIZES:
            x, mask = draw_batch([kind] * pictures, size, TEST_SIDE, np.random.default_rng(1000 + seed))
            for way, model in ways.items():
                with torch.no_grad():
                    inside = model(x).argmax(1) == 1
                found[way][kind].append(round(overlap(inside, mask == 1), 4))
    return found


@torch.no_grad()
def draw(net: nn.Module, model: nn.Module, path: Path, seed: int = 5) -> None:
    """Cells of three sizes, the masks that the network and the one in channels find, and the map of sizes."""
    from matplotlib import colors
    from matplotlib.figure import Figure

    rng = np.random.default_rng(seed)
    parts = [draw_cells(kind, size, 96, rng)[0] for kind, size in (("hollow", 0.6), ("touching", 1.0), ("hollow", 2.5))]
    x = torch.cat(parts, dim=-1)[None]
    logits, sizes = model(x, return_scales=True)
    inside, alone = logits[0].argmax(0).numpy(), net(x)[0].argmax(0).numpy()
    image, regions = find_regions(inside, sizes[0].numpy(), least=LEAST_PIXELS)
    figure = Figure(figsize=(7.6, 8.4), layout="constrained")
    axes = figure.subplots(4, 1)
    axes[0].imshow(x[0, 0].numpy(), cmap="gray", vmin=0, vmax=1)
    axes[1].imshow(alone, cmap="gray")
    axes[2].imshow(np.where(image > 0, 1 + image % 9, np.nan), cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
    shown = axes[3].imshow(np.where(image > 0, sizes[0].numpy(), np.nan), cmap="viridis", norm=colors.LogNorm(0.5, 4))
    titles = ("cells of 0.6, 1 and 2.5 times the trained size", "found by the network alone",
              f"found in scale channels: {len(regions)} regions", "their estimated size")  # fmt: skip
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xticks=[], yticks=[])
        axis.set_title(title, fontsize=10)
    bar = figure.colorbar(shown, ax=list(axes), ticks=[0.5, 1, 2, 4], shrink=0.3)
    bar.ax.minorticks_off()
    bar.ax.set_yticklabels(["0.5", "1", "2", "4"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})  # no version: the same figure, the same bytes


def drawn_pictures() -> ImageSet:
    """Some of the pictures, by whose digest others see that they draw the same ones."""
    x, _ = draw_batch(KINDS, 1.0, TEST_SIDE, np.random.default_rng(1000))
    pixels = (255 * x[:, 0].clamp(0, 1)).round().byte()
    about = {"drawn": "examples/cells.py", "digest": tensor_digest(pixels)}
    return ImageSet(pixels, torch.zeros(len(x), dtype=torch.long), torch.ones(len(x)), about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=250, help="of each training (default 250)")
    parser.add_argument("--output", type=Path, help="also write the numbers here, as JSON")
    parser.add_argument("--picture", type=Path, default=Path("cells.png"), help="where the drawing goes")
    options = parser.parse_args()
    found = {str(seed): measure(seed, steps=options.steps) for seed in options.seeds}
    for way in found[str(options.seeds[0])]:
        print(way)
        for kind in KINDS:
            means = np.mean([found[str(seed)][way][kind] for seed in options.seeds], axis=0)
            print(f"  {kind:<10}" + "".join(f"{mean:7.2f}" for mean in means))
    net = train(steps=options.steps, seed=options.seeds[0])
    draw(net, train_on(net, steps=max(1, options.steps // 5), seed=options.seeds[0]), options.picture)
    if options.output is not None:
        seeds = " ".join(map(str, options.seeds))
        about = {"sizes": list(SIZES), "scales": list(SCALES), "steps": options.steps, "pictures": 8}
        about |= {"command": f"python examples/cells.py --seeds {seeds} --output results/guide/cells.json"}
        content = {**about, "environment": environment(drawn_pictures()), "iou": found}
        write_atomically(options.output, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
