"""The transformer layer as segments: attention, then an MLP or experts, each with a norm and a residual.

A layer has four all-reduces over TP, two in forward and two in backward. Under sequence parallelism each
becomes a reduce-scatter and an all-gather (Korthikanti et al. 2022), and norms, dropout and residuals work on
(S/TP, B, H). With experts in place of the MLP, the segments of `MoELayer` follow attention: the first applies
the norm, the last adds the residual. Post-LN, the order of the original BERT, normalises the sums instead,
with the same modules and the same tensors between segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmp.config import GPTConfig
from fastmp.nn.attention import SelfAttention
from fastmp.nn.documents import Documents
from fastmp.nn.dropout import Dropout
from fastmp.nn.kv_cache import KeyValueCache
from fastmp.nn.latent_attention import LatentAttention
from fastmp.nn.mlp import MLP
from fastmp.nn.moe.layer import MoELayer
from fastmp.nn.placement import Placement
from fastmp.nn.replicated import RotaryPositions, make_norm
from fastmp.nn.segment import Segment, SegmentedLayer, Tensors

__all__ = ["TransformerLayer"]


class TransformerLayer(SegmentedLayer):
    """A pre-LN transformer layer: x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    With `config.bert.post_norm` it is post-LN: norm(x + dropout(attention(x))), then the same with the MLP.

    forward(hidden_SBH) or forward(hidden_SBH, key_padding_mask_BT) returns hidden_SBH. Either form takes
    packed `documents=`, the first also a `cache=`, see `SelfAttention`. Hidden states are (S, B, H), or
    (S/TP, B, H) under sequence parallelism; over CP ranks S counts this rank's tokens.

    With `config.moe`, experts replace the MLP, and forward returns (hidden_SBH, aux, counts_E), with the
    auxiliary losses and the expert loads of `MoELayer`.

    Args: as for `SelfAttention`; experts use the groups of the expert grid as well.

    Raises:
        ValueError: as attention, MLP or experts do.

    Example:
        >>> layer = TransformerLayer(GPTConfig(hidden_size=64, num_heads=4))
        >>> layer(torch.randn(8, 2, 64)).shape
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
        super().__init__()
        self.attention_norm = make_norm(config, on)
        kind = SelfAttention if config.latent is None else LatentAttention
        self.attention = kind(config, on, causal=causal, rotary=rotary)
        self.mlp_norm = make_norm(config, on)
        self.mlp: MLP | None = None
        self.moe: MoELayer | None = None
        if config.moe is None:
            self.mlp = MLP(config, on)
        else:
            self.moe = MoELayer(config, on)
        self.dropout = Dropout(config.dropout, on)
        self.post_norm = config.bert is not None and config.bert.post_norm

    def segments(self) -> tuple[Segment, ...]:
        attention = Segment("attention", self._attention)
        if self.moe is None:
            return attention, Segment("mlp", self._mlp)
        first, *others, last = self.moe.segments(carried=1)  # the residual
        return (
            attention,
            first._replace(run=lambda hidden_SBH: first.run(self.mlp_norm(hidden_SBH), hidden_SBH)),
            *others,
            last._replace(
                run=lambda *tensors, out=None: self._add_experts(last, out, *tensors), accepts_out=True
            ),
        )

    def _attention(
        self,
        hidden_SBH: Tensor,
        key_padding_mask_BT: Tensor | None = None,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensors:
        modules: dict[str, Any] = self._modules  # an attribute that is a module takes 1 us to find
        norm = modules["attention_norm"]
        # Pre-LN: normalise the input; post-LN: normalise the sum below
        input_SBH = hidden_SBH if self.post_norm else norm(hidden_SBH)
        output_SBH, bias_H = modules["attention"](input_SBH, key_padding_mask_BT, documents, cache)
        # Bias, dropout and residual in one op
        total_SBH = modules["dropout"].add(output_SBH, bias_H, hidden_SBH)
        return (norm(total_SBH) if self.post_norm else total_SBH,)

    def _mlp(self, hidden_SBH: torch.Tensor) -> Tensors:
        modules: dict[str, Any] = self._modules
        norm = modules["mlp_norm"]
        output_SBH, bias_H = modules["mlp"](hidden_SBH if self.post_norm else norm(hidden_SBH))
        total_SBH = modules["dropout"].add(output_SBH, bias_H, hidden_SBH)
        return (norm(total_SBH) if self.post_norm else total_SBH,)

    def _add_experts(self, combine: Segment, out: Tensor | None, *tensors: Tensor) -> Tensors:
        """Run the segment `combine` and add the residual, in the same kernel if the dispatcher has one."""
        assert self.moe is not None
        added = None if self.dropout.drops else self.moe.combine_onto(out, *tensors)
        if added is not None:
            return added
        output_SBH, aux, counts_E, hidden_SBH = combine.run(*tensors)
        return self.dropout.add(output_SBH, None, hidden_SBH, out), aux, counts_E
