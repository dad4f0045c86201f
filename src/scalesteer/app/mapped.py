"""Packed pictures that do not fit into memory: in files of the cache, of which the system reads what a batch needs.

Such a file is mapped for reading only. Its pages come and go as memory allows, and none counts as the process's own.
(A private mapping that may be written to, as `torch.from_file` makes, could not be larger than the memory.)
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch import Tensor

from scalesteer import files
from scalesteer.files import DataError

MOST_BYTES = 8 << 30  # of all packed pictures of a run in memory
# Where containers say how much memory they may use.
_CONTAINER = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_limit() -> int:
    """How many bytes of packed pictures are kept in memory: at most half of what this machine or container has."""
    # What is free at the moment would put the same pictures into memory in one run and on the disk in the next.
    found = [2 * MOST_BYTES]
    with suppress(AttributeError, OSError, ValueError):  # another system
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _CONTAINER:
        with suppress(OSError, ValueError):  # no container, or one without a limit
            found.append(int(path.read_text()))
    return min(size for size in found if size > 0) // 2


def is_large(count: int, shape: tuple[int, ...]) -> bool:
    """Whether so many pictures are read from disk."""
    return count * math.prod(shape) > memory_limit()


def describe(count: int, shape: tuple[int, ...]) -> str:
    """Why pictures are read from disk, for the log."""
    size, limit = _in_gib(count * math.prod(shape)), _in_gib(memory_limit())
    what = f"{count:,} pictures of {shape[-2]} x {shape[-1]} take {size}, more than the {limit} that memory is used for"
    return f"{what}: they are read from disk, in {folder()}"


def folder() -> Path:
    """Where pictures are kept."""
    return files.cache_dir() / "folders"


def check_room(name: str, needed: int) -> None:
    """Raise a DataError if the cache has no room for so many bytes."""
    there = next(place for place in (folder(), *folder().absolute().parents) if place.exists())
    if needed > (free := shutil.disk_usage(there).free):
        raise DataError(
            f"the pictures of {name} take {_in_gib(needed)} on disk, and {folder()} has room for {_in_gib(free)}: "
            "delete what is old there (`scalesteer data list`), set SCALESTEER_CACHE to a directory with more, or "
            "choose a smaller `image_size` or fewer pictures."
        )


def _in_gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def map_images(file: IO[bytes], shape: tuple[int, ...]) -> tuple[Tensor, mmap.mmap | None]:
    """The bytes at the start of a file as images, and the mapping that they are in. To write to them is a crash."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=torch.uint8), None
    mapped = mmap.mmap(file.fileno(), math.prod(shape), access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8).view(shape), mapped


class PixelFile:
    """Packed pictures of one shape, side by side in a file of the cache; records beside it prove what it holds.

    It is opened once, so that what was proved is what is mapped, whatever becomes of its name. Bytes that are there,
    which another process may have mapped, are not written over: a copy takes the place of the file.

    Args:
        path: The file; it is made if it is not there.
        shape: Of a picture.
    """

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.path, self.shape, self.size, self._copied = path, shape, math.prod(shape), False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = open(path, "r+b", 0, opener=_open_or_make)  # noqa: SIM115  # closed by `__exit__`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def record(self, row: int) -> Path:
        """Where it is recorded what became of a block of pictures."""
        return self.path.with_name(f"{self.path.stem}-{row}.safetensors")

    def keep(self, at: int, images: Tensor, about: dict[str, Any]) -> files.Content:
        """Write a block of pictures behind the first `at`; returns its record, to be kept once that is done."""
        if self._file.seek(0, os.SEEK_END) > at * self.size and not self._copied:
            self._copy()
        self._file.seek(at * self.size)
        left = images.numpy().data.cast("B") if len(images) else memoryview(b"")
        while left:
            left = left[self._file.write(left) :]
        os.fsync(self._file.fileno())
        return {}, {**about, "count": len(images), "images": files.tensor_digest(images)}

    def _copy(self) -> None:
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".", delete=False) as copy:
            try:
                self._file.seek(0)
                shutil.copyfileobj(self._file, copy, 1 << 24)
                copy.flush()
                os.replace(copy.name, self.path)
            except BaseException:
                os.unlink(copy.name)
                raise
        self._file.close()
        self._file, self._copied = open(self.path, "r+b", 0), True  # noqa: SIM115

    def holds(self, at: int, about: dict[str, Any]) -> bool:
        """Whether the file has a recorded block behind the first `at` pictures."""
        # Read, not mapped: there a file that is too short, or a page that cannot be read, would end the process.
        content = bytearray(self.size * about["count"])
        left = memoryview(content)
        with suppress(OSError):
            self._file.seek(at * self.size)
            while left and (count := self._file.readinto(left)):  # type: ignore[attr-defined]
                left = left[count:]
        if left:
            return False
        images = torch.frombuffer(content or bytearray(1), dtype=torch.uint8)[: len(content)]
        return files.tensor_digest(images.view(-1, *self.shape)) == str(about["images"])

    def images(self, count: int) -> tuple[Tensor, mmap.mmap | None]:
        """The first pictures, as :func:`map_images` gives them."""
        return map_images(self._file, (count, *self.shape))


def _open_or_make(path: str, flags: int) -> int:
    """A file that is there, for reading at least; a new one as others of the cache. No link is followed."""
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags | os.O_CREAT | safe, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | safe)


class Stack:
    """Images that are added one by one: in memory, or in a file without a name, which goes when the process ends."""

    def __init__(self, count: int, shape: tuple[int, ...], on_disk: bool) -> None:
        self.count, self.shape, self.file = 0, shape, None
        self._images = torch.empty((0 if on_disk else count, *shape), dtype=torch.uint8)
        if on_disk:
            with files.told_of_the_cache(folder()):
                folder().mkdir(parents=True, exist_ok=True)
                self.file = tempfile.TemporaryFile(dir=folder())  # noqa: SIM115  # open as long as it is needed

    def add(self, image: Tensor) -> None:
        if self.file is None:
            self._images[self.count] = image
        else:
            with files.told_of_the_cache(folder()):
                self.file.write(image.contiguous().numpy().data)
        self.count += 1

    def images(self) -> tuple[Tensor, mmap.mmap | None]:
        """All of them, and the mapping that they are in, if they are in a file. Nothing can be added afterwards."""
        if self.file is None:
            return self._images, None
        with files.told_of_the_cache(folder()), self.file:
            self.file.flush()
            return map_images(self.file, (self.count, *self.shape))
