"""Which form suits a layer, and the operators that compilers see.

Pieces, tiles and gradients are tested with the algorithm itself in test_spectral.py.
"""

import copy
import itertools
import sys
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from scalesteer import ScaleSteerableConv2d, fast, fold
from scalesteer.fast import choice, spectral
from scalesteer.fast.pieces import THREADED_FROM, images_per_piece, shared_step
from scalesteer.geometry import Filters, Geometry

# One engine for few channels, one for many; filters with and without point symmetry; an image that is cut into tiles.
CASES = {
    "few channels": (1, (12, 13), {"basis": "paper"}),
    "many channels": (3, (12, 13), {"basis": "paper"}),
    "one lobe, stride": (3, (12, 13), {"basis": "smooth", "stride": 2}),
    "groups, reflected": (4, (12, 13), {"basis": "paper", "groups": 2, "padding_mode": "reflect"}),
    "tiles": (3, (12, 90), {"basis": "paper"}),
}
all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _compile_anew():
    torch._dynamo.reset()  # programs of all layers together count towards a limit


def build(case, backend="fast"):
    channels, size, options = case
    layer = ScaleSteerableConv2d(channels, 4, 5, padding=2, scales=(1.0, 2.6), backend=backend, **options)
    return layer, torch.randn(2, channels, *size)


def operators(graph):
    return [node.target.name() for node in graph.graph.nodes if "scalesteer" in str(node.target)]


def capturing(forward, backward):
    """A compiler that changes nothing and notes our operators."""

    def look(found):
        return lambda graph, _: found.append(operators(graph)) or make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=look(forward), bw_compiler=look(backward))


def run(layer, x):
    image = x.clone().requires_grad_()
    torch._dynamo.mark_dynamic(image, 0)  # a compiler must not fix the batch size
    out, winner = layer(image, return_scales=True)
    return out.detach(), winner, *torch.autograd.grad(out.square().sum(), (image, layer.coefficients, layer.bias))


def choose_backend(sizes, stride=1, training=True):
    filters = Filters(torch.empty(8, 3, 0, requires_grad=training), None, tuple(sizes))
    return fast.choose_backend(Geometry(3, stride=(stride, stride)).axes(64, 64, filters.sizes), filters)


@pytest.mark.parametrize("training", [True, False])
def test_auto_counts_the_taps_of_all_scales(training):
    assert choose_backend((3, 3, 5, 7), training=training) == "direct"  # 92
    assert choose_backend((7,), training=training) == "direct"
    assert choose_backend((3, 11), training=training) == "fast"  # 130
    assert choose_backend(range(7, 18, 2), training=training) == "fast"
    assert choose_backend(range(7, 18, 2), stride=2, training=training) == "fast"
    assert choose_backend(range(7, 18, 2), stride=4, training=training) == "direct"  # 934 / 16


def test_auto_needs_fewer_taps_in_training():
    sizes = (3, 3, 3, 5, 7)  # 101
    assert choose_backend(sizes) == "fast"
    assert choose_backend(sizes, training=False) == "direct"
    with torch.no_grad():
        assert choose_backend(sizes) == "direct"


@pytest.mark.parametrize(
    ("images", "sizes", "channels", "in_training", "without_gradients"),
    [
        (4, (7, 9, 13, 15), 3, "direct", "direct"),
        (4, (7, 9, 13, 15), 6, "fast", "direct"),
        (4, (7, 9, 13, 15), 12, "fast", "fast"),
        (4, (13,), 1, "fast", "fast"),
        (3, (13,), 64, "direct", "direct"),
    ],
)
def test_auto_transforms_responses_back_for_several_images_and_channels(
    images, sizes, channels, in_training, without_gradients
):
    filters = Filters(torch.empty(8, channels, 0, requires_grad=True), None, sizes)
    axes = Geometry(channels).axes(64, 64, filters.sizes)
    assert fast.choose_backend(axes, filters) == "fast"
    assert fast.choose_backend(axes, filters, images) == in_training
    with torch.no_grad():
        assert fast.choose_backend(axes, filters, images) == without_gradients


def test_the_reference_has_the_numbers_of_the_rule():
    text = " ".join(fast.__doc__.split())
    numbers = choice.LEAST_TAPS_TRAINING, choice.LEAST_TAPS, choice.LEAST_TAPS_CUDA
    assert "from {} taps on in training, {} in inference, {} on CUDA".format(*numbers) in text
    more = choice.LEAST_IMAGES, choice.LEAST_CHANNELS_TRAINING, choice.LEAST_CHANNELS
    said = "also need {} images, and those of several scales need {} input channels in training, {} in inference"
    assert said.format(*more) in text


