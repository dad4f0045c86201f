"""The generated pages: each is what its template and the results make of it."""

from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
from matplotlib.figure import Figure

from benchmarks import report as speed
from paper import ROOT, anysize, figures, grids, pages, quickstart, report
from paper.markdown import table


def test_every_page_is_as_its_template_renders_it():
    rendered = pages.render()
    assert rendered
    for place, text in rendered.items():
        assert (ROOT / place).read_text(encoding="utf-8") == text, f"{place} is out of date: make docs"


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one template, docs/page.md; returns the folder and a function that writes the template."""

    def write(text):
        path = tmp_path / "paper" / "pages" / "docs" / "page.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("# Title\n\n{{ 1 + 1 }} <b> {% if true %}\nyes\n{% endif %}\n")
    return tmp_path, write


def test_a_page_lies_as_its_template_does_and_names_it(checkout):
    root, _ = checkout
    assert [path.as_posix() for path in pages.write(root)] == ["docs/page.md"]
    head, empty, *text = (root / "docs/page.md").read_text().splitlines()
    assert head == "<!-- Rendered from paper/pages/docs/page.md by make docs; edit that. -->"
    assert [empty, *text] == ["", "# Title", "", "2 <b> yes"]


def test_only_pages_that_changed_are_written(checkout):
    root, write = checkout
    assert pages.write(root)
    before = (root / "docs/page.md").stat().st_ino  # a replaced file is a new one
    assert pages.write(root) == []
    assert (root / "docs/page.md").stat().st_ino == before
    write("another")
    assert pages.write(root)
    assert "another" in (root / "docs/page.md").read_text()


def test_a_template_with_an_unknown_name_fails_and_leaves_the_page(checkout):
    root, write = checkout
    pages.write(root)
    before = (root / "docs/page.md").read_text()
    write("{{ no_such_view }}")
    with pytest.raises(jinja2.UndefinedError, match="no_such_view"):
        pages.write(root)
    assert (root / "docs/page.md").read_text() == before


def test_two_views_of_one_name_are_an_error():
    first, second = (SimpleNamespace(__name__=name, VIEWS={"errors": name}) for name in ("a", "b"))
    assert pages.views([first]) == {"errors": "a"}
    with pytest.raises(ValueError, match="`errors` of b is taken"):
        pages.views([first, second])


def test_a_table_has_a_head_a_rule_and_rows():
    assert table([("a", "b", "c"), ("x", 1, "2.0")]).splitlines() == [
        "| a | b | c |",
        "|---|--:|--:|",
        "| x | 1 | 2.0 |",
    ]
    assert table([("a", "b")], left=2) == "| a | b |\n|---|---|"


def test_a_row_of_a_table_with_a_missing_cell_is_an_error():
    with pytest.raises(ValueError, match="2 cells each"):
        table([("a", "b"), ("x",)])


def test_everything_that_results_have_the_numbers_for_is_drawn_again(tmp_path, monkeypatch):
    asked = []

    def of_networks(name, *runs):
        asked.append((name, *runs))
        return Figure()

    for module in (anysize, figures, quickstart, report, speed):
        monkeypatch.setattr(module, "plots", lambda module=module: {f"{module.__name__}/plot.png": Figure()})
    monkeypatch.setattr(figures, "draw", of_networks)
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    pages.draw(tmp_path)
    assert not asked
    runs = [tmp_path / grids.configuration(method).name for method in ("SS-CNN", "LocScaleInv-CNN")]
    for run in runs:
        run.mkdir()
        (run / "model.safetensors").touch()
    pages.draw(tmp_path, Path("originals"))
    assert asked == [(name, *runs, Path("originals")) for name in figures.OF_NETWORKS]
    drawn = {path.relative_to(tmp_path / "results").as_posix() for path in (tmp_path / "results").rglob("*.png")}
    assert drawn == {
        *(f"paper.{name}/plot.png" for name in ("anysize", "figures", "quickstart", "report")),
        "benchmarks.report/plot.png",
        *(f"figures/{name}.png" for name in figures.OF_NETWORKS),
    }
