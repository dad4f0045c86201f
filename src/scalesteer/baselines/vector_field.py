"""Scale equivariance with vector fields: Marcos, Kellenberger, Lobry and Tuia (2018), arXiv:1807.11783.

A channel is a field of 2-vectors, `(B, C, 2, H, W)`: the length is the strength of the response, the direction tells
the scale that won. An object that grows turns its vectors; the next layer turns its filters along.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalesteer import _checks
from scalesteer._checks import Device, Dtype, IntPair
from scalesteer.baselines._resized import ResizedConv2d

# The authors resize the image by 1.26^n for n from -4 to 3; the filter's scale is the inverse of that.
MARCOS_SCALES = tuple(1.26**n for n in range(-3, 5))
ANGLE_RANGE = 2 * math.pi / 3  # of all scales together: 120 degrees


class VectorFieldConv2d(ResizedConv2d):
    r"""A convolution at several scales that passes on how strong the winner was and at which scale it won.

    .. math::
        z_s = T_s\,(R_{\theta(s)} W \star T_{1/s}\,x), \quad \rho = \mathrm{ReLU}(\max_s z_s + b), \quad
        y = \rho\,(\cos\theta(s^*), \sin\theta(s^*)), \quad s^* = \arg\max_s z_s

    T is resizing, R a rotation of vectors. The scale is encoded as an angle that is linear in its logarithm and zero
    at scale 1, :math:`\theta(s) = \Delta \log s / \log(s_{max} / s_{min})` with :math:`\Delta` = 120 degrees. Scalar
    input has no direction: one filter for each channel and no rotation. Vector input has two filters for each channel,
    one for each component, and a response is the sum of both, the scalar product of vectors.

    An object that grows by f turns its vectors by :math:`\theta(f)`. At the scale that is f times larger the filter
    has turned by the same angle, so that the scalar product, and with it the length of the output, stays.

    Note:
        Where this reading differs from the authors' released code. There, filters turn by :math:`-\theta` and outputs
        by :math:`+\theta`, so that the scalar product does not stay; equivariance, which the paper claims, needs the
        same sense. Filters turn there in steps of 120 / 7 degrees, outputs in steps of 120 / 8, around an angle that is
        not zero at scale 1; here one function serves both. There, the image is resized step by step, each copy from the
        one before, which smooths where it shrinks; here in one step with anti-aliasing. The angle grows with the
        filter's scale, there with the image's: a mirror image, with no other effect. The bias is ours (theirs has
        none): it is added before the ReLU, and does not move the maximum.

    Arguments that are not listed are those of :class:`~scalesteer.ScaleSteerableConv2d`.

    Args:
        in_channels: Channels of the input, each a scalar or, with `vector_input`, a vector.
        out_channels: Channels of the output, each a vector.
        scales: Scales of the filter, positive and ascending; at scale s the input is resized by 1 / s.
        antialias: Whether resizing smooths where it shrinks, as ``F.interpolate(antialias=True)`` does.
        vector_input: Whether the input is a vector field rather than an image.

    Shape:
        `(B, C_in, H, W)`, or `(B, C_in, 2, H, W)` with `vector_input`, -> `(B, C_out, 2, H', W')`.

    Attributes:
        weight: Learned, `(C_out, C_in / groups, k, k)`, or `(C_out, C_in / groups, 2, k, k)` with `vector_input`.
        bias: Learned, `(C_out,)`, or None.
        directions: Fixed, `(2, S)`, cosine and sine of each scale's angle; not in the state dict.

    Example:
        >>> first, second = VectorFieldConv2d(1, 4, 7), VectorFieldConv2d(4, 8, 7, vector_input=True)
        >>> second(first(torch.randn(2, 1, 32, 32))).shape
        torch.Size([2, 8, 2, 20, 20])
    """

    directions: Tensor
    filter_turn = 1
    """The sense in which filters turn when their scale grows: 1 with the vectors of the output, -1 against them."""
    _derived = ("directions",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntPair = 7,
        stride: IntPair = 1,
        padding: str | IntPair = 0,
        dilation: IntPair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Device = None,
        dtype: Dtype = None,
        *,
        scales: Sequence[float] = MARCOS_SCALES,
        antialias: bool = True,
        vector_input: bool = False,
    ) -> None:
        conv = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
        super().__init__(*conv, scales)
        self._add_weight(bias, device, dtype, antialias=antialias, vectors=vector_input)
        self.register_buffer("directions", None, persistent=False)
        self.reset_buffers()

    @property
    def angles(self) -> tuple[float, ...]:
        """The angle that stands for each scale, in radians."""
        span = math.log(self.scales[-1] / self.scales[0])
        return tuple(ANGLE_RANGE * math.log(s) / span if span else 0.0 for s in self.scales)

    def reset_buffers(self) -> None:
        """Make the directions again, in the weight's dtype and on its device."""
        like, table = self._like(), [[turn(a) for a in self.angles] for turn in (math.cos, math.sin)]
        self.directions = torch.tensor(table, dtype=like.dtype, device=like.device)

    def filters(self) -> tuple[Tensor, ...]:
        """The filter at each scale, turned by its angle: `(C_out, C, k, k)`; for vectors C counts components."""
        if not self.vectors:
            return super().filters()
        work = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(self.weight.device.type, enabled=False):
            cos, sin = self.directions.to(work)
            sin = self.filter_turn * sin
            turn = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)  # (S, 2, 2)
            turned = torch.einsum("sab,ocbhw->socahw", turn, self.weight.to(work))
        return turned.to(self.weight.dtype).flatten(2, 3).unbind(0)

    def _convolve(self, x: Tensor, return_scales: bool) -> Tensor | tuple[Tensor, Tensor]:
        best, winner = super()._convolve(x, return_scales=True)
        direction = self.directions.to(best.dtype)[:, winner].movedim(0, 2)  # (B, C_out, 2, H', W')
        field = F.relu(best).unsqueeze(2) * direction
        return (field, winner) if return_scales else field


