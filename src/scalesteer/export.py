"""Trained networks as one file that runs without this package: ONNX, or a program of torch, compiled or not."""

import io
import json
import logging
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from scalesteer import _checks, files
from scalesteer.channels import ScaleChannels
from scalesteer.group import FoldedScaleGroupConv2d
from scalesteer.models import network_of
from scalesteer.models.network import Network
from scalesteer.models.pooled import PooledNetwork
from scalesteer.models.scaled import arguments_of
from scalesteer.nn import FoldedScaleConv2d, evaluation_mode, fold, twin
from scalesteer.resize import resize

Format = Literal["onnx", "pt2", "aoti"]
SUFFIXES = {"onnx": ".onnx", "pt2": ".pt2", "aoti": ".pt2"}
TOLERANCE = 1e-4  # of the largest logit, or absolute if that is below 1
CHECKED_BATCHES, TIMED_BATCHES = (1, 7), (1, 32)
TIME_S = 0.5  # of each measurement
USUAL_SIZE = (64, 64)  # of images, where a network is meant for any

Run = Callable[[Tensor], Tensor]
log = logging.getLogger("scalesteer.export")


class ExportError(ValueError):
    """A network that cannot be exported, or whose file does not compute what it should."""


@dataclass(frozen=True)
class Exported:
    """What was written, how it was checked, and how fast it is."""

    path: Path
    bytes: int
    any_size: bool  # of images; if not, the batch size alone is free
    shapes: tuple[tuple[int, ...], ...]  # of the images that it was checked with
    difference: float  # of the logits from those of the network, at most
    milliseconds: dict[int, float]  # for an image, by batch size
    eager_milliseconds: dict[int, float]  # the same of the network in torch


def export(model: nn.Module, path: str | Path, *, to: Format = "onnx", examples: Tensor | None = None) -> Exported:
    """Write a trained network to a file that other programs run, after a check that it gives the same logits.

    Steered filters are finished (:func:`scalesteer.fold`). The batch size is free, and so are height and width where
    the network takes images of any size. Of a network that stops early (`ScaleChannels.sure`) the file computes all
    channels. The file appears under its name only if it passes the check.

    Args:
        model: A network of :func:`scalesteer.create_model`, also one inside `ScaleChannels`, on the CPU. Your own is
            one of them when its builder is known (:func:`scalesteer.register_model`).
        path: The file, replaced if it is there.
        to: ``"onnx"``, to be run by ONNX Runtime and others, from `images` `(B, C, H, W)` to `logits`; ``"pt2"``, the
            archive of `torch.export`; or ``"aoti"``, compiled from that for this kind of machine by AOTInductor, which
            takes a C++ compiler and a minute or more. What the network is for is kept inside as JSON: in ONNX as
            metadata, in a "pt2" as the extra file scalesteer.json.
        examples: Images `(N, C, H, W)` from 0 to 1 to check with, repeated if they are few; by default random ones.

    Raises:
        ExportError: If torch cannot export the network, or the file's logits differ by more than 1e-4.

    Note:
        Only run files that you trust: "aoti" holds machine code, and whoever loads a "pt2" trusts torch's reader.
    """
    _checks.choice("to", to, get_args(Format))
    if isinstance(model, ScaleChannels):
        model = twin(model, sure=None)
    network, path = network_of(model), Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"`path` must be a file in a folder that exists (got {str(path)!r}).")
    task, least = network.task, _least_size(model)
    if examples is None:
        size = task.image_size or (max(least, USUAL_SIZE[0]), max(least, USUAL_SIZE[1]))
        examples = torch.rand(max(TIMED_BATCHES), task.in_chans, *size, generator=torch.Generator().manual_seed(0))
    if examples.ndim != 4 or not len(examples):
        raise ValueError(f"`examples` must be images (N, C, H, W), one or more (got shape {tuple(examples.shape)}).")
    any_size = isinstance(network, PooledNetwork) or (not isinstance(network, Network) and task.image_size is None)
    batches = [x for x in _batches(examples, least, any_size) if isinstance(network, Network) or _takes(model, x)]
    about = json.dumps({"arguments": arguments_of(model), "task": task._asdict()})
    finished = fold(model).eval()
    if to == "onnx":
        files.require("onnxscript")  # told now
    for layer in finished.modules():
        if isinstance(
            layer, FoldedScaleConv2d | FoldedScaleGroupConv2d
        ):  # ONNX has no transforms, and no file may need our operator
            layer.backend = "direct" if to == "onnx" or layer.backend == "direct" else "auto"
    with torch.no_grad(), _quiet(), tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
        file = Path(folder) / f"model{SUFFIXES[to]}"
        try:
            program, any_size = _trace(finished, batches, any_size)
            run = {"onnx": _to_onnx, "pt2": _to_pt2, "aoti": _to_aoti}[to](program, file, about)
        except OSError as error:
            raise ExportError(f"{path} cannot be written ({error.strerror or error}).") from error
        except Exception as error:  # torch has no common class for them
            reason = str(error).strip().partition("\n")[0]
            raise ExportError(f"{arguments_of(model)['name']} cannot be exported to {to}: {reason}") from error
        if not any_size:
            batches = [x for x in batches if x.shape[2:] == batches[0].shape[2:]]
        with evaluation_mode(model):
            difference = max(_check(run, model, x) for x in batches)
            timed = [_repeat(examples, count) for count in TIMED_BATCHES]
            speed, eager = ({len(x): _time(of, x) for x in timed} for of in (run, model))
        with open(file, "rb+") as written:
            os.fsync(written.fileno())
        size_of_file = file.stat().st_size
        os.replace(file, path)
    shapes = tuple(tuple(x.shape) for x in batches)
    return Exported(path, size_of_file, any_size, shapes, difference, speed, eager)


