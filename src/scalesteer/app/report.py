"""What became of a run, on one page: report.html, which needs no other file, no script and no network."""

import base64
import io
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from torch import nn

from scalesteer import __version__
from scalesteer._text import printable
from scalesteer.app.config import RunConfig
from scalesteer.app.loop import as_tested, best_epoch
from scalesteer.app.predict import classify
from scalesteer.datasets import ImageSet
from scalesteer.files import require, write_atomically
from scalesteer.models import count_parameters

MOST_CLASSES = 30  # in the confusion matrix
MOST_ROWS = 100  # in the table of classes
MOST_MISTAKES = 24
SIZE_BINS = 8
Counts = NDArray[np.int64]


def write_report(
    directory: Path,
    model: nn.Module,
    config: RunConfig,
    history: Sequence[Mapping[str, float]],
    test: ImageSet,
    val: ImageSet,
) -> Path:
    """Write report.html into a run's directory: errors by class and size, confusions, curves, the worst mistakes.

    The network is tested as the configuration says; with `config.tuning` the test images are not looked at, and the
    page is about `val`. `history` has an entry with `epoch`, `loss`, `val_loss` and `val_error` for each epoch. Names
    of classes are read from the images' `about`, if it has `classes`; the files of mistakes are linked if there are
    `paths`. An earlier page is replaced when the new one is complete. Its path is returned.
    """
    model = as_tested(model, config)
    part, images = ("validation", val) if config.tuning else ("test", test)
    if not len(images):
        raise ValueError(f"the {part} part has no pictures: there is nothing to report.")
    answers = classify(model, images, config.precision)
    true, said = (labels.cpu().numpy() for labels in (images.labels, answers.labels))
    names = [printable(str(name)) for name in images.about.get("classes", ())]
    names += map(str, range(len(names), int(max(true.max(), said.max())) + 1))
    confusion = np.bincount(true * len(names) + said, minlength=len(names) ** 2).reshape(len(names), len(names))
    sections = [
        _headline(model, config, history, part, confusion, names),
        _curves(history),
        _by_class(confusion, names),
        _by_size("Error by size of the object", "size", images.sizes.cpu().numpy(), true != said),
    ]
    if answers.sizes is not None:
        title = "Error by size that answered"
        sections.append(_by_size(title, "size relative to training", answers.sizes.numpy(), true != said))
    sections.append(_confusion_matrix(confusion, names))
    sections.append(_mistakes(images, answers.confidences.numpy(), said, names, directory))
    title = f"{config.images or config.dataset}: {config.model}"
    path = directory / "report.html"
    write_atomically(path, _page(title, sections).encode(errors="replace"))
    return path


def _page(title: str, sections: Iterable[str]) -> str:
    # Nothing may be loaded and no script runs, whatever a class is called.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{_text(title)}</h1>
{"".join(section for section in sections)}
<footer>scalesteer {__version__}</footer>
</main>
</body>
</html>
"""


def _headline(
    model: nn.Module,
    config: RunConfig,
    history: Sequence[Mapping[str, float]],
    part: str,
    confusion: Counts,
    names: Sequence[str],
) -> str:
    """The error with its interval, and what it is the error of."""
    count, wrong = int(confusion.sum()), int(confusion.sum() - confusion.trace())
    low, high = wilson_interval(wrong, count)
    common = int(confusion.sum(1).argmax())
    facts = {
        "95 % interval": f"{_percent(low)} to {_percent(high)}",
        "for comparison": f"{_percent(1 - confusion[common].sum() / count)} error of always saying {names[common]}",
        "network": f"{config.model}, {count_parameters(model):,} parameters",
    }
    if history:
        best = best_epoch(history, config)
        chosen = f"{_percent(best['val_error'])} at epoch {int(best['epoch']) + 1} of {len(history)}"
        facts["validation error"] = f"{chosen}, which chose the weights"
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())
    return f"""<section class="headline">
