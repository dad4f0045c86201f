"""The locally scale-invariant convolution: its published definition by loops, its promise, its behaviour as a layer."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scalesteer import functional
from scalesteer.baselines import KANAZAWA_SCALES, LocallyScaleInvariantConv2d, VectorFieldConv2d, _resized
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


@pytest.mark.parametrize(
    ("channels", "options"),
    [
        (1, {"kernel_size": 3}),
        (1, {"antialias": True}),
        (4, {}),
        (4, {"antialias": True, "kernel_size": 5}),
        (3, {"kernel_size": 3, "stride": 2, "padding": 3}),
        (2, {"padding": (0, 2), "dilation": (2, 1), "kernel_size": 3}),
        (2, {"kernel_size": 3, "padding": "valid", "stride": (1, 3)}),
        (2, {"padding": 6, "scales": (0.7,)}),
    ],
)
def test_shorter_ways_give_the_same_with_gradients(monkeypatch, channels, options):
    layer = make(channels, 6, **{"padding": "same", "scales": (0.5, 0.8, 1.0, 1.3), **options})
    x = torch.randn(2, channels, 9, 12, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(_resized, "_frequencies_pay", lambda *sizes: True)
    monkeypatch.setattr(_resized, "_maps_pay", lambda *sizes: True)
    with monkeypatch.context() as patch:
        patch.setattr(_resized, "_convolve_resized", None)
        out = layer(x)
    monkeypatch.setattr(_resized, "_frequencies_pay", lambda *sizes: False)
    monkeypatch.setattr(_resized, "_maps_pay", lambda *sizes: False)
    expected = layer(x)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(y.square().sum(), (x, layer.weight)) for y in (out, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)


@pytest.mark.parametrize("padding", [3, 8])
@pytest.mark.parametrize("vectors", [False, True])
def test_frequencies_leave_ties_where_the_window_is_blank(monkeypatch, vectors, padding):
    kind = {"padding": padding, "scales": (0.5, 1.0, 1.3), "dtype": torch.float32}
    layer = VectorFieldConv2d(3, 4, vector_input=True, **kind) if vectors else make(6, 4, **kind)
    layer.bias.data.fill_(0.5)
    x = torch.zeros(2, 6, 24, 24)
    x[:, :, 4:8, 5:9] = torch.randn(2, 6, 4, 4)
    x = (x.unflatten(1, (3, 2)) if vectors else x).requires_grad_()
    found = []
    for pays in (True, False):
        monkeypatch.setattr(_resized, "_frequencies_pay", lambda *sizes, pays=pays: pays)
        out, winner = layer(x, return_scales=True)
        found.append((out, winner, *torch.autograd.grad(out.square().sum(), (x, layer.weight))))
    assert torch.equal(found[0][1], found[1][1])
    assert (found[0][1] == 0).float().mean() > 0.3  # there are blank windows, and the lowest scale wins them
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_the_maximum_and_its_gradient_are_those_of_the_running_maximum():
    draw = torch.Generator().manual_seed(0)
    responses = [torch.randint(4, (2, 3, 5), generator=draw).double().requires_grad_() for _ in range(4)]  # with ties
    best, winner = _resized._Largest.apply(*responses)
    expected, index = functional.max_over_scales(iter(responses), 4, return_scales=True)
    assert torch.equal(best, expected)
    assert torch.equal(winner, index)
    found = [torch.autograd.grad((y**2).sum(), responses, create_graph=True) for y in (best, expected)]
    torch.testing.assert_close(*found)
    second = [torch.autograd.grad(sum(g.sum() for g in grads), responses) for grads in found]
    torch.testing.assert_close(*second)
    with torch.no_grad():
        responses[-1][0, 0, 0] = -torch.inf
        best, winner = _resized._largest(responses)
        expected, index = functional.max_over_scales(iter(responses), 4, return_scales=True)
    assert best[0, 0, 0] == -torch.inf
    assert torch.equal(best, expected)
    assert torch.equal(winner, index)


@pytest.mark.parametrize(
    ("arguments", "batch", "pixels", "ways"),
    [
        ((1, 30), 1, 28, ["taps", "taps", "taps", "resized", "resized", "resized"]),
        ((16, 24), 32, 20, ["frequencies"] * 6),
        ((16, 24), 1, 20, ["resized"] * 6),
        ((64, 64), 8, 28, ["resized"] * 6),  # filters would outweigh the images
        ((2, 3), 4, 200, ["resized"] * 6),
    ],
)
def test_the_shorter_way_is_taken_where_there_is_one(monkeypatch, arguments, batch, pixels, ways):
    taken = []
    names = {"_multiply_taps": "taps", "_multiply_frequencies": "frequencies", "_convolve_resized": "resized"}
    for name, way in names.items():
        original = getattr(_resized, name)
        monkeypatch.setattr(_resized, name, lambda *a, f=original, way=way: taken.append(way) or f(*a))
    layer = make(*arguments, padding="same")
    x = torch.randn(batch, arguments[0], pixels, pixels, dtype=torch.float64)
    layer(x)
    assert taken == ways
    if "frequencies" in ways:  # half precision is for convolutions
        taken.clear()
        with torch.autocast("cpu", torch.bfloat16):
            layer.float()(x.float())
        layer.to(torch.bfloat16)(x.to(torch.bfloat16))
        assert taken == ["resized"] * 12


@pytest.mark.parametrize(("channels", "mode"), [(2, "circular"), (1, "zeros")])
def test_one_scale_is_conv2d(channels, mode):
    layer = make(channels, 4, 5, 2, 1, groups=channels, padding_mode=mode, scales=(1.0,))
    plain = nn.Conv2d(channels, 4, 5, 2, 1, groups=channels, padding_mode=mode, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, channels, 9, 11, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize(("length", "size"), [(28, 18), (28, 22), (28, 35), (28, 56), (40, 25), (7, 3), (5, 1), (1, 2)])
def test_resize_matrix_is_that_of_torch(length, size, antialias):
    x = torch.randn(1, 2, length, 6, dtype=torch.float64)
    step = length / size
    spread = step if antialias else 1.0
    matrix = _resized.resize_matrix(step / 2 - 0.5, step, size, length, spread, dtype=torch.float64)
    expected = F.interpolate(x, (size, 6), mode="bilinear", antialias=antialias)
    torch.testing.assert_close(matrix @ x, expected, rtol=0, atol=1e-12)


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


def test_matrices_made_in_inference_mode_serve_training_later():
    _resized._cached.cache_clear()
    layer = LocallyScaleInvariantConv2d(1, 1, padding="same")
    x = torch.randn(1, 1, 13, 13, requires_grad=True)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_repr_hides_defaults():
    text = repr(LocallyScaleInvariantConv2d(1, 2, stride=2, padding=1, bias=False, scales=(1, 1.26)))
    assert "(1, 2, kernel_size=7, stride=(2, 2), padding=(1, 1), bias=False, scales=(1, 1.26))" in text
