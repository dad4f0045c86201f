"""Networks at sizes that training did not show: tables, numbers and plots."""

import itertools
import json
import statistics

import pytest

import paper
from paper import anysize, cells, claims, grids, report
from paper.cells import GAP
from paper.claims import TARGETS
from paper.grids import EXPERIMENTS, LEADING, PROTOCOLS, RIVALS, Row
from tests.paper.invented import of_cell, results_by_size

LONG = grids.RESIZED + anysize.AS_LONG


def names(table):
    """The first cells of a table, without its head."""
    return [row.split(" | ")[0].strip("| ") for row in table.splitlines()[2:] if row.startswith("| ")]


@pytest.fixture
def with_long(monkeypatch):
    """Adds to STIR the rival that trains as long as ours, without the check that trains at all sizes."""
    own = EXPERIMENTS["stir"]
    rows = [
        Row(LONG, row.column, type(row.config).from_dict(row.config.to_dict() | {"epochs": row.config.epochs * 7}))
        for row in own.rows
        if row.line == grids.RESIZED and "All2All" not in row.column
    ]
    others = [row for row in own.rows if row.line != LONG]
    monkeypatch.setitem(EXPERIMENTS, "stir", own._replace(rows=(*others, *rows)))
    for cached in (cells.runs, cells._cells, anysize._cells_of):
        cached.cache_clear()
    yield
    for cached in (cells.runs, cells._cells, anysize._cells_of):
        cached.cache_clear()


def test_without_results_pages_have_published_lines_only(tmp_path):
    data = cells.load(tmp_path)
    for title in grids.STIR:
        assert names(anysize.stir(data, title)) == [f"{name} (published)" for name in anysize.PUBLISHED_SHOWN]
    assert all("(published" in name for name in names(anysize.large_scale(data)))
    assert names(anysize.rescaled_cifar10(data)) == []
    for name in LEADING:
        shown = [anysize.shown(line) for line in anysize.ordered(cells.lines(name))]
        said = "Left out, because some of their runs have not been made: "
        assert anysize.left_out(data, name) == f"{said}{'; '.join(shown)}."
        assert set(shown) <= set(names(report.table(data, name, title=False)))  # the command shows every line
    assert claims.targets(data).count(f"| {GAP} | {GAP} | {GAP} |") == len(TARGETS)
    assert anysize.accuracy(data, "stir", "ours", "MNIST Mid2Rest") == GAP
    assert anysize.mean_error(data, "rescaled-cifar10", "ours") == GAP
    assert anysize.correlation(data, "MNIST Mid2Rest") == GAP
    assert anysize.plots(tmp_path) == {}


def test_a_line_is_shown_once_all_of_its_runs_are_there(load):
    lines = list(results_by_size("rescaled-cifar10", lambda line: 0.3))
    lost = of_cell("rescaled-cifar10", grids.RESIZED, "")[0].to_dict()
    data = load(line for line in lines if line["config"] != lost)
    shown = names(anysize.rescaled_cifar10(data))
    assert "Plain network, random resizing" not in shown
    assert len(shown) == len(cells.lines("rescaled-cifar10")) - 1
    assert anysize.left_out(data, "rescaled-cifar10").endswith(": Plain network, random resizing.")
    assert "(1 of 2)" in report.table(data, "rescaled-cifar10")
    assert anysize.left_out(load(lines), "rescaled-cifar10") == ""


def test_the_columns_of_a_title_alone_decide_what_its_table_shows(load):
    data = load(r for r in results_by_size("stir", lambda line: 0.1) if r["config"]["dataset"] == "stir-mnist")
    assert anysize.left_out(data, "stir", "MNIST") == ""
    assert anysize.shown(grids.TWIN) in names(anysize.stir(data, "MNIST"))
    assert anysize.shown(grids.TWIN) not in names(anysize.stir(data, "Emoji"))
    assert anysize.shown(grids.TWIN) in anysize.left_out(data, "stir")


