"""A model's opinion on a user's own images."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from scalesteer.files import require
from scalesteer.models import Network
from scalesteer.nn import ScaleSteerableConv2d

MAX_BYTES = 64 << 20
MAX_PIXELS = 64_000_000
MARGIN = 4  # pixels around a digit of MNIST


class ImageError(ValueError):
    """An image that cannot be used."""


class Prediction(NamedTuple):
    """What a model says of one image."""

    label: int
    confidence: float  # the probability of the label
    scale: float | None  # which of the first layer's scales won where its response is largest, if it has scales
    inverted: bool  # the image was dark on light, and turned round


@torch.no_grad()
def predict(model: Network, path: Path) -> Prediction:
    """Classify an image file; one that cannot be used is an ImageError."""
    if model.image_size is None:
        raise ValueError("the network must know the size of its images: build it with `image_size` or a dataset.")
    pixels, inverted = fit(read_grey(path), model.image_size, str(path))
    x = torch.from_numpy(pixels).to(model.input_std.device).float()[None, None] / 255  # (1, 1, H, W)
    shares = model.eval()(x).softmax(1)[0]
    scale = None
    if isinstance(model.first, ScaleSteerableConv2d):
        response, winners = model.first(model.prepare(x), return_scales=True)
        scale = model.first.scales[int(winners.flatten()[response.argmax()])]
    return Prediction(int(shares.argmax()), float(shares.max()), scale, inverted)


def read_grey(path: Path) -> NDArray[np.uint8]:
    """The grey values of a PNG or JPEG file, upright; transparent parts as the background that shows the rest best."""
    pil, ops = require("PIL.Image"), require("PIL.ImageOps")
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ImageError(f"{path} cannot be read: it is not a file.")
        if path.stat().st_size > MAX_BYTES:
            raise ImageError(f"{path} is larger than {MAX_BYTES >> 20} MiB.")
        with warnings.catch_warnings(), pil.open(path, formats=("PNG", "JPEG")) as image:
            warnings.simplefilter("ignore")
            if image.width * image.height > MAX_PIXELS:
                raise ImageError(f"{path} has more than {MAX_PIXELS // 10**6} million pixels.")
            image = ops.exif_transpose(image)
            if image.mode.startswith("I"):  # 16 bits
                return (np.asarray(image, np.int64).clip(0, 65535) >> 8).astype(np.uint8)
            if not image.has_transparency_data:
                return np.array(image.convert("L"))
            grey, alpha = np.asarray(image.convert("RGBA").convert("LA"), np.float64).transpose(2, 0, 1)
    except OSError as error:
        reason = "not a PNG or JPEG file" if isinstance(error, pil.UnidentifiedImageError) else error
        raise ImageError(f"{path} cannot be read: {reason}.") from error
    except (ValueError, SyntaxError, pil.DecompressionBombError) as error:
        raise error if isinstance(error, ImageError) else ImageError(f"{path} cannot be read: {error}.") from error
    shown = alpha / 255
    background = 255 * (np.average(grey, weights=shown) < 128 if shown.any() else 0)
    return np.asarray((grey * shown + background * (1 - shown)).round(), np.uint8)


def fit(grey: NDArray[np.uint8], size: tuple[int, int], name: str = "the image") -> tuple[NDArray[np.uint8], bool]:
    """Make an image like those of the datasets: light on black, of the model's size.

    An image of just that size keeps its layout. Of any other, the part that differs from the background is resized,
    proportions kept, to what MNIST leaves a digit, and centred. Returns it and whether it was inverted.
    """
    ground = np.median(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]]))
    inverted = bool(ground > 127)
    light, ground = (255 - grey, 255 - ground) if inverted else (grey, ground)
    ink = light.astype(np.float64) - ground
    if ink.max() < 16:
        raise ImageError(f"{name} is blank: nothing in it differs from its background.")
    if grey.shape == size:
        return light, inverted
    ink = (ink / ink.max()).clip(0, 1)
    rows, columns = (np.flatnonzero((ink > 0.25).any(axis)) for axis in (1, 0))
    box = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    factor = min((side - 2 * MARGIN) / length for side, length in zip(size, box.shape, strict=True))
    height, width = (max(1, round(length * factor)) for length in box.shape)
    pil = require("PIL.Image")
    small = np.asarray(pil.fromarray((255 * box).astype(np.uint8)).resize((width, height), pil.Resampling.BILINEAR))
    canvas = np.zeros(size, np.uint8)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    canvas[top : top + height, left : left + width] = small
    return canvas, inverted
