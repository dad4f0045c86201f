"""Pictures that do not fit into memory: read from disk, with the same numbers, never from a file that is damaged."""

import os
import re
import shutil
import tempfile
from collections import namedtuple
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from scalesteer.app import cli, folder, load_model, loop, mapped, train
from scalesteer.app.evaluation import answer
from scalesteer.app.folder import FolderSpec, load_folder
from scalesteer.app.given import pack
from scalesteer.app.mapped import PixelFile, Stack, map_images, memory_limit
from scalesteer.datasets import ImageSet
from scalesteer.files import DataError
from tests.app.test_folder import PARTS, make, messages
from tests.app.test_given import SIDE, Small, Stripes, configure

SHAPE = (3, 16, 16)
Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture(autouse=True)
def _listen(caplog):
    caplog.set_level("INFO", logger="scalesteer")


@pytest.fixture
def small_memory(monkeypatch):
    """A machine on which pictures have only these bytes."""
    monkeypatch.setattr(mapped, "MOST_BYTES", 2 * 3 * 16 * 16)


@pytest.fixture
def photos(tmp_path):
    """Two classes in three parts, of 6 pictures each; for training two more that are broken."""
    root = make(tmp_path / "photos", parts=PARTS, count=6)
    for i in range(2):
        (root / "train" / "cat" / f"broken {i}.png").write_bytes(b"x")
    return FolderSpec(str(root), (16, 16))


def own_memory():
    """Bytes of this process that no file has."""
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status.read())[1])


def image_bytes(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), dtype=np.uint8))


# How much memory is used


@pytest.mark.parametrize(
    ("most", "machine", "container", "limit"),
    [(8, 64, "", 8), (8, 64, "max\n", 8), (8, 6, "", 3), (8, 64, "2000\n", 1000), (8, -1, "4000", 2000)],
)
def test_pictures_take_at_most_half_of_the_memory(tmp_path, monkeypatch, most, machine, container, limit):
    unit = 1 if container[:1].isdigit() else 1000
    monkeypatch.setattr(mapped, "MOST_BYTES", most * 1000)
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 10, "SC_PHYS_PAGES": machine * 100}[name])
    monkeypatch.setattr(mapped, "_CONTAINER", (tmp_path / "none", tmp_path / "memory.max"))
    if container:
        (tmp_path / "memory.max").write_text(container)
    assert memory_limit() == limit * unit
    assert mapped.is_large(limit * unit, (1, 1)) is False
    assert mapped.is_large(limit * unit + 1, (1, 1)) is True


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_a_file_larger_than_all_memory_is_mapped_and_reading_it_takes_none(tmp_path):
    count = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    with open(tmp_path / "sparse", "w+b") as file:
        try:
            file.truncate(count << 20)
        except OSError as error:
            pytest.skip(f"no such large files here: {error}")
        images, mapping = map_images(file, (count, 1024, 1024))
    before = own_memory()
    assert int(images[count - 64 :].max()) == 0
    assert own_memory() - before < 16 << 20
    images_set = ImageSet(images[:64], torch.zeros(64), torch.ones(64), mapped=mapping)
    assert images_set.mean == 0
    assert own_memory() - before < 48 << 20  # 64 MiB of pixels would be 512 MiB of numbers


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_memory_does_not_grow_with_the_images_that_a_network_looks_at(tmp_path):
    with open(tmp_path / "sparse", "w+b") as file:
        file.truncate(300 * 3 * 400 * 400)
        images, mapping = map_images(file, (300, 3, 400, 400))
    several = ImageSet(images, torch.zeros(300, dtype=torch.int64), torch.ones(300), mapped=mapping)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 8, stride=8), torch.nn.AvgPool2d(50), torch.nn.Flatten())
    before = own_memory()
    answer(network, several)
    assert own_memory() - before < 100 << 20  # all images as numbers: 550 MiB


def test_a_mapping_of_more_than_a_file_has_is_an_error_not_a_crash(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10))
    with open(tmp_path / "file", "rb") as file, pytest.raises(ValueError, match="greater than file size"):
        map_images(file, (2, 2, 3))
    with open(tmp_path / "file", "rb") as file:
        assert map_images(file, (0, 2, 3))[0].shape == (0, 2, 3)


# Files


