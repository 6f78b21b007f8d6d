"""Self-attention with its heads divided over a tensor-parallel group (Shoeybi et al. 2019, section 3).

One fused projection makes queries, keys and values. Its rows are grouped by key/value head: the queries that
share a head, then the head's key, then its value, and so on. So a plain contiguous split over TP gives every
rank whole groups, for any number of query heads per group (GQA, Ainslie et al. 2023), and the full weight
initialised at one TP size is, bit for bit, the weight of every other.

Rotary positions (Su et al. 2021) turn queries and keys in one launch, after their norms where there are any
(Dehghani et al. 2023, as in Qwen3).

Shapes: S sequence, B batch, H hidden, G key/value heads of this rank, R query heads per key/value head,
N = G * R query heads of this rank, D width of a head.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from fastmp.config import GPTConfig
from fastmp.nn.dropout import require_rng, sharded_region
from fastmp.nn.init import normal, residual_normal
from fastmp.nn.replicated import RMSNorm, RotaryPositions
from fastmp.ops import rope_qk
from fastmp.parallel.collectives import group_size
from fastmp.parallel.layers import ColumnParallelLinear, RowParallelLinear
from fastmp.parallel.rng import RngTracker

__all__ = ["SelfAttention"]


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence with itself; one all-reduce forward and one backward.

    Args:
        config: sizes, `attention_dropout`, and the spread of the initial weights.
        group: tensor-parallel group, None for this rank alone.
        rng: generator states; dropout inside attention draws from the stream of this TP rank.
        causal: a token sees itself and those before it only.
        rotary: the tables of `config.position` "rope", shared by layers; None makes one.
        sequence_parallel: input and output are this rank's part of the sequence, (S/TP, B, H).
        init: "full" (bitwise the same at every TP) or "sharded", as in the parallel layers.

    Raises ValueError where the heads or key/value heads are not divisible by the TP size.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        group: ProcessGroup | None,
        rng: RngTracker | None = None,
        causal: bool = True,
        rotary: RotaryPositions | None = None,
        sequence_parallel: bool = False,
        init: str = "full",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        tp = group_size(group)
        for name, heads in (("num_heads", config.num_heads), ("num_kv_heads", config.kv_heads)):
            if heads % tp:
                raise ValueError(
                    f"SelfAttention: {name} {heads} is not divisible by the tensor-parallel size {tp}"
                )
        require_rng("SelfAttention", config.attention_dropout, group, rng)
        self.num_kv_heads = config.kv_heads // tp
        self.queries_per_kv = config.num_heads // config.kv_heads
        self.head_dim = config.head_dim
        self.dropout, self.rng, self.causal = config.attention_dropout, rng, causal
        options = {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "bias": config.linear_bias,
            "init": init,
            "rng": rng,
            "device": device,
            "dtype": dtype,
        }
        qkv_size = (config.num_heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = ColumnParallelLinear(
            config.hidden_size, qkv_size, gather_output=False, init_method=normal(config), **options
        )
        self.proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            init_method=residual_normal(config),
            **options,
        )
        place = {"device": device, "dtype": dtype}
        self.q_norm = self.k_norm = None
        if config.qk_norm:  # of this rank's heads: the gradients of the ranks are added
            norm = {"group": group, "size": self.head_dim, "sequence_parallel": True, **place}
            self.q_norm, self.k_norm = RMSNorm(config, **norm), RMSNorm(config, **norm)
        self.rotary = None
        if config.position == "rope":
            self.rotary = RotaryPositions(config, **place) if rotary is None else rotary

    def forward(
        self, hidden_SBH: torch.Tensor, key_padding_mask_BS: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output (S, B, H) without the bias of its projection, and that bias (H,) or None.

        `key_padding_mask_BS` is boolean, True for padding (as in `torch.nn.MultiheadAttention`), and covers
        the whole sequence also under sequence parallelism. Nobody sees a padding token except that token
        itself, so its own output is finite and means nothing.
        """
        qkv = self.qkv(hidden_SBH)
        S, B = qkv.shape[:2]
        G, R, D = self.num_kv_heads, self.queries_per_kv, self.head_dim
        q_SBGRD, k_SBG1D, v_SBG1D = qkv.view(S, B, G, R + 2, D).split((R, 1, 1), dim=3)
        if self.q_norm is not None:
            q_SBGRD, k_SBG1D = self.q_norm(q_SBGRD), self.k_norm(k_SBG1D)
        if self.rotary is not None:
            q_SBGRD, k_SBG1D = rope_qk(q_SBGRD, k_SBG1D, *self.rotary(S))
        q_BNSD = q_SBGRD.reshape(S, B, G * R, D).permute(1, 2, 0, 3)  # copied only where R > 1, as projected
        k_BGSD, v_BGSD = (x.squeeze(3).permute(1, 2, 0, 3) for x in (k_SBG1D, v_SBG1D))
        mask = None if key_padding_mask_BS is None else self._mask(key_padding_mask_BS, (B, S))
        dropout = self.dropout if self.training else 0.0
        with sharded_region(self.rng, qkv.device) if dropout > 0.0 else nullcontext():
            context_BNSD = F.scaled_dot_product_attention(
                q_BNSD,
                k_BGSD,
                v_BGSD,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=self.causal and mask is None,
                enable_gqa=R > 1,
            )
        return self.proj(context_BNSD.permute(2, 0, 1, 3).reshape(S, B, G * R * D))

    def _mask(self, padding_BS: torch.Tensor, expected: tuple[int, int]) -> torch.Tensor:
        """Boolean (B, 1, S, S), True where a query may look at a key."""
        if padding_BS.dtype != torch.bool or tuple(padding_BS.shape) != expected:
            raise ValueError(
                f"SelfAttention: key_padding_mask must be bool of shape (batch, sequence) {expected}, "
                f"got {padding_BS.dtype} of shape {tuple(padding_BS.shape)}"
            )
        S = expected[1]
        itself_SS = torch.eye(S, dtype=torch.bool, device=padding_BS.device)
        seen_BSS = itself_SS | ~padding_BS[:, None, :]
        if self.causal:
            seen_BSS = seen_BSS & torch.ones_like(itself_SS).tril()
        return seen_BSS.unsqueeze(1)

    def extra_repr(self) -> str:
        heads = self.num_kv_heads * self.queries_per_kv
        return f"heads={heads}, kv_heads={self.num_kv_heads}, causal={self.causal}"
