"""Networks under distortion: the epochs that validation chose, ratios of errors, other runs."""

import math

import pytest

from paper import cells, claims, distortion
from paper.distortion import VALIDATION_CHOSE as CHOSE
from tests.paper.invented import LONGER, longer, of_cell, result

SEEN = {
    "SS-CNN": (0.03, 0.02, 0.03),
    "Spatial Transformer": (0.01, 0.02, 0.02),
    "LocScaleInv-CNN": (0.03, 0.02, 0.01),
    "Plain CNN": (0.02, 0.01, 0.02),
}
VALIDATION = {"SS-CNN": 120, "Spatial Transformer": 60, "LocScaleInv-CNN": 300, "Plain CNN": 120}


def test_epochs_are_those_of_the_lowest_mean_validation_error(load):
    runs, networks = longer(LONGER, SEEN)
    data = load(runs, networks)
    assert distortion.epochs_of(data, CHOSE) == {method: f"{epochs} epochs" for method, epochs in VALIDATION.items()}
    assert {method: int(distortion.epochs_chosen(data, method)) for method in VALIDATION} == VALIDATION
    for factor, best in (("60 epochs", 2 / 4), (CHOSE, 3 / 4)):
        assert distortion.ratios(data, "SS-CNN", "LocScaleInv-CNN", factor) == pytest.approx([best] * 5)
        assert distortion.ratios(data, "SS-CNN", "LocScaleInv-CNN", factor, best=True) == pytest.approx([best] * 5)
    assert claims.verdict(data, "distortion", CHOSE) == "holds"
    rows = {line.split(" | ")[0]: line for line in distortion.longer_pairs(data).splitlines()}
    errors = [(0.03 - 0.04) * (1 + 0.1 * split) * 100 for split in range(6)]
    assert str(cells.interval(errors)) in rows["| LocScaleInv-CNN, number chosen by validation"]


def test_epochs_are_chosen_among_complete_numbers_and_by_the_mean_of_all_runs(load):
    runs, networks = longer(LONGER, SEEN)
    lost = of_cell("longer", "LocScaleInv-CNN", "300 epochs")[4].to_dict()
    data = load([line for line in runs if line["config"] != lost], networks)
    assert distortion.epochs_of(data, CHOSE)["LocScaleInv-CNN"] == "120 epochs"
    assert distortion.ratios(data, "SS-CNN", "LocScaleInv-CNN", "300 epochs") == pytest.approx(
        [5 / 4] * 5
    )  # of five splits
    assert math.isnan(distortion.ratios(data, "SS-CNN", "LocScaleInv-CNN", "300 epochs", best=True)[0])
    configs = of_cell("longer", "SS-CNN", "300 epochs")
    one = [result(configs[0], val_error=0.0)] * 9  # one split of six, however often it was run
    assert distortion.epochs_of(load(runs, networks, one), CHOSE)["SS-CNN"] == "120 epochs"
    every = [result(config, val_error=0.0) for config in configs for _ in range(9)]
    assert distortion.epochs_of(load(runs, networks, every), CHOSE)["SS-CNN"] == "300 epochs"
