"""A seeded order of n things that is computed, not stored: any part of it, in any place, in constant memory.

A Feistel network is a permutation of 2**bits numbers whatever its round function is; numbers that land beyond n are
sent through it again until they come back below n ("cycle walking": J. Black and P. Rogaway, "Ciphers with arbitrary
finite domains", CT-RSA 2002). With 2**bits < 2n that takes fewer than two passes on average. The round function mixes
by multiplications and shifts; nothing here is secret, the order only has to look drawn. It depends on no library's
random stream, so it is the same with every version of numpy.
"""

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 8

Integers = npt.NDArray[np.int64]


class Permutation:
    """A bijection of [0, size), chosen by a key of whole numbers."""

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        if not 0 < size <= 2**62:
            raise ValueError(f"a permutation of {size} things")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low = np.uint64((1 << (bits // 2)) - 1)
        self._high = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = [
            np.array([int.from_bytes(hashlib.sha256(repr((key, number)).encode()).digest()[:8], "little")], np.uint64)
            for number in range(ROUNDS)
        ]

    def __call__(self, indices: Integers) -> Integers:
        """Where each index goes."""
        values = self._once(indices.astype(np.uint64))
        size = np.uint64(self.size)
        while (beyond := np.flatnonzero(values >= size)).size:
            values[beyond] = self._once(values[beyond])
        return values.astype(np.int64)

    def _once(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """One pass through the network: each round changes one half by a function of the other."""
        low, high = values & self._low, values >> self._low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                low = low ^ (_mixed(high, key) & self._low)
            else:
                high = high ^ (_mixed(low, key) & self._high)
        return (high << self._low_bits) | low


def _mixed(values: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of the outcome depends on every bit of value and key; sums and products wrap, as meant."""
    mixed = (values + key) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    mixed = (mixed + key) * np.uint64(0xA24BAED4963EE407)
    return mixed ^ (mixed >> np.uint64(29))
