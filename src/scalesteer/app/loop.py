"""The training loop, from top to bottom: epochs, steps, validation, the best model, one look at the test set."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer.app.augment import Augmentation
from scalesteer.app.config import Run, batch_for, channel_options, model_options
from scalesteer.app.device import recorded
from scalesteer.app.distributed import ALONE, Processes
from scalesteer.app.evaluation import Answers, answer, by_training_size, errors, fit_channels
from scalesteer.app.folder import FolderSpec
from scalesteer.app.settings import Beyond, Network, Training
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import ImageSet
from scalesteer.fitting import FEWEST
from scalesteer.joining import check_calibration
from scalesteer.models import create_model, network_of, set_input_statistics
from scalesteer.models.external import load_weights
from scalesteer.models.network import Task
from scalesteer.models.scaled import ScaledNetwork

Augment = Callable[[Tensor], Tensor]  # of a batch (B, C, H, W) of numbers from 0 to 1, on the images' device


@dataclass
class State:
    """Everything that changes while training; between two steps it is always whole and can be saved."""

    model: nn.Module
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


def initial_state(run: Run, task: Task, images: ImageSet) -> State:
    """A training that has not begun, on the device of the training images."""
    torch.manual_seed(run.training.seed)
    model = make_model(run.network, task, pretrained=run.network.pretrained)
    std = images.std if isinstance(images.std, tuple) else (images.std,)
    std = tuple(value or 1.0 for value in std)  # of own pictures a whole channel may be empty
    set_input_statistics(model, std if len(std) > 1 else std[0], images.mean if task.ground == "surroundings" else 0.0)
    if run.network.weights is not None:
        load_weights(model, run.network.weights)
    model.to(images.device)
    on_gpu = images.device.type == "cuda"
    rate: Any = run.training.lr
    rate = torch.tensor(rate, device=images.device) if on_gpu else rate  # a recorded step reads a tensor
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, weight_decay=run.training.weight_decay, capturable=on_gpu, fused=on_gpu or None
    )
    steps = len(images) // batch_for(run.training, len(images))  # in an epoch: whole batches only
    return State(model, optimizer, torch.zeros(steps, device=images.device))


def make_model(network: Network, task: Task, pretrained: bool = False) -> nn.Module:
    """A network with new weights, for a task; or with those that whoever makes it fetches."""
    own: dict[str, Any] = {"pretrained": True} if pretrained else {}
    size: Any = {"in_chans": task.in_chans, "num_classes": task.num_classes, "image_size": task.image_size}
    model: nn.Module = create_model(network.model or "", **size, **own, **model_options(network, task))
    network_of(model).task = task
    return model


def fit(
    state: State,
    run: Run,
    parts: dict[str, ImageSet],
    test: Iterable[ImageSet],
    watcher: Watcher,
    processes: Processes = ALONE,
    augment: Augment | None = None,
) -> tuple[dict[str, Any], Answers | None]:
    """Train to the end, from wherever the state is, and test the model that validation chose.

    `parts` are "train" and "val"; `test` gives the test images, a part of them at a time. Several `processes` have the
    same images and states, call this together and return the same. `augment` changes every batch of training images.
    Returns `status` "finished" with the errors, or "failed" with a `reason` if a loss was no finite number; and what
    the network says of the test images, or with `tuning` of your own pictures for validation.
    """
    model, images, steps, training = state.model, parts["train"], len(state.losses), run.training
    update = None

    def between_batches() -> None:
        watcher.between_batches(state)

    while state.epoch < training.epochs and not out_of_patience(state.history, training):
        if update is None or state.epoch == training.one_size_epochs:
            update = None  # so that the memory of a recorded step is free before the next one is recorded
            use_sizes_of_epoch(model, run, state.epoch)
            update = make_update(state, training, images, processes, augment)
        model.train()
        if state.step == 0:
            torch.manual_seed(epoch_seed(training.seed + 1, state.epoch))  # all that is random in steps
        order = images.order(torch.Generator().manual_seed(epoch_seed(training.seed, state.epoch)))
        batches, clock = order.split(batch_for(training, len(images))), time.perf_counter()
        shares = [rows.chunk(processes.count)[processes.rank] for rows in batches[:steps]]
        for step in range(state.step, steps):  # earlier ones were done before an interruption
            progress = (state.epoch * steps + step) / (training.epochs * steps)
            for ahead in shares[step : step + 2]:  # while the network computes, the next ones are read
                images.prefetch(ahead)
            if processes.count > 1:  # each draws its own random numbers, the same ones after an interruption
                torch.manual_seed(step_seed(training.seed + 1, state.epoch, step * processes.count + processes.rank))
            state.losses[step] = processes.mean(update(shares[step], learning_rate(training, progress)))
            state.step += 1
            state.seconds, clock = state.seconds + time.perf_counter() - clock, time.perf_counter()
            watcher.after_step(state)
        losses = state.losses.tolist()  # waits for a GPU
        state.seconds += time.perf_counter() - clock
        for step, loss in enumerate(losses):
            if not math.isfinite(loss):
                return _failed(f"the loss became {loss} at step {state.epoch * steps + step}", state), None

        val = errors(answer(model, parts["val"], training.precision, between_batches, processes))
        if not math.isfinite(val["loss"]):
            after = (state.epoch + 1) * steps
            return _failed(f"the loss on validation data became {val['loss']} after step {after}", state), None
        entry = {"epoch": state.epoch, "loss": float(np.mean(losses)), "val_loss": val["loss"]}
        entry |= {"val_error": val["error"], "seconds": round(state.seconds, 3)}
        entry |= {"val_images": val["images"]} if isinstance(run.data, FolderSpec) else {}
        state.history.append(entry)
        if best_epoch(state.history, training.one_size_epochs) is entry:
            state.best = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        state.epoch, state.step = state.epoch + 1, 0
        watcher.after_epoch(state)

    best, answers = best_epoch(state.history, training.one_size_epochs), None
    outcome: dict[str, Any] = {"status": "finished"}
    model.load_state_dict(state.best)
    tested = as_tested(model, run.network)
    if isinstance(tested, ScaleChannels) and fits_join(run) and len(parts["val"]) >= FEWEST:
        found = processes.first(lambda: fit_channels(tested, parts["val"], training.precision).to_dict())
        tested.calibration = check_calibration(found["calibration"], tested.scales)
        outcome |= {"join": found}
    if not training.tuning or parts["val"].about.get("classes"):
        asked = parts["val"] if training.tuning else test  # the one look at the test set
        answers = answer(tested, asked, training.precision, between_batches, processes)
    if answers is not None and not training.tuning:
        found = errors(answers)
        outcome |= {"test_error": found["error"], "test_ece": found["ece"]}
        if not answers.classes or len(found["by_scale"]) > 1:  # of own pictures the sizes may be unknown
            outcome |= {"test_error_by_scale": found["by_scale"]}
        outcome |= {"test_error_by_class": found["by_class"]} if answers.classes else {}
        outcome |= {"size_correlation": found["size_correlation"]} if "size_correlation" in found else {}
        outcome |= by_training_size(found["by_scale"], getattr(run.data, "train_sizes", ()))
    outcome |= {"val_error": best["val_error"], "val_loss": best["val_loss"], "best_epoch": best["epoch"]}
    return outcome, answers


def fits_join(run: Run) -> bool:
    """Whether a run fits the join of its channels on the validation pictures: by default of your own."""
    return run.network.fit_join == "yes" or (run.network.fit_join == "auto" and isinstance(run.data, FolderSpec))


def use_sizes_of_epoch(model: nn.Module, run: Run, epoch: int) -> None:
    """Let a network with channels look at the image at the sizes of an epoch."""
    if isinstance(model, ScaleChannels) and run.network.channels:
        model.scales = (1.0,) if epoch < (run.training.one_size_epochs or 0) else run.network.channels


def make_update(
    state: State,
    training: Training,
    images: ImageSet,
    processes: Processes = ALONE,
    augment: Augment | None = None,
) -> Callable[[Tensor, float], Tensor]:
    """One step: train on the images of these rows with this learning rate, and return the loss."""
    model, optimizer, device = state.model.train(), state.optimizer, images.device
    network = processes.replicate(model)
    change = _make_augmentation(training, network_of(model).task)
    weights = _class_weights(images) if training.class_weights else None

    def loss_of(rows: Tensor) -> Tensor:
        x, labels = images.take(rows)
        x = x if change is None else change(x)
        x = x if augment is None else augment(x)
        with torch.autocast(device.type, torch.bfloat16, enabled=training.precision == "bf16"):
            logits = network(x)
            if weights is None:
                return F.cross_entropy(logits, labels, label_smoothing=training.label_smoothing)
            losses = F.cross_entropy(logits, labels, label_smoothing=training.label_smoothing, reduction="none")
            return (weights[labels] * losses).mean()

    def step(rows: Tensor) -> Tensor:
        optimizer.zero_grad()
        total, parts = None, rows.chunk(training.accumulate)
        for part in parts:  # of as many images each
            loss = loss_of(part) / len(parts) if len(parts) > 1 else loss_of(part)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        return total  # type: ignore[return-value]

    run: Callable[[Tensor], Tensor] = step
    on_gpu = device.type == "cuda" and images.images.device == device
    if on_gpu and processes.count == 1 and augment is None:  # what that does may not be recorded
        run = recorded(step, torch.arange(batch_for(training, len(images)), device=device), model, optimizer)

    def update(rows: Tensor, rate: float) -> Tensor:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # the one that the recorded step reads
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return run(rows)

    return update


def _make_augmentation(training: Training, task: Task) -> Augmentation | None:
    """What the settings say of random changes; None if there are none."""
    beyond: Beyond = (
        "black" if task.ground == "black" else "border" if task.classes else "mirror"
    )  # classes: own pictures
    change = Augmentation(
        resize=training.resize or (1.0, 1.0),
        beyond=training.beyond or beyond,
        antialias=training.resize_resampler == "antialias",
        **{name: getattr(training, name) for name in ("flip", "shift", "rotate", "colour", "blur")},
    )
    plain = Augmentation(beyond=change.beyond, antialias=change.antialias)
    return None if change == plain else change


def _class_weights(images: ImageSet) -> Tensor:
    """A factor for each class, so that all have the same sum over the images; over all images their mean is 1."""
    counts = torch.bincount(images.labels).double()
    return (len(images) / (counts.clamp(min=1) * (counts > 0).sum())).float()


def best_epoch(history: Sequence[Mapping[str, float]], one_size_epochs: int | None) -> Mapping[str, float]:
    """The epoch whose weights are kept.

    Of own pictures, which may be few for validation (`val_images` of an entry), it is the last one whose error there is
    at most a standard error above the lowest: an early epoch that is lower by less was lucky. Of a dataset it is
    :func:`lowest_epoch`.

    Example:
        >>> history = [{"val_error": e, "val_loss": 1.0, "val_images": 100} for e in (0.5, 0.2, 0.3, 0.22)]
        >>> best_epoch(history, 0)["val_error"]
        0.22
    """
    lowest = lowest_epoch(history, one_size_epochs)
    if "val_images" not in lowest:
        return lowest
    error = lowest["val_error"]
    most = error + math.sqrt(error * (1 - error) / max(1, lowest["val_images"]))
    return [entry for entry in history[one_size_epochs or 0 :] or history if entry["val_error"] <= most][-1]


def lowest_epoch(history: Sequence[Mapping[str, float]], one_size_epochs: int | None) -> Mapping[str, float]:
    """The epoch with the lowest error on validation data, then the lowest loss; on a tie the earlier one.

    The first `one_size_epochs` did not look at all sizes yet, and count only if there are no others.
    """
    rivals = history[one_size_epochs or 0 :] or history
    return min(rivals, key=lambda entry: (entry["val_error"], entry["val_loss"]))


def out_of_patience(history: Sequence[Mapping[str, float]], training: Training) -> bool:
    """Whether the best epoch lies so many epochs back that the training ends."""
    if training.patience is None or len(history) <= (training.one_size_epochs or 0):
        return False
    return len(history) - 1 - lowest_epoch(history, training.one_size_epochs)["epoch"] >= training.patience


def _failed(problem: str, state: State) -> dict[str, Any]:
    return {"status": "failed", "reason": f"{problem} (epoch {state.epoch}); try a smaller `lr`"}


def epoch_seed(seed: int, epoch: int) -> int:
    return (seed * 1_000_003 + epoch * 7919 + 17) % 2**63


def step_seed(seed: int, epoch: int, part: int) -> int:
    """A seed for one process's part of a step, the parts of all steps of the epoch counted."""
    return epoch_seed(epoch_seed(seed, epoch), part)


