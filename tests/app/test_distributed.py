import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalesteer import _checks, files
from scalesteer.app import cli, load, load_model, make_run, pick_device, train
from scalesteer.app.distributed import ALONE, joined, started
from scalesteer.models import list_models
from tests.app import ranks
from tests.app.test_folder import make as make_folder
from tests.conftest import TINY
from tests.runs import changed

# Dropout, which each process draws for itself, is left out.
STILL = changed(TINY, dropout=0.0, lr=1e-4, schedule="constant", epochs=2)
NARROW = {"steered-cnn-large": (4,) * 4, "pooled-cnn-large": (4,) * 4, "pooled-deep": (4,) * 5}  # widths
CHANNELS = {"channels": (0.7, 1.0, 1.4), "join": "logsumexp"}


def meeting_place():
    """Where processes find each other, which torchrun has too: at a port that nobody else can take."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def together(start):
    """Run a function of tests.app.ranks in several processes."""
    places = []

    def begin(function, *arguments, count=2):
        places.append(meeting_place())
        return [start(function, (rank, count, places[-1].port), *arguments) for rank in range(count)]

    yield begin
    places.clear()


def ended(processes):
    for process in processes:
        process.join(300)  # seconds on an idle machine; fifteen minutes for one that waits for another in vain
    return [process.exitcode for process in processes]


# Two processes share one GPU, with Gloo between them: NCCL wants a GPU for each.
# One of each kind of batch normalisation, alone and side by side.
KINDS = [("ss-cnn", {}), ("vector-field-cnn", {}), ("pooled-cnn", CHANNELS), ("steered-resnet", CHANNELS)]
KINDS.append(("group-cnn", CHANNELS))
OTHERS = [(name, {}) for name in list_models()] + [("pooled-cnn", {**CHANNELS, "join": "max"})]


@pytest.mark.parametrize(
    ("networks", "device"),
    [
        (KINDS, "cpu"),
        pytest.param(OTHERS, "cpu", marks=pytest.mark.slow),
        pytest.param(KINDS, "cuda", marks=pytest.mark.gpu),
    ],
    ids=["kinds", "others", "gpu"],
)
def test_gradients_are_those_of_one_process_with_the_whole_batch(together, cache, tiny, tmp_path, networks, device):
    narrow = {name: NARROW.get(name, (4, 6, 8)) for name in list_models()}
    networks = [(name, {"dropout": 0.0, "widths": narrow[name], **options}) for name, options in networks]
    assert ended(together(ranks.gradients, networks, tiny, tmp_path, device)) == [0, 0]
    expected = ranks.gradients_of(networks, load(tiny, "train").to(device), ALONE)
    for rank in "01":
        found, _ = files.read(tmp_path / rank)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            said = {"msg": lambda said, name=name: f"{name}: {said}"}
            torch.testing.assert_close(found[name], value.cpu(), rtol=1e-8, atol=1e-12, **said)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_step_of_the_loop_has_the_gradients_of_the_whole_batch(together, cache, tmp_path, device):
    """In single precision, as trained."""
    assert ended(together(ranks.one_step, STILL, tmp_path, device)) == [0, 0]
    expected, close = ranks.step_of(STILL, ALONE, "cpu"), 1e-6 if device == "cpu" else 1e-4
    for rank in "01":
        found, _ = files.read(tmp_path / rank)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=10 * close, atol=close)


def test_evaluation_sees_every_image_once_and_gives_the_same_metrics(together, cache, tiny, tmp_path):
    assert ended(together(ranks.evaluation, tiny, tmp_path, 6)) == [0, 0]  # 20 images: 6, 6, 6, 2; then 3
    found = [files.read(tmp_path / rank)[1]["about"] for rank in "01"]
    expected = ranks.evaluated(tiny, ALONE, 6)
    assert sorted(found[0]["seen"] + found[1]["seen"]) == sorted(expected["seen"])
    assert [len(about["seen"]) for about in found] == [6 + 6 + 3, 6 + 2]
    assert [about["asked"] for about in found] == [3, 3]  # as often in each
    for about in found:
        for network in ("plain", "channels"):
            assert about[network].pop("loss") == pytest.approx(expected[network]["loss"], rel=1e-12)
            assert about[network] == {name: value for name, value in expected[network].items() if name != "loss"}
    assert "size_correlation" in found[1]["channels"]


def test_messages_and_errors_reach_all(together, tmp_path):
    assert ended(together(ranks.messages, tmp_path, count=3)) == [0, 0, 0]
    for rank in "012":
        tensors, meta = files.read(tmp_path / rank)
        assert meta["about"] == {"x": [1, "ü"], "error": "ärger", "largest": 14}
        assert {name: (t.dtype, t.tolist()) for name, t in tensors.items()} == {
            "a": (torch.int64, [0, 1, 2]),
            "b": (torch.float32, 2.5),
            "c": (torch.float32, []),
        }


def rows(folder, count):
    """The rows of each step, all processes together."""
    texts = [(folder / f"rows-{rank}").read_text() for rank in range(count)]
    noted = [[list(map(int, line.split())) for line in text.splitlines()] for text in texts]
    steps = [[row for entry in entries for row in entry[2:]] for entries in zip(*noted, strict=True)]
    places = [[tuple(entry[:2]) for entry in entries] for entries in noted]
    assert all(other == places[0] for other in places)
    return list(zip(places[0], steps, strict=True))


def history(directory):
    entries = json.loads((directory / "result.json").read_text())["history"]
    return [{**entry, "seconds": 0} for entry in entries]


def test_run_goes_on_with_another_number_of_processes_in_the_same_order(together, cache, tmp_path):
    """One process, then two, then one; each time stopped in the middle of an epoch."""
    for name in ("whole", "parts", "0", "1", "2"):
        (tmp_path / name).mkdir()
    config, directory = changed(STILL, epochs=3), tmp_path / "parts"
    assert ended(together(ranks.training, config, tmp_path / "whole", tmp_path / "whole", count=1)) == [0]
    noted = []
    for number, (count, stop_after) in enumerate([(1, 2), (2, 5), (1, 0)]):
        folder = tmp_path / str(number)
        begun = together(ranks.training, config, directory, folder, stop_after, signal.SIGTERM, count=count)
        assert ended(begun) == [143 if stop_after else 0] * count
        noted += rows(folder, count)
    assert noted == rows(tmp_path / "whole", 1)
    assert [place for place, _ in noted] == [(epoch, step) for epoch in range(3) for step in range(3)]
    for one, other in zip(history(directory), history(tmp_path / "whole"), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_two_processes_end_as_one_does(together, cache, tmp_path):
    """A test that would notice any difference between the weights of the two at the end."""
    config = changed(STILL, channels=(0.7, 1.0), model="pooled-cnn", upsample=None, one_size_epochs=1)
    (tmp_path / "notes").mkdir()
    assert ended(together(ranks.training, config, tmp_path / "two", tmp_path / "notes")) == [0, 0]
    one, two = train(config, tmp_path / "one", device="cpu"), json.loads((tmp_path / "two" / "result.json").read_text())
    assert two["environment"].pop("note") == "trained by 2 processes"
    for name in ("test_error", "val_error", "best_epoch", "identity", "run", "parameters", "test_error_by_scale"):
        assert two[name] == one[name]
    assert [entry["loss"] for entry in two["history"]] == pytest.approx([e["loss"] for e in one["history"]], rel=1e-5)
    weights = [load_model(tmp_path / name).state_dict() for name in ("one", "two")]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=2e-5)


def test_stopped_processes_leave_one_checkpoint_and_go_on_to_the_same_numbers(together, cache, tmp_path):
    """With dropout: what each process draws does not depend on interruptions. The signal reaches one of them."""
    for name in ("whole", "parts", "notes"):
        (tmp_path / name).mkdir()
    config = changed(TINY, epochs=2)
    assert ended(together(ranks.training, config, tmp_path / "whole", tmp_path / "notes")) == [0, 0]
    seeds = [line for rank in "01" for line in (tmp_path / "notes" / f"seed-{rank}").read_text().splitlines()]
    assert len({line.split()[2] for line in seeds}) == len(seeds) == 2 * 6  # no two draw the same numbers
    stopped = together(ranks.training, config, tmp_path / "parts", tmp_path / "notes", 2, signal.SIGTERM)
    assert ended(stopped) == [143, 143]
    assert [path.name for path in (tmp_path / "parts").glob("last-*")] == ["last-000001.safetensors"]
    assert ended(together(ranks.training, config, tmp_path / "parts", tmp_path / "notes")) == [0, 0]
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("parts", "whole")]
    assert weights[0] == weights[1]


def test_processes_that_stop_have_time_to_wait_for_the_slowest(together, cache, tmp_path):
    (tmp_path / "notes").mkdir()
    stopped = together(ranks.slow_training, TINY, tmp_path / "parts", tmp_path / "notes", 2, signal.SIGTERM)
    assert ended(stopped) == [143, 143]
    assert [path.name for path in (tmp_path / "parts").glob("last-*")] == ["last-000001.safetensors"]


def test_process_that_leaves_does_not_wait_for_the_others(tmp_path):
    """Not even at the end of Python, and with a message on the way, as after an error in the middle of a step."""
    place = meeting_place()
    words = ["-c", "import sys; from tests.app import ranks; ranks.leaving(*map(int, sys.argv[1:]))"]
    both = [subprocess.Popen([sys.executable, *words, str(rank), "2", str(place.port)]) for rank in range(2)]
    try:
        assert both[0].wait(300) == 143
        assert both[1].poll() is None
    finally:
        for process in both:
            process.kill()
            process.wait()


def test_network_is_never_the_last_to_hold_the_group(together, tmp_path):
    """A network that ends the group holds Python's lock, for which a thread of the group may wait: a deadlock."""
    assert ended(together(ranks.outlived, tmp_path)) == [0, 0]
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["True", "True"]


