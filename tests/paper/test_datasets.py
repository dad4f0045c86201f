"""The numbers and tables of the page on data, against ways of their own to get them."""

import json
from types import SimpleNamespace

import numpy as np

from paper import ROOT, datasets, recorded
from scalesteer.datasets import DATASETS, SIZED_DATASETS


def test_the_digests_of_what_was_measured_are_the_pinned_ones():
    pinned = json.loads((ROOT / "tests" / "datasets" / "digests.json").read_text())
    measured = recorded("data/measured.json")["digests"]
    assert measured == {dataset: pinned[dataset] for dataset in DATASETS}


def test_box_edges_are_those_of_bright_ink():
    images = np.zeros((2, 28, 28), np.uint8)
    images[0, 5:9, 10:20] = 200
    images[0, 2, 2] = 49  # below a quarter of the maximum
    images[1, 27, 0] = 8
    assert datasets.box_edges(images).tolist() == [[5, 9, 10, 20], [27, 28, 0, 1]]


def test_pairs_overlap_where_a_loop_over_them_says_so(cache, monkeypatch):
    """Both digits of a pair are drawn again one by one, in the place that the pair's own ink gives them."""
    from scalesteer.datasets import SplitSpec, fetch, load_part, scale

    spec = SplitSpec("mnist-scale-local-2", sizes=(60, 20, 80))
    monkeypatch.setattr(datasets.data, "SplitSpec", lambda dataset: spec)
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
    assert datasets.overlaps() == (boxes / 80, inks / 80)


def test_edges_are_compared_with_where_the_drawn_scale_puts_them(monkeypatch):
    """A square of 12 to 16 pixels about the centre: one image is shrunk by a half, one is not though it says so."""
    whole, half = np.zeros((2, 28, 28), np.uint8)
    whole[8:20, 6:22], half[11:17, 10:18] = 255, 255
    part = SimpleNamespace(images=np.stack([half, whole]), indices=[0, 1], scales=np.array([0.5, 0.5]))
    monkeypatch.setattr(datasets.data, "load_part", lambda spec, name: (part, None))
    monkeypatch.setattr(datasets.data, "fetch", lambda source: SimpleNamespace(images=np.stack([whole, whole])))
    assert datasets.edges_within_a_pixel("mnist-scale", "bilinear") == 0.5


def test_the_table_of_sized_datasets_has_a_line_for_each():
    lines = datasets.data_sized().splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == list(SIZED_DATASETS)
    assert "17 to 64 px, 48 steps | all" in lines[0]
    assert "64 x 64, colour | 10 | 40,000 / 10,000 / 10,000 | 0.5 to 2, 9 steps | 1 |" in lines[-1]
