"""The maximum over scales: which scale wins.

All backends have one rule. The largest response wins; on a tie the lowest scale wins and takes the gradient. Where
windows see zeros only, responses are exactly zero, so that rounding decides nothing there. What is not finite always
shows. `_keep_larger` of :mod:`kernels` is the same in Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer.fast.memory import holds_numbers
from scalesteer.fast.transforms import filter_transform, plan_for, restore, transform, turn
from scalesteer.geometry import Axes, Maximum


def running_maximum(responses: Iterator[Tensor], count: int, return_scales: bool = False) -> Maximum:
    """The maximum over scales by operations that autograd follows, and which scale won (int64) if that is asked for.

    A non-finite response of the largest scale always wins: its window holds every pixel that a smaller window
    holds, so that a NaN or an infinity in the input shows, even where a filter makes it -inf.
    """
    best = next(responses)
    winner = torch.zeros_like(best, dtype=torch.int64) if return_scales else None
    for i, response in enumerate(responses, start=1):
        wins = response > best
        if i == count - 1:
            wins = wins | ~torch.isfinite(response)
        best = torch.where(wins, response, best)
        if winner is not None:
            winner = torch.where(wins, i, winner)
    return best, winner


def keep_largest(best: Tensor, winner: Tensor | None, responses: Iterable[Tensor]) -> None:
    """Let the responses of scales 1, 2, ... take part in a maximum that begins with scale 0, in place.

    `winner` holds bytes, zeros at first. Where the last response is not finite, the maximum becomes NaN. The memory of
    responses is used for that.
    """
    response = None
    for i, response in enumerate(responses, start=1):
        if winner is not None:  # a later winner has the larger index: the maximum of indices
            torch.maximum(winner, torch.gt(response, best).view(torch.uint8).mul_(i), out=winner)
        torch.maximum(best, response, out=best)
    if response is not None:
        best += response.sub_(response)


def blank_scales(bright: Tensor, supports: Tensor, axes: Axes, symmetric: bool) -> Tensor:
    """How many scales, from the first on, see zeros only: `(B, groups, H, W)`, `(S, n, n)` -> `(B, groups, H', W')`.

    The responses of such scales are exactly zero. Between frequencies they are zero up to rounding, and rounding would
    choose the winner and the way of the gradient.
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
