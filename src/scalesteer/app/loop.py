"""The training loop, from top to bottom: epochs, steps, validation, the best model, one look at the test set."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from scalesteer.app.augment import Augmentation
from scalesteer.app.config import RunConfig
from scalesteer.app.device import arithmetic, recorded
from scalesteer.app.distributed import ALONE, Processes
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import ImageSet, SizedSpec
from scalesteer.models import DATASETS, create_model, network_of, set_input_statistics
from scalesteer.models.network import Task
from scalesteer.models.scaled import ScaledNetwork

EVALUATION_BATCH = {"cpu": 100, "cuda": 1000}  # where a step is slow a request to stop must not wait for many images
EVALUATION_PIXELS = {"cpu": 1 << 18, "cuda": 1 << 24}  # in such a batch
MOST_SIZES = 64  # that have an error each; of more, bins have one
SCALE_BINS = tuple(itertools.pairwise(round(0.3 + 0.1 * i, 1) for i in range(8)))  # and more, see split_by_scale


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


def initial_state(config: RunConfig, images: ImageSet) -> State:
    """A training that has not begun, on the device of the training images."""
    torch.manual_seed(config.seed)
    model = make_model(config, find_task(config, images))
    std, mean = images.std, images.mean if config.photographs else 0.0
    if config.images:  # of own pictures a whole channel may be empty
        std = tuple(value or 1.0 for value in std) if isinstance(std, tuple) else std or 1.0
    set_input_statistics(model, std, mean)
    model.to(images.device)
    on_gpu = images.device.type == "cuda"
    rate: Any = torch.tensor(config.lr, device=images.device) if on_gpu else config.lr  # a recorded step reads a tensor
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, weight_decay=config.weight_decay, capturable=on_gpu, fused=on_gpu or None
    )
    steps = len(images) // config.batch_for(len(images))  # in an epoch: whole batches only
    return State(model, optimizer, torch.zeros(steps, device=images.device))


def find_task(config: RunConfig, images: ImageSet) -> Task:
    """What a run's images ask of its network: the dataset's task, or what is found in the user's own pictures."""
    if config.images is None:
        return DATASETS[config.dataset]
    height, width = images.images.shape[-2:]
    classes = tuple(images.about["classes"])
    return Task(images.channels, len(classes), (height, width), classes, config.fit)


def make_model(config: RunConfig, task: Task) -> nn.Module:
    """The network of a run, with new weights; its `task` is that of the run."""
    size: Any = {"in_chans": task.in_chans, "num_classes": task.num_classes, "image_size": task.image_size}
    model: nn.Module = create_model(config.model, **size, **config.model_options)
    network_of(model).task = task
    return model


