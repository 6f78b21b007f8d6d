"""Attention of packed documents in models of transformers, behind transformers' own interface.

`register` adds the implementation "fastmp_varlen" to those that `model.set_attn_implementation` chooses from.
It takes batches as `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` makes them: one row, and the
borders of its documents. No mask of all pairs is made.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastmp.ops.attention import Borders, attend

NAME = "fastmp_varlen"


def register() -> None:
    """Register the implementation with transformers, which makes no masks for one that it does not know."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """The attention (1, T, N, D) of queries (1, N, T, D) to keys and values (1, G, E, D), and None.

    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: as `fastmp.ops.attention.Borders` has them.

    ValueError without them, for several rows, and for a mask, sinks or a soft cap, which it does not know.
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None or max_length_q is None or max_length_k is None:
        raise ValueError(
            f"{NAME}: the batch does not say where documents begin; take batches of "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True), or set_attn_implementation('sdpa')"
        )
    others = {"a mask": attention_mask, "attention sinks": s_aux, "a soft cap": softcap}
    unknown = [name for name, given in others.items() if given is not None]
    if len(query) != 1 or unknown:
        raise ValueError(
            f"{NAME}: it takes one row of packed documents and nothing beside it, got {len(query)} rows"
            f"{''.join(f', {name}' for name in unknown)}; set_attn_implementation('sdpa' or 'eager')"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = attend(
        query,
        key,
        value,
        causal=causal,
        window=sliding_window if causal else None,
        documents=Borders(cu_seq_lens_q, cu_seq_lens_k, int(max_length_q), int(max_length_k)),
        dropout_p=dropout,
        scale=scaling,
    )
    return output.transpose(1, 2), None
