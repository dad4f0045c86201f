"""A dataset, a network and a logger of one's own in the training of this package; what ends or divides its steps."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from scalesteer.app import RunError, evaluate, load_model, loop, make_run, train
from scalesteer.app.evaluation import Answers, precision_and_recall
from scalesteer.app.folder import FolderSpec
from scalesteer.app.given import pack
from scalesteer.app.loggers import TensorBoard
from scalesteer.app.loop import out_of_patience
from scalesteer.app.settings import Training
from tests.app.ranks import enter

SIDE = 12


class Stripes(Dataset):
    """Stripes along one axis or the other, with noise."""

    classes = ("down", "across")

    def __init__(self, count=60, seed=0, kind="float"):
        rng = np.random.default_rng(seed)
        self.labels = [i % 2 for i in range(count)]
        wave = (np.arange(SIDE) // 2 % 2).astype(float)
        self.images = []
        for label in self.labels:
            plane = np.tile(wave, (SIDE, 1)) if label else np.tile(wave[:, None], (1, SIDE))
            image = (0.6 * plane + 0.3 * rng.random((3, SIDE, SIDE))).astype(np.float32)
            self.images.append(torch.from_numpy(image) if kind == "float" else (255 * image).astype(np.uint8))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Small(nn.Module):
    def __init__(self, num_classes=2):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, num_classes)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().amax((2, 3)))


class Notes:
    def __init__(self):
        self.rows = []

    def log(self, epoch, numbers):
        self.rows.append((epoch, dict(numbers)))


def configure(**options):
    usual = {"images": "stripes", "image_size": (SIDE, SIDE), "epochs": 6, "batch_size": 10, "lr": 0.02, "channels": ()}
    usual["resize"] = (1.0, 1.0)
    return make_run(**{**usual, **options})


def test_a_dataset_a_network_and_a_logger_of_ones_own(tmp_path):
    notes = Notes()
    result = train(configure(), tmp_path / "run", device="cpu", data=Stripes(), model=Small(), loggers=[notes])
    assert result["test_error"] < 0.3
    *epochs, (best, tested) = notes.rows
    expected = [(entry["epoch"], {k: v for k, v in entry.items() if k != "epoch"}) for entry in result["history"]]
    assert epochs == expected
    assert (best, tested) == (result["best_epoch"], {"test_error": result["test_error"]})
    assert (tmp_path / "run" / "report.html").exists()
    assert load_model(tmp_path / "run").task.classes == Stripes.classes
    given = pack(Stripes(), configure().data)
    assert evaluate(load_model(tmp_path / "run"), given.load("test"))["error"] == result["test_error"]
    assert result["environment"]["data"]["digest"] == given.parts["train"].about["digest"]
    again = train(configure(), tmp_path / "run", device="cpu", data=Stripes(), model=Small())
    assert again == result
    with pytest.raises(RunError, match="the pictures in stripes are not those that the run"):
        train(configure(), tmp_path / "run", device="cpu", data=Stripes(seed=1), model=Small())


def test_parts_may_be_given_and_otherwise_follow_from_numbers_alone():
    spec = FolderSpec("stripes", (SIDE, SIDE))
    whole = Stripes(200)
    given = pack(whole, spec)
    counts = [len(given.parts[part]) for part in ("train", "val", "test")]
    assert sum(counts) == 200
    assert counts[1:] == [pytest.approx(30, abs=12)] * 2
    more = pack(Stripes(230), spec)
    for part, images in given.parts.items():  # what was there before stays where it was
        assert {tuple(x.flatten().tolist()) for x in images.images} <= {
            tuple(x.flatten().tolist()) for x in more.parts[part].images
        }
    parts = {"train": Stripes(20), "val": Stripes(8, 1), "test": Stripes(6, 2)}
    own = pack(parts, spec)
    assert [len(own.parts[part]) for part in parts] == [20, 8, 6]
    expected = torch.stack([(255 * image).round().byte() for image in parts["val"].images])
    assert torch.equal(own.parts["val"].images, expected)


def test_pictures_and_rows_of_hugging_face_are_taken():
    class Names:
        names = ("a", "b")

    class Rows(list):
        pass

    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)) for _ in range(40)]
    rows = Rows({"image": picture, "label": i % 2} for i, picture in enumerate(pictures))
    rows.features = {"image": None, "label": Names()}
    given = pack(dict.fromkeys(("train", "val", "test"), rows), FolderSpec("rows", (16, 16), "crop"))
    assert given.task.classes == ("a", "b")
    centre = np.asarray(pictures[3])[2:18, 7:23].transpose(2, 0, 1)
    assert np.array_equal(given.parts["train"].images[3].numpy(), centre)
    grey = pack(dict.fromkeys(("train", "val", "test"), rows), FolderSpec("rows", (16, 16), "crop", grey=True))
    assert grey.parts["val"].images.shape == (40, 16, 16)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: {"train": Stripes(4)}, r"`data` must have the parts train, val and test \(got train\)"),
        (lambda: Stripes(2), "leaves no images for"),
        (
            lambda: [(torch.zeros(3, 5, 5), 0)] * 9,
            r"item 0 of `data` must have shape \(3, 12, 12\), .* \(got \(3, 5, 5\)\)",
        ),
        (lambda: [(torch.full((3, SIDE, SIDE), 2.0), 0)] * 9, "bytes, or numbers from 0 to 1"),
        (lambda: [(torch.zeros(3, SIDE, SIDE), -1)] * 9, "an image and a label from 0 on"),
        (lambda: [torch.zeros(3, SIDE, SIDE)] * 9, "an image and a label from 0 on"),
        (lambda: [("a.png", 0)] * 9, r"must be a tensor, an array or a picture \(got str\)"),
        (
            lambda: [(torch.zeros(3, SIDE, SIDE), 2 * (i % 2)) for i in range(60)],
            "no images for training of the class '1'",
        ),
    ],
)
def test_what_is_no_dataset_is_told(data, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(configure(), tmp_path / "run", data=data())
    assert not (tmp_path / "run").exists()


def test_a_built_in_dataset_has_no_place_for_others(tmp_path):
    with pytest.raises(ValueError, match="`data` needs a run with a name for it"):
        train(make_run(), tmp_path / "run", data=Stripes())


def _rank(cache, place, folder):
    enter(cache, place)
    notes = Notes()
    run = configure(epochs=2, precision="float32")
    train(run, folder / "run", device="cpu", data=Stripes(), model=Small, loggers=[notes])
    (folder / f"{place[0]}.json").write_text(json.dumps(notes.rows))


def test_two_processes_train_it_together(start, cache, tmp_path):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # which torchrun has too
    ranks = [start(_rank, (rank, 2, store.port), tmp_path) for rank in (0, 1)]
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0, 0]
    first, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert len(first) == 3
    assert other == []  # the first process speaks
    train(
        configure(epochs=2), tmp_path / "alone", device="cpu", data=Stripes(), model=Small, loggers=[alone := Notes()]
    )
    for (_, ours), (_, expected) in zip(first[:2], alone.rows[:2], strict=True):
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert ours["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-2)  # Adam enlarges what rounding leaves


def test_tensorboard_has_the_curves(tmp_path):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra `tensorboard` is not installed"
    )
    train(configure(epochs=2), tmp_path / "run", device="cpu", data=Stripes(), model=Small(),
          loggers=[TensorBoard(tmp_path / "curves")])  # fmt: skip
    events = reader.EventAccumulator(str(tmp_path / "curves")).Reload()
    assert {"loss", "val_loss", "val_error", "test_error"} <= set(events.Tags()["scalars"])
    told = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(told)


# Steps


def gradients_and_weights(monkeypatch, tmp_path, name, **options):
    """The lengths of the gradients at each step, and the weights after one epoch."""
    lengths, step = [], torch.optim.AdamW.step

    def noting(self, *args, **kwargs):
        found = [p.grad for group in self.param_groups for p in group["params"]]
        lengths.append(float(torch.cat([g.flatten() for g in found]).norm()))
        return step(self, *args, **kwargs)

    class Plain(nn.Module):  # without batch normalisation: parts of a step are then the same step
        def __init__(self, num_classes):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, num_classes)

        def forward(self, x):
            return self.head(self.conv(x).relu().amax((2, 3)))

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", noting)
        train(configure(epochs=1, **options), tmp_path / name, device="cpu", data=Stripes(), model=Plain)
    return lengths, load_model(tmp_path / name).state_dict()


def test_a_step_in_parts_is_the_same_step_and_a_long_gradient_is_clipped(monkeypatch, tmp_path):
    whole, weights = gradients_and_weights(monkeypatch, tmp_path, "whole")
    parts, other = gradients_and_weights(monkeypatch, tmp_path, "parts", accumulate=5)
    assert parts == pytest.approx(whole, rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5)
    limit = sorted(whole)[len(whole) // 2] / 2
    clipped, _ = gradients_and_weights(monkeypatch, tmp_path, "clipped", clip=limit)
    assert max(clipped) == pytest.approx(limit, rel=1e-4)
    assert clipped[0] == pytest.approx(min(whole[0], limit), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 3}, r"`accumulate` must divide the images of a step, 10 \(got 3\)"),
        ({"clip": 0.0}, r"`clip` must be positive and at most 1e30 \(got 0.0\)"),
        ({"patience": 0}, "`patience` must be at least 1"),
    ],
)
def test_steps_that_cannot_be_are_told(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(configure(**options), tmp_path / "run", device="cpu", data=Stripes())


def test_a_training_ends_when_patience_does(monkeypatch, tmp_path):
    errors = iter([0.5, 0.3, 0.4, 0.3, 0.3, 0.1])
    original = loop.errors

    def told(answers):
        return original(answers) | {"error": next(errors), "loss": 1.0}

    with monkeypatch.context() as patch:
        patch.setattr(loop, "errors", told)
        run = configure(epochs=6, patience=3, tuning=True)
        result = train(run, tmp_path / "run", device="cpu", data=Stripes(), model=Small())
    assert [entry["val_error"] for entry in result["history"]] == [0.5, 0.3, 0.4, 0.3, 0.3]
    assert result["best_epoch"] == 4  # few pictures tell little: the last one that is as good, give or take
    history = [{"epoch": i, "val_error": e, "val_loss": 1.0} for i, e in enumerate([0.1, 0.5, 0.4, 0.3])]
    assert out_of_patience(history, Training(patience=3))
    assert not out_of_patience(history, Training(patience=3, one_size_epochs=1))  # the first epoch does not count
    assert not out_of_patience(history, Training())


# What the answers are worth


def test_precision_recall_and_f1_are_those_of_a_count():
    rng = np.random.default_rng(0)
    true, said = rng.integers(0, 4, 80), rng.integers(0, 3, 80)
    names = ("a", "b", "c", "d")
    tensors = torch.from_numpy(said), torch.zeros(80), None, torch.from_numpy(true), torch.ones(80)
    found = precision_and_recall(Answers(*tensors, 0.0, names, False))
    for label, row in enumerate(found["scores"]):
        pairs = list(zip(true.tolist(), said.tolist(), strict=True))
        hits = sum(t == s == label for t, s in pairs)
        taken, there = sum(s == label for _, s in pairs), sum(t == label for t, _ in pairs)
        assert row["class"] == names[label]
        assert row["precision"] == pytest.approx(hits / taken if taken else 0)
        assert row["recall"] == pytest.approx(hits / there)
        assert row["f1"] == pytest.approx(2 * hits / (taken + there))
    assert found["scores"][3]["precision"] == 0  # which nothing was taken for
    assert found["f1"] == pytest.approx(np.mean([row["f1"] for row in found["scores"]]))
