"""Networks at sizes that training did not show: the views, tables and plots of these experiments.

Their runs stand in `paper.grids`, numbers of others in ``results/published``. Pages show a line once all of its runs
are there, and name those that are left out; `python -m paper table` shows every line.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

import paper
from paper import RESULTS, cells, curves, grids, recorded
from paper.cells import Data, lines, values
from paper.grids import AUGMENTED, DATASETS, LARGE_SIZES, LEADING, PAPER, PROTOCOLS, SOME_SIZES, STIR, TWIN, Cell
from paper.markdown import GAP, table, view, words
from paper.record import Record
from scalesteer.datasets import SIZED_DATASETS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST_PUBLISHED = {"MNIST": "Pyramid ensemble", "Emoji": "PixelPool"}  # in the figures
PUBLISHED_SHOWN = ("Pyramid ensemble", "PixelPool", "DISCO", "Plain CNN")
"""Of the networks of Altstidl et al.: the best on digits and on icons, one that resizes filters, and the control."""
STIR_PLAIN = "STIR's plain CNN"  # two convolutions, 7 x 7, of 16 and 32 channels; global maximum; a linear layer
AS_LONG = ", as long as ours"  # ends the name of the rival that trains as long as scale channels do


@cache
def published(name: str) -> Any:
    """Numbers of others, with their source."""
    return recorded(f"published/{name}.json")


# Lines


def shown(line: str) -> str:
    """The name of a line for readers: the grids call the network without scale channels a twin.

    Example:
        >>> shown("Plain twin, random resizing")
        'Plain network, random resizing'
    """
    return line.replace(TWIN, "Plain network")


def ordered(names: Iterable[str]) -> list[str]:
    """Lines in the order of tables: first the rival that wins in practice, random resizing for as long as ours."""
    return sorted(names, key=lambda name: not name.endswith(AS_LONG))


def complete(data: Data, name: str, line: str, start: str = "") -> bool:
    """Whether all runs of a line are there, in the columns that begin so."""
    found = cells.runs(data, name)
    mine = found[(found["line"] == line) & found["column"].str.startswith(start)]
    return bool(len(mine)) and bool(mine["test error"].notna().all())


def _lines(data: Data, name: str, whole: bool, start: str = "") -> list[str]:
    """The lines of a table: all if it is to be `whole`, else those that are complete."""
    return ordered(line for line in lines(name) if whole or complete(data, name, line, start))


@view
def left_out(data: Data, name: str, start: str = "") -> str:
    """Names the lines whose runs are not all there, for the foot of a page; empty if there are none."""
    names = [shown(line) for line in ordered(lines(name)) if not complete(data, name, line, start)]
    return f"Left out, because some of their runs have not been made: {'; '.join(names)}." if names else ""


# Cells


def numbers(data: Data, cell: Cell, whole: float = 0) -> list[float]:
    """A cell's numbers as tables show them: of a run that was made more than once, the first.

    With `whole`, what they lack of it: 100 makes accuracies of errors in %. A cell without runs has no numbers.
    """
    if cell[:3] not in _cells_of(cell.experiment):
        return []
    return [whole - number if whole else number for number in values(data, cell, averaged=False)]


@cache
def _cells_of(name: str) -> frozenset[tuple[str, str, str]]:
    return frozenset((name, row.line, row.column) for row in grids.EXPERIMENTS[name].rows)


def mean(data: Data, cell: Cell, whole: float = 0, digits: int = 1) -> str:
    """The mean of :func:`numbers`."""
    return cells.mean(numbers(data, cell, whole), f".{digits}f")


def spread(data: Data, cell: Cell, whole: float = 0, digits: int = 1) -> str:
    """The same, ± standard deviation."""
    return cells.spread(numbers(data, cell, whole), f".{digits}f", digits)


def _weights(data: Data, cell: Cell) -> str:
    return cells.show(data, cell._replace(measure="parameters"))


# Tables


@view
def stir(data: Data, title: str, whole: bool = False) -> str:
    """STIR in its four protocols: ours, rivals trained by us, and published networks.

    Args:
        data: All results.
        title: "MNIST" or "Emoji".
        whole: Every line and every published network.
    """
    others = published("stir")["networks"]
    base = others["Plain CNN"]["seconds_per_epoch"]
    head = (f"{title}, accuracy in %", *PROTOCOLS, "seeds", "weights", "time of an epoch, plain CNN = 1")
    rows: list[Sequence[str]] = [head]
    for line in _lines(data, "stir", whole, title):
        every = [Cell("stir", line, f"{title} {protocol}") for protocol in PROTOCOLS]
        accuracies = [_outside_inside(data, cell) for cell in every]
        about = (repeats_of("stir", line), _weights(data, every[0]), epoch_time(line))
        rows.append((shown(line), *accuracies, *about))
    for name in others if whole else PUBLISHED_SHOWN:
        found = others[name]["accuracy"][title]
        accuracies = [
            f"{_rounded(own['outside'])} ± {_rounded(own['outside_std'])}"
            + f" ({_rounded(own['inside'])})" * (protocol in SOME_SIZES)
            for protocol, own in found.items()
        ]
        seconds, seeds = others[name]["seconds_per_epoch"], {own["seeds"] for own in found.values()}
        many = "–".join(sorted({str(min(seeds)), str(max(seeds))}, key=int))
        rows.append((f"{name} (published)", *accuracies, many, GAP, f"{seconds / base:.1f}" if seconds else GAP))
    return table(rows)


def _rounded(published_number: float) -> str:
    """One decimal of two, halves upwards: 90.85 as 90.9."""
    return f"{published_number + 1e-6:.1f}"


def _outside_inside(data: Data, cell: Cell) -> str:
    """Accuracy outside the training sizes, that inside in brackets; where all sizes were trained, that of all."""
    outside, inside = (cell._replace(measure=measure) for measure in ("outside", "inside"))
    if cell.column.endswith("All2All"):
        return spread(data, inside, 100)
    text = spread(data, outside, 100)
    return text if text == GAP else f"{text} ({mean(data, inside, 100)})"


@view
def epoch_time(line: str, beside: str = STIR_PLAIN) -> str:
    """The time of a training epoch on STIR-MNIST over that of another line in the same process.

    It is read from ``results/bench/stir-epoch.json``, whose `seconds` are by line, with `STIR_PLAIN` among them. A line
    that trains for more epochs has the epochs of the line that it is named after.
    """
    found = recorded("bench/stir-epoch.json")["seconds"]
    own, other = (_line("stir", name.removesuffix(AS_LONG)) for name in (line, beside))
    return f"{found[own] / found[other]:.1f}" if own in found else GAP


@view
def large_scale(data: Data, whole: bool = False) -> str:
    """MNIST Large Scale at the sizes that have published numbers."""
    sizes = [f"{size:g}" for size in LARGE_SIZES]
    rows: list[Sequence[str]] = [("accuracy in % at size", *sizes, "seeds", "weights")]
    for line in _lines(data, "large-scale", whole):
        every = [Cell("large-scale", line, "", f"size {size}") for size in sizes]
        about = (repeats_of("large-scale", line), _weights(data, every[0]))
        rows.append((shown(line), *(spread(data, cell, 100, 2) for cell in every), *about))
    others = ((name, *found, GAP, GAP) for name, *found in _published_rows("large-scale", sizes))
    return table([*rows, *others])


def _published_rows(name: str, columns: Sequence[str]) -> list[list[str]]:
    """Numbers of others on the data of an experiment, with two digits."""
    rows = []
    for own in published("others")[name]["rows"]:
        line = f"{own['network']}{', ' * ('setting' in own)}{own.get('setting', '')}"
        found = (own["numbers"].get(column) for column in columns)
        shown = (GAP if number is None else f"{number:.2f}" for number in found)
        rows.append([f"{line} (published{'' if own['checked'] else ', not checked'})", *shown])
    return rows


@view
def rescaled_cifar10(data: Data, whole: bool = False) -> str:
    """Rescaled CIFAR-10: error at each size, and the mean over those never seen."""
    sizes = [f"{size:.3g}" for size in SIZED_DATASETS["rescaled-cifar10"].sizes]
    rows: list[Sequence[str]] = [("error in % at size", *sizes, "mean at sizes never seen", "seeds", "weights")]
    for line in _lines(data, "rescaled-cifar10", whole):
        cell = Cell("rescaled-cifar10", line, "", "outside")
        errors = [mean(data, cell._replace(measure=f"size {size}")) for size in sizes]
        about = (repeats_of("rescaled-cifar10", line), _weights(data, cell))
        rows.append((shown(line), *errors, spread(data, cell), *about))
    return table(rows)


def new_networks(data: Data) -> str:
    """MNIST-Scale and FMNIST-Scale: the new networks, Table 1's methods, and later papers."""
    rows: list[Sequence[str]] = [("error in %", *DATASETS.values(), "weights")]
    for name, note in (("new-networks", ""), ("1", " (Table 1, ours)")):
        for line in lines(name):
            every = [Cell(name, line, title) for title in DATASETS.values()]
            errors = [spread(data, cell, digits=2) for cell in every]
            rows.append((shown(line) + note, *errors, _weights(data, every[0])))
    rows += [(f"{line} (Table 1, the paper's)", *found.values(), GAP) for line, found in PAPER["1"].items()]
    return table([*rows, *((*found, GAP) for found in _published_rows("new-networks", [*DATASETS.values()]))])


