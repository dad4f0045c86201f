"""The product: from your own pictures to a network, a report, a file and a page.

A run is a frozen configuration, trained in a directory of its own and resumed at any moment.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalesteer.app.config import Run, make_run
    from scalesteer.app.device import environment, pick_device
    from scalesteer.app.distributed import LostError
    from scalesteer.app.evaluation import by_training_size, evaluate
    from scalesteer.app.loop import as_tested, with_channels
    from scalesteer.app.networks import CheckpointError, load_model, look_at, read_run
    from scalesteer.app.run import BusyError, RunError, load, train

__all__ = [
    "BusyError", "CheckpointError", "LostError", "Run", "RunError", "as_tested", "by_training_size", "environment",
    "evaluate", "load", "load_model", "look_at", "make_run", "pick_device", "read_run", "train", "with_channels",
]  # fmt: skip

# As in `scalesteer`: what is imported when a name is first used, so that the command line's help does not load torch.
_MODULES = {
    "config": ("Run", "make_run"),
    "device": ("environment", "pick_device"),
    "distributed": ("LostError",),
    "evaluation": ("by_training_size", "evaluate"),
    "loop": ("as_tested", "with_channels"),
    "networks": ("CheckpointError", "load_model", "look_at", "read_run"),
    "run": ("BusyError", "RunError", "load", "train"),
}

if not TYPE_CHECKING:  # so that a checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                found = getattr(import_module(f"scalesteer.app.{module}"), name)
                globals()[name] = found
                return found
        raise AttributeError(f"module 'scalesteer.app' has no attribute {name!r}")
