"""One training: data on the device, one plain loop, the best model on validation data, tested once.

A run lives in a directory: config.json, metrics.jsonl (one line an epoch), last-*.safetensors (where to go on),
model.safetensors (the model that validation chose) and result.json. Every file is written atomically, by one process
at a time; a run that was killed at any moment goes on from its last checkpoint and ends with the same numbers as one
that was not (on a GPU, as far as cuDNN chooses the same algorithms again).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

import scalesteer
from scalesteer.data import ImageSet, load_split
from scalesteer.files import LockedError, locked, require
from scalesteer.models import Network, count_parameters, create_model
from scalesteer.training import checkpoint
from scalesteer.training.checkpoint import CheckpointError
from scalesteer.training.config import RunConfig, differences

EVALUATION_BATCH = {"cpu": 100, "cuda": 1000}  # where a step is slow a request to stop must not wait for many images
SAVE_EVERY_S = 60.0
SAVE_EPOCH_S = {"cuda": 3.0}  # epochs that take a fraction of a second need no checkpoint each
STOP_WITHIN_S = 3.0
CHANGING = ("epoch", "step", "losses", "history", "seconds")  # the fields of State that are plain values
SCALE_BINS = tuple(itertools.pairwise(round(0.3 + 0.1 * i, 1) for i in range(8)))


class RunError(ValueError):
    """A run that cannot start or go on."""


class BusyError(RunError):
    """A run that another process is working on."""


@dataclass
class State:
    """Everything that changes while training."""

    model: Network
    optimizer: torch.optim.AdamW
    best: dict[str, Tensor] = field(default_factory=dict)
    epoch: int = 0
    step: int = 0  # within the epoch
    losses: list[float] = field(default_factory=list)  # of the epoch's steps so far
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    saved: float = field(default_factory=time.perf_counter)  # when the last checkpoint was written


def train(config: RunConfig, directory: Path, *, device: str = "auto", data_dir: Path | None = None) -> dict[str, Any]:
    """Train, or go on training, and return the result; a run that has one returns it at once.

    SIGINT and SIGTERM write a checkpoint and leave, as KeyboardInterrupt and SystemExit(143). A checkpoint is also
    written after every epoch, if that takes seconds, and every minute.

    Args:
        config: What to train.
        directory: The run's own directory, made if it is not there.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
        data_dir: Where the original files are, if not in the cache.

    Returns:
        The content of result.json. Its `status` is "finished", or "failed" with a `reason` if the loss stopped being
        a number: such a run would fail again, and is never averaged.

    Raises:
        BusyError: If another process works on the directory.
        RunError: If the directory holds another configuration's run or cannot be written to, the device is not there
            or its memory does not suffice. What was saved stays, and the same call goes on from there.
    """
    result = saved_result(config, directory)
    if result is None:
        place = pick_device(device)
        with _claim(config, directory):
            result = saved_result(config, directory) or _train(config, directory, place, data_dir)
    if result["status"] == "finished":  # nothing goes on from here
        for path in [*_checkpoints(directory), *directory.glob("damaged-*")]:
            path.unlink(missing_ok=True)
    return result


def _train(config: RunConfig, directory: Path, device: torch.device, data_dir: Path | None) -> dict[str, Any]:
    used = ("train", "val") if config.tuning else ("train", "val", "test")
    parts = {part: load(config, part, data_dir).to(device) for part in used}
    images, steps = parts["train"], len(parts["train"]) // config.batch_size
    own_random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with arithmetic(config.precision), own_random, _Stop() as stop:
        state = _fresh_state(config, images, device)
        _resume(state, config, directory)
        update = _update(state, config, images)
        tqdm, done = require("tqdm").tqdm, state.epoch * steps + state.step
        with tqdm(total=config.epochs * steps, initial=done, unit="step", desc=config.name, disable=None) as bar:
            while state.epoch < config.epochs:
                failure = _train_epoch(state, config, images, update, stop, directory, bar)
                val = {} if failure else evaluate(state.model, parts["val"], config.precision, stop)
                if stop.requested and not failure:
                    _save(state, directory, config)
                    stop.leave()
                if not failure and not math.isfinite(val["loss"]):
                    failure = f"the loss on validation data became {val['loss']} after step {(state.epoch + 1) * steps}"
                if failure:
                    reason = f"{failure} (epoch {state.epoch}); try a smaller `lr`"
                    return _finish(directory, config, state, images, {"status": "failed", "reason": reason})
                _end_epoch(state, val, directory, config)
                bar.set_postfix(loss=f"{state.history[-1]['loss']:.3f}", val_error=f"{100 * val['error']:.2f}%")
        best = min(state.history, key=lambda h: (h["val_error"], h["val_loss"]))
        outcome: dict[str, Any] = {"status": "finished"}
        if not config.tuning:  # the one look at the test set, with the model that validation chose
            state.model.load_state_dict(state.best)
            test = evaluate(state.model, parts["test"], config.precision, stop)
            if stop.requested:
                stop.leave()
            outcome |= {"test_error": test["error"], "test_error_by_scale": test["by_scale"]}
        about = {"config": config.to_dict(), "val_error": best["val_error"], "epoch": best["epoch"]}
        checkpoint.save(directory / "model.safetensors", state.best, about)
        outcome |= {"val_error": best["val_error"], "val_loss": best["val_loss"], "best_epoch": best["epoch"]}
        return _finish(directory, config, state, images, outcome)


def _train_epoch(
    state: State, config: RunConfig, images: ImageSet, update: Update, stop: _Stop, directory: Path, bar: Any
) -> str | None:
    """The rest of an epoch. Returns what went wrong, or None."""
    state.model.train()
    steps = len(images) // config.batch_size
    order = torch.Generator().manual_seed(_mix(config.seed, state.epoch))
    if state.step == 0:
        torch.manual_seed(_mix(config.seed + 1, state.epoch))  # dropout
    losses = torch.zeros(steps, device=images.device)  # read once an epoch: reading makes a GPU wait
    losses[: state.step] = torch.tensor(state.losses[: state.step])
    batches = images.order(order).split(config.batch_size)
    start = time.perf_counter()
    for step in range(state.step, steps):  # the earlier ones were done before an interruption
        rate = learning_rate(config, (state.epoch * steps + step) / (config.epochs * steps))
        losses[step] = update(batches[step], rate)
        bar.update()
        now = time.perf_counter()
        if stop.requested or now - state.saved > SAVE_EVERY_S:
            state.step, state.losses = step + 1, losses[: step + 1].tolist()
            state.seconds, start = state.seconds + now - start, now
            if _broken(state, steps) is None:
                _save(state, directory, config)
            if stop.requested:
                stop.leave()
    state.losses, state.step = losses.tolist(), steps
    state.seconds += time.perf_counter() - start
    return _broken(state, steps)


Result = TypeVar("Result")
Update = Callable[[Tensor, float], Tensor]  # one step, with these images and this learning rate; gives the loss


def _update(state: State, config: RunConfig, images: ImageSet) -> Update:
    """The step of a training. On CUDA it is recorded once and replayed: to launch its kernels one by one takes longer
    than they do."""
    model, optimizer, device = state.model.train(), state.optimizer, images.device

    def step(rows: Tensor) -> Tensor:
        x, labels = images.take(rows)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = F.cross_entropy(model(x), labels, label_smoothing=config.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def update(rows: Tensor, rate: float) -> Tensor:
        optimizer.param_groups[0]["lr"] = rate
        return step(rows)

    if device.type != "cuda" or state.epoch == config.epochs:
        return update

    rows, rate = torch.arange(config.batch_size, device=device), optimizer.param_groups[0]["lr"]
    with _unchanged(state, device), torch.cuda.device(device):
        warm_up(lambda: step(rows))
        optimizer.zero_grad()
        graph, loss = capture(lambda: step(rows))

    def replay(chosen: Tensor, new_rate: float) -> Tensor:
        rows.copy_(chosen)
        rate.fill_(new_rate)
        graph.replay()
        return loss

    return replay


def warm_up(step: Callable[[], Any]) -> None:
    """Run a step on a stream that is not the default one, as capturing asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def capture(step: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A step as a CUDA graph, to be replayed, and the step's result, which every replay overwrites.

    The step must have been warmed up, and what it reads must live on: the graph does not own it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@contextmanager
def _unchanged(state: State, device: torch.device) -> Iterator[None]:
    """Undo, in place, what trial steps do to model, optimizer and random numbers."""
    tensors = list(state.model.state_dict().values())
    moments = [v for values in state.optimizer.state.values() for v in values.values()]
    before, random = [t.clone() for t in tensors + moments], torch.cuda.get_rng_state(device)
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors + moments, before, strict=True):
            tensor.copy_(value)
        if not moments:  # a new optimizer starts from zero
            for values in state.optimizer.state.values():
                for value in values.values():
                    value.zero_()
    torch.cuda.set_rng_state(random, device)


