"""Pieces of work in processes: results, what is said meanwhile, and how they end."""

import multiprocessing
import os
import signal
import time
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch

from paper import side_by_side
from scalesteer import files


@dataclass(frozen=True)
class Sum:
    """Adds numbers, slowly if asked to."""

    last: int
    pause: float = 0.0

    @property
    def work(self):
        return float(self.last)

    def do(self, say):
        total = 0
        for number in range(self.last + 1):
            total += number
            say(f"adding {self.last}", number)
            time.sleep(self.pause)
        return total, torch.get_num_threads(), os.getpid()


@dataclass(frozen=True)
class Fatal:
    """Ends badly: by an error, or with its process."""

    code: int = 0
    work: float = 1.0

    def do(self, say):
        if self.code:
            os._exit(self.code)
        raise ValueError("`this` must be that.")


def test_processes_share_the_work_and_say_how_far_they_are(monkeypatch, capsys):
    monkeypatch.setattr(files, "LOG_EVERY_S", 0.2)
    pieces = [Sum(10, 0.02), Sum(60, 0.03), Sum(70, 0.03)]
    with closing(side_by_side.do_all(pieces, 2)) as results:
        found = dict([next(results)])
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # only where processes start
        found |= dict(results)
    assert [found[number][0] for number in range(3)] == [55, 1830, 2485]
    assert {threads for _, threads, _ in found.values()} == {1}
    used = {process for _, _, process in found.values()}
    assert len(used) == 2
    assert os.getpid() not in used
    assert multiprocessing.active_children() == []
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("adding 60; adding 70, about ") and line.endswith(" left") for line in lines)


def test_one_process_is_this_one_with_one_thread_for_the_time():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert list(side_by_side.do_all([Sum(3), Sum(4)], 1)) == [(0, (6, 1, os.getpid())), (1, (10, 1, os.getpid()))]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_without_a_terminal_a_line_comes_from_time_to_time(monkeypatch, capsys):
    monkeypatch.setattr(files, "LOG_EVERY_S", 0.1)
    list(side_by_side.do_all([Sum(20, 0.02), Sum(20, 0.02)], 1))
    lines = capsys.readouterr().out.splitlines()
    assert 3 < len(lines) < 12
    assert all(line.startswith("adding 20, about ") for line in lines)


@pytest.mark.parametrize(("code", "error"), [(0, "`this` must be that"), (9, r"a process ended \(exit status 9\)")])
def test_a_piece_that_fails_or_dies_ends_all_processes(code, error):
    with pytest.raises(RuntimeError if code else ValueError, match=error):
        list(side_by_side.do_all([Fatal(code), Sum(1000, 0.1)], 2))
    assert multiprocessing.active_children() == []


def test_no_more_processes_than_cores_suit_a_machine():
    assert 1 <= side_by_side.cores() <= min(side_by_side.MOST, os.cpu_count())
