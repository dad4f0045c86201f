"""The paper's figures, one function each; what they measure is in :mod:`paper.measures`.

Every function takes the layers, networks and images that it shows and returns a matplotlib figure, which needs no
display. `FIGURES` lists by name those of the paper and of its claims; :func:`plots` draws what the pages show and no
trained network is needed for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paper import measures
from scalesteer import _checks, harmonics
from scalesteer.data import ELASTIC_ALPHAS, ImageSet
from scalesteer.files import replacing
from scalesteer.harmonics import PAPER_SCALES, LogRadialBasis
from scalesteer.models import Network
from scalesteer.nn import ScaleSteerableConv2d
from scalesteer.training import RunConfig, evaluate, load, load_model
from scalesteer.training.loop import split_by_scale

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("matplotlib is needed here and not installed: pip install 'scalesteer[paper]'") from error

COLOURS = ("#1b6ca8", "#d1642e", "#3c8d40", "#8e5ba6", "#7a7a7a")
TITLES = {"ss": "SS-CNN", "lsi": "locally scale-invariant CNN"}


def save(figure: Figure, path: Path, dpi: int = 110) -> None:
    """Write a figure as PNG, SVG or PDF, by the name's ending; if that fails, an old picture is left as it is."""
    about = {"Software": None} if path.suffix == ".png" else {}  # no version: the same figure, the same bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=dpi, metadata=about)


def signed_root(values: Any) -> Any:
    """The centre is far above the rest; the square root of the magnitude makes the rings visible."""
    return np.sign(values) * np.abs(values) ** 0.5


def imshow_signed(axis: Any, values: Any, title: str = "") -> None:
    """An array as an image: zero in white, negative blue, positive red."""
    limit = float(np.abs(values).max()) or 1.0
    axis.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit)
    _frame(axis, title)


def _frame(axis: Any, title: str = "") -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])


def _single(width: float = 6.4, height: float = 4.0) -> tuple[Figure, Any]:
    """A figure with one axis."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _label(axis: Any, x: str, y: str, legend: int = 9, grid: str = "major") -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3, which=grid)
    axis.legend(fontsize=legend)


def _steerable(layer: nn.Module) -> ScaleSteerableConv2d:
    if not isinstance(layer, ScaleSteerableConv2d):
        raise TypeError(f"the layer must be a ScaleSteerableConv2d, as in ss-cnn (got {type(layer).__name__}).")
    return layer


def _centred(values: Any, size: int) -> Any:
    """Put a small odd window into the middle of a larger one."""
    margin = (size - values.shape[-1]) // 2
    return np.pad(values, margin)


# Filters and maps


def plot_basis(basis: LogRadialBasis | None = None, size: int = 41) -> Figure:
    """The paper's first figure."""
    basis = basis or LogRadialBasis.preset("area")
    values = harmonics.sample(basis, size) * harmonics.support(basis, size, 1.0)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    axes = figure.subplots(len(basis.orders), 8, squeeze=False)
    for i, order in enumerate(basis.orders):
        for j in range(4):
            for column, part, name in ((j, values.real, "Re"), (j + 4, values.imag, "Im")):
                image = part[i, 2 * j + 1]
                degrees = math.degrees(basis.orientations[2 * j + 1])
                imshow_signed(axes[i, column], signed_root(image), f"{name}, k={order:g}, {degrees:.0f}°")
    figure.suptitle(
        f"Log-radial harmonics S_kj, m = {basis.m:g} (square root of the magnitude, sign kept)", fontsize=11
    )
    return figure


def plot_steered(layer: nn.Module, channel: int = 0) -> Figure:
    """One filter of a layer (input channel 0) at all of its scales."""
    layer = _steerable(layer)
    with torch.no_grad():
        filters = [f[channel, 0].cpu().numpy() for f in layer.filters()]
        fine = layer.with_scales(tuple(6 * s for s in layer.scales))
        smooth = [f[channel, 0].cpu().numpy() for f in fine.filters()]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(2, len(filters), squeeze=False)
    for i, (scale, weight) in enumerate(zip(layer.scales, filters, strict=True)):
        n = weight.shape[0]
        imshow_signed(axes[0, i], signed_root(_centred(weight, layer.sizes[-1])), f"s = {scale:.2f}, {n} x {n}")
        imshow_signed(axes[1, i], signed_root(smooth[i]))
    axes[0, 0].set_ylabel("pixels as computed", fontsize=9)
    axes[1, 0].set_ylabel("drawn to one size,\non a grid six times finer", fontsize=9)
    number = {6: "six"}.get(len(filters), str(len(filters)))
    figure.suptitle(
        f"One set of coefficients, {number} scales: no interpolation anywhere (square root of the magnitude)",
        fontsize=11,
    )
    return figure


