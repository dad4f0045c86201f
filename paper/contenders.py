"""The networks of the quickstart: how each is made, trained on shrunk digits, and tested at other sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from paper.side_by_side import Say
from scalesteer.app.augment import Augmentation
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import ImageSet, load_split
from scalesteer.joining import Calibration
from scalesteer.models import count_parameters, create_model, set_input_statistics

OURS = "pooled-cnn, resized, channels"
NAMES = {
    OURS: "Random resizing, then scale channels",
    "pooled-cnn, resized": "The same without scale channels",
    "plain-cnn, resized": "Plain CNN, random resizing, as long as ours",
    "ss-cnn": "SS-CNN",
    "plain-cnn": "Plain CNN",
}
"""Networks by what they are, how they are trained, and how they are tested."""
NETWORK = {"kernel_size": (5, 3, 3, 3), "widths": (16, 32, 64, 64), "halving": "max", "readout": "features"}
CHANNELS = ", channels"  # ends the name of a network that gets scale channels when it has been trained
Result = dict[str, Any]
Answers = dict[float, tuple[NDArray[Any], NDArray[Any] | None]]


@dataclass(frozen=True)
class Settings:
    """What the quickstart trains and tests; a smaller one makes a smaller run."""

    train_images: int = 3000
    test_images: int = 2000
    train_scales: tuple[float, float] = (0.5, 0.75)
    test_scales: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    models: tuple[str, ...] = (OURS, "pooled-cnn, resized", "plain-cnn, resized", "ss-cnn", "plain-cnn")
    seeds: tuple[int, ...] = (0,)
    epochs: int = 32
    # With random resizing, which keeps a network from learning digits by heart: both take the same time on a CPU.
    longer: Mapping[str, int] = field(default_factory=lambda: {"pooled-cnn": 56, "plain-cnn": 48})
    batch_size: int = 50
    lr: float = 0.01
    weight_decay: float = 0.01
    label_smoothing: float = 0.1
    network: Mapping[str, Any] = field(default_factory=lambda: dict(NETWORK))  # ours
    channels: tuple[float, ...] = (0.7, 1.0, 1.4, 2.0)
    beside: float = -1.25  # the bias of all channels but 1, at which the network has learned
    resize: tuple[float, float] = (0.4, 2.0)  # factors of random resizing
    antialias: bool = False  # of random resizing: as the digits themselves were shrunk, which is better for all
    widths: tuple[int, int, int] = (12, 24, 36)  # of the two networks that are not for any size
    filter_scales: tuple[float, ...] = (0.5, 0.7, 1.0, 1.4, 2.0)
    basis: str = "area"

    @property
    def outside(self) -> list[float]:
        """The sizes of the test that training does not show."""
        low, high = self.train_scales
        return [size for size in self.test_scales if not low <= size <= high]

    def images(self, part: str, scale_range: tuple[float, float]) -> ImageSet:
        """Digits of MNIST, shrunk; the digits of a part are the same whatever the scale."""
        sizes = (self.train_images, 0, self.test_images)
        return load_split("mnist-scale", 0, part, scale_range=scale_range, sizes=sizes)

    def model(self, name: str, seed: int) -> nn.Module:
        """A new network."""
        torch.manual_seed(seed)
        kind = name.partition(", ")[0]
        if kind == "pooled-cnn":
            pooled: nn.Module = create_model(kind, "mnist-scale", **self.network)
            return pooled
        own: dict[str, Any] = {"scales": self.filter_scales, "basis": self.basis} if kind == "ss-cnn" else {}
        model: nn.Module = create_model(kind, "mnist-scale", upsample=1, widths=self.widths, **own)
        return model

    def tested(self, name: str, model: nn.Module) -> nn.Module:
        """The trained network as it is tested."""
        if not name.endswith(CHANNELS):
            return model
        biases = tuple(0.0 if scale == 1 else self.beside for scale in self.channels)
        calibration = Calibration((1.0,) * len(biases), biases)
        return ScaleChannels(model, self.channels, calibration=calibration)

    def epochs_of(self, name: str) -> int:
        """How long a network is trained."""
        return self.longer[name.partition(", ")[0]] if "resized" in name else self.epochs


COST = {"plain-cnn": 1.2, "pooled-cnn": 1.0, "ss-cnn": 2.4}
"""Seconds of an epoch on one core, roughly: they tell how long the rest takes."""


@dataclass(frozen=True)
class Training:
    """One network that is trained once, and tested as itself and perhaps in scale channels."""

    settings: Settings
    name: str
    seed: int

    @property
    def title(self) -> str:
        return f"{NAMES[self.name]}, seed {self.seed}"

    @property
    def names(self) -> list[str]:
        """What is tested of it."""
        return [name for name in self.settings.models if name.removesuffix(CHANNELS) == self.name]

    @property
    def work(self) -> float:
        return self.settings.epochs_of(self.name) * COST[self.name.partition(", ")[0]]

    def do(self, say: Say) -> list[tuple[Result, Answers]]:
        """For each name its numbers and what the network says at each size: plain values, which a pipe carries."""
        images, tests = load(self.settings)
        model = self.settings.model(self.name, self.seed)
        begun, cpu = time.perf_counter(), time.process_time()
        train(model, images, self, say)
        seconds = {"train": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
        return [self.test(name, model, tests, seconds) for name in self.names]

    def test(
        self, name: str, model: nn.Module, tests: Mapping[float, ImageSet], seconds: Mapping[str, float]
    ) -> tuple[Result, Answers]:
        """The same of one name."""
        begun = time.perf_counter()
        tested = self.settings.tested(name, model)
        answers = {size: answer(tested, images) for size, images in tests.items()}
        errors = {size: float((answers[size][0] != images.labels).float().mean()) for size, images in tests.items()}
        unseen = self.settings.outside
        run: Result = {"model": name, "seed": self.seed, "errors": list(errors.values())}
        run["outside"] = statistics.fmean(error for size, error in errors.items() if size in unseen)
        run["inside"] = statistics.fmean(error for size, error in errors.items() if size not in unseen)
        times = {**seconds, "test": time.perf_counter() - begun}
        run["seconds"] = {key: round(value, 1) for key, value in times.items()}
        run["parameters"] = count_parameters(model)
        return run, {
            size: (c.numpy(), None if found is None else found.numpy()) for size, (c, found) in answers.items()
        }


def load(settings: Settings) -> tuple[ImageSet, dict[float, ImageSet]]:
    """The digits of training, and those of the test at each size."""
    tests = {size: settings.images("test", (size, size)) for size in settings.test_scales}
    return settings.images("train", settings.train_scales), tests


def train(model: nn.Module, images: ImageSet, training: Training, say: Say) -> None:
    """AdamW with a one-cycle learning rate; the last model is the one that is tested."""
    settings, epochs = training.settings, training.settings.epochs_of(training.name)
    set_input_statistics(model, images.std)
    change = Augmentation(resize=settings.resize, antialias=settings.antialias)
    each = len(images) // settings.batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=epochs * each)
    order = torch.Generator().manual_seed(training.seed)
    model.train()
    for epoch in range(epochs):
        for step, (x, labels) in enumerate(images.batches(settings.batch_size, generator=order, drop_last=True)):
            logits = model(change(x) if "resized" in training.name else x)
            loss = F.cross_entropy(logits, labels, label_smoothing=settings.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            say(
                f"{training.title}: epoch {epoch + 1} of {epochs}", training.work * (epoch + (step + 1) / each) / epochs
            )


@torch.no_grad()
def answer(model: nn.Module, images: ImageSet) -> tuple[Tensor, Tensor | None]:
    """The class of each image, and from a network with scale channels the size that answered: `(N,)` both."""
    model.eval()
    batches = (x for x, _ in images.batches(200))
    if not isinstance(model, ScaleChannels):
        return torch.cat([model(x).argmax(1) for x in batches]), None
    pairs = [model(x, return_scales=True) for x in batches]
    return torch.cat([logits.argmax(1) for logits, _ in pairs]), torch.cat([size for _, size in pairs])
