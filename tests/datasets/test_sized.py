import gzip
import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import ndimage

from scalesteer.app import cli
from scalesteer.datasets import PARTS, SIZED_DATASETS, DataError, SizedSpec, load_split, packages, scale, sized, sources
from scalesteer.datasets.sized import draw_digits, draw_photos

DIGESTS = json.loads((Path(__file__).parent / "digests.json").read_text())["sized"]
SMALL = {"sizes": (30, 20, 20)}


@pytest.fixture(scope="module")
def digits(originals):
    return gzip.decompress((originals / "mnist" / "train-images-idx3-ubyte.gz").read_bytes())[16:]


@pytest.fixture
def photos(monkeypatch):
    """60,000 tiny photos in place of CIFAR-10, each of one grey value."""
    labels = np.arange(60_000) % 10
    images = np.broadcast_to((np.arange(60_000) % 251)[:, None, None, None], (60_000, 3, 32, 32)).astype(np.uint8)
    pool = sources.Pool(packages.PACKAGES["cifar10"].identity, images, labels.astype(np.uint8))
    monkeypatch.setattr(packages, "fetch_package", lambda source, data_dir: pool)
    return pool


# Which originals are shown


def test_stir_shows_the_first_digits_of_each_shuffled_class(filled_cache, originals):
    # As STIR's authors shuffle them: the images of a class themselves, by numpy's old generator seeded with 42.
    pool = sources.published("mnist", originals)
    for part, half, skip in (("train", "train", 0), ("val", "train", 50), ("test", "t10k", 0)):
        names = (f"{half}-images-idx3-ubyte.gz", f"{half}-labels-idx1-ubyte.gz")
        pixels, labels = (gzip.decompress((originals / "mnist" / name).read_bytes()) for name in names)
        images = np.frombuffer(pixels[16:], np.uint8).reshape(-1, 28, 28)
        chosen = sized.choose(SizedSpec("stir-mnist"), part, pool.labels)
        for digit in range(10):
            theirs = images[np.frombuffer(labels[8:], np.uint8) == digit]
            np.random.RandomState(42).shuffle(theirs)
            np.testing.assert_array_equal(pool.images[chosen[digit::10]], theirs[skip : skip + 50])
            assert (pool.labels[chosen[digit::10]] == digit).all()


def test_published_order_is_that_of_the_files(filled_cache, originals, digits):
    images = sources.published("mnist", originals).images
    assert images[:60_000].tobytes() == digits
    payloads = sources.from_directory("mnist", originals)
    assert images[60_000:].tobytes() == payloads["t10k-images-idx3-ubyte"][16:]


def test_pool_of_an_older_cache_gets_its_order(filled_cache, originals, digits):
    (filled_cache / "pools" / "mnist-invented-order.safetensors").unlink()
    assert sources.published("mnist", originals).images[:60_000].tobytes() == digits


@pytest.mark.parametrize("dataset", ["mnist-large-scale", "rescaled-cifar10"])
@pytest.mark.parametrize("split", [0, 1])
def test_parts_share_no_original_and_testing_has_all_test_images(dataset, split):
    total = 60_000 if "cifar" in dataset else 70_000
    labels = np.zeros(total, np.uint8)
    train, val, test = (sized.choose(SizedSpec(dataset, split), part, labels) for part in PARTS)
    assert (len(train), len(val), len(test)) == SIZED_DATASETS[dataset].counts
    assert len(np.unique(np.concatenate([train, val, test]))) == total
    np.testing.assert_array_equal(test, np.arange(total - 10_000, total))
    assert (split == 0) == (train == np.arange(len(train))).all()


# How images are made, against slower ways in floating point


def cubic(x):
    x = abs(x)
    return 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def stretched(image):
    image = 2 / np.pi * np.arctan(0.02 * (image - 128))
    return 255 * (image - image.min()) / (image.max() - image.min())


@pytest.mark.parametrize("size", [17, 23, 28, 40, 55])
def test_stir_digits_are_made_by_the_authors_steps(digits, size):
    rng = np.random.default_rng(size)
    corners = rng.integers(0, 65 - size, (8, 2))
    originals = np.frombuffer(digits, np.uint8).reshape(-1, 28, 28)[size * 100 :][:8]
    drawn = draw_digits(originals, size, size / 28, 64, corners)
    at = (np.arange(size) + 0.5) * 28 / size - 0.5
    weights = np.array([[cubic(p - j) for j in range(28)] for p in at])
    for image, digit, (top, left) in zip(drawn, originals.astype(float), corners, strict=True):
        smooth = ndimage.gaussian_filter(digit, max(0, (28 / size - 1) / 2), mode="mirror")
        canvas = np.zeros((64, 64))
        canvas[top : top + size, left : left + size] = np.clip(weights @ smooth @ weights.T, 0, digit.max())
        expected = stretched(ndimage.gaussian_filter(canvas, 7 / 8 * size / 28, mode="nearest"))
        assert np.abs(image + 0.5 - expected).max() < 3
        assert np.abs(image + 0.5 - expected)[expected > 0.5].mean() < 0.3  # rounded down


