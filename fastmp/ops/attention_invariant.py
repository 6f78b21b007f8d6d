"""Attention for `fastmp.ops.batch_invariant`, by exact sums over the keys that a query sees.

Shapes: B batch, N query heads, G key/value heads, C queries, E keys, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmp.ops import exact
from fastmp.ops.attention_masks import Borders, ages_of, document_mask
from fastmp.ops.invariant_mode import exactly


def invariant_attention(
    q_BNCD: Tensor,
    k_BGED: Tensor,
    v_BGED: Tensor,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    documents: Borders | None,
    sinks: Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Return what `attend` does, without gradients.

    Raises:
        ValueError: dropout, or a dtype or device that the mode does not support.
    """
    (C, D), E, repeats = q_BNCD.shape[2:], k_BGED.shape[2], q_BNCD.shape[1] // k_BGED.shape[1]
    if dropout_p > 0.0:
        raise ValueError(f"batch_invariant: attention dropout is not supported, got {dropout_p}")
    with exactly(q_BNCD):
        # 1. Keys that each query sees
        seen = mask
        if documents is not None:
            seen = document_mask(documents, q_BNCD.shape, E, causal, window)
        elif mask is None and causal:
            ages = ages_of(C, E, q_BNCD.device)
            seen = (ages >= 0) & (ages < (E if window is None else window))
        bias = None if seen is None else torch.zeros(seen.shape).double().masked_fill(~seen, -torch.inf)
        # 2. Attention of every query head to its own copy of keys and values
        k, v = (x.repeat_interleave(repeats, 1) for x in (k_BGED, v_BGED))
        factor = D**-0.5 if scale is None else scale
        return exact.attention(q_BNCD, k, v, bias, sinks, factor).to(q_BNCD.dtype)
