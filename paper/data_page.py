"""Redraw the pictures of data.md, measure what it states and refresh its tables: `python docs/data.py`."""

import json
from pathlib import Path

import numpy as np

from paper.reproduce import fill
from scalesteer.data import DATASETS, SOURCES, SplitSpec, build, fetch, load_part, load_split, scale, sheets
from scalesteer.data.elastic import ELASTIC_ALPHAS, ELASTIC_SIGMA, _displacements

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS.parent / "results" / "data"


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


def tables(measured: dict) -> str:
    lines = ["| source | release | pool, SHA-256 |", "|---|---|---|"]
    lines += [f"| {name} | {i['release']} | `{i['digest']}` |" for name, i in measured["sources"].items()]
    lines += [
        "",
        "| dataset | splits 0 to 5, first digits of SHA-256 | deviation of training pixels |",
        "|---|---|---|",
    ]
    for dataset, digests in measured["digests"].items():
        shown = " ".join(f"`{digest[:12]}`" for digest in digests)
        lines.append(f"| {dataset} | {shown} | {measured['train_std'][dataset]:.4f} |")
    lines += ["", "| dataset, resampler | edges of the ink within a pixel of the drawn scale |", "|---|---|"]
    lines += [f"| {name} | {100 * share:.1f} % |" for name, share in measured["edges_within_a_pixel"].items()]
    lines += ["", "| mnist-scale-local-2 | share |", "|---|---|"]
    lines.append(f"| bounding boxes share a column | {100 * measured['pairs_with_overlapping_boxes']:.1f} % |")
    lines.append(f"| ink shares a pixel | {100 * measured['pairs_with_overlapping_ink']:.1f} % |")
    lines += ["", "| elastic, alpha | displacement, rms | largest in 2,000 images |", "|---|---|---|"]
    for alpha, rms in measured["elastic_rms_px"].items():
        lines.append(f"| {alpha} | {rms:.2f} px | {measured['elastic_max_px'][alpha]:.1f} px |")
    return "\n".join(lines)


if __name__ == "__main__":
    RESULTS.mkdir(parents=True, exist_ok=True)
    draw()
    measured = measure()
    (RESULTS / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")
    page = DOCS / "data.md"
    page.write_text(fill(page.read_text(), {"measured": tables(measured)}))
