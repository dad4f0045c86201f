"""Modules applied to images of several sizes side by side, so that batch normalisation sees them as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn


def at_sizes(module: nn.Module, images: Sequence[Tensor]) -> list[Tensor]:
    """Apply a module to images of several sizes side by side; batch normalisation sees all of them as one batch.

    An `nn.Sequential` is applied layer by layer. A module of another kind that holds batch normalisation says how its
    parts are applied with a method `at_sizes(images)`, which calls this function for each. Everything else is applied
    to one image after the other. Hooks of layers are called; those of modules that are taken apart are not.

    Args:
        module: Any module.
        images: Batches `(B, C, H, W)` with the same B and C, or features of such, `(B, C)` or `(B, C, N)`.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        >>> [y.shape[-1] for y in at_sizes(net, [torch.rand(4, 1, 8, 8), torch.rand(4, 1, 5, 5)])]
        [6, 3]
    """
    images = list(images)
    if hasattr(module, "at_sizes"):
        return list(module.at_sizes(images))  # type: ignore[operator]
    if is_sequential(module):
        for layer in module:  # not children(), which leaves out one that comes twice
            images = at_sizes(layer, images)
        return images
    if not isinstance(module, nn.modules.batchnorm._BatchNorm) or len(images) == 1:
        return [module(x) for x in images]
    if images[0].is_cuda and images[0].ndim == 4:
        return _normalise_rows(module, images)
    pixels = [x.flatten(2) if x.ndim > 2 else x[..., None] for x in images]  # (B, C, H W) each
    joined = torch.cat(pixels, dim=2)
    joined = module(joined if images[0].ndim < 4 else joined[..., None]).flatten(2)
    # Copies: the next layer may work in place, which views of one tensor do not allow.
    parts = joined.split([x.shape[2] for x in pixels], dim=2)
    return [part.reshape(x.shape).clone() for part, x in zip(parts, images, strict=True)]


def _normalise_rows(module: nn.Module, images: list[Tensor]) -> list[Tensor]:
    """Batch normalisation of all pixels, each a row of its channels; the result is laid out so (channels_last).

    A GPU sums rows of pixels with all its processors, but each plane of a channel with only one of them.
    """
    pixels = [x.permute(0, 2, 3, 1) for x in images]  # (B, H, W, C) each
    joined = torch.cat([x.flatten(0, 2) for x in pixels])
    joined = module(joined[None, :, None].permute(0, 3, 1, 2))  # (1, C, all pixels, 1)
    rows = joined.permute(0, 2, 3, 1).flatten(0, 2).split([x.shape[:3].numel() for x in pixels])
    return [part.unflatten(0, x.shape[:3]).permute(0, 3, 1, 2).clone() for part, x in zip(rows, pixels, strict=True)]


def is_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module only applies its parts one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
