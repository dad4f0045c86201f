"""Objects in maps, against loops over pixels."""

import math

import numpy as np
import pytest
import torch

from scalesteer.instances import find_centres, find_regions, label_regions


def greedy(scores, sizes, extent, stride, offset, threshold):
    """The rule of `find_centres` in a loop over places."""
    left = {(i, j): float(scores[:, i, j].max()) for i in range(scores.shape[1]) for j in range(scores.shape[2])}
    found = []
    while left and max(left.values()) > threshold:
        i, j = max(left, key=left.get)
        found.append((int(scores[:, i, j].argmax()), offset + i * stride, offset + j * stride, float(sizes[i, j])))
        reach = max(stride, 0.45 * extent * float(sizes[i, j]))
        left = {p: v for p, v in left.items() if max(abs(p[0] - i), abs(p[1] - j)) * stride > reach}
    return found


def test_centres_are_those_of_a_loop_over_places():
    generator = torch.Generator().manual_seed(0)
    for stride, offset, extent in ((1, 0.0, 5.0), (4, 1.5, 28.0)):
        scores = torch.randn(3, 15, 20, generator=generator)
        sizes = 2 ** torch.randn(15, 20, generator=generator)
        found = find_centres(scores, sizes, extent, stride=stride, offset=offset, threshold=0.3)
        expected = greedy(scores, sizes, extent, stride, offset, 0.3)
        assert len(found) > 3
        assert [(c.label, c.row, c.column, c.size) for c in found] == expected
        assert [c.score for c in found] == sorted((c.score for c in found), reverse=True)
        assert not find_centres(scores, sizes, extent, threshold=99.0)


def flood(mask):
    """Labels of the connected regions of each class, pixel by pixel."""
    labels, count = np.zeros(mask.shape, int), 0
    for start in zip(*np.nonzero(mask), strict=True):
        if labels[start]:
            continue
        count += 1
        todo = [start]
        while todo:
            i, j = todo.pop()
            inside = 0 <= i < mask.shape[0] and 0 <= j < mask.shape[1]
            if not inside or labels[i, j] or mask[i, j] != mask[start]:
                continue
            labels[i, j] = count
            todo += [(i + a, j + b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
    return labels


def test_regions_are_those_of_a_flood_fill():
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 3, (18, 23)) * (rng.random((18, 23)) < 0.5)
    sizes = rng.random(mask.shape)
    image, regions = find_regions(mask, sizes)
    expected = flood(mask)
    assert np.array_equal(image, expected)
    for number, region in enumerate(regions, start=1):
        y, x = np.nonzero(expected == number)
        assert region.label == mask[y[0], x[0]]
        assert (region.row, region.column) == pytest.approx((y.mean(), x.mean()))
        assert (region.area, region.height, region.width) == (len(y), y.max() - y.min() + 1, x.max() - x.min() + 1)
        assert region.size == pytest.approx(np.median(sizes[y, x]))


def test_small_regions_and_the_background_are_left_out():
    mask = np.full((6, 6), 7)
    mask[0, 0], mask[3:5, 3:5] = 1, 2
    image, regions = find_regions(mask, background=7, least=2)
    assert [(region.label, region.area, region.size) for region in regions] == [(2, 4, 1.0)]
    assert image.sum() == 4
    empty, none = find_regions(np.zeros((4, 4), int))
    assert not empty.any()
    assert none == []


def test_a_gap_joins_what_is_near():
    inside = np.zeros((5, 12), bool)
    inside[2, [0, 3, 9]] = True
    assert len(set(label_regions(inside)[2])) == 3
    assert label_regions(inside, gap=1)[2].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_centres(torch.zeros(4, 4), torch.zeros(4, 4), 5), r"`scores` must have shape \(classes, h, w\)"),
        (lambda: find_centres(torch.zeros(1, 4, 4), torch.zeros(4, 5), 5), r"`sizes` \(h, w\)"),
        (lambda: find_centres(torch.zeros(1, 4, 4), torch.zeros(4, 4), 0), r"`extent` must be positive \(got 0\)"),
        (
            lambda: find_centres(torch.zeros(1, 4, 4), torch.zeros(4, 4), 1, stride=-math.pi),
            "`stride` must be positive",
        ),
        (lambda: find_regions(np.zeros((2, 3, 3))), r"`classes` must have shape \(H, W\)"),
        (lambda: find_regions(np.zeros((3, 3), int), least=0), "`least` must be at least 1"),
    ],
)
def test_what_cannot_be_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
