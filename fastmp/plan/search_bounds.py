"""Lower bounds of time and memory in a search of layouts, from costs of layers that many candidates share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from operator import ge, mul
from typing import Any, NamedTuple

from fastmp.config import OPTIMIZERS, GPTConfig
from fastmp.config.sizes import layer_parameters, pad_vocab
from fastmp.plan import activations
from fastmp.plan.kernels import FASTMP
from fastmp.plan.layer_time import (
    FORWARD,
    INPUT,
    REPEATED,
    WEIGHT,
    Links,
    Phases,
    beside_compute,
    embedding_time,
    host_work,
    layer_time,
    loss_time,
    mtp_time,
)
from fastmp.plan.pipeline_time import shorter
from fastmp.plan.shapes import Shapes, shapes_of
from fastmp.plan.space import STATES, Candidate, Layout, Space, graphs_of
from fastmp.plan.stash_size import row_width
from fastmp.schedule.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, Schedule
from fastmp.schedule.schedule import FORWARD as FORWARD_STEP
from fastmp.schedule.stage_map import StageMap

ROUNDING = 1.0 - 1e-9  # of a bound, which adds in another order than the estimate
_FP8_COPIES = 1.9  # bytes of a weight in both orientations, next to small ones that have no copies
_TRAVEL = ("ep", "etp", "etp-ep")
_PHASES = (FORWARD, REPEATED, INPUT, WEIGHT)


class SearchNode(NamedTuple):
    """A layout, and what the time of its layers depends on."""

    layout: Layout
    micro_batch_size: int
    dispatcher: str
    precision: str
    recompute: str


class KindCosts(NamedTuple):
    """Seconds and bytes of a layer of one kind and microbatch, without what the host adds.

    travel: seconds of exchanges in the forward and in the backward, which overlap can hide. beside: share of
    them that hiding saves, as compute beside an exchange is slower. kept: bytes of activations.
    again: bytes that a recomputed layer has on top while it is run again, and until its wgrad where that is
    a step of its own: `whole` is both. stash: bytes in the activation stash, at least.
    """

    forward: float
    repeated: float
    inputs: float
    weights: float
    travel: tuple[float, float]
    beside: float
    kept: int
    again: int
    whole: int
    stash: int


class HostSeconds(NamedTuple):
    """Seconds that the host adds to a layer and microbatch."""

    forward: float
    backward: float


class NodeCosts:
    """Seconds and bytes of layers, embedding and loss, shared by nodes of different depths.

    shared: what nodes with other experts have as well, by what it depends on.
    """

    def __init__(self, space: Space, node: SearchNode, shared: dict[object, Any]) -> None:
        order = next(space.orders(node.layout, node.recompute), (1, "1f1b", False))
        own = candidate_of(node, (order[0], order[1], False), "none", space.states()[0])
        recipe = space.recipe_of(own)
        self.shapes = shapes = shapes_of(recipe, space.gpus)
        links, full = Links(space.gpu, shapes), node.recompute == "full"
        self._full = full
        self._links, self.model, self._kind_of = links, recipe.model, space.kind_of
        self._kinds = [recipe.model.layers[layer] for layer in space.first_of]
        self._shared = shared
        dense = node._replace(layout=node.layout._replace(ep=1, etp=1), dispatcher="")
        self.kinds: list[KindCosts] = []
        for number, kind in enumerate(self._kinds):
            key = number, node if kind.moe is not None else dense
            if key not in shared:
                shared[key] = self._kind(shapes.of_kind(kind), full)
            self.kinds.append(shared[key])
        of_experts = [shapes.of_kind(kind).exchange for kind in self._kinds]
        everywhere = [0 if each is None else each.nbytes for each in of_experts]
        self.exchange = min(everywhere)  # bytes of symmetric memory, if all layers have experts
        # Of the loss, while it is computed, and until the backward of each microbatch.
        narrow = STATES[space.states()[0]][1] != "float32" and len(space.states()) == 1
        self.loss, self.loss_kept = activations.loss_workspace(shapes, narrow), activations.loss(shapes)
        if dense not in shared:
            last = loss_time(shapes, links, FASTMP)
            for _ in range(recipe.model.mtp_depth):
                last.add(mtp_time(shapes, links, FASTMP))
            shared[dense] = embedding_time(shapes, links, FASTMP), last
        self.embedding: Phases
        self.last: Phases
        self.embedding, self.last = shared[dense]
        self._hosts: dict[str, list[HostSeconds]] = {}

    def _kind(self, shapes: Shapes, full: bool) -> KindCosts:
        took = layer_time(shapes, self._links, FASTMP, full)
        sent = [sum(took.of[phase][group] for group in _TRAVEL) for phase in (FORWARD, INPUT)]
        travel, beside = (0.0, 0.0), 0.0
        if any(sent) and shapes.model.moe is not None:  # rows are sorted next to exchanges
            rows = 4 * shapes.pairs * shapes.grid.etp * shapes.model.hidden_size * shapes.itemsize
            sorting = rows / (FASTMP.memory * self._links.gpu.memory_bandwidth)
            travel = sent[0] + sorting, sent[1] + sorting
            beside = beside_compute(self._links.gpu, shapes.dispatcher.multiprocessors)
        kept, again = sum(activations.layer_parts(shapes, full).values()), 0
        if full:
            layer_input = activations.layer_input(shapes, False)
            kept, again = layer_input, kept - layer_input
        whole, stash = kept + again, _stash_entry(shapes) if shapes.stashes and not full else 0
        forward, repeated, inputs, weights = (took.total(phase) for phase in _PHASES)
        return KindCosts(forward, repeated, inputs, weights, travel, beside, kept, again, whole, stash)

    def without_recomputation(self) -> NodeCosts:
        """Return the costs of the same node without recomputation; these are with full recomputation."""
        made = copy(self)
        made.__dict__.pop("work", None)
        made._full, made._hosts, made.kinds = False, {}, []
        for kind, own in zip(self._kinds, self.kinds, strict=True):
            shapes = self.shapes.of_kind(kind)
            kept = sum(activations.layer_parts(shapes).values())
            stash = _stash_entry(shapes) if shapes.stashes else 0
            made.kinds.append(own._replace(repeated=0.0, kept=kept, again=0, whole=kept, stash=stash))
        return made

    def host(self, graphs: str) -> list[HostSeconds]:
        """Return what the host adds to a layer of each kind."""
        if graphs not in self._hosts:
            found = self._hosts[graphs] = []
            for kind, own in zip(self._kinds, self.kinds, strict=True):
                key = kind, graphs, "" if self.model.moe is None else self.shapes.dispatcher.name
                if key not in self._shared:
                    self._shared[key] = host_work(self.shapes, kind, graphs_of(graphs))
                work = self._shared[key]
                again = work.exposed_forward(FASTMP.host, own.repeated) if self._full else 0.0
                found.append(
                    HostSeconds(
                        work.exposed_forward(FASTMP.host, own.forward),
                        again + work.exposed_backward(FASTMP.host, own.inputs + own.weights),
                    )
                )
        return self._hosts[graphs]

    @cached_property
    def work(self) -> float:
        """Seconds of a microbatch in all layers and ends, with exchanges hidden as far as they can be."""
        layers = [self.kinds[kind] for kind in self._kind_of + self._kind_of[-1:] * self.model.mtp_depth]
        of_layers = sum(own.forward + own.repeated + own.inputs + own.weights for own in layers)
        if not self._full:  # exchanges, or all else where they take longer
            travel = sum(sum(own.travel) for own in layers)
            of_layers -= min(travel, of_layers - travel) * max(own.beside for own in self.kinds)
        return of_layers + sum(end.total(*_PHASES) for end in (self.embedding, self.last))


def candidate_of(node: SearchNode, order: tuple[int, str, bool], graphs: str, states: str) -> Candidate:
    """Return the candidate of a node with (chunks, schedule, overlap), graphs and states."""
    layout, size, dispatcher, precision, recompute = node
    return Candidate(*layout, size, dispatcher, precision, recompute, *order, graphs, states)


def _stash_entry(shapes: Shapes) -> int:
    """Return the bytes of a layer and microbatch in the activation stash, at least."""
    moe, sizes = shapes.model.moe, shapes.dispatch_sizes
    assert moe is not None
    ffn = moe.expert_ffn_hidden_size // shapes.grid.etp
    width = row_width(shapes.model.hidden_size, ffn, shapes.projections, deferred=False)
    mean = sizes.choices * sizes.etp * min(moe.activation_stash, sizes.ep)
    return int(min(mean, shapes.rows_at_experts)) * width * shapes.itemsize


class ParameterBytes:
    """Bytes of weights, gradients and states of a rank, without padding: by kind of layer, and of ends."""

    def __init__(self, space: Space, layout: Layout, precision: str, states: str) -> None:
        model, optimizer = space.recipe.model, space.recipe.optimizer
        name, grad_dtype = STATES[states]
        itemsize = 4 if space.recipe.train.dtype == "float32" else 2
        grad = 4 if grad_dtype == "float32" else itemsize
        state = _least_state(optimizer.name, itemsize, name == "small")
        dense_ranks = expert_ranks = 1
        if optimizer.shard:
            dense_ranks = space.gpus // (layout.tp * layout.pp)
            expert_ranks = space.gpus // (layout.pp * layout.ep * layout.etp)
        dense, expert = (itemsize + grad + state / ranks for ranks in (dense_ranks, expert_ranks))
        fp8 = precision == "fp8"
        self.kinds, self._kind_of = list[float](), space.kind_of
        for layer in space.first_of:
            own = layer_parameters(model.layers[layer])
            experts, sharded = own.experts / (layout.ep * layout.etp), own.sharded / layout.tp
            copies = _FP8_COPIES * (experts + (0 if model.linear_bias else sharded)) if fp8 else 0.0
            self.kinds.append((sharded + own.replicated) * dense + experts * expert + copies)
        self.table = pad_vocab(model.vocab_size, layout.tp) // layout.tp * model.hidden_size * dense

    def total(self, model: GPTConfig) -> float:
        """Return the bytes of the whole model."""
        tables = 1 if model.tie_embeddings else 2
        return sum(self.kinds[kind] for kind in self._kind_of) + tables * self.table


def _least_state(optimizer: str, itemsize: int, small: bool) -> int:
    """Return the bytes of state that a parameter has at least."""
    spec = OPTIMIZERS[optimizer]
    return min(spec.state_of(matrix=matrix).bytes(itemsize, small) for matrix in (False, True))


@lru_cache(maxsize=1024)
def _held_at_once(schedule: Schedule, rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return what a rank holds at its fullest moments: (forwards, deferred wgrads) of each chunk.

    The moment with most of both is the first.
    """
    number = schedule.vpp
    held, deferred, moments = [0] * number, [0] * number, set[tuple[int, ...]]()
    for kind, _, chunk in schedule.order(rank):
        if kind == FORWARD_STEP:
            held[chunk] += 1
        elif kind == BACKWARD_WEIGHT:
            deferred[chunk] -= 1
        else:
            held[chunk] -= 1
            deferred[chunk] += kind == BACKWARD_INPUT
        moments.add((*held, *deferred))
    fullest = [
        one for one in moments if not any(other != one and all(map(ge, other, one)) for other in moments)
    ]
    fullest.sort(key=lambda one: (-sum(one), one))
    return [(one[:number], one[number:]) for one in fullest]


