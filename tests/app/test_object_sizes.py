"""Objects of sizes that training did not show: measured, compared with it, and told."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch import nn

from examples.cells import draw_cells
from scalesteer import create_model, from_pretrained, register_model, save_pretrained
from scalesteer.app import cli, load_model, make_run, train
from scalesteer.app.object_sizes import MOST_MEASURED, compare, measure_regions, sample_every
from scalesteer.app.predict import predict_files, remarks
from scalesteer.instances import find_regions
from scalesteer.models import network_of


def make(name="pooled-cnn", shown: tuple[float, float] | None = (10.0, 20.0), **options):
    options = {"in_chans": 3, "num_classes": 2, "widths": (2, 3), "kernel_size": 3} | options
    model = create_model(name, **options).eval()
    network_of(model).task = network_of(model).task._replace(object_sizes=shown, ground="surroundings", scale=1.0)
    return model


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([15.0] * 4, ""),
        ([21.9] * 3, ""),  # hardly beyond
        ([9.2] * 3, ""),
        (
            [60.0] * 3 + [15.0] * 2,
            "3 of 5 pictures that were measured show objects larger than training showed: about 60 ",
        ),
        ([60.0] * 2 + [15.0] * 2, ""),  # not most of them
        ([4.0] * 3, "3 of 3 pictures that were measured show objects smaller than training showed: about 4 "),
        ([60.0, 0.0, 0.0, 0.0], "1 of 1 "),
        ([60.0, 0.0, 0.0, 0.0, 0.0], ""),  # of too few it is sure
        ([0.0], ""),
        ([], ""),
    ],
)
def test_most_objects_beyond_training_are_told(sizes, said):
    assert [one[: len(said)] for one in compare(make(), sizes)] == [said] * bool(said)


def test_what_is_told_names_the_sizes_of_training_and_what_to_do():
    (larger,) = compare(make(), [57.0])
    assert "about 57 pixels as the network sees them, not 10 to 20" in larger
    assert "; try --channels 0.25 0.35 0.5 0.71 1, or train at such sizes, too (--resize)" in larger
    (smaller,) = compare(make(), [2.0])
    assert "; try --channels 1 1.41 2, or" in smaller  # none enlarges more
    (one_size,) = compare(make("plain-cnn", kernel_size=None, widths=(2, 3, 4), image_size=28), [57.0])
    assert one_size.endswith("; train at such sizes, too (--resize)")


def test_scale_channels_cover_more_sizes():
    model = make(channels=(0.5, 1.0, 2.0))
    assert compare(model, [39.0]) == compare(model, [5.1]) == []
    (larger,), (smaller,) = compare(model, [57.0]), compare(model, [2.0])
    assert "larger than training and the scale channels cover: about 57 pixels" in larger
    assert "not 5 to 40; try --channels 0.25 0.35 0.5 0.71 1 2, or train" in larger
    assert smaller.endswith("; try --channels 0.5 1 1.41 2, or train at such sizes, too (--resize)")
    assert compare(make(channels=(0.5, 1.0, 1.41, 2.0)), [2.0])[0].endswith("; train at such sizes, too (--resize)")


def test_a_network_that_does_not_know_its_training_says_nothing():
    assert compare(make(shown=None), [57.0]) == []


def test_a_few_pictures_are_measured_evenly():
    assert [sample_every(range(n)) for n in (0, 1, 32, 33, 640)] == [1, 1, 1, 2, 20]
    assert sample_every(iter(())) == 1
    assert MOST_MEASURED == 32


def save_squares(folder, sides, ground=220):
    """Pictures of one dark square each on an even ground."""
    folder.mkdir(parents=True)
    for i, side in enumerate(sides):
        pixels = np.full((side + 30, side + 24, 3), ground, np.uint8)
        pixels[14 : 14 + side, 9 : 9 + side] = (30, 60, 200 * (i % 2))
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return sorted(folder.glob("*.png"))


def test_training_records_the_sizes_of_its_objects_and_predict_compares(cache, tmp_path, caplog):
    for name in "ab":
        save_squares(tmp_path / "squares" / name, [12 + i // 2 % 5 for i in range(20)])
    trained = {}
    for resize in ((1.0, 1.0), (0.5, 2.0)):
        run = make_run(
            images=str(tmp_path / "squares"), image_size=(64, 64), epochs=1, batch_size=8, resize=resize,
            model="pooled-cnn", widths=(2, 3), kernel_size=3, test_channels=(),
        )  # fmt: skip
        train(run, tmp_path / str(resize[1]), device="cpu")
        trained[resize] = load_model(tmp_path / str(resize[1]))
    smallest, largest = trained[1.0, 1.0].task.object_sizes
    assert (smallest, largest) == (pytest.approx(12, abs=1), pytest.approx(16, abs=1))
    assert trained[0.5, 2.0].task.object_sizes == (smallest / 2, 2 * largest)
    for factor, told in ((1.0, None), (3.0, "larger than training showed"), (1 / 3, "smaller than training showed")):
        paths = save_squares(tmp_path / f"new{factor:.2f}", [round(factor * (12 + i % 5)) for i in range(8)])
        model = trained[1.0, 1.0]
        found = remarks(model, [said for _, said in predict_files(model, paths)])
        assert len(found) == (told is not None)
        assert told is None or f"8 of 8 pictures that were measured show objects {told}: about" in found[0]
    noise = tmp_path / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), np.uint8)).save(noise)
    assert remarks(model, [said for _, said in predict_files(model, [noise])]) == []
    assert cli.main(["predict", str(tmp_path / "1.0"), str(tmp_path / "new3.00"), "--device", "cpu"]) == 0
    assert "try --channels 0.35 0.5 0.71 1, or train at such sizes, too (--resize)" in caplog.text


def test_only_some_of_many_pictures_are_measured(tmp_path):
    paths = save_squares(tmp_path / "new", [14] * 40)
    said = [one.extent for _, one in predict_files(make(), paths)]
    assert said == [14.0, None] * 20
    assert {one.extent for _, one in predict_files(make(shown=None), paths)} == {None}


# Masks


def draw_discs(diameter, side, places, ring=0):
    image = Image.new("L", (side, side))
    for row, column in places:
        half = (diameter - 1) / 2
        box = (column - half, row - half, column + half, row + half)
        ImageDraw.Draw(image).ellipse(box, fill=0 if ring else 1, outline=1, width=ring or 1)
    return np.asarray(image)


GRID = [(row, column) for row in (40, 120, 200) for column in (40, 120, 200)]


@pytest.mark.parametrize("ring", [0, 2])
@pytest.mark.parametrize("diameter", [5, 11, 31, 61])
def test_regions_are_measured_by_the_disc_within_also_of_rings(diameter, ring):
    found = measure_regions(*find_regions(draw_discs(diameter, 240, GRID, ring)))
    assert found == pytest.approx(diameter, abs=1.5)


def test_touching_objects_specks_and_what_is_cut_off_do_not_mislead():
    chain = draw_discs(31, 240, [(120, 60), (120, 90), (120, 120), (146, 135)])
    assert measure_regions(*find_regions(chain)) == pytest.approx(31, rel=0.2)
    specks = draw_discs(31, 240, GRID).copy()
    specks[5:20:4, 5::4] = specks[75:90:4, 5::4] = 1  # between the rows of discs
    assert len(find_regions(specks)[1]) > 50
    assert measure_regions(*find_regions(specks)) == pytest.approx(31, rel=0.2)
    cut_off = draw_discs(61, 240, [(10, 60), (10, 180), (230, 60)]) | draw_discs(11, 240, [(120, 120)])
    assert measure_regions(*find_regions(cut_off)) == 0  # most of it cannot be measured
    assert measure_regions(*find_regions(np.zeros((9, 9), int))) == 0


class Bright(nn.Module):
    """Bright places are of class 1."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(nn.init.zeros_(nn.Conv2d(1, 1, 1).weight))

    def forward(self, x):
        return torch.cat([0 * x, 30 * (x - 0.4)], 1)


