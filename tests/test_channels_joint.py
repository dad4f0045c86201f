"""Channels of scale pass through a network side by side in training: batch normalisation sees them as one batch."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from scalesteer import create_model
from scalesteer.channels import ScaleChannels
from scalesteer.joint import at_sizes
from scalesteer.resize import resize

SCALES, SIDES = (0.5, 1.0, 1.5), (6, 12, 18)
TINY = {"widths": (3, 4), "kernel_size": 3, "subsample": (1,), "num_classes": 3, "hidden": 4}


def sequential():
    """Batch normalisation of maps, inside a subclass of `nn.Sequential`, and of vectors; one layer comes twice."""
    relu = nn.ReLU()
    block = type("Block", (nn.Sequential,), {})(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), relu)
    head = (nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), relu, nn.Linear(5, 3))
    return nn.Sequential(block, relu, nn.AdaptiveAvgPool2d(1), *head)


class Loop(nn.Module):
    """The same layers in a module of another kind."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)


JOINT = {
    "sequential": sequential,
    "pooled-cnn": lambda: create_model("pooled-cnn", **TINY),
    "pooled-resnet": lambda: create_model("pooled-resnet", **TINY, blocks=1),
}
joint = pytest.mark.parametrize("make", JOINT.values(), ids=JOINT)


def norms(net):
    return [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def pixels(x):
    """Rows of channels: `(pixels of all images, C)`."""
    return x.movedim(1, -1).flatten(0, -2)


def normalised_by_hand(norm, images):
    """What batch normalisation makes of the pixels of all images, from their means and variances."""
    rows = torch.cat([pixels(x) for x in images])
    mean, var = rows.mean(0), rows.var(0, correction=0)
    shape = (-1, *(1,) * (images[0].ndim - 2))
    scale = norm.weight / (var + norm.eps).sqrt()
    return [x * scale.view(shape) + (norm.bias - mean * scale).view(shape) for x in images]


@pytest.mark.parametrize(
    ("norm", "shapes"),
    [
        (nn.BatchNorm2d(3), [(4, 3, 2, 5), (4, 3, 1, 1), (4, 3, 6, 4)]),
        (nn.BatchNorm1d(3), [(4, 3), (4, 3)]),
        (nn.BatchNorm1d(3), [(4, 3, 7), (4, 3, 2)]),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_normalisation_is_that_of_one_batch_of_all_pixels(norm, shapes, channels_last):
    norm = copy.deepcopy(norm).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    images = [(i + 1) * torch.randn(shape).double() + i for i, shape in enumerate(shapes)]
    if channels_last and images[0].ndim == 4:
        images = [x.to(memory_format=torch.channels_last) for x in images]
    expected = normalised_by_hand(norm, images)
    for actual, right in zip(at_sizes(norm, images), expected, strict=True):
        torch.testing.assert_close(actual, right)
    rows = torch.cat([pixels(x) for x in images])
    torch.testing.assert_close(norm.running_mean, 0.1 * rows.mean(0))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * rows.var(0))
    assert int(norm.num_batches_tracked) == 1
    shapes = [x[:0].shape for x in images]
    assert [y.shape for y in at_sizes(norm.eval(), [torch.zeros(shape).double() for shape in shapes])] == shapes


@joint
def test_a_step_moves_running_statistics_once_by_those_of_all_channels(make):
    net, seen = make(), {}
    for norm in norms(net):
        norm.momentum = None  # a plain mean of what it has seen, so that one batch leaves its own statistics
        norm.register_forward_pre_hook(lambda norm, inputs: seen.setdefault(norm, []).append(pixels(inputs[0])))
    x = torch.rand(5, 1, 12, 12)
    ScaleChannels(net, SCALES).train()(x)
    for norm, rows in seen.items():
        assert len(rows) == 1
        torch.testing.assert_close(norm.running_mean, rows[0].mean(0))
        torch.testing.assert_close(norm.running_var, rows[0].var(0))
        assert int(norm.num_batches_tracked) == 1
    first = norms(net)[0]
    conv = net[0][0] if isinstance(net, nn.Sequential) else net.features.conv1
    rows = torch.cat([pixels(conv(resize(x, (side, side)))) for side in SIDES])
    torch.testing.assert_close(first.running_mean, rows.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.running_var, rows.var(0), rtol=1e-4, atol=1e-5)


@joint
def test_channels_of_one_size_are_answered_as_one_batch(make):
    net, images = make(), [torch.rand(4, 1, 12, 12) + i for i in range(3)]
    expected = copy.deepcopy(net)(torch.cat(images))
    torch.testing.assert_close(torch.cat(at_sizes(net, images)), expected, rtol=1e-4, atol=1e-5)


@joint
def test_evaluation_answers_one_channel_after_the_other_and_training_all_at_once(make):
    net, x = make(), torch.rand(4, 1, 12, 12)
    model = ScaleChannels(net, SCALES, "mean")
    images = [resize(x, (side, side)) for side in SIDES]
    separate = sum(copy.deepcopy(net)(image) for image in images) / 3
    assert not torch.allclose(model(x), separate, atol=1e-4)
    torch.testing.assert_close(ScaleChannels(Loop(copy.deepcopy(net)), SCALES, "mean")(x), model(x))
    net.eval()
    expected = sum(net(image) for image in images) / 3
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(sum(at_sizes(net, images)) / 3, expected)


def test_a_single_channel_is_the_network_itself():
    net, x = sequential(), torch.rand(4, 1, 12, 12)
    torch.testing.assert_close(ScaleChannels(copy.deepcopy(net), (1.0,))(x), net(x))


def test_a_method_of_the_networks_own_says_how_it_is_applied():
    class Twice(Loop):
        def at_sizes(self, images):
            return [2 * y for y in at_sizes(self.net, images)]

    net, images = sequential(), [torch.rand(4, 1, side, side) for side in SIDES]
    expected = at_sizes(copy.deepcopy(net), images)
    for actual, right in zip(at_sizes(nn.Sequential(Twice(net)), images), expected, strict=True):
        torch.testing.assert_close(actual, 2 * right)


def test_hooks_of_layers_are_called():
    net, sizes = create_model("pooled-cnn", **TINY), []
    for layer in (net.features.conv1, net.features.norm1):
        layer.register_forward_hook(lambda _, inputs, output: sizes.append((inputs[0].shape[2:], output.shape[2:])))
    ScaleChannels(net, SCALES)(torch.rand(2, 1, 12, 12))
    total = sum(side * side for side in SIDES)
    assert sizes == [*(((side, side),) * 2 for side in SIDES), ((total, 1),) * 2]
    sizes.clear()
    net.eval().register_forward_hook(lambda _, inputs, __: sizes.append(("net", *inputs[0].shape[2:])))
    ScaleChannels(net, SCALES).eval()(torch.rand(2, 1, 12, 12))
    assert sizes == [size for n in SIDES for size in (*[((n, n), (n, n))] * 2, ("net", n, n))]


@pytest.mark.parametrize("layout", ["planes", "rows"])
@pytest.mark.parametrize("layer", [nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.LeakyReLU, nn.Dropout])
def test_layers_that_work_in_place_train_as_those_that_do_not(layer, layout, monkeypatch):
    if layout == "rows":  # as on a GPU
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    gradients = []
    for inplace in (True, False):
        torch.manual_seed(0)
        options = {"p": 0.0} if layer is nn.Dropout else {}
        act = layer(inplace=inplace, **options)
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), act, nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), act
        model = ScaleChannels(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).double(), SCALES)
        model(torch.rand(4, 1, 12, 12).double()).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)


