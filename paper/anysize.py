"""Networks at sizes that training did not show: the views, tables and plots of these experiments.

Their runs stand in `paper.grids`, numbers of others in ``results/published``. A cell that has no result yet says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from paper import RESULTS, cells, curves, grids, recorded
from paper.cells import GAP, Data, lines, values
from paper.grids import AUGMENTED, DATASETS, LARGE_SIZES, LEADING, OURS, PAPER, PROTOCOLS, SOME_SIZES, STIR, TWIN, Cell
from paper.markdown import PENDING, table, view, words
from scalesteer.data import SIZED_DATASETS
from scalesteer.training.config import RunConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST_PUBLISHED = {"MNIST": "Pyramid ensemble", "Emoji": "PixelPool"}  # in the figures
STIR_PLAIN = "STIR's plain CNN"  # two convolutions, 7 x 7, of 16 and 32 channels; global maximum; a linear layer


@cache
def published(name: str) -> Any:
    """Numbers of others, with their source."""
    return recorded(f"published/{name}.json")


# Cells


def numbers(data: Data, cell: Cell, whole: float = 0) -> list[float]:
    """A cell's numbers as tables show them: of a run that was made more than once, the first.

    With `whole`, what they lack of it: 100 makes accuracies of errors in %.
    """
    return [whole - number if whole else number for number in values(data, cell, averaged=False)]


def mean(data: Data, cell: Cell, whole: float = 0, digits: int = 1) -> str:
    """The mean of :func:`numbers`, or that nothing has been measured."""
    return cells.mean(numbers(data, cell, whole), f".{digits}f").replace(GAP, PENDING)


def spread(data: Data, cell: Cell, whole: float = 0, digits: int = 1) -> str:
    """The same, ± standard deviation."""
    return cells.spread(numbers(data, cell, whole), f".{digits}f", digits).replace(GAP, PENDING)


def _weights(data: Data, cell: Cell) -> str:
    return cells.show(data, cell._replace(measure="parameters")).replace(GAP, PENDING)


def _row(line: str, shown: Iterable[str]) -> list[str]:
    """A line of a table; one without any number says so once."""
    found = list(shown)
    return [line, *(found if set(found) - {PENDING} else [PENDING, *[""] * (len(found) - 1)])]


# Tables


@view
def stir(data: Data, title: str) -> str:
    """STIR in its four protocols: ours, rivals trained by us, and every published row.

    Args:
        data: All results.
        title: "MNIST" or "Emoji".
    """
    others = published("stir")["networks"]
    base = others["Plain CNN"]["seconds_per_epoch"]
    rows = [[f"{title}, accuracy in %", *PROTOCOLS, "weights", "time of an epoch, plain CNN = 1"]]
    for line in lines("stir"):
        every = [Cell("stir", line, f"{title} {protocol}") for protocol in PROTOCOLS]
        shown = [_outside_inside(data, cell) for cell in every]
        rows.append(_row(line, [*shown, _weights(data, every[0]), epoch_time(line)]))
    for name, other in others.items():
        found = {
            protocol: {key: _rounded(number) for key, number in own.items() if key != "by_size"}
            for protocol, own in other["accuracy"][title].items()
        }
        shown = [
            f"{own['outside']} ± {own['outside_std']}" + f" ({own['inside']})" * (protocol in SOME_SIZES)
            for protocol, own in found.items()
        ]
        seconds = other["seconds_per_epoch"]
        rows.append([f"{name} (published)", *shown, GAP, f"{seconds / base:.1f}" if seconds else GAP])
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
    return text if text == PENDING else f"{text} ({mean(data, inside, 100)})"


@view
def epoch_time(line: str) -> str:
    """The time of a training epoch on STIR-MNIST over that of STIR's plain CNN in the same process.

    It is read from ``results/bench/stir-epoch.json``, whose `seconds` are by line, with `STIR_PLAIN` among them.
    """
    found = (recorded("bench/stir-epoch.json") or {"seconds": {}})["seconds"]
    return f"{found[line] / found[STIR_PLAIN]:.1f}" if line in found else PENDING


@view
def large_scale(data: Data) -> str:
    """MNIST Large Scale at the sizes that have published numbers."""
    rows = [["accuracy in % at size", *(f"{size:g}" for size in LARGE_SIZES), "weights"]]
    for line in lines("large-scale"):
        every = [Cell("large-scale", line, "", f"size {size:g}") for size in LARGE_SIZES]
        rows.append(_row(line, [*(spread(data, cell, 100, 2) for cell in every), _weights(data, every[0])]))
    return table(rows + _published_rows("large-scale", [f"{size:g}" for size in LARGE_SIZES]))


def _published_rows(name: str, columns: Iterable[str]) -> list[list[str]]:
    """Numbers of others on the data of an experiment, with two digits; their weights are not known."""
    rows = []
    for own in published("others")[name]["rows"]:
        line = f"{own['network']}{', ' * ('setting' in own)}{own.get('setting', '')}"
        found = (own["numbers"].get(column) for column in columns)
        shown = (GAP if number is None else f"{number:.2f}" for number in found)
        rows.append([f"{line} (published{'' if own['checked'] else ', not checked'})", *shown, GAP])
    return rows


@view
def rescaled_cifar10(data: Data) -> str:
    """Rescaled CIFAR-10: error at each size, and the mean over those never seen."""
    sizes = [f"{size:.3g}" for size in SIZED_DATASETS["rescaled-cifar10"].sizes]
    rows = [["error in % at size", *sizes, "mean at sizes never seen", "weights"]]
    for line in lines("rescaled-cifar10"):
        cell = Cell("rescaled-cifar10", line, "", "outside")
        shown = [mean(data, cell._replace(measure=f"size {size}")) for size in sizes]
        rows.append(_row(line, [*shown, spread(data, cell), _weights(data, cell)]))
    return table(rows)


@view
def new_networks(data: Data) -> str:
    """MNIST-Scale and FMNIST-Scale: the new networks, Table 1's methods, and later papers."""
    rows = [["error in %", *DATASETS.values(), "weights"]]
    for name, note in (("new-networks", ""), ("1", " (Table 1, ours)")):
        for line in lines(name):
            every = [Cell(name, line, title) for title in DATASETS.values()]
            shown = [spread(data, cell, digits=2) for cell in every]
            rows.append(_row(line + note, [*shown, _weights(data, every[0])]))
    rows += [[f"{line} (Table 1, the paper's)", *own.values(), GAP] for line, own in PAPER["1"].items()]
    return table(rows + _published_rows("new-networks", DATASETS.values()))


