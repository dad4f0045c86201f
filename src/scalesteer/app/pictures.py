"""A user's own picture files: found in folders, read with limits, and fitted to one canvas."""

import itertools
import logging
import math
import os
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from scalesteer import _checks
from scalesteer.files import require
from scalesteer.models.network import FITS

FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP", "PPM")  # Pillow also has formats that run programs (EPS)
KINDS = "PNG, JPEG, TIFF, WebP, GIF, BMP or PPM"
SUFFIXES: tuple[str, ...] = (
    ".png",
    ".apng",
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".tif",
    ".tiff",
    ".webp",
    ".gif",
    ".bmp",
)
SUFFIXES += (".ppm", ".pgm", ".pbm", ".pnm")
MOST_PIXELS = 64_000_000
MOST_BYTES = 1 << 30  # more than 64 megapixels take in any format; some formats are read as a whole before decoding
MOST_SCANS = 32  # of a JPEG, each of which takes the time of a whole picture; programs that write JPEG make up to 14
MOST_PAGES = 64  # of a TIFF file, that are looked at: one picture and its copies in other sizes
# Tags of a TIFF file.
_SUBFILE_TYPE, _BITS_PER_SAMPLE, _PHOTOMETRIC, _DESCRIPTION, _SAMPLES = 254, 258, 262, 270, 277
_TILE_WIDTH, _TILE_LENGTH, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 322, 323, 338, 339
_ORIENTATION, _LYING = 274, 5  # of a camera: from this value on height and width change places
_REDUCED_OR_MASK, _UNKNOWN, _SIGNED, _FLOAT = 1 | 4, 0, 2, 3  # values of them
_ADVICE = "give the numbers that are black and white (--value-range, as 0 4095), or save it with 8 bits"
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]")

log = logging.getLogger("scalesteer.datasets")


class PictureError(ValueError):
    """A file that cannot be used as a picture; the message names it and says what is wrong."""


def read_picture(
    path: str | os.PathLike[str] | BinaryIO,
    channels: int,
    size: tuple[int, int] | None = None,
    fit: str = "pad",
    *,
    value_range: tuple[float, float] | None = None,
    contrast: bool = False,
    most_pixels: int = MOST_PIXELS,
) -> NDArray[np.uint8]:
    """The pixels of a picture file, upright, fitted to a canvas.

    PNG, JPEG, TIFF, WebP, GIF, BMP and PPM (also PGM and PBM) are read. A file of several pages, frames or planes is
    refused, but for copies of the picture in other sizes. The rotation that a camera noted is done, transparent parts
    are laid over black, and 16 bits are scaled to 8. Without `value_range`, numbers of which white is not known are
    refused: fractions, signed ones, those of 32 bits, and those of 16 bits that are all small. Colour profiles are not
    applied. The file's header is checked before anything is decoded.

    Args:
        path: The file, or one that is open to be read as bytes.
        channels: 1 for grey, 3 for red, green and blue.
        size: Height and width of the canvas; without it the picture stays as it is.
        fit: How a picture comes onto the canvas. ``"pad"`` keeps its scale; a picture larger than the canvas is shrunk
            until all of it fits. It is centred, and the rest gets the mean colour of its border. ``"crop"`` keeps its
            scale; of a larger picture the centre is cut out, a smaller one is padded in the same way. ``"resize"``
            enlarges or shrinks it, with its aspect kept, until it covers the canvas, and cuts out the centre. Resizing
            is anti-aliased, by the cubic function of :func:`scalesteer.resize.resize`. ``"keep"`` is ``"pad"``, but a
            larger picture keeps its scale and its size.
        value_range: The numbers that are black and white, where they have more than 8 bits, are signed or fractions:
            those between are scaled, those beyond are cut off. By default 0 and the largest number of 16 bits.
        contrast: Lay transparent parts over white instead, if what is seen is dark.
        most_pixels: A picture with more is refused.

    Shape:
        `(H, W)` for 1 channel, `(3, H, W)` for 3, uint8

    Raises:
        PictureError: If the file is missing, damaged, of another format, too large, or not a regular file.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.NamedTemporaryFile(suffix=".png") as file:
        ...     Image.new("RGB", (300, 100), "red").save(file.name)
        ...     read_picture(file.name, 3).shape, read_picture(file.name, 1, (64, 64)).shape
        ((3, 100, 300), (64, 64))
    """
    return read_scaled(path, channels, size, fit, value_range=value_range, contrast=contrast, most_pixels=most_pixels)[
        0
    ]


