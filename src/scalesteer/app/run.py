"""One run in its directory: trained, stopped and resumed at any moment, with the same numbers at the end.

The directory holds config.json, metrics.jsonl (one line per epoch), last-*.safetensors (checkpoints to go on from),
model/ (the network that validation chose, as a folder to use) and result.json; of your own pictures also split.csv
(which of them were trained on) and report.html. Every file is written atomically, by one process at a time; a run that
was killed at any moment goes on from its last checkpoint and ends with the same numbers as one that was not (on a GPU,
as far as cuDNN chooses the same algorithms again).
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalesteer import files
from scalesteer.app.checkpoint import Checkpointer, Stop, newest_checkpoint, restore, write_metrics
from scalesteer.app.config import BATCH, FEW_STEPS, USUAL, Run, batch_for, check_count
from scalesteer.app.data import OpenData
from scalesteer.app.device import arithmetic, environment, pick_device
from scalesteer.app.distributed import Processes, joined, started
from scalesteer.app.folder import FEW_PICTURES, Folder, FolderSpec
from scalesteer.app.given import Given, Items, pack
from scalesteer.app.loggers import Logger
from scalesteer.app.loop import Augment, State, as_tested, fit, initial_state
from scalesteer.app.networks import MODEL, checkpoints, read_settings
from scalesteer.app.report import write_report
from scalesteer.app.results import card
from scalesteer.app.suggest import usual_objects
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import ImageSet
from scalesteer.joining import check_calibration
from scalesteer.models import count_parameters, network_of
from scalesteer.models.external import register_given
from scalesteer.models.registered import BUILDERS
from scalesteer.models.scaled import arguments_of
from scalesteer.nn import evaluation_mode
from scalesteer.pretrained import write_network

SPLIT_FILE = "split.csv"
KEPT = "what was saved before is kept, and the same command goes on from there"

log = logging.getLogger("scalesteer.app")


class RunError(ValueError):
    """A run that cannot start or go on."""


class BusyError(RunError):
    """A run that another process is working on."""


def train(
    run: Run,
    directory: Path,
    *,
    device: str = "auto",
    data_dir: Path | None = None,
    augment: Augment | None = None,
    model: nn.Module | Callable[..., nn.Module] | str | None = None,
    data: Items | Mapping[str, Items] | None = None,
    loggers: Sequence[Logger] = (),
) -> dict[str, Any]:
    """Train, or go on training, and return the result; a run that has one returns it at once.

    `directory` is the run's own, made once data and device are known to be good. SIGINT and SIGTERM write a checkpoint
    and leave, as KeyboardInterrupt and SystemExit(143). A checkpoint is also written after every epoch, if that takes
    seconds, and every minute. Processes that torchrun started train together and all return the result.

    `augment` changes every batch of training images, `(B, C, H, W)` with numbers from 0 to 1, after what the run says.
    It is no part of the run: whoever goes on with it gives the same one. Its random numbers should be torch's.

    `model` takes the place of the run's network: a module that maps images to logits, trained from the weights that it
    has (a copy is trained); a function that makes one (:func:`scalesteer.register_model`); or a registered name. The
    trained network is in the directory: ``load_model(directory)``. Another program registers its builder first.

    `data` takes the place of the folder of pictures, whose name, `images`, is then a name alone: a dataset of items
    (image, label), or one for each of train, val and test. See :func:`.given.pack`. `loggers` are told the numbers of
    each epoch, by the first process: objects with a method ``log(epoch, numbers)``, as :class:`.loggers.TensorBoard`.

    Returns:
        The content of result.json. Its `status` is "finished", or "failed" with a `reason` if the loss stopped being
        a number: such a run would fail again, and is never averaged.

    Raises:
        BusyError: If another process works on the directory.
        RunError: If the directory holds another configuration's run or cannot be written to, or the memory does not
            suffice. What was saved stays, and the same call goes on from there.
        LostError: If another process of the training ended or does not answer.
    """
    if model is not None:
        run = run.with_model(register_given(model))
    _check_shares(run.training.batch_size or 0, started(), run.training.accumulate)  # before they are connected
    with joined() as processes:
        given = None if data is None else _pack(run, data)
        return _train_or_return(run, directory, device, data_dir, processes, augment, given, loggers)


def load(run: Run, part: str, data_dir: Path | None = None, data: OpenData | None = None) -> ImageSet:
    """The images of a part of a run, all at once, from its data as they are now or as they were opened."""
    whole, *more = (data or run.data.open(data_dir)).load(part)
    if more:
        columns = ((one.images, one.labels, one.scales) for one in (whole, *more))
        images, labels, scales = map(torch.cat, zip(*columns, strict=True))
        whole = ImageSet(images, labels, scales, whole.about)
    if part != "train":
        return whole
    check_count(run.training, len(whole))
    chosen = whole.first(run.training.train_images) if run.training.train_images else whole
    batch = batch_for(run.training, len(chosen))
    if run.training.batch_size is None and batch < BATCH:
        log.info("%d pictures for training: batches of %d", len(chosen), batch)
    elif run.data.count is None and (steps := len(chosen) // batch) < FEW_STEPS:
        log.warning("an epoch has %d steps of %d pictures: try a smaller batch size", steps, batch)
    return chosen


def _check_shares(batch: int, processes: Processes, accumulate: int = 1) -> None:
    """Raise a ValueError unless every process gets the same number of images of a batch."""
    if processes.count > 1 and batch % (processes.count * accumulate):
        got = f"got {batch} and {processes.count}" + (f", and `accumulate` {accumulate}" if accumulate > 1 else "")
        raise ValueError(f"`batch_size` must be divisible by the number of processes ({got}).")


def _train_or_return(
    run: Run,
    directory: Path,
    device: str,
    data_dir: Path | None,
    processes: Processes,
    augment: Augment | None,
    given: Given | None,
    loggers: Sequence[Logger],
) -> dict[str, Any]:
    # What a folder is now, once: labels and parts of all pictures follow from this.
    data: OpenData = run.data.open(data_dir) if given is None else given
    result: dict[str, Any] | None = processes.first(lambda: _saved_result(run, directory, data), RunError)
    if result is None:
        files.require("safetensors.torch")  # told now, not when the first checkpoint is saved
        place = pick_device(device, processes.count)
        parts = {part: load(run, part, data=data).to(place) for part in ("train", "val")}
        tested = () if run.training.tuning else (part.to(place) for part in data.load("test"))
        about = json.dumps(parts["train"].about, sort_keys=True)
        if unlike := processes.largest(processes.rank if about != processes.first(lambda: about) else 0):
            raise RunError(f"process {unlike} has other images than the first: here {about}; give all the same files.")
        batch = batch_for(run.training, len(parts["train"]))
        _check_shares(batch, processes, run.training.accumulate)
        own = isinstance(data, (Folder, Given))
        test: Iterable[ImageSet] = list(tested) if own else tested  # few, and shown again
        with torch.random.fork_rng([place] if place.type == "cuda" else []), arithmetic(run.training.precision):
            with _memory("while the network was made: choose smaller or fewer `scales`, or fewer `orders`"):
                state = initial_state(run, data.task, parts["train"])
                if isinstance(data, Folder):
                    _describe_training(state.model, data, parts["train"], run.training.resize or (1.0, 1.0))
                _try_own_network(state.model, run, parts["train"])
                _try_later_sizes(state.model, run, parts["train"])
            advice = f"with `batch_size` {batch}: choose a smaller one"
            for name, values in (("scales", run.network.filters.scales), ("channels", run.network.channels)):
                if values:
                    advice += f", or smaller `{name}` (the largest is {values[-1]:g})"
            with ExitStack() as held, _memory(advice):
                processes.first(lambda: held.enter_context(_claim(run, directory, data)), BusyError, RunError)
                result = processes.first(lambda: _saved_result(run, directory, data), RunError)
                result = result or _train(run, directory, state, parts, test, processes, augment, loggers)
    if result["status"] == "finished" and processes.rank == 0:  # no run resumes from these any more
        for path in [*checkpoints(directory).values(), *directory.glob("damaged-*")]:
            path.unlink(missing_ok=True)
    return result


def _train(
    run: Run,
    directory: Path,
    state: State,
    parts: dict[str, ImageSet],
    test: Iterable[ImageSet],
    processes: Processes,
    augment: Augment | None,
    loggers: Sequence[Logger],
) -> dict[str, Any]:
    begun = processes.first(lambda: newest_checkpoint(state, run, directory))
    if begun is not None:
        restore(state, *begun)
        if processes.rank == 0:
            write_metrics(state, run, directory)  # a crash may have come between the checkpoint and them
    steps, done = run.training.epochs * len(state.losses), state.epoch * len(state.losses) + state.step
    silent = True if processes.rank else None  # None: where there is no terminal
    bar = files.require("tqdm").tqdm(total=steps, initial=done, unit="step", desc=run.name, disable=silent)
    with Stop(processes) as stop, bar:
        watcher = Checkpointer(run, directory, stop, bar, processes, loggers)
        outcome, answers = fit(state, run, parts, test, watcher, processes, augment)
        if processes.rank:
            return processes.first(dict)  # type: ignore[no-any-return]  # what the first one returns
        result = {**outcome, "identity": run.identity, "run": run.to_dict()}
        result |= {"parameters": count_parameters(state.model), "seconds": round(state.seconds, 1)}
        made_by = {"command": run.command, **environment(parts["train"])}
        notes = [f"trained by {processes.count} processes"] * (processes.count > 1)
        weights = run.network.weights
        notes += [f"from the weights {weights}, {_digest(weights)}"] if weights else []
        notes += ["training images changed by a function of the caller's"] * (augment is not None)
        made_by |= {"note": "; ".join(notes)} if notes else {}
        result |= {"history": state.history, "environment": made_by}
        if run.training.batch_size is None:
            result["batch_size"] = batch_for(run.training, len(parts["train"]))
        if outcome["status"] == "finished":
            model = as_tested(state.model, run.network)  # with the best weights, as it was tested
            if isinstance(model, ScaleChannels):
                model.calibration = check_calibration(outcome.get("join", {}).get("calibration"), model.scales)
            task, parameters = network_of(model).task, result["parameters"]
            own: dict[str, Any] = {"card": card(result), "run": run.to_dict()}
            write_network(directory / MODEL, arguments_of(model), task, model.state_dict(), parameters, **own)
            if answers is not None and answers.classes:
                shown = parts["val"] if run.training.tuning else next(iter(test))
                write_report(directory, run, parameters, state.history, shown, answers, outcome.get("join"))
        files.write_atomically(directory / "result.json", json.dumps(result, indent=1).encode())
        for logger in loggers if "test_error" in outcome else ():
            logger.log(outcome["best_epoch"], {"test_error": outcome["test_error"]})
        return processes.first(lambda: result)  # type: ignore[no-any-return]


def _saved_result(run: Run, directory: Path, data: OpenData) -> dict[str, Any] | None:
    """The result in a run's directory, if there is one; another configuration's run there is a RunError."""
    path, result = directory / "config.json", None
    try:
        other = read_settings(directory)
        if other == run and (path := directory / "result.json").exists():
            result = json.loads(files.read_small(path))
            if result["identity"] != run.identity or result["status"] not in ("finished", "failed"):
                raise ValueError("it is not the result of this run")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise RunError(f"{path} cannot be read ({reason}); choose another directory.") from error
    if other is not None and other != run:
        there, here = USUAL | other.settings, USUAL | run.settings
        unlike = ", ".join(f"{k}: {there[k]!r} there, {here[k]!r} here" for k in here if there[k] != here[k])
        raise RunError(f"{directory} holds another run ({unlike}); choose another directory.")
    if isinstance(data, (Folder, Given)) and (directory / SPLIT_FILE).exists():
        _check_pictures(data, directory / SPLIT_FILE, run.data.name)
    return result


def _pack(run: Run, data: Items | Mapping[str, Items]) -> Given:
    """The images that a program gives for a run of own pictures."""
    if not isinstance(run.data, FolderSpec):
        raise ValueError(
            f"`data` needs a run with a name for it: make_run(images='a name', ...) (got {run.data.name})."
        )
    return pack(data, run.data)


def _pictures_in(table: bytes) -> set[tuple[tuple[str, str | None], ...]]:
    """The rows of a split.csv, without the sizes, which those of earlier versions do not have."""
    rows = csv.DictReader(io.StringIO(table.decode(errors="surrogateescape"), newline=""))
    return {tuple((name, value) for name, value in row.items() if name != "size") for row in rows}


def _check_pictures(data: Folder | Given, path: Path, name: str) -> None:
    """If your own pictures are not those that a run began with, a RunError."""
    try:
        there, here = map(_pictures_in, (path.read_bytes(), data.table()))
    except (OSError, csv.Error) as error:
        raise RunError(
            f"the pictures of the run in {path.parent} cannot be compared with those here: {error}"
        ) from error
    if there != here:
        raise RunError(
            f"the pictures in {name} are not those that the run in {path.parent} began with "
            f"({len(here - there)} new or changed, {len(there - here)} gone or changed); choose another directory."
        )


@contextmanager
def _claim(run: Run, directory: Path, data: OpenData) -> Iterator[None]:
    """Make a run's directory and hold it; what cannot be written inside is said in terms of the run."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with files.locked(directory / ".lock"):
            for left in (*directory.glob(".*.tmp"), *directory.glob(f"{MODEL}/.*.tmp")):
                left.unlink()
            if not (path := directory / "config.json").exists():
                files.write_atomically(path, json.dumps(run.to_dict(), indent=1).encode())
            if isinstance(data, (Folder, Given)) and not (path := directory / SPLIT_FILE).exists():
                files.write_atomically(path, data.table())
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