class StageKinds:
    """Numbers of layers by kind: of each stage, and of the first and the last rank.

    stages: {kind: layers} of each stage. ranks: {rank: (its stages, {kind: layers})}.
    """

    def __init__(self, stages: Sequence[Mapping[int, int]], places: StageMap) -> None:
        self.stages, self.places = stages, places
        self.ranks: dict[int, tuple[tuple[int, ...], Counter[int]]] = {}
        for rank in (0, places.pp - 1):
            own = places.stages(rank)
            layers = Counter[int]()
            for stage in own:
                layers.update(stages[stage])
            self.ranks[rank] = own, layers


class _RankHeld(NamedTuple):
    """Lower bounds of the memory that a rank holds beside its parameters, in bytes.

    layers: {kind: layers}. tables: of words. kept, until_weights: activations of a microbatch in each chunk.
    moments: see `_held_at_once`. others: bytes that it holds at all of them.
    """

    layers: Mapping[int, int]
    tables: int
    kept: list[int]
    until_weights: list[int]
    moments: list[tuple[tuple[int, ...], tuple[int, ...]]]
    others: float

    def activations(self, number: int | None) -> int:
        """Return the most bytes of activations in the first `number` moments; None: in all."""
        most: int = max(
            sum(map(mul, held, self.kept)) + sum(map(mul, deferred, self.until_weights))
            for held, deferred in self.moments[:number]
        )
        return most


