import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scalesteer import files
from scalesteer.app import BusyError, RunError, checkpoint, evaluate, load, load_model, loop, read_run, train
from scalesteer.app import run as running
from scalesteer.app.config import make_run
from scalesteer.app.loop import learning_rate
from scalesteer.app.networks import read_checkpoint
from scalesteer.files import locked
from scalesteer.models import create_model
from tests.app import jobs
from tests.conftest import TINY
from tests.runs import changed


def outcome(directory):
    """All that must not depend on interruptions: weights, and every number but times."""
    weights, _ = files.read(directory / "model" / "model.safetensors")
    about = json.loads((directory / "model" / "config.json").read_text())
    result = json.loads((directory / "result.json").read_text())
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert all(line.pop("lr") > 0 for line in lines)  # which follows from the settings
    assert [{**line, "seconds": 0} for line in lines] == [{**entry, "seconds": 0} for entry in result["history"]]
    for entry in [result, *result["history"]]:
        del entry["seconds"]
    del result["environment"]["commit"]  # files may be edited while tests run
    return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}, about, result


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def checkpoints(directory):
    return sorted(path.name for path in directory.glob("last-*"))


def interrupted(config, directory, steps, device="cpu"):
    """Train; in the given step, counted from now, the process interrupts itself."""
    count = itertools.count(1)

    def counting(*args):  # asked for once a step, also where the step itself is a recorded graph
        if next(count) == steps:
            os.kill(os.getpid(), signal.SIGINT)
        return learning_rate(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "learning_rate", counting)
        with pytest.raises(KeyboardInterrupt):
            train(config, directory, device=device)


def test_same_run_twice_gives_the_same_bits(cache, undisturbed, tiny, tmp_path):
    torch.manual_seed(12345)  # what came before does not matter
    before = torch.get_rng_state()
    result = train(tiny, tmp_path / "again", device="cpu")
    assert torch.equal(torch.get_rng_state(), before)  # nor does it change what comes after
    assert outcome(tmp_path / "again") == outcome(undisturbed)
    assert result["status"] == "finished"
    assert sorted(p.name for p in undisturbed.glob("[!.]*")) == [
        "config.json",
        "metrics.jsonl",
        "model",
        "result.json",
    ]


