"""Many digits of any sizes in one picture: the network that finds and names them, and what it says of one drawing."""

import io
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.app.pictures import PictureError, read_picture
from scalesteer.channels import ScaleChannels
from scalesteer.instances import Centre, find_centres
from scalesteer.resize import resize

FRAME = 28  # pixels of a digit's square frame in the network's training
THRESHOLD = -1.0  # log-odds of what is found; a mean over channels, so that one of them alone has to be much surer
MOST_SIDE = 512  # pixels of a picture that is searched
MOST_READ = 1 << 24  # pixels of a drawing
LEAST_CONTRAST = 16  # of 255; what differs less from the background is not there
# A drawing is judged with its longer side at this length, in a margin of a digit's width: one digit is then twice its
# usual size, and two or three beside each other are usual ones.
JUDGED_SIDE, JUDGED_MARGIN = 48, 20


class Finder:
    """The network `digit-finder` in its scale channels: maps of "nothing here" and of ten digits."""

    def __init__(self, model: ScaleChannels) -> None:
        self.model, self.device = model, next(model.parameters()).device
        self.stride, self.offset = model.grid or (1.0, 0.0)

    @torch.inference_mode()
    def find(self, picture: Tensor) -> tuple[list[Centre], Tensor, Tensor]:
        """The digits in a picture `(1, 1, H, W)`, light on black; logits of all classes and sizes, as maps."""
        logits, sizes = self.model(picture.to(self.device), return_scales=True)
        logits, sizes = logits[0].float().cpu(), sizes[0].cpu()
        where = {"stride": self.stride, "offset": self.offset}
        return find_centres(logits[1:], sizes, FRAME, threshold=THRESHOLD, **where), logits, sizes

    def describe(self, picture: Tensor) -> dict[str, Any]:
        """What is found in a picture, and the maps that it is read from, JSON-ready."""
        start = time.perf_counter()
        found, logits, sizes = self.find(picture)
        chances = logits.softmax(0)
        objects = []
        for digit in found:
            i, j = (round((place - self.offset) / self.stride) for place in (digit.row, digit.column))
            place = {"row": digit.row, "column": digit.column, "size": round(digit.size, 3)}
            chance, side = round(float(chances[1 + digit.label, i, j]), 4), round(FRAME * digit.size, 1)
            objects.append({"label": digit.label, **place, "side": side, "probability": chance})
        height, width = sizes.shape
        maps = {
            "height": height,
            "width": width,
            "stride": self.stride,
            "offset": self.offset,
            "sizes": [round(size, 2) for size in sizes.flatten().tolist()],
            "odds": [round(chance, 3) for chance in (1 - chances[0]).flatten().tolist()],
        }
        return {"objects": objects, "map": maps, "seconds": round(time.perf_counter() - start, 3)}

    def judge(self, content: bytes) -> list[str] | None:
        """The digits that a drawing shows, from left to right; None if it shows nothing that is one."""
        found, _, _ = self.find(at_usual_size(read_light(content, MOST_READ)))
        return [str(digit.label) for digit in sorted(found, key=lambda digit: digit.column)] or None


def read(content: bytes) -> Tensor:
    """A picture to be searched, `(1, 1, H, W)`, light on black.

    Raises:
        PictureError: If it is none, too large, or nothing is on it.
    """
    light = read_light(content, MOST_SIDE**2)
    height, width = light.shape[-2:]
    if max(height, width) > MOST_SIDE:
        raise PictureError(f"the picture ({width} x {height} pixels) must have at most {MOST_SIDE} on each side.")
    return light


def read_light(content: bytes, most_pixels: int) -> Tensor:
    """A picture as light ink on black, from 0 to 1, `(1, 1, H, W)`; turned round if it is dark on light."""
    grey = read_picture(io.BytesIO(content), 1, contrast=True, most_pixels=most_pixels).astype(np.float32)
    ground = float(np.median(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])))
    ink = ground - grey if ground > 127 else grey - ground
    if ink.max() < LEAST_CONTRAST:
        raise PictureError("the picture is blank: nothing in it differs from its background.")
    return torch.from_numpy((ink / ink.max()).clip(0, 1))[None, None]


def at_usual_size(light: Tensor) -> Tensor:
    """What is drawn, cut out, at a size at which digits are found whichever size they were drawn at."""
    inked = light[0, 0] > 0.25
    rows, columns = inked.any(1).nonzero()[:, 0], inked.any(0).nonzero()[:, 0]
    box = light[:, :, int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
    factor = JUDGED_SIDE / max(box.shape[-2:])
    small = resize(box, (max(1, round(box.shape[-2] * factor)), max(1, round(box.shape[-1] * factor))))
    return F.pad(small.clamp(0, 1), (JUDGED_MARGIN,) * 4)
