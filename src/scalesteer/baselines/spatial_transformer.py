"""The spatial transformer of Jaderberg, Simonyan, Zisserman and Kavukcuoglu (2015), arXiv:1506.02025."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from scalesteer import _checks
from scalesteer._checks import Device, Dtype, IntPair


class SpatialTransformer2d(nn.Module):
    r"""A network looks at the image and says which affine part of it to show: one transformation for the whole image.

    A localisation network gives six numbers that :math:`A_\theta` is made of; each output pixel reads the input at

    .. math::
        (x^s, y^s)^T = A_\theta\,(x^t, y^t, 1)^T, \qquad
        V = \sum_n \sum_m U_{nm} \max(0, 1 - |x^s - m|) \max(0, 1 - |y^s - n|)

    (Eq. 1 and 5 of the paper; the second in pixels, the first with image edges at -1 and 1). What lies outside is zero.
    The localisation network is two 5 x 5 convolutions, each with max-pooling by 2 and ReLU, one more pooling, and a
    fully connected layer. A regression layer, which starts at zero, then gives six numbers between -1 and 1 by a
    hyperbolic tangent; at first the image passes unchanged:

    .. math::
        A_\theta = \begin{pmatrix} e^{2z} (1 + d) & e^{2z} a & t_x \\ e^{2z} b & e^{2z} (1 - d) & t_y \end{pmatrix},
        \qquad \theta = (z, d, a, b, t_x, t_y)

    Note:
        This is no convolution and has no arguments of one: it goes in front of plain convolutions. The paper leaves
        the localisation network open; this one is small, so that networks compare at equal numbers of parameters. The
        paper regresses the six entries of the matrix. Then two must change together to change the size of the window,
        and in our trainings it hardly moved: small objects stayed small. Here the size has a number of its own, within
        e^-2 and e^2. A number that has come close to -1 or 1 has no gradient to bring it back.

    Args:
        in_channels: Channels of the input.
        image_size: Height and width of the input.
        channels: Channels of the two convolutions of the localisation network.
        hidden: Width of its fully connected layer.
        shrink: Average-pool the image by this integer before localisation; the image that is shown keeps its size.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Shape:
        `(B, C, H, W)` -> the same.

    Example:
        >>> layer, x = SpatialTransformer2d(1, (28, 28)), torch.randn(2, 1, 28, 28)
        >>> torch.equal(layer(x), x), layer.theta(x).shape
        (True, torch.Size([2, 2, 3]))
    """

    def __init__(
        self,
        in_channels: int,
        image_size: IntPair,
        channels: tuple[int, int] = (16, 16),
        hidden: int = 32,
        shrink: int = 1,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.in_channels = _checks.integer("in_channels", in_channels, minimum=1)
        self.image_size = _checks.pair("image_size", image_size, minimum=1)
        first, second = _checks.pair("channels", channels, minimum=1)
        hidden, shrink = _checks.integer("hidden", hidden, minimum=1), _checks.integer("shrink", shrink, minimum=1)
        cells = [n // shrink // 4 // 2 + n // shrink // 4 % 2 for n in self.image_size]  # the last pooling rounds up
        if min(cells) < 1:
            raise ValueError(f"`image_size` must be at least {4 * shrink} x {4 * shrink} (got {self.image_size}).")
        place = _checks.place(device, dtype)
        self.localisation = nn.Sequential(
            OrderedDict(
                shrink=nn.AvgPool2d(shrink) if shrink > 1 else nn.Identity(),
                conv1=nn.Conv2d(self.in_channels, first, 5, padding=2, **place),
                pool1=nn.MaxPool2d(2),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(first, second, 5, padding=2, **place),
                pool2=nn.MaxPool2d(2),
                relu2=nn.ReLU(),
                pool3=nn.MaxPool2d(2, ceil_mode=True),
                flatten=nn.Flatten(),
                fc1=nn.Linear(second * cells[0] * cells[1], hidden, **place),
                relu3=nn.ReLU(),
            )
        )
        self.regression = nn.Linear(hidden, 6, **place)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the localisation network anew and set its regression layer to zero, which means the identity."""
        for layer in self.localisation:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.reset_parameters()
        nn.init.zeros_(self.regression.weight)
        nn.init.zeros_(self.regression.bias)

    def theta(self, x: Tensor) -> Tensor:
        """The affine transformation chosen for each image: `(B, C, H, W)` -> `(B, 2, 3)`."""
        _checks.images(x, self.in_channels, self.regression.weight)
        if tuple(x.shape[-2:]) != self.image_size:
            raise ValueError(f"the input must have image_size={self.image_size} (got shape {tuple(x.shape)}).")
        z, d, a, b, tx, ty = torch.tanh(self.regression(self.localisation(x))).unbind(1)
        window = (2 * z).exp()
        rows = (window * (1 + d), window * a, tx), (window * b, window * (1 - d), ty)
        return torch.stack([torch.stack(row, 1) for row in rows], 1)

    def forward(self, x: Tensor) -> Tensor:
        """Show the part of each image that the localisation network chooses."""
        return affine_sample(x, self.theta(x))

    def extra_repr(self) -> str:
        return f"image_size={self.image_size}"


def affine_sample(x: Tensor, theta: Tensor) -> Tensor:
    """Read images on an affine grid by bilinear interpolation; what lies outside is zero.

    The same as ``F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)``, with two
    differences: the identity is exact, because pixels are counted from the centre, and the backward pass is
    deterministic where torch is asked for that. `theta` takes output to input coordinates; edges are at -1 and 1.

    Shape: `(B, C, H, W)`, `(B, 2, 3)` -> `(B, C, H, W)`.
    """
    height, width = x.shape[-2:]
    work = torch.promote_types(theta.dtype, torch.float32)  # half precision cannot tell pixels apart
    a = theta.to(work)[..., None, None]  # (B, 2, 3, 1, 1)
    rows = (torch.arange(height, dtype=work, device=x.device) - (height - 1) / 2)[:, None]
    columns = torch.arange(width, dtype=work, device=x.device) - (width - 1) / 2
    px = a[:, 0, 0] * columns + a[:, 0, 1] * rows * (width / height) + (a[:, 0, 2] * width + width - 1) / 2
    py = a[:, 1, 0] * columns * (height / width) + a[:, 1, 1] * rows + (a[:, 1, 2] * height + height - 1) / 2
    px, py = px.clamp(-1, width), py.clamp(-1, height)  # further out is as zero as one pixel out
    left, top = px.detach().floor(), py.detach().floor()
    pixels = x.flatten(2)  # (B, C, H W)
    out = torch.zeros_like(x)
    for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        weight = (1 - (px - column).abs()) * (1 - (py - row).abs())  # (B, H, W)
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        # Clamped as integers too: a NaN has no defined index, and must reach the output rather than crash.
        index = row.long().clamp(0, height - 1) * width + column.long().clamp(0, width - 1)
        value = pixels.gather(2, index.flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)).view_as(x)
        weight = torch.where(inside | weight.isnan(), weight, 0)
        out = out + weight.to(x.dtype).unsqueeze(1) * value
    return out
