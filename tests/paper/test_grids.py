"""Which runs an experiment has, and that all methods are treated alike."""

import itertools
from collections import Counter
from dataclasses import asdict, replace

import pytest

from paper import __main__ as commands
from paper import cells, claims, grids, report
from paper.claims import CLAIMS
from paper.grids import CHOSEN, DATASETS, EXPERIMENTS, LEADING, METHODS, PAPER, PLAIN, PROTOCOLS
from scalesteer import models
from scalesteer.app.loop import make_model
from tests.paper.invented import result

FREE = {"lr": 1.0, "weight_decay": 0.0, "upsample": 1}  # what may differ between methods


def test_every_experiment_has_its_runs():
    counts = {name: len(experiment.runs) for name, experiment in EXPERIMENTS.items()}
    assert counts == {
        "tuning": 5 * 2 * 8,
        "1": 5 * 2 * 6,
        "2": 6 * 6,
        "3": 3 * 3 * 6,
        "sizes": 5 * 2 * 3,
        "published-forms": 2 * 2 * 6,
        "ablations": 15 * 3,
        "choices": 16 * 3,
        "longer": 4 * 3 * 6,
        "stir": 6 * (10 + 7 * 3) + 2 * 8,
        "large-scale": 2 * 2 + 6,
        "rescaled-cifar10": 2 + 6 * 2,
        "new-networks": 2 * (2 * 6 + 4 * 3),
        "group": 2 * 4 * 3,
        "group-stir": 3 * 3,
    }
    assert {name for name, experiment in EXPERIMENTS.items() if experiment.distorted} == {"2", "longer"}
    assert [config.split for config in EXPERIMENTS["1"].runs] == sorted([*range(6)] * 10)


def test_chosen_settings_are_those_of_the_lowest_validation_error():
    data = cells.load()
    assert set(CHOSEN) == {(method, dataset) for method in METHODS for dataset in DATASETS}
    for (method, dataset), settings in CHOSEN.items():
        assert report.chosen_settings(data, method, dataset) == settings, (method, dataset)


@pytest.mark.parametrize("name", ["1", "3", "tuning", "longer", "sizes"])
def test_one_protocol_holds_for_all_methods(name):
    def without_freedom(config):
        return tuple(asdict(replace(config, model="plain-cnn", **FREE)).items())

    shared = Counter(without_freedom(row.config) for row in EXPERIMENTS[name].rows)
    lines = len({row.line for row in EXPERIMENTS[name].rows})
    per_line = {"tuning": 4, "sizes": 2}.get(name, 1)  # settings that are tried
    repeated = len(grids.SEARCH) if name == "tuning" else per_line
    assert set(shared.values()) == {lines * repeated}


def test_a_setting_is_changed_in_one_place(monkeypatch):
    monkeypatch.setitem(CHOSEN, ("SS-CNN", "mnist-scale"), grids.Settings(0.125, 0.25, 1))
    for dataset, expected in (("mnist-scale", 0.125), ("mnist-scale-local-2", 0.125), ("fmnist-scale", 0.005)):
        assert grids.configuration("SS-CNN", dataset).lr == expected
    assert grids.configuration("Plain CNN").lr == 0.005


def test_tuning_looks_at_split_0_and_at_no_test_set():
    assert all(config.tuning and config.split == 0 for config in EXPERIMENTS["tuning"].runs)
    for name in ("1", "2", "3", "sizes", "ablations", "longer"):
        assert not any(config.tuning for config in EXPERIMENTS[name].runs)


def test_combinations_do_without_the_test_set_unless_they_were_tested_before():
    tested = {config for name in ("2", "ablations") for config in EXPERIMENTS[name].runs}
    for config in EXPERIMENTS["choices"].runs:
        assert (config in tested) != config.tuning
        assert replace(config, tuning=False) not in tested or not config.tuning
    first, *_, last = EXPERIMENTS["choices"].rows
    assert first.config == grids.configuration("SS-CNN", split=0)
    assert (last.config.basis, last.config.m, last.config.support, len(last.config.scales)) == ("area", 0.5, "crop", 3)


def test_variants_differ_in_what_they_name_only():
    for row in EXPERIMENTS["ablations"].rows:
        own, usual = asdict(row.config), asdict(grids.configuration("SS-CNN", split=row.config.split))
        assert {key for key in own if own[key] != usual[key]} == set(grids.ABLATIONS[row.line])
    for row in EXPERIMENTS["longer"].rows:
        assert row.config.epochs == int(row.column.split()[0])
        assert row.config == replace(grids.configuration(row.line, split=row.config.split), epochs=row.config.epochs)


