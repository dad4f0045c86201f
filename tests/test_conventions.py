"""docs/conventions.md, line by line."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from scalesteer import LogRadialBasis, ScaleSteerableConv2d, harmonics

DOCUMENT = Path(__file__).parents[1] / "docs" / "conventions.md"


def lobe(angle, size=15, lobes="sum"):
    """|S| of a single narrow orientation."""
    basis = LogRadialBasis(orders=(1.0,), orientations=(angle,), sigma=0.1, lobes=lobes)
    return np.abs(harmonics.sample(basis, size)[0, 0])


def test_convention_every_test_is_named_in_the_document_and_every_name_exists():
    named = set(re.findall(r"`(test_convention_\w+)`", DOCUMENT.read_text()))
    here = {name for name in globals() if name.startswith("test_convention_")}
    assert named == here


def test_convention_the_origin_is_the_centre_of_the_middle_pixel():
    x, y = harmonics.grid(5)
    assert (x[2, 2], y[2, 2]) == (0, 0)
    assert x[0].tolist() == [-2, -1, 0, 1, 2]


def test_convention_angle_zero_points_right():
    values = lobe(0.0)
    assert values[7, 12] == pytest.approx(1 / 5)  # five columns to the right: K = 1, r^-1 = 1/5
    assert values[12, 7] < 1e-6


def test_convention_angles_turn_counter_clockwise_as_seen():
    values = lobe(math.pi / 4)
    assert values[7 - 4, 7 + 4] > 0.1  # up and to the right: smaller row, larger column
    assert values[7 + 4, 7 + 4] < 1e-6


def test_convention_a_lobe_has_its_twin_on_the_other_side():
    values = lobe(0.7)
    np.testing.assert_allclose(values, values[::-1, ::-1], atol=1e-12)


def test_convention_a_single_lobe_points_to_its_orientation():
    values = lobe(math.pi / 4, lobes="single")
    assert values[7 - 4, 7 + 4] > 0.1  # up and to the right
    assert values[7 + 4, 7 - 4] < 1e-6


def test_convention_a_core_grows_with_the_scale():
    basis = LogRadialBasis(lobes="single", core=0.8)
    large = harmonics.steered_basis(basis, 7, 2.0)
    x, y = harmonics.grid(large.shape[-1])
    expected = harmonics.evaluate(basis, x / 2, y / 2) / 4 * harmonics.support(basis, 7, 2.0)
    np.testing.assert_allclose(large[:, :, 0] - 1j * large[:, :, 1], expected, atol=1e-14)


def test_convention_at_r_0_a_core_needs_no_exception():
    basis = LogRadialBasis(lobes="single", core=0.5, orders=(0.0,), sigma=0.3)
    mean = 0.3 * math.sqrt(2 * math.pi) / (2 * math.pi)  # of a lobe of width 0.3 over the circle
    np.testing.assert_allclose(harmonics.sample(basis, 1)[0, :, 0, 0], mean / 0.5, rtol=1e-9)


def test_convention_at_r_0_point_sampling_takes_one():
    assert (harmonics.sample(LogRadialBasis(beta=0.3), 7)[:, :, 3, 3] == 1).all()


def test_convention_at_r_0_area_sampling_needs_no_exception():
    basis = LogRadialBasis(sampling="area", orders=(0.0,), orientations=(0.0,), sigma=100.0)
    # K + K = 2 for such a wide lobe, and the average of 1/r over a unit square is 4 arsinh(1).
    assert harmonics.sample(basis, 1)[0, 0, 0, 0].real == pytest.approx(2 * 4 * math.asinh(1), rel=2e-3)


def test_convention_a_scale_above_one_enlarges_the_filter():
    basis = LogRadialBasis(orders=(0.0,), orientations=(0.0,))
    small, large = (harmonics.steered_basis(basis, 7, s)[0, 0, 0] for s in (1.0, 2.0))
    assert large.shape[0] > small.shape[0]
    # W^s(x) = s^-2 W(x / s): what was one column from the centre is now two away, a quarter as high.
    assert large[7, 7 + 2] == pytest.approx(small[3, 3 + 1] / 4)


def test_convention_the_theorems_scaled_by_s_is_a_shrunken_image():
    """Eq. 2 with I^s(x) = I(s x): the factor that enlarges the filter is the one of the shrunken image."""
    assert harmonics.steering_factors(LogRadialBasis(orders=(2.0,), m=1.0), 3.0)[0] == pytest.approx(
        3.0**-1 * np.exp(-2j * math.log(3.0))
    )


def test_convention_without_padding_the_output_is_smaller():
    assert ScaleSteerableConv2d(1, 2, 7)(torch.zeros(1, 1, 20, 30)).shape == (1, 2, 14, 24)


def test_convention_default_scales_suit_the_basis_and_the_kernel():
    layer = ScaleSteerableConv2d(1, 1)
    assert (layer.kernel_size, layer.basis) == ((7, 7), LogRadialBasis.preset("smooth"))
    assert layer.scales == tuple(1.36**i for i in range(-4, 7))
    assert ScaleSteerableConv2d(1, 1, 5).scales == tuple(1.36**i for i in range(-2, 7))
    assert ScaleSteerableConv2d(1, 1, basis="paper").sizes == (7, 9, 11, 13, 15, 17)
    assert ScaleSteerableConv2d(1, 1, 3, basis="paper").sizes == (3, 5, 7)


def test_convention_filters_are_correlated_not_flipped():
    impulse = torch.zeros(1, 1, 7, 7)
    impulse[0, 0, 3, 3] = 1
    for basis in ("paper", "smooth"):
        layer = ScaleSteerableConv2d(1, 1, padding="same", scales=(1.0,), basis=basis, bias=False)
        (filters,) = layer.filters()
        torch.testing.assert_close(layer(impulse), filters.flip(-2, -1))
        assert torch.allclose(filters, filters.flip(-2, -1), atol=1e-6) == (basis == "paper")


def test_convention_support_is_the_disc_of_radius_a_s():
    inside = harmonics.support(LogRadialBasis(), 7, 17 / 7)
    x, y = harmonics.grid(17)
    np.testing.assert_array_equal(inside, x**2 + y**2 <= 8.5**2)


def test_convention_windows_are_2_floor_a_s_plus_1():
    assert [harmonics.window_size(7, s) for s in (0.25, 0.5, 8 / 7, 1.5, 2.0, 33 / 7)] == [1, 3, 9, 11, 15, 33]


def test_convention_windows_have_a_smallest_and_a_largest_size():
    assert harmonics.window_sizes(7, (2 / 7, 1.0)) == (3, 7)
    assert harmonics.window_sizes(7, (73.0,)) == (511,)
    for scales, message in (((0.28, 1.0), "single pixel"), ((73.2,), "511 x 511"), ((1.0, 73.0), "511 x 511")):
        with pytest.raises(ValueError, match=message):
            harmonics.window_sizes(7, scales)


def test_convention_support_with_area_sampling_is_the_same():
    for scale in (0.6, 1.0, 2.2):
        point, area = (harmonics.support(LogRadialBasis(sampling=s), 7, scale) for s in ("point", "area"))
        np.testing.assert_array_equal(point, area)


def test_convention_an_averaged_edge_counts_a_pixel_by_its_share():
    """With S = 1 everywhere, a pixel's value is the share of its square within a s, counted on a finer grid."""
    flat = LogRadialBasis(
        orders=(0.0,), orientations=(0.0,), sigma=1e4, m=0.0, sampling="area", lobes="single", support="averaged"
    )
    found = harmonics.steered_basis(flat, 7, 1.3)[0, 0, 0] * 1.3**2
    assert found.shape == (11, 11)  # the disc has a diameter of 9.1
    ticks = (np.arange(11 * 200) + 0.5) / 200 - 5.5
    inside = np.hypot(ticks, ticks[:, None]) <= 4.55
    np.testing.assert_allclose(found, inside.reshape(11, 200, 11, 200).mean((1, 3)), atol=1e-3)


