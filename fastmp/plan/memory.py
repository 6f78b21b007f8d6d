"""Memory: the bytes that a rank of each pipeline stage holds at the fullest moment of a step, by kind.

Gradients accumulate in float32. The optimizer keeps two averages and, for bfloat16 parameters, a float32
master. Activations come and go in the order of the schedule. Gradients of activations and other short-lived
tensors, communication buffers and what allocators waste are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastmp.config import Recipe
from fastmp.parallel.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Step
from fastmp.plan import activations
from fastmp.plan.shapes import Shapes
from fastmp.sizes import layer_parameters, norm_parameters, position_parameters

_FLOAT32 = 4  # bytes of a gradient, an average or a master


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds, and how many parameters it has.

    `activations` are kept without recomputation. `recomputed` are kept with it, together with those of the
    layer that is being run again. `total` has what the recipe asks for. `loss` is held while the loss is
    computed.
    """

    expert_parameters: int
    other_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int
    loss: int
    total: int


def stage_layers(recipe: Recipe) -> list[int]:
    """Return how many layers each stage has, first to last."""
    layout = recipe.parallel
    stages = layout.pp * layout.vpp
    if layout.stage_layers is not None:
        return list(layout.stage_layers)
    return [recipe.model.num_layers // stages] * stages


def memory(recipe: Recipe, shapes: Shapes, orders: Sequence[Sequence[Step]]) -> list[Memory]:
    """Return the memory of each pipeline rank; rank i runs the steps `orders[i]`."""
    return [_of_rank(recipe, shapes, rank, order) for rank, order in enumerate(orders)]


def _of_rank(recipe: Recipe, shapes: Shapes, rank: int, order: Sequence[Step]) -> Memory:
    layers, pp, layout = stage_layers(recipe), shapes.grid.pp, recipe.parallel
    last = len(layers) - 1
    own = range(rank, len(layers), pp)
    experts, others = _parameters(shapes, [layers[stage] for stage in own], 0 in own, last in own)
    held = experts + others
    wide = shapes.itemsize == _FLOAT32
    weights, gradients = held * shapes.itemsize, held * _FLOAT32
    optimizer = held * _FLOAT32 * (2 if wide else 3)
    whole_layer = sum(activations.layer_parts(shapes).values())
    layer_input = activations.layer_input(shapes, layout.shard_recompute_input)
    ends = [
        (activations.embedding(shapes) if stage == 0 else 0)
        + (activations.loss(shapes) if stage == last else 0)
        for stage in own
    ]
    whole = [layers[stage] * whole_layer + end for stage, end in zip(own, ends)]
    inputs = [layers[stage] * layer_input + end for stage, end in zip(own, ends)]
    kept = _peak(order, whole, whole)
    recomputed = _peak(order, inputs, whole)
    if any(layers[stage] for stage in own):
        recomputed += whole_layer - (0 if layout.shard_recompute_input else layer_input)
    loss = activations.loss_workspace(shapes) if last in own else 0
    total = weights + gradients + optimizer + (recomputed if layout.recompute else kept) + loss
    return Memory(experts, others, weights, gradients, optimizer, kept, recomputed, loss, total)


def _parameters(shapes: Shapes, layers: Sequence[int], first: bool, last: bool) -> tuple[int, int]:
    """Return how many parameters of experts and how many others a rank has.

    Both the first and the last stage have the table of a tied embedding.
    """
    model, grid = shapes.model, shapes.grid
    experts, others = layer_parameters(model).per_rank(grid.tp, grid.ep, grid.etp)
    table = shapes.vocab * model.hidden_size
    experts, others = sum(layers) * experts, sum(layers) * others
    if first:
        others += table + position_parameters(model)
    if last:
        others += norm_parameters(model) + (0 if model.tie_embeddings and first else table)
    return experts, others


def _peak(order: Sequence[Step], kept: Sequence[int], until_weights: Sequence[int]) -> int:
    """Return the most bytes held at once.

    A chunk holds its `kept` from its forward to its backward. Where the backward is split, it holds its
    `until_weights` from the backward of its inputs to that of its weights.
    """
    held = most = 0
    for step in order:
        if step.kind == FORWARD:
            held += kept[step.chunk]
        elif step.kind == BACKWARD:
            held -= kept[step.chunk]
        elif step.kind == BACKWARD_INPUT:
            held += until_weights[step.chunk] - kept[step.chunk]
        elif step.kind == BACKWARD_WEIGHT:
            held -= until_weights[step.chunk]
        most = max(most, held)
    return most
