"""What docs/speed.md and README show of the times in results/bench/: tables, numbers, plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paper.curves import empty, styled
from paper.markdown import GAP, table, view, words
from speed.bench import COMPILED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "bench"
DEVICES = {"cpu": "two CPU threads", "h200": "H200"}
"""By the name of their file in results/bench/, which `python -m speed bench --output` writes."""
# Contenders and how they are shown. Files of results/bench/ call the backend "fast" by an old name.
OLD_NAMES = {"spectral": "fast"}
LABELS = {"fast": "ours, `fast`", "auto": "ours", "direct": "`direct`", "plain": "plain"}
_GPU = {"device": "h200", "group": "network", "precision": "tf32", "graph": False}
SITUATIONS: dict[str, tuple[str, Record]] = {  # who of ours, and which case
    "two CPU threads, training, batch 64": ("auto", {"device": "cpu", "group": "network", "train": True}),
    "two CPU threads, inference, batch 64": ("auto", {"device": "cpu", "group": "network", "train": False}),
    "two CPU threads, one image": ("auto", {"device": "cpu", "group": "network", "batch": 1}),
    "H200, training, batch 128, recorded step": ("auto", {**_GPU, "train": True, "graph": True}),
    "H200, training, `torch.compile`": (COMPILED, {**_GPU, "train": True}),
    "H200, training, as it comes": ("auto", {**_GPU, "train": True}),
    "H200, inference, batch 512, recorded step": ("auto", {**_GPU, "train": False, "batch": 512, "graph": True}),
    "H200, inference, batch 512, as it comes": ("auto", {**_GPU, "train": False, "batch": 512}),
    "H200, inference in bfloat16": ("auto", {**_GPU, "precision": "bf16", "batch": 512}),
    "H200, one image": ("auto", {**_GPU, "batch": 1}),
    "H200, training `steered-resnet` in five channels": ("steered-resnet", {"device": "h200", "group": "channels"}),
}
PLOTTED = {name: label.replace("`", "") for name, label in LABELS.items()}
AXES = ("batch", "image, pixels per side", "scales", "largest filter")
Record = dict[str, Any]


def load() -> dict[str, Record]:
    """What was measured, by device. `<device>-<group>.json` is a group measured again later, in place of the first."""
    found = {name: json.loads(path.read_text()) for name in DEVICES if (path := RESULTS / f"{name}.json").exists()}
    for name, result in found.items():
        result["later"] = {}
        for path in sorted(RESULTS.glob(f"{name}-*.json")):
            again = json.loads(path.read_text())
            groups = {case["group"] for case in again["measurements"]}
            kept = [case for case in result["measurements"] if case["group"] not in groups]
            result["measurements"] = kept + again["measurements"]
            result["later"] |= dict.fromkeys(groups, again["environment"])
        for case in result["measurements"]:
            case["contenders"] = {OLD_NAMES.get(name, name): about for name, about in case["contenders"].items()}
    return found


@view
def speed_situations() -> str:
    """What to expect where users are: ours, its share of the plain network's rate, and its gain over a direct way."""
    rows = [
        ("SS-CNN, unless it says otherwise", "ours", "of the plain network's rate", "times one convolution per scale")
    ]
    cases = [case | {"device": name} for name, result in load().items() for case in result["measurements"]]
    missing: Record = {"contenders": {}}
    for what, (ours, wanted) in SITUATIONS.items():
        case = next((case for case in cases if case.items() >= wanted.items()), missing)
        found = case["contenders"].get(ours, {})
        if "ms" not in found:
            rows.append((what, GAP, "", ""))
            continue
        one = case["batch"] == 1
        rate = f"{number(found['ms'])} ms" if one else f"{number(found['images_per_s'])} images/s"
        shares = (found.get(key) for key in ("times_plain", "times_pooled-resnet", "times_direct"))
        # Nobody else is compiled there.
        plain, twin, direct = ("" if share is None or ours == COMPILED else f"{share:.2g}" for share in shares)
        rows.append((what, rate, plain or twin, direct))
    return table(rows)


