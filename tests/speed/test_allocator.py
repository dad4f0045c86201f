"""Training steps by both allocators, each in a process of its own."""

import json

from speed import allocator

SMALL = {"small": allocator.Case(32, 64, 3), "in channels": allocator.Case(4, 32, 1, (0.5, 1.0))}


def test_a_small_measurement_is_kept(tmp_path):
    found = allocator.run(tmp_path / "allocator.json", rounds=1, steps=5, cases=SMALL)
    assert found == json.loads((tmp_path / "allocator.json").read_text())
    assert list(found["cases"]) == list(SMALL)
    for ways in found["cases"].values():
        assert list(ways) == ["system", "keep"]
        assert all(told["seconds"] > 0 and told["mebibytes"] > 50 for told in ways.values())
    small = found["cases"]["small"]  # medians; the system may happen to keep the memory of all steps by itself
    assert small["keep"]["page_faults"] < max(small["system"]["page_faults"] / 5, 100)
