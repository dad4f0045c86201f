import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from scalesteer import files as cache_files
from scalesteer.datasets import DATASETS, PARTS, DataError, SplitSpec, build, load_part, scale, sources

DIGESTS = json.loads((Path(__file__).parent / "digests.json").read_text())
SMALL = {"sizes": (300, 100, 600)}


@pytest.fixture(scope="module")
def parts(pools):
    """Split 0 of each dataset."""
    specs = {name: SplitSpec(name) for name in DATASETS}
    return {name: scale.build_split(pools[spec.source], spec) for name, spec in specs.items()}


def digest(array):
    return hashlib.sha256(f"{array.dtype.str}{array.shape}\0".encode() + array.tobytes()).hexdigest()


def combined(digests):
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def digest_of(parts):
    """The digest of built parts, from the arrays themselves."""
    arrays = {f"{part}/{name}": array for part in parts for name, array in vars(parts[part]).items()}
    return combined({name: digest(array) for name, array in arrays.items()})


@pytest.mark.real_data
@pytest.mark.parametrize("split", scale.SPLITS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_digest_is_pinned(real_pools, dataset, split):
    spec = SplitSpec(dataset, split)
    assert digest_of(scale.build_split(real_pools[spec.source], spec)) == DIGESTS[dataset][split]


@pytest.mark.real_data
@pytest.mark.parametrize("dataset", DATASETS)
def test_antialiased_digest_is_pinned(real_pools, dataset):
    spec = SplitSpec(dataset, resampler="antialias")
    assert digest_of(scale.build_split(real_pools[spec.source], spec)) == DIGESTS["antialias"][dataset]


# The protocol


@pytest.mark.parametrize("dataset", ["mnist-scale", "fmnist-scale"])
def test_parts_have_the_papers_sizes_and_share_no_image(parts, pools, dataset):
    drawn = [part.indices for part in parts[dataset].values()]
    assert [len(indices) for indices in drawn] == [10_000, 2_000, 50_000]
    assert len(np.unique(np.concatenate(drawn))) == 62_000
    for part in parts[dataset].values():
        np.testing.assert_array_equal(part.labels, pools[DATASETS[dataset].source].labels[part.indices])
        assert part.images.shape == (len(part.labels), 28, 28)


@pytest.mark.parametrize("dataset", ["mnist-scale", "fmnist-scale"])
def test_label_counts_are_those_of_a_fair_draw(parts, pools, dataset):
    share = np.bincount(pools[DATASETS[dataset].source].labels) / 70_000
    for part in parts[dataset].values():
        count = len(part.labels)
        deviation = (np.bincount(part.labels, minlength=10) - count * share) / np.sqrt(count * share)
        assert np.abs(deviation).max() < 4


@pytest.mark.parametrize("dataset", DATASETS)
def test_scales_are_uniform_over_the_range(parts, dataset):
    low, high = DATASETS[dataset].scale_range
    for part in parts[dataset].values():
        assert low < part.scales.min()
        assert part.scales.max() < high
        counts, _ = np.histogram(part.scales, bins=20, range=(low, high))
        expected = part.scales.size / 20
        assert np.abs(counts - expected).max() < 4.5 * np.sqrt(expected)


def edges(images):
    """First and last row and column above half brightness, the last one exclusive: (n, 4)."""
    found = []
    for axis in (2, 1):
        seen = (images > 127).any(axis=axis)
        found += [seen.argmax(1), seen.shape[1] - seen[:, ::-1].argmax(1)]
    return np.stack(found, 1)


@pytest.mark.parametrize("resampler", scale.RESAMPLERS)
@pytest.mark.parametrize("dataset", ["mnist-scale", "fmnist-scale"])
def test_bounding_boxes_are_within_a_pixel_of_the_drawn_scale(parts, pools, dataset, resampler):
    # Thin strokes can fall between the samples of the bilinear resampler, so each image's bounding box is
    # filled before it is shrunk: its edges then lie where the scale puts them.
    part, source = parts[dataset]["test"], pools[DATASETS[dataset].source].images
    boxes = edges(np.where(source[part.indices] > 0, 255, 0))
    grid = np.arange(28)
    rows, columns = ((boxes[:, a, None] <= grid) & (grid < boxes[:, a + 1, None]) for a in (0, 2))
    filled = np.where(rows[:, :, None] & columns[:, None, :], 255, 0).astype(np.uint8)
    square = np.round(28 * part.scales)
    centre = (28 - square) // 2 + square / 2
    expected = centre[:, None] + (boxes - 14) * part.scales[:, None]
    found = edges(scale.shrink(filled, part.scales, resampler))
    assert np.abs(found - expected).max() < 1
    assert np.abs(square - 28 * part.scales).max() <= 0.5


@pytest.mark.parametrize("dataset", ["mnist-scale", "fmnist-scale"])
def test_ink_of_the_built_images_lies_where_the_drawn_scale_puts_it(parts, pools, dataset):
    # Thin strokes can fall between samples, and squares lie on whole pixels: one edge in twenty is further off.
    part, source = parts[dataset]["test"], pools[DATASETS[dataset].source].images

    def bright(images):
        return np.where(images > images.max((1, 2), keepdims=True) / 4, 255, 0)

    miss = np.abs(edges(bright(part.images)) - 14 - (edges(bright(source[part.indices])) - 14) * part.scales[:, None])
    assert (miss <= 1).mean() > 0.95
    assert np.median(miss) < 0.5


@pytest.mark.parametrize("dataset", ["mnist-scale", "fmnist-scale"])
def test_nothing_lies_outside_the_centred_square(parts, dataset):
    part = parts[dataset]["test"]
    size = np.round(28 * part.scales)
    first = ((28 - size) // 2)[:, None]
    inside = (np.arange(28) >= first) & (np.arange(28) < first + size[:, None])
    assert not part.images[~(inside[:, :, None] & inside[:, None, :])].any()
    assert part.images.reshape(len(size), -1).any(1).all()


def test_pairs_show_their_digits_side_by_side(parts, pools):
    pool, overlapping, checked = pools["mnist"], 0, 0
    for part in parts["mnist-scale-local-2"].values():
        np.testing.assert_array_equal(part.labels, np.arange(len(part.labels)) % 10)
        np.testing.assert_array_equal(pool.labels[part.indices[:, 0]], part.labels)
        np.testing.assert_array_equal(pool.labels[part.indices[:, 1]], (part.labels + 1) % 10)
        assert part.images.shape[1:] == (28, 40)
        for image, indices, scales in zip(part.images[:1500], part.indices, part.scales, strict=False):
            shown = np.zeros((28, 40), np.uint8)
            ink = np.flatnonzero(image.any(0))
            spans = []
            for side in (0, 1):
                digit = scale.shrink(pool.images[indices[side]][None], scales[side : side + 1])[0]
                digit = digit[:, np.flatnonzero(digit.any(0))[0] : np.flatnonzero(digit.any(0))[-1] + 1]
                start = ink[0] if side == 0 else ink[-1] + 1 - digit.shape[1]
                spans.append((start, start + digit.shape[1]))
                shown[:, slice(*spans[-1])] = np.maximum(shown[:, slice(*spans[-1])], digit)
            np.testing.assert_array_equal(shown, image)
            assert spans[0][1] <= 21
            assert spans[1][0] >= 19
            overlapping += spans[0][1] > spans[1][0]
            checked += 1
    assert 0.03 < overlapping / checked < 0.055  # of published digits, which are wider: 0.09


def test_pairs_never_share_a_source_image_between_parts(parts):
    used = [np.unique(part.indices) for part in parts["mnist-scale-local-2"].values()]
    assert [len(part.labels) for part in parts["mnist-scale-local-2"].values()] == [10_000, 2_000, 40_000]
    assert len(np.unique(np.concatenate(used))) == sum(map(len, used))
    assert [len(indices) <= limit for indices, limit in zip(used, scale.PAIR_SOURCES, strict=True)] == [True] * 3


@pytest.mark.parametrize("dataset", DATASETS)
def test_image_depends_only_on_seed_split_and_index(parts, pools, dataset):
    pool = pools[DATASETS[dataset].source]
    few = scale.build_split(pool, SplitSpec(dataset, sizes=(70, 0, 0)))["train"]
    for name, array in vars(few).items():
        np.testing.assert_array_equal(array, getattr(parts[dataset]["train"], name)[:70])


def test_other_split_seed_and_dataset_draw_other_images(pools):
    def drawn(*spec, **options):
        return scale.build_split(pools["mnist"], SplitSpec(*spec, sizes=(50, 0, 0), **options))["train"]

    base = drawn("mnist-scale", 0)
    for other in (drawn("mnist-scale", 1), drawn("mnist-scale", 0, seed=1)):
        assert (other.indices != base.indices).mean() > 0.9
    rescaled = drawn("mnist-scale", 0, scale_range=(0.4, 0.4))
    np.testing.assert_array_equal(rescaled.indices, base.indices)
    np.testing.assert_array_equal(rescaled.scales, np.float32(0.4))


# The resamplers, against exact fractions and Pillow


def exact(image, size, resampler):
    def weights(i):
        if resampler == "bilinear":
            position = Fraction(27 * i, size - 1)
            return [max(Fraction(0), 1 - abs(position - j)) for j in range(28)]
        raw = [
            max(Fraction(0), 1 - abs(Fraction(2 * j + 1, 2) * Fraction(size, 28) - Fraction(2 * i + 1, 2)))
            for j in range(28)
        ]
        return [w / sum(raw) for w in raw]

    table = [[(j, w) for j, w in enumerate(weights(i)) if w] for i in range(size)]
    out = np.zeros((28, 28), np.uint8)
    first = (28 - size) // 2
    for y in range(size):
        for x in range(size):
            value = sum(wy * wx * int(image[j, k]) for j, wy in table[y] for k, wx in table[x])
            out[first + y, first + x] = int(value + Fraction(1, 2))
    return out


@pytest.mark.parametrize("resampler", scale.RESAMPLERS)
@settings(max_examples=30)
@given(image=hnp.arrays(np.uint8, (28, 28)), size=st.integers(3, 28))
def test_shrinking_rounds_the_exact_value(resampler, image, size):
    scales = np.array([size / 28], np.float32)
    np.testing.assert_array_equal(scale.shrink(image[None], scales, resampler)[0], exact(image, size, resampler))


@pytest.mark.parametrize("resampler", scale.RESAMPLERS)
def test_scale_one_is_the_identity(pools, resampler):
    images = pools["fashion-mnist"].images[:2000]
    np.testing.assert_array_equal(scale.shrink(images, np.ones(2000, np.float32), resampler), images)


def test_antialiasing_is_pillows_within_one_grey_value(pools):
    for size in range(3, 29):
        image = pools["fashion-mnist"].images[1000 * size]
        ours = scale.shrink(image[None], np.array([size / 28], np.float32), "antialias")[0]
        first = (28 - size) // 2
        theirs = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)
        difference = ours[first : first + size, first : first + size].astype(int) - np.asarray(theirs)
        assert np.abs(difference).max() <= 1


# The cache, and what can go wrong


def test_built_split_is_loaded_within_a_second(filled_cache, pools):
    built = build("mnist-scale", [0])[0]
    started = time.process_time()
    loaded = {part: load_part(SplitSpec(), part)[0] for part in PARTS}
    assert time.process_time() - started < 1
    assert digest_of(loaded) == built["digest"]
    assert built["about"]["source"] == vars(pools["mnist"].identity)


def test_release_is_part_of_a_splits_identity(filled_cache, pools):
    identity = pools["fashion-mnist"].identity
    other = sources.Identity(identity.source, "first", "0" * 64)
    spec = SplitSpec("fmnist-scale")
    assert scale.split_path(spec, identity) != scale.split_path(spec, other)


def run_python(code, *argv):
    return subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE)


