"""What networks say of one picture: at several sizes of it, and in each of their scale channels."""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalesteer.app import predict
from scalesteer.app.demo import finder, samples
from scalesteer.app.demo.asking import SIZES, Way, at_size, by_channel, count_sizes, hear, resized
from scalesteer.app.demo.companions import Companions
from scalesteer.app.device import pick_device
from scalesteer.app.evaluation import pixels_seen
from scalesteer.app.networks import load_model, look_at
from scalesteer.app.pictures import PictureError
from scalesteer.app.report import data_uri
from scalesteer.channels import ScaleChannels
from scalesteer.files import require
from scalesteer.joining import Join
from scalesteer.models import network_of
from scalesteer.models.network import Network
from scalesteer.models.pooled import PooledNetwork
from scalesteer.pretrained import list_pretrained

FORMATS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")  # how files of PNG and JPEG begin
MOST_READ = 1 << 24  # pixels of a picture: those of a good telephone; they take half a gigabyte and a second
MOST_PIXELS = 1 << 20  # that a network looks at for one answer, in all its channels
MOST_CLASSES = 5  # that an answer names
MOST_KEPT = 8  # pictures: a slider asks again and again of the same one
SURE = 0.5  # of the best class; below it the picture shows nothing that the network knows
DIGITS = tuple(map(str, range(10)))
UNKNOWN = "This is nothing that the network knows."


@dataclass(eq=False)
class Picture:
    """A picture as a network wants it, and what was found out about it already."""

    pixels: Tensor  # (C, H, W), from 0 to 1
    inverted: bool  # it was dark on light
    content: bytes = b""  # of its file
    known: dict[str, Any] = field(default_factory=dict)


