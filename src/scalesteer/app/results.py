"""What came of a run, in words: for those who get its network."""

import json
from pathlib import Path
from typing import Any

from scalesteer import files
from scalesteer._text import as_code, in_markdown
from scalesteer.app.config import Run

# What reading and checking raise on bad input: wrong types, nesting too deep, a number too large for a float.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


class ResultError(ValueError):
    """What does not hold a result."""


def read_card(path: Path) -> str:
    """The :func:`card` of a result.json; a ResultError if it does not hold the result of a run."""
    try:
        return card(json.loads(files.read_small(path)))
    except (OSError, *MALFORMED) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ResultError(f"{path} cannot be read as the result of a run: {reason}.") from error


def card(result: dict[str, Any]) -> str:
    """What a reader of a trained network should know of its run, as Markdown: data, command, commit, error by size."""
    made, run = result.get("environment", {}), Run.from_dict(result["run"] if "run" in result else result["config"])
    data, about, rows = made.get("data", {}), run.data.describe(), list[tuple[str, dict[str, Any]]]()
    name = f"{run.data.name}, split {about['split']}" if "split" in about else f"own pictures ({run.data.name})"
    name += f", SHA-256 {data['digest']}" if "digest" in data else ""
    commit, torch = made.get("commit") or "unknown", made.get("torch", "unknown")
    lines = [
        f"- Data: {in_markdown(name)}.",
        f"- Command: {as_code(made.get('command', run.command))}",
        f"- Commit: {in_markdown(commit)}, with torch {in_markdown(torch)}.",
        f"- Validation error: {100 * result['val_error']:.2f} %.",
    ]
    if "test_error" in result:
        lines.append(f"- Test error: {100 * result['test_error']:.2f} %.")
    for row in result.get("test_error_by_scale", ()):
        size = f"{row['from']:g}" if row["from"] == row["to"] else f"{row['from']:g} to {row['to']:g}"
        rows.append((size, row))
    for row in result.get("test_error_by_class", ()):
        rows.append((in_markdown(row["class"]), row))
    if rows:
        lines += ["", "| size or class | images | error in % |", "|---|---|---|"]
        lines += [f"| {name} | {row['images']:,} | {100 * row['error']:.2f} |" for name, row in rows]
    return "\n".join(lines)
