"""The networks that come with the package and are shown beside another one; each is read when it is first asked."""

from functools import cached_property
from typing import Any

import torch
from torch import nn

from scalesteer.app.demo.filters import filters, is_steered
from scalesteer.app.demo.finder import Finder
from scalesteer.channels import ScaleChannels
from scalesteer.pretrained import from_pretrained, list_pretrained

RIVAL, STEERED, FINDER = "digits-resized", "ss-cnn-mnist-scale", "digit-finder"


class NotHereError(Exception):
    """What this network has not, or what did not come with the package."""


class Companions:
    """What the page shows beside a network, as far as it came with the package.

    Args:
        network: The user's, without scale channels; its filters are shown if the package has none.
        name: What the page calls it.
        device: Where all of them answer.
    """

    def __init__(self, network: nn.Module, name: str, device: torch.device) -> None:
        self.network, self.name, self.device = network, name, device
        known = list_pretrained()
        self.has_rival, self.has_finder = RIVAL in known, FINDER in known
        self.has_filters = STEERED in known or is_steered(network)

    @cached_property
    def rival(self) -> nn.Module:
        """A plain network for digits, trained with random resizing."""
        return from_pretrained(RIVAL).to(self.device)

    @cached_property
    def finder(self) -> Finder:
        """The network that finds digits in a large picture."""
        if not self.has_finder:
            raise NotHereError("the network that finds digits is not here.")
        model = from_pretrained(FINDER)
        if not isinstance(model, ScaleChannels):
            raise NotHereError(f"{FINDER} has no scale channels.")
        return Finder(model.to(self.device))

    @cached_property
    def filters(self) -> dict[str, Any]:
        """The learned filters that can be steered, JSON-ready."""
        if not self.has_filters:
            raise NotHereError("there is no network with steerable filters here.")
        if STEERED in list_pretrained():
            return filters(from_pretrained(STEERED), STEERED)
        return filters(self.network, self.name)
