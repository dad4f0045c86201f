"""Half windows; that their products give the right responses is tested with the other forms in test_spectral.py."""

import itertools

import pytest
import torch

from scalesteer.fast import taps
from scalesteer.geometry import Filters, Geometry
from scalesteer.nn import ScaleSteerableConv2d, fold


def test_half_windows_are_prefixes_of_larger_ones():
    small, large = taps.half_window(5), taps.half_window(9)
    assert large[: len(small)] == small
    assert len(large) == 41
    every = {*large, *((-y, -x) for y, x in large)}
    assert every == set(itertools.product(range(-4, 5), repeat=2))


def test_half_taps_and_their_mirror_images_are_all_taps():
    half, mirrored = taps.half_taps((3, 5))
    assert sorted({*half, *mirrored}) == list(range(9 + 25))
    assert [k for k, other in zip(half, mirrored, strict=True) if k == other] == [4, 9 + 12]


def test_a_tap_comes_before_its_mirror_image_where_both_are_needed():
    order, _ = taps.places_in_order((3, 5), False, taps.order_of_windows((3, 5)))
    assert order[:5] == [4, 5, 3, 6, 2]
    assert sorted(order) == list(range(9 + 25))
    assert all(a + b == 9 + 9 + 24 for a, b in zip(order[10::2], order[11::2], strict=True))


@pytest.mark.parametrize("symmetric", [True, False])
def test_pieces_may_be_of_different_sizes(symmetric):
    windows = torch.randn(2, 1, 5, 5)
    windows = windows + windows.flip(-1, -2) if symmetric else windows
    filters = Filters(windows.flatten(2), None, (5,), symmetric)
    axes = Geometry(5, padding=(2, 2)).axes(8, 9, (5,))
    engine, x = taps.Taps(filters, axes, 1, torch.empty(0), pieces=3), torch.randn(6, 1, 8, 9)
    for piece in (x[:2], x[2:3], x[3:]):
        engine.load_batch(piece)
        expected = torch.nn.functional.conv2d(piece, filters.windows()[0], padding=2)
        torch.testing.assert_close(engine.outwards(engine.response(0)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 4])  # taps, frequencies
def test_what_is_kept_of_finished_filters_sees_their_changes(channels):
    x = torch.randn(2, channels, 12, 12)
    layer = fold(ScaleSteerableConv2d(channels, 4, 5, padding="same", scales=(1.0, 1.5), backend="fast"))

    def triple_in_place():
        layer.taps.mul_(3)

    def give_other_numbers():
        layer.taps.data = layer.taps * 3

    for change in (triple_in_place, give_other_numbers):
        with torch.no_grad():
            before = layer(x)
            change()
            assert torch.allclose(layer(x), 3 * before, rtol=1e-4, atol=1e-4)
