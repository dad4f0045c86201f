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
import torch
from scipy import stats

import paper
from paper import contenders, quickstart

ROOT = Path(__file__).parents[2]
TINY = contenders.Settings(
    train_images=120,
    test_images=40,
    test_scales=(0.4, 0.6, 0.9),
    seeds=(0, 1),
    epochs=1,
    batch_size=40,
    widths=(3, 3, 3),
    filter_scales=(0.6, 1.0, 1.7),
    channels=(0.7, 1.0),
    longer={"plain-cnn": 3, "pooled-cnn": 2},
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
def finished(tmp_path_factory, filled_cache, made=[]):  # noqa: B006  # made once for all tests
    if not made:
        folder = tmp_path_factory.mktemp("quickstart")
        made.append((quickstart.run(TINY, folder), folder))
    return made[0]


def test_a_miniature_run_ends_in_a_report_that_needs_nothing_else(finished, capsys):
    result, folder = finished
    text = (folder / "index.html").read_text()
    page = Page(text)
    assert page.open == []
    assert [image["alt"] for image in page.images] == [
        "Error against size",
        "The estimated size",
        "Some digits and their answers",
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


def test_the_same_settings_give_the_same_errors_in_processes_of_their_own(finished, tmp_path):
    again = quickstart.run(TINY, tmp_path / "again", processes=2)
    assert [r["errors"] for r in again["runs"]] == [r["errors"] for r in finished[0]["runs"]]


def test_small_networks_compete_with_larger_ones():
    counts = {name: contenders.count_parameters(contenders.Settings().model(name, 0)) for name in contenders.NAMES}
    assert counts[contenders.OURS] == counts["pooled-cnn, resized"]  # channels share their weights
    assert counts[contenders.OURS] < min(counts["plain-cnn"], counts["ss-cnn"])


def test_the_mean_over_several_seeds_comes_with_its_deviation(filled_cache, tmp_path):
    settings = quickstart.EDITIONS["all"]
    assert set(settings.models) == {name for name in contenders.NAMES if "resized" in name}
    models = settings.models
    settings = replace(TINY, train_images=40, test_images=20, models=models, seeds=(0, 1, 2), test_scales=(0.6, 0.9))
    result = quickstart.run(settings, tmp_path)
    assert list(result["summary"]) == list(models)
    _, *body = quickstart.rows(result)
    assert [row[0] for row in body] == [contenders.NAMES[name] for name in models]
    outside = [r["outside"] for r in result["runs"] if r["model"] == models[2]]
    assert body[2][-3] == f"{100 * statistics.mean(outside):.1f} ± {100 * statistics.stdev(outside):.1f}"
    assert quickstart.verdict(result).count(" %") == len(models)


def test_networks_are_trained_as_their_names_say(filled_cache, monkeypatch):
    seen = []

    def invent(**options):
        return lambda x: seen.append((options["resize"], options["antialias"])) or x

    monkeypatch.setattr(contenders, "Augmentation", invent)
    images, told = TINY.images("train", (0.5, 0.75)), []  # three batches
    for name, epochs in (("plain-cnn", 0), ("plain-cnn, resized", 3), ("pooled-cnn, resized", 2)):
        seen.clear()
        training = contenders.Training(TINY, name, 1)
        contenders.train(TINY.model(name, 1), images, training, lambda *said: told.append(said))
        assert seen == [(TINY.resize, False)] * 3 * epochs
        assert told[-1] == (f"{training.title}: epoch {epochs or 1} of {epochs or 1}", pytest.approx(training.work))
    assert training.work == 2 * contenders.COST["pooled-cnn"]


def test_channels_are_put_around_the_trained_network(filled_cache):
    model = TINY.model(contenders.OURS, 0)
    assert TINY.tested("pooled-cnn, resized", model) is model
    ours = TINY.tested(contenders.OURS, model)
    assert (ours.net, ours.scales, ours.calibration.biases) == (model, TINY.channels, (TINY.beside, 0.0))
    training = contenders.Training(TINY, "pooled-cnn, resized", 0)
    assert training.names == [contenders.OURS, "pooled-cnn, resized"]
    (first, answers), (second, without) = training.do(lambda doing, done: None)
    assert [run["model"] for run in (first, second)] == training.names
    assert first["seconds"]["cpu"] == second["seconds"]["cpu"]  # trained once
    assert all(sizes is not None for _, sizes in answers.values())
    assert all(sizes is None for _, sizes in without.values())


def test_the_size_that_answered_is_summed_up_by_quartiles_and_ranks():
    found = quickstart.answered_sizes({0.5: torch.tensor([1.0, 1.2, 1.4]), 1.0: torch.tensor([2.0, 2.2, 2.4])})
    assert found["quartiles"] == {0.5: [1.1, 1.2, 1.3], 1.0: [2.1, 2.2, 2.3]}
    expected = stats.spearmanr([0.5] * 3 + [1.0] * 3, [1.0, 1.2, 1.4, 2.0, 2.2, 2.4]).statistic
    assert found["correlation"] == pytest.approx(expected)


def test_answers_are_those_of_the_network_in_evaluation(filled_cache):
    images = TINY.images("test", (0.6, 0.6))
    model = TINY.tested(contenders.OURS, TINY.model(contenders.OURS, 0))
    classes, sizes = contenders.answer(model, images)
    logits, expected = model.eval()(images.take(slice(0, 40))[0], return_scales=True)
    assert classes.tolist() == logits.argmax(1).tolist()
    assert sizes.tolist() == pytest.approx(expected.tolist())
    assert contenders.answer(TINY.model("plain-cnn", 0), images)[1] is None


@pytest.mark.parametrize("edition", quickstart.EDITIONS)
def test_the_kept_result_is_one_of_the_settings_and_holds_what_it_shows(edition):
    result = quickstart.recorded(edition)
    if result is None:
        pytest.skip(f"{quickstart.command_of(edition)} has not been recorded")
    assert result["settings"] == json.loads(json.dumps(quickstart.asdict(quickstart.EDITIONS[edition])))
    assert result["outside"] == [0.3, 0.4, 0.8, 0.9, 1.0]
    for name, own in quickstart.summarize(result["runs"]).items():
        for key in ("errors", "outside", "inside"):
            assert result["summary"][name][key] == pytest.approx(own[key])
    assert str(ROOT) not in json.dumps(result)


@pytest.fixture
def kept(finished, tmp_path, monkeypatch):
    """The miniature as the recorded result."""
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    (tmp_path / "quickstart").mkdir(exist_ok=True)
    (tmp_path / "quickstart" / "result.json").write_text(json.dumps(finished[0]))
    return finished[0]


def test_the_pages_table_has_a_row_for_each_network_and_a_column_for_each_size(kept):
    lines = quickstart.quickstart_table().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert {line.count(" | ") for line in table if "---" not in line} == {7}
    head = "| size of the digits | 0.4 | 0.6\\* | 0.9 | mean inside\\* | mean outside | weights | seconds |"
    assert table[0] == head
    shown = [line.split(" | ")[0][2:] for line in table[2:]]
    assert shown[0] == contenders.NAMES["plain-cnn, resized"]  # the rival
    assert sorted(shown) == sorted(contenders.NAMES[name] for name in TINY.models)
    own = kept["summary"]["ss-cnn"]
    cells = f"{100 * own['inside']:.1f} | {100 * own['outside']:.1f} | {kept['parameters']['ss-cnn']:,}"
    (row,) = [line for line in table if line.startswith("| SS-CNN |")]
    assert row.endswith(f"| {cells} | {own['cpu']:.0f} |")
    assert quickstart.quickstart_error("SS-CNN", edition="") == f"{100 * own['outside']:.1f}"
    assert quickstart.quickstart_error("ss-cnn", "inside", "") == f"{100 * own['inside']:.1f}"
    assert "120 MNIST digits" in lines[-1]
    assert quickstart.quickstart_correlation("") == f"{kept['answered']['correlation']:.2f}"


def test_intervals_over_seeds_are_in_points(kept):
    runs = [
        {"model": name, "outside": outside, "inside": 0.01 * outside}
        for name, errors in {
            "ss-cnn": (0.05, 0.06, 0.055),
            "plain-cnn": (0.1, 0.12, 0.11),
            contenders.OURS: (0.04, 0.05, 0.06),
            "pooled-cnn, resized": (0.05, 0.07, 0.08),
        }.items()
        for outside in errors
    ]
    (paper.RESULTS / "quickstart" / "result-all.json").write_text(json.dumps({"runs": runs}))
    low, high = map(float, quickstart.quickstart_difference("SS-CNN", "Plain CNN").split(" to "))
    expected = stats.ttest_ind((5, 6, 5.5), (10, 12, 11), equal_var=False).confidence_interval()
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.006)
    # One trained network with and without channels: pairs.
    low, high = map(float, quickstart.quickstart_difference(contenders.OURS, "pooled-cnn, resized").split(" to "))
    expected = stats.ttest_rel((4, 5, 6), (5, 7, 8)).confidence_interval()
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.006)


