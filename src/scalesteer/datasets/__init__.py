"""The paper's datasets, and others for sizes never seen in training, built to the same bytes everywhere.

>>> from scalesteer.datasets import SplitSpec
>>> SplitSpec("fmnist-scale", split=3).scale_range
(0.3, 1.0)
"""

from scalesteer.datasets.elastic import ELASTIC_ALPHAS, ELASTIC_SIGMA, distort
from scalesteer.datasets.scale import DATASETS, PARTS, SplitSpec, build, load_part
from scalesteer.datasets.sized import SIZED_DATASETS, SizedSpec
from scalesteer.datasets.sources import SOURCES, fetch
from scalesteer.datasets.tensors import ImageSet, load_split
from scalesteer.files import DataError, cache_dir

__all__ = [
    "DATASETS", "ELASTIC_ALPHAS", "ELASTIC_SIGMA", "PARTS", "SIZED_DATASETS", "SOURCES", "DataError",
    "ImageSet", "SizedSpec", "SplitSpec", "build", "cache_dir", "distort", "fetch",
    "load_part", "load_split",
]  # fmt: skip
