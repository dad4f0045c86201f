"""Run folders that earlier versions wrote: their networks say what they said then."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from scalesteer.app import cli, load_model
from scalesteer.models import network_of

OLD = Path(__file__).with_name("old_runs")
"""Of a split, of sized objects, of a folder of pictures (one finished, one not), and with channels; each has what its
network, as it is tested, says of a ramp of grey values."""


@pytest.mark.parametrize("name", ["split", "sized", "pictures", "unfinished", "channels"])
def test_a_run_folder_of_an_earlier_version_gives_the_same_network(name):
    told = json.loads((OLD / name / "expected.json").read_text())
    model = load_model(OLD / name)
    x = torch.linspace(0, 1, torch.Size(told["shape"]).numel()).reshape(told["shape"])
    torch.testing.assert_close(model(x)[0].detach(), torch.tensor(told["logits"]), rtol=1e-4, atol=1e-5)
    assert list(network_of(model).task.classes) == told["classes"]


def test_a_folder_with_a_network_of_an_earlier_version_is_the_same_network():
    told = json.loads((OLD / "pictures" / "expected.json").read_text())
    model = load_model(OLD / "pictures" / "model")
    x = torch.linspace(0, 1, 3 * 24 * 24).reshape(1, 3, 24, 24)
    torch.testing.assert_close(model(x)[0].detach(), torch.tensor(told["logits"]), rtol=1e-4, atol=1e-5)


def test_runs_of_earlier_versions_are_listed(tmp_path, capsys):
    shutil.copytree(OLD, tmp_path / "runs")
    assert cli.main(["runs", "--runs", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "cannot be read" not in shown
    assert all(path.name in shown for path in OLD.iterdir())