def _hidden(stages: Sequence[tuple[float, float, float, float]], number: int, pairs: int) -> float:
    """Return the seconds that a rank's overlapped forwards and backwards hide at most.

    A pair hides the shorter one of its exchanges and all else; each step is in one pair at most.

    Args:
        stages: of the rank: seconds of exchanges in forward and backward, and of all else.
        number: of microbatches.
        pairs: of a forward and a backward that overlap.
    """
    of_all = [sum(column) * number for column in zip(*stages, strict=True)]
    most = [max(column) * pairs for column in zip(*stages, strict=True)]
    found: float = min(own[i] + own[i + 1] for own in (of_all, most) for i in (0, 2))
    return found


class Bounds:
    """Lower bounds of a schedule of stages with so many layers of each kind."""

    def __init__(self, costs: NodeCosts, schedule: Schedule, kinds: StageKinds) -> None:
        self.costs, self.schedule, self.kinds = costs, schedule, kinds

    def time(self, host: Sequence[HostSeconds]) -> float:
        """Return the least seconds of the pipeline."""
        costs, places, last = self.costs, self.kinds.places, self.kinds.places.last
        forward, backward, overlapped = [], [], []
        for stage, counts in enumerate(self.kinds.stages):
            ahead = back = sent = returned = 0.0
            for kind, number in counts.items():
                own, late = costs.kinds[kind], host[kind]
                ahead += number * (own.forward + late.forward)
                back += number * (own.repeated + own.inputs + own.weights + late.backward)
                sent += number * own.travel[0]
                returned += number * own.travel[1]
            overlapped.append((sent, returned, ahead - sent, back - returned))
            for end, at in ((costs.embedding, 0), (costs.last, last)):
                if stage == at:
                    ahead += end.total(FORWARD)
                    back += end.total(REPEATED, INPUT, WEIGHT)
            forward.append(ahead)
            backward.append(back)
        schedule, least, beside = self.schedule, 0.0, max(each.beside for each in costs.kinds)
        number, split = schedule.num_microbatches, schedule.splits_backwards
        for rank in range(schedule.pp):
            held = places.stages(rank)
            work = sum(forward[i] + backward[i] for i in held) * number
            if schedule.overlap:
                pairs = min(len(schedule.pairs(rank)), number * len(held))
                work -= _hidden([overlapped[i] for i in held], number, pairs) * beside
            fill, drain = sum(forward[:rank]), 0.0 if split else sum(backward[:rank])
            least = max(least, fill + work + drain)
        return least * ROUNDING

    @cached_property
    def _held(self) -> list[_RankHeld]:
        """Return what the first and the last rank hold."""
        costs, stages, last = self.costs, self.kinds.stages, self.kinds.places.last
        of_layer = [(each.kept, each.whole) for each in costs.kinds]
        stashed = [kind for kind, each in enumerate(costs.kinds) if each.stash]
        found = []
        for rank, (own, layers) in self.kinds.ranks.items():
            shared = last in own and costs.model.shares_embedding
            tables = (0 in own or shared) + (last in own and not costs.model.tie_embeddings)
            kept, until_weights = (
                [
                    sum(number * of_layer[kind][i] for kind, number in stages[stage].items())
                    + (costs.loss_kept if stage == last else 0)
                    for stage in own
                ]
                for i in (0, 1)
            )
            # Two microbatches that overlap come and go layer by layer in the stash.
            others = (costs.exchange if layers else 0) + (costs.loss if last in own else 0)
            if stashed:
                entries = min(sum(stages[stage].get(kind, 0) for kind in stashed) for stage in own)
                in_flight = max(self.schedule.peak_in_flight(rank) - self.schedule.overlap, 1)
                others += in_flight * entries * max(each.stash for each in costs.kinds)
            if layers:
                others += min(each.again for each in costs.kinds)
            moments = _held_at_once(shorter(self.schedule), rank)
            found.append(_RankHeld(layers, tables, kept, until_weights, moments, others))
        return found

    def memory(self, parameters: ParameterBytes, enough: float = math.inf) -> float:
        """Return the least bytes of the first and the last pipeline rank, or fewer that exceed `enough`."""
        for moments in (1, None):
            least = 0.0
            for own in self._held:
                static = sum(number * parameters.kinds[kind] for kind, number in own.layers.items())
                static += own.tables * parameters.table + own.others
                least = max(least, static + own.activations(moments))
            if least * ROUNDING > enough:
                break
        return least * ROUNDING
