"""What labelled pictures teach about scale channels after training: how to join them, and how many are needed.

The network itself learns nothing here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scalesteer import _checks
from scalesteer.answers import read
from scalesteer.channels import ScaleChannels
from scalesteer.joining import Calibration, find_size, join, merge, scores
from scalesteer.nn import evaluation_mode
from scalesteer.resize import border_colour, canvas_size, resize

ROOM = 0.005  # what a fitted join may cost at the known size beside the network alone: half a point
# Of the loss, for the known size alone; the rest is for all sizes alike.
KNOWN_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95)
RIDGE = 1e-3  # holds numbers that the pictures leave open near those of the plain join
STEEPEST = 3.0  # correction of estimated sizes, as a power: those that hardly differ tell nothing
FEWEST = 20  # pictures to fit with
PIXELS = 1 << 20  # that go through a network at once
BINS = 15  # of confidence


@dataclass(frozen=True)
class JoinFit:
    """What :func:`fit_join` found. Pairs are of the plain join and of the fitted one, both on pictures held out.

    Attributes:
        calibration: What the network has got; None if the plain join stays.
        about: What was decided and why, in a sentence.
        sizes: At which the pictures were shown.
        pictures: How many they were, at each size.
        error: Mean over these sizes.
        known_error: At size 1.
        alone_error: At size 1, of the network without channels.
        loss: Cross-entropy, mean over these sizes.
        ece: Expected calibration error (:func:`calibration_error`) over all sizes.
        size_error: The factor by which the median of the estimated sizes misses the true one, mean over these sizes.
    """

    calibration: Calibration | None
    about: str
    sizes: tuple[float, ...]
    pictures: int
    error: tuple[float, float]
    known_error: tuple[float, float]
    alone_error: float
    loss: tuple[float, float]
    ece: tuple[float, float]
    size_error: tuple[float, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


class Looks(NamedTuple):
    """What a network says of pictures in each channel and without channels, on the CPU."""

    z: Tensor  # logits by channel, size and picture: (S, F, N, classes)
    alone: Tensor  # at size 1: (N, classes)
    labels: Tensor  # (N,)
    scales: tuple[float, ...]
    sizes: tuple[float, ...]


def fit_join(model: ScaleChannels, images: Tensor, labels: Tensor, sizes: Sequence[float] | None = None) -> JoinFit:
    """Fit how the channels of a trained network are joined, on labelled pictures that it was not trained on.

    Each picture is shown at several sizes. A temperature and a bias for each channel, with the least loss over all of
    them, become `model.calibration`; so does a correction of the estimated sizes, after which 2 is twice the usual size
    of these pictures. The weights are left as they are. ``model.calibration = None`` undoes it.

    The numbers are used only if they pass a test: fitted on one half of the pictures, on the other half they lower the
    loss, do not raise the mean error over all sizes, and have at size 1 at most half a point more error than the
    network alone. If only the last is missing, the fit with the least error at size 1 is used, if that is below the
    plain join's. Otherwise the plain join stays. The result says so.

    Args:
        model: Trained; it returns logits.
        images: `(N, C, H, W)`, some hundred, of all classes; at size 1, as in training.
        labels: `(N,)`.
        sizes: At which they are shown; 1 is added. By default those that the channels bring back to 1: each 1 / scale.
            A smaller picture is put on ground of the colour of its border; a larger one is larger. Time grows with the
            sum of their squares.

    Example:
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(1, 3, 5), nn.AdaptiveMaxPool2d(1), nn.Flatten())
        >>> model = ScaleChannels(net, (0.5, 1.0))
        >>> found = fit_join(model, torch.rand(40, 1, 16, 16), torch.arange(40) % 3)
        >>> found.calibration is model.calibration
        True
    """
    if not isinstance(model, ScaleChannels):
        raise TypeError(f"`model` must be a ScaleChannels (got {type(model).__name__}).")
    _check_pictures(images, labels, FEWEST)
    wanted = tuple(1 / scale for scale in model.scales) if sizes is None else _checks.reals("sizes", sizes)
    if min(wanted) <= 0:
        raise ValueError(f"`sizes` must be positive (got {wanted}).")
    shown = tuple(sorted({1.0, *(1.0 if abs(size - 1) < 1e-6 else size for size in wanted)}))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(images.device)  # for the halves
    found = choose(look(model, images[order], labels[order.to(labels.device)], shown), model.join)
    model.calibration = found.calibration
    return found


def _check_pictures(images: Tensor, labels: Tensor, fewest: int) -> None:
    _checks.batch(images)
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise ValueError(f"`labels` must be whole numbers, {len(images)} (got {labels.dtype}, {tuple(labels.shape)}).")
    if len(images) < fewest:
        raise ValueError(f"`images` must be at least {fewest} (got {len(images)}).")


@torch.no_grad()
def look(model: ScaleChannels, images: Tensor, labels: Tensor, sizes: tuple[float, ...]) -> Looks:
    """Show pictures to a network at several sizes."""
    said = []
    for size in sizes:
        height, width = canvas_size((images.shape[-2], images.shape[-1]), max(size, 1.0))
        parts = images.split(max(1, int(PIXELS / model.pixels(height, width))))
        said.append(torch.cat([model.ask_channels(at_size(x, size)).float().cpu() for x in parts], 1))
    with evaluation_mode(model):
        parts = images.split(max(1, PIXELS // images.shape[-2:].numel()))
        alone = torch.cat([read(model.net(x), model.output, x).float().cpu() for x in parts])
    return Looks(torch.stack(said, 1), alone, labels.cpu(), model.scales, sizes)


def at_size(x: Tensor, size: float) -> Tensor:
    """Pictures with everything `size` times as large: larger pictures, or smaller ones amid the colour of their border.

    Example:
        >>> [at_size(torch.rand(1, 3, 8, 8), size).shape[-1] for size in (0.5, 1, 2)]
        [8, 8, 16]
    """
    height, width = canvas_size((x.shape[-2], x.shape[-1]), size)
    down, across = max(0, x.shape[-2] - height), max(0, x.shape[-1] - width)
    ground = border_colour(x)
    y = resize(x, (height, width)) - ground
    return F.pad(y, (across // 2, across - across // 2, down // 2, down - down // 2)) + ground


class _Numbers(NamedTuple):
    """A calibration that is being learned."""

    temperatures: Tensor
    biases: Tensor


def fit_numbers(looks: Looks, kind: str, known_share: float) -> Calibration:
    """The temperatures and biases with the least loss."""
    channels, sizes, pictures, _ = looks.z.shape
    weights = torch.full((sizes,), (1 - known_share) / sizes, dtype=torch.float64)
    weights[looks.sizes.index(1.0)] += known_share
    z, labels = looks.z.double().flatten(1, 2), looks.labels.repeat(sizes)  # (S, F N, classes), (F N,)
    numbers = torch.zeros(2, channels, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([numbers], max_iter=100, line_search_fn="strong_wolfe")
    best, least = numbers.detach().clone(), math.inf

    def loss() -> Tensor:
        nonlocal best, least
        optimizer.zero_grad()
        joined = merge(scores(z, kind, _Numbers(numbers[0].exp(), numbers[1])), kind, None)
        losses = F.cross_entropy(joined, labels, reduction="none").view(sizes, pictures)
        total = weights @ losses.mean(1) + RIDGE * numbers.square().sum()
        total.backward()
        if float(total.detach()) < least:  # where the loss jumps, as of "confident", the last step may lead anywhere
            best, least = numbers.detach().clone(), float(total.detach())
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    logs, biases = best
    return Calibration(tuple(logs.exp().tolist()), tuple((biases - biases.mean()).tolist()))


def fit_size(found: Tensor, sizes: Sequence[float]) -> tuple[float, float] | None:
    """What brings the median estimates to the true sizes, as a line through their logarithms; None if there is none.

    Shape:
        `(F, N)`, logarithms
    """
    x, y = found.median(1).values.double(), torch.tensor(sizes, dtype=torch.float64).log()
    spread = x.var(correction=0)
    slope = float(((x - x.mean()) * (y - y.mean())).mean() / spread) if spread > 0 else 0.0
    return (float(y.mean() - slope * x.mean()), slope) if 0 < slope <= STEEPEST else None


def choose(looks: Looks, kind: str) -> JoinFit:
    """The fit with the least loss on pictures that it was not fitted on, if one passes the test.

    Every second picture is of one half, those between them of the other: their order mixes the classes.
    """
    alone = float((looks.alone.argmax(1) != looks.labels).double().mean())
    plain = _test(looks, kind, _no_fit)
    fits: list[Fit] = [partial(fit_numbers, kind=kind, known_share=share) for share in KNOWN_SHARES]
    tested = [(_test(looks, kind, fit), fit) for fit in fits]
    better = [one for one in tested if one[0].loss < plain.loss and one[0].error <= plain.error]
    passed = [one for one in better if one[0].known_error <= alone + ROOM]
    nearest = min(better, key=lambda one: (one[0].known_error, one[0].loss), default=(plain, _no_fit))
    if nearest[0].known_error >= plain.known_error:
        nearest = plain, _no_fit
    found, fit = min(passed, key=lambda one: one[0].loss, default=nearest)
    calibration = fit(looks)
    sized = _test(looks, kind, lambda part: _with_size(part, kind, fit(part)))
    if sized.size_error < found.size_error:
        found, calibration = sized, _with_size(looks, kind, calibration)
    if passed:
        about = "fitted: a temperature and a bias for each channel"
    elif fit is not _no_fit:
        about = "fitted: better than the plain join, but at size 1 not as good as the network alone"
    elif better:
        about = f"not fitted: at size 1 it would have more than {100 * ROOM:g} points more error than the network alone"
    else:
        about = "not fitted: it would not be better on pictures held out"
    about += "; estimated sizes are corrected" if calibration is not None and calibration.size != (0.0, 1.0) else ""
    pairs = zip(plain, found, strict=True)
    error, known_error, loss, ece, size_error = ((float(before), float(after)) for before, after in pairs)
    return JoinFit(calibration, about, looks.sizes, len(looks.labels), error, known_error, alone, loss, ece, size_error)


Fit = Callable[[Looks], Calibration | None]


class _Measures(NamedTuple):
    """Of a join, on pictures that it was not fitted on; `JoinFit` explains them."""

    error: float
    known_error: float
    loss: float
    ece: float
    size_error: float


def _test(looks: Looks, kind: str, fit: Fit) -> _Measures:
    """Fit on each half of the pictures, and measure on the other."""
    count, classes = len(looks.labels), looks.z.shape[-1]
    joined, logs = torch.empty(len(looks.sizes), count, classes), torch.empty(len(looks.sizes), count)
    for start in (0, 1):
        half = slice(start, None, 2)
        calibration = fit(_take(looks, slice(1 - start, None, 2)))
        z = _take(looks, half).z.flatten(1, 2)
        said = join(z, kind, None, calibration)
        joined[:, half] = said.unflatten(0, (len(looks.sizes), -1))
        found = find_size(z, said, kind, None, looks.scales, calibration).log()
        logs[:, half] = found.unflatten(0, (len(looks.sizes), -1))
    labels = looks.labels.expand(len(looks.sizes), -1)
    chances, said = joined.softmax(-1).max(-1)
    wrong = said != labels
    return _Measures(
        float(wrong.double().mean()),
        float(wrong[looks.sizes.index(1.0)].double().mean()),
        float(F.cross_entropy(joined.flatten(0, 1), labels.flatten())),
        calibration_error(chances.flatten(), ~wrong.flatten()),
        float((logs.median(1).values - torch.tensor(looks.sizes).log()).abs().mean().exp()),
    )


def _no_fit(looks: Looks) -> None:
    return None


def _with_size(looks: Looks, kind: str, calibration: Calibration | None) -> Calibration | None:
    """The same with a correction of the estimated sizes."""
    z, count = looks.z.flatten(1, 2), len(looks.scales)
    logs = find_size(z, join(z, kind, None, calibration), kind, None, looks.scales, calibration).log()
    line = fit_size(logs.unflatten(0, (len(looks.sizes), -1)), looks.sizes)
    usual = calibration or Calibration((1.0,) * count, (0.0,) * count)
    return calibration if line is None else replace(usual, size=line)


def _take(looks: Looks, rows: slice) -> Looks:
    return looks._replace(z=looks.z[:, :, rows], alone=looks.alone[rows], labels=looks.labels[rows])


def calibration_error(confidences: Tensor, right: Tensor) -> float:
    """The expected calibration error: how far confidence and share of right answers are apart, in bins of confidence.

    Args:
        confidences: Probabilities of the classes that won, `(N,)`.
        right: Whether they are the true ones, `(N,)`.

    Example:
        >>> round(calibration_error(torch.tensor([0.9, 0.9, 0.9, 0.9]), torch.tensor([True, True, True, False])), 2)
        0.15
    """
    bins = (confidences.double() * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, confidences.double() - right.double())
    return float(gaps.abs().sum() / max(1, len(bins)))


class Trade(NamedTuple):
    """What a value of `ScaleChannels.sure` costs."""

    sure: float
    cost: float  # share of the pixels of all channels that are looked at, mean over the pictures
    error: float


@torch.no_grad()
def measure_sure(
    model: ScaleChannels,
    images: Tensor,
    labels: Tensor,
    values: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99, 0.995, 0.999, 1.0),
    sizes: Sequence[float] = (1.0,),
) -> list[Trade]:
    """Cost and error of a network with channels for each value of `sure`; all channels are computed once.

    Args:
        model: It returns logits. A calibration makes its probabilities, and so the values, mean what they say.
        images: `(N, C, H, W)`.
        labels: `(N,)`.
        values: Above 0 and up to 1.
        sizes: At which they are shown, as in :func:`fit_join`; by default as they are.
    """
    _check_pictures(images, labels, 1)
    return weigh_sure(model, look(model, images, labels, tuple(sizes)), (images.shape[-2], images.shape[-1]), values)


def weigh_sure(model: ScaleChannels, looks: Looks, image: tuple[int, int], values: Sequence[float]) -> list[Trade]:
    """The same from what each channel said of pictures of this height and width."""
    areas = torch.tensor([model.with_scales((scale,)).pixels(*image) for scale in model.scales])
    z, labels = looks.z.flatten(1, 2), looks.labels.repeat(len(looks.sizes))  # (S, F N, classes)
    so_far = [model.join_first(z[: count + 1]) for count in range(len(z))]
    chances = torch.stack([said.softmax(1).amax(1) for said in so_far])  # (S, F N)
    wrong = torch.stack([said.argmax(1) != labels for said in so_far])
    found = []
    for sure in values:
        done = chances >= (sure if sure < 1 else math.inf)
        done[-1] = True
        last = done.int().argmax(0)  # the first channel after which a picture is done: (F N,)
        cost = float((areas.cumsum(0)[last] / areas.sum()).mean())
        found.append(Trade(float(sure), cost, float(wrong.gather(0, last[None]).double().mean())))
    return found
