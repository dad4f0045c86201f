"""Errors as curves, and answers as pictures: the plots that the views of results share, and how plots are kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from scalesteer.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # tables and numbers of pages do without matplotlib

COLOURS = ("#1b6ca8", "#d1642e", "#3c8d40", "#8e5ba6", "#7a7a7a")
MORE_COLOURS = ("#c2185b", "#b8860b", "#00a3a3", "#202020")  # where many lines share a plot
SHADE = "#e3e8ee"
Errors = Mapping[str, Sequence[Sequence[float]]]
"""For each name its runs, each a sequence of errors from 0 to 1, one per position."""
T = TypeVar("T")


def save(figure: Figure, path: Path, dpi: int = 110) -> None:
    """Write a figure as PNG, SVG or PDF, by the name's ending; if that fails, an old picture is left as it is."""
    about = {"Software": None} if path.suffix == ".png" else {}  # no version: the same figure, the same bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=dpi, metadata=about)


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
    """Names and what they stand for, with a colour and a marker each."""
    for (name, item), colour, marker in zip(
        items.items(), itertools.cycle(COLOURS + MORE_COLOURS), itertools.cycle("os^DvP<*X"), strict=False
    ):
        yield name, item, colour, marker


def plot_errors(curves: Errors, positions: Sequence[float], x: str, span: tuple[float, float] | None = None) -> Figure:
    """Error in per cent against something: a line through the means over runs, a dot for each run.

    Args:
        curves: The errors by name.
        positions: The horizontal axis.
        x: Its label.
        span: A range to shade, such as that of the training data.
    """
    figure, axis = panels(1)
    _draw_errors(axis, curves, positions, span)
    axis.set_ylim(bottom=0)
    label(axis, x, "test error, %")
    return figure


def plot_error_panels(
    parts: Mapping[str, tuple[Errors, tuple[float, float]]], positions: Sequence[float], x: str
) -> Figure:
    """What :func:`plot_errors` draws, one panel for each title: its curves and the range to shade."""
    figure, axes = panels(len(parts), 10, 3.6, sharey=True, squeeze=False)
    for axis, (title, (curves, span)) in zip(axes[0], parts.items(), strict=True):
        _draw_errors(axis, curves, positions, span, markersize=3)
        axis.set_title(title, fontsize=10)
        label(axis, x, legend=0)
    axes[0, 0].set_ylim(bottom=0)  # of all, which share it
    axes[0, 0].set_ylabel("test error, %")
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


def plot_histories(curves: Errors, y: str) -> Figure:
    """Error in per cent after each epoch: a line through the means over runs, their range shaded.

    Args:
        curves: The errors by name, one per epoch.
        y: Label of the vertical axis, which is logarithmic.
    """
    figure, axis = panels(1)
    for name, runs, colour, _ in styled(curves):
        errors = 100 * np.asarray(runs, float)  # (runs, epochs)
        epochs = np.arange(1, errors.shape[1] + 1)
        axis.semilogy(epochs, errors.mean(0), color=colour, label=name)
        axis.fill_between(epochs, errors.min(0), errors.max(0), color=colour, alpha=0.15, linewidth=0)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    label(axis, "epochs", y, grid="both")
    return figure


def plot_ratios(
    parts: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]],
    positions: Sequence[float],
    x: str,
    limits: Sequence[float],
) -> Figure:
    """Ratios of errors against something, one panel each: a line, and a dot for each pair of runs.

    Args:
        parts: For each title its lines by name: the ratio at each position, and for each pair of runs its ratios.
        positions: The horizontal axis.
        x: Its label.
        limits: For each panel a ratio that means something; drawn as a level.
    """
    figure, axes = panels(len(parts), 9, 3.6, sharey=True, squeeze=False)
    for axis, (title, lines), limit in zip(axes[0], parts.items(), limits, strict=True):
        axis.axhline(limit, color="black", linewidth=1, linestyle=":")
        for name, (ratios, pairs), colour, marker in styled(lines):
            axis.plot(positions, ratios, f"{marker}-", color=colour, label=name)
            for pair in pairs:
                axis.plot(positions, pair, ".", color=colour, alpha=0.4, markersize=5)
        axis.set_title(title, fontsize=10)
        label(axis, x, legend=0)
    axes[0, 0].set_ylabel("ratio of test errors")
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
    label(axis, "true size of the digits", "size that answered")
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