def own_name(run: dict[str, Any]) -> str:
    """What a run of examples/own_images.py is."""
    sizes = [f"{scale:g}" for scale in run["channels"] or [1.0]]
    name = "plain network" if len(sizes) == 1 else f"at {', '.join(sizes)} times its size"
    name += f", the last {run['epochs'] - first} epochs" if (first := run["one_size_epochs"]) else ""
    return name + (", random resizing" if run["resize"] else "")


def _own_errors() -> pd.DataFrame:
    """Errors of these runs by what they are and by size; what has the lowest at other sizes than 1 comes last."""
    runs = recorded("guide/own-images.json")
    seeds = pd.DataFrame([run["errors"] for run in runs], index=map(own_name, runs)).groupby(level=0)
    means = seeds.mean()
    others = means[[size for size in means if float(size) != 1]].mean(axis=1)
    order = others.sort_values(ascending=False).index
    return means.assign(others=others).map("{:.1f}".format).assign(seeds=seeds.size()).loc[order]


@view
def more_sizes_table() -> str:
    """The same for all sizes, as a table, and what it rests on."""
    found = recorded("guide/more-sizes.json")
    rows = [[way, *(f"{100 * error:.1f}" for error in own)] for way, own in found["errors"].items()]
    head = ["error in %, digits of size", *(f"{size:g}" for size in found["sizes"])]
    return f"{table([head, *rows])}\n\n{found['images']:,} test digits; `python examples/more_sizes.py`."


