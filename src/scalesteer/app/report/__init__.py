"""What became of a run, on one page: report.html, which needs no other file, no script and no network."""

import base64
import io
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from scalesteer import __version__
from scalesteer._text import printable
from scalesteer.app.config import Run
from scalesteer.app.evaluation import Answers
from scalesteer.app.loop import best_epoch
from scalesteer.datasets import ImageSet
from scalesteer.files import require, write_atomically
from scalesteer.fitting import calibration_error

MOST_CLASSES = 30  # in the confusion matrix
MOST_ROWS = 100  # in the table of classes
MOST_MISTAKES = 24
SIZE_BINS = 8
Counts = NDArray[np.int64]
FOLDER = Path(__file__).parent


def write_report(
    directory: Path,
    run: Run,
    parameters: int,
    history: Sequence[Mapping[str, float]],
    images: ImageSet,
    answers: Answers,
    join: Mapping[str, Any] | None = None,
) -> Path:
    """Write report.html into a run's directory: errors by class and size, confusions, curves, the worst mistakes.

    The page is about the network's `answers` on `images`, those for testing, or with `tuning` those for validation.
    `history` has an entry with `epoch`, `loss`, `val_loss` and `val_error` for each epoch. The files of mistakes are
    linked if the images have `paths`. `join` is what the fit of scale channels found, if there was one. An earlier page
    is replaced when the new one is complete. Its path is returned.
    """
    part = "validation" if run.training.tuning else "test"
    if not len(images):
        raise ValueError(f"the {part} part has no pictures: there is nothing to report.")
    true, said = answers.true.numpy(), answers.labels.numpy()
    names = list(map(str, answers.classes))
    names += map(str, range(len(names), int(max(true.max(), said.max())) + 1))
    confusion = np.bincount(true * len(names) + said, minlength=len(names) ** 2).reshape(len(names), len(names))
    estimated = [] if answers.sizes is None else [
        ("Error by size that answered", "size relative to training", _by_size(answers.sizes.numpy(), true != said))
    ]  # fmt: skip
    by_size = ("Error by size of the object", "size", _by_size(answers.true_sizes.numpy(), true != said))
    note = "The true class, and below it what the network said and how certain it was."
    note += " The names lead to the files, where they are still in their place." if images.paths else ""
    page = _template().render(
        title=f"{getattr(run.data, 'images', run.data.name)}: {run.network.model}",
        style=Markup((FOLDER / "report.css").read_text(encoding="utf-8")),
        version=__version__,
        percent=_percent,
        part=part,
        count=len(true),
        wrong=int((true != said).sum()),
        names=names,
        facts=[*_facts(run, parameters, history, confusion, names), *_certainty(answers, join)],
        command=run.command,
        charts=_charts(history),
        classes=_by_class(confusion, names),
        most_rows=MOST_ROWS,
        sizes=[by_size, *estimated],
        confusion=confusion.tolist(),
        shown=_most_confused(confusion),
        mistakes=_mistakes(images, answers, names, directory),
        mistakes_note=note,
    )
    path = directory / "report.html"
    write_atomically(path, page.encode(errors="replace"))
    return path


def _template() -> jinja2.Template:
    def clean(value: Any) -> Any:  # names may hold whatever a file's name can
        return printable(value) if type(value) is str else value

    loader = jinja2.FileSystemLoader(FOLDER)
    room = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, finalize=clean)
    return room.get_template("page.html")


def _facts(
    run: Run, parameters: int, history: Sequence[Mapping[str, float]], confusion: Counts, names: Sequence[str]
) -> list[tuple[str, str]]:
    """What stands below the error."""
    count, wrong = int(confusion.sum()), int(confusion.sum() - confusion.trace())
    low, high = wilson_interval(wrong, count)
    common = int(confusion.sum(1).argmax())
    usual = f"{_percent(1 - confusion[common].sum() / count)} error of always saying {names[common]}"
    facts = [
        ("95 % interval", f"{_percent(low)} to {_percent(high)}"),
        ("for comparison", usual),
        ("network", f"{run.network.model}, {parameters:,} parameters"),
    ]
    if history:
        best = best_epoch(history, run.training.one_size_epochs)
        chosen = f"{_percent(best['val_error'])} at epoch {int(best['epoch']) + 1} of {len(history)}"
        facts.append(("validation error", f"{chosen}, which chose the weights"))
    return facts


