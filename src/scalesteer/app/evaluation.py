"""What a network says of images, and how often it is wrong: in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from scalesteer.app.device import arithmetic
from scalesteer.app.distributed import ALONE, Processes
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import ImageSet
from scalesteer.fitting import JoinFit, calibration_error, fit_join

EVALUATION_BATCH = {"cpu": 100, "cuda": 1000}  # where a step is slow a request to stop must not wait for many images
EVALUATION_PIXELS = {"cpu": 1 << 18, "cuda": 1 << 24}  # in such a batch
MOST_SIZES = 64  # that have an error each; of more, bins have one
MOST_FITTED = 1000  # validation pictures that a join is fitted on
SCALE_BINS = tuple(itertools.pairwise(round(0.3 + 0.1 * i, 1) for i in range(8)))  # and more, see split_by_scale


class Answers(NamedTuple):
    """What a model says of images, and what is true: on the CPU, `(N,)` each."""

    labels: Tensor
    confidences: Tensor  # the probabilities of the labels
    sizes: Tensor | None  # of the objects by the model, relative to training, if it has scale channels
    true: Tensor  # labels
    true_sizes: Tensor
    loss: float  # mean of the cross-entropy
    classes: tuple[str, ...]  # names, if the images have them
    binned: bool  # whether the true sizes were drawn from a range


@torch.no_grad()
def answer(
    model: nn.Module,
    images: ImageSet | Iterable[ImageSet],
    precision: str = "float32",
    between_batches: Callable[[], None] = lambda: None,
    processes: Processes = ALONE,
) -> Answers:
    """Classify a set of images, or several one after the other, each on its device and that of the model.

    Several `processes` call this together: they take the batches in turns, so that each image is seen once, in the
    same batch as with one process, and all return the same.
    """
    model.eval()
    channels, loss, binned = isinstance(model, ScaleChannels), 0.0, False
    said, true, true_sizes = list[list[Tensor]](), list[Tensor](), list[Tensor]()
    classes: tuple[str, ...] = ()
    for part in (images,) if isinstance(images, ImageSet) else images:
        half = torch.autocast(part.device.type, torch.bfloat16, enabled=precision == "bf16")
        total, start = torch.zeros((), dtype=torch.float64, device=part.device), 0
        # Made once: small tensors that stay, between large ones that do not, would let memory grow with every batch.
        kinds = torch.int64, torch.float32, torch.float32
        said.append([torch.zeros(len(part), dtype=kind, device=part.device) for kind in kinds])
        for i, (x, labels) in enumerate(part.batches(evaluation_batch(model, part))):
            rows = slice(start, start := start + len(x))
            if i % processes.count == 0:
                between_batches()
            if i % processes.count != processes.rank:  # another one's: to what it says, what is zero here is added
                continue
            with arithmetic(precision), half:
                found, size = model(x, return_scales=True) if channels else (model(x), said[-1][2][rows])
            logits = found.float()
            total += F.cross_entropy(logits, labels, reduction="sum").double()
            said[-1][0][rows], said[-1][1][rows] = logits.argmax(1), logits.softmax(1).amax(1)
            said[-1][2][rows] = size
        loss += float(processes.total(total))
        true.append(part.labels.cpu())
        true_sizes.append(part.sizes.cpu())
        classes = tuple(part.about.get("classes", ()))
        binned = binned or "scale_range" in part.about
    labels, confidences, sizes = (processes.total(torch.cat(column)).cpu() for column in zip(*said, strict=True))
    expected = torch.cat(true)
    own = sizes if channels else None
    return Answers(
        labels, confidences, own, expected, torch.cat(true_sizes), loss / max(1, len(expected)), classes, binned
    )


def errors(answers: Answers) -> dict[str, Any]:
    """Error, mean loss and error by size.

    Returns `error`, `loss`, `ece` (the expected calibration error), the number of `images` and `by_scale`, rows of
    `from`, `to`, `images` and `error`: one for each size if the sizes are few, or else for each of `SCALE_BINS`; and
    `by_class`, rows of `class`, `images` and `error`, with the names of the classes if the images have them.
    `precision`, `recall`, `f1` and `scores` are those of :func:`precision_and_recall`. Answers with sizes also get
    `size_correlation`, the rank correlation of the estimated size with the true one, if both vary.
    """
    missed, classes = (answers.labels != answers.true).numpy(), answers.true.numpy()
    true_sizes, names = answers.true_sizes.numpy(), answers.classes

    def row(chosen: NDArray[np.bool_]) -> dict[str, Any]:
        return {"images": int(chosen.sum()), "error": float(missed[chosen].mean())}

    by_scale = [{"from": low, "to": high} | row(c) for (low, high), c in split_by_scale(true_sizes, answers.binned)]
    labels = np.unique(classes).tolist()
    by_class = [{"class": names[label] if names else label} | row(classes == label) for label in labels]
    found = {"error": float(missed.mean()), "loss": answers.loss, "by_scale": by_scale, "images": len(missed)}
    found |= {"by_class": by_class, "ece": calibration_error(answers.confidences, answers.labels == answers.true)}
    found |= precision_and_recall(answers)
    correlation = None if answers.sizes is None else rank_correlation(answers.sizes.numpy(), true_sizes)
    return found if correlation is None else found | {"size_correlation": correlation}


def fit_channels(model: ScaleChannels, images: ImageSet, precision: str = "float32") -> JoinFit:
    """Fit the join of a network's channels on some of these images, evenly chosen."""
    rows = torch.linspace(0, len(images) - 1, min(len(images), MOST_FITTED)).round().long()
    x, labels = images.take(rows.to(images.device))
    with arithmetic(precision), torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bf16"):
        return fit_join(model, x, labels)


