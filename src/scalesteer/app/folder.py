"""Your own pictures as a dataset: found in a folder or named by a list, divided, read and packed, kept in the cache.

Which part a picture belongs to follows from its path alone, so that adding pictures moves none of the others; but no
class is drawn out of training: its first picture is put back there until another one is drawn for it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import mmap
import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from scalesteer import files
from scalesteer._checks import boolean, choice, pair, planes, positive
from scalesteer.app import mapped
from scalesteer.app.levels import check_levels
from scalesteer.app.lists import MOST_NAMED, PART_NAMES, Found, name_some, read_list, to_sentences
from scalesteer.app.mapped import PixelFile
from scalesteer.app.pictures import SUFFIXES, PictureError, find_factor, read_picture, walk
from scalesteer.app.reading import processors, read_all
from scalesteer.datasets.scale import PARTS
from scalesteer.datasets.sources import Images
from scalesteer.datasets.tensors import ImageSet
from scalesteer.files import DataError, log
from scalesteer.models.network import FITS, LONGEST_NAME, Task

SHARE = 0.15  # of the pictures, for validation and as many for testing, where they have no folder of their own
MOST_CLASSES = 10_000
FEW_PICTURES = 200  # whose headers say by how much pictures are resized
RECIPE = 3  # raised whenever the same pictures give other bytes, so that no cache serves the old ones
WORKER_BYTES = 32 << 20  # fewer bytes are read sooner than such processes start
_BLOCK_BYTES = 256 << 20  # of packed pictures in one file of the cache


@dataclass(frozen=True)
class FolderSpec:
    """Which pictures, and how they become images of one size.

    Args:
        images: A folder with a sub-folder for each class, or with such folders in train, val and test; or a CSV file
            whose first line is ``path,label``, with paths relative to it. The list may also have the columns ``part``
            (train, val or test), ``size``, how large the object is in any unit, for the error by size, and ``group``:
            pictures of one group (a patient, a plate, a video) are never divided between parts.
        image_size: Height and width of the images.
        fit: How a picture comes onto the canvas: "pad", "crop" or "resize"; see :func:`.pictures.read_picture`.
        grey: One channel instead of three.
        value_range: The numbers in a file that are black and white, where they have more than 8 bits.
        percentiles: Instead, the percentiles of a picture's own numbers that are black and white.
        planes: Which planes of a file are red, green and blue, or grey, counted from 0.
        pixel_size: Of a pixel of the images, in micrometres or another unit: a picture whose pixels have another size,
            by a column ``pixel_size`` of the list or by OME's or ImageJ's words in its file, is resized before it is
            fitted. By default the median of the column, if there is one.

    >>> FolderSpec("photos", image_size=96).shape
    (3, 96, 96)
    """

    images: str
    image_size: tuple[int, int] = (64, 64)
    fit: str = "pad"
    grey: bool = False
    value_range: tuple[float, float] | None = None
    percentiles: tuple[float, float] | None = None
    planes: tuple[int, ...] | None = None
    pixel_size: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.images, (str, os.PathLike)) or not os.fspath(self.images):
            raise TypeError(f"`images` must be the path of a folder or of a CSV file (got {self.images!r}).")
        size = pair("image_size", self.image_size, minimum=1)
        vars(self).update(images=os.path.normpath(self.images), image_size=size, grey=boolean("grey", self.grey))
        choice("fit", self.fit, FITS)
        how, ends = check_levels(self.value_range, self.percentiles)
        vars(self).update({"value_range" if how == "range" else how: ends})
        for name, check in (("planes", planes), ("pixel_size", positive)):
            if getattr(self, name) is not None:
                vars(self)[name] = check(name, getattr(self, name))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image: `(3, H, W)`, or `(H, W)` if it is grey."""
        return self.image_size if self.grey else (3, *self.image_size)

    @property
    def options(self) -> dict[str, Any]:
        """How the numbers of a file are read, for :func:`.pictures.read_picture`."""
        names = ("value_range", "percentiles", "planes", "pixel_size")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def name(self) -> str:
        return os.path.basename(self.images).removesuffix(".csv")

    @property
    def count(self) -> None:
        """Known when the pictures are read."""

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def open(self, data_dir: Path | None = None, classes: Sequence[str] = ()) -> Folder:
        return scan_folder(self, bool(classes))._replace(known=tuple(classes))


class Picture(NamedTuple):
    """A picture file that was found."""

    path: str
    name: str  # its path from the folder or as in the list, with slashes
    label: str
    part: str
    size: float  # of the object, 1 if nobody says
    stamp: tuple[int, int]  # bytes, and nanoseconds of the last change
    group: str = ""  # of pictures that stay in one part
    pixel_size: float = 0.0  # 0 if the list does not say


