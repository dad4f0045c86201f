"""Numbers come from results; what is missing is a gap; verdicts come from intervals."""

import doctest
import json
import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from paper import grids, pages, report
from paper.grids import EXPERIMENTS, Cell
from paper.report import GAP
from scalesteer.training.loop import SCALE_BINS
from tests.paper.test_results import ENVIRONMENT, distorted, failed, outcome

ERRORS = {"spatial-transformer": 0.02, "ss-cnn": 0.018, "vector-field-cnn": 0.023, "plain-cnn": 0.022}


def result(config, error=0.02, device="a GPU", **changes):
    """A result that nobody measured."""
    made = outcome(config, error) | {"environment": ENVIRONMENT | {"device": device}}
    if not config.tuning:
        bins = [
            {"from": a, "to": b, "images": 9, "error": min(1, error * (i + 1))} for i, (a, b) in enumerate(SCALE_BINS)
        ]
        made["test_error_by_scale"] = bins
    history = {
        name: [epoch[name] for epoch in made["history"]] for name in ("loss", "val_loss", "val_error", "seconds")
    }
    return made | {"history": history} | changes


def under_distortion(config, error, strength=1.0):
    """A network whose error grows with the strength: by `strength` times itself for each 10."""
    errors = {f"{10 * i}": error * (1 + strength * i) for i in range(5)}
    return distorted(config) | {"errors": errors, "moved": {"0.5": error, "1": error}}


@pytest.fixture
def load(tmp_path):
    """Writes results to a folder of their own and loads them."""

    def write(found=(), networks=(), again=()):
        (tmp_path / "runs").mkdir(exist_ok=True)
        by_dataset = {}
        for line in found:
            by_dataset.setdefault(line["config"]["dataset"], []).append(line)
        files = {tmp_path / "runs" / f"{name}.jsonl": lines for name, lines in by_dataset.items()}
        files |= {tmp_path / "distortion.jsonl": networks, tmp_path / "repeats.jsonl": again}
        for path, lines in files.items():
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return report.load(tmp_path)

    return write


def of_cell(name, line, column):
    return [row.config for row in EXPERIMENTS[name].rows if (row.line, row.column) == (line, column)]


def first_table(models=ERRORS):
    """Results of Table 1: on MNIST-Scale 0.1 % more in each split, on FMNIST-Scale ten times the error."""
    for config in EXPERIMENTS["1"].runs:
        if config.model in models:
            factor = 10 if config.dataset == "fmnist-scale" else 1
            yield result(config, factor * ERRORS[config.model] + 0.001 * config.split)


def test_without_results_there_are_gaps_only(tmp_path):
    data = report.load(tmp_path)
    for name in (name for name in EXPERIMENTS if name not in grids.LEADING):
        body = report.table(data, name, title=False)
        paper = {number for row in grids.PAPER.get(name, {}).values() for number in row.values()}
        for row in body.splitlines()[2:]:
            assert {cell.strip() for cell in row.strip("|").split("|")[1:]} <= {GAP, "base", *paper}
    tables = ("paper_sizes", "distorted", "distorted_pairs", "longer_changes", "longer_pairs", "effects", "costs")
    for view in (*(getattr(report, name) for name in tables), lambda d: report.pairs(d, "1"), report.repeats):
        for row in view(data).splitlines()[2:]:
            assert {cell.strip() for cell in row.strip("|").split("|")[1:]} <= {GAP, *_papers_first()}
    assert report.claims(data).count(f"[{GAP}]") == 7
    assert report.verdict(data, "par", report.VALIDATION_CHOSE) == report.ratio(data, "SS-CNN", "Plain CNN") == GAP
    assert (
        report.at_or_below(data, "1", "2") == report.release(data, "FMNIST-Scale") == report.training_time(data) == GAP
    )
    assert report.repeat_deviation(data) == report.sizes_chosen(data) == report.epochs_chosen(data) == GAP
    assert report.chosen(data).count("(not tuned yet)") == 10
    assert report.release_change(data) == GAP
    assert report.plots(tmp_path) == {}


