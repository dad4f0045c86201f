"""The paper's experiments and ours: what was run, what came out, and the pages that say so."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout. Everything here reads results/ and writes results/, docs/ and README.md in it."""

RESULTS = ROOT / "results"
