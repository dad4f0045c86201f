"""Draws the plots of results/ again: of recorded numbers, of the filters themselves, and of trained networks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paper import RESULTS, curves, figures, guide, pages

MODULES = (*pages.MODULES, guide)
"""Those that have a function `plots` give figures by their place in results/; nothing is trained for them."""


def draw(trained: figures.Trained, folder: Path = RESULTS) -> Iterator[Path]:
    """Draw what can be drawn and yield each file that was written.

    Args:
        trained: The networks. Without an SS-CNN the pictures of trained networks stay as they are, and without a
            LocScaleInv-CNN those that compare the two.
        folder: Where the pictures go.
    """
    for module in MODULES:
        for place, figure in getattr(module, "plots", dict)().items():
            curves.save(figure, folder / place)
            yield folder / place
    for place, drawing in figures.of_networks(trained).items():
        curves.save(drawing(), folder / place)
        yield folder / place
