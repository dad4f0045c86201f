"""Images at another size, and the matrices that all resampling is made of."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import scalesteer.resize as module
from scalesteer.resize import matrix, multiply, resize, triangle
from tests.test_channels import spots


@pytest.mark.parametrize("size", [(10, 15), (33, 40), (20, 8), (7, 62), (1, 1), (20, 31)])
def test_resizing_is_that_of_an_antialiased_cubic_interpolation(size):
    x = torch.randn(2, 3, 20, 31, dtype=torch.float64, requires_grad=True)
    expected = F.interpolate(x, size=size, mode="bicubic", antialias=True, align_corners=False)
    actual = resize(x, size)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    for first, second in zip(*(torch.autograd.grad((y * weight).sum(), x) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.71, 1.41, 2, 4])
def test_resized_spots_miss_the_true_ones_by_at_most_three_quarters_of_linear_interpolation(factor):
    side, width = 64, 1.2 * max(1, 1 / factor)  # 1.2 pixels at the coarser of the two sizes
    small = round(side * factor)
    ratio = small / side
    place = (31.3, 30.1)
    true = spots(small, *[(*((p + 0.5) * ratio - 0.5 for p in place), width * ratio, 1.0)])
    x = spots(side, (*place, width, 1.0))
    linear = F.interpolate(x, size=(small, small), mode="bilinear", antialias=True)
    assert (resize(x, (small, small)) - true).norm() < 0.75 * (linear - true).norm()


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize(("length", "size"), [(28, 18), (28, 22), (28, 35), (28, 56), (40, 25), (7, 3), (5, 1), (1, 2)])
def test_linear_resizing_is_that_of_torch(length, size, antialias):
    x = torch.randn(1, 2, length, 6, dtype=torch.float64)
    step = length / size
    spread = step if antialias else 1.0
    rows = matrix(x, step / 2 - 0.5, step, size, length, triangle, spread)
    expected = F.interpolate(x, (size, 6), mode="bilinear", antialias=antialias)
    torch.testing.assert_close(multiply(x, rows, None), expected, rtol=0, atol=1e-12)


def test_places_beyond_the_line_read_its_ends():
    x = torch.arange(5.0, dtype=torch.float64)[None, None, :, None]
    rows = matrix(x, -3.0, 2.5, 5, 5, triangle, 1.0)  # at -3, -0.5, 2, 4.5 and 7
    assert multiply(x, rows, None).flatten().tolist() == [0, 0, 2, 4, 4]


def test_matrices_made_in_inference_mode_serve_training_later():
    x = torch.randn(1, 1, 13, 13, requires_grad=True)
    with torch.inference_mode():
        resize(x, (7, 19))
    resize(x, (7, 19)).square().sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("size", [(150, 900), (301, 201), (700, 403), (33, 1200)])
def test_a_large_image_is_resized_in_pieces_to_the_same_numbers(size, monkeypatch):
    x = torch.rand(1, 2, 301, 403, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = resize(x, size)
    monkeypatch.setattr(module, "LARGE", 100)
    monkeypatch.setattr(module, "PIECE", 64)
    found = resize(x, size)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    assert found.is_contiguous()
    assert not torch.equal(found, whole)  # by another way indeed


PEAK = """
import resource, torch
from scalesteer.resize import resize

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # MiB

resize(torch.rand(1, 3, 64, 2100), (80, 2500))  # what is made once
x = torch.rand(1, 3, 2100, 2100)
before = peak()
y = resize(x, (4200, 4200))
print(peak() - before - y.numel() * 4 / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory as Linux gives it")
def test_a_large_image_is_resized_without_another_copy():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50  # resized along one axis alone it has 101 MiB
