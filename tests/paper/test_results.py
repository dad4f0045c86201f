"""One line for each run, sorted, checked; several processes may publish at once."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from paper import results
from paper.record import Record
from paper.results import publish, read
from scalesteer.app import Run, cli
from scalesteer.app.results import ResultError
from tests.paper.invented import ENVIRONMENT, distorted, failed, outcome

ROOT = Path(__file__).parents[2]


def test_what_is_published_is_read_small(tmp_path):
    config = Record("plain-cnn", split=3)
    result = outcome(config, epochs=100)
    path = publish(result, tmp_path)
    assert path == tmp_path / "runs" / "mnist-scale.jsonl"
    assert path.stat().st_size < 5000
    ((found, kept),) = read(tmp_path)
    assert found == config
    assert {key: kept[key] for key in kept if key != "history"} == {k: result[k] for k in result if k != "history"}
    for name, column in kept["history"].items():
        assert column == pytest.approx([epoch[name] for epoch in result["history"]], rel=5e-5)
    before = path.read_text()
    publish(kept, tmp_path)  # once more changes nothing
    assert path.read_text() == before


def test_errors_by_training_size_and_the_size_that_answered_may_be_there(tmp_path):
    sizes = {"test_error_inside": 0.01, "test_error_outside": 0.1, "size_correlation": -0.5}
    publish(outcome(Record()) | sizes, tmp_path)
    ((_, kept),) = read(tmp_path)
    assert {name: kept[name] for name in sizes} == sizes
    with pytest.raises(ResultError, match="unknown field 'size_correlation'"):
        publish(outcome(Record(tuning=True)) | {"size_correlation": 0.5}, tmp_path)


def test_each_kind_and_dataset_has_its_file(tmp_path):
    config = Record(split=1)
    assert publish(outcome(Record(dataset="fmnist-scale")), tmp_path).name == "fmnist-scale.jsonl"
    assert publish(distorted(config), tmp_path, "distortion") == tmp_path / "distortion.jsonl"
    assert publish(outcome(config), tmp_path, "repeats") == tmp_path / "repeats.jsonl"
    assert publish(failed(config), tmp_path) == tmp_path / "runs" / "mnist-scale.jsonl"
    assert publish(outcome(replace(config, tuning=True)), tmp_path) == tmp_path / "runs" / "mnist-scale.jsonl"
    assert [len(read(tmp_path, kind)) for kind in ("runs", "distortion", "repeats")] == [3, 1, 1]
    assert read(tmp_path / "elsewhere") == []


def test_lines_are_sorted_and_a_run_has_one(tmp_path):
    for split in (3, 1, 2, 1):
        publish(outcome(Record(split=split), split / 10), tmp_path)
    publish(outcome(Record(split=2), 0.5), tmp_path)
    assert [(config.split, result["test_error"]) for config, result in read(tmp_path)] == [(1, 0.1), (2, 0.5), (3, 0.3)]
    for error in (0.3, 0.1, 0.2):  # repeats are all kept, in their order
        publish(outcome(Record(), error), tmp_path, "repeats")
    assert [result["test_error"] for _, result in read(tmp_path, "repeats")] == [0.3, 0.1, 0.2]


def test_runs_whose_place_others_took_are_all_kept(tmp_path):
    config = Record(split=1)
    publish(outcome(config, 0.1), tmp_path)
    about = ENVIRONMENT | {"replaced": "another form took its place", "form": "six numbers"}
    for error in (0.3, 0.2):
        path = publish(outcome(config, error) | {"environment": about}, tmp_path, "replaced")
    assert path == tmp_path / "replaced" / "mnist-scale.jsonl"
    assert [result["test_error"] for _, result in read(tmp_path, "replaced")] == [0.3, 0.2]
    assert [result["test_error"] for _, result in read(tmp_path)] == [0.1]
    with pytest.raises(ResultError, match="unknown field 'replaced'"):
        publish(outcome(config) | {"environment": about}, tmp_path)


BROKEN = {
    "unknown field 'depth'": {"depth": 3},
    "missing field 'seconds'": {"seconds": None},
    "`test_error` cannot be 2.0": {"test_error": 2.0},
    "`test_error` cannot be -0.1": {"test_error": -0.1},
    "`val_error` cannot be NaN": {"val_error": float("nan")},
    "`parameters` cannot be true": {"parameters": True},
    "unknown settings in the configuration: depth": {"config": {"depth": 3}},
    "a configuration must be a mapping": {"config": []},
    "is not that of its `config`": {"identity": "0" * 12},
    "`status` must be finished or failed": failed(Record()) | {"status": "begun"},
    "unknown field 'host'": {"environment": ENVIRONMENT | {"host": "h"}},
    "missing field 'device'": {"environment": {k: v for k, v in ENVIRONMENT.items() if k != "device"}},
    "`data` cannot be": {"environment": ENVIRONMENT | {"data": {}}},
    "`history` cannot be": {"history": {name: [0.1] * (1 + (name == "loss")) for name in results.HISTORY}},
    "`test_error_by_scale` cannot be": {"test_error_by_scale": [{"from": 0, "to": 1, "images": 1, "error": 2}]},
    "too large": {"seconds": 10**400},
    "`test_error_outside` cannot be 1.5": {"test_error_outside": 1.5},
    "`size_correlation` cannot be -1.5": {"size_correlation": -1.5},
}


@pytest.mark.parametrize("problem", BROKEN)
def test_line_that_is_no_result_is_named(tmp_path, problem):
    path = publish(outcome(Record()), tmp_path)
    good = json.loads(path.read_text())
    change = BROKEN[problem]
    if "status" in change:
        bad = change | {"history": good["history"]}
    else:
        bad = {k: v for k, v in (good | change).items() if v is not None}
    path.write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(ResultError) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert problem in str(caught.value)
    with pytest.raises(ResultError, match="not a result to publish"):
        publish(bad, tmp_path)


@pytest.mark.parametrize("line", ["", "{", "[" * 100_000 + "]" * 100_000, "3", "null", "[]", '{"config": null}', "\0"])
def test_line_that_is_no_json_object_is_named(tmp_path, line):
    path = publish(outcome(Record()), tmp_path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ResultError, match=r"mnist-scale\.jsonl, line 2: \S"):
        read(tmp_path)


def test_second_line_of_a_run_or_a_run_in_the_wrong_file_is_named(tmp_path):
    path = publish(outcome(Record()), tmp_path)
    path.write_text(2 * path.read_text())
    with pytest.raises(ResultError, match="line 2: the same run as in line 1"):
        read(tmp_path)
    with pytest.raises(ResultError, match="line 2: the same run as in line 1"):  # nothing is built on such a file
        publish(outcome(Record(split=1)), tmp_path)
    path.unlink()
    publish(outcome(Record()), tmp_path).rename(path.with_name("fmnist-scale.jsonl"))
    with pytest.raises(ResultError, match=r"belongs into mnist-scale\.jsonl"):
        read(tmp_path)


def test_wrong_distortion_is_named(tmp_path):
    config = Record()
    for change in ({"errors": {"0": 1.5}}, {"errors": [0.1]}, {"status": "finished"}):
        with pytest.raises(ResultError, match="not a result to publish"):
            publish(distorted(config) | change, tmp_path, "distortion")


def test_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(ResultError, match=r"runs.*cannot be written"):
        publish(outcome(Record()), tmp_path)


def test_several_publish_at_the_same_time(tmp_path):
    configs = [Record(split=split, seed=seed) for split in range(4) for seed in range(10)]
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(lambda config: publish(outcome(config), tmp_path), configs))) == len(configs)
    assert {config for config, _ in read(tmp_path)} == set(configs)


def test_published_results_keep_to_the_schema():
    counts = {kind: len(read(ROOT / "results", kind)) for kind in ("runs", "distortion", "repeats")}
    assert counts["runs"] >= 338
    assert counts["distortion"] >= 84
    assert counts["repeats"] >= 14
    for path in [*(ROOT / "results" / "runs").iterdir(), *(ROOT / "results").glob("*.jsonl")]:
        if path.suffix == ".jsonl":
            assert path.stat().st_size <= 1_048_576
            names = [Record.from_dict(json.loads(line)["config"]).name for line in path.read_text().splitlines()]
            assert names == sorted(names)
    assert os.listdir(ROOT / "results" / "runs")


def test_runs_that_were_published_keep_their_names():
    pinned = (Path(__file__).parent / "published-names.txt").read_text().splitlines()
    names = {config.name for kind in ("runs", "replaced") for config, _ in read(ROOT / "results", kind)}
    assert len(set(pinned)) == 606
    assert set(pinned) - names == set()


def test_a_published_command_trains_what_its_record_says():
    lines = [line for kind in ("runs", "replaced") for line in read(ROOT / "results", kind)]
    commands = [(record, result["environment"]["command"].split()) for record, result in lines]
    commands = [(record, words) for record, words in commands if words[:2] == ["scalesteer", "train"]]
    assert len(commands) > 600
    for record, words in commands[::20]:
        assert cli.app.parse(words[1:]).made == record.run
    for record, _ in lines:
        assert Run.from_dict(record.run.to_dict()) == Run.from_dict(record.to_dict()) == record.run
        assert Record.from_dict(record.to_dict()) == record


def test_a_record_has_the_checks_and_plain_values_of_a_run():
    assert Record(lr=1, sizes=[50, 20, 20], batch_size=10) == Record(lr=1.0, sizes=(50, 20, 20), batch_size=10)
    assert Record("SS_CNN", "MNIST-scale local_2") == Record("ss-cnn", "mnist-scale-local-2")
    assert Record().identity == "44136fa355b3"  # of nothing that is not the default
    assert Record("plain-cnn", split=3, lr=0.125).identity == "b1e07799a643"
    with pytest.raises(ValueError, match=r"`upsample` must be 1 or 2 \(got 3\)"):
        Record(upsample=3)
    with pytest.raises(ValueError, match=r"`images` .* are for runs of one's own"):
        Record(images="photos")
    with pytest.raises(ValueError, match="unknown settings in the configuration: depth"):
        Record.from_dict({"depth": 3})