def precision_and_recall(answers: Answers) -> dict[str, Any]:
    """How good the answers are class by class: `precision`, `recall` and `f1`, and `scores`, the same of each class.

    Precision is the share of those with a label that have it rightly, recall the share of a class that is found, and F1
    their harmonic mean. The three are means over the classes that are there, each counting alike. A class that nothing
    was taken for has a precision of zero.
    """
    true, said = answers.true, answers.labels
    rows = list[dict[str, Any]]()
    for label in true.unique().tolist():
        right = float(((true == label) & (said == label)).sum())
        precision, recall = right / max(1, int((said == label).sum())), right / int((true == label).sum())
        f1 = 2 * precision * recall / (precision + recall) if right else 0.0
        name = answers.classes[label] if answers.classes else label
        rows.append({"class": name, "precision": precision, "recall": recall, "f1": f1})
    means = {key: float(np.mean([row[key] for row in rows])) for key in ("precision", "recall", "f1")}
    return means | {"scores": rows}


def evaluate(
    model: nn.Module,
    images: ImageSet | Iterable[ImageSet],
    precision: str = "float32",
    between_batches: Callable[[], None] = lambda: None,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """The :func:`errors` of a model's :func:`answer` on images."""
    return errors(answer(model, images, precision, between_batches, processes))


def pixels_seen(model: nn.Module, height: int, width: int) -> float:
    """How many pixels of an image a model looks at: in all channels, if it has them."""
    return model.pixels(height, width) if isinstance(model, ScaleChannels) else height * width


def evaluation_batch(model: nn.Module, images: ImageSet) -> int:
    """How many images go through a model at once: as many as memory has room for, with the area of all channels."""
    area, kind = pixels_seen(model, *images.images.shape[-2:]), images.device.type
    return max(1, min(EVALUATION_BATCH.get(kind, 500), int(EVALUATION_PIXELS.get(kind, 1 << 20) / area)))


def split_by_scale(
    scales: NDArray[Any], binned: bool = True
) -> Iterator[tuple[tuple[float, float], NDArray[np.bool_]]]:
    """The bins of scale that are not empty, and which images each one holds; the last one holds its end too.

    Below and above `SCALE_BINS` there are more where they are needed: 0 to 0.1, ..., 0.2 to 0.3; 1 to 2, 2 to 4, ...

    If not `binned`, each scale is a bin of its own, unless there are more than `MOST_SIZES`.
    """
    values = np.unique(scales)
    if not binned and len(values) <= MOST_SIZES:
        for value in values:
            size = float(f"{value:.6g}")  # without the digits that float32 adds
            yield (size, size), scales == value
        return
    bins, largest = [*itertools.pairwise((0.0, 0.1, 0.2, 0.3)), *SCALE_BINS], values.max(initial=0)
    while bins[-1][1] < largest:
        bins.append((bins[-1][1], 2 * bins[-1][1]))
    for low, high in bins:
        chosen = (scales >= low) & ((scales < high) | ((low, high) == bins[-1]))
        if chosen.any():
            yield (low, high), chosen


def by_training_size(by_scale: list[dict[str, Any]], trained_at: Iterable[float]) -> dict[str, float]:
    """Mean errors inside and outside the sizes of training, each size counting alike; none where all were trained."""
    sizes = list(trained_at)
    if not sizes:
        return {}
    inside, outside = list[float](), list[float]()
    for row in by_scale:
        trained = min(sizes) * 0.99 <= row["from"] <= max(sizes) * 1.01  # with room for rounded numbers
        (inside if trained else outside).append(row["error"])
    means = {"test_error_inside": inside, "test_error_outside": outside}
    return {name: float(np.mean(errors)) for name, errors in means.items() if outside and errors}


def rank_correlation(first: NDArray[Any], second: NDArray[Any]) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None if one of the two does not vary."""
    ranks = []
    for values in (first, second):
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        if len(counts) < 2:
            return None
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[places])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
