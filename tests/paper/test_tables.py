import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from paper.results import ResultError, Results, collect, publish
from paper.tables import (
    DATASETS,
    FEW_IMAGES,
    GAP,
    GRID,
    LENGTHS,
    METHODS,
    RECIPES,
    TABLES,
    Cell,
    Recipe,
    Table,
    chosen,
    distorted_after,
    get_table,
    render,
    tuning_runs,
)
from scalesteer.training.config import RunConfig

COMMITTED = Path(__file__).parents[2] / "results"


def finished(config, test_error, val_error=0.5, device="a GPU", **more):
    about = {"config": config.to_dict(), "environment": {"device": device}}
    return {"status": "finished", "test_error": test_error, "val_error": val_error, **about, **more}


def failed(config):
    reason = "the loss became nan at step 7"
    return {"status": "failed", "reason": reason, "test_error": 0.99, "config": config.to_dict()}


def small():
    """Three rows, two columns, six splits: one row whole, one with gaps and failures, one empty."""
    runs = {
        (model, data): tuple(RunConfig(model, data, split) for split in range(6))
        for model in ("ss-cnn", "plain-cnn", "vector-field-cnn")
        for data in ("mnist-scale", "fmnist-scale")
    }
    paper = {"ss-cnn": ("1.91 ± 0.04", "14.24 ± 0.31"), "plain-cnn": ("", ""), "vector-field-cnn": ("2.44 ± 0.07", "")}
    rows = {
        model: (Cell(runs[model, "mnist-scale"], first), Cell(runs[model, "fmnist-scale"], second))
        for model, (first, second) in paper.items()
    }
    table = Table("1", "A small one", ("MNIST", "Fashion"), rows)
    results = {config: finished(config, 0.01 + 0.001 * config.split) for config in runs["ss-cnn", "mnist-scale"]}
    whole, gaps = runs["ss-cnn", "fmnist-scale"], runs["plain-cnn", "mnist-scale"]
    results[whole[2]] = finished(whole[2], 0.125)
    results |= {gaps[0]: finished(gaps[0], 0.02), gaps[1]: failed(gaps[1]), gaps[2]: finished(gaps[2], 0.03)}
    alone = runs["plain-cnn", "fmnist-scale"][3]
    results[alone] = failed(alone)
    return table, Results(results, {}), (gaps[1], alone)


def test_markdown_shows_numbers_gaps_and_failures():
    table, results, (first, second) = small()
    assert render(table, results, "markdown") == (
        "**Table 1. A small one**\n"
        "\n"
        "| error in % | MNIST | paper | Fashion | paper |\n"
        "|---|--:|--:|--:|--:|\n"
        "| ss-cnn | 1.25 ± 0.19 | 1.91 ± 0.04 | 12.50 (1 of 6) | 14.24 ± 0.31 |\n"
        "| plain-cnn | 2.50 ± 0.71 (2 of 6, 1 failed) | – | – (1 failed) | – |\n"
        "| vector-field-cnn | – | 2.44 ± 0.07 | – | – |\n"
        "\n"
        f"{first.name} failed and is left out: the loss became nan at step 7.\n"
        "\n"
        f"{second.name} failed and is left out: the loss became nan at step 7.\n"
    )
    assert math.isclose(0.187, statistics.stdev([1 + i / 10 for i in range(6)]), abs_tol=1e-3)


def test_text_is_aligned_and_says_the_same():
    table, results, _ = small()
    title, _, header, rule, *rows = render(table, results).splitlines()[:7]
    assert title == "Table 1. A small one"
    assert {len(line) for line in rows} == {len(header)} == {len(rule)}
    assert " ".join(rows[1].split()) == "plain-cnn 2.50 ± 0.71 (2 of 6, 1 failed) – – (1 failed) –"


