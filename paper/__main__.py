"""The paper's tables, figures and pages: `python -m paper run | table | figure | plots | report`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from paper import RESULTS
from scalesteer._text import choice, lookup
from scalesteer.app.commands import Commands
from scalesteer.app.flags import Address, Device, Engine, GpusPerRun, Originals, RunsFolder
from scalesteer.app.memory import keep_memory

app = Commands(start=keep_memory)
# Those of grids.EXPERIMENTS, in its order. Importing that takes torch and seconds; help comes at once.
EXPERIMENTS = (
    "tuning", "1", "2", "3", "sizes", "published-forms", "ablations", "longer", "choices", "stir", "large-scale",
    "rescaled-cifar10", "new-networks", "group", "group-stir",
)  # fmt: skip
NAMES = "{" + ",".join(EXPERIMENTS) + "}"
Experiments = Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"{NAMES}...")]
SteerableRun = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="RUN", help="A run of ss-cnn, for pictures of trained networks, or a network of the package."
    ),
]
RivalRun = Annotated[
    Path | None,
    tyro.conf.arg(metavar="RUN", help="A run of locally-scale-invariant-cnn, for figures that compare with it."),
]


@app.command("run")
@dataclass(frozen=True)
class Run:
    """Make all runs of an experiment; finished ones are skipped, interrupted ones go on. Then print its table.

    1, 2 and 3 are the paper's tables: the methods on MNIST-Scale and FMNIST-Scale, under elastic distortion, and with
    less training data on MNIST-scale-local-2. Of our own, tuning tries the settings to choose from on validation data,
    sizes both input sizes, ablations changes one thing at a time, choices combines changes to the filters, and longer
    trains table 2's methods for more epochs. stir, large-scale and rescaled-cifar10 test networks at sizes that were
    not trained, with several seeds; new-networks has such networks on the paper's data, and group and
    group-stir have networks that keep the axis of scales. Repeat the command after an interruption.

    With --engine ray the folder --runs must be on a disk that all machines of the cluster share.

    Example: python -m paper run 1 --splits 0 --methods SS-CNN "Plain CNN"
    """

    name: Positional[Annotated[str, tyro.conf.arg(metavar=NAMES)]]
    """Which experiment."""
    splits: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="SPLIT...")] = None
    """Which splits; by default all of the experiment."""
    seeds: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="SEED...")] = None
    """Which seeds; by default all of the experiment."""
    methods: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="METHOD...")] = None
    """Which methods or variants, as the lines of the table name them; by default all."""
    datasets: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="DATASET...")] = None
    """Which datasets; by default all of the experiment."""
    device: Device = "auto"
    data_dir: Originals = None
    runs: RunsFolder = Path("runs")
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = RESULTS
    """Where results are kept, one line for each run."""
    engine: Engine = "local"
    address: Address = None
    gpus_per_run: GpusPerRun = None

    def run(self) -> None:
        """Run, then print the table."""
        from paper import cells, grids, report, run

        known = grids.EXPERIMENTS
        name = lookup("name", self.name, tuple(known))
        part = run.select(known[name], self.splits, self.methods, self.datasets, self.seeds)
        names = ("runs", "results", "device", "data_dir", "engine", "address", "gpus_per_run")
        problems = run.make(name, part, **{name: getattr(self, name) for name in names})
        print(aligned(report.table(cells.load(self.results), name)))
        if problems:
            raise ValueError(f"not finished: {'; '.join(problems)}")


@app.command("table")
@dataclass(frozen=True)
class Table:
    """Print the paper's tables with our numbers beside the paper's, and those of our own; what is missing is a gap.

    Example: python -m paper table 1
    """

    names: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"[{NAMES}...]", help_behavior_hint="")]] = (
        EXPERIMENTS
    )
    """Which experiments; by default all."""
    markdown: bool = False
    """As Markdown, for a document."""
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = RESULTS
    """Where results are kept."""

    def run(self) -> None:
        """Print them."""
        from paper import cells, grids, report

        names = [lookup("name", name, tuple(grids.EXPERIMENTS)) for name in self.names]
        if not self.results.is_dir():
            raise ValueError(f"{self.results} is not a folder: give that of the results with --results DIR.")
        data = cells.load(self.results)
        shown = [report.table(data, name) for name in names]
        print("\n\n".join(shown if self.markdown else map(aligned, shown)))


@app.command("targets")
@dataclass(frozen=True)
class Targets:
    """Print our own targets for networks at sizes that training did not show, and whether the results meet them.

    Example: python -m paper targets
    """

    def run(self) -> None:
        """Print them."""
        from paper import cells, claims

        print(aligned(claims.targets(cells.published())))


@app.command("report")
@dataclass(frozen=True)
class Report:
    """Fill in the tables and numbers of README.md and docs/ from results/, in a checkout. Trains nothing.

    Only what stands between or before markers changes, and the places that changed are printed. With --fresh all runs
    are made first; it says how long that takes, may be interrupted, and goes on when the command is repeated.

    Example: python -m paper report --fresh --only 1 2
    """

    fresh: bool = False
    """Make the runs, also those that results/ has: their new results take the place of the old."""
    only: Experiments = EXPERIMENTS
    """With --fresh, which experiments to run; by default all."""
    device: Device = "auto"
    data_dir: Originals = None
    runs: RunsFolder = Path("runs")

    def run(self) -> None:
        """Run if asked to, then fill in."""
        from paper import grids, pages, run

        problems = []
        if self.fresh:
            asked = {lookup("only", name, tuple(grids.EXPERIMENTS)) for name in self.only}
            names = [name for name in grids.EXPERIMENTS if name in asked]  # settings are chosen first
            configs = dict.fromkeys(config for name in names for config in grids.EXPERIMENTS[name].runs)
            print(run.forecast(c for c in configs if not (self.runs / c.run.name / "result.json").exists()), flush=True)
            for name in names:
                problems += run.make(name, runs=self.runs, device=self.device, data_dir=self.data_dir, fresh=True)
        for place in pages.write():
            print(place)
        if problems:
            raise ValueError(f"not finished: {'; '.join(problems)}")


@app.command("figure")
@dataclass(frozen=True)
class DrawFigure:
    """Draw a figure of the paper, or what its discussion claims, measured; without a name, list them.

    1 is the basis, 2 the layer, 3 the filters and feature maps of both networks. 2 and 3 show trained networks: an
    SS-CNN, by default the one of the package, and 3 a LocScaleInv-CNN beside it, if its run is given.

    Example: python -m paper figure 2

    Example: python -m paper figure 3 --ss runs/NAME --lsi runs/NAME
    """

    name: Positional[Annotated[str | None, tyro.conf.arg(metavar="[NAME]")]] = None
    """Which figure: the paper's number or a name."""
    ss: SteerableRun = None
    lsi: RivalRun = None
    output: Path = Path("figure.png")
    """The PNG, SVG or PDF to write."""
    data_dir: Originals = None

    def run(self) -> None:
        """Write the figure and say where, or list the figures."""
        from paper import curves, figures

        if self.name is None:
            print(figures.listing())
            return
        choice("output", self.output.suffix, (".png", ".svg", ".pdf"))
        curves.save(figures.draw(self.name, self.ss, self.lsi, self.data_dir), self.output)
        print(self.output)


