"""What the pages and figures state, as numbers: of first layers, of the paper's discussion, of Theorem 1, of the data.

``python -m paper.measures`` measures again what docs/guide/maths.md and docs/data.md show, and keeps it in results/; it
trains a few small networks, two to four minutes on one core.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from paper import RESULTS
from paper.markdown import table
from scalesteer import harmonics
from scalesteer.baselines import LocallyScaleInvariantConv2d
from scalesteer.data import (
    DATASETS,
    ELASTIC_ALPHAS,
    SIZED_DATASETS,
    SOURCES,
    ImageSet,
    SizedSpec,
    SplitSpec,
    build,
    distort,
    fetch,
    load_part,
    load_split,
    sheets,
)
from scalesteer.data.elastic import ELASTIC_SIGMA, displacements
from scalesteer.data.packages import PACKAGES
from scalesteer.data.scale import RESAMPLERS, Part, shrink
from scalesteer.files import write_atomically
from scalesteer.harmonics import PAPER_SCALES, WIDE_SCALES, LogRadialBasis
from scalesteer.models import Network
from scalesteer.nn import ScaleSteerableConv2d
from scalesteer.testing import Image, equivariance_error, steering_error, two_blobs

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]
SENSITIVITY_ORDERS = (0.5, 1.0, 2.0, 4.0)


def unit_filters(layer: nn.Module) -> Array:
    """The filters of a layer at scale 1, first input channel: `(C_out, n, n)`."""
    with torch.no_grad():
        if isinstance(layer, ScaleSteerableConv2d):
            weight = layer.with_scales((1.0,)).filters()[0]
        else:
            weight = layer.get_parameter("weight")
        return np.asarray(weight[:, 0].double().cpu().numpy())


def first_maps(model: Network, images: Tensor) -> Tensor:
    """The first layer's output after the ReLU, `(B, C, H, W)`, for images in [0, 1]."""
    with torch.no_grad():
        return F.relu(model.first(model.prepare(images)))


def winning_scales(model: Network, images: Tensor) -> tuple[Tensor, Tensor]:
    """Of the first layer's strongest channel at each pixel: its response and the index of the scale that won.

    Shape:
        `(B, 1, H, W)` -> `(B, H, W)` and `(B, H, W)`.
    """
    with torch.no_grad():
        best, winner = model.first(model.prepare(images), return_scales=True)
    strongest = best.argmax(1, keepdim=True)
    return best.gather(1, strongest)[:, 0], winner.gather(1, strongest)[:, 0]


SHOWN_FROM = 0.25  # of an image's largest response: below, no scale is shown as the winner


def mean_winning_scale(response: Tensor, winner: Tensor, scales: Sequence[float]) -> float:
    """The geometric mean of the scales that won, over the pixels where an image's response is strong."""
    logs = torch.tensor(scales, device=winner.device).log()
    return float(logs[winner[strong(response)]].mean().exp())


def scale_tracking(model: Network, images: ImageSet) -> tuple[NDArray[np.float32], Array]:
    """For each image how large its object was drawn, and the mean scale that won in the first layer: `(N,)` each.

    Images in which nothing answers are left out.
    """
    scales: Any = getattr(model.first, "scales", None)
    if scales is None:
        raise ValueError(f"the first layer of `model` must have scales (got {type(model.first).__name__}).")
    means = [
        mean_winning_scale(response, winner, scales)
        for x, _ in images.batches(100)
        for response, winner in zip(*winning_scales(model, x), strict=True)
    ]
    found = np.isfinite(means)
    return images.sizes.cpu().numpy()[found], np.array(means)[found]


def strong(response: Tensor) -> Tensor:
    return response > SHOWN_FROM * response.amax((-2, -1), keepdim=True)


def sensitivity(orders: Sequence[float], scales: Sequence[float], m: float = 1.0) -> tuple[Complex, dict[float, float]]:
    r"""How the response of each harmonic turns when the image is scaled, and the factor after which it repeats.

    The image is a smooth ring with some angular structure, I(s p) its scaled version. The response
    :math:`\int S_{kj}(p)\,I(s p)\,dp` is integrated on a dense log-polar grid; it is multiplied by s^(2-m), which
    Theorem 1 says its magnitude falls by, and divided by its magnitude at the first scale.

    Returns:
        Responses, `(K, S)`, complex; and for each order the measured period: the factor that turns the phase once.
    """
    basis = LogRadialBasis(orders=tuple(orders), orientations=(math.pi / 4,), m=m)
    growth = np.log(np.asarray(scales, float))
    z = np.linspace(-growth.max() - 3, -growth.min() + 3, 4000)  # log r
    phi = np.linspace(0, 2 * np.pi, 128, endpoint=False)
    functions = harmonics.evaluate(basis, np.outer(np.exp(z), np.cos(phi)), np.outer(np.exp(z), np.sin(phi)))
    turned = functions[:, 0] @ (1 + 0.5 * np.cos(2 * phi))  # (K, R): integrated over the angle
    rings = np.exp(-((z + growth[:, None]) ** 2) / (2 * 0.4**2) + 2 * z + (2 - m) * growth[:, None])  # (S, R)
    responses = turned @ rings.T
    responses /= np.abs(responses[:, :1])
    turns = np.polyfit(growth, np.unwrap(np.angle(responses)).T, 1)[0]  # radians per unit of log s
    return responses, {order: float(np.exp(2 * np.pi / abs(t))) for order, t in zip(orders, turns, strict=True)}


