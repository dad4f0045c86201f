"""Train on medium digits, test on small and large ones: a scale-steerable network against a plain one, on a CPU.

``make quickstart`` runs this file. Both networks see the same digits, shrunk to 0.5–0.75 of their size, and have about
the same number of parameters. Then both are tested at sizes from 0.3 to 1.0. A table is printed, and a report with
figures goes to the folder `quickstart` of the checkout. ``make quickstart ALL=1`` adds the other networks of the paper
and goes to `quickstart-all` (the spatial transformer has a sixth more parameters). ``make quickstart VARIANTS=1`` takes
parts of SS-CNN away and goes to `quickstart-variants`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from paper import RESULTS, ROOT, figures, measures
from paper.grids import METHODS
from paper.markdown import table
from scalesteer.data import DataError, ImageSet, load_split
from scalesteer.files import require, write_atomically
from scalesteer.models import Network, count_parameters, create_model
from scalesteer.training import environment, evaluate

NAMES = {model: method for method, model in METHODS.items()} | {
    "ss-cnn, points": "SS-CNN, sampled at points",
    "ss-cnn, one scale": "SS-CNN, one scale",
}
Result = dict[str, Any]


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
        if name == "vector-field-cnn":  # two filters per channel: fewer channels for as many parameters
            own["widths"] = tuple(math.ceil(width * 22 / 30) for width in self.widths)
        if name in ("ss-cnn", "locally-scale-invariant-cnn", "vector-field-cnn"):
            own["scales"] = (1.0,) if variant == "one scale" else self.filter_scales
        if name == "ss-cnn":
            own["basis"] = "paper" if variant == "points" else self.basis
        return create_model(name, upsample=1, **own)


ALL = ("ss-cnn", "locally-scale-invariant-cnn", "vector-field-cnn", "spatial-transformer", "plain-cnn")
EDITIONS = {
    "": Settings(),
    "all": Settings(models=ALL, seeds=tuple(range(6))),
    "variants": Settings(models=("ss-cnn", "ss-cnn, points", "ss-cnn, one scale"), seeds=tuple(range(6))),
}
"""The quickstart itself, every network of the paper, and SS-CNN without its parts."""
MINUTES = {"": "3 to 5", "all": "20", "variants": "8"}


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


def run(settings: Settings, folder: Path, command: str = "make quickstart") -> Result:
    """Train and test everything, write the report and the numbers into a folder, and return the numbers."""
    folder.mkdir(parents=True, exist_ok=True)  # tell before minutes of training, not after
    started, cpu_started = time.perf_counter(), time.process_time()
    train_images = settings.images("train", settings.train_scales)
    tests = {size: settings.images("test", (size, size)) for size in settings.test_scales}
    low, high = settings.train_scales
    unseen = [size for size in tests if not low <= size <= high]
    runs = []
    models: dict[tuple[str, int], Network] = {}
    for seed in settings.seeds:
        for name in settings.models:
            model = models[name, seed] = settings.model(name, seed)
            title = f"{NAMES[name]}, seed {seed}"
            begun = time.perf_counter()
            train(model, train_images, settings, seed, title)
            trained = time.perf_counter()
            errors = {size: evaluate(model, images)["error"] for size, images in tests.items()}
            seconds = {"train": round(trained - begun, 1), "test": round(time.perf_counter() - trained, 1)}
            outside = statistics.fmean(errors[size] for size in unseen)
            about = {"model": name, "seed": seed, "errors": list(errors.values()), "outside": outside}
            runs.append({**about, "seconds": seconds})
            print(
                f"{title}: {sum(seconds.values()):.0f} s, error at sizes never seen {100 * outside:.1f} %", flush=True
            )
    ours: Any = models["ss-cnn", settings.seeds[0]]
    result: Result = {
        "settings": asdict(settings),
        "parameters": {name: count_parameters(models[name, settings.seeds[0]]) for name in settings.models},
        "runs": runs,
        "outside": unseen,
        "summary": summarize(runs),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu_started, 1),
        "threads": torch.get_num_threads(),
        "environment": environment(train_images) | {"command": command},
        "test_data": {str(size): images.about.get("digest") for size, images in tests.items()},
        "winning_scale": {
            str(size): measures.mean_winning_scale(
                *measures.winning_scales(ours, next(images.batches(200))[0]), ours.first.scales
            )
            for size, images in tests.items()
        },
    }
    result = json.loads(json.dumps(result))  # as it is read back
    write(folder / "index.html", page(result, ours, list(tests.values())))
    write(folder / "result.json", result)
    return result


def write(path: Path, content: str | Result) -> None:
    """Replace a file as a whole, by a text or by numbers as JSON."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


