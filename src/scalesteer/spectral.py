"""The fast algorithm behind :mod:`scalesteer.functional`: correlation as products in the frequency domain.

The image is transformed once; for each scale every frequency is one small matrix product over channels, and the
result is transformed back. The size of the filter does not enter the cost of the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from scalesteer.functional import Geometry


def responses(x: Tensor, margin: tuple[int, int], filters: Sequence[Tensor], geometry: Geometry) -> Iterator[Tensor]:
    """Responses of one scale after the other, equal to those of the direct convolution.

    Args:
        x: Images with a border of `margin` already around them, so that no window leaves them and the circular
            correlation that the transform computes never wraps.
        margin: Rows above and below, columns left and right.
        filters: The filter at each scale.
        geometry: Stride, padding, dilation and groups.

    Yields:
        Responses `(B, O, H', W')`, one a scale.
    """
    dtype = torch.promote_types(x.dtype, filters[0].dtype)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    work = torch.promote_types(dtype, torch.float32)
    groups = geometry.groups
    height, width = x.shape[-2:]
    size = (_fast_length(height), _fast_length(width))
    outputs = geometry.output_size(height - 2 * margin[0], width - 2 * margin[1])
    batch, out_channels = x.shape[0], filters[0].shape[0]
    with torch.autocast(x.device.type, enabled=False):
        spectrum = torch.fft.rfft2(x.to(work), s=size).unflatten(1, (groups, -1))  # (B, G, C/G, U, V)
        for weight in filters:
            n = weight.shape[-1]
            transfer = _transform(weight.to(work), size, geometry.dilation).unflatten(0, (groups, -1))
            product = torch.einsum("bgcuv,gocuv->bgouv", spectrum, transfer)
            full = torch.fft.irfft2(product, s=size)  # (B, G, O/G, *size)
            rows, columns = (
                slice(have - reach, have - reach + (count - 1) * step + 1, step)
                for have, reach, count, step in zip(margin, geometry.reach(n), outputs, geometry.stride, strict=True)
            )
            yield full[..., rows, columns].reshape(batch, out_channels, *outputs).to(dtype)


def _transform(weight: Tensor, size: tuple[int, int], dilation: tuple[int, int]) -> Tensor:
    """The conjugate transform of filters `(O, C, n, n)` whose taps lie `dilation` apart: `(O, C, U, V)`."""
    n = weight.shape[-1]
    if dilation != (1, 1):
        rows, columns = (d * (n - 1) + 1 for d in dilation)
        spread = weight.new_zeros(*weight.shape[:2], rows, columns)
        spread[..., :: dilation[0], :: dilation[1]] = weight
        weight = spread
    transformed: Tensor = torch.fft.rfft2(weight, s=size)
    return transformed.conj()


def _fast_length(length: int) -> int:
    """The smallest even length >= `length` without prime factors above 5: fast transforms, no tall tails."""
    length += length % 2
    while True:
        rest = length
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return length
        length += 2


# Multiply-adds of a direct convolution that cost as much as one frequency of one scale. Measured on two CPU cores,
# batch 32, float32, for windows of 3 to 33 taps, 1 to 90 channels and images of 14 to 96 pixels: 27 to 57 in training,
# 40 to 92 in inference.
_TAPS_A_FREQUENCY = 50


def choose_backend(image_size: tuple[int, int], sizes: Sequence[int], geometry: Geometry) -> str:
    """The backend that the measured cost favours for static shapes; the batch size does not enter.

    Args:
        image_size: Height and width of the image.
        sizes: The window size of each scale.
        geometry: Stride, padding, dilation and groups.
    """
    rows, columns = geometry.output_size(*image_size)
    direct = rows * columns * sum(n * n for n in sizes)
    reach = geometry.reach(max(sizes))
    area = _fast_length(image_size[0] + 2 * max(reach[0], 0)) * _fast_length(image_size[1] + 2 * max(reach[1], 0))
    return "spectral" if direct > _TAPS_A_FREQUENCY * len(sizes) * area else "direct"
