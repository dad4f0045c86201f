"""What of the paper reproduces, and what its rivals' published forms change: the views of docs/reproduction.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from paper import recorded
from paper.cells import Data, Interval, Summary, between, columns, lines, mean, minus, show, spread, values
from paper.claims import FORMS, PUBLISHED, SIX_NUMBERS, Pair, decide, measured, papers, summary
from paper.grids import OTHERS, PAPER, Cell
from paper.markdown import GAP, table, view
from scalesteer.datasets.scale import SPLITS

EXACT = 1e-12  # relative; what is closer is equal to rounding

# Rivals in the form in which they were published


@view
def forms(data: Data) -> str:
    """Table 1 with the published forms of rivals beside ours, and what SS-CNN's errors are minus each.

    Below it the forms that are left out because runs are missing.
    """
    titles = columns("1")
    rows = [["error in %", *itertools.chain(*((title, "paper", "SS-CNN minus it") for title in titles))]]
    for method in lines("1"):
        form = FORMS.get(method, "")
        own = {f"{method}, our form" if form else method: [Cell("1", method, title) for title in titles]}
        if form and all(measured(data, cell) for cell in _published(form)):
            own[form] = _published(form)
        for label, cells in own.items():
            compared = method != "SS-CNN"
            shown = ((show(data, it), _papers(method, it), _behind(data, it) if compared else GAP) for it in cells)
            rows.append([label, *itertools.chain(*shown)])
        if form == SIX_NUMBERS and not data.replaced.empty:
            rows.append([f"{form}, first runs", *itertools.chain(*_first_runs(data, titles))])
    missing = [form for form in FORMS.values() if not all(measured(data, cell) for cell in _published(form))]
    left_out = f"Left out, because some of their runs have not been made: {'; '.join(missing)}."
    return "\n\n".join([table(rows), *([left_out] if missing else [])])


def _papers(method: str, cell: Cell) -> str:
    return PAPER["1"].get(method, {}).get(cell.column, GAP)


def _behind(data: Data, cell: Cell) -> str:
    return str(minus(data, Cell("1", "SS-CNN", cell.column), cell))


def _published(form: str) -> list[Cell]:
    return [Cell(PUBLISHED, form, title) for title in columns("1")]


def _first_runs(data: Data, titles: Iterable[str]) -> Iterable[tuple[str, str, str]]:
    """Of the replaced runs: their errors, the paper's, and how SS-CNN compares on the same images."""
    for title in titles:
        old = Cell("replaced", SIX_NUMBERS, title)
        # On Fashion-MNIST they saw another release of the images, as SS-CNN did then.
        then = Cell("replaced", "SS-CNN", title)
        ours = then if values(data, then).notna().any() else Cell("1", "SS-CNN", title)
        found = values(data, old).dropna()
        missing = f" ({len(found)} splits)" if 0 < len(found) < len(SPLITS) else ""
        yield spread(found) + missing, _papers("Spatial Transformer", old), str(minus(data, ours, old))


# What reproduces


class Finding(NamedTuple):
    """A statement of the paper that was looked at again: what came out, the verdict, and the page that has it."""

    statement: str
    found: str
    verdict: str
    where: str


def beside_the_paper(data: Data, cell: Cell) -> Interval:
    """Our errors minus the paper's, unpaired: its splits are other ones."""
    own, theirs = values(data, cell, averaged=False), summary(cell)
    if theirs is None or own.isna().any():
        return Interval([], -math.inf, math.inf, whole=False)
    return Interval([], *between(Summary.of(own.tolist()), theirs), whole=True)


@view
def reproduced(data: Data) -> str:
    """What the paper states and came out here too: one line each."""
    head = ("the paper", "here", "verdict", "where")
    return table([head, *_mathematics(), *_filters(), *_errors(data)], left=4)


