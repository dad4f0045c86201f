"""What the documents claim: numbers come from results/, examples run, links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


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
