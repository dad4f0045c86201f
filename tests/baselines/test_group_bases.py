"""The compared bases of group convolutions: Hermite functions by their formula, fitted ones by what they minimise."""

import math

import numpy as np
import pytest
import torch

from scalesteer import ScaleGroupConv2d
from scalesteer.baselines import FittedBasis, HermiteBasis
from scalesteer.baselines.fitted import SCALES, WIDTHS
from scalesteer.testing import equivariance_error


def hermite(n, t):
    """The physicists' polynomial, by its three-term recurrence, in plain Python."""
    before, now = 0.0, 1.0
    for k in range(n):
        before, now = now, 2 * t * now - 2 * k * before
    return now


@pytest.mark.parametrize("scale", [1.0, 1.5, 2.0])
def test_hermite_functions_are_the_dilated_published_ones(scale):
    basis = HermiteBasis(orders=5, width=0.3)
    values, sigma = basis.sample(7, scale), 0.3 * 3.5
    half = values.shape[-1] // 2
    assert values.shape[:2] == (5, 5)
    assert half == math.ceil(3.5 * scale - 0.5)
    for n, m, row, column in ((0, 0, half, half), (1, 0, 2, 4), (3, 2, 1, 5), (4, 4, 3, 3), (2, 4, 6, 1)):
        x, y = (column - half) / (scale * sigma), (half - row) / (scale * sigma)
        norm = math.sqrt(2.0 ** (n + m) * math.factorial(n) * math.factorial(m) * math.pi)
        expected = hermite(n, x) * hermite(m, y) * math.exp(-(x**2 + y**2) / 2) / norm / scale**2
        assert values[n, m, row, column] == pytest.approx(expected, abs=1e-14)


def test_hermite_functions_are_orthonormal_times_sigma():
    basis = HermiteBasis(orders=4, width=0.2)
    flat = basis.sample(41, 1.0).reshape(16, -1)
    np.testing.assert_allclose(flat @ flat.T, np.eye(16) * (0.2 * 20.5) ** 2, atol=1e-6)


def expected_error(enlarged, function, scale):
    """E (sum enlarged(v) f(v / scale) - sum function(u) f(u))^2 over images of blobs, by a double loop."""
    taps = []
    for weight, zoom in ((enlarged, scale), (-function, 1.0)):
        half = weight.shape[-1] // 2
        taps += [
            (value, (j - half) / zoom, (half - i) / zoom) for i, row in enumerate(weight) for j, value in enumerate(row)
        ]
    value, x, y = np.array(taps).T
    squared = (x[:, None] - x) ** 2 + (y[:, None] - y) ** 2
    return float(value @ np.mean([np.exp(-squared / (4 * w * w)) for w in WIDTHS], axis=0) @ value)


def test_fitted_functions_are_those_of_least_error():
    ridge = 1e-6
    basis = FittedBasis(8, ridge=ridge)
    first, enlarged = basis.sample(5, 1.0), basis.sample(5, 1.5)  # of scale 1 fitted too, up to what the ridge takes
    for i, (function, large) in enumerate(zip(first, enlarged, strict=True)):

        def error(change, large=large, function=function):
            return expected_error(large + change, function, 1.5) + ridge * ((large + change) ** 2).sum()

        assert error(0) < 0.01 * error(-large)
        for direction in np.delete(enlarged, i, axis=0)[:3]:  # a parabola along it, whose lowest point is here
            above, here, below = error(direction), error(0), error(-direction)
            assert abs((above - below) / (2 * (above + below - 2 * here))) < 1e-4


def test_fitted_functions_come_in_the_order_of_their_errors():
    every = FittedBasis(25, ridge=1e-3)
    first, at = every.sample(5, 1.0), {scale: every.sample(5, scale) for scale in SCALES}
    shares = []
    for i, function in enumerate(first):
        errors = [expected_error(at[scale][i], function, scale) for scale in SCALES]
        shares.append(sum(errors) / expected_error(0 * at[2.0][i], function, 2.0))
    assert shares[0] < 1e-3
    assert np.mean(shares[:8]) < 0.1 * np.mean(shares[-8:])
    np.testing.assert_array_equal(FittedBasis(8, ridge=1e-3).sample(5, 1.0), first[:8])


def test_one_layer_of_fitted_functions_misses_half_a_percent_as_disco_does():
    layer = ScaleGroupConv2d(1, 16, padding="same", scales=(1.0, 2**0.5), basis=FittedBasis(16))
    assert equivariance_error(layer, 2**0.5, channels=1, steps=1, size=65) < 0.006


@pytest.mark.parametrize("basis", [HermiteBasis(), FittedBasis()], ids=repr)
def test_layers_of_compared_bases_learn_and_fold(basis):
    layer = ScaleGroupConv2d(2, 3, padding="same", basis=basis, reach=2)
    x = torch.randn(2, 2, 4, 9, 9)
    layer(x).square().sum().backward()
    assert layer.coefficients.grad.abs().min() > 0
    assert layer.to(memory_format=torch.channels_last).double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: HermiteBasis(0), "`orders` must be at least 1"),
        (lambda: HermiteBasis(width=0.0), "`width` must be positive"),
        (lambda: FittedBasis(0), "`count` must be at least 1"),
        (lambda: FittedBasis(ridge=0.0), "`ridge` must be above 0 and below 1"),
        (lambda: FittedBasis().sample(7, 6.0), r"at most 41 pixels \(scale 6 with kernel_size=7 has 43\)"),
        (lambda: FittedBasis(10).sample(3, 1.0), r"`count` must be at most 9, the pixels of the window \(got 10\)"),
    ],
)
def test_wrong_arguments_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()
