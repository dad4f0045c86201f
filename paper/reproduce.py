"""Everything in README.md and docs/reproduction.md that was measured, regenerated from results/.

Each number and picture stands between a pair of markers, ``<!-- name -->`` and ``<!-- end -->``; what has not been
measured is a gap. `scalesteer reproduce --fresh` makes all runs first.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from paper import figures, quickstart
from paper.results import Result, Results, collect, mean_and_std
from paper.runner import run_table
from paper.tables import (
    CHOICES,
    DATASETS,
    GAP,
    LENGTHS,
    METHODS,
    MOVES,
    RECIPES,
    TABLES,
    Cell,
    chosen,
    distorted_after,
    get_table,
    layout,
    mean,
    mean_error,
    render,
    show,
    spread,
)
from scalesteer.data import ELASTIC_ALPHAS
from scalesteer.data.scale import SPLITS
from scalesteer.training import SCALE_BINS
from scalesteer.training.config import RunConfig

README, PAGE, RESULTS = Path("README.md"), Path("docs/reproduction.md"), Path("results")
ORDER = ("tuning", *(name for name in TABLES if name != "tuning"))  # settings are chosen before they are used
TRAINED = (
    *("layer", "filters", "feature-maps", "filter-bank", "winning-scales", "scale-tracking"),
    *("centrality", "entanglement"),
)
UNTRAINED = ("sensitivity", "resizing")
DISTORTIONS = {f"α = {alpha:g}": ("errors", alpha) for alpha in ELASTIC_ALPHAS}
DISTORTIONS |= {f"moved {pixels:g} px": ("moved", pixels) for pixels in MOVES}  # title: where a result has the error
# Whom SS-CNN is held against under distortion, and what the ratio of errors must be below for the claim to hold.
RIVALS = {"LocScaleInv-CNN": 1.0, "Spatial Transformer": 1.1}
Rows = Mapping[str, tuple[Cell, ...]]
Lines = dict[str, tuple[list[float], list[list[float]]]]  # by name: a ratio at each strength, and those of each split
STUDENT = {2: 12.7062, 3: 4.30265, 4: 3.18245, 5: 2.77645, 6: 2.57058, 24: 2.06866}  # 97.5 % of t, by number of values


def reproduce(
    root: Path = Path(),
    *,
    fresh: bool = False,
    only: Iterable[str] | None = None,
    runs: Path = Path("runs"),
    device: str = "auto",
    data_dir: Path | None = None,
    jobs: int = 1,
) -> list[str]:
    """Regenerate the tables and pictures of a checkout, with `fresh` after making all runs anew.

    It may be interrupted at any time; the same call goes on with what is in `runs`.

    Args:
        root: The checkout.
        fresh: Make the runs, whether or not results/ has them; their results take the place of the old.
        only: With `fresh`, which tables to run; by default all.
        runs: Where runs are kept; figures of trained networks are drawn if the networks are there.
        device: Where to train.
        data_dir: Where the original files are, if not in the cache.
        jobs: How many runs to make at once.

    Returns:
        What kept runs from being finished, a line each.
    """
    for path in (README, PAGE):
        if not (root / path).exists():
            raise ValueError(f"{path} is not in {root.resolve()}: reproduce in a checkout of scalesteer.")
    problems: list[str] = []
    if fresh:
        tables = sorted(map(get_table, ORDER if only is None else only), key=lambda table: ORDER.index(table.name))
        configs = dict.fromkeys(config for table in tables for config in table.runs)
        todo = [config for config in configs if not (runs / config.name / "result.json").exists()]
        print(forecast(todo, collect(root / RESULTS)), flush=True)
        for table in tables:
            problems += run_table(
                table, runs=runs, results=root / RESULTS, device=device, data_dir=data_dir, jobs=jobs, fresh=True
            )
    results = collect(root / RESULTS)
    draw(results, root / RESULTS / "figures", runs, data_dir)
    for path, parts in documents(results, root).items():
        (root / path).write_text(fill((root / path).read_text(), parts))
    return problems


def forecast(todo: Iterable[RunConfig], results: Results) -> str:
    """How long runs will take one after another, as far as results of runs that cost the same tell.

    Training is counted, evaluation is not; of several devices the one that made most runs.
    """

    def cost(config: RunConfig) -> RunConfig:
        return replace(config, split=0, seed=0, lr=1.0, weight_decay=0.0, tuning=False)

    known: dict[RunConfig, list[Result]] = {}
    elsewhere = results.elsewhere(results.runs)
    for config in results.finished(results.runs):
        if config not in elsewhere:
            known.setdefault(cost(config), []).append(results.runs[config])
    todo = list(todo)
    alike = [known[cost(config)] for config in todo if cost(config) in known]
    said = [f"{len(todo)} runs to make"]
    if alike:
        minutes = sum(mean_and_std([result["seconds"] for result in found])[0] for found in alike) / 60
        length = f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.0f} minutes"
        devices = sorted({result["environment"]["device"] for found in alike for result in found})
        said.append(f"{len(alike)} of them take about {length} of training on {', '.join(devices)}")
    if len(alike) < len(todo):
        said.append(f"no result tells how long {len(todo) - len(alike)} of them take")
    return "; ".join(said) + "."


def fill(text: str, parts: dict[str, str]) -> str:
    """Put each part between its markers."""
    for name, part in parts.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match, part=part: match[1] + part + "\n" + match[2],  # type: ignore[misc]
            text,
            flags=re.S,
        )
        if count != 1:
            raise ValueError(f"a document must have exactly one place for {name!r} (found {count}).")
    return text


def documents(results: Results, root: Path = Path()) -> dict[Path, dict[str, str]]:
    """What is generated in each document, by the name of its place."""
    page = {f"table {name}": render(get_table(name), results, "markdown").strip() for name in TABLES}
    page |= {
        "recipes": recipes(results),
        "pairs": pairs(results),
        "sizes": sizes(results),
        "ratios": ratios(results),
        "distorted": distorted(results),
        "longer": longer(results),
        "repeats": repeats(results),
        "effects": effects(results),
        "scales": scales(results),
        "costs": costs(results),
        "checks": checks(results),
        "claims": claims(results),
    }
    plots = [f"{kind}-{dataset}" for kind in ("validation", "scales") for dataset in DATASETS]
    for name in (*plots, "distortion", *TRAINED, *UNTRAINED):
        path = RESULTS / "figures" / f"{name}.png"
        caption = figures.FIGURES[name].description if name in figures.FIGURES else name
        page[f"figure {name}"] = f"![{caption}](../{path.as_posix()})" if (root / path).exists() else "*Not drawn yet.*"
    readme = {"results": render(get_table("1"), results, "markdown").partition("\n\n")[2].strip(), "unseen": GAP}
    for name in quickstart.MORE:
        path, page[f"unseen {name}"] = root / RESULTS / "quickstart" / f"result-{name}.json", GAP
        if path.exists():
            measured = json.loads(path.read_text())
            page[f"unseen {name}"] = quickstart.readme_table(measured)
            if name == "all":
                readme["unseen"] = quickstart.outside_sentence(measured)
    return {README: readme, PAGE: page}


def recipes(results: Results) -> str:
    """What each method uses, and whether validation chose it."""

    def words(method: str, dataset: str) -> str:
        recipe, best = RECIPES[method, dataset], chosen(results, method, dataset)
        note = " (not tuned yet)" if best is None else "" if best == recipe else f" (validation chose {best})"
        return f"{recipe}{note}"

    lines = [["settings", *DATASETS.values()]]
    lines += [[method, *(words(method, dataset) for dataset in DATASETS)] for method in METHODS]
    return layout(lines).strip()


def pairs(results: Results) -> str:
    """SS-CNN against each other method, split by split: all see the same images."""
    lines = [["SS-CNN minus", "mean ± std of the differences", "95 % interval of the mean", "SS-CNN lower in"]]
    for name in ("1", "3"):
        table = get_table(name)
        for i, column in enumerate(table.columns):
            for method, row in table.rows.items():
                if method != "SS-CNN":
                    changes = results.differences(table.rows["SS-CNN"][i].runs, row[i].runs)
                    lines.append([f"{method}, {column}", *_compared(changes)])
    return layout(lines).strip()


def _compared(changes: list[float]) -> tuple[str, str, str]:
    """Differences of pairs: mean and spread, Student's interval (bold where zero is outside), how often below zero.

    There is an interval where `STUDENT` has the number of pairs.
    """
    if not changes:
        return GAP, GAP, GAP
    interval, (centre, std) = GAP, mean_and_std(changes)
    if std is not None and len(changes) in STUDENT:
        reach = STUDENT[len(changes)] * std / len(changes) ** 0.5
        interval = " to ".join(f"{end:+.{2 if abs(end) >= 0.005 else 3}f}" for end in (centre - reach, centre + reach))
        interval = f"**{interval}**" if reach < abs(centre) else interval
    return spread(changes, "+.2f"), interval, f"{sum(c < 0 for c in changes)} of {len(changes)}"


def sizes(results: Results) -> str:
    """MNIST-Scale with the input sizes that the paper has for each method, on the splits of the ablations."""
    rows = get_table("ablations").rows
    ours = rows["SS-CNN, 56 px"][0]
    titles = ("here", "paper", "SS-CNN minus it", "95 % interval", "SS-CNN lower in")
    lines = [["input size of the paper, error in %", *titles]]
    for method, (cell, *_) in get_table("1").rows.items():
        own = ours if method == "SS-CNN" else rows[f"{method}, 28 px"][0]
        compared = _compared(results.differences(ours.runs, own.runs) if own is not ours else [])
        size = 56 if own is ours else 28
        lines.append([f"{method}, {size} px", show(own, results), cell.paper or GAP, *compared])
    return layout(lines).strip()


def ratios(results: Results) -> str:
    """Table 2 as ratios of errors: of the best networks, and of means over the splits where both were tested."""
    return _ratios(results, {"": get_table("2").rows})


def _ratios(results: Results, groups: Mapping[str, Rows]) -> str:
    """In each group of rows SS-CNN's errors over those of the paper's other methods, beside the paper's ratios: of the
    best networks, and of means over the splits where both were tested."""
    lines = [["ratio of errors", *(text for column in get_table("2").columns for text in (column, "paper"))]]

    def average(cell: Cell, splits: list[int]) -> float | None:
        found = _errors(results, cell.runs, ("errors", cell.alpha or 0), splits)
        return mean_and_std(found)[0] if found else None

    for other in RIVALS:
        for label, rows in groups.items():
            pair = rows["SS-CNN"], rows[other]
            tested = _tested(results, pair)
            paper = [f"{float(a.paper) / float(b.paper):.2f}" for a, b in zip(*pair, strict=True)]
            best = [[final(cell, results) for cell in row] for row in pair]
            means = [[average(cell, tested) for cell in row] for row in pair]
            for end, numbers in {"": best, ", means over splits": means}.items():
                ours = [f"{a / b:.2f}" if a is not None and b else GAP for a, b in zip(*numbers, strict=True)]
                shown = (text for both in zip(ours, paper, strict=True) for text in both)
                lines.append([f"SS-CNN / {other}{label}{end}", *shown])
    return layout(lines).strip()


def _tested(results: Results, rows: Iterable[tuple[Cell, ...]]) -> list[int]:
    """The splits in which every network of some rows was tested in all ways: there all saw the same images."""
    networks, ways = [row[0].runs for row in rows], DISTORTIONS.values()
    return [i for i in SPLITS if all(_errors(results, runs, way, [i]) for runs in networks for way in ways)]


def _errors(
    results: Results, runs: tuple[RunConfig, ...], way: tuple[str, float], splits: Iterable[int]
) -> list[float]:
    """Errors in % of the networks of some splits when they were tested in one of the ways of `DISTORTIONS`."""
    return results.distorted([config for config in runs if config.split in splits], *way)


def distorted(results: Results) -> str:
    """Table 2 on the same images for all, as means over splits, also with images moved; and SS-CNN against each."""
    rows = get_table("2").rows
    tested = _tested(results, rows.values())
    split = "split" if len(tested) == 1 else "splits"
    lines = [[f"error in %, {split} {', '.join(map(str, tested)) or GAP}", *DISTORTIONS]]
    for method, row in rows.items():
        found = [_errors(results, row[0].runs, way, tested) for way in DISTORTIONS.values()]
        lines.append([method, *(spread(errors) if errors else GAP for errors in found)])
    against = [["SS-CNN minus", *DISTORTIONS]]
    against += [[m, *_intervals(results, rows["SS-CNN"], rows[m], tested)] for m in rows if m != "SS-CNN"]
    notes = []
    for method, row in rows.items():
        again = [str(i) for i in tested if _is_another_run(results, row[0].runs[i])]
        notes += [f"{method}: in split {', '.join(again)} networks of another run than in Table 1."] if again else []
    return layout(lines) + "\n" + layout(against, notes=notes).strip()


def _intervals(
    results: Results, first: tuple[Cell, ...], second: tuple[Cell, ...], splits: list[int] | None = None
) -> Iterator[str]:
    """First minus second row: the interval of the mean in each of the ways of `DISTORTIONS`, over some splits or all
    in which both were tested."""
    tested = _tested(results, [first, second]) if splits is None else splits
    for way in DISTORTIONS.values():
        pairs = zip(*(_errors(results, row[0].runs, way, tested) for row in (first, second)), strict=True)
        yield _compared([a - b for a, b in pairs])[1]


def longer(results: Results) -> str:
    """What more epochs do to Table 2: intervals, and ratios with more for all or with what validation chose."""
    few, *more = LENGTHS
    lengths = {epochs: distorted_after(epochs) for epochs in LENGTHS}
    changes = [[f"minus its error after {few} epochs", "validation", *DISTORTIONS]]
    selected: dict[str, tuple[Cell, ...]] = {}
    said = []
    for method, usual in lengths[few].items():
        for epochs in more:
            row = lengths[epochs][method]
            validation = results.differences(row[0].runs, usual[0].runs, "val_error")
            intervals = _compared(validation)[1], *_intervals(results, row, usual)
            changes.append([f"{method}, {epochs} epochs", *intervals])
        options = {n: rows[method] for n, rows in lengths.items() if _all_finished(results, rows[method])}
        selected[method] = tuple(replace(cell, runs=()) for cell in usual)
        if len(options) > 1:  # else there was nothing to choose from
            lowest = min(options, key=lambda n: _mean_in_validation(results, options[n]))
            selected[method] = options[lowest]
            said.append(f"{method} {lowest} (of {', '.join(map(str, options))})")
    groups: dict[str, Rows] = {f", {epochs} epochs": lengths[epochs] for epochs in more}
    groups[", as validation chose"] = selected
    against = [["SS-CNN, trained likewise, minus", *DISTORTIONS]]
    for other in selected:
        for label, rows in groups.items() if other != "SS-CNN" else ():
            against.append([f"{other}{label}", *_intervals(results, rows["SS-CNN"], rows[other])])
    notes = [f"Epochs that validation chose: {'; '.join(said)}."] if said else []
    parts = layout(changes), layout(against, notes=notes), _ratios(results, groups)
    return "\n\n".join(part.strip() for part in parts)


def _all_finished(results: Results, row: tuple[Cell, ...]) -> bool:
    return len(results.finished(row[0].runs)) == len(row[0].runs)


def _mean_in_validation(results: Results, row: tuple[Cell, ...]) -> float:
    return mean_and_std([results.mean(config, "val_error") for config in row[0].runs])[0]


def ratio_lines(results: Results) -> dict[str, Lines]:
    """SS-CNN's errors under distortion over those of the others: the paper's, ours after few epochs and after more."""
    drawn: dict[str, Lines] = {}
    for other in RIVALS:
        table = get_table("2").rows
        pairs = zip(table["SS-CNN"], table[other], strict=True)
        lines: Lines = {"paper": ([float(a.paper) / float(b.paper) for a, b in pairs], [])}
        for epochs in LENGTHS:
            rows = distorted_after(epochs)
            tested = _tested(results, [rows["SS-CNN"], rows[other]])
            if tested:
                errors = [
                    [_errors(results, rows[m][0].runs, ("errors", alpha), tested) for alpha in ELASTIC_ALPHAS]
                    for m in ("SS-CNN", other)
                ]
                ours, theirs = np.array(errors)  # (strengths, splits)
                means = (ours.mean(1) / theirs.mean(1)).tolist()
                lines[f"here, {epochs} epochs"] = means, (ours / theirs).T.tolist()
        drawn[f"SS-CNN / {other}"] = lines
    return drawn


def _is_another_run(results: Results, config: RunConfig) -> bool:
    """Whether the network that was tested under distortion is not the one whose test error is published."""
    published = results.test_errors([config])
    return bool(published) and abs(results.elastic[config]["errors"]["0"] - published[0]) > 2e-4  # rounding is less


def repeats(results: Results) -> str:
    """Runs of the tables beside other runs of the same configuration, and how far a run lies from their mean."""
    kinds: dict[RunConfig, dict[int, list[float]]] = {}
    for config in results.finished(results.repeats):
        if not config.tuning:
            errors = [100 * error for error in results.made(config, "test_error")]
            kinds.setdefault(replace(config, split=0), {})[config.split] = errors
    lines = [["error in %", *(f"split {i}" for i in SPLITS), "mean"]]
    for kind, by_split in kinds.items():
        method = next(m for m in METHODS if METHODS[m] == kind.model)
        name = f"{method}, {DATASETS.get(kind.dataset, kind.dataset)}, {28 * (kind.upsample or 1)} px"
        for turn in range(max(map(len, by_split.values()))):
            shown = {i: errors[turn] for i, errors in by_split.items() if turn < len(errors)}
            line = [f"{name}, {f'another run ({turn})' if turn else 'in the tables'}"]
            line += [f"{shown[i]:.2f}" if i in shown else GAP for i in SPLITS]
            whole = len(shown) == len(by_split)  # means of other splits would not compare
            lines.append([*line, f"{mean_and_std(list(shown.values()))[0]:.2f}" if whole else GAP])
    groups = [errors for by_split in kinds.values() for errors in by_split.values() if len(errors) > 1]
    if not groups:
        return layout(lines).strip()
    squares = sum((len(group) - 1) * (mean_and_std(group)[1] or 0) ** 2 for group in groups)
    deviation = (squares / sum(len(group) - 1 for group in groups)) ** 0.5
    note = f"Standard deviation of one run around the mean of its configuration: {deviation:.2f}."
    return layout(lines, notes=[note]).strip()


def effects(results: Results) -> str:
    """What each of the changes that were combined is worth on validation data, all others being equal."""
    rows = get_table("choices").rows
    lines = [["instead of", "validation error in %, mean ± std", "95 % interval of the mean", "lower in"]]
    for i, options in enumerate(CHOICES):
        ours, other = options
        changes = []
        for names in itertools.product(*CHOICES):
            if names[i] == other:
                twin = (*names[:i], ours, *names[i + 1 :])
                changed, unchanged = (rows[", ".join(combined)][0].runs for combined in (names, twin))
                changes += results.differences(changed, unchanged, "val_error")
        lines.append([f"{ours}: {other}", *_compared(changes)])
    return layout(lines).strip()


def _finished(results: Results, dataset: str) -> dict[str, list[Result]]:
    """The results of Table 1 on one dataset, for the methods that have any."""
    column = list(DATASETS).index(dataset)
    found = {m: [results.runs[c] for c in results.finished(row[column].runs)] for m, row in get_table("1").rows.items()}
    return {method: runs for method, runs in found.items() if runs}


def by_scale(results: Results, dataset: str) -> dict[str, list[list[float]]]:
    """For each method its runs' test errors in bins of the object's scale."""
    found = _finished(results, dataset)
    return {m: [[row["error"] for row in run["test_error_by_scale"]] for run in runs] for m, runs in found.items()}


def scales(results: Results) -> str:
    """Error by scale of the object, mean over splits."""
    parts = []
    for dataset, title in DATASETS.items():
        curves = by_scale(results, dataset)
        lines = [[f"{title}, error in %", *(f"{low:g}–{high:g}" for low, high in SCALE_BINS)]]
        for method in METHODS:
            means = 100 * np.mean(curves.get(method, [[np.nan] * len(SCALE_BINS)]), axis=0)
            lines.append([method, *(GAP if np.isnan(error) else f"{error:.2f}" for error in means)])
        parts.append(layout(lines).strip())
    return "\n\n".join(parts)


def costs(results: Results) -> str:
    """Parameters and training time by method."""
    columns = [f"{title}, {what}" for title in DATASETS.values() for what in ("parameters", "s")]
    lines = [["mean over splits", *columns, "all runs, minutes"]]
    found = [_finished(results, dataset) for dataset in DATASETS]
    for method in METHODS:
        runs = [part.get(method, []) for part in found]
        minutes = sum(run["seconds"] for part in runs for run in part) / 60
        total = f"{minutes:.1f} ({sum(map(len, runs))} runs)" if minutes else GAP
        lines.append([method, *(mean(part, key) for part in runs for key in ("parameters", "seconds")), total])
    devices = {run["environment"]["device"] for part in found for runs in part.values() for run in runs}
    return layout(lines, notes=[f"Time of training on {', '.join(sorted(devices))}."] if devices else ()).strip()


def final(cell: Cell, results: Results) -> float | None:
    """The number of a cell in %, once all of its runs have ended."""
    return mean_error(cell, results) if all(config in results.runs for config in cell.runs) else None


def checks(results: Results) -> str:
    """For every number of the paper's tables, whether ours is at or below it."""
    lines = []
    for name in ("1", "2", "3"):
        table = get_table(name)
        for method, row in table.rows.items():
            said = []
            for column, cell in zip(table.columns, row, strict=True):
                ours = final(cell, results)
                if cell.paper and ours is None:
                    said.append(f"{column} {GAP}")
                elif cell.paper and ours is not None:
                    below = round(ours, 2) <= float(cell.paper.split()[0])
                    said.append(f"{column} {'yes' if below else '**no**'} ({ours:.2f}, paper {cell.paper})")
            lines += [f"- Table {name}, {method}: {'; '.join(said)}"] if said else []
    return "\n".join(lines)


