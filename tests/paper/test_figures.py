"""Every figure is drawn from real layers and networks."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

import scalesteer
from paper import __main__ as commands
from paper import curves, distortion, figures, guide, plots
from scalesteer import ScaleSteerableConv2d, pretrained
from scalesteer.app import load
from scalesteer.baselines import LocallyScaleInvariantConv2d
from scalesteer.datasets import ImageSet


@pytest.fixture(scope="module")
def image_set():
    random = torch.Generator().manual_seed(0)
    images = torch.randint(256, (60, 28, 28), generator=random, dtype=torch.uint8)
    scales = 0.3 + 0.7 * torch.rand(60, generator=random)
    return ImageSet(images, torch.randint(10, (60,), generator=random), scales)


@pytest.fixture(scope="module")
def trained(needed, image_set):
    """What figures are drawn from, without the run directories."""

    class Given(figures.Trained):
        ss, lsi, test = needed["ss"], needed["lsi"], image_set

    return Given(lsi_run=Path("given"))


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_is_drawn_and_described(name, trained, tmp_path):
    plot, shown = figures.FIGURES[name]
    figure = plot(*shown(trained))
    assert isinstance(figure, Figure)
    assert re.fullmatch(r"[A-Z].*\.", figures.description(name))
    curves.save(figure, tmp_path / "new" / "figure.png", dpi=40)
    assert (tmp_path / "new" / "figure.png").stat().st_size > 1000


def test_trained_networks_and_images_are_those_of_the_runs(runs, cache, tiny):
    trained = figures.Trained(runs["ss"], runs["lsi"])
    assert isinstance(trained.ss.first, ScaleSteerableConv2d)
    assert isinstance(trained.lsi.first, LocallyScaleInvariantConv2d)
    assert trained.networks == {"SS-CNN": trained.ss, "LocScaleInv-CNN": trained.lsi}
    assert list(figures.Trained(runs["ss"]).networks) == ["SS-CNN"]
    test = load(tiny, "test")
    assert torch.equal(trained.test.images, test.images)
    images, titles = trained.examples
    order = sorted(range(6), key=test.scales.tolist().__getitem__)
    assert torch.equal(images, torch.stack([test.images[i, None].float() / 255 for i in order]))
    assert titles == [f"size {test.scales[i]:.2f}" for i in order]


def test_a_figure_is_drawn_by_its_name(runs, cache):
    (axis, *_) = figures.draw("filter-bank", ss=runs["ss"]).axes
    assert axis.get_title() == "scale 1"
    with pytest.raises(ValueError, match="`name` must be one of '1', '2', '3'"):
        figures.draw("no-such-figure")


def test_the_papers_figures_have_its_numbers(runs, cache, capsys):
    titles = {name: [axis.get_title() for axis in figures.draw(name).axes] for name in ("1", "basis")}
    assert titles["1"] == titles["basis"]
    assert "maximum over scales" in [axis.get_title() for axis in figures.draw("2", runs["ss"]).axes]
    parts = figures.draw("3", runs["ss"], runs["lsi"]).subfigs
    assert [part.get_suptitle()[:4] for part in parts] == ["(a) ", "(b) "]
    assert [half.get_suptitle() for half in parts[0].subfigs] == ["SS-CNN", "LocScaleInv-CNN"]
    assert [axis.get_ylabel() for axis in parts[1].axes[::6]] == ["input", "LocScaleInv-CNN", "SS-CNN"]
    filters, maps = figures.draw("3", runs["ss"]).subfigs
    assert [half.get_suptitle() for half in filters.subfigs] == ["SS-CNN"]
    assert [axis.get_ylabel() for axis in maps.axes[::6]] == ["input", "SS-CNN"]
    assert commands.app.main(["figure"], prog="paper") == 0
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert shown[:3] == [["1", "basis"], ["2", "layer"], ["3", "filters-and-maps"]]
    assert len(shown) == len(figures.FIGURES)


def test_a_network_of_the_package_is_shown_where_no_run_is_given(needed, cache, tmp_path, monkeypatch):
    assert figures.Trained().has_ss
    monkeypatch.setattr(pretrained, "SHIPPED", tmp_path)
    assert not figures.Trained().has_ss
    scalesteer.save_pretrained(needed["ss"], tmp_path / figures.SHIPPED)
    trained = figures.Trained()
    assert trained.has_ss
    assert torch.equal(trained.ss.first.coefficients, needed["ss"].first.coefficients)


def test_a_figure_without_its_run_or_with_another_is_refused(runs, cache):
    with pytest.raises(ValueError, match="shows a trained locally-scale-invariant-cnn: give its run with --lsi RUN"):
        figures.draw("centrality", ss=runs["ss"])
    with pytest.raises(ValueError, match="`ss` must be a run of ss-cnn"):
        figures.draw("filters", ss=runs["lsi"], lsi=runs["lsi"])


def test_the_diagram_shows_the_layers_own_maximum(needed):
    layer, image = needed["ss"].first, needed["image"]
    axes = {a.get_title(): a for a in figures.plot_layer(needed["ss"], image, channel=1).axes}
    drawn = axes["maximum over scales"].get_images()[0].get_array()
    with torch.no_grad():
        x = image[None]
        responses = torch.stack([F.conv2d(x, f, layer.bias, padding=f.shape[-1] // 2) for f in layer.filters()])
    assert np.asarray(drawn) == pytest.approx(responses.amax(0)[0, 1].numpy(), abs=1e-5)


def test_a_layer_without_steering_is_refused():
    for draw in (guide.plot_steered, figures.plot_filter_bank):
        with pytest.raises(TypeError, match="ScaleSteerableConv2d"):
            draw(nn.Conv2d(1, 2, 7))


def test_plots_are_those_that_the_networks_suffice_for(runs, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pretrained, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(plots, "MODULES", (distortion,))  # drawing the others has tests of its own, and takes a minute
    kept = {"figures/distortion.png"}
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in ("filter-bank", "centrality")})
    more = {"figures/filter-bank.png"}
    for flags, expected in (((), kept), (("--ss", str(runs["ss"])), kept | more)):
        monkeypatch.setattr(figures, "list_pretrained", list)  # without the network that comes with the package
        assert commands.app.main(["plots", "--output", str(tmp_path), *flags], prog="paper") == 0
        assert set(capsys.readouterr().out.split()) == {str(tmp_path / place) for place in expected}
        assert all((tmp_path / place).stat().st_size < 3e5 for place in expected)


def test_figures_that_compare_two_networks_need_both(runs, tmp_path, monkeypatch):
    alone = {f"figures/{name}.png" for name in ("layer", "filter-bank", "winning-scales", "scale-tracking")}
    assert set(figures.of_networks(figures.Trained(runs["ss"]))) == alone
    assert set(figures.of_networks(figures.Trained())) == alone  # the SS-CNN of the package
    monkeypatch.setattr(pretrained, "SHIPPED", tmp_path)
    assert figures.of_networks(figures.Trained()) == {}
    both = alone | {f"figures/{name}.png" for name in ("filters", "feature-maps", "centrality", "entanglement")}
    assert set(figures.of_networks(figures.Trained(runs["ss"], runs["lsi"]))) == both
