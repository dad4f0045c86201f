"""The numbers of the guide and the page on data: measured again, and against ways of their own to get them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paper import RESULTS, ROOT, measures
from scalesteer.data import DATASETS, SIZED_DATASETS, SOURCES
from scalesteer.data.packages import PACKAGES
from tests import test_theorem as theorem


@pytest.fixture(scope="module")
def again():
    return json.loads(json.dumps(measures.measure_guide()))


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
def test_trained_layers_can_be_measured_again(cache):
    kept = json.loads((RESULTS / "guide" / "trained.json").read_text())
    again = measures.measure_trained()
    for name, row in again["layers"].items():
        assert row["fresh"] == pytest.approx(kept["layers"][name]["fresh"], rel=0.02)
        assert row["trained"] == pytest.approx(kept["layers"][name]["trained"], rel=0.15)


def test_the_table_of_trained_layers_and_the_share_are_those_recorded():
    layers = json.loads((RESULTS / "guide" / "trained.json").read_text())["layers"]
    _, rows = cells(measures.guide_trained())
    for name, row in layers.items():
        shown = [f"{100 * row['digits']:.1f} %", *(f"{error:.2f}" for error in (*row["fresh"], *row["trained"]))]
        assert rows[name] == shown
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


def test_the_digests_that_the_page_shows_are_the_pinned_ones():
    pinned = json.loads((ROOT / "tests" / "data" / "digests.json").read_text())
    shown = measures.data_digests()
    for dataset in DATASETS:
        assert f"| {dataset} | " + " ".join(f"`{digest[:12]}`" for digest in pinned[dataset]) in shown


@pytest.mark.parametrize("broken", [{}, {"sign": 1}, {"power": 0.0}])
def test_deviations_on_grids_are_those_of_the_reference_functions(broken):
    ours = measures.grid_deviations(2.0, 1.5, [1 / 2, 1 / 8], **broken)
    assert ours == pytest.approx(theorem.grid_deviations(2.0, 1.5, [1 / 2, 1 / 8], **broken), rel=1e-9)


def test_integrals_of_the_theorem_are_those_of_the_reference_functions():
    ours = measures.polar_integral(1.0, 3.5, 1.5, nodes=60, turns=120)
    theirs = theorem.integral(lambda x, y: theorem.image(1.5 * x, 1.5 * y), 1.0, 3.5, nodes=60, turns=120)
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_the_phase_of_an_order_turns_by_the_order_times_the_logarithm_of_the_scale(again):
    for order, numbers in again["sensitivity"].items():
        assert numbers["turn_degrees"] == pytest.approx(np.degrees(float(order) * np.log(17 / 7)), rel=1e-2)


def test_the_span_is_that_of_windows_of_seven_pixels(monkeypatch):
    errors = {"7 -> 9": 0.104, "7 -> 11": 0.206, "17 -> 33": 0.9}
    monkeypatch.setattr(measures, "guide_numbers", lambda: {"steering": {"area": errors}})
    assert measures.steering_span("area") == "10 to 21 %"


def test_box_edges_are_those_of_bright_ink():
    images = np.zeros((2, 28, 28), np.uint8)
    images[0, 5:9, 10:20] = 200
    images[0, 2, 2] = 49  # below a quarter of the maximum
    images[1, 27, 0] = 8
    assert measures.box_edges(images).tolist() == [[5, 9, 10, 20], [27, 28, 0, 1]]


def test_pairs_overlap_where_a_loop_over_them_says_so(cache, monkeypatch):
    """Both digits of a pair are drawn again one by one, in the place that the pair's own ink gives them."""
    from scalesteer.data import SplitSpec, fetch, load_part, scale

    spec = SplitSpec("mnist-scale-local-2", sizes=(60, 20, 80))
    monkeypatch.setattr(measures, "SplitSpec", lambda dataset: spec)
    part, _ = load_part(spec, "test")
    pool, boxes, inks = fetch("mnist").images, 0, 0
    for image, indices, scales in zip(part.images, part.indices, part.scales, strict=True):
        columns = np.flatnonzero(image.any(0))
        left, right = (
            scale.shrink(pool[[i]], np.array([s], np.float32))[0] for i, s in zip(indices, scales, strict=True)
        )
        left, right = (
            digit[:, np.flatnonzero(digit.any(0))[0] : np.flatnonzero(digit.any(0))[-1] + 1] for digit in (left, right)
        )
        start = columns[-1] + 1 - right.shape[1]
        shared = columns[0] + left.shape[1] - start
        boxes += shared > 0
        if shared > 0:
            inks += bool(((left[:, -shared:] > 0) & (right[:, :shared] > 0)).any())
    assert boxes > inks > 0
    assert measures.overlaps() == (boxes / 80, inks / 80)


