"""Which sizes to look at: how large the objects in your own pictures are, and the channels of scale that follow."""

import csv
import json
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from scalesteer import _checks, files
from scalesteer._text import printable
from scalesteer.app.folder import SHARE
from scalesteer.app.pictures import SUFFIXES, PictureError, find_pictures, read_picture
from scalesteer.harmonics import WIDE_STEP
from scalesteer.instances import label_regions
from scalesteer.models.pooled import MODELS

Box = tuple[float, float, float, float]  # left, top, width, height in pixels
MOST_PICTURES = 1000  # that are looked at; of more, every second, third, ...
MOST_BYTES = 1 << 29  # of a file of boxes; COCO's largest has 450 MB
LARGEST_SIDE = 512  # of the pictures that a network is trained on
LARGEST_CHANNEL = 2.0
CLASSES = 10  # in an estimate of time, on which their number has little effect
TRAINED = 1 - 2 * SHARE  # of the pictures, where none are set apart for validation and testing
ENDS = (0.05, 0.95)  # of the objects by size: what lies beyond may be a mistake
WIDEST = 6  # steps up to the largest scale of the layer's default, 6.3: a window of 45 pixels

# How a picture is searched for objects.
LEAST_SURE = 0.5  # of the pictures, for a command
LEAST_SHARE = 0.25  # of the pictures must show one; in photographs without an even ground what is found is chance
SEARCH_SIDE = 256  # pixels of the longer side at most
LEAST_CONTRAST, MOST_TEXTURE = 16, 112  # of 255


class Suited(NamedTuple):
    """A network, the filters it has, and the size in pixels at which it sees objects best."""

    model: str
    kernel_size: tuple[int, ...]
    object_size: float


# Those that experiments chose: drawings and digits, photographs. Digits are best at half of what one place of the last
# maps sees (30 pixels). Photographs need the size of those of CIFAR-10, whatever the network: at that of digits little
# of them is left. Small networks were measured in these channels too (docs/evidence/photographs.md).
GREY, COLOUR = Suited("pooled-cnn", (5, 5, 3), 15.0), Suited("pooled-resnet", (3, 3, 3), 32.0)
ON_CPU = "pooled-deep"  # for photographs, in the place of a network that wants a GPU
CROP_SIDE = 40  # pixels of a cropped object, resized


def suited_to(grey: bool, model: str | None = None) -> Suited:
    """The network for drawings or photographs, or the named one: a small one where there is no GPU."""
    kind = GREY if grey else COLOUR
    if model is None:
        model = kind.model if grey or torch.cuda.is_available() else ON_CPU
    name = _checks.lookup("model", model, tuple(MODELS))
    return Suited(name, MODELS[name][1].kernel_sizes, kind.object_size)  # type: ignore[attr-defined]


def choose_channels(smallest: float, largest: float, object_size: float = GREY.object_size) -> tuple[float, ...]:
    """The channels of scale for objects of `smallest` to `largest` pixels: the rule of docs/guide/which-scales.md.

    A network sees objects best at one size, `object_size`; in a channel of scale s an object of n pixels has s n. So
    the channels reach from object_size / largest to object_size / smallest, in half octaves (powers of √2), and both
    ends are rounded outwards: they cover the ratio of the sizes, with one or two to spare. None enlarges a picture more
    than twice: that costs area and adds no detail, so that a network for smaller objects is made for twice the
    smallest.
    Sizes that differ by less than a half octave need no channels.

    Example:
        >>> [round(s, 2) for s in choose_channels(12, 46)]  # digits of STIR
        [0.25, 0.35, 0.5, 0.71, 1.0, 1.41]
        >>> choose_channels(20, 24)
        ()
    """
    _check_sizes(smallest=smallest, largest=largest, object_size=object_size)
    if largest < math.sqrt(2) * smallest:
        return ()
    object_size = min(object_size, LARGEST_CHANNEL * smallest)
    low, high = (2 * math.log2(object_size / size) for size in (largest, smallest))
    return tuple(2 ** (step / 2) for step in range(math.floor(low + 1e-9), math.ceil(high - 1e-9) + 1))