def test_few_images_have_enough_steps():
    for config in EXPERIMENTS["3"].runs:
        assert config.dataset == "mnist-scale-local-2"
        assert config.batch_size <= config.train_images // 2
        assert config.epochs * (config.train_images // config.batch_size) >= 1000


def test_the_papers_numbers_and_claims_are_about_cells_that_exist():
    cells = {(name, row.line, row.column) for name in EXPERIMENTS for row in EXPERIMENTS[name].rows}
    for name, lines in PAPER.items():
        for line, columns in lines.items():
            for column in columns:
                assert (name, line, "60 epochs" if name == "2" else column) in cells
    assert len(CLAIMS) == 7
    for claim in CLAIMS.values():
        for pair in claim.pairs:
            assert {tuple(cell[:3]) for cell in pair[:2]} < cells
        assert claim.paper or all(claims.papers(cell) for pair in claim.pairs for cell in pair[:2])


@pytest.mark.parametrize("name", LEADING)
def test_all_lines_are_trained_alike_but_for_what_they_are_about(name):
    free = {"model", "channels", *grids.WITH_CHANNELS, "resize", "test_channels", "join", "seed", "split"}
    longer = {"epochs"}  # so that it takes as long
    by_column = {}
    for row in EXPERIMENTS[name].rows:
        tuned = {"lr", "weight_decay", "upsample", "widths"} if row.config.model == "ss-cnn" else set()
        tuned = longer if row.line == grids.LONGER else tuned
        own = {key: value for key, value in asdict(row.config).items() if key not in free | tuned}
        by_column.setdefault(row.column, []).append(own)
    for found in by_column.values():
        usual = found[0]
        assert all(own.items() <= usual.items() for own in found)
        assert not usual["tuning"]


def test_random_resizing_that_takes_as_long_differs_in_its_epochs_only():
    for name in ("stir", "large-scale", "rescaled-cifar10"):
        rows = EXPERIMENTS[name].rows
        usual = {(row.column, row.config.seed): row.config for row in rows if row.line == grids.RESIZED}
        longer = [row for row in rows if row.line == grids.LONGER]
        assert longer
        for row in longer:
            short = usual.get((row.column, row.config.seed)) or replace(usual[row.column, 0], seed=row.config.seed)
            assert row.config == replace(short, epochs=grids.LONGER_EPOCHS[row.config.dataset])
            assert row.config.epochs > 2 * short.epochs


def test_lines_are_what_their_names_say():
    for row in itertools.chain(*(EXPERIMENTS[name].rows for name in LEADING)):
        config, ours = row.config, row.line.startswith(grids.OURS)
        assert bool(config.channels) == (config.drop > 0) == ours
        assert bool(config.resize) == ("random resizing" in row.line)
        assert bool(config.test_channels) == (config.join == "mean") == (row.line == grids.SEVERAL)
        assert config.model.startswith("steered") == row.line.startswith(grids.STEERED)
        assert (config.model == "ss-cnn") == (row.line == grids.PAPERS)


def test_stir_has_its_protocols_and_tests_at_every_size():
    sizes = {row.column: row.config.train_sizes for row in EXPERIMENTS["stir"].rows}
    assert {column.split()[1]: own for column, own in sizes.items()} == PROTOCOLS
    assert len(sizes) == 8
    seeds = {row.line: row.config.seed + 1 for row in EXPERIMENTS["stir"].rows if row.column.endswith("Mid2Rest")}
    assert all(seeds[line] == (10 if line == LEADING["stir"] else 3) for line in seeds)
    for name in ("stir", "large-scale", "rescaled-cifar10"):
        tested = grids.LARGE_SIZES if name == "large-scale" else None
        assert all(row.config.test_sizes == tested and row.config.split == 0 for row in EXPERIMENTS[name].rows)
    steps = {
        row.config.dataset: row.config.epochs
        * (len(row.config.run.data.sizes_of("train")) * row.config.run.data.sizes[0] // 100)
        for row in EXPERIMENTS["stir"].rows
        if row.column.endswith("Mid2Rest") and row.line != grids.LONGER
    }
    assert steps == {"stir-mnist": 1200, "stir-emoji": 500}


def test_help_names_every_experiment():
    assert tuple(EXPERIMENTS) == commands.EXPERIMENTS


def test_a_trial_is_a_few_rows_and_has_a_table(load, monkeypatch):
    rows = grids._grid(grids._variants({"m = 0.25": {"m": 0.25}}), {"MNIST-Scale": {}}, (0, 1))
    monkeypatch.setitem(EXPERIMENTS, "trial", grids.Experiment("SS-CNN with a slower decay", rows))
    assert [config.m for config in EXPERIMENTS["trial"].runs] == [0.25, 0.25]
    shown = report.table(load([result(row.config, 0.02) for row in rows]), "trial")
    assert shown.startswith("**Trial. SS-CNN with a slower decay**")
    assert shown.endswith("| m = 0.25 | 2.00 ± 0.00 |")


def test_group_networks_are_beside_the_runs_of_ss_cnn_and_of_one_protocol():
    rows = EXPERIMENTS["group"].rows
    for column, upsample in (("28 px", 1), ("56 px", 2)):
        ours = {row.config for row in rows if (row.line, row.column) == ("SS-CNN", column)}
        known = {row.config for row in EXPERIMENTS["sizes"].rows}
        assert ours <= known  # they are made already
        assert {config.upsample for config in ours} == {upsample}
        free = {"model": "plain-cnn", "upsample": 1, "channels": None, "readout": None}
        chosen = [row.config for row in rows if row.column == column]
        assert {str(replace(config, **free)) for config in chosen} == {str(replace(config, **free)) for config in ours}
    stir = EXPERIMENTS["group-stir"].rows
    assert {row.config for row in stir if row.line == PLAIN} <= {row.config for row in EXPERIMENTS["stir"].rows}
    for row in rows + stir:
        make_model(row.config.run.network, models.DATASETS[row.config.dataset])
