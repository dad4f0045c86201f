"""Eq. 1, the steering rule and Theorem 1 against independent arithmetic."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalesteer import PAPER_SCALES, LogRadialBasis, ScaleSteerableConv2d, harmonics
from tests import reference

numbers = st.floats(-4, 4)
bases = st.builds(
    LogRadialBasis,
    orders=st.lists(numbers, min_size=1, max_size=3).map(tuple),
    orientations=st.lists(st.floats(-7, 7), min_size=1, max_size=4).map(tuple),
    sigma=st.floats(0.05, 3),
    beta=numbers,
    m=st.floats(-1, 1.8),
    lobes=st.sampled_from(["sum", "single"]),
)


def lobes_at(basis):
    return {"sum": reference.TWO_LOBES, "single": (0,)}[basis.lobes]


def parameters(basis):
    return basis.orders, basis.orientations, basis.sigma, basis.beta, basis.m, lobes_at(basis), basis.core


@settings(max_examples=40)
@given(basis=bases, size=st.sampled_from([3, 5, 7, 9]))
def test_samples_equal_eq1_point_by_point(basis, size):
    values = harmonics.sample(basis, size)
    largest = np.abs(values).max()
    for row in range(size):
        for column in range(size):
            x, y = column - size // 2, size // 2 - row
            for i, k in enumerate(basis.orders):
                for j, phi_j in enumerate(basis.orientations):
                    expected = reference.harmonic(x, y, k, phi_j, basis.sigma, basis.beta, basis.m, lobes_at(basis))
                    assert abs(values[i, j, row, column] - expected) <= 1e-12 * max(1, largest)


def real_filter(basis, coefficients, kernel_size, scale):
    steered = harmonics.steered_basis(basis, kernel_size, scale)
    return np.einsum("kjp,kjpab->ab", np.stack([coefficients.real, coefficients.imag], -1), steered)


def draw_coefficients(basis, seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(basis.shape) + 1j * rng.standard_normal(basis.shape)


def continuous(basis, coefficients, scale, x, y):
    """s^-2 times the continuous filter at r / s."""
    values = reference.harmonics(x / scale, y / scale, *parameters(basis))
    return np.einsum("kj,kj...->...", coefficients, values).real / scale**2


def steering_miss_at_points(basis, scale, seed):
    coefficients = draw_coefficients(basis, seed)
    size = harmonics.window_size(7, scale)
    x, y = harmonics.grid(size)
    off_centre = (np.hypot(x, y) > 0) & harmonics.support(basis, 7, scale)
    steered = real_filter(basis, coefficients, 7, scale)[off_centre]
    expected = continuous(basis, coefficients, scale, x[off_centre], y[off_centre])
    return np.abs(steered - expected).max() / np.abs(expected).max()


@settings(max_examples=30)
@given(basis=bases, scale=st.floats(0.45, 4), seed=st.integers(0, 1000))
def test_steered_filter_is_the_enlarged_filter_at_points(basis, scale, seed):
    assert steering_miss_at_points(basis, scale, seed) < 1e-12


@pytest.mark.parametrize("lobes", ["sum", "single"])
@pytest.mark.parametrize("scale", [0.6, 1.0, 17 / 7, 4.0])
def test_with_a_core_the_filter_is_the_enlarged_filter_at_every_point(lobes, scale):
    basis = LogRadialBasis(lobes=lobes, core=0.8, sigma=0.4, beta=0.3, orientations=(0.3, 2.0, -4.0))
    coefficients = draw_coefficients(basis, 3)
    x, y = harmonics.grid(harmonics.window_size(7, scale))
    expected = continuous(basis, coefficients, scale, x, y) * harmonics.support(basis, 7, scale)
    miss = np.abs(real_filter(basis, coefficients, 7, scale) - expected).max()
    assert miss < 1e-12 * np.abs(expected).max()


def test_a_core_that_does_not_grow_with_the_scale_is_noticed():
    basis = LogRadialBasis(lobes="single", core=0.8)
    x, y = harmonics.grid(harmonics.window_size(7, 2.0))
    fixed = np.einsum("kj,kjab->ab", draw_coefficients(basis, 3), harmonics.evaluate(basis, x / 2, y / 2)).real / 4
    grown = real_filter(basis, draw_coefficients(basis, 3), 7, 2.0)
    same_core = harmonics.evaluate(basis, x, y) * harmonics.steering_factors(basis, 2.0)[:, None, None, None]
    wrong = np.einsum("kj,kjab->ab", draw_coefficients(basis, 3), same_core).real
    inside = harmonics.support(basis, 7, 2.0)
    assert np.abs(grown - fixed)[inside].max() < 1e-12
    assert np.abs(wrong - fixed)[inside].max() > 0.01


def test_a_core_too_small_at_a_scale_is_told_by_the_users_own_number():
    basis = dataclasses.replace(LogRadialBasis.preset("smooth"), core=0.1)
    ScaleSteerableConv2d(1, 1, basis=basis, scales=(0.5, 1.0))
    with pytest.raises(
        ValueError, match=r"`core` \(=0.1\) has 0.04 pixels at scale 0.4 .*`core` of 0 or at least 0.125"
    ):
        ScaleSteerableConv2d(1, 1, basis=basis, scales=(0.4, 1.0))


def test_functions_with_a_core_are_smooth_at_the_centre():
    """The second derivative in direction t is a quadratic form of (cos t, sin t); a fade of another power has kinks."""
    basis, h = LogRadialBasis(lobes="single", core=1.0), 1e-3
    angle = np.arange(12) * math.pi / 12
    around, centre = (harmonics.evaluate(basis, r * np.cos(angle), r * np.sin(angle)) for r in (h, 0))
    other = harmonics.evaluate(basis, -h * np.cos(angle), -h * np.sin(angle))
    second = ((around - 2 * centre + other) / h**2).reshape(-1, 12)
    form = np.stack([np.ones(12), np.cos(2 * angle), np.sin(2 * angle)], 1)
    left = second.T - form @ np.linalg.lstsq(form, second.T, rcond=None)[0]
    assert np.abs(left).max() < 1e-5 * np.abs(second).max()


@pytest.mark.parametrize("lobes", ["sum", "max", "single"])
def test_the_core_keeps_the_mean_of_the_lobes(lobes):
    basis = LogRadialBasis(lobes=lobes, core=0.7, sigma=0.5, orders=(0.0,), m=0.0)
    angle = (np.arange(4000) + 0.5) * 2 * math.pi / 4000
    mean = harmonics.angular_factor(basis, angle).mean(-1)
    for r in (0.0, 0.3, 3.0):
        found = harmonics.evaluate(basis, r * np.cos(angle), r * np.sin(angle)).mean(-1)[0]
        np.testing.assert_allclose(found, mean, rtol=1e-6)


def test_centre_pixel_is_steered_by_eq3_applied_to_one():
    basis, scale = LogRadialBasis(), 1.7
    coefficients = draw_coefficients(basis, 0)
    expected = 0
    for i, k in enumerate(basis.orders):
        expected += scale ** (basis.m - 2) * np.exp(-1j * k * math.log(scale)) * coefficients[i].sum()
    filter_ = real_filter(basis, coefficients, 7, scale)
    assert filter_[filter_.shape[0] // 2, filter_.shape[0] // 2] == pytest.approx(expected.real, abs=1e-12)


@pytest.mark.parametrize(
    "broken",
    [
        lambda basis, s: np.exp(-1j * basis.frequencies * math.log(s)),
        lambda basis, s: s ** (basis.m - 2) * np.exp(1j * basis.frequencies * math.log(s)),
    ],
    ids=["no s^(m-2)", "other sign"],
)
def test_steering_test_notices_a_broken_factor(broken, monkeypatch):
    monkeypatch.setattr(harmonics, "steering_factors", broken)
    assert steering_miss_at_points(LogRadialBasis(), 1.5, 0) > 0.1


AREA_CASES = [
    (LogRadialBasis(sampling="area"), 0.46),
    (LogRadialBasis(sampling="area"), 1.0),
    (LogRadialBasis(sampling="area"), 17 / 7),
    (LogRadialBasis(sampling="area", orders=(0.0, 3.0), orientations=(0.3, 2.0), m=0.4, beta=1.0), 1.9),
    (LogRadialBasis(sampling="area", orders=(6.0,), orientations=(1.0,), m=1.7, sigma=0.8), 1.3),
    (LogRadialBasis(sampling="area", orders=(-1.0,), orientations=(0.1, 1.0), m=-0.5, sigma=0.1), 3.9),
    *((LogRadialBasis(sampling="area"), scale) for scale in np.random.default_rng(7).uniform(0.45, 4, 3)),
    (LogRadialBasis(sampling="area", lobes="single", orientations=(0.3, 2.0, 4.0), sigma=0.4), 1.6),
    (LogRadialBasis(sampling="area", lobes="single", orientations=(0.3, 4.0), sigma=1.5, m=0.3), 0.8),
]


@pytest.mark.parametrize("core", [0.0, 0.75])
@pytest.mark.parametrize("scale", [0.6, 1.0, 9 / 7, 1.7, 17 / 7, 4.0])
def test_an_averaged_edge_is_the_average_of_the_enlarged_filter_that_ends_at_a_s(core, scale):
    basis = LogRadialBasis(
        sampling="area", lobes="single", support="averaged", core=core, sigma=0.4, orientations=(0.3, 4.0), beta=0.2
    )
    coefficients = draw_coefficients(basis, 4)
    found = real_filter(basis, coefficients, 7, scale)

    def enlarged(x, y):
        return np.einsum("kj,kjp->p", coefficients, harmonics.evaluate(basis, x / scale, y / scale)).real / scale**2

    x, y = harmonics.grid(len(found))
    rng, largest = np.random.default_rng(0), np.abs(found).max()
    edge = np.argwhere(np.abs(np.hypot(x, y) - 3.5 * scale) < 1)
    for row, column in [*rng.permutation(edge)[:12], *rng.integers(0, len(found), (6, 2))]:
        at = x[row, column], y[row, column]
        if core == 0 and at == (0, 0):
            continue  # the singular pixel has a test of its own
        expected = reference.truncated_average(enlarged, *at, 3.5 * scale)
        assert abs(found[row, column] - expected) < 1e-9 * largest


@pytest.mark.parametrize("scale", [0.5, 1.3, 17 / 7])
def test_the_sum_of_an_averaged_filter_is_the_integral_of_the_unscaled_one(scale):
    """Whatever the grid does, nothing is lost or counted twice; so a filter with sum zero has it at every scale."""
    basis = LogRadialBasis.preset("smooth")
    nodes, weights = np.polynomial.legendre.leggauss(60)
    r, angle = (nodes + 1) / 2 * 3.5, np.arange(64) * 2 * math.pi / 64
    values = harmonics.evaluate(basis, np.outer(r, np.cos(angle)), np.outer(r, np.sin(angle)))
    expected = np.einsum("kjra,r->kj", values, r * weights * 3.5 / 2) * 2 * math.pi / 64
    found = harmonics.steered_basis(basis, 7, scale).sum((-1, -2))
    np.testing.assert_allclose(found[..., 0] - 1j * found[..., 1], expected, rtol=1e-12, atol=1e-12)


@given(size=st.integers(3, 41), scale=st.floats(0.1, 5))
def test_the_window_of_an_averaged_edge_holds_every_pixel_that_the_disc_touches(size, scale):
    basis, size = LogRadialBasis(sampling="area", support="averaged"), size + 1 - size % 2
    inside = harmonics.support(basis, size, scale)
    n = harmonics.window_size(size, scale, basis)
    assert inside.shape == (n, n)
    assert n / 2 > size / 2 * scale - 1e-6  # nothing of the disc is outside
    assert n == 1 or n / 2 - 1 < size / 2 * scale  # and no ring of the window is empty
    x, y = harmonics.grid(n)
    nearest = np.hypot(np.clip(np.abs(x) - 0.5, 0, None), np.clip(np.abs(y) - 0.5, 0, None))
    np.testing.assert_array_equal(inside, nearest <= size / 2 * scale + 1e-9)


@pytest.mark.parametrize(("basis", "scale"), AREA_CASES)
def test_steered_area_filter_is_the_average_of_the_enlarged_filter(basis, scale):
    coefficients = draw_coefficients(basis, 1)
    size = harmonics.window_size(7, scale)
    steered = real_filter(basis, coefficients, 7, scale)
    inside = harmonics.support(basis, 7, scale)
    x, y = harmonics.grid(size)
    expected = np.zeros((size, size))
    for row in range(size):
        for column in range(size):
            if inside[row, column]:
                expected[row, column] = reference.cell_average(
                    lambda px, py: continuous(basis, coefficients, scale, px, py),
                    x[row, column],
                    y[row, column],
                    basis.m,
                )
    assert np.abs(steered - expected).max() <= 2e-6 * np.abs(expected).max()


def test_paper_scales_give_the_papers_windows():
    assert [harmonics.window_size(7, s) for s in PAPER_SCALES] == [7, 9, 11, 13, 15, 17]


@pytest.mark.parametrize("name", harmonics.PRESETS)
@pytest.mark.parametrize("kernel_size", [3, 5, 7, 9, 31])
def test_recommended_scales_are_all_those_that_have_room(name, kernel_size):
    basis = LogRadialBasis.preset(name)
    found = harmonics.recommended_scales(basis, kernel_size)
    sizes = harmonics.window_sizes(kernel_size, found, basis)  # a warning would be an error
    known = harmonics.WIDE_SCALES if name == "smooth" else PAPER_SCALES
    assert 1.0 in found
    for left_out in set(known) - set(found):
        size = harmonics.window_size(kernel_size, left_out, basis)
        if name == "smooth":
            with pytest.raises(ValueError, match="is a single pixel"):
                harmonics.window_sizes(kernel_size, (left_out,), basis)
        else:
            assert size in sizes
            assert left_out > found[sizes.index(size)]


@given(size=st.integers(3, 41), scale=st.floats(0.1, 5))
def test_window_holds_the_support_and_no_empty_ring(size, scale):
    size += 1 - size % 2
    inside = harmonics.support(LogRadialBasis(), size, scale)
    n = inside.shape[0]
    assert n == harmonics.window_size(size, scale)
    assert inside[n // 2, 0]  # the middle of the edge: the window is not too large
    assert n // 2 + 1 > size / 2 * scale - 1e-6  # nor too small


def test_a_product_that_rounding_brings_below_an_integer_counts_as_the_integer():
    assert 11 / 2 * (30 / 11) < 15
    assert 23 / 2 * (26 / 23) < 13
    assert harmonics.window_size(11, 30 / 11) == 31
    assert harmonics.window_size(23, 26 / 23) == 27


def test_a_window_beyond_the_largest_keeps_its_own_disc():
    basis = LogRadialBasis.preset("released-code").resolve(17)
    inside = harmonics.support(basis, 7, 33 / 7)
    np.testing.assert_array_equal(inside, np.hypot(*np.mgrid[-16:17, -16:17]) <= 16)


def test_the_basis_of_all_scales_is_theirs_side_by_side_and_cannot_be_changed():
    basis, scales = LogRadialBasis.preset("area"), (0.5, 1.0, 1.7)
    stacked = harmonics.stacked_basis(basis, 7, scales)
    first = 0
    for scale in scales:
        expected = harmonics.steered_basis(basis, 7, scale)
        taps = expected.shape[-1] ** 2
        np.testing.assert_array_equal(stacked[:, first : first + taps], expected.reshape(48, taps))
        first += taps
    assert stacked.shape == (48, first)
    with pytest.raises(ValueError, match="read-only"):
        stacked[0, 0] = 1


def test_released_code_preset_has_unit_parts_on_the_largest_window_and_square_crops():
    basis = LogRadialBasis.preset("released-code").resolve(17)
    # scale 11/7 is the reference: no phase there
    largest = harmonics.steered_basis(dataclasses.replace(basis, reference_size=17), 7, 17 / 7)
    np.testing.assert_allclose((largest**2).sum((-1, -2)), 1, rtol=1e-12)
    inside = harmonics.support(basis, 7, 17 / 7)
    x, y = harmonics.grid(17)
    np.testing.assert_array_equal(inside, np.hypot(x, y) <= 8)
    assert harmonics.support(basis, 7, 1.0).all()  # a square crop of 7 x 7
    np.testing.assert_allclose(largest[:, 0], largest[:, 8], atol=1e-12)  # first and last orientation are the same
    np.testing.assert_allclose(basis.frequencies, 2 * np.pi * np.array([0.5, 1, 2]) / np.log(8 * np.sqrt(2)))


def released_function(order, orientation, size):
    """A function of the released program on the window of `size` pixels, real and minus imaginary part: pixel by pixel.

    Written from what the program does, in its own terms: rows are counted upwards from the middle, an angle is that of
    (row up, column), so that zero points up, and the function lives on the largest window, 17 x 17.
    """
    largest, reference = 17, 11
    k = 2 * math.pi * order / math.log(math.dist((0, 0), (8, 8)))
    parts = {}
    for up in range(-8, 9):
        for right in range(-8, 9):
            r = math.hypot(up, right)
            angle = math.atan2(right, up) if r else 0.0
            away = abs(angle - orientation * math.pi / 8) % (2 * math.pi)
            away = min(away, 2 * math.pi - away)
            away = min(away, math.pi - away)  # from the nearer of the two lobes
            strength = math.exp(-(away**2) / (2 * (math.pi / 16) ** 2)) / (r or 1.0) * (r <= 8)
            phase = k * math.log(r or 1.0) - math.pi / 4
            parts[up, right] = strength * math.cos(phase), strength * math.sin(phase)
    norms = [math.sqrt(sum(both[i] ** 2 for both in parts.values())) for i in (0, 1)]
    assert len(parts) == largest**2
    turn = -k * math.log(size / reference)
    found = np.zeros((2, size, size))
    for row in range(size):
        for column in range(size):
            real, imaginary = (v / n for v, n in zip(parts[size // 2 - row, column - size // 2], norms, strict=True))
            found[0, row, column] = math.cos(turn) * real - math.sin(turn) * imaginary
            found[1, row, column] = -math.sin(turn) * real - math.cos(turn) * imaginary
    return found


@pytest.mark.parametrize("size", [7, 9, 11, 13, 15, 17])
def test_released_code_has_the_functions_of_the_authors_program(size):
    basis = LogRadialBasis.preset("released-code").resolve(17)
    found = harmonics.steered_basis(basis, 7, size / 7)
    expected = [[released_function(order, j, size) for j in range(9)] for order in (0.5, 1.0, 2.0)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


AUTHORS_PROGRAM = {  # window: the filter's centre, right of it, below that, up 2 right 1, down 3 left 2, top, left edge
    7: (0.606066908, 1.312597079, -0.067967599, 0.617385609, -0.675261528, -0.606426112, 0.550741951),
    9: (2.500415324, 1.781829756, 0.414759017, 0.725045093, -0.084148254, -0.585971112, 0.363825338),
    11: (2.602598831, 0.634720225, 1.366139877, 0.191579778, 0.368650986, -0.541315381, 0.307951768),
    13: (1.184953537, -0.500151996, 1.869621746, -0.142416577, 0.448828911, -0.444722665, 0.259207373),
    15: (-0.585212954, -0.999189524, 1.741435262, -0.102995474, 0.299821899, -0.394635172, 0.203575806),
    17: (-1.914046634, -0.922188079, 1.189361921, 0.171960741, 0.099069348, -0.374521144, 0.175306278),
}
"""What the authors' program itself returns (github.com/rghosh92/SS-CNN, commit 24589db, in float64) for one filter.

