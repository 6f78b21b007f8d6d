"""GPT: a decoder-only `LanguageModel` with causal attention and the next-token loss.

Shapes: S sequence, B batch, H hidden, V this rank's shard of the padded vocabulary. Tokens come as (B, S);
activations are sequence-first, (S, B, H), (S/TP, B, H) under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fastmp.config import GPTConfig
from fastmp.config.sizes import flops_per_token, num_parameters, pad_vocab
from fastmp.distributed.collectives import group_size, reduce_from_group
from fastmp.nn.documents import Documents
from fastmp.nn.kv_cache import KeyValueCache
from fastmp.nn.language_model import LanguageModel
from fastmp.nn.moe.routing import Routing, RoutingRecorder, routed
from fastmp.nn.mtp import FutureTokens, MTPModule
from fastmp.nn.placement import Placement
from fastmp.ops.core.registry import can_read_values
from fastmp.tensor_parallel.linear import parallel_logits
from fastmp.tensor_parallel.linear_loss import vocab_parallel_linear_cross_entropy

__all__ = ["GPT", "GPTLosses", "flops_per_token", "num_parameters", "pad_vocab"]


class GPTLosses(NamedTuple):
    """The losses of a batch, as `GPT.loss` returns them for a model with experts or multi-token prediction.

    tokens: (B, S), cross-entropy of every token, equal on all TP ranks.
    aux: 0-dim, the auxiliary losses of these tokens, summed over layers and tokens: to be added to the sum of
        the others before backward. Equal on all TP ranks; zero in evaluation mode; None without experts.
    counts: (L, E) int32, tokens of this rank that chose each expert of each of the L layers with experts; TP
        and CP ranks have different tokens. Added over microbatches and `groups.tp_cp_dp`, row l is for
        `update_expert_bias` of the l-th of these layers. The layers of MTP modules come last. None without
        experts.
    mtp: 0-dim, the losses of multi-token prediction, weighted and summed over tokens: to be added to the sum
        of `tokens` before backward. Equal on all TP ranks; None in evaluation mode and without MTP modules.
    """

    tokens: torch.Tensor
    aux: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    mtp: torch.Tensor | None = None

    def sum(self) -> torch.Tensor:
        """Return the loss to differentiate (): of all tokens, of experts and of multi-token prediction."""
        total = self.tokens.sum()
        for further in (self.aux, self.mtp):
            total = total if further is None else total + further
        return total


class GPT(LanguageModel):
    """A decoder-only language model; arguments and errors: see `LanguageModel`.

    Over CP ranks, tokens, targets, losses and logits are those of this rank's slices of the sequence, see
    `fastmp.tensor_parallel.context.cut_sequence`: S below is their length.

    Raises:
        ValueError: also for a configuration with `bert`.

    Example:
        >>> model = GPT(GPTConfig(vocab_size=64, hidden_size=64, num_heads=4, num_layers=2))
        >>> tokens = torch.randint(64, (2, 17))
        >>> model.loss(tokens[:, :-1], tokens[:, 1:]).shape
        torch.Size([2, 16])
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
        self.mtp = nn.ModuleList()
        call = self._recomputed if self.recompute else None
        for depth in range(config.mtp_depth):
            make = partial(MTPModule, config, on, depth=depth, rotary=self.rotary, call=call)
            made = self._own(self.stage_spec.last, make)
            if made is not None:
                self.mtp.append(made)
        if self.final_norm is not None:  # both are called, or their weights used, in this order
            self.final_norm.prefetch_next = (self.output_table,)  # type: ignore[assignment]

    def forward(
        self,
        tokens_BS: torch.Tensor,
        documents: Documents | None = None,
        routing: Routing | RoutingRecorder | None = None,
    ) -> torch.Tensor:
        """Return the logits of this rank's vocabulary shard, (S, B, V).

        Columns whose global id is `config.vocab_size` or more are padding: cut them off before sampling.

        Args:
            tokens_BS: int64 ids (B, S).
            documents: the packed documents of the full sequences; a token attends only to its own document,
                and positions restart with each.
            routing: experts to replay, or a recorder of those that are chosen, see `fastmp.nn.moe.routed`.

        Raises:
            ValueError: a sequence is longer than `max_seq_len` (over CP ranks, in total), a CP rank's tokens
                are not two slices, TP does not divide S under sequence parallelism, or, on a CPU, an id is
                outside the vocabulary (on a GPU the check would synchronise).
        """
        return self.head(self.hidden(tokens_BS, documents, routing))

    def hidden(
        self,
        tokens_BS: torch.Tensor,
        documents: Documents | None = None,
        routing: Routing | RoutingRecorder | None = None,
    ) -> torch.Tensor:
        """Return the hidden states (S, B, H) after the last layer, before the final norm."""
        with routed(self, routing):
            return self._run_layers(self.embed(tokens_BS, documents), documents)[0]

    def embed(
        self,
        tokens_BS: torch.Tensor,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Return word embeddings plus learned positions after dropout, (S, B, H).

        cache: the cache of the following call of `layers`, which has the positions of the tokens.
        """
        self._check(tokens_BS)
        if documents is not None:
            self._check_documents(tokens_BS, documents.position_ids_BT)
        return self.dropout(self._words(tokens_BS, documents, cache))

    def head(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Apply the final norm and this rank's shard of the output weight: logits (S, B, V)."""
        assert self.final_norm is not None, "only the last stage has a head"
        return self.logits(self.final_norm(hidden_SBH))

    def logits(self, normed_SBH: torch.Tensor) -> torch.Tensor:
        """Return the logits (S, B, V) of this rank's vocabulary shard from hidden states after a norm."""
        return parallel_logits(
            normed_SBH,
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
        future: FutureTokens | None = None,
        routing: Routing | RoutingRecorder | None = None,
    ) -> torch.Tensor | GPTLosses:
        """Return the cross-entropy of every token (B, S), equal on all TP ranks; backward can run once.

        A model with experts, or in training with MTP modules, returns `GPTLosses`, whose first entry it is.
        The loss is fused with the output projection, so the logits of all tokens are never materialised.

        Args:
            tokens_BS, targets_BS: int64 ids (B, S).
            loss_grad_BS: the upstream gradient (B, S) of the losses if it is known (1 if they are summed);
                the gradients of the output layer are then computed in the forward pass.
            documents: as for `forward`; the target of a document's last token comes from the data and may be
                `ignore_index`. The sequence balancing loss covers all documents of a sequence.
            future: what MTP modules embed and predict; None: made of tokens, targets and their weights. Over
                CP ranks, pass `FutureTokens.of(...)` of the full sequences, `cut` for this rank.
            routing: as for `forward`; MTP modules choose their experts themselves.

        The other options are those of `vocab_parallel_linear_cross_entropy`.
        """
        if not (self.training and len(self.mtp)):
            future = None
        elif future is None:
            future = self._future(tokens_BS, targets_BS, documents, ignore_index, token_weight_BS)
        else:
            self._check_future(future, tokens_BS)
        with routed(self, routing):
            hidden_SBH, aux, counts = self._run_layers(self.embed(tokens_BS, documents), documents)
        ahead: list[torch.Tensor] = []
        if future is not None:
            ahead, further_aux, further_counts = self.predict_ahead(hidden_SBH, future.tokens, documents)
            aux, counts = aux + further_aux, counts + further_counts
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        options |= {"ignore_index": ignore_index, "loss_grad_BS": loss_grad_BS}
        loss_BS = self.token_losses(hidden_SBH, targets_BS, token_weight_BS=token_weight_BS, **options)
        mtp = None if future is None else self.mtp_loss(ahead, future, **options)
        if self.config.moe is not None:
            return GPTLosses(loss_BS, self._sum_aux(aux), torch.stack(counts), mtp)
        return loss_BS if mtp is None else GPTLosses(loss_BS, mtp=mtp)

    def _future(
        self,
        tokens_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        documents: Documents | None,
        ignore_index: int,
        token_weight_BS: torch.Tensor | None,
    ) -> FutureTokens:
        if group_size(self.cp_group) > 1:
            raise ValueError(
                "GPT.loss: over context-parallel ranks MTP modules need the tokens of other ranks; expected "
                "future=FutureTokens.of(...).cut(cp_group) of the full sequences, got None"
            )
        options: dict[str, Any] = {"documents": documents, "ignore_index": ignore_index}
        return FutureTokens.of(tokens_BS, targets_BS, self.config, token_weight_BS=token_weight_BS, **options)

    def _check_future(self, future: FutureTokens, tokens_BS: torch.Tensor) -> None:
        (B, S), depth = tokens_BS.shape, len(self.mtp)
        expected = (depth, B, S), (depth, B, S), (depth, B, S if future.weights.shape[-1] == S else 1)
        got = tuple(tuple(each.shape) for each in future)
        if got != expected:
            raise ValueError(
                f"GPT.loss: expected future tokens, targets and weights of shapes {expected}, got {got}; "
                "make them with FutureTokens.of(...) from this model's config, and cut them as the tokens"
            )

    def predict_ahead(
        self, hidden_SBH: torch.Tensor, tokens_DBS: torch.Tensor, documents: Documents | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Run the MTP modules on the hidden states (S, B, H) of the last layer.

        Args:
            tokens_DBS: `FutureTokens.tokens`.

        Returns:
            The hidden states (S, B, H) after the norm of each depth, and the auxiliary losses and expert
            loads of those with experts.
        """
        assert self.final_norm is not None, "only the last stage has MTP modules"
        states, aux, counts = [self.final_norm(hidden_SBH)], [], []
        for module, tokens_BS in zip(self.mtp, tokens_DBS, strict=True):
            state_SBH, *experts = module(states[-1], self.embed(tokens_BS), documents)
            states.append(state_SBH)
            aux += experts[0::2]
            counts += experts[1::2]
        return states[1:], aux, counts

    def mtp_loss(
        self,
        states: Sequence[torch.Tensor],
        future: FutureTokens,
        *,
        loss_grad_BS: torch.Tensor | float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Return the loss of multi-token prediction (), weighted and summed over depths and tokens.

        Args:
            states: of each depth, see `predict_ahead`.
            loss_grad_BS, options: as for `loss`.
        """
        dtype = torch.promote_types(states[0].dtype, torch.float32)
        losses = [
            self._losses(
                state_SBH,
                targets_BS,
                token_weight_BS=weight_B1.to(dtype).expand_as(targets_BS),
                loss_grad_BS=loss_grad_BS,
                **options,
            ).sum()
            for state_SBH, targets_BS, weight_B1 in zip(states, future.targets, future.weights, strict=True)
        ]
        return torch.stack(losses).sum()

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
        """Return the losses (B, S) of `loss` from the last layer's hidden states; options as for `loss`."""
        assert self.final_norm is not None, "only the last stage has a head"
        return self._losses(
            self.final_norm(hidden_SBH),
            targets_BS,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            ignore_index=ignore_index,
            token_weight_BS=token_weight_BS,
            loss_grad_BS=loss_grad_BS,
        )

    def _losses(
        self,
        normed_SBH: torch.Tensor,
        targets_BS: torch.Tensor,
        *,
        token_weight_BS: torch.Tensor | None = None,
        loss_grad_BS: torch.Tensor | float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Return the losses (B, S) from hidden states after a norm."""
        loss_SB = vocab_parallel_linear_cross_entropy(
            normed_SBH,
            self.output_weight,
            targets_BS.t().contiguous(),
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            token_weight=None if token_weight_BS is None else token_weight_BS.t(),
            vocab_size=self.config.vocab_size,
            loss_grad=loss_grad_BS.t() if isinstance(loss_grad_BS, torch.Tensor) else loss_grad_BS,
            **options,
        )
        return loss_SB.t()

    def _sum_aux(self, aux: list[torch.Tensor]) -> torch.Tensor:
        """Add up the auxiliary losses of layers, then all-reduce over TP, as each rank has its own tokens."""
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
