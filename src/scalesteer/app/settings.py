"""What a run may be told, by groups, with defaults and help. Needs nothing but Python: help comes without torch.

Each field is a flag of `scalesteer train`, and a name in the file of a sweep. :mod:`scalesteer.app.config` checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["one-cycle", "cosine", "step", "constant"]
Precision = Literal["float32", "tf32", "bf16"]
Join = Literal["mean", "max", "logsumexp", "softmax", "confident"]
FitJoin = Literal["auto", "yes", "no"]
Beyond = Literal["border", "mirror", "black"]
EngineName = Literal["local", "ray"]


@dataclass(frozen=True)
class Pictures:
    """How your own pictures are read. FOLDER|CSV, above, names them."""

    images: str | None = None
    """Your own pictures; the same as FOLDER|CSV without a flag."""
    image_size: tuple[int, int] | None = None  # What the pictures are fitted to, in pixels; by default 64 64.
    fit: Literal["pad", "crop", "resize"] = "pad"
    """How they are fitted. pad: keep their scale, and shrink only what is too large. crop: keep their scale and cut.
    resize: change their scale to fill the image, and cut what is left over."""
    grey: bool = False  # Make the pictures grey.
    value_range: tuple[float, float] | None = None
    """The numbers in a file that are black and white, as 0 4095 for a camera of 12 bits; for pictures of more than 8
    bits, signed numbers and fractions. By default 0 and the largest number of 16 bits, or of the bits that OME says."""
    percentiles: tuple[float, float] | None = None
    """Instead, the percentiles of each picture's own numbers, as 1 99.8; 0 100 takes the smallest and the largest."""
    planes: tuple[int, ...] | None = None
    """Which planes of a file are red, green and blue, counted from 0; one is grey. By default all of up to three."""
    pixel_size: float | None = None
    """Size of a pixel of the images, in micrometres: a picture with others, by a column pixel_size of its list or by
    its file (OME, ImageJ), is first resized to them. By default the median of the column, if there is one."""


@dataclass(frozen=True)
class Filters:
    """For ss-cnn and the networks named steered."""

    basis: str | None = None
    """Preset of the filters: paper, area, released-code or smooth; by default the network's own."""
    scales: tuple[float, ...] | None = None
    """Scales of the filters; by default the network's own, for ss-cnn the paper's six."""
    orders: tuple[float, ...] | None = None
    """Orders k of the filters; by default the preset's."""
    m: float | None = None  # Radial decay of the filters; by default the preset's.
    support: Literal["disc", "crop", "averaged"] | None = None
    """Pixels that belong to a filter: a disc that grows with the scale, a crop of the largest disc, or a disc whose
    edge is averaged over pixels. By default the preset's."""


@dataclass(frozen=True)
class Network:
    """Which network, and at which sizes it looks at an image: --channels and the four flags that follow are for the
    networks named steered and pooled."""

    model: str | None = None
    """The network; `scalesteer models` lists them, and --network takes others. By default ss-cnn for a dataset, and
    pooled-deep for your own pictures."""
    channels: tuple[float, ...] | None = None
    """Scale channels that are trained: the sizes at which the network looks at the image (1.4: enlarged by 1.4). By
    default none: the network learns at one size."""
    join: Join = "logsumexp"  # How the answers of the scale channels become one.
    fit_join: FitJoin = "auto"
    """After training, fit a temperature and a bias for each scale channel on the validation pictures, shown at several
    sizes; used only if that is better on pictures held out. auto: of your own pictures."""
    drop: float | None = None
    """Share of the scale channels that are left out at random in training; by default 0 for a dataset, and 0.4 for your
    own pictures."""
    border: int = 0
    """Width in pixels of a border around the image in scale channels that make it smaller. It is black for digits and
    icons, and mirrors the image for photographs and your own pictures."""
    test_channels: tuple[float, ...] | None = None
    """Scale channels of the trained network, for the test and for use, or none. By default as in training; for your own
    pictures 0.5 0.71 1 1.41 2 where none are trained."""
    widths: tuple[int, ...] | None = None
    """Numbers of feature channels of the layers; by default the network's own."""
    kernel_size: int | tuple[int, ...] | None = None
    """Side of the filters of networks named pooled and steered: one number, or one for each stage."""
    readout: str | None = None  # How pooled, steered and group networks pool: max, mean, logsumexp or features.
    dropout: float | None = None  # Share of the last features that are left out at random in training.
    multiple: int = 1
    """In scale channels height and width are multiples of this, as 32 for most networks that come by --network."""
    pretrained: bool = False
    """Start from the weights that timm or torchvision fetches for its network; the last layer starts anew."""
    weights: str | None = None
    """Start from the weights in a file (.safetensors, or .pth with tensors alone); what does not fit starts anew."""
    upsample: int | None = None  # Enlarge the input by 1 or 2, for networks of the paper; by default as in the paper.
    filters: Filters = Filters()


