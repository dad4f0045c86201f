"""What a basis may be told, and what it says of wrong arguments."""

import math

import numpy as np
import pytest

from scalesteer import LogRadialBasis


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sigma": 0}, ValueError, r"`sigma` must be positive \(got 0.0\)"),
        ({"sigma": -1}, ValueError, r"`sigma` must be positive \(got -1.0\)"),
        ({"sigma": math.nan}, ValueError, r"`sigma` must be finite \(got nan\)"),
        ({"sigma": math.inf}, ValueError, r"`sigma` must be finite \(got inf\)"),
        ({"sigma": "wide"}, TypeError, r"`sigma` must be a number \(got 'wide'\)"),
        ({"orders": ()}, ValueError, "`orders` must not be empty"),
        ({"orders": (1, math.nan)}, ValueError, r"`orders\[1\]` must be finite \(got nan\)"),
        ({"orders": (math.inf,)}, ValueError, r"`orders\[0\]` must be finite \(got inf\)"),
        ({"orders": 3}, TypeError, r"`orders` must be a sequence of numbers \(got 3\)"),
        ({"orders": (True,)}, TypeError, r"`orders\[0\]` must be a number \(got True\)"),
        ({"orientations": []}, ValueError, "`orientations` must not be empty"),
        ({"beta": math.inf}, ValueError, "`beta` must be finite"),
        ({"m": math.nan}, ValueError, "`m` must be finite"),
        ({"m": 2, "sampling": "area"}, ValueError, r"`m` must be below 2 with sampling='area' \(got 2.0\)"),
        ({"sigma": 1e-4, "sampling": "area"}, ValueError, "`sigma` must be at least 0.001"),
        ({"centre": "right", "sampling": "area"}, ValueError, "applies to sampling='point' without `core` only"),
        ({"centre": "up", "core": 1.0}, ValueError, "applies to sampling='point' without `core` only"),
        ({"core": -1}, ValueError, r"`core` must not be negative \(got -1.0\)"),
        ({"core": 0.01}, ValueError, r"`core` must be 0 or at least 0.05 pixels.*\(got core=0.01"),
        ({"core": 1, "sigma": 0.01}, ValueError, r"`sigma` at least 0.02 \(got core=1.0, sigma=0.01\)"),
        ({"core": math.nan}, ValueError, "`core` must be finite"),
        ({"support": "averaged"}, ValueError, r"support='averaged' needs sampling='area' \(got 'point'\)"),
        ({"lobes": "one"}, ValueError, r"`lobes` must be one of 'sum', 'max', 'single' \(got 'one'\)"),
        (
            {"sampling": "areas"},
            ValueError,
            r"`sampling` must be one of 'point', 'area' \(got 'areas'\). Did you mean 'area'",
        ),
        ({"gain": 1}, TypeError, "`gain` must be True or False"),
        ({"window": 2}, ValueError, "`window` must be at least 3"),
    ],
)
def test_wrong_basis_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        LogRadialBasis(**arguments)


def test_unknown_preset_names_the_valid_ones():
    with pytest.raises(ValueError, match=r"'released-code', 'smooth' \(got 'papers'\). Did you mean 'paper'\?"):
        LogRadialBasis.preset("papers")


def test_a_largest_window_of_one_pixel_is_refused():
    with pytest.raises(ValueError, match=r"the largest window must be at least 3 for this basis \(got 1\)"):
        LogRadialBasis.preset("released-code").resolve(1)


def test_numpy_values_are_python_values():
    basis = LogRadialBasis(orders=np.array([0.5, 1, 2]), sigma=np.float32(0.25))
    assert basis == LogRadialBasis(sigma=0.25)
    assert hash(basis) == hash(LogRadialBasis(sigma=0.25))


def test_later_changes_of_the_callers_list_change_nothing():
    orders = [0.5, 1.0]
    basis = LogRadialBasis(orders=orders)
    orders.append(9.0)
    assert basis.orders == (0.5, 1.0)
