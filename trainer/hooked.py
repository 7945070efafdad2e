# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (transformers gives its models no types)
"""Any other causal language model of transformers, by its own forward, with hooks on its decoder layers.

Shapes: B rows, S tokens of a row, Q new tokens, H hidden size, V vocabulary, F = captured layers * H.

What keeps it right, and safe beside other threads:
- attention is confined by our own mask, passed in with four dimensions: transformers then builds none;
- positions restart with each document and are passed in;
- the hooks stay on the layers for good and write only where the calling thread has asked them to;
- a pass that stops early runs a copy of the trunk with a shorter list of the same layers: the model itself is never
  changed.

Whether a model heeds all that is not taken from its name: see proofs.py.
"""

import copy
import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.caches import DynamicTargetCache, cache_argument
from trainer.masks import additive, document_mask, step_mask
from trainer.refused import KINDS, TargetError, text_config
from trainer.streams import moved


class Parts:
    """Where the parts of a model are: trunk, list of decoder layers, embedding, head. Raises TargetError."""

    def __init__(self, model: Any) -> None:
        family = str(model.config.model_type)
        self.model = model
        self.config = text_config(model.config)
        self.trunk: Any = model.get_decoder()
        self.path = next(name for name, module in model.named_modules() if module is self.trunk)
        count = self.config.num_hidden_layers
        lists = [
            name
            for name, module in self.trunk.named_children()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ]
        if not self.path or len(lists) != 1:
            raise TargetError(f"{family} models are not supported: no list of {count} decoder layers was found in it")
        self.list_name = lists[0]
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            raise TargetError(f"{family} models are not supported: no plain embedding and linear head were found in it")
        if cast("Tensor | None", head.bias) is not None:
            raise TargetError(f"this {family} model's head has a bias, which the drafter does not add")
        self.embedding, self.head = embedding, head
        hidden = self.config.hidden_size
        for what, width in (("embedding", embedding.weight.shape[1]), ("head", head.weight.shape[1])):
            if width != hidden:
                raise TargetError(f"this {family} model's {what} is {width} wide, its hidden states are {hidden}")

    @property
    def layers(self) -> nn.ModuleList:
        return getattr(self.trunk, self.list_name)

    def cut_trunk(self, count: int) -> Any:
        """The trunk with its first `count` layers alone: a copy that shares all weights."""
        return changed(self.trunk, **{self.list_name: nn.ModuleList(list(self.layers)[:count])})

    def narrowed_model(self, window: int) -> Any:
        """The whole model with another attention window: a copy that shares all weights."""
        narrow = copy.copy(self.config)
        narrow.sliding_window = window
        return self._narrowed(self.model, self.path.split("."), narrow)

    def _narrowed(self, module: Any, path: Sequence[str], narrow: Any) -> Any:
        """The module on the way to the trunk, with the narrow config there and wherever the text's config is held."""
        if not path:
            copied = changed(module)
            copied.config = narrow
            return copied
        copied = changed(module, **{path[0]: self._narrowed(getattr(module, path[0]), path[1:], narrow)})
        if (config := getattr(module, "config", None)) is self.config:
            copied.config = narrow
        elif config is not None:  # a model with other senses, which may build the masks
            copied.config = copy.copy(config)
            for name, value in vars(config).items():
                if value is self.config:
                    setattr(copied.config, name, narrow)
        return copied


def changed(module: Any, **children: nn.Module) -> Any:
    """A copy of a module that shares all it holds, but for these children."""
    copied = copy.copy(module)
    copied._modules = {**module._modules, **children}
    return copied


def hidden_of(output: Any) -> Tensor:
    """The hidden states in what a layer or a trunk returns: a tensor, a tuple or a transformers output."""
    if isinstance(output, Tensor):
        return output
    return cast("Tensor", output[0])


