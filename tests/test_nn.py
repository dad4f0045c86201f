"""The layer as a citizen of PyTorch: arguments, errors, copies, dtypes, devices, compilers, initialisation."""

import copy
import dataclasses
import inspect
import io
import itertools
import math
import pickle
import time
import typing

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from scalesteer import (
    PAPER_SCALES,
    FoldedScaleConv2d,
    LogRadialBasis,
    ScaleSteerableConv2d,
    fold,
    harmonics,
    initialisation,
)
from scalesteer import nn as layers

BACKENDS = ("direct", "spectral")
SMALL = {"kernel_size": 3, "padding": 1, "scales": (1.0, 5 / 3)}
# torch's own: inductor has no kernels for complex numbers and says so; old-style names inside torch.
TORCH_WARNINGS = (
    "ignore:.*Torchinductor does not support code generation for complex operators.*",
    "ignore:.*is deprecated.*:DeprecationWarning",
    "ignore:.*is deprecated.*:FutureWarning",
)


def test_signature_begins_with_that_of_conv2d_defaults_included():
    ours = list(inspect.signature(ScaleSteerableConv2d).parameters.values())
    torchs = list(inspect.signature(nn.Conv2d).parameters.values())
    assert [p.name for p in ours[: len(torchs)]] == [p.name for p in torchs]
    for own, torchs_own in zip(ours, torchs, strict=False):
        assert own.default == (7 if own.name == "kernel_size" else torchs_own.default), own.name
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(torchs) :])
    assert [p.name for p in ours[len(torchs) :]] == ["scales", "basis", "reduce", "backend"]


CONV2D_ARGUMENTS = [
    dict(zip(("stride", "padding", "dilation", "groups", "bias", "padding_mode"), values, strict=True))
    for values in itertools.product(
        (1, 2, (1, 3)), (0, 2, (3, 1), "same", "valid"), (1, (2, 1)), (1, 2), (True, False), ("zeros", "circular")
    )
    if not (values[0] != 1 and values[1] == "same")
]


def test_attributes_and_output_shapes_are_those_of_conv2d():
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    names = (*names, "transposed", "output_padding")
    x = torch.zeros(1, 4, 19, 22)
    for arguments in CONV2D_ARGUMENTS:
        plain = nn.Conv2d(4, 6, 5, **arguments)
        ours = ScaleSteerableConv2d(4, 6, 5, scales=(1.0, 1.4), **arguments)
        assert {n: getattr(ours, n) for n in names} == {n: getattr(plain, n) for n in names}
        assert (ours.bias is None) == (plain.bias is None)
        with torch.no_grad():
            assert ours(x).shape == plain(x).shape, arguments
            assert fold(ours)(x).shape == plain(x).shape, arguments


def test_the_type_of_the_output_follows_return_scales():
    hints = [typing.get_type_hints(f) for f in typing.get_overloads(ScaleSteerableConv2d.forward)]
    shown = [(typing.get_args(hint["return_scales"]), hint["return"]) for hint in hints]
    assert shown == [((False,), torch.Tensor), ((True,), tuple[torch.Tensor, torch.Tensor])]


@pytest.mark.parametrize("name", ["scales", "sizes", "basis", "kernel_size", "stride", "padding", "groups", "geometry"])
def test_what_filters_depend_on_cannot_be_assigned(name):
    for layer in (ScaleSteerableConv2d(2, 2), fold(ScaleSteerableConv2d(2, 2))):
        if not hasattr(layer, name):
            continue
        before = getattr(layer, name)
        steered = name in ("scales", "sizes") and isinstance(layer, ScaleSteerableConv2d)
        hint = r"use layer.with_scales\(scales\)" if steered else "build a new layer"
        with pytest.raises(AttributeError, match=f"`{name}` is fixed when the layer is built.*{hint}"):
            setattr(layer, name, before)
        assert getattr(layer, name) is before


def test_defaults_are_the_recommended_set_up():
    for layer in (ScaleSteerableConv2d(2, 3), ScaleSteerableConv2d(2, 3, scales=None)):
        assert layer.basis == LogRadialBasis.preset("smooth")
        assert layer.scales == harmonics.WIDE_SCALES
        assert layer.sizes == (3, 5, 5, 7, 11, 15, 21, 27, 39)


@pytest.mark.parametrize("name", ["paper", "area", "released-code", "smooth"])
@pytest.mark.parametrize("kernel_size", [3, 5, 7, 11])
def test_default_scales_suit_the_basis_and_the_kernel_without_a_warning(name, kernel_size):
    layer = ScaleSteerableConv2d(1, 2, kernel_size, padding="same", basis=name)
    assert layer.scales == harmonics.recommended_scales(LogRadialBasis.preset(name), kernel_size)
    assert set(layer.scales) <= set(harmonics.WIDE_SCALES if name == "smooth" else PAPER_SCALES)
    assert len(layer.scales) >= 3
    assert min(layer.sizes) >= 3
    assert layer(torch.randn(1, 1, 12, 12)).isfinite().all()


@pytest.mark.parametrize("name", ["paper", "area", "released-code", "smooth"])
def test_a_basis_can_be_given_by_name(name):
    found, expected = (ScaleSteerableConv2d(1, 1, basis=b) for b in (name, LogRadialBasis.preset(name)))
    assert found.basis == expected.basis


