"""Words that people type and read: names found whatever their spelling, and text that is safe to print."""

import difflib
import html
import re
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


def printable_lines(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def in_markdown(text: Any) -> str:
    r"""A name as it is written in Markdown, where it is shown as it is: nothing in it is markup.

    Example:
        >>> print(in_markdown("a|b <script> *c*"))
        a\|b &lt;script&gt; \*c\*
    """
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", html.escape(printable(str(text)), quote=False))


def as_code(text: Any) -> str:
    """A text as code in a line of Markdown."""
    plain = printable(str(text))
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    return f"{fence}{plain}{fence}" if len(fence) == 1 else f"{fence} {plain} {fence}"
