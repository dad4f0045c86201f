"""The tables of the paper's Section 4: which runs they need, the paper's numbers, and ours beside them.

One protocol holds for all methods: the defaults of `RunConfig` and `PROTOCOL`. Learning rate, weight decay and input
size of each method are chosen on validation data from one small grid (the table "tuning") and stand in `RECIPES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paper.results import Result, Results, mean_and_std
from scalesteer import _checks
from scalesteer.data import ELASTIC_ALPHAS
from scalesteer.data.scale import SPLITS
from scalesteer.harmonics import PAPER_SCALES
from scalesteer.training.config import RunConfig

METHODS = {
    "Spatial Transformer": "spatial-transformer",
    "SS-CNN": "ss-cnn",
    "LocScaleEq-CNN": "vector-field-cnn",
    "LocScaleInv-CNN": "locally-scale-invariant-cnn",
    "Plain CNN": "plain-cnn",  # the control; not in the paper
}
DATASETS = {"mnist-scale": "MNIST-Scale", "fmnist-scale": "FMNIST-Scale"}


class Recipe(NamedTuple):
    """What may differ between methods; `upsample` 1 shows them 28 x 28 pixels, 2 shows them 56 x 56."""

    lr: float
    weight_decay: float
    upsample: int

    def __str__(self) -> str:
        return f"lr {self.lr:g}, weight decay {self.weight_decay:g}, {28 * self.upsample} px"


GRID = tuple(itertools.starmap(Recipe, itertools.product((0.002, 0.005), (0.01, 0.1), (1, 2))))
"""What each method may choose from, on the validation data of split 0."""
TUNING_EPOCHS = 10
PROTOCOL = {"precision": "tf32"}
"""What all runs share beside the defaults of `RunConfig`."""

RECIPES = {
    ("Spatial Transformer", "mnist-scale"): Recipe(0.005, 0.01, 2),
    ("Spatial Transformer", "fmnist-scale"): Recipe(0.005, 0.1, 2),
    ("SS-CNN", "mnist-scale"): Recipe(0.005, 0.1, 2),
    ("SS-CNN", "fmnist-scale"): Recipe(0.005, 0.1, 2),
    ("LocScaleEq-CNN", "mnist-scale"): Recipe(0.005, 0.1, 2),
    ("LocScaleEq-CNN", "fmnist-scale"): Recipe(0.005, 0.01, 2),
    ("LocScaleInv-CNN", "mnist-scale"): Recipe(0.005, 0.1, 2),
    ("LocScaleInv-CNN", "fmnist-scale"): Recipe(0.002, 0.1, 2),
    ("Plain CNN", "mnist-scale"): Recipe(0.005, 0.1, 2),
    ("Plain CNN", "fmnist-scale"): Recipe(0.002, 0.1, 2),
}
"""What tuning chose. MNIST-scale-local-2 is made of the same digits and uses the recipe of MNIST-Scale."""

FEW_IMAGES: dict[int, dict[str, Any]] = {
    100: {"batch_size": 25, "epochs": 300},
    1000: {"epochs": 300},
    10_000: {},
}
"""For each number of training images in Table 3: fewer images need smaller batches and more passes, up to the 300 that
the paper allows."""

ABLATION_SPLITS = (0, 1, 2)
ABLATIONS: dict[str, dict[str, Any]] = {
    "basis area": {"basis": "area"},
    "basis released-code": {"basis": "released-code"},
    "support crop": {"support": "crop"},
    "one scale: 7": {"scales": PAPER_SCALES[:1]},
    "one scale: 17": {"scales": PAPER_SCALES[-1:]},
    "two scales: 7, 17": {"scales": (PAPER_SCALES[0], PAPER_SCALES[-1])},
    "three scales: 7, 11, 17": {"scales": (PAPER_SCALES[0], PAPER_SCALES[2], PAPER_SCALES[-1])},
    "eleven scales: 7, 8, …, 17": {"scales": tuple(size / 7 for size in range(7, 18))},
    "m = 0": {"m": 0.0},
    "m = 0.5": {"m": 0.5},
    "m = 2": {"m": 2.0},
    "order 1": {"orders": (1.0,)},
    "orders 0.5, 1": {"orders": (0.5, 1.0)},
    "orders 0.5, 1, 2, 4": {"orders": (0.5, 1.0, 2.0, 4.0)},
}
"""For each variant of SS-CNN, what differs from its run in Table 1."""

CHOICES: tuple[dict[str, dict[str, Any]], ...] = (
    {"points": {}, "areas": ABLATIONS["basis area"]},
    {"m = 1": {}, "m = 0.5": ABLATIONS["m = 0.5"]},
    {"disc": {}, "crop": ABLATIONS["support crop"]},
    {"six scales": {}, "three scales": ABLATIONS["three scales: 7, 11, 17"]},
)
"""Changes to the filters that may be combined; the first of each is what SS-CNN has in the tables."""

MOVES = (0.5, 1.0)
"""Pixels that images are moved by where networks are tested under distortion: with blur, and without."""

SMOOTHER: dict[str, dict[str, Any]] = {
    "SS-CNN, basis area": ABLATIONS["basis area"],
    "SS-CNN, basis area, m = 0.5": ABLATIONS["basis area"] | ABLATIONS["m = 0.5"],
}
"""Variants of SS-CNN in Table 2, whose filters are smoother than the paper's."""

