"""Checkpoints: tensors and a description in one file that proves its content (see :mod:`scalesteer.files`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalesteer import files
from scalesteer.files import DataError
from scalesteer.files import write_atomically as write_atomically  # kept here for its users


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or not what is asked for."""


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-ready description."""
    write_atomically(path, files.encode(tensors, about))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save` wrote, on the CPU.

    Raises:
        CheckpointError: If the file is missing, damaged, of a newer format or not a checkpoint of ours. Nothing in a
            file can run code: it holds numbers and JSON only.
    """
    try:
        tensors, meta = files.read(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint can be read at {path}: {error.strerror}.") from error
    except DataError as error:
        raise CheckpointError(str(error)) from error
    return tensors, meta["about"]


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Give a model its tensors, or leave it unchanged and list everything that does not fit.

    Raises:
        CheckpointError: If keys are missing, unexpected or of another shape or type, or a number is not finite.
    """
    own = model.state_dict()
    wrong = [f"missing {name}" for name in own if name not in tensors]
    wrong += [f"unexpected {name}" for name in tensors if name not in own]
    for name in own.keys() & tensors.keys():
        if own[name].shape != tensors[name].shape:
            wrong.append(f"{name} is {tuple(tensors[name].shape)}, not {tuple(own[name].shape)}")
        elif own[name].dtype != tensors[name].dtype:
            wrong.append(f"{name} is {tensors[name].dtype}, not {own[name].dtype}")
        elif tensors[name].is_floating_point() and not bool(torch.isfinite(tensors[name]).all()):
            wrong.append(f"{name} has values that are not finite")
    if wrong:
        raise CheckpointError(f"{source} does not fit the model: {'; '.join(sorted(wrong))}.")
    model.load_state_dict(dict(tensors))
