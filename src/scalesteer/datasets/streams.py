"""Random bits that depend on a name and an index only, the same on every machine and numpy version."""

import hashlib

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def stream_key(*words: str | int) -> int:
    """The 64-bit key of the stream named by `words`."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, words)).encode()).digest()[:8], "little")


def random_bits(key: int | NDArray[np.uint64], index: Integers) -> NDArray[np.uint64]:
    """Number `index` of the SplitMix64 sequence that starts at `key`, without making those before it.

    >>> [f"{bits:016x}" for bits in random_bits(1234567, np.arange(2)).tolist()]
    ['599ed017fb08fc85', '2c73f08458540fa5']
    """
    bits = (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN + np.asarray(key, np.uint64)
    for shift, factor in _MIX:
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))


def random_below(key: int, index: Integers, bound: Integers) -> NDArray[np.int64]:
    """Integers in [0, bound), by the high half of a 32 x 32 bit product."""
    high = random_bits(key, index) >> np.uint64(32)
    return ((high * bound.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def random_uniform(key: int, index: Integers, low: float, high: float) -> NDArray[np.float32]:
    """Numbers uniform in (low, high); `low` itself where both are equal."""
    unit = ((random_bits(key, index) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return (low + (high - low) * unit).astype(np.float32)
