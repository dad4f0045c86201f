import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from PIL import Image

from paper import __main__ as paper
from scalesteer import PAPER_SCALES, __version__, create_model, list_models, models
from scalesteer.app import cli
from scalesteer.app.commands import Commands
from scalesteer.app.config import make_run
from scalesteer.datasets import sheets
from scalesteer.models import DATASETS, count_parameters, describe_model, flat, pooled

SMALL = ["--sizes", "60", "10", "10"]


def scalesteer(capsys, *argv):
    code = cli.main([str(word) for word in argv])
    return code, *capsys.readouterr()


def process(*argv, code=None, **options):
    environment = {**os.environ, **options.pop("env", {})}
    command = [sys.executable, *(["-c", code] if code else ["-m", "scalesteer"]), *map(str, argv)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **options)


def test_fetch_build_list_verify_and_show(originals, capsys, own_cache, tmp_path):
    code, out, _ = scalesteer(capsys, "data", "fetch", "MNIST", "--data-dir", originals)
    assert code == 0
    assert out.startswith("mnist: verified, release invented, 70,000 images, SHA-256 ")
    code, built, _ = scalesteer(capsys, "data", "build", "MNIST_Scale", "--splits", "1,4", *SMALL)
    assert code == 0
    assert [line.split(": SHA-256 ")[0] for line in built.splitlines()] == [
        "mnist-scale split 1",
        "mnist-scale split 4",
    ]
    for command in ("list", "verify"):
        code, out, _ = scalesteer(capsys, "data", command)
        folder, *files = out.splitlines()
        assert (code, folder) == (0, str(own_cache))
        names = [line.split()[3].rpartition("-")[0] for line in files]
        assert names == ["pools/mnist-invented", "pools/mnist", "splits/mnist-scale-1", "splits/mnist-scale-4"]
        assert files[1].split()[:2] == ["55.0", "MB"]
        assert {line.split()[2] for line in files[2:]} == {line.split()[-1] for line in built.splitlines()}
    code, out, _ = scalesteer(capsys, "data", "show", "mnist-scale", "--output", tmp_path / "a" / "x.png", *SMALL)
    assert (code, out) == (0, f"{tmp_path}/a/x.png\n")
    with Image.open(tmp_path / "a" / "x.png") as sheet:
        assert sheet.size[0] == 8 * 90 + 6


def test_verify_names_damaged_files(filled_cache, capsys):
    path = next(filled_cache.glob("pools/mnist-invented.safetensors"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    code, out, err = scalesteer(capsys, "data", "verify")
    assert (code, out.count("  damaged  ")) == (2, 1)
    assert err == "scalesteer: damaged, to be made again when next used: mnist-invented.safetensors.\n"


def test_list_of_an_empty_cache_is_its_place(capsys, own_cache):
    assert scalesteer(capsys, "data", "list") == (0, f"{own_cache}\n", "")


@pytest.mark.parametrize("dataset", ["mnist-scale", "fmnist-scale", "mnist-scale-local-2"])
def test_every_sheet_is_drawn_small(filled_cache, capsys, tmp_path, dataset):
    arguments = ["--part", "val", "--output", tmp_path / "x.png", *SMALL]
    assert scalesteer(capsys, "data", "show", dataset, *arguments)[0] == 0
    assert 2_000 < (tmp_path / "x.png").stat().st_size < 150_000


def test_sheet_holds_the_images_three_times_enlarged():
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28), np.uint8)
    sheet = np.asarray(sheets.contact_sheet(images, ["a", "b", "c"], columns=2))
    np.testing.assert_array_equal(sheet[6:90:3, 96:180:3], images[1])
    np.testing.assert_array_equal(sheet[111:194:3, 7:90:3], images[2])
    assert (sheet[91:104, 6:90] < 128).any()  # its caption


