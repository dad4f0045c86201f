"""One network that looks at an image at several sizes: channels of scale, with shared weights and one joined answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from torch import Tensor, nn

from scalesteer import _checks
from scalesteer.answers import REFUSALS, Output, check_output, find_refused, read, refuse
from scalesteer.fast import has_fixed_shapes
from scalesteer.joining import JOINS, Calibration, Join, check_calibration, find_size, join
from scalesteer.joint import at_sizes, find_batch_layer
from scalesteer.nn import evaluation_mode, twin
from scalesteer.places import Grid, check_grid, on_one_grid
from scalesteer.resize import BORDERS, canvas_size, extend, image_size, resize

BorderMode = Literal["zeros", "replicate", "reflect"]


class ScaleChannels(nn.Module):
    r"""A network applied to an image at several sizes; its answers are joined into one.

    Channel c resizes the image by the factor :math:`s_c`, and the same network, with the same weights, answers with
    logits :math:`z_{ck}`, one for each class k. The joined logits are, for C channels,

    .. math::
        \frac1C \sum_c z_{ck} \;\text{("mean")}, \qquad \max_c z_{ck} \;\text{("max")}, \qquad
        \log \frac1C \sum_c e^{z_{ck}} \;\text{("logsumexp")},

    and go into `F.cross_entropy` like those of the network alone. ``"softmax"`` is the logarithm of the mean of the
    channels' probabilities, as in test-time averaging; ``"confident"`` takes all logits from the one channel that is
    most certain of its class. ``"logsumexp"`` is the probability of the class when
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
        Batch normalisation sees all channels together: evaluation normalises them alike, with one set of running
        statistics, so that a channel that training had normalised by statistics of its own would meet other numbers
        there. In training the channels therefore pass through the network side by side (`scalesteer.joint.at_sizes`),
        and a step moves the running statistics once. That needs nothing of the network but that `torch.fx` can trace
        what surrounds its batch normalisation. Otherwise a warning names the layer and says what to do.

    Note:
        Time and memory are :attr:`cost` times those of the network alone; a border adds to it (:meth:`pixels`).

    Args:
        net: Any module that maps images `(B, C, H, W)` to logits `(B, classes)` or to maps `(B, classes, h, w)`, and
            that takes images of every size, or of every multiple of a number (`multiple`). Logits are joined as they
            are: a network for maps with a class "nothing here" keeps the logit of that class at zero, so that the
            others mean the same in every channel.
        scales: How much larger than the image the channels see it, positive and ascending. A scale above 1 enlarges the
            image, and so answers for objects that are smaller than those that `net` was made for. Which to take:
            :func:`scalesteer.app.suggest.choose_channels`, docs/guide/which-scales.md.
        join: ``"mean"``, ``"max"``, ``"logsumexp"``, ``"softmax"`` or ``"confident"``.
        drop: Share of channels that is left out at random in training, from 0 to below 1; at least one stays. Each
            image has its own draw. What is left out is not computed, and the network relies on no single channel. (A
            CUDA graph and a compiled program compute all channels: their shapes cannot change. They draw anew, too.)
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
        multiple: The images of all channels have a height and width that are multiples of this number, the nearest to
            those that the scale asks for: 32 for most networks that halve their maps five times. Sizes that are found
            are then those of the channels as they are.
        calibration: A temperature and a bias for each channel, as :func:`scalesteer.fit_join` finds them; None for the
            plain join. It is an attribute, too: ``model.calibration = None`` goes back to that.
        sure: A probability above 0 and up to 1. In evaluation the channels are then computed one after the other, the
            cheapest first, and an image is done when the joined probability of its class is at least `sure`; channels
            that it did not need have no part in its answer. 1 and None: all channels. It may be changed at any time;
            :func:`scalesteer.fitting.measure_sure` says what each value costs. For logits only. Programs that are
            traced, compiled, exported or recorded compute all channels.
        output: Which part of what `net` returns holds the logits or maps: the key of a dict, the index of a tuple or
            list, or a function that is given the whole. None if `net` returns them alone.

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
        join: Join = "logsumexp",
        *,
        drop: float = 0.0,
        grid: Grid | None = None,
        border: int = 0,
        border_mode: BorderMode = "zeros",
        multiple: int = 1,
        output: Output | None = None,
        calibration: Calibration | None = None,
        sure: float | None = None,
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
        self.multiple = _checks.integer("multiple", multiple, minimum=1)
        if 2 * self.border % self.multiple:
            raise ValueError(
                f"twice the `border` (got {self.border}) must be a multiple of `multiple` ({self.multiple})."
            )
        self.output = check_output(output)
        self.calibration = check_calibration(calibration, self.scales)
        self.sure = None if sure is None else _checks.real("sure", sure)
        if self.sure is not None and not 0 < self.sure <= 1:
            raise ValueError(f"`sure` must be above 0 and at most 1 (got {self.sure}).")

    @property
    def cost(self) -> float:
        """Time and memory relative to the network on the image alone, without borders: the sum of all areas."""
        return sum(scale**2 for scale in self.scales)

    def pixels(self, height: int, width: int) -> float:
        """How many pixels of an image the network sees, in all channels together and with their borders."""
        image, total = (height, width), 0.0
        for scale, border in zip(self.scales, self._borders, strict=True):
            rows, columns = (height * scale, width * scale) if self.multiple == 1 else self._canvas(image, scale)
            total += (rows + 2 * border) * (columns + 2 * border)
        return total

    @property
    def _borders(self) -> list[int]:
        """The border of each channel."""
        return [self.border if scale < 1 else 0 for scale in self.scales]

    def with_scales(self, scales: Sequence[float]) -> Self:
        """The same network at other sizes: it is shared with this module, not copied; all else is kept.

        A calibration is interpolated between its channels. It is left out if the new scales reach beyond the old ones,
        of which it knows nothing.
        """
        scales = _checks.ascending("scales", scales)
        calibration = None if self.calibration is None else self.calibration.at(self.scales, scales)
        return twin(self, scales=scales, calibration=calibration)

    @torch.no_grad()
    def ask_channels(self, x: Tensor) -> Tensor:
        """What each channel says by itself, before it is calibrated and joined: `(B, C, H, W)` -> `(S, B, classes)`."""
        _checks.batch(x)
        with evaluation_mode(self):
            answers = self._answers(x, [self._canvas(image_size(x), scale) for scale in self.scales], None)
        if answers[0].ndim != 2:
            raise ValueError(f"`net` must return logits (B, classes) (got maps, of shape {tuple(answers[0].shape)}).")
        return torch.stack(answers)

    def join_first(self, z: Tensor) -> Tensor:
        """The joined logits of the first channels alone, by what each says: `(c, B, classes)` -> `(B, classes)`."""
        calibration = None if self.calibration is None else self.calibration.first(len(z))
        return join(z.to(torch.promote_types(z.dtype, torch.float32)), self.join, None, calibration)

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
                geometric mean of the channels' sizes, weighted by their softmax for the class that won; with the
                joins ``"max"`` and ``"confident"``, the size of the channel that won. A calibration corrects it.
        """
        _checks.batch(x)
        image = image_size(x)
        canvases = [self._canvas(image, scale) for scale in self.scales]
        stays = self._draw(x)
        if self.sure is not None and self.sure < 1 and not self.net.training and not has_fixed_shapes(x):
            answers, stays = self._answers_until_sure(x, canvases, self.sure)
        else:
            answers = self._answers(x, canvases, stays)
        stays = kept = None if stays is None else stays.to(x.device)
        work = torch.promote_types(answers[0].dtype, torch.float32)
        if answers[0].ndim == 4:
            reference = self._reference_map(x) if self.grid is None and len(self.scales) == 1 else None
            readings = partial(join, kind=self.join)
            answers, kept = on_one_grid(
                answers, canvases, image, self.scales, self.grid, readings, reference, self._borders
            )
            if stays is not None:  # where no channel that stays sees a place, all that stay are read at their border
                stays = stays[:, :, None, None, None]
                kept = (kept & stays) | (stays & ~(kept & stays).any(0))
        elif stays is not None:
            kept = stays[:, :, None]
        z = torch.stack(answers).to(work)  # (S, B, classes, ...)
        joined = join(z, self.join, kept, self.calibration)
        if not return_scales:
            return joined.to(answers[0].dtype)
        scales = self.scales
        if self.multiple > 1:  # as the channels are, on average along both axes
            scales = tuple(math.sqrt(rows / image[0] * (columns / image[1])) for rows, columns in canvases)
        return joined.to(answers[0].dtype), find_size(z, joined, self.join, kept, scales, self.calibration)

    if TYPE_CHECKING:  # so that a call has the types of `forward`

        @overload
        def __call__(self, x: Tensor, return_scales: Literal[False] = False) -> Tensor: ...

        @overload
        def __call__(self, x: Tensor, return_scales: Literal[True]) -> tuple[Tensor, Tensor]: ...

        def __call__(self, x: Tensor, return_scales: bool = False) -> Tensor | tuple[Tensor, Tensor]: ...

    def _canvas(self, image: tuple[int, int], scale: float) -> tuple[int, int]:
        return canvas_size(image, scale, self.multiple)

    def _draw(self, x: Tensor) -> Tensor | None:
        """Which images each channel is shown to, `(S, B)`; None if all are. Drawn without waiting for a GPU."""
        if not (self.training and self.net.training and self.drop):  # the network may be shared, and is in one mode
            return None
        drawn = torch.rand(len(self.scales), len(x), device=x.device if has_fixed_shapes(x) else None)
        return (drawn >= self.drop) | (drawn == drawn.amax(0))

    def _image(self, x: Tensor, canvas: tuple[int, int], channel: int) -> Tensor:
        """What a channel shows."""
        as_it_is = self.scales[channel] == self.multiple == 1
        return extend(x if as_it_is else resize(x, canvas), self._borders[channel], self.border_mode)

    def _reference_map(self, x: Tensor) -> tuple[int, int] | None:
        """Height and width of the network's map of the image itself, without which one other map has no known grid."""
        if self.scales[0] == self.multiple == 1:
            return None
        if torch.compiler.is_compiling():
            raise ValueError(
                f"maps of one channel, of scale {self.scales[0]:.4g}, need `grid` to be compiled or exported."
            )
        height, width = self._find_shape(x)[1:]
        return height, width

    def _find_shape(self, x: Tensor) -> torch.Size:
        """The shape of what the network says of one image, without the axis of images."""
        with torch.no_grad(), evaluation_mode(self.net):
            return read(self.net(x[:1]), self.output, x[:1]).shape[1:]

    def _answers(self, x: Tensor, canvases: list[tuple[int, int]], stays: Tensor | None) -> list[Tensor]:
        """What the network says of the image in each channel; zeros where a channel is not shown an image."""
        if (stays is None or has_fixed_shapes(x)) and find_batch_layer(self.net) is None:  # one after the other
            shown = enumerate(canvases)
            return [self._run([self._image(x, canvas, i)], [i])[0] for i, canvas in shown]
        if stays is None or has_fixed_shapes(x):
            images = [self._image(x, canvas, channel) for channel, canvas in enumerate(canvases)]
            return self._run(images, range(len(images)))
        rows = [mask.nonzero().flatten().to(x.device) for mask in stays]  # of the batch, for each channel
        used = [channel for channel, chosen in enumerate(rows) if len(chosen)]
        images = [self._image(x[rows[channel]], canvases[channel], channel) for channel in used]
        answers, parts = [], dict(zip(used, self._run(images, used), strict=True))
        first = parts[used[0]]
        for channel, chosen in enumerate(rows):
            if channel not in parts and first.ndim == 4:  # maps of an own size
                shape = self._find_shape(self._image(x[:1], canvases[channel], channel))
            else:
                shape = parts.get(channel, first).shape[1:]
            answer = first.new_zeros(len(x), *shape)
            answers.append(answer.index_copy(0, chosen, parts[channel]) if channel in parts else answer)
        return answers

    def _answers_until_sure(
        self, x: Tensor, canvases: list[tuple[int, int]], sure: float
    ) -> tuple[list[Tensor], Tensor]:
        """The same from the cheapest channel on, until each image has a class that is sure; and what was computed."""
        open_rows, answers = torch.arange(len(x), device=x.device), list[Tensor]()
        kept = torch.zeros(len(canvases), len(x), dtype=torch.bool, device=x.device)
        for channel, canvas in enumerate(canvases):
            if not len(open_rows):
                answers.append(torch.zeros_like(answers[0]))
                continue
            (answer,) = self._run([self._image(x[open_rows], canvas, channel)], [channel])
            if answer.ndim != 2:
                raise ValueError(
                    f"`sure` (got {sure}) is for networks that return logits (B, classes), not maps: leave it out."
                )
            answers.append(answer.new_zeros(len(x), *answer.shape[1:]).index_copy(0, open_rows, answer))
            kept[channel, open_rows] = True
            chances = self.join_first(torch.stack([part[open_rows] for part in answers])).softmax(1)
            open_rows = open_rows[chances.amax(1) < sure]
        return answers, kept

    def _run(self, images: list[Tensor], channels: Sequence[int]) -> list[Tensor]:
        """Logits or maps of the images of these channels."""
        together = len(images) > 1 and find_batch_layer(self.net) is not None
        answers: list[Any] = []
        try:
            if together:
                answers = at_sizes(self.net, images)
            else:
                for image in images:
                    answers.append(self.net(image))
        except REFUSALS as error:
            place = find_refused(self.net, images, error) if together else len(answers)
            if place is None:
                raise
            refuse(error, images[place], self.scales[channels[place]], self.scales)
        return [read(answer, self.output, image) for answer, image in zip(answers, images, strict=True)]

    def extra_repr(self) -> str:
        """Arguments that differ from the defaults."""
        parts = ["scales=(" + ", ".join(f"{s:.4g}" for s in self.scales) + ")", f"join={self.join!r}"]
        parts += [f"drop={self.drop:.4g}"] if self.drop else []
        parts += [f"border={self.border}, border_mode={self.border_mode!r}"] if self.border else []
        parts += [f"multiple={self.multiple}"] if self.multiple > 1 else []
        parts += [f"output={self.output!r}"] if self.output is not None else []
        parts += [f"calibration={self.calibration}"] if self.calibration is not None else []
        parts += [f"sure={self.sure:.4g}"] if self.sure is not None else []
        return ", ".join(parts + ([f"grid={self.grid}"] if self.grid else []))
