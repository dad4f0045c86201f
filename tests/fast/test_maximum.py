"""Who wins: the two forms of the maximum over scales have one rule."""

import math

import pytest
import torch

from scalesteer.fast.maximum import keep_largest, running_maximum


def in_place(responses):
    best, winner = responses[0].clone(), torch.zeros(responses[0].shape, dtype=torch.uint8)
    keep_largest(best, winner, (response.clone() for response in responses[1:]))
    return best, winner


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_lowest_scale_wins_a_tie(count):
    responses = torch.randint(-2, 3, (count, 4, 5, 6), generator=torch.Generator().manual_seed(count)).float()
    expected = responses.max(0).values
    first = (responses == expected).int().argmax(0)  # of several ones the first
    for best, winner in (in_place(responses), running_maximum(iter(responses), count, return_scales=True)):
        assert torch.equal(best, expected)
        assert torch.equal(winner.long(), first)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_the_largest_window_shows(value):
    responses = torch.zeros(3, 2, 2)
    responses[2, 0, 1] = value
    for best, _ in (in_place(responses), running_maximum(iter(responses), 3)):
        assert torch.equal(best.isfinite(), responses[2].isfinite())
