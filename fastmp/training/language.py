"""Build a GPT or BERT with its loss, whole or as pipeline stages, for training and text generation.

Batches hold full sequences, which are sharded here over the context-parallel ranks. With sequence packing a
batch has its `Documents` as "documents", and every layer gets them.

Dimensions: S sequence, B batch, H hidden, V this rank's shard of the padded vocabulary.

The trainer divides the sum of the losses by the number of tokens; for a BERT, by the number of masked tokens.
The training loss of a BERT adds the sentence-order loss of each sample times its number of masked tokens. A
step therefore minimises the sum of two means, as in ALBERT (Lan et al. 2019) and Megatron-LM, but weighs
samples in the second one by their masked tokens: the result does not depend on the split into microbatches
and ranks. The validation loss covers masked tokens alone; its exponential is the perplexity of Shoeybi et al.
2019, table 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastmp.config import GPTConfig, ParallelConfig, Recipe
from fastmp.distributed.collectives import group_size, sum_over_
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.bert import Bert, BertStage, bert_stages
from fastmp.nn.documents import Documents
from fastmp.nn.gpt import GPT, GPTLosses, pad_vocab
from fastmp.nn.language_model import LanguageModel
from fastmp.nn.mtp import FutureTokens
from fastmp.nn.placement import Placement
from fastmp.nn.stages import GPTStage, gpt_stages, sum_tied_gradients
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.schedule import Schedule
from fastmp.tensor_parallel.context import cut_sequence, local_positions
from fastmp.tensor_parallel.fp8_linear import native_block
from fastmp.training.data.dataset import IGNORE_INDEX
from fastmp.training.microbatches import Batch, ExpertStats, LossFunction, MicrobatchLosses, PipelineLoss

__all__ = [
    "bert_and_loss",
    "gpt_and_loss",
    "model_and_loss",
    "next_logits",
    "pipeline_loss",
    "pipeline_next_logits",
    "token_loss",
]

ModelAndLoss = tuple[GPT | Bert, LossFunction] | tuple[list[GPTStage] | list[BertStage], PipelineLoss]


def model_and_loss(recipe: Recipe, groups: ParallelGroups, **options: Any) -> ModelAndLoss:
    """Return the model of `recipe`, or this rank's pipeline stages, and its loss.

    options: fields of `Placement`.
    """
    model, data = recipe.model, recipe.data
    options.setdefault("fp8", recipe.train.fp8(native_block(options.get("device"))))
    if model.bert is None:
        return gpt_and_loss(model, groups, recipe.parallel, **options)
    return bert_and_loss(
        model,
        groups,
        recipe.parallel,
        max_masked=data.micro_batch_size * data.predicted,
        static_shapes=recipe.graphs.enabled,
        **options,
    )


def bert_and_loss(
    config: GPTConfig,
    groups: ParallelGroups,
    layout: ParallelConfig,
    *,
    max_masked: int | None = None,
    static_shapes: bool = False,
    **options: Any,
) -> tuple[Bert, LossFunction] | tuple[list[BertStage], PipelineLoss]:
    """Return a BERT, or this rank's pipeline stages, and its loss (see the top of this module).

    Batches have "tokens" and "targets" (B, S) and, if the model uses them, "token_types" (B, S),
    "padding_mask" (B, S) and "sentence_order" (B,); see `Bert.losses`.

    Args:
        max_masked: see `Bert.losses`.
        static_shapes: True for CUDA graphs: no shape depends on the padding.
        options: other fields of `Placement`.
    """

    def inputs(batch: Batch) -> tuple[Tensor, ...]:
        assert config.bert is not None
        return (batch["tokens"], batch["token_types"]) if config.bert.num_token_types else (batch["tokens"],)

    def shared(batch: Batch) -> dict[str, Documents]:
        if "padding_mask" not in batch:
            return {}
        return {"documents": Documents.from_padding(batch["padding_mask"], static=static_shapes)}

    def loss_of(model: Bert, hidden_SBH: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        targets_BS, order_B = batch["targets"], batch.get("sentence_order") if model.training else None
        losses = model.losses(
            hidden_SBH,
            targets_BS,
            sentence_order_B=order_B,
            max_masked=max_masked,
            ignore_index=IGNORE_INDEX,
            loss_grad=batch.get("loss_grad", 1.0),
        )
        total, num_masked_B = losses.masked.sum(), (targets_BS != IGNORE_INDEX).sum(1)
        if losses.sentence is not None:
            total = total + (losses.sentence * num_masked_B).sum()
        return total, num_masked_B.sum()

    on = Placement.of(groups, layout, **options)
    kept = _kept(layout)
    if layout.pp * layout.vpp == 1:
        return Bert(config, on, **kept), lambda model, batch: loss_of(
            model, model.encode(*inputs(batch), **shared(batch)), batch
        )
    stages = bert_stages(config, on, **_cut(layout), **kept)
    return stages, _in_stages(
        stages,
        groups,
        layout,
        inputs,
        lambda hidden_SBH, batch: loss_of(stages[-1], hidden_SBH, batch),
        shared,
    )


def _cut(layout: ParallelConfig) -> dict[str, Any]:
    """Return the arguments of `stages_of` that say how a model is cut into stages."""
    return {"vpp": layout.vpp, "layers": layout.stage_layers, "placement": layout.placement}


def _in_stages(
    stages: Sequence[LanguageModel],
    groups: ParallelGroups,
    layout: ParallelConfig,
    inputs: Callable[[Batch], Any],
    loss: Callable[..., tuple[Tensor, Tensor] | MicrobatchLosses],
    shared: Callable[[Batch], dict[str, Any]],
) -> PipelineLoss:
    """Return the loss of pipeline stages; it sums the gradients of tied embeddings over their stages."""
    return PipelineLoss(
        inputs=inputs,
        loss=loss,
        shared=shared,
        schedule=layout.schedule,
        group_size=layout.microbatch_group_size,
        after_reduce=lambda grads: sum_tied_gradients(stages, groups, grads),
    )


def _kept(layout: ParallelConfig) -> dict[str, Any]:
    return {"recompute": layout.recompute, "shard_recompute_input": layout.shard_recompute_input}


def gpt_and_loss(
    config: GPTConfig, groups: ParallelGroups, layout: ParallelConfig, **options: Any
) -> tuple[GPT, LossFunction] | tuple[list[GPTStage], PipelineLoss]:
    """Return a GPT, or this rank's pipeline stages, and its loss.

    options: other fields of `Placement`.
    """
    on = Placement.of(groups, layout, **options)
    kept = _kept(layout)
    if layout.pp * layout.vpp == 1:
        return GPT(config, on, **kept), token_loss
    stages = gpt_stages(config, on, **_cut(layout), **kept)
    return stages, pipeline_loss(stages, groups, layout)


def token_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor] | MicrobatchLosses:
    """Return the sum of the cross-entropies of a batch and the number of tokens.

    Each context-parallel rank computes its part of the sequences. The output layer computes its gradients in
    the forward pass, so the upstream gradient of the sum must be batch["loss_grad"] (default 1).

    Args:
        batch: "tokens" and "targets" (B, S), and optionally "documents" and "loss_grad".

    Returns:
        (sum of losses, number of tokens), or `MicrobatchLosses` for a model with experts or MTP modules.
    """
    tokens_BS, targets_BS = (cut_sequence(batch[name], model.cp_group) for name in ("tokens", "targets"))
    loss_grad_BS = _loss_grad(batch, targets_BS)
    losses = model.loss(
        tokens_BS,
        targets_BS,
        ignore_index=IGNORE_INDEX,
        loss_grad_BS=loss_grad_BS,
        **_documents(batch),
        **({"future": _future(model, batch)} if _predicts_ahead(model) else {}),
    )
    num_tokens = (targets_BS != IGNORE_INDEX).sum()
    if not isinstance(losses, GPTLosses):
        return losses.sum(), num_tokens
    experts = None
    if losses.aux is not None and losses.counts is not None:
        experts = ExpertStats(losses.aux, losses.counts)
    return MicrobatchLosses(losses.tokens.sum(), num_tokens, experts, losses.mtp)


def _predicts_ahead(model: nn.Module) -> bool:
    """Return True if the MTP modules of a model or stage run."""
    return model.training and len(getattr(model, "mtp", ())) > 0


def _future(model: GPT, batch: Batch) -> FutureTokens:
    """Return what the MTP modules of this context-parallel rank embed and predict."""
    ahead = FutureTokens.of(
        batch["tokens"],
        batch["targets"],
        model.config,
        documents=batch.get("documents"),
        ignore_index=IGNORE_INDEX,
    )
    return ahead.cut(model.cp_group)


def _documents(batch: Batch) -> dict[str, Any]:
    """Return the keyword argument for the packed documents of a batch; {} without any."""
    return {"documents": batch["documents"].fresh()} if "documents" in batch else {}


def _loss_grad(batch: Batch, targets_BS: Tensor) -> Tensor | float:
    """Return the upstream gradient of every token's loss."""
    return batch["loss_grad"].expand(targets_BS.shape) if "loss_grad" in batch else 1.0