def test_pieces_are_of_about_one_size_and_never_too_large():
    for images in (1, 7, 64, 129):
        for most in (0, 1, 5, 64, 1000):
            step = images_per_piece(images, most, threads=1)
            pieces = -(-images // step)
            assert 1 <= step <= max(1, most)
            assert pieces == -(-images // max(1, min(images, most)))
            assert step == -(-images // pieces)
            for threads in (2, 3):
                shared = images_per_piece(images, most, threads)
                assert 1 <= shared <= max(1, most)
                assert abs(shared - step) < threads
                assert shared % threads == 0 or shared == step < threads


def test_pieces_of_taps_are_shared_by_threads_or_stay_in_the_cache():
    for images, pixels, threads in itertools.product((1, 7, 50, 64, 129), (256, 784, 1024, 3136, 40000), (1, 2, 3)):
        step = shared_step(images, pixels, threads)
        if step == 0:  # then all images together are too few, or threads cannot have as many each
            assert threads == 1 or images * pixels < 2 * THREADED_FROM
            continue
        pieces = [min(step, images - i) for i in range(0, images, step)]
        assert step % threads == 0
        assert all(piece * pixels > THREADED_FROM for piece in pieces)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in forward AD and the tracer
def test_transformations_that_need_plain_operations_are_noticed():
    """The names of torch that tell are private: a new version of torch may change them."""
    found = []

    def look(x):
        found.append(fast.being_traced())
        return x.sum()

    x = torch.ones(2)
    look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x[None])
    torch.func.jvp(look, (x,), (x,))
    torch.jit.trace(look, x, check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        look(x)
    assert found[0] is False
    assert all(found[1:])
    torch.compile(lambda x: x + fast.being_traced(), backend="eager", fullgraph=True)(x)


def test_the_engine_that_suits_a_layer():
    def engine(channels, device="cpu", groups=1, size=3, symmetric=True):
        filters = Filters(torch.empty(1, channels, size**2), None, (size,), symmetric)
        return choice.pick_engine(torch.empty(1, channels * groups, 5, 5, device=device), filters, groups)

    assert engine(2) is choice.Taps
    assert engine(3) is choice.Frequencies
    assert engine(1, groups=4) is choice.Frequencies
    assert engine(1, "meta") is choice.Frequencies
    assert engine(2, size=17) is choice.Taps
    assert engine(1, size=17, symmetric=False) is choice.Taps
    assert engine(2, size=17, symmetric=False) is choice.Frequencies


@all_cases
def test_operators_keep_torchs_rules(case):
    layer, x = build(case)
    filters = layer._stored_filters()
    axes = layer.geometry.axes(*x.shape[2:], filters.sizes)
    numbers = fast._Correlation(filters.sizes, filters.symmetric, axes, layer.groups, True).numbers()
    images, weights = x.requires_grad_(), filters.weights.detach().requires_grad_()
    forward = torch.ops.scalesteer.max_over_scales.default
    bias = layer.bias.detach().requires_grad_()
    torch.library.opcheck(forward, (images, weights, filters.basis, bias, *numbers, True))
    torch.library.opcheck(forward, (images, weights, filters.basis, None, *numbers, True))
    torch.library.opcheck(forward, (x.detach(), weights.detach(), filters.basis, bias.detach(), *numbers, False))
    inputs = x.detach(), weights.detach(), filters.basis
    best, winner = forward(*inputs, None, *numbers, True)
    backward = torch.ops.scalesteer.max_over_scales_backward.default
    for needs in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(backward, (best, *inputs, winner, *numbers, *needs))


@all_cases
def test_compiled_programs_contain_the_fast_path_with_any_batch(case):
    forward, backward = [], []
    layer, x = build(case)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=capturing(forward, backward), dynamic=False)
    for images in (x, torch.randn(5, *x.shape[1:])):
        for first, second in zip(run(layer, images), run(compiled, images), strict=True):
            assert torch.equal(first, second)
    assert forward == [["scalesteer::max_over_scales"]]
    assert backward == [["scalesteer::max_over_scales_backward"]]


def test_compiled_programs_have_any_height_and_width():
    forward = []
    layer, _ = build(CASES["many channels"], backend="auto")
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=capturing(forward, []), dynamic=True)
    for height, width in ((12, 13), (17, 14), (30, 90)):
        image = torch.randn(16, 3, height, width)  # the choice for a compiler, which does not know the batch
        assert torch.equal(compiled(image), layer(image))
    assert len(forward) == 2  # one more for tiles
    assert all(forward)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("kernels", [False, True])  # images are of half precision where kernels run
def test_compiled_inference_under_autocast(folded, kernels, monkeypatch):
    if kernels:
        pytest.importorskip("triton")
        monkeypatch.setattr(choice, "KERNELS_RUN_ON", {"cuda", "cpu"})
    layer, x = build(CASES["many channels"])
    layer = fold(layer) if folded else layer
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for enabled in (True, False):
            with torch.autocast("cpu", torch.float16, enabled=enabled):  # interpreted kernels cannot add bfloat16
                expected, found = layer(x), compiled(x)
            assert found.dtype == expected.dtype == (torch.float16 if enabled else torch.float32)
            assert torch.equal(found, expected)


def test_gradients_under_autocast_compiled_and_of_second_order(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(choice, "KERNELS_RUN_ON", {"cuda", "cpu"})
    layer, x = build(CASES["many channels"])
    found = []
    for module, create_graph in ((layer, False), (torch.compile(layer, backend="aot_eager"), False), (layer, True)):
        with torch.autocast("cpu", torch.float16):  # interpreted kernels cannot add bfloat16
            out = module(x.requires_grad_())
        grads = torch.autograd.grad(out.float().square().mean(), (x, layer.coefficients), create_graph=create_graph)
        assert grads[0].dtype == grads[1].dtype == torch.float32
        found.append(grads)
    for exact, compiled, plain in zip(*found, strict=True):
        assert torch.equal(compiled, exact)
        assert (plain - exact).norm() <= 0.02 * exact.norm()
    assert torch.autograd.grad(found[2][1].square().sum(), x)[0].isfinite().all()


def test_a_compiled_program_finds_the_tables_of_its_basis(monkeypatch):
    made, make = [], spectral.basis_parts
    monkeypatch.setattr(spectral, "basis_parts", lambda *a: made.append(1) or make(*a))
    layer, x = build(CASES["many channels"])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        run(compiled, x)
    run(layer, x)
    assert len(made) == 1
    layer.steered_basis *= 2
    assert torch.equal(run(compiled, x)[0], run(layer, x)[0])
    assert len(made) == 2


def test_what_an_engine_keeps_comes_back_to_the_same_engine(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(choice, "KERNELS_RUN_ON", {"cuda", "cpu"})
    layer, x = build(CASES["few channels"])
    out = layer(x.requires_grad_())  # another engine than without the image's gradient, which now nobody asks for
    (found,) = torch.autograd.grad(out.square().sum(), layer.coefficients, retain_graph=True)
    monkeypatch.setattr(fast, "memory_budget", 1)  # other pieces
    expected = torch.autograd.grad(out.square().sum(), (layer.coefficients, x))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    layer.backend = "direct"
    (expected,) = torch.autograd.grad(layer(x).square().sum(), layer.coefficients)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_kernels_run_in_compiled_programs(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(choice, "KERNELS_RUN_ON", {"cuda", "cpu"})
    for name in ("few channels", "one lobe, stride"):
        layer, x = build(CASES[name])
        compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
        for image in (x, x.clone().requires_grad_()):
            first, second = layer(image), compiled(image)
            assert torch.equal(first, second)
            wanted = [image] if image.requires_grad else []
            expected = torch.autograd.grad(first.square().sum(), [layer.coefficients, *wanted])
            found = torch.autograd.grad(second.square().sum(), [compiled.coefficients, *wanted])
            assert all(map(torch.equal, expected, found))


def test_torch_func_inside_a_compiled_function_sees_plain_operations():
    layer, x = build(CASES["many channels"])
    function = torch.func.vmap(torch.func.grad(lambda x: layer(x[None]).square().sum()))
    found = torch.compile(lambda x: function(x), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, function(x))


@pytest.mark.parametrize(("backend", "named"), [("fast", True), ("auto", False)])
def test_exported_programs_contain_the_operator_where_it_is_asked_for_by_name(backend, named):
    layer, x = build(CASES["many channels"], backend)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert operators(program) == ["scalesteer::max_over_scales"] * named
    x = torch.randn(3, *x.shape[1:])
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-5)


def test_one_forward_pass_stays_in_few_files():
    """Who reads a pass of the default layer need not change file for each block of frequencies."""
    layer, x, files = ScaleSteerableConv2d(16, 16, 7, padding=3), torch.randn(4, 16, 64, 64), []
    layer(x)  # what is kept is there
    source = str(Path(fast.__file__).parents[1])

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(source):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    assert len(set(files)) > 5
    assert sum(a != b for a, b in itertools.pairwise(files)) <= 150


@pytest.mark.parametrize("backend", ["direct", "fast"])
def test_a_bias_may_be_all_that_is_learned(backend):
    layer, x = build(CASES["many channels"], backend)
    layer.coefficients.requires_grad_(False)
    (found,) = torch.autograd.grad(layer(x).square().sum(), layer.bias)
    torch.testing.assert_close(found, 2 * layer(x).sum((0, 2, 3)).detach(), rtol=1e-4, atol=1e-3)
