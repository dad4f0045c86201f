"""The start values of the layer: what they keep through layers, how they are drawn, and how fast."""

import dataclasses
import math
import time

import numpy as np
import pytest
import torch
from torch import nn

from scalesteer import PAPER_SCALES, LogRadialBasis, ScaleSteerableConv2d, harmonics, initialisation

BASES = {
    "paper": (LogRadialBasis(), 7, PAPER_SCALES),
    "area": (LogRadialBasis.preset("area"), 7, PAPER_SCALES),
    "released-code": (LogRadialBasis.preset("released-code"), 7, PAPER_SCALES),
    "one scale": (LogRadialBasis(), 7, (1.0,)),
    "area, kernel 5, one scale": (LogRadialBasis.preset("area"), 5, (1.0,)),
    "area, smaller and larger": (LogRadialBasis.preset("area"), 7, (0.5, 0.71, 1.0, 1.41, 2.0)),
    "m = 0": (LogRadialBasis(m=0.0), 7, PAPER_SCALES),
    "m = 2": (LogRadialBasis(m=2.0), 7, PAPER_SCALES),
    "area, m = 1.5": (LogRadialBasis(m=1.5, sampling="area"), 7, PAPER_SCALES),
    "four orientations": (LogRadialBasis(orientations=(0, 0.785, 1.571, 2.356), sigma=0.39), 7, PAPER_SCALES),
    "four orders, kernel 9": (LogRadialBasis(orders=(0.0, 1.0, 2.0, 4.0)), 9, (1.0, 1.5, 2.0)),
    "three scales, kernel 3": (LogRadialBasis.preset("area"), 3, (1.0, 5 / 3, 7 / 3)),
    "smooth": (LogRadialBasis.preset("smooth"), 7, PAPER_SCALES),
    "smooth, its own scales": (LogRadialBasis.preset("smooth"), 7, None),
    "smooth, its own scales, kernel 3": (LogRadialBasis.preset("smooth"), 3, None),
    "smooth, one order": (dataclasses.replace(LogRadialBasis.preset("smooth"), orders=(1.0,)), 7, (0.5, 1.0, 2.0)),
}


@pytest.mark.parametrize("name", BASES)
def test_initialisation_keeps_the_second_moment_through_six_layers(name):
    basis, kernel_size, scales = BASES[name]
    x = torch.randn(2, 32, 40, 40)
    with torch.no_grad():
        for _ in range(6):
            x = ScaleSteerableConv2d(32, 32, kernel_size, padding="same", scales=scales, basis=basis)(x).relu()
    assert 0.5 < x.square().mean().item() < 2


@pytest.mark.parametrize(
    ("basis", "kernel_size", "scales"),
    [("paper", 7, PAPER_SCALES), ("area", 3, (1.0, 5 / 3)), ("smooth", 7, (1.0, 1.4, 2.0))],
)
def test_initialisation_keeps_the_second_moment_of_each_layer_on_average(basis, kernel_size, scales):
    """The simulation again, by the layers themselves and over six draws: within 7 % for one layer."""
    arguments = {"padding": "same", "padding_mode": "circular", "basis": basis, "scales": scales}
    growth = []
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(1, 16, 32, 32)
            for _ in range(6):
                x = ScaleSteerableConv2d(16, 16, kernel_size, **arguments)(x).relu()
            growth.append(math.log(x.square().mean()) / 6)
    assert abs(np.mean(growth)) < 0.07


def test_initial_coefficients_shrink_with_the_root_of_the_inputs_a_filter_has():
    one, many = (ScaleSteerableConv2d(*channels, groups=2) for channels in ((2, 800), (50, 32)))
    assert (one.coefficients.std() / many.coefficients.std()).item() == pytest.approx(5, rel=0.03)


def test_the_bias_starts_at_zero():
    layer = ScaleSteerableConv2d(1, 20)
    assert (layer.bias == 0).all()
    nn.init.normal_(layer.bias)
    layer.reset_parameters()
    assert (layer.bias == 0).all()


@pytest.mark.parametrize(("basis", "tolerance"), [("paper", 0.02), ("smooth", 1e-5)])
def test_initial_filters_do_not_see_a_flat_image(basis, tolerance):
    layer = ScaleSteerableConv2d(1, 20, basis=basis)
    for weight in layer.filters():
        assert (weight.sum((-1, -2)).abs() / weight.abs().sum((-1, -2))).max() < tolerance


def test_an_averaged_edge_leaves_one_condition_for_a_sum_of_zero_at_all_scales():
    mixing = initialisation.initial_mixing(LogRadialBasis.preset("smooth"), 7, PAPER_SCALES)
    assert np.linalg.matrix_rank(mixing) == len(mixing) - 1


def test_initialisation_of_a_basis_that_cannot_sum_to_zero_is_finite_and_not_zero():
    layer = ScaleSteerableConv2d(1, 20, basis=LogRadialBasis(orders=(0.0,), orientations=(0.0,)))
    assert layer.coefficients.isfinite().all()
    assert layer.filters()[0].abs().max() > 1e-3


def test_initialisation_draws_from_the_global_generator_once():
    torch.manual_seed(5)
    first = ScaleSteerableConv2d(2, 3).coefficients
    initialisation.initial_mixing.cache_clear()
    torch.manual_seed(5)
    assert torch.equal(ScaleSteerableConv2d(2, 3).coefficients, first)


@pytest.mark.parametrize(("name", "limit"), [("paper", 0.1), ("area", 0.1), ("released-code", 0.1), ("smooth", 0.6)])
def test_construction_is_fast_with_cold_caches(name, limit):
    basis = LogRadialBasis.preset(name)
    ScaleSteerableConv2d(1, 1)  # the first use of torch and numpy in the process
    seconds = []
    for _ in range(3):
        for cached in (initialisation.initial_mixing, harmonics.sample, harmonics.normalizers, harmonics.stacked_basis):
            cached.cache_clear()
        start = time.thread_time()  # one thread in tests; a wall clock would measure the other worker
        ScaleSteerableConv2d(64, 128, basis=basis)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < limit
