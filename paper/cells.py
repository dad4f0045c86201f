"""All results as one table, and what its cells say: numbers of runs, their means, intervals and verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from scipy.special import stdtrit

from paper import RESULTS, results
from paper.grids import DATASETS, EXPERIMENTS, METHODS, MOVED, STRENGTHS, Cell
from paper.markdown import GAP, table
from paper.record import Record
from scalesteer.app.evaluation import SCALE_BINS
from scalesteer.datasets import SIZED_DATASETS
from scalesteer.datasets.scale import SPLITS

SIZES = tuple(f"{low:g}–{high:g}" for low, high in SCALE_BINS)
DISTORTIONS = (*STRENGTHS, *MOVED.values())
OBJECT_SIZES = tuple(
    dict.fromkeys(f"size {size:.3g}" for dataset in SIZED_DATASETS.values() for size in dataset.sizes)
)  # errors at one size of the object each
ANY_SIZE = ("inside", "outside", "1 - size correlation", *OBJECT_SIZES)
ENDED: tuple[results.Kind, ...] = ("runs", "repeats", "replaced")  # kinds of results that tell how a training ended
MEANS = {"val_loss": ".3f", "parameters": ",.0f", "seconds": ",.0f", **dict.fromkeys(SIZES, ".2f")}  # without deviation


@dataclass(frozen=True, eq=False)
class Data:
    """One line for each result, errors in %; `turn` 0 is the run in the tables, later ones were made again.

    `replaced` has the results whose place others have taken, which enter no table of their experiment.
    """

    results: pd.DataFrame
    replaced: pd.DataFrame


def load(folder: Path = RESULTS) -> Data:
    """Read all results of a folder.

    Raises:
        ResultError: If a line does not hold a result.
    """
    distorted = {
        config.name: {f"α = {alpha}": 100 * error for alpha, error in result["errors"].items()}
        | {f"moved {pixels} px": 100 * error for pixels, error in result["moved"].items()}
        for config, result in results.read(folder, "distortion")
    }
    found: list[dict[str, Any]] = []
    for kind in ENDED:
        for config, result in results.read(folder, kind):
            about, bins = result["environment"], result.get("test_error_by_scale", ())
            line = {"run": config.name, "config": config, "repeat": kind == "repeats", "status": result["status"]}
            line |= {"reason": result.get("reason"), "validation by epoch": result["history"]["val_error"]}
            line |= {"device": about["device"], "release": about["data"]["source"].get("release")}
            line |= {"form": about.get("form"), "replaced": kind == "replaced"}
            line |= {key: result.get(key, math.nan) for key in ("val_loss", "best_epoch", "parameters", "seconds")}
            line |= {f"{key} error": 100 * result.get(f"{key}_error", math.nan) for key in ("val", "test")}
            line |= {f"{row['from']:g}–{row['to']:g}": 100 * row["error"] for row in bins}
            if config.dataset in SIZED_DATASETS:
                line |= _by_size(result)
            found.append(line | (distorted.get(config.name, {}) if kind != "replaced" else {}))
    numbers = ["val_loss", "best_epoch", "parameters", "seconds", "val error", "test error"]
    numbers += [*SIZES, *DISTORTIONS, *ANY_SIZE]
    words = ["run", "config", "repeat", "status", "reason", "validation by epoch", "device", "release"]
    words += ["form", "replaced"]
    kinds = dict.fromkeys(numbers, float) | {"repeat": bool, "replaced": bool}
    lines = pd.DataFrame(found, columns=[*words, *numbers]).astype(kinds)
    lines.loc[~lines["device"].isin(lines["device"].mode()[:1]), "seconds"] = math.nan  # times compare on one device
    gone = lines["replaced"]
    lines, replaced = lines[~gone].copy(), lines[gone].copy()  # a copy joins what a column at a time has taken apart
    return Data(lines.assign(turn=lines.groupby(["run", "repeat"]).cumcount() + lines["repeat"]), replaced)


def _by_size(result: results.Result) -> dict[str, float]:
    """Errors at each size of the object, and inside and outside the training sizes: inside is all, if all were seen."""
    found = {f"size {row['from']:.3g}": 100 * row["error"] for row in result.get("test_error_by_scale", ())}
    result = dict.fromkeys(("test_error", "test_error_outside", "size_correlation"), math.nan) | result
    found |= {"inside": 100 * result.get("test_error_inside", result["test_error"])}
    found |= {"outside": 100 * result["test_error_outside"]}
    return found | {"1 - size correlation": 1 - result["size_correlation"]}


published = lru_cache(maxsize=1)(load)


@cache
def _name(config: Record) -> str:
    """The name of a run, worked out once: experiments share runs."""
    return config.name


@lru_cache(maxsize=64)
def runs(data: Data, experiment: str, averaged: bool = False) -> pd.DataFrame:
    """The runs of an experiment, one line for each, with their results; what has not been measured is NaN.

    With `averaged`, a number of a run that was made more than once is the mean.
    """
    rows = [(*row, row.config.split, row.config.seed, _name(row.config)) for row in EXPERIMENTS[experiment].rows]
    grid = pd.DataFrame(rows, columns=["line", "column", "config", "split", "seed", "run"])
    made = data.results
    first = made[made["turn"] == 0].drop(columns="config")
    if averaged:
        finished = made["status"] == "finished"  # a repeat alone does not fill a gap of the tables
        ended = made[finished & made["run"].isin(made.loc[finished & (made["turn"] == 0), "run"])]
        first = ended.groupby("run").mean(numeric_only=True).reset_index()
    return grid.merge(first, how="left", on="run")


def values(data: Data, cell: Cell, averaged: bool = True) -> pd.Series:
    """The numbers of a cell by split and seed, NaN where one is missing.

    The experiment "replaced" has the runs of Table 1 whose place others have taken; a line that is a method's name with
    something behind it means those that were of another form.
    """
    if cell.experiment == "replaced":
        return _replaced(data, cell.line, cell.column)[cell.measure]
    chosen = _cells(data, cell.experiment, averaged).get((cell.line, cell.column))
    if chosen is None:
        raise ValueError(f"there is no cell {cell.line!r}, {cell.column!r} in the experiment {cell.experiment!r}.")
    return chosen[cell.measure]


@lru_cache(maxsize=64)
def _cells(data: Data, experiment: str, averaged: bool) -> dict[tuple[str, str], pd.DataFrame]:
    """The runs of each cell by line and column, one line for each split and seed."""
    found = runs(data, experiment, averaged).set_index(["split", "seed"])
    return dict(iter(found.groupby(["line", "column"], sort=False)))


def _replaced(data: Data, line: str, column: str) -> pd.DataFrame:
    method = next((name for name in METHODS if line.startswith(name)), None)
    if method is None:
        raise ValueError(f"`line` must begin with one of {', '.join(METHODS)} (got {line!r}).")
    found = data.replaced[data.replaced["form"].isna() if line == method else data.replaced["form"].notna()]
    mine = [(METHODS[method], column) == (c.model, DATASETS.get(c.dataset)) and not c.tuning for c in found["config"]]
    found = found.loc[pd.Series(mine, index=found.index, dtype=bool)]
    configs = list(found["config"])
    places = pd.MultiIndex.from_arrays([[c.split for c in configs], [c.seed for c in configs]], names=["split", "seed"])
    whole = pd.MultiIndex.from_product([SPLITS, [0]], names=["split", "seed"])
    return found.set_index(places).reindex(whole)


def lines(experiment: str) -> list[str]:
    """The lines of an experiment in their order."""
    return list(dict.fromkeys(row.line for row in EXPERIMENTS[experiment].rows))


def columns(experiment: str) -> list[str]:
    """The columns of an experiment in their order."""
    return list(dict.fromkeys(row.column for row in EXPERIMENTS[experiment].rows))


# Means and intervals


def decimal(number: float, form: str = ".2f") -> str:
    """A number as text; a zero has no sign.

    Example:
        >>> decimal(-0.001), decimal(0.001, "+.2f"), decimal(0.01, "+.2f")
        ('0.00', '0.00', '+0.01')
    """
    text = f"{number:{form}}"
    return text if text.strip("+-0.") else text.lstrip("+-")


def spread(numbers: Iterable[float], form: str = ".2f", digits: int = 2) -> str:
    """Mean ± standard deviation (n − 1), and how many of the numbers there are if some are missing.

    Example:
        >>> spread([1.0, 3.0, 5.0]), spread([2.0, math.nan]), spread([math.nan])
        ('3.00 ± 2.00', '2.00 (1 of 2)', '–')
    """
    numbers = list(numbers)
    found = _present(numbers)
    deviation = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    missing = f" ({len(found)} of {len(numbers)})" if 0 < len(found) < len(numbers) else ""
    return f"{mean(found, form)}{deviation}{missing}"


def mean(numbers: Iterable[float], form: str = ".2f") -> str:
    """The mean of what there is, or a dash."""
    found = _present(numbers)
    return decimal(statistics.fmean(found), form) if found else GAP


def _present(numbers: Iterable[float]) -> list[float]:
    return [number for number in numbers if not math.isnan(number)]


def show(data: Data, cell: Cell) -> str:
    """What a table says in a cell. In validation, runs that were made more than once count with their mean."""
    numbers = values(data, cell, averaged=cell.measure.startswith("val"))
    return mean(numbers, MEANS[cell.measure]) if cell.measure in MEANS else spread(numbers)


class Interval(NamedTuple):
    """The 95 % interval of a mean of differences."""

    changes: list[float]
    low: float
    high: float
    whole: bool  # no difference is missing

    def __str__(self) -> str:
        ends = (self.low, self.high)
        if not all(map(math.isfinite, ends)):
            return GAP
        digits = (next((count for count in range(2, 6) if round(end, count)), 2) for end in ends)  # show the sign
        text = " to ".join(decimal(end, f"+.{count}f") for end, count in zip(ends, digits, strict=True))
        return f"**{text}**" if self.low > 0 or self.high < 0 else text

    @property
    def verdict(self) -> str:
        """Whether the differences are below zero."""
        return GAP if not self.whole else "holds" if self.high < 0 else "fails" if self.low > 0 else "undecided"

    @property
    def summary(self) -> tuple[str, str, str]:
        """Mean and spread, the interval (bold if zero is outside), and how many are below zero."""
        below = sum(change < 0 for change in self.changes)
        return spread(self.changes, "+.2f"), str(self), f"{below} of {len(self.changes)}" if self.changes else GAP


def interval(first: Iterable[float], second: Iterable[float] | None = None) -> Interval:
    """Student's interval of a mean; or Welch's of the mean of the first minus that of the second, which pair nothing.

    NaN is a missing number. `changes` are the numbers of the first, from the mean of the second if there is one.
    """
    samples = [list(sample) for sample in (first, second) if sample is not None]
    found = [_present(sample) for sample in samples]
    if min(map(len, found)) < 2:
        return Interval(found[0] if second is None else [], -math.inf, math.inf, whole=False)
    low, high = between(*map(Summary.of, found))
    base = 0.0 if second is None else statistics.fmean(found[1])
    whole = all(len(own) == len(sample) for own, sample in zip(found, samples, strict=True))
    return Interval([number - base for number in found[0]], low, high, whole)


class Summary(NamedTuple):
    """What a paper gives of a sample: its mean, its standard deviation (n - 1) and its size."""

    mean: float
    deviation: float
    size: int

    @classmethod
    def of(cls, sample: Sequence[float]) -> Summary:
        """That of numbers, of which there are at least two."""
        return cls(statistics.fmean(sample), statistics.stdev(sample), len(sample))


def between(first: Summary, second: Summary | None = None) -> tuple[float, float]:
    """The ends of Student's 95 % interval of a mean, or of Welch's of the first mean minus the second."""
    samples = [first] if second is None else [first, second]
    variances = [own.deviation**2 / own.size for own in samples]  # of the means
    shares = (variance**2 / (own.size - 1) for variance, own in zip(variances, samples, strict=True))
    freedom = sum(variances) ** 2 / sum(shares) if any(variances) else 1.0  # of one sample, its size less one
    reach = float(stdtrit(freedom, 0.975)) * math.sqrt(sum(variances))
    centre = first.mean - (second.mean if second else 0.0)
    return centre - reach, centre + reach


def minus(data: Data, first: Cell, second: Cell | float, times: float = 1) -> Interval:
    """The first cell minus `times` the second, or a number, split by split: all methods see the same images in a split.

    Runs of one split differ in their seeds, which pair nothing: their interval is Welch's.
    """
    ours = values(data, first)
    if not isinstance(second, Cell):
        return interval(ours - times * second)
    theirs = times * values(data, second)
    paired = ours.index.unique("split").size > 1 or theirs.index.unique("split").size > 1
    return interval(ours - theirs) if paired else interval(ours, theirs)


def numbers_table(
    data: Data, corner: str, cells: dict[str, Cell], measures: Iterable[str], heads: Sequence[str] = ()
) -> str:
    """One line for each cell, one column for each of its measures."""
    measures = list(measures)
    rows = [[label, *(show(data, cell._replace(measure=m)) for m in measures)] for label, cell in cells.items()]
    return table([[corner, *(heads or measures)], *rows])


def intervals_table(
    data: Data, corner: str, pairs: Mapping[str, tuple[Cell, Cell] | None], measures: Sequence[str]
) -> str:
    """One line for each pair of cells, one column for each measure: the interval of the first minus the second."""
    rows = [[corner, *(m.replace("val error", "validation") for m in measures)]]
    for label, pair in pairs.items():
        found = [GAP] * len(measures)
        if pair:
            found = [str(minus(data, pair[0]._replace(measure=m), pair[1]._replace(measure=m))) for m in measures]
        rows.append([label, *found])
    return table(rows)
