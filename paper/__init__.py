"""The paper's experiments and ours: what was run, what came out, and the pages that say so.

- Runs: `grids` has every experiment, `run` makes its runs, `results` reads and writes what came out.
- Numbers: `cells` has all results in one table, with means and intervals; `claims` the verdicts; `reproduced` what
  reproduces, and Table 1 with the published forms. `report` shows the paper's tables, `distortion` Table 2 and more
  epochs, `anysize` networks at sizes that training did not show.
- Measured without those runs: `theorem`, `layers`, `measures` (docs/guide/maths.md), `group`
  (docs/evidence/group.md), `datasets` (docs/data.md), `epoch`; `quickstart`, which trains `contenders` in processes
  `side_by_side`. `speed`, `conversions` and `masks` show what speed/ and two examples measured, `examples` and `equal`
  what others did.
- Drawn: `curves` of errors, `guide` without and `figures` with trained networks; `plots` draws all of
  results/ again. README's moving picture is recorded from the page of `scalesteer demo`, by docs/page/record.py.
- Written: `markdown` has tables and the register of views, `pages` fills them in where README.md and docs/ name them.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
"""The checkout. Everything here reads results/ and writes results/, docs/ and README.md in it."""

RESULTS = ROOT / "results"


def recorded(place: str) -> Any:
    """What was measured and kept in a JSON file of results/, or None if it has not been measured."""
    path = RESULTS / place
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
