"""The tutorials' blocks of commands, each in a real shell, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]


def blocks(document):
    return re.findall(r"^```sh\n(.*?)^```", (ROOT / document).read_text(), flags=re.S | re.M)


@pytest.fixture
def shell(tmp_path):
    """Runs commands in an empty directory in which `scalesteer` is this checkout's."""
    program = tmp_path / "bin" / "scalesteer"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m scalesteer "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    (tmp_path / "work").mkdir()

    def run(commands):
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=tmp_path / "work",
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )

    run.folder = tmp_path / "work"
    return run


def take_photos(folder):
    """Sixty pictures of stripes that lie or stand, of several sizes and formats."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("cats", "dogs")):
        (folder / name).mkdir(parents=True)
        for i in range(30):
            height, width = rng.integers(24, 60, 2)
            stripes = np.sin((np.arange(height)[:, None], np.arange(width))[label] / rng.uniform(0.8, 1.5))
            pixels = 128 + 90 * np.broadcast_to(stripes, (height, width)) + rng.normal(0, 20, (height, width))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name / f"{i}.{('jpg', 'png')[i % 2]}")


@pytest.mark.slow
def test_every_block_of_your_own_images_runs(shell):
    take_photos(shell.folder / "photos")
    trained, kept, *others = blocks("docs/your-own-images.md")
    done = shell(trained)
    assert done.returncode == 0, done.stderr
    assert re.match(r"test error \d", done.stdout)
    assert float(done.stdout.split()[2]) < 20  # half by chance
    done = shell(kept)
    assert done.returncode == 0, done.stderr
    *files, error, cats, dogs, means, certainty = done.stdout.splitlines()
    assert {"config.json", "metrics.jsonl", "model", "result.json", "split.csv"} <= set(files)
    assert error.startswith("test error ")
    assert [cats.split()[0], dogs.split()[0]] == ["cats", "dogs"]
    assert means.startswith("mean over classes: precision ")
    assert certainty.startswith("calibration error ")
    for commands in others:
        done = shell(commands)
        assert done.returncode == 0, done.stderr


def take_photos_of_bars(folder):
    """Sixty pictures of a dark bar on an even ground, of several sizes, that lies or stands."""
    rng = np.random.default_rng(1)
    for label, name in enumerate(("lying", "standing")):
        (folder / name).mkdir(parents=True)
        for i in range(30):
            pixels = np.full((64, 64), 200, np.uint8)
            length, (top, left) = int(rng.integers(12, 40)), rng.integers(4, 20, 2)
            pixels[top : top + (length, length // 3)[not label], left : left + (length, length // 3)[label]] = 40
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


@pytest.mark.slow
def test_the_readmes_commands_for_pictures_of_ones_own_run(shell):
    section = (ROOT / "README.md").read_text().partition("## Your own pictures\n")[2].partition("\n## ")[0]
    commands = re.findall(r"^    (scalesteer .*)", section, flags=re.M)
    assert [command.split()[1] for command in commands] == ["suggest", "train", "evaluate", "predict", "export"]
    for folder in ("photos", "other-photos", "new-photos"):
        take_photos_of_bars(shell.folder / folder)
    for command in commands:
        (run, *_) = [*(shell.folder / "runs").glob("photos-*"), None]
        command = command.replace("runs/NAME", f"runs/{run.name}") if run else command
        done = shell(command.replace("train photos", "train photos --epochs 2"))  # for less time
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert len((shell.folder / "out.csv").read_text().splitlines()) == 61
    assert list(shell.folder.rglob("*.onnx"))


@pytest.mark.slow
def test_the_readmes_commands_for_the_paper_run(tmp_path):
    section = (ROOT / "README.md").read_text().partition("## The paper's experiments\n")[2].partition("\n## ")[0]
    commands = [line.split("#")[0].split() for line in re.findall(r"^    (python .*)", section, flags=re.M)]
    assert [command[2:4] for command in commands] == [["paper", "table"], ["paper", "figure"], ["paper", "run"]]
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    for command in commands[:2]:  # the third trains for an hour: the test of all commands reads it
        done = subprocess.run(
            [sys.executable, *command[1:]], cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.png"))
