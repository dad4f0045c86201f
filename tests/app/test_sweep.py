"""A grid from a TOML file: which runs it has, what is refused, and the table of what came out."""

import json
import os
import re
from pathlib import Path

import pytest

from scalesteer.app import cli, make_run, sweep
from scalesteer.app.config import USUAL, Run
from scalesteer.app.sweep import SweepError, read_grid

BASE = '[base]\nmodel = "plain-cnn"\nupsample = 1\nsizes = [60, 20, 20]\nbatch_size = 20\nepochs = 2\n'


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "grid.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def command(capsys, *argv):
    code = cli.main([str(word) for word in argv])
    return code, *capsys.readouterr()


def test_grid_is_every_combination_for_every_seed(write):
    settings = read_grid(write(f"seeds = [3, 5]\n{BASE}[grid]\nlr = [0.1, 1]\nsplit = [0, 2, 1]\n"))
    assert [setting.values for setting in settings] == [
        {"lr": lr, "split": split} for lr in (0.1, 1) for split in (0, 2, 1)
    ]
    common = {"model": "plain-cnn", "upsample": 1, "sizes": (60, 20, 20), "batch_size": 20, "epochs": 2}
    assert settings[1].runs == tuple(make_run(**common, lr=0.1, split=2, seed=seed) for seed in (3, 5))


def test_lists_of_lists_are_values_too(write):
    text = '[base]\nmodel = "pooled-cnn"\n[grid]\nchannels = [[1.0], [0.7, 1.0, 1.4]]\n'
    assert [run.network.channels for setting in read_grid(write(text)) for run in setting.runs] == [
        (1.0,),
        (0.7, 1.0, 1.4),
    ]


def test_no_grid_is_one_setting(write):
    assert read_grid(write("[base]\nsplit = 1\n")) == [sweep.Setting({}, (make_run(split=1),))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[base\n", r"Expected '\]' at the end of a table declaration \(at line 1, column 6\)\."),
        (b"\xff", "can't decode byte 0xff"),
        ("", r"it names no run: give \[base\] what all runs share, or \[grid\] lists of values"),
        ("[base]\n[grid]\n# lr = [1]\n", "it names no run"),
        ("[bases]\n", r"must be one of 'seeds', 'base', 'grid' \(got 'bases'\)\. Did you mean 'base'\?"),
        ("base = 3\n", r"`base` must be a table, \[base\] \(got 3\)"),
        ("[base]\nbatchsize = 3\n", r"a field of \[base\].*Did you mean 'batch_size'\?"),
        ("[grid]\nlearning_rate = [1]\n", r"a field of \[grid\]"),
        ("[grid]\nlr = 0.1\n", r"`lr` must be a list of values to try \(got 0\.1\); put one value into \[base\]"),
        ("[grid]\nlr = []\n", r"`lr` must be a list of values to try \(got \[\]\)"),
        ("seeds = 3\n", r"`seeds` must be a list of values to try \(got 3\)"),
        ("seeds = [0.5]\n", r"`seed` must be an integer \(got 0\.5 of type float\) \(with seed = 0\.5\)"),
        ("seeds = [0]\n[grid]\nseed = [1]\n", "`seed` must not be given in a table beside `seeds`"),
        ("[base]\nlr = 1\n[grid]\nlr = [1]\n", r"`lr` must stand in \[base\] or in \[grid\], not in both"),
        ("[grid]\nlr = [0.1, nan]\n", r"`lr` must be finite \(got nan\) \(with lr = nan\)"),
        ("[grid]\nsplit = [0]\nlr = [0.1, -1]\n", r"be positive .* \(got -1\.0\) \(with split = 0, lr = -1\)"),
        ('[base]\nmodel = "ss-cn"\n', r"Did you mean 'ss-cnn'\?"),
        ("[base]\nlr = 1979-05-27\n", r"`lr` must be a number \(got datetime\.date"),
        ("[grid]\nlr = [1, 1.0]\n", r"the same run must not be named twice \(scalesteer train --lr 1\.0\)"),
        (f"[grid]\nsplit = {list(range(200))}\nseed = {list(range(200))}\n", r"at most 10,000 runs \(got 40,000\)"),
        (b"#" * (1 << 20) + b"\n", r"is not a regular file of at most 1,048,576 bytes"),
        ("a = " + "[" * 100_000, "maximum recursion depth"),
    ],
)  # fmt: skip
def test_mistake_is_one_line_before_anything_starts(write, capsys, tmp_path, text, message):
    path = write(text)
    with pytest.raises(SweepError, match=message):
        read_grid(path)
    places = ("--runs", tmp_path / "runs")
    code, out, err = command(capsys, "sweep", path, *places)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"scalesteer: {path}")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", list(USUAL))
def test_values_of_any_kind_make_a_run_or_a_mistake(write, name):
    for value in (
        "1",
        "-1",
        "2.5",
        "nan",
        "true",
        '"x"',
        "[]",
        "[1]",
        "[[1]]",
        '["a"]',
        "{a = 1}",
        "07:32:00",
        "1e400",
    ):
        try:
            (setting,) = read_grid(write(f"[base]\n{name} = {value}\n"))
        except SweepError:
            continue
        assert Run.from_dict(setting.runs[0].to_dict()) == setting.runs[0]


