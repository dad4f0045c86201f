"""Batch normalisation by the statistics of all processes' batches, on any device: `nn.SyncBatchNorm` is for GPUs alone.

Every process must have equally many numbers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalesteer.baselines import VectorBatchNorm2d


class _Mean(torch.autograd.Function):
    """In double precision; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return (total / dist.get_world_size()).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return mean_of_all(gradients[0])


def mean_of_all(values: Tensor) -> Tensor:
    """The mean over all processes, on each of them; its gradient is right too."""
    return _Mean.apply(values)  # type: ignore[no-any-return, no-untyped-call]


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and variance of the channels `(B, C, ...)` of the whole batch, and of how many numbers they are."""
    variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
    mean, variance = mean.double(), variance.double()  # in which the difference of squares loses nothing that matters
    mean, square = mean_of_all(torch.stack([mean, variance + mean**2])).unbind()
    variance = (square - mean**2).clamp(min=0)
    return mean.to(x.dtype), variance.to(x.dtype), dist.get_world_size() * x.numel() // x.shape[1]


class SynchronisedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """In the place of torch's, of any number of dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        work, shape = x.to(torch.promote_types(x.dtype, torch.float32)), (-1, *(1,) * (x.ndim - 2))
        mean, variance, count = _statistics(work)
        with torch.no_grad():
            for kept, new in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
                if kept is not None and self.momentum is not None:
                    kept.lerp_(new.to(kept.dtype), self.momentum)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        factor = self.weight * torch.rsqrt(variance + self.eps)
        return ((work - mean.view(shape)) * factor.view(shape) + self.bias.view(shape)).to(x.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        pass  # any


class SynchronisedVectorBatchNorm(VectorBatchNorm2d):
    """The same for vector fields."""

    def batch_variance(self, lengths: Tensor) -> tuple[Tensor, int]:
        return _statistics(lengths)[1:]


SYNCHRONISED: dict[type[nn.Module], Any] = {
    nn.BatchNorm1d: SynchronisedBatchNorm,
    nn.BatchNorm2d: SynchronisedBatchNorm,
    nn.BatchNorm3d: SynchronisedBatchNorm,
    VectorBatchNorm2d: SynchronisedVectorBatchNorm,
}
"""What takes the place of which layer in a network that several processes train."""
