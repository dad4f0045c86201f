"""Rivals in the form that was published, where the package has another one; and group networks of compared bases.

Importing this module registers the networks, so that :func:`scalesteer.create_model` and recorded runs know them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalesteer import _checks, baselines
from scalesteer.group import OCTAVE
from scalesteer.models import group, register_features
from scalesteer.models.flat import FlatPlan, spatial_transformer, vector_field_cnn
from scalesteer.models.network import Scales
from scalesteer.models.pooled import PooledPlan

SIX_NUMBERS, RELEASED_ROTATION = "spatial-transformer-six", "vector-field-cnn-released"
GROUP_HERMITE, GROUP_FITTED = "group-cnn-hermite", "group-cnn-fitted"


class SixNumbersTransformer2d(baselines.SpatialTransformer2d):
    r"""A spatial transformer that regresses the six entries of its matrix, as its paper does.

    :math:`A_\theta = I + 0.1\,R`, with the six numbers R of the regression layer. The factor 0.1 is ours and acts as a
    smaller learning rate: without it, a few steps send the grid out of the image, where no gradient brings it back.
    """

    def theta(self, x: Tensor) -> Tensor:
        """The affine transformation chosen for each image: `(B, C, H, W)` -> `(B, 2, 3)`."""
        _checks.images(x, self.in_channels, self.regression.weight)
        change: Tensor = self.regression(self.localisation(x))
        return torch.eye(2, 3, dtype=change.dtype, device=x.device) + 0.1 * change.view(-1, 2, 3)


class ReleasedRotationConv2d(baselines.VectorFieldConv2d):
    """A vector field convolution whose filters turn against the vectors, as in its authors' released code."""

    filter_turn = -1


@register_features(SIX_NUMBERS)
def spatial_transformer_six(plan: FlatPlan) -> nn.Sequential:
    """The network `spatial-transformer` with six regressed entries."""
    usual = spatial_transformer(plan)
    usual[0] = SixNumbersTransformer2d(plan.in_chans, plan.feature_size, shrink=plan.upsample)
    return usual


@register_features(RELEASED_ROTATION, widths=(22, 44, 66))
def vector_field_cnn_released(
    plan: FlatPlan, *, scales: Scales = baselines.MARCOS_SCALES, antialias: bool = True
) -> nn.Sequential:
    """The network `vector-field-cnn` with filters that turn against the vectors."""
    return vector_field_cnn(plan, ReleasedRotationConv2d, scales=scales, antialias=antialias)


_GROUP = vars(group.MODELS["group-cnn"][1])


@register_features(GROUP_HERMITE, PooledPlan, **_GROUP)
def group_cnn_hermite(plan: PooledPlan, *, scales: Scales = OCTAVE) -> nn.Sequential:
    """The network `group-cnn` with the Hermite basis of SESN."""
    return group.group_cnn(plan, scales=scales, basis="hermite")


@register_features(GROUP_FITTED, PooledPlan, **_GROUP)
def group_cnn_fitted(plan: PooledPlan, *, scales: Scales = OCTAVE) -> nn.Sequential:
    """The network `group-cnn` with a basis fitted to the grid, in the manner of DISCO."""
    return group.group_cnn(plan, scales=scales, basis="fitted")
