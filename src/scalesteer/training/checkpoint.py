"""Tensors and a description in one file that proves its content: safetensors with a digest, written atomically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalesteer import files

try:
    from safetensors import SafetensorError
    from safetensors.torch import load as load_bytes
    from safetensors.torch import save as save_bytes
except ImportError as error:
    raise ImportError("safetensors is needed here and not installed: pip install 'scalesteer[cli]'") from error

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or not what is asked for."""


def write_atomically(path: Path, content: bytes) -> None:
    """The file appears under its name only when it is complete; a crash leaves the old one."""
    with files.replacing(path) as file:
        file.write(content)


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a JSON-ready description."""
    plain = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    described = json.dumps({"format": FORMAT, **about}, sort_keys=True)
    metadata = {"about": described, "digest": _digest(plain, described)}
    write_atomically(path, save_bytes(plain, metadata))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`save` wrote, on the CPU.

    Raises:
        CheckpointError: If the file is missing, damaged, of a newer format or not a checkpoint of ours. Nothing in a
            file can run code: it holds numbers and JSON only.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"no checkpoint can be read at {path}: {error.strerror or error}.") from error
    try:
        tensors = load_bytes(content)
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        described = metadata["about"]
        about = json.loads(described)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of scalesteer, or is damaged: {error}.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else about
        raise CheckpointError(f"{path} has format {found!r}; this version reads format {FORMAT}.")
    if metadata.get("digest") != _digest(tensors, described):
        raise CheckpointError(f"{path} is damaged: its content does not match its digest.")
    return tensors, about


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Give a model its tensors, or leave it unchanged and list everything that does not fit.

    Raises:
        CheckpointError: If keys are missing, unexpected or of another shape or type, or a number is not finite.
    """
    wrong = misfits(model.state_dict(), tensors)
    if wrong:
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


def _digest(tensors: Mapping[str, Tensor], described: str) -> str:
    hasher = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
