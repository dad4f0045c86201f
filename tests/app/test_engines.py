"""Many runs by either engine: the same results, each once, whatever dies on the way."""

import json
import os
import platform
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
import torch

from paper.results import read
from scalesteer import files
from scalesteer.app import RunError, engines
from scalesteer.app.engines import make_runs
from tests.app.test_train import outcome


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


def wait_for(condition, within_s=300):
    """What the condition is when it holds, or in the end."""
    until = time.monotonic() + within_s
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


@pytest.fixture
def ray_folder(monkeypatch):
    """Where Ray keeps its files: paths of sockets must be short. Nothing of Ray may run here afterwards."""
    for name, value in engines.QUIET.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="ray-")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield folder
    ended = wait_for(lambda: not processes_of(folder), 60)
    left = processes_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    assert ended, left


def test_ray_gives_what_the_local_engine_gives(cache, tiny, ray_folder, tmp_path):
    configs = [replace(tiny, split=split, epochs=2) for split in (0, 1)]
    for engine in ("local", "ray"):
        made = make_runs([*configs, configs[0]], tmp_path / engine, runs=tmp_path / engine, device="cpu", engine=engine)
        assert made.problems == []
        assert set(made.results) == {config for config, _ in read(tmp_path / engine)} == set(configs)
    for config in configs:
        assert outcome(tmp_path / "ray" / config.name) == outcome(tmp_path / "local" / config.name)
    assert not list((tmp_path / "ray").glob(".ray-*"))


def test_run_that_is_named_twice_is_made_once(tiny, tmp_path, monkeypatch):
    made = []

    def train(config, directory, **options):
        made.append(config)
        raise RunError("not here")

    monkeypatch.setattr(engines, "train", train)
    other = replace(tiny, split=1)
    found = make_runs([tiny, other, tiny, other], tmp_path, runs=tmp_path / "runs", device="cpu")
    assert made == [tiny, other]
    assert found.problems == [f"{tiny.name}: not here", f"{other.name}: not here"]


