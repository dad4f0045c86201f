"""What reproduces, and what the published forms of the rivals change."""

import json
import re

import pytest
from scipy import stats

from paper import RESULTS, cells, claims, grids, reproduced
from paper.cells import GAP, Summary, between, minus
from paper.claims import CLAIMS, FORMS, PUBLISHED, ROTATION, SIX_NUMBERS, Claim, Pair
from paper.grids import DATASETS, EXPERIMENTS, Cell, Experiment, Row
from scalesteer.datasets.scale import SPLITS
from tests.paper.invented import of_cell, replaced, result, table_1

LOWER = {"SS-CNN": 0.02, "Spatial Transformer": 0.03, "LocScaleEq-CNN": 0.04, "LocScaleInv-CNN": 0.05}


@pytest.fixture
def forms(monkeypatch):
    """An experiment with the published forms, told apart here by another setting."""
    rows = tuple(
        Row(line, title, grids.configuration(method, name, split=split, label_smoothing=0.2))
        for method, line in FORMS.items()
        for name, title in DATASETS.items()
        for split in SPLITS
    )
    monkeypatch.setitem(EXPERIMENTS, PUBLISHED, Experiment("Published forms", rows))

    def results(errors):
        return [result(row.config, errors[row.line] + 0.001 * row.config.split) for row in rows if row.line in errors]

    return results


def rows_of(text):
    return {line.strip("| ").split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in text.splitlines()}


def test_a_papers_mean_and_deviation_give_welchs_interval():
    first, second = Summary(1.91, 0.04, 6), Summary(1.97, 0.09, 6)
    found = stats.ttest_ind_from_stats(*first, *second, equal_var=False)
    low, high = between(first, second)
    assert (low + high) / 2 == pytest.approx(-0.06)
    reach = stats.t.ppf(0.975, (0.04**2 + 0.09**2) ** 2 / ((0.04**4 + 0.09**4) / 5)) * 0.06 / abs(found.statistic)
    assert (high - low) / 2 == pytest.approx(reach)


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ("mnist", "undecided"),
        ("fmnist", "holds"),
        ("fmnist transformer", "holds"),
        ("few images", "undecided"),
        ("input size", GAP),  # in the paper's text alone
        ("distortion", GAP),  # one network of each method
        ("par", GAP),
    ],
)
def test_the_papers_own_numbers_under_the_rule(claim, verdict):
    assert claims.papers_own(CLAIMS[claim]) == verdict


def test_a_claim_against_the_papers_numbers_fails():
    pair = Pair(Cell("1", "SS-CNN", "FMNIST-Scale"), Cell("1", "Spatial Transformer", "FMNIST-Scale"))
    assert claims.papers_own(Claim("", "", (pair,))) == "fails"


def test_verdicts_with_published_forms_take_their_runs(load, forms):
    ours = list(table_1(LOWER))
    for errors, said in (
        ({SIX_NUMBERS: 0.03, ROTATION: 0.04}, "holds"),
        ({SIX_NUMBERS: 0.01, ROTATION: 0.04}, "fails"),
        ({SIX_NUMBERS: 0.03, ROTATION: 0.01}, "fails"),
    ):
        data = load(ours + forms(errors))
        assert claims.verdict(data, "mnist") == "holds"
        assert claims.published_verdict(data, CLAIMS["mnist"]).startswith(f"{said}, **")
    data = load(ours + forms({SIX_NUMBERS: 0.03}))
    assert claims.published_verdict(data, CLAIMS["mnist"]) == GAP
    assert claims.published_verdict(load(ours + forms({SIX_NUMBERS: 0.03, ROTATION: 0.04})), CLAIMS["par"]) == GAP


def test_a_form_without_all_its_runs_is_left_out_and_named(load, forms):
    made = forms({SIX_NUMBERS: 0.03})
    data = load([*table_1(LOWER), *made])
    assert f"| {SIX_NUMBERS} |" in reproduced.forms(data)
    assert f"| {ROTATION} |" not in reproduced.forms(data)
    assert reproduced.forms(data).endswith(f"made: {ROTATION}.")
    assert reproduced.forms(load(made[:-1])).endswith(f"made: {SIX_NUMBERS}; {ROTATION}.")
    assert reproduced.forms(load(made + forms({ROTATION: 0.1}))).endswith("|")