def claims(results: Results) -> str:
    """What the paper concludes from its tables, and whether our numbers say the same."""
    first, second, third, variants = (get_table(name).rows for name in ("1", "2", "3", "ablations"))
    transformer, *local = others = ("Spatial Transformer", "LocScaleEq-CNN", "LocScaleInv-CNN")
    small, large = ({m: variants[f"{m}, {size} px"][0] for m in METHODS} for size in (28, 56))
    most = RIVALS[transformer]
    par = f"SS-CNN is on par with {transformer} at every strength (at most {most:g} times its error, as in the paper)"

    def ours_against(other: str, rows: Rows) -> Iterable[tuple[Cell, Cell]]:
        return zip(rows["SS-CNN"], rows[other], strict=True)

    said: list[tuple[str, Iterable[tuple[Cell, Cell]]]] = [
        ("SS-CNN has the lowest error on MNIST-Scale", [(first["SS-CNN"][0], first[m][0]) for m in others]),
        ("the same with the paper's input sizes (splits 0 to 2)", [(large["SS-CNN"], small[m]) for m in others]),
        ("A larger input helps SS-CNN", [(large["SS-CNN"], small["SS-CNN"])]),
        ("A larger input does not help the others", [(small[m], large[m]) for m in others]),
        (
            "Spatial Transformer has the lowest error on FMNIST-Scale",
            [(first[transformer][1], first[m][1]) for m in ("SS-CNN", *local)],
        ),
        (
            "SS-CNN has a lower error on FMNIST-Scale than both other locally invariant networks",
            [(first["SS-CNN"][1], first[m][1]) for m in local],
        ),
        (
            "SS-CNN has a lower error than LocScaleInv-CNN at every strength of distortion (the best networks)",
            ours_against("LocScaleInv-CNN", second),
        ),
        *((f"the same after {n} epochs", ours_against("LocScaleInv-CNN", distorted_after(n))) for n in LENGTHS[1:]),
        (par, ours_against(transformer, second)),
        *((f"on par after {n} epochs", ours_against(transformer, distorted_after(n))) for n in LENGTHS[1:]),
        (
            "SS-CNN has a lower error than Spatial Transformer on MNIST-scale-local-2 with any number of images",
            ours_against(transformer, third),
        ),
    ]
    lines = [["claim of the paper", "here"]]
    for claim, compared in said:
        errors = [(final(low, results), final(high, results)) for low, high in compared]
        times = most if "on par" in claim else 1
        known = [low < times * high for low, high in errors if low is not None and high is not None]
        lines.append([claim, GAP if len(known) < len(errors) else "yes" if all(known) else "**no**"])
    return layout(lines).strip()


