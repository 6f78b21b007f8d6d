"""Search of layouts: the fastest candidates of a space that fit into memory, and their Pareto front.

Best-first branch and bound. A node is a layout with microbatch size, dispatcher, precision and recomputation;
it opens into candidates with chunks, schedule, overlap, graphs and optimizer states. Nodes and candidates
have lower bounds of time and memory:

1. Memory: the parameters of a rank without padding and, of a candidate, the activations of the chunks that
   its first and last rank have in flight.
2. Time: the work of the rank that works longest, from the seconds of layers, which many candidates share; of
   a candidate, with the way of the first microbatch down to that rank and of the last one up from it.

Only candidates whose bounds an estimated one does not beat in both get the full estimate (`step_time` and
`memory`), so results are those of estimating all, see `SearchResult`. Equal inputs give equal results.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from typing import Any

from fastmp.config import Recipe
from fastmp.plan.graphs import bytes_beside_activations
from fastmp.plan.layout import Problem, make_schedule, problems, smallest_groups
from fastmp.plan.memory import memory
from fastmp.plan.pipeline_time import orders_of, shorter
from fastmp.plan.search_bounds import (
    ROUNDING,
    Bounds,
    NodeCosts,
    ParameterBytes,
    SearchNode,
    StageKinds,
    candidate_of,
)
from fastmp.plan.shapes import Shapes, shapes_of
from fastmp.plan.space import GRAPHS, STATES, Candidate, Layout, Space, divide_layers
from fastmp.plan.step_time import StepTime, step_time
from fastmp.schedule.schedule import Schedule

SLOWEST = 1.2  # times the fastest step: slower candidates are of no interest
TOLERANCE = 0.01  # of time and memory, by which candidates are alike


@dataclass(frozen=True)
class Found:
    """A candidate with its estimate: seconds of a step and bytes of the fullest rank."""

    candidate: Candidate
    step: StepTime
    memory: int

    @property
    def key(self) -> tuple[float, int, tuple[object, ...]]:
        """Order of results: time, memory, then the candidate."""
        return self.step.seconds, self.memory, order_of(self.candidate)


@dataclass
class SearchResult:
    """Results of a search, each list in ascending order of time.

    best: the fastest candidate of each of the ten fastest layouts; the first is the fastest of all, the
    others are within `TOLERANCE` of theirs. front: candidates of which none beats another in both time and
    memory, up to `SLOWEST` times the fastest; what is not in it is beaten by one of it, within `TOLERANCE` of
    both. layouts, nodes, opened, estimated: how many were there. rejected: {reason: nodes or candidates}.
    least_memory: the fewest bytes of what did not fit.
    """

    best: list[Found] = field(default_factory=list)
    front: list[Found] = field(default_factory=list)
    layouts: int = 0
    nodes: int = 0
    opened: int = 0
    estimated: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    least_memory: float = math.inf


def order_of(own: Candidate) -> tuple[object, ...]:
    """Return the key by which equal estimates are ordered: the simpler candidate first."""
    return (
        own.overlap,
        GRAPHS.index(own.graphs),
        [*STATES].index(own.states),
        own.precision,
        own.vpp,
        own.schedule,
        own.recompute,
        own.layout,
        own.micro_batch_size,
        own.dispatcher,
    )


def search(space: Space, limit: float, *, number: int = 10) -> SearchResult:
    """Return the best candidates of `space` whose fullest rank holds at most `limit` bytes.

    number: layouts in `SearchResult.best`.
    """
    return _Search(space, limit, number).run()


class _Search:
    def __init__(self, space: Space, limit: float, number: int) -> None:
        self.space, self.limit, self.number = space, limit, number
        self.result = SearchResult()
        self.by_layout: dict[Layout, Found] = {}
        self.points: list[tuple[float, int]] = []  # time and memory of the front, ascending in time
        self.found: list[Found] = []
        self._costs: dict[SearchNode, NodeCosts] = {}
        self._shared: dict[object, Any] = {}  # of costs
        self._problems: dict[SearchNode, list[Problem]] = {}  # by nodes without recomputation
        self._held: dict[Candidate, list[int]] = {}  # bytes of ranks without graphs, by candidates without
        self._graphs: dict[Candidate, list[int]] = {}  # bytes of their graphs, by candidates without states
        self._pipelines: dict[Candidate, float] = {}  # seconds, by candidates without states
        self._divided: dict[tuple[int, int, str], StageKinds] = {}
        self._bytes: dict[tuple[Layout, str, str], ParameterBytes] = {}

    def run(self) -> SearchResult:
        heap: list[tuple[float, int, SearchNode | Candidate, float]] = []
        numbers = count()
        for layout in self.space.layouts():
            self.result.layouts += 1
            for node in self._nodes(layout):
                self.result.nodes += 1
                least = self._node_memory(node)
                if least > self.limit:
                    self._too_large(least)
                    continue
                heapq.heappush(heap, (self._node_time(node), next(numbers), node, least))
        while heap:
            time, _, item, least = heapq.heappop(heap)
            if time > SLOWEST * self.fastest:
                break
            layout = item.layout
            if not self._wanted(time, least, layout):
                continue
            if isinstance(item, Candidate):
                self._estimate(item, time)
                continue
            self.result.opened += 1
            for bounds, own in self._open(item):
                if self._wanted(*bounds, layout):
                    heapq.heappush(heap, (bounds[0], next(numbers), own, bounds[1]))
        return self._finish()

    @property
    def fastest(self) -> float:
        return self.points[0][0] if self.points else math.inf

    @property
    def tenth(self) -> float:
        """Seconds of the slowest layout among the best."""
        times = sorted(own.step.seconds for own in self.by_layout.values())
        return times[self.number - 1] if len(times) >= self.number else math.inf

    def _wanted(self, time: float, least: float, layout: Layout) -> bool:
        """Return True if an estimate at these bounds would be a result."""
        if time < self.fastest:
            return True
        if time > SLOWEST * self.fastest:
            return False
        wider = 1.0 + TOLERANCE
        if not any(own <= time * wider and held <= least * wider for own, held in self.points):
            return True
        best = self.by_layout.get(layout)
        return time < self.tenth and (best is None or time * wider < best.step.seconds)

    def _nodes(self, layout: Layout) -> list[SearchNode]:
        space = self.space
        return [
            SearchNode(layout, size, dispatcher, precision, recompute)
            for size in space.micro_batches(layout)
            for dispatcher in space.dispatchers(layout)
            for precision in space.precisions()
            for recompute in space.recomputations()
        ]

    def _parameter_bytes(self, layout: Layout, precision: str, states: str) -> ParameterBytes:
        key = layout, precision, states
        if key not in self._bytes:
            self._bytes[key] = ParameterBytes(self.space, *key)
        return self._bytes[key]

    def _costs_of(self, node: SearchNode) -> NodeCosts:
        key = node._replace(layout=node.layout._replace(pp=1))
        if key not in self._costs:
            if node.recompute == "none":
                whole = self._costs_of(node._replace(recompute="full"))
                self._costs[key] = whole.without_recomputation()
            else:
                self._costs[key] = NodeCosts(self.space, node, self._shared)
        return self._costs[key]

    def _node_memory(self, node: SearchNode) -> float:
        model, pp = self.space.recipe.model, node.layout.pp
        return min(
            self._parameter_bytes(node.layout, node.precision, states).total(model) / pp
            for states in self.space.states()
        )

    def _node_time(self, node: SearchNode) -> float:
        number = self.space.num_microbatches(node.layout, node.micro_batch_size)
        return self._costs_of(node).work * number / node.layout.pp * ROUNDING

    def _open(self, node: SearchNode) -> list[tuple[tuple[float, float], Candidate]]:
        """Return the candidates of a node that fit, with their bounds of time and memory."""
        space, costs, found = self.space, self._costs_of(node), []
        layout = node.layout
        number = space.num_microbatches(layout, node.micro_batch_size)
        if wrong := self._problems_of(node):
            self.result.rejected[str(wrong[0])] += 1
            return []
        for order in space.orders(layout, node.recompute):
            vpp, name, overlap = order
            if overlap and number == 1:
                continue
            try:
                groups = smallest_groups(layout.pp, number, vpp, name)
                schedule = Schedule(layout.pp, number, vpp, groups, name, overlap)
            except ValueError as error:
                self.result.rejected[str(error)] += 1
                continue
            bounds = Bounds(costs, schedule, self._stages(schedule))
            held = {}
            for states in space.states():
                parameters = self._parameter_bytes(layout, node.precision, states)
                held[states] = bounds.memory(parameters, max(self.limit, self.result.least_memory))
                if held[states] > self.limit:
                    self._too_large(held[states])
                    del held[states]
            eager = None
            for graphs in space.graphs(layout, node.dispatcher, overlap) if held else ():
                host = costs.host(graphs)
                if host == eager:  # graphs that save no time
                    continue
                eager, time = host if graphs == "none" else eager, bounds.time(host)
                found += [
                    ((time, least), candidate_of(node, order, graphs, states))
                    for states, least in held.items()
                ]
        return sorted(found, key=lambda each: (each[0][0], order_of(each[1])))

    def _problems_of(self, node: SearchNode) -> list[Problem]:
        """Return the problems of a node's layout, the same for all kinds of recomputation."""
        key = node._replace(recompute="none")
        if key not in self._problems:
            own = candidate_of(key, (1, "1f1b", False), "none", self.space.states()[0])
            self._problems[key] = problems(self.space.recipe_of(own), self.space.gpus)
        return self._problems[key]

    def _stages(self, schedule: Schedule) -> StageKinds:
        """Return the kinds of layers of each stage; those of MTP modules are in the last."""
        key = schedule.pp, schedule.vpp, schedule.placement
        if key not in self._divided:
            recipe, kinds = self.space.recipe, self.space.kind_of
            stages = schedule.pp * schedule.vpp
            sizes = divide_layers(recipe.model, recipe.data.seq_len, *key)
            ends = [0, *accumulate(sizes or [len(kinds) // stages] * stages)]
            found = [Counter(kinds[start:end]) for start, end in pairwise(ends)]
            found[-1].update(kinds[-1:] * recipe.model.mtp_depth)
            self._divided[key] = StageKinds(found, schedule.stages)
        return self._divided[key]

    def _too_large(self, nbytes: float) -> None:
        self.result.rejected["memory"] += 1
        self.result.least_memory = min(self.result.least_memory, nbytes)

    def _estimate(self, own: Candidate, least: float) -> None:
        """Make the full estimate of a candidate of `least` seconds and keep it, if it is of interest."""
        known = self._pipelines.get(replace(own, states=""), 0.0) * ROUNDING
        recipe = self.space.recipe_of(own)
        if wrong := problems(recipe, self.space.gpus):
            self.result.rejected[str(wrong[0])] += 1
            return
        held = self._memory(own, recipe)
        if held > self.limit:
            self._too_large(held)
            return
        if not self._wanted(max(known, least), held, own.layout):
            return
        self.result.estimated += 1
        found = Found(own, step_time(recipe, self.space.gpus, self.space.gpu), held)
        self._pipelines[replace(own, states="")] = found.step.pipeline
        self.found.append(found)
        best = self.by_layout.get(own.layout)
        if best is None or found.key < best.key:
            self.by_layout[own.layout] = found
        self.points = front_of([*self.points, (found.step.seconds, found.memory)])

    def _memory(self, own: Candidate, recipe: Recipe) -> int:
        """Return the bytes of the fullest rank of a candidate."""
        eager, stateless = replace(own, graphs="none"), replace(own, states="")
        shapes = shapes_of(recipe, self.space.gpus)
        if eager not in self._held:
            self._held[eager] = _eager_memory(recipe, shapes)
        if stateless not in self._graphs:
            self._graphs[stateless] = bytes_beside_activations(recipe, shapes)
        return _fullest(self._held[eager], self._graphs[stateless])

    def _finish(self) -> SearchResult:
        limit = SLOWEST * self.fastest
        fast = sorted((own for own in self.found if own.step.seconds <= limit), key=lambda own: own.key)
        self.result.best = sorted(
            (own for own in self.by_layout.values() if own.step.seconds <= limit), key=lambda own: own.key
        )[: self.number]
        least = math.inf
        for own in fast:
            if own.memory < least * (1.0 - TOLERANCE):
                least = own.memory
                self.result.front.append(own)
        return self.result


def _eager_memory(recipe: Recipe, shapes: Shapes) -> list[int]:
    """Return the bytes of each pipeline rank without those of CUDA graphs.

    The fullest moment of a long step is that of a shorter one.
    """
    schedule = shorter(make_schedule(recipe.parallel, shapes.num_microbatches))
    return [each.total for each in memory(recipe, shapes, orders_of(schedule).steps)]


def memory_of(space: Space, recipe: Recipe) -> int:
    """Return the bytes of the fullest rank of a recipe of `space`."""
    shapes = shapes_of(recipe, space.gpus)
    return _fullest(_eager_memory(recipe, shapes), bytes_beside_activations(recipe, shapes))


def _fullest(eager: Sequence[int], graphs: Sequence[int]) -> int:
    """Return the most bytes of a rank, from those of each without graphs and those of its graphs."""
    return max(own + more for own, more in zip(eager, graphs, strict=True))


def estimate(space: Space, own: Candidate) -> Found:
    """Return the full estimate of a candidate, which must fit the GPUs."""
    recipe = space.recipe_of(own)
    return Found(own, step_time(recipe, space.gpus, space.gpu), memory_of(space, recipe))


def front_of(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the points that no other one beats or equals in both numbers, ascending in the first.

    Example:
        >>> front_of([(2.0, 5), (1.0, 9), (3.0, 5)])
        [(1.0, 9), (2.0, 5)]
    """
    found: list[tuple[float, int]] = []
    for each in sorted(points):
        if not found or each[1] < found[-1][1]:
            found.append(each)
    return found
