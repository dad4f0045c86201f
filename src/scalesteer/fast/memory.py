"""Memory that lasts: what was made once and is found again, and buffers for intermediate results."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Value = TypeVar("Value")


def holds_numbers(x: Tensor) -> bool:
    """Whether a tensor is a plain one. Those of tracers have no numbers, and nothing made for them may be kept."""
    return type(x) in (Tensor, torch.nn.Parameter)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which takes longer to find that there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


_kept_for_cuda_graphs: dict[int, Any] = {}


def being_captured(device: torch.device) -> bool:
    """Whether operations on this device are recorded as a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_for_cuda_graph(value: Value, device: torch.device) -> Value:
    """What a CUDA graph that is being captured reads must outlive every cache: it is kept for good."""
    if being_captured(device):
        _kept_for_cuda_graphs[id(value)] = value
    return value


def make_outside_graph_pool(make: Callable[[], Value], device: torch.device) -> Value:
    """What `make` computes, in memory that may be kept and is ready for every stream, with or without gradients."""
    if device.type != "cuda" or being_captured(device):
        with torch.inference_mode(False), torch.no_grad():
            return make()
    # torch.compile with CUDA graphs lends a thread memory for a first call, and nothing may stay there: take another.
    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(1) as thread:
        value = thread.submit(torch.no_grad()(lambda: make())).result()
    torch.cuda.synchronize(device)
    return value


_lock = threading.RLock()  # one for all caches; nothing is computed while it is held


class Cache(Generic[Value]):
    """Values that are made once for each key and found again, from any thread; the oldest go first.

    There are at most `most` values, and their tensors take at most `most_bytes`; but the `least` newest values that
    have tensors stay, whatever they take.
    """

    def __init__(self, most: float = math.inf, most_bytes: float = math.inf, least: int = 1) -> None:
        self.most, self.most_bytes, self.least = most, most_bytes, least
        self.values, self.sizes, self.bytes = dict[Any, Value](), dict[Any, int](), 0

    def get_or_make(self, key: Any, make: Callable[[], Value], device: torch.device | None = None) -> Value:
        """The value of a key, made if it is not there; with a device, by :func:`make_outside_graph_pool`.

        What is made while a CUDA graph is captured has no numbers before the graph runs, and is not kept here.
        """
        value = self.values.get(key)
        if value is None:
            value = make() if device is None else make_outside_graph_pool(make, device)
            if device is None or not being_captured(device):
                value = self.add(key, value)
        return value if device is None else keep_for_cuda_graph(value, device)

    def add(self, key: Any, value: Value) -> Value:
        """Keep a value, unless another thread was faster; what is kept."""
        with _lock:
            if key in self.values:
                return self.values[key]
            self.values[key] = value
            if size := _count_bytes(value):
                self.sizes[key] = size
                self.bytes += size
            while len(self.values) > self.most:
                self._drop(next(iter(self.values)))
            while self.bytes > self.most_bytes and len(self.sizes) > self.least:
                self._drop(next(iter(self.sizes)))
        return value

    def _drop(self, key: Any) -> None:
        del self.values[key]
        self.bytes -= self.sizes.pop(key, 0)


_tables: Any = WeakTensorKeyDictionary()  # of each basis: its version, and a cache
TABLES_BYTES = 1 << 26  # of one basis, for all sizes of images together
IDLE_BYTES = 192 << 20  # of each thread's workspace, between two calls
MOST_VIEWS = 8  # kinds of layers and shapes of images whose views of it are kept


def cached_on(basis: Tensor | None, like: Tensor, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
    """What `make` computes in the dtype and on the device of `like`: from a basis once, until it changes or is gone."""
    if basis is None or not holds_numbers(like):
        return make()
    # Numbers may change, or the tensor may get others (`.data = ...`).
    version = 0 if basis.is_inference() else basis._version, basis.data_ptr() if holds_numbers(basis) else 0
    with _lock:
        found: tuple[Any, Cache[Value]] | None = _tables.get(basis)
        if found is None or found[0] != version:
            # A layer uses two kinds of tables in turn, which stay whatever they take.
            found = _tables[basis] = version, Cache(most_bytes=TABLES_BYTES, least=2)
    return found[1].get_or_make((*key, like.dtype, like.device), make, like.device)


def has_reliable_version(weights: Tensor) -> bool:
    """Whether every change of finished filters shows in their version, so that something may be kept with them.

    That of inference tensors stays as it is, and fused optimizers change parameters without a new version.
    """
    return not weights.is_inference() and not weights.requires_grad


def _count_bytes(value: Any) -> int:
    """Of a tensor, or of all tensors in tuples and lists."""
    if isinstance(value, tuple | list):
        return sum(map(_count_bytes, value))
    return value.nbytes if isinstance(value, Tensor) else 0


class Workspace:
    """Memory for intermediate results, used again for the next scale and the next piece of a batch.

    New memory is slow on a CPU: the system hands it out page by page, and each first access of a page is a fault. There
    the memory also serves the next workspace of the same thread, so that no result may stay in it.
    Without a tensor whose kind it is to have, every result gets memory of its own, as autograd needs.
    """

    idle = threading.local()

    def __init__(self, like: Tensor | None) -> None:
        self.like, self.lasts = like, like is not None and like.device.type == "cpu"
        kept = self.idle.__dict__.pop("kept", None) if self.lasts else None
        self.buffers: dict[str, Tensor]
        self.views: dict[Any, Any]  # of buffers
        self.buffers, self.views = kept or ({}, {})

    def __del__(self) -> None:
        if self.lasts:
            smallest_first = sorted(self.buffers.items(), key=lambda item: item[1].nbytes)
            while sum(buffer.nbytes for _, buffer in smallest_first) > IDLE_BYTES:
                smallest_first.pop()
                self.views.clear()
            self.idle.kept = dict(smallest_first), self.views

    def buffer(self, name: str, *shape: int) -> Tensor | None:
        """A tensor for the argument `out` of an operation, or None: without a name, too, memory is new."""
        if self.like is None or not name:
            return None
        floats, buffer = math.prod(shape), self.buffers.get(name)
        if buffer is None or buffer.numel() < floats or buffer.dtype != self.like.dtype:
            self.views.clear()
            with torch.inference_mode(False):  # the next pass may be outside of it
                buffer = self.buffers[name] = self.like.new_empty(floats)
        return buffer[:floats].view(shape)

    def need(self, name: str, *shape: int) -> Tensor:
        """The same where there must be one."""
        buffer = self.buffer(name, *shape)
        if buffer is None:
            raise RuntimeError("an engine for plain operations has no buffers: use `response`.")
        return buffer

    def get_or_make_views(self, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
        """What `make` makes of buffers, for as long as they stay where they are: hundreds of views take their time."""
        key = (*key, self.like.dtype if self.like is not None else None)
        value: Value | None = self.views.get(key)
        if value is None:
            if len(self.views) >= MOST_VIEWS:
                self.views.clear()
            with torch.inference_mode(False):
                value = self.views[key] = make()
        return value


NEW_MEMORY = Workspace(None)