def test_a_file_proves_what_it_holds(tmp_path):
    first, second = image_bytes(5), image_bytes(3, 1)
    with PixelFile(tmp_path / "train-x.pixels", SHAPE) as place:
        _, told = place.keep(0, first, {"key": "a"})
        _, more = place.keep(5, second, {})
        assert told["key"] == "a"
        assert torch.equal(place.images(8)[0], torch.cat([first, second]))
        assert place.holds(0, told)
        assert place.holds(5, more)
        assert not place.holds(4, more)  # what lies before it has changed
        content = place.path.read_bytes()
        for damaged in (content[:-1], content[:-5] + bytes([content[-5] ^ 1]) + content[-4:], b""):
            place.path.write_bytes(damaged)
            assert place.holds(0, told) == (damaged != b"")
            assert not place.holds(5, more)
        _, black = place.keep(0, torch.zeros_like(first), {})
        os.truncate(place.path, 100)
        assert not place.holds(0, black)
        place.path.unlink()
    with PixelFile(tmp_path / "train-x.pixels", SHAPE) as place:
        assert not place.holds(0, told)
        _, nothing = place.keep(0, first[:0], {})
        assert place.holds(0, nothing)


def test_what_was_mapped_stays_when_the_file_is_written_again_or_removed(tmp_path):
    images, others = image_bytes(5), image_bytes(3, 1)
    with PixelFile(tmp_path / "train-x.pixels", SHAPE) as place:
        place.keep(0, images, {})
        shown, _ = place.images(5)
    with PixelFile(place.path, SHAPE) as again:  # another process, which finds one more picture broken
        again.keep(0, others, {})
        assert torch.equal(shown, images)
        changed, _ = again.images(5)
        assert torch.equal(changed, torch.cat([others, images[3:]]))  # what follows may be right, and is proved
        again.keep(3, others, {})
        assert torch.equal(again.images(6)[0], torch.cat([others, others]))
    place.path.unlink()
    assert torch.equal(shown, images)
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_those_that_were_proved_though_the_cache_is_emptied_meanwhile(photos, small_memory, monkeypatch):
    monkeypatch.setattr(folder, "_BLOCK_BYTES", 4 * 3 * 16 * 16)
    expected, reads, read_picture = load_folder(photos, "train", workers=0), [], folder.read_picture
    os.utime(os.path.join(photos.images, "train", "cat", "1.png"), (0, 0))  # so that all are read again

    def read_while_others_tidy(path, *arguments, **options):
        reads.append(path)
        if len(reads) == 9:
            for file in mapped.folder().iterdir():
                file.unlink()
        return read_picture(path, *arguments, **options)

    monkeypatch.setattr(folder, "read_picture", read_while_others_tidy)
    found = load_folder(photos, "train", workers=0)
    assert len(reads) == 14
    assert torch.equal(found.images, expected.images)


def test_no_link_is_followed(tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "train-x.pixels").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        PixelFile(tmp_path / "train-x.pixels", SHAPE)
    assert (tmp_path / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_stack_gives_what_was_added_and_leaves_no_file(own_cache, on_disk):
    images = image_bytes(7)
    stack = Stack(7, SHAPE, on_disk)
    for image in images.mT.contiguous():
        stack.add(image.mT)
    found, mapping = stack.images()
    assert torch.equal(found, images)
    assert (mapping is not None) == on_disk
    assert not own_cache.exists() or not list((own_cache / "folders").iterdir())
    assert Stack(0, SHAPE, on_disk).images()[0].shape == (0, *SHAPE)


def test_a_disk_that_is_full_is_told(monkeypatch, own_cache):
    class Full:
        def write(self, content):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: Full())
    with pytest.raises(DataError, match=r"cannot write to the cache at .*No space left.*set SCALESTEER_CACHE"):
        Stack(1, SHAPE, True).add(image_bytes(1)[0])


# Folders


def test_a_folder_that_is_too_large_for_memory_gives_the_same_pictures(
    photos, small_memory, own_cache, caplog, monkeypatch
):
    monkeypatch.setattr(folder, "_BLOCK_BYTES", 3 * 3 * 16 * 16)
    found = {part: load_folder(photos, part, workers=0) for part in (*PARTS, None)}
    assert [len(found[part]) for part in PARTS] == [12, 12, 12]
    said = [m for m in messages(caplog) if "read from disk" in m]
    assert len(said) == 2  # with the training part, and with all
    assert said[0].endswith(f"38 pictures of 16 x 16 take 0.0 GiB, more than the 0.0 GiB that memory is used for: "
                            f"they are read from disk, in {own_cache / 'folders'}.")  # fmt: skip
    assert len(list((own_cache / "folders").glob("*.pixels"))) == 4
    monkeypatch.setattr(mapped, "MOST_BYTES", 1 << 30)
    for part, images in found.items():
        expected = load_folder(photos, part, workers=0)
        assert expected.mapped is None
        assert images.mapped is not None
        assert torch.equal(images.images, expected.images)
        assert torch.equal(images.labels, expected.labels)
        assert (images.about, images.paths) == (expected.about, expected.paths)
        assert (images.mean, images.std) == (expected.mean, expected.std)


