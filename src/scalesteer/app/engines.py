"""Many runs: one after the other in this process, or as Ray tasks on many machines. The results are the same.

Both engines keep one contract: configurations go in, results come out as they are ready, each once, and the process
that asked for them publishes them. What is finished is not trained again. What was begun goes on from its last
checkpoint.
"""

import logging
import os
import platform
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

import scalesteer
from scalesteer import _checks, files
from scalesteer._text import printable
from scalesteer.app import results
from scalesteer.app.config import RunConfig
from scalesteer.app.device import pick_device
from scalesteer.app.run import BusyError, RunError, train
from scalesteer.app.settings import EngineName

RETRIES = 20  # of a run whose process or machine dies; each goes on from the run's last checkpoint
# An NFS server keeps a dead machine's locks until its lease ends, often after 90 seconds.
BUSY_WAIT_S, BUSY_STEP_S = 150.0, 2.0
CONNECT_WAIT_S = 10.0
CANCEL_WAIT_S = 10.0  # a run that is told to stop saves a checkpoint within three seconds
LOOK_EVERY_S, LOG_EVERY_S = 5.0, 60.0  # how often progress is shown, on a terminal and elsewhere
OBJECT_STORE_BYTES = 80_000_000  # little more than Ray's least: only configurations and results go through it
PASSED_ON = ("SCALESTEER_CACHE", "SCALESTEER_DATA", "SCALESTEER_COMMIT")  # variables that hold for the workers too
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to its makers
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns of a change to come
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # or it prints pages to stdout when a node dies, where our tables go
}

log = logging.getLogger("scalesteer.app")


class Made(NamedTuple):
    """What came of many runs."""

    results: dict[RunConfig, dict[str, Any]]  # of those that ended, in the order in which they did
    problems: list[str]  # what kept the others, and those that failed, from being finished: one line for each


# Of one run after the other what came of it; None while there is nothing new.
Outcomes = Generator[tuple[RunConfig, dict[str, Any] | RunError] | None]


def make_runs(
    configs: Iterable[RunConfig],
    results_dir: Path,
    *,
    publish: Callable[[dict[str, Any], Path], Path | None] = results.publish,
    runs: Path = Path("runs"),
    device: str = "auto",
    data_dir: Path | None = None,
    engine: str = "local",
    address: str | None = None,
    gpus_per_run: float | None = None,
) -> Made:
    """Make runs that are not finished yet, and publish each result when it is there, in this process, once.

    It may be interrupted at any time; the same call goes on. A run that another process has in hand is passed over.
    Two runs that share one GPU, for example::

        make_runs([RunConfig(lr=0.001), RunConfig(lr=0.005)], Path("results"), engine="ray", gpus_per_run=0.5)

    Args:
        configs: The runs. Each is made once, however often it is named.
        results_dir: Where results are published.
        publish: What publishes a result there.
        runs: Where each run has its directory. For Ray it must be on a disk that all machines have under this path.
        device: Where a run computes. With Ray "auto", "cpu" or "cuda": Ray chooses which GPU.
        data_dir: Where the original files are, on every machine, if they are not in the cache.
        engine: "local": here, one after the other. "ray": as tasks of a Ray cluster, as many at a time as have room.
        address: Of the head of a running Ray cluster, as "10.0.0.5:6379", or "auto" for one that this machine belongs
            to. By default Ray is started on this machine alone, and ended with this call.
        gpus_per_run: The share of a GPU that a run gets from Ray: 0.25 puts four on each. By default a whole one, and a
            CPU core where the cluster has no GPU.

    Raises:
        ValueError: If an argument is wrong, or results cannot be written.
        RunError: If no run can be made because of the cluster: it cannot be reached, has
            no GPU, or a machine of it does not share the disk or has another version.
    """
    _check_place(device, engine, address, gpus_per_run)
    todo, made = list(dict.fromkeys(configs)), Made({}, [])
    if any(config.images is None for config in todo):  # the others publish nothing
        files.check_writable(results_dir / "runs")
    options = {"device": device, "data_dir": data_dir}
    outcomes = _local(todo, runs, options) if engine == "local" else _ray(todo, runs, options, address, gpus_per_run)
    bar = files.require("tqdm").tqdm(total=len(todo), unit="run", disable=None)
    number, shown = 0, time.monotonic()
    with bar, closing(outcomes):
        for ended in outcomes:
            if ended is None:
                if time.monotonic() - shown > (LOG_EVERY_S if bar.disable else LOOK_EVERY_S):
                    _show_progress(bar, todo, runs)
                    shown = time.monotonic()
                continue
            config, outcome = ended
            if isinstance(outcome, RunError):
                said = str(outcome)
                made.problems.append(f"{config.name}: {said}")
            else:
                publish(outcome, results_dir)
                made.results[config] = outcome
                said = outcome.get("reason") or f"validation error {100 * outcome['val_error']:.2f} %"
                if outcome["status"] != "finished":
                    made.problems.append(f"{config.name}: {said}")
            bar.update()
            number += 1
            line = printable(f"{config.name}: {said} ({number} of {len(todo)})")
            log.info("%s", line) if bar.disable else bar.write(line, file=sys.stderr)
    return made