def pipeline_loss(stages: Sequence[GPTStage], groups: ParallelGroups, layout: ParallelConfig) -> PipelineLoss:
    """Return `token_loss` for the stages of `gpt_stages` with the same `groups` and `layout`."""

    last = stages[-1]
    cp_group = last.cp_group

    def loss(hidden_SBH: Tensor, *ahead_and_batch: Any) -> tuple[Tensor, Tensor] | MicrobatchLosses:
        *ahead, batch = ahead_and_batch
        targets_BS = cut_sequence(batch["targets"], cp_group)
        options: dict[str, Any] = {
            "ignore_index": IGNORE_INDEX,
            "loss_grad_BS": _loss_grad(batch, targets_BS),
        }
        total = last.token_losses(hidden_SBH, targets_BS, **options).sum()
        num_tokens = (targets_BS != IGNORE_INDEX).sum()
        if not ahead:
            return total, num_tokens
        mtp = last.mtp_loss(ahead, _future(last, batch), **options)
        return MicrobatchLosses(total, num_tokens, mtp=mtp)

    def shared(batch: Batch) -> dict[str, Any]:
        ahead = {"tokens_DBS": _future(last, batch).tokens} if _predicts_ahead(last) else {}
        return _documents(batch) | ahead

    return _in_stages(
        stages, groups, layout, lambda batch: cut_sequence(batch["tokens"], cp_group), loss, shared
    )