def centrality(filters: Array) -> tuple[Array, Array]:
    """How central each filter is, with |value| as mass.

    Args:
        filters: `(C, n, n)`.

    Returns:
        The distance of the centre of mass from the centre, over the radius n / 2; and the share of mass in pixels
        whose centre lies within half the radius. Both are in [0, 1] and have shape `(C,)`.
    """
    n = filters.shape[-1]
    ticks = np.arange(n) - n // 2
    mass = np.abs(filters)
    total = mass.sum((1, 2))
    down = (mass * ticks[:, None]).sum((1, 2)) / total
    right = (mass * ticks).sum((1, 2)) / total
    inner = np.hypot(ticks[:, None], ticks) <= n / 4
    return np.hypot(down, right) / (n / 2), mass[:, inner].sum(1) / total


def enlarged(layer: nn.Module, scale: float) -> Tensor:
    """The filters of a layer (first input channel) enlarged by `scale`, `(C_out, n, n)` in float64.

    A scale-steerable layer steers them; any other filter is read at p / scale by bilinear interpolation.
    """
    with torch.no_grad():
        if isinstance(layer, ScaleSteerableConv2d):
            return layer.with_scales((scale,)).filters()[0][:, 0].double()
        weight = layer.get_parameter("weight")[:, :1].double()
        k = weight.shape[-1]
        n = harmonics.window_size(k, scale)
        ticks = (torch.arange(n, dtype=torch.float64) - n // 2) * 2 / (k * scale)  # edges of the filter at -1 and 1
        grid = torch.stack(torch.meshgrid(ticks, ticks, indexing="xy"), -1).expand(len(weight), n, n, 2)
        return F.grid_sample(weight, grid.to(weight.device), align_corners=False)[:, 0]


def entanglement(layer: nn.Module, scale: float) -> tuple[Array, Array]:
    r"""How much a change of scale looks like a move, for each filter of a layer.

    Definition. With W the filter, W^s the filter enlarged by s, and the cosine of the one and the moved other,

    .. math:: \rho(t) = \langle W(p), W^s(p + t) \rangle / (\lVert W \rVert\,\lVert W^s \rVert),

    let t* be the move that maximises it. A filter that is central answers best at the same place, t* = 0. One with
    its mass at d from the centre has it at s d when enlarged, and t* = (s - 1) d: a scaled object then gives the
    response that a moved one gives. Entanglement is the length of t* over the filter's radius; the gain
    :math:`\rho(t^*) - \rho(0)` says how much better the move explains the change. Rough filters also match by chance
    somewhere, with a small gain, so that both numbers are needed.

    Returns:
        Length of t* over the radius, and gain, `(C_out,)` each.
    """
    first, second = enlarged(layer, 1.0), enlarged(layer, scale)
    reach = second.shape[-1] // 2
    n = first.shape[-1]
    norms = first.norm(dim=(1, 2)) * second.norm(dim=(1, 2))
    # Input of group c is W^s_c, its weight W_c; the output runs over all moves up to the enlarged filter's radius.
    cosine = F.conv2d(second[None], first[:, None], padding=n // 2, groups=len(first))[0] / norms[:, None, None]
    rows = torch.arange(2 * reach + 1, dtype=torch.float64, device=cosine.device) - reach
    best, index = cosine.flatten(1).max(1)
    move = torch.hypot(rows[index // len(rows)], rows[index % len(rows)])
    gain = best - cosine[:, reach, reach]
    return np.asarray((move / (n / 2)).cpu().numpy()), np.asarray(gain.cpu().numpy())


def resizing_error(
    layer: ScaleSteerableConv2d | LocallyScaleInvariantConv2d, scale: float, image: Image = two_blobs, size: int = 65
) -> float:
    """How far the response at `scale` to an enlarged image is from the response at scale 1 to the image itself.

    The image is given in closed form, in units in which the filter is 17 wide, so that neither the enlarged image nor
    the reference is interpolated: the response at pixel q of the enlarged image is compared with the unscaled filter
    laid over the original image at q / scale, wherever q lies within the enlarged filter's window. A steered filter
    is evaluated at its scale; a locally scale-invariant layer resizes the enlarged image, convolves and resizes back.

    Returns:
        The norm of the difference over the norm of the reference, over all filters and pixels; 0 is perfect.
    """
    k = layer.geometry.kernel_size
    weight = torch.from_numpy(unit_filters(layer))  # (C, k, k)
    reach = int(k / 2 * scale)
    pixels = torch.arange(-reach, reach + 1, dtype=torch.float64)
    taps = torch.arange(k, dtype=torch.float64) - k // 2
    unit = k / 17
    at = (pixels[:, None] / scale + taps) / unit  # (Q, k): where each tap lies on the original image
    patches = image(at[None, :, None, :], -at[:, None, :, None])  # (Q, Q, k, k)
    expected = torch.einsum("ckl,yxkl->cyx", weight, patches)
    ticks = (torch.arange(size, dtype=torch.float64) - size // 2) / (unit * scale)
    shown = image(ticks[None, :], -ticks[:, None])[None, None]
    with torch.no_grad():
        if isinstance(layer, ScaleSteerableConv2d):
            steered = layer.with_scales((scale,)).filters()[0].double().cpu()
            found = F.conv2d(shown, steered, padding=steered.shape[-1] // 2)[0]
        else:
            resized = LocallyScaleInvariantConv2d(
                1,
                len(weight),
                k,
                padding="same",
                bias=False,
                dtype=torch.float64,
                scales=(scale,),
                antialias=layer.antialias,
            )
            resized.weight.copy_(weight[:, None])
            found = resized(shown)[0]
    middle = slice(size // 2 - reach, size // 2 + reach + 1)
    return float((found[:, middle, middle] - expected).norm() / expected.norm())


def resizing_layers(filters: int = 64) -> dict[str, ScaleSteerableConv2d | LocallyScaleInvariantConv2d]:
    """The layers that :func:`paper.figures.plot_resizing` compares, with fixed random filters."""
    random = torch.Generator().manual_seed(0)
    layers: dict[str, ScaleSteerableConv2d | LocallyScaleInvariantConv2d] = {}
    with torch.no_grad():
        for name, preset in (("steered, points", "paper"), ("steered, areas", "area")):
            layer = ScaleSteerableConv2d(1, filters, scales=PAPER_SCALES, basis=preset, dtype=torch.float64)
            layer.coefficients.normal_(generator=random)
            layers[name] = layer
        smooth = torch.from_numpy(unit_filters(layer))[:, None]
        rough = torch.randn(smooth.shape, generator=random, dtype=torch.float64)
        for name, weight, antialias in (
            ("input resized, same filters", smooth, False),
            ("the same, anti-aliased", smooth, True),
            ("input resized, rough filters", rough, False),
        ):
            resized = LocallyScaleInvariantConv2d(1, filters, padding="same", dtype=torch.float64, antialias=antialias)
            resized.weight.copy_(weight)
            layers[name] = resized
    return layers


# Theorem 1, and what grids do to it

RADIUS = 3.5
THEOREM_ORDERS = (0.5, 1.0, 2.0)
THEOREM_SCALES = (1.25, 1.5, 2.0, 2.4)
UPSAMPLING = (1, 2, 4, 8)


def gaussians(x: Array, y: Array) -> Array:
    """An image known everywhere: a sum of Gaussians."""
    return np.asarray(
        np.exp(-((x - 2) ** 2 + (y + 1.5) ** 2) / 8)
        + 0.7 * np.exp(-((x + 3) ** 2 + (y - 2) ** 2) / 10)
        - 0.4 * np.exp(-(x**2 + (y - 1) ** 2) / 3)
    )


def polar_integral(order: float, radius: float, shrunk: float, nodes: int, turns: int) -> Complex:
    """The integral of S_kj times the image shrunk by `shrunk` over a disc: `(J,)`.

    Gauss-Legendre in log r with that many nodes, a trapezoid in phi.
    """
    gauss, weights = np.polynomial.legendre.leggauss(nodes)
    low, high = math.log(radius) - 26, math.log(radius)  # leaves out a disc of e^-26 times the radius
    z = (gauss + 1) / 2 * (high - low) + low
    phi = np.arange(turns) * 2 * math.pi / turns
    x, y = np.outer(np.exp(z), np.cos(phi)), np.outer(np.exp(z), np.sin(phi))
    values = _harmonic(order, x, y) * (gaussians(shrunk * x, shrunk * y) * np.exp(2 * z)[:, None])
    return np.asarray(np.einsum("jzp,z->j", values, weights) * (high - low) / 2 * 2 * math.pi / turns)


def grid_sum(order: float, radius: float, shrunk: float, pitch: float) -> Complex:
    """The same integral as a sum over a Cartesian grid, with S(0) = 1 at the centre as the paper samples it."""
    n = math.floor(radius / pitch)
    ticks = np.arange(-n, n + 1) * pitch
    x, y = np.meshgrid(ticks, ticks)
    inside = np.hypot(x, y) <= radius
    x, y = x[inside], y[inside]
    return np.asarray((_harmonic(order, x, y) * gaussians(shrunk * x, shrunk * y)).sum(-1) * pitch**2)


def _harmonic(order: float, x: Array, y: Array) -> Complex:
    return np.asarray(harmonics.evaluate(LogRadialBasis(orders=(order,)), x, y)[0])  # (J, ...)


def _deviation(left: Complex, right: Complex) -> float:
    return float(np.linalg.norm(left - right) / np.linalg.norm(left))


def _factor(order: float, scale: float, power: float = -1.0, sign: int = -1) -> complex:
    """That of Theorem 1, s^(m-2) e^(-ik log s) with m = 1, unless it is broken on purpose."""
    return complex(scale**power * np.exp(sign * 1j * order * math.log(scale)))


def theorem_deviation(order: float, scale: float) -> float:
    """How far the two sides of Theorem 1 are apart, each integrated on its own."""
    left = polar_integral(order, RADIUS, scale, nodes=150, turns=300)
    return _deviation(left, _factor(order, scale) * polar_integral(order, RADIUS * scale, 1.0, nodes=181, turns=364))


def grid_deviations(order: float, scale: float, pitches: Sequence[float], **broken: Any) -> list[float]:
    """How far the two sides of Theorem 1 are apart on grids; `broken` changes the theorem's power or sign."""
    factor = _factor(order, scale, **broken)
    return [
        _deviation(grid_sum(order, RADIUS, scale, h), factor * grid_sum(order, RADIUS * scale, 1.0, h)) for h in pitches
    ]


def steering_errors(preset: str) -> dict[str, float]:
    """Mean steering error over ten draws of 64 filters with complex-normal coefficients, by the two windows."""
    errors = {}
    for size, scales in ((7, PAPER_SCALES), (17, (1.0, 33 / 17))):
        draws = []
        for seed in range(10):
            layer = ScaleSteerableConv2d(1, 64, size, scales=scales, basis=preset)
            with torch.no_grad():
                layer.coefficients.normal_(generator=torch.Generator().manual_seed(seed))
            draws.append(steering_error(layer))
        for window, values in zip(layer.sizes[1:], np.array(draws).T, strict=True):
            errors[f"{size} -> {window}"] = round(float(values.mean()), 4)
    return errors


def ranks(basis: LogRadialBasis) -> dict[str, int]:
    """The rank of the real functions on the window of 7 x 7, by the relative tolerance of the singular values."""
    flat = harmonics.steered_basis(basis, 7, 1.0).reshape(-1, 49)
    values = np.linalg.svd(flat, compute_uv=False)
    return {f"{t:g}": int((values > t * values[0]).sum()) for t in (1e-1, 1e-2, 1e-3, 1e-6)}


SMOOTH = LogRadialBasis.preset("smooth")
GRID_STEPS = {
    "`paper`": LogRadialBasis.preset("paper"),
    "`area`": LogRadialBasis.preset("area"),
    "`area`, edge averaged": replace(LogRadialBasis.preset("area"), support="averaged"),
    "`smooth`, no core": replace(SMOOTH, core=0.0),
    "`smooth`": SMOOTH,
}
"""From the paper's sampling to ours, one step at a time."""
GRID_SCALES = {9: 9 / 7, 11: 11 / 7, 13: 13 / 7, 17: 17 / 7, 28: 4.0}  # by the diameter of the disc
NEIGHBOURS = {
    "`smooth`: orders 0.5, 2": SMOOTH,
    "orders 1, 3": replace(SMOOTH, orders=(1.0, 3.0)),
    "orders 0.5, 1, 2": replace(SMOOTH, orders=(0.5, 1.0, 2.0)),
    "order 1": replace(SMOOTH, orders=(1.0,)),
    "order 2": replace(SMOOTH, orders=(2.0,)),
    "order 1, 6 orientations, σ = π/5": replace(
        SMOOTH, orders=(1.0,), sigma=math.pi / 5, orientations=tuple(j * math.pi / 3 for j in range(1, 7))
    ),
    "12 orientations": replace(SMOOTH, orientations=tuple(j * math.pi / 6 for j in range(1, 13))),
    "core 0.5": replace(SMOOTH, core=0.5),
    "core 1": replace(SMOOTH, core=1.0),
    "m = 0": replace(SMOOTH, m=0.0),
}
"""Choices that were weighed for the preset `smooth`: what is not named is as in the preset."""


def small_blobs(images: int = 64) -> Image:
    """Images of three blobs of 1 to 2 pixels on a window of 7 pixels, `(..., h, w)` -> `(images, h, w)`."""
    draw = torch.rand((4, images, 3, 1, 1), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right, up = 7 * (draw[:2] - 0.5)
    width, height = 1 + draw[2], 2 * draw[3] - 1
    return lambda x, y: (height * torch.exp(-((x - right) ** 2 + (y - up) ** 2) / (2 * width**2))).sum(1)


def grid_errors(basis: LogRadialBasis) -> dict[str, float]:
    """How far responses at larger scales to enlarged small blobs are from those at scale 1, by the window.

    64 filters with complex-normal coefficients, 64 images; the norm of the differences over the norm at scale 1.
    """
    coefficients = np.random.default_rng(1).standard_normal((64, 2 * math.prod(basis.shape)))
    image, responses = small_blobs(), []
    for scale in (1.0, *GRID_SCALES.values()):
        functions = harmonics.steered_basis(basis, 7, scale)
        x, y = (torch.from_numpy(a.copy()) / scale for a in harmonics.grid(functions.shape[-1]))
        responses.append(coefficients @ functions.reshape(coefficients.shape[1], -1) @ image(x, y).flatten(1).numpy().T)
    first, *others = responses
    errors = [float(np.linalg.norm(r - first) / np.linalg.norm(first)) for r in others]
    return {f"7 -> {size}": round(error, 4) for size, error in zip(GRID_SCALES, errors, strict=True)}


SET_UPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "`paper`, the paper's scales": ("paper", PAPER_SCALES),
    "`area`, the paper's scales": ("area", PAPER_SCALES),
    "`smooth`, the paper's scales": ("smooth", PAPER_SCALES),
    "`smooth`, 8 scales from 0.35 to 4": ("smooth", tuple(2 ** (i / 2) for i in range(-3, 5))),
    "`smooth`, wide scales": ("smooth", WIDE_SCALES),
}
MOVES = (1.2, 1.5, 1.8)
PLAIN = "`nn.Conv2d` with filters of sum zero"


class SumZero(nn.Module):
    """Keeps the sum of every filter at zero: takes from the weights their part along `sums`, what each of them adds."""

    def __init__(self, sums: Tensor) -> None:
        super().__init__()
        self.register_buffer("direction", sums / sums.norm(), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        direction = self.get_buffer("direction")
        along = (weight * direction).flatten(2).sum(2)  # (C_out, C_in)
        return weight - along.view(*along.shape, *[1] * direction.ndim) * direction


def sum_zero_conv() -> nn.Conv2d:
    """A plain convolution whose filters sum to zero, in training too; scale-steerable ones start so."""
    conv = nn.Conv2d(1, 16, 7, padding="same", bias=False)
    nn.utils.parametrize.register_parametrization(conv, "weight", SumZero(torch.ones(7, 7)))
    return conv


def sum_zero_steered() -> ScaleSteerableConv2d:
    """The default layer, its filters kept at a sum of zero; an averaged edge makes the sum the same at every scale."""
    layer = ScaleSteerableConv2d(1, 16, padding="same", bias=False)
    sums = torch.from_numpy(harmonics.steered_basis(layer.basis, 7, 1.0)).sum((-2, -1)).float()  # (K, J, 2)
    nn.utils.parametrize.register_parametrization(layer, "coefficients", SumZero(sums))
    return layer


def equivariance_errors() -> dict[str, dict[str, Any]]:
    """Of fresh layers of 16 filters, in the mean over a few draws: number of scales, taps, and the meter's error."""

    def measured(make: Callable[[], nn.Module], draws: int) -> list[float]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            errors = [[equivariance_error(layer, s) for s in MOVES] for layer in (make() for _ in range(draws))]
        return [round(float(e), 3) for e in np.mean(errors, axis=0)]

    found = {PLAIN: {"scales": 1, "taps": 49, "errors": measured(sum_zero_conv, 8)}}
    for name, (preset, scales) in SET_UPS.items():
        make = partial(ScaleSteerableConv2d, 1, 16, 7, padding="same", basis=preset, scales=scales)
        taps = sum(n * n for n in make().sizes)
        found[name] = {"scales": len(scales), "taps": taps, "errors": measured(make, 2)}
    return found


STEERED = "`ScaleSteerableConv2d`"
FIRST_LAYERS: dict[str, Callable[[], nn.Module]] = {
    PLAIN: sum_zero_conv,
    f"{STEERED} with filters of sum zero": sum_zero_steered,
    "`nn.Conv2d`": partial(nn.Conv2d, 1, 16, 7, padding="same", bias=False),
    STEERED: partial(ScaleSteerableConv2d, 1, 16, padding="same", bias=False),
}


def measure_trained(images: int = 6000, epochs: int = 3) -> dict[str, Any]:
    """First layers of small networks that learn MNIST's digits: the meter's errors before and after.

    The layers behind are the same: 3 x 3 convolutions with batch normalisation, and a maximum over all pixels.
    """
    pool, batch = fetch("mnist"), 100
    order = torch.randperm(len(pool.images), generator=torch.Generator().manual_seed(0))[: images + 3000]
    digits = torch.from_numpy(pool.images)[order, None] / 255
    labels = torch.from_numpy(pool.labels)[order].long()
    found: dict[str, Any] = {"images": images, "epochs": epochs, "layers": {}}
    for name, make in FIRST_LAYERS.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers: list[nn.Module] = [first := make(), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
            for fan_in, fan_out in ((16, 32), (32, 64)):
                layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU()]
                layers.append(nn.MaxPool2d(2) if fan_out == 32 else nn.AdaptiveMaxPool2d(1))
            net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))
            errors = {"fresh": [round(equivariance_error(first, s), 3) for s in MOVES]}
            optimizer = torch.optim.AdamW(net.parameters())
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=epochs * (images // batch))
            for _ in range(epochs):
                for chosen in torch.randperm(images).split(batch):
                    F.cross_entropy(net(digits[chosen]), labels[chosen]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
        net.eval()
        with torch.no_grad():
            answers = torch.cat([net(part).argmax(1) for part in digits[images:].split(500)])
        errors["trained"] = [round(equivariance_error(first, s), 3) for s in MOVES]
        found["layers"][name] = {**errors, "digits": round(float((answers != labels[images:]).float().mean()), 4)}
    return found


def measure_guide() -> dict[str, Any]:
    """Every number of docs/guide/maths.md."""
    worst = max(theorem_deviation(k, s) for k in THEOREM_ORDERS for s in THEOREM_SCALES)
    pitches = [1 / u for u in UPSAMPLING]
    responses, periods = sensitivity(SENSITIVITY_ORDERS, np.geomspace(PAPER_SCALES[0], PAPER_SCALES[-1], 50).tolist())
    turns = np.degrees(np.ptp(np.unwrap(np.angle(responses)), axis=1))
    return {
        "command": "python -m paper.measures",
        "core": SMOOTH.core,
        "wide_scales": ", ".join(f"{s:.2g}" for s in WIDE_SCALES),
        "steering": {preset: steering_errors(preset) for preset in ("paper", "area", "smooth")},
        "grid": {name: grid_errors(basis) for name, basis in GRID_STEPS.items()},
        "neighbours": {
            name: {"functions": 2 * math.prod(basis.shape), "rank": ranks(basis), "grid": grid_errors(basis)}
            for name, basis in NEIGHBOURS.items()
        },
        "footnote": {
            str(k): [round(e, 4) for e in grid_deviations(k, 17 / 7, pitches)] for k in (*THEOREM_ORDERS, 4.0)
        },
        "rank": {preset: ranks(LogRadialBasis.preset(preset)) for preset in ("paper", "area", "smooth")},
        "equivariance": equivariance_errors(),
        "theorem": {"scales": THEOREM_SCALES, "largest": float(f"{worst:.1e}")},
        "sensitivity": {
            str(k): {"turn_degrees": round(float(turn), 1), "period": round(periods[k], 3)}
            for k, turn in zip(SENSITIVITY_ORDERS, turns, strict=True)
        },
    }


# The data


def box_edges(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The first and one past the last row and column of ink brighter than a quarter of the maximum: `(N, 4)`."""
    bright = images > images.max((1, 2), keepdims=True) / 4
    found = []
    for axis in (2, 1):
        seen = bright.any(axis=axis)
        found += [seen.argmax(1), 28 - seen[:, ::-1].argmax(1)]
    return np.stack(found, 1)


def edges_within_a_pixel(dataset: str, resampler: str) -> float:
    """The share of bounding-box edges of a test part within a pixel of where the drawn scale puts them."""
    part, _ = load_part(SplitSpec(dataset, resampler=resampler), "test")
    originals = fetch(DATASETS[dataset].source).images[part.indices]
    expected = 14 + (box_edges(originals) - 14) * part.scales[:, None]
    return float((np.abs(box_edges(part.images) - expected) <= 1).mean())


def overlaps() -> tuple[float, float]:
    """Of the pairs of MNIST-scale-local-2: the shares whose boxes share a column, and whose ink shares a pixel."""
    part, _ = load_part(SplitSpec("mnist-scale-local-2"), "test")
    pool = fetch("mnist")
    ink = np.asarray(part.images.any(axis=1))
    first, last = ink.argmax(1), 40 - ink[:, ::-1].argmax(1)
    shown, spans = [], []
    for side in (0, 1):
        digits = shrink(pool.images[part.indices[:, side]], part.scales[:, side])
        inked = np.asarray(digits.any(axis=1))
        start = inked.argmax(1)
        width = 28 - inked[:, ::-1].argmax(1) - start
        place = first if side == 0 else last - width  # where the digit's ink begins in the pair
        columns = np.arange(40) - (place - start)[:, None]
        padded = np.pad(digits, ((0, 0), (0, 0), (0, 1)))
        columns = np.where((columns >= 0) & (columns < 28), columns, 28)
        shown.append(np.take_along_axis(padded, columns[:, None, :], axis=2) > 0)
        spans.append((place, place + width))
    return float((spans[0][1] > spans[1][0]).mean()), float((shown[0] & shown[1]).any((1, 2)).mean())


def measure_data() -> dict[str, Any]:
    """Every number of docs/data.md."""
    boxes, ink = overlaps()
    fields = {
        f"{alpha:g}": displacements(np.arange(2000), (28, 28), alpha, ELASTIC_SIGMA, 0) / 256
        for alpha in ELASTIC_ALPHAS
    }
    return {
        "digests": {dataset: [meta["digest"] for meta in build(dataset).values()] for dataset in DATASETS},
        "train_std": {dataset: load_split(dataset).std for dataset in DATASETS},
        "edges_within_a_pixel": {
            f"{dataset}, {resampler}": edges_within_a_pixel(dataset, resampler)
            for dataset in ("mnist-scale", "fmnist-scale")
            for resampler in RESAMPLERS
        },
        "pairs_with_overlapping_boxes": boxes,
        "pairs_with_overlapping_ink": ink,
        "elastic_rms_px": {alpha: float((field**2).mean() ** 0.5) for alpha, field in fields.items()},
        "elastic_max_px": {alpha: float(np.abs(field).max()) for alpha, field in fields.items()},
    }


# Views


def _recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def guide_numbers() -> dict[str, Any]:
    """The guide's numbers as they were measured."""
    return _recorded("guide/maths.json")


def trained_numbers() -> dict[str, Any]:
    """What was measured of trained layers."""
    return _recorded("guide/trained.json")


def guide_ranks() -> str:
    """How many of the functions are independent on the window of 7 x 7."""
    rank = guide_numbers()["rank"]
    rows = [(f"`{name}`", *found.values()) for name, found in rank.items()]
    return table([("singular values above", *rank["paper"]), *rows])


def guide_grid() -> str:
    """The steering error of small blobs, from the paper's sampling to ours."""
    steps = guide_numbers()["grid"]
    rows = [(name, *(f"{100 * error:.1f} %" for error in errors.values())) for name, errors in steps.items()]
    return table([("window", *(window.replace("->", "→") for window in steps["`paper`"])), *rows])


def guide_neighbours() -> str:
    """Rank and steering error of what was weighed for the preset `smooth`."""
    rows: list[tuple[object, ...]] = [("set", "real functions", "rank, 1e-2", "rank, 1e-3", "steering error")]
    for name, found in guide_numbers()["neighbours"].items():
        errors = [100 * e for e in found["grid"].values()]
        span = f"{min(errors):.1f} to {max(errors):.1f} %"
        rows.append((name, found["functions"], found["rank"]["0.01"], found["rank"]["0.001"], span))
    return table(rows)


def guide_equivariance() -> str:
    """How far fresh layers are from scale equivariance, and what that costs."""
    head = ("fresh layer, kernel 7", "scales", "taps", *(f"enlarged by {s:g}" for s in MOVES))
    rows = [
        (name, row["scales"], row["taps"], *(f"{error:.2f}" for error in row["errors"]))
        for name, row in guide_numbers()["equivariance"].items()
    ]
    return table([head, *rows])


def guide_trained() -> str:
    """The same of first layers of networks that were trained, and how often the networks err."""
    moves = [f"{when}, enlarged by {s:g}" for when in ("fresh", "trained") for s in MOVES]
    rows: list[tuple[object, ...]] = [("first layer, kernel 7", "wrong digits", *moves)]
    for name, row in trained_numbers()["layers"].items():
        rows.append((name, f"{100 * row['digits']:.1f} %", *(f"{e:.2f}" for e in row["fresh"] + row["trained"])))
    return table(rows)


def equivariance_share(when: str) -> str:
    """The default layer's error as a share of that of a plain one, over the enlargements, in words."""
    if when == "trained":
        layers = trained_numbers()["layers"]
        ours, plain = layers[STEERED]["trained"], layers[PLAIN]["trained"]
    else:
        layers = guide_numbers()["equivariance"]
        ours, plain = layers["`smooth`, wide scales"]["errors"], layers[PLAIN]["errors"]
    shares = [a / b for a, b in zip(ours, plain, strict=True)]
    return f"{min(shares):.2f} to {max(shares):.2f}"


def guide_footnote() -> str:
    """The deviation from Theorem 1 on pixel grids, by order and upsampling."""
    rows = [(order, *(f"{100 * e:.1f} %" for e in row)) for order, row in guide_numbers()["footnote"].items()]
    return table([("order", *(f"{u} x" for u in UPSAMPLING)), *rows])


def guide_steering() -> str:
    """The steering error, by window, of point and area sampling."""
    steering = guide_numbers()["steering"]
    rows = [("window", *(window.replace("->", "→") for window in steering["paper"]))]
    for name, label in (("paper", "point (`paper`)"), ("area", "area (`area`)"), ("smooth", "`smooth`, below")):
        rows.append((label, *(f"{100 * error:.1f} %" for error in steering[name].values())))
    return table(rows)


def steering_span(preset: str) -> str:
    """The smallest and the largest steering error of windows of 7 pixels, in words."""
    errors = [100 * e for windows, e in guide_numbers()["steering"][preset].items() if windows.startswith("7 ")]
    return f"{min(errors):.0f} to {max(errors):.0f} %"


def data_sources() -> str:
    """The originals: their releases, and the digest that proves each."""
    rows = [("source", "release", "pool, SHA-256", "")]
    for name, source in SOURCES.items():
        for release, known in source.releases.items():
            rows.append((name, release, f"`{known.pool}`", known.remark or "used"))
    return table(rows, left=4)


def data_packages() -> str:
    """Originals that come as packages: the digest that proves each."""
    rows = [("source", "release", "pool, SHA-256")]
    for name, package in PACKAGES.items():
        rows.append((name, package.identity.release, f"`{package.identity.digest}`"))
    return table(rows, left=3)


def data_sized() -> str:
    """The datasets of sizes never seen in training."""
    head = (
        "name",
        "image",
        "classes",
        "objects for training / validation / test",
        "sizes",
        "training sizes by default",
    )
    rows = [head]
    for name, own in SIZED_DATASETS.items():
        image = f"{own.canvas} x {own.canvas}{', colour' if own.in_chans == 3 else ''}"
        span = f"{own.sizes[0]:g} to {own.sizes[-1]:g}{' px' if own.sizes[0] > 8 else ''}, {len(own.sizes)} steps"
        low, high = own.train_sizes
        objects = " / ".join(f"{count:,}" for count in own.counts)
        trained = f"{low:g}" if low == high else "all"
        rows.append((f"`{name}`", image, str(len(own.classes)), objects, span, trained))
    return table(rows, left=2)


def data_digests() -> str:
    """The splits of each dataset, and the standard deviation of training pixels."""
    measured = _recorded("data/measured.json")
    rows = [("dataset", "splits 0 to 5, first digits of SHA-256", "standard deviation of training pixels")]
    for dataset, digests in measured["digests"].items():
        shown = " ".join(f"`{digest[:12]}`" for digest in digests)
        rows.append((dataset, shown, f"{measured['train_std'][dataset]:.4f}"))
    return table(rows, left=2)


def data_edges() -> str:
    """How often the ink ends where its drawn scale says."""
    rows = [
        (name, f"{100 * share:.1f} %")
        for name, share in _recorded("data/measured.json")["edges_within_a_pixel"].items()
    ]
    return table([("dataset, resampler", "edges of the ink within a pixel of the drawn scale"), *rows])


def data_overlaps() -> str:
    """How often the two digits of a pair meet."""
    measured = _recorded("data/measured.json")
    rows = [("mnist-scale-local-2", "share")]
    for what, key in (("bounding boxes share a column", "boxes"), ("ink shares a pixel", "ink")):
        rows.append((what, f"{100 * measured[f'pairs_with_overlapping_{key}']:.1f} %"))
    return table(rows)


def data_displacements() -> str:
    """How far elastic deformation moves a pixel."""
    measured = _recorded("data/measured.json")
    rows = [("elastic, alpha", "displacement, rms", "largest in 2,000 images")]
    for alpha, rms in measured["elastic_rms_px"].items():
        rows.append((alpha, f"{rms:.2f} px", f"{measured['elastic_max_px'][alpha]:.1f} px"))
    return table(rows)


VIEWS = {
    "guide_numbers": guide_numbers,
    "guide_ranks": guide_ranks,
    "guide_equivariance": guide_equivariance,
    "guide_trained": guide_trained,
    "trained_numbers": trained_numbers,
    "equivariance_share": equivariance_share,
    "guide_grid": guide_grid,
    "guide_neighbours": guide_neighbours,
    "guide_footnote": guide_footnote,
    "guide_steering": guide_steering,
    "steering_span": steering_span,
    "data_sources": data_sources,
    "data_packages": data_packages,
    "data_sized": data_sized,
    "data_digests": data_digests,
    "data_edges": data_edges,
    "data_overlaps": data_overlaps,
    "data_displacements": data_displacements,
}


def resamplers_sheet(part: Part) -> Any:
    """Three images of MNIST, shrunk by each resampler to six sizes."""
    scales = np.array([1, 0.8, 0.65, 0.5, 0.4, 0.3], np.float32)
    rows = [(index, resampler) for index in part.indices.reshape(-1)[:3] for resampler in RESAMPLERS]
    originals = fetch("mnist").images
    images = [shrink(originals[[index] * len(scales)], scales, resampler) for index, resampler in rows]
    captions = [f"{resampler} {scale:.2f}" for _, resampler in rows for scale in scales]
    return sheets.contact_sheet(np.concatenate(images), captions, columns=len(scales))


def elastic_sheet(part: Part) -> Any:
    """The three largest images under elastic deformation of every strength, for three widths."""
    large = np.argsort(-part.scales.reshape(len(part.labels), -1).min(1), kind="stable")[:3]
    fields = [(sigma, alpha) for sigma in (3.0, 4.0, 6.0) for alpha in ELASTIC_ALPHAS]
    images = [distort(part.images[large], alpha, sigma=sigma, indices=large) for sigma, alpha in fields]
    captions = [f"alpha={alpha:g} sigma={sigma:g}" for sigma, alpha in fields for _ in large]
    return sheets.contact_sheet(np.concatenate(images), captions, columns=len(ELASTIC_ALPHAS) * len(large))


def main() -> None:
    """Measure again, and draw the sheets of images that docs/data.md shows."""
    for path, measure in (
        ("guide/maths.json", measure_guide),
        ("guide/trained.json", measure_trained),
        ("data/measured.json", measure_data),
    ):
        numbers = measure()
        write_atomically(RESULTS / path, (json.dumps(numbers, indent=1) + "\n").encode())
    for dataset in DATASETS:
        sheets.draw(SplitSpec(dataset), "train", RESULTS / "data" / f"{dataset}.png")
    for dataset in SIZED_DATASETS:
        sheets.draw(SizedSpec(dataset), "test", RESULTS / "data" / f"{dataset}.png")
    part = load_part(SplitSpec(), "test")[0]
    sheets.save(resamplers_sheet(part), RESULTS / "data" / "resamplers.png")
    sheets.save(elastic_sheet(part), RESULTS / "data" / "elastic.png")


if __name__ == "__main__":
    main()
