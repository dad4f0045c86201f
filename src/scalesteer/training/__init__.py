"""Training: a run is a frozen configuration, trained in a directory of its own and resumed at any moment."""

from scalesteer.training.config import RunConfig
from scalesteer.training.device import environment, pick_device
from scalesteer.training.distributed import LostError
from scalesteer.training.loop import as_tested, by_training_size, evaluate, with_channels
from scalesteer.training.run import BusyError, CheckpointError, RunError, load, load_model, load_part, train

__all__ = [
    "BusyError", "CheckpointError", "LostError", "RunConfig", "RunError", "as_tested", "by_training_size",
    "environment", "evaluate", "load", "load_model", "load_part", "pick_device", "train", "with_channels",
]  # fmt: skip
