"""Folders of pictures: how they are found, divided, read and kept, and what is said of those that are no good."""

import csv
import hashlib
import io
import multiprocessing
import os
import subprocess
import sys
import unicodedata
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalesteer.app import folder as module
from scalesteer.app.folder import FolderSpec, load_folder, scan_folder
from scalesteer.app.pictures import read_picture
from scalesteer.files import DataError

PARTS = ("train", "val", "test")


def paint(path, shade=0, size=(16, 16), **options):
    """A picture of noise around a shade, so that no two are alike."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(zlib.crc32(os.fsencode(path))).integers(0, 60, (*size[::-1], 3))
    Image.fromarray((noise + shade).clip(0, 255).astype(np.uint8)).save(path, **options)
    return path


def make(root, classes=("cat", "dog"), count=12, parts=("",)):
    for part in parts:
        for label, name in enumerate(classes):
            for i in range(count):
                paint(root / part / name / f"{i}.png", 100 * label)
    return root


def load(spec, part, **options):
    return load_folder(spec, part, workers=0, **options)


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def _listen(caplog):
    caplog.set_level("INFO", logger="scalesteer")


def test_every_picture_of_a_folder_is_there_once_as_it_is_read_alone(tmp_path):
    spec = FolderSpec(str(make(tmp_path / "photos")), (20, 24))
    scanned, seen = scan_folder(spec), 0
    assert scanned.classes == ("cat", "dog")
    for part in PARTS:
        images = load(spec, part)
        chosen = [picture for picture in scanned.pictures if picture.part == part]
        assert images.images.shape == (len(chosen), 3, 20, 24)
        assert torch.equal(images.scales, torch.ones(len(chosen)))
        for pixels, label, picture in zip(images.images, images.labels, chosen, strict=True):
            assert np.array_equal(pixels, read_picture(picture.path, 3, (20, 24)))
            assert images.about["classes"][label] == picture.label == Path(picture.path).parent.name
        seen += len(images)
    assert seen == len({picture.path for picture in scanned.pictures}) == 24


def test_grey_images_have_one_channel_and_fit_is_passed_on(tmp_path):
    for i in range(12):
        paint(tmp_path / "ab"[i % 2] / f"{i}.png", 100, (40, 10))
    (padded, resized) = (load(FolderSpec(str(tmp_path), (10, 10), fit, True), "train") for fit in ("pad", "resize"))
    assert padded.images.shape[1:] == resized.images.shape[1:] == (10, 10)
    path = next(p for p in scan_folder(FolderSpec(str(tmp_path))).pictures if p.part == "train").path
    assert np.array_equal(padded.images[0], read_picture(path, 1, (10, 10)))
    assert np.array_equal(resized.images[0], read_picture(path, 1, (10, 10), "resize"))


def test_the_split_follows_the_hash_of_the_path_and_stays_when_pictures_are_added(tmp_path):
    spec = FolderSpec(str(make(tmp_path, count=100)))
    before = {picture.name: picture.part for picture in scan_folder(spec).pictures}
    for name, part in before.items():
        share = int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) / 16**16
        assert part == ("train" if share < 0.7 else "val" if share < 0.85 else "test")
    counts = Counter(before.values())
    assert counts["train"] == pytest.approx(140, abs=25)
    assert counts["val"] == pytest.approx(30, abs=18)
    for i in range(50):
        paint(tmp_path / "dog" / f"new {i}.png")
    paint(tmp_path / "ape" / "0.png")
    after = {picture.name: picture.part for picture in scan_folder(spec).pictures}
    assert len(after) == 251
    assert before.items() <= after.items()


def test_of_a_class_that_is_drawn_out_of_training_the_picture_with_the_lowest_hash_is_put_back(tmp_path):
    make(tmp_path, count=20)
    digests = {f"ox/{i}.png": hashlib.sha256(f"ox/{i}.png".encode()).hexdigest() for i in range(60)}
    unlucky = sorted((name for name in digests if int(digests[name][:2], 16) >= 0.72 * 256), key=digests.__getitem__)
    assert len(unlucky) > 5
    for name in unlucky:
        paint(tmp_path / name)
    found = scan_folder(FolderSpec(str(tmp_path)))
    parts = {picture.name: picture.part for picture in found.pictures}
    assert [name for name in unlucky if parts[name] == "train"] == unlucky[:1]
    assert found.notes == ("Classes drawn out of training, of which one picture was put back (1): ox.",)
    assert f"{unlucky[0]},ox,train,".encode() in found.table()
    assert not scan_folder(FolderSpec(str(tmp_path)), known_classes=True).notes  # nothing is trained
    (lucky, *_) = (name for name in digests if int(digests[name][:2], 16) < 0.69 * 256)
    paint(tmp_path / lucky)  # now it is not needed
    found = scan_folder(FolderSpec(str(tmp_path)))
    assert not found.notes
    assert [p.name for p in found.pictures if p.label == "ox" and p.part == "train"] == [lucky]


def test_a_class_that_its_user_kept_out_of_training_stays_out(tmp_path):
    make(tmp_path, count=3, parts=PARTS)
    paint(tmp_path / "test" / "ox" / "0.png")
    spec = FolderSpec(str(tmp_path), (16, 16))
    assert [p.part for p in scan_folder(spec).pictures if p.label == "ox"] == ["test"]
    with pytest.raises(DataError, match="has no pictures of ox for train: add pictures"):
        load(spec, "train")


def test_all_pictures_of_known_classes_are_loaded_whatever_their_parts(tmp_path, caplog):
    root = make(tmp_path, ("dog",), 20)
    paint(root / "dog" / "broken.png").write_bytes(b"x")
    (root / "dog" / "notes.txt").write_text("mine")
    images = load(FolderSpec(str(root), (16, 16)), None, classes=("cat", "dog"))
    assert images.labels.tolist() == [1] * 20
    assert sorted(images.paths) == sorted(str(root / "dog" / f"{i}.png") for i in range(20))
    for path, pixels in zip(images.paths, images.images, strict=True):
        assert np.array_equal(pixels, read_picture(path, 3, (16, 16)))
    said = messages(caplog)
    assert any("broken.png cannot be read" in line for line in said)
    assert any("notes.txt" in line for line in said)
    assert "1 of 21 pictures cannot be read and are left out." in said
    assert not any("for train" in line for line in said)
    assert images.first(3).paths == images.paths[:3]


def test_a_list_for_a_model_that_knows_the_classes_needs_no_training_pictures(tmp_path):
    paint(tmp_path / "0.png")
    spec = write_list(tmp_path / "list.csv", "path,label,part,size\n0.png,dog,test,2.5\n")
    for part in ("test", None):
        images = load(spec, part, classes=("cat", "dog"))
        assert (images.labels.tolist(), images.scales.tolist()) == ([1], [2.5])
    with pytest.raises(DataError, match="the model does not know: dog; it knows ape, cat"):
        load(spec, None, classes=("ape", "cat"))


def test_the_split_does_not_depend_on_how_a_file_system_writes_letters(tmp_path):
    names = [unicodedata.normalize(form, "bär/Größe 1.png") for form in ("NFC", "NFD")]
    assert names[0] != names[1]
    found = []
    for i, name in enumerate(names):
        paint(tmp_path / str(i) / name)
        paint(tmp_path / str(i) / "x" / "y.png")
        pictures = scan_folder(FolderSpec(str(tmp_path / str(i)))).pictures
        found.append([(picture.label, picture.part) for picture in pictures])
    assert found[0] == found[1]


def test_the_first_pictures_of_a_part_are_of_all_classes(tmp_path):
    images = load(FolderSpec(str(make(tmp_path, count=40)), (16, 16)), "train")
    assert 4 <= int(images.labels[:20].sum()) <= 16


@pytest.mark.parametrize(
    ("there", "drawn"), [(PARTS, ()), (("Train", "validation", "TEST"), ()), (("train", "test"), ("val",)),
                         (("train", "valid"), ("test",))]
)  # fmt: skip
def test_folders_train_val_and_test_are_taken_as_they_are_and_a_missing_one_is_drawn_from_train(tmp_path, there, drawn):
    make(tmp_path, count=30, parts=there)
    paint(tmp_path / "train" / "none.png")
    (tmp_path / "README.txt").write_text("mine")
    found = scan_folder(FolderSpec(str(tmp_path)))
    assert (found.classes, found.drawn) == (("cat", "dog"), drawn)
    for picture in found.pictures:
        top = module.PART_NAMES[picture.name.split("/")[0].lower()]
        assert picture.part == top or (top == "train" and picture.part in drawn)
    counts = found.counts()
    assert counts["train"] + sum(counts[part] for part in drawn) == 60
    assert all(counts[part] == 60 for part in PARTS[1:] if part not in drawn)
    assert all(0 < counts[part] < 25 for part in drawn)
    assert all("none.png" in note for note in found.notes)


def test_a_class_may_be_called_train(tmp_path):
    found = scan_folder(FolderSpec(str(make(tmp_path, ("train", "car", "bus"), 3))))
    assert found.classes == ("bus", "car", "train")
    assert found.drawn == PARTS


def test_folders_beside_train_and_test_are_named(tmp_path):
    make(tmp_path, count=2, parts=("train", "test", "old"))
    found = scan_folder(FolderSpec(str(tmp_path)))
    assert len(found.pictures) == 8
    assert found.notes == ("Folders beside train, val and test are left out: old.",)


def test_what_is_no_picture_is_left_out_and_named(tmp_path, caplog):
    root = make(tmp_path / "my photos Ω")
    paint(root / "dog" / "deep" / "er" / "ein Bär & 50 % 🐻.jpeg")
    (root / "dog" / "notes.txt").write_text("which dogs")
    (root / "dog" / "new.heic").write_bytes(b"x")
    (root / "dog" / ".hidden.png").write_bytes(b"x")
    (root / ".cache" / "a").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "only text").mkdir()
    (root / "only text" / "a.txt").write_text("a")
    paint(root / "alone.png")
    (root / "dog" / "up").symlink_to(root, target_is_directory=True)
    (root / "dog" / "self").symlink_to("self")
    (root / "dog" / "nowhere.png").symlink_to("gone.png")
    spec = FolderSpec(str(root), (16, 16))
    found = scan_folder(spec)
    assert found.classes == ("cat", "dog")
    assert len(found.pictures) == 24 + 2
    total = sum(len(load(spec, part)) for part in PARTS)
    assert total == 24 + 1
    said = "\n".join(messages(caplog))
    for message in (
        "Folders without pictures, which are no classes (2): empty, only text.",
        "Pictures in no class folder, left out (1): alone.png.",
        "Files left out, since they do not end in .png, ",
        ".pnm (4): dog/new.heic, dog/notes.txt, dog/self, only text/a.txt.",
        "Links to folders that were found already, not followed (1): dog/up.",
        "nowhere.png cannot be read: No such file or directory.",
        "2 classes; pictures: ",
        "(val and test drawn by their paths)",
    ):
        assert message in said
    assert "hidden" not in said


def test_a_folder_is_found_through_a_link_only_if_there_is_no_other_way(tmp_path):
    elsewhere = make(tmp_path / "elsewhere", ("eel",), 3)
    make(tmp_path / "photos", ("cat", "dog"), 3)
    (tmp_path / "photos" / "bird").symlink_to(elsewhere / "eel", target_is_directory=True)
    for here, there in (("cat", "dog"), ("dog", "cat")):
        (tmp_path / "photos" / here / "more").symlink_to(tmp_path / "photos" / there, target_is_directory=True)
    found = scan_folder(FolderSpec(str(tmp_path / "photos")))
    assert Counter(picture.label for picture in found.pictures) == {"bird": 3, "cat": 3, "dog": 3}
    assert found.notes == ("Links to folders that were found already, not followed (2): cat/more, dog/more.",)


def test_pictures_of_every_kind_are_read_and_broken_ones_are_counted_and_named(tmp_path, caplog):
    root, rng = tmp_path / "photos", np.random.default_rng(0)
    wide = Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    (root / "train" / "odd").mkdir(parents=True)
    good = {
        "cmyk.jpg": wide.convert("CMYK"), "palette.gif": wide.convert("P"), "alpha.png": wide.convert("RGBA"),
        "sixteen.png": Image.fromarray(rng.integers(0, 65536, (20, 30), np.uint16)), "page.tiff": wide,
        "w.webp": wide, "b.bmp": wide, "large.png": Image.new("L", (10_000, 5_000), 90),
    }  # fmt: skip
    for name, image in good.items():
        image.save(root / "train" / "odd" / name)
    wide.save(root / "train" / "odd" / "turned.jpg", exif=exif)
    wide.save(root / "train" / "odd" / "moving.gif", save_all=True, append_images=[wide.rotate(180)])
    make(root, ("even", "odd"), 2, parts=PARTS)
    whole = (root / "train" / "even" / "0.png").read_bytes()
    (root / "train" / "even" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (root / "train" / "even" / "text.jpg").write_text("not a picture")
    (root / "train" / "even" / "nothing.png").write_bytes(b"")
    spec = FolderSpec(str(root), (24, 32))
    images = load(spec, "train")
    assert Counter(images.labels.tolist()) == {0: 2, 1: 2 + len(good) + 1}
    chosen = [
        p
        for p in scan_folder(spec).pictures
        if p.part == "train" and Path(p.path).stem not in ("cut", "text", "nothing", "moving")
    ]
    for picture, pixels in zip(chosen, images.images, strict=True):
        assert np.array_equal(pixels, read_picture(picture.path, 3, (24, 32)))
    assert images.about["broken"] == 4
    for _ in range(2):  # also when they come from the cache
        said = messages(caplog)
        assert "4 of 17 pictures for train cannot be read and are left out." in said
        for name in ("even/cut.png", "even/text.jpg", "even/nothing.png", "odd/moving.gif"):
            assert sum(name in message for message in said) == 1
        caplog.clear()
        load(spec, "train")


def test_a_class_whose_pictures_are_all_broken_is_an_error_that_names_it(tmp_path):
    root = make(tmp_path, ("cat", "dog"), 3, parts=PARTS)
    for path in (root / "train" / "dog").iterdir():
        path.write_bytes(b"GIF89a")
    with pytest.raises(DataError, match=r"has no pictures of dog for train, after 3 that cannot be read \(.*dog/"):
        load(FolderSpec(str(root)), "train")


def test_a_class_that_is_not_tested_is_named(tmp_path, caplog):
    root = make(tmp_path, ("cat", "dog"), 3, parts=PARTS)
    for path in (root / "test" / "dog").iterdir():
        path.unlink()
    assert load(FolderSpec(str(root)), "test").labels.tolist() == [0, 0, 0]
    assert "Classes without pictures for test, of which nothing is known (1): dog." in messages(caplog)


def test_labels_can_be_those_of_a_model(tmp_path):
    root = make(tmp_path, ("cat", "dog"), 3, parts=PARTS)
    images = load(FolderSpec(str(root)), "test", classes=("ape", "dog", "cat"))
    assert sorted(images.labels.tolist()) == [1, 1, 1, 2, 2, 2]
    assert images.about["classes"] == ["ape", "dog", "cat"]
    with pytest.raises(DataError, match="classes that the model does not know: dog"):
        load(FolderSpec(str(root)), "test", classes=("ape", "cat"))


def write_list(path, text):
    path.write_text(text, encoding="utf-8")
    return FolderSpec(str(path), (16, 16))


def test_a_list_names_pictures_labels_parts_and_sizes(tmp_path, caplog):
    make(tmp_path / "data", ("a", "b"), 4)
    lines = [f'data/{"ab"[i % 2]}/{i // 2}.png,"class {i % 2}, really",{PARTS[i // 3 % 3]},{0.5 + i}' for i in range(8)]
    lines.append(f"{tmp_path}/data/a/0.png,{lines[0].split(',', 1)[1]}")  # the same file once more
    spec = write_list(tmp_path / "list.csv", "\ufeffpath,label,part,size\n" + "\n".join(lines) + "\n")
    found = scan_folder(spec)
    assert found.classes == ("class 0, really", "class 1, really")
    assert found.drawn == ()
    sizes = {part: sorted(load(spec, part).scales.tolist()) for part in PARTS}
    assert sizes == {"train": [0.5, 1.5, 2.5], "val": [3.5, 4.5, 5.5], "test": [6.5, 7.5]}
    twice = f"Pictures that are in the list more than once, and count once (1): {tmp_path}/data/a/0.png."
    assert found.notes == (twice,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the first line must name the columns path and label"),
        ("a/0.png,cat\n", "got 'a/0.png, cat', without label and path"),
        ("path,lable\na.png,cat\n", "without label"),
        ("path,label\na/0.png,\n", "line 2: path and label must not be empty"),
        ("path,label\na/0.png,cat\na/0.png,dog\n", "line 3: a/0.png has the label 'dog', and 'cat' in line 2"),
        ("path,label,part\na/0.png,cat,tset\n", "part must be train, val or test .got 'tset'"),
        ("path,label,part\na/0.png,cat,val\na/1.png,dog,test\n", "names pictures for test, val, but none for train"),
        ("path,label,size\na/0.png,cat,big\n", "size must be a positive number .got 'big'"),
        ("path,label,size\na/0.png,cat,nan\n", "size must be a positive number .got 'nan'"),
        ("path,label\na/0.png,cat\n", "has pictures of 1 class, and two are needed: a column `label`"),
        ('path,label\n"a', "cannot be read as a list of pictures"),
        ("path,label\n" + "a" * 200_000 + ",cat\n", "cannot be read as a list of pictures"),
    ],
)
def test_a_bad_list_is_an_error_that_names_the_line(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        scan_folder(write_list(tmp_path / "list.csv", text))


@pytest.mark.parametrize("name", ["a\0b.png", "gone.png", ".", "/dev/zero"])
def test_a_list_with_a_path_that_is_no_picture_names_it(tmp_path, caplog, name):
    make(tmp_path, ("a", "b"), 2)
    lines = [f"{label}/{i}.png,{label},{part}" for label in "ab" for i, part in enumerate(("train", "test"))]
    spec = write_list(tmp_path / "list.csv", "\n".join(["path,label,part", *lines, f'"{name}",a,test']))
    assert len(load(spec, "test")) == 2
    assert sum("cannot be read" in message for message in messages(caplog)) == 2  # itself and the count


def test_pictures_of_a_group_stay_in_one_part(tmp_path):
    make(tmp_path, count=60)
    lines = [f"{name}/{i}.png,{name},patient {i // 4}" for name in ("cat", "dog") for i in range(60)]
    spec = write_list(tmp_path / "list.csv", "path,label,group\n" + "\n".join(lines))
    scanned = scan_folder(spec)
    parts = {}
    for picture in scanned.pictures:
        parts.setdefault(picture.group, set()).add(picture.part)
    assert len(parts) == 15
    assert all(len(own) == 1 for own in parts.values())
    assert {part for own in parts.values() for part in own} == set(PARTS)
    for group, own in parts.items():  # by its name alone
        share = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64
        assert own == {"train" if share < 0.7 else "val" if share < 0.85 else "test"}
    (tmp_path / "split.csv").write_bytes(scanned.table())
    again = scan_folder(FolderSpec(str(tmp_path / "split.csv")))
    assert {p.name: (p.part, p.group) for p in again.pictures} == {p.name: (p.part, p.group) for p in scanned.pictures}


def test_with_a_picture_that_is_put_back_into_training_goes_its_group(tmp_path):
    make(tmp_path, count=9)
    lines = [f"cat/{i}.png,cat,cat {i}" for i in range(9)]
    out = next(n for n in map(str, range(99)) if hashlib.sha256(f"g{n}".encode()).digest()[0] > 0.9 * 256)  # for test
    lines += [f"dog/{i}.png,dog,g{out}" for i in range(4)] + ["cat/8.png,cat,cat 8"]
    spec = write_list(tmp_path / "list.csv", "path,label,group\n" + "\n".join(lines))
    scanned = scan_folder(spec)
    assert {picture.part for picture in scanned.pictures if picture.label == "dog"} == {"train"}
    assert any("of which one group was put back (1): dog" in note for note in scanned.notes)


def test_a_list_may_not_divide_a_group(tmp_path):
    make(tmp_path, count=2)
    rows = ["cat/0.png,cat,train,a", "cat/1.png,cat,test,a", "dog/0.png,dog,train,b", "dog/1.png,dog,val,c"]
    spec = write_list(tmp_path / "list.csv", "path,label,part,group\n" + "\n".join(rows))
    with pytest.raises(DataError, match=r"the pictures of a group must be in one part \(group 'a' is in"):
        scan_folder(spec)


def test_the_table_of_the_split_can_be_used_as_a_list(tmp_path):
    make(tmp_path, count=20)
    found = scan_folder(FolderSpec(str(tmp_path)))
    rows = list(csv.DictReader(io.StringIO(found.table().decode())))
    assert [row["path"] for row in rows] == sorted(picture.name for picture in found.pictures)
    assert int(rows[0]["bytes"]) == (tmp_path / rows[0]["path"]).stat().st_size
    (tmp_path / "split.csv").write_bytes(found.table().replace(b"\ncat/", b"\n./cat/"))
    again = scan_folder(FolderSpec(str(tmp_path / "split.csv")))
    assert again.pictures == found.pictures


def test_the_table_of_the_split_keeps_the_sizes_of_a_list(tmp_path):
    make(tmp_path, ("a", "b"), 5)
    lines = [f"{label}/{i}.png,{label},{0.5 + i}" for label in "ab" for i in range(5)]
    found = scan_folder(write_list(tmp_path / "list.csv", "\n".join(["path,label,size", *lines])))
    (tmp_path / "split.csv").write_bytes(found.table())
    again = scan_folder(FolderSpec(str(tmp_path / "split.csv")))
    assert sorted(again.pictures) == sorted(found.pictures)
    assert {picture.size for picture in again.pictures} == {0.5, 1.5, 2.5, 3.5, 4.5}


def test_names_that_are_no_text_are_replaced_in_classes_and_kept_in_paths(tmp_path):
    odd = os.fsdecode(b"caf\xe9")
    make(tmp_path, (odd, "tea"), 3, parts=PARTS)
    found = scan_folder(FolderSpec(str(tmp_path)))
    assert found.classes == ("caf\ufffd", "tea")
    assert len(load(FolderSpec(str(tmp_path), (16, 16)), "train")) == 6
    assert b"train/caf\xe9/0.png," in found.table()


@pytest.mark.parametrize(
    ("limit", "message"),
    [("LONGEST_NAME", "a name of at most 2 characters .got '...'"), ("MOST_CLASSES", "3 classes, and the limit is 2")],
)
def test_more_than_a_model_can_tell_of_is_refused(tmp_path, monkeypatch, limit, message):
    make(tmp_path, ("cat", "dog", "ox"), 1)
    monkeypatch.setattr(module, limit, 2)
    with pytest.raises(DataError, match=message):
        scan_folder(FolderSpec(str(tmp_path)))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"\(got .*pipe, which is neither of them\)"):
        scan_folder(FolderSpec(str(tmp_path / "pipe")))


def test_a_folder_without_two_classes_says_what_is_needed(tmp_path):
    with pytest.raises(DataError, match="which is not there"):
        scan_folder(FolderSpec(str(tmp_path / "none")))
    with pytest.raises(DataError, match=r"has pictures of 0 classes, and two are needed: .*/cats, .*/dogs"):
        scan_folder(FolderSpec(str(tmp_path)))
    paint(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"0 classes.* Pictures in no class folder, left out \(1\): a.png"):
        scan_folder(FolderSpec(str(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": ""}, "`images` must be the path"),
        ({"images": 3}, "`images` must be the path"),
        ({"image_size": 0}, "`image_size` must be at least 1"),
        ({"image_size": (64.0, 64)}, "`image_size` must be an integer"),
        ({"fit": "stretch"}, "`fit` must be one of 'pad', 'crop', 'resize'"),
        ({"grey": 1}, "`grey` must be True or False"),
    ],
)
def test_a_bad_spec_names_the_argument(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        FolderSpec(**{"images": "x", **arguments})


def test_pictures_come_from_the_cache_until_one_changes_and_a_damaged_file_is_made_again(
    tmp_path, own_cache, monkeypatch
):
    root, reads = make(tmp_path / "photos", parts=PARTS, count=3), []
    bitmap = paint((root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / "0.bmp"))
    spec = FolderSpec(str(root), (16, 16))
    monkeypatch.setattr(module, "read_picture", lambda path, *a, **k: reads.append(path) or read_picture(path, *a, **k))
    first = load(spec, "train")
    assert len(reads) == 6
    second = load(spec, "train")
    assert len(reads) == 6
    assert torch.equal(first.images, second.images)
    assert first.about == second.about
    kept = next((own_cache / "folders").glob("*.safetensors"))
    content = bytearray(kept.read_bytes())
    content[-5] ^= 1
    kept.write_bytes(content)
    assert torch.equal(load(spec, "train").images, first.images)
    assert len(reads) == 12
    size = bitmap.stat().st_size
    paint(bitmap, 150)
    assert bitmap.stat().st_size == size
    changed = load(spec, "train")
    assert changed.about["digest"] != first.about["digest"]
    assert len(reads) == 18
    load(FolderSpec(str(root), (17, 16)), "train")
    assert len(reads) == 24


def test_many_pictures_are_kept_in_several_files_with_the_same_result(tmp_path, monkeypatch, own_cache):
    root = make(tmp_path / "photos", parts=PARTS, count=4)
    for i in range(4):
        (root / "train" / "cat" / f"broken {i}.png").write_bytes(b"x")
    spec = FolderSpec(str(root), (16, 16))
    whole = load(spec, "train")
    monkeypatch.setattr(module, "_BLOCK_BYTES", 2 * 3 * 16 * 16)
    parts = load(spec, "train")
    assert len(list((own_cache / "folders").glob("*.safetensors"))) == 1 + 6
    assert torch.equal(whole.images, parts.images)
    assert torch.equal(whole.labels, parts.labels)


def read_or_die(path):
    if path.name == "4.png" and multiprocessing.parent_process() is not None:
        os._exit(1)
    return module._read_one(FolderSpec("x", 16), (path, 0.0))


def test_what_a_dying_process_has_not_read_is_read_in_this_one(tmp_path, caplog):
    paths = [paint(tmp_path / f"{i}.png", 20 * i) for i in range(8)]
    paths[2].write_bytes(b"x")
    state = torch.get_rng_state()
    results = list(module.read_all(paths, read_or_die, 1))
    assert [isinstance(result, str) for result in results] == [path == paths[2] for path in paths]
    for path, pixels in zip(paths, results, strict=True):
        assert isinstance(pixels, str) or np.array_equal(pixels, read_picture(path, 3, (16, 16)))
    assert [m for m in messages(caplog) if "terminated abruptly" in m and m.endswith("going on with one.")]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_worker_processes_read_the_same(tmp_path, monkeypatch):
    root = make(tmp_path / "photos", parts=PARTS, count=20)
    (root / "train" / "cat" / "broken.png").write_bytes(b"x")
    spec = FolderSpec(str(root), (16, 16))
    alone = load(spec, "train")
    monkeypatch.setenv("SCALESTEER_CACHE", str(tmp_path / "other"))
    together = load_folder(spec, "train", workers=2)
    assert torch.equal(alone.images, together.images)
    assert alone.about == together.about


@pytest.mark.slow
def test_a_script_that_cannot_be_begun_again_reads_in_its_own_process(tmp_path):
    root = make(tmp_path / "photos", parts=PARTS, count=2)
    script = tmp_path / "script.py"
    script.write_text(
        "from scalesteer.app.folder import FolderSpec, load_folder\n"
        "if __name__ == '__mp_main__': raise SystemExit(3)\n"
        f"print(len(load_folder(FolderSpec({str(root)!r}), 'train', workers=1)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout == "4\n"
    assert "going on with one" in done.stderr


def test_few_bytes_are_read_without_other_processes(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "read_all", lambda paths, read, workers: asked.append(workers) or map(read, paths))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    root = make(tmp_path, parts=PARTS, count=2)
    load_folder(FolderSpec(str(root)), "train")
    monkeypatch.setattr(module, "WORKER_BYTES", 1)
    load_folder(FolderSpec(str(root)), "val")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1), raising=False)
    load_folder(FolderSpec(str(root)), "test")
    assert asked == [0, 4, 0]


def test_reading_says_how_far_it_is_without_a_terminal(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module.files, "LOG_EVERY_S", 0)
    load(FolderSpec(str(make(tmp_path, parts=PARTS, count=2))), "val")
    assert messages(caplog)[:4] == [f"reading val: {i} of 4 pictures" for i in range(1, 5)]
