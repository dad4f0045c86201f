"""What the documents claim: numbers come from results/, examples run, links lead somewhere."""

import json
import re
from pathlib import Path

import pytest

from docs import speed
from docs.guide import plots
from scalesteer.experiments import reproduce
from scalesteer.experiments.results import collect

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_guides_tables_are_those_of_the_measured_numbers():
    numbers = json.loads((plots.OUTPUT / "maths.json").read_text())
    for document, parts in ((plots.GUIDE, plots.tables(numbers)), (plots.README, plots.readme_parts(numbers))):
        text = document.read_text()
        assert plots.fill(text, parts) == text


def test_the_papers_tables_are_those_of_the_results():
    for document, parts in reproduce.documents(collect(ROOT / "results"), ROOT).items():
        text = (ROOT / document).read_text()
        assert reproduce.fill(text, parts) == text


def test_the_page_on_speed_is_that_of_the_measured_times():
    for document, parts in ((speed.PAGE, speed.parts), (speed.README, speed.readme_parts)):
        text = document.read_text()
        assert plots.fill(text, parts(speed.load())) == text


def test_the_page_on_speed_takes_failures_and_gaps():
    result = speed.load()["cpu"]
    for case in result["measurements"]:
        case["contenders"] = {name: {"error": "out of memory"} for name in case["contenders"]}
    shown = speed.section(result, "cpu")
    assert "out of memory" in shown
    assert "failed" in shown
    for count in range(len(result["measurements"])):  # a run that was cut short anywhere
        assert speed.section(result | {"measurements": result["measurements"][:count]}, "cpu")
    assert "Not measured yet" in speed.parts({"cpu": result | {"measurements": []}})["h200"]


def test_the_guides_numbers_can_be_measured_again():
    numbers = json.loads((plots.OUTPUT / "maths.json").read_text())
    for name, row in plots.steering_table().items():
        assert row == pytest.approx(numbers["steering"][name], rel=0.02)
    for order, row in plots.footnote_table().items():
        assert row == pytest.approx(numbers["footnote"][order], rel=1e-3)
    assert plots.rank_table() == numbers["rank"]


def test_the_readmes_example_runs():
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    scope = {}
    exec(example, scope)
    assert scope["y"].shape == (8, 16, 64, 64)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing
