"""Vector fields of response and scale: the definition by loops, equivariance, and the layers that fields need."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from scalesteer.baselines import (
    MARCOS_SCALES,
    VectorBatchNorm2d,
    VectorFieldConv2d,
    VectorMagnitude,
    VectorMaxPool2d,
)
from tests.baselines import slow

SCALES = (0.5, 0.8, 1.0, 1.6)


def make(*args, **kwargs):
    return VectorFieldConv2d(*args, **{"dtype": torch.float64, **kwargs})


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def angle_of(scale, scales):
    return math.radians(120) * math.log(scale) / math.log(scales[-1] / scales[0])


def as_vectors(responses, bias, scales):
    """The definition's last step, pixel by pixel: strength after the ReLU, direction from the scale that won."""
    out = np.zeros((*responses.shape[1:3], 2, *responses.shape[3:]))
    for n, o, i, j in np.ndindex(*responses.shape[1:]):
        best = int(np.argmax(responses[:, n, o, i, j]))
        strength = max(0.0, responses[best, n, o, i, j] + bias[o])
        angle = angle_of(scales[best], scales)
        out[n, o, :, i, j] = strength * math.cos(angle), strength * math.sin(angle)
    return out


def test_default_scales_are_the_inverse_of_the_authors_resizing():
    np.testing.assert_allclose([1 / s for s in reversed(MARCOS_SCALES)], [1.26**n for n in range(-4, 4)])


@pytest.mark.parametrize("antialias", [False, True])
def test_scalar_input_gives_the_published_definition(antialias):
    layer = make(2, 3, 3, padding="same", scales=SCALES, antialias=antialias)
    x = field(1, 2, 7, 8)
    found = slow.responses(x.numpy(), layer.weight.detach().numpy(), SCALES, antialias)
    expected = as_vectors(found, layer.bias.tolist(), SCALES)
    out, winner = layer(x, return_scales=True)
    np.testing.assert_allclose(out.detach().numpy(), expected, atol=1e-12)
    np.testing.assert_array_equal(winner.numpy(), found.argmax(0))


def test_vector_input_gives_the_published_definition():
    layer = make(2, 3, 3, padding="same", scales=SCALES, vector_input=True)
    x = field(1, 2, 2, 7, 6)
    weight = layer.weight.detach().numpy()  # (O, C, 2, k, k)
    total = 0
    for component in (0, 1):  # one filter for each component, turned by the scale's angle; the sum is the response
        turned = []
        for scale in SCALES:
            cos, sin = math.cos(angle_of(scale, SCALES)), math.sin(angle_of(scale, SCALES))
            turned.append(weight[:, :, 0] * (cos, sin)[component] + weight[:, :, 1] * (-sin, cos)[component])
        total = total + slow.responses(x[:, :, component].numpy(), turned, SCALES, antialias=True)
    expected = as_vectors(total, layer.bias.tolist(), SCALES)
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, atol=1e-12)


def test_groups_take_vector_channels_apart():
    layer = make(4, 6, 3, padding="same", groups=2, scales=SCALES, vector_input=True)
    x = field(1, 4, 2, 7, 7)
    halves = []
    for i in (0, 1):
        half = make(2, 3, 3, padding="same", scales=SCALES, vector_input=True)
        half.load_state_dict({"weight": layer.weight[3 * i : 3 * i + 3], "bias": layer.bias[3 * i : 3 * i + 3]})
        halves.append(half(x[:, 2 * i : 2 * i + 2]))
    torch.testing.assert_close(layer(x), torch.cat(halves, 1), rtol=0, atol=1e-13)


def test_angles_are_zero_at_scale_one_and_span_120_degrees():
    layer = make(1, 1)
    assert layer.angles[3] == pytest.approx(0)
    assert math.degrees(layer.angles[-1] - layer.angles[0]) == pytest.approx(120)
    np.testing.assert_allclose(np.diff(layer.angles), np.diff(layer.angles)[0])
    assert make(1, 1, scales=(2.0,)).angles == (0.0,)


