"""What docs/guide/maths.md states, as numbers: of Theorem 1, of grids of pixels, of fresh and of trained layers.

``python -m paper.measures`` measures again what that page and docs/data.md show, and keeps it in results/; it trains a
few small networks, two to four minutes on one core.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paper import RESULTS, datasets, recorded
from paper.markdown import percent_table, table, view
from paper.theorem import (
    SENSITIVITY_ORDERS,
    THEOREM_ORDERS,
    THEOREM_SCALES,
    grid_deviations,
    sensitivity,
    steering_deviation,
    theorem_deviation,
)
from scalesteer import harmonics
from scalesteer.datasets import fetch
from scalesteer.files import write_atomically
from scalesteer.harmonics import PAPER_SCALES, WIDE_SCALES, LogRadialBasis
from scalesteer.nn import ScaleSteerableConv2d
from scalesteer.testing import Image, equivariance_error, steering_error

# On grids of pixels

UPSAMPLING = (1, 2, 4, 8)


def steering_errors(preset: str) -> dict[str, float]:
    """Mean steering error over ten draws of 64 filters with complex-normal coefficients, by the two windows."""
    errors = {}
    for size, scales in ((7, PAPER_SCALES), (17, (1.0, 33 / 17))):
        draws = []
        for seed in range(10):
            layer = ScaleSteerableConv2d(1, 64, size, scales=scales, basis=preset)
            with torch.no_grad():
                layer.coefficients.normal_(generator=torch.Generator().manual_seed(seed))
            draws.append(steering_error(layer))
        for window, values in zip(layer.sizes[1:], np.array(draws).T, strict=True):
            errors[f"{size} -> {window}"] = round(float(values.mean()), 4)
    return errors


def ranks(basis: LogRadialBasis) -> dict[str, int]:
    """The rank of the real functions on the window of 7 x 7, by the relative tolerance of the singular values."""
    flat = harmonics.steered_basis(basis, 7, 1.0).reshape(-1, 49)
    values = np.linalg.svd(flat, compute_uv=False)
    return {f"{t:g}": int((values > t * values[0]).sum()) for t in (1e-1, 1e-2, 1e-3, 1e-6)}


SMOOTH = LogRadialBasis.preset("smooth")
GRID_STEPS = {
    "`paper`": LogRadialBasis.preset("paper"),
    "`area`": LogRadialBasis.preset("area"),
    "`area`, edge averaged": replace(LogRadialBasis.preset("area"), support="averaged"),
    "`smooth`, no core": replace(SMOOTH, core=0.0),
    "`smooth`": SMOOTH,
}
"""From the paper's sampling to ours, one step at a time."""
GRID_SCALES = {9: 9 / 7, 11: 11 / 7, 13: 13 / 7, 17: 17 / 7, 28: 4.0}  # by the diameter of the disc
NEIGHBOURS = {
    "`smooth`: orders 0.5, 2": SMOOTH,
    "orders 1, 3": replace(SMOOTH, orders=(1.0, 3.0)),
    "orders 0.5, 1, 2": replace(SMOOTH, orders=(0.5, 1.0, 2.0)),
    "order 1": replace(SMOOTH, orders=(1.0,)),
    "order 2": replace(SMOOTH, orders=(2.0,)),
    "order 1, 6 orientations, σ = π/5": replace(
        SMOOTH, orders=(1.0,), sigma=math.pi / 5, orientations=tuple(j * math.pi / 3 for j in range(1, 7))
    ),
    "12 orientations": replace(SMOOTH, orientations=tuple(j * math.pi / 6 for j in range(1, 13))),
    "core 0.5": replace(SMOOTH, core=0.5),
    "core 1": replace(SMOOTH, core=1.0),
    "m = 0": replace(SMOOTH, m=0.0),
}
"""Choices that were weighed for the preset `smooth`: what is not named is as in the preset."""


BLOBS = ((0.7, 1.0), (1.0, 2.0), (2.0, 4.0))
"""Standard deviations of blobs in pixels, on the window of 7: about as small as a grid can show, up to half of it."""
BLOB_DRAWS = 5  # of images and of filters


