"""Many things in one picture: where they are found, and what is said of a drawing of none, of one and of several."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn

import scalesteer
from scalesteer import ScaleChannels
from scalesteer.app.demo import DemoModel, samples
from scalesteer.app.demo.companions import FINDER
from scalesteer.app.demo.finder import FRAME, Finder, at_usual_size, read, read_light
from scalesteer.app.pictures import PictureError
from tests.app.drawings import draw_seven, to_bytes


class Spots(nn.Module):
    """A network without training: a spot of about 5 pixels is a 7 if it is bright, and a 3 if it is grey."""

    def __init__(self):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        inside, around = F.avg_pool2d(x, 5, 1, 2), F.avg_pool2d(x, 11, 1, 5)
        odds = torch.where(inside > 0.4, 40 * (1 - around / inside.clamp(min=0.4) - 0.6) + 9 * inside, -20.0)
        maps = torch.full((len(x), 11, *x.shape[-2:]), -20.0)
        maps[:, 0] = self.zero
        bright = F.max_pool2d(x, 5, 1, 2) > 0.8
        maps[:, 4:5], maps[:, 8:9] = torch.where(bright, -20.0, odds), torch.where(bright, odds, -20.0)
        return maps


@pytest.fixture
def spots():
    return Finder(ScaleChannels(Spots(), (0.125, 0.25, 0.5, 1.0), "max", grid=(1.0, 0.0)).eval())


def draw(*boxes, side=64):
    """A picture with squares: column, row, side, grey."""
    image = Image.new("L", (side, side))
    for column, row, size, grey in boxes:
        ImageDraw.Draw(image).rectangle((column, row, column + size - 1, row + size - 1), grey)
    return image


def test_what_is_found_is_where_it_is(spots):
    said = spots.describe(read(to_bytes(draw((40, 20, 5, 255), (8, 48, 5, 150)))))
    first, second = said["objects"]
    assert (first["label"], first["row"], first["column"], first["size"], first["side"]) == (7, 22.0, 42.0, 1.0, 28.0)
    assert (second["label"], second["row"], second["column"]) == (3, 50.0, 10.0)
    assert min(first["probability"], second["probability"]) > 0.9
    maps = said["map"]
    assert (maps["height"], maps["width"], maps["stride"], maps["offset"]) == (64, 64, 1.0, 0.0)
    odds, sizes = (np.array(maps[key]).reshape(64, 64) for key in ("odds", "sizes"))
    assert odds[22, 42] > 0.99
    assert odds[0, 0] < 0.01
    assert sizes[22, 42] == 1.0
    assert said["seconds"] >= 0
    assert json.loads(json.dumps(said, allow_nan=False)) == said


def test_a_large_spot_is_a_large_object(spots):
    (found,) = spots.describe(read(to_bytes(draw((24, 24, 10, 180)))))["objects"]
    assert (found["label"], found["size"], found["side"]) == (7, 2.0, 56.0)


def test_the_places_of_a_coarse_map_are_told_in_pixels():
    coarse = nn.Sequential(Spots(), nn.MaxPool2d(4))
    finder = Finder(ScaleChannels(coarse, (0.5, 1.0), "max", grid=(4.0, 1.5)).eval())
    said = finder.describe(read(to_bytes(draw((40, 20, 5, 255)))))
    assert (said["map"]["height"], said["map"]["stride"], said["map"]["offset"]) == (16, 4.0, 1.5)
    (found,) = said["objects"]
    assert (found["row"], found["column"]) == (21.5, 41.5)
    assert found["probability"] > 0.9


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([(100, 100, 60, 255)], ["7"]),
        ([(20, 100, 40, 255), (200, 101, 40, 160)], ["7", "3"]),
        ([(20, 101, 40, 160), (200, 100, 40, 255)], ["3", "7"]),
        ([(10 * k, 30 * (k % 7), 2, 255) for k in range(28)], None),
    ],
)
def test_a_drawing_is_nothing_one_thing_or_several_from_left_to_right(spots, boxes, said):
    assert spots.judge(to_bytes(draw(*boxes, side=280))) == said


@pytest.mark.parametrize(
    ("boxes", "verdict", "note"),
    [
        ([(100, 100, 60, 255)], "one", ""),
        ([(20, 100, 40, 255), (200, 101, 40, 160)], "several", "7 and 3: see the third tab"),
        ([(10, 9, 40, 255), (120, 8, 40, 160), (230, 9, 40, 255)], "several", "7, 3 and 7: see the third tab"),
        ([(10 * k, 30 * (k % 7), 2, 255) for k in range(28)], "unknown", "This is nothing that the network knows."),
    ],
)
def test_an_answer_says_so(spots, boxes, verdict, note):
    demo = DemoModel("digits")
    demo.others.finder, demo.others.has_finder = spots, True
    picture = demo.read(to_bytes(draw(*boxes, side=280)))
    for size in (1.0, 2.0):
        said = demo.answer(picture, size)
        assert (said["verdict"], said["note"]) == (verdict, note)


def test_other_networks_say_so_where_they_are_not_sure():
    demo = DemoModel("garments")
    said = [demo._judge(demo.read(to_bytes(draw_seven())), sure) for sure in (0.49, 0.5)]
    assert said == [("unknown", "This is nothing that the network knows."), ("one", "")]


def test_pictures_are_light_on_black_whatever_they_were():
    light, dark = (read_light(to_bytes(draw_seven(*colours)), 1 << 20) for colours in ((), ("black", "white")))
    torch.testing.assert_close(light, dark, atol=0.02, rtol=0)
    faint = read_light(to_bytes(draw_seven(130, 60)), 1 << 20)
    assert (faint.min(), faint.max()) == (0, 1)


@pytest.mark.parametrize("side", [60, 280, 900])
def test_a_drawing_is_judged_at_one_height_whatever_it_had(side):
    shown = at_usual_size(read_light(to_bytes(draw_seven(side=side)), 1 << 20))
    rows = (shown[0, 0].amax(1) > 0.25).nonzero()[:, 0]
    assert abs(int(rows[-1] - rows[0]) + 1 - 48) <= 1
    assert shown.shape[2] == 48 + 2 * 20


def test_a_line_of_writing_is_judged_in_bounds():
    line = draw((2, 50, 4, 255), (250, 50, 4, 255), side=280)
    assert at_usual_size(read_light(to_bytes(line), 1 << 20)).shape[2:] == (3 + 40, 160 + 40)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.new("L", (513, 9)), "513 x 9 pixels"),
        (Image.new("L", (513, 513)), "limit is 0 megapixels"),
        (Image.new("L", (99, 99), 7), "blank"),
    ],
)
def test_what_cannot_be_searched_is_named(image, message):
    if message.startswith("513 x 9"):
        image.putpixel((4, 4), 255)
    with pytest.raises(PictureError, match=message):
        read(to_bytes(image))


def test_a_picture_of_512_pixels_is_searched(spots):
    image = draw((400, 300, 5, 255), side=512)
    assert [one["row"] for one in spots.describe(read(to_bytes(image)))["objects"]] == [302.0]


def test_the_network_of_the_package_finds_digits_of_three_sizes():
    finder, digits = Finder(scalesteer.from_pretrained(FINDER)), samples.pixels("digits")
    picture = Image.new("L", (256, 256))
    true = {3: (10, 10, 112), 7: (140, 20, 56), 2: (180, 150, 28), 0: (30, 160, 80)}
    for label, (left, top, side) in true.items():
        picture.paste(Image.fromarray(digits[label]).resize((side, side), Image.Resampling.BICUBIC), (left, top))
    found = {one["label"]: one for one in finder.describe(read(to_bytes(picture)))["objects"]}
    assert set(found) == set(true)
    for label, (left, top, side) in true.items():
        assert abs(found[label]["column"] - left - side / 2) < side / 4
        assert abs(found[label]["row"] - top - side / 2) < side / 4
    near = [found[label]["side"] == pytest.approx(side, rel=0.35) for label, (_, _, side) in true.items()]
    assert sum(near) >= 3  # its card: 151 of 160 within a factor of 1.3


def test_the_network_of_the_package_tells_a_digit_from_noise_and_two_of_them():
    finder = Finder(scalesteer.from_pretrained(FINDER))
    judged = [finder.judge(to_bytes(Image.fromarray(one))) for one in samples.pixels("digits")]
    assert sum(said == [str(label)] for label, said in enumerate(judged)) >= 9
    assert finder.judge(to_bytes(draw_seven())) == ["7"]
    assert finder.judge(to_bytes(Image.effect_noise((280, 280), 80))) is None
    three, eight = (np.pad(samples.pixels("digits")[label], FRAME // 4) for label in (3, 8))
    pair = Image.fromarray(np.hstack([three, eight])).resize((500, 250))
    assert finder.judge(to_bytes(pair)) == ["3", "8"]
