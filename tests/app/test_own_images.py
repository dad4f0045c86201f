"""Runs on a user's own pictures: real files, real training, the command line."""

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from scalesteer import ScaleChannels, files, pretrained, save_pretrained
from scalesteer.app import (
    CheckpointError,
    Run,
    RunError,
    checkpoint,
    cli,
    evaluate,
    folder,
    load,
    load_model,
    loop,
    make_run,
    read_run,
    results,
    train,
)
from scalesteer.app.config import PLAIN, batch_for
from scalesteer.app.pictures import read_picture
from scalesteer.app.predict import reader
from scalesteer.datasets import ImageSet
from scalesteer.models import DATASETS, count_parameters, create_model
from scalesteer.models.network import Task
from tests import test_timm
from tests.app import jobs
from tests.app.test_old_runs import OLD
from tests.runs import changed

ROOT = Path(__file__).parents[2]
CLASSES = ("a circle", "großes Kreuz", "nothing")


def draw(label, rng):
    """A ring, a cross or nothing, bright on dark, somewhere in a picture of any size."""
    height, width = rng.integers(20, 40, 2)
    pixels = rng.integers(0, 60, (height, width, 3)).astype(np.float64)
    y, x = np.ogrid[:height, :width]
    row, column, radius = rng.integers(8, height - 8), rng.integers(8, width - 8), rng.uniform(4, 8)
    away = np.hypot(y - row, x - column)
    shape = [abs(away - radius) < 1.5, (away < radius) & ((abs(y - row) < 1.5) | (abs(x - column) < 1.5)), away < 0]
    pixels[shape[label]] += (150, 190, 120)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """A folder of three classes: 90, 60 and 30 pictures, and one that is broken."""
    root, rng = tmp_path_factory.mktemp("own") / "my pictures", np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for i in range(90 - 30 * label):
            draw(label, rng).save(root / name / f"{i}.{('png', 'jpg', 'webp')[i % 3]}")
    (root / "nothing" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return root


def configure(pictures, **options):
    small = {"model": "pooled-cnn", "channels": (0.71, 1.0), "image_size": (32, 32), "epochs": 2, "batch_size": 20}
    return make_run(images=str(pictures), **{**PLAIN, **small, **options})


@pytest.fixture(scope="session")
def trained(pictures, tmp_path_factory):
    """A run of twelve epochs with all that changes training, and its result."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALESTEER_CACHE", str(directory.parent / "cache"))
        config = configure(
            pictures, epochs=12, lr=0.02, flip=True, shift=1, resize=(0.9, 1.1), class_weights=True, channels=()
        )
        return directory, config, train(config, directory, device="cpu")


def usual_scale(directory, pictures):
    """By how much a run's training pictures are shrunk to 32 x 32, in the median."""
    factors = []
    with open(directory / "split.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["part"] == "train" and "broken" not in row["path"]:
                with Image.open(pictures / row["path"]) as image:
                    factors.append(min(1, 32 / max(image.size)))
    return float(np.median(factors))


def test_a_run_learns_the_users_classes_and_keeps_all_that_is_needed_to_use_it(trained, pictures):
    directory, config, result = trained
    assert result["test_error"] < 0.25  # 0.5 for the largest class alone
    assert sorted(row["class"] for row in result["test_error_by_class"]) == sorted(CLASSES)
    assert "test_error_by_scale" not in result
    model = load_model(directory)
    assert read_run(directory) == config
    scale = usual_scale(directory, pictures)
    assert 0.8 < scale < 1
    assert model.task == Task(3, 3, (32, 32), CLASSES, "pad", "surroundings", None, scale)  # no even ground: no objects
    images = load(config, "train")
    assert model.input_mean.tolist() == pytest.approx(images.mean)
    assert model.input_std.tolist() == pytest.approx(images.std)
    about = json.loads((directory / "model" / "config.json").read_text())
    assert about["task"] == {
        "in_chans": 3, "num_classes": 3, "image_size": [32, 32], "classes": list(CLASSES), "fit": "pad",
        "ground": "surroundings",
        "value_range": None, "scale": scale, "object_size": None, "percentiles": None, "planes": None,
        "pixel_size": None, "object_sizes": None,
    }  # fmt: skip
    data = result["environment"]["data"]
    assert data["classes"] == list(CLASSES)
    assert data["digest"] == images.about["digest"]
    assert sum(data["counts"].values()) == 181


def test_the_folder_to_deploy_is_the_same_network_and_the_page_names_the_classes(trained):
    directory, config, result = trained
    model = load_model(directory / "model")
    assert read_run(directory / "model") == config
    assert model.task[:6] == (3, 3, (32, 32), CLASSES, "pad", "surroundings")
    assert evaluate(model, load(config, "test"))["error"] == result["test_error"]
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in CLASSES)
    assert f"{100 * result['test_error']:.2f}" in page


def test_a_run_builds_its_network_once_and_classifies_each_test_picture_once(pictures, tmp_path, monkeypatch):
    built, asked, make, batches = [], [], loop.create_model, ImageSet.batches
    for module in (loop, pretrained):
        monkeypatch.setattr(module, "create_model", lambda *own, **more: built.append(own) or make(*own, **more))
    monkeypatch.setattr(ImageSet, "batches", lambda own, *size: asked.append(own.about["part"]) or batches(own, *size))
    train(configure(pictures, image_size=(16, 16), channels=()), tmp_path / "run", device="cpu")
    assert len(built) == 1
    assert asked == ["val", "val", "test"]  # two epochs
    assert [path.name for path in (tmp_path / "run").rglob("*.safetensors")] == ["model.safetensors"]
    assert (tmp_path / "run" / "report.html").exists()


def test_the_split_is_written_down(trained, pictures):
    directory, config, _ = trained
    with open(directory / "split.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["path"] for row in rows} == {p.relative_to(pictures).as_posix() for p in pictures.glob("*/*")}
    for part in ("train", "val", "test"):
        broken = any(row["part"] == part and row["path"] == "nothing/broken.png" for row in rows)
        assert sum(row["part"] == part for row in rows) - broken == len(load(config, part))


def test_error_by_class_is_that_of_each_class_alone(trained):
    directory, config, result = trained
    model = load_model(directory)
    images = load(config, "test")
    found = evaluate(model, images)
    assert found["by_class"] == result["test_error_by_class"]
    wrong = 0
    for label, row in enumerate(found["by_class"]):
        chosen = images.labels == label
        part = ImageSet(images.images[chosen], images.labels[chosen], images.scales[chosen])
        assert row == {"class": CLASSES[label], "images": len(part), "error": evaluate(model, part)["error"]}
        wrong += round(row["images"] * row["error"])
    assert wrong == round(found["error"] * len(images))


def test_evaluate_on_the_command_line_shows_classes_and_no_sizes(trained, capsys):
    directory, _, result = trained
    assert cli.main(["evaluate", str(directory), "--device", "cpu"]) == 0
    first, *rows, means, _ = capsys.readouterr().out.splitlines()
    assert means.startswith("mean over classes: precision ")
    assert first.startswith(f"test error {100 * result['test_error']:.2f} % (")
    assert [row.split("  ")[1].strip() for row in rows] == list(CLASSES)
    assert len({row.index("%") for row in rows}) == 1


def test_a_network_without_its_pictures_asks_for_them(trained, tmp_path, capsys):
    assert cli.main(["export", str(trained[0]), "--to", "folder", "--output", str(tmp_path / "net")]) == 0
    assert cli.main(["evaluate", str(tmp_path / "net"), "--device", "cpu"]) == 2
    assert "does not say which pictures it was trained on: give the run's own directory, or --images." in (
        capsys.readouterr().err
    )


@pytest.fixture
def others(pictures, tmp_path):
    """Labelled pictures that the trained network knows nothing of: two of its classes, and a broken file."""
    rng = np.random.default_rng(7)
    for label in (0, 1):
        (tmp_path / "others" / CLASSES[label]).mkdir(parents=True)
        for i in range(15):
            draw(label, rng).save(tmp_path / "others" / CLASSES[label] / f"{i}.png")
    (tmp_path / "others" / CLASSES[1] / "broken.jpg").write_bytes(b"no picture")
    return tmp_path / "others"


@pytest.mark.parametrize("inside", ["", "model"])
def test_evaluate_measures_other_labelled_pictures(trained, others, capsys, caplog, inside):
    model = load_model(trained[0])
    assert cli.main(["evaluate", str(trained[0] / inside), "--images", str(others), "--device", "cpu"]) == 0
    first, *rows, _, ece = capsys.readouterr().out.splitlines()
    wrong = []
    for name in CLASSES[:2]:
        paths = sorted((others / name).glob("*.png"))
        x = torch.stack([torch.from_numpy(read_picture(path, 3, (32, 32), "pad")) for path in paths]) / 255
        with torch.no_grad():
            wrong.append(int((model(x).argmax(1) != CLASSES.index(name)).sum()))
    assert first == f"error {100 * sum(wrong) / 30:.2f} % (30 images)"
    assert [" ".join(row.split()) for row in rows] == [
        f"{name} {100 * n / 15:.2f} % (15)" for name, n in zip(CLASSES, wrong, strict=False)
    ]
    assert re.fullmatch(r"calibration error \d+\.\d\d %", ece)
    assert "broken.jpg cannot be read" in caplog.text
    assert "1 of 31 pictures cannot be read and are left out." in caplog.text


def test_pictures_of_12_bits_are_trained_and_predicted_by_their_range(tmp_path, capsys, caplog):
    rng, photos = np.random.default_rng(0), tmp_path / "photos"
    for label, name in enumerate(("cell", "nothing")):
        (photos / name).mkdir(parents=True)
        for i in range(20):
            values = rng.integers(0, 400, (24, 24), np.uint16)
            values[8:16, 8:16] += (1 - label) * 3000
            Image.fromarray(values).save(photos / name / f"{i}.tif")
    small = ["--image-size", "24", "24", "--grey", "--model", "pooled-cnn", "--channels", "none", "--epochs", "4"]
    words = ["train", str(photos), *small, "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    assert cli.main(words) == 2
    assert "--value-range, as 0 4095" in capsys.readouterr().err
    assert cli.main([*words, "--value-range", "0", "4095"]) == 0
    run = next((tmp_path / "runs").glob("photos-pooled-cnn-*"))
    assert load_model(run).task.value_range == (0.0, 4095.0)
    picture = photos / "cell" / "3.tif"
    capsys.readouterr()
    assert cli.main(["predict", str(run), str(picture), "--device", "cpu"]) == 0
    assert "class cell" in capsys.readouterr().out
    assert cli.main(["evaluate", str(run), "--images", str(photos), "--device", "cpu"]) == 0
    assert "error 0.00 % (40 images)" in capsys.readouterr().out
    # Another camera, whose numbers are sixteen times as large: read as they are, all would be white.
    large = Image.fromarray(np.asarray(Image.open(picture)) * np.uint16(16))
    large.save(tmp_path / "large.tif")
    read = [reader(load_model(run))(picture)[0], read_picture(tmp_path / "large.tif", 1, value_range=(0, 65520))]
    np.testing.assert_array_equal(*read)
    words = ["predict", str(run), str(tmp_path / "large.tif"), "--device", "cpu"]
    assert cli.main([*words, "--value-range", "0", "65520"]) == 0
    assert "class cell" in capsys.readouterr().out
    assert cli.main(["evaluate", str(run), "--value-range", "0", "1", "--device", "cpu"]) == 2
    assert "`value_range` (got (0.0, 1.0)) needs `images`" in capsys.readouterr().err
    assert cli.main(["suggest", str(photos / "cell"), "--value-range", "0", "4095"]) == 0
    assert "--value-range 0.0 4095.0" in capsys.readouterr().out


def test_names_of_classes_do_not_steer_the_terminal(cache, tmp_path, capsys):
    names = ("\x1b[2Jcat", "dog")
    model = create_model("pooled-cnn", in_chans=3, num_classes=2, image_size=16, widths=(2, 3), kernel_size=3)
    model.task = model.task._replace(classes=names)
    save_pretrained(model, tmp_path / "net")
    for name in names:
        (tmp_path / "photos" / name).mkdir(parents=True)
        draw(0, np.random.default_rng(0)).save(tmp_path / "photos" / name / "x.png")
    words = ["evaluate", str(tmp_path / "net"), "--device", "cpu", "--images"]
    assert cli.main([*words, str(tmp_path / "photos")]) == 0
    assert "  \ufffd[2Jcat  " in capsys.readouterr().out
    assert cli.main([*words, str(tmp_path / "none\x1b[2J")]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_names_of_files_and_folders_do_not_steer_the_terminal(forks, tmp_path):
    photos, log = tmp_path / "photos\x1b[2J", tmp_path / "log"
    for name in ("cat\x1b]0;x\x07", "dog"):
        (photos / name).mkdir(parents=True)
        for i in range(20):
            draw(0, np.random.default_rng(i)).save(photos / name / f"{i}.png")
    draw(0, np.random.default_rng(0)).save(photos / "outside\x1b[8m.png")
    (photos / "dog" / "broken\x1b[8m.png").write_bytes(b"")
    (tmp_path / "grid.toml").write_text('[base]\nimages = "net\\u001b[2J"')
    small = ["--image-size", "16", "16", "--model", "pooled-cnn", "--channels", "none", "--epochs", "1"]
    words = [
        ["train", str(photos), *small, "--runs", str(tmp_path / "runs\x1b[2J"), "--device", "cpu"],
        ["suggest", str(photos)],
        ["sweep", str(tmp_path / "grid.toml"), "--dry-run"],
        ["export", "digits", "--to", "folder", "--output", str(tmp_path / "net\x1b[2J")],
    ]
    process = forks.Process(target=jobs.commands, args=(str(tmp_path / "cache"), str(log), words))
    process.start()
    process.join(300)
    said = log.read_text()
    told = (
        "Pictures in no class folder",
        "broken\ufffd[8m.png cannot",
        "validation",
        "train 'net\ufffd[2J'",
        "parameters",
    )
    for part in (*told, "1 picture (dog/broken\ufffd[8m.png) cannot be read"):
        assert part in said
    assert not {character for character in said if not character.isprintable()} - {"\n", "\r"}


def test_the_card_of_a_network_holds_names_and_no_markup(tmp_path):
    names = ("<script>alert(1)</script>", "a|b\x1b[2J", "`c` **d** [e](f)")
    model = create_model("pooled-cnn", in_chans=3, num_classes=3, widths=(2, 3), kernel_size=3)
    model.task = model.task._replace(classes=names)
    result = {"run": make_run(images="<b>p*h*</b>").to_dict(), "val_error": 0.1, "environment": {"commit": "<i>"}}
    result["environment"]["command"] = "scalesteer train '``<b>' \x1b[2J"
    result["test_error_by_class"] = [{"class": name, "images": 3, "error": 0.0} for name in names]
    folder = save_pretrained(model, tmp_path / "<u>net`\x1b", card=results.card(result))
    card = (folder / "README.md").read_text()
    assert not {character for character in card if not character.isprintable()} - {"\n"}
    outside = re.sub(r"(`+) ?.*? ?\1", "", re.sub(r"^```python.*?^```", "", card, flags=re.DOTALL | re.MULTILINE))
    assert not re.search(r"<|(?<!\\)[*\[`]", outside)
    assert card.count("| a\\|b") == 1  # still one cell
    assert 'from_pretrained("<u>net`\ufffd")' in card


def test_evaluate_warns_of_the_pictures_of_the_training(trained, pictures, others, capsys, caplog):
    for words, warned in (([pictures], True), ([pictures, "--part", "test"], False), ([others], False)):
        assert cli.main(["evaluate", str(trained[0]), "--device", "cpu", "--images", *map(str, words)]) == 0
        assert ("the model was trained on some of these pictures" in caplog.text) == warned
        caplog.clear()


def test_evaluate_shows_the_error_by_size_of_a_list_and_a_part_of_it(trained, others, capsys):
    paths = sorted(others.glob("*/*.png"))
    lines = [f"{path},{path.parent.name},{('val', 'test')[i % 2]},{1 + i % 3}" for i, path in enumerate(paths)]
    (others / "list.csv").write_text("\n".join(["path,label,part,size", *lines]))
    words = ["evaluate", str(trained[0]), "--device", "cpu", "--images", str(others / "list.csv")]
    assert cli.main(words) == 0
    first, *rows, _ = capsys.readouterr().out.splitlines()
    assert first.endswith("(30 images)")
    assert [row.split()[:2] + row.split()[-1:] for row in rows[3:]] == [["size", str(n), "(10)"] for n in (1, 2, 3)]
    assert cli.main([*words, "--part", "val"]) == 0
    assert re.match(r"val error .*\(15 images\)", capsys.readouterr().out)


def test_evaluate_of_a_model_without_its_run_does_not_take_the_working_directory_for_its_pictures(
    trained, others, tmp_path, monkeypatch, caplog
):
    assert cli.main(["export", str(trained[0]), "--to", "folder", "--output", str(tmp_path / "net")]) == 0
    monkeypatch.chdir(others)
    assert cli.main(["evaluate", str(tmp_path / "net"), "--device", "cpu", "--images", "."]) == 0
    assert "the model was trained on some of these pictures" not in caplog.text


def test_a_border_that_later_channels_cannot_have_is_noticed_before_the_training(pictures, cache, tmp_path):
    config = configure(pictures, channels=(0.5, 1.0), border=16, one_size_epochs=1, epochs=2)
    with pytest.raises(RunError, match=r"`channels` .*cannot be used: `border` \(got 16\) must be smaller than"):
        train(config, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_evaluate_names_classes_that_the_model_does_not_know(trained, others, capsys):
    (others / CLASSES[0]).rename(others / "a ring")
    assert cli.main(["evaluate", str(trained[0]), "--images", str(others)]) == 2
    said = "has classes that the model does not know: a ring; it knows a circle, großes Kreuz, nothing."
    assert said in capsys.readouterr().err


def test_evaluate_of_other_pictures_needs_a_model_of_own_ones(others, capsys):
    assert cli.main(["evaluate", "digits", "--images", str(others)]) == 2
    assert "needs a model of your own pictures: digits does not know" in capsys.readouterr().err


def test_runs_are_listed_with_what_came_of_them(trained, tmp_path, capsys):
    directory, config, result = trained
    shutil.copytree(directory, tmp_path / "finished")
    shutil.copytree(directory, tmp_path / "begun", ignore=shutil.ignore_patterns("result.json", "metrics.jsonl"))
    shutil.copytree(directory, tmp_path / "odd", ignore=shutil.ignore_patterns("result.json"))
    (tmp_path / "odd" / "config.json").write_text("{")
    (tmp_path / "odd" / ".metrics.jsonl.tmp").symlink_to("gone")  # a file that was there a moment ago
    (tmp_path / "no run").mkdir()
    for i, path in enumerate(tmp_path / name for name in ("begun", "odd", "finished")):
        for file in path.glob("[!.]*.json*"):
            os.utime(file, (86400 * (i + 1),) * 2)
    assert cli.main(["runs", "--runs", str(tmp_path)]) == 0
    head, *rows = [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert head == ["run", "epochs", "validation error", "test error", "when", "flags"]
    errors = [f"{100 * result[name]:.2f} %" for name in ("val_error", "test_error")]
    assert [row[0] for row in rows] == ["begun", "odd", "finished"]
    assert [row[1] for row in rows] == ["0 of 12", "cannot be read", "12 of 12"]
    assert rows[2][2:4] == errors
    assert rows[2][4].startswith(time.strftime("%Y-%m-%d", time.localtime(3 * 86400)))
    assert f"scalesteer train {rows[2][5]}" == config.command
    (tmp_path / "odd" / "config.json").unlink()
    os.mkfifo(tmp_path / "odd" / "config.json")  # would be waited for
    (tmp_path / "begun" / "result.json").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "begun" / "metrics.jsonl")
    assert cli.main(["runs", "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("cannot be read") == 2
    assert cli.main(["runs", "--runs", str(tmp_path / "no run")]) == 2
    assert "there are no runs in" in capsys.readouterr().err


def test_runs_show_the_error_of_epochs_that_looked_at_all_sizes(tmp_path, capsys):
    config = make_run(model="pooled-cnn", dataset="stir-mnist", epochs=3, channels=(0.5, 1), one_size_epochs=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(config.to_dict()))
    for errors, expected in (((0.1, 0.2), "10.00 %"), ((0.1, 0.2, 0.3), "30.00 %")):
        lines = "".join(json.dumps({"val_error": error, "val_loss": 0.0}) + "\n" for error in errors)
        (tmp_path / "run" / "metrics.jsonl").write_text(lines)
        assert cli.main(["runs", "--runs", str(tmp_path)]) == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(("count", "batch_size"), [(3, 2), (40, 8), (639, 64), (640, 128), (5000, 128)])
def test_few_pictures_have_small_batches_unless_a_size_is_named(count, batch_size):
    config = make_run(images="photos")
    assert batch_for(config.training, count) == batch_size
    assert Run.from_dict(config.to_dict()) == config
    assert cli.app.parse(shlex.split(config.command)[1:]).made == config
    named = cli.app.parse(["train", "photos", "--batch-size", "128"]).made
    assert batch_for(named.training, count) == 128
    assert named.name != config.name
    assert batch_for(make_run().training, count) == 128


@pytest.mark.parametrize(("options", "got"), [({"batch_size": 0}, 0), ({"batch_size": 1, "images": "photos"}, 1)])
def test_batches_have_two_images_or_more(options, got):
    with pytest.raises(ValueError, match=rf"`batch_size` must be at least 2 \(got {got}\)"):
        make_run(**options)


@pytest.mark.parametrize("batch_size", [40, 4])
def test_few_steps_in_an_epoch_are_told(pictures, caplog, batch_size):
    load(configure(pictures, batch_size=batch_size), "train")
    assert (f"steps of {batch_size} pictures: try a smaller batch size" in caplog.text) == (batch_size == 40)


def test_sizes_of_a_list_give_the_error_by_size(pictures, trained, tmp_path):
    directory, config, _ = trained
    lines = [f"{path},{path.parent.name},{1 + i % 2 / 2}" for i, path in enumerate(sorted(pictures.glob("*/[1-9]*")))]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,size", *lines]))
    images = load(changed(config, images=str(tmp_path / "list.csv")), "train")
    rows = evaluate(load_model(directory), images)["by_scale"]
    assert [(row["from"], row["images"]) for row in rows] == [
        (size, int((images.scales == size).sum())) for size in (1.0, 1.5)
    ]


def test_a_model_is_measured_by_the_names_of_its_classes(pictures, trained, tmp_path):
    config = trained[1]
    for name in CLASSES[1:]:
        (tmp_path / name).symlink_to(pictures / name, target_is_directory=True)
    (images,) = changed(config, images=str(tmp_path)).data.open(classes=CLASSES).load("test")
    assert set(images.labels.tolist()) == {1, 2}
    with pytest.raises(files.DataError, match="classes that the model does not know: a circle"):
        list(config.data.open(classes=CLASSES[1:]).load("test"))


def test_an_interrupted_run_goes_on_and_a_finished_one_returns_its_result(pictures, tmp_path, monkeypatch):
    config = configure(pictures)
    whole = train(config, tmp_path / "whole", device="cpu")
    steps = []

    def stop(*arguments):
        steps.append(arguments)
        if len(steps) == 7:
            raise KeyboardInterrupt
        return learning_rate(*arguments)

    learning_rate = loop.learning_rate
    monkeypatch.setattr(checkpoint, "SAVE_EVERY_S", 0)
    monkeypatch.setattr(loop, "learning_rate", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts", device="cpu")
    before = load_model(tmp_path / "parts")  # a checkpoint knows its classes too
    assert before.task.classes == CLASSES
    assert isinstance(before, ScaleChannels)
    result = train(config, tmp_path / "parts", device="cpu")
    assert {**result, "seconds": 0, "history": 0} == {**whole, "seconds": 0, "history": 0}
    monkeypatch.setattr(loop, "learning_rate", pytest.fail)
    assert train(config, tmp_path / "parts", device="cpu") == result


def test_a_run_is_not_mixed_with_pictures_that_came_later(pictures, tmp_path):
    root = tmp_path / "photos"
    for path in sorted(pictures.glob("*/?.*")):
        (root / path.parent.name).mkdir(parents=True, exist_ok=True)
        (root / path.parent.name / path.name).write_bytes(path.read_bytes())
    config = configure(root, epochs=1, batch_size=4, image_size=(16, 16), channels=(), model="pooled-cnn")
    result = train(config, tmp_path / "run", device="cpu")
    rows = [f"{line},2.0" for line in (tmp_path / "run" / "split.csv").read_text().splitlines()]
    (tmp_path / "run" / "split.csv").write_text("\n".join([rows[0].replace("2.0", "size"), *rows[1:]]) + "\n")
    assert train(config, tmp_path / "run", device="cpu") == result  # another version's table of the same pictures
    Image.new("RGB", (9, 9)).save(root / "nothing" / "new.png")
    with pytest.raises(RunError, match=r"began with \(1 new or changed, 0 gone or changed\); choose another directory"):
        train(config, tmp_path / "run", device="cpu")
    Image.new("RGB", (99, 9)).save(root / "nothing" / "0.png")
    with pytest.raises(RunError, match=r"\(2 new or changed, 1 gone or changed\)"):
        train(config, tmp_path / "run", device="cpu")
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(files.DataError, match="`images` must be a folder of pictures or a CSV file"):
        train(config, tmp_path / "run", device="cpu")


@pytest.mark.parametrize("change", ["rename", "remove", "add"])
def test_a_folder_that_changes_while_a_run_starts_shifts_no_labels(pictures, tmp_path, monkeypatch, change):
    root, read, changed = tmp_path / "photos", folder._load_block, list[str]()
    shutil.copytree(pictures, root)
    config = configure(root, epochs=1, image_size=(16, 16), channels=())
    whole = train(config, tmp_path / "whole", device="cpu")

    def read_then_change(spec, part, *arguments):
        block = read(spec, part, *arguments)
        if part == "train" and not changed:
            changed.append(part)
            first = root / CLASSES[0]
            if change == "add":
                shutil.copytree(first, root / "A class before the others")
            elif change == "rename":
                first.rename(root / "z, the last class now")
            else:
                shutil.rmtree(first)
        return block

    monkeypatch.setenv("SCALESTEER_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(folder, "_load_block", read_then_change)
    if change != "add":
        with pytest.raises(files.DataError, match="pictures were changed, moved or removed while they were read"):
            train(config, tmp_path / "run", device="cpu")
        assert not (tmp_path / "run").exists()
        return
    result = train(config, tmp_path / "run", device="cpu")
    assert result["test_error_by_class"] == whole["test_error_by_class"]
    assert (tmp_path / "run" / "split.csv").read_bytes() == (tmp_path / "whole" / "split.csv").read_bytes()


def test_class_weights_make_every_class_count_alike():
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    images = ImageSet(torch.zeros(10, 8, 8, dtype=torch.uint8), labels, torch.ones(10))
    weights = loop._class_weights(images)
    sums = [float(weights[labels][labels == label].sum()) for label in range(3)]
    assert sums == pytest.approx([10 / 3] * 3)


def test_weighted_steps_follow_the_gradient_of_the_weighted_loss(pictures):
    config = configure(pictures, class_weights=True, channels=(), schedule="constant", weight_decay=0.0)
    images = load(config, "train")
    rows = torch.arange(20)
    state, twin = (loop.initial_state(config, config.data.open().task, images) for _ in range(2))
    loss = loop.make_update(state, config.training, images)(rows, config.training.lr)
    x, labels = images.take(rows)
    counts = [int((images.labels == label).sum()) for label in range(3)]
    each = [F.cross_entropy(logits[None], label[None], label_smoothing=0.1) * len(images) / 3 / counts[label]
            for logits, label in zip(twin.model.train()(x), labels, strict=True)]  # fmt: skip
    expected = torch.stack(each).mean()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for (name, p), q in zip(state.model.named_parameters(), twin.model.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-5), name


@pytest.mark.parametrize("grey", [False, True])
def test_pictures_go_on_beyond_their_border_in_its_colour_unless_a_mirror_is_asked_for(pictures, grey):
    config = configure(pictures, shift=3, grey=grey)
    task = config.data.open().task
    assert loop._make_augmentation(config.training, task).beyond == "border"
    assert loop._make_augmentation(changed(config, beyond="mirror").training, task).beyond == "mirror"
    assert loop._make_augmentation(configure(pictures, grey=grey).training, task) is None


def test_a_function_of_ones_own_changes_all_training_images_and_no_others(pictures, tmp_path):
    config, batches = configure(pictures, batch_size=4, epochs=2, widths=(2, 3, 4), flip=True), []

    def darken(x):
        batches.append(x)
        return x / 2

    plain = train(config, tmp_path / "plain", device="cpu")
    result = train(config, tmp_path / "darker", device="cpu", augment=darken)
    assert len(batches) == 2 * (len(load(config, "train")) // 4)
    assert all(x.shape == (4, 3, 32, 32) and x.min() >= 0 and x.max() <= 1 for x in batches)
    assert [e["loss"] for e in result["history"]] != [e["loss"] for e in plain["history"]]
    assert result["environment"]["note"] == "training images changed by a function of the caller's"
    assert "note" not in plain["environment"]


def test_the_transforms_of_the_page_change_training_images(pictures, tmp_path, monkeypatch):
    """The block of docs/your-own-images.md, on a small network."""
    test_timm.load()  # so that torchvision can be imported
    pytest.importorskip("torchvision")
    page = (ROOT / "docs" / "your-own-images.md").read_text(encoding="utf-8")
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "torchvision" in text)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pictures, "photos")
    small = partial(make_run, model="pooled-cnn", widths=(2, 3, 4), channels=(), epochs=1)
    scope = {"train": partial(train, device="cpu"), "make_run": small, "torch": torch, "Path": Path}
    exec(block, scope)
    assert json.loads(Path("runs/mine/result.json").read_text())["environment"]["note"].startswith("training images")
    x = torch.rand(3, 3, 32, 32)
    assert not torch.equal(torch.stack([scope["transform"](image) for image in x]), x)


def test_pictures_with_an_empty_channel_can_be_trained_on(pictures, tmp_path):
    for i, path in enumerate(sorted(pictures.glob("*/[1-9].*"))):
        red = np.asarray(Image.open(path).convert("RGB")) * np.array([1, 0, 1], np.uint8)
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.fromarray(red).save(tmp_path / "ab"[i % 2] / f"{i}.png")
    config = configure(tmp_path, batch_size=4)
    state = loop.initial_state(config, config.data.open().task, load(config, "train"))
    network = state.model.net
    assert network.input_std[1] == 1
    assert network.input_mean[1] == 0
    assert all(bool(p.isfinite().all()) for p in state.model(torch.rand(2, 3, 32, 32)))


# The configuration


def test_without_a_model_own_pictures_get_one_that_takes_any_size():
    config = make_run(images="photos/")
    assert (config.network.model, config.data.image_size) == ("pooled-deep", (64, 64))
    named = {"model": "pooled-deep", "test_channels": (0.5, 0.71, 1.0, 1.41, 2.0), "resize": (0.5, 2.0)}
    same = make_run(images="./photos", image_size=(64, 64), **named)
    assert config == same == Run.from_dict(config.to_dict())
    assert make_run(images="photos", channels=(1.0,)).network.channels == (1.0,)
    assert cli.app.parse(["train", "photos"]).made == config


@pytest.mark.parametrize("model", ["pooled-cnn", "pooled-resnet", "steered-cnn"])
def test_a_named_model_keeps_the_channels_of_own_pictures_unless_they_are_refused(model):
    config = make_run(images="photos", model=model)
    assert config.network.test_channels == (0.5, 0.71, 1.0, 1.41, 2.0)
    plain = make_run(images="photos", model=model, channels=())
    assert plain.network.channels == plain.network.test_channels == ()
    assert plain.name != config.name
    for one in (config, plain):
        assert Run.from_dict(one.to_dict()) == one
        assert cli.app.parse(shlex.split(one.command)[1:]).made == one
    assert cli.app.parse(["train", "photos", "--model", model]).made == config
    assert cli.app.parse(["train", "photos", "--model", model, "--channels", "None"]).made == plain
    assert make_run(model=model, dataset="stir-mnist").network.channels == ()


def test_pictures_are_named_once_and_before_the_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_run(images="-p", model="pooled-cnn")
    assert cli.app.parse(shlex.split(config.command)[1:]).made == config
    assert cli.app.parse(["train", "--images", "photos"]).made == make_run(images="photos")
    with pytest.raises(ValueError, match="give your pictures once"):
        cli.app.parse(["train", "photos", "--images", "photos"]).made  # noqa: B018
    with pytest.raises(ValueError, match=r"there is no folder 'MNIST_Scale'; .* type --dataset mnist-scale"):
        cli.app.parse(["train", "MNIST_Scale"]).made  # noqa: B018
    (tmp_path / "mnist-scale").mkdir()
    assert cli.app.parse(["train", "mnist-scale"]).made.data.images == "mnist-scale"


@pytest.mark.parametrize(
    ("images", "name"),
    [("my photos Ω/", "my-photos-Ω"), ("/data/list.csv", "list"), (".", "images"), ("../..", "images"),
     ("a/" + "x" * 300, "x" * 40)],
)  # fmt: skip
def test_a_run_is_named_after_the_folder(images, name):
    config = make_run(images=images)
    assert config.name == f"{name}-pooled-deep-{config.identity}"


def test_the_command_can_be_typed():
    config = make_run(images="my photos/$x", grey=True, class_weights=True, image_size=(32, 48))
    assert config.command.startswith("scalesteer train 'my photos/$x' --class-weights --image-size 32 48 --grey")
    parsed = cli.app.parse(shlex.split(config.command)[1:])
    assert parsed.made == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "stir-mnist"}, "`dataset` .got 'stir-mnist'. and `images` .got 'x'. exclude each other"),
        ({"model": "ss-cnn"}, "`model` must be one that takes any size .* .got 'ss-cnn'."),
        ({"model": "plain-cnn"}, "`model` must be one that takes any size for your own images: group-cnn,"),
        ({"split": 1}, "`split` .got 1. does not apply to your own `images`"),
        ({"sizes": (1, 1, 1)}, "`sizes` .* does not apply to your own `images`"),
        ({"fit": "stretch"}, "`fit` must be one of"),
        ({"image_size": (0, 3)}, "`image_size` must be at least 1"),
        ({"class_weights": 1}, "`class_weights` must be True or False"),
        ({"images": None, "grey": True}, "`grey` .got True. needs `images`"),
        ({"images": None, "image_size": (9, 9)}, "`image_size` .got .9, 9.. needs `images`"),
        ({"images": ""}, "`images` must be the path"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_own_pictures_is_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_run(**{"images": "x", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"batch_size": 500}, "`batch_size` must be at most 1[0-9][0-9], the training images .got 500"),
     ({"train_images": 500}, "`train_images` must be at most 1[0-9][0-9]"),
     ({"image_size": (4, 4)}, "`image_size` must be at least 5 x 5")],
)  # fmt: skip
def test_what_the_folder_does_not_suffice_for_is_said_before_a_directory_is_made(pictures, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(configure(pictures, **options), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


# Files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": ["a"]}, "`classes` must be 2 different names"),
        ({"classes": [1, 2, 3]}, "`classes` must be 2 different names"),
        ({"num_classes": 10**12, "classes": ["a"]}, "`classes` must be 1000000000000 different names"),
        ({"in_chans": 10**9}, "names a model that cannot be"),
        ({"image_size": "large"}, "names a model that cannot be"),
        ({"fit": "none"}, "`fit` must be one of"),
        (None, "names a model that cannot be: 'task'"),
    ],
)
def test_a_file_whose_task_cannot_be_is_refused(tmp_path, change, message):
    tensors, meta = files.read(OLD / "pictures" / "model.safetensors")
    about = {name: value for name, value in meta["about"].items() if name != "task"}
    about |= {} if change is None else {"task": {**meta["about"]["task"], **change}}
    (tmp_path / "model.safetensors").write_bytes(files.encode(tensors, about))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_a_models_task_is_that_of_its_dataset(undisturbed):
    model = load_model(undisturbed)
    assert model.task == DATASETS["mnist-scale"]
    assert count_parameters(model) == count_parameters(create_model("plain-cnn", "mnist-scale"))


# The command line


WITHOUT_TERMINAL = """
from scalesteer import files
from scalesteer.app import cli
files.LOG_EVERY_S = 0
raise SystemExit(cli.main())
"""


def test_the_command_line_trains_and_says_how_far_it_is_without_a_terminal(pictures, tmp_path):
    flags = "--model pooled-cnn --image-size 24 24 --epochs 1 --device cpu --runs"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TERMINAL, "train", "my pictures", *shlex.split(flags), tmp_path / "runs"],
        cwd=pictures.parent,
        capture_output=True,
        text=True,
    )
    out, said = done.stdout, done.stderr.splitlines()
    assert out.startswith("test error ")
    directory = Path(out.split(": ")[-1].strip())
    assert directory.name.startswith("my-pictures-pooled-cnn-")
    kept = {"config.json", "metrics.jsonl", "model", "report.html", "result.json", "split.csv"}
    assert {path.name for path in directory.glob("[!.]*")} == kept
    assert said[0].startswith("scalesteer: my pictures: 3 classes; pictures: 1")
    assert said[1].startswith("scalesteer: reading train: 1 of ")
    assert any(re.fullmatch("scalesteer: 1[0-9][0-9] pictures for training: batches of 16", line) for line in said)
    assert json.loads((directory / "result.json").read_text())["batch_size"] == 16
    assert any(line.startswith("scalesteer: my pictures/nothing/broken.png cannot be read: ") for line in said)
    assert any(line.startswith("scalesteer: epoch 1 of 1: step 1 of 8, loss ") for line in said)
    assert any(line.startswith("scalesteer: epoch 1 of 1: loss ") for line in said)
    assert not (pictures.parent / "results").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none", "`images` must be a folder of pictures or a CSV file (got none, which is not there)"),
        (".", "`images` . has pictures of 0 classes, and two are needed: ./cats, ./dogs, ..."),
        (". --model ss-cn", "Did you mean 'ss-cnn'?"),
        (". --model ss-cnn", "`model` must be one that takes any size for your own images: group-cnn,"),
        (". --fit fill", "fill"),
        ("--grey", "`grey` (got True) needs `images`"),
    ],
)
def test_a_mistake_with_own_pictures_is_one_clear_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(["train", "--device", "cpu", *words.split()])
    except SystemExit as left:  # the parser's own
        code = left.code
    out, err = capsys.readouterr()
    assert code == 2
    assert message in out + err
    assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


def test_a_run_measures_the_objects_of_its_training_pictures(cache, tmp_path):
    for i in range(40):
        pixels = np.full((48, 48, 3), 220, np.uint8)
        side = 10 + i // 2 % 5  # in both classes and all parts alike
        pixels[12 : 12 + side, 20 : 20 + side] = (30, 60, 200 * (i % 2))
        (tmp_path / "squares" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "squares" / "ab"[i % 2] / f"{i}.png")
    for fit, size, scale, pixels in (("pad", 64, 1.0, 12), ("resize", 24, 0.5, 6)):
        config = configure(tmp_path / "squares", image_size=(size, size), epochs=1, batch_size=8, fit=fit)
        train(config, tmp_path / fit, device="cpu")
        task = load_model(tmp_path / fit).task
        assert task.scale == scale
        assert task.object_size == pytest.approx(pixels, abs=1)
