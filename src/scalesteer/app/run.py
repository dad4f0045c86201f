"""One run in its directory: trained, stopped and resumed at any moment, with the same numbers at the end.

The directory holds config.json, metrics.jsonl (one line per epoch), last-*.safetensors (checkpoints to go on from),
model.safetensors (the model that validation chose) and result.json; of your own pictures also split.csv (which of them
were trained on), report.html and model/, the network as a folder. Every file is written atomically, by one process at a
time; a run that was killed at any moment goes on from its last checkpoint and ends with the same numbers as one that
was not (on a GPU, as far as cuDNN chooses the same algorithms again).
"""

from __future__ import annotations

import json
import logging
import math
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalesteer import files, list_pretrained
from scalesteer.app.config import FEW_STEPS, MODEL_FIELDS, RunConfig
from scalesteer.app.device import arithmetic, environment, pick_device
from scalesteer.app.distributed import Processes, joined
from scalesteer.app.folder import Folder, FolderSpec, load_folder, scan_folder
from scalesteer.app.loop import State, as_tested, fit, initial_state, look_at, make_model
from scalesteer.app.report import write_report
from scalesteer.app.results import card
from scalesteer.datasets import ImageSet, SizedSpec, load_split
from scalesteer.models import DATASETS, count_parameters, network_of
from scalesteer.nn import evaluation_mode
from scalesteer.pretrained import (
    check_memory,
    from_pretrained,
    is_pretrained,
    misfits,
    read_config,
    read_task,
    save_pretrained,
)

SAVE_EVERY_S = 60.0
SAVE_EPOCH_S = {"cuda": 3.0}  # epochs that take a fraction of a second need no checkpoint each
STOP_WITHIN_S = 3.0
TEST_BYTES = 1 << 29  # of test images in memory at a time
SPLIT_FILE = "split.csv"
KEPT = "what was saved before is kept, and the same command goes on from there"

log = logging.getLogger("scalesteer.app")


class RunError(ValueError):
    """A run that cannot start or go on."""


class BusyError(RunError):
    """A run that another process is working on."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or not what is asked for."""


def train(config: RunConfig, directory: Path, *, device: str = "auto", data_dir: Path | None = None) -> dict[str, Any]:
    """Train, or go on training, and return the result; a run that has one returns it at once.

    `directory` is the run's own, made once data and device are known to be good. SIGINT and SIGTERM write a checkpoint
    and leave, as KeyboardInterrupt and SystemExit(143). A checkpoint is also written after every epoch, if that takes
    seconds, and every minute. Processes that torchrun started train together and all return the result.

    Returns:
        The content of result.json. Its `status` is "finished", or "failed" with a `reason` if the loss stopped being
        a number: such a run would fail again, and is never averaged.

    Raises:
        BusyError: If another process works on the directory.
        RunError: If the directory holds another configuration's run or cannot be written to, or the memory does not
            suffice. What was saved stays, and the same call goes on from there.
        LostError: If another process of the training ended or does not answer.
    """
    with joined() as processes:
        _check_shares(config.batch_size, processes)
        return _train_or_return(config, directory, device, data_dir, processes)


def _check_shares(batch: int, processes: Processes) -> None:
    """Raise a ValueError unless every process gets the same number of images of a batch."""
    if batch % processes.count:
        got = f"got {batch} and {processes.count}"
        raise ValueError(f"`batch_size` must be divisible by the number of processes ({got}).")