def _papers_first():
    return {row.get("MNIST-Scale") for row in grids.PAPER["1"].values()}


def test_tables_show_mean_and_deviation_beside_the_papers(load):
    data = load(first_table())
    shown = report.table(data, "1").splitlines()
    deviation = statistics.stdev([0.1 * i for i in range(6)])
    assert shown[0] == "**Table 1. Error rates on MNIST-Scale and FMNIST-Scale**"
    assert f"| SS-CNN | 2.05 ± {deviation:.2f} | 1.91 ± 0.04 | 18.25 ± {deviation:.2f} | 14.24 ± 0.31 |" in shown
    assert f"| LocScaleInv-CNN | {GAP} | 2.75 ± 0.09 | {GAP} | 15.91 ± 0.41 |" in shown
    assert "| SS-CNN | 2.05 | 4.10 | 6.15 | 8.20 | 10.25 | 12.30 | 14.35 |" in report.by_scale(data, "MNIST-Scale")
    assert "| SS-CNN | 10 | 6 | 10 | 6 | 1.2 (12 runs) |" in report.costs(data)
    assert "| Plain CNN, MNIST-Scale | -0.40 ± 0.00 | **-0.40 to -0.40** | 6 of 6 |" in report.pairs(data, "1")
    assert report.error(data, "1", "SS-CNN", "MNIST-Scale") == "2.05"
    assert report.best_epochs(data, "SS-CNN", "MNIST-Scale") == "1, 1, 1, 1, 1 and 1"
    assert report.training_time(data, "1", "2") == f"{48 * 6 / 3600:.1f} hours on a GPU"  # each run once
    assert report.at_or_below(load(list(first_table())[:-1]), "1") == GAP


def test_missing_and_failed_runs_are_shown(load):
    whole = {config: result(config, 0.01 + 0.001 * config.split) for config in of_cell("1", "SS-CNN", "MNIST-Scale")}
    bad, missing, *_ = whole
    whole[bad] = failed(bad) | {"history": whole[missing]["history"]}
    del whole[missing]
    shown = report.table(load(whole.values()), "1")
    assert f"| SS-CNN | 1.35 ± {statistics.stdev([0.2, 0.3, 0.4, 0.5]):.2f} (4 of 6) | 1.91 ± 0.04 |" in shown
    assert f"{bad.name} failed and is left out: the loss became nan." in shown
    assert missing.name not in shown


def test_runs_of_another_device_are_named_and_not_timed(load):
    runs = of_cell("sizes", "LocScaleEq-CNN", "28 px")
    lines = [result(c, seconds=20.0) for c in runs[:2]] + [result(runs[2], device="a CPU", seconds=5000.0)]
    shown = report.table(load(lines), "sizes")
    assert f"| LocScaleEq-CNN | 2.00 ± 0.00 | {GAP} | {GAP} | 10 | 20 | {GAP} |" in shown
    assert shown.endswith(f"\n\nTrained on a CPU: {runs[2].name}.")


def test_best_on_validation_is_shown_under_distortion(load):
    runs = of_cell("2", "SS-CNN", "60 epochs")
    lines = [
        result(runs[0], 0.01, val_error=0.03),
        result(runs[1], 0.05, val_error=0.02),  # the best, though its test is worse
        result(runs[2], 0.01, val_error=0.02),  # as good in validation: the first counts
    ]
    networks = [under_distortion(config, error) for config, error in zip(runs, (0.01, 0.05, 0.01), strict=False)]
    assert "| SS-CNN | 5.00 (3 of 6) | 1.87 | 10.00 (3 of 6) | 3.7 |" in report.table(load(lines, networks), "2")
    assert f"| SS-CNN | {GAP} | 1.87 | {GAP} | 3.7 |" in report.table(load(lines, networks[:1]), "2")


