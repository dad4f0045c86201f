"""A model's opinion on a user's own images."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from scalesteer.channels import ScaleChannels
from scalesteer.files import require
from scalesteer.models import Network
from scalesteer.nn import ScaleSteerableConv2d

MAX_BYTES = 64 << 20
MAX_PIXELS = 64_000_000
MARGIN = 4  # pixels around a digit of MNIST, which has 28


class ImageError(ValueError):
    """An image that cannot be used."""


class Prediction(NamedTuple):
    """What a model says of one image."""

    label: int
    confidence: float  # the probability of the label
    scale: float | None  # which of the first layer's scales won where its response is largest, if it has scales
    inverted: bool  # the image was dark on light, and turned round
    size: float | None = None  # the size that answered, relative to the usual one, if the model has scale channels


@torch.no_grad()
def predict(model: nn.Module, path: Path) -> Prediction:
    """Classify an image file; one that cannot be used is an ImageError."""
    network = model.net if isinstance(model, ScaleChannels) else model
    if not isinstance(network, Network):
        raise TypeError(f"`model` must be a network of create_model (got {type(network).__name__}).")
    if network.image_size is None:
        raise ValueError("the network must know the size of its images: build it with `image_size` or a dataset.")
    colour, inverted = network.in_chans == 3, False
    pixels = read_image(path, colour)
    if colour:
        pixels = cover(pixels, network.image_size).transpose(2, 0, 1)
    else:
        pixels, inverted = fit(pixels, network.image_size, str(path))
    x = torch.from_numpy(pixels.copy()).to(network.input_std.device).float() / 255
    x = x.view(1, network.in_chans, *network.image_size)
    scale = size = None
    if isinstance(model, ScaleChannels):
        logits, sizes = model.eval()(x, return_scales=True)
        size = float(sizes)
    else:
        logits = model.eval()(x)
        if isinstance(network.first, ScaleSteerableConv2d):
            response, winners = network.first(network.prepare(x), return_scales=True)
            scale = network.first.scales[int(winners.flatten()[response.argmax()])]
    shares = logits.softmax(1)[0]
    return Prediction(int(shares.argmax()), float(shares.max()), scale, inverted, size)


def read_image(path: Path, colour: bool = False) -> NDArray[np.uint8]:
    """The values of a PNG or JPEG file, upright, `(H, W)`, or `(H, W, 3)` in colour.

    Transparent parts become the background that shows the rest best.
    """
    pil, ops, mode = require("PIL.Image"), require("PIL.ImageOps"), "RGB" if colour else "L"
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
                image = pil.fromarray((np.asarray(image, np.int64).clip(0, 65535) >> 8).astype(np.uint8))
            if not image.has_transparency_data:
                return np.array(image.convert(mode))
            image = image.convert("RGBA")
            values, grey, alpha = (np.asarray(image.convert(m), np.float64) for m in (mode, "L", "RGBA"))
    except OSError as error:
        reason = "not a PNG or JPEG file" if isinstance(error, pil.UnidentifiedImageError) else error
        raise ImageError(f"{path} cannot be read: {reason}.") from error
    except (ValueError, SyntaxError, struct.error, pil.DecompressionBombError) as error:
        raise error if isinstance(error, ImageError) else ImageError(f"{path} cannot be read: {error}.") from error
    shown = alpha[..., 3] / 255
    background = 255 * (np.average(grey, weights=shown) < 128 if shown.any() else 0)
    shown = shown[..., None] if colour else shown
    return np.asarray((values * shown + background * (1 - shown)).round(), np.uint8)


def cover(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """An image in colour, `(H, W, 3)`, resized so that it covers `size`, proportions kept, and cut to it."""
    ops, pil = require("PIL.ImageOps"), require("PIL.Image")
    return np.asarray(ops.fit(pil.fromarray(pixels), size[::-1], pil.Resampling.BILINEAR))


def fit(grey: NDArray[np.uint8], size: tuple[int, int], name: str = "the image") -> tuple[NDArray[np.uint8], bool]:
    """Make an image like those of the datasets: light on black, of the model's size.

    An image of just that size keeps its layout. Of any other, the part that differs from the background is resized,
    proportions kept, to the share of the image that MNIST leaves a digit, and centred. Returns it and whether it was
    inverted.
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
    margin = MARGIN * min(size) / 28
    factor = min((side - 2 * margin) / length for side, length in zip(size, box.shape, strict=True))
    height, width = (max(1, round(length * factor)) for length in box.shape)
    pil = require("PIL.Image")
    small = np.asarray(pil.fromarray((255 * box).astype(np.uint8)).resize((width, height), pil.Resampling.BILINEAR))
    canvas = np.zeros(size, np.uint8)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    canvas[top : top + height, left : left + width] = small
    return canvas, inverted
