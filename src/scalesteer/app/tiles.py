"""Pictures of any size through a network, in tiles: with the numbers of the whole picture, in a bounded memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer.answers import read
from scalesteer.app.pictures import PictureError
from scalesteer.channels import ScaleChannels
from scalesteer.models import network_of
from scalesteer.models.pooled import BlurPool2d, PooledNetwork
from scalesteer.nn import twin

MOST_PIXELS = 1 << 20  # that a network looks at at once: half a gigabyte for the widest of `create_model`
MOST_ENLARGED = 110_000_000  # of the largest channel: three gigabytes with what it is computed from
MOST_SCORES = 1 << 25  # of a piece in the largest channel, if the channel itself is looked at in tiles
ALIGNED = 100  # a piece of so many pixels has whole ones in channels of two decimals
PROBES = (64, 128, 256, 512)  # pixels of the images on which the window of a network is looked for


def tiled(model: nn.Module, height: int, width: int) -> nn.Module:
    """A model for pictures of this size: it looks at large ones in tiles, and shares the weights of the other.

    The tiles overlap by the window of the network, so that the maps of features are those of the whole picture, in
    every channel of scale. Whatever makes logits or maps of them is done once, for all. A network of another kind than
    those for any size, or whose window is the whole picture, is returned as it is.
    """
    largest = max(model.scales) if isinstance(model, ScaleChannels) else 1.0
    network = network_of(model)
    if height * width * max(1.0, largest) ** 2 <= MOST_PIXELS or not isinstance(network, PooledNetwork):
        return model
    if height * width * largest**2 > MOST_ENLARGED:
        many = f"{height * width * largest**2 / 1e6:,.0f} megapixels"
        raise PictureError(
            f"the channel of scale {largest:.3g} would enlarge it to {many}, and the limit is "
            f"{MOST_ENLARGED // 10**6}: give smaller --channels, or cut it into pieces."
        )
    reach = find_reach(network)
    if reach is None:
        return model
    parts = twin(network)
    parts.features = Tiles(_Prepared(network), network.stride, reach)  # type: ignore[assignment]
    parts.prepare = lambda x: x  # type: ignore[method-assign]
    if not isinstance(model, ScaleChannels):
        return parts
    looking = twin(model)
    looking.net = parts
    return looking


class _Prepared(nn.Module):
    """The features of a network, from images that are not prepared yet: that takes copies."""

    def __init__(self, network: PooledNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network.features(self.network.prepare(x))  # type: ignore[no-any-return]


class Tiles(nn.Module):
    """Features of an image, computed tile by tile, which are put side by side.

    Args:
        features: What computes them; evaluated, so that no layer mixes the places of an image.
        stride: Pixels from one place of the maps to the next, or a number of them after which all repeats itself.
        reach: Pixels beyond its own `stride` that a place depends on, on each side; a multiple of `stride`.
        places: Of the maps in one `stride`.

    Shape:
        `(B, C, H, W)` -> `(B, channels, H * places // stride, W * places // stride)`
    """

    def __init__(self, features: nn.Module, stride: int, reach: int, places: int = 1) -> None:
        super().__init__()
        self.features, self.stride, self.reach, self.places = features, stride, reach, places

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if height * width <= MOST_PIXELS:
            return self.features(x)  # type: ignore[no-any-return]
        inside = (math.isqrt(MOST_PIXELS) - 2 * self.reach) // self.stride * self.stride
        found: Tensor | None = None

        def place(pixels: int) -> int:
            return pixels * self.places // self.stride

        for top, low, down in self._cut(height, max(inside, self.stride)):
            for left, start, right in self._cut(width, max(inside, self.stride)):
                maps = self.features(x[..., low:down, start:right])
                if found is None:
                    found = maps.new_empty(*maps.shape[:2], place(height), place(width))
                here = found[..., place(top) :, place(left) :]
                part = maps[..., place(top - low) :, place(left - start) :]
                rows, columns = (min(a, b) for a, b in zip(here.shape[-2:], part.shape[-2:], strict=True))
                here[..., :rows, :columns] = part[..., :rows, :columns]  # what reaches too far is overwritten later
        return x if found is None else found

    def _cut(self, length: int, inside: int) -> Iterator[tuple[int, int, int]]:
        """Along one axis: where the inside of each tile begins, where the tile does, and where it ends."""
        for begin in range(0, max(1, length // self.stride * self.stride), inside):
            end = begin + inside + self.reach
            yield begin, max(0, begin - self.reach), length if length - end < self.stride else end


class Piece(NamedTuple):
    """A part of a picture along one axis: what is looked at, and what of it is kept."""

    low: int
    high: int
    begin: int
    end: int


def cut(model: nn.Module, height: int, width: int) -> tuple[nn.Module, list[tuple[Piece, Piece]]]:
    """What looks at a large picture in the place of a model that makes maps as it is, and in which pieces of it.

    They overlap by the window of the network, as it is in the smallest channel, and lie so that the pixels of most
    channels do as in the whole picture. Of a network whose window is the whole picture, maps are those of the pieces.
    In scale channels pieces are larger, since the overlap is, and each channel of them is looked at in tiles.
    """
    scaled = isinstance(model, ScaleChannels)
    scales, multiple = (model.scales, model.multiple) if isinstance(model, ScaleChannels) else ((1.0,), 1)
    side = int(math.isqrt(MOST_PIXELS) / max(1.0, *scales))
    if height * width <= side**2:
        return model, [(Piece(0, height, 0, height), Piece(0, width, 0, width))]
    reach = _find_window(model, math.lcm(32, multiple))
    if isinstance(model, ScaleChannels) and reach is not None and (looking := _in_tiles(model, reach)) is not None:
        most = max(MOST_PIXELS, MOST_SCORES // network_of(model).task.num_classes)
        model, side = looking, int(math.isqrt(most) / max(1.0, *scales))
    step = ALIGNED * multiple if scaled and ALIGNED * multiple <= side else math.lcm(32, multiple)
    margin = side // 4 if reach is None else math.ceil((reach + 2) / min(1.0, *scales))
    margin = min(side, math.ceil(margin / step) * step)
    inside = max(step, (side - 2 * margin) // step * step)

    def pieces(length: int) -> list[Piece]:
        begins = range(0, length, inside)
        ends = [min(length, begin + inside) for begin in begins]
        return [Piece(max(0, b - margin), min(length, e + margin), b, e) for b, e in zip(begins, ends, strict=True)]

    return model, list(itertools.product(pieces(height), pieces(width)))


@torch.no_grad()
def _in_tiles(model: ScaleChannels, reach: int) -> ScaleChannels | None:
    """A model that looks at each channel in tiles; None if the places of its maps do not divide the image evenly."""
    network, unit = network_of(model), math.lcm(32, model.multiple)
    side = math.ceil(PROBES[0] / unit) * unit
    maps: object = network(next(network.parameters()).new_zeros(1, network.task.in_chans, side, side))
    if not isinstance(maps, Tensor) or (side % maps.shape[-1] and maps.shape[-1] % side):
        return None
    tiles = Tiles(network, unit, math.ceil(max(0, reach) / unit) * unit, maps.shape[-1] * unit // side)
    vars(tiles).update(task=network.task, arguments=network.arguments)
    looking = twin(model)
    looking.net = tiles
    return looking


@torch.no_grad()
def _find_window(model: nn.Module, multiple: int) -> int | None:
    """How many pixels beyond its own a place of a network's maps depends on; None if on all of a large image."""
    network, output = network_of(model), model.output if isinstance(model, ScaleChannels) else None
    parameter, task = next(network.parameters()), network.task
    for side in PROBES:
        side = math.ceil(side / multiple) * multiple
        x = torch.zeros(1, task.in_chans, side, side, device=parameter.device, dtype=parameter.dtype)
        x[..., side // 2, side // 2] = math.nan
        touched = read(network(x), output, x).isnan().any(1)[0]
        stride: float = side / touched.shape[-1]
        rows: list[list[float]] = (stride * touched.nonzero()).tolist()
        if not rows:
            return None
        first, last = min(map(min, rows)), max(map(max, rows)) + stride
        if first > 0 and last < side:
            return math.ceil(max(side // 2 - first, last - side // 2))
    return None


@torch.no_grad()
def find_reach(network: PooledNetwork) -> int | None:
    """How many pixels beyond its own a place of the last maps depends on; None if on all of a large image.

    Found by a pixel that is no number: so is all that depends on it, whatever the weights.
    """
    device, stride = network.input_std.device, network.stride
    for side in PROBES:
        middle = side // stride // 2
        x = torch.zeros(1, network.in_chans, side, side, device=device, dtype=network.input_std.dtype)
        x[..., middle * stride : (middle + 1) * stride, middle * stride : (middle + 1) * stride] = math.nan
        with _plain_filters(network):
            touched = network.features(x).isnan().any(1)[0].nonzero()
        first, last = int(touched.min()), int(touched.max())
        if first > 0 and last < side // stride - 1:
            return max(middle - first, last - middle) * stride
    return None


@contextmanager
def _plain_filters(network: nn.Module) -> Iterator[None]:
    """Without products of frequencies or by matrices, which mix all places before they are apart again."""
    steered = [(module, module.backend) for module in network.modules() if hasattr(module, "backend")]
    blurs = [module for module in network.modules() if isinstance(module, BlurPool2d)]
    hooks = [blur.register_forward_hook(lambda _, x, y: F.avg_pool2d(x[0], 4, 2, 1)) for blur in blurs]  # its window
    try:
        for module, _ in steered:
            module.backend = "direct"  # type: ignore[assignment]
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, backend in steered:
            module.backend = backend
