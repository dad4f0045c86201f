"""Networks at sizes that training did not show: the views, tables and plots of these experiments.

Their runs stand in `paper.grids`, numbers of others in ``results/published``. A cell that has no result yet says so.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from paper import RESULTS, figures, grids, report
from paper.grids import (
    AUGMENTED,
    DATASETS,
    LARGE_SIZES,
    LEADING,
    OURS,
    PAPER,
    PROTOCOLS,
    STIR,
    TARGETS,
    TWIN,
    Cell,
    Pair,
)
from paper.markdown import table as markdown
from paper.quickstart import PENDING
from paper.report import GAP, Data, decide, lines, values
from scalesteer.data import SIZED_DATASETS, SizedSpec
from scalesteer.training.config import RunConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST_PUBLISHED = {"MNIST": "Pyramid ensemble", "Emoji": "PixelPool"}  # in the figures
STIR_PLAIN = "STIR's plain CNN"  # two convolutions, 7 x 7, of 16 and 32 channels; global maximum; a linear layer
VIEWS: dict[str, Callable[..., str]] = {}


def view(function: Callable[..., str]) -> Callable[..., str]:
    """Let templates call a function of the results by its name, with those of results/."""
    VIEWS[function.__name__] = lambda *arguments, **options: function(report.published(), *arguments, **options)
    return function


@cache
def published(name: str) -> Any:
    """Numbers of others, with their source."""
    return json.loads((RESULTS / "published" / f"{name}.json").read_text(encoding="utf-8"))


# Cells


def errors(data: Data, cell: Cell) -> list[float]:
    """A cell's numbers as tables show them: of a run that was made more than once, the first."""
    return list(values(data, cell, averaged=False))


def accuracies(data: Data, cell: Cell) -> list[float]:
    """A cell's errors in %, as accuracies."""
    return [100 - error for error in errors(data, cell)]


def stated(text: str) -> str:
    """What a cell says; a gap in words."""
    return PENDING if text == GAP else text


def number(data: Data, cell: Cell, digits: int = 1) -> str:
    """The mean error of a cell in %, or that it has not been measured."""
    return stated(report.mean(errors(data, cell), f".{digits}f"))


def spread(numbers: Iterable[float], digits: int = 1) -> str:
    """Mean ± standard deviation, or that nothing has been measured."""
    return stated(report.spread(numbers, f".{digits}f", digits))


def _weights(data: Data, name: str, line: str, column: str) -> str:
    return stated(report.show(data, Cell(name, line, column, "parameters")))


def _row(line: str, cells: Iterable[str]) -> list[str]:
    """A line of a table; one without any number says so once."""
    cells = list(cells)
    return [line, *(cells if set(cells) - {PENDING, GAP} else [PENDING, *[""] * (len(cells) - 1)])]


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
        cells = [_outside_inside(data, Cell("stir", line, f"{title} {protocol}")) for protocol in PROTOCOLS]
        rows.append(_row(line, [*cells, _weights(data, "stir", line, f"{title} Small2Large"), epoch_time(line)]))
    for name, other in others.items():
        found = other["accuracy"][title]
        cells = [
            f"{_rounded(own['outside'])} ± {_rounded(own['outside_std'])}"
            + (f" ({_rounded(own['inside'])})" if protocol != "All2All" else "")
            for protocol, own in found.items()
        ]
        seconds = other["seconds_per_epoch"]
        rows.append([f"{name} (published)", *cells, GAP, f"{seconds / base:.1f}" if seconds else GAP])
    return markdown(rows)


def _rounded(published_number: float) -> str:
    """One decimal of two, halves upwards: 90.85 as 90.9."""
    return f"{published_number + 1e-6:.1f}"


def _outside_inside(data: Data, cell: Cell) -> str:
    """Accuracy outside the training sizes, that inside in brackets; where all sizes were trained, that of all."""
    if cell.column.endswith("All2All"):
        return spread(accuracies(data, cell._replace(measure="inside")))
    text = spread(accuracies(data, cell._replace(measure="outside")))
    inside = report.mean(accuracies(data, cell._replace(measure="inside")), ".1f")
    return text if text == PENDING else f"{text} ({inside})"


def epoch_time(line: str) -> str:
    """The time of a training epoch on STIR-MNIST over that of STIR's plain CNN in the same process.

    It is read from ``results/bench/stir-epoch.json``, whose `seconds` are by line, with `STIR_PLAIN` among them.
    """
    path = RESULTS / "bench" / "stir-epoch.json"
    found = json.loads(path.read_text())["seconds"] if path.exists() else {}
    return f"{found[line] / found[STIR_PLAIN]:.1f}" if line in found else PENDING


