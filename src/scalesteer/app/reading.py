"""Many picture files, read by several processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from scalesteer import files
from scalesteer.files import log

WORKERS = 4  # processes that read pictures, where there are as many processors
Source = TypeVar("Source")
Result = TypeVar("Result")


def read_all(sources: Sequence[Source], read: Callable[[Source], Result], workers: int) -> Iterator[Result]:
    """All pictures in their order. If processes cannot be had or die, the rest is read in this one."""
    files.require("PIL.Image")  # told here, once
    done = 0
    if workers:
        # A fork would inherit the threads' locks; and an interrupt is for this process to handle.
        spawn, quiet = get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
        pool = ProcessPoolExecutor(workers, spawn, initializer=signal.signal, initargs=quiet)
        try:
            for result in pool.map(read, sources, chunksize=8):
                yield result
                done += 1
        except (OSError, RuntimeError, AssertionError) as error:  # the last: daemons may not start processes
            log.warning("processes that read pictures failed (%s): going on with one.", " ".join(str(error).split()))
        finally:
            pool.shutdown(cancel_futures=True)
    yield from map(read, sources[done:])


def usable() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> int:
    """Processes to read with, 0 where this one does as well alone."""
    count = usable()
    return min(WORKERS, count) if count > 1 else 0
