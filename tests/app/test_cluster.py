"""Many runs on a Ray cluster: what the local engine gives, each once, whatever dies on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import scalesteer
from scalesteer import files
from scalesteer.app import RunError, cluster
from scalesteer.app.engines import make_runs
from tests.app.test_train import outcome
from tests.runs import changed


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
    for name, value in cluster.QUIET.items():
        monkeypatch.setenv(f"RAY_{name}", value)
    pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="ray-")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield folder
    ended = wait_for(lambda: not processes_of(folder))
    left = processes_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    assert ended, left


def test_ray_gives_what_the_local_engine_gives(cache, tiny, ray_folder, tmp_path):
    configs = [changed(tiny, split=split, epochs=2) for split in (0, 1)]
    for engine in ("local", "ray"):
        made = make_runs([*configs, configs[0]], tmp_path / engine, device="cpu", engine=engine)
        assert made.problems == []
        assert set(made.results) == set(configs)
    for config in configs:
        assert outcome(tmp_path / "ray" / config.name) == outcome(tmp_path / "local" / config.name)


def in_worker(config, directory, version=scalesteer.__version__, environment=(), **options):
    options = {"device": "cpu", "data_dir": None} | options
    return cluster.train_in_worker(config.to_dict(), directory, options, version, dict(environment))


def test_worker_waits_for_the_lock_of_a_dead_machine(cache, tiny, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "BUSY_STEP_S", 0.2)
    (tmp_path / tiny.name).mkdir()
    lock = files.locked(tmp_path / tiny.name / ".lock")
    lock.__enter__()
    free = threading.Timer(1, lock.__exit__, (None, None, None))
    free.start()
    kind, result = in_worker(tiny, tmp_path / tiny.name)
    free.join()
    assert (kind, result["status"]) == ("result", "finished")
    assert outcome(tmp_path / tiny.name) == outcome(undisturbed)


def test_worker_says_what_stops_one_run_and_what_stops_all(cache, tiny, own_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "BUSY_WAIT_S", 0)
    (tmp_path / "run").mkdir()
    with files.locked(tmp_path / "run" / ".lock"):
        kind, said = in_worker(tiny, tmp_path / "run")
    assert kind == "problem"
    assert f"is in use by process {os.getpid()}" in said
    kind, said = in_worker(tiny, tmp_path / "run", version="0.0.1")
    assert kind == "stop"
    assert said.endswith(f"scalesteer is {scalesteer.__version__}, and 0.0.1 where the runs come from.")
    without_data = {"environment": {"SCALESTEER_CACHE": str(own_cache)}, "data_dir": tmp_path / "none"}
    kind, said = in_worker(tiny, tmp_path / "run", **without_data)
    assert kind == "stop"
    assert str(tmp_path / "none") in said
    kind, said = in_worker(tiny, tmp_path / "elsewhere" / "run")
    assert kind == "stop"
    assert said.endswith(f"{tmp_path / 'elsewhere'} is not there: put --runs on a disk that all machines share.")


# What a cluster must survive. Each of these runs takes some seconds, with a checkpoint after every epoch.

EPOCHS, HALFWAY = 24, 6


@pytest.fixture
def two_nodes(ray_folder):
    """A cluster of two nodes on this machine, with room for one run on each."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=node)
    nodes.add_node(**node)
    nodes.wait_for_nodes()
    yield nodes
    nodes.shutdown()


@pytest.fixture
def grid(tiny):
    """Four runs that differ in split and seed."""
    return [changed(tiny, split=split, seed=seed, epochs=EPOCHS) for split in (0, 1) for seed in (0, 1)]


@pytest.fixture
def expected(grid, cache, tmp_path):
    """What the local engine makes of them."""
    made = make_runs(grid, tmp_path / "local", device="cpu")
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
    """Every run has its result, which is the local engine's."""
    assert len(list((folder / "runs").glob("*/result.json"))) == len(grid)
    for config in grid:
        assert outcome(folder / "runs" / config.name) == expected[config]


@pytest.mark.slow
def test_death_of_a_node_loses_nothing(two_nodes, grid, expected, tmp_path, capfd):
    (node,) = two_nodes.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    interrupted = {}

    def kill_halfway():
        def here():
            return [d for d in underway(tmp_path / "runs", grid) if parent(holder(d)) == raylet]

        (directory, *_) = wait_for(here)
        interrupted[directory] = lines(directory)
        two_nodes.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill_halfway)
    killer.start()
    made = make_runs(grid, tmp_path / "runs", device="cpu", engine="ray", address=two_nodes.address)
    killer.join(300)
    assert made.problems == []
    assert set(made.results) == set(grid)
    check_whole(tmp_path, grid, expected)
    assert capfd.readouterr().out == ""
    ((directory, before),) = interrupted.items()
    assert HALFWAY <= len(before) < EPOCHS
    # Lines hold times, which a run that had started again would not have repeated.
    assert lines(directory)[: len(before)] == before


def sweep_file(grid, path):
    first = grid[0]
    path.write_text(
        f"seeds = {[0, 1]}\n[base]\nmodel = '{first.network.model}'\nupsample = 1\nsizes = {list(first.data.sizes)}\n"
        f"batch_size = {first.training.batch_size}\nepochs = {first.training.epochs}\n[grid]\nsplit = [0, 1]\n"
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
def test_death_of_the_driver_loses_nothing_and_repeats_nothing(two_nodes, grid, expected, tmp_path):
    flags = ("--address", two_nodes.address)
    first = sweep_command(grid, tmp_path, *flags)
    runs = tmp_path / "runs"
    assert wait_for(lambda: first.poll() is not None or (list(runs.glob("*/result.json")) and underway(runs, grid)))
    first.kill()
    first.communicate(timeout=300)
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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_sweep_saves_its_runs_and_goes_on(ray_folder, grid, expected, tmp_path, number, status):
    first = sweep_command(grid, tmp_path)
    runs = tmp_path / "runs"
    assert wait_for(lambda: first.poll() is not None or underway(runs, grid))
    os.killpg(first.pid, number)  # as a terminal does: Ray's processes are in the group too
    _, err = first.communicate(timeout=300)
    assert first.returncode == status, err
    told = "scalesteer: interrupted; repeat the command to go on.\n" if number == signal.SIGINT else ""
    assert err.endswith(told)
    assert wait_for(lambda: not processes_of(ray_folder))
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
    node = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "other"))
        other = Cluster(initialize_head=True, head_node_args=node)
    try:
        where = {"engine": "ray", "address": other.address}
        with pytest.raises(RunError, match=r"the Ray cluster has no GPU \(`device` 'auto', `gpus_per_run` 0\.5\)"):
            make_runs([tiny], tmp_path / "runs", gpus_per_run=0.5, **where)
        with pytest.raises(
            RunError, match=r"a worker of Ray failed \(ModuleNotFoundError: .*; all machines need the same"
        ):
            make_runs([tiny], tmp_path / "runs", **where)
    finally:
        other.shutdown()
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.gpu
def test_runs_share_a_gpu(cache, tiny, ray_folder, tmp_path):
    configs = [changed(tiny, split=split, epochs=2) for split in (0, 1)]
    made = make_runs(configs, tmp_path / "runs", device="cuda", engine="ray", gpus_per_run=0.5)
    assert made.problems == []
    assert {result["environment"]["device"] for result in made.results.values()} == {torch.cuda.get_device_name()}
