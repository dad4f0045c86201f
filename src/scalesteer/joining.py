"""How the answers of all channels become one, and which size it is of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from scalesteer import _checks

Join = Literal["mean", "max", "logsumexp", "softmax", "confident"]
JOINS: tuple[Join, ...] = get_args(Join)


@dataclass(frozen=True)
class Calibration:
    """What :func:`scalesteer.fit_join` found: two numbers for each channel, and two for all sizes.

    Attributes:
        temperatures: The logits of a channel are divided by its temperature before they are joined.
        biases: They are then added to all logits of a channel: how much it weighs beside the others. ``"mean"`` and
            ``"confident"`` do not depend on them.
        size: (a, b) with b above 0: a size s that the channels estimate is corrected to exp(a) s^b.
    """

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]
    size: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        own = vars(self)
        for name in ("temperatures", "biases", "size"):
            own[name] = _checks.reals(name, own[name])
        if min(self.temperatures) <= 0:
            raise ValueError(f"`temperatures` must be positive (got {self.temperatures}).")
        if len(self.biases) != len(self.temperatures):
            counts = f"{len(self.biases)} for {len(self.temperatures)} `temperatures`"
            raise ValueError(f"`biases` must be as many as the channels (got {counts}).")
        if len(self.size) != 2 or self.size[1] <= 0:
            raise ValueError(f"`size` must be two numbers, the second positive (got {self.size}).")

    def at(self, scales: Sequence[float], others: Sequence[float]) -> Calibration | None:
        """The same for channels of other scales, between these by the logarithm; None if some lie beyond them."""
        if others[0] < 0.99 * scales[0] or others[-1] > 1.01 * scales[-1]:
            return None
        new, old = np.log(others), np.log(scales)
        temperatures, biases = (np.interp(new, old, column) for column in (self.temperatures, self.biases))
        return Calibration(tuple(temperatures.tolist()), tuple(biases.tolist()), self.size)

    def first(self, count: int) -> Calibration:
        """That of the first channels."""
        return Calibration(self.temperatures[:count], self.biases[:count], self.size)


def check_calibration(value: Any, scales: Sequence[float]) -> Calibration | None:
    """A calibration for these channels, also from a mapping of its fields; an error if it is none."""
    if isinstance(value, dict):
        value = Calibration(**value)
    if value is not None and not isinstance(value, Calibration):
        raise TypeError(f"`calibration` must be a Calibration or None (got {value!r}).")
    if value is not None and len(value.temperatures) != len(scales):
        raise ValueError(
            f"`calibration` must be for {len(scales)} channels, as many as `scales` (got {len(value.temperatures)})."
        )
    return value


def join(z: Tensor, kind: str, kept: Tensor | None = None, calibration: Calibration | None = None) -> Tensor:
    """Join answers over the channels, or over those that are `kept`: `(S, B, classes, ...)` -> `(B, classes, ...)`."""
    joined = merge(scores(z, kind, calibration), kind, kept)
    if kind not in ("logsumexp", "softmax"):
        return joined
    # The level of one channel: that of the mean of their exponentials, weighted by biases.
    weights = [1.0] * len(z) if calibration is None else list(map(math.exp, calibration.biases))
    if kept is None:
        return joined - math.log(math.fsum(weights))
    shares = [part * weight for part, weight in zip(kept.to(z.dtype), weights, strict=True)]
    return joined - torch.stack(shares).sum(0).log()


def scores(z: Tensor, kind: str, calibration: Any) -> Tensor:
    """What is joined: logits as they are or calibrated, for ``"softmax"`` as logarithms of probabilities.

    Of a calibration its `temperatures` and `biases` are read, which may also be tensors.
    """
    if calibration is not None:  # plain numbers, as in `find_size`
        z = torch.stack([part / by for part, by in zip(z.unbind(0), calibration.temperatures, strict=True)])
    z = z.log_softmax(2) if kind == "softmax" else z
    if calibration is not None:
        z = torch.stack([part + bias for part, bias in zip(z.unbind(0), calibration.biases, strict=True)])
    return z


def merge(z: Tensor, kind: str, kept: Tensor | None) -> Tensor:
    """Scores of all channels as those of one, without regard to their level."""
    if kind == "mean":
        return z.mean(0) if kept is None else z.masked_fill(~kept, 0).sum(0) / kept.sum(0)
    if kind == "confident":
        best = most_confident(z, kept)
        return z.gather(0, best.expand(1, *z.shape[1:])).squeeze(0)
    z = z if kept is None else z.masked_fill(~kept, -math.inf)
    return z.amax(0) if kind == "max" else z.logsumexp(0)


def most_confident(z: Tensor, kept: Tensor | None) -> Tensor:
    """The channel that is most certain of a class: `(S, B, classes, ...)` -> `(1, B, 1, ...)`."""
    certainty = z.log_softmax(2).amax(2, keepdim=True)
    certainty = certainty if kept is None else certainty.masked_fill(~kept, -math.inf)
    return certainty.argmax(0, keepdim=True)


def find_size(
    z: Tensor,
    joined: Tensor,
    kind: str,
    kept: Tensor | None,
    scales: Sequence[float],
    calibration: Calibration | None = None,
) -> Tensor:
    """The size that answered for the class that won: `(S, B, classes, ...)` -> `(B, ...)`."""
    z = scores(z, kind, calibration)
    if kind == "confident":
        winner = most_confident(z, kept).squeeze(2).squeeze(0)
    else:
        best = joined.argmax(1, keepdim=True)  # (B, 1, ...)
        score = z.gather(2, best.expand(len(scales), *best.shape))  # (S, B, 1, ...)
        score = score if kept is None else score.masked_fill(~kept, -math.inf)
        score = score.squeeze(2)
        winner = score.argmax(0)
    if kind in ("max", "confident"):
        shares = [(winner == i).to(z.dtype) for i in range(len(scales))]
    else:
        shares = list(score.softmax(0))
    # Plain numbers: a tensor of sizes could not be copied to the device while a CUDA graph is recorded.
    parts = [share * -math.log(scale) for share, scale in zip(shares, scales, strict=True)]
    size = torch.stack(parts).sum(0)
    if calibration is not None:
        size = calibration.size[0] + calibration.size[1] * size
    return size.exp()
