"""The fast algorithm on CUDA: all scales in each product, and Triton kernels where plain operations only move memory.

- :class:`FusedFrequencies` is :class:`spectral.Frequencies` with one product for all scales. Its ends are
  kernels: *spread* takes images apart, pixels first, and in the backward pass gives each scale the pixels that it won;
  *largest* takes the maximum over scales on the way back.
- :class:`FusedTaps` is :class:`taps.Taps`, for layers with few input channels: pairs of pixels
  x(p + d) + x(p - d) are gathered on the fly and multiplied with the filters of three scales at a time.

A filter is its coefficients times a fixed basis, so that transforms of filters are coefficients times the transform of
the basis, which is computed once. Products follow torch's switch for matrix products: TF32 where it is allowed,
otherwise float32 (inside the kernels three TF32 products, which together have its accuracy). Sums are made in a fixed
order. :mod:`scalesteer.fast.spectral` has the same numbers in plain operations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from scalesteer.fast import spectral
from scalesteer.fast.taps import half_window

if TYPE_CHECKING:
    from scalesteer.fast.spectral import Axis
    from scalesteer.functional import Geometry

FEW_CHANNELS = 4  # up to so many input channels, taps; measured for one, for the others by counting operations
_TAPS = 64  # the number of taps is filled up to a multiple of this


@triton.jit
def _better(best, winner, response, s, scales):  # type: ignore[no-untyped-def]
    """The larger of two responses; one of the last scale that is not finite always wins."""
    wins = (response > best) | ((s == scales - 1) & (response - response != 0))
    wins = wins & (s < scales)
    return tl.where(wins, response, best), tl.where(wins, s, winner)


@triton.jit  # type: ignore[untyped-decorator]
def _spread_kernel(  # type: ignore[no-untyped-def]
    x, winner, out, channels, pixels, images, scales, MASKED: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr
):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    b = tl.program_id(2)
    there = (c[:, None] < channels) & (p[None, :] < pixels)
    where = (b * channels + c)[:, None].to(tl.int64) * pixels + p[None, :]
    values = tl.load(x + where, mask=there, other=0.0)
    if MASKED:
        won = tl.load(winner + where, mask=there, other=255)
    target = (p[None, :].to(tl.int64) * images + b) * (scales * channels) + c[:, None]
    for s in range(scales):
        if MASKED:
            tl.store(out + target + s * channels, tl.where(won == s, values, 0.0), mask=there)
        else:
            tl.store(out + target, values, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _largest_kernel(  # type: ignore[no-untyped-def]
    maps, best_out, winner_out, channels, pixels, images, scales, MANY: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr
):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    b = tl.program_id(2)
    there = (c[None, :] < channels) & (p[:, None] < pixels)
    source = maps + (p[:, None].to(tl.int64) * images + b) * (scales * channels) + c[None, :]
    best = tl.load(source, mask=there, other=0.0)
    winner = tl.zeros([BP, BC], tl.int32)
    if MANY:
        for s in range(1, scales):
            response = tl.load(source + s * channels, mask=there, other=0.0)
            best, winner = _better(best, winner, response, s, scales)
    target = (b * channels + c)[None, :].to(tl.int64) * pixels + p[:, None]
    tl.store(best_out + target, best, mask=there)
    if MANY:
        tl.store(winner_out + target, winner.to(tl.uint8), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _more(  # type: ignore[no-untyped-def]
    response, s, t, counts, weights, pairs, taps, o, out_channels, scales,
    PRECISION: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Add to the response of a scale what a block of taps gives, if its window has them."""
    if s < scales:  # noqa: SIM102 (both sides of an `and` would be evaluated)
        if t < tl.load(counts + s):
            w = tl.load(
                weights + (s * taps + t + tl.arange(0, BT))[None, :] * out_channels + o[:, None],
                mask=o[:, None] < out_channels,
                other=0.0,
            )
            response = tl.dot(w, pairs, response, input_precision=PRECISION)
    return response


