"""Words that people type and read: names found whatever their spelling, and text that is safe to print."""

import difflib
from collections.abc import Sequence
from typing import Any


def choice(name: str, value: Any, options: Sequence[str]) -> str:
    """Return `value` if it is one of `options`; otherwise name them all and the nearest."""
    if isinstance(value, str) and value in options:
        return value
    listed = ", ".join(repr(option) for option in options)
    near = nearest(str(value), options)
    hint = f" Did you mean {near!r}?" if near else ""
    raise ValueError(f"`{name}` must be one of {listed} (got {value!r}).{hint}")


def lookup(name: str, value: Any, options: Sequence[str]) -> str:
    """Return the one of `options` that `value` is, whatever its case and whether it has ``-``, ``_`` or a space.

    Example:
        >>> lookup("model", "SS_CNN", ["plain-cnn", "ss-cnn"])
        'ss-cnn'
    """
    if isinstance(value, str) and value not in options:
        value = next((option for option in options if _folded(option) == _folded(value)), value)
    return choice(name, value, options)


def nearest(word: str, options: Sequence[str]) -> str | None:
    """The option that a mistyped word most likely means, if there is one that resembles it."""
    folded = {_folded(option): option for option in options}
    near = difflib.get_close_matches(_folded(word), folded, n=1)
    return folded[near[0]] if near else None


def _folded(word: str) -> str:
    return word.casefold().replace("_", "-").replace(" ", "-")


def printable(text: str) -> str:
    """A text without characters that would steer a terminal or cannot be drawn."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