@pytest.mark.parametrize(
    "words", ["predict digits {0} --save-maps /proc/maps-of-mine", "suggest {0} --plot /proc/plot.png"]
)
def test_maps_and_plots_that_cannot_be_written_are_told_before_the_work(capsys, tmp_path, monkeypatch, words):
    monkeypatch.setattr("scalesteer.app.suggest.suggest", None)  # nothing is looked at
    monkeypatch.setattr("scalesteer.app.load_model", None)
    code, out, err = scalesteer(capsys, *words.format(tmp_path).split())
    assert (code, out) == (2, "")
    assert re.fullmatch(r"scalesteer: /proc\S* cannot be written to \(No such file or directory\)\.\n", err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("data show mnist-scal", "Did you mean 'mnist-scale'?"),
        ("data fetch mnits", "Did you mean 'mnist'?"),
        ("data build mnist-scale --splits -1", "`split` must be at least 0 (got -1)"),
        ("data build mnist-scale --scale-range nan 1", "`scale_range[0]` must be finite (got nan)"),
        ("data show --count 0", "`count` must be 1 to 1000"),
        ("data fetch mnist --data-dir none", "train-images-idx3-ubyte.gz is missing in none"),
        ("train --model ss-cn", "Did you mean 'ss-cnn'?"),
        ("train --model SS-CN", "Did you mean 'ss-cnn'?"),
        ("train photos", "`images` must be a folder of pictures or a CSV file (got photos, which is not there)"),
        ("train MNIST-Scale", "type --dataset mnist-scale"),
        ("suggest photos", "`images` must be a folder with pictures (got 'photos')"),
        ("train --lr nan", "`lr` must be finite (got nan)"),
        ("train --lr 1e308", "`lr` must be positive and at most 1e30 (got 1e+308)"),
        ("train --seed 18446744073709551616", "`seed` must be below 2**63 (got 18446744073709551616)"),
        ("train --scales 1 1e4", "`scales` must be at most 32 numbers up to 16 (got 2, the largest 10000)"),
        ("train --batch-size 10001", "`batch_size` must be at most 10000"),
        ("train --device cuda:99", "`device` 'cuda:99' is not available here; available: cpu"),
        ("train --device meta", "`device` 'meta' cannot compute; choose cpu or cuda"),
        ("train --data-dir none --device cpu", "train-images-idx3-ubyte.gz is missing in none"),
        ("evaluate none", "no checkpoint can be read at none: No such file or directory"),
        ("evaluate .", ". holds no model"),
        ("predict none x.png", "no checkpoint can be read at none"),
        ("predict none", "give at least one image"),
    ],
)
def test_mistake_gives_one_line_and_exit_code_2(capsys, own_cache, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = scalesteer(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith("scalesteer: ")
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []  # before any file is touched


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing subcommand"),
        ("dta list", "scalesteer: there is no command 'dta'. Did you mean 'data'? The commands are data, train, "),
        ("trian photos --flip", "Did you mean 'train'?"),
        ("data shwo", "scalesteer data: there is no command 'shwo'. Did you mean 'show'?"),
        ("--hlep", "--help"),
        ("suggest", "FOLDER"),
        ("data show --spilt 3", "--split"),
        ("data show --part tran", "train"),
        ("data build mnist-scale --splits x", "--splits"),
        ("data build --sizes 1 2", "--sizes"),
        ("train --modle ss-cnn", "--model"),
        ("train --schedule cosin", "cosine"),
        ("train --seed ten", "--seed: it must be an integer, as 20 (got 'ten')"),
        ("train --lr fast", "--lr: it must be a number, as 0.5 (got 'fast')"),
        ("train --channels 0.5;1", "--channels: it must be numbers, as 0.5 1 2 (spaces or commas"),
        ("evaluate none --part tset", "test"),
        ("evaluate", "MODEL"),
    ],
)
def test_flag_that_cannot_be_understood_is_told_by_the_parser(capsys, own_cache, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments.split())
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert message in err
    assert "tyro" not in err
    assert not own_cache.exists()


