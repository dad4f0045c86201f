import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalesteer.app import load, load_model, tiles
from scalesteer.app import predict as predicting
from scalesteer.app.drawings import fit_drawing
from scalesteer.app.maps import answer_maps, without_readout
from scalesteer.app.pictures import PictureError, read_picture
from scalesteer.app.predict import (
    Prediction,
    choose_fit,
    columns,
    describe,
    find_files,
    predict_files,
    remarks,
    to_sentence,
)
from scalesteer.models import create_model, network_of
from scalesteer.models.network import FITS


@pytest.fixture
def bar():
    """A light bar, 40 x 10, on a black ground of 100 x 60, off the centre."""
    image = np.zeros((100, 60), np.uint8)
    image[50:90, 5:15] = 200
    return image


def save(tmp_path, image, name="x.png", **options):
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(tmp_path / name, **options)
    return tmp_path / name


def predict(model, path):
    ((_, said),) = predict_files(model, [path])
    return said


def fitting(model, fit):
    """The model, told that its images have surroundings and how pictures are fitted."""
    network_of(model).task = network_of(model).task._replace(fit=fit, ground="surroundings")
    return model


def test_images_of_a_dataset_are_classified_as_in_evaluation(cache, undisturbed, tiny, tmp_path):
    model = load_model(undisturbed)
    images = load(tiny, "test")
    for index in range(8):
        path = save(tmp_path, images.images[index].numpy())
        with torch.no_grad():
            shares = model(images[index][0][None]).softmax(1)[0]
        said = predict(model, path)
        assert (said.label, said.inverted, said.scale) == (int(shares.argmax()), False, None)
        assert said.confidence == pytest.approx(float(shares.max()), abs=1e-6)


