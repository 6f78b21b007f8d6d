"""A GPT as the trainer and the generation of text take it: whole, or in the stages of a pipeline.

S sequence, B batch, H hidden, V this rank's shard of the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastmp.config import ParallelConfig
from fastmp.nn.models import GPT, ExpertLosses, pad_vocab
from fastmp.nn.stages import GPTStage, layers_of_stages, sum_tied_gradients
from fastmp.parallel.collectives import group_size
from fastmp.parallel.pipeline import Pipeline
from fastmp.parallel.schedule import orders
from fastmp.train.data import IGNORE_INDEX
from fastmp.train.microbatches import Batch, ExpertStats, PipelineLoss

if TYPE_CHECKING:
    from fastmp.parallel.groups import ParallelGroups

__all__ = ["next_logits", "pipeline_loss", "pipeline_next_logits", "token_loss"]


def token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, ExpertStats]:
    """Sum of the cross-entropies of a batch of "tokens" and "targets" (B, S), and how many there are.

    With experts, also what they say. The gradient of the sum must be 1, as it is in the Trainer: the output
    layer relies on it beforehand.
    """
    losses = model.loss(batch["tokens"], batch["targets"], ignore_index=IGNORE_INDEX, loss_grad_BS=1.0)
    num_tokens = (batch["targets"] != IGNORE_INDEX).sum()
    if isinstance(losses, ExpertLosses):
        return losses.tokens.sum(), num_tokens, ExpertStats(losses.aux, losses.counts)
    return losses.sum(), num_tokens


def pipeline_loss(
    stages: Sequence[GPTStage], groups: ParallelGroups | None, layout: ParallelConfig
) -> PipelineLoss:
    """`token_loss` of a GPT in stages, which `gpt_stages` has made for `groups` and `layout`."""

    def loss(hidden_SBH: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        targets_BS = batch["targets"]
        losses_BS = stages[-1].token_losses(
            hidden_SBH, targets_BS, ignore_index=IGNORE_INDEX, loss_grad_BS=1.0
        )
        return losses_BS.sum(), (targets_BS != IGNORE_INDEX).sum()

    num_stages = layout.pp * layout.vpp
    layers = layers_of_stages(stages[0].config.num_layers, num_stages, layout.stage_layers)
    return PipelineLoss(
        inputs=lambda batch: batch["tokens"],
        loss=loss,
        schedule=layout.schedule,
        group_size=layout.microbatch_group_size,
        after_backward=lambda: sum_tied_gradients(stages, groups),
        layout={"stage_layers": [len(each) for each in layers]},
    )


def next_logits(model: GPT) -> Callable[[Tensor, int], Tensor]:
    """What `generate` asks a whole model: of tokens (1, S) the logits (V,) of what follows a position."""
    device = next(model.parameters()).device
    return lambda tokens_BS, position: model(tokens_BS.to(device))[position, 0]


def pipeline_next_logits(
    stages: Sequence[GPTStage], groups: ParallelGroups | None
) -> Callable[[Tensor, int], Tensor]:
    """`next_logits` of a GPT in stages, on all ranks of the pipeline; all of them make it, and call it."""
    group = None if groups is None else groups.pp
    pp, vpp = group_size(group), len(stages)

    def logits(hidden_SBH: Tensor, batch: tuple[Tensor, int]) -> tuple[Tensor, Tensor]:
        logits_SBV = stages[-1].head(hidden_SBH)
        return logits_SBV.new_zeros(()), logits_SBV[batch[1], 0]

    pipeline = Pipeline(stages, orders(pp, pp, vpp), group=group, inputs=lambda batch: batch[0], loss=logits)
    tp = group_size(stages[0].group)
    size_V = pad_vocab(stages[0].config.vocab_size, tp) // tp
    shape: torch.Size | None = None

    def run(tokens_BS: Tensor, position: int) -> Tensor:
        nonlocal shape
        if tokens_BS.shape != shape:
            pipeline.forget_shapes()
            shape = tokens_BS.shape
        result = pipeline.evaluate([(tokens_BS.to(pipeline.device), position)])
        logits_V = torch.zeros(size_V, dtype=torch.float64, device=pipeline.device)
        if (0, vpp) in result.stats:
            logits_V.copy_(result.stats[0, vpp])
        if group is not None:
            dist.broadcast(logits_V, group=group, group_src=pp - 1)
        return logits_V

    return run
