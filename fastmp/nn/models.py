"""GPT: a `LanguageModel` whose tokens see those before them, and whose loss is that of the next token.

Shapes: S sequence, B batch, H hidden, V this rank's shard of the padded vocabulary. Tokens come as (B, S);
activations are sequence-first, (S, B, H), (S/TP, B, H) under sequence parallelism.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fastmp.config import GPTConfig
from fastmp.config.sizes import flops_per_token, num_parameters, pad_vocab
from fastmp.distributed.collectives import group_size, reduce_from_group
from fastmp.nn.cache import KeyValueCache
from fastmp.nn.documents import Documents
from fastmp.nn.language_model import LanguageModel
from fastmp.nn.placement import Placement
from fastmp.ops.core.registry import can_read_values
from fastmp.tensor_parallel.linear import parallel_logits
from fastmp.tensor_parallel.linear_loss import vocab_parallel_linear_cross_entropy

__all__ = ["GPT", "ExpertLosses", "flops_per_token", "num_parameters", "pad_vocab"]


class ExpertLosses(NamedTuple):
    """The losses of a batch and the loads of experts, as `GPT.loss` returns them for a model with experts.

    tokens: (B, S), cross-entropy of every token, equal on all TP ranks.
    aux: 0-dim, the auxiliary losses of these tokens, summed over layers and tokens: to be added to the sum of
        the others before backward. Equal on all TP ranks; zero in evaluation mode.
    counts: (L, E) int32, tokens of this rank that chose each expert of each of the L layers with experts; TP
        and CP ranks have different tokens. Added over microbatches and `groups.tp_cp_dp`, row l is for
        `update_expert_bias` of the l-th of these layers.
    """

    tokens: torch.Tensor
    aux: torch.Tensor
    counts: torch.Tensor


class GPT(LanguageModel):
    """A language model over the TP and CP groups of its placement; arguments and errors: see `LanguageModel`.

    Over CP ranks, tokens, targets, losses and logits are those of this rank's slices of the sequence, as
    `fastmp.tensor_parallel.context.cut_sequence` cuts them: S below is the length of this part.

    ValueError also for a configuration with `bert`.
    """

    def __init__(
        self,
        config: GPTConfig,
        on: Placement = Placement(),
        **options: Any,
    ) -> None:
        if config.bert is not None:
            raise ValueError("GPT: config.bert describes an encoder: make a Bert of it")
        super().__init__(config, on, **options)
        if self.final_norm is not None:  # both are called, or their weights used, in this order
            self.final_norm.prefetch_next = (self.output_table,)  # type: ignore[assignment]

    def forward(self, tokens_BS: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """The logits of this rank's vocabulary shard, (S, B, V), for int64 ids (B, S).

        documents: the packed documents of the undivided sequences. A token sees its own only, and positions
            start anew with each.

        Columns whose global id is `config.vocab_size` or more are padding: cut them off before sampling.

        Raises ValueError for a sequence longer than `max_seq_len` (over CP ranks, the sum of their parts),
        for a CP rank's part that is not two slices, for one that TP does not divide under sequence
        parallelism, and, on a CPU, for an id outside the vocabulary: a GPU would have to be waited for.
        """
        return self.head(self.hidden(tokens_BS, documents))

    def hidden(self, tokens_BS: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """Hidden states (S, B, H) behind the last layer, before the final norm."""
        return self._through_layers(tokens_BS, documents)[0]

    def _through_layers(
        self, tokens_BS: torch.Tensor, documents: Documents | None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """The hidden states after the last layer, and every layer's auxiliary losses and loads of experts."""
        return self._run_layers(self.embed(tokens_BS, documents), documents)

    def embed(
        self,
        tokens_BS: torch.Tensor,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Words, plus learned positions, then dropout: hidden states (S, B, H).

        cache: the one that `layers` will be called with, whose positions tokens have then.
        """
        self._check(tokens_BS)
        if documents is not None:
            self._check_documents(tokens_BS, documents.position_ids_BT)
        return self.dropout(self._words(tokens_BS, documents, cache))

    def head(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Final norm and the product with this rank's part of the output weight: logits (S, B, V)."""
        assert self.final_norm is not None, "only the last stage has a head"
        return parallel_logits(
            self.final_norm(hidden_SBH),
            self.output_weight,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
        )

    def loss(
        self,
        tokens_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ignore_index: int = -100,
        token_weight_BS: torch.Tensor | None = None,
        loss_grad_BS: torch.Tensor | float | None = None,
        documents: Documents | None = None,
    ) -> torch.Tensor | ExpertLosses:
        """The cross-entropy of every token (B, S), equal on all TP ranks. Backward can run once.

        A model with experts returns `ExpertLosses`, whose first entry it is.

        The options are those of `vocab_parallel_linear_cross_entropy`, which never holds the logits of all
        tokens. With `loss_grad_BS`, the gradient (B, S) that the losses will receive (1 where they are
        summed), the gradients of the output layer are made in the forward pass.

        `documents` are those of `forward`; the last token of one has the target that the data says, which may
        be `ignore_index`. The balancing loss of a sequence is that of all its documents.
        """
        hidden_SBH, aux, counts = self._through_layers(tokens_BS, documents)
        loss_BS = self.token_losses(
            hidden_SBH,
            targets_BS,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            ignore_index=ignore_index,
            token_weight_BS=token_weight_BS,
            loss_grad_BS=loss_grad_BS,
        )
        if self.config.moe is None:
            return loss_BS
        return ExpertLosses(loss_BS, self._sum_aux(aux), torch.stack(counts))

    def token_losses(
        self,
        hidden_SBH: torch.Tensor,
        targets_BS: torch.Tensor,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ignore_index: int = -100,
        token_weight_BS: torch.Tensor | None = None,
        loss_grad_BS: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """The losses (B, S) of `loss` from the last layer's hidden states, with the options of `loss`."""
        assert self.final_norm is not None, "only the last stage has a head"
        loss_SB = vocab_parallel_linear_cross_entropy(
            self.final_norm(hidden_SBH),
            self.output_weight,
            targets_BS.t().contiguous(),
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            ignore_index=ignore_index,
            token_weight=None if token_weight_BS is None else token_weight_BS.t(),
            vocab_size=self.config.vocab_size,
            loss_grad=loss_grad_BS.t() if isinstance(loss_grad_BS, torch.Tensor) else loss_grad_BS,
        )
        return loss_SB.t()

    def _sum_aux(self, aux: list[torch.Tensor]) -> torch.Tensor:
        """Add up the losses of layers, then of TP ranks, each of which has those of its own tokens."""
        total = torch.stack(aux).sum()
        return reduce_from_group(total, self.group) if self.training else total

    def _check_documents(self, tokens_BS: torch.Tensor, position_ids_BT: torch.Tensor) -> None:
        B, S = tokens_BS.shape
        expected = B, S * group_size(self.cp_group)
        if tuple(position_ids_BT.shape) != expected or position_ids_BT.device != tokens_BS.device:
            raise ValueError(
                f"GPT: position_ids of documents must be {expected} on {tokens_BS.device}, got "
                f"{tuple(position_ids_BT.shape)} on {position_ids_BT.device}"
            )
        if can_read_values(position_ids_BT):
            low, high = (int(position) for position in position_ids_BT.aminmax())
            if low < 0 or high >= self.config.max_seq_len:
                wrong = low if low < 0 else high
                raise ValueError(
                    f"GPT: position {wrong} of documents is not in max_seq_len {self.config.max_seq_len}"
                )
