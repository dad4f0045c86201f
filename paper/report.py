"""What was measured: one table of all results, one way to average, intervals, verdicts, and the views of the pages.

A view is a function of the results that gives text: a Markdown table, or a few words or numbers of a sentence. The
templates in `paper/pages` name views as in `VIEWS`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from scipy.stats import t as student

from paper import RESULTS, ROOT, grids
from paper.grids import CLAIMS, DATASETS, EXPERIMENTS, METHODS, MOVED, PAPER, STRENGTHS, Cell, Pair
from paper.markdown import table as markdown
from scalesteer.data import ELASTIC_ALPHAS
from scalesteer.data.scale import SPLITS
from scalesteer.training import results
from scalesteer.training.train import SCALE_BINS

GAP = "–"
SIZES = tuple(f"{low:g}–{high:g}" for low, high in SCALE_BINS)
DISTORTIONS = (*STRENGTHS, *MOVED.values())
RIVALS = ("LocScaleInv-CNN", "Spatial Transformer")  # whom the paper holds SS-CNN against under distortion


# The table of all results


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
    lines: list[dict[str, Any]] = []
    for kind in ("runs", "repeats"):
        for config, result in results.read(folder, kind):  # type: ignore[arg-type]
            line = {"run": config.name, "config": config, "repeat": kind == "repeats", "status": result["status"]}
            line |= {"reason": result.get("reason"), "val errors": result["history"]["val_error"]}
            line |= {"device": result["environment"]["device"], "source": result["environment"]["data"]["source"]}
            line |= {key: result.get(key, math.nan) for key in ("val_loss", "parameters", "seconds", "best_epoch")}
            for key in ("val_error", "test_error"):
                line[key.replace("_", " ")] = 100 * result.get(key, math.nan)
            bins = result.get("test_error_by_scale", ())
            line |= {f"{row['from']:g}–{row['to']:g}": 100 * row["error"] for row in bins}
            lines.append(line | distorted.get(config.name, {}))
    numbers = ["val_loss", "parameters", "seconds", "best_epoch", "val error", "test error", *SIZES, *DISTORTIONS]
    other = ["run", "config", "repeat", "status", "reason", "val errors", "device", "source"]
    found = pd.DataFrame(lines, columns=[*other, *numbers]).astype(dict.fromkeys(numbers, float) | {"repeat": bool})
    return Data(found.assign(turn=found.groupby(["run", "repeat"]).cumcount() + found["repeat"]))


@lru_cache(maxsize=64)
def cells(data: Data, experiment: str, averaged: bool = False) -> pd.DataFrame:
    """The runs of an experiment, one line for each, with their results; what has not been measured is NaN.

    With `averaged`, a number of a run that was made more than once is the mean.
    """
    rows = [(*row, row.config.split, row.config.name) for row in EXPERIMENTS[experiment].rows]
    grid = pd.DataFrame(rows, columns=["line", "column", "config", "split", "run"])
    made = data.results
    first = made[made["turn"] == 0].drop(columns="config")
    if averaged:
        ended = made[(made["status"] == "finished") & made["run"].isin(first["run"])]
        first = ended.groupby("run").mean(numeric_only=True).drop(columns="turn").reset_index()
    return grid.merge(first, how="left", on="run")


def values(data: Data, cell: Cell) -> pd.Series:
    """The numbers of a cell by split, NaN where one is missing; means of runs that were made more than once."""
    found = cells(data, cell.experiment, averaged=True)
    chosen = found[(found["line"] == cell.line) & (found["column"] == cell.column)]
    if chosen.empty:
        raise ValueError(f"there is no cell {cell.line!r}, {cell.column!r} in the experiment {cell.experiment!r}.")
    return chosen.set_index("split")[cell.measure]


# Means, intervals, verdicts


def spread(numbers: Iterable[float], form: str = ".2f") -> str:
    """Mean ± standard deviation (n − 1), and how many of the numbers there are if some are missing.

    Example:
        >>> spread([1.0, 3.0, 5.0]), spread([2.0, math.nan]), spread([math.nan])
        ('3.00 ± 2.00', '2.00 (1 of 2)', '–')
    """
    numbers = list(numbers)
    found = [number for number in numbers if not math.isnan(number)]
    if not found:
        return GAP
    deviation = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    missing = f" ({len(found)} of {len(numbers)})" if len(found) < len(numbers) else ""
    return f"{statistics.fmean(found):{form}}{deviation}{missing}"


class Interval(NamedTuple):
    """Student's 95 % interval of a mean of differences."""

    changes: list[float]
    low: float
    high: float
    whole: bool  # no difference is missing

    def __str__(self) -> str:
        if len(self.changes) < 2:
            return GAP
        text = " to ".join(f"{end:+.{2 if abs(end) >= 0.005 else 3}f}" for end in (self.low, self.high))
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


