"""The layers on a CUDA device; skipped where there is none."""

import copy

import pytest
import torch

from scalesteer import ScaleBlurPool2d, ScaleGroupConv2d, ScaleSteerableConv2d, create_model, fast, fold
from scalesteer.app.device import capture, warm_up
from scalesteer.baselines import LocallyScaleInvariantConv2d, VectorFieldConv2d

pytestmark = pytest.mark.gpu
BACKENDS = ("direct", "fast")


@pytest.fixture(autouse=True)
def _full_precision():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def run(layer, x):
    x = x.clone().requires_grad_()
    out, winner = layer(x, return_scales=True)
    layer.zero_grad()
    out.square().sum().backward()
    return out.detach().cpu(), x.grad.cpu(), layer.coefficients.grad.cpu(), winner.cpu()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channels", [1, 6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("basis", ["area", "smooth"])
def test_device_gives_the_numbers_of_the_cpu(backend, channels, dtype, tolerance, basis):
    layer = ScaleSteerableConv2d(channels, 8, padding="same", basis=basis, dtype=dtype, backend="direct")
    x = torch.randn(4, channels, 30, 33, dtype=dtype)
    expected = run(layer, x)
    other = copy.deepcopy(layer).cuda()
    other.backend = backend
    for first, second in zip(expected[:3], run(other, x.cuda())[:3], strict=True):
        assert (second - first).norm() <= tolerance * first.norm()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("basis", ["paper", "smooth"])
