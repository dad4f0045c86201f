"""Makes the runs of an experiment: what is finished is skipped, what was begun goes on, each result is published."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paper import RESULTS
from paper import results as published
from paper.grids import EXPERIMENTS, MOVED, Experiment, Row
from paper.record import Record
from scalesteer.app import environment, evaluate, load, load_model, pick_device
from scalesteer.app.engines import make_runs
from scalesteer.datasets import ELASTIC_ALPHAS, ELASTIC_SIGMA, ImageSet
from scalesteer.datasets.elastic import warp
from scalesteer.files import check_writable


def select(
    experiment: Experiment,
    splits: Iterable[int] | None = None,
    methods: Iterable[str] | None = None,
    datasets: Iterable[str] | None = None,
    seeds: Iterable[int] | None = None,
) -> Experiment:
    """The part of an experiment with these splits, lines, datasets and seeds; None means all.

    Raises:
        ValueError: If it has no such split, line, dataset or seed.
    """
    parts: dict[str, tuple[Iterable[Any] | None, Callable[[Row], Any]]] = {
        "splits": (splits, lambda row: row.config.split),
        "methods": (methods, lambda row: row.line),
        "datasets": (datasets, lambda row: row.config.dataset),
        "seeds": (seeds, lambda row: row.config.seed),
    }
    rows = experiment.rows
    for name, (asked, own) in parts.items():
        if asked is not None:
            known, wanted = list(dict.fromkeys(map(own, experiment.rows))), list(asked)
            unknown = [value for value in wanted if value not in known]
            if unknown or not wanted:
                allowed = ", ".join(map(str, known))
                raise ValueError(f"`{name}` must be some of {allowed} (got {', '.join(map(str, unknown)) or 'none'}).")
            rows = tuple(row for row in rows if own(row) in wanted)
    return experiment._replace(rows=rows)


def make(
    name: str,
    experiment: Experiment | None = None,
    *,
    runs: Path = Path("runs"),
    results: Path = RESULTS,
    device: str = "auto",
    data_dir: Path | None = None,
    fresh: bool = False,
    engine: str = "local",
    address: str | None = None,
    gpus_per_run: float | None = None,
) -> list[str]:
    """Make every run of an experiment, or of a part of it, that has no result yet, and publish the results.

    It may be interrupted at any time, and several processes, on one machine or on many with a common disk, may work on
    one experiment: a run that another one has in hand is passed over. With `fresh` results that were published before
    do not count, only what is in `runs`. `engine`, `address` and `gpus_per_run` say on which machines, as in
    :func:`scalesteer.app.engines.make_runs`. Returns what kept runs from being finished, one line for each.
    """
    experiment = experiment or EXPERIMENTS[name]
    known = {} if fresh else dict(published.read(results))
    records = {record.run: record for record in experiment.runs if record not in known}
    check_writable(results / "runs")
    problems = make_runs(
        records,
        runs,
        publish=lambda run, result: published.publish(published.of_run(records[run], result), results),
        device=device,
        data_dir=data_dir,
        engine=engine,
        address=address,
        gpus_per_run=gpus_per_run,
    ).problems
    if experiment.distorted:
        ended = {config for config, result in published.read(results) if result["status"] == "finished"}
        tested = {} if fresh else dict(published.read(results, "distortion"))
        for config in (c for c in experiment.runs if c in ended and c not in tested):
            try:
                distort(config, runs / config.run.name, results, name, device=device, data_dir=data_dir)
            except ValueError as error:
                problems.append(f"{config.name}: {error}")
    return problems


def moved(images: ImageSet, pixels: float) -> ImageSet:
    """The set with every image moved left and up: half a pixel blurs as a distortion does, and distorts nothing."""
    field = np.full((2, 1, 1, 1), round(256 * pixels), np.int32)
    shifted = torch.from_numpy(warp(images.images.cpu().numpy(), lambda _: field))
    return replace(images, images=shifted.to(images.device))


def distort(
    config: Record,
    directory: Path,
    results: Path,
    name: str,
    *,
    device: str = "auto",
    data_dir: Path | None = None,
) -> dict[str, Any]:
    """Test the network of a finished run in a directory under elastic distortion of each strength, and publish that.

    It is also tested on images that are moved by half a pixel, which blurs them without distortion, and by a whole one.
    The result names the command that runs the experiment `name`.

    Raises:
        CheckpointError: If the directory holds no model.
    """
    place = pick_device(device)
    model, images = load_model(directory).to(place), load(config.run, "test", data_dir).to(place)

    def errors(change: Any, strengths: Iterable[float]) -> dict[str, float]:
        return {f"{s:g}": evaluate(model, change(s), config.precision)["error"] for s in strengths}

    about = {"command": f"python -m paper run {name} --splits {config.split}", **environment(images)}
    result = {"config": config.to_dict(), "sigma": ELASTIC_SIGMA, "errors": errors(images.distorted, ELASTIC_ALPHAS)}
    result |= {"moved": errors(lambda pixels: moved(images, pixels), MOVED), "environment": about}
    published.publish(result, results, "distortion")
    return result


def forecast(todo: Iterable[Record], results: Path = RESULTS) -> str:
    """How long training takes, as far as results of runs that cost the same tell."""
    ended = [(config, result) for config, result in published.read(results) if result["status"] == "finished"]
    device = statistics.mode(result["environment"]["device"] for _, result in ended) if ended else ""
    known: dict[Record, list[float]] = {}
    for config, result in ended:
        if result["environment"]["device"] == device:
            known.setdefault(_alike(config), []).append(result["seconds"])
    todo = list(todo)
    times = [statistics.fmean(known[_alike(config)]) for config in todo if _alike(config) in known]
    said = f"{len(todo)} runs to make"
    return (
        f"{said}; {len(times)} of them take {sum(times) / 3600:.1f} hours of training on {device}."
        if times
        else f"{said}."
    )


def _alike(config: Record) -> Record:
    """The same for runs that cost the same."""
    return replace(config, split=0, seed=0, lr=1.0, weight_decay=0.0, tuning=False)