def test_an_interval_is_students():
    for n, point in ((2, 12.7062), (3, 4.30265), (6, 2.57058), (24, 2.06866)):  # from printed tables
        changes = [0.1 * (-1) ** i + 0.03 * i for i in range(n)]
        found = report.interval(changes)
        reach = point * statistics.stdev(changes) / math.sqrt(n)
        assert (found.low, found.high) == pytest.approx(
            (statistics.fmean(changes) - reach, statistics.fmean(changes) + reach), rel=1e-5
        )
    first, second = np.array([1.0, 2.5, 3.0]), np.array([1.5, 2.0, 4.0])
    expected = stats.ttest_rel(first, second).confidence_interval()
    assert report.interval(first - second)[1:3] == pytest.approx(tuple(expected))


def test_examples_in_docstrings():
    found = doctest.testmod(report)
    assert (found.failed, found.attempted > 0) == (0, True)


def test_an_intervals_text():
    assert report.interval([-0.1, 0.1, 0.3]).summary == ("+0.10 ± 0.20", "-0.40 to +0.60", "1 of 3")
    reach = 4.30265 * 0.01 / math.sqrt(3)
    assert str(report.interval([0.015, 0.025, 0.035])) == f"**{0.025 - reach:+.4f} to {0.025 + reach:+.2f}**"
    assert str(report.interval([0.0, 0.0])) == "0.00 to 0.00"
    assert report.spread([-0.004, 0.002], "+.2f") == "0.00 ± 0.00"
    assert report.interval([0.2]).summary == ("+0.20", GAP, "0 of 1")
    assert report.interval([math.nan]).summary == (GAP, GAP, GAP)


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
    assert report.interval(changes).verdict == verdict


def table_1(errors, wobble=0.0):
    """Results of Table 1 on MNIST-Scale, by method; odd splits differ by `wobble` for SS-CNN."""
    for method, error in errors.items():
        for config in of_cell("1", method, "MNIST-Scale"):
            yield result(config, error + 0.001 * config.split + wobble * (method == "SS-CNN") * (config.split % 2))


def test_a_claim_holds_if_all_pairs_do_and_fails_with_one(load):
    lower = {"SS-CNN": 0.02, "Spatial Transformer": 0.03, "LocScaleEq-CNN": 0.04, "LocScaleInv-CNN": 0.05}
    assert report.verdict(load(table_1(lower)), "mnist") == "holds"
    assert report.verdict(load(table_1(lower | {"LocScaleEq-CNN": 0.01})), "mnist") == "fails"
    assert report.verdict(load(table_1(lower, wobble=0.02)), "mnist") == "undecided"
    assert report.verdict(load(table_1(lower | {"LocScaleEq-CNN": 0.01}, wobble=0.02)), "mnist") == "fails"
    assert report.verdict(load(list(table_1(lower))[:-1]), "mnist") == GAP


def test_the_pair_that_decides_is_shown(load):
    errors = {"SS-CNN": 0.02, "Spatial Transformer": 0.03, "LocScaleEq-CNN": 0.04, "LocScaleInv-CNN": 0.05}
    shown = report.claims(load(table_1(errors)))
    assert (
        "| SS-CNN 1.91, Spatial Transformer 1.97 (MNIST-Scale) | SS-CNN 2.25, Spatial Transformer 3.25 (MNIST-Scale) |"
        " **-1.00 to -1.00** | [holds](evidence/input-size.md) |"
    ) in shown
    shown = report.claims(load(table_1(errors | {"LocScaleEq-CNN": 0.01})))
    assert (
        "| SS-CNN 1.91, LocScaleEq-CNN 2.44 (MNIST-Scale) | SS-CNN 2.25, LocScaleEq-CNN 1.25 (MNIST-Scale) |" in shown
    )


def test_no_verdict_hangs_on_the_words_of_a_claim(load, monkeypatch):
    data = load(table_1({"SS-CNN": 0.02, **dict.fromkeys(grids.OTHERS, 0.03)}))
    for key, claim in grids.CLAIMS.items():
        before = report.verdict(data, key)
        monkeypatch.setitem(grids.CLAIMS, key, claim._replace(text="on par, lower, not the others"))
        assert report.verdict(data, key) == before


