"""The datasets of the paper's experiments, built from the pooled originals to the same bytes everywhere.

Randomness comes from :mod:`.streams`, and resampling is exact integer arithmetic, so that a split's digest does not
depend on versions, processors or on what else is built.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scalesteer import files
from scalesteer._checks import choice, integer, lookup, reals
from scalesteer.datasets import sources
from scalesteer.datasets.sources import SIDE, DataDir, Identity, Images, Pool
from scalesteer.datasets.streams import random_below, random_bits, random_uniform, stream_key

PARTS = ("train", "val", "test")
RESAMPLERS = ("bilinear", "antialias")
SPLITS = range(6)
RECIPE = 1  # raised whenever the same spec gives other bytes, so that no cache serves the old ones
PINNED = json.loads(Path(__file__).with_name("digests.json").read_text())
"""Digests of what is published, by the names of files in the cache or of parts: a file may be whole and another's."""
PAIR_WIDTH = 40
PAIR_SOURCES = (14_000, 3_000, 53_000)
PAIR_CROSSING = 1  # pixels a digit may reach over the middle; docs/data.md has the overlap it gives


@dataclass(frozen=True)
class Dataset:
    """What the paper says of a dataset."""

    source: str
    scale_range: tuple[float, float]
    sizes: tuple[int, int, int]
    paired: bool = False


DATASETS = {
    "mnist-scale": Dataset("mnist", (0.3, 1.0), (10_000, 2_000, 50_000)),
    "fmnist-scale": Dataset("fashion-mnist", (0.3, 1.0), (10_000, 2_000, 50_000)),
    "mnist-scale-local-2": Dataset("mnist", (0.7, 1.0), (10_000, 2_000, 40_000), paired=True),
}


@dataclass(frozen=True)
class SplitSpec:
    """Everything that decides a split's content, apart from the source itself.

    The order in which images are drawn depends on `dataset`, `split` and `seed` only: specs that differ in
    `scale_range` or `resampler` show the same images in the same parts, at other scales.

    Args:
        dataset: One of `DATASETS`.
        split: 0 to 5 in the paper; any further number is one more draw.
        scale_range: The factors to shrink by, uniform between the two (may be equal). The dataset's own by default.
        resampler: "bilinear" as in the paper's released code, or "antialias".
        sizes: How many images for training, validation and testing. The dataset's own by default.
        seed: Another seed gives another six splits.

    >>> SplitSpec("mnist-scale", sizes=(3000, 0, 1000), scale_range=(0.4, 0.4)).sizes
    (3000, 0, 1000)
    """

    dataset: str = "mnist-scale"
    split: int = 0
    scale_range: tuple[float, float] = None  # type: ignore[assignment]  # filled in below
    resampler: str = "bilinear"
    sizes: tuple[int, int, int] = None  # type: ignore[assignment]
    seed: int = 0

    def __post_init__(self) -> None:
        dataset = lookup("dataset", self.dataset, tuple(DATASETS))
        default = DATASETS[dataset]
        choice("resampler", self.resampler, RESAMPLERS)
        scales = reals("scale_range", default.scale_range if self.scale_range is None else self.scale_range)
        if len(scales) != 2 or not 0.1 <= scales[0] <= scales[1] <= 1:
            allowed = "(low, high) with 0.1 <= low <= high <= 1"
            raise ValueError(f"`scale_range` must be {allowed} (got {scales}): images only shrink, to a tenth at most.")
        counts = default.sizes if self.sizes is None else self.sizes
        if not isinstance(counts, (tuple, list)):
            raise TypeError(f"`sizes` must be three counts (got {counts!r}).")
        sizes = tuple(integer(f"sizes[{i}]", count, minimum=0) for i, count in enumerate(counts))
        limit = 1_000_000 if default.paired else sources.POOL_SIZE
        if len(sizes) != 3 or not 0 < sum(sizes) <= limit:
            raise ValueError(f"`sizes` must be three counts, 1 to {limit:,} images in all (got {sizes}).")
        split, seed = (integer(name, getattr(self, name), minimum=0) for name in ("split", "seed"))
        # Frozen for everyone else.
        vars(self).update(dataset=dataset, scale_range=scales, sizes=sizes, split=split, seed=seed)

    @property
    def source(self) -> str:
        return DATASETS[self.dataset].source


