"""A part of a split as tensors: uint8 in memory, on its device, batched there; or mapped from a file."""

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from scalesteer._checks import integer, lookup, real, reals
from scalesteer.datasets.elastic import distort
from scalesteer.datasets.scale import DATASETS, SplitSpec, load_part
from scalesteer.datasets.sized import SIZED_DATASETS, SizedSpec, load_sized
from scalesteer.datasets.sources import DataDir

Statistic = float | tuple[float, ...]
_COUNTED_BYTES = 1 << 24  # of pixels at a time


@dataclass(frozen=True, eq=False)
class ImageSet(Dataset[tuple[Tensor, Tensor]]):
    """Images, labels and scales of one part of a split; also a map-style torch dataset.

    `about` has the split's spec, source with its release, and digest, to be recorded with every result. Images of a
    `mapped` file stay there, whatever the device: each batch is moved.
    """

    images: Tensor  # (N, H, W) or, in colour, (N, C, H, W) uint8
    labels: Tensor  # (N,) int64
    scales: Tensor  # (N,) float32, or (N, 2) where an image shows two digits
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)
    paths: tuple[str, ...] = field(default=(), repr=False)  # of the files, if the images are your own pictures
    mapped: mmap.mmap | None = field(default=None, repr=False)  # the file that starts with `images`, if they are in one

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim not in (3, 4):
            got = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise TypeError(f"`images` must be uint8 (N, H, W) or (N, C, H, W) (got {got}).")
        if not len(self.images) == len(self.labels) == len(self.scales):
            counts = f"{len(self.images)}, {len(self.labels)}, {len(self.scales)}"
            raise ValueError(f"`images`, `labels` and `scales` must be of one length (got {counts}).")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.take(index)

    @property
    def device(self) -> torch.device:
        return self.labels.device

    @property
    def channels(self) -> int:
        """How many channels a batch has: 1 of grey images."""
        return 1 if self.images.ndim == 3 else self.images.shape[1]

    @property
    def sizes(self) -> Tensor:
        """How large the object of each image is; of several objects, their mean: `(N,)`."""
        return self.scales if self.scales.ndim == 1 else self.scales.mean(1)

    @property
    def mean(self) -> Statistic:
        """Mean of all pixels in units of white, of colour images one for each channel; exact."""
        return self._statistic(lambda total, first, second: first / max(1, total) / 255)

    @property
    def std(self) -> Statistic:
        """Standard deviation of all pixels, likewise; the same on every device."""
        return self._statistic(lambda n, first, second: (n * second - first * first) ** 0.5 / max(1, n) / 255)

    def _statistic(self, formula: Callable[[int, int, int], float]) -> Statistic:
        """A number made from the sums of all pixels to the powers of 0, 1 and 2."""
        found = [formula(*sums) for sums in self._sums]
        return found[0] if self.images.ndim == 3 else tuple(found)

    @cached_property
    def _sums(self) -> list[list[int]]:
        """Those sums, of each channel."""
        counts = torch.zeros(self.channels, 256, dtype=torch.int64, device=self.images.device)
        for some in self.images.split(max(1, _COUNTED_BYTES // max(1, self.images[:1].numel()))):
            for own, channel in zip(counts, some.unbind(1) if some.ndim == 4 else (some,), strict=True):
                own += torch.bincount(channel.flatten(), minlength=256)
        return [[sum(n * value**power for value, n in enumerate(row)) for power in range(3)] for row in counts.tolist()]

    def to(self, device: torch.device | str) -> "ImageSet":
        staying = None if self.mapped is None else self.images
        return self._each(lambda tensor: tensor if tensor is staying else tensor.to(device))

    def first(self, count: int) -> "ImageSet":
        """The first `count` images. Such subsets are nested, and class-balanced in mnist-scale-local-2."""
        if integer("count", count, minimum=1) > len(self):
            raise ValueError(f"`count` must be 1 to {len(self)} (got {count}).")
        return replace(self._each(lambda tensor: tensor[:count]), paths=self.paths[:count])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "ImageSet":
        return replace(self, images=change(self.images), labels=change(self.labels), scales=change(self.scales))

    def distorted(self, alpha: float) -> "ImageSet":
        """The same set with every image elastically deformed; see :func:`.elastic.distort`. For grey images."""
        if self.images.ndim != 3:
            raise ValueError(f"only grey images (N, H, W) can be deformed (got {tuple(self.images.shape)}).")
        if self.mapped is not None:
            raise ValueError(f"images that are read from disk cannot be deformed (got {len(self):,}): choose fewer.")
        images = torch.from_numpy(distort(self.images.cpu().numpy(), alpha))
        return replace(self, images=images.to(self.device))

    def batches(
        self, size: int, *, generator: torch.Generator | None = None, drop_last: bool = False, std: Statistic = 1.0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of images (size, C, H, W) float32 and labels (size,) int64, made on the device the set is on.

        Args:
            size: Images in a batch.
            generator: Shuffles with this generator (a CPU one gives the same order on every device), if there is one.
            drop_last: Leave out the last batch if it is smaller. By default it is kept.
            std: Images are divided by 255 times this number, or one for each channel; pass the training set's `std`
                for unit deviation.
        """
        if integer("size", size, minimum=1) > len(self) and drop_last:
            raise ValueError(f"`size` must be at most {len(self)}, all images, to drop the last batch (got {size}).")
        stds = reals("std", std) if isinstance(std, tuple) else (real("std", std),)
        if min(stds) <= 0 or len(stds) not in (1, self.channels):
            raise ValueError(f"`std` must be positive, one number or {self.channels} (got {std}).")
        divisor = 255 * torch.tensor(stds, device=self.device)[:, None, None] if len(stds) > 1 else 255 * stds[0]
        stop = len(self) - len(self) % size if drop_last else len(self)
        rows = [slice(start, start + size) for start in range(0, stop, size)]
        order = None if generator is None else self.order(generator)
        return (self.take(part if order is None else order[part], divisor) for part in rows)

    def order(self, generator: torch.Generator) -> Tensor:
        """The indices of all images, shuffled, on the device that the images are on."""
        return torch.randperm(len(self), generator=generator, device=generator.device).to(self.images.device)

    def prefetch(self, rows: Tensor) -> None:
        """Let the system read images of a mapped file that are soon needed; it does not wait for them.

        Each is asked for as a whole. Left to itself the system reads them page by page, and megabytes around each.
        """
        if self.mapped is not None and hasattr(self.mapped, "madvise"):  # not on every system
            size = self.images[:1].numel()
            for row in rows.reshape(-1).tolist():
                before = row % len(self) * size % mmap.PAGESIZE
                self.mapped.madvise(mmap.MADV_WILLNEED, row % len(self) * size - before, before + size)

    def take(self, rows: Tensor | slice | int, divisor: float | Tensor = 255.0) -> tuple[Tensor, Tensor]:
        """Some images, divided by a number, and their labels: `(n, C, H, W)` float32 and `(n,)` int64."""
        chosen = rows
        if isinstance(rows, Tensor):
            chosen = rows.to(self.images.device)
            self.prefetch(chosen)
        images = self.images[chosen, None] if self.images.ndim == 3 else self.images[chosen]
        return images.to(self.device).float().div_(divisor), self.labels[rows]


def load_split(
    dataset: str = "mnist-scale", split: int = 0, part: str = "train", *, data_dir: DataDir = None, **options: Any
) -> ImageSet:
    """One part of a split as tensors; obtained, built and cached on first use.

    Args:
        dataset: One of `DATASETS`, the paper's, or of `SIZED_DATASETS`, for sizes never seen in training.
        split: 0 to 5; of a sized dataset usually 0.
        part: "train", "val" or "test".
        data_dir: A directory with the original files; otherwise see :func:`.sources.fetch`.
        **options: `scale_range`, `resampler`, `sizes` and `seed` as in :class:`.scale.SplitSpec`, or of a sized dataset
            `train_sizes`, `test_sizes` and `sizes` as in :class:`.sized.SizedSpec`.
    """
    known = [*DATASETS, *SIZED_DATASETS]
    dataset = lookup("dataset", dataset, known)
    own = SizedSpec if dataset in SIZED_DATASETS else SplitSpec
    allowed = [field.name for field in fields(own)][2:]
    if unknown := ", ".join(f"`{name}`" for name in options if name not in allowed):
        raise TypeError(f"{unknown} does not apply to dataset={dataset!r}: it takes {', '.join(allowed)}.")
    if own is SizedSpec:
        return ImageSet(*load_sized(SizedSpec(dataset, split, **options), part, data_dir))
    loaded, meta = load_part(SplitSpec(dataset, split, **options), part, data_dir=data_dir)
    images, labels, scales = map(torch.from_numpy, (loaded.images, loaded.labels, loaded.scales))
    return ImageSet(images, labels.long(), scales, {**meta["about"], "part": part, "digest": meta["digest"]})
