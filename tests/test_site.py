"""The site: it builds without a warning, its links lead somewhere, and it shows every public name."""

import importlib
import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import scalesteer

pytest.importorskip("sphinx", reason="the site needs the extra `site`")
from docs import site

ROOT = Path(__file__).parents[1]
PAGES = sorted(site.sources().values())


class Page(HTMLParser):
    """The targets of a page's links and pictures, and the places in it that a link may name."""

    def __init__(self, file):
        super().__init__()
        self.links, self.places, self.text = [], set(), file.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links += [given[name] for name in ("href", "src") if given.get(name)]
        self.places |= {given[name] for name in ("id", "name") if given.get(name)}


@pytest.fixture(scope="module")
def built(tmp_path_factory, made=[]):  # noqa: B006  # made once for all tests
    if not made:
        folder = tmp_path_factory.mktemp("site")
        done = subprocess.run([sys.executable, "-m", "docs.site", folder], cwd=ROOT, capture_output=True, text=True)
        made.append((done, folder / "site"))
    return made[0]


@pytest.fixture
def pages(built):
    return {file: Page(file) for file in built[1].rglob("*.html")}


def test_it_builds_without_a_warning_and_has_every_page(built, pages):
    done, folder = built
    assert done.returncode == 0, done.stderr
    assert {folder / place.replace(".md", ".html") for place in PAGES} <= set(pages)
    assert (folder / "search.html").exists()


def test_every_link_leads_somewhere_and_every_page_leads_home(built, pages):
    broken, home = [], built[1] / "index.html"
    for file, page in pages.items():
        targets = set()
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            targets.add(target)
            places = pages[target].places if target in pages else ()
            if not target.exists() or (parts.fragment and places and unquote(parts.fragment) not in places):
                broken.append(f"{file.relative_to(built[1])}: {link}")
        assert home in targets or file == home, file
    assert broken == []


def test_links_to_the_repository_name_files_that_are_there(pages):
    start = re.escape(site.REPOSITORY) + r"/(blob|tree)/main/([^#]+)"
    found = {match[2]: match[1] for page in pages.values() for link in page.links if (match := re.match(start, link))}
    assert {"src/scalesteer/harmonics.py", "paper/grids.py"} <= set(found)
    assert [link for link, kind in found.items() if not (ROOT / link).is_file() and kind == "blob"] == []
    assert [link for link, kind in found.items() if not (ROOT / link).is_dir() and kind == "tree"] == []


def public_names():
    """Of each module on the site the classes and functions that it defines; of one with a list, those listed."""
    for name in site.modules():
        module = importlib.import_module(name)
        for member in getattr(module, "__all__", vars(module)):
            found = getattr(module, member)
            own = (inspect.isclass(found) or inspect.isfunction(found)) and found.__module__ == name
            if own and not member.startswith("_"):
                yield f"{name}.{member}"


def test_the_reference_has_every_public_name(built, pages):
    described = set().union(*(page.places for file, page in pages.items() if file.parent.name == "reference"))
    missing = [name for name in public_names() if name not in described]
    assert missing == []
    linked = pages[built[1] / "reference/index.html"].links
    ends = {link.rpartition(".")[2] for link in linked if "#scalesteer." in link}
    assert set(scalesteer.__all__) <= ends


def test_what_only_the_forge_understands_is_shown_too(built, pages):
    paper = pages[built[1] / "paper.html"].text
    assert 'class="math notranslate' in paper  # formulas, for MathJax
    assert "$" not in re.sub(r"<(script|code|pre).*?</\1>", "", paper, flags=re.S)
    text = re.sub(r"<!--.*?-->|<[^>]*>", "", pages[built[1] / "reproduction.html"].text, flags=re.S)
    assert "error(" not in text  # the markers of numbers stay invisible
    assert "table:" not in text


def test_the_examples_show_what_they_do(built, pages):
    page = pages[built[1] / "examples.html"]
    for example in (ROOT / "examples").glob("[!_]*.py"):
        assert example.stem.replace("_", "-") in page.places
        picture = f"{example.stem.replace('_', '-')}.png"
        assert (f"_images/{picture}" in page.links) == (ROOT / "results/guide" / picture).exists()


def test_a_link_is_moved_by_what_it_names(tmp_path):
    page = ROOT / "docs/guide/maths.md"
    text = "[a](../paper.md#x) [b](../../README.md) [c](../../src) [d](#e) [f](https://g)"
    moved = site.moved(f"{text} ![h](../../results/guide/basis.png)", page, "guide/maths.md", tmp_path)
    assert moved == (
        f"[a](../paper.md#x) [b](../start.md) [c]({site.REPOSITORY}/tree/main/src) [d](#e) [f](https://g) "
        "![h](../results/guide/basis.png)"
    )
    assert (tmp_path / "results/guide/basis.png").stat().st_size > 0


def test_a_sidebar_has_the_headings_of_a_table_of_contents():
    assert site.sidebar("Text.\n\n## Use\n\n- [A page](a.md): about\n- no link\n\n## Empty\n") == (
        "\n```{toctree}\n:hidden:\n:caption: Use\n\nA page <a.md>\n```\n"
    )
