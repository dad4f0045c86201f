"""What the documents claim: numbers come from results/, examples run, links lead somewhere."""

import importlib
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
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
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
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
