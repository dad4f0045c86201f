"""A user's own grid of runs: read from a TOML file, made by an engine, shown as a table.

seeds = [0, 1, 2]            # optional; above the tables

[base]                       # what all runs have in common: the flags of `scalesteer train`
model = "pooled-cnn"
epochs = 20
tuning = true                # the test set is not looked at while settings are chosen

[grid]                       # every combination of these
lr = [0.001, 0.005]
channels = [[1.0], [0.7, 1.0, 1.4]]
"""

import itertools
import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scalesteer import _checks, files
from scalesteer.app.config import USUAL, Run, make_run

LARGEST_FILE, MOST_RUNS = 1 << 20, 10_000


class SweepError(ValueError):
    """A file that does not describe a grid of runs."""


class Setting(NamedTuple):
    """One combination of the grid's values."""

    values: dict[str, Any]  # of the grid's fields
    runs: tuple[Run, ...]  # one for each seed


def read_grid(path: Path) -> list[Setting]:
    """The settings that a TOML file describes, in the order of the file; the last field of the grid changes fastest.

    Raises:
        SweepError: If the file cannot be read, is not TOML, names an unknown field or has a value out of range. Nothing
            is started before all runs are known to be sound.
    """
    try:
        return _settings(tomllib.loads(files.read_small(path, LARGEST_FILE).decode()))
    except files.DataError as error:
        raise SweepError(str(error)) from error
    except OSError as error:
        raise SweepError(f"{path} cannot be read ({error.strerror or error}).") from error
    except (ValueError, TypeError, RecursionError) as error:  # of TOML, of UTF-8, of a configuration
        raise SweepError(f"{path}: {str(error).rstrip('.')}.") from error


def _settings(content: dict[str, Any]) -> list[Setting]:
    for name in content:
        _checks.choice("a name outside of the tables", name, ("seeds", "base", "grid"))
    base, grid = (_table(content, name) for name in ("base", "grid"))
    if twice := sorted(base.keys() & grid.keys()):
        raise ValueError(f"`{twice[0]}` must stand in [base] or in [grid], not in both")
    seeds = content.get("seeds")
    if not base and not grid and seeds is None:
        raise ValueError("it names no run: give [base] what all runs share, or [grid] lists of values to combine")
    if seeds is not None and "seed" in base | grid:
        raise ValueError("`seed` must not be given in a table beside `seeds`")
    for name, values in (*grid.items(), *([("seeds", seeds)] if seeds is not None else [])):
        if not isinstance(values, list) or not values:
            raise ValueError(f"`{name}` must be a list of values to try (got {values!r}); put one value into [base]")
    count = math.prod(map(len, grid.values())) * len(seeds or [0])
    if count > MOST_RUNS:
        raise ValueError(f"[grid] must have at most {MOST_RUNS:,} runs (got {count:,})")
    settings = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        own = [{}] if seeds is None else [{"seed": seed} for seed in seeds]
        settings.append(Setting(chosen, tuple(_run(base, chosen | seed) for seed in own)))
    runs = [run for setting in settings for run in setting.runs]
    again, times = Counter(runs).most_common(1)[0]
    if times > 1:
        raise ValueError(f"the same run must not be named twice ({again.command})")
    return settings


def _table(content: dict[str, Any], name: str) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"`{name}` must be a table, [{name}] (got {table!r})")
    for field in table:
        _checks.choice(f"a field of [{name}]", field, list(USUAL))
    return table


def _run(base: dict[str, Any], chosen: dict[str, Any]) -> Run:
    try:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in (base | chosen).items()}
        run = make_run(**values)
        hash(run)  # a table or a list of lists where a number belongs would fail later
    except (ValueError, TypeError) as error:
        said = ", ".join(f"{name} = {value!r}" for name, value in chosen.items())
        raise ValueError(f"{str(error).rstrip('.')}{f' (with {said})' if said else ''}") from error
    return run


def table(settings: list[Setting], results: Mapping[Run, Mapping[str, Any]]) -> str:
    """One line for each setting: its values, the mean over seeds of the validation error, and of the test error.

    The lowest validation error comes first. The test error says how good the choice is; had it been chosen by, it would
    say nothing. Settings with runs that failed or are missing come last: a mean over some of the seeds may flatter.
    """
    tested = any("test_error" in result for result in results.values())
    several = max(len(setting.runs) for setting in settings) > 1
    lines = []
    for setting in settings:
        found = [results[run] for run in setting.runs if run in results]
        ended = [result for result in found if result["status"] == "finished"]
        whole = len(ended) == len(setting.runs)
        validation = [result["val_error"] for result in ended] if whole else []
        cells = [
            ", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in setting.values.values()
        ]
        cells.append(_mean(validation) if whole else f"{len(ended)} of {len(setting.runs)} finished")
        if tested:
            cells.append(_mean([result["test_error"] for result in ended]) if whole else "")
        lines.append((statistics.fmean(validation) if whole else math.inf, cells))
    of = " (mean ± deviation over seeds)" if several else ""
    head = [*settings[0].values, f"validation error{of}", *(["test error"] if tested else [])]
    rows = [head, *(cells for _, cells in sorted(lines, key=lambda line: line[0]))]
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells as lines of text, with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _mean(shares: list[float]) -> str:
    deviation = f" ± {100 * statistics.stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{100 * statistics.fmean(shares):.2f}{deviation} %"
