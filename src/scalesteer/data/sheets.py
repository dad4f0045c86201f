"""Contact sheets: images enlarged, each with a caption, as one PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalesteer.data.scale import DATASETS, SplitSpec, load_part
from scalesteer.data.sources import Images
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


def draw(spec: SplitSpec, part: str, output: Path, *, count: int = 40) -> None:
    """Write a sheet of a split's first images, each with its label and scale."""
    if not 1 <= count <= 1000:
        raise ValueError(f"`count` must be 1 to 1000 images (got {count}).")
    loaded, _ = load_part(spec, part)
    if not len(loaded.labels):
        raise ValueError(f"the {part} part of this split is empty.")
    digits = [f"{i}-{(i + 1) % 10}" if DATASETS[spec.dataset].paired else str(i) for i in range(10)]
    names = FASHION if spec.source == "fashion-mnist" else digits
    shown = list(zip(loaded.labels, loaded.scales, strict=True))[:count]
    captions = [f"{names[label]}: {', '.join(f'{s:.2f}' for s in np.atleast_1d(scale))}" for label, scale in shown]
    save(contact_sheet(loaded.images[:count], captions, columns=8), output)


def save(sheet: Any, output: Path) -> None:
    """Write a sheet as a PNG; if that fails, the old picture stays."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as file:
            sheet.save(file, "PNG", optimize=True)
    except OSError as error:
        raise DataError(f"cannot write {output} ({error.strerror or error}).") from error
