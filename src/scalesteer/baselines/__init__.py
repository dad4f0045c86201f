"""The methods that scale-steerable filters are compared with, one file each; the plain CNN is `nn.Conv2d`."""

from scalesteer.baselines.fitted import FittedBasis
from scalesteer.baselines.hermite import HermiteBasis
from scalesteer.baselines.locally_scale_invariant import KANAZAWA_SCALES, LocallyScaleInvariantConv2d
from scalesteer.baselines.spatial_transformer import SpatialTransformer2d, affine_sample
from scalesteer.baselines.vector_field import (
    MARCOS_SCALES,
    VectorBatchNorm2d,
    VectorFieldConv2d,
    VectorMagnitude,
    VectorMaxPool2d,
)

__all__ = ["FittedBasis", "HermiteBasis"]
__all__ += ["KANAZAWA_SCALES", "LocallyScaleInvariantConv2d", "SpatialTransformer2d", "affine_sample"]
__all__ += ["MARCOS_SCALES", "VectorBatchNorm2d", "VectorFieldConv2d", "VectorMagnitude", "VectorMaxPool2d"]
