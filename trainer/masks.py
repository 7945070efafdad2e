"""Who sees whom in the target's attention: inside a document, and behind a cache. So transformers builds no mask.

A mask is a boolean tensor, True where a query sees a key, [B, 1, queries, keys]. A window of W tokens lets a query see
itself and the W - 1 tokens before it, as in transformers.
"""

import torch
from torch import Tensor


def document_mask(document_ids_BS: Tensor, window: int | None = None) -> Tensor:
    """Causal attention inside each document, [B, 1, S, S].

    A document's tokens lie side by side, so a window in the row is one in the document. Padding (id -1) is a document
    of its own, so that no row of the mask is empty.
    """
    size = document_ids_BS.shape[1]
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    return (same_BSS & _causal(size, size, 0, window, document_ids_BS.device))[:, None]


def document_starts(document_ids_BS: Tensor) -> Tensor:
    """For each token where its document begins in the row, [B, S]. A document's tokens lie side by side."""
    place_S = torch.arange(document_ids_BS.shape[1], device=document_ids_BS.device)
    begins_BS = torch.ones_like(document_ids_BS, dtype=torch.bool)
    begins_BS[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    return torch.where(begins_BS, place_S, 0).cummax(dim=1).values


def step_mask(past: int, new: int, device: torch.device, window: int | None = None) -> Tensor:
    """Causal attention of `new` tokens after `past` cached ones, [1, 1, new, past + new]."""
    return _causal(new, past + new, past, window, device)[None, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to be added to the scores: 0 where seen, else the lowest number there is."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _causal(queries: int, keys: int, past: int, window: int | None, device: torch.device) -> Tensor:
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(past)
    return mask if window is None else mask.triu_(past - window + 1)
