"""A user's own picture files: found in folders, read with limits, and fitted to one canvas."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from scalesteer import _checks
from scalesteer.files import require
from scalesteer.models.network import FITS

FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP")  # Pillow also has formats that run other programs (EPS)
SUFFIXES = (".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".tif", ".tiff", ".webp", ".gif", ".bmp")
MOST_PIXELS = 64_000_000
MOST_BYTES = 1 << 30  # more than 64 megapixels take in any format; some formats are read as a whole before decoding
_BITS_PER_SAMPLE, _PHOTOMETRIC, _TILE_WIDTH, _TILE_LENGTH = 258, 262, 322, 323  # tags of a TIFF file

log = logging.getLogger("scalesteer.datasets")


class PictureError(ValueError):
    """A file that cannot be used as a picture; the message names it and says what is wrong."""


def read_picture(
    path: str | os.PathLike[str] | BinaryIO,
    channels: int,
    size: tuple[int, int] | None = None,
    fit: str = "pad",
    *,
    contrast: bool = False,
) -> NDArray[np.uint8]:
    """The pixels of a picture file, upright, fitted to a canvas.

    PNG, JPEG, TIFF, WebP, GIF and BMP are read. Of several frames or pages the first is taken. The rotation that a
    camera noted is done, transparent parts are laid over black, and 16 bits are scaled to 8. Colour profiles are not
    applied. The file's header is checked before anything is decoded: 64 megapixels is the limit.

    Args:
        path: The file, or one that is open to be read as bytes.
        channels: 1 for grey, 3 for red, green and blue.
        size: Height and width of the canvas; without it the picture stays as it is.
        fit: How a picture comes onto the canvas. ``"pad"`` keeps its scale; a picture larger than the canvas is shrunk
            until all of it fits. It is centred, and the rest gets the mean colour of its border. ``"crop"`` keeps its
            scale; of a larger picture the centre is cut out, a smaller one is padded in the same way. ``"resize"``
            enlarges or shrinks it, with its aspect kept, until it covers the canvas, and cuts out the centre. Resizing
            is anti-aliased, by the cubic function of :func:`scalesteer.channels.resize`.
        contrast: Lay transparent parts over white instead, if what is seen is dark.

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
    if channels not in (1, 3):
        raise ValueError(f"`channels` must be 1 (grey) or 3 (colour) (got {channels!r}).")
    canvas = None if size is None else _checks.pair("size", size, minimum=1)
    _checks.choice("fit", fit, FITS)
    pil, ops = require("PIL.Image"), require("PIL.ImageOps")
    try:
        # Pillow warns of what is refused here anyway, and of metadata that is not used.
        with warnings.catch_warnings(action="ignore"), pil.open(_regular_file(path), formats=FORMATS) as image:
            tags = getattr(image, "tag_v2", {})
            _check_area(image, tags)
            if canvas is not None and fit != "crop":  # a JPEG is decoded ten times as fast at an eighth of its size
                image.draft(None, (2 * max(canvas), 2 * max(canvas)))
            ops.exif_transpose(image, in_place=True)
            plain = _flatten(pil, image, tags, "L" if channels == 1 else "RGB", contrast)
            pixels = np.asarray(plain if canvas is None else _fit(pil, plain, canvas, fit))
    except Exception as error:  # damaged files make Pillow raise nearly anything, also SyntaxError and struct.error
        raise PictureError(f"{picture_name(path)} cannot be read: {_explain(pil, error)}.") from error
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


def _check_area(image: Any, tags: Any) -> None:
    """Refuse what is too large by its header; `tags` are those of a TIFF file."""
    sizes = [image.size, (tags.get(_TILE_WIDTH, 1), tags.get(_TILE_LENGTH, 1))]  # a tile is decoded as a whole
    for width, height in sizes:
        if width * height > MOST_PIXELS:
            limit = f"{MOST_PIXELS // 10**6} megapixels"
            raise ValueError(f"it has {width:,} x {height:,} pixels, and the limit is {limit}")


def _flatten(pil: Any, image: Any, tags: Any, mode: str, contrast: bool) -> Any:
    """A picture of any mode as "L" or "RGB", on black, or on what contrasts with it."""
    if image.mode.startswith("I;16"):
        values, top = np.asarray(image).astype(np.uint32), (1 << tags.get(_BITS_PER_SAMPLE, (16,))[0]) - 1
        values = np.where(values == image.info.get("transparency", -1), 0, values)
        values = top - values if tags.get(_PHOTOMETRIC) == 0 else values  # Pillow leaves "white is zero" as it is
        return pil.fromarray(((values * 255 + top // 2) // top).astype(np.uint8)).convert(mode)
    if image.mode in ("I", "F"):
        raise ValueError(f"it has numbers of 32 bits (mode {image.mode}) and does not say which is white; use 16 or 8")
    if not image.has_transparency_data:
        return image if image.mode == mode else image.convert(mode)
    image = image.convert("RGBA")
    alpha = image.getchannel("A")
    counts = image.convert("L").histogram(alpha) if contrast else []  # of what is seen
    dark = any(counts) and np.average(range(256), weights=counts) < 128
    ground = pil.new("RGB", image.size, "white" if dark else "black")
    ground.paste(image, mask=alpha)
    return ground.convert(mode)


def _fit(pil: Any, image: Any, canvas: tuple[int, int], fit: str) -> Any:
    """A picture on a canvas of this height and width."""
    (width, height), (rows, columns) = image.size, canvas
    cubic = pil.Resampling.BICUBIC
    if fit == "resize":
        # In one step: a thin picture that covers the canvas on its own could be enormous.
        scale = max(columns / width, rows / height)
        across, down = min(width, columns / scale), min(height, rows / scale)
        left, top = (width - across) / 2, (height - down) / 2
        return image.resize((columns, rows), cubic, box=(left, top, left + across, top + down))
    if fit == "pad" and (width > columns or height > rows):
        scale = min(columns / width, rows / height)
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
        return "it is not a PNG, JPEG, TIFF, WebP, GIF or BMP file"
    if isinstance(error, pil.DecompressionBombError):  # Pillow's own limit, reached before ours
        return f"it has more than {MOST_PIXELS // 10**6} megapixels ({error})".rstrip(".")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).rstrip(".") or type(error).__name__
