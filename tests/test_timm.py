"""Networks of timm, with new weights, in scale channels: nothing is written for them."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from scalesteer import ScaleChannels, create_model, from_pretrained, register_model, save_pretrained
from scalesteer.joint import at_sizes
from scalesteer.models import registered

SCALES = (0.5, 1.0, 1.5)
NETWORKS = {
    "resnet18": {},
    "regnetx_002": {},
    "mobilenetv3_small_100": {},
    "efficientnet_b0": {},
    "convnext_atto": {},
    "densenet121": {},
    "vit_tiny_patch16_224": {"dynamic_img_size": True, "img_size": 64, "depth": 2},
}
networks = pytest.mark.parametrize("name", NETWORKS)


@functools.cache
def load():
    """The module timm; a test is skipped, with the reason, where it cannot be imported.

    torchvision, which timm needs, describes the shapes of two operators when it is imported. Its release has these for
    CUDA only: beside a torch without CUDA they are declared here, so that there is something to describe.
    """
    if not hasattr(torch.ops.torchvision, "nms"):
        load.library = torch.library.Library("torchvision", "DEF")  # the operators are there as long as it is
        for operator in ("nms", "qnms"):
            load.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return pytest.importorskip("timm", reason="the extra `timm` is not installed", exc_type=ImportError)


def make(name, **options):
    torch.manual_seed(0)
    return load().create_model(name, num_classes=4, **NETWORKS[name], **options)


def multiple(name):
    """What the sizes of its images must be multiples of."""
    return {"vit": 16, "con": 32, "den": 32}.get(name[:3], 1)


@networks
def test_a_network_trains_in_three_channels_with_one_batch_for_each_step(name):
    net = make(name)
    model = ScaleChannels(net, SCALES, multiple=multiple(name))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(2, 3, 64, 64)).square().sum().backward()
        optimizer.step()
    assert {int(layer.num_batches_tracked) for layer in net.modules() if isinstance(layer, _BatchNorm)} <= {3}
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert list(model.state_dict()) == [f"net.{key}" for key in net.state_dict()]


@networks
def test_values_and_gradients_are_those_of_one_batch(name):
    """Images of one size in all channels: what the network itself makes of all of them as one batch."""
    net = make(name).double()
    other, images = copy.deepcopy(net), [torch.rand(2, 3, 32, 32).double() + i for i in range(2)]
    answers = torch.cat(at_sizes(net, images)), other(torch.cat(images))
    torch.testing.assert_close(*answers)
    for answer in answers:
        answer.square().sum().backward()
    for (key, ours), expected in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-5, atol=1e-5, msg=key)
    torch.testing.assert_close(net.state_dict(), other.state_dict())


class Block(nn.Module):
    """A basic block of timm with its parts applied one after the other, as a user would write it."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def at_sizes(self, images):
        b, y = self.block, images
        for layer in (b.conv1, b.bn1, b.act1, b.conv2, b.bn2):
            y = at_sizes(layer, y)
        old = images if b.downsample is None else at_sizes(b.downsample, images)
        return [torch.relu(new + before) for new, before in zip(y, old, strict=True)]


def test_gradients_of_a_resnet_are_those_of_a_method_written_by_hand():
    net, x = make("resnet18"), torch.rand(2, 3, 40, 40)
    other = copy.deepcopy(net)
    blocks = [Block(block) for i in range(1, 5) for block in other.get_submodule(f"layer{i}")]
    stem = (other.conv1, other.bn1, nn.ReLU(), other.maxpool)
    by_hand = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), other.fc)
    answers = [ScaleChannels(module, SCALES)(x) for module in (net, by_hand)]
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)
    for answer in answers:
        answer.square().sum().backward()
    for (key, ours), expected in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, expected.grad, rtol=1e-4, atol=1e-5 * float(expected.grad.abs().max()) + 1e-6, msg=key
        )


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "mobilenet_v2", "shufflenet_v2_x0_5"])
def test_networks_of_torchvision_train_as_one_batch(name):
    load()
    torchvision = pytest.importorskip("torchvision")
    net = torchvision.models.get_model(name, weights=None, num_classes=4)
    ScaleChannels(net, SCALES)(torch.rand(2, 3, 64, 64)).square().sum().backward()
    assert {int(layer.num_batches_tracked) for layer in net.modules() if isinstance(layer, _BatchNorm)} == {1}
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_a_network_that_recomputes_parts_of_itself_trains_the_same():
    net, x = make("resnet18"), torch.rand(2, 3, 32, 32)
    other = copy.deepcopy(net)
    other.set_grad_checkpointing()
    for one in (net, other):
        ScaleChannels(one, SCALES)(x).square().sum().backward()
    for (key, ours), expected in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, msg=key)
    assert int(other.bn1.num_batches_tracked) == 1


def test_dropped_paths_and_features_are_right():
    net = make("efficientnet_b0", drop_rate=0.3, drop_path_rate=0.3)
    ScaleChannels(net, SCALES)(torch.rand(2, 3, 32, 32)).sum().backward()
    features = load().create_model("resnet18", features_only=True, out_indices=(2,))
    out = ScaleChannels(features, SCALES, "mean", output=0)(torch.rand(2, 3, 32, 32))
    assert out.shape == (2, 128, 4, 4)
    assert {int(layer.num_batches_tracked) for layer in features.modules() if isinstance(layer, _BatchNorm)} <= {0, 1}


def test_a_transformer_of_one_size_is_told_with_channel_and_size():
    net = load().create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    with pytest.raises(AssertionError, match=r"scale 0.5 shows `net` images of 16 x 16 pixels, which failed: .*32"):
        ScaleChannels(net, (0.5, 1.0))(torch.rand(1, 3, 32, 32))


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(registered, "BUILDERS", registered.BUILDERS.copy())
    for module in ("scalesteer.models", "scalesteer.pretrained"):
        monkeypatch.setattr(f"{module}.BUILDERS", registered.BUILDERS)
    register_model(
        "timm", lambda arch, num_classes=4, **options: load().create_model(arch, num_classes=num_classes, **options)
    )


@networks
def test_a_network_is_saved_and_read(name, registry, tmp_path):
    load()
    options = NETWORKS[name] | {"multiple": multiple(name)}
    model = create_model("timm", arch=name, channels=(0.5, 1.0), **options).eval()
    other = from_pretrained(save_pretrained(model, tmp_path / "net"))
    x = torch.rand(2, 3, 64, 70)
    assert torch.equal(other(x), model(x))


@pytest.mark.slow
@networks
def test_a_network_is_exported_to_onnx(name, registry, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    from scalesteer.export import export

    load()
    options = NETWORKS[name] | {"multiple": multiple(name)}
    model = create_model("timm", arch=name, channels=(0.5, 1.0), **options).eval()
    done = export(model, tmp_path / "net.onnx")
    assert len({shape[2:] for shape in done.shapes}) == 3
    assert done.difference < 1e-4
