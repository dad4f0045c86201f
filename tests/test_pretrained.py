"""Networks as folders: what is written comes back, what is damaged is refused, and the Hub gets the same files."""

import base64
import hashlib
import http.server
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import scalesteer
from scalesteer import LogRadialBasis, ScaleChannels, create_model, files, fold, list_models, pretrained
from scalesteer import app as training
from scalesteer.app import cli
from scalesteer.models import set_input_statistics
from scalesteer.pretrained import PretrainedError, from_pretrained, save_pretrained

LEAN = {"widths": (2, 3, 4)}
TRAINED = [name for name in scalesteer.list_pretrained() if "run" in pretrained.read_config(name)]  # by our training


def network(**options):
    """A small network whose every number differs from that of a new one."""
    torch.manual_seed(1)
    model = create_model("steered-cnn", **{**LEAN, "channels": (0.5, 1.0), **options})
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.rand(tensor.shape) if tensor.is_floating_point() else 1)
    set_input_statistics(model, 0.3, 0.1)
    return model.eval()


@pytest.fixture
def saved(tmp_path):
    return save_pretrained(network(), tmp_path / "net")


def change(folder, **entries):
    """Give config.json other entries."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def change_arguments(folder, **entries):
    change(folder, arguments=json.loads((folder / "config.json").read_text())["arguments"] | entries)


# Arguments and task


@pytest.mark.parametrize("name", list_models())
def test_arguments_are_ready_for_json_and_make_the_same_network(name):
    lean = {} if name.endswith(("large", "deep")) else LEAN
    model = create_model(name, in_chans=3, num_classes=4, **lean)
    arguments = json.loads(json.dumps(model.arguments))
    assert arguments == model.arguments
    assert arguments["name"] == name
    other = create_model(**arguments)
    assert str(other) == str(model)
    assert other.arguments == arguments
    assert other.task[:2] == (3, 4)


@pytest.mark.parametrize(
    ("basis", "kept"),
    [("area", "area"), (replace(LogRadialBasis(), orders=(1, 2.5), window=9), {"orders": [1.0, 2.5]})],
)
def test_arguments_keep_the_basis(basis, kept):
    arguments = create_model("ss-cnn", basis=basis, widths=(2, 2, 2), scales=np.array([1.0, 1.5])).arguments
    assert arguments["scales"] == [1.0, 1.5]
    assert kept == (arguments["basis"] if isinstance(kept, str) else {"orders": arguments["basis"]["orders"]})
    first = create_model(**json.loads(json.dumps(arguments))).first.basis
    assert asdict(first) == asdict(LogRadialBasis.of(basis))


def test_arguments_hold_defaults_but_nothing_of_a_dataset():
    model = create_model("pooled-cnn", "stir-emoji")
    assert model.arguments["kernel_size"] == [5, 5, 3]
    assert model.arguments["image_size"] == [64, 64]
    assert "dataset" not in model.arguments
    assert model.task[:7] == (1, 36, (64, 64), (), "pad", "black", None)
    assert set(model.task[7:]) == {None}
    assert create_model("pooled-cnn").task.image_size is None


def test_arguments_and_task_follow_channels():
    model = create_model("pooled-cnn", channels=(0.5, 1.0), drop=0.2, **LEAN)
    model.task = model.task._replace(classes=tuple("abcdefghij"))
    other = model.with_scales((1.0, 2.0))
    assert other.arguments["channels"] == [1.0, 2.0]
    assert other.arguments["drop"] == 0.2
    assert other.task.classes[:2] == ("a", "b")
    assert "channels" not in model.net.arguments
    assert training.with_channels(model, (0.7, 1.0), "mean").arguments["join"] == "mean"
    with pytest.raises(AttributeError, match="arguments"):
        ScaleChannels(nn.Flatten(), (1.0,)).arguments  # noqa: B018


# There and back


@pytest.mark.parametrize("name", list_models())
def test_every_network_comes_back(name, tmp_path):
    lean = {"widths": (2, 3, 4, 5, 6)[: 5 if "deep" in name else 4 if "large" in name else 3]}
    lean |= {"scales": (1.0, 1.5), "upsample": 1} if name == "ss-cnn" else {}
    model = create_model(name, in_chans=3, **lean).eval()
    other = from_pretrained(save_pretrained(model, tmp_path / "net"))
    x = torch.rand(2, 3, 28, 28)
    assert torch.equal(other(x), model(x))
    assert not other.training


def test_task_and_run_come_back(tmp_path):
    model = network(num_classes=3, image_size=(28, 40))
    model.task = model.task._replace(classes=("ein Hund", "猫", 'say "x"'), fit="crop")
    folder = save_pretrained(model, tmp_path / "net", run={"seed": 1}, card="Trained on **nothing**.")
    other = from_pretrained(str(folder))
    assert other.task == model.task
    assert isinstance(other, ScaleChannels)
    assert (other.scales, other.join) == (model.scales, model.join)
    assert pretrained.read_config(folder)["run"] == {"seed": 1}
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: scalesteer\n")
    assert "Trained on **nothing**." in card
    assert "猫" in card
    assert "28 x 40" in card


def test_half_precision_halves_the_file_and_keeps_vectors(tmp_path):
    model = network(widths=(8, 16, 16))
    whole = save_pretrained(model, tmp_path / "whole") / "model.safetensors"
    half = save_pretrained(model, tmp_path / "half", half=True) / "model.safetensors"
    assert half.stat().st_size < 0.7 * whole.stat().st_size
    other = from_pretrained(half.parent)
    for (name, own), kept in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert kept.dtype == own.dtype, name
        assert torch.equal(kept, own.half().float() if own.ndim > 1 else own), name


def test_saving_again_replaces_and_gives_the_same_bytes(saved, tmp_path):
    before = [(saved / name).read_bytes() for name in ("config.json", "model.safetensors", "README.md")]
    save_pretrained(network(num_classes=2), saved)
    assert from_pretrained(saved).task.num_classes == 2
    save_pretrained(network(), saved)
    assert [(saved / name).read_bytes() for name in ("config.json", "model.safetensors", "README.md")] == before
    assert sorted(path.name for path in saved.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_load_model_takes_a_folder(saved, tmp_path):
    model = training.load_model(saved)
    assert training.read_run(saved) is None
    x = torch.rand(2, 1, 28, 28)
    assert torch.equal(model(x), network()(x))
    run = training.make_run(model="steered-cnn", channels=(0.5, 1.0), seed=7)
    folder = save_pretrained(network(), tmp_path / "trained", run=run.to_dict())
    assert training.read_run(folder) == run
    change(folder, run={"epochs": 0})
    with pytest.raises(training.CheckpointError, match="epochs"):
        training.read_run(folder)


# What cannot be saved


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: nn.Flatten(), "must be a network of create_model"),
        (lambda m: ScaleChannels(nn.Flatten(), (1.0,)), "must be a network of create_model"),
        (fold, "not as create_model made it"),
        (lambda m: m.double(), "not as create_model made it"),
        (lambda m: (setattr(m.net, "dense", True), m)[1], "not as create_model made it"),
    ],
)
def test_what_arguments_do_not_make_again_is_refused(spoil, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        save_pretrained(spoil(network()), tmp_path / "net")
    assert not (tmp_path / "net").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = network()
    with torch.no_grad():
        model.net.classifier.fc2.weight[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"not finite in half precision: net\.classifier\.fc2\.weight"):
        save_pretrained(model, tmp_path / "net", half=True)
    with torch.no_grad():
        model.net.classifier.fc2.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"not finite: net\.classifier\.fc2\.weight"):
        save_pretrained(model, tmp_path / "net")


@pytest.mark.parametrize(
    ("task", "run", "expected"),
    [
        ({"in_chans": 1, "image_size": [28, 28]}, None, ("black", "pad")),
        ({"in_chans": 1, "image_size": [64, 64], "classes": [*"abcdefghij"]}, {"images": None}, ("black", "pad")),
        ({"in_chans": 1, "classes": [*"abcdefghij"], "fit": "crop"}, {"images": "photos"}, ("surroundings", "crop")),
        ({"in_chans": 1, "image_size": [28, 28], "classes": [*"abcdefghij"]}, None, ("surroundings", "pad")),
        ({"in_chans": 3, "image_size": [64, 64]}, {"dataset": "rescaled-cifar10"}, ("surroundings", "resize")),
        ({"in_chans": 1}, None, ("surroundings", "pad")),
    ],
)
def test_the_ground_is_found_where_earlier_versions_left_it_to_be_guessed(task, run, expected):
    found = pretrained.read_task({"num_classes": 10, "image_size": None, **task}, run)
    assert (found.ground, found.fit) == expected


def test_a_task_that_does_not_fit_is_refused(tmp_path):
    model = network()
    model.task = model.task._replace(classes=("one", "two"))
    with pytest.raises(ValueError, match="`classes` must be 10 different names"):
        save_pretrained(model, tmp_path / "net")
    assert not (tmp_path / "net").exists()


def test_the_config_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "config.json").write_text('{"model": "ss-cnn"}')
    with pytest.raises(ValueError, match="something else"):
        save_pretrained(network(), tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"model": "ss-cnn"}'
    with pytest.raises(PretrainedError, match="directory of a run"):
        from_pretrained(tmp_path)


# What cannot be loaded


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"format": 2}, "newer version"),
        ({"format": "1"}, "`format` must be 1"),
        ({"surprise": 1}, "unknown keys: surprise"),
        ({"arguments": []}, "`arguments` must be there"),
        ({"arguments": {}}, "must have the `name`"),
        ({"arguments": {"name": "steered-cnn", "dataset": "mnist-scale"}}, "no `dataset`"),
        ({"arguments": {"name": "unknown-cnn"}}, "that is not known here: call register_model"),
        ({"weights": "0" * 64}, "holds other weights"),
        ({"task": {}}, "`task` does not fit"),
        ({"task": {"in_chans": 3, "num_classes": 10, "image_size": None}}, "those of the network"),
        ({"task": {"in_chans": 1, "num_classes": 10, "image_size": None, "classes": ["a"] * 10}}, "different names"),
        ({"task": {"in_chans": 1, "num_classes": 10, "image_size": None, "classes": [1] * 10}}, "different names"),
        ({"task": {"in_chans": 1, "num_classes": 10, "image_size": None, "fit": "squeeze"}}, "`fit` must be one of"),
        ({"task": {"in_chans": 1, "num_classes": 10, "image_size": None, "more": 1}}, "`task` does not fit"),
        (
            {"task": {"in_chans": 1, "num_classes": 10, "image_size": None, "value_range": [9, 0]}},
            "`value_range` must be",
        ),
        ({"task": {"in_chans": 1, "num_classes": 10, "image_size": None, "value_range": "05"}}, "`value_range"),
    ],
)
def test_a_config_that_is_wrong_is_refused(entries, message, saved):
    change(saved, **entries)
    with pytest.raises(PretrainedError, match=message):
        from_pretrained(saved)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widths": [2, 3, 5]}, "does not fit the network"),
        ({"unknown": 1}, "has no option 'unknown'"),
        ({"widths": [1] * 33}, "up to 32"),
        ({"widths": [2, 3, 1 << 30]}, "`widths` must be at most 2,048"),
        ({"kernel_size": 33}, "`kernel_size` must be at most 31"),
        ({"scales": [1.0, 1e9]}, "`scales` must be at most 16"),
        ({"channels": [[1.0]]}, "`channels` must be a word"),
        ({"num_classes": 1 << 40}, "`num_classes` must be at most"),
        (
            {"basis": {"orders": list(range(1, 33)), "orientations": list(range(32))}, "scales": [1, 16]},
            "fewer functions",
        ),
        ({"basis": {"orders": [1] * 33}}, "up to 32"),
        ({"image_size": [30_000, 30_000]}, "one image of 30,000 x 30,000 pixels it would take about 17 GiB of memory"),
        ({"image_size": [1000, 1000], "widths": [2048, 3, 4]}, "would take about 10 GiB of memory, and the limit is 8"),
        ({"image_size": [1200, 1200], "channels": [15.0, 16.0]}, "must be smaller: for one image of 1,200 x 1,200"),
        ({"image_size": [1 << 20, 1 << 20]}, "GiB of memory"),
        ({"basis": {"strange": 1}}, "network that cannot be"),
        ({"calibration": {"temperatures": [[1.0]], "biases": [0.0, 0.0]}}, "`temperatures` must be a word"),
        ({"calibration": {"temperatures": [1.0] * 33, "biases": [0.0] * 33}}, "up to 32"),
        ({"calibration": {"temperatures": [1.0], "biases": [0.0]}}, "cannot be: `calibration` must be for 2 channels"),
        ({"calibration": {"temperatures": [1, -1], "biases": [0, 0]}}, "cannot be: `temperatures` must be positive"),
        ({"calibration": {"strange": [1.0]}}, "network that cannot be"),
        ({"calibration": "yes"}, "cannot be: `calibration` must be a Calibration"),
        ({"sure": 2.0}, "cannot be: `sure` must be above 0"),
    ],
)
def test_a_network_that_is_too_large_or_another_is_refused(arguments, message, saved):
    change_arguments(saved, **arguments)
    with pytest.raises(PretrainedError, match=message):
        from_pretrained(saved)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is damaged: Expecting value"),
        (b"[]", "is damaged: it is no JSON object"),
        (b"{", "is damaged: Expecting property name"),
        (b'{"format": 1, "run": {"lr": NaN}}', "is damaged: NaN is no JSON"),
        (b'{"format": 1, "run": {"lr": -Infinity}}', "is damaged: -Infinity is no JSON"),
        (b"[" * 100_000, "is damaged: maximum recursion depth"),
        (b" " * (1 << 20) + b"{}", "is not a regular file of at most 1,048,576 bytes"),
    ],
)
def test_a_damaged_config_is_refused(content, reason, saved):
    (saved / "config.json").write_bytes(content)
    with pytest.raises(PretrainedError, match=rf"config\.json.* {reason}"):
        from_pretrained(saved)


def test_a_pipe_for_a_config_is_refused_without_waiting(saved):
    (saved / "config.json").unlink()
    os.mkfifo(saved / "config.json")
    with pytest.raises(PretrainedError, match=r"config\.json is not a regular file"):
        from_pretrained(saved)


def test_estimated_memory_is_near_what_one_image_takes():
    """In a process of its own, which reports its largest size before and after."""
    code = r"""
