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
from scalesteer.app.device import arithmetic
from scalesteer.app.drawings import fit_drawing
from scalesteer.app.evaluation import Answers, answer, evaluation_batch
from scalesteer.app.pictures import SUFFIXES, PictureError, find_pictures, picture_name, read_picture
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import ImageSet
from scalesteer.models import network_of
from scalesteer.models.network import Network
from scalesteer.nn import ScaleSteerableConv2d

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


def predict_files(model: nn.Module, paths: Iterable[Path]) -> Iterator[tuple[Path, Prediction | PictureError]]:
    """Classify picture files, many at a time, on the model's device; results come in the order of `paths`.

    The model's task says how a picture is read. Its `fit` brings one with surroundings to the size of the images; what
    is for black ground is made light on black, cut and centred (:func:`.drawings.fit_drawing`). Without a size of the
    images pictures keep theirs.

    Args:
        model: A network of :func:`scalesteer.create_model`.
        paths: The files. One that cannot be used gets a PictureError in the place of a prediction.
    """
    read = reader(model)
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


def reader(model: nn.Module, **options: Any) -> Reader:
    """Reads a file as a model wants it, `(H, W)` or `(3, H, W)`, and says whether it was inverted.

    `options` are those of :func:`.pictures.read_picture`.
    """
    task = network_of(model).task
    channels, size = task.in_chans, task.image_size
    options |= {"value_range": task.value_range}
    if task.ground == "surroundings" or channels != 1 or size is None:
        return lambda path: (read_picture(path, channels, size, task.fit, **options), False)
    return lambda path: fit_drawing(read_picture(path, 1, contrast=True, **options), size, picture_name(path))


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
            answers, won = classify(model, images)
        except ValueError as error:
            if network_of(model).task.image_size is not None:
                raise
            # A network for any size, which needs more pixels than these.
            found = " x ".join(map(str, shape[-2:]))
            said |= {i: PictureError(f"{held[i][0]} ({found} pixels) cannot be used: {error}") for i in rows}
            continue
        sizes = [None] * len(rows) if answers.sizes is None else answers.sizes.tolist()
        scales = [None] * len(rows) if won is None else won.tolist()
        each = zip(rows, answers.labels.tolist(), answers.confidences.tolist(), scales, sizes, strict=True)
        for i, label, confidence, scale, size in each:
            said[i] = Prediction(label, confidence, scale, held[i][2], size)
    return ((path, said[i]) for i, (path, _, _) in enumerate(held))


def classify(model: nn.Module, images: Tensor) -> tuple[Answers, Tensor | None]:
    """Classify images, `(N, H, W)` or `(N, C, H, W)` of bytes, on the model's device.

    Returns what the model says, and of a network whose first layer is steered which of its scales won where the
    response is largest, `(N,)`; None of others and of those with scale channels.
    """
    network, count = network_of(model), len(images)
    unknown = torch.zeros(count, dtype=torch.long)
    whole = ImageSet(images, unknown, torch.ones(count)).to(next(model.parameters()).device)
    return answer(model, whole), None if isinstance(model, ScaleChannels) else _winners(network, whole)


@torch.no_grad()
def _winners(network: Network, images: ImageSet) -> Tensor | None:
    if not isinstance(network, Network) or not isinstance(getattr(network, "first", None), ScaleSteerableConv2d):
        return None
    found, known = list[Tensor](), torch.tensor(network.first.scales, dtype=torch.float64)
    with arithmetic("float32"):
        for x, _ in images.batches(evaluation_batch(network, images)):
            response, winners = network.first(network.prepare(x), return_scales=True)
            places = response.flatten(1).argmax(1, keepdim=True)
            found.append(known[winners.flatten(1).gather(1, places).squeeze(1).cpu()])
    return torch.cat(found)
