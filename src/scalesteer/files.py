"""Files that prove their content, written atomically: one format for the cache and for checkpoints; and locks."""

import glob
import hashlib
import importlib
import io
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor

Content = tuple[dict[str, Tensor], dict[str, Any]]  # tensors by name, and what is said about them
Result = TypeVar("Result")
log = logging.getLogger("scalesteer.datasets")
LOCK_WAIT_S = 900
LOG_EVERY_S = 10.0  # how far something is, where there is no terminal
LARGEST_FILE = 4 << 30
LARGEST_HEADER = 16 << 20
LARGEST_TEXT = 64 << 20  # of JSON and the like
EXTRAS = {"huggingface_hub": "hub", "matplotlib": "paper", "onnx": "export", "onnxruntime": "export"}
EXTRAS |= {
    "onnxscript": "export",
    "ray": "cluster",
    "starlette": "demo",
    "tifffile": "microscopy",
    "timm": "timm",
    "torchvision": "timm",
    "tensorboard": "tensorboard",
    "uvicorn": "demo",
}
"""Which extra of this package has another one; those that are not named are in `cli`."""
FORMAT = 2

_DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


class DataError(ValueError):
    """Data that is missing, damaged or not what it claims to be."""


class LockedError(DataError):
    """Something that another process is working on."""


def require(module: str) -> Any:
    """Import a module of an extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        extra = EXTRAS.get(package, "cli")
        raise ImportError(f"{package} is needed here and not installed: pip install 'scalesteer[{extra}]'.") from error


def progress_bar(*items: Any, **options: Any) -> Any:
    """tqdm on a terminal; nothing is shown elsewhere, nor where stderr is closed."""
    silent = sys.stderr is None or not sys.stderr.isatty()
    return require("tqdm").tqdm(*items, disable=silent, leave=False, **options)


def show_progress(results: Iterable[Result], total: int, doing: str = "", done: int = 0) -> Iterator[Result]:
    """Results, one for each of `total` pictures: a bar on a terminal, a line in the log from time to time elsewhere."""
    logged = time.monotonic()
    redirect = require("tqdm.contrib.logging").logging_redirect_tqdm  # lines stay clear of the bar
    with (
        progress_bar(total=total, initial=done, unit="picture", desc=doing or None) as bar,
        nullcontext() if bar.disable else redirect(),
    ):
        for count, result in enumerate(results, start=done + 1):
            yield result
            bar.update()
            if bar.disable and time.monotonic() - logged >= LOG_EVERY_S:
                log.info("%s%s of %s pictures", f"{doing}: " if doing else "", f"{count:,}", f"{total:,}")
                logged = time.monotonic()


def cache_dir() -> Path:
    """Where everything is kept: `SCALESTEER_CACHE`, or the platform's cache directory."""
    named = os.environ.get("SCALESTEER_CACHE")
    if named:
        return expand_home(named, "SCALESTEER_CACHE")
    return Path(require("platformdirs").user_cache_dir("scalesteer"))


def expand_home(path: str | Path, name: str) -> Path:
    """A path, with ~ as the home directory; `name` is what gave it."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # there is no such user
        raise DataError(f"{name} names the home of a user who is not here (got {str(path)!r}).") from error


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type by numpy's name, its shape and its bytes; pinned digests are made so."""
    unknown = tensor.dtype == torch.bfloat16  # to numpy
    kind = tensor.dtype if unknown else torch.empty(0, dtype=tensor.dtype).numpy().dtype.str
    return _sha256(f"{kind}{tuple(tensor.shape)}\0", tensor)


