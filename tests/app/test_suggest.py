"""Sizes of objects in a user's pictures, and the channels that follow."""

import csv
import doctest
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paper import contenders, grids
from scalesteer import ScaleSteerableConv2d, create_model
from scalesteer.app import cli, estimate, make_run, suggest
from scalesteer.app.evaluation import rank_correlation
from scalesteer.app.suggest import (
    COLOUR,
    GREY,
    Suited,
    choose_channels,
    choose_scales,
    find_objects,
    label_regions,
    read_boxes,
)
from scalesteer.datasets import SIZED_DATASETS, load_split
from scalesteer.harmonics import WIDE_STEP
from scalesteer.models.network import Task

QUICKSTART = contenders.Settings()
INK = 20 / 28  # of an image of MNIST: the longer side of its digit


def square(side, canvas=(64, 64), at=(5, 7), colour=(0, 0, 0), ground=(200, 180, 90)):
    picture = np.empty((*canvas, 3), np.uint8)
    picture[:] = ground
    picture[at[0] : at[0] + side, at[1] : at[1] + side] = colour
    return picture


@pytest.fixture
def folder(tmp_path):
    """A folder of pictures of squares with sides of 8, 9, ..., 40 pixels, in two folders."""
    images = tmp_path / "my pictures"
    for side in range(8, 41):
        path = images / ("odd" if side % 2 else "even") / f"{side}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(square(side)).save(path)
    return images


def write_csv(path, rows, header=("path", "x", "y", "width", "height")):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


# The rule


@pytest.mark.parametrize(
    ("smallest", "largest", "suited", "used", "more"),
    [
        (17 * INK, 64 * INK, GREY, grids.CHANNELS_STIR, 0),
        # Digits at 0.5 to 8; the canvas cuts the largest.
        (20 * 0.5, SIZED_DATASETS["mnist-large-scale"].canvas, GREY, grids.CHANNELS_LARGE, 1),
        (32 * 0.5, 32 * 2, COLOUR, grids.CHANNELS_CIFAR, 0),
        (20 * 0.3, 20 * 1, GREY, grids.CHANNELS_SCALE, 1),
        # The quickstart leaves out the smallest channel, in which the smallest digits are a few pixels wide.
        (20 * min(QUICKSTART.test_scales), 20 * max(QUICKSTART.test_scales), GREY, QUICKSTART.channels, 1),
    ],
)
def test_the_rule_gives_the_channels_of_the_experiments(smallest, largest, suited, used, more):
    found = choose_channels(smallest, largest, suited.object_size)
    assert len(found) == len(used) + more
    assert all(min(abs(s / other - 1) for other in found) < 0.02 for s in used)


@given(st.floats(2, 500), st.floats(1, 100), st.floats(8, 64))
def test_some_channel_brings_every_object_near_the_networks_size(smallest, ratio, own):
    channels = choose_channels(smallest, smallest * ratio, own)
    if ratio < 2**0.5:
        assert channels == ()
        return
    own = min(own, 2 * smallest)
    assert channels[-1] <= 2 * 1.000001
    for size in np.geomspace(smallest, smallest * ratio, 50):
        assert min(abs(np.log2(s * size / own)) for s in channels) <= 0.25 + 1e-6  # half of a step
    # One or two more than the ratio needs.
    needed = np.ceil(2 * np.log2(ratio) - 1e-6) + 1
    assert needed <= len(channels) <= needed + 1


@pytest.mark.parametrize("sizes", [(0, 5), (5, 4), (float("nan"), 4), (5, float("inf")), (3, 9, 0)])
def test_sizes_that_cannot_be_are_named(sizes):
    with pytest.raises(ValueError, match=r"`smallest`|`largest`|`object_size`"):
        choose_channels(*sizes)
    if len(sizes) == 2:
        with pytest.raises(ValueError, match=r"`smallest`|`largest`"):
            choose_scales(*sizes)