def test_version(capsys):
    assert scalesteer(capsys, "--version") == (0, f"scalesteer {__version__}\n", "")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("scalesteer", ["--version"]),
        ("scalesteer", ["--help"]),
        *(("scalesteer", [name, "--help"]) for name in cli.app.known),
        ("paper", ["--help"]),
        ("paper", ["table", "--help"]),
    ],
)
def test_help_and_version_do_not_wait_for_torch(module, arguments):
    code = f"""
import runpy, sys
sys.argv = [{module!r}, *{arguments!r}]
try:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
except SystemExit as stop:
    assert not stop.code
print("\\nloaded", *({{"torch", "numpy"}} & set(sys.modules)))
"""
    running = process(code=code, stdout=subprocess.PIPE)
    out, err = running.communicate(timeout=300)
    assert (running.returncode, err) == (0, "")
    assert out.endswith("\nloaded\n")


def test_unwritable_output_is_one_line(filled_cache, capsys, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = scalesteer(capsys, "data", "show", *SMALL, "--output", tmp_path / "file" / "x.png")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot write" in err


COMMANDS = ["train", "runs", "evaluate", "models", "predict"]


@pytest.mark.parametrize(
    "group", [[], ["data"], *(["data", name] for name in ("fetch", "build", "show", "list")), *([c] for c in COMMANDS)]
)
def test_help_goes_to_stdout(capsys, group):
    with pytest.raises(SystemExit) as stop:
        cli.main([*group, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "usage: scalesteer" in out
    if group and group not in (["data"], ["data", "list"]):  # teaches by an example, which parses
        example = re.search(r"Example: scalesteer (.*)", out)[1]
        assert cli.app.parse(shlex.split(example))


def test_help_of_train_begins_with_what_is_set_most(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = capsys.readouterr().out
    flags = ("images", "image-size", "model", "channels", "basis", "epochs", "batch-size", "lr", "dataset", "split")
    places = [re.search(rf"^\W*--{flag} ", shown, flags=re.MULTILINE).start() for flag in flags]
    assert places == sorted(places)


def every_command(commands):
    for kind in commands.known.values():
        yield from every_command(kind) if isinstance(kind, Commands) else [kind]


def test_what_has_a_default_stands_in_brackets_in_help():
    shown = {}
    for kind in [*every_command(cli.app), *every_command(paper.app)]:
        hints = get_type_hints(kind, include_extras=True)
        for part in fields(kind):
            marks = getattr(hints[part.name], "__metadata__", ())
            if any("Positional" in str(mark) for mark in marks):
                metavar = next(mark.metavar for mark in marks if getattr(mark, "metavar", None))
                shown[kind.__name__, part.name] = metavar
                assert metavar.startswith("[") == (part.default is not MISSING), (kind, part.name)
    assert shown["Demo", "checkpoint"] == "[MODEL]"
    assert shown["Evaluate", "checkpoint"] == "MODEL"
    assert shown["DrawFigure", "name"] == "[NAME]"


@pytest.mark.parametrize("width", [60, 100])
def test_paragraphs_of_help_are_wrapped_to_the_terminal(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    about, _, flags = capsys.readouterr().out.partition("usage: ")
    lines = [line for line in about.splitlines() if not line.startswith("Example:")]
    assert width - 20 < max(map(len, lines)) <= width
    assert "Your own pictures are those of a folder" in about
    assert max(map(len, flags.splitlines()[1:])) <= width


FLAGS = {"model": "ss-cnn", "basis": "area", "upsample": 1, "batch-size": 20, "epochs": 1, "device": "cpu"}
TRAIN = ["train", "--sizes", "40", "20", "20", *(str(word) for k, v in FLAGS.items() for word in (f"--{k}", v))]


def test_train_evaluate_and_predict(originals, capsys, caplog, tmp_path):
    runs = ["--runs", tmp_path / "my runs", "--data-dir", originals]
    code, out, err = scalesteer(capsys, *TRAIN, *runs)
    assert (code, err) == (0, "")  # no progress bar without a terminal
    found = re.fullmatch(r"test error (.*) %(?:.*) %(?:.*) at epoch 1\), 443,078 parameters: (.*)\n", out)
    directory = Path(found[2])
    assert directory.parent == tmp_path / "my runs"
    assert scalesteer(capsys, *TRAIN, *runs) == (0, out, "")
    result = json.loads((directory / "result.json").read_text())
    assert f"{100 * result['test_error']:.2f}" == found[1]
    for place in (directory, directory / "model", directory / "model" / "model.safetensors"):
        code, out, _ = scalesteer(capsys, "evaluate", place, "--device", "cpu")
        assert (code, out.splitlines()[0]) == (0, f"test error {found[1]} % (20 images)")
    rows = [
        re.fullmatch(r"  scale 0\.\d to [01]\.\d +([\d.]+) %  \((\d+)\)", line).groups()
        for line in out.splitlines()[1:-1]
    ]
    total = sum(float(error) * int(count) for error, count in rows) / 20
    assert total == pytest.approx(float(found[1]), abs=0.01)
    code, out, _ = scalesteer(capsys, "evaluate", directory, "--part", "val", "--elastic", "20", "--device", "cpu")
    assert re.match(r"val error [\d.]+ % \(20 images\)\n", out)
    image = np.full((90, 70), 250, np.uint8)
    image[20:70, 30:40] = 10
    Image.fromarray(image).save(tmp_path / "one.png")
    (tmp_path / "text.png").write_text("text")
    code, out, _ = scalesteer(capsys, "predict", directory, tmp_path / "text.png", tmp_path / "one.png")
    said = re.search(r"one\.png: class \d, confidence [\d.]+ %, scale (.*) \(dark on light: inverted\)\n", out)
    assert said[1] in [f"{scale:.2f}" for scale in PAPER_SCALES]
    assert code == 2  # the broken file is named, and the others are classified
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        f"{tmp_path}/text.png cannot be read: it is not a PNG, JPEG, TIFF, WebP, GIF, BMP or PPM file, "
        "or one of a kind that is not read."
    ]


def test_failed_run_is_an_error(originals, capsys, tmp_path):
    places = ["--runs", tmp_path, "--data-dir", originals]
    code, out, err = scalesteer(capsys, *TRAIN, *places, "--lr", "1e30", "--schedule", "constant")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "failed: the loss" in err
    (result,) = tmp_path.glob("*/result.json")
    assert json.loads(result.read_text())["status"] == "failed"


@pytest.mark.parametrize(("width", "tables"), [(80, 3), (200, 1), (10, len(DATASETS))])
def test_models_lists_parameters_in_as_many_tables_as_the_terminal_needs(capsys, monkeypatch, width, tables):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = scalesteer(capsys, "models")
    assert code == 0
    assert width < 80 or max(map(len, out.splitlines())) <= width
    shown = out.partition("Parameters that are trained:\n\n")[2]
    blocks = [[line.split() for line in block.splitlines()] for block in shown.split("\n\n")]
    assert len(blocks) == tables
    assert [dataset for header, *_ in blocks for dataset in header] == list(DATASETS)
    for header, *rows in blocks:
        assert [row[0] for row in rows] == list_models()
        for column, dataset in enumerate(header, start=1):
            shown = {row[0]: int(row[column].replace(",", "")) for row in rows}
            assert shown["ss-cnn"] == count_parameters(create_model("ss-cnn", dataset))
            for steered, plain in (("steered-cnn", "pooled-cnn"), ("steered-resnet", "pooled-resnet")):
                assert shown[plain] == pytest.approx(shown[steered], rel=0.05)


def test_models_says_what_each_is_and_which_to_take(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(models, "_MODELS", {**flat.MODELS, **pooled.MODELS})  # without what other tests register
    _, out, _ = scalesteer(capsys, "models")
    fixed, free, _ = out.split("\n\n", 2)
    assert "take ss-cnn" in fixed
    assert f"take {make_run(images='photos').network.model}, the default" in " ".join(free.split())
    for block, names in ((fixed, flat.MODELS), (free, pooled.MODELS)):
        rows = dict(line.split(maxsplit=1) for line in block.splitlines() if line.startswith("  "))
        assert rows == {name: describe_model(name) for name in names}


def test_python_m_works_and_closed_stdout_is_clean(own_cache):
    reader, writer = os.pipe()
    os.close(reader)
    broken = process("data", "list", stdout=writer)
    os.close(writer)
    assert broken.communicate(timeout=300)[1] == ""
    assert broken.returncode == 141
    closed = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -m scalesteer data list >&-"],
        capture_output=True,
        timeout=300,
    )
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_closed_stderr_and_an_ascii_terminal_are_no_trouble(cache, tiny, tmp_path):
    words = [*tiny.command.split()[1:], "--device", "cpu", "--runs", tmp_path / "é"]
    command = shlex.join([sys.executable, "-m", "scalesteer", *map(str, words)])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["sh", "-c", f"{command} 2>&-"], env=environment, capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"test error ")
    assert done.stdout.isascii()


def test_sheet_on_a_full_disk_leaves_the_old_picture(filled_cache, capsys, tmp_path, monkeypatch):
    arguments = ["data", "show", *SMALL, "--output", tmp_path / "x.png"]
    assert scalesteer(capsys, *arguments)[0] == 0
    before = (tmp_path / "x.png").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = scalesteer(capsys, *arguments, "--count", "3")
    assert (code, err) == (2, f"scalesteer: cannot write {tmp_path}/x.png (No space left on device).\n")
    assert [path.name for path in tmp_path.glob("*.png")] == ["x.png"]
    assert (tmp_path / "x.png").read_bytes() == before


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_stopped_build_ends_at_once_and_leaves_nothing_half_done(filled_cache, number, expected):
    # A shell's background jobs, pytest among them, may ignore SIGINT: undo that.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{start}; from scalesteer.app.cli import main; sys.exit(main())"
    running = process("data", "build", "mnist-scale-local-2", code=code, stdout=subprocess.DEVNULL)
    while running.poll() is None and not list(filled_cache.glob("splits/.*.lock")):
        time.sleep(0.005)
    running.send_signal(number)
    err = running.communicate(timeout=300)[1]
    told = "scalesteer: interrupted; repeat the command to go on.\n" if number == signal.SIGINT else ""
    assert (running.returncode, err) == (expected, told)
    assert not list(filled_cache.glob("splits/*.safetensors"))  # it did not go on to the end
    assert not list(filled_cache.glob("splits/.*.tmp"))


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("tyro", ["data", "list"]),
        ("filelock", ["data", "build", *SMALL]),
        ("safetensors", ["train"]),
    ],
)
def test_missing_package_names_the_extra(originals, tmp_path, module, arguments):
    code = f"import sys; sys.modules['{module}'] = None; from scalesteer.app.cli import main; sys.exit(main())"
    running = process(*arguments, code=code, env={"SCALESTEER_DATA": str(originals)}, cwd=tmp_path)
    err = running.communicate(timeout=300)[1]
    assert running.returncode == 2
    assert (module in err, err.count("\n")) == (True, 1)
    assert "pip install 'scalesteer[cli]'" in err


def test_importing_scalesteer_loads_no_data_code():
    unwanted = {"scalesteer.datasets", "scalesteer.app.cli", "pooch", "tyro"}
    code = f"import sys, scalesteer; print({unwanted} & set(sys.modules))"
    running = process(code=code, stdout=subprocess.PIPE)
    assert running.communicate(timeout=300)[0] == "set()\n"