def read_scaled(
    path: str | os.PathLike[str] | BinaryIO,
    channels: int,
    size: tuple[int, int] | None = None,
    fit: str = "pad",
    *,
    value_range: tuple[float, float] | None = None,
    contrast: bool = False,
    most_pixels: int = MOST_PIXELS,
) -> tuple[NDArray[np.uint8], float]:
    """As :func:`read_picture`; and the factor by which the picture was resized."""
    if channels not in (1, 3):
        raise ValueError(f"`channels` must be 1 (grey) or 3 (colour) (got {channels!r}).")
    canvas = None if size is None else _checks.pair("size", size, minimum=1)
    _checks.choice("fit", fit, (*FITS, "keep"))
    ends = None if value_range is None else _checks.interval("value_range", value_range)
    pil, ops = require("PIL.Image"), require("PIL.ImageOps")
    try:
        # Pillow warns of what is refused here anyway, and of metadata that is not used.
        with warnings.catch_warnings(action="ignore"), pil.open(_regular_file(path), formats=FORMATS) as image:
            _find_only_picture(image)
            tags = getattr(image, "tag_v2", {})
            _check_area(image, tags, most_pixels)
            if image.format in ("JPEG", "MPO"):
                _check_scans(image.fp)
            sides = sorted(image.size)
            if canvas is not None and fit in (
                "pad",
                "resize",
            ):  # a JPEG is decoded ten times as fast at an eighth of its size
                image.draft(None, (2 * max(canvas), 2 * max(canvas)))
            deep = ";16" in str(image.tile)  # the numbers in the file have 16 bits
            if image.format != "PPM":  # which says nothing of rotation, and is not decoded yet
                ops.exif_transpose(image, in_place=True)
            eight = _to_eight_bits(pil, image, tags, deep, ends)
            plain = _flatten(pil, eight, "L" if channels == 1 else "RGB", contrast)
            drafted = sorted(plain.size)[1] / sides[1]
            factor = 1.0 if canvas is None else drafted * _factor(plain.size, canvas, fit)
            pixels = np.asarray(plain if canvas is None else _fit(pil, plain, canvas, fit))
    except Exception as error:  # damaged files make Pillow raise nearly anything, also SyntaxError and struct.error
        raise PictureError(f"{picture_name(path)} cannot be read: {_explain(pil, error)}.") from error
    return pixels.copy() if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1)), factor


def fit_image(image: Any, channels: int, size: tuple[int, int], fit: str = "pad") -> NDArray[np.uint8]:
    """A picture of Pillow's, fitted to a canvas as one from a file, `(H, W)` or `(3, H, W)`."""
    pil = require("PIL.Image")
    pixels = np.asarray(_fit(pil, _flatten(pil, image, "L" if channels == 1 else "RGB", False), size, fit))
    return pixels.copy() if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def picture_name(path: str | os.PathLike[str] | BinaryIO) -> str:
    """What to call a picture in a message."""
    return os.fspath(path) if isinstance(path, str | os.PathLike) else "the picture"


def find_pictures(folder: Path) -> list[Path]:
    """All files below a folder with the suffix of a picture, sorted by path.

    Hidden files are left out; other files too, and a line in the log says so.
    """
    names, _, _ = walk(str(folder))
    found = [name for name in names if name.lower().endswith(SUFFIXES)]
    if others := [os.path.basename(name) for name in names if not name.lower().endswith(SUFFIXES)]:
        kinds = ", ".join(sorted({os.path.splitext(name)[1].lower() or name for name in others})[:5])
        log.warning("%s: %d files are left out, which do not end as pictures do (%s)", folder, len(others), kinds)
    return sorted(folder / name for name in found)


def walk(root: str) -> tuple[list[str], list[str], list[str]]:
    """All files and folders below a folder, as paths from there with slashes, but hidden ones; and links passed over.

    Links are followed. Each real folder is visited once, through a link only if there is no other way, so that links in
    circles end and no picture has two classes.
    """
    found, folders, again, visited = list[str](), list[str](), list[str](), set[tuple[int, int]]()
    real, links = [""], list[str]()
    while real or links:
        place = real.pop() if real else links.pop(0)
        stat = os.stat(os.path.join(root, place))
        if (stat.st_dev, stat.st_ino) in visited:
            again.append(place)
            continue
        visited.add((stat.st_dev, stat.st_ino))
        folders += [place] if place else []
        with os.scandir(os.path.join(root, place)) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                is_link = entry.is_symlink()
                is_folder = os.path.isdir(entry) if is_link else entry.is_dir()  # a link to itself is an error there
                (found if not is_folder else links if is_link else real).append(
                    f"{place}/{entry.name}" if place else entry.name
                )
    return found, folders, again


