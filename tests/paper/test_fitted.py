"""The table and the figure of a fitted join and of fewer channels are what was measured."""

import json

import numpy as np
import pytest

import paper
from paper import examples


@pytest.fixture(scope="module")
def found():
    return json.loads((paper.RESULTS / "guide" / "adaptive.json").read_text())


def test_the_table_has_the_measured_numbers(found):
    lines = examples.fitted_join().splitlines()
    rows = {
        cells[1]: cells[2:-1]
        for line in lines[2 : 2 + len(found["trials"])]
        if (cells := [cell.strip() for cell in line.split("|")])
    }
    assert list(rows) == list(found["trials"])
    for name, one in found["trials"].items():
        alone, known, mean, gap, size, sure, cost, points = rows[name]
        assert alone == f"{100 * one['alone_error']:.1f}"
        for shown, read in (
            (known, lambda line: f"{100 * line['error'][2]:.1f}"),
            (mean, lambda line: f"{100 * sum(line['error']) / 5:.1f}"),
            (gap, lambda line: f"{100 * line['ece']:.1f}"),
            (size, lambda line: f"{line['median_size'][4]:.2f}"),
        ):
            assert shown == " → ".join(read(one[line]) for line in ("plain", "fitted"))
        by_value = {trade["sure"]: trade for trade in one["trades"]}
        assert float(sure) == one["sure"]
        assert cost == f"{100 * by_value[one['sure']]['cost']:.0f} %"
        lost = by_value[one["sure"]]["error"] - by_value[1.0]["error"]
        assert float(points) == pytest.approx(100 * lost, abs=0.051)
    assert found["commit"][:7] in lines[-1]


def test_the_figure_has_a_line_for_each_kind_of_pictures_and_a_ring_at_what_was_chosen(found):
    (axis,) = examples.plot_adaptive().axes
    named = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
    assert list(named) == list(found["trials"])
    rings = [line.get_xydata()[0] for line in axis.lines if line.get_fillstyle() == "none"]
    for (name, one), ring in zip(found["trials"].items(), rings, strict=True):
        full = one["trades"][-1]["error"]
        expected = [(100 * trade["cost"], 100 * (trade["error"] - full)) for trade in one["trades"]]
        assert named[name].get_xydata() == pytest.approx(np.array(expected))
        assert ring == pytest.approx(expected[[trade["sure"] for trade in one["trades"]].index(one["sure"])])
