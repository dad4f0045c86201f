"""The fast path of CUDA against one convolution a scale; without CUDA, Triton interprets the kernels."""

import math
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scalesteer import LogRadialBasis, ScaleSteerableConv2d, fast, fold
from scalesteer.fast.memory import Cache
from scalesteer.functional import scale_conv2d
from scalesteer.geometry import Filters

kernels = pytest.importorskip("scalesteer.fast.kernels", reason="needs Triton")
engines = pytest.importorskip("scalesteer.fast.triton", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOW = pytest.mark.slow if DEVICE == "cpu" else pytest.mark.gpu  # slow where kernels are interpreted
SCALES = (1.0, 9 / 7, 11 / 7)
# One lobe, so that filters are not point-symmetric; two orientations are opposite, one has no mirror image.
ONE_LOBE = LogRadialBasis(orientations=(0.3, 0.3 + math.pi, 2.0), sigma=0.6, lobes="single")
both_symmetries = pytest.mark.parametrize("basis", ["paper", ONE_LOBE], ids=["symmetric", "one lobe"])


@pytest.fixture(autouse=True)
def _fused(monkeypatch):
    monkeypatch.setattr(fast.choice, "KERNELS_RUN_ON", {"cuda", "cpu"})
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def both(layer, x, image_gradient=False, raw=False, backends=("direct", "fast")):
    """Output, winners and gradients of both backends."""
    results = []
    for backend in backends:
        image = x.clone().requires_grad_(image_gradient)
        layer.zero_grad()
        filters = layer._stored_filters().finished() if raw else layer._stored_filters()
        y, scales = scale_conv2d(image, filters, layer.bias, layer.geometry, backend=backend, return_scales=True)
        weight = torch.cos(torch.arange(y.numel(), device=y.device, dtype=torch.float32)).view_as(y)
        (y * weight).sum().backward()
        found = [y.detach(), layer.coefficients.grad.clone(), layer.bias.grad.clone()]
        results.append(([*found, image.grad] if image_gradient else found, scales))
    return results


def assert_same(results):
    (direct, winners), (fused, others) = results
    assert (winners != others).float().mean() < 1e-3  # near ties
    for a, b in zip(direct, fused, strict=True):
        assert torch.linalg.vector_norm(a - b) <= 2e-5 * torch.linalg.vector_norm(a)


CASES = {
    "one channel": (1, 5, (12, 13), {}),
    "three channels": (3, 4, (10, 9), {}),
    "many outputs": (2, 35, (9, 9), {"dilation": 2}),
    "frequencies": (6, 5, (12, 13), {}),
    "stride": (5, 19, (9, 11), {"stride": 2, "padding": 1}),
    "valid": (8, 3, (20, 7), {"dilation": 2, "padding": "valid", "kernel_size": 3, "scales": (1.0, 1.7)}),
    "reflect": (5, 4, (12, 12), {"padding_mode": "reflect"}),
    "one scale": (1, 3, (9, 9), {"scales": (1.0,)}),
    "four scales": (1, 3, (9, 9), {"scales": (1.0, 1.3, 1.6, 2.0)}),
}


@pytest.mark.parametrize(("image_gradient", "basis"), [(False, "paper"), (True, "paper"), (False, ONE_LOBE)])
@pytest.mark.parametrize("case", CASES)
def test_matches_direct(case, image_gradient, basis):
    fan_in, fan_out, size, options = CASES[case]
    options = {"scales": SCALES, "padding": "same", "basis": basis, **options}
    layer = ScaleSteerableConv2d(fan_in, fan_out, **options).to(DEVICE)
    layer.bias.data.normal_()
    assert_same(both(layer, torch.randn(2, fan_in, *size, device=DEVICE), image_gradient))


@pytest.mark.parametrize("fan_in", [1, 5])
def test_the_default_layer_matches_direct(fan_in):
    layer = ScaleSteerableConv2d(fan_in, 3, 3, padding="same").to(DEVICE)
    assert len(layer.scales) == 8
    assert_same(both(layer, torch.randn(1, fan_in, 9, 10, device=DEVICE)))


@pytest.mark.parametrize("fan_in", [1, 6])
@both_symmetries
def test_filters_given_as_taps_match_direct(fan_in, basis):
    layer = ScaleSteerableConv2d(fan_in, 4, padding=3, scales=SCALES, basis=basis).to(DEVICE)
    assert_same(both(layer, torch.randn(2, fan_in, 10, 11, device=DEVICE), raw=True))


@pytest.mark.parametrize("fan_in", [1, 6])
@both_symmetries
def test_folded_layer_matches_direct(fan_in, basis):
    layer = ScaleSteerableConv2d(fan_in, 4, padding=3, scales=SCALES, basis=basis, backend="fast").to(DEVICE)
    layer.bias.data.normal_()
    x = torch.randn(2, fan_in, 10, 11, device=DEVICE)
    with torch.no_grad():
        expected = scale_conv2d(x, layer._stored_filters(), layer.bias, layer.geometry)
        assert torch.allclose(fold(layer)(x), expected, atol=2e-5)


@pytest.mark.parametrize("fan_in", [1, 6])
def test_changed_filters_of_a_folded_layer_are_noticed(fan_in):
    layer = ScaleSteerableConv2d(fan_in, 4, padding=3, scales=SCALES, basis="paper", backend="fast", bias=False)
    folded, x = fold(layer.to(DEVICE)), torch.randn(1, fan_in, 9, 9, device=DEVICE)
    before = folded(x)
    folded.taps *= 2
    assert torch.allclose(folded(x), 2 * before, atol=1e-5)


def test_an_image_of_several_blocks_matches_direct():
    layer = ScaleSteerableConv2d(5, 2, 3, padding="same", scales=(1.0, 2.0), basis="paper").to(DEVICE)
    assert_same(both(layer, torch.randn(1, 5, 70, 4, device=DEVICE), image_gradient=True))


# Interpreted, products of bfloat16 are wrong: Triton keeps it as integers there.
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float16, 2e-3),
        pytest.param(torch.bfloat16, 1.2e-2, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("fan_in", [1, 6])
@both_symmetries
def test_half_precision_stays_within_its_stated_error(fan_in, basis, dtype, tolerance):
    layer = ScaleSteerableConv2d(fan_in, 4, padding=3, scales=(11 / 7,), basis=basis).to(DEVICE)  # no ties
    x = torch.randn(2, fan_in, 12, 11, device=DEVICE)
    ((expected, _),) = both(layer, x, image_gradient=fan_in > 1, backends=("direct",))
    with torch.autocast(DEVICE, dtype):
        ((found, _),) = both(layer, x, image_gradient=fan_in > 1, backends=("fast",))
    assert found[0].dtype == dtype
    assert all(gradient.dtype == torch.float32 for gradient in found[1:])
    for a, b in [pair for i, pair in enumerate(zip(expected, found, strict=True)) if i != 2]:  # the bias is not ours
        assert torch.linalg.vector_norm(a - b) <= tolerance * torch.linalg.vector_norm(a)


def test_half_precision_has_room_for_large_values():
    layer = ScaleSteerableConv2d(6, 4, padding=3, scales=SCALES, basis="paper", backend="fast").to(DEVICE)
    x = 255 * torch.ones(1, 6, 32, 32, device=DEVICE)  # the sum over one image is beyond the range of float16
    with torch.autocast(DEVICE, torch.float16), torch.no_grad():
        assert layer(x).isfinite().all()


@pytest.mark.parametrize("fan_in", [1, 6])
def test_kernels_are_at_work(fan_in, monkeypatch):
    used = []
    for kind in (engines.FusedTaps, engines.FusedFrequencies):
        whole = kind.max_over_scales
        monkeypatch.setattr(
            kind, "max_over_scales", lambda self, *a, whole=whole: used.append(type(self)) or whole(self, *a)
        )
    ScaleSteerableConv2d(fan_in, 2, padding=3, scales=SCALES, backend="fast", basis="paper").to(DEVICE)(
        torch.ones(1, fan_in, 9, 9).to(DEVICE)
    )
    assert used == [engines.FusedTaps if fan_in == 1 else engines.FusedFrequencies]


class Launches(TorchDispatchMode):
    """Names of the operations that launch a kernel: all but views, and memory that nobody fills."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view and not re.search("empty|detach", func.name()):
            self.names.append(func.name())
        return found


class Stub:
    """Stands for a kernel and notes its launch."""

    def __init__(self, name, names):
        self.name, self.names = name, names

    def __getitem__(self, grid):
        return lambda *args, **options: self.names.append(self.name)


@pytest.mark.parametrize("fan_in", [1, 8])
def test_a_layer_launches_at_most_eight_kernels_in_each_direction(fan_in, monkeypatch):
    layer = ScaleSteerableConv2d(fan_in, 8, padding=3, scales=SCALES, backend="fast", basis="paper", bias=False)
    x = torch.randn(2, fan_in, 9, 9, device=DEVICE, requires_grad=fan_in > 1)
    grad = torch.ones_like(layer.to(DEVICE)(x))  # tables are made
    launches = Launches()
    for name in ("_rows_in", "_rows_out", "_blank_scales", "_taps_forward", "_taps_backward"):
        monkeypatch.setattr(kernels, f"{name}_kernel", Stub(name, launches.names))
    with launches:
        y = layer(x)
        forward = list(launches.names)
        launches.names.clear()
        y.backward(grad)
    assert len(forward) <= 8, forward
    assert len(launches.names) <= 8, launches.names


def test_transforms_of_filters_are_made_once_for_both_passes_if_they_are_small(monkeypatch):
    layer = ScaleSteerableConv2d(6, 5, padding=3, scales=SCALES, backend="fast", basis="paper").to(DEVICE)
    x, grads, made, make = torch.randn(2, 6, 9, 9, device=DEVICE), [], [], engines.FusedFrequencies._make_transfers
    monkeypatch.setattr(engines.FusedFrequencies, "_make_transfers", lambda self: made.append(1) or make(self))
    for part in (1, 1 << 40):  # of the budget
        monkeypatch.setattr(fast, "MOST_KEPT_SHARE", part)
        image = x.clone().requires_grad_()
        grads.append(torch.autograd.grad(layer(image).square().sum(), (image, layer.coefficients, layer.bias)))
    assert all(map(torch.equal, *grads))
    assert len(made) == 1 + 2


def test_both_passes_look_for_what_shapes_and_basis_decide_once(monkeypatch):
    layer = ScaleSteerableConv2d(6, 5, padding=3, scales=SCALES, backend="fast", basis="paper").to(DEVICE)
    x, looked = torch.randn(2, 6, 9, 9, device=DEVICE, requires_grad=True), []
    find, on_basis = fast._prepared.get_or_make, fast.engine.cached_on
    monkeypatch.setattr(fast._prepared, "get_or_make", lambda *a: looked.append("job") or find(*a))
    monkeypatch.setattr(fast.engine, "cached_on", lambda *a: looked.append("basis") or on_basis(*a))
    layer(x).sum().backward()
    assert looked == ["job", "basis"]


class Kernel:
    """Stands for a kernel and for what Triton compiles of it: notes arguments."""

    def __init__(self, launched):
        self.launched, self.compiled = launched, []

    def __getitem__(self, grid):
        def launch(*args, **blocks):
            self.launched.append((grid, *args[1:], *blocks.items()))
            self.compiled.append(Kernel(self.launched))
            return self.compiled[-1]

        return launch


def test_a_kernel_is_launched_as_compiled_for_such_arguments(monkeypatch):
    monkeypatch.setattr(kernels, "_compiled", Cache())
    launched, x = [], torch.zeros(65)
    kernel, grid, blocks = Kernel(launched), (1, 2, 3), {"BP": 16, "num_warps": 4}
    usual = (x,), (7, 8), (True, "tf32"), blocks
    others = [
        ((x[1:],), *usual[1:]),  # not aligned
        ((x.double(),), *usual[1:]),
        (*usual[:1], (7, 9), *usual[2:]),
        (*usual[:2], (False, "tf32"), blocks),
        (*usual[:3], {"BP": 32, "num_warps": 4}),
        (*usual[:3], {"BP": 16, "num_warps": 8}),
    ]
    for arguments in (usual, *others):
        kernels._launch(kernel, grid, *arguments)
    assert len(kernel.compiled) == 1 + len(others)
    launched.clear()
    for arguments in (usual, *others, ((x[4:],), *usual[1:])):
        kernels._launch(kernel, grid, *arguments)
    assert len(kernel.compiled) == 1 + len(others)
    assert launched[0] == launched[-1] == (grid, 7, 8, True, "tf32", 16)  # as a whole, without names


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("fan_in", [1, 6])
def test_what_is_not_finite_shows(fan_in):
    layer = ScaleSteerableConv2d(fan_in, 2, padding=3, scales=SCALES, backend="fast", basis="paper").to(DEVICE)
    x = torch.randn(1, fan_in, 12, 12, device=DEVICE)
    x[0, 0, 6, 6] = float("inf")
    y, scales = layer(x, return_scales=True)
    assert not y[0, :, 6, 6].isfinite().any()
    assert (scales[0, :, 6, 6] == len(SCALES) - 1).all()  # as in one convolution a scale


@pytest.mark.parametrize("fan_in", [1, 6])
def test_on_a_tie_the_lowest_scale_wins(fan_in):
    layer = ScaleSteerableConv2d(fan_in, 2, padding=3, scales=SCALES, backend="fast", basis="paper").to(DEVICE)
    _, scales = layer(torch.zeros(1, fan_in, 9, 9, device=DEVICE), return_scales=True)
    assert (scales == 0).all()


@pytest.mark.parametrize(
    ("fan_in", "options"),
    [
        (1, {}),
        pytest.param(3, {}, marks=SLOW),
        pytest.param(40, {}, marks=SLOW),
        (6, {"stride": 2, "dilation": 2, "padding": 12}),
        pytest.param(6, {"padding_mode": "circular"}, marks=SLOW),
    ],
)
@pytest.mark.parametrize(("raw", "basis"), [(False, "paper"), (True, ONE_LOBE)])
def test_where_parts_are_blank_winners_and_gradients_are_those_of_direct(fan_in, options, raw, basis):
    layer = ScaleSteerableConv2d(fan_in, 3, **{"scales": SCALES, "padding": 3, "basis": basis, **options}).to(DEVICE)
    x = torch.rand(2, fan_in, 17, 24, device=DEVICE)
    x[..., :15] = 0
    x[1, : fan_in - 1, 9:] = 0  # some channels are blank, not all
    fused, winners = both(layer, x, image_gradient=True, raw=raw, backends=("fast",))[0]
    # On the CPU, because some of cuDNN's algorithms for "direct" leave rounding where windows are blank.
    direct, expected = both(layer.cpu(), x.cpu(), image_gradient=True, raw=raw, backends=("direct",))[0]
    fused, winners = [tensor.cpu() for tensor in fused], winners.cpu()
    blank = direct[0] == 0  # the bias is zero: so is the largest response there
    assert blank.any()
    assert torch.equal(winners[blank], expected[blank])
    assert_same([(direct, expected), (fused, winners)])


@pytest.mark.parametrize("fan_in", [1, 6])
def test_runs_are_bitwise_equal(fan_in):
    layer = ScaleSteerableConv2d(fan_in, 4, padding=3, scales=SCALES, basis="paper").to(DEVICE)
    x = torch.randn(3, fan_in, 10, 11, device=DEVICE)
    (_, (first, _)), (_, (second, _)) = both(layer, x), both(layer, x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@SLOW
def test_pieces_and_tiles_match_direct(monkeypatch):
    layer = ScaleSteerableConv2d(5, 2, 3, padding=1, scales=(1.0, 2.0), basis=ONE_LOBE).to(DEVICE)
    monkeypatch.setattr(fast, "memory_budget", 1)  # one image or tile at a time
    assert_same(both(layer, torch.randn(1, 5, 84, 10, device=DEVICE), image_gradient=True))


@pytest.mark.parametrize("fan_in", [1, 6])
def test_an_empty_batch_gives_an_empty_result(fan_in):
    layer = ScaleSteerableConv2d(fan_in, 2, padding=3, scales=SCALES, backend="fast", basis="paper").to(DEVICE)
    y = layer(torch.zeros(0, fan_in, 9, 9, device=DEVICE))
    y.sum().backward()
    assert y.shape == (0, 2, 9, 9)
    assert (layer.coefficients.grad == 0).all()


@both_symmetries
def test_few_sums_at_a_time_match_direct(basis, monkeypatch):
    layer = ScaleSteerableConv2d(1, 3, padding=3, scales=SCALES, basis=basis).to(DEVICE)
    monkeypatch.setattr(fast, "memory_budget", 1)
    monkeypatch.setattr(fast, "images_per_piece", lambda images, *_: images)  # one piece, but one image's sums
    assert_same(both(layer, torch.randn(3, 1, 10, 11, device=DEVICE)))


@pytest.mark.parametrize("fan_in", [1, 6])
def test_a_basis_may_be_learned(fan_in):
    layer = ScaleSteerableConv2d(fan_in, 2, padding=3, scales=SCALES, basis="paper").to(DEVICE)
    layer.steered_basis.requires_grad_()
    # A point-symmetric image: the fast path gives a tap and its mirror image their mean gradient.
    x, grads = torch.randn(1, fan_in, 9, 9, device=DEVICE), []
    x = x + x.flip(2, 3)
    for layer.backend in ("direct", "fast"):
        layer.steered_basis.grad = None
        layer(x).sum().backward()
        grads.append(layer.steered_basis.grad)
    assert torch.allclose(*grads, rtol=1e-3, atol=1e-4 * float(grads[0].abs().max()))


def test_sizes_may_come_in_any_order():
    layer = ScaleSteerableConv2d(1, 3, padding=3, scales=(1.0, 2.0), basis="paper").to(DEVICE)
    x, windows = torch.randn(1, 1, 16, 16, device=DEVICE), layer.filters()[::-1]
    filters = Filters(torch.cat([w.flatten(2) for w in windows], dim=2), None, layer.sizes[::-1])
    expected, found = (scale_conv2d(x, filters, None, layer.geometry, backend=b) for b in ("direct", "fast"))
    assert torch.allclose(expected, found, atol=1e-5)


def test_torchs_defaults_do_not_matter(request, monkeypatch):
    monkeypatch.setattr(fast, "_prepared", Cache())
    layer = ScaleSteerableConv2d(1, 2, padding=3, scales=SCALES, backend="fast", basis="paper").to(DEVICE)
    x = torch.randn(1, 1, 9, 9, device=DEVICE)
    torch.set_default_dtype(torch.float64)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    assert layer(x).dtype == torch.float32


def test_second_derivative_matches_direct():
    layer = ScaleSteerableConv2d(1, 2, padding=3, scales=SCALES, basis="paper").to(DEVICE)
    x = torch.randn(1, 1, 9, 9, device=DEVICE)
    results = []
    for backend in ("direct", "fast"):
        y = scale_conv2d(x, layer._stored_filters(), None, layer.geometry, backend=backend)
        (first,) = torch.autograd.grad(y.square().sum(), layer.coefficients, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), layer.coefficients)[0])
    assert torch.allclose(*results, rtol=1e-3, atol=1e-3 * float(results[0].abs().max()))


def test_a_changed_basis_is_noticed():
    layer = ScaleSteerableConv2d(6, 2, padding=3, scales=SCALES, backend="fast", basis="paper").to(DEVICE)
    x = torch.randn(1, 6, 9, 9, device=DEVICE)
    before = layer(x)
    layer.steered_basis *= 2
    assert torch.allclose(layer(x), 2 * before, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("allow", [False, True])
@both_symmetries
def test_precision_follows_torch(allow, basis, request):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow
    request.addfinalizer(lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", before))
    for fan_in, size in ((1, 56), (30, 28)):
        layer = ScaleSteerableConv2d(fan_in, 30, padding=3, basis=basis, backend="fast").to(DEVICE)
        x = torch.randn(8, fan_in, size, size, device=DEVICE)
        taps = layer._stored_filters().finished().weights.double()
        filters = Filters(taps, None, layer.sizes)
        exact = scale_conv2d(x.double(), filters, layer.bias.double(), layer.geometry, backend="direct")
        error = torch.linalg.vector_norm(layer(x) - exact) / torch.linalg.vector_norm(exact)
        assert 1e-5 < error < 1e-2 if allow else error < 1e-5


@pytest.mark.gpu
@both_symmetries
def test_a_step_in_a_cuda_graph_matches_the_step_itself(basis):
    first, second = (ScaleSteerableConv2d(channels, 8, padding=3, basis=basis) for channels in (1, 8))
    layer = torch.nn.Sequential(first, torch.nn.ReLU(), second).to(DEVICE)
    x = torch.randn(4, 1, 28, 28, device=DEVICE)

    def step():
        layer.zero_grad()
        layer(x).square().mean().backward()
        return [p.grad for p in layer.parameters()]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    expected = [g.clone() for g in step()]
    layer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("channels", [1, 8])  # pixels, frequencies
def test_finished_filters_that_change_in_inference_mode_are_seen(channels):
    with torch.inference_mode():
        layer, other = (
            fold(ScaleSteerableConv2d(channels, 2, scales=SCALES, backend="fast").to(DEVICE)) for _ in range(2)
        )
        x = torch.randn(1, channels, 12, 12, device=DEVICE)
        layer(x)
        layer.load_state_dict(other.state_dict())
        ours = layer(x)
        layer.backend = "direct"
        torch.testing.assert_close(ours, layer(x), rtol=1e-4, atol=1e-4)