def _train_or_return(
    config: RunConfig, directory: Path, device: str, data_dir: Path | None, processes: Processes
) -> dict[str, Any]:
    # What the folder is now, once: labels and parts of all pictures follow from this.
    folder = scan_folder(config.data) if isinstance(config.data, FolderSpec) else None
    result: dict[str, Any] | None = processes.first(lambda: _saved_result(config, directory, folder), RunError)
    if result is None:
        files.require("safetensors.torch")  # told now, not when the first checkpoint is saved
        place = processes.own_device(pick_device(device))
        parts = {part: load(config, part, data_dir, folder=folder).to(place) for part in ("train", "val")}
        test = () if config.tuning else load_part(config, "test", place, data_dir, folder=folder)
        about = json.dumps(parts["train"].about, sort_keys=True)
        if unlike := processes.largest(processes.rank if about != processes.first(lambda: about) else 0):
            raise RunError(f"process {unlike} has other images than the first: here {about}; give all the same files.")
        batch = config.batch_for(len(parts["train"]))
        _check_shares(batch, processes)
        test, processes = processes.loaded(test), processes.ready(place)
        test = test if config.images is None else list(test)  # few, and the report shows them again
        with torch.random.fork_rng([place] if place.type == "cuda" else []), arithmetic(config.precision):
            with _memory("while the network was made: choose smaller or fewer `scales`, or fewer `orders`"):
                state = initial_state(config, parts["train"])
                _try_later_sizes(state.model, config, parts["train"])
            advice = f"with `batch_size` {batch}: choose a smaller one"
            for name in ("scales", "channels"):
                if values := getattr(config, name):
                    advice += f", or smaller `{name}` (the largest is {values[-1]:g})"
            with ExitStack() as held, _memory(advice):
                processes.first(lambda: held.enter_context(_claim(config, directory, folder)), BusyError, RunError)
                result = processes.first(lambda: _saved_result(config, directory, folder), RunError)
                result = result or _train(config, directory, state, parts, test, processes)
    if result["status"] == "finished" and processes.rank == 0:  # no run resumes from these any more
        for path in [*_checkpoints(directory).values(), *directory.glob("damaged-*")]:
            path.unlink(missing_ok=True)
    return result


def _train(
    config: RunConfig,
    directory: Path,
    state: State,
    parts: dict[str, ImageSet],
    test: Iterable[ImageSet],
    processes: Processes,
) -> dict[str, Any]:
    begun = processes.share(_newest_checkpoint(state, config, directory) if processes.rank == 0 else None)
    if begun is not None:
        _restore(state, *begun)
        if processes.rank == 0:
            _write_metrics(state, directory)  # a crash may have come between the checkpoint and them
    steps, done = config.epochs * len(state.losses), state.epoch * len(state.losses) + state.step
    silent = True if processes.rank else None  # None: where there is no terminal
    bar = files.require("tqdm").tqdm(total=steps, initial=done, unit="step", desc=config.name, disable=silent)
    with _Stop() as stop, bar:
        outcome = fit(state, config, parts, test, _Keeper(config, directory, stop, bar, processes), processes)
        if processes.rank:
            return processes.first(dict)  # type: ignore[no-any-return]  # what the first one returns
        if outcome["status"] == "finished":
            about = {"config": config.to_dict(), "val_error": outcome["val_error"], "epoch": outcome["best_epoch"]}
            about |= {"task": network_of(state.model).task._asdict()}
            files.write_atomically(directory / "model.safetensors", files.encode(state.best, about))
        result = {**outcome, "identity": config.identity, "config": config.to_dict()}
        result |= {"parameters": count_parameters(state.model), "seconds": round(state.seconds, 1)}
        made_by = {"command": config.command, **environment(parts["train"])}
        made_by |= {"note": f"trained by {processes.count} processes"} if processes.count > 1 else {}
        result |= {"history": state.history, "environment": made_by}
        if config.batch_size == 0:
            result["batch_size"] = config.batch_for(len(parts["train"]))
        if config.images is not None and outcome["status"] == "finished":
            _deliver(directory, config, parts["val"], test, result)
        files.write_atomically(directory / "result.json", json.dumps(result, indent=1).encode())
        return processes.first(lambda: result)  # type: ignore[no-any-return]


def _deliver(
    directory: Path, config: RunConfig, val: ImageSet, test: Iterable[ImageSet], result: dict[str, Any]
) -> None:
    """What a user of own pictures takes away: the network as a folder, and a page about it."""
    model, _ = load_model(directory / "model.safetensors")  # as it was written, without what several processes add
    model = as_tested(model.to(val.device), config)
    write_report(directory, model, config, result["history"], val if config.tuning else next(iter(test)), val)
    save_pretrained(model, directory / "model", card=card(result), run=config.to_dict())


