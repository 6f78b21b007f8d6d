"""Router replay: record the experts chosen by a forward, and choose them again in another.

Training and generation, or two passes of one model, round differently, and a token whose scores are nearly
equal goes to another expert. Replaying the experts of generation in training keeps the two policies close
("Rollout Routing Replay", W. Ma et al., arXiv:2510.11370). Weights of the experts still come from the
current router, with gradients.

L layers with experts, B batch, S sequence, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmp.distributed.collectives import all_gather, group_size
from fastmp.nn.moe.layer import MoELayer
from fastmp.nn.moe.layer_routing import LayerRouting, Part
from fastmp.nn.segment import LayerChain

__all__ = ["Routing", "RoutingRecorder", "routed"]

DTYPE = torch.int16


@dataclass(frozen=True)
class Routing:
    """The experts of a batch.

    experts: (L, B, S, k) int16, of each layer with experts in order; -1 where nothing was recorded, and the
        token chooses. In memory: 2 L k bytes a token.

    Raises:
        ValueError: experts of another shape or dtype.

    Example:
        routing = Routing(torch.zeros(2, 1, 3, 1, dtype=torch.int16))  # expert 0, in both layers
    """

    experts: Tensor

    def __post_init__(self) -> None:
        if self.experts.dim() != 4 or self.experts.dtype != DTYPE:
            raise ValueError(
                "Routing: expected experts (layers, batch, sequence, experts of a token) in int16, got "
                f"{tuple(self.experts.shape)} in {self.experts.dtype}"
            )

    @staticmethod
    def padded(rows: Sequence[Tensor], seq_len: int) -> Routing:
        """Pad the experts (L, n, k) of sequences of n tokens on the right, or cut them, to `seq_len` tokens.

        `generate(record_routing=True)` returns such rows.
        """
        cut = [row[:, :seq_len] for row in rows]
        fitted = [F.pad(row, (0, 0, 0, seq_len - row.shape[1]), value=-1) for row in cut]
        return Routing(torch.stack(fitted, 1).to(DTYPE))


class RoutingRecorder:
    """Records the experts that a model chooses, in one forward or in several that continue each other.

    Pass it as `routing=` of `GPT`, or to `routed`; then `routing()` has the experts of all tokens.

    Example:
        >>> from fastmp.config import GPTConfig, MoEConfig
        >>> from fastmp.nn import GPT
        >>> moe = MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=16)
        >>> model = GPT(GPTConfig(vocab_size=64, hidden_size=64, num_heads=4, num_layers=2, moe=moe))
        >>> tokens, recorder = torch.randint(64, (2, 8)), RoutingRecorder()
        >>> logits = model(tokens, routing=recorder)
        >>> recorder.routing().experts.shape
        torch.Size([2, 2, 8, 2])
        >>> torch.equal(model(tokens, routing=recorder.routing()), logits)
        True
    """

    def __init__(self) -> None:
        self._layers: list[list[tuple[Tensor, Part]]] = []

    def routing(self) -> Routing:
        """Return the experts of all tokens so far. All tensor-parallel ranks call it together.

        Raises:
            ValueError: nothing was recorded.
        """
        if not any(self._layers):
            raise ValueError("RoutingRecorder: no forward was recorded; pass routing=recorder to one first")
        calls = [
            _gathered(torch.stack([experts for experts, _ in call]), call[0][1])
            for call in zip(*self._layers, strict=True)
        ]
        return Routing(torch.cat(calls, 1).transpose(1, 2).to(DTYPE).contiguous())

    def record(self, layer: int, records: list[tuple[Tensor, Part]]) -> None:
        """Append the records of the layer with this number."""
        while len(self._layers) <= layer:
            self._layers.append([])
        self._layers[layer] += records


def _gathered(experts_LSBk: Tensor, part: Part) -> Tensor:
    """All-gather the tokens of tensor-parallel ranks."""
    if group_size(part.group) == 1:
        return experts_LSBk
    missing = part.size - experts_LSBk.shape[1]
    own_SLBk = F.pad(experts_LSBk, (0, 0, 0, 0, 0, missing), value=-1).transpose(0, 1).contiguous()
    return all_gather(own_SLBk, part.group)[0][: part.S].transpose(0, 1)


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """Return the layers with experts in order, without those of MTP modules."""
    own = getattr(model, "layers", None)
    root = own if isinstance(own, LayerChain) else model
    return [module for module in root.modules() if isinstance(module, MoELayer)]


@contextmanager
def routed(model: nn.Module, routing: Routing | RoutingRecorder | None) -> Iterator[None]:
    """Enter a context in which forwards of a model replay experts, or record those they choose.

    Backward, activation recomputation included, may come after the context. Balancing losses and expert
    loads are those of the replayed experts; with an expert bias or groups the shares in the balancing loss
    are those of the current scores, as without replay.

    Args:
        model: a GPT, a pipeline stage of one, or any module with `MoELayer`s.
        routing: of the tokens of the forwards inside, over CP ranks of this rank's; of a pipeline stage, its
            own layers. None: neither replay nor record.

    Raises:
        ValueError: the model has no experts, the routing is none or of another number of layers or tokens, or
            CUDA graphs hold the layers.

    Example (needs a model):
        >>> with routed(model, recorder):
        ...     model.loss(tokens, targets)
    """
    if routing is None:
        yield
        return
    if not isinstance(routing, (Routing, RoutingRecorder)):
        raise ValueError(
            f"routing: expected a Routing or a RoutingRecorder, got {type(routing).__name__}; pass "
            "Routing(experts), or recorder.routing()"
        )
    layers = moe_layers(model)
    if not layers:
        raise ValueError(f"routing: {type(model).__name__} has no experts")
    if any(isinstance(each, LayerChain) and each.runner is not None for each in model.modules()):
        raise ValueError(
            "routing: CUDA graphs hold the layers and would not follow it; expected a model without graphs "
            "(graphs.scope none)"
        )
    given: Sequence[Tensor | None] = [None] * len(layers)
    if isinstance(routing, Routing):
        if len(routing.experts) != len(layers):
            raise ValueError(
                f"routing: expected experts of {len(layers)} layers, got those of {len(routing.experts)}"
            )
        device = next(layers[0].parameters()).device
        given = list(routing.experts.to(device).transpose(1, 2))
    before = [layer.routing for layer in layers]
    own = [LayerRouting(each, isinstance(routing, RoutingRecorder)) for each in given]
    for layer, each in zip(layers, own):
        layer.routing = each
    try:
        yield
    finally:
        for number, (layer, each, old) in enumerate(zip(layers, own, before)):
            layer.routing = old
            if isinstance(routing, RoutingRecorder) and each.records:
                routing.record(number, each.records)