def test_winning_scale_is_that_of_the_largest_response(tmp_path, bar):
    model = create_model("ss-cnn", upsample=1).eval()
    said = predict(model, save(tmp_path, bar))
    x = torch.from_numpy(fit_drawing(bar, (28, 28))[0]).float()[None, None] / 255
    layer = model.first.double()
    layer.reset_buffers()
    stack = [
        torch.nn.functional.conv2d(x.double(), filters, padding=filters.shape[-1] // 2) for filters in layer.filters()
    ]  # one map a scale; the bias does not change which scale wins, but which channel does
    stack = torch.stack(stack) + layer.bias.view(1, 1, -1, 1, 1)
    assert said.scale == layer.scales[int(stack.amax(dim=(1, 2, 3, 4)).argmax())]


def test_network_with_channels_says_the_size_that_answered(tmp_path, bar):
    model = create_model("pooled-cnn", "stir-mnist", channels=(0.5, 1.0), widths=(2, 3), kernel_size=3).eval()
    said = predict(model, save(tmp_path, bar))
    x = torch.from_numpy(fit_drawing(bar, (64, 64))[0]).float()[None, None] / 255
    with torch.no_grad():
        logits, size = model(x, return_scales=True)
    assert (said.label, said.scale, said.size) == (int(logits.argmax()), None, pytest.approx(float(size)))
    assert predict(model.net, save(tmp_path, bar)).size is None


def test_photograph_is_resized_and_cut_for_a_model_of_colour(tmp_path):
    model = create_model("pooled-cnn", "rescaled-cifar10", widths=(2, 3), kernel_size=3).eval()
    colours = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    with torch.no_grad():
        shares = model(torch.from_numpy(colours).permute(2, 0, 1)[None] / 255).softmax(1)[0]
    said = predict(model, save(tmp_path, colours))
    assert (said.label, said.inverted) == (int(shares.argmax()), False)
    assert said.confidence == pytest.approx(float(shares.max()), abs=1e-6)
    wide = np.zeros((100, 300, 3), np.uint8)
    wide[:, 100:200] = (200, 30, 60)
    read = predicting.reader(model)
    assert (read(save(tmp_path, wide))[0][:, :, 2:-2] == [[[200]], [[30]], [[60]]]).all()  # the middle is kept


def test_another_network_is_refused(tmp_path, bar):
    with pytest.raises(TypeError, match="must be a network of create_model"):
        predict(torch.nn.Identity(), save(tmp_path, bar))


def test_fitted_image_is_centred_and_of_mnists_size(bar):
    image, inverted = fit_drawing(bar, (28, 28))
    rows, columns = (np.flatnonzero(image.any(axis)) for axis in (1, 0))
    assert (rows[0], rows[-1]) == (4, 23)  # 20 pixels high, as a digit of MNIST
    assert (columns[0], columns[-1]) == (11, 15)  # a quarter as wide
    assert image.max() == 255
    assert not inverted
    assert fit_drawing(bar, (28, 40))[0].shape == (28, 40)


@pytest.mark.parametrize("ground", [255, 230, 180])
def test_dark_on_light_is_inverted(bar, ground):
    dark = np.where(bar > 0, 20, ground).astype(np.uint8)
    image, inverted = fit_drawing(dark, (28, 28))
    assert inverted
    np.testing.assert_array_equal(image, fit_drawing(bar, (28, 28))[0])


@pytest.mark.parametrize("size", [(28, 28), (300, 200), (1, 1), (3, 500)])
def test_blank_image_says_so(size):
    with pytest.raises(PictureError, match=r"x\.png is blank"):
        fit_drawing(np.full(size, 200, np.uint8), (28, 28), "x.png")


@pytest.mark.parametrize(
    ("ground", "ink", "blank"), [(0, 15, True), (0, 16, False), (250, 235, True), (250, 234, False)]
)
def test_what_hardly_differs_from_its_background_is_blank(ground, ink, blank):
    grey = np.full((60, 100), ground, np.uint8)
    grey[20:40, 30:50] = ink
    if blank:
        with pytest.raises(PictureError, match="is blank: nothing in it differs from its background"):
            fit_drawing(grey, (28, 28))
    else:
        assert fit_drawing(grey, (28, 28))[0].max() == 255


@pytest.mark.parametrize("size", [(28, 28), (56, 56), (112, 140), (28, 56)])
def test_margin_grows_with_the_image(bar, size):
    image, _ = fit_drawing(bar, size)
    rows = np.flatnonzero(image.any(1))
    margin = 4 * min(size) // 28
    assert (rows[0], rows[-1]) == (margin, size[0] - margin - 1)


@pytest.mark.parametrize("ink", [0, 255])
def test_transparent_ground_contrasts_with_the_ink(tmp_path, bar, ink):
    image = Image.merge("LA", (Image.new("L", (60, 100), ink), Image.fromarray((bar > 0) * np.uint8(255))))
    found, inverted = fit_drawing(read_picture(save(tmp_path, image), 1, contrast=True), (28, 28))
    assert inverted == (ink == 0)
    np.testing.assert_array_equal(found, fit_drawing(bar, (28, 28))[0])


def test_many_pictures_are_classified_together_as_one_by_one(tmp_path, monkeypatch):
    model = create_model("pooled-cnn", in_chans=3, num_classes=4, image_size=16, widths=(2, 3), kernel_size=3).eval()
    draw, seen = np.random.default_rng(0), []
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    paths = [save(tmp_path, draw.integers(0, 256, (20, 12, 3), np.uint8), f"{i}.png") for i in range(9)]
    paths[4].write_text("text")
    paths.append(paths[0])
    monkeypatch.setattr(predicting, "READ_AHEAD", 6)
    found = list(predict_files(model, paths))
    assert [path for path, _ in found] == paths
    assert seen == [5, 4]
    assert isinstance(found[4][1], PictureError)
    for path, said in found[:4] + found[5:]:
        pixels = torch.from_numpy(read_picture(path, 3, (16, 16), "pad"))
        with torch.no_grad():
            shares = model(pixels[None] / 255).softmax(1)[0]
        assert said.label == int(shares.argmax())
        assert said.confidence == pytest.approx(float(shares.max()), abs=1e-6)


def test_network_without_a_canvas_sees_each_picture_at_its_own_size(tmp_path):
    model = create_model("pooled-cnn", channels=(0.5, 1.0), widths=(2, 3), kernel_size=3).eval()
    draw = np.random.default_rng(0)
    shapes = [(20, 30), (9, 40), (20, 30), (4, 4)]
    paths = [save(tmp_path, draw.integers(0, 256, shape, np.uint8), f"{i}.png") for i, shape in enumerate(shapes)]
    *good, small = (said for _, said in predict_files(model, paths))
    for path, said in zip(paths, good, strict=False):
        with torch.no_grad():
            logits, size = model(torch.from_numpy(read_picture(path, 1))[None, None] / 255, return_scales=True)
        assert (said.label, said.size) == (int(logits.argmax()), pytest.approx(float(size)))
    assert isinstance(small, PictureError)
    assert re.search(r"3\.png \(4 x 4 pixels\) cannot be used: .* scale 0\.5", str(small))


def test_fit_is_that_of_the_pictures(tmp_path):
    model = create_model("pooled-cnn", image_size=16, widths=(2, 3), kernel_size=3).eval()
    wide = np.zeros((16, 64), np.uint8)
    wide[:, 24:40] = np.random.default_rng(0).integers(100, 256, (16, 16))
    path = save(tmp_path, wide)
    for fit in FITS:
        with torch.no_grad():
            shares = model(torch.from_numpy(read_picture(path, 1, (16, 16), fit))[None, None] / 255).softmax(1)[0]
        assert predict(fitting(model, fit), path).confidence == pytest.approx(float(shares.max()), abs=1e-6)
    padded, cut = (predict(fitting(model, fit), path).confidence for fit in ("pad", "crop"))
    assert padded != pytest.approx(cut, abs=1e-6)


def test_files_of_folders_get_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/x.png", "a/deep/x.png", "b/x.png", "x.png", "b/x.png-2.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    found = find_files([Path("a"), Path("a/x.png"), Path("b"), Path("x.png"), Path("none.png")])
    assert {str(path): name for path, name in found.items()} == {
        "a/deep/x.png": "deep/x.png",
        "a/x.png": "x.png",
        "b/x.png": "x.png-2",
        "b/x.png-2.png": "x.png-2.png",
        "x.png": "x.png-3",
        "none.png": "none.png",
    }
    Path("empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no pictures \(\.png, "):
        find_files([Path("empty")])


def test_record_is_made_for_terminals_and_programs():
    said = Prediction(1, 0.987654, None, False, 1.234)
    record = describe(Path("ä.png"), said, ["cat", "\x1b[31mdog\n"])
    assert record == {
        "picture": "ä.png", "class": "\x1b[31mdog\n", "label": 1, "confidence": 0.987654, "size": 1.234, "pixels": None,
        "scale": None, "inverted": False,
    }  # fmt: skip
    assert to_sentence(record) == "ä.png: class \ufffd[31mdog\ufffd, confidence 98.8 %, size 1.23"
    assert describe(Path("x"), said)["class"] == "1"
    record = describe(Path("x"), said._replace(pixels=34.56))
    assert (record["pixels"], to_sentence(record)) == (34.6, "x: class 1, confidence 98.8 %, size 1.23 (35 pixels)")


def make(fit="pad", scale: float | None = 1.0, object_size: float | None = None, **options):
    options = {"in_chans": 3, "num_classes": 4, "image_size": 16, "widths": (2, 3), "kernel_size": 3} | options
    torch.manual_seed(0)
    model = create_model("pooled-cnn", **options).eval()
    network_of(model).task = network_of(model).task._replace(
        fit=fit, ground="surroundings", scale=scale, object_size=object_size
    )
    return model


def expect(model, pixels):
    with torch.no_grad():
        logits, *size = (
            model(pixels[None] / 255, return_scales=True) if hasattr(model, "scales") else [model(pixels[None] / 255)]
        )
    return int(logits.argmax()), float(logits.softmax(1).max()), *(float(one) for one in size)


def test_large_pictures_keep_their_scale_where_training_resized_none(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    shapes = [(40, 30), (40, 30), (100, 90), (12, 50)]
    paths = [save(tmp_path, draw.integers(0, 256, (*shape, 3), np.uint8), f"{i}.png") for i, shape in enumerate(shapes)]
    monkeypatch.setattr(tiles, "MOST_PIXELS", 64**2)  # the third one is looked at in tiles
    model = make(object_size=10.0, channels=(0.5, 1.0))
    for (path, said), shape in zip(predict_files(model, paths), shapes, strict=True):
        whole = torch.from_numpy(read_picture(path, 3))
        assert said.factor == 1
        if shape == (12, 50):  # padded where it is smaller
            padded = torch.from_numpy(predicting.reader(model)(path).pixels)
            assert padded.shape == (3, 16, 50)
            assert torch.equal(padded[:, 2:14], whole)
            whole = padded
        label, confidence, size = expect(model, whole)
        assert (said.label, said.confidence) == (label, pytest.approx(confidence, abs=1e-5))
        assert said.size == pytest.approx(size, rel=1e-4)
        assert said.pixels == pytest.approx(10 * size, rel=1e-4)


@pytest.mark.parametrize("scale", [None, 0.4])
def test_pictures_are_shrunk_as_in_training_and_a_remark_says_so(tmp_path, scale):
    path = save(tmp_path, np.random.default_rng(0).integers(0, 256, (64, 32, 3), np.uint8))
    model = make(scale=scale, object_size=10.0, channels=(0.5, 1.0))
    said = predict(model, path)
    label, confidence, size = expect(model, torch.from_numpy(read_picture(path, 3, (16, 16), "pad")))
    assert (said.label, said.confidence, said.factor) == (label, pytest.approx(confidence, abs=1e-6), 0.25)
    assert said.pixels == pytest.approx(10 * size / 0.25)  # in the picture
    assert said.size == pytest.approx(size if scale is None else size * 0.4 / 0.25)
    (remark,) = (one for one in remarks(model, [said, said._replace(factor=1.0)]) if "resized" in one)
    assert remark.startswith("1 of 2 pictures were resized to 16 x 16 pixels, as in training; --fit keep")
    ((_, kept),) = predict_files(model, [path], "keep")
    assert (kept.label, kept.factor) == (expect(model, torch.from_numpy(read_picture(path, 3)))[0], 1.0)
    assert not [one for one in remarks(model, [kept], "keep") if "resized" in one]


def test_crops_are_resized_and_cut_as_in_training(tmp_path):
    path = save(tmp_path, np.random.default_rng(0).integers(0, 256, (64, 32, 3), np.uint8))
    for fit, factor in (("resize", 0.5), ("crop", 1.0)):
        model = make(fit, scale=0.5)
        said = predict(model, path)
        label, confidence = expect(model, torch.from_numpy(read_picture(path, 3, (16, 16), fit)))
        assert (said.label, said.confidence, said.factor) == (label, pytest.approx(confidence, abs=1e-6), factor)


def test_only_networks_for_any_size_keep_pictures_as_they_are(tmp_path):
    one_size = create_model("plain-cnn").eval()
    one_size.task = one_size.task._replace(ground="surroundings", scale=1.0)
    assert choose_fit(one_size) == "pad"
    with pytest.raises(ValueError, match=r'`fit` must not be "keep" for this network'):
        choose_fit(one_size, "keep")
    assert [choose_fit(make(fit)) for fit in FITS] == ["keep", "crop", "resize"]
    assert choose_fit(make(), "pad") == "pad"


def test_a_size_at_the_end_of_the_channels_is_remarked():
    model = make(channels=(0.5, 1.0, 1.41))
    seen = predicting.Seen(np.zeros((3, 16, 16), np.uint8), False, 1.0)
    sizes = (1.99, 1.5, 1.0, 0.72, 2.0)
    said = [predicting._predict(model, seen, Prediction(0, 1.0, None, False, size)) for size in sizes]
    assert [one.end for one in said] == [2.0, None, None, pytest.approx(1 / 1.41), 2.0]
    small, large = remarks(model, said)
    assert small.startswith("1 of 5 pictures: the smallest size that the channels cover, 0.709, was found")
    assert large.startswith("2 of 5 pictures: the largest size that the channels cover, 2, was found")
    at_one = make(channels=(0.5, 1.0))  # an object of the usual size is one of training
    assert predicting._predict(at_one, seen, Prediction(0, 1.0, None, False, 1.0)).end is None


def test_columns_are_those_that_a_model_fills_in():
    always = ["picture", "class", "label", "confidence"]
    assert columns(make()) == always
    assert columns(make(channels=(0.5, 1.0))) == [*always, "size"]
    assert columns(make(channels=(0.5, 1.0), object_size=9.0)) == [*always, "size", "pixels"]
    assert columns(create_model("ss-cnn")) == [*always, "scale", "inverted"]


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [None, (0.5, 1.0)])
def test_gpu_says_the_same(tmp_path, channels):
    model = create_model("pooled-cnn", in_chans=3, image_size=32, channels=channels).eval()
    draw = np.random.default_rng(0)
    paths = [save(tmp_path, draw.integers(0, 256, (32, 32, 3), np.uint8), f"{i}.png") for i in range(5)]
    here = [said for _, said in predict_files(model, paths)]
    there = [said for _, said in predict_files(model.cuda(), paths)]
    for one, other in zip(here, there, strict=True):
        assert one.label == other.label
        assert one.confidence == pytest.approx(other.confidence, abs=1e-4)
        assert one.size == (None if other.size is None else pytest.approx(other.size, rel=1e-3))
    maps = answer_maps(without_readout(model), read_picture(paths[0], 3))
    assert maps.labels.shape == (8, 8)
