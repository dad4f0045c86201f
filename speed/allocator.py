"""What it costs that the system's allocator gives memory back: training steps with and without `keep_memory`.

Each measurement is a process of its own, since what an allocator was told cannot be taken back. :data:`METHOD` says
how.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from scalesteer import create_model
from scalesteer.app.memory import MALLOC, keep_memory
from scalesteer.files import write_atomically
from speed.bench import environment

METHOD = (
    "Training steps of pooled-cnn: forward, backward and AdamW, float32, one CPU thread. Seconds are those that the "
    "processor worked for the process, also in the system's kernel; the median of the steps after the first two. Each "
    "measurement is a process; both ways take turns. Memory is the most that the process held."
)
WAYS = ("system", "keep")


class Case(NamedTuple):
    """A network and its images."""

    batch: int
    pixels: int
    colours: int
    channels: tuple[float, ...] | None = None


CASES = {
    "128 colour images of 96 x 96": Case(128, 96, 3),
    "32 of them in four channels": Case(32, 96, 3, (0.5, 0.71, 1.0, 1.41)),
    "128 grey images of 28 x 28": Case(128, 28, 1),
}


def train_a_little(case: Case, steps: int) -> dict[str, float]:
    """Seconds and page faults of a step, and the most memory of this process, in MiB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = create_model("pooled-cnn", in_chans=case.colours, image_size=case.pixels, channels=case.channels)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.rand(case.batch, case.colours, case.pixels, case.pixels)
    labels, seconds, faults = torch.arange(case.batch) % 10, list[float](), list[int]()
    for _ in range(2 + steps):
        began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": median(seconds[2:]), "page_faults": median(faults[2:]), "mebibytes": most}


def measure(case: Case, way: str, steps: int) -> dict[str, float]:
    """The same in a process of its own, with the system's allocator as it is or told to keep memory."""
    command = [sys.executable, "-m", "speed.allocator", json.dumps(case), "--steps", str(steps)]
    own = {**os.environ, MALLOC: way, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    said = subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(said))


def run(output: Path, *, rounds: int = 2, steps: int = 4, cases: dict[str, Case] = CASES) -> dict[str, Any]:
    """Measure in turns and write what was found."""
    found: dict[str, Any] = {
        "environment": {"command": "python -m speed allocator", **environment(torch.device("cpu"))},
        "method": METHOD,
        "rounds": rounds,
        "steps": steps,
        "cases": {},
    }
    for name, case in cases.items():
        told = {way: list[dict[str, float]]() for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                told[way].append(measure(case, way, steps))
        found["cases"][name] = {
            way: {key: float(f"{median(one[key] for one in all_of):.4g}") for key in all_of[0]}
            for way, all_of in told.items()
        }
    found["load"] = round(os.getloadavg()[0], 1)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, (json.dumps(found, indent=1) + "\n").encode())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    keep_memory()
    print(json.dumps(train_a_little(Case(*json.loads(options.case)), options.steps)))
