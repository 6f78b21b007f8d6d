"""The core of attention: masks, windows, packed documents, dropout and the slices of context-parallel ranks.

Kinds of attention make queries, keys and values; what they have in common is here. Over a context-parallel
group each rank has the queries of two slices of the sequence (`tensor_parallel/context.py`) and the keys of
all of it, in order. So a slice attends to a prefix of them, up to a diagonal, which `ops.attention` has
kernels for. With a sliding window, keys before the first token's window are cut off.

Shapes: S sequence (over CP ranks this rank's part of T), B batch, G key/value heads of this rank, N query
heads of this rank, D width of a head.
"""

from __future__ import annotations

import torch
from torch import nn

from fastmp.config import GPTConfig
from fastmp.distributed.collectives import group_size
from fastmp.nn.documents import Documents
from fastmp.nn.dropout import random_stream, require_rng
from fastmp.nn.init import normal
from fastmp.nn.kv_cache import KeyValueCache
from fastmp.nn.placement import Placement
from fastmp.ops.attention import attend
from fastmp.tensor_parallel.attributes import ParallelAttributes
from fastmp.tensor_parallel.context import local_positions, local_slices
from fastmp.tensor_parallel.layers import ParallelModule

__all__ = ["CoreAttention"]


class CoreAttention(ParallelModule):
    """Base of attention modules: the attention of queries to keys and values, without projections.

    With `config.attention_sinks` it has a parameter `sinks` (N,), a logit for each head of this rank.

    Args:
        config: `attention_dropout`, `sliding_window`, `attention_sinks`.
        on: heads are sharded over `groups.tp`, the sequence over `groups.cp`. Attention dropout draws from
            the random stream of this TP and CP rank.
        causal: a token attends only to itself and the tokens before it.
        scale: factor of the scores; None: query_size ** -0.5.

    Raises:
        ValueError: heads or key/value heads are not divisible by the TP size, there is dropout over several
            ranks without `on.rng`, or a sliding window without causality.
    """

    def __init__(self, config: GPTConfig, on: Placement, *, causal: bool, scale: float | None = None) -> None:
        super().__init__(on.groups.tp)
        name, tp = type(self).__name__, self.tp_size
        for what, heads in (("num_heads", config.num_heads), ("num_kv_heads", config.attention.kv_heads)):
            if heads % tp:
                raise ValueError(f"{name}: {what} {heads} is not divisible by the tensor-parallel size {tp}")
        require_rng(name, config.attention_dropout, on, sharded=True)
        if config.sliding_window is not None and not causal:
            raise ValueError(
                f"{name}: sliding_window {config.sliding_window} needs causal=True, got causal=False"
            )
        self.num_heads = config.num_heads // tp
        self.window, self.cp_group = config.sliding_window, on.groups.cp
        self.dropout, self.rng, self.causal, self.scale = config.attention_dropout, on.rng, causal, scale
        self.sinks: nn.Parameter | None = None
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(self.num_heads, **on.tensor_options))
            self._mark()
            self._init_weight((config.num_heads,), normal(config), on.init, on.rng, "sinks")

    def _marks(self) -> dict[str, ParallelAttributes]:
        return {"sinks": ParallelAttributes(True, 0)}

    def check_given(
        self,
        hidden_SBH: torch.Tensor,
        key_padding_mask_BT: torch.Tensor | None,
        documents: Documents | None,
        cache: KeyValueCache | None,
    ) -> None:
        """Raise ValueError for inputs of `forward` that exclude each other."""
        if key_padding_mask_BT is not None and documents is not None:
            raise ValueError(
                f"{type(self).__name__}: expected key_padding_mask or documents, got both: padding is its "
                "own document"
            )
        if cache is not None:
            self._check_cached(hidden_SBH, cache, key_padding_mask_BT is not None or documents is not None)

    def attend(
        self,
        q_BNSD: torch.Tensor,
        k_BGTD: torch.Tensor,
        v_BGTD: torch.Tensor,
        key_padding_mask_BT: torch.Tensor | None = None,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """Return attention's output (S, B, N, D); over CP ranks, of one slice of the queries at a time."""
        dropout, (B, _, T, _) = self.dropout if self.training else 0.0, k_BGTD.shape
        mask = None if key_padding_mask_BT is None else self._padding_mask(key_padding_mask_BT, (B, T))
        causal = self.causal and mask is None  # which says all
        window, rng, cp = self.window if causal else None, self.rng, group_size(self.cp_group)

        def attended(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: range, keys: range
        ) -> torch.Tensor:
            borders = None if documents is None else documents.borders(queries, keys)
            return attend(
                q, k, v, causal=causal, window=window, mask=mask, documents=borders, sinks=self.sinks,
                dropout_p=dropout, scale=self.scale,
            ).permute(2, 0, 1, 3)  # fmt: skip

        with random_stream(
            rng if dropout > 0.0 else None, q_BNSD.device, sharded=True, cp_group=self.cp_group
        ):
            # 1. On one rank, and where queries see all keys or those of the mask: one call
            if cp == 1 or not (causal or documents is not None):
                return attended(q_BNSD, k_BGTD, v_BGTD, range(T), range(T))
            # 2. Over CP ranks: each slice of the queries attends to a prefix of the keys
            contexts, size = [], T // (2 * cp)
            for q_BNCD, number in zip(q_BNSD.chunk(2, 2), local_slices(self.cp_group)):
                queries = range(number * size, (number + 1) * size)
                keys = self._keys(queries, T, causal)
                k, v = (x[:, :, keys.start : keys.stop] for x in (k_BGTD, v_BGTD))
                contexts.append(attended(q_BNCD, k, v, queries, keys))
        return torch.cat(contexts)

    def _check_cached(self, hidden_SBH: torch.Tensor, cache: KeyValueCache, others: bool) -> None:
        if others or not self.causal or group_size(self.cp_group) > 1:
            raise ValueError(
                f"{type(self).__name__}: a cache needs causal=True, one context-parallel rank, and no "
                f"padding or documents, got causal={self.causal}, {group_size(self.cp_group)} ranks"
                f"{' and padding or documents' * others}"
            )
        expected = len(hidden_SBH) if cache.positions is None else cache.positions.position_ids_BT.shape[1]
        if len(hidden_SBH) != expected:
            raise ValueError(
                f"{type(self).__name__}: expected {expected} new tokens per row after a filled cache, got "
                f"{len(hidden_SBH)}"
            )

    def _keys(self, queries: range, length: int, causal: bool) -> range:
        """Return the keys, of `length`, that queries at these positions may attend to."""
        if not causal:
            return range(length)
        first = 0 if self.window is None else max(0, queries.start + 1 - self.window)
        return range(first, queries.stop)

    def _padding_mask(self, padding_BT: torch.Tensor, expected: tuple[int, int]) -> torch.Tensor:
        """Return the boolean mask (B, 1, S, T), True where a query may attend to a key."""
        if padding_BT.dtype != torch.bool or tuple(padding_BT.shape) != expected:
            raise ValueError(
                f"{type(self).__name__}: key_padding_mask must be bool of shape (batch, sequence) "
                f"{expected}, got {padding_BT.dtype} of shape {tuple(padding_BT.shape)}"
            )
        keys_T = torch.arange(expected[1], device=padding_BT.device)
        queries_S1 = local_positions(expected[1], self.cp_group, padding_BT.device).unsqueeze(1)
        seen_BST = (keys_T == queries_S1) | ~padding_BT[:, None, :]
        if self.causal:
            seen_BST = seen_BST & (keys_T <= queries_S1)
        if self.window is not None:
            seen_BST = seen_BST & (keys_T > queries_S1 - self.window)
        return seen_BST.unsqueeze(1)
