"""Pictures of one object on an even ground, such as a digit on paper, for networks that know black ground only."""

import numpy as np
from numpy.typing import NDArray

from scalesteer.app.pictures import PictureError
from scalesteer.files import require

MARGIN = 1 / 7  # of the side, on each side of the object, as around handwritten digits


def fit_drawing(
    grey: NDArray[np.uint8], size: tuple[int, int], name: str = "the image"
) -> tuple[NDArray[np.uint8], bool]:
    """Make a grey picture one of a light object on black ground, of a network's size.

    A picture of just that size keeps its layout. Of any other, the part that differs from the background is resized,
    proportions kept, to the inside of a margin of a seventh, and centred. Returns it and whether it was inverted.
    """
    ground = np.median(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]]))
    inverted = bool(ground > 127)
    light, ground = (255 - grey, 255 - ground) if inverted else (grey, ground)
    ink = light.astype(np.float64) - ground
    if ink.max() < 16:
        raise PictureError(f"{name} is blank: nothing in it differs from its background.")
    if grey.shape == size:
        return light, inverted
    ink = (ink / ink.max()).clip(0, 1)
    rows, columns = (np.flatnonzero((ink > 0.25).any(axis)) for axis in (1, 0))
    box = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    margin = MARGIN * min(size)
    factor = min((side - 2 * margin) / length for side, length in zip(size, box.shape, strict=True))
    height, width = (max(1, round(length * factor)) for length in box.shape)
    pil = require("PIL.Image")
    small = np.asarray(pil.fromarray((255 * box).astype(np.uint8)).resize((width, height), pil.Resampling.BILINEAR))
    canvas = np.zeros(size, np.uint8)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    canvas[top : top + height, left : left + width] = small
    return canvas, inverted
