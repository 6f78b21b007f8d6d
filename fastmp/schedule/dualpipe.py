"""DualPipeV: the order of a pipeline rank whose two chunks lie on a V. Standard library only.

Microbatches go down the ranks through chunk 0, turn at the last rank, and come back up through chunk 1 to
rank 0, which has the first and the last stage. In between, a rank always has a forward of one chunk and a
backward of the other chunk at hand, of different microbatches, and runs the two as a pair, so that the
all-to-alls of experts in one hide behind the compute of the other. Backwards without a partner are split at
both ends of a step, where other ranks wait for dgrad and wgrad fills the bubble.

DualPipe is of DeepSeek-V3 (arXiv:2412.19437, section 3.2.1); the V, which needs no second copy of the
parameters, is the "cut-in-half" of Qi et al. (Sea AI Lab, 2025).
"""

from __future__ import annotations

from collections import deque

from fastmp.schedule.steps import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    PipelineSizes,
    RankOrder,
    Step,
)

__all__ = ["dualpipe_v"]


class _Steps:
    """Steps of a rank so far; a chunk's microbatches come in order, and none is added after the last one."""

    def __init__(self, num_microbatches: int) -> None:
        self._number = num_microbatches
        self._next = {kind: [0, 0] for kind in (FORWARD, BACKWARD)}  # microbatch of each chunk
        self._deferred: deque[tuple[int, int]] = deque()
        self.steps: list[Step] = []
        self.pairs: list[int] = []

    def left(self, kind: str, chunk: int) -> int:
        """Return the number of forwards or backwards of a chunk that are still to come."""
        return self._number - self._next[kind][chunk]

    def forward(self, chunk: int) -> None:
        self._add(FORWARD, FORWARD, chunk)

    def backward(self, chunk: int, *, split: bool = False) -> None:
        """Add a backward, or its dgrad if it is `split`; see `weight`."""
        if split and self.left(BACKWARD, chunk):
            self._deferred.append((self._next[BACKWARD][chunk], chunk))
        self._add(BACKWARD, BACKWARD_INPUT if split else BACKWARD, chunk)

    def pair(self, forward: int, backward: int) -> None:
        """Add a forward of one chunk that overlaps a backward of the other one."""
        if self.left(FORWARD, forward) and self.left(BACKWARD, backward):
            self.pairs.append(len(self.steps))
        self.forward(forward)
        self.backward(backward)

    def weight(self) -> bool:
        """Add the oldest deferred wgrad; return False if there is none."""
        if not self._deferred:
            return False
        self.steps.append(Step(BACKWARD_WEIGHT, *self._deferred.popleft()))
        return True

    def _add(self, counted: str, kind: str, chunk: int) -> None:
        if self.left(counted, chunk):
            self.steps.append(Step(kind, self._next[counted][chunk], chunk))
            self._next[counted][chunk] += 1


def dualpipe_v(sizes: PipelineSizes, rank: int) -> RankOrder:
    """Return the order of pipeline rank `rank`, for any number of microbatches.

    The warm-up takes as many forwards as there are stages. From 2 pp microbatches on a rank holds at most
    2 pp + 1 chunk activations. With fewer, steps of microbatches that do not exist are left out, and the
    order has less to overlap.

    Example:
        >>> steps = dualpipe_v(PipelineSizes(pp=2, num_microbatches=4, vpp=2), rank=1).steps
        >>> print(*(f"{step.kind[0]}{step.chunk}" for step in steps[:7]))
        f0 f1 f0 f1 f0 b1 f1
    """
    below, number, add = sizes.pp - 1 - rank, sizes.num_microbatches, _Steps(sizes.num_microbatches)
    # 1. Forwards of chunk 0, until the first microbatch has been at the last rank and is back.
    for _ in range(2 * below):
        add.forward(0)
    # 2. Forwards of both chunks, until the first gradient has come from rank 0.
    for _ in range(rank + 1):
        add.forward(0)
        add.forward(1)
    # 3. Backwards of chunk 1, until a gradient has been at the last rank and is back. The ranks below wait
    #    for each dgrad; wgrad runs while the next gradient is on its way.
    for _ in range(below):
        add.backward(1, split=True)
        add.weight()
        add.forward(1)
    # 4. Pairs of either kind in turns, until the forwards of chunk 0 are over.
    while add.left(FORWARD, 0):
        add.pair(0, 1)
        add.pair(1, 0)
    # 5. Pairs of one kind, until those of chunk 1 are over as well.
    for _ in range(below):
        add.backward(1)
        add.pair(1, 0)
    # 6. Backwards of both chunks. In the second half the ranks above run out of work and wait for dgrad.
    for i in range(2 * (rank + 1)):
        add.backward((i + 1) % 2, split=i > rank)
    # 7. Backwards of chunk 0, and the deferred wgrad between them and after them.
    for _ in range(below):
        add.weight()
        add.backward(0, split=True)
    while add.weight():
        pass
    warmup = min(2 * below + rank + 1, number) + min(rank + 1, number)
    return RankOrder(tuple(add.steps), tuple(add.pairs), warmup)
