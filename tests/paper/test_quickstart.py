"""The quickstart from end to end, in miniature, and the report it leaves."""

import json
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paper import quickstart
from scalesteer import LogRadialBasis

ROOT = Path(__file__).parents[2]
TINY = quickstart.Settings(
    train_images=120,
    test_images=40,
    test_scales=(0.4, 0.6, 0.9),
    seeds=(0, 1),
    epochs=1,
    batch_size=40,
    widths=(3, 3, 3),
    filter_scales=(0.6, 1.0, 1.7),
)


class Page(HTMLParser):
    """Collects what a page holds and refers to."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.images, self.text = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster"):
                self.references.append(value)
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def finished(tmp_path, filled_cache):
    result = quickstart.run(TINY, tmp_path / "quickstart")
    return result, tmp_path / "quickstart"


def test_a_miniature_run_ends_in_a_report_that_needs_nothing_else(finished, capsys):
    result, folder = finished
    text = (folder / "index.html").read_text()
    page = Page(text)
    assert page.open == []
    assert [image["alt"] for image in page.images] == [
        "Error against size",
        "Learned filters at their scales",
        "Which scale wins",
    ]
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    for outside in ("http:", "https:", "@import", "url(", "<script", "<link"):
        assert outside not in text
    assert 'name="viewport"' in text
    assert quickstart.verdict(result) in page.text
    assert "What now" in page.text
    assert json.loads((folder / "result.json").read_text()) == result


def test_the_numbers_are_means_over_seeds_and_unseen_sizes(finished):
    result, _ = finished
    assert result["outside"] == [0.4, 0.9]
    for name in TINY.models:
        first, second = (r for r in result["runs"] if r["model"] == name)
        assert [r["seed"] for r in (first, second)] == [0, 1]
        expected = [(a + b) / 2 for a, b in zip(first["errors"], second["errors"], strict=True)]
        assert result["summary"][name]["errors"] == pytest.approx(expected)
        assert result["summary"][name]["outside"] == pytest.approx((expected[0] + expected[2]) / 2)
    assert set(result["test_data"]) == {"0.4", "0.6", "0.9"}
    assert result["environment"]["data"]["scale_range"] == [0.5, 0.75]


def test_the_same_settings_give_the_same_errors(finished, tmp_path):
    again = quickstart.run(TINY, tmp_path / "again")
    assert [r["errors"] for r in again["runs"]] == [r["errors"] for r in finished[0]["runs"]]


def test_all_networks_have_about_the_same_number_of_parameters():
    counts = {
        name: quickstart.count_parameters(quickstart.EDITIONS["all"].model(name, 0))
        for name in quickstart.EDITIONS["all"].models
    }
    assert counts.pop("spatial-transformer") < 1.2 * min(counts.values())  # it has a network before the network
    assert max(counts.values()) / min(counts.values()) < 1.1


def test_every_network_takes_part_if_asked_to(filled_cache, tmp_path):
    settings = replace(TINY, models=quickstart.EDITIONS["all"].models, seeds=(0, 1, 2), test_scales=(0.6, 0.9))
    result = quickstart.run(settings, tmp_path)
    assert list(result["summary"]) == list(quickstart.EDITIONS["all"].models)
    _, *body = quickstart.rows(result)
    assert [row[0] for row in body] == [quickstart.NAMES[name] for name in settings.models]
    outside = [r["outside"] for r in result["runs"] if r["model"] == "spatial-transformer"]
    assert body[3][-1] == f"{100 * statistics.mean(outside):.1f} ± {100 * statistics.stdev(outside):.1f}"
    assert quickstart.verdict(result).count(" %") == 5


def test_variants_lack_what_they_say():
    settings = quickstart.EDITIONS["variants"]
    whole, points, single = (settings.model(name, 0).first for name in settings.models)
    assert [len(layer.scales) for layer in (whole, points, single)] == [5, 5, 1]
    assert points.basis == LogRadialBasis.preset("paper")
    assert whole.basis == single.basis == LogRadialBasis.preset("area")


@pytest.mark.parametrize("edition", quickstart.EDITIONS)
def test_the_kept_result_is_one_of_the_settings_and_holds_what_it_shows(edition):
    result = quickstart.recorded(edition)
    assert result["settings"] == json.loads(json.dumps(quickstart.asdict(quickstart.EDITIONS[edition])))
    assert result["outside"] == [0.3, 0.4, 0.8, 0.9, 1.0]
    for name, own in quickstart.summarize(result["runs"]).items():
        assert result["summary"][name]["errors"] == pytest.approx(own["errors"])
        assert result["summary"][name]["outside"] == pytest.approx(own["outside"])
    if "plain-cnn" in result["summary"]:
        assert result["summary"]["ss-cnn"]["outside"] < result["summary"]["plain-cnn"]["outside"]
    assert str(ROOT) not in json.dumps(result)


def test_the_pages_table_has_a_row_for_each_network_and_a_column_for_each_size():
    lines = quickstart.quickstart_table().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert {line.count(" | ") for line in table if "---" not in line} == {9}
    assert table[0].startswith("| size of the digits | 0.3 | 0.4 | 0.5\\* |")
    assert [line.split(" | ")[0] for line in table[2:]] == ["| SS-CNN", "| Plain CNN"]
    outside = f"{100 * quickstart.recorded()['summary']['ss-cnn']['outside']:.1f}"
    assert table[2].endswith(f"| {outside} |")
    assert quickstart.quickstart_outside()["SS-CNN"] == outside
    assert "3,000" in lines[-1]
    within = [float(line.replace("|", " ").split()[i]) for line in table[2:3] for i in (3, 4, 5)]
    assert float(quickstart.quickstart_within()["SS-CNN"]) == pytest.approx(sum(within) / 3, abs=0.1)
    assert quickstart.quickstart_settings()["filter_scales"] == [0.5, 0.7, 1.0, 1.4, 2.0]


def test_the_verdict_follows_the_numbers():
    summary = {"ss-cnn": {"outside": 0.1234}, "plain-cnn": {"outside": 0.2}}
    said = quickstart.verdict({"summary": summary, "outside": [0.3, 1.0]})
    assert said == "Mean error at sizes never seen in training (0.3, 1.0): SS-CNN 12.3 %; Plain CNN 20.0 %."


def test_plots_are_those_of_the_kept_results():
    plots = quickstart.plots()
    assert set(plots) == {f"quickstart/errors{suffix}.png" for suffix in ("", "-all", "-variants")}
    line = next(x for x in plots["quickstart/errors.png"].axes[0].get_lines() if x.get_label() == "SS-CNN")
    assert list(line.get_ydata()) == pytest.approx(
        [100 * error for error in quickstart.recorded()["summary"]["ss-cnn"]["errors"]]
    )


def test_the_command_prints_the_table_and_keeps_what_it_is_asked_to(filled_cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    monkeypatch.setattr(quickstart, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(quickstart.EDITIONS, "variants", replace(TINY, models=("ss-cnn", "ss-cnn, points"), seeds=(0,)))
    assert quickstart.main(["--variants", "--record"]) == 0
    result = quickstart.recorded("variants")
    assert result == json.loads((tmp_path / "quickstart-variants" / "result.json").read_text())
    assert result["environment"]["command"] == "make quickstart VARIANTS=1"
    out = capsys.readouterr().out
    assert out.startswith("Training 2 small networks on MNIST digits, 1 times each: about 8 minutes")
    (row,) = [line for line in out.splitlines() if line.startswith("SS-CNN, sampled at points  ")]
    assert row.split()[4:] == quickstart.percent(result["summary"]["ss-cnn, points"])
    assert out.endswith(f"The report: {tmp_path / 'quickstart-variants' / 'index.html'}\n")


def test_what_cannot_be_done_is_one_line_and_status_2(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(quickstart, "ROOT", tmp_path / "file")
    assert quickstart.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quickstart: ")
    assert "Not a directory" in line


def test_an_interrupted_run_ends_with_130(filled_cache, tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "home")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("Training")
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not list((tmp_path / "home").rglob("index.html"))


# A suite that runs in the background inherits "ignore interrupts"; a user's terminal does not.
INTERRUPTED = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from paper import quickstart
quickstart.ROOT = Path(sys.argv[1])
sys.exit(quickstart.main([]))
"""