def compare(data: Data, pair: Pair) -> Interval:
    """The first cell minus `times` the second, split by split: all methods see the same images in a split."""
    return interval(values(data, pair.first) - pair.times * values(data, pair.second))


def decide(data: Data, pairs: Iterable[Pair]) -> tuple[str, Pair, Interval]:
    """Whether all pairs are as claimed (holds, fails, undecided), and the pair that decides that.

    One pair that fails is enough; a missing number is a gap.
    """
    found = [(pair, compare(data, pair)) for pair in pairs]
    verdicts = {result.verdict for _, result in found}
    verdict = next((word for word in (GAP, "fails", "undecided") if word in verdicts), "holds")

    def share(
        entry: tuple[Pair, Interval],
    ) -> float:  # of the second's error: strong distortion counts no more than mild
        pair, result = entry
        return (result.low if verdict == "fails" else result.high) / values(data, pair.second).mean()

    return verdict, *max(found, key=share)


# Views: tables


def table(data: Data, name: str) -> str:
    """An experiment as a Markdown table with its title; below it runs that failed or came from another device."""
    experiment = EXPERIMENTS[name]
    title = f"{f'Table {name}' if name.isdigit() else name.capitalize()}. {experiment.title}"
    found = cells(data, name).drop_duplicates("run")
    failed = found[found["status"] == "failed"]
    notes = [f"{line.run} failed and is left out: {line.reason}." for line in failed.itertuples()]
    devices = found.loc[found["status"] == "finished", ["run", "device"]]
    usual = statistics.mode(devices["device"]) if len(devices) else ""
    for device, runs in devices[devices["device"] != usual].groupby("device"):
        notes.append(f"Trained on {device}: {', '.join(runs['run'])}.")
    return "\n\n".join([f"**{title}**", LAYOUTS.get(name, partial(_beside_the_paper, name=name))(data), *notes])


def _beside_the_paper(data: Data, name: str, measure: str = "test error") -> str:
    """Lines and columns as in the grid; the paper's numbers beside ours where it has any."""
    shown = cells(data, name).groupby(["line", "column"], sort=False)[measure].agg(spread).unstack(sort=False)
    return _with_paper(shown, name)


def _with_paper(shown: pd.DataFrame, name: str) -> str:
    paper = PAPER.get(name)
    rows = [["error in %", *(text for column in shown for text in ((column, "paper") if paper else (column,)))]]
    for line, row in shown.iterrows():
        theirs = (paper or {}).get(str(line), {})
        pairs = ((row[c], theirs.get(c, GAP)) if paper else (row[c],) for c in shown)
        rows.append([str(line), *itertools.chain(*pairs)])
    return markdown(rows)


def best_networks(data: Data, name: str) -> pd.DataFrame:
    """In each line and column of an experiment the run with the lowest validation error, the first split of a tie."""
    found = cells(data, name)
    keys = ["line", "column"]
    best = found.dropna(subset="val error").sort_values(["val error", "split"]).drop_duplicates(keys)
    counts = found.groupby(keys)["val error"].agg(["size", "count"])
    index = pd.MultiIndex.from_frame(found[keys].drop_duplicates())
    return best.set_index(keys).join(counts).reindex(index)


