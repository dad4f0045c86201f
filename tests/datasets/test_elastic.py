import json
import math
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalesteer.datasets import ELASTIC_ALPHAS, SplitSpec, distort, scale
from scalesteer.datasets.elastic import displacements
from scalesteer.datasets.streams import random_below, random_bits, random_uniform, stream_key

DIGESTS = json.loads((Path(__file__).parent / "digests.json").read_text())


@pytest.fixture(scope="module")
def digits(pools):
    return scale.build_split(pools["mnist"], SplitSpec(sizes=(10_000, 2_000, 2_000)))["test"].images


def splitmix64(state, count):
    """The generator as published, one number after the other, in Python integers."""
    numbers, mask = [], 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append(z ^ (z >> 31))
    return numbers


@given(key=st.integers(0, 2**64 - 1))
def test_stream_is_splitmix64(key):
    assert random_bits(key, np.arange(20)).tolist() == splitmix64(key, 20)


def test_streams_differ_by_every_word():
    keys = {stream_key(*words) for words in (("a", 1, 0), ("a", 0, 1), ("b", 0, 1), ("a", 11), ("a1", 1))}
    assert len(keys) == 5


def test_integers_and_reals_stay_in_range():
    index = np.arange(100_000)
    drawn = random_below(7, index, np.full(100_000, 10))
    assert np.abs(np.bincount(drawn, minlength=10) / 10_000 - 1).max() < 0.05
    reals = random_uniform(7, index, 0.3, 1.0)
    assert 0.3 < reals.min() < 0.3001 < 0.9999 < reals.max() < 1
    assert abs(reals.mean() - 0.65) < 0.002


def slow_field(index, height, width, alpha, sigma, seed):
    """The displacement of every pixel by direct summation in Python."""
    (key,) = random_bits(stream_key("elastic", seed), np.array([index])).tolist()
    bits = splitmix64(key, height * width // 2)
    noise = [((b >> shift & 0xFFFF) * 2 - 65535) / 65536 for b in bits for shift in (0, 16, 32, 48)]
    noise = np.array(noise).reshape(2, height, width)
    reach = int(4 * sigma + 0.5)
    kernel = np.array([math.exp(-0.5 * (d / sigma) ** 2) for d in range(-reach, reach + 1)])
    kernel /= kernel.sum()
    field = np.zeros((2, height, width))
    for y in range(height):
        for x in range(width):
            for v in range(max(0, y - reach), min(height, y + reach + 1)):
                for u in range(max(0, x - reach), min(width, x + reach + 1)):
                    field[:, y, x] += noise[:, v, u] * kernel[v - y + reach] * kernel[u - x + reach]
    return alpha * field


def slow_warp(image, field):
    height, width = image.shape
    out = np.zeros((height, width))
    for y in range(height):
        for x in range(width):
            down, right = y + field[0, y, x], x + field[1, y, x]
            for v in (math.floor(down), math.floor(down) + 1):
                for u in (math.floor(right), math.floor(right) + 1):
                    if 0 <= v < height and 0 <= u < width:
                        out[y, x] += image[v, u] * (1 - abs(down - v)) * (1 - abs(right - u))
    return out


@pytest.mark.parametrize(("alpha", "sigma", "width"), [(10.0, 4.0, 28), (40.0, 4.0, 28), (300.0, 2.0, 40)])
def test_distortion_is_the_formula(alpha, sigma, width):
    image = np.random.default_rng(0).integers(0, 256, (28, width), np.uint8)  # bright up to the border
    field = slow_field(31, 28, width, alpha, sigma, seed=2)
    fast = displacements(np.array([31]), (28, width), alpha, sigma, 2)[:, 0] / 256
    np.testing.assert_allclose(fast, field, atol=0.5 / 256 + 2e-4 * alpha)
    ours = distort(image[None], alpha, sigma=sigma, seed=2, indices=np.array([31]))[0]
    # Half a grey value from rounding, the rest from the 1/256 pixel of the displacements.
    np.testing.assert_allclose(ours, slow_warp(image, fast), atol=0.5 + 1e-9)


def test_alpha_zero_is_the_identity_bit_for_bit(digits):
    np.testing.assert_array_equal(distort(digits, 0), digits)


@pytest.mark.real_data
def test_digest_is_pinned(real_pools):
    images = scale.build_split(real_pools["mnist"], SplitSpec())["test"].images[:2000]
    assert sha256(distort(images, 30.0)).hexdigest() == DIGESTS["elastic-30"]


def test_image_depends_only_on_seed_and_index(digits):
    whole = distort(digits, 20)
    chosen = np.array([700, 3, 1999])
    np.testing.assert_array_equal(distort(digits[chosen], 20, indices=chosen), whole[chosen])
    assert (distort(digits, 20, seed=1) != whole).any(axis=(1, 2)).all()


def test_field_grows_with_alpha_and_is_not_renormalised(digits):
    fields = [displacements(np.arange(500), (28, 28), alpha, 4.0, 0) / 256 for alpha in ELASTIC_ALPHAS]
    for field, alpha in zip(fields, ELASTIC_ALPHAS, strict=True):
        np.testing.assert_allclose(field, fields[1] * alpha / 10, atol=0.011)
    # White noise of variance 1/3 under a Gaussian keeps 1 / (4 pi sigma^2) of it, away from the border.
    inner = fields[1][..., 12:16, 12:16]
    assert abs(inner.std() / (10 * math.sqrt(1 / 3 / (4 * math.pi * 16))) - 1) < 0.1


def test_input_is_left_alone_and_any_layout_is_taken(digits):
    before = digits[:50].copy()
    turned = np.asfortranarray(digits[:50])
    np.testing.assert_array_equal(distort(turned, 30), distort(before, 30))
    assert distort(turned, 30).flags.c_contiguous  # its bytes are hashed, and torch takes it as it is
    assert distort(before, 1000).shape == before.shape
    np.testing.assert_array_equal(digits[:50], before)
    assert distort(digits[:0], 30).shape == (0, 28, 28)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"images": np.zeros((1, 28, 28))}, TypeError, r"`images` must be a uint8 array \(N, H, W\) \(got float64"),
        ({"alpha": -1}, ValueError, "`alpha`"),
        ({"alpha": math.nan}, ValueError, "`alpha`"),
        ({"alpha": math.inf}, ValueError, "`alpha`"),
        ({"alpha": 1000.5}, ValueError, "`alpha` must be 0 to 1000 pixels"),
        ({"sigma": 0}, ValueError, "`sigma`"),
        ({"seed": "x"}, TypeError, "`seed` must be an integer"),
        ({"seed": -1}, ValueError, "`seed` must be at least 0"),
        ({"indices": [-1]}, ValueError, "`indices` must be whole numbers from 0"),
        ({"indices": [1.5]}, ValueError, "`indices` must be whole numbers from 0"),
        ({"indices": [0, 1]}, ValueError, "one index for each of 1 images"),
    ],
)
def test_wrong_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        distort(**{"images": np.zeros((1, 28, 28), np.uint8), "alpha": 10, **arguments})
