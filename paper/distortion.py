"""Networks under elastic distortion, after the epochs of the tables and after more: means, ratios, a plot."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from paper import RESULTS, cells, curves, grids
from paper.cells import DISTORTIONS, Data, columns, lines, load, runs, values
from paper.grids import PAPER, STRENGTHS, Cell
from paper.markdown import GAP, view
from scalesteer.datasets import ELASTIC_ALPHAS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VALIDATION_CHOSE = "number chosen by validation"  # of epochs, for each method its own
MORE_EPOCHS = (*(f"{epochs} epochs" for epochs in grids.EPOCHS[1:]), VALIDATION_CHOSE)


def best_network(data: Data, name: str, line: str, column: str = "60 epochs") -> tuple[dict[str, Any], str]:
    """The numbers of the network with the lowest validation error, the first split of a tie, and what is missing."""
    found = runs(data, name)
    mine = found[(found["line"] == line) & (found["column"] == column)]
    ended = mine.dropna(subset="val error").sort_values(["val error", "split"])
    missing = f" ({len(ended)} of {len(mine)})" if len(ended) < len(mine) else ""
    return ended.iloc[0].to_dict() if len(ended) else dict.fromkeys(STRENGTHS, math.nan), missing


@view
def distorted(data: Data) -> str:
    """Table 2 as means over splits, also with images moved."""
    return cells.numbers_table(
        data, "error in %", {line: Cell("2", line, "60 epochs") for line in lines("2")}, DISTORTIONS
    )


# After more epochs


def longer(data: Data) -> str:
    """Each method of Table 2 after 60 epochs and after more."""
    both = itertools.product(lines("longer"), columns("longer"))
    every = {f"{line}, {column}": Cell("longer", line, column) for line, column in both}
    return cells.numbers_table(data, "error in %", every, ("val error", *STRENGTHS), ("validation", *STRENGTHS))


def validation_means(data: Data) -> dict[str, dict[str, float]]:
    """For each method the mean validation error after each number of epochs that all its runs were made for."""
    found: dict[str, dict[str, float]] = {line: {} for line in lines("longer")}
    for line, column in itertools.product(lines("longer"), columns("longer")):
        errors = values(data, Cell("longer", line, column, "val error"))
        if errors.notna().all():
            found[line][column] = errors.mean()
    return {line: means for line, means in found.items() if len(means) > 1}


def epochs_of(data: Data, way: str) -> dict[str, str]:
    """The column of "longer" for each method, if all have the same number of epochs or what validation chose."""
    if way == VALIDATION_CHOSE:
        return {line: min(means, key=means.__getitem__) for line, means in validation_means(data).items()}
    return dict.fromkeys(lines("longer"), way)


@view
def epochs_chosen(data: Data, line: str) -> str:
    """How many epochs validation chose for a method of Table 2."""
    return epochs_of(data, VALIDATION_CHOSE).get(line, GAP).split()[0]


@view
def longer_pairs(data: Data) -> str:
    """SS-CNN against each other method after 60 epochs, and against the paper's after more."""
    pairs: dict[str, tuple[Cell, Cell] | None] = {}
    others = [line for line in lines("longer") if line != "SS-CNN"]
    for line, way in itertools.product(others, ("60 epochs", *MORE_EPOCHS)):
        if line not in grids.OTHERS and way != "60 epochs":
            continue
        own = epochs_of(data, way)
        both = [Cell("longer", m, own[m]) for m in ("SS-CNN", line) if m in own]
        pairs[f"{line}, {way}"] = (both[0], both[1]) if len(both) == 2 else None
    return cells.intervals_table(data, "SS-CNN, trained likewise, minus", pairs, STRENGTHS)


# Ratios of errors


def ratios(data: Data, first: str, second: str, way: str = "60 epochs", best: bool = False) -> list[float]:
    """The first method's errors over the second's at each strength of distortion.

    Args:
        data: All results.
        first: A method of Table 2.
        second: Another.
        way: After so many epochs, or `VALIDATION_CHOSE`.
        best: Of the networks that are best on validation data, instead of means over splits.
    """
    own = epochs_of(data, way)
    if first not in own or second not in own:
        return [math.nan] * len(STRENGTHS)
    if best:
        (over, missing), (under, more) = (best_network(data, "longer", m, own[m]) for m in (first, second))
        return [math.nan if missing or more else over[alpha] / under[alpha] for alpha in STRENGTHS]
    both = [[values(data, Cell("longer", m, own[m], alpha)) for m in (first, second)] for alpha in STRENGTHS]
    paired = [pd.concat(pair, axis=1).dropna().mean() for pair in both]
    return [means.iloc[0] / means.iloc[1] for means in paired]


def paper_ratios(first: str, second: str) -> list[float]:
    """The same of the paper's Table 2."""
    return [float(PAPER["2"][first][alpha]) / float(PAPER["2"][second][alpha]) for alpha in STRENGTHS]


@view
def ratio(data: Data, *which: Any, **options: Any) -> str:
    """The smallest and the largest of :func:`ratios`."""
    return _span(ratios(data, *which, **options))


@view
def paper_ratio(first: str, second: str) -> str:
    """The smallest and the largest of :func:`paper_ratios`."""
    return _span(paper_ratios(first, second))


def _span(found: list[float]) -> str:
    return GAP if any(map(math.isnan, found)) else f"{min(found):.2f} to {max(found):.2f}"


def plots(folder: Path = RESULTS) -> dict[str, Figure]:
    """Ratios under distortion by the figure's place in results/, if there are any."""
    data = load(folder)
    if data.results[list(STRENGTHS)].isna().all(axis=None):
        return {}
    limits = {"LocScaleInv-CNN": 1.0, "Spatial Transformer": grids.PAR}  # below them the paper's claims hold
    panels = {f"SS-CNN / {other}": ratio_lines(data, other) for other in limits}
    drawn = curves.plot_ratios(
        panels,
        ELASTIC_ALPHAS,
        "strength of distortion α",
        list(limits.values()),
        "Error of SS-CNN over that of a rival, under elastic distortion; below the dotted line the paper's claim holds",
    )
    return {"figures/distortion.png": drawn}


def ratio_lines(data: Data, other: str) -> dict[str, tuple[list[float], list[list[float]]]]:
    """The paper's ratios, and ours after each number of epochs with those of each split."""
    drawn: dict[str, Any] = {"paper": (paper_ratios("SS-CNN", other), [])}
    for way in columns("longer"):
        over, under = ([values(data, Cell("longer", m, way, a)) for a in STRENGTHS] for m in ("SS-CNN", other))
        each = pd.concat([a / b for a, b in zip(over, under, strict=True)], axis=1).dropna()
        if len(each):
            drawn[f"here, {way}"] = ratios(data, "SS-CNN", other, way), each.to_numpy().tolist()
    return drawn
