"""Many runs by either engine: the same results, each once, whatever dies on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paper.results import read
from scalesteer import files
from scalesteer.training import RunError, engines
from scalesteer.training.engines import make_runs
from tests.training.test_train import outcome

ROOT = Path(__file__).parents[2]


def processes_of(folder):
    """Those that were started for Ray with this folder, as their command lines say."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (path.parent / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if int(path.parent.name) != os.getpid() and f"RAY_TMPDIR={folder}" in environment:
            found[int(path.parent.name)] = words
    return found


def gone(folder, within_s=60):
    """Whether no process of Ray is left after a while; those that are left are named."""
    until = time.monotonic() + within_s
    while (left := processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    return not left or left


@pytest.fixture
def ray_folder(monkeypatch):
    """Where Ray keeps its files: paths of sockets must be short. Nothing of Ray may run here afterwards."""
    pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="ray-")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield folder
    left = gone(folder)
    shutil.rmtree(folder, ignore_errors=True)
    assert left is True


def test_ray_gives_what_the_local_engine_gives(cache, tiny, ray_folder, tmp_path):
    configs = [replace(tiny, split=split, epochs=2) for split in (0, 1)]
    for engine in ("local", "ray"):
        made = make_runs(
            [*configs, configs[0]], tmp_path / engine, runs=tmp_path / engine, device="cpu", engine=engine
        )
        assert made.problems == []
        assert set(made.results) == {config for config, _ in read(tmp_path / engine)} == set(configs)
    for config in configs:
        assert outcome(tmp_path / "ray" / config.name) == outcome(tmp_path / "local" / config.name)
    assert not list((tmp_path / "ray").glob(".ray-*"))
