"""What docs/guide/masks.md shows: how well masks of cells are found at sizes that training did not show."""

from __future__ import annotations

import re
from statistics import mean

from paper import recorded
from paper.markdown import table, view

CELLS = "guide/cells.json"


@view
def cell_overlaps(kind: str) -> str:
    """The overlap (IoU) of examples/cells.py by way and size of the cells of a kind, as means over seeds."""
    result = recorded(CELLS)
    seeds, sizes = list(result["iou"].values()), result["sizes"]
    rows: list[tuple[str, ...]] = [(f"IoU of {kind} cells, of size", *(f"{size:g}" for size in sizes))]
    for way in seeds[0]:
        cells = [[seed[way][kind][i] for seed in seeds] for i in range(len(sizes))]
        rows.append((re.sub('"(.*?)"', r"`\1`", way), *(f"{mean(values):.2f}" for values in cells)))
    return table(rows)


@view
def cell_overlap(way: str, kind: str, size: float) -> str:
    """One of these means."""
    result = recorded(CELLS)
    place = result["sizes"].index(size)
    return f"{mean(seed[way][kind][place] for seed in result['iou'].values()):.2f}"


@view
def cell_spread() -> str:
    """The largest difference between two seeds, of all ways, kinds and sizes."""
    result = recorded(CELLS)
    first, *others = result["iou"].values()
    found = [
        max(values) - min(values)
        for way in first
        for kind in first[way]
        for values in zip(*(seed[way][kind] for seed in (first, *others)), strict=True)
    ]
    return f"{max(found):.2f}"


@view
def cell_command() -> str:
    """The command that measured them, its commit and the pictures' digest."""
    result = recorded(CELLS)
    about = result["environment"]
    return f"`{result['command']}`, commit {about['commit'][:9]}, pictures {about['data']['digest'][:12]}"
