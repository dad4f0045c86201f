"""The costs by which "auto" chooses a backend, fitted to the times of layers of every shape.

A time is modelled as a sum of what there is to do, :func:`scalesteer.fast.choice.work`, each with a cost that is not
negative. The costs with the least sum of squared relative errors are found, for each backend and kind of work. Layers
for which both backends take about as long count most: there a small error changes the choice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from scalesteer.fast import choice
from speed.bench import Case, shape_cases

Costs = dict[str, dict[str, tuple[float, ...]]]


def work(case: Case) -> dict[str, tuple[float, ...]]:
    """What the backends have to do for a case."""
    layer = case.layer("auto")
    filters, geometry = layer._stored_filters(), layer.geometry
    axes = geometry.axes(case.size, case.size, filters.sizes)
    return choice.work(axes, filters, geometry.groups, case.batch, case.reduce is not None)


def measured(path: Path) -> list[tuple[Case, dict[str, float]]]:
    """The cases of a file of the group "shapes", and the fastest time of each contender in nanoseconds."""
    found = json.loads(path.read_text())
    cuda = "cuda" in found["environment"]["command"]
    known = {_key(case.to_dict()): case for case in shape_cases(cuda)}
    return [
        (known[_key(record)], {name: 1e6 * about["fastest"] for name, about in record["contenders"].items()})
        for record in found["measurements"]
        if all("fastest" in about for about in record["contenders"].values())
    ]


def _key(record: dict[str, Any]) -> str:
    return json.dumps([record[name] for name in ("batch", "train", "channels", "size", "filters", "options")])


def fit(path: Path) -> Costs:
    """The costs of each kind of work, in nanoseconds for each unit."""
    rows: dict[tuple[str, str], list[tuple[tuple[float, ...], float, float]]] = {}
    with torch.no_grad():
        for case, times in measured(path):
            for name, amount in work(case).items():
                kind = "training" if case.train else "inference"
                weight = 1 / (0.2 + abs(np.log(times["fast"] / times["direct"])))
                time = times["direct" if name == "direct" else "fast"]
                rows.setdefault((kind, name), []).append((amount, time, weight))
    costs: Costs = {"training": {}, "inference": {}}
    for (kind, name), samples in rows.items():
        amounts = np.array([amount for amount, _, _ in samples], float)
        taken, weights = np.array([[time, weight] for _, time, weight in samples]).T
        relative = amounts * (weights / taken)[:, None]
        size = np.maximum(relative.max(0), np.finfo(float).tiny)  # some work may be in no case
        found, _ = nnls(relative / size, weights)
        costs[kind][name] = tuple(float(f"{c:.3g}") for c in found / size)
    return costs


def losses(path: Path, costs: Costs) -> list[tuple[float, Case]]:
    """How many times the time of the faster backend the chosen one takes, the worst first."""
    found = []
    for case, times in measured(path):
        amounts = work(case)
        direct, ours = (np.dot(costs["training" if case.train else "inference"][n], a) for n, a in amounts.items())
        chosen = times["fast" if direct > ours else "direct"]
        found.append((chosen / min(times["fast"], times["direct"]), case))
    return sorted(found, key=lambda pair: -pair[0])
