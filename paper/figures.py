"""The paper's figures of trained networks, and the list of all figures by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from paper import grids, guide, layers
from paper.curves import frame, label, panels, styled
from paper.guide import centred, imshow_signed, signed_root, steerable
from scalesteer import _checks
from scalesteer.data import ImageSet
from scalesteer.harmonics import PAPER_SCALES
from scalesteer.models.network import Network
from scalesteer.training import RunConfig, load, load_model
from scalesteer.training.loop import split_by_scale


def plot_filter_bank(layer: nn.Module) -> Figure:
    """The five strongest filters of a layer at its first scale, one per row, each at all of its scales."""
    layer = steerable(layer)
    with torch.no_grad():
        filters = [f[:, 0].cpu().numpy() for f in layer.filters()]
    strongest = np.argsort(-np.linalg.norm(filters[0], axis=(1, 2)), kind="stable")[:5]
    figure = Figure(figsize=(1.3 * len(filters), 1.3 * len(strongest) + 0.3), layout="constrained")
    axes = figure.subplots(len(strongest), len(filters), squeeze=False)
    for row, channel in zip(axes, strongest, strict=True):
        for axis, weight in zip(row, filters, strict=True):
            imshow_signed(axis, signed_root(centred(weight[channel], layer.sizes[-1])))
    for axis, scale in zip(axes[0], layer.scales, strict=True):
        axis.set_title(f"scale {scale:.2g}", fontsize=9)
    return figure


def plot_filters(ss: Network, lsi: Network) -> Figure:
    """First-layer filters at scale 1 of SS-CNN and of the locally scale-invariant CNN, side by side."""
    banks = {title: layers.unit_filters(model.first) for title, model in _pair(ss, lsi).items()}
    lines = max(-(-len(bank) // 6) for bank in banks.values())
    figure = Figure(figsize=(9, 0.75 * lines + 0.4), layout="constrained")
    halves: Any = figure.subfigures(1, 2, wspace=0.05)
    for part, (title, bank) in zip(halves, banks.items(), strict=True):
        axes = part.subplots(lines, 6, squeeze=False).ravel()
        for axis in axes:
            axis.set_axis_off()
        for axis, weight in zip(axes, bank, strict=False):
            imshow_signed(axis, weight)
        part.suptitle(title, fontsize=11)
    return figure


def _pair(ss: Network, lsi: Network) -> dict[str, Network]:
    return {"SS-CNN": ss, "locally scale-invariant CNN": lsi}


def plot_feature_maps(ss: Network, lsi: Network, images: Tensor) -> Figure:
    """Average first-layer feature maps of both networks, for several inputs."""
    figure = Figure(figsize=(1.4 * len(images) + 0.6, 4.6), layout="constrained")
    axes = figure.subplots(3, len(images), squeeze=False)
    with torch.no_grad():
        maps = {name: F.relu(m.first(m.prepare(images))).mean(1) for name, m in _pair(ss, lsi).items()}
    for row, (name, shown) in zip(axes, {"input": images[:, 0], **maps}.items(), strict=True):
        for axis, values in zip(row, shown.cpu().numpy(), strict=True):
            axis.imshow(values, cmap="gray")
            frame(axis)
        row[0].set_ylabel(name.replace("scale-", "scale-\n").replace("invariant ", "invariant\n"), fontsize=9)
    figure.suptitle("Average first-layer feature maps", fontsize=11)
    return figure


def plot_layer(model: Network, image: Tensor, channel: int | None = None) -> Figure:
    """The layer as a diagram: input, filters at all scales, responses, maximum, winning scale.

    Args:
        model: A network whose first layer is scale-steerable.
        image: What it sees, `(1, H, W)`.
        channel: Which filter; the one that responds most by default.
    """
    layer = steerable(model.first)
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
    frame(axis, "input")
    limit = max(float(r[channel].abs().max()) for r in responses)
    for i, scale in enumerate(layer.scales):
        axis = figure.add_subplot(grid[i, 2])
        imshow_signed(axis, signed_root(centred(filters[i], layer.sizes[-1])), "filters" if i == 0 else "")
        axis.set_ylabel(f"s = {scale:.2g}", fontsize=8)
        axis = figure.add_subplot(grid[i, 4])
        axis.imshow(responses[i][channel].cpu().numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
        frame(axis, "responses" if i == 0 else "")
    for column, sign in ((1, "⋆"), (3, "→"), (5, "max\n→")):
        axis = figure.add_subplot(grid[:, column])
        axis.set_axis_off()
        axis.text(0.5, 0.5, sign, ha="center", va="center", fontsize=13)
    axis = figure.add_subplot(grid[:, 6])
    imshow_signed(axis, best[0, channel].cpu().numpy(), "maximum over scales")
    axis = figure.add_subplot(grid[:, 7])
    _scale_legend(axis, _scale_map(axis, winner[0, channel], best[0, channel], layer.scales), layer.scales)
    frame(axis, "winning scale")
    return figure


def plot_winning_scales(model: Network, images: Tensor, titles: Sequence[str]) -> Figure:
    """Images, their strongest first-layer responses and the scales that won, one column per image."""
    response, winner = layers.winning_scales(model, images)
    scales: tuple[float, ...] = model.first.scales  # type: ignore[assignment]
    figure = Figure(figsize=(1.6 * len(images) + 1, 5), layout="constrained")
    axes = figure.subplots(3, len(images), squeeze=False)
    for i, image in enumerate(images):
        axes[0, i].imshow(image[0].cpu().numpy(), cmap="gray", vmin=0, vmax=1)
        frame(axes[0, i], titles[i])
        axes[1, i].imshow(response[i].cpu().numpy(), cmap="magma", vmin=0)
        frame(axes[1, i])
        drawn = _scale_map(axes[2, i], winner[i], response[i], scales)
        frame(axes[2, i], f"mean {layers.mean_winning_scale(response[i], winner[i], scales):.2f}")
    _scale_legend(axes[2, -1], drawn, scales)
    for row, name in zip(axes[:, 0], ("input", "strongest response", "winning scale"), strict=True):
        row.set_ylabel(name, fontsize=9)
    return figure


def _scale_map(axis: Any, winner: Tensor, response: Tensor, scales: Sequence[float]) -> Any:
    """The index of the winning scale in colour where the response is strong."""
    shown = np.ma.masked_array(winner.cpu().numpy(), ~layers.strong(response).cpu().numpy())
    axis.set_facecolor("#f2f2f2")
    return axis.imshow(
        shown, cmap=matplotlib.colormaps["viridis"].resampled(len(scales)), vmin=-0.5, vmax=len(scales) - 0.5
    )


def _scale_legend(axis: Any, drawn: Any, scales: Sequence[float]) -> None:
    """Which colour is which scale, at the right of a map."""
    bar = axis.figure.colorbar(drawn, cax=axis.inset_axes((1.04, 0, 0.07, 1)), ticks=range(len(scales)))
    bar.ax.set_yticklabels([f"{s:.2g}" for s in scales], fontsize=8)


def plot_scale_tracking(models: Mapping[str, Network], images: ImageSet) -> Figure:
    """The mean scale that wins in the first layer against the size of the object, ± standard deviation, by network."""
    few = images.first(min(700, len(images)))
    figure, axis = panels(1)
    for name, model, colour, marker in styled(models):
        sizes, means = layers.scale_tracking(model, few)
        bins = list(split_by_scale(sizes))
        middles, groups = [sum(ends) / 2 for ends, _ in bins], [means[chosen] for _, chosen in bins]
        centres, spread = [group.mean() for group in groups], [group.std() for group in groups]
        text = f"{name}: correlation of logarithms {np.corrcoef(np.log(sizes), np.log(means))[0, 1]:.2f}"
        axis.errorbar(middles, centres, spread, color=colour, marker=marker, capsize=3, label=text)
    label(axis, "scale of the object (bins of 0.1)", "mean winning scale")
    return figure


def plot_centrality(ss: Network, lsi: Network) -> Figure:
    """Centre of mass and share of |filter| within half the radius, a dot for each first-layer filter, both networks."""
    figure, axis = panels(1, 6, 4)
    for name, model, colour, marker in styled(_pair(ss, lsi)):
        bank = layers.unit_filters(model.first)
        offset, share = layers.centrality(bank)
        text = f"{name}: {offset.mean():.2f}, {share.mean():.0%} on average"
        axis.plot(offset, share, marker, color=colour, alpha=0.7, label=text)
        even = float(layers.centrality(np.ones((1, *bank.shape[1:])))[1][0])
    axis.axhline(even, color="grey", linestyle=":", label=f"mass spread evenly: {even:.0%}")
    axis.set_ylim(0, 1)
    axis.set_xlim(left=-0.01)
    label(axis, "distance of the centre of mass, in radii", "share of |filter| within half the radius", legend=8)
    return figure


def plot_entanglement(ss: Network, lsi: Network) -> Figure:
    """How much a change of scale looks like a move (`layers.entanglement`), mean over filters, by scale."""
    scales = PAPER_SCALES[1:]
    figure, axes = panels(2, 9, 3.8)
    for name, model, colour, marker in styled(_pair(ss, lsi)):
        values = np.array([layers.entanglement(model.first, s) for s in scales])  # (S, 2, C)
        for axis, row in zip(axes, values.mean(2).T, strict=True):
            axis.plot(scales, row, f"{marker}-", color=colour, label=name)
    for axis, y in zip(
        axes, ("best move |t*|, in radii of the filter", "gain in similarity by that move"), strict=True
    ):
        axis.set_ylim(bottom=0)
        label(axis, "scale", y, legend=8 if axis is axes[0] else 0)
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
        return {"SS-CNN": self.ss} if self.lsi_run is None else _pair(self.ss, self.lsi)

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


FIGURES: dict[str, tuple[Callable[..., Figure], Callable[[Trained], tuple[Any, ...]]]] = {
    "basis": (guide.plot_basis, lambda t: ()),
    "steered": (guide.plot_steered, lambda t: (t.ss.first,)),
    "filter-bank": (plot_filter_bank, lambda t: (t.ss.first,)),
    "filters": (plot_filters, lambda t: (t.ss, t.lsi)),
    "feature-maps": (plot_feature_maps, lambda t: (t.ss, t.lsi, t.examples[0])),
    "layer": (plot_layer, lambda t: (t.ss, t.examples[0][-1])),
    "winning-scales": (plot_winning_scales, lambda t: (t.ss, *t.examples)),
    "scale-tracking": (plot_scale_tracking, lambda t: (t.networks, t.test)),
    "sensitivity": (guide.plot_sensitivity, lambda t: ()),
    "centrality": (plot_centrality, lambda t: (t.ss, t.lsi)),
    "entanglement": (plot_entanglement, lambda t: (t.ss, t.lsi)),
    "resizing": (guide.plot_resizing, lambda t: ()),
}
"""The figures of the paper and of what its discussion claims: who draws each, and from what."""


def description(name: str) -> str:
    """What a figure shows, in one line."""
    return str(FIGURES[name][0].__doc__).partition("\n")[0]


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
    plot, shown = FIGURES[_checks.lookup("name", name, tuple(FIGURES))]
    return plot(*shown(Trained(ss, lsi, data_dir)))


def of_networks(runs: Path, data_dir: Path | None = None) -> dict[str, Figure]:
    """The figures that show trained networks, by their place in results/; none without the runs of the first split."""
    ss, lsi = (runs / grids.configuration(method).name for method in ("SS-CNN", "LocScaleInv-CNN"))
    if not all((run / "model.safetensors").exists() for run in (ss, lsi)):
        return {}
    places = {name: f"figures/{name}.png" for name, (plot, _) in FIGURES.items() if plot.__module__ == __name__}
    return {place: draw(name, ss, lsi, data_dir) for name, place in places.items()}
