"""The filters that the page steers: the numbers are those of the library, and the fitted ones the nearest there are."""

import base64
import math

import numpy as np
import pytest
import torch

import scalesteer
from scalesteer import harmonics
from scalesteer.app.demo import samples
from scalesteer.app.demo.filters import filters, fit, is_steered
from scalesteer.basis import LogRadialBasis
from scalesteer.harmonics import PAPER_SCALES


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return scalesteer.create_model("ss-cnn").eval()


@pytest.fixture(scope="module")
def told(model):
    return filters(model, "mine")


def as_complex(told, name):
    pairs = np.array(told["coefficients"].get(name, told["coefficients"]["paper"]))
    return pairs[..., 0] + 1j * pairs[..., 1]  # (O, K, J)


def steer(told, name, x, y, scale):
    """The filters of a family at points, from the numbers alone, by Eq. 1 and 3 written out: `(O, P)`."""
    preset = told["presets"][name]
    r, phi = np.hypot(np.hypot(x, y), preset["core"]), np.arctan2(y, x)
    shown = np.zeros((len(told["coefficients"]["paper"]), len(x)))
    for i, k in enumerate(preset["orders"]):
        radial = r ** -preset["m"] * np.exp(1j * (k * np.log(r) + preset["beta"]))
        factor = scale ** (preset["m"] - 2) * np.exp(-1j * k * math.log(scale))
        for j, direction in enumerate(preset["orientations"]):
            if preset["core"] > 0:
                turn = np.hypot(x, y) / r
                waves = [a * turn**n * np.cos(n * (phi - direction)) for n, a in enumerate(preset["series"])]
                angular = np.sum(waves, 0)
            else:
                away = [np.abs((phi - direction + t + math.pi) % (2 * math.pi) - math.pi) for t in (0, math.pi)]
                angular = sum(np.exp(-(d**2) / (2 * preset["sigma"] ** 2)) for d in away)
            shown += np.outer((as_complex(told, name)[:, i, j] * factor).real, (radial * angular).real)
            shown -= np.outer((as_complex(told, name)[:, i, j] * factor).imag, (radial * angular).imag)
    return shown


def test_eq_3_with_these_numbers_gives_the_filters_of_the_layer(model, told):
    assert told["network"] == "mine"
    assert told["kernel_size"] == 7
    assert told["scales"] == list(PAPER_SCALES)
    for scale, windows in zip(PAPER_SCALES, model.first.filters(), strict=True):
        n = windows.shape[-1]
        x, y = (c.ravel() for c in harmonics.grid(n))
        inside = (np.hypot(x, y) <= 3.5 * scale) & (np.hypot(x, y) > 0)  # at the centre Eq. 1 has no value
        drawn = windows[:, 0].detach().double().flatten(1).numpy()
        assert (
            np.abs(steer(told, "paper", x, y, scale)[:, inside] - drawn[:, inside]).max() < 1e-6 * np.abs(drawn).max()
        )


def test_the_table_holds_the_averages_over_pixels(told):
    table, n = told["table"], told["table"]["side"]
    values = np.frombuffer(base64.b64decode(table["values"]), "<f4").reshape(3, 8, n, n, 2).astype(float)
    assert n == 25
    basis = LogRadialBasis.preset("area")
    for scale in PAPER_SCALES:
        size = harmonics.window_size(7, scale)
        inner = values[:, :, (n - size) // 2 : (n + size) // 2, (n - size) // 2 : (n + size) // 2]
        steered = (inner[..., 0] + 1j * inner[..., 1]) * harmonics.steering_factors(basis, scale)[:, None, None, None]
        steered = steered * harmonics.support(basis, 7, scale)
        expected = harmonics.steered_basis(basis, 7, scale)
        np.testing.assert_allclose(np.stack([steered.real, -steered.imag], 2), expected, atol=1e-6)


def test_fitted_filters_are_near_those_that_they_stand_for_and_no_others_are_nearer(told):
    ticks = (np.arange(29) - 14) / 4
    x, y = (c.ravel() for c in np.meshgrid(ticks, ticks))
    inside = (np.hypot(x, y) < 3.3) & (np.hypot(x, y) > 0.5)  # not the singular centre, nor the averaged edge
    x, y = x[inside], y[inside]
    wanted, found = steer(told, "paper", x, y, 1.0), steer(told, "smooth", x, y, 1.0)
    agreement = [np.corrcoef(a, b)[0, 1] for a, b in zip(wanted, found, strict=True)]
    assert min(agreement) > 0.5
    own = as_complex(told, "smooth")
    basis = LogRadialBasis.preset("smooth"), LogRadialBasis.preset("area")
    shown, target = (
        harmonics.steered_basis(one, 7, 4.0).reshape(-1, *sides)
        for one, sides in zip(basis, ((31 * 31,), (29 * 29,)), strict=True)
    )
    side = math.isqrt(shown.shape[1])
    border = (side - 29) // 2
    target = np.pad(target.reshape(-1, 29, 29), ((0, 0), (border,) * 2, (border,) * 2)).reshape(len(target), -1)
    area = np.array(told["coefficients"]["paper"]).reshape(30, -1) @ target
    flat = np.stack([own.real, own.imag], -1).reshape(30, -1)
    rest = area - flat @ shown
    assert np.abs(rest @ shown.T).max() < 1e-6 * np.abs(area @ shown.T).max()  # nothing of them is left that these have


def test_a_fit_to_the_same_functions_gives_the_same_filters():
    basis = LogRadialBasis.preset("smooth")
    coefficients = np.random.default_rng(0).normal(size=(4, *basis.shape, 2))
    found = fit(coefficients, basis, basis, 7).reshape(4, -1)
    functions = harmonics.steered_basis(basis, 7, 2.0)
    functions = functions.reshape(found.shape[1], -1)
    np.testing.assert_allclose(found @ functions, coefficients.reshape(4, -1) @ functions, atol=1e-9)


def test_the_strongest_filter_answers_most(model, told):
    assert sorted(told["strongest"]) == list(range(30))
    digits = torch.from_numpy(samples.pixels("digits")).float()[:, None]
    layer = scalesteer.ScaleSteerableConv2d(1, 30, 7, padding=3, basis="area", scales=(1.0,), bias=False)
    layer.load_state_dict({"coefficients": model.first.coefficients})
    (windows,) = layer.filters()
    with torch.no_grad():
        energy = (layer(digits) / windows.norm(dim=(2, 3)).view(30, 1, 1)).square().mean((0, 2, 3))
    assert told["strongest"] == energy.argsort(descending=True).tolist()


def test_the_digits_are_ten_of_their_classes_and_large(told):
    assert [digit["label"] for digit in told["digits"]] == list(range(10))
    for digit in told["digits"]:
        pixels = np.frombuffer(base64.b64decode(digit["pixels"]), np.uint8).reshape(digit["side"], digit["side"])
        rows = np.flatnonzero((pixels > 64).any(1))
        assert digit["side"] == 28
        assert rows[-1] - rows[0] + 1 >= 19


def test_other_families_are_fitted_to_the_papers_functions():
    torch.manual_seed(1)
    model = scalesteer.create_model("steered-cnn", in_chans=3, widths=(3, 4, 4))
    assert is_steered(model)
    told = filters(model, "mine")
    assert np.array(told["coefficients"]["paper"]).shape == (3, 3, 8, 2)
    assert np.array(told["coefficients"]["smooth"]).shape == (3, 2, 8, 2)
    assert not is_steered(scalesteer.create_model("pooled-cnn"))