LENGTHS = (60, 120, 300)
"""Epochs that the methods in Table 2 are trained for: those of that table, and more, up to the paper's 300."""

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

    def part(
        self,
        splits: Iterable[int] | None = None,
        methods: Iterable[str] | None = None,
        datasets: Iterable[str] | None = None,
    ) -> Table:
        """The table with only some of the rows and runs."""
        methods = tuple(self.rows) if methods is None else tuple(methods)
        for method in methods:
            _checks.choice("method", method, tuple(self.rows))
        used = sorted({config.dataset for config in self.runs})
        kept = {_checks.choice("dataset", name, used) for name in (used if datasets is None else datasets)}
        numbers = {config.split for config in self.runs} if splits is None else set(splits)

        def cut(cell: Cell) -> Cell:
            return replace(cell, runs=tuple(c for c in cell.runs if c.split in numbers and c.dataset in kept))

        rows = {method: tuple(cut(cell) for cell in self.rows[method]) for method in methods}
        return Table(self.name, self.title, self.columns, rows)


def _runs(method: str, dataset: str, **options: Any) -> tuple[RunConfig, ...]:
    recipe = RECIPES[method, dataset if dataset in DATASETS else "mnist-scale"]
    settings = {"model": METHODS[method], "dataset": dataset, **PROTOCOL, **recipe._asdict(), **options}
    return tuple(RunConfig(**settings, split=split) for split in SPLITS)


def _table_1() -> Table:
    paper = {
        "Spatial Transformer": ("1.97 ± 0.09", "13.11 ± 0.25"),
        "SS-CNN": ("1.91 ± 0.04", "14.24 ± 0.31"),
        "LocScaleEq-CNN": ("2.44 ± 0.07", "15.72 ± 0.32"),
        "LocScaleInv-CNN": ("2.75 ± 0.09", "15.91 ± 0.41"),
        "Plain CNN": ("", ""),
    }
    rows = {
        method: tuple(Cell(_runs(method, data), text) for data, text in zip(DATASETS, numbers, strict=True))
        for method, numbers in paper.items()
    }
    return Table("1", "Error rates on MNIST-Scale and FMNIST-Scale", tuple(DATASETS.values()), rows)


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
    for name, own in SMOOTHER.items():
        rows[name] = tuple(Cell(_runs("SS-CNN", "mnist-scale", **own), "", alpha) for alpha in ELASTIC_ALPHAS)
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


def distorted_after(epochs: int) -> dict[str, tuple[Cell, ...]]:
    """Table 2's methods, without variants of SS-CNN, trained for so many epochs."""
    return {
        method: tuple(replace(cell, runs=tuple(replace(c, epochs=epochs) for c in cell.runs)) for cell in row)
        for method, row in _table_2().rows.items()
        if method in METHODS
    }


def _longer() -> Table:
    more = {epochs: distorted_after(epochs) for epochs in LENGTHS[1:]}
    rows = {f"{method}, {epochs} epochs": more[epochs][method] for method in more[LENGTHS[1]] for epochs in more}
    return Table("longer", "Table 2's methods after more epochs, means over splits", _table_2().columns, rows)


def tuning_runs(method: str, dataset: str) -> dict[Recipe, RunConfig]:
    """The runs that a method's recipe for a dataset is chosen from."""
    settings: dict[str, Any] = {"model": METHODS[method], "dataset": dataset, **PROTOCOL, "epochs": TUNING_EPOCHS}
    return {recipe: RunConfig(**settings, **recipe._asdict(), tuning=True) for recipe in GRID}


def chosen(results: Results, method: str, dataset: str) -> Recipe | None:
    """The recipe with the lowest error on validation data, ties by loss; None as long as a run is missing."""
    runs = tuning_runs(method, dataset)
    ended = [recipe for recipe, config in runs.items() if results.finished([config])]
    if not ended or len(ended) + len(results.failed(runs.values())) < len(runs):
        return None
    return min(ended, key=lambda recipe: [results.runs[runs[recipe]][k] for k in ("val_error", "val_loss")])