@joint
def test_gradients_are_those_of_finite_differences(make):
    net = make().double()
    for module in net.modules():  # ReLU has a kink that finite differences would cross
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.Tanh())
    x = torch.randn(2, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ScaleChannels(net, (0.8, 1.0), "mean"), x)


def test_every_parameter_learns_through_all_channels():
    model = ScaleChannels(JOINT["pooled-resnet"](), SCALES)
    model(torch.rand(4, 1, 12, 12)).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert (parameter.grad != 0).any(), key


@pytest.mark.parametrize("training", [True, False])
@joint
def test_errors_name_the_channel_that_refuses(make, training):
    net = make()
    if isinstance(net, nn.Sequential):
        net[0][0].padding = 0
    model = ScaleChannels(net, (0.25, 1.0, 2.0)).train(training)
    with pytest.raises((ValueError, RuntimeError), match=r"scale 0.25 shows `net` images of 1 x 1 pixels"):
        model(torch.zeros(2, 1, 4, 4))
    with pytest.raises((ValueError, RuntimeError), match=r"the channel of scale 0.25 .*channels"):
        model(torch.zeros(2, 5, 16, 16))


def test_errors_that_no_channel_has_alone_are_not_blamed_on_one():
    class Differ(Loop):
        def at_sizes(self, images):
            raise ValueError("they do not go together.")

    for net in (nn.Flatten(), nn.BatchNorm1d(1)):  # the second refuses every channel, for a reason of its own
        with pytest.raises(ValueError, match=r"^they do not go together\.$"):
            ScaleChannels(Differ(net), SCALES)(torch.zeros(2, 1, 12, 12))


def test_what_does_not_fit_memory_names_the_largest_channel():
    class Large(nn.Flatten):
        def forward(self, x):
            raise torch.OutOfMemoryError("out of memory.")

    message = r"scale 1.5 shows `net` images of 18 x 18 .*out of memory. Leave out the largest of 3 channels, 1.5"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        ScaleChannels(nn.Sequential(nn.BatchNorm2d(1), Large()), SCALES)(torch.zeros(2, 1, 12, 12))


def test_training_compiles_as_one_graph():
    torch._dynamo.reset()
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model, x = ScaleChannels(net, (0.5, 1.0)), torch.rand(4, 1, 8, 8)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for module in (model, compiled):
        module(x).square().sum().backward()
    for (key, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, msg=key)
    torch.testing.assert_close(other.state_dict(), model.state_dict())


# In a process of its own that ends at once: to take the group apart may wait forever for gloo's threads.
DISTRIBUTED = """
import copy, os, sys
import torch
from torch import nn
from scalesteer import ScaleChannels

class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    def forward(self, x):
        return self.net(x)

torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
for net in (nn.Sequential(*layers), Loop()):
    model, x = ScaleChannels(net, (0.5, 1.0, 2.0)), torch.rand(4, 1, 12, 12)
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    for module in (model, parallel):
        module(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), parallel.module.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad)
    torch.testing.assert_close(parallel.module.state_dict(), model.state_dict())
print("the same gradients", flush=True)
os._exit(0)
"""


def test_distributed_data_parallel(tmp_path):
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    command = [sys.executable, "-c", DISTRIBUTED, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "the same gradients\n", done.stderr


@pytest.mark.gpu
@joint
def test_device_gives_the_numbers_of_the_cpu_and_the_same_bits_twice(make, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # plain convolutions are cuDNN's
    model, x = ScaleChannels(make(), SCALES), torch.rand(8, 1, 12, 12, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda", "cuda"):
        other = copy.deepcopy(model).to(device, torch.float64)
        other(x.to(device)).square().sum().backward()
        buffers = [buffer.cpu() for buffer in other.buffers()]
        results.append([*(parameter.grad.cpu() for parameter in other.parameters()), *buffers])
    for expected, first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, expected, rtol=1e-6, atol=1e-8)
        assert torch.equal(second, first)
