"""What one rank sends, in bytes, by group: for a layer and microbatch, and for a whole step.

Collectives are counted as rings, the least that any algorithm sends on each rank: of X bytes over n ranks an
all-gather, a reduce-scatter and an all-to-all send (n - 1) / n X, where X is the larger side, an all-reduce
twice that. Not counted are what does not grow with the model (counts of tokens, gradient norms), and
checkpoints and evaluation. Loads of experts are all equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fastmp.config import Recipe
from fastmp.plan.memory import stage_layers
from fastmp.plan.shapes import Shapes
from fastmp.sizes import layer_parameters, norm_parameters, position_parameters

_MAIN = 4  # bytes of a gradient
_STATISTICS = 12  # bytes a token: maximum, sum of exponentials, the target's logit
_PROBABILITY, _INDEX = 4, 4


@dataclass(frozen=True)
class Traffic:
    """Bytes sent forward and backward, and by what a recomputation of the forward repeats: {group: bytes}."""

    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)

    def gather(self, group: str, total: float, ranks: int, *, last: bool = False) -> None:
        """An all-gather of `total` bytes forward, whose backward is a reduce-scatter, or the other way round.

        `last`: no tensor is kept behind it, so that a recomputation ends before.
        """
        sent = _ring(total, ranks)
        self.forward[group] += sent
        self.backward[group] += sent
        if not last:
            self.repeated[group] += sent

    def sent(self, recompute: bool) -> Counter[str]:
        total = self.forward + self.backward
        return total + self.repeated if recompute else total


def _ring(total: float, ranks: int) -> int:
    return round(total * (ranks - 1) / ranks)


def layer(shapes: Shapes, *, shard_recompute_input: bool = False) -> Traffic:
    """Of one layer and one microbatch."""
    found, model, grid = Traffic(), shapes.model, shapes.grid
    if shard_recompute_input:
        found.repeated["tp"] += _ring(_whole(shapes), grid.tp)
    if grid.cp > 1:
        keys = shapes.tokens * grid.cp * 2 * shapes.kv_heads * model.head_dim * shapes.itemsize
        found.gather("cp", keys, grid.cp)
    dropped = bool(model.dropout)  # then a seed is kept behind the sums
    _pair(found, shapes, last=False)
    if model.moe is None:
        _pair(found, shapes, last=not dropped)
        return found
    if model.moe.shared_expert_ffn_hidden_size:
        _pair(found, shapes, last=False)
    _experts(found, shapes)
    if grid.tp > 1 and not shapes.sequence_parallel:  # every rank has its part of the tokens
        sent = _ring(shapes.own * grid.tp * model.hidden_size * shapes.itemsize, grid.tp)
        found.forward["tp"] += sent
        found.backward["tp"] += sent
        found.repeated["tp"] += sent if dropped else 0
    return found


def _pair(found: Traffic, shapes: Shapes, *, last: bool) -> None:
    """A column-parallel product and the row-parallel one that follows it."""
    total, tp = _whole(shapes), shapes.grid.tp
    if tp == 1:
        return
    if shapes.sequence_parallel:
        found.gather("tp", total, tp)
        found.gather("tp", total, tp, last=last)
        found.backward["tp"] += _ring(total, tp)  # the gathered input is not kept
        return
    sent = 2 * _ring(total, tp)
    found.forward["tp"] += sent
    found.backward["tp"] += sent
    found.repeated["tp"] += 0 if last else sent


def _experts(found: Traffic, shapes: Shapes) -> None:
    moe, grid, dispatcher = shapes.model.moe, shapes.grid, shapes.dispatcher
    assert moe is not None
    row = shapes.model.hidden_size * shapes.itemsize
    if dispatcher == "alltoall":
        for _ in ("dispatch", "combine"):
            found.gather("ep", shapes.pairs * row, grid.ep)
            found.gather("etp", shapes.pairs * row * grid.etp, grid.etp)
    elif dispatcher != "local":
        group = "etp" if dispatcher == "sharing" else "etp-ep"
        ranks = grid.etp * grid.ep
        tokens = shapes.own * ranks
        found.gather(group, tokens * row, ranks)
        found.gather(group, tokens * row, ranks, last=True)
        found.gather(group, tokens * moe.top_k * _PROBABILITY, ranks)
        indices = _ring(tokens * moe.top_k * _INDEX, ranks)
        found.forward[group] += indices
        found.repeated[group] += indices


def _whole(shapes: Shapes) -> int:
    return shapes.tokens * shapes.model.hidden_size * shapes.itemsize


def embedding(shapes: Shapes) -> Traffic:
    """Of the first stage and one microbatch."""
    found, tp = Traffic(), shapes.grid.tp
    if shapes.sequence_parallel:
        found.gather("tp", _whole(shapes), tp)
    else:
        found.forward["tp"] += 2 * _ring(_whole(shapes), tp)
    return found


def loss(shapes: Shapes) -> Traffic:
    """Of the last stage and one microbatch: the gradient is made, and summed, in the forward pass."""
    found, tp = Traffic(), shapes.grid.tp
    found.forward["tp"] += _ring(shapes.tokens * _STATISTICS * tp, tp) + 2 * _ring(_whole(shapes), tp)
    return found


def step(recipe: Recipe, shapes: Shapes) -> list[dict[str, int]]:
    """Of a step, for a rank of each of the pipeline's ranks: {group: bytes}, without those that send nothing.

    "tp", "cp", "ep", "etp" ("etp-ep"), "pp" (activations and gradients), "dp-cp" and "edp" (gradients),
    "embedding" (those of a tied table).
    """
    layers, layout, grid = stage_layers(recipe), recipe.parallel, shapes.grid
    a_layer = layer(shapes, shard_recompute_input=layout.shard_recompute_input).sent(layout.recompute)
    found = []
    for rank in range(grid.pp):
        own = range(rank, len(layers), grid.pp)
        a_microbatch: Counter[str] = Counter()
        for stage in own:
            for group, sent in a_layer.items():
                a_microbatch[group] += layers[stage] * sent
            if stage == 0:
                a_microbatch += embedding(shapes).sent(False)
            if stage == len(layers) - 1:
                a_microbatch += loss(shapes).sent(False)
            if grid.pp > 1:
                a_microbatch["pp"] += shapes.hidden * ((stage > 0) + (stage < len(layers) - 1))
        total = Counter({group: shapes.num_microbatches * sent for group, sent in a_microbatch.items()})
        total += _gradients(shapes, sum(layers[stage] for stage in own), 0 in own, len(layers) - 1 in own)
        found.append({group: sent for group, sent in total.items() if sent})
    return found


def _gradients(shapes: Shapes, num_layers: int, first: bool, last: bool) -> Counter[str]:
    """All-reduces after the last backward of a step."""
    model, grid, found = shapes.model, shapes.grid, Counter[str]()
    count = layer_parameters(model)
    experts, others = (num_layers * number for number in count.per_rank(grid.tp, grid.ep, grid.etp))
    # Each tensor-parallel rank sees a part of the tokens, or of the heads, that these serve.
    partial = num_layers * _partial(shapes)
    words = shapes.vocab * model.hidden_size
    if first:
        others += words + position_parameters(model)
        partial += position_parameters(model) if shapes.sequence_parallel else 0
    if last:
        others += norm_parameters(model) + (0 if model.tie_embeddings and first else words)
        partial += norm_parameters(model) if shapes.sequence_parallel else 0
    found["dp-cp"] += 2 * _ring(others * _MAIN, grid.dp * grid.cp)
    found["edp"] += 2 * _ring(experts * _MAIN, grid.edp)
    found["tp"] += 2 * _ring(partial * _MAIN, grid.tp)
    if model.tie_embeddings and grid.pp > 1 and (first or last):
        found["embedding"] += 2 * _ring(words * _MAIN, 2)
    return found


def _partial(shapes: Shapes) -> int:
    """Parameters of a layer whose gradients are summed over the tensor-parallel group."""
    model = shapes.model
    moe = model.moe
    partial = 2 * model.head_dim * model.qk_norm
    if moe is not None:
        partial += model.hidden_size * moe.num_experts
    if shapes.sequence_parallel:
        partial = layer_parameters(model).replicated
    return partial
