"""The training loop, from top to bottom: epochs, steps, validation, the best model, one look at the test set."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from scalesteer.data import ImageSet
from scalesteer.models import Network, create_model
from scalesteer.training.config import RunConfig
from scalesteer.training.device import arithmetic, recorded

EVALUATION_BATCH = {"cpu": 100, "cuda": 1000}  # where a step is slow a request to stop must not wait for many images
SCALE_BINS = tuple(itertools.pairwise(round(0.3 + 0.1 * i, 1) for i in range(8)))


@dataclass
class State:
    """Everything that changes while training; between two steps it is always whole and can be saved."""

    model: Network
    optimizer: torch.optim.AdamW
    losses: Tensor  # of the epoch's steps, on the device: to read one makes a GPU wait
    best: dict[str, Tensor] = field(default_factory=dict)  # the weights after the best epoch so far
    epoch: int = 0
    step: int = 0  # within the epoch
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0  # spent in steps


class Watcher(Protocol):
    """Who looks after a training: saves it, shows how far it is, and may end it by an exception."""

    def after_step(self, state: State) -> None: ...
    def after_epoch(self, state: State) -> None: ...  # when it is in the history
    def between_batches(self, state: State) -> None: ...  # while a model is evaluated


def initial_state(config: RunConfig, images: ImageSet) -> State:
    """A training that has not begun, on the device of the training images."""
    torch.manual_seed(config.seed)
    model = create_model(config.model, config.dataset, **config.model_options)
    model.input_std.fill_(images.std)
    model.to(images.device)
    on_gpu = images.device.type == "cuda"
    rate: Any = torch.tensor(config.lr, device=images.device) if on_gpu else config.lr  # a recorded step reads a tensor
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, weight_decay=config.weight_decay, capturable=on_gpu, fused=on_gpu or None
    )
    steps = len(images) // config.batch_size  # in an epoch: whole batches only
    return State(model, optimizer, torch.zeros(steps, device=images.device))


def fit(state: State, config: RunConfig, parts: dict[str, ImageSet], watcher: Watcher) -> dict[str, Any]:
    """Train to the end, from wherever the state is, and test the model that validation chose.

    Returns `status` "finished" with the errors, or "failed" with a `reason` if a loss was no finite number.
    """
    model, images, steps = state.model, parts["train"], len(state.losses)
    update = _make_update(state, config, images)
    while state.epoch < config.epochs:
        model.train()
        if state.step == 0:
            torch.manual_seed(epoch_seed(config.seed + 1, state.epoch))  # dropout
        order = images.order(torch.Generator().manual_seed(epoch_seed(config.seed, state.epoch)))
        batches, clock = order.split(config.batch_size), time.perf_counter()
        for step in range(state.step, steps):  # earlier ones were done before an interruption
            progress = (state.epoch * steps + step) / (config.epochs * steps)
            state.losses[step] = update(batches[step], learning_rate(config, progress))
            state.step += 1
            state.seconds, clock = state.seconds + time.perf_counter() - clock, time.perf_counter()
            watcher.after_step(state)
        losses = state.losses.tolist()  # waits for a GPU
        state.seconds += time.perf_counter() - clock
        for step, loss in enumerate(losses):
            if not math.isfinite(loss):
                return _failed(f"the loss became {loss} at step {state.epoch * steps + step}", state)

        val = evaluate(model, parts["val"], config.precision, lambda: watcher.between_batches(state))
        if not math.isfinite(val["loss"]):
            after = (state.epoch + 1) * steps
            return _failed(f"the loss on validation data became {val['loss']} after step {after}", state)
        entry = {"epoch": state.epoch, "loss": float(np.mean(losses)), "val_loss": val["loss"]}
        entry |= {"val_error": val["error"], "seconds": round(state.seconds, 3)}
        if not state.history or _rank(entry) < min(map(_rank, state.history)):  # on a tie the earlier epoch stays
            state.best = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        state.history.append(entry)
        state.epoch, state.step = state.epoch + 1, 0
        watcher.after_epoch(state)

    best = min(state.history, key=_rank)
    outcome = {"status": "finished"}
    if not config.tuning:  # the one look at the test set
        model.load_state_dict(state.best)
        test = evaluate(model, parts["test"], config.precision, lambda: watcher.between_batches(state))
        outcome |= {"test_error": test["error"], "test_error_by_scale": test["by_scale"]}
    return outcome | {"val_error": best["val_error"], "val_loss": best["val_loss"], "best_epoch": best["epoch"]}


def _make_update(state: State, config: RunConfig, images: ImageSet) -> Callable[[Tensor, float], Tensor]:
    """One step: train on the images of these rows with this learning rate, and return the loss."""
    model, optimizer, device = state.model.train(), state.optimizer, images.device

    def step(rows: Tensor) -> Tensor:
        x, labels = images.take(rows)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = F.cross_entropy(model(x), labels, label_smoothing=config.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Callable[[Tensor], Tensor] = step
    if device.type == "cuda" and state.epoch < config.epochs:
        run = recorded(step, torch.arange(config.batch_size, device=device), model, optimizer)

    def update(rows: Tensor, rate: float) -> Tensor:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # the one that the recorded step reads
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return run(rows)

    return update


def _rank(entry: dict[str, float]) -> tuple[float, float]:
    """What makes one epoch better than another: the error on validation data, then the loss."""
    return entry["val_error"], entry["val_loss"]


def _failed(problem: str, state: State) -> dict[str, Any]:
    return {"status": "failed", "reason": f"{problem} (epoch {state.epoch}); try a smaller `lr`"}


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed for one epoch of one run."""
    return (seed * 1_000_003 + epoch * 7919 + 17) % 2**63


def learning_rate(config: RunConfig, progress: float) -> float:
    """The learning rate at a share of the training, 0 to 1."""
    if config.schedule == "one-cycle":
        if progress < 0.3:
            return config.lr * (0.04 + 0.96 * (1 - math.cos(math.pi * progress / 0.3)) / 2)
        return config.lr * (1 + math.cos(math.pi * (progress - 0.3) / 0.7)) / 2
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * progress)) / 2
    if config.schedule == "step":
        return config.lr * 0.1 ** ((progress >= 0.5) + (progress >= 0.75))
    return config.lr


@torch.no_grad()
def evaluate(
    model: Network, images: ImageSet, precision: str = "float32", between_batches: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Error, mean loss and error by scale of a model on a set of images."""
    model.eval()
    wrong, total = [], torch.zeros((), dtype=torch.float64, device=images.device)
    half = torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16")
    for x, labels in images.batches(EVALUATION_BATCH.get(images.device.type, 500)):
        between_batches()
        with arithmetic(precision), half:
            logits = model(x).float()
        total += F.cross_entropy(logits, labels, reduction="sum").double()
        wrong.append(logits.argmax(1) != labels)
    missed = torch.cat(wrong).cpu().numpy()
    by_scale = [
        {"from": low, "to": high, "images": int(chosen.sum()), "error": float(missed[chosen].mean())}
        for (low, high), chosen in split_by_scale(images.sizes.cpu().numpy())
    ]
    return {"error": float(missed.mean()), "loss": float(total) / len(images), "by_scale": by_scale}


def split_by_scale(scales: NDArray[Any]) -> Iterator[tuple[tuple[float, float], NDArray[np.bool_]]]:
    """The bins of scale that are not empty, and which images each one holds; the last one holds its end too."""
    for low, high in SCALE_BINS:
        chosen = (scales >= low) & ((scales < high) | ((low, high) == SCALE_BINS[-1]))
        if chosen.any():
            yield (low, high), chosen
