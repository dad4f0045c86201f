"""A user's own picture files: found in folders, read with limits, and fitted to one canvas."""

import itertools
import logging
import math
import os
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalesteer import _checks
from scalesteer.app.levels import Levels, check_levels, merged, to_colours, to_eight_bits
from scalesteer.app.stacks import About, find_about, read_stack
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
_SUBFILE_TYPE, _DESCRIPTION, _SAMPLES, _TILE_WIDTH, _TILE_LENGTH, _EXTRA_SAMPLES = 254, 270, 277, 322, 323, 338
_ORIENTATION, _LYING = 274, 5  # of a camera: from this value on height and width change places
_REDUCED_OR_MASK, _UNKNOWN = 1 | 4, 0  # values of them
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # how such files begin
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]")

log = logging.getLogger("scalesteer.datasets")


class PictureError(ValueError):
    """A file that cannot be used as a picture; the message names it and says what is wrong."""


class Scaled(NamedTuple):
    """A picture that was read."""

    pixels: NDArray[np.uint8]  # (H, W) or (3, H, W)
    factor: float  # by which it was resized for its canvas
    zoom: float = 1.0  # by which it was resized before, for the size of its pixels


class _PlanesError(ValueError):
    """A TIFF file that does not hold one picture alone."""


def read_picture(
    path: str | os.PathLike[str] | BinaryIO,
    channels: int,
    size: tuple[int, int] | None = None,
    fit: str = "pad",
    **options: Any,
) -> NDArray[np.uint8]:
    """The pixels of a picture file, upright, fitted to a canvas.

    PNG, JPEG, TIFF, WebP, GIF, BMP and PPM (also PGM and PBM) are read. A file of several pages, frames or planes is
    refused, but for copies of the picture in other sizes. The rotation that a camera noted is done, transparent parts
    are laid over black, and 16 bits are scaled to 8. Without `value_range`, numbers of which white is not known are
    refused: fractions, signed ones, those of 32 bits, and those of 16 bits that are all small. Colour profiles are not
    applied. The file's header is checked before anything is decoded. With tifffile, the planes of a stack by OME or
    ImageJ are a picture's channels, if they are not of several depths or times.

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
        options: Of :func:`read_scaled`.

    Keyword Args:
        value_range: The numbers that are black and white, where they have more than 8 bits, are signed or fractions:
            those between are scaled, those beyond are cut off. By default 0 and the largest number of 16 bits, or of
            those bits that OME says are used.
        percentiles: Instead, which percentiles of a picture's own numbers are black and white, in each plane.
        planes: Which planes, counted from 0, are red, green and blue, or grey.
        pixel_size: Resize the picture so that its pixels have this size, in micrometres.
        own_pixel_size: The size that they have; by default what OME or ImageJ wrote.
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
    return read_scaled(path, channels, size, fit, **options).pixels


def read_scaled(
    path: str | os.PathLike[str] | BinaryIO,
    channels: int,
    size: tuple[int, int] | None = None,
    fit: str = "pad",
    *,
    value_range: tuple[float, float] | None = None,
    percentiles: tuple[float, float] | None = None,
    planes: Sequence[int] | None = None,
    pixel_size: float | None = None,
    own_pixel_size: float | None = None,
    contrast: bool = False,
    most_pixels: int = MOST_PIXELS,
) -> Scaled:
    """As :func:`read_picture`; and the factors by which the picture was resized."""
    if channels not in (1, 3):
        raise ValueError(f"`channels` must be 1 (grey) or 3 (colour) (got {channels!r}).")
    canvas = None if size is None else _checks.pair("size", size, minimum=1)
    _checks.choice("fit", fit, (*FITS, "keep"))
    levels = check_levels(value_range, percentiles)
    pil, mode = require("PIL.Image"), "L" if channels == 1 else "RGB"
    try:
        with warnings.catch_warnings(action="ignore"):  # of what is refused here anyway, and of metadata
            try:
                draft = canvas if fit in ("pad", "resize") and pixel_size is None else None
                eight, about, drafted = _read_eight_bits(pil, path, draft, levels, planes, most_pixels)
            except (_PlanesError, pil.UnidentifiedImageError) as error:
                if not _is_stack(path, error, planes):
                    raise
                values, about = read_stack(os.fspath(path), planes, most_pixels)  # type: ignore[arg-type]
                if planes is None and isinstance(error, _PlanesError) and len(values) == 1:  # a file that is cut off
                    raise
                eight, drafted = to_colours(pil, values, levels, about), 1.0
            plain = _flatten(pil, eight, mode, contrast)
        zoom = find_zoom(about, own_pixel_size, pixel_size)
        plain = _zoomed(pil, plain, zoom, most_pixels)
        factor = 1.0 if canvas is None else drafted * _factor(plain.size, canvas, fit)
        pixels = np.asarray(plain if canvas is None else _fit(pil, plain, canvas, fit))
    except Exception as error:  # damaged files make Pillow raise nearly anything, also SyntaxError and struct.error
        raise PictureError(f"{picture_name(path)} cannot be read: {_explain(pil, error)}.") from error
    pixels = pixels.copy() if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return Scaled(pixels, factor, zoom)


def find_zoom(about: About, given: float | None, wanted: float | None) -> float:
    """By how much a picture is resized so that its pixels have the size that is wanted."""
    if wanted is None:
        return 1.0
    own = given or about.pixel_size
    if own is None:
        raise ValueError("the size of its pixels is not known: its list may have a column `pixel_size`, or `predict` "
                         "a flag --pixel-size")  # fmt: skip
    return own / wanted


def _zoomed(pil: Any, plain: Any, zoom: float, most_pixels: int) -> Any:
    if abs(zoom - 1) < 1e-6:
        return plain
    size = tuple(max(1, round(length * zoom)) for length in plain.size)
    if math.prod(size) > most_pixels:
        shown = f"{size[0]:,} x {size[1]:,} pixels"
        raise ValueError(f"with pixels of the size that is wanted it has {shown}, and the limit is "
                         f"{most_pixels // 10**6} megapixels")  # fmt: skip
    return plain.resize(size, pil.Resampling.BICUBIC)


def _is_stack(path: str | os.PathLike[str] | BinaryIO, error: Exception, planes: Sequence[int] | None) -> bool:
    """Whether tifffile may know more of a file than Pillow."""
    if not isinstance(path, str | os.PathLike):
        return False
    if isinstance(error, _PlanesError):
        return planes is not None or error.args[1:] == ("told",)
    with open(path, "rb") as file:
        return file.read(4) in _TIFF


def _read_eight_bits(
    pil: Any,
    path: str | os.PathLike[str] | BinaryIO,
    canvas: tuple[int, int] | None,
    levels: Levels,
    planes: Sequence[int] | None,
    most_pixels: int,
) -> tuple[Any, About, float]:
    """A picture by Pillow, upright; what its file says; and by how much it was shrunk for a canvas while decoding."""
    with pil.open(_regular_file(path), formats=FORMATS) as image:
        tags = getattr(image, "tag_v2", {})
        about = find_about(tags)
        _find_only_picture(image)
        _check_area(image, tags, most_pixels)
        if image.format in ("JPEG", "MPO"):
            _check_scans(image.fp)
        sides = sorted(image.size)
        if canvas is not None:  # a JPEG is decoded ten times as fast at an eighth of its size
            image.draft(None, (2 * max(canvas), 2 * max(canvas)))
        deep = ";16" in str(image.tile)  # the numbers in the file have 16 bits
        plain = planes is None and image.format == "TIFF" and tags.get(_ORIENTATION, 1) == 1
        if deep and image.mode == "RGB" and plain and levels[0] == "range" and levels[1] and find_spec("tifffile"):
            raise _PlanesError("its colours have 16 bits", "told")  # of which Pillow keeps the upper 8
        if image.format != "PPM":  # which says nothing of rotation, and is not decoded yet
            require("PIL.ImageOps").exif_transpose(image, in_place=True)
        eight = to_eight_bits(pil, image, tags, deep, levels, about)
        if planes is not None:
            bands = (eight.convert("RGB") if eight.mode in ("P", "CMYK") else eight).split()
            if beyond := [plane for plane in planes if plane >= len(bands)]:
                raise ValueError(f"it has {len(bands)} planes, counted from 0, and no plane {beyond[0]} (`planes`)")
            eight = merged(pil, [bands[plane] for plane in planes])
        eight.load()
    return eight, about, sorted(eight.size)[1] / sides[1]


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
    pages, text = list[int](), str(image.tag_v2.get(_DESCRIPTION, ""))
    told = ("told",) if text.startswith("ImageJ=") or "<OME" in text[:2000] else ()  # what the planes are
    for page in itertools.count():
        try:
            with suppress(SyntaxError):  # of a kind that is not read; that it is there counts
                image.seek(page)
        except EOFError:
            break
        if not image.tag_v2.get(_SUBFILE_TYPE, 0) & _REDUCED_OR_MASK:
            pages.append(page)
        if len(pages) > 1 or page >= MOST_PAGES:
            raise _PlanesError(f"it has several pages (planes, channels or times), {one}, or say --planes", *told)
    image.seek(pages[0] if pages else 0)
    stack = re.search(r"^images=(\d+)", text, re.MULTILINE)  # by ImageJ
    if stack and int(stack[1]) > 1:
        raise _PlanesError(f"it has {int(stack[1]):,} planes, {one}", *told)
    if _UNKNOWN in image.tag_v2.get(_EXTRA_SAMPLES, ()):
        count = image.tag_v2.get(_SAMPLES)
        raise _PlanesError(
            f"it has {count} planes, and of some it does not say what they show: say which (--planes), or save it "
            f"as grey or RGB"
        )


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


def _factor(size: tuple[int, int], canvas: tuple[int, int], fit: str) -> float:
    """By how much a picture of this width and height is resized for a canvas of this height and width."""
    across, down = canvas[1] / size[0], canvas[0] / size[1]
    return {"resize": max(across, down), "pad": min(1.0, across, down)}.get(fit, 1.0)


def find_factor(
    path: str | os.PathLike[str],
    canvas: tuple[int, int],
    fit: str,
    pixel_size: float | None = None,
    own_pixel_size: float | None = None,
) -> float | None:
    """The same for a picture in a file, of which only the header is read; None if it cannot be."""
    pil = require("PIL.Image")
    try:
        with warnings.catch_warnings(action="ignore"), pil.open(_regular_file(path), formats=FORMATS) as image:
            turned = image.format != "PPM" and image.getexif().get(_ORIENTATION, 1) >= _LYING
            zoom = find_zoom(find_about(getattr(image, "tag_v2", {})), own_pixel_size, pixel_size)
            width, height = (max(1, round(length * zoom)) for length in image.size)
            return _factor((height, width) if turned else (width, height), canvas, fit)
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
        count = re.search(r"\((\d+) pixels\)", str(error))
        many = f" ({int(count[1]) // 10**6:,} of them)" if count else ""
        return f"it has more than {MOST_PIXELS // 10**6} megapixels{many}: cut it into pieces, or save it smaller"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, _PlanesError):
        return str(error.args[0])
    return str(error).rstrip(".") or type(error).__name__
