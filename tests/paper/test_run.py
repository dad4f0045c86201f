"""The runs of an experiment: made, published, resumed, skipped; what goes wrong is named."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch

from paper import __main__ as commands
from paper import grids, pages, run
from paper.grids import EXPERIMENTS, Experiment, Row
from paper.record import Record
from paper.results import of_run, publish, read
from scalesteer.app import evaluate, load, load_model
from scalesteer.datasets import ImageSet
from scalesteer.files import DataError, locked
from tests.app import jobs
from tests.app.test_train import outcome

RECORD = Record("plain-cnn", upsample=1, sizes=(60, 20, 20), batch_size=20, epochs=3)
"""Of the tiny run."""


@pytest.fixture
def grid(tiny):
    """One line, two splits, one of them the tiny run."""
    assert RECORD.run == tiny
    rows = tuple(Row("Plain", "60 epochs", replace(RECORD, split=split)) for split in (0, 1))
    return Experiment("tiny", rows, distorted=True)


def places(tmp_path):
    return {"runs": tmp_path / "runs", "results": tmp_path / "results", "device": "cpu"}


def test_experiment_is_run_published_and_not_run_again(cache, grid, tiny, undisturbed, tmp_path):
    assert run.make("2", grid, **places(tmp_path)) == []
    assert outcome(tmp_path / "runs" / tiny.name) == outcome(undisturbed)
    found, distorted = (dict(read(tmp_path / "results", kind)) for kind in ("runs", "distortion"))
    assert set(found) == set(distorted) == set(grid.runs)
    assert {len(column) for column in found[RECORD]["history"].values()} == {RECORD.epochs}
    model = load_model(tmp_path / "runs" / tiny.name)
    images = load(tiny, "test")
    assert distorted[RECORD]["environment"]["command"] == "python -m paper run 2 --splits 0"
    assert distorted[RECORD]["errors"]["0"] == found[RECORD]["test_error"]
    assert distorted[RECORD]["errors"]["30"] == evaluate(model, images.distorted(30))["error"]
    assert distorted[RECORD]["moved"] == {f"{p:g}": evaluate(model, run.moved(images, p))["error"] for p in (0.5, 1)}
    for path in (tmp_path / "results").rglob("*.jsonl"):
        assert str(tmp_path) not in path.read_text()
    shutil.rmtree(tmp_path / "runs")
    assert run.make("2", grid, **places(tmp_path)) == []
    assert not (tmp_path / "runs").exists()


def test_moving_by_whole_pixels_is_a_copy_and_between_them_bilinear():
    pixels = torch.randint(256, (300, 28, 40), dtype=torch.uint8)  # more than one chunk
    images = ImageSet(pixels, torch.zeros(300, dtype=torch.int64), torch.ones(300))
    assert torch.equal(run.moved(images, 0).images, pixels)
    whole = run.moved(images, 1).images
    assert torch.equal(whole[:, :-1, :-1], pixels[:, 1:, 1:])
    assert not whole[:, -1].any()
    assert not whole[:, :, -1].any()
    wide = torch.nn.functional.pad(pixels.long(), (0, 1, 0, 1))
    four = wide[:, :-1, :-1] + wide[:, :-1, 1:] + wide[:, 1:, :-1] + wide[:, 1:, 1:]
    assert torch.equal(run.moved(images, 0.5).images.long(), (four + 2) // 4)
    assert torch.equal(run.moved(images, -1).images[:, 1:, 1:], pixels[:, :-1, :-1])


def test_distortion_is_tested_where_it_is_asked_for_only(cache, grid, tmp_path):
    run.make("1", grid._replace(distorted=False), **places(tmp_path))
    assert read(tmp_path / "results", "distortion") == []


def test_fresh_takes_no_notice_of_published_results(cache, grid, tiny, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "runs" / tiny.name)
    own = of_run(RECORD, json.loads((undisturbed / "result.json").read_text()))
    one = Experiment("tiny", grid.rows[:1])
    publish(own | {"test_error": 0.0}, tmp_path / "results")
    for fresh, expected in ((False, 0.0), (True, own["test_error"])):
        assert run.make("1", one, **places(tmp_path), fresh=fresh) == []
        assert dict(read(tmp_path / "results"))[RECORD]["test_error"] == expected


def test_results_that_could_not_be_kept_are_told_before_training(grid, tmp_path):
    (tmp_path / "results").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written to"):
        run.make("1", grid, **places(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_interrupted_experiment_goes_on(start, cache, grid, tiny, undisturbed, tmp_path):
    running = start(jobs.experiment, grid, str(tmp_path))
    while not read(tmp_path / "results"):
        assert running.is_alive()
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGINT)
    running.join(300)
    assert run.make("1", grid, **places(tmp_path)) == []
    assert outcome(tmp_path / "runs" / tiny.name) == outcome(undisturbed)


def test_run_in_other_hands_is_passed_over_and_named(cache, grid, tiny, tmp_path):
    (tmp_path / "runs" / tiny.name).mkdir(parents=True)
    with locked(tmp_path / "runs" / tiny.name / ".lock"):
        problems = run.make("1", grid, **places(tmp_path))
    assert len(problems) == 1
    assert f"is in use by process {os.getpid()}" in problems[0]
    assert [config for config, _ in read(tmp_path / "results")] == [replace(RECORD, split=1)]


def test_failed_run_is_named_and_published(cache, tiny, tmp_path):
    bad = replace(RECORD, split=1, lr=1e30, schedule="constant")
    problems = run.make("1", Experiment("tiny", (Row("Plain", "", bad),), distorted=True), **places(tmp_path))
    assert len(problems) == 1
    assert problems[0].startswith(f"{bad.run.name}: the loss")
    assert dict(read(tmp_path / "results"))[bad]["status"] == "failed"
    assert read(tmp_path / "results", "distortion") == []


def test_result_without_its_model_is_told(cache, grid, tmp_path):
    run.make("1", grid._replace(distorted=False), **places(tmp_path))
    problems = run.make("2", grid, **{**places(tmp_path), "runs": tmp_path / "elsewhere"})
    assert len(problems) == len(grid.runs)
    assert all("no checkpoint can be read at" in problem or "holds no model" in problem for problem in problems)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"splits": [9]}, r"`splits` must be some of 0, 1, 2, 3, 4, 5 \(got 9\)"),
        ({"splits": [0, 9]}, r"\(got 9\)"),
        ({"splits": []}, r"\(got none\)"),
        ({"methods": ["SSCNN"]}, r"`methods` must be some of Spatial Transformer, SS-CNN, .* \(got SSCNN\)"),
        ({"datasets": ["mnist-scale-local-2"]}, r"`datasets` must be some of mnist-scale, fmnist-scale \("),
    ],
)
def test_part_that_is_not_in_an_experiment_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        run.select(EXPERIMENTS["1"], **options)


def test_part_of_an_experiment():
    part = run.select(EXPERIMENTS["1"], splits=[1, 3], methods=["SS-CNN"], datasets=["mnist-scale"])
    assert [(c.split, c.model, c.dataset) for c in part.runs] == [(s, "ss-cnn", "mnist-scale") for s in (1, 3)]
    assert run.select(EXPERIMENTS["2"]) == EXPERIMENTS["2"]
    seeds = run.select(EXPERIMENTS["stir"], seeds=[7], datasets=["stir-mnist"]).rows
    assert {(row.config.seed, row.line) for row in seeds} == {(7, grids.LEADING["stir"])}


def test_forecast_counts_runs_that_cost_the_same(undisturbed, tiny, tmp_path):
    own = of_run(RECORD, json.loads((undisturbed / "result.json").read_text()))
    publish(own | {"seconds": 1800.0}, tmp_path)
    alike, dearer = replace(RECORD, split=1, lr=0.1, tuning=True), replace(RECORD, epochs=4)
    device = own["environment"]["device"]
    assert run.forecast([alike, dearer, replace(alike, seed=3)], tmp_path) == (
        f"3 runs to make; 2 of them take 1.0 hours of training on {device}."
    )
    assert run.forecast([dearer], tmp_path) == "1 runs to make."
    assert run.forecast([dearer], tmp_path / "none") == "1 runs to make."


def paper(capsys, *argv):
    code = commands.app.main([str(word) for word in argv], "python -m paper")
    return code, *capsys.readouterr()


def test_split_that_does_not_exist_is_an_error(capsys, tmp_path):
    code, out, err = paper(capsys, "run", 1, "--splits", 9, "--runs", tmp_path, "--results", tmp_path)
    assert (code, out) == (2, "")
    assert "`splits` must be some of 0, 1, 2, 3, 4, 5 (got 9)" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine", "ray", "--gpus-per-run", "2"), "`gpus_per_run` must be above 0 and at most 1, one GPU (got 2.0)"),
        (("--engine", "ray", "--address", "head"), "`address` must be HOST:PORT or auto (got 'head')"),
        (("--address", "auto"), "`address` (got 'auto') is for engine='ray' only"),
    ],
)
def test_command_passes_on_where_to_run(capsys, tmp_path, flags, message):
    code, out, err = paper(capsys, "run", 1, *flags, "--runs", tmp_path / "runs", "--results", tmp_path / "results")
    assert (code, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_command_runs_an_experiment_and_prints_its_table(cache, grid, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "1", grid._replace(distorted=False))
    flags = ("--runs", tmp_path / "runs", "--results", tmp_path / "results", "--device", "cpu")
    code, out, _ = paper(capsys, "run", "1", "--splits", 1, *flags)
    assert code == 0
    (config, result), *others = read(tmp_path / "results")
    assert (config.split, others) == (1, [])
    assert f"{100 * result['test_error']:.2f} (1 of 2)" in out


def test_table_without_results_has_gaps(capsys, tmp_path):
    code, out, _ = paper(capsys, "table", "1", "--results", tmp_path)
    assert code == 0
    title, empty, *rows = out.splitlines()
    assert (title, empty) == ("Table 1. Error rates on MNIST-Scale and FMNIST-Scale", "")
    assert len({len(row) for row in rows}) == 1  # aligned
    assert rows[3].split() == ["SS-CNN", "–", "1.91", "±", "0.04", "–", "14.24", "±", "0.31"]
    code, out, _ = paper(capsys, "table", "1", "3", "--markdown", "--results", tmp_path)
    assert "| SS-CNN | – | 1.91 ± 0.04 | – | 14.24 ± 0.31 |" in out
    assert out.count("**Table") == 2
    code, _, err = paper(capsys, "table", "4")
    assert code == 2
    assert "'choices'" in err


def test_report_makes_runs_only_if_asked_to_and_tunes_first(capsys, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        run, "make", lambda name, **own: made.append((name, own["fresh"])) or [f"{name} is not finished"]
    )
    monkeypatch.setattr(pages, "write", lambda: ["docs/page.md:3"])
    assert paper(capsys, "report", "--runs", tmp_path) == (0, "docs/page.md:3\n", "")
    assert made == []
    code, out, err = paper(capsys, "report", "--fresh", "--only", "1", "tuning", "--runs", tmp_path)
    assert made == [("tuning", True), ("1", True)]
    assert out.startswith("140 runs to make; 140 of them take")
    assert (code, err) == (2, "scalesteer: not finished: tuning is not finished; 1 is not finished\n")
    assert paper(capsys, "report", "--fresh", "--only", "4")[0] == 2
    assert len(made) == 2


def test_folder_of_results_that_is_not_there_is_told(capsys, tmp_path):
    code, out, err = paper(capsys, "table", "1", "--results", tmp_path / "none")
    assert (code, out) == (2, "")
    assert "is not a folder" in err


def test_damaged_results_are_told_without_a_traceback(capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mnist-scale.jsonl").write_text("{}\n")
    code, out, err = paper(capsys, "table", "1", "--results", tmp_path)
    assert (code, out) == (2, "")
    assert "mnist-scale.jsonl, line 1: " in err
