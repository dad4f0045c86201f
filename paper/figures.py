"""The paper's figures of trained networks, and the list of all figures by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure, SubFigure
from torch import Tensor, nn

from paper import guide, layers
from paper.curves import GREY, frame, label, panels, styled
from paper.guide import centred, imshow_signed, signed_root, steerable
from scalesteer import _checks
from scalesteer.app import Run, load, load_model, make_run, read_run
from scalesteer.app.evaluation import split_by_scale
from scalesteer.datasets import ImageSet
from scalesteer.harmonics import PAPER_SCALES
from scalesteer.models import network_of
from scalesteer.models.network import Network
from scalesteer.pretrained import list_pretrained

NAMES = ("SS-CNN", "LocScaleInv-CNN")
"""The networks of these figures, as the tables name them."""
SHIPPED = "ss-cnn-mnist-scale"
"""The name of a trained SS-CNN; if it comes with the package, figures take it where no run is given."""


def plot_filter_bank(layer: nn.Module) -> Figure:
    """The five strongest filters of a layer at its first scale, one per row, each at all of its scales."""
    layer = steerable(layer)
    with torch.no_grad():
        filters = [f[:, 0].cpu().numpy() for f in layer.filters()]
    strongest = np.argsort(-np.linalg.norm(filters[0], axis=(1, 2)), kind="stable")[:5]
    figure = Figure(figsize=(1.3 * len(filters), 1.3 * len(strongest) + 0.6), layout="constrained")
    axes = figure.subplots(len(strongest), len(filters), squeeze=False)
    for row, channel in zip(axes, strongest, strict=True):
        for axis, weight in zip(row, filters, strict=True):
            imshow_signed(axis, signed_root(centred(weight[channel], layer.sizes[-1])))
    for axis, scale in zip(axes[0], layer.scales, strict=True):
        axis.set_title(f"scale {scale:.2g}", fontsize=9)
    count = {5: "five"}.get(len(strongest), str(len(strongest)))
    figure.suptitle(
        f"The {count} strongest filters of the first layer, a row each (square root of the magnitude)", fontsize=11
    )
    return figure


def plot_filters(ss: Network, lsi: Network | None) -> Figure:
    """First-layer filters at scale 1 of SS-CNN (left) and, if there is one, of LocScaleInv-CNN (right)."""
    figure = Figure(figsize=(9, 0.75 * _filter_lines(ss, lsi) + 0.7), layout="constrained")
    _draw_filters(figure, ss, lsi)
    return figure


def _filter_lines(ss: Network, lsi: Network | None) -> int:
    return max(-(-len(layers.unit_filters(model.first)) // _columns(lsi)) for model in _pair(ss, lsi).values())


def _columns(lsi: Network | None) -> int:
    """How many filters of a network stand beside each other."""
    return 12 if lsi is None else 6


def _draw_filters(figure: Figure | SubFigure, ss: Network, lsi: Network | None, mark: str = "") -> None:
    lines, columns, pair = _filter_lines(ss, lsi), _columns(lsi), _pair(ss, lsi)
    figure.suptitle(f"{mark}First-layer filters at scale 1, each in a colour scale of its own", fontsize=11)
    (halves,) = figure.subfigures(1, len(pair), wspace=0.05, squeeze=False)
    for part, (title, model) in zip(halves, pair.items(), strict=True):
        bank = layers.unit_filters(model.first)
        axes = part.subplots(lines, columns, squeeze=False).ravel()
        for axis in axes:
            axis.set_axis_off()
        for axis, weight in zip(axes, bank, strict=False):
            imshow_signed(axis, weight)
        part.suptitle(title, fontsize=10)


def _pair(ss: Network, lsi: Network | None) -> dict[str, Network]:
    """Both, or the first alone, by the names of the tables, SS-CNN first."""
    return {name: model for name, model in zip(NAMES, (ss, lsi), strict=True) if model is not None}


def plot_feature_maps(ss: Network, lsi: Network | None, images: Tensor) -> Figure:
    """Average first-layer feature maps of LocScaleInv-CNN, if there is one, and of SS-CNN below, for several inputs."""
    figure = Figure(figsize=(1.4 * len(images) + 0.6, 3.2 if lsi is None else 4.6), layout="constrained")
    _draw_feature_maps(figure, ss, lsi, images)
    return figure


def _draw_feature_maps(
    figure: Figure | SubFigure, ss: Network, lsi: Network | None, images: Tensor, mark: str = ""
) -> None:
    axes = figure.subplots(2 if lsi is None else 3, len(images), squeeze=False)
    with torch.no_grad():
        maps = {
            name: F.relu(m.first(m.prepare(images))).mean(1) for name, m in reversed(_pair(ss, lsi).items())
        }  # in the paper's order
    for row, (name, shown) in zip(axes, {"input": images[:, 0], **maps}.items(), strict=True):
        for axis, values in zip(row, shown.cpu().numpy(), strict=True):
            axis.imshow(values, cmap="gray")
            frame(axis)
        row[0].set_ylabel(name, fontsize=9)
    figure.suptitle(f"{mark}Average first-layer feature maps, each in a grey scale of its own", fontsize=11)


def plot_filters_and_maps(ss: Network, lsi: Network | None, images: Tensor) -> Figure:
    """First-layer filters of both networks, or of SS-CNN (a), and their average feature maps for several inputs (b)."""
    heights = 0.75 * _filter_lines(ss, lsi) + 0.7, 3.4 if lsi is None else 4.8
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    (above,), (below,) = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)
    _draw_filters(above, ss, lsi, "(a) ")
    _draw_feature_maps(below, ss, lsi, images, "(b) ")
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
    figure = Figure(figsize=(11, count + 0.6), layout="constrained")
    figure.suptitle(
        "The layer of SS-CNN: one filter at all scales, its responses, and their maximum at each pixel", fontsize=11
    )
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
    for column, sign in ((1, r"$\star$"), (3, "→"), (5, "max\n→")):
        axis = figure.add_subplot(grid[:, column])
        axis.set_axis_off()
        axis.text(0.5, 0.5, sign, ha="center", va="center", fontsize=20)
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
    figure = Figure(figsize=(1.6 * len(images) + 1, 5.3), layout="constrained")
    figure.suptitle("Which scale of the first layer wins, where the response is strong", fontsize=11)
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
    axis.set_title("Mean scale that wins in the first layer, ± standard deviation over images", fontsize=11)
    label(axis, "scale of the object (bins of 0.1)", "mean winning scale")
    return figure


def plot_centrality(ss: Network, lsi: Network) -> Figure:
    """Centre of mass and share of |filter| within half the radius, a dot for each first-layer filter, both networks."""
    figure, axis = panels(1, 6.4, 4.4)
    axis.set_title("How central first-layer filters are, a mark for each filter", fontsize=11)
    for name, model, colour, marker in styled(_pair(ss, lsi)):
        bank = layers.unit_filters(model.first)
        offset, share = layers.centrality(bank)
        text = f"{name}: {offset.mean():.2f}, {share.mean():.0%} on average"
        axis.plot(offset, share, marker, color=colour, alpha=0.7, label=text)
        even = float(layers.centrality(np.ones((1, *bank.shape[1:])))[1][0])
    axis.axhline(even, color=GREY, linestyle=":", label=f"mass spread evenly: {even:.0%}")
    axis.set_ylim(0, 1)
    axis.set_xlim(left=-0.01)
    label(axis, "distance of the centre of mass, in radii", "share of |filter| within half the radius", legend=8)
    return figure


def plot_entanglement(ss: Network, lsi: Network) -> Figure:
    """How much a change of scale looks like a move (`layers.entanglement`), mean over filters, by scale."""
    scales = PAPER_SCALES[1:]
    figure, axes = panels(2, 9, 4.1)
    figure.suptitle("How much an enlarged first-layer filter looks like a moved one, mean over filters", fontsize=11)
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


# Which figure shows what


@dataclass(frozen=True)
class Trained:
    """The trained networks that a figure shows, and the test images of their split; each is loaded when needed."""

    ss_run: Path | None = None
    lsi_run: Path | None = None
    data_dir: Path | None = None

    @property
    def has_ss(self) -> bool:
        """Whether there is an SS-CNN: a run is given, or one comes with the package."""
        return self.ss_run is not None or SHIPPED in list_pretrained()

    @cached_property
    def _ss(self) -> tuple[Network, Run]:
        return _load_run("ss", self.ss_run or (Path(SHIPPED) if self.has_ss else None), "ss-cnn")

    @property
    def ss(self) -> Network:
        """The SS-CNN: of its run, or the one that comes with the package."""
        return self._ss[0]

    @cached_property
    def lsi(self) -> Network:
        """The LocScaleInv-CNN."""
        return _load_run("lsi", self.lsi_run, "locally-scale-invariant-cnn")[0]

    @property
    def rival(self) -> Network | None:
        """The LocScaleInv-CNN, if its run is given."""
        return None if self.lsi_run is None else self.lsi

    @property
    def networks(self) -> dict[str, Network]:
        """By name; the LocScaleInv-CNN only if its run is given."""
        return _pair(self.ss, self.rival)

    @cached_property
    def test(self) -> ImageSet:
        """The test images of the SS-CNN's split."""
        return load(self._ss[1], "test", self.data_dir)

    @cached_property
    def examples(self) -> tuple[Tensor, list[str]]:
        """The first six test images, `(6, 1, H, W)` in [0, 1], from the smallest object to the largest, with titles."""
        sizes = self.test.sizes[:6]
        order = sizes.argsort()
        titles = [f"size {size:.2f}" for size in sizes[order].tolist()]
        return self.test.images[order, None].float() / 255, titles