@view
def size_correlations(data: Data) -> str:
    """Rank correlation of the size that answered with the true size, by protocol of STIR."""
    rows = [["rank correlation with the true size", *PROTOCOLS]]
    for title, line in itertools.product(STIR, (*OURS, LEADING["stir"] + AUGMENTED)):
        every = (Cell("stir", line, f"{title} {protocol}", "1 - size correlation") for protocol in PROTOCOLS)
        rows.append(_row(f"{title}, {line}", (spread(data, cell, 1, 2) for cell in every)))
    return table(rows)


def _own_name(run: dict[str, Any]) -> str:
    """What a run of examples/own_images.py is."""
    sizes = [f"{scale:g}" for scale in run["channels"] or [1.0]]
    name = "plain network" if len(sizes) == 1 else f"at {', '.join(sizes)} times its size"
    name += f", the last {run['epochs'] - first} epochs" if (first := run["one_size_epochs"]) else ""
    return name + (", random resizing" if run["resize"] else "")


def _own_errors() -> pd.DataFrame:
    """Errors of these runs by what they are and by size; what has the lowest at other sizes than 1 comes last."""
    runs = recorded("guide/own-images.json")
    seeds = pd.DataFrame([run["errors"] for run in runs], index=map(_own_name, runs)).groupby(level=0)
    means = seeds.mean()
    others = means[[size for size in means if float(size) != 1]].mean(axis=1)
    order = others.sort_values(ascending=False).index
    return means.assign(others=others).map("{:.1f}".format).assign(seeds=seeds.size()).loc[order]


@view
def more_sizes(size: float) -> str:
    """Errors of the network `digits` on digits of a size, in each way to look at the image, as a sentence."""
    found = recorded("guide/more-sizes.json")
    if found is None:
        return f"Its errors: {PENDING}."
    errors = [f"{100 * own[found['sizes'].index(size)]:.1f} % {way}" for way, own in found["errors"].items()]
    return f"Of {found['images']:,} digits {size:g} times as large as those of MNIST, it misses {words(errors)}."


@view
def more_sizes_table() -> str:
    """The same for all sizes, as a table, and what it rests on."""
    found = recorded("guide/more-sizes.json")
    if found is None:
        return f"*{PENDING.capitalize()}: python examples/more_sizes.py.*"
    rows = [[way, *(f"{100 * error:.1f}" for error in own)] for way, own in found["errors"].items()]
    head = ["error in %, digits of size", *(f"{size:g}" for size in found["sizes"])]
    return f"{table([head, *rows])}\n\n{found['images']:,} test digits; `python examples/more_sizes.py`."


@view
def own_images() -> str:
    """Errors of networks that were trained on a folder of pictures, by size."""
    found = _own_errors()
    first = next(run for run in recorded("guide/own-images.json") if _own_name(run) == found.index[0])
    head = ["error in %, photographs of size", *found.columns[:-2], "mean but 1", "seeds"]
    about = f"{first['device']}, torch {first['torch']}; the first line: `{first['command']}`."
    return f"{table([head, *found.itertuples()])}\n\n{about}"


@view
def own_images_outside(name: str) -> str:
    """The mean error at sizes that training did not show, of the one line that is called or begins so."""
    found = _own_errors()["others"]
    if name not in found:
        (name,) = (line for line in found.index if line.startswith(name))
    return str(found[name])


# Words and numbers of sentences


