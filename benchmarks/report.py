"""What docs/speed.md and README show of the times in results/bench/: tables, sentences and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench import COMPILED, RIVALS, describe
from paper.curves import empty, styled
from paper.markdown import PENDING, table, view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "bench"
COMMANDS = {
    "cpu": "python -m benchmarks bench --device cpu --output results/bench/cpu.json",
    "h200": "python -m benchmarks bench --device cuda --output results/bench/h200.json",
}
# Contenders as results/bench names them, and as they are shown: "spectral" is the old name of the backend "fast".
LABELS = {"spectral": "ours, `fast`", "auto": "ours, `auto`", "direct": "`direct`", "plain": "plain"}
_GPU = {"device": "h200", "group": "network", "precision": "tf32", "graph": False}
SITUATIONS: dict[str, tuple[str, Record]] = {  # who of ours, and which case
    "two CPU threads, training, batch 64": ("auto", {"device": "cpu", "group": "network", "train": True}),
    "two CPU threads, inference, batch 64": ("auto", {"device": "cpu", "group": "network", "train": False}),
    "two CPU threads, one image": ("auto", {"device": "cpu", "group": "network", "batch": 1}),
    "H200, training, batch 128, recorded step": ("auto", {**_GPU, "train": True, "graph": True}),
    "H200, training, `torch.compile`": (COMPILED, {**_GPU, "train": True}),
    "H200, training, as it comes": ("auto", {**_GPU, "train": True}),
    "H200, inference, batch 512": ("auto", {**_GPU, "train": False, "batch": 512}),
    "H200, inference in bfloat16": ("auto", {**_GPU, "precision": "bf16", "batch": 512}),
    "H200, one image": ("auto", {**_GPU, "batch": 1}),
    "H200, training `steered-resnet` in five channels": ("steered-resnet", {"device": "h200", "group": "channels"}),
}
PLOTTED = {name: label.replace("`", "") for name, label in LABELS.items()}
AXES = ("batch", "image, pixels per side", "scales", "largest filter")
Record = dict[str, Any]


def load() -> dict[str, Record]:
    """What was measured, by device. `<device>-<group>.json` is a group measured again later, in place of the first."""
    found = {name: json.loads(path.read_text()) for name in COMMANDS if (path := RESULTS / f"{name}.json").exists()}
    for name, result in found.items():
        result["later"] = {}
        for path in sorted(RESULTS.glob(f"{name}-*.json")):
            again = json.loads(path.read_text())
            groups = {case["group"] for case in again["measurements"]}
            kept = [case for case in result["measurements"] if case["group"] not in groups]
            result["measurements"] = kept + again["measurements"]
            result["later"] |= dict.fromkeys(groups, again["environment"])
    return found


@view
def speed_section(name: str) -> str:
    """All about one device of `COMMANDS`, or how to measure it."""
    results = load()
    return section(results[name], name) if name in results else f"Not measured yet: `{COMMANDS[name]}`."


@view
def speed_headline(name: str) -> str:
    """The whole network on one device, in a sentence."""
    return headline(of_group(load()[name], "network"))


@view
def speed_situations() -> str:
    """What to expect where users are: ours, its share of the plain network's rate, and its gain over a direct way."""
    rows = [
        ("SS-CNN, unless it says otherwise", "ours", "of the plain network's rate", "times one convolution per scale")
    ]
    cases = [case | {"device": name} for name, result in load().items() for case in result["measurements"]]
    for what, (ours, wanted) in SITUATIONS.items():
        case = next((case for case in cases if case.items() >= wanted.items()), {"contenders": {}})
        found = case["contenders"].get(ours, {})
        if "ms" not in found:
            rows.append((what, PENDING, "", ""))
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


