"""Results in a folder of their own, and small networks for figures."""

import json

import pytest
import torch

from paper import cells
from scalesteer import create_model

SMALL = {"upsample": 1, "widths": (4, 3, 3), "hidden": 8}


@pytest.fixture
def load(tmp_path):
    """Writes results to a folder of their own and loads them."""

    def write(found=(), networks=(), again=(), replaced=()):
        (tmp_path / "runs").mkdir(exist_ok=True)
        by_dataset = {}
        for line in found:
            by_dataset.setdefault(line["config"]["dataset"], []).append(line)
        files = {tmp_path / "runs" / f"{name}.jsonl": lines for name, lines in by_dataset.items()}
        files |= {tmp_path / "distortion.jsonl": networks, tmp_path / "repeats.jsonl": again}
        files[tmp_path / "replaced.jsonl"] = replaced
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
