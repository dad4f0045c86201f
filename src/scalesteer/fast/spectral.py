r"""Correlation as products in the frequency domain: the engine for many input channels.

Images are small and filters are large, so everything is a matrix product, with the pixel axes first and (batch,
channel) last, and nothing is transposed on the way:

1. The image is transformed once: rows, then columns. Zero padding and the choice of wanted pixels are part of the
   matrices, so that the period only has to be image + reach, not image + window.
2. With its centre as origin the transform of a point-symmetric filter is real, so that each frequency is one real
   product :math:`[re; im] (2B \times C) \cdot (C \times O)`. Any other filter has an even and an odd part, whose
   transforms are real and imaginary: one product :math:`[re, im; im, -re] (2B \times 2C) \cdot (2C \times O)`.
3. The result is transformed back to the wanted pixels.

Frequencies are half-integers, :math:`u = \frac12, \frac32, \dots`: a real image has then no self-conjugate frequency,
so that zero and Nyquist need no special case. (Such a transform extends the image with period N and a change of sign;
only pixels that no window reads are reached by the extension.) For positive u and both signs of v,

.. math:: a_\pm = \sum x \cos(u h \pm v w), \quad b_\pm = \sum x \sin(u h \pm v w)

are the real numbers kept, in the order (u, sign, v, {a, b}). The backward pass is made of the same products transposed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from scalesteer.geometry import Axes, Axis, Filters

Value = TypeVar("Value")
Matrices = tuple[Tensor, Tensor]  # of rows and of columns


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
CACHED_BYTES = 1 << 21  # of what goes from one product to the next on a CPU, for each thread
MANY_OUTPUTS = 128  # from so many channels on, one scale is enough for a product, and to join scales takes longer
IDLE_BYTES = 160 << 20  # of each thread's workspace, between two calls
MOST_VIEWS = 64  # sets of views of its buffers


def cached_on(basis: Tensor | None, like: Tensor, key: tuple[Any, ...], make: Callable[[], Value]) -> Value:
    """What `make` computes in the dtype and on the device of `like`: from a basis once, until it changes or is gone."""
    if basis is None or not holds_numbers(like):
        return make()
    key = (*key, like.dtype, like.device)
    version = 0 if basis.is_inference() else basis._version
    found: tuple[int, dict[Any, Any]] | None = _tables.get(basis)
    if found is None or found[0] != version:
        found = _tables[basis] = (version, {})
    value: Value | None = found[1].get(key)
    if value is None:
        value = found[1][key] = make_to_stay(make, like.device)
        # The oldest go; a layer uses two kinds of tables in turn, which stay whatever they take.
        while len(found[1]) > 2 and sum(map(_count_bytes, found[1].values())) > TABLES_BYTES:
            found[1].pop(next(iter(found[1])))
    return keep_for_cuda_graph(value, basis.device)


def _count_bytes(value: Any) -> int:
    """Of a tensor, or of all tensors in a tuple."""
    if isinstance(value, tuple):
        return sum(map(_count_bytes, value))
    return value.nbytes if isinstance(value, Tensor) else 0


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
        if self.lasts and sum(map(_count_bytes, self.buffers.values())) <= IDLE_BYTES:
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
            if len(self.made) >= MOST_VIEWS:
                self.made.clear()
            self.made[key] = found
        return found


NEW_MEMORY = Workspace(None)


def batched_product(matrix: Tensor, batch: Tensor, out: Tensor | None = None) -> Tensor:
    """One matrix times each of a batch; `matmul` would fold the batch into columns and transpose it on the way."""
    return torch.bmm(matrix.expand(batch.shape[0], *matrix.shape), batch, out=out)


def keep_larger(best: Tensor, winner: Tensor | None, response: Tensor, i: int) -> None:
    """Let scale `i` take part in a running maximum, in place; `winner` holds bytes."""
    if winner is not None:  # a later winner has the larger index: the maximum of indices
        torch.maximum(winner, torch.gt(response, best).view(torch.uint8).mul_(i), out=winner)
    torch.maximum(best, response, out=best)


class Engine:
    """An algorithm for the maximum over scales and its gradients.

    An engine is made for one pass over a batch, forward or backward. The batch is loaded piece by piece; what an engine
    makes of the filters serves all pieces. Everything is float32 or float64.

    One that takes one scale after the other has `response` and so on, in a layout of maps to which `inwards` and
    `outwards` translate from `(B, O, H', W')`; one that does not has `max_over_scales` and `gradients` of its own.

    The weights have the dtype and the device of `like`, as all work; the basis may have any. `pieces` are how many will
    be loaded: with 0, operations are plain and autograd follows them. `budget` bytes may be kept for the next piece.
    `tables` are from `make_tables`, `basis_tables` from an earlier pass, if there was one.
    With `half`, `like` and the image may be of half precision; the weights are not, and neither is their gradient.
    """

    half = False  # whether it takes images in half precision, and multiplies in it
    adds_bias = False  # whether it adds `bias` to the maximum
    bias: Tensor | None = None  # (O,), in the dtype of the maximum
    made: Tensor | None = None  # what it makes of the weights in the forward pass, if the backward pass can use it
    trains = False  # whether a gradient may be wanted: what is made of weights alone then does not stay
    floats: Callable[[Filters, Axes, int], tuple[int, int]]  # at work for the filters, and for each image
    # Takes the next piece (B, C, H, W); returns what the backward pass is to give back with it, if anything.
    load_batch: Callable[..., Tensor | None]
    weight_gradient: Callable[[], Tensor]  # of `filters.weights`, from all pieces
    # For one scale after the other. The next call may overwrite a response; gradients come back by scale, with what is
    # wanted, that of the image and that of the weights; the image's is the sum since the piece was loaded.
    response: Callable[[int], Tensor]
    pull_back: Callable[[int, Tensor, bool, bool], None]
    image_gradient: Callable[[], Tensor]
    inwards: Callable[[Tensor], Tensor]
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
        """See :func:`blank_scales`; None if no response needs to be set to zero."""
        return None

    def add_weight_gradient(self, found: Tensor, i: int = 0) -> None:
        """Add to the gradient of scale `i`; `found` belongs to the engine from now on."""
        self.weight_grads[i] = self.weight_grads[i].add_(found) if i in self.weight_grads else found

    def max_over_scales(self, best: Tensor, winner: Tensor | None) -> None:
        """Write the largest response and, if wanted, its scale (uint8), both `(B, O, H', W')`.

        On a tie the lowest scale wins, also where windows see zeros only; this is sure only where `winner` is wanted.
        What is not finite shows, as :func:`scalesteer.functional.max_over_scales` says.
        """
        blank = None if winner is None else self.blank_scales()
        for i in range(len(self.filters.sizes)):
            response = self.response(i)
            if blank is not None:
                self.outwards(response).unflatten(1, (self.groups, -1)).masked_fill_(blank[:, :, None] > i, 0)
            if i == 0:
                top, index = response, None if winner is None else torch.zeros_like(response, dtype=torch.uint8)
            else:
                keep_larger(top, index, response, i)
        if i > 0:  # what is not finite always shows
            top += response.sub_(response)
        best.copy_(self.outwards(top))
        if winner is not None and index is not None:
            winner.copy_(self.outwards(index))

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        """Write the gradient of the piece, if wanted, and add to the gradient of the weights, if wanted."""
        incoming, index = self.inwards(grad), self.inwards(winner)
        wins, routed = torch.empty_like(index), torch.empty_like(incoming)
        for i in range(len(self.filters.sizes)):
            torch.eq(index, i, out=wins)
            self.pull_back(i, routed.copy_(wins).mul_(incoming), grad_image is not None, weights)
        if grad_image is not None:
            grad_image.copy_(self.image_gradient())


def _arange(count: int) -> Tensor:
    """Matrices are made in float64 on the CPU, whatever the defaults are, and moved once."""
    return torch.arange(count, dtype=torch.float64, device="cpu")


def angles(axis: Axis, size: int) -> Tensor:
    """u times offset, for the positive half-integer frequencies and the taps of a window: `(period / 2, size)`."""
    u = (_arange(axis.period // 2) + 0.5) * (2 * math.pi / axis.period)
    return u[:, None] * (axis.dilation * (_arange(size) - size // 2))


def _analysis(axes: Axes, positions: Sequence[Tensor]) -> Matrices:
    """Rows to cosine and sine, `(u {c, s}, positions)`; then columns, `({+, -} v {a, b}, {c, s} positions)`."""
    waves = []
    for axis, places in zip(axes, positions, strict=True):
        # Each frequency twice from the start: joining two axes, one a symbol, would make torch.export constrain it.
        k = _arange(axis.period)
        turns = ((k / 2).floor() + 0.5)[:, None] * (2 * math.pi / axis.period) * places
        waves.append((turns.cos(), turns.sin(), (k % 2 == 0)[:, None]))
    (row_c, row_s, first_row), (c, s, first) = waves
    plus = torch.cat([torch.where(first, c, s), torch.where(first, -s, c)], dim=1)
    minus = torch.cat([torch.where(first, c, -s), torch.where(first, s, c)], dim=1)
    return torch.where(first_row, row_c, row_s), torch.cat([plus, minus])


@dataclass(frozen=True)
class Plan:
    """The matrices of a correlation. Shapes: N, M the periods of rows and columns; u = N / 2, v = M / 2."""

    analyse: Matrices  # (N, H), (2M, 2W)
    restore: Matrices  # (H', N), (2W', 2M)
    # For the even part of filters and, unless they are symmetric, for the odd part; of each, for each scale:
    filters: list[list[Matrices]]  # (N, n // 2 + 1), (M, 2n): the middle row and those below it
    windows: list[list[Matrices]]  # (N, n), (M, 2n): all rows


def plan_for(axes: Axes, sizes: tuple[int, ...], like: Tensor, symmetric: bool = True) -> Plan:
    """The matrices for these axes in the dtype and on the device of a tensor, kept for the next call."""
    if torch.compiler.is_compiling() or not holds_numbers(like):
        return _make_plan(axes, sizes, symmetric, like.dtype, like.device)
    return keep_for_cuda_graph(_kept_plan(axes, sizes, symmetric, like.dtype, like.device), like.device)


def _make_plan(axes: Axes, sizes: tuple[int, ...], symmetric: bool, dtype: torch.dtype, device: torch.device) -> Plan:
    rows, columns = axes

    def place(matrix: Tensor) -> Tensor:
        return matrix.to(device=device, dtype=dtype).contiguous()

    parts = 1 if symmetric else 2
    filters: list[list[Matrices]] = [[] for _ in range(parts)]
    windows: list[list[Matrices]] = [[] for _ in range(parts)]
    for n in sizes:
        turns = angles(rows, n)
        window = torch.stack([turns.cos(), turns.sin()], dim=1).flatten(0, 1)  # (u {c, s}, n)
        # Half of the rows is enough, the others mirror it; the middle row stands alone.
        half = torch.cat([window[:, n // 2, None], 2 * window[:, n // 2 + 1 :]], dim=1) / parts
        turns = angles(columns, n)
        c, s = turns.cos(), turns.sin()
        # cos(a ± b) = cos a cos b ∓ sin a sin b, and sin(a ± b) = sin a cos b ± cos a sin b
        for part, signs in enumerate([((c, -s), (c, s)), ((s, c), (-s, c))][:parts]):
            column_matrix = place(torch.cat([torch.cat(factors, dim=1) for factors in signs]))  # ({+, -} v, {c, s} n)
            filters[part].append((place(half), column_matrix))
            windows[part].append((place(window), column_matrix))
    # Both ways have the same factor, so that spectra of images and of gradients stay in the range of half precision.
    factor = (2 / (rows.period * columns.period)) ** 0.5
    row_matrix, column_matrix = _analysis(axes, [_arange(axis.length) for axis in axes])
    analyse = place(factor * row_matrix), place(column_matrix)
    row_matrix, column_matrix = _analysis(axes, [axis.first + axis.stride * _arange(axis.count) for axis in axes])
    restore = place(factor * row_matrix.T), place(column_matrix.T)
    return Plan(analyse, restore, filters, windows)


_kept_plan = lru_cache(maxsize=64)(to_stay(_make_plan))


def adjoint(matrices: Matrices) -> Matrices:
    """The matrices of the way back, for gradients."""
    return matrices[0].T, matrices[1].T


def transform(x: Tensor, matrices: Matrices, space: Workspace = NEW_MEMORY, name: str = "") -> Tensor:
    """Pixels to frequencies: `(H, W, R)` -> `(u, K, R)`, with `(2u, H)` and `(K, 2W)`; in the buffer `name`."""
    (row_matrix, column_matrix), rest = matrices, x.shape[2]
    u, width = row_matrix.shape[0] // 2, column_matrix.shape[1]
    along_rows = torch.mm(row_matrix, x.flatten(1), out=space.buffer("rows", 2 * u, x.shape[1] * rest))
    del x  # if nobody else holds it, its memory is free for the result
    along_rows = _view(along_rows, u, width, rest)  # from (u {c, s}, W R)
    return batched_product(column_matrix, along_rows, space.buffer(name, u, column_matrix.shape[0], rest))


def restore(spectrum: Tensor, matrices: Matrices, space: Workspace = NEW_MEMORY, name: str = "") -> Tensor:
    """Frequencies to pixels: `(u, K, R)` -> `(H, W, R)`, with `(H, 2u)` and `(2W, K)`; in the buffer `name`."""
    (row_matrix, column_matrix), (u, _, rest) = matrices, spectrum.shape
    height, width = row_matrix.shape[0], column_matrix.shape[0] // 2
    along_rows = batched_product(column_matrix, spectrum, space.buffer("rows", u, 2 * width, rest))
    del spectrum
    along_rows = _view(along_rows, row_matrix.shape[1], width * rest)  # (u {c, s}, W R)
    return _view(torch.mm(row_matrix, along_rows, out=space.buffer(name, height, width * rest)), height, width, rest)


def _view(x: Tensor, *shape: int) -> Tensor:
    """Another shape, by way of one long axis: a direct view makes torch.export constrain the batch size."""
    return x.flatten().reshape(shape)


def half_filters(filters: Tensor, part: int, parts: int) -> Tensor:
    """What `Plan.filters` takes of one part of filters: `(R, n, n)` -> `(n // 2 + 1, n, R)`."""
    middle = filters.shape[1] // 2
    half = filters[:, middle:]
    if parts > 1:
        opposite = filters[:, : middle + 1].flip(1, 2)
        half = half - opposite if part else half + opposite  # twice the part
    return half.permute(1, 2, 0)


def filter_transform(filters: Tensor, plan: Plan, i: int, part: int = 0) -> Tensor:
    """One part of the filters of scale i to frequencies, `(R, n, n)` -> `(u, {+, -} v, R)`; see `Plan`."""
    return transform(half_filters(filters, part, len(plan.filters)), plan.filters[part][i])


class BasisPart(NamedTuple):
    """The even or the odd part of a basis. That of a filter is the weights times `mix` times E functions."""

    mix: Tensor | None  # (D, E); None if the weights stay as they are
    tables: tuple[Tensor, ...]  # (f, E): the transforms of the functions at each scale

    def weights(self, weights: Tensor) -> Tensor:
        """`(..., D)` -> `(..., E)`."""
        return weights if self.mix is None else weights @ self.mix

    def pull_back(self, grad: Tensor) -> Tensor:
        """The adjoint of `weights`."""
        return grad if self.mix is None else grad @ self.mix.T


def basis_parts(filters: Filters, axes: Axes, like: Tensor) -> tuple[BasisPart, ...]:
    """The parts of a basis, see `Plan`: made in float64, in the dtype and on the device of a tensor."""
    basis = filters.basis.clone().double()  # type: ignore[union-attr]  # a clone can be used outside inference mode
    windows = Filters(basis[:, None], None, filters.sizes).windows()  # (D, 1, n, n)
    plan = _make_plan(axes, filters.sizes, filters.symmetric, basis.dtype, basis.device)
    mixes: tuple[Tensor | None, ...] = (None,) if filters.symmetric else parity_mixes(filters)
    found = []
    for part, mix in enumerate(mixes):
        first = slice(None) if mix is None else mix.argmax(0).to(basis.device)  # of a pair that shares a function
        spectra = (filter_transform(w[first].flatten(0, 1), plan, i, part) for i, w in enumerate(windows))
        tables = tuple(t.flatten(0, 1).to(device=like.device, dtype=like.dtype) for t in spectra)
        found.append(BasisPart(None if mix is None else mix.to(device=like.device, dtype=like.dtype), tables))
    return tuple(found)


def parity_mixes(filters: Filters) -> tuple[Tensor, Tensor]:
    """How weights of a basis become those of its even and of its odd functions: `(D, E)` each, entries 0, 1 and -1.

    If two functions are mirror images of each other, f(-x) = g(x), as those of opposite orientations are, the even part
    (f + g) / 2 and the odd part (f - g) / 2 serve both: half of the work. A function that is its own mirror image has
    no odd part, and one without a mirror image has both parts for itself.
    """
    basis = filters.basis.detach().double().cpu()  # type: ignore[union-attr]
    mirrored = torch.cat([part.flip(1) for part in basis.split(filters.areas, dim=1)], dim=1)
    rounding = max(4 * torch.finfo(filters.basis.dtype).eps, 1e-13) * basis.abs().amax(1)  # type: ignore[union-attr]
    same = torch.cdist(mirrored, basis, p=torch.inf) <= rounding
    unit, left = torch.eye(len(basis), dtype=basis.dtype), list(range(len(basis)))
    even, odd = [], []
    while left:
        i = left.pop(0)
        if same[i, i]:
            even.append(unit[i])
            continue
        partners = [j for j in left if same[i, j]][:1]
        left = [j for j in left if j not in partners]
        even.append(unit[i] + unit[partners].sum(0))
        odd.append(unit[i] - unit[partners].sum(0))
    return torch.stack(even, dim=1), torch.stack(odd, dim=1) if odd else unit[:, :0]


def turn(spectrum: Tensor) -> Tensor:
    """What imaginary transfers are multiplied with, `(f, {a, b} B, C)`: [a; b] -> [b; -a]. The adjoint is -turn."""
    images = spectrum.shape[1] // 2
    return torch.cat([spectrum[:, images:], -spectrum[:, :images]], dim=1)


Signs = tuple[Tensor, Tensor, Tensor, Tensor]


def by_sign(x: Tensor) -> Signs:
    """`(u, {+, -}, v, {a, b}, R)` -> plus a, plus b, minus a, minus b; of cosines and sines likewise."""
    (plus_a, plus_b), (minus_a, minus_b) = x[:, 0].unbind(2), x[:, 1].unbind(2)
    return plus_a, plus_b, minus_a, minus_b


def join_signs(spectrum: Signs, out: Signs) -> None:
    """Half of the way from frequencies to columns: `(u, {+, -}, v, {a, b}, R)` -> `(u, {c, s}, v, {c, s}, R)`.

    What is left is one product with `(W', M)`, for cosines and sines of rows alike: half of the work of `(2W', 2M)`.
    """
    (plus_a, plus_b, minus_a, minus_b), (cos_cos, cos_sin, sin_cos, sin_sin) = spectrum, out
    torch.add(plus_a, minus_a, out=cos_cos)
    torch.sub(plus_b, minus_b, out=cos_sin)
    torch.add(plus_b, minus_b, out=sin_cos)
    torch.sub(minus_a, plus_a, out=sin_sin)


def split_signs(waves: Signs, out: Signs) -> None:
    """The adjoint of `join_signs`."""
    (cos_cos, cos_sin, sin_cos, sin_sin), (plus_a, plus_b, minus_a, minus_b) = waves, out
    torch.sub(cos_cos, sin_sin, out=plus_a)
    torch.add(sin_cos, cos_sin, out=plus_b)
    torch.add(cos_cos, sin_sin, out=minus_a)
    torch.sub(sin_cos, cos_sin, out=minus_b)


def blank_scales(bright: Tensor, supports: Tensor, axes: Axes, symmetric: bool) -> Tensor:
    """How many scales, from the first on, see zeros only: `(B, groups, H, W)`, `(S, n, n)` -> `(B, groups, H', W')`.

    The responses of such scales are exactly zero, so that the first of them wins against the others. Between
    frequencies they are zero up to rounding, and rounding would choose the winner and the way of the gradient.
    `bright` is 1 where a channel of the group is not zero, else 0; `supports` are the taps that can be other than zero,
    `symmetric` says of the filters whether they are.
    """
    (rows, columns), (batch, groups), scales = axes, bright.shape[:2], len(supports)
    if bright.device.type == "cpu" and holds_numbers(bright):
        # In float64, whatever precision products have elsewhere: whole numbers must not be off by one half.
        plan = plan_for(axes, (supports.shape[-1],), bright.double(), symmetric)
        tables = [filter_transform(supports.double(), plan, 0, p).view(-1, 1, scales) for p in range(len(plan.filters))]
        spectrum = transform(bright.double().permute(2, 3, 0, 1).flatten(2), plan.analyse)
        by_frequency = spectrum.view(len(tables[0]), -1, 1)  # (f, {a, b} B G, 1)
        product = by_frequency * tables[0]
        if not symmetric:
            product += turn(by_frequency) * tables[1]
        product = product.view(*spectrum.shape[:2], -1)  # (u, K, B G S)
        seen = restore(product, plan.restore).view(rows.count, columns.count, batch, groups, scales)
    else:
        taps = supports.to(bright.dtype)[:, None].repeat(groups, 1, 1, 1)
        padded = F.pad(bright, (*columns.beyond, *rows.beyond))  # a negative border is cut off
        stride, dilation = (rows.stride, columns.stride), (rows.dilation, columns.dilation)
        seen = F.conv2d(padded, taps, None, stride, 0, dilation, groups).unflatten(1, (groups, -1))
        seen = seen.permute(3, 4, 0, 1, 2)
    blank = (seen < 0.5).int()  # (H', W', B, groups, S): how many bright pixels were seen is a small whole number
    return blank.cumprod(-1, dtype=torch.int32).sum(-1, dtype=torch.int32).permute(2, 3, 0, 1)


def _slices(count: int, size: int, room: int, threads: int) -> list[slice]:
    """`count` things of `size` bytes each in slices that fit into `room`, or of one thing for each thread.

    Threads have as many things each: then one finds in its cache what it wrote in the operation before.
    """
    step = max(1, room // max(1, threads * size)) * threads
    if count - step < threads:
        step = count
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


class Frequencies(Engine):
    """Responses as products of spectra, of all scales together.

    Row frequencies u are taken in blocks and columns of the output in strips, so that what one product gives is
    still in the processor's cache when the next one takes it. All of it is in memory once, as `(u {c, s}, W', B S O)`.
    """

    def __init__(self, filters: Filters, axes: Axes, groups: int, like: Tensor, pieces: int = 0, *rest: Any) -> None:
        super().__init__(filters, axes, groups, like, pieces, *rest)
        self.out_channels, self.per_group = filters.weights.shape[:2]
        self.scales, self.outputs = len(filters.sizes), self.out_channels // groups
        self.plan = plan_for(axes, filters.sizes, like, filters.symmetric)
        self.parts, self.every_row = len(self.plan.filters), slice(0, axes[0].period // 2)
        self.basis = self.from_basis(("frequencies", axes), lambda _: self._tables())
        if self.basis is not None:
            # (C, E, O / G): a product for each input channel, or, where groups are small, one for all, (1, E, C O / G)
            weights = [self._by_pair(part.weights(filters.weights)) for part, _ in self.basis]
            self.basis_weights = [w.mT if groups == 1 else w.flatten(0, 1).T[None] for w in weights]
        # Transfers, and their gradients, of all frequencies serve every piece, unless they take too much memory.
        self.fits = self.floats(filters, axes)[0] * like.element_size() <= self.budget // 2
        self.keeps = pieces > 1 and self.fits
        self.halves: dict[tuple[int, int], Tensor] = {}
        self.transfers: Tensor | None = None
        self.transfer_grads: Tensor | None = None

    def _tables(self) -> tuple[tuple[BasisPart, Tensor], ...]:
        """The parts of the basis, each with the tables of all scales, `(f, S, E)`."""
        parts = basis_parts(self.filters, self.axes, self.like)
        return tuple((BasisPart(part.mix, ()), torch.stack(part.tables, dim=1)) for part in parts)

    @staticmethod
    def floats(filters: Filters, axes: Axes, groups: int = 1) -> tuple[int, int]:
        rows, columns = axes
        out_channels, per_group = filters.weights.shape[:2]
        period, (parts, spectra) = rows.period * columns.period, (1, 2) if filters.symmetric else (2, 6)
        image = period * spectra * per_group * groups
        image += (len(filters.sizes) * rows.period + 3 * rows.count) * columns.count * out_channels
        return len(filters.sizes) * out_channels * per_group * parts * period // 2, image

    @staticmethod
    def empty_winner(best: Tensor) -> Tensor:
        batch, channels, height, width = best.shape
        return best.new_empty(width, height, batch, channels, dtype=torch.uint8).permute(2, 3, 1, 0)

    def load_batch(self, x: Tensor, kept: Tensor | None = None) -> None:
        self.x, (self.batch, self.channels) = x, x.shape[:2]
        spectrum = transform(self.inwards(x), self.plan.analyse, self.space, "spectrum")
        self.spectrum = self._by_frequency(spectrum, self.channels)
        if not self.filters.symmetric:
            buffer = self.space.buffer("both", *self.spectrum.shape[:2], 2 * self.per_group)
            self.spectrum = torch.cat([self.spectrum, turn(self.spectrum)], dim=2, out=buffer)  # (f G, 2B, 2C / G)

    def inwards(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)` -> `(H, W, B C)`."""
        pixels = x.permute(2, 3, 0, 1)
        buffer = self.space.buffer("inwards", *pixels.shape) if x.is_floating_point() else None  # winners are bytes
        return (pixels if buffer is None else buffer.copy_(pixels)).flatten(2)

    def outwards(self, maps: Tensor, channels: int | None = None) -> Tensor:
        """`(H, W, B C)` -> `(B, C, H, W)`, by default with the channels of the output; a view."""
        channels = self.out_channels if channels is None else channels
        return _view(maps, maps.shape[0], maps.shape[1], self.batch, channels).permute(2, 3, 0, 1)

    def response(self, i: int) -> Tensor:
        """`(H', W', B O)` of one scale, by plain operations and from finished filters."""
        parts = [self._filter_transform(i, part, self.every_row) for part in range(self.parts)]
        transfer = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # (f G, 2C / G, O / G)
        product = torch.bmm(self.spectrum, transfer)  # (f G, 2B, O / G)
        return restore(self._by_row(product, self.out_channels), self.plan.restore)

    def blank_scales(self) -> Tensor | None:
        """None if no window is blank, where that can be told without waiting for a GPU."""
        x, filters = self.x, self.filters
        can_tell = self.space.like is not None and x.device.type == "cpu" and holds_numbers(x)
        # A window with a bright pixel at its centre is not blank; and one bright channel is enough.
        can_tell = can_tell and all(axis.first >= 0 and axis.last < axis.length for axis in self.axes)
        if can_tell and bool(x[:, :: self.channels // self.groups].all()):
            return None
        bright = (x != 0).unflatten(1, (self.groups, -1)).any(2)
        if can_tell and bool(bright.all()):
            return None
        supports = cached_on(filters.basis, x, ("supports", filters.sizes), filters.supports)
        return blank_scales(bright.to(x.dtype), supports, self.axes, filters.symmetric)

    def max_over_scales(self, best: Tensor, winner: Tensor | None) -> None:
        if self.batch == 0:
            return
        small = self.basis is None and self.fits and self.outputs < MANY_OUTPUTS
        if self.transfers is None and (self.keeps or small):
            self.transfers = self._keep_transfers()
        blank = None if winner is None else self.blank_scales()
        (row_matrix, column_matrix), between = self._restore(), self._between()
        for block, here in self._split(between, self._blocks(), 2):
            product, spectrum, waves, joined = self._signs(block)
            self._multiply(block, product)
            if self.groups > 1:  # (f, G, 2B, S, O / G) -> (f, 2B, S, G, O / G)
                product = product.view(-1, self.groups, 2 * self.batch, self.scales, self.outputs)
                spectrum = by_sign(product.permute(0, 2, 3, 1, 4).reshape(self._by_sign(block)))
            join_signs(spectrum, waves)
            batched_product(column_matrix, joined, here)
        top = self.like.new_empty(between.shape[1], len(row_matrix), self.batch, self.out_channels)  # columns first
        index = None if winner is None else winner.permute(3, 2, 0, 1).zero_()
        for strip, columns in self._split(between, self._strips(), dim=1):
            responses, by_scale = self._responses(strip)
            batched_product(row_matrix, columns.transpose(0, 1), responses.flatten(2))  # from (w, N, B S O)
            if blank is not None:
                scales = torch.arange(self.scales, device=blank.device).view(-1, 1, 1)
                hidden = blank[..., strip].permute(3, 2, 0, 1)[:, :, :, None, :, None] > scales
                responses.unflatten(4, (self.groups, -1)).masked_fill_(hidden, 0)
            larger, wins = top[strip].copy_(by_scale[0]), None if index is None else index[strip]
            for i in range(1, self.scales):
                keep_larger(larger, wins, by_scale[i], i)
            if self.scales > 1:  # what is not finite always shows
                larger += by_scale[-1].sub_(by_scale[-1])
        best.copy_(top.permute(2, 3, 1, 0))

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        if self.batch == 0:
            return
        if self.transfers is None and self.keeps:
            self.transfers = self._make_transfers(self.every_row, "transfers")
        row_matrix, column_matrix = adjoint(self._restore())
        between = self._between(columns_first=True)
        incoming = self.inwards(grad.mT).unflatten(2, (self.batch, -1))  # (W', H', B, O)
        index = winner.permute(3, 2, 0, 1)
        for strip in self._strips():
            here, winners, (routed, by_scale) = incoming[strip], index[strip], self._responses(strip)
            wins = torch.empty_like(winners)  # bytes: to compare bytes and get something else takes far longer
            for i, response in enumerate(by_scale):
                response.copy_(torch.eq(winners, i, out=wins)).mul_(here)
            batched_product(row_matrix, routed.flatten(2), between[strip])
        back = None
        if grad_image is not None:  # transposed, products are faster
            sizes = self.parts, len(self.spectrum), self.per_group, 2 * self.batch
            back = exists(self.space.buffer("grad_spectrum", *sizes))
            if self.merges:  # (1, f G, 2C / G, 2B)
                back = back.view(1, len(self.spectrum), -1, 2 * self.batch)
        for block, here in self._split(between, self._blocks(), 2, dim=1):
            product, spectrum, waves, joined = self._signs(block)
            batched_product(column_matrix, here.transpose(0, 1), joined)
            split_signs(waves, spectrum)
            if self.groups > 1:  # (f, 2B, S, G, O / G) -> (f, G, 2B, S, O / G)
                product = product.view(-1, 2 * self.batch, self.scales, self.groups, self.outputs)
                product = product.permute(0, 3, 1, 2, 4).reshape(-1, 2 * self.batch, self.scales * self.outputs)
            if back is not None:
                self._to_image(block, product, back[:, self._frequencies(block)])
            if weights:
                self._pull_back(block, product)
        if grad_image is not None and back is not None:
            straight, *turned = back[0].split(self.per_group, dim=1) if self.merges else back.unbind()
            found = self._by_row(straight.mT - turn(turned[0].mT) if turned else straight.mT, self.channels)
            maps = restore(found, adjoint(self.plan.analyse), self.space, "image")
            grad_image.copy_(self.outwards(maps, self.channels))

    def weight_gradient(self) -> Tensor:
        if self.transfer_grads is not None:
            self._add_to_weights(self.every_row, self.transfer_grads)
            self.transfer_grads = None
        grads = [self.weight_grads.pop(i) for i in range(len(self.weight_grads))]
        if not grads:  # of an empty batch
            return torch.zeros_like(self.filters.weights)
        grads = [g.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1) for g in grads]  # (O, C / G, ...)
        if self.basis is None:
            return torch.cat(grads, dim=2)  # finished taps are those of each scale, side by side
        parts = [part.pull_back(grad) for (part, _), grad in zip(self.basis, grads, strict=True)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _restore(self) -> Matrices:
        """Frequencies, as `join_signs` leaves them, to pixels: `(H', N)`, `(W', M)`."""
        row_matrix, column_matrix = self.plan.restore
        return row_matrix, column_matrix[: len(column_matrix) // 2, : column_matrix.shape[1] // 2]

    def _between(self, columns_first: bool = False) -> Tensor:
        """`(N, W', B S O)`, or `(W', N, B S O)`: rows are frequencies, u and {c, s}, and columns are pixels.

        What is written comes first, so that products write one matrix after the other.
        """
        first, second = self.axes[0].period, self.axes[1].count
        if columns_first:
            first, second = second, first
        rest = self.batch * self.scales * self.out_channels
        return exists(self.space.buffer("between", first, second, rest))

    def _by_sign(self, block: slice) -> tuple[int, ...]:
        """The shape of a block for `join_signs`."""
        rest = self.batch * self.scales * self.out_channels
        return block.stop - block.start, 2, self.axes[1].period // 2, 2, rest

    def _signs(self, block: slice) -> tuple[Tensor, Signs, Signs, Tensor]:
        """The buffers on both sides of `join_signs`: products, by sign, by sign, and as `(u {c, s}, M, B S O)`."""

        def make() -> tuple[Tensor, Signs, Signs, Tensor]:
            shape, frequencies = self._by_sign(block), self._frequencies(block)
            sizes = frequencies.stop - frequencies.start, 2 * self.batch, self.scales * self.outputs
            product = exists(self.space.buffer("product", *sizes))
            joined = exists(self.space.buffer("joined", *shape))
            waves = joined.view(2 * shape[0], -1, shape[4])
            return product, by_sign(product.view(shape)), by_sign(joined), waves

        key = "signs", block.stop - block.start, *self._sizes
        return self.space.views(key, make)

    def _responses(self, strip: slice) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The buffer for the responses of a strip, `(w, H', B, S, O)`, and those of each scale."""

        def make() -> tuple[Tensor, tuple[Tensor, ...]]:
            sizes = strip.stop - strip.start, self.axes[0].count, self.batch, self.scales, self.out_channels
            responses = exists(self.space.buffer("strip", *sizes))
            return responses, responses.unbind(3)

        return self.space.views(("responses", strip.stop - strip.start, *self._sizes), make)

    @property
    def _sizes(self) -> tuple[Any, ...]:
        """What the shapes of buffers depend on."""
        return self.axes, self.batch, self.groups, self.scales, self.out_channels

    def _split(self, x: Tensor, slices: list[slice], each: int = 1, dim: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Slices, and the parts of a tensor that belong to them, `each` for every thing of a slice."""
        return zip(slices, x.split([each * (s.stop - s.start) for s in slices], dim), strict=True)

    def _blocks(self) -> list[slice]:
        """Of row frequencies."""
        floats = 2 * self.batch * self.out_channels * self.scales
        if self.transfers is None:
            floats += self.out_channels * self.per_group * (self.parts * self.scales if self.merges else 1)
        size = floats * self.axes[1].period * self.like.element_size()
        return _slices(self.every_row.stop, size, *self._room(CACHED_BYTES))

    def _strips(self) -> list[slice]:
        """Of columns of the output."""
        rows, columns = self.axes
        size = rows.count * self.batch * self.scales * self.out_channels * self.like.element_size()
        return _slices(columns.count, size, *self._room(CACHED_BYTES // 2))

    def _room(self, cached: int) -> tuple[int, int]:
        """Bytes of a slice, and between how many threads it is divided."""
        if self.like.device.type != "cpu":  # each has its price
            return max(cached, self.budget // 4), 1
        threads = torch.get_num_threads()
        return threads * cached, threads

    def _rows(self, block: slice) -> slice:
        """The places of a block on the axis u {c, s}."""
        return slice(2 * block.start, 2 * block.stop)

    def _frequencies(self, block: slice, groups: int = 0) -> slice:
        """The places of a block on the axis f G."""
        each = self.axes[1].period * (groups or self.groups)
        return slice(block.start * each, block.stop * each)

    def _each(self) -> Iterator[tuple[int, int, slice, slice]]:
        """Scales, parts, and their places on the axes 2C / G and S O / G of transfers."""
        for i in range(self.scales):
            for part in range(self.parts):
                rows, columns = (slice(k * n, (k + 1) * n) for k, n in ((part, self.per_group), (i, self.outputs)))
                yield i, part, rows, columns

    def _multiply(self, block: slice, product: Tensor) -> None:
        """Write the spectrum of the image times all filters: `(f G, 2B, S O / G)`."""
        spectrum = self.spectrum[self._frequencies(block)]
        if self.merges:
            torch.bmm(spectrum, self._transfers(block), out=product)
            return
        found = exists(self.space.buffer("of scale", *spectrum.shape[:2], self.outputs))
        for i, part, rows, columns in self._each():
            _add_product(spectrum[:, :, rows], self._filter_transform(i, part, block, "transfers"), found, part == 0)
            if part == self.parts - 1:
                product[:, :, columns] = found  # torch multiplies one by one where the result is not contiguous

    def _to_image(self, block: slice, grad: Tensor, back: Tensor) -> None:
        """Write the gradient of the spectrum, for each part `(f G, C / G, 2B)`: an adjoint of `_multiply`."""
        if self.merges:
            torch.bmm(self._transfers(block), grad.mT, out=back[0])
            return
        for i, part, _, columns in self._each():
            transfer = self._filter_transform(i, part, block, "transfers")
            _add_product(transfer, grad[:, :, columns].mT, back[part], i == 0)

    def _pull_back(self, block: slice, grad: Tensor) -> None:
        """Add to the gradient of the weights, or of transfers where they are kept: the other adjoint of `_multiply`."""
        frequencies = self._frequencies(block)
        spectrum = self.spectrum[frequencies].mT
        if self.keeps:
            if self.transfer_grads is None:
                shape = len(self.spectrum), spectrum.shape[1], grad.shape[2]
                self.transfer_grads = exists(self.space.buffer("transfer_grads", *shape)).zero_()
            self.transfer_grads[frequencies].baddbmm_(spectrum, grad)
        elif self.basis is not None:
            buffer = self.space.buffer("transfer_grads", *spectrum.shape[:2], grad.shape[2])
            self._add_to_weights(block, torch.bmm(spectrum, grad, out=buffer))
        else:
            buffer = self.space.buffer("transfer_grads", len(grad), self.per_group, self.outputs)
            for i, part, rows, columns in self._each():
                self._add_to_taps(block, i, part, torch.bmm(spectrum[:, rows], grad[:, :, columns], out=buffer))

    @property
    def merges(self) -> bool:
        """Whether all scales and parts are in one product, or one after the other, so that less is moved."""
        return self.transfers is not None or self.basis is not None

    def _keep_transfers(self) -> Tensor:
        """Of all frequencies; of finished filters that come again, as of a folded layer, for the next call too."""
        weights, key = self.filters.weights, ("transfers", self.axes, self.filters.sizes, self.groups)
        if self.basis is None:
            seen: list[bool] = cached_on(weights, self.like, ("seen", *key), list)
            if seen:
                one = self.batch == 1
                return cached_on(weights, self.like, (*key, one), lambda: self._lay_out(one))
            seen.append(True)
        return self._make_transfers(self.every_row, "transfers")

    def _lay_out(self, for_one_image: bool) -> Tensor:
        """Transfers that stay; the product with one image is faster if input channels are last in memory."""
        found = self._make_transfers(self.every_row)
        return found.mT.contiguous().mT if for_one_image else found

    def _transfers(self, block: slice) -> Tensor:
        if self.transfers is None:
            return self._make_transfers(block, "transfers")
        return self.transfers[self._frequencies(block)]

    def _make_transfers(self, block: slice, name: str = "") -> Tensor:
        """Filters of all scales to the frequencies of a block: `(f G, C / G, S O / G)`, with odd parts `2C / G`."""
        frequencies, width = self._frequencies(block, groups=1), self.scales * self.outputs
        count, pairs = frequencies.stop - frequencies.start, self.groups * self.per_group
        buffer = self.space.buffer(name, self.parts * pairs * count * width)
        spectra = self.like.new_empty(self.parts * pairs * count * width) if buffer is None else buffer
        if self.basis is None:
            spectra = spectra.view(count * self.groups, self.parts * self.per_group, width)
            for i, part, rows, columns in self._each():
                spectra[:, rows, columns] = self._filter_transform(i, part, block, "transfer")
            return spectra
        spectra = spectra.view(self.parts, len(self.basis_weights[0]), count * self.scales, -1)
        for (_, table), weights, spectrum in zip(self.basis, self.basis_weights, spectra, strict=True):
            batched_product(table[frequencies].flatten(0, 1), weights, spectrum)
        if self.groups == 1:
            spectra = spectra.view(self.parts, self.per_group, count, width).permute(2, 0, 1, 3)
        else:
            spectra = spectra.view(self.parts, count, self.scales, self.groups, self.per_group, self.outputs)
            spectra = spectra.permute(1, 3, 0, 4, 2, 5)
        return spectra.reshape(-1, self.parts * self.per_group, width)

    def _add_to_weights(self, block: slice, grad: Tensor) -> None:
        """The adjoint of `_make_transfers`; gradients have pairs of channels first, `(C, O / G, ...)`."""
        if self.basis is None:
            for i, part, rows, columns in self._each():
                self._add_to_taps(block, i, part, grad[:, rows, columns])
            return
        grad = grad.view(-1, self.groups, self.parts, self.per_group, self.scales, self.outputs)
        grad = grad.permute((2, 1, 3, 0, 4, 5) if self.groups == 1 else (2, 0, 4, 1, 3, 5))
        grad = exists(self.space.buffer("transfers", *grad.shape)).copy_(grad)  # filters are not used any more
        for part, (_, table) in enumerate(self.basis):
            functions = table[self._frequencies(block, groups=1)].flatten(0, 1)
            shape = len(self.basis_weights[part]), len(functions), -1  # (C, f S, O / G), or (1, f S, C O / G)
            found = batched_product(functions.T, grad[part].reshape(shape)).mT
            self.add_weight_gradient(found.reshape(self.channels, self.outputs, -1), part)

    def _add_to_taps(self, block: slice, i: int, part: int, grad: Tensor) -> None:
        """The adjoint of `_filter_transform`."""
        row_matrix, column_matrix = self.plan.windows[part][i]
        grad = grad.reshape(block.stop - block.start, len(column_matrix), -1)
        taps = restore(grad, adjoint((row_matrix[self._rows(block)], column_matrix)), self.space)  # (n, n, C O / G)
        self.add_weight_gradient(taps.flatten(0, 1).T.unflatten(0, (-1, self.outputs)), i)

    def _filter_transform(self, i: int, part: int, block: slice, name: str = "") -> Tensor:
        """One part of the filters of scale i at the frequencies of a block: `(f G, C / G, O / G)`."""
        if (i, part) not in self.halves:
            windows = self._by_pair(self.filters.windows()[i]).flatten(0, 1)
            self.halves[i, part] = half_filters(windows, part, self.parts).contiguous()
        row_matrix, column_matrix = self.plan.filters[part][i]
        matrices = row_matrix[self._rows(block)], column_matrix
        return _view(transform(self.halves[i, part], matrices, self.space, name), -1, self.per_group, self.outputs)

    def _by_pair(self, weights: Tensor) -> Tensor:
        """Channels of the input first: `(O, C / G, ...)` -> `(C, O / G, ...)`."""
        by_group: Tensor = weights.unflatten(0, (self.groups, -1))
        return by_group.transpose(1, 2).flatten(0, 1)

    def _by_frequency(self, spectrum: Tensor, channels: int) -> Tensor:
        """`(u, {+, -} v {a, b}, B C)` -> `(f G, 2B, C / G)`."""
        shape = spectrum.shape[0] * spectrum.shape[1] // 2, 2 * self.batch, self.groups, channels // self.groups
        return _view(spectrum, *shape).transpose(1, 2).flatten(0, 1)

    def _by_row(self, product: Tensor, channels: int) -> Tensor:
        """The inverse of `_by_frequency`."""
        product = product.unflatten(0, (-1, self.groups)).transpose(1, 2)
        row_matrix, column_matrix = self.plan.restore
        return _view(product, row_matrix.shape[1] // 2, column_matrix.shape[1], self.batch * channels)


def _add_product(left: Tensor, right: Tensor, out: Tensor, first: bool) -> None:
    """Write the products of matrices, or add them unless they are the first."""
    if first:
        torch.bmm(left, right, out=out)
    else:
        out.baddbmm_(left, right)


def exists(buffer: Tensor | None) -> Tensor:
    if buffer is None:
        raise RuntimeError("an engine for plain operations has no buffers: use `response`.")
    return buffer