<p class="error"><b>{_percent(wrong / count)}</b> error</p>
<p>{wrong:,} of {count:,} {part} pictures of {len(confusion):,} classes are classified wrongly.</p>
<dl>{rows}</dl>
<pre>{_text(config.command)}</pre>
</section>
"""


def wilson_interval(wrong: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share, which also holds for few pictures and for none that is wrong.

    >>> [round(end, 4) for end in wilson_interval(0, 100)]
    [0.0, 0.037]
    """
    share, room = wrong / count, z * z / count
    centre = (share + room / 2) / (1 + room)
    reach = math.sqrt(room * (share * (1 - share) + room / 4)) / (1 + room)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def _curves(history: Sequence[Mapping[str, float]]) -> str:
    if not history:
        return ""
    epochs = [int(entry["epoch"]) + 1 for entry in history]
    loss = {"training": [entry["loss"] for entry in history], "validation": [entry["val_loss"] for entry in history]}
    error = {"validation": [100 * entry["val_error"] for entry in history]}
    charts = _chart("Loss", epochs, loss) + _chart("Error, %", epochs, error)
    return f'<section><h2>Learning curves</h2><div class="charts">{charts}</div></section>\n'


def _chart(title: str, epochs: Sequence[int], series: Mapping[str, Sequence[float]]) -> str:
    """Lines over epochs, from zero, as SVG."""
    width, height, left, right, top, bottom = 440, 230, 44, 12, 30, 32
    ticks = nice_ticks(max(max(values) for values in series.values()))
    first, last = epochs[0], epochs[-1]

    def place(epoch: float, value: float) -> tuple[float, float]:
        across = (epoch - first) / (last - first) if last > first else 0.5
        return left + across * (width - left - right), height - bottom - value / ticks[-1] * (height - top - bottom)

    parts = [f'<text class="title" x="{left}" y="16">{_text(title)}</text>']
    for tick in ticks:
        _, y = place(first, tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    step = max(1, math.ceil((last - first) / 6))
    for epoch in range(first, last + 1, step):
        x, _ = place(epoch, 0)
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle">{epoch}</text>')
    parts.append(f'<text x="{width - right}" y="{height - 2}" text-anchor="end">epoch</text>')
    for i, (name, values) in enumerate(series.items()):
        kind = "line validation" if name == "validation" else "line"
        points = [place(epoch, value) for epoch, value in zip(epochs, values, strict=True)]
        parts.append(f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
        if len(points) == 1:
            parts.append(f'<circle class="{kind}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>')
        at = width - right - 96 * (len(series) - i)
        parts.append(f'<line class="{kind}" x1="{at}" x2="{at + 18}" y1="12" y2="12"/>')
        parts.append(f'<text x="{at + 24}" y="16">{_text(name)}</text>')
    label = f"{title} over {len(epochs)} epochs"
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{_text(label)}">{"".join(parts)}</svg>'


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


def _by_class(confusion: Counts, names: Sequence[str]) -> str:
    """The worst classes first; those without pictures have no error."""
    counts, right = confusion.sum(1), confusion.diagonal()
    errors = [(1 - right[i] / counts[i], i) for i in range(len(names)) if counts[i]]
    rows = []
    for error, i in sorted(errors, key=lambda entry: (-entry[0], entry[1]))[:MOST_ROWS]:
        others = np.where(np.arange(len(names)) == i, 0, confusion[i])
        said = int(others.argmax())
        instead = f"{names[said]} ({others[said]:,})" if others[said] else ""
        rows.append([_text(names[i]), f"{counts[i]:,}", _bar(error), _text(instead)])
    left_out = len(errors) - len(rows)
    note = f"<p>The {MOST_ROWS} worst of {len(errors):,} classes.</p>" if left_out else ""
    table = _table(["class", "pictures", "error", "most often taken for"], rows)
    return f"<section><h2>Error by class</h2>{note}{table}</section>\n"


def _by_size(title: str, unit: str, sizes: NDArray[Any], missed: NDArray[np.bool_]) -> str:
    """A row for each size, or for bins of equally many pictures where sizes are many; nothing if all are alike."""
    values = np.unique(sizes)
    if values[-1] < values[0] * 1.02:
        return ""
    rows = []
    if len(values) <= SIZE_BINS * 2:
        groups = [(f"{value:.3g}", sizes == value) for value in values]
    else:
        ends = np.unique(np.quantile(sizes, np.linspace(0, 1, SIZE_BINS + 1)))
        groups = [
            (f"{low:.3g} to {high:.3g}", (sizes >= low) & ((sizes < high) | (high == ends[-1])))
            for low, high in itertools.pairwise(ends)
        ]
    for name, chosen in groups:
        if chosen.any():
            rows.append([name, f"{chosen.sum():,}", _bar(float(missed[chosen].mean()))])
    return f"<section><h2>{_text(title)}</h2>{_table([unit, 'pictures', 'error'], rows)}</section>\n"


def _confusion_matrix(confusion: Counts, names: Sequence[str]) -> str:
    """Rows are true classes, columns what was said; shaded by the share of the row."""
    shown, note = list(range(len(names))), ""
    if len(names) > MOST_CLASSES:
        wrong = confusion - np.diag(confusion.diagonal())
        worst = np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:MOST_CLASSES]
        shown = sorted(worst.tolist())
        note = f" Shown are the {MOST_CLASSES} of {len(names):,} classes with the most mistakes."
    head = "".join(f'<th scope="col"><span>{_text(names[i])}</span></th>' for i in shown)
    rows = []
    for i in shown:
        cells, total = [], max(1, int(confusion[i].sum()))
        for j in shown:
            count, kind = int(confusion[i, j]), "right" if i == j else "wrong"
            # From a tenth of the colour on, so that a single mistake among thousands is seen.
            shade = f' class="{kind}" style="--share:{10 + 90 * count / total:.0f}%"' if count else ""
            cells.append(f"<td{shade}>{count or ''}</td>")
        rows.append(f'<tr><th scope="row">{_text(names[i])}</th>{"".join(cells)}</tr>')
    return f"""<section><h2>Confusion matrix</h2>
<p>Rows are the true classes, columns what the network said.{note}</p>
<div class="scroll"><table class="matrix"><thead><tr><td></td>{head}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>
</section>
"""


def _mistakes(images: ImageSet, confidences: NDArray[Any], said: Counts, names: Sequence[str], directory: Path) -> str:
    """The mistakes that the network is most certain of, as pictures, with the names of their files."""
    true = images.labels.cpu().numpy()
    wrong = np.flatnonzero(true != said)
    if not len(wrong):
        return "<section><h2>Worst mistakes</h2><p>There are none.</p></section>\n"
    worst = wrong[np.argsort(-confidences[wrong], kind="stable")][:MOST_MISTAKES]
    figures = []
    for row in worst.tolist():
        source = data_uri(images.images[row].cpu().numpy())
        answer = f"{names[said[row]]}, {100 * confidences[row]:.0f} %"
        file = _link(images.paths[row], directory) if images.paths else ""
        figures.append(
            f'<figure><img src="{source}" alt=""><figcaption><b>{_text(names[true[row]])}</b>'
            f"<span>said: {_text(answer)}</span>{file}</figcaption></figure>"
        )
    note = "The true class, and below it what the network said and how certain it was."
    note += " The names lead to the files, where they are still in their place." if images.paths else ""
    grid = f'<div class="mistakes">{"".join(figures)}</div>'
    return f"<section><h2>Worst mistakes</h2><p>{note}</p>{grid}</section>\n"


def _link(path: str, directory: Path) -> str:
    """The name of a file that leads to it, for a page in a directory."""
    # Quoted it has no colon, so that it can be nothing but a path.
    address = quote(os.fsencode(os.path.relpath(path, directory)))
    return f'<a href="{address}">{_text(os.path.basename(path))}</a>'


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """A picture, `(H, W)` or `(C, H, W)`, inside the page; of other than three channels the first is shown."""
    grey = pixels.reshape(-1, *pixels.shape[-2:])[0]
    pixels = pixels.transpose(1, 2, 0) if len(pixels) == 3 and pixels.ndim == 3 else grey
    stream = io.BytesIO()
    require("PIL.Image").fromarray(pixels).save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _bar(error: float) -> str:
    return f'<span class="number">{_percent(error)}</span><span class="bar" style="--share:{error:.4f}"></span>'


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _text(text: str) -> str:
    return escape(printable(str(text)))
