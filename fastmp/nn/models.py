"""GPT: embeddings divided by vocabulary over a tensor-parallel group, with pre-LN layers between them.

The vocabulary is padded to a multiple of 128 x TP, so that shards are equal and aligned. Padding rows start
at zero, their columns take no part in the loss and get no gradient, so a model is the same function, with the
same initial weights bit for bit (init="full"), at every TP.

Shapes: S sequence, B batch, H hidden, V this rank's shard of the padded vocabulary. Tokens come as (B, S);
activations are sequence-first, (S, B, H), (S/TP, B, H) under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from fastmp.config import GPTConfig
from fastmp.nn.cache import KeyValueCache
from fastmp.nn.documents import Documents
from fastmp.nn.dropout import Dropout
from fastmp.nn.init import normal
from fastmp.nn.placement import Placement
from fastmp.nn.recompute import recompute
from fastmp.nn.replicated import PositionEmbedding, RotaryPositions, make_norm
from fastmp.nn.segment import LayerChain, Tensors
from fastmp.nn.transformer import TransformerLayer
from fastmp.ops.registry import can_read_values
from fastmp.parallel.attributes import parallel_attributes
from fastmp.parallel.collectives import group_rank, group_size, reduce_from_group
from fastmp.parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from fastmp.parallel.linear import parallel_logits
from fastmp.parallel.linear_loss import vocab_parallel_linear_cross_entropy
from fastmp.sizes import flops_per_token, num_parameters, pad_vocab

__all__ = ["GPT", "ExpertLosses", "flops_per_token", "num_parameters", "pad_vocab"]

Module = TypeVar("Module", bound=nn.Module)


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


class Part(NamedTuple):
    """The part of a model in a stage: embeddings if `first`, layers, final norm and output if `last`."""

    first: bool
    layers: range
    last: bool


class GPT(nn.Module):
    """A language model over the TP and CP groups of `groups`.

    Over CP ranks, tokens, targets, losses and logits are those of this rank's slices of the sequence, as
    `fastmp.parallel.context.cut_sequence` cuts them: S below is the length of this part.

    Args:
        config: sizes, dropout, initial spread.
        on: the model is divided over `groups.tp`, `groups.cp` and those of experts. TP must divide S under
            sequence parallelism.
        recompute: keep only the input of every layer for backward; where graphs hold parts of a layer, the
            inputs of its parts.
        shard_recompute_input: keep 1/TP of that input on each rank (sequence parallelism does so by itself).
        part: make this part only, see `fastmp.nn.stages`. With init="full" the rest is made, one module at a
            time, and dropped: its weights are those of the whole model.

    Raises ValueError where TP does not divide heads, key/value heads or ffn size, for dropout over several
    ranks without `on.rng`, and as `MoELayer` does.
    """

    def __init__(
        self,
        config: GPTConfig,
        on: Placement = Placement(),
        *,
        recompute: bool = False,
        shard_recompute_input: bool = False,
        part: Part | None = None,
    ) -> None:
        super().__init__()
        if shard_recompute_input and (on.sequence_parallel or not recompute):
            raise ValueError(
                "GPT: shard_recompute_input=True needs recompute=True and sequence_parallel=False, got "
                f"recompute={recompute} and sequence_parallel={on.sequence_parallel}"
            )
        self.config, self.rng = config, on.rng
        self.group, self.cp_group = on.groups.tp, on.groups.cp
        self.sequence_parallel = on.sequence_parallel
        self.recompute, self.shard_recompute_input = recompute, shard_recompute_input
        self.part = Part(True, range(config.num_layers), True) if part is None else part
        first, own_layers, last = self.part

        def own(wanted: bool, make: Callable[[], Module]) -> Module | None:
            """Make what this part has; make and drop the rest, so that every part draws the same numbers."""
            module = make() if wanted or on.init == "full" else None
            return module if wanted else None

        rows, draw = pad_vocab(config.vocab_size, group_size(self.group)), self._init_words
        tied = config.tie_embeddings
        self.word_embedding = own(
            first or (last and tied),
            lambda: VocabParallelEmbedding(rows, config.hidden_size, init_method=draw, **on.layer_options),
        )
        self.position_embedding: PositionEmbedding | None = None
        self.rotary: RotaryPositions | None = None
        if config.position == "learned":
            self.position_embedding = own(first, lambda: PositionEmbedding(config, on))
        else:
            self.rotary = RotaryPositions(config, on)
        self.dropout = Dropout(config.dropout, on)
        self.layers = LayerChain(call=self._recomputed if recompute else None)
        for i in range(config.num_layers):
            make = partial(TransformerLayer, config.layers[i], on, rotary=self.rotary)
            layer = own(i in own_layers, make)
            if layer is not None:  # under its number in the whole model
                self.layers.add_module(str(i), layer)
        self.final_norm = make_norm(config, on) if last else None
        self.output_layer: ColumnParallelLinear | None = None
        if not tied:
            self.output_layer = own(
                last,
                lambda: ColumnParallelLinear(
                    config.hidden_size,
                    rows,
                    bias=False,
                    gather_output=False,
                    init_method=draw,
                    **on.layer_options,
                ),
            )
        if self.final_norm is not None:  # both are called, or their weights used, in this order
            table = self.word_embedding if self.output_layer is None else self.output_layer
            self.final_norm.used_behind = (table,)  # type: ignore[assignment]
        self._clear_padding()

    @property
    def output_weight(self) -> nn.Parameter:
        """This rank's shard (V, H) of the weight that makes the logits."""
        layer = self.word_embedding if self.output_layer is None else self.output_layer
        assert layer is not None, "a stage in the middle has no output layer"
        return layer.weight

    def _init_words(self, weight_VH: torch.Tensor) -> torch.Tensor:
        """Draw real rows only: how many padding rows follow must not move the generator."""
        normal(self.config)(weight_VH[: self.config.vocab_size])
        return weight_VH

    @torch.no_grad()
    def _clear_padding(self) -> None:
        for table in (self.word_embedding, self.output_layer):
            if table is not None:
                table.mark_padding(self.config.vocab_size)
                first = group_rank(self.group) * table.weight.shape[0]
                table.weight[max(self.config.vocab_size - first, 0) :].zero_()

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

    def _run_layers(
        self, hidden_SBH: torch.Tensor, documents: Documents | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        shared = {} if documents is None else {"documents": documents}
        hidden_SBH, *others = self.layers(hidden_SBH, **shared)
        return hidden_SBH, others[0::2], others[1::2]

    def _recomputed(
        self, function: Callable[..., torch.Tensor | Tensors], *tensors: torch.Tensor
    ) -> torch.Tensor | Tensors:
        """Run a layer, or some segments of one, so that backward runs it again.

        A single tensor is hidden states, the same on all TP ranks. The first of several may be this rank's
        tokens, which are not shared out.
        """
        shard_over = self.group if self.shard_recompute_input and len(tensors) == 1 else None
        return recompute(function, *tensors, rng=self.rng, shard_over=shard_over)

    def embed(
        self,
        tokens_BS: torch.Tensor,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Words, plus learned positions, then dropout: hidden states (S, B, H).

        cache: the one that `layers` will be called with, whose positions tokens have then.
        """
        assert self.word_embedding is not None, "only the first stage has the embeddings"
        self._check(tokens_BS)
        if documents is not None:
            self._check_documents(tokens_BS, documents.position_ids_BT)
        words_SBH = self.word_embedding(tokens_BS.t())
        if self.position_embedding is not None:
            positions = documents if cache is None else cache.positions
            words_SBH = self.position_embedding(words_SBH, positions)
        return self.dropout(words_SBH)

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

    def _check(self, tokens_BS: torch.Tensor) -> None:
        if tokens_BS.dim() != 2:
            raise ValueError(f"GPT: tokens must be (batch, sequence), got shape {tuple(tokens_BS.shape)}")
        assert self.word_embedding is not None
        words = self.word_embedding.weight
        if hasattr(words, "placements"):  # a DTensor
            raise ValueError(
                "GPT: its parameters are the shards of fully_shard, which a forward of the module that it "
                'was given gathers; call that module, or register_fsdp_forward_method(model, "loss") before'
            )
        S, tp, cp = tokens_BS.shape[1], group_size(self.group), group_size(self.cp_group)
        if S * cp > self.config.max_seq_len:
            raise ValueError(
                f"GPT: a sequence of {S * cp} tokens is longer than max_seq_len {self.config.max_seq_len}"
            )
        if cp > 1 and S % 2:
            raise ValueError(
                f"GPT: a sequence of {S * cp} tokens is not divisible by 2 x the context-parallel size {cp}"
            )
        if (
            tp > 1
            and self.sequence_parallel
            and torch.is_grad_enabled()
            and not parallel_attributes(words).tensor_model_parallel
        ):
            raise ValueError(
                f"GPT: sequence_parallel=True over {tp} ranks, but the parameters have lost their marks, as "
                "they do under fully_shard: gradients of norms would stay each rank's part; make the model "
                "with sequence_parallel=False"
            )
        if self.sequence_parallel and S % tp:
            raise ValueError(
                f"GPT: under sequence parallelism a sequence of {S} tokens{' of a rank' * (cp > 1)} must be "
                f"divisible by the tensor-parallel size {tp}"
            )
        if tokens_BS.numel() and can_read_values(tokens_BS):
            low, high = (int(id) for id in tokens_BS.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                wrong = low if low < 0 else high
                raise ValueError(
                    f"GPT: token id {wrong} is outside the vocabulary of {self.config.vocab_size}"
                )