def learning_rate(training: Training, progress: float) -> float:
    """The learning rate at a share of the training, 0 to 1."""
    if training.channels_lr:
        share = (training.one_size_epochs or 0) / training.epochs
        if progress >= share:
            return training.channels_lr * (1 + math.cos(math.pi * (progress - share) / (1 - share))) / 2
        progress /= share
    if training.schedule == "one-cycle":
        if progress < 0.3:
            return training.lr * (0.04 + 0.96 * (1 - math.cos(math.pi * progress / 0.3)) / 2)
        return training.lr * (1 + math.cos(math.pi * (progress - 0.3) / 0.7)) / 2
    if training.schedule == "cosine":
        return training.lr * (1 + math.cos(math.pi * progress)) / 2
    if training.schedule == "step":
        return training.lr * 0.1 ** ((progress >= 0.5) + (progress >= 0.75))
    return training.lr


def with_channels(model: nn.Module, scales: tuple[float, ...], join: Any, **options: Any) -> ScaleChannels:
    """A trained network, plain or with channels, that looks at the image at these sizes; its weights are shared."""
    if isinstance(model, ScaleChannels):
        kept = {name: getattr(model, name) for name in ("grid", "border", "border_mode", "multiple", "output")}
        return ScaledNetwork(model.net, scales, join, **kept | options)
    return ScaledNetwork(model, scales, join, **options)


def as_tested(model: nn.Module, network: Network) -> nn.Module:
    """A trained network as its run tests it: at the sizes of `test_channels`, if it has them."""
    if not network.test_channels:
        return model
    return with_channels(model, network.test_channels, network.join, **channel_options(network, network_of(model).task))
