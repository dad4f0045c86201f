"""What a network says at every place of a picture: class and size, drawn beside it."""

import colorsys
import functools
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from scalesteer._text import printable
from scalesteer.app.tiles import cut, tiled
from scalesteer.channels import ScaleChannels
from scalesteer.files import require
from scalesteer.models import network_of
from scalesteer.models.network import Network
from scalesteer.models.pooled import PooledNetwork
from scalesteer.nn import twin

SIDE, GAP, LINE = 384, 18, 19  # largest side of a panel, space between panels, height of a line of text; pixels
MOST_NAMES = 12  # in a legend
RAMP = ((38, 34, 98), (32, 110, 142), (48, 164, 120), (168, 206, 80), (250, 226, 96))  # colours from small to large
INK = (40, 40, 40)
_SMALL: dict[str, Any] = {"i": np.int16, "f": np.float32}  # kinds of numbers in maps of large pictures
# Of the system, for letters that Pillow's own font does not have.
FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "Arial Unicode.ttf")


class Maps(NamedTuple):
    """What a model says at each place, `(h, w)` each."""

    labels: NDArray[Any]  # whole numbers
    confidences: NDArray[Any]
    sizes: NDArray[Any] | None  # that answered, if the model has scale channels
    ends: tuple[float, float]  # of these sizes
    stride: int  # pixels of the picture from one place to the next
    classes: int


def without_readout(model: nn.Module) -> nn.Module:
    """A model that shares the weights of another and answers at every place, `(B, classes, h, w)`, instead of once.

    Raises:
        ValueError: If the network does not score the classes at every place, as those named steered and pooled do.
    """
    network = network_of(model)
    if makes_maps(model):
        return model.eval()
    if not isinstance(network, Network):
        raise ValueError("this network has no map of classes: it returns logits for the whole picture.")
    if not isinstance(network, PooledNetwork):
        kind = "its fully connected layers answer once for the whole picture"
        raise ValueError(f"this network has no map of classes: {kind}; train one named steered-... or pooled-...")
    dense = twin(network, dense=True)
    if not isinstance(model, ScaleChannels):
        return dense.eval()
    grid = model.grid or (network.stride, (network.stride - 1) / 2)
    looking = twin(model, grid=grid)
    looking.net = dense
    return looking.eval()


@torch.no_grad()
def makes_maps(model: nn.Module) -> bool:
    """Whether a network of the user's own makes maps as it is."""
    network = network_of(model)
    if isinstance(network, Network):
        return False
    return bool(model.eval()(_zeros(model, *(network.task.image_size or (64, 64)))).ndim == 4)


