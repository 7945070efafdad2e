"""Acceptance lengths as a decoder would meet them, walked over stored answers. Numpy only.

A decoder's cycle from token a gives a's accepted slots and one more token, the target's own: tau = accepted + 1. It
then stands on the last of them, so the next cycle starts at a + tau: tokens inside an accepted run start none. The mean
over all anchors, which is what training reports, counts them all alike; the walk visits those a decoder would:

    a = first token of the answer
    until a is the answer's last token:  tau = min(accepted(a) + 1, tokens left after a);  a += tau

Where the answers are the target's own greedy ones, this is speculate.decode_speculative's `accepted`, cycle for cycle.
Only a last cycle may differ, where the answer was cut by a limit and has no end token: the decoder counts what it
accepted beyond the limit, and nobody knows that here.

With accepted(a) for every anchor, both means are known: over anchors it is the mean of accepted(a) + 1, without the cap
at the answer's end (LossTerms.accepted / blocks); over cycles, of the tau above. So a walk's tau is at most one less
than the anchor's own figure, and that only where a block is right up to the answer's end.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.signedinteger[Any]]

UNMEASURED = -1


@dataclass(frozen=True)
class CycleFigures:
    """Acceptance lengths of many answers, bonus token included."""

    macro: float  # mean over answers of each answer's mean, as z-lab's benchmark; nan without a cycle
    micro: float  # mean over all cycles, as SGLang and vLLM
    histogram: dict[int, int]  # tau -> cycles that gave it, ascending
    answers: int  # those with a cycle: an answer of one token has none
    cycles: int


def answers_in(loss_mask_S: Bools, document_ids_S: Integers) -> list[tuple[int, int]]:
    """The answers of a row, each [first, end): the longest runs of supervised tokens inside one document."""
    supervised_S = loss_mask_S & (document_ids_S >= 0)
    goes_on_S = np.zeros(len(supervised_S), dtype=np.bool_)  # with the token before
    goes_on_S[1:] = supervised_S[1:] & supervised_S[:-1] & (document_ids_S[1:] == document_ids_S[:-1])
    firsts = np.flatnonzero(supervised_S & ~goes_on_S)
    ends = np.flatnonzero(supervised_S & ~np.append(goes_on_S[1:], False)) + 1
    return [(int(first), int(end)) for first, end in zip(firsts, ends, strict=True)]


def by_position(anchors_N: Integers, keep_N: Bools, accepted_N: Integers, row_tokens: int) -> Integers:
    """Each block's accepted slots, at its anchor's place in the row; -1 where no block was measured. [S]"""
    accepted_S = np.full(row_tokens, UNMEASURED, dtype=np.int64)
    accepted_S[anchors_N[keep_N]] = accepted_N[keep_N]
    return accepted_S


def answer_cycles(loss_mask_S: Bools, document_ids_S: Integers, accepted_S: Integers) -> list[list[int]]:
    """The tau of each cycle, answer by answer; an answer of one token has none.

    accepted_S: leading right slots of the block at each token of an answer but its last. Raises ValueError when the
    walk comes to a token that was not measured.
    """
    answers: list[list[int]] = []
    for first, end in answers_in(loss_mask_S, document_ids_S):
        cycles: list[int] = []
        at = first
        while at < end - 1:
            accepted = int(accepted_S[at])
            if accepted < 0:
                raise ValueError(f"no block was measured at token {at} of the row: a walk needs every anchor")
            cycles.append(min(accepted + 1, end - 1 - at))
            at += cycles[-1]
        answers.append(cycles)
    return answers


def summarise(answers: Sequence[Sequence[int]]) -> CycleFigures:
    """The figures of answers given as the tau of each of their cycles."""
    walked = [cycles for cycles in answers if cycles]
    counts = Counter(tau for cycles in walked for tau in cycles)
    total = counts.total()
    return CycleFigures(
        macro=sum(sum(cycles) / len(cycles) for cycles in walked) / len(walked) if walked else float("nan"),
        micro=sum(tau * count for tau, count in counts.items()) / total if total else float("nan"),
        histogram=dict(sorted(counts.items())),
        answers=len(walked),
        cycles=total,
    )
