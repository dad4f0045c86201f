"""Random changes of training images: on their device, with shapes that never change.

A step that does this can be recorded as a CUDA graph. Resizing, mirroring and moving are one resampling along the rows
and one along the columns of an image, each the product with a matrix of its own; so is the blur.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.app.settings import Beyond
from scalesteer.resize import border_colour, triangle, weigh

REACH = 3  # of a blur, in its standard deviations


@dataclass(frozen=True)
class Augmentation:
    """Changes every image of a batch `(B, C, H, W)` at random, with torch's generator of the images' device.

    What comes in from beyond the border of an image that is shrunk, moved or turned is, by `beyond`: the commonest
    colour of its ``"border"``, as if it had been changed before it was padded; a ``"mirror"`` image; or ``"black"``.

    >>> Augmentation(resize=(0.5, 2.0), rotate=15)(torch.rand(8, 1, 28, 28)).shape
    torch.Size([8, 1, 28, 28])
    """

    resize: tuple[float, float] = (1.0, 1.0)  # factors, drawn evenly on a logarithmic scale between the two
    flip: bool = False  # mirror every other image, left to right
    shift: int = 0  # move by up to so many whole pixels, up or down and left or right
    beyond: Beyond = "black"
    share: float = 1.0  # of the images that are resized; the others keep their size
    antialias: bool = True  # average what becomes one pixel; without it, as images that were shrunk by bilinear zoom
    rotate: float = 0.0  # turn by up to so many degrees, to the left or to the right
    colour: float = 0.0  # change brightness, contrast and saturation by factors between 1 minus and 1 plus this
    blur: float = 0.0  # smooth by a Gaussian of up to so many pixels (its standard deviation)

    def __call__(self, x: Tensor) -> Tensor:
        chances = torch.rand(4, len(x), device=x.device)
        low, high = map(math.log, self.resize)
        factors = torch.exp(low + (high - low) * chances[0] / self.share)
        factors = factors.where(chances[0] < self.share, 1.0)
        turned = torch.where(chances[1] < 0.5, -factors, factors) if self.flip else factors
        moves = torch.floor((2 * self.shift + 1) * chances[2:]) - self.shift  # (2, B)
        if self.resize != (1.0, 1.0) or self.flip or self.shift or self.rotate:
            ground: Tensor | float = border_colour(x) if self.beyond == "border" else 0.0
            smallest, mirrored, y = min(self.resize[0], 1.0), self.beyond == "mirror", x - ground
            if self.rotate:
                angles = math.radians(self.rotate) * (2 * torch.rand(len(x), device=x.device) - 1)
                y = rotate(y, angles, mirrored)
            size, both = (x.shape[-2], x.shape[-1]), torch.stack([factors, turned])
            x = resample(y, both, moves, smallest, self.shift, mirrored, self.antialias, size) + ground
        if self.colour:
            x = change_colours(x, 1 + self.colour * (2 * torch.rand(3, len(x), device=x.device) - 1))
        return blur(x, self.blur * torch.rand(len(x), device=x.device)) if self.blur else x


def rotate(x: Tensor, angles: Tensor, mirrored: bool) -> Tensor:
    """Turn images by angles in radians about their centres, on canvases large enough for what was in their corners.

    Shape:
        `(B, C, H, W)`, `(B,)` -> `(B, C, H + 2 m, W + 2 n)`
    """
    height, width = x.shape[-2:]
    across = math.ceil(math.hypot(height, width))
    size = tuple(length + 2 * -(-(across - length) // 2) for length in (height, width))
    cos, sin = angles.cos(), angles.sin()
    # From places on the large canvas, where its borders are at -1 and 1, to places in the image, likewise.
    to_row = torch.stack([-sin * size[1] / height, cos * size[0] / height], -1)
    to_column = torch.stack([cos * size[1] / width, sin * size[0] / width], -1)
    turns = F.pad(torch.stack([to_column, to_row], 1), (0, 1))  # (B, 2, 3)
    grid = F.affine_grid(turns, [*x.shape[:2], *size], align_corners=False).to(x.dtype)
    return F.grid_sample(x, grid, padding_mode="reflection" if mirrored else "zeros", align_corners=False)


def change_colours(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply brightness, contrast and saturation by factors, `(3, B)`; the result is cut to 0 to 1."""
    brightness, contrast, saturation = factors[..., None, None, None]
    x = x * brightness
    shares = (0.299, 0.587, 0.114) if x.shape[1] == 3 else (1 / x.shape[1],) * x.shape[1]  # of how bright a pixel looks
    grey = torch.stack([share * channel for share, channel in zip(shares, x.unbind(1), strict=True)], 1)
    grey = grey.sum(1, keepdim=True)
    mean = grey.mean((-2, -1), keepdim=True)
    x = grey + saturation * (x - grey)
    changed: Tensor = mean + contrast * (x - mean)
    return changed.clamp(0, 1)


