"""Numbers come from results; what is missing is a gap."""

import math
import statistics
from functools import partial

import numpy as np
import pytest

from paper import cells, claims, distortion, grids, report
from paper.cells import GAP
from paper.grids import EXPERIMENTS
from tests.paper.invented import ENVIRONMENT, LONGER, failed, longer, of_cell, replaced, result, under_distortion

ERRORS = {"spatial-transformer": 0.02, "ss-cnn": 0.018, "vector-field-cnn": 0.023, "plain-cnn": 0.022}


def first_table(models=ERRORS):
    """Results of Table 1: on MNIST-Scale 0.1 % more in each split, on FMNIST-Scale ten times the error."""
    for config in EXPERIMENTS["1"].runs:
        if config.model in models:
            factor = 10 if config.dataset == "fmnist-scale" else 1
            yield result(config, factor * ERRORS[config.model] + 0.001 * config.split)


def test_without_results_there_are_gaps_only(tmp_path):
    data = cells.load(tmp_path)
    for name in (name for name in EXPERIMENTS if name not in grids.LEADING):
        body = report.table(data, name, title=False)
        paper = {number for row in grids.PAPER.get(name, {}).values() for number in row.values()}
        for row in body.splitlines()[2:]:
            assert {cell.strip() for cell in row.strip("|").split("|")[1:]} <= {GAP, "base", *paper}
    papers = {row.get("MNIST-Scale") for row in grids.PAPER["1"].values()}
    tables = [report.paper_sizes, partial(report.pairs, name="1")]
    tables += [distortion.distorted, distortion.longer_pairs]
    for view in tables:
        for row in view(data).splitlines()[2:]:
            assert {cell.strip() for cell in row.strip("|").split("|")[1:]} <= {GAP, *papers}
    numbers = [report.at_or_below(data, "1", "2"), report.release(data, "FMNIST-Scale"), report.training_time(data)]
    numbers += [view(data) for view in (report.repeat_deviation, report.sizes_chosen, report.release_change)]
    numbers += [report.effects_span(data), report.gained_by_size(data, "SS-CNN", "Plain CNN")]
    numbers += [distortion.epochs_chosen(data, "SS-CNN"), distortion.ratio(data, "SS-CNN", "Plain CNN")]
    assert set(numbers) == {claims.verdict(data, "par", distortion.VALIDATION_CHOSE)} == {GAP}
    assert claims.claims(data).count(f"[{GAP}]") == 7
    assert report.plots(tmp_path) == distortion.plots(tmp_path) == {}


def test_tables_show_mean_and_deviation_beside_the_papers(load):
    data = load(first_table())
    shown = report.table(data, "1").splitlines()
    deviation = statistics.stdev([0.1 * i for i in range(6)])
    assert shown[0] == "**Table 1. Error rates on MNIST-Scale and FMNIST-Scale**"
    assert f"| SS-CNN | 2.05 ± {deviation:.2f} | 1.91 ± 0.04 | 18.25 ± {deviation:.2f} | 14.24 ± 0.31 |" in shown
    assert f"| LocScaleInv-CNN | {GAP} | 2.75 ± 0.09 | {GAP} | 15.91 ± 0.41 |" in shown
    assert "| Plain CNN, MNIST-Scale | -0.40 ± 0.00 | **-0.40 to -0.40** | 6 of 6 |" in report.pairs(data, "1")
    assert report.error(data, "1", "SS-CNN", "MNIST-Scale") == "2.05"
    assert report.training_time(data, "1", "2") == f"{48 * 6 / 3600:.1f} hours on a GPU"  # each run once
    assert report.at_or_below(load(list(first_table())[:-1]), "1") == GAP


def test_what_the_larger_input_gains_is_told_from_the_least_to_the_most(load):
    errors = {"SS-CNN": (0.023, 0.019), "LocScaleEq-CNN": (0.03, 0.02), "Plain CNN": (0.02, 0.022)}
    lines = [
        result(config, error)
        for line, both in errors.items()
        for column, error in zip(("28 px", "56 px"), both, strict=True)
        for config in of_cell("sizes", line, column)
    ]
    data = load(lines)
    assert report.gained_by_size(data, "SS-CNN") == "0.4"
    assert report.gained_by_size(data, "LocScaleEq-CNN", "SS-CNN", "Plain CNN") == "-0.2 to 1.0"
    assert report.gained_by_size(data, "SS-CNN", "Spatial Transformer") == GAP


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


