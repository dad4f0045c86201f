"""One trained filter, enlarged step by step, above its response to a digit that grows with it: an animated GIF.

At each scale s the filter is the real part of Eq. 3, so the coefficients of order k times s^(m-2) e^(-ik log s). It is
drawn, and applied, on a grid that is `FINER` times as fine as the network's pixels, where what is seen is the filter
itself and not the few pixels that carry it; each value is the mean over its small pixel, since S(0) = 1 at a single
point means nothing there.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from numpy.typing import NDArray
from scipy import signal
from torch import Tensor

from paper.curves import STYLES, frame
from paper.figures import Trained
from paper.guide import signed_root, steerable
from scalesteer import harmonics
from scalesteer._checks import integer
from scalesteer.datasets import ImageSet
from scalesteer.files import require, write_atomically
from scalesteer.harmonics import PAPER_SCALES
from scalesteer.models.network import Network
from scalesteer.nn import ScaleSteerableConv2d

Array = NDArray[np.float64]

FINER = 4
LARGEST = PAPER_SCALES[-1]
FRAMES = 28
WIDTH, HEIGHT, DPI = 800, 490, 100  # pixels
DIGIT = 5
RING = "#f0a000"
SIGNED = "RdBu_r"
STEP, REST = 70, 1200  # milliseconds that a picture is shown, and the first and the last one


class Moment(NamedTuple):
    """What is seen at one scale; all three on the fine grid."""

    scale: float
    filter: Array
    image: Array
    response: Array


def fine_filter(layer: ScaleSteerableConv2d, channel: int, scale: float) -> Array:
    """A filter of the first input channel, enlarged by `scale`, on the fine grid: `(n, n)`."""
    basis = replace(layer.basis, sampling="area")
    functions = harmonics.steered_basis(basis, layer.geometry.kernel_size, scale * FINER)
    return np.asarray(np.einsum("kji,kjixy->xy", layer.coefficients[channel, 0].detach().double().cpu(), functions))


def growing(image: Tensor, side: int, scale: float) -> Array:
    """An image `(H, W)`, smoothly enlarged to `side` pixels at the largest scale, and in proportion at others."""
    large = F.interpolate(image[None, None].double(), (side, side), mode="bicubic", antialias=True).clamp(0, 1)
    zoom = torch.tensor([[[LARGEST / scale, 0, 0], [0, LARGEST / scale, 0]]], dtype=torch.float64)
    places = F.affine_grid(zoom, [1, 1, side, side], align_corners=False)
    return np.asarray(F.grid_sample(large, places, align_corners=False)[0, 0])


def moments(model: Network, channel: int, image: Tensor, scales: Sequence[float]) -> list[Moment]:
    """A filter of the first layer at some scales, the image as large as it is for that scale, and the response.

    Args:
        model: A network whose first layer is scale-steerable.
        channel: Which filter.
        image: What it sees at the largest scale, `(H, W)` in [0, 1].
        scales: From 1 to `LARGEST`.
    """
    layer, side = steerable(model.first), FINER * model.prepare(image[None, None].float()).shape[-1]
    found = []
    for scale in scales:
        weight, shown = fine_filter(layer, channel, scale), growing(image, side, scale)
        # The sum over fine pixels is that over the network's: a filter has 1 / s^2 of the values at s times the size.
        found.append(Moment(scale, weight, shown, respond(shown, weight)))
    return found


def respond(image: Array, weight: Array) -> Array:
    """The response to an image, zero beyond its border, of the image's size."""
    return np.asarray(signal.correlate(image, weight, mode="same", method="fft"))


def strongest_channel(model: Network, image: Tensor) -> int:
    """The filter of the first layer with the largest response to an image `(H, W)` in [0, 1]."""
    with torch.no_grad():
        responses = model.first(model.prepare(image[None, None].float()))
    return int(responses[0].amax((1, 2)).argmax())


def largest_image(images: ImageSet, label: int) -> Tensor:
    """The image of a class with the largest object, `(H, W)` in [0, 1]."""
    own = (images.labels == label).nonzero()[:, 0]
    if not len(own):
        raise ValueError(f"`label` must be a class of the images (got {label}).")
    return images.images[own[images.sizes[own].argmax()]].double() / 255


