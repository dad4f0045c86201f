"""The locally scale-invariant convolution: its published definition by loops, its promise, its behaviour as a layer."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from scalesteer.baselines import KANAZAWA_SCALES, LocallyScaleInvariantConv2d
from tests.baselines import slow


def make(*args, **kwargs):
    return LocallyScaleInvariantConv2d(*args, **{"dtype": torch.float64, **kwargs})


def test_default_scales_are_the_inverse_of_the_authors_resizing():
    np.testing.assert_allclose(
        [1 / s for s in reversed(KANAZAWA_SCALES)], [0.63, 0.7937, 1, 1.2599, 1.5874, 2], rtol=1e-4
    )


@pytest.mark.parametrize("antialias", [False, True])
def test_output_is_the_published_definition(antialias):
    layer = make(2, 3, 3, padding="same", scales=(0.5, 0.8, 1.0, 1.6), antialias=antialias)
    x = torch.randn(2, 2, 7, 9, dtype=torch.float64)
    expected = slow.responses(x.numpy(), layer.weight.detach().numpy(), layer.scales, antialias)
    out, winner = layer(x, return_scales=True)
    bias = layer.bias.detach().numpy()[:, None, None]
    np.testing.assert_allclose(out.detach().numpy(), expected.max(0) + bias, atol=1e-12)
    np.testing.assert_array_equal(winner.numpy(), expected.argmax(0))
    assert len(set(winner.flatten().tolist())) == 4


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups", "mode"),
    [
        (1, "valid", 1, 1, "zeros"),
        (2, 1, 1, 1, "zeros"),
        (2, 3, 1, 2, "zeros"),
        (1, 3, 1, 1, "replicate"),
        (1, 2, 2, 1, "zeros"),
        (1, 1, 1, 2, "zeros"),
        (3, 0, 2, 2, "zeros"),
        (1, 1, 1, 1, "reflect"),
        (1, 1, 1, 2, "circular"),
    ],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_every_geometry_reads_responses_at_the_windows_centres(channels, stride, padding, dilation, groups, mode):
    groups = min(groups, channels)
    # At 0.5 both axes double, at 0.484 one of them.
    layer = make(channels, 4, 3, stride, padding, dilation, groups, False, mode, scales=(0.484, 0.5, 0.6, 1.0, 1.5))
    x = torch.randn(1, channels, 8, 7, dtype=torch.float64)
    amount = 0 if padding == "valid" else padding
    weight = layer.weight.detach().numpy()
    expected = slow.responses_at_centres(x.numpy(), weight, layer.scales, stride, amount, dilation, groups, mode)
    found = torch.stack(list(layer.responses(x, [layer.weight] * 5)))
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-12)
    plain = nn.Conv2d(channels, 4, 3, stride, padding, dilation, groups)
    assert layer(x).shape == plain(x.float()).shape


@pytest.mark.parametrize(("channels", "mode"), [(2, "circular"), (1, "zeros")])
def test_one_scale_is_conv2d(channels, mode):
    layer = make(channels, 4, 5, 2, 1, groups=channels, padding_mode=mode, scales=(1.0,))
    plain = nn.Conv2d(channels, 4, 5, 2, 1, groups=channels, padding_mode=mode, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, channels, 9, 11, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=1e-14)


def blob(size, sigma):
    """A Gaussian, centred, of height one: resizing it only changes its sigma."""
    r = torch.arange(size, dtype=torch.float64) - size // 2
    return torch.exp(-(r[:, None] ** 2 + r**2) / (2 * sigma**2))


def centre_surround():
    """A 7 x 7 filter that answers best to a blob of one size: it prefers blobs, and it sums to zero."""
    weight = blob(7, 1.0) / blob(7, 1.0).sum() - blob(7, 2.0) / blob(7, 2.0).sum()
    return weight[None, None]


def test_response_to_an_enlarged_object_is_the_same_at_the_scale_that_is_larger_by_as_much():
    scales = tuple((5 / 3) ** n for n in range(4))  # 125 pixels become 75, 45 and 27: odd, with one common centre
    layer = make(1, 1, padding="same", scales=scales, bias=False)
    plain = nn.Conv2d(1, 1, 7, padding=3, bias=False, dtype=torch.float64)
    outs, winners, plains = [], [], []
    for module in (layer, plain):
        module.weight.data.copy_(centre_surround())
    for growth in scales[:3]:
        x = blob(125, 2.2 * growth)[None, None]
        out, winner = layer(x, return_scales=True)
        outs.append(out[0, 0, 62, 62].item())
        winners.append(winner[0, 0, 62, 62].item())
        plains.append(plain(x)[0, 0, 62, 62].item())
    assert winners == [1, 2, 3]
    assert max(outs) / min(outs) < 1.02
    assert max(plains) / min(plains) > 4


def test_gradients_are_right():
    layer = make(2, 2, 3, padding="same", scales=(0.7, 1.0, 1.5))
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)

    def run(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(run, (x, layer.weight, layer.bias))
    assert torch.autograd.gradgradcheck(run, (x, layer.weight, layer.bias))


def test_float32_gradient_is_that_of_float64():
    layer, x = LocallyScaleInvariantConv2d(2, 3, padding="same"), torch.randn(2, 2, 12, 12)
    grads = []
    for dtype in (torch.float64, torch.float32):
        copy = LocallyScaleInvariantConv2d(2, 3, padding="same", dtype=dtype)
        copy.load_state_dict(layer.state_dict())
        copy(x.to(dtype)).square().sum().backward()
        grads.append(copy.weight.grad.double())
    assert (grads[1] - grads[0]).norm() / grads[0].norm() < 1e-5


def test_ties_go_to_the_lowest_scale():
    out, winner = make(1, 2, padding="same", bias=False)(
        torch.zeros(1, 1, 9, 9, dtype=torch.float64), return_scales=True
    )
    assert (winner == 0).all()
    assert (out == 0).all()


def test_a_pixel_that_is_not_a_number_shows_wherever_a_window_holds_it():
    layer = make(1, 2, 3, padding="same")
    for value in (math.nan, math.inf, -math.inf):
        x = torch.randn(1, 1, 12, 12, dtype=torch.float64)
        x[0, 0, 5, 5] = value
        assert not layer(x)[:, :, 4:7, 4:7].isfinite().any()


def test_padding_mode_that_cannot_fill_is_named():
    layer = make(1, 1, 7, padding="same", padding_mode="reflect", scales=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"cannot fill 3 rows and 3 columns beyond an image of 4 x 3 \(7 x 6 before"):
        layer(torch.zeros(1, 1, 7, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"padding_mode='circular' cannot fill"):
        make(1, 1, 7, padding="same", padding_mode="circular", scales=(3.0,))(
            torch.zeros(1, 1, 7, 6, dtype=torch.float64)
        )


def test_image_too_small_for_the_padding_is_named():
    with pytest.raises(ValueError, match=r"an image of 6 x 9 is too small for kernel_size=7 with padding=\(0, 0\)"):
        make(1, 1, padding="valid")(torch.zeros(1, 1, 6, 9, dtype=torch.float64))


def test_image_smaller_than_the_filter_is_right():
    layer = make(1, 2, 7, padding="same", scales=(0.5, 1.0, 2.0), bias=False)
    x = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    expected = slow.responses(x.numpy(), layer.weight.detach().numpy(), layer.scales)
    np.testing.assert_allclose(layer(x).detach().numpy(), expected.max(0), atol=1e-12)


def test_repr_hides_defaults():
    text = repr(LocallyScaleInvariantConv2d(1, 2, stride=2, padding=1, bias=False, scales=(1, 1.26)))
    assert "(1, 2, kernel_size=7, stride=(2, 2), padding=(1, 1), bias=False, scales=(1, 1.26))" in text
