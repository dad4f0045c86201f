"""One's own pictures at equal training time: what examples/equal_time.py and examples/recipes.py measured."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from paper import recorded
from paper.cells import Summary, between
from paper.markdown import GAP, table, view

OURS, RIVAL = "scalesteer train", "random resizing by 0.5 to 2"
SIDES = {"ours": OURS, "rival": RIVAL, "lowest": "the same, the epoch of the lowest validation error"}
RANGES = ("smaller", "inside", "larger")  # than training showed
WAYS = {  # a row of the table: how it was trained, how it looks at pictures
    "resized by 0.5 to 2; the network alone": ("one size, resized by 0.5 to 2", "alone"),
    "… five sizes at test, logsumexp": ("one size, resized by 0.5 to 2", "plain join"),
    "**… the same, fitted where that is better: the default**": ("one size, resized by 0.5 to 2", "as trained"),
    "… mean of probabilities, fitted": ("one size, resized by 0.5 to 2", "fitted, softmax"),
    "… the most confident, fitted": ("one size, resized by 0.5 to 2", "fitted, confident"),
    "… mean, fitted": ("one size, resized by 0.5 to 2", "fitted, mean"),
    "… three sizes at test, 0.71 to 1.41, fitted": ("one size, resized by 0.5 to 2", "fitted, 0.71 to 1.41"),
    "resized by 0.71 to 1.41, five sizes at test": ("one size, resized by 0.71 to 1.41", "as trained"),
    "not resized, five sizes at test": ("one size, not resized", "as trained"),
    "resized by 0.5 to 2, the last epoch in channels": ("channels in the last epoch", "as trained"),
    "… the last sixth in channels": ("channels in the last sixth", "as trained"),
    "every epoch in channels, not resized": ("channels in every epoch, not resized", "as trained"),
}


def by_range(errors: Mapping[str, float]) -> dict[str, float]:
    """Mean errors at smaller sizes than training's, at its own and at larger ones."""
    smaller = fmean(error for size, error in errors.items() if float(size) < 1)
    larger = fmean(error for size, error in errors.items() if float(size) > 1)
    return {"smaller": smaller, "inside": errors["1"], "larger": larger}


def _sides() -> dict[str, dict[int, dict[str, Any]]]:
    """The runs of both sides, by seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in recorded("guide/equal-time.json"):
        found.setdefault(row["side"], {})[row["seed"]] = row
    return found


def _differences(where: str) -> list[float]:
    """Errors of ours minus those of random resizing, in points, folder by folder."""
    sides = _sides()
    return [
        by_range(row["errors"])[where] - by_range(sides[RIVAL][seed]["errors"])[where]
        for seed, row in sides[OURS].items()
    ]


@view
def equal_time(side: str, where: str, seed: int | None = None) -> str:
    """The mean error in % of one of `SIDES` inside training's sizes, at smaller or larger ones, or over all five."""
    rows = [row["errors"] for own, row in _sides()[SIDES[side]].items() if seed in (None, own)]
    return f"{fmean(fmean(own.values()) if where == 'all' else by_range(own)[where] for own in rows):.1f}"


@view
def equal_time_table() -> str:
    """Both sides by size, and the intervals of their differences."""
    sides = _sides()
    sizes = list(next(iter(sides[OURS].values()))["errors"])
    rows = []
    for name, runs in sides.items():
        if name == SIDES["lowest"]:  # a sentence has it
            continue
        errors = [f"{fmean(run['errors'][size] for run in runs.values()):.1f}" for size in sizes]
        means = [f"{fmean(by_range(run['errors'])[where] for run in runs.values()):.1f}" for where in RANGES]
        epochs = fmean(run["epochs"] for run in runs.values())
        known = [run["cpu_seconds"] for run in runs.values() if run["cpu_seconds"] is not None]
        seconds = f"{fmean(known):.0f} s" if known else GAP
        rows.append([f"`{name}`" if name == OURS else name, *errors, *means, f"{epochs:.0f}", seconds])
    found = {where: _differences(where) for where in RANGES}
    count = len(found["inside"])
    if count > 1:  # one folder has no interval
        shown = ["{:+.1f} to {:+.1f}".format(*between(Summary.of(own))) for own in found.values()]
        rows.append(["difference, 95 %", *[GAP] * len(sizes), *shown, GAP, GAP])
    head = ["error in %, photographs of size", *sizes, *RANGES, "epochs", "CPU time"]
    one = next(iter(sides[OURS].values()))
    train, val, test = one["counts"]
    about = f"{count} folders" if count > 1 else "One folder"
    about += (
        f", {train} photographs for training, {val} for validation, {test} for testing, each of these at five sizes;"
    )
    about += " Student's intervals of the differences, folder by folder;" if count > 1 else ""
    about += f" torch {one['torch']}, commit"
    commits = dict.fromkeys(run["commit"][:7] for run in sides[OURS].values())
    about += f"{'s' * (len(commits) > 1)} {', '.join(commits)}; `python -m examples.equal_time`."
    return f"{table([head, *rows])}\n\n{about}"


@view
def recipes() -> str:
    """Ways of training that take the same time, on three kinds of pictures."""
    found = recorded("guide/recipes.json")
    kinds = list(dict.fromkeys(row["kind"] for row in found))
    rows = []
    for name, (way, join) in WAYS.items():
        own = {row["kind"]: row for row in found if row["way"] == way}
        cells = []
        for kind in kinds:
            if kind not in own:
                cells.append(GAP)
                continue
            errors = dict(zip(("0.5", "0.71", "1", "1.41", "2"), own[kind]["errors"][join], strict=True))
            cells.append(" / ".join(f"{by_range(errors)[where]:.1f}" for where in RANGES))
        if set(cells) != {GAP}:
            rows.append([name, *cells])
    seconds = [row["cpu_seconds"] for row in found]
    train, val, trial = found[0]["counts"]
    about = f"{train} pictures for training, {val} for validation, {trial} to count errors on, each at five sizes; one"
    about += f" seed; {min(seconds):.0f} to {max(seconds):.0f} s of CPU time each; torch {found[0]['torch']}, commit"
    about += f" {found[0]['commit'][:7]}; `python -m examples.recipes`."
    return f"{table([['error in %, smaller / inside / larger', *kinds], *rows])}\n\n{about}"


@view
def badges(number: str) -> str:
    """Of the default network on examples/badges.py: its "error" in %, or the "cpu_seconds" it took."""
    row = next(row for row in recorded("guide/badges.json") if "readout" not in row["flags"])
    return f"{row[number]:.1f}" if number == "error" else f"{row[number]:.0f}"