def load(
    config: RunConfig,
    part: str,
    data_dir: Path | None = None,
    classes: Sequence[str] | None = None,
    folder: Folder | None = None,
) -> ImageSet:
    """The images of a run. `classes`: what the labels of your own pictures mean to a model; `folder`: as scanned."""
    if isinstance(config.data, FolderSpec):
        images = load_folder(folder or config.data, part, classes=classes)
        if part == "train":
            config.check_count(len(images))
            count = min(config.train_images or len(images), len(images))
            batch = config.batch_for(count)
            if config.batch_size == 0 and batch < RunConfig.batch_size:
                log.info("%d pictures for training: batches of %d", count, batch)
            elif (steps := count // batch) < FEW_STEPS:
                log.warning("an epoch has %d steps of %d pictures: try a smaller batch size", steps, batch)
    else:
        images = load_split(part=part, data_dir=data_dir, **vars(config.data))
    return images.first(config.train_images) if part == "train" and config.train_images else images


def load_part(
    config: RunConfig,
    part: str,
    device: torch.device,
    data_dir: Path | None = None,
    classes: Sequence[str] | None = None,
    folder: Folder | None = None,
) -> Iterable[ImageSet]:
    """The images of a run on a device: all at once, or of a few test sizes at a time where they are many."""
    if part != "test" or not isinstance(config.data, SizedSpec):
        return [load(config, part, data_dir, classes, folder).to(device)]
    task, sizes = DATASETS[config.dataset], config.data.test_sizes
    count = max(1, TEST_BYTES // (config.data.sizes[2] * task.in_chans * math.prod(task.image_size or ())))
    groups = [sizes[i : i + count] for i in range(0, len(sizes), count)]
    return (load(replace(config, test_sizes=group), part, data_dir).to(device) for group in groups)


def load_model(path: Path) -> tuple[nn.Module, RunConfig]:
    """A trained model, in evaluation mode on the CPU; if there is none, whole and finite, a CheckpointError.

    `path` is a run's directory, its model.safetensors, or a checkpoint of a run that goes on (its best model so far).
    Or it is what :func:`scalesteer.from_pretrained` reads; if that does not say how it was trained, the configuration
    is the default for such a network.
    """
    if is_pretrained(path):
        return _load_pretrained(path)
    if path.is_dir():
        found = [*_checkpoints(path).values(), *path.glob("model.safetensors")]
        if not found:
            raise CheckpointError(f"{path} holds no model: it must be the directory of a run.")
        path = found[-1]
    tensors, about = read_checkpoint(path)
    try:
        config = RunConfig.from_dict(about["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say which model it holds: {error}.") from error
    history = about.get("history")
    if not isinstance(history, (list, type(None))):
        raise CheckpointError(f"{path}: `history` must be a list (got {history!r:.100}).")
    if history is not None:
        tensors = _below("best." if history else "model.", tensors)
    try:
        task = read_task(about["task"]) if config.images is not None else DATASETS[config.dataset]
        with torch.device("meta"):  # shapes alone: a file may name a network that no memory holds
            described = make_model(config, task)
        check_memory(as_tested(described, config))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} names a model that cannot be: {error}") from error
    if wrong := misfits(described.state_dict(), tensors):
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(wrong)}.")
    model = make_model(config, task)
    model.load_state_dict(tensors)
    if history is not None:  # the sizes that its best model has seen: in the first epochs not all yet
        look_at(model, config, len(history) - 1)
    return model.eval(), config


def _load_pretrained(path: Path) -> tuple[nn.Module, RunConfig]:
    try:
        model, told = from_pretrained(path), read_config(path).get("run")
        if told is None:
            arguments: Any = model.arguments
            told = {"model": arguments["name"]} | {name: arguments[name] for name in MODEL_FIELDS if name in arguments}
            if isinstance(told.get("basis"), dict):  # a run names presets only
                del told["basis"]
        return model, RunConfig.from_dict(told)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def read_checkpoint(path: Path) -> files.Content:
    """The tensors of a checkpoint, on the CPU, and its description; any other file is a CheckpointError."""
    try:
        tensors, meta = files.read(path)
    except FileNotFoundError as error:
        hint = f"networks of this package: {', '.join(list_pretrained())}"
        raise CheckpointError(f"no checkpoint can be read at {path}: {error.strerror} ({hint}).") from error
    except files.DataError as error:
        raise CheckpointError(str(error)) from error
    return tensors, meta["about"]


def _saved_result(config: RunConfig, directory: Path, folder: Folder | None) -> dict[str, Any] | None:
    """The result in a run's directory, if there is one; another configuration's run there is a RunError."""
    path, result = directory / "config.json", None
    try:
        other = RunConfig.from_dict(json.loads(files.read_small(path))) if path.exists() else None
        if other == config and (path := directory / "result.json").exists():
            result = json.loads(files.read_small(path))
            if result["identity"] != config.identity or result["status"] not in ("finished", "failed"):
                raise ValueError("it is not the result of this run")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise RunError(f"{path} cannot be read ({reason}); choose another directory.") from error
    if other is not None and other != config:
        there, here = other.to_dict(), config.to_dict()
        unlike = ", ".join(f"{k}: {there[k]!r} there, {here[k]!r} here" for k in here if there[k] != here[k])
        raise RunError(f"{directory} holds another run ({unlike}); choose another directory.")
    if folder is not None and (directory / SPLIT_FILE).exists():
        _check_pictures(folder, directory / SPLIT_FILE)
    return result


def _check_pictures(folder: Folder, path: Path) -> None:
    """If your own pictures are not those that a run began with, a RunError."""
    try:
        there, here = (set(table.splitlines()) for table in (path.read_bytes(), folder.table()))
    except OSError as error:
        raise RunError(
            f"the pictures of the run in {path.parent} cannot be compared with those here: {error}"
        ) from error
    if there != here:
        raise RunError(
            f"the pictures in {folder.spec.images} are not those that the run in {path.parent} began with "
            f"({len(here - there)} new or changed, {len(there - here)} gone or changed); choose another directory."
        )


@contextmanager
def _claim(config: RunConfig, directory: Path, folder: Folder | None) -> Iterator[None]:
    """Make a run's directory and hold it; what cannot be written inside is said in terms of the run."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with files.locked(directory / ".lock"):
            for left in directory.glob(".*.tmp"):
                left.unlink()
            if not (path := directory / "config.json").exists():
                files.write_atomically(path, json.dumps(config.to_dict(), indent=1).encode())
            if folder is not None and not (path := directory / SPLIT_FILE).exists():
                files.write_atomically(path, folder.table())
            yield
    except files.LockedError as error:
        raise BusyError(str(error)) from error
    except OSError as error:
        raise RunError(f"{directory} cannot be written to ({error.strerror or error}); {KEPT}.") from error


@contextmanager
def _memory(advice: str) -> Iterator[None]:
    """Say what to do if the memory does not suffice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # The CPU's allocator has no exception of its own.
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(error):
            raise
        raise RunError(f"out of memory {advice}; {KEPT}.") from error


def _try_later_sizes(model: nn.Module, config: RunConfig, images: ImageSet) -> None:
    """Look at one image at the sizes that come in after the first epochs, or in the test: then it would be too late."""
    later = {"channels": model} if config.one_size_epochs else {}
    if config.test_channels is not None and not config.tuning:
        later["test_channels"] = as_tested(model, config)
    for name, looking in later.items():
        try:
            with torch.no_grad(), evaluation_mode(looking):
                looking(images.take(slice(1))[0])
        except ValueError as error:
            raise RunError(f"`{name}` (got {getattr(config, name)}) cannot be used: {error}") from error


class _Keeper:
    """Looks after a training: saves it from time to time and when it must stop, and shows how far it is."""

    def __init__(self, config: RunConfig, directory: Path, stop: _Stop, bar: Any, processes: Processes) -> None:
        self.config, self.directory, self.stop, self.bar, self.processes = config, directory, stop, bar, processes
        self.saved = self.logged = time.perf_counter()

    def after_step(self, state: State) -> None:
        self.bar.update()
        if state.step < len(state.losses):  # an epoch's own line comes after it
            self._log(f"epoch {state.epoch + 1} of {self.config.epochs}: step {state.step} of {len(state.losses)}")
        if time.perf_counter() - self.saved > SAVE_EVERY_S:
            self.save(state)
        self._leave_if_asked(state)

    def between_batches(self, state: State) -> None:
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
            _write_metrics(state, self.directory)
            loss, error = f"{state.history[-1]['loss']:.3f}", f"{100 * state.history[-1]['val_error']:.2f}%"
            self.bar.set_postfix(loss=loss, val_error=error)
            self._log(f"epoch {state.epoch} of {self.config.epochs}: loss {loss}, validation error {error}")
        self.processes.largest(0)  # wait for it

    def _log(self, message: str) -> None:
        """Say where there is no terminal how far it is, not too often."""
        if self.bar.disable and not self.processes.rank and time.perf_counter() - self.logged >= files.LOG_EVERY_S:
            log.info("%s", message)
            self.logged = time.perf_counter()

    def save(self, state: State) -> None:
        """Write a checkpoint beside the previous one, which stays until the next; the first process does it for all."""
        if self.processes.rank:
            return
        if not bool(state.losses[: state.step].isfinite().all()):  # what has failed stays as it was before
            return
        about = {name: getattr(state, name) for name in ("epoch", "step", "history", "seconds")}
        about |= {"config": self.config.to_dict(), "losses": state.losses[: state.step].tolist()}
        about |= {"task": network_of(state.model).task._asdict()}
        tensors = {f"model.{k}": v for k, v in state.model.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in state.best.items()}
        for name, parameter in state.model.named_parameters():
            tensors |= {f"optimizer.{name}.{k}": v for k, v in state.optimizer.state.get(parameter, {}).items()}
        tensors["random"] = torch.get_rng_state()
        if state.losses.device.type == "cuda":
            tensors["random_cuda"] = torch.cuda.get_rng_state(state.losses.device)
        existing = _checkpoints(self.directory)
        path = self.directory / f"last-{1 + max(existing, default=0):06d}.safetensors"
        files.write_atomically(path, files.encode(tensors, about))
        for old in list(existing.values())[:-1]:
            old.unlink()
        self.saved = time.perf_counter()


def _write_metrics(state: State, directory: Path) -> None:
    lines = "".join(json.dumps(entry) + "\n" for entry in state.history)
    files.write_atomically(directory / "metrics.jsonl", lines.encode())


def _checkpoints(directory: Path) -> dict[int, Path]:
    """Those that a run can go on from by number, the newest last; other files with similar names are not ours."""
    found = ((re.fullmatch(r"last-([0-9]{6,})\.safetensors", path.name), path) for path in directory.glob("last-*"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _newest_checkpoint(state: State, config: RunConfig, directory: Path) -> files.Content | None:
    """The newest checkpoint that is whole, saying so if it is not the newest; the others are put aside."""
    complaint = ""
    for path in reversed(_checkpoints(directory).values()):
        try:
            tensors, about = read_checkpoint(path)
            if problems := _problems(state, config, tensors, about):
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


def _problems(state: State, config: RunConfig, tensors: dict[str, Tensor], about: dict[str, Any]) -> list[str]:
    """What keeps a training from going on with a checkpoint, to the same numbers as if it had not been interrupted."""
    if about.get("config") != config.to_dict():
        return ["it belongs to another run"]
    try:
        epoch, step, history = about["epoch"], about["step"], about["history"]
        metrics = [entry[k] for entry in history for k in ("loss", "val_loss", "val_error", "seconds")]
        sound = [entry["epoch"] for entry in history] == list(range(epoch)) and epoch <= config.epochs
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


def _restore(state: State, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    for key in ("epoch", "step", "history", "seconds"):
        setattr(state, key, about[key])
    device = state.losses.device
    state.losses[: state.step] = torch.tensor(about["losses"])
    state.model.load_state_dict(_below("model.", tensors))
    state.best = {k: v.to(device) for k, v in _below("best.", tensors).items()}
    saved = state.optimizer.state_dict()
    for index, (name, _) in enumerate(state.model.named_parameters()):
        saved["state"][index] = _below(f"optimizer.{name}.", tensors)
    state.optimizer.load_state_dict(saved)
    torch.set_rng_state(tensors["random"])
    if "random_cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random_cuda"], device)


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class _Stop:
    """Turns SIGINT and SIGTERM into a request that the loop honours after its current step.

    If that takes longer than `STOP_WITHIN_S`, or is requested again, it leaves at once; the last checkpoint stands.
    """

    requested = 0  # the signal's number

    def __enter__(self) -> _Stop:
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
            signal.setitimer(signal.ITIMER_REAL, STOP_WITHIN_S)

    def leave(self, number: int) -> None:
        """End as that signal would; 0 is none."""
        if number:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