@view
def epoch_time_of(data: Data, name: str) -> str:
    """:func:`epoch_time` of the leading line of an experiment."""
    return epoch_time(LEADING[name])


@view
def large_scale(data: Data) -> str:
    """MNIST Large Scale at the sizes that have published numbers."""
    rows = [["accuracy in % at size", *(f"{size:g}" for size in LARGE_SIZES), "weights"]]
    for line in lines("large-scale"):
        cells = [Cell("large-scale", line, "", f"size {size:g}") for size in LARGE_SIZES]
        shown = [spread(accuracies(data, cell), 2) for cell in cells]
        rows.append(_row(line, [*shown, _weights(data, "large-scale", line, "")]))
    for own in published("others")["large-scale"]["rows"]:
        shown = [f"{own['numbers'][f'{size:g}']:.2f}" for size in LARGE_SIZES]
        rows.append([_published_name(own), *shown, GAP])
    return markdown(rows)


def _published_name(own: dict[str, Any]) -> str:
    setting = f", {own['setting']}" if "setting" in own else ""
    return f"{own['network']}{setting} (published{'' if own['checked'] else ', not checked'})"


@view
def rescaled_cifar10(data: Data) -> str:
    """Rescaled CIFAR-10: error at each size, and the mean over those never seen."""
    sizes = SIZED_DATASETS["rescaled-cifar10"].sizes
    rows = [["error in % at size", *(f"{size:.3g}" for size in sizes), "mean at sizes never seen", "weights"]]
    for line in lines("rescaled-cifar10"):
        cell = Cell("rescaled-cifar10", line, "")
        shown = [number(data, cell._replace(measure=f"size {size:.3g}")) for size in sizes]
        outside = spread(errors(data, cell._replace(measure="outside")))
        rows.append(_row(line, [*shown, outside, _weights(data, cell.experiment, line, "")]))
    return markdown(rows)


@view
def new_networks(data: Data) -> str:
    """MNIST-Scale and FMNIST-Scale: the new networks, Table 1's methods, and later papers."""
    rows = [["error in %", *DATASETS.values(), "weights"]]
    for line in lines("new-networks"):
        shown = [spread(errors(data, Cell("new-networks", line, title)), 2) for title in DATASETS.values()]
        rows.append(_row(line, [*shown, _weights(data, "new-networks", line, "MNIST-Scale")]))
    for line in lines("1"):
        shown = [spread(errors(data, Cell("1", line, title)), 2) for title in DATASETS.values()]
        rows.append([f"{line} (Table 1, ours)", *shown, _weights(data, "1", line, "MNIST-Scale")])
    for line, own in PAPER["1"].items():
        rows.append([f"{line} (Table 1, the paper's)", *own.values(), GAP])
    for own in published("others")["new-networks"]["rows"]:
        found = [own["numbers"].get(title) for title in DATASETS.values()]
        rows.append([_published_name(own), *(GAP if value is None else f"{value:.2f}" for value in found), GAP])
    return markdown(rows)


@view
def size_correlations(data: Data) -> str:
    """Rank correlation of the size that answered with the true size, by protocol of STIR."""
    rows = [["rank correlation with the true size", *PROTOCOLS]]
    for title, line in itertools.product(STIR, (*OURS, LEADING["stir"] + AUGMENTED)):
        cells = [Cell("stir", line, f"{title} {protocol}", "1 - size correlation") for protocol in PROTOCOLS]
        rows.append(_row(f"{title}, {line}", (spread(correlations(data, cell), 2) for cell in cells)))
    return markdown(rows)


def _own_runs() -> dict[str, list[dict[str, Any]]]:
    """The runs of examples/own_images.py by what they are, seeds together."""
    path, found = RESULTS / "guide" / "own-images.json", dict[str, list[dict[str, Any]]]()
    for run in json.loads(path.read_text(encoding="utf-8")):
        sizes = [f"{scale:g}" for scale in run["channels"]]
        name = "plain network" if len(sizes) == 1 else f"at {', '.join(sizes)} times its size"
        name += f", the last {run['epochs'] - first} epochs" if (first := run["one_size_epochs"]) else ""
        found.setdefault(name + (", random resizing" if run["resize"] else ""), []).append(run)
    return found


