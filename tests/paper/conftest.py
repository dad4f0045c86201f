"""Results in a folder of their own, and small networks for figures."""

import json

import pytest
import torch

from paper import cells
from scalesteer import create_model, save_pretrained
from tests.runs import changed

SMALL = {"upsample": 1, "widths": (4, 3, 3), "hidden": 8}


@pytest.fixture
def load(tmp_path):
    """Writes results to a folder of their own and loads them."""

    def write(found=(), networks=(), again=(), replaced=()):
        files = {}
        for kind, lines in (("runs", found), ("replaced", replaced)):
            (tmp_path / kind).mkdir(exist_ok=True)
            for old in (tmp_path / kind).iterdir():
                old.unlink()
            for line in lines:
                files.setdefault(tmp_path / kind / f"{line['config']['dataset']}.jsonl", []).append(line)
        files |= {tmp_path / "distortion.jsonl": networks, tmp_path / "repeats.jsonl": again}
        for path, lines in files.items():
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return cells.load(tmp_path)

    return write


@pytest.fixture(scope="session")
def needed():
    """Small networks, and images for them."""
    torch.manual_seed(0)
    ss = create_model("ss-cnn", scales=(0.6, 1.0, 1.7), basis="area", **SMALL).eval()
    lsi = create_model("locally-scale-invariant-cnn", **SMALL).eval()
    return {
        "ss": ss,
        "lsi": lsi,
        "plain": create_model("plain-cnn", **SMALL).eval(),
        "images": torch.rand(3, 1, 28, 28),
        "image": torch.rand(1, 28, 28),
    }


@pytest.fixture
def runs(tiny, tmp_path):
    """A directory each with a network and the run that it is of."""
    found = {}
    for flag, name in {"ss": "ss-cnn", "lsi": "locally-scale-invariant-cnn"}.items():
        run = changed(tiny, model=name).to_dict()
        found[flag] = save_pretrained(create_model(name, "mnist-scale", upsample=1), tmp_path / flag, run=run)
    return found