@torch.no_grad()
def answer_maps(dense: nn.Module, pixels: NDArray[np.uint8]) -> Maps:
    """What a model :func:`without_readout` says of a picture, `(H, W)` or `(3, H, W)`, at every place."""
    network, (height, width) = network_of(dense), pixels.shape[-2:]
    if isinstance(network, PooledNetwork):
        return _answer_whole(tiled(dense, height, width), pixels, network.stride)
    dense, pieces = cut(dense, height, width)
    if len(pieces) == 1:
        return _answer_whole(dense, pixels)
    whole: list[NDArray[Any]] = []
    for down, across in pieces:
        found = _answer_whole(dense, pixels[..., down.low : down.high, across.low : across.high])
        parts = [part for part in found[:3] if part is not None]
        if not whole:
            whole = [np.empty((height // found.stride, width // found.stride), _SMALL[p.dtype.kind]) for p in parts]
        for target, part in zip(whole, parts, strict=True):
            (top, low, end), (left, start, right) = (
                (p.begin // found.stride, (p.begin - p.low) // found.stride, p.end // found.stride)
                for p in (down, across)
            )
            target[top:end, left:right] = part[low : low + end - top, start : start + right - left]
    return Maps(whole[0], whole[1], whole[2] if len(whole) > 2 else None, *found[3:])


def _answer_whole(dense: nn.Module, pixels: NDArray[np.uint8], stride: int | None = None) -> Maps:
    """What a model says of a picture that it looks at at once."""
    height, width = pixels.shape[-2:]
    x = _zeros(dense, height, width)
    x.copy_(torch.from_numpy(pixels).view(x.shape)).div_(255)  # in its place: a picture may take a gigabyte
    sizes, ends = None, (1.0, 1.0)
    if isinstance(dense, ScaleChannels):
        logits, found = dense(x, return_scales=True)
        sizes, ends = found[0].double().cpu().numpy(), (1 / dense.scales[-1], 1 / dense.scales[0])
    else:
        logits = dense(x)
    confidences, labels = (part.cpu().numpy() for part in logits[0].double().softmax(0).max(0))
    stride = stride or max(1, round(height / logits.shape[-2]))
    return Maps(labels, confidences, sizes, ends, stride, logits.shape[1])


def _zeros(model: nn.Module, height: int, width: int) -> torch.Tensor:
    """A black picture, `(1, C, H, W)`, where the model is."""
    return torch.zeros(1, network_of(model).task.in_chans, height, width, device=next(model.parameters()).device)


def draw_maps(pixels: NDArray[np.uint8], maps: Maps, classes: Sequence[str] = ()) -> Any:
    """A picture, `(H, W)` or `(3, H, W)`, with its maps of class and size and their legends: a Pillow image.

    Colours are paler where the model is less certain, and such places count less in a class's share: it says something
    of the background too, but hardly knows. Classes without a name are numbers.
    """
    pil, pil_draw = require("PIL.Image"), require("PIL.ImageDraw")
    height, width = pixels.shape[-2:]
    zoom = SIDE / max(height, width)
    zoom = zoom // 1 if zoom >= 1 else zoom  # whole numbers keep pixels square
    panel = max(1, round(width * zoom)), max(1, round(height * zoom))
    certainty = (maps.confidences * maps.classes - 1).clip(0) / max(1, maps.classes - 1)
    palette = np.array([class_colour(label) for label in range(maps.classes)], np.float64)
    layers = [("class, and its share of the certainty", palette[maps.labels])]
    if maps.sizes is not None:
        layers.append(("size that answered", size_colours(maps.sizes, maps.ends)))
    shares = class_shares(maps.labels, certainty)
    room, lines = max(panel[0], 190), min(len(shares), MOST_NAMES + 1) + 2
    step, top = room + GAP, GAP + LINE
    sheet = pil.new("RGB", (step * (1 + len(layers)) + GAP, top + panel[1] + lines * LINE), "white")
    draw, below = pil_draw.Draw(sheet), top + panel[1] + LINE // 2

    shown = pil.fromarray(pixels if pixels.ndim == 2 else pixels.transpose(1, 2, 0)).convert("RGB")
    sheet.paste(shown.resize(panel, pil.Resampling.NEAREST if zoom >= 1 else pil.Resampling.BICUBIC), (GAP, top))
    _write(draw, (GAP, GAP - 2), "picture, as the network sees it", room)
    _write(draw, (GAP, below), "paler: less certain", room)
    for i, (title, colours) in enumerate(layers, start=1):
        x = GAP + i * step
        _write(draw, (x, GAP - 2), title, room)
        faded = (255 + (colours - 255) * (0.15 + 0.85 * certainty)[..., None]).round().astype(np.uint8)
        covered = [max(1, round(n * maps.stride * zoom)) for n in faded.shape[1::-1]]
        size = min(covered[0], panel[0]), min(covered[1], panel[1])
        sheet.paste(pil.fromarray(faded).resize(size, pil.Resampling.NEAREST), (x, top))
        draw.rectangle((x - 1, top - 1, x + panel[0], top + panel[1]), outline=(200, 200, 200))

    for line, (label, share) in enumerate(shares[:MOST_NAMES]):
        x, y = GAP + step, below + line * LINE
        draw.rectangle((x, y + 3, x + 11, y + 14), fill=class_colour(label))
        name = classes[label] if classes else str(label)
        _write(draw, (x + 18, y), f"{name}  {100 * share:.0f} %", room - 18)
    if len(shares) > MOST_NAMES:
        _write(draw, (GAP + step, below + MOST_NAMES * LINE), f"and {len(shares) - MOST_NAMES} more", room)
    if maps.sizes is not None:
        x, ramp = GAP + 2 * step, np.geomspace(*maps.ends, room - 30)
        bar = size_colours(ramp[None].repeat(12, 0), maps.ends)
        sheet.paste(pil.fromarray(bar.round().astype(np.uint8)), (x, below + 2))
        for place in (0, len(ramp) // 2, len(ramp) - 1):
            _write(draw, (x + max(0, place - 8), below + 17), f"{ramp[place]:.2g}", room)
    return sheet


def class_shares(labels: NDArray[np.int64], certainty: NDArray[np.float64]) -> list[tuple[int, float]]:
    """The classes that are there, each with its share of the certainty at all places, `(h, w)`; the largest first.

    >>> class_shares(np.array([[2, 2, 0]]), np.array([[0.1, 0.1, 0.6]]))
    [(0, 0.75), (2, 0.25)]
    """
    certainty = certainty if certainty.any() else np.ones_like(certainty)
    sums = np.bincount(labels.flatten(), certainty.flatten()) / certainty.sum()
    found = [(label, round(float(sums[label]), 6)) for label in np.unique(labels).tolist()]
    return sorted(found, key=lambda entry: -entry[1])


def _write(draw: Any, at: tuple[int, int], text: str, room: int) -> None:
    """Write one line, cut where it would be longer than `room` pixels."""
    text = printable(text)
    font = None if text.isascii() else _system_font()
    if font is None:  # Pillow's own has ASCII only
        bare = (letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
        font, text = require("PIL.ImageFont").load_default(13), "".join(bare).encode("ascii", "replace").decode()
    while len(text) > 3 and draw.textlength(text, font) > room:
        text = text[:-3] + ".."
    draw.text(at, text, fill=INK, font=font)


@functools.cache
def _system_font() -> Any:
    """A font of the system with more letters than ASCII's, or None."""
    for name in FONTS:
        with suppress(OSError):
            return require("PIL.ImageFont").truetype(name, 13)
    return None


def class_colour(label: int) -> tuple[int, int, int]:
    """A colour for each class; neighbours differ most."""
    red, green, blue = colorsys.hls_to_rgb(label * 0.6180339887 % 1, (0.42, 0.6, 0.32)[label % 3], 0.65)
    return round(255 * red), round(255 * green), round(255 * blue)


def size_colours(values: NDArray[np.float64], ends: tuple[float, float]) -> NDArray[np.float64]:
    """Colours of sizes on a logarithmic scale, `(h, w)` -> `(h, w, 3)`."""
    low, high = np.log(ends)
    share = (np.log(values) - low) / (high - low) if high > low else np.full(values.shape, 0.5)
    steps, ramp = np.linspace(0, 1, len(RAMP)), np.array(RAMP, np.float64)
    return np.stack([np.interp(share, steps, ramp[:, channel]) for channel in range(3)], -1)
