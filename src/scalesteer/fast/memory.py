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
    """Whether a tensor is a plain one: the tensors of tracers hold no numbers, and ours would not fit theirs."""
    return type(x) in (Tensor, torch.nn.Parameter)


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which takes longer to find that there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


_kept_for_cuda_graphs: dict[int, Any] = {}


def keep_for_cuda_graph(value: Value, device: torch.device) -> Value:
    """What a CUDA graph that is being captured reads must outlive every cache: it is kept for good."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _kept_for_cuda_graphs[id(value)] = value
    return value


def make_to_stay(make: Callable[[], Value], device: torch.device) -> Value:
    """What `make` computes, in memory that may be kept; whoever comes next may want gradients, on another stream."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False), torch.no_grad():
            return make()
    # torch.compile with CUDA graphs lends a thread memory for a first call, and nothing may stay there: take another.
    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(1) as thread:
        value = thread.submit(torch.no_grad()(lambda: make())).result()
    torch.cuda.synchronize(device)
    return value


def to_stay(make: Callable[..., Value]) -> Callable[..., Value]:
    """The same for a function whose last argument is the device, to be decorated with a cache."""
    return lambda *arguments: make_to_stay(lambda: make(*arguments), arguments[-1])


class Kept(Generic[Value]):
    """The values of the last `most` keys that were new."""

    def __init__(self, most: int) -> None:
        self.most, self.values = most, dict[Any, Value]()

    def find(self, key: Any, make: Callable[[], Value]) -> Value:
        """The value of a key, made if it is not there."""
        found = self.values.get(key)
        if found is None:
            found = self.values[key] = make()
            if len(self.values) > self.most:
                self.values.pop(next(iter(self.values)), None)  # another thread may be faster
        return found


_tables: Any = WeakTensorKeyDictionary()
TABLES_BYTES = 1 << 26  # of one basis, for all sizes of images together
IDLE_BYTES = 192 << 20  # of each thread's workspace, between two calls
MOST_VIEWS = 4096  # of its buffers


def cached_on(basis: Tensor | None, like: Tensor, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
    """What `make` computes in the dtype and on the device of `like`: from a basis once, until it changes or is gone."""
    if basis is None or not holds_numbers(like):
        return make()
    key = (*key, like.dtype, like.device)
    # Numbers may change, or the tensor may get others (`.data = ...`).
    version = 0 if basis.is_inference() else basis._version, basis.data_ptr() if holds_numbers(basis) else 0
    found: tuple[Any, dict[Any, Any]] | None = _tables.get(basis)
    if found is None or found[0] != version:
        found = _tables[basis] = (version, {})
    value: Value | None = found[1].get(key)
    if value is None:
        value = found[1][key] = make_to_stay(make, like.device)
        # The oldest go; a layer uses two kinds of tables in turn, which stay whatever they take.
        sizes = {name: size for name, kept in found[1].items() if (size := _count_bytes(kept)) > 0}
        while len(sizes) > 2 and sum(sizes.values()) > TABLES_BYTES:
            oldest = next(iter(sizes))
            del found[1][oldest], sizes[oldest]
    return keep_for_cuda_graph(value, basis.device)


def shows_changes(weights: Tensor) -> bool:
    """Whether a change of finished filters shows in their version, so that something may be kept with them.

    That of inference tensors does not, and fused optimizers change what they train without a word.
    """
    return not weights.is_inference() and not weights.requires_grad


def _list_tensors(value: Any) -> list[Tensor]:
    """A tensor, or all tensors in tuples and lists."""
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _list_tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _count_bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in _list_tensors(value))


class Workspace:
    """Memory for intermediate results, used again for the next scale and the next piece of a batch.

    New memory is slow on a CPU: the system hands it out page by page, and each first access of a page is a fault. There
    the memory also serves the next workspace of the same thread, so that nothing may stay in it.
    Without a tensor whose kind it is to have, every result gets memory of its own, as autograd needs.
    """

    idle = threading.local()

    def __init__(self, like: Tensor | None) -> None:
        self.like, self.lasts = like, like is not None and like.device.type == "cpu"
        kept = self.idle.__dict__.pop("kept", None) if self.lasts else None
        self.buffers: dict[str, Tensor]
        self.made: dict[Any, Any]  # views of them
        self.buffers, self.made = kept or ({}, {})

    def __del__(self) -> None:
        if not self.lasts:
            return
        largest_first = sorted(self.buffers, key=lambda name: -self.buffers[name].nbytes)
        while sum(map(_count_bytes, self.buffers.values())) > IDLE_BYTES:
            del self.buffers[largest_first.pop(0)]
            self.made.clear()
        self.idle.kept = self.buffers, self.made

    def buffer(self, name: str, *shape: int) -> Tensor | None:
        """A tensor for the argument `out` of an operation, or None: without a name, too, memory is new."""
        if self.like is None or not name:
            return None
        floats, found = math.prod(shape), self.buffers.get(name)
        if found is None or found.numel() < floats or found.dtype != self.like.dtype:
            self.made.clear()
            with torch.inference_mode(False):  # whoever comes next may be outside of it
                found = self.buffers[name] = self.like.new_empty(floats)
        return found[:floats].view(shape)

    def views(self, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
        """What `make` makes of buffers, once as long as they stay where they are: it takes as long as some work."""
        key = (*key, self.like.dtype if self.like is not None else None)
        found: Value | None = self.made.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = make()
            if len(_list_tensors(found)) + sum(len(_list_tensors(views)) for views in self.made.values()) > MOST_VIEWS:
                self.made.clear()
            self.made[key] = found
        return found


NEW_MEMORY = Workspace(None)


def exists(buffer: Tensor | None) -> Tensor:
    if buffer is None:
        raise RuntimeError("an engine for plain operations has no buffers: use `response`.")
    return buffer