def test_forms_are_compared_with_ss_cnn_on_the_same_images(load):
    old = [replaced(c, 0.01, "six entries") for c in of_cell("1", "Spatial Transformer", "MNIST-Scale")]
    again = [replaced(c, 0.15, "six entries") for c in of_cell("1", "Spatial Transformer", "FMNIST-Scale")[:5]]
    then = [replaced(c, 0.14 + 0.001 * c.split) for c in of_cell("1", "SS-CNN", "FMNIST-Scale")]
    fmnist = [result(c, 0.5) for c in of_cell("1", "SS-CNN", "FMNIST-Scale")]
    data = load([*table_1(LOWER), *fmnist], replaced=[*old, *again, *then])
    line = rows_of(reproduced.forms(data))[f"{SIX_NUMBERS}, first runs"]
    assert line[:3] == ["1.00 ± 0.00", "1.97 ± 0.09", "**+1.05 to +1.45**"]
    assert line[3:5] == ["15.00 ± 0.00 (5 splits)", "13.11 ± 0.25"]
    assert line[5] == str(
        minus(data, Cell("replaced", "SS-CNN", "FMNIST-Scale"), Cell("replaced", SIX_NUMBERS, "FMNIST-Scale"))
    )
    assert line[5] == "**-1.00 to -0.60**"  # of the SS-CNN that was replaced, not of the one in the tables


def test_replaced_runs_enter_no_table(load):
    gone = [replaced(config, 0.9) for config in of_cell("1", "SS-CNN", "MNIST-Scale")]
    data = load(table_1(LOWER), replaced=gone)
    assert cells.mean(cells.values(data, Cell("1", "SS-CNN", "MNIST-Scale"))) == "2.25"
    assert cells.values(data, Cell("replaced", "SS-CNN", "MNIST-Scale")).tolist() == [90.0] * 6
    with pytest.raises(ValueError, match="`line` must begin with one of Spatial Transformer, "):
        cells.values(data, Cell("replaced", "Other", "MNIST-Scale"))


def test_an_error_reproduces_unless_it_is_above_the_papers(load):
    for error, verdict in ((0.0170, "holds"), (0.0165, "holds"), (0.03, "fails")):
        found = rows_of(reproduced.reproduced(load(table_1({"SS-CNN": error}))))
        assert found["SS-CNN has 1.91 ± 0.04 % errors on MNIST-Scale"][1] == verdict
        assert found["SS-CNN has 14.24 ± 0.31 % errors on FMNIST-Scale"][1] == GAP


def test_what_reproduces_follows_the_recorded_numbers(tmp_path, monkeypatch):
    numbers = {
        place: json.loads((RESULTS / place).read_text()) for place in ("guide/maths.json", "figures/layers.json")
    }
    monkeypatch.setattr(reproduced, "recorded", numbers.__getitem__)
    data = cells.load(tmp_path)
    lines = [
        row
        for row in rows_of(reproduced.reproduced(data))
        if re.match("Theorem|Eq|A function|Filters are|Central", row)
    ]
    assert len(lines) == 5
    assert {rows_of(reproduced.reproduced(data))[line][1] for line in lines} == {"holds"}
    numbers["guide/maths.json"]["theorem"]["largest"] = numbers["guide/maths.json"]["eq3"]["largest"] = 1e-3
    numbers["guide/maths.json"]["sensitivity"]["2.0"]["period"] *= 1.1
    for kind in ("centrality", "entanglement"):
        found = numbers["figures/layers.json"][kind]
        found["SS-CNN"], found["LocScaleInv-CNN"] = found["LocScaleInv-CNN"], found["SS-CNN"]
    assert {rows_of(reproduced.reproduced(data))[line][1] for line in lines} == {"fails"}


def test_the_restored_runs_are_those_of_the_six_entry_transformer():
    found = cells.values(cells.published(), Cell("replaced", SIX_NUMBERS, "MNIST-Scale"))
    assert found.round(3).tolist() == [1.838, 1.972, 1.868, 1.766, 1.96, 1.852]
