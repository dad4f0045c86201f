"""Networks at sizes that training did not show: tables, words and plots."""

import itertools
import json
import statistics

import pytest

import paper
from paper import anysize, cells, claims, grids, report
from paper.claims import TARGETS
from paper.grids import LEADING, OURS, PROTOCOLS, RIVALS
from paper.markdown import PENDING
from tests.paper.invented import results_by_size


def test_without_results_every_view_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(anysize, "epoch_time", lambda line: PENDING)
    data = cells.load(tmp_path)
    for name in LEADING:
        rows = {row.split(" | ")[0][2:]: row for row in report.table(data, name).splitlines() if row.startswith("| ")}
        for line in cells.lines(name):
            assert [cell.strip() for cell in rows[line].strip("|").split("|")[1:] if cell.strip()] == [PENDING]
    assert claims.targets(data).count(PENDING) == len(TARGETS)
    assert anysize.size_correlations(data).count(PENDING) == 6
    assert {claims.outcome(data, claim.evidence) for claim in TARGETS.values()} == {"No target can be judged yet"}
    assert anysize.accuracy(data, "stir", "ours", "MNIST Mid2Rest") == PENDING
    assert anysize.mean_error(data, "rescaled-cifar10", "ours") == PENDING
    assert anysize.best_rival(data, "rescaled-cifar10") == PENDING
    assert anysize.correlation(data, "MNIST Mid2Rest") == PENDING
    assert anysize.plots(tmp_path) == {}


def test_tables_show_accuracy_outside_and_inside_beside_every_published_row(load, monkeypatch):
    monkeypatch.setattr(anysize, "epoch_time", lambda line: PENDING)
    data = load(results_by_size("stir", lambda line: 0.1))
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
    assert anysize.best_published("Emoji", "Mid2Rest") == "76.6"
    assert anysize.accuracy(data, "stir", "ours", "Emoji Mid2Rest") == "89.5"
    assert anysize.correlation(data, "MNIST All2All") == "0.95"
    assert f"| MNIST, {grids.STEERED} | 0.95 ± 0.00 |" in anysize.size_correlations(data)


def test_a_time_per_epoch_is_relative_to_the_plain_network(load, tmp_path, monkeypatch):
    (tmp_path / "bench").mkdir()
    seconds = {grids.TWIN: 3.0, anysize.STIR_PLAIN: 1.5}
    (tmp_path / "bench" / "stir-epoch.json").write_text(json.dumps({"seconds": seconds}))
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    assert anysize.epoch_time(grids.TWIN) == "2.0"
    assert anysize.epoch_time(grids.STEERED) == PENDING


def test_other_tables_show_each_size(load):
    data = load(
        [*results_by_size("large-scale", lambda line: 0.02), *results_by_size("rescaled-cifar10", lambda line: 0.3)]
    )
    (row,) = (x for x in anysize.large_scale(data).splitlines() if x.startswith(f"| {grids.PLAIN} |"))
    assert row == f"| {grids.PLAIN} | 97.95 ± 0.07 | 95.00 ± 0.00 | 97.95 ± 0.07 | 97.95 ± 0.07 | 97.95 ± 0.07 | 10 |"
    assert "| FovAvg (published, not checked) | 98.58 |" in anysize.large_scale(data)
    (row,) = (x for x in anysize.rescaled_cifar10(data).splitlines() if x.startswith(f"| {grids.TWIN} |"))
    assert row == f"| {grids.TWIN} {'| 30.0 ' * 4}| 5.0 {'| 30.0 ' * 4}| 30.0 ± 0.1 | 10 |"
    assert anysize.mean_error(data, "rescaled-cifar10", "ours", "", "inside") == "5.0"
    data = load(results_by_size("rescaled-cifar10", lambda line: 0.2 if line in (grids.RESIZED, *OURS) else 0.3))
    assert anysize.best_rival(data, "rescaled-cifar10") == grids.RESIZED


def test_plots_show_what_was_measured_beside_the_best_published(load, tmp_path):
    load([*results_by_size("stir", lambda line: 0.1), *results_by_size("rescaled-cifar10", lambda line: 0.3)])
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
    assert anysize.channels_of("stir") == "0.25, 0.354, 0.5, 0.707, 1 and 1.41"
    assert anysize.channels_of("stir", grids.TWIN) == "1"
    assert anysize.channels_of("stir", grids.SEVERAL) == "0.5, 0.707, 1, 1.41 and 2"
    assert anysize.resizing_of("large-scale") == "0.5 to 8"
    assert anysize.protocol("stir").startswith("15 epochs of AdamW with batches of 100, a one-cycle learning rate")
    assert anysize.repeats_of("stir", LEADING["stir"]) == "10"
    assert anysize.run_of("stir", column="Emoji Mid2Rest").epochs == 100
    assert [anysize.steps(anysize.run_of(name, "SS-CNN")) for name in ("1", "3")] == ["4,680", "1,200"]
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
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    _, _, *lines = anysize.own_images().splitlines()
    assert lines == [
        "| plain network | 61.0 | 31.0 | 71.0 | 66.0 | 2 |",
        "| plain network, random resizing | 50.0 | 40.0 | 56.0 | 53.0 | 1 |",
        "| at 0.5, 1 times its size, the last 3 epochs | 40.0 | 31.0 | 50.0 | 45.0 | 1 |",
        "",
        "a CPU, torch 2; the first line: `scalesteer train --seed 0`.",
    ]
    assert [anysize.own_images_outside(name) for name in ("plain network", "plain network, random", "at")] == [
        "66.0",
        "53.0",
        "45.0",
    ]