def _load_run(flag: str, run: Path | None, model: str) -> tuple[Network, Run]:
    if run is None:
        how = f"`scalesteer train --model {model}` makes one"
        raise ValueError(f"the figure shows a trained {model}: give its run with --{flag} RUN ({how}).")
    network, made = load_model(run), read_run(run)
    name = network_of(network).arguments["name"]
    if name != model:
        raise ValueError(f"`{flag}` must be a run of {model} (got one of {name}).")
    return network_of(network), made or make_run()  # a network of the package is for the first split of MNIST-Scale


FIGURES: dict[str, tuple[Callable[..., Figure], Callable[[Trained], tuple[Any, ...]]]] = {
    "basis": (guide.plot_basis, lambda t: ()),
    "layer": (plot_layer, lambda t: (t.ss, t.examples[0][-1])),
    "filters-and-maps": (plot_filters_and_maps, lambda t: (t.ss, t.rival, t.examples[0])),
    "filters": (plot_filters, lambda t: (t.ss, t.rival)),
    "feature-maps": (plot_feature_maps, lambda t: (t.ss, t.rival, t.examples[0])),
    "steered": (guide.plot_steered, lambda t: (t.ss.first,)),
    "filter-bank": (plot_filter_bank, lambda t: (t.ss.first,)),
    "winning-scales": (plot_winning_scales, lambda t: (t.ss, *t.examples)),
    "scale-tracking": (plot_scale_tracking, lambda t: (t.networks, t.test)),
    "sensitivity": (guide.plot_sensitivity, lambda t: ()),
    "centrality": (plot_centrality, lambda t: (t.ss, t.lsi)),
    "entanglement": (plot_entanglement, lambda t: (t.ss, t.lsi)),
    "resizing": (guide.plot_resizing, lambda t: ()),
}
"""The figures of the paper and of what its discussion claims: who draws each, and from what."""
NUMBERS = {"1": "basis", "2": "layer", "3": "filters-and-maps", "3a": "filters", "3b": "feature-maps"}
"""The figures that the paper has, by its numbers."""