def _check_place(device: str, engine: str, address: str | None, gpus_per_run: float | None) -> None:
    _checks.choice("engine", engine, get_args(EngineName))
    if engine == "local":
        for name, value in (("address", address), ("gpus_per_run", gpus_per_run)):
            if value is not None:
                raise ValueError(f"`{name}` (got {value!r}) is for engine='ray' only.")
        pick_device(device)
        return
    _checks.choice("device", device, ("auto", "cpu", "cuda"))
    if address not in (None, "auto") and not re.fullmatch(r"[^/]+:\d{1,5}", address):
        raise ValueError(f"`address` must be HOST:PORT or auto (got {address!r}).")
    if gpus_per_run is not None and not 0 < _checks.real("gpus_per_run", gpus_per_run) <= 1:
        raise ValueError(f"`gpus_per_run` must be above 0 and at most 1, one GPU (got {gpus_per_run}).")
    if gpus_per_run is not None and device == "cpu":
        raise ValueError(f"`gpus_per_run` (got {gpus_per_run}) needs device 'cuda' or 'auto' (got 'cpu').")


def _show_progress(bar: Any, configs: list[RunConfig], runs: Path) -> None:
    """How many epochs are done, by what the runs have written."""
    done = 0
    for config in configs:
        with suppress(OSError, files.DataError):
            done += len(files.read_small(runs / config.name / "metrics.jsonl").splitlines())
    said = f"{done} of {sum(config.epochs for config in configs)}"
    log.info("%s epochs", said) if bar.disable else bar.set_postfix(epochs=said)


def _local(configs: list[RunConfig], runs: Path, options: dict[str, Any]) -> Outcomes:
    for config in configs:
        try:
            outcome: dict[str, Any] | RunError = train(config, runs / config.name, **options)
        except RunError as error:
            outcome = error
        yield config, outcome


def _ray(
    configs: list[RunConfig], runs: Path, options: dict[str, Any], address: str | None, gpus_per_run: float | None
) -> Outcomes:
    ended = [c for c in configs if all((runs / c.name / f"{name}.json").exists() for name in ("config", "result"))]
    yield from _local(ended, runs, options | {"device": "cpu"})  # trains nothing: returns what is there
    todo = [config for config in configs if config not in ended]
    if not todo:
        return
    runs = runs.absolute()
    with _token(runs) as token, _connected(address) as (ray, stop):
        gpus = _gpus_of_each(ray, options["device"], gpus_per_run)
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(_train_in_worker)
        common: dict[str, Any] = {
            "token": str(token),
            "version": scalesteer.__version__,
            "device": "cuda" if gpus else "cpu",
        }
        common["data_dir"] = options["data_dir"] and str(Path(options["data_dir"]).absolute())
        common["environment"] = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        pending = {task.remote(config.to_dict(), str(runs / config.name), **common): config for config in todo}
        machines = _machines(ray)
        try:
            while pending:
                ready, _ = ray.wait(list(pending), timeout=1)
                if stop:
                    raise SystemExit(128 + stop[0])
                before, machines = machines, _machines(ray)
                for machine in before.keys() - machines.keys():
                    log.warning("%s has gone; its runs go on elsewhere from their last checkpoints", before[machine])
                yield None
                for reference in ready:
                    yield pending[reference], _outcome(ray, reference)
                    del pending[reference]
        finally:  # as Ctrl-C does: runs that are under way save a checkpoint first
            for reference in pending:
                ray.cancel(reference)
            if pending:
                ray.wait(list(pending), num_returns=len(pending), timeout=CANCEL_WAIT_S)


