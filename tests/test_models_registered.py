"""Networks of one's own, known by name: built, saved, read, exported, also in channels of scale."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from scalesteer import ScaleChannels, create_model, from_pretrained, list_models, register_model, save_pretrained
from scalesteer.models import count_parameters, describe_model, list_options, network_of, registered
from scalesteer.models.scaled import arguments_of
from scalesteer.pretrained import PretrainedError


class Own(nn.Module):
    def __init__(self, channels, classes, width, maps):
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.second, self.head, self.maps = nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(width, classes, 1), maps

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        y = self.head(self.second(y).relu())
        return {"out": y if self.maps else y.mean((2, 3))}


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(registered, "BUILDERS", dict(registered.BUILDERS))
    monkeypatch.setattr("scalesteer.models.BUILDERS", registered.BUILDERS)
    monkeypatch.setattr("scalesteer.pretrained.BUILDERS", registered.BUILDERS)

    @register_model("own")
    def build(num_classes=5, in_chans=3, *, width=4, maps=False, pretrained=False):
        """A network for tests."""
        return Own(in_chans, num_classes, width, maps)

    return build


IN_CHANNELS = {"channels": (0.5, 1.0), "join": "max", "drop": 0.25, "multiple": 2, "output": "out"}


def test_a_registered_network_is_made_by_name(own):
    assert "own" in list_models()
    assert describe_model("own") == "A network for tests"
    assert list_options("own")[:3] == ["width", "maps", "pretrained"]
    net = create_model("own", num_classes=7, width=6)
    assert type(net) is Own
    assert count_parameters(net) == sum(p.numel() for p in Own(3, 7, 6, False).parameters())
    assert net.task[:3] == (3, 7, None)
    assert net.arguments == {
        "name": "own", "in_chans": 3, "num_classes": 7, "width": 6, "maps": False, "pretrained": False,
    }  # fmt: skip
    assert create_model("Own").task.num_classes == 5  # the builder's own default


def test_in_channels_it_is_asked_for_the_part_that_holds_the_logits(own):
    model = create_model("own", **IN_CHANNELS, maps=True, grid=(2, 0))
    assert isinstance(model, ScaleChannels)
    assert model.task.num_classes == 5
    assert model.train()(torch.rand(2, 3, 16, 16)).shape == (2, 5, 8, 8)
    again = create_model(**json.loads(json.dumps(model.arguments)))
    assert again.arguments == model.arguments
    assert (again.output, again.grid, again.drop, again.multiple) == ("out", (2.0, 0.0), 0.25, 2)


@pytest.mark.parametrize("wrap", ["create_model", "ScaleChannels", "none"])
def test_weights_come_back_into_a_network_of_the_same_builder(own, wrap, tmp_path):
    model = create_model("own", pretrained=True, **(IN_CHANNELS if wrap == "create_model" else {}))
    if wrap == "ScaleChannels":
        model = ScaleChannels(model, (0.5, 1.0), output="out")
    model.task = network_of(model).task._replace(classes=tuple("abcde"))
    network_of(model).task = model.task
    model.train()(torch.rand(4, 3, 16, 16))  # statistics
    other = from_pretrained(save_pretrained(model, tmp_path / "net"))
    assert network_of(other).task.classes == tuple("abcde")
    assert arguments_of(other)["pretrained"] is False  # the weights are in the file
    x, answers = torch.rand(2, 3, 16, 16), []
    for net in (model.eval(), other):
        answers.append(net(x)["out"] if wrap == "none" else net(x))
    assert torch.equal(*answers)
    assert list(other.state_dict()) == list(model.state_dict())


def test_a_file_names_no_code(own, tmp_path, monkeypatch):
    """A name is found among the builders that were registered, and nowhere else."""
    folder = save_pretrained(create_model("own"), tmp_path / "net")
    registered.BUILDERS.pop("own")
    with pytest.raises(PretrainedError, match=r"names a network 'own' that is not known here: call register_model"):
        from_pretrained(folder)
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    monkeypatch.syspath_prepend(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name in ("evil", "evil:build", "evil.build", "os.system", "../evil.py"):
        config["arguments"]["name"] = name
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(PretrainedError, match="is not known here"):
            from_pretrained(folder)
    assert "evil" not in sys.modules


def test_a_builder_that_computes_with_its_weights_is_built_for_real(own, tmp_path):
    @register_model("computes")
    def computes(num_classes):
        rates = [float(rate) for rate in torch.linspace(0, 0.5, 3)]
        return nn.Sequential(nn.Dropout(rates[-1]), nn.Conv2d(3, num_classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    torch.manual_seed(0)
    model, state = create_model("computes", num_classes=2), torch.get_rng_state()
    folder = save_pretrained(model, tmp_path / "net")
    assert torch.equal(torch.get_rng_state(), state)  # as training would find it
    assert torch.equal(from_pretrained(folder)[1].weight, model[1].weight)


@pytest.mark.parametrize(
    ("register", "error", "message"),
    [
        (lambda: register_model("ss-cnn", nn.Flatten), ValueError, "a model named 'ss-cnn' is registered already"),
        (lambda: register_model("own", nn.Flatten), ValueError, "a model named 'own' is registered already"),
        (
            lambda: register_model("x", 5),
            TypeError,
            r"`builder` must be a function that makes an nn.Module \(got int\)",
        ),
        (lambda: register_model(5), TypeError, r"`name` must be a word \(got 5\)"),
        (lambda: create_model("own", depth=3), TypeError, "own has no option 'depth': it has width, maps"),
        (lambda: create_model("own", maps=len), TypeError, "options of own must be words, numbers or lists"),
        (lambda: create_model("own", num_classes=0), ValueError, "`num_classes` must be at least 1"),
        (lambda: create_model("own", join="max"), ValueError, "`join` needs `channels`"),
        (lambda: save_pretrained(Own(3, 5, 4, False), "x"), TypeError, r"got Own\): make your own known"),
        (lambda: create_model("number"), TypeError, r"builder of number must return a plain nn.Module \(got int\)"),
        (lambda: create_model("asks"), TypeError, "asks needs `num_classes`"),
        (lambda: create_model("taken"), TypeError, "the network taken has an attribute `task`"),
        (
            lambda: arguments_of(ScaleChannels(create_model("own"), (1.0,), output=len)),
            TypeError,
            "`output` is a function, which no file can name",
        ),
    ],
)
def test_what_cannot_be_is_named(own, register, error, message):
    def taken(num_classes=2):
        net = nn.Flatten()
        net.task = "mine"
        return net

    register_model("number", lambda num_classes=2: 5)
    register_model("asks", lambda num_classes: nn.Flatten())
    register_model("taken", taken)
    with pytest.raises(error, match=message):
        register()


def test_the_same_function_may_be_registered_again(own):
    for width in (3, 9):

        def build(num_classes=2, width=width):
            return Own(3, num_classes, width, False)

        register_model("notebook", build)
    assert create_model("notebook").first.out_channels == 9


def test_export_of_a_network_of_ones_own(own, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
    from scalesteer.export import export

    @register_model("exported")
    def build(num_classes=3, width=4):
        net = Own(3, num_classes, width, False)
        return nn.Sequential(
            net.first, net.norm, nn.ReLU(inplace=True), net.second, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(width, num_classes),
        )  # fmt: skip

    done = export(create_model("exported", channels=(0.5, 1.0)).eval(), tmp_path / "net.onnx")
    assert done.any_size
    assert len({shape[2:] for shape in done.shapes}) == 3
    assert done.difference < 1e-4


def test_the_library_alone_registers_networks():
    code = (
        "import sys, scalesteer; from torch import nn\n"
        "scalesteer.register_model('x', lambda num_classes=2: nn.Flatten())\n"
        "print(scalesteer.create_model('x').task.num_classes, 'scalesteer.app' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "2 False\n"
