"""What was measured: results/runs holds one small JSON a run, results/elastic one a network tested under distortion.

results/repeats holds runs that were made again, whichever result the tables do not use: by an earlier version, on
another device, or just once more.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalesteer.training import results
from scalesteer.training.config import RunConfig

Result = dict[str, Any]
ResultError = results.ResultError


@dataclass(frozen=True)
class Results:
    """All results of a folder, by configuration."""

    runs: Mapping[RunConfig, Result]
    elastic: Mapping[RunConfig, Result]
    repeats: Mapping[RunConfig, list[Result]] = field(default_factory=dict)

    def finished(self, configs: Iterable[RunConfig]) -> list[RunConfig]:
        """Those of the runs that ended well; only they may be averaged."""
        return [c for c in configs if c in self.runs and self.runs[c]["status"] == "finished"]

    def failed(self, configs: Iterable[RunConfig]) -> list[RunConfig]:
        """Those of the runs that ended badly."""
        return [c for c in configs if c in self.runs and self.runs[c]["status"] != "finished"]

    def test_errors(self, configs: Iterable[RunConfig]) -> list[float]:
        """The test errors of the finished runs, as shares."""
        return [self.runs[config]["test_error"] for config in self.finished(configs)]

    def made(self, config: RunConfig, key: str) -> list[float]:
        """A number of a finished run, first as in the tables, then as often as it was made again."""
        found = [self.runs[config], *self.repeats.get(config, [])]
        return [result[key] for result in found if result["status"] == "finished"]

    def mean(self, config: RunConfig, key: str) -> float:
        """A number of a finished run; of one that was made more than once, the mean."""
        return statistics.fmean(self.made(config, key))

    def differences(
        self, first: Iterable[RunConfig], second: Iterable[RunConfig], key: str = "test_error"
    ) -> list[float]:
        """First minus second error in %, for each pair of runs that are both finished; means, where made again."""
        pairs = [pair for pair in zip(first, second, strict=True) if len(self.finished(pair)) == 2]
        return [100 * (self.mean(one, key) - self.mean(two, key)) for one, two in pairs]

    def distorted(self, configs: Iterable[RunConfig], kind: str, value: float) -> list[float]:
        """Errors in % of the networks that were tested under distortion ("errors", by strength) or on moved images
        ("moved", by pixels)."""
        found = [self.elastic[config].get(kind, {}).get(f"{value:g}") for config in configs if config in self.elastic]
        return [100 * error for error in found if error is not None]

    def elsewhere(self, configs: Iterable[RunConfig]) -> dict[RunConfig, str]:
        """The finished runs that were made on another device than most of them, and on which."""
        devices = {c: self.runs[c]["environment"]["device"] for c in self.finished(configs)}
        usual = statistics.mode(devices.values()) if devices else ""
        return {config: device for config, device in devices.items() if device != usual}

    def best(self, configs: Iterable[RunConfig]) -> RunConfig | None:
        """The finished run with the lowest error on validation data; the test has no say."""
        return min(self.finished(configs), key=lambda c: self.runs[c]["val_error"], default=None)


def mean_and_std(values: list[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1); None for that of one value.

    Example:
        >>> mean_and_std([1.0, 3.0, 5.0]), mean_and_std([2.0])
        ((3.0, 2.0), (2.0, None))
    """
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def publish(result: Result, folder: Path, kind: str = "runs") -> Path:
    """Write a result where :func:`collect` finds it."""
    return results.publish(result, folder, "distortion" if kind == "elastic" else kind)  # type: ignore[arg-type]


def collect(folder: Path) -> Results:
    """Read all results of a folder; one that is not there is empty."""
    repeats: dict[RunConfig, list[Result]] = {}
    for config, result in results.read(folder, "repeats"):
        repeats.setdefault(config, []).append(result)
    return Results(dict(results.read(folder)), dict(results.read(folder, "distortion")), repeats)
