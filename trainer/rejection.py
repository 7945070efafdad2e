# pyright: reportUnknownMemberType=false
# (torch's random functions are partly untyped)
"""Sampling at a temperature, and the rule by which a drafter's proposals leave the target's distribution as it is.

A draft d, drawn from the drafter's distribution q, is accepted with the chance min(1, p(d) / q(d)), p being the
target's. The first that is rejected is replaced by a token drawn from max(p - q, 0), normed; where all are accepted
one more is drawn from the target's next p. Each token is then distributed as p, whatever q is:

    q(t) min(1, p(t) / q(t))  +  (1 - sum of min(p, q)) * max(p(t) - q(t), 0) / (1 - sum of min(p, q))  =  p(t)

The slots of a block are drawn each by itself: the drafter gives them independent distributions. That a slot does not
know what was drawn before it costs acceptance, never correctness. The same holds with top-p: p is the target's own
truncated distribution, and q may be truncated in any way, as long as the drafts are drawn from it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: the same seed, device and calls draw the same tokens."""

    temperature: float
    top_p: float
    generator: torch.Generator

    def probabilities(self, logits_QV: Tensor) -> Tensor:
        """What tokens are drawn from, [Q, V], float32."""
        logits_QV = logits_QV.float()
        # The best one first becomes 0: any temperature above 0 then divides without an infinity less another.
        probabilities_QV = ((logits_QV - logits_QV.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_p >= 1:
            return probabilities_QV
        sorted_QV, order_QV = probabilities_QV.sort(dim=-1, descending=True, stable=True)
        before_QV = sorted_QV.cumsum(-1) - sorted_QV
        kept_QV = torch.zeros_like(sorted_QV).scatter_(-1, order_QV, sorted_QV.masked_fill(before_QV >= self.top_p, 0))
        return kept_QV / kept_QV.sum(-1, keepdim=True)

    def draw(self, weights_QV: Tensor) -> Tensor:
        """One token for each row of weights, [Q]; they need not sum to 1.

        A race: the first arrival, at exponential times whose rates are the weights. As torch.multinomial for one draw,
        which besides waits for the device, to look at the weights.
        """
        times_QV = torch.empty_like(weights_QV).exponential_(generator=self.generator)
        return (weights_QV / times_QV.clamp_(min=1e-30)).argmax(dim=-1)

    def verify(self, drafts_P: Tensor, drafted_PV: Tensor, own_CV: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the leading drafts are accepted, and the token that the target adds behind them; two scalars.

        drafted_PV: what the drafts were drawn from; own_CV: the target's distribution at each draft's place, and at
        the one behind the last: C = P + 1. Nothing here waits for the device.
        """
        places_P1, own_PV = drafts_P[:, None], own_CV[:-1]
        chances_P = torch.rand(drafts_P.shape, device=drafts_P.device, generator=self.generator)
        accepted_P = chances_P * drafted_PV.gather(1, places_P1)[:, 0] < own_PV.gather(1, places_P1)[:, 0]
        count = accepted_P.long().cumprod(0).sum()
        left_PV = (own_PV - drafted_PV).clamp(min=0)
        # Equal but for rounding, and rejected by rounding: nothing is left to draw from, and p is right.
        left_PV = torch.where(left_PV.sum(-1, keepdim=True) > 0, left_PV, own_PV)
        weights_CV = torch.cat((left_PV, own_CV[-1:]))
        return count, self.draw(weights_CV.index_select(0, count[None]))[0]


def seeded_sampling(temperature: float, top_p: float, seed: int, device: torch.device | str) -> Sampling | None:
    """How tokens are drawn; None at temperature 0, which takes the best one. Raises ValueError."""
    if not (0 <= temperature < float("inf") and 0 < top_p <= 1):
        raise ValueError(f"temperature {temperature} must be 0 or more, top-p {top_p} above 0 and at most 1")
    if temperature == 0:
        return None
    return Sampling(temperature, top_p, torch.Generator(device).manual_seed(seed))
