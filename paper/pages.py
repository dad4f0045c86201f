"""The only writer of generated pages: README.md and pages of docs/ are rendered from templates.

The templates lie in `paper/pages` as the pages lie in the checkout: `paper/pages/docs/speed.md` becomes
`docs/speed.md`. They are Jinja templates of Markdown. A sentence or a table gets its numbers from a view, a function
that :func:`paper.markdown.view` registers: ``{{ quickstart_table() }}``. An unknown name is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import convert, simulation
from benchmarks import report as speed
from paper import (
    RESULTS,
    ROOT,
    anysize,
    cells,
    claims,
    curves,
    distortion,
    figures,
    guide,
    measures,
    quickstart,
    report,
)
from paper.markdown import VIEWS
from scalesteer.files import write_atomically

TEMPLATES = Path("paper", "pages")
MODULES = (anysize, claims, distortion, guide, measures, quickstart, report, speed)
"""What the pages show: the views of these modules, and their plots if they have any."""


def draw(runs: Path = Path("runs"), data_dir: Path | None = None) -> None:
    """Draw again what results/ has the numbers for, without training anything.

    Args:
        runs: Where runs are kept. Figures of trained networks show those of the first split, if they are there.
        data_dir: Where the original images are, if not in the cache.
    """
    drawn = {place: figure for module in MODULES for place, figure in getattr(module, "plots", dict)().items()}
    for place, figure in (drawn | figures.of_networks(runs, data_dir)).items():
        curves.save(figure, RESULTS / place)


def views() -> dict[str, Callable[..., Any]]:
    """What templates can call: all views, those of `data` with the results of results/."""
    others: dict[str, Any] = {**convert.VIEWS, **simulation.VIEWS}
    found = VIEWS | others
    of_results = [name for name, function in found.items() if "data" in inspect.signature(function).parameters]
    return found | {name: partial(found[name], cells.published()) for name in of_results}


def render(root: Path = ROOT) -> dict[Path, str]:
    """The text of every generated page, by its place in the checkout `root`.

    Raises:
        jinja2.UndefinedError: If a template names what no module has.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, not HTML
    )
    environment.globals |= views()
    pages = {}
    for path in sorted((root / TEMPLATES).rglob("*.md")):
        place = path.relative_to(root / TEMPLATES)
        head = f"<!-- Rendered from {(TEMPLATES / place).as_posix()} by make docs; edit that. -->\n\n"
        pages[place] = head + environment.get_template(place.as_posix()).render()
    return pages


def write(root: Path = ROOT) -> list[Path]:
    """Render every page and replace those that changed.

    Returns:
        The places of the pages that changed.
    """
    changed = []
    for place, text in render(root).items():
        path, content = root / place, text.encode()
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
            changed.append(place)
    return changed
