"""Conversion of existing networks: ten architectures, what is kept, what is projected, what is refused."""

import copy
import doctest
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from scalesteer import LogRadialBasis, ScaleChannels, ScaleSteerableConv2d, convert, fold
from scalesteer.testing import steering_error

SCALES = (1.0, 1.4)


class Residual(nn.Module):
    def __init__(self, channels=6):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x):
        return F.relu(x + self.body(x))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(6, 6, 3, padding="same", padding_mode="replicate")
        self.up = nn.ConvTranspose2d(6, 3, 2, stride=2)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        return self.out(torch.cat([x, self.up(F.relu(self.middle(F.relu(self.down(x)))))], 1))


class Nested(nn.Module):
    """Convolutions in a list, in a dictionary, and one that is not called by the module that holds it."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, k, padding=k // 2) for k in (3, 5))
        self.named = nn.ModuleDict({"inner": nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 7, padding="same")))})

    def forward(self, x):
        for conv in self.convs:
            x = conv(x)
        return self.named["inner"](x)


class Shared(nn.Module):
    """One module under two names and called three times, and two modules with one weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = self.first
        self.third = nn.Conv2d(3, 3, 3, padding=1)
        self.fourth = nn.Conv2d(3, 3, 3, padding=1)
        self.fourth.weight, self.fourth.bias = self.third.weight, self.third.bias

    def forward(self, x):
        return self.fourth(self.third(self.first(self.second(self.first(x)))))


def weight_normed():
    with pytest.warns(FutureWarning, match="deprecated"):
        old = nn.utils.weight_norm(nn.Conv2d(4, 4, 3, padding=1), dim=1)
    return nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), old)


ARCHITECTURES = {
    "residual": lambda: nn.Sequential(nn.Conv2d(3, 6, 7, stride=2, padding=3), Residual(), Residual()),
    "depthwise": lambda: nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, groups=3), nn.Conv2d(12, 4, 1)),
    "dilated": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=(2, 4), dilation=(2, 4)), nn.Conv2d(4, 4, 3, dilation=2)
    ),
    "grouped": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding_mode="circular", padding=1), nn.Conv2d(8, 8, 5, groups=4)
    ),
    "strided": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=(2, 3), padding=(0, 1)), nn.Conv2d(4, 4, 3, padding="valid")
    ),
    "u-net": UNet,
    "nested": Nested,
    "shared": Shared,
    "weight-normed": weight_normed,
    "one layer": lambda: nn.Conv2d(3, 4, 5, padding=2, padding_mode="reflect", bias=False),
}  # fmt: skip


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return ARCHITECTURES[request.param]()


def steerable(model):
    return [m for m in model.modules() if isinstance(m, ScaleSteerableConv2d)]


@pytest.mark.parametrize("kernel_size", [None, 5])
def test_shapes_stay_and_gradients_flow_in_ten_architectures(model, kernel_size):
    images = torch.rand(2, 3, 20, 28)
    converted, report = convert(model, kernel_size=kernel_size, scales=SCALES)
    assert len(steerable(converted)) == len(report.converted) > 0
    assert converted(images).shape == model(images).shape
    converted(images).square().mean().backward()
    for name, parameter in converted.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any() or name.endswith("bias"), name


def test_at_scale_one_the_network_answers_as_before_if_the_basis_holds_its_filters(model):
    """It holds all filters of 3 x 3. Larger ones are made of it here: they are what a first conversion projects to."""
    model.double().eval()
    layers = dict(convert(model, scales=(1.0,))[0].named_modules())
    with torch.no_grad():
        for name, conv in model.named_modules():
            if isinstance(conv, nn.Conv2d) and conv.kernel_size[0] > 3:
                conv.weight.copy_(layers[name].filters()[0])
    converted, report = convert(model, scales=(1.0,))
    images = torch.rand(2, 3, 20, 28, dtype=torch.float64)
    torch.testing.assert_close(converted(images), model(images), rtol=1e-9, atol=1e-9)
    assert all(layer.residual < 1e-12 for layer in report.converted)


