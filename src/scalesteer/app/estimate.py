"""How long a training will take on this machine, measured on a few steps of it."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from scalesteer.app.config import Run, batch_for
from scalesteer.app.loop import make_model
from scalesteer.models.network import Task

FEW, ENOUGH_S = 4, 1.0  # images of the first steps; seconds that the measured one may take


def seconds_of_epoch(run: Run, task: Task, images: int, device: torch.device) -> float:
    """About how many seconds an epoch of so many training images takes, with the run's network in all its channels.

    Measured on random images of the task's size: steps of a few images, then of as many as take a second, up to the
    run's batch.
    """
    model = make_model(run.network, task).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    height, width = task.image_size or (64, 64)

    def step(count: int) -> float:
        x = torch.rand(count, task.in_chans, height, width, device=device)
        began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(count, device=device) % task.num_classes).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    batch = batch_for(run.training, images)
    few = min(FEW, batch)
    step(few)
    spent = min(step(few), step(few))
    count = max(few, min(batch, int(few * ENOUGH_S / spent)))
    if count > few:
        step(count)
        spent = min(step(count), step(count))
    return images * spent / count


def work(run: Run, epoch: int) -> float:
    """How long a step of an epoch takes, relative to one at one size."""
    several = run.network.channels and epoch >= (run.training.one_size_epochs or 0)
    return sum(scale**2 for scale in run.network.channels or ()) if several else 1.0


def describe(run: Run, task: Task, images: int, device: torch.device) -> str:
    """About how long a training on so many images takes here, in a sentence."""
    last, epochs = seconds_of_epoch(run, task, images, device), run.training.epochs
    total = sum(last * work(run, epoch) / work(run, epochs - 1) for epoch in range(epochs))
    channels = f" in {len(run.network.channels)} channels" if run.network.channels else ""
    where = "GPU" if device.type == "cuda" else "machine, without a GPU"
    return (
        f"On this {where}, an epoch of {images:,} pictures{channels} takes about {in_words(last)}, all {epochs} epochs "
        f"about {in_words(total)}, by a few steps."
    )


def in_words(seconds: float) -> str:
    """A duration, roughly.

    >>> [in_words(s) for s in (0.2, 1.4, 80, 800, 20000)]
    ['1 second', '1 second', '80 seconds', '13 minutes', '5.6 hours']
    """
    if seconds < 5400:
        number, unit = (max(1, round(seconds)), "second") if seconds < 100 else (round(seconds / 60), "minute")
        return f"{number} {unit}{'s' * (number > 1)}"
    return f"{seconds / 3600:.2g} hours"
