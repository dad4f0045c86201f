"""What networks need of `ScaleChannels`: multiples of a size, other results than a tensor, work that is left out."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalesteer import ScaleChannels
from scalesteer.resize import canvas_size, resize


class Halves(nn.Module):
    """Wants multiples of eight; its result tells the size of the image."""

    def __init__(self, side=32):
        super().__init__()
        self.conv, self.side = nn.Conv2d(1, 3, 3, padding=1), side

    def forward(self, x):
        assert x.shape[-2] % 8 == x.shape[-1] % 8 == 0, "Input height should be divisible by 8."
        level = -8 * math.log(x.shape[-1] / self.side) ** 2
        return self.conv(x).mean((2, 3)) * 0 + torch.tensor([level - 1, level, level - 2])


# Multiples


@pytest.mark.parametrize(
    ("image", "scale", "multiple", "size"),
    [
        ((64, 64), 0.71, 32, (32, 32)),  # 45.4 pixels are nearer to 32 than to 64
        ((64, 64), 0.75, 32, (64, 64)),  # 48 lies amid the two, and is rounded up
        ((45, 100), 1.0, 32, (32, 96)),
        ((8, 8), 0.5, 16, (16, 16)),  # never less than one
        ((64, 96), 1.0, 32, (64, 96)),
        ((33, 40), 1.41, 1, (47, 56)),
    ],
)
def test_sizes_are_rounded_to_multiples(image, scale, multiple, size):
    assert canvas_size(image, scale, multiple) == size


def test_a_network_is_shown_multiples_and_the_size_found_is_that_of_the_channels_as_they_are():
    seen, net = [], Halves()
    net.register_forward_pre_hook(lambda _, x: seen.append(tuple(x[0].shape[-2:])))
    model = ScaleChannels(net, (0.5, 0.71, 1.0, 1.41), "max", multiple=8).eval()
    _, sizes = model(torch.rand(2, 1, 45, 50), return_scales=True)
    assert seen == [(24, 24), (32, 32), (48, 48), (64, 72)]
    assert sizes.tolist() == pytest.approx([math.sqrt(45 / 32 * 50 / 32)] * 2)
    assert model.pixels(45, 50) == sum(h * w for h, w in seen)
    assert "multiple=8" in repr(model)
    assert model.with_scales((1.0,)).multiple == 8
    with pytest.raises(AssertionError, match=r"scale 0.5 shows `net` images of 23 x 25 pixels, .*divisible by 8"):
        ScaleChannels(net, (0.5, 1.0)).eval()(torch.rand(2, 1, 45, 50))


def test_maps_of_multiples_lie_where_the_pixels_of_the_image_lie():
    """A network that copies the image: its joined map is the image, read at every pixel."""
    x = F.avg_pool2d(torch.rand(1, 2, 57, 50), 9, 1, 4)  # smooth
    net = nn.Identity()
    for grid in (None, (1, 0)):
        out = ScaleChannels(net, (1.0, 2.0), "mean", multiple=16, grid=grid)(x)
        assert out.shape == x.shape
        assert (out - x)[..., 4:-4, 4:-4].abs().max() < 0.02


@pytest.mark.parametrize(("border", "multiple"), [(4, 16), (1, 3)])
def test_a_border_that_breaks_the_multiples_is_named(border, multiple):
    with pytest.raises(ValueError, match=rf"twice the `border` \(got {border}\) must be a multiple of `multiple`"):
        ScaleChannels(nn.Identity(), (0.5, 1.0), border=border, multiple=multiple)


# Results that are no tensor


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        maps = self.norm(self.conv(x))
        return self.pack(maps, maps.mean((2, 3)))


def first(answer):
    return answer[0]


PACKED = {
    "dict": (lambda maps, logits: {"aux": maps, "out": logits}, "out"),
    "list": (lambda maps, logits: [maps, logits], 1),
    "tuple": (lambda maps, logits: (logits, maps), first),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("pack", "output"), PACKED.values(), ids=PACKED)
def test_the_part_with_the_logits_is_chosen(pack, output, training):
    net, plain = Several(), Several()
    plain.load_state_dict(net.state_dict())
    net.pack, plain.pack = pack, lambda maps, logits: logits
    x = torch.rand(4, 1, 12, 12)
    model = ScaleChannels(net, (0.5, 1.0), output=output).train(training)
    torch.testing.assert_close(model(x), ScaleChannels(plain, (0.5, 1.0)).train(training)(x))
    assert "output=" in repr(model)


@pytest.mark.parametrize(
    ("pack", "output", "error", "message"),
    [
        (
            PACKED["dict"][0],
            None,
            TypeError,
            r"\(got dict with the keys 'aux', 'out'\): choose .* by `output`",
        ),
        (PACKED["dict"][0], "logits", ValueError, r"`output` \(got 'logits'\) is not in what `net` returns: dict with"),
        (PACKED["list"][0], 2, ValueError, r"`output` \(got 2\) is not in what `net` returns: list of 2"),
        (PACKED["list"][0], lambda answer: answer, TypeError, r"maps \(got list of 2\) for `output`"),
        (PACKED["dict"][0], 1.5, TypeError, r"`output` must be a key, an index or a function \(got 1.5\)"),
    ],
)
def test_a_part_that_is_not_there_is_named(pack, output, error, message):
    net = Several().eval()
    net.pack = pack
    with pytest.raises(error, match=message):
        ScaleChannels(net, (0.5, 1.0), output=output).eval()(torch.rand(4, 1, 12, 12))


# Channels that are left out


@pytest.mark.parametrize("maps", [False, True])
def test_gradients_are_those_of_channels_that_are_computed_and_left_out_of_the_join(maps):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 1)]
    net = nn.Sequential(*layers, *([] if maps else [nn.AdaptiveAvgPool2d(1), nn.Flatten()])).double()
    scales, x = (0.5, 1.0, 1.5), torch.rand(5, 1, 12, 12).double()
    model, draws = ScaleChannels(net, scales, drop=0.5), []
    draw = model._draw
    model._draw = lambda x: draws.append(draw(x)) or draws[-1]
    out = model(x)
    assert not draws[0].all()
    one_by_one = []
    for i in range(len(x)):  # each image by itself, in the channels that it is shown to
        used = [scale for scale, shown in zip(scales, draws[0][:, i], strict=True) if shown]
        one_by_one.append(ScaleChannels(net, used, grid=(1, 0) if maps else None)(x[i : i + 1]))
    expected = torch.cat(one_by_one)
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(y.square().sum(), net.parameters()) for y in (out, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("maps", [False, True])
def test_channels_that_no_image_is_shown_to_are_not_computed(maps):
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), *([] if maps else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]))
    seen = []
    net.register_forward_pre_hook(lambda net, x: seen.append(x[0].shape[-1]) if net.training else None)
    model = ScaleChannels(net, (0.5, 1.0, 2.0), drop=0.9)
    torch.manual_seed(0)
    for _ in range(20):
        model(torch.rand(1, 1, 8, 8)).sum().backward()
    assert 20 <= len(seen) < 40
    assert set(seen) == {4, 8, 16}


def test_batch_normalisation_sees_the_images_that_are_shown():
    net = nn.Sequential(nn.BatchNorm2d(1, momentum=None), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model, x = ScaleChannels(net, (0.5, 1.0), drop=0.5), torch.rand(6, 1, 8, 8) * torch.arange(1, 7.0).view(-1, 1, 1, 1)
    draw = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 1, 1]]).bool()
    model._draw = lambda x: draw
    model(x)
    rows = torch.cat([resize(x, (4, 4))[draw[0]].flatten(), x[draw[1]].flatten()])
    torch.testing.assert_close(net[0].running_mean, rows.mean()[None])
    torch.testing.assert_close(net[0].running_var, rows.var()[None])


def test_a_copy_keeps_the_options():
    model = ScaleChannels(Several(), (0.5, 1.0), multiple=4, output=first)
    other = copy.deepcopy(model)
    assert (other.multiple, other.output) == (4, first)
