"""The base of GPT and BERT: vocabulary-parallel embedding, layers, final norm and output weight.

The vocabulary is padded to a multiple of 128 x TP, so that shards are equal and aligned. Padding rows start
at zero, and their logits are masked in the loss and get no gradient. So a model is the same function, with
bit for bit the same initial weights (init="full"), at every TP size.

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
from fastmp.config.sizes import pad_vocab
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.nn.documents import Documents
from fastmp.nn.dropout import Dropout
from fastmp.nn.init import normal
from fastmp.nn.kv_cache import KeyValueCache
from fastmp.nn.placement import Placement
from fastmp.nn.recompute import recompute
from fastmp.nn.replicated import PositionEmbedding, RotaryPositions, make_norm
from fastmp.nn.segment import LayerChain, Tensors
from fastmp.nn.transformer import TransformerLayer
from fastmp.ops.core.registry import can_read_values
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.tensor_parallel.embedding import VocabParallelEmbedding
from fastmp.tensor_parallel.layers import ColumnParallelLinear

__all__ = ["LanguageModel", "StageSpec"]

Module = TypeVar("Module", bound=nn.Module)


class StageSpec(NamedTuple):
    """The modules of a pipeline stage: embeddings if `first`, layers, final norm and output if `last`."""

    first: bool
    layers: range
    last: bool


class LanguageModel(nn.Module):
    """Embeddings, layers, final norm and output weight of a `GPT` or a `Bert`, which add the losses.

    Args:
        config: sizes, dropout, initial spread.
        on: the model is sharded over `groups.tp`, `groups.cp` and those of experts. TP must divide S under
            sequence parallelism.
        recompute: keep only the input of every layer for backward (activation recomputation); where CUDA
            graphs hold spans of a layer, the inputs of these spans.
        shard_recompute_input: keep 1/TP of that input on each rank (sequence parallelism does so anyway).
        stage_spec: make the modules of this pipeline stage only, see `fastmp.nn.stages`. With init="full" the
            rest is made, one module at a time, and dropped, so that the weights are those of the full model.

    Raises:
        ValueError: TP does not divide heads, key/value heads or ffn size; dropout over several ranks lacks
            `on.rng`; and as `MoELayer`.
    """

    def __init__(
        self,
        config: GPTConfig,
        on: Placement = Placement(),
        *,
        recompute: bool = False,
        shard_recompute_input: bool = False,
        stage_spec: StageSpec | None = None,
    ) -> None:
        super().__init__()
        self._kind = type(self).__name__.removesuffix("Stage")
        if shard_recompute_input and (on.sequence_parallel or not recompute):
            raise ValueError(
                f"{self._kind}: shard_recompute_input=True needs recompute=True and sequence_parallel=False, "
                f"got recompute={recompute} and sequence_parallel={on.sequence_parallel}"
            )
        self.config, self.rng, self.init = config, on.rng, on.init
        self.group, self.cp_group = on.groups.tp, on.groups.cp
        self.sequence_parallel = on.sequence_parallel
        self.recompute, self.shard_recompute_input = recompute, shard_recompute_input
        self.stage_spec = (
            StageSpec(True, range(config.num_layers), True) if stage_spec is None else stage_spec
        )
        first, own_layers, last = self.stage_spec
        rows, draw = pad_vocab(config.vocab_size, group_size(self.group)), self._init_words
        tied, encoder = config.tie_embeddings, config.bert
        self.word_embedding = self._own(
            first or (last and config.shares_embedding),
            lambda: VocabParallelEmbedding(rows, config.hidden_size, init_method=draw, **on.layer_options),
        )
        self.position_embedding: PositionEmbedding | None = None
        self.rotary: RotaryPositions | None = None
        if config.position == "learned":
            self.position_embedding = self._own(first, lambda: PositionEmbedding(config, on))
        else:
            self.rotary = RotaryPositions(config, on)
        self.dropout = Dropout(config.dropout, on)
        self.layers = LayerChain(call=self._recomputed if recompute else None)
        for i in range(config.num_layers):
            make = partial(TransformerLayer, config.layers[i], on, causal=encoder is None, rotary=self.rotary)
            layer = self._own(i in own_layers, make)
            if layer is not None:  # under its number in the whole model
                self.layers.add_module(str(i), layer)
        ends_in_norm = encoder is None or not encoder.post_norm
        self.final_norm = make_norm(config, on) if last and ends_in_norm else None
        self.output_layer: ColumnParallelLinear | None = None
        if not tied:
            self.output_layer = self._own(
                last,
                lambda: ColumnParallelLinear(
                    config.hidden_size,
                    rows,
                    bias=False,
                    gather_output=False,
                    init_method=draw,
                    **on.linear_options | {"fp8": None},  # logits stay in the dtype of the model
                ),
            )
        self._clear_padding()

    def _own(self, wanted: bool, make: Callable[[], Module]) -> Module | None:
        """Make a module of this stage; make and drop others, so that every stage draws the same numbers."""
        module = make() if wanted or self.init == "full" else None
        return module if wanted else None

    @property
    def output_table(self) -> VocabParallelEmbedding | ColumnParallelLinear:
        """The module that holds `output_weight`."""
        layer = self.word_embedding if self.output_layer is None else self.output_layer
        assert layer is not None, "a stage in the middle has no output layer"
        return layer

    @property
    def output_weight(self) -> nn.Parameter:
        """This rank's shard (V, H) of the output projection."""
        return self.output_table.weight

    def _init_words(self, weight_VH: torch.Tensor) -> torch.Tensor:
        """Draw unpadded rows only, so that the generator's state does not depend on padding."""
        normal(self.config)(weight_VH[: self.config.vocab_size])
        return weight_VH

    @torch.no_grad()
    def _clear_padding(self) -> None:
        for table in (self.word_embedding, self.output_layer):
            if table is not None:
                table.mark_padding(self.config.vocab_size)
                first = group_rank(self.group) * table.weight.shape[0]
                table.weight[max(self.config.vocab_size - first, 0) :].zero_()

    def _run_layers(
        self, hidden_SBH: torch.Tensor, documents: Documents | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Return the last hidden states, and the auxiliary losses and expert loads of every layer."""
        shared = {} if documents is None else {"documents": documents}
        hidden_SBH, *others = self.layers(hidden_SBH, **shared)
        return hidden_SBH, others[0::2], others[1::2]

    def _recomputed(
        self, function: Callable[..., torch.Tensor | Tensors], *tensors: torch.Tensor
    ) -> torch.Tensor | Tensors:
        """Run a layer or segments of one with activation recomputation.

        A single tensor is hidden states, replicated over TP unless under sequence parallelism. The first of
        several may be this rank's tokens, which cannot be sharded.
        """
        shard_over = self.group if self.shard_recompute_input and len(tensors) == 1 else None
        return recompute(function, *tensors, rng=self.rng, shard_over=shard_over)

    def _words(
        self,
        tokens_BS: torch.Tensor,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Return word embeddings plus learned positions, (S, B, H)."""
        assert self.word_embedding is not None, "only the first stage has the embeddings"
        words_SBH = self.word_embedding(tokens_BS.t())
        if self.position_embedding is not None:
            positions = documents if cache is None else cache.positions
            words_SBH = self.position_embedding(words_SBH, positions)
        return words_SBH

    def _check(self, tokens_BS: torch.Tensor) -> None:
        kind = self._kind
        if tokens_BS.dim() != 2 or tokens_BS.is_floating_point():
            got = f"{tokens_BS.dtype} of shape {tuple(tokens_BS.shape)}"
            raise ValueError(f"{kind}: tokens must be integers (batch, sequence), got {got}")
        assert self.word_embedding is not None
        words = self.word_embedding.weight
        if hasattr(words, "placements"):  # a DTensor
            raise ValueError(
                f"{kind}: its parameters are the shards of fully_shard, which a forward of the module that "
                "it was given gathers; call that module, or before it "
                'register_fsdp_forward_method(model, "loss")'
            )
        S, tp, cp = tokens_BS.shape[1], group_size(self.group), group_size(self.cp_group)
        if S * cp > self.config.max_seq_len:
            raise ValueError(
                f"{kind}: a sequence of {S * cp} tokens is longer than max_seq_len {self.config.max_seq_len}"
            )
        if cp > 1 and S % 2:
            raise ValueError(
                f"{kind}: a sequence of {S * cp} tokens is not divisible by 2 x the context-parallel size "
                f"{cp}"
            )
        if (
            tp > 1
            and self.sequence_parallel
            and torch.is_grad_enabled()
            and not parallel_attributes(words).tensor_model_parallel
        ):
            raise ValueError(
                f"{kind}: sequence_parallel=True over {tp} ranks, but the parameters have lost their marks, "
                "as they do under fully_shard: gradients of norms would stay each rank's part; make the "
                "model with sequence_parallel=False"
            )
        if self.sequence_parallel and S % tp:
            raise ValueError(
                f"{kind}: under sequence parallelism a sequence of {S} tokens{' of a rank' * (cp > 1)} must "
                f"be divisible by the tensor-parallel size {tp}"
            )
        if tokens_BS.numel() and can_read_values(tokens_BS):
            low, high = (int(id) for id in tokens_BS.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                wrong = low if low < 0 else high
                raise ValueError(
                    f"{kind}: token id {wrong} is outside the vocabulary of {self.config.vocab_size}"
                )
