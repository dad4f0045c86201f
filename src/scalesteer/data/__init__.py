"""The paper's datasets: obtained, verified, built to the same bytes everywhere, batched on the device.

>>> from scalesteer.data import SplitSpec
>>> SplitSpec("fmnist-scale", split=3).scale_range
(0.3, 1.0)
"""

from ..files import DataError, cache_dir
from .elastic import ELASTIC_ALPHAS, ELASTIC_SIGMA, distort
from .scale import DATASETS, PARTS, SplitSpec, build, load_part
from .sources import SOURCES, fetch
from .tensors import ImageSet, load_split

__all__ = [
    "DATASETS",
    "ELASTIC_ALPHAS",
    "ELASTIC_SIGMA",
    "PARTS",
    "SOURCES",
    "DataError",
    "ImageSet",
    "SplitSpec",
    "build",
    "cache_dir",
    "distort",
    "fetch",
    "load_part",
    "load_split",
]
