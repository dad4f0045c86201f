"""Trained networks where they are kept: in a run's directory, in a checkpoint, in a folder, in the package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalesteer import files, list_pretrained
from scalesteer.app.config import LARGEST_SCALE, Run
from scalesteer.app.loop import as_tested, make_model, use_sizes_of_epoch, with_channels
from scalesteer.channels import ScaleChannels
from scalesteer.models import DATASETS, list_models, list_options, network_of
from scalesteer.models.external import is_external
from scalesteer.models.registered import BUILDERS
from scalesteer.pretrained import (
    HOW_TO_NAME_IT,
    MOST_VALUES,
    WEIGHTS,
    PretrainedError,
    check_memory,
    from_pretrained,
    is_pretrained,
    misfits,
    read_config,
    read_task,
)

MODEL = "model"  # the folder with the network, in the directory of a finished run


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or not what is asked for."""


def load_model(path: Path) -> nn.Module:
    """A trained network as it is tested, in evaluation mode on the CPU.

    `path` is a run's directory, a checkpoint of a run that goes on (its best network so far), or what
    :func:`scalesteer.from_pretrained` reads. If there is no network, whole and finite, that is a CheckpointError.
    """
    place = _find(path)
    if is_pretrained(place):
        try:
            return from_pretrained(place)
        except PretrainedError as error:
            raise CheckpointError(str(error)) from error
    tensors, about = read_checkpoint(place)
    run, history = _read_settings(about, place), about.get("history")
    if not isinstance(history, (list, type(None))):
        raise CheckpointError(f"{place}: `history` must be a list (got {history!r:.100}).")
    if history is not None:
        tensors = below("best." if history else "model.", tensors)
    if is_external(run.network.model) and run.network.model not in BUILDERS:
        raise CheckpointError(f"{place} names a network {run.network.model!r} that is not known here: {HOW_TO_NAME_IT}")
    try:
        own = "dataset" not in run.data.describe()
        task = read_task(about["task"]) if own else DATASETS[run.data.name]
        # Shapes alone: a file may name a network that no memory holds. A builder of one's own may compute with numbers.
        with torch.device("cpu" if run.network.model in BUILDERS else "meta"), torch.random.fork_rng(devices=[]):
            described = make_model(run.network, task)
        check_memory(as_tested(described, run.network))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{place} names a model that cannot be: {error}") from error
    if wrong := misfits(described.state_dict(), tensors):
        raise CheckpointError(f"{place} does not fit the model: {'; '.join(wrong)}.")
    model = make_model(run.network, task)
    model.load_state_dict(tensors)
    if history is not None:  # the sizes that its best model has seen: in the first epochs not all yet
        use_sizes_of_epoch(model, run, len(history) - 1)
    return as_tested(model, run.network).eval()


def look_at(model: nn.Module, channels: tuple[float, ...] | None, join: Any = None) -> nn.Module:
    """A trained network as the flags --channels and --join say: at these sizes, its weights shared; or as it is.

    Raises:
        ValueError: If the network takes images of one size only, or if there is nothing to join.
    """
    name = network_of(model).arguments["name"]
    channels = None if channels is None else tuple(sorted(channels))
    if channels is not None and "channels" not in list_options(name):
        suited = ", ".join(other for other in list_models() if "channels" in list_options(other))
        raise ValueError(f"`channels` (got {channels}) applies to {suited} only (got model={name!r}).")
    if channels and (len(channels) > MOST_VALUES or channels[-1] > LARGEST_SCALE):
        got = f"got {len(channels)}, the largest {channels[-1]:g}"
        raise ValueError(f"`channels` must be at most {MOST_VALUES} numbers up to {LARGEST_SCALE} ({got}).")
    if not isinstance(model, ScaleChannels):
        if channels is None and join is not None:
            raise ValueError(f"`join` (got {join!r}) needs `channels`, the sizes to look at.")
        return model if channels is None else with_channels(model, channels, join or "logsumexp").eval()
    if channels is None and join is None:
        return model
    return with_channels(model, channels or model.scales, join or model.join).eval()


def read_run(path: Path) -> Run | None:
    """The run that made a network, by what :func:`load_model` reads; None if nothing says it."""
    if path.name == WEIGHTS and is_pretrained(path.parent):
        path = path.parent
    if is_pretrained(path):
        told = read_config(path).get("run")
        return None if told is None else _read_settings({"run": told}, path)
    if path.is_dir():
        return read_settings(path)
    return _read_settings(read_checkpoint(path, tensors=False)[1], path)


def read_settings(directory: Path) -> Run | None:
    """The run that a directory is of; None if it is of none.

    Raises:
        ValueError: If its config.json cannot be read.
    """
    path = directory / "config.json"
    return Run.from_dict(json.loads(files.read_small(path))) if path.exists() else None


def _find(path: Path) -> Path:
    """The folder or the file with the network."""
    if not path.is_dir() or is_pretrained(path):
        return path.parent if path.name == WEIGHTS and is_pretrained(path.parent) else path
    if (path / "result.json").exists() and is_pretrained(path / MODEL):
        return path / MODEL
    found = [*checkpoints(path).values(), *path.glob(WEIGHTS)]  # the second is of earlier versions
    if not found:
        raise CheckpointError(f"{path} holds no model: it must be the directory of a run.")
    return found[-1]


def _read_settings(about: dict[str, Any], path: Path) -> Run:
    try:
        return Run.from_dict(about["run"] if "run" in about else about["config"])  # as earlier versions call it
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say which model it holds: {error}.") from error


def read_checkpoint(path: Path, *, tensors: bool = True) -> files.Content:
    """The tensors of a checkpoint, on the CPU, and its description; any other file is a CheckpointError."""
    try:
        found, meta = files.read(path, "" if tensors else None)
    except FileNotFoundError as error:
        hint = f"networks of this package: {', '.join(list_pretrained())}"
        raise CheckpointError(f"no checkpoint can be read at {path}: {error.strerror} ({hint}).") from error
    except files.DataError as error:
        raise CheckpointError(str(error)) from error
    return found, meta["about"]


def checkpoints(directory: Path) -> dict[int, Path]:
    """Those that a run can go on from by number, the newest last; other files with similar names are not ours."""
    found = ((re.fullmatch(r"last-([0-9]{6,})\.safetensors", path.name), path) for path in directory.glob("last-*"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
