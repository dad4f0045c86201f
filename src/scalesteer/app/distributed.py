"""One training by several processes, as torchrun starts them: each takes its share of every batch, the first writes.

Gradients are averaged (`DistributedDataParallel`) and batch normalisation sees the whole batch, so that a run means the
same with any number of processes.
"""

import atexit
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalesteer.app.batchnorm import SYNCHRONISED, mean_of_all

PATIENCE = timedelta(minutes=15)  # with a process that makes data, writes files or does not answer


class LostError(ConnectionError):
    """Another process of the training has ended or does not answer."""


@dataclass(frozen=True)
class Processes:
    """The processes that train one model together; alone, the default, one has nobody to ask.

    Whatever one of them calls here, all must call, in the same order.
    """

    rank: int = 0
    count: int = 1

    def replicate(self, model: nn.Module) -> nn.Module:
        """What to call in steps in place of the model, whose batch normalisation is changed to see the whole batch."""
        if self.count == 1:
            return model
        for layer in model.modules():
            layer.__class__ = SYNCHRONISED.get(type(layer), type(layer))  # all else, hooks too, stays
        network = nn.parallel.DistributedDataParallel(model)
        network.broadcast_buffers = False  # they follow from the whole batch: the same everywhere
        return network

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, on each of them: of whole numbers exact."""
        if self.count > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes, on each of them."""
        return values if self.count == 1 else mean_of_all(values)

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        numbers = torch.tensor(number)
        if self.count > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)

    def first(self, make: Callable[[], Any], *errors: type[ValueError]) -> Any:
        """What the first process makes, on all of them; if it fails with one of `errors`, all do."""
        said: list[Any] = [None, None]
        try:
            if self.rank == 0:
                said[0] = make()
        except errors as error:
            said[1] = error
        if self.count > 1:
            dist.broadcast_object_list(said, 0)
        if said[1] is not None:
            raise said[1]
        return said[0]


ALONE = Processes()


def started() -> Processes:
    """The processes that torchrun started, by the environment variables that it sets; without it, one alone."""
    rank, count = (int(os.environ.get(name, -1)) for name in ("RANK", "WORLD_SIZE"))
    return Processes(rank, count) if rank >= 0 and count > 1 else ALONE


# The last group. Its threads let go of tensors late, and need Python's lock for it. Its end waits for them: if Python
# lets go of the group last, it gives the lock away, `DistributedDataParallel` does not, and both would wait for ever.
_kept: list[Any] = []
atexit.register(lambda: time.sleep(0.5 if _kept else 0))  # a thread that wants the lock later aborts the process


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes that torchrun started, connected as long as this lasts; a LostError if one of them ends."""
    processes = started()
    if processes.count == 1:
        yield processes
        return
    each = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # NCCL wants a GPU for each
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if each else "gloo", timeout=PATIENCE)
        _kept[:] = [dist.group.WORLD]
        yield processes
    except BaseException as error:
        for group in _kept:  # perhaps with a message on its way: its end would wait for the others' part
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # so it never ends
        lost = isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL"))
        if not (lost and isinstance(error, RuntimeError)):
            raise
        why = f"another of the {processes.count} ended or does not answer ({' '.join(str(error).split())[:150]})"
        raise LostError(f"process {processes.rank} stops, since {why}; repeat the command to go on.") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