def test_four_processes_in_any_order_give_the_same_bytes(filled_cache):
    alone = build("mnist-scale", [0, 1], **SMALL)
    files = {path: path.read_bytes() for path in filled_cache.glob("splits/*.safetensors")}
    for path in files:
        path.unlink()
    code = (
        "import sys; from scalesteer.datasets import build\n"
        "for split in sys.argv[1]: print(build('mnist-scale', [int(split)], sizes=(300, 100, 600))"
        "[int(split)]['digest'])"
    )
    orders = ["01", "10", "1", "0"]
    for process, order in zip([run_python(code, order) for order in orders], orders, strict=True):
        output = process.communicate(timeout=300)[0].decode().split()
        assert process.returncode == 0
        assert output == [alone[int(split)]["digest"] for split in order]
    assert {path: path.read_bytes() for path in filled_cache.glob("splits/*.safetensors")} == files


def test_corrupted_or_half_written_split_is_noticed_and_rebuilt(filled_cache, caplog):
    spec = SplitSpec(**SMALL)
    _, meta = load_part(spec)
    (path,) = filled_cache.glob("splits/*.safetensors")
    good = path.read_bytes()
    at = len(good) // 2
    np.savez(filled_cache / "objects.npz", meta=np.array([{}], object))
    other = scale.split_path(SplitSpec(split=1, **SMALL), sources.Identity(**meta["about"]["source"]))
    build("mnist-scale", [1], **SMALL)
    for spoilt in (good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], good[: len(good) // 2], b"",
                   (filled_cache / "objects.npz").read_bytes(), other.read_bytes()):  # fmt: skip
        path.write_bytes(spoilt)
        caplog.clear()
        for part, count in zip(PARTS, SMALL["sizes"], strict=True):
            loaded, again = load_part(spec, part)
            assert again == meta
            assert len(loaded.labels) == count
        assert len(caplog.messages) == 1
        assert "It is made again." in caplog.text
        assert path.read_bytes() == good