def _broken(state: State, steps: int) -> str | None:
    """The first loss of the epoch that is no number, in words."""
    for step, value in enumerate(state.losses):
        if not math.isfinite(value):
            return f"the loss became {value} at step {state.epoch * steps + step}"
    return None


def _end_epoch(state: State, val: dict[str, Any], directory: Path, config: RunConfig) -> None:
    entry = {
        "epoch": state.epoch,
        "loss": float(np.mean(state.losses)),
        "val_loss": val["loss"],
        "val_error": val["error"],
        "seconds": round(state.seconds, 3),
    }
    earlier = [(h["val_error"], h["val_loss"]) for h in state.history]
    if not earlier or (val["error"], val["loss"]) < min(earlier):
        state.best = {k: v.detach().clone() for k, v in state.model.state_dict().items()}
    state.history.append(entry)
    state.epoch, state.step, state.losses = state.epoch + 1, 0, []
    if time.perf_counter() - state.saved >= SAVE_EPOCH_S.get(state.model.input_std.device.type, 0):
        _save(state, directory, config)
    _write_metrics(state, directory)


def _write_metrics(state: State, directory: Path) -> None:
    lines = "".join(json.dumps(entry) + "\n" for entry in state.history)
    checkpoint.write_atomically(directory / "metrics.jsonl", lines.encode())