@view
def speed_doubling(name: str) -> str:
    """How much longer a layer takes on one device when all six filters have twice the size."""
    points = along(of_group(load()[name], "sweep"))[AXES[3]]
    small, large = (case["contenders"]["auto"]["ms"] for size, case in points if size in (17, 33))
    return f"{large / small:.2g}"


@view
def speed_peers() -> str:
    """Published ways to build scale into a network, in training on an H200, beside the plain network of their run."""
    peers = json.loads((RESULTS.parent / "published" / "speed.json").read_text(encoding="utf-8"))
    plain = peers["rows"]["plain CNN"]
    rows = [("training images per second, 56 x 56", "TF32", "of the plain network's rate")]
    rows += [(name, number(rate), f"{rate / plain:.2g}") for name, rate in peers["rows"].items() if rate != plain]
    cases = of_group(load()["h200"], "network")
    case = next(case for case in cases if case["train"] and case["precision"] == "tf32" and not case["graph"])
    ours = case["contenders"]["auto"]
    rows.append(("ours, as it comes", number(ours["images_per_s"]), f"{ours['times_plain']:.2g}"))
    return f"{table(rows)}\n\n{peers['source']}"


def of_group(result: Record, group: str) -> list[Record]:
    return [case for case in result["measurements"] if case["group"] == group]


def origin(about: Record) -> str:
    """Where numbers come from, with the command that measures them again."""
    command = about["command"].replace("scalesteer bench", "python -m speed bench")  # its name until 2026
    return f"torch {about['torch']}, Python {about['python']}, commit {about['commit'][:7]}; `{command}`."


def _first(device: str, train: bool) -> Record:
    """The whole network's first case of training or of inference: on a GPU as a CUDA graph."""
    return next(case for case in of_group(load()[device], "network") if case["train"] == train)


def _ours(device: str, work: str) -> Record:
    found: Record = _first(device, work == "training")["contenders"]["auto"]
    return found


@view
def speed_share(device: str, work: str = "training") -> str:
    """Its share of the plain CNN's rate, in %."""
    return f"{100 * _ours(device, work)['times_plain']:.0f}"


@view
def speed_sources() -> str:
    """Where the numbers of each device come from, as a list."""
    said = []
    for device, result in load().items():
        about = result["environment"]
        later: dict[str, list[str]] = {}
        for group, own in result["later"].items():
            later.setdefault(f"{own['device']}, commit {own['commit'][:7]}", []).append(group)
        again = "".join(f"; {words(groups)} again on {where}" for where, groups in later.items())
        said.append(f"- {DEVICES[device]}: {about['device']}, {origin(about).removesuffix('.')}{again}.")
    return "\n".join(said)


@view
def speed_times(name: str) -> str:
    """How many times the time of the plain CNN ours takes in training, in the first case of a device."""
    return f"{1 / _ours(name, 'training')['times_plain']:.1f}"


def position(case: Record) -> tuple[int, ...]:
    """Where a case lies on each of `AXES`."""
    sizes = case["filters"].split()
    return case["batch"], case["size"], len(sizes), int(sizes[-1])


def along(sweep: list[Record]) -> dict[str, list[tuple[int, Record]]]:
    """The cases that differ from the paper's layer along one axis only, in order."""
    batches = sorted(position(case)[0] for case in sweep)
    base = (max(set(batches), key=batches.count), 28, 6, 17)
    found = {}
    for axis, name in enumerate(AXES):
        same = [c for c in sweep if all(position(c)[i] == base[i] for i in range(len(AXES)) if i != axis)]
        found[name] = sorted(((position(c)[axis], c) for c in same), key=lambda point: point[0])
    return found


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plots() -> dict[str, Figure]:
    """What the page shows, by its place in results/; what was not measured is left out."""
    found = {}
    for name, result in load().items():
        for kind, plot, group in (("network", plot_network, "network"), ("growth", plot_growth, "sweep")):
            if cases := of_group(result, group):  # of a later run on another machine, if it was measured again
                found[f"bench/{name}-{kind}.png"] = plot(
                    cases, result["later"].get(group, result["environment"])["device"]
                )
    return found


