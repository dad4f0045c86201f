"""What docs/speed.md shows of a file of measurements: all of it, failures and gaps included."""

import json

from benchmarks import report


def test_a_group_that_was_measured_again_takes_the_place_of_the_first(tmp_path, monkeypatch):
    def write(name, commit, **rates):
        cases = [
            {"group": group, "train": True, "batch": 1, "precision": "float32", "graph": False}
            | {"contenders": {"a net": {"ms": 1, "q1": 1, "q3": 1, "images_per_s": rate}}}
            for group, rate in rates.items()
        ]
        about = {
            "torch": "2",
            "python": "3",
            "device": "d",
            "threads": 2,
            "load": 0,
            "command": f"scalesteer bench {name}",
        }
        (tmp_path / name).write_text(json.dumps({"environment": about | {"commit": commit}, "measurements": cases}))

    monkeypatch.setattr(report, "RESULTS", tmp_path)
    write("cpu.json", "a" * 40, large=111, baselines=222)
    write("cpu-baselines.json", "b" * 40, baselines=333)
    large, compared = report.section(report.load()["cpu"], "cpu").split("**The compared networks:**")
    assert "| 111 |" in large
    assert "commit aaaaaaa; `python -m benchmarks bench cpu.json`." in large
    assert "| 333 |" in compared
    assert "222" not in compared
    assert "|  |  | images/s | ms (quartiles) |\n" in compared  # without ratios and memory, which were not measured
    assert compared.startswith(" torch 2, Python 3, commit bbbbbbb; `python -m benchmarks bench cpu-baselines.json`.")


def test_the_page_on_speed_takes_failures_and_gaps():
    result = report.load()["cpu"]
    for case in result["measurements"]:
        case["contenders"] = {name: {"error": "out of memory"} for name in case["contenders"]}
    shown = report.section(result, "cpu")
    assert "out of memory" in shown
    assert "failed" in shown
    for count in range(len(result["measurements"])):  # a run that was cut short anywhere
        assert report.section(result | {"measurements": result["measurements"][:count]}, "cpu")


def test_the_page_on_speed_says_how_to_measure_what_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert "Not measured yet: `python -m benchmarks bench --device cuda" in report.speed_section("h200")


def test_the_front_page_has_the_rates_of_the_whole_network_on_each_device():
    for name, result in report.load().items():
        training = next(case for case in result["measurements"] if case["group"] == "network" and case["train"])
        found = training["contenders"]
        ratio = found["direct"]["ms"] / found["auto"]["ms"]
        said = f"{report.number(found['auto']['images_per_s'])} images per second in training ({ratio:.3g} times "
        share = 100 * found["plain"]["ms"] / found["auto"]["ms"]
        assert f"{said}`direct`, {share:.0f} % of the plain CNN's rate)" in report.speed_headline(name)


def test_how_many_times_a_plain_network_takes_is_the_inverse_of_its_share():
    ours = next(case for case in report.of_group(report.load()["cpu"], "network") if case["train"])["contenders"]
    assert report.speed_times("cpu") == f"{ours['auto']['ms'] / ours['plain']['ms']:.1f}"


def test_plots_have_the_measured_rates():
    plots = report.plots()
    assert set(plots) == {f"bench/{name}-{kind}.png" for name in ("cpu", "h200") for kind in ("network", "growth")}
    assert all("on " in plot.get_suptitle() for plot in plots.values())  # which device
    training = next(case for case in report.of_group(report.load()["cpu"], "network") if case["train"])
    bars = plots["bench/cpu-network.png"].axes[0].patches
    rates = [training["contenders"][name]["images_per_s"] for name in ("spectral", "direct", "plain")]
    assert [bar.get_height() for bar in bars] == rates


def test_situations_show_rates_latencies_and_what_is_missing(tmp_path, monkeypatch):
    def case(contenders, **about):
        return {"group": "network", "train": True, "batch": 64, "precision": "float32", "graph": False} | about | {
            "contenders": contenders
        }  # fmt: skip

    ours = {"ms": 2.5, "images_per_s": 1234, "times_plain": 0.625, "times_direct": 12.5}
    cases = [case({"auto": ours}), case({"auto": ours | {"times_direct": None}}, train=False, batch=1)]
    (tmp_path / "cpu.json").write_text(json.dumps({"environment": {}, "measurements": cases}))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    rows = report.speed_situations().splitlines()
    assert "| two CPU threads, training, batch 64 | 1,234 images/s | 0.62 | 12 |" in rows
    assert "| two CPU threads, one image | 2.5 ms | 0.62 |  |" in rows
    assert "| H200, one image | not measured yet |  |  |" in rows
    assert len(rows) == 2 + len(report.SITUATIONS)