def test_scales_that_are_far_apart_and_share_a_window_are_told():
    windows = r"kernel_size=3 gives windows of 3, 3, 5, 5, 7, 7 pixels.*larger `kernel_size` or fewer `scales`"
    with pytest.warns(UserWarning, match=windows) as told:
        layer = ScaleSteerableConv2d(1, 1, 3, scales=PAPER_SCALES, basis="paper")
    assert told[0].filename == __file__
    assert layer.sizes == (3, 3, 5, 5, 7, 7)
    with pytest.warns(UserWarning, match="windows of 3, 3 pixels"):
        ScaleSteerableConv2d(1, 1, 3, scales=(1.0,), basis="paper").with_scales((1.0, 1.3))
    scales = tuple(n / 7 for n in range(7, 18))
    dense = ScaleSteerableConv2d(1, 1, scales=scales, basis="paper")  # without a warning
    assert dense.sizes == (7, 9, 9, 11, 11, 13, 13, 15, 15, 17, 17)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"in_channels": 0}, ValueError, r"`in_channels` must be at least 1 \(got 0\)"),
        ({"in_channels": -1}, ValueError, r"`in_channels` must be at least 1 \(got -1\)"),
        ({"in_channels": 1.5}, TypeError, r"`in_channels` must be an integer \(got 1.5 of type float\)"),
        ({"in_channels": True}, TypeError, r"`in_channels` must be an integer \(got True of type bool\)"),
        ({"out_channels": "3"}, TypeError, r"`out_channels` must be an integer \(got '3' of type str\)"),
        ({"out_channels": 0}, ValueError, r"`out_channels` must be at least 1 \(got 0\)"),
        ({"kernel_size": 4}, ValueError, r"odd and at least 3 \(got 4\): the filter needs a centre pixel; use 3 or 5"),
        ({"kernel_size": 1}, ValueError, r"odd and at least 3 \(got 1\): one pixel has no size; keep nn.Conv2d here"),
        ({"kernel_size": (5, 7)}, ValueError, r"`kernel_size` must be square \(got \(5, 7\)\)"),
        ({"kernel_size": 7.0}, TypeError, r"`kernel_size` must be an integer \(got 7.0"),
        ({"scales": ()}, ValueError, "`scales` must not be empty"),
        ({"scales": (0.0, 1.0)}, ValueError, r"positive and strictly ascending \(got \(0.0, 1.0\)\)"),
        ({"scales": (-1.0,)}, ValueError, "positive and strictly ascending"),
        ({"scales": (1.0, math.nan)}, ValueError, r"`scales\[1\]` must be finite \(got nan\)"),
        ({"scales": (math.inf,)}, ValueError, r"`scales\[0\]` must be finite \(got inf\)"),
        ({"scales": (1.0, 1.0)}, ValueError, "positive and strictly ascending"),
        ({"scales": (2.0, 1.0)}, ValueError, "positive and strictly ascending"),
        ({"scales": 2.0}, TypeError, r"`scales` must be a sequence of numbers \(got 2.0\)"),
        ({"stride": 0}, ValueError, r"`stride` must be at least 1 \(got 0\)"),
        ({"stride": 1.5}, TypeError, r"`stride` must be an integer \(got 1.5"),
        ({"stride": (1, 2, 3)}, ValueError, r"`stride` must be an integer or a pair of them \(got \(1, 2, 3\)\)"),
        ({"dilation": -1}, ValueError, r"`dilation` must be at least 1 \(got -1\)"),
        ({"dilation": 0}, ValueError, r"`dilation` must be at least 1 \(got 0\)"),
        ({"stride": 2, "padding": "same"}, ValueError, r"padding='same' is not defined for stride \(2, 2\)"),
        ({"padding": -1}, ValueError, r"`padding` must be at least 0 \(got -1\)"),
        ({"padding": "full"}, ValueError, r"`padding` must be one of 'same', 'valid' \(got 'full'\)"),
        ({"groups": 3}, ValueError, r"`in_channels` \(=4\) must be divisible by `groups` \(=3\)"),
        ({"groups": 4}, ValueError, r"`out_channels` \(=6\) must be divisible by `groups` \(=4\)"),
        ({"groups": 0}, ValueError, r"`groups` must be at least 1 \(got 0\)"),
        ({"padding_mode": "zero"}, ValueError, r"'circular' \(got 'zero'\). Did you mean 'zeros'"),
        (
            {"backend": "fft"},
            ValueError,
            r"`backend` must be one of 'auto', 'direct', 'fast', 'spectral' \(got 'fft'\)",
        ),
        ({"reduce": "mean"}, ValueError, r"`reduce` must be 'max' or None \(got 'mean'\)"),
        ({"basis": 3}, TypeError, r"`basis` must be a LogRadialBasis or the name of a preset \(got 3\)"),
        ({"basis": "aera"}, ValueError, r"`basis` must be one of 'paper'.*\(got 'aera'\). Did you mean 'area'"),
        ({"bias": 1}, TypeError, r"`bias` must be True or False \(got 1\)"),
        ({"dtype": torch.complex64}, TypeError, "`dtype` must be torch.float16, bfloat16, float32 or float64"),
        ({"dtype": torch.int32}, TypeError, "`dtype` must be torch.float16, bfloat16, float32 or float64"),
        ({"dtype": torch.float8_e4m3fn}, TypeError, "`dtype` must be torch.float16, bfloat16, float32 or float64"),
        ({"kernel_size": -3}, ValueError, r"odd and at least 3 \(got -3\)"),
        ({"scales": (0.28, 1.0)}, ValueError, r"scale 0.28 is a single pixel with kernel_size=7.*at least 0.2857"),
        ({"scales": (1.0, 73.2)}, ValueError, r"2 scales up to 73.2 .* more taps together than one of 511 x 511"),
        ({"scales": (1.0, 1e308)}, ValueError, "more taps together than one of 511 x 511"),
        ({"scales": tuple(range(1, 60))}, ValueError, "59 scales up to 59"),
        ({"kernel_size": 513, "scales": (1.0,)}, ValueError, "kernel_size=513 have more taps"),
        ({"basis": LogRadialBasis(m=-1000.0)}, ValueError, r"`m` \(=-1000.0\) is too extreme"),
        ({"basis": LogRadialBasis(m=300.0)}, ValueError, r"`m` \(=300.0\) or the scale is too extreme"),
        ({"device": "warp"}, ValueError, r"`device` 'warp' is not available here; available: cpu, meta"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        ScaleSteerableConv2d(**{"in_channels": 4, "out_channels": 6, **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_absent_cuda_is_an_error_that_lists_what_is_there():
    with pytest.raises(ValueError, match="`device` 'cuda' is not available here; available: cpu"):
        ScaleSteerableConv2d(1, 1, device="cuda")


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(4), ValueError, r"must have 4 axes \(B, C, H, W\) \(got shape \(4,\)\)"),
        (torch.zeros(4, 9, 9), ValueError, r"got shape \(4, 9, 9\)\). add a batch axis"),
        (torch.zeros(1, 3, 9, 9), ValueError, r"in_channels=4 channels on axis 1 \(got shape \(1, 3, 9, 9\)\)"),
        (torch.zeros(1, 4, 0, 9), ValueError, "height and width must be at least 1"),
        (torch.zeros(1, 4, 9, 0), ValueError, "height and width must be at least 1"),
        (torch.zeros(1, 4, 9, 9, dtype=torch.int64), TypeError, r"real floating-point tensor \(got torch.int64\)"),
        (torch.zeros(1, 4, 9, 9, dtype=torch.bool), TypeError, r"real floating-point tensor \(got torch.bool\)"),
        (
            torch.zeros(1, 4, 9, 9, dtype=torch.complex64),
            TypeError,
            r"real floating-point tensor \(got torch.complex64",
        ),
        (torch.zeros(1, 4, 9, 9).double(), TypeError, "input is torch.float64 but the layer is torch.float32"),
        (np.zeros((1, 4, 9, 9), np.float32), TypeError, r"must be a tensor \(got ndarray\)"),
        (torch.zeros(1, 4, 9, 9, device="meta"), ValueError, "the input is on meta but the layer is on cpu"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_tensors_are_named(x, error, message, backend):
    with pytest.raises(error, match=message):
        ScaleSteerableConv2d(4, 6, backend=backend)(x)


def test_image_too_small_for_the_padding_is_named():
    with pytest.raises(ValueError, match=r"an image of 6 x 9 is too small for kernel_size=7 with padding=\(0, 0\)"):
        ScaleSteerableConv2d(4, 6, padding="valid")(torch.zeros(1, 4, 6, 9))


def test_return_scales_without_a_maximum_is_an_error():
    with pytest.raises(ValueError, match=r"`return_scales` needs reduce='max' \(got reduce=None\)"):
        ScaleSteerableConv2d(1, 1, reduce=None)(torch.zeros(1, 1, 9, 9), return_scales=True)


ALTERNATIVES = {
    "kernel_size": 9,
    "stride": 2,
    "padding": 1,
    "dilation": 2,
    "groups": 2,
    "padding_mode": "circular",
    "scales": (1.0, 3.0),
    "basis": LogRadialBasis(m=0.5),
    "reduce": None,
}


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_every_argument_has_an_effect(name):
    def run(**changes):
        torch.manual_seed(0)
        x = torch.randn(1, 4, 20, 20)
        return ScaleSteerableConv2d(4, 4, **{"padding": 3, **changes})(x)

    plain, changed = run(), run(**{name: ALTERNATIVES[name]})
    assert plain.shape != changed.shape or (plain - changed).abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduce", ["max", None])
def test_backend_argument_is_obeyed(backend, reduce, monkeypatch):
    called = []
    plain, pooled = layers.functional.fast.responses, layers.functional.fast.max_over_scales
    monkeypatch.setattr(layers.functional.fast, "responses", lambda *a, **k: called.append(1) or plain(*a, **k))
    monkeypatch.setattr(layers.functional.fast, "max_over_scales", lambda *a: called.append(1) or pooled(*a))
    ScaleSteerableConv2d(1, 1, backend=backend, reduce=reduce)(torch.zeros(1, 1, 9, 9))
    assert bool(called) == (backend == "spectral")


def test_bias_device_and_dtype_arguments_are_obeyed():
    layer = ScaleSteerableConv2d(1, 2, bias=False, device="meta", dtype=torch.float64)
    assert layer.bias is None
    assert {t.device.type for t in (layer.coefficients, layer.steered_basis)} == {"meta"}
    assert layer.coefficients.dtype == layer.steered_basis.dtype == torch.float64


def test_numpy_integers_and_pairs_give_the_same_layer():
    results = []
    for one, two in ((1, 2), (np.int64(1), np.int32(2))):
        torch.manual_seed(0)
        layer = ScaleSteerableConv2d(two, two, (5, 5), stride=one, groups=two, padding=(two, two), scales=[1, 2.0])
        results.append(layer(torch.ones(1, 2, 9, 9)))
    assert torch.equal(*results)


def test_later_changes_of_the_callers_list_change_nothing():
    scales = [1.0, 2.0]
    layer = ScaleSteerableConv2d(1, 1, scales=scales)
    scales.append(3.0)
    assert layer.scales == (1.0, 2.0)
    assert len(layer.filters()) == 2


def test_parameters_are_coefficients_and_bias_with_the_documented_shapes():
    layer = ScaleSteerableConv2d(4, 6, groups=2)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {"coefficients": (6, 2, 2, 8, 2), "bias": (6,)}
    assert [tuple(f.shape) for f in layer.filters()] == [(6, 2, n, n) for n in layer.sizes]
    layer = ScaleSteerableConv2d(4, 6, groups=2, basis="paper")
    assert layer.coefficients.shape == (6, 2, 3, 8, 2)
    assert [tuple(f.shape) for f in layer.filters()] == [(6, 2, n, n) for n in range(7, 18, 2)]


def test_filters_are_the_real_part_of_eq3():
    layer = ScaleSteerableConv2d(2, 3, dtype=torch.float64, basis=LogRadialBasis.preset("area"))
    coefficients = torch.view_as_complex(layer.coefficients.detach()).numpy()
    for scale, actual in zip(PAPER_SCALES, layer.filters(), strict=True):
        values = harmonics.sample(layer.basis, actual.shape[-1]) * harmonics.support(layer.basis, 7, scale)
        phase = np.exp(-1j * np.array([0.5, 1, 2]) * np.log(scale)) / scale  # s^(m-2), m = 1
        expected = np.einsum("ockj,k,kjab->ocab", coefficients, phase, values).real
        np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-12)


def test_a_layer_of_one_lobed_functions_says_that_its_filters_are_not_symmetric():
    for name, symmetric in (("area", True), ("smooth", False)):
        layer = ScaleSteerableConv2d(1, 2, basis=name)
        for built in (layer, layer.with_scales((1.0, 4.0)), fold(layer)):
            assert built._stored_filters().symmetric is symmetric
            assert built._stored_filters().finished().symmetric is symmetric


def test_scales_of_an_averaged_edge_may_share_a_window():
    layer = ScaleSteerableConv2d(1, 2, basis="smooth", scales=(0.75, 1.0), dtype=torch.float64)
    assert layer.sizes == (7, 7)
    small, large = layer.filters()
    assert (small - large).abs().max() > 0.1 * large.abs().max()


def test_windows_of_an_averaged_edge_are_those_that_the_disc_touches():
    layer = ScaleSteerableConv2d(1, 2, basis="smooth", scales=(1.0, 1.1, 1.3))
    assert layer.sizes == (7, 9, 11)  # the disc of 1.1 has a diameter of 7.7, that of 1.3 of 9.1
    assert [f.shape[-1] for f in layer.filters()] == [7, 9, 11]
    assert layer.with_scales((4.0,)).sizes == (29,)


def test_one_layer_of_one_lobed_functions_tells_the_two_sides_of_an_edge():
    """A point-symmetric filter answers the same to an edge and to the edge turned by half a turn."""
    torch.manual_seed(0)
    edge = torch.zeros(1, 1, 33, 33)
    edge[..., 17:] = 1
    edge[..., 16] = 0.5
    for name, tells in (("area", False), ("smooth", True)):
        layer = ScaleSteerableConv2d(1, 8, padding="same", basis=name)
        one, other = (layer(x)[0, :, 16, 16] for x in (edge, edge.flip(-1)))
        assert (one - other).abs().max() < 1e-5 or tells
        assert (one - other).abs().min() > 1e-3 or not tells


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_parameter_gets_a_finite_gradient(backend):
    layer = ScaleSteerableConv2d(2, 3, backend=backend)
    layer(torch.randn(2, 2, 20, 20)).square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).float().mean() > 0.9


def test_with_scales_shares_parameters_and_leaves_the_random_state_alone():
    layer = ScaleSteerableConv2d(2, 3, stride=2, padding=3, basis=LogRadialBasis.preset("area"))
    state = torch.get_rng_state()
    other = layer.with_scales((0.8, 4.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert other.coefficients is layer.coefficients
    assert other.bias is layer.bias
    assert [f.shape[-1] for f in other.filters()] == [5, 29]
    assert torch.equal(layer.with_scales(PAPER_SCALES)(x := torch.randn(1, 2, 20, 20)), layer(x))
    assert other(x).shape == layer(x).shape
    assert list(other.state_dict()) == list(layer.state_dict())


KEPT = {
    "stride": 2,
    "padding": (2, 1),
    "dilation": (1, 2),
    "groups": 2,
    "bias": False,
    "padding_mode": "circular",
    "dtype": torch.float64,
    "basis": "area",
    "reduce": None,
    "backend": "spectral",
}


@pytest.mark.parametrize("name", KEPT)
def test_with_scales_keeps(name):
    layer = ScaleSteerableConv2d(2, 4, scales=(1.0,), **{name: KEPT[name]})
    torch.manual_seed(0)
    expected = ScaleSteerableConv2d(2, 4, scales=(1.0, 1.6), **{name: KEPT[name]})
    other = layer.with_scales((1.0, 1.6))
    assert repr(other) == repr(expected)
    expected.load_state_dict(layer.state_dict())
    x = torch.randn(1, 2, 20, 20, dtype=layer.coefficients.dtype)
    assert torch.equal(other(x), expected(x))
    assert other.backend == expected.backend


def test_with_scales_keeps_the_mode_hooks_and_what_a_subclass_has():
    class Named(ScaleSteerableConv2d):
        def __init__(self, name):
            super().__init__(2, 3)
            self.name = name

    layer, seen = Named("mine").eval(), []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(module))
    other = layer.with_scales((1.0, 2.0))
    assert (type(other), other.name, other.training) == (Named, "mine", False)
    other(torch.randn(1, 2, 9, 9))
    assert seen == [other]
    other.register_forward_hook(lambda module, inputs, output: seen.append(None))
    layer(torch.randn(1, 2, 9, 9))
    assert seen == [other, layer]
    assert layer.with_scales((1.0,)).train().training
    assert not layer.training


def test_with_scales_keeps_the_largest_window_of_the_released_code():
    layer = ScaleSteerableConv2d(1, 1, basis=LogRadialBasis.preset("released-code"))
    other = layer.with_scales((9 / 7,))
    assert other.basis == layer.basis
    torch.testing.assert_close(other.filters()[0], layer.filters()[1])


def assert_folded(folded, layer, x):
    """Filters are equal. A fast engine may multiply by the basis between frequencies: outputs are up to rounding."""
    with torch.no_grad():
        assert all(map(torch.equal, folded.filters(), layer.filters()))
        torch.testing.assert_close(folded(x), layer(x), rtol=1e-4, atol=1e-5)


def network(backend="direct"):
    shared = ScaleSteerableConv2d(4, 4, **SMALL, backend=backend)
    return nn.Sequential(
        ScaleSteerableConv2d(2, 4, **SMALL, backend=backend),
        nn.ReLU(),
        nn.Sequential(shared, nn.BatchNorm2d(4)),
        shared,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_fold_gives_the_same_output_and_leaves_the_model_alone(backend):
    model = network(backend).eval()
    before = copy.deepcopy(model.state_dict())
    folded = fold(model)
    x = torch.randn(2, 2, 9, 9)
    assert torch.equal(folded(x), model(x))
    assert not any(isinstance(m, ScaleSteerableConv2d) for m in folded.modules())
    assert folded[2][0] is folded[3]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert {p for p, _ in folded.named_parameters()} == {"2.1.weight", "2.1.bias"}


def test_fold_of_a_single_layer_keeps_everything_but_the_coefficients():
    layer = ScaleSteerableConv2d(2, 3, stride=2, padding=3, reduce=None)
    folded = fold(layer)
    assert isinstance(folded, FoldedScaleConv2d)
    x = torch.randn(1, 2, 12, 12)
    assert torch.equal(folded(x), layer(x))
    layer.coefficients.data.zero_()
    assert folded(x).abs().max() > 0


@pytest.mark.parametrize("training", [False, True])
def test_fold_keeps_bias_mode_and_arguments(training):
    layer = ScaleSteerableConv2d(4, 6, 5, 2, 1, 2, 2, padding_mode="reflect", scales=(1.0, 1.5), backend="direct")
    nn.init.normal_(layer.bias)
    layer.train(training)
    folded = fold(nn.Sequential(layer))[0]
    assert folded.training == training
    assert torch.equal(folded.bias, layer.bias)
    assert folded.bias.data_ptr() != layer.bias.data_ptr()
    assert repr(folded) == repr(layer).replace("ScaleSteerableConv2d", "FoldedScaleConv2d")
    x = torch.randn(1, 4, 14, 14)
    assert torch.equal(folded(x), layer(x))
    assert fold(ScaleSteerableConv2d(1, 1, bias=False)).bias is None


class Doubled(ScaleSteerableConv2d):
    def forward(self, x, return_scales=False):
        return 2 * super().forward(x)


class OwnFilters(ScaleSteerableConv2d):
    def filters(self):
        return tuple(2 * f for f in super().filters())


def patched(*arguments):
    layer = ScaleSteerableConv2d(*arguments)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(("make", "own"), [(Doubled, "forward"), (OwnFilters, "filters"), (patched, "forward")])
def test_fold_refuses_what_it_cannot_keep(make, own):
    with pytest.raises(TypeError, match=rf"a \w+ cannot be folded: it has its own `{own}`"):
        fold(nn.Sequential(make(1, 1)))


def test_fold_keeps_hooks():
    layer = ScaleSteerableConv2d(2, 3)
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    layer.register_forward_hook(lambda module, inputs, kwargs, output: output * len(kwargs), with_kwargs=True)
    model = nn.Sequential(layer)
    x = torch.randn(1, 2, 9, 9)
    assert_folded(fold(model)[0], layer, x)
    folded = fold(layer)(x, return_scales=False)
    torch.testing.assert_close(folded, layer(x, return_scales=False), rtol=1e-4, atol=1e-5)
    assert layer(x, return_scales=False).abs().max() > 0


FINISHED = {
    "weight norm": lambda layer: nn.utils.parametrizations.weight_norm(layer, "coefficients"),
    "spectral norm": lambda layer: nn.utils.parametrizations.spectral_norm(layer, "coefficients"),
    "pruned": lambda layer: nn.utils.prune.random_unstructured(layer, "coefficients", 0.5),
    "spectral norm by a hook": lambda layer: nn.utils.spectral_norm(layer, "coefficients"),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")
@pytest.mark.parametrize("kind", FINISHED)
@pytest.mark.parametrize("training", [False, True])
def test_fold_finishes_what_is_done_to_the_coefficients_and_leaves_the_model_alone(kind, training):
    layer = ScaleSteerableConv2d(2, 3)
    FINISHED[kind](layer)
    model = nn.Sequential(layer).train(training)
    before = copy.deepcopy(model.state_dict())
    folded = fold(model).eval()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert layer.training == training
    x = torch.randn(1, 2, 9, 9)
    assert_folded(folded[0], model.eval()[0], x)
    assert list(folded.state_dict()) == ["0.taps", "0.bias"]


def test_state_dict_is_the_same_in_train_and_eval_and_after_forward():
    model = network()
    keys = list(model.state_dict())
    assert not any("steered_basis" in k for k in keys)
    model.eval()(torch.randn(1, 2, 9, 9))
    assert list(model.state_dict()) == keys
    model.train()(torch.randn(2, 2, 9, 9))
    assert list(model.state_dict()) == keys


def test_state_dict_of_a_folded_model_loads_into_another():
    first, second = network().eval(), network().eval()
    x = torch.randn(1, 2, 9, 9)
    folded = fold(second)
    folded.load_state_dict(fold(first).state_dict())
    assert torch.equal(folded(x), first(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x), first(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_deepcopy_and_pickle_after_a_forward_pass(backend):
    layer = ScaleSteerableConv2d(2, 3, backend=backend)
    x = torch.randn(1, 2, 12, 12)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = ScaleSteerableConv2d(2, 3, backend=backend)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), expected)


def test_moves_return_self_and_take_every_tensor_along():
    layer = ScaleSteerableConv2d(1, 2)
    for move, dtype in (("double", torch.float64), ("half", torch.float16), ("bfloat16", torch.bfloat16)):
        assert getattr(layer, move)() is layer
        assert {t.dtype for t in (layer.coefficients, layer.bias, layer.steered_basis)} == {dtype}
    assert layer.cpu() is layer
    assert layer.to("meta") is layer
    assert {t.device.type for t in (layer.coefficients, layer.bias, layer.steered_basis)} == {"meta"}


def test_conversions_give_a_basis_of_full_precision():
    layer = ScaleSteerableConv2d(1, 1).half().double()
    exact = np.concatenate([harmonics.steered_basis(layer.basis, 7, s).reshape(32, -1) for s in layer.scales], 1)
    np.testing.assert_allclose(layer.steered_basis.numpy(), exact, rtol=0, atol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_module_is_close(backend, dtype):
    layer = ScaleSteerableConv2d(3, 4, backend=backend)
    x = torch.randn(2, 3, 16, 16)
    expected = layer(x)
    actual = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    assert actual.dtype == dtype
    assert (actual.float() - expected).norm() / expected.norm() < {torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_autocast_is_close_forward_and_backward(backend):
    layer = ScaleSteerableConv2d(3, 4, backend=backend)
    x = torch.randn(2, 3, 16, 16)
    results = []
    for enabled in (False, True):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = layer(x)
        out.float().square().sum().backward()
        results.append((out, layer.coefficients.grad.clone()))
    (expected, expected_grad), (actual, grad) = results
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() / expected.norm() < 1e-2
    assert (grad - expected_grad).norm() / expected_grad.norm() < 2e-2
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_construction_under_autocast_draws_the_same_coefficients():
    torch.manual_seed(4)
    expected = ScaleSteerableConv2d(2, 3).coefficients
    torch.manual_seed(4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ScaleSteerableConv2d(2, 3).coefficients, expected)


def test_default_dtype_float64_is_followed():
    torch.set_default_dtype(torch.float64)
    try:
        layer = ScaleSteerableConv2d(1, 2)
        assert layer(torch.randn(1, 1, 9, 9)).dtype == torch.float64
        assert layer.steered_basis.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_meta_device_then_materialised():
    expected = ScaleSteerableConv2d(2, 3)
    with torch.device("meta"):
        layer = ScaleSteerableConv2d(2, 3)
    assert layer.coefficients.is_meta
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    layer.reset_buffers()
    layer.load_state_dict(expected.state_dict())
    x = torch.randn(1, 2, 9, 9)
    assert torch.equal(layer(x), expected(x))
    drawn = ScaleSteerableConv2d(2, 3, device="meta").to_empty(device="cpu")
    torch.manual_seed(3)
    drawn.reset_parameters()
    torch.manual_seed(3)
    assert torch.equal(drawn.coefficients, ScaleSteerableConv2d(2, 3).coefficients)


def stack(**options):
    """Layers of ours between others, as in a network of one's own."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 1),
        ScaleSteerableConv2d(4, 4, **SMALL, **options),
        nn.BatchNorm2d(4),
        nn.Sequential(ScaleSteerableConv2d(4, 4, **SMALL, **options), nn.ReLU()),
    )


def test_a_model_built_on_meta_and_filled_by_assignment_gives_right_outputs():
    expected = stack().double().eval()
    with torch.device("meta"):
        model = stack()
    model.load_state_dict(expected.state_dict(), assign=True)
    assert {b.dtype for n, b in model.named_buffers() if "steered" in n} == {torch.float64}
    x = torch.randn(1, 2, 9, 9, dtype=torch.float64)
    assert torch.equal(model.eval()(x), expected(x))


def test_assigned_parameters_of_another_dtype_bring_the_basis_along():
    expected, layer = ScaleSteerableConv2d(2, 3, dtype=torch.float64), ScaleSteerableConv2d(2, 3)
    layer.load_state_dict(expected.state_dict(), assign=True)
    assert torch.equal(layer.steered_basis, expected.steered_basis)


def test_a_model_built_on_meta_and_given_memory_gives_right_outputs():
    with torch.device("meta"):
        model = stack()
    outputs = []
    for built in (model.to_empty(device="cpu"), stack()):
        torch.manual_seed(6)
        for module in built.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        outputs.append(built(torch.ones(2, 2, 9, 9).cumsum(3)))
    assert torch.equal(*outputs)


def test_meta_and_assignment_work_with_a_parametrization():
    def build(device):
        return nn.utils.parametrizations.weight_norm(ScaleSteerableConv2d(2, 3, device=device), "coefficients")

    expected, layer = build("cpu"), build("meta")
    layer.load_state_dict(expected.state_dict(), assign=True)
    x = torch.randn(1, 2, 9, 9)
    assert torch.equal(layer(x), expected(x))
    assert torch.equal(layer.with_scales((1.0, 3.0))(x), expected.with_scales((1.0, 3.0))(x))


def test_a_parameter_exchanged_by_hand_is_told_what_is_missing():
    layer = ScaleSteerableConv2d(2, 3, device="meta", bias=False)
    layer.coefficients = ScaleSteerableConv2d(2, 3).coefficients
    x = torch.randn(1, 2, 9, 9)
    with pytest.raises(RuntimeError, match=r"`steered_basis` is on meta but .* on cpu: call layer.reset_buffers\(\)"):
        layer(x)
    layer.reset_buffers()
    assert layer(x).isfinite().all()


def test_moves_that_change_nothing_keep_the_basis():
    layer = ScaleSteerableConv2d(1, 2)
    before = layer.steered_basis
    layer.to("cpu").float().load_state_dict(ScaleSteerableConv2d(1, 2).state_dict())
    assert layer.steered_basis is before
    layer.share_memory()
    assert all(t.is_shared() for t in (layer.coefficients, layer.bias, layer.steered_basis))


def test_moves_work_where_torch_swaps_tensors(request):
    """As it does for the sharded parameters of FSDP."""
    request.addfinalizer(lambda: torch.__future__.set_swap_module_params_on_conversion(False))
    torch.__future__.set_swap_module_params_on_conversion(True)
    layer = ScaleSteerableConv2d(1, 2)
    layer(torch.randn(1, 1, 9, 9)).sum().backward()
    for move in (lambda: layer.to("cpu"), layer.double, lambda: layer.to(memory_format=torch.channels_last)):
        assert move() is layer
    assert layer.coefficients.grad.dtype == layer.steered_basis.dtype == torch.float64


@pytest.mark.parametrize(
    "wrap", [lambda layer: layer, lambda layer: nn.utils.parametrizations.weight_norm(layer, "coefficients")]
)
def test_channels_last(wrap):
    layer = wrap(ScaleSteerableConv2d(3, 4, padding=3))
    model = nn.Sequential(layer, nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 3, 10, 12)
    expected = model(x)
    expected.sum().backward()
    assert model.to(memory_format=torch.channels_last) is model
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-5)
    model.to(torch.float64, memory_format=torch.channels_last)  # gradients too
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


class Winners(nn.Module):
    """A network of one's own that looks at the winning scales."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x):
        y, scales = self.conv(x, return_scales=True)
        return y + scales


@pytest.mark.parametrize("finish", [lambda model: model, fold])
def test_symbolic_trace_takes_the_layer_as_one_node(finish):
    x = torch.randn(2, 2, 9, 9)
    for model in (stack().eval(), Winners(ScaleSteerableConv2d(2, 3, **SMALL))):
        model = finish(model)
        traced = torch.fx.symbolic_trace(model)
        assert torch.equal(traced(x), model(x))
        assert torch.equal(copy.deepcopy(traced)(x), model(x))
    with pytest.raises(TypeError, match=r"alone cannot be traced by torch.fx: put it in an nn.Sequential"):
        torch.fx.symbolic_trace(finish(ScaleSteerableConv2d(2, 3)))


@pytest.mark.filterwarnings(*TORCH_WARNINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend):
    layer = ScaleSteerableConv2d(2, 3, **SMALL, backend=backend)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    x = torch.randn(2, 2, 9, 10)
    outs = []
    for module in (layer, compiled):
        out, winner = module(x, return_scales=True)
        out.square().sum().backward()
        outs.append((out, winner))
    torch.testing.assert_close(outs[1][0], outs[0][0], rtol=1e-4, atol=1e-5)
    assert torch.equal(outs[1][1], outs[0][1])
    grads = [m.coefficients.grad for m in (layer, compiled)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings(*TORCH_WARNINGS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("folded", [False, True])
def test_exports_with_a_dynamic_batch(backend, folded):
    layer = ScaleSteerableConv2d(2, 3, **SMALL, backend=backend).eval()
    module = fold(layer) if folded else layer
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (torch.randn(4, 2, 9, 10),), dynamic_shapes=({0: batch},))
    for count in (2, 7):
        x = torch.randn(count, 2, 9, 10)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-6)


def test_repr_hides_defaults_and_names_presets():
    plain = ScaleSteerableConv2d(1, 2, scales=(1, 2))
    assert repr(plain) == "ScaleSteerableConv2d(1, 2, kernel_size=7, scales=(1, 2))"
    text = repr(ScaleSteerableConv2d(1, 2, stride=2, padding=3, bias=False, basis=LogRadialBasis.preset("area")))
    assert "stride=(2, 2), padding=(3, 3), bias=False" in text
    assert "basis='area'" in text


BASES = {
    "paper": (LogRadialBasis(), 7, PAPER_SCALES),
    "area": (LogRadialBasis.preset("area"), 7, PAPER_SCALES),
    "released-code": (LogRadialBasis.preset("released-code"), 7, PAPER_SCALES),
    "unit energy": (LogRadialBasis(normalization="unit"), 7, PAPER_SCALES),
    "one scale": (LogRadialBasis(), 7, (1.0,)),
    "area, kernel 5, one scale": (LogRadialBasis.preset("area"), 5, (1.0,)),
    "area, smaller and larger": (LogRadialBasis.preset("area"), 7, (0.5, 0.71, 1.0, 1.41, 2.0)),
    "m = 0": (LogRadialBasis(m=0.0), 7, PAPER_SCALES),
    "m = 2": (LogRadialBasis(m=2.0), 7, PAPER_SCALES),
    "area, m = 1.5": (LogRadialBasis(m=1.5, sampling="area"), 7, PAPER_SCALES),
    "four orientations": (LogRadialBasis(orientations=(0, 0.785, 1.571, 2.356), sigma=0.39), 7, PAPER_SCALES),
    "four orders, kernel 9": (LogRadialBasis(orders=(0.0, 1.0, 2.0, 4.0)), 9, (1.0, 1.5, 2.0)),
    "three scales, kernel 3": (LogRadialBasis.preset("area"), 3, (1.0, 5 / 3, 7 / 3)),
    "smooth": (LogRadialBasis.preset("smooth"), 7, PAPER_SCALES),
    "smooth, its own scales": (LogRadialBasis.preset("smooth"), 7, None),
    "smooth, its own scales, kernel 3": (LogRadialBasis.preset("smooth"), 3, None),
    "smooth, one order": (dataclasses.replace(LogRadialBasis.preset("smooth"), orders=(1.0,)), 7, (0.5, 1.0, 2.0)),
}


@pytest.mark.parametrize("name", BASES)
def test_initialisation_keeps_the_second_moment_through_six_layers(name):
    basis, kernel_size, scales = BASES[name]
    x = torch.randn(2, 32, 40, 40)
    with torch.no_grad():
        for _ in range(6):
            x = ScaleSteerableConv2d(32, 32, kernel_size, padding="same", scales=scales, basis=basis)(x).relu()
    assert 0.5 < x.square().mean().item() < 2


@pytest.mark.parametrize(
    ("basis", "kernel_size", "scales"),
    [("paper", 7, PAPER_SCALES), ("area", 3, (1.0, 5 / 3)), ("smooth", 7, (1.0, 1.4, 2.0))],
)
def test_initialisation_keeps_the_second_moment_of_each_layer_on_average(basis, kernel_size, scales):
    """The simulation again, by the layers themselves and over six draws: within 7 % for one layer."""
    arguments = {"padding": "same", "padding_mode": "circular", "basis": basis, "scales": scales}
    growth = []
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(1, 16, 32, 32)
            for _ in range(6):
                x = ScaleSteerableConv2d(16, 16, kernel_size, **arguments)(x).relu()
            growth.append(math.log(x.square().mean()) / 6)
    assert abs(np.mean(growth)) < 0.07


def test_initial_coefficients_shrink_with_the_root_of_the_inputs_a_filter_has():
    one, many = (ScaleSteerableConv2d(*channels, groups=2) for channels in ((2, 800), (50, 32)))
    assert (one.coefficients.std() / many.coefficients.std()).item() == pytest.approx(5, rel=0.03)


def test_the_bias_starts_at_zero():
    layer = ScaleSteerableConv2d(1, 20)
    assert (layer.bias == 0).all()
    nn.init.normal_(layer.bias)
    layer.reset_parameters()
    assert (layer.bias == 0).all()


@pytest.mark.parametrize(("basis", "tolerance"), [("paper", 0.02), ("smooth", 1e-5)])
def test_initial_filters_do_not_see_a_flat_image(basis, tolerance):
    layer = ScaleSteerableConv2d(1, 20, basis=basis)
    for weight in layer.filters():
        assert (weight.sum((-1, -2)).abs() / weight.abs().sum((-1, -2))).max() < tolerance


def test_an_averaged_edge_leaves_one_condition_for_a_sum_of_zero_at_all_scales():
    mixing = initialisation.initial_mixing(LogRadialBasis.preset("smooth"), 7, PAPER_SCALES)
    assert np.linalg.matrix_rank(mixing) == len(mixing) - 1


def test_initialisation_of_a_basis_that_cannot_sum_to_zero_is_finite_and_not_zero():
    layer = ScaleSteerableConv2d(1, 20, basis=LogRadialBasis(orders=(0.0,), orientations=(0.0,)))
    assert layer.coefficients.isfinite().all()
    assert layer.filters()[0].abs().max() > 1e-3


def test_initialisation_draws_from_the_global_generator_once():
    torch.manual_seed(5)
    first = ScaleSteerableConv2d(2, 3).coefficients
    initialisation.initial_mixing.cache_clear()
    torch.manual_seed(5)
    assert torch.equal(ScaleSteerableConv2d(2, 3).coefficients, first)


@pytest.mark.parametrize(("name", "limit"), [("paper", 0.1), ("area", 0.1), ("released-code", 0.1), ("smooth", 0.4)])
def test_construction_is_fast_with_cold_caches(name, limit):
    basis = LogRadialBasis.preset(name)
    ScaleSteerableConv2d(1, 1)  # the first use of torch and numpy in the process
    seconds = []
    for _ in range(3):
        for cached in (initialisation.initial_mixing, harmonics.sample, harmonics.normalizers, harmonics.stacked_basis):
            cached.cache_clear()
        start = time.thread_time()  # one thread in tests; a wall clock would measure the other worker
        ScaleSteerableConv2d(64, 128, basis=basis)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < limit
