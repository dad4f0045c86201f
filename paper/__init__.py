"""The paper's experiments and ours: what was run, what came out, and the pages that say so."""

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
