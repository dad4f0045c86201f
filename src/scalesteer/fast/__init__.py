"""The numbers of one convolution per scale, faster: both passes, and the operators that compilers see.

An engine is an algorithm for the maximum over scales; :class:`engine.Engine` is what all have in common. They take
:class:`scalesteer.geometry.Filters` and the two axes along which windows lie; :mod:`choice` says which serves:

- :class:`spectral.Frequencies`: products of frequencies; every device
- :class:`taps.Taps`: few input channels, CPU
- :class:`triton.FusedFrequencies`: as the first, on CUDA, all scales in each product
- :class:`triton.FusedTaps`: as the second, on CUDA; :mod:`kernels` has what both launch

Which scale wins is in :mod:`maximum`, what is kept for the next call in :mod:`memory`. How it works:

- Filters at six scales have 934 taps per pair of channels, 19 times those of a 7 x 7. Between frequencies their size
  does not matter. The image is transformed once for all scales, with the period image + reach, not image + window.
- Images are small, so transforms are matrix products. Zero padding and cropping are part of the matrices.
- Filters of functions with two lobes are point-symmetric. With the centre as origin their transforms are real, and
  each frequency is one real product (2 batch x channels) · (channels x outputs). Those of one lobe have an imaginary
  part too.
- The product is transformed back to the wanted pixels only, with a running maximum and an 8-bit winner. A CPU does
  this in blocks of frequencies and strips of columns that fit the cache of each thread.
- Backward routes the gradient by the winner and runs the same products transposed. Transforms are made again, not
  saved.
- One or two input channels: pairs of pixels x(p + d) + x(p - d), one product per scale.
- Large images are cut into overlapping tiles, large batches into pieces (`memory_budget`, in bytes of one piece).
- On CUDA all scales go into each product, and the transform of a filter is its coefficients times that of the basis,
  made once. Triton kernels take the maximum on the way out and route the gradient on the way in. Products follow
  torch's TF32.
- Small filters leave little to gain. ``backend="auto"`` counts the taps of all scales (six of the paper's have 934,
  one 7 x 7 has 49), divided by the strides, and takes "fast" from 100 taps on in training, 106 in inference, 30 on
  CUDA. On a CPU, responses without a maximum also need 4 images, and those of several scales need 6 input channels in
  training, 12 in inference. Near these numbers the other backend may be up to twice as fast: `benchmark` times both.
- `torch.compile` sees each pass as one operator (``torch.ops.scalesteer.max_over_scales`` and its backward), so that
  compiled programs contain the fast path, also as CUDA graphs. `torch.export` writes the operator only for layers
  with ``backend="fast"``. With "auto", in the files of `scalesteer export`, under `torch.func` and for second
  derivatives the layer is plain operations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalesteer.fast import choice
from scalesteer.fast.choice import choose_backend, pick_engine, tiles_of, works_with_basis
from scalesteer.fast.engine import Engine
from scalesteer.fast.memory import (
    Cache,
    being_captured,
    cast,
    has_reliable_version,
    holds_numbers,
    keep_for_cuda_graph,
    make_outside_graph_pool,
)
from scalesteer.fast.pieces import cut_into_tiles, images_per_piece, in_pieces, join_tiles, shared_step
from scalesteer.fast.spectral import Frequencies
from scalesteer.fast.taps import Taps
from scalesteer.geometry import Axes, Axis, Filters, Maximum, no_autocast

__all__ = [
    "being_exported",
    "being_traced",
    "benchmark",
    "choose_backend",
    "max_over_scales",
    "memory_budget",
    "responses",
]

memory_budget = 1 << 28
"""Bytes that one piece of work may take beside its input and output, roughly; set it to trade speed for memory. On
CUDA a piece may take twice as much and, where neither gradients nor winners are wanted, four times."""

benchmark = False
"""Whether ``backend="auto"`` times both backends once for each shape and keeps the faster one, as
`torch.backends.cudnn.benchmark` does for algorithms. Otherwise it counts taps (:func:`choose_backend`)."""

# Bytes of one piece on a CPU. With more, misses of the cache cost more than calls. The pairs of taps should stay in the
# cache, unless threads would then not share each operation.
CPU_PIECE, CPU_PIECE_OF_TAPS = 80 << 20, 12 << 20
MOST_SCALES = 255  # winners are bytes
MOST_IMAGES = 65535  # of a piece: a CUDA grid has no more programs along an axis
MOST_KEPT_SHARE = 8  # transforms of filters up to this part of the budget are kept for the backward pass


def transformed() -> bool:
    """Whether a transformation is at work that sees plain operations only: `torch.func`, forward mode, or a tracer."""
    # These are private names of torch (2.11 to 2.13); there are no public ones. test_fast.py guards them.
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def being_exported() -> bool:
    """Whether `torch.export` is at work."""
    return torch.compiler.is_exporting()


# What `torch.compiler.assume_constant_result` does; to call it would import the compiler. Without it the compiler of
# torch 2.11 takes `torch.compiler.is_exporting()` for true in whatever it compiles.
transformed._dynamo_marked_constant = being_exported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def being_traced() -> bool:
    """Whether operations are only recorded: by a compiler, or by what :func:`transformed` knows."""
    return torch.compiler.is_compiling() or transformed()


_rehearsing = threading.local()


@contextmanager
def rehearsal() -> Iterator[None]:
    """Work as while a CUDA graph is captured, so that all that may be chosen or made then is there before."""
    before, _rehearsing.now = getattr(_rehearsing, "now", False), True
    try:
        yield
    finally:
        _rehearsing.now = before


def has_fixed_shapes(x: Tensor) -> bool:
    """Whether what is recorded now runs again with the same shapes."""
    recorded = being_traced() or being_captured(x.device) or not holds_numbers(x)
    return recorded or getattr(_rehearsing, "now", False)


def needs_plain_operations(x: Tensor, backend: str) -> bool:
    """Whether the maximum over scales has to be made of plain operations.

    An exported program has our operator only if the fast backend was asked for by name: whoever runs it then needs
    this package. With sizes that are not known yet there is no plan.
    """
    symbolic = being_exported() and (backend == "auto" or any(isinstance(n, torch.SymInt) for n in x.shape[-2:]))
    return symbolic or transformed()


def result_and_work_dtype(x: Tensor, weights: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the result, as that of a convolution would be, and the dtype of the work."""
    dtype = x.dtype if x.dtype == weights.dtype else torch.promote_types(x.dtype, weights.dtype)
    if dtype != torch.float64 and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return dtype, torch.float64 if dtype == torch.float64 else torch.float32