@pytest.mark.parametrize("change", ["entry lacks", "entry more", "field lacks", "field more", "empty", "other release"])
def test_sound_split_of_another_version_is_noticed_and_rebuilt(filled_cache, caplog, change):
    spec = SplitSpec(**SMALL)
    _, meta = load_part(spec)
    (path,) = filled_cache.glob("splits/*.safetensors")
    good = path.read_bytes()
    tensors, about = cache_files.read(path)[0], dict(meta["about"])
    if change == "entry lacks":
        del tensors["train/scales"]
    elif change == "entry more":
        tensors["train/more"] = tensors["train/scales"]
    elif change == "field lacks":
        del about["recipe"]
    elif change == "field more":
        about["url"] = "x"
    elif change == "empty":
        about = {}
    else:
        about["source"] = {**about["source"], "digest": "0" * 64}
    path.write_bytes(cache_files.encode(tensors, about))
    assert load_part(spec, "test")[1] == meta
    assert caplog.messages == [f"{path} does not hold what its name says. It is made again."]
    assert path.read_bytes() == good


def test_pinned_digests_in_the_package_are_those_that_tests_build(real_sources):
    found = {dataset: [] for dataset in DATASETS}
    for dataset in DATASETS:
        for split in scale.SPLITS:
            spec = SplitSpec(dataset, split)
            path = scale.split_path(spec, sources.identify(spec.source)[0])
            found[dataset].append(scale.PINNED["splits"][path.stem])
    assert found == {dataset: DIGESTS[dataset] for dataset in DATASETS}


