"""Pictures that a CSV file names, and sentences about many files."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from typing import Any

from scalesteer.files import DataError

PART_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
MOST_NAMED = 20  # files in one message
Found = tuple[str, str, str, str | None, float, str, float]  # path, name, label, part if given, size, group, pixel size


def read_list(path: str, notes: list[str]) -> Iterator[Found]:
    """The pictures that a CSV file names."""
    seen: dict[str, tuple[int, str]] = {}
    repeated: list[str] = []
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            if missing := {"path", "label"} - set(rows.fieldnames or ()):
                rule = (
                    "the first line must name the columns path and label (part, size, group and pixel_size may follow)"
                )
                got = f"got {', '.join(rows.fieldnames or ())[:200]!r}, without {' and '.join(sorted(missing))}"
                raise DataError(f"{path}: {rule} ({got}).")
            for row in rows:
                place = f"{path}, line {rows.line_num}"
                name, label, part, size, group, own = _read_row(row, place)
                picture = os.path.join(os.path.dirname(path), os.path.expanduser(name))
                line, before = seen.setdefault(os.path.normpath(picture), (rows.line_num, label))
                if before != label:
                    raise DataError(f"{place}: {name} has the label {label!r}, and {before!r} in line {line}.")
                if line == rows.line_num:
                    yield picture, name, label, part, size, group, own
                else:
                    repeated.append(name)
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a list of pictures: {error}.") from error
    notes += to_sentences("Pictures that are in the list more than once, and count once", repeated)


def _read_row(row: dict[str, Any], place: str) -> tuple[str, str, str | None, float, str, float]:
    """Path, label, part, size, group and pixel size of one line of a list."""
    name, label, part, group = ((row.get(column) or "").strip() for column in ("path", "label", "part", "group"))
    if not name or not label:
        raise DataError(f"{place}: path and label must not be empty.")
    if "part" in row and part.lower() not in PART_NAMES:
        raise DataError(f"{place}: part must be train, val or test (got {part!r}).")
    size, own = _positive(row, "size", 1.0, place), 0.0
    if (row.get("pixel_size") or "").strip():  # of some it may be known, or in their files
        own = _positive(row, "pixel_size", 0.0, place)
    return os.path.normpath(name).replace(os.sep, "/"), label, PART_NAMES.get(part.lower()), size, group, own


def _positive(row: dict[str, Any], name: str, usual: float, place: str) -> float:
    """A number of one line of a list."""
    try:
        number = float(row[name]) if name in row else usual
        if not 0 < number < float("inf"):
            raise ValueError
    except (TypeError, ValueError):
        raise DataError(f"{place}: {name} must be a positive number (got {row[name]!r}).") from None
    return number


def to_sentences(what: str, names: Sequence[str]) -> list[str]:
    """What holds for how many files, and some of them by name; nothing if there are none."""
    return [f"{what} ({len(names):,}): {name_some(sorted(names))}."] if names else []


def name_some(names: Sequence[str]) -> str:
    """The first names, and dots if there are more."""
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
