"""Group convolutions: filters, definition, ends of the scales, equivariance, and what PyTorch does to layers."""

import copy
import inspect
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import nn

from scalesteer import (
    LogRadialBasis,
    ScaleBlurPool2d,
    ScaleGroupConv2d,
    ScaleMax,
    ScaleMean,
    ScaleSteerableConv2d,
    fold,
    group,
)
from scalesteer.baselines import HermiteBasis
from scalesteer.group import OCTAVE, FoldedScaleGroupConv2d, resize_scales
from scalesteer.initialisation import sum_zero_mixing
from scalesteer.testing import equivariance_error
from tests import reference
from tests.test_nn_torch import TORCH_WARNINGS

BACKENDS = ("direct", "fast")
DOUBLE = {"dtype": torch.float64}
TWO = (1.0, 2.0)


def test_signature_begins_with_that_of_conv2d_defaults_included():
    ours = list(inspect.signature(ScaleGroupConv2d).parameters.values())
    torchs = list(inspect.signature(nn.Conv2d).parameters.values())
    assert [p.name for p in ours[: len(torchs)]] == [p.name for p in torchs]
    for own, torchs_own in zip(ours, torchs, strict=False):
        assert own.default == (7 if own.name == "kernel_size" else torchs_own.default), own.name
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(torchs) :])
    assert [p.name for p in ours[len(torchs) :]] == ["scales", "basis", "reach", "ends", "backend"]


# Filters


def steered_coefficients(layer):
    """Coefficients of Eq. 3, of functions as they are: a layer learns those of balanced ones."""
    (functions,) = layer._functions((1.0,))
    functions = functions.reshape(-1, functions.shape[-1] ** 2)
    gram = functions @ functions.T
    squared = gram + 0.01 * np.linalg.norm(gram, 2) * np.eye(len(gram))
    c = layer.coefficients.detach()
    found = c.flatten(3) @ torch.from_numpy(np.linalg.inv(scipy.linalg.sqrtm(squared).real)).to(c)
    return found.view_as(c)


def test_half_of_all_combinations_of_functions_are_learned_as_fast_as_the_strongest():
    layer = ScaleGroupConv2d(1, 1, **DOUBLE)
    plain = layer._functions((1.0,))[0].reshape(32, -1)
    balanced = layer.steered_basis[:, : plain.shape[1]].numpy()
    gains = [np.linalg.svd(functions, compute_uv=False) for functions in (plain, balanced)]
    assert np.median(gains[0]) < 0.15 * gains[0][0]
    assert np.median(gains[1]) > 0.5 * gains[1][0]
    assert np.linalg.matrix_rank(np.concatenate([plain, balanced])) == np.linalg.matrix_rank(plain)  # the same filters


def test_parts_of_the_basis_stay_the_same_tensors_until_it_changes():
    """By them engines find what they made of them, also while a CUDA graph is captured, when nothing can be made."""
    layer = ScaleGroupConv2d(2, 3)
    parts = group._split(layer.steered_basis, layer._stored_filters().areas)
    again = group._split(layer.steered_basis, layer._stored_filters().areas)
    assert all(a is b for a, b in zip(parts, again, strict=True))
    assert torch.equal(torch.cat(parts, 1), layer.steered_basis)
    layer.double()
    changed = group._split(layer.steered_basis, layer._stored_filters().areas)
    assert changed[0].dtype == torch.float64


def test_a_balanced_layer_starts_with_filters_that_are_drawn_as_those_of_the_functions_themselves():
    layer = ScaleGroupConv2d(100, 100)
    c = steered_coefficients(layer).flatten(0, 2).flatten(1).double()
    functions = [f.reshape(-1, *f.shape[-2:]) for f in layer._functions(layer.scales)]
    mixing = torch.from_numpy(sum_zero_mixing(functions)) * (2 / 100) ** 0.5
    expected = mixing.T @ mixing
    assert (c.T @ c / len(c) - expected).norm() < 0.1 * expected.norm()


POINTS = replace(LogRadialBasis.preset("smooth"), sampling="point", support="disc")


