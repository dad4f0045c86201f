"""Training at some sizes, testing at others, by networks that look at an image at several sizes."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from torch import nn

from scalesteer.app import cli, data, evaluate, evaluation, load, load_model, loop, train, with_channels
from scalesteer.app import run as running
from scalesteer.app.config import make_run
from scalesteer.app.demo import DemoModel
from scalesteer.app.evaluation import by_training_size, evaluation_batch, rank_correlation
from scalesteer.channels import ScaleChannels
from scalesteer.datasets import ImageSet, load_split
from tests.app.test_train import interrupted, outcome
from tests.runs import changed

SMALL = make_run(
    model="pooled-cnn", dataset="stir-mnist", sizes=(20, 10, 10), train_sizes=(30, 32), test_sizes=(20, 30, 31, 50),
    widths=(2, 3), kernel_size=3, batch_size=20, epochs=2,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(_kept_splits, tmp_path_factory):
    """The directory of the small run."""
    directory = tmp_path_factory.mktemp("small") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALESTEER_CACHE", str(_kept_splits))
        train(SMALL, directory, device="cpu")
    return directory


def test_training_and_validation_images_have_the_training_sizes_only(cache):
    for part, count in (("train", 20), ("val", 10)):
        assert load(SMALL, part).scales.unique(return_counts=True)[1].tolist() == [count] * 3
        assert load(SMALL, part).scales.unique().tolist() == [30, 31, 32]
    assert load(SMALL, "test").scales.unique().tolist() == [20, 30, 31, 50]


def test_error_is_told_for_each_size_and_by_whether_it_was_trained(cache, trained):
    result = json.loads((trained / "result.json").read_text())
    model = load_model(trained)
    errors = []
    for size in SMALL.data.test_sizes:
        images = load_split("stir-mnist", 0, "test", test_sizes=(size,), sizes=(20, 10, 10))
        with torch.no_grad():
            errors.append(float((model(images.images[:, None] / 255).argmax(1) != images.labels).double().mean()))
    rows = [
        {"from": size, "to": size, "images": 10, "error": error}
        for size, error in zip(SMALL.data.test_sizes, errors, strict=True)
    ]
    assert result["test_error_by_scale"] == rows
    assert result["test_error"] == pytest.approx(np.mean(errors))
    assert result["test_error_inside"] == pytest.approx(np.mean(errors[1:3]))
    assert result["test_error_outside"] == pytest.approx(np.mean([errors[0], errors[3]]))


def test_each_size_counts_alike_inside_and_outside():
    sizes, images, errors = (20, 30, 32, 33, 50), (1, 5, 10, 2, 70), (0.5, 0.1, 0.2, 0.3, 0.7)
    rows = [
        {"from": size, "to": size, "images": count, "error": error}
        for size, count, error in zip(sizes, images, errors, strict=True)
    ]
    found = by_training_size(rows, (30, 32))
    assert found == pytest.approx({"test_error_inside": 0.15, "test_error_outside": 0.5})
    assert by_training_size(rows[:1], (30, 32)) == {"test_error_outside": 0.5}
    assert by_training_size(rows[1:3], (30, 32)) == {}
    assert by_training_size(rows, ()) == {}  # its sizes are drawn from a range


def test_all_sizes_trained_have_no_inside_nor_outside(cache, tmp_path):
    result = train(changed(SMALL, test_sizes=(30, 32), epochs=1), tmp_path, device="cpu")
    assert not {"test_error_inside", "test_error_outside", "size_correlation"} & set(result)


def test_test_images_are_loaded_some_sizes_at_a_time(cache, trained, monkeypatch):
    loaded = []
    original = data.load_split
    monkeypatch.setattr(data, "load_split", lambda **own: loaded.append(own["test_sizes"]) or original(**own))
    monkeypatch.setattr(data, "TEST_BYTES", 2 * 10 * 64 * 64)
    parts = SMALL.data.open().load("test")
    assert loaded == []  # none before it is needed
    model = load_model(trained)
    found = evaluate(model, parts)
    assert loaded == [(20, 30), (31, 50)]
    whole = evaluate(model, load(SMALL, "test"))
    assert found["loss"] == pytest.approx(whole["loss"])
    assert (found["error"], found["by_scale"], found["images"]) == (whole["error"], whole["by_scale"], 40)


def test_many_sizes_and_those_drawn_from_a_range_are_binned(cache, tiny):
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), load(tiny, "test")
    few = torch.tensor([0.35, 0.85]).repeat(10)
    drawn = evaluate(model, replace(images, scales=few))["by_scale"]
    assert [row["from"] for row in drawn] == [0.3, 0.8]
    assert [row["from"] for row in evaluate(model, replace(images, scales=few, about={}))["by_scale"]] == [0.35, 0.85]
    many = ImageSet(images.images.repeat(4, 1, 1), images.labels.repeat(4), torch.linspace(0.3, 1, 80))
    assert [row["from"] for row in evaluate(model, many)["by_scale"]] == [low for low, _ in evaluation.SCALE_BINS]


def test_sizes_outside_the_usual_bins_have_bins_too():
    sizes = np.array([0.05, 0.1, 0.25, 0.3, 0.95, 1.0, 1.9, 2.0, 2.5])
    found = [(ends, sizes[chosen].tolist()) for ends, chosen in evaluation.split_by_scale(sizes)]
    assert found == [
        ((0.0, 0.1), [0.05]), ((0.1, 0.2), [0.1]), ((0.2, 0.3), [0.25]), ((0.3, 0.4), [0.3]), ((0.9, 1.0), [0.95]),
        ((1.0, 2.0), [1.0, 1.9]), ((2.0, 4.0), [2.0, 2.5]),
    ]  # fmt: skip
    drawn = np.random.default_rng(0).uniform(0.001, 70, 1000).astype(np.float32)
    assert (sum(chosen.astype(int) for _, chosen in evaluation.split_by_scale(drawn)) == 1).all()
    assert list(evaluation.split_by_scale(np.zeros(0))) == []


def test_test_channels_that_cannot_be_are_noticed_before_the_training(cache, tmp_path):
    config = changed(SMALL, test_channels=(0.02, 1.0))
    with pytest.raises(running.RunError, match=r"`test_channels` \(got \(0.02, 1.0\)\) .*channel of scale 0.02"):
        train(config, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    assert train(changed(config, tuning=True), tmp_path / "run", device="cpu")["status"] == "finished"  # tests nothing


def test_channels_that_come_in_later_are_noticed_before_the_training(cache, tmp_path):
    config = changed(SMALL, channels=(0.02, 1.0), one_size_epochs=1)
    with pytest.raises(running.RunError, match=r"`channels` \(got \(0.02, 1.0\)\) .*channel of scale 0.02"):
        train(config, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_images_at_once_are_bounded_by_their_area_in_all_channels():
    net = nn.Identity()

    def batch(side, *scales):
        images = ImageSet(torch.zeros(1, side, side, dtype=torch.uint8), torch.zeros(1), torch.ones(1))
        return evaluation_batch(ScaleChannels(net, scales) if scales else net, images)

    assert batch(28) == batch(40) == 100
    assert batch(112) * 112**2 <= evaluation.EVALUATION_PIXELS["cpu"] < (batch(112) + 1) * 112**2
    assert batch(112, 0.5, 2.0) == int(evaluation.EVALUATION_PIXELS["cpu"] / (4.25 * 112**2))
    assert batch(5000) == 1


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 6, 200), rng.normal(size=200)
    assert rank_correlation(first, second) == pytest.approx(spearmanr(first, second).statistic)
    assert rank_correlation(second, second**3) == pytest.approx(1)
    assert rank_correlation(first, -first) == pytest.approx(-1)
    assert rank_correlation(first, np.ones(200)) is None


class Blob(nn.Module):
    """Two classes; says class 0 where the picture shows one square of 8 x 8, and class 1 always less surely."""

    def forward(self, x):
        score = -((x.sum((1, 2, 3)) - 64) ** 2) / 64
        return torch.stack([score, score - 1], 1)


def test_size_that_answered_is_compared_with_the_true_one():
    sides = torch.tensor([4, 8, 16, 4, 8, 16])
    images = torch.zeros(6, 32, 32, dtype=torch.uint8)
    for image, side in zip(images, sides.tolist(), strict=True):
        image[:side, :side] = 255
    squares = ImageSet(images, torch.zeros(6, dtype=torch.int64), sides / 8)
    model = ScaleChannels(Blob(), (0.5, 1.0, 2.0))
    assert evaluate(model, squares)["size_correlation"] == pytest.approx(1)
    upside_down = replace(squares, scales=sides.flip(0) / 8)
    expected = spearmanr(sides, sides.flip(0)).statistic
    assert evaluate(model, upside_down)["size_correlation"] == pytest.approx(expected)
    assert "size_correlation" not in evaluate(model, replace(squares, scales=torch.ones(6)))
    assert "size_correlation" not in evaluate(Blob(), squares)


def test_network_is_shown_several_sizes_without_its_own_channels():
    net = Blob()
    for model in (net, ScaleChannels(net, (1.0, 3.0), "max", drop=0.5)):
        found = with_channels(model, (0.5, 2.0), "mean")
        assert (found.net, found.scales, found.join, found.drop) == (net, (0.5, 2.0), "mean", 0.0)


def test_run_with_every_random_choice_goes_on_to_the_same_numbers(cache, tmp_path):
    random = {"resize": (0.7, 1.4), "flip": True, "shift": 2, "dropout": 0.3, "channels": (0.5, 1), "drop": 0.5}
    config = changed(SMALL, **random)
    train(config, tmp_path / "a", device="cpu")
    interrupted(config, tmp_path / "b", steps=5)
    train(config, tmp_path / "b", device="cpu")
    assert outcome(tmp_path / "b") == outcome(tmp_path / "a")
    assert load_model(tmp_path / "a").scales == (0.5, 1.0)


def test_channels_may_come_in_with_a_learning_rate_of_their_own():
    training = changed(SMALL, epochs=12, channels=(0.5, 1), one_size_epochs=9, channels_lr=0.002, lr=0.01).training
    alone = changed(SMALL, epochs=9, lr=0.01).training  # as if there were no more epochs
    for share in (0.0, 0.1, 0.3, 0.7, 0.99):
        assert loop.learning_rate(training, 0.75 * share) == pytest.approx(loop.learning_rate(alone, share))
    last = [loop.learning_rate(training, 0.75 + 0.25 * share) for share in (0, 0.25, 0.5, 1)]
    assert last == pytest.approx([0.002, 0.001 * (1 + 0.5**0.5), 0.001, 0], abs=1e-12)
    whole = changed(SMALL, epochs=12, channels=(0.5, 1), one_size_epochs=9, lr=0.01).training
    assert loop.learning_rate(whole, 0.75) == loop.learning_rate(changed(SMALL, epochs=12, lr=0.01).training, 0.75)


def test_the_epoch_that_is_kept_was_not_merely_lucky_with_few_pictures():
    errors = (0.5, 0.2, 0.3, 0.23, 0.25)
    history = [{"epoch": i, "val_error": error, "val_loss": 1.0} for i, error in enumerate(errors)]
    counted = [entry | {"val_images": 100} for entry in history]  # 0.2 is sure to 0.04
    assert loop.best_epoch(history, 0)["epoch"] == 1
    assert loop.best_epoch(counted, 0)["epoch"] == 3
    assert loop.best_epoch([entry | {"val_images": 10_000} for entry in history], 0)["epoch"] == 1
    assert loop.best_epoch(counted, 4)["epoch"] == 4
    for count in range(1, 6):  # what an epoch decides when it ends holds at the end of all
        kept = loop.best_epoch(counted[:count], 0)
        assert kept["epoch"] in (count - 1, loop.best_epoch(counted[: max(1, count - 1)], 0)["epoch"])


def test_first_epochs_may_look_at_the_images_own_size_only(cache, tmp_path, trained):
    config = changed(SMALL, epochs=3, channels=(0.5, 1), one_size_epochs=2)
    result = train(config, tmp_path / "a", device="cpu")
    alone = train(changed(SMALL, epochs=3), tmp_path / "alone", device="cpu")
    losses, expected = ([entry["loss"] for entry in found["history"]] for found in (result, alone))
    assert losses[:2] == expected[:2]  # the same training, bit by bit
    assert losses[2] != expected[2]
    assert result["best_epoch"] == 2  # whatever the errors of networks that had seen one size
    assert load_model(tmp_path / "a").scales == (0.5, 1.0)
    for steps in (4, 8):  # of 3 epochs with 3 steps, before and after the other sizes come in
        interrupted(config, tmp_path / str(steps), steps=steps)
        assert load_model(tmp_path / str(steps)).scales == (1.0,)  # all that its best weights have seen
        train(config, tmp_path / str(steps), device="cpu")
        assert outcome(tmp_path / str(steps)) == outcome(tmp_path / "a")


def said(capsys, *words):
    code = cli.main([*map(str, words), "--device", "cpu"])
    out, err = capsys.readouterr()
    return code, out, err


def test_evaluate_command_looks_at_several_sizes(cache, trained, capsys):
    code, out, _ = said(capsys, "evaluate", trained)
    assert code == 0
    assert re.search(r"^  size 31 +[\d.]+ %  \(10\)$", out, re.M)
    assert re.search(
        r"^mean inside .* sizes [\d.]+ %\nmean outside .* sizes [\d.]+ %\ncalibration error [\d.]+ %\n\Z", out, re.M
    )
    code, out, _ = said(capsys, "evaluate", trained, "--channels", 0.5, 1, "--join", "mean")
    model = ScaleChannels(load_model(trained), (0.5, 1.0), "mean")
    found = evaluate(model, load(SMALL, "test"))
    assert out.startswith(f"test error {100 * found['error']:.2f} % (40 images)\n")
    assert out.endswith(f"with the true size {found['size_correlation']:.3f}\n")
    code, _, err = said(capsys, "evaluate", trained, "--join", "mean")
    assert (code, err) == (2, "scalesteer: `join` (got 'mean') needs `channels`, the sizes to look at.\n")


def test_evaluate_command_refuses_channels_of_a_network_for_one_size(cache, undisturbed, capsys):
    code, _, err = said(capsys, "evaluate", undisturbed, "--channels", 0.5, 1)
    assert code == 2
    assert re.search("applies to .*pooled-cnn", err)


def test_predict_command_looks_at_several_sizes(cache, trained, capsys, tmp_path):
    path = tmp_path / "one.png"
    Image.fromarray(load(SMALL, "test").images[0].numpy()).save(path)
    (told,) = json.loads(said(capsys, "predict", trained, path, "--json")[1].strip().join("[]"))
    assert told["size"] is None
    (told,) = json.loads(said(capsys, "predict", trained, path, "--json", "--channels", 2, 1)[1].strip().join("[]"))
    model = ScaleChannels(load_model(trained), (1.0, 2.0)).eval()
    with torch.no_grad():
        logits, size = model(load(SMALL, "test")[0][0][None], return_scales=True)
    assert told["label"] == int(logits.argmax())
    assert told["confidence"] == pytest.approx(float(logits.softmax(1).max()), abs=1e-5)
    assert told["size"] == pytest.approx(float(size), abs=1e-3)


@pytest.mark.parametrize("sizes", [(1, 100_000), range(1, 34)])
def test_sizes_that_take_too_much_memory_are_refused(trained, capsys, sizes):
    assert cli.main(["predict", str(trained), "photo.png", "--channels", *map(str, sizes)]) == 2
    said = f"`channels` must be at most 32 numbers up to 16 (got {len(sizes)}, the largest {sizes[-1]})."
    assert capsys.readouterr().err == f"scalesteer: {said}\n"


def test_export_command_writes_a_network_that_looks_at_several_sizes(cache, trained, capsys, tmp_path):
    words = ("export", trained, "--to", "folder", "--channels", 0.5, 1, "--join", "max")
    assert cli.main([*map(str, words), "--output", str(tmp_path / "out")]) == 0
    model = load_model(tmp_path / "out")
    assert (model.scales, model.join) == ((0.5, 1.0), "max")
    torch.testing.assert_close(model.net.state_dict(), load_model(trained).state_dict())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "It looks at each image at 2 sizes (0.5, 1)." in card
    assert "The errors below are of the network as it was trained" in card
    capsys.readouterr()


def test_demo_looks_at_several_sizes(cache, trained):
    demo = DemoModel(trained, channels=(0.5, 1.0), join="mean")
    assert (demo.describe()["channels"], demo.model.join) == ([0.5, 1.0], "mean")
    assert [way.name for way in demo.ways(64, 64)] == [
        "looking once",
        "looking at 2 sizes",
        "looking at 7 sizes",
    ]
    with pytest.raises(ValueError, match=r"`join` .* needs `channels`"):
        DemoModel(trained, join="mean")
