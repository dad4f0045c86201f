"""The paper's datasets, others for sizes never seen in training, and your own pictures, as tensors.

The first two are obtained, verified and built to the same bytes everywhere.

>>> from scalesteer.data import SplitSpec
>>> SplitSpec("fmnist-scale", split=3).scale_range
(0.3, 1.0)
"""

from scalesteer.data.elastic import ELASTIC_ALPHAS, ELASTIC_SIGMA, distort
from scalesteer.data.folder import FolderSpec, load_folder, scan_folder
from scalesteer.data.scale import DATASETS, PARTS, SplitSpec, build, load_part
from scalesteer.data.sized import SIZED_DATASETS, SizedSpec
from scalesteer.data.sources import SOURCES, fetch
from scalesteer.data.tensors import ImageSet, load_split
from scalesteer.files import DataError, cache_dir

__all__ = [
    "DATASETS", "ELASTIC_ALPHAS", "ELASTIC_SIGMA", "PARTS", "SIZED_DATASETS", "SOURCES", "DataError",
    "FolderSpec", "ImageSet", "SizedSpec", "SplitSpec", "build", "cache_dir", "distort", "fetch", "load_folder",
    "load_part", "load_split", "scan_folder",
]  # fmt: skip