def longer(tested, validated=None):
    """Networks after 60, 120 and 300 epochs: one test and one validation error for each; 0.1 % more in each split."""
    runs, networks = [], []
    for method, errors in tested.items():
        for column, error, seen in zip(report.columns("longer"), errors, (validated or tested)[method], strict=True):
            for config in of_cell("longer", method, column):
                own = error * (1 + 0.1 * config.split)
                runs.append(result(config, own, val_error=seen))
                networks.append(under_distortion(config, own))
    return runs, networks


def test_par_allows_a_tenth_more(load):
    for factor, said in ((1.09, "holds"), (1.11, "fails")):
        tested = {"Spatial Transformer": (0.01,) * 3, "SS-CNN": (0.01, 0.01 * factor, 0.01)}
        data = load(*longer(tested))
        assert report.verdict(data, "par", "120 epochs") == said
        assert report.verdict(data, "par") == report.verdict(data, "par", "300 epochs") == "holds"


LONGER = {
    "SS-CNN": (0.02, 0.03, 0.05),
    "Spatial Transformer": (0.01, 0.02, 0.025),
    "LocScaleInv-CNN": (0.04, 0.04, 0.04),
    "Plain CNN": (0.03, 0.05, 0.01),
}
SEEN = {
    "SS-CNN": (0.03, 0.02, 0.03),
    "Spatial Transformer": (0.01, 0.02, 0.02),
    "LocScaleInv-CNN": (0.03, 0.02, 0.01),
    "Plain CNN": (0.02, 0.01, 0.02),
}
VALIDATION = {"SS-CNN": 120, "Spatial Transformer": 60, "LocScaleInv-CNN": 300, "Plain CNN": 120}


def test_epochs_are_those_of_the_lowest_mean_validation_error(load):
    runs, networks = longer(LONGER, SEEN)
    data = load(runs, networks)
    assert report.chosen_epochs(data) == {method: f"{epochs} epochs" for method, epochs in VALIDATION.items()}
    assert report.epochs_chosen(data).startswith("LocScaleInv-CNN 300 epochs (120 errors fewer in 12,000 than with 120")
    for factor, best in (("60 epochs", 2 / 4), (report.VALIDATION_CHOSE, 3 / 4)):
        assert report.ratios(data, "SS-CNN", "LocScaleInv-CNN", factor) == pytest.approx([best] * 5)
        assert report.ratios(data, "SS-CNN", "LocScaleInv-CNN", factor, best=True) == pytest.approx([best] * 5)
    assert report.verdict(data, "distortion", report.VALIDATION_CHOSE) == "holds"
    rows = {line.split(" | ")[0]: line for line in report.longer_pairs(data).splitlines()}
    errors = [(0.03 - 0.04) * (1 + 0.1 * split) * 100 for split in range(6)]
    assert str(report.interval(errors)) in rows["| LocScaleInv-CNN, number chosen by validation"]


def test_verdicts_that_more_epochs_change_are_told(load):
    same = dict.fromkeys(LONGER, (0.01,) * 3) | {"LocScaleInv-CNN": (0.02,) * 3}
    assert report.more_epochs(load(*longer(same))) == "No: no verdict changes"
    worse = same | {"SS-CNN": (0.01, 0.03, 0.01)}
    assert report.more_epochs(load(*longer(worse, same))) == (
        "Yes: with 120 epochs the verdict becomes *fails* against LocScaleInv-CNN and *fails* against "
        "Spatial Transformer"
    )


