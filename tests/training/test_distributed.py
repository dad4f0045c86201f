import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scalesteer import files
from scalesteer.baselines import VectorBatchNorm2d
from scalesteer.models import create_model, list_models
from scalesteer.training import RunConfig, evaluate, load, load_model, loop, train
from scalesteer.training.distributed import ALONE, LostError, joined, started
from tests.conftest import TINY
from tests.training import ranks

# Dropout, which each process draws for itself, is left out.
STILL = replace(TINY, dropout=0.0, lr=1e-4, schedule="constant", epochs=2)
CHANNELS = {"channels": (0.7, 1.0, 1.4), "join": "logsumexp"}


@pytest.fixture
def together(start):
    """Run a function of tests.training.ranks in several processes."""

    def begin(function, *arguments, count=2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return [start(function, (rank, count, port), *arguments) for rank in range(count)]

    return begin


def ended(processes):
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def test_gradients_are_those_of_one_process_with_the_whole_batch(together, cache, tiny, tmp_path):
    networks = [(name, {"dropout": 0.0}) for name in list_models()]
    networks += [("pooled-cnn", CHANNELS), ("steered-resnet", CHANNELS)]
    assert ended(together(ranks.gradients, networks, tiny, tmp_path)) == [0, 0]
    expected = ranks.gradients_of(networks, load(tiny, "train"), ALONE)
    for rank in "01":
        found, _ = files.read(tmp_path / rank)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close = {"rtol": 1e-9, "atol": 1e-9 * float(value.abs().max())}
            torch.testing.assert_close(found[name], value, **close, msg=lambda said, name=name: f"{name}: {said}")