@pytest.mark.parametrize("size", [0.5, 1.0, 2**0.25, 4.0, 8.0])
def test_large_scale_digits_are_centred_and_as_large_as_they_say(digits, size):
    original = np.frombuffer(digits, np.uint8).reshape(-1, 28, 28)[7].astype(float)
    (image,) = sized._draw(
        SizedSpec("mnist-large-scale"), "train", sources.Pool(None, original[None].astype(np.uint8), np.zeros(1)),
        np.zeros(1, np.int64), range(1), size,
    )  # fmt: skip
    # A continuous digit, sampled at the canvas' pixels and beyond, blurred there, then cut.
    at = (np.arange(-40, 152) + 0.5 - 56) / size + 13.5
    weights = np.array([[cubic(p - j) for j in range(28)] for p in at])
    smooth = ndimage.gaussian_filter(original, max(0, (1 / size - 1) / 2), mode="constant")
    wide = ndimage.gaussian_filter(np.clip(weights @ smooth @ weights.T, 0, original.max()), 7 / 8 * size)
    assert np.abs(image + 0.5 - stretched(wide[40:152, 40:152])).max() < 3


@pytest.mark.parametrize("size", SIZED_DATASETS["rescaled-cifar10"].sizes)
def test_photos_are_resampled_from_their_mirrored_surroundings(size):
    photo = np.random.default_rng(0).integers(0, 256, (1, 3, 32, 32), np.uint8)
    wide = np.pad(photo[0].astype(float), ((0, 0), (64, 64), (64, 64)), "symmetric")
    width = max(1, 1 / size)
    at = (np.arange(64) + 0.5 - 32) / size + 15.5 + 64
    weights = np.array([[cubic((p - j) / width) for j in range(160)] for p in at])
    weights /= weights.sum(1, keepdims=True)
    expected = np.clip(weights @ wide @ weights.T, 0, 255)
    assert np.abs(draw_photos(photo, size, 64)[0] - expected).max() < 0.51


def test_photo_of_size_one_keeps_its_pixels_and_size_two_fills_the_canvas():
    photo = np.random.default_rng(1).integers(0, 256, (2, 3, 32, 32), np.uint8)
    mirrored = np.pad(photo, ((0, 0), (0, 0), (16, 16), (16, 16)), "symmetric")
    np.testing.assert_array_equal(draw_photos(photo, 1.0, 64), mirrored)
    flat = np.full((1, 3, 32, 32), 255, np.uint8)
    for size in SIZED_DATASETS["rescaled-cifar10"].sizes:
        assert (draw_photos(flat, size, 64) == 255).all()


def test_no_rounding_is_left_to_the_last_bit_of_a_libm():
    # Values that are rounded lie further from a half than any libm errs.
    values = [math.atan(0.02 * (v / 256 - 128)) * (2 / math.pi * (1 << 20)) for v in range(65_281)]
    for own in SIZED_DATASETS.values():
        for size in own.sizes if own.source == "mnist" else ():
            scale = size / 28 if size > 8 else size
            for sigma in (7 / 8 * scale, (1 / scale - 1) / 2):
                if sigma > 0:
                    kernel = [math.exp(-0.5 * (i / sigma) ** 2) for i in range(int(4 * sigma + 0.5) + 1)]
                    values += [65536 * value / (2 * math.fsum(kernel) - 1) for value in kernel]
    assert min(abs(value % 1 - 0.5) for value in values) > 1e-8


# Sets of images


def test_load_split_gives_every_object_at_every_size(filled_cache):
    train = load_split("stir-mnist", 0, "train", train_sizes=(17, 32), **SMALL)
    assert train.images.shape == (30 * 16, 64, 64)
    assert train.images.dtype == torch.uint8
    assert train.scales.tolist() == [float(size) for size in range(17, 33)] * 30
    assert train.labels.tolist() == [digit for _ in range(3) for digit in range(10) for _ in range(16)]
    test = load_split("stir-mnist", 0, "test", test_sizes=(64, 20), **SMALL)
    assert test.scales.tolist() == [64, 20] * 20
    every = load_split("stir-mnist", 0, "test", train_sizes=(17, 32), **SMALL)
    assert len(every) == 48 * 20
    for position, size in enumerate((64, 20)):
        assert torch.equal(test.images[position::2], every.images[every.scales == size])


