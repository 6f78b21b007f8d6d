"""Run the microbatches of a step or an evaluation through a pipeline; a whole model is a pipeline of one.

The runner returns the sums over the microbatches of this rank; the trainer adds those of other ranks. Losses
and token counts arise on the rank of the last stage, auxiliary losses and loads of experts on the ranks of
their layers.

The loss function of a whole model calls the only stage itself. Forward and backward of a microbatch are then
one autograd graph, and under scope "full" one captured region.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastmp.distributed.collectives import gather_objects, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.segment import LayerChain
from fastmp.optim.named_params import named_parameters
from fastmp.pipeline.runner import Pipeline, PipelineResult
from fastmp.profiling import phase
from fastmp.schedule.program import Program, in_words
from fastmp.schedule.schedule import Schedule, Step, together, with_loss
from fastmp.training.function_chain import FunctionChain

if TYPE_CHECKING:
    from fastmp.nn.overlap import OverlappedLayers
    from fastmp.optim.grad_buffers import GradBuffer

__all__ = [
    "ExpertStats",
    "MicrobatchLosses",
    "MicrobatchRunner",
    "PipelineLoss",
    "Sums",
    "TrainData",
    "evaluation_mode",
]

Batch = dict[str, Any]  # tensors; "documents", where there are any, are a `fastmp.nn.Documents`
Evaluated = Callable[
    [Sequence[Batch]], Tensor
]  # (sum of the losses, number of tokens), float64, in eval mode


class ExpertStats(NamedTuple):
    """Auxiliary losses and loads of the experts of a model in one microbatch.

    aux_loss: (), the sum of auxiliary losses over the tokens, to be added to the loss; equal on the ranks of
        a tensor-parallel group, as the loss is.
    counts: (layers, experts), integers, the tokens of this rank that were routed to each expert.
    """

    aux_loss: Tensor
    counts: Tensor


class MicrobatchLosses(NamedTuple):
    """Losses of one microbatch: 0-dim sums over its tokens, before any division.

    loss: of the tokens. num_tokens: with a loss. experts: None without experts. mtp: the weighted loss of
    multi-token prediction, to be added to the loss; None without it.
    """

    loss: Tensor
    num_tokens: Tensor
    experts: ExpertStats | None = None
    mtp: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """The sum of all losses, whose gradient trains the model."""
        further = [None if self.experts is None else self.experts.aux_loss, self.mtp]
        return sum((each for each in further if each is not None), start=self.loss)


Losses = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, ExpertStats | None] | MicrobatchLosses
LossFunction = Callable[[Any, Batch], Losses]  # (model, batch)


class TrainData(Protocol):
    """The interface of training data.

    A batch is a dict of CPU tensors ("documents" may be a `fastmp.nn.Documents`), a pure function of the
    arguments. It must not change while other batches of its step are made.
    """

    micro_batch_size: int

    def batch(
        self, step: int, microbatch: int, num_microbatches: int, dp_rank: int, dp_size: int
    ) -> Batch: ...
    def validation_batches(self, dp_rank: int, dp_size: int, *, max_batches: int | None) -> Any: ...


@dataclass(frozen=True)
class PipelineLoss:
    """The loss function of a pipeline-parallel model, and its schedule.

    inputs: (batch) -> tensors for the first stage. None: of a single stage, which `loss` calls itself.
    shared: (batch) -> keywords for every stage.
    loss: (*tensors of the last stage, batch) -> (sum of the losses of the batch's tokens, number of tokens),
        or `MicrobatchLosses`.
    schedule, group_size: `name` and `group_size` of the `fastmp.schedule.schedule.Schedule`.
    after_reduce: called on every rank with the gradients after the data-parallel reduction, for parameters
        that several stages share. A sum before it could give their copies different bits.

    A stage with experts returns a `StageOutput` with their losses and, as stats, their counts (layers of the
    stage, experts), as in `ExpertStats`.
    """

    inputs: Callable[[Batch], Any] | None
    loss: Callable[..., Losses]
    shared: Callable[[Batch], dict[str, Any]] = lambda batch: {}
    schedule: str = "1f1b"
    group_size: int | None = None
    after_reduce: Callable[[GradBuffer], None] | None = None


class Sums(NamedTuple):
    """Sums over the microbatches that this rank ran in a step, on the device.

    totals (4,), float64: losses, number of tokens, losses of experts and of MTP modules. counts (layers of
    the whole model, experts), int64: tokens of each expert, zeros for layers of other stages; None without
    experts. loads (microbatches, experts), int64: tokens of each expert in all layers of this rank; None
    without any.
    """

    totals: Tensor
    counts: Tensor | None
    loads: Tensor | None = None


class _LossStats(NamedTuple):
    """Numbers of a microbatch as in `Sums.totals`; counts of the experts that its loss function has run."""

    totals: Tensor
    counts: Tensor | None


class MicrobatchRunner:
    """Run this rank's chunks of a pipeline-parallel model, or a whole model; all ranks construct it together.

    Args:
        chunks: of this rank; the model alone with a `LossFunction`, which calls it.
        functions: the functions of a pipeline, or the loss function of a whole model.
        num_microbatches: of a step.
        overlap: runs the layers by segments; forwards overlap backwards that the schedule pairs with them.

    Attributes:
        loss: the loss function, (*tensors of the last stage, batch) -> losses of a microbatch.
        evaluated: returns the sums of the batches that are evaluated together, as many as a step has at most.

    Raises:
        ValueError: on all ranks of the pipeline, for an order that cannot run, or a rank without parameters;
            on all ranks of a stage, if they would run different steps.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        functions: PipelineLoss | LossFunction,
        *,
        groups: ParallelGroups = ParallelGroups.alone(),
        num_microbatches: int = 1,
        overlap: OverlappedLayers | None = None,
    ) -> None:
        if not isinstance(functions, PipelineLoss):
            functions = PipelineLoss(inputs=None, loss=partial(functions, chunks[0]))
        self.chunks, self.functions, self.overlap = list(chunks), functions, overlap
        self.group, self.num_microbatches = groups.pp, num_microbatches
        self.loss: Callable[..., Losses] = functions.loss
        pp, vpp = group_size(self.group), len(self.chunks)
        _check_parameters(self.chunks, self.group)
        schedule = Schedule(
            pp, num_microbatches, vpp, functions.group_size, functions.schedule, overlap is not None
        )
        self.pipeline = Pipeline(
            self.chunks,
            schedule.orders(),
            group=self.group,
            backward_group=groups.pp_backward,
            inputs=functions.inputs,
            loss=self._loss,
            shared=functions.shared,
            pairs=schedule.all_pairs(),
            overlap=overlap,
            placement=schedule.placement,
        )
        _check_programs(self.pipeline.program, groups.tp_cp_dp)
        self.evaluated: Evaluated = self._evaluated
        self.placement = schedule.placement
        self._rows: list[range] | None = None  # of every stage in the counts of the whole model
        self._shape = (0, 0)

    @property
    def order(self) -> Sequence[Step]:
        """The steps of this rank in training."""
        return self.pipeline.orders[self.pipeline.rank]

    def concurrent(self) -> Iterator[tuple[Step, ...]]:
        """Yield the steps of this rank in training; those that overlap come together."""
        return together(self.order, self.pipeline.pairs[self.pipeline.rank])

    def full_chains(self) -> tuple[list[LayerChain], Sequence[Step]]:
        """Return layer chains for graphs of scope "full", and the order of their steps.

        There is one of each chunk and, after the last stage, one of the loss, with the parameters of the last
        chunk; a whole model has one of its microbatches alone. A stage without layers stays eager. From now
        on, training runs through these chains.
        """
        chains: list[LayerChain] = []
        pipeline, steps, whole = self.pipeline, self.order, self.pipeline.loss_runs_chunk
        for chunk, module in enumerate(() if whole else self.chunks):
            if self._hands_on(chunk):
                chains.append(LayerChain())
                continue
            stage: Any = FunctionChain("stage", module, module)
            pipeline.chunks[chunk] = stage
            chains.append(stage.chain)
        if pipeline.stages.last in self._stages():
            name = "microbatch" if whole else "loss"
            self.loss = loss = FunctionChain(name, self.loss, self.chunks[-1])
            chains.append(loss.chain)
            steps = steps if whole else list(with_loss(steps, len(self.chunks) - 1))
        return chains, steps

    def _hands_on(self, chunk: int) -> bool:
        """Return True for a stage without layers after the first one: it returns its input."""
        chains = [module for module in self.chunks[chunk].modules() if isinstance(module, LayerChain)]
        return bool(chains) and not any(map(len, chains)) and self._stages()[chunk] > 0

    def train(self, fetch: Callable[[int], Batch], loss_grad: Tensor | None = None) -> Sums:
        """Run forward and backward of the microbatches `fetch(0)`, `fetch(1)`, ...; gradients accumulate.

        All pipeline ranks call it. Each microbatch is fetched just before its first forward on this rank.

        loss_grad: 0-dim, the upstream gradient of every loss (None: 1). Returned sums do not depend on it.
        """

        def timed(microbatch: int) -> Batch:
            with phase("data"):
                return fetch(microbatch)

        result = self.pipeline.train(timed, loss_grad)
        totals = self._totals(result)
        if result.stage_loss is not None:
            totals[2] += result.stage_loss
        counts = self._expert_counts(result)
        return Sums(totals, self._sum_counts(counts), _loads(counts))

    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Return (sum of losses, number of tokens) of all `batches`, (2,) float64; None without batches.

        Batches are evaluated together, as many as a step has, to fill a pipeline of several stages. Ranks
        without the last stage return zeros.
        """
        at_once, rest = self.num_microbatches if len(self.pipeline.stages) > 1 else 1, iter(batches)
        return _summed(map(self.evaluated, iter(lambda: list(islice(rest, at_once)), [])))

    def _evaluated(self, batches: Sequence[Batch]) -> Tensor:
        return self._totals(self.pipeline.evaluate(batches))[:2]

    def sum_shared_gradients(self, grads: GradBuffer) -> None:
        """All-reduce the gradients of parameters that stages share, after the data-parallel reduction."""
        if self.functions.after_reduce is not None:
            self.functions.after_reduce(grads)

    def own_rows(self, counts: Tensor) -> Tensor:
        """Return the rows of `Sums.counts` of the layers of this rank."""
        if len(self.pipeline.stages) == 1:
            return counts
        rows = [] if self._rows is None else [self._rows[stage] for stage in self._stages()]
        return torch.cat([counts[:0], *(counts[each.start : each.stop] for each in rows)])

    def _loss(self, *tensors_and_batch: Any) -> tuple[Tensor, _LossStats]:
        """Return the loss to differentiate, and the numbers of the microbatch."""
        losses = MicrobatchLosses(*self.loss(*tensors_and_batch))
        aux_loss, counts = (None, None) if losses.experts is None else losses.experts
        zero = torch.zeros_like(losses.loss)
        further = (zero if each is None else each for each in (aux_loss, losses.mtp))
        totals = _stack(losses.loss, losses.num_tokens, *further)
        # The model may write the counts of the next microbatch to the same memory.
        return losses.total, _LossStats(totals, None if counts is None else counts.clone())

    def _totals(self, result: PipelineResult) -> Tensor:
        """Return the sums of the numbers of `_loss`; zeros on ranks without the last stage."""
        here = [stats.totals for (_, chunk), stats in result.stats.items() if chunk == len(self.chunks)]
        if not here:
            return torch.zeros(4, dtype=torch.float64, device=self.pipeline.device)
        return torch.stack(here).sum(0)

    def _expert_counts(self, result: PipelineResult) -> dict[tuple[int, int], Tensor]:
        """Return the counts of experts by (microbatch, chunk); the last chunk also has those of the loss."""
        last = len(self.chunks) - 1
        counts: dict[tuple[int, int], Tensor] = {}
        for (microbatch, chunk), stats in result.stats.items():
            key, own = (microbatch, min(chunk, last)), stats if chunk <= last else stats.counts
            if own is not None:
                counts[key] = torch.cat((counts[key], own)) if key in counts else own
        return counts

    def _stages(self) -> tuple[int, ...]:
        """Return the numbers of this rank's stages."""
        return self.pipeline.stages.stages(self.pipeline.rank)

    def _sum_counts(self, counts: dict[tuple[int, int], Tensor]) -> Tensor | None:
        """Return the counts of this rank's stages, summed over microbatches, at the rows of their layers."""
        own: list[Tensor | None] = []
        for chunk in range(len(self.chunks)):
            seen = [each for (_, number), each in counts.items() if number == chunk]
            own.append(torch.stack(seen).sum(0) if seen else None)
        if len(self.pipeline.stages) == 1:
            return own[0]
        if self._rows is None:
            self._rows, self._shape = self._agree_on_rows(own)
        if not self._shape[0]:
            return None
        found = torch.zeros(self._shape, dtype=torch.int64, device=self.pipeline.device)
        for stage, part in zip(self._stages(), own, strict=True):
            if part is not None:
                found[self._rows[stage].start : self._rows[stage].stop] = part
        return found

    def _agree_on_rows(self, own: Sequence[Tensor | None]) -> tuple[list[range], tuple[int, int]]:
        """Return the rows of each stage and the shape of all counts; all-gathers shapes over the pipeline."""
        mine = [(0, 0) if part is None else tuple(part.shape) for part in own]
        everyones = gather_objects(mine, self.group)
        stages = self.pipeline.stages
        shapes = [everyones[stages.rank(i)][stages.chunk(i)] for i in range(len(stages))]
        ends = [sum(rows for rows, _ in shapes[: i + 1]) for i in range(len(shapes))]
        ranges = [range(end - rows, end) for end, (rows, _) in zip(ends, shapes, strict=True)]
        return ranges, (ends[-1], max(experts for _, experts in shapes))


