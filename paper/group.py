"""Networks that keep the axis of scales: how far they are from equivariance, by basis, and which scale responds.

``python -m paper.group`` measures again what docs/evidence/group.md shows, some minutes on one core, and keeps it in
results/guide/group.json. With trained networks, as directories of runs or folders, it measures these alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from paper import RESULTS, cells, curves, recorded
from paper.grids import Cell
from paper.markdown import table, view
from scalesteer.app import load_model
from scalesteer.app.device import commit
from scalesteer.baselines import FittedBasis, HermiteBasis
from scalesteer.files import write_atomically
from scalesteer.group import Basis, ScaleBlurPool2d, ScaleGroupConv2d, ScaleMax
from scalesteer.models import create_model, network_of
from scalesteer.testing import equivariance_error, two_blobs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASES: dict[str, Basis | str] = {
    "`paper`": "paper",
    "`area`": "area",
    "`smooth`": "smooth",
    "Hermite, 16": HermiteBasis(4),
    "Hermite, 36": HermiteBasis(6),
    "Hermite, 49": HermiteBasis(7),
    "fitted, 16": FittedBasis(16),
    "fitted, 32": FittedBasis(32),
}
STEPS = {"√2": 2 ** (1 / 2), "∛2": 2 ** (1 / 3)}
DEPTHS = (1, 2, 3)
SCALES, WIDTH, DRAWS = 4, 16, 2
PADDED = "Hermite basis, padded"


def scales_of(step: float, count: int = SCALES, first: int = 0) -> tuple[float, ...]:
    """A geometric sequence; its first scale is a power of the step."""
    return tuple(step ** (first + i) for i in range(count))


def stack(basis: Basis | str, step: float, depth: int, pool: bool = False) -> nn.Sequential:
    """Layers of 16 channels with ReLU between them; with `pool` maps are halved after the first one."""
    scales = scales_of(step)
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.ReLU()] if i else []
        layers += [ScaleBlurPool2d(scales)] if pool and i == 1 else []
        fan_in = WIDTH if i else 1
        layers.append(ScaleGroupConv2d(fan_in, WIDTH, padding="same", bias=False, scales=scales, basis=basis))
    return nn.Sequential(*layers)


def error(basis: Basis | str, step: float, depth: int, pool: bool = False, draws: int = DRAWS) -> float:
    """The equivariance error of such layers when the image grows by one step, in the mean over draws of filters."""
    found = []
    with torch.random.fork_rng():
        for seed in range(draws):
            torch.manual_seed(seed)
            net = stack(basis, step, depth, pool)
            found.append(equivariance_error(net, step, channels=1, steps=1, size=96 + (not pool), images=2))
    return round(float(np.mean(found)), 4)


def functions(basis: Basis | str) -> int:
    """How many real functions a basis has."""
    return int(np.prod(ScaleGroupConv2d(1, 1, basis=basis).coefficients.shape))


TRACKED = scales_of(2 ** (1 / 3), 10, -2)
SIZES = tuple(2 ** (i / 6) for i in range(-4, 15))


def responding_scale(basis: Basis | str, filters: int = 32) -> list[float]:
    """The index of the scale that responds most to an object, by its size: the mean over filters, at the best place."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = ScaleGroupConv2d(1, filters, padding="same", bias=False, scales=TRACKED, basis=basis)
    ticks, found = torch.arange(-48, 49, dtype=torch.float32), []
    for size in SIZES:
        unit = 7 / 17 * size  # the image fits a window of 7 at size 1
        image = two_blobs(ticks[None] / unit, -ticks[:, None] / unit)[None, None]
        with torch.no_grad():
            best, index = ScaleMax()(layer(image), return_scales=True)
        place = best.flatten(2).argmax(2, keepdim=True)
        found.append(round(float(index.flatten(2).gather(2, place).float().mean()), 3))
    return found


def measure() -> dict[str, Any]:
    """Every number of docs/evidence/group.md but that of trained networks and the speed."""
    return {
        "command": "python -m paper.group",
        "commit": commit(),
        "torch": torch.__version__,
        "functions": {name: functions(basis) for name, basis in BASES.items()},
        "errors": {
            name: {label: [error(basis, step, depth) for depth in DEPTHS] for label, step in STEPS.items()}
            for name, basis in BASES.items()
        },
        "pooled": {name: error(BASES[name], STEPS["∛2"], 2, pool=True) for name in ("`smooth`", "Hermite, 36")},
        "responding": {name: responding_scale(BASES[name]) for name in ("`paper`", "`smooth`", "Hermite, 36")},
    }


# Views


@view
def group_numbers() -> dict[str, Any]:
    """What was measured of group convolutions, as it was measured."""
    return dict(recorded("guide/group.json"))


@view
def group_errors() -> str:
    """The equivariance error by basis, step and number of layers."""
    found = group_numbers()
    heads = [f"{depth} layer{'s' * (depth > 1)}, step {label}" for label in STEPS for depth in DEPTHS]
    rows = [
        (name, found["functions"][name], *(f"{100 * e:.1f}" for label in STEPS for e in errors[label]))
        for name, errors in found["errors"].items()
    ]
    return table([("error in %", "functions", *heads), *rows])


@view
def group_error(name: str, depth: int) -> str:
    """The error of one basis in % at both steps, the smaller one first."""
    errors = sorted(100 * row[depth - 1] for row in group_numbers()["errors"][name].values())
    low, high = (f"{e:.1f}" for e in errors)
    return low if low == high else f"{low} to {high}"