Its ``mult_real`` is 1/27, 2/27 ... 1 and its ``mult_imag`` cos 0, cos 1 ... cos 26, order by order.
"""


@pytest.mark.parametrize("size", AUTHORS_PROGRAM)
def test_released_code_makes_the_filters_that_the_authors_program_returned(size):
    basis = LogRadialBasis.preset("released-code").resolve(17)
    coefficients = np.stack([np.arange(1, 28) / 27, np.cos(np.arange(27))]).reshape(2, 3, 9)
    found = np.einsum("pkj,kjpyx->yx", coefficients, harmonics.steered_basis(basis, 7, size / 7))
    m = size // 2
    places = ((m, m), (m, m + 1), (m + 1, m + 1), (m - 2, m + 1), (m + 3, m - 2), (0, m), (m, 0))
    np.testing.assert_allclose([found[place] for place in places], AUTHORS_PROGRAM[size], rtol=0, atol=1e-9)


def test_released_code_has_the_vertical_bar_twice_and_at_its_centre():
    basis = LogRadialBasis.preset("released-code").resolve(17)
    functions = np.abs(harmonics.sample(basis, 17)[0])  # (9, 17, 17)
    np.testing.assert_allclose(functions[0, :8, 8], 1 / np.arange(8, 0, -1))  # up from the centre: K = 1, 1 / r
    assert functions[0, 8, :8].max() < 1e-6
    np.testing.assert_allclose(functions[4, 8, :8], 1 / np.arange(8, 0, -1))  # the horizontal bar is there once
    np.testing.assert_allclose(functions[0], functions[8], atol=1e-12)
    np.testing.assert_allclose(functions[[0, 1, 2, 4, 8], 8, 8], np.exp([0, -2, -8, -32, 0]), rtol=1e-9)


def test_the_mirror_image_of_released_code_can_be_made():
    basis = LogRadialBasis.preset("released-code").resolve(17)
    mirrored = dataclasses.replace(basis, orientations=tuple(j * math.pi / 8 for j in range(9)), centre="right")
    for size in (7, 17):
        first, second = (harmonics.steered_basis(b, 7, size / 7) for b in (basis, mirrored))
        np.testing.assert_allclose(second, first[..., ::-1, ::-1].swapaxes(-1, -2), atol=1e-12)  # up becomes right


def test_released_code_steering_is_the_phase_alone_relative_to_size_11():
    basis = LogRadialBasis.preset("released-code").resolve(17)
    at_reference = harmonics.steered_basis(basis, 7, 11 / 7)
    at_nine = harmonics.steered_basis(basis, 7, 9 / 7)
    function = at_reference[:, :, 0] - 1j * at_reference[:, :, 1]
    phase = np.exp(-1j * basis.frequencies * np.log(9 / 11))
    expected = (function * phase[:, None, None, None])[..., 1:-1, 1:-1]
    np.testing.assert_allclose(at_nine[:, :, 0] - 1j * at_nine[:, :, 1], expected, atol=1e-12)


ALTERNATIVES = {
    "orders": (0.5, 1.0, 3.0),
    "orientations": (0.1, 1.0),
    "sigma": 0.3,
    "beta": 0.4,
    "m": 0.5,
    "sampling": "area",
    "core": 0.5,
    "centre": "right",
    "lobes": "max",
    "order_unit": "period",
    "gain": False,
    "normalization": "parts",
    "support": "crop",
    "reference_size": 9,
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LogRadialBasis) if f.name != "window"])
def test_every_field_changes_the_filters(field):
    wide = {"sigma": 1.0} if field == "lobes" else {}  # narrow lobes do not meet
    before = LogRadialBasis(**wide)
    after = dataclasses.replace(before, **{field: ALTERNATIVES[field]}).resolve(13)
    first, second = (harmonics.steered_basis(b, 7, 13 / 7) for b in (before, after))
    assert first.shape != second.shape or np.abs(first - second).max() > 1e-3


def test_window_field_changes_filters_that_depend_on_it():
    basis = LogRadialBasis.preset("released-code")
    first, second = (harmonics.steered_basis(basis.resolve(w), 7, 1.0) for w in (13, 17))
    assert np.abs(first - second).max() > 1e-3


@pytest.mark.parametrize("name", harmonics.PRESETS)
def test_functions_are_point_symmetric_where_the_basis_says_so(name):
    basis = LogRadialBasis.preset(name).resolve(17)
    steered = harmonics.steered_basis(basis, 7, 17 / 7)
    difference = np.abs(steered - steered[..., ::-1, ::-1]).max()
    assert difference < 1e-12 if basis.point_symmetric else difference > 0.01
    assert basis.point_symmetric == (name != "smooth")


@pytest.mark.parametrize(("orders", "tolerance", "rank"), [((0.5, 2.0), 1e-2, 25), ((1.0,), 1e-2, 16)])
def test_the_functions_of_smooth_are_as_independent_as_the_guide_says(orders, tolerance, rank):
    basis = dataclasses.replace(LogRadialBasis.preset("smooth"), orders=orders)
    values = np.linalg.svd(harmonics.steered_basis(basis, 7, 1.0).reshape(-1, 49), compute_uv=False)
    assert (values > tolerance * values[0]).sum() == rank


def test_samples_are_cached_and_cannot_be_changed():
    values = harmonics.sample(LogRadialBasis(), 7)
    assert harmonics.sample(LogRadialBasis(), 7) is values
    with pytest.raises(ValueError, match="read-only"):
        values[0, 0, 0, 0] = 1


def test_basis_that_needs_a_window_says_so():
    with pytest.raises(ValueError, match="`window` is not set"):
        harmonics.sample(LogRadialBasis.preset("released-code"), 7)


def test_function_that_vanishes_on_the_grid_is_an_error_not_a_division_by_zero():
    basis = LogRadialBasis(orientations=(0.0, 0.3), sigma=0.01, centre="right")
    with pytest.raises(ValueError, match=r"order 0.5 and orientation 0.3000 vanishes on the grid"):
        harmonics.steered_basis(basis, 3, 1.0)


def test_part_that_vanishes_on_the_grid_is_an_error():
    basis = LogRadialBasis(orders=(0.0,), normalization="parts", window=7)
    with pytest.raises(ValueError, match=r"the imaginary part of the function of order 0\.0"):
        harmonics.steered_basis(basis, 7, 1.0)
