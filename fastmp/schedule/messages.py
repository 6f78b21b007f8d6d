"""Point-to-point messages of a pipeline: sends and receives of each rank, in order, by step.

All ranks post their messages in the order of one clock, the simulator's: a message has the time at which the
step that produces it ends there. Two ranks therefore agree on the order of all messages between them, also
where activations and gradients cross, and a backend that ignores tags cannot confuse them. Nothing deadlocks,
even if a send blocks until it is received and a rank's transfers are serialised: the first of all unfinished
messages depends only on steps that depend on earlier ones. The same holds with one group per kind of
message, where only messages of one kind between two ranks are serialised. Standard library only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from typing import NamedTuple

from fastmp.schedule.interleaved import table
from fastmp.schedule.simulate import simulate
from fastmp.schedule.stage_map import StageMap
from fastmp.schedule.steps import BACKWARD, BACKWARD_INPUT, FORWARD, Step

__all__ = ["Message", "RankProgram", "forward_orders", "rank_programs"]


class Message(NamedTuple):
    """Activations sent to the next stage, or gradients sent to the previous one.

    Messages sort in the order in which all ranks post them.
    """

    clock: float  # simulated time at which the step that produces it ends
    source: int  # pipeline rank
    target: int  # pipeline rank
    kind: str  # "forward" or "backward"
    stage: int  # that produces it
    microbatch: int


class RankProgram(NamedTuple):
    """The steps of one rank, and the sends and receives that it posts before each of them.

    A send is posted as soon as the tensors are computed, and a receive as soon as the sender can have
    computed them, so that transfers overlap with steps that do not depend on them.
    """

    steps: tuple[Step, ...]
    posts: tuple[tuple[Message, ...], ...]  # posts[i] right before step i, posts[-1] after the last step
    tags: dict[Message, int]  # unique in the pipeline


def rank_programs(
    orders: Sequence[Sequence[Step]],
    *,
    forward_only: bool = False,
    pairs: Sequence[Container[int]] = (),
    placement: str = "looped",
) -> list[RankProgram]:
    """Return the program of each pipeline rank.

    Nothing is posted between two overlapped steps. Stages of one rank that follow each other exchange no
    messages.

    Args:
        orders: the steps of every rank.
        pairs: for every rank, the positions of forwards overlapped with the next step, see `simulate`.
        placement: of the stages on the ranks, see `StageMap`.

    Raises:
        ValueError: naming rank and step, if an order is malformed or ranks wait for each other.

    Example:
        >>> from fastmp.schedule.schedule import Schedule
        >>> first, _ = rank_programs(Schedule(2, 2).orders())
        >>> [(message.kind, message.microbatch) for post in first.posts for message in post]
        [('forward', 0), ('forward', 1), ('backward', 0), ('backward', 1)]
    """
    simulation = simulate(orders, forward_only=forward_only, pairs=pairs, placement=placement)
    stages, messages = simulation.stages, []
    rank_of = [stages.rank(stage) for stage in range(len(stages))]
    for source, (steps, ends) in enumerate(zip(simulation.orders, simulation.ends, strict=True)):
        own = stages.stages(source)
        for (kind, microbatch, chunk), end in zip(steps, ends, strict=True):
            stage = own[chunk]
            if kind == FORWARD and stage < stages.last:
                messages.append(Message(end, source, rank_of[stage + 1], FORWARD, stage, microbatch))
            elif kind in (BACKWARD, BACKWARD_INPUT) and stage > 0:
                messages.append(Message(end, source, rank_of[stage - 1], BACKWARD, stage, microbatch))
    posts: list[list[list[Message]]] = [[[] for _ in range(len(order) + 1)] for order in orders]
    tags: list[dict[Message, int]] = [{} for _ in orders]
    for tag, message in enumerate(sorted(messages)):
        for rank in {message.source, message.target} if message.source != message.target else ():
            posts[rank][bisect_right(simulation.ends[rank], message.clock)].append(message)
            tags[rank][message] = tag
    rows = zip(simulation.orders, posts, tags, strict=True)
    return [RankProgram(steps, tuple(map(tuple, own)), tag_of) for steps, own, tag_of in rows]


def forward_orders(stages: StageMap, num_microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """Return the orders of all ranks for an evaluation: forwards only, of any number of microbatches.

    Ranks agree on an order of all forwards that keeps microbatches and stages in order, so none can deadlock.
    """
    if stages.placement == "looped":
        entries = table(num_microbatches, stages.vpp, group_size=stages.pp)
        return (tuple(Step(FORWARD, *entry) for entry in entries),) * stages.pp
    # A microbatch starts every vpp units of time, and needs one for each stage.
    every = [Step(FORWARD, m, c) for m in range(num_microbatches) for c in range(stages.vpp)]
    starts = [
        {step: stages.vpp * step.microbatch + stages.stage(rank, step.chunk) for step in every}
        for rank in range(stages.pp)
    ]
    return tuple(tuple(sorted(every, key=start.__getitem__)) for start in starts)
