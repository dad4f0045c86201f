"""The paper's experiments on the pages: its tables with our numbers beside, repeats, numbers of sentences, plots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from paper import RESULTS, anysize, cells, curves, distortion, grids
from paper.cells import SIZES, Data, columns, interval, lines, load, mean, minus, runs, show, values
from paper.grids import DATASETS, EXPERIMENTS, METHODS, PAPER, STRENGTHS, Cell
from paper.markdown import GAP, view, words
from paper.markdown import table as markdown
from scalesteer.app.evaluation import SCALE_BINS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Tables


@view
def table(data: Data, name: str, title: bool = True) -> str:
    """An experiment as a Markdown table with its title; below it what must be known of some of its runs.

    That is: which failed, which came from another device, and whose names stood for something else when they were made.
    """
    head = f"**{f'Table {name}' if name.isdigit() else name.capitalize()}. {EXPERIMENTS[name].title}**"
    found = runs(data, name).drop_duplicates("run")
    failed = found[found["status"] == "failed"]
    notes = [f"{one.run} failed and is left out: {one.reason}." for one in failed.itertuples()]
    elsewhere = found[found["device"].notna() & ~found["device"].isin(found["device"].mode()[:1])]
    notes += [f"Trained on {device}: {', '.join(group['run'])}." for device, group in elsewhere.groupby("device")]
    own = LAYOUTS.get(name)
    body = own(data) if own else _beside_the_paper(name, columns(name), lambda line, c: show(data, Cell(name, line, c)))
    notes += [note for note in former(data, name) if note not in body]
    return "\n\n".join([*([head] if title else []), body, *notes])


def former(data: Data, name: str) -> list[str]:
    """What names of lines stood for when their runs were made, where that is something else now: a sentence each."""
    found = runs(data, name).dropna(subset="form")
    return [f"{line}: {form}." for line, form in dict.fromkeys(zip(found["line"], found["form"], strict=True))]


def _beside_the_paper(name: str, heads: Sequence[str], ours: Callable[[str, str], str]) -> str:
    """Lines and columns, the paper's numbers beside ours where it has any."""
    paper = PAPER.get(name)
    rows = [["error in %", *itertools.chain(*((head, "paper") if paper else (head,) for head in heads))]]
    for line in lines(name):
        both = ((ours(line, c), *([paper.get(line, {}).get(c, GAP)] if paper else ())) for c in heads)
        rows.append([line, *itertools.chain(*both)])
    return markdown(rows)


def _table_2(data: Data) -> str:
    def best(line: str, alpha: str) -> str:
        network, missing = distortion.best_network(data, "2", line)
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


def _ablations(data: Data, without: Sequence[str] = ()) -> str:
    rows = [["one change at a time", "error in %", "difference", "parameters", "seconds"]]
    base, *others = (Cell("ablations", line, "SS-CNN") for line in lines("ablations") if line not in without)
    for cell in (base, *others):
        change = "base" if cell == base else minus(data, cell, base).summary[0]
        costs = (show(data, cell._replace(measure=m)) for m in ("parameters", "seconds"))
        rows.append([cell.line, show(data, cell), change, *costs])
    return "\n\n".join([markdown(rows), *former(data, "ablations")])


@view
def ablations(data: Data) -> str:
    """What each change to SS-CNN's filters does, without those that have a like beside them."""
    return _ablations(data, without=("support crop", "one scale: 17", "orders 0.5, 1"))


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


def _choices(data: Data) -> str:
    heads = ("validation error in %", "validation loss")
    every = {line: Cell("choices", line, "") for line in lines("choices")}
    return cells.numbers_table(data, "filters", every, ("val error", "val_loss"), heads)


def changes_of(data: Data) -> dict[str, list[float]]:
    """The differences of validation errors by each of the changes that were combined, all others being equal."""
    found = {}
    for i, (ours, other) in enumerate(grids.CHOICES):
        changes: list[float] = []
        for levels in (levels for levels in grids.COMBINED if levels[i] == other):
            twin = (*levels[:i], ours, *levels[i + 1 :])
            changed, unchanged = (Cell("choices", ", ".join(names), "", "val error") for names in (levels, twin))
            changes += list(values(data, changed) - values(data, unchanged))
        found[f"{other} instead of {ours}"] = changes
    return found


@view
def effects_span(data: Data) -> str:
    """The smallest and the largest of their means, in points."""
    means = [interval(changes).summary[0].partition(" ")[0] for changes in changes_of(data).values()]
    return GAP if GAP in means else f"{min(means, key=float)} to {max(means, key=float)}"


LAYOUTS: dict[str, Callable[[Data], str]] = {
    "2": _table_2,
    "tuning": _tuning,
    "ablations": _ablations,
    "sizes": _sizes,
    "choices": _choices,
    "longer": distortion.longer,
    **anysize.LAYOUTS,
}


