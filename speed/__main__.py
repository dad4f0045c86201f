"""Speed and memory beside plain convolutions: `python -m speed`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from scalesteer.app.commands import Commands
from scalesteer.app.flags import Device

app = Commands()


@app.command("bench")
@dataclass(frozen=True)
class Bench:
    """Measure speed and memory: ours, one convolution per scale, and plain convolutions, side by side.

    Groups are network, layer, channels (residual networks at several sizes of the image), lobes (functions with one
    lobe beside those with two), sweep (cost against batch, image, scales and filters), large (an image of 512 x 512),
    baselines (the compared networks) and shapes (layers of every shape). The file is written after every case.

    Example: python -m speed bench --quick --only layer
    """

    device: Device = "auto"
    quick: bool = False
    """Under a minute: network and layer only, with a quarter of the batch and fewer samples."""
    only: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="GROUP,...")] = None
    """Which groups; by default all."""
    output: Path = Path("bench.json")
    """The file to write; those of results/bench are what docs/speed.md shows."""

    def run(self) -> None:
        """Measure and print the table."""
        from speed import bench

        only = None if self.only is None else ",".join(self.only).split(",")
        print(bench.render(bench.run(self.output, device=self.device, quick=self.quick, only=only)), end="")
        print(self.output)


@app.command("convert")
@dataclass(frozen=True)
class Convert:
    """Measure what conversion costs: a small ResNet as it is, in scale channels, and converted in several ways."""

    device: Device = "auto"
    """Of the training step; ONNX Runtime is measured on the CPU."""
    output: Path = Path("convert.json")
    """The file to write; results/bench/convert.json is what docs/guide/convert.md shows."""

    def run(self) -> None:
        """Measure and print how many times the network's time each takes."""
        from speed import convert

        found = convert.run(self.output, device=self.device)
        for name in found["training"]:
            times = (found[work][name]["times_network"] for work in ("training", "inference"))
            print(f"{name:40}", *(f"x {one:8.3g}" for one in times))
        print(self.output)


@app.command("group")
@dataclass(frozen=True)
class Group:
    """Measure the training rate of group-cnn beside the same network computed as published code computes it."""

    output: Path = Path("group.json")
    """The file to write; results/bench/group.json is what docs/evidence/group.md shows."""

    def run(self) -> None:
        """Measure and print images per second."""
        from speed import group

        for case, rates in group.run(self.output)["images_per_second"].items():
            print(case, *(f"{name}: {rate:g}" for name, rate in rates.items()), sep="  ")
        print(self.output)


@app.command("allocator")
@dataclass(frozen=True)
class Allocator:
    """Measure training steps on a CPU with the allocator as the system has it, and told to keep its memory."""

    output: Path = Path("allocator.json")
    """The file to write; results/bench/allocator.json is what docs/speed.md shows."""

    def run(self) -> None:
        """Measure and print seconds, page faults and memory."""
        from speed import allocator

        for case, ways in allocator.run(self.output)["cases"].items():
            for way, told in ways.items():
                print(f"{case}, {way}:", *(f"{name} {number:g}" for name, number in told.items()), sep="  ")
        print(self.output)


if __name__ == "__main__":
    sys.exit(app.main(prog="python -m speed"))
