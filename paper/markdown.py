"""Numbers and names as Markdown, and the register of views.

A view is a function that gives what a page shows: a Markdown table, or a number of a sentence. Markers in the pages
call views by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

GAP = "–"  # in the place of a number that nobody has
View = TypeVar("View", bound=Callable[..., Any])
VIEWS: dict[str, Callable[..., Any]] = {}


def view(function: View) -> View:
    """Register a view. Where its first argument is `data`, markers leave that out and get the results of results/.

    Raises:
        ValueError: If there is a view of that name.
    """
    name, module = function.__name__, function.__module__
    if name in VIEWS:
        raise ValueError(f"views must have names of their own (`{name}` of {module} is taken).")
    VIEWS[name] = function
    return function


def table(rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table; the first row is its head.

    Args:
        rows: Cells, shown by `str`.
        left: How many columns, from the first, hold words and are aligned left. The others hold numbers.

    Raises:
        ValueError: If a row has another number of cells than the head.
    """
    head, *body = ([str(cell) for cell in row] for row in rows)
    for row in body:
        if len(row) != len(head):
            raise ValueError(f"`rows` must have {len(head)} cells each, as the head has (got {len(row)}: {row}).")
    rule = ["---" if column < left else "--:" for column in range(len(head))]
    first, *rest = ("| " + " | ".join(row) + " |" for row in (head, *body))
    return "\n".join([first, "|" + "|".join(rule) + "|", *rest])


def percent_table(head: Sequence[str], rows: Mapping[str, float | Iterable[float]]) -> str:
    """A table of shares in %, by the name of their row; a row of one share may be the number alone."""
    shares = {name: own if isinstance(own, Iterable) else (own,) for name, own in rows.items()}
    return table([head, *((name, *(f"{100 * share:.1f} %" for share in own)) for name, own in shares.items())])


def words(names: Sequence[str]) -> str:
    """Names in a sentence: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