def blur(x: Tensor, deviations: Tensor) -> Tensor:
    """Smooth images by Gaussians of these standard deviations, `(B,)`."""
    rows, columns = (_gaussians(deviations, length)[:, None].to(x) for length in x.shape[-2:])
    return rows @ x @ columns.mT


def _gaussians(deviations: Tensor, size: int) -> Tensor:
    """What smooths a line of `size` pixels: `(B, size, size)`; rows add up to 1, also at the ends."""
    pixels = torch.arange(size, device=deviations.device)
    distances = (pixels[:, None] - pixels) / deviations.clamp(min=1e-3)[:, None, None]
    weights = torch.exp(-(distances**2) / 2) * (distances.abs() <= REACH)
    return weights / weights.sum(-1, keepdim=True)


def resample(
    x: Tensor,
    factors: Tensor,
    moves: Tensor,
    smallest: float,
    shift: int,
    mirrored: bool,
    antialias: bool = True,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """Resize images `(B, C, H, W)` about their centres, by default without aliasing, then move them.

    `factors` and `moves`, `(2, B)`, are along rows (moves: down) and columns (to the right); a negative factor mirrors.
    No factor is smaller than `smallest`, no move longer than `shift`. The result has the `size` of the images, or
    another about the same centre.
    """
    kept = size or (x.shape[-2], x.shape[-1])
    rows, columns = (
        _matrices(factors[i], moves[i], x.shape[2 + i], kept[i], smallest, shift, mirrored, antialias)[:, None]
        for i in (0, 1)
    )  # (B, 1, H', H) and (B, 1, W', W)
    return rows @ x @ columns.mT


def _matrices(
    factors: Tensor,
    moves: Tensor,
    size: int,
    count: int,
    smallest: float,
    shift: int,
    mirrored: bool,
    antialias: bool,
) -> Tensor:
    """What resamples a line of `size` pixels: `(B, count, size)`, from pixels of the image to those of the result."""
    centre = (size - 1) / 2
    pixels = torch.arange(size, device=factors.device)
    factors, moves = factors[:, None], moves[:, None]
    wanted = torch.arange(count, device=factors.device) - (count - 1) / 2
    places = (wanted - moves) / factors + centre  # (B, count), where each pixel of the result looks
    # Of the triangle: a pixel of the image or, without aliasing, of the result, if that is larger.
    width = (1 / factors.abs()).clamp(min=1) if antialias else torch.ones_like(factors)
    # Weights also of the pixels beyond the border, so that what is seen there counts.
    beyond = math.ceil((centre + shift) / smallest - centre + max(1.0, 1 / smallest))
    lines = torch.arange(-beyond, size + beyond, device=factors.device)
    weights = weigh(places, lines, triangle, width[..., None])  # (B, count, size + 2 beyond)
    if not mirrored:
        return weights[..., beyond : beyond + size]
    lines = lines % (2 * size)  # a b c | c b a | a b c ...
    lines = torch.minimum(lines, 2 * size - 1 - lines)
    return weights @ (lines[:, None] == pixels).to(weights)
