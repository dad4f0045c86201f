"""The thread that asks the networks: one request after the other, and what can wait while there is none."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from scalesteer.app.demo import protections

NOW, LATER, END = 0, 1, -1  # what is done first
log = logging.getLogger("scalesteer")


class BusyError(Exception):
    """As many requests wait as may."""


class Worker:
    """Does one thing at a time in a thread of its own, in the order in which they come.

    `MOST_WAITING` things may be there, with the one that is worked on.
    """

    def __init__(self) -> None:
        self._things = queue.PriorityQueue[tuple[int, int, Callable[[], Any], Future[Any]]]()
        self._number, self._lock, self.waiting = itertools.count(), threading.Lock(), 0
        # The end of the process does not wait for an answer.
        self._thread = threading.Thread(target=self._work, name="scalesteer-demo", daemon=True)
        self._thread.start()

    def ask(self, thing: Callable[[], Any]) -> "Future[Any]":
        """What a function returns, when it is its turn; it is left out if nobody waits for it any more.

        Raises:
            BusyError: If too many are waiting.
        """
        with self._lock:
            if self.waiting >= protections.MOST_WAITING:
                raise BusyError
            self.waiting += 1
        future = Future[Any]()
        future.add_done_callback(self._leave)
        self._things.put((NOW, next(self._number), thing, future))
        return future

    def later(self, thing: Callable[[], Any]) -> None:
        """Do something when nobody waits."""
        self._things.put((LATER, next(self._number), thing, Future()))

    def end(self, seconds: float) -> None:
        """Finish what is being done, if it does not take longer, and nothing else."""
        self._things.put((END, next(self._number), lambda: None, Future()))
        self._thread.join(seconds)

    def is_working(self) -> bool:
        """Whether something is done after the end."""
        return self._thread.is_alive()

    def _leave(self, _: "Future[Any]") -> None:
        with self._lock:
            self.waiting -= 1

    def _work(self) -> None:
        while True:
            kind, _, thing, future = self._things.get()
            if kind == END:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(thing())
            except Exception as error:  # whoever waits for it is told
                future.set_exception(error)
                if kind == LATER:
                    log.exception("a network of the page cannot be used")
