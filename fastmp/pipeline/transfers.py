"""Messages between pipeline ranks: what a span hands on to the next stage, here or on another rank.

A message is addressed by its kind, the stage that makes it and its microbatch, carries a tag, and is posted
in the same order on both sides. Activations and gradients that cross between two ranks are therefore never
confused, whether the backend matches tags (gloo) or order (NCCL). NCCL serialises all messages between two
ranks of a group, in both directions: gradients have a group of their own, so that a late gradient delays no
activation that is ready. Specs (shapes and dtypes) are sent once, ahead of the first activations of a stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.schedule.program import Instruction
from fastmp.schedule.steps import BACKWARD, FORWARD
from fastmp.status import process_status

__all__ = ["Mail", "Transfer", "same_ranks"]

Tensors = tuple[Tensor, ...]
_MAX_SENDING = 2  # pending sends; with more this rank waits for the oldest
_HEADER = 64  # integers in a header
_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class Spec(NamedTuple):
    """Shape and dtype of a tensor, and True if its gradient is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Transfer(NamedTuple):
    """Tensors in flight to or from rank `peer` of `group`; `op` is "send" or "recv"."""

    op: str
    group: dist.ProcessGroup | None
    peer: int
    works: list[dist.Work]
    tensors: Tensors

    def wait(self) -> Tensors:
        """Wait for the transfer and return the tensors."""
        process_status.message = self
        for work in self.works:
            work.wait()
        process_status.message = None
        return self.tensors

    @property
    def is_complete(self) -> bool:
        """True if it is over; not allowed during capture."""
        return all(work.is_completed() for work in self.works)


