"""The benchmark: real tiny runs, what its file holds, what it does with failures."""

import json
import statistics
from dataclasses import replace

import pytest
import torch

from scalesteer.nn import FoldedScaleConv2d, ScaleSteerableConv2d
from speed import bench
from speed.__main__ import app

CPU = torch.device("cpu")
FAST = bench.Pace(rounds=3, sample_s=0.0, case_s=0.0)
LAYER = bench.Case("layer", 2, channels=(2, 3), size=9)


def test_file_holds_environment_and_every_contender(tmp_path):
    plain = bench.Case("network", 2, train=False, contenders=("plain", "direct"))
    cases = [LAYER, replace(LAYER, train=False), plain]
    path = tmp_path / "new" / "bench.json"
    result = bench.run(path, device="cpu", cases=cases, pace=FAST)
    assert json.loads(path.read_text()) == result
    about = result["environment"]
    assert about["command"] == "python -m speed bench --device cpu"
    assert (about["torch"], about["threads"]) == (torch.__version__, torch.get_num_threads())
    assert len(about["commit"]) >= 40
    assert [case["group"] for case in result["measurements"]] == ["layer", "layer", "network"]
    for case in result["measurements"]:
        assert tuple(case["contenders"]) == (bench.CONTENDERS if case["group"] == "layer" else plain.contenders)
        for found in case["contenders"].values():
            assert 0 < found["q1"] <= found["ms"] <= found["q3"]
            assert found["images_per_s"] == pytest.approx(1000 * case["batch"] / found["ms"], rel=1e-3)
            assert found["samples"] == 3
    assert bench.render(result).count("images/s") == 10


def test_ratios_are_of_medians():
    found = bench.with_ratios({"fast": {"ms": 2.0}, "direct": {"ms": 5.0}, "plain": {"error": "out of memory"}})
    assert found["fast"] == {"ms": 2.0, "times_direct": 2.5}
    assert found["direct"] == {"ms": 5.0}
    assert found["plain"] == {"error": "out of memory"}


def test_median_and_quartiles_of_the_samples():
    samples = [0.004, 0.001, 0.002, 0.010, 0.003]
    found = bench._Trial(samples=samples).to_dict(batch=6)
    assert (found["q1"], found["ms"], found["q3"]) == (2.0, 1000 * statistics.median(samples), 4.0)
    assert found["images_per_s"] == 2000


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (RuntimeError("no such kernel\nsecond line"), "RuntimeError: no such kernel"),
    ],
)
def test_failure_is_recorded_and_the_others_are_measured(monkeypatch, failure, told):
    real = ScaleSteerableConv2d.forward

    def forward(layer, x):
        if layer.backend == "direct":
            raise failure
        return real(layer, x)

    monkeypatch.setattr(ScaleSteerableConv2d, "forward", forward)
    found = bench.measure(LAYER, CPU, FAST)["contenders"]
    assert found["direct"] == {"error": told}
    assert {"ms", "times_plain"} <= set(found["fast"])
    assert "times_direct" not in found["fast"]
    assert told in bench.render({"measurements": [{**LAYER.to_dict(), "contenders": found}]})


def test_run_cut_short_leaves_what_it_finished(monkeypatch, tmp_path):
    real, calls = bench.measure, []

    def measure(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(bench, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        bench.run(tmp_path / "x.json", device="cpu", cases=[LAYER, LAYER], pace=FAST)
    assert len(json.loads((tmp_path / "x.json").read_text())["measurements"]) == 1


def test_contenders_take_turns(monkeypatch):
    order = []

    def make_step(case, name, device):
        return lambda: order.append(name)

    monkeypatch.setattr(bench, "make_step", make_step)
    bench.measure(replace(LAYER, contenders=("a", "b")), CPU, FAST)
    assert order[-6:] == ["a", "b"] * 3


def test_steps_do_the_work_they_claim(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: seen.append(self.param_groups[0]["params"][0].grad))
    for name, kind in (("direct", ScaleSteerableConv2d), ("plain", torch.nn.Conv2d)):
        step = bench.make_step(bench.Case("network", 2), name, CPU)
        step()
        (model,) = [c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, torch.nn.Module)]
        assert (type(model.first), model.upsample) == (kind, 2)
        assert seen.pop() is not None
        assert model.first.bias.grad is None  # nothing is left behind
    for name, symmetric in (("two-lobed", True), ("one-lobed", False)):
        step = bench.make_step(LAYER, name, CPU)
        (model,) = [c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, ScaleSteerableConv2d)]
        assert (model.basis.point_symmetric, model.backend) == (symmetric, "fast")
    step = bench.make_step(replace(LAYER, train=False), "fast", CPU)
    cells = [c.cell_contents for c in step.__wrapped__.__closure__]
    assert any(isinstance(c, FoldedScaleConv2d) for c in cells)
    assert not step().requires_grad