import re, torch
from scalesteer import create_model, pretrained
used = lambda: 1024 * int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
model = create_model("pooled-resnet", in_chans=3, image_size=512, channels=(0.5, 1.0)).eval()
x = torch.rand(1, 3, 512, 512)
before = used()
with torch.no_grad():
    model(x)
taken = used() - before
for factor, refused in ((2, True), (1 / 4, False)):
    pretrained.MOST_MEMORY = int(taken / factor)
    try:
        pretrained.check_memory(model)
        assert not refused, taken
    except ValueError:
        assert refused, taken
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_large_network_is_refused_before_memory_is_taken(saved):
    large = {"name": "pooled-cnn-large", "widths": [2048] * 32, "kernel_size": 31, "subsample": []}
    change(saved, arguments=large)  # 250 GB
    with pytest.raises(PretrainedError, match="does not fit the network: missing"):
        from_pretrained(saved)


def test_a_file_larger_than_its_network_is_refused_before_it_is_read(saved):
    with open(saved / "model.safetensors", "r+b") as file:
        file.truncate(files.LARGEST_FILE)  # of holes, which take no place on the disk
    with pytest.raises(PretrainedError, match=r"model\.safetensors is larger than the network"):
        from_pretrained(saved)


def test_damaged_or_missing_weights_are_refused(saved):
    path = saved / "model.safetensors"
    content = path.read_bytes()
    for wrong in (b"", content[:-1], content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]):
        path.write_bytes(wrong)
        with pytest.raises(PretrainedError, match="damaged"):
            from_pretrained(saved)
    path.unlink()
    with pytest.raises(PretrainedError, match="cannot be read"):
        from_pretrained(saved)


