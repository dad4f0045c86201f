import pickle

import pytest
import torch
from torch import nn

from scalesteer import files
from scalesteer.app import CheckpointError, load_model, make_run
from scalesteer.app.networks import misfits, read_checkpoint
from scalesteer.models import create_model, network_of

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3), "c": torch.ones(4, dtype=torch.bfloat16)}


def save(path, tensors, about):
    files.write_atomically(path, files.encode(tensors, about))


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "x.safetensors", TENSORS, {"what": "test"})
    return tmp_path / "x.safetensors"


def test_what_was_saved_comes_back(path):
    tensors, about = read_checkpoint(path)
    assert about == {"what": "test"}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_tensors_that_share_memory_or_need_gradients_are_saved(tmp_path):
    weight = nn.Parameter(torch.rand(2, 3))
    save(tmp_path / "x", {"a": weight, "b": weight.T, "c": weight[:1]}, {})
    tensors, _ = read_checkpoint(tmp_path / "x")
    assert torch.equal(tensors["b"], weight.T)
    assert torch.equal(tensors["c"], weight[:1])


def test_missing_directory_text_and_damage_are_errors(tmp_path, path):
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read at .*none: No such file"):
        read_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        read_checkpoint(tmp_path)
    (tmp_path / "text").write_text("hello, this is not a checkpoint")
    with pytest.raises(CheckpointError, match="text is damaged or not a file of scalesteer"):
        read_checkpoint(tmp_path / "text")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"x\.safetensors is damaged or not a file of scalesteer"):
        read_checkpoint(path)


class Evil:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_malicious_pickle_is_refused_and_never_runs(tmp_path, kind):
    path = tmp_path / "evil.safetensors"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    else:
        torch.save({"a": Evil(tmp_path / "owned")}, path)
    for read in (read_checkpoint, load_model):
        with pytest.raises(CheckpointError, match="is damaged or not a file of scalesteer"):
            read(path)
    assert not (tmp_path / "owned").exists()
    pickle.loads(pickle.dumps(Evil(tmp_path / "owned"))).close()  # it would have
    assert (tmp_path / "owned").exists()


def test_newer_file_is_refused(path, monkeypatch):
    monkeypatch.setattr(files, "FORMAT", 3)
    save(path, TENSORS, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="it has format 3, and this version reads 2"):
        read_checkpoint(path)


def test_everything_that_does_not_fit_is_listed():
    expected = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).state_dict()
    wrong = dict(expected)
    del wrong["0.bias"]
    wrong |= {"2.bias": torch.ones(1), "1.weight": torch.ones(2, 2), "1.bias": torch.tensor([float("nan")])}
    wrong["0.weight"] = wrong["0.weight"].double()
    assert misfits(expected, expected) == []
    assert misfits(expected, wrong) == [
        "0.weight is torch.float64, not torch.float32",
        "1.bias has values that are not finite",
        "1.weight is (2, 2), not (1, 3)",
        "missing 0.bias",
        "unexpected 2.bias",
    ]


def test_other_architecture_is_refused(tmp_path):
    about = {"run": make_run(model="plain-cnn", upsample=1).to_dict()}
    save(tmp_path / "m", create_model("spatial-transformer", upsample=1).state_dict(), about)
    with pytest.raises(CheckpointError, match=r"does not fit the model: unexpected features\.transformer"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"widths": [2048] * 32, "kernel_size": 27}, "does not fit the model: missing"),  # 350 GiB of weights
        ({"widths": [4, 4]}, "names a model that cannot be"),
        ({"lr": 10**400}, "does not say which model it holds"),
        ({"model": "steered-cnn", "kernel_size": 31, "scales": [16]}, "does not say which model it holds"),
    ],
)
def test_file_that_asks_for_too_much_is_refused_before_anything_is_made(tmp_path, config, message):
    save(tmp_path / "m", TENSORS, {"config": {"model": "pooled-cnn", **config}})
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("side", "channels", "message"),
    [
        (20_000, {}, r"names a model that cannot be: .*one image of 20,000 x 20,000 pixels it would take about 48 GiB"),
        (2_500, {"channels": [4.0]}, "take about 12 GiB of memory, and the limit is 8 GiB"),
        (2_500, {"test_channels": [4.0]}, "take about 12 GiB of memory, and the limit is 8 GiB"),
        (1_000, {"channels": [4.0]}, None),
    ],
)
def test_image_that_asks_for_too_much_memory_is_refused(tmp_path, side, channels, message):
    size = {"in_chans": 3, "num_classes": 2, "image_size": (side, side)}
    model = create_model("pooled-cnn", **size, channels=channels.get("channels"))
    config = make_run(images="photos", model="pooled-cnn", **{"channels": (), **channels}, image_size=(side, side))
    save(tmp_path / "m", model.state_dict(), {"run": config.to_dict(), "task": {**size, "classes": ["a", "b"]}})
    if message is None:
        assert load_model(tmp_path / "m").task.image_size == (side, side)
    else:
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path / "m")


@pytest.mark.parametrize("about", [{}, {"config": {"model": "resnet"}}, {"config": 3}, {"config": {"depth": 3}}])
def test_file_without_a_known_model_is_refused(tmp_path, about):
    save(tmp_path / "m", TENSORS, about)
    with pytest.raises(CheckpointError, match="does not say which model it holds"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("mode", [True, False])
def test_saved_in_either_mode_gives_the_same_outputs(tmp_path, mode):
    model = create_model("plain-cnn", upsample=1)
    model(torch.rand(8, 1, 28, 28))  # moves the running statistics
    save(tmp_path / "m", model.train(mode).state_dict(), {"run": make_run(model="plain-cnn", upsample=1).to_dict()})
    loaded = load_model(tmp_path / "m")
    x = torch.rand(4, 1, 28, 28)
    assert network_of(loaded).arguments["name"] == "plain-cnn"
    assert not loaded.training
    assert torch.equal(loaded(x), model.eval()(x))


@pytest.mark.parametrize("history", [3, True, "abc", {}])
def test_history_that_is_no_list_is_refused(tmp_path, history):
    tensors = {f"model.{name}": t for name, t in create_model("plain-cnn", upsample=1).state_dict().items()}
    about = {"config": {"model": "plain-cnn", "upsample": 1}, "history": []}
    save(tmp_path / "m", tensors, about)
    assert network_of(load_model(tmp_path / "m")).arguments["name"] == "plain-cnn"
    save(tmp_path / "m", tensors, about | {"history": history})
    with pytest.raises(CheckpointError, match=r"`history` must be a list \(got"):
        load_model(tmp_path / "m")


def test_failed_write_keeps_the_old_file_and_leaves_nothing(path):
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save(path, TENSORS, {"what": object()})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_tensor_under_another_name_is_noticed(tmp_path):
    path = tmp_path / "renamed.safetensors"
    save(path, {"one": torch.tensor([1.0]), "two": torch.tensor([2.0])}, {})
    content = path.read_bytes()
    assert content.count(b'"two"') == 1
    path.write_bytes(content.replace(b'"two"', b'"six"'))
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
