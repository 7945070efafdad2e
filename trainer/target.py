# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeArgument=false
# (transformers gives its Auto classes, configs and tokenizers no types)
"""The frozen target model: its features for the drafter, and its own decoding steps.

Shapes: B rows, S tokens of a row, Q new tokens, H hidden size, V vocabulary, K captured layers, F = K*H.

Llama and Qwen3 are run by hand (byhand.py), every other causal language model of transformers by its own forward
(hooked.py). In both, attention is confined to documents by our own mask, and a model is proved at loading to be what we
take it for (proofs.py); one that is not is refused with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from trainer import fast_target, sizes, vocabulary
from trainer.byhand import FAMILIES, ByHand, runs_by_hand
from trainer.caches import TargetCache
from trainer.draft_config import DraftConfig
from trainer.fast_target import Compile, FastLayers, as_it_is
from trainer.fp8 import why_not as fp8_why_not
from trainer.hooked import Hooked, Parts
from trainer.proofs import prove
from trainer.refused import TargetError, check_config, text_config
from trainer.spread import spread
from trainer.streams import moved
from trainer.vocabulary import Counts, check_vocabulary


@dataclass(frozen=True)
class Step:
    """What one pass through the whole target gives: logits [Q, V] and the captured features [1, Q, F]."""

    logits_QV: Tensor
    features_BQF: Tensor


class TargetModel:
    """A frozen causal language model with its tokenizer. `tokenizer` may be None where no text is read or made."""

    def __init__(self, model: Any, tokenizer: Any = None, *, proved: bool = False) -> None:
        """proved: also prove a model that is run by hand; every other one is, in any case. Raises TargetError."""
        check_config(model.config)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = text_config(model.config)
        parts = Parts(model)
        check_vocabulary(len(parts.embedding.weight), len(parts.head.weight), self.config.vocab_size, tokenizer)
        self._runner: ByHand | Hooked = ByHand(model) if runs_by_hand(model.config) else Hooked(parts)
        if proved or isinstance(self._runner, Hooked):
            prove(self._runner, parts)
        self.num_layers: int = self.config.num_hidden_layers
        self.head_dim = sizes.head_dim(self.config)
        self._longest_row = sizes.fixed_positions(self.config)

    @property
    def device(self) -> torch.device:
        """Of all that it gives; where it is spread over devices, the last one."""
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def head_weight(self) -> Tensor:
        """The output head, [V, H]; the input embedding itself where the model ties them."""
        return self._runner.head_VH

    @property
    def embedding_scale(self) -> float:
        """What a row of the embedding is multiplied by before it enters layer 0."""
        return self._runner.embedding_scale

    @property
    def logit_scale(self) -> float:
        """What the head's product is multiplied by: logits = logit_scale * (final @ head.T)."""
        return self._runner.logit_scale

    @property
    def longest(self) -> int:
        """The most positions that a text may have."""
        return min(sizes.max_positions(self.config), self._longest_row or sizes.max_positions(self.config))

    @property
    def by_hand(self) -> ByHand:
        """The layers, to be run one by one. Raises TargetError for a model that is not run so."""
        if isinstance(self._runner, ByHand):
            return self._runner
        raise TargetError(f"{self.config.model_type} models can't be run by hand; only {' and '.join(FAMILIES)} can")

    def embedding(self, ids: Tensor) -> Tensor:
        """The input embeddings of token ids as they enter layer 0, [..., H], on the ids' device."""
        rows = moved(functional.embedding(self._entering(ids), self._runner.embedding_VH), ids.device)
        scale = self.embedding_scale
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype, device=rows.device)

    def features(
        self,
        input_ids_BS: Tensor,
        document_ids_BS: Tensor,
        positions_BS: Tensor,
        layer_ids: Sequence[int],
    ) -> Tensor:
        """The residual stream after each of `layer_ids`, side by side in their order, [B, S, K*H].

        document_ids_BS: one id for each token, a document's tokens side by side, -1 for padding; on the CPU or here.
        positions_BS: each token's position in its own document. The pass ends after the last of the layers.
        """
        return self._documents(input_ids_BS, document_ids_BS, positions_BS, layer_ids, final=False)[0]

    def features_and_final(
        self,
        input_ids_BS: Tensor,
        document_ids_BS: Tensor,
        positions_BS: Tensor,
        layer_ids: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """The same from a pass through the whole model, and the last norm's output, which its head reads, [B, S, H]."""
        features, final = self._documents(input_ids_BS, document_ids_BS, positions_BS, layer_ids, final=True)
        assert final is not None
        return features, final

    @torch.no_grad()
    def _documents(
        self, ids_BS: Tensor, document_ids_BS: Tensor, positions_BS: Tensor, layer_ids: Sequence[int], *, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self._longest_row is not None and ids_BS.shape[1] > self._longest_row:
            raise TargetError(sizes.too_long(self.config, ids_BS.shape[1]))
        ids_BS, positions_BS = self._entering(ids_BS), self._entering(positions_BS)
        return self._runner.documents(ids_BS, document_ids_BS, positions_BS, layer_ids, final=final)

    def _entering(self, ids: Tensor) -> Tensor:
        """Where its first layers are, which for a target that is spread over devices is not where its head is."""
        return moved(ids, self._runner.embedding_VH.device)

    def prepare(
        self,
        rows: int,
        row_tokens: int,
        layer_ids: Sequence[int],
        *,
        final: bool = False,
        fp8: bool = False,
        compiled: Compile = as_it_is,
    ) -> None:
        """Makes `features` (final: `features_and_final`) of such rows fast, and compiles all that it runs for them.

        To be called while no other thread uses torch. Rows of another shape go on as before. compiled: how a function
        is compiled. Raises TargetError where fp8 is asked for and can't be had; else a target that can't be run so is
        left as it is.
        """
        reason = fast_target.why_not(self._runner) if isinstance(self._runner, ByHand) else "it is not run by hand"
        if fp8 and (reason := reason or fp8_why_not(self.device)):
            raise TargetError(f"target.fp8 is not possible here: {reason}")
        if reason or not isinstance(self._runner, ByHand):
            return
        self._runner.fast = FastLayers(self._runner, rows=rows, row_tokens=row_tokens, fp8=fp8, compiled=compiled)
        ids_BS = torch.zeros(rows, row_tokens, dtype=torch.int64)
        positions_BS = torch.arange(row_tokens).expand_as(ids_BS)
        halves_BS = (
            positions_BS >= row_tokens // 2
        ).long()  # and what many documents use, where that is another kernel
        for document_ids_BS in (ids_BS, halves_BS):
            self._documents(ids_BS, document_ids_BS, positions_BS, layer_ids, final=final)

    def new_cache(self, capacity: int) -> TargetCache:
        """For one sequence of at most `capacity` tokens. Raises TargetError when the model can't be decoded so."""
        return self._runner.new_cache(capacity)

    @torch.no_grad()
    def step(self, ids_Q: Tensor, cache: TargetCache, layer_ids: Sequence[int] = (), last: int = 0) -> Step:
        """Run the next tokens of one sequence through the whole model, behind what the cache holds, and commit them.

        last: how many of the last positions to give logits for (0: all).
        """
        cache.make_room(len(ids_Q))
        final_QH, features_BQF = self._runner.step(self._entering(ids_Q), cast("Any", cache), layer_ids, last)
        return Step(self.logits(final_QH), features_BQF)

    def logits(self, final_QH: Tensor) -> Tensor:
        """The head, and the model's own factor, over outputs of the last norm, [Q, V]."""
        logits = functional.linear(final_QH, self.head_weight)
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale

    # --- what a drafter for this target looks like ---------------------------------------------------------------

    def mask_token(self, wanted: int | None = None, counts: Counts | None = None) -> int:
        """The token id that stands for "not yet known" in a block: see vocabulary.mask_token.

        counts: how often each id occurs in the data.
        """
        size = int(self.config.vocab_size)
        return vocabulary.mask_token(self.tokenizer, size, self.end_tokens(), wanted, counts)

    def end_tokens(self) -> frozenset[int]:
        """The ids that end an answer: the generation config's, else the tokenizer's."""
        found = getattr(self.model.generation_config, "eos_token_id", None)
        if found is None and self.tokenizer is not None:
            found = self.tokenizer.eos_token_id
        if found is None:
            return frozenset()
        return frozenset(cast("list[int]", found)) if isinstance(found, list) else frozenset([int(found)])

    def draft_config(
        self,
        num_layers: int,
        block_size: int,
        layer_ids: Sequence[int],
        mask_token_id: int | None = None,
        *,
        sliding_window: int | None = None,
        sliding_layers: Sequence[int] | None = None,
        causal: bool = False,
        counts: Counts | None = None,
    ) -> DraftConfig:
        """A drafter for this target: see sizes.draft_config. mask_token_id, counts: see `mask_token`."""
        return sizes.draft_config(
            self.config,
            num_layers=num_layers,
            block_size=block_size,
            layer_ids=layer_ids,
            mask_token_id=self.mask_token(mask_token_id, counts),
            sliding_window=sliding_window,
            sliding_layers=sliding_layers,
            causal=causal,
            embedding_scale=self.embedding_scale,
            logit_scale=self.logit_scale,
        )


# --- loading -----------------------------------------------------------------------------------------------------


def load_target(
    path_or_name: str | Path,
    device: str | torch.device | Sequence[torch.device] = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    by_hand: bool = False,
) -> TargetModel:
    """Load a target from a local folder or by its hub name, frozen and in eval mode. Raises TargetError.

    device: "auto" is the first GPU, or the CPU where there is none; several: its layers are spread over them, and what
    it gives is on the last (spread.py). by_hand: refuse a model that is not run by hand,
    before its weights are read.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # a load takes a moment, and a log file is no place for bars
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    devices = [torch.device(device)] if isinstance(device, str | torch.device) else list(device)
    name = str(path_or_name)
    if name.startswith("~"):
        name = str(Path(name).expanduser())
    if (name.startswith(("/", ".")) or Path(name).exists()) and not Path(name, "config.json").is_file():
        raise TargetError(f"{name} is not a folder with a model (no config.json in it)")
    try:
        return _load(name, devices, dtype, by_hand)
    except TargetError as error:
        raise TargetError(f"the target {name} can't be used: {error}") from error
    except Exception as error:  # transformers, safetensors and torch raise what they like: ValueError, KeyError, ...
        raise TargetError(
            f"the target {name} can't be loaded on {' + '.join(map(str, devices))}: {first_line(error)}"
        ) from error


def _load(name: str, devices: Sequence[torch.device], dtype: torch.dtype, by_hand: bool) -> TargetModel:
    """The model and its tokenizer. Raises TargetError when the files lack weights, and whatever the libraries raise."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(name)
    check_config(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise TargetError(f"transformers has no causal language model of the family {config.model_type}")
    if by_hand and not runs_by_hand(config):
        raise TargetError(
            f"only {' and '.join(FAMILIES)} models can do this, and it is a {config.model_type}: let a server answer "
            "(regenerate --endpoint)"
        )
    model, report = cast(
        "tuple[Any, dict[str, Any]]",
        AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True, output_loading_info=True),
    )
    # transformers fills both with random weights and only warns. A head tied to the embedding is not among them.
    absent = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in report[kind])
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise TargetError(f"its files have no weights, or none of the right shape, for {absent[0]}{more}")
    tokenizer = AutoTokenizer.from_pretrained(name)
    if len(devices) == 1:
        model.to(devices[0])
    else:
        spread(model, devices)
    return TargetModel(model, tokenizer, proved=True)


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line: its kind where it says nothing, or only a key."""
    said = str(error).strip().splitlines()
    if isinstance(error, KeyError) or not said:
        return f"{type(error).__name__} {' '.join(said)}".rstrip()
    return said[0]
