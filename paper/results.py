"""Published results of all kinds, each line checked against one schema.

``runs/<dataset>.jsonl`` holds the runs of one dataset, ``replaced/<dataset>.jsonl`` those whose place others have
taken, ``repeats.jsonl`` runs that were made again and are not used in tables, ``distortion.jsonl`` what networks do on
distorted test images.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from paper import forms  # noqa: F401  registers networks that results name
from paper.record import Record
from scalesteer import files
from scalesteer.app.results import MALFORMED, ResultError

Result = dict[str, Any]
LOCK_WAIT_S = 60
HISTORY = ("loss", "val_loss", "val_error", "seconds")  # kept of each epoch; seconds since the beginning
Kind = Literal["runs", "repeats", "replaced", "distortion"]
BY_DATASET: tuple[Kind, ...] = ("runs", "replaced")  # a folder with one file for each
ALL_KEPT: tuple[Kind, ...] = ("repeats", "replaced")  # however many there are of one run
Schema = dict[str, str]  # what each field holds, in the words of `_holds`
RUN: Schema = {"status": "text", "identity": "text", "config": "object", "environment": "object"}
RUN |= {"parameters": "count", "seconds": "number", "history": "history"}
FAILED: Schema = RUN | {"reason": "text"}
TUNED: Schema = RUN | {"val_error": "rate", "val_loss": "number", "best_epoch": "count"}
TESTED: Schema = TUNED | {"test_error": "rate", "test_error_by_scale": "bins"}
# Where training leaves out some sizes, and where a network with scale channels says the size.
SIZES: Schema = {"test_error_inside": "rate", "test_error_outside": "rate", "size_correlation": "correlation"}
SIZES |= {"test_ece": "rate"}  # of runs since it is measured
DISTORTED: Schema = {
    "config": "object",
    "sigma": "number",
    "errors": "rates",
    "moved": "rates",
    "environment": "object",
}
_VERSIONS: Schema = dict.fromkeys(("scalesteer", "python", "torch", "numpy"), "text")
ENVIRONMENT: Schema = _VERSIONS | {"command": "text", "commit": "text or null", "device": "text", "data": "data"}
# In the environment, what else must be known about how a number was made; and what a name in the configuration stood
# for then, if it stands for something else now.
OPTIONAL: Schema = {"note": "text", "form": "text"}
REPLACED: Schema = OPTIONAL | {"replaced": "text"}  # why another run has the place of this one
BIN: Schema = {"from": "number", "to": "number", "images": "count", "error": "rate"}


def _holds(value: Any, kind: str) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    match kind:
        case "text" | "text or null":
            return isinstance(value, str) or (value is None and kind == "text or null")
        case "number":
            return number
        case "count":
            return number and isinstance(value, int) and value >= 0
        case "rate" | "correlation":
            return number and (0 if kind == "rate" else -1) <= value <= 1
        case "bins":
            return isinstance(value, list) and all(
                row.keys() == BIN.keys() and all(_holds(row[k], BIN[k]) for k in row) for row in value
            )
        case "history":  # columns of equal length
            columns = [value[name] for name in HISTORY] if value.keys() == set(HISTORY) else []
            numbers = all(_holds(entry, "number") for column in columns for entry in column)
            return len(set(map(len, columns))) == 1 and numbers and all(_holds(e, "rate") for e in value["val_error"])
    if not isinstance(value, dict):
        return False
    if kind == "data":
        return isinstance(value.get("digest"), str) and isinstance(value.get("source"), dict)
    return kind == "object" or all(_holds(entry, "rate") for entry in value.values())  # rates


def check(result: object, kind: Kind = "runs") -> Record:
    """The configuration of a result that keeps to the schema.

    Raises:
        ValueError: If it does not, naming the field.
    """
    if not isinstance(result, dict):
        raise ValueError("not a JSON object")
    config = Record.from_dict(result.get("config"))
    if kind == "distortion":
        schema = DISTORTED
    elif result.get("status") == "finished":
        schema = TUNED if config.tuning else TESTED
    else:
        schema = FAILED
    _check_fields(result, schema, SIZES if schema is TESTED else None)
    _check_fields(result["environment"], ENVIRONMENT, REPLACED if kind == "replaced" else OPTIONAL)
    if result.get("status") not in ((None,) if kind == "distortion" else ("finished", "failed")):
        raise ValueError(f"`status` must be finished or failed (got {result['status']!r})")
    if "identity" in result and result["identity"] != config.identity:
        raise ValueError(f"`identity` {result['identity']} is not that of its `config`, {config.identity}")
    return config


def _check_fields(values: dict[str, Any], schema: Schema, optional: Schema | None = None) -> None:
    known = {**schema, **(optional or {})}
    for problem, names in (("unknown", values.keys() - known.keys()), ("missing", schema.keys() - values.keys())):
        if names:
            raise ValueError(f"{problem} field {', '.join(sorted(map(repr, names)))}")
    for name, value in values.items():
        if not _holds(value, known[name]):
            raise ValueError(f"`{name}` cannot be {json.dumps(value)[:80]}")


def publish(result: Result, folder: Path, kind: Kind = "runs") -> Path:
    """Write a result where :func:`read` finds it, in place of one of the same run; repeats and replaced are all kept.

    Raises:
        ResultError: If it is not a whole result, or the file cannot be read or written.
    """
    line = to_line(result)
    try:
        config = check(json.loads(line), kind)
    except MALFORMED as error:
        raise ResultError(f"this is not a result to publish: {error}.") from error
    path = folder / kind / f"{config.dataset}.jsonl" if kind in BY_DATASET else folder / f"{kind}.jsonl"
    if path.exists():
        _read_file(path, kind)  # nothing is added to a file that could not be read
    return add_line(path, config, line, repeats=kind in ALL_KEPT)


def read(folder: Path, kind: Kind = "runs") -> list[tuple[Record, Result]]:
    """All results of one kind, sorted by name; those of a folder that is not there are none.

    Raises:
        ResultError: If a line is not a whole result, or a run is there twice; names file and line.
    """
    paths = (folder / kind).glob("*.jsonl") if kind in BY_DATASET else folder.glob(f"{kind}.jsonl")
    return [entry for path in sorted(paths) for entry in _read_file(path, kind)]


def _read_file(path: Path, kind: Kind) -> list[tuple[Record, Result]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} cannot be read ({error}).") from error
    found: list[tuple[Record, Result]] = []
    seen: dict[Record, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            result = json.loads(line)
            config = check(result, kind)
            if kind in BY_DATASET and path.stem != config.dataset:
                raise ValueError(f"a run on {config.dataset} belongs into {config.dataset}.jsonl")
            if kind not in ALL_KEPT and config in seen:
                raise ValueError(f"the same run as in line {seen[config]}")
        except MALFORMED as error:
            raise ResultError(f"{path}, line {number}: {error or type(error).__name__}.") from error
        seen[config] = number
        found.append((config, result))
    return found


def of_run(record: Record, result: Result) -> Result:
    """The result of a run as it is published: with its record in place of what was trained."""
    own = {"identity": record.identity, "config": record.to_dict()}
    return {name: value for name, value in result.items() if name != "run"} | own


def to_line(result: dict[str, Any]) -> bytes:
    """A result as one line, small: the history as columns, rounded to five digits."""
    try:
        if isinstance(history := result.get("history"), list):
            columns = {name: [float(f"{epoch[name]:.5g}") for epoch in history] for name in HISTORY}
            result = result | {"history": columns}
        return json.dumps(result, separators=(",", ":"), allow_nan=False).encode()
    except MALFORMED as error:
        raise ResultError(f"this is not a result to publish: {error}.") from error


def add_line(path: Path, config: Record, line: bytes, *, repeats: bool = False) -> Path:
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


def _find_config(line: bytes, place: str) -> Record:
    try:
        result = json.loads(line)
        if not isinstance(result, dict):
            raise ValueError("not a JSON object")
        return Record.from_dict(result.get("config"))
    except MALFORMED as error:
        raise ResultError(f"{place}: {error or type(error).__name__}.") from error
