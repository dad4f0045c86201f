"""The notebooks: their files are those of their programs, and every cell runs."""

import json

import pytest

pytest.importorskip("matplotlib", reason="the notebooks draw with matplotlib")
import matplotlib as mpl
from matplotlib import pyplot

from docs import notebooks

RIGHT = {
    "cells": lambda scope: scope["found"][3.0][1] > scope["found"][3.0][0] + 0.2 and len(scope["regions"]) > 3,
    "own_pictures": lambda scope: scope["result"]["status"] == "finished" and scope["right"] >= 6,
    "unseen_sizes": lambda scope: min(scope["joined"]) > 0.9 and min(scope["alone"]) < 0.6,
}


def test_there_is_one_for_each_of_three_users():
    assert {program.stem for program in notebooks.programs()} == set(RIGHT)


@pytest.mark.parametrize("name", RIGHT)
def test_a_notebook_has_the_cells_of_its_program_and_small_outputs(name):
    program = notebooks.FOLDER / f"{name}.py"
    text = program.with_suffix(".ipynb").read_text()
    stored = json.loads(text)
    assert [(cell["cell_type"], cell["source"]) for cell in stored["cells"]] == notebooks.cells(program.read_text())
    assert len(text) < 200_000
    assert stored["nbformat"] == 4
    kinds = [output["output_type"] for cell in stored["cells"] for output in cell.get("outputs", [])]
    assert {"stream", "display_data"} <= set(kinds)


@pytest.mark.parametrize("name", RIGHT)
def test_every_cell_of_a_notebook_runs(name, own_cache, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    scope = {"__name__": "__main__"}
    shown = [
        notebooks.run(text, scope)
        for kind, text in notebooks.cells((notebooks.FOLDER / f"{name}.py").read_text())
        if kind == "code"
    ]
    assert any(hasattr(value, "savefig") for _, value in shown)
    assert RIGHT[name](scope)
    pyplot.close("all")


def test_a_page_shows_code_outputs_and_pictures(tmp_path):
    text = notebooks.page(notebooks.FOLDER / "cells.ipynb", tmp_path / "pictures", "pictures")
    assert "# Cells: masks" in text
    assert "```text\nsize 0.5: IoU" in text
    (picture,) = (tmp_path / "pictures").iterdir()
    assert f"](pictures/{picture.name})" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
