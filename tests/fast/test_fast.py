"""Which form suits a layer; pieces, tiles and gradients are tested with the algorithm itself in test_spectral.py."""

import pytest
import torch

from scalesteer import fast
from scalesteer.fast import _step
from scalesteer.geometry import Filters, Geometry


def choose_backend(image_size, sizes, in_channels, geometry, tiles=True, symmetric=True):
    filters = Filters(torch.empty(32, in_channels, 0, requires_grad=True), None, tuple(sizes), symmetric)
    return fast.choose_backend(geometry.axes(*image_size, filters.sizes), filters, geometry.groups, tiles)


def test_auto_prefers_the_spectrum_for_large_windows_and_taps_for_small_ones():
    def geometry(size):
        return Geometry(size, padding=(size // 2, size // 2))

    assert choose_backend((28, 28), range(13, 34, 4), 30, geometry(13)) == "fast"
    assert choose_backend((1024, 1024), range(7, 18, 2), 16, geometry(7)) == "fast"
    assert choose_backend((14, 14), range(7, 18, 2), 60, geometry(7)) == "fast"
    assert choose_backend((56, 56), range(7, 18, 2), 1, geometry(7)) == "fast"
    assert choose_backend((28, 28), (3,), 30, geometry(3)) == "direct"
    assert choose_backend((28, 28), (3,), 1, geometry(3)) == "direct"


def test_auto_knows_that_filters_that_are_not_symmetric_take_more_work():
    geometry = Geometry(7, padding=(3, 3))
    assert choose_backend((28, 28), (7, 9), 1, geometry) == "fast"
    assert choose_backend((56, 56), range(7, 18, 2), 1, geometry, symmetric=False) == "fast"
    assert choose_backend((28, 28), range(7, 18, 2), 30, geometry, symmetric=False) == "fast"
    geometry = Geometry(3, padding=(1, 1))
    assert choose_backend((28, 28), (3,), 4000, geometry) == "fast"
    assert choose_backend((28, 28), (3,), 4000, geometry, symmetric=False) == "direct"


def test_auto_tiles_only_where_it_can():
    geometry = Geometry(7, padding=(3, 3))
    assert choose_backend((1024, 1024), (7, 17), 8, geometry, tiles=True) == "fast"
    assert choose_backend((1024, 1024), (7, 17), 8, geometry, tiles=False) == "direct"


def test_auto_prefers_the_spectrum_for_colour_images():
    geometry = Geometry(7, padding=(3, 3))
    assert choose_backend((32, 32), range(7, 18, 2), 3, geometry) == "fast"
    assert choose_backend((32, 32), (3, 5), 3, Geometry(3, padding=(1, 1))) == "direct"


def test_auto_prefers_the_spectrum_to_groups_of_few_channels():
    geometry = Geometry(7, padding=(3, 3), groups=32)
    assert choose_backend((28, 28), range(7, 18, 2), 1, geometry) == "fast"


def test_the_tile_of_a_strided_layer_counts_in_its_cost():
    geometry = Geometry(7, stride=(4, 4), padding=(0, 0))
    assert choose_backend((4096, 4096), (3,), 64, geometry, tiles=True) == "direct"


def test_pieces_are_of_about_one_size_and_never_too_large():
    for images in (1, 7, 64, 129):
        for most in (0, 1, 5, 64, 1000):
            step = _step(images, most)
            pieces = -(-images // step)
            assert 1 <= step <= max(1, most)
            assert pieces == -(-images // max(1, min(images, most)))
            assert step == -(-images // pieces)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in forward AD and the tracer
def test_transformations_that_need_plain_operations_are_noticed():
    """The names of torch that tell are private: a new version of torch may change them."""
    found = []

    def look(x):
        found.append(fast.being_traced())
        return x.sum()

    x = torch.ones(2)
    look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x[None])
    torch.func.jvp(look, (x,), (x,))
    torch.jit.trace(look, x, check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        look(x)
    assert found[0] is False
    assert all(found[1:])
    torch.compile(lambda x: x + fast.being_traced(), backend="eager", fullgraph=True)(x)


def test_the_engine_that_suits_a_layer():
    def engine(channels, device="cpu", groups=1, size=3, symmetric=True):
        filters = Filters(torch.empty(1, channels, size**2), None, (size,), symmetric)
        return fast.pick_engine(torch.empty(1, channels * groups, 5, 5, device=device), filters, groups)

    assert engine(2) is fast.Taps
    assert engine(3) is fast.Frequencies
    assert engine(1, groups=4) is fast.Frequencies
    assert engine(1, "meta") is fast.Frequencies
    assert engine(2, size=17) is fast.Taps
    assert engine(1, size=17, symmetric=False) is fast.Taps
    assert engine(2, size=17, symmetric=False) is fast.Frequencies