@triton.jit  # type: ignore[untyped-decorator]
def _taps_forward_kernel(  # type: ignore[no-untyped-def]
    x, weights, offsets, starts, counts, best_out, winner_out, image_numbers, out_channels, pixels, taps, scales,
    PRECISION: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    o = tl.program_id(2) * BO + tl.arange(0, BO)
    image = x + tl.program_id(1).to(tl.int64) * image_numbers
    start = tl.load(starts + p, mask=p < pixels, other=0)
    best = tl.full([BO, BP], -float("inf"), tl.float32)
    winner = tl.zeros([BO, BP], tl.int32)
    for s in range(0, scales, 3):
        first = tl.zeros([BO, BP], tl.float32)
        second = tl.zeros([BO, BP], tl.float32)
        third = tl.zeros([BO, BP], tl.float32)
        count = tl.load(counts + s)
        count = tl.maximum(count, tl.load(counts + tl.minimum(s + 1, scales - 1)))
        count = tl.maximum(count, tl.load(counts + tl.minimum(s + 2, scales - 1)))
        for t in range(0, count, BT):
            offset = t + tl.arange(0, BT)
            plus = image + tl.load(offsets + offset)[:, None]
            minus = image + tl.load(offsets + taps + offset)[:, None]
            pairs = tl.load(plus + start[None, :]) + tl.load(minus + start[None, :])  # (BT, BP)
            first = _more(first, s, t, counts, weights, pairs, taps, o, out_channels, scales, PRECISION, BT)
            second = _more(second, s + 1, t, counts, weights, pairs, taps, o, out_channels, scales, PRECISION, BT)
            third = _more(third, s + 2, t, counts, weights, pairs, taps, o, out_channels, scales, PRECISION, BT)
        best, winner = _better(best, winner, first, s, scales)
        best, winner = _better(best, winner, second, s + 1, scales)
        best, winner = _better(best, winner, third, s + 2, scales)
    where = (tl.program_id(1) * out_channels + o)[:, None].to(tl.int64) * pixels + p[None, :]
    there = (p[None, :] < pixels) & (o[:, None] < out_channels)
    tl.store(best_out + where, best, mask=there)
    tl.store(winner_out + where, winner.to(tl.uint8), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _taps_backward_kernel(  # type: ignore[no-untyped-def]
    x, offsets, starts, blocks, grad, winner, out, images, image_numbers, out_channels, pixels, part, taps, scales,
    PRECISION: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    s, t0 = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    parts = tl.cdiv(pixels, part)
    piece = tl.program_id(1)  # of an image: the pixels it takes are the same in every image that it visits
    low = (piece % parts) * part
    high = tl.minimum(low + part, pixels)
    t, o = t0 + tl.arange(0, BT), tl.program_id(2) * BO + tl.arange(0, BO)
    plus, minus = tl.load(offsets + t)[:, None], tl.load(offsets + taps + t)[:, None]
    first = tl.zeros([BT, BO], tl.float32)
    second = tl.zeros([BT, BO], tl.float32)
    third = tl.zeros([BT, BO], tl.float32)
    for b in range(piece // parts, images, tl.num_programs(1) // parts):
        image = x + tl.cast(b, tl.int64) * image_numbers
        base = (b * out_channels + o)[None, :].to(tl.int64) * pixels
        for p0 in range(low, high, BP):
            p = p0 + tl.arange(0, BP)
            start = tl.load(starts + p, mask=p < high, other=0)[None, :]
            pairs = tl.load(image + (start + plus)) + tl.load(image + (start + minus))  # (BT, BP)
            where = base + p[:, None]
            there = (p[:, None] < high) & (o[None, :] < out_channels)
            won = tl.load(winner + where, mask=there, other=255)
            g = tl.load(grad + where, mask=there, other=0.0)  # (BP, BO)
            first = tl.dot(pairs, tl.where(won == s, g, 0.0), first, input_precision=PRECISION)
            second = tl.dot(pairs, tl.where(won == s + 1, g, 0.0), second, input_precision=PRECISION)
            third = tl.dot(pairs, tl.where(won == s + 2, g, 0.0), third, input_precision=PRECISION)
    there = o[None, :] < out_channels
    where = out + ((piece * scales + s) * taps + t)[:, None] * out_channels + o[None, :]
    tl.store(where, first, mask=there)
    tl.store(where + taps * out_channels, second, mask=there & (s + 1 < scales))
    tl.store(where + 2 * taps * out_channels, third, mask=there & (s + 2 < scales))


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"  # both of torch's switches show


# Blocks that were fastest on an H200. More stages than one keep loads in shared memory, which is twice as slow here.
_MOVE = {"BC": 32, "BP": 16, "num_warps": 4}
_TAPS_FORWARD = {"BP": 128, "BT": 32, "num_warps": 4, "num_stages": 1}
_TAPS_BACKWARD = {"BP": 32, "BT": 64, "num_warps": 4, "num_stages": 1}


def spread(x: Tensor, winner: Tensor | None = None, scales: int = 1) -> Tensor:
    """Images with pixels first; with winners, for each scale the pixels that it won and zero elsewhere.

    Shape:
        `(B, C, H, W)` -> `(H, W, B S C)`.
    """
    x = x.contiguous()
    images, channels, height, width = x.shape
    out = x.new_empty(height, width, images * scales * channels)
    grid = triton.cdiv(channels, _MOVE["BC"]), triton.cdiv(height * width, _MOVE["BP"]), images
    _spread_kernel[grid](
        x, x if winner is None else winner, out, channels, height * width, images, scales, winner is not None, **_MOVE
    )
    return out


def largest(maps: Tensor, images: int, scales: int = 1) -> tuple[Tensor, Tensor]:
    """The largest of several scales and the index of the winner (uint8); the inverse of :func:`spread` for one.

    Shape:
        `(H, W, B S C)` -> `(B, C, H, W)` twice.
    """
    height, width, channels = maps.shape[0], maps.shape[1], maps.shape[2] // (images * scales)
    best = maps.new_empty(images, channels, height, width)
    winner = torch.zeros_like(best, dtype=torch.uint8)
    grid = triton.cdiv(channels, _MOVE["BC"]), triton.cdiv(height * width, _MOVE["BP"]), images
    _largest_kernel[grid](maps, best, winner, channels, height * width, images, scales, scales > 1, **_MOVE)
    return best, winner


@lru_cache(maxsize=8)
def _windows(
    rows: Axis, columns: Axis, sizes: tuple[int, ...], device: torch.device
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """For each scale the transform of a window, cos(u dy ± v dx), and of the first half of a point-symmetric one.

    Shape:
        `(f, n n)`, and `(f, (n n + 1) / 2)` that ends with the centre.
    """
    wholes, halves = [], []
    for n in sizes:
        offsets = torch.arange(n, dtype=torch.float64, device="cpu") - n // 2
        along_rows = rows.angles(rows.dilation * offsets)[:, None, None, :, None]
        along_columns = columns.angles(columns.dilation * offsets)[None, None, :, None, :]
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64, device="cpu").view(1, 2, 1, 1, 1)
        matrix = torch.cos(along_rows + signs * along_columns)  # (u, sign, v, dy, dx)
        matrix = matrix.flatten(3).flatten(0, 2)
        half = 2 * matrix[:, : n * n // 2 + 1]
        half[:, -1] /= 2
        wholes.append(matrix.to(device=device, dtype=torch.float32))
        halves.append(half.to(device=device, dtype=torch.float32))
    return tuple(wholes), tuple(halves)


class Layer(NamedTuple):
    """What is done to images that have a border of `margin` around them.

    Attributes:
        weights: Coefficients, or the taps of all scales side by side: `(O, C, D)`.
        basis: What coefficients multiply, `(D, T)`; None for taps.
        sizes: The window size of each scale.
        margin: Rows above and below, columns left and right.
        geometry: Stride, padding and dilation.
    """

    weights: Tensor
    basis: Tensor | None
    sizes: tuple[int, ...]
    margin: tuple[int, int]
    geometry: Geometry


class FusedFrequencies:
    """Responses as products of spectra, all scales in each."""

    def __init__(self, x: Tensor, layer: Layer) -> None:
        weights, basis, sizes, margin, geometry = layer
        self.batch, self.weights, self.sizes = x.shape[0], weights, sizes
        axes = spectral.make_axes((x.shape[-2], x.shape[-1]), margin, sizes, geometry)
        self.plan = spectral.plan_for(*axes, sizes, x)
        self.table = None
        if basis is None:
            self.windows, self.halves = spectral.hold(_windows(*axes, sizes, x.device), x.device)
        else:
            self.table = spectral.derived(
                basis,
                ("frequencies", axes, sizes, x.device),
                lambda: torch.stack(spectral.make_spectra(basis, sizes, axes, x), dim=1).flatten(0, 1),  # (f S, D)
            )

    @staticmethod
    def numbers(rows: Axis, columns: Axis, channels: int, out_channels: int, scales: int) -> tuple[int, int]:
        """Numbers at work for the filters, and for each image."""
        wide = rows.period * columns.period * scales * out_channels
        return wide * channels // 2, 2 * wide

    def read(self, x: Tensor) -> Tensor:
        """What both passes read, the image's transform: `(f, 2B, C)`."""
        spectrum = spectral.transform(spread(x), self.plan.analyse_rows, self.plan.analyse_columns)
        return spectrum.view(-1, 2 * self.batch, x.shape[1])

    def maximum(self, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        """The largest response and the index of the winner."""
        row_matrix, column_matrix = self.plan.restore_rows, self.plan.restore_columns
        shape = row_matrix.shape[1] // 2, column_matrix.shape[1], -1
        # Large tensors are handed on, not named, so that each is free as soon as the next is there.
        maps = spectral.restore(
            torch.bmm(spectrum, self._transfers().mT).view(shape),  # (f, 2B, S O)
            row_matrix,
            column_matrix,
        )
        return largest(maps, self.batch, len(self.sizes))

    def gradients(
        self, spectrum: Tensor, winner: Tensor, grad: Tensor, image: bool, weights: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of image and weights, where they are wanted."""
        incoming = spectral.transform(
            spread(grad, winner, len(self.sizes)), self.plan.restore_rows.T, self.plan.restore_columns.T
        )
        incoming = incoming.view(-1, 2 * self.batch, len(self.sizes) * grad.shape[1])  # (f, 2B, S O)
        grad_image = None
        if image:
            row_matrix, column_matrix = self.plan.analyse_rows.T, self.plan.analyse_columns.T
            back = torch.bmm(incoming, self._transfers())  # (f, 2B, C)
            back = back.view(row_matrix.shape[1] // 2, column_matrix.shape[1], -1)
            grad_image, _ = largest(spectral.restore(back, row_matrix, column_matrix), self.batch)
        return grad_image, self._pull_back(torch.bmm(incoming.mT, spectrum)) if weights else None

    def _transfers(self) -> Tensor:
        """The transforms of the filters: `(f, S O, C)`."""
        out_channels, channels, _ = self.weights.shape
        flat = self.weights.flatten(0, 1)  # (O C, D)
        if self.table is not None:
            return (self.table @ flat.T).view(-1, len(self.sizes) * out_channels, channels)
        out = flat.new_empty(self.halves[0].shape[0], len(self.sizes), out_channels * channels)
        parts = flat.split([n * n for n in self.sizes], dim=1)
        for i, (matrix, part) in enumerate(zip(self.halves, parts, strict=True)):
            torch.mm(matrix, part[:, : matrix.shape[1]].T, out=out[:, i])
        return out.view(out.shape[0], -1, channels)

    def _pull_back(self, grad: Tensor) -> Tensor:
        """The adjoint of `_transfers`: `(f, S O, C)` -> `(O, C, D)`."""
        numbers = self.weights.shape[0] * self.weights.shape[1]
        if self.table is not None:
            return (grad.view(-1, numbers).T @ self.table).view_as(self.weights)
        parts = grad.view(-1, len(self.sizes), numbers).unbind(1)
        return torch.cat([p.T @ w for p, w in zip(parts, self.windows, strict=True)], dim=1).view_as(self.weights)


@lru_cache(maxsize=64)
def _tap_tables(
    axes: tuple[Axis, Axis], row: int, plane: int, channels: int, sizes: tuple[int, ...], device: torch.device
) -> dict[str, Tensor]:
    """Where the taps of a few-channel layer lie in an image with rows of `row` and planes of `plane` numbers.

    Taps are pairs times channels, from the centre outwards, so that every window is a prefix; filled up to whole
    blocks with taps of weight zero.
    """
    offsets = half_window(max(sizes))
    place = {offset: i for i, offset in enumerate(offsets)}
    pairs = -(-len(offsets) // _TAPS) * _TAPS
    steps = np.array([axes[0].dilation * dy * row + axes[1].dilation * dx for dy, dx in offsets])
    signed = np.zeros((2, pairs, channels))
    signed[:, : len(offsets)] = np.array([1, -1])[:, None, None] * steps[:, None] + plane * np.arange(channels)
    read = np.zeros((len(sizes), pairs))  # which tap of the filter a pair takes ...
    factor = np.zeros((len(sizes), pairs), np.float32)  # ... times this: nothing beyond the window
    half, first = [], 0
    for s, n in enumerate(sizes):
        for k in range(n * n):
            dy, dx = k // n - n // 2, k % n - n // 2
            if (dy, dx) in place:
                pair = place[dy, dx]
                read[s, pair], factor[s, pair] = first + k, 1.0 if pair else 0.5  # the centre pairs with itself
            half.append(s * pairs + place.get((dy, dx), place.get((-dy, -dx), 0)))
        first += n * n
    counts = [(n * n + 1) // 2 * channels for n in sizes]
    threes = [(s, max(counts[s : s + 3])) for s in range(0, len(sizes), 3)]  # scales that share a program
    blocks = [(s, t) for s, count in threes for t in range(0, count, _TAPS_BACKWARD["BT"])]
    rows, columns = (axis.stride * np.arange(axis.count) for axis in axes)
    tables = {
        "offsets": signed.reshape(2, -1).astype(np.int32),
        "starts": (row * rows[:, None] + columns).ravel().astype(np.int32),
        "counts": np.array(counts, np.int32),
        "read": read.ravel().astype(np.int64),
        "factor": factor.ravel(),
        "half": np.array(half, np.int64),  # the pair of every tap of the filters
        "blocks": np.array(blocks, np.int32),
    }
    return {name: torch.from_numpy(table).to(device) for name, table in tables.items()}


class FusedTaps:
    """Responses as products with pairs of pixels that are never written."""

    def __init__(self, x: Tensor, layer: Layer) -> None:
        weights, basis, sizes, margin, geometry = layer
        self.weights, self.sizes = weights, sizes
        self.axes = rows, columns = spectral.make_axes((x.shape[-2], x.shape[-1]), margin, sizes, geometry)
        self.padding = (*columns.border, *rows.border)
        height, width = (axis.length + sum(axis.border) for axis in self.axes)
        self.origin = (rows.border[0] + rows.first) * width + columns.border[0] + columns.first
        tables = _tap_tables(self.axes, width, height * width, x.shape[1], sizes, x.device)
        self.tables = spectral.hold(tables, x.device)
        self.table = None
        if basis is not None:
            read, factor = self.tables["read"], self.tables["factor"]
            self.table = spectral.derived(
                basis, ("taps", sizes, x.device), lambda: (basis[:, read].float() * factor).T.contiguous()
            )

    @staticmethod
    def numbers(rows: Axis, columns: Axis, channels: int, out_channels: int, scales: int) -> tuple[int, int]:
        """Numbers at work for the filters, which are few, and for each image."""
        return 0, rows.count * columns.count * out_channels

    def read(self, x: Tensor) -> Tensor:
        """What both passes read: the image with a border."""
        return F.pad(x, self.padding).contiguous()

    def maximum(self, padded: Tensor) -> tuple[Tensor, Tensor]:
        """The largest response and the index of the winner."""
        out_channels = self.weights.shape[0]
        flat = self.weights.permute(2, 1, 0)  # (D, C, O)
        if self.table is not None:
            weights = self.table @ flat.flatten(1)  # (S pairs, C O)
        else:
            weights = flat[self.tables["read"]] * self.tables["factor"][:, None, None]
        best = padded.new_empty(len(padded), out_channels, self.axes[0].count, self.axes[1].count)
        winner = torch.empty_like(best, dtype=torch.uint8)
        blocks = {**_TAPS_FORWARD, "BO": 16 if out_channels <= 16 else 32}
        grid = triton.cdiv(best[0, 0].numel(), blocks["BP"]), len(padded), triton.cdiv(out_channels, blocks["BO"])
        _taps_forward_kernel[grid](
            self._origin(padded), weights.contiguous(), self.tables["offsets"], self.tables["starts"],
            self.tables["counts"], best, winner, padded[0].numel(), out_channels, best[0, 0].numel(),
            self.tables["offsets"].shape[1], len(self.sizes), PRECISION=_precision(), **blocks,
        )  # fmt: skip
        return best, winner

    def gradients(
        self, padded: Tensor, winner: Tensor, grad: Tensor, image: bool, weights: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradient of the weights; the image's is never asked for here."""
        out_channels, channels, _ = self.weights.shape
        taps, scales, pixels = self.tables["offsets"].shape[1], len(self.sizes), grad[0, 0].numel()
        part = max(_TAPS_BACKWARD["BP"], -(-pixels // 4))  # several programs an image, each with sums of its own
        room = spectral.memory_budget // (4 * padded.element_size() * scales * taps * out_channels)
        parts = -(-pixels // part)
        pieces = parts * max(1, min(len(padded), 128, room // parts))
        out = padded.new_empty(pieces, scales, taps, out_channels)
        blocks = {**_TAPS_BACKWARD, "BO": 16 if out_channels <= 16 else 32}
        grid = len(self.tables["blocks"]), pieces, triton.cdiv(out_channels, blocks["BO"])
        _taps_backward_kernel[grid](
            self._origin(padded), self.tables["offsets"], self.tables["starts"], self.tables["blocks"],
            grad.contiguous(), winner, out, len(padded), padded[0].numel(), out_channels, pixels, part, taps, scales,
            PRECISION=_precision(), **blocks,
        )  # fmt: skip
        found = out.sum(0).view(-1, channels * out_channels)  # (S pairs, C O)
        found = found.masked_fill(self.tables["factor"][:, None] == 0, 0)  # what no block has written
        found = self.table.T @ found if self.table is not None else found[self.tables["half"]] / 2
        return None, found.view(-1, channels, out_channels).permute(2, 1, 0)

    def _origin(self, padded: Tensor) -> Tensor:
        """The image from the centre of the first window on, so that offsets count from there."""
        return padded.flatten()[self.origin :]


def kind(channels: int, image_gradient: bool) -> type[FusedFrequencies | FusedTaps]:
    """The form that suits a layer."""
    return FusedTaps if channels <= FEW_CHANNELS and not image_gradient else FusedFrequencies