def _outcome(ray: Any, reference: Any) -> dict[str, Any] | RunError:
    """What a task returned; what makes all others fail too is raised."""
    try:
        kind, value = ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # also where the package or one of its functions is missing
        why = str(error).strip().rpartition("\n")[2]
        need = f"all machines need the same Python, torch and scalesteer ({scalesteer.__version__})"
        raise RunError(f"a worker of Ray failed ({why}); {need}.") from error
    except ray.exceptions.RayError as error:
        why = " ".join(str(error).split())[:300]
        return RunError(f"its process or machine died {RETRIES + 1} times, or it was cancelled ({why})")
    if kind == "stop":
        # A machine without data, disk or package fails at once, and would take and fail one run after the other.
        raise RunError(value)
    return RunError(value) if kind == "problem" else value


def _machines(ray: Any) -> dict[str, str]:
    """Names of the cluster's machines that are alive, by Ray's numbers."""
    return {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}


def _gpus_of_each(ray: Any, device: str, share: float | None) -> float:
    there = ray.cluster_resources()
    if device == "cpu" or (device == "auto" and share is None and not there.get("GPU")):
        if there.get("CPU", 0) < 1:
            raise RunError("the Ray cluster has no CPU for a run: start a node with --num-cpus of at least 1.")
        return 0.0
    if not there.get("GPU"):
        asked = f"`device` {device!r}" if share is None else f"`gpus_per_run` {share:g}"
        raise RunError(f"{asked} needs a GPU, and the Ray cluster has none: start a node with one, or use device cpu.")
    return 1.0 if share is None else float(share)


@contextmanager
def _connected(address: str | None) -> Iterator[tuple[Any, list[int]]]:
    """Ray, quiet: started here, or that of a cluster; and a list that gets the number of a SIGTERM.

    Ray's own handler would end the process before runs are told to stop. Nor may ours raise: Ray loses the exit status.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)  # before Ray is loaded
    ray = files.require("ray")
    before, stop = signal.getsignal(signal.SIGTERM), []
    here = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    where = here if address is None else {"address": address}
    try:
        if address not in (None, "auto"):  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_WAIT_S).close()
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ValueError, OverflowError, OSError, ray.exceptions.RayError) as error:
        place = "be started here" if address is None else f"be reached at `address` {address!r}"
        raise RunError(f"Ray cannot {place}: {' '.join(str(error).split())[:300]}") from error
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    try:
        yield ray, stop
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _token(runs: Path) -> Iterator[Path]:
    """A locked file in the folder of runs, by which a machine proves that it has the same disk and sees its locks."""
    token = runs / f".ray-{secrets.token_hex(8)}.lock"
    with ExitStack() as held:
        try:
            runs.mkdir(parents=True, exist_ok=True)
            for left in runs.glob(".ray-*.lock"):  # by a process that was killed
                with suppress(files.LockedError), files.locked(left):
                    left.unlink()
            held.enter_context(files.locked(token, BUSY_STEP_S))
        except OSError as error:
            raise RunError(f"{runs} cannot be written to ({error.strerror or error}).") from error
        held.callback(token.unlink, missing_ok=True)
        yield token


def _check_token(token: Path) -> None:
    """Whether this machine shares the disk of the process that holds the token, and its locks.

    Raises:
        RunError: If not.
    """
    if not token.exists():
        raise RunError(f"{token.parent} is not the same folder on all machines: put --runs on a disk that all share.")
    with suppress(files.LockedError), files.locked(token):
        why = "two machines could write to one run"
        raise RunError(
            f"{token.parent} does not share its locks ({why}): mount it with locks, as NFS 4 or Lustre's flock."
        )


def _train_in_worker(
    config: dict[str, Any],
    directory: str,
    *,
    token: str,
    version: str,
    device: str,
    data_dir: str | None,
    environment: dict[str, str],
) -> tuple[str, Any]:
    """Make a run in a process of Ray's: ("result", it), ("problem", why not), or ("stop", why no run can be made)."""
    try:
        if version != scalesteer.__version__:
            raise RunError(f"scalesteer {scalesteer.__version__} is installed, and {version} where the runs come from.")
        os.environ.update(environment)
        _check_token(Path(token))
        where = pick_device(device)
    except (ValueError, TypeError, ImportError, OSError) as error:
        return "stop", f"on {platform.node()}: {error}"
    run, place = RunConfig.from_dict(config), Path(directory)
    wait_until = time.monotonic() + BUSY_WAIT_S
    while True:
        try:
            result = train(run, place, device=str(where), data_dir=None if data_dir is None else Path(data_dir))
            return "result", result
        except BusyError as error:  # perhaps by a process that has died, and is not known yet to be dead
            if time.monotonic() > wait_until:
                return "problem", str(error)
            time.sleep(BUSY_STEP_S)
        except RunError as error:
            return "problem", str(error)
        except (ValueError, TypeError, ImportError, OSError) as error:
            return "stop", f"on {platform.node()}: {error}"
