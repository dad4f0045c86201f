"""What every convolution among the baselines must do as a citizen of PyTorch."""

import copy
import inspect
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from scalesteer import ScaleSteerableConv2d, baselines
from scalesteer.baselines import LocallyScaleInvariantConv2d, VectorFieldConv2d

LAYERS = (LocallyScaleInvariantConv2d, VectorFieldConv2d)
CASES = [
    (LocallyScaleInvariantConv2d, {"padding": 3}, ()),
    (VectorFieldConv2d, {"padding": 3}, ()),
    (VectorFieldConv2d, {"padding": 3, "vector_input": True}, (2,)),
]
IDS = ["locally scale-invariant", "vector field of scalars", "vector field of vectors"]
# torch's own: old-style names inside torch.
TORCH_WARNINGS = ("ignore:.*is deprecated.*:DeprecationWarning", "ignore:.*is deprecated.*:FutureWarning")
every_case = pytest.mark.parametrize(("make", "options", "vector"), CASES, ids=IDS)


@pytest.mark.parametrize("layer", LAYERS)
def test_signature_is_that_of_our_layer_as_far_as_conv2d_goes(layer):
    ours = list(inspect.signature(layer).parameters.values())
    steerable = list(inspect.signature(ScaleSteerableConv2d).parameters.values())
    count = len(inspect.signature(nn.Conv2d).parameters)
    assert [(p.name, p.default) for p in ours[:count]] == [(p.name, p.default) for p in steerable[:count]]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[count:])
    assert ours[count].name == "scales"


@pytest.mark.parametrize("layer", LAYERS)
def test_attributes_are_those_of_conv2d_and_cannot_be_assigned(layer):
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    for arguments in ({}, {"stride": 2, "padding": (1, 0), "groups": 2}, {"padding": "same", "dilation": (1, 2)}):
        ours, plain = (make(4, 6, 5, **arguments) for make in (layer, nn.Conv2d))
        for name in (*names, "transposed", "output_padding"):
            assert getattr(ours, name) == getattr(plain, name)
    with pytest.raises(AttributeError, match="`stride` is fixed when the layer is built"):
        ours.stride = (2, 2)


def test_public_names_are_these():
    assert set(baselines.__all__) == {
        "FittedBasis",
        "HermiteBasis",
        "KANAZAWA_SCALES",
        "MARCOS_SCALES",
        "LocallyScaleInvariantConv2d",
        "SpatialTransformer2d",
        "VectorBatchNorm2d",
        "VectorFieldConv2d",
        "VectorMagnitude",
        "VectorMaxPool2d",
        "affine_sample",
    }


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"in_channels": 0}, ValueError, r"`in_channels` must be at least 1 \(got 0\)"),
        ({"in_channels": 1.5}, TypeError, r"`in_channels` must be an integer \(got 1.5 of type float\)"),
        ({"out_channels": "3"}, TypeError, r"`out_channels` must be an integer \(got '3' of type str\)"),
        ({"out_channels": True}, TypeError, r"`out_channels` must be an integer \(got True of type bool\)"),
        ({"kernel_size": 4}, ValueError, r"odd and at least 3 \(got 4\): the filter needs a centre pixel; use 3 or 5"),
        ({"kernel_size": 1}, ValueError, r"odd and at least 3 \(got 1\): one pixel has no size; keep nn.Conv2d here"),
        ({"kernel_size": (5, 7)}, ValueError, r"`kernel_size` must be square \(got \(5, 7\)\)"),
        ({"scales": ()}, ValueError, "`scales` must not be empty"),
        ({"scales": (0.0, 1.0)}, ValueError, r"positive and strictly ascending \(got \(0.0, 1.0\)\)"),
        ({"scales": (1.0, math.nan)}, ValueError, r"`scales\[1\]` must be finite \(got nan\)"),
        ({"scales": (1.0, 1.0)}, ValueError, "positive and strictly ascending"),
        ({"scales": (2.0, 1.0)}, ValueError, "positive and strictly ascending"),
        ({"stride": 0}, ValueError, r"`stride` must be at least 1 \(got 0\)"),
        ({"stride": 1.5}, TypeError, r"`stride` must be an integer \(got 1.5"),
        ({"stride": 2, "padding": "same"}, ValueError, r"padding='same' is not defined for stride \(2, 2\)"),
        ({"dilation": 0}, ValueError, r"`dilation` must be at least 1 \(got 0\)"),
        ({"padding": -1}, ValueError, r"`padding` must be at least 0 \(got -1\)"),
        ({"padding": "full"}, ValueError, r"`padding` must be one of 'same', 'valid' \(got 'full'\)"),
        ({"groups": 3}, ValueError, r"`in_channels` \(=4\) must be divisible by `groups` \(=3\)"),
        ({"groups": 4}, ValueError, r"`out_channels` \(=6\) must be divisible by `groups` \(=4\)"),
        ({"padding_mode": "zero"}, ValueError, r"'circular' \(got 'zero'\). Did you mean 'zeros'"),
        ({"bias": 1}, TypeError, r"`bias` must be True or False \(got 1\)"),
        ({"antialias": "yes"}, TypeError, r"`antialias` must be True or False \(got 'yes'\)"),
        ({"dtype": torch.complex64}, TypeError, "`dtype` must be torch.float16, bfloat16"),
        ({"device": "warp"}, ValueError, r"`device` 'warp' is not available here; available: cpu, meta"),
    ],
)
@pytest.mark.parametrize("layer", LAYERS)
def test_wrong_arguments_are_named(layer, arguments, error, message):
    with pytest.raises(error, match=message):
        layer(**{"in_channels": 4, "out_channels": 6, **arguments})