@pytest.mark.parametrize("basis", [LogRadialBasis.preset("paper"), POINTS], ids=["paper", "points with a core"])
def test_filters_are_the_dilated_continuous_function(basis):
    layer = ScaleGroupConv2d(2, 3, basis=basis, reach=2, **DOUBLE)
    c = torch.view_as_complex(steered_coefficients(layer)).numpy()
    turns = (0,) if basis.lobes == "single" else reference.TWO_LOBES
    for scale, weight in zip(OCTAVE, layer.filters(), strict=True):
        n = weight.shape[-1]
        x, y = np.meshgrid(np.arange(n) - n // 2, n // 2 - np.arange(n))
        centre = (x == 0) & (y == 0) & (basis.core == 0)  # a convention of point sampling there
        x, y = (np.where(centre, 1.0, t) / scale for t in (x, y))
        functions = reference.harmonics(
            x, y, basis.orders, basis.orientations, basis.sigma, basis.beta, basis.m, turns, basis.core
        )
        expected = np.einsum("ocrkj,kjyx->ocryx", c, functions).real / scale**2
        expected *= np.hypot(x, y) <= 3.5 + 1e-9
        found = weight.detach().numpy()
        assert np.abs((found - expected)[..., ~centre]).max() <= 1e-12 * np.abs(expected).max()


def test_filters_of_averages_are_the_mean_of_the_dilated_continuous_function():
    layer = ScaleGroupConv2d(1, 2, scales=(1.0, 1.6), **DOUBLE)
    basis, c = layer.basis, torch.view_as_complex(steered_coefficients(layer)[:, 0, 0]).numpy()

    def dilated(x, y):
        parts = basis.orders, basis.orientations, basis.sigma, basis.beta, basis.m, (0,), basis.core
        return np.einsum("okj,kjp->op", c, reference.harmonics(x / scale, y / scale, *parts)).real / scale**2

    for scale, weight in zip(layer.scales, layer.filters(), strict=True):
        half = weight.shape[-1] // 2
        for column, row in ((0, 0), (1, 0), (-2, 1), (2, -3), (half, 0), (half - 1, 1)):
            expected = reference.truncated_average(dilated, column, row, 3.5 * scale)
            found = weight[:, 0, 0, half - row, half + column].detach().numpy()
            np.testing.assert_allclose(found, expected, atol=1e-6 * weight.abs().max().item())


CASES = [
    {"reach": 2},
    {"reach": 3, "padding": 3, "ends": "replicate"},
    {"reach": 3, "padding": 2, "stride": 2, "groups": 2},
    {"reach": 5, "padding": 3, "dilation": 2, "ends": "replicate"},
    {"reach": 1, "padding": 3, "padding_mode": "reflect"},
    {"reach": 2, "padding": 3, "padding_mode": "circular", "ends": "replicate"},
]


def loops(layer, x, kernel_size):
    """The definition, scale by scale and neighbour by neighbour."""
    count, out = len(layer.scales), []
    for i, weight in enumerate(layer.filters()):
        total = 0.0
        for d in range(layer.reach):
            seen = i - (layer.reach - 1) // 2 + d
            if not 0 <= seen < count:
                if layer.ends == "zeros":
                    continue
                seen = min(max(seen, 0), count - 1)
            geometry = layer.stride[0], layer.geometry.padding[0], layer.dilation[0], layer.groups
            taps = [weight[:, :, d].detach().numpy()]
            total = total + reference.convolve(x[:, :, seen], taps, *geometry, layer.padding_mode, kernel_size)[0]
        out.append(total + layer.bias.detach().numpy()[:, None, None])
    return np.stack(out, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_layer_is_its_definition(case, backend):
    layer = ScaleGroupConv2d(2, 4, 3, scales=(1.0, 1.5, 2.25), backend=backend, **case, **DOUBLE)
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 2, 3, 9, 8, **DOUBLE)
    for module in (layer, fold(layer)):
        found = module(x)
        plain = nn.Conv2d(2, 4, 3, **{k: v for k, v in case.items() if k not in ("reach", "ends")}, **DOUBLE)
        assert found.shape == (2, 4, 3, *plain(x[:, :, 0]).shape[2:])
        np.testing.assert_allclose(found.detach(), loops(layer, x.numpy(), 3), atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_all_scales_but_one_switched_off_it_is_a_steerable_convolution(backend):
    layer = ScaleGroupConv2d(3, 4, padding="same", reach=3, backend=backend, **DOUBLE)
    x = torch.zeros(2, 3, 4, 12, 12, **DOUBLE)
    x[:, :, 1] = torch.randn(2, 3, 12, 12, **DOUBLE)
    found = layer(x)
    for i, scale in enumerate(OCTAVE[:3]):
        single = ScaleSteerableConv2d(3, 4, padding="same", scales=(scale,), backend=backend, **DOUBLE)
        with torch.no_grad():
            single.coefficients.copy_(steered_coefficients(layer)[:, :, 2 - i])
        torch.testing.assert_close(found[:, :, i], single(x[:, :, 1]), rtol=0, atol=1e-12)
    assert found[:, :, 3].abs().max() < 1e-12


def test_an_image_is_taken_as_the_same_at_all_scales():
    layer = ScaleGroupConv2d(2, 3, padding="same", **DOUBLE)
    steerable = ScaleSteerableConv2d(2, 3, padding="same", scales=OCTAVE, reduce=None, **DOUBLE)
    with torch.no_grad():
        steerable.coefficients.copy_(steered_coefficients(layer)[:, :, 0])
    x = torch.randn(2, 2, 11, 12, **DOUBLE)
    torch.testing.assert_close(layer(x), steerable(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x.unsqueeze(2).expand(-1, -1, 4, -1, -1)), layer(x))


@pytest.mark.parametrize("ends", group.ENDS)
def test_fast_equals_direct_with_its_gradients(ends):
    x, results = torch.randn(2, 5, 4, 17, 16), []
    layer = ScaleGroupConv2d(5, 6, padding="same", reach=2, ends=ends)
    for backend in BACKENDS:
        layer.backend, image = backend, x.clone().requires_grad_()
        layer.zero_grad()
        out = layer(image)
        out.sin().sum().backward()
        results.append((out, image.grad, layer.coefficients.grad.clone(), layer.bias.grad.clone()))
    for direct, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, direct, rtol=1e-4, atol=2e-4)


def test_many_channels_take_products_of_frequencies_at_windows_of_seven(monkeypatch):
    taken = []
    convolve = group.functional.scale_conv2d

    def spy(x, filters, *arguments, backend):
        taken.append((filters.sizes, backend))
        return convolve(x, filters, *arguments, backend=backend)

    monkeypatch.setattr(group.functional, "scale_conv2d", spy)
    for (fan_in, fan_out, size), options, expected in (
        ((60, 60, 7), {}, "fast"),
        ((30, 60, 7), {"reach": 2, "scales": (1.0,)}, "auto"),  # at the last scale only one of two is there
        ((59, 60, 7), {}, "auto"),
        ((60, 59, 7), {}, "auto"),
        ((60, 60, 5), {}, "auto"),
        ((60, 60, 7), {"stride": 2}, "auto"),
        ((120, 120, 7), {"groups": 2}, "auto"),
        ((60, 60, 7), {"backend": "direct"}, "direct"),
        ((60, 60, 7), {"dtype": torch.bfloat16}, "auto"),
    ):
        layer = ScaleGroupConv2d(
            fan_in, fan_out, size, padding="same" if "stride" not in options else 3, **{"scales": (1.0,), **options}
        )
        layer(torch.zeros(1, fan_in, 1, 9, 9, dtype=layer.coefficients.dtype))
        assert taken.pop() == ((size,), expected), options
    with torch.autocast("cpu", torch.bfloat16):
        ScaleGroupConv2d(60, 60, padding="same", scales=(1.0,))(torch.zeros(1, 60, 1, 9, 9))
    assert taken.pop() == ((7,), "auto")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ends", group.ENDS)
def test_gradients(backend, ends):
    layer = ScaleGroupConv2d(2, 2, 3, padding=1, scales=TWO, reach=2, ends=ends, backend=backend, **DOUBLE)
    x = torch.randn(1, 2, 2, 4, 5, **DOUBLE, requires_grad=True)

    def apply(image, coefficients, bias):
        return torch.func.functional_call(layer, {"coefficients": coefficients, "bias": bias}, (image,))

    assert torch.autograd.gradcheck(apply, (x, layer.coefficients, layer.bias))


def test_other_scales_share_the_coefficients():
    layer = ScaleGroupConv2d(1, 2, padding="same", reach=2, **DOUBLE)
    other = layer.with_scales((2.0, 4.0))
    assert other.coefficients is layer.coefficients
    assert (other.scales, other.sizes, layer.scales) == ((2.0, 4.0), (15, 29), OCTAVE)
    torch.testing.assert_close(other.filters()[0], layer.filters()[3], rtol=0, atol=1e-14)
    assert other(torch.randn(1, 1, 2, 9, 9, **DOUBLE)).shape == (1, 2, 2, 9, 9)


def test_new_filters_sum_to_zero_and_keep_the_second_moment_behind_a_relu():
    layer = ScaleGroupConv2d(16, 32, padding=0, reach=2, bias=False)
    for weight in layer.filters():
        assert weight.sum((-2, -1)).abs().max() < 1e-5
    energy = torch.stack([w.square().sum((1, 2, 3, 4)).mean() for w in layer.filters()])
    assert energy.mean().item() == pytest.approx(2, rel=0.1)
    x = torch.randn(1, 16, 4, 40, 40)
    moments = [F.relu(layer(x)).square().mean((0, 1, 3, 4))[i].item() for i in range(3)]  # the last lacks a neighbour
    np.testing.assert_allclose(moments, energy[:3].detach() / 2, rtol=0.1)


# Errors


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"scales": (1.0, 2.0, 3.0)}, r"`scales` must be a geometric sequence \(got \(1.0, 2.0, 3.0\)\)"),
        ({"scales": (2.0, 1.0)}, "`scales` must be positive and strictly ascending"),
        ({"reach": 0}, "`reach` must be at least 1"),
        ({"reach": 9}, r"`reach` \(got 9\) must not go beyond 4 scales"),
        ({"ends": "reflect"}, "`ends` must be one of 'zeros', 'replicate'"),
        ({"basis": "hermit"}, "`basis` must be one of"),
        ({"backend": "slow"}, "`backend` must be one of"),
        ({"groups": 2}, "`in_channels`.*divisible"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(arguments, match):
    with pytest.raises(ValueError, match=match):
        ScaleGroupConv2d(3, 4, **arguments)


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((1, 3, 5, 9, 9), r"must have 4 scales on axis 2, as the layer has \(got shape \(1, 3, 5, 9, 9\)\)"),
        ((1, 2, 4, 9, 9), "must have in_channels=3 channels"),
        ((1, 3, 9, 9), r"must have 5 axes \(B, C, S, H, W\) \(got shape \(1, 3, 9, 9\)\)"),
        ((3, 4, 9), r"must have 5 axes \(B, C, S, H, W\) \(got"),
        ((1, 3, 4, 2, 9), "too small for kernel_size"),
    ],
)
def test_wrong_inputs_are_named(shape, match):
    with pytest.raises(ValueError, match=match):
        ScaleGroupConv2d(3, 4, reach=2)(torch.randn(shape))
    if len(shape) == 3:
        with pytest.raises(ValueError, match=r"or, for a layer with reach=1, 4 axes \(B, C, H, W\)"):
            ScaleGroupConv2d(3, 4)(torch.randn(shape))


