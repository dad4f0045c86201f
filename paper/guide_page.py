"""Draws the plots of docs/guide/maths.md, measures its tables, and writes both where the guide finds them.

Run from the repository: ``make docs``. Plots and numbers go to results/guide/; the tables in the guide and a sentence
of the README are refreshed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from paper import figures, quickstart
from paper.reproduce import fill
from scalesteer import PAPER_SCALES, LogRadialBasis, ScaleSteerableConv2d, harmonics
from scalesteer.testing import steering_error
from tests import test_theorem as theorem

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "results" / "guide"
GUIDE = ROOT / "docs" / "guide" / "maths.md"
README = ROOT / "README.md"
UPSAMPLING = (1, 2, 4, 8)
FOOTNOTE_ORDERS = (0.5, 1.0, 2.0, 4.0)


def steering_table() -> dict[str, dict[str, float]]:
    """Mean steering error over ten draws of 64 filters with complex-normal coefficients."""
    table: dict[str, dict[str, float]] = {}
    for name in ("paper", "area"):
        row = {}
        for size, scales in ((7, PAPER_SCALES), (17, (1.0, 33 / 17))):
            draws = []
            for seed in range(10):
                layer = ScaleSteerableConv2d(1, 64, size, scales=scales, basis=LogRadialBasis.preset(name))
                with torch.no_grad():
                    layer.coefficients.normal_(generator=torch.Generator().manual_seed(seed))
                draws.append(steering_error(layer))
            for window, errors in zip(layer.sizes[1:], np.array(draws).T, strict=True):
                row[f"{size} -> {window}"] = round(float(errors.mean()), 4)
        table[name] = row
    return table


def footnote_table() -> dict[str, list[float]]:
    """Deviation from Theorem 1 on pixel grids, scale 17/7, radius 3.5 pixels, by order and upsampling."""
    pitches = [1 / u for u in UPSAMPLING]
    return {str(k): [round(e, 4) for e in theorem.grid_deviations(k, 17 / 7, pitches)] for k in FOOTNOTE_ORDERS}


def rank_table() -> dict[str, int]:
    """Rank of the 48 real functions on the window of 7 x 7, by the relative tolerance of the singular values."""
    table = {}
    for name in ("paper", "area"):
        flat = harmonics.steered_basis(LogRadialBasis.preset(name), 7, 1.0).reshape(48, -1)
        values = np.linalg.svd(flat, compute_uv=False)
        for tolerance in (1e-1, 1e-2, 1e-3, 1e-6):
            table[f"{name}, {tolerance:g}"] = int((values > tolerance * values[0]).sum())
    return table


def measure() -> dict[str, Any]:
    """Every number of the guide."""
    exact = {
        f"{k}": [
            float(
                theorem.deviation(
                    theorem.integral(
                        lambda x, y, s=s: theorem.image(s * x, s * y), k, theorem.RADIUS, nodes=150, turns=300
                    ),
                    theorem.factor(k, s) * theorem.integral(theorem.image, k, theorem.RADIUS * s, nodes=181, turns=364),
                )
            )
            for s in theorem.SCALES
        ]
        for k in theorem.ORDERS
    }
    return {
        "command": "make docs",
        "steering": steering_table(),
        "footnote": footnote_table(),
        "rank": rank_table(),
        "theorem": {"scales": theorem.SCALES, "largest": float(f"{max(map(max, exact.values())):.1e}")},
    }


def readme_parts(numbers: dict[str, Any]) -> dict[str, str]:
    """What the README says of the guide's numbers, and the quickstart's table."""

    def span(name: str) -> str:
        errors = [100 * e for key, e in numbers["steering"][name].items() if key.startswith("7 ")]
        return f"{min(errors):.0f} to {max(errors):.0f} %"

    measured = json.loads((ROOT / "results" / "quickstart" / "result.json").read_text())
    sentence = "Sampling at points, as the paper does, misses by {}; averaging over pixels by {}."
    return {"grids": sentence.format(span("paper"), span("area")), "quickstart": quickstart.readme_table(measured)}


def tables(numbers: dict[str, Any]) -> dict[str, str]:
    """The guide's tables as Markdown, by the name of their place."""
    steering = numbers["steering"]
    head = list(steering["paper"])
    lines = ["| window | " + " | ".join(h.replace("->", "→") for h in head) + " |", "|---" * (len(head) + 1) + "|"]
    for name, label in (("paper", "point (`paper`)"), ("area", "area (`area`)")):
        lines.append(f"| {label} | " + " | ".join(f"{100 * steering[name][h]:.1f} %" for h in head) + " |")
    footnote = ["| order | " + " | ".join(f"{u} x" for u in UPSAMPLING) + " |", "|---" * (len(UPSAMPLING) + 1) + "|"]
    for order, row in numbers["footnote"].items():
        footnote.append(f"| {order} | " + " | ".join(f"{100 * e:.1f} %" for e in row) + " |")
    rank = numbers["rank"]
    tolerances = [key.split(", ")[1] for key in rank if key.startswith("paper")]
    ranks = ["| singular values above | " + " | ".join(tolerances) + " |", "|---" * (len(tolerances) + 1) + "|"]
    for name in ("paper", "area"):
        ranks.append(f"| `{name}` | " + " | ".join(str(rank[f"{name}, {t}"]) for t in tolerances) + " |")
    agreement = f"Measured: both sides agree to {numbers['theorem']['largest']:.0e} for s in " + ", ".join(
        str(s) for s in numbers["theorem"]["scales"]
    )
    return {
        "steering": "\n".join(lines),
        "footnote": "\n".join(footnote),
        "rank": "\n".join(ranks),
        "theorem": agreement + " and all three orders.",
    }


