"""BERT: an encoder-only `LanguageModel` with bidirectional attention and the masked-token loss.

Pre-LN or post-LN: see `fastmp.config.BertConfig`. Rows are padded at the end; attention treats a row's
padding as a document (`Documents.from_padding`), so that shapes are static and kernels with document borders
need no mask of queries x keys.

The masked-LM head (dense, GELU, norm, then the tied embedding with a vocabulary-parallel bias) is replicated
over TP, and runs on all tokens or on the masked ones only. Under sequence parallelism the last hidden states
are all-gathered once for both heads.

Shapes: S sequence, B batch, H hidden, V this rank's shard of the padded vocabulary, N tokens of the masked-LM
head. Tokens come as (B, S); activations are (S, B, H), (S/TP, B, H) under sequence parallelism.

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

    masked: (N,), cross-entropy of the masked-LM head's tokens, zero for those without a target.
    sentence: (B,), cross-entropy of each sample's sentence order; None without that head or without targets.
    """

    masked: Tensor
    sentence: Tensor | None


class Bert(LanguageModel):
    """An encoder-only language model; arguments and errors: see `LanguageModel`.

    Raises:
        ValueError: also for a configuration without `bert`, and over several CP ranks.

    Example:
        >>> config = GPTConfig(vocab_size=64, num_layers=2, bert=BertConfig(num_token_types=0))
        >>> tokens = torch.randint(64, (2, 16))
        >>> Bert(config).loss(tokens, tokens).masked.shape
        torch.Size([32])
    """

    def __init__(self, config: GPTConfig, on: Placement = Placement(), **options: Any) -> None:
        if config.bert is None:
            raise ValueError("Bert: GPTConfig.bert is None, which is no encoder; pass bert=BertConfig()")
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
        if self.lm_head is not None:  # the output table is used after it, without a call of its module
            self.lm_head.prefetch_next = (self.output_table,)  # type: ignore[assignment]

    @property
    def encoder(self) -> BertConfig:
        assert self.config.bert is not None
        return self.config.bert

    def add_token_types(self, number: int) -> None:
        """Add a newly drawn embedding of `number` token types to a model without one, before training.

        On a pipeline, call it on the first stage. Raises ValueError if the model has token types.
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
        """Return the logits of this rank's vocabulary shard, (S, B, V).

        Columns whose global id is `config.vocab_size` or more are padding of the vocabulary.

        Args:
            tokens_BS: int64 ids (B, S).
            token_types_BS: (B, S) int64, required if and only if the model has token types.
            padding_BS: bool, True for padding at the end of a row; None: no padding. Logits of padding are
                finite and mean nothing.

        Raises:
            ValueError: a sequence is longer than `max_seq_len`, TP does not divide S under sequence
                parallelism, or, on a CPU, ids or types are outside their tables or tokens follow padding.
        """
        head = self._head()
        rows_SBH = head(self.gathered(self.hidden(tokens_BS, token_types_BS, padding_BS)))
        logits_SBV = parallel_logits(rows_SBH, self.output_weight, group=self.group)
        return logits_SBV + head.bias.to(logits_SBV.dtype)

    def hidden(
        self, tokens_BS: Tensor, token_types_BS: Tensor | None = None, padding_BS: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states after the last layer, (S, B, H) or (S/TP, B, H)."""
        documents = None if padding_BS is None else Documents.from_padding(padding_BS)
        return self.encode(tokens_BS, token_types_BS, documents)

    def encode(
        self, tokens_BS: Tensor, token_types_BS: Tensor | None = None, documents: Documents | None = None
    ) -> Tensor:
        """Return `hidden` for padding passed as `Documents.from_padding`."""
        return self._run_layers(self.embed(tokens_BS, token_types_BS), documents)[0]

    def embed(self, tokens_BS: Tensor, token_types_BS: Tensor | None = None) -> Tensor:
        """Return the sum of word, position and token type embeddings, (S, B, H), after norm and dropout.

        The norm is there with `post_norm` only.
        """
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
        """Return the input of the heads, (S, B, H), after final norm and sequence all-gather."""
        if self.final_norm is not None:
            hidden_SBH = self.final_norm(hidden_SBH)
        return gather_from_group(hidden_SBH, self.group, dim=0) if self.sequence_parallel else hidden_SBH

    def sentence_logits(self, gathered_SBH: Tensor) -> Tensor:
        """Return the logits (B, 2) of a sample's parts being in order, or swapped."""
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
        """Return the losses of a batch; backward can run once. Options as for `losses`."""
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
        """Return the losses of `loss` from the last layer's hidden states.

        Args:
            targets_BS: int64 ids of masked tokens, `ignore_index` for all others.
            sentence_order_B: int64, 0 for parts in order, 1 for swapped ones, or `ignore_index`.
            max_masked: the most targets of a batch: the head then runs on N = max_masked tokens. More targets
                raise ValueError on a CPU; on a GPU the last ones are ignored.
            loss_grad: the upstream gradient of each masked loss if it is known, a number or 0-dim, see
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
        return BertLosses(
            masked_N, cross_entropy(logits_B2, sentence_order_B, ignore_index=ignore_index, reduction="none")
        )

    def _head(self) -> MaskedLMHead:
        assert self.lm_head is not None, "only the last stage has a head"
        return self.lm_head


def _masked_rows(rows: Tensor, targets: Tensor, most: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the rows with targets, filled up to `most` rows with ignored copies."""
    masked = targets != ignore_index
    if can_read_values(targets) and (number := int(masked.sum())) > most:
        raise ValueError(f"Bert: the batch has {number} masked tokens, more than max_masked {most}")
    places = torch.nonzero_static(masked, size=most, fill_value=-1).flatten()
    within = places.clamp(min=0)
    return rows[within], targets[within].masked_fill(places < 0, ignore_index)


class MaskedLMHead(ParallelModule):
    """The masked-LM head before the output projection: norm(gelu(dense(x))), (..., H).

    `bias` (V,) is this rank's shard of the logits' bias. All other parameters are replicated.
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
    """The sentence-order head: the first token's hidden state (B, H) through dense, tanh, dense to (B, 2)."""

    def __init__(self, config: GPTConfig, on: Placement) -> None:
        super().__init__()
        self.pooler = Linear(config.hidden_size, config.hidden_size, config, on)
        self.order = Linear(config.hidden_size, 2, config, on)

    def forward(self, first_BH: Tensor) -> Tensor:
        return self.order(torch.tanh(self.pooler(first_BH)))


class BertStage(Bert):
    """A pipeline stage of a Bert, made by `bert_stages` for `fastmp.pipeline.Pipeline`.

    forward(tokens_BS) or forward(tokens_BS, token_types_BS) of the first stage, and forward(hidden_SBH) of
    the others, returns hidden states. Either takes `documents=` of `Documents.from_padding`. `losses` of the
    last stage computes the losses.
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
    placement: str = "looped",
    **options: Any,
) -> list[BertStage]:
    """Return this rank's chunks of a Bert, see `stages_of`; `options` as for `LanguageModel`."""
    return stages_of(BertStage, config, on, vpp=vpp, layers=layers, placement=placement, **options)