@dataclass(frozen=True)
class Part:
    """The training, validation or test images of a split. A pair has two scales and two indices."""

    images: Images  # (N, 28, 28) or (N, 28, 40)
    labels: Images  # (N,)
    scales: NDArray[np.float32]  # (N,) or (N, 2), as drawn
    indices: NDArray[np.int32]  # (N,) or (N, 2), into the pool


def resampling_matrix(size: int, resampler: str) -> NDArray[np.float64]:
    """Integer weights (size, 28) that shrink a row of 28 pixels to `size`; row sums are the divisors.

    "bilinear" aligns the corner pixels: output i samples the input at 27 i / (size - 1), between two pixels
    (scipy.ndimage.zoom with order 1). "antialias" averages under a triangle two output pixels wide (Pillow's BILINEAR).
    """
    out, into = np.indices((size, SIDE))
    if resampler == "bilinear":
        reach, distance = size - 1, out * (SIDE - 1) - into * (size - 1)
    else:
        reach, distance = 2 * SIDE, (2 * out + 1) * SIDE - (2 * into + 1) * size
    weights: NDArray[np.float64] = np.maximum(0.0, reach - np.abs(distance))
    return weights


def shrink(images: Images, scales: NDArray[np.float32], resampler: str = "bilinear") -> Images:
    """Shrink each image by its own factor s, to round(28 s) pixels, halves up, and centre it on black.

    Weights are integers and so is every sum of products: exact in float64, whatever the order of summation. Only the
    last step rounds, to the nearest grey value, halves up; no quotient comes closer to a half than float64 can tell.

    Shape:
        images (N, 28, 28), scales (N,) -> (N, 28, 28)
    """
    result = np.zeros_like(images)
    sizes = np.floor(SIDE * scales.astype(np.float64) + 0.5).astype(np.int64)
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        weights = resampling_matrix(size, resampler)
        divisor = np.outer(weights.sum(1), weights.sum(1))
        first = (SIDE - size) // 2
        for chunk in np.array_split(rows, len(rows) // 512 + 1):
            sums = weights @ images[chunk].astype(np.float64) @ weights.T  # (n, size, size)
            result[chunk, first : first + size, first : first + size] = np.floor(sums / divisor + 0.5)
    return result


def build_split(pool: Pool, spec: SplitSpec) -> dict[str, Part]:
    """Build the three parts of a split. Pure: the same pool and spec give the same bytes."""
    if pool.identity.source != spec.source:
        raise ValueError(f"{spec.dataset} is made from {spec.source} (got {pool.identity.source}).")
    order = np.argsort(random_bits(_key(spec, "order"), np.arange(len(pool.labels))), kind="stable")
    make, sizes = (_pair_part, PAIR_SOURCES) if DATASETS[spec.dataset].paired else (_scale_part, spec.sizes)
    spans = zip(PARTS, pairwise(np.cumsum([0, *sizes])), strict=True)
    return {part: make(pool, spec, part, order[start:stop]) for part, (start, stop) in spans}


def _scale_part(pool: Pool, spec: SplitSpec, part: str, chosen: NDArray[np.int64]) -> Part:
    scales = random_uniform(_key(spec, "scale"), chosen, *spec.scale_range)
    images = shrink(pool.images[chosen], scales, spec.resampler)
    return Part(images, pool.labels[chosen], scales, chosen.astype(np.int32))


def _pair_part(pool: Pool, spec: SplitSpec, part: str, chosen: NDArray[np.int64]) -> Part:
    """Example e is of class d = e mod 10 and shows d on the left, d + 1 (9: 0) on the right."""
    example = np.arange(spec.sizes[PARTS.index(part)])
    label = example % 10
    canvas = np.zeros((len(example), SIDE, PAIR_WIDTH), np.uint8)
    scales, indices = np.empty((2, len(example)), np.float32), np.empty((2, len(example)), np.int32)
    by_digit = [chosen[pool.labels[chosen] == digit] for digit in range(10)]
    counts = np.array([len(images) for images in by_digit])
    if counts.min() == 0:
        raise ValueError("a part of the pool holds no image of some digit.")
    starts = np.cumsum(counts) - counts
    for side, digit in enumerate((label, (label + 1) % 10)):
        name = f"{part}-{('left', 'right')[side]}"
        pick = random_below(_key(spec, name), example, counts[digit])
        indices[side] = np.concatenate(by_digit)[starts[digit] + pick]
        scales[side] = random_uniform(_key(spec, f"{name}-scale"), example, *spec.scale_range)
        images = shrink(pool.images[indices[side]], scales[side], spec.resampler)
        # A digit's ink lies anywhere in its half, or up to PAIR_CROSSING pixels over the middle.
        inked = np.asarray(images.any(axis=1))  # (n, 28), by column
        first = inked.argmax(axis=1)
        width = SIDE - inked[:, ::-1].argmax(axis=1) - first
        room = np.maximum(1, PAIR_WIDTH // 2 + PAIR_CROSSING - width + 1)
        place = random_below(_key(spec, f"{name}-place"), example, room)
        shifts = (place if side == 0 else PAIR_WIDTH - width - place) - first
        for shift in np.unique(shifts).tolist():
            rows = np.flatnonzero(shifts == shift)
            start, stop = max(0, shift), min(PAIR_WIDTH, SIDE + shift)
            moved = images[rows, :, start - shift : stop - shift]
            canvas[rows, :, start:stop] = np.maximum(canvas[rows, :, start:stop], moved)
    return Part(canvas, label.astype(np.uint8), scales.T.copy(), indices.T.copy())


def _key(spec: SplitSpec, what: str) -> int:  # of a split's own stream of random numbers
    return stream_key(spec.dataset, spec.seed, spec.split, what)


def split_path(spec: SplitSpec, identity: Identity) -> Path:
    """Where the cache keeps a split: any difference in spec or source gives another file."""
    digest = files.combined_digest(_about(spec, identity))
    return files.cache_dir() / "splits" / f"{spec.dataset}-{spec.split}-{digest[:12]}.safetensors"


def _about(spec: SplitSpec, identity: Identity) -> dict[str, Any]:
    described = json.dumps(asdict(spec) | {"recipe": RECIPE, "source": vars(identity)})
    return dict(json.loads(described))  # tuples as JSON gives them back


def build(
    dataset: str = "mnist-scale", splits: Iterable[int] = SPLITS, *, data_dir: DataDir = None, **options: Any
) -> dict[int, dict[str, Any]]:
    """Build the splits that the cache does not hold yet, with a progress bar on a terminal.

    `data_dir` is a directory with the original files (see :func:`.sources.fetch`); `options` are the other fields of
    :class:`SplitSpec`. Each split's description comes back: spec, source, the digest of every array and of the whole.
    """
    specs = [SplitSpec(dataset, split, **options) for split in splits]
    bar = files.progress_bar(specs, desc=f"building {dataset}", unit="split")
    return {spec.split: _open(spec, "", data_dir)[1] for spec in bar}


def load_part(spec: SplitSpec, part: str = "train", *, data_dir: DataDir = None) -> tuple[Part, dict[str, Any]]:
    """One part of a split ("train", "val" or "test"), from the cache if it has it undamaged, or built and kept.

    `data_dir` is a directory with the original files (see :func:`.sources.fetch`). Beside the part comes the split's
    description as :func:`build` gives it.
    """
    prefix = f"{choice('part', part, PARTS)}/"
    tensors, meta = _open(spec, prefix, data_dir)
    return Part(**{field.name: tensors[prefix + field.name].numpy() for field in fields(Part)}), meta


def _open(spec: SplitSpec, prefix: str, data_dir: DataDir) -> files.Content:
    identity, _ = sources.identify(spec.source, data_dir)
    about = _about(spec, identity)
    names = {f"{part}/{field.name}" for part in PARTS for field in fields(Part)}
    path = split_path(spec, identity)
    pinned = PINNED["splits"].get(path.stem)

    def is_sound(meta: dict[str, Any]) -> bool:
        same = meta["about"] == about and meta["arrays"].keys() == names
        return same and pinned in (None, meta["digest"])

    def make() -> files.Content:
        parts = build_split(sources.fetch(spec.source, data_dir), spec)
        return {f"{p}/{name}": torch.from_numpy(array) for p in PARTS for name, array in vars(parts[p]).items()}, about

    return files.cached(path, prefix, is_sound, make)
