"""Self-attention with heads sharded over a tensor-parallel group (Shoeybi et al. 2019, section 3).

One fused projection makes queries, keys and values. Its rows are grouped by key/value head: the query heads
of a group, then its key, then its value. So a contiguous split over TP gives every rank complete groups, for
both multi-head and grouped-query attention (Ainslie et al. 2023), and the full weight is bit for bit the
same at every TP size.

Rotary positions (Su et al. 2021) rotate queries and keys in one launch, after the QK norms if there are any
(Dehghani et al. 2023, as in Qwen3).

Over a context-parallel group each rank has the queries of two slices of the sequence
(`tensor_parallel/context.py`) and all-gathers the keys and values (as Llama 3 does, arXiv 2407.21783, section
3.3.2). Keys are in order, so a slice attends to a prefix of them, up to a diagonal, which `ops.attention` has
kernels for. With a sliding window, keys before the first token's window are cut off.

Shapes: S sequence (over CP ranks this rank's part of T), B batch, H hidden, G key/value heads of this rank, R
query heads per key/value head, N = G * R query heads of this rank, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch

from fastmp.config import GPTConfig
from fastmp.distributed.collectives import group_size
from fastmp.nn.core_attention import CoreAttention
from fastmp.nn.documents import Documents
from fastmp.nn.init import normal, residual_normal
from fastmp.nn.kv_cache import KeyValueCache
from fastmp.nn.placement import Placement
from fastmp.nn.replicated import RMSNorm, RotaryPositions
from fastmp.ops import rope_qk
from fastmp.ops.attention import attend
from fastmp.tensor_parallel.context import join_sequence
from fastmp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

__all__ = ["SelfAttention"]


class SelfAttention(CoreAttention):
    """Multi-head or grouped-query self-attention; one all-reduce over TP in forward and one in backward.

    Over CP ranks there is also an all-gather of keys and values in forward and a reduce-scatter in backward.
    The gathered keys and values, 2 * T * B * G * D elements, are kept for backward unless the layer is
    recomputed.

    Args:
        config: sizes, `attention_dropout`, `sliding_window`, `attention_sinks`, and the spread of the initial
            weights.
        on: heads are sharded over `groups.tp`, the sequence over `groups.cp`. Attention dropout draws from
            the random stream of this TP and CP rank.
        causal: a token attends only to itself and the tokens before it.
        rotary: the tables of `config.position` "rope", shared by layers; None: this layer makes its own.

    Raises:
        ValueError: heads or key/value heads are not divisible by the TP size, there is dropout over several
            ranks without `on.rng`, or a sliding window without causality.

    Example:
        >>> attention = SelfAttention(GPTConfig(hidden_size=64, num_heads=4, num_kv_heads=2))
        >>> output, bias = attention(torch.randn(8, 2, 64))
        >>> output.shape
        torch.Size([8, 2, 64])
    """

    def __init__(
        self,
        config: GPTConfig,
        on: Placement = Placement(),
        *,
        causal: bool = True,
        rotary: RotaryPositions | None = None,
    ) -> None:
        super().__init__(config, on, causal=causal)
        tp = group_size(on.groups.tp)
        self.num_kv_heads = config.kv_heads // tp
        self.queries_per_kv = config.num_heads // config.kv_heads
        self.head_dim = config.head_dim
        qkv_size = (config.num_heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            qkv_size,
            bias=config.has_qkv_bias,
            gather_output=False,
            fused_rows=(self.queries_per_kv * self.head_dim, self.head_dim, self.head_dim),
            init_method=normal(config),
            **on.linear_options,
        )
        self.proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.linear_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            init_method=residual_normal(config),
            **on.linear_options,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:  # a rank normalises its own heads: the gradients of the ranks are added
            norm: dict[str, Any] = {
                "eps": config.layernorm_epsilon,
                "group": on.groups.tp,
                "sequence_parallel": True,
            }
            self.q_norm = RMSNorm(self.head_dim, **norm, **on.tensor_options)
            self.k_norm = RMSNorm(self.head_dim, **norm, **on.tensor_options)
        self.rotary: RotaryPositions | None = None
        if config.position == "rope":
            self.rotary = RotaryPositions(config, on) if rotary is None else rotary

    def forward(
        self,
        hidden_SBH: torch.Tensor,
        key_padding_mask_BT: torch.Tensor | None = None,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output (S, B, H) without the projection's bias, and that bias (H,) or None.

        Args:
            hidden_SBH: (S, B, H), or (S/TP, B, H) under sequence parallelism.
            key_padding_mask_BT: bool, True for padding (as in `torch.nn.MultiheadAttention`), of the full
                sequence also under sequence and context parallelism. A padding token attends only to itself:
                its output is finite and means nothing.
            documents: packed documents; a token attends only to its own document, and has its position there.
            cache: stores the keys and values of these tokens, which attend to earlier ones there as well. For
                evaluation mode, under `torch.no_grad()`.

        Raises:
            ValueError: a CP rank's tokens are not two equal slices; padding is combined with documents; a
                cache is combined with either, with CP ranks, or with causal=False.
        """
        self.check_given(hidden_SBH, key_padding_mask_BT, documents, cache)
        modules: dict[str, Any] = self._modules  # an attribute that is a module takes 1 us to find
        # Column-parallel projection: (S, B, H) -> (S, B, G * (R + 2) * D); gathers a TP-sharded sequence
        qkv = modules["qkv"](hidden_SBH)
        S, B = qkv.shape[:2]
        G, R, D = self.num_kv_heads, self.queries_per_kv, self.head_dim
        q_SBGRD, k_SBG1D, v_SBG1D = qkv.view(S, B, G, R + 2, D).split((R, 1, 1), dim=3)
        # QK norms over each head, then rotary positions: (S, B, G, R, D) and (S, B, G, 1, D)
        if self.q_norm is not None and self.k_norm is not None:
            q_SBGRD, k_SBG1D = self.q_norm(q_SBGRD), self.k_norm(k_SBG1D)
        if self.rotary is not None:
            positions = documents if cache is None else cache.positions
            q_SBGRD, k_SBG1D = rope_qk(
                q_SBGRD, k_SBG1D, *self.rotary(S, positions), interleaved=self.rotary.interleaved
            )
        # Generation: append to the cache; new tokens attend to all of it
        if cache is not None:
            k_BGTD, v_BGTD = cache.append(self, k_SBG1D.squeeze(3), v_SBG1D.squeeze(3))
            if cache.positions is not None:
                context_SBX = self._decoded(q_SBGRD, k_BGTD, v_BGTD, cache.seen(self.window))
                return self.proj(context_SBX)
        # All-gather keys and values over CP: (S, B, G, 2, D) -> (T, B, G, 2, D)
        if group_size(self.cp_group) > 1:
            kv_TBG2D = join_sequence(torch.cat((k_SBG1D, v_SBG1D), 3), self.cp_group, dim=0)
            k_TBG1D, v_TBG1D = kv_TBG2D.split(1, 3)
        else:
            k_TBG1D, v_TBG1D = k_SBG1D, v_SBG1D
        # Fused attention wants (batch, heads, sequence, head); key/value heads are broadcast to R query heads
        q_BNSD = q_SBGRD.reshape(S, B, G * R, D).permute(1, 2, 0, 3)  # copied only where R > 1, as projected
        k_BGTD, v_BGTD = (x.squeeze(3).permute(1, 2, 0, 3) for x in (k_TBG1D, v_TBG1D))
        context_SBND = self.attend(q_BNSD, k_BGTD, v_BGTD, key_padding_mask_BT, documents)
        # Row-parallel projection: (S, B, N * D) -> (S, B, H), summed over TP
        output_SBH, bias_H = modules["proj"](context_SBND.reshape(S, B, G * R * D))
        return output_SBH, bias_H

    def _decoded(
        self, q_SBGRD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, seen_B1ST: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention (S, B, G * R * D) of new tokens to a cache.

        The queries of a group, of all new tokens, are the rows of one product with its keys.
        """
        S, B, G, R, D = q_SBGRD.shape
        q_BGXD = q_SBGRD.permute(1, 2, 0, 3, 4).flatten(2, 3)
        seen_B1XT = seen_B1ST if S == 1 else seen_B1ST.repeat_interleave(R, 2)
        sinks_GX = None if self.sinks is None else self.sinks.view(G, R).repeat(1, S)
        context_BGXD = attend(q_BGXD, k_BGTD, v_BGTD, causal=False, mask=seen_B1XT, sinks=sinks_GX)
        return context_BGXD.unflatten(2, (S, R)).permute(2, 0, 1, 3, 4).reshape(S, B, G * R * D)

    def extra_repr(self) -> str:
        heads = self.num_kv_heads * self.queries_per_kv
        window = "" if self.window is None else f", window={self.window}"
        sinks = ", sinks" if self.sinks is not None else ""
        return f"heads={heads}, kv_heads={self.num_kv_heads}, causal={self.causal}{window}{sinks}"
