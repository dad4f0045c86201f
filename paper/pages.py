"""Fills in the tables and numbers of README.md and docs/ from results/; all other words are written by people.

A page is plain Markdown, edited where it is read. Markers, which readers do not see, name a view: a function that
:func:`paper.markdown.view` registers. The table between two of them is replaced by what the view gives:

    <!-- table: claims() -->
    | claim of the paper | ...
    <!-- end -->

and so are the words just before a marker, as many as the view gives:

    SS-CNN has 1.89<!-- = error("1", "SS-CNN", "MNIST-Scale") --> % errors.

Everything outside of the markers stays as it is. Code blocks between fences are not searched.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from paper import (
    ROOT,
    anysize,
    cells,
    claims,
    conversions,
    datasets,
    distortion,
    equal,
    examples,
    group,
    masks,
    measures,
    quickstart,
    report,
    reproduced,
    speed,
)
from paper.markdown import VIEWS
from scalesteer.files import write_atomically

MODULES = (
    *(anysize, claims, conversions, datasets, distortion, equal, examples, group, masks, measures),
    *(quickstart, report, reproduced, speed),
)
"""Whose views the markers can name."""

TABLE = re.compile(r"<!-- table: (.+?) -->")
END = "<!-- end -->"
NUMBER = re.compile(r"<!-- = (.+?) -->")
OPENING = re.compile(r"[*_(\[|>\"]*")  # what may stand before the first word of a number


class PageError(ValueError):
    """A marker that cannot be filled in; the message begins with its place."""


class Change(NamedTuple):
    """What a page says and what the results say: its line, both texts, and the view."""

    line: int
    old: str
    new: str
    view: str


def views() -> dict[str, Callable[..., Any]]:
    """What markers can call: all views, those of `data` with the results of results/."""
    of_results = [name for name, function in VIEWS.items() if "data" in inspect.signature(function).parameters]
    return VIEWS | {name: partial(VIEWS[name], cells.published()) for name in of_results}


def evaluator() -> Callable[[str], str]:
    """A function that gives what the expression of a marker stands for, as text."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)  # Markdown, not HTML
    environment.globals |= views()
    return lambda expression: str(environment.compile_expression(expression, undefined_to_none=False)()).strip()


def fill(text: str, evaluate: Callable[[str], str], place: str = "page") -> tuple[str, list[Change]]:
    """A page with its tables and numbers filled in, and what changed.

    Raises:
        PageError: If a marker names no view, a table has no end, or nothing stands before a number's marker.
    """
    lines, changes, filled = text.split("\n"), list[Change](), list[str]()
    numbered = iter(enumerate(lines, 1))
    fenced = False
    for number, line in numbered:
        fenced ^= line.lstrip().startswith("```")
        found = None if fenced else TABLE.fullmatch(line.strip())
        if found:
            old = "\n".join(_until_end(numbered, f"{place}:{number}"))
            new = _value(evaluate, found[1], f"{place}:{number}")
            filled += [line, new, END]
            if new != old:
                same = sum(1 for _ in _equal_start(old.split("\n"), new.split("\n")))
                before, after = ((text.split("\n")[same:] or [""])[0] for text in (old, new))
                changes.append(Change(number + 1 + same, before, after, found[1]))
        else:
            filled.append(line if fenced else _fill_numbers(line, evaluate, place, number, changes))
    return "\n".join(filled), changes


def _until_end(numbered: Iterator[tuple[int, str]], where: str) -> Iterator[str]:
    for _, line in numbered:
        if line.strip() == END:
            return
        yield line
    raise PageError(f"{where}: the table has no line {END} after it.")


def _equal_start(first: list[str], second: list[str]) -> Iterator[str]:
    for one, other in zip(first, second, strict=False):
        if one != other:
            return
        yield one


def _value(evaluate: Callable[[str], str], expression: str, where: str) -> str:
    try:
        return evaluate(expression)
    except Exception as error:  # whatever a view raises, its place is what the writer needs
        raise PageError(f"{where}: {expression} cannot be filled in: {error}") from error


def _fill_numbers(line: str, evaluate: Callable[[str], str], place: str, number: int, changes: list[Change]) -> str:
    """A line whose numbers are as the results say; `changes` grows by those that were not."""
    done, rest = "", line
    while found := NUMBER.search(rest):
        new = _value(evaluate, found[1], f"{place}:{number}")
        before = rest[: found.start()]
        words = [*re.finditer(r"\S+", before)][-len(new.split()) :]
        if not words or words[-1].end() != len(before):
            raise PageError(f"{place}:{number}: no number stands right before the marker of {found[1]}.")
        opening = OPENING.match(words[0][0])
        start = words[0].start() + (opening.end() if opening else 0)
        old = before[start:]
        if old != new:
            changes.append(Change(number, old, new, found[1]))
        done += before[:start] + new + found[0]
        rest = rest[found.end() :]
    return done + rest


def pages(root: Path = ROOT) -> list[Path]:
    """Where the pages lie in the checkout `root`."""
    return [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if "_build" not in path.parts]


def differences(root: Path = ROOT) -> list[str]:
    """What the pages say otherwise than the results: a sentence each, with the file, the line, and what to type."""
    evaluate = evaluator()
    found = ((path.relative_to(root), path.read_text(encoding="utf-8")) for path in pages(root))
    return [
        f"{place}:{change.line}: the page has {change.old!r}, the results have {change.new!r} ({change.view}); "
        "type `make docs` to fill it in"
        for place, text in found
        for change in fill(text, evaluate, str(place))[1]
    ]


def write(root: Path = ROOT) -> list[str]:
    """Fill in every page; those that are as the results say are left alone.

    Returns:
        The places of what was filled in: file and line.
    """
    evaluate, filled = evaluator(), list[str]()
    for path in pages(root):
        place = path.relative_to(root)
        text, changes = fill(path.read_text(encoding="utf-8"), evaluate, str(place))
        if changes:
            write_atomically(path, text.encode())
            filled += [f"{place}:{change.line}" for change in changes]
    return filled
