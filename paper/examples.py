"""What examples measured: error against the size of the object, and what a fitted join and fewer channels change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from paper import curves, recorded
from paper.anysize import own_name
from paper.markdown import table, view

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


def adaptive() -> dict[str, Any]:
    """What examples/fewer_channels.py found, by the kind of pictures."""
    found: dict[str, Any] = recorded("guide/adaptive.json")["trials"]
    return found


@view
def fitted_join() -> str:
    """What the fit of a join and the early stop change, for each kind of pictures."""
    whole, rows = recorded("guide/adaptive.json"), list[list[str]]()
    at, largest = whole["sizes"].index(1.0), whole["sizes"].index(2.0)

    def pair(found: dict[str, Any], read: Any, digits: str = ".1f") -> str:
        return " → ".join(f"{read(found[line]):{digits}}" for line in ("plain", "fitted"))

    for name, found in adaptive().items():
        every = {trade["sure"]: trade for trade in found["trades"]}
        chosen = every[found["sure"]]
        lost = 100 * (chosen["error"] - every[1.0]["error"])
        row = [name, f"{100 * found['alone_error']:.1f}", pair(found, lambda line: 100 * line["error"][at])]
        row += [pair(found, lambda line: 100 * fmean(line["error"])), pair(found, lambda line: 100 * line["ece"])]
        row += [pair(found, lambda line: line["median_size"][largest], ".2f")]
        rows.append([*row, f"{found['sure']:g}", f"{100 * chosen['cost']:.0f} %", f"{lost:+.1f}"])
    head = ["%, plain join → fitted", "network alone, size 1", "size 1", "mean of sizes", "calibration error"]
    head += ["size 2 estimated as", "`sure`", "cost", "points of error"]
    count = next(iter(adaptive().values()))["pictures"]
    about = f"{count} test pictures of each kind, each at five sizes from 0.5 to 2; torch {whole['torch']}, commit"
    about += f" {whole['commit'][:7]}, seed {whole['seed']}; `python examples/fewer_channels.py`."
    return f"{table([head, *rows])}\n\n{about}"


def plot_adaptive() -> Figure:
    """Cost and error at each value of `sure`."""
    figure, axis = curves.panels(1, 6.4, 4.2)
    for name, found, colour, marker in curves.styled(adaptive()):
        full = found["trades"][-1]["error"]
        points = [(100 * trade["cost"], 100 * (trade["error"] - full)) for trade in found["trades"]]
        axis.plot(*zip(*points, strict=True), f"{marker}-", color=colour, label=name)
        axis.plot(*next(p for p, t in zip(points, found["trades"], strict=True) if t["sure"] == found["sure"]),
                  marker, color=colour, markersize=12, fillstyle="none")  # fmt: skip
    axis.axvline(50, color=curves.GREY, linestyle=":")
    axis.axhline(0.3, color=curves.GREY, linestyle=":")
    axis.set_ylim(-1, 4)
    axis.set_title("Cost and error for each value of `sure`; outlined: chosen on validation", fontsize=10)
    curves.label(axis, "cost, % of all channels", "error above that of all channels, points")
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
    drawn["fewer-channels"] = plot_adaptive()
    return {f"guide/{name}.png": figure for name, figure in drawn.items()}
