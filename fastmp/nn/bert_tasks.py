"""BERT with a task head for fine-tuning: classification, answer spans or multiple choice.

A head is replicated over tensor-parallel ranks. "classes" and "choices" read the first token, [CLS]: dense,
tanh, dropout, dense. "span" is a dense layer over all tokens.

Shapes: S sequence, B rows, H hidden, C outputs. Hidden states are (S, B, H), (S/TP, B, H) under sequence
parallelism.

Devlin et al. 2018 (arXiv 1810.04805), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastmp.config import GPTConfig
from fastmp.nn.bert import BertStage
from fastmp.nn.dropout import Dropout
from fastmp.nn.placement import Placement
from fastmp.nn.replicated import Linear
from fastmp.nn.stages import stages_of

__all__ = ["NUM_OPTIONS", "BertForTask", "ClassHead", "SpanHead", "pretrained_name", "task_stages"]

NUM_OPTIONS = 4  # of a multiple choice: as many consecutive rows are one sample
HEADS = ("classes", "span", "choices")


class ClassHead(nn.Module):
    """The first token's hidden state (B, H) through dense, tanh, dropout, dense to scores (B, C)."""

    def __init__(self, config: GPTConfig, on: Placement, num_outputs: int) -> None:
        super().__init__()
        self.pooler = Linear(config.hidden_size, config.hidden_size, config, on)
        self.dropout = Dropout(config.dropout, replace(on, sequence_parallel=False))
        self.output = Linear(config.hidden_size, num_outputs, config, on)

    def forward(self, hidden_SBH: Tensor) -> Tensor:
        return self.output(self.dropout(torch.tanh(self.pooler(hidden_SBH[0]))))


class SpanHead(nn.Module):
    """The scores (B, S, 2) of each token as the first and as the last of an answer."""

    def __init__(self, config: GPTConfig, on: Placement) -> None:
        super().__init__()
        self.output = Linear(config.hidden_size, 2, config, on)

    def forward(self, hidden_SBH: Tensor) -> Tensor:
        return self.output(hidden_SBH).transpose(0, 1)


class BertForTask(BertStage):
    """A Bert, or a pipeline stage of it, with a task head in place of the pretraining heads.

    forward is that of `BertStage`; `scores` follows the last layer. The weights of the Bert are drawn first,
    as in `Bert`.

    Args:
        head: "classes", "span" or "choices".
        num_outputs: the number of classes.

    The other arguments and errors are those of `Bert`.

    Raises:
        ValueError: another head.
    """

    def __init__(
        self,
        config: GPTConfig,
        on: Placement = Placement(),
        *,
        head: str,
        num_outputs: int = 1,
        **options: Any,
    ) -> None:
        if head not in HEADS:
            raise ValueError(f"BertForTask: head must be one of {', '.join(HEADS)}, got {head!r}")
        super().__init__(config, on, **options)
        self.lm_head = self.sentence_head = None
        self.kind = head

        def make() -> ClassHead | SpanHead:
            return SpanHead(config, on) if head == "span" else ClassHead(config, on, num_outputs)

        self.task_head = self._own(self.stage_spec.last, make)

    def scores(self, hidden_SBH: Tensor) -> Tensor:
        """Return the scores of a batch from the last layer's hidden states, equal on all TP ranks.

        "classes": (B, C). "span": (B, S, 2). "choices": (B / NUM_OPTIONS, NUM_OPTIONS).
        """
        assert self.task_head is not None, "only the last stage has a head"
        found = self.task_head(self.gathered(hidden_SBH))
        return found.view(-1, NUM_OPTIONS) if self.kind == "choices" else found


def task_stages(
    config: GPTConfig,
    on: Placement = Placement(),
    *,
    vpp: int = 1,
    layers: Sequence[int] | None = None,
    placement: str = "looped",
    **options: Any,
) -> list[BertForTask]:
    """Return this rank's chunks of a `BertForTask`, see `stages_of`; `options` as for `BertForTask`.

    Only the first stage has the word embedding: no head uses it.
    """
    stages = stages_of(BertForTask, config, on, vpp=vpp, layers=layers, placement=placement, **options)
    for stage in stages:
        if not stage.stage_spec.first:
            stage.word_embedding = None
    return stages


def pretrained_name(name: str) -> str | None:
    """Return the name in `Bert` of a parameter of `BertForTask`; None if pretraining does not have it.

    The pooler is that of the sentence-order head.
    """
    if not name.startswith("task_head."):
        return name
    part = name.removeprefix("task_head.")
    return f"sentence_head.{part}" if part.startswith("pooler.") else None
