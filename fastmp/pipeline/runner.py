"""Pipeline: runs the chunks of a pipeline rank in the order of a schedule.

For each step of the rank, outputs travel to the rank of the next stage over `group`, and gradients to that of
the previous stage over `backward_group`, see `fastmp.pipeline.transfers`. The instructions of a rank are a
list (`fastmp.schedule.program`), which `fastmp.pipeline.executor` runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastmp.distributed.collectives import all_reduce_, group_rank, group_size
from fastmp.nn.overlap import OverlappedLayers
from fastmp.nn.segment import StageOutput
from fastmp.pipeline.executor import Executor, Outputs, PipelineError, PipelineResult
from fastmp.pipeline.transfers import Mail, same_ranks
from fastmp.schedule.messages import RankProgram, forward_orders, rank_programs
from fastmp.schedule.planner import program_of
from fastmp.schedule.program import Program
from fastmp.schedule.stage_map import StageMap
from fastmp.schedule.steps import Step

__all__ = ["Pipeline", "PipelineError", "PipelineResult", "StageOutput"]


class Pipeline:
    """Pipeline-parallel runner of this rank's chunks, placed by `StageMap`.

    A chunk is any `nn.Module`. Stage 0 is called as chunk(*inputs(batch)), every other one as chunk(*tensors
    of the previous stage), and loss(*tensors of the last stage, batch) returns a 0-dim loss, or (loss,
    stats). Every chunk gets the keywords shared(batch), for tensors that all layers use and no stage outputs.
    A chunk returns a tensor, a sequence of tensors or a `StageOutput`.

    All ranks create their `Pipeline` together.

    Args:
        chunks: this rank's modules, the same number on every rank.
        orders: the steps of every rank, as from `Schedule.orders()`. With split backwards, the weights of
            fastmp's linear layers and experts get their gradients in "backward_weight"; everything else,
            including modules of other kinds, in "backward_input".
        group: the pipeline's ranks; None for this rank alone.
        backward_group: the same ranks in another group, for gradients. None: `group`.
        inputs, loss: called on the ranks of the first and the last stage only. With inputs None and one stage
            in all, loss(batch) calls the chunk itself, and what it raises is no `PipelineError`.
        shared: called on all ranks. None: there are no keywords.
        pairs: for each rank, the positions of forwards that overlap with the next backward, as from
            `Schedule.all_pairs`; they need `overlap`.
        overlap: the layers of the chunks, which run in parts in training. None: no overlap.
        placement: of the stages on the ranks, as `Schedule.placement`; see `StageMap`.
        device: of received tensors. None: that of the first parameter, or the CPU.

    Raises:
        ValueError: the same on all ranks, if they differ in orders, placement or number of chunks, if the
            orders deadlock or are incomplete, or if the two groups differ in their ranks.

    Example:
        >>> from fastmp.schedule import Schedule
        >>> pipeline = Pipeline(
        ...     [nn.Linear(4, 4)], Schedule(pp=1, num_microbatches=2).orders(), group=None,
        ...     inputs=lambda batch: batch, loss=lambda y, batch: y.square().mean(),
        ... )
        >>> pipeline.train([torch.ones(2, 4)] * 2).loss.shape
        torch.Size([])
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        orders: Sequence[Sequence[Step]],
        *,
        group: dist.ProcessGroup | None,
        backward_group: dist.ProcessGroup | None = None,
        inputs: Callable[[Any], Outputs] | None,
        loss: Callable[..., Tensor | tuple[Tensor, Any]],
        shared: Callable[[Any], dict[str, Any]] | None = None,
        pairs: Sequence[Sequence[int]] = (),
        overlap: OverlappedLayers | None = None,
        placement: str = "looped",
        device: torch.device | str | None = None,
    ) -> None:
        self.chunks, self.group = list(chunks), group
        self.backward_group = same_ranks(group, backward_group)
        self.inputs: Any = inputs
        self.loss, self.shared = loss, shared
        self.rank, self.size = group_rank(group), group_size(group)
        self.stages = StageMap(self.size, len(self.chunks), placement)
        self.loss_runs_chunk = inputs is None and len(self.stages) == 1
        self.orders = tuple(tuple(Step(*step) for step in order) for order in orders)
        if any(len(own) for own in pairs) and overlap is None:
            raise ValueError("Pipeline: pairs of overlapped steps need overlap=, got None")
        self.pairs, self.overlap = pairs, overlap
        self._agree()
        given = rank_programs(self.orders, pairs=pairs, placement=placement)[self.rank]
        vpp = 1 + max(step.chunk for step in self.orders[0])
        if vpp != len(self.chunks):
            raise ValueError(f"Pipeline: {len(self.chunks)} chunks for orders of {vpp} chunks a rank")
        parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        self.device = torch.device(device or (parameters[0].device if parameters else "cpu"))
        # Evaluations may have tensors of other shapes.
        self._mail, self._evaluation_mail = (Mail(group, self.backward_group, self.device) for _ in range(2))
        self._trains = self._executor(given, training=True)
        self._evaluates: dict[int, Executor] = {}  # by the number of batches
        # The first NCCL operation of a group needs all of its ranks, which a message does not have.
        for each in dict.fromkeys((self.group, self.backward_group)):
            if each is not None:
                all_reduce_(torch.zeros(1, device=self.device), each)

    def _agree(self) -> None:
        """Raise ValueError on all ranks if they were given different orders, or the first stage no inputs."""
        without_inputs: Sequence[bool] = [self.inputs is None] * self.size
        if self.group is not None:
            own = self.orders, [list(pairs) for pairs in self.pairs], self.stages.placement
            digest = hashlib.sha256(repr(own).encode()).digest()  # the orders may be megabytes
            everyones: list[Any] = [None] * self.size
            dist.all_gather_object(everyones, (len(self.chunks), digest, without_inputs[0]), group=self.group)
            *agreed, without_inputs = zip(*everyones, strict=True)
            for name, values in zip(("numbers of chunks", "orders"), agreed, strict=True):
                different = [rank for rank, value in enumerate(values) if value != values[0]]
                if different:
                    shown = f": {list(values)}" if name != "orders" else ""
                    raise ValueError(f"Pipeline: ranks 0 and {different[0]} have different {name}{shown}")
        if len(self.orders) != self.size:
            raise ValueError(f"Pipeline: {len(self.orders)} orders for a group of {self.size} ranks")
        if without_inputs[self.stages.rank(0)] and not self.loss_runs_chunk:
            raise ValueError(f"Pipeline: inputs=None is for one stage, got {len(self.stages)}; pass inputs=")

    def train(
        self, batches: Sequence[Any] | Callable[[int], Any], loss_grad: Tensor | None = None
    ) -> PipelineResult:
        """Run the forwards and backwards of one training step; gradients accumulate in the parameters.

        Every rank of the group calls it.

        Args:
            batches: one per microbatch of the orders; without `shared` only the ranks of the first and the
                last stage read them. A function is called once a microbatch, before its first forward on this
                rank, and returns its batch.
            loss_grad: 0-dim upstream gradient of every loss, equal on all ranks; returned losses are not
                scaled. None: 1.

        Raises:
            PipelineError: naming the instruction that failed. What `batches` raises is raised as it is.
            ValueError: another number of batches.
        """
        if callable(batches):
            return self._trains.run(batches, loss_grad)
        expected = 1 + max((step.microbatch for step in self.orders[0]), default=-1)
        if len(batches) != expected:
            raise ValueError(f"Pipeline.train: {len(batches)} batches for orders of {expected} microbatches")
        return self._trains.run(batches.__getitem__, loss_grad)

    def evaluate(self, batches: Sequence[Any]) -> PipelineResult:
        """Run forwards only, without gradients, for one batch or more; otherwise as `train`.

        Modules are called in the mode that they are in: put them in evaluation mode first.
        """
        number = len(batches)
        if number not in self._evaluates:
            orders = forward_orders(self.stages, number)
            given = rank_programs(orders, forward_only=True, placement=self.stages.placement)
            self._evaluates[number] = self._executor(given[self.rank], training=False)
        with torch.no_grad():
            return self._evaluates[number].run(batches.__getitem__)

    @property
    def program(self) -> Program:
        """The instructions of this rank in a training step, without the work of the whole step."""
        return self._trains.program

    def forget_shapes(self) -> None:
        """Allow batches of another size from the next step or evaluation on. Every rank calls it."""
        for mail in (self._mail, self._evaluation_mail):
            mail.forget_specs()

    def _executor(self, given: RankProgram, training: bool) -> Executor:
        overlap = self.overlap if training else None
        facts = [[]] * len(self.chunks) if overlap is None else [[own] for own in overlap.facts]
        program = program_of(
            given,
            self.stages,
            self.rank,
            facts,
            pairs=self.pairs[self.rank] if overlap is not None and self.pairs else (),
            overlap=overlap is not None,
            whole=self.loss_runs_chunk,
        )
        return Executor(
            program,
            self.chunks,
            inputs=self.inputs,
            loss=self.loss,
            shared=self.shared,
            mail=self._mail if training else self._evaluation_mail,
            overlap=overlap,
        )
