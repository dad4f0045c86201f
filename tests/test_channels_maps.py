"""Maps of scale channels: places, grids that are found from sizes, and borders."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalesteer import ScaleChannels
from scalesteer.places import find_grid
from scalesteer.resize import resize
from tests.test_channels import SCALES, Flat, spots


class Blobs(nn.Module):
    """Maps of log-odds: nothing (zero), a bright or a dark spot as wide as a Gaussian of `width` pixels.

    The response of -sigma^2 Laplacian of a Gaussian is largest when the spot is as wide as the filter's own Gaussian.
    """

    def __init__(self, stride=1, padding=8, pool=1, width=2):
        super().__init__()
        r = torch.arange(-4.0 * width, 4 * width + 1)
        q = (r[:, None] ** 2 + r**2) / (2 * width**2)
        kernel = (1 - q) * (-q).exp()
        self.register_buffer("kernel", (kernel - kernel.mean())[None, None] * 4 / width**2)
        self.width, self.stride, self.padding, self.pool = width, stride, padding, pool

    def forward(self, x):
        y = F.avg_pool2d(F.conv2d(x, self.kernel, stride=self.stride, padding=self.padding), self.pool)
        return torch.cat([torch.zeros_like(y), y - 1, -y - 1], 1)


@pytest.mark.parametrize("join", ["max", "logsumexp"])
@pytest.mark.parametrize(
    ("net", "stride", "offset", "border"),
    [
        (Blobs(), 1, 0, 0),
        (Blobs(stride=2), 2, 0, 7),
        (Blobs(pool=2), 2, 0.5, 0),
        (Blobs(stride=2, padding=16, pool=2, width=4), 4, 1, 8),
        (Blobs(padding=0), 1, 8, 9),
        (Blobs(padding=0, pool=2), 2, 8.5, 0),
    ],
)
def test_spots_of_many_sizes_are_named_and_measured_where_they_are(net, stride, offset, border, join):
    true = [(40, 44, 1.0, 6.0, 1), (41, 110, 2.0, -6.0, 2), (120, 60, 4.0, 6.0, 1), (105, 131, 5.6, -6.0, 2)]
    picture = spots(171, *[(r, c, w * net.width / 2, h) for r, c, w, h, _ in true])
    model = ScaleChannels(net, tuple(2 ** (k / 2) for k in range(-4, 4)), join, border=border)
    joined, sizes = model(picture, return_scales=True)
    assert joined.shape == net(picture).shape
    assert sizes.shape == joined[:, 0].shape
    odds, place = joined[0, 1:].amax(0), (torch.arange(joined.shape[-1]) * stride + offset)
    for row, column, width, _, name in true:
        near = ((place[:, None] - row).abs() < 16) & ((place[None] - column).abs() < 16)
        i, j = divmod(int(odds.masked_fill(~near, -99).argmax()), odds.shape[1])
        assert max(abs(float(place[i]) - row), abs(float(place[j]) - column)) <= max(1, 0.75 * stride)
        assert int(joined[0, :, i, j].argmax()) == name
        assert float(sizes[0, i, j]) == pytest.approx(
            width / 2, rel=0.2 if stride == 1 else 0.42
        )  # half a channel, a channel
    assert int(joined[0, :, *[int((85 - offset) / stride)] * 2].argmax()) == 0


def test_maps_of_the_image_itself_are_not_changed():
    net, x = nn.Conv2d(3, 4, 5, stride=3), torch.randn(2, 3, 32, 29)
    assert torch.equal(ScaleChannels(net, (1.0,))(x), net(x))


@pytest.mark.parametrize("scales", [(0.5,), (0.6, 1.9), (1.3, 2.0), (0.4, 0.8, 1.6)])
def test_without_a_channel_of_scale_one_the_map_has_the_size_of_the_images_own(scales):
    x = torch.randn(1, 3, 61, 58)
    for net in (nn.Conv2d(3, 2, 5), nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 2, 3, 2, 1), nn.Conv2d(3, 2, 7, 1)):
        model = ScaleChannels(net, scales, grid=(net.stride[0], (net.kernel_size[0] - 1) / 2 - net.padding[0]))
        assert model(x).shape == net(x).shape
        assert ScaleChannels(net, scales)(x).shape == net(x).shape


@pytest.mark.parametrize("scale", [0.4, 1.7, 2.0])
def test_one_channel_is_read_at_the_places_of_the_image(scale):
    x = torch.randn(2, 3, 41, 41)
    net = nn.Sequential(nn.Conv2d(3, 2, 5, 2, 2), nn.BatchNorm2d(2), nn.Dropout(0.5)).eval()
    model = ScaleChannels(net, (scale,))
    torch.testing.assert_close(model(x), ScaleChannels(net, (scale,), grid=(2, 0))(x))
    model.train()
    before = net[1].num_batches_tracked.item()
    assert model(x).shape == net.eval()(x).shape
    assert net[1].num_batches_tracked == before + 1  # the look at the image itself leaves no trace
    covering = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(2))  # the same places at every size
    assert torch.equal(
        ScaleChannels(covering, (scale,))(x), covering(resize(x, (round(41 * scale), round(41 * scale))))
    )


def test_a_channel_has_no_part_where_its_window_reaches_beyond_the_image():
    class Ones(nn.Module):  # without padding: a window of 17
        def forward(self, x):
            level = torch.full_like(x, float(x.shape[-1])) if x.shape[-1] < 64 else torch.zeros_like(x)
            return F.avg_pool2d(level, 17, 1).repeat(1, 2, 1, 1)

    joined = ScaleChannels(Ones(), (0.5, 1.0), "max")(torch.zeros(1, 1, 64, 64))[0, 0]
    # A window of 17 at half the size reaches 17 pixels of the image beyond its centre, 9 more than at scale 1.
    assert joined.shape == (48, 48)
    assert (joined[12:-12, 12:-12] == 32).all()
    assert (joined[:7] == 0).all()
    assert (joined[:, -7:] == 0).all()


def test_maps_of_equal_size_are_joined_as_they_are():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(2))
    x = torch.randn(2, 1, 20, 20)
    expected = (net(x) + net(resize(x, (10, 10)))) / 2
    torch.testing.assert_close(ScaleChannels(net, (0.5, 1.0), "mean")(x), expected)


@pytest.mark.parametrize(
    "layers",  # (kernel, stride, padding) of each
    [
        *(
            [(3, 1, 1)],
            [(7, 1, 0)],
            [(3, 2, 1)],
            [(2, 2, 0)],
            [(7, 2, 3), (3, 2, 1)],
            [(5, 1, 0), (2, 2, 0), (3, 1, 0)],
        ),
        *([(3, 1, 1), (2, 2, 0), (3, 1, 1), (2, 2, 0)], [(7, 2, 3), (3, 2, 1), (3, 2, 1)], [(4, 4, 0), (3, 1, 0)]),
    ],
)
def test_the_grid_is_found_from_sizes(layers):
    stride, offset = 1, 0.0
    for kernel, step, padding in layers:
        offset += stride * ((kernel - 1) / 2 - padding)
        stride *= step
    lengths = [round(101 * 2 ** (k / 3)) for k in range(-3, 5)]
    counts = []
    for n in lengths:
        for kernel, step, padding in layers:
            n = (n + 2 * padding - kernel) // step + 1
        counts.append(n)
    found = find_grid(lengths, counts)
    assert found[0] == stride
    assert abs(found[1] - offset) <= max(0, stride - 2) / 4  # exact up to a stride of two


@pytest.mark.parametrize(
    ("lengths", "counts", "stride"),
    [
        ([112, 224, 448], [4, 7, 14], 32),
        ([51, 64], [7, 8], 8),
        ([16, 32, 64], [8, 16, 32], 2),
        ([32, 64], [64, 128], 0.5),
        ([20, 30, 41], [40, 60, 82], 0.5),
    ],
)
def test_a_stride_is_found_from_few_sizes_also_of_an_enlarging_network(lengths, counts, stride):
    found = find_grid(lengths, counts)
    assert found[0] == stride
    assert stride > 0.5 or found[1] == -0.25


def test_sizes_that_no_stride_explains_are_told():
    class Odd(nn.Module):
        def forward(self, x):
            n = {10: 9, 20: 4, 40: 12}[x.shape[-1]]
            return torch.zeros(len(x), 2, n, n)

    message = r"no stride explains the sizes of the maps \(10 -> 9, 20 -> 4, 40 -> 12\): give `grid`"
    with pytest.raises(ValueError, match=message):
        ScaleChannels(Odd(), (0.5, 1.0, 2.0))(torch.zeros(1, 1, 20, 20))


# Borders


@pytest.mark.parametrize("mode", ["zeros", "replicate", "reflect"])
def test_smaller_channels_are_seen_with_a_border(mode):
    net, x = Flat().eval(), torch.rand(2, 3, 12, 16)
    z = []
    for size in ((6, 8), (12, 16), (20, 27)):
        small, border = F.interpolate(x, size=size, mode="bicubic", antialias=True), 4 if size < (12, 16) else 0
        # As numpy pads: the loop over channels is then torch's in no part.
        kind = {"zeros": "constant", "replicate": "edge", "reflect": "reflect"}[mode]
        z.append(net(torch.from_numpy(np.pad(small.numpy(), ((0, 0), (0, 0), (border,) * 2, (border,) * 2), kind))))
    model = ScaleChannels(net, SCALES, "mean", border=4, border_mode=mode)
    torch.testing.assert_close(model(x), torch.stack(z).mean(0))
    assert not torch.allclose(model(x), ScaleChannels(net, SCALES, "mean")(x))


@pytest.mark.parametrize(("stride", "grid"), [(1, None), (2, None), (3, (3, 0))])
@pytest.mark.parametrize("scales", [(0.5,), SCALES, (0.6, 1.9)])
def test_maps_are_cut_to_the_image(scales, stride, grid):
    # One convolution pads with zeros as the border does, so that the border must leave no trace.
    net, x = nn.Conv2d(3, 4, 5, stride, 2), torch.randn(2, 3, 61, 58)
    without = ScaleChannels(net, scales, "mean", grid=grid)(x)
    joined = ScaleChannels(net, scales, "mean", grid=grid, border=2 * stride)(x)
    assert joined.shape == without.shape == net(x).shape
    torch.testing.assert_close(joined[..., 2:-2, 2:-2], without[..., 2:-2, 2:-2])  # beyond, no map is read by itself


def test_maps_are_cut_where_a_channel_is_as_large_as_the_image():
    """0.99 of 20 pixels are 20: its map has as many places as the image's, but is one of an image that was moved."""
    net, x = nn.Conv2d(3, 2, 4, 4), torch.randn(1, 3, 20, 20)
    model = ScaleChannels(net, (0.99, 1.0), "max", grid=(4, 1.5), border=1)
    read = 0.75 * torch.eye(5) + 0.25 * torch.eye(5).roll(1, 1)  # the border is a quarter of a place
    read[-1] = torch.eye(5)[-1]  # the next one would lie beyond
    cut = read @ net(F.pad(x, (1,) * 4)) @ read.T
    torch.testing.assert_close(model(x), torch.maximum(cut, net(x)))