def small_blobs(images: int = 64, widths: tuple[float, float] = (1.0, 2.0), seed: int = 0) -> Image:
    """Images of three blobs of such widths on a window of 7 pixels, `(..., h, w)` -> `(images, h, w)`."""
    draw = torch.rand((4, images, 3, 1, 1), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    right, up = 7 * (draw[:2] - 0.5)
    width, height = widths[0] + (widths[1] - widths[0]) * draw[2], 2 * draw[3] - 1
    return lambda x, y: (height * torch.exp(-((x - right) ** 2 + (y - up) ** 2) / (2 * width**2))).sum(1)


def grid_errors(basis: LogRadialBasis, widths: tuple[float, float] = (1.0, 2.0), seed: int = 0) -> dict[str, float]:
    """How far responses at larger scales to enlarged blobs are from those at scale 1, by the window.

    64 filters with complex-normal coefficients, 64 images; the norm of the differences over the norm at scale 1.
    """
    coefficients = np.random.default_rng(1 + seed).standard_normal((64, 2 * math.prod(basis.shape)))
    image, responses = small_blobs(widths=widths, seed=seed), []
    for scale in (1.0, *GRID_SCALES.values()):
        functions = harmonics.steered_basis(basis, 7, scale)
        x, y = (torch.from_numpy(a.copy()) / scale for a in harmonics.grid(functions.shape[-1]))
        responses.append(coefficients @ functions.reshape(coefficients.shape[1], -1) @ image(x, y).flatten(1).numpy().T)
    first, *others = responses
    errors = [float(np.linalg.norm(r - first) / np.linalg.norm(first)) for r in others]
    return {f"7 -> {size}": round(error, 4) for size, error in zip(GRID_SCALES, errors, strict=True)}


def errors_by_blob(preset: str) -> dict[str, list[float]]:
    """The smallest and the largest of these errors over the windows, by the width of blobs; means of a few draws."""
    basis, found = LogRadialBasis.preset(preset), {}
    for widths in BLOBS:
        draws = [list(grid_errors(basis, widths, seed).values()) for seed in range(BLOB_DRAWS)]
        means = np.mean(draws, axis=0)
        found["{:g} to {:g}".format(*widths)] = [round(float(end), 4) for end in (means.min(), means.max())]
    return found


# Equivariance of layers

SET_UPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "`paper`, the paper's scales": ("paper", PAPER_SCALES),
    "`area`, the paper's scales": ("area", PAPER_SCALES),
    "`smooth`, the paper's scales": ("smooth", PAPER_SCALES),
    "`smooth`, 8 scales from 0.35 to 4": ("smooth", tuple(2 ** (i / 2) for i in range(-3, 5))),
    "`smooth`, wide scales": ("smooth", WIDE_SCALES),
}
MOVES = (1.2, 1.5, 1.8)
PLAIN = "`nn.Conv2d` with filters of sum zero"


