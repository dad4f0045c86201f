"""The numbers of networks that keep the axis of scales: measured again, and what the page promises of them."""

import doctest
import json

import numpy as np
import pytest
import torch

from paper import RESULTS, ROOT, group
from paper.grids import EXPERIMENTS, GROUP
from scalesteer import create_model
from tests.paper.invented import result


@pytest.fixture(scope="module")
def kept():
    return json.loads((RESULTS / "guide" / "group.json").read_text())


def test_the_errors_can_be_measured_again(kept):
    assert kept["errors"].keys() == kept["functions"].keys() == group.BASES.keys()
    assert kept["functions"] == {name: group.functions(basis) for name, basis in group.BASES.items()}
    for name in ("`smooth`", "Hermite, 16"):
        for label, step in group.STEPS.items():
            assert group.error(group.BASES[name], step, 1) == pytest.approx(kept["errors"][name][label][0], rel=0.02)


def test_smooth_is_within_its_targets_and_below_the_others_of_as_many_functions(kept):
    for label in group.STEPS:
        errors = {name: np.array(row[label]) for name, row in kept["errors"].items()}
        one, two, _ = ours = errors["`smooth`"]
        assert one <= 0.02
        assert two <= 0.04
        for name in ("`paper`", "`area`", "Hermite, 36", "Hermite, 49"):
            assert (ours < errors[name]).all(), name
        for name in errors.keys() - {"`smooth`"}:
            assert (ours[1:] < errors[name][1:]).all(), name  # behind a ReLU


def test_one_layer_is_a_stack_of_depth_one_and_pooling_comes_behind_the_first():
    kinds = [type(layer).__name__ for layer in group.stack("smooth", 2**0.5, 3, pool=True)]
    conv, relu = "ScaleGroupConv2d", "ReLU"
    assert kinds == [conv, relu, "ScaleBlurPool2d", conv, relu, conv]
    assert [type(layer).__name__ for layer in group.stack("smooth", 2**0.5, 1)] == [conv]


def test_the_scale_that_responds_follows_the_object(kept, monkeypatch):
    monkeypatch.setattr(group, "SIZES", (2.0, 4.0))
    again = group.responding_scale("smooth")
    places = [round(6 * np.log2(size)) + 4 for size in (2.0, 4.0)]
    assert again == pytest.approx([kept["responding"]["`smooth`"][place] for place in places], abs=0.1)
    assert 2.5 < again[1] - again[0] < 3.5  # three steps


def test_the_table_and_numbers_of_the_page_are_those_recorded(kept):
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in group.group_errors().splitlines()
    )
    assert head[:3] == ["error in %", "functions", "1 layer, step √2"]
    errors = kept["errors"]["`smooth`"]
    shown = next(row for row in rows if row[0] == "`smooth`")
    assert shown[1:] == ["32", *(f"{100 * error:.1f}" for label in group.STEPS for error in errors[label])]
    low, high = sorted(100 * row[1] for row in errors.values())
    assert group.group_error("`smooth`", 2) == f"{low:.1f} to {high:.1f}"
    rates = json.loads((RESULTS / "bench" / "group.json").read_text())["images_per_second"]
    ratios = [rate["group-cnn"] / rate[group.PADDED] for rate in rates.values()]
    assert min(ratios) >= 3
    assert group.group_ratio() == f"{min(ratios):.1f} to {max(ratios):.1f}"
    assert group.group_rates().count("\n") == len(rates) + 1


def test_the_figure_is_of_recorded_numbers(kept):
    (axis,) = group.plot_responding().axes
    lines = {line.get_label(): line.get_ydata() for line in axis.get_lines()}
    assert list(lines["smooth"]) == kept["responding"]["`smooth`"]
    assert 0.8 < float(group.group_slope("`smooth`")) < 1.1


def test_trainings_are_shown_beside_ss_cnn_where_there_are_any(load):
    rows = [row for row in EXPERIMENTS["group"].rows if row.column == "28 px"]
    errors = {GROUP: 0.03, group.PAPERS: 0.035}
    data = load(
        [result(row.config, errors[row.line] + row.config.split**2 / 1000) for row in rows if row.line in errors]
    )
    lines = group.group_trained(data, "28 px").splitlines()
    head, _, ours, hermite, _, papers = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert head == ["error in %", "28 px", "minus SS-CNN"]
    assert ours == [GROUP, "3.17 ± 0.21", "**-0.50 to -0.50**"]
    assert hermite == [f"{GROUP}, Hermite basis", "–", ""]
    assert papers == ["SS-CNN", "3.67 ± 0.21", ""]
    assert group.group_interval(data, GROUP, "28 px") == "-0.50 to -0.50"


def test_trainings_on_stir_are_shown_inside_and_outside_the_sizes_of_training(load):
    rows = EXPERIMENTS["group-stir"].rows
    data = load([result(row.config, 0.02) for row in rows])
    assert group.group_stir(data).count("\n") == len({row.line for row in rows}) + 1


def test_a_network_is_measured_where_no_layer_misses_a_neighbour_with_new_weights_and_trained_ones():
    torch.manual_seed(1)
    small = {"widths": (3, 4), "subsample": (1,), "kernel_size": 5}
    found = group.errors_before_and_after(create_model("group-cnn", **small).eval())
    assert found["new"] != found["trained"]
    first, second = found["new"]
    assert 0 < first < second < 0.3
    alone = create_model("group-cnn", **small, reach=1).eval()  # which has no neighbours to miss
    assert group.network_errors(alone)[0] < 0.1


def test_the_guides_examples_run():
    failed, tried = doctest.testfile(str(ROOT / "docs" / "guide" / "group.md"), module_relative=False)
    assert tried > 5
    assert failed == 0