@view
def own_images_error(name: str, size: str = "others") -> str:
    """The error in % at a size, or the mean at those that training did not show, of the line that begins so."""
    found = _own_errors()[size]
    if name not in found:
        (name,) = (line for line in found.index if line.startswith(name))
    return str(found[name])


# Numbers of sentences


def _line(name: str, line: str) -> str:
    """The name of a line in the grids; "ours" is the leading one, and lines are known by their shown names too."""
    named = {"ours": LEADING.get(name, line)} | {shown(own): own for own in lines(name)}
    return named.get(line, line)


@view
def accuracy(data: Data, name: str, line: str, column: str = "", measure: str = "outside", digits: int = 1) -> str:
    """The mean accuracy of a cell in %; `line` may be "ours"."""
    return mean(data, Cell(name, _line(name, line), column, measure), 100, digits)


@view
def mean_error(data: Data, name: str, line: str, column: str = "", measure: str = "outside", digits: int = 1) -> str:
    """The mean error of a cell in %; `line` may be "ours"."""
    return mean(data, Cell(name, _line(name, line), column, measure), digits=digits)


@view
def difference(data: Data, name: str, first: str, second: str, column: str = "", measure: str = "outside") -> str:
    """The 95 % interval of the first line's error minus the second's, in points."""
    ours, theirs = (Cell(name, _line(name, line), column, measure) for line in (first, second))
    return str(cells.minus(data, ours, theirs)).strip("*")


