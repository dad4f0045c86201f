"""A process that keeps its memory: fewer page faults, and nothing where it is not wanted."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

from scalesteer.app import cli, memory

STEPS = """
import json, resource, sys, torch
from scalesteer import create_model
from scalesteer.app import memory
kept = memory.keep_memory()
torch.set_num_threads(1)
torch.manual_seed(0)
model, x = create_model("pooled-cnn", in_chans=3), torch.rand(64, 3, 96, 96)
for step in range(6):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
print(json.dumps([kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, loss.item()]))
"""
glibc = pytest.mark.skipif(not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")), reason="no glibc")


def steps(**environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", memory.MALLOC))}
    done = subprocess.run([sys.executable, "-c", STEPS], env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@glibc
def test_training_steps_ask_the_system_for_hardly_any_memory():
    kept, faults, loss = steps()
    left, usual, same = steps(SCALESTEER_MALLOC="system")
    assert (kept, left) == (True, False)
    assert usual > 100_000  # 4 KiB each
    assert faults < usual / 10
    assert loss == same  # the numbers are the same, bit by bit


@glibc
@pytest.mark.parametrize(
    "own", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.check=0"}, {"SCALESTEER_MALLOC": "system"}]
)
def test_an_allocator_that_was_told_something_is_left_alone(monkeypatch, own):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: pytest.fail("the allocator was changed"))
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert memory.keep_memory() is False


def test_another_c_library_is_left_alone(monkeypatch):
    def unknown(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", unknown, raising=False)
    assert memory.keep_memory() is False


def test_a_word_that_is_not_known_is_told(monkeypatch, capsys):
    monkeypatch.setenv(memory.MALLOC, "jemalloc")
    assert cli.main(["models"]) == 2
    assert capsys.readouterr().err == "scalesteer: SCALESTEER_MALLOC must be keep or system (got 'jemalloc').\n"


def test_importing_changes_nothing():
    code = "import ctypes; ctypes.CDLL = None; import scalesteer, scalesteer.app, scalesteer.app.memory"
    # torch itself loads libraries by ctypes before it is imported here.
    subprocess.run([sys.executable, "-c", f"import torch; {code}"], check=True, env=os.environ)
