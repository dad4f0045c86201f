"""Checkpoints: tensors and a description in one file that proves its content (see :mod:`scalesteer.files`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalesteer import files
from scalesteer.files import DataError


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or not what is asked for."""


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-ready description."""
    files.write_atomically(path, files.encode(tensors, about))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save` wrote, on the CPU. Any other file is a CheckpointError, and nothing in it can run."""
    try:
        tensors, meta = files.read(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint can be read at {path}: {error.strerror}.") from error
    except DataError as error:
        raise CheckpointError(str(error)) from error
    return tensors, meta["about"]


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Give a model its tensors; if some do not fit, leave it unchanged and raise a CheckpointError that lists all."""
    if wrong := misfits(model.state_dict(), tensors):
        raise CheckpointError(f"{source} does not fit the model: {'; '.join(wrong)}.")
    model.load_state_dict(dict(tensors))


def misfits(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """What is missing, unexpected, of another shape or type than expected, or not finite."""
    wrong = [f"missing {name}" for name in expected if name not in tensors]
    wrong += [f"unexpected {name}" for name in tensors if name not in expected]
    for name in expected.keys() & tensors.keys():
        own, other = expected[name], tensors[name]
        if own.shape != other.shape:
            wrong.append(f"{name} is {tuple(other.shape)}, not {tuple(own.shape)}")
        elif own.dtype != other.dtype:
            wrong.append(f"{name} is {other.dtype}, not {own.dtype}")
        elif other.is_floating_point() and not bool(torch.isfinite(other).all()):
            wrong.append(f"{name} has values that are not finite")
    return sorted(wrong)
