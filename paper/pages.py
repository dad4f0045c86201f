"""The only writer of generated pages: README.md and pages of docs/ are rendered from templates.

The templates lie in `paper/pages` as the pages lie in the checkout: `paper/pages/docs/speed.md` becomes
`docs/speed.md`. They are Jinja templates of Markdown. A sentence or a table gets its numbers from a view, a function
or value by name in the dictionary `VIEWS` of a module: ``{{ quickstart_table() }}``. An unknown name is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2

from benchmarks import convert
from benchmarks import report as speed
from paper import RESULTS, ROOT, anysize, figures, grids, measures, quickstart, report
from scalesteer.files import write_atomically

TEMPLATES = Path("paper", "pages")
MODULES: tuple[ModuleType, ...] = (
    anysize,
    convert,
    measures,
    quickstart,
    report,
    speed,
)


def draw(runs: Path = Path("runs"), data_dir: Path | None = None) -> None:
    """Draw again what results/ has the numbers for, without training anything.

    Args:
        runs: Where runs are kept. Figures of trained networks show those of the first split, if they are there.
        data_dir: Where the original images are, if not in the cache.
    """
    for module in (anysize, figures, quickstart, report, speed):
        for place, figure in module.plots().items():
            figures.save(figure, RESULTS / place)
    ss, lsi = (runs / grids.configuration(method).name for method in ("SS-CNN", "LocScaleInv-CNN"))
    if all((run / "model.safetensors").exists() for run in (ss, lsi)):
        for name in figures.OF_NETWORKS:
            figures.save(figures.draw(name, ss, lsi, data_dir), RESULTS / "figures" / f"{name}.png")


def views(modules: Iterable[ModuleType] = MODULES) -> dict[str, Any]:
    """What templates can name: the views of all modules together.

    Raises:
        ValueError: If two modules have views of the same name.
    """
    found: dict[str, Any] = {}
    for module in modules:
        twice = sorted(found.keys() & module.VIEWS.keys())
        if twice:
            raise ValueError(f"views must have names of their own (`{twice[0]}` of {module.__name__} is taken).")
        found |= module.VIEWS
    return found


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
