"""The networks by name: those of the paper's experiments, and those that take images of any size.

The paper's are in :mod:`flat`, the others in :mod:`pooled` and, with an axis of scales, in :mod:`group`. A network of
one's own is added by :func:`register_model`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import nn

from scalesteer import _checks
from scalesteer.channels import ScaleChannels
from scalesteer.harmonics import LogRadialBasis
from scalesteer.models import flat, group, pooled, registered
from scalesteer.models.network import Builder, Models, Network, Plan, Task
from scalesteer.models.registered import BUILDERS
from scalesteer.models.registered import register_model as register_model
from scalesteer.models.scaled import ScaledNetwork

DATASETS = {
    "mnist-scale": Task(1, 10, (28, 28)),
    "fmnist-scale": Task(1, 10, (28, 28)),
    "mnist-scale-local-2": Task(1, 10, (28, 40)),
    "stir-mnist": Task(1, 10, (64, 64)),
    "stir-emoji": Task(1, 36, (64, 64)),
    "mnist-large-scale": Task(1, 10, (112, 112)),
    "rescaled-cifar10": Task(3, 10, (64, 64), fit="resize", ground="surroundings"),
}
_MODELS: Models = {**flat.MODELS, **pooled.MODELS, **group.MODELS}
_ABOUT = flat.ABOUT | pooled.ABOUT | group.ABOUT


def register_features(name: str, plan: type[Plan] = flat.FlatPlan, **usual: Any) -> Callable[[Builder], Builder]:
    """Make a builder of features known to :func:`create_model` by name.

    The builder takes a plan, of the kind that is named here, and its own options as keywords. Its result is an
    `nn.Sequential` whose first convolution is called ``conv1``. It takes images with `plan.in_chans` channels and
    leaves `plan.widths[-1]`; for a :class:`flat.FlatPlan` (images of `plan.feature_size`) of `plan.cells` pixels each.
    `usual` are options that differ from the plan's defaults.
    """
    if name in list_models():
        raise ValueError(f"a model named {name!r} is registered already.")

    def add(build: Builder) -> Builder:
        _MODELS[name] = build, plan(**usual)
        return build

    return add


def list_models() -> list[str]:
    """The names that :func:`create_model` knows, in the order of the alphabet."""
    return sorted({*_MODELS, *BUILDERS})


def describe_model(name: str) -> str:
    """What a network is, in a line without a full stop; of one that was registered, its docstring's first line.

    >>> describe_model("plain-cnn")
    'the same network with ordinary filters of 7 x 7, to compare with'
    """
    name = _checks.lookup("name", name, list_models())
    builder = BUILDERS[name] if name in BUILDERS else _MODELS[name][0]
    return _ABOUT.get(name) or (inspect.getdoc(builder) or "").partition("\n")[0].rstrip(".")


def list_options(name: str) -> list[str]:
    """The options that :func:`create_model` takes for a network, beside channels, classes and size of the images."""
    name = _checks.lookup("name", name, list_models())
    if name in BUILDERS:
        return registered.list_options(name)
    build, usual = _MODELS[name]
    return [*_own_options(build), *(f.name for f in dataclasses.fields(usual) if f.name not in Task._fields)]


def _own_options(build: Builder) -> dict[str, Any]:
    """The options that a builder has beside those of its plan, with their defaults."""
    parameters = inspect.signature(build).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@overload
def create_model(
    name: str,
    dataset: str | None = None,
    *,
    in_chans: int | None = None,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    channels: Sequence[float],
    **options: Any,
) -> ScaledNetwork: ...


@overload
def create_model(
    name: str,
    dataset: str | None = None,
    *,
    in_chans: int | None = None,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    channels: None = None,
    **options: Any,
) -> Network: ...


def create_model(
    name: str,
    dataset: str | None = None,
    *,
    in_chans: int | None = None,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    **options: Any,
) -> nn.Module:
    """Build a network, with new weights, for images of your own or for a dataset.

    Args:
        name: One of :func:`list_models`.
        dataset: One of `DATASETS`, a short way to say the next three; what is given of them counts more.
        in_chans: Channels of the images, by default 1.
        num_classes: By default 10.
        image_size: Height and width of the images, or one number for both. The paper's networks are built for it, by
            default 28; the others take any size, and know by it only what they are meant for.
        options: Those of the network, :func:`list_options`; None for the default. The paper's networks have `widths`
            (of the three convolutions), `hidden` (256), `dropout` (0.7) and `upsample` (enlarge the input by 1 or 2;
            SS-CNN 2, the others 1); the others what :class:`pooled.PooledPlan` has. Beside these, `scales` where a
            method has them; `basis` (a LogRadialBasis, its fields as a mapping, or the name of a preset) and `backend`
            where filters are steered; `antialias` where images are resized.

    Returns:
        The network, with two attributes. `task` says what it is for (:class:`Task`). `arguments` are those that make
        the same network again, ready for JSON; they hold defaults too, so that another default later changes nothing.

    Example:
        >>> model = create_model("ss-cnn", basis="area")
        >>> model(torch.rand(2, 1, 28, 28)).shape, count_parameters(model)
        (torch.Size([2, 10]), 443078)
        >>> model = create_model("pooled-cnn", in_chans=3, num_classes=5)
        >>> model(torch.rand(2, 3, 40, 50)).shape
        torch.Size([2, 5])
        >>> create_model(**model.arguments).task[:6]
        (3, 5, None, (), 'pad', 'surroundings')
    """
    name = _checks.lookup("name", name, list_models())
    options = {option: value for option, value in options.items() if value is not None}
    given = {"in_chans": in_chans, "num_classes": num_classes, "image_size": image_size}
    usual_task = None if dataset is None else DATASETS[_checks.lookup("dataset", dataset, list(DATASETS))]
    task: dict[str, Any] = {key: getattr(usual_task, key, None) if n is None else n for key, n in given.items()}
    if name in BUILDERS:
        return registered.build(name, task, options)
    known = list_options(name)
    for option in options:
        try:
            _checks.choice("options", option, known)
        except ValueError as error:
            raise TypeError(f"{name} has no option {option!r}: {error}") from None
    build, usual = _MODELS[name]
    shared = {f.name: options.pop(f.name) for f in dataclasses.fields(usual) if f.name in options}
    plan = dataclasses.replace(usual, **shared, **{key: value for key, value in task.items() if value is not None})
    if isinstance(options.get("basis"), Mapping):
        options["basis"] = LogRadialBasis(**options["basis"])
    model = plan.network(build(plan, **options))
    network = network_of(model)
    own = Task(plan.in_chans, plan.num_classes, plan.image_size)
    if usual_task is not None:
        own = usual_task._replace(in_chans=own.in_chans, num_classes=own.num_classes, image_size=own.image_size)
    elif own.in_chans > 1 or own.image_size is None:
        own = own._replace(ground="surroundings")
    network.task = own
    arguments = {"name": name, **vars(plan), **_own_options(build), **options}
    arguments |= dict.fromkeys(("channels", *pooled.PLANNED))  # which `ScaleChannels` adds as they are
    arguments = {key: value for key, value in arguments.items() if value is not None}
    network.arguments = json.loads(json.dumps(arguments, default=_to_plain))
    return model


def _to_plain(value: Any) -> Any:
    """For what JSON does not know."""
    if isinstance(value, LogRadialBasis):
        return {key: part for key, part in vars(value).items() if part is not None}
    return value.item() if isinstance(value, np.generic) else list(value)


def network_of(model: nn.Module) -> Network:
    """The network of :func:`create_model` that a model is, or that looks at several sizes in it.

    A network that was registered is returned as it is: of a `Network` it has `task` and `arguments`.
    """
    network: Any = model.net if isinstance(model, ScaleChannels) else model
    if not isinstance(network, Network) and not isinstance(vars(network).get("task"), Task):
        raise TypeError(
            f"`model` must be a network of create_model (got {type(network).__name__}): make your own known to it with"
            " register_model(name, builder)."
        )
    return network  # type: ignore[no-any-return]


def count_parameters(model: nn.Module) -> int:
    """How many numbers are learned."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def set_input_statistics(model: nn.Module, std: Any, mean: Any = 0.0) -> None:
    """Have a network, also one inside `ScaleChannels`, bring its input to the standard deviation and mean of 1 and 0.

    Args:
        model: Made by :func:`create_model`.
        std: Of the training images, a number; or one for each channel, of which the paper's networks take the mean.
        mean: Likewise; the paper's networks do not subtract it.
    """
    network = network_of(model)
    for name, numbers in (("std", std), ("mean", mean)):
        buffer, value = network._buffers.get(f"input_{name}"), torch.as_tensor(numbers)
        if buffer is None:
            continue
        if buffer.ndim == 0 and value.shape == (network.in_chans,):
            value = value.mean()
        if value.ndim and value.shape != buffer.shape:
            raise ValueError(f"`{name}` must be one number or have shape {tuple(buffer.shape)} (got {numbers!r}).")
        if not value.isfinite().all() or (name == "std" and not (value > 0).all()):
            raise ValueError(f"`{name}` must be finite, and a deviation positive (got {numbers!r}).")
        buffer.copy_(value)
