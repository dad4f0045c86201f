"""The tests themselves: what they take for published images, and what they leave out."""

import subprocess
import sys

import numpy as np
import pytest

from scalesteer.datasets import sources
from tests import conftest, invented_images


@pytest.mark.parametrize("source", invented_images.PATTERNS)
def test_invented_images_are_distinct_and_fill_their_classes_evenly(source):
    images, labels = invented_images.draw(source)
    assert images.shape == (sources.POOL_SIZE, 28, 28)
    assert np.bincount(labels).tolist() == [7_000] * 10
    assert len({image.tobytes() for image in images}) == len(images)
    once = invented_images.drawings(source).mean(1).reshape(10, -1)
    apart = np.linalg.norm(once[:, None] - once, axis=2) + 99 * np.eye(10)
    assert apart.min() > 1  # mean drawings of different classes, in units of white pixels


RELEASES = (
    "from scalesteer.datasets.sources import SOURCES; print(*(name for s in SOURCES.values() for name in s.releases))"
)


def releases():
    return subprocess.run([sys.executable, "-c", RELEASES], capture_output=True, text=True, check=True).stdout.split()


def test_processes_that_tests_start_know_the_invented_images():
    assert releases() == ["invented", "invented"]
    assert [*sources.SOURCES["mnist"].releases] == ["invented"]


def test_marked_tests_and_their_processes_know_the_published_images(real_sources):
    assert releases() == ["original", "official", "first"]
    assert [*sources.SOURCES["fashion-mnist"].releases] == ["official", "first"]


class Item:
    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks, self.added = nodeid, marks, []

    def get_closest_marker(self, name):
        return name if name in self.marks else None

    def add_marker(self, mark):
        self.added.append(mark)


def test_a_parametrised_test_that_cannot_run_is_skipped_once(request, monkeypatch):
    monkeypatch.setattr(conftest, "UNAVAILABLE", {"gpu": "needs a CUDA device"})
    items = [Item("a[1]"), Item("a[2]", "gpu"), Item("b[1]", "gpu"), Item("a[3]", "gpu"), Item("c", "real_data")]
    conftest.pytest_collection_modifyitems(request.config, items)
    assert [item.nodeid for item in items] == ["a[1]", "a[2]", "b[1]", "c"]
    assert [[mark.kwargs["reason"] for mark in item.added] for item in items] == [
        [],
        ["needs a CUDA device"],
        ["needs a CUDA device"],
        [],
    ]