def test_checkpoint_after_every_step_changes_nothing(cache, undisturbed, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SAVE_EVERY_S", 0)
    train(tiny, tmp_path, device="cpu")
    assert outcome(tmp_path) == outcome(undisturbed)


def test_run_in_another_thread_leaves_signals_alone(cache, tiny, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(train, changed(tiny, epochs=1), tmp_path, device="cpu").result()
    assert result["status"] == "finished"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before


def test_seed_changes_the_weights(cache, tiny, tmp_path):
    train(changed(tiny, seed=1, epochs=1), tmp_path / "a", device="cpu")
    train(changed(tiny, seed=2, epochs=1), tmp_path / "b", device="cpu")
    assert outcome(tmp_path / "a")[0] != outcome(tmp_path / "b")[0]


def test_ss_cnn_trains_and_goes_on_from_the_middle_of_an_epoch(cache, tiny, tmp_path):
    config = changed(tiny, model="ss-cnn", basis="area", epochs=2)
    train(config, tmp_path / "a", device="cpu")
    interrupted(config, tmp_path / "b", steps=5)
    train(config, tmp_path / "b", device="cpu")
    assert outcome(tmp_path / "b") == outcome(tmp_path / "a")


def test_training_learns(cache, tmp_path):
    config = make_run(
        model="plain-cnn", upsample=1, sizes=(300, 50, 100), batch_size=30, epochs=5, lr=0.003, scale_range=(0.9, 1.0)
    )
    result = train(config, tmp_path / "run", device="cpu")
    assert result["test_error"] < 0.45  # guessing: 0.9
    assert result["history"][-1]["loss"] < 0.7 * result["history"][0]["loss"]


def test_result_is_that_of_the_best_model_on_validation_data(cache, undisturbed, tiny):
    result = json.loads((undisturbed / "result.json").read_text())
    best = min(result["history"], key=lambda entry: (entry["val_error"], entry["val_loss"]))
    assert (result["val_error"], result["best_epoch"]) == (best["val_error"], best["epoch"])
    model = load_model(undisturbed)
    assert read_run(undisturbed) == tiny
    assert evaluate(model, load(tiny, "val"))["error"] == best["val_error"]
    test = load(tiny, "test")
    with torch.no_grad():
        wrong = [int(model(x[None]).argmax()) != int(y) for x, y in test]
    assert result["test_error"] == np.mean(wrong)
    assert sum(row["images"] for row in result["test_error_by_scale"]) == len(test)
    assert np.isclose(sum(row["images"] * row["error"] for row in result["test_error_by_scale"]), sum(wrong))
    assert result["environment"]["command"] == tiny.command
    assert result["environment"]["data"]["digest"] == test.about["digest"]
    assert str(Path.home()) not in json.dumps(result)


def test_tuning_run_never_loads_the_test_set(cache, undisturbed, tiny, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        running, "load", lambda config, part, *args, **own: loaded.append(part) or load(config, part, *args, **own)
    )
    result = train(changed(tiny, tuning=True), tmp_path, device="cpu")
    assert loaded == ["train", "val"]
    whole = json.loads((undisturbed / "result.json").read_text())
    assert set(whole) - set(result) == {"test_error", "test_error_by_scale", "test_ece"}
    assert (result["val_error"], result["val_loss"]) == (whole["val_error"], whole["val_loss"])


def test_finished_run_returns_at_once(cache, undisturbed, tiny, monkeypatch):
    monkeypatch.setattr(running, "load", None)  # would be called
    assert train(tiny, undisturbed)["status"] == "finished"


@pytest.mark.parametrize(("schedule", "expected"), [("one-cycle", (0.04, 0.52, 1, 0.5, 0)), ("constant", (1,) * 5)])
def test_schedule(schedule, expected):
    config = make_run(schedule=schedule, lr=2.0)
    for progress, share in zip((0, 0.15, 0.3, 0.65, 1), expected, strict=True):
        assert math.isclose(learning_rate(config.training, progress), 2 * share, abs_tol=1e-12)


def test_decaying_schedules():
    cosine, step = (make_run(schedule=name, lr=1.0) for name in ("cosine", "step"))
    assert [round(learning_rate(cosine.training, p), 12) for p in (0, 0.5, 1)] == [1, 0.5, 0]
    assert [round(learning_rate(step.training, p), 12) for p in (0, 0.49, 0.5, 0.74, 0.75, 1)] == [
        1,
        1,
        0.1,
        0.1,
        0.01,
        0.01,
    ]


def kill_and_resume(start, config, undisturbed, tmp_path, kills, seed):
    """Kill runs at random moments, going on each time; whenever one ends before its kill, begin a new one."""
    chance, expected, directory, stages = random.Random(seed), outcome(undisturbed), tmp_path / "0", []
    begun = time.perf_counter()
    start(jobs.run, config, str(tmp_path / "timed")).join(300)
    duration = time.perf_counter() - begun
    while True:
        running = start(jobs.run, config, str(directory))
        if len(stages) < kills:
            before = checkpoints(directory)
            if len(stages) % 2:  # every other time once it has got further, so that the run is met at many stages
                while running.exitcode is None and checkpoints(directory) == before:
                    running.join(0.01)
                running.join(chance.uniform(0, 0.2))
            else:
                running.join(chance.uniform(0.1, 0.8) * duration)
            if running.exitcode is None:
                os.kill(running.pid, signal.SIGKILL)
        running.join(300)
        if running.exitcode == -signal.SIGKILL:
            stages.append((*checkpoints(directory), (directory / "model").exists()))
            continue
        assert running.exitcode == 0
        assert outcome(directory) == expected
        assert not list(directory.glob(".*.tmp"))
        if len(stages) == kills:
            return stages
        directory = tmp_path / f"{int(directory.name) + 1}"


def test_run_killed_at_four_random_moments_ends_with_the_same_weights(start, tiny, undisturbed, tmp_path):
    stages = kill_and_resume(start, tiny, undisturbed, tmp_path, kills=4, seed=0)
    assert len(set(stages)) > 1  # not always before the first checkpoint


@pytest.mark.slow
def test_run_killed_at_fifty_random_moments_ends_with_the_same_weights(start, tiny, undisturbed, tmp_path):
    stages = kill_and_resume(start, tiny, undisturbed, tmp_path, kills=50, seed=1)
    assert len(set(stages)) > 2


@pytest.mark.parametrize(
    ("phase", "linger", "number", "expected"),
    [
        ("training", 0.2, signal.SIGINT, 130),
        ("evaluating", 0.2, signal.SIGTERM, 143),
        ("saving", 0.2, signal.SIGINT, 130),
        ("training", 600, signal.SIGTERM, 143),  # a step that takes too long is not waited for
    ],
)
def test_stopped_run_leaves_a_checkpoint_and_goes_on(
    start, forks, tiny, undisturbed, tmp_path, phase, linger, number, expected
):
    ready, log = forks.Event(), tmp_path / "log"
    argv = [*tiny.command.split()[1:], "--device", "cpu", "--runs", str(tmp_path / "runs")]
    running = start(jobs.command, str(log), argv, phase, ready, linger)
    assert ready.wait(300)
    os.kill(running.pid, number)
    running.join(300)
    told = "scalesteer: interrupted; repeat the command to go on.\n" if number == signal.SIGINT else ""
    said = [line for line in log.read_text().splitlines(True) if not line.startswith("scalesteer: epoch ")]
    assert (running.exitcode, "".join(said)) == (expected, told)
    directory = tmp_path / "runs" / tiny.name
    assert len(checkpoints(directory)) == (linger < 1) or phase == "saving"
    assert not list(directory.glob(".*.tmp"))
    train(tiny, directory, device="cpu")
    assert outcome(directory) == outcome(undisturbed)


def test_nan_loss_stops_the_run_and_names_the_step(cache, tiny, tmp_path, monkeypatch):
    real, count = torch.nn.functional.cross_entropy, [0]

    def failing(logits, labels, **options):
        count[0] += torch.is_grad_enabled()
        return real(logits, labels, **options) * (math.nan if count[0] == 5 and torch.is_grad_enabled() else 1)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", failing)
    result = train(tiny, tmp_path / "run", device="cpu")
    assert result["status"] == "failed"
    assert result["reason"] == "the loss became nan at step 4 (epoch 1); try a smaller `lr`"
    assert "test_error" not in result
    monkeypatch.undo()
    assert train(tiny, tmp_path / "run")["status"] == "failed"  # it does not become better
    model = load_model(tmp_path / "run")  # the last finite checkpoint
    assert checkpoints(tmp_path / "run") == ["last-000001.safetensors"]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_diverging_run_fails_by_itself(cache, tiny, tmp_path):
    result = train(changed(tiny, lr=1e30, schedule="constant"), tmp_path / "run", device="cpu")
    assert result["status"] == "failed"
    assert "became" in result["reason"]
    assert "epoch 0" in result["reason"]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other", "nan"])
def test_damaged_checkpoint_is_told_and_the_one_before_used(cache, tiny, undisturbed, tmp_path, caplog, damage):
    interrupted(tiny, tmp_path, steps=7)  # 3 an epoch: checkpoints after 6 and 7
    assert checkpoints(tmp_path) == ["last-000002.safetensors", "last-000003.safetensors"]
    newest = tmp_path / "last-000003.safetensors"
    content = bytearray(newest.read_bytes())
    if damage == "cut":
        newest.write_bytes(content[:-1000])
    elif damage == "flip":
        content[len(content) // 2] ^= 4
        newest.write_bytes(content)
    elif damage == "empty":
        newest.write_bytes(b"")
    else:
        tensors, about = read_checkpoint(newest)
        if damage == "nan":
            tensors["model.classifier.fc2.bias"][0] = math.nan
        else:
            about["run"]["training"]["lr"] = 0.1
        files.write_atomically(newest, files.encode(tensors, about))
    train(tiny, tmp_path, device="cpu")
    (said,) = warnings(caplog)
    assert "last-000003.safetensors" in said
    assert "Going on from last-000002.safetensors, the one before." in said
    assert outcome(tmp_path) == outcome(undisturbed)


def test_damaged_checkpoint_is_put_aside(cache, tiny, halfway, tmp_path, monkeypatch):
    shutil.copytree(halfway, tmp_path / "run")
    newest = tmp_path / "run" / "last-000003.safetensors"
    newest.write_bytes(b"damaged")
    monkeypatch.setattr(running, "fit", lambda *_: 1 / 0)  # stopped before a step
    with pytest.raises(ZeroDivisionError):
        train(tiny, tmp_path / "run", device="cpu")
    assert checkpoints(tmp_path / "run") == ["last-000002.safetensors"]
    assert (tmp_path / "run" / "damaged-last-000003.safetensors").read_bytes() == b"damaged"


def test_state_whose_losses_are_no_numbers_is_not_saved(cache, tiny, tmp_path, monkeypatch):
    real, count = torch.nn.functional.cross_entropy, [0]

    def failing(logits, labels, **options):
        count[0] += torch.is_grad_enabled()
        return real(logits, labels, **options) * (math.nan if count[0] == 5 and torch.is_grad_enabled() else 1)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", failing)
    monkeypatch.setattr(checkpoint, "SAVE_EVERY_S", 0.0)  # after every step
    assert train(tiny, tmp_path / "run", device="cpu")["status"] == "failed"
    for name in checkpoints(tmp_path / "run"):
        _, about = read_checkpoint(tmp_path / "run" / name)
        assert np.isfinite(about["losses"]).all()
    assert load_model(tmp_path / "run")


def drop(prefix):
    def change(tensors, about):
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def replace_value(key, value):
    def change(tensors, about):
        (about if key in about else tensors)[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop("optimizer."), "missing optimizer.classifier.fc1.bias.exp_avg;"),
        (drop("optimizer.classifier.fc1.bias.step"), "missing optimizer.classifier.fc1.bias.step."),
        (drop("random"), "missing random."),
        (drop("best."), "missing best.classifier.fc1.bias;"),
        (replace_value("random", torch.zeros(9, dtype=torch.uint8)), "random is (9,), not ("),
        (replace_value("optimizer.classifier.fc1.bias.step", torch.tensor(5)), "fc1.bias.step is torch.int64"),
        (lambda tensors, about: about.pop("epoch"), "epochs and losses is incomplete or wrong"),
        (lambda tensors, about: about.pop("losses"), "epochs and losses is incomplete or wrong"),
        (replace_value("epoch", "2"), "epochs and losses is incomplete or wrong"),
        (replace_value("epoch", 1), "epochs and losses is incomplete or wrong"),
        (replace_value("step", 2), "epochs and losses is incomplete or wrong"),
        (replace_value("losses", [math.nan]), "epochs and losses is incomplete or wrong"),
        (replace_value("losses", ["low"]), "epochs and losses is incomplete or wrong"),
        (replace_value("history", []), "epochs and losses is incomplete or wrong"),
        (replace_value("history", None), "epochs and losses is incomplete or wrong"),
        (replace_value("seconds", None), "epochs and losses is incomplete or wrong"),
    ],
)
def test_checkpoint_that_lacks_something_is_told_and_the_one_before_used(
    cache, tiny, undisturbed, halfway, tmp_path, caplog, change, complaint
):
    shutil.copytree(halfway, tmp_path / "run")
    newest = tmp_path / "run" / "last-000003.safetensors"
    tensors, about = read_checkpoint(newest)
    change(tensors, about)
    files.write_atomically(newest, files.encode(tensors, about))
    train(tiny, tmp_path / "run", device="cpu")
    (said,) = warnings(caplog)
    assert complaint in said
    assert said.endswith("Going on from last-000002.safetensors, the one before.")
    assert outcome(tmp_path / "run") == outcome(undisturbed)


@pytest.fixture(scope="module")
def halfway(_kept_splits, tmp_path_factory):
    """The directory of the tiny run, interrupted in its last epoch, with two checkpoints."""
    directory = tmp_path_factory.mktemp("halfway") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALESTEER_CACHE", str(_kept_splits))
        interrupted(TINY, directory, steps=7)
    return directory


def test_files_with_similar_names_are_no_checkpoints(cache, tiny, undisturbed, halfway, tmp_path, caplog):
    shutil.copytree(halfway, tmp_path / "run")
    strays = [
        "last-zzz.safetensors",
        "last-000002-copy.safetensors",
        "last-000009.safetensors.bak",
        "last-9.safetensors",
    ]
    for name in strays:
        shutil.copy(tmp_path / "run" / "last-000002.safetensors", tmp_path / "run" / name)
    train(tiny, tmp_path / "run", device="cpu")
    assert outcome(tmp_path / "run") == outcome(undisturbed)
    assert warnings(caplog) == []
    assert checkpoints(tmp_path / "run") == sorted(strays)


def test_without_a_whole_checkpoint_the_run_begins_again_and_says_so(cache, tiny, undisturbed, tmp_path, caplog):
    interrupted(tiny, tmp_path, steps=2)
    for path in tmp_path.glob("last-*"):
        path.write_bytes(b"gone")
    train(tiny, tmp_path, device="cpu")
    assert "There is no other: starting from the beginning." in caplog.text
    assert outcome(tmp_path) == outcome(undisturbed)


def test_leftover_temporary_files_are_removed(cache, tiny, undisturbed, tmp_path):
    interrupted(tiny, tmp_path, steps=2)
    (tmp_path / ".last-000009.safetensors.123.tmp").write_bytes(b"half")
    train(tiny, tmp_path, device="cpu")
    assert not list(tmp_path.glob(".*.tmp"))
    assert outcome(tmp_path) == outcome(undisturbed)


def test_crash_between_checkpoint_and_result_gives_the_result_once(cache, tiny, undisturbed, tmp_path, monkeypatch):
    for name in ("metrics.jsonl", "model.safetensors", "result.json"):
        write = files.write_atomically

        def crash(path, content, name=name, write=write):
            if path.name == name and (name != "metrics.jsonl" or content.count(b"\n") == 3):
                raise SystemExit(9)
            write(path, content)

        monkeypatch.setattr(files, "write_atomically", crash)
        with pytest.raises(SystemExit):
            train(tiny, tmp_path, device="cpu")
        assert not (tmp_path / "result.json").exists()
        monkeypatch.setattr(files, "write_atomically", write)
    train(tiny, tmp_path, device="cpu")
    assert outcome(tmp_path) == outcome(undisturbed)


def test_full_disk_on_any_write_loses_nothing(cache, tiny, undisturbed, tmp_path, monkeypatch):
    fsync, left, failures = os.fsync, [0], 0

    def full(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    while True:  # each time one more write succeeds than the last time
        left[0] = failures
        try:
            train(tiny, tmp_path / "run", device="cpu")
        except RunError as error:
            assert "cannot be written to (No space left on device); what was saved before is kept" in str(error)  # noqa: PT017
            failures += 1
        else:
            break
    assert failures >= 3
    assert outcome(tmp_path / "run") == outcome(undisturbed)
    assert not list((tmp_path / "run").glob(".*.tmp"))


def test_really_full_disk_is_one_line_and_exit_code_2(start, tiny, tmp_path):
    argv = [*tiny.command.split()[1:], "--device", "cpu", "--runs", str(tmp_path / "runs")]
    running = start(jobs.with_little_disk, str(tmp_path / "log"), argv, 200_000)  # the configuration fits, no more
    running.join(300)
    err = (tmp_path / "log").read_text()
    assert (running.exitcode, err.count("\n")) == (2, 1)
    assert "cannot be written to (File too large); what was saved before is kept" in err
    assert [p.name for p in (tmp_path / "runs" / tiny.name).glob("[!.]*")] == ["config.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_out_of_memory_names_the_batch_size(start, cache, tmp_path, originals):
    argv = ["train", "--model", "plain-cnn", "--upsample", "2", "--sizes", "4000", "20", "20", "--batch-size", "4000"]
    argv += ["--epochs", "1", "--device", "cpu", "--runs", str(tmp_path / "runs")]
    running = start(jobs.with_little_memory, str(tmp_path / "log"), argv, 700 << 20)
    running.join(300)
    err = (tmp_path / "log").read_text()
    assert (running.exitcode, err.count("\n")) == (2, 1)
    assert "out of memory with `batch_size` 4000: choose a smaller one; what was saved before is kept" in err


def test_directory_of_another_run_is_refused_and_untouched(cache, undisturbed, tiny, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"holds another run \(epochs: 3 there, 9 here, lr: 0.005 there, 0.1 here\)"):
        train(changed(tiny, lr=0.1, epochs=9), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": "ss-cnn", "depth": 7}'])
def test_unreadable_configuration_is_an_error(tiny, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunError, match=r"config\.json cannot be read"):
        train(tiny, tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "null", '{"status": "done"}', '{"status": "finished", "identity": "x"}', "[" * 100_000, "\udc80"],
)
def test_unreadable_result_is_an_error(tiny, undisturbed, tmp_path, content):
    shutil.copy(undisturbed / "config.json", tmp_path)
    (tmp_path / "result.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(RunError, match=r"result\.json cannot be read"):
        train(tiny, tmp_path)


def test_nothing_is_made_before_data_and_network_are_known_to_be_good(cache, tiny, tmp_path):
    with pytest.raises(ValueError, match="is missing"):
        train(tiny, tmp_path / "run", device="cpu", data_dir=tmp_path / "none")
    with pytest.raises(ValueError, match="`m`"):
        train(changed(tiny, model="ss-cnn", m=1e9), tmp_path / "run", device="cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "out of memory with `batch_size` 20: choose a smaller one"),
        (
            {"scales": (1.0, 4.0)},
            r"`batch_size` 20: choose a smaller one, or smaller `scales` \(the largest is 4\)",
        ),
    ],
)
def test_out_of_memory_blames_what_may_be_at_fault(cache, tiny, tmp_path, monkeypatch, options, expected):
    def greedy(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(loop, "learning_rate", greedy)
    with pytest.raises(RunError, match=expected):
        train(changed(tiny, model="ss-cnn", **options), tmp_path / "a", device="cpu")
    monkeypatch.setattr(loop, "create_model", greedy)
    with pytest.raises(RunError, match="out of memory while the network was made: choose smaller or fewer `scales`"):
        train(changed(tiny, model="ss-cnn", **options), tmp_path / "b", device="cpu")
    assert not (tmp_path / "b").exists()


def test_without_a_terminal_every_epoch_is_logged_and_steps_every_ten_seconds(
    cache, tiny, tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO", "scalesteer")
    result = train(tiny, tmp_path / "quick", device="cpu")
    losses = [f"{entry['loss']:.3f}" for entry in result["history"]]
    ends = [f"epoch {epoch} of 3: loss {loss}" for epoch, loss in enumerate(losses, 1)]
    assert [message.partition(",")[0] for message in caplog.messages] == ends
    error = re.escape(f"{100 * result['history'][0]['val_error']:.2f}%")
    assert re.fullmatch(rf"{ends[0]}, validation error {error}, about \d+ \w+ left", caplog.messages[0])
    assert caplog.messages[-1].endswith("%")  # nothing is left
    caplog.clear()
    monkeypatch.setattr(running.files, "LOG_EVERY_S", 0)
    train(tiny, tmp_path / "slow", device="cpu")
    expected = [line for epoch, loss in enumerate(losses, 1) for line in (
        f"epoch {epoch} of 3: step 1 of 3", f"epoch {epoch} of 3: step 2 of 3", "measuring the error",
        f"epoch {epoch} of 3: loss {loss}",
    )]  # fmt: skip
    assert [message.partition(",")[0] for message in caplog.messages] == [*expected, "measuring the error"]
    assert re.search(r"step 1 of 3, loss \d\.\d+, about \d+ \w+ left$", caplog.messages[0])


def test_metrics_have_the_learning_rate_of_each_epochs_last_step(undisturbed, tiny):
    steps = 3
    for epoch, line in enumerate((undisturbed / "metrics.jsonl").read_text().splitlines()):
        progress = (steps * epoch + steps - 1) / (steps * tiny.training.epochs)
        assert json.loads(line)["lr"] == pytest.approx(learning_rate(tiny.training, progress), rel=1e-5)


def test_directory_that_cannot_be_made_is_an_error(cache, tiny, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written to"):
        train(tiny, tmp_path / "file" / "run", device="cpu")


def test_unknown_device_is_an_error_that_lists_what_is_there(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"`device` 'cuda:99' is not available here; available: cpu"):
        train(tiny, tmp_path / "run", device="cuda:99")
    assert not (tmp_path / "run").exists()


def test_second_process_is_told_who_works_on_the_run(cache, tiny, tmp_path):
    with locked(tmp_path / ".lock"), pytest.raises(BusyError, match=rf"in use by process {os.getpid()} on "):
        train(tiny, tmp_path, device="cpu")


def test_lock_of_a_killed_process_is_recovered(start, forks, tiny, undisturbed, tmp_path):
    directory, ready = tmp_path / "runs" / tiny.name, forks.Event()
    argv = [*tiny.command.split()[1:], "--device", "cpu", "--runs", str(tmp_path / "runs")]
    running = start(jobs.command, os.devnull, argv, "training", ready, 600)
    assert ready.wait(300)
    with pytest.raises(BusyError, match=f"process {running.pid} on "):
        train(tiny, directory, device="cpu")
    os.kill(running.pid, signal.SIGKILL)
    running.join(300)
    assert (directory / ".lock.holder").exists()
    train(tiny, directory, device="cpu")
    assert outcome(directory) == outcome(undisturbed)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_run_on_a_gpu_goes_on_and_its_model_works_on_the_cpu(cache, tiny, tmp_path, precision):
    config = changed(tiny, model="ss-cnn", precision=precision)
    interrupted(config, tmp_path, steps=5, device="cuda")
    result = train(config, tmp_path, device="cuda")
    assert result["status"] == "finished"
    assert len(result["history"]) == 3
    model = load_model(tmp_path)
    found = {device: evaluate(model.to(device), load(config, "test").to(device)) for device in ("cpu", "cuda")}
    assert found["cpu"]["loss"] == pytest.approx(found["cuda"]["loss"], rel=0.01)


def test_every_scale_falls_into_a_bin(cache, tiny):
    images = load(tiny, "val")
    edges = torch.tensor([0.3, 0.4, 0.95, 1.0]).repeat(5)
    found = evaluate(create_model("plain-cnn"), replace(images, scales=edges))["by_scale"]
    assert [(row["from"], row["to"], row["images"]) for row in found] == [(0.3, 0.4, 5), (0.4, 0.5, 5), (0.9, 1.0, 10)]
