"""What engines share: memory that is used again, what is kept between calls, and the maximum scale by scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from scalesteer.geometry import Filters

Value = TypeVar("Value")


def holds_numbers(x: Tensor) -> bool:
    """Whether a tensor is a plain one: the tensors of tracers hold no numbers, and ours would not fit theirs."""
    return type(x) in (Tensor, torch.nn.Parameter)


_kept_for_cuda_graphs: dict[int, Any] = {}


def keep_for_cuda_graph(value: Value, device: torch.device) -> Value:
    """What a CUDA graph that is being captured reads must outlive every cache: it is kept for good."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _kept_for_cuda_graphs[id(value)] = value
    return value


_tables: Any = WeakTensorKeyDictionary()
MOST_TABLES = 16  # of one basis: image sizes, and kinds of tables


def cached_on(basis: Tensor, like: Tensor, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
    """What `make` computes from a basis in the dtype and on the device of `like`.

    Made once, and forgotten with the basis or when the basis is changed.
    """
    if not holds_numbers(like):
        return make()
    key = (*key, like.dtype, like.device)
    version = 0 if basis.is_inference() else basis._version
    found: tuple[int, dict[Any, Any]] | None = _tables.get(basis)
    if found is None or found[0] != version or len(found[1]) >= MOST_TABLES:
        found = _tables[basis] = (version, {})
    value: Value | None = found[1].get(key)
    if value is None:
        with torch.inference_mode(False), torch.no_grad():  # whoever comes next may want gradients
            value = make()
        if basis.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(basis.device)  # whoever comes next may work on another stream
        found[1][key] = value
    return keep_for_cuda_graph(value, basis.device)


class Workspace:
    """Memory for intermediate results, used again for the next scale and the next piece of a batch.

    New memory is slow on a CPU: the system hands it out page by page, and each first access of a page is a fault.
    Without `reuse` every result gets memory of its own, as operations that autograd follows need.
    """

    def __init__(self, like: Tensor, reuse: bool) -> None:
        self.like, self.reuse = like, reuse
        self.buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, *shape: int) -> Tensor | None:
        """A tensor for the argument `out` of an operation, or None."""
        if not self.reuse:
            return None
        floats = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < floats:
            self.buffers[name] = self.like.new_empty(floats)
        return self.buffers[name][:floats].view(shape)

    def hand_over(self, name: str) -> None:
        """Leave a buffer to whoever holds it: the next of that name gets memory of its own."""
        self.buffers.pop(name, None)


def batched_product(matrix: Tensor, batch: Tensor, out: Tensor | None = None) -> Tensor:
    """One matrix times each of a batch; `matmul` would fold the batch into columns and transpose it on the way."""
    return torch.bmm(matrix.expand(batch.shape[0], *matrix.shape), batch, out=out)


def keep_larger(best: Tensor, winner: Tensor | None, response: Tensor, i: int) -> None:
    """Let scale `i` take part in a running maximum, in place; `winner` holds bytes."""
    if winner is not None:  # a later winner has the larger index: the maximum of indices
        torch.maximum(winner, torch.gt(response, best).view(torch.uint8).mul_(i), out=winner)
    torch.maximum(best, response, out=best)


class ScaleByScale:
    """The maximum over scales and its gradients, for engines that take one scale after the other.

    Their maps may have another layout than `(B, O, H', W')`: `inwards` and `outwards` translate.
    """

    filters: Filters
    inwards: Callable[[Tensor], Tensor]
    outwards: Callable[[Tensor], Tensor]
    response: Callable[[int], Tensor]
    pull_back: Callable[[int, Tensor, bool, bool], None]
    image_gradient: Callable[[], Tensor]

    def silence_blank(self) -> Callable[[int, Tensor], None] | None:
        """What sets responses to zero where a window sees zeros only; None if they are zero without help."""
        return None

    def max_over_scales(self, best: Tensor, winner: Tensor | None) -> None:
        """Write the largest response and the winner; see :class:`scalesteer.fast.Engine`."""
        silence = None if winner is None else self.silence_blank()
        for i in range(len(self.filters.sizes)):
            response = self.response(i)
            if silence is not None:
                silence(i, response)
            if i == 0:
                top, index = response, None if winner is None else torch.zeros_like(response, dtype=torch.uint8)
            else:
                keep_larger(top, index, response, i)
        if i > 0:  # what is not finite always shows: see functional.max_over_scales
            top += response.sub_(response)
        best.copy_(self.outwards(top))
        if winner is not None and index is not None:
            winner.copy_(self.outwards(index))

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        """Write the gradient of the image and add to that of the weights; see :class:`scalesteer.fast.Engine`."""
        incoming, index = self.inwards(grad), self.inwards(winner)
        wins, routed = torch.empty_like(index), torch.empty_like(incoming)
        for i in range(len(self.filters.sizes)):
            torch.eq(index, i, out=wins)
            self.pull_back(i, routed.copy_(wins).mul_(incoming), grad_image is not None, weights)
        if grad_image is not None:
            grad_image.copy_(self.image_gradient())