def wait_for_checkpoint(running, config, tmp_path):
    while not list((tmp_path / "runs" / config.name).glob("last-*")):
        assert running()
        time.sleep(0.01)


def flags(config, tmp_path, device="cpu"):
    return [*config.command.split()[1:], "--device", device, "--runs", str(tmp_path / "runs")]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_process_that_is_lost_ends_the_others_with_a_message(together, cache, tmp_path, victim):
    config = changed(STILL, epochs=300)
    both = together(ranks.command, flags(config, tmp_path), tmp_path / "log")
    wait_for_checkpoint(lambda: both[0].exitcode is None, config, tmp_path)
    os.kill(both[victim].pid, signal.SIGKILL)
    other = 1 - victim
    assert ended([both[other]]) == [2]  # at once, not after fifteen minutes
    who = f"process {other} stops, since another of the 2 ended or does not answer"
    *epochs, said = (tmp_path / f"log-{other}").read_text().splitlines()
    assert re.fullmatch(rf"scalesteer: {who} \(.*Connection.*\); repeat the command to go on\.", said)
    assert all(line.startswith("scalesteer: epoch ") for line in epochs)


def test_run_that_is_in_use_is_told_by_all(together, cache, tiny, tmp_path):
    with files.locked(tmp_path / "runs" / tiny.name / ".lock"):
        assert ended(together(ranks.command, flags(tiny, tmp_path), tmp_path / "log")) == [2, 2]
    for rank in "01":
        assert re.fullmatch(r"scalesteer: \S+ is in use by process .*\n", (tmp_path / f"log-{rank}").read_text())