class Hooked:
    """The decoder layers of a model, run by its own forward."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.model: Any = parts.model
        self.num_layers: int = parts.config.num_hidden_layers
        self.embedding_scale = self.logit_scale = 1.0
        """Set by the proofs, which measure them."""
        self.no_cache = None if cache_argument(parts.trunk.forward) else "their forward takes no cache"
        """Why it can't decode step by step, if it can't."""
        kinds: set[str] = set(getattr(parts.config, "layer_types", None) or ())
        self.window: int | None = getattr(parts.config, "sliding_window", None) if kinds != {KINDS[0]} else None
        self.by_kind = kinds == set(KINDS)
        if KINDS[1] in kinds and self.window is None:
            raise TargetError("its config has sliding layers, but no sliding_window")
        accepted = inspect.signature(parts.trunk.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache_name = str(cache_argument(parts.trunk.forward))
        self._cut: dict[int, Any] = {self.num_layers: parts.trunk}
        self._thread = threading.local()
        for index, layer in enumerate(parts.layers):
            layer.register_forward_hook(self._hook(index))

    @property
    def embedding_VH(self) -> Tensor:
        return self.parts.embedding.weight

    @property
    def head_VH(self) -> Tensor:
        return self.parts.head.weight

    def documents(
        self, ids_BS: Tensor, document_ids_BS: Tensor, positions_BS: Tensor, layer_ids: Sequence[int], *, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The captured layers of packed rows, [B, S, F], and the last norm's output if `final`, [B, S, H]."""
        count = self.num_layers if final else max(layer_ids) + 1
        trunk = self._cut.get(count) or self._cut.setdefault(count, self.parts.cut_trunk(count))
        here_BS = moved(document_ids_BS, ids_BS.device)  # they come from the host, for what needs their lengths there
        mask = self._masks(lambda window: document_mask(here_BS, window))
        features_BSF, final_BSH = self._run(trunk, ids_BS, positions_BS, mask, layer_ids, use_cache=False)
        return features_BSF, final_BSH if final else None

    def new_cache(self, capacity: int) -> DynamicTargetCache:
        if self.no_cache is not None:
            raise TargetError(f"{self.parts.config.model_type} models can't be decoded step by step: {self.no_cache}")
        return DynamicTargetCache(capacity)

    def step(
        self, ids_Q: Tensor, cache: DynamicTargetCache, layer_ids: Sequence[int], last: int
    ) -> tuple[Tensor, Tensor]:
        """The next tokens of one sequence: the last norm's output at the `last` of them, and the captured layers."""
        past, new = cache.length, ids_Q.shape[0]
        cache.make_room(new)
        positions = torch.arange(past, past + new, device=ids_Q.device)[None]
        mask = self._masks(lambda window: step_mask(past, new, ids_Q.device, window))
        more: dict[str, Any] = {"use_cache": True, self._cache_name: cache.inner}
        features_BQF, final_BQH = self._run(self.parts.trunk, ids_Q[None], positions, mask, layer_ids, **more)
        cache.commit(new)
        return final_BQH[0, -last:], features_BQF

    def _run(
        self, trunk: Any, ids: Tensor, positions: Tensor, mask: Any, layer_ids: Sequence[int], **more: Any
    ) -> tuple[Tensor, Tensor]:
        if self._takes_positions:
            more["position_ids"] = positions
        with self._capturing(layer_ids) as captured:
            output = trunk(input_ids=ids, attention_mask=mask, **more)
        home = self.head_VH.device
        final = moved(hidden_of(output), home)
        features = [moved(captured[index], home) for index in layer_ids]
        return torch.cat(features, dim=-1) if features else final[..., :0], final

    def _masks(self, make: Callable[[int | None], Tensor]) -> Any:
        """One mask for all layers, or one for each kind of layer where the model has two."""
        dtype = self.head_VH.dtype
        if not self.by_kind:
            return additive(make(self.window), dtype)
        return {KINDS[0]: additive(make(None), dtype), KINDS[1]: additive(make(self.window), dtype)}

    @contextmanager
    def _capturing(self, layer_ids: Sequence[int]) -> Generator[dict[int, Tensor]]:
        """What the layers give in this thread, while the block runs."""
        captured: dict[int, Tensor] = {}
        self._thread.wanted, self._thread.captured = frozenset(layer_ids), captured
        try:
            yield captured
        finally:
            self._thread.wanted = self._thread.captured = None

    def _hook(self, index: int) -> Callable[[Any, Any, Any], None]:
        def keep(_module: Any, _arguments: Any, output: Any) -> None:
            if index in (getattr(self._thread, "wanted", None) or ()):
                self._thread.captured[index] = hidden_of(output)

        return keep
