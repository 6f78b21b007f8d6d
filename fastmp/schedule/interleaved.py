"""1F1B and zero bubble: orders that walk one table. Standard library only.

A row of the table is (microbatch, chunk): `group_size` microbatches go through one chunk, then through the
next. Backwards walk the same table with the chunks reversed.

1F1B with a flush is of Narayanan et al. 2020 (arXiv:2006.09503), interleaved 1F1B of Narayanan et al. 2021
(arXiv:2104.04473). Zero bubble splits backwards and defers wgrad to where 1F1B idles: ZB-H1 of Qi et al. 2023
(arXiv:2401.10241), here with any number of chunks.
"""

from __future__ import annotations

from functools import lru_cache

from fastmp.schedule.steps import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    PipelineSizes,
    RankOrder,
    Step,
)

__all__ = ["one_forward_one_backward", "table", "zero_bubble"]


def one_forward_one_backward(sizes: PipelineSizes, rank: int) -> RankOrder:
    """Return the 1F1B order of a rank, interleaved where it has several chunks.

    Forwards fill the time until the first backward arrives from the last stage. With several chunks that
    takes two forwards for each rank on the way, one while the microbatch goes down and one while its gradient
    comes up: a rank that idled would delay the ranks after it. The same holds with overlap, for any number of
    chunks, and the first backward is overlapped with one more forward.
    """
    first = sizes.pp - 1 - rank
    if sizes.vpp > 1 or sizes.overlap:
        first += first + (sizes.vpp - 1) * sizes.group_size + sizes.overlap
    forwards, backwards = _steps(FORWARD, sizes), _steps(BACKWARD, sizes)
    first = min(first, len(forwards))
    steady = [step for pair in zip(forwards[first:], backwards) for step in pair]
    order = (*forwards[:first], *steady, *backwards[len(forwards) - first :])
    return RankOrder(order, range(first, 2 * len(forwards) - first, 2), first)


def zero_bubble(sizes: PipelineSizes, rank: int) -> RankOrder:
    """Return the zero-bubble order of a rank.

    dgrad arrives fast enough for one forward a rank. The number of dgrad steps by which wgrad steps are
    deferred grows with the rank, for the end of the step: the last rank runs out of other work first, and
    rank 0 has wgrad steps between the last gradients that arrive. The warm-up shrinks as that lag grows, so
    every rank holds the same number of activations.
    """
    forwards, inputs, weights = (_steps(kind, sizes) for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
    behind = sizes.pp - 1 - rank + (sizes.vpp - 1) * min(sizes.group_size, sizes.num_microbatches)
    first, out = min(behind, len(forwards)), list(forwards[:behind])
    rest = forwards[first:]
    for i, step in enumerate(inputs):
        out += rest[i : i + 1]
        out.append(step)
        if i >= rank:
            out.append(weights[i - rank])
    return RankOrder((*out, *weights[max(len(weights) - rank, 0) :]), (), first)


@lru_cache(maxsize=32)
def table(num_microbatches: int, vpp: int, group_size: int) -> tuple[tuple[int, int], ...]:
    """Return (microbatch, chunk) of the k-th forward, the same for every rank; the last group may be short.

    The k-th backward has the same microbatch, and chunk vpp - 1 - chunk.
    """
    return tuple(
        (microbatch, chunk)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    )


@lru_cache(maxsize=32)
def _steps(kind: str, sizes: PipelineSizes) -> tuple[Step, ...]:
    """Return the table as steps of one kind, cached for all ranks."""
    last = sizes.vpp - 1
    return tuple(
        Step(kind, microbatch, chunk if kind == FORWARD else last - chunk)
        for microbatch, chunk in table(sizes.num_microbatches, sizes.vpp, sizes.group_size)
    )