def _table_2(data: Data) -> str:
    best = best_networks(data, "2").droplevel("column")
    missing = [
        f" ({n:.0f} of {size:.0f})" if n < size else "" for n, size in zip(best["count"], best["size"], strict=True)
    ]
    shown = best[list(STRENGTHS)].map(lambda error: GAP if math.isnan(error) else f"{error:.2f}")
    return _with_paper(shown.apply(lambda column: column.where(column == GAP, column + missing)), "2")


def chosen_settings(data: Data, method: str, dataset: str) -> grids.Settings | None:
    """The settings with the lowest validation error in the search, ties by loss; None while a run is missing."""
    found = cells(data, "tuning")
    mine = found[(found["line"] == method) & found["config"].map(lambda config: config.dataset == dataset)]
    if mine["status"].isna().any() or mine["val error"].isna().all():
        return None
    best = mine.sort_values(["val error", "val_loss"], kind="stable")["config"].iloc[0]
    return grids.Settings(best.lr, best.weight_decay, best.upsample)


def _tuning(data: Data) -> str:
    """Methods side by side, one line for each point of the search."""
    errors = cells(data, "tuning").pivot(index="column", columns="line", values="val error")
    winners = {key: chosen_settings(data, *key) for key in itertools.product(METHODS, DATASETS)}
    rows = [["validation error in %", *METHODS]]
    for (dataset, title), settings in itertools.product(DATASETS.items(), grids.SEARCH):
        line = errors.loc[f"{title}, {settings}"]
        marks = ((line[m], " ✓" if winners[m, dataset] == settings else "") for m in METHODS)
        rows.append([f"{title}, {settings}", *(GAP if math.isnan(e) else f"{e:.2f}{mark}" for e, mark in marks)])
    return markdown(rows)


def chosen(data: Data) -> str:
    """What each method uses, and whether validation chose it."""
    rows = [["settings", *DATASETS.values()]]
    for method in METHODS:
        line = [method]
        for dataset in DATASETS:
            used, best = grids.CHOSEN[method, dataset], chosen_settings(data, method, dataset)
            note = " (not tuned yet)" if best is None else "" if best == used else f" (validation chose {best})"
            line.append(f"{used}{note}")
        rows.append(line)
    return markdown(rows)


def _large(numbers: pd.Series) -> str:
    return GAP if numbers.isna().all() else f"{statistics.fmean(numbers.dropna()):,.0f}"


def _ablations(data: Data) -> str:
    base = next(iter(grids.ABLATIONS))
    rows = [["one change at a time", "error in %", "difference", "parameters", "seconds"]]
    found = cells(data, "ablations")
    usual = found["device"].mode()
    for line, group in found.groupby("line", sort=False):
        cell = Cell("ablations", str(line), "SS-CNN")
        change = "base" if line == base else compare(data, Pair(cell, cell._replace(line=base))).summary[0]
        timed = group.loc[group["device"].isin(usual), "seconds"]
        rows.append([str(line), spread(group["test error"]), change, _large(group["parameters"]), _large(timed)])
    return markdown(rows)


def _sizes(data: Data) -> str:
    """Both input sizes for every method."""
    rows = [["error in %", "28 px", "56 px", "28 minus 56 px", "parameters", "seconds, 28 px", "seconds, 56 px"]]
    found = cells(data, "sizes").set_index(["line", "column"])
    for method in METHODS:
        small, large = Cell("sizes", method, "28 px"), Cell("sizes", method, "56 px")
        both = [found.loc[[(method, cell.column)]] for cell in (small, large)]
        line = [*(spread(part["test error"]) for part in both), compare(data, Pair(small, large)).summary[0]]
        rows.append([method, *line, _large(both[1]["parameters"]), *(_large(part["seconds"]) for part in both)])
    return markdown(rows)