def choose_scales(smallest: float, largest: float) -> tuple[float, ...]:
    """The scales of a `ScaleSteerableConv2d` without channels: the ratio of the sizes, and one step more at both ends.

    Scale 1 is for the smallest objects. Steps are those of the layer's default, `harmonics.WIDE_STEP`. The largest
    scale is 6.3, beyond which scale channels are cheaper.

    Example:
        >>> [round(s, 2) for s in choose_scales(12, 46)]
        [0.74, 1.0, 1.36, 1.85, 2.52, 3.42, 4.65, 6.33]
    """
    _check_sizes(smallest=smallest, largest=largest)
    steps = math.ceil(math.log(largest / smallest) / math.log(WIDE_STEP) - 1e-9)
    return tuple(WIDE_STEP**step for step in range(-1, min(WIDEST, steps + 1) + 1))


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if _checks.real(name, value) <= 0:
            raise ValueError(f"`{name}` must be positive, a size in pixels (got {value}).")
    if sizes["largest"] < sizes["smallest"]:
        raise ValueError(f"`largest` (={sizes['largest']}) must not be below `smallest` (={sizes['smallest']}).")


@dataclass(frozen=True, eq=False)
class Suggestion:
    """What to train with, and what it follows from."""

    images: Path
    sizes: NDArray[np.float64]  # the longer side of each object, in pixels of the picture as training sees it
    image_size: tuple[int, int]  # to train with
    suited: Suited
    channels: tuple[float, ...]  # sizes at which it looks at the pictures, as factors; () for none
    scales: tuple[float, ...]  # for a layer of your own, without channels
    remarks: tuple[str, ...]  # what was looked at and found, and what was not
    grey: bool
    sure: bool  # enough of what was found for a command
    boxed: bool  # the user knows where each object is
    pictures: int  # in the folder
    value_range: tuple[float, float] | None = None  # as the pictures were read
    time: str = ""  # that the command takes on this machine, in a sentence

    @property
    def settings(self) -> dict[str, Any]:
        """The flags of the command, by name."""
        given: dict[str, Any] = {"images": str(self.images), "image_size": self.image_size, "model": self.suited.model}
        given |= {"channels": tuple(float(_short(scale)) for scale in self.channels), "grey": self.grey}
        return given if self.value_range is None else given | {"value_range": self.value_range}

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest size, without the last twentieth at both ends."""
        smallest, largest = np.quantile(self.sizes, ENDS)
        return float(smallest), float(largest)

    @property
    def command(self) -> str:
        """The command line that trains with these settings."""
        words = ["scalesteer", "train", str(self.images), "--image-size", *map(str, self.image_size)]
        words += [] if self.value_range is None else ["--value-range", *map(str, self.value_range)]
        words += ["--grey"] if self.grey else []
        words += ["--model", self.suited.model]
        words += ["--channels", *(map(_short, self.channels) if self.channels else ["none"])]
        return shlex.join(words)

    def histogram(self) -> list[tuple[float, float, int]]:
        """Objects in each half octave of sizes: from, to and how many."""
        steps = np.floor(2 * np.log2(self.sizes) + 1e-9).astype(int)
        return [
            (2 ** (step / 2), 2 ** ((step + 1) / 2), int((steps == step).sum()))
            for step in range(steps.min(), steps.max() + 1)
        ]

    def text(self) -> str:
        """All of it, for a terminal."""
        (smallest, largest), (height, width), suited = self.ends, self.image_size, self.suited
        most = max(count for *_, count in self.histogram())
        lines = [*self.remarks, "", f"Sizes in pixels (the longer side), in pictures fitted to {height} x {width}:"]
        for low, high, count in self.histogram():
            lines.append(f"  {low:6.1f} to {high:6.1f}  {'#' * math.ceil(40 * count / most):40}  {count:,}".rstrip())
        lines += [
            "",
            f"Nine of ten objects have {smallest:.3g} to {largest:.3g} pixels, a ratio of {largest / smallest:.3g}.",
        ]
        kernels = " ".join(map(str, suited.kernel_size))
        if self.channels:
            cost = sum(scale**2 for scale in self.channels)
            lines += [
                f"Channels of scale: {' '.join(map(_short, self.channels))}.",
                f"  {'Drawings' if self.grey else 'Photographs'} are seen best at about {suited.object_size:g} pixels. "
                "These channels show all sizes so, in",
                "  steps of a half octave, with both ends rounded outwards.",
                f"  Time and memory are {cost:.3g} times those without channels, the sum of the areas.",
            ]
        else:
            lines.append("Channels of scale: none are needed, the sizes hardly vary (by less than a factor of 1.4).")
        lines.append(f"Kernel size: {kernels}, the filters of {suited.model}.")
        if self.channels:
            scales = ", ".join(map(_short, self.scales))
            lines.append("In a network of your own, without channels of scale:")
            lines.append(f"  ScaleSteerableConv2d(..., kernel_size=7, scales=({scales}))")
        if self.boxed:
            side = f"{CROP_SIDE} {CROP_SIDE}"
            lines += [
                "If you know in use, too, where each object is, cut it out and resize it: then you need no channels.",
                f"  scalesteer train CROPS --fit resize --image-size {side} --channels none",
            ]
        if not self.sure:
            advice = "give the boxes of the objects with --boxes FILE, or say with --whole that each picture is one."
            return "\n".join([*lines, "", "No command, since these sizes are not sure:", advice])
        lines += [self.time] * bool(self.time)
        return "\n".join([*lines, "", self.command])


def _short(scale: float) -> str:
    return f"{scale:.4g}"


def suggest(
    images: Path,
    boxes: Path | None = None,
    value_range: tuple[float, float] | None = None,
    model: str | None = None,
    whole: bool = False,
) -> Suggestion:
    """Look at the objects in a folder of pictures, and say at which sizes a network should look.

    Args:
        images: A folder with pictures, or with folders of them.
        boxes: Where the objects are: a CSV with the columns path, x, y, width, height, or JSON like COCO's. Paths are
            relative to `images`. Without it, an object is what stands out from the colour of the picture's border.
        value_range: As in :func:`.pictures.read_picture`.
        model: The network; by default one that suits the pictures and this machine.
        whole: Each picture is one object.

    Raises:
        ValueError: If the folder has no pictures, if none shows an object, or if boxes do not fit their pictures.
    """
    images = Path(images)
    if whole and boxes is not None:
        raise ValueError(f"`whole` and `boxes` (got {str(boxes)!r}) exclude each other.")
    suited_to(True, model)  # a name that is not known is told now
    if not images.is_dir():
        raise ValueError(f"`images` must be a folder with pictures (got {str(images)!r}).")
    paths = find_pictures(images)
    if not paths:
        raise ValueError(f"{images} has no pictures ({', '.join(SUFFIXES)}), nor have the folders in it.")
    names = {path.relative_to(images).as_posix(): path for path in paths}
    given = None if boxes is None else read_boxes(Path(boxes))
    if given is not None:
        if missing := sorted(given.keys() - names.keys()):
            raise ValueError(f"{boxes} has boxes in {_some(missing)} that {images} does not have.")
        names = {name: path for name, path in names.items() if name in given}
    looked = list(names.items())[:: math.ceil(len(names) / MOST_PICTURES)]
    found, colour = list[tuple[float, int, int]](), False
    broken, nothing, doubtful, outside = list[str](), list[str](), list[str](), list[str]()
    for name, path in files.progress_bar(looked, unit="picture"):
        try:
            picture = read_picture(path, channels=3, value_range=value_range)  # (3, H, W)
        except PictureError:
            broken.append(name)
            continue
        height, width = picture.shape[1:]
        few = picture[:, :: 1 + height // SEARCH_SIDE, :: 1 + width // SEARCH_SIDE].astype(int)
        colour = colour or bool(np.abs(few[1:] - few[0]).mean() > 2)
        if whole:
            sides = [float(max(height, width))]
        elif given is None:
            sides, sure = find_objects(picture)
            nothing += [name] * (not sides)
            doubtful += [name] * (bool(sides) and not sure)
        else:
            sides = [max(box[2:]) for box in given[name]]
            # A pixel more is left to rounding.
            inside = (min(x, y) >= -1 and x + w <= width + 1 and y + h <= height + 1 for x, y, w, h in given[name])
            outside += [name] * (not all(inside))
        found += [(side, height, width) for side in sides]
    if outside:
        raise ValueError(f"boxes reach beyond {_some(outside)}: x, y, width and height must be in its pixels.")
    count = len(looked)
    remarks = [f"{count:,} of {len(paths):,} pictures looked at, {len(found):,} objects in them."]
    sure_of = 1.0
    if whole:
        remarks.append("Each picture is one object.")
    elif given is None:
        sure_of = 1 - (len(broken) + len(nothing) + len(doubtful)) / count
        how = "sure" if sure_of > 0.9 else "fairly sure" if sure_of > LEAST_SURE else "not sure"
        remarks.append(f"Objects are what stands out from the colour of the border ({how}).")
    remarks += [f"{_some(broken)} cannot be read."] * bool(broken)
    remarks += [f"Nothing stands out in {_some(nothing)}."] * bool(nothing)
    remarks += [f"The object is cut off, or the ground uneven, in {_some(doubtful)}."] * bool(doubtful)
    if len(broken) + len(nothing) > (1 - LEAST_SHARE) * count:
        hint = "" if boxes else " Give the objects' boxes with --boxes."
        raise ValueError(f"{images} shows too little. {' '.join(remarks)}{hint}")
    told: dict[str, Any] = {"grey": not colour, "sure": sure_of > LEAST_SURE, "boxed": whole or boxes is not None}
    told |= {"pictures": len(paths), "value_range": value_range}
    return _conclude(images, np.array(found, np.float64), suited_to(not colour, model), remarks, told)


def _conclude(
    images: Path, found: NDArray[np.float64], suited: Suited, remarks: list[str], told: dict[str, Any]
) -> Suggestion:
    """From objects `(N, 3)`, each with its size and its picture's height and width, to settings."""
    sizes, pictures = found[:, 0], found[:, 1:]
    # Where even the smallest objects are larger than the network likes, pictures are shrunk before training.
    step = math.ceil(2 * math.log2(suited.object_size / np.quantile(sizes, ENDS[0])))
    shrink = min(1.0, 2 ** (step / 2))
    sides = np.quantile(pictures, ENDS[1], axis=0) * shrink
    if sides.max() > LARGEST_SIDE:
        remarks.append(
            f"Pictures are shrunk to {LARGEST_SIDE} pixels; cut them into parts to see small objects better."
        )
        sides *= LARGEST_SIDE / sides.max()
    height, width = (max(*suited.kernel_size, math.ceil(side)) for side in sides)
    # As training fits pictures: those that are larger are shrunk, the others keep their size.
    fitted = np.maximum(1, sizes * np.minimum(1, np.minimum(height / pictures[:, 0], width / pictures[:, 1])))
    smallest, largest = (min(float(end), height, width) for end in np.quantile(fitted, ENDS))
    channels, scales = choose_channels(smallest, largest, suited.object_size), choose_scales(smallest, largest)
    return Suggestion(images, fitted, (height, width), suited, channels, scales, tuple(remarks), **told)


