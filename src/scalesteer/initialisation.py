"""How coefficients start: filters that do not see the mean, at a size that keeps the variance of the signal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from scalesteer import harmonics


@lru_cache(maxsize=64)
def initial_mixing(basis: harmonics.LogRadialBasis, kernel_size: int, scales: tuple[float, ...]) -> harmonics.Float:
    """The matrix that turns unit Gaussian numbers into initial coefficients, before division by sqrt(fan-in).

    Two corrections. First, coefficients are projected so that the filter sums to zero at every scale. After a ReLU,
    maps have a large mean; a filter that sees the mean multiplies it by the number of its taps, so that the second
    moment would grow several-fold with each layer, and by a different factor in each draw. Second, one factor is set
    so that unit white noise that passes six such layers, each followed by a ReLU, keeps its second moment. The maximum
    over correlated scales has no closed form, so the factor is found by a small simulation (16 channels, fixed seed).
    A basis that cannot sum to zero (a single real function) has the second correction only.

    Shape: `(2 K J, 2 K J)`, symmetric.
    """
    steered = [harmonics.steered_basis(basis, kernel_size, s) for s in scales]
    steered = [b.reshape(-1, *b.shape[-2:]) for b in steered]  # (D, n, n) each
    mixing = sum_zero_mixing(steered)
    single = [b.astype(np.float32) for b in steered]
    gain = _simulated_gain(single, mixing.astype(np.float32), basis.point_symmetric)
    return np.asarray(mixing / math.sqrt(gain))


def sum_zero_mixing(steered: Sequence[harmonics.Float]) -> harmonics.Float:
    """The projection to filters that sum to zero at every scale, times a factor: their energy is 1 in the mean.

    It is of functions `(D, n, n)` at each scale; those that cannot sum to zero are only brought to that energy.
    """
    count = len(steered[0])
    sums = np.stack([b.sum((1, 2)) for b in steered])  # (S, D): what a flat region gives
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    _, values, directions = np.linalg.svd(sums / np.where(norms > 0, norms, 1), full_matrices=False)
    directions = directions[values > 1e-3 * values[0]]
    mixing = np.eye(count) - directions.T @ directions

    def energy(matrix: harmonics.Float) -> float:
        return float(sum(np.square(matrix @ b.reshape(count, -1)).sum() for b in steered))

    if energy(mixing) < 0.01 * energy(np.eye(count)):
        mixing = np.eye(count)
    return np.asarray(mixing / math.sqrt(energy(mixing) / len(steered)))


MOST_KEPT = 1 << 23  # numbers


def _transfer(functions: NDArray[np.float32], size: int, symmetric: bool) -> list[NDArray[np.float32]]:
    """The transform of windows `(D, n, n)` about their centre, `(D, F)`: real and, unless it vanishes, imaginary."""
    n = functions.shape[-1]
    padded = np.zeros((len(functions), size, size), dtype=np.float32)
    padded[:, :n, :n] = functions
    found = np.fft.rfft2(np.roll(padded, (-(n // 2), -(n // 2)), (1, 2))).reshape(len(functions), -1)
    return [part.astype(np.float32) for part in ((found.real,) if symmetric else (found.real, found.imag))]


def _simulated_gain(steered: list[NDArray[np.float32]], mixing: NDArray[np.float32], symmetric: bool) -> float:
    """Mean growth of the second moment in one layer, for white noise through six layers of 16 channels with ReLU."""
    channels, layers = 16, 6
    size = max(32, steered[-1].shape[-1] + 1)  # wraps around: no border, so that the image's size does not matter
    rng = np.random.default_rng(0)
    x = rng.standard_normal((channels, size, size), dtype=np.float32)
    # What is used again in every layer is made once, unless windows are so large that it would take much memory.
    frequencies = size * (size // 2 + 1)
    kept = len(steered) * len(mixing) * frequencies <= MOST_KEPT
    transfers = [_transfer(functions, size, symmetric) for functions in steered] if kept else []
    growth = 0.0
    for _ in range(layers):
        coefficients = rng.standard_normal((channels**2, len(mixing)), dtype=np.float32) @ mixing
        coefficients /= math.sqrt(channels)
        spectrum = np.fft.rfft2(x).reshape(channels, -1).astype(np.complex64)  # (C, F)
        best = np.zeros_like(x)  # the ReLU
        for i, functions in enumerate(steered):
            parts = transfers[i] if kept else _transfer(functions, size, symmetric)
            real, *imaginary = ((coefficients @ part).reshape(channels, channels, -1) for part in parts)
            product = (real * spectrum).sum(1)  # (C, F)
            for part in imaginary:  # a correlation multiplies by the conjugate
                product -= 1j * (part * spectrum).sum(1)
            best = np.maximum(best, np.fft.irfft2(product.reshape(channels, size, -1), s=(size, size)))
        moment = float(np.square(best).mean())
        x = (best / math.sqrt(moment)).astype(np.float32)
        growth += math.log(moment) / layers
    # Three digits, so that rounding in the simulation does not reach the weights.
    return float(f"{math.exp(growth):.3g}")
