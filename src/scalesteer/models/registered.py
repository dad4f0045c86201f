"""Networks of one's own by name: any `nn.Module` that a function builds."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from torch import nn

from scalesteer import _checks
from scalesteer.channels import ScaleChannels
from scalesteer.models import flat, group, pooled
from scalesteer.models.network import Task
from scalesteer.models.scaled import OF_CHANNELS, ScaledNetwork

Build = TypeVar("Build", bound=Callable[..., nn.Module])
BUILDERS: dict[str, Callable[..., nn.Module]] = {}
OF_TASK = ("in_chans", "num_classes", "image_size")


@overload
def register_model(name: str) -> Callable[[Build], Build]: ...


@overload
def register_model(name: str, builder: Build) -> Build: ...


def register_model(name: str, builder: Any = None) -> Any:
    """Make a network of one's own known to :func:`scalesteer.create_model` by name.

    It can then be saved, read and exported like the others, also inside `ScaleChannels`. Only the name and the
    arguments are saved: whoever reads it registers the same builder first. No file can name code that is to be run.

    Args:
        name: Not that of another network. Without a builder the result is a decorator.
        builder: Makes an `nn.Module` that maps images `(B, C, H, W)` to logits `(B, classes)` or to maps. Its options
            are keywords with values that JSON has. Of `in_chans`, `num_classes` and `image_size` it is given those that
            it takes. If it has an option `pretrained`, a network that was saved is built without it: its weights are in
            the file.

    Returns:
        The builder.

    Example:
        >>> from scalesteer import create_model
        >>> @register_model("two-layers")
        ... def two_layers(num_classes, width=16):
        ...     body = nn.Sequential(nn.Conv2d(3, width, 5), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten())
        ...     return nn.Sequential(*body, nn.Linear(width, num_classes))
        >>> model = create_model("two-layers", num_classes=4, channels=(0.5, 1.0))
        >>> model.arguments["width"], model.task.num_classes
        (16, 4)
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"`name` must be a word (got {name!r}).")
    if builder is None:
        return lambda builder: register_model(name, builder)
    if not callable(builder):
        raise TypeError(f"`builder` must be a function that makes an nn.Module (got {type(builder).__name__}).")
    known = BUILDERS.get(name)
    again = known is not None and (known.__module__, known.__qualname__) == (builder.__module__, builder.__qualname__)
    if name in {*flat.MODELS, *pooled.MODELS, *group.MODELS} or (known is not None and not again):
        raise ValueError(f"a model named {name!r} is registered already.")
    BUILDERS[name] = builder  # also the same function again, as when a cell of a notebook runs twice
    return builder


def list_options(name: str) -> list[str]:
    """The options of a builder, and those of channels of scale."""
    return [*(option for option in _defaults(BUILDERS[name]) if option not in OF_TASK), "channels", *OF_CHANNELS]


def build(name: str, task: dict[str, Any], options: dict[str, Any]) -> nn.Module:
    """The network of a builder, with its task and arguments, in `ScaleChannels` if there are `channels`."""
    builder = BUILDERS[name]
    defaults, takes_all = _defaults(builder), _takes_all(builder)
    scaling = {option: options.pop(option) for option in ("channels", *OF_CHANNELS) if option in options}
    for option in () if takes_all else options:
        if option not in defaults:
            raise TypeError(f"{name} has no option {option!r}: it has {', '.join(list_options(name))}.")
    told: dict[str, Any] = {key: task[key] if task[key] is not None else defaults.get(key) for key in OF_TASK}
    told["in_chans"] = 3 if told["in_chans"] is None else told["in_chans"]
    for key in ("in_chans", "num_classes"):
        if told[key] is None:
            raise TypeError(f"{name} needs `{key}`.")
        told[key] = _checks.integer(key, told[key], minimum=1)
    if told["image_size"] is not None:
        told["image_size"] = _checks.pair("image_size", told["image_size"], minimum=1)
    given = {key: value for key, value in told.items() if value is not None and (takes_all or key in defaults)}
    network = builder(**given, **options)
    if not isinstance(network, nn.Module) or isinstance(network, ScaleChannels):
        raise TypeError(f"the builder of {name} must return a plain nn.Module (got {type(network).__name__}).")
    for attribute in ("task", "arguments"):
        if hasattr(network, attribute):
            raise TypeError(f"the network {name} has an attribute `{attribute}`, which is needed here: rename it.")
    own = {key: value for key, value in {**defaults, **options}.items() if value is not None and key not in OF_TASK}
    own |= {"pretrained": False} if "pretrained" in own else {}
    network.task = Task(**told, ground="surroundings")  # type: ignore[assignment]
    network.arguments = _as_json(name, {"name": name, **told, **own})  # type: ignore[assignment]
    if not scaling.get("channels"):
        if scaling:
            raise ValueError(f"`{next(iter(scaling))}` needs `channels`, the sizes to look at.")
        return network
    scales: Sequence[float] = scaling.pop("channels")
    return ScaledNetwork(network, scales, **scaling)


def _as_json(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        plain = json.loads(json.dumps({key: value for key, value in arguments.items() if value is not None}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"options of {name} must be words, numbers or lists of them: {error}.") from None
    return dict(plain)


def _defaults(builder: Callable[..., nn.Module]) -> dict[str, Any]:
    """The names that a builder takes, with their defaults, None if they have none."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [p for p in inspect.signature(builder).parameters.values() if p.kind in kinds]
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def _takes_all(builder: Callable[..., nn.Module]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(builder).parameters.values())
