"""Experts: many small MLPs as two grouped GEMMs, and the shared expert of all tokens.

An expert-parallel rank holds E / EP consecutive experts. Expert tensor parallelism shards each of them as an
MLP: the first GEMM by columns, the second by rows, so outputs are partial sums over the ETP ranks.

M rows sorted by expert, L experts of this rank, H hidden, F hidden units of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from fastmp.config import ACTIVATIONS, GPTConfig
from fastmp.config.precision import Fp8Recipe
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.rng import seeded
from fastmp.nn.activation import activation_function
from fastmp.nn.init import Init, normal, residual_normal
from fastmp.nn.mlp import MLP
from fastmp.nn.moe.fp8_experts import fp8_experts
from fastmp.nn.moe.router import moe_config
from fastmp.nn.placement import Placement
from fastmp.ops import grouped_mlp_in, grouped_mm
from fastmp.ops.wgrad import linear
from fastmp.tensor_parallel.attributes import ParallelAttributes, local_shard
from fastmp.tensor_parallel.fp8_linear import QuantizedWeight, quantized
from fastmp.tensor_parallel.layers import ParallelModule

__all__ = ["GroupedExperts", "SharedExperts"]


class GroupedExperts(ParallelModule):
    """This rank's experts: two grouped GEMMs over rows sorted by expert.

    Parameters: `fc1` (L, F, H), or (L, 2F, H) = [gate | up] with a gated activation; `fc2` (L, H, F). Both
        are marked
    `expert_parallel`: dim 0 is sharded over the EP ranks, `partition_dim` over the ETP ranks. With
        `moe.linear_bias` also `fc1_bias` (L, F) or (L, 2F), and `fc2_bias` (L, H), which ETP ranks share: the
        first adds it.

    Args:
        config: sizes, activation, the `moe` table, and the spread of the initial weights.
        on: experts are sharded over `groups.ep`, each of them over `groups.etp`. With init="full" the weights
            of an expert depend only on its number, and are bit for bit the same on any layout; with "sharded"
            an ETP rank draws its own shard. Only this rank's experts are drawn.

    Raises:
        ValueError: the ranks do not divide the experts or their hidden units.

    Example:
        >>> from fastmp.config import MoEConfig
        >>> moe = MoEConfig(num_experts=2, top_k=1, expert_ffn_hidden_size=32)
        >>> experts = GroupedExperts(GPTConfig(hidden_size=64, num_heads=4, moe=moe))
        >>> offsets = torch.tensor([3, 5], dtype=torch.int32)  # rows 0-2, rows 3-4
        >>> experts(torch.randn(5, 64), offsets).shape
        torch.Size([5, 64])
    """

    def __init__(self, config: GPTConfig, on: Placement = Placement()) -> None:
        super().__init__(on.groups.etp)
        moe = moe_config("GroupedExperts", config)
        ep = group_size(on.groups.ep)
        if moe.num_experts % ep:
            raise ValueError(
                f"GroupedExperts: num_experts {moe.num_experts} is not divisible by "
                f"the expert-parallel size {ep}"
            )
        if moe.expert_ffn_hidden_size % self.tp_size:
            raise ValueError(
                f"GroupedExperts: expert_ffn_hidden_size {moe.expert_ffn_hidden_size} is not divisible by "
                f"the expert tensor-parallel size {self.tp_size}"
            )
        self.num_experts, self.num_local_experts = moe.num_experts, moe.num_experts // ep
        self.first_expert = group_rank(on.groups.ep) * self.num_local_experts
        self.activation, self.spec = config.activation, ACTIVATIONS[config.activation]
        self.activate = activation_function(config.activation)
        L, H, F = self.num_local_experts, config.hidden_size, moe.expert_ffn_hidden_size // self.tp_size
        self.fc1 = nn.Parameter(torch.empty(L, self.spec.num_projections * F, H, **on.tensor_options))
        self.fc2 = nn.Parameter(torch.empty(L, H, F, **on.tensor_options))
        self.fc1_bias: nn.Parameter | None = None
        self.fc2_bias: nn.Parameter | None = None
        if moe.linear_bias:
            sizes = (L, self.spec.num_projections * F), (L, H)
            biases = (nn.Parameter(torch.zeros(size, **on.tensor_options)) for size in sizes)
            self.fc1_bias, self.fc2_bias = biases
        self._mark()
        self._init({"fc1": normal(config), "fc2": residual_normal(config)}, whole=on.init == "full")
        self.fp8: dict[str, QuantizedWeight] = {}
        if on.fp8 is not None:
            self.use_fp8(on.fp8)

    def use_fp8(self, recipe: Fp8Recipe) -> None:
        """Multiply in FP8 from now on, see `fastmp.nn.moe.fp8_experts`.

        Raises:
            ValueError: the block does not divide H or F, or experts have biases.
        """
        if self.fc1_bias is not None:
            raise ValueError(
                "GroupedExperts: no FP8 GEMM of experts has a bias; set moe.linear_bias to false"
            )
        _, hidden, ffn = self.fc2.shape
        if wrong := recipe.misfit({"hidden_size": hidden, "expert_ffn_hidden_size": ffn}):
            raise ValueError(f"GroupedExperts: {wrong} of this rank's experts; change the sizes or block")
        self.fp8 = quantized(self, recipe, "fc1", "fc2")

    def _marks(self) -> dict[str, ParallelAttributes]:
        columns = ParallelAttributes(True, 1, self.spec.num_blocks, expert_parallel=True)
        return {
            "fc1": columns._replace(fused_rows=self.spec.fused_rows),
            "fc2": ParallelAttributes(True, 2, 1, expert_parallel=True),
            "fc1_bias": columns,
            "fc2_bias": ParallelAttributes(expert_parallel=True),
        }

    def _is_shard(self, marks: ParallelAttributes) -> bool:
        return super()._is_shard(marks) or self.num_local_experts < self.num_experts

    @torch.no_grad()
    def _init(self, methods: dict[str, Init], whole: bool) -> None:
        """Draw every expert from its own seed, after one draw from the default stream for all of them.

        whole: draw full weights and take this rank's shard.
        """
        device = self.fc1.device
        if self.fc1.is_meta:
            return
        seed = int(torch.randint(2**62, (), device=device))
        part = 0 if whole else self.num_experts * self.tp_rank
        for local in range(self.num_local_experts):
            with seeded(seed + part + self.first_expert + local, device):
                for name, method in methods.items():
                    expert = getattr(self, name)[local]
                    marks = self._marks()[name]
                    dim, size = marks.partition_dim - 1, self.tp_size if whole else 1
                    shape = list(expert.shape)
                    shape[dim] *= size
                    dtype = torch.promote_types(expert.dtype, torch.float32)
                    master = torch.empty(shape, dtype=dtype, device=device)
                    method(master)
                    expert.copy_(local_shard(master, dim, marks.partition_stride, size, self.tp_rank))

    def forward(
        self, rows_MH: torch.Tensor, offsets_L: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the outputs (M, H) of rows sorted by expert: partial sums over the ETP ranks.

        Args:
            rows_MH: (M, H).
            offsets_L: int32, where each expert's rows end; rows after the last expert's give zeros.
            sizes: the number of rows of each expert, if the host knows it.
        """
        if self.fp8:
            weights, copies = (self.fc1, self.fc2), (self.fp8["fc1"], self.fp8["fc2"])
            return fp8_experts(rows_MH, offsets_L, weights, copies, self.activate, self.spec)
        # grouped GEMM with the activation in its epilogue: (M, H) -> (M, F)
        if self.spec.form is None:  # no grouped GEMM has this activation in its epilogue
            ffn_MF = self.activate(grouped_mm(rows_MH, self.fc1, offsets_L, bias=self.fc1_bias, sizes=sizes))
        else:
            gated = self.spec.num_gates > 0
            ffn_MF = grouped_mlp_in(
                rows_MH,
                self.fc1,
                offsets_L,
                form=self.spec.form,
                gated=gated,
                bias=self.fc1_bias,
                sizes=sizes,
            )
        # grouped GEMM: (M, F) -> (M, H)
        bias = self.fc2_bias
        if bias is not None and self.tp_size > 1:
            bias = _OnFirst.apply(bias, self.tp_rank)
        return grouped_mm(ffn_MF, self.fc2, offsets_L, bias=bias, sizes=sizes)

    def extra_repr(self) -> str:
        last = self.first_expert + self.num_local_experts - 1
        return (
            f"experts {self.first_expert} to {last} of {self.num_experts}, fc1={tuple(self.fc1.shape)}, "
            f"activation={self.activation}, etp_rank={self.tp_rank}, etp_size={self.tp_size}"
        )


