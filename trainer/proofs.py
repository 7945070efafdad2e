# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its models no types)
"""What a target must show, on a few tokens, before it is trusted: nothing is taken from a family's name.

The model's own forward, with all that transformers does for it, over one document at a time is the reference. Against
it are held: the scale of the embeddings that enter layer 0; the scale of the logits; our pass over one document; our
pass over a row packed from two; a pass that stops early; and decoding step by step through the cache.
"""

import copy
import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer import sizes
from trainer.byhand import ByHand
from trainer.hooked import Hooked, Parts, hidden_of
from trainer.refused import TargetError, text_config
from trainer.streams import moved

DOCUMENTS, LENGTH = 2, 6
"""Of the proofs: documents so short that what leaks into one by a few places reaches most of it."""
WINDOW = 3
"""Of the sliding layers, in the proofs: smaller than a document, so that it matters."""

LEAKS = (
    "a row packed from two documents gives other features than each document alone: something in its layers passes by "
    "the attention mask (a recurrence, a convolution, positions of the whole row)"
)


@dataclass
class Seen:
    """The documents, each a row of its own, as the model's own forward sees them."""

    ids_DS: Tensor
    layers_DSH: list[Tensor] = field(default_factory=list[Tensor])
    """What enters layer 0, then what each layer gives."""
    final_DSH: Tensor = field(default_factory=lambda: torch.empty(0))
    logits_DSV: Tensor = field(default_factory=lambda: torch.empty(0))


@torch.no_grad()
def prove(runner: ByHand | Hooked, parts: Parts) -> None:
    """Raises TargetError when the model is not what training and decoding take it for; sets a hooked one's scales."""
    seen = _own(parts)
    if not all(hidden.isfinite().all() for hidden in (*seen.layers_DSH, seen.final_DSH, seen.logits_DSV)):
        wrong = (name for name, weight in parts.model.named_parameters() if not weight.isfinite().all())
        name = next(wrong, None)
        raise TargetError(
            f"its weights are not finite: {name}" if name else "what it computes is not finite: try float32"
        )
    embedding_scale, logit_scale = _embedding_scale(seen, parts), _logit_scale(seen, parts)
    if isinstance(runner, ByHand):
        if (embedding_scale, logit_scale) != (1.0, 1.0):
            raise TargetError(f"its embeddings and logits are scaled, by {embedding_scale:g} and {logit_scale:g}")
        reason = _difference(runner, seen)
    else:
        runner.embedding_scale, runner.logit_scale = embedding_scale, logit_scale
        reason = _difference(_narrow(runner), seen)
        if reason and runner.window is not None and not runner.by_kind:
            # A config may name a window that no layer uses: then the model is itself without it.
            unbounded = copy.copy(runner)
            unbounded.window = None
            if not _difference(unbounded, seen):
                runner.window = reason = None
    if reason:
        raise TargetError(reason)
    if isinstance(runner, Hooked) and not runner.no_cache:
        runner.no_cache = _stepping(_narrow(runner), seen)


def _narrow(runner: Hooked) -> Hooked:
    """The same with the windows of the proofs."""
    narrowed = copy.copy(runner)
    if narrowed.window is not None:
        narrowed.window = WINDOW
    return narrowed


# --- the reference ---------------------------------------------------------------------------------------------------


def _own(parts: Parts) -> Seen:
    """The model's own forward over the documents. Raises TargetError when it has not the form of a decoder."""
    vocabulary, device = parts.embedding.weight.shape[0], parts.embedding.weight.device
    seen = Seen((torch.arange(DOCUMENTS * LENGTH, device=device) * 7919 % vocabulary).view(DOCUMENTS, LENGTH))
    model = parts.narrowed_model(WINDOW) if getattr(parts.config, "sliding_window", None) else parts.model
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    try:
        with _listening(parts, seen):
            seen.logits_DSV = model(input_ids=seen.ids_DS, **more).logits
    except Exception as error:  # whatever a model's own code may raise
        raise TargetError(f"its own forward fails on {LENGTH} tokens: {_said(error)}") from error
    shapes = {tuple(hidden.shape) for hidden in (*seen.layers_DSH, seen.final_DSH)}
    if len(seen.layers_DSH) != 1 + len(parts.layers) or shapes != {(DOCUMENTS, LENGTH, parts.config.hidden_size)}:
        raise TargetError("its decoder layers don't pass on one hidden state for each token")
    return seen


@contextmanager
def _listening(parts: Parts, seen: Seen) -> Generator[None]:
    """Hooks for the time of the block, which hear every thread: for loading alone. All goes to the head's device."""
    home = parts.head.weight.device

    def entered(_module: Any, arguments: Any, named: Any) -> None:
        seen.layers_DSH.append(moved(arguments[0] if arguments else named["hidden_states"], home))

    def passed(_module: Any, _arguments: Any, output: Any) -> None:
        seen.layers_DSH.append(moved(hidden_of(output), home))

    def ended(_module: Any, _arguments: Any, output: Any) -> None:
        seen.final_DSH = moved(hidden_of(output), home)

    hooks = [parts.layers[0].register_forward_pre_hook(entered, with_kwargs=True)]
    hooks += [layer.register_forward_hook(passed) for layer in parts.layers]
    hooks.append(parts.trunk.register_forward_hook(ended))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- scales ----------------------------------------------------------------------------------------------------------