def test_object_lies_where_its_size_says(filled_cache):
    test = load_split("stir-mnist", 0, "test", **SMALL)
    seen = test.images > 127
    for axis in (1, 2):
        lines = seen.any(axis).int()
        extent = lines.shape[1] - lines.flip(1).argmax(1) - lines.argmax(1)
        assert (extent <= test.scales + 1).all()
    grown = [extent[test.scales == size].double().mean() for size in (20, 40, 60)]
    assert abs(float(grown[1] / grown[0]) - 2) < 0.2
    assert abs(float(grown[2] / grown[0]) - 3) < 0.3


def test_places_reach_every_edge_and_differ_between_parts_and_sizes():
    spec = SizedSpec("stir-mnist")
    places = {(part, size): sized._places(spec, part, range(500), size) for part in PARTS for size in (17, 63, 64)}
    for (_, size), found in places.items():
        assert (found.min(0) == 0).all()
        assert (found.max(0) == 64 - size).all()
    assert (places["train", 17] != places["test", 17]).mean() > 0.9
    assert (places["train", 17][:, 0] != places["train", 17][:, 1]).mean() > 0.9


def test_few_objects_are_the_first_of_many(filled_cache):
    few, many = (load_split("stir-mnist", 0, "val", sizes=(1, count, 1), train_sizes=(30, 31)) for count in (5, 12))
    assert torch.equal(few.images, many.images[:10])
    other = load_split("stir-mnist", 1, "val", sizes=(1, 5, 1), train_sizes=(30, 31))
    assert not torch.equal(other.images, few.images)
    assert few.about["digest"] != many.about["digest"] != other.about["digest"]
    assert few.about["source"] == vars(sources.identify("mnist")[0])


def test_only_sizes_that_are_asked_for_are_built(filled_cache, monkeypatch):
    monkeypatch.setattr(sized, "_BLOCK", 8)
    spec = {"sizes": (20, 5, 9)}
    train = load_split("mnist-large-scale", 0, "train", **spec)
    assert (train.images.shape, set(train.scales.tolist())) == ((20, 112, 112), {1.0})
    assert len(list(filled_cache.glob("splits/mnist-large-scale-0-train-*.safetensors"))) == 3
    test = load_split("mnist-large-scale", 0, "test", test_sizes=(0.5, 1.19), **spec)
    assert test.scales[:3].tolist() == pytest.approx([0.5, 2**0.25, 0.5])
    assert len(list(filled_cache.glob("splits/mnist-large-scale-0-test-*.safetensors"))) == 4
    labels = sources.published("mnist").labels[60_000:60_009]
    assert test.labels.tolist() == labels.repeat(2).tolist()
    monkeypatch.setattr(sized, "_BLOCK", 10_000)
    assert torch.equal(load_split("mnist-large-scale", 0, "train", **spec).images, train.images)


