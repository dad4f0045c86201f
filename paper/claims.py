"""What is claimed, by the paper and as targets of ours, and the verdicts of the results: holds, fails or undecided."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from paper import grids
from paper.cells import Data, Interval, Summary, between, columns, mean, minus, values
from paper.distortion import MORE_EPOCHS, epochs_of
from paper.grids import EXPERIMENTS, FEW_IMAGES, OTHERS, PAPER, PAR, SOME_SIZES, STRENGTHS, Cell
from paper.markdown import GAP, table, view, words
from scalesteer.datasets.scale import SPLITS


class Pair(NamedTuple):
    """A claim about two cells, or a cell and a number: the first is below `times` the second."""

    first: Cell
    second: Cell | float
    times: float = 1


class Claim(NamedTuple):
    """A conclusion of the paper, or a target, which holds if all its pairs do; evidence is a page of docs/evidence.

    `paper` is its number where that stands in no table.
    """

    text: str
    evidence: str
    pairs: tuple[Pair, ...]
    paper: str = ""


def _below(experiment: str, column: str, first: str, others: Iterable[str]) -> tuple[Pair, ...]:
    return tuple(Pair(Cell(experiment, first, column), Cell(experiment, other, column)) for other in others)


def _under_distortion(other: str, times: float) -> tuple[Pair, ...]:
    """SS-CNN below so many times another method's errors at every strength of distortion."""
    cells = ([Cell("longer", line, "60 epochs", alpha) for line in ("SS-CNN", other)] for alpha in STRENGTHS)
    return tuple(Pair(ours, theirs, times) for ours, theirs in cells)


CLAIMS: dict[str, Claim] = {
    "mnist": Claim(
        "SS-CNN has the lowest error on MNIST-Scale", "input-size", _below("1", "MNIST-Scale", "SS-CNN", OTHERS)
    ),
    "input size": Claim(
        "A larger input helps SS-CNN, not the others",
        "input-size",
        (
            Pair(Cell("sizes", "SS-CNN", "56 px"), Cell("sizes", "SS-CNN", "28 px")),
            *(Pair(Cell("sizes", other, "28 px"), Cell("sizes", other, "56 px")) for other in OTHERS),
        ),
        paper="SS-CNN gains about 0.2, the others nothing",
    ),
    "fmnist transformer": Claim(
        "Spatial Transformer has the lowest error on FMNIST-Scale",
        "split-by-split",
        _below("1", "FMNIST-Scale", "Spatial Transformer", ("SS-CNN", *OTHERS[1:])),
    ),
    "fmnist": Claim(
        "SS-CNN has a lower error on FMNIST-Scale than both other locally invariant networks",
        "split-by-split",
        _below("1", "FMNIST-Scale", "SS-CNN", OTHERS[1:]),
    ),
    "distortion": Claim(
        "SS-CNN has a lower error than LocScaleInv-CNN at every strength of distortion",
        "distortion",
        _under_distortion("LocScaleInv-CNN", 1),
    ),
    "par": Claim(
        f"SS-CNN is on par with Spatial Transformer at every strength: at most {PAR:g} times its error",
        "distortion",
        _under_distortion("Spatial Transformer", PAR),
    ),
    "few images": Claim(
        "SS-CNN has a lower error than Spatial Transformer on MNIST-scale-local-2 with any number of images",
        "split-by-split",
        tuple(pair for column in FEW_IMAGES for pair in _below("3", column, "SS-CNN", OTHERS[:1])),
    ),
}


def ours(experiment: str, column: str = "", measure: str = "outside", *, augmented: bool = False) -> Cell:
    """The cell of an experiment that its targets are about."""
    return Cell(experiment, grids.LEADING[experiment] + grids.AUGMENTED * augmented, column, measure)


def _stir_target(title: str, *limits: float) -> Claim:
    shown = ", ".join(f"{limit:g}" for limit in limits)
    return Claim(
        f"STIR {title}: accuracy outside the training sizes at least {shown} ({', '.join(SOME_SIZES)})",
        "stir",
        tuple(Pair(ours("stir", f"{title} {p}"), 100 - limit) for p, limit in zip(SOME_SIZES, limits, strict=True)),
    )


