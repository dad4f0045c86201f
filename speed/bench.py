"""Speed and memory, side by side: the fast path, one convolution per scale, and torch's plain convolution.

A case is the same work for several contenders: ``fast`` and ``auto`` are ours, ``direct`` is one convolution per
scale with a running maximum, ``plain`` is `nn.Conv2d`, or the plain CNN on images of the same size; ``two-lobed`` and
``one-lobed`` are ours with functions that are point-symmetric and with functions that are not; ``compiled`` is ``auto``
by ``torch.compile(mode="reduce-overhead")``. The group ``shapes`` has layers of every shape with the backends ``fast``,
``direct`` and ``auto``: from it come the numbers of taps by which "auto" chooses. The group
``channels`` has residual networks that look at an image at several sizes, with steered filters and with plain ones.
Contenders take turns, so that whatever else the machine does hits all of them. What fails is recorded, and the next
case is measured.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import scalesteer
from scalesteer import _checks
from scalesteer.app.device import arithmetic, capture, commit, pick_device, warm_up
from scalesteer.channels import ScaleChannels
from scalesteer.files import require, write_atomically
from scalesteer.functional import BACKENDS
from scalesteer.harmonics import PAPER_SCALES, WIDE_SCALES, LogRadialBasis, window_size
from scalesteer.models import create_model
from scalesteer.nn import ScaleSteerableConv2d, fold

GROUPS = ("network", "layer", "channels", "lobes", "sweep", "large", "baselines", "shapes")
CONTENDERS = ("fast", "auto", "direct", "plain")
SHAPE_CONTENDERS = ("fast", "direct", "auto")
COMPILED = "compiled"  # a whole network on CUDA
LOBES = {"two-lobed": "area", "one-lobed": "smooth"}  # and the preset of each
RESIDUAL = ("steered-resnet", "pooled-resnet")  # at the sizes of :data:`CHANNELS`
CHANNELS = (0.5, 2**-0.5, 1.0, 2**0.5, 2.0)
RIVALS = ("direct", "plain", "two-lobed", "pooled-resnet")  # to which others are compared
NETWORKS = ("ss-cnn", "plain-cnn", "locally-scale-invariant-cnn", "vector-field-cnn", "spatial-transformer")
Step = Callable[[], Any]
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One comparison: a training step, or inference with finished filters, of a network or of one layer."""

    group: str
    batch: int
    train: bool = True
    channels: tuple[int, int] | None = None  # of a layer, input and output; None for a network
    size: int = 28
    kernel_size: int = 7  # also that of the plain contender
    scales: tuple[float, ...] = PAPER_SCALES
    basis: str = "paper"
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    reduce: str | None = "max"
    precision: str = "float32"
    graph: bool = False
    contenders: tuple[str, ...] = CONTENDERS
    memory: bool = False  # peak memory on a CPU, in a process of its own; on a GPU it is always measured
    once: bool = False  # time the one step of that process only: for steps of a minute

    def to_dict(self) -> Record:
        """What identifies it in a file."""
        about = {name: getattr(self, name) for name in ("group", "batch", "train", "precision", "graph")}
        if self.group == "channels":
            return about | {"size": self.size, "sizes": " ".join(f"{scale:.3g}" for scale in CHANNELS)}
        if self.channels is None:
            return about
        basis = LogRadialBasis.of(self.basis)
        filters = " ".join(str(window_size(self.kernel_size, s, basis)) for s in self.scales)
        about |= {"channels": "{} → {}".format(*self.channels), "size": self.size, "filters": filters}
        return about if self.group != "shapes" else about | {"options": self.options}

    @property
    def options(self) -> Record:
        """What a layer has beside channels, kernel and scales: its basis, and what is not as by default."""
        defaults: Record = {"stride": 1, "dilation": 1, "groups": 1, "reduce": "max"}
        others = {name: value for name, default in defaults.items() if (value := getattr(self, name)) != default}
        return {"basis": self.basis} | others

    def layer(self, backend: str) -> ScaleSteerableConv2d:
        """The layer of a case, with a backend or with what is measured as one of :data:`LOBES`."""
        if self.channels is None:
            raise ValueError(f"a case of {self.group} measures a network, not a layer.")
        (fan_in, fan_out), size = self.channels, self.kernel_size
        options = self.options | ({"basis": LOBES[backend]} if backend in LOBES else {})
        options |= {"scales": self.scales, "backend": "fast" if backend in LOBES else backend}
        padding = self.dilation * (size // 2)
        return ScaleSteerableConv2d(fan_in, fan_out, size, padding=padding, **options)


@dataclass(frozen=True)
class Pace:
    """Up to `rounds` samples of `sample_s` seconds each; after three rounds a case ends at `case_s` seconds."""

    rounds: int = 9
    sample_s: float = 0.1
    case_s: float = 4.0


def sized(*sizes: int) -> Record:
    """The arguments of a layer whose filters have these sizes.

    Example:
        >>> sized(13, 26)
        {'kernel_size': 13, 'scales': (1.0, 2.0)}
    """
    return {"kernel_size": sizes[0], "scales": tuple(n / sizes[0] for n in sizes)}


def even_scales(count: int) -> tuple[float, ...]:
    """Scales evenly between the paper's first and last; a single one is the last.

    Example:
        >>> even_scales(6) == PAPER_SCALES, even_scales(1) == PAPER_SCALES[-1:]
        (True, True)
    """
    return tuple((7 + 10 * i / (count - 1)) / 7 for i in range(count)) if count > 1 else PAPER_SCALES[-1:]


def list_cases(cuda: bool, quick: bool = False) -> list[Case]:
    """Everything that is measured on a kind of device, the most wanted first."""
    modes: list[Record] = [{}]
    if cuda:
        modes = [{"precision": p, "graph": g} for p in ("tf32", "float32") for g in (True, False)]
    share, full = 4 if quick else 1, not quick
    trained, inferred, single = (128, 512, 128) if cuda else (64, 64, 16)
    cases = []
    for mode in modes:
        compiled = cuda and not mode["graph"] and mode["precision"] == "tf32"
        base = Case("network", trained // share, memory=full, contenders=CONTENDERS + (COMPILED,) * compiled, **mode)
        cases += [base, replace(base, batch=inferred // share, train=False)]
        if not mode.get("graph") and mode.get("precision") != "float32":
            cases.append(replace(base, batch=1, train=False, memory=False, contenders=("auto", "plain")))
    if cuda:
        half = Case("network", inferred // share, train=False, precision="bf16", contenders=("auto", "plain"))
        cases += [half, replace(half, graph=True)]
    residual = Case("channels", trained // share if cuda else 8, contenders=RESIDUAL, size=32)
    cases.append(replace(residual, precision="bf16", graph=True) if cuda else residual)
    for train in (True, False):
        base = Case("layer", single // share, train, channels=(30, 60), **modes[0])
        cases += [
            replace(base, channels=(1, 30), size=56),
            replace(base, memory=full and train),
            replace(base, channels=(60, 90), size=14),
            replace(base, **sized(3)),
            replace(base, size=5, **sized(3, 5)),
        ]
    for mode in modes[::2]:
        base = Case("lobes", single // share, contenders=tuple(LOBES), **mode)
        layers = (((1, 30), 56), ((30, 60), 28), ((8, 16), 64))
        cases += [replace(base, channels=channels, size=size) for channels, size in layers]
    base = Case("sweep", single // share, channels=(30, 60), **modes[0])
    doubled = replace(base, **sized(*range(13, 34, 4)))  # all six sizes: side by side with what it is compared to
    sweep = [base, doubled, *(replace(base, batch=base.batch * n // 4) for n in (1, 2, 4, 8))]
    sweep += [replace(base, size=n) for n in (7, 14, 28, 56)]
    sweep += [replace(base, scales=even_scales(n)) for n in (1, 2, 3, 12)]
    largest = (range(3, 14, 2), (11, 13, 17, 19, 23, 25))
    sweep += [replace(base, **sized(*sizes)) for sizes in largest]
    cases += dict.fromkeys(sweep)
    compared = tuple(name for name in CONTENDERS if name != "auto" or cuda)  # each takes a CPU a minute or so
    large = replace(base, group="large", batch=1, channels=(64, 64), size=512, memory=True, once=not cuda)
    cases.append(replace(large, contenders=compared))
    cases += [Case("baselines", 128 // share, contenders=NETWORKS, **mode) for mode in modes[:2]]
    return cases + [replace(case, precision=modes[0].get("precision", "float32")) for case in shape_cases(cuda)]


def shape_cases(cuda: bool) -> list[Case]:
    """Layers of every shape that users have; on CUDA with eight times the images, unless it is a single one."""
    base = Case("shapes", 4, channels=(64, 64), basis="smooth", contenders=SHAPE_CONTENDERS)
    octaves = (0.71, 1.0, 1.41, 2.0)
    small = replace(base, kernel_size=3, scales=octaves)
    layers = [
        # the paper's layers, and the same with one lobe
        *(replace(base, batch=16, channels=(1, 30), size=56, basis=basis) for basis in ("area", "smooth")),
        *(replace(base, batch=8, channels=(30, 60), basis=basis) for basis in ("area", "smooth")),
        *(replace(base, batch=8, channels=(60, 90), size=14, basis=basis) for basis in ("area", "smooth")),
        replace(base, batch=1, basis="area"),
        replace(base, batch=64, channels=(8, 16), basis="area"),
        # the default scales
        replace(base, batch=16, channels=(3, 16), size=32, scales=WIDE_SCALES),
        replace(base, batch=1, channels=(16, 16), size=64, scales=WIDE_SCALES),
        # networks of 3 x 3 layers, converted
        replace(small, batch=8, channels=(3, 32), size=64),
        replace(small, batch=8, channels=(32, 32), size=64),
        replace(small, batch=8, channels=(32, 32), size=64, scales=(1.0,)),
        replace(small, batch=1, size=32),
        replace(small, batch=64, channels=(32, 32)),
        replace(small, channels=(128, 128), size=16, basis="area", scales=(1.0, 5 / 3)),
        replace(small, batch=1, channels=(256, 256), size=14),
        replace(small, batch=1, channels=(512, 512), size=14, scales=(1.0,)),
        replace(small, batch=1, channels=(512, 512), size=14, scales=(1.0, 1.41)),
        # 5 x 5
        replace(base, batch=16, kernel_size=5, scales=(1.0,)),
        *(replace(base, kernel_size=5, scales=octaves, basis=basis) for basis in ("area", "smooth")),
        replace(base, batch=16, kernel_size=5, channels=(2, 8), size=64, scales=octaves),
        replace(base, batch=16, channels=(4, 8), size=64, basis="area"),
        # grey images and few taps
        replace(base, batch=16, kernel_size=3, channels=(1, 32), scales=(1.0,), basis="area"),
        replace(base, batch=16, channels=(1, 32), scales=(1.0, 9 / 7)),
        # stride
        replace(base, batch=1, channels=(3, 64), size=224, scales=(1.0,), stride=2),
        replace(base, channels=(3, 32), size=112, scales=octaves, stride=2),
        replace(small, channels=(32, 64), size=56, stride=2),
        # groups
        replace(base, scales=octaves, groups=64),
        replace(small, size=56, groups=64),
        replace(base, scales=octaves, groups=4),
        # dilation
        replace(small, channels=(32, 32), dilation=2),
        replace(base, channels=(16, 16), size=64, dilation=2, basis="area"),
        # the responses of all scales
        replace(base, channels=(16, 16), reduce=None, basis="area"),
        replace(small, channels=(16, 16), reduce=None),
        # large images
        replace(base, batch=1, channels=(1, 8), size=512, basis="area"),
        replace(base, batch=1, channels=(3, 8), size=512, scales=octaves),
        replace(base, batch=1, channels=(16, 16), size=256, scales=octaves),
        replace(base, batch=1, channels=(3, 8), size=2048, train=False, kernel_size=5, scales=(1.0, 1.41)),
    ]
    layers = [replace(case, batch=8 * case.batch) if cuda and case.batch > 1 else case for case in layers]
    return [replace(case, train=train) for case in layers for train in (True, False) if case.train or not train]


def describe(case: Record) -> str:
    """A case in words.

    Example:
        >>> describe(Case("layer", 16, channels=(30, 60)).to_dict())
        'layer 30 → 60, 28 x 28, filters 7–17 (6 scales), forward + backward, batch 16, float32'
    """
    if "channels" in case:
        sizes = case["filters"].split()
        span = f"{sizes[0]}–{sizes[-1]} ({len(sizes)} scales)" if len(sizes) > 1 else f"{sizes[0]} (1 scale)"
        what = f"layer {case['channels']}, {case['size']} x {case['size']}, filters {span}"
        work = "forward + backward" if case["train"] else "forward, folded"
    else:
        what, work = case["group"], "training" if case["train"] else "inference"
    what += "".join(f", {name} {value}" for name, value in case.get("options", {}).items())
    return f"{what}, {work}, batch {case['batch']}, {case['precision']}{', CUDA graph' if case['graph'] else ''}"


def make_step(case: Case, name: str, device: torch.device) -> Step:
    """The work of a contender, ready to be repeated; a training step leaves no gradients behind."""
    torch.manual_seed(0)
    model: nn.Module
    if case.channels is None:
        if name == "plain":
            model = create_model("plain-cnn", upsample=2)
        else:
            backend = "auto" if name == COMPILED else name
            model = create_model("ss-cnn", backend=backend) if backend in BACKENDS else create_model(name)
        x = torch.rand(case.batch, 1, 28, 28, device=device)
        if name in RESIDUAL:
            model = ScaleChannels(create_model(name, in_chans=3), CHANNELS)
            x = torch.rand(case.batch, 3, case.size, case.size, device=device)
    else:
        if name == "plain":
            model = nn.Conv2d(*case.channels, case.kernel_size, padding=case.kernel_size // 2)
        else:
            model = case.layer(name)
        x = torch.randn(case.batch, case.channels[0], case.size, case.size, device=device)
    model.to(device)
    if not case.train:
        model = fold(model.eval())
    if name == COMPILED:
        model = torch.compile(model, mode="reduce-overhead", fullgraph=True)  # type: ignore[assignment]
    half = torch.autocast(device.type, torch.bfloat16) if case.precision == "bf16" else nullcontext()
    if not case.train:
        infer = torch.no_grad()(lambda: model(x))
        return half(infer) if isinstance(half, torch.autocast) else infer
    if case.channels is None:
        labels = torch.arange(case.batch, device=device) % 10
        cuda = device.type == "cuda"  # a graph needs its numbers on the device
        rate = torch.tensor(1e-3, device=device) if cuda else 1e-3
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=cuda, fused=cuda or None)

        def step() -> None:
            with half:
                loss = F.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        with torch.no_grad():
            gradient = torch.randn_like(model(x))
        x.requires_grad_(case.channels[0] > 1)  # one channel is the image itself, which nobody differentiates

        def step() -> None:
            model(x).backward(gradient)
            model.zero_grad()
            x.grad = None

    return step


def prepare(case: Case, name: str, device: torch.device) -> tuple[Step, float | None]:
    """A contender warmed up, and on a GPU its peak memory in MiB beyond model, optimizer and input."""
    step = make_step(case, name, device)
    if device.type != "cuda":
        step()
        return step, None
    warm_up(step)
    step()  # on this stream too: cuBLAS keeps a workspace for each
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    if case.graph:
        graph, _ = capture(step)

        def replay(_kept: Step = step) -> None:  # model and input must live on
            graph.replay()

        return replay, memory
    return step, memory


def seconds(step: Step, count: int, device: torch.device) -> float:
    """Seconds per step, over `count` of them; by the GPU's own clock where there is one."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    # One thread alone: the time that it was given, so that other work on the machine counts little.
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    for _ in range(count):
        step()
    if device.type != "cuda":
        return (clock() - began) / count
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / count


def run_alone(case: Case, name: str, threads: int) -> tuple[float, float | None]:
    """Seconds of one step and growth of the peak resident memory in MiB; to be called in a fresh process.

    A first tiny step loads libraries. The peak is the process's own high-water mark, VmHWM: `ru_maxrss` would also
    count the parent it was forked from. None where the system has none.
    """
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    make_step(replace(case, batch=2, size=min(case.size, 28)), name, device)()
    step = make_step(case, name, device)
    gc.collect()
    before = _resident("VmRSS")
    took = seconds(step, 1, device)
    after = _resident("VmHWM")
    return took, None if before is None or after is None else after - before


def _resident(key: str) -> float | None:
    try:
        found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) / 1024 if found else None


@dataclass
class _Trial:
    """What is known of a contender so far."""

    step: Step | None = None
    count: int = 1
    samples: list[float] = field(default_factory=list)
    memory: float | None = None
    error: str | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Go on after a failure, and remember it."""
        try:
            yield
        except Exception as error:  # whatever a contender does, the others are measured
            lines = str(error).strip().splitlines() or [""]
            memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            self.error = "out of memory" if memory else f"{type(error).__name__}: {lines[0]}"
            self.step = None

    def to_dict(self, batch: int) -> Record:
        if self.error is not None:
            return {"error": self.error}
        samples = self.samples if len(self.samples) > 1 else 2 * self.samples
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        about = {"ms": 1000 * middle, "q1": 1000 * low, "q3": 1000 * high, "images_per_s": batch / middle}
        about["fastest"] = 1000 * min(samples)
        about |= {} if self.memory is None else {"memory_mib": self.memory}
        return {key: _rounded(value) for key, value in about.items()} | {"samples": len(self.samples)}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def measure(case: Case, device: torch.device, pace: Pace) -> Record:
    """Measure the contenders of a case in turns."""
    trials = {name: _Trial() for name in case.contenders}
    began = time.perf_counter()
    with arithmetic(case.precision):
        for name, trial in trials.items():
            with trial.noting():
                if case.memory and device.type == "cpu":
                    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                        took, trial.memory = alone.submit(run_alone, case, name, torch.get_num_threads()).result()
                    if case.once:
                        trial.samples.append(took)
                if not case.once:
                    start = time.perf_counter()
                    trial.step, memory = prepare(case, name, device)
                    trial.memory = trial.memory if memory is None else memory
                    if device.type == "cuda" or time.perf_counter() - start < 1:  # a longer one is a sample by itself
                        trial.count = max(1, math.floor(pace.sample_s / seconds(trial.step, 1, device)))
        start = time.perf_counter()
        for turn in range(pace.rounds):
            if turn >= 3 and time.perf_counter() - start > pace.case_s:
                break
            for trial in trials.values():
                if trial.step is not None:
                    with trial.noting():
                        trial.samples.append(seconds(trial.step, trial.count, device))
    found = {name: trial.to_dict(case.batch) for name, trial in trials.items()}
    for trial in trials.values():
        trial.step = None
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    took = round(time.perf_counter() - began, 1)
    return {**case.to_dict(), "seconds": took, "contenders": with_ratios(found)}


def with_ratios(found: dict[str, Record]) -> dict[str, Record]:
    """Add to each contender how many times as fast it is as those of :data:`RIVALS` that were measured.

    Example:
        >>> with_ratios({"auto": {"ms": 2.0}, "direct": {"ms": 5.0}})["auto"]
        {'ms': 2.0, 'times_direct': 2.5}
    """
    for name, about in found.items():
        for other in RIVALS:
            if name != other and "ms" in about and "ms" in found.get(other, {}):
                about[f"times_{other}"] = _rounded(found[other]["ms"] / about["ms"])
    return found


def run(
    output: Path,
    *,
    device: str = "auto",
    quick: bool = False,
    only: Iterable[str] | None = None,
    cases: Iterable[Case] | None = None,
    pace: Pace | None = None,
) -> Record:
    """Measure, and write what is known after every case, so that a run cut short leaves what it finished.

    Args:
        output: The JSON file to write; one that is there is replaced.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
        quick: A quarter of the batch sizes, fewer samples, and only network and layer unless `only` says more.
        only: Groups to measure, of :data:`GROUPS`; by default all.
        cases: What to measure, instead of :func:`list_cases`.
        pace: How long to measure, if not as long as the device's kind asks for.
    """
    groups = [_checks.lookup("only", name, GROUPS) for name in only or (GROUPS[:2] if quick else GROUPS)]
    place = pick_device(device)
    cuda = place.type == "cuda"
    if pace is None and groups == ["shapes"]:
        pace = Pace(rounds=5, sample_s=0.01, case_s=0.3) if cuda else Pace(rounds=5, sample_s=0.05, case_s=2.0)
    pace = pace or (Pace(sample_s=0.02, case_s=2.0) if cuda else Pace())
    pace = replace(pace, rounds=3) if quick else pace
    todo = [case for case in (list_cases(cuda, quick) if cases is None else cases) if case.group in groups]
    flags = f"--device {place.type}" + " --quick" * quick + (f" --only {','.join(groups)}" if only else "")
    result: Record = {
        "environment": {"command": f"python -m speed bench {flags}", **environment(place)},
        "settings": {**vars(pace), "quick": quick, "cudnn_benchmark": cuda},
        "measurements": [],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with (
        torch.cuda.device(place) if cuda else nullcontext(),
        torch.random.fork_rng([place] if cuda else []),
        require("tqdm").tqdm(todo, unit="case", disable=None) as bar,
    ):
        _write(output, result)  # tell before minutes of measuring, not after
        for case in bar:
            bar.set_description(describe(case.to_dict()))
            result["measurements"].append(measure(case, place, pace))
            result["seconds"] = round(time.perf_counter() - began, 1)
            _write(output, result)
    return result


def _write(output: Path, result: Record) -> None:
    write_atomically(output, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())


def environment(device: torch.device) -> Record:
    """What a time depends on beside the case."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        about = Path("/proc/cpuinfo")
        found = re.search(r"model name\s*: (.*)", about.read_text()) if about.exists() else None
        name = found[1] if found else platform.machine()
    return {
        "commit": commit(),
        "scalesteer": scalesteer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": name,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),  # of the minute before: others who use the machine spoil times
    }


def render(result: Record) -> str:
    """The measurements as text for a terminal."""
    lines = []
    for case in result["measurements"]:
        lines.append(describe(case))
        for name, about in case["contenders"].items():
            if "error" in about:
                lines.append(f"  {name:28}{about['error']}")
                continue
            quartiles = f"({about['q1']:,.2f}–{about['q3']:,.2f})"
            line = f"  {name:28}{about['ms']:10,.2f} ms {quartiles:20}{about['images_per_s']:10,.4g} images/s"
            for other in RIVALS:
                if f"times_{other}" in about:
                    line += f"  {about[f'times_{other}']:.2f} x {other}"
            lines.append(line + (f"  {about['memory_mib']:,.0f} MiB" if "memory_mib" in about else ""))
    return "\n".join(lines) + "\n"
