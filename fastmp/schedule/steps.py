"""Steps of a pipeline rank: calls of its chunks with microbatches. Standard library only."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

__all__ = [
    *("BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "FORWARD", "KINDS"),
    *("PipelineSizes", "RankOrder", "Step", "followed", "integers", "peak_held", "together", "with_loss"),
]

FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
_HELD = {FORWARD: 1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1, BACKWARD: -1}  # chunk activations


class Step(NamedTuple):
    """Call of a chunk with a microbatch.

    `kind` is "forward", "backward" (dgrad and wgrad), "backward_input" (dgrad, which the previous stage waits
    for) or "backward_weight" (wgrad, which can be deferred).
    """

    kind: str
    microbatch: int
    chunk: int

    @property
    def unit(self) -> str:
        """Word in messages for the number in `chunk`."""
        return "chunk"

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch} {self.unit} {self.chunk}"


class PipelineSizes(NamedTuple):
    """Sizes of a pipeline, from which a schedule makes orders; the arguments of `Schedule`."""

    pp: int
    num_microbatches: int
    vpp: int = 1
    group_size: int = 1
    overlap: bool = False


class RankOrder(NamedTuple):
    """The order of a rank.

    steps: in the order in which they run.
    pairs: positions of the forwards that can overlap the next step.
    warmup: forwards before the first forward-backward pair.
    """

    steps: tuple[Step, ...]
    pairs: Sequence[int]
    warmup: int


def peak_held(steps: Iterable[Step]) -> int:
    """Return the peak number of chunk activations: forwards whose backward is not complete."""
    return max(accumulate(_HELD[step[0]] for step in steps))


def together(order: Sequence[Step], pairs: Container[int] = ()) -> Iterator[tuple[Step, ...]]:
    """Yield the steps of an order, those at positions `pairs` together with the next step."""
    i = 0
    while i < len(order):
        number = 2 if i in pairs else 1
        yield tuple(order[i : i + number])
        i += number


def with_loss(steps: Iterable[Step], last: int) -> Iterator[Step]:
    """Yield the steps of the last stage's rank, with the loss as one more chunk after chunk `last`.

    The backward of a loss is not split.
    """
    return followed(steps, last, last + 1, split=False)


def followed(steps: Iterable[Step], chunk: int, by: int, *, split: bool = True) -> Iterator[Step]:
    """Yield the steps of a rank, with one more chunk, `by`, that always runs after `chunk`.

    split: its backward is split where that of `chunk` is.

    Example:
        >>> print(*followed([Step("forward", 0, 0), Step("backward", 0, 0)], 0, by=1), sep=", ")
        forward of microbatch 0 chunk 0, forward of microbatch 0 chunk 1, backward of microbatch 0 chunk 1, \
backward of microbatch 0 chunk 0
    """
    for step in steps:
        own = step._replace(chunk=by)
        if step.chunk != chunk or (step.kind == BACKWARD_WEIGHT and not split):
            yield step
        elif step.kind == FORWARD:
            yield from (step, own)
        else:
            yield from (own if split else own._replace(kind=BACKWARD), step)


def integers(steps: Iterable[Step]) -> list[int]:
    """Return the steps as integers: chunk + 1 for a forward, -(chunk + 1) for a backward.

    Raises:
        ValueError: naming the step, if a backward is split.
    """
    numbers = []
    for i, (kind, microbatch, chunk) in enumerate(steps):
        if kind not in (FORWARD, BACKWARD):
            step = Step(kind, microbatch, chunk)
            raise ValueError(f"schedule: step {i}, {step}, has no integer: only whole backwards have one")
        numbers.append(chunk + 1 if kind == FORWARD else -(chunk + 1))
    return numbers
