"""Curves are those of the numbers they were given."""

import errno

import pytest
import torch
from matplotlib.figure import Figure

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
