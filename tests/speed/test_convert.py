"""What conversion costs and gains: the measurement itself, and what docs/guide/convert.md shows of it."""

import json

import pytest
import torch

from speed import convert


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "COSTS", tmp_path / "costs.json")
    monkeypatch.setattr(convert, "ERRORS", tmp_path / "errors.json")
    return tmp_path


def test_the_guide_shows_each_models_errors_and_their_mean(results):
    rows = [
        {"model": "network", "epochs": 0, "errors": {"0.5": 30.0, "1": 10.0}},
        {"model": "converted", "epochs": 0, "errors": {"0.5": 50.0, "1": 45.0}},
        {"model": "network in ScaleChannels, new batch statistics", "epochs": 0, "errors": {"0.5": 60.0, "1": 55.0}},
        {"model": "converted", "epochs": 1, "errors": {"0.5": 20.0, "1": 15.0}, "epoch_s": 12.34},
    ]
    about = {"device": "a GPU", "train": 50000, "test": 5000, "seconds": 61.7}
    (results / "errors.json").write_text(json.dumps(about | {"rows": rows}))
    head, _, *found = convert.conversion_errors().splitlines()
    assert head == "| error in %, photographs of size | 0.5 | 1 | mean | s per epoch |"
    assert found[:2] == [
        "| network | 30.0 | 10.0 | 20.0 |  |",
        "| converted, one epoch more | 20.0 | 15.0 | 17.5 | 12 |",
    ]
    assert (convert.conversion_error("network"), convert.conversion_error("converted", 1)) == ("20.0", "17.5")
    assert convert.conversion_error("network", 0, "1") == "10.0"
    assert found[3].startswith("a GPU, 50,000 photographs for training and 5,000 for testing, 62 s in all")


@pytest.mark.slow
def test_a_small_measurement_has_ratios_to_the_network_and_is_shown(results, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    threads = torch.get_num_threads()
    monkeypatch.setattr(convert, "SIDE", 16)
    monkeypatch.setattr(convert, "WIDTH", 2)
    monkeypatch.setattr(convert, "CHANNELS", (0.5, 1.0))
    monkeypatch.setattr(convert, "CONVERSIONS", {"two scales": {"scales": (1.0, 1.5)}})
    found = convert.run(results / "costs.json", device="cpu", rounds=2)
    torch.set_num_threads(threads)
    assert found == json.loads((results / "costs.json").read_text())
    assert found["rounds"] == 2
    for work in ("training", "inference"):
        assert list(found[work]) == ["network", "in ScaleChannels, five from 0.5 to 2", "two scales"]
        assert found[work]["network"]["times_network"] == 1
        for one in found[work].values():
            assert one["times_network"] == pytest.approx(one["ms"] / found[work]["network"]["ms"], rel=0.01)
    for work in ("training", "inference"):
        expected = found[work]["two scales"]["times_network"]
        assert float(convert.conversion_times("two scales", work)) == pytest.approx(expected, rel=0.06)
