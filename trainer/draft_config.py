"""What defines a drafter, and its config.json in the z-lab format that transformers, SGLang and vLLM load.

What a file of another stack asks for and this drafter doesn't have is refused by name: to pass it over would load
another model than the one that was trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from trainer.blocks import Sight

Number = TypeVar("Number", int, float)
LayerType = Literal["full_attention", "sliding_attention"]
FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"

ROPE_KINDS = ("yarn", "llama3", "linear")  # those whose frequencies don't depend on the length of the text

INITIALIZER_RANGE = 0.02  # standard deviation of every fresh linear weight, transformers' default for Qwen3

# Keys of dflash_config that are read; any other one changes the model, unless its value says that it is off.
DFLASH_KEYS = (
    "mask_token_id", "mask_token", "target_layer_ids", "block_size", "num_target_layers", "causal",
    "input_embedding_scale", "output_multiplier",
)  # fmt: skip
# The same for keys that other stacks write at the top, among the many of transformers.
FOREIGN_KEYS = (
    "attention_bias", "mlp_bias", "sample_from_anchor", "fc_norm", "final_logit_softcapping", "projector_type",
    "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "attention_sink_bias", "use_swa",
    "swa_window_size", "sliding_window_non_causal",
)  # fmt: skip
# Keys of either place with the value that says what this drafter does in any case.
NEUTRAL: Mapping[str, object] = {
    "attention_value_scale": 1.0, "hidden_act": "silu", "partial_rotary_factor": 1.0, "is_neox_style": True,
    "use_aux_hidden_state": True,
}  # fmt: skip


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
        scaling = rope_rule(self.rope_scaling)
        object.__setattr__(self, "rope_scaling", scaling)
        if scaling is not None and scaling["rope_type"] not in ROPE_KINDS:
            kinds = f"{', '.join(ROPE_KINDS[:-1])} and {ROPE_KINDS[-1]}"
            raise ValueError(f"rope scaling {scaling['rope_type']!r} is not supported: {kinds} are")
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_layers)
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: it must be at least 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: it must be even, RoPE turns pairs")
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
        """The config.json of the z-lab format; block_size stands in both places that loaders look at.

        is_causal is left out where layers differ: loaders then take the sliding ones as causal and the others not.
        Where that would be wrong, dflash_config says it a second time, for loaders that don't know is_causal yet.
        """
        scaling = None if self.rope_scaling is None else dict(self.rope_scaling)
        scales = {"input_embedding_scale": self.embedding_scale, "output_multiplier": self.logit_scale}
        told_again = self.causal is not None and (self.causal or SLIDING in self.layer_types)
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
                **({"causal": self.causal} if told_again else {}),
                **{key: scale for key, scale in scales.items() if scale != 1},
            },
            **({} if self.causal is None else {"is_causal": self.causal}),
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
            "layer_types": list(self.layer_types),
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window": self.sliding_window,
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

        _refuse_other_models(data, dflash)
        num_layers = whole("num_hidden_layers")
        layer_types, window = _layers(data, num_layers)
        theta, scaling = _rope(data)
        captured = need("target_layer_ids", dflash)
        if not isinstance(captured, list):
            raise ValueError(f"drafter config: target_layer_ids {captured!r} is no list")
        layer_ids = tuple(_number(int, id, "target_layer_ids") for id in cast(list[object], captured))
        return cls(
            hidden_size=whole("hidden_size"),
            intermediate_size=whole("intermediate_size"),
            num_layers=num_layers,
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
            rope_theta=_number(float, theta if theta is not None else need("rope_theta"), "rope_theta"),
            rope_scaling=scaling,
            layer_types=layer_types,
            sliding_window=window,
            causal=_causal(data, dflash),
            embedding_scale=_scale(dflash, "input_embedding_scale"),
            logit_scale=_scale(dflash, "output_multiplier"),
        )


def _refuse_other_models(data: Mapping[str, Any], dflash: Mapping[str, Any]) -> None:
    """Raises ValueError with the first key that asks for something this drafter doesn't have."""
    architectures = data.get("architectures") or ["DFlashDraftModel"]
    if architectures != ["DFlashDraftModel"]:
        raise ValueError(f"drafter config: architectures {architectures}, expected ['DFlashDraftModel']")
    foreign = {key: value for key, value in dflash.items() if key not in DFLASH_KEYS}
    foreign |= {key: data[key] for key in (*FOREIGN_KEYS, *NEUTRAL) if key in data}
    for key, value in foreign.items():
        if value is not None and value != NEUTRAL.get(key, False):
            raise ValueError(f"drafter config: {key} {value!r} is not supported")
    for key, own in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if data.get(key) is not None and data[key] != data.get(own):
            raise ValueError(f"drafter config: {key} {data[key]!r} other than {own} is not supported")
    sizes = [place["block_size"] for place in (data, dflash) if place.get("block_size") is not None]
    if len(sizes) == 2 and sizes[0] != sizes[1]:
        raise ValueError(f"drafter config: block_size is {sizes[0]}, but {sizes[1]} in dflash_config")


