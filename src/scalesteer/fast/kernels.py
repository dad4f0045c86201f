"""The Triton kernels of the engines in triton.py, and the functions that launch them.

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
`period` are the lengths of axes; `step` = 4 `fours` are the channels between frequencies, see `_fill_up` of triton.py;
`matrix` with `row_step` and `column_step` transforms along one axis; `offsets` `(2, taps)`, `starts` `(pixels)` and
`counts` `(scales)`, the taps of each window, are from `_tap_tables` there; `image_numbers`, the floats of one padded
image; PAIRS, whether taps are of pairs of pixels; PRECISION, the argument `input_precision` of `tl.dot`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scalesteer.fast.memory import Cache
from scalesteer.geometry import Axes

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
    """The larger of two responses; what is not finite always shows (see maximum.py)."""
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


def _taps_blocks(blocks: dict[str, int], out_channels: int) -> dict[str, int]:
    return {**blocks, "BO": 16 if out_channels <= 16 else 32}


def input_precision() -> str:
    """Of products inside kernels, as torch's switch for matrix products says."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"  # both of torch's switches show


_compiled: Cache[tuple[Any, list[int]]] = Cache(4096)


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
    found = _compiled.values.get(key)
    if found is not None:
        compiled, sizes = found
        compiled[grid](*tensors, *numbers, *constants, *sizes)
        return
    compiled = kernel[grid](*tensors, *numbers, *constants, **blocks)
    if compiled is not None:  # interpreted, there is none
        _compiled.add(key, (compiled, [size for name, size in blocks.items() if not name.startswith("num_")]))


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


def blank_scales(
    bright: Tensor, offsets: Tensor, first_scales: Tensor, rings: Tensor, axes: Axes, scales: int
) -> Tensor:
    """How many scales see zeros only, for each window: `(B, 1, H', W')`, bytes. `bright` is from :func:`rows_in`."""
    (rows, columns), (blocks, images) = axes, bright.shape[:2]
    pixels = rows.count * columns.count
    blank = bright.new_empty(images, 1, rows.count, columns.count)
    _launch(
        _blank_scales_kernel, (_cdiv(pixels, BLANK_BLOCKS["BP"]), images, 1),
        (bright, offsets, first_scales, rings, blank),
        (blocks, images, rows.length, columns.length, pixels, columns.count, rows.first, columns.first, rows.stride,
         columns.stride, rows.radius + 1, scales),
        (), BLANK_BLOCKS,
    )  # fmt: skip
    return blank


def taps_forward(
    image: Tensor, image_numbers: int, weights: Tensor, places: dict[str, Tensor], pairs: bool, bias: Tensor | None,
    best: Tensor, winner: Tensor | None,
) -> None:  # fmt: skip
    """Write the largest of the scales, plus the bias, and, if wanted, the winner; `places` are `_tap_tables`."""
    images, out_channels, height, width = best.shape
    blocks, pixels = _taps_blocks(TAPS_FORWARD_BLOCKS, out_channels), height * width
    _launch(
        _taps_forward_kernel, (_cdiv(pixels, blocks["BP"]), images, _cdiv(out_channels, blocks["BO"])),
        (image, weights, places["offsets"], places["starts"], places["counts"], best if bias is None else bias, best,
         best if winner is None else winner),
        (image_numbers, out_channels, pixels, places["offsets"].shape[1], places["counts"].shape[0]),
        (winner is not None, bias is not None, pairs, input_precision()), blocks,
    )  # fmt: skip


def taps_backward(
    image: Tensor, image_numbers: int, places: dict[str, Tensor], pairs: bool, winner: Tensor, grad: Tensor, budget: int
) -> Tensor:
    """The gradient of the weights of taps, `(S, taps, O)`, from sums that take a part of `budget` bytes."""
    images, out_channels, height, width = grad.shape
    taps, scales, pixels = places["offsets"].shape[1], places["counts"].shape[0], height * width
    part = max(TAPS_BACKWARD_BLOCKS["BP"], -(-pixels // SUMS_PER_IMAGE))
    room = budget // (16 * scales * taps * out_channels)
    parts = -(-pixels // part)
    programs = parts * max(1, min(images, MOST_SUMS, room // parts))
    out = grad.new_empty(programs, scales, taps, out_channels, dtype=torch.float32)
    blocks = _taps_blocks(TAPS_BACKWARD_BLOCKS, out_channels)
    _launch(
        _taps_backward_kernel, (places["blocks"].shape[0], programs, _cdiv(out_channels, blocks["BO"])),
        (image, places["offsets"], places["starts"], places["blocks"], grad.contiguous(), winner, out),
        (images, image_numbers, out_channels, pixels, part, taps, scales),
        (pairs, input_precision()), blocks,
    )  # fmt: skip
    return out.sum(0)
