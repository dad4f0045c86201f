"""The paper's tables, figures and pages: `python -m paper run | table | figure | report`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional
from tyro.extras import SubcommandApp

from scalesteer._checks import choice
from scalesteer.cli import Device, Folder, Originals, main
from scalesteer.data import scale

app = SubcommandApp()
TABLES = "{1,2,3,tuning,ablations,choices,longer}"


@app.command(name="run")
@dataclass(frozen=True)
class RunTable:
    """Make all runs of a table; finished ones are skipped, interrupted ones go on.

    Table 1 of the paper compares the methods on MNIST-Scale and FMNIST-Scale, table 2 under elastic distortion, and
    table 3 with less training data on MNIST-scale-local-2. Of our own, `tuning` tries the settings to choose from on
    validation data, `ablations` changes one thing at a time, `choices` combines changes to the filters, and `longer`
    trains table 2's methods for 120 and 300 epochs. Repeat the command after an interruption.

    Example: python -m paper run 1 --splits 0 --methods SS-CNN "Plain CNN"
    """

    table: Positional[Annotated[str, tyro.conf.arg(metavar=TABLES)]]
    """Which table."""
    splits: tuple[int, ...] = tuple(scale.SPLITS)
    """Which splits."""
    methods: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="METHOD...")] = None
    """Which methods, as the table names them ("SS-CNN"; in longer "SS-CNN, 300 epochs"); by default all."""
    datasets: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="DATASET...")] = None
    """Which datasets; by default all of the table."""
    jobs: int = 1
    """Runs at a time, each a process of its own: for many cores; on one GPU they take turns."""
    device: Device = "auto"
    data_dir: Originals = None
    runs: Folder = Path("runs")
    """Where runs are kept."""
    results: Folder = Path("results")
    """Where results are kept, a small file a run."""

    def run(self) -> None:
        """Run, then print the table."""
        from paper import results, runner, tables

        problems = runner.run_table(**vars(self))
        print(tables.render(tables.get_table(self.table), results.collect(self.results)), end="")
        if problems:
            raise ValueError(f"not finished: {'; '.join(problems)}")


@app.command(name="table")
@dataclass(frozen=True)
class ShowTable:
    """Print the paper's tables with our numbers beside the paper's, and those of our own; what is missing is a gap.

    Example: python -m paper table 1 --format markdown
    """

    name: Positional[Annotated[str | None, tyro.conf.arg(metavar=TABLES)]] = None
    """Which table; by default all."""
    format: Literal["text", "markdown"] = "text"
    """For a terminal or for a document."""
    results: Folder = Path("results")
    """Where results are kept."""

    def run(self) -> None:
        """Print them."""
        from paper import results, tables

        names = tables.TABLES if self.name is None else [self.name]
        chosen, found = [tables.get_table(name) for name in names], results.collect(self.results)
        print("\n".join(tables.render(table, found, self.format) for table in chosen), end="")


@app.command(name="report")
@dataclass(frozen=True)
class Reproduce:
    """Regenerate the tables and plots of README.md and docs/reproduction.md from results/, in a checkout.

    What has not been run is a gap. With --fresh all runs are made first; it says how long that takes, may be
    interrupted, and goes on when the command is repeated.

    Example: python -m paper report --fresh --only 1 2
    """

    fresh: bool = False
    """Make the runs, also those that results/ has: their new results take the place of the old."""
    only: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar=f"{TABLES}...")] = None
    """With --fresh, which tables to run; by default all."""
    jobs: int = 1
    """Runs at a time, each a process of its own: for many cores; on one GPU they take turns."""
    device: Device = "auto"
    data_dir: Originals = None
    runs: Folder = Path("runs")
    """Where runs are kept; figures of trained networks are drawn from those that are there."""

    def run(self) -> None:
        """Run if asked to, then write."""
        from paper import reproduce

        problems = reproduce.reproduce(**vars(self))
        print(f"refreshed {reproduce.README}, {reproduce.PAGE} and {reproduce.RESULTS / 'figures'}")
        if problems:
            raise ValueError(f"not finished: {'; '.join(problems)}")


@app.command(name="figure")
@dataclass(frozen=True)
class DrawFigure:
    """Draw a figure of the paper, or what its discussion claims, measured; without a name, list them.

    Example: python -m paper figure filters --ss runs/NAME --lsi runs/NAME
    """

    name: Positional[Annotated[str | None, tyro.conf.arg(metavar="NAME")]] = None
    """Which figure."""
    ss: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """A run of ss-cnn, for figures of trained networks."""
    lsi: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """A run of locally-scale-invariant-cnn, for figures that compare with it."""
    output: Path = Path("figure.png")
    """The PNG, SVG or PDF to write."""
    data_dir: Originals = None

    def run(self) -> None:
        """Write the figure and say where, or list the figures."""
        from paper import figures

        if self.name is None:
            for name, entry in figures.FIGURES.items():
                print(f"{name:16}{entry.description}")
            return
        choice("output", self.output.suffix, (".png", ".svg", ".pdf"))
        figures.draw(self.name, self.ss, self.lsi, self.data_dir).savefig(self.output, dpi=110)
        print(self.output)


if __name__ == "__main__":
    sys.exit(main(commands=app, prog="python -m paper"))
