"""Large pictures in tiles: the numbers of the whole picture, whatever the network."""

import numpy as np
import pytest
import torch
from PIL import Image

from examples.cells import UNet
from scalesteer import create_model, register_model
from scalesteer.app import tiles
from scalesteer.app.maps import answer_maps, without_readout
from scalesteer.app.predict import predict_files
from scalesteer.models import network_of
from scalesteer.models.pooled import MODELS
from scalesteer.models.scaled import ScaledNetwork


def make(name, **options):
    torch.manual_seed(0)
    widths = tuple(4 for _ in MODELS[name][1].widths)
    model = create_model(name, in_chans=3, num_classes=4, widths=widths, **options).double().eval()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.1, 0.1)
            layer.bias.data.uniform_(-0.2, 0.2)
    return model


def look(model, x, **options):
    with torch.no_grad():
        return model(x, **options)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_tiles_give_the_numbers_of_the_whole_picture(name, monkeypatch):
    model, x = make(name), torch.rand(1, 3, 163, 210, dtype=torch.float64)
    whole = look(model, x)
    dense = look(without_readout(model), x)
    calls = []
    model.features.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0].shape[-2:].numel()))
    reach = tiles.find_reach(model)
    assert 0 < reach <= 70
    monkeypatch.setattr(tiles, "MOST_PIXELS", (2 * reach + 40) ** 2)
    looking = tiles.tiled(model, 163, 210)
    calls.clear()
    torch.testing.assert_close(look(looking, x), whole, rtol=1e-9, atol=1e-9)
    assert len(calls) > 9
    assert max(calls) <= (2 * reach + 40 + model.stride) ** 2
    torch.testing.assert_close(look(tiles.tiled(without_readout(model), 163, 210), x), dense, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(tiles, "find_reach", lambda network: reach - model.stride)  # tiles that overlap too little
    short = look(tiles.tiled(without_readout(model), 163, 210), x)
    assert not torch.allclose(short, dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("readout", ["max", "mean", "logsumexp"])
def test_every_channel_of_scale_is_cut_into_tiles(readout, monkeypatch):
    model = make("pooled-cnn", channels=(0.5, 1.0, 1.41), readout=readout, border=8, border_mode="reflect")
    x = torch.rand(1, 3, 150, 131, dtype=torch.float64)
    expected = look(model, x, return_scales=True)
    monkeypatch.setattr(tiles, "MOST_PIXELS", 80**2)
    found = look(tiles.tiled(model, 150, 131), x, return_scales=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_small_pictures_and_other_networks_are_left_as_they_are(monkeypatch):
    model = make("pooled-cnn")
    assert tiles.tiled(model, 1024, 1024) is model
    assert tiles.tiled(model, 1024, 1025) is not model
    scaled = make("pooled-cnn", channels=(1.0, 2.0))
    assert tiles.tiled(scaled, 512, 512) is scaled
    assert tiles.tiled(scaled, 512, 513) is not scaled
    other = create_model("plain-cnn")
    assert tiles.tiled(other, 2000, 2000) is other


def test_a_channel_that_would_enlarge_a_picture_beyond_memory_is_refused(monkeypatch, tmp_path):
    model = make("pooled-cnn", channels=(1.0, 2.0)).float()
    monkeypatch.setattr(tiles, "MOST_PIXELS", 80**2)
    monkeypatch.setattr(tiles, "MOST_ENLARGED", 200**2)
    assert tiles.tiled(model, 100, 100) is not model
    Image.new("RGB", (101, 100)).save(tmp_path / "a.png")
    network_of(model).task = network_of(model).task._replace(ground="surroundings")
    ((_, said),) = predict_files(model, [tmp_path / "a.png"])
    assert "the channel of scale 2 would enlarge it to 0 megapixels" in str(said)


def test_a_window_that_is_the_whole_picture_has_no_tiles():
    model = make("pooled-cnn")
    model.features.append(torch.nn.Softmax(2))
    assert tiles.find_reach(model) is None
    assert tiles.tiled(model, 2000, 2000) is model


@pytest.mark.parametrize("scales", [None, (0.5, 0.75, 1.0, 1.5)])
def test_a_users_network_makes_the_maps_of_the_whole_picture_in_pieces(scales, monkeypatch):
    torch.manual_seed(0)
    register_model("pieced-unet", lambda num_classes: UNet(4))
    model = create_model("pieced-unet", in_chans=1, num_classes=2)
    if scales:
        model = ScaledNetwork(model, scales, multiple=4, grid=(1, 0))
    pixels = torch.randint(0, 256, (400, 320), dtype=torch.uint8).numpy()
    network_of(model).head.weight.data *= 30
    model.eval()
    whole = answer_maps(model, pixels)
    monkeypatch.setattr(tiles, "MOST_PIXELS", 300**2 if scales else 160**2)
    monkeypatch.setattr(tiles, "MOST_SCORES", 2 * 450**2)  # of a piece; what the network sees at once is less
    monkeypatch.setattr(tiles, "ALIGNED", 4)
    seen = []
    network_of(model).register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[-2:].numel()))
    found = answer_maps(model, pixels)
    assert len(tiles.cut(model, 400, 320)[1]) > 4
    assert max(seen) <= 300**2
    assert found.labels.shape == whole.labels.shape == pixels.shape
    assert np.abs(found.confidences - whole.confidences).max() < 1e-5
    assert (found.labels != whole.labels).mean() < 1e-4
    assert found.stride == 1
    assert (found.sizes is None) == (scales is None)
    if scales:
        assert np.abs(np.log(found.sizes / whole.sizes)).max() < 1e-4
    monkeypatch.setattr(tiles, "_find_window", lambda model, multiple: -2)  # pieces that overlap too little
    monkeypatch.setattr(tiles, "ALIGNED", 1)
    short = answer_maps(model, pixels)
    assert np.abs(short.confidences - whole.confidences).max() > 1e-3


class Halved(torch.nn.Module):
    """A network with a place for every two pixels, and without padding if there is a margin."""

    def __init__(self, num_classes, margin=0, named=False):
        super().__init__()
        self.conv, self.named = torch.nn.Conv2d(1, num_classes, 4 + margin, stride=2, padding=1), named

    def forward(self, x):
        return {"maps": self.conv(x)} if self.named else self.conv(x)


def test_channels_are_looked_at_in_tiles_where_places_divide_the_image_evenly():
    register_model("halved", Halved)
    even = create_model("halved", in_chans=1, num_classes=3, channels=(0.5, 1.0), multiple=4).eval()
    looking = tiles._in_tiles(even, 3)
    assert (looking.net.stride, looking.net.places, looking.net.reach) == (32, 16, 32)
    assert network_of(looking).task == network_of(even).task
    assert even.net is not looking.net
    for options in ({"margin": 4}, {"named": True, "output": "maps"}):
        other = create_model("halved", in_chans=1, num_classes=3, channels=(0.5, 1.0), **options).eval()
        assert tiles._in_tiles(other, 3) is None
        assert tiles.cut(other, 1000, 1200)[0] is other


@pytest.mark.parametrize("shape", [(21, 403), (403, 21), (160, 161)])
def test_tiles_of_a_network_that_repeats_itself_every_few_pixels(shape, monkeypatch):
    torch.manual_seed(0)
    net, x = UNet(4).eval().double(), torch.rand(1, 1, *(side // 4 * 4 for side in shape), dtype=torch.float64)
    monkeypatch.setattr(tiles, "MOST_PIXELS", 2000)
    calls = []
    net.register_forward_hook(lambda module, inputs, output: calls.append(1))
    torch.testing.assert_close(look(tiles.Tiles(net, 32, 32, 32), x), look(net, x), rtol=1e-9, atol=1e-9)
    assert len(calls) > 5


def test_a_network_that_sees_all_of_a_picture_has_pieces_too(monkeypatch):
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(1, 2, 1)

        def forward(self, x):
            return self.conv(x - x.mean((2, 3), keepdim=True))

    register_model("mean-of-all", lambda num_classes: Mean())
    model = create_model("mean-of-all", in_chans=1, num_classes=2).eval()
    monkeypatch.setattr(tiles, "MOST_PIXELS", 128**2)
    maps = answer_maps(model, torch.randint(0, 256, (300, 200), dtype=torch.uint8).numpy())
    assert maps.labels.shape == (300, 200)
    assert np.isfinite(maps.confidences).all()
