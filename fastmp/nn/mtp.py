"""Multi-token prediction: modules that predict tokens after the next one (arXiv 2412.19437, section 2.2).

Module k of D joins the hidden states of module k - 1 (of the model itself, if k = 1) with the embeddings of
the tokens k places ahead, and runs one transformer layer on them:

    x_k = W_k [norm(embedding of t_(i+k)), norm(h_(k-1))]
    h_k = norm(layer_k(x_k)),  from which the output layer predicts t_(i+k+1)

The model's word embedding and output layer serve all modules. The modules are trained by a loss of their own,
and generation uses them to draft tokens; without them the model is the same. The hidden states h_0 are those
after the final norm, as in DeepSeek's and Megatron-LM's inference and training.

Shapes: D depth, S sequence, B batch, H hidden; (S/TP, B, H) under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fastmp.config import GPTConfig
from fastmp.nn.documents import Documents
from fastmp.nn.placement import Placement
from fastmp.nn.replicated import Linear, RotaryPositions, make_norm
from fastmp.nn.segment import LayerChain
from fastmp.nn.transformer import TransformerLayer
from fastmp.tensor_parallel.context import cut_sequence

__all__ = ["FutureTokens", "MTPModule"]


class FutureTokens(NamedTuple):
    """Inputs and targets of the modules for a batch, see `of`.

    tokens: (D, B, S) int64, the tokens k places ahead, which module k embeds.
    targets: (D, B, S) int64, the tokens that it predicts, `ignore_index` where there is none.
    weights: (D, B, 1) or (D, B, S) float64, factors on the losses of its tokens.
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor

    @classmethod
    def of(
        cls,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        config: GPTConfig,
        *,
        documents: Documents | None = None,
        ignore_index: int = -100,
        token_weight_BS: Tensor | None = None,
    ) -> FutureTokens:
        """Return the future tokens of full sequences: those of all context-parallel ranks.

        A module predicts no token beyond the end of the sequence or of the document. The weights make the
        loss of a sequence `mtp_weight` times its mean over depths and over the tokens that each depth
        predicts, for each token that the model itself predicts: the trainer divides by the number of those.
        So the loss depends neither on microbatches nor on the parallel layout.

        Args:
            tokens_BS, targets_BS: int64 ids (B, S) of the model, the targets one place ahead of the tokens.
            token_weight_BS: factors on the model's losses of the targets; a module has those of its targets.

        Example:
            >>> tokens = torch.arange(5)[None]
            >>> config = GPTConfig(position="rope", mtp_depth=1)
            >>> future = FutureTokens.of(tokens[:, :-1], tokens[:, 1:], config)
            >>> future.tokens[0, 0, :3].tolist(), future.targets[0, 0].tolist()
            ([1, 2, 3], [2, 3, 4, -100])
        """
        S, depth = tokens_BS.shape[1], config.mtp_depth
        positions_S = torch.arange(S, device=tokens_BS.device)
        num_predicted_B1 = (targets_BS != ignore_index).sum(1, keepdim=True)
        tokens, targets, weights = [], [], []
        for k in range(1, depth + 1):
            inside_BS = (positions_S < S - k).expand_as(targets_BS)
            if documents is not None:  # positions restart with each document
                ids_BS = documents.position_ids_BT
                inside_BS = inside_BS & (ids_BS.roll(-k, 1) == ids_BS + k)
            ahead_BS = targets_BS.roll(-k, 1).masked_fill(~inside_BS, ignore_index)
            number_B1 = (ahead_BS != ignore_index).sum(1, keepdim=True)
            tokens.append(tokens_BS.roll(-k, 1))
            targets.append(ahead_BS)
            weight = config.mtp_weight / depth * num_predicted_B1.double() / number_B1.clamp(min=1)
            weights.append(weight if token_weight_BS is None else weight * token_weight_BS.roll(-k, 1))
        return cls(torch.stack(tokens), torch.stack(targets), torch.stack(weights))

    def cut(self, group: ProcessGroup | None) -> FutureTokens:
        """Return this context-parallel rank's slices of the sequences."""
        return FutureTokens(*(x if x.shape[2] == 1 else cut_sequence(x, group, dim=2) for x in self))


class MTPModule(nn.Module):
    """One depth of multi-token prediction: norms of both inputs, their projection, a layer and a norm.

    The projection is replicated over tensor-parallel ranks; under sequence parallelism each projects its
    tokens.

    Args:
        config: that of the model; the layer is of the kind of its last layer.
        depth: 0 for the module that follows the model. Its layer has the number after those of the model.
        on, rotary: see `TransformerLayer`.
        call: see `LayerChain`.
    """

    def __init__(
        self,
        config: GPTConfig,
        on: Placement = Placement(),
        *,
        depth: int = 0,
        rotary: RotaryPositions | None = None,
        call: Callable[..., Tensor | tuple[Tensor, ...]] | None = None,
    ) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = make_norm(config, on), make_norm(config, on)
        hidden, sequence_parallel = config.hidden_size, on.sequence_parallel
        self.proj = Linear(2 * hidden, hidden, config, on, bias=False, sequence_parallel=sequence_parallel)
        self.layers = LayerChain(call=call)
        layer = TransformerLayer(config.layers[-1], on, rotary=rotary)
        self.layers.add_module(str(config.num_layers + depth), layer)
        self.final_norm = make_norm(config, on)

    def forward(
        self, hidden_SBH: Tensor, embedded_SBH: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, ...]:
        """Return the hidden states (S, B, H) after the norm, and the loss and loads of its experts, if any.

        Args:
            hidden_SBH: of the previous depth, after its norm.
            embedded_SBH: embeddings of the tokens as many places ahead as this depth.
        """
        shared = {} if documents is None else {"documents": documents}
        last_SBH, *experts = self.layers(self.join(hidden_SBH, embedded_SBH), **shared)
        return self.final_norm(last_SBH), *experts

    def join(self, hidden_SBH: Tensor, embedded_SBH: Tensor) -> Tensor:
        """Return the input (S, B, H) of the layer; arguments as for `forward`."""
        return self.proj(torch.cat((self.embedding_norm(embedded_SBH), self.hidden_norm(hidden_SBH)), 2))