def _own_errors(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Mean errors by size, and of all sizes but that of training."""
    errors = {size: fmean(run["errors"][size] for run in runs) for size in runs[0]["errors"]}
    return {**errors, "others": fmean(error for size, error in errors.items() if float(size) != 1)}


@view
def own_images(data: Data) -> str:
    """Errors of networks that were trained on a folder of pictures, by size; those of the lowest come last."""
    rows = [(name, runs, _own_errors(runs)) for name, runs in _own_runs().items()]
    rows.sort(key=lambda row: -row[2]["others"])
    sizes = [size for size in rows[0][2] if size != "others"]
    body = [["error in %, photographs of size", *sizes, "mean but 1", "seeds"]]
    body += [
        [name, *(f"{errors[size]:.1f}" for size in (*sizes, "others")), str(len(runs))] for name, runs, errors in rows
    ]
    first = rows[0][1][0]
    return f"{markdown(body)}\n\n{first['device']}, torch {first['torch']}; the first line: `{first['command']}`."


@view
def own_images_outside(data: Data, name: str) -> str:
    """The mean error at sizes that training did not show, of a line or the lowest of those that begin so."""
    found = {line: _own_errors(runs)["others"] for line, runs in _own_runs().items()}
    lowest = min(error for line, error in found.items() if line.startswith(name))
    return f"{found.get(name, lowest):.1f}"


def correlations(data: Data, cell: Cell) -> list[float]:
    """Rank correlations of the size that answered with the true one."""
    return [1 - number for number in errors(data, cell._replace(measure="1 - size correlation"))]


@view
def correlation(data: Data, column: str) -> str:
    """The mean rank correlation of our leading line in a column of STIR."""
    return stated(report.mean(correlations(data, grids.ours("stir", column))))


# Targets


@view
def targets(data: Data, evidence: str = "") -> str:
    """Targets, those of one page or all: the pair that decides, its interval, and the verdict."""
    rows = [["target", "here", "95 % interval of the difference of errors", "verdict"]]
    for claim in (claim for claim in TARGETS.values() if evidence in ("", claim.evidence)):
        word, pair, found = decide(data, claim.pairs)
        if word == GAP:
            rows.append(_row(claim.text, [PENDING] * 3))
            continue
        times = f" (first minus {pair.times:g} times second)" if pair.times != 1 else ""
        said = word if evidence else f"[{word}](evidence/{claim.evidence}.md)"
        rows.append([claim.text, _here(data, pair), f"{found}{times}", said])
    return markdown(rows, left=4)


def _here(data: Data, pair: Pair) -> str:
    """Both numbers of a pair in the words of its table: accuracies, errors or correlations."""
    first, second, _ = pair
    whole, kind = (100.0, "accuracy") if first.experiment in ("stir", "large-scale") else (0.0, "error")
    if "correlation" in first.measure:
        whole, kind = 1.0, "rank correlation"
    numbers = [float(values(data, cell).mean()) if isinstance(cell, Cell) else cell for cell in (first, second)]
    shown = [f"{abs(whole - number):.2f}" for number in numbers]
    where = ", ".join(filter(None, (kind, first.column, first.measure if first.measure.startswith("size") else "")))
    if isinstance(second, Cell):
        return f"{first.line} {shown[0]}, {second.line} {shown[1]} ({where})"
    return f"{first.line} {shown[0]}, at {'most' if kind == 'error' else 'least'} {shown[1]} ({where})"


@view
def outcome(data: Data, evidence: str) -> str:
    """How many targets of a page hold, in words."""
    words = [decide(data, claim.pairs)[0] for claim in TARGETS.values() if claim.evidence == evidence]
    if all(word == GAP for word in words):
        return PENDING
    named = {"holds": "hold", "fails": "fail", "undecided": "undecided", GAP: PENDING}
    counts = [f"{words.count(word)} {name}" for word, name in named.items() if word in words]
    return f"of {len(words)} targets {report.words(counts)}" if len(words) > 1 else f"the target: {named[words[0]]}"


@view
def leading(data: Data, name: str) -> str:
    """The line of ours that targets are about."""
    return LEADING[name]


@view
def accuracy(data: Data, name: str, line: str, column: str, measure: str = "outside") -> str:
    """The mean accuracy of a cell in %; `line` may be "ours"."""
    cell = Cell(name, LEADING[name] if line == "ours" else line, column, measure)
    return stated(report.mean(accuracies(data, cell), ".1f"))


@view
def mean_error(data: Data, name: str, line: str, column: str = "", measure: str = "outside", digits: int = 1) -> str:
    """The mean error of a cell in %; `line` may be "ours"."""
    return number(data, Cell(name, LEADING[name] if line == "ours" else line, column, measure), digits)


@view
def best_rival(data: Data, name: str, column: str = "", measure: str = "outside") -> str:
    """The rival with the lowest mean error in a column, of those that were measured, and that error in %."""
    cells = [Cell(name, line, column, measure) for line in grids.RIVALS if line in lines(name)]
    means = {cell.line: float(values(data, cell).mean()) for cell in cells if values(data, cell).notna().all()}
    if not means:
        return PENDING
    best = min(means, key=means.__getitem__)
    return f"{best}, {means[best]:.1f} %"


@view
def best_published(data: Data, title: str, protocol: str) -> str:
    """The highest published accuracy outside the training sizes of STIR, in %."""
    rows = published("stir")["networks"].values()
    return _rounded(max(row["accuracy"][title][protocol]["outside"] for row in rows))


@view
def repeats_of(data: Data, name: str, line: str) -> str:
    """How many runs a cell of a line has."""
    own = next(row.column for row in grids.EXPERIMENTS[name].rows if row.line == line)
    return str(sum((row.line, row.column) == (line, own) for row in grids.EXPERIMENTS[name].rows))


@view
def published_source(data: Data, name: str) -> str:
    """Where numbers of others come from."""
    return str(published(name)["source"])


def _config(name: str, line: str = "") -> RunConfig:
    """The configuration of the first run of a line, by default of the leading one."""
    return next(row.config for row in grids.EXPERIMENTS[name].rows if row.line == (line or LEADING[name]))


@view
def channels_of(data: Data, name: str, line: str = "") -> str:
    """The sizes at which a line looks at the image, in training or at test."""
    config = _config(name, line)
    factors = [f"{scale:.3g}" for scale in config.test_channels or config.channels or (1.0,)]
    return report.words(factors)


@view
def resizing_of(data: Data, name: str) -> str:
    """The factors of random resizing."""
    low, high = _config(name, grids.RESIZED).resize or (1.0, 1.0)
    return f"{low:g} to {high:g}"


@view
def epochs_of(data: Data, name: str, column: str) -> str:
    """How many epochs the runs of a column have."""
    return str(next(row.config.epochs for row in grids.EXPERIMENTS[name].rows if row.column == column))


@view
def images_of(data: Data, name: str) -> str:
    """How many training images an experiment has."""
    data_of: Any = _config(name).data
    return f"{data_of.sizes[0]:,}"


@view
def protocol(data: Data, name: str) -> str:
    """How the lines of an experiment are trained, in words."""
    own = _config(name)
    return (
        f"{own.epochs} epochs of AdamW with batches of {own.batch_size}, a {own.schedule} learning rate of at most "
        f"{own.lr:g}, weight decay {own.weight_decay:g} and label smoothing {own.label_smoothing:g}"
    )


# Plots


def plots(folder: Path = RESULTS) -> dict[str, Figure]:
    """Error against the size of the object, by its place in results/, as far as there are results."""
    data, drawn = report.load(folder), {}
    for title, dataset in STIR.items():
        panels = {}
        for protocol, span in list(PROTOCOLS.items())[:3]:
            curves = _curves(data, "stir", f"{title} {protocol}")
            if curves:
                best = published("stir")["networks"][BEST_PUBLISHED[title]]["accuracy"][title][protocol]
                curves[f"{BEST_PUBLISHED[title]} (published)"] = [[1 - value / 100 for value in best["by_size"]]]
                panels[protocol] = curves, span
        if panels:
            drawn[dataset] = figures.plot_error_panels(panels, _tested("stir"), "size of the object, pixels")
    for name, dataset in (("large-scale", "mnist-large-scale"), ("rescaled-cifar10", "rescaled-cifar10")):
        if curves := _curves(data, name, ""):
            figure = figures.plot_errors(curves, _tested(name), "size of the object (training: 1)")
            figure.axes[0].set_xscale("log", base=2)
            figure.axes[0].xaxis.set_major_formatter("{x:g}")
            drawn[dataset] = figure
    return {f"figures/{name}.png": figure for name, figure in drawn.items()}


def _tested(name: str) -> tuple[float, ...]:
    """The sizes of the objects that an experiment tests."""
    return cast(SizedSpec, _config(name).data).test_sizes


def _curves(data: Data, name: str, column: str) -> dict[str, list[list[float]]]:
    """Errors of the finished runs of our leading line and of its rivals at every size, from 0 to 1."""
    measures = [f"size {size:.3g}" for size in _tested(name)]
    found = report.runs(data, name)
    curves = {}
    for line in (LEADING[name], TWIN, grids.RESIZED):
        ended = found[(found["line"] == line) & (found["column"] == column)].dropna(subset=measures)
        if len(ended):
            curves[line] = (ended[measures] / 100).to_numpy().tolist()
    return curves


report.LAYOUTS |= {
    "stir": lambda data: "\n\n".join(stir(data, title) for title in STIR),
    "large-scale": large_scale,
    "rescaled-cifar10": rescaled_cifar10,
    "new-networks": new_networks,
}