def _describe_training(model: nn.Module, folder: Folder, images: ImageSet, factors: tuple[float, float]) -> None:
    """Let a network know by how much pictures were resized for it, and how large the objects in them were.

    `factors` are those of random resizing.
    """
    pixels = images.images.unflatten(0, (-1, 1)) if images.images.ndim == 3 else images.images
    found = usual_objects(pixels[:: max(1, len(pixels) // FEW_PICTURES)].cpu().numpy())
    network = network_of(model)
    network.task = network.task._replace(scale=folder.usual_scale())
    if found is not None:
        usual, smallest, largest = found
        shown = smallest * min(1.0, factors[0]), largest * max(1.0, factors[1])
        network.task = network.task._replace(object_size=usual, object_sizes=shown)


def _try_later_sizes(model: nn.Module, run: Run, images: ImageSet) -> None:
    """Look at one image at the sizes that come in after the first epochs, or in the test: then it would be too late."""
    later = {"channels": model} if run.training.one_size_epochs else {}
    if run.network.test_channels and not run.training.tuning:
        later["test_channels"] = as_tested(model, run.network)
    for name, looking in later.items():
        try:
            with torch.no_grad(), evaluation_mode(looking):
                looking(images.take(slice(1))[0])
        except ValueError as error:
            raise RunError(f"`{name}` (got {getattr(run.network, name)}) cannot be used: {error}") from error


def _try_own_network(model: nn.Module, run: Run, images: ImageSet) -> None:
    """Look at one image with a network that somebody else wrote, before it is trained."""
    if run.network.model not in BUILDERS:
        return
    name, classes = run.network.model, network_of(model).task.num_classes
    try:
        with torch.no_grad(), evaluation_mode(model):
            logits = model(images.take(slice(1))[0])
    except (ValueError, RuntimeError, AssertionError, TypeError) as error:
        reason = " ".join(str(error).split())[:400]
        raise RunError(f"the network {name!r} cannot be used with these images: {reason}") from error
    if not isinstance(logits, torch.Tensor) or logits.shape != (1, classes):
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise RunError(f"the network {name!r} must return logits (images, {classes}), one for each class (got {got}).")


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