@view
def group_slope(name: str) -> str:
    """Scales by which the response moves when the object grows by one step, fitted from size 1.6 to 4."""
    sizes = np.log2(SIZES) * 3
    inside = (sizes > 1.99) & (sizes < 6.01)
    return f"{np.polyfit(sizes[inside], np.array(group_numbers()['responding'][name])[inside], 1)[0]:.2f}"


def _rates() -> dict[str, dict[str, float]]:
    """Training images a second by case and network."""
    return dict(recorded("bench/group.json")["images_per_second"])


@view
def group_rates() -> str:
    """Training rates of the group network, of one computed as published code computes it, and of SS-CNN."""
    kinds = list(next(iter(_rates().values())))
    rows = [
        (case, *(f"{rates[kind]:.3g}" for kind in kinds), f"{rates[kinds[0]] / rates[PADDED]:.1f}")
        for case, rates in _rates().items()
    ]
    return table([("images per second", *kinds, "ratio"), *rows])


@view
def group_ratio() -> str:
    """The smallest and the largest ratio of the rate of the group network to that as published."""
    ratios = [rates["group-cnn"] / rates[PADDED] for rates in _rates().values()]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


# Trained networks


PAPERS = "SS-CNN"


@view
def group_trained(data: cells.Data, column: str) -> str:
    """Errors on MNIST-Scale of what has been trained, and the intervals of the differences to SS-CNN's."""
    papers, rows = Cell("group", PAPERS, column), []
    for line in cells.lines("group"):
        where = papers._replace(line=line)
        other = line != PAPERS and cells.values(data, where).notna().any()
        rows.append((line, cells.show(data, where), str(cells.minus(data, where, papers)) if other else ""))
    return table([("error in %", column, f"minus {PAPERS}"), *rows])


@view
def group_stir(data: cells.Data) -> str:
    """Errors on STIR's digits by line, inside and outside the sizes of training, and the rate of training."""
    rates, rows = recorded("bench/group.json")["stir"], []
    for line in cells.lines("group-stir"):
        errors = (cells.show(data, Cell("group-stir", line, "Mid2Rest", name)) for name in ("inside", "outside"))
        rows.append((line, *errors, f"{rates[line]:.3g}"))
    return table([("error in %", "trained sizes", "other sizes", "images per second"), *rows])


@view
def group_network(kind: str) -> str:
    """The errors behind each layer of `group-cnn` in %, with "new" weights or "trained" ones."""
    *first, last = (f"{100 * error:.0f}" for error in group_numbers()["trained"]["errors"]["group-cnn"][kind])
    return f"{', '.join(first)} and {last}"


@view
def group_interval(data: cells.Data, line: str, column: str) -> str:
    """The 95 % interval of a line's error minus SS-CNN's."""
    return str(cells.minus(data, Cell("group", line, column), Cell("group", PAPERS, column))).strip("*")


def plot_responding() -> Figure:
    """The index of the scale that responds against the size of the object."""
    figure, axis = curves.panels(1)
    steps = 3 * np.log2(SIZES)
    for name, indices, colour, marker in curves.styled(group_numbers()["responding"]):
        axis.plot(steps, indices, f"{marker}-", color=colour, markersize=4, label=name.replace("`", ""))
    first = group_numbers()["responding"]["`smooth`"]
    axis.plot(steps[4:], (steps - steps[8] + first[8])[4:], ":", color=curves.GREY, label="one scale for each step")
    axis.set_title("Which scale responds most to an object, mean over filters", fontsize=11)
    curves.label(axis, "size of the object, in steps of ∛2", "index of the scale")
    return figure


def plots() -> dict[str, Figure]:
    """What the pages show, by its place in results/."""
    return {"figures/group.png": plot_responding()}


def network_errors(net: Any) -> list[float]:
    """The error behind each ReLU of a group network, at six scales: at the middle ones no layer misses a neighbour."""
    options = {name: value for name, value in net.arguments.items() if name not in ("name", "scales")}
    wide: Any = create_model(net.arguments["name"], **options, scales=scales_of(STEPS["∛2"], 6))
    wide.load_state_dict(net.state_dict())
    ends = [i for i, layer in enumerate(wide.features, 1) if isinstance(layer, nn.ReLU)]
    about: Any = {"channels": 1, "steps": 1, "ends": 2, "size": 96, "images": 8}  # even, as maps are halved
    return [round(equivariance_error(wide.features[:end], STEPS["∛2"], **about), 4) for end in ends]


def errors_before_and_after(net: Any) -> dict[str, list[float]]:
    """Those of the same network with new weights, and of the trained one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        new = create_model(**net.arguments)
    return {"new": network_errors(new), "trained": network_errors(net)}


def main(directories: Sequence[str]) -> None:
    """Measure again and keep what was found."""
    torch.set_num_threads(1)
    path = RESULTS / "guide" / "group.json"
    kept = {name: told for name, told in group_numbers().items() if name == "trained"} if path.exists() else {}
    if directories:
        networks = [network_of(load_model(Path(name))) for name in directories]
        errors = {str(net.arguments["name"]): errors_before_and_after(net) for net in networks}
        about = {"command": "python -m paper.group RUN...", "commit": commit(), "torch": torch.__version__}
        found = {**group_numbers(), "trained": {**about, "errors": errors}}
    else:
        found = measure() | kept
    write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
