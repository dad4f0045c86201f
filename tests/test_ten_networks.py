"""Ten networks, of timm, of torchvision and written by hand: wrapped, trained, saved, read and exported alike.

Each is trained for three steps in three channels of scale, and batch normalisation counts each step once. Where the
parts of a network can be applied to all images one after the other, as a user would write `at_sizes` by hand, the
gradients are the same. What is read from a folder is the same network, and so is the exported file at three sizes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from examples.cells import UNet
from scalesteer import ScaleChannels, create_model, from_pretrained, register_model, save_pretrained
from scalesteer.joint import at_sizes
from tests import test_timm

SCALES = (0.5, 1.0, 1.5)


class Shared(nn.Module):
    """One block that comes three times, with its own batch normalisation each time."""

    def __init__(self, num_classes):
        super().__init__()
        self.first, self.block, self.head = (
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Linear(8, num_classes),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x):
        y = self.first(x)
        for norm in self.norms:
            y = y + F.relu(norm(self.block(y)), inplace=True)
        return self.head(y.mean((2, 3)))


class SharedByHand(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def at_sizes(self, images):
        net, ys = self.net, at_sizes(self.net.first, images)
        for norm in net.norms:
            new = at_sizes(norm, [net.block(y) for y in ys])
            ys = [y + z.relu() for y, z in zip(ys, new, strict=True)]
        return [net.head(y.mean((2, 3))) for y in ys]


class UNetByHand(SharedByHand):
    def at_sizes(self, images):
        net = self.net
        top = at_sizes(net.top, images)
        middle = at_sizes(net.middle, [F.max_pool2d(y, 2) for y in top])
        low = at_sizes(net.low, [F.max_pool2d(y, 2) for y in middle])
        for layer, skips in ((net.up, middle), (net.last, top)):
            low = [F.interpolate(y, scale_factor=2.0) for y in low]
            low = at_sizes(layer, [torch.cat(pair, 1) for pair in zip(low, skips, strict=True)])
        return [F.pad(net.head(y), (0, 0, 0, 0, 1, 0)) for y in low]


class ResNetByHand(SharedByHand):
    """resnet18 of timm, and regnet's first layers are alike: its parts are applied one after the other."""

    def at_sizes(self, images):
        net = self.net
        ys = [net.maxpool(y.relu()) for y in at_sizes(net.bn1, [net.conv1(x) for x in images])]
        for block in (block for i in range(1, 5) for block in net.get_submodule(f"layer{i}")):
            new = [y.relu() for y in at_sizes(block.bn1, [block.conv1(y) for y in ys])]
            new = at_sizes(block.bn2, [block.conv2(y) for y in new])
            old = ys if block.downsample is None else at_sizes(block.downsample, ys)
            ys = [(a + b).relu() for a, b in zip(new, old, strict=True)]
        return [net.fc(y.mean((2, 3))) for y in ys]


class SequentialByHand(SharedByHand):
    def at_sizes(self, images):
        for layer in self.net:
            images = at_sizes(layer, images) if isinstance(layer, nn.BatchNorm2d) else [_copy(layer)(x) for x in images]
        return images


def _copy(layer):
    return nn.ReLU() if isinstance(layer, nn.ReLU) else layer


def sequential(num_classes):
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)]
    body += [nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)]
    return nn.Sequential(*body)


def of_timm(arch, **options):
    return lambda num_classes: test_timm.load().create_model(arch, num_classes=num_classes, **options)


def of_torchvision(num_classes):
    test_timm.load()
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.get_model("densenet121", weights=None, num_classes=num_classes)


SMALL_VIT = {"dynamic_img_size": True, "img_size": 64, "depth": 2}
# How each is made, what its sizes are multiples of, and the class that applies it by hand, if there is one.
NETWORKS = {
    "resnet18": (of_timm("resnet18"), 1, ResNetByHand),
    "regnetx_002": (of_timm("regnetx_002"), 1, None),
    "mobilenetv3_small_100": (of_timm("mobilenetv3_small_100"), 1, None),
    "efficientnet_b0": (of_timm("efficientnet_b0"), 1, None),
    "convnext_atto": (of_timm("convnext_atto"), 32, None),
    "vit": (of_timm("vit_tiny_patch16_224", **SMALL_VIT), 16, None),
    "densenet121": (of_torchvision, 32, None),
    "unet": (lambda num_classes: UNetOfColour(), 4, UNetByHand),
    "sequential": (sequential, 1, SequentialByHand),
    "shared": (Shared, 1, SharedByHand),
}
SLOW = ("resnet18", "regnetx_002", "efficientnet_b0", "convnext_atto", "densenet121")  # tests/test_timm.py trains these
networks = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in NETWORKS]
)


class UNetOfColour(UNet):
    def __init__(self):
        super().__init__(width=4)
        self.top[0] = nn.Conv2d(3, 4, 3, padding=1, bias=False)


def make(name, seed=0, **options):
    build, multiple, _ = NETWORKS[name]
    register_model(name, build)
    torch.manual_seed(seed)
    return create_model(name, num_classes=4, multiple=multiple, **{"channels": SCALES, **options})


@networks
def test_three_steps_count_batch_normalisation_once_each(name, recwarn):
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(2, 3, 64, 64)).square().mean().backward()
        optimizer.step()
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    assert {int(layer.num_batches_tracked) for layer in layers} == ({3} if layers else set())
    assert bool(layers) == (name not in ("vit", "convnext_atto"))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not [str(warning.message) for warning in recwarn]


@pytest.mark.parametrize("name", [name for name, (_, _, by_hand) in NETWORKS.items() if by_hand])
def test_gradients_are_those_of_a_method_written_by_hand(name):
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    model = make(name).double().train()
    by_hand = ScaleChannels(NETWORKS[name][2](copy.deepcopy(model.net)), SCALES, multiple=model.multiple)
    for one in (model, by_hand):
        one(x).square().mean().backward()
    pairs = zip(model.net.named_parameters(), by_hand.net.net.parameters(), strict=True)
    for (key, ours), expected in pairs:
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-5, atol=1e-10, msg=key)
    torch.testing.assert_close(model.net.state_dict(), by_hand.net.net.state_dict())


@networks
def test_what_is_saved_is_read(name, tmp_path):
    model = make(name)
    with torch.no_grad():
        model.train()(torch.rand(2, 3, 64, 64))  # statistics
    other = from_pretrained(save_pretrained(model.eval(), tmp_path / "net"))
    x = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))


@pytest.mark.slow
@networks
def test_the_exported_file_predicts_the_same_at_three_sizes(name, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    from scalesteer.export import export

    options = {"grid": (1, 0)} if name == "unet" else {}
    done = export(make(name, channels=(0.5, 1.0), **options).eval(), tmp_path / "net.onnx")
    assert len({shape[2:] for shape in done.shapes}) == 3
    assert done.difference < 1e-4