@pytest.mark.parametrize("damage", ["nothing", "bit", "shortened", "removed", "record"])
def test_pictures_are_read_once_and_again_where_their_file_is_damaged(
    photos, small_memory, own_cache, monkeypatch, caplog, damage
):
    monkeypatch.setattr(folder, "_BLOCK_BYTES", 4 * 3 * 16 * 16)  # 14 pictures: blocks of 4, 4, 4 and 2
    first, reads = load_folder(photos, "train", workers=0), []
    expected = first.images.clone()
    (kept,) = (own_cache / "folders").glob("train-*.pixels")
    content = kept.read_bytes()
    if damage == "bit":
        kept.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
    elif damage == "shortened":
        kept.write_bytes(content[:-1])
    elif damage == "removed":
        kept.unlink()
    elif damage == "record":
        (own_cache / "folders" / f"{kept.stem}-4.safetensors").write_bytes(b"x")
    read_picture = folder.read_picture
    monkeypatch.setattr(folder, "read_picture", lambda path, *a, **k: reads.append(path) or read_picture(path, *a, **k))
    again = load_folder(photos, "train", workers=0)
    assert torch.equal(again.images, expected)
    assert again.about == first.about
    assert len(reads) in {"nothing": (0,), "bit": (4,), "shortened": (2, 4), "removed": (14,), "record": (4,)}[damage]
    assert any("made again" in message for message in messages(caplog)) == (damage != "nothing")
    assert kept.read_bytes() == content


def test_reading_that_was_interrupted_goes_on(photos, small_memory, monkeypatch):
    monkeypatch.setattr(folder, "_BLOCK_BYTES", 4 * 3 * 16 * 16)
    reads, read_picture = [], folder.read_picture

    def read_ten(path, *arguments, **options):
        if len(reads) == 10:
            raise KeyboardInterrupt
        reads.append(path)
        return read_picture(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "read_picture", read_ten)
        with pytest.raises(KeyboardInterrupt):
            load_folder(photos, "train", workers=0)
    monkeypatch.setattr(folder, "read_picture", lambda path, *a, **k: reads.append(path) or read_picture(path, *a, **k))
    assert len(load_folder(photos, "train", workers=0)) == 12
    assert len(reads) == 10 + 14 - 8


def test_a_cache_without_room_is_told_before_anything_is_read(photos, small_memory, own_cache, monkeypatch):
    size = 3 * 16 * 16
    room = [38 * size - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(0, 0, room[0]))
    monkeypatch.setattr(mapped, "_in_gib", lambda size: f"{size} bytes")
    with pytest.raises(DataError) as error:
        load_folder(photos, "train", workers=0)
    assert str(error.value) == (
        f"the pictures of {photos.images} take {38 * size} bytes on disk, and {own_cache / 'folders'} has room for "
        f"{38 * size - 1} bytes: delete what is old there (`scalesteer data list`), set SCALESTEER_CACHE to a "
        "directory with more, or choose a smaller `image_size` or fewer pictures."
    )
    assert not own_cache.exists()
    room[0] += 1
    load_folder(photos, "train", workers=0)
    room[0] = 12 * size
    load_folder(photos, "val", workers=0)  # of the others only what is asked for
    room[0] = 0
    load_folder(photos, "train", workers=0)  # it is there
    with pytest.raises(DataError, match=f"take {12 * size} bytes on disk"):
        load_folder(photos, "test", workers=0)
    next((own_cache / "folders").glob("train-*.pixels")).unlink()
    with pytest.raises(DataError, match=f"take {26 * size} bytes on disk"):  # for validation they are there
        load_folder(photos, "train", workers=0)


def test_pictures_that_change_while_they_are_read_are_an_error_and_kept_nowhere(photos, small_memory, monkeypatch):
    before, changed = load_folder(photos, "train", workers=0), []
    read_picture = folder.read_picture
    os.utime(os.path.join(photos.images, "train", "cat", "1.png"), (0, 0))  # so that all are read again

    def read_then_change(path, *arguments, **options):
        pixels = read_picture(path, *arguments, **options)
        if not changed:
            changed.append(path)
            Image.new("RGB", (16, 16)).save(path)
        return pixels

    with monkeypatch.context() as patch:
        patch.setattr(folder, "read_picture", read_then_change)
        with pytest.raises(DataError, match="1 pictures were changed, moved or removed while they were read"):
            load_folder(photos, "train", workers=0)
    after = load_folder(photos, "train", workers=0)
    differing = [path for path, a, b in zip(after.paths, after.images, before.images, strict=True) if not a.equal(b)]
    assert differing == changed


def test_the_cache_lists_such_files(photos, small_memory, own_cache, capsys):
    load_folder(photos, "val", workers=0)
    for command in ("list", "verify"):
        cli.main(["data", command])
        shown = capsys.readouterr().out.splitlines()
        assert [line for line in shown if re.search(r" 0\.0 MB  checked in use +folders/val-\w+\.pixels$", line)]


