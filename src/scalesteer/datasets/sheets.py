"""Contact sheets: images enlarged, each with a caption, as one PNG."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scalesteer.datasets.scale import DATASETS, SplitSpec
from scalesteer.datasets.sized import SIZED_DATASETS, SizedSpec
from scalesteer.datasets.sources import Images
from scalesteer.datasets.tensors import load_split
from scalesteer.files import DataError, replacing, require

FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_HEIGHT, _CAPTION, _GAP = 84, 14, 6  # least height of an image, height of a line of text and of a gap, in pixels


def contact_sheet(images: Images, captions: Sequence[str], columns: int) -> Any:
    """Lay images out in rows, small ones enlarged, each with its caption below: a Pillow image.

    Shape:
        images (N, H, W), or (N, 3, H, W) in colour
    """
    pil, pil_draw, pil_font = (require(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont"))
    images = images if images.ndim == 3 else images.transpose(0, 2, 3, 1)
    zoom = -(-_HEIGHT // images.shape[1])
    height, width = images.shape[1] * zoom, images.shape[2] * zoom
    step_y, step_x = height + _CAPTION + _GAP, width + _GAP
    mode, white = ("L", 255) if images.ndim == 3 else ("RGB", (255, 255, 255))
    sheet = pil.new(mode, (columns * step_x + _GAP, -(-len(images) // columns) * step_y + _GAP), white)
    draw, font = pil_draw.Draw(sheet), pil_font.load_default(10)  # has no Greek
    for position, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = _GAP + position % columns * step_x, _GAP + position // columns * step_y
        sheet.paste(pil.fromarray(image.repeat(zoom, 0).repeat(zoom, 1)), (x, y))
        draw.text((x + width / 2, y + height + 1), caption, fill=0, font=font, anchor="ma")
    return sheet


def draw(spec: SplitSpec | SizedSpec, part: str, output: Path, *, count: int = 40) -> None:
    """Write a sheet of a split's first images, or of its first objects from the smallest size to the largest.

    Each has its label and scale below it.
    """
    if not 1 <= count <= 1000:
        raise ValueError(f"`count` must be 1 to 1000 images (got {count}).")
    if isinstance(spec, SizedSpec):
        train, val, test = (min(count, objects) for objects in spec.sizes)  # few objects, soon drawn at all sizes
        spec = replace(spec, sizes=(train, val, test))
    loaded = load_split(part=part, **vars(spec))
    if not len(loaded):
        raise ValueError(f"the {part} part of this split is empty.")
    if isinstance(spec, SizedSpec):
        names, steps = SIZED_DATASETS[spec.dataset].classes, len(spec.sizes_of(part))
        rows = [i % (len(loaded) // steps) * steps + i * steps // count for i in range(count)]
    else:
        digits = tuple(f"{i}-{(i + 1) % 10}" if DATASETS[spec.dataset].paired else str(i) for i in range(10))
        names, rows = FASHION if spec.source == "fashion-mnist" else digits, [*range(min(count, len(loaded)))]
    scales = [", ".join(f"{s:.3g}" for s in np.atleast_1d(loaded.scales[row])) for row in rows]
    captions = [f"{names[loaded.labels[row]]}: {scale}" for row, scale in zip(rows, scales, strict=True)]
    save(contact_sheet(loaded.images[rows].numpy(), captions, columns=8), output)


def save(sheet: Any, output: Path) -> None:
    """Write a sheet as a PNG; if that fails, the old picture stays."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as file:
            sheet.save(file, "PNG", optimize=True)
    except OSError as error:
        raise DataError(f"cannot write {output} ({error.strerror or error}).") from error
