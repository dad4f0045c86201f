"""Networks of any kind in several channels: what surrounds batch normalisation is traced, or refused with a warning."""

import copy
import pickle
import random
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from scalesteer import ScaleChannels, ScaleSteerableConv2d
from scalesteer.joint import at_sizes

SCALES, SIDES = (0.5, 1.0, 1.5), (8, 16, 24)


def conv(fan_in, fan_out, stride=1):
    return nn.Sequential(nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False), nn.BatchNorm2d(fan_out))


class Part(nn.Module):
    """Batch normalisation, and what a test puts around it."""

    def __init__(self, forward=None):
        super().__init__()
        self.first, self.second, self.pool = conv(3, 6), conv(6, 6), nn.AdaptiveAvgPool2d(1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.tensor(0.5))
        self.drop, self.calls, self.given = nn.Dropout(0.0), 0, forward

    def forward(self, x, *rest, **options):
        return self.given(self, x, *rest, **options)


def residual(self, x):
    """In-place activations, one block that comes twice, a parameter, a buffer, dropout."""
    y = F.relu(self.first(x), inplace=True)
    z = self.second(y)
    z += y
    y = self.drop(F.relu_(self.second(z)) * self.scale + self.shift)
    return torch.flatten(self.pool(y), 1)


class Dense(nn.Module):
    """Lists of tensors between blocks that ask what they are given."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Part(Dense.block) for _ in range(2))
        self.blocks[1].first = conv(9, 6)

    @staticmethod
    def block(self, x):
        x = [x] if isinstance(x, torch.Tensor) else x
        return self.first(torch.cat(x, 1))

    def forward(self, x):
        features = [x]
        for block in self.blocks:
            features.append(block(features))
        return torch.cat(features, 1).mean((2, 3))


class UNet(nn.Module):
    """Ways down and up, joined at sizes that are found from the maps."""

    def __init__(self):
        super().__init__()
        self.down, self.low, self.up = conv(3, 4), conv(4, 8, stride=2), conv(12, 4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        high = F.relu(self.down(x))
        low = F.interpolate(F.relu(self.low(high)), size=high.shape[-2:], mode="bilinear")
        low = F.pad(low, [0, high.size(3) - low.size(3), 0, high.size(2) - low.size(2)])
        return {"out": self.head(F.relu(self.up(torch.cat([high, low], dim=1)))), "sizes": high.shape}


class Attention(nn.Module):
    """A tuple of several results, keywords and optional arguments between modules."""

    def __init__(self):
        super().__init__()
        self.stem, self.gate, self.block = conv(3, 4), nn.Conv2d(4, 4, 1), Part(Attention.gated)
        self.block.first = conv(4, 4)
        self.head = nn.Linear(4, 3)

    @staticmethod
    def gated(self, x, weights=None, *, skip=None, twice=False):
        y = self.first(x) if weights is None else self.first(x) * weights
        y = y if skip is None else y + skip
        return (2 * y if twice else y), y.mean((1, 2, 3))[:, None]

    def forward(self, x):
        x = self.stem(x)
        y, _ = self.block(x, self.gate(x).sigmoid(), skip=x, twice=True)
        z, level = self.block(y)
        return self.head(z.amax((2, 3))) + level


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = conv(3, 4), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = checkpoint(lambda x: F.relu(self.first(x)), x, use_reentrant=False)
        return checkpoint(self.second, y, use_reentrant=False).mean((2, 3))


NETWORKS = {
    "residual": lambda: Part(residual),
    "dense": Dense,
    "unet": UNet,
    "attention": Attention,
    "checkpointed": Checkpointed,
}
networks = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)


def logits(answer):
    return answer["out"] if isinstance(answer, dict) else answer


def train_step(net, x, scales=SCALES, **options):
    model = ScaleChannels(net, scales, **options)
    model(x).square().sum().backward()
    return [parameter.grad for parameter in net.parameters()]


@networks
def test_images_of_one_size_are_answered_as_one_batch(make):
    """What the network itself makes of all images as one batch: values, gradients and statistics."""
    torch.manual_seed(0)
    net = make().double()
    other, images = copy.deepcopy(net), [torch.rand(4, 3, 16, 16).double() + i for i in range(3)]
    ours, expected = torch.cat([logits(y) for y in at_sizes(net, images)]), logits(other(torch.cat(images)))
    torch.testing.assert_close(ours, expected)
    for answer in (ours, expected):
        answer.square().sum().backward()
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    if not isinstance(net, Checkpointed):  # which torch runs a second time in the backward pass
        torch.testing.assert_close(net.state_dict(), other.state_dict())


class ByHand(nn.Module):
    """`residual` with its parts applied one after the other, as a user would write it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def at_sizes(self, images):
        net = self.net
        first = [y.relu() for y in at_sizes(net.first, images)]
        second = [y + z for y, z in zip(first, at_sizes(net.second, first), strict=True)]
        third = [y.relu() * net.scale + net.shift for y in at_sizes(net.second, second)]
        return [net.pool(y).flatten(1) for y in third]


