"""Networks at sizes that training did not show: rows, intervals over seeds, targets, tables and plots."""

import itertools
import json
import math
import re
import statistics
from dataclasses import asdict

import numpy as np
import pytest
from scipy import stats

from paper import anysize, grids, report
from paper.anysize import PENDING
from paper.grids import EXPERIMENTS, LEADING, PROTOCOLS, RIVALS, TARGETS, Cell, Pair
from paper.report import GAP
from scalesteer.data import SIZED_DATASETS
from tests.paper.test_results import ENVIRONMENT, outcome

NAMES = ("stir", "large-scale", "rescaled-cifar10", "new-networks")
SIZED = NAMES[:3]


def result(config, inside=0.05, outside=0.1, correlation=0.95):
    """A result that nobody measured: the same error at all sizes of training, and another at the others."""
    made = outcome(config, inside) | {"environment": ENVIRONMENT | {"device": "a GPU"}}
    made["history"] = {name: [epoch[name] for epoch in made["history"]] for name in ("loss", "val_loss", "val_error")}
    made["history"]["seconds"] = [1.0, 2.0]
    if config.dataset not in SIZED_DATASETS:
        return made
    low, high = config.data.train_sizes
    trained = {size: low <= size <= high for size in SIZED_DATASETS[config.dataset].sizes}
    made["test_error_by_scale"] = [
        {"from": float(f"{s:.6g}"), "to": float(f"{s:.6g}"), "images": 9, "error": inside if seen else outside}
        for s, seen in trained.items()
    ]
    made["test_error"] = statistics.fmean(row["error"] for row in made["test_error_by_scale"])
    if not all(trained.values()):
        made |= {"test_error_inside": inside, "test_error_outside": outside}
    return made | ({"size_correlation": correlation} if config.channels else {})


