"""The spatial transformer: its equations by loops, the identity at the start, and a zoom that it undoes."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from scalesteer.baselines import SpatialTransformer2d, affine_sample
from tests.baselines import slow


def zoom(factor, batch=1, dtype=torch.float64):
    """The matrix that reads `factor` times further from the centre: objects appear `factor` times smaller."""
    return torch.tensor([[factor, 0, 0], [0, factor, 0]], dtype=dtype).expand(batch, 2, 3)


def blob(sigma, size=28):
    r = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    return torch.exp(-(r[:, None] ** 2 + r**2) / (2 * sigma**2))[None, None]


def test_sampling_is_the_published_definition():
    x = torch.randn(3, 2, 6, 9, dtype=torch.float64)
    theta = torch.eye(2, 3, dtype=torch.float64) + 0.4 * torch.randn(3, 2, 3, dtype=torch.float64)
    out = affine_sample(x, theta)
    for n, c in np.ndindex(3, 2):
        np.testing.assert_allclose(out[n, c].numpy(), slow.sample(x[n, c].numpy(), theta[n].numpy()), atol=1e-12)


def test_sampling_is_that_of_torch_far_outside_too():
    x = torch.randn(8, 3, 12, 7, dtype=torch.float64)
    theta = 3 * torch.randn(8, 2, 3, dtype=torch.float64)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    torch.testing.assert_close(affine_sample(x, theta), F.grid_sample(x, grid, align_corners=False), rtol=0, atol=1e-12)


def test_starts_as_the_identity_exactly():
    for size in ((28, 28), (28, 40), (56, 80), (5, 4)):
        layer = SpatialTransformer2d(2, size)
        x = torch.randn(3, 2, *size)
        assert torch.equal(layer.theta(x), torch.eye(2, 3).expand(3, 2, 3))
        assert torch.equal(layer(x), x)


def test_fixed_theta_undoes_a_zoom():
    small = blob(2.5)
    large = affine_sample(small, zoom(0.6))
    assert (large - blob(2.5 / 0.6)).abs().max() < 0.04
    assert (affine_sample(large, zoom(1 / 0.6)) - small).abs().max() < 0.05
    assert (large - small).abs().max() > 0.3


def test_learns_to_undo_a_zoom():
    torch.manual_seed(0)
    layer = SpatialTransformer2d(1, 28, dtype=torch.float64)
    x, target = blob(5.0), blob(2.5)
    optimiser = torch.optim.Adam(layer.parameters(), 0.005)
    losses = []
    for _ in range(80):
        loss = (layer(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    theta = layer.theta(x)[0]
    assert losses[-1] < losses[0] / 50
    assert torch.linalg.svdvals(theta[:, :2]).tolist() == pytest.approx([2, 2], abs=0.15)


def test_gradients_are_right():
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    theta = (zoom(0.83, 2) + 0.1 * torch.randn(2, 2, 3, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(affine_sample, (x, theta))
    layer = SpatialTransformer2d(1, 8, (2, 2), 3, dtype=torch.float64)
    layer.regression.weight.data.normal_(std=0.5)
    x = torch.randn(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))


def test_theta_is_made_of_the_window_and_its_distortion():
    layer = SpatialTransformer2d(1, 28)
    layer.regression.bias.data.copy_(torch.tensor([math.log(2) / 2, 0.1, 0.2, -0.3, 0.4, 0.5]).atanh())
    expected = torch.tensor([[2.2, 0.4, 0.4], [-0.6, 1.8, 0.5]])
    torch.testing.assert_close(layer.theta(torch.rand(1, 1, 28, 28))[0], expected)


def test_window_stays_finite_and_its_centre_in_the_image():
    layer, x = SpatialTransformer2d(1, 28), torch.rand(4, 1, 28, 28)
    for far in (1e3, -1e3):
        layer.regression.bias.data.fill_(far)
        theta = layer.theta(x)
        assert theta[:, :, :2].abs().max() <= 2 * math.exp(2)
        assert theta[:, :, 2].abs().max() <= 1


def test_localisation_looks_at_the_image():
    layer = SpatialTransformer2d(1, 28)
    layer.regression.weight.data.normal_()
    x = torch.rand(2, 1, 28, 28)
    assert (layer.theta(x)[0] - layer.theta(x)[1]).abs().max() > 1e-3
    assert torch.equal(layer(x), affine_sample(x, layer.theta(x)))


def test_shrink_keeps_parameters_and_localisation_and_shows_the_large_image():
    torch.manual_seed(0)
    small, large = SpatialTransformer2d(1, 28), SpatialTransformer2d(1, 56, shrink=2)
    large.load_state_dict(small.state_dict())
    for layer in (small, large):
        torch.nn.init.constant_(layer.regression.weight, 0.1)
    big = torch.rand(2, 1, 56, 56)
    averages = big.numpy().reshape(2, 1, 28, 2, 28, 2).mean((3, 5))
    torch.testing.assert_close(large.theta(big), small.theta(torch.from_numpy(averages)))
    assert large(big).shape == big.shape


def test_a_theta_that_is_not_a_number_reaches_the_output():
    x = torch.rand(2, 1, 6, 6)
    for value in (math.nan, math.inf):
        theta = torch.eye(2, 3).repeat(2, 1, 1)
        theta[1, 0, 0] = value
        out = affine_sample(x, theta)
        assert torch.equal(out[0], x[0])
        assert not torch.equal(out[1], x[1])
    assert out[0].isfinite().all()
    theta[1, 0, 0] = math.nan
    assert affine_sample(x, theta)[1].isnan().all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"in_channels": 0}, ValueError, r"`in_channels` must be at least 1 \(got 0\)"),
        ({"image_size": (28, 2.5)}, TypeError, r"`image_size` must be an integer \(got 2.5"),
        ({"image_size": 3}, ValueError, r"`image_size` must be at least 4 x 4 \(got \(3, 3\)\)"),
        ({"image_size": 7, "shrink": 2}, ValueError, r"`image_size` must be at least 8 x 8 \(got \(7, 7\)\)"),
        ({"channels": (1, 2, 3)}, ValueError, "`channels` must be an integer or a pair"),
        ({"hidden": -1}, ValueError, r"`hidden` must be at least 1 \(got -1\)"),
        ({"shrink": 0}, ValueError, r"`shrink` must be at least 1 \(got 0\)"),
        ({"dtype": torch.int32}, TypeError, "`dtype` must be torch.float16, bfloat16"),
        ({"device": "warp"}, ValueError, "`device` 'warp' is not available here"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        SpatialTransformer2d(**{"in_channels": 1, "image_size": 28, **arguments})


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(1, 28, 28), ValueError, r"4 axes \(B, C, H, W\) \(got shape \(1, 28, 28\)\). add a batch axis"),
        (torch.zeros(1, 2, 28, 28), ValueError, "in_channels=1 channels on axis 1"),
        (torch.zeros(1, 1, 28, 40), ValueError, r"image_size=\(28, 28\) \(got shape \(1, 1, 28, 40\)\)"),
        (torch.zeros(1, 1, 28, 28).double(), TypeError, "input is torch.float64 but the layer is torch.float32"),
        (torch.zeros(1, 1, 28, 28).int(), TypeError, r"real floating-point tensor \(got torch.int32\)"),
        ([[1.0]], TypeError, r"must be a tensor \(got list\)"),
    ],
)
def test_wrong_tensors_are_named(x, error, message):
    with pytest.raises(error, match=message):
        SpatialTransformer2d(1, 28)(x)


def test_copies_pickles_states_and_empty_batches():
    layer, x = SpatialTransformer2d(1, (28, 40)), torch.rand(2, 1, 28, 40)
    layer.regression.weight.data.normal_(std=0.1)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    keys = list(layer.train().state_dict())
    assert list(layer.eval().state_dict()) == keys
    empty = torch.zeros(0, 1, 28, 40, requires_grad=True)
    layer(empty).sum().backward()
    assert empty.grad.shape == empty.shape


def test_half_precision_is_close():
    layer, x = SpatialTransformer2d(1, 28), torch.rand(2, 1, 28, 28)
    layer.regression.bias.data.copy_(torch.tensor([-2.0, 1.0, 0.5, -1.0, -1.0, 0.0]))
    expected = layer(x)
    actual = copy.deepcopy(layer).half()(x.half())
    assert actual.dtype == torch.float16
    assert (actual.float() - expected).norm() / expected.norm() < 1e-2


def test_meta_device_then_materialised():
    layer = SpatialTransformer2d(1, 28, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    x = torch.rand(1, 1, 28, 28)
    assert torch.equal(layer(x), x)
