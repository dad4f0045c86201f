"""What conversion costs: the measurement itself."""

import json

import pytest
import torch

from speed import convert


@pytest.mark.slow
def test_a_small_measurement_has_ratios_to_the_network(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    threads = torch.get_num_threads()
    monkeypatch.setattr(convert, "SIDE", 16)
    monkeypatch.setattr(convert, "WIDTH", 2)
    monkeypatch.setattr(convert, "CHANNELS", (0.5, 1.0))
    monkeypatch.setattr(convert, "CONVERSIONS", {"two scales": {"scales": (1.0, 1.5)}})
    found = convert.run(tmp_path / "costs.json", device="cpu", rounds=2)
    torch.set_num_threads(threads)
    assert found == json.loads((tmp_path / "costs.json").read_text())
    assert found["rounds"] == 2
    for work in ("training", "inference"):
        assert list(found[work]) == ["network", "in ScaleChannels, five from 0.5 to 2", "two scales"]
        assert found[work]["network"]["times_network"] == 1
        for one in found[work].values():
            assert one["times_network"] == pytest.approx(one["ms"] / found[work]["network"]["ms"], rel=0.01)
