"""Where windows lie, against a count of pixels; filters with and without a basis."""

import itertools

import pytest
import torch

from scalesteer.geometry import Axis, Filters, Geometry


def seen_twice(axis, period):
    """Whether some window, on a circle of `period` pixels, sees a pixel of the image at a place where it is not."""
    for centre, tap in itertools.product(range(axis.count), range(-axis.radius, axis.radius + 1)):
        place = axis.first + centre * axis.stride + tap * axis.dilation
        if not 0 <= place < axis.length and place % period < axis.length:
            return True
    return False


@pytest.mark.parametrize(("stride", "dilation", "padding"), [(1, 1, 3), (1, 1, 0), (3, 1, 3), (2, 2, 0), (3, 2, 9)])
def test_the_period_is_the_shortest_even_one_at_which_no_window_sees_the_image_twice(stride, dilation, padding):
    geometry = Geometry(7, (stride, 1), (padding, 0), (dilation, 1))
    for length in range(15, 32):
        axis, _ = geometry.axes(length, 20, (7, 11, 17))
        assert axis.period % 2 == 0
        assert axis.period >= axis.length
        assert not seen_twice(axis, axis.period)
        # Strides may leave room at the end, which is not worth a rule of its own.
        assert axis.period - 2 < axis.length or seen_twice(axis, axis.period - 2) or stride > 1


def test_axes_say_where_centres_lie_and_how_far_windows_reach():
    rows, columns = Geometry(7, (2, 1), (3, -1), (1, 2)).axes(20, 30, (7, 9))
    assert rows == Axis(length=20, first=0, stride=2, count=10, dilation=1, radius=4)
    assert columns == Axis(length=30, first=7, stride=1, count=16, dilation=2, radius=4)
    assert (rows.last, rows.reach, rows.beyond, rows.border) == (18, 4, (4, 3), (4, 3))
    assert (columns.last, columns.beyond, columns.border) == (22, (1, 1), (1, 1))


def test_an_image_that_was_padded_is_the_same_problem_with_less_padding():
    whole, _ = Geometry(5, padding=(2, 2)).axes(16, 16, (9,))
    padded, _ = Geometry(5, padding=(-2, -2)).axes(16 + 2 * 4, 16, (9,))
    assert padded.first == whole.first + 4
    assert padded.count == whole.count
    assert padded.border == (0, 0)


def test_finished_filters_are_weights_times_basis():
    weights, basis = torch.randn(3, 2, 5), torch.randn(5, 9 + 25)
    filters = Filters(weights, basis, (3, 5))
    taps = torch.stack([torch.stack([weights[o, c] @ basis for c in range(2)]) for o in range(3)])
    small, large = filters.windows()
    torch.testing.assert_close(small, taps[..., :9].reshape(3, 2, 3, 3))
    torch.testing.assert_close(large, taps[..., 9:].reshape(3, 2, 5, 5))
    done = filters.finished()
    assert done.finished() is done


def test_filters_are_made_in_float32_at_least():
    torch.manual_seed(0)
    weights, basis = torch.randn(4, 3, 48), torch.randn(48, 25)
    half = Filters(weights.bfloat16(), basis, (5,)).windows()[0]
    exact = (weights.bfloat16().double() @ basis.double()).view(4, 3, 5, 5)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, exact.bfloat16())  # one rounding, of the finished filter


def test_supports_are_where_some_function_is_not_zero():
    basis = torch.zeros(2, 9 + 25)
    basis[0, 4] = basis[1, 1] = 1  # the centre, and the tap above it
    basis[1, 9 + 24] = 2  # the last corner of the larger window
    filters = Filters(torch.zeros(1, 1, 2), basis, (3, 5))
    small, large = filters.supports()
    assert small.nonzero().tolist() == [[1, 2], [2, 2]]
    assert large.nonzero().tolist() == [[4, 4]]
    finished = Filters(torch.ones(1, 1, 2), basis, (3, 5)).finished()
    assert torch.equal(finished.supports(), filters.supports())