def test_weights_that_are_no_numbers_or_of_another_type_are_refused(saved):
    path = saved / "model.safetensors"
    tensors, _ = files.read(path)
    for name, value, message in (
        ("net.classifier.fc2.weight", torch.full((10, 4, 1, 1), torch.nan), "not finite"),
        ("net.classifier.fc2.bias", torch.zeros(10).half(), "float16, not torch.float32"),
        ("net.features.norm1.num_batches_tracked", torch.zeros(()), "float32, not torch.int64"),
    ):
        content = {**tensors, name: value}
        path.write_bytes(files.encode(content, {}))
        change(saved, weights=files.combined_digest({k: files.tensor_digest(t) for k, t in content.items()}))
        with pytest.raises(PretrainedError, match=f"{name}.*{message}"):
            from_pretrained(saved)


@pytest.mark.parametrize("source", ["nowhere", "./nowhere/at", "/nowhere/at", Path("nowhere/at"), "a/b/c"])
def test_a_name_that_is_unknown_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PretrainedError, match="no network is found at"):
        from_pretrained(source)


# Networks that come with the package


@pytest.mark.parametrize("name", scalesteer.list_pretrained())
def test_a_shipped_network_is_small_and_has_a_card(name):
    folder = pretrained.SHIPPED / name
    assert (folder / "model.safetensors").stat().st_size < 1_000_000
    card = (folder / "README.md").read_text()
    for word in ("- Data: ", "SHA-256", "- Command: `", "- Commit: ", "- Test"):
        assert word in card
    assert "-dirty" not in card
    assert training.load_model(Path(name)).task == from_pretrained(name).task


