import numpy as np
import pytest

from scalesteer.datasets import DataError
from scalesteer.datasets.icons import draw_icon

# A circle of radius 200 about (248, 256), of four curves as icons have it.
CIRCLE = "M248 56C137.7 56 48 145.7 48 256s89.7 200 200 200 200-89.7 200-200S358.3 56 248 56z"
INNER = "M248 156C192.9 156 148 200.9 148 256s44.9 100 100 100 100-44.9 100-100-44.9-100-100-100z"  # turns the same way
HOLE = "M248 156c55.1 0 100 44.9 100 100s-44.9 100-100 100-100-44.9-100-100 44.9-100 100-100z"  # turns the other way


def svg(path, view="496 512"):
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {view}"><!-- x --><path d="{path}"/></svg>'


def disc(side, radius, fine=64):
    """The share of each pixel that a disc covers, by many sample points; `side` pixels are 512 units."""
    at = (np.arange(side * fine) + 0.5) * 512 / (side * fine) - 256
    inside = at[:, None] ** 2 + at**2 <= radius**2
    return inside.reshape(side, fine, side, fine).mean((1, 3)) * 255


@pytest.mark.parametrize("side", [17, 32, 64])
def test_circle_is_drawn_where_and_as_large_as_it_is(side):
    # 496 units wide: centred in the square of 512.
    drawn = draw_icon(svg(CIRCLE), side)
    assert drawn.shape == (side, side)
    assert np.abs(drawn - disc(side, 200)).max() < 10
    assert abs(drawn.sum() / disc(side, 200).sum() - 1) < 0.002


def test_outline_that_turns_the_other_way_cuts_a_hole_and_the_same_way_does_not():
    assert (draw_icon(svg(CIRCLE + INNER), 40) == draw_icon(svg(CIRCLE), 40)).all()
    assert np.abs(draw_icon(svg(CIRCLE + HOLE), 40) - disc(40, 200) + disc(40, 100)).max() < 20


@pytest.mark.parametrize(
    "path",
    [
        "M1 1L3 1L3 3L1 3Z", "M1 1 3 1 3 3 1 3z", "m1 1l2 0l0 2l-2 0z", "m1 1 2 0 0 2-2 0", "M1 1H3V3H1z",
        "M1,1C1.5 1 2.5 1 3 1c0 .5 0 1.5 0 2C2.5 3 1.5 3 1 3c0-.5 0-1.5 0-2z", "M1 1h2v2h-2z",
        "m3 3v-2h-2v2z", "M1 1h1v2h-1zm1 0h1v2h-1z",
    ],
)  # fmt: skip
def test_every_command_can_draw_the_same_square(path):
    expected = np.zeros((8, 8), np.uint8)
    expected[2:6, 2:6] = 255
    np.testing.assert_array_equal(draw_icon(svg(path, "4 4"), 8), expected)


def test_half_covered_pixels_are_half_bright():
    np.testing.assert_array_equal(draw_icon(svg("M1 1h1v2h-1z", "4 4"), 2), [[64, 0], [64, 0]])
    wide = draw_icon(svg("M0 0h4v2h-4z", "4 2"), 4)  # one unit of black above and below
    np.testing.assert_array_equal(wide, [[0] * 4, [255] * 4, [255] * 4, [0] * 4])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("<svg/>", "a viewBox from 0 0 and one path"),
        (svg("M0 0z") + svg("M0 0z"), "one path"),
        (svg("M0 0A1 1 0 0 0 2 2z"), "the command 'A'"),
    ],
)
def test_icon_that_cannot_be_drawn_is_refused(text, match):
    with pytest.raises(DataError, match=match):
        draw_icon(text, 8)
