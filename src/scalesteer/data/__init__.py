"""The paper's datasets: obtained, verified, built to the same bytes everywhere, batched on the device."""

from .elastic import ELASTIC_ALPHAS, ELASTIC_SIGMA, distort
from .scale import DATASETS, PARTS, SplitSpec, build, load_part
from .sources import SOURCES, fetch
from .store import DataError, cache_dir

__all__ = [
    "DATASETS",
    "ELASTIC_ALPHAS",
    "ELASTIC_SIGMA",
    "PARTS",
    "SOURCES",
    "DataError",
    "SplitSpec",
    "build",
    "cache_dir",
    "distort",
    "fetch",
    "load_part",
]