def test_split_that_is_whole_but_not_the_pinned_one_is_made_again(filled_cache, caplog, monkeypatch):
    spec = SplitSpec(**SMALL)
    part, meta = load_part(spec)
    (path,) = filled_cache.glob("splits/*.safetensors")
    good = path.read_bytes()
    monkeypatch.setitem(scale.PINNED["splits"], path.stem, meta["digest"])
    tensors, _ = cache_files.read(path)
    tensors["train/images"][0, 14, 14] ^= 1
    path.write_bytes(cache_files.encode(tensors, meta["about"]))  # with digests of its own
    again, _ = load_part(spec)
    np.testing.assert_array_equal(again.images, part.images)
    assert caplog.messages == [f"{path} does not hold what its name says. It is made again."]
    assert path.read_bytes() == good
    monkeypatch.setitem(scale.PINNED["splits"], path.stem, "0" * 64)  # this machine would make another one
    with pytest.raises(DataError, match="does not hold what its name says"):
        load_part(spec)


def test_recipe_is_part_of_a_splits_identity(monkeypatch, pools):
    identity = pools["mnist"].identity
    before = scale.split_path(SplitSpec(), identity)
    monkeypatch.setattr(scale, "RECIPE", scale.RECIPE + 1)
    assert scale.split_path(SplitSpec(), identity) != before


def test_split_needs_no_pool_once_it_is_built(filled_cache, monkeypatch):
    _, meta = load_part(SplitSpec(**SMALL))
    monkeypatch.setattr(sources, "fetch", None)
    assert load_part(SplitSpec(**SMALL), "val")[1] == meta


@pytest.mark.parametrize("named", ["argument", "environment"])
def test_named_directory_decides_although_the_cache_has_the_split(filled_cache, tmp_path, monkeypatch, named):
    load_part(SplitSpec(**SMALL))
    if named == "environment":
        monkeypatch.setenv("SCALESTEER_DATA", str(tmp_path / "none"))
    options = {"data_dir": tmp_path / "none"} if named == "argument" else {}
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is missing in .*none"):
        load_part(SplitSpec(**SMALL), **options)


