"""One network that looks at an image at several sizes: channels of scale, with shared weights and one joined answer."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NoReturn, Self, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import _checks
from scalesteer.fast import being_exported
from scalesteer.joint import at_sizes, is_sequential
from scalesteer.nn import evaluation_mode, twin
from scalesteer.places import Grid, check_grid, on_one_grid
from scalesteer.resize import resize

JOINS = ("mean", "max", "logsumexp")
BORDERS = {"zeros": "constant", "replicate": "replicate", "reflect": "reflect"}  # as `F.pad` calls them
PARTS = 2**6 * 3**2 * 5**6 * 7  # of a scale, to compute sizes: decimals and simple fractions are whole numbers of them


class ScaleChannels(nn.Module):
    r"""A network applied to an image at several sizes; its answers are joined into one.

    Channel c resizes the image by the factor :math:`s_c`, and the same network, with the same weights, answers with
    logits :math:`z_{ck}`, one for each class k. The joined logits are, for C channels,

    .. math::
        \frac1C \sum_c z_{ck} \;\text{("mean")}, \qquad \max_c z_{ck} \;\text{("max")}, \qquad
        \log \frac1C \sum_c e^{z_{ck}} \;\text{("logsumexp")},

    and go into `F.cross_entropy` like those of the network alone. ``"logsumexp"`` is the probability of the class when
    the size is not known: softmax over all pairs of class and channel, summed over channels. A channel in which the
    object has the wrong size can say so with low logits, and then has no part in the answer.

    A network that returns maps gives a joined map: all channels are read at the places of the reference grid, which is
    that of the image at its own size, and joined at each place. A place covers several pixels of a finer map; they are
    joined in the same way. Where the window of a network without padding reaches beyond the image in a channel, that
    channel has no part in the answer; the largest one answers everywhere.

    Note:
        Resizing is anti-aliased and exact along both axes: an image of H pixels becomes one of H s, rounded (halves
        up), by Keys' cubic function (a = -1/2), stretched where the image shrinks. Nothing is cut, and nothing padded
        but by `border`.

    Note:
        Batch normalisation must see all channels together: evaluation normalises them alike, with one set of running
        statistics, so that a channel that training had normalised by statistics of its own would meet other numbers
        there. In training the channels therefore pass through the network side by side, layer by layer
        (:func:`at_sizes`), where the network is an `nn.Sequential` or one of :func:`scalesteer.create_model`, and a
        step moves the running statistics once. Any other network runs once for each channel; let it normalise without
        the batch (`nn.GroupNorm`), or give it a method `at_sizes`.

    Note:
        Time and memory are :attr:`cost` times those of the network alone; a border adds to it (:meth:`pixels`).

    Args:
        net: Any module that maps images `(B, C, H, W)` to logits `(B, classes)` or to maps `(B, classes, h, w)`, and
            that takes images of every size. Logits are joined as they are: a network for maps with a class "nothing
            here" keeps the logit of that class at zero, so that the others mean the same in every channel.
        scales: How much larger than the image the channels see it, positive and ascending. A scale above 1 enlarges the
            image, and so answers for objects that are smaller than those that `net` was made for. Which to take:
            :func:`scalesteer.app.suggest.choose_channels`, docs/guide/which-scales.md.
        join: ``"mean"``, ``"max"`` or ``"logsumexp"``.
        drop: Share of channels that is left out at random in training, from 0 to below 1; at least one stays. Each
            image has its own draw, made on the device, so that a recorded CUDA graph draws anew. All channels are
            computed: it makes the network rely on no single channel, and saves no time.
        grid: Where the pixels of a map lie: (stride, offset) for a net whose output pixel i looks at input pixel
            ``offset + i * stride``. None finds it from the sizes of image and map in all channels, which needs padding
            that is equal on both sides; one channel alone needs a look at the image itself for it. Export of maps with
            dynamic height and width needs `grid`.
        border: Pixels that the image gets on all four sides where a channel has made it smaller; maps are cut to the
            image again. There an object of the usual size comes near the image's edge, where a network that pads its
            features with zeros sees what training never showed. A border as wide as half the network's window gives it
            surroundings as in larger images. For maps, a multiple of their stride keeps them on their places.
        border_mode: What the border shows: ``"zeros"``, for pictures on a black ground; the image continued by its
            outermost pixels (``"replicate"``) or mirrored (``"reflect"``), for photographs.

    Shape:
        `(B, C, H, W)` -> `(B, classes)`, or `(B, classes, h, w)` with h and w of the net on the image itself.

    Raises:
        ValueError: If an argument is out of its range; if an image becomes smaller than a pixel; if the net refuses the
            image of a channel; if its output has no class axis.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 10, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> model = ScaleChannels(net, (0.5, 1.0, 2.0))
        >>> logits, sizes = model(torch.rand(4, 1, 28, 28), return_scales=True)
        >>> logits.shape, sizes.shape, model.cost
        (torch.Size([4, 10]), torch.Size([4]), 5.25)
        >>> model.with_scales((0.25, 0.5, 1.0, 2.0)).net is net
        True
    """

    def __init__(
        self,
        net: nn.Module,
        scales: Sequence[float],
        join: str = "logsumexp",
        *,
        drop: float = 0.0,
        grid: Grid | None = None,
        border: int = 0,
        border_mode: str = "zeros",
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"`net` must be an nn.Module (got {type(net).__name__}).")
        self.net = net
        self.scales = _checks.ascending("scales", scales)
        self.join = _checks.choice("join", join, JOINS)
        self.drop = _checks.real("drop", drop)
        if not 0 <= self.drop < 1:
            raise ValueError(f"`drop` must be from 0 to below 1 (got {self.drop}).")
        self.grid = None if grid is None else check_grid(grid)
        self.border = _checks.integer("border", border, minimum=0)
        self.border_mode = _checks.choice("border_mode", border_mode, tuple(BORDERS))

    @property
    def cost(self) -> float:
        """Time and memory relative to the network on the image alone: the sum of the areas of all channels.

        This is without a border, whose share depends on the size of the image: see :meth:`pixels`.
        """
        return sum(scale**2 for scale in self.scales)

    def pixels(self, height: int, width: int) -> float:
        """How many pixels of an image the network sees, in all channels together and with their borders."""
        pairs = zip(self.scales, self._borders, strict=True)
        return sum((height * scale + 2 * border) * (width * scale + 2 * border) for scale, border in pairs)

    @property
    def _borders(self) -> list[int]:
        """The border of each channel."""
        return [self.border if scale < 1 else 0 for scale in self.scales]

    @property
    def task(self) -> Any:
        """What a network of `create_model` is for."""
        return self.net.task

    @task.setter
    def task(self, task: Any) -> None:
        self.net.task = task

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `create_model` that make the same network again, at these sizes."""
        own: dict[str, Any] = {"channels": list(self.scales), "join": self.join, "drop": self.drop}
        own |= {"border": self.border, "border_mode": self.border_mode} if self.border else {}
        return {**self.net.arguments, **own}  # type: ignore[dict-item]

    def with_scales(self, scales: Sequence[float]) -> Self:
        """The same network at other sizes: it is shared with this module, not copied; all else is kept."""
        return twin(self, scales=_checks.ascending("scales", scales))

    @overload
    def forward(self, x: Tensor, return_scales: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, return_scales: Literal[True]) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, return_scales: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Joined logits.

        Args:
            x: Images `(B, C, H, W)`.
            return_scales: Also return the size that answered, `(B,)` or `(B, h, w)`: the size of the object relative to
                those that the network was made for, 1 / scale of the channel that answered. 2 is an object twice as
                large, which the channel of scale 0.5 shows at the usual size. Between channels it is continuous: the
                geometric mean of the channels' sizes, weighted by their softmax for the class that won; with
                ``join="max"``, the size of the channel that won.
        """
        _checks.batch(x)
        image = _image_size(x)
        canvases = [canvas_size(image, scale) for scale in self.scales]
        images = [x if scale == 1 else resize(x, canvas) for scale, canvas in zip(self.scales, canvases, strict=True)]
        answers = self._answers(list(map(self._extend, images, self._borders)))
        work = torch.promote_types(answers[0].dtype, torch.float32)
        kept = None
        if answers[0].ndim == 4:
            reference = self._reference_map(x) if self.grid is None and len(self.scales) == 1 else None
            join = partial(_join, join=self.join)
            answers, kept = on_one_grid(
                answers, canvases, image, self.scales, self.grid, join, reference, self._borders
            )
        z = torch.stack(answers).to(work)  # (S, B, classes, ...)
        if self.training and self.net.training and self.drop:  # the network may be shared, and is in one mode
            drawn = torch.rand(z.shape[:2], device=z.device)
            stays = (drawn >= self.drop) | (drawn == drawn.amax(0))
            stays = stays.view(*z.shape[:2], *(1,) * (z.ndim - 2))
            # Where all channels that stay do not see a place, the one that sees it answers after all.
            kept = stays if kept is None else (kept & stays) | (kept & ~(kept & stays).any(0))
        joined = _join(z, self.join, kept)
        if not return_scales:
            return joined.to(answers[0].dtype)
        return joined.to(answers[0].dtype), self._sizes(z, joined, kept)

    def _extend(self, image: Tensor, border: int) -> Tensor:
        """The image of a channel with its border."""
        if not border:
            return image
        if self.border_mode == "reflect" and min(image.shape[-2:]) <= border:
            shown = f"{image.shape[-2]} x {image.shape[-1]}"
            raise ValueError(
                f"`border` (got {border}) must be smaller than the images of all channels (one is {shown}) to "
                'mirror them: take a smaller one, leave out the smallest `scales`, or border_mode="replicate".'
            )
        return F.pad(image, (border,) * 4, mode=BORDERS[self.border_mode])

    def _reference_map(self, x: Tensor) -> tuple[int, int] | None:
        """Height and width of the network's map of the image itself, without which one other map has no known grid."""
        if self.scales[0] == 1:
            return None
        if torch.compiler.is_compiling():
            raise ValueError(
                f"maps of one channel, of scale {self.scales[0]:.4g}, need `grid` to be compiled or exported."
            )
        with torch.no_grad(), evaluation_mode(self.net):
            height, width = self.net(x[:1]).shape[-2:]
        return height, width

    def _answers(self, images: list[Tensor]) -> list[Tensor]:
        """What the network says of the image in each channel."""
        together = self.net.training and len(images) > 1 and (hasattr(self.net, "at_sizes") or is_sequential(self.net))
        answers: list[Any] = []
        try:
            if together:
                answers = at_sizes(self.net, images)
            else:
                for image in images:
                    answers.append(self.net(image))
        except (RuntimeError, ValueError) as error:  # which holds torch.OutOfMemoryError
            channel = self._refusing(images, error) if together else len(answers)
            if channel is None:
                raise
            self._refuse(error, channel, images[channel])
        for image, answer in zip(images, answers, strict=True):
            if not isinstance(answer, Tensor):
                raise TypeError(f"`net` must return a tensor of logits or maps (got {type(answer).__name__}).")
            if answer.ndim not in (2, 4) or answer.shape[0] != image.shape[0]:
                raise ValueError(
                    f"`net` must return logits (B, classes) or maps (B, classes, h, w) (got shape "
                    f"{tuple(answer.shape)} from images of shape {tuple(image.shape)}): without an axis of classes "
                    "there is nothing to join."
                )
        return answers

    @torch.no_grad()
    def _refusing(self, images: list[Tensor], error: Exception) -> int | None:
        """The channel because of which the network failed with all of them, if there is one."""
        if isinstance(error, torch.OutOfMemoryError):
            return len(images) - 1  # all take part in it, the largest most
        for channel, image in enumerate(images):
            try:
                self.net(image)
            except (RuntimeError, ValueError) as alone:
                if str(alone) == str(error):  # batch normalisation may also refuse a channel only because it is alone
                    return channel
        return None

    def _refuse(self, error: Exception, channel: int, image: Tensor) -> NoReturn:
        """Say in which channel the network failed, with an error of the same kind."""
        why = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            largest = f"the largest of {len(self.scales)} channels, {self.scales[-1]:.4g}"
            why += f" Leave out {largest}, or take smaller batches."
        kind = next(kind for kind in (torch.OutOfMemoryError, ValueError, RuntimeError) if isinstance(error, kind))
        shown = f"shows `net` images of {image.shape[-2]} x {image.shape[-1]} pixels, which failed"
        raise kind(f"the channel of scale {self.scales[channel]:.4g} {shown}: {why}") from error

    def _sizes(self, z: Tensor, joined: Tensor, kept: Tensor | None) -> Tensor:
        """The size that answered for the class that won: `(S, B, classes, ...)` -> `(B, ...)`."""
        best = joined.argmax(1, keepdim=True)  # (B, 1, ...)
        score = z.gather(2, best.expand(len(self.scales), *best.shape))  # (S, B, 1, ...)
        if kept is not None:
            score = score.masked_fill(~kept, -math.inf)
        score = score.squeeze(2)
        if self.join == "max":
            winner = score.argmax(0)
            shares = [(winner == i).to(z.dtype) for i in range(len(self.scales))]
        else:
            shares = list(score.softmax(0))
        # Plain numbers: a tensor of sizes could not be copied to the device while a CUDA graph is recorded.
        parts = [share * -math.log(scale) for share, scale in zip(shares, self.scales, strict=True)]
        return torch.stack(parts).sum(0).exp()

    def extra_repr(self) -> str:
        """Arguments that differ from the defaults."""
        parts = ["scales=(" + ", ".join(f"{s:.4g}" for s in self.scales) + ")", f"join={self.join!r}"]
        parts += [f"drop={self.drop:.4g}"] if self.drop else []
        parts += [f"border={self.border}, border_mode={self.border_mode!r}"] if self.border else []
        return ", ".join(parts + ([f"grid={self.grid}"] if self.grid else []))