def split_by_scale(scales: NDArray[Any]) -> Iterator[tuple[tuple[float, float], NDArray[np.bool_]]]:
    """The bins of scale that are not empty, and which images each one holds; the last one holds its end too."""
    for low, high in SCALE_BINS:
        chosen = (scales >= low) & ((scales < high) | ((low, high) == SCALE_BINS[-1]))
        if chosen.any():
            yield (low, high), chosen


@torch.no_grad()
def evaluate(model: Network, images: ImageSet, precision: str = "float32", stop: _Stop | None = None) -> dict[str, Any]:
    """Error, mean loss and error by scale of a model on a set of images; cut short once a stop is requested."""
    model.eval()
    wrong, total = [], torch.zeros((), dtype=torch.float64, device=images.device)
    half = torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16")
    for x, labels in images.batches(EVALUATION_BATCH.get(images.device.type, 500)):
        if stop is not None and stop.requested:
            return {}
        with arithmetic(precision), half:
            logits = model(x).float()
        total += F.cross_entropy(logits, labels, reduction="sum").double()
        wrong.append(logits.argmax(1) != labels)
    missed = torch.cat(wrong).cpu().numpy()
    scales = images.sizes.cpu().numpy()
    by_scale = [
        {"from": low, "to": high, "images": int(chosen.sum()), "error": float(missed[chosen].mean())}
        for (low, high), chosen in split_by_scale(scales)
    ]
    return {"error": float(missed.mean()), "loss": float(total) / len(images), "by_scale": by_scale}


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


def load(config: RunConfig, part: str, data_dir: Path | None = None) -> ImageSet:
    """The images of a run."""
    images = load_split(part=part, data_dir=data_dir, **vars(config.data))
    return images.first(config.train_images) if part == "train" and config.train_images else images


