"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1), with heads sharded over TP.

    q         = (W_q_up norm(W_q_down h), of which rope_size elements a head are turned), or W_q h
    latent, p = split(W_kv_down h)                    kv_rank and rope_size elements a token
    k, v      = split(W_kv_up norm(latent)), k joined with turned p, which all heads share

The down-projections and latents are replicated over tensor-parallel ranks: under sequence parallelism a rank
projects its tokens, and the narrow latents are gathered in place of hidden states. Latents enter the
tensor-parallel region where they are projected up, and there their gradients are summed over the ranks.
Over context-parallel ranks, too, latents and shared keys are gathered, and each rank projects all of them up:
576 elements a token of DeepSeek-V3 in place of 40,960.

A cache for generation holds latents and turned shared keys. A new token multiplies its queries by W_kv_up's
rows of keys and attends to latents as they are; the output is multiplied by its rows of values (section
2.1.2, "absorbed"). So nothing of a head is kept for a token.

Shapes: S sequence (over CP ranks this rank's part of T), B batch, H hidden, N heads of this rank, C kv_rank,
P rope_size, K nope_size, D = K + P width of queries and keys, V value_size.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmp.config import GPTConfig, RopeScaling
from fastmp.distributed.collectives import (
    copy_to_group,
    gather_from_group,
    gather_sequence,
    group_rank,
    group_size,
)
from fastmp.nn.core_attention import CoreAttention
from fastmp.nn.documents import Documents
from fastmp.nn.init import normal, residual_normal
from fastmp.nn.kv_cache import KeyValueCache
from fastmp.nn.placement import Placement
from fastmp.nn.recompute import is_recomputed, remade
from fastmp.nn.replicated import Linear, RMSNorm, RotaryPositions
from fastmp.ops import latent_norm_rope, rope
from fastmp.ops.attention import attend, pads_values
from fastmp.tensor_parallel.context import join_sequence
from fastmp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

__all__ = ["LatentAttention"]

_EPSILON = 1e-6  # of the norms of latents, in all published models


class LatentAttention(CoreAttention):
    """Multi-head latent attention; the arguments, inputs and results of `SelfAttention`.

    Args:
        config: `latent`; the rest as for `SelfAttention`.

    Raises:
        ValueError: as `SelfAttention`.

    Example:
        >>> from fastmp.config import LatentConfig
        >>> latent = LatentConfig(kv_rank=32, nope_size=16, rope_size=8, value_size=16)
        >>> config = GPTConfig(hidden_size=64, num_heads=4, position="rope", linear_bias=False, latent=latent)
        >>> LatentAttention(config)(torch.randn(8, 2, 64))[0].shape
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
        assert config.latent is not None
        spec, self.sizes, hidden = config.attention, config.latent, config.hidden_size
        super().__init__(config, on, causal=causal, scale=_scale(spec.query_size, config.rope_scaling))
        self.tp_group, self.sequence_parallel = on.groups.tp, on.sequence_parallel
        heads, q_rank, kv_rank = config.num_heads, self.sizes.q_rank, self.sizes.kv_rank

        def down(rank: int) -> Linear:
            return Linear(hidden, rank, config, on, bias=False, sequence_parallel=on.sequence_parallel)

        def norm(rank: int) -> RMSNorm:
            split: dict[str, Any] = {"group": on.groups.tp, "sequence_parallel": on.sequence_parallel}
            return RMSNorm(rank, eps=_EPSILON, **split, **on.tensor_options)

        def up(inputs: int, outputs: int, sequence_parallel: bool) -> ColumnParallelLinear:
            options = on.linear_options | {"sequence_parallel": sequence_parallel}
            made = normal(config)
            return ColumnParallelLinear(
                inputs, outputs, bias=False, gather_output=False, init_method=made, **options
            )

        self.q_down: Linear | None = None
        if q_rank is None:
            self.q = up(hidden, heads * spec.query_size, on.sequence_parallel)
        else:
            self.q_down = down(q_rank)
            self.q_up = up(q_rank, heads * spec.query_size, on.sequence_parallel)
        self.kv_down = down(kv_rank + self.sizes.rope_size)
        self.gathers_here = on.sequence_parallel and group_size(self.cp_group) > 1
        expanded = heads * (self.sizes.nope_size + self.sizes.value_size)
        self.kv_up = up(kv_rank, expanded, on.sequence_parallel and not self.gathers_here)
        self.proj = RowParallelLinear(
            heads * spec.value_size,
            hidden,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            init_method=residual_normal(config),
            **on.linear_options,
        )
        self.q_norm = None if q_rank is None else norm(q_rank)
        self.kv_norm = norm(kv_rank)
        self.prefetch_next = (self.kv_norm,)  # which one op applies together with the rotation
        self.rotary = RotaryPositions(config, on) if rotary is None else rotary
        self.recompute_kv = on.recompute_kv

    def forward(
        self,
        hidden_SBH: Tensor,
        key_padding_mask_BT: Tensor | None = None,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (S, B, H) and None; inputs and errors are those of `SelfAttention`."""
        self.check_given(hidden_SBH, key_padding_mask_BT, documents, cache)
        # 1. Queries: (S, B, N, D). Gathers hidden states or latents that are TP-sharded.
        if self.q_down is None or self.q_norm is None:
            q_SBX = self.q(hidden_SBH)
        else:
            q_SBX = self.q_up(self.q_norm(self.q_down(hidden_SBH)))
        S, B = q_SBX.shape[:2]
        q_SBND = q_SBX.view(S, B, self.num_heads, -1)
        # 2. Rotary positions: the end of each query is turned in place
        tables = self.rotary(S, documents if cache is None else cache.positions)
        turned: dict[str, Any] = {"interleaved": self.rotary.interleaved}
        rope(q_SBND[..., self.sizes.nope_size :], *tables, **turned, in_place=True)
        # 3. Normed latents and turned shared keys of this rank's tokens; shared keys of all: (S, B, 1, P)
        norm, down = self.kv_norm, self.kv_down(hidden_SBH)
        latent, shared = latent_norm_rope(
            down, norm.weight, *map(self._own_tokens, tables), eps=norm.eps, **turned
        )
        shared_SB1P = self._shared_keys(shared).unsqueeze(2)
        # 4. Generation: append to the cache; new tokens attend to all of it
        if cache is not None:
            held = torch.cat((self._whole(latent).unsqueeze(2), shared_SB1P), 3)
            (held_B1TE,) = cache.append(self, held)
            if cache.positions is not None:
                return self.proj(self._absorbed(q_SBND, held_B1TE, cache.seen(self.window)))
        # 5. All-gather latents and shared keys over CP
        if group_size(self.cp_group) > 1:
            latent = join_sequence(self._whole(latent), self.cp_group, dim=0)
            shared_SB1P = copy_to_group(join_sequence(shared_SB1P, self.cp_group, dim=0), self.tp_group)
        # 6. Keys and values of every head, and attention, which may keep latents in their place
        # A recomputed layer keeps nothing; hooks inside it would hide tensors from those of the checkpoint
        recomputes = self.recompute_kv and torch.is_grad_enabled() and not is_recomputed()
        special = group_size(self.cp_group) > 1 or self.window is not None or documents is not None
        # Where values are made again, they are padded here, or attention would pad and keep a copy
        project_up = partial(self._project_up, pads=recomputes and pads_values(latent, special))
        k_TBND, v_TBNV = made = project_up(latent, shared_SB1P)
        again = partial(project_up, latent.detach(), shared_SB1P.detach())
        with remade(again, made) if recomputes else nullcontext():
            q_BNSD, k_BNTD, v_BNTV = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_TBND, v_TBNV))
            context_SBNV = self.attend(q_BNSD, k_BNTD, v_BNTV, key_padding_mask_BT, documents)
        # 7. Row-parallel projection: (S, B, N * V) -> (S, B, H), summed over TP
        return self.proj(context_SBNV[..., : self.sizes.value_size].reshape(S, B, -1))

    def _project_up(self, latent: Tensor, shared_TB1P: Tensor, *, pads: bool) -> tuple[Tensor, Tensor]:
        """Return keys (T, B, N, D) and values (T, B, N, V) of every head from latents (T, B, C).

        pads: make values as wide as keys.
        """
        T, B = shared_TB1P.shape[:2]
        kv_TBNX = self.kv_up(latent).view(T, B, self.num_heads, -1)
        shared_TBNP = shared_TB1P.expand(-1, -1, self.num_heads, -1)
        k_TBND = torch.cat((kv_TBNX[..., : self.sizes.nope_size], shared_TBNP), 3)
        v_TBNV = kv_TBNX[..., self.sizes.nope_size :]
        if pads:
            v_TBNV = F.pad(v_TBNV, (0, k_TBND.shape[3] - v_TBNV.shape[3]))
        return k_TBND, v_TBNV

    def _own_tokens(self, table_SX: Tensor) -> Tensor:
        """Return the rows of this rank's tokens: under sequence parallelism, its part of the table."""
        if not self.sequence_parallel:
            return table_SX
        return table_SX.chunk(group_size(self.tp_group))[group_rank(self.tp_group)]

    def _shared_keys(self, keys: Tensor) -> Tensor:
        """Return all tokens' shared keys; each rank's heads have a part of their gradient."""
        if self.gathers_here:  # the parts are summed behind the all-gather over CP
            return self._whole(keys)
        if self.sequence_parallel:
            return gather_sequence(keys, self.tp_group)
        return keys if group_size(self.cp_group) > 1 else copy_to_group(keys, self.tp_group)

    def _whole(self, x: Tensor) -> Tensor:
        """Gather tokens over TP under sequence parallelism; a rank's gradient is that of its tokens."""
        return gather_from_group(x, self.tp_group, dim=0) if self.sequence_parallel else x

    def _absorbed(self, q_SBND: Tensor, held_B1TE: Tensor, seen_B1ST: Tensor) -> Tensor:
        """Return the attention (S, B, N * V) of new tokens of each row to latents and shared keys."""
        rank, nope, S = self.sizes.kv_rank, self.sizes.nope_size, len(q_SBND)
        up_NXC = self.kv_up.weight.view(self.num_heads, -1, rank)
        # 1. Queries of latents: (S, B, N, K) -> (B, S, N, C); the turned part stays: (B, S, N, P)
        q_BSND = q_SBND.transpose(0, 1)
        q_BSNC = torch.einsum("bsnk,nkc->bsnc", q_BSND[..., :nope], up_NXC[:, :nope])
        q_B1XE = torch.cat((q_BSNC, q_BSND[..., nope:]), 3).flatten(1, 2).unsqueeze(1)
        # 2. All heads of all new tokens share what is held, as keys and as values
        seen_B1XT = seen_B1ST if S == 1 else seen_B1ST.repeat_interleave(self.num_heads, 2)
        output_B1XE = attend(q_B1XE, held_B1TE, held_B1TE, causal=False, mask=seen_B1XT, scale=self.scale)
        # 3. (B, S, N, C) -> (S, B, N, V)
        output_BSNC = output_B1XE.squeeze(1)[..., :rank].unflatten(1, (S, self.num_heads))
        return torch.einsum("bsnc,nvc->sbnv", output_BSNC, up_NXC[:, nope:]).flatten(2)

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"heads={self.num_heads}, causal={self.causal}{window}"


def _scale(query_size: int, scaling: RopeScaling | None) -> float:
    """Return the factor of the scores: YaRN sharpens them for longer contexts."""
    scale = query_size**-0.5
    if scaling is None or scaling.kind != "yarn" or not scaling.mscale_all_dim:
        return scale
    return float(scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2)
