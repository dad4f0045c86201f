"""A table is a grid of runs: what is finished is skipped, what was begun goes on, and each result is published."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from paper.results import Result, collect, publish
from paper.tables import MOVES, Table, get_table
from scalesteer import _checks
from scalesteer.data import ELASTIC_ALPHAS, ELASTIC_SIGMA
from scalesteer.files import require
from scalesteer.training import (
    RunError,
    environment,
    evaluate,
    load,
    load_model,
    pick_device,
    saved_result,
    train,
)
from scalesteer.training.config import RunConfig


def run_table(
    table: Table | str,
    *,
    runs: Path = Path("runs"),
    results: Path = Path("results"),
    device: str = "auto",
    data_dir: Path | None = None,
    splits: Iterable[int] | None = None,
    methods: Iterable[str] | None = None,
    datasets: Iterable[str] | None = None,
    jobs: int = 1,
    fresh: bool = False,
) -> list[str]:
    """Make every run of a table that has no result yet, and publish the results.

    It may be interrupted at any time, and several processes, on one machine or on many with a common disk, may work on
    one table: a run that another one has in hand is passed over.

    Args:
        table: A table, or the name of one of ours.
        runs: Where runs are kept.
        results: Where results are published.
        device: Where to train.
        data_dir: Where the original files are, if not in the cache.
        splits: Only these splits.
        methods: Only these rows.
        datasets: Only these datasets.
        jobs: How many runs to make at once. Each is a process of its own, so that random numbers, signals and memory
            stay apart and results do not depend on `jobs`. Meant for many cores: on one GPU they take turns.
        fresh: Take no notice of results that were published before: only what is in `runs` counts.

    Returns:
        What kept runs from being finished, a line each.
    """
    table = (get_table(table) if isinstance(table, str) else table).part(splits, methods, datasets)
    _checks.integer("jobs", jobs, minimum=1)
    pick_device(device)
    _check_writable(results / "runs")
    known = {} if fresh else collect(results).runs
    todo, problems = [config for config in table.runs if config not in known], []
    work = _in_turn if jobs == 1 else _at_once
    with require("tqdm").tqdm(total=len(todo), desc=f"table {table.name}", unit="run", disable=None) as bar:
        for config, problem in work(todo, runs, device, data_dir, jobs):
            result = saved_result(config, runs / config.name)
            if result is not None:
                publish(result, results)
            if problem or result is None or result["status"] != "finished":
                problems.append(f"{config.name}: {problem or (result or {}).get('reason')}")
            bar.update()
    found = collect(results)
    for row in table.rows.values():
        alphas = tuple(cell.alpha for cell in row if cell.alpha is not None)
        for config in found.finished(row[0].runs) if alphas else []:
            if fresh or "moved" not in found.elastic.get(config, {}):  # not tested, or by an earlier version
                try:
                    evaluate_elastic(
                        runs / config.name, results, table=table.name, alphas=alphas, device=device, data_dir=data_dir
                    )
                except ValueError as error:
                    problems.append(f"{config.name}: {error}")
    return problems


def evaluate_elastic(
    directory: Path,
    results: Path = Path("results"),
    *,
    table: str,
    alphas: tuple[float, ...] = ELASTIC_ALPHAS,
    device: str = "auto",
    data_dir: Path | None = None,
) -> Result:
    """Test the model of a finished run under elastic distortion of each strength, and publish that.

    It is also tested on images that are moved by half a pixel, which blurs them without distortion, and by a whole one.

    Args:
        directory: The run's directory.
        results: Where to publish.
        table: The table whose command the result names as its own.
        alphas: The strengths.
        device: Where to compute.
        data_dir: Where the original files are, if not in the cache.

    Raises:
        CheckpointError: If the directory holds no model.
    """
    model, config = load_model(directory)
    place = pick_device(device)
    model, images = model.to(place), load(config, "test", data_dir).to(place)
    bar = require("tqdm").tqdm(alphas, desc=f"{config.name}, elastic", disable=None)
    errors = {f"{a:g}": evaluate(model, images.distorted(a), config.precision)["error"] for a in bar}
    moved = {f"{pixels:g}": evaluate(model, images.moved(pixels), config.precision)["error"] for pixels in MOVES}
    about = {"command": f"scalesteer run {table} --splits {config.split}", **environment(images)}
    result = {
        "config": config.to_dict(),
        "sigma": ELASTIC_SIGMA,
        "errors": errors,
        "moved": moved,
        "environment": about,
    }
    publish(result, results, "elastic")
    return result


def _check_writable(folder: Path) -> None:
    """Tell before hours of training, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RunError(f"{folder} cannot be written to ({error.strerror or error}).") from error


Ended = Iterator[tuple[RunConfig, str | None]]  # a run that came to an end, and what went wrong


def _in_turn(todo: list[RunConfig], runs: Path, device: str, data_dir: Path | None, jobs: int) -> Ended:
    for config in todo:
        try:
            train(config, runs / config.name, device=device, data_dir=data_dir)
            yield config, None
        except RunError as error:
            yield config, str(error)


def _at_once(todo: list[RunConfig], runs: Path, device: str, data_dir: Path | None, jobs: int) -> Ended:
    waiting, options = list(todo), ["--device", device, "--runs", str(runs)]
    options += ["--data-dir", str(data_dir)] if data_dir else []
    running: dict[RunConfig, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                config = waiting.pop(0)
                log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
                command = [sys.executable, "-m", *config.command.split(), *options]
                # A session of its own: the terminal's Ctrl-C reaches us only, and we ask each to stop once.
                worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
                running[config] = worker, log
            time.sleep(0.05)
            for config in [config for config, (worker, _) in running.items() if worker.poll() is not None]:
                worker, log = running.pop(config)
                log.seek(0)
                told = log.read().decode(errors="replace").strip().splitlines()
                log.close()
                yield config, (told or [f"ended with {worker.returncode}"])[-1] if worker.returncode else None
    finally:  # stopped: each writes a checkpoint
        for worker, _ in running.values():
            worker.terminate()
        for worker, log in running.values():
            worker.wait()
            log.close()
