"""The random generators of this process, as JSON.

Nothing in a training draws from them today: weights, order and anchors are functions of the seed and the row's number.
A fresh training seeds them and a checkpoint keeps them all the same, so that what draws from them tomorrow repeats from
run to run and after a resume too.
"""

# torch's and numpy's state functions are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Python's, numpy's, and torch's on every device."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # it takes words of 32 bits
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Python's, numpy's, torch's on the CPU and on each GPU that this process uses."""
    name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, gauss_next = random.getstate()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return {
        "python": [version, list(words), gauss_next],
        "numpy": [name, np.asarray(keys).tolist(), place, has_gauss, gauss],
        "torch": _hex(torch.get_rng_state()),
        "cuda": {str(gpu): _hex(torch.cuda.get_rng_state(gpu)) for gpu in gpus},
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Puts them back; those of GPUs that are not here are left out. Raises ValueError when a state is no such state."""
    try:
        version, words, gauss_next = states["python"]
        random.setstate((version, tuple(words), gauss_next))
        name, keys, place, has_gauss, gauss = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), place, has_gauss, gauss))
        torch.set_rng_state(_tensor(states["torch"]))
        here = torch.cuda.device_count() if states["cuda"] else 0
        for gpu, state in states["cuda"].items():
            if int(gpu) < here:
                torch.cuda.set_rng_state(_tensor(state), int(gpu))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the states of the random generators can't be read: {error}") from error


def _hex(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _tensor(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