def plot_network(cases: list[Record], device: str) -> Figure:
    """Images per second: a panel for training, one for inference, bars for each mode that all three have."""
    contenders = [line for line in styled(PLOTTED) if line[0] != "fast"]  # which "auto" takes where it is faster
    cases = [case for case in cases if {name for name, *_ in contenders} <= set(case["contenders"])]
    modes = list(dict.fromkeys((case["precision"], case["graph"]) for case in cases))
    works = [train for train in (True, False) if any(case["train"] == train for case in cases)]
    figure = empty(7.5 + 1.5 * len(modes), 4)
    axes = figure.subplots(1, len(works), squeeze=False)
    for axis, train in zip(axes[0], works, strict=True):
        shown = {(c["precision"], c["graph"]): c for c in cases if c["train"] == train}
        for i, (name, label, colour, _) in enumerate(contenders):
            rates = [shown[mode]["contenders"][name].get("images_per_s", 0) if mode in shown else 0 for mode in modes]
            bars = axis.bar([m + 0.27 * i for m in range(len(modes))], rates, 0.25, color=colour, label=label)
            axis.bar_label(bars, [number(rate) if rate else "failed" for rate in rates], fontsize=7, padding=2)
        names = [p.replace("tf", "TF") + (",\nCUDA graph" if graph else "") for p, graph in modes]
        axis.set_xticks([m + 0.27 for m in range(len(modes))], names)
        axis.set_title(
            f"{'training' if train else 'inference'}, batch {next(iter(shown.values()))['batch']}", fontsize=11
        )
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.1)
    axes[0, 0].set_ylabel("images per second")
    figure.suptitle(f"SS-CNN beside the plain CNN: images per second on {device}", fontsize=11)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def plot_growth(sweep: list[Record], device: str) -> Figure:
    """Milliseconds of forward and backward against each axis, both logarithmic; bars are quartiles."""
    figure = empty(13, 4.2)
    axes = figure.subplots(1, 4, sharey=True)
    for axis, (name, points) in zip(axes, along(sweep).items(), strict=True):
        for contender, text, colour, marker in styled(PLOTTED):
            found = [(x, case["contenders"][contender]) for x, case in points if "ms" in case["contenders"][contender]]
            spread = [[a["ms"] - a["q1"] for _, a in found], [a["q3"] - a["ms"] for _, a in found]]
            style: Record = {"marker": marker, "ms": 5, "color": colour, "label": text}
            if contender == "auto":  # lies on one of the others, which must be seen below it
                style |= {"linestyle": "--", "zorder": 3, "markerfacecolor": "none", "ms": 8}
            axis.errorbar([x for x, _ in found], [a["ms"] for _, a in found], spread, capsize=2, **style)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks([x for x, _ in points], [str(x) for x, _ in points])
        axis.minorticks_off()
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms, forward + backward")
    figure.suptitle(f"One layer of SS-CNN, time of forward and backward on {device}", fontsize=11)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


@view
def speed_allocator() -> str:
    """A training step on a CPU with the system's allocator as it is, and told to keep memory."""
    told = json.loads((RESULTS / "allocator.json").read_text())
    rows = [("training step, one CPU thread", "CPU seconds", "page faults", "most memory, MiB")]
    for case, ways in told["cases"].items():
        before, after = ways["system"], ways["keep"]
        pairs = ((one["seconds"], round(one["page_faults"]), one["mebibytes"]) for one in (before, after))
        rows.append((case, *(f"{number(old)} → {number(new)}" for old, new in zip(*pairs, strict=True))))
    return table(rows)