def paper_sizes(data: Data) -> str:
    """MNIST-Scale with the input sizes that the paper has for each method."""
    ours = Cell("sizes", "SS-CNN", "56 px")
    rows = [
        ["input size of the paper, error in %", "here", "paper", "SS-CNN minus it", "95 % interval", "SS-CNN lower in"]
    ]
    found = cells(data, "sizes").set_index(["line", "column"])["test error"]
    for method in METHODS:
        own = ours if method == "SS-CNN" else Cell("sizes", method, "28 px")
        compared = (GAP,) * 3 if own == ours else compare(data, Pair(ours, own)).summary
        here = spread(found.loc[[(method, own.column)]])
        rows.append([f"{method}, {own.column}", here, PAPER["1"].get(method, {}).get("MNIST-Scale", GAP), *compared])
    return markdown(rows)


def pairs(data: Data, *names: str) -> str:
    """SS-CNN against each other method in some of the paper's tables, split by split."""
    rows = [["SS-CNN minus", "mean ± std of the differences", "95 % interval of the mean", "SS-CNN lower in"]]
    for name in names:
        grid = EXPERIMENTS[name].rows
        for column, line in itertools.product(
            dict.fromkeys(r.column for r in grid), dict.fromkeys(r.line for r in grid)
        ):
            if line != "SS-CNN":
                pair = Pair(Cell(name, "SS-CNN", column), Cell(name, line, column))
                rows.append([f"{line}, {column}", *compare(data, pair).summary])
    return markdown(rows)


def _distortion_rows(found: pd.DataFrame, measures: Sequence[str]) -> list[list[str]]:
    groups = found.groupby(["line", "column"], sort=False)
    return [[", ".join(filter(None, key)), *(spread(group[m]) for m in measures)] for key, group in groups]


def distorted(data: Data) -> str:
    """Table 2 as means over splits, also with images moved."""
    found = cells(data, "2").assign(column="")
    return markdown([["error in %", *DISTORTIONS], *_distortion_rows(found, DISTORTIONS)])


def distorted_pairs(data: Data) -> str:
    """SS-CNN against each other line of Table 2, in every way that images were changed."""
    rows = [["SS-CNN minus", *DISTORTIONS]]
    for line in dict.fromkeys(row.line for row in EXPERIMENTS["2"].rows):
        if line != "SS-CNN":
            rows.append([line, *(str(compare(data, _likewise("2", line, "60 epochs", m))) for m in DISTORTIONS)])
    return markdown(rows)


def _likewise(experiment: str, other: str, column: str, measure: str, times: float = 1) -> Pair:
    return Pair(Cell(experiment, "SS-CNN", column, measure), Cell(experiment, other, column, measure), times)


def _longer(data: Data) -> str:
    """Each method of Table 2 after 60 epochs and after more."""
    found = cells(data, "longer").assign(**{"val error": cells(data, "longer", averaged=True)["val error"]})
    rows = _distortion_rows(found, ("val error", *STRENGTHS))
    return markdown([["error in %", "validation", *STRENGTHS], *rows])


def chosen_epochs(data: Data) -> dict[str, str]:
    """For each method the column of "longer" with the lowest mean validation error, of those that are complete."""
    found = cells(data, "longer", averaged=True).groupby(["line", "column"], sort=False)["val error"]
    means = found.agg(lambda errors: errors.mean(skipna=False)).unstack(sort=False)
    whole = means[means.notna().sum(axis=1) > 1]  # else there was nothing to choose from
    return {str(method): str(column) for method, column in whole.idxmin(axis=1).items()}


