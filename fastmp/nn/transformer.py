"""The pre-LN transformer layer as segments: attention and MLP, each normalised first and added back.

Four all-reduces a layer, two forward and two backward; under sequence parallelism each is a reduce-scatter
and an all-gather (Korthikanti et al. 2022), and norms, dropout and residuals work on (S/TP, B, H). With
experts in place of the MLP, their segments follow attention: the first normalises, the last adds back.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastmp.config import GPTConfig
from fastmp.nn.attention import SelfAttention
from fastmp.nn.dropout import Dropout
from fastmp.nn.mlp import MLP
from fastmp.nn.moe import MoELayer
from fastmp.nn.replicated import RotaryPositions, make_norm
from fastmp.nn.segment import Segment, SegmentedLayer, Tensors
from fastmp.parallel.collectives import group_size
from fastmp.parallel.groups import ParallelGroups
from fastmp.parallel.rng import RngTracker

__all__ = ["TransformerLayer"]


class TransformerLayer(SegmentedLayer):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    forward(hidden_SBH) or forward(hidden_SBH, key_padding_mask_BT), see `SelfAttention`; returns hidden_SBH.
    Hidden states are (S, B, H), (S/TP, B, H) under sequence parallelism; over CP ranks S counts this rank's
    tokens.

    Where `config.moe` describes experts, they are in place of the MLP, and forward returns (hidden_SBH, aux,
    counts_E), with the auxiliary losses and the loads of the experts: see `MoELayer`.

    Args:
        groups: where there are experts or the sequence is cut over `cp`, all process groups of this rank,
            whose `tp` is `group`.

    The others: as for `SelfAttention`.

    Raises ValueError as the parts do, and for experts whose `groups` have another `tp` than `group`.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        group: ProcessGroup | None,
        groups: ParallelGroups = ParallelGroups.alone(),
        rng: RngTracker | None = None,
        causal: bool = True,
        rotary: RotaryPositions | None = None,
        sequence_parallel: bool = False,
        init: str = "full",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if config.moe is not None and group_size(groups.tp) != group_size(group):
            raise ValueError(
                "TransformerLayer: experts need groups= whose tp is group, got a group of "
                f"{group_size(group)} ranks and a tp of {group_size(groups.tp)}"
            )
        place = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        options = {"rng": rng, "init": init, **place}
        self.attention_norm = make_norm(config, group=group, **place)
        self.attention = SelfAttention(
            config, group=group, cp_group=groups.cp, causal=causal, rotary=rotary, **options
        )
        self.mlp_norm = make_norm(config, group=group, **place)
        self.mlp = self.moe = None
        if config.moe is None:
            self.mlp = MLP(config, group=group, **options)
        else:
            self.moe = MoELayer(config, groups=groups, **options)
        self.dropout = Dropout(
            config.dropout, group=group, cp_group=groups.cp, rng=rng, sharded=sequence_parallel
        )

    def segments(self) -> tuple[Segment, ...]:
        attention = Segment("attention", self._attention)
        if self.moe is None:
            return attention, Segment("mlp", self._mlp)
        first, *others, last = self.moe.segments()
        return (
            attention,
            replace(first, run=lambda hidden_SBH: first.run(self.mlp_norm(hidden_SBH), hidden_SBH)),
            *others,
            replace(
                last,
                run=lambda *tensors, out=None: self._add_experts(*last.run(*tensors), out=out),
                accepts_out=True,
            ),
        )

    def _attention(self, hidden_SBH: torch.Tensor, *key_padding_mask_BT: torch.Tensor) -> Tensors:
        output_SBH, bias_H = self.attention(self.attention_norm(hidden_SBH), *key_padding_mask_BT)
        return (self.dropout.add(output_SBH, bias_H, hidden_SBH),)

    def _mlp(self, hidden_SBH: torch.Tensor) -> Tensors:
        output_SBH, bias_H = self.mlp(self.mlp_norm(hidden_SBH))
        return (self.dropout.add(output_SBH, bias_H, hidden_SBH),)

    def _add_experts(
        self, output_SBH: Tensor, aux: Tensor, counts_E: Tensor, hidden_SBH: Tensor, out: Tensor | None
    ) -> Tensors:
        return self.dropout.add(output_SBH, None, hidden_SBH, out), aux, counts_E