def test_autocast_and_half_modules(backend, basis):
    layer = ScaleSteerableConv2d(6, 8, padding="same", basis=basis, backend=backend, device="cuda")
    x = torch.randn(4, 6, 28, 28, device="cuda")
    expected = layer(x)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            actual = layer(x)
        assert actual.dtype == dtype
        assert (actual.float() - expected).norm() < 0.02 * expected.norm()
        half = copy.deepcopy(layer).to(dtype)(x.to(dtype))
        assert (half.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_mode_gives_bitwise_equal_runs(backend, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = torch.randn(4, 6, 28, 28, device="cuda")
    layer = ScaleSteerableConv2d(6, 8, padding="same", backend=backend, device="cuda", basis="paper")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(layer, x), run(layer, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_step_of_a_group_network_can_be_captured_in_a_graph():
    model = create_model("group-cnn", widths=(4, 6), kernel_size=7, subsample=(1,)).cuda()
    x = torch.randn(4, 1, 28, 28, device="cuda")
    warm_up(lambda: model(x).square().sum().backward())
    model.eval()
    graph, found = capture(lambda: model(x))
    graph.replay()
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_can_be_captured_in_a_graph(backend):
    layer = ScaleSteerableConv2d(6, 8, padding="same", backend=backend, device="cuda", basis="paper")
    x = torch.randn(4, 6, 28, 28, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    graph.replay()
    torch.testing.assert_close(out, expected)


def compiled_with_graphs(module):
    torch._dynamo.reset()
    return torch.compile(module, mode="reduce-overhead", fullgraph=True)


@pytest.mark.parametrize("basis", ["paper", "smooth"])
def test_a_program_of_cuda_graphs_gives_the_steps_of_eager(basis, monkeypatch):
    calls, run_engine = [], fast._run
    monkeypatch.setattr(fast, "_run", lambda *a, **k: calls.append(1) or run_engine(*a, **k))
    first, second = (ScaleSteerableConv2d(channels, 8, padding="same", basis=basis) for channels in (1, 8))
    model = torch.nn.Sequential(first, torch.nn.ReLU(), second).cuda()
    other = copy.deepcopy(model)
    compiled = compiled_with_graphs(other)
    for _ in range(6):
        x = torch.randn(4, 1, 28, 28, device="cuda")
        results = []
        for module, run_module in ((model, model), (other, compiled)):
            before = len(calls)
            out = run_module(x)
            out.square().mean().backward()
            results.append([out.detach().clone(), *(p.grad.clone() for p in module.parameters())])
            with torch.no_grad():
                for p in module.parameters():
                    p -= 0.01 * p.grad  # small enough that no step runs away
            module.zero_grad()
        for expected, found in zip(*results, strict=True):
            assert (found - expected).norm() <= 1e-4 * expected.norm()
    assert len(calls) == before  # the last step replayed what was recorded


def test_inference_by_cuda_graphs_equals_eager_in_half_precision_too():
    layer = fold(ScaleSteerableConv2d(6, 8, padding="same", device="cuda", backend="fast"))
    for dtype in (torch.float32, torch.bfloat16):
        compiled = compiled_with_graphs(layer)
        with torch.no_grad(), torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            for _ in range(4):
                x = torch.randn(4, 6, 28, 28, device="cuda")
                expected, found = layer(x), compiled(x)
                assert found.dtype == expected.dtype == dtype
                assert (found - expected).norm() <= 1e-4 * expected.norm()


def test_compiled_steps_are_bitwise_equal_in_deterministic_mode(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = torch.randn(4, 6, 28, 28, device="cuda")
    layer = ScaleSteerableConv2d(6, 8, padding="same", device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        compiled = compiled_with_graphs(layer)
        found = []
        for _ in range(5):  # compiled, recorded, replayed
            layer.zero_grad()
            out = compiled(x)
            out.square().sum().backward()
            found.append((out.detach().clone(), layer.coefficients.grad.clone()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for later in found[1:] for a, b in zip(found[0], later, strict=True))


@pytest.mark.parametrize(
    ("layer", "batch"),
    [
        (LocallyScaleInvariantConv2d(1, 8, padding="same"), 4),  # maps of taps, and the definition
        (LocallyScaleInvariantConv2d(6, 8, padding="same"), 32),  # frequencies
        (LocallyScaleInvariantConv2d(6, 8, padding="same"), 1),  # the definition
        (VectorFieldConv2d(6, 8, padding="same"), 32),
    ],
)
def test_layers_that_resize_give_the_numbers_of_the_cpu(layer, batch):
    torch.manual_seed(0)
    x = torch.randn(batch, layer.in_channels, 20, 22)
    found = []
    for device in ("cpu", "cuda"):
        layer = layer.to(device)
        image = x.to(device).requires_grad_()
        out = layer(image)
        grads = torch.autograd.grad(out.square().sum(), (image, layer.weight))
        found.append([t.cpu() for t in (out, *grads)])
    for first, second in zip(*found, strict=True):
        assert (second - first).norm() <= 1e-3 * first.norm()


def test_folded_layer_moves_to_the_device():
    layer = ScaleSteerableConv2d(3, 4, padding="same", basis="paper")
    x = torch.randn(2, 3, 20, 20)
    torch.testing.assert_close(fold(layer).cuda()(x.cuda()).cpu(), layer(x), rtol=1e-3, atol=1e-4)


def test_input_on_another_device_is_named():
    with pytest.raises(ValueError, match="the input is on cpu but the layer is on cuda:0"):
        ScaleSteerableConv2d(1, 1, device="cuda", basis="paper")(torch.zeros(1, 1, 9, 9))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ends", ["zeros", "replicate"])
def test_group_convolutions_give_the_numbers_of_the_cpu(backend, ends):
    layer = ScaleGroupConv2d(4, 5, padding="same", reach=2, ends=ends, backend="direct")
    model = torch.nn.Sequential(layer, ScaleBlurPool2d(layer.scales))
    on_gpu = copy.deepcopy(model).cuda()
    on_gpu[0].backend = backend
    x, outs = torch.randn(2, 4, 4, 20, 18), []
    for module in (model, on_gpu):
        out = module(x.to(module[0].coefficients.device))
        out.square().sum().backward()
        outs.append((out.cpu(), module[0].coefficients.grad.cpu()))
    for expected, found in zip(*outs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