def plot_filter_bank(layer: nn.Module, count: int = 5) -> Figure:
    """The filters with the largest norm at the first scale, one per row; columns are scales."""
    layer = _steerable(layer)
    with torch.no_grad():
        filters = [f[:, 0].cpu().numpy() for f in layer.filters()]
    strongest = np.argsort(-np.linalg.norm(filters[0], axis=(1, 2)), kind="stable")[:count]
    figure = Figure(figsize=(1.3 * len(filters), 1.3 * len(strongest) + 0.3), layout="constrained")
    axes = figure.subplots(len(strongest), len(filters), squeeze=False)
    for row, channel in zip(axes, strongest, strict=True):
        for axis, weight in zip(row, filters, strict=True):
            imshow_signed(axis, signed_root(_centred(weight[channel], layer.sizes[-1])))
    for axis, scale in zip(axes[0], layer.scales, strict=True):
        axis.set_title(f"scale {scale:.2g}", fontsize=9)
    return figure


def plot_filters(ss: Network, lsi: Network, columns: int = 6) -> Figure:
    """The paper's figure of learned filters; all first-layer filters at scale 1."""
    lines = max(-(-len(measures.unit_filters(model.first)) // columns) for model in (ss, lsi))
    figure = Figure(figsize=(9, 0.75 * lines + 0.4), layout="constrained")
    halves: Any = figure.subfigures(1, 2, wspace=0.05)
    for part, (title, model) in zip(halves, _pair(ss, lsi).items(), strict=True):
        bank = measures.unit_filters(model.first)
        axes = part.subplots(lines, columns, squeeze=False).ravel()
        for axis in axes:
            axis.set_axis_off()
        for axis, weight in zip(axes, bank, strict=False):
            imshow_signed(axis, weight)
        part.suptitle(title, fontsize=11)
    return figure


def _pair(ss: Network, lsi: Network) -> dict[str, Network]:
    return {TITLES["ss"]: ss, TITLES["lsi"]: lsi}


def plot_feature_maps(ss: Network, lsi: Network, images: Tensor) -> Figure:
    """The mean over channels of the first layer's output; rows are input, SS-CNN, locally scale-invariant CNN."""
    figure = Figure(figsize=(1.4 * len(images) + 0.6, 4.6), layout="constrained")
    axes = figure.subplots(3, len(images), squeeze=False)
    rows = {"input": images[:, 0]} | {
        name: measures.first_maps(m, images).mean(1) for name, m in _pair(ss, lsi).items()
    }
    for row, (name, maps) in zip(axes, rows.items(), strict=True):
        for axis, values in zip(row, maps.cpu().numpy(), strict=True):
            axis.imshow(values, cmap="gray")
            _frame(axis)
        row[0].set_ylabel(name.replace("scale-", "scale-\n").replace("invariant ", "invariant\n"), fontsize=9)
    figure.suptitle("Average first-layer feature maps", fontsize=11)
    return figure


def plot_layer(model: Network, image: Tensor, channel: int | None = None) -> Figure:
    """The paper's diagram of the layer, drawn from the first layer of a network and one image `(1, H, W)`.

    Args:
        model: A network whose first layer is scale-steerable.
        image: What it sees.
        channel: Which filter; the one that responds most by default.
    """
    layer = _steerable(model.first)
    with torch.no_grad():
        x = model.prepare(image[None])
        responses = [F.conv2d(x, f, padding=f.shape[-1] // 2)[0] for f in layer.filters()]
        best, winner = layer(x, return_scales=True)
        if channel is None:
            channel = int(best[0].amax((1, 2)).argmax())
        filters = [f[channel, 0].cpu().numpy() for f in layer.filters()]
    count = len(filters)
    figure = Figure(figsize=(11, count + 0.3), layout="constrained")
    grid = figure.add_gridspec(count, 8, width_ratios=(2, 0.3, 1, 0.3, 1, 0.5, 2, 2))
    axis = figure.add_subplot(grid[:, 0])
    axis.imshow(x[0, 0].cpu().numpy(), cmap="gray")
    _frame(axis, "input")
    limit = max(float(r[channel].abs().max()) for r in responses)
    for i, scale in enumerate(layer.scales):
        axis = figure.add_subplot(grid[i, 2])
        imshow_signed(axis, signed_root(_centred(filters[i], layer.sizes[-1])), "filters" if i == 0 else "")
        axis.set_ylabel(f"s = {scale:.2g}", fontsize=8)
        axis = figure.add_subplot(grid[i, 4])
        axis.imshow(responses[i][channel].cpu().numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
        _frame(axis, "responses" if i == 0 else "")
    for column, label in ((1, "⋆"), (3, "→"), (5, "max\n→")):
        axis = figure.add_subplot(grid[:, column])
        axis.set_axis_off()
        axis.text(0.5, 0.5, label, ha="center", va="center", fontsize=13)
    axis = figure.add_subplot(grid[:, 6])
    imshow_signed(axis, best[0, channel].cpu().numpy(), "maximum over scales")
    axis = figure.add_subplot(grid[:, 7])
    _scale_legend(axis, _scale_map(axis, winner[0, channel], best[0, channel], layer.scales), layer.scales)
    _frame(axis, "winning scale")
    return figure


def plot_winning_scales(model: Network, images: Tensor, titles: Sequence[str] = ()) -> Figure:
    """Which scale wins where: one column per image; rows are input, response and winning scale."""
    response, winner = measures.winning_scales(model, images)
    scales: tuple[float, ...] = model.first.scales  # type: ignore[assignment]
    figure = Figure(figsize=(1.6 * len(images) + 1, 5), layout="constrained")
    axes = figure.subplots(3, len(images), squeeze=False)
    for i, image in enumerate(images):
        axes[0, i].imshow(image[0].cpu().numpy(), cmap="gray", vmin=0, vmax=1)
        _frame(axes[0, i], titles[i] if titles else "")
        axes[1, i].imshow(response[i].cpu().numpy(), cmap="magma", vmin=0)
        _frame(axes[1, i])
        drawn = _scale_map(axes[2, i], winner[i], response[i], scales)
        _frame(axes[2, i], f"mean {measures.mean_winning_scale(response[i], winner[i], scales):.2f}")
    _scale_legend(axes[2, -1], drawn, scales)
    for row, name in zip(axes[:, 0], ("input", "strongest response", "winning scale"), strict=True):
        row.set_ylabel(name, fontsize=9)
    return figure


def _scale_map(axis: Any, winner: Tensor, response: Tensor, scales: Sequence[float]) -> Any:
    """The index of the winning scale in colour where the response is strong."""
    shown = np.ma.masked_array(winner.cpu().numpy(), ~measures.strong(response).cpu().numpy())
    axis.set_facecolor("#f2f2f2")
    return axis.imshow(
        shown, cmap=matplotlib.colormaps["viridis"].resampled(len(scales)), vmin=-0.5, vmax=len(scales) - 0.5
    )


def _scale_legend(axis: Any, drawn: Any, scales: Sequence[float]) -> None:
    """Which colour is which scale, at the right of a map."""
    bar = axis.figure.colorbar(drawn, cax=axis.inset_axes((1.04, 0, 0.07, 1)), ticks=range(len(scales)))
    bar.ax.set_yticklabels([f"{s:.2g}" for s in scales], fontsize=8)


def plot_scale_tracking(models: Mapping[str, Network], images: ImageSet, count: int = 700) -> Figure:
    """Whether larger objects are won by larger scales: mean ± standard deviation over the images of each size.

    Args:
        models: Networks whose first layer has scales.
        images: What they see.
        count: How many of the images, from the first.
    """
    few = images.first(min(count, len(images)))
    figure, axis = _single()
    for (name, model), colour, marker in zip(models.items(), COLOURS * 3, "os^Dv" * 3, strict=False):
        sizes, means = measures.scale_tracking(model, few)
        bins = list(split_by_scale(sizes))
        middles, groups = [sum(ends) / 2 for ends, _ in bins], [means[chosen] for _, chosen in bins]
        centres, spread = [group.mean() for group in groups], [group.std() for group in groups]
        label = f"{name}: correlation of logarithms {np.corrcoef(np.log(sizes), np.log(means))[0, 1]:.2f}"
        axis.errorbar(middles, centres, spread, color=colour, marker=marker, capsize=3, label=label)
    _label(axis, "scale of the object (bins of 0.1)", "mean winning scale")
    return figure


# Errors


def plot_errors(
    curves: Mapping[str, Sequence[Sequence[float]]],
    positions: Sequence[float],
    label: str,
    span: tuple[float, float] | None = None,
) -> Figure:
    """Error in per cent against something: a line through the means over runs, a dot for each run.

    Args:
        curves: For each name its runs, each a sequence of errors from 0 to 1, one per position.
        positions: The horizontal axis.
        label: Its label.
        span: A range to shade, such as that of the training data.
    """
    figure, axis = _single()
    _draw_errors(axis, curves, positions, span)
    axis.set_ylim(bottom=0)
    _label(axis, label, "test error, %")
    return figure


def plot_error_panels(
    panels: Mapping[str, tuple[Mapping[str, Sequence[Sequence[float]]], tuple[float, float]]],
    positions: Sequence[float],
    label: str,
) -> Figure:
    """What :func:`plot_errors` draws, one panel for each title: its curves and the range to shade."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, (curves, span)) in zip(axes, panels.items(), strict=True):
        _draw_errors(axis, curves, positions, span, markersize=3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=0)  # of all, which share it
    axes[0].set_ylabel("test error, %")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _draw_errors(
    axis: Any,
    curves: Mapping[str, Sequence[Sequence[float]]],
    positions: Sequence[float],
    span: tuple[float, float] | None,
    markersize: float = 6,
) -> None:
    if span is not None:
        axis.axvspan(*span, color="#e3e8ee", label="range of the training data")
    for (name, runs), colour, marker in zip(curves.items(), COLOURS * 3, "os^Dv" * 3, strict=False):
        errors = 100 * np.asarray(runs, float)  # (runs, positions)
        if errors.shape != (len(runs), len(positions)) or len(runs) == 0:
            raise ValueError(f"`curves` must hold {len(positions)} errors per run (got shape {errors.shape}: {name}).")
        axis.plot(positions, errors.mean(0), f"{marker}-", color=colour, label=name, markersize=markersize)
        if len(errors) > 1:
            axis.plot(positions, errors.T, ".", color=colour, alpha=0.5, markersize=markersize * 0.8)


def plot_answered_sizes(quartiles: Mapping[float, Sequence[float]], span: tuple[float, float]) -> Figure:
    """The size that answered against the true size: medians, the middle half of the images, and a proportional line.

    Args:
        quartiles: The three quartiles of the sizes that answered, by true size.
        span: Sizes seen in training, shaded.
    """
    figure, axis = _single(height=3.6)
    sizes, (low, middle, high) = list(quartiles), np.array(list(quartiles.values())).T
    axis.axvspan(*span, color="#e3e8ee", label="range of the training data")
    axis.fill_between(sizes, low, high, color=COLOURS[0], alpha=0.2, linewidth=0, label="half of the images")
    axis.plot(sizes, middle, "o-", color=COLOURS[0], label="median")
    proportion = math.exp(np.mean(np.log(middle) - np.log(sizes)))
    axis.plot(sizes, proportion * np.array(sizes), ":", color="black", label="proportional")
    axis.set_xscale("log")
    axis.set_yscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.xaxis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    _label(axis, "true size of the digits", "size that answered")
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
    figure = Figure(figsize=(1.0 * len(images), 1.2 * len(truth) + 0.2), layout="constrained")
    axes = figure.subplots(len(truth), len(images), squeeze=False)
    for column, (size, shown) in enumerate(images.items()):
        for row, label in enumerate(truth):
            axis, said = axes[row, column], answers[size][row]
            axis.imshow(shown[row].numpy(), cmap="gray", vmin=0, vmax=255)
            _frame(axis, f"size {size:g}" if row == 0 else "")
            axis.set_xlabel(
                f"{said}" if said == label else f"{said} ✗", color="#2f7d32" if said == label else "#c02020"
            )
    return figure


def plot_histories(curves: Mapping[str, Sequence[Sequence[float]]], label: str) -> Figure:
    """Error in per cent after each epoch: a line through the means over runs, their range shaded.

    Args:
        curves: For each name its runs, each a sequence of errors from 0 to 1, one per epoch.
        label: Of the vertical axis, which is logarithmic.
    """
    figure, axis = _single()
    for (name, runs), colour in zip(curves.items(), COLOURS * 3, strict=False):
        errors = 100 * np.asarray(runs, float)  # (runs, epochs)
        epochs = np.arange(1, errors.shape[1] + 1)
        axis.semilogy(epochs, errors.mean(0), color=colour, label=name)
        axis.fill_between(epochs, errors.min(0), errors.max(0), color=colour, alpha=0.15, linewidth=0)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    _label(axis, "epochs", label, grid="both")
    return figure


def plot_ratios(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]],
    positions: Sequence[float],
    label: str,
    limits: Sequence[float],
) -> Figure:
    """Ratios of errors against something, one panel each: a line, and a dot for each pair of runs.

    Args:
        panels: For each title its lines by name: the ratio at each position, and for each pair of runs its ratios.
        positions: The horizontal axis.
        label: Its label.
        limits: For each panel a ratio that means something; drawn as a level.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, lines), limit in zip(axes, panels.items(), limits, strict=True):
        axis.axhline(limit, color="black", linewidth=1, linestyle=":")
        for (name, (ratios, pairs)), colour, marker in zip(lines.items(), COLOURS * 3, "os^Dv" * 3, strict=False):
            axis.plot(positions, ratios, f"{marker}-", color=colour, label=name)
            for pair in pairs:
                axis.plot(positions, pair, ".", color=colour, alpha=0.4, markersize=5)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ratio of test errors")
    axes[-1].legend(fontsize=9)
    return figure


def plot_scale_error(models: Mapping[str, Network], images: ImageSet) -> Figure:
    """Error in bins of the scale that images were drawn at."""
    bins = {name: evaluate(model, images)["by_scale"] for name, model in models.items()}
    positions = [(b["from"] + b["to"]) / 2 for b in next(iter(bins.values()))]
    curves = {name: [[b["error"] for b in rows]] for name, rows in bins.items()}
    return plot_errors(curves, positions, "scale of the object (bins of 0.1)")


def plot_elastic_error(models: Mapping[str, Network], images: ImageSet) -> Figure:
    """Error on elastically deformed test images, of networks that never saw any."""
    deformed = [images.distorted(alpha) for alpha in ELASTIC_ALPHAS]
    curves = {name: [[evaluate(model, d)["error"] for d in deformed]] for name, model in models.items()}
    return plot_errors(curves, ELASTIC_ALPHAS, "strength of the deformation α, pixels")


# The guide


def random_layer() -> ScaleSteerableConv2d:
    """One filter with fixed random coefficients, at the six scales of the paper."""
    layer = ScaleSteerableConv2d(1, 1, scales=PAPER_SCALES, basis="area")
    with torch.no_grad():
        layer.coefficients.normal_(generator=torch.Generator().manual_seed(3))
    return layer


def plot_theorem() -> Figure:
    """Error of Theorem 1 on Cartesian grids against pitch, and with its sign or power broken."""
    pitches = [2.0**-e for e in range(1, 7)]
    figure, axis = _single(6.4, 4.2)
    for order, colour in zip(measures.THEOREM_ORDERS, ("#1f77b4", "#2ca02c", "#d62728"), strict=True):
        errors = measures.grid_deviations(order, 2.0, pitches)
        slope = np.polyfit(np.log(pitches), np.log(errors), 1)[0]
        axis.loglog(pitches, errors, "o-", color=colour, label=f"order {order:g} (slope {slope:.2f})")
    broken: tuple[tuple[dict[str, float], str, str], ...] = (
        ({"sign": 1}, "phase with the other sign", "--"),
        ({"power": 0.0}, "no $s^{m-2}$", ":"),
    )
    for change, label, style in broken:
        axis.loglog(pitches, measures.grid_deviations(1.0, 2.0, pitches, **change), style, color="grey", label=label)
    axis.set_xticks(pitches, [f"1/{round(1 / h)}" for h in pitches])
    axis.minorticks_off()
    axis.set_title("Theorem 1 on equal-pitch grids, s = 2", fontsize=11)
    _label(
        axis,
        "pitch of the grid (radius of the patch 3.5)",
        "relative deviation, norm over orientations",
        legend=8,
        grid="both",
    )
    return figure


def plot_smooth() -> Figure:
    """One function of the paper, of one lobe, and of the preset `smooth`: on a fine grid, and on 7 x 7 pixels."""
    smooth = LogRadialBasis.preset("smooth")
    one_lobe = replace(smooth, core=0.0, support="disc")
    bases = {"two lobes": replace(one_lobe, lobes="sum"), "one lobe": one_lobe, "one lobe, core and edge": smooth}
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    axes = figure.subplots(2, len(bases))
    for column, (name, basis) in enumerate(bases.items()):
        for row, scale in enumerate((9.0, 1.0)):
            function = harmonics.steered_basis(basis, 7, scale)[1, 0, 0]  # order 2, 45 degrees, real part
            imshow_signed(axes[row, column], signed_root(function), "" if row else name)
    axes[0, 0].set_ylabel("nine times finer", fontsize=9)
    axes[1, 0].set_ylabel("7 x 7 pixels", fontsize=9)
    figure.suptitle("Order 2 at 45° (square root of the magnitude, sign kept)", fontsize=11)
    return figure


def plot_sampling() -> Figure:
    """Steering error by window, point against area; and the footnote: deviation by order and upsampling."""
    numbers = measures.guide_numbers()
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    steering = numbers["steering"]
    for name, label in (("paper", "point sampling"), ("area", "area sampling"), ("smooth", "smooth")):
        windows = [key for key in steering[name] if key.startswith("7 ")]
        left.plot([100 * steering[name][w] for w in windows], "o-", label=label)
    left.set_xticks(range(len(windows)), [w.replace("->", "→") for w in windows])
    left.set_ylim(bottom=0)
    left.set_ylabel("steering error, %")
    left.set_title("Response to an enlarged blob", fontsize=11)
    for order, row in numbers["footnote"].items():
        right.loglog(measures.UPSAMPLING, [100 * e for e in row], "o-", label=f"order {order}")
    right.set_xticks(measures.UPSAMPLING, [f"{u} x" for u in measures.UPSAMPLING])
    right.minorticks_off()
    right.set_xlabel("upsampling of image and filter")
    right.set_ylabel("deviation from Theorem 1, %")
    right.set_title("Point sampling, 7 → 17", fontsize=11)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


# What the paper's discussion claims


def plot_sensitivity(orders: Sequence[float] = measures.SENSITIVITY_ORDERS) -> Figure:
    """Left: the real response, its s^(m-2) removed, against scale. Right: the measured period by order."""
    scales = np.exp(np.linspace(0, 2 * np.pi, 150))
    responses, periods = measures.sensitivity(orders, scales.tolist())
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    left.axvspan(PAPER_SCALES[0], PAPER_SCALES[-1], color="#e3e8ee", label="scales of the paper's layer")
    for order, row, colour in zip(orders, responses, COLOURS * 3, strict=False):
        left.semilogx(scales, (row / row[0]).real, color=colour, label=f"order {order:g}")
        if periods[order] <= scales[-1] * 1.001:
            left.axvline(periods[order], color=colour, linestyle=":", linewidth=1)
    left.set_xlabel("scaling of the image s (dotted: one period)")
    left.set_ylabel("Re of the response, relative to s = 1")
    left.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=5, frameon=False, columnspacing=1)
    fine = np.linspace(min(orders), max(orders), 100)
    right.semilogy(fine, np.exp(2 * np.pi / fine), color="grey", label="theory, $e^{2\\pi/k}$")
    right.semilogy(list(periods), list(periods.values()), "o", color=COLOURS[1], label="measured")
    right.set_xlabel("order k")
    right.set_ylabel("factor after which the response repeats")
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    return figure


def plot_centrality(ss: Network, lsi: Network) -> Figure:
    """One dot per first-layer filter: how far off its centre of mass is, and how much of it is near the centre."""
    figure, axis = _single(6, 4)
    for (name, model), colour, marker in zip(_pair(ss, lsi).items(), COLOURS, "os", strict=False):
        bank = measures.unit_filters(model.first)
        offset, share = measures.centrality(bank)
        label = f"{name}: {offset.mean():.2f}, {share.mean():.0%} on average"
        axis.plot(offset, share, marker, color=colour, alpha=0.7, label=label)
        even = float(measures.centrality(np.ones((1, *bank.shape[1:])))[1][0])
    axis.axhline(even, color="grey", linestyle=":", label=f"mass spread evenly: {even:.0%}")
    axis.set_ylim(0, 1)
    axis.set_xlim(left=-0.01)
    _label(axis, "distance of the centre of mass, in radii", "share of |filter| within half the radius", legend=8)
    return figure


def plot_entanglement(ss: Network, lsi: Network) -> Figure:
    """Mean over first-layer filters of :func:`paper.measures.entanglement`, against scale."""
    scales = PAPER_SCALES[1:]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots(1, 2)
    for (name, model), colour, marker in zip(_pair(ss, lsi).items(), COLOURS, "os", strict=False):
        values = np.array([measures.entanglement(model.first, s) for s in scales])  # (S, 2, C)
        for axis, row in zip(axes, values.mean(2).T, strict=True):
            axis.plot(scales, row, f"{marker}-", color=colour, label=name)
    axes[0].set_ylabel("best move |t*|, in radii of the filter")
    axes[1].set_ylabel("gain in similarity by that move")
    for axis in axes:
        axis.set_xlabel("scale")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return figure


def plot_resizing() -> Figure:
    """Random filters: the same ones steered and resized, and rough ones (white noise), which only resizing can hold."""
    scales = np.linspace(0.6, 2.4, 19)
    figure, axis = _single(6.6, 4.2)
    for (name, layer), colour in zip(measures.resizing_layers().items(), COLOURS, strict=True):
        errors = [100 * measures.resizing_error(layer, s) for s in scales]
        style = "o-" if isinstance(layer, ScaleSteerableConv2d) else "s--"
        axis.plot(scales, errors, style, color=colour, markersize=4, label=name)
    axis.set_ylim(bottom=0)
    _label(axis, "scale", "error of the response, %", legend=8)
    return figure


@dataclass(frozen=True)
class Trained:
    """The trained networks that a figure shows, and the test images of their split; each is loaded when needed."""

    ss_run: Path | None = None
    lsi_run: Path | None = None
    data_dir: Path | None = None

    @cached_property
    def ss(self) -> Network:
        """The SS-CNN."""
        return _load_run("ss", self.ss_run, "ss-cnn")[0]

    @cached_property
    def lsi(self) -> Network:
        """The locally scale-invariant CNN."""
        return _load_run("lsi", self.lsi_run, "locally-scale-invariant-cnn")[0]

    @property
    def networks(self) -> dict[str, Network]:
        """By name; the locally scale-invariant CNN only if its run is given."""
        return {TITLES["ss"]: self.ss} | ({} if self.lsi_run is None else {TITLES["lsi"]: self.lsi})

    @cached_property
    def test(self) -> ImageSet:
        """The test images of the SS-CNN's split."""
        return load(_load_run("ss", self.ss_run, "ss-cnn")[1], "test", self.data_dir)

    @cached_property
    def examples(self) -> tuple[Tensor, list[str]]:
        """The first six test images, `(6, 1, H, W)` in [0, 1], from the smallest object to the largest, with titles."""
        sizes = self.test.sizes[:6]
        order = sizes.argsort()
        titles = [f"size {size:.2f}" for size in sizes[order].tolist()]
        return self.test.images[order, None].float() / 255, titles


def _load_run(flag: str, run: Path | None, model: str) -> tuple[Network, RunConfig]:
    if run is None:
        raise ValueError(f"the figure shows a trained {model}: give its run with --{flag} RUN.")
    network, config = load_model(run)
    if config.model != model:
        raise ValueError(f"`{flag}` must be a run of {model} (got one of {config.model}).")
    return network, config


class Entry(NamedTuple):
    """A figure by name: one line on what it shows, and how it is drawn from trained networks."""

    description: str
    draw: Callable[[Trained], Figure]


FIGURES: dict[str, Entry] = {
    "basis": Entry(
        "the log-radial harmonics: three orders, four orientations, real and imaginary parts", lambda t: plot_basis()
    ),
    "steered": Entry(
        "one filter steered through its scales, as computed and at equal visible size",
        lambda t: plot_steered(t.ss.first),
    ),
    "filter-bank": Entry(
        "the strongest filters of a layer, each at all of its scales", lambda t: plot_filter_bank(t.ss.first)
    ),
    "filters": Entry(
        "first-layer filters of SS-CNN and of the locally scale-invariant CNN, side by side",
        lambda t: plot_filters(t.ss, t.lsi),
    ),
    "feature-maps": Entry(
        "average first-layer feature maps of both networks, for several inputs",
        lambda t: plot_feature_maps(t.ss, t.lsi, t.examples[0]),
    ),
    "layer": Entry(
        "the layer as a diagram: input, filters at all scales, responses, maximum, winning scale",
        lambda t: plot_layer(t.ss, t.examples[0][-1]),
    ),
    "winning-scales": Entry(
        "images, their strongest first-layer responses and the scales that won",
        lambda t: plot_winning_scales(t.ss, *t.examples),
    ),
    "scale-tracking": Entry(
        "the mean scale that wins in the first layer against the size of the object, by network",
        lambda t: plot_scale_tracking(t.networks, t.test),
    ),
    "scale-error": Entry(
        "error against the object's scale, by network", lambda t: plot_scale_error(t.networks, t.test)
    ),
    "elastic-error": Entry(
        "error against the strength of elastic deformation, by network",
        lambda t: plot_elastic_error(t.networks, t.test),
    ),
    "sensitivity": Entry(
        "response of each order against the scale of the input, and its period e^(2π/k)", lambda t: plot_sensitivity()
    ),
    "centrality": Entry(
        "centre of mass and share of |filter| within half the radius, both networks",
        lambda t: plot_centrality(t.ss, t.lsi),
    ),
    "entanglement": Entry(
        "how much a change of scale looks like a move, by scale, both networks",
        lambda t: plot_entanglement(t.ss, t.lsi),
    ),
    "resizing": Entry(
        "error of steering a filter against that of resizing the input twice, by scale", lambda t: plot_resizing()
    ),
}


def draw(name: str, ss: Path | None = None, lsi: Path | None = None, data_dir: Path | None = None) -> Figure:
    """Draw a figure of `FIGURES` with trained networks and the images of their split.

    Args:
        name: One of `FIGURES`.
        ss: A run of ss-cnn, where the figure shows a trained network.
        lsi: A run of locally-scale-invariant-cnn, where the figure compares with it.
        data_dir: Where the original files are, if not in the cache.

    Raises:
        ValueError: If the figure needs a run that is not given, or one of another network.
    """
    return FIGURES[_checks.choice("name", name, tuple(FIGURES))].draw(Trained(ss, lsi, data_dir))


OF_NETWORKS = (
    *("layer", "filters", "feature-maps", "filter-bank", "winning-scales", "scale-tracking"),
    *("centrality", "entanglement"),
)
"""The figures that the pages show of trained networks."""


def plots() -> dict[str, Figure]:
    """What the pages show and no trained network is needed for, by its place in results/."""
    return {
        "guide/basis.png": plot_basis(),
        "guide/steered.png": plot_steered(random_layer()),
        "guide/theorem.png": plot_theorem(),
        "guide/sampling.png": plot_sampling(),
        "guide/smooth.png": plot_smooth(),
        "figures/sensitivity.png": plot_sensitivity(),
        "figures/resizing.png": plot_resizing(),
    }