@view
def leading(name: str) -> str:
    """The line of ours that targets are about."""
    return LEADING[name]


@view
def accuracy(data: Data, name: str, line: str, column: str, measure: str = "outside") -> str:
    """The mean accuracy of a cell in %; `line` may be "ours"."""
    return mean(data, Cell(name, LEADING[name] if line == "ours" else line, column, measure), 100)


@view
def mean_error(data: Data, name: str, line: str, column: str = "", measure: str = "outside", digits: int = 1) -> str:
    """The mean error of a cell in %; `line` may be "ours"."""
    return mean(data, Cell(name, LEADING[name] if line == "ours" else line, column, measure), digits=digits)


@view
def correlation(data: Data, column: str) -> str:
    """The mean rank correlation of our leading line in a column of STIR."""
    return mean(data, Cell("stir", LEADING["stir"], column, "1 - size correlation"), 1, 2)


@view
def best_rival(data: Data, name: str, column: str = "", measure: str = "outside") -> str:
    """The rival with the lowest mean error in a column, of those that were measured."""
    means = {line: values(data, Cell(name, line, column, measure)).mean() for line in grids.RIVALS}
    return min((line for line in means if not math.isnan(means[line])), key=means.__getitem__, default=PENDING)


@view
def best_published(title: str, protocol: str) -> str:
    """The highest published accuracy outside the training sizes of STIR, in %."""
    rows = published("stir")["networks"].values()
    return _rounded(max(row["accuracy"][title][protocol]["outside"] for row in rows))


@view
def larger_experiments(data: Data) -> str:
    """Ours, its rivals and the best published number, all in % at sizes that training did not show, for README."""
    rivals = (grids.RESIZED, grids.TWIN)
    rows = [["in %", "scale channels", "same network, random resizing", "same network, plain", "best published"]]
    for protocol in SOME_SIZES:
        shown = [accuracy(data, "stir", line, f"MNIST {protocol}") for line in ("ours", *rivals)]
        what = f"accuracy on [STIR's digits](docs/evidence/stir.md), {protocol}"
        rows.append([what, *shown, best_published("MNIST", protocol)])
    shown = [accuracy(data, "large-scale", line, "", "size 4") for line in ("ours", *rivals)]
    best = max(published("others")["large-scale"]["rows"], key=lambda row: row["numbers"]["4"])
    checked = "" if best["checked"] else " (not checked)"
    what = "accuracy on [digits four times as large](docs/evidence/large-scale.md) as those of training"
    rows.append([what, *shown, _rounded(best["numbers"]["4"]) + checked])
    shown = [mean_error(data, "rescaled-cifar10", line) for line in ("ours", *rivals)]
    what = "error on [colour photographs](docs/evidence/rescaled-cifar10.md) of half to twice the size of training"
    rows.append([what, *shown, GAP])
    return table(rows)


@view
def repeats_of(name: str, line: str) -> str:
    """How many runs a cell of a line has."""
    rows = [row for row in grids.EXPERIMENTS[name].rows if row.line == line]
    return str(sum(row.column == rows[0].column for row in rows))


@view
def published_source(name: str) -> str:
    """Where numbers of others come from."""
    return str(published(name)["source"])


@view
def run_of(name: str, line: str = "", column: str = "") -> RunConfig:
    """The configuration of the first run of a line, by default of the leading one, and of a column, if one is named."""
    rows = (row for row in grids.EXPERIMENTS[name].rows if row.line == (line or LEADING[name]))
    return next(row.config for row in rows if column in ("", row.column))


@view
def steps(config: RunConfig) -> str:
    """How many steps the training of a run has."""
    own: Any = config.data
    return f"{config.epochs * ((config.train_images or own.sizes[0]) // config.batch_size):,}"


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
def protocol(name: str) -> str:
    """How the lines of an experiment are trained, in words."""
    own = run_of(name)
    return (
        f"{own.epochs} epochs of AdamW with batches of {own.batch_size}, a {own.schedule} learning rate of at most "
        f"{own.lr:g}, weight decay {own.weight_decay:g} and label smoothing {own.label_smoothing:g}"
    )


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
    own: Any = run_of(name).data
    return tuple(own.test_sizes)


def errors_by_size(data: Data, name: str, column: str = "") -> dict[str, list[list[float]]]:
    """Errors of the finished runs of our leading line and of its rivals at every size, from 0 to 1."""
    measures = [f"size {size:.3g}" for size in _tested(name)]
    found = cells.runs(data, name)
    ended = found[found["column"] == column].dropna(subset=measures).groupby("line")[measures]
    order = [line for line in (LEADING[name], TWIN, grids.RESIZED) if line in ended.groups]
    return {line: (ended.get_group(line) / 100).to_numpy().tolist() for line in order}


LAYOUTS: dict[str, Callable[[Data], str]] = {
    "stir": lambda data: "\n\n".join(stir(data, title) for title in STIR),
    "large-scale": large_scale,
    "rescaled-cifar10": rescaled_cifar10,
    "new-networks": new_networks,
}
