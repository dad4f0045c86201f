"""The layer as a citizen of PyTorch: folding, states, copies, dtypes, devices, tracers, compilers."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from scalesteer import FoldedScaleConv2d, ScaleSteerableConv2d, fold, harmonics

BACKENDS = ("direct", "fast")
SMALL = {"kernel_size": 3, "padding": 1, "scales": (1.0, 5 / 3)}
# torch's own: inductor has no kernels for complex numbers and says so; old-style names inside torch.
TORCH_WARNINGS = (
    "ignore:.*Torchinductor does not support code generation for complex operators.*",
    "ignore:.*is deprecated.*:DeprecationWarning",
    "ignore:.*is deprecated.*:FutureWarning",
)


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
