"""Published results: ``runs/<dataset>.jsonl``, one line of JSON for each run, sorted by the run's name.

paper/ keeps results of other kinds in such files too, and checks all that a line must hold when it reads them.
"""

import json
from pathlib import Path
from typing import Any

from scalesteer import files
from scalesteer._text import as_code, in_markdown
from scalesteer.app.config import RunConfig

LOCK_WAIT_S = 60
HISTORY = ("loss", "val_loss", "val_error", "seconds")  # kept of each epoch; seconds since the beginning
# What parsing and checking raise on bad input: wrong types, nesting too deep, a number too large for a float.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


class ResultError(ValueError):
    """A line that does not hold a result, or a file that cannot be written."""


def publish(result: dict[str, Any], folder: Path) -> Path | None:
    """Put the result of a run into the file of its dataset, in place of an earlier one, and return the file.

    A run of your own pictures belongs to no dataset: its result stays in its directory, and None is returned.
    Several processes may publish to one folder. What is not a result, or a file that cannot be written or has a line
    that is none, is a ResultError.
    """
    line = to_line(result)
    config = _find_config(line, "this is not a result to publish")
    return None if config.images else add_line(folder / "runs" / f"{config.dataset}.jsonl", config, line)


def read_card(path: Path) -> str:
    """The :func:`card` of a result.json; a ResultError if it does not hold the result of a run."""
    try:
        return card(json.loads(files.read_small(path)))
    except (OSError, *MALFORMED) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ResultError(f"{path} cannot be read as the result of a run: {reason}.") from error


def card(result: dict[str, Any]) -> str:
    """What a reader of a trained network should know of its run, as Markdown: data, command, commit, error by size."""
    made, config = result.get("environment", {}), RunConfig.from_dict(result["config"])
    data, own, rows = made.get("data", {}), config.images, list[tuple[str, dict[str, Any]]]()
    name = f"own pictures ({Path(own).name})" if own else f"{config.dataset}, split {config.split}"
    name += f", SHA-256 {data['digest']}" if "digest" in data else ""
    commit, torch = made.get("commit") or "unknown", made.get("torch", "unknown")
    lines = [
        f"- Data: {in_markdown(name)}.",
        f"- Command: {as_code(made.get('command', config.command))}",
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


def to_line(result: dict[str, Any]) -> bytes:
    """A result as one line, small: the history as columns, rounded to five digits."""
    try:
        if isinstance(history := result.get("history"), list):
            columns = {name: [float(f"{epoch[name]:.5g}") for epoch in history] for name in HISTORY}
            result = result | {"history": columns}
        return json.dumps(result, separators=(",", ":"), allow_nan=False).encode()
    except MALFORMED as error:
        raise ResultError(f"this is not a result to publish: {error}.") from error


def add_line(path: Path, config: RunConfig, line: bytes, *, repeats: bool = False) -> Path:
    """Put a line into a file, in place of one of the same run; `repeats` are kept beside each other."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path.with_name(f".{path.name}.lock"), LOCK_WAIT_S):
            lines = files.read_small(path, files.LARGEST_FILE).splitlines() if path.exists() else []
            before = [(_find_config(old, f"{path}, line {number}"), old) for number, old in enumerate(lines, 1)]
            kept = [(other.name, old) for other, old in before if repeats or other != config]
            entries = sorted([*kept, (config.name, line)], key=lambda entry: entry[0])  # repeats stay in their order
            files.write_atomically(path, b"".join(text + b"\n" for _, text in entries))
    except OSError as error:
        raise ResultError(f"{path} cannot be written ({error.strerror or error}).") from error
    return path


def _find_config(line: bytes, place: str) -> RunConfig:
    try:
        result = json.loads(line)
        if not isinstance(result, dict):
            raise ValueError("not a JSON object")
        return RunConfig.from_dict(result.get("config"))  # type: ignore[arg-type]
    except MALFORMED as error:
        raise ResultError(f"{place}: {error or type(error).__name__}.") from error
