"""What was measured: results/runs holds one small JSON a run, results/elastic one a network tested under distortion.

results/repeats holds runs that were made again, whichever result the tables do not use: by an earlier version, on
another device, or just once more.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalesteer.training.checkpoint import write_atomically
from scalesteer.training.config import RunConfig

Result = dict[str, Any]
HISTORY = ("loss", "val_loss", "val_error", "seconds")  # what is kept of each epoch; seconds since the beginning


class ResultError(ValueError):
    """A file that does not hold a result."""


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
    """Write a result where :func:`collect` finds it, small: the history as columns, rounded, each on one line."""
    path = folder / kind / f"{RunConfig.from_dict(result['config']).name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(result.get("history"), list):
        columns = {name: [float(f"{entry[name]:.5g}") for entry in result["history"]] for name in HISTORY}
        result = result | {"history": columns}
    # A newline is never inside a string: what starts so is an array of numbers.
    text = re.sub(
        r"(?<=\[)\n[-+.,\deE\s]*(?=\])", lambda numbers: " ".join(numbers[0].split()), json.dumps(result, indent=1)
    )
    write_atomically(path, (text + "\n").encode())
    return path


def collect(folder: Path) -> Results:
    """Read all results of a folder; one that is not there is empty.

    Raises:
        ResultError: If a file holds something else.
    """
    kinds: dict[str, dict[RunConfig, Any]] = {"runs": {}, "elastic": {}, "repeats": {}}
    for kind, found in kinds.items():
        for path in sorted((folder / kind).glob("[!.]*.json")):
            try:
                result = json.loads(path.read_text())
                config = RunConfig.from_dict(result["config"])
                if kind == "elastic":
                    _check_errors(result["errors"].values())
                elif result["status"] == "finished":
                    _check_errors(
                        [result["val_error"]] if config.tuning else [result["val_error"], result["test_error"]]
                    )
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ResultError(f"{path} does not hold a result ({type(error).__name__}: {error}).") from error
            found[config] = [*found.get(config, []), result] if kind == "repeats" else result
    return Results(**kinds)


def _check_errors(values: Iterable[float]) -> None:
    for value in values:
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise ValueError(f"{value} is not an error rate")
