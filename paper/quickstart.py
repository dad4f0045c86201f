"""Train on medium digits, test on small and large ones: one network at several sizes against others, on a CPU.

``make quickstart`` runs this file. All networks see the same digits, shrunk to 0.5–0.75 of their size. Then they are
tested at sizes from 0.3 to 1.0. A table is printed, and a report with figures goes to the folder `quickstart` of the
checkout. ``make quickstart ALL=1`` trains the closest rivals, with three seeds each, and goes to `quickstart-all`.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import numpy as np
import torch
from torch import Tensor

import paper
from paper import ROOT, curves
from paper.cells import interval
from paper.contenders import CHANNELS, NAMES, OURS, Result, Settings, Training, load
from paper.markdown import table, view
from paper.side_by_side import cores, do_all, say_line
from scalesteer.app import environment
from scalesteer.app.evaluation import rank_correlation
from scalesteer.datasets import DataError, ImageSet
from scalesteer.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARED = tuple(name for name in NAMES if "resized" in name)
EDITIONS = {"": Settings(), "all": Settings(models=COMPARED, seeds=tuple(range(3)))}
"""The quickstart itself, and the closest rivals with several seeds."""
MINUTES = {"": "3", "all": "5"}


def run(settings: Settings, folder: Path, command: str = "make quickstart", processes: int = 1) -> Result:
    """Train and test everything, write the report and the numbers into a folder, and return the numbers."""
    folder.mkdir(parents=True, exist_ok=True)  # tell before minutes of training, not after
    started = time.perf_counter()
    train_images, tests = load(settings)  # made once, for all processes
    about = environment(train_images) | {"command": command}  # of the code that runs, whatever it becomes meanwhile
    trained = dict.fromkeys(name.removesuffix(CHANNELS) for name in settings.models)
    trainings = [Training(settings, name, seed) for seed in settings.seeds for name in trained]
    ended: dict[int, list[Result]] = {}
    first: dict[float, tuple[Tensor, Tensor]] = {}  # what our network of the first seed answers
    with closing(do_all(trainings, processes)) as results:
        for number, found in results:
            ended[number] = [own for own, _ in found]
            for own, answers in found:
                errors = f"error at sizes never seen {100 * own['outside']:.1f} %, at those of training"
                say_line(f"{title(own)}: {own['seconds']['train']:.0f} s, {errors} {100 * own['inside']:.1f} %")
                if (own["model"], own["seed"]) == (OURS, settings.seeds[0]):
                    first = {size: (torch.from_numpy(c), torch.from_numpy(f)) for size, (c, f) in answers.items()}
    runs = [own for _, found in sorted(ended.items()) for own in found]
    result: Result = {
        "settings": asdict(settings),
        "parameters": {own["model"]: own.pop("parameters") for own in runs},
        "runs": runs,
        "outside": settings.outside,
        "summary": summarize(runs),
        "answered": answered_sizes({size: found for size, (_, found) in first.items()}),
        "seconds": round(time.perf_counter() - started, 1),
        "processes": processes,
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
            "cpu": statistics.fmean(r["seconds"]["cpu"] for r in own),
        }
    return summary


def rows(result: Result) -> list[list[str]]:
    """The table: a head, then one row per network; one column per scale, the means inside and outside, weights."""
    low, high = result["settings"]["train_scales"]
    sizes = (f"{s}{'*' if low <= s <= high else ''}" for s in result["settings"]["test_scales"])
    head = ["size of the digits", *sizes, "mean inside*", "mean outside", "weights", "seconds"]
    counts = {name: f"{count:,}" for name, count in result["parameters"].items()}
    return [
        head,
        *(
            [NAMES[name], *percent(errors), counts[name], f"{errors['cpu']:.0f}"]
            for name, errors in result["summary"].items()
        ),
    ]


def title(run: Result) -> str:
    """A run in words."""
    return f"{NAMES[run['model']]}, seed {run['seed']}"


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
        f"their size (* is within that range). Tested on {settings['test_images']:,} other digits at each size. "
        "Seconds are those of one CPU core for a training."
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
        [
            *(title(one), *percent(one)),
            *(f"{counts[one['model']]:,}", f"{one['seconds']['cpu']:.0f}"),
        ]
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
    """The 95 % interval of the first network's error minus the second's, in points.

    It is Student's of the differences where both are one trained network, with and without channels, else Welch's.
    """
    runs, names = _kept(edition)["runs"], (_name(first), _name(second))
    pair = [[100 * r[where] for r in runs if r["model"] == name] for name in names]
    if names[0].removesuffix(CHANNELS) == names[1].removesuffix(CHANNELS):
        return str(interval(a - b for a, b in zip(*pair, strict=True))).strip("*")
    return str(interval(*pair)).strip("*")


@view
def quickstart_replaced(network: str, where: str = "outside") -> str:
    """A mean error in % of what was measured before, with scale channels in every epoch, by its name there."""
    old = paper.recorded("replaced/quickstart.json")
    names = {shown: name for name, shown in old["names"].items()}
    return f"{100 * old['all']['summary'][names[network]][where]:.1f}"


@view
def quickstart_correlation(edition: str = "all") -> str:
    """The rank correlation of the estimated size with the true size."""
    return f"{_kept(edition)['answered']['correlation']:.2f}"


def plots() -> dict[str, Figure]:
    """The error against the size of the digits, by its place in results/."""
    kept = {edition: result for edition in EDITIONS if (result := recorded(edition))}
    return {f"quickstart/{_named('errors', edition)}.png": error_figure(result) for edition, result in kept.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m paper.quickstart", description=__doc__)
    text = f"the closest rivals, three seeds each: {MINUTES['all']} minutes"
    parser.add_argument("--all", dest="edition", action="store_const", const="all", default="", help=text)
    parser.add_argument("--record", action="store_true", help="also keep the numbers in results/quickstart")
    options = parser.parse_args(arguments)
    settings, folder = EDITIONS[options.edition], ROOT / _named("quickstart", options.edition)
    times = f", {len(settings.seeds)} times each" if len(settings.seeds) > 1 else ""
    many = f"{len(settings.models)} small networks on MNIST digits{times}"
    print(f"Training {many}: about {MINUTES[options.edition]} minutes on two cores.", flush=True)
    try:
        result = run(settings, folder, command_of(options.edition), cores())
        if options.record:
            write(paper.RESULTS / "quickstart" / f"{_named('result', options.edition)}.json", result)
    except KeyboardInterrupt:
        print("\nstopped: no report was written.", file=sys.stderr)
        return 130
    except (DataError, OSError, RuntimeError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    for first, *cells, inside, outside, weights, seconds in rows(result):
        errors = f"{''.join(f'{cell:>6}' for cell in cells)}{inside:>14}{outside:>14}"
        print(f"{first:<52}{errors}{weights:>9}{seconds:>9}")
    print(f"\n{note(result)}\n{verdict(result)}\n\nThe report: {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