def blob(size, sigma):
    r = torch.arange(size, dtype=torch.float64) - size // 2
    return torch.exp(-(r[:, None] ** 2 + r**2) / (2 * sigma**2))


GROWTH = tuple((5 / 3) ** n for n in range(4))  # 125 pixels become 75, 45 and 27: odd, with one common centre


def centre_surround():
    """A 7 x 7 filter that prefers blobs of one size."""
    return blob(7, 1.0) / blob(7, 1.0).sum() - blob(7, 2.0) / blob(7, 2.0).sum()


@torch.no_grad()
def test_angle_moves_with_the_objects_scale_and_length_does_not():
    layer = make(1, 1, padding="same", scales=GROWTH, bias=False)
    layer.weight.copy_(centre_surround())
    vectors = [layer(blob(125, 2.0 * growth)[None, None])[0, 0, :, 62, 62] for growth in GROWTH[:3]]
    lengths = [v.norm().item() for v in vectors]
    angles = [math.atan2(v[1], v[0]) for v in vectors]
    np.testing.assert_allclose(np.diff(angles), math.radians(120) / 3, atol=1e-9)
    assert max(lengths) / min(lengths) < 1.04


@torch.no_grad()
def test_second_layer_is_equivariant_a_grown_and_turned_field_gives_a_turned_response():
    layer = make(1, 2, padding="same", scales=GROWTH, bias=False, vector_input=True)
    for channel, angle in enumerate((0.0, -math.pi / 3)):
        layer.weight[channel, 0, 0] = math.cos(angle) * centre_surround()
        layer.weight[channel, 0, 1] = math.sin(angle) * centre_surround()
    step = math.radians(120) / 3
    seen = []
    for n, growth in enumerate(GROWTH[:3]):
        angle = 0.4 + n * step  # the direction that a first layer gives an object that has grown n steps
        direction = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)[:, None, None]
        out = layer((direction * blob(125, 2.0 * growth))[None, None])[0, :, :, 62, 62]
        seen.append(torch.view_as_complex(out.contiguous()) * complex(math.cos(n * step), -math.sin(n * step)))
    for later in seen[1:]:
        assert ((later - seen[0]).abs() / seen[0].abs()).max() < 0.04


def test_gradients_are_right():
    x = field(1, 1, 2, 5, 6).requires_grad_()
    layer = make(1, 2, 3, padding="same", scales=(0.7, 1.0, 1.5), vector_input=True)

    def run(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(run, (x, layer.weight, layer.bias))


def test_buffer_follows_dtype_in_full_precision():
    expected = [[math.cos(a) for a in make(1, 1).angles], [math.sin(a) for a in make(1, 1).angles]]
    layer = VectorFieldConv2d(1, 1).half().double()
    assert layer.directions.dtype == torch.float64
    np.testing.assert_allclose(layer.directions.numpy(), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("window", "padding"), [(2, 0), (3, 1), (4, 1), (8, 2)])
def test_pooling_keeps_the_longest_vector(window, padding):
    x = field(2, 3, 2, 9, 11)
    expected = slow.pool_vectors(x.numpy(), window, padding)
    np.testing.assert_array_equal(VectorMaxPool2d(window, padding=padding)(x).numpy(), expected)


def test_pooling_sends_the_gradient_to_the_longest_vector_and_nowhere_else():
    x = field(1, 1, 2, 4, 4).requires_grad_()
    pool = VectorMaxPool2d(2)
    assert torch.autograd.gradcheck(pool, (x,))
    pool(x).sum().backward()
    assert ((x.grad != 0).all(2) == (x.grad != 0).any(2)).all()
    assert (x.grad != 0).any(2).sum() == 4


def test_pooling_has_the_shape_of_max_pool2d_with_pairs_and_stride():
    x = field(1, 2, 2, 9, 11)
    arguments = {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)}
    assert VectorMaxPool2d(**arguments)(x).shape[-2:] == nn.MaxPool2d(**arguments)(x[:, :, 0]).shape[-2:]


