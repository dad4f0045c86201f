"""Redraw the pictures of docs/data.md and measure what it states: `python -m paper.data_page`."""

import json

import numpy as np

from paper import RESULTS as ALL_RESULTS
from scalesteer.data import DATASETS, SOURCES, SplitSpec, build, fetch, load_part, load_split, scale, sheets
from scalesteer.data.elastic import ELASTIC_ALPHAS, ELASTIC_SIGMA, _displacements

RESULTS = ALL_RESULTS / "data"


def draw() -> None:
    for dataset in DATASETS:
        sheets.draw(SplitSpec(dataset), "train", "samples", RESULTS / f"{dataset}.png")
    for sheet in ("resamplers", "elastic"):
        sheets.draw(SplitSpec(), "test", sheet, RESULTS / f"{sheet}.png")


def box_edges(images: np.ndarray) -> np.ndarray:
    """The first and one past the last row and column of ink brighter than a quarter of the maximum: (n, 4)."""
    bright = images > images.max((1, 2), keepdims=True) / 4
    found = []
    for axis in (2, 1):
        seen = bright.any(axis=axis)
        found += [seen.argmax(1), 28 - seen[:, ::-1].argmax(1)]
    return np.stack(found, 1)


def ink_within_a_pixel(dataset: str, resampler: str) -> float:
    """The share of bounding-box edges within a pixel of where the drawn scale puts them."""
    part, _ = load_part(SplitSpec(dataset, resampler=resampler), "test")
    originals = fetch(DATASETS[dataset].source).images[part.indices]
    expected = 14 + (box_edges(originals) - 14) * part.scales[:, None]
    return float((np.abs(box_edges(part.images) - expected) <= 1).mean())


def overlaps() -> tuple[float, float]:
    """The shares of pairs whose boxes share a column, and whose ink shares a pixel."""
    part, _ = load_part(SplitSpec("mnist-scale-local-2"), "test")
    pool = fetch("mnist")
    ink = part.images.any(axis=1)
    first, last = ink.argmax(1), 40 - ink[:, ::-1].argmax(1)
    shown, spans = [], []
    for side in (0, 1):
        digits = scale.shrink(pool.images[part.indices[:, side]], part.scales[:, side])
        start, width = scale._ink_columns(digits)
        place = first if side == 0 else last - width
        columns = np.arange(40) - (place - start)[:, None]
        padded = np.pad(digits, ((0, 0), (0, 0), (0, 1)))
        columns = np.where((columns >= 0) & (columns < 28), columns, 28)
        shown.append(np.take_along_axis(padded, columns[:, None, :], axis=2) > 0)
        spans.append((place, place + width))
    return float((spans[0][1] > spans[1][0]).mean()), float((shown[0] & shown[1]).any((1, 2)).mean())


def measure() -> dict:
    boxes, ink = overlaps()
    fields = [_displacements(np.arange(2000), (28, 28), alpha, ELASTIC_SIGMA, 0) / 256 for alpha in ELASTIC_ALPHAS]
    return {
        "sources": {name: vars(fetch(name).identity) for name in SOURCES},
        "digests": {dataset: [meta["digest"] for meta in build(dataset).values()] for dataset in DATASETS},
        "train_std": {dataset: load_split(dataset).std for dataset in DATASETS},
        "edges_within_a_pixel": {
            f"{dataset}, {resampler}": ink_within_a_pixel(dataset, resampler)
            for dataset in ("mnist-scale", "fmnist-scale")
            for resampler in scale.RESAMPLERS
        },
        "pairs_with_overlapping_boxes": boxes,
        "pairs_with_overlapping_ink": ink,
        "elastic_rms_px": {f"{a:g}": float((f**2).mean() ** 0.5) for a, f in zip(ELASTIC_ALPHAS, fields, strict=True)},
        "elastic_max_px": {f"{a:g}": float(np.abs(f).max()) for a, f in zip(ELASTIC_ALPHAS, fields, strict=True)},
    }


if __name__ == "__main__":
    RESULTS.mkdir(parents=True, exist_ok=True)
    draw()
    measured = measure()
    (RESULTS / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")