def longer_changes(data: Data) -> str:
    """What more epochs do to each method, as intervals."""
    few, *more = (f"{epochs} epochs" for epochs in grids.EPOCHS)
    rows = [[f"minus its error after {few}", "validation", *DISTORTIONS]]
    for method, column in itertools.product(grids.DISTORTED, more):
        cell = Cell("longer", method, column)
        both = ((cell._replace(measure=m), Cell("longer", method, few, m)) for m in ("val error", *DISTORTIONS))
        rows.append([f"{method}, {column}", *(str(compare(data, Pair(*pair))) for pair in both)])
    return markdown(rows)


def longer_pairs(data: Data) -> str:
    """SS-CNN against the others after the same number of epochs, and after those that validation chose for each."""
    rows = [["SS-CNN, trained likewise, minus", *DISTORTIONS]]
    for other in grids.DISTORTED:
        for way in (*(f"{epochs} epochs" for epochs in grids.EPOCHS[1:]), CHOSEN) if other != "SS-CNN" else ():
            found = (after(data, (_likewise("longer", other, "", m),), way) for m in DISTORTIONS)
            rows.append([f"{other}, {way}", *(str(compare(data, *pair)) if pair else GAP for pair in found)])
    return markdown(rows)


CHOSEN = "as validation chose"


def after(data: Data, pairs: Iterable[Pair], way: str) -> tuple[Pair, ...]:
    """Pairs of "longer" after so many epochs, or after those that validation chose; none while that is not known."""
    best = chosen_epochs(data) if way == CHOSEN else dict.fromkeys(grids.DISTORTED, way)
    return tuple(
        Pair(*(c._replace(column=best[c.line]) for c in (pair.first, pair.second)), pair.times)
        for pair in pairs
        if pair.first.line in best and pair.second.line in best
    )


def repeats(data: Data) -> str:
    """Runs of the tables beside other runs of the same configuration."""
    made = _made_again(data)
    rows = [["error in %", *(f"split {split}" for split in SPLITS), "mean"]]
    for kind, group in made.groupby("kind", sort=False):
        for turn, errors in group.groupby("turn")[["split", "test error"]]:
            shown = errors.set_index("split")["test error"]
            line = [f"{kind}, {f'another run ({turn})' if turn else 'in the tables'}"]
            line += [f"{shown[split]:.2f}" if split in shown else GAP for split in SPLITS]
            whole = len(shown) == group["split"].nunique()  # means of other splits would not compare
            rows.append([*line, f"{statistics.fmean(shown):.2f}" if whole else GAP])
    return markdown(rows)


def _made_again(data: Data) -> pd.DataFrame:
    made = data.results
    again = made[made["run"].isin(made.loc[made["repeat"], "run"]) & made["run"].isin(made.loc[~made["repeat"], "run"])]
    again = again[again["test error"].notna()].copy()
    titles = {model: method for method, model in METHODS.items()}
    again["split"] = [config.split for config in again["config"]]
    again["kind"] = [
        f"{titles[c.model]}, {DATASETS.get(c.dataset, c.dataset)}, {28 * (c.upsample or 1)} px" for c in again["config"]
    ]
    return again.sort_values("run", kind="stable")


def repeat_deviation(data: Data) -> float:
    """Standard deviation of one run around the mean of its configuration, in %."""
    groups = _made_again(data).groupby("run")["test error"]
    return math.sqrt(((groups.count() - 1) * groups.var()).sum() / (groups.count() - 1).sum())


def effects(data: Data) -> str:
    """What each of the changes that were combined is worth on validation data, all others being equal."""
    rows = [["instead of", "validation error in %, mean ± std", "95 % interval of the mean", "lower in"]]
    for i, (ours, other) in enumerate(grids.CHOICES):
        changes: list[float] = []
        for levels in grids.COMBINED:
            if levels[i] == other:
                twin = (*levels[:i], ours, *levels[i + 1 :])
                sides = [Cell("choices", ", ".join(names), "", "val error") for names in (levels, twin)]
                changes += list(values(data, sides[0]) - values(data, sides[1]))
        rows.append([f"{ours}: {other}", *interval(changes).summary])
    return markdown(rows)


