"""What a network says of one picture: at several sizes of it, and in each of its scale channels."""

import io
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer.app import predict
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
from scalesteer.resize import canvas_size, resize

SIZES = tuple(2 ** (third / 3) for third in range(-6, 7))  # of the object, relative to the picture that was given
FORMATS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")  # how files of PNG and JPEG begin
MOST_READ = 1 << 24  # pixels of a picture: those of a good telephone; they take half a gigabyte and a second
MOST_PIXELS = 1 << 20  # that a network looks at for one answer, in all its channels
MOST_CLASSES = 5  # that an answer names


class Way(NamedTuple):
    """One way for a network to look at an image."""

    name: str
    model: nn.Module


class DemoModel:
    """A trained network, and pictures as it wants them.

    A network with scale channels is shown in three ways, with the same weights: at one size, at the sizes of its own
    channels, and at more sizes, `with_scales`. Any other network is shown as it is.

    Args:
        checkpoint: A run's directory, a checkpoint, a folder with a model, or the name of a network that comes with the
            package.
        device: Where it answers.
        channels: Sizes at which it looks at pictures instead of its own, with weights that are not trained again.
        join: How the answers at these sizes become one.

    Example:
        >>> demo = DemoModel("digits")
        >>> [way.name for way in demo.ways(28, 28)]
        ['at one size', 'at its own sizes', 'at more sizes']
    """

    def __init__(
        self,
        checkpoint: str | Path,
        device: str = "cpu",
        channels: tuple[float, ...] | None = None,
        join: Join | None = None,
    ) -> None:
        require("PIL.Image")  # told now, not when the first picture comes
        self.name = Path(checkpoint).resolve().name
        self.model = look_at(load_model(Path(checkpoint)), channels, join).to(pick_device(device))
        self.network = network_of(self.model)
        self.task = self.network.task
        self.classes = self.task.classes or tuple(map(str, range(self.task.num_classes)))
        self.read_file = predict.reader(self.model, self.task.fit, most_pixels=MOST_READ)
        self.any_size = isinstance(self.network, PooledNetwork) or not isinstance(self.network, Network)
        self.device = next(self.model.parameters()).device

    def describe(self) -> dict[str, Any]:
        """What a page should know before there is a picture, JSON-ready."""
        draws = self.task.ground == "black"
        return {
            "name": self.name,
            "classes": list(self.classes),
            "channels": list(self.model.scales) if isinstance(self.model, ScaleChannels) else [],
            "draws": draws,
            "digits": draws and self.classes == tuple(map(str, range(10))),
            "sizes": list(SIZES),
        }

    def read(self, content: bytes) -> tuple[Tensor, bool]:
        """A picture, `(C, H, W)` from 0 to 1, as the network wants it, and whether it was inverted.

        Raises:
            PictureError: If the bytes are no picture, or nothing is on it.
        """
        if not content.startswith(FORMATS):
            raise PictureError("the picture must be a PNG or JPEG file.")
        pixels, inverted, *_ = self.read_file(io.BytesIO(content))
        height, width = pixels.shape[-2:]
        self._check_work(height, width, self.model)
        if pixels.max() == pixels.min():
            raise PictureError("the picture is blank: all of it has one colour.")
        x = torch.from_numpy(pixels).float() / 255
        return x.view(self.task.in_chans, height, width), inverted

    def at_size(self, picture: Tensor, size: float) -> Tensor:
        """The picture at another size, `(1, C, h, w)`.

        A smaller one is laid on a canvas of the usual size, whose ground is black for light digits and otherwise the
        mean colour of the picture's border. A larger one is larger, or cut to the canvas for a network that takes only
        that.
        """
        height, width = picture.shape[-2:]
        x = resize(picture[None], _resized(height, width, size)).clamp(0, 1)
        left, top = width - x.shape[-1], height - x.shape[-2]
        if size > 1 and self.any_size:
            return x
        ground = torch.zeros(len(picture))
        if self.task.ground == "surroundings":
            rows, columns = picture[:, [0, -1]], picture[:, :, [0, -1]]
            ground = torch.cat([rows.flatten(1), columns.flatten(1)], dim=1).mean(1)
        # What is cut off, or added, on each side; the ground is zero while it is added.
        sides = (left // 2, left - left // 2, top // 2, top - top // 2)
        return F.pad(x - ground.view(-1, 1, 1), sides) + ground.view(-1, 1, 1)

    def ways(self, height: int, width: int) -> list[Way]:
        """How the network is shown on images of this size and larger."""
        if isinstance(self.model, ScaleChannels) and not isinstance(self.network, Network):  # one of the user's own
            return [Way("at one size", self.network), Way("at its own sizes", self.model)]
        if not isinstance(self.model, ScaleChannels) or not isinstance(self.network, PooledNetwork):
            return [Way("the network", self.model)]
        own, half_octave = self.model.scales, 2**0.5
        more = [own[0] / half_octave**step for step in range(4, 0, -1)]
        more = [scale for scale in more if int(min(height, width) * scale + 0.5) >= self.network.smallest]
        wider = self.model.with_scales((*more, *own, own[-1] * half_octave))
        names = "at one size", "at its own sizes", "at more sizes"
        return list(map(Way, names, (self.network, self.model, wider)))

    @torch.no_grad()
    def answer(self, picture: Tensor, size: float) -> dict[str, Any]:
        """What the network says of the picture at one size, in every way and every channel, JSON-ready."""
        height, width = picture.shape[-2:]
        ways, said = self.ways(height, width), list[dict[str, Any]]()
        self._check_work(*self._looked_at(picture, size), ways[-1].model)
        x = self.at_size(picture, size).to(self.device)
        for name, model in ways:
            found, scales = None, [1.0]
            if isinstance(model, ScaleChannels):
                (logits, sizes), scales = self._ask(model, x, return_scales=True), list(model.scales)
                found = round(float(sizes[0]), 3)
            else:
                logits = self._ask(model, x)
            chances = logits[0].float().softmax(0)
            top = chances.topk(min(MOST_CLASSES, len(chances)))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            said.append(
                {
                    "name": name,
                    "scales": scales,
                    "top": [{"label": label, "probability": round(chance, 4)} for label, chance in pairs],
                    "found": found,
                }
            )
        return {
            "picture": data_uri((255 * x[0]).round().byte().cpu().numpy()),
            "usual": [width, height],
            "ways": said,
            "channels": self._by_channel(x, ways[-1].model, winner=said[-1]["top"][0]["label"]),
        }

    def _by_channel(self, x: Tensor, model: nn.Module, winner: int) -> list[dict[str, Any]]:
        """What each channel says by itself, and its share in the answer: its weight for the class that won."""
        if not isinstance(model, ScaleChannels):
            return []
        logits = [self._ask(model.with_scales((scale,)), x)[0].float() for scale in model.scales]
        score = torch.stack(logits)[:, winner]
        weights = {"logsumexp": score, "max": torch.where(score == score.max(), 0.0, -torch.inf), "mean": 0 * score}
        shares = weights[model.join].softmax(0).tolist()
        rows = []
        for scale, own, share in zip(model.scales, logits, shares, strict=True):
            chance, label = own.softmax(0).max(0)
            height, width = canvas_size((x.shape[-2], x.shape[-1]), scale)
            row = {
                "scale": scale,
                "pixels": [width, height],
                "label": int(label),
                "probability": round(float(chance), 4),
            }
            rows.append(row | {"share": round(share, 4)})
        return rows

    @torch.no_grad()
    def curve(self, picture: Tensor) -> dict[str, Any]:
        """How sure the network is of a class at each of `SIZES`, in every way, JSON-ready.

        Sizes for which it would have to look at too many pixels are left out. The classes are those that are named at
        some size. `label` is the one that is named at the most sizes, in all ways together: a guess at what it is.
        """
        ways, found = self.ways(*picture.shape[-2:]), list[Tensor]()
        for size in SIZES:
            shape = self._looked_at(picture, size)
            if pixels_seen(ways[-1].model, *shape) > MOST_PIXELS and found:
                break
            self._check_work(*shape, ways[-1].model)
            x = self.at_size(picture, size).to(self.device)
            said = [self._ask(model, x)[0].float().softmax(0) for _, model in ways]
            found.append(torch.stack(said).cpu())  # (ways, classes)
        chances = torch.stack(found)  # (sizes, ways, classes)
        labels = chances.argmax(2).flatten().tolist()
        named = sorted(set(labels))
        return {
            "sizes": list(SIZES[: len(found)]),
            "label": max(named, key=labels.count),
            "ways": [
                {
                    "name": name,
                    "chances": {label: [round(c, 4) for c in chances[:, i, label].tolist()] for label in named},
                }
                for i, (name, _) in enumerate(ways)
            ],
        }

    def _looked_at(self, picture: Tensor, size: float) -> tuple[int, int]:
        """Height and width of what :meth:`at_size` makes, before it does."""
        height, width = picture.shape[-2:]
        return _resized(height, width, size) if size > 1 and self.any_size else (height, width)

    def _check_work(self, height: int, width: int, model: nn.Module) -> None:
        if pixels_seen(model, height, width) > MOST_PIXELS:
            shown = f"{width} x {height} pixels"
            raise PictureError(f"the picture ({shown} at this size) is too large to try here: take a smaller one.")

    def _ask(self, model: nn.Module, x: Tensor, **options: bool) -> Any:
        """What a model says; an image that it cannot take is the picture's fault."""
        try:
            return model(x, **options)
        except ValueError as error:
            raise PictureError(f"the picture cannot be used: {error}") from error


def _resized(height: int, width: int, size: float) -> tuple[int, int]:
    return max(1, round(height * size)), max(1, round(width * size))