def test_gradients_are_those_of_a_method_written_by_hand():
    torch.manual_seed(0)
    net, x = Part(residual), torch.rand(4, 3, 16, 16)
    other = copy.deepcopy(net)
    for ours, expected in zip(train_step(net, x), train_step(ByHand(other), x), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.state_dict(), other.state_dict())
    assert int(net.first[1].num_batches_tracked) == 1
    assert int(net.second[1].num_batches_tracked) == 2  # the block comes twice


@networks
def test_a_step_leaves_nothing_on_the_network_that_copies_or_files_would_carry(make):
    net, x = make(), torch.rand(4, 3, 16, 16)
    before = [set(vars(module)) for module in net.modules()]
    model = ScaleChannels(net, SCALES, output="out" if isinstance(net, UNet) else None)
    names = list(net.state_dict())
    model(x)
    assert [set(vars(module)) for module in net.modules()] == before
    assert list(net.state_dict()) == names
    twins = [copy.deepcopy(model)]
    if not isinstance(net, (Dense, Attention, Part)):  # which hold a function that pickle does not find
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        torch.manual_seed(1)
        expected = copy.deepcopy(model)(x)
        torch.manual_seed(1)
        torch.testing.assert_close(twin(x), expected)


# What cannot be traced


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def by_size(self, x):
    return (self.first(x) if x.shape[-1] > 10 else self.first(x) * 2).mean((2, 3))


def by_value(self, x):
    return (self.first(x) if x.mean() > 0 else self.second(x)).mean((2, 3))


def at_random(self, x):
    return (self.first(x) if random.random() < 2 else x).mean((2, 3))


def with_noise(self, x):
    return (self.first(x) + torch.rand(6, 1, 1)).mean((2, 3))


def counting(self, x):
    self.calls += 1
    return self.first(x).mean((2, 3))


def without_gradient(self, x):
    y = self.first(x)
    with torch.no_grad():
        weight = y.mean((2, 3), keepdim=True)
    return (y * weight).mean((2, 3))


def in_full_precision(self, x):
    y = self.first(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.second(y).mean((2, 3))


def with_own_gradient(self, x):
    return Doubled.apply(self.first(x)).mean((2, 3))


def checkpointed_the_old_way(self, x):
    return checkpoint(self.first, x, use_reentrant=True).mean((2, 3))


REFUSED = {
    by_size: "control flow",
    by_value: "control flow",
    at_random: "draws numbers",
    with_noise: "a tensor that is no parameter",
    counting: "changes its attributes",
    without_gradient: "no_grad",
    in_full_precision: "autocast",
    with_own_gradient: "torch.fx cannot trace it",
    checkpointed_the_old_way: "torch.fx cannot trace it",
}


@pytest.mark.parametrize(("forward", "reason"), REFUSED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_a_trace_would_get_wrong_is_refused_with_one_warning_and_the_networks_own_result(forward, reason):
    torch.manual_seed(0)
    net, images = Part(forward), [torch.rand(4, 3, side, side, requires_grad=True) for side in SIDES]
    other, state = copy.deepcopy(net), random.getstate()
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=rf"^first\.1 \(BatchNorm2d\) sees each channel .* because Part .*{reason}"):
        answers = at_sizes(net, images)
    random.setstate(state)
    torch.manual_seed(1)
    expected = [other(x) for x in images]
    torch.testing.assert_close(answers, expected)
    for y in (answers, expected):
        sum(part.square().sum() for part in y).backward()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at_sizes(net, images)  # told once


def test_a_module_that_is_refused_leaves_the_others_side_by_side():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.odd, self.head = conv(3, 3), Part(by_size), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.odd(self.stem(x)))

    net = Net()
    with pytest.warns(UserWarning, match=r"^odd\.first\.1 \(BatchNorm2d\)"):
        ScaleChannels(net, SCALES)(torch.rand(4, 3, 16, 16))
    assert (int(net.stem[1].num_batches_tracked), int(net.odd.first[1].num_batches_tracked)) == (1, 3)


