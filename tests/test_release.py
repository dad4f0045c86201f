"""The release: one version, files without strays, a description that holds on a package index, a citation."""

import email
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import scalesteer

pytest.importorskip("hatchling", reason="needs the extra `dev`")
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = scalesteer.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    with zipfile.ZipFile(built) as file:
        yield file


@pytest.fixture(scope="module")
def metadata(wheel):
    return email.message_from_bytes(wheel.read(f"scalesteer-{VERSION}.dist-info/METADATA"))


def package_files():
    """The files of the package in the working tree."""
    package = ROOT / "src/scalesteer"
    return {
        str(file.relative_to(package))
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".")
    }


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    files = {name for name in wheel.namelist() if not name.startswith(f"scalesteer-{VERSION}.dist-info/")}
    assert files == {f"scalesteer/{name}" for name in package_files()}
    assert {Path(name).suffix for name in files} <= {
        *(".py", ".typed", ".safetensors", ".json", ".md"),
        *(".html", ".css", ".js", ".svg", ".png"),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The path of the source distribution."""
    (built,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("sdist")), versions=["standard"])
    return Path(built)


def test_both_distributions_are_small(wheel, source):
    for one in (Path(wheel.filename), source):  # with the weights of all networks
        assert one.stat().st_size < 2_000_000


def test_the_source_distribution_has_the_package_and_what_its_pages_need(source):
    start = f"scalesteer-{VERSION}/"
    with tarfile.open(source) as file:
        files = {name.removeprefix(start) for name in file.getnames()}
    pages = {"README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "pyproject.toml", ".gitignore", "PKG-INFO"}
    assert files == {f"src/scalesteer/{name}" for name in package_files()} | pages


def test_the_version_is_that_of_the_package_and_of_the_citation(metadata):
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    assert metadata["Version"] == VERSION
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
    entries = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert VERSION in entries
    assert "version" not in PROJECT  # it stands in the package alone


def test_the_description_on_an_index_has_no_relative_link(metadata):
    text = metadata.get_payload()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 20
    own = tuple(
        f"{start}/scalesteer/scalesteer/" for start in ("https://raw.githubusercontent.com", "https://github.com")
    )
    for target in targets:
        assert target.startswith("https://"), target
        if target.startswith(own):
            inside = re.sub(r"^https://[^/]+/scalesteer/scalesteer/(blob/)?main/|#.*", "", target)
            assert (ROOT / inside).exists(), target
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert pictures
    assert all(target.startswith(own[0]) for target in pictures)
    assert "<!--" not in text
    assert "$" not in text  # formulas


def test_one_address_stands_everywhere(metadata):
    assert PROJECT["urls"]["Repository"] == "https://github.com/scalesteer/scalesteer"
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == PROJECT["urls"]["Repository"]
    assert {"Documentation", "Changelog", "Issues", "Paper"} <= set(PROJECT["urls"])


def test_the_citation_names_the_paper():
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    assert paper["title"].startswith("Scale Steerable Filters for Locally Scale-Invariant")
    assert [author["family-names"] for author in paper["authors"]] == ["Ghosh", "Gupta"]
    assert paper["identifiers"] == [{"type": "other", "value": "arXiv:1906.03861"}]


def job(name):
    """One job of the workflow that tests every change."""
    return yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"][name]


def test_the_oldest_and_the_newest_versions_are_tested():
    oldest_python = PROJECT["requires-python"].removeprefix(">=")
    torch = next(line for line in PROJECT["dependencies"] if line.startswith("torch"))
    numpy = next(line for line in PROJECT["dependencies"] if line.startswith("numpy"))
    listed = job("versions")["strategy"]["matrix"]["include"]
    first, last = listed[0], listed[-1]
    assert first["python"] == oldest_python
    assert first["torch"] == torch.replace(">=", "==") + ".*"
    assert first["numpy"] == numpy.replace(">=", "==") + ".*"
    assert last["torch"] == "torch"
    assert f"Programming Language :: Python :: {last['python']}" in PROJECT["classifiers"]


def test_workflows_and_templates_can_be_read():
    files = [file for pattern in ("*.yml", "*/*.yml") for file in (ROOT / ".github").glob(pattern)]
    assert len(files) >= 4
    for file in [*files, ROOT / ".pre-commit-config.yaml"]:
        assert isinstance(yaml.safe_load(file.read_text()), dict), file
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    used = {word for file in files for word in re.findall(r"\bmake ([a-z]+)", file.read_text())}
    assert {"test", "site"} <= used <= targets