@contextmanager
def evaluation_mode(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Set all modules to evaluation mode inside the context, and restore the mode of each afterwards."""
    before = [(chunk, chunk.training) for chunk in chunks]
    inside = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, mode in before:
            chunk.train(mode)  # which may do more than note it
        for module, mode in inside:
            module.training = mode


def _check_parameters(chunks: Sequence[nn.Module], group: dist.ProcessGroup | None) -> None:
    own = group_size(group) == 1 or any(True for _ in named_parameters(chunks))
    idle = [rank for rank, has in enumerate(gather_objects(own, group)) if not has]
    if idle:
        raise ValueError(f"Trainer: the stages of pipeline rank {idle[0]} have no parameters")


def _check_programs(program: Program, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on all ranks of a pipeline stage if they would run different steps."""
    if group is None:
        return
    own = [in_words(program, now) for now in program.instructions]
    digests = gather_objects(hashlib.sha256(repr(own).encode()).digest(), group)
    other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
    if other is None:
        return
    everyones = gather_objects(own, group)
    pairs = enumerate(zip_longest(everyones[0], everyones[other], fillvalue="nothing"))
    at, (here, there) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"Trainer: ranks 0 and {other} of a pipeline stage have different steps: instruction {at} is "
        f"{here!r} and {there!r}; give all ranks one recipe and one model"
    )


def _loads(counts: dict[tuple[int, int], Tensor]) -> Tensor | None:
    """Return the tokens of each expert (microbatches, experts) in all layers of this rank."""
    found: dict[int, Tensor] = {}
    for (microbatch, _), own in counts.items():
        found[microbatch] = found.get(microbatch, 0) + own.sum(0)
    return torch.stack([*found.values()]) if found else None


def _summed(each: Iterable[Tensor]) -> Tensor | None:
    totals = None
    for own in each:
        totals = own if totals is None else totals + own
    return totals


def _stack(*numbers: Tensor) -> Tensor:
    return torch.stack([number.detach().double() for number in numbers])