def load_model(path: Path) -> tuple[Network, RunConfig]:
    """A trained model, in evaluation mode on the CPU.

    Args:
        path: A run's directory, its model.safetensors, or a checkpoint of a run that goes on (its best model so far).

    Raises:
        CheckpointError: If there is no model of ours, whole and finite.
    """
    if path.is_dir():
        found = [p for p in [path / "model.safetensors", *reversed(_checkpoints(path))] if p.exists()]
        if not found:
            raise CheckpointError(f"{path} holds no model: it must be the directory of a run.")
        path = found[0]
    tensors, about = checkpoint.load(path)
    try:
        config = RunConfig.from_dict(about["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say which model it holds: {error}.") from error
    if "history" in about:
        tensors = _below("best." if about["history"] else "model.", tensors)
    model = create_model(config.model, config.dataset, **config.model_options)
    checkpoint.load_into(model, tensors, str(path))
    return model.eval(), config


def pick_device(name: str) -> torch.device:
    """A device by name; ``"auto"`` is the accelerator if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise RunError(f"`device` {name!r} is not available here; available: {', '.join(here)}.") from error


def saved_result(config: RunConfig, directory: Path) -> dict[str, Any] | None:
    """The result in a run's directory, if there is one; touches nothing.

    Raises:
        RunError: If the directory holds another configuration's run, or what it holds cannot be read.
    """
    path = directory / "config.json"
    try:
        if not path.exists():
            return None
        other = RunConfig.from_dict(json.loads(path.read_text()))
        if other != config:
            raise RunError(f"{directory} holds another run ({differences(other, config)}); choose another directory.")
        path = directory / "result.json"
        return json.loads(path.read_text()) if path.exists() else None
    except RunError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}); choose another directory.") from error


@contextmanager
def _claim(config: RunConfig, directory: Path) -> Iterator[None]:
    """Make a run's directory and hold it; what goes wrong inside is said in terms of the run."""
    kept = "what was saved before is kept, and the same command goes on from there"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / ".lock"):
            for left in directory.glob(".*.tmp"):
                left.unlink()
            if not (directory / "config.json").exists():
                content = json.dumps(config.to_dict(), indent=1).encode()
                checkpoint.write_atomically(directory / "config.json", content)
            yield
    except LockedError as error:
        raise BusyError(str(error)) from error
    except OSError as error:
        raise RunError(f"{directory} cannot be written to ({error.strerror or error}); {kept}.") from error
    except (MemoryError, RuntimeError) as error:
        # The CPU's allocator has no exception of its own.
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(error):
            raise
        raise RunError(f"out of memory with `batch_size` {config.batch_size}: choose a smaller one; {kept}.") from error


def _fresh_state(config: RunConfig, images: ImageSet, device: torch.device) -> State:
    torch.manual_seed(config.seed)
    model = create_model(config.model, config.dataset, **config.model_options)
    model.input_std.fill_(images.std)
    model.to(device)
    on_gpu = device.type == "cuda"  # there a step is recorded, and reads the learning rate from a tensor
    rate: Any = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, weight_decay=config.weight_decay, capturable=on_gpu, fused=on_gpu or None
    )
    return State(model, optimizer)


def _save(state: State, directory: Path, config: RunConfig) -> None:
    """Write a checkpoint beside the previous one, which stays until the next."""
    tensors = {f"model.{k}": v for k, v in state.model.state_dict().items()}
    tensors |= {f"best.{k}": v for k, v in state.best.items()}
    names = [name for name, _ in state.model.named_parameters()]
    for index, values in state.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{names[index]}.{k}": v for k, v in values.items()}
    tensors["random"] = torch.get_rng_state()
    device = state.model.input_std.device
    if device.type == "cuda":
        tensors["random_cuda"] = torch.cuda.get_rng_state(device)
    about = {"config": config.to_dict(), **{k: getattr(state, k) for k in CHANGING}}
    existing = _checkpoints(directory)
    number = 1 + (int(existing[-1].stem.rpartition("-")[2]) if existing else 0)
    checkpoint.save(directory / f"last-{number:06d}.safetensors", tensors, about)
    for old in existing[:-1]:
        old.unlink()
    state.saved = time.perf_counter()


