"""TIFF files of microscopes: how large a pixel is, which bits are used, and planes that are one picture's channels."""

from __future__ import annotations

import logging
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalesteer.files import require

MOST_BYTES = 1 << 30  # of all planes of a file
LONGEST_DESCRIPTION = 16 << 20
SQUARE = 1.01  # sides of a pixel that differ by less are equal
_DESCRIPTION, _ACROSS, _DOWN = 270, 282, 283  # tags of a TIFF file: text, and pixels per unit along both axes
MICROMETRES = {"m": 1e6, "cm": 1e4, "centimeter": 1e4, "mm": 1e3, "nm": 1e-3, "um": 1.0, "inch": 25_400.0}
MICROMETRES |= dict.fromkeys(("µm", "μm", "\\u00b5m", "micron", "microns", "micrometer", "micrometre"), 1.0)
AXES = {"Z": "depth", "T": "time", "C": "channel", "S": "sample", "Q": "unknown", "I": "page"}
NOT_CHOSEN = "--planes says which are a picture's red, green and blue, or its grey, counted from 0"


class About(NamedTuple):
    """What a file says of its numbers."""

    sides: tuple[float, float] | None = None  # of a pixel in micrometres: its width and its height
    bits: int | None = None  # that its numbers use
    names: tuple[str, ...] = ()  # of its channels

    @property
    def pixel_size(self) -> float | None:
        """A pixel's side in micrometres; a ValueError if it is no square."""
        if self.sides is not None and max(self.sides) > SQUARE * min(self.sides):
            width, height = self.sides
            raise ValueError(f"its pixels are no squares (they are {width:.4g} x {height:.4g} micrometres)")
        return None if self.sides is None else self.sides[0]


def find_about(tags: Mapping[int, Any]) -> About:
    """What the tags of a TIFF file say, in OME's words or in ImageJ's.

    >>> find_about({270: "ImageJ=1.54\\nunit=nm", 282: 0.01, 283: 0.01}).pixel_size
    0.1
    """
    text = str(tags.get(_DESCRIPTION, ""))[:LONGEST_DESCRIPTION]
    if text.startswith("ImageJ="):
        unit = re.search(r"^unit=(.*)$", text, re.MULTILINE)
        scale = MICROMETRES.get(unit[1].strip().lower(), 0.0) if unit else 0.0
        sides = [scale / float(tags[tag]) if float(tags.get(tag, 0)) > 0 else 0.0 for tag in (_ACROSS, _DOWN)]
        return About(_known(sides))
    if "<OME" not in text[:2000]:
        return About()
    try:
        pixels = next(node for node in ElementTree.fromstring(text).iter() if node.tag.endswith("}Pixels"))
    except (ElementTree.ParseError, StopIteration):
        return About()
    sides = []
    for axis in "XY":
        scale = MICROMETRES.get(pixels.get(f"PhysicalSize{axis}Unit", "µm").lower(), 0.0)
        sides.append(scale * _number(pixels.get(f"PhysicalSize{axis}")))
    bits = int(_number(pixels.get("SignificantBits")))
    names = tuple(node.get("Name", "") for node in pixels if node.tag.endswith("}Channel"))
    return About(_known(sides), bits if 0 < bits <= 32 else None, names if all(names) else ())


def _number(text: str | None) -> float:
    try:
        found = float(text or 0)
    except ValueError:
        return 0.0
    return found if math.isfinite(found) else 0.0


def _known(sides: Sequence[float]) -> tuple[float, float] | None:
    return (sides[0], sides[1]) if min(sides) > 0 and math.isfinite(max(sides)) else None


def read_stack(
    path: str | os.PathLike[str], planes: Sequence[int] | None, most_pixels: int
) -> tuple[NDArray[Any], About]:
    """The planes of a TIFF file that are a picture's channels, `(planes, H, W)`, up to three.

    Raises:
        ValueError: If it has planes of another kind, or more than `planes` chooses from; it names them.
        ImportError: If tifffile is not installed.
    """
    tifffile = require("tifffile")
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what is wrong is said by an exception
    with tifffile.TiffFile(os.fspath(path), _multifile=False) as file:
        if len(file.series) != 1:
            raise ValueError(f"it has {len(file.series)} pictures: save the one that you mean as a file of its own")
        series = file.series[0]
        sizes = {
            axis: count for axis, count in zip(series.axes, series.shape, strict=True) if count > 1 or axis in "YX"
        }
        if not {"X", "Y"} <= sizes.keys():
            raise ValueError(f"it has no picture of rows and columns (its axes are {series.axes})")
        if sizes["X"] * sizes["Y"] > most_pixels or series.nbytes > MOST_BYTES:
            shown = f"{sizes['X']:,} x {sizes['Y']:,} pixels and {series.nbytes / 2**30:.1f} GiB"
            raise ValueError(f"it has {shown}; the limits are {most_pixels // 10**6} megapixels and 1 GiB")
        page = series.pages[0]
        tags = {tag: page.tags[tag].value for tag in (_DESCRIPTION, _ACROSS, _DOWN) if tag in page.tags}
        tags |= {tag: part[0] / max(1, part[1]) for tag, part in tags.items() if isinstance(part, tuple)}
        about = find_about(tags)
        chosen = _choose(sizes, planes, about.names, page)
        values = np.asarray(series.asarray()).reshape(tuple(sizes.values()))
    values = values.transpose([*(i for i, axis in enumerate(sizes) if axis not in "YX"), *map([*sizes].index, "YX")])
    return np.ascontiguousarray(values.reshape(-1, *values.shape[-2:])[chosen]), about


def _choose(sizes: Mapping[str, int], planes: Sequence[int] | None, names: Sequence[str], page: Any) -> list[int]:
    """Which planes are the picture's channels."""
    more = {axis: count for axis, count in sizes.items() if axis not in "YX"}
    told = ", ".join(f"{count} of {AXES.get(axis, axis)}" for axis, count in more.items())
    others = [axis for axis in more if axis not in "CS"]
    if len(more) > 1 or (others and planes is None):
        advice = f"; {NOT_CHOSEN}" if len(more) == 1 else ": save what you mean as a file of its own"
        raise ValueError(f"it has several planes ({told}), and a picture has one of each channel{advice}")
    count = math.prod(more.values())
    if planes is not None:
        if beyond := [plane for plane in planes if plane >= count]:
            raise ValueError(f"it has {count} planes, counted from 0, and no plane {beyond[0]} (`planes`)")
        return list(planes)
    colours = 3 if "S" in more and getattr(page.photometric, "name", "") == "RGB" else count  # a fourth is opacity
    if colours > 3:
        known = f" ({', '.join(names)})" if names else ""
        raise ValueError(f"it has {count} channels{known}, and a picture has up to three: {NOT_CHOSEN}")
    return list(range(colours))
