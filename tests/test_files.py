import hashlib
import json
import os
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from scalesteer import files
from scalesteer.files import DataError

TENSORS = {
    "a/x": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
    "b/x": torch.ones(4),
    "b/y": torch.tensor(3),
    "c": torch.ones(4, dtype=torch.bfloat16),
    "empty": torch.from_numpy(np.zeros((0, 2), np.float32)),
}
ABOUT = {"what": "test", "list": [1, 2.5]}


def save(path, tensors=TENSORS, about=ABOUT):
    files.write_atomically(path, files.encode(tensors, about))
    return path


@pytest.fixture
def path(tmp_path):
    return save(tmp_path / "file.safetensors")


def metadata_of(path):
    with safetensors.safe_open(path, "pt") as file:
        return file.metadata()


def sealed(text):
    """Metadata as it is in a file, for any text."""
    return {"scalesteer": f"{hashlib.sha256(text.encode()).hexdigest()} {text}"}


def bad(match):
    return pytest.raises(DataError, match=match)


def test_tensors_come_back_whole_and_by_prefix(path):
    tensors, meta = files.read(path)
    assert meta["about"] == ABOUT
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
        assert torch.equal(safetensors.torch.load_file(path)[name], tensor)  # an ordinary safetensors file
    assert set(files.read(path, "b/")[0]) == {"b/x", "b/y"}
    assert files.read(path, None) == ({}, meta)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float32, np.float64])
def test_digest_is_that_of_the_numpy_array(dtype):
    array = np.arange(6).astype(dtype).reshape(2, 3)
    expected = hashlib.sha256(f"{array.dtype.str}(2, 3)\0".encode() + array.tobytes()).hexdigest()
    assert files.tensor_digest(torch.from_numpy(array)) == expected
    assert files.tensor_digest(torch.from_numpy(np.asfortranarray(array))) == expected


def test_combined_digest_is_that_of_all_names_and_digests(path):
    digests = {name: files.tensor_digest(tensor) for name, tensor in TENSORS.items()}
    meta = files.read(path, None)[1]
    assert meta["arrays"] == digests
    assert meta["digest"] == hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def test_combined_digest_does_not_depend_on_the_order():
    assert files.combined_digest({"a": "1", "b": "2"}) == files.combined_digest({"b": "2", "a": "1"})
    assert files.combined_digest({"a": "1", "b": "2"}) != files.combined_digest({"a": "2", "b": "1"})


def test_same_content_gives_the_same_bytes_in_any_order():
    turned = dict(reversed(TENSORS.items()))
    assert {files.encode(turned, dict(reversed(ABOUT.items()))) for _ in range(9)} == {files.encode(TENSORS, ABOUT)}


def test_every_flipped_bit_and_every_cut_is_noticed(path):
    content = path.read_bytes()
    spoilt = [content[:at] for at in range(len(content))]
    spoilt += [content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :] for at in range(len(content))]
    for wrong in [*spoilt, content + b"more"]:
        path.write_bytes(wrong)
        with bad(r"file\.safetensors is damaged"):
            files.read(path)


def test_other_content_under_the_same_description_is_refused(path):
    other = {**TENSORS, "a/x": TENSORS["a/x"] + 1}
    path.write_bytes(safetensors.torch.save(other, metadata_of(path)))
    with bad("the content of a/x is not what was written"):
        files.read(path)
    assert set(files.read(path, "b/")[0]) == {"b/x", "b/y"}  # what is not read is not checked


@pytest.mark.parametrize("field", ["about", "arrays"])
def test_description_that_was_changed_is_refused(path, field):
    digest, text = metadata_of(path)["scalesteer"].split(" ", 1)
    meta = json.loads(text)
    meta[field] |= {"a/x": "0" * 64}
    path.write_bytes(safetensors.torch.save(TENSORS, {"scalesteer": f"{digest} {json.dumps(meta, sort_keys=True)}"}))
    with bad("its description is missing or not what was written"):
        files.read(path, None)