@view
def correlation(data: Data, column: str) -> str:
    """The mean rank correlation of our leading line in a column of STIR."""
    return mean(data, Cell("stir", LEADING["stir"], column, "1 - size correlation"), 1, 2)


@view
def best_published(title: str, protocol: str) -> str:
    """The highest accuracy outside the training sizes of STIR in Altstidl et al. 2023, in %."""
    rows = published("stir")["networks"].values()
    return _rounded(max(row["accuracy"][title][protocol]["outside"] for row in rows))


@view
def published_accuracy(network: str, title: str, protocol: str) -> str:
    """The accuracy outside the training sizes of STIR of one of their networks, in %."""
    return _rounded(published("stir")["networks"][network]["accuracy"][title][protocol]["outside"])


OTHER_SIZES = {"Small2Large": "larger than", "Mid2Rest": "smaller and larger than", "Large2Small": "smaller than"}


@view
def larger_experiments(data: Data) -> str:
    """Errors at sizes that training did not show, for README: random resizing trained as long as ours, and ours."""
    rival = grids.LONGER
    found = [
        (f"[digits](docs/evidence/stir.md) {OTHER_SIZES[protocol]} in training", "stir", f"MNIST {protocol}", "outside")
        for protocol in SOME_SIZES
    ]
    found.append(("[digits](docs/evidence/large-scale.md) of half to 8 times the size", "large-scale", "", "outside"))
    found.append(
        ("[photographs](docs/evidence/photographs.md) of half to twice the size", "rescaled-cifar10", "", "outside")
    )
    head = ["mean error in %", "random resizing, trained as long", "scale channels", "plain network"]
    rows: list[Sequence[str]] = [[*head, "95 % interval of scale channels minus random resizing", "seeds of the three"]]
    for what, name, column, measure in found:
        errors = [mean_error(data, name, line, column, measure) for line in (rival, "ours", TWIN)]
        seeds = [repeats_of(name, line) for line in (rival, "ours", TWIN)]
        rows.append((what, *errors, difference(data, name, "ours", rival, column, measure), ", ".join(seeds)))
    return table(rows)


def repeats_of(name: str, line: str) -> str:
    """How many runs the first cell of a line has."""
    rows = [row for row in grids.EXPERIMENTS[name].rows if row.line == _line(name, line)]
    return str(sum(row.column == rows[0].column for row in rows))


@view
def run_of(name: str, line: str = "", column: str = "") -> Record:
    """The configuration of the first run of a line, by default of the leading one, and of a column, if one is named."""
    wanted = _line(name, line or "ours")
    rows = (row for row in grids.EXPERIMENTS[name].rows if row.line == wanted)
    return next(row.config for row in rows if column in ("", row.column))


@view
def setting(name: str, key: str, line: str = "", column: str = "") -> str:
    """One number of the configuration of a line, such as its epochs."""
    return f"{getattr(run_of(name, line, column), key):g}"


@view
def channels_of(name: str, line: str = "") -> str:
    """The sizes at which a line looks at the image, in training or at test."""
    config = run_of(name, line)
    return words([f"{scale:.3g}" for scale in config.test_channels or config.channels or (1.0,)])