def test_the_rival_that_trains_as_long_comes_first():
    rows = [line.split(" | ")[0][2:] for line in quickstart.quickstart_table("all").splitlines()[2:]]
    assert rows[:2] == ["Plain CNN, random resizing, as long as ours", contenders.NAMES[contenders.OURS]]


def test_what_was_measured_before_stands_beside_with_the_reason():
    old = paper.recorded("replaced/quickstart.json")
    assert "in every epoch" in old["replaced"]
    assert set(old["names"]) == set(old["all"]["summary"])
    outside = [100 * run["outside"] for run in old["all"]["runs"] if run["model"] == "ss-cnn"]
    assert quickstart.quickstart_replaced("SS-CNN") == f"{statistics.mean(outside):.1f}"


def test_what_has_not_been_recorded_is_an_error_that_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=r"python -m paper\.quickstart --all --record"):
        quickstart.quickstart_table("all")
    assert quickstart.plots() == {}


def test_the_verdict_follows_the_numbers():
    summary = {"ss-cnn": {"outside": 0.1234}, "plain-cnn": {"outside": 0.2}}
    said = quickstart.verdict({"summary": summary, "outside": [0.3, 1.0]})
    assert said == "Mean error at sizes never seen in training (0.3, 1.0): SS-CNN 12.3 %; Plain CNN 20.0 %."