def test_what_filters_depend_on_cannot_be_assigned_and_no_scale_wins():
    layer = ScaleGroupConv2d(1, 1)
    for name in ("scales", "sizes", "reach", "basis"):
        with pytest.raises(AttributeError, match=f"`{name}` is fixed when the layer is built"):
            setattr(layer, name, getattr(layer, name))
    with pytest.raises(ValueError, match="put a ScaleMax behind the layer"):
        layer(torch.randn(1, 1, 9, 9), return_scales=True)


def test_shown_arguments_are_those_that_differ_from_the_defaults():
    assert repr(ScaleGroupConv2d(1, 2)) == "ScaleGroupConv2d(1, 2, kernel_size=7, scales=(1, 1.26, 1.587, 2))"
    shown = repr(ScaleGroupConv2d(1, 2, 5, bias=False, scales=TWO, basis="paper", reach=2, ends="replicate"))
    for part in ("kernel_size=5", "bias=False", "reach=2", "ends='replicate'", "basis='paper'", "scales=(1, 2)"):
        assert part in shown
    assert "HermiteBasis(orders=6" in repr(ScaleGroupConv2d(1, 2, basis=HermiteBasis()))


# Equivariance


def stack(count, scales, **options):
    torch.manual_seed(0)
    layers = []
    for i in range(count):
        layers += [ScaleGroupConv2d(16 if i else 1, 16, padding="same", bias=False, scales=scales, **options)]
        layers += [nn.ReLU()] * (i < count - 1)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("step", [2**0.5, 2 ** (1 / 3)])