class Folder(NamedTuple):
    """The pictures of a spec, in an order that depends on their paths only and mixes the classes."""

    spec: FolderSpec
    classes: tuple[str, ...]  # in the order of the alphabet
    pictures: tuple[Picture, ...]
    drawn: tuple[str, ...]  # parts that the user did not name
    notes: tuple[str, ...]  # what was left out, in sentences
    known: tuple[str, ...] = ()  # classes of a network that is trained already

    @property
    def task(self) -> Task:
        """What the pictures ask of a network."""
        names = self.known or self.classes
        spec = self.spec
        task = Task(1 if spec.grey else 3, len(names), spec.image_size, names, spec.fit, "surroundings")
        return task._replace(**spec.options)

    def usual_scale(self) -> float | None:
        """The factor by which pictures for training are resized, in the median of a few hundred, by their headers."""
        trained, spec = [picture for picture in self.pictures if picture.part == "train"], self.spec
        few = trained[:: max(1, len(trained) // FEW_PICTURES)]
        found = [find_factor(p.path, spec.image_size, spec.fit, spec.pixel_size, p.pixel_size or None) for p in few]
        known = [factor for factor in found if factor is not None]
        return float(np.median(known)) if known else None

    def of(self, part: str | None) -> list[Picture]:
        """The pictures of a part; None: of all."""
        return [picture for picture in self.pictures if part in (picture.part, None)]

    def load(self, part: str) -> list[ImageSet]:
        """The pictures of "train", "val" or "test"."""
        return [load_folder(self, part, classes=self.known or None)]

    def table(self) -> bytes:
        """Which picture belongs to which part, and how large its object is if a list says so, as a CSV file."""
        text, usual = io.StringIO(), Picture._field_defaults | {"size": 1.0}
        rows = csv.writer(text, lineterminator="\n")
        names = ("size", "group", "pixel_size")
        more = [name for name in names if any(getattr(p, name) != usual[name] for p in self.pictures)]
        rows.writerow(("path", "label", "part", "bytes", *more))
        told = ((p.name, p.label, p.part, p.stamp[0], *(getattr(p, name) for name in more)) for p in self.pictures)
        rows.writerows(sorted(told))
        return text.getvalue().encode(errors="surrogateescape")

    def counts(self) -> dict[str, int]:
        found = Counter(picture.part for picture in self.pictures)
        return {part: found[part] for part in PARTS}


def load_folder(
    source: FolderSpec | Folder, part: str | None, *, classes: Sequence[str] | None = None, workers: int | None = None
) -> ImageSet:
    """One part of your own pictures as tensors; read on first use, later taken from the cache.

    Where all pictures take more than :func:`.mapped.memory_limit`, they stay in the cache, and are read there in use.
    A picture that cannot be read is named and left out. What was left out of the folder is said with the training part,
    or with all. `scales` are the sizes that a list gives, otherwise ones. `about` has the names of the `classes`, the
    `counts` of all parts, the parts that were `drawn`, how many pictures were `broken`, and the images' `digest`.

    Args:
        source: Which pictures; or a folder that was scanned, so that several parts are of one state of it.
        part: "train", "val" or "test"; None for all pictures.
        classes: What the labels 0, 1, ... mean to a model, which may know more classes than are there; by default all
            that are there, two or more, in the order of the alphabet.
        workers: Processes to read with, 0 to read in this one; by default a few if there is much to read.

    Raises:
        DataError: There is no such folder, it has fewer than two classes or some that are not in `classes`, a class is
            left without training pictures, a part without any, or the cache has no room for them; or a picture was
            changed or removed after the scan.
    """
    if part is not None:
        choice("part", part, PARTS)
    folder = source if isinstance(source, Folder) else scan_folder(source, known_classes=classes is not None)
    spec = folder.spec
    names = folder.classes if classes is None else tuple(classes)
    if unknown := sorted(set(folder.classes) - set(names)):
        raise DataError(
            f"{spec.images} has classes that the model does not know: {name_some(unknown)}; "
            f"it knows {name_some(names)}."
        )
    for note in folder.notes if part in ("train", None) else ():
        log.warning("%s: %s", spec.images, note)
    if part == "train":
        counts = ", ".join(f"{count:,} for {name}" for name, count in folder.counts().items())
        how = f" ({' and '.join(p for p in folder.drawn if p != 'train')} drawn by their paths)" if folder.drawn else ""
        log.info("%s: %d classes; pictures: %s%s", spec.images, len(folder.classes), counts, how)
    chosen = folder.of(part)
    if mapped.is_large(len(folder.pictures), spec.shape):
        with _open_file(folder, part) as place:
            if part in ("train", None):
                log.info("%s: %s.", spec.images, mapped.describe(len(folder.pictures), spec.shape))
            images, mapping, broken, digests = _load_blocks(spec, part or "all", chosen, workers, place)
    else:
        images, mapping, broken, digests = _load_blocks(spec, part or "all", chosen, workers, None)
    for reason in list(broken.values())[:MOST_NAMED]:
        log.warning("%s", reason)
    if broken:
        purpose = f" for {part}" if part else ""
        log.warning("%d of %d pictures%s cannot be read and are left out.", len(broken), len(chosen), purpose)
    kept = [picture for row, picture in enumerate(chosen) if row not in broken]
    _check_kept(spec, part, folder.classes, kept, broken)
    labels = torch.tensor([names.index(picture.label) for picture in kept])
    about = {"images": spec.images, "image_size": list(spec.image_size), "fit": spec.fit, "grey": spec.grey,
             "classes": list(names), "counts": folder.counts(), "drawn": list(folder.drawn), "broken": len(broken),
             "part": part, "digest": files.combined_digest([digests, files.tensor_digest(labels)])}  # fmt: skip
    sizes, paths = torch.tensor([picture.size for picture in kept]), tuple(picture.path for picture in kept)
    return ImageSet(images, labels, sizes, about, paths, mapping)


# What is there


def scan_folder(spec: FolderSpec, known_classes: bool = False) -> Folder:
    """Find the pictures and divide them; none is opened.

    If a model knows the classes already, one class is enough, and none needs pictures for training.
    """
    root, notes = os.path.expanduser(spec.images), list[str]()
    is_folder = os.path.isdir(root)
    if not is_folder and not os.path.isfile(root):
        why = "neither of them" if os.path.exists(root) else "not there"
        raise DataError(f"`images` must be a folder of pictures or a CSV file (got {spec.images}, which is {why}).")
    found = list(_from_folder(root, notes) if is_folder else read_list(root, notes))
    given = {entry[3] for entry in found if entry[3]}
    drawn = [part for part in PARTS if part not in given]
    if given and "train" in drawn and not known_classes:
        raise DataError(f"{spec.images} names pictures for {', '.join(sorted(given))}, but none for train.")
    keyed = []
    for path, name, label, part, size, group, own in found:
        key = _draw_key(name)
        if part in (None, "train"):
            part = _draw_part((_draw_key(group) if group else key) / 2**64, [p for p in drawn if p != "train"])
        keyed.append((key, Picture(path, name, _class_name(label), part, size, _stamp(path), group, own)))
    keyed.sort(key=lambda entry: (entry[0], entry[1].name))
    pictures, rescued = _train_each_class([picture for _, picture in keyed], drawn)
    _check_groups(pictures)
    if not known_classes:
        what = "group" if any(picture.group for picture in pictures) else "picture"
        notes += to_sentences(f"Classes drawn out of training, of which one {what} was put back", rescued)
    if not known_classes and spec.pixel_size is None and (sizes := [p.pixel_size for p in pictures if p.pixel_size]):
        spec = replace(spec, pixel_size=float(np.median(sizes)))
        notes.append(f"Pictures are resized to pixels of {spec.pixel_size:g}, the median of the column pixel_size.")
    classes = tuple(sorted({picture.label for picture in pictures}))
    if len(classes) < 2 - known_classes:
        what = f"pictures of {len(classes)} class{'es' * (not classes)}"
        layout = f"{spec.images}/cats, {spec.images}/dogs, ..." if is_folder else "a column `label`"
        need = "one is needed" if known_classes else "two are needed"
        raise DataError(f"`images` {spec.images} has {what}, and {need}: {layout}. {' '.join(notes)}".strip())
    if len(classes) > MOST_CLASSES:
        raise DataError(f"`images` {spec.images} has {len(classes):,} classes, and the limit is {MOST_CLASSES:,}.")
    return Folder(spec, classes, pictures, tuple(drawn), tuple(notes))


def _stamp(path: str) -> tuple[int, int]:
    """Bytes and last change of a file; zeros of anything else, of which reading it will say what it is."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # a link to nowhere, a name that cannot be
        return 0, 0
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else (0, 0)


def _draw_key(name: str) -> int:
    """A number below 2**64 that follows from a name alone, the same everywhere."""
    return int.from_bytes(hashlib.sha256(os.fsencode(_plain(name))).digest()[:8], "big")


def _plain(text: str) -> str:
    """Composed characters: macOS decomposes them in names of files, and the split must be the same everywhere."""
    return unicodedata.normalize("NFC", text)


def _class_name(label: str) -> str:
    """What a label is called in files and on pages: bytes of a file's name that are no text are replaced."""
    name = os.fsencode(_plain(label)).decode(errors="replace")
    if len(name) > LONGEST_NAME:
        raise DataError(f"a class must have a name of at most {LONGEST_NAME} characters (got {name[:40]!r}...).")
    return name


def draw_part(name: str) -> str:
    """The part that a name alone gives something, where all three are drawn."""
    return _draw_part(_draw_key(name) / 2**64, ["val", "test"])


def _draw_part(share: float, missing: Sequence[str]) -> str:
    """The part of a picture whose hash is this share of all hashes: for train, or a part that has no pictures yet."""
    rest = share - (1 - SHARE * len(missing))
    return "train" if rest < 0 else missing[min(len(missing) - 1, int(rest / SHARE))]


def _train_each_class(pictures: list[Picture], drawn: Sequence[str]) -> tuple[tuple[Picture, ...], list[str]]:
    """The pictures with the first one of each class that was drawn out of training put back; and these classes.

    With a picture all of its group go.
    """
    trained, rescued, moved = {p.label for p in pictures if p.part == "train"}, list[str](), set[str]()
    divided = list[Picture]()
    for picture in pictures:
        if picture.part in drawn and picture.label not in trained:
            trained |= {p.label for p in pictures if p.group == picture.group} if picture.group else {picture.label}
            rescued.append(picture.label)
            moved.add(picture.group)
            picture = picture._replace(part="train")
        divided.append(picture)
    moved.discard("")
    return tuple(p._replace(part="train") if p.group in moved else p for p in divided), rescued


def _check_groups(pictures: Sequence[Picture]) -> None:
    """Raise a DataError if a list divides a group between parts."""
    parts: dict[str, str] = {}
    for picture in pictures:
        if picture.group and parts.setdefault(picture.group, picture.part) != picture.part:
            both = f"{parts[picture.group]} and {picture.part}"
            raise DataError(f"the pictures of a group must be in one part (group {picture.group!r} is in {both}).")


def _from_folder(root: str, notes: list[str]) -> Iterator[Found]:
    """The pictures in class folders, or in class folders of train, val and test."""
    found, folders, again = walk(root)
    notes += to_sentences("Links to folders that were found already, not followed", again)
    tops = {folder.split("/")[0] for folder in folders}
    named = {top: PART_NAMES[top.lower()] for top in tops if top.lower() in PART_NAMES}
    depth = 2 if "train" in named.values() and len(set(named.values())) > 1 else 1
    asked = set(named) if depth == 2 else tops
    if depth == 2 and (others := sorted(tops - asked)):
        notes.append(f"Folders beside train, val and test are left out: {', '.join(others)}.")
    used, strange, outside = set[str](), list[str](), list[str]()
    for place in found:
        *above, name = place.split("/")
        is_picture = name.lower().endswith(SUFFIXES)
        if above and above[0] not in asked:
            continue
        if len(above) < depth:
            outside += [place] * is_picture  # other files there are the user's own notes
        elif is_picture:
            used.add("/".join(above[:depth]))
            part = named[above[0]] if depth == 2 else None
            yield os.path.join(root, place), place, above[depth - 1], part, 1.0, "", 0.0
        else:
            strange.append(place)
    levels = {folder: folder.split("/") for folder in folders}
    empty = [f for f, parts in levels.items() if len(parts) == depth and parts[0] in asked and f not in used]
    notes += to_sentences("Folders without pictures, which are no classes", empty)
    notes += to_sentences("Pictures in no class folder, left out", outside)
    notes += to_sentences(f"Files left out, since they do not end in {', '.join(SUFFIXES)}", strange)


def _check_kept(
    spec: FolderSpec, part: str | None, classes: Sequence[str], kept: Sequence[Picture], broken: dict[int, str]
) -> None:
    """Every class must be trained, and every part must have pictures."""
    lost = sorted(set(classes) - {picture.label for picture in kept})
    purpose = f" for {part}" if part else ""
    if not kept or (part == "train" and lost):
        what = f"no pictures of {name_some(lost)}" if kept else "no pictures"
        why = f", after {len(broken):,} that cannot be read ({next(iter(broken.values()))})" if broken else ""
        advice = "add pictures, or divide them yourself into folders train, val and test" if part else "add pictures"
        raise DataError(f"{spec.images} has {what}{purpose}{why}: {advice}.")
    if lost:
        log.warning("%s", to_sentences(f"Classes without pictures{purpose}, of which nothing is known", lost)[0])


# Reading


def _open_file(folder: Folder, part: str | None) -> PixelFile:
    """The file for a part that is not held in memory. Before the first one of a run, there must be room for all."""
    spec, missing = folder.spec, 0
    for one in PARTS[::-1] if part == "train" else (part,):  # the part itself last
        path = mapped.folder() / f"{one or 'all'}-{_digest(spec, folder.of(one))[:24]}.pixels"
        missing += 0 if path.exists() else len(folder.of(one)) * math.prod(spec.shape)
    if not path.exists():
        mapped.check_room(spec.images, missing)
    with files.told_of_the_cache(path.parent):
        return PixelFile(path, spec.shape)


def _load_blocks(
    spec: FolderSpec, part: str, chosen: Sequence[Picture], workers: int | None, place: PixelFile | None
) -> tuple[torch.Tensor, mmap.mmap | None, dict[int, str], list[str]]:
    """The pictures of a part and the mapping that they are in, by row why others are broken, and digests of blocks."""
    images = torch.empty((0 if place else len(chosen), *spec.shape), dtype=torch.uint8)
    broken, digests, count, step = dict[int, str](), list[str](), 0, max(1, _BLOCK_BYTES // math.prod(spec.shape))
    for start in range(0, len(chosen), step):
        rows = range(start, min(start + step, len(chosen)))
        tensors, meta = _load_block(spec, part, chosen, rows, workers, place, count)
        if place is None:
            images[count : count + len(tensors["images"])] = tensors["images"]
        broken |= {start + int(row): reason for row, reason in meta["about"]["broken"].items()}
        count = start + len(rows) - len(broken)
        digests.append(files.combined_digest({"images": meta["about"]["images"]}) if place else meta["digest"])
    packed, mapping = place.images(count) if place else (images[:count], None)
    return packed, mapping, broken, digests


def _digest(spec: FolderSpec, pictures: Sequence[Picture]) -> str:
    """What the bytes of packed pictures follow from."""
    stamps = [(os.path.abspath(picture.path), *picture.stamp) for picture in pictures]
    told = [stamps, spec.image_size, spec.fit, spec.grey, spec.value_range, RECIPE]
    if more := {name: value for name, value in spec.options.items() if name != "value_range"}:
        told += [more, [picture.pixel_size for picture in pictures]]
    return files.combined_digest(told)


def _load_block(
    spec: FolderSpec,
    part: str,
    pictures: Sequence[Picture],
    rows: range,
    workers: int | None,
    place: PixelFile | None = None,
    at: int = 0,
) -> files.Content:
    """Some pictures of a part, from the cache or read: `images`, and in the description why others are `broken`.

    With a `place` they are not held in memory, but in this file, behind `at` others.
    """
    chosen = pictures[rows.start : rows.stop]
    digest = _digest(spec, chosen)

    def make() -> files.Content:
        paths = [(picture.path, picture.pixel_size) for picture in chosen]
        few = sum(picture.stamp[0] for picture in chosen) < WORKER_BYTES
        read = read_all(paths, partial(_read_one, spec), (0 if few else processors()) if workers is None else workers)
        doing = f"reading {part}"
        packed, broken, count = torch.empty((len(chosen), *spec.shape), dtype=torch.uint8), dict[str, str](), 0
        for row, result in enumerate(files.show_progress(read, len(pictures), doing, rows.start)):
            if isinstance(result, str):
                broken[str(row)] = result
            else:
                packed[count], count = torch.from_numpy(result), count + 1
        if changed := sorted(picture.name for picture in chosen if _stamp(picture.path) != picture.stamp):
            many = f"{len(changed):,} pictures were changed, moved or removed while they were read"
            raise DataError(
                f"{spec.images}: {many} ({name_some(changed)}): repeat the command when the folder is at rest."
            )
        about: dict[str, Any] = {"key": digest, "broken": broken}
        return ({"images": packed[:count]}, about) if place is None else place.keep(at, packed[:count], about)

    def is_sound(meta: dict[str, Any]) -> bool:
        return meta["about"]["key"] == digest and (place is None or place.holds(at, meta["about"]))

    path = mapped.folder() / f"{part}-{digest[:24]}.safetensors" if place is None else place.record(rows.start)
    return files.cached(path, "", is_sound, make)


def _read_one(spec: FolderSpec, source: tuple[str, float]) -> Images | str:
    """A picture, by its path and the size of its pixels, or in its place what is wrong with it."""
    path, own = source
    try:
        return read_picture(path, 1 if spec.grey else 3, spec.image_size, spec.fit, own_pixel_size=own or None,
                            **spec.options)  # fmt: skip
    except PictureError as error:
        return str(error)