def _some(names: Sequence[str]) -> str:
    """How many there are and the first three."""
    listed = ", ".join(map(printable, names[:3])) + (", …" if len(names) > 3 else "")
    return f"{len(names):,} picture{'s' * (len(names) > 1)} ({listed})"


# Boxes


def read_boxes(path: Path) -> dict[str, list[Box]]:
    """Boxes by picture, from a CSV (path, x, y, width, height) or JSON like COCO's (`images` and `annotations`)."""
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise ValueError(f"`boxes` must be a CSV or JSON file of at most {MOST_BYTES >> 20} MiB (got {str(path)!r}).")
    try:
        rows = list((_coco_rows if path.suffix.lower() == ".json" else _csv_rows)(path))
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path} cannot be read ({reason}): it must be a CSV with the columns path, x, y, width and height, or "
            "JSON with `images` (id, file_name) and `annotations` (image_id, bbox)."
        ) from error
    found: dict[str, list[Box]] = {}
    for where, name, numbers in rows:
        try:
            x, y, width, height = map(float, numbers)
        except (TypeError, ValueError):
            raise ValueError(f"{path}, {where}: a box must be four numbers (got {numbers!r}).") from None
        if not all(map(math.isfinite, (x, y))) or not 0 < width < math.inf or not 0 < height < math.inf:
            raise ValueError(f"{path}, {where}: width and height of a box must be positive (got {numbers!r}).")
        found.setdefault(Path(str(name)).as_posix(), []).append((x, y, width, height))
    if not found:
        raise ValueError(f"{path} has no boxes.")
    return found


