"""A model's opinion on a user's own images."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scalesteer._text import printable
from scalesteer.app.config import RunConfig
from scalesteer.app.device import arithmetic
from scalesteer.app.loop import evaluation_batch
from scalesteer.app.pictures import SUFFIXES, PictureError, find_pictures, picture_name, read_picture
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import ImageSet
from scalesteer.files import require
from scalesteer.models import DATASETS, network_of
from scalesteer.nn import ScaleSteerableConv2d

MARGIN = 4  # pixels around a digit of MNIST, which has 28
READ_AHEAD, READ_AHEAD_BYTES = 64, 1 << 26  # pictures, and their bytes, that are held to be classified together
RECORD = ("picture", "class", "label", "confidence", "size", "scale", "inverted")

Reader = Callable[[Path | BinaryIO], tuple[NDArray[np.uint8], bool]]


class Prediction(NamedTuple):
    """What a model says of one image."""

    label: int
    confidence: float  # the probability of the label
    scale: float | None  # which of the first layer's scales won where its response is largest, if it has scales
    inverted: bool  # the image was dark on light, and turned round
    size: float | None = None  # the size that answered, relative to the usual one, if the model has scale channels


def predict_files(
    model: nn.Module, paths: Iterable[Path], fit: str | None = None
) -> Iterator[tuple[Path, Prediction | PictureError]]:
    """Classify picture files, many at a time, on the model's device; results come in the order of `paths`.

    Args:
        model: A network of :func:`scalesteer.create_model`.
        paths: The files. One that cannot be used gets a PictureError in the place of a prediction.
        fit: How pictures come onto the model's canvas, as in :func:`scalesteer.app.pictures.read_picture`; without a
            canvas they keep their sizes. None reads them as the images of the datasets are: grey ones light on black,
            cut and centred (:func:`fit_digit`), colour ones made to cover the canvas.
    """
    read = reader(model, fit)
    held: list[tuple[Path, NDArray[np.uint8] | PictureError, bool]] = []
    held_bytes = 0
    for path in paths:
        try:
            pixels, inverted = read(path)
            held.append((path, pixels, inverted))
            held_bytes += pixels.nbytes
        except PictureError as error:
            held.append((path, error, False))
        if len(held) >= READ_AHEAD or held_bytes >= READ_AHEAD_BYTES:
            yield from _answer(model, held)
            held, held_bytes = [], 0
    yield from _answer(model, held)


def describe(path: Path, said: Prediction, classes: Sequence[str] = ()) -> dict[str, Any]:
    """A prediction with the name of its class, JSON-ready; its keys are `RECORD`."""
    name = classes[said.label] if classes else str(said.label)
    size, scale = (None if number is None else round(number, 4) for number in (said.size, said.scale))
    values = (str(path), name, said.label, round(said.confidence, 6), size, scale, said.inverted)
    return dict(zip(RECORD, values, strict=True))


def to_sentence(record: Mapping[str, Any]) -> str:
    """A record for a terminal, on one line."""
    words = f"{record['picture']}: class {record['class']}, confidence {100 * record['confidence']:.1f} %"
    words += "".join(f", {name} {record[name]:.2f}" for name in ("size", "scale") if record[name] is not None)
    return printable(words + (" (dark on light: inverted)" if record["inverted"] else ""))


def find_files(given: Iterable[Path]) -> dict[Path, str]:
    """Files, and the pictures in folders, each with a name of its own: the path below its folder."""
    found, taken = dict[Path, str](), set[str]()
    for start in given:
        inside = find_pictures(start) if start.is_dir() else [start]
        if not inside:
            raise ValueError(f"{start} holds no pictures ({', '.join(SUFFIXES)}).")
        for path in inside:
            if path not in found:
                name = first = str(path.relative_to(start)) if path != start else path.name
                name = next(n for i in itertools.count(2) for n in (name, f"{first}-{i}") if n not in taken)
                taken.add(name)
                found[path] = name
    return found


def own_pictures(model: nn.Module, config: RunConfig) -> tuple[str | None, tuple[str, ...]]:
    """How a model's pictures come onto its canvas (None: it was trained on a dataset), and the names of its classes.

    A network that came without its run is one for pictures if it has no canvas, or if its classes have names and it is
    not one for the dataset of the configuration.
    """
    task = network_of(model).task
    own = config.images is not None or task.image_size is None
    own = own or bool(task.classes and task[:3] != DATASETS[config.dataset][:3])
    return (task.fit if own else None), task.classes


def reader(model: nn.Module, fit: str | None, **options: Any) -> Reader:
    """Reads a file as a model wants it, `(H, W)` or `(3, H, W)`, and says whether it was inverted.

    `options` are those of :func:`.pictures.read_picture`.
    """
    network = network_of(model)
    channels, size = network.in_chans, network.image_size
    if fit is not None:
        return lambda path: (read_picture(path, channels, size, fit, **options), False)
    if size is None:
        raise ValueError("the network must know the size of its images: build it with `image_size` or a dataset.")
    if channels == 3:
        return lambda path: (read_picture(path, 3, size, "resize", contrast=True, **options), False)
    return lambda path: fit_digit(read_picture(path, 1, contrast=True, **options), size, picture_name(path))


def _answer(
    model: nn.Module, held: list[tuple[Path, NDArray[np.uint8] | PictureError, bool]]
) -> Iterator[tuple[Path, Prediction | PictureError]]:
    """Classify pictures that are read: those of one size together."""
    said: dict[int, Prediction | PictureError] = {}
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, (_, pixels, _) in enumerate(held):
        if isinstance(pixels, PictureError):
            said[i] = pixels
        else:
            by_shape.setdefault(pixels.shape, []).append(i)
    for shape, rows in by_shape.items():
        images = torch.from_numpy(np.stack([np.asarray(held[i][1]) for i in rows]))
        try:
            answers = classify(model, ImageSet(images, torch.zeros(len(rows)).long(), torch.ones(len(rows))))
        except ValueError as error:
            if network_of(model).image_size is not None:
                raise
            # A network for any size, which needs more pixels than these.
            found = " x ".join(map(str, shape[-2:]))
            said |= {i: PictureError(f"{held[i][0]} ({found} pixels) cannot be used: {error}") for i in rows}
            continue
        sizes = [None] * len(rows) if answers.sizes is None else answers.sizes.tolist()
        scales = [None] * len(rows) if answers.scales is None else answers.scales.tolist()
        each = zip(rows, answers.labels.tolist(), answers.confidences.tolist(), scales, sizes, strict=True)
        for i, label, confidence, scale, size in each:
            said[i] = Prediction(label, confidence, scale, held[i][2], size)
    return ((path, said[i]) for i, (path, _, _) in enumerate(held))


class Answers(NamedTuple):
    """What a model says of a set of images, on the CPU, `(N,)` each."""

    labels: Tensor
    confidences: Tensor
    sizes: Tensor | None  # that answered, if the model has scale channels
    scales: Tensor | None  # of the first layer that won, if it is steered and there are no channels


@torch.no_grad()
def classify(model: nn.Module, images: ImageSet, precision: str = "float32") -> Answers:
    """Classify a set of images, in batches, on the model's device; `precision` as in a run."""
    network, parts = network_of(model), list[tuple[Tensor | None, ...]]()
    images = images.to(network.input_std.device)
    half = torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16")
    for x, _ in images.batches(evaluation_batch(model.eval(), images)):
        size = scale = None
        with arithmetic(precision), half:
            if isinstance(model, ScaleChannels):
                logits, size = model(x, return_scales=True)
            else:
                logits = model(x)
                if isinstance(network.first, ScaleSteerableConv2d):
                    response, winners = network.first(network.prepare(x), return_scales=True)
                    places = response.flatten(1).argmax(1, keepdim=True)
                    known = torch.tensor(network.first.scales, device=x.device, dtype=torch.float64)
                    scale = known[winners.flatten(1).gather(1, places).squeeze(1)]
        confidence, label = logits.float().softmax(1).max(1)
        parts.append((label, confidence, size, scale))
    columns: list[Any] = [None if part[0] is None else torch.cat(part).cpu() for part in zip(*parts, strict=True)]
    return Answers(*columns)


def fit_digit(
    grey: NDArray[np.uint8], size: tuple[int, int], name: str = "the image"
) -> tuple[NDArray[np.uint8], bool]:
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
        raise PictureError(f"{name} is blank: nothing in it differs from its background.")
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