def test_rescaled_photos_are_in_colour(own_cache, photos):
    test = load_split("rescaled-cifar10", 0, "test", sizes=(4, 4, 4))
    assert test.images.shape == (36, 3, 64, 64)
    assert test.scales[:9].tolist() == pytest.approx([2 ** (i / 4) for i in range(-4, 5)])
    train, val = (load_split("rescaled-cifar10", 0, part, sizes=(4, 4, 4)) for part in ("train", "val"))
    assert [set(part.scales.tolist()) for part in (train, val)] == [{1.0}, {1.0}]
    for part, first in ((train, 0), (val, 40_000), (test, 50_000)):
        shown = part.images[:: len(part) // 4, 0, 0, 0]
        assert shown.tolist() == photos.images[first : first + 4, 0, 0, 0].tolist()
        assert part.labels[:: len(part) // 4].tolist() == photos.labels[first : first + 4].tolist()


def test_damaged_file_is_noticed_and_made_again(filled_cache, caplog):
    before = load_split("stir-mnist", 0, "test", **SMALL)
    (path,) = filled_cache.glob("splits/stir-mnist-*.safetensors")
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert torch.equal(load_split("stir-mnist", 0, "test", **SMALL).images, before.images)
    assert caplog.messages[0].endswith("It is made again.")
    assert path.read_bytes() == good


@pytest.mark.parametrize(
    ("dataset", "options", "match"),
    [
        ("stir-mnst", {}, "`dataset` must be one of .*Did you mean 'stir-mnist'"),
        ("stir-mnist", {"train_sizes": (65, 80)}, r"`train_sizes` must be \(low, high\) around some of 17, 18"),
        ("stir-mnist", {"train_sizes": (32, 17)}, "`train_sizes` must be"),
        ("stir-mnist", {"train_sizes": (17,)}, "`train_sizes` must be"),
        (
            "mnist-large-scale",
            {"test_sizes": (1, 3)},
            r"`test_sizes` must be different ones of 0.5, 0.595, .*got \(1, 3",
        ),
        ("mnist-large-scale", {"test_sizes": (1, 1)}, "`test_sizes` must be different"),
        ("stir-mnist", {"test_sizes": (20.5,)}, "`test_sizes` must be different ones of 17, 18"),
        ("mnist-large-scale", {"test_sizes": ()}, "`test_sizes` must not be empty"),
        ("stir-mnist", {"sizes": (501, 1, 1)}, r"`sizes` must be at most \(500, 500, 500\) objects"),
        ("stir-mnist", {"sizes": (0, 0, 0)}, "not all 0"),
        ("stir-mnist", {"sizes": 3}, "`sizes` must be three counts"),
        ("stir-mnist", {"split": -1}, "`split` must be at least 0"),
        ("stir-mnist", {"part": "valid"}, "`part` must be one of"),
        ("stir-mnist", {"scale_range": (0.3, 1)}, "`scale_range` does not apply to dataset='stir-mnist': it takes"),
        ("mnist-scale", {"train_sizes": (17, 32)}, "`train_sizes` does not apply to dataset='mnist-scale'"),
    ],
)
def test_wrong_arguments_are_refused(dataset, options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        load_split(dataset, **options)


@pytest.mark.parametrize("dataset", ["stir-mnist", "mnist-large-scale"])
def test_command_line_builds_shows_and_lists(filled_cache, capsys, tmp_path, dataset):
    flags = ["--sizes", "3", "2", "2", "--test-sizes", *(["17", "64"] if "stir" in dataset else ["0.5", "8"])]
    assert cli.main(["data", "build", dataset, *flags]) == 0
    built = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in built] == [f"{dataset} split 0 {part}" for part in PARTS]
    sheet = tmp_path / "x.png"
    assert cli.main(["data", "show", dataset, "--part", "test", "--output", str(sheet), *flags]) == 0
    assert sheet.stat().st_size > 2000
    assert cli.main(["data", "verify"]) == 0
    assert f"splits/{dataset}-0-val-" in capsys.readouterr().out
    assert cli.main(["data", "build", dataset, "--resampler", "antialias"]) == 2
    assert f"{dataset} takes no --resampler" in capsys.readouterr().err


# Digests


def digest(part):
    return hashlib.sha256(part.images.numpy().tobytes() + part.labels.numpy().tobytes()).hexdigest()


@pytest.mark.real_data
@pytest.mark.parametrize("dataset", ["stir-mnist", "mnist-large-scale"])
def test_digest_of_few_objects_is_pinned(real_cache, dataset):
    assert {part: digest(load_split(dataset, 0, part, sizes=(10, 5, 4))) for part in PARTS} == DIGESTS[f"{dataset}-few"]


def test_digest_of_photos_is_pinned():
    photos = np.random.RandomState(0).randint(0, 256, (3, 3, 32, 32)).astype(np.uint8)
    drawn = [draw_photos(photos, size, 64).tobytes() for size in SIZED_DATASETS["rescaled-cifar10"].sizes]
    assert hashlib.sha256(b"".join(drawn)).hexdigest() == DIGESTS["random-photos"]


def test_pinned_digests_in_the_package_are_those_of_the_tests():
    expected = {f"{name}-0-{part}": DIGESTS[name][part] for name in SIZED_DATASETS for part in PARTS}
    del expected["mnist-large-scale-0-test"]  # the tests build two of its sizes
    assert scale.PINNED["sized parts"] == expected


def test_part_that_is_whole_but_not_the_published_one_is_refused(filled_cache, monkeypatch):
    load_split("stir-mnist", 0, "val", sizes=(10, 5, 4))
    monkeypatch.setitem(SIZED_DATASETS, "stir-mnist", replace(SIZED_DATASETS["stir-mnist"], counts=(10, 5, 4)))
    with pytest.raises(DataError, match=r"stir-mnist-0-val\* does not hold the images that are published: delete it"):
        load_split("stir-mnist", 0, "val")
    load_split("stir-mnist", 1, "val")  # of which nothing is pinned
    load_split("stir-mnist", 0, "val", train_sizes=(17, 32))


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("dataset", SIZED_DATASETS)
def test_digest_is_pinned(real_cache, dataset):
    if dataset == "mnist-large-scale":  # two gigabytes in all
        options = {"train": {}, "val": {}, "test": {"test_sizes": (0.5, 4)}}
    else:
        options = {part: {} for part in PARTS}
    assert {part: load_split(dataset, 0, part, **more).about["digest"] for part, more in options.items()} == DIGESTS[
        dataset
    ]
