"""Scale channels in PyTorch: types, layouts, devices, compilers, export."""

import copy

import pytest
import torch
from torch import nn

from scalesteer import ScaleChannels, fast
from scalesteer.channels import JOINS
from scalesteer.resize import resize
from tests.test_channels import SCALES, Flat


def test_dtypes_follow_the_network():
    x = torch.randn(2, 3, 12, 12)
    model = ScaleChannels(Flat(), SCALES).eval()
    expected, small = model(x), resize(x, (7, 20))
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(x)
        assert torch.equal(resize(x, (7, 20)), small)  # pixels are mixed in full precision
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.05)
    assert copy.deepcopy(model).double()(x.double()).dtype == torch.float64
    maps = ScaleChannels(nn.Conv2d(3, 2, 5), SCALES)
    with torch.autocast("cpu", torch.bfloat16):
        joined, sizes = maps(x, return_scales=True)
    assert (joined.dtype, sizes.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(joined.float(), maps(x), rtol=0.05, atol=0.05)
    half, sizes = copy.deepcopy(model).bfloat16()(x.bfloat16(), return_scales=True)
    assert (half.dtype, sizes.dtype) == (torch.bfloat16, torch.float32)


def test_channels_last_reaches_the_network():
    layouts = []
    model = ScaleChannels(Flat(), SCALES).eval()
    model.net.register_forward_pre_hook(
        lambda _, x: layouts.append(x[0].is_contiguous(memory_format=torch.channels_last))
    )
    x = torch.randn(2, 3, 12, 14)
    expected, actual = model(x), model(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected)
    assert layouts == [False] * 3 + [True] * 3


def test_meta_device_gives_shapes():
    with torch.device("meta"):
        model = ScaleChannels(Flat(), SCALES, drop=0.5)
    joined, sizes = model(torch.empty(4, 3, 20, 20, device="meta"), return_scales=True)
    assert (joined.shape, sizes.shape) == ((4, 5), (4,))


def test_what_inference_mode_made_serves_in_training():
    model, x = ScaleChannels(Flat(), (0.37, 1.0)), torch.randn(2, 3, 27, 27)
    with torch.inference_mode():
        model(x)
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad.isfinite().all()


def test_gradients_are_those_of_finite_differences():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh()).double()
    x = torch.randn(1, 1, 6, 7, dtype=torch.float64, requires_grad=True)
    for join in JOINS:
        assert torch.autograd.gradcheck(ScaleChannels(net, (0.8, 1.0, 1.5), join), (x,))


# Compilers and export


@pytest.mark.parametrize("dense", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_as_one_graph_at_several_image_sizes(dense):
    torch._dynamo.reset()
    net = nn.Conv2d(3, 2, 5, padding=2) if dense else Flat()
    model = ScaleChannels(net, SCALES, drop=0.5, border=3, border_mode="reflect").eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for side in (12, 17):
        x = torch.randn(2, 3, side, side)
        for actual, expected in zip(compiled(x, return_scales=True), model(x, return_scales=True), strict=True):
            torch.testing.assert_close(actual, expected)
    compiled(x).sum().backward()


@pytest.mark.slow
def test_compiles_with_inductor():
    model = ScaleChannels(Flat(), SCALES).eval()
    compiled = torch.compile(model, fullgraph=True)
    for side in (12, 17):
        x = torch.randn(2, 3, side, side)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("net", "grid"),
    [
        (Flat(), None),
        pytest.param(nn.Conv2d(3, 2, 5, padding=2), (1, 0), marks=pytest.mark.slow),
        pytest.param(nn.Conv2d(3, 2, 3, 2, 1), (2, 0), marks=pytest.mark.slow),
    ],
)
def test_exports_with_dynamic_batch_and_size(net, grid):
    model = ScaleChannels(net, SCALES, grid=grid, border=2).eval()
    dims = {i: torch.export.Dim(n, min=low, max=256) for i, n, low in ((0, "b", 1), (2, "h", 16), (3, "w", 16))}
    if grid == (2, 0):  # torch cannot prove what it asks of a strided map, and finds the dynamic sizes by itself
        dims = dict.fromkeys(dims, torch.export.Dim.AUTO)
    program = torch.export.export(model, (torch.randn(2, 3, 20, 31),), dynamic_shapes=(dims,))
    for shape in ((3, 3, 25, 37), (1, 3, 40, 18)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), model(x))


def test_exports_maps_of_a_fixed_size_with_sizes():
    model = ScaleChannels(nn.Conv2d(3, 2, 5), SCALES, border=2, border_mode="replicate").eval()
    x = torch.randn(2, 3, 20, 31)
    batch = {0: torch.export.Dim("b")}
    program = torch.export.export(model, (x, True), dynamic_shapes=(batch, None))
    x = torch.randn(5, 3, 20, 31)
    for actual, expected in zip(program.module()(x, True), model(x, True), strict=True):
        torch.testing.assert_close(actual, expected)


def test_one_channel_without_a_grid_cannot_be_exported():
    with pytest.raises(ValueError, match="need `grid` to be compiled or exported"):
        torch.export.export(ScaleChannels(nn.Conv2d(3, 2, 3), (2.0,)), (torch.rand(1, 3, 8, 8),), strict=False)


def test_a_rehearsal_shows_each_channel_the_whole_batch_as_a_recorded_step_does():
    seen, net = [], nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 3))
    model = ScaleChannels(net, (0.5, 1.0), drop=0.5).train()
    net.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    x = torch.rand(50, 1, 8, 8)
    with fast.rehearsal():
        with fast.rehearsal():
            pass
        model(x)
    model(x)
    assert seen[:2] == [50, 50]
    assert max(seen[2:]) < 50


# On a CUDA device


@pytest.mark.gpu
def test_a_recorded_graph_drops_other_channels_each_time():
    # Channels are dropped in training mode only, where batch normalisation would change what it keeps.
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    )
    model = ScaleChannels(net.cuda(), SCALES, "max", drop=0.5).train()
    x = torch.randn(64, 3, 16, 16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = model(x, return_scales=True)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert first.isfinite().all()
    assert not torch.equal(first, out)


@pytest.mark.gpu
@pytest.mark.parametrize("net", [Flat(), nn.Conv2d(3, 4, 5)])
def test_device_gives_the_numbers_of_the_cpu(net):
    model = ScaleChannels(net, SCALES).double().eval()
    x = torch.randn(2, 3, 20, 21, dtype=torch.float64)
    expected = model(x, return_scales=True)
    for actual, right in zip(model.cuda()(x.cuda(), return_scales=True), expected, strict=True):
        torch.testing.assert_close(actual.cpu(), right)
