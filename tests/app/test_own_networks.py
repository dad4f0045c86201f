"""Networks that are not of this package: trained, measured, asked, exported and shown like the others."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from scalesteer import ScaleChannels, create_model, register_model, save_pretrained
from scalesteer.app import CheckpointError, cli, evaluate, load, load_model, make_run, maps, read_run, train
from scalesteer.app.demo import DemoModel
from scalesteer.app.demo.asking import SIZES
from scalesteer.app.engines import make_runs
from scalesteer.models import external, network_of
from scalesteer.models.registered import BUILDERS
from tests import test_timm

CLASSES = ("dark", "light")
MODULE = """
import pathlib
from torch import nn

pathlib.Path("imported").touch()

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()

def small(num_classes, in_chans=3, width=4):
    '''A residual block, and the largest score.'''
    first, last = nn.Conv2d(in_chans, width, 3), nn.Conv2d(width, num_classes, 1)
    return nn.Sequential(first, Block(width), last, nn.AdaptiveMaxPool2d(1), nn.Flatten())

def images(num_classes):
    return nn.Conv2d(3, num_classes, 3)

def fails(num_classes):
    return nn.Linear(7, num_classes)

number = 5
"""
FLAGS = ("--image-size", "16", "16", "--epochs", "2", "--batch-size", "8", "--lr", "0.02", "--device", "cpu")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with pictures of two kinds, and a module of the user's."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(24):
            pixels = rng.integers(0, 80, (16, 16, 3)) + 150 * label
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "photos" / name / f"{i}.png")
    (tmp_path / "nets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    yield tmp_path
    sys.modules.pop("nets", None)


def run_folder(place):
    (found,) = (place / "runs").iterdir()
    return str(found)


def test_a_function_of_the_users_goes_through_all_commands(place, capsys):
    assert cli.main(["train", "photos", "--network", "nets:small", "--multiple", "2", *FLAGS]) == 0
    folder = run_folder(place)
    said = capsys.readouterr().out
    assert "test error" in said
    assert (place / "runs").joinpath(folder, "report.html").exists()
    run = read_run(place / folder)
    assert run.network.model == "nets:small"
    assert "--network nets:small" in run.command
    told = json.loads((place / folder / "model" / "config.json").read_text())["arguments"]
    assert (told["name"], told["width"], told["multiple"]) == ("nets:small", 4, 2)
    model = load_model(place / folder)
    assert isinstance(model, ScaleChannels)
    assert isinstance(model.net, nn.Sequential)
    network = ["--network", "nets:small"]
    assert cli.main(["evaluate", folder, *network]) == 0
    assert "mean over classes: precision " in capsys.readouterr().out
    assert cli.main(["evaluate", folder, "--json", *network]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == evaluate(model, load(run, "test"))
    assert {"error", "precision", "recall", "f1", "scores", "by_class"} <= told.keys()
    assert cli.main(["predict", folder, "photos", "--csv", "said.csv", *network]) == 0
    assert len((place / "said.csv").read_text().splitlines()) == 49
    assert cli.main(["export", folder, "--to", "folder", "--output", "shared", *network]) == 0
    assert cli.main(["runs"]) == 0
    assert "--network nets:small" in capsys.readouterr().out
    assert cli.main(["predict", folder, "photos", "--save-maps", "drawn", *network]) == 2
    assert "this network has no map of classes" in capsys.readouterr().err


def test_no_file_has_code_imported(place, capsys):
    assert cli.main(["train", "photos", "--network", "nets:small", "--channels", "none", *FLAGS]) == 0
    folder = run_folder(place)
    for name in list(BUILDERS):
        del BUILDERS[name]
    sys.modules.pop("nets")
    (place / "imported").unlink()
    for words in (["evaluate"], ["predict", "photos"], ["export", "--to", "onnx"], ["demo"]):
        command, *more = words
        assert cli.main([command, folder, *more]) == 2
        said = capsys.readouterr().err
        assert "names a network 'nets:small' that is not known here" in said
        assert "give --network" in said
    assert cli.main(["runs"]) == 0  # which needs no network
    with pytest.raises(CheckpointError, match="register_model"):
        load_model(place / folder)
    assert not (place / "imported").exists()
    assert cli.main(["evaluate", folder, "--network", "nets:small"]) == 0
    assert (place / "imported").exists()


def test_an_interrupted_run_of_a_users_network_is_read_by_its_checkpoint(place, monkeypatch):
    class StoppedError(Exception):
        pass

    def stop(self, state):
        self.save(state)
        raise StoppedError

    run = make_run(
        images="photos", image_size=(16, 16), epochs=2, batch_size=8, model=external.register_network("nets:small")
    )
    with monkeypatch.context() as patch:
        patch.setattr("scalesteer.app.checkpoint.Checkpointer.after_epoch", stop)
        with pytest.raises(StoppedError):
            train(run, place / "run", device="cpu")
    assert isinstance(load_model(place / "run"), ScaleChannels)
    del BUILDERS["nets:small"]
    with pytest.raises(CheckpointError, match=r"'nets:small' that is not known here: call register_model"):
        load_model(place / "run")


class Pooled(nn.Module):
    """A network that a program makes itself."""

    def __init__(self, classes=2, width=6):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().amax((2, 3)))


def test_a_given_module_is_trained_from_its_own_weights(place):
    net = Pooled()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    run = make_run(images="photos", image_size=(16, 16), epochs=1, batch_size=8, lr=1e-6)
    result = train(run, place / "run", device="cpu", model=net)
    assert all(torch.equal(value, start[name]) for name, value in net.state_dict().items())  # a copy was trained
    model = load_model(place / "run")
    torch.testing.assert_close(model.net.conv.weight, start["conv.weight"], rtol=0, atol=1e-4)
    assert int(model.net.norm.num_batches_tracked) == 4  # one for each step of 34 pictures, in four channels
    name = f"{__name__}:Pooled"
    again = read_run(place / "run")
    assert again.network.model == name
    assert evaluate(model, load(again, "test"))["error"] == result["test_error"]
    del BUILDERS[name]
    with pytest.raises(CheckpointError, match="not known here"):
        load_model(place / "run")
    register_model(name, lambda num_classes: Pooled(num_classes))
    assert torch.equal(load_model(place / "run").net.conv.weight, model.net.conv.weight)


def test_a_builder_and_a_name_are_given_as_well(place):
    run = make_run(images="photos", image_size=(16, 16), epochs=1, batch_size=8, channels=())

    def mine(num_classes, width=3):
        return Pooled(num_classes, width)

    assert train(run, place / "a", device="cpu", model=mine)["status"] == "finished"
    assert load_model(place / "a").conv.out_channels == 3
    register_model("by-name", mine)
    train(run, place / "b", device="cpu", model="by-name")
    assert network_of(load_model(place / "b")).arguments["name"] == "by-name"
    with pytest.raises(TypeError, match=r"`model` must be a name, a module or a function that makes one \(got int\)"):
        train(run, place / "c", model=3)


def test_the_page_shows_a_users_network_at_one_size_and_at_its_own(place):
    train(
        make_run(images="photos", image_size=(16, 16), epochs=1, batch_size=8),
        place / "run",
        device="cpu",
        model=Pooled(),
    )
    demo = DemoModel(place / "run")
    picture = demo.read((place / "photos" / "light" / "0.png").read_bytes())
    said = demo.answer(picture, 1.5)
    assert [way["name"] for way in said["ways"]] == ["looking once", "looking at 5 sizes"]
    assert len(said["channels"]) == 5
    assert len(demo.curve(picture)["sizes"]) == len(SIZES)


def test_maps_of_a_users_network_are_drawn_as_they_are(tmp_path):
    def mapping(num_classes, in_chans=3):
        return nn.Sequential(nn.Conv2d(in_chans, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, num_classes, 1))

    register_model("mapping", mapping)
    model = create_model("mapping", num_classes=3, channels=(0.5, 1.0)).eval()
    pixels = np.random.default_rng(0).integers(0, 255, (3, 20, 24), dtype=np.uint8)
    found = maps.answer_maps(maps.without_readout(model), pixels)
    with torch.no_grad():
        logits, sizes = model(torch.from_numpy(pixels)[None] / 255, return_scales=True)
    assert np.array_equal(found.labels, logits[0].argmax(0).numpy())
    assert found.sizes == pytest.approx(sizes[0].numpy())
    assert (found.stride, found.classes) == (2, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "nets:absent"], "must name a function that makes a network: nets has no such function"),
        (["--network", "nets:number"], "nets has no such function"),
        (["--network", "nowhere:small"], "'nowhere:small' cannot be imported: No module named 'nowhere'"),
        (["--network", "small"], r"must be timm:NAME, torchvision:NAME or package.module:function (got 'small')"),
        (["--network", "nets:small", "--model", "pooled-cnn"], "give one network"),
        (["--network", "nets:small", "--widths", "8"], "`widths` (got (8,)) applies to"),
        (["--network", "nets:small", "--pretrained"], "`pretrained` (got True) applies to"),
        (["--network", "nets:small", "--weights", "photos"], "`weights` photos cannot be read as tensors"),
        (["--network", "nets:images"], "must return logits (images, 2), one for each class (got shape (1, 2, 14, 14))"),
        (["--network", "nets:fails"], "the network 'nets:fails' cannot be used with these images"),
        (["--multiple", "2", "--channels", "none"], "`multiple` (got 2) needs `channels`"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(place, capsys, words, message):
    assert cli.main(["train", "photos", *words, *FLAGS, *([] if "--channels" in words else ["--channels", "1"])]) == 2
    assert message in capsys.readouterr().err


def test_workers_of_a_cluster_do_not_have_the_code(place):
    register_model("mine", Pooled)
    with pytest.raises(ValueError, match="`engine` must be local for a network of your own"):
        make_runs([make_run(model="mine")], engine="ray")


def test_a_grid_of_runs_may_name_a_users_network(place, capsys):
    (place / "grid.toml").write_text(
        '[base]\nmodel = "nets:small"\nimages = "photos"\nimage_size = [16, 16]\nepochs = 1\nbatch_size = 8\n'
        "[grid]\nchannels = [[1.0], [0.5, 1.0]]\n"
    )
    assert cli.main(["sweep", "grid.toml", "--network", "nets:small", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("--network nets:small") == 2


# Weights that are there already


def test_weights_of_a_file_are_taken_where_they_fit(tmp_path, caplog):
    torch.manual_seed(1)
    other = Pooled(classes=7)
    torch.save({"state_dict": {f"module.{k}": v for k, v in other.state_dict().items()}}, tmp_path / "w.pth")
    net = Pooled(classes=2)
    head = net.head.weight.clone()
    assert external.load_weights(ScaleChannels(net, (1.0,)), tmp_path / "w.pth") == ["net.head.weight", "net.head.bias"]
    assert torch.equal(net.conv.weight, other.conv.weight)
    assert torch.equal(net.head.weight, head)
    with pytest.raises(ValueError, match="are of another network: 6 of 6 parameters differ"):
        external.load_weights(Pooled(width=9), tmp_path / "w.pth")
    register_model("p", lambda num_classes: Pooled(num_classes))
    folder = save_pretrained(create_model("p", num_classes=3), tmp_path / "net")
    assert external.load_weights(net, folder / "model.safetensors") == ["head.weight", "head.bias"]


class Evil:
    def __reduce__(self):
        return (open, ("run", "w"))


def test_a_file_of_weights_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"conv.weight": Evil()}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="cannot be read as tensors"):
        external.load_weights(Pooled(), tmp_path / "w.pth")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["timm:resnet18", "timm:vit_tiny_patch16_224", "torchvision:resnet18"])
def test_a_network_of_a_library_is_trained_from_a_file(place, name, capsys):
    test_timm.load()
    if name.startswith("torchvision"):
        pytest.importorskip("torchvision")
    external.register_network(name)
    torch.save(create_model(name, num_classes=1000).net.state_dict(), place / "w.pth")
    flags = [*FLAGS, "--image-size", "32", "32", "--channels", "0.5", "1", "--multiple", "16", "--epochs", "1"]
    words = ["train", "photos", "--network", name, "--weights", "w.pth", *flags, "--lr", "1e-7"]
    assert cli.main(words) == 0
    folder = run_folder(place)
    model = load_model(place / folder)
    expected = torch.load(place / "w.pth", weights_only=True)
    first = next(key for key in expected if key.endswith("weight") and expected[key].ndim == 4)
    torch.testing.assert_close(model.net.net.state_dict()[first], expected[first], atol=1e-4, rtol=0)
    assert (
        model.net.normalise.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406], abs=0.02) or "vit" in name
    )
    notes = json.loads((place / folder / "result.json").read_text())["environment"]["note"]
    assert notes.startswith("from the weights w.pth, sha256 ")
    assert cli.main(["evaluate", folder, "--network", name]) == 0


def test_weights_that_cannot_be_fetched_are_told(place, capsys, monkeypatch):
    test_timm.load()
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
    assert cli.main(["train", "photos", "--network", "timm:resnet18", "--pretrained", *FLAGS]) == 2
    said = capsys.readouterr().err
    assert "the trained weights of timm:resnet18 cannot be had" in said
    assert "give them as a file, `weights`" in said


def test_a_name_that_a_library_does_not_know_is_told_with_the_nearest():
    test_timm.load()
    with pytest.raises(ValueError, match="timm has no network 'resnet81'; is 'resnet18' meant"):
        external.register_network("timm:resnet81")
    with pytest.raises(ValueError, match="torchvision has no network 'resnet81'; is 'resnet18' meant"):
        external.register_network("torchvision:resnet81")


def test_grey_pictures_have_one_mean():
    test_timm.load()
    net = create_model(external.register_network("timm:resnet18"), in_chans=1, num_classes=2)
    assert float(net.normalise.mean) == pytest.approx(sum(external.PHOTOGRAPHS[0]) / 3)
    assert net(torch.rand(2, 1, 32, 32)).shape == (2, 2)
    with pytest.raises(ValueError, match="takes pictures in colour"):
        create_model(external.register_network("torchvision:resnet18"), in_chans=1, num_classes=2)
