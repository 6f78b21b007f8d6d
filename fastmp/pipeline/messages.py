"""The messages between pipeline ranks and their order, from the orders of all ranks. Standard library only.

All ranks post their messages in the order of one clock, the simulator's: a message has the time at which the
step that makes it ends there. So two ranks agree on the order of everything between them, also where
activations and gradients cross, and a backend that ignores tags cannot take one for the other. Nothing
deadlocks, even if a send lasts until it is received and a rank's transfers go one by one: of all messages
not yet done, the first needs only steps that need earlier ones. The same holds with a group for each kind of
messages, where only those of one kind between two ranks go one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from typing import NamedTuple

from fastmp.pipeline.schedule import BACKWARD, BACKWARD_INPUT, FORWARD, Schedule, Step
from fastmp.pipeline.simulate import simulate

__all__ = ["Message", "Program", "forward_orders", "program"]


class Message(NamedTuple):
    """The activations that a step sends to the stage behind it, or the gradients to the stage before it.

    Messages sort in the order in which all ranks post them. `source` and `target` are pipeline ranks; `stage`
    makes the message.
    """

    clock: float
    source: int
    target: int
    kind: str
    stage: int
    microbatch: int


class Program(NamedTuple):
    """A rank's part of a training step: its steps, and the messages it posts before each of them.

    `posts[i]` comes right before step i, in order, and `posts[-1]` after the last step. A rank posts its own
    messages as soon as they are made, and receives as soon as the sender can have made them, so that messages
    travel while steps that do not need them run. `tags` gives each message a number that no other message of
    the pipeline has.
    """

    steps: tuple[Step, ...]
    posts: tuple[tuple[Message, ...], ...]
    tags: dict[Message, int]


def program(
    rank: int,
    orders: Sequence[Sequence[Step]],
    *,
    forward_only: bool = False,
    pairs: Sequence[Container[int]] = (),
) -> Program:
    """The program of pipeline rank `rank`, for the orders of all ranks and their `pairs`, see `simulate`.

    Between two steps that run at once nothing is posted.

    ValueError, from `simulate`, names rank and step where an order is malformed or ranks wait for each other.
    """
    simulation = simulate(orders, forward_only=forward_only, pairs=pairs)
    pp, last = len(orders), len(orders) * simulation.vpp - 1
    messages = []
    for source, (steps, ends) in enumerate(zip(simulation.orders, simulation.ends, strict=True)):
        for (kind, microbatch, chunk), end in zip(steps, ends, strict=True):
            stage = chunk * pp + source
            if kind == FORWARD and stage < last:
                messages.append(Message(end, source, (source + 1) % pp, FORWARD, stage, microbatch))
            elif kind in (BACKWARD, BACKWARD_INPUT) and stage > 0:
                messages.append(Message(end, source, (source - 1) % pp, BACKWARD, stage, microbatch))
    posts: list[list[Message]] = [[] for _ in range(len(orders[rank]) + 1)]
    tags = {}
    for tag, message in enumerate(sorted(messages)):
        if rank in (message.source, message.target) and message.source != message.target:
            posts[bisect_right(simulation.ends[rank], message.clock)].append(message)
            tags[message] = tag
    return Program(simulation.orders[rank], tuple(map(tuple, posts)), tags)


def forward_orders(pp: int, num_microbatches: int, vpp: int = 1) -> tuple[tuple[Step, ...], ...]:
    """The orders of all ranks for forwards alone, as in evaluation; any number of microbatches."""
    table = Schedule(pp, num_microbatches, vpp, check=False).table()  # forwards alone cannot deadlock
    return (tuple(Step(FORWARD, *entry) for entry in table),) * pp
