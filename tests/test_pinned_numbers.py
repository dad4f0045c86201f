"""The numbers of fifty layers, as they were recorded: outputs, winners and gradients must stay what they are.

Everything is drawn by numpy from fixed seeds, so that nothing depends on torch's generator. Of each tensor the file has
its norm and two random projections. `python tests/test_pinned_numbers.py` records them again: only where a change of
numbers is meant.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from scalesteer import ScaleSteerableConv2d
from scalesteer.harmonics import PRESETS

RECORD = Path(__file__).with_name("pinned_numbers.json")
# Times the norm of the tensor. In single precision another processor differs by up to 1.5e-6.
TOLERANCES = {"float32": 5e-6, "float64": 1e-12}
WIDE = (0.5, 1.0, 1.9, 3.1)

# Input and output channels, the image's size, and the arguments of the layer.
SETTINGS = [
    (3, 4, (14, 15), {"padding": 3}),
    (4, 5, (17, 16), {"padding": 3, "scales": WIDE}),
    (1, 6, (16, 18), {"padding": 3}),
    (1, 6, (16, 18), {"padding": 3, "basis": "paper"}),
    (3, 4, (14, 13), {"padding": 3, "basis": "paper"}),
    (3, 4, (14, 13), {"padding": "same", "basis": "area"}),
    (2, 4, (15, 14), {"padding": 3, "basis": "area"}),
    (3, 4, (14, 13), {"padding": 3, "basis": "released-code", "scales": (1.0, 1.4, 2.0)}),
    (5, 4, (12, 12), {"kernel_size": 3, "padding": 1, "scales": (1.0, 1.41, 2.0)}),
    (3, 4, (12, 12), {"kernel_size": 5, "padding": 2, "scales": (1.0, 2.6)}),
    (3, 4, (20, 17), {"kernel_size": 11, "padding": 5, "scales": (0.7, 1.0)}),
    (3, 4, (19, 18), {"padding": 0, "scales": WIDE}),
    (3, 4, (17, 19), {"padding": (1, 5), "stride": (2, 1), "scales": WIDE}),
    (1, 4, (17, 19), {"padding": 3, "stride": 2, "basis": "paper"}),
    (3, 4, (18, 17), {"padding": 6, "dilation": 2, "scales": (1.0, 1.5)}),
    (4, 6, (13, 14), {"padding": 3, "groups": 2, "scales": WIDE}),
    (4, 4, (13, 14), {"padding": 3, "groups": 4, "basis": "paper"}),
    (3, 4, (24, 23), {"padding": 3, "padding_mode": "reflect", "scales": WIDE}),
    (3, 4, (14, 15), {"padding": 3, "padding_mode": "replicate", "basis": "paper"}),
    (4, 4, (26, 23), {"padding": 3, "padding_mode": "circular", "groups": 2, "stride": 2, "basis": "area"}),
    (3, 4, (14, 15), {"padding": 3, "reduce": None, "scales": WIDE}),
    (2, 4, (14, 15), {"padding": 3, "reduce": None, "basis": "paper"}),
    (3, 4, (12, 96), {"kernel_size": 5, "padding": 2, "scales": (1.0, 2.6)}),  # cut into tiles
    (2, 4, (14, 15), {"padding": 3, "bias": False, "scales": (1.0,)}),
    (16, 16, (21, 20), {"padding": 3}),
]
# Each setting in both precisions, and by both backends.
PRECISIONS = tuple(TOLERANCES)
CASES = [
    (setting, backend, PRECISIONS[(number + turn) % 2])
    for number, setting in enumerate(SETTINGS)
    for turn, backend in enumerate(("direct", "fast"))
]


def draw(seed, *shape):
    return np.random.RandomState(seed).standard_normal(shape)  # its numbers are the same in every version of numpy


def measure(setting, backend, precision):
    """What a case gives: for each tensor its norm and its projections."""
    channels, out_channels, size, options = setting
    dtype = getattr(torch, precision)
    layer = ScaleSteerableConv2d(channels, out_channels, **options, backend=backend, dtype=dtype)
    image = draw(1, 3, channels, *size)
    image[1, :, size[0] // 3 :] = 0  # windows that see zeros only
    x = torch.tensor(image, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        layer.coefficients.copy_(torch.tensor(draw(2, *layer.coefficients.shape)))
        if layer.bias is not None:
            layer.bias.copy_(torch.tensor(draw(3, *layer.bias.shape)))
    found = {}
    if layer.reduce is None:
        y = layer(x)
    else:
        y, found["winners"] = layer(x, return_scales=True)
    inputs = {"image": x, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(y, list(inputs.values()), torch.tensor(draw(4, *y.shape), dtype=dtype))
    found = {"output": y.detach(), **found, **dict(zip(inputs, gradients, strict=True))}
    return {name: summary(tensor.double().numpy()) for name, tensor in found.items()}


def summary(values):
    return [float(np.linalg.norm(values)), *[float((values * draw(seed, *values.shape)).sum()) for seed in (5, 6)]]


def name(case):
    (channels, out_channels, size, options), backend, precision = case
    shown = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{channels} to {out_channels}, {size[0]} x {size[1]}, {shown}, {backend}, {precision}"


def test_there_are_fifty_layers_of_every_kind():
    assert len({name(case) for case in CASES}) == 50
    used = [options for _, _, _, options in SETTINGS]
    assert {options.get("basis", "smooth") for options in used} == set(PRESETS)
    assert {options.get("padding_mode", "zeros") for options in used} == {"zeros", "reflect", "replicate", "circular"}


@pytest.mark.filterwarnings("ignore:scales that are far apart share a window")
@pytest.mark.parametrize("case", CASES, ids=map(name, CASES))
def test_numbers_are_those_that_were_recorded(case):
    recorded, found = json.loads(RECORD.read_text())[name(case)], measure(*case)
    assert list(found) == list(recorded)
    for tensor, numbers in found.items():
        norm = recorded[tensor][0]
        difference = np.abs(np.subtract(numbers, recorded[tensor])).max()
        assert difference <= TOLERANCES[case[2]] * norm, f"{tensor}: {difference / norm:.2g} of its norm"


if __name__ == "__main__":
    lines = [f"{json.dumps(name(case))}: {json.dumps(measure(*case))}" for case in CASES]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
