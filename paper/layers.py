"""What first layers do: which scale wins where, how central their filters are, and what resizing would lose.

``python -m paper.layers`` measures centrality and entanglement again, of the networks of split 0 in runs/, and keeps
the means in results/figures/layers.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from paper import RESULTS, grids
from scalesteer import harmonics
from scalesteer.app import load_model
from scalesteer.baselines import LocallyScaleInvariantConv2d
from scalesteer.datasets import ImageSet
from scalesteer.files import write_atomically
from scalesteer.harmonics import PAPER_SCALES
from scalesteer.models import network_of
from scalesteer.models.network import Network
from scalesteer.nn import ScaleSteerableConv2d
from scalesteer.testing import Image, two_blobs

Array = NDArray[np.float64]


def unit_filters(layer: nn.Module) -> Array:
    """The filters of a layer at scale 1, first input channel: `(C_out, n, n)`."""
    return np.asarray(enlarged(layer, 1.0).cpu().numpy())


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
            options: dict[str, Any] = {
                "bias": False,
                "dtype": torch.float64,
                "scales": (scale,),
                "antialias": layer.antialias,
            }
            resized = LocallyScaleInvariantConv2d(1, len(weight), k, padding="same", **options)
            resized.weight.copy_(weight[:, None])
            found = resized(shown)[0]
    middle = slice(size // 2 - reach, size // 2 + reach + 1)
    return float((found[:, middle, middle] - expected).norm() / expected.norm())


def resizing_layers(filters: int = 64) -> dict[str, ScaleSteerableConv2d | LocallyScaleInvariantConv2d]:
    """The layers that :func:`paper.guide.plot_resizing` compares, with fixed random filters."""
    random = torch.Generator().manual_seed(0)
    layers: dict[str, ScaleSteerableConv2d | LocallyScaleInvariantConv2d] = {}
    with torch.no_grad():
        for name, preset in (("steered, point sampling", "paper"), ("steered, area sampling", "area")):
            layer = ScaleSteerableConv2d(1, filters, scales=PAPER_SCALES, basis=preset, dtype=torch.float64)
            layer.coefficients.normal_(generator=random)
            layers[name] = layer
        smooth = torch.from_numpy(unit_filters(layer))[:, None]
        rough = torch.randn(smooth.shape, generator=random, dtype=torch.float64)
        for name, weight, antialias in (
            ("input resized, same filters", smooth, False),
            ("input resized with anti-aliasing, same filters", smooth, True),
            ("input resized, rough filters", rough, False),
        ):
            resized = LocallyScaleInvariantConv2d(1, filters, padding="same", dtype=torch.float64, antialias=antialias)
            resized.weight.copy_(weight)
            layers[name] = resized
    return layers


def measure(networks: Mapping[str, Network]) -> dict[str, Any]:
    """Means over the filters of first layers, by network: how central they are, and how much like a move scaling is."""
    scale = PAPER_SCALES[-1]
    found: dict[str, Any] = {"centrality": {}, "entanglement": {"scale": round(scale, 4)}}
    for name, network in networks.items():
        (offset, share), (move, gain) = centrality(unit_filters(network.first)), entanglement(network.first, scale)
        found["centrality"][name] = {"offset": round(float(offset.mean()), 2), "share": round(float(share.mean()), 2)}
        found["entanglement"][name] = {"move": round(float(move.mean()), 2), "gain": round(float(gain.mean()), 2)}
    return found


def main(runs: Path = Path("runs")) -> None:
    """Measure the networks of the paper's comparison, and keep what was found."""
    names = {method: grids.configuration(method).run.name for method in ("SS-CNN", "LocScaleInv-CNN")}
    found = measure({method: network_of(load_model(runs / name)) for method, name in names.items()})
    kept = {"source": f"python -m paper.layers; {', '.join(names.values())}", **found}
    write_atomically(RESULTS / "figures" / "layers.json", (json.dumps(kept, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
