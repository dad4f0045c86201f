"""Training: a run is a frozen configuration, trained in a directory of its own and resumed at any moment."""

from scalesteer.training.config import RunConfig
from scalesteer.training.device import environment, pick_device
from scalesteer.training.loop import evaluate
from scalesteer.training.run import BusyError, CheckpointError, RunError, load, load_model, train

__all__ = [
    "BusyError", "CheckpointError", "RunConfig", "RunError", "environment", "evaluate", "load", "load_model",
    "pick_device", "train",
]  # fmt: skip