def draw(results: Results, folder: Path, runs: Path, data_dir: Path | None = None) -> None:
    """Draw what there is something to draw from: results, networks of the first split in `runs`, or nothing at all."""
    drawn = {}
    for dataset, title in DATASETS.items():
        curves = by_scale(results, dataset)
        if curves:
            middles = [sum(ends) / 2 for ends in SCALE_BINS]
            drawn[f"scales-{dataset}"] = figures.draw_errors(curves, middles, f"scale of the object, {title}")
            histories = {
                m: [r["history"]["val_error"] for r in runs] for m, runs in _finished(results, dataset).items()
            }
            drawn[f"validation-{dataset}"] = figures.draw_histories(histories, f"validation error on {title}, %")
    if results.elastic:
        lines, limits = ratio_lines(results), list(RIVALS.values())
        drawn["distortion"] = figures.draw_ratios(lines, ELASTIC_ALPHAS, "strength of distortion α", limits)
    ss, lsi = (runs / get_table("1").rows[m][0].runs[0].name for m in ("SS-CNN", "LocScaleInv-CNN"))
    here = all((run / "model.safetensors").exists() for run in (ss, lsi))
    for name in (*UNTRAINED, *(TRAINED if here else ())):
        drawn[name] = figures.draw(name, ss, lsi, data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