# Runs


def told(result):
    """What a run said, without what depends on the clock."""
    history = [{**entry, "seconds": 0} for entry in result["history"]]
    return {**result, "history": history, "seconds": 0}


@pytest.fixture
def data(request, tmp_path):
    """Options of a run and its images: those of a folder or of a dataset."""
    if request.param == "dataset":
        return {}, {"data": Stripes()}
    for i, image in enumerate(Stripes(kind="bytes").images):
        path = tmp_path / "stripes" / Stripes.classes[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(path)
    return {"images": str(tmp_path / "stripes")}, {}


@pytest.mark.parametrize("data", ["folder", "dataset"], indirect=True)
def test_a_run_from_disk_has_the_same_numbers_also_when_it_was_interrupted(data, tmp_path, monkeypatch):
    options, images = data
    run = configure(epochs=3, shift=1, flip=True, **options)
    given = {"device": "cpu", "model": Small, **images}
    expected, seen, make_update = train(run, tmp_path / "memory", **given), [], loop.make_update
    monkeypatch.setattr(mapped, "MOST_BYTES", 1000)

    def stopping(state, training, images, *arguments):
        seen.append(images.mapped is not None)
        update = make_update(state, training, images, *arguments)
        if len(seen) > 1:
            return update

        def update_or_stop(rows, rate):
            if (state.epoch, state.step) == (1, 2):
                raise KeyboardInterrupt
            return update(rows, rate)

        return update_or_stop

    monkeypatch.setattr(loop, "make_update", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "disk", **given)
    assert told(train(run, tmp_path / "disk", **given)) == told(expected)
    assert seen == [True, True]
    one, other = (load_model(tmp_path / name).state_dict() for name in ("memory", "disk"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert (tmp_path / "disk" / "split.csv").read_bytes() == (tmp_path / "memory" / "split.csv").read_bytes()


def test_the_images_of_the_next_step_are_asked_for_before_this_one_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "MOST_BYTES", 1000)
    told, prefetch, make_update = [], ImageSet.prefetch, loop.make_update

    def noting(*arguments):
        update = make_update(*arguments)
        return lambda rows, rate: (told.append(("step", rows.tolist())), update(rows, rate))[1]

    monkeypatch.setattr(
        ImageSet, "prefetch", lambda own, rows: told.append(("read", rows.tolist())) or prefetch(own, rows)
    )
    monkeypatch.setattr(loop, "make_update", noting)
    train(configure(epochs=1), tmp_path / "run", device="cpu", data=Stripes(), model=Small)
    steps = [i for i, (what, _) in enumerate(told) if what == "step"]
    assert len(steps) > 2
    for one, following in pairwise(steps):
        assert ("read", told[following][1]) in told[:one]


def test_a_dataset_without_room_is_told_before_an_item_is_read(monkeypatch, own_cache):
    class Unread(Stripes):
        def __getitem__(self, index):
            raise AssertionError(index)

    monkeypatch.setattr(mapped, "MOST_BYTES", 60 * 3 * SIDE * SIDE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(0, 0, 60 * 3 * SIDE * SIDE - 1))
    with pytest.raises(DataError, match=r"the pictures of stripes take .* on disk"):
        pack(Unread(), configure().data)
    assert not own_cache.exists()


def test_a_dataset_on_disk_is_divided_as_in_memory_and_leaves_no_file(monkeypatch, own_cache, caplog):
    spec = FolderSpec("stripes", (SIDE, SIDE))
    given = [Stripes(), {part: Stripes(20, i) for i, part in enumerate(PARTS)}]
    expected = [pack(one, spec) for one in given]
    monkeypatch.setattr(mapped, "MOST_BYTES", 60 * 3 * SIDE * SIDE - 1)
    found = [pack(one, spec) for one in given]
    assert sum("60 pictures of 12 x 12 take" in message for message in messages(caplog)) == 2
    assert not list((own_cache / "folders").iterdir())
    for one, other in zip(found, expected, strict=True):
        assert one.table() == other.table()
        for part in PARTS:
            assert one.parts[part].mapped is not None
            assert torch.equal(one.parts[part].images, other.parts[part].images)
            assert torch.equal(one.parts[part].labels, other.parts[part].labels)


@pytest.mark.gpu
def test_a_gpu_gets_the_images_batch_by_batch(tmp_path, monkeypatch):
    run = configure(epochs=2, precision="float32")
    expected = train(run, tmp_path / "memory", device="cuda", data=Stripes(), model=Small)
    monkeypatch.setattr(mapped, "MOST_BYTES", 1000)
    found = train(run, tmp_path / "disk", device="cuda", data=Stripes(), model=Small)
    for one, other in zip(found["history"], expected["history"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
