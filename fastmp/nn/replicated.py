"""Parameters that every tensor-parallel rank holds whole: layer norms and the position table.

Under sequence parallelism a rank uses them on its part of the sequence, so its gradient is a partial sum; the
marks that say so are kept through conversions and copies.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fastmp.config import GPTConfig
from fastmp.nn.init import normal
from fastmp.ops import layer_norm
from fastmp.parallel.layers import ParallelAttributes, ParallelModule

__all__ = ["LayerNorm", "PositionEmbedding"]


class _Replicated(ParallelModule):
    def __init__(self, group: ProcessGroup | None, sequence_parallel: bool) -> None:
        super().__init__(group)
        self.sequence_parallel = sequence_parallel

    def _marks(self) -> dict[str, ParallelAttributes]:
        return dict.fromkeys(self._parameters, ParallelAttributes(sequence_parallel=self.sequence_parallel))


class LayerNorm(_Replicated):
    """Layer normalisation of (..., H), with weight and bias (H,); weight starts at one."""

    def __init__(
        self,
        config: GPTConfig,
        *,
        group: ProcessGroup | None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel)
        self.eps = config.layernorm_epsilon
        self.weight = nn.Parameter(torch.ones(config.hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size, device=device, dtype=dtype))
        self._mark()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, sequence_parallel={self.sequence_parallel}"


class PositionEmbedding(_Replicated):
    """Learned positions: adds row s of a table (max_seq_len, H) to position s of (S, B, H).

    Under sequence parallelism its input is this rank's part of the sequence.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        group: ProcessGroup | None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel)
        self.weight = nn.Parameter(
            torch.empty(config.max_seq_len, config.hidden_size, device=device, dtype=dtype)
        )
        self._mark()
        with torch.no_grad():  # from the default stream, equal on all ranks, drawn in at least float32
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            self.weight.copy_(normal(config)(torch.empty_like(self.weight, dtype=dtype)))

    def forward(self, words_SBH: torch.Tensor) -> torch.Tensor:
        S = words_SBH.shape[0]
        first = self.tp_rank * S if self.sequence_parallel else 0
        return words_SBH + self.weight[first : first + S].unsqueeze(1)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, sequence_parallel={self.sequence_parallel}"