def _regular_file(path: str | os.PathLike[str] | BinaryIO) -> str | BinaryIO:
    """The path, if it is safe to open: a pipe would be waited for, a device never end."""
    if not isinstance(path, str | os.PathLike):
        return path
    name = os.fspath(path)
    size = os.stat(name).st_size
    if not os.path.isfile(name):
        raise ValueError("it is not a regular file")
    if size > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, and the limit is {MOST_BYTES:,}")
    return name


def _check_area(image: Any, tags: Any, most: int) -> None:
    """Refuse what is too large by its header; `tags` are those of a TIFF file."""
    sizes = [image.size, (tags.get(_TILE_WIDTH, 1), tags.get(_TILE_LENGTH, 1))]  # a tile is decoded as a whole
    for width, height in sizes:
        if width * height > most:
            limit = f"{most // 10**6} megapixels"
            raise ValueError(f"it has {width:,} x {height:,} pixels, and the limit is {limit}")


def _find_only_picture(image: Any) -> None:
    """Go to the picture in an open file; if it has several, a ValueError. (An MPO's others are for other screens.)"""
    one = "and a picture has one: save the one that you mean as a file of its own"
    if image.format not in ("TIFF", "MPO") and getattr(image, "is_animated", False):
        raise ValueError(f"it has several frames, {one}")
    if image.format != "TIFF":
        return
    pages = list[int]()
    for page in itertools.count():
        try:
            with suppress(SyntaxError):  # of a kind that is not read; that it is there counts
                image.seek(page)
        except EOFError:
            break
        if not image.tag_v2.get(_SUBFILE_TYPE, 0) & _REDUCED_OR_MASK:
            pages.append(page)
        if len(pages) > 1 or page >= MOST_PAGES:
            raise ValueError(f"it has several pages (planes, channels or times), {one}")
    image.seek(pages[0] if pages else 0)
    stack = re.search(r"^images=(\d+)", str(image.tag_v2.get(_DESCRIPTION, "")), re.MULTILINE)  # by ImageJ
    if stack and int(stack[1]) > 1:
        raise ValueError(f"it has {int(stack[1]):,} planes, {one}")
    if _UNKNOWN in image.tag_v2.get(_EXTRA_SAMPLES, ()):
        count = image.tag_v2.get(_SAMPLES)
        raise ValueError(f"it has {count} planes, and of some it does not say what they show: save it as grey or RGB")


def _check_scans(file: BinaryIO) -> None:
    """Refuse a JPEG with more scans than any program writes: each takes the time of a whole picture."""
    place = file.tell()
    file.seek(0)
    content = file.read()
    file.seek(place)
    at, scans = 2, 0
    while marker := _JPEG_MARKER.search(content, at):  # as libjpeg looks for them
        at, kind = marker.end(), marker[0][1]
        if kind == 0xD9:  # the end of the picture
            break
        if kind != 0x01 and not 0xD0 <= kind <= 0xD8:  # those have no length
            at += int.from_bytes(content[at : at + 2])
            scans += kind == 0xDA
    if scans > MOST_SCANS:
        raise ValueError(f"it is a JPEG of {scans:,} scans, and the limit is {MOST_SCANS}: save it anew")


def _flatten(pil: Any, image: Any, mode: str, contrast: bool) -> Any:
    """A picture of any mode of 8 bits as "L" or "RGB", on black, or on what contrasts with it."""
    if not image.has_transparency_data:
        return image if image.mode == mode else image.convert(mode)
    image = image.convert("RGBA")
    alpha = image.getchannel("A")
    counts = image.convert("L").histogram(alpha) if contrast else []  # of what is seen
    dark = any(counts) and np.average(range(256), weights=counts) < 128
    ground = pil.new("RGB", image.size, "white" if dark else "black")
    ground.paste(image, mask=alpha)
    return ground.convert(mode)