def test_finished_runs_need_no_cluster(cache, tiny, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "runs" / tiny.name)
    # Nothing listens there: it would fail.
    made = make_runs([tiny], tmp_path, runs=tmp_path / "runs", device="cpu", engine="ray", address="127.0.0.1:9")
    assert (list(made.results), made.problems) == ([tiny], [])
    assert dict(read(tmp_path))[tiny]["test_error"] == made.results[tiny]["test_error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "rya"}, r"`engine` must be one of 'local', 'ray' \(got 'rya'\)\. Did you mean 'ray'\?"),
        ({"address": "auto"}, r"`address` \(got 'auto'\) is for engine='ray' only"),
        ({"gpus_per_run": 0.5}, r"`gpus_per_run` \(got 0\.5\) is for engine='ray' only"),
        ({"engine": "ray", "gpus_per_run": 0}, r"`gpus_per_run` must be above 0 and at most 1, one GPU \(got 0\)"),
        ({"engine": "ray", "gpus_per_run": 2}, r"\(got 2\)"),
        ({"engine": "ray", "gpus_per_run": float("nan")}, r"`gpus_per_run` must be finite"),
        ({"engine": "ray", "gpus_per_run": 0.5, "device": "cpu"}, r"needs device 'cuda' or 'auto' \(got 'cpu'\)"),
        ({"engine": "ray", "device": "cuda:1"}, r"`device` must be one of 'auto', 'cpu', 'cuda' \(got 'cuda:1'\)"),
    ],
)
def test_wrong_argument_is_told_before_anything_starts(tiny, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_runs([tiny], tmp_path / "results", runs=tmp_path / "runs", **options)
    assert not list(tmp_path.iterdir())


def test_machine_must_have_the_same_disk_and_see_its_locks(tmp_path):
    with engines._token(tmp_path) as token:
        engines._check_token(token)
        elsewhere = tmp_path / "elsewhere" / token.name
        with pytest.raises(RunError, match=r"elsewhere is not the same folder on all machines: put --runs on a disk"):
            engines._check_token(elsewhere)
        elsewhere.parent.mkdir()
        elsewhere.touch()  # as on a disk that shares files and no locks
        with pytest.raises(RunError, match="does not share its locks"):
            engines._check_token(elsewhere)
    assert not list(tmp_path.glob(".ray-*"))


def test_token_of_a_killed_process_is_removed_and_that_of_another_kept(tmp_path):
    (tmp_path / ".ray-0.lock").touch()
    with files.locked(tmp_path / ".ray-1.lock"), engines._token(tmp_path) as token:
        assert {path.name for path in tmp_path.glob(".ray-*.lock")} == {".ray-1.lock", token.name}


def test_folder_of_runs_that_cannot_be_written_to_is_told(tiny, tmp_path):
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(RunError, match=r"runs cannot be written to \(File exists\)"):
        make_runs([tiny], tmp_path / "results", runs=tmp_path / "runs", device="cpu", engine="ray")


def test_folder_of_results_that_cannot_be_written_to_is_told_first(tiny, tmp_path):
    (tmp_path / "results").write_text("in the way")
    with pytest.raises(ValueError, match=r"results/runs cannot be written to \(Not a directory\)"):
        make_runs([tiny], tmp_path / "results", runs=tmp_path / "runs", device="cpu")
    assert not (tmp_path / "runs").exists()


def in_worker(config, directory, tmp_path, **changed):
    with engines._token(tmp_path) as token:
        options = {"token": str(token), "version": engines.scalesteer.__version__, "device": "cpu", "data_dir": None}
        return engines._train_in_worker(config.to_dict(), str(directory), **{**options, "environment": {}, **changed})


def test_worker_waits_for_the_lock_of_a_dead_machine(cache, tiny, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "BUSY_STEP_S", 0.2)
    (tmp_path / tiny.name).mkdir()
    lock = files.locked(tmp_path / tiny.name / ".lock")
    lock.__enter__()
    free = threading.Timer(1, lock.__exit__, (None, None, None))
    free.start()
    kind, result = in_worker(tiny, tmp_path / tiny.name, tmp_path)
    free.join()
    assert (kind, result["status"]) == ("result", "finished")
    assert outcome(tmp_path / tiny.name) == outcome(undisturbed)


def test_worker_says_what_stops_one_run_and_what_stops_all(cache, tiny, own_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "BUSY_WAIT_S", 0)
    (tmp_path / "run").mkdir()
    with files.locked(tmp_path / "run" / ".lock"):
        kind, said = in_worker(tiny, tmp_path / "run", tmp_path)
    assert kind == "problem"
    assert f"is in use by process {os.getpid()}" in said
    kind, said = in_worker(tiny, tmp_path / "run", tmp_path, version="0.0.1")
    assert kind == "stop"
    assert said.endswith("is installed, and 0.0.1 where the runs come from.")
    without_data = {"environment": {"SCALESTEER_CACHE": str(own_cache)}, "data_dir": str(tmp_path / "none")}
    kind, said = in_worker(tiny, tmp_path / "run", tmp_path, **without_data)
    assert kind == "stop"
    assert str(tmp_path / "none") in said


# What a cluster must survive. Each of these runs takes some seconds, with a checkpoint after every epoch.

EPOCHS, HALFWAY = 24, 6


@pytest.fixture
def cluster(ray_folder):
    """A cluster of two nodes on this machine, with room for one run on each."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": engines.OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@pytest.fixture
def grid(tiny):
    """Four runs that differ in split and seed."""
    return [replace(tiny, split=split, seed=seed, epochs=EPOCHS) for split in (0, 1) for seed in (0, 1)]


@pytest.fixture
def expected(grid, cache, tmp_path):
    """What the local engine makes of them."""
    made = make_runs(grid, tmp_path / "local", runs=tmp_path / "local", device="cpu")
    assert made.problems == []
    return {config: outcome(tmp_path / "local" / config.name) for config in grid}


def lines(directory):
    """What a run has written about its epochs; never half a line, as the file is replaced."""
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def holder(directory):
    """The process that holds a run's directory."""
    try:
        return int((directory / ".lock.holder").read_text().split()[1])
    except (OSError, IndexError):
        return None


def parent(process):
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def underway(runs, grid):
    """The runs that have come this far and are not finished."""
    directories = [runs / config.name for config in grid]
    return [d for d in directories if len(lines(d)) >= HALFWAY and not (d / "result.json").exists()]


def check_whole(folder, grid, expected):
    """Every result is published once and is the local engine's."""
    text = (folder / "results" / "runs" / f"{grid[0].dataset}.jsonl").read_text()
    assert len(text.splitlines()) == len(grid)
    assert {config for config, _ in read(folder / "results")} == set(grid)
    for config in grid:
        assert outcome(folder / "runs" / config.name) == expected[config]


@pytest.mark.slow
def test_death_of_a_node_loses_nothing(cluster, grid, expected, tmp_path, caplog, capfd):
    (node,) = cluster.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    interrupted = {}

    def kill_halfway():
        def here():
            return [d for d in underway(tmp_path / "runs", grid) if parent(holder(d)) == raylet]

        (directory, *_) = wait_for(here)
        interrupted[directory] = lines(directory)
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill_halfway)
    killer.start()
    made = make_runs(
        grid, tmp_path / "results", runs=tmp_path / "runs", device="cpu", engine="ray", address=cluster.address
    )
    killer.join(60)
    assert made.problems == []
    assert set(made.results) == set(grid)
    check_whole(tmp_path, grid, expected)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == f"{platform.node()} has gone; its runs go on elsewhere from their last checkpoints"
    assert capfd.readouterr().out == ""
    ((directory, before),) = interrupted.items()
    assert HALFWAY <= len(before) < EPOCHS
    # Lines hold times, which a run that had started again would not have repeated.
    assert lines(directory)[: len(before)] == before


