"""The drafter under training put to real decoding, on a schedule: held-out prompts, temperature 0, the live weights.

It runs in the loop's thread, between two steps, while the target's thread may run the target ahead for later ones. That
is safe: a pass only reads the target, by hand or by its own forward (hooks write for the thread that asked), and each
sequence has a cache of its own. Nothing compiles: decoding runs the drafter's and the target's modules themselves, not
what was compiled for training. Nothing is drawn at random, so the training goes on as if it had not happened.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.acceptance import CycleFigures, answers_in, summarise
from trainer.config import TrainConfig
from trainer.draft import DraftCache, DraftModel
from trainer.heldout import HeldoutFigures
from trainer.prepared import Prepared
from trainer.scores import Score
from trainer.speculate import SpeculativeDecoding, capacity
from trainer.start import TrainingError
from trainer.streams import moved
from trainer.target import TargetModel


class LiveDrafter:
    """The drafter as training runs it: on its own device, with autocast on a GPU, in float32 on the CPU."""

    def __init__(self, model: DraftModel, device: torch.device, target: TargetModel) -> None:
        self.config = model.config
        self._model, self._device, self._target = model, device, target

    def forward_cached(self, features_new: Tensor, embeds: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
        on_gpu = self._device.type == "cuda"
        # As FeatureBatch.to does.
        dtype = None if on_gpu else torch.promote_types(features_new.dtype, torch.float32)
        features_new, embeds = (moved(tensor, self._device, dtype) for tensor in (features_new, embeds))
        with torch.autocast(self._device.type, torch.bfloat16, enabled=on_gpu):
            hidden = self._model.forward_cached(features_new, embeds, moved(positions, self._device), cache)
        return moved(hidden, self._target.device, self._target.dtype)


class HeldoutDecoder:
    """Decodes the same prompts each time it is asked."""

    def __init__(
        self, target: TargetModel, model: DraftModel, device: torch.device, prompts: Sequence[list[int]], tokens: int
    ) -> None:
        """tokens: of an answer, at most. Raises TargetError when the target can't be decoded step by step."""
        target.new_cache(1)
        self._target, self._drafter = target, LiveDrafter(model, device, target)
        self._prompts, self._tokens = prompts, tokens

    def measure(self, stop: threading.Event, beat: Callable[[], None] = lambda: None) -> CycleFigures | None:
        """Acceptance over all prompts; None when `stop` cut the measurement. beat: called after each cycle."""
        answers: list[list[int]] = []
        for prompt in self._prompts:
            decoding = SpeculativeDecoding(self._target, self._drafter, prompt, self._tokens)
            while not decoding.full:
                if stop.is_set():
                    return None
                decoding.cycle()
                beat()
            answers.append(decoding.decoded().accepted)
        return summarise(answers)


def heldout_prompts(heldout: Prepared, target: TargetModel, count: int, tokens: int, block: int) -> list[list[int]]:
    """What comes before the last answer, of the first `count` conversations that leave room for `tokens` more.

    Raises TrainingError when there is none.
    """
    found: list[list[int]] = []
    for index in range(len(heldout)):
        document = heldout.document(index, target.longest)
        answers = answers_in(document.loss_mask, np.zeros(len(document), dtype=np.int64))
        prompt: list[int] = document.ids[: answers[-1][0]].tolist() if answers else []
        try:
            capacity(target, prompt, tokens, block)
        except ValueError:
            continue
        found.append(prompt)
        if len(found) == count:
            break
    if not found:
        raise TrainingError(
            f"train.decode_every: none of the {len(heldout):,} held-out conversations leaves room for an answer of "
            f"{tokens} tokens in the target's {target.longest:,} positions: lower train.decode_tokens"
        )
    return found


def heldout_decoder(
    config: TrainConfig,
    heldout: Prepared | None,
    target: TargetModel,
    model: DraftModel,
    device: torch.device,
    *,
    block: int,
) -> HeldoutDecoder | None:
    """What decodes held-out prompts meanwhile; None where that is not wanted. Raises TrainingError, TargetError."""
    settings = config.train
    if heldout is None or not settings.decode_every:
        return None
    prompts = heldout_prompts(heldout, target, settings.decode_prompts, settings.decode_tokens, block=block)
    return HeldoutDecoder(target, model, device, prompts, settings.decode_tokens)


@dataclass(frozen=True)
class Measuring:
    """What a training's scores depend on, beside the drafter."""

    heldout: str  # the held-out data's digest
    decoded: str | None  # settings of real decoding; None: nothing is decoded
    cycle: str  # settings of the walk through the held-out answers

    def score(self, heldout: HeldoutFigures | None, decoded: CycleFigures | None) -> Score | None:
        """How good the drafter is after a step: by decoding, else by the walk, if measured."""
        if decoded is not None and decoded.cycles:
            return Score(decoded.macro, "decoded", self.heldout, self.decoded or "")
        if heldout is not None and heldout.cycle_accept == heldout.cycle_accept:  # not nan
            return Score(heldout.cycle_accept, "cycle", self.heldout, self.cycle)
        return None

    def differs(self, name: str, best: Score) -> list[str]:
        """Says in a line how the scores to come stand to the best one so far, when they can't be compared."""
        how = self.cycle if self.decoded is None else self.decoded
        coming = Score(0.0, "cycle" if self.decoded is None else "decoded", self.heldout, how)
        if best.comparable(coming):
            return []
        found = f"the best checkpoint so far, {name} ({best}), can't be compared with what will be measured"
        if not best.same_data(coming):
            return [f"{found}, on other held-out data: {_FIRST}"]
        if best.measured == "decoded" and self.decoded is None:
            return [f"{found}, as nothing is decoded now: it stays the best one; set train.decode_every to compare"]
        return [f"{found}, which is {how}: {_FIRST}"]


_FIRST = "the first one measured anew takes its place; copy it elsewhere to keep it"


def measuring(config: TrainConfig, heldout: str) -> Measuring:
    """heldout: the digest of the held-out data."""
    settings = config.train
    decoded = f"{settings.decode_prompts} prompts, {settings.decode_tokens} tokens" if settings.decode_every else None
    return Measuring(heldout, decoded, f"rows of {config.data.row_tokens} tokens")