@pytest.mark.parametrize("ratio", [1, 1.3, 2, 5, 100])
def test_scales_of_a_layer_cover_the_ratio_with_one_more_at_both_ends(ratio):
    scales = choose_scales(10, 10 * ratio)
    assert scales[0] < 1
    assert scales[-1] > min(ratio, 6.3)
    assert scales[-1] <= WIDE_STEP**2 * ratio * 1.001
    ScaleSteerableConv2d(1, 1, 7, scales=scales)


def test_a_place_of_the_small_network_sees_twice_the_object():
    net = create_model("pooled-cnn", dense=True).double().eval()
    x = torch.rand(1, 1, 96, 96, dtype=torch.float64, requires_grad=True)
    net(x)[0, :, 12, 12].sum().backward()
    rows = x.grad[0, 0].abs().amax(1).nonzero()
    assert 1 + rows.max() - rows.min() == 2 * GREY.object_size


@pytest.mark.parametrize("suited", [GREY, COLOUR])
def test_kernel_sizes_are_those_of_the_networks(suited):
    usual, said = (create_model(suited.model, kernel_size=size).state_dict() for size in (None, suited.kernel_size))
    assert {name: t.shape for name, t in usual.items()} == {name: t.shape for name, t in said.items()}


def test_what_the_guide_shows_is_true():
    guide = Path(__file__).parents[2] / "docs" / "guide" / "which-scales.md"
    failed, tried = doctest.testfile(str(guide), module_relative=False)
    assert (failed, tried) == (0, 4)


# Objects that stand out