def test_the_model_given_is_not_changed(model):
    model.train()
    before = copy.deepcopy(model.state_dict())
    modules, state = dict(model.named_modules()), torch.get_rng_state()
    converted, _ = convert(model, scales=SCALES)
    assert torch.equal(torch.get_rng_state(), state)
    converted(torch.rand(2, 3, 16, 16)).sum().backward()
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.add_(1)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dtype_mode_and_frozen_weights_are_kept(model):
    model.to(torch.bfloat16).eval()
    first = next(model.parameters())
    first.requires_grad_(False)
    converted, _ = convert(model, scales=SCALES)
    assert {t.dtype for t in converted.state_dict().values() if t.is_floating_point()} == {torch.bfloat16}
    assert not any(module.training for module in converted.modules())
    assert not all(parameter.requires_grad for parameter in converted.parameters())
    assert converted(torch.rand(2, 3, 16, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_the_device_is_kept(model):
    model.to("meta")
    converted, report = convert(model, scales=SCALES)
    assert all(tensor.is_meta for tensor in (*converted.parameters(), *converted.buffers()))
    assert (
        converted(torch.rand(2, 3, 20, 28, device="meta")).shape == model(torch.rand(2, 3, 20, 28, device="meta")).shape
    )
    assert all(math.isnan(layer.residual) for layer in report.converted)
    assert "nan %" in str(report)


@pytest.mark.gpu
def test_a_model_on_a_gpu_stays_there():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Residual(4)).cuda().eval()
    converted, _ = convert(model, scales=(1.0,))
    assert {tensor.device.type for tensor in (*converted.parameters(), *converted.buffers())} == {"cuda"}
    images = torch.rand(2, 3, 16, 16, device="cuda")
    torch.testing.assert_close(converted(images), model(images), rtol=2e-3, atol=2e-3)


def test_a_state_dict_loads_into_another_conversion(model):
    model.eval()
    converted, _ = convert(model, scales=SCALES)
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.add_(0.01)
    again, _ = convert(model, scales=SCALES)
    again.load_state_dict(converted.state_dict())
    images = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(again(images), converted(images))


def test_a_converted_network_folds_and_goes_into_scale_channels():
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    converted, _ = convert(model, kernel_size=5, scales=SCALES)
    images = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(fold(converted)(images), converted(images))
    assert ScaleChannels(converted, (0.5, 1.0))(images).shape == (2, 6)


@pytest.mark.parametrize(("kernel_size", "limit"), [(3, 1e-12), (5, 0.06), (7, 0.06)])
def test_the_nearest_filter_is_found(kernel_size, limit):
    """By another solver; it too leaves out functions that are nearly sums of others."""
    conv = nn.Conv2d(2, 50, 3, dtype=torch.float64).requires_grad_(False)
    layer, report = convert(conv, kernel_size=kernel_size, scales=(0.8, 1.0))
    wanted = F.pad(conv.weight, ((kernel_size - 3) // 2,) * 4)
    missed = float((layer.filters()[1] - wanted).norm() / wanted.norm())
    assert report.layers[0].residual == pytest.approx(missed, abs=1e-12)
    assert missed <= limit
    functions = layer.with_scales((1.0,)).steered_basis.numpy()  # (D, T)
    found = np.linalg.lstsq(functions.T, wanted.flatten(2).flatten(0, 1).numpy().T, rcond=1e-2)[0]
    np.testing.assert_allclose(layer.coefficients.flatten(2).flatten(0, 1), found.T, rtol=0, atol=1e-10)


def test_a_larger_window_has_room_to_be_steered():
    conv, errors = nn.Conv2d(1, 300, 3, dtype=torch.float64), {}
    for size in (3, 5, 7):
        layer, _ = convert(conv, kernel_size=size, scales=(1.0, 1.5, 2.0))
        errors[size] = max(steering_error(layer))
    assert errors[3] > 0.5
    assert errors[5] < 0.25
    assert errors[7] < 0.15


def test_a_point_symmetric_basis_says_what_it_cannot_express():
    _, report = convert(nn.Conv2d(4, 16, 3), basis="paper", scales=(1.0,))
    assert 0.5 < report.layers[0].residual < 0.8
    even = nn.Conv2d(4, 16, 3)
    with torch.no_grad():
        even.weight.copy_(even.weight + even.weight.flip(2, 3))
    _, symmetric = convert(even, basis=LogRadialBasis.preset("area"), scales=(1.0,))
    assert symmetric.layers[0].residual < 0.75 * report.layers[0].residual


def test_filters_of_zeros_and_what_is_not_finite():
    conv = nn.Conv2d(1, 2, 3)
    nn.init.zeros_(conv.weight)
    layer, report = convert(conv)
    assert report.layers[0].residual == 0
    assert not layer.coefficients.any()
    nn.init.constant_(conv.weight, math.nan)
    assert math.isnan(convert(conv)[1].layers[0].residual)


def test_a_window_grows_only_if_it_is_smaller_and_scales_have_the_layers_default():
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 7, padding=3))
    converted, report = convert(model, kernel_size=5)
    assert [layer.new_kernel for layer in report.layers] == [5, 7]
    assert [layer.padding for layer in converted] == [(2, 2), (3, 3)]
    assert converted[0].scales == ScaleSteerableConv2d(1, 1, 5).scales
    assert report.layers[0].taps == pytest.approx(sum(n * n for n in converted[0].sizes) / 9)


def test_a_predicate_chooses():
    model, seen = nn.Sequential(Residual(3), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 1)), []

    def where(name, conv):
        seen.append((name, conv.kernel_size))
        return name.startswith("0.")

    converted, report = convert(model, where=where, scales=SCALES)
    assert seen == [("0.body.0", (3, 3)), ("0.body.3", (3, 3)), ("1", (3, 3))]
    assert [type(m) is nn.Conv2d for m in (converted[1], converted[2])] == [True, True]
    assert [layer.reason for layer in report.layers] == ["", "", "`where` did not choose it", "one pixel has no size"]


