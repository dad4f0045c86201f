"""Flags that several commands share, with their help."""

from pathlib import Path
from typing import Annotated, Literal

from scalesteer.app.commands import Positional, arg
from scalesteer.app.settings import EngineName
from scalesteer.app.settings import Join as JoinName

ValueRange = Annotated[
    tuple[float, float] | None,
    arg(
        metavar="BLACK WHITE",
        help="The numbers in a file that are black and white, as 0 4095 for a camera of 12 bits; by default as the "
        "model was trained, or 0 and the largest number of 16 bits.",
    ),
]
PixelSize = Annotated[
    float | None,
    arg(
        metavar="SIZE",
        help="Size of a pixel of these pictures, in the unit of training (micrometres); by default what their files "
        "say (OME, ImageJ). For a model that was trained with pixel sizes.",
    ),
]
Device = Annotated[str, arg(help="cpu, cuda, cuda:1, ...; by default the GPU if there is one.")]
Originals = Annotated[
    Path | None,
    arg(metavar="DIR", help="The original files; see `scalesteer data fetch --help`.", help_behavior_hint=""),
]
RunsFolder = Annotated[Path, arg(metavar="DIR", help="Where runs are kept.")]
OwnNetwork = Annotated[
    str | None,
    arg(
        name="network",
        metavar="timm:NAME|torchvision:NAME|MODULE:FUNCTION",
        help="A network that is not of this package: of timm, of torchvision, or a function of yours that makes one. "
        "This imports and runs that code.",
    ),
]
Part = Literal["train", "val", "test"]
Engine = Annotated[EngineName, arg(help="Runs one after the other here, or as tasks of a Ray cluster.")]
Address = Annotated[str | None, arg(help="Head of a running Ray cluster, HOST:PORT or auto; by default Ray runs here.")]
GpusPerRun = Annotated[float | None, arg(help="Share of a GPU for each run on Ray, as 0.25; by default a whole one.")]
MODEL = (
    "A run's directory, a checkpoint in it, a folder with a model, or the name of one that comes with scalesteer: "
    "digits or garments."
)
Checkpoint = Positional[Annotated[Path, arg(metavar="MODEL", help=MODEL)]]
Channels = Annotated[
    tuple[float, ...] | None,
    arg(
        metavar="SCALE...",
        help="Look at each image at these sizes (1.4: enlarged by 1.4), with networks that take images of any size; "
        "nothing is trained again. By default as the run was tested.",
    ),
]
Join = Annotated[JoinName | None, arg(help="How the answers at these sizes become one; by default as in the run.")]
