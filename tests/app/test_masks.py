"""Masks by a network that makes maps: images of labels, and the table of objects."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch import nn

from scalesteer import create_model, register_model, save_pretrained
from scalesteer.app import cli
from scalesteer.models import network_of
from scalesteer.models.registered import BUILDERS


class Threshold(nn.Module):
    """Bright places are of class 1, very bright ones of class 2; a place for every `stride` pixels."""

    def __init__(self, stride):
        super().__init__()
        self.pool, self.unused = nn.AvgPool2d(stride), nn.Parameter(nn.init.zeros_(nn.Conv2d(1, 1, 1).weight))

    def forward(self, x):
        y = self.pool(x.mean(1, keepdim=True))
        return torch.cat([0 * y, 10 * (y - 0.3), 30 * (y - 0.6) + 3 * (y > 0.6)], 1)


def rows_of(folder):
    return list(csv.DictReader((folder / "out" / "objects.csv").read_text(encoding="utf-8").splitlines()))


@pytest.fixture
def folder(tmp_path):
    """A model, and a picture with three blobs."""
    register_model("threshold", lambda num_classes, stride=1: Threshold(stride))
    picture = Image.new("RGB", (50, 40))
    draw = ImageDraw.Draw(picture)
    for box, shade in (((4, 4, 11, 11), 130), ((24, 8, 35, 15), 250), ((0, 28, 7, 39), 130)):
        draw.rectangle(box, (shade,) * 3)
    (tmp_path / "pictures" / "deep").mkdir(parents=True)
    picture.save(tmp_path / "pictures" / "deep" / "one.png")
    Image.new("RGB", (20, 20)).save(tmp_path / "pictures" / "empty.png")
    return tmp_path


def predict(folder, *words, stride=1, **options):
    model = create_model("threshold", num_classes=3, stride=stride, **options)
    network_of(model).task = network_of(model).task._replace(classes=("nothing", "grey", "white"))
    saved = save_pretrained(model, folder / f"net{stride}")
    return cli.main(["predict", str(saved), str(folder / "pictures"), *words])


@pytest.mark.parametrize("stride", [1, 4])
def test_each_object_has_a_number_a_class_and_a_place(folder, capsys, stride):
    assert predict(folder, "--masks", str(folder / "out"), stride=stride) == 0
    assert "3 objects in 2 pictures" in capsys.readouterr().out
    labels = np.asarray(Image.open(folder / "out" / "deep" / "one.png.png"))
    assert labels.shape == (40, 50)
    assert labels.dtype in (np.uint16, np.int32)
    assert np.unique(labels).tolist() == [0, 1, 2, 3]
    assert not np.asarray(Image.open(folder / "out" / "empty.png.png")).any()
    rows = rows_of(folder)
    assert [row["class"] for row in rows] == ["grey", "white", "grey"]
    assert [(row["height"], row["width"], row["area"]) for row in rows] == [
        ("8", "8", "64"),
        ("8", "12", "96"),
        ("12", "8", "96"),
    ]
    assert [(float(row["row"]), float(row["column"])) for row in rows] == [(7.5, 7.5), (11.5, 29.5), (33.5, 3.5)]
    for row in rows:
        y, x = np.nonzero(labels == int(row["object"]))
        assert (y.mean(), x.mean(), len(y)) == (float(row["row"]), float(row["column"]), int(row["area"]))


def test_sizes_are_those_of_the_channels(folder):
    assert predict(folder, "--masks", str(folder / "out"), channels=(0.5, 1.0), join="max", grid=(1, 0)) == 0
    rows = rows_of(folder)
    assert {float(row["size"]) for row in rows} <= {1.0, 2.0}


def test_what_does_not_go_together_is_told(folder, capsys, caplog):
    assert predict(folder) == 2
    assert "`masks` (got None) is for a network that makes maps" in capsys.readouterr().err
    assert cli.main(["predict", "digits", str(folder / "pictures"), "--masks", str(folder / "out")]) == 2
    assert "is for a network that makes maps" in capsys.readouterr().err
    (folder / "pictures" / "broken.png").write_bytes(b"no picture")
    assert predict(folder, "--masks", str(folder / "out")) == 2
    said = capsys.readouterr()
    assert "broken.png cannot be read" in caplog.text
    assert "1 of 3 images could not be used" in said.err
    assert "3 objects in 2 pictures" in said.out
    assert "threshold" in BUILDERS
