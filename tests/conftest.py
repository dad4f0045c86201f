"""Shared by all tests: one thread a worker (two workers share two cores), and a fixed seed."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# Deadlines measure the machine's other load, and a random failure nobody can repeat helps nobody.
settings.register_profile("scalesteer", deadline=None, derandomize=True)
settings.load_profile("scalesteer")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