# Repeats


def _made_again(data: Data) -> pd.DataFrame:
    made = data.results[data.results["test error"].notna()]
    return made[made["run"].isin(made.loc[made["repeat"], "run"]) & made["run"].isin(made.loc[~made["repeat"], "run"])]


@view
def repeat_deviation(data: Data, differences: int = 0) -> str:
    """Standard deviation of a run around the mean of its configuration, in %; or of the mean of some differences."""
    groups = _made_again(data).groupby("run")["test error"]
    freedom = groups.count() - 1
    one = math.sqrt((freedom * groups.var()).sum() / freedom.sum()) if freedom.sum() else math.nan
    return mean([one * (math.sqrt(2 / differences) if differences else 1)])


# Words and numbers of sentences


@view
def error(data: Data, *cell: str) -> str:
    """The mean of a cell, as in the tables."""
    return mean(values(data, Cell(*cell), False))


@view
def gained_by_size(data: Data, *methods: str) -> str:
    """By how many points the larger input lowers the mean error of some methods, from the least to the most."""
    first, second = columns("sizes")
    pairs = [(Cell("sizes", method, first), Cell("sizes", method, second)) for method in methods]
    gains = [mean(minus(data, *pair).changes, ".1f") for pair in pairs]
    return GAP if GAP in gains else " to ".join(dict.fromkeys(sorted(gains, key=float)[:: max(1, len(gains) - 1)]))


@view
def sizes_chosen(data: Data) -> str:
    """Which input size validation chose, and for whom."""
    found = {key: chosen_settings(data, *key) for key in grids.CHOSEN}
    if None in found.values():
        return GAP
    small = [f"{method} on {DATASETS[name]}" for (method, name), own in found.items() if own and own.upsample == 1]
    return (
        f"28 pixels for {words(small)}, 56 for the others" if small else "56 pixels for every method on both datasets"
    )


@view
def at_or_below(data: Data, *names: str) -> str:
    """How many of the paper's numbers in some of its tables ours are at or below, to two decimals."""
    found = []
    for name in names:
        for line, row in PAPER[name].items():
            best = distortion.best_network(data, name, line)[0] if name == "2" else {}
            for column, paper in row.items():
                ours = mean([best[column]]) if best else error(data, name, line, column)
                found.append(GAP if ours == GAP else float(ours) <= float(paper.split()[0]))
    return GAP if GAP in found else f"{found.count(True)} of {len(found)}"


@view
def release(data: Data, column: str) -> str:
    """Which release of the original images the runs in a column of Table 1 used."""
    found = runs(data, "1")
    return words(sorted(found.loc[found["column"] == column, "release"].dropna().unique())) or GAP


@view
def release_change(data: Data) -> str:
    """How far our means on FMNIST-Scale lie from those with the first release."""
    title = DATASETS["fmnist-scale"]
    changes = [
        values(data, Cell("1", method, title), averaged=False).mean()
        - values(data, Cell("replaced", method, title)).mean()
        for method in METHODS
    ]
    if any(map(math.isnan, changes)):
        return GAP
    return f"{cells.decimal(min(changes), '+.2f')} to {cells.decimal(max(changes), '+.2f')}"


@view
def training_time(data: Data, *names: str) -> str:
    """How long training of the runs of some experiments took, by default of all, each run counted once, and where."""
    every = pd.concat([runs(data, name) for name in names or EXPERIMENTS])
    made = every.drop_duplicates("run").dropna(subset="seconds")
    devices = words(sorted(made["device"].unique()))
    return f"{made['seconds'].sum() / 3600:.1f} hours on {devices}" if len(made) else GAP


# Plots


def plots(folder: Path = RESULTS) -> dict[str, Figure]:
    """Figures of results by their place: validation error by epoch, error by scale."""
    found, drawn = runs(load(folder), "1").dropna(subset="test error"), {}
    for dataset, title in DATASETS.items():
        groups = {str(line): group for line, group in found[found["column"] == title].groupby("line", sort=False)}
        if groups:
            errors = {line: (group[list(SIZES)] / 100).to_numpy().tolist() for line, group in groups.items()}
            middles = [sum(ends) / 2 for ends in SCALE_BINS]
            drawn[f"scales-{dataset}"] = curves.plot_errors(
                errors, middles, "scale of the object", title=f"{title}: test error by the scale of the object"
            )
            histories = {line: group["validation by epoch"].tolist() for line, group in groups.items()}
            drawn[f"validation-{dataset}"] = curves.plot_histories(
                histories,
                "validation error, %",
                f"{title}: mean and range over splits after each epoch; the others' means in grey",
            )
    return {f"figures/{name}.png": drawing for name, drawing in drawn.items()}