def places(seen: Sequence[Moment]) -> list[tuple[int, int]]:
    """Row and column of one point of the digit at each scale: where the response at the largest scale is strongest."""
    last = seen[-1]
    centre = (np.array(last.image.shape) - 1) / 2
    peak = np.unravel_index(last.response.argmax(), last.response.shape) - centre
    return [tuple(np.rint(centre + peak * one.scale / last.scale).astype(int)) for one in seen]


def compared(seen: Sequence[Moment]) -> tuple[Array, Array]:
    """The response at one point of the digit, relative to the first scale: of the enlarged filter and of the first."""
    at = places(seen)
    enlarged = np.array([one.response[point] for one, point in zip(seen, at, strict=True)])
    kept = np.array([respond(one.image, seen[0].filter)[point] for one, point in zip(seen, at, strict=True)])
    return enlarged / enlarged[0], kept / enlarged[0]


class Stage:
    """The picture of which each moment is a state."""

    def __init__(self, seen: Sequence[Moment], radius: float) -> None:
        """Draw everything at the last moment.

        Args:
            seen: All moments, the last with the largest filter.
            radius: Of the unscaled filter, in pixels of the fine grid.
        """
        self.seen, self.radius, self.at = seen, radius, places(seen)
        self.figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
        self.canvas = FigureCanvasAgg(self.figure)
        self.title = self.figure.text(0.5, 0.955, "", ha="center", va="center", fontsize=14)
        self.figure.text(
            0.5,
            0.895,
            r"Its coefficients are multiplied by $s^{m-2}\,e^{-ik\log s}$ (Eq. 3). Nothing is interpolated.",
            ha="center",
            va="center",
            fontsize=11,
        )
        note = f"All three are drawn {FINER} times as fine as the network's pixels."
        self.figure.text(0.5, 0.02, note, ha="center", va="center", fontsize=10, color="#444444")
        side = 0.27 * WIDTH / HEIGHT
        axes = [self.figure.add_axes((0.045 + 0.32 * i, 0.35, 0.27, side)) for i in range(3)]
        last = seen[-1]
        reach = last.filter.shape[0] / 2 * 1.04
        limit = float(np.quantile(np.abs(signed_root(last.filter)), 0.995))  # the centre is far above the rest
        signed: dict[str, Any] = {"cmap": SIGNED, "interpolation": "bilinear"}
        self.weight = axes[0].imshow(last.filter, vmin=-limit, vmax=limit, **signed)
        axes[0].set(xlim=(-reach, reach), ylim=(reach, -reach))
        self.image = axes[1].imshow(last.image, cmap="gray", interpolation="bilinear", vmin=0, vmax=1)
        top = float(np.abs(last.response).max())
        self.response = axes[2].imshow(last.response, vmin=-top, vmax=top, **signed)
        for axis, name in zip(axes, ("the filter", "a growing digit", "the response"), strict=True):
            frame(axis)
            axis.set_title(name, fontsize=12)
        axes[0].set_facecolor(colormaps[SIGNED](0.5))
        self.rings = [axis.add_patch(Circle((0, 0), radius, fill=False, linewidth=2, color=RING)) for axis in axes]
        axis = self.figure.add_axes((0.085, 0.14, 0.875, 0.16))
        scales = [one.scale for one in seen]
        lines = zip(("filter enlarged with the digit", "filter kept as it is"), compared(seen), STYLES, strict=False)
        self.marks = []
        for (name, values, style), line in zip(lines, ("-", "--"), strict=True):
            axis.plot(scales, 100 * values, line, color=style.colour, linewidth=1.8, label=name)
            (mark,) = axis.plot([], [], style.marker, color=style.colour, markersize=8, clip_on=False)
            self.marks.append((mark, 100 * values))
        axis.set(xscale="log", xlim=(scales[0], scales[-1]), ylabel="%")
        both = np.concatenate([values for _, values in self.marks])
        axis.set_ylim(min(0, 1.25 * both.min()), 1.25 * both.max())
        ticks = [s for s in (1, 1.25, 1.5, 1.75, 2, 2.4) if scales[0] <= s <= scales[-1]]
        axis.set_xticks(ticks, [f"{s:g}" for s in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=10)
        axis.set_xlabel("s; response in the circle, in % of that at s = 1", fontsize=11, labelpad=2)
        axis.legend(fontsize=10, loc="lower left", framealpha=0.9)

    def show(self, index: int) -> Any:
        """A moment as an RGB image of PIL."""
        one, (row, column) = self.seen[index], self.at[index]
        half = one.filter.shape[0] / 2
        self.title.set_text(f"A trained filter of SS-CNN, enlarged by s = {one.scale:.2f}")
        # W^s(x) = W(x / s) / s^2: times s^2 the colours are those of one filter.
        relative = (one.scale / self.seen[-1].scale) ** 2
        self.weight.set_data(signed_root(one.filter * relative))
        self.weight.set_extent((-half, half, half, -half))
        self.image.set_data(one.image)
        self.response.set_data(one.response)
        for ring, centre in zip(self.rings, ((0, 0), (column, row), (column, row)), strict=True):
            ring.set(center=centre, radius=self.radius * one.scale)
        for mark, values in self.marks:
            mark.set_data([one.scale], [values[index]])
        self.canvas.draw()  # type: ignore[no-untyped-call]
        pixels = self.canvas.buffer_rgba()  # type: ignore[no-untyped-call]
        return require("PIL.Image").fromarray(np.asarray(pixels)).convert("RGB")


def palette() -> Any:
    """The colours of all pictures: those of signed numbers, greys, and of lines with what lies between them and white.

    One palette for all keeps colours from flickering, and as few as these make a small file.
    """
    signed = [colormaps[SIGNED](share)[:3] for share in np.linspace(0, 1, 49)]
    greys = [(share, share, share) for share in np.linspace(0, 1, 18)]
    lines = [to_rgb(colour) for colour in (STYLES[0].colour, STYLES[1].colour, RING)]
    paler = [tuple(1 - share * (1 - part) for part in line) for line in lines for share in (1, 0.7, 0.4)]
    darker = [tuple(share * part for part in lines[2]) for share in (0.3, 0.6)]  # a ring's edge on black
    found = require("PIL.Image").new("P", (1, 1))
    found.putpalette([round(255 * part) for colour in (*signed, *greys, *paler, *darker) for part in colour])
    return found


def draw(model: Network, image: Tensor, output: Path, *, channel: int | None = None, frames: int | None = None) -> Path:
    """Write the animation as a GIF: from scale 1 to the largest and back, again and again.

    Args:
        model: An ss-cnn.
        image: What it sees at the largest scale, `(H, W)` in [0, 1].
        output: The file.
        channel: Which filter of the first layer; the one that responds most by default.
        frames: How many scales, by default `FRAMES`.
    """
    layer = steerable(model.first)
    channel = strongest_channel(model, image) if channel is None else channel
    if not 0 <= channel < len(layer.coefficients):
        raise ValueError(
            f"`channel` must be 0 to {len(layer.coefficients) - 1}, a filter of the layer (got {channel})."
        )
    frames = integer("frames", FRAMES if frames is None else frames, minimum=2)
    scales = np.geomspace(1, LARGEST, frames).tolist()
    stage = Stage(moments(model, channel, image, scales), layer.geometry.kernel_size / 2 * FINER)
    pictures = [stage.show(index) for index in range(frames)]
    pil = require("PIL.Image")
    drawn = [picture.quantize(palette=palette(), dither=pil.Dither.NONE) for picture in pictures]
    drawn += drawn[-2:0:-1]  # and back
    times = [REST if i in (0, frames - 1) else STEP for i in range(len(drawn))]
    content = io.BytesIO()
    drawn[0].save(content, "GIF", save_all=True, append_images=drawn[1:], duration=times, loop=0, optimize=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, content.getvalue())
    return output


def of_network(trained: Trained, output: Path, *, digit: int = DIGIT, **options: Any) -> Path:
    """The animation of a trained SS-CNN with the largest image of a class in its test set; see :func:`draw`."""
    return draw(trained.ss, largest_image(trained.test, digit), output, **options)