class VectorMaxPool2d(nn.Module):
    """Max-pooling by length: of each window the longest vector is kept, length and direction.

    Arguments are those of `nn.MaxPool2d`, and so is the output's size: `(B, C, 2, H, W)` -> `(B, C, 2, H', W')`.
    """

    def __init__(self, kernel_size: IntPair, stride: IntPair | None = None, padding: IntPair = 0) -> None:
        super().__init__()
        self.kernel_size = _checks.pair("kernel_size", kernel_size, minimum=1)
        self.stride = self.kernel_size if stride is None else _checks.pair("stride", stride, minimum=1)
        self.padding = _checks.pair("padding", padding, minimum=0)
        if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            raise ValueError(f"`padding` must be at most half of kernel_size={self.kernel_size} (got {self.padding}).")

    def forward(self, x: Tensor) -> Tensor:
        _checks.batch(x, vectors=True)
        squared = x.detach().square().sum(2)
        _, index = F.max_pool2d(squared, self.kernel_size, self.stride, self.padding, return_indices=True)
        chosen = index.flatten(2).unsqueeze(2).expand(-1, -1, 2, -1)  # (B, C, 2, H' W')
        return x.flatten(3).gather(3, chosen).view(*x.shape[:3], *index.shape[-2:])

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class VectorBatchNorm2d(nn.Module):
    r"""Batch normalisation of lengths: vectors are divided by the standard deviation of their length.

    .. math:: y = \gamma\,x / \sqrt{\mathrm{Var}(|x|) + \epsilon}

    Directions carry the scale, so that nothing is subtracted and nothing added. The variance is that of the batch in
    training and a running mean of those otherwise, as in `nn.BatchNorm2d`.

    Note:
        This is the definition of the authors' earlier paper on rotation (Marcos et al. 2017). Their released code
        divides by the root of the sum of squares over the batch, which depends on the batch's size.

    Arguments are those of `nn.BatchNorm2d`; `(B, C, 2, H, W)` -> the same.
    """

    running_var: Tensor

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__()
        self.num_features = _checks.integer("num_features", num_features, minimum=1)
        self.eps, self.momentum = _checks.real("eps", eps), _checks.real("momentum", momentum)
        if self.eps <= 0 or not 0 < self.momentum <= 1:
            raise ValueError(f"`eps` must be above 0 and `momentum` in (0, 1] (got {self.eps} and {self.momentum}).")
        place = _checks.place(device, dtype)
        self.weight = nn.Parameter(torch.ones(self.num_features, **place))
        self.register_buffer("running_var", torch.ones(self.num_features, **place))

    def forward(self, x: Tensor) -> Tensor:
        _checks.batch(x, vectors=True)
        if x.shape[1] != self.num_features:
            raise ValueError(f"the input must have num_features={self.num_features} on axis 1 (got {tuple(x.shape)}).")
        variance = self.running_var
        if self.training and x.shape[0] > 0:
            work = torch.promote_types(x.dtype, torch.float32)
            variance, count = self.batch_variance(torch.linalg.vector_norm(x.to(work), dim=2))
            if count < 2:
                raise ValueError(f"training needs more than one vector in each channel (got shape {tuple(x.shape)}).")
            with torch.no_grad():
                unbiased = (variance * (count / (count - 1))).to(self.running_var.dtype)
                self.running_var.lerp_(unbiased, self.momentum)
        factor = self.weight * torch.rsqrt(variance + self.eps)
        return x * factor.to(x.dtype)[:, None, None, None]

    def batch_variance(self, lengths: Tensor) -> tuple[Tensor, int]:
        """The variance of the lengths `(B, C, H, W)` in each channel, and of how many lengths it is."""
        return lengths.var((0, 2, 3), correction=0), lengths.numel() // self.num_features

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class VectorMagnitude(nn.Module):
    """The length of each vector: a field becomes an image, `(B, C, 2, H, W)` -> `(B, C, H, W)`."""

    def forward(self, x: Tensor) -> Tensor:
        """Take lengths; where a vector is zero the gradient is zero."""
        _checks.batch(x, vectors=True)
        length: Tensor = torch.linalg.vector_norm(x, dim=2)
        return length