def _csv_rows(path: Path) -> Iterable[tuple[str, str, Any]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            yield f"line {line}", row["path"], [row[name] for name in ("x", "y", "width", "height")]


def _coco_rows(path: Path) -> Iterable[tuple[str, str, Any]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    names = {image["id"]: image["file_name"] for image in content["images"]}
    for i, entry in enumerate(content["annotations"]):
        if not entry.get("iscrowd"):  # a crowd's box is not the size of anything
            yield f"annotation {i}", names[entry["image_id"]], entry["bbox"]


# Objects that stand out


def find_objects(picture: NDArray[np.uint8]) -> tuple[list[float], bool]:
    """The longer sides, in pixels, of what stands out from the colour of the border; and whether that is sure.

    Sure means that the ground is even, and that nothing that stands out is cut off by the border.

    Shape:
        `(C, H, W)`

    Example:
        >>> picture = np.full((3, 40, 40), 200, np.uint8)
        >>> picture[:, 10:22, 5:15] = 30
        >>> find_objects(picture)
        ([12.0], True)
    """
    factor = min(math.ceil(max(picture.shape[1:]) / SEARCH_SIDE), *picture.shape[1:])
    small = _shrink(picture, factor)
    border = np.concatenate([small[:, 0], small[:, -1], small[:, :, 0], small[:, :, -1]], axis=1)  # (C, 2 H + 2 W)
    ground = np.median(border, axis=1)
    contrast = np.abs(small - ground[:, None, None]).max(0)  # (H, W)
    texture = np.abs(border - ground[:, None]).max(0)
    threshold = max(LEAST_CONTRAST, 4 * float(np.median(texture)))
    inside = contrast > threshold
    if threshold > MOST_TEXTURE or not inside.any():
        return [], False
    # An edge that is blurred lies where it has half of the contrast.
    inside = contrast > max(threshold, float(np.median(contrast[inside])) / 2)
    rows, columns, region = label_regions(inside, gap=math.ceil(max(inside.shape) / 64))
    sides = np.array(
        [max(np.ptp(rows[region == i]), np.ptp(columns[region == i])) + 1 for i in range(region.max() + 1)]
    )
    if sides.max() < 3:
        return [], False  # a speck
    edge = inside[0].any() or inside[-1].any() or inside[:, 0].any() or inside[:, -1].any()
    even = float((texture <= threshold).mean()) > 0.9
    return [float(factor * side) for side in sides if 2 * side > sides.max()], even and not edge


def _shrink(picture: NDArray[np.uint8], factor: int) -> NDArray[np.float64]:
    """Means of squares of pixels, `(C, H, W)` -> `(C, H // factor, W // factor)`; a large picture is not copied."""
    channels, height, width = picture.shape[0], picture.shape[1] // factor, picture.shape[2] // factor
    squares = picture[:, : height * factor, : width * factor].reshape(channels, height, factor, width, factor)
    means: NDArray[np.float64] = squares.sum(2, dtype=np.uint32).sum(-1) / factor**2
    return means


def usual_objects(pictures: NDArray[np.uint8]) -> tuple[float, float, float] | None:
    """The longer sides of what stands out in pictures, `(N, C, H, W)`: the median, and the smallest and the largest.

    The last twentieth at both ends is left out. None where that is not sure: at least half of the pictures must show
    objects for sure.
    """
    found = [sides for sides, sure in map(find_objects, pictures) if sure]
    if 2 * len(found) < max(1, len(pictures)):
        return None
    usual, smallest, largest = np.quantile(np.concatenate(found), (0.5, *ENDS)).tolist()
    return usual, smallest, largest


# A picture of the sizes


def draw_histogram(suggestion: Suggestion, path: Path) -> None:
    """The histogram and the size that each channel is made for, as a PNG."""
    figure = files.require("matplotlib.figure").Figure((7, 3.5), layout="constrained")
    axes = figure.subplots()
    low, high, counts = zip(*suggestion.histogram(), strict=True)
    axes.bar(low, counts, np.subtract(high, low), align="edge", edgecolor="white")
    for channel in suggestion.channels:
        axes.axvline(suggestion.suited.object_size / channel, color="tab:orange")
    axes.set_xscale("log")
    axes.minorticks_off()
    edges = [*low, high[-1]]
    axes.set_xticks(edges, [f"{edge:.3g}" for edge in edges])
    axes.set_xlabel("longer side of the objects in pixels")
    axes.set_title("lines: the size that each channel shows as the network likes it" if suggestion.channels else "")
    axes.set_ylabel("objects")
    with files.replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)
