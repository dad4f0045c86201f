"""The paper's datasets, and others for sizes never seen in training: obtained, verified, built to the same bytes.

>>> from scalesteer.data import SplitSpec
>>> SplitSpec("fmnist-scale", split=3).scale_range
(0.3, 1.0)
"""

from scalesteer.data.elastic import ELASTIC_ALPHAS, ELASTIC_SIGMA, distort
from scalesteer.data.scale import DATASETS, PARTS, SplitSpec, build, load_part
from scalesteer.data.sized import SIZED_DATASETS, SizedSpec
from scalesteer.data.sources import SOURCES, fetch
from scalesteer.data.tensors import ImageSet, load_split
from scalesteer.files import DataError, cache_dir

__all__ = [
    "DATASETS", "ELASTIC_ALPHAS", "ELASTIC_SIGMA", "PARTS", "SIZED_DATASETS", "SOURCES", "DataError", "ImageSet",
    "SizedSpec", "SplitSpec", "build", "cache_dir", "distort", "fetch", "load_part", "load_split",
]  # fmt: skip
