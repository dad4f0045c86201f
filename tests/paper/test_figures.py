"""Every figure is drawn from real layers and networks."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

from paper import curves, figures, guide
from scalesteer import ScaleSteerableConv2d, create_model, files
from scalesteer.baselines import LocallyScaleInvariantConv2d
from scalesteer.data import ImageSet
from scalesteer.training import load


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


@pytest.fixture
def runs(tiny, tmp_path):
    """A directory each with a network of ours, as a run leaves it."""
    found = {}
    for flag, name in {"ss": "ss-cnn", "lsi": "locally-scale-invariant-cnn"}.items():
        config = replace(tiny, model=name, upsample=1)
        found[flag], weights = tmp_path / flag, create_model(name, upsample=1).state_dict()
        found[flag].mkdir()
        content = files.encode(weights, {"config": config.to_dict()})
        files.write_atomically(found[flag] / "model.safetensors", content)
    return found


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
    assert trained.networks == {"SS-CNN": trained.ss, "locally scale-invariant CNN": trained.lsi}
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
    with pytest.raises(ValueError, match="`name` must be one of 'basis'"):
        figures.draw("no-such-figure")


def test_a_figure_without_its_run_or_with_another_is_refused(runs, cache):
    with pytest.raises(ValueError, match="shows a trained locally-scale-invariant-cnn: give its run with --lsi RUN"):
        figures.draw("filters", ss=runs["ss"])
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
