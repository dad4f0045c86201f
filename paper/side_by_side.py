"""Pieces of work in processes side by side, one thread each: two trainings on two cores, told how far they are.

A process of one thread uses a core fully, which two threads on small images do not, and its CPU time is what its work
cost. Each process is given one piece after the other through a pipe; when the process that gives them ends, they end.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

import torch

from scalesteer import files
from scalesteer.app.estimate import in_words
from scalesteer.app.memory import keep_memory
from scalesteer.app.reading import usable

MOST = 4  # processes: more hardly pay here, and each takes half a gigabyte
TELL_EVERY_S = 0.5  # how often a process says how far it is
Say = Callable[[str, float], None]  # what is being done, and how much of the work of the piece is done


class Piece(Protocol):
    """A piece of work, which pickles; `work` is in the same unit for all."""

    @property
    def work(self) -> float: ...

    def do(self, say: Say) -> Any: ...


def cores() -> int:
    """How many processes suit this machine."""
    return min(usable(), MOST)


def do_all(pieces: Sequence[Piece], processes: int, unit: str = "step") -> Generator[tuple[int, Any]]:
    """Do pieces of work, the first ones first; as each ends, its number and its result come back.

    On a terminal one bar shows how far all are together, elsewhere a line every ten seconds. Whoever leaves early, by
    an interrupt or an error, ends the processes.

    Raises:
        RuntimeError: If a process ended, killed for its memory for example.
        Exception: Whatever a piece raised, which is sent here.
    """
    progress = _Progress(pieces, unit)
    with progress.bar:
        if min(processes, len(pieces)) < 2:
            for number, piece in enumerate(pieces):
                with one_thread():
                    result = piece.do(lambda doing, done, number=number: progress.tell(number, doing, done))  # type: ignore[misc]
                progress.tell(number, "", piece.work)
                yield number, result
            return
        yield from _beside(pieces, min(processes, len(pieces)), progress)


def _beside(pieces: Sequence[Piece], processes: int, progress: _Progress) -> Iterator[tuple[int, Any]]:
    waiting, open_pipes = iter(enumerate(pieces)), dict[Any, SpawnProcess]()
    begun: dict[Any, int] = {}  # the piece that a process has

    def give(pipe: Any) -> None:
        number, piece = next(waiting, (-1, None))
        if piece is None:
            pipe.close()
            open_pipes.pop(pipe).join()
        else:
            begun[pipe] = number
            pipe.send(piece)

    try:
        with _interrupts_held():
            for _ in range(processes):
                pipe, process = _start()
                open_pipes[pipe] = process
        for pipe in list(open_pipes):
            give(pipe)
        while open_pipes:
            ready: list[Any] = connection.wait(list(open_pipes), timeout=1.0)
            for pipe in ready:
                try:
                    kind, *rest = pipe.recv()
                except EOFError:
                    open_pipes[pipe].join()
                    code = open_pipes[pipe].exitcode
                    raise RuntimeError(f"a process ended (exit status {code}): is there too little memory?") from None
                if kind == "told":
                    progress.tell(begun[pipe], *rest)
                    continue
                if kind == "failed":
                    raise rest[0]
                number = begun[pipe]
                progress.tell(number, "", pieces[number].work)
                give(pipe)
                yield number, rest[0]
            progress.show()
    finally:
        for process in open_pipes.values():
            process.terminate()
        for process in open_pipes.values():
            process.join()


def _start() -> tuple[Any, SpawnProcess]:
    """A process that waits for work. It is started afresh: a copy of this one could hang in torch's threads."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there,), daemon=True)
    process.start()
    there.close()  # so that its end is seen here
    return here, process


def _work(pipe: Any) -> None:
    """The process: does what comes through the pipe, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it is interrupted too, and ends it
    torch.set_num_threads(1)
    keep_memory()
    told = 0.0

    def say(doing: str, done: float) -> None:
        nonlocal told
        if time.monotonic() - told >= TELL_EVERY_S:
            told = time.monotonic()
            pipe.send(("told", doing, done))

    try:
        while True:
            piece = pipe.recv()
            try:
                message = ("done", piece.do(say))
            except Exception as error:  # it is raised where it is read
                message = ("failed", error)
            pipe.send(message)
    except (EOFError, OSError):  # there is no more, or nobody who listens
        return


def say_line(line: str) -> None:
    """Print a line, clear of the bar."""
    files.require("tqdm").tqdm.write(line)
    sys.stdout.flush()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let interrupts wait, here and for ever in processes that are started meanwhile, which else complain of them."""
    if not hasattr(signal, "pthread_sigmask"):  # not POSIX
        yield
        return
    resource_tracker.ensure_running()  # a process of multiprocessing itself, whose start would let them through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Progress:
    """How far all pieces are: a bar on a terminal, a line from time to time elsewhere."""

    def __init__(self, pieces: Sequence[Piece], unit: str) -> None:
        self.total, self.unit = sum(piece.work for piece in pieces), unit
        self.done, self.doing = [0.0] * len(pieces), [""] * len(pieces)
        self.began = self.shown = time.monotonic()
        form = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"
        self.bar = files.progress_bar(total=self.total, bar_format=form)

    def tell(self, number: int, doing: str, done: float) -> None:
        self.done[number], self.doing[number] = done, doing
        self.show()

    def show(self) -> None:
        now, done = time.monotonic(), sum(self.done)
        doing = "; ".join(words for words in self.doing if words)
        if not self.bar.disable:
            self.bar.set_description_str(doing, refresh=False)
            self.bar.update(done - self.bar.n)
        elif now - self.shown >= files.LOG_EVERY_S:
            self.shown = now
            rest = (self.total - done) * (now - self.began) / done if done else 0.0
            left = f", about {in_words(rest)} left" if rest else ""
            say_line(f"{doing or 'starting'}{left}")
