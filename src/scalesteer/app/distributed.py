"""One training by several processes, as torchrun starts them: each takes its share of every batch, the first writes.

The processes hold the same weights. In each step the batch is divided among them, their gradients are averaged
(`DistributedDataParallel`), and batch normalisation sees the whole batch: the run means the same with any number of
processes. Only the first one touches the run's directory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalesteer.baselines import VectorBatchNorm2d
from scalesteer.files import Content

PATIENCE_S = 900  # for a process that makes or loads data, or writes files
STEP_S = 30  # for one that computes: their shares are alike, so that all are ready at about the same time
LOST = ("gloo", "NCCL", "pair closure")  # in messages of torch that have no type of their own

Part = TypeVar("Part")


class LostError(ConnectionError):
    """Another process of the training has ended or does not answer."""


@dataclass(frozen=True)
class Processes:
    """The processes that train one model together. Alone, the default, a process has nobody to ask.

    Whatever one of them calls here, with `count` above 1, all must call, in the same order.
    """

    rank: int = 0
    count: int = 1
    # Through torch's default group, which has patience, goes all that is not for these two.
    steps: dist.ProcessGroup | None = None  # sums on the device
    votes: dist.ProcessGroup | None = None  # numbers between steps

    def own_device(self, device: torch.device) -> torch.device:
        """The device of this process, by that of all: each has a GPU of its own."""
        if self.count == 1 or device.type != "cuda":
            return device
        local, here = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if device.index is not None:
            raise ValueError(f"`device` must be cuda with {self.count} processes, a GPU for each (got {device}).")
        if local >= here:
            raise ValueError(f"`device` cuda needs a GPU for each process: here are {here} (got process {local}).")
        return torch.device("cuda", local)

    def ready(self, device: torch.device) -> Processes:
        """The same processes, connected for steps on a device."""
        if self.count == 1:
            return self
        if device.type == "cuda":
            torch.cuda.set_device(device)
        steps = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=STEP_S))
        # The others may have to wait for the first one to write a file; it never has to wait for them.
        votes = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S if self.rank else STEP_S))
        return replace(self, steps=steps, votes=votes)

    def replicate(self, model: nn.Module) -> nn.Module:
        """What to call in steps in place of the model: its gradients become those of the whole batch.

        The model's own batch normalisation is changed, in place, to see the whole batch.
        """
        if self.count == 1:
            return model
        for layer in model.modules():
            if kind := SYNCHRONISED.get(type(layer)):
                layer.__class__ = kind  # all else, hooks too, stays
                vars(layer)["processes"] = self
        network = nn.parallel.DistributedDataParallel(model, process_group=self.steps)
        network.broadcast_buffers = False  # in steps they stay the same everywhere: they follow from the whole batch
        return network

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes, on each of them; its gradient is right too."""
        return values if self.count == 1 else _Mean.apply(values, self)  # type: ignore[no-untyped-call]

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, on each of them: of whole numbers exact."""
        if self.count > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.steps)
        return values

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        if self.count == 1:
            return number
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.votes)
        return int(numbers)

    def first(self, make: Callable[[], Any], *errors: type[ValueError]) -> Any:
        """What the first process makes, JSON-ready, on all of them; if it fails with one of `errors`, all do."""
        if self.count == 1:
            return make()
        said: tuple[int | None, Any] = (None, None)  # which of the errors, and its message or what was made
        failed: ValueError | None = None
        if self.rank == 0:
            try:
                said = None, make()
            except errors as error:
                failed, said = error, ([isinstance(error, kind) for kind in errors].index(True), str(error))
        text = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        length = torch.tensor(len(text))
        dist.broadcast(length, 0)
        text = text if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, 0)
        if failed is not None:
            raise failed
        kind, value = json.loads(bytes(text.tolist()))
        if kind is not None:
            raise errors[kind](value)
        return value

    def share(self, content: Content | None) -> Content | None:
        """Tensors on the CPU and their description, of which the first process has some or none, on all of them."""
        if self.count == 1:
            return content
        tensors, about = content or ({}, None)
        kinds = {name: (str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in tensors.items()}
        about, kinds = self.first(lambda: (about, kinds))
        for name, (dtype, shape) in kinds.items():
            tensor = tensors[name] if self.rank == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, 0)
            tensors[name] = tensor
        return None if about is None else (tensors, about)

    def loaded(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Parts of data, each when all processes have it: to make one may take some of them longer."""
        for part in parts:
            if self.count > 1:
                dist.barrier()
            yield part

    def __deepcopy__(self, memo: object) -> Processes:
        return self  # a copy of a model is of the same processes


ALONE = Processes()


def started() -> Processes:
    """The processes that torchrun started, by the environment variables that it sets; without it, one alone."""
    rank, count = (int(os.environ.get(name, -1)) for name in ("RANK", "WORLD_SIZE"))
    return Processes(rank, count) if rank >= 0 and count > 1 else ALONE


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes that torchrun started, connected with each other as long as this lasts.

    Raises:
        LostError: If another one ends or does not answer.
    """
    processes = started()
    if processes.count == 1:
        yield processes
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    try:
        yield processes
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in LOST):
            raise
        cause = re.sub(r"^\[.*?\] ", "", str(error)).partition(" This is typically")[0].strip(". ")
        why = f"another of the {processes.count} ended or does not answer ({cause})"
        raise LostError(f"process {processes.rank} stops, since {why}; repeat the command to go on.") from error
    finally:
        dist.destroy_process_group()


class _Mean(torch.autograd.Function):
    """The mean over processes, in double precision; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        total = values.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=processes.steps)
        return (total / processes.count).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.processes.mean(gradients[0]), None


def _statistics(x: Tensor, processes: Processes) -> tuple[Tensor, Tensor, int]:
    """Mean and variance of the channels `(B, C, ...)` of the whole batch, and of how many numbers they are."""
    variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
    mean, variance = mean.double(), variance.double()  # in which the difference of squares loses nothing that matters
    mean, square = processes.mean(torch.stack([mean, variance + mean**2])).unbind()
    return mean, (square - mean**2).clamp(min=0), processes.count * x.numel() // x.shape[1]


class SynchronisedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation by the statistics of all processes' batches, on any device; otherwise `nn.BatchNorm2d`.

    (`nn.SyncBatchNorm` knows GPUs only.) Every process must have equally many numbers.
    """

    processes: Processes

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance, count = _statistics(work, self.processes)
        with torch.no_grad():
            for kept, new in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
                if kept is not None and self.momentum is not None:
                    kept.lerp_(new.to(kept.dtype), self.momentum)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        shape = (-1, *(1,) * (x.ndim - 2))
        factor = self.weight * torch.rsqrt(variance + self.eps).to(work.dtype)
        return ((work - mean.to(work.dtype).view(shape)) * factor.view(shape) + self.bias.view(shape)).to(x.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        pass  # any


class SynchronisedVectorBatchNorm(VectorBatchNorm2d):
    """The same for vector fields."""

    processes: Processes

    def batch_variance(self, lengths: Tensor) -> tuple[Tensor, int]:
        _, variance, count = _statistics(lengths, self.processes)
        return variance.to(lengths.dtype), count


SYNCHRONISED: dict[type[nn.Module], Any] = {
    nn.BatchNorm1d: SynchronisedBatchNorm,
    nn.BatchNorm2d: SynchronisedBatchNorm,
    nn.BatchNorm3d: SynchronisedBatchNorm,
    VectorBatchNorm2d: SynchronisedVectorBatchNorm,
}