@pytest.mark.parametrize(("name", "reason"), [("none.toml", r"cannot be read \("), ("", "is not a regular file")])
def test_file_that_cannot_be_read_is_told(tmp_path, name, reason):
    with pytest.raises(SweepError, match=f"{re.escape(str(tmp_path / name))} {reason}"):
        read_grid(tmp_path / name)


def test_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "grid.toml")
    with pytest.raises(SweepError, match=r"grid\.toml is not a regular file"):
        read_grid(tmp_path / "grid.toml")


def test_run_that_is_named_twice_is_found_in_linear_time(write, monkeypatch):
    compared, equal = 0, Run.__eq__

    def count(self, other):
        nonlocal compared
        compared += 1
        return equal(self, other)

    monkeypatch.setattr(Run, "__eq__", count)
    with pytest.raises(SweepError, match=r"the same run must not be named twice .*--seed 299 "):
        read_grid(write(f"seeds = {[*range(300), 299]}\n{BASE}"))
    assert compared < 600


def test_dry_run_prints_the_commands_and_starts_nothing(write, capsys, tmp_path):
    path = write(f"{BASE}[grid]\nlr = [0.1, 0.2]\n")
    code, out, err = command(capsys, "sweep", path, "--dry-run", "--runs", tmp_path / "runs")
    assert (code, err) == (0, "")
    assert out.splitlines() == [config.command for setting in read_grid(path) for config in setting.runs]
    assert list(tmp_path.iterdir()) == [path]


def result(val_error, test_error=None, status="finished"):
    found = {"status": status, "val_error": val_error, "test_error": test_error}
    return {name: value for name, value in found.items() if value is not None}


def test_table_is_sorted_by_validation_error_and_never_by_test_error(write):
    settings = read_grid(
        write("[grid]\nlr = [0.1, 0.2, 0.3, 0.4]\nchannels = [[1.0, 2.0]]\n[base]\nmodel = 'pooled-cnn'")
    )
    runs = [setting.runs[0] for setting in settings]
    results = dict(zip(runs, (result(0.03, 0.01), result(0.01, 0.04), result(0.02, 0.02)), strict=False))
    assert sweep.table(settings, results).splitlines() == [
        "lr   channels  validation error  test error",
        "0.2  1.0, 2.0  1.00 %            4.00 %",
        "0.3  1.0, 2.0  2.00 %            2.00 %",
        "0.1  1.0, 2.0  3.00 %            1.00 %",
        "0.4  1.0, 2.0  0 of 1 finished",
    ]


def test_table_has_means_over_seeds_and_none_over_some_of_them(write):
    settings = read_grid(write("seeds = [0, 1]\n[grid]\nlr = [0.1, 0.2]\n"))
    first, second = (setting.runs for setting in settings)
    results = {second[0]: result(0.02), second[1]: result(0.03), first[0]: result(0.01)}
    results[first[1]] = {"status": "failed", "reason": "the loss is no number"}
    assert sweep.table(settings, results).splitlines() == [
        "lr   validation error (mean ± deviation over seeds)",
        "0.2  2.50 ± 0.71 %",
        "0.1  1 of 2 finished",
    ]


def test_sweep_makes_its_runs_and_goes_on(cache, write, capsys, tmp_path):
    path = write(f"{BASE}tuning = true\n[grid]\nsplit = [0, 1]\n")
    flags = ("--device", "cpu", "--runs", tmp_path / "runs")
    code, first, err = command(capsys, "sweep", path, *flags)
    assert code == 0, err
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 2
    head, *rows, _, best = first.splitlines()[-5:]
    assert head.split() == ["split", "validation", "error"]
    assert sorted(row.split()[0] for row in rows) == ["0", "1"]
    results = {path.parent: json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/result.json")}
    lowest = min(result["val_error"] for result in results.values())
    named = Path(best.removeprefix("lowest validation error of one run: "))
    assert results[named]["val_error"] == lowest
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    assert command(capsys, "sweep", path, *flags)[1] == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")} == before


def test_failed_run_is_told_after_the_table(cache, write, capsys, tmp_path):
    path = write(f"{BASE}tuning = true\nschedule = 'constant'\n[grid]\nlr = [1e30, 0.005]\n")
    flags = ("--device", "cpu", "--runs", tmp_path / "runs")
    code, out, err = command(capsys, "sweep", path, *flags)
    assert code == 2
    assert out.splitlines()[-3].split() == ["1e+30", "0", "of", "1", "finished"]
    assert re.search(r"^scalesteer: not finished: \S+: the loss", err, flags=re.M)


def test_without_ray_the_extra_is_named(write, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    flags = ("--engine", "ray", "--runs", tmp_path / "runs")
    code, _, err = command(capsys, "sweep", write(BASE), *flags)
    assert code == 2
    assert err.endswith("ray is needed here and not installed: pip install 'scalesteer[cluster]'.\n")