def test_batch_that_cannot_be_divided_is_an_error(together, cache, tiny, tmp_path):
    argv = flags(changed(tiny, batch_size=15), tmp_path)
    assert ended(together(ranks.command, argv, tmp_path / "log")) == [2, 2]
    for rank in "01":
        said = "scalesteer: `batch_size` must be divisible by the number of processes (got 15 and 2).\n"
        assert (tmp_path / f"log-{rank}").read_text() == said
    assert not (tmp_path / "runs").exists()


def test_first_process_writes_and_a_finished_run_returns_at_once(together, cache, tmp_path):
    config = changed(STILL, epochs=1)
    for _ in range(2):
        assert ended(together(ranks.command, flags(config, tmp_path), tmp_path / "log")) == [0, 0]
    assert (tmp_path / "log-1").read_text() == ""
    epoch, *said = (tmp_path / "log-0").read_text().splitlines()
    assert epoch.startswith("scalesteer: epoch 1 of 1: ")
    assert len(said) == 2
    assert said[0] == said[1]
    result = json.loads((tmp_path / "runs" / config.name / "result.json").read_text())
    assert result["identity"] == config.identity


def test_only_the_first_process_describes_own_pictures(together, cache, tmp_path):
    draw = np.random.default_rng(0)
    for i in range(48):
        (tmp_path / "photos" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (16, 16), np.uint8)).save(tmp_path / "photos" / "ab"[i % 2] / f"{i}.png")
    (tmp_path / "photos" / "a" / "notes.txt").write_text("mine")
    own = {"image_size": (16, 16), "model": "pooled-cnn", "widths": (2, 2), "kernel_size": 3, "grey": True}
    config = make_run(images=str(tmp_path / "photos"), epochs=1, batch_size=16, **own)
    assert ended(together(ranks.command, flags(config, tmp_path), tmp_path / "log")) == [0, 0]
    assert (tmp_path / "log-1").read_text() == ""
    said = (tmp_path / "log-0").read_text()
    assert said.count("2 classes; pictures: ") == said.count("notes.txt") == said.count("try a smaller batch size") == 1


