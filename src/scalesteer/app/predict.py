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
from scalesteer.app.object_sizes import compare, find_end, measure_picture, remark_ends, sample_every
from scalesteer.app.pictures import SUFFIXES, PictureError, find_pictures, picture_name, read_picture, read_scaled
from scalesteer.app.tiles import tiled
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import ImageSet
from scalesteer.models import network_of
from scalesteer.models.network import Network, Task
from scalesteer.models.pooled import PooledNetwork
from scalesteer.nn import ScaleSteerableConv2d

READ_AHEAD, READ_AHEAD_BYTES = 64, 1 << 26  # pictures, and their bytes, that are held to be classified together
RECORD = ("picture", "class", "label", "confidence", "size", "pixels", "scale", "inverted")


class Seen(NamedTuple):
    """A picture as a model sees it."""

    pixels: NDArray[np.uint8]  # (H, W) or (3, H, W)
    inverted: bool  # it was dark on light, and turned round
    factor: float  # by which it was resized
    zoom: float = 1.0  # by which it was resized before, for the size of its pixels
    extent: float | None = None  # of the objects in it, in its pixels; 0 if it is not sure, None if nobody measured it


Reader = Callable[[Path | BinaryIO], Seen]


class Prediction(NamedTuple):
    """What a model says of one image."""

    label: int
    confidence: float  # the probability of the label
    scale: float | None  # which of the first layer's scales won where its response is largest, if it has scales
    inverted: bool  # the image was dark on light, and turned round
    size: float | None = None  # of the object in the picture, relative to the usual one in training's pictures
    pixels: float | None = None  # the same in pixels of the picture, if training's objects were measured
    factor: float = 1.0  # by which the picture was resized
    end: float | None = None  # the size of the last channel, if that one answered and no training object has it
    extent: float | None = None  # as in `Seen`


def predict_files(
    model: nn.Module, paths: Iterable[Path], fit: str | None = None, own_pixel_size: float | None = None
) -> Iterator[tuple[Path, Prediction | PictureError]]:
    """Classify picture files, many at a time, on the model's device; results come in the order of `paths`.

    The model's task says how a picture is read (:func:`choose_fit`); what is for black ground is made light on black,
    cut and centred (:func:`.drawings.fit_drawing`). Without a size of the images pictures keep theirs. Large pictures
    are looked at in tiles (:mod:`.tiles`).

    Args:
        model: A network of :func:`scalesteer.create_model`.
        paths: The files. One that cannot be used gets a PictureError in the place of a prediction.
        fit: How pictures are brought to the size of the images instead, as in :func:`.pictures.read_picture`.
        own_pixel_size: Of a pixel of these pictures, in micrometres; by default what their files say.
    """
    read, every = reader(model, fit, own_pixel_size), sample_every(paths)
    measured = network_of(model).task.object_sizes is not None
    held: list[tuple[Path, Seen | PictureError]] = []
    held_bytes = 0
    for number, path in enumerate(paths):
        try:
            seen = read(path)
            if measured and number % every == 0:
                seen = seen._replace(extent=measure_picture(seen.pixels))
            held.append((path, seen))
            held_bytes += seen.pixels.nbytes
        except PictureError as error:
            held.append((path, error))
        if len(held) >= READ_AHEAD or held_bytes >= READ_AHEAD_BYTES:
            yield from _answer(model, held)
            held, held_bytes = [], 0
    yield from _answer(model, held)


def choose_fit(model: nn.Module, wanted: str | None = None) -> str:
    """How pictures are brought to the size of a network's images: as it is wanted, or as in training.

    Where training padded pictures and did not resize them, a larger one keeps its scale and its size too ("keep"), with
    a network that takes any.

    Raises:
        ValueError: If pictures are wanted to keep a size that the network does not take.
    """
    network = network_of(model)
    any_size = isinstance(network, PooledNetwork)
    if wanted == "keep" and not any_size:
        raise ValueError('`fit` must not be "keep" for this network, which takes one size of image.')
    kept = any_size and network.task.fit == "pad" and network.task.scale == 1
    return wanted or ("keep" if kept else network.task.fit)


def columns(model: nn.Module) -> list[str]:
    """The keys of a record that this model can fill in."""
    network, scaled = network_of(model), isinstance(model, ScaleChannels)
    steered = isinstance(getattr(network, "first", None), ScaleSteerableConv2d) and not scaled
    missing = {"size": not scaled, "pixels": not scaled or network.task.object_size is None}
    missing |= {"scale": not steered, "inverted": not _is_drawing(network.task)}
    return [name for name in RECORD if not missing.get(name)]


def describe(path: Path, said: Prediction, classes: Sequence[str] = ()) -> dict[str, Any]:
    """A prediction with the name of its class, JSON-ready; its keys are `RECORD`."""
    name = classes[said.label] if classes else str(said.label)
    size, scale = (None if number is None else round(number, 4) for number in (said.size, said.scale))
    pixels = None if said.pixels is None else round(said.pixels, 1)
    values = (str(path), name, said.label, round(said.confidence, 6), size, pixels, scale, said.inverted)
    return dict(zip(RECORD, values, strict=True))


def to_sentence(record: Mapping[str, Any]) -> str:
    """A record for a terminal, on one line."""
    words = f"{record['picture']}: class {record['class']}, confidence {100 * record['confidence']:.1f} %"
    for name in ("size", "scale"):
        words += f", {name} {record[name]:.2f}" if record[name] is not None else ""
        words += f" ({record['pixels']:.0f} pixels)" if name == "size" and record["pixels"] is not None else ""
    return printable(words + (" (dark on light: inverted)" if record["inverted"] else ""))


