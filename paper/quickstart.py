"""Train on medium digits, test on small and large ones: one network at several sizes against others, on a CPU.

``make quickstart`` runs this file. All networks see the same digits, shrunk to 0.5–0.75 of their size. Then they are
tested at sizes from 0.3 to 1.0. A table is printed, and a report with figures goes to the folder `quickstart` of the
checkout. ``make quickstart ALL=1`` adds more rivals and variants, with three seeds each, and goes to `quickstart-all`.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paper
from paper import ROOT, curves
from paper.cells import interval
from paper.markdown import table, view
from scalesteer.app import environment
from scalesteer.app.augment import Augmentation
from scalesteer.app.evaluation import rank_correlation
from scalesteer.app.memory import keep_memory
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import DataError, ImageSet, load_split
from scalesteer.files import require, write_atomically
from scalesteer.models import count_parameters, create_model, set_input_statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "scale-channels, resized"
NAMES = {
    OURS: "Scale channels, random resizing",
    "plain-cnn": "Plain CNN",
    "plain-cnn, resized": "Plain CNN, random resizing",
    "plain-cnn, resized, longer": "Plain CNN, random resizing, as long as ours",
    "ss-cnn": "SS-CNN",
    "scale-channels": "Scale channels",
    "scale-channels, steered": "Scale channels, steered filters",
    "pooled-cnn": "Same network at one size",
    "pooled-cnn, resized": "Same network at one size, random resizing",
    "pooled-cnn, several sizes": "Same network, several sizes at test",
}
Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What the quickstart trains and tests; a smaller one makes a smaller run."""

    train_images: int = 3000
    test_images: int = 2000
    train_scales: tuple[float, float] = (0.5, 0.75)
    test_scales: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    models: tuple[str, ...] = (OURS, "plain-cnn", "plain-cnn, resized", "ss-cnn")
    seeds: tuple[int, ...] = (0,)
    epochs: int = 32
    longer: int = 3  # so many times the epochs take a plain CNN about as long as ours
    batch_size: int = 50
    lr: float = 0.01
    weight_decay: float = 0.01
    label_smoothing: float = 0.1
    # Digits at test are 0.4 to 2 times as large as in training. A channel of 2 would take longer than these together;
    # without it there is time for twice the epochs, and random resizing shows smaller digits.
    channels: tuple[float, ...] = (0.5, 0.7, 1.0, 1.4)
    drop: float = 0.4
    kernel_size: int = 5  # of the network inside the channels, and of its twin
    resize: tuple[float, float] = (0.4, 1.4)  # of ours
    share: float = 0.5  # of the images that are resized for ours; alone, all of them is better
    resize_alone: tuple[float, float] = (0.4, 2.0)  # of networks that look at one size: better for them
    antialias: bool = False  # of random resizing: as the digits themselves were shrunk, which is better for all
    widths: tuple[int, int, int] = (12, 24, 36)  # of the two networks that are not for any size
    filter_scales: tuple[float, ...] = (0.5, 0.7, 1.0, 1.4, 2.0)
    basis: str = "area"

    def images(self, part: str, scale_range: tuple[float, float]) -> ImageSet:
        """Digits of MNIST, shrunk; the digits of a part are the same whatever the scale."""
        sizes = (self.train_images, 0, self.test_images)
        return load_split("mnist-scale", 0, part, scale_range=scale_range, sizes=sizes)

    def model(self, name: str, seed: int) -> nn.Module:
        """A new network."""
        torch.manual_seed(seed)
        name, _, variant = name.partition(", ")
        if name == "scale-channels":
            kind, size = ("steered-cnn", None) if variant == "steered" else ("pooled-cnn", self.kernel_size)
            return create_model(kind, "mnist-scale", kernel_size=size, channels=self.channels, drop=self.drop)
        if name == "pooled-cnn":
            return create_model(name, "mnist-scale", kernel_size=self.kernel_size)
        own: dict[str, Any] = {"scales": self.filter_scales, "basis": self.basis} if name == "ss-cnn" else {}
        model: nn.Module = create_model(name, "mnist-scale", upsample=1, widths=self.widths, **own)
        return model

    def tested(self, name: str, model: nn.Module) -> nn.Module:
        """The trained network as it is tested."""
        return ScaleChannels(model, self.channels, "mean") if name.endswith(", several sizes") else model


