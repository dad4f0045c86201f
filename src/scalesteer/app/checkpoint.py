"""What a training needs to go on: saved from time to time and when it must stop, and restored to the same numbers."""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalesteer import files
from scalesteer.app.config import Run
from scalesteer.app.distributed import Processes
from scalesteer.app.estimate import in_words, work
from scalesteer.app.loggers import Logger
from scalesteer.app.loop import State, learning_rate
from scalesteer.app.networks import CheckpointError, below, checkpoints, read_checkpoint
from scalesteer.models import network_of
from scalesteer.pretrained import misfits

SAVE_EVERY_S = 60.0
SAVE_EPOCH_S = {"cuda": 3.0}  # epochs that take a fraction of a second need no checkpoint each
STOP_WITHIN_S, STOP_TOGETHER_S = 3.0, 20.0  # alone, and of several processes, which torchrun kills after 30

log = logging.getLogger("scalesteer.app")


class Checkpointer:
    """Looks after a training: saves it from time to time and when it must stop, and shows how far it is."""

    def __init__(
        self, run: Run, directory: Path, stop: Stop, bar: Any, processes: Processes, loggers: Sequence[Logger] = ()
    ) -> None:
        self.loggers = loggers
        self.run, self.directory, self.stop, self.bar, self.processes = run, directory, stop, bar, processes
        self.saved = self.logged = self.began = time.perf_counter()
        self.done = 0.0  # of the work, since then

    def after_step(self, state: State) -> None:
        self.bar.update()
        self.done += work(self.run, state.epoch)
        if state.step < len(state.losses) and self._is_due():  # an epoch's own line comes after it
            steps, loss = f"step {state.step} of {len(state.losses)}", float(state.losses[state.step - 1])
            self._log(f"epoch {state.epoch + 1} of {self.run.training.epochs}: {steps}, loss {loss:.3f}", state)
        if time.perf_counter() - self.saved > SAVE_EVERY_S:
            self.save(state)
        self._leave_if_asked(state)

    def between_batches(self, state: State) -> None:
        if self._is_due():
            self._log("measuring the error")
        self._leave_if_asked(state)

    def _leave_if_asked(self, state: State) -> None:
        # All stop at the same step; and here, where there is time, they wait for the one that saves.
        if requested := self.processes.largest(self.stop.requested):
            self.save(state)
            self.stop.leave(requested)

    def after_epoch(self, state: State) -> None:
        if self.processes.rank == 0:
            if time.perf_counter() - self.saved >= SAVE_EPOCH_S.get(state.losses.device.type, 0):
                self.save(state)
            write_metrics(state, self.run, self.directory)
            numbers = {name: number for name, number in state.history[-1].items() if name != "epoch"}
            for logger in self.loggers:
                logger.log(state.epoch - 1, numbers)
            loss, error = f"{state.history[-1]['loss']:.3f}", f"{100 * state.history[-1]['val_error']:.2f}%"
            self.bar.set_postfix(loss=loss, val_error=error)
            if self.bar.disable:
                said = f"epoch {state.epoch} of {self.run.training.epochs}: loss {loss}, validation error {error}"
                self._log(said, state)
        self.processes.largest(0)  # wait for it

    def _is_due(self) -> bool:
        """Whether to say how far it is: where there is no terminal, from time to time."""
        return self.bar.disable and not self.processes.rank and time.perf_counter() - self.logged >= files.LOG_EVERY_S

    def _log(self, message: str, state: State | None = None) -> None:
        """Say it, and how long the rest of the training takes if all goes on as it did."""
        self.logged = time.perf_counter()
        if state is not None and self.done:
            steps, epochs = len(state.losses), range(state.epoch, self.run.training.epochs)
            rest = sum(steps * work(self.run, epoch) for epoch in epochs) - state.step * work(self.run, state.epoch)
            message += f", about {in_words(rest * (self.logged - self.began) / self.done)} left" if rest > 0 else ""
        log.info("%s", message)

    def save(self, state: State) -> None:
        """Write a checkpoint beside the previous one, which stays until the next; the first process does it for all."""
        if self.processes.rank:
            return
        if not bool(state.losses[: state.step].isfinite().all()):  # what has failed stays as it was before
            return
        about = {name: getattr(state, name) for name in ("epoch", "step", "history", "seconds")}
        about |= {"run": self.run.to_dict(), "losses": state.losses[: state.step].tolist()}
        about |= {"task": network_of(state.model).task._asdict()}
        tensors = {f"model.{k}": v for k, v in state.model.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in state.best.items()}
        for name, parameter in state.model.named_parameters():
            tensors |= {f"optimizer.{name}.{k}": v for k, v in state.optimizer.state.get(parameter, {}).items()}
        tensors["random"] = torch.get_rng_state()
        if state.losses.device.type == "cuda":
            tensors["random_cuda"] = torch.cuda.get_rng_state(state.losses.device)
        existing = checkpoints(self.directory)
        path = self.directory / f"last-{1 + max(existing, default=0):06d}.safetensors"
        files.write_atomically(path, files.encode(tensors, about))
        for old in list(existing.values())[:-1]:
            old.unlink()
        self.saved = time.perf_counter()


