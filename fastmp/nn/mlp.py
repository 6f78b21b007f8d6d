"""The MLP of a transformer layer, tensor-parallel as in Megatron-LM (Shoeybi et al. 2019, section 3).

The first GEMM is column-parallel, so each rank applies bias and activation to its own columns in one fused
op. The second is row-parallel: there is one all-reduce in forward and one in backward, and none between the
GEMMs. A gated activation makes the first GEMM produce [gate | up]; each rank holds its shard of both.

Shapes: S sequence, B batch, H hidden, F ffn units of this rank.
"""

from __future__ import annotations

from typing import Any

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
    """An MLP hidden -> ffn -> hidden with the activation `config.activation`, sharded over `on.groups.tp`.

    Raises:
        ValueError: the ffn size is not divisible by the tensor-parallel size.

    Example:
        >>> mlp = MLP(GPTConfig(hidden_size=64, num_heads=4, activation="swiglu"))
        >>> output, bias = mlp(torch.randn(8, 2, 64))
        >>> output.shape, bias.shape
        (torch.Size([8, 2, 64]), torch.Size([64]))
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
        spec = ACTIVATIONS[config.activation]
        self.up = ColumnParallelLinear(
            config.hidden_size,
            spec.num_projections * config.ffn_size,
            stride=spec.num_blocks,
            fused_rows=spec.fused_rows,
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
        """Return the output (S, B, H) without the last bias, and that bias (H,) or None."""
        modules: dict[str, Any] = self._modules  # an attribute that is a module takes 1 us to find
        # Column-parallel GEMM: (S, B, H) -> (S, B, num_projections * F); gathers a TP-sharded sequence
        up_SBF, bias_F = modules["up"](hidden_SBH)
        # Bias and activation in one op: (S, B, num_projections * F) -> (S, B, F)
        ffn_SBF = self.activate(up_SBF, bias=bias_F)
        # Row-parallel GEMM: (S, B, F) -> (S, B, H), summed over TP; the caller fuses the bias with dropout
        out_SBH, bias_H = modules["down"](ffn_SBF)
        return out_SBH, bias_H
