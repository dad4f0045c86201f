"""What the tests run in processes of their own, to be killed, stopped or starved."""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from scalesteer import files
from scalesteer.app import checkpoint, cli, loop, train


def prepare(cache, log=None):
    os.environ["SCALESTEER_CACHE"] = cache
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    if log is not None:
        sys.stderr = sys.stdout = open(log, "a", buffering=1)  # noqa: SIM115


def run(cache, config, directory):
    """Train, quietly, with many checkpoints."""
    prepare(cache, os.devnull)
    checkpoint.SAVE_EVERY_S = 0.05
    train(config, Path(directory), device="cpu")


def command(cache, log, argv, phase, ready, linger):
    """Run a command line; say on `ready` when the phase is reached, and linger there for so many seconds."""
    prepare(cache, log)
    if linger < 1:  # then it has the time, also on a busy machine
        checkpoint.STOP_WITHIN_S = 300
    phases = {
        "training": (torch.optim.AdamW, "step"),
        "evaluating": (loop, "answer"),
        "saving": (files, "encode"),
    }
    owner, name = phases[phase]
    original = getattr(owner, name)

    def announced(*args, **options):
        ready.set()
        time.sleep(linger)
        return original(*args, **options)

    setattr(owner, name, announced)
    sys.exit(cli.main(argv))


def commands(cache, log, argvs):
    """Run one command line after another."""
    prepare(cache, log)
    for argv in argvs:
        cli.main(argv)


def with_little_disk(cache, log, argv, limit):
    """Run a command line where no file can grow beyond `limit` bytes."""
    prepare(cache, log)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    sys.exit(cli.main(argv))


def with_little_memory(cache, log, argv, room):
    """Run a command line that may take `room` bytes more than the process has now."""
    prepare(cache, log)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, resource.RLIM_INFINITY))
    sys.exit(cli.main(argv))


def experiment(cache, grid, folder):
    """Make the runs of an experiment."""
    from paper import run

    prepare(cache, os.devnull)
    run.make("1", grid, runs=Path(folder, "runs"), results=Path(folder, "results"), device="cpu")
