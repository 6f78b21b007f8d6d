"""Proof chapter on buffer plans: a deliberately broken plan of CUDA graphs is detected in four ways.

A captured graph knows addresses. Its input lies in a static buffer that nothing may overwrite until the
backward of the same microbatch has run. Here two microbatches are in flight, and the plan is changed as if an
input were dead once its forward has run: both use one buffer. A small GPT with dropout is trained through
such graphs, recorded on a CPU with memory that is reused as CUDA's graphs reuse theirs. The checker of plans
names the buffer and the replays, and a manager captures nothing; without the checker, autograd raises during
the capture; and with autograd's check taken away, `verify_every` stops the first replay that differs from its
segments. With all of them out of the way, training goes on, with wrong numbers and no error. With the plan as
it was, it has the bits of training without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastmp.config import GPTConfig
from fastmp.cuda_graphs import manager as managers
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.errors import CaptureError, GraphError
from fastmp.cuda_graphs.graph_set import ReplaySlot
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, Placement
from fastmp.optim.adamw import AdamW
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.schedule.buffer_plan import BufferPlan, SpanSpec, TensorSpec, plan_buffers, plan_errors
from fastmp.schedule.schedule import BACKWARD, FORWARD, Step
from tools.prove.claims import Claim, Table

# Both microbatches go forward before the first goes backward.
ORDER = [Step(kind, i, 0) for kind in (FORWARD, BACKWARD) for i in (0, 1)]
STEPS = 8
_MODEL = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=64, max_seq_len=16, dropout=0.1)

Planner = Callable[[Sequence[Step], Sequence[Sequence[SpanSpec]]], BufferPlan]


def claims() -> Iterator[Claim | Table]:
    """Return the claims on detecting the broken plan, and on its effect without detection."""
    chunks = [
        [SpanSpec("layers", (TensorSpec((8, 2, 32), "float64"),), (TensorSpec((8, 2, 32), "float64"),))]
    ]
    right, broken = plan_buffers(ORDER, chunks), one_buffer(ORDER, chunks)
    yield Claim.at_most("problems that the checker finds in the plan as it is made", _count(right), 0)
    yield _caught("the checker names what the broken plan destroys", next(plan_errors(broken), None))
    yield _caught("a manager does not capture it", _refused(GraphError, lambda: train(one_buffer)))
    says = "without the checker, autograd raises during the capture"
    yield _caught(says, _refused(CaptureError, lambda: train(one_buffer, checked=False)))
    yield _caught(
        "verify_every stops at the first replay that is wrong",
        _refused(GraphError, lambda: train(one_buffer, verify_every=1, checked=False, autograd_sees=False)),
    )
    eager, graphed = train(None), train(plan_buffers)
    unseen = train(one_buffer, checked=False, autograd_sees=False)
    says = f"numbers of {STEPS} steps that differ in any bit, graphs as planned beside no graphs"
    yield Claim.at_most(says, sum(not torch.equal(a, b) for a, b in zip(graphed, eager)), 0)
    says = "largest difference that the broken plan makes to a parameter, where nothing checks it"
    yield Claim.more_than(says, _apart(eager, unseen), 1e-6)
    losses = islice(zip(eager, graphed, unseen), STEPS)
    rows = [[step, *(f"{float(loss):.12f}" for loss in each)] for step, each in enumerate(losses)]
    yield Table("Losses of each step", ("step", "no graphs", "graphs", "broken plan, unchecked"), rows)


def one_buffer(order: Sequence[Step], chunks: Sequence[Sequence[SpanSpec]]) -> BufferPlan:
    """Return a broken plan: every replay uses the first buffer of its spec, too early."""
    right = plan_buffers(order, chunks)
    first: dict[TensorSpec, int] = {}
    for number, spec in enumerate(right.buffers):
        first.setdefault(spec, number)
    place = [first[spec] for spec in right.buffers]
    replays = tuple(r._replace(buffers=tuple(place[b] for b in r.buffers)) for r in right.replays)
    leases = tuple(lease._replace(buffer=place[lease.buffer]) for lease in right.leases)
    return replace(right, replays=replays, leases=leases)


def train(
    planner: Planner | None, *, verify_every: int = 0, checked: bool = True, autograd_sees: bool = True
) -> list[Tensor]:
    """Return the loss of each step of a small GPT, then its parameters.

    Args:
        planner: makes the plan of the graphs; None: no graphs.
        checked: the manager checks the plan.
        autograd_sees: whether static buffers count the writes to them, as they do until graphs are captured.
    """
    rng: Any = RngTracker(1)
    model = GPT(_MODEL, Placement(rng=rng, dtype=torch.float64))
    grads = GradBuffer(model.named_parameters())
    optimizer, data, seen = AdamW(grads, lr=1e-2), torch.Generator().manual_seed(5), list[Tensor]()
    with ExitStack() as stack:
        manager = None
        if planner is not None:
            stack.enter_context(mock.patch.object(managers, "plan_buffers", planner))
            backend: Any = RecordingBackend(rng)
            manager = managers.GraphManager([model.layers], ORDER, backend=backend, verify_every=verify_every)
            stack.callback(manager.remove)
        if not checked:
            stack.enter_context(mock.patch.object(managers, "check_plan", lambda plan: None))
        if not autograd_sees:
            stack.enter_context(mock.patch.object(ReplaySlot, "fill", _fill_unseen))
        for _ in range(STEPS):
            grads.zero()
            if manager is not None:
                manager.begin_step()
            ids = torch.randint(_MODEL.vocab_size, (2, 2, 9), generator=data)
            losses = [model.loss(each[:, :-1], each[:, 1:]).mean() for each in ids]
            for loss in losses:
                loss.backward()
            optimizer.step()
            seen.append(torch.stack(losses).detach().mean())
    return [*seen, *(param.detach().clone() for param in model.parameters())]


_fill = ReplaySlot.fill


def _fill_unseen(slot: ReplaySlot, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    with torch.autograd._unsafe_preserve_version_counter(tuple(slot.static)):
        return _fill(slot, tensors)


def _count(plan: BufferPlan) -> int:
    return sum(1 for _ in plan_errors(plan))


def _caught(says: str, message: str | None) -> Claim:
    return Claim(says, message or "nothing was said", "an error", message is not None)


def _refused(error: type[Exception], work: Callable[[], object]) -> str | None:
    """Return the first sentence of the error that `work` raises."""
    try:
        work()
    except error as raised:
        return str(raised).partition(". ")[0]
    return None


def _apart(numbers: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest difference of two lists of tensors; infinite for NaN."""
    return max(float((a - b).abs().nan_to_num(nan=torch.inf).max()) for a, b in zip(numbers, others))
