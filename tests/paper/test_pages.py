"""Pages are written by people; the tables and numbers between markers are those of the results."""

import re
import subprocess
import sys

import pytest

from paper import ROOT, claims, pages
from paper.markdown import VIEWS, table, view


def test_every_marked_number_and_table_is_that_of_the_results(real_sources):
    assert pages.differences() == []


def evaluate(expression):
    return {"two()": "2", "spread()": "1.9 ± 0.1", "rows()": "| a |\n|---|\n| 1 |", "more()": "| a |"}[expression]


def test_the_words_before_a_marker_are_replaced_and_nothing_else():
    text = "**One** is 3<!-- = two() --> and (**9.9 ± 9.9<!-- = spread() -->** %), 7.\n"
    filled, changes = pages.fill(text, evaluate)
    assert filled == "**One** is 2<!-- = two() --> and (**1.9 ± 0.1<!-- = spread() -->** %), 7.\n"
    assert [(change.line, change.old, change.new) for change in changes] == [
        (1, "3", "2"),
        (1, "9.9 ± 9.9", "1.9 ± 0.1"),
    ]


def test_a_table_between_markers_is_replaced_and_a_page_that_is_right_stays():
    page = "text\n\n<!-- table: rows() -->\n| a |\n|---|\n| 9 |\n<!-- end -->\n\nmore text \n"
    filled, (change,) = pages.fill(page, evaluate)
    assert filled == page.replace("9", "1")
    assert (change.line, change.old, change.new) == (6, "| 9 |", "| 1 |")
    assert pages.fill(filled, evaluate) == (filled, [])


def test_markers_in_fenced_code_are_text():
    page = "```\n3<!-- = two() -->\n<!-- table: rows() -->\n```\n"
    assert pages.fill(page, evaluate) == (page, [])


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("\n5<!-- = nothing() -->", r"docs/a\.md:2: nothing\(\) cannot be filled in"),
        ("<!-- table: rows() -->\n| a |", r"docs/a\.md:1: the table has no line <!-- end --> after it"),
        ("5 <!-- = two() -->", r"docs/a\.md:1: no number stands right before the marker of two\(\)"),
        ("<!-- = two() -->", r"docs/a\.md:1: no number stands"),
    ],
)
def test_a_marker_that_cannot_be_filled_in_is_named_with_its_place(page, message):
    with pytest.raises(pages.PageError, match=message):
        pages.fill(page, evaluate, "docs/a.md")


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one page; its number is that of the results."""
    (tmp_path / "docs").mkdir()
    right = pages.evaluator()('error("1", "SS-CNN", "MNIST-Scale")')
    (tmp_path / "README.md").write_text("# Title\n\nNothing marked.\n")
    (tmp_path / "docs/page.md").write_text(f'Errors: {right}<!-- = error("1", "SS-CNN", "MNIST-Scale") --> %.\n')
    return tmp_path


def test_an_edit_outside_the_markers_survives(checkout):
    page = checkout / "docs/page.md"
    page.write_text(page.read_text().replace("Errors", "Mistakes"))
    assert pages.write(checkout) == []
    assert page.read_text().startswith("Mistakes: ")


def test_a_number_changed_by_hand_is_reported_with_its_place_and_mended(checkout):
    page = checkout / "docs/page.md"
    before = page.read_text()
    page.write_text(re.sub(r"\d\.\d+", "0.01", before, count=1))
    (said,) = pages.differences(checkout)
    assert said.startswith("docs/page.md:1: the page has '0.01', the results have ")
    assert "`make docs`" in said
    assert pages.write(checkout) == ["docs/page.md:1"]
    assert page.read_text() == before


def test_an_unknown_view_fails_and_leaves_the_page(checkout):
    page = checkout / "docs/page.md"
    page.write_text("3<!-- = no_such_view() -->")
    with pytest.raises(pages.PageError, match=r"docs/page\.md:1: .*no_such_view"):
        pages.write(checkout)
    assert page.read_text() == "3<!-- = no_such_view() -->"


def test_filling_in_pages_needs_no_matplotlib():
    code = "import sys; from paper import pages; pages.differences(); sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_two_views_of_one_name_are_an_error():
    assert VIEWS["claims"] is claims.claims
    with pytest.raises(ValueError, match=r"`claims` of paper\.claims is taken"):
        view(claims.claims)


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
