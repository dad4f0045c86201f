"""Published results: a few files of JSON lines, one line for each run, sorted by the run's name.

``runs/<dataset>.jsonl`` holds the runs of one dataset. paper/ keeps files of other kinds beside them, and checks all
that a line must hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from scalesteer import files
from scalesteer.training.config import RunConfig

Result = dict[str, Any]
Kind = Literal["runs", "repeats", "distortion"]
LOCK_WAIT_S = 60
HISTORY = ("loss", "val_loss", "val_error", "seconds")  # kept of each epoch; seconds since the beginning
# What parsing and checking raise on bad input: wrong types, nesting too deep, a number too large for a float.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


class ResultError(ValueError):
    """A line that does not hold a result, or a file that cannot be written."""


def find_config(result: Any, kind: Kind) -> RunConfig:
    """The configuration of a result; raises one of `MALFORMED` if it has none."""
    return RunConfig.from_dict(result["config"])


Check = Callable[[Any, Kind], RunConfig]  # finds the configuration, or raises one of `MALFORMED`


def publish(result: Result, folder: Path, kind: Kind = "runs", check: Check = find_config) -> Path:
    """Put a result into its file in a folder, small: the history as columns, rounded to five digits.

    A result of the same run is replaced; among repeats it is kept beside the new one. Several processes may publish to
    one folder.

    Returns:
        The file that has it now.

    Raises:
        ResultError: If `check` refuses the result or a line of the file, or the file cannot be read or written.
    """
    try:
        if isinstance(result.get("history"), list):
            columns = {name: [float(f"{epoch[name]:.5g}") for epoch in result["history"]] for name in HISTORY}
            result = result | {"history": columns}
        config, line = check(result, kind), json.dumps(result, separators=(",", ":"), allow_nan=False)
    except MALFORMED as error:
        raise ResultError(f"this is not a result to publish: {error}.") from error
    path = folder / "runs" / f"{config.dataset}.jsonl" if kind == "runs" else folder / f"{kind}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path.with_name(f".{path.name}.lock"), LOCK_WAIT_S):
            before = read_lines(path, kind, check) if path.exists() else []
            kept = [(other.name, text) for other, _, text in before if kind == "repeats" or other != config]
            lines = sorted([*kept, (config.name, line)], key=lambda entry: entry[0])  # repeats stay in their order
            files.write_atomically(path, "".join(f"{text}\n" for _, text in lines).encode())
    except OSError as error:
        raise ResultError(f"{path} cannot be written ({error.strerror or error}).") from error
    return path


def read_lines(path: Path, kind: Kind, check: Check) -> list[tuple[RunConfig, Result, str]]:
    """The configuration, the result and the text of each line; raises ResultError with the number of a bad one."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} cannot be read ({error}).") from error
    found: list[tuple[RunConfig, Result, str]] = []
    seen: dict[RunConfig, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            result = json.loads(line)
            config = check(result, kind)
            if kind == "runs" and path.stem != config.dataset:
                raise ValueError(f"a run on {config.dataset} belongs into {config.dataset}.jsonl")
            if kind != "repeats" and config in seen:
                raise ValueError(f"the same run as in line {seen[config]}")
        except MALFORMED as error:
            raise ResultError(f"{path}, line {number}: {error or type(error).__name__}.") from error
        seen[config] = number
        found.append((config, result, line))
    return found