@dataclass(frozen=True)
class Training:
    """How it learns."""

    epochs: int = 60  # Passes over the training images.
    batch_size: int | None = None
    """Images per step; a smaller batch at the end is left out. By default 128; of your own pictures fewer where that
    would make fewer than five steps in an epoch."""
    lr: float = 0.005  # Largest learning rate of AdamW.
    flip: bool = False  # Mirror each training image with probability 1/2.
    shift: int = 0  # Move each training image at random, by up to this many pixels.
    resize: tuple[float, float] | None = None
    """Resize each training image by a random factor between these two. By default 0.5 2 for your own pictures; 1 1, as
    for a dataset, leaves the size as it is."""
    resize_resampler: Literal["antialias", "bilinear"] = "antialias"
    """How --resize shrinks. antialias: average the pixels that become one. bilinear: read between four of them, as
    torch's plain interpolate; suits images that were shrunk so themselves, as the paper's digits."""
    beyond: Beyond | None = None
    """What comes in from beyond the border of an image that is shrunk, moved or turned. border: the commonest colour of
    its border, as if it had been changed before it was padded. By default border for your own pictures, mirror for the
    photographs of a dataset, and black for digits and icons."""
    rotate: float = 0.0  # Turn each training image at random, by up to this many degrees to either side.
    colour: float = 0.0
    """Change brightness, contrast and saturation of each training image at random, by factors of up to 1 minus and 1
    plus this."""
    blur: float = 0.0
    """Smooth each training image by a Gaussian of a random width, up to this many pixels (its standard deviation)."""
    class_weights: bool = False
    """Weight the loss so that all classes count alike, however many images each has."""
    tuning: bool = False  # Leave the test set alone; use this while you choose settings.
    seed: int = 0  # Seed of the initial weights, the order of the images and dropout.
    weight_decay: float = 0.01  # Weight decay of AdamW.
    label_smoothing: float = 0.1  # Share of each label that is spread over all classes.
    schedule: Schedule = "one-cycle"
    """Learning rate over time. one-cycle: up for 30 % of the steps, then down to zero. cosine: down to zero. step: a
    tenth after a half, and again after three quarters."""
    precision: Precision = "float32"  # Arithmetic: full precision, TF32 products on a GPU, or bfloat16 autocast.
    one_size_epochs: int | None = None
    """Epochs at the beginning that train without scale channels, which is faster. The best epoch is chosen from those
    that follow. By default 0 for a dataset, and five in six for your own pictures."""
    channels_lr: float | None = None
    """Learning rate with which the scale channels come in after --one-size-epochs; it falls to zero, as --lr has done
    before. 0, as for a dataset: one schedule over all epochs. By default a fifth of --lr for your own pictures."""
    patience: int | None = None
    """Stop when the validation error has not fallen for this many epochs; by default all epochs are made."""
    accumulate: int = 1
    """Compute each step in this many parts, where memory is short; batch normalisation sees each part by itself."""
    clip: float | None = None  # Scale the gradient of a step down to this length where it is longer.
    train_images: int | None = None  # Use only the first training images, this many; by default all.


@dataclass(frozen=True)
class Dataset:
    """A built-in dataset, and which of its images."""

    dataset: str = "mnist-scale"
    """mnist-scale, fmnist-scale, mnist-scale-local-2, stir-mnist, stir-emoji, mnist-large-scale or rescaled-cifar10."""
    split: int = 0  # Which draw of the dataset; 0 to 5 are the six of the paper's tables.
    scale_range: tuple[float, float] | None = None  # Factors to shrink images by; by default the dataset's own.
    sizes: tuple[int, int, int] | None = None
    """Numbers of images in the three parts, or of objects where each is shown at several sizes. By default the
    dataset's own."""
    resampler: Literal["bilinear", "antialias"] = "bilinear"  # How images are shrunk.
    train_sizes: tuple[float, float] | None = None
    """Smallest and largest size of the objects in training and validation images, in the dataset's unit; by default the
    dataset's own."""
    test_sizes: tuple[float, ...] | None = None  # Sizes of the objects in test images; by default all that there are.
