"""Pipeline stages of a model: embeddings in the first, layers in all, final norm and loss in the last.

A tied embedding, and one that MTP modules use, is in the first stage and, marked as a replica, in the last;
`sum_tied_gradients` all-reduces the gradients of both once a step, so that they stay equal. If one rank has
both stages, it is one parameter. Parameters are named as in the full model.

Shapes: S sequence, B batch, H hidden. Stages send (S, B, H), or (S/TP, B, H) under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastmp.config import GPTConfig
from fastmp.distributed.collectives import all_reduce_, group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.documents import Documents
from fastmp.nn.gpt import GPT
from fastmp.nn.language_model import LanguageModel, StageSpec
from fastmp.nn.placement import Placement
from fastmp.nn.segment import StageOutput
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.schedule.stage_map import StageMap

__all__ = ["GPTStage", "gpt_stages", "layers_of_stages", "stages_of", "sum_tied_gradients"]

Stage = TypeVar("Stage", bound=LanguageModel)


class GPTStage(GPT):
    """A pipeline stage of a GPT, made by `gpt_stages` for `fastmp.pipeline.Pipeline`.

    forward(tokens_BS) of the first stage, and forward(hidden_SBH) of the others, returns hidden states.
    Either takes packed `documents=`, see `GPT.forward`, which every stage gets from its own batch. A stage
    with experts returns a `StageOutput` with their auxiliary losses and, as stats, their counts (layers of
    the stage with experts, experts), see `GPTLosses`. In training, the last stage also takes `tokens_DBS`,
    see `GPT.predict_ahead`, and returns the states of all MTP modules after the hidden states. Its
    `token_losses` and `mtp_loss` compute the losses.
    """

    def forward(  # type: ignore[override]  # no logits
        self,
        x: torch.Tensor,
        documents: Documents | None = None,
        tokens_DBS: torch.Tensor | None = None,
    ) -> torch.Tensor | list[torch.Tensor] | StageOutput:
        hidden_SBH = self.embed(x, documents) if self.stage_spec.first else x
        hidden_SBH, aux, counts = self._run_layers(hidden_SBH, documents)
        states = [hidden_SBH]
        if self.training and len(self.mtp):
            assert tokens_DBS is not None, "the last stage takes the tokens that MTP modules embed"
            ahead, further_aux, further_counts = self.predict_ahead(hidden_SBH, tokens_DBS, documents)
            states, aux, counts = states + ahead, aux + further_aux, counts + further_counts
        tensors = states if len(states) > 1 else hidden_SBH
        return StageOutput(tensors, self._sum_aux(aux), torch.stack(counts)) if aux else tensors


def layers_of_stages(num_layers: int, num_stages: int, layers: Sequence[int] | None = None) -> list[range]:
    """Return the layers of every stage: the same number, or the numbers in `layers` (0 is allowed).

    Raises:
        ValueError: stages do not divide the layers, or `layers` does not fit the two numbers.

    Example:
        >>> layers_of_stages(5, 2, [2, 3])
        [range(0, 2), range(2, 5)]
    """
    if layers is None:
        if num_layers % num_stages:
            raise ValueError(
                f"stages_of: {num_layers} layers are not divisible by {num_stages} stages (pp x vpp); "
                "give the number of each in layers="
            )
        layers = [num_layers // num_stages] * num_stages
    if len(layers) != num_stages or sum(layers) != num_layers or min(layers) < 0:
        raise ValueError(
            f"stages_of: layers {list(layers)} must be {num_stages} numbers (pp x vpp), not negative, that "
            f"sum to {num_layers}"
        )
    return [range(sum(layers[:i]), sum(layers[: i + 1])) for i in range(num_stages)]


def gpt_stages(
    config: GPTConfig,
    on: Placement = Placement(),
    *,
    vpp: int = 1,
    layers: Sequence[int] | None = None,
    placement: str = "looped",
    recompute: bool = False,
    shard_recompute_input: bool = False,
) -> list[GPTStage]:
    """Return this rank's chunks of a GPT, see `stages_of`; arguments after `placement` are those of `GPT`."""
    kept = {"recompute": recompute, "shard_recompute_input": shard_recompute_input}
    return stages_of(GPTStage, config, on, vpp=vpp, layers=layers, placement=placement, **kept)


