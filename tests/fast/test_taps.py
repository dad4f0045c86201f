"""Half windows; that their products give the right responses is tested with the other forms in test_spectral.py."""

import itertools

from scalesteer.fast import taps


def test_half_windows_are_prefixes_of_larger_ones():
    small, large = taps.half_window(5), taps.half_window(9)
    assert large[: len(small)] == small
    assert len(large) == 41
    every = {*large, *((-y, -x) for y, x in large)}
    assert every == set(itertools.product(range(-4, 5), repeat=2))
