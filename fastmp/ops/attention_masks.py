"""Masks of attention: distances between tokens, and borders of packed documents.

Shapes: B batch, C queries, E keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Borders", "ages_of", "document_mask"]


class Borders(NamedTuple):
    """Borders of packed documents in the concatenated rows of a batch (`cu_seqlens`).

    queries, keys: (n + 1,) int32, ascending from 0 to B * C and B * E. Document i has queries queries[i] to
        queries[i + 1] - 1, which are the last of its keys. Documents may be empty: repeated entries keep the
        shape fixed while the number of documents varies.
    longest_queries, longest_keys: upper bounds of a document's length.
    static: the host never reads the borders, even on a CPU, as required in a captured region.
    """

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int
    static: bool = False


def ages_of(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the distances query - key (queries, keys) in tokens, if both end at the same token."""
    return (
        torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None]
    )


def document_mask(
    documents: Borders, q_shape: torch.Size, keys: int, causal: bool, window: int | None
) -> Tensor:
    """Return the mask (B, 1, C, E): True for visible keys of the query's document."""
    B, C = q_shape[0], q_shape[2]

    def places(borders: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return each token's document and distance to the document's end, both (B, length)."""
        index = torch.arange(B * length, device=borders.device, dtype=borders.dtype)
        number = torch.searchsorted(borders[1:], index, right=True)
        return number.view(B, length), (borders[number + 1] - index).view(B, length)

    (q_number, q_left), (k_number, k_left) = places(documents.queries, C), places(documents.keys, keys)
    ages = k_left[:, None, :] - q_left[:, :, None]
    seen = q_number[:, :, None] == k_number[:, None, :]
    if causal:
        seen = seen & (ages >= 0) & (ages < (math.inf if window is None else window))
    return seen.unsqueeze(1)
