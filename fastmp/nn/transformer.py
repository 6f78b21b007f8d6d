"""The pre-LN transformer layer as two segments: attention and MLP, each normalised first and added back.

Four all-reduces a layer, two forward and two backward; under sequence parallelism each is a reduce-scatter
and an all-gather (Korthikanti et al. 2022), and norms, dropout and residuals work on (S/TP, B, H).
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from fastmp.config import GPTConfig
from fastmp.nn.attention import SelfAttention
from fastmp.nn.dropout import Dropout
from fastmp.nn.mlp import MLP
from fastmp.nn.replicated import RotaryPositions, make_norm
from fastmp.nn.segment import Segment, SegmentedLayer, Tensors
from fastmp.parallel.rng import RngTracker

__all__ = ["TransformerLayer"]


class TransformerLayer(SegmentedLayer):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    forward(hidden_SBH) or forward(hidden_SBH, key_padding_mask_BS), see `SelfAttention`; returns hidden_SBH.
    Hidden states are (S, B, H), (S/TP, B, H) under sequence parallelism. Arguments as for `SelfAttention`.
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
        place = {"group": group, "sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        options = {"rng": rng, "init": init, **place}
        self.attention_norm = make_norm(config, **place)
        self.attention = SelfAttention(config, causal=causal, rotary=rotary, **options)
        self.mlp_norm = make_norm(config, **place)
        self.mlp = MLP(config, **options)
        self.dropout = Dropout(config.dropout, group=group, rng=rng, sharded=sequence_parallel)

    def segments(self) -> tuple[Segment, ...]:
        return (Segment("attention", self._attention), Segment("mlp", self._mlp))

    def _attention(self, hidden_SBH: torch.Tensor, *key_padding_mask_BS: torch.Tensor) -> Tensors:
        output_SBH, bias_H = self.attention(self.attention_norm(hidden_SBH), *key_padding_mask_BS)
        return (self.dropout.add(output_SBH, bias_H, hidden_SBH),)

    def _mlp(self, hidden_SBH: torch.Tensor) -> Tensors:
        output_SBH, bias_H = self.mlp(self.mlp_norm(hidden_SBH))
        return (self.dropout.add(output_SBH, bias_H, hidden_SBH),)
