"""What docs/guide/masks.md shows is the mean over seeds of what was measured."""

import json

from paper import RESULTS, masks

MEASURED = json.loads((RESULTS / "guide" / "cells.json").read_text())


def test_a_table_has_the_means_over_seeds():
    seeds = [MEASURED["iou"][seed] for seed in ("0", "1", "2")]
    for kind in ("filled", "hollow", "touching", "thin"):
        head, _, *lines = masks.cell_overlaps(kind).splitlines()
        assert [cell.strip() for cell in head.split("|")[2:-1]] == ["0.5", "1", "2", "3"]
        assert len(lines) == len(seeds[0]) == 7
        for line, way in zip(lines, seeds[0], strict=True):
            for i, cell in enumerate(line.split("|")[2:-1]):
                values = [seed[way][kind][i] for seed in seeds]
                assert float(cell) == round(sum(values) / 3, 2)
            assert masks.cell_overlap(way, kind, 3.0) == line.split("|")[-2].strip()


def test_the_spread_is_the_largest_difference_between_seeds():
    differences = []
    for way, kinds in MEASURED["iou"]["0"].items():
        for kind, values in kinds.items():
            for i in range(len(values)):
                own = sorted(MEASURED["iou"][seed][way][kind][i] for seed in MEASURED["iou"])
                differences.append(own[-1] - own[0])
    assert masks.cell_spread() == f"{max(differences):.2f}"


def test_the_command_is_told_with_its_commit():
    said = masks.cell_command()
    assert MEASURED["command"] in said
    assert "dirty" not in said
    assert said.count(",") == 2
