"""A `BertForTask` as the trainer takes it, whole or in the stages of a pipeline, and its scores of a split.

Batches are those of `TaskData`. B rows, S tokens of a row; a sample is a row, or the rows of its options.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from examples.megatron_paper.finetuning.samples import IGNORE_LABEL, Sample, TaskData
from fastmp.config import GPTConfig, ParallelConfig
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.bert_tasks import BertForTask, task_stages
from fastmp.nn.documents import Documents
from fastmp.nn.placement import Placement
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import Schedule
from fastmp.training.microbatches import Batch, LossFunction, PipelineLoss, evaluation_mode

__all__ = ["model_and_loss", "score_samples", "task_loss"]


def model_and_loss(
    config: GPTConfig,
    groups: ParallelGroups,
    layout: ParallelConfig,
    *,
    head: str,
    num_outputs: int = 1,
    **options: Any,
) -> tuple[list[BertForTask], LossFunction | PipelineLoss]:
    """Return this rank's model chunks of a Bert with a task head, and its loss. options: of `Placement`."""
    on = Placement.of(groups, layout, **options)
    made: dict[str, Any] = {"head": head, "num_outputs": num_outputs, "recompute": layout.recompute}
    made["shard_recompute_input"] = layout.shard_recompute_input
    if layout.pp * layout.vpp == 1:
        return [BertForTask(config, on, **made)], task_loss
    cut: dict[str, Any] = {"vpp": layout.vpp, "layers": layout.stage_layers, "placement": layout.placement}
    stages = task_stages(config, on, **cut, **made)
    loss = PipelineLoss(
        inputs=_inputs(stages[0]),
        shared=_documents,
        loss=lambda hidden_SBH, batch: _loss(stages[-1].scores(hidden_SBH), batch),
        schedule=layout.schedule,
        group_size=layout.microbatch_group_size,
    )
    return stages, loss


def task_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of a batch's samples, and the number of samples.

    A loss is a cross-entropy, in float32 for 16-bit scores: of the right class or option, or the mean of
    those of the first and of the last token of an answer, among the tokens that are no padding.
    """
    return _loss(_scores(model, batch), batch)


def _scores(model: BertForTask, batch: Batch) -> Tensor:
    return model.scores(model(*_inputs(model)(batch), **_documents(batch)))


def _loss(scores: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """scores: (samples, C), or (samples, S, 2) of two labels."""
    wide, labels_BL = scores.to(torch.promote_types(scores.dtype, torch.float32)), batch["labels"]
    if wide.dim() == 3:
        each = wide.masked_fill(batch["padding_mask"].unsqueeze(2), -torch.inf).unbind(2)
    else:
        each = (wide,)
    losses = [
        F.cross_entropy(some, labels_B, ignore_index=IGNORE_LABEL, reduction="sum")
        for some, labels_B in zip(each, labels_BL.unbind(1), strict=True)
    ]
    return torch.stack(losses).mean(), (labels_BL[:, 0] != IGNORE_LABEL).sum()


def _inputs(model: BertForTask) -> Any:
    """Return a function from a batch to the first stage's inputs: tokens, and token types if embedded."""
    typed = bool(model.encoder.num_token_types)
    return lambda batch: (batch["tokens"], batch["token_types"]) if typed else (batch["tokens"],)


def _documents(batch: Batch) -> dict[str, Documents]:
    return {"documents": Documents.from_padding(batch["padding_mask"])}


@torch.no_grad()
def score_samples(
    chunks: Sequence[BertForTask],
    data: TaskData,
    samples: Sequence[Sample],
    groups: ParallelGroups,
    device: torch.device,
    schedule: str = "1f1b",
) -> npt.NDArray[np.float32] | None:
    """Return the scores of all `samples` in order on rank 0 of the job; None on other ranks.

    All ranks call it. Models are in evaluation mode inside. `schedule` is the one that pipeline stages are
    placed for.
    """
    dp_rank, dp_size = group_rank(groups.dp), group_size(groups.dp)
    batches = (
        {name: tensor.to(device) for name, tensor in batch.items()}
        for batch in data.batches(samples, dp_rank, dp_size)
    )
    with evaluation_mode(chunks):
        own = list(_score_batches(chunks, batches, groups, schedule))
    own_or_none = np.stack(own) if own and group_rank(groups.tp) == 0 else None
    everyones: list[Any] = [(dp_rank, own_or_none)]
    if groups.grid.world_size > 1:
        everyones = [None] * groups.grid.world_size
        gathered = everyones if groups.rank == 0 else None
        dist.gather_object((dp_rank, own_or_none), gathered, dst=0)
    if groups.rank != 0:
        return None
    found = dict(each for each in everyones if each[1] is not None)
    in_order = np.stack([found[rank] for rank in range(dp_size)], axis=1)  # of batches, then of ranks
    return in_order.reshape(-1, *in_order.shape[3:])[: len(samples)]


def _score_batches(
    chunks: Sequence[BertForTask], batches: Iterable[Batch], groups: ParallelGroups, schedule: str
) -> Iterable[npt.NDArray[np.float32]]:
    """Yield the scores of each batch on the last pipeline stage, nothing on the others."""
    if group_size(groups.pp) * len(chunks) == 1:
        for batch in batches:
            yield _scores(chunks[0], batch).float().cpu().numpy()
        return

    def scores(hidden_SBH: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        found = chunks[-1].scores(hidden_SBH)
        return found.new_zeros(()), found

    size, vpp = group_size(groups.pp), len(chunks)
    planned = Schedule(size, size, vpp, name=schedule)
    pipeline = Pipeline(
        chunks,
        planned.orders(),
        group=groups.pp,
        placement=planned.placement,
        inputs=_inputs(chunks[0]),
        shared=_documents,
        loss=scores,
    )
    rest = iter(batches)
    while some := list(islice(rest, size)):
        result = pipeline.evaluate(some)
        for number in range(len(some)):
            if (number, vpp) in result.stats:
                yield result.stats[number, vpp].float().cpu().numpy()
