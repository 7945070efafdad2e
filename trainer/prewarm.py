# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (transformers gives its configs no types)
"""`python -m trainer warm CONFIG.toml`: compiles what a training with this config will run, for each drafter's device,
so that its start finds it in the compile cache. Needs no data and of the target only its config.

Exit codes: 0 done; 3 the config is wrong; 1 anything else.
"""

import argparse
import json
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from trainer.byhand import runs_by_hand
from trainer.compile_cache import prune, use_compile_cache
from trainer.config import ConfigFault, TrainConfig, load, micro_rows
from trainer.diagnosis import explain
from trainer.draft import DraftModel
from trainer.draft_config import DraftConfig
from trainer.estimate import read_shapes
from trainer.layout import check_layout, parse
from trainer.learner import Learner
from trainer.shortage import shortage_in
from trainer.start import Say, TrainingError, target_dtype
from trainer.target import TargetModel
from trainer.threads import make_torch_thread_safe
from trainer.warm import Warmed, batch_shape, make_learner, warm_up, warm_up_targets

CONFIG_CODE = 3


def prewarm(config: TrainConfig, say: Say) -> list[Warmed]:
    """Warms up the devices of a config's drafters. Raises TargetError, TrainingError."""
    layout = parse(config.layout)
    # The memory that a training takes is not needed, and one may be going on here.
    unchecked = config.layout.model_copy(update={"check_memory": False})
    check_layout(config.model_copy(update={"layout": unchecked}), layout)
    dtype = target_dtype(config, torch.device(layout.targets[0][-1]))
    _, draft = read_shapes(config, dtype.itemsize)
    # Several on one device share what is compiled.
    devices = [torch.device(name) for name in dict.fromkeys(layout.drafters)]
    make_torch_thread_safe(config.train.fx_fix)
    learners = [_stand_in(config, draft, device, dtype) for device in devices]
    shape = batch_shape(config, micro_rows(config), dtype)
    places = [torch.device(name) for name in dict.fromkeys(chain.from_iterable(layout.targets))]
    on_gpu = [place for place in places if place.type == "cuda"]
    targets = [target for place in on_gpu if (target := _stand_in_target(config, place, dtype))]
    warmed = warm_up_targets(targets, shape, (0, 1), fp8=config.target.fp8, say=say)
    return warmed + warm_up(learners, shape, say=say)


def _stand_in_target(config: TrainConfig, device: torch.device, dtype: torch.dtype) -> TargetModel | None:
    """The target's first two layers, with fresh weights: what is compiled for them is compiled for all. None where
    nothing is compiled of it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    found: Any = AutoConfig.from_pretrained(str(Path(config.target.path).expanduser()))
    if not runs_by_hand(found):
        return None
    found.num_hidden_layers = 2
    if getattr(found, "layer_types", None):
        found.layer_types = found.layer_types[:2]
    with torch.device(device):
        return TargetModel(AutoModelForCausalLM.from_config(found, dtype=dtype))


def _stand_in(config: TrainConfig, draft: DraftConfig, device: torch.device, dtype: torch.dtype) -> Learner:
    """A learner with fresh weights and a head of zeros."""
    with torch.device(device):
        model = DraftModel(draft).to(device)
        head_VH = torch.zeros(draft.vocab_size, draft.hidden_size, dtype=dtype)
    return make_learner(config, model, head_VH)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m trainer warm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--prune", action="store_true", help="then delete what is kept for other versions, if unused")
    options = parser.parse_args(words)

    def say(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    try:
        config = load(options.config, options.sets)
    except ConfigFault as fault:
        print(fault, file=sys.stderr)
        return CONFIG_CODE
    try:
        warmed = prewarm(config, say)
    except RuntimeError as error:
        told = error if isinstance(error, TrainingError) else shortage_in(error, config)
        if told is None:
            explain(error)
            raise
        raise ValueError(str(told)) from error
    if not warmed:
        say("on the CPU nothing is compiled: there is nothing to warm up")
    pruned = prune(say) if options.prune else []
    for one in pruned:
        say(f"deleted {one.folder}: {one.bytes / 2**20:,.0f} MiB")
    if options.json:
        cache = use_compile_cache(say) if warmed else None
        devices = [asdict(one) | {"state": one.state} for one in warmed]
        gone = {str(one.folder): one.bytes for one in pruned}
        print(json.dumps({"cache": str(cache) if cache else None, "devices": devices, "pruned": gone}, indent=2))
    return 0
