"""The tables of the paper's Section 4: which runs they need, the paper's numbers, and ours beside them.

A protocol for each method is in one place, `RECIPES`; what it does not say is the default of `RunConfig`, the same for
all methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scalesteer import _checks
from scalesteer.data import ELASTIC_ALPHAS
from scalesteer.data.scale import SPLITS
from scalesteer.experiments.config import RunConfig
from scalesteer.experiments.results import Results, mean_and_std

METHODS = {
    "Spatial Transformer": "spatial-transformer",
    "SS-CNN": "ss-cnn",
    "LocScaleEq-CNN": "vector-field-cnn",
    "LocScaleInv-CNN": "locally-scale-invariant-cnn",
    "Plain CNN": "plain-cnn",  # the control; not in the paper
}

RECIPES: dict[str, dict[str, Any]] = {method: {} for method in METHODS}
"""For each method, what differs from the defaults of RunConfig: lr, weight_decay, epochs, upsample, ..."""

FEW_IMAGES: dict[int, dict[str, Any]] = {
    100: {"batch_size": 50, "epochs": 600},
    1000: {"epochs": 300},
    10_000: {},
}
"""For each number of training images in Table 3: fewer images need smaller batches and more passes."""

GAP = "–"


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        runs: What it is averaged over, one run a split.
        paper: The paper's number in %, with its standard deviation; empty if it has none.
        alpha: With an elastic strength, the number is that of the best of the runs under this distortion.
    """

    runs: tuple[RunConfig, ...]
    paper: str = ""
    alpha: float | None = None


