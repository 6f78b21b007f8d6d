"""Run the microbatches of a step or an evaluation: on a single-stage model, or through a pipeline.

Both runners return the sums over the microbatches of this rank; the trainer adds those of other ranks. In a
pipeline, losses and token counts arise on the rank of the last stage, auxiliary losses and loads of experts
on the ranks of their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastmp.distributed.collectives import gather_objects, group_size
from fastmp.nn.segment import LayerChain
from fastmp.optim.named_params import named_parameters
from fastmp.pipeline.runner import Pipeline, PipelineResult
from fastmp.pipeline.schedule import BACKWARD, FORWARD, Schedule, Step, together, with_loss
from fastmp.profiling import phase
from fastmp.training.function_chain import FunctionChain

if TYPE_CHECKING:
    from fastmp.distributed.groups import ParallelGroups
    from fastmp.nn.overlap import OverlappedLayers
    from fastmp.optim.grad_buffers import GradBuffer

__all__ = [
    "PipelineRunner",
    "ExpertStats",
    "MicrobatchLosses",
    "PipelineLoss",
    "Sums",
    "TrainData",
    "SingleStageRunner",
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


LossFunction = Callable[
    [nn.Module, Batch],
    tuple[Tensor, Tensor] | tuple[Tensor, Tensor, ExpertStats | None] | MicrobatchLosses,
]


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

    inputs: (batch) -> tensors for the first stage.
    shared: (batch) -> keywords for every stage.
    loss: (*tensors of the last stage, batch) -> (sum of the losses of the batch's tokens, number of tokens),
        or `MicrobatchLosses`.
    schedule, group_size: `name` and `group_size` of the `fastmp.pipeline.schedule.Schedule`.
    after_reduce: called on every rank with the gradients after the data-parallel reduction, for parameters
        that several stages share. A sum before it could give their copies different bits.

    A stage with experts returns a `StageOutput` with their losses and, as stats, their counts (layers of the
    stage, experts), as in `ExpertStats`.
    """

    inputs: Callable[[Batch], Any]
    loss: Callable[..., tuple[Tensor, Tensor] | MicrobatchLosses]
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


class SingleStageRunner:
    """Run a model that is not a pipeline: `loss_fn(model, batch)` for one microbatch after another.

    `evaluated` returns the sums of the batches that are evaluated together, here of one.

    overlap: runs the layers by segments, each forward but the first overlapped with the previous backward.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, overlap: OverlappedLayers | None = None
    ) -> None:
        self.model, self.loss_fn, self.chunks, self.overlap = model, loss_fn, [model], overlap
        self._microbatch: Callable[[Batch], tuple] = lambda batch: self.loss_fn(self.model, batch)
        self.evaluated: Evaluated = self._evaluated
        self.placement = "looped"

    def order(self, num_microbatches: int) -> Sequence[Step]:
        """Return the steps of this rank in training."""
        return self._schedule(num_microbatches).order(0)

    def concurrent(self, num_microbatches: int) -> Iterator[tuple[Step, ...]]:
        """Yield the steps of this rank in training; those that overlap come together."""
        return self._schedule(num_microbatches).together(0)

    def _schedule(self, num_microbatches: int) -> Schedule:
        return Schedule(1, num_microbatches, overlap=self.overlap is not None)

    def full_chains(self, num_microbatches: int) -> tuple[list[LayerChain], Sequence[Step]]:
        """Return layer chains for graphs of scope "full", one a microbatch, and the order of their steps.

        From now on, training runs through these chains.
        """
        self._microbatch = FunctionChain("microbatch", self._microbatch, self.model)
        return [self._microbatch.chain], self.order(num_microbatches)

    def train(
        self, fetch: Callable[[int], Batch], num_microbatches: int, loss_grad: Tensor | None = None
    ) -> Sums:
        """Run forward and backward of the microbatches `fetch(0)`, `fetch(1)`, ...; gradients accumulate.

        loss_grad: 0-dim, the upstream gradient of every loss (None: 1). Returned sums do not depend on it.
        """
        device = next(self.model.parameters()).device
        totals = torch.zeros(4, dtype=torch.float64, device=device)
        counts: Tensor | None = None
        loads: list[Tensor] = []
        live: dict[int, Tensor] = {}  # losses whose backward has not started
        if self.overlap is not None:
            self.overlap.begin_step()
        for steps in self.concurrent(num_microbatches):
            forward, backward = (_microbatch_of(steps, kind) for kind in (FORWARD, BACKWARD))
            if backward is not None:
                with phase("backward"):
                    whole = live.pop(backward)
                    whole.backward(None if loss_grad is None else loss_grad.to(whole.dtype))
                    if forward is None and self.overlap is not None:
                        self.overlap.backward((backward, 0))
            if forward is None:
                continue
            with phase("data"):
                batch = fetch(forward)
            with phase("forward"), self._beside(forward, backward):
                losses = MicrobatchLosses(*self._microbatch(batch))
                live[forward] = losses.total
            aux_loss, own_counts = (None, None) if losses.experts is None else losses.experts
            zero = torch.zeros_like(losses.loss)
            further = (zero if each is None else each for each in (aux_loss, losses.mtp))
            totals += _stack(losses.loss, losses.num_tokens, *further)
            if own_counts is not None:
                if counts is None:
                    counts = torch.zeros(own_counts.shape, dtype=torch.int64, device=device)
                counts += own_counts
                loads.append(own_counts.sum(0))  # graphs overwrite them in the next microbatch
        return Sums(totals, counts, torch.stack(loads) if loads else None)

    def _beside(self, forward: int, backward: int | None) -> AbstractContextManager[None]:
        """Return the context of a forward whose layers overlap those of a backward."""
        if self.overlap is None:
            return nullcontext()
        return self.overlap.forward((forward, 0), None if backward is None else (backward, 0))

    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Return (sum of losses, number of tokens) of all `batches`, (2,) float64; None without batches."""
        return _summed(self.evaluated([batch]) for batch in batches)

    def _evaluated(self, batches: Sequence[Batch]) -> Tensor:
        loss, num_tokens, *_ = self.loss_fn(self.model, *batches)
        return _stack(loss, num_tokens)

    def sum_shared_gradients(self, grads: GradBuffer) -> None:
        """All-reduce the gradients of parameters that stages share, after the data-parallel reduction."""

    def own_rows(self, counts: Tensor) -> Tensor:
        """Return the rows of `Sums.counts` of the layers of this rank."""
        return counts


