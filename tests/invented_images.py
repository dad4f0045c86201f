"""Drawings in place of MNIST and Fashion-MNIST, so that tests need no files that others publish.

Each source has 70,000 pictures of 28 x 28 in ten classes, in four IDX files as published. They are a hundred drawings
of each class (a pattern, slanted, stretched and made thicker at random), each at 35 places and in two strengths.
Networks learn to tell the classes apart. The bytes are the same everywhere; their digests are pinned in `DIGESTS`.
"""

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

RELEASE = "invented"
PATTERNS = {
    "mnist": """
        .###. ..#.. .###. ####. ...#. ##### ..##. ##### .###. .###.
        #...# .##.. #...# ....# ..##. #.... .#... ....# #...# #...#
        #...# ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
        #...# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
        #...# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
        #...# ..#.. .#... ....# ...#. #...# #...# .#... #...# ...#.
        .###. .###. ##### ####. ...#. .###. .###. .#... .###. .##..
    """,
    "fashion-mnist": """
        .#.#. .###. ##.## .#.#. ##.## ..... ##.## ..... ..#.. .##..
        ##### .###. ##### .###. ##### ..... ##### ..... .#.#. .##..
        ##### .#.#. ##### .###. ##### ....# #.#.# ....# .#.#. .##..
        .###. .#.#. ##### ..#.. ##.## ...## #.#.# ...## ##### .###.
        .###. .#.#. #.#.# .###. ##.## ..##. #.#.# ##### ##### .####
        .###. .#.#. #.#.# .###. ##.## .##.# ..#.. ##### ##### #####
        .###. .#.#. #.#.# ##### ##.## ##..# ..#.. ..... ##### #####
    """,
}
DRAWINGS, COUNT = 100, 70_000  # of a class, and of pictures in all
DIGESTS = {  # SHA-256 of the four files and of the pool
    "mnist": (
        "706a596a7604052e982fd21ad483d8bdc9be7f5674796d61d4d0a0bd4bc6bbbe",
        "5da84ebb2a4a5ed92427969ec818c0149dd588f59b4fa7a93ea890b5fb707514",
        "11985ef1f0646314b9cfe0d73b0fac73f145a5dac1d430c4ebdf053152e6def2",
        "d8b270c8fb15eb8c16a5c0536ceaf62ae55ec34dff0e186731aac579cbe84d37",
        "ccfbc514f0bcc1716bed6f534132ab44e47c13bb051aa6ccd329e49b468aef78",
    ),
    "fashion-mnist": (
        "a6626413d77516cfe4003da03c9fcc8ac9dcd97014ae81b45553812effb62ec1",
        "96e73d737739fb8c397ddf59761decc640b53a861d95077bedbe1eb817c64a84",
        "7839612bb2832bd06f67e70bd3ed0dae305f0e433213f8f457f4e17299da87a7",
        "c6210d5b6fcaa184660f9232b41b02f137f72bca07992012136f9565f3dcee6b",
        "5f8c190c644e0f29a304a9aab4cedb3489a31f577c38a1c64179b2685f8624d1",
    ),
}


def patterns(source):
    """The ten patterns of a source, 7 rows of 5 numbers, 0 or 1: (10, 7, 5)."""
    rows = [line.split() for line in PATTERNS[source].split("\n") if line.strip()]
    return np.array([[[mark == "#" for mark in rows[y][label]] for y in range(7)] for label in range(10)], float)


def drawings(source):
    """A hundred variations of each pattern, in the middle of 28 x 28: (10, 100, 28, 28) from 0 to 1.

    Only operations that IEEE 754 rounds in one way, and numpy's old generator, which never changes.
    """
    chance = np.random.RandomState(list(PATTERNS).index(source)).random_sample((4, 10, DRAWINGS, 1, 1))
    slant, wide, high, thick = chance[0] - 0.5, 11 + 3 * chance[1], 16 + 3 * chance[2], 2 + 2 * chance[3]
    y, x = np.mgrid[:28, :28] - 13.5
    row = np.clip(7 * (y / high + 0.5) - 0.5, -1, 7)  # in cells of the pattern, whose centres have whole numbers
    column = np.clip(5 * ((x + slant * y / 2) / wide + 0.5) - 0.5, -1, 5)
    padded = np.pad(patterns(source), ((0, 0), (1, 2), (1, 2)))  # what is between two cells is their mixture
    top, left = np.floor(row).astype(int), np.floor(column).astype(int)
    label, between = np.arange(10)[:, None, None, None], 0.0
    for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
        share = (1 - np.abs(row - top - down)) * (1 - np.abs(column - left - right))
        between = between + share * padded[label, top + down + 1, left + right + 1]
    return np.clip(thick * between - 0.7, 0, 1)


def draw(source):
    """All pictures and labels of a source in the order of its files: (70000, 28, 28) and (70000,) uint8."""
    strengths = np.array([[[[255]]], [[[180]]]])
    once = np.rint(strengths * drawings(source).reshape(-1, 28, 28)).astype(np.uint8)  # (2, 10 * 100, 28, 28)
    places = [(down, right) for down in range(-3, 4) for right in range(-2, 3)]
    images = np.stack([np.roll(once, place, (2, 3)) for place in places], 1).reshape(COUNT, 28, 28)
    labels = np.tile(np.repeat(np.arange(10, dtype=np.uint8), DRAWINGS), 2 * len(places))
    order = np.random.RandomState(ord(source[0])).permutation(COUNT)
    return images[order], labels[order]


def payloads(source):
    """The content of the four files: 60,000 pictures for training and 10,000 for testing."""
    images, labels = draw(source)
    return [
        struct.pack(f">{1 + part.ndim}I", 0x800 + part.ndim, *part.shape) + part.tobytes()
        for first, last in ((0, 60_000), (60_000, COUNT))
        for part in (images[first:last], labels[first:last])
    ]


def write(folder):
    """Write the files of both sources, as :func:`scalesteer.datasets.fetch` reads them."""
    names = [
        f"{part}-ubyte.gz"
        for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    ]
    for source in PATTERNS:
        (Path(folder) / source).mkdir(parents=True)
        for name, payload in zip(names, payloads(source), strict=True):
            (Path(folder) / source / name).write_bytes(gzip.compress(payload, 1, mtime=0))
    return Path(folder)


published = {}  # what `sources.SOURCES` had before


def register(sources):
    """Let the module `scalesteer.datasets.sources` take these for the releases that are in use."""
    for source, (*files, pool) in DIGESTS.items():
        known = published.setdefault(source, sources.SOURCES[source])
        releases = {RELEASE: sources.Release(tuple(files), pool)}
        sources.SOURCES[source] = replace(known, releases=releases)
