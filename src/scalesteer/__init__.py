"""Image classifiers for PyTorch that also work at sizes of objects that training did not show."""

from scalesteer.channels import ScaleChannels
from scalesteer.convert import convert
from scalesteer.harmonics import PAPER_SCALES, LogRadialBasis
from scalesteer.models import create_model, list_models
from scalesteer.nn import FoldedScaleConv2d, ScaleSteerableConv2d, fold
from scalesteer.pretrained import from_pretrained, list_pretrained, push_to_hub, save_pretrained

__all__ = [
    "PAPER_SCALES",
    "FoldedScaleConv2d",
    "LogRadialBasis",
    "ScaleChannels",
    "ScaleSteerableConv2d",
    "convert",
    "create_model",
    "fold",
    "from_pretrained",
    "list_models",
    "list_pretrained",
    "push_to_hub",
    "save_pretrained",
]
__version__ = "0.1.0"
