"""The locally scale-invariant convolution of Kanazawa, Sharma and Jacobs (2014), arXiv:1412.5104."""

from collections.abc import Sequence

from scalesteer._checks import Device, Dtype, IntPair
from scalesteer.baselines._resized import ResizedConv2d

# The authors resize the image by 0.63, 0.7937, 1, 1.2599, 1.5874 and 2; the filter's scale is the inverse of that.
KANAZAWA_SCALES = tuple(2 ** (n / 3) for n in range(-3, 3))


class LocallyScaleInvariantConv2d(ResizedConv2d):
    r"""A convolution that answers at several scales by resizing its input: one filter, the largest response.

    .. math:: y = \max_s \; T_s\,(W \star T_{1/s}\,x) + b

    T is bilinear resizing: the image is resized by 1 / s, convolved with the one filter, and the response is resized
    back to a common size. Where an object grows, a copy that is resized to its old size answers as before.

    Note:
        The authors convolve without padding and align the responses by cropping them, or padding them with zeros, to
        the size of scale 1. Here the response is read at the centre of each window of `nn.Conv2d`, at every scale, so
        that shapes are those of `nn.Conv2d` and borders are filled as `padding_mode` says. The resizing is bilinear
        without smoothing, as theirs; ``antialias=True`` smooths where it shrinks.

    Arguments that are not listed are those of :class:`~scalesteer.ScaleSteerableConv2d`; stride and padding count
    pixels of the input.

    Args:
        dilation: Distance between taps, in pixels of the resized image, an integer or a pair.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``, around the resized image.
        scales: Scales of the filter, positive and ascending; at scale s the input is resized by 1 / s.
        antialias: Whether resizing smooths where it shrinks, as ``F.interpolate(antialias=True)`` does.

    Shape:
        `(B, C_in, H, W)` -> `(B, C_out, H', W')`, the same as `nn.Conv2d`.

    Attributes:
        weight: Learned, `(C_out, C_in / groups, kernel_size, kernel_size)`.
        bias: Learned, `(C_out,)`, or None.

    Example:
        >>> import torch
        >>> layer = LocallyScaleInvariantConv2d(3, 8, 7, padding="same")
        >>> y, scale = layer(torch.randn(2, 3, 32, 32), return_scales=True)
        >>> y.shape, len(layer.scales)
        (torch.Size([2, 8, 32, 32]), 6)
    """

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
        scales: Sequence[float] = KANAZAWA_SCALES,
        antialias: bool = False,
    ) -> None:
        conv = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
        super().__init__(*conv, scales)
        self._add_weight(bias, device, dtype, antialias=antialias)