def _sha256(*parts: str | Tensor) -> str:
    """SHA-256 of texts and of tensors' bytes, one after the other."""
    hasher = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            hasher.update(part.encode())
        elif part.numel():  # without elements, its strides may not allow a view as bytes
            hasher.update(part.contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def combined_digest(values: Any) -> str:
    """One SHA-256 for named digests, whatever their order, or for anything else that is ready for JSON."""
    return _sha256(json.dumps(values, sort_keys=True))


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
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """The file appears under its name only when it is complete; a crash leaves the old one."""
    with replacing(path) as file:
        file.write(content)


def check_writable(folder: Path) -> None:
    """Raise a DataError if nothing can be written to a folder, or it cannot be made; nothing stays behind."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    try:
        tempfile.TemporaryDirectory(prefix=".try-", dir=there).cleanup()
    except OSError as error:
        raise DataError(f"{folder} cannot be written to ({error.strerror or error}).") from error


def read_small(path: Path, largest: int = LARGEST_TEXT) -> bytes:
    """The content of a regular file of at most so many bytes; a pipe would be waited for, a device never end.

    Any other file is a DataError, a missing one a FileNotFoundError.
    """
    size = path.stat().st_size
    if size > largest or not path.is_file():
        raise DataError(f"{path} is not a regular file of at most {largest:,} bytes.")
    return path.read_bytes()


def encode(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """Tensors and a JSON-ready description as a safetensors file: the same content gives the same bytes.

    The file's metadata has one entry (the order of several would be left to chance): the description and the digest
    of each tensor as JSON, after the SHA-256 of that JSON.
    """
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    digests = {name: tensor_digest(tensor) for name, tensor in plain.items()}
    text = json.dumps({"format": FORMAT, "about": about, "arrays": digests}, sort_keys=True)
    return bytes(require("safetensors.torch").save(plain, {"scalesteer": f"{_sha256(text)} {text}"}))


def read(path: Path, prefix: str | None = "") -> Content:
    """Read the tensors whose name starts with `prefix` (None: none of them), each checked against its digest.

    Beside the tensors, on the CPU, comes a dictionary: `about` (the description), `arrays` (the digest of every tensor,
    also of those not read) and `digest` (one for all of these). Nothing in a file can run code, and no more is read
    than what is asked for. A file that is damaged, unfinished or of another format is a DataError, a missing one a
    FileNotFoundError.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
        if not path.is_file():  # opening a pipe would wait
            raise ValueError("it is not a regular file")
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LARGEST_HEADER:
                raise ValueError(f"its header has more than {LARGEST_HEADER:,} bytes")
            entries = json.loads(file.read(length))
            metadata = entries.pop("__metadata__", {})
            spans = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
            # One after the other: tensors that overlap would take more memory than the file.
            if [0, *(stop for _, stop in spans)] != [*(start for start, _ in spans), size - 8 - length]:
                raise ValueError("it is cut short or too long, or its tensors do not lie side by side")
            digest, _, text = metadata.get("scalesteer", "").partition(" ")
            if _sha256(text) != digest:
                raise ValueError("its description is missing or not what was written")
            meta = json.loads(text)
            if meta["format"] != FORMAT:
                raise ValueError(f"it has format {meta['format']!r}, and this version reads {FORMAT}")
            if entries.keys() != meta["arrays"].keys() or not isinstance(meta["about"], dict):
                raise ValueError("its description is of another file")
            names = [] if prefix is None else [name for name in entries if name.startswith(prefix)]
            tensors = {name: _read_tensor(file, 8 + length, entries[name]) for name in names}
        for name, tensor in tensors.items():
            if tensor_digest(tensor) != meta["arrays"][name]:
                raise ValueError(f"the content of {name} is not what was written")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
    except Exception as error:  # a damaged file makes its readers raise nearly anything, RecursionError among them
        raise DataError(f"{path} is damaged or not a file of scalesteer ({type(error).__name__}: {error}).") from error
    return tensors, {**meta, "digest": combined_digest(meta["arrays"])}


def _read_tensor(file: io.BufferedReader, data_at: int, entry: Mapping[str, Any]) -> Tensor:
    """One tensor, by its entry in the header. (The library's own reader takes an interrupt for damage.)"""
    start, stop = entry["data_offsets"]
    file.seek(data_at + start)
    content = bytearray(stop - start)
    file.readinto(content)
    dtype = _DTYPES[entry["dtype"]]
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.zeros(0, dtype=dtype)
    return flat.reshape(entry["shape"])


@contextmanager
def locked(path: Path, wait_s: float = 0) -> Iterator[None]:
    """Hold a lock file. If it is not free after `wait_s` seconds, a LockedError says which process holds it.

    The operating system drops the lock when its holder dies, so that none goes stale.
    """
    filelock = require("filelock")
    lock, note = filelock.FileLock(path), path.with_name(f"{path.name}.holder")
    try:
        lock.acquire(timeout=wait_s)
    except filelock.Timeout as error:
        holder = "another process"
        with suppress(OSError):
            holder = note.read_text() or holder
        raise LockedError(f"{path.parent} is in use by {holder}.") from error
    try:
        note.write_text(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        yield
    finally:
        with suppress(OSError):
            note.unlink()
        lock.release()


def cached(path: Path, prefix: str, is_sound: Callable[[dict[str, Any]], bool], make: Callable[[], Content]) -> Content:
    """What :func:`read` gives of a file in the cache. It is made first if it is missing, damaged or of another version.

    `is_sound` says whether the dictionary that is read is the right one; `make` gives the tensors and the description.
    While one process makes the file a second one waits, for 15 minutes at most. What a killed process left half written
    is removed.
    """

    def load() -> Content:
        tensors, meta = read(path, prefix)
        if not is_sound(meta):
            raise DataError(f"{path} does not hold what its name says.")
        return tensors, meta

    with suppress(FileNotFoundError, DataError):
        return load()
    lock = path.with_name(f".{path.name}.lock")
    with told_of_the_cache(path.parent), ExitStack() as held:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            held.enter_context(locked(lock))
        except LockedError:
            log.warning("waiting for another process that is making %s", path.name)
            held.enter_context(locked(lock, LOCK_WAIT_S))
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            leftover.unlink(missing_ok=True)
        try:
            with suppress(FileNotFoundError):
                return load()  # by now made by another process
        except DataError as error:
            log.warning("%s It is made again.", error)
        write_atomically(path, encode(*make()))
        return load()


@contextmanager
def told_of_the_cache(folder: Path) -> Iterator[None]:
    """What cannot be written to a folder of the cache is a DataError, which says what to do."""
    try:
        yield
    except OSError as error:
        hint = "set SCALESTEER_CACHE to a directory with room that you can write to"
        raise DataError(f"cannot write to the cache at {folder} ({error.strerror or error}): {hint}.") from error
