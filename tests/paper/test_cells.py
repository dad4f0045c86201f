"""One table of all results: numbers of cells, means, and intervals of differences."""

import doctest
import math
import statistics

import numpy as np
import pytest
from scipy import stats

from paper import cells, claims, grids, report
from paper.cells import GAP
from paper.grids import EXPERIMENTS, LEADING, Cell
from tests.paper.invented import failed, of_cell, result, result_by_size, results_by_size


def test_an_interval_is_students():
    for n, point in ((2, 12.7062), (3, 4.30265), (6, 2.57058), (24, 2.06866)):  # from printed tables
        changes = [0.1 * (-1) ** i + 0.03 * i for i in range(n)]
        found = cells.interval(changes)
        reach = point * statistics.stdev(changes) / math.sqrt(n)
        assert (found.low, found.high) == pytest.approx(
            (statistics.fmean(changes) - reach, statistics.fmean(changes) + reach), rel=1e-5
        )
    first, second = np.array([1.0, 2.5, 3.0]), np.array([1.5, 2.0, 4.0])
    expected = stats.ttest_rel(first, second).confidence_interval()
    assert cells.interval(first - second)[1:3] == pytest.approx(tuple(expected))


def test_examples_in_docstrings():
    found = doctest.testmod(cells)
    assert (found.failed, found.attempted > 0) == (0, True)


def test_an_intervals_text():
    assert cells.interval([-0.1, 0.1, 0.3]).summary == ("+0.10 ± 0.20", "-0.40 to +0.60", "1 of 3")
    reach = 4.30265 * 0.01 / math.sqrt(3)
    assert str(cells.interval([0.015, 0.025, 0.035])) == f"**{0.025 - reach:+.4f} to {0.025 + reach:+.2f}**"
    assert str(cells.interval([0.0, 0.0])) == "0.00 to 0.00"
    assert cells.spread([-0.004, 0.002], "+.2f") == "0.00 ± 0.00"
    assert cells.interval([0.2]).summary == ("+0.20", GAP, "0 of 1")
    assert cells.interval([math.nan]).summary == (GAP, GAP, GAP)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ([-0.3, -0.2, -0.1], "undecided"),
        ([-0.3, -0.29, -0.31], "holds"),
        ([0.3, 0.29, 0.31], "fails"),
        ([-0.1, 0.1, 0.0], "undecided"),
        ([-0.3, -0.29, math.nan], GAP),
        ([-0.3], GAP),
    ],
)
def test_verdicts_have_three_values(changes, verdict):
    assert cells.interval(changes).verdict == verdict


def test_a_run_that_was_made_again_is_compared_by_its_mean(load):
    ours, theirs = (of_cell("1", method, "MNIST-Scale") for method in ("SS-CNN", "Plain CNN"))
    lines = [*(result(c, 0.02) for c in ours), *(result(c, 0.03) for c in theirs)]
    again = [result(ours[0], 0.01), result(ours[0], 0.06), result(theirs[1], 0.05)]
    data = load(lines, again=[*again, failed(ours[1]) | {"history": lines[0]["history"]}])
    found = cells.minus(data, Cell("1", "SS-CNN", "MNIST-Scale"), Cell("1", "Plain CNN", "MNIST-Scale"))
    assert found.changes == pytest.approx([0.0, -2.0, -1.0, -1.0, -1.0, -1.0])
    assert "| SS-CNN | 2.00 ± 0.00 | 1.91 ± 0.04 |" in report.table(data, "1")  # as in the tables
    doubled = cells.minus(data, Cell("1", "SS-CNN", "MNIST-Scale"), Cell("1", "Plain CNN", "MNIST-Scale"), 2)
    assert doubled.changes[2] == pytest.approx(2 - 2 * 3)


def test_a_repeat_alone_fills_no_gap(load):
    cell, runs = Cell("1", "SS-CNN", "MNIST-Scale"), of_cell("1", "SS-CNN", "MNIST-Scale")
    lines = [result(config) for config in runs[2:]]
    lines.append(failed(runs[1]) | {"history": lines[0]["history"]})
    data = load(lines, again=[result(runs[0]), result(runs[1])])
    assert cells.values(data, cell).isna().tolist() == [True, True, False, False, False, False]


def test_an_unknown_cell_is_named(load):
    with pytest.raises(ValueError, match="there is no cell 'SS-CNN', 'MNIST' in the experiment '1'"):
        cells.values(load(), Cell("1", "SS-CNN", "MNIST"))


def test_seeds_are_compared_by_welchs_interval(load):
    rng = np.random.default_rng(0)
    noise = {row.config: rng.normal(0, 0.001) for row in EXPERIMENTS["stir"].rows}
    data = load(result_by_size(c, outside=0.1 + 0.05 * (c.channels is None) + wobble) for c, wobble in noise.items())
    ours, twin = (Cell("stir", line, "MNIST Mid2Rest", "outside") for line in (LEADING["stir"], grids.TWIN))
    first, second = (list(cells.values(data, cell)) for cell in (ours, twin))
    assert (len(first), len(second)) == (10, 3)
    for times in (1.0, 0.8):
        found = cells.minus(data, ours, twin, times)
        expected = stats.ttest_ind(first, times * np.array(second), equal_var=False).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
        assert found.verdict == "holds"
    assert cells.minus(data, twin, ours).verdict == "fails"


def test_an_interval_against_a_number_is_students(load):
    data = load(results_by_size("stir", lambda line: 0.05))
    cell = claims.ours("stir", "MNIST Mid2Rest")
    found = cells.minus(data, cell, 5.0)
    expected = stats.ttest_1samp([value - 5 for value in cells.values(data, cell)], 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(("first", "second", "whole"), [
    ([1.0, 2.0], [1.0, 2.0], True),
    ([1.0, 2.0, math.nan], [1.0, 2.0], False),
    ([1.0, 2.0], [1.0, math.nan], False),
    ([1.0], [1.0, 2.0], False),
])  # fmt: skip
def test_what_is_missing_leaves_no_verdict(first, second, whole):
    found = cells.interval(first, second)
    assert found.whole == whole
    assert found.verdict == ("undecided" if whole else GAP)


def test_equal_numbers_need_no_spread():
    assert cells.interval([1.0, 1.0], [2.0, 2.0])[1:] == (-1.0, -1.0, True)


def test_splits_stay_paired(load):
    data = load(
        result_by_size(row.config, inside=0.02 + 0.01 * row.config.split + 0.001 * (row.line == grids.TWIN))
        for row in EXPERIMENTS["new-networks"].rows
    )
    ours, twin = (Cell("new-networks", line, "MNIST-Scale") for line in (LEADING["new-networks"], grids.TWIN))
    found = cells.minus(data, ours, twin)
    assert (found.low, found.high) == pytest.approx((-0.1, -0.1))
