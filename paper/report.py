"""What was measured: one table of all results, one way to average, intervals, verdicts, and the views of the pages.

A view is a function of the results that gives text: a Markdown table, or words and numbers of a sentence. The templates
in `paper/pages` name views as in `VIEWS`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from scipy.stats import t as student

from paper import RESULTS, ROOT, figures, grids, results
from paper.grids import CLAIMS, DATASETS, EXPERIMENTS, METHODS, MOVED, PAPER, STRENGTHS, Cell, Pair
from paper.markdown import table as markdown
from scalesteer.data import ELASTIC_ALPHAS, SIZED_DATASETS
from scalesteer.data.scale import SPLITS
from scalesteer.training.loop import SCALE_BINS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP = "–"
SIZES = tuple(f"{low:g}–{high:g}" for low, high in SCALE_BINS)
DISTORTIONS = (*STRENGTHS, *MOVED.values())
OBJECT_SIZES = tuple(
    dict.fromkeys(f"size {size:.3g}" for dataset in SIZED_DATASETS.values() for size in dataset.sizes)
)  # errors at one size of the object each
ANY_SIZE = ("inside", "outside", "1 - size correlation", *OBJECT_SIZES)
MEANS = {"val_loss": ".3f", "parameters": ",.0f", "seconds": ",.0f", **dict.fromkeys(SIZES, ".2f")}  # without deviation
VALIDATION_CHOSE = "number chosen by validation"  # of epochs, for each method its own
MORE_EPOCHS = (*(f"{epochs} epochs" for epochs in grids.EPOCHS[1:]), VALIDATION_CHOSE)

VIEWS: dict[str, Callable[..., str]] = {}


def view(function: Callable[..., str]) -> Callable[..., str]:
    """Let templates call a function of the results by its name, with those of results/."""
    VIEWS[function.__name__] = lambda *arguments, **options: function(published(), *arguments, **options)
    return function


# One table of all results


@dataclass(frozen=True, eq=False)
class Data:
    """One line for each result, errors in %; `turn` 0 is the run in the tables, later ones were made again."""

    results: pd.DataFrame


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
    for kind in ("runs", "repeats"):
        for config, result in results.read(folder, kind):
            about, bins = result["environment"], result.get("test_error_by_scale", ())
            line = {"run": config.name, "config": config, "repeat": kind == "repeats", "status": result["status"]}
            line |= {"reason": result.get("reason"), "validation by epoch": result["history"]["val_error"]}
            line |= {"device": about["device"], "release": about["data"]["source"].get("release")}
            line |= {key: result.get(key, math.nan) for key in ("val_loss", "best_epoch", "parameters", "seconds")}
            line |= {f"{key} error": 100 * result.get(f"{key}_error", math.nan) for key in ("val", "test")}
            line |= {f"{row['from']:g}–{row['to']:g}": 100 * row["error"] for row in bins}
            if config.dataset in SIZED_DATASETS:
                line |= _by_size(result)
            found.append(line | distorted.get(config.name, {}))
    numbers = ["val_loss", "best_epoch", "parameters", "seconds", "val error", "test error"]
    numbers += [*SIZES, *DISTORTIONS, *ANY_SIZE]
    words = ["run", "config", "repeat", "status", "reason", "validation by epoch", "device", "release"]
    lines = pd.DataFrame(found, columns=[*words, *numbers]).astype(dict.fromkeys(numbers, float) | {"repeat": bool})
    lines.loc[~lines["device"].isin(lines["device"].mode()[:1]), "seconds"] = math.nan  # times compare on one device
    return Data(lines.assign(turn=lines.groupby(["run", "repeat"]).cumcount() + lines["repeat"]))


def _by_size(result: results.Result) -> dict[str, float]:
    """Errors at each size of the object, and inside and outside the training sizes: inside is all, if all were seen."""
    found = {f"size {row['from']:.3g}": 100 * row["error"] for row in result.get("test_error_by_scale", ())}
    inside = result.get("test_error_inside", result.get("test_error", math.nan))
    found |= {"inside": 100 * inside, "outside": 100 * result.get("test_error_outside", math.nan)}
    return found | {"1 - size correlation": 1 - result.get("size_correlation", math.nan)}


published = lru_cache(maxsize=1)(load)


@lru_cache(maxsize=64)
def runs(data: Data, experiment: str, averaged: bool = False) -> pd.DataFrame:
    """The runs of an experiment, one line for each, with their results; what has not been measured is NaN.

    With `averaged`, a number of a run that was made more than once is the mean.
    """
    rows = [(*row, row.config.split, row.config.seed, row.config.name) for row in EXPERIMENTS[experiment].rows]
    grid = pd.DataFrame(rows, columns=["line", "column", "config", "split", "seed", "run"])
    made = data.results
    first = made[made["turn"] == 0].drop(columns="config")
    if averaged:
        finished = made["status"] == "finished"  # a repeat alone does not fill a gap of the tables
        ended = made[finished & made["run"].isin(made.loc[finished & (made["turn"] == 0), "run"])]
        first = ended.groupby("run").mean(numeric_only=True).reset_index()
    return grid.merge(first, how="left", on="run")


@lru_cache(maxsize=4096)
def values(data: Data, cell: Cell, averaged: bool = True) -> pd.Series:
    """The numbers of a cell by split and seed, NaN where one is missing."""
    chosen = _cells(data, cell.experiment, averaged).get((cell.line, cell.column))
    if chosen is None:
        raise ValueError(f"there is no cell {cell.line!r}, {cell.column!r} in the experiment {cell.experiment!r}.")
    return chosen[cell.measure]


@lru_cache(maxsize=64)
def _cells(data: Data, experiment: str, averaged: bool) -> dict[tuple[str, str], pd.DataFrame]:
    """The runs of each cell by line and column, one line for each split and seed."""
    found = runs(data, experiment, averaged).set_index(["split", "seed"])
    return dict(iter(found.groupby(["line", "column"], sort=False)))  # type: ignore[arg-type]


def lines(experiment: str) -> list[str]:
    """The lines of an experiment in their order."""
    return list(dict.fromkeys(row.line for row in EXPERIMENTS[experiment].rows))


def columns(experiment: str) -> list[str]:
    """The columns of an experiment in their order."""
    return list(dict.fromkeys(row.column for row in EXPERIMENTS[experiment].rows))


# Means, intervals, verdicts


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
    found = [number for number in numbers if not math.isnan(number)]
    if not found:
        return GAP
    deviation = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    missing = f" ({len(found)} of {len(numbers)})" if len(found) < len(numbers) else ""
    return f"{decimal(statistics.fmean(found), form)}{deviation}{missing}"


def mean(numbers: Iterable[float], form: str = ".2f") -> str:
    """The mean of what there is, or a dash."""
    found = [number for number in numbers if not math.isnan(number)]
    return decimal(statistics.fmean(found), form) if found else GAP


def show(data: Data, cell: Cell) -> str:
    """What a table says in a cell. In validation, runs that were made more than once count with their mean."""
    numbers = values(data, cell, averaged=cell.measure.startswith("val"))
    return mean(numbers, MEANS[cell.measure]) if cell.measure in MEANS else spread(numbers)


class Interval(NamedTuple):
    """Student's 95 % interval of a mean of differences."""

    changes: list[float]
    low: float
    high: float
    whole: bool  # no difference is missing

    def __str__(self) -> str:
        if len(self.changes) < 2:
            return GAP
        ends = (self.low, self.high)
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


