"""A network of `create_model` at several sizes of the image."""

from __future__ import annotations

from typing import Any

from torch import nn

from scalesteer.channels import ScaleChannels
from scalesteer.models.network import Task


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
    return {**arguments_of(model.net), **own}