def section(result: Record, name: str) -> str:
    """All about one device."""
    about = result["environment"]
    blocks = [f"{about['device']}, CPU threads: {about['threads']}; {origin(about)}"]
    if about["load"] > 0.5 * about["threads"]:
        blocks.append(f"Provisional: other work kept the machine busy (load {about['load']}), which spoils times.")

    def titled(title: str, group: str) -> str:
        later = result["later"].get(group)
        return f"{title} {origin(later)}" if later else title

    if networks := of_group(result, "network"):
        blocks += [
            titled("**The whole network:**", "network"),
            f"![Images per second of the whole network](../../results/bench/{name}-network.png)",
        ]
        blocks.append(contender_table(networks))
    if layers := of_group(result, "layer"):
        blocks += [titled("**One layer**, milliseconds:", "layer"), layer_table(layers)]
        blocks.append(choices([*layers, *of_group(result, "sweep")]))
    if sweep := of_group(result, "sweep"):
        blocks.append("**How time grows** with one thing at a time, forward + backward, layer 30 → 60, 28 x 28:")
        blocks += [
            f"![Time against each](../../results/bench/{name}-growth.png)",
            growth_table(sweep),
            batch_gain(sweep),
        ]
    titles = {
        "channels": "**Residual networks at five sizes**, 0.5 to 2, images of 32 x 32:",
        "lobes": "**One lobe**, so that filters are not point-symmetric, beside two, forward + backward:",
        "large": "**A large image:**",
        "baselines": "**The compared networks:**",
    }
    for group, title in titles.items():
        if cases := of_group(result, group):
            blocks += [titled(title, group), contender_table(cases)]
    return "\n\n".join(filter(None, blocks))


def origin(about: Record) -> str:
    """Where numbers come from, with the command that measures them again."""
    command = about["command"].replace("scalesteer bench", "python -m benchmarks bench")  # its name until 2026
    return f"torch {about['torch']}, Python {about['python']}, commit {about['commit'][:7]}; `{command}`."


def headline(networks: list[Record]) -> str:
    """The first training and the first inference case in a sentence."""
    said = []
    for train, work in ((True, "training"), (False, "inference")):
        if found := rates(networks, train):
            unit = "" if said else " images per second"
            said.append(
                f"{found['images_per_s']}{unit} in {work} ({found['times_direct']} times `direct`, "
                f"{100 * float(found['times_plain']):.0f} % of the plain CNN's rate)"
            )
    mode = ("TF32" if networks[0]["precision"] == "tf32" else "float32") + ", as a CUDA graph" * networks[0]["graph"]
    return f"SS-CNN, {mode}: {', '.join(said) or 'see below'}."


def rates(networks: list[Record], train: bool) -> dict[str, str]:
    """Images per second of ours in the first such case, and how many times that of the others; empty if it failed."""
    ours: Record = next((case["contenders"]["auto"] for case in networks if case["train"] == train), {})
    keys = ("images_per_s", "times_direct", "times_plain")
    return {key: number(ours[key]) for key in keys} if ours.keys() >= set(keys) else {}


def contender_table(cases: list[Record]) -> str:
    """A row for each case and contender, with everything that was measured; a column without any number is left out."""
    rivals = [f"x {LABELS.get(name, name)}" for name in RIVALS]
    rows = [["", "", "images/s", "ms (quartiles)", *rivals, "memory"]]
    for case in cases:
        what = describe(case)
        for name, found in case["contenders"].items():
            if "error" in found:
                cells = [found["error"], *[""] * (len(rows[0]) - 3)]
            else:
                times = f"{number(found['ms'])} ({number(found['q1'])}–{number(found['q3'])})"
                keys = (f"times_{other}" for other in RIVALS)
                ratios = [f"{found[key]:.3g}" if key in found else "" for key in keys]
                memory = f"{found['memory_mib']:,.0f} MiB" if "memory_mib" in found else ""
                cells = [number(found["images_per_s"]), times, *ratios, memory]
            rows.append([what, "ours, compiled" if name == COMPILED else LABELS.get(name, name), *cells])
            what = ""
    kept = [i for i in range(len(rows[0])) if i < 2 or any(row[i] for row in rows[1:])]
    return table([[row[i] for i in kept] for row in rows], left=2)


def layer_table(cases: list[Record]) -> str:
    """A row for each case; where ours loses, the ratio says so."""
    rows = [["", *LABELS.values(), "`fast` x `direct`"]]
    for case in cases:
        ratio = case["contenders"]["spectral"].get("times_direct")
        shown = "" if ratio is None else f"{ratio:.3g}" + (" (slower)" if ratio < 1 else "")
        rows.append([describe(case), *(milliseconds(case, name) for name in LABELS), shown])
    return table(rows)


