"""Modules that are replicated over tensor-parallel ranks: norms, small embeddings, rotary tables, heads.

Under sequence parallelism a rank applies them to its slice of the sequence, so its gradient is a partial sum.
The parameters are marked `sequence_parallel`; conversions and copies keep the marks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from fastmp.config import NORMS, GPTConfig
from fastmp.config.specs import load
from fastmp.distributed.collectives import group_size
from fastmp.nn.documents import Positions
from fastmp.nn.init import normal
from fastmp.nn.placement import Placement
from fastmp.nn.rope import attention_factor, scaled_frequencies
from fastmp.ops import layer_norm, rms_norm, rope_cos_sin
from fastmp.ops.core.registry import can_read_values
from fastmp.ops.wgrad import linear
from fastmp.tensor_parallel.attributes import ParallelAttributes
from fastmp.tensor_parallel.context import cut_sequence
from fastmp.tensor_parallel.layers import GroupModule, ParallelModule

__all__ = [
    "LayerNorm",
    "Linear",
    "PositionEmbedding",
    "RMSNorm",
    "RotaryPositions",
    "TokenTypeEmbedding",
    "make_norm",
]


class _Replicated(ParallelModule):
    def __init__(self, group: ProcessGroup | None, sequence_parallel: bool) -> None:
        super().__init__(group)
        self.sequence_parallel = sequence_parallel

    def _marks(self) -> dict[str, ParallelAttributes]:
        return dict.fromkeys(self._parameters, ParallelAttributes(sequence_parallel=self.sequence_parallel))

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, sequence_parallel={self.sequence_parallel}"


class _Norm(_Replicated):
    _has_bias: bool

    def __init__(
        self,
        size: int,
        *,
        group: ProcessGroup | None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        if self._has_bias:
            self.bias = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))
        self._mark()

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, sequence_parallel={self.sequence_parallel}"


class LayerNorm(_Norm):
    """Layer normalisation over the last dimension, (..., size), with weight and bias (size,).

    Args:
        group: tensor-parallel group; None: a single rank.
        sequence_parallel: the rank holds its slice of the sequence only.
    """

    _has_bias = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(_Norm):
    """Root mean square normalisation over the last dimension, (..., size), with weight (size,).

    The arguments are those of `LayerNorm`. `sequence_parallel` is also True for norms of single heads, as a
    rank has only its shard of the heads.
    """

    _has_bias = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, eps=self.eps)


class Linear(_Replicated):
    """y = x W^T + b for x (..., input_size), with the weight replicated over TP.

    sequence_parallel: the rank holds its slice of the sequence only; otherwise tokens are replicated, too.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config: GPTConfig,
        on: Placement,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(on.groups.tp, sequence_parallel)
        self.weight = nn.Parameter(torch.empty(output_size, input_size, **on.tensor_options))
        self.bias = nn.Parameter(torch.zeros(output_size, **on.tensor_options)) if bias else None
        self._mark()
        self._init_weight((output_size, input_size), normal(config), "full", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


def make_norm(config: GPTConfig, on: Placement) -> nn.Module:
    """Return the norm of hidden states that `config.norm` names."""
    norm: nn.Module = load(NORMS[config.norm].make)(
        config.hidden_size,
        eps=config.layernorm_epsilon,
        group=on.groups.tp,
        sequence_parallel=on.sequence_parallel,
        **on.tensor_options,
    )
    return norm


class RotaryPositions(GroupModule):
    """Tables of cos and sin for positions 0 to max_seq_len - 1, (max_seq_len, D / 2), for `ops.rope_qk`.

    forward(S) gives the rows of this rank's S tokens, (S, D / 2): the first S, or over CP ranks its slices of
    the first S * CP. forward(S, positions) gives those of tokens that have others, in packed documents or
    behind a cache, (S, B, D / 2), made once for all layers. `config.rope_scaling` changes the angles, and
    multiplies both tables by a factor:

    - "longrope" has two tables, (2, max_seq_len, D / 2), for short sequences and for long ones.
    - "dynamic" has two as well, for short sequences and for those of max_seq_len tokens; the angles of
      lengths between them are computed at each call.

    The length S * CP selects on the host. Given positions select on the device, by the largest of the batch.

    The tables are float32, or float64 in a float64 model, whatever the model is cast to: a cast or a move
    makes new ones. They are not part of a checkpoint, and one module serves all layers.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: GPTConfig, on: Placement = Placement()) -> None:
        super().__init__()
        self.cp_group = on.groups.cp
        self.length, self.dim = config.max_seq_len, config.attention.rope_size
        self.base, self.interleaved = config.rope_base, config.rope_interleaved
        self.scaling = config.rope_scaling
        for name, table in zip(("cos", "sin"), self._tables(torch.empty(0, **on.tensor_options))):
            self.register_buffer(name, table, persistent=False)

    def forward(self, length: int, positions: Positions | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if positions is not None:
            return positions.once((self, self.cos.dtype), lambda: self._at(positions))
        whole = length * group_size(self.cp_group)
        tables = self.cos, self.sin
        if self.scaling is not None and self.scaling.by_length:
            which = int(self.scaling.extends(whole))
            if which and self.scaling.kind == "dynamic" and whole != self.length:
                tables = self._angles(whole, whole, self.cos)
            else:
                tables = self.cos[which], self.sin[which]
        cos, sin = (cut_sequence(table[:whole], self.cp_group, dim=0) for table in tables)
        return cos, sin

    def _at(self, positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        position_ids_SB = cut_sequence(positions.position_ids_BT, self.cp_group).t()
        if self.scaling is None or not self.scaling.by_length:
            return self.cos[position_ids_SB], self.sin[position_ids_SB]
        length = positions.position_ids_BT.amax() + 1
        if self.scaling.kind == "dynamic":
            return self._angles(position_ids_SB, length, self.cos)
        long = length > self.scaling.original_max_seq_len
        (short_cos, long_cos), (short_sin, long_sin) = (
            (table[0][position_ids_SB], table[1][position_ids_SB]) for table in (self.cos, self.sin)
        )
        return torch.where(long, long_cos, short_cos), torch.where(long, long_sin, short_sin)

    def _tables(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scaling is None or not self.scaling.by_length:
            return self._angles(self.length, 0, like)
        longest = max(self.length, self.scaling.original_max_seq_len + 1)
        short, long = (self._angles(self.length, length, like) for length in (0, longest))
        return torch.stack((short[0], long[0])), torch.stack((short[1], long[1]))

    def _angles(
        self, positions: int | torch.Tensor, length: int | torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of positions in a sequence of `length` tokens."""
        options: dict[str, Any] = {
            "base": self.base,
            "dtype": torch.promote_types(like.dtype, torch.float32),
            "device": like.device,
        }
        if self.scaling is None:
            return rope_cos_sin(positions, self.dim, **options)
        scaled = partial(scaled_frequencies, self.scaling, base=self.base, length=length)
        cos, sin = rope_cos_sin(positions, self.dim, scaled=scaled, **options)
        factor = attention_factor(self.scaling)
        return cos * factor, sin * factor

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryPositions:
        moved = fn(self.cos[:0])
        if (
            moved.device != self.cos.device
            or torch.promote_types(moved.dtype, torch.float32) != self.cos.dtype
        ):
            self.cos, self.sin = self._tables(moved)
        return self

    def extra_repr(self) -> str:
        return f"{self.length}, dim={self.dim}, base={self.base}"


class PositionEmbedding(_Replicated):
    """Learned positions: row s of a table (max_seq_len, H) is added to position s of (S, B, H).

    Tokens of packed documents, and those behind a cache, take the rows of their own positions.

    Over CP ranks the input is this rank's slices of the sequence, under sequence parallelism this TP rank's
    part of them.
    """

    def __init__(self, config: GPTConfig, on: Placement = Placement()) -> None:
        super().__init__(on.groups.tp, on.sequence_parallel)
        self.cp_group = on.groups.cp
        size = config.max_seq_len, config.hidden_size
        self.weight = nn.Parameter(torch.empty(size, **on.tensor_options))
        self._mark()
        self._init_weight(size, normal(config), "full", None)  # equal on all ranks

    def forward(self, words_SBH: torch.Tensor, positions: Positions | None = None) -> torch.Tensor:
        S = words_SBH.shape[0]
        first, length = (self.tp_rank * S, self.tp_size * S) if self.sequence_parallel else (0, S)
        if positions is not None:
            position_ids_SB = cut_sequence(positions.position_ids_BT, self.cp_group).t()
            return words_SBH + self.weight[position_ids_SB[first : first + S]]
        rows = cut_sequence(self.weight[: length * group_size(self.cp_group)], self.cp_group, dim=0)
        return words_SBH + rows[first : first + S].unsqueeze(1)


class TokenTypeEmbedding(_Replicated):
    """Adds row t of a table (number, H) to (S, B, H) where a token has type t.

    Under sequence parallelism the input is this TP rank's part of the sequence; types (B, S) are those of all
    of it. ValueError on a CPU for a type that the table does not have.
    """

    def __init__(self, number: int, config: GPTConfig, on: Placement = Placement()) -> None:
        super().__init__(on.groups.tp, on.sequence_parallel)
        size = number, config.hidden_size
        self.weight = nn.Parameter(torch.empty(size, **on.tensor_options))
        self._mark()
        self._init_weight(size, normal(config), "full", None)

    def forward(self, words_SBH: torch.Tensor, types_BS: torch.Tensor) -> torch.Tensor:
        if types_BS.numel() and can_read_values(types_BS):
            low, high = (int(kind) for kind in types_BS.aminmax())
            if low < 0 or high >= len(self.weight):
                wrong = low if low < 0 else high
                raise ValueError(
                    f"TokenTypeEmbedding: token type {wrong} is not in 0 .. {len(self.weight) - 1}"
                )
        S = words_SBH.shape[0]
        first = self.tp_rank * S if self.sequence_parallel else 0
        return words_SBH + F.embedding(types_BS.t()[first : first + S], self.weight)
