import multiprocessing
import os
import shutil
from dataclasses import replace

import pytest

from scalesteer.experiments.config import RunConfig
from scalesteer.experiments.train import load, train

TINY = RunConfig(model="plain-cnn", upsample=1, sizes=(60, 20, 20), batch_size=20, epochs=3)


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
    context.set_forkserver_preload(["tests.experiments.jobs"])
    first = context.Process()  # loads it
    first.start()
    first.join(60)
    return context


@pytest.fixture
def start(forks, cache):
    """Start a function of tests.experiments.jobs in a process of its own."""
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
