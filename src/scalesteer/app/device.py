"""Where a run computes: the device, its arithmetic, steps recorded as CUDA graphs, and what to note about it all."""

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import scalesteer
from scalesteer import _checks
from scalesteer.datasets import ImageSet
from scalesteer.fast import rehearsal

Output = TypeVar("Output")


def pick_device(name: str, count: int = 1) -> torch.device:
    """A device by name; ``"auto"`` is the GPU if there is one. Each of `count` processes has a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = _checks.find_device(name)
    if device.type == "meta":  # it has shapes only
        raise ValueError(f"`device` {name!r} cannot compute; choose cpu or cuda.")
    if count == 1 or device.type != "cuda":
        return device
    local, here = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if device.index is not None or local >= here:
        got = f"got {device} for process {local}; here are {here}"
        raise ValueError(f"`device` must be cuda, with a GPU for each of {count} processes ({got}).")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """TF32 products only where they are asked for (torch allows them in convolutions by default), and the fastest of
    cuDNN's algorithms for each shape."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    products.allow_tf32 = cudnn.allow_tf32 = precision != "float32"
    cudnn.benchmark = True
    try:
        yield
    finally:
        products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def recorded(
    step: Callable[[Tensor], Tensor], rows: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor], Tensor]:
    """A training step as a CUDA graph: to launch its kernels one by one takes longer than they do.

    Trying it on `rows` changes neither model, optimizer nor random numbers. Nobody else may write to `rows` afterwards.
    """
    with torch.cuda.device(rows.device), _restored(model, optimizer, rows.device):
        warm_up(lambda: step(rows))
        optimizer.zero_grad()
        graph, loss = capture(lambda: step(rows))

    def replay(chosen: Tensor) -> Tensor:
        rows.copy_(chosen)
        graph.replay()
        return loss

    return replay


@contextmanager
def _restored(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Undo, in place, what trial steps do to model, optimizer and random numbers."""
    tensors = list(model.state_dict().values())
    moments = [v for values in optimizer.state.values() for v in values.values()]
    before, random = [t.clone() for t in tensors + moments], torch.cuda.get_rng_state(device)
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors + moments, before, strict=True):
            tensor.copy_(value)
        if not moments:  # a new optimizer starts from zero
            for values in optimizer.state.values():
                for value in values.values():
                    value.zero_()
    torch.cuda.set_rng_state(random, device)


def warm_up(step: Callable[[], Any]) -> None:
    """Run a step on a stream that is not the default one, as capturing asks for, with the shapes that it has then."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with rehearsal(), torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def capture(step: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
    """A step as a CUDA graph, to be replayed, and the step's output, which every replay overwrites.

    The step must have been warmed up, and what it reads must live on: the graph does not own it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, step()


def environment(images: ImageSet) -> dict[str, Any]:
    """What a number depends on beside the configuration."""
    return {
        "commit": commit(),
        "scalesteer": scalesteer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(images.device) if images.device.type == "cuda" else platform.machine(),
        "data": {k: v for k, v in images.about.items() if k != "part"},
    }


def commit() -> str | None:
    """The commit of the checkout that this package lies in, marked if a file of it was changed since.

    None if the package does not run from its own repository, which holds it as src/scalesteer. A package that was
    installed inside some other repository must not obey that repository's settings, which can name programs to run.
    So git is only asked for what is committed, and files are compared here.
    """
    if "SCALESTEER_COMMIT" in os.environ:
        return os.environ["SCALESTEER_COMMIT"]
    package = Path(scalesteer.__file__).resolve().parent
    root = package.parents[1]
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").rstrip("\n")).resolve() != root:
            return None
        head = _git(root, "rev-parse", "HEAD").strip()
        # Of each file its mode, "blob", digest and path.
        entries = re.findall(r"\d+ blob (\w+)\t([^\0]+)\0", _git(root, "ls-tree", "-r", "-z", head))
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    if not any(root / path == package / "__init__.py" for _, path in entries):
        return None
    changed = any(_blob(root / path, len(digest)) != digest for digest, path in entries)
    return f"{head}-dirty" if changed else head


def _git(root: Path, *words: str) -> str:
    options = ["core.fsmonitor=false", "core.hooksPath=/dev/null", "protocol.allow=never"]
    command = ["git", "--no-pager", *(word for option in options for word in ("-c", option)), *words]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
    return subprocess.run(command, cwd=root, env=quiet, capture_output=True, text=True, timeout=10, check=True).stdout


def _blob(path: Path, length: int) -> str | None:
    """The digest that git gives to a file's content, SHA-1 or, if it has 64 digits, SHA-256; None if it is gone."""
    try:
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
    except OSError:
        return None
    return hashlib.new("sha256" if length == 64 else "sha1", b"blob %d\0" % len(content) + content).hexdigest()
