"""The animation shows the formula: the filter by Eq. 1 and 3, a digit in proportion, a response that stays."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from paper import __main__ as commands
from paper import animation, distortion, figures, plots
from scalesteer.datasets import ImageSet
from scalesteer.harmonics import LogRadialBasis


def blob(size=28):
    """A smooth bar, off the centre."""
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    return torch.from_numpy(np.exp(-((x - 3) ** 2) / 8 - (y + 2) ** 2 / 40))


def by_the_formula(layer, channel, scale, x, y):
    """A filter of the layer at scale 1, and then at another, at a point in pixels of the network: Eq. 1 and 3."""
    basis, r, angle = layer.basis, math.hypot(x, y), math.atan2(y, x)
    total = 0
    for k, order in enumerate(basis.orders):
        for j, orientation in enumerate(basis.orientations):
            apart = [abs((angle - orientation - turn + math.pi) % (2 * math.pi) - math.pi) for turn in (0, math.pi)]
            lobes = sum(math.exp(-(d**2) / (2 * basis.sigma**2)) for d in apart)
            harmonic = r**-basis.m * lobes * np.exp(1j * order * math.log(r))
            factor = scale ** (basis.m - 2) * np.exp(-1j * order * math.log(scale))
            total += factor * complex(*layer.coefficients[channel, 0, k, j].tolist()) * harmonic
    return total.real


@pytest.mark.parametrize("scale", [1.0, 1.7, 2.4])
def test_the_filter_is_that_of_the_formula(needed, scale):
    layer, finer = needed["ss"].first, animation.FINER
    shown = animation.fine_filter(layer, 1, scale)
    middle = shown.shape[0] // 2
    assert shown.shape[0] == 2 * math.floor(3.5 * scale * finer) + 1
    for column, row in ((12, 2), (9, 9), (-11, 6)):  # far enough from the centre for a mean over a small pixel
        # A fine pixel has 1 / FINER^2 of the area, so that sums over either grid agree.
        expected = by_the_formula(layer, 1, scale, column / finer, row / finer) / finer**2
        assert shown[middle - row, middle + column] == pytest.approx(expected, rel=0.03, abs=2e-5)


def test_the_image_grows_about_its_centre():
    small, large = (animation.growing(blob(), 112, scale) for scale in (animation.LARGEST / 2, animation.LARGEST))
    assert small.sum() == pytest.approx(large.sum() / 4, rel=0.01)
    ticks = np.arange(112) - 55.5
    (right, down), (far_right, far_down) = (
        ((image.sum(0) * ticks).sum() / image.sum(), (image.sum(1) * ticks).sum() / image.sum())
        for image in (small, large)
    )
    assert (right, down) == pytest.approx((far_right / 2, far_down / 2), abs=0.2)


def test_the_response_stays_where_the_filter_grows_with_the_image_only(needed):
    scales = np.geomspace(1, animation.LARGEST, 5).tolist()
    enlarged, kept = animation.compared(animation.moments(needed["ss"], 1, blob(), scales))
    assert enlarged == pytest.approx(np.ones(5), abs=0.06)
    assert abs(kept[-1] - 1) > 0.2


def test_another_layers_filters_are_drawn_by_points_or_areas_alike(needed):
    layer = needed["ss"].first
    assert layer.basis == LogRadialBasis.preset("area")
    before = animation.fine_filter(layer, 0, 1.5)
    other = type(layer)(1, len(layer.coefficients), scales=layer.scales, basis="paper")
    other.load_state_dict(layer.state_dict())
    assert animation.fine_filter(other, 0, 1.5) == pytest.approx(before)


@pytest.fixture
def images():
    pixels = torch.zeros(3, 28, 28, dtype=torch.uint8)
    for index, size in enumerate((4, 20, 12)):
        pixels[index, 4 : 4 + size, 10:16] = 255
    return ImageSet(pixels, torch.tensor([2, 2, 7]), torch.tensor([0.3, 0.9, 0.5]))


def test_the_largest_image_of_a_class_is_shown(images):
    assert torch.equal(animation.largest_image(images, 2), images.images[1] / 255)
    with pytest.raises(ValueError, match=r"a class of the images \(got 5\)"):
        animation.largest_image(images, 5)


def test_the_animation_goes_there_and_back_in_a_small_file(needed, images, tmp_path):
    path = animation.draw(needed["ss"], images.images[1] / 255, tmp_path / "new" / "a.gif", frames=4)
    assert path.stat().st_size < 4 / animation.FRAMES * 2e6  # as many as by default take at most 2 MB
    with Image.open(path) as gif:
        assert (gif.n_frames, gif.size, gif.info["loop"]) == (6, (animation.WIDTH, animation.HEIGHT), 0)
        shown, times = [], []
        for index in range(6):
            gif.seek(index)
            shown.append(np.asarray(gif.convert("RGB"), int))
            times.append(gif.info["duration"])
    assert times == [animation.REST, *[animation.STEP] * 2, animation.REST, *[animation.STEP] * 2]
    changed = [np.abs(one - shown[0]).max(-1) > 60 for one in shown]
    assert 0 < changed[1].sum() < changed[2].sum() < changed[3].sum()  # filter, digit and response grow
    assert (changed[1] == changed[5]).all()
    assert (changed[2] == changed[4]).all()


def test_a_filter_that_is_not_there_is_refused(needed, images, tmp_path):
    with pytest.raises(ValueError, match=r"`channel` must be 0 to 3, a filter of the layer \(got 4\)"):
        animation.draw(needed["ss"], blob(), tmp_path / "a.gif", channel=4)
    with pytest.raises(TypeError, match="ScaleSteerableConv2d"):
        animation.moments(needed["plain"], 0, blob(), [1.0])


def test_the_command_writes_a_gif(runs, cache, tmp_path, capsys):
    flags = ["--ss", str(runs["ss"]), "--frames", "2", "--digit", "3"]
    assert commands.app.main(["animation", *flags, "--output", str(tmp_path / "a.gif")], prog="paper") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.gif'}\n"
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 2
    assert commands.app.main(["animation", *flags, "--output", str(tmp_path / "a.png")], prog="paper") == 2
    assert "`output` must be one of '.gif'" in capsys.readouterr().err


def test_plots_are_those_that_the_networks_suffice_for(runs, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "MODULES", (distortion,))  # drawing the others has tests of its own, and takes a minute
    kept = {"figures/distortion.png"}
    monkeypatch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in ("filter-bank", "centrality")})
    monkeypatch.setattr(animation, "FRAMES", 2)
    more = {"figures/filter-bank.png", "guide/steering.gif"}
    for flags, expected in (((), kept), (("--ss", str(runs["ss"])), kept | more)):
        assert commands.app.main(["plots", "--output", str(tmp_path), *flags], prog="paper") == 0
        assert set(capsys.readouterr().out.split()) == {str(tmp_path / place) for place in expected}
        assert all((tmp_path / place).stat().st_size < 3e5 for place in expected)


def test_figures_that_compare_two_networks_need_both(runs):
    assert figures.of_networks(figures.Trained()) == {}
    alone = {f"figures/{name}.png" for name in ("layer", "filter-bank", "winning-scales", "scale-tracking")}
    assert set(figures.of_networks(figures.Trained(runs["ss"]))) == alone
    both = alone | {f"figures/{name}.png" for name in ("filters", "feature-maps", "centrality", "entanglement")}
    assert set(figures.of_networks(figures.Trained(runs["ss"], runs["lsi"]))) == both