def test_epochs_are_chosen_among_complete_numbers_and_by_the_mean_of_all_runs(load):
    runs, networks = longer(LONGER, SEEN)
    lost = of_cell("longer", "LocScaleInv-CNN", "300 epochs")[4].to_dict()
    data = load([line for line in runs if line["config"] != lost], networks)
    assert report.chosen_epochs(data)["LocScaleInv-CNN"] == "120 epochs"
    assert report.ratios(data, "SS-CNN", "LocScaleInv-CNN", "300 epochs") == pytest.approx(
        [5 / 4] * 5
    )  # of five splits
    assert math.isnan(report.ratios(data, "SS-CNN", "LocScaleInv-CNN", "300 epochs", best=True)[0])
    configs = of_cell("longer", "SS-CNN", "300 epochs")
    one = [result(configs[0], val_error=0.0)] * 9  # one split of six, however often it was run
    assert report.chosen_epochs(load(runs, networks, one))["SS-CNN"] == "120 epochs"
    every = [result(config, val_error=0.0) for config in configs for _ in range(9)]
    assert report.chosen_epochs(load(runs, networks, every))["SS-CNN"] == "300 epochs"


def test_networks_under_distortion_of_another_run_are_named(load):
    first, second, third = of_cell("2", "Plain CNN", "60 epochs")[:3]
    lines = [result(first, 0.02), result(second, 0.02), result(third, 0.02)]
    networks = [under_distortion(first, 0.0201), under_distortion(second, 0.021), under_distortion(third, 0.03)]
    assert report.other_networks(load(lines, networks)) == "Plain CNN in splits 1 and 2"
    assert report.other_networks(load(lines)) == "none"


def test_a_run_that_was_made_again_is_compared_by_its_mean(load):
    ours, theirs = (of_cell("1", method, "MNIST-Scale") for method in ("SS-CNN", "Plain CNN"))
    lines = [*(result(c, 0.02) for c in ours), *(result(c, 0.03) for c in theirs)]
    again = [result(ours[0], 0.01), result(ours[0], 0.06), result(theirs[1], 0.05)]
    data = load(lines, again=[*again, failed(ours[1]) | {"history": lines[0]["history"]}])
    found = report.minus(data, Cell("1", "SS-CNN", "MNIST-Scale"), Cell("1", "Plain CNN", "MNIST-Scale"))
    assert found.changes == pytest.approx([0.0, -2.0, -1.0, -1.0, -1.0, -1.0])
    assert "| SS-CNN | 2.00 ± 0.00 | 1.91 ± 0.04 |" in report.table(data, "1")  # as in the tables
    doubled = report.minus(data, Cell("1", "SS-CNN", "MNIST-Scale"), Cell("1", "Plain CNN", "MNIST-Scale"), 2)
    assert doubled.changes[2] == pytest.approx(2 - 2 * 3)


def test_a_repeat_alone_fills_no_gap(load):
    cell, runs = Cell("1", "SS-CNN", "MNIST-Scale"), of_cell("1", "SS-CNN", "MNIST-Scale")
    lines = [result(config) for config in runs[2:]]
    lines.append(failed(runs[1]) | {"history": lines[0]["history"]})
    data = load(lines, again=[result(runs[0]), result(runs[1])])
    assert report.values(data, cell).isna().tolist() == [True, True, False, False, False, False]


def test_repeats_stand_beside_the_run_in_the_tables(load):
    first, second = of_cell("1", "SS-CNN", "MNIST-Scale")[:2]
    untested = EXPERIMENTS["tuning"].runs[0]
    lines = [result(config, 0.02) for config in (first, second, untested)]
    again = [result(first, 0.024), result(first, 0.022), result(second, 0.018), result(untested, 0.01)]
    data = load(lines, again=again)
    name, gaps = "SS-CNN, MNIST-Scale, 56 px", " | ".join([GAP] * 4)
    shown = report.repeats(data)
    assert f"| {name}, in the tables | 2.00 | 2.00 | {gaps} | 2.00 |" in shown
    assert f"| {name}, another run (1) | 2.40 | 1.80 | {gaps} | 2.10 |" in shown
    assert f"| {name}, another run (2) | 2.20 | {GAP} | {gaps} | {GAP} |" in shown  # a mean of other splits
    one = math.sqrt((2 * 0.2**2 + 2 * 0.1**2) / 3)
    assert report.repeat_deviation(data) == f"{one:.2f}"
    assert report.repeat_deviation(data, 3) == f"{one * math.sqrt(2 / 3):.2f}"


