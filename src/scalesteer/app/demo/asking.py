"""How networks are asked: of a picture at a size, in one way of looking after the other."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import joining
from scalesteer.app.pictures import PictureError
from scalesteer.channels import ScaleChannels
from scalesteer.resize import canvas_size, resize

SIZES = tuple(2 ** (third / 3) for third in range(-6, 7))  # of the object, relative to the picture that was given


class Way(NamedTuple):
    """One way to look at an image."""

    key: str
    name: str
    model: nn.Module


def at_size(picture: Tensor, size: float, ground: str = "black", grows: bool = True) -> Tensor:
    """A picture `(C, H, W)` at another size, `(1, C, h, w)`.

    A smaller one is laid on a canvas of the usual size, whose `ground` is black or the mean colour of the picture's
    border ("surroundings"). A larger one is larger, or cut to the canvas for a network that takes only that.
    """
    height, width = picture.shape[-2:]
    x = resize(picture[None], resized(height, width, size)).clamp(0, 1)
    left, top = width - x.shape[-1], height - x.shape[-2]
    if size > 1 and grows:
        return x
    around = torch.zeros(len(picture))
    if ground == "surroundings":
        rows, columns = picture[:, [0, -1]], picture[:, :, [0, -1]]
        around = torch.cat([rows.flatten(1), columns.flatten(1)], dim=1).mean(1)
    # What is cut off, or added, on each side; the ground is zero while it is added.
    sides = (left // 2, left - left // 2, top // 2, top - top // 2)
    return F.pad(x - around.view(-1, 1, 1), sides) + around.view(-1, 1, 1)


def resized(height: int, width: int, size: float) -> tuple[int, int]:
    """Height and width of a picture at another size."""
    return max(1, round(height * size)), max(1, round(width * size))


def hear(model: nn.Module, x: Tensor) -> tuple[Tensor, float | None, Tensor | None]:
    """Logits of one image; with scale channels also the size that is found, and what each channel says by itself.

    An image that the network cannot take is the picture's fault.
    """
    try:
        if not isinstance(model, ScaleChannels):
            return model(x)[0].float(), None, None
        alone = model.ask_channels(x).float()
        if model.multiple > 1 or model.sure is not None:  # then the answer is not that of all channels as they are
            logits, sizes = model(x, return_scales=True)
        else:
            logits = joining.join(alone, model.join, None, model.calibration)
            sizes = joining.find_size(alone, logits, model.join, None, model.scales, model.calibration)
    except ValueError as error:
        raise PictureError(f"the picture cannot be used: {error}") from error
    return logits[0].float(), float(sizes[0]), alone


def by_channel(alone: Tensor, model: Any, x: Tensor, winner: int) -> list[dict[str, Any]]:
    """What each channel says by itself, and its share in the answer: its weight for the class that won."""
    score = joining.scores(alone, model.join, model.calibration)[:, 0, winner]
    if model.join == "mean":
        shares = torch.full_like(score, 1 / len(score))
    elif model.join in ("max", "confident"):
        calibrated = joining.scores(alone, model.join, model.calibration)
        best = score.argmax() if model.join == "max" else joining.most_confident(calibrated, None).flatten()[0]
        shares = F.one_hot(best, len(score)).float()
    else:
        shares = score.softmax(0)
    rows = []
    for scale, own, share in zip(model.scales, alone[:, 0], shares.tolist(), strict=True):
        chance, label = own.softmax(0).max(0)
        height, width = canvas_size((x.shape[-2], x.shape[-1]), scale)
        row = {"scale": scale, "pixels": [width, height], "label": int(label), "probability": round(float(chance), 4)}
        rows.append(row | {"share": round(share, 4)})
    return rows


def count_sizes(model: ScaleChannels) -> str:
    """How many channels a model has, in words."""
    return f"{len(model.scales)} size" + "s" * (len(model.scales) > 1)