def _embedding_scale(seen: Seen, parts: Parts) -> float:
    """The factor between a token's row of the embedding and what enters layer 0.

    Learned positions may be added: they are the same in both documents, so the difference of the two is without them.
    """
    entered = seen.layers_DSH[0].float()
    rows = moved(functional.embedding(seen.ids_DS, parts.embedding.weight).float(), entered.device)
    config = parts.config
    named = (config.hidden_size**0.5, getattr(config, "embedding_multiplier", None), getattr(config, "scale_emb", None))
    scale = _factor(rows[0] - rows[1], entered[0] - entered[1], parts.embedding.weight.dtype, named)
    if scale is None:
        raise TargetError("what enters its first layer is not a token's embedding times a constant")
    return scale


def _logit_scale(seen: Seen, parts: Parts) -> float:
    """The factor between the head's product and the model's logits."""
    raw = functional.linear(seen.final_DSH, parts.head.weight).float()
    config = parts.config
    divisor = getattr(config, "logits_scaling", None)
    named = (getattr(config, "logit_scale", None), 1 / divisor if divisor else None)
    scale = _factor(raw, seen.logits_DSV.float(), parts.head.weight.dtype, named)
    if scale is None:
        raise TargetError("its logits are not the head's product with its last norm's output times a constant")
    return scale


def _factor(given: Tensor, found: Tensor, dtype: torch.dtype, named: Sequence[float | None]) -> float | None:
    """The constant c with found = c * given, or None. One that can't be told from 1 or a named one is the nearest."""
    if given.shape != found.shape or not given.abs().sum() > 0:
        return None
    loose = 1e-4 if dtype == torch.float32 else 2e-2
    scale = float((given * found).sum() / (given * given).sum())
    if not scale > 0 or not (found - scale * given).abs().max() <= loose * found.abs().max():
        return None
    known = min((one for one in (1.0, *named) if one), key=lambda one: abs(scale / one - 1))
    return known if abs(scale / known - 1) < loose else scale


# --- our pass against it -------------------------------------------------------------------------------------------


def _difference(runner: ByHand | Hooked, seen: Seen) -> str | None:
    """Where our passes differ from the model's own, in a sentence."""
    every, middle, device = range(runner.num_layers), runner.num_layers // 2, seen.ids_DS.device
    ids = seen.ids_DS.reshape(1, -1)
    documents = torch.arange(DOCUMENTS, device=device).repeat_interleave(LENGTH)[None]
    positions = torch.arange(LENGTH, device=device).repeat(DOCUMENTS)[None]
    try:
        packed, final = runner.documents(ids, documents, positions, every, final=True)
    except Exception as error:  # whatever a model's own code may raise
        return f"its forward does not take our attention mask: {_said(error)}"
    assert final is not None
    wanted = torch.cat(seen.layers_DSH[1:], dim=-1)
    if not _same(packed, wanted, runner) or not _same(final, seen.final_DSH, runner):
        alone, _ = runner.documents(ids[:, :LENGTH], documents[:, :LENGTH], positions[:, :LENGTH], every, final=False)
        if not _same(alone, wanted[0], runner):
            return "with our attention mask and positions its features are others than by its own forward"
        return LEAKS
    if not _is_exact(runner) and not sizes.has_experts(text_config(runner.model.config)):
        # What rounding would hide in the comparison above shows in one pass against another of the same shape.
        other = torch.cat((ids[:, :LENGTH].flip(1), ids[:, LENGTH:]), dim=1)
        beside, _ = runner.documents(other, documents, positions, every, final=False)
        if not _errors(beside, packed, runner)[-1].max() < 0.02:
            return LEAKS
    early, _ = runner.documents(ids, documents, positions, (middle,), final=False)
    if not _same(early, seen.layers_DSH[1 + middle], runner):
        return "its first layers alone give other features than the whole of it"
    return None


def _stepping(runner: Hooked, seen: Seen) -> str | None:
    """How decoding through the cache, with tokens that are taken back, differs from one pass."""
    ids, half = seen.ids_DS[0], LENGTH // 2
    try:
        cache = runner.new_cache(LENGTH)
        first, _ = runner.step(ids[:half], cache, (), 0)
        runner.step(ids[-half:].flip(0), cache, (), 0)
        cache.crop(half)
        second, _ = runner.step(ids[half:], cache, (), 0)
    except Exception as error:  # whatever a model's own code may raise
        return _said(error)
    if not _same(torch.cat((first, second)), seen.final_DSH[0], runner):
        return "through a cache it gives others than in one pass"
    return None


def _same(ours: Tensor, theirs: Tensor, runner: ByHand | Hooked) -> bool:
    """Whether each token's states are equal up to rounding; in half precision, those of most tokens of each document.

    (There, a token may be sent to other experts by rounding alone.)
    """
    errors_DSK = _errors(ours, theirs, runner)
    if _is_exact(runner):
        return bool(errors_DSK.max() < 1e-3)
    return bool(errors_DSK.median(dim=1).values.max() < 0.1)


def _errors(ours: Tensor, theirs: Tensor, runner: ByHand | Hooked) -> Tensor:
    """How far each token's states are from what they should be, relative to their length, for each captured layer."""
    width = runner.embedding_VH.shape[1]
    mine, other = (x.reshape(-1, LENGTH, x.shape[-1] // width, width).float() for x in (ours, theirs))
    return (mine - other).norm(dim=-1) / other.norm(dim=-1).clamp_min(1e-6)


def _is_exact(runner: ByHand | Hooked) -> bool:
    return runner.embedding_VH.dtype == torch.float32


def _said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".strip().split("\n")[0]
