"""Train on medium digits, test on small and large ones: a scale-steerable network against a plain one, on a CPU.

``make quickstart`` runs this file. Both networks see the same digits, shrunk to 0.5–0.75 of their size, and have about
the same number of parameters; then both are asked for sizes from 0.3 to 1.0. A table is printed, and a report with
figures goes to the folder `quickstart` of the checkout. ``make quickstart ALL=1`` adds the other networks of the paper
and goes to `quickstart-all` (the spatial transformer has a sixth more parameters); ``make quickstart VARIANTS=1`` takes
parts of SS-CNN away and goes to `quickstart-variants`.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from paper import figures, measures
from paper.results import mean_and_std
from scalesteer.data import DataError, ImageSet, load_split
from scalesteer.files import require
from scalesteer.models import Network, count_parameters, create_model
from scalesteer.training import environment, evaluate
from scalesteer.training.checkpoint import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "ss-cnn": "SS-CNN",
    "ss-cnn, points": "SS-CNN, sampled at points",
    "ss-cnn, one scale": "SS-CNN, one scale",
    "locally-scale-invariant-cnn": "LocScaleInv-CNN",
    "vector-field-cnn": "LocScaleEq-CNN",
    "spatial-transformer": "Spatial Transformer",
    "plain-cnn": "plain CNN",
}


@dataclass(frozen=True)
class Settings:
    """What the quickstart trains and tests; a smaller one makes a smaller run."""

    train_images: int = 3000
    test_images: int = 2000
    train_scales: tuple[float, float] = (0.5, 0.75)
    test_scales: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    models: tuple[str, ...] = ("ss-cnn", "plain-cnn")
    seeds: tuple[int, ...] = (0, 1)
    epochs: int = 10
    batch_size: int = 50
    lr: float = 0.01
    weight_decay: float = 0.01
    widths: tuple[int, int, int] = (12, 24, 36)
    # Digits at test are 0.4 to 2 times as large as in training: from half to twice, in steps of the root of two.
    filter_scales: tuple[float, ...] = (0.5, 0.7, 1.0, 1.4, 2.0)
    basis: str = "area"

    def images(self, part: str, scale_range: tuple[float, float]) -> ImageSet:
        """Digits of MNIST, shrunk; the digits of a part are the same whatever the scale."""
        sizes = (self.train_images, 0, self.test_images)
        return load_split("mnist-scale", 0, part, scale_range=scale_range, sizes=sizes)

    def model(self, name: str, seed: int) -> Network:
        """A new network: the same scales, widths, input size and fully connected layers for all."""
        torch.manual_seed(seed)
        name, _, variant = name.partition(", ")
        own: dict[str, Any] = {"widths": self.widths}
        if name == "vector-field-cnn":  # two filters a channel: fewer channels for as many parameters
            own["widths"] = tuple(math.ceil(width * 22 / 30) for width in self.widths)
        if name in ("ss-cnn", "locally-scale-invariant-cnn", "vector-field-cnn"):
            own["scales"] = (1.0,) if variant == "one scale" else self.filter_scales
        if name == "ss-cnn":
            own["basis"] = "paper" if variant == "points" else self.basis
        return create_model(name, upsample=1, **own)


MORE = {
    "all": Settings(models=tuple(name for name in TITLES if "," not in name), seeds=tuple(range(6))),
    "variants": Settings(models=tuple(name for name in TITLES if "ss-cnn" in name), seeds=tuple(range(6))),
}
"""Longer runs: every network of the paper; SS-CNN without its parts."""


def train(model: Network, images: ImageSet, settings: Settings, seed: int, title: str) -> None:
    """AdamW with a one-cycle learning rate; the last model is the one that is tested."""
    model.input_std.fill_(images.std)
    steps = settings.epochs * (len(images) // settings.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=steps)
    order = torch.Generator().manual_seed(seed)
    model.train()
    with require("tqdm").tqdm(total=steps, desc=title, unit="step", disable=None) as bar:
        for _ in range(settings.epochs):
            for x, labels in images.batches(settings.batch_size, generator=order, drop_last=True):
                loss = F.cross_entropy(model(x), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """Train and test everything, write the report and the numbers into a folder, and return the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    started, cpu_started = time.perf_counter(), time.process_time()
    train_images = settings.images("train", settings.train_scales)
    tests = [settings.images("test", (s, s)) for s in settings.test_scales]
    low, high = settings.train_scales
    unseen = [s for s in settings.test_scales if not low <= s <= high]
    runs = []
    models: dict[tuple[str, int], Network] = {}
    for seed in settings.seeds:
        for name in settings.models:
            model = models[name, seed] = settings.model(name, seed)
            title = f"{TITLES[name]}, seed {seed}"
            begun = time.perf_counter()
            train(model, train_images, settings, seed, title)
            trained = time.perf_counter()
            bar = require("tqdm").tqdm(tests, f"{title}, test", unit="size", disable=None, leave=False)
            errors = [evaluate(model, images)["error"] for images in bar]
            seconds = {"train": round(trained - begun, 1), "test": round(time.perf_counter() - trained, 1)}
            outside = float(np.mean([e for e, s in zip(errors, settings.test_scales, strict=True) if s in unseen]))
            runs.append({"model": name, "seed": seed, "errors": errors, "outside": outside, "seconds": seconds})
            print(
                f"{title}: {sum(seconds.values()):.0f} s, error at sizes never seen {100 * outside:.1f} %", flush=True
            )
    result: dict[str, Any] = {
        "settings": asdict(settings),
        "parameters": {name: count_parameters(models[name, settings.seeds[0]]) for name in settings.models},
        "runs": runs,
        "outside": unseen,
        "summary": summarize(runs),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu_started, 1),
        "threads": torch.get_num_threads(),
        "environment": environment(train_images) | {"command": " ".join(["make quickstart", *_flags(settings)])},
        "test_data": {
            str(s): images.about.get("digest") for s, images in zip(settings.test_scales, tests, strict=True)
        },
    }
    first = models["ss-cnn", settings.seeds[0]]
    result["winning_scale"] = {
        str(s): winning_scale(first, t) for s, t in zip(settings.test_scales, tests, strict=True)
    }
    result = json.loads(json.dumps(result))  # as it is read back
    pictures = draw(result, first, tests)
    write_atomically(folder / "index.html", page(result, pictures).encode())
    write_atomically(folder / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    return result


def _flags(settings: Settings) -> list[str]:
    return [f"{name.upper()}=1" for name, more in MORE.items() if settings == more]


def winning_scale(model: Network, images: ImageSet) -> float:
    """The scale that wins in the first layer, on average over the first 200 digits."""
    x, _ = next(images.batches(200))
    layer: Any = model.first
    return measures.mean_winning_scale(*measures.winning_scales(model, x), layer.scales)


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean errors over seeds, by network: at each scale, and over the scales outside the training range."""
    summary = {}
    for name in dict.fromkeys(r["model"] for r in runs):
        own = [r for r in runs if r["model"] == name]
        by_scale = np.mean([r["errors"] for r in own], axis=0).tolist()
        outside, std = mean_and_std([r["outside"] for r in own])
        summary[name] = {"errors": by_scale, "outside": outside, "std": std if len(own) > 2 else None}
    return summary


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: a column a scale and one for the mean outside the training range; a row a network."""
    low, high = result["settings"]["train_scales"]
    scales = result["settings"]["test_scales"]
    head = ["size of the digits", *(f"{s}{'*' if low <= s <= high else ''}" for s in scales), "mean outside"]
    return head, [[TITLES[name], *_percent(errors)] for name, errors in result["summary"].items()]


def _percent(errors: dict[str, Any]) -> list[str]:
    *cells, mean = (f"{100 * e:.1f}" for e in (*errors["errors"], errors["outside"]))
    return [*cells, f"{mean} ± {100 * errors['std']:.1f}" if errors.get("std") is not None else mean]


def note(result: dict[str, Any]) -> str:
    """What the table is about, in one sentence."""
    settings = result["settings"]
    low, high = settings["train_scales"]
    *counts, last = (f"{count:,}" for count in result["parameters"].values())
    counted = f"{', '.join(counts)} and {last}"
    spread = "± standard deviation " if len(settings["seeds"]) > 2 else ""
    return (
        f"Test error in %, mean {spread}over {len(settings['seeds'])} seeds; trained on "
        f"{settings['train_images']:,} MNIST digits shrunk to {low:g}–{high:g} of their size (* within that range), "
        f"tested on {settings['test_images']:,} others at each size; {counted} parameters."
    )


def verdict(result: dict[str, Any]) -> str:
    """What the numbers say, whichever way they fall."""
    ss, *others = (100 * own["outside"] for own in result["summary"].values())
    words = []
    for other, name in zip(others, list(result["summary"])[1:], strict=True):
        comparison = "below" if ss < other else "above" if ss > other else "the same as"
        words.append(f"{comparison} that of {TITLES[name]} ({other:.1f} %)")
    unseen = ", ".join(str(s) for s in result["outside"])
    compared = " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
    return f"At sizes it never saw, the SS-CNN's error is {ss:.1f} %, {compared} (mean over {unseen})."


def text_table(result: dict[str, Any]) -> str:
    """The table for a terminal."""
    head, body = rows(result)
    return "\n".join(
        f"{row[0]:<27}" + "".join(f"{cell:>7}" for cell in row[1:-1]) + f"{row[-1]:>14}" for row in [head, *body]
    )


def readme_table(result: dict[str, Any]) -> str:
    """The table and its note as Markdown."""
    head, body = rows(result)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    table = "\n".join("| " + " | ".join(cell.replace("*", "\\*") for cell in line) + " |" for line in lines)
    return f"{table}\n\n{note(result).replace('*', chr(92) + '*')}"


def outside_sentence(result: dict[str, Any]) -> str:
    """Every network's mean error outside the training range, in a sentence."""
    means = ", ".join(f"{TITLES[name]} {_percent(own)[-1]}" for name, own in result["summary"].items())
    seeds = len(result["settings"]["seeds"])
    return f"Mean error in % at the sizes never seen, ± standard deviation over {seeds} seeds: {means}."


def error_figure(result: dict[str, Any]) -> Figure:
    """Error against the size of the digits."""
    settings = result["settings"]
    curves = {TITLES[m]: [r["errors"] for r in result["runs"] if r["model"] == m] for m in result["summary"]}
    return figures.draw_errors(
        curves, settings["test_scales"], "size of the test digits", tuple(settings["train_scales"])
    )


def draw(result: dict[str, Any], model: Network, tests: Sequence[ImageSet]) -> dict[str, tuple[Figure, str]]:
    """The report's figures with their captions, by title."""
    scales = result["settings"]["test_scales"]
    chosen = sorted({round(i) for i in np.linspace(0, len(scales) - 1, 4)})
    winners = ", ".join(f"{mean:.2f} at {size}" for size, mean in result["winning_scale"].items())
    digits = torch.stack([tests[i][0][0] for i in chosen])  # the same digit at several sizes
    return {
        "Error against size": (
            error_figure(result),
            "Each line is a mean over seeds, each dot one seed. The shaded sizes are those seen in training.",
        ),
        "Learned filters at their scales": (
            figures.plot_filter_bank(model.first),
            "Filters of the SS-CNN's first layer, as learned. A row is one set of coefficients: the network learns it "
            "once and steers it to every scale by formula, without interpolation. (Square root of the magnitude.)",
        ),
        "Which scale wins": (
            figures.plot_winning_scales(model, digits, [f"size {scales[i]}" for i in chosen]),
            "One digit at several sizes. At each pixel the first layer keeps the scale that answers most; below, the "
            "scale that won for the strongest filter, and the mean over the coloured pixels. Over the first 200 test "
            f"digits the mean is {winners}.",
        ),
    }


STYLE = """
body{margin:0 auto;max-width:46rem;padding:1rem;font:1rem/1.55 system-ui,sans-serif;color:#1d2733;background:#fff}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.15rem;margin-top:2rem}
figure{margin:0}img{max-width:100%;height:auto;display:block}
figcaption,.note{color:#51606f;font-size:.9rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:.35rem .55rem;text-align:right;border-bottom:1px solid #dde3e9}
th:first-child,td:first-child{text-align:left}.verdict{font-size:1.1rem;font-weight:600}
pre{overflow-x:auto;background:#f4f6f8;padding:.8rem;border-radius:.4rem}
"""


def page(result: dict[str, Any], pictures: dict[str, tuple[Figure, str]]) -> str:
    """The report: one page that needs nothing but itself."""
    head, body = rows(result)
    parts = []
    for title, (figure, caption) in pictures.items():
        data = io.BytesIO()
        figure.savefig(data, dpi=140, metadata={"Software": None})
        source = base64.b64encode(data.getvalue()).decode()
        parts.append(
            f'<h2>{html.escape(title)}</h2><figure><img alt="{html.escape(title)}" '
            f'src="data:image/png;base64,{source}"><figcaption>{html.escape(caption)}</figcaption></figure>'
        )
    about = result["environment"]
    made = (
        f"Made by {about['command']} in {result['seconds']:.0f} s on {result['threads']} CPU threads; "
        f"scalesteer {about['scalesteer']} ({about['commit'] or 'no commit'}), torch {about['torch']}, "
        f"Python {about['python']}."
    )
    runs = [[f"{TITLES[r['model']]}, seed {r['seed']}", *_percent(r)] for r in result["runs"]]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>scalesteer: quickstart</title><style>{STYLE}</style></head><body>
<h1>Train on medium digits, test on small and large ones</h1>
<p class="verdict">{html.escape(verdict(result))}</p>
{_html_table([head, *body])}
<p class="note">{html.escape(note(result))}</p>
{"".join(parts)}
<h2>Every run</h2>{_html_table([head, *runs])}
<p class="note">{html.escape(made)} All numbers are in result.json beside this page.</p>
</body></html>
"""


def _html_table(lines: list[list[str]]) -> str:
    first, *others = [[html.escape(cell) for cell in line] for line in lines]
    head = "".join(f"<th>{cell}</th>" for cell in first)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in others)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def home() -> Path:
    """The checkout this file is in, or else the current directory."""
    checkout = Path(__file__).resolve().parents[1]
    return checkout if (checkout / "pyproject.toml").exists() else Path.cwd()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m paper.quickstart", description=__doc__)
    longer = parser.add_mutually_exclusive_group()
    longer.add_argument("--all", action="store_true", help="every network of the paper, six seeds each: 20 minutes")
    longer.add_argument("--variants", action="store_true", help="SS-CNN without its parts, six seeds each: 8 minutes")
    parser.add_argument(
        "--record", action="store_true", help="also keep numbers and error figure in results/quickstart"
    )
    options = parser.parse_args(arguments)
    settings, minutes, suffix = Settings(), "3 to 5", ""
    if options.all:
        settings, minutes, suffix = MORE["all"], "20", "-all"
    elif options.variants:
        settings, minutes, suffix = MORE["variants"], "8", "-variants"
    folder = home() / f"quickstart{suffix}"
    many = f"{len(settings.models)} small networks on MNIST digits, {len(settings.seeds)} times each"
    print(f"Training {many}: about {minutes} minutes on two cores.", flush=True)
    try:
        result = run(settings, folder)
        if options.record:
            kept = home() / "results" / "quickstart"
            kept.mkdir(parents=True, exist_ok=True)
            write_atomically(kept / f"result{suffix}.json", (json.dumps(result, indent=1) + "\n").encode())
            error_figure(result).savefig(kept / f"errors{suffix}.png", dpi=110, metadata={"Software": None})
    except KeyboardInterrupt:
        print("\nstopped: no report was written.", file=sys.stderr)
        return 130
    except (DataError, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    print(f"\n{text_table(result)}\n\n{note(result)}\n{verdict(result)}\n\nThe report: {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