def test_what_is_shared_is_converted_once_and_stays_shared():
    converted, report = convert(Shared(), scales=SCALES)
    assert converted.first is converted.second
    assert converted.third is not converted.fourth
    assert converted.third.coefficients is converted.fourth.coefficients
    assert converted.third.bias is converted.fourth.bias
    assert [layer.name for layer in report.layers] == ["first", "third", "fourth"]
    kept, _ = convert(Shared(), where=lambda name, conv: name == "third", scales=SCALES)
    assert type(kept.fourth) is nn.Conv2d
    assert kept.fourth.weight.shape == (3, 3, 3, 3)
    assert kept.third.bias is kept.fourth.bias


def test_weight_norm_goes_on_with_the_coefficients():
    model = weight_normed()
    parametrized = model[0].parametrizations.weight
    parametrized.original1.requires_grad_(False)
    converted, _ = convert(model, scales=(1.0,))
    for layer in converted:
        assert parametrize.is_parametrized(layer, "coefficients")
        assert not layer._forward_pre_hooks
    assert converted[1].parametrizations.coefficients.original0.shape == (1, 4, 1, 1, 1)  # dim=1
    images = torch.rand(1, 3, 9, 9)
    torch.testing.assert_close(converted(images), model(images))
    model(images).sum().backward()  # the old kind has a weight that belongs to a graph now
    torch.testing.assert_close(convert(model, scales=(1.0,))[0](images), model(images))


@torch.no_grad()
def test_what_was_trained_is_trained_and_what_was_frozen_is_not_even_without_gradients():
    model = weight_normed().append(nn.Conv2d(4, 4, 3)).append(nn.Conv2d(4, 4, 3))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    first, second, third, fourth = convert(model, scales=SCALES)[0]
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert all(parameter.requires_grad for parameter in (*second.parameters(), *fourth.parameters()))
    assert [third.coefficients.requires_grad, third.bias.requires_grad] == [False, True]


def test_filters_that_are_a_buffer_are_converted():
    conv = nn.Conv2d(2, 2, 3, bias=False)
    weight = conv.weight.detach()
    del conv.weight
    conv.register_buffer("weight", weight)
    layer, _ = convert(conv, scales=(1.0,))
    torch.testing.assert_close(layer.filters()[0].detach(), weight)
    assert not layer.coefficients.requires_grad


def test_hooks_are_kept():
    model, calls = nn.Sequential(nn.Conv2d(1, 1, 3)), []
    model[0].register_forward_hook(lambda module, inputs, output: calls.append(type(module)))
    model[0].register_forward_pre_hook(lambda module, inputs: calls.append("before"))
    converted, _ = convert(model, scales=SCALES)
    converted(torch.rand(1, 1, 8, 8))
    assert calls == ["before", ScaleSteerableConv2d]


def test_a_pruned_or_otherwise_parametrized_convolution_is_refused_unless_left_out():
    pruned = nn.Sequential(nn.Conv2d(1, 2, 3))
    prune.random_unstructured(pruned[0], "weight", amount=0.5)
    spectral = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(1, 2, 3)))
    biased = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(1, 2, 3), "bias", dim=None))
    twice = nn.Sequential(parametrizations.weight_norm(parametrizations.weight_norm(nn.Conv2d(1, 2, 3))))
    for model, kind in (
        (pruned, "RandomUnstructured"), (spectral, "_SpectralNorm"), (biased, "_WeightNorm"), (twice, "_WeightNorm")
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"{kind} of 0: finish it first"):
            convert(model)
        model.append(nn.Conv2d(2, 2, 3))
        convert(model, where=lambda name, conv: name == "1", scales=SCALES)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*quantize:DeprecationWarning")