def responses(x: Tensor, filters: Filters, axes: Axes, groups: int, exact_ties: bool = False) -> Iterator[Tensor]:
    """Responses `(B, O, H', W')` of one scale after the other, equal to those of direct convolutions; plain operations.

    With `exact_ties` they are exactly zero where windows see zeros only, as a maximum needs; their gradients stay.
    """
    dtype, work = result_and_work_dtype(x, filters.weights)
    filters = filters.finished()
    with no_autocast(x.device):
        filters = replace(filters, weights=filters.weights.to(work))
        kind = Frequencies if being_traced() or pick_engine(x, filters, groups) is not Taps else Taps
        engine = kind(filters, axes, groups, x.to(work))
        engine.load_batch(x.to(work))
        blank = engine.blank_scales() if exact_ties else None
        if blank is not None:
            blank = blank.repeat_interleave(filters.weights.shape[0] // groups, dim=1)
        for i in range(len(filters.sizes)):
            response = engine.outwards(engine.response(i))
            if blank is not None:
                response = response - torch.where(blank > i, response, 0).detach()
            yield response.to(dtype).contiguous()


def max_over_scales(
    x: Tensor, filters: Filters, bias: Tensor | None, axes: Axes, groups: int, winners: bool = True
) -> Maximum:
    """The largest response over scales, plus a bias, and the index of the winner (uint8).

    It has a backward pass of the same kind.

    Both are `(B, O, H', W')`; without `winners` the second may be None or have no elements.
    """
    dtype, work = result_and_work_dtype(x, filters.weights)
    if filters.basis is not None and filters.basis.requires_grad:
        filters = filters.finished()  # what is made of a basis is kept, and no gradient goes through it
    tiles = tiles_of(axes)
    # Where kernels run, images may be of half precision; the filters are made in float32 at least.
    images = x if tiles is None else cut_into_tiles(x, axes, tiles)
    images = cast(images, dtype if x.device.type in choice.KERNELS_RUN_ON else work)
    inputs = images, cast(filters.weights, work), filters.basis, bias
    recorded = torch.is_grad_enabled()
    gradient = recorded and any(t is not None and t.requires_grad for t in (images, inputs[1], bias))
    task = _Correlation(filters.sizes, filters.symmetric, tiles or axes, groups, recorded and images.requires_grad)
    if torch.compiler.is_compiling() or not _can_run(images, inputs[1]):
        best, winner = torch.ops.scalesteer.max_over_scales(*inputs, *task.numbers(), winners or gradient)
    elif gradient:
        best, winner = _MaxOverScales.apply(*inputs, task)  # type: ignore[no-untyped-call]
    else:
        best, winner = _run(*inputs, task, winners)
    if tiles is not None:
        best = join_tiles(best, x.shape[0], axes)
        winner = None if winner is None or winner.ndim < 4 else join_tiles(winner, x.shape[0], axes)
    return cast(best, dtype), winner


def _can_run(x: Tensor, other: Tensor) -> bool:
    """Whether engines can run on these tensors; others have a shape only, or go through a dispatcher of their own."""
    return holds_numbers(x) and holds_numbers(other) and not (x.is_meta or other.is_meta)


class _Correlation(NamedTuple):
    """What both passes need to know beside tensors."""

    sizes: tuple[int, ...]
    symmetric: bool
    axes: Axes
    groups: int
    image_gradient: bool  # whether that of the image may be wanted; it decides on the engine in both passes

    @classmethod
    def of(cls, sizes: list[int], symmetric: bool, rows: list[int], columns: list[int], *rest: Any) -> _Correlation:
        """The opposite of :meth:`numbers`."""
        return cls(tuple(sizes), symmetric, (Axis(*rows), Axis(*columns)), *rest)

    def numbers(self) -> tuple[Any, ...]:
        """The same as arguments of an operator."""
        axes = ([a.length, a.first, a.stride, a.count, a.dilation, a.radius] for a in self.axes)
        return (list(self.sizes), self.symmetric, *axes, self.groups, self.image_gradient)

    def prepare(self, x: Tensor, weights: Tensor, basis: Tensor | None) -> _Prepared:
        """What follows from shapes and dtypes, kept for the next call."""
        fused = x.device.type in choice.KERNELS_RUN_ON and x.numel() > 0
        key = self, x.dtype, x.device, weights.shape, weights.dtype, None if basis is None else basis.device, fused
        return _prepared.get_or_make(key, lambda: self._prepare(x, Filters(weights, basis, self.sizes, self.symmetric)))

    def _prepare(self, x: Tensor, filters: Filters) -> _Prepared:
        kind = pick_engine(x, filters, self.groups, self.image_gradient)
        with_basis = works_with_basis(kind, filters)
        if not with_basis:
            filters = filters.finished()
        x = x if kind.half else x.to(filters.weights.dtype)
        for_filters, for_image = (x.element_size() * floats for floats in kind.floats(filters, self.axes, self.groups))
        tables = make_outside_graph_pool(lambda: kind.make_tables(filters, self.axes, x), x.device)
        return _Prepared(kind, with_basis, for_filters, for_image, tables)

    def make_engine(
        self, x: Tensor, weights: Tensor, basis: Tensor | None, prepared: _Prepared, basis_tables: Any, gradient: bool
    ) -> tuple[Engine, int]:
        """An engine, `like` the images as it wants them, and the images of a piece; `gradient`: any may be wanted."""
        kind, filters = prepared.kind, Filters(weights, basis, self.sizes, self.symmetric)
        if not prepared.with_basis:
            filters = filters.finished()
        if not kind.half:
            x = cast(x, weights.dtype)
        step = self._images_of_a_piece(x, prepared, gradient)
        pieces = max(1, -(-x.shape[0] // step))
        engine = kind(filters, self.axes, self.groups, x, pieces, memory_budget, prepared.tables, basis_tables)
        keep_for_cuda_graph((prepared.tables, engine.basis_tables), x.device)
        engine.weights_stay = basis is None and has_reliable_version(weights)
        return engine, step

    def _images_of_a_piece(self, x: Tensor, prepared: _Prepared, gradient: bool) -> int:
        threads, for_image = 1, prepared.for_image
        if x.device.type == "cpu":
            threads, budget = torch.get_num_threads(), min(CPU_PIECE, memory_budget)
            if prepared.kind is Taps:
                pixels = self.axes[0].count * self.axes[1].count
                shared = shared_step(x.shape[0], pixels, threads) * for_image
                budget = shared if 0 < shared <= budget else min(budget, CPU_PIECE_OF_TAPS)
        else:  # what an engine makes of the filters may be made for every piece: no piece should be smaller
            budget = max(memory_budget * (2 if gradient else 4), prepared.for_filters)
        return images_per_piece(x.shape[0], min(MOST_IMAGES, budget // for_image), threads)


class _Prepared(NamedTuple):
    """What follows from a task and the shapes and dtypes of its tensors."""

    kind: type[Engine]
    with_basis: bool  # whether the engine works with the basis, or with finished filters
    for_filters: int  # bytes
    for_image: int
    tables: Any  # see `Engine.make_tables`


_prepared: Cache[_Prepared] = Cache(64)


def _device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else nullcontext()


def _run(
    x: Tensor,
    weights: Tensor,
    basis: Tensor | None,
    bias: Tensor | None,
    task: _Correlation,
    winners: bool,
    kept: list[Any] | None = None,
) -> Maximum:
    """The maximum over scales plus the bias; what the backward pass needs is added to `kept`: how to start, tensors."""
    with no_autocast(x.device), _device_of(x):
        prepared = task.prepare(x, weights, basis)
        engine, step = task.make_engine(x, weights, basis, prepared, None, winners)
        best = engine.like.new_empty(x.shape[0], weights.shape[0], task.axes[0].count, task.axes[1].count)
        winner = engine.empty_winner(best) if winners else None
        if bias is not None and engine.adds_bias:
            engine.bias, bias = cast(bias, best.dtype).contiguous(), None
        spectra = []
        for images, largest, index in in_pieces(step, engine.like, best, winner):
            spectra.append(engine.load_batch(images))
            engine.max_over_scales(largest, index)
        if kept is not None:
            transfers = engine.kept_transfers if task.image_gradient else None
            if transfers is not None and transfers.nbytes > memory_budget // MOST_KEPT_SHARE:
                transfers = None
            kept += (prepared, engine.basis_tables), transfers, *spectra
        best = cast(best, x.dtype)
        return best if bias is None else best.add_(cast(bias, best.dtype).view(-1, 1, 1)), winner


def _run_back(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    basis: Tensor | None,
    winner: Tensor,
    task: _Correlation,
    image: bool,
    weight: bool,
    known: tuple[_Prepared, Any] | None = None,
    transfers: Tensor | None = None,
    *kept: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the image and of the weights, where they are wanted; what comes last is from `_run`."""
    with no_autocast(x.device), _device_of(x):
        prepared, basis_tables = known or (task.prepare(x, weights, basis), None)
        engine, step = task.make_engine(x, weights, basis, prepared, basis_tables, True)
        engine.kept_transfers = transfers
        images, grad = engine.like, cast(grad, engine.like.dtype)
        grad_x = torch.empty_like(images, memory_format=torch.contiguous_format) if image else None
        pieces = list(in_pieces(step, images, winner, grad, grad_x))
        if len(kept) != len(pieces):  # nothing was kept, or the budget has changed
            kept = (None,) * len(pieces)
        for (piece, index, incoming, outgoing), found in zip(pieces, kept, strict=True):
            engine.load_batch(piece, found)
            engine.gradients(index, incoming, outgoing, weight)
        grad_weights = engine.weight_gradient() if weight else None
        if grad_weights is not None and basis is not None and engine.filters.basis is None:
            grad_weights = grad_weights @ basis.to(grad_weights).T
    return None if grad_x is None else cast(grad_x, x.dtype), grad_weights


def _save(
    ctx: Any,
    x: Tensor,
    weights: Tensor,
    basis: Tensor | None,
    winner: Tensor | None,
    task: _Correlation,
    known: tuple[_Prepared, Any] | None = None,
    *kept: Tensor | None,
) -> None:
    # Saved, a basis that changes before the backward pass is noticed; its tables are found by the very object.
    ctx.save_for_backward(x, weights, winner, basis, *kept)
    ctx.basis, ctx.task, ctx.known = basis, task, known
    ctx.set_materialize_grads(False)  # that of the winners would be zeros, to be filled in
    ctx.mark_non_differentiable(winner)


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """Of the image, the weights, the basis, which has none, and the bias."""
    if grad is None:
        return None, None, None, None
    x, weights, winner, _basis, *kept = ctx.saved_tensors
    image, weight, _, bias = ctx.needs_input_grad[:4]
    inputs, task = (x, weights, ctx.basis, winner), ctx.task
    if not (image or weight):
        found: tuple[Tensor | None, Tensor | None] = None, None
    elif torch.is_grad_enabled() or transformed():
        found = _plain_gradients(grad, *inputs, task, image, weight)
    elif _can_run(x, grad):
        found = _run_back(grad, *inputs, task, image, weight, ctx.known, *kept)
    else:
        both = torch.ops.scalesteer.max_over_scales_backward(grad, *inputs, *task.numbers(), image, weight)
        found = both[0] if image else None, both[1] if weight else None
    return *found, None, grad.sum((0, 2, 3)) if bias else None


class _MaxOverScales(torch.autograd.Function):
    """The maximum over scales without the operator, whose registered gradient costs time in every call."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, basis: Tensor | None, bias: Tensor | None, task: _Correlation
    ) -> Maximum:
        kept: list[Any] = []
        best, winner = _run(x, weights, basis, bias, task, True, kept)
        _save(ctx, x, weights, basis, winner, task, *kept)
        return best, winner

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad), None


def _plain_gradients(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    basis: Tensor | None,
    winner: Tensor,
    task: _Correlation,
    image: bool,
    weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """As :func:`_run_back`, made of plain operations, so that it can be differentiated again; the winners are given."""
    with no_autocast(x.device), torch.enable_grad():
        # Aliases, so that nothing is followed from the image back to weights that it may depend on.
        inputs = x.view_as(x), weights.view_as(weights)
        filters = Filters(inputs[1], basis, task.sizes, task.symmetric)
        best = torch.zeros((), dtype=x.dtype, device=x.device)
        for i, response in enumerate(responses(inputs[0], filters, task.axes, task.groups)):
            best = best + response * (winner == i)
        wanted = [t for t, need in zip(inputs, (image, weight), strict=True) if need]
        found = iter(torch.autograd.grad(best, wanted, grad.to(best.dtype), create_graph=True))
    return next(found) if image else None, next(found) if weight else None


# What compilers see: both passes as operators of tensors and numbers; `rows` and `columns` are the fields of an `Axis`.
# What an engine would keep for the backward pass is made again.
_FORWARD, _BACKWARD = "scalesteer::max_over_scales", "scalesteer::max_over_scales_backward"
_TASK = "int[] sizes, bool symmetric, SymInt[] rows, SymInt[] columns, int groups, bool image_gradient"


def _operator(
    x: Tensor, weights: Tensor, basis: Tensor | None, bias: Tensor | None, *numbers: Any
) -> tuple[Tensor, Tensor]:
    best, winner = _run(x, weights, basis, bias, _Correlation.of(*numbers[:-1]), winners=numbers[-1])
    return best, x.new_empty(0, dtype=torch.uint8) if winner is None else winner.contiguous()


def _fake(
    x: Tensor, weights: Tensor, basis: Tensor | None, bias: Tensor | None, *numbers: Any
) -> tuple[Tensor, Tensor]:
    *task, winners = numbers
    rows, columns = _Correlation.of(*task).axes
    best = x.new_empty(x.shape[0], weights.shape[0], rows.count, columns.count)
    return best, torch.empty_like(best, dtype=torch.uint8) if winners else best.new_empty(0, dtype=torch.uint8)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, basis, _bias, *task, _winners = inputs
    _save(ctx, x, weights, basis, output[1], _Correlation.of(*task))


def _operator_back(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weights, basis, winner, *task, image, weight = rest
    found = _run_back(grad, x, weights, basis, winner, _Correlation.of(*task), image, weight)
    return tuple(
        like.new_empty(0) if t is None else t.contiguous() for t, like in zip(found, (x, weights), strict=True)
    )


def _fake_back(grad: Tensor, x: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape if rest[-2] else 0), weights.new_empty(weights.shape if rest[-1] else 0)


torch.library.define(
    _FORWARD,
    f"(Tensor images, Tensor weights, Tensor? basis, Tensor? bias, {_TASK}, bool winners) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl(_FORWARD, "default", _operator)
torch.library.register_fake(_FORWARD, _fake)
torch.library.define(
    _BACKWARD,
    "(Tensor grad, Tensor images, Tensor weights, Tensor? basis, Tensor winner, "
    f"{_TASK}, bool image, bool weight) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl(_BACKWARD, "default", _operator_back)
torch.library.register_fake(_BACKWARD, _fake_back)
torch.library.register_autograd(
    _FORWARD, lambda ctx, *grads: (*_gradients(ctx, *grads), *[None] * 7), setup_context=_setup_context
)