def test_the_rival_that_trains_as_long_as_ours_comes_first(load, with_long):
    every = list(results_by_size("stir", lambda line: 0.1))
    data = load(every)
    table = anysize.stir(data, "MNIST")
    assert names(table)[:2] == ["Plain network, random resizing, as long as ours", grids.STEERED]
    (row,) = (row for row in table.splitlines() if "as long as ours" in row)
    times = anysize.epoch_time(grids.RESIZED)
    assert row.endswith(f" | {GAP} | 3 | 10 | {times} |")  # not trained at all sizes; its epochs are those of the other
    short = [r for r in every if r["config"]["epochs"] not in (105, 700)]
    assert names(anysize.stir(load(short), "MNIST"))[0] == grids.STEERED
    assert anysize.left_out(load(short), "stir").endswith(": Plain network, random resizing, as long as ours.")


def test_tables_show_accuracy_outside_and_inside_beside_published_rows(load):
    data = load(results_by_size("stir", lambda line: 0.1))
    table = anysize.stir(data, "MNIST")
    deviation = statistics.stdev([0.1 * i for i in range(3)])
    row = next(line for line in table.splitlines() if line.startswith("| Plain network |"))
    assert row.startswith(f"| Plain network | 89.9 ± {deviation:.1f} (95.0) | ")
    assert f"| 95.0 | 3 | 10 | {anysize.epoch_time(grids.TWIN)} |" in row  # all sizes were trained; seeds; weights
    assert report.table(data, "stir").count("(published)") == 2 * 11
    best = "92.7 ± 1.5 (95.2) | 90.9 ± 1.5 (94.2) | 84.9 ± 2.0 (92.6) | 94.8 ± 0.7 | 25–50 |"
    assert f"| Pyramid ensemble (published) | {best}" in table
    assert anysize.best_published("Emoji", "Mid2Rest") == "76.6"
    assert anysize.published_accuracy("Plain CNN", "MNIST", "Mid2Rest") == "77.0"
    assert anysize.accuracy(data, "stir", "ours", "Emoji Mid2Rest") == "89.5"
    assert anysize.accuracy(data, "stir", "Plain network", "MNIST Mid2Rest") == "89.9"  # by its shown name
    assert anysize.correlation(data, "MNIST All2All") == "0.95"


def test_no_table_of_a_page_has_more_than_twelve_rows_when_all_runs_are_there(load, with_long):
    data = load(r for name in LEADING for r in results_by_size(name, lambda line: 0.1))
    tables = [anysize.stir(data, title) for title in grids.STIR]
    tables += [anysize.large_scale(data), anysize.rescaled_cifar10(data)]
    assert max(len(names(table)) for table in tables) <= 12


def test_differences_are_intervals_without_emphasis(load):
    data = load(results_by_size("rescaled-cifar10", lambda line: 0.2 if line == LEADING["rescaled-cifar10"] else 0.3))
    found = anysize.difference(data, "rescaled-cifar10", "ours", "Plain network, random resizing")
    pair = (
        cells.Cell("rescaled-cifar10", line, "", "outside") for line in (LEADING["rescaled-cifar10"], grids.RESIZED)
    )
    assert f"**{found}**" == str(cells.minus(data, *pair))
    low, high = map(float, found.split(" to "))
    assert low < -10 < high < 0


def test_readmes_table_has_the_interval_to_the_rival_that_trains_as_long(load):
    experiments = ("stir", "large-scale", "rescaled-cifar10")
    data = load(r for name in experiments for r in results_by_size(name, lambda line: 0.1 + 0.1 * (line == grids.TWIN)))
    head, _, first, *_, last = anysize.larger_experiments(data).splitlines()
    assert head.count("|") == first.count("|") == last.count("|")
    for row, name, column in ((first, "stir", "MNIST Small2Large"), (last, "rescaled-cifar10", "")):
        rival = anysize.ordered(line for line in cells.lines(name) if line.startswith(grids.RESIZED))[0]
        assert f"| {anysize.difference(data, name, 'ours', rival, column)} |" in row


def test_a_time_per_epoch_is_relative_to_another_network(tmp_path, monkeypatch):
    (tmp_path / "bench").mkdir()
    seconds = {grids.TWIN: 3.0, grids.PLAIN: 6.0, anysize.STIR_PLAIN: 1.5}
    (tmp_path / "bench" / "stir-epoch.json").write_text(json.dumps({"seconds": seconds}))
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    assert anysize.epoch_time(grids.TWIN) == "2.0"
    assert anysize.epoch_time("ours", "Plain network") == "2.0"
    assert anysize.epoch_time(grids.STEERED) == GAP