def _tuning() -> Table:
    rows = {
        method: tuple(Cell((config,)) for dataset in DATASETS for config in tuning_runs(method, dataset).values())
        for method in METHODS
    }
    columns = tuple(f"{name}, {recipe}" for name in DATASETS.values() for recipe in GRID)
    title = f"Error on the validation data of split 0 after at most {TUNING_EPOCHS} epochs; ✓ is chosen"
    return Table("tuning", title, columns, rows)


def _ablations() -> Table:
    bases = {m: tuple(c for c in _runs(m, "mnist-scale") if c.split in ABLATION_SPLITS) for m in METHODS}
    variants = [("SS-CNN, as in Table 1", "SS-CNN", {}), *((name, "SS-CNN", own) for name, own in ABLATIONS.items())]
    variants += [(f"{m}, {28 * up} px", m, {"upsample": up}) for m in METHODS for up in (1, 2)]
    rows = {
        name: (Cell(tuple(replace(config, **own) for config in bases[method])), Cell(bases[method]))
        for name, method, own in variants
    }
    title = "MNIST-Scale, splits 0 to 2; differences are to the method's runs in Table 1, or to their mean"
    return Table("ablations", title, ("variant", "base"), rows)


def _choices() -> Table:
    base = _runs("SS-CNN", "mnist-scale")
    tested = {config for table in (_table_2(), _ablations()) for config in table.runs}

    def run(config: RunConfig) -> RunConfig:
        return config if config in tested else replace(config, tuning=True)

    rows = {}
    for names in itertools.product(*CHOICES):
        own = {k: v for name, options in zip(names, CHOICES, strict=True) for k, v in options[name].items()}
        rows[", ".join(names)] = (Cell(tuple(run(replace(base[split], **own)) for split in ABLATION_SPLITS)),)
    title = "SS-CNN with all combinations of four changes to its filters; validation data of splits 0 to 2"
    return Table("choices", title, ("validation",), rows)


TABLES: dict[str, Callable[[], Table]] = {
    "1": _table_1,
    "2": _table_2,
    "3": _table_3,
    "tuning": _tuning,
    "ablations": _ablations,
    "choices": _choices,
    "longer": _longer,
}


def get_table(name: str) -> Table:
    """A table of the paper by its number, "tuning", "ablations", "choices" or "longer".

    Example:
        >>> len(get_table("1").runs), len(get_table("3").runs)
        (60, 54)
    """
    return TABLES[_checks.choice("table", name, tuple(TABLES))]()


def render(table: Table, results: Results, style: str = "text") -> str:
    """A table as text or Markdown, errors in %: ours (mean ± standard deviation over splits) beside the paper's.

    A cell without results is a dash; one that lacks runs says how many it has. Runs that failed, and those of another
    device than most, are named below.

    Args:
        table: What to show.
        results: What was measured.
        style: "text" or "markdown".
    """
    own = {
        "tuning": _tuning_lines,
        "ablations": _ablation_lines,
        "choices": _choice_lines,
        "longer": _longer_lines,
    }
    lines = own.get(table.name, _paper_lines)(table, results)
    title = f"{f'Table {table.name}' if table.name.isdigit() else table.name.capitalize()}. {table.title}"
    failed = results.failed(table.runs)
    notes = [f"{config.name} failed and is left out: {results.runs[config].get('reason')}." for config in failed]
    elsewhere = results.elsewhere(table.runs)
    for device in sorted(set(elsewhere.values())):
        notes.append(f"Trained on {device}: {', '.join(c.name for c in elsewhere if elsewhere[c] == device)}.")
    return layout(lines, title, notes, style)


def layout(lines: list[list[str]], title: str = "", notes: Iterable[str] = (), style: str = "markdown") -> str:
    """Lines of cells, the first the header, as an aligned text or a Markdown table."""
    if _checks.choice("style", style, ("text", "markdown")) == "markdown":
        rows = [f"| {' | '.join(line)} |" for line in lines]
        rows.insert(1, f"|---{'|--:' * (len(lines[0]) - 1)}|")
        title = title and f"**{title}**"
    else:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [[text.rjust(w) for text, w in zip(line, widths, strict=True)] for line in lines]
        rows = ["  ".join([line[0].ljust(widths[0]), *row[1:]]) for line, row in zip(lines, padded, strict=True)]
        rows.insert(1, "-" * len(rows[0]))
    return "\n".join([*([title, ""] if title else []), *rows, *(f"\n{note}" for note in notes)]) + "\n"