def test_best_on_validation_is_shown_under_distortion():
    runs = tuple(RunConfig(split=split) for split in range(6))
    table = Table("2", "t", ("α = 0", "α = 20"), {"SS-CNN": (Cell(runs, "1.87", 0.0), Cell(runs, "5.6", 20.0))})
    measured = {
        runs[0]: finished(runs[0], test_error=0.01, val_error=0.03),
        runs[1]: finished(runs[1], test_error=0.05, val_error=0.02),  # the best, though its test is worse
        runs[2]: failed(runs[2]),
    }
    other = {runs[0]: {"errors": {"0": 0.01, "20": 0.02}}}
    row = "| SS-CNN | – | 1.87 | – | 5.6 |"
    assert row in render(table, Results(measured, {}), "markdown")
    assert row in render(table, Results(measured, other), "markdown")
    own = {runs[1]: {"errors": {"0": 0.05, "20": 0.0625}}}
    shown = render(table, Results(measured, other | own), "markdown")
    assert "| SS-CNN | 5.00 (2 of 6, 1 failed) | 1.87 | 6.25 (2 of 6, 1 failed) | 5.6 |" in shown


def test_runs_of_another_device_are_named_and_not_timed():
    table = get_table("ablations")
    runs = table.rows["LocScaleEq-CNN, 28 px"][0].runs
    devices = dict(zip(runs, ("a GPU", "a GPU", "a CPU"), strict=True))
    costs = {"a GPU": {"parameters": 7, "seconds": 20}, "a CPU": {"parameters": 7, "seconds": 5000}}
    measured = {c: finished(c, 0.02 + 0.01 * c.split, device=d, **costs[d]) for c, d in devices.items()}
    shown = render(table, Results(measured, {}), "markdown")
    assert "| LocScaleEq-CNN, 28 px | 3.00 ± 1.00 | – | 7 | 20 |" in shown
    assert shown.endswith(f"\n\nTrained on a CPU: {runs[2].name}.\n")
    alike = {config: finished(config, 0.02, **costs["a GPU"]) for config in runs}
    assert "Trained on" not in render(table, Results(alike, {}), "markdown")


def test_every_table_is_shown_without_results(tmp_path):
    results = collect(tmp_path)
    for name in TABLES:
        table = get_table(name)
        shown = render(table, results, "markdown")
        assert all(f"| {row}" in shown for row in (table.columns if name == "tuning" else table.rows))
        assert ("±" in shown) == (name in "13")