def _choices(data: Data) -> str:
    rows = [["filters", "validation error in %", "validation loss"]]
    for line, group in cells(data, "choices", averaged=True).groupby("line", sort=False):
        loss = GAP if group["val_loss"].isna().all() else f"{statistics.fmean(group['val_loss'].dropna()):.3f}"
        rows.append([str(line), spread(group["val error"]), loss])
    return markdown(rows)


def by_scale(data: Data, dataset: str) -> str:
    """Error by scale of the object, mean over splits."""
    title = DATASETS[dataset]
    found = cells(data, "1")
    means = found[found["column"] == title].groupby("line", sort=False)[list(SIZES)].mean()
    rows = [
        [line, *(GAP if math.isnan(e) else f"{e:.2f}" for e in row)]
        for line, row in zip(means.index, means.to_numpy(), strict=True)
    ]
    return markdown([[f"{title}, error in %", *SIZES], *rows])


def costs(data: Data) -> str:
    """Parameters and training time by method."""
    found = cells(data, "1")
    heads = [f"{title}, {what}" for title in DATASETS.values() for what in ("parameters", "s")]
    rows = [["mean over splits", *heads, "all runs, minutes"]]
    for method, group in found.groupby("line", sort=False):
        parts = [group[group["column"] == title] for title in DATASETS.values()]
        total = f"{group['seconds'].sum() / 60:.1f} ({group['seconds'].count()} runs)"
        numbers = (_large(part[key]) for part in parts for key in ("parameters", "seconds"))
        rows.append([str(method), *numbers, total if group["seconds"].count() else GAP])
    return markdown(rows)


LAYOUTS: dict[str, Callable[[Data], str]] = {
    "2": _table_2,
    "tuning": _tuning,
    "ablations": _ablations,
    "sizes": _sizes,
    "choices": _choices,
    "longer": _longer,
}


# Views: claims


def claims(data: Data) -> str:
    """The paper's claims: its numbers and ours where the claim is decided, the interval, and the verdict."""
    rows = [["claim of the paper", "paper, error in %", "here", "95 % interval of the difference", "verdict"]]
    for claim in CLAIMS.values():
        verdict, pair, found = decide(data, claim.pairs)
        here = _both(pair, lambda cell: error(data, *cell)) if verdict != GAP else GAP
        paper = claim.paper or _both(pair, lambda cell: _papers(cell).split()[0])
        factor = f" (with {pair.times:g} times)" if pair.times != 1 else ""
        line = [claim.text, paper, here, f"{found}{factor}", f"[{verdict}](evidence/{claim.evidence}.md)"]
        rows.append(line)
    return markdown(rows, left=5)


def _papers(cell: Cell) -> str:
    return (
        PAPER["2"][cell.line][cell.measure]
        if cell.measure in STRENGTHS
        else PAPER[cell.experiment][cell.line][cell.column]
    )


def _both(pair: Pair, number: Callable[[Cell], str]) -> str:
    """Both numbers of a pair, each with what sets it apart, and in which respect they are alike."""
    first, second = pair.first, pair.second
    where = first.measure if first.measure in STRENGTHS else first.column
    names = (first.line, second.line) if first.line != second.line else (first.column, second.column)
    alike = where if first.line != second.line else first.line
    return f"{names[0]} {number(first)}, {names[1]} {number(second)} ({alike})"


def verdict(data: Data, claim: str, way: str | int = "") -> str:
    """Whether a claim holds; one on distortion also after so many epochs, or those that validation chose."""
    compared = CLAIMS[claim].pairs
    if way:
        compared = after(data, compared, f"{way} epochs" if isinstance(way, int) else way)
    return decide(data, compared)[0] if compared else GAP


