"""What is particular to the fast algorithm: few channels, tiles, pieces, caches. test_functional has the agreement."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from scalesteer import LogRadialBasis, ScaleSteerableConv2d, fold
from scalesteer import fast as fast_path
from scalesteer.fast import memory, spectral, taps, transforms
from scalesteer.functional import PADDING_MODES, scale_conv2d
from scalesteer.geometry import Filters, Geometry

SCALES = (0.6, 1.0, 1.8)
# One lobe, so that filters are not point-symmetric; two orientations are opposite, one has no mirror image.
ONE_LOBE = LogRadialBasis(orientations=(0.3, 0.3 + math.pi, 2.0), sigma=0.6, lobes="single")
both_symmetries = pytest.mark.parametrize("basis", ["paper", ONE_LOBE], ids=["symmetric", "one lobe"])


def pair(in_channels, **arguments):
    """The same layer with both backends."""
    torch.manual_seed(2)
    arguments = {
        "kernel_size": 5,
        "scales": SCALES,
        "padding": 2,
        "dtype": torch.float64,
        "basis": "paper",
        **arguments,
    }
    direct = ScaleSteerableConv2d(in_channels, 4, backend="direct", **arguments)
    torch.nn.init.normal_(direct.coefficients)
    fast = copy.deepcopy(direct)
    fast.backend = "fast"
    return direct, fast


def works_with_basis(layer):
    return fast_path.works_with_basis(spectral.Frequencies, layer._stored_filters())


def joined(windows, symmetric=True):
    """Filters that are given as windows, side by side."""
    taps, sizes = torch.cat([w.flatten(2) for w in windows], dim=2), tuple(w.shape[-1] for w in windows)
    return Filters(taps, None, sizes, symmetric)


def check(direct, fast, x, tolerance=1e-10):
    """Equal outputs, winners, and gradients of image and coefficients."""
    results = []
    for layer in (direct, fast):
        image = x.clone().requires_grad_()
        out, winner = layer(image, return_scales=True)
        layer.zero_grad()
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append((out.detach(), image.grad, layer.coefficients.grad, layer.bias.grad, winner.to(out.dtype)))
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize("channels", [1, 2])
@both_symmetries
def test_few_channels_equal_direct(mode, channels, basis):
    for stride, dilation, padding in itertools.product((1, 2), (1, 2), (0, 2, (4, 1))):
        direct, fast = pair(channels, stride=stride, dilation=dilation, padding=padding, padding_mode=mode, basis=basis)
        check(direct, fast, torch.randn(2, channels, 14, 17, dtype=torch.float64))


@pytest.mark.parametrize("channels", [1, 3])
@both_symmetries
def test_gradients_of_every_kind_pass_gradcheck_and_gradgradcheck(channels, basis):
    layer = ScaleSteerableConv2d(
        channels, 2, 3, padding=1, scales=(1.0, 5 / 3), basis=basis, dtype=torch.float64, backend="fast", bias=False
    )
    x = torch.randn(1, channels, 4, 5, dtype=torch.float64, requires_grad=True)
    coefficients = torch.randn_like(layer.coefficients, requires_grad=True)

    def apply(x, coefficients):
        return torch.func.functional_call(layer, {"coefficients": coefficients}, (x,))

    assert torch.autograd.gradcheck(apply, (x, coefficients))
    assert torch.autograd.gradgradcheck(apply, (x, coefficients))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("stride", "padding", "mode"), [(1, "same", "zeros"), (2, 0, "zeros"), (1, 5, "reflect")])
@both_symmetries
def test_large_images_are_cut_into_tiles_with_the_same_result(channels, stride, padding, mode, basis):
    direct, fast = pair(channels, stride=stride, padding=padding, padding_mode=mode, basis=basis)
    check(direct, fast, torch.randn(2, channels, 101 * stride, 41, dtype=torch.float64))


@pytest.mark.parametrize("budget", [200_000, 20_000])  # with and without room for the transforms of all filters
@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (3, 1), (4, 2)])
@both_symmetries
def test_small_memory_budget_gives_the_same_result(channels, groups, budget, basis, monkeypatch):
    direct, fast = pair(channels, groups=groups, basis=basis)
    shown = []
    kind = taps.Taps if channels == 1 else spectral.Frequencies
    original = kind.load_batch
    monkeypatch.setattr(kind, "load_batch", lambda self, x, *kept: shown.append(len(x)) or original(self, x, *kept))
    monkeypatch.setattr(fast_path, "memory_budget", budget)
    check(direct, fast, torch.randn(7, channels, 16, 16, dtype=torch.float64))
    assert len(shown) > 2
    assert sum(shown) == 2 * 7  # forward and backward


@pytest.mark.parametrize("budget", [1 << 30, 1 << 22, 1 << 18])  # one piece; several; and no room for transforms
@pytest.mark.parametrize(("groups", "mode", "dtype"), [(1, "zeros", torch.float64), (2, "reflect", torch.float32)])
@both_symmetries
def test_coefficients_in_place_of_filters_give_the_same_result(groups, mode, dtype, budget, basis, monkeypatch):
    options = {"kernel_size": 7, "scales": tuple(1 + i / 3.5 for i in range(6)), "padding": 3, "basis": basis}
    direct, fast = pair(4, groups=groups, padding_mode=mode, dtype=dtype, **options)
    monkeypatch.setattr(fast_path, "memory_budget", budget)
    x = torch.randn(5, 4, 12, 13, dtype=torch.float64).to(dtype)
    assert works_with_basis(fast)
    if dtype == torch.float64:
        check(direct, fast, x)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), direct(x), rtol=1e-4, atol=1e-3)


def test_coefficients_in_place_of_filters_can_be_differentiated_twice():
    layer = ScaleSteerableConv2d(
        3, 2, padding=3, scales=(1.0, 1.5, 2.0), dtype=torch.float64, backend="fast", bias=False, basis="paper"
    )
    x = torch.randn(1, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    assert works_with_basis(layer)
    part = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)  # one function of the basis, for speed

    def apply(x, part):
        coefficients = torch.nn.functional.pad(part[..., None, None, None], (0, 1, 0, 7, 0, 2)).contiguous()
        return torch.func.functional_call(layer, {"coefficients": coefficients}, (x,))

    assert layer.coefficients.shape[2:] == (3, 8, 2)
    assert torch.autograd.gradcheck(apply, (x, part))
    assert torch.autograd.gradgradcheck(apply, (x, part))


@both_symmetries
def test_transforms_of_a_basis_follow_its_changes(basis):
    direct, fast = (ScaleSteerableConv2d(3, 2, padding=3, basis=basis, backend=b) for b in ("direct", "fast"))
    fast.load_state_dict(direct.state_dict())
    x = torch.randn(1, 3, 12, 12)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fast(torch.randn(1, 3, 12, 12))
    torch.testing.assert_close(fast(x), direct(x), rtol=1e-4, atol=1e-4)
    for layer in (direct, fast):
        layer.steered_basis *= 2
    torch.testing.assert_close(fast(x), direct(x), rtol=1e-4, atol=1e-4)
    assert fast(x.double().float()).equal(fast(x))


def test_1024_by_1024_image_is_right():
    direct, fast = pair(1, dtype=torch.float32, scales=(1.0, 1.8))
    x = torch.randn(1, 1, 1024, 1024)
    with torch.no_grad():
        expected, actual = direct(x), fast(x)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_plans_are_shared_between_layers_and_not_in_their_state(monkeypatch):
    monkeypatch.setattr(transforms, "_plans", memory.Cache(64))
    _, fast = pair(3)
    size = len(copy.deepcopy(fast).state_dict())
    fast(torch.randn(1, 3, 12, 12, dtype=torch.float64))
    pair(3)[1](torch.randn(2, 3, 12, 12, dtype=torch.float64))
    assert len(transforms._plans.values) == 1
    assert len(fast.state_dict()) == size
    for height in range(12, 100):
        fast(torch.randn(1, 3, height, 12, dtype=torch.float64))
    assert len(transforms._plans.values) <= 64


def test_tracing_leaves_no_plan_without_numbers_behind(monkeypatch):
    monkeypatch.setattr(transforms, "_plans", memory.Cache(64))
    _, fast = pair(3)
    torch.export.export(fast, (torch.randn(2, 3, 12, 12, dtype=torch.float64),))
    assert len(transforms._plans.values) == 0


def test_running_maximum_stores_one_map_for_backward_not_one_a_scale():
    layer = ScaleSteerableConv2d(
        8, 8, padding=3, scales=tuple(1 + i / 8 for i in range(12)), backend="fast", basis="paper"
    )
    x = torch.randn(2, 8, 20, 20)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        layer(x)
    maps = 2 * 8 * 20 * 20
    filters = sum(f.numel() for f in layer.filters())
    assert sum(saved) <= 2 * maps + 2 * filters + 12 * layer.coefficients.numel()


@pytest.mark.parametrize("reduce", ["max", None])
def test_inference_mode_leaves_nothing_behind_that_training_cannot_use(reduce, monkeypatch):
    monkeypatch.setattr(transforms, "_plans", memory.Cache(64))
    _, fast = pair(3, reduce=reduce)
    x = torch.randn(1, 3, 12, 12, dtype=torch.float64)
    with torch.inference_mode():
        fast(x)
    (grad,) = torch.autograd.grad(fast(x).square().sum(), fast.coefficients, create_graph=True)
    grad.sum().backward()
    assert fast.coefficients.grad.isfinite().all()


@pytest.mark.parametrize(("channels", "out", "batch"), [(1, 4, 2), (3, 1, 1), (3, 4, 2)])
def test_output_can_be_changed_in_place(channels, out, batch):
    layer = ScaleSteerableConv2d(
        channels, out, 3, padding=1, bias=False, scales=(1.0, 5 / 3), backend="fast", basis="paper"
    )
    torch.nn.functional.relu(layer(torch.randn(batch, channels, 9, 9)), inplace=True).sum().backward()
    assert layer.coefficients.grad.isfinite().all()


def test_second_derivatives_do_not_follow_an_image_that_depends_on_the_filters():
    direct, _ = pair(4)
    geometry, grads = Geometry(5, padding=(2, 2)), []
    x = torch.randn(1, 4, 9, 9, dtype=torch.float64)
    for backend in ("direct", "fast"):
        filters = [f.detach().requires_grad_() for f in direct.filters()]
        symmetric = [(f + f.flip(-1, -2)) / 2 for f in filters]
        once = scale_conv2d(x, joined(symmetric), None, geometry, backend=backend)
        twice = scale_conv2d(once, joined(symmetric), None, geometry, backend=backend)
        grads.append(torch.autograd.grad(twice.square().sum(), filters, create_graph=True))
    for expected, actual in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("channels", [1, 2, 4])
@both_symmetries
def test_gradients_of_finished_filters_are_those_of_direct(channels, basis):
    direct, _ = pair(channels, basis=basis)
    symmetric, grads = direct.basis.point_symmetric, []
    x = torch.randn(1, channels, 9, 9, dtype=torch.float64)
    for backend in ("direct", "fast"):
        filters = [f.detach().requires_grad_() for f in direct.filters()]
        geometry = Geometry(5, padding=(2, 2))
        scale_conv2d(x, joined(filters, symmetric), None, geometry, backend=backend).square().sum().backward()
        # A tap and its mirror image are one if filters are symmetric: they share the gradient.
        share = symmetric and backend == "direct"
        grads.append([(f.grad + f.grad.flip(-1, -2)) / 2 if share else f.grad for f in filters])
    for expected, actual in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward AD
@pytest.mark.parametrize("channels", [1, 3])
@both_symmetries
def test_torch_func_and_forward_derivatives_equal_those_of_direct(channels, basis):
    direct, fast = pair(channels, basis=basis)
    x, v = torch.randn(2, 2, channels, 8, 8, dtype=torch.float64)
    results = []
    for layer in (direct, fast):
        parameters = dict(layer.named_parameters())

        def loss(parameters, image, layer=layer):
            return torch.func.functional_call(layer, parameters, (image[None],)).square().sum()

        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        _, tangent = torch.func.jvp(layer, (x,), (v,))
        with torch.autograd.forward_ad.dual_level():
            dual = layer(torch.autograd.forward_ad.make_dual(x, v))
            forward = torch.autograd.forward_ad.unpack_dual(dual).tangent
        jacobian = torch.func.jacrev(lambda x, layer=layer: layer(x).sum((1, 2, 3)))(x)
        results.append((each["coefficients"], tangent, forward, jacobian))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("channels", [1, 4])
def test_backward_under_autocast_works_in_float32(channels):
    grads = []
    for inside in (False, True):
        layer = ScaleSteerableConv2d(channels, 4, padding=3, backend="fast", scales=(1.0, 2.0), basis="paper")
        torch.nn.init.ones_(layer.coefficients)
        x = torch.randn(2, channels, 12, 12, generator=torch.Generator().manual_seed(0))
        filters, axes = layer._stored_filters().finished(), layer.geometry.axes(12, 12, layer.sizes)
        best, _ = fast_path.max_over_scales(x, filters, None, axes, 1)
        del layer
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            grads.append(torch.autograd.grad(best.square().sum(), filters.weights))
    for expected, actual in zip(*grads, strict=True):
        assert torch.equal(actual, expected)


def test_autocast_leaves_float64_alone():
    _, fast = pair(3)
    x = torch.randn(1, 3, 9, 9, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(x).dtype == torch.float64
        with pytest.raises(TypeError, match=r"input is torch.float64 but the layer is torch.float32"):
            ScaleSteerableConv2d(3, 4, padding=3, basis="paper")(x)


@pytest.mark.parametrize("backend", ["direct", "fast"])
def test_meta_and_fake_tensors_pass_through_whatever_came_before(backend):
    layer = ScaleSteerableConv2d(3, 4, padding=3, backend=backend, basis="paper")
    layer(torch.randn(2, 3, 12, 12))
    meta = ScaleSteerableConv2d(3, 4, padding=3, backend=backend, device="meta", basis="paper")
    assert meta(torch.randn(2, 3, 12, 12, device="meta")).shape == (2, 4, 12, 12)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(torch.randn(2, 3, 12, 12)).shape == (2, 4, 12, 12)
    assert layer(torch.randn(2, 3, 12, 12)).isfinite().all()


@pytest.mark.parametrize("channels", [1, 3])
def test_ties_go_to_the_lowest_scale_with_the_gradient_of_direct(channels):
    direct, fast = pair(channels)
    for layer in (direct, fast):
        torch.nn.init.zeros_(layer.coefficients)
    x = torch.randn(1, channels, 9, 9, dtype=torch.float64)
    assert not fast(x, return_scales=True)[1].any()
    check(direct, fast, x)


@pytest.mark.parametrize("channels", [1, 4])
def test_a_half_precision_layer_can_be_differentiated_twice(channels):
    layer = ScaleSteerableConv2d(
        channels, 2, padding=3, scales=(1.0, 2.0), dtype=torch.bfloat16, backend="fast", basis="paper"
    )
    x = torch.randn(1, channels, 9, 9, dtype=torch.bfloat16, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)
    first.float().square().sum().backward()
    assert layer.coefficients.grad.isfinite().all()


def test_a_basis_that_changes_at_every_step_is_not_kept():
    layer = ScaleSteerableConv2d(4, 2, padding=3, backend="fast", basis="paper")
    x = torch.randn(1, 4, 20, 20)
    before = layer(x)
    for _ in range(5):
        layer.steered_basis.copy_(layer.steered_basis.clone())  # as DistributedDataParallel does
        torch.testing.assert_close(layer(x), before)
    _, kept = memory._tables[layer.steered_basis]
    assert len(kept.values) == 1


def test_tables_of_a_basis_are_not_kept_for_every_size_of_image(monkeypatch):
    layer = ScaleSteerableConv2d(4, 2, padding=3, backend="fast", basis="paper")
    monkeypatch.setattr(memory, "TABLES_BYTES", 1 << 21)
    counts = []
    for size in range(12, 44):
        layer(torch.randn(1, 4, size, 12))
        kept = memory._tables[layer.steered_basis][1]
        assert 0 < kept.bytes <= 1 << 21
        assert any(axis.length == size for axis in list(kept.values)[-1][1])  # that of the last image
        counts.append(len(kept.values))
    assert max(counts) > 2
    kept.most_bytes = 1
    for size in (50, 51, 50):
        layer(torch.randn(1, 4, size, 12))
    assert len(kept.values) == 2  # used in turn


@both_symmetries
def test_transforms_of_a_basis_are_made_in_float64(basis):
    layer = ScaleSteerableConv2d(3, 2, padding=3, basis=basis)
    filters = layer._stored_filters()
    axes = layer.geometry.axes(20, 21, layer.sizes)
    exact = replace(filters, basis=filters.basis.double())
    parts = zip(
        transforms.basis_parts(filters, axes, torch.empty(0)),
        transforms.basis_parts(exact, axes, torch.empty(0, dtype=torch.float64)),
        strict=True,
    )
    for found, expected in parts:
        for table, other in zip(found.tables, expected.tables, strict=True):
            assert torch.equal(table, other.float())


def test_functions_that_are_mirror_images_share_their_parts():
    def mixes(*functions):
        basis = torch.tensor(functions, dtype=torch.float32)
        filters = Filters(torch.zeros(1, 1, len(basis)), basis, (1, 3), symmetric=False)
        return [mix.T.tolist() for mix in transforms.parity_mixes(filters)]

    lobe, opposite = [1, 0, 0, 0, 2, 3, 4, 5, 6, 0], [1, 0, 6, 5, 4, 3, 2, 0, 0, 0]
    even, alone, zero = [7, 1, 2, 3, 4, 5, 4, 3, 2, 1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1], [0] * 10
    even_mix, odd_mix = mixes(lobe, even, opposite, alone, zero, zero)
    assert even_mix == [
        [1, 0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert odd_mix == [[1, 0, -1, 0, 0, 0], [0, 0, 0, 1, 0, 0]]
    assert mixes(even)[1] == []


def test_half_as_many_functions_serve_the_preset_smooth():
    for dtype in (torch.float32, torch.float64):
        filters = ScaleSteerableConv2d(1, 1, basis="smooth", dtype=dtype)._stored_filters()
        assert [2 * mix.shape[1] for mix in transforms.parity_mixes(filters)] == 2 * [len(filters.basis)]


@both_symmetries
def test_finished_filters_are_transformed_once_for_all_pieces(basis, monkeypatch):
    layer = fold(ScaleSteerableConv2d(4, 2, padding=3, basis=basis, backend="fast"))
    x, calls, original = torch.randn(9, 4, 12, 12), [], spectral.half_filters
    expected = layer(x)
    monkeypatch.setattr(fast_path, "CPU_PIECE", 1)  # one image each
    monkeypatch.setattr(spectral, "half_filters", lambda *a: calls.append(1) or original(*a))
    torch.testing.assert_close(layer(x), expected)
    assert len(calls) == len(layer.sizes) * (1 if layer._stored_filters().symmetric else 2)


@both_symmetries
def test_a_basis_may_be_learned(basis):
    layer = ScaleSteerableConv2d(4, 2, padding=3, basis=basis, backend="fast", dtype=torch.float64)
    layer.steered_basis.requires_grad_()
    x, grads = torch.randn(1, 4, 9, 9, dtype=torch.float64), []
    if layer.basis.point_symmetric:  # an image without direction: a tap and its mirror image share their gradient
        x = torch.ones_like(x)
    for layer.backend in ("direct", "fast"):
        layer.steered_basis.grad = None
        layer(x).sum().backward()
        grads.append(layer.steered_basis.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("channels", [1, 8])  # pixels, frequencies
def test_layers_of_other_shapes_and_dtypes_do_not_disturb_each_other(channels):
    """They share buffers that stay from call to call."""
    torch.manual_seed(0)
    layers = [
        ScaleSteerableConv2d(channels, 4, padding=3, scales=(1.0, 1.5), basis="area", dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    ]
    for size, batch in ((12, 3), (20, 5), (12, 3), (12, 1)):
        for layer in layers:
            x = torch.randn(batch, channels, size, size, dtype=layer.coefficients.dtype, requires_grad=True)
            wanted = {}
            for backend in ("direct", "fast"):
                layer.backend = backend
                y = layer(x)
                wanted[backend] = y, *torch.autograd.grad(y.square().sum(), (x, layer.coefficients))
            for ours, reference in zip(wanted["fast"], wanted["direct"], strict=True):
                torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("channels", [1, 8])  # pixels, frequencies
@pytest.mark.parametrize("change", ["inference", "fused"])
def test_filters_that_change_without_a_word_are_seen(channels, change):
    """The version of an inference tensor stays, and so does that of weights that a fused optimizer changes."""
    with torch.inference_mode(change == "inference"):
        layer, other = (
            fold(ScaleSteerableConv2d(channels, 2, scales=(1.0, 1.5), basis="area", backend="fast")) for _ in range(2)
        )
        x = torch.randn(1, channels, 12, 12)
        layer.taps.requires_grad_(change == "fused")
        for _ in range(3):  # what comes again is kept
            layer(x)
        if change == "inference":
            layer.load_state_dict(other.state_dict())
        else:
            layer.taps.grad = layer.taps.detach() - other.taps
            torch.optim.SGD([layer.taps], lr=1.0, fused=True).step()
        ours = layer(x)
        layer.backend = "direct"
        torch.testing.assert_close(ours, layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [0, 1, 5, 18, 28])
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("size", [1, 1 << 18, 1 << 22])
def test_slices_hold_everything_once_and_stay_small(count, threads, size):
    slices = spectral._slices(count, size, threads << 20, threads)
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(count))
    for s in slices:
        assert (s.stop - s.start) * size <= max(spectral.MOST_SHARED, size)
    if 2 * threads <= count and 2 * threads * size <= spectral.MOST_SHARED:
        assert all((s.stop - s.start) % threads == 0 for s in slices[:-1])


def test_of_a_large_workspace_the_largest_buffers_go(monkeypatch):
    monkeypatch.setattr(memory, "IDLE_BYTES", 1000)
    like = torch.empty(0)
    space = memory.Workspace(like)
    space.buffers, space.views = {}, {}
    for name, floats in (("small", 10), ("large", 300), ("middle", 200)):
        space.buffer(name, floats)
    kept = space.buffers["small"].data_ptr(), space.buffers["middle"].data_ptr()
    del space
    again = memory.Workspace(like)
    assert set(again.buffers) == {"small", "middle"}
    assert kept == (again.buffer("small", 10).data_ptr(), again.buffer("middle", 200).data_ptr())