def test_plots_are_those_of_the_kept_results(kept):
    plots = quickstart.plots()
    assert set(plots) == {"quickstart/errors.png"}
    line = next(x for x in plots["quickstart/errors.png"].axes[0].get_lines() if x.get_label() == "SS-CNN")
    assert list(line.get_ydata()) == pytest.approx([100 * error for error in kept["summary"]["ss-cnn"]["errors"]])


def test_the_command_prints_the_table_and_keeps_what_it_is_asked_to(filled_cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    monkeypatch.setattr(paper, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(quickstart.EDITIONS, "all", replace(TINY, models=(contenders.OURS, "plain-cnn"), seeds=(0,)))
    assert quickstart.main(["--all", "--record"]) == 0
    result = quickstart.recorded("all")
    assert result == json.loads((tmp_path / "quickstart-all" / "result.json").read_text())
    assert result["environment"]["command"] == "make quickstart ALL=1"
    out = capsys.readouterr().out
    assert out.startswith("Training 2 small networks on MNIST digits: about 5 minutes")
    (row,) = [line for line in out.splitlines() if line.startswith("Plain CNN  ")]
    assert row.split()[2:-2] == quickstart.percent(result["summary"]["plain-cnn"])
    assert "one seed each" in out
    assert out.endswith(f"The report: {tmp_path / 'quickstart-all' / 'index.html'}\n")


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
        _, errors = process.communicate(timeout=300)
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
import paper
from paper import contenders, quickstart
quickstart.ROOT = Path(sys.argv[1])
sys.exit(quickstart.main([]))
"""