def _least_size(model: nn.Module) -> int:
    """The least height and width of images that an exported program takes."""
    network = network_of(model)
    if isinstance(network, Network) and not isinstance(network, PooledNetwork):
        return 1
    # Torch takes a length of 1 for a fixed one: all maps must have more. Most networks halve them five times at most.
    needed, scale = 72, 1.0
    if isinstance(network, PooledNetwork):
        needed = max(network.smallest, 2 * network.stride)
    if isinstance(model, ScaleChannels):
        scale = model.scales[0]
        if model.border_mode == "reflect" and scale < 1:  # a mirrored border is narrower than the image
            needed = max(needed, model.border + 1)
    return math.ceil(needed / scale)


def _takes(model: nn.Module, x: Tensor) -> bool:
    """Whether a network of one's own takes images of this size."""
    with torch.no_grad(), evaluation_mode(model):
        try:
            model(x)
        except (RuntimeError, ValueError, AssertionError):
            return False
    return True


def _repeat(images: Tensor, count: int) -> Tensor:
    return images[torch.arange(count) % len(images)]


def _batches(examples: Tensor, least: int, any_size: bool) -> Iterator[Tensor]:
    """Images to check with: each number of them, at three sizes if the network takes any."""
    height, width = examples.shape[2:]
    sizes = [(height, width)]
    if any_size:
        sizes += [(height + 9, width + 4), (max(least, 3 * height // 4), max(least + 1, 3 * width // 4 - 1))]
    for size in sizes:
        for count in CHECKED_BATCHES:
            yield resize(_repeat(examples, count), size)


def _trace(model: nn.Module, batches: list[Tensor], any_size: bool) -> tuple[torch.export.ExportedProgram, bool]:
    """The program of torch.export, and whether its images may have any size."""
    dims: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if any_size:
        try:  # torch finds the least size by itself; given one, it would want to prove more than it can
            return _export(model, batches[-1], dims | dict.fromkeys((2, 3), torch.export.Dim.DYNAMIC)), True
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            shown = " x ".join(map(str, batches[0].shape[2:]))
            log.warning(
                "torch cannot leave the images' size free: the file will take %s pixels only (%s)", shown, reason
            )
    return _export(model, batches[len(CHECKED_BATCHES) - 1], dims), False


def _export(model: nn.Module, x: Tensor, dims: dict[int, Any]) -> torch.export.ExportedProgram:
    program = torch.export.export(model, (x,), dynamic_shapes=(dims,))
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine, and most of the file
    return program


def _to_onnx(program: torch.export.ExportedProgram, file: Path, about: str) -> Run:
    axes = {0: "batch", 2: "height", 3: "width"}  # names of those that are free
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "dynamic_shapes": (axes,)}
    written: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()
    written.model.metadata_props["scalesteer"] = about
    written.save(file)
    runtime = files.require("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"images": x.numpy()})[0])


def _to_pt2(program: torch.export.ExportedProgram, file: Path, about: str) -> Run:
    archive = io.BytesIO()  # torch's own writer of files ends the process where a disk is full
    torch.export.save(program, archive, extra_files={"scalesteer.json": about})
    file.write_bytes(archive.getbuffer())
    module: Run = torch.export.load(file).module()
    return module


def _to_aoti(program: torch.export.ExportedProgram, file: Path, about: str) -> Run:
    archive: Any = io.BytesIO()  # likewise
    torch._inductor.aoti_compile_and_package(program, package_path=archive)
    file.write_bytes(archive.getbuffer())
    run: Run = torch._inductor.aoti_load_package(str(file))
    return run


def _check(run: Run, model: nn.Module, x: Tensor) -> float:
    """The largest difference of the logits; an ExportError if it is too large."""
    expected = model(x)
    try:
        found = run(x)
    except Exception as error:  # of another program, which has no common class
        reason = " ".join(str(error).split())[:300]
        raise ExportError(f"the exported file fails for images of shape {tuple(x.shape)}: {reason}") from error
    difference = float((found - expected).abs().max()) if found.shape == expected.shape else math.inf
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ExportError(
            f"the exported file gives other logits than the network for images of shape {tuple(x.shape)} (they differ"
            f" by {difference:.2g}): it was not kept."
        )
    return difference


def _time(run: Run | nn.Module, x: Tensor) -> float:
    """Milliseconds for an image, the median over half a second."""
    run(x)
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < TIME_S:
        begun = time.perf_counter()
        run(x)
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times) / len(x)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says to itself while it exports."""
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "onnxscript")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
