"""Random resizing, mirroring and moving of training images: on their device, with shapes that never change.

A step that does this can be recorded as a CUDA graph. All three are one resampling along the rows and one along the
columns of an image, each the product with a matrix of its own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from scalesteer.resize import triangle, weigh


@dataclass(frozen=True)
class Augmentation:
    """Changes every image of a batch `(B, C, H, W)` at random, with torch's generator of the images' device.

    >>> Augmentation(resize=(0.5, 2.0))(torch.rand(8, 1, 28, 28)).shape
    torch.Size([8, 1, 28, 28])
    """

    resize: tuple[float, float] = (1.0, 1.0)  # factors, drawn evenly on a logarithmic scale between the two
    flip: bool = False  # mirror every other image, left to right
    shift: int = 0  # move by up to so many whole pixels, up or down and left or right
    mirrored: bool = False  # continue images beyond their border as a mirror would, instead of black
    share: float = 1.0  # of the images that are resized; the others keep their size
    antialias: bool = True  # average what becomes one pixel; without it, as images that were shrunk by bilinear zoom

    def __call__(self, x: Tensor) -> Tensor:
        chances = torch.rand(4, len(x), device=x.device)
        low, high = map(math.log, self.resize)
        factors = torch.exp(low + (high - low) * chances[0] / self.share)
        factors = factors.where(chances[0] < self.share, 1.0)
        turned = torch.where(chances[1] < 0.5, -factors, factors) if self.flip else factors
        moves = torch.floor((2 * self.shift + 1) * chances[2:]) - self.shift  # (2, B)
        smallest = min(self.resize[0], 1.0)
        return resample(x, torch.stack([factors, turned]), moves, smallest, self.shift, self.mirrored, self.antialias)


def resample(
    x: Tensor, factors: Tensor, moves: Tensor, smallest: float, shift: int, mirrored: bool, antialias: bool = True
) -> Tensor:
    """Resize images `(B, C, H, W)` about their centres, by default without aliasing, then move them.

    `factors` and `moves`, `(2, B)`, are along rows (moves: down) and columns (to the right); a negative factor mirrors.
    No factor is smaller than `smallest`, no move longer than `shift`.
    """
    rows, columns = (
        _matrices(factors[i], moves[i], x.shape[2 + i], smallest, shift, mirrored, antialias)[:, None] for i in (0, 1)
    )  # (B, 1, H, H) and (B, 1, W, W)
    return rows @ x @ columns.mT


def _matrices(
    factors: Tensor, moves: Tensor, size: int, smallest: float, shift: int, mirrored: bool, antialias: bool
) -> Tensor:
    """What resamples a line of `size` pixels: `(B, size, size)`, from pixels of the image to those of the result."""
    centre = (size - 1) / 2
    pixels = torch.arange(size, device=factors.device)
    factors, moves = factors[:, None], moves[:, None]
    places = (pixels - centre - moves) / factors + centre  # (B, size), where each pixel of the result looks
    # Of the triangle: a pixel of the image or, without aliasing, of the result, if that is larger.
    width = (1 / factors.abs()).clamp(min=1) if antialias else torch.ones_like(factors)
    # Weights also of the pixels beyond the border, so that what is seen there counts.
    beyond = math.ceil((centre + shift) / smallest - centre + max(1.0, 1 / smallest))
    lines = torch.arange(-beyond, size + beyond, device=factors.device)
    weights = weigh(places, lines, triangle, width[..., None])  # (B, size, size + 2 beyond)
    if not mirrored:
        return weights[..., beyond : beyond + size]
    lines = lines % (2 * size)  # a b c | c b a | a b c ...
    lines = torch.minimum(lines, 2 * size - 1 - lines)
    return weights @ (lines[:, None] == pixels).to(weights)
