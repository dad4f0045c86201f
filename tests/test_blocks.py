"""Every block of code on every page: Python runs, commands are understood by the programs that they name."""

import doctest
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from paper.__main__ import app as paper
from scalesteer.app.cli import app as scalesteer
from scalesteer.app.sweep import read_grid
from speed.__main__ import app as speed

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
PROGRAMS = {
    "scalesteer": scalesteer,
    "python -m scalesteer": scalesteer,
    "python -m paper": paper,
    "python -m speed": speed,
}
OTHERS = {"ls", "export", "host", "head", "srun"}  # of the shell, and of Slurm
TORCHRUN = {"--standalone", "--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port"}


class Block(NamedTuple):
    """A block of code: the language of its fence, or "" if it is indented."""

    page: Path
    language: str
    text: str


def blocks_of(page):
    """The blocks of a page, in order. Text in lists is indented too, so that a block stands after an empty line."""
    text = page.read_text()
    fenced = r"^( *)```(\w*)\n(.*?)^ *```"
    for indent, language, code in re.findall(fenced, text, flags=re.S | re.M):
        yield Block(page, language, re.sub(f"^{indent}", "", code, flags=re.M))
    for code in re.findall(r"\n\n((?:    .*\n(?:\n(?=    ))?)+)", re.sub(fenced, "", text, flags=re.S | re.M)):
        if not code.lstrip().startswith("- "):
            yield Block(page, "", re.sub(r"^    ", "", code, flags=re.M))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [block for block in BLOCKS if block.language in {"", "sh", "bash"}]
RUN = {  # pages whose Python is run with what it needs, and where
    "README.md": "tests/paper/test_docs.py",
    "docs/guide/demo.md": "tests/app/test_demo_app.py",
    "docs/guide/deploy.md": "tests/test_export.py",
    "docs/data.md": "tests/datasets/test_page.py",
    "docs/your-own-images.md": "tests/app/test_own_images.py",
    "docs/guide/own-network.md": "tests/app/test_own_page.py",
}


def named(block):
    return str(block.page.relative_to(ROOT))


def test_every_block_is_of_a_kind_that_is_tested_here():
    assert {block.language for block in BLOCKS} == {"", "sh", "bash", "python", "toml", "math"}
    assert len(COMMANDS) > 15
    for block in BLOCKS:
        if block.language == "python" and ">>>" not in block.text:
            test = ROOT / RUN[named(block)]
            assert block.page.name in test.read_text()


def damage(text):
    """What is wrong with the fences and the prompts of a page: such code is not shown as code, and no test runs it."""
    fences = re.findall(r"^.*```.*$", text, flags=re.M)
    found = [line for line in fences if not re.fullmatch(r" *```\w*", line)]
    if fences[1::2] != [re.match(" *", line)[0] + "```" for line in fences[::2]]:
        found.append("a fence is not closed, or not at its own depth")
    outside = re.sub(r"^( *)```\w+\n.*?^\1```$", "", text, flags=re.S | re.M)
    found += [line for line in outside.splitlines() if re.search(r"(^|\s)(>>>|\.\.\.) ", line)]
    blocks = re.findall(r"^( *)```\w+\n(.*?)^ *```", text, flags=re.S | re.M)
    return found + ["an empty block" for _, code in blocks if not code.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_stands_in_blocks(page):
    assert damage(page.read_text()) == []


def test_code_that_lost_its_lines_is_noticed():
    right = "- item:\n\n  ```python\n  >>> 1 + 1\n  2\n\n  ```\n\n```sh\nls\n```\n"
    assert damage(right) == []
    for wrong in (
        right.replace("\n  >>>", " >>>"),
        right.replace("```sh\n", "```sh "),
        right.replace("  ```python", "```python"),
        right.replace("\n```\n", "\n"),
        right.replace("ls\n", ""),
        "Type >>> 1 + 1 and see.",
    ):
        assert damage(wrong), wrong


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if ">>>" in b.text}), ids=lambda page: page.name)
def test_examples_with_prompts_print_what_the_page_says(page):
    torch.manual_seed(0)
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert tried > 2
    assert not failed


def commands_of(text):
    """The commands of a block, without comments; lines that end in a backslash go on."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def understand(words):
    """Raise unless the program that a command names understands all of it."""
    line = " ".join(words)
    for start, app in PROGRAMS.items():
        if line.startswith(f"{start} "):
            try:
                app.parse(words[len(start.split()) :], start)
            except SystemExit as ended:
                raise AssertionError(line) from ended
            return
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
        assert set(words[1:]) <= targets, line
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.fullmatch(r"\.\[(.+)\]", words[2])[1].split(",")) <= set(extras), line
    elif words[0] == "torchrun" or words[0] == "srun":
        own = words.index("--") + 1 if "--" in words else words.index("-m") + 1
        understand(words[own:])
        if words[0] == "torchrun":
            assert {word for word in words[1:own] if word.startswith("--")} <= TORCHRUN, line
    elif words[0] == "python":
        assert subprocess.run([sys.executable, ROOT / words[1], "--help"], capture_output=True).returncode == 0, line
    else:
        assert words[0].partition("=")[0] in OTHERS, line


@pytest.mark.parametrize("page", sorted({block.page for block in COMMANDS}), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_is_understood(page):
    tried = 0
    for block in COMMANDS:
        if block.page == page and is_shell(block):
            for words in commands_of(block.text):
                understand(words)
                tried += 1
    assert tried or not any(is_shell(block) for block in COMMANDS if block.page == page)


def is_shell(block):
    """Whether a block has commands: an indented one may also show files, or a page's markers."""
    return bool(block.language) or re.match(r"(scalesteer|python|make|pip|torchrun|#!/)", block.text) is not None


@pytest.mark.parametrize(
    "line",
    ["scalesteer train photos --epoch 3", "scalesteer trian", "python -m paper tabel 1", "make tea", "rm -rf /"],
)
def test_a_command_that_is_wrong_is_noticed(line):
    with pytest.raises(AssertionError):
        understand(line.split())


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash" or "#SBATCH" in b.text], ids=named)
def test_scripts_are_right_for_the_shell(block):
    assert subprocess.run(["bash", "-n"], input=block.text, text=True).returncode == 0


def test_the_grid_of_a_sweep_can_be_read(tmp_path):
    (block,) = (block for block in BLOCKS if block.language == "toml")
    (tmp_path / "grid.toml").write_text(block.text)
    assert sum(len(setting.runs) for setting in read_grid(tmp_path / "grid.toml")) == 12


def test_blocks_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text:\n\n    make test # now\n\n- item\n\n  ```sh\n  ls \\\n    x\n  ```\n\n    no [link](a)\n")
    fenced, first, last = blocks_of(page)
    assert (fenced.language, list(commands_of(fenced.text))) == ("sh", [["ls", "x"]])
    assert list(commands_of(first.text)) == [["make", "test"]]
    assert not is_shell(last)
