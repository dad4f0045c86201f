"""Networks that are named by where they come from: timm, torchvision, or a function of the user's own.

Only what a user types or calls comes here. A name in a file is looked up among what is registered: it imports nothing.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalesteer import files
from scalesteer._text import nearest
from scalesteer.models.registered import register_model

PHOTOGRAPHS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and deviation that networks of torchvision expect
FORM = re.compile(r"[A-Za-z_][\w.]*:[\w./@-]+")
LEAST_SHARE = 0.5  # of a network's parameters, that a file of weights must fill

log = logging.getLogger("scalesteer")


class Normalise(nn.Module):
    """Bring images from 0 to 1 to the mean and deviation that a trained network expects."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], in_chans: int) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            known = torch.tensor(tuple(values), dtype=torch.float32)
            each = known if len(known) == in_chans else known.mean().repeat(in_chans)
            self.register_buffer(name, each.view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def is_external(name: object) -> bool:
    """Whether a name says where a network comes from, as ``timm:resnet18`` or ``package.module:function``."""
    return isinstance(name, str) and FORM.fullmatch(name) is not None


def register_network(name: str) -> str:
    """Import the network that a user names, and make it known to :func:`scalesteer.create_model` by this name.

    This runs the code that the name leads to. It is for names that a user typed, never for those in a file.

    Args:
        name: ``timm:NAME``, ``torchvision:NAME``, or ``package.module:function``: a function, or a class of modules,
            that :func:`scalesteer.register_model` takes. The package may lie in the working directory.

    Returns:
        The name.

    Raises:
        ValueError: If there is no such network.
        ImportError: If it cannot be imported.
    """
    if not is_external(name):
        raise ValueError(f"`network` must be timm:NAME, torchvision:NAME or package.module:function (got {name!r}).")
    source, _, inner = name.partition(":")
    find = {"timm": _of_timm, "torchvision": _of_torchvision}.get(source)
    register_model(name, _function(source, inner, name) if find is None else find(inner))
    return name


def register_given(model: nn.Module | Callable[..., nn.Module] | str) -> str:
    """The name of a network that a Python program gives: a name, a builder, or a module, which is copied."""
    if isinstance(model, str):
        return model
    if not callable(model):
        raise TypeError(f"`model` must be a name, a module or a function that makes one (got {type(model).__name__}).")
    kind: Any = type(model) if isinstance(model, nn.Module) else model
    name = f"{kind.__module__}:{re.sub('[^A-Za-z0-9_.]+', '', kind.__qualname__.replace('<locals>.', ''))}"
    if not isinstance(model, nn.Module):
        register_model(name, model)
        return name
    given = copy.deepcopy(model)

    def build() -> nn.Module:
        return copy.deepcopy(given)

    register_model(name, build)
    return name


def load_weights(model: nn.Module, path: str | Path) -> list[str]:
    """Start a network from the weights in a file, whose last layer may be for other classes.

    Args:
        model: A network, also inside `ScaleChannels`.
        path: A file of safetensors, or one that `torch.load` reads as tensors alone.

    Returns:
        The parameters that the file has not, or has in another shape: they stay as they are.

    Raises:
        ValueError: If the file cannot be read, or is of another network.
    """
    try:
        if str(path).endswith(".safetensors"):
            content: Any = files.require("safetensors.torch").load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of damaged files nearly anything
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"`weights` {path} cannot be read as tensors: {reason}") from error
    while isinstance(content, dict) and len(inner := [content[k] for k in ("state_dict", "model") if k in content]):
        content = inner[0]
    if not isinstance(content, Mapping):
        raise ValueError(f"`weights` {path} must hold a state dict (got {type(content).__name__}).")
    return _fill(model, content, str(path))