def stages_of(
    kind: type[Stage],
    config: GPTConfig,
    on: Placement,
    *,
    vpp: int,
    layers: Sequence[int] | None,
    placement: str = "looped",
    **options: Any,
) -> list[Stage]:
    """Return this rank's `vpp` chunks of a model.

    Every rank of `on.groups.pp` calls it: the last stage receives a tied embedding from the first. With
    init="full" the weights are bitwise those of the full model if the default random streams of all ranks
    start equal.

    Args:
        kind: the class of a stage; `options` are passed to each.
        layers: the number of layers of each of the PP * vpp stages, in order; None: the same number for all.
        placement: of the stages on the ranks, see `StageMap`.

    Raises:
        ValueError: as `layers_of_stages` and `GPT`, and for a rank without parameters.
    """
    rank, size = group_rank(on.groups.pp), group_size(on.groups.pp)
    ranges, places = layers_of_stages(config.num_layers, size * vpp, layers), StageMap(size, vpp, placement)
    for empty in places.without_parameters(list(map(len, ranges))):
        raise ValueError(
            f"stages_of: pipeline rank {empty} of {size} has no layer among {list(map(len, ranges))}: "
            "it would have no parameters"
        )
    stages = []
    restart = _restart(on)
    for stage in places.stages(rank):
        restart()
        spec = StageSpec(stage == 0, ranges[stage], stage == places.last)
        stages.append(kind(config, on, stage_spec=spec, **options))
    if config.shares_embedding and places.ends_meet:
        if stages[0].stage_spec.first:  # both are here: one parameter
            stages[-1].word_embedding = stages[0].word_embedding
    elif config.shares_embedding:
        _share_embedding(stages, on.groups)
    return stages


@torch.no_grad()
def _share_embedding(stages: Sequence[LanguageModel], groups: ParallelGroups) -> None:
    for stage in stages:
        if stage.word_embedding is not None:
            stage.word_embedding.mark_pipeline_shared(replica=stage.stage_spec.last)
            dist.broadcast(stage.word_embedding.weight, group=groups.embedding, group_src=0)


def _restart(on: Placement) -> Callable[[], None]:
    """Return a function that rewinds random streams to their state now, if each chunk draws a full model."""
    if on.init != "full":
        return lambda: None
    rng = on.rng
    if rng is not None:
        streams = rng.states()
        return lambda: rng.restore(streams)
    device = torch.device(on.device or "cpu")
    module = torch.cuda if device.type == "cuda" else torch
    state = module.get_rng_state()
    return lambda: module.set_rng_state(state)


@torch.no_grad()
def sum_tied_gradients(
    stages: Sequence[LanguageModel], groups: ParallelGroups, grads: GradBuffer | None = None
) -> None:
    """All-reduce the gradients of a tied embedding over the first and the last stage, if two ranks have them.

    Every rank calls it once a step, after the data-parallel reduction, whose order of sums may depend on the
    offset in the buffer: so both tables get the same bits.

    grads: the buffer of main gradients; each rank reduces its shard. None: `grad` is reduced.
    """
    group = groups.embedding
    if group is None or not stages[0].config.shares_embedding:
        return
    for stage in stages:
        if stage.word_embedding is not None and stage.word_embedding.pipeline_shared:
            weight_VH = stage.word_embedding.weight
            if grads is not None and all(param is not weight_VH for param in grads.parameters.values()):
                continue  # frozen on both stages
            if grads is None and weight_VH.grad is None:
                weight_VH.grad = torch.zeros_like(weight_VH)
            grad = weight_VH.grad if grads is None else grads.own(weight_VH)
            assert grad is not None
            if grad.numel():  # the same on both stages, for which the bucket is laid out alike
                all_reduce_(grad, group)