EDITIONS = {"": Settings(), "all": Settings(models=tuple(NAMES), seeds=tuple(range(3)))}
"""The quickstart itself, and the one with all rivals."""
MINUTES = {"": "6", "all": "45"}


def train(model: nn.Module, images: ImageSet, settings: Settings, seed: int, name: str, title: str) -> None:
    """AdamW with a one-cycle learning rate; the last model is the one that is tested."""
    set_input_statistics(model, images.std)
    factors, share = (settings.resize, settings.share) if name == OURS else (settings.resize_alone, 1.0)
    change = Augmentation(resize=factors, share=share, antialias=settings.antialias)
    resized, longer = ", resized" in name, name.endswith(", longer")
    epochs = settings.epochs * (settings.longer if longer else 1)
    steps = epochs * (len(images) // settings.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=steps)
    order = torch.Generator().manual_seed(seed)
    model.train()
    with require("tqdm").tqdm(total=steps, desc=title, unit="step", disable=None) as bar:
        for _ in range(epochs):
            for x, labels in images.batches(settings.batch_size, generator=order, drop_last=True):
                logits = model(change(x) if resized else x)
                loss = F.cross_entropy(logits, labels, label_smoothing=settings.label_smoothing)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()


@torch.no_grad()
def answer(model: nn.Module, images: ImageSet) -> tuple[Tensor, Tensor | None]:
    """The class of each image, and from a network with scale channels the size that answered: `(N,)` both."""
    model.eval()
    batches = (x for x, _ in images.batches(200))
    if not isinstance(model, ScaleChannels):
        return torch.cat([model(x).argmax(1) for x in batches]), None
    pairs = [model(x, return_scales=True) for x in batches]
    return torch.cat([logits.argmax(1) for logits, _ in pairs]), torch.cat([size for _, size in pairs])


def run(settings: Settings, folder: Path, command: str = "make quickstart") -> Result:
    """Train and test everything, write the report and the numbers into a folder, and return the numbers."""
    folder.mkdir(parents=True, exist_ok=True)  # tell before minutes of training, not after
    started, cpu_started = time.perf_counter(), time.process_time()
    train_images = settings.images("train", settings.train_scales)
    tests = {size: settings.images("test", (size, size)) for size in settings.test_scales}
    low, high = settings.train_scales
    unseen = [size for size in tests if not low <= size <= high]
    about = environment(train_images) | {"command": command}  # of the code that runs, whatever it becomes meanwhile
    runs = []
    parameters: dict[str, int] = {}
    first: dict[float, tuple[Tensor, Tensor]] = {}  # what our network of the first seed answers
    for seed in settings.seeds:
        for name in settings.models:
            model = settings.model(name, seed)
            parameters[name] = count_parameters(model)
            title = f"{NAMES[name]}, seed {seed}"
            begun = time.perf_counter()
            train(model, train_images, settings, seed, name, title)
            trained = time.perf_counter()
            answers = {size: answer(settings.tested(name, model), images) for size, images in tests.items()}
            errors = {s: float((answers[s][0] != images.labels).float().mean()) for s, images in tests.items()}
            seconds = {"train": round(trained - begun, 1), "test": round(time.perf_counter() - trained, 1)}
            means = {"outside": statistics.fmean(errors[size] for size in unseen)}
            means["inside"] = statistics.fmean(error for size, error in errors.items() if size not in unseen)
            runs.append({"model": name, "seed": seed, "errors": list(errors.values()), **means, "seconds": seconds})
            said = f"error at sizes never seen {100 * means['outside']:.1f} %, at those of training"
            print(f"{title}: {sum(seconds.values()):.0f} s, {said} {100 * means['inside']:.1f} %", flush=True)
            if name == OURS:
                first = first or {
                    size: (labels, found) for size, (labels, found) in answers.items() if found is not None
                }
    result: Result = {
        "settings": asdict(settings),
        "parameters": parameters,
        "runs": runs,
        "outside": unseen,
        "summary": summarize(runs),
        "answered": answered_sizes({size: found for size, (_, found) in first.items()}),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu_started, 1),
        "threads": torch.get_num_threads(),
        "environment": about,
        "test_data": {str(size): images.about.get("digest") for size, images in tests.items()},
    }
    result = json.loads(json.dumps(result))  # as it is read back
    write(folder / "index.html", page(result, tests, first))
    write(folder / "result.json", result)
    return result


