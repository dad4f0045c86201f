"""The numbers of the guide: measured again, and against ways of their own to get them."""

import json

import numpy as np
import pytest
import torch

from paper import RESULTS, measures


@pytest.fixture(scope="module")
def again():
    return json.loads(json.dumps(measures.measure_guide()))


def cells(text):
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return head, {row[0]: row[1:] for row in rows}


def test_the_guides_numbers_can_be_measured_again(again):
    kept = json.loads((RESULTS / "guide" / "maths.json").read_text())
    assert kept.keys() == again.keys()
    for preset, errors in again["steering"].items():
        assert errors == pytest.approx(kept["steering"][preset], rel=0.02)
    for order, errors in again["footnote"].items():
        assert errors == pytest.approx(kept["footnote"][order], rel=1e-3)
    for order, numbers in again["sensitivity"].items():
        assert numbers == pytest.approx(kept["sensitivity"][order], rel=1e-3)
    for name, errors in again["grid"].items():
        assert errors == pytest.approx(kept["grid"][name], rel=0.02)
    for preset, errors in again["blobs"].items():
        for widths, ends in errors.items():
            assert ends == pytest.approx(kept["blobs"][preset][widths], rel=0.02)
    for name, found in again["neighbours"].items():
        assert found["rank"] == kept["neighbours"][name]["rank"]
        assert found["grid"] == pytest.approx(kept["neighbours"][name]["grid"], rel=0.02)
    for name, found in again["equivariance"].items():
        assert found == {**kept["equivariance"][name], "errors": found["errors"]}
        assert found["errors"] == pytest.approx(kept["equivariance"][name]["errors"], rel=0.05)
    assert again["rank"] == kept["rank"]
    assert again["core"] == kept["core"]
    assert again["theorem"]["largest"] < 1e-12
    assert kept["theorem"]["largest"] < 1e-12
    assert max(again["eq3"]["largest"], kept["eq3"]["largest"]) < 1e-14


def test_steering_on_the_grid_misses_by_two_percent_at_most(again):
    assert max(again["grid"]["`smooth`"].values()) <= 0.02
    assert min(again["grid"]["`area`"].values()) > 0.04
    assert min(again["grid"]["`paper`"].values()) > 0.15


def test_the_widest_set_up_has_half_the_error_of_a_plain_convolution(again):
    plain, *_, wide = (np.array(row["errors"]) for row in again["equivariance"].values())
    assert (wide <= 0.5 * plain).all()


def test_filters_kept_at_a_sum_of_zero_stay_there_and_are_otherwise_free():
    for make in (measures.sum_zero_conv, measures.sum_zero_steered):
        layer = make()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_()
            windows = layer.filters() if hasattr(layer, "filters") else (layer.weight,)
            for weight in windows:
                assert (weight.sum((2, 3)).abs() / weight.abs().sum((2, 3))).max() < 1e-5
            ((name, (project,)),) = layer.parametrizations.items()
            torch.testing.assert_close(project(getattr(layer, name)), getattr(layer, name))  # nothing else is taken


@pytest.mark.slow
def test_a_short_training_changes_the_first_layer_and_is_the_same_twice(cache, monkeypatch):
    monkeypatch.setattr(measures, "FIRST_LAYERS", {"plain": measures.sum_zero_conv})
    found, again = (measures.measure_trained(images=1000, epochs=3) for _ in range(2))
    assert found == again
    row = found["layers"]["plain"]
    assert row["fresh"] != row["trained"]
    assert row["digits"] < 0.8  # a guess errs on 0.9


@pytest.mark.slow
@pytest.mark.real_data
def test_trained_layers_can_be_measured_again(real_cache):
    kept = json.loads((RESULTS / "guide" / "trained.json").read_text())
    again = measures.measure_trained()
    for name, row in again["layers"].items():
        assert row["fresh"] == pytest.approx(kept["layers"][name]["fresh"], rel=0.02)
        assert row["trained"] == pytest.approx(kept["layers"][name]["trained"], rel=0.15)


