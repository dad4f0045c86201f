"""The engines of CUDA: all scales in each product, and Triton kernels where plain operations would only move memory.

- :class:`FusedFrequencies` is :class:`spectral.Frequencies` with one product for all scales. Its ends are kernels:
  *rows in* transforms images along their columns of pixels, and in the backward pass first gives each scale the pixels
  that it won; *rows out* transforms back and takes the maximum over scales, so that the maps of single scales are never
  written. What lies between, transforms along rows of pixels and products of spectra, is cuBLAS's.
- :class:`FusedTaps` is :class:`taps.Taps`: pixels, or for point-symmetric filters pairs x(p + d) + x(p - d), are
  gathered on the fly and multiplied with the filters of three scales at a time.

Products follow torch's switch for matrix products: TF32 where it is allowed, otherwise float32 (inside the kernels
three TF32 products, which together have its accuracy). Images in half precision, as autocast makes them, are
transformed and multiplied in it, with sums in float32. Sums are made in a fixed order.

What one program of a kernel handles. Images are `(B, C, H, W)`, maps `(B, O, P)` with P pixels, flattened; between
frequencies axes have the order `(N, W, B, S, C)`, where N is the period of rows::

    rows in, rows out                  taps, forward                     taps, backward
       W columns ->                       P pixels ->                       S x taps ->
     C +----+----+----+                 O +----+----+----+                O +----+----+----+
     h |    | BW |    |  one image      u |    | BP |    |  one image     u |    | BT |    |  a part of the pixels of
     a +----+----+----+  b              t +----+----+----+  b             t +----+----+----+  every so many-th image
     n |    |####| BC |                 p |    |####| BO |                p |    |####| BO |
     n +----+----+----+                   +----+----+----+                  +----+----+----+
     all scales, one after the other;   all scales, three at a time,      three scales; the sum over pixels comes in
     H in blocks of BH, N of BN         taps in blocks of BT              blocks of BP; parts are added up later

Block sizes are powers of two; what lies beyond an end is masked. A kernel reads its images once (taps: from the cache,
once for each tap) and writes each result once.

Arguments that several kernels have: `pixels`, `images`, `channels` or `out_channels`, `scales`, `height`, `width`,
`period` are the lengths of axes; `step` = 4 `fours` are the channels between frequencies, see :func:`_fill_up`;
`matrix` with `row_step` and `column_step` transforms along one axis;
`offsets` `(2, taps)`, `starts` `(pixels)`: see :func:`_tap_tables`; `counts` `(scales)`, the taps of each window;
`image_numbers`, the floats of one padded image; PAIRS, whether taps are of pairs of pixels; PRECISION, the argument
`input_precision` of `tl.dot`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from scalesteer.fast import transforms
from scalesteer.fast.engine import Engine
from scalesteer.fast.memory import cached_on, convert, keep_for_cuda_graph, shows_changes, to_stay
from scalesteer.fast.taps import half_window, order_of_windows, places_in_order
from scalesteer.fast.transforms import Matrices
from scalesteer.geometry import Axes, Filters

TAPS_MULTIPLE = 64  # the number of taps is filled up to a multiple of this
SUMS_PER_IMAGE, MOST_SUMS = 2, 128  # taps, backward: parts of an image with sums of their own, and images with such

# Blocks that were fastest on an H200. More stages than one keep loads in shared memory, twice as slow for taps.
# Those of rows, by BH, were the fastest of a dozen in TF32, 128 images of 28 and of 14 pixels.
ROWS_IN_BLOCKS = {
    16: {"BN": 32, "BW": 8, "BC": 16, "num_warps": 4, "num_stages": 1},
    32: {"BN": 64, "BW": 8, "BC": 16, "num_warps": 8, "num_stages": 1},
    64: {"BN": 64, "BW": 8, "BC": 16, "num_warps": 8, "num_stages": 1},
}
ROWS_OUT_BLOCKS = {
    16: {"BN": 32, "BW": 8, "BC": 32, "num_warps": 8, "num_stages": 1},
    32: {"BN": 64, "BW": 8, "BC": 16, "num_warps": 4, "num_stages": 1},
}
BLANK_BLOCKS = {"BP": 128, "num_warps": 4}
TAPS_FORWARD_BLOCKS = {"BP": 128, "BT": 32, "num_warps": 4, "num_stages": 1}
TAPS_BACKWARD_BLOCKS = {"BP": 32, "BT": 64, "num_warps": 4, "num_stages": 1}


@triton.jit
def _keep_larger(best, winner, response, s, scales):  # type: ignore[no-untyped-def]
    """The larger of two responses; what is not finite always shows (see functional.max_over_scales)."""
    wins = (response > best) | ((s == scales - 1) & (response - response != 0))
    wins = wins & (s < scales)
    return tl.where(wins, response, best), tl.where(wins, s, winner)


@triton.jit
def _places(c, h, w, b, channels, height, width):  # type: ignore[no-untyped-def]
    """Where pixels of one image lie, `(BC, BH, BW)`, and whether they are there. In this order neighbours in memory are
    neighbours in a program."""
    where = (b * channels + c).to(tl.int64)[:, None, None] * (height * width) + (h[:, None] * width + w[None, :])[None]
    return where, (c < channels)[:, None, None] & ((h[:, None] < height) & (w[None, :] < width))[None]


@triton.jit  # type: ignore[untyped-decorator]
def _load_pixels(  # type: ignore[no-untyped-def]
    x, winner, c, h, w, b, channels, height, width,
    MASKED: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Pixels of one image, `(BH, BW BC)`, and, with MASKED, who won them; zero beyond the ends."""
    where, there = _places(c, h, w, b, channels, height, width)
    values = tl.permute(tl.load(x + where, mask=there, other=0.0), [1, 2, 0]).reshape([BH, BW * BC])
    won = values
    if MASKED:
        won = tl.permute(tl.load(winner + where, mask=there, other=255), [1, 2, 0]).reshape([BH, BW * BC])
    return values, won


