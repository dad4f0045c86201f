"""The numbers of Theorem 1, against reference functions and what theory says."""

import math

import numpy as np
import pytest

from paper import theorem
from tests import test_theorem as reference


@pytest.mark.parametrize("broken", [{}, {"sign": 1}, {"power": 0.0}])
def test_deviations_on_grids_are_those_of_the_reference_functions(broken):
    ours = theorem.grid_deviations(2.0, 1.5, [1 / 2, 1 / 8], **broken)
    assert ours == pytest.approx(reference.grid_deviations(2.0, 1.5, [1 / 2, 1 / 8], **broken), rel=1e-9)


def test_integrals_of_the_theorem_are_those_of_the_reference_functions():
    ours = theorem.polar_integral(1.0, 3.5, 1.5, nodes=60, turns=120)
    theirs = reference.integral(lambda x, y: reference.image(1.5 * x, 1.5 * y), 1.0, 3.5, nodes=60, turns=120)
    assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("m", [0.5, 1.0])
def test_the_response_of_an_order_repeats_after_its_period(m):
    orders = (0.5, 1.0, 2.0, 4.0)
    responses, periods = theorem.sensitivity(orders, np.exp(np.linspace(0, math.pi / 2, 5)).tolist(), m)
    for order, period in periods.items():
        assert period == pytest.approx(math.exp(2 * math.pi / order), rel=1e-3)
    assert np.abs(responses) == pytest.approx(1.0, rel=1e-3)
    # e^(pi/2) is the whole period of order 4, half of that of order 2 and a quarter of that of order 1.
    turned = responses[:, -1] / responses[:, 0]
    assert turned[3] == pytest.approx(1, abs=1e-3)
    assert turned[2] == pytest.approx(-1, abs=1e-3)
    assert turned[1] == pytest.approx(-1j, abs=1e-3)


@pytest.mark.parametrize("scale", [0.8, 1.0, 17 / 7, 4.0])
def test_steering_is_enlarging_but_at_the_centre(scale):
    assert theorem.steering_deviation(scale, seed=1) < 1e-14


def test_steering_by_another_phase_is_told(monkeypatch):
    factors = theorem.harmonics.steering_factors
    monkeypatch.setattr(theorem.harmonics, "steering_factors", lambda basis, scale: factors(basis, scale).conj())
    assert theorem.steering_deviation(1.5) > 0.1