def test_filters_of_a_layer_are_those_of_its_first_input_channel():
    layer = torch.nn.Conv2d(2, 3, 7)
    assert measures.unit_filters(layer) == pytest.approx(layer.weight[:, 0].detach().numpy())


def cells(text):
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return head, {row[0]: row[1:] for row in rows}


def test_the_guides_tables_hold_the_recorded_numbers():
    numbers = json.loads((RESULTS / "guide" / "maths.json").read_text())
    head, rows = cells(measures.guide_footnote())
    assert head == ["order", "1 x", "2 x", "4 x", "8 x"]
    assert rows == {order: [f"{100 * error:.1f} %" for error in row] for order, row in numbers["footnote"].items()}
    head, rows = cells(measures.guide_steering())
    assert head[1:] == [window.replace("->", "→") for window in numbers["steering"]["area"]]
    assert rows["area (`area`)"] == [f"{100 * error:.1f} %" for error in numbers["steering"]["area"].values()]
    head, rows = cells(measures.guide_ranks())
    assert (head[1:], rows["`paper`"]) == (["0.1", "0.01", "0.001", "1e-06"], ["12", "19", "19", "19"])


def test_the_table_of_sources_names_every_release_and_which_one_is_used():
    lines = measures.data_sources().splitlines()[2:]
    for name, source in SOURCES.items():
        for release, known in source.releases.items():
            (line,) = [line for line in lines if known.pool in line]
            assert line.startswith(f"| {name} | {release} |")
            assert line.endswith("| used |") == (release == next(iter(source.releases)))
    assert len(lines) == sum(len(source.releases) for source in SOURCES.values())


def test_edges_are_compared_with_where_the_drawn_scale_puts_them(monkeypatch):
    """A square of 12 to 16 pixels about the centre: one image is shrunk by a half, one is not though it says so."""
    whole, half = np.zeros((2, 28, 28), np.uint8)
    whole[8:20, 6:22], half[11:17, 10:18] = 255, 255
    part = SimpleNamespace(images=np.stack([half, whole]), indices=[0, 1], scales=np.array([0.5, 0.5]))
    monkeypatch.setattr(measures, "load_part", lambda spec, name: (part, None))
    monkeypatch.setattr(measures, "fetch", lambda source: SimpleNamespace(images=np.stack([whole, whole])))
    assert measures.edges_within_a_pixel("mnist-scale", "bilinear") == 0.5


def test_the_tables_of_sized_datasets_and_packages_have_a_line_for_each():
    lines = measures.data_sized().splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == list(SIZED_DATASETS)
    assert "17 to 64 px, 48 steps | all" in lines[0]
    assert "64 x 64, colour | 10 | 40,000 / 10,000 / 10,000 | 0.5 to 2, 9 steps | 1 |" in lines[-1]
    for line, package in zip(measures.data_packages().splitlines()[2:], PACKAGES.values(), strict=True):
        assert line.endswith(f"| {package.identity.release} | `{package.identity.digest}` |")