def test_an_effect_is_between_runs_that_are_alike_in_all_else(load):
    def error(config):
        return 0.01 + 0.002 * (config.basis == "area") + 0.004 * (config.support == "crop") + 0.001 * config.split

    lines = [result(config, error(config)) for config in EXPERIMENTS["choices"].runs]
    shown = report.effects(load(lines))
    assert "| areas instead of points | +0.20 ± 0.00 | **+0.20 to +0.20** | 0 of 24 |" in shown
    assert "| crop instead of disc | +0.40 ± 0.00 | **+0.40 to +0.40** | 0 of 24 |" in shown
    assert "| m = 0.5 instead of m = 1 | 0.00 ± 0.00 | 0.00 to 0.00 |" in shown
    assert "| areas instead of points | +0.20 ± 0.00 | **+0.20 to +0.20** | 0 of 23 |" in report.effects(
        load(lines[1:])
    )


def test_ablations_are_compared_split_by_split(load):
    runs = {line: of_cell("ablations", line, "SS-CNN") for line in ("SS-CNN, as in Table 1", "basis area")}
    base, area = runs.values()
    lines = [result(config, 0.02 + 0.01 * config.split) for config in base]
    lines += [result(config, 0.021 + 0.011 * config.split) for config in area[:2]]
    shown = report.table(load(lines), "ablations")
    assert "| SS-CNN, as in Table 1 | 3.00 ± 1.00 | base | 10 | 6 |" in shown
    assert "| basis area | 2.65 ± 0.78 (2 of 3) | +0.15 ± 0.07 | 10 | 6 |" in shown
    assert f"| m = 0 | {GAP} | {GAP} | {GAP} | {GAP} |" in shown


def test_the_papers_input_sizes_are_compared_on_the_same_splits(load):
    errors = {("SS-CNN", "56 px"): 0.02, ("Spatial Transformer", "28 px"): 0.03, ("SS-CNN", "28 px"): 0.5}
    lines = [result(config, error) for cell, error in errors.items() for config in of_cell("sizes", *cell)]
    lost = of_cell("sizes", "Spatial Transformer", "28 px")[1].to_dict()
    shown = report.paper_sizes(load([line for line in lines if line["config"] != lost]))
    compared = "-1.00 ± 0.00 | **-1.00 to -1.00** | 2 of 2"
    assert f"| Spatial Transformer, 28 px | 3.00 ± 0.00 (2 of 3) | 1.97 ± 0.09 | {compared} |" in shown
    assert f"| SS-CNN, 56 px | 2.00 ± 0.00 | 1.91 ± 0.04 | {GAP} | {GAP} | {GAP} |" in shown
    assert f"| LocScaleEq-CNN, 28 px | {GAP} | 2.44 ± 0.07 | {GAP} | {GAP} | {GAP} |" in shown


def test_settings_are_chosen_by_error_then_loss_once_all_have_ended(load):
    runs = [c for c in EXPERIMENTS["tuning"].runs if (c.model, c.dataset) == ("ss-cnn", "mnist-scale")]
    lines = [result(config, 0.02, val_loss=0.5) for config in runs]
    lines[3] |= {"val_loss": 0.4}
    best = grids.Settings(runs[3].lr, runs[3].weight_decay, runs[3].upsample)
    data = load(lines)
    assert report.chosen_settings(data, "SS-CNN", "mnist-scale") == best
    assert report.table(data, "tuning", title=False).count("✓") == 1
    assert f"| MNIST-Scale, {best} | {GAP} | 2.00 ✓ |" in report.table(data, "tuning")
    assert f"(validation chose {best})" in report.chosen(data)
    assert report.chosen_settings(load(lines[1:]), "SS-CNN", "mnist-scale") is None
    ended = failed(runs[0]) | {"history": lines[0]["history"]}
    assert report.chosen_settings(load([ended, *lines[1:]]), "SS-CNN", "mnist-scale") == best