@pytest.mark.parametrize("name", TRAINED)
def test_the_card_of_a_shipped_network_has_the_command_that_made_it(name):
    card = (pretrained.SHIPPED / name / "README.md").read_text()
    command = re.search("- Command: `(.*?)`", card)[1]
    if name == "digits-resized":  # what its pictures are resized by is no flag
        assert command == "python examples/more_sizes.py --train-rival FOLDER"
    else:
        assert cli.app.parse(command.removeprefix("scalesteer ").split()).made == training.read_run(Path(name))
    assert "- Test error: " in card
    assert "| size" in card


def test_the_rival_is_the_network_for_digits_trained_at_one_size():
    """What its pictures are resized by is in examples/more_sizes.py."""
    digits, rival = (training.read_run(Path(name)) for name in ("digits", "digits-resized"))
    assert rival.network == replace(digits.network, channels=())
    assert replace(rival.training, epochs=0) == replace(digits.training, epochs=0)
    assert rival.data == digits.data


def test_a_shipped_network_needs_torch_and_numpy_alone(monkeypatch):
    for module in ("safetensors", "safetensors.torch", "huggingface_hub", "filelock", "platformdirs"):
        monkeypatch.setitem(sys.modules, module, None)
    assert from_pretrained("digits")(torch.rand(1, 1, 40, 50)).shape == (1, 10)


