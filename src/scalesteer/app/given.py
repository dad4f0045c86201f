"""Images that a Python program gives in place of a folder: a `torch.utils.data.Dataset`, or whatever has items.

Datasets of torchvision and of Hugging Face are such.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from scalesteer import files
from scalesteer.app import mapped
from scalesteer.app.folder import FolderSpec, draw_part
from scalesteer.app.mapped import Stack
from scalesteer.app.pictures import fit_image
from scalesteer.datasets.scale import PARTS
from scalesteer.datasets.tensors import ImageSet
from scalesteer.files import log
from scalesteer.models.network import Task


class Items(Protocol):
    """Images with labels by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Given:
    """The images of a run as they were given: packed, and divided."""

    task: Task
    parts: Mapping[str, ImageSet]

    def load(self, part: str) -> list[ImageSet]:
        """The images of "train", "val" or "test"."""
        return [self.parts[part]]

    def table(self) -> bytes:
        """How many images each part has, and their digest, as a CSV file: a run goes on with the same ones only."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("part", "images", "digest"))
        rows.writerows((part, len(images), images.about["digest"]) for part, images in self.parts.items())
        return text.getvalue().encode()


def pack(data: Items | Mapping[str, Items], spec: FolderSpec) -> Given:
    """Read all items of a dataset, and divide them as pictures of a folder are.

    Where they take more than :func:`.mapped.memory_limit`, they are kept in files of the cache that have no name: only
    reading the items again could tell whether such a file still has them, so that it would never be of use to another
    process. Each process of a training has its own.

    Args:
        data: Items are (image, label), or mappings with `image` and `label`: images as tensors or arrays `(H, W)` or
            `(C, H, W)`, of bytes or of numbers from 0 to 1, in the run's size; or as Pillow's, which are fitted to it.
            Names of classes are taken from `classes`, as torchvision has them, or `features`, as Hugging Face. Under
            the keys train, val and test the parts may be given; one dataset alone is divided by its items' numbers.
        spec: The name of the data in `images`, the size of an image, whether it is grey, and how pictures are fitted.

    Raises:
        ValueError: If an item is no image of this size with a label, a part is empty, or the cache has no room for all.
    """
    given = {name: data[name] for name in PARTS if name in data} if isinstance(data, Mapping) else {"": data}
    if isinstance(data, Mapping) and set(data) != set(PARTS):
        raise ValueError(f"`data` must have the parts train, val and test (got {', '.join(map(str, data))}).")
    names = _class_names(next(iter(given.values())))
    total = sum(map(len, given.values()))
    if on_disk := mapped.is_large(total, spec.shape):
        mapped.check_room(spec.images, total * math.prod(spec.shape))
        log.info("%s: %s.", spec.images, mapped.describe(total, spec.shape))
    parts = {name: one for part, items in given.items() for name, one in _read_all(items, spec, part, on_disk).items()}
    count = 1 + max(int(labels.max()) for _, labels in parts.values() if len(labels))
    if names and count > len(names):
        raise ValueError(f"`data` has a label {count - 1}, and names of {len(names)} classes only.")
    names = names or tuple(map(str, range(count)))
    counts = {part: len(labels) for part, (_, labels) in parts.items()}
    if empty := [part for part, n in counts.items() if n == 0]:
        raise ValueError(f"`data` leaves no images for {empty[0]} (got {counts}).")
    if lost := set(range(len(names))) - set(parts["train"][1].tolist()):
        raise ValueError(f"`data` has no images for training of the class {names[min(lost)]!r}.")
    sets = {}
    for part, (stack, labels) in parts.items():
        images, mapping = stack.images()
        digest = files.combined_digest([files.tensor_digest(images), files.tensor_digest(labels)])
        about = {"images": spec.images, "image_size": list(spec.image_size), "grey": spec.grey, "classes": list(names)}
        about |= {"counts": counts, "part": part, "digest": digest}
        sets[part] = ImageSet(images, labels, torch.ones(len(images)), about, mapped=mapping)
    return Given(Task(1 if spec.grey else 3, len(names), spec.image_size, names, spec.fit, "surroundings"), sets)


def _class_names(items: Any) -> tuple[str, ...]:
    features = getattr(items, "features", None)
    known = getattr(features["label"], "names", ()) if isinstance(features, Mapping) and "label" in features else ()
    return tuple(map(str, getattr(items, "classes", None) or known or ()))


def _read_all(items: Items, spec: FolderSpec, part: str, on_disk: bool) -> dict[str, tuple[Stack, Tensor]]:
    """The items of a part; or of all, if a dataset names none: which one goes where follows from its number alone."""
    parts = [part or draw_part(f"item {i}") for i in range(len(items))]
    counts, labels = Counter(parts), {name: list[int]() for name in ([part] if part else PARTS)}
    stacks = {name: Stack(counts[name], spec.shape, on_disk) for name in labels}
    for i, own in enumerate(parts):
        item, place = items[i], f"item {i}" + (f" of {part}" if part else "")
        if isinstance(item, Mapping):
            item = next((item[k] for k in ("image", "img") if k in item), None), item.get("label")
        if not isinstance(item, Sequence) or len(item) != 2 or not _is_label(item[1]):
            raise ValueError(f"{place} of `data` must be an image and a label from 0 on (got {type(item).__name__}).")
        stacks[own].add(_to_bytes(item[0], spec, place))
        labels[own].append(int(item[1]))
    return {name: (stacks[name], torch.tensor(own, dtype=torch.long)) for name, own in labels.items()}


def _is_label(value: Any) -> bool:
    whole = isinstance(value, (int, np.integer)) or (isinstance(value, Tensor) and value.ndim == 0)
    return bool(whole and int(value) == value and int(value) >= 0)


def _to_bytes(image: Any, spec: FolderSpec, place: str) -> Tensor:
    """One image as bytes in the shape of the run's."""
    if not isinstance(image, (Tensor, np.ndarray)):
        if not hasattr(image, "convert"):  # of Pillow
            raise ValueError(f"{place} of `data` must be a tensor, an array or a picture (got {type(image).__name__}).")
        return torch.from_numpy(fit_image(image, 1 if spec.grey else 3, spec.image_size, spec.fit))
    x = torch.as_tensor(image).detach().cpu()
    x = x[0] if spec.grey and x.ndim == 3 and len(x) == 1 else x
    if tuple(x.shape) != spec.shape:
        want = f"{spec.shape}, by the run's `image_size` and `grey`"
        raise ValueError(f"{place} of `data` must have shape {want} (got {tuple(x.shape)}).")
    if x.dtype == torch.uint8:
        return x
    if not x.is_floating_point() or not bool(((x >= 0) & (x <= 1)).all()):
        raise ValueError(
            f"{place} of `data` must hold bytes, or numbers from 0 to 1 (got {x.dtype}, not all of them so)."
        )
    return (255 * x).round().byte()