def _to_eight_bits(pil: Any, image: Any, tags: Any, deep: bool, value_range: tuple[float, float] | None) -> Any:
    """The picture with numbers of 8 bits; a ValueError if white is not known.

    White is the largest number that the kind of number has, or the end of `value_range`. `deep`: the file has 16 bits;
    of colours Pillow keeps the upper 8.
    """
    kind, mode = tags.get(_SAMPLE_FORMAT, (1,))[0], image.mode
    if kind in (_SIGNED, _FLOAT) or mode == "F" or (mode == "I" and image.format != "PPM"):
        if value_range is None:
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
        values, top = np.asarray(image).astype(np.uint32), (1 << tags.get(_BITS_PER_SAMPLE, (16,))[0]) - 1
        if value_range is None:
            _check_lowest_quarter(int(values.max()), top)
    else:
        if deep and mode != "CMYK":
            colours = [channel for channel in image.getbands() if channel in "RGBL"]
            _check_lowest_quarter(max(image.getchannel(channel).getextrema()[1] for channel in colours), 255)
        return image
    clear = values == image.info.get("transparency", math.nan)
    if value_range is None or 0 < top <= 255:
        values = (values * 255 + top // 2) // top
    else:
        low, high = value_range
        values = ((values.astype(np.float64) - low) * (255 / (high - low))).clip(0, 255).round()
    values = np.where(clear, 0, values)
    values = 255 - values if tags.get(_PHOTOMETRIC) == 0 else values  # Pillow leaves "white is zero" as it is
    return pil.fromarray(values.astype(np.uint8))


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


def _factor(size: tuple[int, int], canvas: tuple[int, int], fit: str) -> float:
    """By how much a picture of this width and height is resized for a canvas of this height and width."""
    across, down = canvas[1] / size[0], canvas[0] / size[1]
    return {"resize": max(across, down), "pad": min(1.0, across, down)}.get(fit, 1.0)


def find_factor(path: str | os.PathLike[str], canvas: tuple[int, int], fit: str) -> float | None:
    """The same for a picture in a file, of which only the header is read; None if it cannot be."""
    pil = require("PIL.Image")
    try:
        with warnings.catch_warnings(action="ignore"), pil.open(_regular_file(path), formats=FORMATS) as image:
            turned = image.format != "PPM" and image.getexif().get(_ORIENTATION, 1) >= _LYING
            return _factor(image.size[::-1] if turned else image.size, canvas, fit)
    except Exception:  # as in `read_scaled`, which says what is wrong
        return None


def _fit(pil: Any, image: Any, canvas: tuple[int, int], fit: str) -> Any:
    """A picture on a canvas of this height and width."""
    (width, height), (rows, columns) = image.size, canvas
    cubic = pil.Resampling.BICUBIC
    scale = _factor(image.size, canvas, fit)
    if fit == "resize":
        # In one step: a thin picture that covers the canvas on its own could be enormous.
        across, down = min(width, columns / scale), min(height, rows / scale)
        left, top = (width - across) / 2, (height - down) / 2
        return image.resize((columns, rows), cubic, box=(left, top, left + across, top + down))
    if fit == "keep":
        rows, columns = max(rows, height), max(columns, width)
    if scale < 1:
        width, height = max(1, round(width * scale)), max(1, round(height * scale))
        image = image.resize((width, height), cubic)
    left, top = int((width - columns) / 2), int((height - rows) / 2)  # negative where it is smaller
    image = image.crop((max(0, left), max(0, top), min(width, left + columns), min(height, top + rows)))
    if image.size == (columns, rows):
        return image
    border = np.ones(image.size[::-1], bool)
    border[1:-1, 1:-1] = False
    colour = np.asarray(image)[border].mean(0).round().astype(int)
    ground = pil.new(image.mode, (columns, rows), colour.item() if colour.ndim == 0 else tuple(colour.tolist()))
    ground.paste(image, (max(0, -left), max(0, -top)))
    return ground


def _explain(pil: Any, error: Exception) -> str:
    """What went wrong, in the words of a user."""
    if isinstance(error, pil.UnidentifiedImageError):
        return f"it is not a {KINDS} file, or one of a kind that is not read"
    if isinstance(error, pil.DecompressionBombError):  # Pillow's own limit, reached before ours
        return f"it has more than {MOST_PIXELS // 10**6} megapixels ({error})".rstrip(".")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).rstrip(".") or type(error).__name__