def summarize(runs: Sequence[Result]) -> Result:
    """Mean errors over seeds, by network: at each scale, and over the scales outside the training range."""
    summary = {}
    for name in dict.fromkeys(r["model"] for r in runs):
        own = [r for r in runs if r["model"] == name]
        outside = [r["outside"] for r in own]
        summary[name] = {
            "errors": np.mean([r["errors"] for r in own], axis=0).tolist(),
            "outside": statistics.fmean(outside),
            "std": statistics.stdev(outside) if len(own) > 2 else None,
        }
    return summary


def rows(result: Result) -> list[list[str]]:
    """The table: a head, then one row per network; one column per scale, the last for the mean outside the range."""
    low, high = result["settings"]["train_scales"]
    sizes = (f"{s}{'*' if low <= s <= high else ''}" for s in result["settings"]["test_scales"])
    head = ["size of the digits", *sizes, "mean outside"]
    return [head, *([NAMES[name], *percent(errors)] for name, errors in result["summary"].items())]


def percent(errors: Result) -> list[str]:
    """The cells of a row."""
    *cells, mean = (f"{100 * e:.1f}" for e in (*errors["errors"], errors["outside"]))
    return [*cells, f"{mean} ± {100 * errors['std']:.1f}" if errors.get("std") is not None else mean]


def note(result: Result) -> str:
    """What the table is about, in one sentence."""
    settings = result["settings"]
    low, high = settings["train_scales"]
    *counts, last = (f"{count:,}" for count in result["parameters"].values())
    deviation = "± standard deviation " if len(settings["seeds"]) > 2 else ""
    return (
        f"Test error in %, mean {deviation}over {len(settings['seeds'])} seeds; trained on "
        f"{settings['train_images']:,} MNIST digits shrunk to {low:g}–{high:g} of their size (* within that range), "
        f"tested on {settings['test_images']:,} others at each size; {', '.join(counts)} and {last} parameters."
    )


def verdict(result: Result) -> str:
    """The mean errors at sizes never seen, in one sentence."""
    errors = "; ".join(f"{NAMES[name]} {100 * own['outside']:.1f} %" for name, own in result["summary"].items())
    return f"Mean error at sizes never seen in training ({', '.join(map(str, result['outside']))}): {errors}."


def error_figure(result: Result) -> Figure:
    """Error against the size of the digits."""
    settings = result["settings"]
    curves = {NAMES[m]: [r["errors"] for r in result["runs"] if r["model"] == m] for m in result["summary"]}
    span = tuple(settings["train_scales"])
    return figures.plot_errors(curves, settings["test_scales"], "size of the test digits", span)


def page(result: Result, model: Network, tests: Sequence[ImageSet]) -> str:
    """The report: one page that needs nothing but itself, rendered from `quickstart.html`."""
    sizes = result["settings"]["test_scales"]
    chosen = sorted({round(i) for i in np.linspace(0, len(sizes) - 1, 4)})
    digits = torch.stack([tests[i][0][0] for i in chosen])  # the same digit at several sizes
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    won = list(result["winning_scale"].values())
    head, *networks = rows(result)
    runs = [[f"{NAMES[one['model']]}, seed {one['seed']}", *percent(one)] for one in result["runs"]]
    report: str = jinja2.Template(template, undefined=jinja2.StrictUndefined, autoescape=True).render(
        result=result,
        verdict=verdict(result),
        note=note(result),
        head=head,
        networks=networks,
        runs=runs,
        errors=embedded(error_figure(result)),
        filters=embedded(figures.plot_filter_bank(model.first)),
        winners=embedded(figures.plot_winning_scales(model, digits, [f"size {sizes[i]}" for i in chosen])),
        enlarged=f"{sizes[-1] / sizes[0]:.1f}",
        moved=f"{won[-1] / won[0]:.1f}",
    )
    return report


