"""The program of docs/guide/own-network.md: alone, and by two processes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scalesteer.app import read_run

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "own-network.md"
PROGRAM = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1]


def run_program(folder, *start):
    """Run it in a folder, as a user would; its result, and what it printed."""
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, *start, "program.py"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "runs" / "stripes" / "result.json").read_text()), done.stdout


def test_the_program_of_the_page_runs(tmp_path):
    result, said = run_program(tmp_path)
    assert len(said.splitlines()) == len(result["history"]) + 1
    assert "test_error" in said.splitlines()[-1]
    assert result["test_error"] < 0.3
    assert read_run(tmp_path / "runs" / "stripes").network.model == "__main__:Net"
    assert len([line for line in PROGRAM.splitlines() if line.strip()]) <= 30


@pytest.mark.slow
def test_two_processes_run_it_together(tmp_path):
    result, said = run_program(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert len(said.splitlines()) == len(result["history"]) + 1  # the first process speaks
    assert result["environment"]["note"] == "trained by 2 processes"
    assert result["test_error"] < 0.3  # each draws its own random sizes: test_given.py compares without them