def paper_sizes_verdict(data: Data) -> str:
    """Whether SS-CNN has the lowest error on MNIST-Scale with the input sizes that the paper has for each method."""
    ours = Cell("sizes", "SS-CNN", "56 px")
    return decide(data, (Pair(ours, Cell("sizes", other, "28 px")) for other in grids.OTHERS))[0]


# Views: words and numbers of sentences


def words(names: Sequence[str]) -> str:
    """Names in a sentence.

    Example:
        >>> words(["a", "b", "c"])
        'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def standing(data: Data, name: str, column: str) -> str:
    """Whom SS-CNN is ahead of in a column of a table, whom behind, and from whom it cannot be told apart."""
    verdicts: dict[str, list[str]] = {}
    for line in dict.fromkeys(row.line for row in EXPERIMENTS[name].rows if row.line != "SS-CNN"):
        pair = Pair(Cell(name, "SS-CNN", column), Cell(name, line, column))
        verdicts.setdefault(compare(data, pair).verdict, []).append(line)
    said = {
        "holds": "has a lower error than {}",
        "fails": "has a higher error than {}",
        "undecided": "cannot be told apart from {}",
        GAP: "has not been compared with {}",
    }
    return "; it ".join(text.format(words(verdicts[word])) for word, text in said.items() if word in verdicts)


def difference(data: Data, first: Cell | tuple[str, ...], second: Cell | tuple[str, ...]) -> str:
    """The interval of one cell minus another."""
    return str(compare(data, Pair(Cell(*first), Cell(*second)))).strip("*")


def error(data: Data, *cell: str) -> str:
    """The mean of a cell, as in the tables."""
    experiment, line, column, measure = Cell(*cell)
    found = cells(data, experiment)
    return spread(found.loc[(found["line"] == line) & (found["column"] == column), measure]).split()[0]


def ratios(data: Data, first: str, second: str, epochs: int | str = 60, best: bool = False) -> list[float]:
    """The first method's errors over the second's at each strength of distortion.

    Args:
        data: All results.
        first: A method of Table 2.
        second: Another.
        epochs: After so many epochs, or "as validation chose".
        best: Of the networks that are best on validation data, instead of means over splits.
    """
    way = f"{epochs} epochs" if isinstance(epochs, int) else epochs
    found = []
    for alpha in STRENGTHS:
        pair = after(data, (Pair(Cell("longer", first, "", alpha), Cell("longer", second, "", alpha)),), way)
        if not pair:
            found.append(math.nan)
        elif best:
            networks = best_networks(data, "longer")
            over, under = (networks.loc[(cell.line, cell.column)] for cell in pair[0][:2])
            whole = all(network["count"] == network["size"] for network in (over, under))
            found.append(over[alpha] / under[alpha] if whole else math.nan)
        else:
            both = pd.concat([values(data, cell) for cell in pair[0][:2]], axis=1).dropna()
            found.append(
                statistics.fmean(both.iloc[:, 0]) / statistics.fmean(both.iloc[:, 1]) if len(both) else math.nan
            )
    return found


def ratio(data: Data, first: str, second: str, epochs: int | str = 60, best: bool = False) -> str:
    """The smallest and the largest of :func:`ratios`."""
    found = ratios(data, first, second, epochs, best)
    return GAP if any(map(math.isnan, found)) else f"{min(found):.2f} to {max(found):.2f}"


def at_or_below(data: Data, *names: str) -> str:
    """How many of the paper's numbers in some of its tables ours are at or below, to two decimals."""
    below = []
    for name in names:
        found = (
            best_networks(data, name)
            if name == "2"
            else cells(data, name).groupby(["line", "column"])["test error"].mean()
        )
        for line, column in ((line, column) for line, row in PAPER[name].items() for column in row):
            ours = found.loc[(line, "60 epochs")][column] if name == "2" else found.loc[(line, column)]
            below.append(
                math.nan if math.isnan(ours) else round(ours, 2) <= float(PAPER[name][line][column].split()[0])
            )
    return GAP if any(map(math.isnan, below)) else f"{sum(below)} of {len(below)}"


