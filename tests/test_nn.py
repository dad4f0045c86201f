"""The layer by itself: arguments, errors, filters, other scales. Its start values are in test_initialisation.py.

What PyTorch does to layers (copies, dtypes, devices, compilers), and `fold`, are in test_nn_torch.py.
"""

import inspect
import itertools
import math
import typing

import numpy as np
import pytest
import torch
from torch import nn

from scalesteer import PAPER_SCALES, LogRadialBasis, ScaleSteerableConv2d, fold, harmonics
from scalesteer import nn as layers

BACKENDS = ("direct", "fast")


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
        assert layer.sizes == (3, 3, 5, 7, 7, 11, 13, 19, 25, 33, 45)


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
            r"`backend` must be one of 'auto', 'direct', 'fast' \(got 'fft'\)",
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
        x = torch.randn(1, 4, 24, 24)
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
    assert bool(called) == (backend == "fast")


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
    "backend": "fast",
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


def test_repr_hides_defaults_and_names_presets():
    plain = ScaleSteerableConv2d(1, 2, scales=(1, 2))
    assert repr(plain) == "ScaleSteerableConv2d(1, 2, kernel_size=7, scales=(1, 2))"
    text = repr(ScaleSteerableConv2d(1, 2, stride=2, padding=3, bias=False, basis=LogRadialBasis.preset("area")))
    assert "stride=(2, 2), padding=(3, 3), bias=False" in text
    assert "basis='area'" in text
