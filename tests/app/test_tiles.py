"""Large pictures in tiles: the numbers of the whole picture, whatever the network."""

import pytest
import torch

from scalesteer import create_model
from scalesteer.app import tiles
from scalesteer.app.maps import without_readout
from scalesteer.models.pooled import MODELS


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


def test_a_window_that_is_the_whole_picture_has_no_tiles():
    model = make("pooled-cnn")
    model.features.append(torch.nn.Softmax(2))
    assert tiles.find_reach(model) is None
    assert tiles.tiled(model, 2000, 2000) is model