def test_the_papers_grids():
    one, two, three = (get_table(name) for name in "123")
    assert list(one.rows) == list(METHODS)
    assert (len(one.runs), len(two.runs), len(three.runs)) == (60, 36, 54)
    assert {config for config in two.runs if config.basis is None} < set(one.runs)  # trained once
    assert [cell.alpha for cell in two.rows["SS-CNN"]] == [0, 10, 20, 30, 40]
    assert [config.split for config in one.runs] == sorted([*range(6)] * 10)
    for config in three.runs:
        steps = config.epochs * (config.train_images // config.batch_size)
        assert config.batch_size <= config.train_images // 2
        assert steps >= 1000
    assert three.columns == ("1 % data", "10 % data", "100 % data")
    assert list(FEW_IMAGES) == [100, 1000, 10_000]


def test_recipe_changes_its_method_only(monkeypatch):
    before = get_table("1")
    monkeypatch.setitem(RECIPES, ("SS-CNN", "mnist-scale"), Recipe(0.125, 0.25, 1))
    after = get_table("1")
    first, second = after.rows["SS-CNN"]
    assert {(config.lr, config.weight_decay, config.upsample) for config in first.runs} == {(0.125, 0.25, 1)}
    assert second == before.rows["SS-CNN"][1]
    assert {config.lr for cell in get_table("3").rows["SS-CNN"] for config in cell.runs} == {0.125}  # made of digits
    assert all(after.rows[method] == before.rows[method] for method in METHODS if method != "SS-CNN")


def test_part_of_a_table():
    part = get_table("3").part(splits=[1, 4], methods=["SS-CNN"])
    assert list(part.rows) == ["SS-CNN"]
    assert [config.split for config in part.runs] == [1, 1, 1, 4, 4, 4]
    with pytest.raises(ValueError, match="Did you mean 'SS-CNN'"):
        get_table("3").part(methods=["SS-CN"])
    part = get_table("tuning").part(methods=["Plain CNN"], datasets=["fmnist-scale"])
    assert {(config.model, config.dataset) for config in part.runs} == {("plain-cnn", "fmnist-scale")}
    assert len(part.runs) == len(GRID)
    with pytest.raises(ValueError, match="`table` must be one of '1', '2', '3'"):
        get_table("4")


def tuned(config, val_error, val_loss=0.1):
    about = {"config": config.to_dict(), "environment": {"device": "a GPU"}}
    return {"status": "finished", "val_error": val_error, "val_loss": val_loss, **about}


def test_validation_chooses_the_lowest_error_and_then_loss():
    runs = tuning_runs("SS-CNN", "mnist-scale")
    first, second, third, *_ = GRID
    found = {config: tuned(config, 0.03) for config in runs.values()}
    found[runs[first]] = tuned(runs[first], 0.02, 0.3)
    found[runs[second]] = tuned(runs[second], 0.02, 0.2)
    found[runs[third]] = failed(runs[third])
    assert chosen(Results(found, {}), "SS-CNN", "mnist-scale") == second
    shown = render(get_table("tuning"), Results(found, {}), "markdown")
    assert shown.count(" ✓ |") == 1
    assert "| MNIST-Scale, lr 0.002, weight decay 0.01, 56 px | – | 2.00 ✓ | – | – | – |" in shown
    assert "| MNIST-Scale, lr 0.002, weight decay 0.1, 28 px | – | – | – | – | – |" in shown
    assert f"{runs[third].name} failed" in shown
    del found[runs[third]]  # not run yet: nothing is chosen
    assert chosen(Results(found, {}), "SS-CNN", "mnist-scale") is None
    assert " ✓ |" not in render(get_table("tuning"), Results(found, {}), "markdown")


def test_recipes_are_what_validation_chose():
    results = collect(COMMITTED)
    assert set(RECIPES) == {(method, dataset) for method in METHODS for dataset in DATASETS}
    for (method, dataset), recipe in RECIPES.items():
        assert recipe in GRID
        assert chosen(results, method, dataset) in (recipe, None)


def test_choices_are_combined_and_tested_only_where_a_table_shows_it():
    rows = get_table("choices").rows
    assert len(rows) == 2**4
    elsewhere = {config for name in ("1", "2", "ablations") for config in get_table(name).runs}
    runs = get_table("choices").runs
    assert len(runs) == len({replace(config, tuning=False) for config in runs}) == 3 * 2**4
    assert all(config.tuning or config in elsewhere for config in runs)
    assert not any(replace(config, tuning=False) in elsewhere for config in runs if config.tuning)
    first = rows["points, m = 1, disc, six scales"][0]
    assert first.runs == get_table("1").rows["SS-CNN"][0].runs[:3]
    last = rows["areas, m = 0.5, crop, three scales"][0].runs[0]
    assert (last.basis, last.m, last.support, len(last.scales)) == ("area", 0.5, "crop", 3)
    measured = {config: finished(config, 0.02, 0.01, val_loss=0.25) for config in first.runs}
    shown = render(get_table("choices"), Results(measured, {}), "markdown")
    assert "| points, m = 1, disc, six scales | 1.00 ± 0.00 | 0.250 |" in shown
    assert f"| areas, m = 0.5, crop, three scales | {GAP} | {GAP} |" in shown


def test_longer_training_differs_in_epochs_alone():
    table, usual = get_table("longer"), get_table("2").rows
    methods = ("LocScaleInv-CNN", "Spatial Transformer", "SS-CNN", "Plain CNN")
    assert distorted_after(LENGTHS[0]) == {method: usual[method] for method in methods}
    assert list(table.rows) == [f"{method}, {epochs} epochs" for method in methods for epochs in (120, 300)]
    assert len(table.runs) == 48
    for name, row in table.rows.items():
        method, epochs = name.removesuffix(" epochs").split(", ")
        assert [cell.alpha for cell in row] == [cell.alpha for cell in usual[method]]
        assert {config.epochs for cell in row for config in cell.runs} == {int(epochs)}
        assert {tuple(replace(config, epochs=60) for config in cell.runs) for cell in row} == {usual[method][0].runs}
    first, second = table.rows["SS-CNN, 120 epochs"][0].runs[:2]
    before = usual["SS-CNN"][0].runs[0]
    measured = {first: finished(first, 0.02, 0.01), second: finished(second, 0.02, 0.02)}
    measured[before] = finished(before, 0.02, 0.05)
    elastic = {first: {"errors": {"0": 0.02, "40": 0.2}}, second: {"errors": {"0": 0.04}}}
    lines = render(table, Results(measured, elastic), "markdown").splitlines()
    gaps = " | ".join([GAP] * 5)
    row = f"1.50 ± 0.71 (2 of 6) | 3.00 ± 1.41 (2 of 6) | {GAP} | {GAP} | {GAP} | 20.00 (1 of 6)"
    assert lines[-6:] == [
        f"| SS-CNN, 60 epochs | 5.00 (1 of 6) | {gaps} |",
        f"| SS-CNN, 120 epochs | {row} |",
        f"| SS-CNN, 300 epochs | {GAP} | {gaps} |",
        *(f"| Plain CNN, {epochs} epochs | {GAP} | {gaps} |" for epochs in LENGTHS),
    ]
    again = Results(measured, elastic, {before: [finished(before, 0.02, 0.03)]})
    assert f"| SS-CNN, 60 epochs | 4.00 (1 of 6) | {gaps} |" in render(table, again, "markdown")


def test_tuning_looks_at_split_0_and_at_no_test_set():
    runs = get_table("tuning").runs
    assert len(runs) == len(METHODS) * len(DATASETS) * len(GRID)
    assert all(config.tuning and config.split == 0 for config in runs)
    assert not any(config.tuning for name in ("1", "2", "3", "ablations") for config in get_table(name).runs)


def test_ablations_are_compared_split_by_split():
    table = get_table("ablations")
    base, area = (table.rows[name][0].runs for name in ("SS-CNN, as in Table 1", "basis area"))
    assert set(base) < set(get_table("1").runs)
    assert area == tuple(replace(config, basis="area") for config in base)
    more = {"parameters": 443_078, "seconds": 60.0}
    found = {config: finished(config, 0.02 + 0.01 * config.split) | more for config in base}
    found |= {config: finished(config, 0.021 + 0.011 * config.split) | more for config in area[:2]}
    shown = render(table, Results(found, {}), "markdown").splitlines()
    assert "| SS-CNN, as in Table 1 | 3.00 ± 1.00 | base | 443,078 | 60 |" in shown
    assert "| basis area | 2.65 ± 0.78 (2 of 3) | +0.15 ± 0.07 | 443,078 | 60 |" in shown
    assert "| SS-CNN, 56 px | 3.00 ± 1.00 | base | 443,078 | 60 |" in shown  # the same runs
    assert "| m = 0 | – | – | – | – |" in shown


def test_published_results_are_collected(tmp_path):
    config = RunConfig("plain-cnn", split=3)
    history = [
        {"epoch": i, "loss": 1.23456789 / (i + 1), "val_loss": 0.5, "val_error": 0.0125, "seconds": 12.3456 * i}
        for i in range(100)
    ]
    result = {**finished(config, 0.02), "history": history, "reason": "[1,\\n2]", "data": {"sizes": [1, 2]}}
    path = publish(result, tmp_path)
    assert path == tmp_path / "runs" / f"{config.name}.json"
    assert path.stat().st_size < 5000
    assert '"sizes": [1, 2]' in path.read_text()
    publish({"config": config.to_dict(), "errors": {"0": 0.02}}, tmp_path, "elastic")
    found = collect(tmp_path)
    assert found.test_errors([config, RunConfig()]) == [0.02]
    assert found.elastic[config]["errors"] == {"0": 0.02}
    kept = found.runs[config]
    assert {key: kept[key] for key in kept if key != "history"} == {k: result[k] for k in result if k != "history"}
    for name, column in kept["history"].items():
        assert column == pytest.approx([entry[name] for entry in history], rel=5e-5)
    before = path.read_text()
    publish(kept, tmp_path)  # once more changes nothing
    assert path.read_text() == before


@pytest.mark.parametrize("change", [{"test_error": math.nan}, {"test_error": None}, {"config": {"depth": 3}}, None])
def test_file_that_is_no_result_is_named(tmp_path, change):
    path = publish(finished(RunConfig(), 0.5), tmp_path)
    path.write_text("{" if change is None else json.dumps(finished(RunConfig(), 0.5) | change))
    with pytest.raises(ResultError, match=rf"{path.name} does not hold a result"):
        collect(tmp_path)
