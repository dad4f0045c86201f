"""What group convolutions cost: `group-cnn` beside the same network computed as published code computes it.

That code pads the filters of all scales with zeros to the window of the largest one, and one grouped convolution
applies all of them. :data:`METHOD` says how both are measured.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import create_model
from scalesteer.files import write_atomically
from scalesteer.group import ScaleGroupConv2d
from speed.bench import environment

METHOD = (
    "Training steps of group-cnn: forward, backward and Adam, float32, on one CPU thread and in the time that it was "
    "given. Contenders take turns; the fastest of all rounds counts. Padded: the filters of all scales are padded with "
    "zeros to the largest window, and each layer is one grouped convolution. SS-CNN has no reach."
)
CASES = {"28 px, reach 1": (28, 1, 64), "28 px, reach 2": (28, 2, 64), "56 px, reach 1": (56, 1, 16)}
"""Pixels of the images, reach, and batch."""
STIR: dict[str, dict[str, Any]] = {
    "Group CNN": {"name": "group-cnn"},
    "Group CNN in scale channels": {"name": "group-cnn", "channels": (0.25, 0.5, 1.0)},
    "Scale channels, plain filters": {
        "name": "pooled-cnn", "channels": tuple(2 ** (step / 2) for step in range(-4, 2)), "drop": 0.4,
    },
}  # fmt: skip
"""The networks of the experiment "group-stir", for images of 64 pixels in batches of 32."""


class PaddedGroupConv2d(ScaleGroupConv2d):
    """The same layer with all filters in the largest window and one grouped convolution over all scales."""

    def _convolve(self, x: Tensor, return_scales: bool) -> Tensor:
        count, size, reach = len(self.scales), max(self.sizes), self.reach
        padded = [F.pad(f, [(size - f.shape[-1]) // 2] * 4) for f in self.filters()]
        weight = torch.stack(padded).flatten(0, 1).flatten(1, 2)  # (S O, C reach, n, n)
        if x.ndim == 4:
            y = F.conv2d(x, weight, padding=size // 2)
        else:
            x = F.pad(x, [0, 0, 0, 0, (reach - 1) // 2, reach // 2]).unfold(2, reach, 1)  # (B, C, S, H, W, reach)
            y = F.conv2d(x.permute(0, 2, 1, 5, 3, 4).flatten(1, 3), weight, padding=size // 2, groups=count)
        return y.reshape(len(y), count, -1, *y.shape[2:]).transpose(1, 2)


def pad(model: nn.Module) -> nn.Module:
    """Let the group convolutions of a network be computed so."""
    for module in model.modules():
        if type(module) is ScaleGroupConv2d:
            module.__class__ = PaddedGroupConv2d
    return model


def contenders(reach: int, pixels: int) -> dict[str, nn.Module]:
    """The network, with the Hermite basis, computed as published; and SS-CNN, which enlarges 28 pixels by itself."""
    torch.manual_seed(0)
    enlarge = pixels // 28
    return {
        "group-cnn": create_model("group-cnn", reach=reach),
        "Hermite basis": create_model("group-cnn", reach=reach, basis="hermite"),
        "Hermite basis, padded": pad(create_model("group-cnn", reach=reach, basis="hermite")),
        "SS-CNN": nn.Sequential(nn.AvgPool2d(enlarge), create_model("ss-cnn", upsample=enlarge)),
    }


def time_in_turns(models: dict[str, nn.Module], pixels: int, batch: int, rounds: int) -> dict[str, float]:
    """Training images a second of each network."""
    images, labels = torch.rand(batch, 1, pixels, pixels), torch.arange(batch) % 10
    optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
    best = dict.fromkeys(models, math.inf)
    for _ in range(rounds + 1):  # the first one warms up, and may be the fastest as well
        for name, model in models.items():
            began = time.process_time()
            F.cross_entropy(model(images), labels).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            best[name] = min(best[name], time.process_time() - began)
    return {name: float(f"{batch / s:.4g}") for name, s in best.items()}


def run(output: Path, *, rounds: int = 5, cases: dict[str, tuple[int, int, int]] = CASES) -> dict[str, Any]:
    """Measure in turns and write what was found."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "environment": {"command": "python -m speed group", **environment(torch.device("cpu"))},
        "method": METHOD,
        "rounds": rounds,
        "images_per_second": {
            case: time_in_turns(contenders(reach, pixels), pixels, batch, rounds)
            for case, (pixels, reach, batch) in cases.items()
        },
    }
    torch.manual_seed(0)
    stir = {line: create_model(**options).train() for line, options in STIR.items()}
    found["stir"] = time_in_turns(stir, 64, 32, rounds)
    found["load"] = round(os.getloadavg()[0], 1)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, (json.dumps(found, indent=1) + "\n").encode())
    return found
