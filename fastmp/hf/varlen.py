"""Variable-length attention for transformers models, as an implementation of transformers' interface.

`register` adds "fastmp_varlen" to the implementations of `model.set_attn_implementation`. It takes batches of
`DataCollatorWithFlattening(return_flash_attn_kwargs=True)`: one row of packed documents and their cumulative
lengths. No (T, T) mask is materialised.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastmp.ops.attention import Borders, attend

NAME = "fastmp_varlen"


def register() -> None:
    """Register "fastmp_varlen" with transformers, which makes no masks for custom implementations."""
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
    """Compute attention within documents: transformers' attention interface.

    Args:
        module: the attention module; its `is_causal` is the default of `is_causal`.
        query: (1, N, T, D).
        key: (1, G, E, D).
        value: (1, G, E, D).
        attention_mask: must be None.
        scaling: of the scores; None: 1 / sqrt(D).
        dropout: probability for attention weights.
        is_causal: queries attend to earlier keys of their document only.
        sliding_window: number of keys that a causal query attends to; None: all.
        cu_seq_lens_q: cumulative lengths of documents, (documents + 1,) int32.
        cu_seq_lens_k: as `cu_seq_lens_q`, of keys.
        max_length_q: length of the longest document.
        max_length_k: as `max_length_q`, of keys.
        s_aux: attention sinks; must be None.
        softcap: of the scores; must be None.

    Returns:
        The output (1, T, N, D), and None for the attention weights.

    Raises:
        ValueError: lengths of documents are missing, or there are several rows, a mask, sinks or a soft cap.
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
            f"{NAME}: expected one row of packed documents, got {len(query)} rows"
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
