"""What the demo's network says: the same as the network itself, of pictures at the sizes that they claim."""

import base64
import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import scalesteer
from scalesteer import pretrained
from scalesteer.app.demo import DemoModel
from scalesteer.app.demo.asking import SIZES, by_channel
from scalesteer.app.demo.companions import FINDER, RIVAL, NotHereError
from scalesteer.app.demo.model import Picture
from scalesteer.app.pictures import PictureError
from scalesteer.joining import Calibration
from tests.app.drawings import draw_seven, to_bytes


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A package with small networks in the place of those that are shown beside `digits`, whatever it holds."""
    folder = tmp_path_factory.mktemp("weights")
    for name in ("digits", "garments"):
        shutil.copytree(pretrained.SHIPPED / name, folder / name)
    torch.manual_seed(0)
    scalesteer.save_pretrained(scalesteer.create_model("pooled-cnn", widths=(4, 4, 4)).eval(), folder / RIVAL)
    finding = scalesteer.create_model("pooled-cnn", num_classes=11, widths=(4, 4, 4), subsample=(1, 2), dense=True)
    scalesteer.save_pretrained(finding.with_scales((0.25, 0.5, 1.0, 2.0)).eval(), folder / FINDER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "SHIPPED", folder)
        yield folder


@pytest.fixture(scope="module")
def demo(shipped):
    demo = DemoModel("digits")
    demo.others.finder.find = lambda light: ([], None, None)  # a network that was not trained finds anything
    return demo


@pytest.fixture(scope="module")
def seven(demo):
    return demo.read(to_bytes(draw_seven()))


def saved(tmp_path, **arguments):
    torch.manual_seed(0)
    return DemoModel(scalesteer.save_pretrained(scalesteer.create_model(**arguments).eval(), tmp_path / "saved"))


def test_a_drawing_comes_onto_the_networks_canvas_light_on_dark(demo, seven):
    other = demo.read(to_bytes(draw_seven("black", "white")))
    assert seven.pixels.shape == (1, 28, 28)
    assert (seven.inverted, other.inverted) == (False, True)
    assert demo.answer(other, 1.0)["inverted"]
    torch.testing.assert_close(other.pixels, seven.pixels, atol=0.02, rtol=0)
    rows = seven.pixels[0].amax(1).nonzero()[:, 0]
    assert rows[-1] - rows[0] + 1 == 20  # as MNIST's digits


def test_the_picture_at_a_size_is_so_much_larger(demo, seven):
    def height(x):
        rows = (x[0, 0].amax(1) > 0.25).nonzero()[:, 0]
        return int(rows[-1] - rows[0] + 1)

    assert torch.equal(demo.at_size(seven, 1.0)[0], seven.pixels)
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
    assert [(way["key"], way["name"]) for way in said["ways"]] == [
        ("rival", "plain network, trained with random resizing"),
        ("once", "ours, looking once"),
        ("several", "ours, looking at 8 sizes"),
    ]
    for way, look in zip(said["ways"], (scalesteer.from_pretrained(RIVAL), model.net, wider), strict=True):
        with torch.no_grad():
            chances = look(x)[0].softmax(0)
        assert [one["label"] for one in way["top"]] == chances.argsort(descending=True)[:5].tolist()
        assert way["top"][0]["probability"] == pytest.approx(float(chances.max()), abs=1e-4)
    assert [way["found"] for way in said["ways"][:2]] == [None, None]
    assert [way["measured"] for way in said["ways"][:2]] == [None, None]
    found, usual = (wider(y, return_scales=True)[1].item() for y in (x, demo.at_size(seven, 1.0)))
    assert said["ways"][2]["found"] == pytest.approx(found, abs=1e-3)
    assert said["ways"][2]["measured"] == pytest.approx(found / usual, abs=1e-3)
    shown = Image.open(io.BytesIO(base64.b64decode(said["picture"].partition(",")[2])))
    assert np.array_equal(np.asarray(shown), (255 * x[0, 0]).round().byte().numpy())


@pytest.mark.parametrize("options", [{"sure": 0.9}, {"multiple": 4}, {"join": "softmax"}, {"join": "confident"}])
def test_channels_of_every_kind_say_what_they_say_anywhere(tmp_path, seven, options):
    demo = saved(tmp_path, name="pooled-cnn", image_size=(28, 28), channels=(0.5, 1.0, 2.0), **options)
    said, x = demo.answer(seven, 1.5), demo.at_size(seven, 1.5)
    for way, wanted in zip(said["ways"], demo.ways(28, 28), strict=True):
        with torch.no_grad():
            chances = wanted.model(x)[0].softmax(0)
        assert way["top"][0]["probability"] == pytest.approx(float(chances.max()), abs=1e-4)
        if way["key"] != "once":
            assert way["found"] == pytest.approx(wanted.model(x, return_scales=True)[1].item(), abs=1e-3)
    assert sum(row["share"] for row in said["channels"]) == pytest.approx(1, abs=1e-3)


def test_shares_are_of_calibrated_channels(tmp_path, seven):
    plain = scalesteer.create_model("pooled-cnn", image_size=(28, 28), channels=(0.5, 1.0)).eval()
    plain.calibration = Calibration((1.0, 1.0), (0.0, 50.0))
    demo = DemoModel(scalesteer.save_pretrained(plain, tmp_path / "saved"), channels=(0.5, 1.0))
    said = demo.answer(seven, 1.0)
    own = {"channels": said["channels"], "more": demo.ways(28, 28)[-1].model.calibration}
    # Sizes beyond those that were calibrated are not: the last way leaves it out.
    assert own["more"] is None
    assert demo.ways(28, 28)[1].model.calibration is not None
    rows = by_channel(demo.model.ask_channels(demo.at_size(seven, 1.0)), demo.model, demo.at_size(seven, 1.0), 0)
    assert [row["share"] for row in rows] == [0.0, 1.0]


def test_more_sizes_are_what_a_large_object_needs(demo, seven):
    _, once, several = (way["top"][0]["label"] for way in demo.answer(seven, 2.5)["ways"])
    assert several == 7
    assert once != 7
    assert [way["top"][0]["label"] for way in demo.answer(seven, 0.7)["ways"][1:]] == [7, 7]
    for size in (1.0, 1.41, 2.0, 2.83, 4.0):  # it also measures how much larger the digit became
        assert demo.answer(seven, size)["ways"][-1]["measured"] == pytest.approx(size, rel=0.15)


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
            assert (line["key"], line["name"]) == (way["key"], way["name"])
            assert (line["found"] and line["found"][i]) == way["found"]
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
    torch.testing.assert_close(demo.read(content).pixels, seven.pixels, atol=0.35 if mode == "1" else 0.1, rtol=0)


def test_a_photograph_is_read_upright_and_gets_its_own_ground(tmp_path):
    demo = saved(tmp_path, name="pooled-cnn", in_chans=3, num_classes=3, image_size=(32, 32), channels=(0.7, 1.0))
    pixels = np.full((32, 32, 3), (200, 40, 90), np.uint8)
    pixels[4:12, 10:22] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned round by the camera
    picture = demo.read(to_bytes(Image.fromarray(pixels), "JPEG", quality=95, exif=exif))
    assert not picture.inverted
    assert picture.pixels[:, 20:28, 10:22].mean() > 0.95 > picture.pixels[:, 4:12].mean()
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
    assert demo.read(to_bytes(two)).pixels.max() > 90 / 255


def test_a_network_for_one_size_of_image_is_shown_as_it_is(tmp_path):
    demo = saved(tmp_path, name="plain-cnn", in_chans=1, num_classes=10, image_size=(28, 28))
    picture = demo.read(to_bytes(draw_seven()))
    assert demo.at_size(picture, 3.0).shape == (1, 1, 28, 28)
    said = demo.answer(picture, 3.0)
    assert [way["name"] for way in said["ways"]] == ["the network"]
    assert said["channels"] == []
    assert len(demo.curve(picture)["sizes"]) == len(SIZES)


def test_what_a_network_cannot_take_is_the_pictures_fault(tmp_path):
    demo = saved(tmp_path, name="pooled-cnn", in_chans=3, num_classes=2, channels=(1.0,))
    tiny = demo.read(to_bytes(Image.effect_noise((4, 4), 50).convert("RGB")))
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
        patch.setattr("scalesteer.app.demo.asking.resize", None)
        with pytest.raises(PictureError, match="too large"):
            demo.answer(Picture(torch.zeros(3, 300, 300), False), 4.0)
    middle = demo.read(to_bytes(large.crop((0, 0, 300, 300))))
    assert 1.0 < demo.curve(middle)["sizes"][-1] < 4.0


def test_a_picture_that_is_asked_again_is_read_once(demo, monkeypatch):
    content = to_bytes(draw_seven(side=260))
    first = demo.read(content)
    monkeypatch.setattr(demo, "read_file", None)
    assert demo.read(content) is first
    monkeypatch.undo()
    for side in range(100, 120):
        demo.read(to_bytes(draw_seven(side=side)))
    assert len(demo._kept) == 8
    assert demo.read(content) is not first


def test_garments_and_runs_of_ones_own_have_no_rival(shipped, tmp_path):
    garments = DemoModel("garments")
    assert [(way.key, way.name) for way in garments.ways(28, 28)] == [
        ("once", "looking once"),
        ("own", "looking at 3 sizes"),
        ("several", "looking at 8 sizes"),
    ]
    shutil.copytree(shipped / "digits", tmp_path / "digits")  # a folder with a network for digits
    assert [way.key for way in DemoModel(tmp_path / "digits").ways(28, 28)] == ["once", "own", "several"]


def test_what_did_not_come_with_the_package_is_left_out(shipped, tmp_path, monkeypatch, seven):
    for name in ("digits", "garments"):
        shutil.copytree(shipped / name, tmp_path / name)
    monkeypatch.setattr(pretrained, "SHIPPED", tmp_path)
    demo = DemoModel("digits")
    told = demo.describe()
    assert (told["steering"], told["finder"]) == (False, False)
    assert [way["key"] for way in told["ways"]] == ["once", "own", "several"]
    assert demo.answer(Picture(seven.pixels, False, seven.content), 1.0)["verdict"] == "one"
    for thing in demo.warm_up():
        thing()
    with pytest.raises(NotHereError, match="no network with steerable filters"):
        demo.filters()
    with pytest.raises(NotHereError, match="finds digits is not here"):
        demo.find(to_bytes(draw_seven()))


def test_a_network_of_ones_own_with_steered_filters_shows_them(shipped, tmp_path):
    demo = saved(tmp_path, name="steered-cnn", widths=(3, 4, 4), image_size=(28, 28))
    assert demo.describe()["steering"]
    assert demo.filters()["network"] == "saved"
    assert len(demo.filters()["coefficients"]["smooth"]) == 3


def test_a_page_is_told_what_it_should_know(demo):
    told = demo.describe()
    assert told["name"] == "digits"
    assert told["classes"] == [str(digit) for digit in range(10)]
    assert (told["draws"], told["digits"], told["finder"]) == (True, True, True)
    assert [way["key"] for way in told["ways"]] == ["rival", "once", "several"]
    assert told["sizes"] == list(SIZES)
    assert [sample["label"] for sample in told["samples"]] == list(range(10))
    assert json.loads(json.dumps(told, allow_nan=False)) == told


@pytest.mark.parametrize("name", ["digits", "garments"])
def test_sample_pictures_are_what_they_are_called(shipped, name):
    demo = DemoModel(name)
    demo.others.has_finder = False
    for sample in demo.describe()["samples"]:
        picture = demo.read(base64.b64decode(sample["picture"].partition(",")[2]))
        said = demo.answer(picture, 1.0)
        assert said["ways"][-1]["top"][0]["label"] == sample["label"]
        assert said["verdict"] == "one"


def test_a_run_shows_its_own_pictures_for_testing(tmp_path, monkeypatch):
    old = Path(__file__).parent / "old_runs" / "pictures"
    shutil.copytree(old, tmp_path / "run")
    rows = list(csv.DictReader((old / "split.csv").read_text().splitlines()))
    tests = [row for row in rows if row["part"] == "test"]
    for row in rows:
        path = tmp_path / "photos" / row["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((30, 700) if row is tests[0] else (30, 20), 60).convert("RGB").save(path)
    monkeypatch.chdir(tmp_path)  # where the run was made: it names its folder as it was given
    demo = DemoModel(tmp_path / "run")
    shown = demo.describe()["samples"]
    assert 0 < len(shown) == min(12, len(tests))
    assert {sample["label"] for sample in shown} == {demo.classes.index(row["label"]) for row in tests}
    sizes = [Image.open(io.BytesIO(base64.b64decode(one["picture"].partition(",")[2]))).size for one in shown]
    assert set(sizes) == {(30, 20), (22, 512)}
    (tmp_path / "photos" / tests[0]["path"]).write_bytes(b"no picture any more")
    assert len(DemoModel(tmp_path / "run").describe()["samples"]) == len(shown) - 1
    (tmp_path / "run" / "split.csv").write_bytes(b"path,label\n")
    assert DemoModel(tmp_path / "run").describe()["samples"] == []
    (tmp_path / "run" / "split.csv").unlink()
    assert DemoModel(tmp_path / "run").describe()["samples"] == []