def test_batch_norm_divides_by_the_standard_deviation_of_lengths():
    norm = VectorBatchNorm2d(3, dtype=torch.float64)
    norm.weight.data = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    x = field(4, 3, 2, 5, 5) * torch.tensor([1.0, 10.0, 0.1], dtype=torch.float64).view(1, 3, 1, 1, 1)
    out = norm(x)
    for c in range(3):
        lengths = [math.hypot(*v) for v in x[:, c].movedim(1, -1).reshape(-1, 2).tolist()]
        variance = np.var(lengths)
        expected = norm.weight[c] * x[:, c] / math.sqrt(variance + 1e-5)
        torch.testing.assert_close(out[:, c], expected)
        running = 0.9 * 1 + 0.1 * np.var(lengths, ddof=1)
        assert norm.running_var[c].item() == pytest.approx(running)
    evaluated = norm.eval()(x)
    scale = norm.weight / (norm.running_var + 1e-5).sqrt()
    torch.testing.assert_close(evaluated, x * scale.view(1, 3, 1, 1, 1))


def test_batch_norm_gradients_are_right_and_finite_where_vectors_are_zero():
    norm = VectorBatchNorm2d(2, dtype=torch.float64)
    x = field(2, 2, 2, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(norm, (x,))
    silent = torch.zeros(2, 2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    VectorMagnitude()(norm(silent)).sum().backward()
    assert silent.grad.isfinite().all()


def test_batch_norm_of_nothing_leaves_the_running_variance_alone():
    norm = VectorBatchNorm2d(2)
    assert norm(torch.zeros(0, 2, 2, 3, 3)).shape == (0, 2, 2, 3, 3)
    assert torch.equal(norm.running_var, torch.ones(2))


def test_magnitude_is_the_length():
    x = field(2, 3, 2, 4, 4)
    np.testing.assert_allclose(VectorMagnitude()(x).numpy(), np.hypot(x[:, :, 0].numpy(), x[:, :, 1].numpy()))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: VectorMaxPool2d(0), ValueError, r"`kernel_size` must be at least 1 \(got 0\)"),
        (lambda: VectorMaxPool2d(2, stride=0), ValueError, r"`stride` must be at least 1 \(got 0\)"),
        (lambda: VectorMaxPool2d(2, padding=2), ValueError, r"`padding` must be at most half of kernel_size=\(2, 2\)"),
        (lambda: VectorBatchNorm2d(0), ValueError, r"`num_features` must be at least 1 \(got 0\)"),
        (lambda: VectorBatchNorm2d(1, eps=0.0), ValueError, "`eps` must be above 0"),
        (lambda: VectorBatchNorm2d(1, momentum=2.0), ValueError, r"`momentum` in \(0, 1\]"),
        (lambda: VectorFieldConv2d(1, 1, vector_input=1), TypeError, r"`vector_input` must be True or False \(got 1\)"),
        (lambda: VectorMaxPool2d(2)(torch.zeros(1, 1, 4, 4)), ValueError, r"must have 5 axes \(B, C, 2, H, W\)"),
        (lambda: VectorMagnitude()(torch.zeros(1, 1, 3, 4, 4)), ValueError, r"got shape \(1, 1, 3, 4, 4\)"),
        (lambda: VectorBatchNorm2d(3)(torch.zeros(2, 4, 2, 5, 5)), ValueError, "must have num_features=3 on axis 1"),
        (lambda: VectorBatchNorm2d(3)(torch.zeros(1, 3, 2, 1, 1)), ValueError, "more than one vector in each channel"),
    ],
)
def test_wrong_arguments_and_fields_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
