"""Runs as tasks of a Ray cluster, as many at a time as it has room for."""

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import scalesteer
from scalesteer import files
from scalesteer.app.config import Run
from scalesteer.app.memory import keep_memory
from scalesteer.app.run import BusyError, RunError, train

RETRIES = 20  # of a run whose process or machine dies; each goes on from the run's last checkpoint
BUSY_WAIT_S, BUSY_STEP_S = 150.0, 2.0  # an NFS server keeps a dead machine's locks, often for 90 seconds
CONNECT_WAIT_S, CANCEL_WAIT_S = 10.0, 10.0  # a run that is told to stop saves a checkpoint within three seconds
LOCAL = {"address": "local", "include_dashboard": False, "object_store_memory": 80_000_000}  # almost its least
PASSED_ON = ("SCALESTEER_CACHE", "SCALESTEER_DATA", "SCALESTEER_COMMIT")  # variables that hold for the workers too
# Nothing is reported to its makers, no change to come is told, and no page printed where our tables go if a node dies.
QUIET = {"USAGE_STATS_ENABLED": "0", "ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "DEDUP_LOGS_SKIP_REGEX": "."}


def ray_outcomes(
    runs: list[Run], folder: Path, device: str, data_dir: Path | None, address: str | None, share: float | None
) -> Iterator[tuple[Run, dict[str, Any] | RunError] | None]:
    """Of each run what came of it, when it is ready, and None once a second meanwhile; see :func:`.engines.make_runs`.

    A failure that every run would meet is raised. Whoever stops asking stops the runs; each saves a checkpoint first.
    """
    with _connected(address) as (ray, stop):
        there = "GPU" in ray.cluster_resources()
        gpus = (share or 1.0) if device == "cuda" or share or (device == "auto" and there) else 0.0
        if gpus and not there:
            asked = f"`device` {device!r}, `gpus_per_run` {share}"
            raise RunError(f"the Ray cluster has no GPU ({asked}): start a node with one, or use device cpu.")
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(train_in_worker)
        options = {"device": "cuda" if gpus else "cpu", "data_dir": data_dir and data_dir.absolute()}
        here = scalesteer.__version__, {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        (folder := folder.absolute()).mkdir(parents=True, exist_ok=True)
        pending = {task.remote(run.to_dict(), folder / run.name, options, *here): run for run in runs}
        try:
            while pending:
                ready, _ = ray.wait(list(pending), timeout=1)
                if stop:
                    raise SystemExit(128 + stop[0])
                yield None
                for reference in ready:
                    yield pending.pop(reference), _outcome(ray, reference)
        finally:
            for reference in pending:
                ray.cancel(reference)  # as Ctrl-C does
            if pending:
                ray.wait(list(pending), num_returns=len(pending), timeout=CANCEL_WAIT_S)


def train_in_worker(
    settings: dict[str, Any], directory: Path, options: dict[str, Any], version: str, environment: dict[str, str]
) -> tuple[str, Any]:
    """Make a run in a process of Ray's: ("result", it), ("problem", why not), or ("stop", why no run can be made)."""
    until = time.monotonic() + BUSY_WAIT_S
    while True:
        try:
            if version != scalesteer.__version__:
                raise ValueError(f"scalesteer is {scalesteer.__version__}, and {version} where the runs come from.")
            if not directory.parent.is_dir():
                raise ValueError(f"{directory.parent} is not there: put --runs on a disk that all machines share.")
            os.environ.update(environment)
            keep_memory()
            return "result", train(Run.from_dict(settings), directory, **options)
        except BusyError as error:  # perhaps by a process that has died, and is not known yet to be dead
            if time.monotonic() > until:
                return "problem", str(error)
            time.sleep(BUSY_STEP_S)
        except RunError as error:
            return "problem", str(error)
        except (ValueError, TypeError, ImportError, OSError) as error:  # of this machine: no data, disk or package
            return "stop", f"on {socket.gethostname()}: {error}"


def _outcome(ray: Any, reference: Any) -> dict[str, Any] | RunError:
    """What a task returned. What makes all others fail too is raised."""
    try:
        kind, value = ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # also where the package or one of its functions is missing
        need = f"all machines need the same Python, torch and scalesteer ({scalesteer.__version__})"
        raise RunError(f"a worker of Ray failed ({str(error).strip().rpartition(chr(10))[2]}); {need}.") from error
    except ray.exceptions.RayError as error:
        return RunError(f"its process or machine died {RETRIES + 1} times ({' '.join(str(error).split())[:300]})")
    if kind == "stop":
        raise RunError(value)
    return RunError(value) if kind == "problem" else value


@contextmanager
def _connected(address: str | None) -> Iterator[tuple[Any, list[int]]]:
    """Ray, quiet: started here, or that of a cluster; and a list that gets the number of a SIGTERM."""
    # Ray's own handler would end the process before runs are told to stop. Nor may ours raise: Ray loses the status.
    for name, value in QUIET.items():
        os.environ.setdefault(f"RAY_{name}", value)  # before Ray is loaded
    ray, before, stop = files.require("ray"), signal.getsignal(signal.SIGTERM), list[int]()
    where = LOCAL if address is None else {"address": address}
    try:
        if address not in (None, "auto"):  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_WAIT_S).close()
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ValueError, OverflowError, OSError, ray.exceptions.RayError) as error:
        place = "started here" if address is None else f"reached at `address` {address!r}"
        raise RunError(f"Ray cannot be {place}: {' '.join(str(error).split())[:300]}") from error
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    try:
        yield ray, stop
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)
