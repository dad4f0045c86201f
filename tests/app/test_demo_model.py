"""What the demo's network says: the same as the network itself, of pictures at the sizes that they claim."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

import scalesteer
from scalesteer.app.demo import DemoModel
from scalesteer.app.demo.model import SIZES
from scalesteer.app.pictures import PictureError
from tests.app.drawings import draw_seven, to_bytes


@pytest.fixture(scope="module")
def demo():
    return DemoModel("digits")


@pytest.fixture(scope="module")
def seven(demo):
    return demo.read(to_bytes(draw_seven()))[0]


def saved(tmp_path, **arguments):
    torch.manual_seed(0)
    return DemoModel(scalesteer.save_pretrained(scalesteer.create_model(**arguments).eval(), tmp_path / "saved"))


def test_a_drawing_comes_onto_the_networks_canvas_light_on_dark(demo, seven):
    other, inverted = demo.read(to_bytes(draw_seven("black", "white")))
    assert seven.shape == (1, 28, 28)
    assert inverted
    torch.testing.assert_close(other, seven, atol=0.02, rtol=0)
    rows = seven[0].amax(1).nonzero()[:, 0]
    assert rows[-1] - rows[0] + 1 == 20  # as MNIST's digits


def test_the_picture_at_a_size_is_so_much_larger(demo, seven):
    def height(x):
        rows = (x[0, 0].amax(1) > 0.25).nonzero()[:, 0]
        return int(rows[-1] - rows[0] + 1)

    assert torch.equal(demo.at_size(seven, 1.0)[0], seven)
    for size in SIZES:
        x = demo.at_size(seven, size)
        side = max(28, round(28 * size))
        assert x.shape == (1, 1, side, side)
        assert abs(height(x) - 20 * size) <= 2
        assert 0 <= x.min() <= x.max() <= 1


def test_the_network_says_on_the_page_what_it_says_anywhere(demo, seven):
    said = demo.answer(seven, 2.0)
    model, x = scalesteer.from_pretrained("digits"), demo.at_size(seven, 2.0)
    wider = model.with_scales([0.175, 0.7 / 2**1.5, 0.35, 0.7 / 2**0.5, 0.7, 1.0, 1.4, 1.4 * 2**0.5])
    assert [way["name"] for way in said["ways"]] == ["at one size", "at its own sizes", "at more sizes"]
    for way, look in zip(said["ways"], (model.net, model, wider), strict=True):
        with torch.no_grad():
            chances = look(x)[0].softmax(0)
        assert [one["label"] for one in way["top"]] == chances.argsort(descending=True)[:5].tolist()
        assert way["top"][0]["probability"] == pytest.approx(float(chances.max()), abs=1e-4)
    assert said["ways"][0]["found"] is None
    assert said["ways"][2]["found"] == pytest.approx(wider(x, return_scales=True)[1].item(), abs=1e-3)
    shown = Image.open(io.BytesIO(base64.b64decode(said["picture"].partition(",")[2])))
    assert np.array_equal(np.asarray(shown), (255 * x[0, 0]).round().byte().numpy())


def test_more_sizes_are_what_a_large_object_needs(demo, seven):
    one, _, more = (way["top"][0]["label"] for way in demo.answer(seven, 2.5)["ways"])
    assert more == 7
    assert one != 7
    assert [way["top"][0]["label"] for way in demo.answer(seven, 0.7)["ways"]] == [7, 7, 7]


def test_channels_say_what_each_sees_and_share_the_answer(demo, seven):
    rows = demo.answer(seven, 2.0)["channels"]
    model = demo.ways(28, 28)[-1].model
    assert [row["scale"] for row in rows] == list(model.scales)
    assert [row["pixels"] for row in rows] == [[n, n] for n in (10, 14, 20, 28, 39, 56, 78, 111)]
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-3)
    largest = max(rows, key=lambda row: row["share"])
    assert 0.3 < largest["scale"] < 0.6  # the digit, twice as large, at about its usual size
    assert largest["label"] == 7


def test_shares_are_those_of_the_join(demo, seven, monkeypatch):
    monkeypatch.setattr(demo.model, "join", "max")
    shares = [row["share"] for row in demo.answer(seven, 2.0)["channels"]]
    assert sorted(shares) == [0] * 7 + [1]
    monkeypatch.setattr(demo.model, "join", "mean")
    assert [row["share"] for row in demo.answer(seven, 2.0)["channels"]] == [0.125] * 8


def test_the_curve_agrees_with_the_answers_and_guesses_the_class(demo, seven):
    curve = demo.curve(seven)
    assert curve["sizes"] == list(SIZES)
    assert curve["label"] == 7
    for i in (0, 6, 12):
        said = demo.answer(seven, SIZES[i])
        for line, way in zip(curve["ways"], said["ways"], strict=True):
            best = way["top"][0]
            assert line["name"] == way["name"]
            assert line["chances"][best["label"]][i] == pytest.approx(best["probability"], abs=1e-4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be a PNG or JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "must be a PNG or JPEG"),
        (to_bytes(draw_seven(), "GIF"), "must be a PNG or JPEG"),
        (to_bytes(draw_seven())[:200], "the picture cannot be read"),
        (to_bytes(Image.new("L", (99, 99), 7)), "blank"),
        (b"\x89PNG\r\n\x1a\n" + b"text" * 100, "the picture cannot be read"),
    ],
)
def test_what_is_no_picture_is_named_without_a_path(demo, content, message):
    with pytest.raises(PictureError, match=message) as error:
        demo.read(content)
    assert "/" not in str(error.value).replace("x", "").replace("PNG or JPEG", "")


@pytest.mark.parametrize("mode", ["1", "P", "LA", "RGBA", "CMYK", "I;16"])
def test_pictures_of_every_mode_say_the_same(demo, seven, mode):
    grey = draw_seven()
    if mode == "I;16":
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    else:
        image = grey.convert("L" if mode == "CMYK" else mode)
        image = image.convert("RGB").convert("CMYK") if mode == "CMYK" else image
    content = to_bytes(image, "JPEG" if mode == "CMYK" else "PNG")
    torch.testing.assert_close(demo.read(content)[0], seven, atol=0.35 if mode == "1" else 0.1, rtol=0)


def test_a_photograph_is_read_upright_and_gets_its_own_ground(tmp_path):
    demo = saved(tmp_path, name="pooled-cnn", in_chans=3, num_classes=3, image_size=(32, 32), channels=(0.7, 1.0))
    pixels = np.full((32, 32, 3), (200, 40, 90), np.uint8)
    pixels[4:12, 10:22] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned round by the camera
    picture, inverted = demo.read(to_bytes(Image.fromarray(pixels), "JPEG", quality=95, exif=exif))
    assert not inverted
    assert picture[:, 20:28, 10:22].mean() > 0.95 > picture[:, 4:12].mean()
    small = demo.at_size(picture, 0.5)[0]
    torch.testing.assert_close(small[:, 0, 0], torch.tensor([200, 40, 90]) / 255, atol=0.04, rtol=0)
    assert demo.describe()["draws"] is False
    assert demo.answer(picture, 2.0)["channels"][0]["pixels"] == [11, 11]  # of 64, at 0.7 / 4


def test_a_photograph_of_one_colour_is_blank(tmp_path):
    demo = saved(tmp_path, name="pooled-cnn", in_chans=3, num_classes=3, image_size=(32, 32), channels=(0.7, 1.0))
    with pytest.raises(PictureError, match="the picture is blank: all of it has one colour"):
        demo.read(to_bytes(Image.new("L", (50, 40), 90)))
    two = Image.new("L", (50, 40), 90)
    two.putpixel((25, 20), 200)
    assert demo.read(to_bytes(two))[0].max() > 90 / 255


def test_a_network_for_one_size_of_image_is_shown_as_it_is(tmp_path):
    demo = saved(tmp_path, name="plain-cnn", in_chans=1, num_classes=10, image_size=(28, 28))
    picture = demo.read(to_bytes(draw_seven()))[0]
    assert demo.at_size(picture, 3.0).shape == (1, 1, 28, 28)
    said = demo.answer(picture, 3.0)
    assert [way["name"] for way in said["ways"]] == ["the network"]
    assert said["channels"] == []
    assert len(demo.curve(picture)["sizes"]) == len(SIZES)


def test_what_a_network_cannot_take_is_the_pictures_fault(tmp_path):
    demo = saved(tmp_path, name="pooled-cnn", in_chans=3, num_classes=2, channels=(1.0,))
    tiny = demo.read(to_bytes(Image.effect_noise((4, 4), 50).convert("RGB")))[0]
    with pytest.raises(PictureError, match=r"the picture cannot be used: .*at least 5 x 5"):
        demo.answer(tiny, 1.0)
    with pytest.raises(PictureError, match="cannot be used"):
        demo.curve(tiny)


def test_pictures_that_would_take_too_long_are_refused_and_sizes_left_out(tmp_path, monkeypatch):
    demo = saved(tmp_path, name="pooled-cnn", in_chans=3, num_classes=2, channels=(1.0,))
    rng = np.random.default_rng(0)
    large = Image.fromarray(rng.integers(0, 256, (1200, 1200, 3), np.uint8))
    with pytest.raises(PictureError, match=r"1200 x 1200 pixels at this size.* too large"):
        demo.read(to_bytes(large))
    with monkeypatch.context() as patch:  # and nothing is made before that is known
        patch.setattr("scalesteer.app.demo.model.resize", None)
        with pytest.raises(PictureError, match="too large"):
            demo.answer(torch.zeros(3, 300, 300), 4.0)
    middle = demo.read(to_bytes(large.crop((0, 0, 300, 300))))[0]
    assert 1.0 < demo.curve(middle)["sizes"][-1] < 4.0
