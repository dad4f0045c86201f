import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paper import runner
from paper.results import collect, publish
from paper.runner import evaluate_elastic, run_table
from paper.tables import Cell, Table, render
from scalesteer.files import locked
from scalesteer.training import RunError, evaluate, load, load_model
from tests.training import jobs
from tests.training.test_train import outcome


@pytest.fixture
def table(tiny):
    """One row, two splits, one of them the tiny run."""
    runs = (tiny, replace(tiny, split=1))
    return Table("0", "tiny", ("α = 0", "α = 30"), {"Plain": (Cell(runs, alpha=0.0), Cell(runs, alpha=30.0))})


@pytest.fixture(autouse=True)
def _workers_find_the_package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(runner.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def places(tmp_path):
    return {"runs": tmp_path / "runs", "results": tmp_path / "results", "device": "cpu"}


def test_table_is_run_published_and_not_run_again(cache, table, tiny, undisturbed, tmp_path, monkeypatch):
    assert run_table(table, **places(tmp_path)) == []
    assert outcome(tmp_path / "runs" / tiny.name) == outcome(undisturbed)
    found = collect(tmp_path / "results")
    assert set(found.runs) == set(table.runs)
    published = found.runs[tiny]
    assert {len(column) for column in published["history"].values()} == {tiny.epochs}
    assert {"test_error_by_scale", "parameters", "seconds", "config"} < set(published)
    assert {"commit", "torch", "numpy", "python", "device", "command"} < set(published["environment"])
    assert {"digest", "source"} < set(published["environment"]["data"])
    best = found.best(table.runs)
    model, _ = load_model(tmp_path / "runs" / best.name)
    distorted = evaluate(model, load(best, "test").distorted(30))["error"]
    moved = evaluate(model, load(best, "test").moved(1))["error"]
    assert set(found.elastic) == set(table.runs)
    about = found.elastic[best]["environment"]
    assert about["command"] == f"scalesteer run {table.name} --splits {best.split}"
    assert found.elastic[best]["errors"] == {"0": found.runs[best]["test_error"], "30": distorted}
    assert set(found.elastic[best]["moved"]) == {"0.5", "1"}
    assert found.elastic[best]["moved"]["1"] == moved
    assert f"| Plain | {100 * found.runs[best]['test_error']:.2f} | – |" in render(table, found, "markdown")
    for path in (tmp_path / "results").rglob("*.json"):
        assert str(tmp_path) not in path.read_text()
    monkeypatch.setattr(runner, "train", None)
    publish({k: v for k, v in found.elastic[best].items() if k != "moved"}, tmp_path / "results", "elastic")
    assert run_table(table, **places(tmp_path)) == []  # what an earlier version left out is made up for
    assert collect(tmp_path / "results").elastic == found.elastic
    monkeypatch.setattr(runner, "evaluate_elastic", None)
    assert run_table(table, **places(tmp_path)) == []


def test_fresh_takes_no_notice_of_published_results(cache, tiny, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "runs" / tiny.name)
    own = json.loads((undisturbed / "result.json").read_text())
    table = Table("0", "tiny", ("x",), {"Plain": (Cell((tiny,)),)})
    publish(own | {"test_error": 0.0}, tmp_path / "results")
    for fresh, expected in ((False, 0.0), (True, own["test_error"])):
        assert run_table(table, **places(tmp_path), fresh=fresh) == []
        assert collect(tmp_path / "results").test_errors([tiny]) == [expected]


def test_several_at_once_give_the_same_results(cache, table, tiny, undisturbed, tmp_path):
    assert run_table(table, jobs=2, **places(tmp_path)) == []
    assert outcome(tmp_path / "runs" / tiny.name) == outcome(undisturbed)
    assert set(collect(tmp_path / "results").runs) == set(table.runs)


def test_interrupted_workers_stop_with_a_checkpoint(cache, tiny, tmp_path, monkeypatch):
    long = replace(tiny, epochs=10_000)
    work = runner._at_once([long], tmp_path, "cpu", None, 2)
    started, popen, sleep = [], subprocess.Popen, time.sleep
    monkeypatch.setattr(
        runner.subprocess, "Popen", lambda *args, **options: started.append(popen(*args, **options)) or started[-1]
    )

    def interrupt(*_):
        if (tmp_path / long.name / "metrics.jsonl").exists():
            raise KeyboardInterrupt
        sleep(0.05)

    monkeypatch.setattr(runner.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(work)
    assert [worker.returncode for worker in started] == [143]
    assert list(tmp_path.glob("*/last-*.safetensors"))


def test_results_that_could_not_be_kept_are_told_before_training(table, tmp_path, monkeypatch):
    (tmp_path / "results").write_text("in the way")
    monkeypatch.setattr(runner, "train", None)
    with pytest.raises(RunError, match="cannot be written to"):
        run_table(table, **places(tmp_path))


def test_interrupted_table_goes_on(start, cache, table, tiny, undisturbed, tmp_path):
    running = start(jobs.table, table, str(tmp_path))
    while not list((tmp_path / "results" / "runs").glob("*.json")):
        assert running.is_alive()
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGINT)
    running.join(30)
    assert run_table(table, **places(tmp_path)) == []
    assert outcome(tmp_path / "runs" / tiny.name) == outcome(undisturbed)


def test_run_in_other_hands_is_passed_over_and_named(cache, table, tiny, tmp_path):
    (tmp_path / "runs" / tiny.name).mkdir(parents=True)
    with locked(tmp_path / "runs" / tiny.name / ".lock"):
        problems = run_table(table, **places(tmp_path))
    assert len(problems) == 1
    assert f"is in use by process {os.getpid()}" in problems[0]
    assert list(collect(tmp_path / "results").runs) == [replace(tiny, split=1)]


def test_failed_run_is_named_published_and_not_averaged(cache, tiny, tmp_path):
    good, bad = tiny, replace(tiny, split=1, lr=1e30, schedule="constant")
    table = Table("0", "tiny", ("x",), {"Plain": (Cell((good, bad)),)})
    problems = run_table(table, **places(tmp_path))
    assert len(problems) == 1
    assert problems[0].startswith(f"{bad.name}: the loss")
    found = collect(tmp_path / "results")
    assert found.test_errors(table.runs) == [found.runs[good]["test_error"]]
    assert f"| {100 * found.runs[good]['test_error']:.2f} (1 of 2, 1 failed) |" in render(table, found, "markdown")
    assert f"{bad.name} failed and is left out" in render(table, found)


def test_result_without_its_model_is_told(cache, table, undisturbed, tmp_path):
    run_table(table, **places(tmp_path))
    for path in (tmp_path / "results" / "elastic").iterdir():
        path.unlink()
    problems = run_table(table, **{**places(tmp_path), "runs": tmp_path / "elsewhere"})
    assert len(problems) == len(table.runs)
    assert all("no checkpoint can be read at" in problem for problem in problems)
    written = evaluate_elastic(undisturbed, tmp_path / "results", table="2", alphas=(0.0,), device="cpu")
    assert json.loads(next((tmp_path / "results" / "elastic").iterdir()).read_text()) == written
