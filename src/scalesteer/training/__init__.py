"""Training: a run is a frozen configuration, trained in a directory of its own and resumed at any moment."""

from scalesteer.training.checkpoint import CheckpointError
from scalesteer.training.config import RunConfig
from scalesteer.training.device import arithmetic, capture, commit, environment, pick_device, warm_up
from scalesteer.training.loop import SCALE_BINS, evaluate, learning_rate, split_by_scale
from scalesteer.training.run import (
    BusyError,
    RunError,
    load,
    load_model,
    saved_result,
    train,
    train_and_publish,
)

__all__ = [
    "SCALE_BINS",
    "BusyError",
    "CheckpointError",
    "RunConfig",
    "RunError",
    "arithmetic",
    "capture",
    "commit",
    "environment",
    "evaluate",
    "learning_rate",
    "load",
    "load_model",
    "pick_device",
    "saved_result",
    "split_by_scale",
    "train",
    "train_and_publish",
    "warm_up",
]
