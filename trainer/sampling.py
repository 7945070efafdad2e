"""How the next token is chosen: the best one, or one drawn from the model's own distribution.

A draw uses no generator with a state. Its uniform number is a function of the sequence's key, which comes from the seed
and the number of what is answered, and of the new token's position. So an answer is the same in any batch, in any order
and after a resume, as far as the logits are: in float32 other batch sizes change their last bits, and a token changes
only when its uniform number falls between the two sums, about one draw in a million; in bfloat16 about one in a
hundred. Greedy answers change only where the two best logits are that close.

Shapes: B sequences, V vocabulary.
"""

from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor

Choose = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Next tokens [B] from logits [B, V], the sequences' keys [B] and the positions [B] that the tokens will have."""

BITS = 52
"""Of a uniform number: a float64 holds each of them, and its product with a sum stays below the sum."""
COLDEST = 1e-30
"""Of the temperatures: below it float32 knows only the best token, too, but may divide zero by zero."""
GOLDEN, FIRST, SECOND = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # splitmix64's, as signed numbers


def greedy(logits_BV: Tensor, keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """The best token each."""
    return logits_BV.argmax(dim=-1)


def sampling(temperature: float, top_p: float = 1.0, top_k: int | None = None) -> Choose:
    """Draws at a temperature, among the `top_k` best, and of these the fewest best whose share reaches `top_p`.

    Temperature 0 is greedy. The shares that top_p counts are those among the top_k, as in transformers and vLLM. Of
    equally good tokens at the cut of top_p the one with the smaller id stays.
    """
    if temperature == 0:
        return greedy

    def choose(logits_BV: Tensor, keys_B: Tensor, positions_B: Tensor) -> Tensor:
        logits, ids = logits_BV.float(), None
        # The best one becomes 0 first: no temperature then makes an infinity less another of it.
        logits = (logits - logits.amax(dim=-1, keepdim=True)).div_(max(temperature, COLDEST))
        if top_k is not None and top_k < logits.shape[-1]:
            logits, ids = logits.topk(top_k)
        elif top_p < 1:
            logits, ids = logits.sort(dim=-1, descending=True, stable=True)
        places = drawn(logits.softmax(dim=-1), uniform(keys_B, positions_B), top_p)
        return places if ids is None else ids.gather(-1, places[:, None])[:, 0]

    return choose


def drawn(chances_BV: Tensor, uniform_B: Tensor, top_p: float) -> Tensor:
    """Places drawn by chance; with top_p < 1, where they are sorted, among the first whose sum reaches it.

    Summed in float64: in float32 the sums of a large vocabulary stand still at its unlikely tokens, a third of all.
    """
    sums = chances_BV.cumsum(dim=-1, dtype=torch.float64)
    last = sums.new_full((len(sums), 1), sums.shape[-1] - 1, dtype=torch.long)
    if top_p < 1:
        last = torch.minimum(last, torch.searchsorted(sums, sums.new_full((len(sums), 1), top_p)))
    wanted = uniform_B[:, None] * sums.gather(-1, last)
    return torch.minimum(torch.searchsorted(sums, wanted, right=True), last)[:, 0]


def key_of(*parts: object) -> int:
    """A sequence's key: 64 bits, signed, of anything whose repr says what it is."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), signed=True)


def uniform(keys_B: Tensor, counters_B: Tensor) -> Tensor:
    """A number in [0, 1) for each key and counter: splitmix64's, in int64 arithmetic that wraps."""
    mixed = keys_B + counters_B * GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * SECOND
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 64 - BITS).double() * 2.0**-BITS


def _shifted(values: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in: torch's own shift brings the sign in."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