def test_first_forms_are_kept_beside_what_replaced_them():
    photographs = [anysize.first_form("rescaled-cifar10", line) for line in (
        "Scale channels, plain filters, random resizing", "Plain network, random resizing", "Plain network"
    )]  # fmt: skip
    assert photographs == ["31.0", "29.9", "44.2"]  # what the page of that day said
    assert anysize.first_form("mnist-large-scale", "Plain network, random resizing") == "18.0"

    def identities(folder, name):
        lines = (paper.RESULTS / folder / name).read_text().splitlines()
        return {json.loads(line)["identity"] for line in lines}

    for name in ("rescaled-cifar10.jsonl", "mnist-large-scale.jsonl"):
        assert not identities("replaced", name) & identities("runs", name)


def test_other_tables_show_each_size(load):
    data = load(
        [*results_by_size("large-scale", lambda line: 0.02), *results_by_size("rescaled-cifar10", lambda line: 0.3)]
    )
    (row,) = (x for x in anysize.large_scale(data).splitlines() if x.startswith(f"| {grids.PLAIN} |"))
    assert row == f"| {grids.PLAIN} | 97.95 ± 0.07 | 95.00 ± 0.00 {'| 97.95 ± 0.07 ' * 3}| 2 | 10 |"
    assert "| FovAvg (published, not checked) | 98.58 |" in anysize.large_scale(data)
    (row,) = (x for x in anysize.rescaled_cifar10(data).splitlines() if x.startswith("| Plain network |"))
    assert row == f"| Plain network {'| 30.0 ' * 4}| 5.0 {'| 30.0 ' * 4}| 30.0 ± 0.1 | 2 | 10 |"
    assert anysize.mean_error(data, "rescaled-cifar10", "ours", "", "inside") == "5.0"


def test_plots_show_what_was_measured_beside_the_best_published(load, tmp_path):
    load([*results_by_size("stir", lambda line: 0.1), *results_by_size("rescaled-cifar10", lambda line: 0.3)])
    drawn = anysize.plots(tmp_path)
    assert set(drawn) == {f"figures/{name}.png" for name in ("stir-mnist", "stir-emoji", "rescaled-cifar10")}
    axes = drawn["figures/stir-mnist.png"].axes
    assert [axis.get_title() for axis in axes] == list(PROTOCOLS)[:3]
    assert axes[0].get_ylim()[0] == 0
    assert axes[0].get_ylim()[1] > 40  # the largest error of all panels is seen: the published one, trained on large
    lines = {line.get_label(): line.get_ydata() for line in axes[0].get_lines()}
    assert lines["Plain network"][0] == pytest.approx(5.0)
    assert lines["Plain network"][-1] == pytest.approx(10.1)
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
    assert anysize.channels_of("stir", "Plain network, several sizes at test") == "0.5, 0.707, 1, 1.41 and 2"
    assert anysize.setting("stir", "epochs") == "15"
    assert anysize.setting("stir", "epochs", "ours", "Emoji Mid2Rest") == "100"
    assert anysize.setting("3", "batch_size", "SS-CNN", "1 % data") == "25"
    assert anysize.repeats_of("stir", LEADING["stir"]) == "10"
    assert anysize.run_of("stir", column="Emoji Mid2Rest").epochs == 100
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
    own = [anysize.own_images_error(name) for name in ("plain network", "plain network, random", "at")]
    assert own == ["66.0", "53.0", "45.0"]
    assert anysize.own_images_error("plain network", "1") == "31.0"


def test_errors_at_more_sizes_are_those_that_were_measured():
    found = json.loads((paper.RESULTS / "guide" / "more-sizes.json").read_text())
    rows = anysize.more_sizes_table().splitlines()
    for way, errors in found["errors"].items():
        assert f"| {way} | {' | '.join(f'{100 * error:.1f}' for error in errors)} |" in rows
