"""Many runs: what is told before any of them starts."""

import json
import shutil

import pytest

from scalesteer.app import RunError, engines
from scalesteer.app.engines import make_runs
from tests.runs import changed


def test_run_that_is_named_twice_is_made_once(tiny, tmp_path, monkeypatch):
    made = []

    def train(config, directory, **options):
        made.append(config)
        raise RunError("not here")

    monkeypatch.setattr(engines, "train", train)
    other = changed(tiny, split=1)
    found = make_runs([tiny, other, tiny, other], tmp_path / "runs", device="cpu")
    assert made == [tiny, other]
    assert found.problems == [f"{tiny.name}: not here", f"{other.name}: not here"]


def test_finished_runs_need_no_cluster(cache, tiny, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "runs" / tiny.name)
    # Nothing listens there: it would fail.
    made = make_runs([tiny], tmp_path / "runs", device="cpu", engine="ray", address="127.0.0.1:9")
    assert (list(made.results), made.problems) == ([tiny], [])
    assert made.results[tiny] == json.loads((undisturbed / "result.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "rya"}, r"`engine` must be one of 'local', 'ray' \(got 'rya'\)\. Did you mean 'ray'\?"),
        ({"address": "auto"}, r"`address` \(got 'auto'\) is for engine='ray' only"),
        ({"gpus_per_run": 0.5}, r"`gpus_per_run` \(got 0\.5\) is for engine='ray' only"),
        ({"engine": "ray", "gpus_per_run": 0}, r"`gpus_per_run` must be above 0 and at most 1, one GPU \(got 0\)"),
        ({"engine": "ray", "gpus_per_run": 2}, r"\(got 2\)"),
        ({"engine": "ray", "gpus_per_run": float("nan")}, r"`gpus_per_run` must be finite"),
        ({"engine": "ray", "gpus_per_run": 0.5, "device": "cpu"}, r"needs device 'cuda' or 'auto' \(got 'cpu'\)"),
        ({"engine": "ray", "device": "cuda:1"}, r"`device` must be one of 'auto', 'cpu', 'cuda' \(got 'cuda:1'\)"),
    ],
)
def test_wrong_argument_is_told_before_anything_starts(tiny, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_runs([tiny], tmp_path / "runs", **options)
    assert not list(tmp_path.iterdir())


def test_folder_of_runs_that_cannot_be_written_to_is_told(tiny, tmp_path):
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(ValueError, match=r"runs cannot be written to \(Not a directory\)"):
        make_runs([tiny], tmp_path / "runs", device="cpu", engine="ray")


def test_each_result_is_published_once(cache, tiny, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / tiny.name)
    told = []
    made = make_runs([tiny, tiny], tmp_path, publish=lambda *own: told.append(own), device="cpu")
    assert told == [(tiny, made.results[tiny])]