def choices(cases: list[Record]) -> str:
    """How good the choices of "auto" were: its time against that of the faster backend."""
    names = ("auto", "spectral", "direct")
    whole = [case for case in cases if all("ms" in case["contenders"][name] for name in names)]
    losses = []
    for case in whole:
        auto, *backends = (case["contenders"][name]["ms"] for name in names)
        losses.append((auto / min(backends), describe(case)))
    loss, where = max(losses, default=(0, ""))
    return where and (
        f"In the {len(losses)} cases of this table and the next, `auto` takes at most {loss:.2f} times the time of the "
        f"faster backend (in {where})."
    )


@view
def speed_times(name: str) -> str:
    """How many times the time of the plain CNN ours takes in training, in the first case of a device."""
    found = rates(of_group(load()[name], "network"), train=True)
    return f"{1 / float(found['times_plain']):.1f}"


@view
def shapes_table(name: str) -> str:
    """Layers of every shape on one device, the fastest of all rounds in milliseconds; or how to measure them."""
    path = RESULTS / f"shapes-{name}.json"
    if not path.exists():
        device = "cpu" if name == "cpu" else "cuda"
        return f"Not measured yet: `python -m benchmarks bench --device {device} --only shapes --output {path.name}`."
    result = json.loads(path.read_text())
    rows = [["", "`fast`", "`direct`", "`auto`", "`auto` / faster"]]
    for case in result["measurements"]:
        found = case["contenders"]
        if failed := [f"{backend}: {about['error']}" for backend, about in found.items() if "error" in about]:
            rows.append([describe(case), "; ".join(failed), "", "", ""])
            continue
        fast, direct, auto = (found[backend]["fastest"] for backend in ("fast", "direct", "auto"))
        rows.append([describe(case), *map(number, (fast, direct, auto)), f"{auto / min(fast, direct):.2f}"])
    return f"{table(rows)}\n\n{result['environment']['device']}, {origin(result['environment'])}"


def milliseconds(case: Record, name: str) -> str:
    found = case["contenders"][name]
    return number(found["ms"]) if "ms" in found else str(found["error"])


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


def growth_table(sweep: list[Record]) -> str:
    """How many times the time of the first point the last one takes; the doubling of all filters is its own row."""
    rows = [["", *LABELS.values()]]
    spans = [(f"{name} {found[0][0]} → {found[-1][0]}", found) for name, found in along(sweep).items() if found]
    doubled = [point for point in along(sweep)[AXES[3]] if point[0] in (17, 33)]
    spans.append(("**all six filters doubled**, 7–17 → 13–33", doubled))
    for title, found in spans:
        if len(found) < 2:  # of a run that was cut short
            continue
        cells = []
        for name in LABELS:
            first, last = (found[i][1]["contenders"][name].get("ms") for i in (0, -1))
            known = first is not None and last is not None
            cells.append(f"{last / first:.3g} x ({number(first)} → {number(last)} ms)" if known else "failed")
        rows.append([title, *cells])
    return table(rows)


def batch_gain(sweep: list[Record]) -> str:
    """What twice the batch gains."""
    rates = {batch: case["contenders"]["spectral"].get("images_per_s") for batch, case in along(sweep)[AXES[0]]}
    last = max(rates, default=0)
    if not rates.get(last) or not rates.get(last // 2):
        return ""
    gain = rates[last] / rates[last // 2]
    return f"Twice the batch, {last // 2} → {last}, is {gain:.2f} times the images per second in this layer."


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plots() -> dict[str, Figure]:
    """What the page shows, by its place in results/; what was not measured is left out."""
    found = {}
    for name, result in load().items():
        for kind, plot, group in (("network", plot_network, "network"), ("growth", plot_growth, "sweep")):
            if cases := of_group(result, group):
                found[f"bench/{name}-{kind}.png"] = plot(cases, result["environment"]["device"])
    return found


def plot_network(cases: list[Record], device: str) -> Figure:
    """Images per second: a panel for training, one for inference, bars for each mode that all three have."""
    cases = [case for case in cases if "spectral" in case["contenders"]]
    modes = list(dict.fromkeys((case["precision"], case["graph"]) for case in cases))
    works = [train for train in (True, False) if any(case["train"] == train for case in cases)]
    figure = empty(7.5 + 1.5 * len(modes), 4)
    contenders = [line for line in styled(PLOTTED) if line[0] != "auto"]  # which is one of the others
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
