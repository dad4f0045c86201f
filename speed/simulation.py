"""A simulation, not a measurement: how long a large sweep takes on GPUs whose machines die now and then.

The runs' times are measured ones, those of results/runs. All else is assumed, and kept in the file beside the numbers:
how many machines there are, how often they die, how long a run takes to start. Runs go to free GPUs in the order in
which they come, as Ray gives them out. One whose machine dies goes to the end of the queue and on from its last
checkpoint.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paper.markdown import table
from scalesteer.app.engines import RETRIES
from scalesteer.app.run import SAVE_EPOCH_S, SAVE_EVERY_S
from scalesteer.files import write_atomically

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "results" / "bench" / "sweep-simulation.json"
RUNS, MACHINES, GPUS_EACH, DRAWS = 1_000, 8, 8, 20
START_S = 20.0  # a process, its imports, the data, the first steps
NOTICE_S = 30.0  # until Ray takes a silent machine for dead
BACK_S = 300.0  # until another machine is in its place
DEATHS_PER_HOUR = (0.0, 1.0)  # of each machine
STRETCHES = (1, 60)  # runs as measured, and so many times as long
ORDERS = ("as drawn", "longest first")


class Run(NamedTuple):
    """What a run costs."""

    seconds: float  # of training
    save_every_s: float  # between checkpoints


class Outcome(NamedTuple):
    """What came of a simulated sweep, in seconds."""

    makespan: float  # until the last run ended
    utilisation: float  # share of the GPUs' time, dead ones included, in which something was learned that was kept
    deaths: int  # of machines
    lost: float  # training that was not saved
    most_restarts: int  # of one run


def simulate(runs: Sequence[Run], machines: int, gpus_each: int, time_to_death: Callable[[], float]) -> Outcome:
    """Give runs to GPUs until all are finished.

    Args:
        runs: In the order in which they start.
        machines: How many there are.
        gpus_each: How many runs each has room for.
        time_to_death: How long the next machine lives; asked for each at the beginning, and when one comes back.
    """
    queue = deque(enumerate(run.seconds for run in runs))  # what is still to be trained of each
    free = [machine for machine in range(machines) for _ in range(gpus_each)]
    working: dict[int, tuple[int, float, float]] = {}  # by run: machine, begin of training, seconds to train
    events: list[tuple[float, int, str, Any]] = []
    order = iter(range(10**9))
    restarts, deaths, lost, now, left = [0] * len(runs), 0, 0.0, 0.0, len(runs)

    def expect(when: float, what: str, which: Any) -> None:
        heapq.heappush(events, (when, next(order), what, which))

    for machine in range(machines):
        expect(time_to_death(), "death", machine)
    while left:
        while queue and free:
            run, seconds = queue.popleft()
            working[run] = (free.pop(0), now + START_S, seconds)
            expect(now + START_S + seconds, "end", (run, restarts[run]))
        now, _, what, which = heapq.heappop(events)
        if what == "end":
            run, attempt = which
            if attempt == restarts[run] and run in working:  # it has not been interrupted since
                free.append(working.pop(run)[0])
                left -= 1
        elif what == "death":
            deaths += 1
            free = [machine for machine in free if machine != which]
            for run in [run for run, (machine, *_) in working.items() if machine == which]:
                _, begin, seconds = working.pop(run)
                trained = max(0.0, now - begin)
                kept = trained - trained % runs[run].save_every_s
                lost += trained - kept
                restarts[run] += 1
                expect(now + NOTICE_S, "again", (run, seconds - kept))
            expect(now + BACK_S, "back", which)
        elif what == "back":
            free += [which] * gpus_each
            expect(now + time_to_death(), "death", which)
        else:
            queue.append(which)
    useful = sum(run.seconds for run in runs)
    return Outcome(now, useful / (now * machines * gpus_each), deaths, lost, max(restarts))


def measured_runs(results: Path = ROOT / "results" / "runs") -> list[Run]:
    """What each finished run of the repository took on a GPU, and how often it saved."""
    lines = [json.loads(line) for path in sorted(results.glob("*.jsonl")) for line in path.read_text().splitlines()]
    ended = [line for line in lines if line["status"] == "finished" and "NVIDIA" in line["environment"]["device"]]
    ended = [line for line in ended if "shared the GPU" not in line["environment"].get("note", "")]
    return [_cost(line["seconds"], line["config"]["epochs"]) for line in ended]


def _cost(seconds: float, epochs: int) -> Run:
    return Run(seconds, min(SAVE_EVERY_S, max(SAVE_EPOCH_S["cuda"], seconds / epochs)))


def measure(output: Path = OUTPUT) -> dict[str, Any]:
    """Simulate every case with several draws of runs and deaths, and keep what came out with what was assumed."""
    known = measured_runs()
    cases = []
    for stretch, order, rate in itertools.product(STRETCHES, ORDERS, DEATHS_PER_HOUR):
        stretched = [Run(r.seconds * stretch, min(SAVE_EVERY_S, r.save_every_s * stretch)) for r in known]
        outcomes = []
        for draw in range(DRAWS):
            random = np.random.default_rng(draw)
            chosen = [stretched[i] for i in random.integers(len(stretched), size=RUNS)]
            if order == "longest first":
                chosen.sort(key=lambda run: -run.seconds)
            life = partial(random.exponential, 3600 / rate) if rate else lambda: math.inf
            outcomes.append(simulate(chosen, MACHINES, GPUS_EACH, life))
        means = {name: statistics.fmean(o[i] for o in outcomes) for i, name in enumerate(Outcome._fields)}
        means["most_restarts"] = max(outcome.most_restarts for outcome in outcomes)
        cases.append({"stretch": stretch, "order": order, "deaths_per_machine_hour": rate, **means})
    seconds = [run.seconds for run in known]
    result = {
        "simulation": True,
        "assumed": {
            "runs": RUNS, "machines": MACHINES, "gpus_each": GPUS_EACH, "draws": DRAWS, "start_s": START_S,
            "notice_s": NOTICE_S, "back_s": BACK_S, "retries": RETRIES,
        },
        "measured": {
            "runs": len(known), "median_s": statistics.median(seconds), "longest_s": max(seconds),
            "mean_s": statistics.fmean(seconds),
        },
        "cases": cases,
    }  # fmt: skip
    write_atomically(output, (json.dumps(result, indent=1) + "\n").encode())
    return result


def sweep_numbers() -> dict[str, Any]:
    """What was assumed, and the measured times that the simulation draws from."""
    found = json.loads(OUTPUT.read_text())
    return {**found["assumed"], "gpus": found["assumed"]["machines"] * found["assumed"]["gpus_each"], **{
        f"measured_{name}": value for name, value in found["measured"].items()
    }}  # fmt: skip


def sweep_table() -> str:
    """The simulated sweeps: how long they take and how well GPUs are used, without deaths and with them."""
    cases = json.loads(OUTPUT.read_text())["cases"]
    dying_head = f"with {cases[1]['deaths_per_machine_hour']:g} death per machine and hour"
    head = ("runs", "order", "takes", "GPU time used", dying_head, "GPU time used", "training lost", "most restarts")
    rows: list[Sequence[object]] = [head]
    for without, dying in zip(cases[::2], cases[1::2], strict=True):
        useful = dying["makespan"] * dying["utilisation"] * MACHINES * GPUS_EACH
        rows.append((
            "as measured" if without["stretch"] == 1 else f"{without['stretch']} times as long",
            without["order"],
            *_costs(without),
            *_costs(dying),
            f"{100 * dying['lost'] / useful:.1f} %",
            dying["most_restarts"],
        ))  # fmt: skip
    return table(rows, left=2)


def _costs(case: dict[str, Any]) -> tuple[str, str]:
    seconds = case["makespan"]
    took = f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
    return took, f"{100 * case['utilisation']:.0f} %"


VIEWS = {"sweep_numbers": sweep_numbers, "sweep_table": sweep_table}
