"""What `train` publishes, by itself: paper/ checks whole results, this the file they are in."""

import json

import pytest

from scalesteer.app.config import RunConfig
from scalesteer.app.results import ResultError, publish


def line(config, **numbers):
    return {"config": config.to_dict(), **numbers}


def test_result_is_one_line_with_its_history_as_rounded_columns(tmp_path):
    history = [{"epoch": i, "loss": 1.23456789, "val_loss": 0.5, "val_error": 0.1, "seconds": i} for i in range(2)]
    path = publish(line(RunConfig(), history=history), tmp_path)
    assert path == tmp_path / "runs" / "mnist-scale.jsonl"
    (text,) = path.read_text().splitlines()
    assert json.loads(text)["history"] == {
        "loss": [1.2346, 1.2346], "val_loss": [0.5, 0.5], "val_error": [0.1, 0.1], "seconds": [0, 1]
    }  # fmt: skip


def test_run_has_one_line_and_the_others_stay_as_they_are(tmp_path):
    for split in (2, 0, 1, 0):
        path = publish(line(RunConfig(split=split), seconds=1.0), tmp_path)
    first, _, last = path.read_text().splitlines()
    publish(line(RunConfig(split=1), seconds=2.0), tmp_path)
    lines = path.read_text().splitlines()
    assert (lines[0], lines[2]) == (first, last)
    assert [json.loads(text)["config"]["split"] for text in lines] == [0, 1, 2]
    assert json.loads(lines[1])["seconds"] == 2.0


@pytest.mark.parametrize("result", [{}, {"config": {"depth": 3}}, line(RunConfig(), seconds=float("nan"))])
def test_what_is_no_result_is_refused_and_the_file_left_alone(tmp_path, result):
    path = publish(line(RunConfig()), tmp_path)
    before = path.read_text()
    with pytest.raises(ResultError, match="not a result to publish"):
        publish(result, tmp_path)
    assert path.read_text() == before


@pytest.mark.parametrize("text", ["", "{", "3", "null", "[]", '{"config": null}', "\0"])
def test_nothing_is_added_to_a_file_with_a_bad_line(tmp_path, text):
    path = publish(line(RunConfig()), tmp_path)
    path.write_text(before := f"{path.read_text()}{text}\n")
    with pytest.raises(ResultError, match=r"mnist-scale\.jsonl, line 2: \S"):
        publish(line(RunConfig(split=1)), tmp_path)
    assert path.read_text() == before