@app.command("plots")
@dataclass(frozen=True)
class Plots:
    """Draw the plots of results/ again, in a checkout; each file that was written is printed. Trains nothing.

    Pictures of trained networks are drawn if there is an SS-CNN, and those that compare it if there is a
    LocScaleInv-CNN too; otherwise they stay as they are.

    Example: python -m paper plots --ss runs/NAME --lsi runs/NAME
    """

    ss: SteerableRun = None
    lsi: RivalRun = None
    output: Path = RESULTS
    """The folder that they go to."""
    data_dir: Originals = None

    def run(self) -> None:
        """Draw, and print the files."""
        from paper import figures, plots

        for path in plots.draw(figures.Trained(self.ss, self.lsi, self.data_dir), self.output):
            print(path, flush=True)


def aligned(text: str) -> str:
    """Markdown with its table aligned for a terminal."""
    lines = [
        line.strip("|").split("|") if line.startswith("|") else line for line in text.replace("**", "").split("\n")
    ]
    rows = [[cell.strip() for cell in line] for line in lines if isinstance(line, list)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = iter("  ".join([c[0].ljust(widths[0]), *map(str.rjust, c[1:], widths[1:])]) for c in rows)
    drawn = [next(shown) if isinstance(line, list) else line for line in lines]
    return "\n".join("-" * len(line) if line.strip("- :") == "" and line else line for line in drawn)


if __name__ == "__main__":
    sys.exit(app.main(prog="python -m paper"))
