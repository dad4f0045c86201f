"""What docs/guide/convert.md shows of measurements."""

import json

import paper
from paper import conversions


def test_the_guide_shows_each_models_errors_and_their_mean(tmp_path, monkeypatch):
    rows = [
        {"model": "network", "epochs": 0, "errors": {"0.5": 30.0, "1": 10.0}},
        {"model": "converted", "epochs": 0, "errors": {"0.5": 50.0, "1": 45.0}},
        {"model": "network in ScaleChannels, new batch statistics", "epochs": 0, "errors": {"0.5": 60.0, "1": 55.0}},
        {"model": "converted", "epochs": 1, "errors": {"0.5": 20.0, "1": 15.0}, "epoch_s": 12.34},
    ]
    about = {"device": "a GPU", "train": 50000, "test": 5000, "seconds": 61.7}
    (tmp_path / "guide").mkdir()
    (tmp_path / conversions.ERRORS).write_text(json.dumps(about | {"rows": rows}))
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    head, _, *found = conversions.conversion_errors().splitlines()
    assert head == "| error in %, photographs of size | 0.5 | 1 | mean | s per epoch |"
    assert found[:2] == [
        "| network | 30.0 | 10.0 | 20.0 |  |",
        "| converted, one epoch more | 20.0 | 15.0 | 17.5 | 12 |",
    ]
    assert (conversions.conversion_error("network"), conversions.conversion_error("converted", 1)) == ("20.0", "17.5")
    assert conversions.conversion_error("network", 0, "1") == "10.0"
    assert found[3].startswith("a GPU, 50,000 photographs for training and 5,000 for testing, 62 s in all")


def test_costs_are_those_of_the_network(tmp_path, monkeypatch):
    (tmp_path / "bench").mkdir()
    found = {"training": {"two scales": {"ms": 5, "times_network": 1.249}}}
    (tmp_path / conversions.COSTS).write_text(json.dumps(found))
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    assert conversions.conversion_times("two scales", "training") == "1.2"
