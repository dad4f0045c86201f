"""The cache on disk: files that prove their content, written atomically under a lock."""

import hashlib
import importlib
import io
import json
import logging
import os
import platform
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

log = logging.getLogger("scalesteer.data")
LOCK_WAIT_S = 900


class DataError(ValueError):
    """Data that is missing, damaged or not what it claims to be."""


class LockedError(DataError):
    """Something that another process is working on."""


def require(module: str) -> Any:
    """Import a module of the `data` extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module.partition('.')[0]} is needed here and not installed: pip install 'scalesteer[cli]'"
        ) from error


def cache_dir() -> Path:
    """Where everything is kept: `SCALESTEER_CACHE`, or the platform's cache directory."""
    named = os.environ.get("SCALESTEER_CACHE")
    return Path(named).expanduser() if named else Path(require("pooch").os_cache("scalesteer"))


def array_digest(array: NDArray[Any]) -> str:
    """SHA-256 of an array's type, shape and bytes."""
    head = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(head + b"\0" + np.ascontiguousarray(array).data).hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """One SHA-256 for a set of named digests, whatever their order."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` only when it is complete; an error leaves the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def write(path: Path, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> None:
    """Write arrays and a description as one `.npz`: the same content gives the same bytes.

    The file appears under its name only when it is complete.

    Raises:
        DataError: The directory cannot be written to.
    """
    digests = {name: array_digest(array) for name, array in arrays.items()}
    meta = {"about": about, "arrays": digests, "digest": combined_digest(digests)}
    try:
        # ZipInfo's own date (1980) instead of the clock's, and nothing compressed: reading is a copy.
        with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo("meta.json"), json.dumps(meta, indent=1))
            for name, array in arrays.items():
                member = io.BytesIO()
                np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
                archive.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getbuffer())
    except OSError as error:
        raise _unwritable(path, error) from error


def read(path: Path, prefix: str | None = "") -> tuple[Arrays, dict[str, Any]]:
    """Read the arrays whose name starts with `prefix`, each checked against its digest, and the description.

    Args:
        path: A file that :func:`write` made.
        prefix: Which arrays; None reads the description alone.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: The file is damaged, was not finished or holds pickled objects.
    """
    arrays: Arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size > path.stat().st_size:
                    raise ValueError(f"{info.filename} is not stored as it should be")
            meta: dict[str, Any] = json.loads(archive.read("meta.json"))
            if combined_digest(meta["arrays"]) != meta["digest"]:
                raise ValueError("its digests do not agree")
            for name, digest in meta["arrays"].items():
                if prefix is not None and name.startswith(prefix):
                    with archive.open(f"{name}.npy") as member:
                        arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
                    if array_digest(arrays[name]) != digest:
                        raise ValueError(f"the content of {name} is not what was written")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path} does not exist") from error
    except Exception as error:  # a damaged archive makes its readers raise nearly anything
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return arrays, meta


@contextmanager
def locked(path: Path, wait_s: float = 0) -> Iterator[None]:
    """Hold a lock file. The operating system drops the lock when its holder dies, so that none goes stale.

    Raises:
        LockedError: It is not free after `wait_s` seconds; says which process holds it.
    """
    filelock = require("filelock")
    lock, note = filelock.FileLock(path), path.with_name(f"{path.name}.holder")
    try:
        lock.acquire(timeout=wait_s)
    except filelock.Timeout as error:
        holder = "another process"
        with suppress(OSError):
            holder = note.read_text() or holder
        raise LockedError(f"{path.parent} is in use by {holder}") from error
    try:
        note.write_text(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        yield
    finally:
        with suppress(OSError):
            note.unlink()
        lock.release()


@contextmanager
def building(path: Path) -> Iterator[None]:
    """Hold the lock on a file while it is made; a second process waits for the first.

    What a killed holder left half written is removed here.

    Raises:
        DataError: The directory cannot be written to, or the lock is not free after 15 minutes.
    """
    lock = path.with_name(f".{path.name}.lock")
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(locked(lock))
            except LockedError:
                log.warning("waiting for another process that is making %s", path.name)
                held.enter_context(locked(lock, LOCK_WAIT_S))
        except OSError as error:
            raise _unwritable(path, error) from error
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            leftover.unlink(missing_ok=True)
        yield


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write to the cache at {path.parent} ({error.strerror or error}): "
        "set SCALESTEER_CACHE to a directory with room that you can write to"
    )