class PipelineRunner:
    """Run this rank's chunks of a pipeline-parallel model; all ranks construct it together.

    `evaluated` returns the sums of the batches that are evaluated together, as many as a step has at most.

    overlap: runs the layers by segments; forwards overlap backwards that the schedule pairs with them.

    Raises:
        ValueError: on all ranks of the pipeline, for an order that cannot run, or a rank without parameters.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        functions: PipelineLoss,
        *,
        groups: ParallelGroups,
        num_microbatches: int,
        overlap: OverlappedLayers | None = None,
    ) -> None:
        self.chunks, self.functions, self.overlap = list(chunks), functions, overlap
        self.group = groups.pp
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
        self.evaluated: Evaluated = self._evaluated
        self.placement = schedule.placement
        self._rows: list[range] | None = None  # of every stage in the counts of the whole model
        self._shape = (0, 0)

    def order(self, num_microbatches: int) -> Sequence[Step]:
        """Return the steps of this rank; `num_microbatches` is that of the schedule."""
        return self.pipeline.orders[self.pipeline.rank]

    def concurrent(self, num_microbatches: int) -> Iterator[tuple[Step, ...]]:
        """Yield the steps of this rank in training; those that overlap come together."""
        pairs = self.pipeline.pairs[self.pipeline.rank] if self.pipeline.pairs else ()
        return together(self.order(num_microbatches), pairs)

    def full_chains(self, num_microbatches: int) -> tuple[list[LayerChain], Sequence[Step]]:
        """Return a chain for each chunk and, after the last stage, one for the loss; see `SingleStageRunner`.

        The chain of the loss has the parameters of the last chunk. A stage without layers stays eager.
        """
        chains: list[LayerChain] = []
        pipeline, steps = self.pipeline, self.order(num_microbatches)
        for chunk, module in enumerate(self.chunks):
            if self._hands_on(chunk):
                chains.append(LayerChain())
                continue
            whole: Any = FunctionChain("stage", module, module)
            pipeline.chunks[chunk] = whole
            chains.append(whole.chain)
        if pipeline.stages.last in self._stages():
            pipeline.loss = FunctionChain("loss", self._loss, self.chunks[-1])
            chains.append(pipeline.loss.chain)
            steps = list(with_loss(steps, len(self.chunks) - 1))
        return chains, steps

    def _hands_on(self, chunk: int) -> bool:
        """Return True for a stage without layers after the first one: it returns its input."""
        chains = [module for module in self.chunks[chunk].modules() if isinstance(module, LayerChain)]
        return bool(chains) and not any(map(len, chains)) and self._stages()[chunk] > 0

    def train(
        self, fetch: Callable[[int], Batch], num_microbatches: int, loss_grad: Tensor | None = None
    ) -> Sums:
        """Run the schedule's steps of this rank, as `SingleStageRunner.train`; all pipeline ranks call it."""
        with phase("data"):
            batches = [fetch(i) for i in range(num_microbatches)]
        result = self.pipeline.train(batches, loss_grad)
        loss, num_tokens, mtp_loss = self._of_loss(result)
        totals = _stack(loss, num_tokens, self._number(result.stage_loss), mtp_loss)
        return Sums(totals, self._count(result), self._loads(result))

    def evaluate(self, batches: Iterable[Batch]) -> Tensor | None:
        """Evaluate as many batches together as a step has; ranks without the last stage return zeros."""
        at_once, rest = 1 + max(step.microbatch for step in self.pipeline.orders[0]), iter(batches)
        return _summed(map(self.evaluated, iter(lambda: list(islice(rest, at_once)), [])))

    def _evaluated(self, batches: Sequence[Batch]) -> Tensor:
        return self._of_loss(self.pipeline.evaluate(batches))[:2]

    def sum_shared_gradients(self, grads: GradBuffer) -> None:
        """All-reduce the gradients of parameters that stages share, after the data-parallel reduction."""
        if self.functions.after_reduce is not None:
            self.functions.after_reduce(grads)

    def own_rows(self, counts: Tensor) -> Tensor:
        """Return the rows of `Sums.counts` of the layers of this rank."""
        rows = [] if self._rows is None else [self._rows[stage] for stage in self._stages()]
        return torch.cat([counts[:0], *(counts[each.start : each.stop] for each in rows)])

    def _loss(self, *tensors_and_batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss to differentiate, and (loss, number of tokens, MTP loss) as float64 statistics."""
        losses = MicrobatchLosses(*self.functions.loss(*tensors_and_batch))
        loss, mtp_loss = losses.loss.double(), losses.mtp  # so that the sum over microbatches is exact
        if mtp_loss is None:
            return loss, _stack(loss, losses.num_tokens, torch.zeros_like(loss))
        return loss + mtp_loss.double(), _stack(loss, losses.num_tokens, mtp_loss)

    def _of_loss(self, result: PipelineResult) -> Tensor:
        """Return the sums (3,) of the statistics of `_loss`; zeros on ranks without the last stage."""
        here = [stats for (_, chunk), stats in result.stats.items() if chunk == len(self.chunks)]
        if not here:
            return torch.zeros(3, dtype=torch.float64, device=self.pipeline.device)
        return torch.stack(here).sum(0)

    def _number(self, value: Tensor | None) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.pipeline.device) if value is None else value

    def _stages(self) -> tuple[int, ...]:
        """Return the numbers of this rank's stages."""
        return self.pipeline.stages.stages(self.pipeline.rank)

    def _count(self, result: PipelineResult) -> Tensor | None:
        """Return the counts of this rank's stages, summed over microbatches, at the rows of their layers."""
        own: list[Tensor | None] = []
        for chunk in range(len(self.chunks)):
            seen = [counts for (_, number), counts in result.stats.items() if number == chunk]
            own.append(torch.stack(seen).sum(0) if seen else None)
        if self._rows is None:
            self._rows, self._shape = self._agree_on_rows(own)
        if not self._shape[0]:
            return None
        counts = torch.zeros(self._shape, dtype=torch.int64, device=self.pipeline.device)
        for stage, part in zip(self._stages(), own, strict=True):
            if part is not None:
                counts[self._rows[stage].start : self._rows[stage].stop] = part
        return counts

    def _loads(self, result: PipelineResult) -> Tensor | None:
        """Return the tokens of each expert (microbatches, experts) in all layers of this rank."""
        found: dict[int, Tensor] = {}
        for (microbatch, chunk), counts in result.stats.items():
            if chunk < len(self.chunks):
                found[microbatch] = found.get(microbatch, 0) + counts.sum(0)
        return torch.stack([*found.values()]) if found else None

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
    own = any(True for _ in named_parameters(chunks))
    idle = [rank for rank, has in enumerate(gather_objects(own, group)) if not has]
    if idle:
        raise ValueError(f"Trainer: the stages of pipeline rank {idle[0]} have no parameters")


def _microbatch_of(steps: Sequence[Step], kind: str) -> int | None:
    return next((step.microbatch for step in steps if step.kind == kind), None)


def _summed(each: Iterable[Tensor]) -> Tensor | None:
    totals = None
    for own in each:
        totals = own if totals is None else totals + own
    return totals


def _stack(*numbers: Tensor) -> Tensor:
    return torch.stack([number.detach().double() for number in numbers])