def next_logits(model: GPT) -> Callable[[Tensor, int], Tensor]:
    """Return a function for `generate`: tokens (1, S) and a position -> logits (V,) of the next token."""
    device = next(model.parameters()).device

    def run(tokens_BS: Tensor, position: int) -> Tensor:
        logits_SBV = model(cut_sequence(tokens_BS.to(device), model.cp_group))
        logits_V = _logits_of(position, tokens_BS.shape[1], logits_SBV, model.cp_group)
        return sum_over_(logits_V, model.cp_group)

    return run


def pipeline_next_logits(
    stages: Sequence[GPTStage], groups: ParallelGroups, schedule: str = "1f1b"
) -> Callable[[Tensor, int], Tensor]:
    """Return `next_logits` for pipeline stages; all pipeline ranks construct and call it together.

    schedule: the one that the stages are placed for.
    """
    group, cp_group = groups.pp, groups.cp
    pp, vpp, config = group_size(group), len(stages), stages[-1].config
    planned = Schedule(pp, pp, vpp, name=schedule)

    def logits(hidden_SBH: Tensor, batch: tuple[Tensor, int]) -> tuple[Tensor, Tensor]:
        tokens_BS, position = batch
        logits_SBV = stages[-1].head(hidden_SBH)
        return logits_SBV.new_zeros(()), _logits_of(position, tokens_BS.shape[1], logits_SBV, cp_group)

    pipeline = Pipeline(
        stages,
        planned.orders(),
        group=group,
        placement=planned.placement,
        inputs=lambda batch: cut_sequence(batch[0], cp_group),
        loss=logits,
    )
    tp = group_size(stages[-1].group)
    zeros_V = torch.zeros(pad_vocab(config.vocab_size, tp) // tp, dtype=torch.float64, device=pipeline.device)
    shape: torch.Size | None = None

    def run(tokens_BS: Tensor, position: int) -> Tensor:
        nonlocal shape
        if tokens_BS.shape != shape:
            pipeline.forget_shapes()
            shape = tokens_BS.shape
        result = pipeline.evaluate([(tokens_BS.to(pipeline.device), position)])
        return sum_over_(result.stats.get((0, vpp), zeros_V).clone(), cp_group, group)

    return run


def _logits_of(position: int, length: int, logits_SBV: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Return the logits (V,) at a position of the full sequence in float64; zeros if another rank has it."""
    own = local_positions(length, cp_group, logits_SBV.device) == position
    return logits_SBV[own, 0].double().sum(0)
