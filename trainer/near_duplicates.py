"""Texts that say nearly the same as one before, found by their shingles.

A text's shingles are its runs of three words, where a punctuation mark, and a letter of a script without spaces, is a
word. Two texts are near-duplicates when the shingles that they share are at least a given share of all that they have
(Jaccard). Texts with the same shingles are always found. Of the others, candidates are found by MinHash (Broder 1997)
in 16 bands of 4, which have nothing in common for 2 in 10,000 of the pairs that share 0.8. Each candidate is then
compared by the 256 smallest hashes of its shingles: exact for texts of up to 256 different shingles, an estimate
(standard deviation 0.025 at 0.8) beyond.

More are missed where many kept texts are alike without being near-duplicates, as those of one template: of the texts
with a band in common only the 64 newest are looked at, so that the time for a text has a bound.

Memory: about 2 KiB for each kept text of usual length and at most 4 KiB, whatever was dropped.
"""

import re
import unicodedata
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

WORDS = 3  # of a shingle
KEPT = 256  # hashes of a text
BANDS, ROWS = 16, 4
WALK = 64  # candidates of a band that are looked at, the newest first
WORD = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|\w+|[^\w\s]")

Hashes = npt.NDArray[np.uint64]


def shingles(text: str) -> Hashes:
    """The hashes of a text's shingles, sorted, each once. A text of fewer words is one shingle."""
    words = WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    runs = {" ".join(words[begin : begin + WORDS]) for begin in range(max(1, len(words) - WORDS + 1))}
    found = b"".join(blake2b(run.encode("utf-8", "replace"), digest_size=8).digest() for run in runs)
    return np.sort(np.frombuffer(found, dtype="<u8").astype(np.uint64))


def jaccard(one: Hashes, other: Hashes) -> float:
    """What two sets of shingles share, of all that they have; of sets cut off at KEPT, what their smallest share."""
    both = np.union1d(one, other)
    if max(len(one), len(other)) >= KEPT:
        both = both[:KEPT]
    shared = np.intersect1d(one, other, assume_unique=True)
    return float(np.isin(both, shared).mean())


class NearDuplicates:
    """The texts that were kept so far. The order of the texts decides which of two is kept: the first."""

    def __init__(self, share: float) -> None:
        """share: of the shingles, from which on two texts count as the same; 1: only equal sets."""
        self._share = share
        self._kept: list[Hashes] = []
        self._sets: set[bytes] = set()
        """Digests of the kept texts' shingles."""
        self._newest: dict[int, int] = {}
        """The last text with a band's value."""
        self._before: list[npt.NDArray[np.int32]] = []
        """For each text and band, the text before it with the same value, or -1."""
        draws = np.random.Generator(np.random.PCG64(20261129))
        # Multiply-shift: odd factors, wrapping; the high bits are used alone.
        self._factors = draws.integers(0, 2**63, BANDS * ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._terms = draws.integers(0, 2**63, BANDS * ROWS, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, text: str) -> bool:
        """Keep the text and say True; or False: a text like it was kept before."""
        found = shingles(text)
        digest = blake2b(found.tobytes(), digest_size=16).digest()
        if digest in self._sets:
            return False
        bands = self._bands(found)
        small = found[:KEPT]
        seen: set[int] = set()
        for band, value in enumerate(bands):
            other = self._newest.get(value, -1)
            for _ in range(WALK):
                if other < 0:
                    break
                if other not in seen:
                    seen.add(other)
                    if jaccard(small, self._kept[other]) >= self._share:
                        return False
                other = int(self._before[other][band])
        number = len(self._kept)
        self._sets.add(digest)
        self._kept.append(small.copy())
        self._before.append(np.array([self._newest.get(value, -1) for value in bands], dtype=np.int32))
        self._newest.update(dict.fromkeys(bands, number))
        return True

    def _bands(self, found: Hashes) -> list[int]:
        """A value of each band: equal for two texts when the smallest hashes of all its rows are."""
        smallest = np.min(
            [(found * factor + term) >> np.uint64(16) for factor, term in zip(self._factors, self._terms, strict=True)],
            axis=1,
        ).reshape(BANDS, ROWS)
        return [hash((band, *row)) for band, row in enumerate(smallest.tolist())]