def test_peak_memory_is_that_of_the_step_in_a_process_of_its_own():
    case = replace(LAYER, batch=32, channels=(4, 32), size=64, memory=True, contenders=("plain", "other"), once=True)
    found = bench.measure(case, CPU, FAST)["contenders"]
    maps = 32 * 32 * 64 * 64 * 4 / 2**20
    assert maps * 0.9 < found["plain"]["memory_mib"] < maps * 5
    assert found["plain"]["samples"] == 1
    assert "`backend` must be one of" in found["other"]["error"]


@pytest.mark.parametrize("cuda", [False, True])
def test_lists_what_is_asked_for(cuda):
    cases = bench.list_cases(cuda)
    assert {case.group for case in cases} == set(bench.GROUPS)
    assert len(set(cases)) == len(cases)
    headline = {(c.precision, c.graph, c.train, c.batch) for c in cases if c.group == "network"}
    if cuda:
        modes = [(p, g) for p in ("float32", "tf32") for g in (False, True)]
        whole = {(p, g, t, 128 if t else 512) for p, g in modes for t in (True, False)}
        half = {("bf16", g, False, 512) for g in (True, False)}
        assert headline == whole | half | {("tf32", False, False, 1)}
    else:
        assert headline == {("float32", False, t, 64) for t in (True, False)} | {("float32", False, False, 1)}
    sweep = [case for case in cases if case.group == "sweep"]
    assert all(case.batch == (128 if cuda else 16) for case in sweep if case.size != 28)
    windows = [ScaleSteerableConv2d(1, 1, c.kernel_size, scales=c.scales, basis="paper").sizes for c in sweep]
    assert (13, 17, 21, 25, 29, 33) in windows  # all six doubled
    assert [c.to_dict()["filters"] for c in sweep] == [" ".join(map(str, w)) for w in windows]


def test_command_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "list_cases", lambda cuda, quick: [LAYER, replace(LAYER, group="sweep")])
    path = tmp_path / "x.json"
    command = ["bench", "--device", "cpu", "--quick", "--only", "layer,network"]
    assert app.main([*command, "--output", str(path)]) == 0
    out, err = capsys.readouterr()
    assert (out.splitlines()[0], out.splitlines()[-1], err) == (bench.describe(LAYER.to_dict()), str(path), "")
    result = json.loads(path.read_text())
    assert result["environment"]["command"] == "python -m speed bench --device cpu --quick --only layer,network"
    assert [case["group"] for case in result["measurements"]] == ["layer"]


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_cuda_steps_eager_and_as_a_graph(graph, train):
    device = torch.device("cuda", 0)
    cases = [bench.Case("network", 8, train), bench.Case("layer", 8, train, channels=(3, 4))]
    for case in cases:
        found = bench.measure(replace(case, precision="tf32", graph=graph), device, FAST)["contenders"]
        for about in found.values():
            assert "error" not in about
            assert about["ms"] > 0
            assert about["memory_mib"] > 0


@pytest.mark.gpu
def test_a_captured_training_step_trains():
    case = bench.Case("network", 8)
    step = bench.make_step(case, "fast", torch.device("cuda", 0))
    (model,) = [c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, torch.nn.Module)]
    bench.warm_up(step)
    graph, _ = bench.capture(step)
    before = model.first.coefficients.detach().clone()
    graph.replay()
    assert not torch.equal(model.first.coefficients, before)
