"""Figures that need no trained network: the basis, steering, Theorem 1, sampling, sensitivity, resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from paper import layers, measures, theorem
from paper.curves import COLOURS, GREY, SHADE, frame, label, panels, styled
from scalesteer import harmonics
from scalesteer.harmonics import PAPER_SCALES, LogRadialBasis
from scalesteer.nn import ScaleSteerableConv2d


def signed_root(values: Any) -> Any:
    """The centre is far above the rest; the square root of the magnitude makes the rings visible."""
    return np.sign(values) * np.abs(values) ** 0.5


def imshow_signed(axis: Any, values: Any, title: str = "", limit: float = 0) -> None:
    """An array as an image: zero in white, negative blue, positive red; the darkest at `limit`, or at the largest."""
    limit = limit or float(np.abs(values).max()) or 1.0
    axis.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit)
    frame(axis, title)


def steerable(layer: nn.Module) -> ScaleSteerableConv2d:
    """The layer, if it is a scale-steerable one."""
    if not isinstance(layer, ScaleSteerableConv2d):
        raise TypeError(f"the layer must be a ScaleSteerableConv2d, as in ss-cnn (got {type(layer).__name__}).")
    return layer


def centred(values: Any, size: int) -> Any:
    """Put a small odd window into the middle of a larger one."""
    return np.pad(values, (size - values.shape[-1]) // 2)


def random_layer() -> ScaleSteerableConv2d:
    """One filter of the default basis with fixed random coefficients, at the six scales of the paper."""
    layer = ScaleSteerableConv2d(1, 1, scales=PAPER_SCALES, basis="smooth")
    with torch.no_grad():
        layer.coefficients.normal_(generator=torch.Generator().manual_seed(21))
    return layer


def plot_basis() -> Figure:
    """The log-radial harmonics of Eq. 1: three orders, four orientations, real and imaginary parts."""
    basis, finer = LogRadialBasis.preset("paper"), 4
    x, y = (ticks / finer for ticks in harmonics.grid(40 * finer + 1))
    values = np.where(np.hypot(x, y) <= 20, harmonics.evaluate(basis, x, y), 0)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    axes = figure.subplots(len(basis.orders), 8, squeeze=False)
    for i, order in enumerate(basis.orders):
        for j in range(4):
            for column, part, name in ((j, values.real, "Re"), (j + 4, values.imag, "Im")):
                image = part[i, 2 * j + 1]
                degrees = math.degrees(basis.orientations[2 * j + 1])
                imshow_signed(axes[i, column], signed_root(image), f"{name}, k={order:g}, {degrees:.0f}°", limit=1)
    figure.suptitle(
        f"Log-radial harmonics $S_{{kj}}$, m = {basis.m:g}, up to r = 20 (square root of the magnitude, sign kept)",
        fontsize=11,
    )
    return figure


def plot_steered(layer: nn.Module, channel: int = 0) -> Figure:
    """One filter of a layer steered through its scales, as computed and at equal visible size."""
    layer = steerable(layer)
    with torch.no_grad():
        filters = [f[channel, 0].cpu().numpy() for f in layer.filters()]
        fine = layer.with_scales(tuple(6 * s for s in layer.scales))
        smooth = [f[channel, 0].cpu().numpy() for f in fine.filters()]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(2, len(filters), squeeze=False)
    for i, (scale, weight) in enumerate(zip(layer.scales, filters, strict=True)):
        n = weight.shape[0]
        imshow_signed(axes[0, i], signed_root(centred(weight, layer.sizes[-1])), f"s = {scale:.2f}, {n} x {n}")
        imshow_signed(axes[1, i], signed_root(smooth[i]))
    axes[0, 0].set_ylabel("pixels as computed", fontsize=9)
    axes[1, 0].set_ylabel("drawn to one size,\non a grid six times finer", fontsize=9)
    number = {6: "six"}.get(len(filters), str(len(filters)))
    figure.suptitle(
        f"One set of coefficients, {number} scales: no interpolation anywhere (square root of the magnitude)",
        fontsize=11,
    )
    return figure


def plot_theorem() -> Figure:
    """Error of Theorem 1 on Cartesian grids against pitch, and with its sign or power broken."""
    pitches = [2.0**-e for e in range(1, 7)]
    figure, axis = panels(1, 6.4, 4.2)
    found = {f"order {order:g}": theorem.grid_deviations(order, 2.0, pitches) for order in theorem.THEOREM_ORDERS}
    for name, errors, colour, marker in styled(found):
        slope = np.polyfit(np.log(pitches), np.log(errors), 1)[0]
        axis.loglog(pitches, errors, f"{marker}-", color=colour, label=f"{name} (slope {slope:.2f})")
    broken: tuple[tuple[dict[str, float], str, str], ...] = (
        ({"sign": 1}, "phase with the other sign", "--"),
        ({"power": 0.0}, "no $s^{m-2}$", ":"),
    )
    for change, name, style in broken:
        axis.loglog(pitches, theorem.grid_deviations(1.0, 2.0, pitches, **change), style, color=GREY, label=name)
    axis.set_xticks(pitches, [f"1/{round(1 / h)}" for h in pitches])
    axis.minorticks_off()
    axis.set_title("How far the two sides of Theorem 1 are apart on pixel grids, s = 2", fontsize=11)
    x = f"pitch of the grid (radius of the patch {theorem.RADIUS})"
    label(axis, x, "relative deviation, norm over orientations", legend=8, grid="both")
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
    figure, (left, right) = panels(2, 10, 3.8)
    steering = numbers["steering"]
    presets = {"point sampling (`paper`)": "paper", "area sampling (`area`)": "area", "`smooth`": "smooth"}
    for text, name, colour, marker in styled(presets):
        windows = [key for key in steering[name] if key.startswith("7 ")]
        errors = [100 * steering[name][w] for w in windows]
        left.plot(errors, f"{marker}-", color=colour, label=text.replace("`", ""))
    left.set_xticks(range(len(windows)), [w.replace("->", "→") for w in windows])
    left.set_ylim(bottom=0)
    left.set_title("Steering error by window: response to an enlarged blob", fontsize=10)
    for name, row, colour, marker in styled({f"order {order}": row for order, row in numbers["footnote"].items()}):
        right.loglog(measures.UPSAMPLING, [100 * e for e in row], f"{marker}-", color=colour, label=name)
    right.set_xticks(measures.UPSAMPLING, [f"{u} x" for u in measures.UPSAMPLING])
    right.minorticks_off()
    right.set_title("Point sampling, 7 → 17, after upsampling", fontsize=10)
    label(left, "windows", "steering error, %", legend=8)
    label(right, "upsampling of image and filter", "deviation from Theorem 1, %", legend=8)
    return figure


def plot_sensitivity(orders: Sequence[float] = theorem.SENSITIVITY_ORDERS) -> Figure:
    """Response of each order, its s^(m-2) removed, against the scale of the input, and its period e^(2π/k)."""
    scales = np.exp(np.linspace(0, 2 * np.pi, 150))
    responses, periods = theorem.sensitivity(orders, scales.tolist())
    figure, (left, right) = panels(2, 10, 4.2, width_ratios=(3, 2))
    left.axvspan(PAPER_SCALES[0], PAPER_SCALES[-1], color=SHADE, label="scales of the paper's layer")
    drawn = {f"order {order:g}": (order, row) for order, row in zip(orders, responses, strict=True)}
    for name, (order, row), colour, marker in styled(drawn):
        left.semilogx(scales, (row / row[0]).real, f"{marker}-", color=colour, markevery=12, markersize=4, label=name)
        if periods[order] <= scales[-1] * 1.001:
            left.axvline(periods[order], color=colour, linestyle=":", linewidth=1)
    above: dict[str, Any] = {
        "loc": "lower center",
        "bbox_to_anchor": (0.5, 1),
        "ncols": 5,
        "frameon": False,
        "columnspacing": 1,
    }
    x, y = "scaling of the image s (dotted: one period)", "Re of the response, relative to s = 1"
    label(left, x, y, legend=8, **above)
    fine = np.linspace(min(orders), max(orders), 100)
    right.semilogy(fine, np.exp(2 * np.pi / fine), color=GREY, label="theory, $e^{2\\pi/k}$")
    right.semilogy(list(periods), list(periods.values()), "o", color=COLOURS[1], label="measured")
    label(right, "order k", "factor after which the response repeats", legend=8)
    figure.suptitle("How the response of each order changes when the image is scaled, and when it repeats", fontsize=11)
    return figure


def plot_resizing() -> Figure:
    """Error of steering a filter against that of resizing the input twice, by scale.

    Filters are random: the same ones steered and resized, and rough ones (white noise), which only resizing can hold.
    """
    scales = np.linspace(0.6, 2.4, 19)
    figure, axis = panels(1, 7, 4.4)
    for name, layer, colour, marker in styled(layers.resizing_layers()):
        errors = [100 * layers.resizing_error(layer, s) for s in scales]
        line = "-" if isinstance(layer, ScaleSteerableConv2d) else "--"
        axis.plot(scales, errors, f"{marker}{line}", color=colour, markersize=5, label=name)
    axis.set_ylim(bottom=0)
    axis.set_title("Error of the response at a scale: filters steered, or input resized twice", fontsize=11)
    label(axis, "scale", "error of the response, %", legend=8, loc="upper center")
    return figure


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
