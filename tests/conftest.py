"""Shared by all tests: one thread a worker (two workers share two cores), and a fixed seed."""

import os
import shutil
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are loaded
torch.set_num_threads(1)
# Deadlines measure the machine's other load, and a random failure nobody can repeat helps nobody.
settings.register_profile("scalesteer", deadline=None, derandomize=True)
settings.load_profile("scalesteer")


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
    from scalesteer.data import sources

    return {name: sources.from_directory(name, originals) for name in sources.SOURCES}


@pytest.fixture(scope="session")
def _kept_pools(pools, tmp_path_factory):
    from scalesteer.data import sources

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALESTEER_CACHE", str(tmp_path_factory.mktemp("kept")))
        for pool in pools.values():
            sources._keep(pool)
        return sources.pool_path("mnist", "original").parent


@pytest.fixture
def filled_cache(own_cache, _kept_pools):
    """A cache that has the pools but no splits."""
    shutil.copytree(_kept_pools, own_cache / "pools")
    return own_cache
