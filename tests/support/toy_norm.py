"""A norm from outside of fastmp: the mean absolute value becomes one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fastmp.config import NORMS, NormSpec


class MeanAbsNorm(nn.Module):
    def __init__(
        self,
        size: int,
        *,
        group: ProcessGroup | None,
        eps: float,
        sequence_parallel: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(size, device=device, dtype=dtype)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.scale


def register() -> None:
    NORMS.register(NormSpec("mean_abs", "toy_norm:MeanAbsNorm", ("scale",), 1, help="mean absolute value"))
