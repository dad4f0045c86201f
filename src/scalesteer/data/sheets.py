"""Contact sheets: images enlarged, each with a caption, as one PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalesteer._checks import choice
from scalesteer.data.elastic import ELASTIC_ALPHAS, distort
from scalesteer.data.scale import DATASETS, RESAMPLERS, Part, SplitSpec, load_part, shrink
from scalesteer.data.sources import Images, fetch
from scalesteer.files import DataError, replacing, require

FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_ZOOM, _CAPTION, _GAP = 3, 14, 6  # how much images are enlarged; height of a line of text, and of a gap, in pixels


def contact_sheet(images: Images, captions: Sequence[str], columns: int) -> Any:
    """Lay images out in rows, every one three times enlarged with its caption below: a Pillow image."""
    pil, pil_draw, pil_font = (require(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont"))
    height, width = images.shape[1] * _ZOOM, images.shape[2] * _ZOOM
    step_y, step_x = height + _CAPTION + _GAP, width + _GAP
    sheet = pil.new("L", (columns * step_x + _GAP, -(-len(images) // columns) * step_y + _GAP), 255)
    draw, font = pil_draw.Draw(sheet), pil_font.load_default(10)  # has no Greek
    for position, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = _GAP + position % columns * step_x, _GAP + position // columns * step_y
        sheet.paste(pil.fromarray(image.repeat(_ZOOM, 0).repeat(_ZOOM, 1)), (x, y))
        draw.text((x + width / 2, y + height + 1), caption, fill=0, font=font, anchor="ma")
    return sheet


def draw(spec: SplitSpec, part: str, kind: str, output: Path, *, count: int = 40) -> None:
    """Write one of the sheets of a split: its images, the resamplers or elastic deformation."""
    make = SHEETS[choice("sheet", kind, tuple(SHEETS))]
    if not 1 <= count <= 1000:
        raise ValueError(f"`count` must be 1 to 1000 images (got {count}).")
    loaded, _ = load_part(spec, part)
    if not len(loaded.labels):
        raise ValueError(f"the {part} part of this split is empty.")
    sheet = make(loaded, spec, min(count, len(loaded.labels)))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as file:
            sheet.save(file, "PNG", optimize=True)
    except OSError as error:
        raise DataError(f"cannot write {output} ({error.strerror or error}).") from error


def _samples(part: Part, spec: SplitSpec, count: int) -> Any:
    digits = [f"{i}-{(i + 1) % 10}" if DATASETS[spec.dataset].paired else str(i) for i in range(10)]
    names = FASHION if spec.source == "fashion-mnist" else digits
    shown = zip(part.labels[:count], part.scales[:count], strict=True)
    captions = [f"{names[label]}: {', '.join(f'{s:.2f}' for s in np.atleast_1d(scale))}" for label, scale in shown]
    return contact_sheet(part.images[:count], captions, columns=8)


def _resamplers(part: Part, spec: SplitSpec, count: int) -> Any:
    scales = np.array([1, 0.8, 0.65, 0.5, 0.4, 0.3], np.float32)
    rows = [(index, resampler) for index in part.indices.reshape(-1)[: min(count, 3)] for resampler in RESAMPLERS]
    pool = fetch(spec.source)
    images = [shrink(pool.images[[index] * len(scales)], scales, resampler) for index, resampler in rows]
    captions = [f"{resampler} {scale:.2f}" for _, resampler in rows for scale in scales]
    return contact_sheet(np.concatenate(images), captions, columns=len(scales))


def _elastic(part: Part, spec: SplitSpec, count: int) -> Any:
    large = np.argsort(-part.scales.reshape(len(part.labels), -1).min(1), kind="stable")[: min(count, 3)]
    fields = [(sigma, alpha) for sigma in (3.0, 4.0, 6.0) for alpha in ELASTIC_ALPHAS]
    images = [distort(part.images[large], alpha, sigma=sigma, indices=large) for sigma, alpha in fields]
    captions = [f"alpha={alpha:g} sigma={sigma:g}" for sigma, alpha in fields for _ in large]
    return contact_sheet(np.concatenate(images), captions, columns=len(ELASTIC_ALPHAS) * len(large))


SHEETS = {"samples": _samples, "resamplers": _resamplers, "elastic": _elastic}