def _join(z: Tensor, join: str, kept: Tensor | None = None) -> Tensor:
    """Join answers over the channels, or over those that are `kept`: `(S, B, classes, ...)` -> `(B, classes, ...)`."""
    if join == "mean":
        return z.mean(0) if kept is None else z.masked_fill(~kept, 0).sum(0) / kept.sum(0)
    z = z if kept is None else z.masked_fill(~kept, -math.inf)
    if join == "max":
        return z.amax(0)
    return z.logsumexp(0) - (math.log(z.shape[0]) if kept is None else kept.sum(0).to(z.dtype).log())


def _image_size(x: Tensor) -> tuple[int, int]:
    """Height and width, as plain numbers for `torch.compile`: its code generator cannot order rounded dynamic sizes."""
    if torch.compiler.is_compiling() and not being_exported():
        return operator.index(x.shape[-2]), operator.index(x.shape[-1])
    return x.shape[-2], x.shape[-1]


def canvas_size(image: tuple[int, int], scale: float) -> tuple[int, int]:
    """Height and width of an image in a channel."""
    if scale == 1:
        return image  # a compiler's sizes do not say by themselves that rounding changes nothing
    # Integers alone: an exported program has the same sizes everywhere, also where it computes with single precision.
    factor = round(scale * PARTS)
    height, width = ((2 * length * factor + PARTS) // (2 * PARTS) for length in image)
    if height < 1 or width < 1:
        raise ValueError(
            f"the channel of scale {scale:.4g} would show images of {image[0]} x {image[1]} as {height} x {width}"
            " pixels: leave out the smallest `scales` or give larger images."
        )
    return height, width