@pytest.mark.parametrize(
    ("size", "options", "told"),
    [
        (1.0, {}, None),
        (3.0, {}, "larger than training showed: about 3"),
        (1 / 3, {}, "smaller than training showed: about 3."),
        (3.0, {"channels": (0.35, 1.0), "grid": (1, 0)}, None),
        (6.0, {"channels": (0.35, 1.0), "grid": (1, 0)}, "larger than training and the scale channels cover: about 6"),
    ],
)
def test_masks_tell_of_cells_beyond_training(size, options, told, tmp_path, caplog, capsys):
    register_model("bright", lambda num_classes: Bright())
    model = create_model("bright", in_chans=1, num_classes=2, **options)
    network_of(model).task = network_of(model).task._replace(object_sizes=(10.0, 13.0))
    save_pretrained(model, tmp_path / "net")
    rng = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    for i in range(3):
        pixels = 255 * draw_cells("filled", size, 256, rng)[0][0].numpy().clip(0, 1)
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "pictures" / f"{i}.png")
    words = ["predict", tmp_path / "net", tmp_path / "pictures", "--masks", tmp_path / "out", "--device", "cpu"]
    assert cli.main([str(word) for word in words]) == 0
    found = [line for line in caplog.messages if "measured" in line]
    assert len(found) == (told is not None)
    assert told is None or f"pictures that were measured show objects {told}" in found[0]
    assert "--resize" not in caplog.text


def test_masks_in_scale_channels_tell_of_the_last_one(tmp_path, caplog, capsys):
    register_model("bright", lambda num_classes: Bright())
    model = create_model("bright", in_chans=1, num_classes=2, channels=(0.5,), grid=(1, 0))
    save_pretrained(model, tmp_path / "net")
    Image.fromarray((200 * draw_discs(31, 240, GRID)).astype(np.uint8)).save(tmp_path / "a.png")
    words = ["predict", tmp_path / "net", tmp_path / "a.png", "--masks", tmp_path / "out", "--device", "cpu"]
    assert cli.main([str(word) for word in words]) == 0
    assert "1 of 1 pictures: the largest size that the channels cover, 2, was found" in caplog.text


def test_the_sizes_of_training_are_kept_and_checked(tmp_path):
    folder = save_pretrained(make(image_size=16), tmp_path / "net")
    assert from_pretrained(folder).task.object_sizes == (10.0, 20.0)
    config = (folder / "config.json").read_text()
    for wrong in ("[20.0, 10.0]", "[0, 10.0]", "[10.0]", '"a"', "7"):
        (folder / "config.json").write_text(
            config.replace("[\n   10.0,\n   20.0\n  ]", wrong).replace("[10.0, 20.0]", wrong)
        )
        assert wrong in (folder / "config.json").read_text()
        with pytest.raises(ValueError, match=r"`task` does not fit: .*object_sizes"):
            from_pretrained(folder)