def interval(changes: Iterable[float]) -> Interval:
    """The interval of the mean of differences; NaN is a missing one."""
    changes = list(changes)
    found = [change for change in changes if not math.isnan(change)]
    low, high = -math.inf, math.inf
    if len(found) > 1:
        reach = student.ppf(0.975, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
        low, high = statistics.fmean(found) - reach, statistics.fmean(found) + reach
    return Interval(found, low, high, len(found) == len(changes) > 1)


def minus(data: Data, first: Cell, second: Cell | float, times: float = 1) -> Interval:
    """The first cell minus `times` the second, or a number, split by split: all methods see the same images in a split.

    Runs of one split differ in their seeds, which pair nothing: their interval is Welch's.
    """
    ours = values(data, first)
    if not isinstance(second, Cell):
        return interval(ours - times * second)
    theirs = times * values(data, second)
    if ours.index.unique("split").size > 1 or theirs.index.unique("split").size > 1:
        return interval(ours - theirs)
    return welch(list(ours), list(theirs))


def welch(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The interval of the mean of the first minus that of the second, which are not paired; NaN is a missing number.

    `changes` are those of the first from the second's mean.
    """
    ours, theirs = ([number for number in numbers if not math.isnan(number)] for numbers in (first, second))
    whole = len(ours) == len(first) > 1 and len(theirs) == len(second) > 1
    if len(ours) < 2 or len(theirs) < 2:
        return Interval([], -math.inf, math.inf, whole=False)
    change = statistics.fmean(ours) - statistics.fmean(theirs)
    parts = [statistics.variance(numbers) / len(numbers) for numbers in (ours, theirs)]
    reach = 0.0
    if sum(parts):
        freedom = sum(parts) ** 2 / sum(
            part**2 / (len(numbers) - 1) for part, numbers in zip(parts, (ours, theirs), strict=True)
        )
        reach = student.ppf(0.975, freedom) * math.sqrt(sum(parts))
    return Interval([number - statistics.fmean(theirs) for number in ours], change - reach, change + reach, whole)


def decide(data: Data, pairs: Iterable[Pair]) -> tuple[str, Pair, Interval]:
    """Whether all pairs are as claimed (holds, fails, undecided), and the pair that decides that.

    One pair that fails is enough, also where others lack numbers; else a missing number is a gap. Differences are
    weighed as shares of the second error, so that strong distortion counts no more than mild.
    """
    found = [(pair, minus(data, *pair)) for pair in pairs]
    verdicts = {result.verdict for _, result in found}
    verdict = next((word for word in ("fails", GAP, "undecided") if word in verdicts), "holds")
    found = [entry for entry in found if entry[1].verdict == verdict]
    end = "low" if verdict == "fails" else "high"

    def share(entry: tuple[Pair, Interval]) -> float:
        second = entry[0].second
        return float(getattr(entry[1], end) / (values(data, second).mean() if isinstance(second, Cell) else second))

    return verdict, *max(found, key=share)


# Tables


@view
def table(data: Data, name: str, title: bool = True) -> str:
    """An experiment as a Markdown table with its title; below it runs that failed or came from another device."""
    head = f"**{f'Table {name}' if name.isdigit() else name.capitalize()}. {EXPERIMENTS[name].title}**"
    found = runs(data, name).drop_duplicates("run")
    failed = found[found["status"] == "failed"]
    notes = [
        f"{run} failed and is left out: {reason}." for run, reason in zip(failed["run"], failed["reason"], strict=True)
    ]
    elsewhere = found[found["device"].notna() & ~found["device"].isin(found["device"].mode()[:1])]
    notes += [f"Trained on {device}: {', '.join(group['run'])}." for device, group in elsewhere.groupby("device")]
    own = LAYOUTS.get(name)
    body = own(data) if own else _beside_the_paper(name, columns(name), lambda line, c: show(data, Cell(name, line, c)))
    return "\n\n".join([*([head] if title else []), body, *notes])


def _beside_the_paper(name: str, heads: Sequence[str], ours: Callable[[str, str], str]) -> str:
    """Lines and columns, the paper's numbers beside ours where it has any."""
    paper = PAPER.get(name)
    rows = [["error in %", *itertools.chain(*((head, "paper") if paper else (head,) for head in heads))]]
    for line in lines(name):
        both = ((ours(line, c), *([paper.get(line, {}).get(c, GAP)] if paper else ())) for c in heads)
        rows.append([line, *itertools.chain(*both)])
    return markdown(rows)


def best_network(data: Data, name: str, line: str, column: str = "60 epochs") -> tuple[dict[str, Any], str]:
    """The numbers of the network with the lowest validation error, the first split of a tie, and what is missing."""
    found = runs(data, name)
    mine = found[(found["line"] == line) & (found["column"] == column)]
    ended = mine.dropna(subset="val error").sort_values(["val error", "split"])
    missing = f" ({len(ended)} of {len(mine)})" if len(ended) < len(mine) else ""
    return ended.iloc[0].to_dict() if len(ended) else dict.fromkeys(STRENGTHS, math.nan), missing


def _table_2(data: Data) -> str:
    def best(line: str, alpha: str) -> str:
        network, missing = best_network(data, "2", line)
        return GAP if math.isnan(network[alpha]) else f"{network[alpha]:.2f}{missing}"

    return _beside_the_paper("2", STRENGTHS, best)


def chosen_settings(data: Data, method: str, dataset: str) -> grids.Settings | None:
    """The settings with the lowest validation error in the search, ties by loss; None while a run is missing."""
    found = runs(data, "tuning")
    mine = found[(found["line"] == method) & found["config"].map(lambda config: config.dataset == dataset)]
    if mine["status"].isna().any() or mine["val error"].isna().all():
        return None
    best = mine.sort_values(["val error", "val_loss"], kind="stable")["config"].iloc[0]
    return grids.Settings(best.lr, best.weight_decay, best.upsample)


def _tuning(data: Data) -> str:
    """Methods side by side, one line for each point of the search."""
    rows = [["validation error in %", *METHODS]]
    winners = {key: chosen_settings(data, *key) for key in itertools.product(METHODS, DATASETS)}
    for (dataset, title), settings in itertools.product(DATASETS.items(), grids.SEARCH):
        column = f"{title}, {settings}"
        shown = {m: show(data, Cell("tuning", m, column, "val error")) for m in METHODS}
        rows.append([column, *(f"{shown[m]}{' ✓' * (winners[m, dataset] == settings)}" for m in METHODS)])
    return markdown(rows)


@view
def chosen(data: Data) -> str:
    """What each method uses, and whether validation chose it."""

    def used(method: str, dataset: str) -> str:
        ours, best = grids.CHOSEN[method, dataset], chosen_settings(data, method, dataset)
        return f"{ours}{' (not tuned yet)' if best is None else '' if best == ours else f' (validation chose {best})'}"

    return markdown([["settings", *DATASETS.values()], *([m, *(used(m, name) for name in DATASETS)] for m in METHODS)])


def _numbers(
    data: Data, corner: str, cells: dict[str, Cell], measures: Iterable[str], heads: Sequence[str] = ()
) -> str:
    """One line for each cell, one column for each of its measures."""
    measures = list(measures)
    rows = [[label, *(show(data, cell._replace(measure=m)) for m in measures)] for label, cell in cells.items()]
    return markdown([[corner, *(heads or measures)], *rows])


def _intervals(data: Data, corner: str, pairs: Mapping[str, tuple[Cell, Cell] | None], measures: Sequence[str]) -> str:
    """One line for each pair of cells, one column for each measure: the interval of the first minus the second."""
    rows = [[corner, *(m.replace("val error", "validation") for m in measures)]]
    for label, pair in pairs.items():
        found = [GAP] * len(measures)
        if pair:
            found = [str(minus(data, pair[0]._replace(measure=m), pair[1]._replace(measure=m))) for m in measures]
        rows.append([label, *found])
    return markdown(rows)


def _ablations(data: Data) -> str:
    rows = [["one change at a time", "error in %", "difference", "parameters", "seconds"]]
    base, *others = (Cell("ablations", line, "SS-CNN") for line in lines("ablations"))
    for cell in (base, *others):
        change = "base" if cell == base else minus(data, cell, base).summary[0]
        costs = (show(data, cell._replace(measure=m)) for m in ("parameters", "seconds"))
        rows.append([cell.line, show(data, cell), change, *costs])
    return markdown(rows)


def _sizes(data: Data) -> str:
    """Both input sizes for every method."""
    rows = [["error in %", "28 px", "56 px", "28 minus 56 px", "parameters", "seconds, 28 px", "seconds, 56 px"]]
    for method in METHODS:
        both = small, large = [Cell("sizes", method, column) for column in columns("sizes")]
        costs = small._replace(measure="parameters"), *(cell._replace(measure="seconds") for cell in both)
        errors = *(show(data, cell) for cell in both), minus(data, small, large).summary[0]
        rows.append([method, *errors, *(show(data, cell) for cell in costs)])
    return markdown(rows)


@view
def paper_sizes(data: Data) -> str:
    """MNIST-Scale with the input sizes that the paper has for each method."""
    heads = ("here", "paper", "SS-CNN minus it", "95 % interval", "SS-CNN lower in")
    rows = [["input size of the paper, error in %", *heads]]
    ours = Cell("sizes", "SS-CNN", "56 px")
    for method in METHODS:
        own = ours if method == "SS-CNN" else Cell("sizes", method, "28 px")
        compared = (GAP,) * 3 if own == ours else minus(data, ours, own).summary
        paper = PAPER["1"].get(method, {}).get("MNIST-Scale", GAP)
        rows.append([f"{method}, {own.column}", show(data, own), paper, *compared])
    return markdown(rows)


@view
def pairs(data: Data, name: str) -> str:
    """SS-CNN against each other method in one of the paper's tables, split by split."""
    rows = [["SS-CNN minus", "mean ± std of the differences", "95 % interval of the mean", "SS-CNN lower in"]]
    for column, line in itertools.product(columns(name), lines(name)):
        if line != "SS-CNN":
            found = minus(data, Cell(name, "SS-CNN", column), Cell(name, line, column))
            rows.append([f"{line}, {column}", *found.summary])
    return markdown(rows)


@view
def distorted(data: Data) -> str:
    """Table 2 as means over splits, also with images moved."""
    return _numbers(data, "error in %", {line: Cell("2", line, "60 epochs") for line in lines("2")}, DISTORTIONS)


@view
def distorted_pairs(data: Data) -> str:
    """SS-CNN against each other line of Table 2, in every way that images were changed."""
    ours, *others = (Cell("2", line, "60 epochs") for line in sorted(lines("2"), key="SS-CNN".__ne__))
    return _intervals(data, "SS-CNN minus", {other.line: (ours, other) for other in others}, DISTORTIONS)


def _longer(data: Data) -> str:
    """Each method of Table 2 after 60 epochs and after more."""
    both = itertools.product(lines("longer"), columns("longer"))
    cells = {f"{line}, {column}": Cell("longer", line, column) for line, column in both}
    return _numbers(data, "error in %", cells, ("val error", *STRENGTHS), ("validation", *STRENGTHS))


def chosen_epochs(data: Data) -> dict[str, str]:
    """For each method the column of "longer" with the lowest mean validation error, of those that are complete."""
    found: dict[str, dict[str, float]] = {line: {} for line in lines("longer")}
    for line, column in itertools.product(lines("longer"), columns("longer")):
        errors = values(data, Cell("longer", line, column, "val error"))
        if errors.notna().all():
            found[line][column] = statistics.fmean(errors)
    return {line: min(means, key=means.__getitem__) for line, means in found.items() if len(means) > 1}


@view
def longer_changes(data: Data) -> str:
    """What more epochs do to each method, as intervals."""
    few, *more = columns("longer")
    both = itertools.product(lines("longer"), more)
    pairs = {f"{m}, {column}": (Cell("longer", m, column), Cell("longer", m, few)) for m, column in both}
    return _intervals(data, f"minus its error after {few}", pairs, ("val error", *DISTORTIONS))


@view
def longer_pairs(data: Data) -> str:
    """SS-CNN against the others after the same number of epochs, and after those that validation chose for each."""
    pairs: dict[str, tuple[Cell, Cell] | None] = {}
    for line, way in itertools.product(lines("longer"), MORE_EPOCHS):
        if line != "SS-CNN":
            own = epochs_of(data, way)
            ours, theirs = (Cell("longer", m, own.get(m, "")) for m in ("SS-CNN", line))
            pairs[f"{line}, {way}"] = (ours, theirs) if ours.column and theirs.column else None
    return _intervals(data, "SS-CNN, trained likewise, minus", pairs, DISTORTIONS)


def epochs_of(data: Data, way: str) -> dict[str, str]:
    """The column of "longer" for each method, if all have the same number of epochs or what validation chose."""
    return chosen_epochs(data) if way == VALIDATION_CHOSE else dict.fromkeys(lines("longer"), way)


def _made_again(data: Data) -> pd.DataFrame:
    made = data.results[data.results["test error"].notna()]
    again = made[made["run"].isin(made.loc[made["repeat"], "run"]) & made["run"].isin(made.loc[~made["repeat"], "run"])]
    titles = {model: method for method, model in METHODS.items()}
    kinds = [
        (titles[c.model], DATASETS.get(c.dataset, c.dataset), f"{28 * (c.upsample or 1)} px") for c in again["config"]
    ]
    again = again.assign(kind=[", ".join(kind) for kind in kinds], split=[c.split for c in again["config"]])
    return again.sort_values("run", kind="stable")


@view
def repeats(data: Data) -> str:
    """Runs of the tables beside other runs of the same configuration."""
    rows = [["error in %", *(f"split {split}" for split in SPLITS), "mean"]]
    for kind, group in _made_again(data).groupby("kind", sort=False):
        for turn, part in group.groupby("turn"):
            errors = dict(zip(part["split"], part["test error"], strict=True))
            shown = (f"{errors[split]:.2f}" if split in errors else GAP for split in SPLITS)
            whole = len(errors) == group["split"].nunique()  # means of other splits would not compare
            name = f"{kind}, {f'another run ({turn})' if turn else 'in the tables'}"
            rows.append([name, *shown, mean(errors.values()) if whole else GAP])
    return markdown(rows)


@view
def repeat_deviation(data: Data, differences: int = 0) -> str:
    """Standard deviation of a run around the mean of its configuration, in %; or of the mean of some differences."""
    groups = _made_again(data).groupby("run")["test error"]
    freedom = groups.count() - 1
    one = math.sqrt((freedom * groups.var()).sum() / freedom.sum()) if freedom.sum() else math.nan
    return mean([one * (math.sqrt(2 / differences) if differences else 1)])


@view
def effects(data: Data) -> str:
    """What each of the changes that were combined is worth on validation data, all others being equal."""
    rows = [["change", "difference of validation errors in %, mean ± std", "95 % interval of the mean", "lower in"]]
    for i, (ours, other) in enumerate(grids.CHOICES):
        changes: list[float] = []
        for levels in (levels for levels in grids.COMBINED if levels[i] == other):
            twin = (*levels[:i], ours, *levels[i + 1 :])
            changed, unchanged = (Cell("choices", ", ".join(names), "", "val error") for names in (levels, twin))
            changes += list(values(data, changed) - values(data, unchanged))
        rows.append([f"{other} instead of {ours}", *interval(changes).summary])
    return markdown(rows)


def _choices(data: Data) -> str:
    heads = ("validation error in %", "validation loss")
    cells = {line: Cell("choices", line, "") for line in lines("choices")}
    return _numbers(data, "filters", cells, ("val error", "val_loss"), heads)


@view
def by_scale(data: Data, column: str) -> str:
    """Error by scale of the object in a column of Table 1, mean over splits."""
    return _numbers(data, f"{column}, error in %", {method: Cell("1", method, column) for method in METHODS}, SIZES)


@view
def costs(data: Data) -> str:
    """Parameters and training time by method."""
    cells = [Cell("1", "", column, measure) for column in columns("1") for measure in ("parameters", "seconds")]
    rows = [["mean over splits", *(f"{c.column}, {c.measure}" for c in cells), "all runs, minutes"]]
    for line in lines("1"):
        seconds = pd.concat(
            [values(data, c._replace(line=line), False) for c in cells if c.measure == "seconds"]
        ).dropna()
        total = f"{seconds.sum() / 60:.1f} ({len(seconds)} runs)" if len(seconds) else GAP
        rows.append([line, *(show(data, cell._replace(line=line)) for cell in cells), total])
    return markdown(rows)


LAYOUTS: dict[str, Callable[[Data], str]] = {
    "2": _table_2,
    "tuning": _tuning,
    "ablations": _ablations,
    "sizes": _sizes,
    "choices": _choices,
    "longer": _longer,
}


# Claims


@view
def claims(data: Data) -> str:
    """The paper's claims: its numbers and ours where the claim is decided, the interval, and the verdict."""
    rows = [["claim of the paper", "paper, error in %", "here", "95 % interval of the difference", "verdict"]]
    for key, claim in CLAIMS.items():
        word, pair, found = decide(data, claim.pairs)
        paper = claim.paper or _both(pair, lambda cell: _papers(cell).split()[0])
        here = _both(pair, lambda cell: error(data, *cell)) if word != GAP else GAP
        times = f" (first minus {pair.times:g} times second)" if pair.times != 1 else ""
        said = f"[{word}](evidence/{claim.evidence}.md)"
        if pair.first.experiment == "longer":
            more = "; ".join(f"{way}: {verdict(data, key, way)}" for way in MORE_EPOCHS)
            said += f"; [more epochs](evidence/epochs.md) ({more})"
        rows.append([claim.text, paper, here, f"{found}{times}", said])
    return markdown(rows, left=5)


def _papers(cell: Cell) -> str:
    if cell.measure in STRENGTHS:
        return PAPER["2"][cell.line][cell.measure]
    return PAPER[cell.experiment][cell.line][cell.column]


def _both(pair: Pair, number: Callable[[Cell], str]) -> str:
    """Both numbers of a pair, each with what sets it apart, and in what they are alike."""
    first, second, _ = pair
    if not isinstance(second, Cell):
        raise TypeError(f"a claim of the paper compares two cells (got {second!r}).")
    names, alike = (first.line, second.line), first.measure if first.measure in STRENGTHS else first.column
    if first.line == second.line:
        names, alike = (first.column, second.column), first.line
    return f"{names[0]} {number(first)}, {names[1]} {number(second)} ({alike})"


@view
def verdict(data: Data, claim: str, way: str = "") -> str:
    """Whether a claim holds; one on distortion also after so many epochs, or after those that validation chose."""
    own = epochs_of(data, way) if way else {}

    def then(cell: Any) -> Any:
        return cell._replace(column=own.get(cell.line, cell.column)) if isinstance(cell, Cell) else cell

    compared = [Pair(then(first), then(second), times) for first, second, times in CLAIMS[claim].pairs]
    return decide(data, compared)[0] if own or not way else GAP


@view
def more_epochs(data: Data) -> str:
    """Whether more epochs change the verdicts on distortion: the answer, and which verdicts become what."""
    rivals = {"distortion": "LocScaleInv-CNN", "par": "Spatial Transformer"}
    changes: dict[str, list[str]] = {}  # what changes, and with which numbers of epochs
    for way in MORE_EPOCHS:
        new = {rival: (verdict(data, claim), verdict(data, claim, way)) for claim, rival in rivals.items()}
        changed = [f"*{word}* against {rival}" for rival, (old, word) in new.items() if word not in (GAP, old)]
        if changed:
            changes.setdefault(words(changed), []).append("with " + "the " * (way == VALIDATION_CHOSE) + way)
    said = [f"{words(ways)} the verdict becomes {changed}" for changed, ways in changes.items()]
    return f"Yes: {'; '.join(said)}" if said else "No: no verdict changes"


@view
def paper_sizes_verdict(data: Data) -> str:
    """Whether SS-CNN has the lowest error on MNIST-Scale with the input sizes that the paper has for each method."""
    ours = Cell("sizes", "SS-CNN", "56 px")
    return decide(data, [Pair(ours, Cell("sizes", other, "28 px")) for other in grids.OTHERS])[0]


# Words and numbers of sentences


def words(names: Sequence[str]) -> str:
    """Names in a sentence: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@view
def standing(data: Data, name: str, column: str, measure: str = "test error") -> str:
    """How SS-CNN's error compares with those of the others in a column: what follows "SS-CNN's error"."""
    found: dict[str, list[str]] = {"holds": [], "fails": [], "undecided": [], GAP: []}
    for line in lines(name):
        if line != "SS-CNN":
            ours, other = (Cell(name, who, column, measure) for who in ("SS-CNN", line))
            found[minus(data, ours, other).verdict].append(line)
    said = {word: f"that of {words(names)}" for word, names in found.items() if names}
    sides = {"holds": "lower", "fails": "higher"}
    decided = ", ".join(f"{side} than {said[word]}" for word, side in sides.items() if word in said)
    rest = {"undecided": "cannot be told apart from", GAP: "has not been compared with"}
    others = (f"{text} {said[word]}" for word, text in rest.items() if word in said)
    return "; it ".join([*([f"is {decided}"] if decided else []), *others])


@view
def error(data: Data, *cell: str) -> str:
    """The mean of a cell, as in the tables."""
    return mean(values(data, Cell(*cell), False))


@view
def difference(data: Data, first: Sequence[str], second: Sequence[str]) -> str:
    """The interval of one cell minus another."""
    return str(minus(data, Cell(*first), Cell(*second))).strip("*")


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


@view
def ratio(data: Data, *which: Any, **options: Any) -> str:
    """The smallest and the largest of :func:`ratios`."""
    found = ratios(data, *which, **options)
    return GAP if any(map(math.isnan, found)) else f"{min(found):.2f} to {max(found):.2f}"


@view
def best_epochs(data: Data, line: str, column: str) -> str:
    """The epochs that validation chose in a cell of Table 1, from the first split on, counted from 1."""
    found = values(data, Cell("1", line, column, "best_epoch"), False).dropna()
    return words([f"{epoch + 1:.0f}" for epoch in found]) or GAP


@view
def other_networks(data: Data) -> str:
    """Whose networks under distortion are of another run than the one in the tables: their errors without differ."""
    found = runs(data, "2")
    other = found[(found["α = 0"] - found["test error"]).abs() > 0.02]  # rounding is less
    said = [f"{line} in splits {words(list(map(str, g['split'])))}" for line, g in other.groupby("line", sort=False)]
    return "; ".join(said) or "none"


@view
def paper_ratio(data: Data, first: str, second: str) -> str:
    """The smallest and the largest ratio of two methods' errors in the paper's Table 2."""
    found = [float(PAPER["2"][first][alpha]) / float(PAPER["2"][second][alpha]) for alpha in STRENGTHS]
    return f"{min(found):.2f} to {max(found):.2f}"


@view
def epochs_chosen(data: Data) -> str:
    """What validation chose for each method of Table 2, and by how many validation images."""
    said = []
    for line, best in chosen_epochs(data).items():
        cells = {column: values(data, Cell("longer", line, column, "val error")) for column in columns("longer")}
        images = sum(
            row.config.data.sizes[1] for row in EXPERIMENTS["longer"].rows if (row.line, row.column) == (line, best)
        )
        means = {column: errors.mean() for column, errors in cells.items() if errors.notna().all() and column != best}
        second = min(means, key=means.__getitem__)
        more = (means[second] - cells[best].mean()) / 100 * images
        said.append(f"{line} {best} ({more:.0f} errors fewer in {images:,} than with {second})")
    return "; ".join(said) or GAP


@view
def sizes_chosen(data: Data) -> str:
    """Which input size validation chose, and for whom."""
    found = {key: settings.upsample for key in grids.CHOSEN if (settings := chosen_settings(data, *key))}
    small = [f"{method} on {DATASETS[name]}" for (method, name), factor in found.items() if factor == 1]
    if len(found) < len(grids.CHOSEN):
        return GAP
    return (
        "56 pixels for every method on both datasets"
        if not small
        else f"28 pixels for {words(small)}, 56 for the others"
    )


@view
def at_or_below(data: Data, *names: str) -> str:
    """How many of the paper's numbers in some of its tables ours are at or below, to two decimals."""
    found = []
    for name in names:
        for line, column in ((line, column) for line, row in PAPER[name].items() for column in row):
            ours = error(data, name, line, column) if name != "2" else mean([best_network(data, "2", line)[0][column]])
            found.append(math.nan if ours == GAP else float(ours) <= float(PAPER[name][line][column].split()[0]))
    return GAP if any(map(math.isnan, found)) else f"{sum(found)} of {len(found)}"


@view
def release(data: Data, column: str) -> str:
    """Which release of the original images the runs in a column of Table 1 used."""
    found = runs(data, "1")
    return words(sorted(found.loc[found["column"] == column, "release"].dropna().unique())) or GAP


@view
def release_change(data: Data) -> str:
    """How far our means on FMNIST-Scale lie from those with the first release."""
    now = {m: error(data, "1", m, "FMNIST-Scale") for m in grids.FIRST_RELEASE}
    changes = [float(now[m]) - before for m, before in grids.FIRST_RELEASE.items() if now[m] != GAP]
    return f"{decimal(min(changes), '+.2f')} to {decimal(max(changes), '+.2f')}" if len(changes) == len(now) else GAP


@view
def training_time(data: Data, *names: str) -> str:
    """How long training of the runs of some experiments took, by default of all, each run counted once, and where."""
    made = (
        pd.concat([runs(data, name) for name in names or EXPERIMENTS]).drop_duplicates("run").dropna(subset="seconds")
    )
    devices = words(sorted(made["device"].unique()))
    return f"{made['seconds'].sum() / 3600:.1f} hours on {devices}" if len(made) else GAP


@view
def figure(data: Data, place: str, caption: str) -> str:
    """A picture of results/ for a page of docs/evidence, or that it has not been drawn."""
    path = (RESULTS / place).relative_to(ROOT).as_posix()
    return f"![{caption}](../../{path})" if (RESULTS / place).exists() else f"*Not drawn yet: {caption}.*"


# Plots


def plots(folder: Path = RESULTS) -> dict[str, Figure]:
    """Figures of results by their place: validation error by epoch, error by scale, ratios under distortion."""
    data, drawn = load(folder), {}
    found = runs(data, "1").dropna(subset="test error")
    for dataset, title in DATASETS.items():
        groups = {str(line): group for line, group in found[found["column"] == title].groupby("line", sort=False)}
        if groups:
            curves = {line: (group[list(SIZES)] / 100).to_numpy().tolist() for line, group in groups.items()}
            middles = [sum(ends) / 2 for ends in SCALE_BINS]
            drawn[f"scales-{dataset}"] = figures.plot_errors(curves, middles, f"scale of the object, {title}")
            histories = {line: group["validation by epoch"].tolist() for line, group in groups.items()}
            drawn[f"validation-{dataset}"] = figures.plot_histories(histories, f"validation error on {title}, %")
    limits = {"LocScaleInv-CNN": 1.0, "Spatial Transformer": grids.PAR}  # below them the paper's claims hold
    if not data.results[list(STRENGTHS)].isna().all(axis=None):
        panels = {f"SS-CNN / {other}": _ratio_lines(data, other) for other in limits}
        label = "strength of distortion α"
        drawn["distortion"] = figures.plot_ratios(panels, ELASTIC_ALPHAS, label, list(limits.values()))
    return {f"figures/{name}.png": drawing for name, drawing in drawn.items()}


def _ratio_lines(data: Data, other: str) -> dict[str, tuple[list[float], list[list[float]]]]:
    """The paper's ratios, and ours after each number of epochs with those of each split."""
    ours, theirs = (PAPER["2"][line].values() for line in ("SS-CNN", other))
    drawn: dict[str, Any] = {"paper": ([float(a) / float(b) for a, b in zip(ours, theirs, strict=True)], [])}
    for way in columns("longer"):
        over, under = ([values(data, Cell("longer", m, way, a)) for a in STRENGTHS] for m in ("SS-CNN", other))
        each = pd.concat([a / b for a, b in zip(over, under, strict=True)], axis=1).dropna()
        if len(each):
            drawn[f"here, {way}"] = ratios(data, "SS-CNN", other, way), each.to_numpy().tolist()
    return drawn