def _fill(model: nn.Module, content: Mapping[str, Any], source: str) -> list[str]:
    """Put the tensors that fit into a network, whose own names may have a prefix, as those in the file may."""
    own, found = model.state_dict(), dict[str, Tensor]()
    tensors = {str(key).removeprefix("module."): value for key, value in content.items() if isinstance(value, Tensor)}
    for prefix in ("", "net.", "net.net."):  # of `ScaleChannels`, of a network behind `Normalise`
        fitting = {k: v for name, v in tensors.items() if (k := prefix + name) in own and own[k].shape == v.shape}
        found = max(found, fitting, key=len)
    missing = [name for name, _ in model.named_parameters() if name not in found]
    count = sum(1 for _ in model.parameters())
    if len(missing) > (1 - LEAST_SHARE) * count:
        raise ValueError(
            f"the weights of {source} are of another network: {len(missing)} of {count} parameters differ."
        )
    model.load_state_dict({k: v.to(own[k].dtype) for k, v in found.items()}, strict=False)
    if missing:
        log.info("%s: %d parameters start anew: %s", source, len(missing), ", ".join(missing[:6]))
    return missing


def _import(package: str, name: str) -> Any:
    """A module that a user named."""
    try:
        return files.require(package) if package.partition(".")[0] in files.EXTRAS else importlib.import_module(package)
    except Exception as error:  # a module may fail with anything, as torchvision beside another torch
        reason = " ".join(str(error).split())[:300]
        raise ImportError(f"`network` {name!r} cannot be imported: {reason}") from error


def _of_timm(arch: str) -> Callable[..., nn.Module]:
    timm = _import("timm", f"timm:{arch}")
    if not timm.is_model(arch.partition(".")[0]):
        near = nearest(arch, timm.list_models())
        raise ValueError(f"timm has no network {arch!r}{f'; is {near!r} meant?' if near else '.'}")

    def build(num_classes: int, in_chans: int = 3, pretrained: bool = False) -> nn.Module:
        options: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_chans, "pretrained": pretrained}
        try:
            try:  # a transformer takes pictures of any size only if it is told so
                net = timm.create_model(arch, dynamic_img_size=True, **options)
            except TypeError:
                net = timm.create_model(arch, **options)
        except Exception as error:
            if not pretrained:
                raise
            raise _unreachable(f"timm:{arch}", error) from error
        expected = net.pretrained_cfg
        return _behind(Normalise(expected["mean"], expected["std"], in_chans), net)

    build.__doc__ = f"the network {arch} of timm"
    return build


def _of_torchvision(arch: str) -> Callable[..., nn.Module]:
    models = _import("torchvision.models", f"torchvision:{arch}")
    if arch not in models.list_models():
        near = nearest(arch, models.list_models())
        raise ValueError(f"torchvision has no network {arch!r}{f'; is {near!r} meant?' if near else '.'}")

    def build(num_classes: int, in_chans: int = 3, pretrained: bool = False) -> nn.Module:
        if in_chans != 3:
            raise ValueError(f"torchvision:{arch} takes pictures in colour (got `in_chans` {in_chans}).")
        net: nn.Module = models.get_model(arch, weights=None, num_classes=num_classes)
        if pretrained:
            try:
                weights = models.get_model_weights(arch).DEFAULT
                _fill(net, weights.get_state_dict(check_hash=True, weights_only=True), f"torchvision:{arch}")
            except Exception as error:
                raise _unreachable(f"torchvision:{arch}", error) from error
        return _behind(Normalise(*PHOTOGRAPHS, in_chans), net)

    build.__doc__ = f"the network {arch} of torchvision"
    return build


def _behind(first: nn.Module, net: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(normalise=first, net=net))


def _unreachable(name: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:200]
    return ValueError(f"the trained weights of {name} cannot be had ({reason}): give them as a file, `weights`.")


def _function(module: str, path: str, name: str) -> Callable[..., nn.Module]:
    """What a user's own module calls so; the module may lie in the working directory."""
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.append(here)  # at the end: a file there takes the place of no other module
    found = _import(module, name)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(
            f"`network` {name!r} must name a function that makes a network: {module} has no such function."
        )
    return found  # type: ignore[no-any-return]
