"""The generated pages: each is what its template and the results make of it."""

import re
from pathlib import Path

import jinja2
import pytest
from matplotlib.figure import Figure

from paper import ROOT, claims, figures, grids, pages
from paper.markdown import VIEWS, table, view


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
    assert VIEWS["claims"] is claims.claims
    with pytest.raises(ValueError, match=r"`claims` of paper\.claims is taken"):
        view(claims.claims)


def test_templates_call_views_without_the_results():
    found = pages.views()
    assert found["leading"]("stir") == "Scale channels, plain filters"
    assert found["verdict"]("mnist") in ("holds", "fails", "undecided")


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
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    plotting = [module for module in pages.MODULES if hasattr(module, "plots")]
    assert len(plotting) == 6
    for module in plotting:
        monkeypatch.setattr(module, "plots", lambda module=module: {f"{module.__name__}/plot.png": Figure()})
    pages.draw(tmp_path)
    drawn = {path.relative_to(tmp_path / "results").as_posix() for path in (tmp_path / "results").rglob("*.png")}
    assert drawn == {f"{module.__name__}/plot.png" for module in plotting}


def test_figures_of_networks_are_drawn_if_their_runs_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda *asked: asked)
    assert figures.of_networks(tmp_path) == {}
    runs = [tmp_path / grids.configuration(method).name for method in ("SS-CNN", "LocScaleInv-CNN")]
    for run in runs:
        run.mkdir()
        (run / "model.safetensors").touch()
    drawn = figures.of_networks(tmp_path, Path("originals"))
    assert drawn["figures/layer.png"] == ("layer", *runs, Path("originals"))
    assert {"layer", "filters", "feature-maps", "filter-bank", "winning-scales"} < {
        asked[0] for asked in drawn.values()
    }


@pytest.fixture(scope="module")
def rendered():
    return pages.render()


def test_the_page_on_the_reproduction_is_short_and_shows_every_claim(rendered):
    text = rendered[Path("docs/reproduction.md")]
    assert len(text.splitlines()) <= 130
    for claim in claims.CLAIMS.values():
        assert claim.text in text
        assert f"](evidence/{claim.evidence}.md)" in text
    assert len(re.findall(r"\[(holds|fails|undecided)\]\(evidence", text)) == 7


def test_every_target_stands_on_its_page(rendered):
    for claim in claims.TARGETS.values():
        assert claim.text in rendered[Path("docs/evidence") / f"{claim.evidence}.md"]


def test_every_page_of_evidence_asks_a_question_and_answers_first(rendered):
    found = [path for path in rendered if path.parent == Path("docs/evidence") and path.name != "README.md"]
    assert len(found) >= 8
    index = rendered[Path("docs/evidence/README.md")]
    for path in found:
        _, title, answer, *_ = rendered[path].split("\n\n")
        assert title.startswith("# ")
        assert title.endswith("?")
        assert not answer.startswith(("|", "!", "#"))
        assert f"[{title[2:]}]({path.name})" in index
