"""Masks of pictures by a network that makes maps: an image of labels for each, and a table of the objects in all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from scalesteer import files
from scalesteer.app.maps import answer_maps
from scalesteer.app.object_sizes import compare, find_end, measure_regions, remark_ends
from scalesteer.app.pictures import PictureError
from scalesteer.app.predict import reader
from scalesteer.instances import Region, find_regions

COLUMNS = ("picture", "object", "class", "row", "column", "height", "width", "area", "size")
MOST_OBJECTS = (1 << 16) - 1  # that an image of labels of 16 bits can tell apart


def find_masks(
    model: nn.Module,
    paths: Mapping[Path, str],
    *,
    background: int = 0,
    least: int = 1,
    own_pixel_size: float | None = None,
) -> Iterator[tuple[Path, NDArray[np.int32], list[Region] | PictureError]]:
    """Of each picture an image of labels `(H, W)`, in its own pixels, and its objects; or why it cannot be used."""
    read = reader(model, own_pixel_size=own_pixel_size)
    for path in paths:
        try:
            pixels = read(path).pixels
            maps = answer_maps(model, pixels)
            labels, sizes = (_enlarged(part, maps.stride, pixels.shape[-2:]) for part in (maps.labels, maps.sizes))
            image, regions = find_regions(labels, sizes, background=background, least=least)
            if len(regions) > MOST_OBJECTS:
                raise PictureError(f"{path} has {len(regions):,} objects, and the limit is {MOST_OBJECTS:,}.")
            yield path, image, regions
        except PictureError as error:
            yield path, np.zeros((0, 0), np.int32), error


def _enlarged(part: Any, stride: int, size: tuple[int, ...]) -> Any:
    """A map in the pixels of the picture; what it does not reach is as at its border."""
    if part is None:
        return None
    rows, columns = ((np.arange(n) // stride).clip(max=count - 1) for n, count in zip(size, part.shape, strict=True))
    return part[rows][:, columns]


class Sizes:
    """The sizes of the objects in some pictures, to say in the end which are beyond training and scale channels."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self.model, self.every = model, every
        self.seen, self.extents, self.ends = 0, list[float](), list[float | None]()

    def add(self, image: NDArray[np.int32], regions: Sequence[Region]) -> None:
        """Another picture; one in so many is measured."""
        if self.seen % self.every == 0:
            self.extents.append(measure_regions(image, regions))
            usual = float(np.median([one.size for one in regions])) if regions else 1.0
            self.ends.append(find_end(self.model, usual))
        self.seen += 1

    def remarks(self) -> list[str]:
        """Sentences for whoever reads the table."""
        return remark_ends(self.ends, f"of {len(self.ends):,} pictures") + compare(self.model, self.extents)


def save_labels(image: NDArray[np.int32], path: Path) -> None:
    """An image of labels as a PNG of 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = files.require("PIL.Image").fromarray(image.astype(np.uint16))
    with files.replacing(path) as file:
        picture.save(file, "PNG")


def rows(path: Path, regions: Sequence[Region], classes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects of a picture as rows of the table; places are in pixels, from the picture's corner."""
    for number, one in enumerate(regions, start=1):
        name = classes[one.label] if classes else str(one.label)
        where = round(one.row, 2), round(one.column, 2), one.height, one.width, one.area, round(one.size, 4)
        yield dict(zip(COLUMNS, (str(path), number, name, *where), strict=True))
