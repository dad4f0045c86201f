"""A network of `create_model` at several sizes of the image."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from scalesteer.channels import ScaleChannels
from scalesteer.models.network import Network, Task

# Options of `ScaleChannels`.
OF_CHANNELS = ("join", "drop", "border", "border_mode", "multiple", "grid", "output", "calibration", "sure")


class ScaledNetwork(ScaleChannels):
    """`ScaleChannels` around a network that :func:`create_model` made: it also says what it is for."""

    @property
    def task(self) -> Task:
        """What the network is for."""
        return self.net.task  # type: ignore[return-value]

    @task.setter
    def task(self, task: Task) -> None:
        self.net.task = task  # type: ignore[assignment]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `create_model` that make the same network again, at these sizes."""
        return arguments_of(self)


def arguments_of(model: nn.Module) -> dict[str, Any]:
    """The arguments of `create_model` that make a network again, also one inside `ScaleChannels`."""
    if not isinstance(model, ScaleChannels):
        return model.arguments  # type: ignore[return-value]
    own: dict[str, Any] = {"channels": list(model.scales), "join": model.join, "drop": model.drop}
    own |= {"border": model.border, "border_mode": model.border_mode} if model.border else {}
    own |= {"multiple": model.multiple} if model.multiple > 1 else {}
    if model.calibration is not None:  # as JSON has it
        own["calibration"] = {name: list(numbers) for name, numbers in asdict(model.calibration).items()}
    own |= {"sure": model.sure} if model.sure is not None else {}
    if not isinstance(model.net, Network):  # those know their own grid, and return logits alone
        own |= {"grid": list(model.grid)} if model.grid else {}
        if callable(model.output):
            raise TypeError("`output` is a function, which no file can name: choose the logits by a key or an index.")
        own |= {"output": model.output} if model.output is not None else {}
    return {**arguments_of(model.net), **own}
