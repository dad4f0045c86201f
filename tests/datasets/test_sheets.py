import os

import pytest

from scalesteer.datasets import DataError, SplitSpec, sheets

SPEC = SplitSpec(sizes=(12, 4, 4))


def test_full_disk_keeps_the_old_picture(filled_cache, tmp_path, monkeypatch):
    output = tmp_path / "sheet.png"
    sheets.draw(SPEC, "train", output)
    before = output.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot write .*sheet.png \(No space left on device\)\."):
        sheets.draw(SPEC, "val", output)
    assert output.read_bytes() == before
    assert list(tmp_path.glob("*.png")) == [output]
    assert not list(tmp_path.glob(".*.tmp"))


def test_impossible_sheet_is_refused(filled_cache, tmp_path):
    with pytest.raises(ValueError, match="`count` must be 1 to 1000 images"):
        sheets.draw(SPEC, "train", tmp_path / "x.png", count=0)
    with pytest.raises(ValueError, match="the val part of this split is empty"):
        sheets.draw(SplitSpec(sizes=(12, 0, 4)), "val", tmp_path / "x.png")