def remarks(model: nn.Module, said: Sequence[Prediction], fit: str | None = None) -> list[str]:
    """What a reader of these predictions should know: pictures that were resized, and sizes beyond the channels."""
    found, task, many = list[str](), network_of(model).task, f"of {len(said):,} pictures"
    if resized := sum(abs(one.factor - 1) > 1e-6 for one in said):
        shape = "" if task.image_size is None else " to {} x {} pixels".format(*task.image_size)
        why = "as --fit says" if fit else "as in training"
        found.append(f"{resized:,} {many} were resized{shape}, {why}; --fit keep looks at pictures as they are")
    found += remark_ends([one.end for one in said], many)
    return found + compare(model, [one.extent for one in said if one.extent is not None])


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


def reader(model: nn.Module, fit: str | None = None, own_pixel_size: float | None = None, **options: Any) -> Reader:
    """Reads a file as a model wants it.

    `own_pixel_size` is that of the pictures, by default what their files say. `fit` is as in :func:`predict_files`,
    `options` are those of :func:`.pictures.read_picture`.
    """
    task = network_of(model).task
    options |= {name: getattr(task, name) for name in ("value_range", "percentiles", "planes")}
    if not _is_drawing(task):
        way = choose_fit(model, fit)
        options |= {"pixel_size": task.pixel_size}

        def read(path: Path | BinaryIO) -> Seen:
            own = own_pixel_size or (None if isinstance(path, Path) else task.pixel_size)  # of one that has no file
            return _as_it_is(*read_scaled(path, task.in_chans, task.image_size, way, own_pixel_size=own, **options))

        return read
    size: Any = task.image_size
    return lambda path: Seen(
        *fit_drawing(read_picture(path, 1, contrast=True, **options), size, picture_name(path)), 1.0
    )


def _as_it_is(pixels: NDArray[np.uint8], factor: float, zoom: float) -> Seen:
    return Seen(pixels, False, factor, zoom)


def _is_drawing(task: Task) -> bool:
    """Whether a network knows light drawings on black ground only."""
    return task.ground != "surroundings" and task.in_chans == 1 and task.image_size is not None


def _answer(
    model: nn.Module, held: list[tuple[Path, Seen | PictureError]]
) -> Iterator[tuple[Path, Prediction | PictureError]]:
    """Classify pictures that are read: those of one size together."""
    said: dict[int, Prediction | PictureError] = {}
    by_shape: dict[tuple[int, ...], list[int]] = {}
    seen = {i: one for i, (_, one) in enumerate(held) if isinstance(one, Seen)}
    said |= {i: one for i, (_, one) in enumerate(held) if isinstance(one, PictureError)}
    for i, one in seen.items():
        by_shape.setdefault(one.pixels.shape, []).append(i)
    for shape, rows in by_shape.items():
        images = torch.from_numpy(np.stack([seen[i].pixels for i in rows]))
        try:
            answers, won = classify(model, images)
        except ValueError as error:
            if network_of(model).task.image_size is not None and not isinstance(error, PictureError):
                raise
            # A channel that would enlarge them too much; or a network for any size, which needs more pixels than these.
            found = " x ".join(map(str, shape[-2:]))
            said |= {i: PictureError(f"{held[i][0]} ({found} pixels) cannot be used: {error}") for i in rows}
            continue
        sizes = [None] * len(rows) if answers.sizes is None else answers.sizes.tolist()
        scales = [None] * len(rows) if won is None else won.tolist()
        each = zip(rows, answers.labels.tolist(), answers.confidences.tolist(), scales, sizes, strict=True)
        for i, label, confidence, scale, size in each:
            said[i] = _predict(model, seen[i], Prediction(label, confidence, scale, seen[i].inverted, size))
    return ((path, said[i]) for i, (path, _) in enumerate(held))


def _predict(model: nn.Module, seen: Seen, said: Prediction) -> Prediction:
    """A prediction whose size is that in the image, with the size in the picture that the image was made from."""
    said, task = said._replace(factor=seen.factor, extent=seen.extent), network_of(model).task
    if said.size is None or not isinstance(model, ScaleChannels):
        return said
    pixels = None if task.object_size is None else said.size * task.object_size / (seen.factor * seen.zoom)
    size = said.size if task.scale is None else said.size * task.scale / seen.factor
    return said._replace(size=size, pixels=pixels, end=find_end(model, said.size))


def classify(model: nn.Module, images: Tensor) -> tuple[Answers, Tensor | None]:
    """Classify images, `(N, H, W)` or `(N, C, H, W)` of bytes, on the model's device.

    Returns what the model says, and of a network whose first layer is steered which of its scales won where the
    response is largest, `(N,)`; None of others, of those with scale channels, and of pictures in tiles.
    """
    network, count = network_of(model), len(images)
    unknown = torch.zeros(count, dtype=torch.long)
    whole = ImageSet(images, unknown, torch.ones(count)).to(next(model.parameters()).device)
    looking = tiled(model, *images.shape[-2:])
    alone = isinstance(model, ScaleChannels) or looking is not model  # a large picture's first responses take too much
    return answer(looking, whole), None if alone else _winners(network, whole)


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