def random_layer() -> ScaleSteerableConv2d:
    """One filter with fixed random coefficients, at the six scales of the paper."""
    layer = ScaleSteerableConv2d(1, 1, basis=LogRadialBasis.preset("area"))
    with torch.no_grad():
        layer.coefficients.normal_(generator=torch.Generator().manual_seed(3))
    return layer


def plot_theorem() -> Any:
    """Error of Theorem 1 on Cartesian grids against pitch, and with sign or power broken."""
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    pitches = theorem.PITCHES
    for order, colour in zip(theorem.ORDERS, ("#1f77b4", "#2ca02c", "#d62728"), strict=True):
        errors = theorem.grid_deviations(order, 2.0, pitches)
        slope = np.polyfit(np.log(pitches), np.log(errors), 1)[0]
        axis.loglog(pitches, errors, "o-", color=colour, label=f"order {order:g} (slope {slope:.2f})")
    for broken, label, style in (
        ({"sign": 1}, "phase with the other sign", "--"),
        ({"power": 0.0}, "no $s^{m-2}$", ":"),
    ):
        axis.loglog(pitches, theorem.grid_deviations(1.0, 2.0, pitches, **broken), style, color="grey", label=label)
    axis.set_xticks(pitches, [f"1/{round(1 / h)}" for h in pitches])
    axis.minorticks_off()
    axis.set_xlabel("pitch of the grid (radius of the patch 3.5)")
    axis.set_ylabel("relative deviation, norm over orientations")
    axis.set_title("Theorem 1 on equal-pitch grids, s = 2", fontsize=11)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    return figure


def plot_sampling(numbers: dict[str, Any]) -> Any:
    """Steering error by window, point against area; and the footnote: deviation by order and upsampling."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    steering = numbers["steering"]
    for name, label in (("paper", "point"), ("area", "area")):
        windows = [key for key in steering[name] if key.startswith("7 ")]
        left.plot([100 * steering[name][w] for w in windows], "o-", label=f"{label} sampling")
    left.set_xticks(range(len(windows)), [w.replace("->", "→") for w in windows])
    left.set_ylim(bottom=0)
    left.set_ylabel("steering error, %")
    left.set_title("Response to an enlarged blob", fontsize=11)
    for order, row in numbers["footnote"].items():
        right.loglog(UPSAMPLING, [100 * e for e in row], "o-", label=f"order {order}")
    right.set_xticks(UPSAMPLING, [f"{u} x" for u in UPSAMPLING])
    right.minorticks_off()
    right.set_xlabel("upsampling of image and filter")
    right.set_ylabel("deviation from Theorem 1, %")
    right.set_title("Point sampling, 7 → 17", fontsize=11)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


def main() -> None:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    numbers = measure()
    (OUTPUT / "maths.json").write_text(json.dumps(numbers, indent=1) + "\n")
    for name, figure in (
        ("basis", figures.plot_basis()),
        ("steered", figures.plot_steered(random_layer())),
        ("theorem", plot_theorem()),
        ("sampling", plot_sampling(numbers)),
    ):
        figure.savefig(OUTPUT / f"{name}.png", dpi=110, metadata={"Software": None})
        plt.close(figure)
    for document, parts in ((GUIDE, tables(numbers)), (README, readme_parts(numbers))):
        document.write_text(fill(document.read_text(), parts))
    print(f"wrote {OUTPUT.relative_to(ROOT)} and refreshed {GUIDE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