def test_repeats_tell_how_much_is_chance(load):
    first, second = of_cell("1", "SS-CNN", "MNIST-Scale")[:2]
    untested = EXPERIMENTS["tuning"].runs[0]
    lines = [result(config, 0.02) for config in (first, second, untested)]
    again = [result(first, 0.024), result(first, 0.022), result(second, 0.018), result(untested, 0.01)]
    data = load(lines, again=again)
    one = math.sqrt((2 * 0.2**2 + 2 * 0.1**2) / 3)
    assert report.repeat_deviation(data) == f"{one:.2f}"
    assert report.repeat_deviation(data, 3) == f"{one * math.sqrt(2 / 3):.2f}"


def test_an_effect_is_between_runs_that_are_alike_in_all_else(load):
    def error(config):
        return 0.01 + 0.002 * (config.basis == "area") + 0.004 * (config.support == "crop") + 0.001 * config.split

    lines = [result(config, error(config)) for config in EXPERIMENTS["choices"].runs]
    found = report.changes_of(load(lines))
    assert found["areas instead of points"] == pytest.approx([0.2] * 24)
    assert found["crop instead of disc"] == pytest.approx([0.4] * 24)
    assert found["m = 0.5 instead of m = 1"] == pytest.approx([0] * 24)
    assert report.effects_span(load(lines)) == "0.00 to +0.40"
    missing = report.changes_of(load(lines[1:]))["areas instead of points"]
    assert [change for change in missing if change == change] == pytest.approx([0.2] * 23)


def test_ablations_are_compared_split_by_split(load):
    runs = {line: of_cell("ablations", line, "SS-CNN") for line in ("SS-CNN, as in Table 1", "basis area")}
    base, area = runs.values()
    lines = [result(config, 0.02 + 0.01 * config.split) for config in base]
    lines += [result(config, 0.021 + 0.011 * config.split) for config in area[:2]]
    shown = report.table(load(lines), "ablations")
    assert "| SS-CNN, as in Table 1 | 3.00 ± 1.00 | base | 10 | 6 |" in shown
    assert "| basis area | 2.65 ± 0.78 (2 of 3) | +0.15 ± 0.07 | 10 | 6 |" in shown
    assert f"| m = 0 | {GAP} | {GAP} | {GAP} | {GAP} |" in shown
    on_the_page = report.ablations(load(lines)).splitlines()[2:]
    assert len(on_the_page) == 12
    assert set(on_the_page) < set(shown.splitlines())


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
    assert report.chosen_settings(load(lines[1:]), "SS-CNN", "mnist-scale") is None
    ended = failed(runs[0]) | {"history": lines[0]["history"]}
    assert report.chosen_settings(load([ended, *lines[1:]]), "SS-CNN", "mnist-scale") == best


def test_releases_are_told_and_compared(load):
    lines = [result(config, 0.13) for config in EXPERIMENTS["1"].runs if config.dataset == "fmnist-scale"]
    for line in lines:
        line["environment"] = ENVIRONMENT | {"data": {"digest": "d", "source": {"release": "official"}}}
    before = [
        replaced(config, 0.12 + 0.005 * i + 0.001 * (config.split - 2.5))
        for i, method in enumerate(grids.METHODS)
        for config in of_cell("1", method, "FMNIST-Scale")
    ]
    data = load(lines, replaced=before)
    assert report.release(data, "FMNIST-Scale") == "official"
    assert report.release_change(data) == "-1.00 to +1.00"
    assert report.release_change(load(lines, replaced=before[6:])) == GAP  # one method's are missing


def test_what_a_name_stood_for_when_runs_were_made_is_told(load):
    configs = of_cell("ablations", "basis released-code", "SS-CNN")
    lines = [result(config) for config in configs]
    for line in lines:
        line["environment"] |= {"form": "made with a mirror image"}
    shown = report.table(load(lines), "ablations")
    assert shown.endswith("\n\nbasis released-code: made with a mirror image.")
    assert "mirror" not in report.table(load(map(result, configs)), "ablations")


def test_plots_are_drawn_from_what_there_is(load, tmp_path):
    runs, networks = longer(LONGER)
    tested = of_cell("longer", "LocScaleInv-CNN", "120 epochs")
    data = load(runs, [n for n in networks if n["config"] not in [c.to_dict() for c in tested]])
    assert set(report.plots(tmp_path)) == {"figures/scales-mnist-scale.png", "figures/validation-mnist-scale.png"}
    assert set(distortion.plots(tmp_path)) == {"figures/distortion.png"}
    drawn = distortion.ratio_lines(data, "LocScaleInv-CNN")
    assert list(drawn) == ["paper", "here, 60 epochs", "here, 300 epochs"]
    assert drawn["paper"][0] == pytest.approx([0.584, 0.625, 0.583, 0.606, 0.623], abs=0.001)
    means, splits = drawn["here, 300 epochs"]
    assert means == pytest.approx([5 / 4] * 5)
    assert np.array(splits) == pytest.approx(np.full((6, 5), 5 / 4))
