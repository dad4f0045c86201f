"""What docs/data.md shows: the datasets in tables, what was measured of their images, and sheets of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paper import RESULTS, recorded
from paper.markdown import table, view
from scalesteer import datasets as data
from scalesteer.datasets import sheets
from scalesteer.datasets.elastic import ELASTIC_SIGMA, displacements
from scalesteer.datasets.scale import RESAMPLERS, Part, shrink


def box_edges(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The first and one past the last row and column of ink brighter than a quarter of the maximum: `(N, 4)`."""
    bright = images > images.max((1, 2), keepdims=True) / 4
    found = []
    for axis in (2, 1):
        seen = bright.any(axis=axis)
        found += [seen.argmax(1), 28 - seen[:, ::-1].argmax(1)]
    return np.stack(found, 1)


def edges_within_a_pixel(dataset: str, resampler: str) -> float:
    """The share of bounding-box edges of a test part within a pixel of where the drawn scale puts them."""
    part, _ = data.load_part(data.SplitSpec(dataset, resampler=resampler), "test")
    originals = data.fetch(data.DATASETS[dataset].source).images[part.indices]
    expected = 14 + (box_edges(originals) - 14) * part.scales[:, None]
    return float((np.abs(box_edges(part.images) - expected) <= 1).mean())


def overlaps() -> tuple[float, float]:
    """Of the pairs of MNIST-scale-local-2: the shares whose boxes share a column, and whose ink shares a pixel."""
    part, _ = data.load_part(data.SplitSpec("mnist-scale-local-2"), "test")
    pool = data.fetch("mnist")
    ink = np.asarray(part.images.any(axis=1))
    first, last = ink.argmax(1), 40 - ink[:, ::-1].argmax(1)
    shown, spans = [], []
    for side in (0, 1):
        digits = shrink(pool.images[part.indices[:, side]], part.scales[:, side])
        inked = np.asarray(digits.any(axis=1))
        start = inked.argmax(1)
        width = 28 - inked[:, ::-1].argmax(1) - start
        place = first if side == 0 else last - width  # where the digit's ink begins in the pair
        columns = np.arange(40) - (place - start)[:, None]
        padded = np.pad(digits, ((0, 0), (0, 0), (0, 1)))
        columns = np.where((columns >= 0) & (columns < 28), columns, 28)
        shown.append(np.take_along_axis(padded, columns[:, None, :], axis=2) > 0)
        spans.append((place, place + width))
    return float((spans[0][1] > spans[1][0]).mean()), float((shown[0] & shown[1]).any((1, 2)).mean())


def measure_data() -> dict[str, Any]:
    """Every number of docs/data.md."""
    boxes, ink = overlaps()
    fields = {
        f"{alpha:g}": displacements(np.arange(2000), (28, 28), alpha, ELASTIC_SIGMA, 0) / 256
        for alpha in data.ELASTIC_ALPHAS
    }
    return {
        "digests": {dataset: [meta["digest"] for meta in data.build(dataset).values()] for dataset in data.DATASETS},
        "train_std": {dataset: data.load_split(dataset).std for dataset in data.DATASETS},
        "edges_within_a_pixel": {
            f"{dataset}, {resampler}": edges_within_a_pixel(dataset, resampler)
            for dataset in ("mnist-scale", "fmnist-scale")
            for resampler in RESAMPLERS
        },
        "pairs_with_overlapping_boxes": boxes,
        "pairs_with_overlapping_ink": ink,
        "elastic_rms_px": {alpha: float((field**2).mean() ** 0.5) for alpha, field in fields.items()},
        "elastic_max_px": {alpha: float(np.abs(field).max()) for alpha, field in fields.items()},
    }


# Views


@view
def data_sized() -> str:
    """The datasets of sizes never seen in training."""
    objects = "objects for training / validation / test"
    rows: list[tuple[object, ...]] = [("name", "image", "classes", objects, "sizes", "training sizes by default")]
    for name, own in data.SIZED_DATASETS.items():
        image = f"{own.canvas} x {own.canvas}{', colour' if own.in_chans == 3 else ''}"
        span = f"{own.sizes[0]:g} to {own.sizes[-1]:g}{' px' if own.sizes[0] > 8 else ''}, {len(own.sizes)} steps"
        low, high = own.train_sizes
        counts = " / ".join(f"{count:,}" for count in own.counts)
        rows.append((f"`{name}`", image, len(own.classes), counts, span, f"{low:g}" if low == high else "all"))
    return table(rows, left=2)


@view
def data_overlap() -> str:
    """The share of pairs, in %, whose ink meets in a pixel."""
    return f"{100 * recorded('data/measured.json')['pairs_with_overlapping_ink']:.1f}"


# Sheets


def resamplers_sheet(part: Part) -> Any:
    """Three images of MNIST, shrunk by each resampler to six sizes."""
    scales = np.array([1, 0.8, 0.65, 0.5, 0.4, 0.3], np.float32)
    rows = [(index, resampler) for index in part.indices.reshape(-1)[:3] for resampler in RESAMPLERS]
    originals = data.fetch("mnist").images
    images = [shrink(originals[[index] * len(scales)], scales, resampler) for index, resampler in rows]
    captions = [f"{resampler} {scale:.2f}" for _, resampler in rows for scale in scales]
    return sheets.contact_sheet(np.concatenate(images), captions, columns=len(scales))


def elastic_sheet(part: Part) -> Any:
    """The three largest images under elastic deformation of every strength, for three widths."""
    large = np.argsort(-part.scales.reshape(len(part.labels), -1).min(1), kind="stable")[:3]
    fields = [(sigma, alpha) for sigma in (3.0, 4.0, 6.0) for alpha in data.ELASTIC_ALPHAS]
    images = [data.distort(part.images[large], alpha, sigma=sigma, indices=large) for sigma, alpha in fields]
    captions = [f"alpha={alpha:g} sigma={sigma:g}" for sigma, alpha in fields for _ in large]
    return sheets.contact_sheet(np.concatenate(images), captions, columns=len(data.ELASTIC_ALPHAS) * len(large))


def draw_sheets() -> None:
    """Draw the sheets of images that docs/data.md shows."""
    for dataset in data.DATASETS:
        sheets.draw(data.SplitSpec(dataset), "train", RESULTS / "data" / f"{dataset}.png")
    for dataset in data.SIZED_DATASETS:
        sheets.draw(data.SizedSpec(dataset), "test", RESULTS / "data" / f"{dataset}.png")
    part = data.load_part(data.SplitSpec(), "test")[0]
    sheets.save(resamplers_sheet(part), RESULTS / "data" / "resamplers.png")
    sheets.save(elastic_sheet(part), RESULTS / "data" / "elastic.png")