def test_one_layer_misses_two_percent_at_most_and_two_with_relu_four(step):
    scales = tuple(step**i for i in range(3))
    measured = {"channels": 1, "steps": 1, "images": 2, "size": 81}
    errors = [equivariance_error(stack(count, scales), step, **measured) for count in (1, 2)]
    assert errors[0] <= 0.02
    assert errors[1] <= 0.04
    assert equivariance_error(stack(1, scales, basis="paper"), step, **measured) > 5 * errors[0]
    assert equivariance_error(stack(1, scales), step, **{**measured, "steps": 0}) > 0.2  # not moved


def test_normalisation_keeps_equivariance():
    step = 2**0.5
    net = nn.Sequential(stack(1, (1.0, step)), nn.BatchNorm3d(16), nn.ReLU(), nn.Dropout3d(0.5)).eval()
    assert equivariance_error(net, step, channels=1, steps=1, images=1, size=81) < 0.06


# Beside the layer


def test_maximum_and_mean_over_scales():
    x = torch.randn(2, 3, 4, 5, 6)
    best, index = ScaleMax()(x, return_scales=True)
    np.testing.assert_array_equal(best, x.numpy().max(2))
    np.testing.assert_array_equal(index, x.numpy().argmax(2))
    assert torch.equal(ScaleMax()(x), best)
    np.testing.assert_allclose(ScaleMean()(x), x.numpy().mean(2), rtol=1e-5, atol=1e-7)
    tie = torch.ones(1, 1, 3, 1, 1, requires_grad=True)
    best, index = ScaleMax()(tie, return_scales=True)
    best.sum().backward()
    assert index.item() == 0
    assert tie.grad.flatten().tolist() == [1, 0, 0]
    for module in (ScaleMax(), ScaleMean(), ScaleBlurPool2d(TWO)):
        with pytest.raises(ValueError, match=r"must have 5 axes \(B, C, S, H, W\).*got \(1, 2, 3, 4\)"):
            module(torch.zeros(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"with 2 scales \(got"):
        ScaleBlurPool2d(TWO)(torch.zeros(1, 1, 3, 4, 4))


def test_pooling_reads_amid_pixels_and_smooths_large_scales_more():
    pool, n = ScaleBlurPool2d(TWO), 24
    ramp = torch.arange(n, dtype=torch.float64).expand(1, 1, 2, n, n)
    inside = slice(5, -5)  # away from the edges
    found = pool(ramp)[0, 0]
    assert found.shape == (2, n // 2, n // 2)
    expected = torch.arange(n // 2, dtype=torch.float64) * 2 + 0.5
    for image in (found, pool(ramp.mT)[0, 0].mT):
        torch.testing.assert_close(image[:, :, inside], expected[inside].expand(2, n // 2, -1), rtol=0, atol=1e-12)
    stripes = torch.cos(2 * torch.pi * torch.arange(n) / 6).double().expand(1, 1, 2, n, n)
    near, far = pool(stripes)[0, 0, :, :, inside].abs().amax((1, 2))
    assert far < 0.3 * near
    finest = torch.tensor([1.0, -1.0]).double().repeat(n // 2).expand(1, 1, 2, n, n)
    assert pool(finest)[..., inside].abs().max() < 0.1


def test_pooling_commutes_with_scaling_better_than_others():
    step = 2 ** (1 / 3)
    features = nn.Sequential(*stack(1, OCTAVE), nn.ReLU())
    errors = {
        kind: equivariance_error(nn.Sequential(features, kind), step, channels=1, steps=1, size=80, images=2)
        for kind in (ScaleBlurPool2d(OCTAVE), nn.MaxPool3d((1, 2, 2)), nn.AvgPool3d((1, 2, 2)))
    }
    ours, *others = errors.values()
    assert ours < 0.05
    assert ours < 0.5 * min(others)


def test_resizing_keeps_edges_in_place_and_leaves_maps_of_the_same_size_alone():
    x = torch.randn(1, 2, 2, 8, 9, **DOUBLE)
    torch.testing.assert_close(resize_scales(x, TWO, (8, 9)), x)
    n = 40
    ramp = torch.arange(n, dtype=torch.float64).expand(1, 1, 2, n, n)
    for count in (60, 20):
        found = resize_scales(ramp, TWO, (n, count))[0, 0]
        expected = (torch.arange(count, dtype=torch.float64) + 0.5) * n / count - 0.5
        inside = slice(count // 3, -(count // 3))
        torch.testing.assert_close(found[:, :, inside], expected[inside].expand(2, n, -1), rtol=0, atol=1e-12)
    for enlarged in (resize_scales(ramp, TWO, (n, 80)), ScaleBlurPool2d(TWO, 1)(ramp)):
        assert enlarged[0, 0, 0].equal(enlarged[0, 0, 1])  # nothing is smoothed where nothing is left out


# In PyTorch


SMALL = {"kernel_size": 3, "padding": 1, "scales": TWO, "reach": 2}


def network(**options):
    first = ScaleGroupConv2d(2, 4, **{**SMALL, "reach": 1}, **options)
    second = ScaleGroupConv2d(4, 4, **SMALL, **options)
    return nn.Sequential(first, nn.BatchNorm3d(4), nn.ReLU(), ScaleBlurPool2d(TWO), second, ScaleMax())


@pytest.mark.parametrize("backend", BACKENDS)
def test_fold_state_copies_and_tracing(backend):
    model, x = network(backend=backend).eval(), torch.randn(2, 2, 9, 10)
    expected = model(x)
    folded = fold(model)
    assert isinstance(folded[4], FoldedScaleGroupConv2d)
    torch.testing.assert_close(folded(x), expected, rtol=1e-4, atol=1e-5)
    assert [p for p, _ in folded.named_parameters()] == ["1.weight", "1.bias"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
    assert torch.equal(torch.fx.symbolic_trace(model[:3])(x), model[:3](x))
    assert not any("steered_basis" in key for key in model.state_dict())
    with torch.device("meta"):
        empty = network(backend=backend).eval()
    empty.load_state_dict(model.state_dict(), assign=True)
    empty[1].load_state_dict(model[1].state_dict())
    assert torch.equal(empty(x), expected)
    torch.testing.assert_close(model.double()(x.double()).float(), expected, rtol=1e-4, atol=1e-5)
    assert model.to(memory_format=torch.channels_last)[4].coefficients.shape == (4, 4, 2, 2, 8, 2)


def test_fold_refuses_a_layer_with_filters_of_its_own():
    class Own(ScaleGroupConv2d):
        def filters(self):
            return super().filters()

    with pytest.raises(TypeError, match="a Own cannot be folded: it has its own `filters`"):
        fold(Own(1, 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast_are_close(backend, dtype):
    layer, x = ScaleGroupConv2d(3, 4, padding="same", reach=2, backend=backend), torch.randn(2, 3, 4, 16, 16)
    expected = layer(x)
    outs = [copy.deepcopy(layer).to(dtype)(x.to(dtype))]
    if dtype == torch.bfloat16:
        with torch.autocast("cpu", dtype):
            outs.append(layer(x))
    for out in outs:
        assert out.dtype == dtype
        assert (out.float() - expected).norm() / expected.norm() < 3e-2


@pytest.mark.filterwarnings(*TORCH_WARNINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend):
    model, x = network(backend=backend), torch.randn(2, 2, 9, 10)
    compiled, grads = torch.compile(copy.deepcopy(model), fullgraph=True), []
    outs = [module(x) for module in (model, compiled)]
    for out, module in zip(outs, (model, compiled), strict=True):
        out.square().sum().backward()
        grads.append([p.grad for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings(*TORCH_WARNINGS)
@pytest.mark.parametrize("folded", [False, True])
def test_exports_with_dynamic_batch_and_size(folded):
    model = network().eval()
    shapes = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(fold(model) if folded else model, (torch.randn(3, 2, 12, 14),), dynamic_shapes=shapes)
    for count, size in ((2, (12, 14)), (5, (21, 16))):
        x = torch.randn(count, 2, *size)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


DISTRIBUTED = """
import copy, os, sys
import torch
from torch import nn
from scalesteer import ScaleGroupConv2d, ScaleMax

torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
layers = [ScaleGroupConv2d(a, 4, 3, padding=1, scales=(1.0, 2.0), reach=r) for a, r in ((1, 1), (4, 2))]
model, x = nn.Sequential(layers[0], nn.BatchNorm3d(4), layers[1], ScaleMax()), torch.rand(4, 1, 12, 12)
parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
for module in (model, parallel):
    module(x).square().sum().backward()
for ours, theirs in zip(model.parameters(), parallel.module.parameters(), strict=True):
    torch.testing.assert_close(theirs.grad, ours.grad)
print("the same gradients", flush=True)
os._exit(0)
"""


def test_distributed_data_parallel(tmp_path):
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    command = [sys.executable, "-c", DISTRIBUTED, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "the same gradients\n", done.stderr
