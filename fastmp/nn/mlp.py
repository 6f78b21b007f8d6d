"""The MLP of a transformer layer over a tensor-parallel group (Shoeybi et al. 2019, section 3).

The first product is split by columns, so each rank applies bias and activation to its own columns, in one
fused op. The second is split by rows: there are one all-reduce forward and one backward, and none between the
two products. Where the activation has a gate, the first product makes gate and up, and each rank has its part
of one, then of the other.
"""

from __future__ import annotations

import torch
from torch import nn

from fastmp.config import ACTIVATIONS, GPTConfig
from fastmp.distributed.collectives import group_size
from fastmp.nn.activation import activation_function
from fastmp.nn.init import normal, residual_normal
from fastmp.nn.placement import Placement
from fastmp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

__all__ = ["MLP"]


class MLP(nn.Module):
    """An MLP hidden -> ffn -> hidden with the activation `config.activation`, divided over `on.groups.tp`.

    Raises ValueError where the ffn size is not divisible by the TP size.
    """

    def __init__(self, config: GPTConfig, on: Placement = Placement()) -> None:
        super().__init__()
        tp = group_size(on.groups.tp)
        if config.ffn_size % tp:
            raise ValueError(
                f"MLP: ffn_hidden_size {config.ffn_size} is not divisible by the tensor-parallel size {tp}"
            )
        options = {"bias": config.linear_bias, "skip_bias_add": True, **on.linear_options}
        self.activate = activation_function(config.activation)
        projections = ACTIVATIONS[config.activation].num_projections
        self.up = ColumnParallelLinear(
            config.hidden_size,
            projections * config.ffn_size,
            stride=projections,
            gather_output=False,
            init_method=normal(config),
            **options,
        )
        self.down = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            input_is_parallel=True,
            init_method=residual_normal(config),
            **options,
        )

    def forward(self, hidden_SBH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output (S, B, H) without the last bias, and that bias (H,) or None."""
        up_SBF, bias_F = self.up(hidden_SBH)
        return self.down(self.activate(up_SBF, bias=bias_F))
