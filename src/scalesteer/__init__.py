"""Image classifiers for PyTorch that also work at sizes of objects that training did not show."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalesteer.channels import ScaleChannels
    from scalesteer.conversion import convert
    from scalesteer.fitting import fit_join
    from scalesteer.group import ScaleBlurPool2d, ScaleGroupConv2d, ScaleMax, ScaleMean
    from scalesteer.harmonics import PAPER_SCALES, LogRadialBasis
    from scalesteer.models import create_model, list_models, register_model
    from scalesteer.nn import FoldedScaleConv2d, ScaleSteerableConv2d, fold
    from scalesteer.pretrained import from_pretrained, list_pretrained, push_to_hub, save_pretrained

__all__ = [
    "PAPER_SCALES",
    "FoldedScaleConv2d",
    "LogRadialBasis",
    "ScaleBlurPool2d",
    "ScaleChannels",
    "ScaleGroupConv2d",
    "ScaleMax",
    "ScaleMean",
    "ScaleSteerableConv2d",
    "convert",
    "create_model",
    "fit_join",
    "fold",
    "from_pretrained",
    "list_models",
    "list_pretrained",
    "push_to_hub",
    "register_model",
    "save_pretrained",
]
__version__ = "0.2.0"

# Public names come when they are first used: torch takes seconds to load, and the command line's help does not need it.
_MODULES = {
    "channels": ("ScaleChannels",),
    "conversion": ("convert",),
    "fitting": ("fit_join",),
    "group": ("ScaleBlurPool2d", "ScaleGroupConv2d", "ScaleMax", "ScaleMean"),
    "harmonics": ("PAPER_SCALES", "LogRadialBasis"),
    "models": ("create_model", "list_models", "register_model"),
    "nn": ("FoldedScaleConv2d", "ScaleSteerableConv2d", "fold"),
    "pretrained": ("from_pretrained", "list_pretrained", "push_to_hub", "save_pretrained"),
}

if not TYPE_CHECKING:  # so that a checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                found = getattr(import_module(f"scalesteer.{module}"), name)
                globals()[name] = found
                return found
        if not name.startswith("_") and find_spec(f"scalesteer.{name}"):
            return import_module(f"scalesteer.{name}")
        raise AttributeError(f"module 'scalesteer' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
