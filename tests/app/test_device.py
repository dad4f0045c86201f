import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import scalesteer

CODE = """
import json, sys
from pathlib import Path
from scalesteer.app.device import commit
found = [commit()]
with open(Path(sys.argv[1], "nn.py"), "a") as file:
    file.write("# changed")
print(json.dumps([*found, commit()]))
"""


def git(folder, *words):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def copy_package(folder):
    package = folder / "scalesteer"
    shutil.copytree(Path(scalesteer.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def commits(package):
    """What a copied package says of its commit, before and after one of its files is changed."""
    environment = {k: v for k, v in os.environ.items() if k != "SCALESTEER_COMMIT"}
    environment |= {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", CODE, str(package)]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def make_hostile(folder, loot):
    """Every program that git's settings can name leaves a file when it runs."""
    touch = folder / ".git" / "touch.sh"
    touch.write_text(f"#!/bin/sh\necho $0 $@ >> '{loot}'\ncat\n")
    touch.chmod(0o755)
    for name in ("core.fsmonitor", "filter.x.clean", "filter.x.process", "diff.external", "core.pager"):
        git(folder, "config", name, str(touch))
    (folder / ".git" / "info" / "attributes").write_text("* filter=x\n")
    for hook in ("post-index-change", "reference-transaction"):
        shutil.copy(touch, folder / ".git" / "hooks" / hook)


pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def test_commit_is_that_of_the_checkout_and_marked_when_files_changed(tmp_path):
    package = copy_package(tmp_path / "src")
    (tmp_path / "link").symlink_to("src")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "All")
    head = git(tmp_path, "rev-parse", "HEAD")
    make_hostile(tmp_path, tmp_path / ".git" / "loot")
    assert commits(package) == [head, f"{head}-dirty"]
    assert not (tmp_path / ".git" / "loot").exists()
    os.utime(package / "channels.py", (0, 0))  # another time, the same size: git must read it, through the filter
    git(tmp_path, "-c", "core.fsmonitor=false", "status")  # the trap is one
    assert (tmp_path / ".git" / "loot").exists()


@pytest.mark.parametrize("place", ["src", "venv/lib/site-packages"])
def test_package_inside_another_repository_has_no_commit_and_runs_nothing_of_it(tmp_path, place):
    (tmp_path / "own.txt").write_text("theirs")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "All")
    package = copy_package(tmp_path / place)  # not tracked
    make_hostile(tmp_path, tmp_path / ".git" / "loot")
    assert commits(package) == [None, None]
    assert not (tmp_path / ".git" / "loot").exists()