@view
def resizing_of(name: str, line: str = grids.RESIZED) -> str:
    """By how much training images of an experiment are resized at random."""
    low, high = run_of(name, line).resize or (1, 1)
    return f"{low:.2g} to {high:.2g}"


@view
def first_form(dataset: str, line: str, digits: int = 1) -> str:
    """The mean error in % at sizes never seen of the first form of an experiment, which another one replaced.

    Its runs stand in ``results/replaced``: fewer epochs and images, no border, and on photographs four channels in
    place of five and the rivals' range of random resizing.
    """
    path = paper.RESULTS / "replaced" / f"{dataset}.jsonl"
    runs = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    errors = [100 * run["test_error_outside"] for run in runs if _replaced_line(run["config"]) == line]
    return f"{statistics.fmean(errors):.{digits}f}"


def _replaced_line(config: dict[str, Any]) -> str:
    """The line that a replaced run belonged to, by its shown name."""
    if config["channels"]:
        return grids.PLAIN + AUGMENTED * bool(config["resize"])
    return shown(grids.SEVERAL if config["test_channels"] else TWIN + AUGMENTED * bool(config["resize"]))


# Plots


def plots(folder: Path = RESULTS) -> dict[str, Figure]:
    """Error against the size of the object, by its place in results/, as far as there are results."""
    data, drawn = cells.load(folder), {}
    for title, dataset in STIR.items():
        panels = {}
        for protocol in SOME_SIZES:
            if errors := errors_by_size(data, "stir", f"{title} {protocol}"):
                best = published("stir")["networks"][BEST_PUBLISHED[title]]["accuracy"][title][protocol]
                errors[f"{BEST_PUBLISHED[title]} (published)"] = [[1 - value / 100 for value in best["by_size"]]]
                panels[protocol] = errors, PROTOCOLS[protocol]
        if panels:
            drawn[dataset] = curves.plot_error_panels(
                panels,
                _tested("stir"),
                "size of the object, pixels",
                f"STIR {title}: test error by the size of the object; trained at the shaded sizes",
            )
    datasets = {
        "large-scale": ("mnist-large-scale", "MNIST Large Scale"),
        "rescaled-cifar10": ("rescaled-cifar10", "Rescaled CIFAR-10"),
    }
    for name, (dataset, title) in datasets.items():
        if errors := errors_by_size(data, name):
            figure = curves.plot_errors(
                errors, _tested(name), "size of the object", title=f"{title}: test error by size, trained at size 1"
            )
            figure.axes[0].set_xscale("log", base=2)
            figure.axes[0].xaxis.set_major_formatter("{x:g}")
            drawn[dataset] = figure
    return {f"figures/{name}.png": figure for name, figure in drawn.items()}


def _tested(name: str) -> tuple[float, ...]:
    """The sizes of the objects that an experiment tests."""
    own: Any = run_of(name).run.data
    return tuple(own.test_sizes)


def errors_by_size(data: Data, name: str, column: str = "") -> dict[str, list[list[float]]]:
    """Errors of the finished runs of our leading line and of its rivals at every size, from 0 to 1."""
    measures = [f"size {size:.3g}" for size in _tested(name)]
    found = cells.runs(data, name)
    ended = found[found["column"] == column].dropna(subset=measures).groupby("line")[measures]
    long = tuple(line for line in lines(name) if line.endswith(AS_LONG))
    order = [line for line in (LEADING[name], *long, TWIN, grids.RESIZED) if line in ended.groups]
    return {shown(line): (ended.get_group(line) / 100).to_numpy().tolist() for line in order}


LAYOUTS: dict[str, Callable[[Data], str]] = {
    "stir": lambda data: "\n\n".join(stir(data, title, whole=True) for title in STIR),
    "large-scale": partial(large_scale, whole=True),
    "rescaled-cifar10": partial(rescaled_cifar10, whole=True),
    "new-networks": new_networks,
}
