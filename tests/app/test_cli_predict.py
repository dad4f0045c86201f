"""The command `predict`, on real files with real small networks."""

import csv
import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalesteer import app as training
from scalesteer import create_model, files, save_pretrained
from scalesteer.app import cli
from scalesteer.app import predict as predicting
from scalesteer.app.pictures import read_picture
from scalesteer.models.network import Task

CLASSES = ("Kätzchen", "dog, wet", "none")


def scalesteer(capsys, *argv):
    code = cli.main([str(word) for word in argv])
    return code, *capsys.readouterr()


def save_model(folder, name, dataset, **options):
    """A network with its first weights."""
    return save_pretrained(create_model(name, dataset, **options), folder / "network")


@pytest.fixture
def own(monkeypatch):
    """The same command with a network that was trained on a user's pictures of three classes."""
    model = create_model(
        "pooled-cnn", in_chans=3, num_classes=3, image_size=(24, 32), channels=(0.5, 1.0), widths=(2, 3), kernel_size=3
    ).eval()
    model.task = Task(3, 3, (24, 32), CLASSES, "crop", "surroundings")
    monkeypatch.setattr(training, "load_model", lambda path: model)
    return model


@pytest.fixture
def photos(tmp_path):
    """A folder with pictures of many kinds, one of them broken, and a link back to itself."""
    folder, draw = tmp_path / "my photos", np.random.default_rng(0)
    for name in ("b/2.webp", "b/1.png", "a.tif", "ä.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (40, 30, 3), np.uint8)).save(folder / name)
    (folder / "b" / "broken.png").write_text("text")
    (folder / "b" / "loop").symlink_to(folder, target_is_directory=True)
    return folder


def test_folder_is_classified_into_a_table(own, photos, capsys, caplog, tmp_path):
    table = tmp_path / "new" / "out.csv"
    code, out, err = scalesteer(capsys, "predict", "RUN", photos, "--csv", table, "--device", "cpu")
    assert (code, out) == (2, f"4 pictures: {table}\n")
    assert err.splitlines() == ["scalesteer: 1 of 5 images could not be used."]
    assert [m for m in caplog.messages if "broken.png cannot be read" in m] == caplog.messages
    with open(table, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["picture"] for row in rows] == [
        f"{photos}/{name}" for name in ("a.tif", "b/1.png", "b/2.webp", "ä.jpg")
    ]
    for row in rows:
        x = torch.from_numpy(read_picture(row["picture"], 3, (24, 32), "crop"))[None] / 255
        with torch.no_grad():
            logits, size = own(x, return_scales=True)
        assert (row["class"], row["label"]) == (CLASSES[int(logits.argmax())], str(int(logits.argmax())))
        assert float(row["confidence"]) == pytest.approx(float(logits.softmax(1).max()), abs=1e-6)
        assert float(row["size"]) == pytest.approx(float(size), abs=1e-4)
        assert list(row) == ["picture", "class", "label", "confidence", "size"]  # what this network can say
    assert [path.name for path in table.parent.iterdir()] == ["out.csv"]


def test_lines_of_json(own, photos, capsys):
    code, out, _ = scalesteer(capsys, "predict", "RUN", photos / "b" / "1.png", photos, "--json")
    assert code == 2
    records = [json.loads(line) for line in out.splitlines()]
    assert [Path(record["picture"]).name for record in records] == ["1.png", "a.tif", "2.webp", "ä.jpg"]  # once each
    assert all(record["class"] == CLASSES[record["label"]] and 0 < record["confidence"] <= 1 for record in records)


def test_lines_for_a_reader(own, photos, capsys):
    code, out, err = scalesteer(capsys, "predict", "RUN", photos / "ä.jpg")
    assert (code, err) == (0, "")
    name, _, said = out.partition(": ")
    assert name == f"{photos}/ä.jpg"
    assert any(said.startswith(f"class {known}, confidence ") for known in CLASSES)


def test_name_that_is_no_unicode_keeps_its_bytes(own, photos, capsys, tmp_path):
    name = os.fsencode(photos) + b"/b/\xff\xfe.png"
    (photos / "b" / "1.png").rename(os.fsdecode(name))
    assert scalesteer(capsys, "predict", "RUN", photos, "--csv", tmp_path / "x.csv", "--json")[0] == 2
    assert name in (tmp_path / "x.csv").read_bytes()


def test_names_cannot_steer_the_terminal(own, photos, capsys, caplog):
    (photos / "b" / "broken.png").rename(photos / "b" / "\x1b[2J\nbroken.png")
    (photos / "a.tif").rename(photos / "\x1b[31m.tif")
    _, out, _ = scalesteer(capsys, "predict", "RUN", photos)
    assert len(out.splitlines()) == 4
    assert not any(character in text for character in "\x1b\n" for text in (*out.splitlines(), *caplog.messages))


def test_model_of_a_dataset_reads_pictures_too(photos, capsys, tmp_path):
    options = {"channels": (0.5, 1.0), "widths": (2, 3, 3), "kernel_size": 3}
    checkpoint = save_model(tmp_path, "pooled-cnn", "rescaled-cifar10", **options)
    paths = [photos / "b" / "1.png", photos / "b" / "2.webp"]
    code, out, _ = scalesteer(capsys, "predict", checkpoint, *paths, "--device", "cpu")
    assert code == 0
    assert [line.partition(": class ")[0] for line in out.splitlines()] == [str(path) for path in paths]


def test_maps_are_drawn_beside_the_pictures(own, photos, capsys, tmp_path):
    code, _, err = scalesteer(capsys, "predict", "RUN", photos, "--save-maps", tmp_path / "maps")
    assert (code, len(err.splitlines())) == (2, 1)
    drawn = sorted(str(p.relative_to(tmp_path / "maps")) for p in (tmp_path / "maps").rglob("*") if p.is_file())
    assert drawn == ["a.tif.png", "b/1.png.png", "b/2.webp.png", "ä.jpg.png"]
    with Image.open(tmp_path / "maps" / "a.tif.png") as sheet:
        assert (sheet.format, sheet.width) == ("PNG", 18 + 3 * (32 * 12 + 18))
        seen = np.asarray(sheet)[37 : 37 + 24 * 12 : 12, 18 : 18 + 32 * 12 : 12]
    np.testing.assert_array_equal(seen, read_picture(photos / "a.tif", 3, (24, 32), "crop").transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--csv {photos}", "cannot write {photos} (it is a directory)."),
        ("--csv {photos}/a.tif/x.csv", "cannot write {photos}/a.tif/x.csv (File exists)."),
        ("--device cuda:99", "cuda:99"),
        ("{photos}/empty", "{photos}/empty holds no pictures"),
    ],
)
def test_mistakes_are_told_before_any_work(own, photos, capsys, words, message):
    (photos / "empty").mkdir()
    own.register_forward_pre_hook(lambda *_: pytest.fail("the network was asked"))
    code, out, err = scalesteer(capsys, "predict", "RUN", photos, *(w.format(photos=photos) for w in words.split()))
    assert (code, out) == (2, "")
    assert message.format(photos=photos) in err
    assert err.count("\n") == 1


