"""How the answers of all channels become one, and which size it is of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Join = Literal["mean", "max", "logsumexp"]
JOINS: tuple[Join, ...] = get_args(Join)


def join(z: Tensor, kind: str, kept: Tensor | None = None) -> Tensor:
    """Join answers over the channels, or over those that are `kept`: `(S, B, classes, ...)` -> `(B, classes, ...)`."""
    if kind == "mean":
        return z.mean(0) if kept is None else z.masked_fill(~kept, 0).sum(0) / kept.sum(0)
    z = z if kept is None else z.masked_fill(~kept, -math.inf)
    if kind == "max":
        return z.amax(0)
    return z.logsumexp(0) - (math.log(z.shape[0]) if kept is None else kept.sum(0).to(z.dtype).log())


def find_size(z: Tensor, joined: Tensor, kind: str, kept: Tensor | None, scales: Sequence[float]) -> Tensor:
    """The size that answered for the class that won: `(S, B, classes, ...)` -> `(B, ...)`."""
    best = joined.argmax(1, keepdim=True)  # (B, 1, ...)
    score = z.gather(2, best.expand(len(scales), *best.shape))  # (S, B, 1, ...)
    if kept is not None:
        score = score.masked_fill(~kept, -math.inf)
    score = score.squeeze(2)
    if kind == "max":
        winner = score.argmax(0)
        shares = [(winner == i).to(z.dtype) for i in range(len(scales))]
    else:
        shares = list(score.softmax(0))
    # Plain numbers: a tensor of sizes could not be copied to the device while a CUDA graph is recorded.
    parts = [share * -math.log(scale) for share, scale in zip(shares, scales, strict=True)]
    return torch.stack(parts).sum(0).exp()
