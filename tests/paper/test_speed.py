"""What docs/speed.md shows of files of measurements, failures and gaps included."""

import json

import pytest

from paper import speed


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

    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    write("cpu.json", "a" * 40, large=111, baselines=222)
    write("cpu-baselines.json", "b" * 40, baselines=333)
    found = {case["group"]: case["contenders"]["a net"]["images_per_s"] for case in speed.load()["cpu"]["measurements"]}
    assert found == {"large": 111, "baselines": 333}
    where = "d, torch 2, Python 3, commit aaaaaaa; `python -m speed bench cpu.json`"
    assert speed.speed_sources() == f"- two CPU threads: {where}; baselines again on d, commit bbbbbbb."


def test_numbers_of_sentences_are_those_of_the_first_case():
    for name, result in speed.load().items():
        for work in ("training", "inference"):
            cases = speed.of_group(result, "network")
            found = next(case["contenders"] for case in cases if case["train"] == (work == "training"))
            times = {who: found[who]["ms"] for who in ("auto", "direct", "plain")}
            assert float(speed.speed_share(name, work)) == pytest.approx(100 * times["plain"] / times["auto"], abs=0.6)
            assert f"| {speed.number(found['auto']['images_per_s'])} images/s | " in speed.speed_situations()


def test_how_many_times_a_plain_network_takes_is_the_inverse_of_its_share():
    ours = next(case for case in speed.of_group(speed.load()["cpu"], "network") if case["train"])["contenders"]
    assert speed.speed_times("cpu") == f"{ours['auto']['ms'] / ours['plain']['ms']:.1f}"


def test_plots_have_the_measured_rates():
    plots = speed.plots()
    assert set(plots) == {f"bench/{name}-{kind}.png" for name in ("cpu", "h200") for kind in ("network", "growth")}
    assert all("on " in plot.get_suptitle() for plot in plots.values())  # which device
    later = speed.load()["cpu"]["later"]["network"]["device"]  # the network was measured again, on another machine
    assert later in plots["bench/cpu-network.png"].get_suptitle()
    assert later not in plots["bench/cpu-growth.png"].get_suptitle()
    training = next(case for case in speed.of_group(speed.load()["cpu"], "network") if case["train"])
    bars = plots["bench/cpu-network.png"].axes[0].patches
    rates = [training["contenders"][name]["images_per_s"] for name in ("auto", "direct", "plain")]
    assert [bar.get_height() for bar in bars] == rates


def test_situations_show_rates_latencies_and_what_is_missing(tmp_path, monkeypatch):
    def case(contenders, **about):
        return {"group": "network", "train": True, "batch": 64, "precision": "float32", "graph": False} | about | {
            "contenders": contenders
        }  # fmt: skip

    ours = {"ms": 2.5, "images_per_s": 1234, "times_plain": 0.625, "times_direct": 12.5}
    cases = [case({"auto": ours}), case({"auto": ours | {"times_direct": None}}, train=False, batch=1)]
    (tmp_path / "cpu.json").write_text(json.dumps({"environment": {}, "measurements": cases}))
    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    rows = speed.speed_situations().splitlines()
    assert "| two CPU threads, training, batch 64 | 1,234 images/s | 0.62 | 12 |" in rows
    assert "| two CPU threads, one image | 2.5 ms | 0.62 |  |" in rows
    assert "| H200, one image | – |  |  |" in rows
    assert len(rows) == 2 + len(speed.SITUATIONS)