def _mathematics() -> Iterable[Finding]:
    numbers, guide = recorded("guide/maths.json"), "guide/maths.md"
    for statement, key, place in (
        ("Theorem 1: both sides are equal", "theorem", "theorem-1"),
        ("Eq. 3: steering enlarges the filter", "eq3", "steering-eq-3"),
    ):
        largest = numbers[key]["largest"]
        found = f"they differ by at most {largest:.0e} of their size"
        yield Finding(statement, found, "holds" if largest < EXACT else "fails", f"[the mathematics]({guide}#{place})")
    periods = {float(k): row["period"] for k, row in numbers["sensitivity"].items()}
    off = max(abs(math.log(period) * k / (2 * math.pi) - 1) for k, period in periods.items())
    orders = (1.0, 2.0, 4.0)
    found, exact = (
        ", ".join(f"{number:.4g}" for number in own)
        for own in ([periods[k] for k in orders], [math.exp(2 * math.pi / k) for k in orders])
    )
    yield Finding(
        "A function of order $k$ repeats after the factor $e^{2\\pi/k}$",
        f"{found} for $k$ = 1, 2, 4; the formula gives {exact}",
        "holds" if off < 1e-3 else "fails",
        "[figures](evidence/figures.md)",
    )


def _filters() -> Iterable[Finding]:
    layers, where = recorded("figures/layers.json"), "[figures](evidence/figures.md)"
    ours, theirs = (layers["centrality"][method] for method in ("SS-CNN", "LocScaleInv-CNN"))
    yield Finding(
        "Filters are central",
        f"centre of mass {ours['offset']:.2f} radii off the middle, LocScaleInv-CNN {theirs['offset']:.2f}; "
        f"mass within half the radius {100 * ours['share']:.0f} %, LocScaleInv-CNN {100 * theirs['share']:.0f} %",
        _lower(ours["offset"], theirs["offset"], theirs["share"], ours["share"]),
        where,
    )
    ours, theirs = (layers["entanglement"][method] for method in ("SS-CNN", "LocScaleInv-CNN"))
    yield Finding(
        "Central filters confuse scale with position less",
        f"enlarging by {layers['entanglement']['scale']:.1f} looks like a move by {ours['move']:.2f} radii, "
        f"LocScaleInv-CNN {theirs['move']:.2f}",
        _lower(ours["move"], theirs["move"]),
        where,
    )
    statement = "Filters have structure, some are oriented bars; feature maps keep the outline of a digit"
    yield Finding(statement, "seen in the pictures, not measured", "holds, by eye", where)


def _lower(*numbers: float) -> str:
    """Whether of each two numbers the first is the lower one."""
    return "holds" if all(a < b for a, b in zip(numbers[::2], numbers[1::2], strict=True)) else "fails"


def _errors(data: Data) -> Iterable[Finding]:
    for title in columns("1"):
        cell = Cell("1", "SS-CNN", title)
        found = beside_the_paper(data, cell)
        verdict = {"fails": "fails", GAP: GAP}.get(found.verdict, "holds")  # lower or not measurably different
        yield Finding(
            f"SS-CNN has {papers(cell)} % errors on {title}",
            f"{show(data, cell)} %; ours minus theirs {found}",
            verdict,
            "[Table 1](#table-1)",
        )
    sized, where = Cell("sizes", "SS-CNN", "56 px"), "[input size](evidence/input-size.md)"
    for statement, rivals in (
        ("With the paper's input sizes, SS-CNN has fewer errors than the locally invariant networks", OTHERS[1:]),
        ("With the paper's input sizes, SS-CNN has the lowest error", OTHERS),
    ):
        pairs = [Pair(sized, Cell("sizes", other, "28 px")) for other in rivals]
        verdict, _, found = decide(data, pairs)
        means = (f"{method} {mean(values(data, cell, False))}" for method, cell in _lines(sized, pairs))
        yield Finding(
            f"{statement} on MNIST-Scale", f"{', '.join(means)}; SS-CNN minus the nearest {found}", verdict, where
        )


def _lines(first: Cell, pairs: Iterable[Pair]) -> Iterable[tuple[str, Cell]]:
    yield first.line, first
    for pair in pairs:
        if isinstance(pair.second, Cell):
            yield pair.second.line, pair.second