def listing() -> str:
    """All figures, a line each: the paper's number if it has one, the name, and what it shows."""
    numbers = {name: number for number, name in NUMBERS.items()}
    return "\n".join(f"{numbers.get(name, ''):4}{name:18}{description(name)}" for name in FIGURES)


def description(name: str) -> str:
    """What a figure shows, in one line."""
    return str(FIGURES[name][0].__doc__).partition("\n")[0]


def draw(name: str, ss: Path | None = None, lsi: Path | None = None, data_dir: Path | None = None) -> Figure:
    """Draw a figure of `FIGURES` with trained networks and the images of their split.

    Args:
        name: One of `FIGURES`, or a number of `NUMBERS`.
        ss: A run of ss-cnn, where the figure shows a trained network; by default `SHIPPED`, if the package has it.
        lsi: A run of locally-scale-invariant-cnn, where the figure compares with it. Figure 3 has one half without it.
        data_dir: Where the original files are, if not in the cache.

    Raises:
        ValueError: If the figure needs a run that is not given, or one of another network.
    """
    name = _checks.lookup("name", name, (*NUMBERS, *FIGURES))
    return _draw(NUMBERS.get(name, name), Trained(ss, lsi, data_dir))


def of_networks(trained: Trained) -> dict[str, Callable[[], Figure]]:
    """What draws the figures of trained networks, by their place in results/, as far as the given networks suffice."""
    own = {name: plot for name, (plot, _) in FIGURES.items() if plot.__module__ == __name__ and name != NUMBERS["3"]}
    return {
        f"figures/{name}.png": partial(_draw, name, trained)
        for name, plot in own.items()
        if trained.has_ss and (trained.lsi_run or "lsi" not in inspect.signature(plot).parameters)
    }


def _draw(name: str, trained: Trained) -> Figure:
    plot, shown = FIGURES[name]
    return plot(*shown(trained))
