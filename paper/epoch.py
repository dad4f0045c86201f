"""A training epoch on STIR-MNIST: our networks beside STIR's plain CNN, in turns, in one process.

``python -m paper.epoch`` times it on this machine and keeps results/bench/stir-epoch.json, which docs/evidence/stir.md
shows.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paper import RESULTS, grids
from paper.anysize import STIR_PLAIN
from scalesteer.app import environment, pick_device
from scalesteer.app.config import BATCH, Run
from scalesteer.app.loop import State, initial_state, make_update
from scalesteer.datasets import ImageSet
from scalesteer.files import write_atomically
from scalesteer.models import DATASETS

COLUMN = "MNIST Mid2Rest"
STEPS, ROUNDS = 4, 7  # in a sample, and samples of each contender, of which the fastest counts


def run(output: Path, device: str = "auto") -> dict[str, float]:
    """Seconds of an epoch by line of the experiment, and of `STIR_PLAIN`; written to a file with how it was measured.

    The images are noise: no time depends on what they show.
    """
    place = pick_device(device)
    runs = {row.line: row.config.run for row in reversed(grids.EXPERIMENTS["stir"].rows) if row.column == COLUMN}
    twin, task = runs[grids.TWIN], DATASETS["stir-mnist"]
    size = twin.training.batch_size or BATCH
    images = ImageSet(
        torch.randint(256, (STEPS * size, 64, 64), dtype=torch.uint8),
        torch.arange(STEPS * size) % 10,
        torch.ones(STEPS * size),
        {"spec": "noise"},
    ).to(place)
    contenders = {line: _timer(initial_state(own, task, images), own, images) for line, own in runs.items()}
    plain = initial_state(twin, task, images)
    plain.model = stir_plain().to(place)
    usual = plain.optimizer.defaults
    options = {name: usual[name] for name in ("lr", "weight_decay", "capturable", "fused")}
    plain.optimizer = torch.optim.AdamW(plain.model.parameters(), **options)
    contenders[STIR_PLAIN] = _timer(plain, twin, images)
    samples: dict[str, list[float]] = {line: [] for line in contenders}
    for _ in range(ROUNDS):
        for line, sample in contenders.items():
            samples[line].append(sample())
    steps = (twin.data.count or 0) // size
    seconds = {line: min(taken) / STEPS * steps for line, taken in samples.items()}
    spread = {line: statistics.median(taken) / min(taken) for line, taken in samples.items()}
    about = environment(images) | {"threads": torch.get_num_threads(), "column": COLUMN, "rounds": ROUNDS}
    found: dict[str, Any] = {"seconds": seconds, "median_over_fastest": spread, "environment": about}
    write_atomically(output, (json.dumps(found, indent=1) + "\n").encode())
    return seconds


def stir_plain() -> nn.Sequential:
    """STIR's plain network: two convolutions of 7 x 7, the maximum over space, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 7, padding=3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 7, padding=3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def _timer(state: State, run: Run, images: ImageSet) -> Callable[[], float]:
    update = make_update(state, run.training, images)
    batches = torch.arange(len(images), device=images.device).split(run.training.batch_size or BATCH)
    update(batches[0], run.training.lr)

    def sample() -> float:
        began = time.perf_counter()
        for rows in batches:
            loss = update(rows, run.training.lr)
        loss.item()  # waits for a GPU
        return time.perf_counter() - began

    return sample


if __name__ == "__main__":
    for name, taken in run(RESULTS / "bench" / "stir-epoch.json").items():
        print(f"{taken:8.2f} s  {name}")