def _checkpoints(directory: Path) -> list[Path]:
    return sorted(directory.glob("last-*.safetensors"))


def _resume(state: State, config: RunConfig, directory: Path) -> None:
    """Go on from the newest checkpoint that is whole, saying so if it is not the newest; put the others aside."""
    complaint = ""
    for path in reversed(_checkpoints(directory)):
        try:
            tensors, about = checkpoint.load(path)
            if about.get("config") != config.to_dict():
                raise CheckpointError(f"{path} belongs to another run.")
            checkpoint.load_into(state.model, _below("model.", tensors), str(path))
        except CheckpointError as error:
            complaint += f"{error} "
            path.replace(path.with_name(f"damaged-{path.name}"))
            continue
        if complaint:
            print(f"scalesteer: {complaint}Going on from {path.name}, the one before.", file=sys.stderr)
        for key in CHANGING:
            setattr(state, key, about[key])
        device = state.model.input_std.device
        state.best = {k: v.to(device) for k, v in _below("best.", tensors).items()}
        saved = state.optimizer.state_dict()
        for index, (name, _) in enumerate(state.model.named_parameters()):
            saved["state"][index] = _below(f"optimizer.{name}.", tensors)
        state.optimizer.load_state_dict(saved)
        torch.set_rng_state(tensors["random"])
        if "random_cuda" in tensors and device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random_cuda"], device)
        _write_metrics(state, directory)  # a crash may have come between the checkpoint and them
        return
    if complaint:
        print(f"scalesteer: {complaint}There is no other: starting from the beginning.", file=sys.stderr)


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _finish(
    directory: Path, config: RunConfig, state: State, images: ImageSet, outcome: dict[str, Any]
) -> dict[str, Any]:
    """Write the result, the last file of a run."""
    result = {
        **outcome,
        "identity": config.identity,
        "config": config.to_dict(),
        "parameters": count_parameters(state.model),
        "seconds": round(state.seconds, 1),
        "history": state.history,
        "environment": {"command": config.command, **environment(images)},
    }
    checkpoint.write_atomically(directory / "result.json", json.dumps(result, indent=1).encode())
    return result


def environment(images: ImageSet) -> dict[str, Any]:
    """What a number depends on beside the configuration."""
    device = images.device
    return {
        "commit": commit(),
        "scalesteer": scalesteer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "data": {k: v for k, v in images.about.items() if k != "part"},
    }


def commit() -> str | None:
    """The commit of the checkout this runs from, marked if it was changed since; None outside of one."""
    if "SCALESTEER_COMMIT" in os.environ:
        return os.environ["SCALESTEER_COMMIT"]
    try:
        shown = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip()


def _mix(seed: int, epoch: int) -> int:
    """A seed for one epoch of one run."""
    return (seed * 1_000_003 + epoch * 7919 + 17) % 2**63


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """TF32 products only where they are asked for (torch allows them in convolutions by default), and the fastest of
    cuDNN's algorithms for each shape."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    products.allow_tf32 = cudnn.allow_tf32 = precision != "float32"
    cudnn.benchmark = True
    try:
        yield
    finally:
        products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


class _Stop:
    """Turns SIGINT and SIGTERM into a request that the loop honours after its current step.

    If that takes longer than `STOP_WITHIN_S`, or the request is repeated, it leaves at once; the last checkpoint, at
    most `SAVE_EVERY_S` older, stands.
    """

    def __init__(self) -> None:
        self.requested = 0

    def __enter__(self) -> _Stop:
        self.before = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
                self.before[number] = signal.signal(number, self._note)
        except ValueError:  # not in the main thread: whoever runs that handles signals
            self.before.clear()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.requested and kind is None:  # asked after the last look
            self.leave()

    def _note(self, number: int, frame: object) -> None:
        if self.requested:
            self.leave()
        elif number != signal.SIGALRM:
            self.requested = number
            signal.setitimer(signal.ITIMER_REAL, STOP_WITHIN_S)

    def leave(self) -> None:
        if self.requested == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.requested)
