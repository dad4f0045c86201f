"""Errors as curves, and answers as pictures: the plots that the views of results share, and how plots are kept."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from scalesteer.files import replacing, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # tables and numbers of pages do without matplotlib


class Style(NamedTuple):
    """How a line is told from the others: by its colour, and without colours by its marker."""

    colour: str
    marker: str


STYLES = (
    Style("#0072b2", "o"),  # blue
    Style("#d55e00", "s"),  # orange
    Style("#44aa99", "^"),  # green
    Style("#882255", "D"),  # wine
    Style("#e69f00", "v"),  # yellow
    Style("#332288", "P"),  # indigo
    Style("#000000", "X"),
    Style("#56b4e9", "<"),  # light blue
    Style("#661100", "*"),  # brown
    Style("#e15759", ">"),  # rose
    Style("#117733", "h"),  # dark green
    Style("#1f3b73", "p"),  # navy
)
"""Of all plots, in the order in which lines take them. The colours are at least 17 apart in CIE Lab, also to a reader
without red or green cones; a test measures it."""
COLOURS = tuple(style.colour for style in STYLES)
GREY = "#7a7a7a"  # what is drawn for comparison: a level, a theory, the other lines of a panel
SHADE = "#e3e8ee"
DPI = 200
MANY = 3  # lines; with more of them the legend stands beside the plot, where it hides none
Errors = Mapping[str, Sequence[Sequence[float]]]
"""For each name its runs, each a sequence of errors from 0 to 1, one per position."""
T = TypeVar("T")


def save(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Write a figure as PNG, SVG or PDF, by the name's ending; if that fails, an old picture is left as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        if path.suffix == ".png":
            file.write(png(figure, dpi))
        else:
            figure.savefig(file, format=path.suffix[1:])


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """A figure as a PNG of 256 colours, a third as large as one of all; the same figure, the same bytes."""
    image, drawn, content = require("PIL.Image"), io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    few: dict[str, Any] = {"method": image.Quantize.MAXCOVERAGE, "kmeans": 1, "dither": image.Dither.NONE}
    image.open(drawn).convert("RGB").quantize(256, **few).save(content, "PNG", optimize=True)
    return content.getvalue()


def empty(width: float, height: float) -> Figure:
    """A figure without axes, of so many inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is needed here and not installed: pip install 'scalesteer[paper]'") from error

    return Figure(figsize=(width, height), layout="constrained")


