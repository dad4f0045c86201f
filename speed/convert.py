"""What conversion costs: a ResNet of 3 x 3 convolutions on colour images of 64 x 64, as it is and converted.

Two kinds of work: a training step, and ONNX Runtime on one image. :data:`METHOD` says how they are measured.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from examples.convert_resnet import resnet
from scalesteer import PAPER_SCALES, FoldedScaleConv2d, ScaleChannels, convert, fold
from scalesteer.app.device import pick_device, warm_up
from scalesteer.files import require, write_atomically
from speed.bench import environment, seconds

SIDE, WIDTH, BATCH = 64, 32, 8
METHOD = (
    "A ResNet of seven 3 x 3 convolutions, 32 to 128 channels, on images of 3 x 64 x 64, float32. Training: forward, "
    "backward and AdamW, batch 8. Inference: folded, exported to ONNX for this size with one convolution for each "
    "scale, in ONNX Runtime, one image. On a CPU one thread, and the time that it was given, so that other work on the "
    "machine counts little. Contenders take turns; the fastest of all rounds counts."
)
CONVERSIONS: dict[str, dict[str, Any]] = {
    "3 x 3, one scale": {"scales": (1.0,)},
    "3 x 3, four scales, 0.71 to 2": {"scales": (0.71, 1.0, 1.41, 2.0)},
    "3 x 3, the paper's six scales": {"scales": PAPER_SCALES},
    "3 x 3, the default scales": {},
    "7 x 7, four scales, 0.71 to 2": {"kernel_size": 7, "scales": (0.71, 1.0, 1.41, 2.0)},
    "7 x 7, the paper's six scales": {"kernel_size": 7, "scales": PAPER_SCALES},
}
CHANNELS = (0.5, 0.71, 1.0, 1.41, 2.0)
Step = Callable[[], Any]
Record = dict[str, Any]


def contenders() -> dict[str, nn.Module]:
    """The network, the network in `ScaleChannels`, and its conversions."""
    torch.manual_seed(0)
    net = resnet(WIDTH)
    found: dict[str, nn.Module] = {"network": net, "in ScaleChannels, five from 0.5 to 2": ScaleChannels(net, CHANNELS)}
    return found | {name: convert(net, **options)[0] for name, options in CONVERSIONS.items()}


def training_step(model: nn.Module, device: torch.device) -> Step:
    """Forward, backward and AdamW on one batch."""
    model = model.to(device).train()
    images, labels = torch.rand(BATCH, 3, SIDE, SIDE, device=device), torch.arange(BATCH, device=device) % 10
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda" or None)

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def runtime_step(model: nn.Module, folder: Path) -> Step:
    """ONNX Runtime on one image, checked against torch before."""
    runtime = require("onnxruntime")
    images, folded, path = torch.rand(1, 3, SIDE, SIDE), fold(model).cpu().eval(), folder / "model.onnx"
    for layer in folded.modules():
        if isinstance(layer, FoldedScaleConv2d):
            layer.backend = "direct"  # ONNX has no operators for the fast one
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(folded, (images,), path, dynamo=True, external_data=False, verbose=False)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: images.numpy()}
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(session.run(None, feed)[0]), folded(images), rtol=1e-4, atol=1e-4)
    return lambda: session.run(None, feed)


def processor_seconds(step: Step, count: int) -> float:
    """Seconds that the processor worked for this program in one step, over `count` of them."""
    began = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - began) / count


def run(output: Path, *, device: str = "auto", rounds: int = 15, limit_s: float = 110.0) -> Record:
    """Measure in turns, write what is known after every round; the last begins within `limit_s` processor seconds."""
    place = pick_device(device)
    torch.set_num_threads(1)
    result: Record = {
        "environment": {"command": f"python -m speed convert --device {place.type}", **environment(place)},
        "method": METHOD,
        "rounds": 0,
    }
    steps: dict[tuple[str, str], Step] = {}
    with TemporaryDirectory() as folder:
        for name, model in contenders().items():
            steps["inference", name] = runtime_step(model, Path(folder))
            steps["training", name] = training_step(model, place)
    counts = dict.fromkeys(steps, 1)
    for (work, name), step in steps.items():
        warm_up(step) if work == "training" and place.type == "cuda" else step()
        if work == "inference":  # a few milliseconds, and the processor's time may be counted in ticks
            counts[work, name] = max(1, round(0.1 / max(processor_seconds(step, 3), 1e-4)))
    best = dict.fromkeys(steps, math.inf)
    began = time.process_time()
    while result["rounds"] < rounds and time.process_time() - began < limit_s:
        for key, step in steps.items():
            on_gpu = key[0] == "training" and place.type == "cuda"
            took = seconds(step, counts[key], place) if on_gpu else processor_seconds(step, counts[key])
            best[key] = min(best[key], took)
        result["rounds"] += 1
        result["load"] = round(os.getloadavg()[0], 1)
        for work in ("training", "inference"):
            times = {name: 1000 * best[work, name] for kind, name in steps if kind == work}
            result[work] = {
                name: {"ms": float(f"{ms:.4g}"), "times_network": float(f"{ms / times['network']:.3g}")}
                for name, ms in times.items()
            }
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, (json.dumps(result, indent=1) + "\n").encode())
    return result