def embedded(figure: Figure) -> str:
    """A figure as an address that holds the PNG itself."""
    data = io.BytesIO()
    figure.savefig(data, dpi=140, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def recorded(edition: str = "") -> Result:
    """What was measured and kept of one of `EDITIONS`."""
    found: Result = json.loads((RESULTS / "quickstart" / f"{_named('result', edition)}.json").read_text())
    return found


def _named(name: str, edition: str) -> str:
    return f"{name}-{edition}" if edition else name


def quickstart_table(edition: str = "") -> str:
    """The table as Markdown, and what it is about."""
    result = recorded(edition)
    return f"{table(rows(result))}\n\n{note(result)}".replace("*", "\\*")


def quickstart_outside(edition: str = "") -> dict[str, str]:
    """The mean error in % at the sizes never seen, by network."""
    return {NAMES[name]: percent(own)[-1] for name, own in recorded(edition)["summary"].items()}


def quickstart_within(edition: str = "") -> dict[str, str]:
    """The mean error in % at the sizes within the range of training, by network."""
    result = recorded(edition)
    sizes = result["settings"]["test_scales"]
    within = [i for i, size in enumerate(sizes) if size not in result["outside"]]
    means = {name: statistics.fmean(own["errors"][i] for i in within) for name, own in result["summary"].items()}
    return {NAMES[name]: f"{100 * mean:.1f}" for name, mean in means.items()}


def quickstart_settings(edition: str = "") -> Result:
    """What was trained and tested, as in :class:`Settings`."""
    settings: Result = recorded(edition)["settings"]
    return settings


VIEWS = {
    "quickstart_table": quickstart_table,
    "quickstart_outside": quickstart_outside,
    "quickstart_within": quickstart_within,
    "quickstart_settings": quickstart_settings,
}


def plots() -> dict[str, Figure]:
    """The error against the size of the digits, by its place in results/."""
    return {f"quickstart/{_named('errors', edition)}.png": error_figure(recorded(edition)) for edition in EDITIONS}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m paper.quickstart", description=__doc__)
    longer = parser.add_mutually_exclusive_group()
    for edition, help_text in (("all", "every network of the paper"), ("variants", "SS-CNN without its parts")):
        text = f"{help_text}, six seeds each: {MINUTES[edition]} minutes"
        longer.add_argument(f"--{edition}", dest="edition", action="store_const", const=edition, default="", help=text)
    parser.add_argument("--record", action="store_true", help="also keep the numbers in results/quickstart")
    options = parser.parse_args(arguments)
    settings, folder = EDITIONS[options.edition], ROOT / _named("quickstart", options.edition)
    many = f"{len(settings.models)} small networks on MNIST digits, {len(settings.seeds)} times each"
    print(f"Training {many}: about {MINUTES[options.edition]} minutes on two cores.", flush=True)
    command = "make quickstart" + (f" {options.edition.upper()}=1" if options.edition else "")
    try:
        result = run(settings, folder, command)
        if options.record:
            write(RESULTS / "quickstart" / f"{_named('result', options.edition)}.json", result)
    except KeyboardInterrupt:
        print("\nstopped: no report was written.", file=sys.stderr)
        return 130
    except (DataError, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    for first, *cells, last in rows(result):
        print(f"{first:<27}{''.join(f'{cell:>7}' for cell in cells)}{last:>14}")
    print(f"\n{note(result)}\n{verdict(result)}\n\nThe report: {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
