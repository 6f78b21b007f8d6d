"""BERT: a `LanguageModel` whose tokens see all of their sample, trained to fill in masked tokens.

Two orders of norms: see `fastmp.config.BertConfig`. Rows of a batch are padded at their ends; attention takes
the padding of a row as a document of its own (`Documents.from_padding`), so that no mask of queries x keys is
made where kernels know borders of documents, and shapes are static.

The head for masked tokens (dense, GELU, norm; then the table of words and a bias divided by vocabulary) is
the same on all tensor-parallel ranks, on all of the tokens or on the masked ones alone. Under sequence
parallelism the last hidden states are gathered once, for both heads.

Shapes: S sequence, B batch, H hidden, V this rank's shard of the padded vocabulary, N tokens that the head
looks at. Tokens come as (B, S); activations are (S, B, H), (S/TP, B, H) under sequence parallelism.

Devlin et al. 2018 (arXiv 1810.04805); Shoeybi et al. 2019 (arXiv 1909.08053), section 3; the sentence-order
head: Lan et al. 2019 (ALBERT, arXiv 1909.11942).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastmp.config import BertConfig, GPTConfig
from fastmp.config.sizes import pad_vocab
from fastmp.distributed.collectives import gather_from_group, group_size
from fastmp.nn.documents import Documents
from fastmp.nn.language_model import LanguageModel
from fastmp.nn.placement import Placement
from fastmp.nn.replicated import Linear, TokenTypeEmbedding, make_norm
from fastmp.nn.stages import stages_of
from fastmp.ops import bias_gelu, cross_entropy
from fastmp.ops.core.registry import can_read_values
from fastmp.tensor_parallel.attributes import ParallelAttributes
from fastmp.tensor_parallel.layers import ParallelModule
from fastmp.tensor_parallel.linear import parallel_logits
from fastmp.tensor_parallel.linear_loss import vocab_parallel_linear_cross_entropy

__all__ = ["Bert", "BertLosses", "BertStage", "bert_stages"]


class BertLosses(NamedTuple):
    """The losses of a batch, as `Bert.loss` returns them, equal on all TP ranks.

    masked: (N,), cross-entropy of the tokens that the head looked at, zero where one has no target.
    sentence: (B,), that of the order of each sample's parts; None without such a head or without targets.
    """

    masked: Tensor
    sentence: Tensor | None


class Bert(LanguageModel):
    """An encoder over the TP group of its placement; arguments and errors: see `LanguageModel`.

    ValueError also for a configuration without `bert`, and over several CP ranks.
    """

    def __init__(self, config: GPTConfig, on: Placement = Placement(), **options: Any) -> None:
        if config.bert is None:
            raise ValueError("Bert: the configuration describes no encoder: GPTConfig.bert is None")
        if (cp := group_size(on.groups.cp)) > 1:
            raise ValueError(
                f"Bert: the sequence of an encoder cannot be divided over {cp} context-parallel ranks"
            )
        super().__init__(config, on, **options)
        encoder, self.placement = config.bert, on
        first, _, last = self.stage_spec
        self.token_type_embedding: TokenTypeEmbedding | None = None
        if encoder.num_token_types:
            self.token_type_embedding = self._own(
                first, lambda: TokenTypeEmbedding(encoder.num_token_types, config, on)
            )
        self.embedding_norm = make_norm(config, on) if first and encoder.post_norm else None
        self.lm_head = self._own(last, lambda: MaskedLMHead(config, on))
        self.sentence_head: SentenceHead | None = None
        if encoder.sentence_order:
            self.sentence_head = self._own(last, lambda: SentenceHead(config, on))
        if self.lm_head is not None:  # the table is used behind it, and nobody calls it then
            self.lm_head.prefetch_next = (self.output_table,)  # type: ignore[assignment]

    @property
    def encoder(self) -> BertConfig:
        assert self.config.bert is not None
        return self.config.bert

    def add_token_types(self, number: int) -> None:
        """Add a table of `number` token types to a model without one, drawn anew, before it is trained on.

        ValueError where there is one. On a stage of a pipeline, call it on the first.
        """
        if self.encoder.num_token_types:
            raise ValueError(
                f"Bert.add_token_types: the model has {self.encoder.num_token_types} token types"
            )
        self.config = replace(self.config, bert=replace(self.encoder, num_token_types=number))
        words = self.output_weight if self.word_embedding is None else self.word_embedding.weight
        on = replace(self.placement, device=words.device, dtype=words.dtype)
        self.token_type_embedding = TokenTypeEmbedding(number, self.config, on)

    def forward(
        self, tokens_BS: Tensor, token_types_BS: Tensor | None = None, padding_BS: Tensor | None = None
    ) -> Tensor:
        """The logits of this rank's vocabulary shard, (S, B, V), for int64 ids (B, S).

        token_types_BS: (B, S) int64, given where and only where the model has a table of them.
        padding_BS: bool, True for padding, which ends its row; None: there is none. Logits of padding are
            finite and mean nothing.

        Columns whose global id is `config.vocab_size` or more are padding of the vocabulary.

        ValueError for a sequence longer than `max_seq_len`, one that TP does not divide under sequence
        parallelism, and, on a CPU, for ids and types outside their tables and padding that tokens follow.
        """
        head = self._head()
        rows_SBH = head(self.gathered(self.hidden(tokens_BS, token_types_BS, padding_BS)))
        logits_SBV = parallel_logits(rows_SBH, self.output_weight, group=self.group)
        return logits_SBV + head.bias.to(logits_SBV.dtype)

    def hidden(
        self, tokens_BS: Tensor, token_types_BS: Tensor | None = None, padding_BS: Tensor | None = None
    ) -> Tensor:
        """Hidden states (S, B, H), (S/TP, B, H) under sequence parallelism, behind the last layer."""
        return self.encode(tokens_BS, token_types_BS, _documents(padding_BS))

    def encode(
        self, tokens_BS: Tensor, token_types_BS: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """`hidden` where the padding is given as `Documents.from_padding` makes it."""
        return self._run_layers(self.embed(tokens_BS, token_types_BS), documents)[0]

    def embed(self, tokens_BS: Tensor, token_types_BS: Tensor | None = None) -> Tensor:
        """Words, positions and token types, normalised under `post_norm`, then dropout: (S, B, H)."""
        self._check(tokens_BS)
        table = self.token_type_embedding
        if (table is None) != (token_types_BS is None):
            has = "no" if table is None else str(self.encoder.num_token_types)
            given = "none" if token_types_BS is None else "some"
            raise ValueError(f"Bert: the model has {has} token types, but {given} were given")
        words_SBH = self._words(tokens_BS)
        if table is not None:
            words_SBH = table(words_SBH, token_types_BS)
        if self.embedding_norm is not None:
            words_SBH = self.embedding_norm(words_SBH)
        return self.dropout(words_SBH)

    def gathered(self, hidden_SBH: Tensor) -> Tensor:
        """What the heads take: the last layer's hidden states, normalised without `post_norm`, (S, B, H)."""
        if self.final_norm is not None:
            hidden_SBH = self.final_norm(hidden_SBH)
        return gather_from_group(hidden_SBH, self.group, dim=0) if self.sequence_parallel else hidden_SBH

    def sentence_logits(self, gathered_SBH: Tensor) -> Tensor:
        """The logits (B, 2) that a sample's parts are in order, or swapped."""
        assert self.sentence_head is not None, "the model has no head for the order of sentences"
        return self.sentence_head(gathered_SBH[0].clone())  # a view would keep all tokens

    def loss(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        *,
        token_types_BS: Tensor | None = None,
        padding_BS: Tensor | None = None,
        **options: Any,
    ) -> BertLosses:
        """The losses of a batch; backward can run once. The options are those of `losses`."""
        return self.losses(self.hidden(tokens_BS, token_types_BS, padding_BS), targets_BS, **options)

    def losses(
        self,
        hidden_SBH: Tensor,
        targets_BS: Tensor,
        *,
        sentence_order_B: Tensor | None = None,
        max_masked: int | None = None,
        ignore_index: int = -100,
        loss_grad: Tensor | float | None = None,
    ) -> BertLosses:
        """The losses of `loss` from the last layer's hidden states.

        targets_BS: int64 ids of masked tokens, `ignore_index` for all others.
        sentence_order_B: int64, 0 for parts in order, 1 for swapped ones, or `ignore_index`.
        max_masked: no batch has more targets: the head looks at so many tokens, N, in place of all. On a CPU
            more are a ValueError; a GPU does not look, and leaves the last of them out.
        loss_grad: the gradient that each of the masked losses will receive, a number or 0-dim, see
            `vocab_parallel_linear_cross_entropy`.
        """
        gathered_SBH = self.gathered(hidden_SBH)
        targets_N = targets_BS.t().reshape(-1)
        rows_NH = gathered_SBH.flatten(0, 1)
        if max_masked is not None and max_masked < len(targets_N):
            rows_NH, targets_N = _masked_rows(rows_NH, targets_N, max_masked, ignore_index)
        if isinstance(loss_grad, Tensor):
            loss_grad = loss_grad.expand(targets_N.shape)
        head = self._head()
        masked_N = vocab_parallel_linear_cross_entropy(
            head(rows_NH),
            self.output_weight,
            targets_N.contiguous(),
            bias=head.bias,
            group=self.group,
            ignore_index=ignore_index,
            vocab_size=self.config.vocab_size,
            loss_grad=loss_grad,
        )
        if sentence_order_B is None or self.sentence_head is None:
            return BertLosses(masked_N, None)
        logits_B2 = self.sentence_logits(gathered_SBH)
        return BertLosses(masked_N, cross_entropy(logits_B2, sentence_order_B, ignore_index=ignore_index))

    def _head(self) -> MaskedLMHead:
        assert self.lm_head is not None, "only the last stage has a head"
        return self.lm_head


