"""Numbers as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