@pytest.mark.parametrize("tensors", [{"a/x": TENSORS["a/x"]}, {**TENSORS, "more": torch.ones(1)}])
def test_description_of_other_tensors_is_refused(path, tensors):
    path.write_bytes(safetensors.torch.save(tensors, metadata_of(path)))
    with bad("its description is of another file"):
        files.read(path, None)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        (None, "its description is missing"),
        ({"format": "pt"}, "its description is missing"),
        (sealed(json.dumps({"format": 3})), "it has format 3, and this version reads 2"),
        (sealed(json.dumps({"format": 2, "about": [], "arrays": {"x": ""}})), "of another file"),
        (sealed(json.dumps({"format": 2, "arrays": {"x": ""}})), "KeyError: 'about'"),
        (sealed(json.dumps([2])), "TypeError"),
        (sealed("[" * 100_000), "RecursionError"),
        (sealed('{"about":' * 100_000), "RecursionError"),
    ],
)
def test_sound_file_of_another_kind_or_version_is_refused(path, metadata, match):
    path.write_bytes(safetensors.torch.save({"x": torch.ones(1)}, metadata))
    with bad(match):
        files.read(path)


def test_file_that_claims_too_much_is_refused_before_it_is_read(path):
    path.write_bytes((files.LARGEST_HEADER + 1).to_bytes(8, "little") + bytes(100))
    with bad("its header has more than 16,777,216 bytes"):
        files.read(path)
    with open(path, "wb") as file:
        file.truncate(files.LARGEST_FILE + 1)  # takes no room on disk
    with bad("it has more than 4,294,967,296 bytes"):
        files.read(path)


def test_missing_file_is_told_from_a_damaged_one(tmp_path, path):
    for missing in (tmp_path / "none", path / "none"):
        with pytest.raises(FileNotFoundError):
            files.read(missing)