class SumZero(nn.Module):
    """Keeps the sum of every filter at zero: takes from the weights their part along `sums`, what each of them adds."""

    def __init__(self, sums: Tensor) -> None:
        super().__init__()
        self.register_buffer("direction", sums / sums.norm(), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        direction = self.get_buffer("direction")
        along = (weight * direction).flatten(2).sum(2)  # (C_out, C_in)
        return weight - along.view(*along.shape, *[1] * direction.ndim) * direction


def sum_zero_conv() -> nn.Conv2d:
    """A plain convolution whose filters sum to zero, in training too; scale-steerable ones start so."""
    conv = nn.Conv2d(1, 16, 7, padding="same", bias=False)
    nn.utils.parametrize.register_parametrization(conv, "weight", SumZero(torch.ones(7, 7)))
    return conv


def sum_zero_steered() -> ScaleSteerableConv2d:
    """The default layer, its filters kept at a sum of zero; an averaged edge makes the sum the same at every scale."""
    layer = ScaleSteerableConv2d(1, 16, padding="same", bias=False)
    sums = torch.from_numpy(harmonics.steered_basis(layer.basis, 7, 1.0)).sum((-2, -1)).float()  # (K, J, 2)
    nn.utils.parametrize.register_parametrization(layer, "coefficients", SumZero(sums))
    return layer


def equivariance_errors() -> dict[str, dict[str, Any]]:
    """Of fresh layers of 16 filters, in the mean over a few draws: number of scales, taps, and the meter's error."""

    def measured(make: Callable[[], nn.Module], draws: int) -> list[float]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            errors = [[equivariance_error(layer, s) for s in MOVES] for layer in (make() for _ in range(draws))]
        return [round(float(e), 3) for e in np.mean(errors, axis=0)]

    found = {PLAIN: {"scales": 1, "taps": 49, "errors": measured(sum_zero_conv, 8)}}
    for name, (preset, scales) in SET_UPS.items():
        make = partial(ScaleSteerableConv2d, 1, 16, 7, padding="same", basis=preset, scales=scales)
        taps = sum(n * n for n in make().sizes)
        found[name] = {"scales": len(scales), "taps": taps, "errors": measured(make, 2)}
    return found


STEERED = "`ScaleSteerableConv2d`"
FIRST_LAYERS: dict[str, Callable[[], nn.Module]] = {
    PLAIN: sum_zero_conv,
    f"{STEERED} with filters of sum zero": sum_zero_steered,
    "`nn.Conv2d`": partial(nn.Conv2d, 1, 16, 7, padding="same", bias=False),
    STEERED: partial(ScaleSteerableConv2d, 1, 16, padding="same", bias=False),
}


def measure_trained(images: int = 6000, epochs: int = 3) -> dict[str, Any]:
    """First layers of small networks that learn MNIST's digits: the meter's errors before and after.

    The layers behind are the same: 3 x 3 convolutions with batch normalisation, and a maximum over all pixels.
    """
    pool, batch = fetch("mnist"), 100
    order = torch.randperm(len(pool.images), generator=torch.Generator().manual_seed(0))[: images + 3000]
    digits = torch.from_numpy(pool.images)[order, None] / 255
    labels = torch.from_numpy(pool.labels)[order].long()
    found: dict[str, Any] = {"images": images, "epochs": epochs, "layers": {}}
    for name, make in FIRST_LAYERS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers: list[nn.Module] = [first := make(), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
            for fan_in, fan_out in ((16, 32), (32, 64)):
                layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU()]
                layers.append(nn.MaxPool2d(2) if fan_out == 32 else nn.AdaptiveMaxPool2d(1))
            net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))
            errors = {"fresh": [round(equivariance_error(first, s), 3) for s in MOVES]}
            optimizer = torch.optim.AdamW(net.parameters())
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=epochs * (images // batch))
            for _ in range(epochs):
                for chosen in torch.randperm(images).split(batch):
                    F.cross_entropy(net(digits[chosen]), labels[chosen]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
        net.eval()
        with torch.no_grad():
            answers = torch.cat([net(part).argmax(1) for part in digits[images:].split(500)])
        errors["trained"] = [round(equivariance_error(first, s), 3) for s in MOVES]
        found["layers"][name] = {**errors, "digits": round(float((answers != labels[images:]).float().mean()), 4)}
    return found


def measure_guide() -> dict[str, Any]:
    """Every number of docs/guide/maths.md."""
    worst = max(theorem_deviation(k, s) for k in THEOREM_ORDERS for s in THEOREM_SCALES)
    steered = max(steering_deviation(s, seed) for s in PAPER_SCALES for seed in range(10))
    pitches = [1 / u for u in UPSAMPLING]
    responses, periods = sensitivity(SENSITIVITY_ORDERS, np.geomspace(PAPER_SCALES[0], PAPER_SCALES[-1], 50).tolist())
    turns = np.degrees(np.ptp(np.unwrap(np.angle(responses)), axis=1))
    return {
        "command": "python -m paper.measures",
        "core": SMOOTH.core,
        "wide_scales": ", ".join(f"{s:.2g}" for s in WIDE_SCALES),
        "steering": {preset: steering_errors(preset) for preset in ("paper", "area", "smooth")},
        "grid": {name: grid_errors(basis) for name, basis in GRID_STEPS.items()},
        "blobs": {preset: errors_by_blob(preset) for preset in ("paper", "area", "smooth")},
        "neighbours": {
            name: {"functions": 2 * math.prod(basis.shape), "rank": ranks(basis), "grid": grid_errors(basis)}
            for name, basis in NEIGHBOURS.items()
        },
        "footnote": {
            str(k): [round(e, 4) for e in grid_deviations(k, 17 / 7, pitches)] for k in (*THEOREM_ORDERS, 4.0)
        },
        "rank": {preset: ranks(LogRadialBasis.preset(preset)) for preset in ("paper", "area", "smooth")},
        "equivariance": equivariance_errors(),
        "theorem": {"scales": THEOREM_SCALES, "largest": float(f"{worst:.1e}")},
        "eq3": {"scales": [round(s, 4) for s in PAPER_SCALES], "largest": float(f"{steered:.1e}")},
        "sensitivity": {
            str(k): {"turn_degrees": round(float(turn), 1), "period": round(periods[k], 3)}
            for k, turn in zip(SENSITIVITY_ORDERS, turns, strict=True)
        },
    }


# Views


@view
def guide_numbers() -> dict[str, Any]:
    """The guide's numbers as they were measured."""
    return dict(recorded("guide/maths.json"))


@view
def trained_numbers() -> dict[str, Any]:
    """What was measured of trained layers."""
    return dict(recorded("guide/trained.json"))


def _windows(errors: dict[str, float]) -> list[str]:
    return ["window", *(window.replace("->", "→") for window in errors)]


@view
def steering_of_blobs(name: str) -> str:
    """The smallest and the largest steering error of small blobs over the windows, in %, of one of `GRID_STEPS`."""
    errors = [100 * error for error in guide_numbers()["grid"][name].values()]
    return f"{min(errors):.1f} to {max(errors):.1f}"


@view
def guide_equivariance() -> str:
    """How far fresh layers are from scale equivariance, and what that costs."""
    head = ("fresh layer, kernel 7", "scales", "taps", *(f"enlarged by {s:g}" for s in MOVES))
    rows = [
        (name, row["scales"], row["taps"], *(f"{error:.2f}" for error in row["errors"]))
        for name, row in guide_numbers()["equivariance"].items()
    ]
    return table([head, *rows])


@view
def equivariance_share(when: str) -> str:
    """The error of the default layer, fresh or trained, as a share of that of a plain one, over the enlargements."""
    if when == "trained":
        layers = trained_numbers()["layers"]
        ours, plain = layers[STEERED]["trained"], layers[PLAIN]["trained"]
    else:
        layers = guide_numbers()["equivariance"]
        ours, plain = layers["`smooth`, wide scales"]["errors"], layers[PLAIN]["errors"]
    shares = np.divide(ours, plain)
    return f"{shares.min():.2f} to {shares.max():.2f}"


@view
def footnote_span(upsampling: int) -> str:
    """The deviation from Theorem 1 on pixel grids with an upsampling, from the lowest order to the highest."""
    rows = guide_numbers()["footnote"].values()
    return _percents(sorted(row[UPSAMPLING.index(upsampling)] for row in rows)[:: len(rows) - 1])


@view
def guide_steering() -> str:
    """The steering error, by window, of point and area sampling."""
    steering = guide_numbers()["steering"]
    names = {"paper": "point (`paper`)", "area": "area (`area`)", "smooth": "`smooth`, below"}
    return percent_table(_windows(steering["paper"]), {text: steering[name].values() for name, text in names.items()})


@view
def steering_span(preset: str) -> str:
    """The smallest and the largest steering error of a window of 7 pixels, over all windows and widths of blobs."""
    errors = [end for ends in guide_numbers()["blobs"][preset].values() for end in ends]
    return _percents([min(errors), max(errors)])


def _percents(ends: list[float]) -> str:
    low, high = (f"{100 * end:.{0 if end >= 0.0995 else 1}f}" for end in ends)
    return f"{low} to {high} %"


def main() -> None:
    """Measure again, and draw the sheets of images that docs/data.md shows."""
    measured = {"guide/maths": measure_guide, "guide/trained": measure_trained, "data/measured": datasets.measure_data}
    for name, measure in measured.items():
        write_atomically(RESULTS / f"{name}.json", (json.dumps(measure(), indent=1) + "\n").encode())
    datasets.draw_sheets()


if __name__ == "__main__":
    main()
