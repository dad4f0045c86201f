"""Argument checks shared by every room: each error says what is wrong, the value given and what is accepted."""

import difflib
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any


def integer(name: str, value: Any, *, minimum: int) -> int:
    """Return `value` as a Python int of at least `minimum`; numpy integers pass, bools and floats do not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer (got {value!r} of type {type(value).__name__}).") from None
    if number < minimum:
        raise ValueError(f"`{name}` must be at least {minimum} (got {number}).")
    return number


def pair(name: str, value: Any, *, minimum: int) -> tuple[int, int]:
    """Return an integer, or a pair of them, as a pair."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"`{name}` must be an integer or a pair of them (got {value!r}).")
        return integer(name, value[0], minimum=minimum), integer(name, value[1], minimum=minimum)
    number = integer(name, value, minimum=minimum)
    return number, number


def real(name: str, value: Any) -> float:
    """Return `value` as a finite float."""
    if isinstance(value, (bool, str)):
        raise TypeError(f"`{name}` must be a number (got {value!r}).")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` must be a number (got {value!r}).") from None
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


def choice(name: str, value: Any, options: Sequence[str]) -> str:
    """Return `value` if it is one of `options`; otherwise name them all and the nearest."""
    if isinstance(value, str) and value in options:
        return value
    listed = ", ".join(repr(option) for option in options)
    near = difflib.get_close_matches(str(value), options, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"`{name}` must be one of {listed} (got {value!r}).{hint}")
