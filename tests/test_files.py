import io
import json
import os
import threading
import time
import zipfile

import numpy as np
import pytest

from scalesteer import files
from scalesteer.files import DataError

ARRAYS = {"a/x": np.arange(6, dtype=np.uint8).reshape(2, 3), "b/x": np.ones(4, np.float32)}


@pytest.fixture
def path(tmp_path):
    files.write(tmp_path / "file.npz", ARRAYS, {"what": "test"})
    return tmp_path / "file.npz"


def test_arrays_come_back_and_numpy_can_read_them_too(path):
    arrays, meta = files.read(path)
    assert meta["about"] == {"what": "test"}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        np.testing.assert_array_equal(np.load(path)[name], array)
    assert list(files.read(path, "b/")[0]) == ["b/x"]
    assert files.read(path, None) == ({}, meta)


def test_same_content_gives_the_same_bytes(path, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 2e9)
    files.write(tmp_path / "again.npz", ARRAYS, {"what": "test"})
    assert (tmp_path / "again.npz").read_bytes() == path.read_bytes()


def test_every_flipped_byte_and_every_cut_is_noticed_or_harmless(path):
    content, (good, meta) = path.read_bytes(), files.read(path)
    for at in range(len(content)):
        for spoilt in (content[:at], content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :]):
            path.write_bytes(spoilt)
            try:
                arrays, found = files.read(path)
            except DataError as error:
                assert "file.npz is damaged" in str(error)  # noqa: PT017
            else:  # a date or an attribute in the zip: nothing that is read
                assert found == meta
                assert all(np.array_equal(arrays[name], good[name]) for name in good)


def test_pickled_objects_are_refused_and_never_run(tmp_path):
    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    member = io.BytesIO()
    np.lib.format.write_array(member, np.array([Touch()], object), allow_pickle=True)
    digests = {"x": "0" * 64}
    meta = {"about": {}, "arrays": digests, "digest": files.combined_digest(digests)}
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("meta.json", json.dumps(meta))
        archive.writestr("x.npy", member.getvalue())
    with pytest.raises(DataError, match="Object arrays cannot be loaded"):
        files.read(tmp_path / "bad.npz")
    assert not (tmp_path / "owned").exists()


def test_compressed_member_is_refused(path, tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("meta.json", bytes(1 << 24))
    with pytest.raises(DataError, match="not stored as it should be"):
        files.read(tmp_path / "bomb.npz")


def test_missing_file_is_told_from_a_damaged_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "none.npz")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file_and_leaves_nothing(path, monkeypatch, step):
    def full(*_):
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, step, full)
    with pytest.raises(DataError, match=r"cannot write to the cache at .* \(No space left on device\)"):
        files.write(path, {"a": np.zeros(9)}, {})
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.glob(".*")] == []


def test_sound_archive_with_other_content_is_refused(path, tmp_path):
    files.write(tmp_path / "other.npz", {"a/x": ARRAYS["a/x"] + 1, "b/x": ARRAYS["b/x"]}, {})
    with (
        zipfile.ZipFile(path) as source,
        zipfile.ZipFile(tmp_path / "other.npz") as other,
        zipfile.ZipFile(tmp_path / "mixed.npz", "w") as mixed,
    ):
        mixed.writestr("meta.json", source.read("meta.json"))
        for name in ("a/x.npy", "b/x.npy"):
            mixed.writestr(name, other.read(name))
    with pytest.raises(DataError, match="the content of a/x is not what was written"):
        files.read(tmp_path / "mixed.npz")


def test_cache_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="set SCALESTEER_CACHE"), files.building(tmp_path / "file" / "x.npz"):
        pass


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache_is_an_error(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o555)
    with pytest.raises(DataError, match="set SCALESTEER_CACHE"), files.building(tmp_path / "cache" / "x.npz"):
        pass


def test_second_builder_waits_for_the_first_and_says_so(tmp_path, caplog):
    order = []

    def second():
        with files.building(tmp_path / "x.npz"):
            order.append("second")

    thread = threading.Thread(target=second)
    with files.building(tmp_path / "x.npz"):
        thread.start()
        while not caplog.messages:
            time.sleep(0.01)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert caplog.messages == ["waiting for another process that is making x.npz"]


def test_leftovers_of_a_killed_build_are_removed(tmp_path):
    (tmp_path / ".x.npz.123.tmp").write_bytes(b"half")
    (tmp_path / ".x.npz.lock").touch()  # its holder is dead
    with files.building(tmp_path / "x.npz"):
        assert not list(tmp_path.glob("*.tmp"))


def test_missing_extra_names_the_command_that_installs_it():
    with pytest.raises(ImportError, match=r"no_such_module is needed .* pip install 'scalesteer\[data\]'"):
        files.require("no_such_module.inside")