@dataclass(frozen=True)
class Table:
    """A grid of cells."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Cell, ...]]

    @property
    def runs(self) -> tuple[RunConfig, ...]:
        """Every run it needs, once; the first split of all methods first, so that a table fills evenly."""
        configs = dict.fromkeys(config for row in self.rows.values() for cell in row for config in cell.runs)
        return tuple(sorted(configs, key=lambda config: config.split))

    def part(self, splits: Iterable[int] | None = None, methods: Iterable[str] | None = None) -> Table:
        """The table with only some of the rows and runs."""
        methods = tuple(self.rows) if methods is None else tuple(methods)
        for method in methods:
            _checks.choice("method", method, tuple(self.rows))
        kept = None if splits is None else set(splits)

        def cut(cell: Cell) -> Cell:
            chosen = tuple(config for config in cell.runs if kept is None or config.split in kept)
            return Cell(chosen, cell.paper, cell.alpha)

        rows = {method: tuple(cut(cell) for cell in self.rows[method]) for method in methods}
        return Table(self.name, self.title, self.columns, rows)


def _runs(method: str, dataset: str, **options: Any) -> tuple[RunConfig, ...]:
    settings = {"model": METHODS[method], "dataset": dataset, **options, **RECIPES[method]}
    return tuple(RunConfig(**settings, split=split) for split in SPLITS)


def _table_1() -> Table:
    paper = {
        "Spatial Transformer": ("1.97 ± 0.09", "13.11 ± 0.25"),
        "SS-CNN": ("1.91 ± 0.04", "14.24 ± 0.31"),
        "LocScaleEq-CNN": ("2.44 ± 0.07", "15.72 ± 0.32"),
        "LocScaleInv-CNN": ("2.75 ± 0.09", "15.91 ± 0.41"),
        "Plain CNN": ("", ""),
    }
    datasets = {"mnist-scale": "MNIST-Scale", "fmnist-scale": "FMNIST-Scale"}
    rows = {
        method: tuple(Cell(_runs(method, data), text) for data, text in zip(datasets, numbers, strict=True))
        for method, numbers in paper.items()
    }
    return Table("1", "Error rates on MNIST-Scale and FMNIST-Scale", tuple(datasets.values()), rows)


def _table_2() -> Table:
    # The paper's "ScaleInv Net" is taken to be its LocScaleInv-CNN: it names no other network that could be meant.
    paper = {
        "LocScaleInv-CNN": ("3.2", "5.92", "9.6", "16.2", "27"),
        "Spatial Transformer": ("1.87", "3.4", "5.12", "9.2", "16.2"),
        "SS-CNN": ("1.87", "3.7", "5.6", "9.82", "16.83"),
        "Plain CNN": ("",) * 5,
    }
    rows = {
        method: tuple(
            Cell(_runs(method, "mnist-scale"), text, alpha) for alpha, text in zip(ELASTIC_ALPHAS, numbers, strict=True)
        )
        for method, numbers in paper.items()
    }
    title = "Test-time elastic distortions on MNIST-Scale, the network of each method that is best on validation data"
    return Table("2", title, tuple(f"α = {alpha:g}" for alpha in ELASTIC_ALPHAS), rows)


def _table_3() -> Table:
    paper = {
        "Spatial Transformer": ("4.76 ± 0.38", "0.73 ± 0.05", "0.23 ± 0.02"),
        "SS-CNN": ("4.27 ± 1.14", "0.40 ± 0.02", "0.09 ± 0.01"),
        "Plain CNN": ("", "", ""),
    }
    rows = {
        method: tuple(
            Cell(_runs(method, "mnist-scale-local-2", train_images=images, **options), text)
            for (images, options), text in zip(FEW_IMAGES.items(), numbers, strict=True)
        )
        for method, numbers in paper.items()
    }
    columns = tuple(f"{images // 100} % data" for images in FEW_IMAGES)
    return Table("3", "MNIST-scale-local-2 with less and less training data", columns, rows)


TABLES: dict[str, Callable[[], Table]] = {"1": _table_1, "2": _table_2, "3": _table_3}


def get_table(name: str) -> Table:
    """A table of the paper by its number.

    Example:
        >>> len(get_table("1").runs), len(get_table("3").runs)
        (60, 54)
    """
    return TABLES[_checks.choice("table", name, tuple(TABLES))]()


def render(table: Table, results: Results, style: str = "text") -> str:
    """A table as text or Markdown, errors in %: ours (mean ± standard deviation over splits) beside the paper's.

    A cell without results is a dash; one that lacks runs says how many it has; failed runs are named below.

    Args:
        table: What to show.
        results: What was measured.
        style: "text" or "markdown".
    """
    _checks.choice("style", style, ("text", "markdown"))
    lines = [["error in %", *(text for column in table.columns for text in (column, "paper"))]]
    for method, row in table.rows.items():
        lines.append([method, *(text for cell in row for text in (_show(cell, results), cell.paper or GAP))])
    title, failed = f"Table {table.name}. {table.title}", results.failed(table.runs)
    notes = [f"{config.name} failed and is left out: {results.runs[config].get('reason')}." for config in failed]
    if style == "markdown":
        rows = [f"| {' | '.join(line)} |" for line in lines]
        rows.insert(1, f"|---{'|--:' * (len(lines[0]) - 1)}|")
        return "\n".join([f"**{title}**", "", *rows, *(f"\n{note}" for note in notes)]) + "\n"
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    rows.insert(1, "-" * len(rows[0]))
    return "\n".join([title, "", *rows, *(f"\n{note}" for note in notes)]) + "\n"


def _show(cell: Cell, results: Results) -> str:
    values, failed = results.test_errors(cell.runs), len(results.failed(cell.runs))
    missing = [f"{len(values)} of {len(cell.runs)}"] if len(values) < len(cell.runs) else []
    missing += [f"{failed} failed"] if failed else []
    note = f" ({', '.join(missing)})" if missing else ""
    if cell.alpha is not None:
        best = results.best(cell.runs)
        errors = results.elastic[best]["errors"] if best is not None and best in results.elastic else {}
        key = f"{cell.alpha:g}"
        return f"{100 * errors[key]:.2f}{note}" if key in errors else GAP
    if not values:
        return f"{GAP} ({failed} failed)" if failed else GAP
    mean, std = mean_and_std([100 * value for value in values])
    return f"{mean:.2f}{'' if std is None else f' ± {std:.2f}'}{note}"
