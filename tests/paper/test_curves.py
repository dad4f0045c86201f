"""Curves are those of the numbers they were given."""

import errno
import io
import itertools

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from paper import curves


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_picture_that_cannot_be_written_leaves_the_old_one(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"figure{suffix}"
    curves.save(Figure(), path, dpi=20)
    before = path.read_bytes()
    real = Figure.savefig

    def half(figure, file, **options):
        real(figure, file, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="No space left"):
        curves.save(Figure(figsize=(3, 3)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_errors_are_drawn_as_means_over_runs():
    figure = curves.plot_errors({"a": [[0.1, 0.2], [0.3, 0.2]]}, [0.5, 1.0], "size", span=(0.5, 0.6))
    (axis,) = figure.axes
    line = next(line for line in axis.get_lines() if line.get_label() == "a")
    assert line.get_ydata() == pytest.approx([20, 20])
    assert line.get_xdata() == pytest.approx([0.5, 1.0])
    dots = [list(other.get_ydata()) for other in axis.get_lines() if other is not line]
    assert dots == [pytest.approx([10, 20]), pytest.approx([30, 20])]
    with pytest.raises(ValueError, match="2 errors per run"):
        curves.plot_errors({"a": [[0.1]]}, [0.5, 1.0], "size")


def test_ratios_are_lines_with_a_dot_for_each_pair():
    lines = {"paper": ([0.5, 0.6], []), "here": ([1.0, 1.2], [[0.9, 1.1], [1.1, 1.3]])}
    figure = curves.plot_ratios({"a / b": lines, "a / c": lines}, [0, 10], "strength", (1.0, 1.1))
    for axis, level in zip(figure.axes, (1.0, 1.1), strict=True):
        limit, paper, here, *dots = (line.get_ydata() for line in axis.lines)
        assert list(limit) == [level, level]
        assert (list(paper), list(here)) == ([0.5, 0.6], [1.0, 1.2])
        assert [list(dot) for dot in dots] == [[0.9, 1.1], [1.1, 1.3]]
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["paper", "here"]


def test_answered_sizes_are_medians_beside_a_proportional_line():
    figure = curves.plot_answered_sizes({0.5: (0.9, 1.0, 1.2), 1.0: (1.8, 2.0, 2.1)}, (0.5, 0.75))
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert list(lines["median"]) == list(lines["proportional"]) == pytest.approx([1.0, 2.0])


def test_answers_are_marked_where_they_are_wrong():
    images = {size: torch.zeros(2, 4, 4, dtype=torch.uint8) for size in (0.5, 1.0)}
    axes = curves.plot_answers(images, {0.5: [3, 7], 1.0: [3, 1]}, [3, 7]).axes
    assert [axis.get_xlabel() for axis in axes] == ["3", "3", "7", "1 ✗"]
    assert [axis.get_title() for axis in axes] == ["size 0.5", "size 1", "", ""]


def test_panels_share_an_axis_that_shows_every_error():
    panels = {"a": ({"net": [[0.1, 0.2]]}, (1, 1)), "b": ({"net": [[0.1, 0.9]]}, (2, 2))}
    figure = curves.plot_error_panels(panels, (1, 2), "size")
    assert [axis.get_title() for axis in figure.axes] == ["a", "b"]
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.axes[0].get_ylim()[1] > 90


def test_every_line_of_a_full_plot_has_a_colour_and_a_marker_of_its_own():
    lines = {f"network {i}": [[0.1, 0.2]] for i in range(len(curves.STYLES))}
    drawn = [line for line in curves.plot_errors(lines, [1, 2], "size").axes[0].get_lines() if len(line.get_xdata())]
    assert len({line.get_color() for line in drawn}) == len({line.get_marker() for line in drawn}) == len(lines)


def test_more_lines_than_styles_are_refused():
    lines = {f"network {i}": [[0.1, 0.2]] for i in range(len(curves.STYLES) + 1)}
    with pytest.raises(ValueError, match=r"at most 12, one for each of `STYLES` \(got 13\)"):
        curves.plot_errors(lines, [1, 2], "size")


# Linear RGB as eyes without red or green cones see it: Machado, Oliveira and Fernandes 2009, severity 1.
EYES = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def lab(colour, eye):
    """CIE L*a*b*, white point D65, of a colour as an eye sees it."""
    srgb = np.array(to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
    xyz = to_xyz @ np.clip(EYES[eye] @ linear, 0, 1) / (0.9505, 1, 1.089)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", EYES)
def test_colours_are_told_apart_from_each_other_and_from_paper(eye):
    seen = [lab(colour, eye) for colour in curves.COLOURS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 17
    assert max(lightness for lightness, _, _ in seen) < 75  # of 100, white


def test_a_kept_picture_has_few_colours_and_looks_as_drawn():
    figure = curves.plot_errors({"a": [[0.1, 0.2]], "b": [[0.3, 0.2]]}, [0.5, 1.0], "size", (0.5, 0.6), "title")
    exact, few = io.BytesIO(), curves.png(figure, dpi=80)
    figure.savefig(exact, format="png", dpi=80)
    drawn, kept = (Image.open(file) for file in (exact, io.BytesIO(few)))
    assert kept.mode == "P"
    difference = np.abs(np.asarray(drawn.convert("RGB"), int) - np.asarray(kept.convert("RGB"), int))
    assert difference.max() <= 32
    assert difference.mean() < 1
    assert curves.png(figure, dpi=80) == few


def test_histories_have_a_panel_each_with_the_others_means_in_grey():
    runs = {"a": [[0.2, 0.1], [0.4, 0.3]], "b": [[0.5, 0.2]]}
    for axis, (name, other) in zip(curves.plot_histories(runs, "error").axes, (("a", "b"), ("b", "a")), strict=True):
        assert axis.get_title() == name
        own, *others = sorted(axis.get_lines(), key=lambda line: line.get_color() == curves.GREY)
        assert list(own.get_ydata()) == pytest.approx(list(100 * np.mean(runs[name], 0)))
        assert [list(line.get_ydata()) for line in others] == [pytest.approx(list(100 * np.mean(runs[other], 0)))]
