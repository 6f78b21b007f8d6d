"""Scores of tokens: log-probabilities of the targets at the end of each row, under any layout of the model.

Rows of a batch are padded on the right to one length, which a causal model does not see. Hidden states of the
positions that count are picked out before the output layer, so a window of 1024 tokens that scores 32 costs
the logits of 32, and those are never there for all of them at once. The sum of a row is correctly rounded
(`math.fsum`): it depends on its terms alone, and they do not depend on how batches are spread over ranks.

Shapes: S tokens of a padded row, B rows, H hidden, N targets that count, of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.cuda_graphs.backends.interface import Backend
from fastmp.cuda_graphs.function_graph import FunctionGraph
from fastmp.distributed.collectives import gather_from_group, gather_sequence, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.gpt import GPT
from fastmp.nn.moe.layer import MoELayer
from fastmp.nn.moe.lossless import LosslessForwards
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import Schedule
from fastmp.tensor_parallel.context import cut_sequence, join_sequence
from fastmp.tensor_parallel.linear import parallel_logits
from fastmp.tensor_parallel.linear_loss import vocab_parallel_linear_log_probs

__all__ = ["ScoredText", "Score", "Scorer"]

MICROBATCHES = 4  # of a batch for each stage of a pipeline, where it has as many rows


class ScoredText(NamedTuple):
    """Token ids (S + 1,), of which the last `scored` are targets, each predicted from all before it."""

    ids: npt.NDArray[np.int64]
    scored: int


class Score(NamedTuple):
    """Sum of the log-probabilities of a row's targets in nats, and `likeliest`: each is the most likely
    token.

    Without `likeliest` of a Scorer, that is False.
    """

    log_prob: float
    likeliest: bool


class _Batch(NamedTuple):
    """Padded tokens (B, S), and of the targets that count (N,): position, row and id."""

    tokens_BS: Tensor
    positions_N: Tensor
    rows_N: Tensor
    targets_N: Tensor


class Scorer:
    """Scorer of batches of rows, with a model in evaluation mode.

    All ranks of a model call it with the same rows, and get the same scores. With pipeline parallelism the
    rows of a batch form its microbatches.

    Args:
        model: a GPT, or this rank's pipeline stage.
        groups: process groups of the model; data-parallel ranks score different rows.
        likeliest: also compare targets with the most likely tokens, which gathers their logits.
        backend: captures the scoring of batches of each shape as a graph; None: eager. In graphs, experts
            keep a limited receive capacity; a batch that exceeds it is scored again by all-to-all.

    Raises:
        ValueError: a graph cannot capture the scoring: pipeline stages, and experts that exchange tokens with
            other ranks by way of the host.
    """

    def __init__(
        self, model: GPT, groups: ParallelGroups, *, likeliest: bool = False, backend: Backend | None = None
    ) -> None:
        self.model, self.groups, self.likeliest = model, groups, likeliest
        self.device = next(model.parameters()).device
        shards = group_size(groups.tp) if model.sequence_parallel else 1
        self.multiple = shards * (2 * group_size(groups.cp) if groups.cp is not None else 1)
        self._scored: Callable[[_Batch], Tensor] = self._score_of_batch
        self._lossless: LosslessForwards | None = None
        if backend is not None:
            advice = "leave out --graphs"
            if groups.pp is not None:
                raise ValueError(
                    f"graphs: the {group_size(groups.pp)} ranks of a pipeline agree on shapes while they "
                    f"score, which no graph can hold; {advice}"
                )
            make = partial(
                FunctionGraph, modules=[model], backend=backend, name="the scoring of a batch", advice=advice
            )
            self._lossless = LosslessForwards([model], groups)
            _, self._scored = self._lossless.graphed(self._score_of_batch, make)
        self._pipeline: Pipeline | None = None
        self._shape: tuple[int, int] | None = None
        if groups.pp is not None:
            self._pipeline = Pipeline(
                [model],
                Schedule(group_size(groups.pp), group_size(groups.pp)).orders(),
                group=groups.pp,
                inputs=lambda batch: cut_sequence(batch.tokens_BS, groups.cp),
                loss=lambda hidden, batch: (hidden.new_zeros(()), self._score(hidden, batch)),
            )

    def check(self, rows: Sequence[ScoredText]) -> None:
        """Raise ValueError for rows longer than the model's positions, or with ids outside its vocabulary."""
        most, vocab_size = self.model.config.max_seq_len, self.model.config.vocab_size
        for ids, _ in rows:
            if (length := self._padded(len(ids) - 1)) > most:
                padded = f", {length} as the layout divides it," if length > len(ids) - 1 else ""
                raise ValueError(
                    f"a window of {len(ids) - 1} tokens{padded} is longer than the model's {most} positions"
                )
            if ids.max() >= vocab_size:
                raise ValueError(
                    f"token id {ids.max()} is outside the model's vocabulary of {vocab_size}: the text has "
                    "the tokens of another tokenizer"
                )

    @torch.no_grad()
    def __call__(self, rows: Sequence[ScoredText]) -> list[Score]:
        """Return the scores of `rows` that passed `check`; NaN if logits are not finite."""
        length = self._length(rows)
        values = self._stages(rows, length) if self._pipeline else self._whole(rows, length)
        log_probs, likeliest = values.tolist()
        scores, begin = [], 0
        for row in rows:
            own = slice(begin, begin := begin + row.scored)
            scores.append(Score(math.fsum(log_probs[own]), self.likeliest and all(likeliest[own])))
        return scores

    def expect(self, rows: Sequence[ScoredText]) -> None:
        """Have room for batches no larger than `rows`, the same on all ranks, where experts share memory."""
        length = self._length(rows) // group_size(self.groups.cp)
        if self.model.sequence_parallel:
            length //= group_size(self.groups.tp)
        with nullcontext() if self._lossless is None else self._lossless.limited():
            for layer in self.model.modules():
                if isinstance(layer, MoELayer):
                    layer.reserve(length, self._at_once(rows))

    def _length(self, rows: Sequence[ScoredText]) -> int:
        return self._padded(max(len(row.ids) - 1 for row in rows))

    def _at_once(self, rows: Sequence[ScoredText]) -> int:
        """Return the number of rows of a microbatch."""
        size = group_size(self.groups.pp)
        return len(rows) if size == 1 else -(-len(rows) // (MICROBATCHES * size))

    def _padded(self, length: int) -> int:
        """Return `length` rounded up to a multiple that the ranks can shard along the sequence."""
        return -(-length // self.multiple) * self.multiple

    def _batch(self, rows: Sequence[ScoredText], length: int) -> _Batch:
        tokens_BS = torch.zeros(len(rows), length, dtype=torch.int64)
        positions, numbers, targets = [], [], []
        for number, (ids, scored) in enumerate(rows):
            known = len(ids) - 1
            tokens_BS[number, :known] = torch.from_numpy(ids[:-1])
            positions.append(torch.arange(known - scored, known))
            numbers.append(torch.full((scored,), number))
            targets.append(torch.from_numpy(ids[len(ids) - scored :]))
        parts = (tokens_BS, *(torch.cat(each) for each in (positions, numbers, targets)))
        return _Batch(*(part.to(self.device) for part in parts))

    def _whole(self, rows: Sequence[ScoredText], length: int) -> Tensor:
        return self._scored(self._batch(rows, length))

    def _score_of_batch(self, batch: _Batch) -> Tensor:
        return self._score(self.model.hidden(cut_sequence(batch.tokens_BS, self.groups.cp)), batch)

    def _stages(self, rows: Sequence[ScoredText], length: int) -> Tensor:
        """Return `_score` of all rows on all pipeline ranks, in microbatches of one shape."""
        pipeline, size = self._pipeline, group_size(self.groups.pp)
        assert pipeline is not None
        at_once = self._at_once(rows)
        rows = [*rows, *[ScoredText(np.zeros(2, np.int64), 0)] * (-len(rows) % at_once)]
        batches = [self._batch(rows[i : i + at_once], length) for i in range(0, len(rows), at_once)]
        if self._shape != (at_once, length):
            pipeline.forget_shapes()
            self._shape = at_once, length
        stats = pipeline.evaluate(batches).stats
        if self.model.stage_spec.last:
            values = torch.cat([stats[number, 1] for number in range(len(batches))], 1)
        else:
            scored = sum(row.scored for row in rows)
            values = torch.empty(2, scored, dtype=torch.float64, device=self.device)
        dist.broadcast(values, group=self.groups.pp, group_src=size - 1)
        return values

    def _score(self, hidden_SBH: Tensor, batch: _Batch) -> Tensor:
        """Return (2, N) float64: the log-probability of each target, and 1 if the target is the most likely
        token.
        """
        model = self.model
        assert model.final_norm is not None
        if model.sequence_parallel:
            hidden_SBH = gather_sequence(hidden_SBH, self.groups.tp)
        hidden_SBH = join_sequence(hidden_SBH, self.groups.cp, dim=0)
        hidden_NH = model.final_norm(hidden_SBH[batch.positions_N, batch.rows_N])
        log_probs_N = vocab_parallel_linear_log_probs(
            hidden_NH,
            model.output_weight,
            batch.targets_N,
            group=self.groups.tp,
            vocab_size=model.config.vocab_size,
        )
        assert isinstance(log_probs_N, Tensor)
        likeliest_N = torch.zeros_like(log_probs_N)
        if self.likeliest:
            logits_NV = parallel_logits(hidden_NH, model.output_weight, group=self.groups.tp)
            logits_NV = gather_from_group(logits_NV, self.groups.tp)[:, : model.config.vocab_size]
            likeliest_N = logits_NV.argmax(-1) == batch.targets_N
        return torch.stack([log_probs_N.double(), likeliest_N.double()])