def _layers(data: Mapping[str, Any], num_layers: int) -> tuple[tuple[LayerType, ...], int | None]:
    """The layers' kinds and their window; transformers' rule for Qwen3 where layer_types is missing."""
    window = data.get("sliding_window") if data.get("use_sliding_window") else None
    kinds = data.get("layer_types")
    if kinds is None:
        first = num_layers if window is None else _number(int, data.get("max_window_layers", 28), "max_window_layers")
        kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    if not isinstance(kinds, list):
        raise ValueError(f"drafter config: layer_types {kinds!r} is no list")
    if SLIDING not in kinds:
        return tuple(cast("list[LayerType]", kinds)), None
    if window is None:
        # transformers then cuts nothing off in a layer that other loaders take for a sliding one.
        raise ValueError("drafter config: layer_types has sliding_attention without use_sliding_window and a window")
    return tuple(cast("list[LayerType]", kinds)), _number(int, window, "sliding_window")


def _causal(data: Mapping[str, Any], dflash: Mapping[str, Any]) -> bool | None:
    """As newer loaders read it: is_causal, then dflash_config's causal, then None: the sliding layers are causal.

    Older ones (z-lab until April 2026) don't look at it and show every slot the whole block.
    """
    for key, place in (("is_causal", data), ("causal", dflash)):
        if place.get(key) is not None:
            if not isinstance(place[key], bool):
                raise ValueError(f"drafter config: {key} {place[key]!r} is neither true nor false")
            return place[key]
    return None


def _rope(data: Mapping[str, Any]) -> tuple[object, Mapping[str, Any] | None]:
    """theta, None where it stands at the top, and the rule of a scaled RoPE."""
    found: list[dict[str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):  # of transformers 5, of transformers 4
        parameters = dict(_mapping(data.get(key) or {}, key))
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise ValueError(f"drafter config: {key} that differ from layer to layer are not supported")
        if parameters.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(f"drafter config: partial_rotary_factor in {key} is not supported")
        found.append(parameters)
    thetas = [parameters.pop("rope_theta", None) for parameters in found]
    rules = [rope_rule(parameters) for parameters in found]
    if found[0] and found[1] and rules[0] != rules[1]:
        raise ValueError("drafter config: rope_parameters and rope_scaling contradict each other")
    return (thetas[0] if found[0] or thetas[0] is not None else thetas[1]), rules[0] if found[0] else rules[1]


def rope_rule(parameters: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A scaled RoPE's parameters with its kind as "rope_type" (older files: "type"), None for the plain one."""
    rule = dict(parameters or {})
    kind = rule.pop("rope_type", None) or rule.get("type", "default")
    rule.pop("type", None)
    return None if kind == "default" else {"rope_type": str(kind), **rule}


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"drafter config: {name} is no JSON object")
    return cast(Mapping[str, Any], value)


def _scale(dflash: Mapping[str, Any], name: str) -> float:
    """A factor of the target's, 1 where none is named."""
    found = dflash.get(name)
    return 1.0 if found is None else _number(float, found, name)


def _number(kind: type[Number], value: object, name: str) -> Number:
    """The value as that kind of number; an int is also a float, a bool is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise ValueError(f"drafter config: {name} {value!r} is no {'whole ' if kind is int else ''}number")
    return kind(value)


def speculators_layer_ids(target_layer_ids: Sequence[int]) -> tuple[int, ...]:
    """z-lab's layer ids as speculators and vLLM count them: the embedding is 0, so layer i's output is i + 1."""
    return tuple(id + 1 for id in target_layer_ids)


def from_speculators_layer_ids(aux_layer_ids: Sequence[int], num_target_layers: int) -> tuple[int, ...]:
    """speculators' layer ids as z-lab's. Raises ValueError for an id that is no layer's output."""
    for id in aux_layer_ids:
        if id == 0:
            raise ValueError("layer id 0 of speculators is the embedding, which no z-lab id names")
        if id == num_target_layers:
            # transformers' hidden_states end with the normed states, not with what the last layer gave.
            raise ValueError(f"layer id {id} of speculators is the target's normed output, which no z-lab id names")
        if not 0 < id < num_target_layers:
            raise ValueError(f"layer id {id} of speculators: the target has {num_target_layers} layers")
    return tuple(id - 1 for id in aux_layer_ids)


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
