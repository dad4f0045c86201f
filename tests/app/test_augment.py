import math
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from scalesteer.app.augment import Augmentation, blur, border_colour, change_colours, resample, rotate
from scalesteer.app.pictures import read_picture
from scalesteer.app.settings import Beyond

BEYOND = get_args(Beyond)


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


@pytest.mark.parametrize("beyond", BEYOND)
def test_factors_above_one_only_enlarge_what_is_in_the_middle(beyond):
    x = torch.rand(3, 1, 16, 16)
    found = drawn(Augmentation((2.0, 2.0), beyond=beyond), x)
    large = F.interpolate(x, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(found, large[..., 8:-8, 8:-8])
    assert drawn(Augmentation((1.5, 2.0), share=0.5, beyond=beyond), x).isfinite().all()


def drawn(augmentation, x):
    torch.manual_seed(3)
    return augmentation(x)


def test_nothing_to_change_leaves_images_exactly_as_they_are():
    x = torch.rand(4, 3, 9, 8)
    assert all(torch.equal(Augmentation(beyond=beyond)(x), x) for beyond in BEYOND)


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


@pytest.mark.parametrize("beyond", ["border", "mirror"])
def test_one_colour_is_kept_by_all_but_black_borders(beyond):
    x = torch.full((3, 3, 8, 8), 0.5)
    torch.testing.assert_close(Augmentation((0.3, 0.5), shift=3, rotate=45, beyond=beyond)(x), x)
    assert Augmentation((0.3, 0.5))(x)[..., 0, 0].max() == 0


@pytest.mark.parametrize("shape", [(16, 30), (30, 16), (14, 14), (32, 32)])
def test_a_padded_picture_is_shrunk_as_before_it_was_padded(tmp_path, shape):
    """No copy of it appears: around the small picture there is what the reader pads with."""
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    canvas = torch.from_numpy(read_picture(tmp_path / "picture.png", 3, (32, 32)))[None].float()
    alone = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    ground = canvas[..., 0, 0] if shape != (32, 32) else border_colour(canvas)[..., 0, 0]
    wide = ground[..., None, None] * torch.ones(96, 96)  # room for all that a pixel at the border averages
    top, left = ((96 - length) // 2 for length in shape)
    wide[..., top : top + shape[0], left : left + shape[1]] = alone
    small = F.interpolate(wide, scale_factor=0.5, mode="bilinear", antialias=True)
    torch.testing.assert_close(Augmentation((0.5, 0.5), beyond="border")(canvas), small[..., 8:-8, 8:-8])


def test_border_colour_is_that_of_most_of_the_border():
    x = torch.rand(2, 3, 6, 9)
    x[:, :, :, [0, -1]] = x[:, :, [0], :] = torch.tensor([0.25, 0.5, 0.75])[:, None, None]
    assert border_colour(x).flatten(1).tolist() == [[0.25, 0.5, 0.75]] * 2
    x[:, :, 1:-1, 1:-1] = 0  # what is inside has no say
    assert border_colour(x).flatten(1).tolist() == [[0.25, 0.5, 0.75]] * 2


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("shape", [(6, 9), (7, 7)])
def test_turning_reads_between_the_four_pixels_around_each_place(shape, mirrored):
    x, angles = torch.rand(3, 2, *shape, dtype=torch.float64), torch.tensor([0.4, -2.0, 3.0]).double()
    found = rotate(x, angles, mirrored)
    height, width = found.shape[-2:]
    assert min(height, width) >= math.hypot(*shape)
    for i, row, column in np.ndindex(3, height, width):
        down, right = row - (height - 1) / 2, column - (width - 1) / 2
        cos, sin = math.cos(angles[i]), math.sin(angles[i])
        y, x_ = cos * down - sin * right + (shape[0] - 1) / 2, sin * down + cos * right + (shape[1] - 1) / 2
        expected = sum(
            (1 - abs(y - j)) * (1 - abs(x_ - k)) * looked_up(x[i, 0].numpy(), j, k, mirrored)
            for j in (math.floor(y), math.floor(y) + 1)
            for k in (math.floor(x_), math.floor(x_) + 1)
        )
        assert found[i, 0, row, column].item() == pytest.approx(expected, abs=1e-9)


def test_turning_by_a_right_angle_moves_pixels_and_keeps_the_corners_of_enlarged_images():
    x = torch.rand(1, 1, 8, 8)
    turned = rotate(x, torch.tensor([math.pi / 2]), False)
    torch.testing.assert_close(turned[..., 2:-2, 2:-2], x.rot90(-1, (2, 3)), atol=1e-5, rtol=0)
    angles = rotate(torch.ones(64, 1, 8, 8), torch.linspace(-3, 3, 64), False).sum((1, 2, 3))
    torch.testing.assert_close(angles, torch.full((64,), 64.0), atol=2, rtol=0)  # nothing is cut off


def test_images_are_turned_by_angles_up_to_the_largest_to_both_sides():
    x = torch.zeros(500, 1, 41, 41)
    x[..., 20, 20:39] = 1  # a hand that points to the right
    places = torch.arange(41.0) - 20
    found = drawn(Augmentation(rotate=30), x)
    down, right = ((found * along).sum((1, 2, 3)) for along in (places[:, None], places))
    angles = torch.rad2deg(torch.atan2(down, right))
    shares = np.histogram(angles, np.linspace(-30.5, 30.5, 5))[0] / 500
    np.testing.assert_allclose(shares, 1 / 4, atol=0.07)


def test_colours_change_by_factors_and_stay_colours():
    x = torch.rand(4, 3, 5, 5) * 0.4 + 0.3
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    grey = (weights * x).sum(1, keepdim=True)
    factors = torch.ones(3, 4)
    assert torch.allclose(change_colours(x, factors), x)
    brighter, contrasted, greyer = (factors.clone().index_fill_(0, torch.tensor(i), 0.5) for i in range(3))
    torch.testing.assert_close(change_colours(x, brighter), x / 2)
    torch.testing.assert_close(change_colours(x, contrasted), (x + grey.mean((2, 3), keepdim=True)) / 2)
    torch.testing.assert_close(change_colours(x, greyer), (x + grey) / 2)
    assert change_colours(x, 4 * factors).amax() == 1
    found = drawn(Augmentation(colour=0.4), x[:, :1].expand(4, 2, 5, 5))  # of other numbers of channels, too
    assert found.shape == (4, 2, 5, 5)


def test_blur_is_a_gaussian_that_keeps_one_colour():
    x, deviations = torch.zeros(2, 1, 21, 21), torch.tensor([0.0, 1.5])
    x[..., 10, 10] = 1
    found = blur(x, deviations)
    torch.testing.assert_close(found[0], x[0])
    expected = np.exp(-(np.arange(-4, 5) ** 2) / (2 * 1.5**2))
    np.testing.assert_allclose(found[1, 0, 10, 6:15] / found[1, 0, 10, 10], expected, rtol=1e-4)
    torch.testing.assert_close(blur(torch.ones(2, 1, 21, 21), deviations), torch.ones(2, 1, 21, 21))


def test_draws_follow_torchs_generator():
    x, change = torch.rand(4, 1, 8, 8), Augmentation((0.5, 2.0), flip=True, shift=2, rotate=20, colour=0.2, blur=1.0)
    first = drawn(change, x)
    assert torch.equal(first, drawn(change, x))
    assert not torch.equal(first, change(x))


@pytest.mark.gpu
def test_recorded_changes_are_new_at_every_replay():
    from scalesteer.app.device import capture, warm_up

    x, change = (
        torch.rand(4, 3, 8, 8, device="cuda"),
        Augmentation((0.5, 2.0), flip=True, shift=2, beyond="border", rotate=20, colour=0.2, blur=1.0),
    )
    warm_up(lambda: change(x))
    graph, found = capture(lambda: change(x))
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(found.clone())
    assert not torch.equal(*seen)