def _paper_lines(table: Table, results: Results) -> list[list[str]]:
    lines = [["error in %", *(text for column in table.columns for text in (column, "paper"))]]
    for method, row in table.rows.items():
        lines.append([method, *(text for cell in row for text in (show(cell, results), cell.paper or GAP))])
    return lines


def _tuning_lines(table: Table, results: Results) -> list[list[str]]:
    """Methods side by side, a line a point of the grid."""
    lines = [["validation error in %", *table.rows]]
    winners = {(m, d): chosen(results, m, d) for m in table.rows for d in DATASETS}
    for column, (dataset, recipe) in zip(table.columns, itertools.product(DATASETS, GRID), strict=True):
        line = [column]
        for method in table.rows:
            ended = results.finished([tuning_runs(method, dataset)[recipe]])
            shown = f"{100 * results.runs[ended[0]]['val_error']:.2f}" if ended else GAP
            line.append(f"{shown} ✓" if winners[method, dataset] == recipe else shown)
        lines.append(line)
    return lines


def _ablation_lines(table: Table, results: Results) -> list[list[str]]:
    elsewhere = results.elsewhere(table.runs)
    lines = [["one change at a time", "error in %", "difference", "parameters", "seconds"]]
    for name, (variant, base) in table.rows.items():
        changes = results.differences(variant.runs, base.runs)
        difference = GAP if not changes else "base" if variant == base else spread(changes, "+.2f")
        found = {config: results.runs[config] for config in results.finished(variant.runs)}
        timed = [result for config, result in found.items() if config not in elsewhere]
        costs = mean(list(found.values()), "parameters"), mean(timed, "seconds")
        lines.append([name, show(variant, results), difference, *costs])
    return lines


def _choice_lines(table: Table, results: Results) -> list[list[str]]:
    lines = [["filters", "validation error in %", "validation loss"]]
    for name, (cell,) in table.rows.items():
        found = results.finished(cell.runs)
        errors = [100 * results.mean(config, "val_error") for config in found]
        losses = [results.mean(config, "val_loss") for config in found]
        lines.append([name, *((spread(errors), f"{mean_and_std(losses)[0]:.3f}") if found else (GAP, GAP))])
    return lines


def _longer_lines(table: Table, results: Results) -> list[list[str]]:
    """Each method as in Table 2, then after more epochs."""
    lines = [["error in %", "validation", *table.columns]]
    lengths = [distorted_after(epochs) for epochs in LENGTHS]
    for method in lengths[0]:
        for cells in (rows[method] for rows in lengths):
            runs = cells[0].runs
            validation = [100 * results.mean(config, "val_error") for config in results.finished(runs)]
            numbers = [validation, *(results.distorted(runs, "errors", cell.alpha or 0) for cell in cells)]
            counts = ["" if len(values) == len(runs) else f" ({len(values)} of {len(runs)})" for values in numbers]
            shown = [f"{spread(values)}{n}" if values else GAP for values, n in zip(numbers, counts, strict=True)]
            lines.append([f"{method}, {runs[0].epochs} epochs", *shown])
    return lines


def mean(found: list[Result], key: str) -> str:
    """The mean of a large number over results, or a dash."""
    return f"{mean_and_std([result[key] for result in found])[0]:,.0f}" if found else GAP


def spread(values: list[float], form: str = ".2f") -> str:
    """Mean ± standard deviation; of a single value just that."""
    centre, std = mean_and_std(values)
    return f"{centre:{form}}{'' if std is None else f' ± {std:.2f}'}"


def show(cell: Cell, results: Results) -> str:
    """What a cell says: the error in %, how many runs are missing or failed, or a dash."""
    values, failed = results.test_errors(cell.runs), len(results.failed(cell.runs))
    missing = [f"{len(values)} of {len(cell.runs)}"] if len(values) < len(cell.runs) else []
    missing += [f"{failed} failed"] if failed else []
    note = f" ({', '.join(missing)})" if missing else ""
    if cell.alpha is not None:
        error = mean_error(cell, results)
        return GAP if error is None else f"{error:.2f}{note}"
    if not values:
        return f"{GAP} ({failed} failed)" if failed else GAP
    return spread([100 * value for value in values]) + note


def mean_error(cell: Cell, results: Results) -> float | None:
    """The number of a cell in %; None if there is none yet."""
    if cell.alpha is None:
        values = results.test_errors(cell.runs)
        return 100 * mean_and_std(values)[0] if values else None
    best = results.best(cell.runs)
    errors = results.elastic[best]["errors"] if best is not None and best in results.elastic else {}
    error = errors.get(f"{cell.alpha:g}")
    return None if error is None else 100 * error
