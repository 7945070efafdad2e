"""What defines a drafter, and its config.json in the z-lab format that transformers, SGLang and vLLM load."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from trainer.blocks import Sight

Number = TypeVar("Number", int, float)
LayerType = Literal["full_attention", "sliding_attention"]
FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"

INITIALIZER_RANGE = 0.02  # standard deviation of every fresh linear weight, transformers' default for Qwen3


@dataclass(frozen=True)
class DraftConfig:
    """What defines a drafter. Sizes are the target's own where the two share something."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    block_size: int  # T: tokens in a block, the anchor included
    target_layer_ids: tuple[int, ...]  # zero-based: the feature is the residual stream AFTER this layer of the target
    num_target_layers: int
    mask_token_id: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None)  # transformers' keys: rope_type, factor, ...
    layer_types: tuple[LayerType, ...] = ()  # one per layer; empty: all "full_attention"
    sliding_window: int | None = None  # tokens; of the sliding layers, see blocks.Sight
    causal: bool | None = False  # slots of a block see no later ones; None: in the sliding layers only
    embedding_scale: float = 1.0  # the target's own factor, in the embeddings that the drafter is given
    logit_scale: float = 1.0  # the target's own factor: logits = logit_scale * hidden @ head

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_layers)
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads can't share {self.num_kv_heads} key/value heads")
        if self.block_size < 2:
            raise ValueError(f"block_size {self.block_size}: a block needs the anchor and at least one mask")
        if self.num_layers < 1:
            raise ValueError(f"num_layers {self.num_layers}: a drafter needs at least one layer")
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids is empty: the drafter needs at least one layer of the target")
        wrong = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if wrong:
            raise ValueError(f"target_layer_ids {wrong}: the target has layers 0..{self.num_target_layers - 1}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types: the drafter has {self.num_layers} layers")
        unknown = [kind for kind in self.layer_types if kind not in (FULL, SLIDING)]
        if unknown:
            raise ValueError(f"layer_types {unknown[0]!r} is not supported: {FULL} and {SLIDING} are")
        if SLIDING not in self.layer_types:
            if self.sliding_window is not None:
                raise ValueError(f"sliding_window {self.sliding_window}: no layer of the drafter slides")
            if self.causal is None:  # one way to say it, so that equal drafters compare equal
                object.__setattr__(self, "causal", False)
        elif self.sliding_window is None or self.sliding_window < self.block_size:
            # Stacks disagree on whether the window cuts the block itself; from block_size on it never does.
            raise ValueError(
                f"sliding_window {self.sliding_window}: sliding layers need one of at least {self.block_size} tokens, "
                "the block's size"
            )
        elif FULL not in self.layer_types and self.causal is None:
            object.__setattr__(self, "causal", True)
        for name in ("embedding_scale", "logit_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name)}: it must be a number above 0")

    @property
    def feature_size(self) -> int:
        """F: the width of a context token's features, all captured layers side by side."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def sights(self) -> tuple[Sight, ...]:
        """What the layers see: the distinct ones, in the order of the layers that first use them."""
        return tuple(dict.fromkeys(self._each_sight()))

    @property
    def layer_sights(self) -> tuple[int, ...]:
        """For each layer, which of `sights` is its own."""
        return tuple(self.sights.index(sight) for sight in self._each_sight())

    def _each_sight(self) -> list[Sight]:
        def of(kind: LayerType) -> Sight:
            slides = kind == SLIDING
            return Sight(self.sliding_window if slides else None, slides if self.causal is None else self.causal)

        return [of(kind) for kind in self.layer_types]

    def to_json(self) -> dict[str, Any]:
        """The config.json of the z-lab format; block_size stands in both places that loaders look at."""
        scaling = None if self.rope_scaling is None else dict(self.rope_scaling)
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
            },
            "is_causal": False,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "layer_types": ["full_attention"] * self.num_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_layers,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "initializer_range": INITIALIZER_RANGE,
            "dtype": "bfloat16",
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "DraftConfig":
        """Reads a z-lab config.json, ours or another trainer's.

        Raises ValueError naming the key that is missing, or a feature this model doesn't have.
        """
        data = _mapping(data, "it")  # the file may hold any JSON
        dflash = _mapping(data.get("dflash_config") or {}, "dflash_config")

        def need(key: str, *places: Mapping[str, Any]) -> Any:
            for place in places or (data,):
                if place.get(key) is not None:
                    return place[key]
            raise ValueError(f"drafter config: {key} is missing")

        def whole(key: str, *places: Mapping[str, Any]) -> int:
            return _number(int, need(key, *places), key)

        architectures = data.get("architectures") or ["DFlashDraftModel"]
        if architectures != ["DFlashDraftModel"]:
            raise ValueError(f"drafter config: architectures {architectures}, expected ['DFlashDraftModel']")
        if any(kind != "full_attention" for kind in data.get("layer_types") or ()):
            raise ValueError("drafter config: layer_types other than full_attention are not supported")
        if data.get("is_causal") or dflash.get("causal"):
            raise ValueError("drafter config: a causal block is not supported")
        if data.get("attention_bias"):
            raise ValueError("drafter config: attention_bias is not supported")
        parameters = dict(_mapping(data.get("rope_parameters") or data.get("rope_scaling") or {}, "rope_parameters"))
        theta = parameters.pop("rope_theta", None) or need("rope_theta")
        scaling = parameters if parameters.get("rope_type", parameters.get("type", "default")) != "default" else None
        captured = need("target_layer_ids", dflash)
        if not isinstance(captured, list):
            raise ValueError(f"drafter config: target_layer_ids {captured!r} is no list")
        layer_ids = tuple(_number(int, id, "target_layer_ids") for id in cast(list[object], captured))
        return cls(
            hidden_size=whole("hidden_size"),
            intermediate_size=whole("intermediate_size"),
            num_layers=whole("num_hidden_layers"),
            num_heads=whole("num_attention_heads"),
            num_kv_heads=whole("num_key_value_heads"),
            head_dim=whole("head_dim"),
            vocab_size=whole("vocab_size"),
            rms_norm_eps=_number(float, need("rms_norm_eps"), "rms_norm_eps"),
            block_size=whole("block_size", dflash, data),
            target_layer_ids=layer_ids,
            num_target_layers=whole("num_target_layers", data, dflash),
            mask_token_id=whole("mask_token_id", dflash),
            max_position_embeddings=whole("max_position_embeddings"),
            rope_theta=_number(float, theta, "rope_theta"),
            rope_scaling=scaling,
        )


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"drafter config: {name} is no JSON object")
    return cast(Mapping[str, Any], value)


def _number(kind: type[Number], value: object, name: str) -> Number:
    """The value as that kind of number; an int is also a float, a bool is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise ValueError(f"drafter config: {name} {value!r} is no {'whole ' if kind is int else ''}number")
    return kind(value)


def default_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """z-lab's rule: evenly spaced from layer 1 to layer L-3, or the middle layer when only one is captured.

    Raises ValueError when the target has too few layers for `count` different ones.
    """
    if count == 1:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + j * (num_target_layers - 4) / (count - 1)) for j in range(count))
    if num_target_layers < 4 or len(set(ids)) < count:
        raise ValueError(
            f"a target of {num_target_layers} layers has no {count} layers between its 2nd and its 3rd last"
        )
    return ids