def sweep_file(grid, path):
    first = grid[0]
    path.write_text(
        f"seeds = {[0, 1]}\n[base]\nmodel = '{first.model}'\nupsample = 1\nsizes = {list(first.sizes)}\n"
        f"batch_size = {first.batch_size}\nepochs = {first.epochs}\n[grid]\nsplit = [0, 1]\n"
    )
    return path


def sweep_command(grid, folder, *flags):
    # A shell's background jobs, pytest among them, may ignore SIGINT: undo that.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    words = [
        "sweep",
        sweep_file(grid, folder / "grid.toml"),
        "--runs",
        folder / "runs",
        "--results",
        folder / "results",
    ]
    words += ["--engine", "ray", "--device", "cpu", *flags]
    command = [
        sys.executable,
        "-c",
        f"{start}; from scalesteer.app.cli import main; sys.exit(main())",
        *map(str, words),
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=folder
    )


@pytest.mark.slow
def test_death_of_the_driver_loses_nothing_and_repeats_nothing(cluster, grid, expected, tmp_path):
    flags = ("--address", cluster.address)
    first = sweep_command(grid, tmp_path, *flags)
    runs = tmp_path / "runs"
    assert wait_for(lambda: first.poll() is not None or (read(tmp_path / "results") and underway(runs, grid)))
    first.kill()
    first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL
    finished = {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}
    begun = {directory: lines(directory) for directory in underway(runs, grid)}
    assert finished
    assert begun
    second = sweep_command(grid, tmp_path, *flags)
    out, err = second.communicate(timeout=400)
    assert second.returncode == 0, err
    check_whole(tmp_path, grid, expected)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    for directory, before in begun.items():
        assert lines(directory)[: len(before)] == before
    assert out.splitlines()[:4] == [config.command for config in grid]
    assert not list(runs.glob(".ray-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_sweep_saves_its_runs_and_goes_on(ray_folder, grid, expected, tmp_path, number, status):
    first = sweep_command(grid, tmp_path)
    runs = tmp_path / "runs"
    assert wait_for(lambda: first.poll() is not None or underway(runs, grid))
    os.killpg(first.pid, number)  # as a terminal does: Ray's processes are in the group too
    _, err = first.communicate(timeout=120)
    assert first.returncode == status, err
    told = "scalesteer: interrupted; repeat the command to go on.\n" if number == signal.SIGINT else ""
    assert err.endswith(told)
    assert not list(runs.glob(".ray-*"))
    assert wait_for(lambda: not processes_of(ray_folder), 60)
    begun = {directory: lines(directory) for directory in underway(runs, grid)}
    assert begun
    second = sweep_command(grid, tmp_path)
    _, err = second.communicate(timeout=400)
    assert second.returncode == 0, err
    check_whole(tmp_path, grid, expected)
    for directory, before in begun.items():
        assert lines(directory)[: len(before)] == before


@pytest.mark.slow
def test_cluster_without_a_gpu_or_with_another_package_is_told(ray_folder, cache, tiny, tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    (tmp_path / "other" / "scalesteer").mkdir(parents=True)
    (tmp_path / "other" / "scalesteer" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    node = {"num_cpus": 1, "object_store_memory": engines.OBJECT_STORE_BYTES, "include_dashboard": False}
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "other"))
        cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        where = {"runs": tmp_path / "runs", "engine": "ray", "address": cluster.address}
        with pytest.raises(RunError, match=r"`gpus_per_run` 0\.5 needs a GPU, and the Ray cluster has none"):
            make_runs([tiny], tmp_path, gpus_per_run=0.5, **where)
        with pytest.raises(
            RunError, match=r"a worker of Ray failed \(ModuleNotFoundError: .*; all machines need the same"
        ):
            make_runs([tiny], tmp_path, **where)
    finally:
        cluster.shutdown()
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.gpu
def test_runs_share_a_gpu(cache, tiny, ray_folder, tmp_path):
    configs = [replace(tiny, split=split, epochs=2) for split in (0, 1)]
    made = make_runs(configs, tmp_path, runs=tmp_path / "runs", device="cuda", engine="ray", gpus_per_run=0.5)
    assert made.problems == []
    assert {result["environment"]["device"] for result in made.results.values()} == {torch.cuda.get_device_name()}