@triton.jit  # type: ignore[untyped-decorator]
def _rows_in_kernel(  # type: ignore[no-untyped-def]
    x, winner, matrix, out, bright, row_step, column_step, channels, height, width, period, images, fours, scales,
    MASKED: tl.constexpr, ONE: tl.constexpr, PRECISION: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`(B, C, H, W)` -> `(N, W, B, S, step)`, times `matrix` `(N, H)`: with MASKED each scale gets what it won, zero
    elsewhere. Without there is one, and `bright` `(C / BC, B, H, W)` tells where a block of channels has light. With
    ONE the image is one block high, and its pixels are loaded once."""
    step = 4 * fours
    c, w, b = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1) * BW + tl.arange(0, BW), tl.program_id(2)
    n = tl.arange(0, BW * BC)
    column, channel = tl.program_id(1) * BW + n // BC, tl.program_id(0) * BC + n % BC
    target = out + (column.to(tl.int64) * images + b) * (scales * step) + channel
    inside = (column < width) & (channel < step)
    values, won = _load_pixels(x, winner, c, tl.arange(0, BH), w, b, channels, height, width, MASKED, BH, BW, BC)
    for s in range(scales):
        for first in range(0, period, BN):
            k = first + tl.arange(0, BN)
            found = tl.zeros([BN, BW * BC], tl.float32)
            for top in range(0, height, BH):
                h = top + tl.arange(0, BH)
                if not ONE:
                    values, won = _load_pixels(x, winner, c, h, w, b, channels, height, width, MASKED, BH, BW, BC)
                pixels = tl.where(won == s, values, 0.0) if MASKED else values
                waves = tl.load(
                    matrix + k[:, None] * row_step + h[None, :] * column_step,
                    mask=(k[:, None] < period) & (h[None, :] < height), other=0.0,
                )  # fmt: skip
                found = tl.dot(waves, pixels.to(waves.dtype), found, input_precision=PRECISION)
                if not MASKED:  # noqa: SIM102 (both sides of an `and` would be compiled)
                    if first == 0:
                        lit = tl.max(tl.reshape((values != 0).to(tl.int32), [BH, BW, BC]), axis=2)
                        place = bright + (tl.program_id(0) * images + b).to(tl.int64) * (height * width)
                        place += h[:, None] * width + w[None, :]
                        tl.store(place, lit.to(tl.uint8), mask=(h[:, None] < height) & (w[None, :] < width))
            where = target[None, :] + k[:, None].to(tl.int64) * (width * images * scales * step) + s * step
            tl.store(where, found, mask=(k[:, None] < period) & inside[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _blank_scales_kernel(  # type: ignore[no-untyped-def]
    bright, offsets, first_scales, rings, out, blocks, images, height, width, pixels, out_width,
    first_row, first_column, row_stride, column_stride, count, scales, BP: tl.constexpr,
):  # fmt: skip
    """How many scales see zeros only, for BP windows of one image: the smallest entry of `first_scales` with light. The
    taps of the largest window come ring by ring, `rings` says where each begins: a block of windows that all have light
    at their centres is done after the first."""
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    b = tl.program_id(1)
    row = first_row + (p // out_width) * row_stride
    column = first_column + (p % out_width) * column_stride
    blank = tl.where(p < pixels, scales, 0)
    for ring in range(count):
        if tl.max(blank, axis=0) > 0:
            for t in range(tl.load(rings + ring), tl.load(rings + ring + 1)):
                y = row + tl.load(offsets + 2 * t)
                x = column + tl.load(offsets + 2 * t + 1)
                inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (p < pixels)
                lit = tl.zeros([BP], tl.int32)
                for block in range(blocks):
                    source = bright + (block * images + b).to(tl.int64) * (height * width)
                    lit = lit | tl.load(source + y * width + x, mask=inside, other=0).to(tl.int32)
                blank = tl.where(lit != 0, tl.minimum(blank, tl.load(first_scales + t).to(tl.int32)), blank)
    tl.store(out + b.to(tl.int64) * pixels + p, blank.to(tl.uint8), mask=p < pixels)


@triton.jit  # type: ignore[untyped-decorator]
def _rows_out_kernel(  # type: ignore[no-untyped-def]
    maps, matrix, blank, bias, best_out, winner_out, row_step, column_step, channels, height, width, period, images,
    fours, scales, WINNER: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`(N, W, B, S, step)`, times `matrix` `(H, N)`, -> `(B, C, H, W)`: the largest of the scales, with BIAS plus that
    of its channel. With WINNER also which, and the first `blank` scales of each pixel are exactly zero, whatever
    rounding made of them."""
    step, blocks = 4 * fours, tl.cdiv(height, BH)
    c0, w0, b = (tl.program_id(0) // blocks) * BC, tl.program_id(1) * BW, tl.program_id(2)
    h, w = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH), w0 + tl.arange(0, BW)
    n = tl.arange(0, BW * BC)
    column, channel = w0 + n // BC, c0 + n % BC
    source = maps + (column.to(tl.int64) * images + b) * (scales * step) + channel
    inside = (column < width) & (channel < step)
    best = tl.full([BH, BW * BC], -float("inf"), tl.float32)
    winner = tl.zeros([BH, BW * BC], tl.int32)
    if WINNER:
        place = blank + b.to(tl.int64) * (height * width) + h[:, None] * width + w[None, :]
        zeros = tl.load(place, mask=(h[:, None] < height) & (w[None, :] < width), other=0)
        zeros = tl.broadcast_to(zeros[:, :, None], [BH, BW, BC]).reshape([BH, BW * BC])
    for s in range(scales):
        response = tl.zeros([BH, BW * BC], tl.float32)
        for first in range(0, period, BN):
            k = first + tl.arange(0, BN)
            where = source[None, :] + k[:, None].to(tl.int64) * (width * images * scales * step) + s * step
            values = tl.load(where, mask=(k[:, None] < period) & inside[None, :], other=0.0)
            waves = tl.load(
                matrix + h[:, None] * row_step + k[None, :] * column_step,
                mask=(h[:, None] < height) & (k[None, :] < period), other=0.0,
            )  # fmt: skip
            response = tl.dot(waves, values, response, input_precision=PRECISION)
        if WINNER:
            response = tl.where(zeros > s, 0.0, response)
        best, winner = _keep_larger(best, winner, response, s, scales)
    c = c0 + tl.arange(0, BC)
    where, there = _places(c, h, w, b, channels, height, width)
    largest = tl.permute(best.reshape([BH, BW, BC]), [2, 0, 1]).to(best_out.dtype.element_ty)
    if BIAS:
        largest = _add(largest, tl.load(bias + c, mask=c < channels, other=0.0)[:, None, None])
    tl.store(best_out + where, largest, mask=there)
    if WINNER:
        winner = tl.permute(winner.to(tl.uint8).reshape([BH, BW, BC]), [2, 0, 1])
        tl.store(winner_out + where, winner, mask=there)


@triton.jit
def _add(first, second):  # type: ignore[no-untyped-def]
    """A sum in the dtype of its terms, rounded once."""
    return (first.to(tl.float32) + second.to(tl.float32)).to(first.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(  # type: ignore[no-untyped-def]
    response, s, t, counts, weights, pairs, taps, o, out_channels, scales, PRECISION: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """Add to the response of a scale what a block of taps gives, if its window has them."""
    if s < scales:  # noqa: SIM102 (both sides of an `and` would be evaluated)
        if t < tl.load(counts + s):
            where = weights + (s * taps + t + tl.arange(0, BT))[None, :] * out_channels + o[:, None]
            w = tl.load(where, mask=o[:, None] < out_channels, other=0.0)
            response = tl.dot(w, pairs, response, input_precision=PRECISION)
    return response


@triton.jit  # type: ignore[untyped-decorator]
def _taps_forward_kernel(  # type: ignore[no-untyped-def]
    x, weights, offsets, starts, counts, bias, best_out, winner_out, image_numbers, out_channels, pixels, taps, scales,
    WINNER: tl.constexpr, BIAS: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr, BP: tl.constexpr,
    BT: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The largest response of BO channels at BP pixels of one image, with BIAS plus that of its channel, and which
    scale it is from. Pixels or pairs are gathered once for three scales; a window's taps are a prefix of every larger
    window's."""
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
            pairs = tl.load(plus + start[None, :])  # (BT, BP)
            if PAIRS:
                minus = image + tl.load(offsets + taps + offset)[:, None]
                pairs = _add(pairs, tl.load(minus + start[None, :]))
            first = _accumulate(first, s, t, counts, weights, pairs, taps, o, out_channels, scales, PRECISION, BT)
            second = _accumulate(second, s + 1, t, counts, weights, pairs, taps, o, out_channels, scales, PRECISION, BT)
            third = _accumulate(third, s + 2, t, counts, weights, pairs, taps, o, out_channels, scales, PRECISION, BT)
        best, winner = _keep_larger(best, winner, first, s, scales)
        best, winner = _keep_larger(best, winner, second, s + 1, scales)
        best, winner = _keep_larger(best, winner, third, s + 2, scales)
    where = (tl.program_id(1) * out_channels + o)[:, None].to(tl.int64) * pixels + p[None, :]
    there = (p[None, :] < pixels) & (o[:, None] < out_channels)
    best = best.to(best_out.dtype.element_ty)
    if BIAS:
        best = _add(best, tl.load(bias + o, mask=o < out_channels, other=0.0)[:, None])
    tl.store(best_out + where, best, mask=there)
    if WINNER:
        tl.store(winner_out + where, winner.to(tl.uint8), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _taps_backward_kernel(  # type: ignore[no-untyped-def]
    x, offsets, starts, blocks, grad, winner, out, images, image_numbers, out_channels, pixels, part, taps, scales,
    PAIRS: tl.constexpr, PRECISION: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """The gradient of BT taps of three scales and BO channels, from a part (`part` pixels) of some images. `blocks` has
    the scale and the first tap of each program. A program (its place along the second axis says which) visits the same
    part in every so many-th image and writes sums of its own to `out` `(programs, S, taps, O)`."""
    s, t0 = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    parts = tl.cdiv(pixels, part)
    piece = tl.program_id(1)
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
            pairs = tl.load(image + (start + plus))  # (BT, BP)
            if PAIRS:
                pairs = _add(pairs, tl.load(image + (start + minus)))
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


def _cdiv(length: int, block: int) -> int:
    return -(-length // block)  # that of Triton serves its compiler, too, and takes microseconds


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"  # both of torch's switches show


_compiled: dict[tuple[Any, ...], tuple[Any, list[int]]] = {}
MOST_COMPILED = 4096


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: tuple[bool | int | str, ...],
    blocks: dict[str, int],
) -> None:
    """Launch a kernel whose parameters are tensors, numbers, constants and sizes of blocks, in this order.

    Triton looks at every argument of every launch to find what it has compiled for such arguments. Here the same is
    found by numbers, constants and blocks as they are, and of tensors by dtype and alignment, which takes less time.
    """
    kinds = [(t.dtype, t.data_ptr() % 16) for t in tensors]
    key = (id(kernel), numbers, constants, *blocks.values(), tensors[0].get_device(), *kinds)
    found = _compiled.get(key)
    if found is not None:
        compiled, sizes = found
        compiled[grid](*tensors, *numbers, *constants, *sizes)
        return
    compiled = kernel[grid](*tensors, *numbers, *constants, **blocks)
    if compiled is not None:  # interpreted, there is none
        if len(_compiled) >= MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled, [size for name, size in blocks.items() if not name.startswith("num_")]


def rows_in(
    x: Tensor, matrix: Tensor, step: int, precision: str, winner: Tensor | None = None, scales: int = 1
) -> tuple[Tensor, Tensor]:
    """Images times a matrix `(N, H)`, pixels first: `(B, C, H, W)` -> `(N / 2, 2W, B S step)`, zero beyond C channels.

    With winners, of each scale what it won. Without also `(blocks, B, H, W)`, bytes: where a block of channels has a
    pixel that is not zero.
    """
    x = x.contiguous()
    images, channels, height, width = x.shape
    (period, _), strides = matrix.shape, matrix.stride()
    out = x.new_empty(period // 2, 2 * width, images * scales * step)  # from (N, W, B, S, step)
    high = 16 if height <= 16 else 32 if height <= 32 else 64
    blocks = ROWS_IN_BLOCKS[high]
    grid = _cdiv(step, blocks["BC"]), _cdiv(width, blocks["BW"]), images
    # A kernel takes any tensor for what it does not touch.
    bright = x if winner is not None else x.new_empty(grid[0], images, height, width, dtype=torch.uint8)
    _launch(
        _rows_in_kernel, grid, (x, x if winner is None else winner, matrix, out, bright),
        (*strides, channels, height, width, period, images, step // 4, scales),
        (winner is not None, height <= high, precision, high), blocks,
    )  # fmt: skip
    return out, bright


def rows_out(
    maps: Tensor, matrix: Tensor, best: Tensor, precision: str, scales: int = 1, winner: Tensor | None = None,
    blank: Tensor | None = None, bias: Tensor | None = None,
) -> None:  # fmt: skip
    """From `(N / 2, 2W, B S step)` and a matrix `(H, N)`, write the largest of the scales and, if wanted, the winner.

    Both are `(B, C, H, W)`, winners bytes. `blank` `(B, 1, H, W)` comes with `winner`; `bias` `(C)` is added.
    """
    (images, channels, height, width), period = best.shape, matrix.shape[1]
    high = 16 if height <= 16 else 32
    blocks = ROWS_OUT_BLOCKS[high]
    programs = _cdiv(channels, blocks["BC"]) * _cdiv(height, high)
    _launch(
        _rows_out_kernel, (programs, _cdiv(width, blocks["BW"]), images),
        (maps, matrix, maps if blank is None else blank, maps if bias is None else bias, best,
         best if winner is None else winner),
        (*matrix.stride(), channels, height, width, period, images, maps.shape[2] // (4 * images * scales), scales),
        (winner is not None, bias is not None, precision, high), blocks,
    )  # fmt: skip


def _fill_up(channels: int, dtype: torch.dtype, scales: int = 1) -> int:
    """The channels that a product is made for: a multiple of 4, and of all scales together whole pieces of 16 bytes.

    With other lengths cuBLAS has slower kernels only, some without tensor cores, and ours move single numbers.
    """
    piece = 16 // dtype.itemsize
    return next(n for n in range(-(-channels // 4) * 4, channels + 8, 4) if scales * n % piece == 0)


def _filled_pairs(out_channels: int, channels: int, out_step: int, step: int, device: torch.device) -> Tensor:
    """Which pair of an output and an input channel stands in each place after :func:`_fill_up`."""
    outputs, inputs = np.arange(out_step) % out_channels, np.arange(step) % channels
    return torch.from_numpy((outputs[:, None] * channels + inputs).ravel()).to(device)


def _ring_tables(radius: int, dilation: tuple[int, int], device: torch.device) -> tuple[Tensor, ...]:
    """The largest window ring by ring: places of its taps, offsets (row, column) in pixels, where rings begin."""
    dy, dx = np.mgrid[-radius : radius + 1, -radius : radius + 1].reshape(2, -1)
    rings = np.maximum(np.abs(dy), np.abs(dx))
    places = np.argsort(rings, kind="stable")
    offsets = np.stack([dilation[0] * dy[places], dilation[1] * dx[places]], axis=1)
    begins = np.searchsorted(rings[places], np.arange(radius + 2))
    tables = places.astype(np.int64), offsets.astype(np.int32), begins.astype(np.int32)
    return tuple(torch.from_numpy(table).to(device) for table in tables)


@lru_cache(maxsize=8)
@to_stay
def _halves(
    axes: Axes, sizes: tuple[int, ...], symmetric: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """For each scale the transform of the first half of a window, 2 cos(u dy ± v dx), and last of its centre.

    They are `(f, (n n + 1) / 2)`. For filters that are not symmetric also of the odd part, together `(f, n n)`: cosines
    without the factor of two, then sin(u dy ± v dx).
    """
    (rows, columns), halves = axes, []
    for n in sizes:
        along_rows = transforms.angles(rows, n)[:, None, :, None]
        along_columns = transforms.angles(columns, n)[None, :, None, :]
        turns = torch.stack([along_rows + along_columns, along_rows - along_columns], dim=1)
        turns = turns.flatten(3).flatten(0, 2)  # from (u, sign, v, dy, dx)
        middle = n * n // 2
        half = turns[:, : middle + 1].cos()
        if symmetric:
            half[:, :-1] *= 2
        else:
            half = torch.cat([half, turns[:, :middle].sin()], dim=1)
        halves.append(half.to(device=device, dtype=dtype))
    return tuple(halves)


def _pack(even: Tensor, odd: Tensor) -> Tensor:
    """Weights of both parts in one matrix, `(O, C, E)` each -> `(E + E, O {even, odd} C)`: what is not theirs is zero.

    One product with the functions of both parts then gives transfers as `FusedFrequencies` multiplies with them. That
    is twice the work of two products, and less than to bring their results together.
    """
    packed = even.new_zeros(even.shape[2] + odd.shape[2], len(even), 2, even.shape[1])
    packed[: even.shape[2], :, 0] = even.permute(2, 0, 1)
    packed[even.shape[2] :, :, 1] = odd.permute(2, 0, 1)
    return packed.flatten(1)


def _unpack(packed: Tensor, channels: int, count: int) -> tuple[Tensor, Tensor]:
    """The adjoint of :func:`_pack`; `count` functions are even."""
    by_part = packed.view(len(packed), -1, 2, channels)
    return by_part[:count, :, 0].permute(1, 2, 0), by_part[count:, :, 1].permute(1, 2, 0)


class FrequencyTables(NamedTuple):
    """What shapes say about :class:`FusedFrequencies`.

    Matrices are those of :class:`transforms.Plan`, that of columns once for each row frequency: `(N / 2, K, 2W)`.
    """

    step: int  # channels of the input and of the output, filled up
    out_step: int
    pairs: Tensor | None  # see `_filled_pairs`; None if nothing is filled up
    ways: tuple[Matrices, ...]  # to analyse and to restore, and the adjoints of both, for gradients
    rings: tuple[Tensor, ...]  # see `_ring_tables`


class FusedFrequencies(Engine):
    """Responses as products of spectra, all scales in each. The image's transform is kept for the backward pass.

    Spectra have C' channels: C, filled up (see :func:`_fill_up`), or, if filters have odd parts, twice as many (see
    :func:`transforms.turn`).
    """

    half = adds_bias = True
    tables: FrequencyTables

    def __init__(self, filters: Filters, axes: Axes, groups: int, like: Tensor, *rest: Any) -> None:
        super().__init__(filters, axes, groups, like, *rest)
        if self.basis_tables is None:
            self.basis_tables = self.from_basis(("fused", axes), lambda _: self._make_basis_tables())
        self.precision = _precision()

    @staticmethod
    def make_tables(filters: Filters, axes: Axes, like: Tensor) -> FrequencyTables:
        scales, (out_channels, channels) = len(filters.sizes), filters.weights.shape[:2]
        steps = _fill_up(channels, like.dtype), _fill_up(out_channels, like.dtype, scales)
        filled = steps != (channels, out_channels)
        pairs = _filled_pairs(out_channels, channels, *steps[::-1], like.device) if filled else None
        plan = transforms.plan_for(axes, (), like)

        def by_row(matrices: Matrices) -> Matrices:
            return matrices[0], matrices[1].expand(axes[0].period // 2, *matrices[1].shape)

        ways = map(by_row, (plan.analyse, plan.restore, *map(transforms.adjoint, (plan.analyse, plan.restore))))
        rings = _ring_tables(axes[0].radius, (axes[0].dilation, axes[1].dilation), like.device)
        return FrequencyTables(*steps, pairs, tuple(ways), rings)

    def _make_basis_tables(self) -> tuple[Tensor, tuple[transforms.BasisPart, ...], Tensor]:
        """The functions of all parts side by side, `(f S, E)`, the parts without tables of their own, first scales."""
        parts = transforms.basis_parts(self.filters, self.axes, self.like)
        table = torch.cat([torch.stack(part.tables, dim=1) for part in parts], dim=2).flatten(0, 1)
        return table, tuple(part._replace(tables=()) for part in parts), self._first_scales()

    def _first_scales(self) -> Tensor:
        """The first scale that has each tap of the largest window, ring by ring."""
        supports, (places, *_) = self.filters.supports(), self.tables.rings
        return (~supports).to(torch.uint8).cumprod(0).sum(0, dtype=torch.int32).flatten()[places]

    @staticmethod
    def floats(filters: Filters, axes: Axes, groups: int = 1) -> tuple[int, int]:
        out_channels, channels = filters.weights.shape[:2]
        wide = axes[0].period * axes[1].period * len(filters.sizes) * out_channels
        return wide * channels // (2 if filters.symmetric else 1), 2 * wide

    def load_batch(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        self.batch = x.shape[0]
        if kept is None:
            rows, columns = self.tables.ways[0]
            pixels, self.bright = rows_in(x, rows, self.tables.step, self.precision)
            kept = torch.bmm(columns, pixels).view(-1, 2 * self.batch, self.tables.step)  # (f, 2B, C)
        self.spectrum = kept  # (f, 2B, C'), with odd parts twice as many
        if not self.filters.symmetric:
            self.spectrum = torch.cat([kept, transforms.turn(kept)], dim=2)
        return kept

    def max_over_scales(self, best: Tensor, winner: Tensor | None) -> None:
        rows, columns = self.tables.ways[1]
        blank = None if winner is None else self.blank_scales()
        # Large tensors are handed on, not named, so that each is free as soon as the next is there: (f, 2B, S O).
        shape = columns.shape[0], columns.shape[2], -1
        maps = torch.bmm(columns, torch.bmm(self.spectrum, self._transfers().mT).view(shape))
        rows_out(maps, rows, best, self.precision, len(self.filters.sizes), winner, blank, self.bias)

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        scales, out_step, (rows, columns) = len(self.filters.sizes), self.tables.out_step, self.tables.ways[3]
        incoming = torch.bmm(columns, rows_in(grad, rows, out_step, self.precision, winner, scales)[0])
        incoming = incoming.view(-1, 2 * self.batch, scales * out_step)  # (f, 2B, S O)
        if grad_image is not None:
            back = torch.bmm(incoming, self._transfers())  # (f, 2B, C')
            if not self.filters.symmetric:
                straight, turned = back.chunk(2, dim=2)
                back = straight - transforms.turn(turned)
            rows, columns = self.tables.ways[2]
            maps = torch.bmm(columns, back.view(columns.shape[0], columns.shape[2], -1))
            rows_out(maps, rows, grad_image, self.precision)
        if weights:
            found = torch.bmm(incoming.mT, self.spectrum)  # (f, S O, C')
            self.add_weight_gradient(found.float() if self.pieces > 1 else found)

    def weight_gradient(self) -> Tensor:
        """The adjoint of `_make_transfers`: `(f, S O, C')` -> `(O, C, D)`, float32."""
        (out_channels, channels), scales = self.filters.weights.shape[:2], len(self.filters.sizes)
        grad = convert(self.weight_grads[0], self.like.dtype)
        grad = grad.view(grad.shape[0] * scales, -1)  # (f S, O C')
        if self.basis_tables is not None:
            table, parts, _ = self.basis_tables
            if self.filters.symmetric:
                found = torch.mm(grad.T, table).view(self.tables.out_step, self.tables.step, -1)
            else:
                pair = _unpack(torch.mm(table.T, grad), self.tables.step, parts[0].mix.shape[1])
                found = parts[0].pull_back(pair[0]) + parts[1].pull_back(pair[1])
        else:
            taps = []
            for g, matrix in zip(grad.unflatten(0, (-1, scales)).unbind(1), self._halves(), strict=True):
                if self.filters.symmetric:
                    half = (g.T @ matrix).view(self.tables.out_step, self.tables.step, -1)
                    head, centre = half[..., :-1] / 2, half[..., -1:]  # a tap and its mirror image have equal gradients
                    taps += [head, centre, head.flip(2)]
                else:
                    even, odd = _unpack(matrix.T @ g, self.tables.step, matrix.shape[1] // 2 + 1)
                    head = even[..., :-1]
                    taps += [head + odd, even[..., -1:], (head - odd).flip(2)]
            found = torch.cat(taps, dim=2)
        if self.tables.pairs is not None:
            found = found[:out_channels, :channels]
        return convert(found, torch.float32)

    def _transfers(self) -> Tensor:
        """The transforms of the filters: `(f, S O, C')`. Those of finished filters, which nobody trains, are kept."""
        if self.made is None:
            weights, filters = self.filters.weights, self.filters
            key = "transfers", self.axes, filters.sizes, filters.symmetric
            finished = self.basis_tables is None and not self.trains and shows_changes(weights)
            self.made = cached_on(weights if finished else None, self.like, key, self._make_transfers)
        return self.made

    def _make_transfers(self) -> Tensor:
        weights, scales = convert(self.filters.weights, self.like.dtype), len(self.filters.sizes)
        pairs = weights.flatten(0, 1)  # (O C, D)
        if self.tables.pairs is not None:
            # Some weights twice are as good as zeros: what they multiply is zero, or nobody reads the result.
            pairs = pairs.index_select(0, self.tables.pairs)
        shape = self.tables.out_step, self.tables.step, -1
        if self.basis_tables is not None:
            table, parts, _ = self.basis_tables
            right = [part.weights(pairs) for part in parts]
            matrix = right[0].T if self.filters.symmetric else _pack(*(part.view(shape) for part in right))
            out = torch.mm(table, matrix)  # (f S, O C')
        else:
            halves, taps_by_scale = self._halves(), pairs.view(shape).split(self.filters.areas, dim=2)
            width = pairs.shape[0] * (1 if self.filters.symmetric else 2)
            out = pairs.new_empty(len(halves[0]), scales, width)
            for i, (half, taps) in enumerate(zip(halves, taps_by_scale, strict=True)):
                middle = taps.shape[2] // 2
                if self.filters.symmetric:
                    matrix = taps[..., : middle + 1].flatten(0, 1).T
                else:
                    head, centre, tail = taps.split([middle, 1, middle], dim=2)
                    matrix = _pack(torch.cat([head + tail.flip(2), centre], dim=2), head - tail.flip(2))
                torch.mm(half, matrix, out=out[:, i])
        return out.view(-1, scales * self.tables.out_step, matrix.shape[1] // self.tables.out_step)

    def _halves(self) -> tuple[Tensor, ...]:
        halves = _halves(self.axes, self.filters.sizes, self.filters.symmetric, self.like.dtype, self.like.device)
        return keep_for_cuda_graph(halves, self.like.device)

    def blank_scales(self) -> Tensor:
        (rows, columns), (_, offsets, rings) = self.axes, self.tables.rings
        firsts = self._first_scales() if self.basis_tables is None else self.basis_tables[2]
        pixels = rows.count * columns.count
        blank = self.bright.new_empty(self.batch, 1, rows.count, columns.count)
        _launch(
            _blank_scales_kernel, (_cdiv(pixels, BLANK_BLOCKS["BP"]), self.batch, 1),
            (self.bright, offsets, firsts, rings, blank),
            (self.bright.shape[0], self.batch, rows.length, columns.length, pixels, columns.count, rows.first,
             columns.first, rows.stride, columns.stride, rows.radius + 1, len(self.filters.sizes)),
            (), BLANK_BLOCKS,
        )  # fmt: skip
        return blank


def _tap_tables(
    axes: Axes, row: int, plane: int, channels: int, sizes: tuple[int, ...], symmetric: bool, device: torch.device
) -> dict[str, Tensor]:
    """Where the taps of a few-channel layer lie in an image with rows of `row` and planes of `plane` numbers.

    Taps are pairs (or, unless filters are symmetric, pixels) times channels, from the centre outwards, so that every
    window is a prefix; filled up to whole blocks with taps of weight zero.
    """
    offsets = half_window(max(sizes))
    if not symmetric:
        offsets = tuple(d for dy, dx in offsets for d in dict.fromkeys([(dy, dx), (-dy, -dx)]))
    pairs = -(-len(offsets) // TAPS_MULTIPLE) * TAPS_MULTIPLE
    steps = np.array([axes[0].dilation * dy * row + axes[1].dilation * dx for dy, dx in offsets])
    signed = np.zeros((2, pairs, channels))
    signed[:, : len(offsets)] = np.array([1, -1])[:, None, None] * steps[:, None] + plane * np.arange(channels)
    lengths = [(n * n + 1) // 2 if symmetric else n * n for n in sizes]
    places = np.concatenate([s * pairs + np.arange(length) for s, length in enumerate(lengths)])
    taps, mirrored = places_in_order(sizes, symmetric, order_of_windows(sizes))
    read, factor = np.zeros(len(sizes) * pairs), np.zeros(len(sizes) * pairs, np.float32)
    read[places], factor[places] = taps, 1.0
    if symmetric:
        factor[places[np.equal(taps, mirrored)]] = 0.5  # the centre pairs with itself
    half = np.zeros(sum(n * n for n in sizes))
    half[taps] = half[mirrored] = places
    counts = [length * channels for length in lengths]
    threes = [(s, max(counts[s : s + 3])) for s in range(0, len(sizes), 3)]  # scales that share a program
    blocks = [(s, t) for s, count in threes for t in range(0, count, TAPS_BACKWARD_BLOCKS["BT"])]
    rows, columns = (axis.stride * np.arange(axis.count) for axis in axes)
    tables = {  # P pixels, S scales
        "offsets": signed.reshape(2, -1).astype(np.int32),  # (2, taps): from a centre to a pair, in floats
        "starts": (row * rows[:, None] + columns).ravel().astype(np.int32),  # (P): from the first centre, in floats
        "counts": np.array(counts, np.int32),  # (S): the taps of each window
        "read": read.astype(np.int64),  # (S pairs): which tap of the filters a pair takes,
        "factor": factor,  # and times what: nothing beyond the window
        "beyond": (factor == 0)[:, None],  # where that is
        "half": half.astype(np.int64),  # (T): the pair of every tap of the filters
        "blocks": np.array(blocks, np.int32),  # scale and first tap of each program of the backward kernel
    }
    return {name: torch.from_numpy(table).to(device) for name, table in tables.items()}


def _taps_blocks(blocks: dict[str, int], out_channels: int) -> dict[str, int]:
    return {**blocks, "BO": 16 if out_channels <= 16 else 32}


class FusedTaps(Engine):
    """Responses as products with pixels, or pairs of them, that are never written. It has no gradient of the image.

    Where a window sees zeros only, its response is exactly zero. The image with a border is kept for the backward pass.
    """

    half = adds_bias = True
    places: dict[str, Tensor]

    def __init__(self, filters: Filters, axes: Axes, groups: int, like: Tensor, *rest: Any) -> None:
        super().__init__(filters, axes, groups, like, *rest)
        self.padding, self.origin, self.image_numbers, self.places = self.tables
        if self.basis_tables is None:
            read, factor = self.places["read"], self.places["factor"]
            self.basis_tables = self.from_basis(("fused taps",), lambda b: (b[:, read].float() * factor).T.contiguous())
        self.table: Tensor | None = self.basis_tables

    @staticmethod
    def make_tables(filters: Filters, axes: Axes, like: Tensor) -> tuple[tuple[int, ...], int, int, dict[str, Tensor]]:
        """The border of an image; the place of the first centre in an image that has it, its floats, those of taps."""
        (rows, columns), channels = axes, filters.weights.shape[1]
        height, width = (axis.length + sum(axis.border) for axis in axes)
        origin = (rows.border[0] + rows.first) * width + columns.border[0] + columns.first
        where = axes, width, height * width, channels, filters.sizes, filters.symmetric
        return (*columns.border, *rows.border), origin, channels * height * width, _tap_tables(*where, like.device)

    @staticmethod
    def floats(filters: Filters, axes: Axes, groups: int = 1) -> tuple[int, int]:
        return 0, axes[0].count * axes[1].count * len(filters.weights)  # filters take little

    def load_batch(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        self.padded = F.pad(x, self.padding).contiguous() if kept is None else kept
        self.image = self.padded.flatten()[self.origin :]  # offsets count from the centre of the first window
        return self.padded

    def max_over_scales(self, best: Tensor, winner: Tensor | None) -> None:
        (images, out_channels, height, width), places = best.shape, self.places
        blocks, pixels = _taps_blocks(TAPS_FORWARD_BLOCKS, out_channels), height * width
        _launch(
            _taps_forward_kernel,
            (_cdiv(pixels, blocks["BP"]), images, _cdiv(out_channels, blocks["BO"])),
            (self.image, self._tap_weights(), places["offsets"], places["starts"], places["counts"],
             best if self.bias is None else self.bias, best, best if winner is None else winner),
            (self.image_numbers, out_channels, pixels, places["offsets"].shape[1], len(self.filters.sizes)),
            (winner is not None, self.bias is not None, self.filters.symmetric, _precision()), blocks,
        )  # fmt: skip

    def _tap_weights(self) -> Tensor:
        """The weights of each tap, `(S pairs, C O)`. Those of finished filters, which nobody trains, are kept."""

        def make() -> Tensor:
            flat = self.filters.weights.permute(2, 1, 0)  # (D, C, O)
            if self.table is not None:
                return convert(torch.mm(self.table, flat.flatten(1)), self.like.dtype)
            found: Tensor = flat[self.places["read"]] * self.places["factor"][:, None, None]
            return found.to(self.like.dtype).contiguous()

        finished = self.table is None and shows_changes(self.filters.weights)
        key = "tap weights", self.filters.sizes, self.filters.symmetric
        return cached_on(self.filters.weights if finished else None, self.like, key, make)

    def gradients(self, winner: Tensor, grad: Tensor, grad_image: Tensor | None, weights: bool) -> None:
        (images, out_channels, height, width), places = grad.shape, self.places
        taps, scales, pixels = places["offsets"].shape[1], len(self.filters.sizes), height * width
        part = max(TAPS_BACKWARD_BLOCKS["BP"], -(-pixels // SUMS_PER_IMAGE))
        room = self.budget // (16 * scales * taps * out_channels)
        parts = -(-pixels // part)
        programs = parts * max(1, min(images, MOST_SUMS, room // parts))
        out = grad.new_empty(programs, scales, taps, out_channels, dtype=torch.float32)
        blocks = _taps_blocks(TAPS_BACKWARD_BLOCKS, out_channels)
        _launch(
            _taps_backward_kernel,
            (places["blocks"].shape[0], programs, _cdiv(out_channels, blocks["BO"])),
            (self.image, places["offsets"], places["starts"], places["blocks"], grad.contiguous(), winner, out),
            (images, self.image_numbers, out_channels, pixels, part, taps, scales),
            (self.filters.symmetric, _precision()), blocks,
        )  # fmt: skip
        self.add_weight_gradient(out.sum(0))

    def weight_gradient(self) -> Tensor:
        channels, out_channels = self.filters.weights.shape[1], len(self.filters.weights)
        found = self.weight_grads[0].view(-1, channels * out_channels)  # (S pairs, C O)
        found = found.masked_fill(self.places["beyond"], 0)  # what no block has written
        if self.table is not None:
            found = torch.mm(self.table.T, found)
        else:
            found = found[self.places["half"]] / (2 if self.filters.symmetric else 1)
        return found.view(-1, channels, out_channels).permute(2, 1, 0)
