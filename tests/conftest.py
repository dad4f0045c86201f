"""Shared by all tests: one thread a worker (two workers share two cores), and a fixed seed."""

import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded

import pytest
import torch
from hypothesis import settings

from scalesteer.app import load, train
from scalesteer.app.config import RunConfig

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are loaded
torch.set_num_threads(1)
# Deadlines measure the machine's other load, and a random failure nobody can repeat helps nobody.
settings.register_profile("scalesteer", deadline=None, derandomize=True)
settings.load_profile("scalesteer")

TINY = RunConfig(model="plain-cnn", upsample=1, sizes=(60, 20, 20), batch_size=20, epochs=3)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Every test has a cache of its own, so that none touches the user's."""
    monkeypatch.setenv("SCALESTEER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SCALESTEER_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def originals() -> Path:
    """The directory with the original files, in subdirectories mnist and fashion-mnist."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SCALESTEER_TEST_DATA", beside))
    if not folder.is_dir():
        pytest.skip("the original files are not here: set SCALESTEER_TEST_DATA to their directory")
    return folder


@pytest.fixture(scope="session")
def pools(originals):
    """The two pools of original images, read once."""
    from scalesteer.datasets import sources

    return {name: sources.make_pool(*sources.identify(name, originals)) for name in sources.SOURCES}


@pytest.fixture(scope="session")
def _kept_pools(originals, tmp_path_factory):
    from scalesteer.datasets import sources

    cache = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALESTEER_CACHE", str(cache))
        for source in sources.SOURCES:
            sources.fetch(source, originals)
    return cache / "pools"


@pytest.fixture
def filled_cache(own_cache, _kept_pools):
    """A cache that has the pools but no splits."""
    shutil.copytree(_kept_pools, own_cache / "pools")
    return own_cache


@pytest.fixture(scope="session")
def _kept_splits(_kept_pools, tmp_path_factory):
    """A cache with the splits that the tests here train on, built once."""
    cache = tmp_path_factory.mktemp("kept-splits")
    shutil.copytree(_kept_pools, cache / "pools")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALESTEER_CACHE", str(cache))
        for split in (0, 1):
            load(replace(TINY, split=split), "val")
    return cache


@pytest.fixture
def cache(_kept_splits, monkeypatch):
    """That cache, in use."""
    monkeypatch.setenv("SCALESTEER_CACHE", str(_kept_splits))
    return _kept_splits


@pytest.fixture
def tiny():
    """A run of two seconds."""
    return TINY


@pytest.fixture(scope="session")
def undisturbed(_kept_splits, tmp_path_factory):
    """The directory of the tiny run, trained without interruption."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALESTEER_CACHE", str(_kept_splits))
        train(TINY, directory, device="cpu")
    return directory


@pytest.fixture(scope="session")
def forks():
    """Starts processes in which the package is loaded already, but nothing has run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.app.ranks"])
    first = context.Process()  # loads it
    first.start()
    first.join(60)
    return context


@pytest.fixture
def start(forks, cache):
    """Start a function of tests.app.jobs in a process of its own."""
    started = []

    def begin(function, *arguments):
        process = forks.Process(target=function, args=(str(cache), *arguments))
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.is_alive():
            os.kill(process.pid, 9)
        process.join(30)
