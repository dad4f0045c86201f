"""Exported networks: the same logits in ONNX Runtime and torch's programs at any batch and size; none bad is kept."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from scalesteer import (
    ScaleSteerableConv2d,
    convert,
    create_model,
    files,
    fold,
    from_pretrained,
    list_models,
    save_pretrained,
)
from scalesteer import export as exports
from scalesteer.app import cli, load_model
from scalesteer.app.maps import without_readout
from scalesteer.app.tiles import find_reach
from scalesteer.datasets import load_split
from scalesteer.export import ExportError, export
from scalesteer.models import set_input_statistics
from scalesteer.resize import resize
from tests.app import jobs

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")

SHAPES = [(1, 28, 28), (7, 45, 33), (64, 31, 70)]  # 45 * 0.7 and 31 * 0.5 lie amid two whole numbers
TINY = {"widths": (4,), "kernel_size": 5, "subsample": (), "channels": (0.7, 1.0)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(exports, "TIME_S", 0.01)


def network(name="pooled-cnn", **options):
    """A network with statistics that are not those of a new one."""
    torch.manual_seed(0)
    model = create_model(name, **options)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "running" in key:
                tensor.add_(torch.rand_like(tensor))
    set_input_statistics(model, 0.3)
    return model.eval()


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@torch.no_grad()
def assert_same(model, run, shapes=SHAPES, in_chans=1):
    for batch, *size in shapes:
        x = torch.rand(batch, in_chans, *size)
        expected = model(x)
        assert expected.abs().max() > 0.02  # far above the tolerance
        torch.testing.assert_close(run(x), expected, rtol=0, atol=1e-4)


def onnx_run(path):
    own = session(path)
    return lambda x: torch.from_numpy(own.run(None, {"images": x.numpy()})[0])


def test_onnx_runtime_equals_eager_at_any_batch_and_size(tmp_path):
    model = network(**TINY)
    model.task = model.task._replace(classes=tuple("abcdefghij"))
    path = tmp_path / "net.onnx"
    done = export(model, path, examples=torch.rand(3, 1, 40, 44))
    assert_same(model, onnx_run(path))
    own = session(path)
    assert own.get_inputs()[0].shape == ["batch", 1, "height", "width"]
    told = json.loads(own.get_modelmeta().custom_metadata_map["scalesteer"])
    assert told["arguments"] == model.arguments
    assert told["task"]["classes"] == list("abcdefghij")
    assert done.any_size
    assert done.bytes == path.stat().st_size
    assert {shape[0] for shape in done.shapes} == {1, 7}
    assert {shape[2:] for shape in done.shapes} == {(40, 44), (49, 48), (30, 32)}
    assert done.milliseconds.keys() == done.eager_milliseconds.keys() == {1, 32}
    assert b".py" not in path.read_bytes()  # no paths of this machine
    assert list(tmp_path.iterdir()) == [path]


def test_the_papers_networks_have_a_free_batch_alone(tmp_path):
    model = network("plain-cnn", widths=(2, 3, 4), hidden=8)
    done = export(model, tmp_path / "net.onnx")
    assert not done.any_size
    assert {shape[2:] for shape in done.shapes} == {(28, 28)}
    assert_same(model, onnx_run(tmp_path / "net.onnx"), [(1, 28, 28), (7, 28, 28), (64, 28, 28)])
    assert session(tmp_path / "net.onnx").get_inputs()[0].shape == ["batch", 1, 28, 28]


def test_a_program_of_torch_equals_eager_at_any_batch_and_size(tmp_path):
    model = network("steered-cnn", **{**TINY, "channels": None})
    done = export(model, tmp_path / "net.pt2", to="pt2")
    extra = {"scalesteer.json": ""}
    program = torch.export.load(tmp_path / "net.pt2", extra_files=extra)
    assert_same(model, program.module())
    assert json.loads(extra["scalesteer.json"])["arguments"] == model.arguments
    assert done.any_size
    assert b"scalesteer/channels.py" not in (tmp_path / "net.pt2").read_bytes()


def test_no_file_needs_our_operator(tmp_path):
    model = network("ss-cnn", upsample=1, widths=(2, 3, 4), hidden=8, backend="fast", scales=(1.0, 1.3))
    assert "scalesteer" in str(torch.export.export(model, (torch.rand(2, 1, 28, 28),)).graph)
    export(model, tmp_path / "net.pt2", to="pt2")
    program = torch.export.load(tmp_path / "net.pt2")
    assert "scalesteer" not in str(program.graph)
    assert_same(model, program.module(), [(3, 28, 28)])


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda layer, x, y: y + torch.rand_like(y), "gives other logits than the network"),
        (lambda layer, x, y: y * float(y.abs().max() > 1), "cannot be exported to pt2"),  # asks for a number
    ],
)
def test_what_is_not_the_same_is_not_kept(hook, message, tmp_path):
    model = network("plain-cnn", widths=(2, 2, 2), hidden=4)
    model.classifier.register_forward_hook(hook)
    path = tmp_path / "net.pt2"
    path.write_text("an older file")
    with pytest.raises(ExportError, match=message):
        export(model, path, to="pt2")
    assert path.read_text() == "an older file"
    assert list(tmp_path.iterdir()) == [path]


def test_a_network_in_training_is_exported_as_it_answers_and_stays_as_it_is(tmp_path):
    model = network("plain-cnn", widths=(2, 2, 2), hidden=4).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export(model, tmp_path / "net.pt2", to="pt2")
    assert model.training
    assert model.classifier.dropout.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert_same(model.eval(), torch.export.load(tmp_path / "net.pt2").module(), [(3, 28, 28)])


@pytest.mark.parametrize(("border", "mode", "least"), [(8, "reflect", 18), (8, "zeros", 10), (1, "reflect", 10)])
def test_least_size_has_room_for_a_mirrored_border(border, mode, least):
    model = network(**{**TINY, "channels": (0.5, 1.0)}, border=border, border_mode=mode).eval()
    assert exports._least_size(model) == least
    assert model(torch.rand(2, 1, least, least)).shape == (2, 10)


def test_wrong_arguments_are_told(tmp_path):
    with pytest.raises(TypeError, match="must be a network of create_model"):
        export(nn.Flatten(), tmp_path / "net.onnx")
    with pytest.raises(ValueError, match="`to` must be one of 'onnx', 'pt2', 'aoti'"):
        export(network(**TINY), tmp_path / "net.onnx", to="onxx")
    with pytest.raises(ValueError, match=r"`examples` must be images .* \(got shape \(0, 1, 28, 28\)\)"):
        export(network(**TINY), tmp_path / "net.onnx", examples=torch.zeros(0, 1, 28, 28))
    for path in (tmp_path / "nowhere" / "net.onnx", tmp_path):
        with pytest.raises(ValueError, match="`path` must be a file in a folder that exists"):
            export(network(**TINY), path)


def test_a_full_disk_is_told_and_the_old_file_stays(forks, tmp_path):
    path, told = tmp_path / "net.pt2", tmp_path / "told"
    save_pretrained(network("plain-cnn", widths=(2, 2, 2), hidden=4), tmp_path / "net")
    path.write_text("an older file")
    process = forks.Process(target=jobs.with_little_disk, args=(
        str(tmp_path), str(told), ["export", str(tmp_path / "net"), "--to", "pt2", "--output", str(path)], 1000
    ))  # fmt: skip
    process.start()
    process.join(300)
    assert process.exitcode == 2  # torch's own writer would abort
    assert told.read_text() == f"scalesteer: {path} cannot be written (File too large).\n"
    assert path.read_text() == "an older file"


def test_logits_that_are_no_numbers_are_not_the_same():
    model = network("plain-cnn", widths=(2, 2, 2), hidden=4)
    with torch.no_grad():
        assert exports._check(model, model, torch.rand(2, 1, 28, 28)) == 0
        for spoil in (math.nan, math.inf):
            with pytest.raises(ExportError, match="gives other logits than the network"):
                exports._check(lambda x, spoil=spoil: model(x) * spoil, model, torch.rand(2, 1, 28, 28))


def test_the_file_is_safe_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path, synced, fsync = tmp_path / "net.pt2", dict[int, int](), os.fsync

    def sync(number):
        assert not path.exists()
        synced[os.fstat(number).st_ino] = os.fstat(number).st_size
        fsync(number)

    monkeypatch.setattr(os, "fsync", sync)
    export(network("plain-cnn", widths=(2, 2, 2), hidden=4), path, to="pt2")
    assert synced.get(path.stat().st_ino) == path.stat().st_size


# The command


def test_folder_that_is_a_file_is_named(undisturbed, tmp_path, capsys):
    (tmp_path / "net").write_text("mine")
    for name, message in (("net", "is a file: choose another name."), ("net/inside", "net/inside: Not a directory")):
        assert cli.main(["export", str(undisturbed), "--to", "folder", "--output", str(tmp_path / name)]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert "Errno" not in err
    assert (tmp_path / "net").read_text() == "mine"


def test_command_makes_a_folder_with_a_card_of_a_run(undisturbed, cache, tmp_path, capsys):
    folder = tmp_path / "digits"
    assert cli.main(["export", str(undisturbed), "--to", "folder", "--output", str(folder)]) == 0
    assert "parameters" in capsys.readouterr().out
    result = json.loads((undisturbed / "result.json").read_text())
    card = (folder / "README.md").read_text()
    assert result["environment"]["command"] in card
    assert result["environment"]["data"]["digest"] in card
    assert f"Test error: {100 * result['test_error']:.2f} %" in card
    assert len([line for line in card.splitlines() if line.startswith("| 0.")]) == len(result["test_error_by_scale"])
    assert from_pretrained(folder).arguments["name"] == "plain-cnn"
    assert cli.main(["evaluate", str(folder), "--device", "cpu"]) == 0
    assert f"test error {100 * result['test_error']:.2f} %" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{}", "[]", "3", '{"status": "finished"}', "[" * 100_000, "{", '{"config": {}}'])
def test_result_of_a_run_that_is_malformed_is_one_line(tmp_path, capsys, content):
    model, run = network("plain-cnn", upsample=1), {"model": "plain-cnn", "upsample": 1}
    (tmp_path / "model.safetensors").write_bytes(files.encode(model.state_dict(), {"config": run}))
    (tmp_path / "result.json").write_text(content)
    words = ["export", str(tmp_path), "--to", "folder", "--output", str(tmp_path / "net")]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert "result.json cannot be read as the result of a run: " in err
    assert err.count("\n") == 1
    assert not (tmp_path / "net").exists()
    (tmp_path / "result.json").unlink()
    assert cli.main(words) == 0


def test_command_exports_a_run_and_checks_with_its_images(undisturbed, cache, tmp_path, capsys, caplog):
    path = tmp_path / "net.pt2"
    assert cli.main(["export", str(undisturbed), "--to", "pt2", "--output", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "any batch, images of 28 x 28" in shown
    assert "batch 32:" in shown
    assert not [record for record in caplog.records if record.name.startswith("scalesteer")]
    model = load_model(undisturbed)
    assert_same(model, torch.export.load(path).module(), [(5, 28, 28)])


def test_command_tells_what_is_wrong(tmp_path, capsys):
    assert cli.main(["export", str(tmp_path), "--to", "onnx"]) == 2
    assert "holds no model" in capsys.readouterr().err


@pytest.mark.slow
def test_the_examples_of_the_guide_run(tmp_path, monkeypatch):
    page = Path(__file__).parents[1] / "docs" / "guide" / "deploy.md"
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (13, 17, 3), np.uint8)
    Image.fromarray(pixels).resize((843, 655), Image.Resampling.BICUBIC).save("tree.jpg")
    scope = {}
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S):
        exec(example, scope)
    model, x = scope["model"].eval(), torch.from_numpy(scope["x"])
    assert len(scope["names"]) == 2
    assert set(scope["names"]) <= set(model.task.classes)
    assert scope["done"].any_size
    with torch.no_grad():
        expected = model(x)
        assert abs(scope["scores"] - expected.numpy()).max() < 1e-4
        assert (scope["program"](x[..., :90, :70]) - model(x[..., :90, :70])).abs().max() < 1e-4
        whole = without_readout(model)(x[..., :648, :840]).numpy()
    assert scope["maps"].shape == whole.shape == (1, 5, 162, 210)
    assert abs(scope["maps"] - whole).max() < 1e-4
    session = scope["onnxruntime"].InferenceSession("tree-maps.onnx")
    found = {
        margin: abs(scope["look_in_tiles"](session, scope["x"][..., :648, :840], 200, margin) - whole).max()
        for margin in (64, 0)
    }
    assert found[64] < 1e-4
    assert found[0] > 1e-3 * np.ptp(whole)  # tiles that do not overlap show other numbers at their borders
    assert find_reach(model.net) / model.scales[0] < 64


# Slow: all networks, and the compiler


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_every_network_runs_in_onnx_runtime(name, tmp_path):
    count = 5 if "deep" in name else 4 if "large" in name else 3
    model = network(name, in_chans=3, widths=(2, 3, 4, 5, 6)[:count])
    export(model, tmp_path / "net.onnx")
    assert_same(model, onnx_run(tmp_path / "net.onnx"), SHAPES if model.task.image_size is None else SHAPES[:1], 3)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "pt2"])
@pytest.mark.parametrize("name", ["pooled-cnn", "steered-cnn"])
def test_networks_with_channels_are_exported_as_they_are(name, to, tmp_path):
    model = network(name, channels=(0.5, 0.7, 1.0, 1.4))
    assert export(model, tmp_path / "net", to=to).any_size
    assert_same(model, onnx_run(tmp_path / "net") if to == "onnx" else torch.export.load(tmp_path / "net").module())


@pytest.mark.slow
def test_drawn_digits_are_read_by_onnx_runtime_as_by_torch(filled_cache, tmp_path):
    model = from_pretrained("digits")
    images, _ = load_split(part="val", sizes=(1, 64, 1)).take(slice(None))
    export(model, tmp_path / "net.onnx", examples=images)
    run = onnx_run(tmp_path / "net.onnx")
    for batch, *size in SHAPES:
        x = resize(images[:batch], tuple(size))
        torch.testing.assert_close(run(x), model(x), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [None, (0.5, 1.0, 1.4)])
def test_maps_run_in_onnx_runtime_at_any_size(channels, tmp_path):
    model = network("steered-cnn", dense=True, channels=channels, widths=(2, 3, 4))
    assert export(model, tmp_path / "net.onnx").any_size
    assert_same(model, onnx_run(tmp_path / "net.onnx"))


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler here")
@pytest.mark.parametrize("channels", [None, (0.5, 1.0)])
def test_a_compiled_program_runs(channels, tmp_path):
    model = network("steered-cnn", widths=(2, 3), kernel_size=5, subsample=(1,), channels=channels)
    done = export(model, tmp_path / "net.pt2", to="aoti")
    assert done.any_size
    assert_same(model, torch._inductor.aoti_load_package(str(tmp_path / "net.pt2")))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # by torch itself
def test_steered_layers_export_to_onnx_as_they_come(tmp_path):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 4, 7, padding=3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    converted, _ = convert(plain)
    x = torch.rand(2, 2, 20, 20)
    for name, net in {"converted": converted, "folded": fold(converted), "direct": fold(converted, "direct")}.items():
        path = tmp_path / f"{name}.onnx"
        torch.onnx.export(net.eval(), (x,), path, dynamo=True, verbose=False, input_names=["images"])
        torch.testing.assert_close(onnx_run(path)(x), net(x), rtol=0, atol=1e-5)


def test_fold_chooses_a_backend():
    net = nn.Sequential(ScaleSteerableConv2d(1, 2, backend="fast"))
    assert [fold(net, backend)[0].backend for backend in (None, "direct", "auto")] == ["fast", "direct", "auto"]
    with pytest.raises(ValueError, match=r"`backend` must be one of .* \(got 'quick'\)"):
        fold(net, "quick")