@every_case
def test_wrong_tensors_are_named(make, options, vector):
    layer = make(4, 6, **options)
    axes = r"5 axes \(B, C, 2, H, W\)" if vector else r"4 axes \(B, C, H, W\)"
    for x, error, message in (
        (torch.zeros(4), ValueError, axes),
        (torch.zeros(4, *vector, 9, 9), ValueError, "add a batch axis"),
        (torch.zeros(1, 4, 3, 9, 9), ValueError, axes),
        (torch.zeros(1, 3, *vector, 9, 9), ValueError, "in_channels=4 channels on axis 1"),
        (torch.zeros(1, 4, *vector, 0, 9), ValueError, "the image must not be empty"),
        (torch.zeros(1, 4, *vector, 9, 9).int(), TypeError, r"real floating-point tensor \(got torch.int32\)"),
        (torch.zeros(1, 4, *vector, 9, 9).cfloat(), TypeError, "real floating-point tensor"),
        (torch.zeros(1, 4, *vector, 9, 9).double(), TypeError, "input is torch.float64 but the layer is torch.float32"),
        (torch.zeros(1, 4, *vector, 9, 9, device="meta"), ValueError, "the input is on meta but the layer is on cpu"),
        (np.zeros((1, 4, *vector, 9, 9), np.float32), TypeError, r"must be a tensor \(got ndarray\)"),
    ):
        with pytest.raises(error, match=message):
            layer(x)


ALTERNATIVES = {
    "kernel_size": 5,
    "stride": 2,
    "padding": 1,
    "dilation": 2,
    "groups": 2,
    "padding_mode": "circular",
    "scales": (1.0, 3.0),
}


@pytest.mark.parametrize("name", [*ALTERNATIVES, "antialias", "bias"])
@every_case
def test_every_argument_has_an_effect(make, options, vector, name):
    def run(**changes):
        torch.manual_seed(0)
        x = torch.randn(1, 4, *vector, 12, 12)
        return make(4, 4, **{**options, **changes})(x)

    default = inspect.signature(make).parameters[name].default
    plain, changed = run(), run(**{name: ALTERNATIVES.get(name, not default)})
    assert plain.shape != changed.shape or (plain - changed).abs().max() > 1e-3


@every_case
def test_device_and_dtype_are_obeyed_and_meta_can_be_materialised(make, options, vector):
    other = make(2, 3, dtype=torch.float64, **options)
    x = torch.randn(1, 2, *vector, 9, 9, dtype=torch.float64)
    for assign in (False, True):
        layer = make(2, 3, device="meta", dtype=torch.float64, **options)
        tensors = (*layer.parameters(), *layer.buffers())
        assert {(t.device.type, t.dtype) for t in tensors} == {("meta", torch.float64)}
        if not assign:
            layer.to_empty(device="cpu")
        layer.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(layer(x), other(x))


@every_case
def test_channels_last_and_symbolic_trace(make, options, vector):
    model = nn.Sequential(make(2, 3, **options))
    x = torch.randn(1, 2, *vector, 9, 9)
    expected = model(x)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)
    torch.testing.assert_close(model.to(memory_format=torch.channels_last)(x), expected, rtol=1e-5, atol=1e-6)


@every_case
def test_weights_start_as_those_of_conv2d(make, options, vector):
    layer = make(6, 40, groups=2, **options)
    fan_in = 3 * 49 * (2 if vector else 1)
    for parameter in layer.parameters():
        assert parameter.abs().max() <= fan_in**-0.5
        assert parameter.std().item() == pytest.approx((3 * fan_in) ** -0.5, rel=0.3)


@every_case
def test_every_parameter_gets_a_finite_gradient_and_the_input_is_left_alone(make, options, vector):
    layer = make(2, 3, **options)
    x = torch.randn(2, 2, *vector, 14, 13)
    before = x.clone()
    layer(x).square().sum().backward()
    assert torch.equal(x, before)
    for parameter in layer.parameters():
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).float().mean() > 0.9