def test_borders_make_a_small_channel_answer_as_a_large_image_does():
    """A spot that fills its image, before ground that training showed: with zeros for features it is not the same."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 5, padding=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    spot = spots(16, (7.5, 7.5, 2.5, 1.0))
    wide = F.pad(spot, (8,) * 4)
    net.train()(F.pad(spot, (30,) * 4))
    expected = net.eval()(wide)
    large = spots(32, (15.5, 15.5, 5.0, 1.0))
    model = ScaleChannels(net, (0.5,), border=8)
    assert (model(large) - expected).norm() < 0.02 * expected.norm()
    assert (ScaleChannels(net, (0.5,))(large) - expected).norm() > 0.05 * expected.norm()
    assert (net(spot) - expected).norm() > 0.05 * expected.norm()


def test_a_border_that_cannot_be_made_or_cut_is_told():
    x = torch.zeros(1, 3, 16, 20)
    with pytest.raises(ValueError, match=r"`border` \(got 8\) must be smaller than .* \(one is 8 x 10\) to mirror"):
        ScaleChannels(Flat(), (0.5, 1.0), border=8, border_mode="reflect")(x)
    cells = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(2))
    with pytest.raises(ValueError, match=r"`border` \(got 8\) cannot be cut off maps of 2 places in all channels"):
        ScaleChannels(cells, (0.5, 1.0), border=8)(x)
    net = nn.Conv2d(3, 2, 5, padding=2)  # 8 pixels and twice 4 are 16, as many as the image has
    with pytest.raises(ValueError, match=r"`border` \(got 4\) cannot be cut off maps of 16 places in all channels"):
        ScaleChannels(net, (0.5, 1.0), border=4)(x)
    assert ScaleChannels(net, (0.5, 1.0), border=4, grid=(1, 0))(x).shape == (1, 2, 16, 20)
