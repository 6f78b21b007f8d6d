"""Memory: the bytes that a rank of each pipeline stage holds at the fullest moment of a step, by kind.

Parameters, gradients and the optimizer's state lie in flat buffers, whose padding counts. A rank has the
state of its own shards, as the `OptimizerSpec` says. AdamW's is two moments and, for bfloat16 parameters, a
master weight: 8 or 12 bytes a parameter, with small states 4 or 6. A matrix that Muon updates has one float32
moment and a master weight: 4 or 8 bytes a parameter, with small states 4 or 6. Activations come and go in the
order of the schedule. Gradients of activations and other short-lived tensors, communication buffers and
allocator overhead are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fastmp.config import OPTIMIZERS, Recipe
from fastmp.plan import activations
from fastmp.plan.parameters import fp8_copies, rank_buffers, rank_parameters, stage_kinds, stage_map
from fastmp.plan.rank_load import MeasuredLoad
from fastmp.plan.shapes import Shapes
from fastmp.plan.stash_size import ring_of_rank
from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Step

_FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds, and how many parameters it has.

    `weights` include FP8 copies. `activations` are kept without recomputation. `recomputed` are kept with it,
    together with those of the largest layer, while it is run again. `total` has what the recipe asks for.
    `loss` is held while the loss is computed. In `exchange`, all experts of the rank get their rows from
    other ranks. `stash` is the activation stash of experts, a part of `activations`.
    """

    expert_parameters: int
    other_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int
    loss: int
    exchange: int
    stash: int
    total: int


def state_bytes(recipe: Recipe, shapes: Shapes, whole: bool = False) -> int:
    """Return the bytes of optimizer state a parameter has; whole: one that is updated as a matrix."""
    state = OPTIMIZERS[recipe.optimizer.name].state_of(matrix=whole)
    return state.bytes(shapes.itemsize, recipe.optimizer.states == "small")


def grad_bytes(recipe: Recipe, shapes: Shapes) -> int:
    """Return the bytes of a gradient."""
    return _FLOAT32 if recipe.optimizer.grad_dtype == "float32" else shapes.itemsize


def memory(
    recipe: Recipe,
    shapes: Shapes,
    orders: Sequence[Sequence[Step]],
    measured: MeasuredLoad | None = None,
) -> list[Memory]:
    """Return the memory of each pipeline rank; rank i runs the steps `orders[i]`.

    measured: the load that sizes the activation stash; None: `moe.activation_stash`.
    """
    return [_of_rank(recipe, shapes, rank, order, measured) for rank, order in enumerate(orders)]


def _of_rank(
    recipe: Recipe, shapes: Shapes, rank: int, order: Sequence[Step], measured: MeasuredLoad | None
) -> Memory:
    stages, layout = stage_kinds(recipe), recipe.parallel
    places = stage_map(layout)
    last, own = places.last, places.stages(rank)
    facts = rank_parameters(recipe, shapes, rank).values()
    experts, others = (sum(each.size for each in facts if each.experts is kind) for kind in (True, False))
    buffers = rank_buffers(recipe, shapes, rank)
    elements = sum(buffer.layout.size for buffer in buffers)
    weights = elements * shapes.itemsize + fp8_copies(recipe, shapes, rank)
    gradients = elements * grad_bytes(recipe, shapes)
    optimizer = sum(
        buffer.layout.size // buffer.layout.num_ranks * state_bytes(recipe, shapes, buffer.whole)
        for buffer in buffers
    )
    chunks = _of_chunks(recipe, shapes, rank)
    kept = _peak(order, chunks.whole, chunks.whole)
    recomputed = _peak(order, chunks.inputs, chunks.again) + chunks.largest
    ring = ring_of_rank(recipe, shapes, rank, measured)
    stash = 0 if ring is None else ring.nbytes
    kept += stash
    loss = activations.loss_workspace(shapes, grad_bytes(recipe, shapes) < _FLOAT32) if last in own else 0
    has_experts = any(kind.moe is not None for stage in own for kind in stages[stage])
    exchange = shapes.exchange.nbytes if has_experts and shapes.exchange is not None else 0
    total = weights + gradients + optimizer + (recomputed if layout.recompute else kept) + loss + exchange
    return Memory(
        experts, others, weights, gradients, optimizer, kept, recomputed, loss, exchange, stash, total
    )


class _Chunks(NamedTuple):
    """Bytes that a microbatch holds in each chunk of a rank, and those of the largest layer run again.

    whole: without recomputation. inputs: with it, until the backward. again: until a deferred wgrad.
    """

    whole: list[int]
    inputs: list[int]
    again: list[int]
    largest: int


def _of_chunks(recipe: Recipe, shapes: Shapes, rank: int) -> _Chunks:
    stages, layout = stage_kinds(recipe), recipe.parallel
    places = stage_map(layout)
    last, own = places.last, places.stages(rank)
    kinds = {kind for stage in own for kind in stages[stage]}
    whole_layers, again_layers = (
        [[of_kind[kind] for kind in stages[stage]] for stage in own]
        for of_kind in (
            {kind: _of_layer(shapes.of_kind(kind), again) for kind in kinds} for again in (False, True)
        )
    )
    layer_input = activations.layer_input(shapes, layout.shard_recompute_input)
    ends = [
        (activations.embedding(shapes) if stage == 0 else 0)
        + (activations.loss(shapes) if stage == last else 0)
        + (recipe.model.mtp_depth * activations.mtp(shapes) if stage == last else 0)
        for stage in own
    ]
    whole, again = (
        [sum(of_layers) + end for of_layers, end in zip(layers, ends)]
        for layers in (whole_layers, again_layers)
    )
    largest = 0
    if any(again_layers):
        largest = max(max(of_layers, default=0) for of_layers in again_layers)
        largest -= 0 if layout.shard_recompute_input else layer_input
    inputs = [len(stages[stage]) * layer_input + end for stage, end in zip(own, ends)]
    return _Chunks(whole, inputs, again, largest)


def held_over_time(recipe: Recipe, shapes: Shapes, rank: int, order: Sequence[Step]) -> list[int]:
    """Return the bytes of activations that a pipeline rank holds after each of its steps.

    As in `Memory.total`, but without those of a layer that is run again, and without the stash.
    """
    chunks = _of_chunks(recipe, shapes, rank)
    if recipe.parallel.recompute:
        return list(_held(order, chunks.inputs, chunks.again))
    return list(_held(order, chunks.whole, chunks.whole))


@lru_cache(maxsize=16)
def _of_layer(shapes: Shapes, recomputed: bool) -> int:
    return sum(activations.layer_parts(shapes, recomputed).values())


def _peak(order: Sequence[Step], kept: Sequence[int], until_weights: Sequence[int]) -> int:
    return max(_held(order, kept, until_weights), default=0)


def _held(order: Sequence[Step], kept: Sequence[int], until_weights: Sequence[int]) -> Iterator[int]:
    """Yield the bytes held after each step.

    A chunk holds its `kept` from its forward to its backward. Where the backward is split, it holds its
    `until_weights` from the backward of its inputs to that of its weights.
    """
    held = 0
    for step in order:
        if step.kind == FORWARD:
            held += kept[step.chunk]
        elif step.kind == BACKWARD:
            held -= kept[step.chunk]
        elif step.kind == BACKWARD_INPUT:
            held += until_weights[step.chunk] - kept[step.chunk]
        elif step.kind == BACKWARD_WEIGHT:
            held -= until_weights[step.chunk]
        yield held
