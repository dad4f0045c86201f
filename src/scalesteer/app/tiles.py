"""Pictures of any size through a network, in tiles: with the numbers of the whole picture, in a bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer.channels import ScaleChannels
from scalesteer.models import network_of
from scalesteer.models.pooled import BlurPool2d, PooledNetwork
from scalesteer.nn import twin

MOST_PIXELS = 1 << 20  # that a network looks at at once: half a gigabyte for the widest of `create_model`
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
    reach = find_reach(network)
    if reach is None:
        return model
    parts = twin(network)
    parts.features = Tiles(network.features, network.stride, reach)  # type: ignore[assignment]
    if not isinstance(model, ScaleChannels):
        return parts
    looking = twin(model)
    looking.net = parts
    return looking


class Tiles(nn.Module):
    """Features of an image, computed tile by tile, which are put side by side.

    Args:
        features: What computes them; evaluated, so that no layer mixes the places of an image.
        stride: Pixels from one place of the maps to the next.
        reach: Pixels beyond its own `stride` that a place depends on, on each side; a multiple of `stride`.

    Shape:
        `(B, C, H, W)` -> `(B, channels, H // stride, W // stride)`
    """

    def __init__(self, features: nn.Module, stride: int, reach: int) -> None:
        super().__init__()
        self.features, self.stride, self.reach = features, stride, reach

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if height * width <= MOST_PIXELS:
            return self.features(x)  # type: ignore[no-any-return]
        inside = (math.isqrt(MOST_PIXELS) - 2 * self.reach) // self.stride * self.stride
        found: Tensor | None = None
        for top, low, down in self._cut(height, max(inside, self.stride)):
            for left, start, right in self._cut(width, max(inside, self.stride)):
                maps = self.features(x[..., low:down, start:right])
                if found is None:
                    shape = height // self.stride, width // self.stride
                    found = maps.new_empty(*maps.shape[:2], *shape)
                here = found[..., top // self.stride :, left // self.stride :]
                part = maps[..., (top - low) // self.stride :, (left - start) // self.stride :]
                rows, columns = (min(a, b) for a, b in zip(here.shape[-2:], part.shape[-2:], strict=True))
                here[..., :rows, :columns] = part[..., :rows, :columns]  # what reaches too far is overwritten later
        return x if found is None else found

    def _cut(self, length: int, inside: int) -> Iterator[tuple[int, int, int]]:
        """Along one axis: where the inside of each tile begins, where the tile does, and where it ends."""
        for begin in range(0, length // self.stride * self.stride, inside):
            end = begin + inside + self.reach
            yield begin, max(0, begin - self.reach), length if length - end < self.stride else end


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