def panels(count: int, width: float = 6.4, height: float = 4.0, **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes side by side; of one panel, the axis itself."""
    figure = empty(width, height)
    return figure, figure.subplots(1, count, **options)


def label(axis: Any, x: str = "", y: str = "", legend: int = 9, grid: str = "major", **options: Any) -> None:
    """Name the axes, draw a grid and, unless its size is zero, the legend."""
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3, which=grid)
    if legend:
        axis.legend(fontsize=legend, **options)


def frame(axis: Any, title: str = "") -> None:
    """A picture without ticks."""
    axis.set_title(title, fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])


def styled(items: Mapping[str, T]) -> Iterator[tuple[str, T, str, str]]:
    """Names and what they stand for, with a colour and a marker each that no other has.

    Raises:
        ValueError: If there are more items than `STYLES`.
    """
    if len(items) > len(STYLES):
        raise ValueError(
            f"`items` must be at most {len(STYLES)}, one for each of `STYLES` (got {len(items)}): draw several panels."
        )
    for (name, item), style in zip(items.items(), STYLES, strict=False):
        yield name, item, *style


def plot_errors(
    curves: Errors, positions: Sequence[float], x: str, span: tuple[float, float] | None = None, title: str = ""
) -> Figure:
    """Error in per cent against something: a line through the means over runs, a dot for each run.

    Args:
        curves: The errors by name.
        positions: The horizontal axis.
        x: Its label.
        span: A range to shade, such as that of the training data.
        title: What is seen.
    """
    many = len(curves) > MANY
    figure, axis = panels(1, 9.4 if many else 6.4)
    _draw_errors(axis, curves, positions, span)
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=11)
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if many else {}
    label(axis, x, "test error, %", **beside)
    return figure


def plot_error_panels(
    parts: Mapping[str, tuple[Errors, tuple[float, float]]], positions: Sequence[float], x: str, title: str = ""
) -> Figure:
    """What :func:`plot_errors` draws, one panel for each title: its curves and the range to shade."""
    figure, axes = panels(len(parts), 10, 4, sharey=True, squeeze=False)
    for axis, (name, (curves, span)) in zip(axes[0], parts.items(), strict=True):
        _draw_errors(axis, curves, positions, span, markersize=3)
        axis.set_title(name, fontsize=10)
        label(axis, x, legend=0)
    axes[0, 0].set_ylim(bottom=0)  # of all, which share it
    axes[0, 0].set_ylabel("test error, %")
    figure.suptitle(title, fontsize=11)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _draw_errors(
    axis: Any, curves: Errors, positions: Sequence[float], span: tuple[float, float] | None, markersize: float = 6
) -> None:
    if span is not None:
        axis.axvspan(*span, color=SHADE, label="range of the training data")
    for name, runs, colour, marker in styled(curves):
        errors = 100 * np.asarray(runs, float)  # (runs, positions)
        if errors.shape != (len(runs), len(positions)) or len(runs) == 0:
            raise ValueError(f"`curves` must hold {len(positions)} errors per run (got shape {errors.shape}: {name}).")
        axis.plot(positions, errors.mean(0), f"{marker}-", color=colour, label=name, markersize=markersize)
        if len(errors) > 1:
            axis.plot(positions, errors.T, ".", color=colour, alpha=0.5, markersize=markersize * 0.8)


def plot_histories(curves: Errors, y: str, title: str = "") -> Figure:
    """Error in per cent after each epoch, a panel for each name: the mean over runs and their range; others in grey.

    Args:
        curves: The errors by name, one per epoch.
        y: Label of the vertical axis, which is logarithmic.
        title: What is seen.
    """
    from matplotlib.ticker import LogLocator

    figure, axes = panels(len(curves), 2.1 * len(curves) + 0.4, 3.2, sharey=True, squeeze=False)
    means = {name: 100 * np.asarray(runs, float).mean(0) for name, runs in curves.items()}
    for axis, (name, runs, colour, _) in zip(axes[0], styled(curves), strict=True):
        errors = 100 * np.asarray(runs, float)  # (runs, epochs)
        epochs = np.arange(1, errors.shape[1] + 1)
        for other, mean in means.items():
            if other != name:
                axis.semilogy(np.arange(1, len(mean) + 1), mean, color=GREY, alpha=0.4, linewidth=0.8)
        axis.fill_between(epochs, errors.min(0), errors.max(0), color=colour, alpha=0.25, linewidth=0)
        axis.semilogy(epochs, means[name], color=colour, label=name)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.set_title(name, fontsize=10)
        label(axis, "epochs", legend=0)
    axes[0, 0].set_ylabel(y)
    figure.suptitle(title, fontsize=11)
    return figure


def plot_ratios(
    parts: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]],
    positions: Sequence[float],
    x: str,
    limits: Sequence[float],
    title: str = "",
) -> Figure:
    """Ratios of errors against something, one panel each: a line, and a dot for each pair of runs.

    Args:
        parts: For each title its lines by name: the ratio at each position, and for each pair of runs its ratios.
        positions: The horizontal axis.
        x: Its label.
        limits: For each panel a ratio that means something; drawn as a level.
        title: What is seen.
    """
    figure, axes = panels(len(parts), 9, 4, sharey=True, squeeze=False)
    for axis, (name, lines), limit in zip(axes[0], parts.items(), limits, strict=True):
        axis.axhline(limit, color="black", linewidth=1, linestyle=":")
        for line, (ratios, pairs), colour, marker in styled(lines):
            axis.plot(positions, ratios, f"{marker}-", color=colour, label=line)
            for pair in pairs:
                axis.plot(positions, pair, ".", color=colour, alpha=0.4, markersize=5)
        axis.set_title(name, fontsize=10)
        label(axis, x, legend=0)
    axes[0, 0].set_ylabel("ratio of test errors")
    figure.suptitle(title, fontsize=11)
    axes[0, -1].legend(fontsize=9)
    return figure


def plot_answered_sizes(quartiles: Mapping[float, Sequence[float]], span: tuple[float, float]) -> Figure:
    """The size that answered against the true size: medians, the middle half of the images, and a proportional line.

    Args:
        quartiles: The three quartiles of the sizes that answered, by true size.
        span: Sizes seen in training, shaded.
    """
    figure, axis = panels(1, height=3.6)
    sizes, (low, middle, high) = list(quartiles), np.array(list(quartiles.values())).T
    axis.axvspan(*span, color=SHADE, label="range of the training data")
    axis.fill_between(sizes, low, high, color=COLOURS[0], alpha=0.2, linewidth=0, label="half of the images")
    axis.plot(sizes, middle, "o-", color=COLOURS[0], label="median")
    proportion = math.exp(np.mean(np.log(middle) - np.log(sizes)))
    axis.plot(sizes, proportion * np.array(sizes), ":", color="black", label="proportional")
    axis.set_xscale("log")
    axis.set_yscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.xaxis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_title("The size that the network estimates, against the true size", fontsize=11)
    label(axis, "true size of the digits", "estimated size")
    return figure


def plot_answers(
    images: Mapping[float, Tensor], answers: Mapping[float, Sequence[int]], truth: Sequence[int]
) -> Figure:
    """Images at several sizes, a row for each object, with what a network says: green if right, red if wrong.

    Args:
        images: `(objects, H, W)` by size.
        answers: The class of each object, by size.
        truth: The true class of each object.
    """
    figure = empty(1.0 * len(images), 1.2 * len(truth) + 0.2)
    axes = figure.subplots(len(truth), len(images), squeeze=False)
    for column, (size, shown) in enumerate(images.items()):
        for row, right in enumerate(truth):
            axis, said = axes[row, column], answers[size][row]
            axis.imshow(shown[row].numpy(), cmap="gray", vmin=0, vmax=255)
            frame(axis, f"size {size:g}" if row == 0 else "")
            text, colour = (f"{said}", "#2f7d32") if said == right else (f"{said} ✗", "#c02020")
            axis.set_xlabel(text, color=colour)
    return figure