def test_convention_paper_is_not_normalised():
    for name in ("paper", "area", "smooth"):
        np.testing.assert_array_equal(harmonics.normalizers(LogRadialBasis.preset(name), 7), 1)


def test_convention_sizes_are_odd():
    with pytest.raises(ValueError, match="odd"):
        ScaleSteerableConv2d(1, 1, 6)


def test_convention_all_windows_share_one_centre():
    layer = ScaleSteerableConv2d(1, 1, 3, scales=(1.0, 3.0), padding="valid", reduce=None, bias=False)
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 4] = 1
    out = layer(x)  # (1, 1, 2, 7, 7); output (3, 3) has its centre on input (4, 4)
    for i, weight in enumerate(layer.filters()):
        n = weight.shape[-1]
        torch.testing.assert_close(out[0, 0, i, 3, 3], weight[0, 0, n // 2, n // 2])


def test_convention_coefficients_end_in_real_and_imaginary_part():
    basis = LogRadialBasis(orders=(1.0,), orientations=(0.0,))
    layer = ScaleSteerableConv2d(1, 1, scales=(1.0,), basis=basis, dtype=torch.float64)
    values = harmonics.sample(basis, 7)[0, 0] * harmonics.support(basis, 7, 1.0)
    with torch.no_grad():
        for coefficient, expected in (((1.0, 0.0), values.real), ((0.0, 1.0), -values.imag)):
            layer.coefficients.copy_(torch.tensor(coefficient).view_as(layer.coefficients))
            np.testing.assert_allclose(layer.filters()[0][0, 0].numpy(), expected, atol=1e-15)
