"""What docs/guide/convert.md shows: what converting a network gains, and what it costs."""

from __future__ import annotations

from statistics import mean

from paper import recorded
from paper.markdown import table, view

COSTS, ERRORS = "bench/convert.json", "guide/convert-resnet.json"
EXAMPLE = f"python examples/convert_resnet.py --output results/{ERRORS}"


@view
def conversion_errors() -> str:
    """The errors of examples/convert_resnet.py by size, as a table: the network, and what each way ends with.

    Conversions that nobody trained further are left out, and so are steps half-way (new batch statistics).
    """
    result = recorded(ERRORS)
    head = ("error in %, photographs of size", *result["rows"][0]["errors"], "mean", "s per epoch")
    rows = [head]
    for row in result["rows"]:
        if row["model"].endswith("new batch statistics") or (
            row["model"].startswith("converted") and not row["epochs"]
        ):
            continue
        errors, seconds_per_epoch = row["errors"].values(), row.get("epoch_s")
        name = row["model"] + (", one epoch more" if row["epochs"] else "")
        shown = "" if seconds_per_epoch is None else f"{seconds_per_epoch:.2g}"
        rows.append((name, *(f"{error:.1f}" for error in errors), f"{mean(errors):.1f}", shown))
    about = f"{result['device']}, {result['train']:,} photographs for training and {result['test']:,} for testing"
    return f"{table(rows)}\n\n{about}, {result['seconds']:.0f} s in all; `{EXAMPLE}`."


@view
def conversion_times(name: str, work: str) -> str:
    """How many times the network's time a contender takes in "training" or "inference"."""
    return f"{recorded(COSTS)[work][name]['times_network']:.2g}"


@view
def conversion_error(model: str, epochs: int = 0, size: str = "") -> str:
    """The error in % of a row of examples/convert_resnet.py at a size, by default the mean over all."""
    rows = recorded(ERRORS)["rows"]
    errors = next(r["errors"] for r in rows if (r["model"], r["epochs"]) == (model, epochs))
    return f"{errors[size] if size else mean(errors.values()):.1f}"