LARGE_LIMITS = {0.5: 98.6, 1: 99.4, 2: 99.3, 4: 98.9, 8: 75.0}  # accuracy by size
TARGETS: dict[str, Claim] = {
    "stir mnist": _stir_target("MNIST", 94.0, 93.0, 91.0),
    "stir emoji": _stir_target("Emoji", 72.0, 82.0, 60.0),
    "stir rivals": Claim(
        "STIR: a lower error outside the training sizes than all rivals, in every protocol",
        "stir",
        tuple(
            Pair(ours("stir", column), Cell("stir", rival, column, "outside"))
            for column, rival in itertools.product(columns("stir"), grids.RIVALS)
            if "All2All" not in column
        ),
    ),
    "large-scale": Claim(
        "MNIST Large Scale: accuracy at least {} at {}".format(
            *(words([f"{number:g}" for number in numbers]) for numbers in (LARGE_LIMITS.values(), LARGE_LIMITS))
        ),
        "large-scale",
        tuple(
            Pair(ours("large-scale", measure=f"size {size:g}"), round(100 - limit, 1))
            for size, limit in LARGE_LIMITS.items()
        ),
    ),
    "cifar": Claim(
        "Rescaled CIFAR-10: error at sizes never seen at most 0.8 times that of every rival",
        "photographs",
        tuple(
            Pair(ours("rescaled-cifar10"), Cell("rescaled-cifar10", rival, "", "outside"), 0.8)
            for rival in grids.RIVALS
        ),
    ),
    "cifar inside": Claim(
        "Rescaled CIFAR-10: at the size of training, an error below the plain network's",
        "photographs",
        (Pair(ours("rescaled-cifar10", measure="inside"), Cell("rescaled-cifar10", grids.TWIN, "", "inside")),),
    ),
    "new mnist": Claim(
        "MNIST-Scale: error at most 1.45 % without and 1.35 % with random resizing",
        "split-by-split",
        tuple(
            Pair(ours("new-networks", "MNIST-Scale", "test error", augmented=more), limit)
            for more, limit in ((False, 1.45), (True, 1.35))
        ),
    ),
    "new fmnist": Claim(
        "FMNIST-Scale: error at most 12.0 %",
        "split-by-split",
        (Pair(ours("new-networks", "FMNIST-Scale", "test error"), 12.0),),
    ),
    "size": Claim(
        "STIR MNIST: rank correlation of the estimated size with the true one at least 0.9, whatever was trained",
        "stir",
        tuple(Pair(ours("stir", f"MNIST {protocol}", "1 - size correlation"), 0.1) for protocol in SOME_SIZES),
    ),
}
"""What networks for any size should reach, set before they were tested. Errors in %; a claim is that one is below."""


# Verdicts


def decide(data: Data, pairs: Iterable[Pair]) -> tuple[str, Pair, Interval]:
    """Whether all pairs are as claimed (holds, fails, undecided), and the pair that decides that.

    One pair that fails is enough, also where others lack numbers; else a missing number is a gap. Differences are
    weighed as shares of the second error, so that strong distortion counts no more than mild.
    """
    found = [(pair, minus(data, *pair)) for pair in pairs]
    verdicts = {result.verdict for _, result in found}
    verdict = next((word for word in ("fails", GAP, "undecided") if word in verdicts), "holds")
    found = [entry for entry in found if entry[1].verdict == verdict]
    end = "low" if verdict == "fails" else "high"

    def share(entry: tuple[Pair, Interval]) -> float:
        second = entry[0].second
        return float(getattr(entry[1], end) / (values(data, second).mean() if isinstance(second, Cell) else second))

    return verdict, *max(found, key=share)


# The forms in which rivals were published, where Table 1 has one of ours

PUBLISHED = "published-forms"
SIX_NUMBERS = "Spatial Transformer, six numbers"
ROTATION = "LocScaleEq-CNN, released code's rotation"
FORMS = {"Spatial Transformer": SIX_NUMBERS, "LocScaleEq-CNN": ROTATION}
"""By method, the line of the experiment "published-forms" that has its published form."""


def measured(data: Data, cell: Cell) -> bool:
    """Whether all runs of a cell are there."""
    known = cell.experiment in EXPERIMENTS and cell.column in columns(cell.experiment)
    return known and bool(values(data, cell).notna().all())


def as_published(data: Data, claim: Claim) -> tuple[Pair, ...]:
    """The pairs of a claim with the published forms of the rivals; none if they are not all measured, or not needed."""

    def form(cell: Any) -> Any:
        swapped = isinstance(cell, Cell) and cell.experiment == "1" and cell.line in FORMS
        return cell._replace(experiment=PUBLISHED, line=FORMS[cell.line]) if swapped else cell

    pairs = tuple(Pair(form(first), form(second), times) for first, second, times in claim.pairs)
    swapped = [cell for pair in pairs for cell in pair[:2] if isinstance(cell, Cell) and cell.experiment == PUBLISHED]
    return pairs if swapped and all(measured(data, cell) for cell in swapped) else ()


def published_verdict(data: Data, claim: Claim) -> str:
    """The verdict of a claim with the published forms of the rivals, and the interval that decides it."""
    pairs = as_published(data, claim)
    if not pairs:
        return GAP
    word, _, found = decide(data, pairs)
    return f"{word}, {found}"


# The paper's own numbers under the rule for ours