def write_metrics(state: State, run: Run, directory: Path) -> None:
    """A line for each epoch, with the learning rate of its last step."""
    lines, epochs, steps = "", run.training.epochs, len(state.losses)
    for epoch, entry in enumerate(state.history, start=1):
        rate = learning_rate(run.training, (epoch - 1 / steps) / epochs)
        lines += json.dumps({**entry, "lr": float(f"{rate:.6g}")}) + "\n"
    files.write_atomically(directory / "metrics.jsonl", lines.encode())


def newest_checkpoint(state: State, run: Run, directory: Path) -> files.Content | None:
    """The newest checkpoint that is whole, saying so if it is not the newest; the others are put aside."""
    complaint = ""
    for path in reversed(checkpoints(directory).values()):
        try:
            tensors, about = read_checkpoint(path)
            if problems := _problems(state, run, tensors, about):
                raise CheckpointError(f"{path} does not hold this training: {'; '.join(problems)}.")
        except CheckpointError as error:
            complaint += f"{error} "
            path.replace(path.with_name(f"damaged-{path.name}"))
            continue
        if complaint:
            log.warning("%sGoing on from %s, the one before.", complaint, path.name)
        return tensors, about
    if complaint:
        log.warning("%sThere is no other: starting from the beginning.", complaint)
    return None


def _problems(state: State, run: Run, tensors: dict[str, Tensor], about: dict[str, Any]) -> list[str]:
    """What keeps a training from going on with a checkpoint, to the same numbers as if it had not been interrupted."""
    if about.get("run") != run.to_dict():
        return ["it belongs to another run"]
    try:
        epoch, step, history = about["epoch"], about["step"], about["history"]
        metrics = [entry[k] for entry in history for k in ("loss", "val_loss", "val_error", "seconds")]
        sound = [entry["epoch"] for entry in history] == list(range(epoch)) and epoch <= run.training.epochs
        sound = sound and len(about["losses"]) == step <= len(state.losses)
        sound = sound and all(map(math.isfinite, [*metrics, *about["losses"], about["seconds"]]))
    except (KeyError, TypeError):
        sound = False
    if not sound:
        return ["what it says about epochs and losses is incomplete or wrong"]
    model = state.model.state_dict()
    expected = {f"{part}.{k}": v for part in ("model", "best")[: 2 if history else 1] for k, v in model.items()}
    for name, value in state.model.named_parameters():
        moments = {"exp_avg": value, "exp_avg_sq": value, "step": torch.zeros(())}
        expected |= {f"optimizer.{name}.{key}": moment for key, moment in moments.items()}
    expected["random"] = torch.get_rng_state()
    if "random_cuda" in tensors:  # it was begun on a GPU
        expected["random_cuda"] = tensors["random_cuda"]
    return misfits(expected, tensors)


def restore(state: State, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    for key in ("epoch", "step", "history", "seconds"):
        setattr(state, key, about[key])
    device = state.losses.device
    state.losses[: state.step] = torch.tensor(about["losses"])
    state.model.load_state_dict(below("model.", tensors))
    state.best = {k: v.to(device) for k, v in below("best.", tensors).items()}
    saved = state.optimizer.state_dict()
    for index, (name, _) in enumerate(state.model.named_parameters()):
        saved["state"][index] = below(f"optimizer.{name}.", tensors)
    state.optimizer.load_state_dict(saved)
    torch.set_rng_state(tensors["random"])
    if "random_cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random_cuda"], device)


class Stop:
    """Turns SIGINT and SIGTERM into a request that the loop honours after its current step.

    If that takes longer than `STOP_WITHIN_S`, or is requested again, it leaves at once; the last checkpoint stands.
    One of several processes has `STOP_TOGETHER_S`: it waits for the slowest, and none can go on without it.
    """

    requested = 0  # the signal's number

    def __init__(self, processes: Processes) -> None:
        self.within = STOP_TOGETHER_S if processes.count > 1 else STOP_WITHIN_S

    def __enter__(self) -> Stop:
        main = threading.current_thread() is threading.main_thread()  # whoever runs that handles signals
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM) if main else ()
        self.before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if kind is None:  # requested too late for the loop to see it
            self.leave(self.requested)

    def _note(self, number: int, frame: object) -> None:
        if self.requested:
            self.leave(self.requested)
        elif number != signal.SIGALRM:
            self.requested = number
            signal.setitimer(signal.ITIMER_REAL, self.within)

    def leave(self, number: int) -> None:
        """End as that signal would; 0 is none."""
        if number:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