@every_case
def test_flat_and_zero_images_have_finite_outputs_and_gradients(make, options, vector):
    layer = make(2, 3, **options)
    for value in (0.0, 3.0):
        x = torch.full((1, 2, *vector, 9, 9), value, requires_grad=True)
        layer(x).square().sum().backward()
        assert x.grad.isfinite().all()


@every_case
def test_empty_batch_gives_an_empty_output_with_gradients(make, options, vector):
    layer = make(2, 3, **options)
    x = torch.zeros(0, 2, *vector, 9, 9, requires_grad=True)
    out = layer(x)
    assert out.shape == layer(torch.zeros(1, 2, *vector, 9, 9))[:0].shape
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all((p.grad == 0).all() for p in layer.parameters())


@every_case
def test_copies_pickles_and_states_are_the_same_in_train_and_eval(make, options, vector):
    layer = make(2, 3, **options)
    x = torch.randn(1, 2, *vector, 11, 11)
    keys = list(layer.train().state_dict())
    expected = layer(x)
    assert keys == list(layer.eval().state_dict()) == ["weight", "bias"]
    assert torch.equal(layer(x), expected)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)


@every_case
def test_memory_layout_and_batch_do_not_matter(make, options, vector):
    layer = make(2, 3, **options)
    x = torch.randn(4, 2, *vector, 10, 12)
    expected = layer(x)
    transposed = x.mT.contiguous().mT
    assert not transposed.is_contiguous()
    torch.testing.assert_close(layer(transposed), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer(x[1:2]), expected[1:2], rtol=1e-5, atol=1e-6)
    if not vector:
        flipped = x.to(memory_format=torch.channels_last)
        torch.testing.assert_close(layer(flipped), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_case
def test_half_precision_module_is_close(make, options, vector, dtype):
    layer = make(3, 4, **options)
    x = torch.randn(2, 3, *vector, 16, 16)
    expected = layer(x)
    actual = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    assert actual.dtype == dtype
    lengths = [y.float().norm(dim=2) if y.ndim == 5 else y.float() for y in (actual, expected)]  # ties turn directions
    assert (lengths[0] - lengths[1]).norm() / lengths[1].norm() < {torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]


@every_case
def test_bfloat16_autocast_is_close(make, options, vector):
    layer = make(3, 4, **options)
    x = torch.randn(2, 3, *vector, 16, 16)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        actual, other = layer(x), layer(x.bfloat16())
    (actual.float() + other.float()).sum().backward()
    lengths = [y.float().norm(dim=2) if y.ndim == 5 else y.float() for y in (actual, expected)]
    assert (lengths[0] - lengths[1]).norm() / lengths[1].norm() < 2e-2
    assert layer.weight.grad.isfinite().all()


@pytest.mark.filterwarnings(*TORCH_WARNINGS)
@pytest.mark.parametrize("channels", [1, 2])
@every_case
def test_exports_with_a_dynamic_batch(make, options, vector, channels):
    layer = make(channels, 6, 3, scales=(0.5, 1.0, 1.6), **options).eval()
    batch = torch.export.Dim("batch")
    example = torch.randn(4, channels, *vector, 9, 10)
    program = torch.export.export(layer, (example,), dynamic_shapes=({0: batch},))
    for count in (2, 7):
        x = torch.randn(count, channels, *vector, 9, 10)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings(*TORCH_WARNINGS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_as_one_graph(backend):
    model = nn.Sequential(
        VectorFieldConv2d(1, 4, 3, padding=1, scales=(0.7, 1.0, 1.6)),
        baselines.VectorMaxPool2d(2),
        baselines.VectorBatchNorm2d(4),
        VectorFieldConv2d(4, 2, 3, padding=1, scales=(0.7, 1.0, 1.6), vector_input=True),
        baselines.VectorMagnitude(),
        LocallyScaleInvariantConv2d(2, 2, 3, padding=1, scales=(0.5, 1.0, 1.6)),
        baselines.SpatialTransformer2d(2, (5, 6), (2, 2), 3),
    )
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=backend)
    x = torch.randn(3, 1, 10, 12)
    outs = []
    for module in (model, compiled):
        out = module(x)
        out.square().sum().backward()
        outs.append(out)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_deterministic_mode_gives_the_same_bits_twice():
    torch.use_deterministic_algorithms(True)
    try:
        for make, options, vector in CASES:
            layer = make(2, 3, **options)
            x = torch.randn(2, 2, *vector, 9, 9, requires_grad=True)
            grads = [torch.autograd.grad(layer(x).square().sum(), (x, layer.weight)) for _ in range(2)]
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
