"""Argument checks shared by every room: each error says what is wrong, the value given and what is accepted."""

import itertools
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalesteer._text import choice as choice
from scalesteer._text import lookup as lookup

IntPair = int | tuple[int, int]
Device = torch.device | str | None
Dtype = torch.dtype | None


def integer(name: str, value: Any, *, minimum: int) -> int:
    """Return `value` as a Python int of at least `minimum`; numpy integers pass, bools and floats do not."""
    try:
        number = operator.index(value)
        if isinstance(value, bool):
            raise TypeError
    except TypeError:
        raise TypeError(f"`{name}` must be an integer (got {value!r} of type {type(value).__name__}).") from None
    if number < minimum:
        raise ValueError(f"`{name}` must be at least {minimum} (got {number}).")
    return number


def pair(name: str, value: Any, *, minimum: int) -> tuple[int, int]:
    """Return an integer, or a pair of them, as a pair."""
    values = value if isinstance(value, (tuple, list)) else (value, value)
    if len(values) != 2:
        raise ValueError(f"`{name}` must be an integer or a pair of them (got {value!r}).")
    return integer(name, values[0], minimum=minimum), integer(name, values[1], minimum=minimum)


def real(name: str, value: Any) -> float:
    """Return `value` as a finite float."""
    try:
        number = float(value)
        if isinstance(value, (bool, str)):
            raise TypeError
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` must be a number (got {value!r}).") from None
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be finite (got {number}).")
    return number


def reals(name: str, value: Any) -> tuple[float, ...]:
    """Return a non-empty sequence of finite numbers as a tuple of floats, detached from the caller's object."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"`{name}` must be a sequence of numbers (got {value!r}).")
    numbers = tuple(real(f"{name}[{i}]", v) for i, v in enumerate(value))
    if not numbers:
        raise ValueError(f"`{name}` must not be empty: give at least one number.")
    return numbers


def boolean(name: str, value: Any) -> bool:
    """Return True or False; numbers that merely could be one do not pass."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be True or False (got {value!r}).")
    return bool(value)


def channels(in_channels: Any, out_channels: Any, groups: Any) -> tuple[int, int, int]:
    """Return the three as integers; both numbers of channels must be divisible by `groups`."""
    groups = integer("groups", groups, minimum=1)
    counts = []
    for name, value in (("in_channels", in_channels), ("out_channels", out_channels)):
        counts.append(integer(name, value, minimum=1))
        if counts[-1] % groups:
            raise ValueError(f"`{name}` (={counts[-1]}) must be divisible by `groups` (={groups}).")
    return counts[0], counts[1], groups


def kernel_size(value: Any) -> int:
    """Return the side of a square window with a centre pixel, from an integer or a pair of equal ones."""
    height, width = pair("kernel_size", value, minimum=-sys.maxsize)
    if height != width:
        raise ValueError(f"`kernel_size` must be square (got {value!r}): give one number.")
    if height < 3 or height % 2 == 0:
        near = "3" if height < 3 else f"{height - 1} or {height + 1}"
        why = f"the filter needs a centre pixel; use {near}"
        if height == 1:
            why = "one pixel has no size; keep nn.Conv2d here"
        raise ValueError(f"`kernel_size` must be odd and at least 3 (got {height}): {why}.")
    return height


def interval(name: str, value: Any) -> tuple[float, float]:
    """Two finite numbers, the lower one first."""
    numbers = reals(name, value)
    if len(numbers) != 2 or not numbers[0] < numbers[1]:
        raise ValueError(f"`{name}` must be two numbers, the lower one first (got {numbers}).")
    return numbers[0], numbers[1]


def planes(name: str, value: Any) -> tuple[int, ...]:
    """Up to three numbers of planes, counted from 0."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"`{name}` must be a sequence of integers (got {value!r}).")
    numbers = tuple(integer(f"{name}[{i}]", v, minimum=0) for i, v in enumerate(value))
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f"`{name}` must be one to three integers, grey or red, green and blue (got {numbers}).")
    return numbers


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    number = real(name, value)
    if number <= 0:
        raise ValueError(f"`{name}` must be positive (got {number}).")
    return number


def ascending(name: str, value: Any) -> tuple[float, ...]:
    """Return positive, strictly ascending numbers as a tuple of floats."""
    numbers = reals(name, value)
    if numbers[0] <= 0 or any(b <= a for a, b in itertools.pairwise(numbers)):
        raise ValueError(f"`{name}` must be positive and strictly ascending (got {numbers}).")
    return numbers


def padding(value: Any, size: int, stride: tuple[int, int], dilation: tuple[int, int]) -> tuple[int, int]:
    """Return ``"same"``, ``"valid"``, an integer or a pair of them as a pair of integers."""
    if not isinstance(value, str):
        return pair("padding", value, minimum=0)
    choice("padding", value, ("same", "valid"))
    if value == "valid":
        return 0, 0
    if stride != (1, 1):
        raise ValueError(f"padding='same' is not defined for stride {stride}: give `padding` as a number.")
    return dilation[0] * (size - 1) // 2, dilation[1] * (size - 1) // 2


def border(padding_mode: str, border: Sequence[int], image: Sequence[int], reason: str) -> None:
    """Raise an error, with the `reason`, if an image is too small to be continued by `border` on each side."""
    missing = {"reflect": 1, "circular": 0}.get(padding_mode)
    if missing is not None and any(b > n - missing for b, n in zip(border, image, strict=True)):
        raise ValueError(
            f"padding_mode={padding_mode!r} cannot fill {border[0]} rows and {border[1]} columns beyond an image of "
            f"{image[0]} x {image[1]} ({reason}): use padding_mode='zeros' or 'replicate', smaller `scales` or larger "
            "images."
        )


def find_device(value: Any) -> torch.device:
    """Return the device that `value` names, or the default one for None, after trying it."""
    try:
        return torch.empty(0, device=value).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        here = ["cpu", "meta"]
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator()
            here += [f"{kind}:{i}" for i in range(torch.accelerator.device_count())]
        raise ValueError(f"`device` {value!r} is not available here; available: {', '.join(here)}.") from error


def place(device: Any, dtype: Any) -> dict[str, Any]:
    """Return device and dtype as keyword arguments of a tensor factory, after trying the device."""
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"`dtype` must be torch.float16, bfloat16, float32 or float64 (got {dtype!r}).")
    find_device(device)
    return {"device": device, "dtype": dtype}


def batch(x: Any, *, vectors: bool = False) -> None:
    """Raise an error unless `x` is a batch of images, or of `vectors`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a tensor (got {type(x).__name__}).")
    if x.ndim != 4 + vectors or (vectors and x.shape[2] != 2):
        axes = "5 axes (B, C, 2, H, W)" if vectors else "4 axes (B, C, H, W)"
        hint = " add a batch axis with x.unsqueeze(0)." if x.ndim == 3 + vectors else ""
        raise ValueError(f"the input must have {axes} (got shape {tuple(x.shape)}).{hint}")
    if not x.is_floating_point():
        raise TypeError(f"the input must be a real floating-point tensor (got {x.dtype}); convert with x.float().")


def images(x: Any, count: int, weight: Tensor, *, vectors: bool = False) -> None:
    """Raise an error unless `x` is a batch, of images or of `vectors`, that a layer with this `weight` can take."""
    batch(x, vectors=vectors)
    shape = tuple(x.shape)
    if x.shape[1] != count:
        raise ValueError(f"the input must have in_channels={count} channels on axis 1 (got shape {shape}).")
    # Autocast brings narrower types together, but leaves float64 as it is.
    autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    if x.dtype != weight.dtype and (not autocast or torch.float64 in (x.dtype, weight.dtype)):
        raise TypeError(
            f"the input is {x.dtype} but the layer is {weight.dtype}: convert one of them, x.to({weight.dtype}) or "
            f"layer.to({x.dtype})."
        )
    if x.device != weight.device:
        raise ValueError(f"the input is on {x.device} but the layer is on {weight.device}: move one of them.")
    if 0 in shape[-2:]:
        raise ValueError(f"the image must not be empty: height and width must be at least 1 (got shape {shape}).")
