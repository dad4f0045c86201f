"""What the documents claim: numbers come from results/, examples run, links lead somewhere."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import report as speed
from paper import reproduce
from paper.results import collect

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_papers_tables_are_those_of_the_results():
    for document, parts in reproduce.documents(collect(ROOT / "results"), ROOT).items():
        text = (ROOT / document).read_text()
        assert reproduce.fill(text, parts) == text


def test_a_group_that_was_measured_again_takes_the_place_of_the_first(tmp_path, monkeypatch):
    def write(name, commit, **rates):
        cases = [
            {"group": group, "train": True, "batch": 1, "precision": "float32", "graph": False}
            | {"contenders": {"a net": {"ms": 1, "q1": 1, "q3": 1, "images_per_s": rate}}}
            for group, rate in rates.items()
        ]
        about = {"torch": "2", "python": "3", "device": "d", "threads": 2, "load": 0, "command": f"measure {name}"}
        (tmp_path / name).write_text(json.dumps({"environment": about | {"commit": commit}, "measurements": cases}))

    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    write("cpu.json", "a" * 40, large=111, baselines=222)
    write("cpu-baselines.json", "b" * 40, baselines=333)
    large, compared = speed.section(speed.load()["cpu"], "cpu").split("**The compared networks:**")
    assert "| 111 |" in large
    assert "commit aaaaaaa; `measure cpu.json`." in large
    assert "| 333 |" in compared
    assert "222" not in compared
    assert compared.startswith(" torch 2, Python 3, commit bbbbbbb; `measure cpu-baselines.json`.")


def test_the_page_on_speed_takes_failures_and_gaps():
    result = speed.load()["cpu"]
    for case in result["measurements"]:
        case["contenders"] = {name: {"error": "out of memory"} for name in case["contenders"]}
    shown = speed.section(result, "cpu")
    assert "out of memory" in shown
    assert "failed" in shown
    for count in range(len(result["measurements"])):  # a run that was cut short anywhere
        assert speed.section(result | {"measurements": result["measurements"][:count]}, "cpu")


def test_the_page_on_speed_says_how_to_measure_what_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    assert "Not measured yet: `python -m benchmarks bench --device cuda" in speed.speed_section("h200")


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