def answered_sizes(found: Mapping[float, Tensor]) -> Result:
    """The size that answered at each true size, as quartiles, and the rank correlation of the two over all images."""
    true = np.concatenate([np.full(len(sizes), size) for size, sizes in found.items()])
    quartiles = {size: np.quantile(sizes.numpy(), (0.25, 0.5, 0.75)).round(4).tolist() for size, sizes in found.items()}
    return {"quartiles": quartiles, "correlation": rank_correlation(torch.cat(list(found.values())).numpy(), true)}


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
            "inside": statistics.fmean(r["inside"] for r in own),
            "std": statistics.stdev(outside) if len(own) > 2 else None,
        }
    return summary


def rows(result: Result) -> list[list[str]]:
    """The table: a head, then one row per network; one column per scale, the means inside and outside, weights."""
    low, high = result["settings"]["train_scales"]
    sizes = (f"{s}{'*' if low <= s <= high else ''}" for s in result["settings"]["test_scales"])
    head = ["size of the digits", *sizes, "mean inside*", "mean outside", "weights"]
    counts = {name: f"{count:,}" for name, count in result["parameters"].items()}
    return [head, *([NAMES[name], *percent(errors), counts[name]] for name, errors in result["summary"].items())]


def percent(errors: Result) -> list[str]:
    """The cells of a row."""
    *cells, mean = (f"{100 * e:.1f}" for e in (*errors["errors"], errors["inside"], errors["outside"]))
    return [*cells, f"{mean} ± {100 * errors['std']:.1f}" if errors.get("std") is not None else mean]


def note(result: Result) -> str:
    """What the table is about."""
    settings = result["settings"]
    low, high = settings["train_scales"]
    deviation = "± standard deviation " if len(settings["seeds"]) > 2 else ""
    seeds = f"mean {deviation}over {len(settings['seeds'])} seeds" if len(settings["seeds"]) > 1 else "one seed each"
    return (
        f"Test error in %, {seeds}. Trained on {settings['train_images']:,} MNIST digits shrunk to {low:g}–{high:g} of "
        f"their size (* is within that range). Tested on {settings['test_images']:,} other digits at each size."
    )


def verdict(result: Result) -> str:
    """The mean errors at sizes never seen, in one sentence."""
    errors = "; ".join(f"{NAMES[name]} {100 * own['outside']:.1f} %" for name, own in result["summary"].items())
    return f"Mean error at sizes never seen in training ({', '.join(map(str, result['outside']))}): {errors}."


def error_figure(result: Result) -> Figure:
    """Error against the size of the digits."""
    settings = result["settings"]
    errors = {NAMES[m]: [r["errors"] for r in result["runs"] if r["model"] == m] for m in result["summary"]}
    span = tuple(settings["train_scales"])
    title = "Test error by the size of the digits; trained at the shaded sizes"
    return curves.plot_errors(errors, settings["test_scales"], "size of the test digits", span, title)


def page(result: Result, tests: Mapping[float, ImageSet], answers: Mapping[float, tuple[Tensor, Tensor]]) -> str:
    """The report: one page that needs nothing but itself, rendered from `quickstart.html`."""
    sizes = result["settings"]["test_scales"]
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    head, *networks = rows(result)
    counts = result["parameters"]
    runs = [
        [f"{NAMES[one['model']]}, seed {one['seed']}", *percent(one), f"{counts[one['model']]:,}"]
        for one in result["runs"]
    ]
    labels = next(iter(tests.values())).labels
    shown = [int((labels == digit).nonzero()[0]) for digit in labels.unique()[::2]]  # the first of every other class
    digits = {size: images.images[shown] for size, images in tests.items()}
    said = {size: [int(classes[i]) for i in shown] for size, (classes, _) in answers.items()}
    quartiles = {float(size): own for size, own in result["answered"]["quartiles"].items()}
    report: str = jinja2.Template(template, undefined=jinja2.StrictUndefined, autoescape=True).render(
        result=result,
        verdict=verdict(result),
        note=note(result),
        head=head,
        networks=networks,
        runs=runs,
        errors=embedded(error_figure(result)),
        sizes=embedded(curves.plot_answered_sizes(quartiles, tuple(result["settings"]["train_scales"]))),
        digits=embedded(curves.plot_answers(digits, said, labels[shown].tolist())),
        enlarged=f"{sizes[-1] / sizes[0]:.1f}",
        moved=f"{quartiles[sizes[-1]][1] / quartiles[sizes[0]][1]:.1f}",
    )
    return report


def embedded(figure: Figure) -> str:
    """A figure as an address that holds the PNG itself."""
    return f"data:image/png;base64,{base64.b64encode(curves.png(figure)).decode()}"


def recorded(edition: str = "") -> Result | None:
    """What was measured and kept of one of `EDITIONS`, if anything was."""
    found: Result | None = paper.recorded(f"quickstart/{_named('result', edition)}.json")
    return found


def command_of(edition: str) -> str:
    """The command that makes an edition."""
    return "make quickstart" + (f" {edition.upper()}=1" if edition else "")


def _named(name: str, edition: str) -> str:
    return f"{name}-{edition}" if edition else name


def _kept(edition: str) -> Result:
    """What was recorded of an edition.

    Raises:
        ValueError: If nothing was.
    """
    result = recorded(edition)
    if result is None:
        command = "python -m paper.quickstart" + " --all" * (edition == "all")
        raise ValueError(f"results/quickstart has no {edition or 'plain'} edition: make it by {command} --record.")
    return result


@view
def quickstart_table(edition: str = "") -> str:
    """The table as Markdown, and what it is about; the rival that trains as long as ours comes first."""
    result = _kept(edition)
    head, *networks = rows(result)
    networks.sort(key=lambda row: not row[0].endswith("as long as ours"))
    return f"{table([head, *networks])}\n\n{note(result)}".replace("*", "\\*")


def _name(shown: str) -> str:
    """The key of a network in results by its key or its shown name."""
    return {title: name for name, title in NAMES.items()}.get(shown, shown)


@view
def quickstart_error(network: str, where: str = "outside", edition: str = "all") -> str:
    """The mean error of a network in % "outside" or "inside" the sizes of training, over the seeds of an edition."""
    return f"{100 * _kept(edition)['summary'][_name(network)][where]:.1f}"


@view
def quickstart_difference(first: str, second: str, where: str = "outside", edition: str = "all") -> str:
    """The 95 % interval of the first network's error minus the second's, in points."""
    runs = _kept(edition)["runs"]
    pair = ([100 * r[where] for r in runs if r["model"] == _name(name)] for name in (first, second))
    return str(interval(*pair)).strip("*")


@view
def quickstart_correlation(edition: str = "") -> str:
    """The rank correlation of the estimated size with the true size."""
    return f"{_kept(edition)['answered']['correlation']:.2f}"


def plots() -> dict[str, Figure]:
    """The error against the size of the digits, by its place in results/."""
    kept = {edition: result for edition in EDITIONS if (result := recorded(edition))}
    return {f"quickstart/{_named('errors', edition)}.png": error_figure(result) for edition, result in kept.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m paper.quickstart", description=__doc__)
    text = f"more rivals and variants, three seeds each: {MINUTES['all']} minutes"
    parser.add_argument("--all", dest="edition", action="store_const", const="all", default="", help=text)
    parser.add_argument("--record", action="store_true", help="also keep the numbers in results/quickstart")
    options = parser.parse_args(arguments)
    settings, folder = EDITIONS[options.edition], ROOT / _named("quickstart", options.edition)
    times = f", {len(settings.seeds)} times each" if len(settings.seeds) > 1 else ""
    many = f"{len(settings.models)} small networks on MNIST digits{times}"
    print(f"Training {many}: about {MINUTES[options.edition]} minutes on two cores.", flush=True)
    keep_memory()
    try:
        result = run(settings, folder, command_of(options.edition))
        if options.record:
            write(paper.RESULTS / "quickstart" / f"{_named('result', options.edition)}.json", result)
    except KeyboardInterrupt:
        print("\nstopped: no report was written.", file=sys.stderr)
        return 130
    except (DataError, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    for first, *cells, inside, outside, weights in rows(result):
        print(f"{first:<36}{''.join(f'{cell:>7}' for cell in cells)}{inside:>14}{outside:>14}{weights:>10}")
    print(f"\n{note(result)}\n{verdict(result)}\n\nThe report: {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