class DemoModel:
    """A trained network, and pictures as it wants them.

    A network with scale channels is shown in several ways, with the same weights: looking once, at the sizes of its own
    channels, and at more sizes, `with_scales`. The network `digits` has a rival beside it, which was trained with
    random resizing. Any other network is shown as it is.

    Args:
        checkpoint: A run's directory, a checkpoint, a folder with a model, or the name of a network that comes with the
            package.
        device: Where it answers.
        channels: Sizes at which it looks at pictures instead of its own, with weights that are not trained again.
        join: How the answers at these sizes become one.

    Example:
        >>> demo = DemoModel("garments")
        >>> [way.name for way in demo.ways(28, 28)]
        ['looking once', 'looking at 3 sizes', 'looking at 8 sizes']
    """

    def __init__(
        self,
        checkpoint: str | Path,
        device: str = "cpu",
        channels: tuple[float, ...] | None = None,
        join: Join | None = None,
    ) -> None:
        require("PIL.Image")  # told now, not when the first picture comes
        self.checkpoint, self.name = Path(checkpoint), Path(checkpoint).resolve().name
        self.model = look_at(load_model(self.checkpoint), channels, join).to(pick_device(device))
        self.network = network_of(self.model)
        self.task = self.network.task
        self.classes = self.task.classes or tuple(map(str, range(self.task.num_classes)))
        self.read_file = predict.reader(self.model, self.task.fit, most_pixels=MOST_READ)
        self.any_size = isinstance(self.network, PooledNetwork) or not isinstance(self.network, Network)
        self.device = next(self.model.parameters()).device
        self.draws = self.task.ground == "black"
        self.digits = self.draws and self.classes == DIGITS
        self.shipped = str(checkpoint) in list_pretrained() and not self.checkpoint.is_dir()
        self.others = Companions(self.network, self.name, self.device)
        self.rivalled = self.shipped and self.digits and self.any_size and self.others.has_rival
        self._kept: dict[bytes, Picture] = {}

    @cached_property
    def _description(self) -> dict[str, Any]:
        side = self.task.image_size or (64, 64)
        shown = samples.shipped(self.name) if self.shipped else samples.of_run(self.checkpoint, self.classes)
        if not shown and self.digits:
            shown = samples.shipped("digits")
        return {
            "name": self.name,
            "classes": list(self.classes),
            "channels": list(self.model.scales) if isinstance(self.model, ScaleChannels) else [],
            "draws": self.draws,
            "digits": self.digits,
            "sizes": list(SIZES),
            "ways": [{"key": way.key, "name": way.name} for way in self.ways(*side)],
            "samples": shown,
            "steering": self.others.has_filters,
            "finder": self.others.has_finder,
        }

    def warm_up(self) -> list[Callable[[], Any]]:
        """What makes the first answers quick, in the order in which a page needs it."""
        blank = Picture(torch.zeros(self.task.in_chans, *(self.task.image_size or (64, 64))), False)
        blank.pixels[:, ::2] = 1
        first: list[Callable[[], Any]] = [lambda: self.others.filters] if self.others.has_filters else []
        last: list[Callable[[], Any]] = [lambda: self.others.finder.find(torch.zeros(1, 1, 64, 64))]
        rest = last if self.others.has_finder else []
        return [*first, lambda: self.answer(blank, 1.0), *rest, lambda: self.answer(blank, 2.0)]

    def describe(self) -> dict[str, Any]:
        """What a page should know before there is a picture, JSON-ready."""
        return self._description

    def filters(self) -> dict[str, Any]:
        """The learned filters that can be steered, JSON-ready."""
        return self.others.filters

    def find(self, content: bytes) -> dict[str, Any]:
        """The digits in a picture of any sizes, JSON-ready."""
        _check_format(content)
        return self.others.finder.describe(finder.read(content))

    def read(self, content: bytes) -> Picture:
        """A picture as the network wants it.

        Raises:
            PictureError: If the bytes are no picture, or nothing is on it.
        """
        _check_format(content)
        digest = hashlib.sha256(content).digest()
        if (kept := self._kept.get(digest)) is not None:
            return kept
        pixels, inverted, *_ = self.read_file(io.BytesIO(content))
        height, width = pixels.shape[-2:]
        self._check_work(height, width, self.model)
        if pixels.max() == pixels.min():
            raise PictureError("the picture is blank: all of it has one colour.")
        x = (torch.from_numpy(pixels).float() / 255).view(self.task.in_chans, height, width)
        while len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[digest] = Picture(x, inverted, content)
        return self._kept[digest]

    def at_size(self, picture: Picture, size: float) -> Tensor:
        """A picture at another size, as this network takes it, `(1, C, h, w)`."""
        return at_size(picture.pixels, size, self.task.ground, self.any_size)

    def ways(self, height: int, width: int) -> list[Way]:
        """How networks are shown on images of this size and larger."""
        model, whose = self.model, "ours, " if self.rivalled else ""
        if not isinstance(model, ScaleChannels) or not self.any_size:
            return [Way("network", "the network", model)]
        once = Way("once", f"{whose}looking once", self.network)
        own = Way("own", f"looking at {count_sizes(model)}", model)
        if not isinstance(self.network, PooledNetwork):  # one of the user's own
            return [once, own]
        half_octave, scales = 2**0.5, model.scales
        more = [scales[0] / half_octave**step for step in range(4, 0, -1)]
        more = [scale for scale in more if int(min(height, width) * scale + 0.5) >= self.network.smallest]
        wider = model.with_scales((*more, *scales, scales[-1] * half_octave))
        several = Way("several", f"{whose}looking at {count_sizes(wider)}", wider)
        if self.rivalled:
            return [Way("rival", "plain network, trained with random resizing", self.others.rival), once, several]
        return [once, own, several]

    @torch.inference_mode()
    def answer(self, picture: Picture, size: float) -> dict[str, Any]:
        """What the networks say of a picture at one size, in every way and every channel, JSON-ready."""
        height, width = picture.pixels.shape[-2:]
        ways, said = self.ways(height, width), list[dict[str, Any]]()
        self._check_work(*self._looked_at(picture, size), ways[-1].model)
        x, usual = self.at_size(picture, size).to(self.device), self._usual_sizes(picture, ways)
        for way, before in zip(ways, usual, strict=True):
            logits, found, alone = hear(way.model, x)
            chances = logits.softmax(0)
            top = chances.topk(min(MOST_CLASSES, len(chances)))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            measured = found / before if found is not None and before else None
            said.append(
                {
                    "key": way.key,
                    "name": way.name,
                    "scales": list(way.model.scales) if isinstance(way.model, ScaleChannels) else [1.0],
                    "top": [{"label": label, "probability": round(chance, 4)} for label, chance in pairs],
                    "found": None if found is None else round(found, 3),
                    "measured": None if measured is None else round(measured, 3),
                }
            )
        channels = [] if alone is None else by_channel(alone, ways[-1].model, x, said[-1]["top"][0]["label"])
        verdict, note = self._judge(picture, said[-1]["top"][0]["probability"])
        return {
            "picture": data_uri((255 * x[0]).round().byte().cpu().numpy()),
            "usual": [width, height],
            "inverted": picture.inverted,
            "ways": said,
            "channels": channels,
            "verdict": verdict,
            "note": note,
        }

    def _usual_sizes(self, picture: Picture, ways: list[Way]) -> list[float | None]:
        """The size that each way finds in the picture as it was given."""
        if "sizes" not in picture.known:
            x = self.at_size(picture, 1.0).to(self.device)
            picture.known["sizes"] = [hear(model, x)[1] for _, _, model in ways]
        found: list[float | None] = picture.known["sizes"]
        return found

    def _judge(self, picture: Picture, best: float) -> tuple[str, str]:
        """Whether a picture shows one thing that the network knows; and a sentence about it if not."""
        if self.digits and self.others.has_finder and picture.content:
            if "verdict" not in picture.known:
                picture.known["verdict"] = self.others.finder.judge(picture.content)
            labels: list[str] | None = picture.known["verdict"]
            if labels is not None:
                several = " and ".join([", ".join(labels[:-1]), labels[-1]]) if len(labels) > 1 else ""
                return ("several", f"{several}: see the third tab") if several else ("one", "")
            return "unknown", UNKNOWN
        return ("unknown", UNKNOWN) if best < SURE else ("one", "")

    @torch.inference_mode()
    def curve(self, picture: Picture) -> dict[str, Any]:
        """How sure each way is of a class at each of `SIZES`, and the size that it finds, JSON-ready.

        Sizes for which it would have to look at too many pixels are left out. The classes are those that are named at
        some size. `label` is the one that is named at the most sizes, in all ways together: a guess at what it is.
        """
        ways, said, found = self.ways(*picture.pixels.shape[-2:]), list[Tensor](), list[list[float | None]]()
        for size in SIZES:
            shape = self._looked_at(picture, size)
            if pixels_seen(ways[-1].model, *shape) > MOST_PIXELS and said:
                break
            self._check_work(*shape, ways[-1].model)
            x = self.at_size(picture, size).to(self.device)
            heard = [hear(model, x)[:2] for _, _, model in ways]
            said.append(torch.stack([logits.softmax(0) for logits, _ in heard]).cpu())  # (ways, classes)
            found.append([None if one is None else round(one, 3) for _, one in heard])
        chances = torch.stack(said)  # (sizes, ways, classes)
        labels = chances.argmax(2).flatten().tolist()
        named = sorted(set(labels))
        lines = [
            {
                "key": way.key,
                "name": way.name,
                "chances": {label: [round(c, 4) for c in chances[:, i, label].tolist()] for label in named},
                "found": None if found[0][i] is None else [row[i] for row in found],
            }
            for i, way in enumerate(ways)
        ]
        guess = max(named, key=labels.count)
        return {"sizes": list(SIZES[: len(said)]), "label": guess, "inverted": picture.inverted, "ways": lines}

    def _looked_at(self, picture: Picture, size: float) -> tuple[int, int]:
        """Height and width of what :meth:`at_size` makes, before it does."""
        height, width = picture.pixels.shape[-2:]
        return resized(height, width, size) if size > 1 and self.any_size else (height, width)

    def _check_work(self, height: int, width: int, model: nn.Module) -> None:
        if pixels_seen(model, height, width) > MOST_PIXELS:
            shown = f"{width} x {height} pixels"
            raise PictureError(f"the picture ({shown} at this size) is too large to try here: take a smaller one.")


def _check_format(content: bytes) -> None:
    if not content.startswith(FORMATS):
        raise PictureError("the picture must be a PNG or JPEG file.")
