import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from scalesteer.app.augment import Augmentation, resample


def looked_up(image, row, column, mirrored):
    """A pixel of an image that goes on for ever."""
    places = []
    for index, size in zip((row, column), image.shape, strict=True):
        if not 0 <= index < size:
            if not mirrored:
                return 0.0
            index %= 2 * size
            index = index if index < size else 2 * size - 1 - index
        places.append(index)
    return image[tuple(places)]


def resampled(image, factor, turn, move, mirrored):
    """One image, pixel by pixel: averages under triangles, about the centre."""
    height, width = image.shape
    reach = max(1.0, 1 / factor)
    result = np.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y = (row - (height - 1) / 2 - move[0]) / factor + (height - 1) / 2
            x = turn * (column - (width - 1) / 2 - move[1]) / factor + (width - 1) / 2
            total = share = 0.0
            for i in range(math.ceil(y - reach), math.floor(y + reach) + 1):
                for j in range(math.ceil(x - reach), math.floor(x + reach) + 1):
                    weight = (1 - abs(i - y) / reach) * (1 - abs(j - x) / reach)
                    total, share = total + weight * looked_up(image, i, j, mirrored), share + weight
            result[row, column] = total / share
    return result


@pytest.mark.parametrize("mirrored", [False, True])
def test_resampling_is_the_average_under_a_triangle(mirrored):
    x = torch.rand(5, 2, 6, 7, dtype=torch.float64)
    factors, turns = torch.tensor([0.4, 0.7, 1.0, 1.3, 2.5]).double(), torch.tensor([1, -1, -1, 1, -1])
    moves = torch.tensor([[-2, 1, -2, 2, 0], [2, 2, 0, 1, -2]]).double()
    found = resample(x, torch.stack([factors, factors * turns]), moves, 0.4, 2, mirrored)
    for i, channel in np.ndindex(5, 2):
        expected = resampled(
            x[i, channel].numpy(), float(factors[i]), int(turns[i]), moves[:, i].tolist(), mirrored
        )  # fmt: skip
        np.testing.assert_allclose(found[i, channel], expected, atol=1e-12)


def test_shrinking_by_a_whole_factor_is_torchs_antialiased_resizing():
    x = torch.rand(1, 1, 32, 32)
    small = F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True)
    found = resample(x, torch.full((2, 1), 0.5), torch.zeros(2, 1), 0.5, 0, False)
    torch.testing.assert_close(found[..., 9:-9, 9:-9], small[..., 1:-1, 1:-1])  # at the border torch sees no black
    assert not found[..., :7, :].any()


def test_shrinking_with_aliasing_reads_between_two_pixels_as_torchs_plain_resizing():
    x = torch.rand(1, 1, 32, 32)
    small = F.interpolate(x, scale_factor=0.25, mode="bilinear", antialias=False)
    found = resample(x, torch.full((2, 1), 0.25), torch.zeros(2, 1), 0.25, 0, False, antialias=False)
    torch.testing.assert_close(found[..., 12:-12, 12:-12], small)
    with_average = drawn(Augmentation((0.25, 0.25)), x)
    torch.testing.assert_close(drawn(Augmentation((0.25, 0.25), antialias=False), x), found)
    assert not torch.allclose(with_average, found)


def test_a_share_of_the_images_is_resized_by_factors_of_the_whole_range():
    x = torch.zeros(2000, 1, 17, 17)
    x[:, :, 4:-4, 4:-4] = 1  # nine pixels wide, so that the sum tells the factor
    factors = (drawn(Augmentation((0.5, 1.5), share=0.25), x).sum(dim=(1, 2, 3)) / 81).sqrt()
    resized = (factors - 1).abs() > 1e-6
    torch.testing.assert_close(resized.float().mean(), torch.tensor(0.25), atol=0.03, rtol=0)
    assert factors.min() < 0.53
    assert factors.max() > 1.44
    torch.testing.assert_close(factors[resized].log().mean().exp(), torch.tensor(0.75**0.5), atol=0.05, rtol=0)


@pytest.mark.parametrize("mirrored", [False, True])
def test_factors_above_one_only_enlarge_what_is_in_the_middle(mirrored):
    x = torch.rand(3, 1, 16, 16)
    found = drawn(Augmentation((2.0, 2.0), mirrored=mirrored), x)
    large = F.interpolate(x, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(found, large[..., 8:-8, 8:-8])
    assert drawn(Augmentation((1.5, 2.0), share=0.5, mirrored=mirrored), x).isfinite().all()


def drawn(augmentation, x):
    torch.manual_seed(3)
    return augmentation(x)


def test_nothing_to_change_leaves_images_exactly_as_they_are():
    x = torch.rand(4, 3, 9, 8)
    assert torch.equal(Augmentation(mirrored=True)(x), x)
    assert torch.equal(Augmentation()(x), x)


def test_half_of_the_images_are_flipped():
    x = torch.rand(400, 1, 5, 6)
    found = drawn(Augmentation(flip=True), x)
    flipped = (found == x.flip(3)).flatten(1).all(1)
    assert ((found == x).flatten(1).all(1) ^ flipped).all()
    assert 160 < flipped.sum() < 240


def test_moves_are_of_whole_pixels_up_to_the_largest_all_alike():
    x = torch.zeros(2500, 1, 9, 9)
    x[:, :, 4, 4] = 1
    found = drawn(Augmentation(shift=2), x)[:, 0]
    assert torch.equal(found.sum((1, 2)), torch.ones(2500))
    counts = found.sum(0)[2:7, 2:7]
    assert counts.sum() == 2500
    assert counts.min() > 60  # of 100 expected
    assert counts.max() < 140


def test_factors_are_even_on_a_logarithmic_scale():
    x = torch.zeros(2000, 1, 41, 41)
    x[:, :, 15:26, 15:26] = 1
    found = drawn(Augmentation(resize=(0.5, 2.0)), x)
    factors = (found.sum((1, 2, 3)).sqrt() / 11).double().numpy()  # its side, in pixels, over the square's
    assert 0.49 < factors.min() < 0.51
    assert 1.97 < factors.max() < 2.03
    shares = np.histogram(np.log2(factors), np.linspace(-1, 1, 9))[0] / 2000
    np.testing.assert_allclose(shares, 1 / 8, atol=0.03)


def test_colour_is_kept_by_mirrored_borders_and_not_by_black_ones():
    x = torch.full((3, 3, 8, 8), 0.5)
    torch.testing.assert_close(Augmentation((0.3, 0.5), shift=3, mirrored=True)(x), x)
    assert Augmentation((0.3, 0.5))(x)[..., 0, 0].max() == 0


def test_draws_follow_torchs_generator():
    x, change = torch.rand(4, 1, 8, 8), Augmentation((0.5, 2.0), flip=True, shift=2)
    first = drawn(change, x)
    assert torch.equal(first, drawn(change, x))
    assert not torch.equal(first, change(x))


@pytest.mark.gpu
def test_recorded_changes_are_new_at_every_replay():
    from scalesteer.app.device import capture, warm_up

    x, change = torch.rand(4, 3, 8, 8, device="cuda"), Augmentation((0.5, 2.0), flip=True, shift=2, mirrored=True)
    warm_up(lambda: change(x))
    graph, found = capture(lambda: change(x))
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(found.clone())
    assert not torch.equal(*seen)