def test_a_quantised_model_is_refused():
    import torch.ao.nn.qat as qat
    import torch.ao.nn.quantized as quantized
    from torch.ao.quantization import get_default_qat_qconfig

    with pytest.raises(TypeError, match=r"1 has torch\.ao\.nn\.quantized\..*Conv2d\. Convert the floating-point"):
        convert(nn.Sequential(nn.Conv2d(1, 1, 3), quantized.Conv2d(1, 1, 3)))
    trained = qat.Conv2d(1, 1, 3, qconfig=get_default_qat_qconfig("x86"))
    with pytest.raises(TypeError, match=r"it has torch\.ao\.nn\.qat\."):
        convert(trained)


def test_weights_of_another_kind_are_refused():
    class Packed(torch.Tensor):
        pass

    conv = nn.Conv2d(1, 1, 3)
    conv.weight = nn.Parameter(conv.weight.detach().as_subclass(Packed))
    with pytest.raises(TypeError, match=r"quantised or distributed: 0 has .*Packed"):
        convert(nn.Sequential(conv))


class Doubled(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, 2 * weight, bias)


class Named(nn.Conv2d):
    """A subclass that computes what its parent does."""


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (lambda: nn.Conv2d(3, 4, 1), "one pixel has no size"),
        (lambda: nn.Conv2d(3, 4, 4), "an even window has no centre pixel"),
        (lambda: nn.Conv2d(3, 4, (3, 5)), "a rectangular window has no one size"),
        (lambda: nn.Conv2d(3, 4, (1, 3)), "a rectangular window has no one size"),
        (lambda: nn.ConvTranspose2d(3, 4, 3), "ConvTranspose2d has no scale-steerable form"),
        (lambda: nn.Conv1d(3, 4, 3), "Conv1d has no scale-steerable form"),
        (lambda: nn.LazyConv2d(4, 3), "lazy: apply the model to an image first"),
        (lambda: Doubled(3, 4, 3), "Doubled has a forward pass of its own"),
        (lambda: nn.Conv2d(3, 4, 3, dtype=torch.complex64), "its weights are torch.complex64"),
    ],
)  # fmt: skip
def test_what_is_left_alone_is_reported(conv, reason):
    model = nn.Sequential(conv(), nn.Conv2d(4, 4, 3))
    converted, report = convert(model, scales=SCALES)
    assert type(converted[0]) is type(model[0])
    assert report.layers[0].reason == reason
    assert f"left alone: {reason}" in str(report).splitlines()[1]
    with pytest.raises(ValueError, match=reason):
        convert(model[0])


def test_subclasses_and_lazy_ones_that_know_their_channels_are_converted():
    lazy = nn.LazyConv2d(4, 3)
    lazy(torch.rand(1, 3, 8, 8))
    converted, report = convert(nn.Sequential(lazy, Named(4, 4, 3)), scales=SCALES)
    assert len(report.converted) == len(steerable(converted)) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": torch.relu}, TypeError, "`model` must be an nn.Module"),
        ({"model": nn.ReLU()}, ValueError, "it has no nn.Conv2d"),
        ({"model": nn.Conv2d(1, 1, 3), "where": lambda name, conv: False}, ValueError, "`where` did not choose it"),
        ({"kernel_size": 4}, ValueError, "`kernel_size` must be odd"),
        ({"kernel_size": "5"}, TypeError, "`kernel_size"),
        ({"scales": (1.0, 0.5)}, ValueError, "`scales` must be positive and strictly ascending"),
        ({"scales": (0.1, 1.0)}, ValueError, r"the convolution cannot be converted: the window of scale 0\.1 is"),
        ({"basis": "smoth"}, ValueError, "`basis`"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        convert(**{"model": nn.Conv2d(1, 1, 3), **arguments})


def test_the_report_is_a_table():
    _, report = convert(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 1)), scales=(1.0, 2.0))
    assert str(report).splitlines() == [
        "layer  kernel  new kernel  residual  taps",
        "0      3 x 3   3 x 3       0.0 %     x 6.44",
        "1      1 x 1   left alone: one pixel has no size",
    ]


def test_the_guides_examples_run():
    guide = Path(__file__).parents[1] / "docs" / "guide" / "convert.md"
    failed, tried = doctest.testfile(str(guide), module_relative=False)
    assert failed == 0
    assert tried > 5
