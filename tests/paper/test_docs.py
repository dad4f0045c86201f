"""What the documents claim: numbers come from results/, examples run, links lead somewhere."""

import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")  # a relative one, to a file
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_readmes_examples_run_one_after_the_other():
    scope = {}
    for example in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S):
        exec(example, scope)
    assert scope["net"](torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert scope["response"].shape == scope["scale"].shape == (8, 30, 28, 28)
    assert scope["logits"].shape == (8, 10)
    assert scope["size"].shape == (8,)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document):
    missing = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert not missing


def commands(text):
    """The commands in a document's code, indented or between backticks: program and first word; without comments."""
    code = "\n".join(re.findall(r"^    [^#\n]*|`[^`\n]+`", text, flags=re.M))
    return set(re.findall(r"(scalesteer|python -m \w+|make) ([a-z]+)\b", code))


def exists(program, word, capsys):
    """Whether a program takes this as its first word."""
    if program == "make":
        return re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), flags=re.M) is not None
    module = "scalesteer.app.cli" if program == "scalesteer" else f"{program.split()[-1]}.__main__"
    with pytest.raises(SystemExit):
        importlib.import_module(module).app.main([word, "--help"], prog="program")
    return f"program {word} " in capsys.readouterr().out  # of a word that it does not know it shows the list


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_name_commands_that_exist(document, capsys):
    if document.name != "CHANGELOG.md":  # tells of what was
        assert [found for found in sorted(commands(document.read_text())) if not exists(*found, capsys)] == []


def test_a_command_that_does_not_exist_is_noticed(capsys):
    found = commands(
        "On scalesteer fonts.\n\n    scalesteer data fetch\n    make docs # make do\n\nand `python -m paper nope`."
    )
    assert found == {("scalesteer", "data"), ("make", "docs"), ("python -m paper", "nope")}
    assert {one for one in found if not exists(*one, capsys)} == {("python -m paper", "nope")}
    assert not exists("make", "nope", capsys)


# How much a reader is asked to read


def prose(text):
    """A page without its code, its markers and the targets of its links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return re.sub(r"^    .*$|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", "", text, flags=re.M)


def numbers(text):
    return re.findall(r"(?<![A-Za-z\d])\d+(?:[.,]\d+)*(?:e-?\d+)?", prose(text))


def rows(text):
    """How many rows each table has."""
    return [len(table.splitlines()) - 2 for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M)]


def test_the_measures_of_a_page_count_what_is_read():
    page = (
        "On 2 H200 7e-14<!-- = x(3) --> [4](5) `6`\n\n    code 7\n\n```\n8\n```\n1,000 and 1.5\n\n| a |\n|---|\n| 9 |\n"
    )
    assert numbers(page) == ["2", "7e-14", "4", "1,000", "1.5", "9"]
    assert rows(page) == [1]


def test_the_readme_is_short_and_begins_with_the_paper():
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 115
    assert len(numbers(text)) <= 60
    first = " ".join(lines[:10])
    assert "*Scale Steerable Filters for Locally Scale-Invariant Convolutional Neural Networks*" in first
    assert "](https://arxiv.org/abs/1906.03861)" in first
    assert "](https://github.com/rghosh92/SS-CNN)" in first
    commands_of_start = [line.split("#")[0].strip() for line in lines[:40] if line.startswith("    make ")]
    assert commands_of_start == ["make quickstart", "make test"]


def test_the_pages_can_be_read():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    assert sum(len(page.read_text().splitlines()) for page in pages) <= 1900
    assert [page.name for page in pages if re.search("not measured yet|not yet measured", page.read_text())] == []
    evidence = [page for page in pages if page.parent.name == "evidence"]
    assert len(evidence) <= 12
    assert {page.name: most for page in evidence if (most := max(rows(page.read_text()), default=0)) > 12} == {}
    assert not (ROOT / "paper/pages").exists()


def test_every_page_is_in_the_table_of_contents():
    contents = ROOT / "docs/README.md"
    listed = {(contents.parent / link).resolve() for link in LINK.findall(contents.read_text())}
    assert set(ROOT.glob("docs/**/*.md")) - {contents} <= listed
