"""Turns the programs of examples/notebooks, in percent format, into notebooks with outputs, and into pages of the site.

    python -m docs.notebooks            # runs all, and writes their .ipynb beside them
    python -m docs.notebooks cells      # those that are named

A test holds each notebook's cells to its program, and runs it.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
LONGEST_OUTPUT = 4000  # characters of a cell's output that are kept
DPI = 72


class Cell(NamedTuple):
    """A part of a notebook."""

    kind: str  # markdown or code
    text: str


def programs() -> list[Path]:
    return sorted(FOLDER.glob("[!_]*.py"))


def cells(program: str) -> list[Cell]:
    """The cells of a program in percent format.

    >>> cells("# %% [markdown]\\n# # Title\\n\\n# %%\\nx = 1\\n")
    [Cell(kind='markdown', text='# Title'), Cell(kind='code', text='x = 1')]
    """
    found = []
    for part in re.split(r"^# %%", program, flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            found.append(Cell("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.M)))
        else:
            found.append(Cell("code", body.strip("\n")))
    return found


def run(cell: str, scope: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line, as a notebook shows it."""
    tree, shown = ast.parse(cell), io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(shown):
        exec(compile(tree, "<cell>", "exec"), scope)
        value = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)
    return shown.getvalue(), value


def outputs(cell: str, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """A cell's outputs as they stand in a notebook's file."""
    text, value = run(cell, scope)
    found: list[dict[str, Any]] = []
    if text:
        found.append({"output_type": "stream", "name": "stdout", "text": text[:LONGEST_OUTPUT]})
    if hasattr(value, "savefig"):
        image = io.BytesIO()
        value.savefig(image, format="png", dpi=DPI, metadata={"Software": None})
        content = base64.b64encode(image.getvalue()).decode()
        found.append({"output_type": "display_data", "metadata": {}, "data": {"image/png": content}})
    return found


def notebook(program: Path) -> dict[str, Any]:
    """The content of a notebook's file, with outputs: its cells are run."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    parts: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(program.read_text())):
        part: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text}
        if kind == "code":
            part |= {"execution_count": None, "outputs": outputs(text, scope)}
        parts.append(part)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": parts, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def page(file: Path, picture_folder: Path, link: str) -> str:
    """A notebook's file as a page of the site; its pictures are written to a folder, to which `link` leads."""
    parts = []
    for number, cell in enumerate(json.loads(file.read_text())["cells"]):
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
            continue
        parts.append(f"```python\n{cell['source']}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{output['text'].rstrip()}\n```")
                continue
            name = f"{file.stem}-{number}.png"
            picture_folder.mkdir(parents=True, exist_ok=True)
            (picture_folder / name).write_bytes(base64.b64decode(output["data"]["image/png"]))
            parts.append(f"![What the cell above draws]({link}/{name})")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    sys.path.insert(0, str(ROOT))
    for program in programs():
        if sys.argv[1:] and program.stem not in sys.argv[1:]:
            continue
        content = json.dumps(notebook(program), indent=1) + "\n"
        program.with_suffix(".ipynb").write_text(content)
        print(f"{program.stem}: {len(content) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
