"""Whether transformers loads an export by itself: run as a file, in a process where no trainer can be imported.

    python trainer/loaded_alone.py FOLDER PROBE

Ends with 0, or with 1 and a line on stdout that says what is wrong. Needs torch, transformers and safetensors.
"""

# transformers' Auto classes and safetensors' functions are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

Cycle = Callable[[Tensor, Tensor, Tensor], Tensor]  # new features, the block's embeddings, positions -> hidden states

CYCLES = 3
CLOSE = 1e-4  # of the largest value: two ways to compute one thing in float32


def logit_faults(who: str, run: Cycle, head_VH: Tensor, expected: Mapping[str, Tensor]) -> list[str]:
    """Holds the logits of each cycle of a probe (readback.write_probe) against the trained drafter's."""
    for cycle in range(CYCLES):
        features, embeds, positions, wanted = (
            expected[f"{cycle}.{name}"] for name in ("features", "embeds", "positions", "logits")
        )
        with torch.no_grad():
            logits = run(features, embeds, positions) @ head_VH.T
        if logits.shape != wanted.shape:
            return [f"{who}: logits of cycle {cycle + 1} are {list(logits.shape)}, wanted {list(wanted.shape)}"]
        off = (logits - wanted).abs().max().item()
        if not off <= CLOSE * max(1.0, wanted.abs().max().item()):
            return [f"{who}: logits of cycle {cycle + 1} are not the trained drafter's, off by {off:.3g}"]
    return []


def transformers_faults(folder: str, probe: str) -> list[str]:
    """Loads it as its user would, with the modelling file that lies beside the weights."""
    from transformers import AutoModel

    expected = load_file(probe)
    try:
        model, report = cast(
            "tuple[Any, dict[str, Any]]",
            AutoModel.from_pretrained(
                folder, trust_remote_code=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
            ),
        )
        if odd := sorted(str(name) for kind in report.values() for name in kind):
            return [f"transformers has no place or no weights for {', '.join(odd[:3])}"]
        cache = model.eval().new_cache()

        def theirs(features: Tensor, embeds: Tensor, positions: Tensor) -> Tensor:
            return model(noise_embedding=embeds, target_hidden=features, position_ids=positions, past_key_values=cache)

        return logit_faults("transformers", theirs, expected["head"], expected)
    except Exception as error:  # whatever the modelling file raises
        return [f"transformers can't load or run it: {type(error).__name__}: {error}".replace("\n", " ")]


def main(words: Sequence[str]) -> int:
    sys.modules["trainer"] = None  # type: ignore[assignment]  # so that importing it fails, wherever it is installed
    folder, probe = words
    lines = transformers_faults(folder, probe)
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