def test_network_without_maps_is_refused_before_any_work(photos, capsys, tmp_path):
    path = save_model(tmp_path, "plain-cnn", "mnist-scale")
    code, out, err = scalesteer(capsys, "predict", path, photos, "--save-maps", tmp_path / "maps")
    assert (code, out) == (2, "")
    assert "this network has no map of classes" in err
    assert not (tmp_path / "maps").exists()


def test_interrupted_table_leaves_the_old_one(own, photos, capsys, tmp_path):
    table = tmp_path / "out.csv"
    table.write_text("old")
    count = iter(range(2))

    def stop(*_):
        if next(count):
            raise KeyboardInterrupt

    own.register_forward_hook(stop)
    Image.new("RGB", (5000, 5000)).save(photos / "z.bmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicting, "READ_AHEAD", 1)
        assert scalesteer(capsys, "predict", "RUN", photos, "--csv", table)[0] == 130
    assert table.read_text() == "old"
    assert not list(tmp_path.glob(".out*"))


def test_log_lines_tell_the_progress_without_a_terminal(own, photos, capsys, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "LOG_EVERY_S", 0)
    scalesteer(capsys, "predict", "RUN", photos, "--csv", tmp_path / "x.csv")
    assert [m for m in caplog.messages if "of 5 pictures" in m] == [f"{n} of 5 pictures" for n in range(1, 6)]


def test_bar_is_shown_on_a_terminal_and_results_go_to_stdout(own, photos, capsys, monkeypatch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # lines and columns
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        assert cli.main(["predict", "RUN", str(photos), "--json"]) == 2
        terminal.flush()
        shown = ""
        while select.select([ours], [], [], 0.2)[0]:
            shown += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "0/5" in shown
    assert "1 of 5 images could not be used" in shown
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4
