"""Builds the site: the pages of the repository, the examples, and a reference of the package from its docstrings.

    python -m docs.site            # into build/site; open build/site/index.html. Another folder is taken too

The pages are first gathered in build/pages, as Sphinx wants them. A link to another page leads to it, a picture is
copied, and a link to any other file of the repository leads there. A page to try networks on that was built before, by
`python -m docs.page.build`, becomes part of the site.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.cmd.build import build_main
from sphinx.environment import BuildEnvironment

import scalesteer
from docs import notebooks
from scalesteer import models

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")  # the target of [text](target#place) or of ![text](target)
ENTRY = re.compile(r"^- \[([^]]+)\]\(([^)#]+)\)", flags=re.M)  # a line of a table of contents
MODELS = ("flat", "pooled", "group", "network")
APP = ("config", "suggest", "folder", "pictures", "predict", "maps", "report", "sweep", "demo")  # what users may call

LOOK_IT_UP = (
    "\n## Look it up\n\n{notebooks}- [Examples](examples.md)\n- [Reference](reference/index.rst)\n"  # on the site only
)
INDEX = """Reference
=========

Every public name, from its docstring. These can be imported from ``scalesteer`` itself:

{names}

All others are in a module:

.. toctree::
   :maxdepth: 1

{modules}
"""
MODULE = """{name}
{line}

.. automodule:: {name}
   :members:
   :exclude-members: {elsewhere}
   :show-inheritance:
"""


def sources() -> dict[Path, str]:
    """The pages of the repository, and where on the site each is."""
    front = {ROOT / "README.md": "start.md"}
    front |= {ROOT / f"{name}.md": f"{name.lower()}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")}
    docs = {page: str(page.relative_to(ROOT / "docs")) for page in sorted((ROOT / "docs").rglob("*.md"))}
    return front | {page: re.sub(r"\bREADME.md$", "index.md", place) for page, place in docs.items()}


def moved(text: str, page: Path, place: str, pages: Path) -> str:
    """The text of a page with links that hold at its place on the site; its pictures are copied to `pages`."""

    def replace(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / link[1]))
        inside = str(target.relative_to(ROOT))
        if target.suffix in {".png", ".gif", ".svg"}:
            write(pages / inside, target.read_bytes())
        elif target in sources():
            inside = sources()[target]
        else:
            return f"{REPOSITORY}/{'tree' if target.is_dir() else 'blob'}/main/{inside}"
        return os.path.relpath(inside, os.path.dirname(place))

    return LINK.sub(replace, text)


def sidebar(page: str) -> str:
    """Sphinx's lists of the pages that a table of contents links to, under its headings if it has any."""
    first, *others = re.split(r"^## ", page, flags=re.M)
    groups = [("", first), *((":caption: " + block.partition("\n")[0], block) for block in others)]
    return "".join(
        "\n".join(["\n```{toctree}", ":hidden:", caption, "", *entries, "```", ""])
        for caption, block in groups
        if (entries := [f"{text} <{target}>" for text, target in ENTRY.findall(block)])
    )


def examples() -> str:
    """The gallery: what each example says of itself, and its picture."""
    parts = ["# Examples\n", "Programs to read and to run. Each one is also a test.\n"]
    for file in sorted((ROOT / "examples").glob("[!_]*.py")):
        title, _, text = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")
        picture = f"results/guide/{file.stem.replace('_', '-')}.png"
        parts += [f"## {file.stem}\n", f"{title} [The program](../examples/{file.name})\n"]
        parts += [f"![{title}](../{picture})\n"] * (ROOT / picture).exists() + [text]
    return "\n".join(parts) + "\n"


def modules() -> list[str]:
    """The modules whose names are public: those of the library, then those of the product."""
    rooms = {"": inside(scalesteer), "models.": inside(models), "app.": APP}
    names = [f"scalesteer.{room}{name}" for room, found in rooms.items() for name in found]
    return sorted(names, key=lambda name: (".app" in name, name))


def inside(package: ModuleType) -> list[str]:
    """The public modules of a package."""
    return [found.name for found in pkgutil.iter_modules(package.__path__) if not found.name.startswith("_")]


def reference() -> dict[str, str]:
    """The pages of the reference by name: one of the package's own names, and one for each module."""
    rows = []
    for name in scalesteer.__all__:
        found = getattr(scalesteer, name)
        about = (
            (inspect.getdoc(found) or "").partition("\n")[0] if callable(found) else "The scales of the paper's layer."
        )
        rows.append(f"- :py:obj:`scalesteer.{name}`: {about}")
    names = modules()
    pages = {"index": INDEX.format(names="\n".join(rows), modules="\n".join(f"   {name}" for name in names))}
    for name in names:
        module = importlib.import_module(name)
        others = {other for other in names if other != name}
        elsewhere = [
            x for x in getattr(module, "__all__", ()) if getattr(getattr(module, x), "__module__", "") in others
        ]
        pages[name] = MODULE.format(name=name, line="=" * len(name), elsewhere=", ".join(elsewhere))
    return pages


def link_short_names(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element) -> Element | None:
    """Finds what a docstring names more briefly than Sphinx knows it: `scalesteer.convert`, `flat.FlatPlan`."""
    if node["refdomain"] != "py":
        return None
    domain = env.domains.python_domain
    end = "." + node["reftarget"].removeprefix("scalesteer.")
    full = min((name for name in domain.objects if name.endswith(end)), key=len, default=None)
    if full is None:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, content)


def write(file: Path, content: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def gather(pages: Path) -> None:
    """Writes all pages of the site, as Sphinx wants them, into a new folder."""
    shutil.rmtree(pages, ignore_errors=True)
    programs = notebooks.programs()
    for program in programs:
        text = notebooks.page(program.with_suffix(".ipynb"), pages / "notebooks", ".")
        link = f"{REPOSITORY}/blob/main/{program.relative_to(ROOT).with_suffix('.ipynb')}"
        write(pages / "notebooks" / f"{program.stem}.md", f"{text}\n[This page as a notebook]({link})\n")
    for page, place in sources().items():
        text = moved(page.read_text(), page, place, pages)
        if place == "index.md":
            names = [(notebooks.cells(file.read_text())[0].text.partition("\n")[0][2:], file.stem) for file in programs]
            listed = "".join(f"- [{title}](notebooks/{name}.md)\n" for title, name in names)
            text += LOOK_IT_UP.format(notebooks=listed)
        write(pages / place, text + sidebar(text) if page.name == "README.md" else text)
    write(pages / "examples.md", moved(examples(), ROOT / "docs/examples.md", "examples.md", pages))
    for name, text in reference().items():
        write(pages / "reference" / f"{name}.rst", text)


def build(folder: Path) -> int:
    """Builds the site in `folder`; a warning is an error."""
    gather(folder / "pages")
    strict = ["--fail-on-warning", "--keep-going", "--fresh-env", "--quiet", "--color"]
    failed = build_main([*strict, "-c", str(ROOT / "docs"), str(folder / "pages"), str(folder / "site")])
    if (folder / "page").is_dir():
        shutil.copytree(folder / "page", folder / "site/page", dirs_exist_ok=True)
    return failed


if __name__ == "__main__":
    sys.exit(build(Path(*sys.argv[1:] or [ROOT / "build"])))
