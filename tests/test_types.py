"""What a type checker says of a user's program: nothing, where it is right."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SNIPPET = """
from pathlib import Path
from typing import assert_type

from torch import Tensor, nn

from scalesteer import (
    ScaleChannels,
    ScaleSteerableConv2d,
    create_model,
    fold,
    from_pretrained,
    register_model,
    save_pretrained,
)
from scalesteer.joint import at_sizes


@register_model("mine")
def build(num_classes: int, width: int = 16) -> nn.Module:
    conv = ScaleSteerableConv2d(3, width, padding="same")
    return nn.Sequential(conv, nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


def train(folder: Path, images: Tensor, labels: Tensor) -> float:
    model = create_model("pooled-cnn", in_chans=3, num_classes=5, channels=(0.5, 1.0, 2.0), join="max")
    wider = model.with_scales((0.25, 0.5, 1.0, 2.0))
    assert_type(wider.task.classes, tuple[str, ...])
    plain = create_model("pooled-cnn", num_classes=5)
    assert_type(plain.with_scales((0.5, 1.0)).cost, float)
    logits, sizes = model(images, return_scales=True)
    assert_type(sizes, Tensor)
    loss = nn.functional.cross_entropy(wider(images), labels)
    loss.backward()
    again = from_pretrained(save_pretrained(model, folder)).with_scales((1.0,))
    own = ScaleChannels(build(5), (0.5, 1.0), "mean", multiple=32, output=lambda answer: answer["logits"])
    best, winners = ScaleSteerableConv2d(3, 4)(images, return_scales=True)
    assert_type(winners, Tensor)
    maps = [x.mean() for x in at_sizes(own.net, [images, images])]
    return float(fold(again)(images).mean() + logits.mean() + best.mean() + maps[0])
"""
WRONG = """
import torch
from torch import nn

from scalesteer import ScaleChannels, create_model

model = ScaleChannels(nn.Flatten(), (0.5, 1.0), "median")
answer: torch.Tensor = model(torch.rand(1, 1, 8, 8), return_scales=True)
create_model("pooled-cnn", channels=(0.5, 1.0)).with_sizes((1.0,))
"""


def check(command, source, folder):
    (folder / "program.py").write_text(source)
    environment = os.environ | {"MYPYPATH": str(ROOT / "src")}
    done = subprocess.run([*command, "program.py"], cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(params=["mypy", "pyright"])
def checker(request, tmp_path):
    if request.param == "mypy":
        options = ["--strict", "--no-error-summary", "--untyped-calls-exclude=torch"]
        return [sys.executable, "-m", "mypy", *options, f"--cache-dir={ROOT / '.mypy_cache'}"]
    if not (shutil.which("pyright") and shutil.which("node")):
        pytest.skip("pyright is not installed, or node, which runs it")
    (tmp_path / "pyrightconfig.json").write_text(
        f'{{"extraPaths": ["{ROOT / "src"}"], "typeCheckingMode": "strict", "reportUnknownMemberType": false,'
        ' "reportUnknownVariableType": false, "reportUnknownLambdaType": false, "reportUnknownArgumentType": false}'
    )
    return ["pyright", "--pythonpath", sys.executable]


@pytest.mark.slow
def test_a_users_program_is_right(checker, tmp_path):
    code, said = check(checker, SNIPPET, tmp_path)
    assert code == 0, said


@pytest.mark.slow
def test_mistakes_are_found(checker, tmp_path):
    code, said = check(checker, WRONG, tmp_path)
    assert code == 1
    for line in (7, 8, 9):
        assert f"program.py:{line}" in said, said