def slow_regions(inside):
    """By flooding, one pixel at a time."""
    left = {(int(y), int(x)) for y, x in np.argwhere(inside)}
    regions = []
    while left:
        todo, region = [left.pop()], set()
        while todo:
            y, x = todo.pop()
            region.add((y, x))
            near = {(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            todo += near
        regions.append(frozenset(region))
    return set(regions)


@given(st.integers(0, 2**32), st.sampled_from([0.2, 0.4, 0.6]), st.integers(1, 12), st.integers(1, 12))
def test_regions_are_those_of_flooding(seed, share, height, width):
    inside = np.random.default_rng(seed).random((height, width)) < share
    rows, columns, region = label_regions(inside)
    found = {
        frozenset(zip(rows[region == i].tolist(), columns[region == i].tolist(), strict=True)) for i in set(region)
    }
    assert found == slow_regions(inside)


def test_a_spiral_is_one_region():
    inside = np.zeros((101, 101), bool)
    for ring in range(0, 50, 2):  # rings, joined by one pixel each
        inside[ring, ring : 101 - ring] = inside[100 - ring, ring : 101 - ring] = True
        inside[ring : 101 - ring, ring] = inside[ring : 101 - ring, 100 - ring] = True
        inside[ring + 1, ring + 50 - ring] = True
    assert label_regions(inside)[2].max() == 0
    inside[1, 50] = False
    assert label_regions(inside)[2].max() == 1


def test_a_gap_joins_what_is_near():
    inside = np.zeros((1, 12), bool)
    inside[0, [0, 5, 11]] = True
    assert label_regions(inside, gap=2)[2].tolist() == [0, 0, 1]


@pytest.mark.parametrize("factor", [1, 7])
def test_sides_are_in_pixels_of_the_picture(factor):
    picture = np.kron(square(20).transpose(2, 0, 1), np.ones((1, factor, factor), np.uint8))
    sides, sure = find_objects(picture)
    assert sure
    assert sides == [pytest.approx(20 * factor, abs=2 * factor)]


def test_two_objects_count_each_and_a_speck_does_not():
    picture = square(20, canvas=(90, 90))
    picture[50:64, 50:62] = (255, 0, 0)
    picture[80:82, 10:12] = 0
    assert find_objects(picture.transpose(2, 0, 1)) == ([20, 14], True)


@pytest.mark.parametrize("kind", ["blank", "speck", "noise", "rough", "halves"])
def test_where_nothing_stands_out_nothing_is_found(kind):
    picture = np.full((3, 64, 64), 90, np.uint8)
    if kind == "speck":
        picture[:, 30:32, 30:32] = 255
    if kind == "noise":
        picture = np.random.default_rng(0).integers(0, 255, (3, 64, 64), np.uint8)
    if kind == "rough":  # a square amid noise, of which single pixels differ more
        noise = np.random.default_rng(0).normal(0, 40, (3, 64, 64))
        picture = np.clip(square(20, colour=(50, 60, 70)).transpose(2, 0, 1) + noise, 0, 255).astype(np.uint8)
    if kind == "halves":  # a ground of two colours
        picture[:, :32] = 250
    assert find_objects(picture)[0] == []


@pytest.mark.parametrize("shape", [(1, 1), (2, 3000), (1025, 1), (3, 3)])
def test_thin_and_tiny_pictures_show_nothing(shape):
    assert find_objects(np.full((3, *shape), 7, np.uint8)) == ([], False)


def test_an_object_that_is_cut_off_is_not_sure():
    sides, sure = find_objects(square(15, at=(0, 20)).transpose(2, 0, 1))
    assert sides == [15]
    assert not sure


def test_an_uneven_ground_is_not_sure():
    picture = square(40, at=(12, 12)).transpose(2, 0, 1)
    assert find_objects(picture) == ([40], True)
    picture[:, :2] -= 40
    assert find_objects(picture) == ([40], False)


@pytest.mark.real_data
def test_sizes_of_real_digits_are_found(real_cache):
    images = load_split("stir-mnist", 0, "test", sizes=(0, 0, 10))
    found = [find_objects(image[None]) for image in images.images.numpy()]
    assert len(found) == 10 * 48
    assert all(sure and len(sides) == 1 for sides, sure in found)
    sides, true = np.array([sides[0] for sides, _ in found]), INK * images.sizes.numpy()
    assert rank_correlation(sides, true) > 0.99
    assert abs(np.median(sides / true) - 1) < 0.02
    assert (abs(np.log2(sides / true)) < 0.25).all()  # half a channel


# Boxes


def test_boxes_of_csv_and_of_coco_are_the_same(tmp_path):
    rows = [("a b/ü.png", 1, 2.5, 30, 4), ("./c.png", 0, 0, 7, 8), ("c.png", 3, 3, 3, 3)]
    table = write_csv(tmp_path / "boxes.csv", rows)
    entries = [{"image_id": i, "bbox": row[1:]} for i, row in zip((5, 9, 9), rows, strict=True)]
    crowd = {"image_id": 5, "bbox": [0, 0, 99, 99], "iscrowd": 1}
    pictures = [{"id": 5, "file_name": "a b/ü.png"}, {"id": 9, "file_name": "c.png"}]
    coco = tmp_path / "boxes.json"
    coco.write_text(json.dumps({"images": pictures, "annotations": [*entries, crowd]}))
    expected = {"a b/ü.png": [(1, 2.5, 30, 4)], "c.png": [(0, 0, 7, 8), (3, 3, 3, 3)]}
    assert read_boxes(table) == read_boxes(coco) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.csv", "", "no boxes"),
        ("b.csv", "path,x,y,width\na.png,1,2,3\n", "'height' is missing"),
        ("b.csv", "path,x,y,width,height\na.png,1,2,3\n", "line 2: a box must be four numbers"),
        ("b.csv", "path,x,y,width,height\na.png,1,2,3,0\n", "line 2: width and height"),
        ("b.csv", "path,x,y,width,height\na.png,nan,2,3,4\n", "line 2: width and height"),
        ("b.csv", b"\xff\xfe\x00", "cannot be read"),
        ("b.json", "[1", "cannot be read"),
        ("b.json", "[" * 10000, "cannot be read"),
        ("b.json", '{"images": []}', "'annotations' is missing"),
        ("b.json", '{"images": [], "annotations": [{"image_id": 3, "bbox": [1, 2, 3, 4]}]}', "3 is missing"),
        ("b.json", '{"images": [], "annotations": []}', "no boxes"),
    ],
)
def test_what_is_wrong_with_a_file_of_boxes_is_said(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_boxes(path)


def test_a_file_of_boxes_must_be_there(tmp_path):
    with pytest.raises(ValueError, match="`boxes` must be a CSV"):
        read_boxes(tmp_path / "none.csv")


# The command


def run(capsys, *words):
    code = cli.main(["suggest", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_suggestion_from_pictures_and_from_their_boxes_agree(folder, tmp_path):
    rows = [(path.relative_to(folder), 7, 5, int(path.stem), int(path.stem)) for path in folder.rglob("*.png")]
    boxes = write_csv(tmp_path / "boxes.csv", rows)
    found, told = suggest.suggest(folder), suggest.suggest(folder, boxes)
    assert sorted(found.sizes) == sorted(told.sizes) == list(range(8, 41))
    assert found.channels == told.channels == choose_channels(*found.ends, COLOUR.object_size)
    assert found.image_size == (64, 64)


def test_the_command_that_is_printed_fits_the_network(folder, capsys, monkeypatch):
    code, out, err = run(capsys, folder)
    assert (code, err) == (0, "")
    found = suggest.suggest(folder)
    assert out.splitlines()[-1] == found.command
    assert "33 of 33 pictures looked at, 33 objects" in out
    assert re.search(
        r"^On this .*, an epoch of 23 pictures in \d channels takes about \d+ seconds?, all \d+ epochs ", out, re.M
    )
    assert "then you need no channels" not in out  # nobody said where the objects are
    assert "(sure)" in out
    assert sum(count for *_, count in found.histogram()) == 33
    numbers = found.command.partition("--channels ")[2].split()
    options = {"kernel_size": found.suited.kernel_size, "channels": tuple(map(float, numbers))}
    model = create_model(found.suited.model, "rescaled-cifar10", **options).eval()
    with torch.no_grad():
        assert model(torch.rand(1, 3, *found.image_size)).shape == (1, 10)


def test_grey_pictures_get_the_small_network_and_large_ones_are_shrunk(tmp_path):
    for side in (100, 200, 400):
        Image.fromarray(square(side, (600, 800), colour=(9, 9, 9), ground=(250, 250, 250))).save(
            tmp_path / f"{side}.png"
        )
    found = suggest.suggest(tmp_path)
    assert found.suited == GREY
    assert found.grey
    assert "--grey" in found.command
    height, width = found.image_size
    assert height / 600 == pytest.approx(width / 800, rel=0.02)
    assert found.sizes / (height / 600) == pytest.approx([100, 200, 400], rel=0.02)
    assert found.channels[-1] == 1


def test_pictures_of_different_sizes_are_measured_as_training_fits_them(tmp_path):
    for i in range(19):
        Image.fromarray(square(20, at=(10 + i, 10))).save(tmp_path / f"{i}.png")
    Image.fromarray(square(80, (256, 256))).save(tmp_path / "large.png")  # is shrunk
    found = suggest.suggest(tmp_path)
    factor = found.image_size[0] / 256
    assert factor < 1
    assert sorted(found.sizes) == pytest.approx([20] * 19 + [80 * factor])


def test_sizes_that_do_not_vary_need_no_channels(tmp_path, capsys):
    for i in range(5):
        Image.fromarray(square(20 + i)).save(tmp_path / f"{i}.png")
    code, out, _ = run(capsys, tmp_path)
    assert code == 0
    assert "none are needed" in out
    assert out.endswith(" --channels none\n")


def test_what_is_broken_or_blank_is_counted_and_named(folder, capsys):
    (folder / "broken.png").write_bytes(b"no picture")
    Image.fromarray(square(0)).save(folder / "blank.png")
    Image.fromarray(square(30, at=(0, 20))).save(folder / "cut.png")
    code, out, _ = run(capsys, folder)
    assert code == 0
    assert "1 picture (broken.png) cannot be read." in out
    assert "Nothing stands out in 1 picture (blank.png)." in out
    assert "cut off, or the ground uneven, in 1 picture (cut.png)." in out


@pytest.mark.parametrize("kind", ["blank", "broken"])
def test_a_folder_that_shows_nothing_is_an_error(tmp_path, capsys, kind):
    for i in range(5):
        if kind == "blank":
            Image.fromarray(square(0)).save(tmp_path / f"{i}.png")
        else:
            (tmp_path / f"{i}.png").write_bytes(b"")
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert "5 pictures (0.png, 1.png, 2.png, …)" in err
    assert "--boxes" in err


def test_photographs_without_a_ground_ask_for_boxes(tmp_path, capsys):
    generator = np.random.default_rng(0)
    for i in range(5):
        Image.fromarray(generator.integers(0, 255, (4, 4, 3), np.uint8)).resize((96, 96)).save(tmp_path / f"{i}.jpg")
    code, _, err = run(capsys, tmp_path)
    assert code == 2
    assert "--boxes" in err


def test_folders_without_pictures_are_errors(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a")
    for images, message in ((tmp_path, "no pictures"), (tmp_path / "a.txt", "must be a folder"), ("no", "folder")):
        code, _, err = run(capsys, images)
        assert code == 2
        assert message in err


def test_boxes_that_do_not_fit_are_errors(folder, tmp_path, capsys):
    outside = write_csv(tmp_path / "a.csv", [("even/8.png", 50, 0, 20, 8), ("even/10.png", 0, 0, 9, 9)])
    elsewhere = write_csv(tmp_path / "b.csv", [("8.png", 0, 0, 8, 8)])
    for boxes, message in ((outside, "beyond 1 picture (even/8.png)"), (elsewhere, "1 picture (8.png) that")):
        code, _, err = run(capsys, folder, "--boxes", boxes)
        assert code == 2
        assert message in err


def test_the_network_suits_the_machine_or_is_named(folder, monkeypatch, capsys):
    found = {}
    for gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        found[gpu] = suggest.suggest(folder)
        assert found[gpu].channels == choose_channels(*found[gpu].ends, COLOUR.object_size)
    assert found[True].suited == COLOUR
    assert found[False].suited == Suited("pooled-deep", (3,) * 5, COLOUR.object_size)
    code, out, _ = run(capsys, folder, "--model", "pooled-cnn-large")
    assert code == 0
    assert " --model pooled-cnn-large --channels " in out.splitlines()[-1]
    code, _, err = run(capsys, folder, "--model", "ss-cnn")
    assert code == 2
    assert "`model`" in err
    assert "pooled-cnn" in err


def test_photographs_get_the_channels_in_which_a_small_network_was_measured(tmp_path):
    photos = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    for i, pixels in enumerate(photos):  # as in the measurement: 16 to 64 pixels, in colour
        Image.fromarray(pixels).resize([round(16 * 4 ** (i / 39))] * 2).save(tmp_path / f"{i}.png")
    found = suggest.suggest(tmp_path, model="pooled-cnn", whole=True)
    kept = json.loads((Path(__file__).parents[2] / "results/guide/own-images.json").read_text())
    measured = next(row for row in kept if row["channels"] and len(row["channels"]) > 1)
    assert [round(scale, 2) for scale in found.channels] == [round(scale, 2) for scale in measured["channels"]]


def test_pictures_that_are_one_object_each_are_measured_whole(tmp_path, capsys):
    rng = np.random.default_rng(0)
    sides = [20, 24, 30, 40, 60, 80]
    for side in sides:
        Image.fromarray(rng.integers(0, 256, (side // 2, side, 3), np.uint8)).save(tmp_path / f"{side}.png")
    code, out, _ = run(capsys, tmp_path, "--whole")
    assert code == 0
    assert "Each picture is one object." in out
    assert "then you need no channels.\n  scalesteer train CROPS --fit resize --image-size 40 40 --channels none" in out
    assert sorted(suggest.suggest(tmp_path, whole=True).sizes)[:-1] == sides[:-1]  # the largest is shrunk a little
    code, _, err = run(capsys, tmp_path, "--whole", "--boxes", "boxes.csv")
    assert (code, err) == (2, "scalesteer: `whole` and `boxes` (got 'boxes.csv') exclude each other.\n")


def test_there_is_no_command_where_the_sizes_are_not_sure(tmp_path, capsys, monkeypatch):
    for i in range(6):  # cut off by the border in four of six
        Image.fromarray(square(20 + 4 * i, at=((0, 5)[i > 3], 8))).save(tmp_path / f"{i}.png")
    monkeypatch.setattr(estimate, "describe", lambda *_: pytest.fail("nothing to measure"))
    code, out, err = run(capsys, tmp_path)
    assert (code, err) == (0, "")
    assert "(not sure)" in out
    assert "scalesteer train" not in out
    assert out.endswith("--boxes FILE, or say with --whole that each picture is one.\n")


def test_an_epoch_takes_about_as_long_as_is_estimated():
    settings = {"images": "photos", "image_size": (24, 24), "channels": (), "batch_size": 16}
    run, task = make_run(model="pooled-cnn", **settings), Task(3, 10, (24, 24))
    few, many = (estimate.seconds_of_epoch(run, task, images, torch.device("cpu")) for images in (100, 1000))
    assert 3 < many / few < 33  # ten times, on a machine that may do other things
    large = make_run(model="pooled-cnn", **{**settings, "image_size": (96, 96)})
    assert estimate.seconds_of_epoch(large, task._replace(image_size=(96, 96)), 100, torch.device("cpu")) > 3 * few


def test_a_training_takes_the_time_of_its_epochs_at_one_size_and_in_channels(monkeypatch):
    monkeypatch.setattr(estimate, "seconds_of_epoch", lambda *_: 105.0)  # in channels of 5.25 areas in all
    run = make_run(images="photos", model="pooled-cnn", channels=(0.5, 1, 2), epochs=10, one_size_epochs=8)
    said = estimate.describe(run, Task(3, 10, (24, 24)), 900, torch.device("cpu"))
    assert "an epoch of 900 pictures in 3 channels takes about 2 minutes, all 10 epochs about 6 minutes" in said
    assert [estimate.work(run, epoch) for epoch in (7, 8)] == [1.0, 5.25]


@pytest.mark.parametrize("factor", [1, 3, 20])
def test_pictures_are_shrunk_by_the_means_of_squares(factor):
    picture = np.random.default_rng(0).integers(0, 256, (3, 47, 65), np.uint8)
    found = suggest._shrink(picture[:, :, 1:], factor)
    assert found.shape == (3, 47 // factor, 64 // factor)
    for i, j in np.ndindex(found.shape[1:]):
        square = picture[:, factor * i : factor * (i + 1), 1 + factor * j : 1 + factor * (j + 1)]
        assert found[:, i, j].tolist() == square.astype(float).mean((1, 2)).tolist()


def test_few_of_many_pictures_are_looked_at(folder, monkeypatch):
    monkeypatch.setattr(suggest, "MOST_PICTURES", 10)
    found = suggest.suggest(folder)
    assert found.remarks[0] == "9 of 33 pictures looked at, 9 objects in them."


def test_a_plot_is_drawn(folder, tmp_path, capsys):
    plot = tmp_path / "sizes.png"
    assert run(capsys, folder, "--plot", plot)[0] == 0
    with Image.open(plot) as image:
        assert min(image.size) > 200
        assert len(set(image.convert("L").tobytes())) > 2
    code, _, err = run(capsys, folder, "--plot", tmp_path / "none" / "sizes.png")
    assert code == 2
    assert "`plot`" in err