def fit(
    state: State,
    config: RunConfig,
    parts: dict[str, ImageSet],
    test: Iterable[ImageSet],
    watcher: Watcher,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Train to the end, from wherever the state is, and test the model that validation chose.

    `parts` are "train" and "val"; `test` gives the test images, a part of them at a time. Several `processes` have the
    same images and states, call this together and return the same.
    Returns `status` "finished" with the errors, or "failed" with a `reason` if a loss was no finite number.
    """
    model, images, steps = state.model, parts["train"], len(state.losses)
    update = None
    while state.epoch < config.epochs:
        if update is None or state.epoch == config.one_size_epochs:
            update = None  # so that the memory of a recorded step is free before the next one is recorded
            look_at(model, config, state.epoch)
            update = make_update(state, config, images, processes)
        model.train()
        if state.step == 0:
            torch.manual_seed(epoch_seed(config.seed + 1, state.epoch))  # all that is random in steps
        order = images.order(torch.Generator().manual_seed(epoch_seed(config.seed, state.epoch)))
        batches, clock = order.split(config.batch_for(len(images))), time.perf_counter()
        for step in range(state.step, steps):  # earlier ones were done before an interruption
            progress = (state.epoch * steps + step) / (config.epochs * steps)
            rows = batches[step].chunk(processes.count)[processes.rank]
            if processes.count > 1:  # each draws its own random numbers, the same ones after an interruption
                torch.manual_seed(step_seed(config.seed + 1, state.epoch, step * processes.count + processes.rank))
            state.losses[step] = processes.mean(update(rows, learning_rate(config, progress)))
            state.step += 1
            state.seconds, clock = state.seconds + time.perf_counter() - clock, time.perf_counter()
            watcher.after_step(state)
        losses = state.losses.tolist()  # waits for a GPU
        state.seconds += time.perf_counter() - clock
        for step, loss in enumerate(losses):
            if not math.isfinite(loss):
                return _failed(f"the loss became {loss} at step {state.epoch * steps + step}", state)

        val = evaluate(model, parts["val"], config.precision, lambda: watcher.between_batches(state), processes)
        if not math.isfinite(val["loss"]):
            after = (state.epoch + 1) * steps
            return _failed(f"the loss on validation data became {val['loss']} after step {after}", state)
        entry = {"epoch": state.epoch, "loss": float(np.mean(losses)), "val_loss": val["loss"]}
        entry |= {"val_error": val["error"], "seconds": round(state.seconds, 3)}
        state.history.append(entry)
        if best_epoch(state.history, config) is entry:
            state.best = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        state.epoch, state.step = state.epoch + 1, 0
        watcher.after_epoch(state)

    best = best_epoch(state.history, config)
    outcome: dict[str, Any] = {"status": "finished"}
    if not config.tuning:  # the one look at the test set
        model.load_state_dict(state.best)
        tested = as_tested(model, config)
        found = evaluate(tested, test, config.precision, lambda: watcher.between_batches(state), processes)
        outcome |= {"test_error": found["error"]}
        if config.images is None or len(found["by_scale"]) > 1:  # of own pictures the sizes may be unknown
            outcome |= {"test_error_by_scale": found["by_scale"]}
        if config.images is not None:
            outcome |= {"test_error_by_class": found["by_class"]}
        outcome |= {"size_correlation": found["size_correlation"]} if "size_correlation" in found else {}
        outcome |= by_training_size(found["by_scale"], config)
    return outcome | {"val_error": best["val_error"], "val_loss": best["val_loss"], "best_epoch": best["epoch"]}


def look_at(model: nn.Module, config: RunConfig, epoch: int) -> None:
    """Let a network with channels look at the image at the sizes of an epoch."""
    if isinstance(model, ScaleChannels) and config.channels is not None:
        model.scales = (1.0,) if epoch < config.one_size_epochs else config.channels


def make_update(
    state: State, config: RunConfig, images: ImageSet, processes: Processes = ALONE
) -> Callable[[Tensor, float], Tensor]:
    """One step: train on the images of these rows with this learning rate, and return the loss."""
    model, optimizer, device = state.model.train(), state.optimizer, images.device
    network = processes.replicate(model)
    change, weights = _make_augmentation(config), _class_weights(images) if config.class_weights else None

    def step(rows: Tensor) -> Tensor:
        x, labels = images.take(rows)
        x = x if change is None else change(x)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            logits = network(x)
            if weights is None:
                loss = F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
            else:
                losses = F.cross_entropy(logits, labels, label_smoothing=config.label_smoothing, reduction="none")
                loss = (weights[labels] * losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Callable[[Tensor], Tensor] = step
    if device.type == "cuda" and processes.count == 1:
        run = recorded(step, torch.arange(config.batch_for(len(images)), device=device), model, optimizer)

    def update(rows: Tensor, rate: float) -> Tensor:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # the one that the recorded step reads
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return run(rows)

    return update


def _make_augmentation(config: RunConfig) -> Augmentation | None:
    change = Augmentation(config.resize or (1.0, 1.0), config.flip, config.shift)
    if change == Augmentation():
        return None
    return replace(change, mirrored=config.photographs, antialias=config.resize_resampler == "antialias")


def _class_weights(images: ImageSet) -> Tensor:
    """A factor for each class, so that all have the same sum over the images; over all images their mean is 1."""
    counts = torch.bincount(images.labels).double()
    return (len(images) / (counts.clamp(min=1) * (counts > 0).sum())).float()


def best_epoch(history: Sequence[Mapping[str, float]], config: RunConfig) -> Mapping[str, float]:
    """The epoch with the lowest error on validation data, then the lowest loss; on a tie the earlier one.

    One that did not look at all sizes yet is no rival of those that do.
    """
    rivals = history[config.one_size_epochs :] or history
    return min(rivals, key=lambda entry: (entry["val_error"], entry["val_loss"]))


def _failed(problem: str, state: State) -> dict[str, Any]:
    return {"status": "failed", "reason": f"{problem} (epoch {state.epoch}); try a smaller `lr`"}


def epoch_seed(seed: int, epoch: int) -> int:
    return (seed * 1_000_003 + epoch * 7919 + 17) % 2**63


def step_seed(seed: int, epoch: int, part: int) -> int:
    """A seed for one process's part of a step, the parts of all steps of the epoch counted."""
    return epoch_seed(epoch_seed(seed, epoch), part)


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
    model: nn.Module,
    images: ImageSet | Iterable[ImageSet],
    precision: str = "float32",
    between_batches: Callable[[], None] = lambda: None,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Error, mean loss and error by size of a model on a set of images, or on several that are one after another here.

    Returns `error`, `loss`, the number of `images` and `by_scale`, rows of `from`, `to`, `images` and `error`: one for
    each size if the sizes are few, or else for each of `SCALE_BINS`; and `by_class`, rows of `class`, `images` and
    `error`, with the names of the classes if the images have them. A model with scale channels also gets
    `size_correlation`, the rank correlation of the size that answered with the true one, if both vary.

    Several `processes` call this together: they take the batches in turns, so that each image is seen once, in the
    same batch as with one process, and all return the same.
    """
    model.eval()
    channels, total, count, binned = isinstance(model, ScaleChannels), 0.0, 0, False
    wrong, sizes, answered, true = [], [], [], []
    names: Sequence[Any] = ()
    for part in (images,) if isinstance(images, ImageSet) else images:
        half = torch.autocast(part.device.type, torch.bfloat16, enabled=precision == "bf16")
        loss = torch.zeros((), dtype=torch.float64, device=part.device)
        for i, (x, labels) in enumerate(part.batches(evaluation_batch(model, part))):
            if i % processes.count == 0:
                between_batches()
            if i % processes.count != processes.rank:  # another one's: it adds what is zero here
                wrong.append(torch.zeros_like(labels, dtype=torch.bool))
                answered += [torch.zeros(len(x), device=x.device)] if channels else []
                continue
            with arithmetic(precision), half:
                answer, size = model(x, return_scales=True) if channels else (model(x), None)
            logits = answer.float()
            loss += F.cross_entropy(logits, labels, reduction="sum").double()
            wrong.append(logits.argmax(1) != labels)
            answered += [] if size is None else [size]
        total, count = total + float(processes.total(loss)), count + len(part)
        sizes.append(part.sizes.cpu().numpy())
        true.append(part.labels.cpu().numpy())
        names = part.about.get("classes", ())
        binned = binned or "scale_range" in part.about  # its sizes were drawn from a range
    missed = processes.total(torch.cat(wrong).int()).bool().cpu().numpy()
    true_sizes, classes = np.concatenate(sizes), np.concatenate(true)

    def row(chosen: NDArray[np.bool_]) -> dict[str, Any]:
        return {"images": int(chosen.sum()), "error": float(missed[chosen].mean())}

    by_scale = [{"from": low, "to": high} | row(c) for (low, high), c in split_by_scale(true_sizes, binned)]
    labels = np.unique(classes).tolist()
    by_class = [{"class": names[label] if names else label} | row(classes == label) for label in labels]
    found = {"error": float(missed.mean()), "loss": total / count, "by_scale": by_scale, "images": count}
    found |= {"by_class": by_class}
    if answered:
        answers = processes.total(torch.cat(answered)).cpu().numpy()
        if (correlation := rank_correlation(answers, true_sizes)) is not None:
            found["size_correlation"] = correlation
    return found


def with_channels(model: nn.Module, scales: tuple[float, ...], join: Any) -> ScaleChannels:
    """A trained network, plain or with channels, that looks at the image at these sizes; its weights are shared."""
    if isinstance(model, ScaleChannels):
        kept: Any = {name: getattr(model, name) for name in ("grid", "border", "border_mode", "multiple", "output")}
        return ScaledNetwork(model.net, scales, join, **kept)
    return ScaledNetwork(model, scales, join)


def as_tested(model: nn.Module, config: RunConfig) -> nn.Module:
    """A trained network as its run tests it: at the sizes of `test_channels`, if it has them."""
    return model if config.test_channels is None else with_channels(model, config.test_channels, config.join)


def pixels_seen(model: nn.Module, height: int, width: int) -> float:
    """How many pixels of an image a model looks at: in all channels, if it has them."""
    return model.pixels(height, width) if isinstance(model, ScaleChannels) else height * width


def evaluation_batch(model: nn.Module, images: ImageSet) -> int:
    """How many images go through a model at once: as many as memory has room for, with the area of all channels."""
    area, kind = pixels_seen(model, *images.images.shape[-2:]), images.device.type
    return max(1, min(EVALUATION_BATCH.get(kind, 500), int(EVALUATION_PIXELS.get(kind, 1 << 20) / area)))


def split_by_scale(
    scales: NDArray[Any], binned: bool = True
) -> Iterator[tuple[tuple[float, float], NDArray[np.bool_]]]:
    """The bins of scale that are not empty, and which images each one holds; the last one holds its end too.

    Below and above `SCALE_BINS` there are more where they are needed: 0 to 0.1, ..., 0.2 to 0.3; 1 to 2, 2 to 4, ...

    If not `binned`, each scale is a bin of its own, unless there are more than `MOST_SIZES`.
    """
    values = np.unique(scales)
    if not binned and len(values) <= MOST_SIZES:
        for value in values:
            size = float(f"{value:.6g}")  # without the digits that float32 adds
            yield (size, size), scales == value
        return
    bins, largest = [*itertools.pairwise((0.0, 0.1, 0.2, 0.3)), *SCALE_BINS], values.max(initial=0)
    while bins[-1][1] < largest:
        bins.append((bins[-1][1], 2 * bins[-1][1]))
    for low, high in bins:
        chosen = (scales >= low) & ((scales < high) | ((low, high) == bins[-1]))
        if chosen.any():
            yield (low, high), chosen


def by_training_size(by_scale: list[dict[str, Any]], config: RunConfig) -> dict[str, float]:
    """Mean errors inside and outside the training sizes, each size counting alike; none where all were trained."""
    if not isinstance(config.data, SizedSpec):
        return {}
    (low, high), inside, outside = config.data.train_sizes, list[float](), list[float]()
    for row in by_scale:
        trained = low * 0.99 <= row["from"] <= high * 1.01  # with room for rounded numbers
        (inside if trained else outside).append(row["error"])
    means = {"test_error_inside": inside, "test_error_outside": outside}
    return {name: float(np.mean(errors)) for name, errors in means.items() if outside and errors}


def rank_correlation(first: NDArray[Any], second: NDArray[Any]) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None if one of the two does not vary."""
    ranks = []
    for values in (first, second):
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        if len(counts) < 2:
            return None
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[places])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
