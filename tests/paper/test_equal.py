"""Tables of one's own pictures at equal time show what was measured, folder by folder."""

import json

import pytest

import paper
from paper import equal


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "guide").mkdir()
    monkeypatch.setattr(paper, "RESULTS", tmp_path)
    return tmp_path / "guide"


def side(name, seed, *errors):
    sizes = dict(zip(("0.5", "0.707", "1", "1.41", "2"), errors, strict=True))
    about = {"counts": [700, 150, 250], "torch": "2", "commit": "0123456789"}
    return {"side": name, "seed": seed, "errors": sizes, "epochs": 60, "cpu_seconds": 80.4, **about}


def test_both_sides_have_their_errors_and_the_interval_of_the_difference(place):
    rows = [side(equal.OURS, 0, 30, 20, 10, 12, 14), side(equal.OURS, 1, 34, 24, 12, 14, 16)]
    rows += [side(equal.RIVAL, 0, 32, 22, 11, 11, 15), side(equal.RIVAL, 1, 38, 28, 13, 13, 17)]
    (place / "equal-time.json").write_text(json.dumps(rows))
    _, _, *lines = equal.equal_time_table().splitlines()
    assert lines[0] == "| `scalesteer train` | 32.0 | 22.0 | 11.0 | 13.0 | 15.0 | 27.0 | 11.0 | 14.0 | 60 | 80 s |"
    assert lines[1].split("|")[-6:-3] == [" 30.0 ", " 12.0 ", " 14.0 "]
    assert lines[2].split("|")[-6:-3] == [" -15.7 to +9.7 ", " -1.0 to -1.0 ", " +0.0 to +0.0 "]  # -3 +- 1 * 12.71
    assert lines[-1].startswith("2 folders, 700 photographs for training")
    (place / "equal-time.json").write_text(json.dumps([rows[0], rows[2]]))  # of one there is no interval
    assert "95 %" not in equal.equal_time_table()
    (place / "equal-time.json").write_text(json.dumps(rows))
    assert [equal.equal_time(who, "smaller") for who in ("ours", "rival")] == ["27.0", "30.0"]


def test_recipes_have_a_row_for_each_way_and_a_column_for_each_kind(place):
    joins = ("alone", "as trained", "plain join")
    about = {"counts": [8, 2, 4], "cpu_seconds": 30.0, "torch": "2", "commit": "0123456789", "seed": 0}
    rows = [
        {"kind": kind, "way": way, "errors": {join: [50, 30, 10 + n, 20, 30] for n, join in enumerate(joins)}, **about}
        for kind, way in (("icons", "one size, resized by 0.5 to 2"), ("digits", "channels in the last epoch"))
    ]
    for row in rows:
        row["errors"] |= {name: [1] * 5 for name in ("fitted, softmax", "fitted, confident", "fitted, mean")}
        row["errors"] |= {"fitted, 0.71 to 1.41": [2] * 5}
    (place / "recipes.json").write_text(json.dumps(rows))
    head, _, *lines = equal.recipes().splitlines()
    assert head == "| error in %, smaller / inside / larger | icons | digits |"
    assert lines[0].endswith("the network alone | 40.0 / 10.0 / 25.0 | – |")
    assert lines[2] == "| **… the same, fitted where that is better: the default** | 40.0 / 11.0 / 25.0 | – |"
    assert lines[7] == "| resized by 0.5 to 2, the last epoch in channels | – | 40.0 / 11.0 / 25.0 |"
    assert not any("not resized" in line for line in lines)


def test_the_default_network_is_told_by_its_own_readout(place):
    rows = [{"flags": f"--epochs 12{more}", "error": error, "cpu_seconds": 70.4} for more, error in
            ((" --readout mean", 9.0), ("", 5.25))]  # fmt: skip
    (place / "badges.json").write_text(json.dumps(rows))
    assert (equal.badges("error"), equal.badges("cpu_seconds")) == ("5.2", "70")
