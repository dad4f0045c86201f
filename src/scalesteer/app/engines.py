"""Many runs: one after the other in this process, or as Ray tasks on many machines. The results are the same.

Both engines keep one contract: configurations go in, results come out as they are ready, each once, and the process
that asked for them publishes them. What is finished is not trained again. What was begun goes on from its last
checkpoint.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from scalesteer import _checks, files
from scalesteer._text import printable
from scalesteer.app.cluster import ray_outcomes
from scalesteer.app.config import Run
from scalesteer.app.device import pick_device
from scalesteer.app.run import RunError, train
from scalesteer.app.settings import EngineName
from scalesteer.models.registered import BUILDERS

LOOK_EVERY_S, LOG_EVERY_S = 5.0, 60.0  # how often progress is shown, on a terminal and elsewhere

log = logging.getLogger("scalesteer.app")


class Made(NamedTuple):
    """What came of many runs."""

    results: dict[Run, dict[str, Any]]  # of those that ended, in the order in which they did
    problems: list[str]  # what kept the others, and those that failed, from being finished: one line for each


# Of one run after the other what came of it; None while there is nothing new.
Outcomes = Generator[tuple[Run, dict[str, Any] | RunError] | None]


def make_runs(
    runs: Iterable[Run],
    folder: Path = Path("runs"),
    *,
    publish: Callable[[Run, dict[str, Any]], object] = lambda run, result: None,
    device: str = "auto",
    data_dir: Path | None = None,
    engine: str = "local",
    address: str | None = None,
    gpus_per_run: float | None = None,
) -> Made:
    """Make runs that are not finished yet, each in its directory below a folder.

    It may be interrupted at any time; the same call goes on. A run that another process has in hand is passed over.
    Two runs that share one GPU, for example::

        make_runs([make_run(lr=0.001), make_run(lr=0.005)], engine="ray", gpus_per_run=0.5)

    Args:
        runs: Each is made once, however often it is named.
        folder: Where each has its directory. For Ray it must be on a disk that all machines have under this path.
        publish: What is called with each run and its result when it is there, in this process, once.
        device: Where a run computes. With Ray "auto", "cpu" or "cuda": Ray chooses which GPU.
        data_dir: Where the original files are, on every machine, if they are not in the cache.
        engine: "local": here, one after the other. "ray": as tasks of a Ray cluster, as many at a time as have room.
        address: Of the head of a running Ray cluster, as "10.0.0.5:6379", or "auto" for one that this machine belongs
            to. By default Ray is started on this machine alone, and ended with this call.
        gpus_per_run: The share of a GPU that a run gets from Ray: 0.25 puts four on each. By default a whole one, and a
            CPU core where the cluster has no GPU.

    Raises:
        ValueError: If an argument is wrong.
        RunError: If no run can be made because of the cluster: it cannot be reached, has no GPU, or a machine of it
            does not have the folder of runs or has another version.
    """
    _check_place(device, engine, address, gpus_per_run)
    todo, made = list(dict.fromkeys(runs)), Made({}, [])
    options = {"device": device, "data_dir": data_dir}
    if engine == "ray" and (own := [run.network.model for run in todo if run.network.model in BUILDERS]):
        raise ValueError(
            f"`engine` must be local for a network of your own (got 'ray' and {own[0]}): no worker has its code."
        )
    if engine == "local":
        outcomes = _local(todo, folder, options)
    else:
        outcomes = _ray(todo, folder, options | {"address": address, "share": gpus_per_run})
    bar = files.require("tqdm").tqdm(total=len(todo), unit="run", disable=None)
    number, shown = 0, time.monotonic()
    with bar, closing(outcomes):
        for ended in outcomes:
            if ended is None:
                if time.monotonic() - shown > (LOG_EVERY_S if bar.disable else LOOK_EVERY_S):
                    _show_progress(bar, todo, folder)
                    shown = time.monotonic()
                continue
            run, outcome = ended
            if isinstance(outcome, RunError):
                said = str(outcome)
                made.problems.append(f"{run.name}: {said}")
            else:
                publish(run, outcome)
                made.results[run] = outcome
                said = outcome.get("reason") or f"validation error {100 * outcome['val_error']:.2f} %"
                if outcome["status"] != "finished":
                    made.problems.append(f"{run.name}: {said}")
            bar.update()
            number += 1
            line = printable(f"{run.name}: {said} ({number} of {len(todo)})")
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


def _show_progress(bar: Any, runs: list[Run], folder: Path) -> None:
    """How many epochs are done, by what the runs have written."""
    done = 0
    for run in runs:
        with suppress(OSError, files.DataError):
            done += len(files.read_small(folder / run.name / "metrics.jsonl").splitlines())
    said = f"{done} of {sum(run.training.epochs for run in runs)}"
    log.info("%s epochs", said) if bar.disable else bar.set_postfix(epochs=said)


def _local(runs: list[Run], folder: Path, options: dict[str, Any]) -> Outcomes:
    for run in runs:
        try:
            outcome: dict[str, Any] | RunError = train(run, folder / run.name, **options)
        except RunError as error:
            outcome = error
        yield run, outcome


def _ray(runs: list[Run], folder: Path, options: dict[str, Any]) -> Outcomes:
    ended = [run for run in runs if all((folder / run.name / f"{name}.json").exists() for name in ("config", "result"))]
    # Trains nothing, and needs no cluster: returns what is there.
    yield from _local(ended, folder, {"device": "cpu", "data_dir": options["data_dir"]})
    if todo := [run for run in runs if run not in ended]:
        files.check_writable(folder)
        yield from ray_outcomes(todo, folder, **options)