@pytest.fixture
def load(tmp_path):
    """Writes results to a folder of their own and loads them."""

    def write(found):
        (tmp_path / "runs").mkdir(exist_ok=True)
        by_dataset = {}
        for line in found:
            by_dataset.setdefault(line["config"]["dataset"], []).append(line)
        for name, lines in by_dataset.items():
            (tmp_path / "runs" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return report.load(tmp_path)

    return write


def made(name, error_of, **options):
    """Results of an experiment with `error_of(line)` outside, a little more with every seed or split."""
    for row in EXPERIMENTS[name].rows:
        repeat = row.config.seed + row.config.split
        yield result(row.config, outside=error_of(row.line) + 0.001 * repeat, **options)


# Rows


@pytest.mark.parametrize("name", NAMES)
def test_all_lines_are_trained_alike_but_for_what_they_are_about(name):
    free = {"model", "channels", *grids.WITH_CHANNELS, "resize", "test_channels", "join", "seed", "split"}
    by_column = {}
    for row in EXPERIMENTS[name].rows:
        tuned = {"lr", "weight_decay", "upsample", "widths"} if row.config.model == "ss-cnn" else set()
        own = {key: value for key, value in asdict(row.config).items() if key not in free | tuned}
        by_column.setdefault(row.column, []).append(own)
    for found in by_column.values():
        usual = found[0]
        assert all(own.items() <= usual.items() for own in found)
        assert not usual["tuning"]


def test_lines_are_what_their_names_say():
    for row in itertools.chain(*(EXPERIMENTS[name].rows for name in NAMES)):
        config, ours = row.config, row.line.startswith(grids.OURS)
        assert bool(config.channels) == (config.drop > 0) == ours
        assert bool(config.resize) == row.line.endswith("random resizing")
        assert bool(config.test_channels) == (config.join == "mean") == (row.line == grids.SEVERAL)
        assert config.model.startswith("steered") == row.line.startswith(grids.STEERED)
        assert (config.model == "ss-cnn") == (row.line == grids.PAPERS)


def test_stir_has_its_protocols_and_tests_at_every_size():
    sizes = {row.column: row.config.train_sizes for row in EXPERIMENTS["stir"].rows}
    assert {column.split()[1]: own for column, own in sizes.items()} == PROTOCOLS
    assert len(sizes) == 8
    seeds = {row.line: row.config.seed + 1 for row in EXPERIMENTS["stir"].rows if row.column.endswith("Mid2Rest")}
    assert all(seeds[line] == (10 if line == LEADING["stir"] else 3) for line in seeds)
    for name in SIZED:
        tested = grids.LARGE_SIZES if name == "large-scale" else None
        assert all(row.config.test_sizes == tested and row.config.split == 0 for row in EXPERIMENTS[name].rows)
    steps = {
        row.config.dataset: row.config.epochs
        * (len(row.config.data.sizes_of("train")) * row.config.data.sizes[0] // 100)
        for row in EXPERIMENTS["stir"].rows
        if row.column.endswith("Mid2Rest")
    }
    assert steps == {"stir-mnist": 1200, "stir-emoji": 500}


def test_targets_are_about_cells_that_exist():
    cells = {(name, row.line, row.column) for name in NAMES for row in EXPERIMENTS[name].rows}
    for claim in TARGETS.values():
        for cell in (cell for pair in claim.pairs for cell in pair[:2] if isinstance(cell, Cell)):
            assert cell[:3] in cells
            assert cell.measure in ("test error", *report.ANY_SIZE)


# Intervals


def test_seeds_are_compared_by_welchs_interval(load):
    rng = np.random.default_rng(0)
    noise = {row.config: rng.normal(0, 0.001) for row in EXPERIMENTS["stir"].rows}
    data = load(result(c, outside=0.1 + 0.05 * (c.channels is None) + wobble) for c, wobble in noise.items())
    ours, twin = (Cell("stir", line, "MNIST Mid2Rest", "outside") for line in (LEADING["stir"], grids.TWIN))
    first, second = (list(report.values(data, cell)) for cell in (ours, twin))
    assert (len(first), len(second)) == (10, 3)
    for times in (1.0, 0.8):
        found = report.minus(data, ours, twin, times)
        expected = stats.ttest_ind(first, times * np.array(second), equal_var=False).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
        assert found.verdict == "holds"
    assert report.minus(data, twin, ours).verdict == "fails"


def test_an_interval_against_a_number_is_students(load):
    data = load(made("stir", lambda line: 0.05))
    cell = grids.ours("stir", "MNIST Mid2Rest")
    found = report.minus(data, cell, 5.0)
    expected = stats.ttest_1samp([value - 5 for value in report.values(data, cell)], 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(("first", "second", "whole"), [
    ([1.0, 2.0], [1.0, 2.0], True),
    ([1.0, 2.0, math.nan], [1.0, 2.0], False),
    ([1.0, 2.0], [1.0, math.nan], False),
    ([1.0], [1.0, 2.0], False),
])  # fmt: skip
def test_what_is_missing_leaves_no_verdict(first, second, whole):
    found = report.welch(first, second)
    assert found.whole == whole
    assert found.verdict == ("undecided" if whole else GAP)


def test_equal_numbers_need_no_spread():
    assert report.welch([1.0, 1.0], [2.0, 2.0])[1:] == (-1.0, -1.0, True)


def test_splits_stay_paired(load):
    data = load(
        result(row.config, inside=0.02 + 0.01 * row.config.split + 0.001 * (row.line == grids.TWIN))
        for row in EXPERIMENTS["new-networks"].rows
    )
    ours, twin = (Cell("new-networks", line, "MNIST-Scale") for line in (LEADING["new-networks"], grids.TWIN))
    found = report.minus(data, ours, twin)
    assert (found.low, found.high) == pytest.approx((-0.1, -0.1))


# Views


def test_without_results_every_view_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(anysize, "epoch_time", lambda line: PENDING)
    data = report.load(tmp_path)
    for name in NAMES:
        rows = {row.split(" | ")[0][2:]: row for row in report.table(data, name).splitlines() if row.startswith("| ")}
        for line in report.lines(name):
            assert [cell.strip() for cell in rows[line].strip("|").split("|")[1:] if cell.strip()] == [PENDING]
    assert anysize.targets(data).count(PENDING) == len(TARGETS)
    assert anysize.size_correlations(data).count(PENDING) == 6
    assert {anysize.outcome(data, claim.evidence) for claim in TARGETS.values()} == {PENDING}
    assert anysize.accuracy(data, "stir", "ours", "MNIST Mid2Rest") == PENDING
    assert (
        anysize.mean_error(data, "rescaled-cifar10", "ours") == anysize.best_rival(data, "rescaled-cifar10") == PENDING
    )
    assert anysize.correlation(data, "MNIST Mid2Rest") == PENDING
    assert anysize.plots(tmp_path) == {}


def test_tables_show_accuracy_outside_and_inside_beside_every_published_row(load, monkeypatch):
    monkeypatch.setattr(anysize, "epoch_time", lambda line: PENDING)
    data = load(made("stir", lambda line: 0.1))
    table = anysize.stir(data, "MNIST")
    deviation = statistics.stdev([0.1 * i for i in range(3)])
    row = next(line for line in table.splitlines() if line.startswith(f"| {grids.TWIN} |"))
    assert row.startswith(f"| {grids.TWIN} | 89.9 ± {deviation:.1f} (95.0) | ")
    assert "| 95.0 | 10 | not measured yet |" in row  # all sizes were trained; weights; time of an epoch
    assert table.count("(published)") == 11
    assert (
        "| Pyramid ensemble (published) | 92.7 ± 1.5 (95.2) | 90.9 ± 1.5 (94.2) | 84.9 ± 2.0 (92.6) | 94.8 ± 0.7 |"
        in table
    )
    assert "| PixelPool (published) |" in anysize.stir(data, "Emoji")
    assert anysize.best_published(data, "Emoji", "Mid2Rest") == "76.6"
    assert anysize.accuracy(data, "stir", "ours", "Emoji Mid2Rest") == "89.5"
    assert anysize.correlation(data, "MNIST All2All") == "0.95"
    assert f"| MNIST, {grids.STEERED} | 0.95 ± 0.00 |" in anysize.size_correlations(data)


def test_a_time_per_epoch_is_relative_to_the_plain_network(load, tmp_path, monkeypatch):
    (tmp_path / "bench").mkdir()
    seconds = {grids.TWIN: 3.0, anysize.STIR_PLAIN: 1.5}
    (tmp_path / "bench" / "stir-epoch.json").write_text(json.dumps({"seconds": seconds}))
    monkeypatch.setattr(anysize, "RESULTS", tmp_path)
    assert anysize.epoch_time(grids.TWIN) == "2.0"
    assert anysize.epoch_time(grids.STEERED) == anysize.epoch_time_of(None, "stir") == PENDING


def test_other_tables_show_each_size(load):
    data = load([*made("large-scale", lambda line: 0.02), *made("rescaled-cifar10", lambda line: 0.3)])
    (row,) = (x for x in anysize.large_scale(data).splitlines() if x.startswith(f"| {grids.PLAIN} |"))
    assert row == f"| {grids.PLAIN} | 97.95 ± 0.07 | 95.00 ± 0.00 | 97.95 ± 0.07 | 97.95 ± 0.07 | 97.95 ± 0.07 | 10 |"
    assert "| FovAvg (published, not checked) | 98.58 |" in anysize.large_scale(data)
    (row,) = (x for x in anysize.rescaled_cifar10(data).splitlines() if x.startswith(f"| {grids.TWIN} |"))
    assert row == f"| {grids.TWIN} {'| 30.0 ' * 4}| 5.0 {'| 30.0 ' * 4}| 30.0 ± 0.1 | 10 |"
    assert anysize.mean_error(data, "rescaled-cifar10", "ours", "", "inside") == "5.0"
    assert anysize.best_rival(data, "rescaled-cifar10") == f"{grids.TWIN}, 30.0 %"


@pytest.mark.parametrize(("ratio", "verdict"), [(0.7, "holds"), (0.8, "undecided"), (0.95, "fails")])
def test_a_target_follows_the_intervals(load, ratio, verdict):
    def error(line):
        return 0.2 * ratio if line == LEADING["rescaled-cifar10"] else 0.2 if line == grids.RESIZED else 0.4

    data = load(made("rescaled-cifar10", error))
    rows = [row for row in anysize.targets(data, "rescaled-cifar10").splitlines() if "at most 0.8 times" in row]
    assert len(rows) == 1
    assert rows[0].endswith(f"| {verdict} |")
    assert f"{grids.RESIZED} 20.05" in rows[0]  # the rival that decides
    assert "(first minus 0.8 times second)" in rows[0]
    words = {"holds": "1 hold", "fails": "1 fail", "undecided": "2 undecided"}  # inside, all are the same
    assert words[verdict] in anysize.outcome(data, "rescaled-cifar10")


def test_targets_speak_of_accuracies_and_correlations_where_their_tables_do(load):
    data = load(made("stir", lambda line: 0.02, correlation=0.85))
    text = anysize.targets(data)
    assert re.search(
        r"STIR MNIST: accuracy .* \| Scale channels, plain filters 97.55, at least 94.00 \(accuracy, MNIST ", text
    )
    assert "0.85, at least 0.90 (rank correlation, MNIST Small2Large)" in text
    assert "[holds](evidence/stir.md)" in text
    assert "[fails](evidence/size-that-answered.md)" in text
    assert anysize.outcome(data, "size-that-answered") == "the target: fail"


def test_the_pair_that_decides_weighs_shares_also_against_numbers(load):
    data = load(made("stir", lambda line: 0.05))
    cell = grids.ours("stir", "MNIST Mid2Rest")
    _, pair, _ = report.decide(data, [Pair(cell, 10.0), Pair(cell, 6.0)])
    assert pair.second == 6.0


def test_plots_show_what_was_measured_beside_the_best_published(load, tmp_path):
    load([*made("stir", lambda line: 0.1), *made("rescaled-cifar10", lambda line: 0.3)])
    drawn = anysize.plots(tmp_path)
    assert set(drawn) == {f"figures/{name}.png" for name in ("stir-mnist", "stir-emoji", "rescaled-cifar10")}
    axes = drawn["figures/stir-mnist.png"].axes
    assert [axis.get_title() for axis in axes] == list(PROTOCOLS)[:3]
    assert axes[0].get_ylim()[0] == 0
    assert axes[0].get_ylim()[1] > 40  # the largest error of all panels is seen: the published one, trained on large
    lines = {line.get_label(): line.get_ydata() for line in axes[0].get_lines()}
    assert lines[grids.TWIN][0] == pytest.approx(5.0)
    assert lines[grids.TWIN][-1] == pytest.approx(10.1)
    assert 100 - lines["Pyramid ensemble (published)"][20:22] == pytest.approx(
        anysize.published("stir")["networks"]["Pyramid ensemble"]["accuracy"]["MNIST"]["Small2Large"]["by_size"][20:22]
    )


# Numbers of others, and pages


def test_published_means_are_those_of_their_sizes():
    found = anysize.published("stir")
    assert "taltstidl" in found["source"]
    assert len(found["networks"]) == 11
    for network, title in itertools.product(found["networks"].values(), grids.STIR):
        for protocol, (low, high) in PROTOCOLS.items():
            own = network["accuracy"][title][protocol]
            inside = [accuracy for size, accuracy in enumerate(own["by_size"], 17) if low <= size <= high]
            outside = [accuracy for size, accuracy in enumerate(own["by_size"], 17) if not low <= size <= high]
            assert statistics.fmean(inside) == pytest.approx(own["inside"], abs=0.06)
            assert statistics.fmean(outside or inside) == pytest.approx(own["outside"], abs=0.06)


def test_pages_say_how_lines_were_trained():
    data = None
    assert anysize.channels_of(data, "stir") == "0.25, 0.354, 0.5, 0.707, 1 and 1.41"
    assert anysize.channels_of(data, "stir", grids.TWIN) == "1"
    assert anysize.channels_of(data, "stir", grids.SEVERAL) == "0.5, 0.707, 1, 1.41 and 2"
    assert anysize.resizing_of(data, "large-scale") == "0.5 to 8"
    assert anysize.protocol(data, "stir").startswith(
        "15 epochs of AdamW with batches of 100, a one-cycle learning rate"
    )
    assert anysize.repeats_of(data, "stir", LEADING["stir"]) == "10"
    assert set(LEADING.values()) <= {*grids.OURS, grids.PLAIN + grids.AUGMENTED}
    assert not set(RIVALS) & set(grids.OURS)


def test_runs_on_own_pictures_are_told_by_what_they_are(tmp_path, monkeypatch):
    def run(seed, channels, resize, *errors, first=0):
        about = {"device": "a CPU", "torch": "2", "command": f"scalesteer train --seed {seed}", "epochs": 12}
        sizes = dict(zip(("0.5", "1", "2"), errors, strict=True))
        return {"channels": channels, "resize": resize, "one_size_epochs": first, "errors": sizes, **about}

    runs = [
        run(0, None, None, 60.0, 30.0, 70.0),
        run(1, [1.0], None, 62.0, 32.0, 72.0),
        run(0, None, [0.5, 2], 50.0, 40.0, 56.0),
        run(0, [0.5, 1.0], None, 40.0, 31.0, 50.0, first=9),
    ]
    (tmp_path / "guide").mkdir()
    (tmp_path / "guide" / "own-images.json").write_text(json.dumps(runs))
    monkeypatch.setattr(anysize, "RESULTS", tmp_path)
    _, _, *lines = anysize.VIEWS["own_images"]().splitlines()
    assert lines == [
        "| plain network | 61.0 | 31.0 | 71.0 | 66.0 | 2 |",
        "| plain network, random resizing | 50.0 | 40.0 | 56.0 | 53.0 | 1 |",
        "| at 0.5, 1 times its size, the last 3 epochs | 40.0 | 31.0 | 50.0 | 45.0 | 1 |",
        "",
        "a CPU, torch 2; the first line: `scalesteer train --seed 0`.",
    ]
    outside = anysize.VIEWS["own_images_outside"]
    assert [outside(name) for name in ("plain network", "plain network, random", "at")] == ["66.0", "53.0", "45.0"]
