"""The numbers of a picture as 8 bits: which of them are black and white, and planes as red, green and blue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalesteer import _checks
from scalesteer.app.stacks import About

Levels = tuple[str, tuple[float, float] | None]  # "range" or "percentiles", and which numbers or shares
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # tags of a TIFF file
_SIGNED, _FLOAT = 2, 3  # values of them
_ADVICE = (
    "give the numbers that are black and white (--percentiles, as 1 99, or --value-range, as 0 4095), or save it with "
    "8 bits"
)


def check_levels(value_range: tuple[float, float] | None, percentiles: tuple[float, float] | None) -> Levels:
    """Which numbers are black and white: how they are given, and they; a ValueError if they cannot be."""
    if percentiles is None:
        return "range", None if value_range is None else _checks.interval("value_range", value_range)
    if value_range is not None:
        raise ValueError(f"`percentiles` (got {percentiles}) and `value_range` (got {value_range}) exclude each other.")
    low, high = _checks.interval("percentiles", percentiles)
    if not 0 <= low < high <= 100:
        raise ValueError(f"`percentiles` must be from 0 to 100 (got {percentiles}).")
    return "percentiles", (low, high)


def merged(pil: Any, bands: Sequence[Any]) -> Any:
    """One grey plane, or two or three as red, green and blue."""
    if len(bands) == 1:
        return bands[0].convert("L")
    black = pil.new("L", bands[0].size)
    return pil.merge("RGB", [*(band.convert("L") for band in bands), black][:3])


def to_colours(pil: Any, values: NDArray[Any], levels: Levels, about: About) -> Any:
    """Planes `(planes, H, W)` as a picture of 8 bits."""
    if values.dtype.kind not in "buif":
        raise ValueError(f"its numbers are of a kind that is not read ({values.dtype})")
    if values.dtype.kind == "b":
        return merged(pil, [pil.fromarray(plane.astype(np.uint8) * 255) for plane in values])
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("some of its numbers are infinite or none at all (NaN)")
    if levels[1] is None and (values.dtype.kind != "u" or values.itemsize > 2):
        what = "fractions" if values.dtype.kind == "f" else "signed numbers or numbers of 32 bits"
        raise ValueError(f"it has {what} and does not say which are black and white: {_ADVICE}")
    top = (1 << about.bits) - 1 if about.bits else (1 << 8 * values.itemsize) - 1
    if levels[1] is None and about.bits is None and values.itemsize == 2:
        _check_lowest_quarter(int(values.max()), top)
    return merged(pil, [pil.fromarray(_scaled(plane, levels, top)) for plane in values])


def _scaled(values: NDArray[Any], levels: Levels, top: int) -> NDArray[np.uint8]:
    """Numbers with 8 bits: from black to white by `levels`, or from 0 to `top`."""
    how, ends = levels
    if ends is None or (how == "range" and 0 < top <= 255):
        return ((values.astype(np.int64).clip(0, top) * 255 + top // 2) // top).astype(np.uint8)
    low, high = np.percentile(values, ends) if how == "percentiles" else ends
    stretched = (values.astype(np.float64) - low) * (255 / max(high - low, 1e-30))
    return stretched.clip(0, 255).round().astype(np.uint8)


def to_eight_bits(pil: Any, image: Any, tags: Any, deep: bool, levels: Levels, about: About) -> Any:
    """The picture with numbers of 8 bits; a ValueError if white is not known.

    White is the largest number that the kind of number has, or by `levels`. `deep`: the file has 16 bits; of colours
    Pillow keeps the upper 8.
    """
    kind, mode = tags.get(_SAMPLE_FORMAT, (1,))[0], image.mode
    how, ends = levels
    if kind in (_SIGNED, _FLOAT) or mode == "F" or (mode == "I" and image.format != "PPM"):
        if ends is None:
            what = {_SIGNED: "signed numbers", _FLOAT: "fractions"}.get(kind, "numbers of 32 bits")
            raise ValueError(f"it has {what} and does not say which are black and white: {_ADVICE}")
        top, values = 0, np.asarray(image)
        if values.dtype == np.uint8 or (kind == 1 and values.dtype == np.int32):  # Pillow takes them for the other kind
            values = values.view(np.int8 if kind == _SIGNED else np.uint32)
        if mode == "F" and not np.isfinite(values).all():
            raise ValueError("some of its numbers are infinite or none at all (NaN)")
    elif image.format == "PPM" and image.tile[0][0] == "ppm" and image.tile[0][3][0] in ("L", "RGB"):
        values, top = _read_ppm(image)  # which says how many bits are used
    elif mode.startswith("I"):
        bits = about.bits or tags.get(_BITS_PER_SAMPLE, (16,))[0]
        values, top = np.asarray(image).astype(np.uint32), (1 << bits) - 1
        if ends is None and about.bits is None:
            _check_lowest_quarter(int(values.max()), top)
    else:
        if how == "percentiles" and mode in ("L", "LA", "RGB", "RGBA"):
            return _stretched(pil, image, levels)
        if ends is not None and deep and mode in ("LA", "RGB", "RGBA"):
            return _stretched(pil, image, (how, (ends[0] / 257, ends[1] / 257)))  # of the upper 8 bits
        if deep and mode != "CMYK":
            colours = [channel for channel in image.getbands() if channel in "RGBL"]
            _check_lowest_quarter(max(image.getchannel(channel).getextrema()[1] for channel in colours), 255)
        return image
    clear = values == image.info.get("transparency", math.nan)
    eight = np.where(clear, 0, _scaled(values, levels, top))
    eight = 255 - eight if tags.get(_PHOTOMETRIC) == 0 else eight  # Pillow leaves "white is zero" as it is
    return pil.fromarray(eight.astype(np.uint8))


def _stretched(pil: Any, image: Any, levels: Levels) -> Any:
    """A picture of 8 bits whose colours together reach from black to white; its opacity stays."""
    colours = [band for band in image.getbands() if band != "A"]
    values = _scaled(np.stack([np.asarray(image.getchannel(band)) for band in colours]), levels, 0)
    alpha = [image.getchannel("A")] if "A" in image.getbands() else []
    return pil.merge(image.mode, [*map(pil.fromarray, values), *alpha])


def _check_lowest_quarter(largest: int, top: int) -> None:
    if 0 < 4 * largest <= top:
        raise ValueError(
            "its numbers of 16 bits are all in the lowest quarter, as those of a camera of fewer bits, so that it "
            f"would be nearly black: {_ADVICE}"
        )


def _read_ppm(image: Any) -> tuple[NDArray[np.uint32], int]:
    """The numbers of a PPM or PGM whose largest is not 255, and the largest. (Pillow takes a microsecond for each.)"""
    _, (_, _, width, height), offset, (mode, top) = image.tile[0]
    shape, kind = (height, width) if mode == "L" else (height, width, 3), np.dtype(">u2" if top > 255 else "u1")
    image.fp.seek(offset)
    content = image.fp.read(math.prod(shape) * kind.itemsize)
    return np.frombuffer(content, kind).astype(np.uint32).clip(0, top).reshape(shape), top