def test_two_processes_read_pictures_from_one_file(together, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("SCALESTEER_CACHE", str(tmp_path / "cache"))
    root = make_folder(tmp_path / "photos", parts=("train", "val", "test"), count=20)
    own = {"image_size": (16, 16), "model": "pooled-cnn", "widths": (2, 2), "kernel_size": 3, "dropout": 0.0}
    config = make_run(images=str(root), epochs=2, batch_size=10, lr=1e-4, resize=(1.0, 1.0), channels=(), **own)
    (tmp_path / "notes").mkdir()
    begun = together(ranks.training_from_disk, tmp_path / "cache", config, tmp_path / "two", tmp_path / "notes")
    assert ended(begun) == [0, 0]
    assert (tmp_path / "notes" / "mapped-0").read_text() == (tmp_path / "notes" / "mapped-1").read_text() != ""
    assert len(list((tmp_path / "cache" / "folders").glob("train-*.pixels"))) == 1
    one, two = train(config, tmp_path / "one", device="cpu"), json.loads((tmp_path / "two" / "result.json").read_text())
    assert two["environment"]["data"] == one["environment"]["data"]
    assert [entry["loss"] for entry in two["history"]] == pytest.approx([e["loss"] for e in one["history"]], rel=1e-4)


def test_process_with_other_images_is_refused(together, cache, tiny, tmp_path):
    assert ended(together(ranks.other_images, tiny, tmp_path / "run", tmp_path / "log")) == [0, 0]
    for rank in "01":
        said = (tmp_path / f"log-{rank}").read_text()
        assert said.startswith("RunError: process 1 has other images than the first: here {")
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_train_one_network(together, cache, tmp_path):
    argv = flags(STILL, tmp_path, "cuda")
    assert ended(together(ranks.command, argv, tmp_path / "log")) == [0, 0]
    one = train(STILL, tmp_path / "one", device="cuda")
    two = json.loads((tmp_path / "runs" / STILL.name / "result.json").read_text())
    losses = [[entry["loss"] for entry in result["history"]] for result in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("device", "local", "expected"),
    [
        ("cpu", 7, "cpu"),
        ("cuda", 1, "cuda:1"),
        ("cuda", 2, r"got cuda for process 2; here are 2"),
        ("cuda:0", 0, "`device` must be cuda, with a GPU for each of 4 processes"),
    ],
)
def test_each_process_has_a_gpu_of_its_own(monkeypatch, device, local, expected):
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(_checks, "find_device", torch.device)
    if expected in ("cpu", "cuda:1"):
        assert str(pick_device(device, 4)) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            pick_device(device, 4)
    assert str(pick_device("cuda:5")) == "cuda:5"


def test_without_torchrun_a_process_is_alone(monkeypatch):
    assert started() is ALONE
    with joined() as processes:
        assert processes is ALONE
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert started() is ALONE
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK")
    assert started() is ALONE
    monkeypatch.setenv("RANK", "3")
    assert (started().rank, started().count) == (3, 4)


def test_commands_of_the_page_are_understood():
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text().replace("\\\n", " ")
    found = re.findall(r"torchrun .*-m scalesteer (train .*)", page)
    assert len(found) == 3
    for words in found:
        assert cli.app.parse(words.split()).made.training.batch_size % 8 == 0
    (batch_file,) = re.findall(r"```bash\n(.*?)```", page, flags=re.S)
    assert subprocess.run(["bash", "-n"], input=batch_file, text=True, capture_output=True, check=True).stderr == ""


def torchrun(config, tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "scalesteer"]
    command = [sys.executable, *words, *flags(config, tmp_path)]
    with (tmp_path / "torchrun").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def process_of(rank, parent):
    """The process that torchrun started as this rank."""
    for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0"):
            return int(pid)
    raise ProcessLookupError(rank)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_ends_when_a_process_is_killed_and_the_run_goes_on(cache, tmp_path):
    config = changed(STILL, epochs=30)
    running = torchrun(config, tmp_path)
    try:
        wait_for_checkpoint(lambda: running.poll() is None, config, tmp_path)
        os.kill(process_of(1, running), signal.SIGKILL)
        assert running.wait(300) == 1
    finally:
        running.kill()
        running.wait()
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9 ", (tmp_path / "torchrun").read_text())
    result = train(config, tmp_path / "runs" / config.name, device="cpu")
    assert [entry["epoch"] for entry in result["history"]] == list(range(30))
    assert result["status"] == "finished"


@pytest.mark.slow
def test_torchrun_stops_and_the_same_command_goes_on(cache, tmp_path):
    config = changed(STILL, epochs=20)
    running = torchrun(config, tmp_path)
    try:
        wait_for_checkpoint(lambda: running.poll() is None, config, tmp_path)
        running.send_signal(signal.SIGTERM)
        assert running.wait(300) != 0
        assert list((tmp_path / "runs" / config.name).glob("last-*"))
        running = torchrun(config, tmp_path)
        assert running.wait(300) == 0
    finally:
        running.kill()
        running.wait()
    said = (tmp_path / "torchrun").read_text()
    assert "Received 15 death signal" in said
    assert "does not answer" not in said  # they stopped together
    assert said.splitlines()[-1].startswith("test error ")


@pytest.mark.slow
def test_run_whose_processes_are_killed_at_random_ends_with_the_same_weights(together, cache, tmp_path):
    config, chance = changed(TINY, epochs=6), random.Random(0)
    (tmp_path / "notes").mkdir()
    begun = time.perf_counter()
    assert ended(together(ranks.training, config, tmp_path / "whole", tmp_path / "notes")) == [0, 0]
    duration = time.perf_counter() - begun
    for _ in range(10):
        both = together(ranks.training, config, tmp_path / "parts", tmp_path / "notes")
        both[0].join(chance.uniform(0.1, 0.8) * duration)
        victim = chance.choice(both)
        if victim.exitcode is None:
            os.kill(victim.pid, signal.SIGKILL)
        ended(both)
    assert ended(together(ranks.training, config, tmp_path / "parts", tmp_path / "notes")) == [0, 0]
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("parts", "whole")]
    assert weights[0] == weights[1]