def summary(cell: Cell) -> Summary | None:
    """The paper's mean and deviation over its six splits, if it gives both."""
    text = papers(cell) if cell.experiment in PAPER and cell.measure not in STRENGTHS else ""
    number, _, deviation = text.partition(" ± ")
    return Summary(float(number), float(deviation), len(SPLITS)) if deviation else None


def papers_own(claim: Claim) -> str:
    """The verdict that the paper's means and deviations give a claim, unpaired; a dash where it has none."""
    verdicts = set[str]()
    for first, second, times in claim.pairs:
        both = [summary(cell) if isinstance(cell, Cell) else None for cell in (first, second)]
        if both[0] is None or both[1] is None or times != 1:
            return GAP
        verdicts.add(Interval([], *between(both[0], both[1]), whole=True).verdict)
    return next((word for word in ("fails", "undecided") if word in verdicts), "holds")


# Claims as a table


def difference(pair: Pair, found: Interval) -> str:
    """The interval of a pair, and of what if that is not a plain difference."""
    return f"{found} (first minus {pair.times:g} times second)" if pair.times != 1 else str(found)


@view
def claims(data: Data) -> str:
    """The paper's claims: its numbers and ours where the claim is decided, the interval, and the verdict.

    Beside that, the verdict with the published forms of the rivals, and the one that the paper's own numbers give.
    """
    rows = [["claim of the paper", "paper, error in %", "here", "95 % interval of the difference", "verdict"]]
    rows[0] += ["with the rivals' published forms", "by the paper's numbers"]
    for key, claim in CLAIMS.items():
        word, pair, found = decide(data, claim.pairs)
        paper = claim.paper or _both(pair, lambda cell: paper_number(*cell))
        here = _both(pair, lambda cell: mean(values(data, cell, averaged=False))) if word != GAP else GAP
        said = f"[{word}](evidence/{claim.evidence}.md)"
        if pair.first.experiment == "longer":
            more = "; ".join(f"{way}: {verdict(data, key, way)}" for way in MORE_EPOCHS)
            said += f" ({more})"
        beside = published_verdict(data, claim), papers_own(claim)
        rows.append([claim.text, paper, here, difference(pair, found), said, *beside])
    return table(rows, left=7)


@view
def paper_number(*cell: str) -> str:
    """The paper's number in a cell, without its deviation."""
    return papers(Cell(*cell)).split()[0]


def papers(cell: Cell) -> str:
    """The paper's number in a cell."""
    if cell.measure in STRENGTHS:
        return PAPER["2"][cell.line][cell.measure]
    return PAPER[cell.experiment][cell.line][cell.column]


def _both(pair: Pair, number: Callable[[Cell], str]) -> str:
    """Both numbers of a pair, each with what sets it apart, and in what they are alike."""
    first, second, _ = pair
    if not isinstance(second, Cell):
        raise TypeError(f"a claim of the paper compares two cells (got {second!r}).")
    names, alike = (first.line, second.line), first.measure if first.measure in STRENGTHS else first.column
    if first.line == second.line:
        names, alike = (first.column, second.column), first.line
    return f"{names[0]} {number(first)}, {names[1]} {number(second)} ({alike})"


@view
def verdict(data: Data, claim: str, way: str = "") -> str:
    """Whether a claim holds; one on distortion also after so many epochs, or after those that validation chose."""
    own = epochs_of(data, way) if way else {}

    def then(cell: Any) -> Any:
        return cell._replace(column=own.get(cell.line, cell.column)) if isinstance(cell, Cell) else cell

    compared = [Pair(then(first), then(second), times) for first, second, times in CLAIMS[claim].pairs]
    return decide(data, compared)[0] if own or not way else GAP


def targets(data: Data) -> str:
    """Our own targets, an internal check: the pair that decides, its interval, and the verdict."""
    rows = [["target", "here", "95 % interval of the difference of errors", "verdict"]]
    for claim in TARGETS.values():
        word, pair, found = decide(data, claim.pairs)
        rows.append([claim.text, *([GAP] * 3 if word == GAP else [_here(data, pair), difference(pair, found), word])])
    return table(rows, left=4)


def _here(data: Data, pair: Pair) -> str:
    """Both numbers of a pair in the words of its table: accuracies, errors or correlations."""
    first, second, _ = pair
    whole, kind = (100.0, "accuracy") if first.experiment in ("stir", "large-scale") else (0.0, "error")
    if "correlation" in first.measure:
        whole, kind = 1.0, "rank correlation"
    numbers = [float(values(data, cell).mean()) if isinstance(cell, Cell) else cell for cell in (first, second)]
    shown = [f"{whole - number if whole else number:.2f}" for number in numbers]
    where = ", ".join(filter(None, (kind, first.column, first.measure if first.measure.startswith("size") else "")))
    other = second.line if isinstance(second, Cell) else f"at {'most' if kind == 'error' else 'least'}"
    return f"{first.line} {shown[0]}, {other} {shown[1]} ({where})".replace(grids.TWIN, "Plain network")
