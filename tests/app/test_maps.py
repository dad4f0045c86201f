import numpy as np
import pytest
import torch

from scalesteer import ScaleChannels
from scalesteer.app import maps as module
from scalesteer.app.maps import answer_maps, class_colour, class_shares, draw_maps, without_readout
from scalesteer.models import create_model


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (3, 32, 48), np.uint8)


def make(**options):
    options = {"widths": (3, 4), "kernel_size": 3, "subsample": (1,), "in_chans": 3, "num_classes": 5} | options
    return create_model("pooled-cnn", **options).eval()


def test_maps_are_the_scores_before_the_readout(pixels):
    model = make(readout="max")
    maps = answer_maps(without_readout(model), pixels)
    assert maps.labels.shape == maps.confidences.shape == (16, 24)
    assert (maps.sizes, maps.stride, maps.classes) == (None, 2, 5)
    x = torch.from_numpy(pixels)[None] / 255
    with torch.no_grad():
        scores = model.classifier(model.features(model.prepare(x)))[0]
        np.testing.assert_array_equal(maps.labels, scores.argmax(0))
        np.testing.assert_allclose(maps.confidences, scores.softmax(0).amax(0), atol=1e-6)
        torch.testing.assert_close(model(x)[0], scores.amax((1, 2)))  # the model itself still answers once


def test_maps_of_channels_have_the_size_that_answered_at_each_place(pixels):
    border = {"border": 6, "border_mode": "reflect"}
    model = make(channels=(0.5, 1.0, 2.0), **border)
    dense = without_readout(model)
    maps = answer_maps(dense, pixels)
    net = make(dense=True)
    net.load_state_dict(model.net.state_dict())
    with torch.no_grad():
        logits, sizes = ScaleChannels(net, (0.5, 1.0, 2.0), grid=(2, 0.5), **border).eval()(
            torch.from_numpy(pixels)[None] / 255, return_scales=True
        )
    np.testing.assert_array_equal(maps.labels, logits[0].argmax(0))
    np.testing.assert_allclose(maps.sizes, sizes[0], rtol=1e-5)
    assert maps.ends == (0.5, 2.0)
    assert not model.net.dense
    assert dense.net.classifier.fc2.weight is model.net.classifier.fc2.weight


def test_network_that_answers_once_is_refused():
    with pytest.raises(ValueError, match=r"this network has no map of classes: .* steered-\.\.\. or pooled-\.\.\."):
        without_readout(create_model("plain-cnn"))


def test_drawing_shows_the_picture_and_the_classes_beside_it(pixels):
    maps = answer_maps(without_readout(make()), pixels)._replace(confidences=np.ones((16, 24)))
    drawn = np.asarray(draw_maps(pixels, maps, ["a", "b", "a very long name " * 30, "d", "\n\x00e"]))
    zoom, top, left = 384 // 48, 37, 18
    shown = drawn[top : top + 32 * zoom, left : left + 48 * zoom]
    np.testing.assert_array_equal(shown[::zoom, ::zoom], pixels.transpose(1, 2, 0))
    beside = drawn[top + 2 : top + 32 * zoom : 2 * zoom, left + 2 + 48 * zoom + 18 :: 2 * zoom][:, :24]
    np.testing.assert_array_equal(beside, np.array([class_colour(i) for i in range(5)])[maps.labels])


def test_places_of_which_the_model_knows_nothing_do_not_count_in_the_shares():
    labels, certainty = np.array([[0, 0, 0, 2], [0, 0, 0, 1]]), np.array([[0, 0, 0.1, 0.6], [0, 0, 0, 0.3]])
    assert class_shares(labels, certainty) == [(2, 0.6), (1, 0.3), (0, 0.1)]
    assert class_shares(labels, 0 * certainty) == [(0, 0.75), (1, 0.125), (2, 0.125)]


def drawn_name(pixels, name):
    maps = answer_maps(without_readout(make(num_classes=1)), pixels)
    return np.asarray(draw_maps(pixels, maps, [name]))[-3 * 19 :]


def test_names_of_classes_keep_their_letters(pixels):
    if module._system_font() is None:
        pytest.skip("no font of this system has more letters than ASCII's")
    drawn = {drawn_name(pixels, name).tobytes() for name in ("café", "cafè", "cafß", "cafю", "cafe")}
    assert len(drawn) == 5


def test_without_a_font_of_the_system_letters_lose_their_accents(pixels, monkeypatch):
    monkeypatch.setattr(module, "_system_font", lambda: None)
    np.testing.assert_array_equal(drawn_name(pixels, "café"), drawn_name(pixels, "cafe"))
    np.testing.assert_array_equal(drawn_name(pixels, "großю"), drawn_name(pixels, "gro??"))


@pytest.mark.parametrize("shape", [(3, 3), (5, 700), (700, 5)])
@pytest.mark.parametrize("channels", [None, (1.0,), (1.0, 2.0)])
def test_pictures_of_any_size_are_drawn(shape, channels):
    grey = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    model = make(in_chans=1, num_classes=20, subsample=(), channels=channels)
    maps = answer_maps(without_readout(model), grey)
    sheet = draw_maps(grey, maps)
    assert sheet.width == 18 + (2 if channels is None else 3) * (18 + max(190, sheet_width(shape)))


def sheet_width(shape):
    zoom = 384 / max(shape)
    return max(1, round(shape[1] * (zoom // 1 if zoom >= 1 else zoom)))


def test_fewer_colours_where_the_model_is_less_certain(pixels):
    maps = answer_maps(without_readout(make()), pixels)
    sure, unsure = (
        np.asarray(draw_maps(pixels, maps._replace(confidences=np.full((16, 24), share))))[40:280, 425:800]
        for share in (1.0, 0.25)
    )
    assert unsure.mean() > sure.mean() + 40
