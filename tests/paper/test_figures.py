"""Every figure is drawn from real layers and networks, and the numbers of measures.py are what they say they are."""

import errno
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

from paper import figures, measures
from scalesteer import LogRadialBasis, ScaleSteerableConv2d, create_model, files
from scalesteer.baselines import LocallyScaleInvariantConv2d
from scalesteer.data import ImageSet
from scalesteer.testing import two_blobs
from scalesteer.training import load

SMALL = {"upsample": 1, "widths": (4, 3, 3), "hidden": 8}


@pytest.fixture(scope="module")
def needed():
    """What the figures' required arguments are called, and something real for each."""
    torch.manual_seed(0)
    ss = create_model("ss-cnn", scales=(0.6, 1.0, 1.7), basis="area", **SMALL).eval()
    lsi = create_model("locally-scale-invariant-cnn", **SMALL).eval()
    return {
        "ss": ss,
        "lsi": lsi,
        "model": ss,
        "layer": ss.first,
        "models": {"SS-CNN": ss, "plain": create_model("plain-cnn", **SMALL).eval()},
        "images": torch.rand(3, 1, 28, 28),
        "image": torch.rand(1, 28, 28),
    }


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
    description, draw = figures.FIGURES[name]
    figure = draw(trained)
    assert isinstance(figure, Figure)
    assert description
    assert "\n" not in description
    figures.save(figure, tmp_path / "new" / "figure.png", dpi=40)
    assert (tmp_path / "new" / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_that_cannot_be_written_leaves_the_old_one(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"figure{suffix}"
    figures.save(Figure(), path, dpi=20)
    before = path.read_bytes()
    real = Figure.savefig

    def half(figure, file, **options):
        real(figure, file, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="No space left"):
        figures.save(Figure(figsize=(3, 3)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


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


def test_the_pages_plots_have_the_measured_curves():
    plots = figures.plots()
    assert {path.split("/")[0] for path in plots} == {"guide", "figures"}
    (axis,) = plots["guide/theorem.png"].axes
    assert [line.get_label() for line in axis.get_lines()][-1] == "no $s^{m-2}$"
    left, right = plots["guide/sampling.png"].axes
    numbers = measures.guide_numbers()
    assert list(left.get_lines()[1].get_ydata())[-1] == 100 * numbers["steering"]["area"]["7 -> 17"]
    assert list(right.get_lines()[3].get_ydata()) == [100 * error for error in numbers["footnote"]["4.0"]]


def test_a_figure_without_its_run_or_with_another_is_refused(runs, cache):
    with pytest.raises(ValueError, match="shows a trained locally-scale-invariant-cnn: give its run with --lsi RUN"):
        figures.draw("filters", ss=runs["ss"])
    with pytest.raises(ValueError, match="`ss` must be a run of ss-cnn"):
        figures.draw("filters", ss=runs["lsi"], lsi=runs["lsi"])


@pytest.mark.parametrize("m", [0.5, 1.0])
def test_the_response_of_an_order_repeats_after_its_period(m):
    orders = (0.5, 1.0, 2.0, 4.0)
    responses, periods = measures.sensitivity(orders, np.exp(np.linspace(0, math.pi / 2, 5)).tolist(), m)
    for order, period in periods.items():
        assert period == pytest.approx(math.exp(2 * math.pi / order), rel=1e-3)
    assert np.abs(responses) == pytest.approx(1.0, rel=1e-3)
    # e^(pi/2) is the whole period of order 4, half of that of order 2 and a quarter of that of order 1.
    turned = responses[:, -1] / responses[:, 0]
    assert turned[3] == pytest.approx(1, abs=1e-3)
    assert turned[2] == pytest.approx(-1, abs=1e-3)
    assert turned[1] == pytest.approx(-1j, abs=1e-3)


def test_scale_tracking_reports_what_won_for_each_image(needed):
    images, scales = torch.zeros(2, 28, 28, dtype=torch.uint8), torch.tensor([[0.4, 0.6], [1.0, 0.8]])
    images[:, 12:16, 10:18] = 255
    images[1, 8:20, 4:24] = 255
    sizes, means = measures.scale_tracking(needed["ss"], ImageSet(images, torch.zeros(2, dtype=torch.int64), scales))
    assert sizes == pytest.approx([0.5, 0.9])
    with pytest.raises(ValueError, match="the first layer of `model` must have scales"):
        measures.scale_tracking(needed["models"]["plain"], ImageSet(images, torch.zeros(2, dtype=torch.int64), scales))
    for i, mean in enumerate(means):
        response, winner = measures.winning_scales(needed["ss"], images[i, None, None].float() / 255)
        won = torch.tensor(needed["ss"].first.scales)[winner[response > 0.25 * response.max()]]
        assert mean == pytest.approx(float(won.log().mean().exp()), rel=1e-5)


def test_the_sensitivity_figure_holds_the_measured_curves(needed):
    left, right = figures.plot_sensitivity((1.0, 2.0)).axes
    curves = {line.get_label(): line for line in left.get_lines()}
    x, y = curves["order 2"].get_data()
    assert y == pytest.approx(np.cos(2 * np.log(x)), abs=1e-2)
    measured = next(line for line in right.get_lines() if line.get_label() == "measured")
    assert list(measured.get_xdata()) == [1.0, 2.0]
    assert measured.get_ydata() == pytest.approx(np.exp(2 * np.pi / np.array([1.0, 2.0])), rel=1e-3)


def test_centrality_of_filters_whose_mass_is_known():
    corner, centre, even = np.zeros((7, 7)), np.zeros((7, 7)), np.ones((7, 7))
    corner[0, 0], centre[3, 3] = -2.0, 5.0
    offset, share = measures.centrality(np.stack([corner, centre, even]))
    assert offset == pytest.approx([math.hypot(3, 3) / 3.5, 0, 0])
    assert share == pytest.approx([0, 1, 9 / 49])  # radius 1.75: the middle 3 x 3


def test_steered_filters_are_central_and_others_need_not_be(needed):
    offset, share = measures.centrality(measures.unit_filters(needed["ss"].first))
    assert offset == pytest.approx(0, abs=1e-6)
    other, _ = measures.centrality(measures.unit_filters(needed["lsi"].first))
    assert (other > 1e-3).all()
    assert ((share >= 0) & (share <= 1)).all()


def test_entanglement_is_the_move_that_an_enlarged_filter_makes():
    layer = nn.Conv2d(1, 2, 7, bias=False)
    ticks = torch.arange(7.0) - 3
    blob = [torch.exp(-((ticks[None] - x) ** 2 + ticks[:, None] ** 2)) for x in (0, 2)]
    with torch.no_grad():
        layer.weight.copy_(torch.stack(blob)[:, None])
    move, gain = measures.entanglement(layer, 2.0)
    assert move == pytest.approx([0, 2 / 3.5])  # a blob at 2 is at 4 when enlarged by 2
    assert gain[0] == pytest.approx(0, abs=1e-9)
    assert gain[1] > 0.1


def test_entanglement_agrees_with_a_loop_over_moves(needed):
    layer, scale = needed["lsi"].first, 1.6
    move, gain = measures.entanglement(layer, scale)
    first, second = (measures.enlarged(layer, s).numpy() for s in (1.0, scale))
    reach, half = second.shape[-1] // 2, first.shape[-1] // 2
    for channel in range(len(first)):
        wide = np.pad(second[channel], 2 * half + reach)
        centre = len(wide) // 2
        cosine = {}
        for down in range(-reach, reach + 1):
            for right in range(-reach, reach + 1):
                rows = slice(centre + down - half, centre + down + half + 1)
                columns = slice(centre + right - half, centre + right + half + 1)
                norm = np.linalg.norm(first[channel]) * np.linalg.norm(second[channel])
                cosine[down, right] = (first[channel] * wide[rows, columns]).sum() / norm
        best = max(cosine, key=cosine.get)
        assert move[channel] == pytest.approx(math.hypot(*best) / (first.shape[-1] / 2))
        assert gain[channel] == pytest.approx(cosine[best] - cosine[0, 0])


def test_an_enlarged_filter_at_scale_one_is_the_filter(needed):
    for model in (needed["ss"], needed["lsi"]):
        same = measures.enlarged(model.first, 1.0).numpy()
        assert same == pytest.approx(measures.unit_filters(model.first), abs=1e-6)


def test_nothing_is_lost_without_scaling_and_something_with_it():
    for layer in measures.resizing_layers(4).values():
        assert measures.resizing_error(layer, 1.0) < 1e-12
        assert measures.resizing_error(layer, 1.5) > 1e-2


def test_the_reference_of_the_resizing_error_is_the_filter_on_the_original_image():
    # A constant image has no scale: both methods give the sum of the filter's taps times the area they stand for.
    layer = LocallyScaleInvariantConv2d(1, 3, scales=(1.0,), dtype=torch.float64)
    assert measures.resizing_error(layer, 1.7, image=lambda x, y: torch.ones_like(x * y)) < 1e-12
    # Resized by 1/2, an odd grid loses its centre: a linear ramp survives bilinear resizing, two blobs do not.
    assert measures.resizing_error(layer, 2.0, image=two_blobs) > 0.01


def test_area_sampling_steers_better_than_resizing_the_input_twice():
    layers = measures.resizing_layers()
    for scale in (0.7, 1.4, 2.2):
        errors = {name: measures.resizing_error(layer, scale) for name, layer in layers.items()}
        assert errors["steered, areas"] < errors["input resized, same filters"]


def test_errors_are_drawn_as_means_over_runs():
    figure = figures.plot_errors({"a": [[0.1, 0.2], [0.3, 0.2]]}, [0.5, 1.0], "size", span=(0.5, 0.6))
    (axis,) = figure.axes
    line = next(line for line in axis.get_lines() if line.get_label() == "a")
    assert line.get_ydata() == pytest.approx([20, 20])
    assert line.get_xdata() == pytest.approx([0.5, 1.0])
    with pytest.raises(ValueError, match="2 errors per run"):
        figures.plot_errors({"a": [[0.1]]}, [0.5, 1.0], "size")


def test_ratios_are_lines_with_a_dot_for_each_pair():
    lines = {"paper": ([0.5, 0.6], []), "here": ([1.0, 1.2], [[0.9, 1.1], [1.1, 1.3]])}
    figure = figures.plot_ratios({"a / b": lines, "a / c": lines}, [0, 10], "strength", (1.0, 1.1))
    for axis, level in zip(figure.axes, (1.0, 1.1), strict=True):
        limit, paper, here, *dots = (line.get_ydata() for line in axis.lines)
        assert list(limit) == [level, level]
        assert (list(paper), list(here)) == ([0.5, 0.6], [1.0, 1.2])
        assert [list(dot) for dot in dots] == [[0.9, 1.1], [1.1, 1.3]]
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["paper", "here"]


def test_the_scale_error_is_that_of_the_images_in_each_bin(needed, image_set):
    image_set = replace(image_set, about={"scale_range": (0.3, 1.0)})  # drawn from a range: shown in bins
    figure = figures.plot_scale_error({"SS-CNN": needed["ss"]}, image_set)
    (line,) = figure.axes[0].get_lines()
    with torch.no_grad():
        wrong = needed["ss"](image_set.images[:, None] / 255).argmax(1) != image_set.labels
    for middle, error in zip(*line.get_data(), strict=True):
        inside = (image_set.scales - middle).abs() < 0.05
        assert error == pytest.approx(100 * wrong[inside].float().mean().item(), abs=1e-4)


def test_the_diagram_shows_the_layers_own_maximum(needed):
    layer, image = needed["ss"].first, needed["image"]
    axes = {a.get_title(): a for a in figures.plot_layer(needed["ss"], image, channel=1).axes}
    drawn = axes["maximum over scales"].get_images()[0].get_array()
    with torch.no_grad():
        x = image[None]
        responses = torch.stack([F.conv2d(x, f, layer.bias, padding=f.shape[-1] // 2) for f in layer.filters()])
    assert np.asarray(drawn) == pytest.approx(responses.amax(0)[0, 1].numpy(), abs=1e-5)


def test_the_winning_scale_is_that_of_the_largest_response_of_all(needed):
    layer, x = needed["ss"].first, needed["images"]
    response, winner = measures.winning_scales(needed["ss"], x)
    with torch.no_grad():
        every = torch.stack([F.conv2d(x, f, layer.bias, padding=f.shape[-1] // 2) for f in layer.filters()], 2)
    largest, index = every.flatten(1, 2).max(1)  # over channels and scales, scales last
    assert response == pytest.approx(largest, abs=1e-5)
    assert (winner == index % 3).float().mean() > 0.99  # near ties may fall either way


def test_the_mean_winning_scale_leaves_out_weak_responses():
    response = torch.tensor([[[1.0, 0.9], [0.1, 0.5]], [[8.0, 0.0], [0.0, 0.0]]])
    winner = torch.tensor([[[0, 1], [2, 1]], [[0, 2], [2, 2]]])
    assert measures.mean_winning_scale(response, winner, (1.0, 4.0, 9.0)) == pytest.approx(2.0)  # of 1, 4, 4 and 1


def test_a_layer_without_steering_is_refused():
    for draw in (figures.plot_steered, figures.plot_filter_bank):
        with pytest.raises(TypeError, match="ScaleSteerableConv2d"):
            draw(nn.Conv2d(1, 2, 7))


def test_the_basis_figure_follows_its_argument():
    figure = figures.plot_basis(LogRadialBasis(orders=(1.0, 3.0)), size=9)
    assert "Re, k=3, 45°" in {axis.get_title() for axis in figure.axes}


def test_a_steered_filter_is_shown_at_each_of_its_scales():
    layer = ScaleSteerableConv2d(1, 2, scales=(1.0, 1.5), basis=LogRadialBasis.preset("area"))
    titles = [axis.get_title() for axis in figures.plot_steered(layer, channel=1).axes]
    assert titles[:2] == ["s = 1.00, 7 x 7", "s = 1.50, 11 x 11"]


def test_answered_sizes_are_medians_beside_a_proportional_line():
    figure = figures.plot_answered_sizes({0.5: (0.9, 1.0, 1.2), 1.0: (1.8, 2.0, 2.1)}, (0.5, 0.75))
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert list(lines["median"]) == list(lines["proportional"]) == pytest.approx([1.0, 2.0])


def test_answers_are_marked_where_they_are_wrong():
    images = {size: torch.zeros(2, 4, 4, dtype=torch.uint8) for size in (0.5, 1.0)}
    axes = figures.plot_answers(images, {0.5: [3, 7], 1.0: [3, 1]}, [3, 7]).axes
    assert [axis.get_xlabel() for axis in axes] == ["3", "3", "7", "1 ✗"]
    assert [axis.get_title() for axis in axes] == ["size 0.5", "size 1", "", ""]


def test_panels_share_an_axis_that_shows_every_error():
    panels = {"a": ({"net": [[0.1, 0.2]]}, (1, 1)), "b": ({"net": [[0.1, 0.9]]}, (2, 2))}
    figure = figures.plot_error_panels(panels, (1, 2), "size")
    assert [axis.get_title() for axis in figure.axes] == ["a", "b"]
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.axes[0].get_ylim()[1] > 90
