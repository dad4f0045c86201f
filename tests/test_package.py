"""The package as a whole: what an import costs and needs, and which names are public."""

import subprocess
import sys

import scalesteer

IMPORT = """
import sys, time
import numpy, torch
before, start = set(sys.modules), time.thread_time()
import scalesteer
print(time.thread_time() - start)
print(*sorted({m.split(".")[0] for m in set(sys.modules) - before}))
"""


def test_import_is_fast_and_needs_only_torch_and_numpy():
    shown = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
    seconds, modules = shown.splitlines()
    assert float(seconds) < 0.1
    assert set(modules.split()) <= {"scalesteer", "torch", "numpy", *sys.stdlib_module_names}


def test_public_names_are_these():
    assert set(scalesteer.__all__) == {
        "PAPER_SCALES",
        "FoldedScaleConv2d",
        "LogRadialBasis",
        "ScaleSteerableConv2d",
        "create_model",
        "fold",
        "list_models",
    }
    assert all(hasattr(scalesteer, name) for name in scalesteer.__all__)
