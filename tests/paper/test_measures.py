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
    assert again["rank"] == kept["rank"]
    assert again["theorem"]["largest"] < 1e-12
    assert kept["theorem"]["largest"] < 1e-12


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
