"""Who is told of each epoch of a training: any object with a method `log`, and TensorBoard's files as one of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from scalesteer import files


class Logger(Protocol):
    """Is told the numbers of each epoch, and at last those of the test."""

    def log(self, epoch: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of an epoch, counted from 0: `loss`, `val_loss`, `val_error`, `seconds`.

        At the end of the run come those of its best epoch: `test_error`, where the test set was looked at.
        """


class TensorBoard:
    """Writes the numbers to a directory that TensorBoard shows; needs the extra `tensorboard`."""

    def __init__(self, directory: str | Path) -> None:
        files.require("tensorboard")
        self.writer = files.require("torch.utils.tensorboard").SummaryWriter(str(directory))

    def log(self, epoch: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, epoch)
        self.writer.flush()
