"""The contract of all engines, and what several of them do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scalesteer.fast.memory import NEW_MEMORY, Value, Workspace, cached_on
from scalesteer.geometry import Axes, Filters


class Engine:
    """An algorithm for the maximum over scales and its gradients.

    An engine is made for one pass over a batch, forward or backward. The batch is loaded piece by piece; what an engine
    makes of the filters serves all pieces. Everything is float32 or float64.

    One that also works by plain operations has `response`, in a layout of maps that `outwards` translates to
    `(B, O, H', W')`.

    The weights have the dtype and the device of `like`, as all work; the basis may have any. `pieces` are how many will
    be loaded: with 0, operations are plain and autograd follows them. `budget` bytes may be kept for the next piece.
    `tables` are from `make_tables`, `basis_tables` from an earlier pass, if there was one.
    With `half`, `like` and the image may be of half precision; the weights are not, and neither is their gradient.
    """

    half = False  # whether it takes images in half precision, and multiplies in it
    adds_bias = False  # whether it adds `bias` to the maximum
    bias: Tensor | None = None  # (O,), in the dtype of the maximum
    kept_transfers: Tensor | None = None  # transforms of the filters, which the backward pass may use
    weights_stay = False  # whether the weights are finished filters, so that the next call may use what is made of them
    floats: Callable[[Filters, Axes, int], tuple[int, int]]  # at work for the filters, and for each image
    # Takes the next piece (B, C, H, W); returns what the backward pass is to give back with it, if anything.
    load_batch: Callable[..., Tensor | None]
    weight_gradient: Callable[[], Tensor]  # of `filters.weights`, from all pieces
    response: Callable[[int], Tensor]  # of one scale
    outwards: Callable[[Tensor], Tensor]

    def __init__(
        self,
        filters: Filters,
        axes: Axes,
        groups: int,
        like: Tensor,
        pieces: int = 0,
        budget: int = 0,
        tables: Any = None,
        basis_tables: Any = None,
    ) -> None:
        self.filters, self.axes, self.groups, self.like, self.budget = filters, axes, groups, like, budget
        self.pieces, self.tables, self.basis_tables = pieces, tables, basis_tables
        self.space = Workspace(like) if pieces > 0 else NEW_MEMORY
        self.weight_grads: dict[int, Tensor] = {}

    @staticmethod
    def make_tables(filters: Filters, axes: Axes, like: Tensor) -> Any:
        """What follows from shapes alone, made once for all passes; nothing in it may hold the filters' tensors."""
        return None

    @staticmethod
    def empty_winner(best: Tensor) -> Tensor:
        """Memory for winners of the same shape as the maximum, ordered as the engine likes it."""
        return torch.empty_like(best, dtype=torch.uint8)

    def from_basis(self, key: tuple[Any, ...], make: Callable[[Tensor], Value]) -> Value | None:
        """What `make` computes from the basis, if there is one; see :func:`cached_on`."""
        basis, key = self.filters.basis, (*key, self.filters.sizes, self.filters.symmetric)
        return None if basis is None else cached_on(basis, self.like, key, lambda: make(basis))

    def blank_scales(self) -> Tensor | None:
        """See :func:`maximum.blank_scales`; None if no response needs to be set to zero."""
        return None

    def add_weight_gradient(self, found: Tensor, i: int = 0) -> None:
        """Add to the gradient of scale `i`; `found` belongs to the engine from now on."""
        self.weight_grads[i] = self.weight_grads[i].add_(found) if i in self.weight_grads else found

    def max_over_scales(self, best: Tensor, winner: Tensor | None) -> None:
        """Write the largest response and, if wanted, its scale (uint8), both `(B, O, H', W')`.

        The rule is that of :mod:`maximum`; where windows see zeros only it is sure only if `winner` is wanted.
        """
        raise NotImplementedError

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        """Write the gradient of the piece, if wanted, and add to the gradient of the weights, if wanted."""
        raise NotImplementedError