def test_words_follow_the_numbers(load):
    errors = {"SS-CNN": 0.02, "Spatial Transformer": 0.01, "LocScaleEq-CNN": 0.03, "LocScaleInv-CNN": 0.03}
    said = report.standing(load(table_1(errors)), "1", "MNIST-Scale")
    assert said == (
        "is lower than that of LocScaleEq-CNN and LocScaleInv-CNN, higher than that of Spatial Transformer; "
        "it has not been compared with that of Plain CNN"
    )
    said = report.standing(load(table_1(errors | {"Plain CNN": 0.02}, wobble=0.05)), "1", "MNIST-Scale")
    assert said == (
        "is higher than that of Spatial Transformer; "
        "it cannot be told apart from that of LocScaleEq-CNN, LocScaleInv-CNN and Plain CNN"
    )
    said = report.standing(load(table_1({"SS-CNN": 0.02, "Plain CNN": 0.02}, wobble=0.05)), "1", "MNIST-Scale")
    assert said.startswith("cannot be told apart from that of Plain CNN; it has not been compared with that of Spatial")
    assert (report.words(["a"]), report.words(["a", "b", "c"]), report.words([])) == ("a", "a, b and c", "")


def test_releases_are_told_and_compared(load):
    lines = [result(config, 0.13) for config in EXPERIMENTS["1"].runs if config.dataset == "fmnist-scale"]
    for line in lines:
        line["environment"] = ENVIRONMENT | {"data": {"digest": "d", "source": {"release": "official"}}}
    data = load(lines)
    assert report.release(data, "FMNIST-Scale") == "official"
    changes = [13 - before for before in grids.FIRST_RELEASE.values()]
    assert report.release_change(data) == f"{min(changes):+.2f} to {max(changes):+.2f}"


def test_plots_are_drawn_from_what_there_is(load, tmp_path):
    runs, networks = longer(LONGER)
    tested = of_cell("longer", "LocScaleInv-CNN", "120 epochs")
    data = load(runs, [n for n in networks if n["config"] not in [c.to_dict() for c in tested]])
    assert set(report.plots(tmp_path)) == {
        f"figures/{name}.png" for name in ("scales-mnist-scale", "validation-mnist-scale", "distortion")
    }
    drawn = report._ratio_lines(data, "LocScaleInv-CNN")
    assert list(drawn) == ["paper", "here, 60 epochs", "here, 300 epochs"]
    assert drawn["paper"][0] == pytest.approx([0.584, 0.625, 0.583, 0.606, 0.623], abs=0.001)
    means, splits = drawn["here, 300 epochs"]
    assert means == pytest.approx([5 / 4] * 5)
    assert np.array(splits) == pytest.approx(np.full((6, 5), 5 / 4))


def test_an_unknown_cell_is_named(load):
    with pytest.raises(ValueError, match="there is no cell 'SS-CNN', 'MNIST' in the experiment '1'"):
        report.values(load(), Cell("1", "SS-CNN", "MNIST"))


@pytest.fixture(scope="module")
def rendered():
    return pages.render()


def test_the_page_on_the_reproduction_is_short_and_shows_every_claim(rendered):
    text = rendered[Path("docs/reproduction.md")]
    assert len(text.splitlines()) <= 130
    for claim in grids.CLAIMS.values():
        assert claim.text in text
        assert f"](evidence/{claim.evidence}.md)" in text
    assert len(re.findall(r"\[(holds|fails|undecided)\]\(evidence", text)) == 7


def test_every_target_stands_on_its_page(rendered):
    for claim in grids.TARGETS.values():
        assert claim.text in rendered[Path("docs/evidence") / f"{claim.evidence}.md"]


def test_every_page_of_evidence_asks_a_question_and_answers_first(rendered):
    found = [path for path in rendered if path.parent == Path("docs/evidence") and path.name != "README.md"]
    assert len(found) >= 8
    index = rendered[Path("docs/evidence/README.md")]
    for path in found:
        _, title, answer, *_ = rendered[path].split("\n\n")
        assert title.startswith("# ")
        assert title.endswith("?")
        assert not answer.startswith(("|", "!", "#"))
        assert f"[{title[2:]}]({path.name})" in index