def test_pipe_and_directory_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path / "pipe", tmp_path):
        with bad("it is not a regular file"):
            files.read(wrong)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [4, 4]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [-(1 << 42), 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
        {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]},
        {"shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 5]},
        {"dtype": "F32", "shape": [1]},
        [],
    ],
)
def test_header_that_lies_is_refused_and_nothing_large_is_allocated(path, entry):
    good = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}
    about = json.dumps({"format": 2, "about": {}, "arrays": {"x": "", "y": files.tensor_digest(torch.zeros(1))}})
    header = json.dumps({"__metadata__": sealed(about), "x": entry, "y": good}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with bad("is damaged or not a file of scalesteer"):
        files.read(path, "x")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with bad("is damaged or not a file of scalesteer"):
        files.read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 50_000  # in KB


@pytest.mark.parametrize("spans", [[(0, 4), (0, 4)], [(0, 4), (2, 6)], [(0, 4), (5, 9)]])
def test_tensors_that_overlap_or_leave_gaps_are_refused(path, spans):
    shape = {"dtype": "U8", "shape": [4]}
    digest = files.tensor_digest(torch.zeros(4, dtype=torch.uint8))
    about = json.dumps({"format": 2, "about": {}, "arrays": dict.fromkeys("ab", digest)})
    entries = {name: {**shape, "data_offsets": span} for name, span in zip("ab", spans, strict=True)}
    header = json.dumps({"__metadata__": sealed(about), **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(spans[-1][1]))
    with bad("do not lie side by side"):
        files.read(path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was opened just before
def test_interrupt_while_reading_is_not_taken_for_damage(path):
    class Stop(BaseException):
        pass

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    stopped = 0
    try:
        for moment in np.linspace(1e-5, 1e-3, 400).tolist():
            try:
                signal.setitimer(signal.ITIMER_REAL, moment)
                files.read(path)
                time.sleep(1e-3)
            except Stop:
                stopped += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped > 300


# Writing, locks, the cache


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file_and_leaves_nothing(path, monkeypatch, step):
    def full(*_):
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, step, full)
    with bad(r"cannot write to the cache at .* \(No space left on device\)"):
        files.cached(path, "", lambda meta: False, lambda: ({"a": torch.zeros(9)}, {}))
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.glob(".*") if p.suffix != ".lock"] == []


def test_folder_that_cannot_be_written_to_is_told_and_one_that_can_stays_as_it_is(tmp_path):
    files.check_writable(tmp_path / "new" / "results")
    files.check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for folder, reason in {
        tmp_path / "file" / "results": "Not a directory",
        Path("/proc/results"): "No such file",
    }.items():
        with pytest.raises(DataError, match=f"{folder} cannot be written to .{reason}"):
            files.check_writable(folder)


def test_small_file_is_read_and_what_is_none_is_refused_without_waiting(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert files.read_small(tmp_path / "file", 5) == b"12345"
    os.mkfifo(tmp_path / "pipe")
    for path, largest in ((tmp_path / "file", 4), (tmp_path, 5000), (tmp_path / "pipe", 5), (Path("/dev/zero"), 5)):
        with pytest.raises(DataError, match=f"{path} is not a regular file of at most {largest:,} bytes"):
            files.read_small(path, largest)
    with pytest.raises(FileNotFoundError):
        files.read_small(tmp_path / "none")


def test_the_home_of_nobody_is_an_error(monkeypatch):
    assert files.expand_home("~/x", "it") == Path.home() / "x"
    monkeypatch.setenv("SCALESTEER_CACHE", "~nobody-of-that-name/cache")
    with bad("SCALESTEER_CACHE names the home of a user who is not here .got '~nobody-of-that-name/cache'"):
        files.cache_dir()


def test_cache_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with bad("set SCALESTEER_CACHE"):
        Cached(tmp_path / "file" / "x").get()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache_is_an_error(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o555)
    with bad("set SCALESTEER_CACHE"):
        Cached(tmp_path / "cache" / "x").get()


def test_lock_names_its_holder_and_leaves_no_note(tmp_path):
    with files.locked(tmp_path / ".lock"):
        with pytest.raises(files.LockedError, match=rf"is in use by process {os.getpid()} on .* since .*\.$"):
            files.locked(tmp_path / ".lock").__enter__()
        assert list(tmp_path.glob("*.holder"))
    assert not list(tmp_path.glob("*.holder"))


class Cached:
    """A file of the cache that counts how often it is made."""

    def __init__(self, path):
        self.path, self.made = path, 0

    def make(self):
        self.made += 1
        return TENSORS, ABOUT

    def get(self):
        return files.cached(self.path, "b/", lambda meta: meta["about"] == ABOUT, self.make)


def test_cached_file_is_made_once(tmp_path):
    cached = Cached(tmp_path / "folder" / "x.safetensors")
    for _ in range(2):
        tensors, meta = cached.get()
        assert (set(tensors), meta["about"]) == ({"b/x", "b/y"}, ABOUT)
    assert cached.made == 1


def test_second_process_waits_for_the_first_says_so_and_makes_nothing(tmp_path, caplog):
    cached = Cached(tmp_path / "x.safetensors")
    thread = threading.Thread(target=cached.get)
    with files.locked(tmp_path / ".x.safetensors.lock"):
        thread.start()
        while not caplog.messages:
            time.sleep(0.01)
        save(cached.path)
    thread.join(300)
    assert cached.made == 0
    assert caplog.messages == ["waiting for another process that is making x.safetensors"]


@pytest.mark.parametrize("content", [b"", b"PK\3\4 an archive", files.encode(TENSORS, {"what": "another"})])
def test_cached_file_that_is_not_sound_is_made_again_with_a_word(tmp_path, caplog, content):
    cached = Cached(tmp_path / "x.safetensors")
    cached.path.write_bytes(content)
    assert cached.get()[1]["about"] == ABOUT
    assert cached.made == 1
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(" It is made again.")


def test_leftovers_of_a_killed_build_are_removed(tmp_path):
    cached = Cached(tmp_path / "x [1].safetensors")
    (tmp_path / ".x [1].safetensors.123.tmp").write_bytes(b"half")
    (tmp_path / ".x [1].safetensors.lock").touch()  # its holder is dead
    cached.get()
    assert not list(tmp_path.glob(".*.tmp"))


def test_missing_extra_names_the_command_that_installs_it():
    with pytest.raises(ImportError, match=r"no_such_module is needed .* pip install 'scalesteer\[cli\]'"):
        files.require("no_such_module.inside")