def card_error(name):
    """The test error that a shipped network claims."""
    found = re.search(r"- Test error: ([0-9.]+) %", (pretrained.SHIPPED / name / "README.md").read_text())
    return float(found[1]) / 100


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "count", "slack"),
    [("digits", 1000, 0.01), ("digits-resized", 1000, 0.015), ("ss-cnn-mnist-scale", 300, 0.03)],
)
def test_digits_are_read_with_the_error_that_is_claimed(name, count, slack, real_cache):
    model = training.load_model(Path(name))
    images = training.load(training.read_run(Path(name)), "test").first(count)
    assert training.evaluate(model, [images])["error"] < card_error(name) + slack


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", TRAINED)
def test_a_shipped_network_has_the_error_that_is_claimed(name, real_cache):
    model, few = training.load_model(Path(name)), name.startswith("ss-cnn")  # which takes minutes for all of its images
    try:
        parts = training.read_run(Path(name)).data.open().load("test")
        error = training.evaluate(model, [part.first(5000) for part in parts][:1] if few else parts)["error"]
    except files.DataError as problem:
        pytest.skip(f"its images are not here: {problem}")
    assert error == pytest.approx(card_error(name), abs=8e-3 if few else 5e-4)  # weights of half precision, rounded


# The Hub


def test_the_cache_of_the_hub_is_read_without_a_network(saved, tmp_path):
    pytest.importorskip("huggingface_hub")
    cache = tmp_path / "hub"
    snapshot = cache / "models--someone--net" / "snapshots" / ("a" * 40)
    shutil.copytree(saved, snapshot)
    (cache / "models--someone--net" / "refs").mkdir()
    (cache / "models--someone--net" / "refs" / "main").write_text("a" * 40)
    model = from_pretrained("someone/net", cache_dir=cache, local_files_only=True)
    x = torch.rand(2, 1, 28, 28)
    assert torch.equal(model(x), network()(x))
    with pytest.raises(PretrainedError, match="someone/other is no folder, and cannot be read from the Hub"):
        from_pretrained("someone/other", cache_dir=cache, local_files_only=True)
    change(snapshot, format=2)
    with pytest.raises(PretrainedError, match="newer version"):
        from_pretrained("someone/net", cache_dir=cache, local_files_only=True)
    with pytest.raises(TypeError, match="revision are for networks on the Hub"):
        from_pretrained(saved, revision="main")


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as an upload of small files needs."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        address = f"http://{self.headers['Host']}/someone/net"
        if self.path == "/api/repos/create":
            answer = {"url": address}
        elif self.path == "/api/validate-yaml":  # of the card
            answer = {"errors": [], "warnings": []}
        elif "/preupload/" in self.path:
            files_told = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            answer = {"files": [{**file, "shouldIgnore": False, "oid": None} for file in files_told]}
        else:
            assert self.path == "/api/models/someone/net/commit/main"
            lines = [json.loads(line) for line in body.splitlines()]
            self.server.received = {line["value"]["path"]: line["value"] for line in lines if line["key"] == "file"}
            answer = {"commitUrl": f"{address}/commit/1", "commitOid": "b" * 40}
        self._answer(answer)

    def do_GET(self):
        self._answer({"id": "someone/net", "siblings": []})

    def _answer(self, content):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *words):
        pass


def test_pushing_uploads_what_saving_writes(saved, monkeypatch):
    library = pytest.importorskip("huggingface_hub")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(library.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        address = scalesteer.push_to_hub(network(), "someone/net", token="hf_none")
        server.shutdown()
    assert address.endswith("/commit/1")
    received = {name: base64.b64decode(value["content"]) for name, value in server.received.items()}
    assert sorted(received) == ["README.md", "config.json", "model.safetensors"]
    for name, content in received.items():
        assert hashlib.sha256(content).digest() == hashlib.sha256((saved / name).read_bytes()).digest(), name


def test_without_the_library_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"scalesteer\[hub\]"):
        from_pretrained("someone/net")
    with pytest.raises(ImportError, match=r"scalesteer\[hub\]"):
        scalesteer.push_to_hub(network(), "someone/net")