def _certainty(answers: Answers, join: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """How far confidence and share of right answers are apart, and what a fitted join changed."""
    found = calibration_error(answers.confidences, answers.labels == answers.true)
    facts = [("calibration error", f"{_percent(found)}: how far confidence and share of right answers are apart")]
    if join is None:
        return facts
    changes = {"error": join["error"], "calibration error": join["ece"], "error at size 1": join["known_error"]}
    shown = ", ".join(f"{name} {_percent(old)} to {_percent(new)}" for name, (old, new) in changes.items())
    alone = f"the network without scale channels has {_percent(join['alone_error'])} there"
    sizes = f"at sizes {min(join['sizes']):.2g} to {max(join['sizes']):.2g}"
    return [*facts, ("join of channels", f"{join['about']}. Validation pictures {sizes}: {shown}; {alone}")]


def wilson_interval(wrong: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share, which also holds for few pictures and for none that is wrong.

    >>> [round(end, 4) for end in wilson_interval(0, 100)]
    [0.0, 0.037]
    """
    share, room = wrong / count, z * z / count
    centre = (share + room / 2) / (1 + room)
    reach = math.sqrt(room * (share * (1 - share) + room / 4)) / (1 + room)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def _charts(history: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    if not history:
        return []
    epochs = [int(entry["epoch"]) + 1 for entry in history]
    loss = {"training": [entry["loss"] for entry in history], "validation": [entry["val_loss"] for entry in history]}
    error = {"validation": [100 * entry["val_error"] for entry in history]}
    return [_chart("Loss", epochs, loss), _chart("Error, %", epochs, error)]


def _chart(title: str, epochs: Sequence[int], series: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Where the lines of a chart over epochs lie, from zero."""
    width, height, left, top = 440, 230, 44, 30
    end, bottom = width - 12, height - 32
    ticks = nice_ticks(max(max(values) for values in series.values()))
    first, last = epochs[0], epochs[-1]

    def place(epoch: float, value: float) -> tuple[float, float]:
        across = (epoch - first) / (last - first) if last > first else 0.5
        x, y = left + across * (end - left), bottom - value / ticks[-1] * (bottom - top)
        return round(x, 1), round(y, 1)

    lines = []
    for i, (name, values) in enumerate(series.items()):
        points = [place(epoch, value) for epoch, value in zip(epochs, values, strict=True)]
        line = {"name": name, "kind": "line validation" if name == "validation" else "line"}
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dot = points[0] if len(points) == 1 else None
        lines.append({**line, "points": text, "dot": dot, "at": end - 96 * (len(series) - i)})
    marks = range(first, last + 1, max(1, math.ceil((last - first) / 6)))
    return {
        "title": title, "label": f"{title} over {len(epochs)} epochs", "lines": lines,
        "width": width, "height": height, "left": left, "end": end, "bottom": bottom,
        "ticks": [(f"{tick:g}", place(first, tick)[1]) for tick in ticks],
        "epochs": [(epoch, place(epoch, 0)[0]) for epoch in marks],
    }  # fmt: skip


def nice_ticks(top: float) -> list[float]:
    """Round numbers from zero to at least `top`, about five.

    >>> nice_ticks(87.5), nice_ticks(0.0)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.0, 1.0])
    """
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= top * (1 - 1e-9))
    return [step * i for i in range(math.ceil(top / step * (1 - 1e-9)) + 1)]


def _by_class(confusion: Counts, names: Sequence[str]) -> list[tuple[float, str, int, str]]:
    """Error, name, pictures, and what it is most often taken for, of each class with pictures; the worst first."""
    counts, right = confusion.sum(1), confusion.diagonal()
    errors = [(1 - right[i] / counts[i], i) for i in range(len(names)) if counts[i]]
    rows = []
    for error, i in sorted(errors, key=lambda entry: (-entry[0], entry[1])):
        others = np.where(np.arange(len(names)) == i, 0, confusion[i])
        said = int(others.argmax())
        rows.append((error, names[i], int(counts[i]), f"{names[said]} ({others[said]:,})" if others[said] else ""))
    return rows


def _by_size(sizes: NDArray[Any], missed: NDArray[np.bool_]) -> list[tuple[str, int, float]]:
    """A row for each size, or for bins of equally many pictures where sizes are many; nothing if all are alike."""
    values = np.unique(sizes)
    if values[-1] < values[0] * 1.02:
        return []
    if len(values) <= SIZE_BINS * 2:
        groups = [(f"{value:.3g}", sizes == value) for value in values]
    else:
        ends = np.unique(np.quantile(sizes, np.linspace(0, 1, SIZE_BINS + 1)))
        groups = [
            (f"{low:.3g} to {high:.3g}", (sizes >= low) & ((sizes < high) | (high == ends[-1])))
            for low, high in itertools.pairwise(ends)
        ]
    return [(name, int(chosen.sum()), float(missed[chosen].mean())) for name, chosen in groups if chosen.any()]


def _most_confused(confusion: Counts) -> list[int]:
    """The classes that the matrix shows: all, or those with the most mistakes."""
    if len(confusion) <= MOST_CLASSES:
        return list(range(len(confusion)))
    wrong = confusion - np.diag(confusion.diagonal())
    worst = np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:MOST_CLASSES]
    return sorted(worst.tolist())


def _mistakes(images: ImageSet, answers: Answers, names: Sequence[str], directory: Path) -> list[dict[str, str]]:
    """The mistakes that the network is most certain of, as pictures, with the names of their files."""
    true, said, confidences = answers.true.numpy(), answers.labels.numpy(), answers.confidences.numpy()
    wrong = np.flatnonzero(true != said)
    found = []
    for row in wrong[np.argsort(-confidences[wrong], kind="stable")][:MOST_MISTAKES].tolist():
        one = {"source": data_uri(images.images[row].cpu().numpy()), "true": names[true[row]]}
        one |= {"said": f"{names[said[row]]}, {100 * confidences[row]:.0f} %", "file": ""}
        if images.paths:
            path = images.paths[row]
            # Quoted it has no colon, so that it can be nothing but a path.
            one |= {"file": os.path.basename(path), "address": quote(os.fsencode(os.path.relpath(path, directory)))}
        found.append(one)
    return found


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """A picture, `(H, W)` or `(C, H, W)`, inside the page; of other than three channels the first is shown."""
    grey = pixels.reshape(-1, *pixels.shape[-2:])[0]
    pixels = pixels.transpose(1, 2, 0) if len(pixels) == 3 and pixels.ndim == 3 else grey
    stream = io.BytesIO()
    require("PIL.Image").fromarray(pixels).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
