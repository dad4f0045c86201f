"""Verdicts come from intervals, of the paper's claims and of our targets."""

import re

import pytest

from paper import claims, grids
from paper.__main__ import app
from paper.cells import ANY_SIZE, GAP
from paper.claims import TARGETS, Pair
from paper.grids import EXPERIMENTS, LEADING, Cell
from tests.paper.invented import longer, results_by_size, table_1


def test_a_claim_holds_if_all_pairs_do_and_fails_with_one(load):
    lower = {"SS-CNN": 0.02, "Spatial Transformer": 0.03, "LocScaleEq-CNN": 0.04, "LocScaleInv-CNN": 0.05}
    assert claims.verdict(load(table_1(lower)), "mnist") == "holds"
    assert claims.verdict(load(table_1(lower | {"LocScaleEq-CNN": 0.01})), "mnist") == "fails"
    assert claims.verdict(load(table_1(lower, wobble=0.02)), "mnist") == "undecided"
    assert claims.verdict(load(table_1(lower | {"LocScaleEq-CNN": 0.01}, wobble=0.02)), "mnist") == "fails"
    assert claims.verdict(load(list(table_1(lower))[:-1]), "mnist") == GAP


def test_the_pair_that_decides_is_shown(load):
    errors = {"SS-CNN": 0.02, "Spatial Transformer": 0.03, "LocScaleEq-CNN": 0.04, "LocScaleInv-CNN": 0.05}
    shown = claims.claims(load(table_1(errors)))
    assert (
        "| SS-CNN 1.91, Spatial Transformer 1.97 (MNIST-Scale) | SS-CNN 2.25, Spatial Transformer 3.25 (MNIST-Scale) |"
        " **-1.00 to -1.00** | [holds](evidence/input-size.md) | – | undecided |"
    ) in shown
    shown = claims.claims(load(table_1(errors | {"LocScaleEq-CNN": 0.01})))
    assert (
        "| SS-CNN 1.91, LocScaleEq-CNN 2.44 (MNIST-Scale) | SS-CNN 2.25, LocScaleEq-CNN 1.25 (MNIST-Scale) |" in shown
    )


def test_no_verdict_hangs_on_the_words_of_a_claim(load, monkeypatch):
    data = load(table_1({"SS-CNN": 0.02, **dict.fromkeys(grids.OTHERS, 0.03)}))
    for key, claim in claims.CLAIMS.items():
        before = claims.verdict(data, key)
        monkeypatch.setitem(claims.CLAIMS, key, claim._replace(text="on par, lower, not the others"))
        assert claims.verdict(data, key) == before


def test_par_allows_a_tenth_more(load):
    for factor, said in ((1.09, "holds"), (1.11, "fails")):
        tested = {"Spatial Transformer": (0.01,) * 3, "SS-CNN": (0.01, 0.01 * factor, 0.01)}
        data = load(*longer(tested))
        assert claims.verdict(data, "par", "120 epochs") == said
        assert claims.verdict(data, "par") == claims.verdict(data, "par", "300 epochs") == "holds"


def test_targets_are_about_cells_that_exist():
    known = {(name, row.line, row.column) for name in LEADING for row in EXPERIMENTS[name].rows}
    for claim in TARGETS.values():
        for cell in (cell for pair in claim.pairs for cell in pair[:2] if isinstance(cell, Cell)):
            assert cell[:3] in known
            assert cell.measure in ("test error", *ANY_SIZE)


@pytest.mark.parametrize(("ratio", "verdict"), [(0.7, "holds"), (0.8, "undecided"), (0.95, "fails")])
def test_a_target_follows_the_intervals(load, ratio, verdict):
    def error(line):
        return 0.2 * ratio if line == LEADING["rescaled-cifar10"] else 0.2 if line == grids.RESIZED else 0.4

    data = load(results_by_size("rescaled-cifar10", error))
    rows = [row for row in claims.targets(data).splitlines() if "at most 0.8 times" in row]
    assert len(rows) == 1
    assert rows[0].endswith(f"| {verdict} |")
    assert "Plain network, random resizing 20.05" in rows[0]  # the rival that decides
    assert "(first minus 0.8 times second)" in rows[0]


def test_targets_speak_of_accuracies_and_correlations_where_their_tables_do(load):
    data = load(results_by_size("stir", lambda line: 0.02, correlation=0.85))
    text = claims.targets(data)
    assert re.search(
        r"STIR MNIST: accuracy .* \| Scale channels, plain filters 97.55, at least 94.00 \(accuracy, MNIST ", text
    )
    assert "0.85, at least 0.90 (rank correlation, MNIST Small2Large)" in text
    assert next(row for row in text.splitlines() if "STIR MNIST: accuracy" in row).endswith("| holds |")
    assert next(row for row in text.splitlines() if "rank correlation of" in row).endswith("| fails |")
    assert next(row for row in text.splitlines() if "FMNIST-Scale" in row).endswith(f"| {GAP} |")


def test_the_command_prints_every_target(capsys):
    app.main(["targets"], prog="paper")
    printed = capsys.readouterr().out
    assert [claim.text for claim in TARGETS.values() if claim.text not in printed] == []


def test_the_pair_that_decides_weighs_shares_also_against_numbers(load):
    data = load(results_by_size("stir", lambda line: 0.05))
    cell = claims.ours("stir", "MNIST Mid2Rest")
    _, pair, _ = claims.decide(data, [Pair(cell, 10.0), Pair(cell, 6.0)])
    assert pair.second == 6.0