class _OnFirst(Function):
    """A bias on the first rank of a group and zeros on the others, whose outputs are summed.

    All ranks have the gradients of the whole sum, so each has the whole gradient of the bias.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, rank: int) -> Tensor:
        return bias.view_as(bias) if rank == 0 else torch.zeros_like(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SharedExperts(ParallelModule):
    """The MLP that every token goes through, sharded over TP, optionally times a sigmoid gate.

    The gate (1, H), as in Qwen's models, is replicated. The arguments are those of `MLP`.
    """

    def __init__(self, config: GPTConfig, on: Placement = Placement()) -> None:
        super().__init__(on.groups.tp)
        self.sequence_parallel = on.sequence_parallel
        moe = moe_config("SharedExperts", config)
        size = moe.shared_expert_ffn_hidden_size
        self.mlp = MLP(replace(config, ffn_hidden_size=size, moe=None, dense_layers=()), on)
        self.gate: nn.Parameter | None = None
        if moe.shared_expert_gate:
            shape = 1, config.hidden_size
            self.gate = nn.Parameter(torch.empty(shape, **on.tensor_options))
            self._mark()
            self._init_weight(shape, normal(config), "full", None, "gate")  # equal on all ranks

    def _marks(self) -> dict[str, ParallelAttributes]:
        return {"gate": ParallelAttributes(sequence_parallel=self.sequence_parallel)}

    def forward(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        output_SBH, bias_H = self.mlp(hidden_SBH)
        if bias_H is not None:
            output_SBH = output_SBH + bias_H
        if self.gate is None:
            return output_SBH
        return output_SBH * torch.sigmoid(linear(hidden_SBH, self.gate))
