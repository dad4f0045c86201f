"""Shared by all tests: invented images, one thread for each worker (two workers share two cores), and a fixed seed."""

import multiprocessing
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded
ROOT = Path(__file__).resolve().parents[1]
START = f"{ROOT / 'tests' / 'start'}{os.pathsep}"
PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
os.environ["PYTHONPATH"] = START + PATHS  # of every process that a test starts

import pytest
import torch
from hypothesis import settings

from scalesteer.app import load, train
from scalesteer.app.config import make_run
from scalesteer.datasets import sources
from scalesteer.models.registered import BUILDERS
from tests import invented_images
from tests.runs import changed

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are loaded
torch.set_num_threads(1)
# Deadlines measure the machine's other load, and a random failure nobody can repeat helps nobody.
settings.register_profile("scalesteer", deadline=None, derandomize=True)
settings.load_profile("scalesteer")

invented_images.register(sources)
REAL = Path(os.environ.get("SCALESTEER_TEST_DATA", ROOT.parent / "shared" / "data"))
UNAVAILABLE = {}  # marks of tests that cannot run here, and why
if not torch.cuda.is_available():
    UNAVAILABLE["gpu"] = "needs a CUDA device"
if not (REAL / "mnist").is_dir():
    UNAVAILABLE["real_data"] = "needs the published images: set SCALESTEER_TEST_DATA to their directory"

TINY = make_run(model="plain-cnn", upsample=1, sizes=(60, 20, 20), batch_size=20, epochs=3)


@pytest.hookimpl(trylast=True)  # after `-m` has chosen
def pytest_collection_modifyitems(config, items):
    """Skip what is unavailable here: a parametrised test once, not in each of its cases."""
    kept, left_out, skipped = [], [], set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        reason = next((why for mark, why in UNAVAILABLE.items() if item.get_closest_marker(mark)), None)
        (left_out if reason and test in skipped else kept).append(item)
        if reason:
            skipped.add(test)
            item.add_marker(pytest.mark.skip(reason=reason))
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _registry():
    """What a test registers is gone after it."""
    before = dict(BUILDERS)
    yield
    BUILDERS.clear()
    BUILDERS.update(before)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Every test has a cache of its own, so that none touches the user's."""
    monkeypatch.setenv("SCALESTEER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SCALESTEER_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> Path:
    """A directory with the invented files, in subdirectories mnist and fashion-mnist."""
    return invented_images.write(tmp_path_factory.mktemp("invented") / "files")


@pytest.fixture(scope="session")
def pools(originals):
    """The two pools of invented images, read once."""
    return {name: sources.make_pool(*sources.identify(name, originals)) for name in sources.SOURCES}


@pytest.fixture(scope="session")
def real_originals() -> Path:
    """The directory with the published files, for tests marked `real_data`."""
    return REAL


@contextmanager
def published_sources():
    """The published releases in place of the invented ones, here and in processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        for name, source in invented_images.published.items():
            patch.setitem(sources.SOURCES, name, source)
        patch.setenv("PYTHONPATH", PATHS)
        yield


@pytest.fixture
def real_sources():
    with published_sources():
        yield


@pytest.fixture(scope="session")
def real_pools(real_originals):
    """The two pools of published images, read once."""
    with published_sources():
        return {name: sources.make_pool(*sources.identify(name, real_originals)) for name in sources.SOURCES}


def keep_pools(cache, originals):
    """Fill a cache with the pools made from original files, and nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALESTEER_CACHE", str(cache))
        for source in sources.SOURCES:
            sources.fetch(source, originals)
    return cache / "pools"


@pytest.fixture(scope="session")
def _kept_pools(originals, tmp_path_factory):
    return keep_pools(tmp_path_factory.mktemp("kept"), originals)


@pytest.fixture
def real_cache(own_cache, real_originals, real_sources):
    """A cache that has the pools of published images."""
    keep_pools(own_cache, real_originals)
    return own_cache


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
            load(changed(TINY, split=split), "val")
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
    first.join(300)
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
