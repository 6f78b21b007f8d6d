"""Traffic: the bytes that one rank sends in each group, for a layer and microbatch and for a whole step.

Collectives are counted as rings, the least that any algorithm sends on each rank. Over n ranks an all-gather,
a reduce-scatter or an all-to-all sends (n - 1) / n X, where X is the bytes of the larger side, and an
all-reduce sends twice that. What does not grow with the model (counts of tokens, gradient norms), checkpoints
and evaluation are not counted. All experts get equally many tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from fastmp.config import LatentConfig, Recipe
from fastmp.plan.memory import grad_bytes
from fastmp.plan.parameters import is_mtp_projection, rank_buffers, rank_parameters, stage_kinds, stage_map
from fastmp.plan.shapes import Shapes

_STATISTICS = 12  # bytes a token: maximum, sum of exponentials, the target's logit
_MAGNITUDE = 4  # bytes of the largest magnitude of an FP8 tile
_UPDATE = 2  # bytes of a number that Muon orthogonalises, on a GPU


@dataclass(frozen=True)
class Traffic:
    """Bytes sent in the forward, in the backward, and once more by recomputation: {group: bytes}."""

    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)

    def gather(self, group: str, total: float, ranks: int, *, last: bool = False) -> None:
        """Count an all-gather of `total` bytes whose backward is a reduce-scatter, or the other way round.

        last: no tensor is kept after it, so that recomputation stops before it.
        """
        sent = _ring(total, ranks)
        self.forward[group] += sent
        self.backward[group] += sent
        if not last:
            self.repeated[group] += sent

    def sent(self, recompute: bool) -> Counter[str]:
        """Return the bytes of forward and backward, and with `recompute` those of recomputation."""
        total = self.forward + self.backward
        return total + self.repeated if recompute else total


def _ring(total: float, ranks: int) -> int:
    return round(total * (ranks - 1) / ranks)


def layer(shapes: Shapes, *, shard_recompute_input: bool = False) -> Traffic:
    """Return the traffic of one layer and microbatch; the layer has experts if the model of `shapes` does."""
    found, model, grid = Traffic(), shapes.model, shapes.grid
    if shard_recompute_input:
        found.repeated["tp"] += _ring(_whole(shapes), grid.tp)
    if grid.cp > 1:
        width = model.attention.cached  # heads of this rank, or the latent that all ranks have
        width //= grid.tp if model.latent is None else 1
        found.gather("cp", shapes.tokens * grid.cp * width * shapes.itemsize, grid.cp)
    post_norm = model.bert is not None and model.bert.post_norm
    dropped = (
        bool(model.dropout) or post_norm
    )  # then a seed, or a norm's input, is kept behind the all-reduce
    if model.latent is None:
        _column(found, shapes, model.hidden_size)
    else:
        _latents(found, shapes, model.latent)
    _row(found, shapes, last=False)
    if model.moe is None:
        _pair(found, shapes, last=not dropped)
        return found
    if model.moe.shared_expert_ffn_hidden_size:
        _pair(found, shapes, last=False)
    _experts(found, shapes)
    if grid.tp > 1 and not shapes.sequence_parallel:  # each rank routes its part of the tokens
        sent = _ring(shapes.routed * grid.tp * model.hidden_size * shapes.itemsize, grid.tp)
        found.forward["tp"] += sent
        found.backward["tp"] += sent
        found.repeated["tp"] += sent if dropped else 0
    return found


def _pair(found: Traffic, shapes: Shapes, *, last: bool) -> None:
    """Count a column-parallel linear layer of hidden states and the row-parallel one that follows it."""
    _column(found, shapes, shapes.model.hidden_size)
    _row(found, shapes, last=last)


def _column(found: Traffic, shapes: Shapes, width: int) -> None:
    """Count a column-parallel linear layer of inputs (tokens, width)."""
    tp = shapes.grid.tp
    sent = _ring(shapes.tokens * width * shapes.itemsize, tp)
    if not shapes.sequence_parallel:
        found.backward["tp"] += 2 * sent
        return
    gathered = _ring(shapes.operand(shapes.tokens * width), tp)
    found.forward["tp"] += gathered
    found.repeated["tp"] += gathered
    found.backward["tp"] += sent + gathered  # again: the gathered input is not kept


def _row(found: Traffic, shapes: Shapes, *, last: bool) -> None:
    """Count a row-parallel linear layer to hidden states."""
    if shapes.sequence_parallel:
        found.gather("tp", _whole(shapes), shapes.grid.tp, last=last)
        return
    sent = 2 * _ring(_whole(shapes), shapes.grid.tp)
    found.forward["tp"] += sent
    found.repeated["tp"] += 0 if last else sent


def _latents(found: Traffic, shapes: Shapes, latent: LatentConfig) -> None:
    """Count the latents of attention, which enter the tensor-parallel region in place of hidden states."""
    tp, cp, sent = shapes.grid.tp, shapes.grid.cp, shapes.sequence_parallel
    _column(found, shapes, latent.q_rank or shapes.model.hidden_size)
    if cp == 1:
        _column(found, shapes, latent.kv_rank)
        if shapes.recompute_kv and sent:  # gathered once more
            found.backward["tp"] += _ring(shapes.operand(shapes.tokens * latent.kv_rank), tp)
        keys = _ring(shapes.tokens * latent.rope_size * shapes.itemsize, tp)
        found.forward["tp"] += keys * sent
        found.repeated["tp"] += keys * sent
        found.backward["tp"] += keys if sent else 2 * keys
        return
    whole = _ring(shapes.tokens * (latent.kv_rank + latent.rope_size) * shapes.itemsize, tp)
    found.forward["tp"] += whole * sent
    found.repeated["tp"] += whole * sent
    found.backward["tp"] += 2 * cp * whole  # an all-reduce of the tokens of all context-parallel ranks


def _experts(found: Traffic, shapes: Shapes) -> None:
    sizes = shapes.dispatch_sizes
    for group, nbytes, gradient, kept, backward in shapes.dispatcher.traffic(sizes):
        ranks = sizes.group_size(group)
        found.forward[group] += _ring(nbytes, ranks)
        if gradient:
            found.backward[group] += _ring(nbytes if backward is None else backward, ranks)
        if kept or not gradient:
            found.repeated[group] += _ring(nbytes, ranks)


def _whole(shapes: Shapes) -> int:
    return shapes.tokens * shapes.model.hidden_size * shapes.itemsize


def embedding(shapes: Shapes) -> Traffic:
    """Return the traffic of the embedding for one microbatch."""
    found, tp = Traffic(), shapes.grid.tp
    if shapes.sequence_parallel:
        found.gather("tp", _whole(shapes), tp)
    else:
        found.forward["tp"] += 2 * _ring(_whole(shapes), tp)
    return found


def loss(shapes: Shapes) -> Traffic:
    """Return the traffic of the loss for one microbatch; its gradient is all-reduced in the forward."""
    found, tp = Traffic(), shapes.grid.tp
    rows = shapes.predicted * shapes.model.hidden_size * shapes.itemsize
    found.forward["tp"] += _ring(shapes.predicted * _STATISTICS * tp, tp) + 2 * _ring(rows, tp)
    if shapes.model.bert is not None and shapes.sequence_parallel:  # gathered for the heads
        found.forward["tp"] += _ring(_whole(shapes), tp)
    return found


def step(recipe: Recipe, shapes: Shapes) -> list[dict[str, int]]:
    """Return the traffic of each pipeline rank in a step: {group: bytes}, without idle groups.

    The groups are "tp", "cp", "ep", "etp" or "etp-ep", "pp" (activations and their gradients), "dp-cp" and
    "edp" (gradients of parameters), and "embedding" (the gradient of a tied table).
    """
    stages, layout, grid = stage_kinds(recipe), recipe.parallel, shapes.grid
    places = stage_map(layout)
    of_kinds = {
        kind: layer(replace(shapes, model=kind), shard_recompute_input=layout.shard_recompute_input)
        for kind in set(recipe.model.layers)
    }
    found = []
    for rank in range(grid.pp):
        a_microbatch: Counter[str] = Counter()
        for stage in places.stages(rank):
            for kind in stages[stage]:
                a_microbatch.update(of_kinds[kind].sent(layout.recompute))
            if stage == 0:
                a_microbatch += embedding(shapes).sent(False)
            if stage == places.last:
                depth = recipe.model.mtp_depth  # whose modules embed tokens and have losses, too
                for sent, number in ((loss(shapes), 1 + depth), (embedding(shapes), depth)):
                    a_microbatch.update({of: number * size for of, size in sent.sent(False).items()})
            neighbours = [each for each in (stage - 1, stage + 1) if 0 <= each <= places.last]
            a_microbatch["pp"] += shapes.hidden * sum(places.rank(each) != rank for each in neighbours)
        total = Counter({group: shapes.num_microbatches * sent for group, sent in a_microbatch.items()})
        total += _gradients(recipe, shapes, rank)
        found.append({group: sent for group, sent in total.items() if sent})
    return found


def _gradients(recipe: Recipe, shapes: Shapes, rank: int) -> Counter[str]:
    """Return the traffic of gradients and parameters in a step.

    With sharded optimizer state, a ring's reduce-scatter and all-gather send as much as an all-reduce, in
    other dtypes; FP8 weights come back as bytes, after an all-reduce of their tiles' magnitudes. Slices of
    matrices that Muon updates go to their owners and come back.
    """
    grid, found, itemsize = shapes.grid, Counter[str](), grad_bytes(recipe, shapes)
    whole = (each.name for each in recipe.model.attention.projections if not each.split)
    everywhere = tuple(f"attention.{name}.weight" for name in whole)
    for buffer in rank_buffers(recipe, shapes, rank):
        group, ranks = ("edp", grid.edp) if buffer.experts else ("dp-cp", grid.dp * grid.cp)
        back = 1 if buffer.gathers_fp8 else shapes.itemsize if recipe.optimizer.shard else itemsize
        found[group] += _ring(buffer.layout.size * (itemsize + back), ranks)
        if buffer.gathers_fp8:
            found[group] += 2 * _ring(buffer.num_tiles * _MAGNITUDE, ranks)
        if buffer.whole:
            split = sum(
                end - start
                for name, (start, end) in buffer.layout.ranges.items()
                if not (name.endswith(everywhere) or is_mtp_projection(name))
            )
            own = split / buffer.layout.num_ranks
            axis = "etp" if buffer.experts else "tp"
            found[axis] += 2 * _ring(own * _UPDATE, grid.size(axis))
        if buffer.partial:
            found["tp"] += 2 * _ring(buffer.layout.size * itemsize, grid.tp)
    for facts in rank_parameters(recipe, shapes, rank).values():
        if facts.own_bucket:  # of which every rank sums what it owns
            shards = grid.dp * grid.cp if recipe.optimizer.shard else 1
            found["embedding"] += 2 * _ring(-(-facts.size // shards) * itemsize, 2)
    return found