class Mail:
    """Activations and gradients of a pipeline rank between the spans that make and take them.

    Args:
        group, backward_group: of activations, and of gradients.
        device: of received tensors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        backward_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._groups, self.device = {FORWARD: group, BACKWARD: backward_group}, device
        self._known: dict[int, tuple[Spec, ...]] = {}  # specs of the outputs of stages
        self.drop()

    def drop(self) -> None:
        """Forget all messages: those that a failed step has left."""
        self._out: dict[tuple[str, int, int], Tensors] = {}
        self._arriving: dict[tuple[str, int, int], tuple[Transfer, list[Spec]]] = {}
        self._sending: deque[Transfer] = deque()
        self._new: dict[int, tuple[Spec, ...]] = {}  # specs that were not sent to the next stage yet

    def forget_specs(self) -> None:
        """Allow other specs from the next message on."""
        self._known.clear()

    @property
    def is_empty(self) -> bool:
        return not self._out and not self._arriving

    def put(self, kind: str, stage: int, microbatch: int, tensors: Tensors) -> None:
        """Hand on what a stage has made: activations, or gradients."""
        self._out[kind, stage, microbatch] = tensors

    def take(self, kind: str, stage: int, microbatch: int) -> Tensors:
        """Return the tensors of a stage; those of another rank are in a message, which is waited for."""
        key = kind, stage, microbatch
        if key in self._out:
            return self._out.pop(key)
        transfer, specs = self._arriving.pop(key)
        tensors = transfer.wait()
        if kind == FORWARD:
            for tensor, spec in zip(tensors, specs, strict=True):
                tensor.requires_grad_(spec.requires_grad)
        return tensors

    def check(self, stage: int, tensors: Tensors, here: bool) -> None:
        """Note the specs of the outputs of a stage; here: the next stage is on this rank.

        Raises:
            ValueError: they have changed.
        """
        specs = tuple(Spec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        known = self._known.get(stage, self._new.get(stage))
        if known is None:
            (self._known if here else self._new)[stage] = specs
        elif known != specs:
            raise ValueError(
                f"stage {stage} outputs {_in_words(specs)}, but {_in_words(known)} before; "
                "forget_shapes() on all ranks lets shapes change between steps"
            )

    def send(self, now: Instruction, stage: int) -> None:
        """Start to send what `stage` has made."""
        if now.kind == FORWARD and stage not in self._known:
            header = torch.tensor(_encode(self._new[stage]), dtype=torch.int64, device=self.device)
            self._known[stage] = self._new.pop(stage)
            self._start(now, (header,), 1)
        tensors = tuple(t.contiguous() for t in self._out.pop((now.kind, stage, now.microbatch)))
        self._start(now, tensors)
        self.finish(_MAX_SENDING)

    def receive(self, now: Instruction, stage: int) -> None:
        """Start to receive what `stage` makes."""
        if now.kind == FORWARD and stage not in self._known:
            header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
            self._start(now, (header,), 1).wait()
            self._known[stage] = _decode(header.tolist())
        # A gradient is one of the inputs of the stage that makes it.
        of = self._known[stage if now.kind == FORWARD else stage - 1]
        specs = [spec for spec in of if now.kind == FORWARD or spec.requires_grad]
        tensors = tuple(torch.empty(s.shape, dtype=s.dtype, device=self.device) for s in specs)
        self._arriving[now.kind, stage, now.microbatch] = self._start(now, tensors), specs
        self.finish(_MAX_SENDING)

    def _start(self, now: Instruction, tensors: Tensors, header: int = 0) -> Transfer:
        # NCCL runs a message between two ranks on the stream of their group, after this stream's work so far.
        group, tag = self._groups[now.kind], 2 * now.tag + header
        works: list[Any] = []  # never None: this rank is in the group
        transfer = Transfer(now.op, group, now.peer, works, tensors)
        if now.op == "send":
            works += [dist.isend(x, group=group, tag=tag, group_dst=now.peer) for x in tensors]
            self._sending.append(transfer)
        else:
            works += [dist.irecv(x, group=group, tag=tag, group_src=now.peer) for x in tensors]
        return transfer

    def finish(self, most: int = 0) -> None:
        """Free sent tensors; wait for the oldest sends until at most `most` are pending."""
        queue = self._sending
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        while queue and (len(queue) > most or (not captured and queue[0].is_complete)):
            queue.popleft().wait()


def same_ranks(
    group: dist.ProcessGroup | None, backward_group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the group for gradients. Raises ValueError if its ranks are not those of `group`."""
    if backward_group is None:
        return group
    ranks = [None if each is None else dist.get_process_group_ranks(each) for each in (group, backward_group)]
    if ranks[0] != ranks[1]:
        raise ValueError(f"Pipeline: group has the ranks {ranks[0]}, but backward_group {ranks[1]}")
    return backward_group


def _encode(specs: Sequence[Spec]) -> list[int]:
    """Return `specs` as `_HEADER` integers. Raises ValueError for other dtypes, and for too many tensors."""
    numbers = [len(specs)]
    for shape, dtype, requires_grad in specs:
        if dtype not in _DTYPES:
            raise ValueError(f"tensors of {dtype} cannot be sent")
        numbers += [_DTYPES.index(dtype), int(requires_grad), len(shape), *shape]
    if len(numbers) > _HEADER:
        raise ValueError(
            f"{len(specs)} tensors of so many dimensions do not fit a header: {_in_words(specs)}"
        )
    return numbers + [0] * (_HEADER - len(numbers))


def _decode(numbers: Sequence[int]) -> tuple[Spec, ...]:
    """Return the specs from the integers of `_encode`."""
    rest, specs = iter(numbers), []
    for _ in range(next(rest)):
        dtype, requires_grad, dims = next(rest), next(rest), next(rest)
        specs.append(Spec(tuple(next(rest) for _ in range(dims)), _DTYPES[dtype], bool(requires_grad)))
    return tuple(specs)


def _in_words(specs: Sequence[Spec]) -> str:
    """Format specs for an error message."""
    return " and ".join(
        f"{list(shape)} {str(dtype).removeprefix('torch.')}{'' if grad else ' without gradient'}"
        for shape, dtype, grad in specs
    ) or "no tensor"  # fmt: skip
