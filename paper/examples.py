"""The pictures of the examples whose result is a list of errors: error against the size of the object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paper import curves, recorded
from paper.anysize import own_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(errors: Mapping[str, Sequence[float]], sizes: Sequence[float], title: str) -> Figure:
    """Errors from 0 to 1 at sizes relative to training, by the name of what made them."""
    figure = curves.plot_errors({name: [row] for name, row in errors.items()}, sizes, "size of the object", title=title)
    (axis,) = figure.axes
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.minorticks_off()
    return figure


def plots() -> dict[str, Figure]:
    """Figures by their place in results/."""
    more, own = recorded("guide/more-sizes.json"), recorded("guide/own-images.json")
    converted = [row for row in recorded("guide/convert-resnet.json")["rows"] if row["epochs"]]
    by_size = {
        "convert-resnet": (
            {row["model"]: row["errors"] for row in converted},
            "Photographs: test error by size, one epoch after conversion",
        ),
        "own-images": (
            {own_name(run): run["errors"] for run in own},
            "A folder of one's own: test error by size, trained at 0.84 to 1.19",
        ),
    }
    drawn = {"more-sizes": plot(more["errors"], more["sizes"], "The network digits: test error by size")}
    for name, (errors, title) in by_size.items():
        sizes = list(next(iter(errors.values())))
        rows = {line: [row[size] / 100 for size in sizes] for line, row in errors.items()}
        drawn[name] = plot(rows, [float(size) for size in sizes], title)
    return {f"guide/{name}.png": figure for name, figure in drawn.items()}