def test_pairs_need_every_digit(pools):
    pool = pools["mnist"]
    kept = pool.labels != 3
    few = replace(pool, images=pool.images[kept], labels=pool.labels[kept])
    with pytest.raises(ValueError, match="a part of the pool holds no image of some digit"):
        scale.build_split(few, SplitSpec("mnist-scale-local-2"))


def test_killed_build_is_finished_by_the_next(filled_cache, pools):
    for _ in range(50):  # until the kill hits the write
        process = run_python("from scalesteer.datasets import build; build('mnist-scale', [0])")
        while process.poll() is None and not list(filled_cache.glob("splits/.*.tmp")):
            time.sleep(0.001)
        process.kill()
        process.communicate()
        finished = list(filled_cache.glob("splits/*.safetensors"))
        if not finished:
            break
        finished[0].unlink()
    assert list(filled_cache.glob("splits/.*.tmp"))
    assert build("mnist-scale", [0])[0]["digest"] == digest_of(scale.build_split(pools["mnist"], SplitSpec()))
    assert not list(filled_cache.glob("splits/.*.tmp"))


def test_closed_stderr_is_no_obstacle(filled_cache, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert len(build("mnist-scale", [0], **SMALL)) == 1


def test_progress_is_shown_on_a_terminal_alone(filled_cache, monkeypatch, capsys):
    build("mnist-scale", [0], **SMALL)
    assert "building" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    build("mnist-scale", [1], **SMALL)
    assert "building mnist-scale" in capsys.readouterr().err


def test_cache_path_with_spaces_and_unicode(filled_cache, monkeypatch, tmp_path):
    odd = filled_cache.rename(tmp_path / "dä ta [1] データ")
    monkeypatch.setenv("SCALESTEER_CACHE", str(odd))
    assert len(load_part(SplitSpec(**SMALL), "val")[0].labels) == 100
    assert len(list(odd.glob("splits/*.safetensors"))) == 1


@pytest.mark.parametrize(
    "low_high",
    [(0, 1), (-0.5, 1), (float("nan"), 1), (0.3, float("nan")), (0.3, float("inf")), (0.8, 0.5), (0.5, 1.01), (0.5,)],
)
def test_impossible_scales_are_refused(low_high):
    with pytest.raises(ValueError, match="`scale_range"):
        SplitSpec(scale_range=low_high)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dataset": "mnist-scal"}, "`dataset` must be one of .*Did you mean 'mnist-scale'"),
        ({"resampler": "bicubic"}, "`resampler` must be one of 'bilinear', 'antialias'"),
        ({"sizes": (60_000, 5_000, 6_000)}, "1 to 70,000 images in all"),
        ({"sizes": (0, 0, 0)}, "1 to 70,000 images in all"),
        ({"sizes": (10, -1, 5)}, r"`sizes\[1\]` must be at least 0"),
        ({"split": -1}, "`split` must be at least 0"),
    ],
)
def test_impossible_spec_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        SplitSpec(**options)


def test_unknown_part_and_wrong_pool_are_refused(pools):
    with pytest.raises(ValueError, match="`part` must be one of 'train', 'val', 'test'"):
        load_part(SplitSpec(), "tset")
    with pytest.raises(ValueError, match="fmnist-scale is made from fashion-mnist"):
        scale.build_split(pools["mnist"], SplitSpec("fmnist-scale"))


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("version", ["1.26.4", "2.2.6"])
def test_another_numpy_gives_the_same_bytes(real_cache, tmp_path, version):
    target = tmp_path / "numpy"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, f"numpy=={version}"], check=True)
    code = (
        "import json, numpy, hashlib; from scalesteer.datasets import DATASETS, build, distort, load_part, SplitSpec\n"
        "images = load_part(SplitSpec(), 'test')[0].images[:2000]\n"
        "print(json.dumps([numpy.__version__, hashlib.sha256(distort(images, 30.0)).hexdigest(),"
        " {d: [m['digest'] for m in build(d).values()] for d in DATASETS}]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), os.environ["PYTHONPATH"]])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    used, distorted, digests = json.loads(done.stdout)
    assert used == version
    assert distorted == DIGESTS["elastic-30"]
    assert digests == {dataset: DIGESTS[dataset] for dataset in DATASETS}
