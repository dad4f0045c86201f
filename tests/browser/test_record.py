"""README's moving picture is recorded from the page."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from docs.page import record
from tests.browser.serving import CHROMIUM


def test_the_moving_picture_grows_there_and_back(model, tmp_path, capsys, monkeypatch):
    if CHROMIUM is None or not model.describe()["steering"]:
        pytest.skip("it needs a browser, and a network with steerable filters")
    monkeypatch.setattr(record.record, "__defaults__", (3,))
    with ThreadPoolExecutor() as other:  # this one has Playwright's loop already
        assert other.submit(record.main, [str(tmp_path / "a.gif")]).result() == 0
    assert capsys.readouterr().out.startswith(str(tmp_path / "a.gif"))
    with Image.open(tmp_path / "a.gif") as gif:
        assert (gif.n_frames, gif.info["loop"]) == (4, 0)
        shown, times = [], []
        for i in range(4):
            gif.seek(i)
            shown.append(np.asarray(gif.convert("RGB"), int))
            times.append(gif.info["duration"])
    assert times == [record.REST, record.STEP, record.REST, record.STEP]
    changed = [(np.abs(one - shown[0]).max(-1) > 60).sum() for one in shown]
    assert 0 == changed[0] < changed[1] < changed[2]
    assert changed[3] == changed[1]


def test_without_a_browser_it_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", "")
    assert record.main([str(tmp_path / "a.gif")]) == 2
    assert "there is no chromium here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_one_in_readme_is_small():
    assert record.PLACE.stat().st_size <= 2e6
