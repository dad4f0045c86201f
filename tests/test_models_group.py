"""Networks that keep the axis of scales: counts by hand, any size of image, scale channels, exports, errors."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalesteer import ScaleChannels, ScaleGroupConv2d, create_model, fold, pretrained
from scalesteer.baselines import FittedBasis, HermiteBasis
from scalesteer.export import export
from scalesteer.joint import at_sizes
from scalesteer.models import count_parameters
from scalesteer.testing import equivariance_error

NAMES = ("group-cnn", "group-resnet")
SMALL = {"widths": (3, 4), "subsample": (1,), "hidden": 0, "dropout": 0.0, "kernel_size": 5, "scales": (1.0, 1.5)}


def test_parameters_are_as_many_as_counted_by_hand():
    functions, (a, b, c) = 2 * 2 * 6, (32, 63, 95)
    total = functions * (a + 2 * (a * b + b * c)) + 2 * (a + b + c)  # the first layer has a reach of 1
    total += c * 1024 + 2 * 1024 + 1025 * 10
    assert count_parameters(create_model("group-cnn")) == total
    assert total == pytest.approx(495_000, rel=1e-3)  # as the published network of these widths
    assert count_parameters(create_model("group-cnn", basis="fitted")) == total
    assert count_parameters(create_model("group-cnn", basis="hermite")) == pytest.approx(total, rel=0.04)
    assert create_model("group-cnn").readout == "features"
    total, before = functions * 16 + 2 * 16 + 65 * 10, 16
    for width in (16, 32, 64):
        total += functions * (before * width + 2 * width * width) + 4 * width
        total += before * width + 2 * width if before != width else 0
        before = width
    assert count_parameters(create_model("group-resnet")) == total


@pytest.mark.parametrize("name", NAMES)
def test_bases_differ_by_one_argument(name):
    bases = {"hermite": HermiteBasis(5), "fitted": FittedBasis(24)}
    for basis, expected in bases.items():
        model = create_model(name, basis=basis, **SMALL)
        assert {layer.basis for layer in model.modules() if isinstance(layer, ScaleGroupConv2d)} == {expected}
        again = create_model(**model.arguments)
        again.load_state_dict(model.state_dict())
        x = torch.rand(2, 1, 12, 13)
        assert torch.equal(again.eval()(x), model.eval()(x))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels", [None, (0.5, 1.0, 2.0)])
def test_networks_take_any_size_and_learn_also_inside_scale_channels(name, channels):
    model = create_model(name, **SMALL, channels=channels)
    assert isinstance(model, ScaleChannels) == (channels is not None)
    images, labels = F.interpolate(torch.rand(6, 1, 4, 4), (18, 20), mode="bicubic"), torch.arange(6)
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for _ in range(8):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        if not losses:
            assert all((p.grad != 0).any() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert model.eval()(torch.rand(2, 1, 31, 26)).shape == (2, 10)


def test_joint_normalisation_of_maps_with_scales_is_that_of_all_their_pixels():
    norm, maps = nn.BatchNorm3d(2), [torch.randn(3, 2, 4, n, n + 1) for n in (5, 3)]
    found = at_sizes(norm, maps)
    pixels = torch.cat([x.flatten(2) for x in maps], 2).double()
    mean, variance = pixels.mean((0, 2)), pixels.var((0, 2), correction=0)
    for x, y in zip(maps, found, strict=True):
        shape = (2, 1, 1, 1)
        expected = (x - mean.view(shape)) / (variance.view(shape) + norm.eps).sqrt()
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_first_layer_looks_at_each_scale_alone_and_the_others_at_neighbours():
    for name in NAMES:
        reaches = [m.reach for m in create_model(name, **SMALL).modules() if isinstance(m, ScaleGroupConv2d)]
        assert reaches == {"group-cnn": [1, 2], "group-resnet": [1, 1, 2, 1, 2]}[name]
    model = create_model("group-resnet", **SMALL, blocks=2, reach=3, ends="replicate")
    assert [m.reach for m in model.modules() if isinstance(m, ScaleGroupConv2d)] == [1] + [1, 3] * 4
    with pytest.raises(ValueError, match="`blocks` must be at least 1"):
        create_model("group-resnet", blocks=0)


@pytest.mark.parametrize("name", NAMES)
def test_features_move_along_the_scales_when_the_image_grows(name):
    step = 2 ** (1 / 3)
    model = create_model(name, scales=tuple(step**i for i in range(5)), widths=(8, 8), subsample=(1,), reach=1)
    features = model.features[:-1]  # before the maximum over scales
    assert equivariance_error(features, step, channels=1, steps=1, size=96, images=1, widths=(2.0, 4.0)) < 0.12


def test_a_network_whose_maps_at_all_scales_would_not_fit_is_named(monkeypatch):
    model = create_model("group-cnn", **{**SMALL, "image_size": 64})
    taken = 4 * 64 * 64 * 2 * 4  # bytes of two scales of four channels
    for limit, fits in ((taken, True), (taken - 1, False)):
        monkeypatch.setattr(pretrained, "MOST_MEMORY", limit)
        if fits:
            pretrained.check_memory(model)
        else:
            with pytest.raises(ValueError, match="must be smaller: for one image of 64 x 64 pixels"):
                pretrained.check_memory(model)


def test_folded_and_exported_networks_give_the_same_logits(tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    model = create_model("group-cnn", **SMALL).eval()
    x = torch.rand(2, 1, 20, 22)
    np.testing.assert_allclose(fold(model)(x).detach(), model(x).detach(), atol=1e-5)
    done = export(model, tmp_path / "net.onnx")  # checks the logits
    assert done.any_size
    assert done.difference < 1e-4