def test_the_share_of_trained_layers_is_that_recorded():
    layers = json.loads((RESULTS / "guide" / "trained.json").read_text())["layers"]
    shares = np.divide(layers[measures.STEERED]["trained"], layers[measures.PLAIN]["trained"])
    assert measures.equivariance_share("trained") == f"{shares.min():.2f} to {shares.max():.2f}"
    assert max(map(float, measures.equivariance_share("fresh").split(" to "))) <= 0.5


def test_small_blobs_are_enlarged_with_the_window():
    image = measures.small_blobs(2)
    x, y = torch.tensor([[0.5]], dtype=torch.float64), torch.tensor([[-1.0]], dtype=torch.float64)
    draw = torch.rand((4, 2, 3, 1, 1), generator=torch.Generator().manual_seed(0), dtype=torch.float64)[..., 0, 0]
    for i in range(2):
        expected = 0.0
        for j in range(3):
            right, up, width, height = (draw[k, i, j].item() for k in range(4))
            square = (0.5 - 7 * (right - 0.5)) ** 2 + (-1 - 7 * (up - 0.5)) ** 2
            expected += (2 * height - 1) * np.exp(-square / (2 * (1 + width) ** 2))
        assert image(x, y)[i].item() == pytest.approx(expected)


def test_the_phase_of_an_order_turns_by_the_order_times_the_logarithm_of_the_scale(again):
    for order, numbers in again["sensitivity"].items():
        assert numbers["turn_degrees"] == pytest.approx(np.degrees(float(order) * np.log(17 / 7)), rel=1e-2)


def test_the_span_is_that_of_all_blobs(monkeypatch):
    errors = {"0.7 to 1": [0.067, 0.104], "1 to 2": [0.004, 0.08], "2 to 4": [0.099, 0.206]}
    monkeypatch.setattr(measures, "guide_numbers", lambda: {"blobs": {"area": errors}})
    assert measures.steering_span("area") == "0.4 to 21 %"


@pytest.mark.parametrize("widths", measures.BLOBS)
def test_blobs_are_as_wide_as_asked(widths):
    image = measures.small_blobs(200, widths, seed=3)
    draw = torch.rand((4, 200, 3, 1, 1), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    used = widths[0] + (widths[1] - widths[0]) * draw[2, :, :, 0, 0]
    assert widths[0] <= used.min() < used.max() <= widths[1]
    x, y = (torch.full((1, 1), v, dtype=torch.float64) for v in (0.3, -0.2))
    away = (0.3 - 7 * (draw[0] - 0.5)) ** 2 + (-0.2 - 7 * (draw[1] - 0.5)) ** 2
    heights = 2 * draw[3] - 1
    expected = (heights * torch.exp(-away / (2 * used[..., None, None] ** 2))).sum(1)
    torch.testing.assert_close(image(x, y), expected)


def test_wider_blobs_are_steered_more_exactly_by_the_preset_smooth(again):
    ends = list(again["blobs"]["smooth"].values())
    assert [low for low, _ in ends] == sorted((low for low, _ in ends), reverse=True)
    for preset, limit in (("paper", 0.6), ("area", 0.11), ("smooth", 0.045)):
        assert (
            0 < min(map(min, again["blobs"][preset].values())) < max(map(max, again["blobs"][preset].values())) < limit
        )


def test_the_guides_tables_hold_the_recorded_numbers():
    numbers = json.loads((RESULTS / "guide" / "maths.json").read_text())
    for column, upsampling in enumerate(measures.UPSAMPLING):
        errors = [100 * row[column] for row in numbers["footnote"].values()]
        low, high = map(float, measures.footnote_span(upsampling).removesuffix(" %").split(" to "))
        assert (low, high) == (pytest.approx(min(errors), abs=0.5), pytest.approx(max(errors), abs=0.5))
    head, rows = cells(measures.guide_steering())
    assert head[1:] == [window.replace("->", "→") for window in numbers["steering"]["area"]]
    assert rows["area (`area`)"] == [f"{100 * error:.1f} %" for error in numbers["steering"]["area"].values()]
    errors = [100 * error for error in numbers["grid"]["`area`"].values()]
    assert measures.steering_of_blobs("`area`") == f"{min(errors):.1f} to {max(errors):.1f}"
