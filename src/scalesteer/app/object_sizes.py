"""Whether the objects in pictures have sizes that training showed, and what to do where they have others."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from scalesteer.app.suggest import LARGEST_CHANNEL, find_objects
from scalesteer.channels import ScaleChannels
from scalesteer.instances import Region, label_regions
from scalesteer.models import list_options, network_of
from scalesteer.models.network import Network

MOST_MEASURED = 32  # of the pictures that are asked about
LEAST_SURE = 0.25  # of these must show objects for sure
MARGIN = 1.1  # so much beyond the sizes of training is not worth a word
NEAR_END = 1.05  # a size so near the last channel's is of an object that may be beyond it
MOST_REGIONS, MOST_SIDE = 64, 64  # of a picture, and pixels along one of them
OCTAGON = math.cos(math.pi / 8)  # what fits into a disc, relative to its radius


def sample_every(pictures: Iterable[Any]) -> int:
    """Every how many pictures one is measured."""
    return max(1, math.ceil(operator.length_hint(pictures) / MOST_MEASURED))


def measure_picture(pixels: NDArray[np.uint8]) -> float:
    """The size of what stands out in a picture `(H, W)` or `(3, H, W)`, in its pixels; 0 if that is not sure."""
    sides, sure = find_objects(pixels if pixels.ndim == 3 else pixels[None])
    return float(np.median(sides)) if sure else 0.0


def compare(model: nn.Module, sizes: Sequence[float]) -> list[str]:
    """A sentence if most pictures show larger, or smaller, objects than training and the scale channels do.

    Args:
        model: What they were shown to; its task says which sizes training showed, or nothing is said.
        sizes: Of the objects in each picture that was measured, in pixels as the network sees them; 0 if not sure.
    """
    trained, found = network_of(model).task.object_sizes, np.array([size for size in sizes if size])
    if trained is None or len(found) < max(1, LEAST_SURE * len(sizes)):
        return []
    scales = model.scales if isinstance(model, ScaleChannels) else (1.0,)
    smallest, largest = trained[0] / max(scales), trained[1] / min(scales)
    for kind, beyond in (("larger", found > MARGIN * largest), ("smaller", found < smallest / MARGIN)):
        if 2 * beyond.sum() > len(found):
            size = float(np.median(found[beyond]))
            known = "training and the scale channels cover" if isinstance(model, ScaleChannels) else "training showed"
            return [
                f"{beyond.sum():,} of {len(found):,} pictures that were measured show objects {kind} than {known}:"
                f" about {size:.3g} pixels as the network sees them, not {smallest:.3g} to {largest:.3g};"
                f" {_advise(model, trained, scales, size)}"
            ]
    return []


def _advise(model: nn.Module, trained: tuple[float, float], scales: Sequence[float], size: float) -> str:
    """What to do for objects of this size."""
    network = network_of(model)
    train = "train at such sizes, too" + (" (--resize)" if isinstance(network, Network) else "")
    # In half octaves, to where the objects have a size from the middle of training.
    steps = min(round(2 * math.log2(math.sqrt(trained[0] * trained[1]) / size)), round(2 * math.log2(LARGEST_CHANNEL)))
    there = {round(scale, 2) for scale in scales}
    wanted = there | {round(2 ** (step / 2), 2) for step in range(min(steps, 0), max(steps, 0) + 1)}
    if wanted == there or "channels" not in list_options(network.arguments["name"]):
        return train
    return f"try --channels {' '.join(f'{scale:g}' for scale in sorted(wanted))}, or {train}"


def find_end(model: nn.Module, size: float) -> float | None:
    """The size of the model's last channel, if it is this one and not that of training."""
    if not isinstance(model, ScaleChannels):
        return None
    shift, power = (0.0, 1.0) if model.calibration is None else model.calibration.size  # of sizes, by the fitted join
    ends = [math.exp(shift) * scale**-power for scale in (model.scales[-1], model.scales[0])]
    ends = [end for end in ends if abs(math.log(end)) > math.log(NEAR_END)]
    near = [end for end in ends if (size / end if end > 1 else end / size) > 1 / NEAR_END]
    return near[0] if near else None


def remark_ends(ends: Sequence[float | None], many: str) -> list[str]:
    """Sentences on pictures whose objects have the size of the last channel; `many` says of how many pictures."""
    found = list[str]()
    for end in sorted({end for end in ends if end is not None}):
        last, beyond = ("largest", "larger") if end > 1 else ("smallest", "smaller")
        found.append(
            f"{ends.count(end):,} {many}: the {last} size that the channels cover, {end:.3g}, was "
            f"found; objects may be {beyond}: try --channels with one more size"
        )
    return found


def measure_regions(image: NDArray[np.int32], regions: Sequence[Region]) -> float:
    """The usual diameter, in pixels, of what :func:`.instances.find_regions` found; 0 if that is not sure.

    Each region counts with the largest disc in it, after its holes are filled: that is one object where several touch,
    and what a ring surrounds. Specks do not count, nor what the border cuts off: if that is most, nothing is sure.
    """
    sizes, area, (height, width) = list[float](), 0, image.shape
    some = range(1, len(regions) + 1, math.ceil(len(regions) / MOST_REGIONS) or 1)
    for number in some:
        one = regions[number - 1]
        top, left = max(0, math.floor(one.row) - one.height), max(0, math.floor(one.column) - one.width)
        near = image[top : top + 2 * one.height + 2, left : left + 2 * one.width + 2] == number
        rows, columns = np.flatnonzero(near.any(1)), np.flatnonzero(near.any(0))
        if top + rows[0] and left + columns[0] and top + rows[-1] < height - 1 and left + columns[-1] < width - 1:
            sizes.append(_find_disc(near[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]))
            area += one.area
    if not sizes or 2 * area < sum(regions[number - 1].area for number in some):
        return 0.0
    return float(np.median([size for size in sizes if 4 * size > max(sizes)]))


def _find_disc(inside: NDArray[np.bool_]) -> float:
    """The diameter of the largest disc in a region, whose holes and narrow gaps are filled."""
    factor = math.ceil(max(inside.shape) / MOST_SIDE)
    region = F.pad(torch.from_numpy(inside[::factor, ::factor]).float(), (2, 2, 2, 2))[None]
    rows, columns, number = label_regions((_grow(region)[0] == 0).numpy())
    outside, corner = torch.zeros_like(region), number == number[0]
    outside[0, rows[corner], columns[corner]] = 1
    outside = _grow(outside)
    steps = 0
    while not outside.all():  # which grows inwards, by octagons
        across = torch.maximum(F.max_pool2d(outside, (1, 3), 1, (0, 1)), F.max_pool2d(outside, (3, 1), 1, (1, 0)))
        outside = _grow(outside) if steps % 2 else across
        steps += 1
    return float((2 * steps - 0.5) * factor / OCTAGON)  # a width of 2 steps or one less


def _grow(x: Tensor) -> Tensor:
    grown: Tensor = F.max_pool2d(x, 3, 1, 1)
    return grown
