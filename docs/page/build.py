"""Builds the page of `scalesteer demo` for the web: the same page without a server, for a site of plain files.

    python -m docs.page.build      # into build/page. Another folder is taken too

The visitor's browser runs the networks, by ONNX Runtime Web, which npm fetches once into build/npm. Where it cannot,
the page has its first tab alone. The folder can be put on any site of plain files; on your own machine
`python -m http.server -d build/page` serves it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalesteer import fold
from scalesteer.app.demo import DemoModel, finder
from scalesteer.channels import ScaleChannels
from scalesteer.export import export

ROOT = Path(__file__).parents[2]
OWN = Path(__file__).parent
STATIC = ROOT / "src/scalesteer/app/demo/static"
RUNTIME = "onnxruntime-web@1.30.0"
FILES = {  # of the runtime, with their SHA-256
    "ort.wasm.min.mjs": "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b",
    "ort-wasm-simd-threaded.mjs": "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'"
)
MARK = '<meta charset="utf-8">'


def fetch_runtime(folder: Path) -> Path:
    """The files of the runtime from npm, kept in `folder`; an OSError if they cannot be had."""
    if not all((folder / name).is_file() for name in FILES):
        folder.mkdir(parents=True, exist_ok=True)
        npm = shutil.which("npm")
        if npm is None:
            raise OSError("the page needs npm, to fetch ONNX Runtime Web.")
        done = subprocess.run([npm, "pack", "--silent", RUNTIME], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"npm cannot fetch {RUNTIME}: {done.stderr.strip()[-500:]}")
        archive = folder / done.stdout.split()[-1]
        with tarfile.open(archive) as packed:
            for name in FILES:
                content: Any = packed.extractfile(f"package/dist/{name}")
                (folder / name).write_bytes(content.read())
        archive.unlink()
    for name, digest in FILES.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise OSError(f"{folder / name} is not the file of {RUNTIME} that was tried: delete it.")
    return folder


def describe(demo: DemoModel) -> dict[str, Any]:
    """What the page should know of the networks: networks.json."""
    size: Any = demo.task.image_size
    ways = []
    for key, name, model in demo.ways(*size):
        scales = list(model.scales) if isinstance(model, ScaleChannels) else [1.0]
        if len(scales) > 1 and (model.border or model.multiple > 1 or model.calibration or model.join != "logsumexp"):
            raise ValueError(f"the page does not know the border, multiple, calibration or join of {key}.")
        ways.append({"key": key, "name": name, "scales": scales, "file": "rival" if key == "rival" else "digits"})
    judged = {"height": finder.JUDGED_HEIGHT, "width": finder.JUDGED_WIDTH, "margin": finder.JUDGED_MARGIN}
    return {
        "network": demo.describe(),
        "size": list(size),
        "ways": ways,
        "finder": {
            "extent": finder.FRAME,
            "stride": demo.others.finder.stride,
            "offset": demo.others.finder.offset,
            "threshold": finder.THRESHOLD,
            "most_side": finder.MOST_SIDE,
            "judged": judged,
        },
    }


class FinderWithSizes(nn.Module):
    """The network that finds digits, with the map of sizes beside that of logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, sizes = self.model(x, return_scales=True)
        return logits, sizes


def write_networks(demo: DemoModel, folder: Path) -> None:
    """The networks as ONNX files for images of any size: two for one look at them, the finder with its channels."""
    write_looks(demo, folder)
    write_finder(demo.others.finder.model, folder / "finder.onnx")


def write_looks(demo: DemoModel, folder: Path) -> None:
    """The networks that look at an image once; how their answers are joined is the page's work."""
    for name, model in (("digits", demo.network), ("rival", demo.others.rival)):
        if not export(model, folder / f"{name}.onnx").any_size:
            raise ValueError(f"{name}.onnx takes images of one size only.")


def write_finder(model: nn.Module, path: Path) -> None:
    """The finder as ONNX, from `images` `(1, 1, H, W)` to `logits` and `sizes`."""
    free = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits", "sizes"]}
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        both, picture = FinderWithSizes(fold(model).eval()), torch.rand(1, 1, 88, 70)
        program = torch.export.export(both, (picture,), dynamic_shapes=(free,))
        written: Any = torch.onnx.export(
            program, dynamo=True, verbose=False, dynamic_shapes=({2: "height", 3: "width"},), **names
        )
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # paths of this machine, and most of the file
    written.save(path)


def write_index(folder: Path) -> None:
    """The page itself, with the policy that the server sends as a header, and leave to run the networks."""
    page = (STATIC / "index.html").read_text()
    if page.count(MARK) != 1:
        raise ValueError(f"{STATIC / 'index.html'} must have {MARK} once.")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    (folder / "index.html").write_text(page.replace(MARK, f"{MARK}\n{policy}"))


def build(folder: Path, runtime: Path) -> bool:
    """Builds the page in a new folder, and says whether it has its networks; the runtime is kept in its own folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    demo = DemoModel("digits")
    try:
        kept = fetch_runtime(runtime)
    except OSError as error:
        print(f"without networks, the first tab alone: {error}", file=sys.stderr)
        alone = {**demo.describe(), "ways": [], "samples": [], "finder": False}
        files, backend, told = [OWN / "backend-steering.js"], "backend-steering.js", {"network": alone}
    else:
        files, backend = [*OWN.glob("*.js"), *(kept / name for name in FILES)], "backend-onnx.js"
        told = describe(demo)
        write_networks(demo, folder)
    for file in (*STATIC.iterdir(), *files):
        if file.is_file():
            shutil.copy(file, folder / file.name)
    (folder / backend).replace(folder / "backend.js")
    write_index(folder)
    for name, content in (("networks", told), ("filters", demo.filters())):
        (folder / f"{name}.json").write_text(json.dumps(content, allow_nan=False) + "\n")
    return backend == "backend-onnx.js"


if __name__ == "__main__":
    target = Path(*sys.argv[1:] or [ROOT / "build/page"])
    build(target, ROOT / "build/npm")
    print(f"built: {target}")