def release(data: Data, dataset: str) -> str:
    """Which release of the original images the runs on a dataset in the tables used."""
    used = [
        source["release"]
        for source, c in zip(data.results["source"], data.results["config"], strict=True)
        if c.dataset == dataset
    ]
    return words(sorted(set(used))) or GAP


def release_change(data: Data) -> str:
    """How far the means of Table 1 on FMNIST-Scale lie from those with the first release."""
    changes = [float(error(data, "1", m, "FMNIST-Scale")) - before for m, before in grids.FIRST_RELEASE.items()]
    return f"{min(changes):+.2f} to {max(changes):+.2f}"


def devices(data: Data, name: str) -> str:
    """Where the runs of an experiment were made."""
    return words(sorted(cells(data, name)["device"].dropna().unique())) or GAP


def hours(data: Data) -> str:
    """How long training of all runs in the experiments took, together."""
    used = {config.name for experiment in EXPERIMENTS.values() for config in experiment.runs}
    made = data.results[(data.results["turn"] == 0) & data.results["run"].isin(used)]
    return f"{made['seconds'].sum() / 3600:.1f}"


def figure(name: str, caption: str) -> str:
    """A picture of results/, or that it has not been drawn, for a page of docs/evidence."""
    drawn = (RESULTS / name).exists()
    return (
        f"![{caption}](../../{(RESULTS / name).relative_to(ROOT).as_posix()})"
        if drawn
        else f"*Not drawn yet: {caption}.*"
    )


# Plots and the views by name


def plots(data: Data) -> dict[str, Figure]:
    """Figures of results: validation error by epoch, error by scale, ratios under distortion."""
    from paper import figures

    drawn = {}
    found = cells(data, "1").dropna(subset="test error")
    for dataset, title in DATASETS.items():
        mine = found[found["column"] == title].groupby("line", sort=False)
        if len(mine):
            curves = {str(line): (group[list(SIZES)] / 100).to_numpy() for line, group in mine}
            middles = [sum(ends) / 2 for ends in SCALE_BINS]
            drawn[f"scales-{dataset}"] = figures.draw_errors(curves, middles, f"scale of the object, {title}")
            histories = {str(line): group["val errors"].tolist() for line, group in mine}
            drawn[f"validation-{dataset}"] = figures.draw_histories(histories, f"validation error on {title}, %")
    if not data.results[list(STRENGTHS)].isna().all(axis=None):
        panels = {f"SS-CNN / {other}": _ratio_lines(data, other) for other in RIVALS}
        drawn["distortion"] = figures.draw_ratios(panels, ELASTIC_ALPHAS, "strength of distortion α", [1, grids.PAR])
    return drawn


def _ratio_lines(data: Data, other: str) -> dict[str, tuple[list[float], list[list[float]]]]:
    """The paper's ratios and ours after each number of epochs, with those of each split."""
    ours, theirs = (PAPER["2"][line].values() for line in ("SS-CNN", other))
    lines = {"paper": ([float(a) / float(b) for a, b in zip(ours, theirs, strict=True)], [])}
    for epochs in grids.EPOCHS:
        means = ratios(data, "SS-CNN", other, epochs)
        if not any(map(math.isnan, means)):
            pairs = (_likewise("longer", other, f"{epochs} epochs", alpha) for alpha in STRENGTHS)
            each = pd.concat([values(data, pair.first) / values(data, pair.second) for pair in pairs], axis=1).dropna()
            lines[f"here, {epochs} epochs"] = means, each.to_numpy().tolist()
    return lines


_published = lru_cache(maxsize=1)(load)


def _of_published(view: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: view(_published(), *arguments, **options)


VIEWS: dict[str, Any] = {
    "table": table,
    "claims": claims,
}
VIEWS = {name: _of_published(view) for name, view in VIEWS.items()} | {"figure": figure}
