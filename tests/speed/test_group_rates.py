"""What group convolutions cost: both ways to compute them give the same numbers, and are measured in turns."""

import json

import pytest
import torch

from paper.grids import EXPERIMENTS
from scalesteer import ScaleGroupConv2d, create_model
from speed import group

SMALL = {"widths": (4, 6), "subsample": (1,), "hidden": 0, "dropout": 0.0}


@pytest.mark.parametrize("reach", [1, 2, 3])
def test_padded_filters_in_one_convolution_give_the_same_numbers(reach):
    ours = create_model("group-cnn", reach=reach, basis="hermite", **SMALL).double().eval()
    padded = group.pad(create_model("group-cnn", reach=reach, basis="hermite", **SMALL)).double().eval()
    padded.load_state_dict(ours.state_dict())
    assert {type(m) for m in padded.modules() if isinstance(m, ScaleGroupConv2d)} == {group.PaddedGroupConv2d}
    assert {type(m) for m in ours.modules() if isinstance(m, ScaleGroupConv2d)} == {ScaleGroupConv2d}
    x = torch.rand(2, 1, 14, 15, dtype=torch.float64)
    torch.testing.assert_close(padded(x), ours(x), rtol=1e-9, atol=1e-9)


def test_a_small_measurement_is_kept(tmp_path, monkeypatch):
    threads, make = torch.get_num_threads(), group.create_model
    small = {"group-cnn": {"widths": (8, 16)}, "ss-cnn": {"widths": (2, 2, 2)}, "pooled-cnn": {"widths": (2, 2, 2)}}
    monkeypatch.setattr(group, "create_model", lambda name, **options: make(name, **small[name], **options))
    found = group.run(tmp_path / "group.json", rounds=2, cases={"56 px": (56, 1, 2)})
    torch.set_num_threads(threads)
    assert found == json.loads((tmp_path / "group.json").read_text())
    rates = found["images_per_second"]["56 px"]
    assert list(rates) == ["group-cnn", "Hermite basis", "Hermite basis, padded", "SS-CNN"]
    assert min(*rates.values(), *found["stir"].values()) > 0
    assert list(found["stir"]) == list(dict.fromkeys(row.line for row in EXPERIMENTS["group-stir"].rows))
    for row in EXPERIMENTS["group-stir"].rows:  # what is measured is what is trained
        options = group.STIR[row.line]
        assert (row.config.model, row.config.channels) == (options["name"], options.get("channels"))
        assert row.config.drop == options.get("drop", 0.0)
