"""What a network returns for the image of a channel: the part with the logits, and errors that name the channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

Output = str | int | Callable[[Any], Tensor]  # a key, an index, or a function of what the network returns
REFUSALS = (RuntimeError, ValueError, AssertionError)  # of an image, by a network


def check_output(output: Any) -> Output | None:
    """The argument `output` of `ScaleChannels`, or a TypeError that says what it must be."""
    if output is not None and not isinstance(output, (str, int)) and not callable(output):
        raise TypeError(f"`output` must be a key, an index or a function (got {output!r}).")
    return output  # type: ignore[no-any-return]


def read(answer: Any, output: Output | None, image: Tensor) -> Tensor:
    """The logits or maps in what a network returned for an image."""
    found = answer
    if isinstance(output, (str, int)):
        try:
            found = answer[output]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"`output` (got {output!r}) is not in what `net` returns: {_show(answer)}.") from error
    elif output is not None:
        found = output(answer)
    if not isinstance(found, Tensor):
        remedy = ": choose the part with the logits by `output`" if output is None else f" for `output` {output!r}"
        raise TypeError(f"`net` must return a tensor of logits or maps (got {_show(found)}){remedy}.")
    if found.ndim not in (2, 4) or found.shape[0] != image.shape[0]:
        raise ValueError(
            f"`net` must return logits (B, classes) or maps (B, classes, h, w) (got shape {tuple(found.shape)} from "
            f"images of shape {tuple(image.shape)}): without an axis of classes there is nothing to join."
        )
    return found


def _show(answer: Any) -> str:
    kind = type(answer).__name__
    if isinstance(answer, dict):
        return f"{kind} with the keys " + ", ".join(map(repr, list(answer)[:8]))
    return f"{kind} of {len(answer)}" if isinstance(answer, (list, tuple)) else kind


@torch.no_grad()
def find_refused(net: nn.Module, images: Sequence[Tensor], error: Exception) -> int | None:
    """The image because of which a network failed with all of them, if there is one."""
    if isinstance(error, torch.OutOfMemoryError):
        return len(images) - 1  # all take part in it, the largest most
    for i, image in enumerate(images):
        try:
            net(image)
        except REFUSALS as alone:
            if str(alone) == str(error):  # batch normalisation may also refuse an image only because it is alone
                return i
    return None


def refuse(error: Exception, image: Tensor, scale: float, scales: Sequence[float]) -> NoReturn:
    """Say in which channel the network failed, with an error of the same kind."""
    why = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        why += f" Leave out the largest of {len(scales)} channels, {scales[-1]:.4g}, or take smaller batches."
    kind = next(kind for kind in (torch.OutOfMemoryError, *REFUSALS) if isinstance(error, kind))
    shown = f"shows `net` images of {image.shape[-2]} x {image.shape[-1]} pixels, which failed"
    raise kind(f"the channel of scale {scale:.4g} {shown}: {why}") from error
