"""The paper's datasets: obtained, verified, built to the same bytes everywhere, batched on the device."""

from .sources import SOURCES, fetch
from .store import DataError, cache_dir

__all__ = ["SOURCES", "DataError", "cache_dir", "fetch"]