def _documents(padding_BS: Tensor | None) -> Documents | None:
    return None if padding_BS is None else Documents.from_padding(padding_BS)


def _masked_rows(rows: Tensor, targets: Tensor, most: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The `most` rows and targets that are not ignored; rows beyond their number are ignored copies."""
    masked = targets != ignore_index
    if can_read_values(targets) and (number := int(masked.sum())) > most:
        raise ValueError(f"Bert: the batch has {number} masked tokens, more than max_masked {most}")
    places = torch.nonzero_static(masked, size=most, fill_value=-1).flatten()
    within = places.clamp(min=0)
    return rows[within], targets[within].masked_fill(places < 0, ignore_index)


class MaskedLMHead(ParallelModule):
    """What masked tokens go through before the table of words: norm(gelu(dense(x))), (..., H).

    `bias` (V,) is this rank's part of what is added to the logits. Everything else is whole on every rank.
    """

    def __init__(self, config: GPTConfig, on: Placement) -> None:
        super().__init__(on.groups.tp)
        whole = replace(on, sequence_parallel=False)
        self.dense = Linear(config.hidden_size, config.hidden_size, config, whole)
        self.norm = make_norm(config, whole)
        rows = self._part("vocabulary", pad_vocab(config.vocab_size, self.tp_size))
        self.bias = nn.Parameter(torch.zeros(rows, **on.tensor_options))
        self.mark_padding(config.vocab_size)

    def _marks(self) -> dict[str, ParallelAttributes]:
        return {"bias": ParallelAttributes(True, 0)}

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(bias_gelu(self.dense(x), None, approximate="none"))


class SentenceHead(nn.Module):
    """From the first token's hidden state (B, H) the logits (B, 2): dense, tanh, dense."""

    def __init__(self, config: GPTConfig, on: Placement) -> None:
        super().__init__()
        self.pooler = Linear(config.hidden_size, config.hidden_size, config, on)
        self.order = Linear(config.hidden_size, 2, config, on)

    def forward(self, first_BH: Tensor) -> Tensor:
        return self.order(torch.tanh(self.pooler(first_BH)))


class BertStage(Bert):
    """One stage of a Bert, for `fastmp.pipeline.Pipeline`, made by `bert_stages`.

    forward(tokens_BS) or forward(tokens_BS, token_types_BS) in the first stage, forward(hidden_SBH) in the
    others, gives hidden states; either takes `documents=`, those of `Documents.from_padding`. `losses` of the
    last stage ends the pipeline.
    """

    def forward(  # type: ignore[override]  # no logits
        self, x: Tensor, token_types_BS: Tensor | None = None, *, documents: Documents | None = None
    ) -> Tensor:
        hidden_SBH = self.embed(x, token_types_BS) if self.stage_spec.first else x
        return self._run_layers(hidden_SBH, documents)[0]


def bert_stages(
    config: GPTConfig,
    on: Placement = Placement(),
    *,
    vpp: int = 1,
    layers: Sequence[int] | None = None,
    **options: Any,
) -> list[BertStage]:
    """The chunks of this rank of a Bert, see `stages_of`; `options`: recomputation, as of `LanguageModel`."""
    return stages_of(BertStage, config, on, vpp=vpp, layers=layers, **options)