def test_layers_with_statistics_of_another_kind_are_named():
    class Renorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_scale", torch.ones(1))

        def forward(self, x):
            return x / x.std()

    net = nn.Sequential(nn.Conv2d(3, 4, 3), Renorm(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.warns(UserWarning, match=r"^1 \(Renorm\) .* what it does with a batch is not known"):
        ScaleChannels(net, SCALES)(torch.rand(4, 3, 16, 16))


def test_networks_without_batch_normalisation_and_frozen_ones_are_called_as_they_are():
    class Net(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), norm

        def forward(self, x):
            assert isinstance(x, torch.Tensor)
            return self.norm(self.conv(x)).mean((2, 3)) if x.shape[-1] > 10 else self.norm(self.conv(x)).amax((2, 3))

    frozen = nn.BatchNorm2d(4).eval()
    for norm in (nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, track_running_stats=True), frozen):
        ScaleChannels(Net(norm), SCALES)(torch.rand(4, 3, 16, 16))
    assert int(frozen.num_batches_tracked) == 0


# What a trace follows


def test_a_changed_attribute_is_seen():
    def forward(self, x):
        y = self.first(x)
        return (self.second(y) if self.calls else y).mean((2, 3))

    net, images = Part(forward), [torch.rand(4, 3, side, side) for side in SIDES]
    for calls in (0, 1, 0, 1):
        net.calls = calls
        at_sizes(net, images)
    assert int(net.first[1].num_batches_tracked) == 4
    assert int(net.second[1].num_batches_tracked) == 2
    net.first = conv(3, 6)  # another module in its place
    at_sizes(net, images)
    assert int(net.first[1].num_batches_tracked) == 1
    net.forward = lambda x: net.second(net.first(x)).amax((2, 3))  # a method of this one module
    answers = at_sizes(net, images)
    torch.testing.assert_close(answers[0].shape, torch.Size([4, 6]))
    assert int(net.first[1].num_batches_tracked) == 2


def test_hooks_of_modules_that_are_taken_apart_are_called_for_each_image():
    net, seen = Part(residual), []
    net.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    net.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].shape[-1]) or output + 1)
    net.first.register_forward_hook(
        lambda _, args, kwargs, output: seen.append((args[0].shape[-1], list(kwargs))), with_kwargs=True
    )
    images = [torch.rand(4, 3, side, side) for side in SIDES]
    plain = copy.deepcopy(net)
    for hooks in (plain._forward_pre_hooks, plain._forward_hooks, plain.first._forward_hooks):
        hooks.clear()
    ours, expected = at_sizes(net, images), at_sizes(plain, [2 * x for x in images])
    torch.testing.assert_close(ours, [y + 1 for y in expected])
    assert seen == [*((side, []) for side in SIDES), *SIDES]
    net.register_full_backward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="it has hooks for the backward pass"):
        at_sizes(net, images)


def test_layers_of_this_package_train_within_a_network_of_ones_own():
    def forward(self, x):
        return F.relu(self.second(self.first(x))).mean((2, 3))

    net = Part(forward)
    net.first = ScaleSteerableConv2d(3, 6, 5, padding="same", scales=(1.0, 1.4))
    gradients = train_step(net, torch.rand(4, 3, 16, 16))
    assert gradients[1].abs().sum() > 0
    assert int(net.second[1].num_batches_tracked) == 1


def test_other_threads_do_not_notice_that_a_network_is_traced(monkeypatch):
    other, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.rand(2, 3, 8, 8)
    expected, found = other(x), []

    def forward(self, x):
        thread = threading.Thread(target=lambda: found.append(other(torch.ones(2, 3, 8, 8) * 0 + keep)))
        thread.start()
        thread.join()
        return self.first(x).mean((2, 3))

    keep = x
    ScaleChannels(Part(forward), SCALES)(torch.rand(4, 3, 16, 16))
    torch.testing.assert_close(found, [expected] * len(found))
    assert found


def test_autocast_and_mixed_numbers_of_images():
    net = Part(residual)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answers = at_sizes(net, [torch.rand(n, 3, side, side) for n, side in zip((4, 1, 7), SIDES, strict=True)])
    assert [y.shape for y in answers] == [(4, 6), (1, 6), (7, 6)]
    assert int(net.first[1].num_batches_tracked) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which the compiler reads
def test_a_network_that_is_compiled_trains_the_same():
    torch._dynamo.reset()
    model, x = ScaleChannels(Part(residual), (0.5, 1.0)), torch.rand(4, 3, 12, 12)
    other = copy.deepcopy(model)
    for module in (model, torch.compile(other, backend="eager")):
        module(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other.state_dict(), model.state_dict())


def test_the_compiler_is_not_loaded_before_a_network_is_traced():
    code = (
        "import sys, torch; from torch import nn; from scalesteer import ScaleChannels\n"
        "net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        "ScaleChannels(net, (0.5, 1.0))(torch.rand(2, 1, 8, 8)); print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
