r"""Images and filters to frequencies and back: correlation as products in the frequency domain.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from scalesteer.fast.memory import NEW_MEMORY, Cache, Workspace, holds_numbers
from scalesteer.geometry import Axes, Axis, Filters

Matrices = tuple[Tensor, Tensor]  # of rows and of columns


def batched_product(matrix: Tensor, batch: Tensor, out: Tensor | None = None) -> Tensor:
    """One matrix times each of a batch; `matmul` would fold the batch into columns and transpose it on the way."""
    return torch.bmm(matrix.expand(batch.shape[0], *matrix.shape), batch, out=out)


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


_plans: Cache[Plan] = Cache(64)


def plan_for(axes: Axes, sizes: tuple[int, ...], like: Tensor, symmetric: bool = True) -> Plan:
    """The matrices for these axes in the dtype and on the device of a tensor, kept for the next call."""
    key = axes, sizes, symmetric, like.dtype, like.device
    if torch.compiler.is_compiling() or not holds_numbers(like):
        return _make_plan(*key)
    return _plans.get_or_make(key, lambda: _make_plan(*key), like.device)


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


def adjoint(matrices: Matrices) -> Matrices:
    """The matrices of the way back, for gradients."""
    return matrices[0].T, matrices[1].T


def transform(x: Tensor, matrices: Matrices, space: Workspace = NEW_MEMORY, name: str = "") -> Tensor:
    """Pixels to frequencies: `(H, W, R)` -> `(u, K, R)`, with `(2u, H)` and `(K, 2W)`; in the buffer `name`."""
    (row_matrix, column_matrix), rest = matrices, x.shape[2]
    u, width = row_matrix.shape[0] // 2, column_matrix.shape[1]
    along_rows = torch.mm(row_matrix, x.flatten(1), out=space.buffer("rows", 2 * u, x.shape[1] * rest))
    del x  # if nobody else holds it, its memory is free for the result
    along_rows = flat_reshape(along_rows, u, width, rest)  # from (u {c, s}, W R)
    return batched_product(column_matrix, along_rows, space.buffer(name, u, column_matrix.shape[0], rest))


def restore(spectrum: Tensor, matrices: Matrices, space: Workspace = NEW_MEMORY, name: str = "") -> Tensor:
    """Frequencies to pixels: `(u, K, R)` -> `(H, W, R)`, with `(H, 2u)` and `(2W, K)`; in the buffer `name`."""
    (row_matrix, column_matrix), (u, _, rest) = matrices, spectrum.shape
    height, width = row_matrix.shape[0], column_matrix.shape[0] // 2
    along_rows = batched_product(column_matrix, spectrum, space.buffer("rows", u, 2 * width, rest))
    del spectrum
    along_rows = flat_reshape(along_rows, row_matrix.shape[1], width * rest)  # (u {c, s}, W R)
    return flat_reshape(
        torch.mm(row_matrix, along_rows, out=space.buffer(name, height, width * rest)), height, width, rest
    )


def flat_reshape(x: Tensor, *shape: int) -> Tensor:
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
