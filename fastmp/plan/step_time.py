"""Estimate the time of a training step of a recipe on named GPUs, by phase and by consumer.

GEMMs and memory-bound kernels come from `fastmp.plan.kernels`, bytes sent from `fastmp.plan.traffic` over
the links of `fastmp.plan.links`, the pipeline's idle time from the simulator. Assumptions:

- The host is never late, and all experts get equally many tokens.
- Collectives within layers stop the compute. Exceptions are those of a backward that overlap a GEMM
  (`Kernels.overlap`), and with EP communication overlap the all-to-alls, in the order of training and as if
  neither side slowed the other.
- Reduce-scatters of gradients overlap the last backward and all-gathers of parameters the next forward,
  except for one bucket each.
- Muon's GEMMs, the savings of `tp_overlap`, checkpoints, data and logging are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from fastmp.config import Recipe
from fastmp.config.sizes import flops_per_token, layer_flops_per_token
from fastmp.pipeline.simulate import Costs, simulate
from fastmp.pipeline.stream_schedule import (
    SegmentCost,
    backward_ops,
    forward_ops,
    interleave,
    simulate_streams,
    unit_cost,
)
from fastmp.plan import traffic
from fastmp.plan.flops import not_repeated
from fastmp.plan.hardware import GPU
from fastmp.plan.kernels import ATTENTION, FASTMP, GEMMS, LAUNCH, Gemm, Kernels, gemm_time
from fastmp.plan.layout import make_schedule
from fastmp.plan.links import Link, link
from fastmp.plan.memory import grad_bytes, state_bytes
from fastmp.plan.parameters import fp8_buffers, rank_buffers, rank_parameters, stage_kinds, stage_ranges
from fastmp.plan.shapes import Shapes, shapes_of

FORWARD, REPEATED, INPUT, WEIGHT = "forward", "recomputation", "backward of inputs", "backward of weights"
ONCE = "once a step"
_EXCHANGES = ("ep", "etp", "etp-ep")  # groups over which rows of experts travel
_FLASH_BACKWARD = 2.5  # five GEMMs for two


class Seconds(dict[str, float]):
    """Seconds by consumer: "GEMMs", "attention", "quantisers", "other kernels", or a group."""

    def __missing__(self, what: str) -> float:
        return 0.0

    def add(self, other: Mapping[str, float], times: float = 1.0) -> None:
        """Add the seconds of `other`, `times` over."""
        for what, took in other.items():
            self[what] += took * times

    def total(self) -> float:
        """Return the sum over all consumers."""
        return sum(self.values())


@dataclass(frozen=True)
class Phases:
    """The seconds of one microbatch, by phase and by consumer."""

    of: Mapping[str, Seconds] = field(
        default_factory=lambda: {name: Seconds() for name in (FORWARD, REPEATED, INPUT, WEIGHT)}
    )

    def total(self, *names: str) -> float:
        """Return the seconds of these phases together."""
        return sum(self.of[name].total() for name in names)

    def add(self, other: Phases) -> None:
        """Add the seconds of another part of the model."""
        for name, own in self.of.items():
            own.add(other.of[name])


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step.

    parts: {(phase, what): seconds} of the pipeline rank that works longest; they add up to `seconds`. bubble:
    of all pipeline ranks, over their work. mfu: model FLOPs, with the keys that a token sees, over the peak.
    """

    seconds: float
    parts: dict[tuple[str, str], float]
    bubble: float
    tokens_per_second: float
    mfu: float


def step_time(recipe: Recipe, world_size: int, gpu: GPU, kernels: Kernels = FASTMP) -> StepTime:
    """Return the time of a step of `recipe`, which must fit `world_size` ranks, one on each GPU.

    Raises:
        ValueError: the recipe multiplies in FP8, and the GPU does not.
    """
    shapes = shapes_of(recipe, world_size)
    if shapes.fp8 and not gpu.eight:
        raise ValueError(f"{gpu.name} has no FP8: expected --train.precision dtype, or a GPU from H100 on")
    made = _Links(gpu, shapes)
    stages = _stages(recipe, shapes, made, kernels)
    schedule = make_schedule(recipe.parallel, shapes.num_microbatches)
    costs = Costs(
        [each.total(FORWARD) for each in stages],
        [each.total(REPEATED, INPUT) for each in stages],
        [each.total(WEIGHT) for each in stages],
        made.between_stages.message(shapes.hidden) if shapes.grid.pp > 1 else 0.0,
        _hidden(recipe, shapes, made, kernels) if recipe.parallel.overlap_experts else 0.0,
    )
    run = simulate(schedule.orders(), costs, pairs=schedule.all_pairs(), placement=schedule.placement)
    places = schedule.stages
    ends = [
        _end_of_step(recipe, shapes, made, kernels, rank, places.of_rank(stages, rank))
        for rank in range(shapes.grid.pp)
    ]
    slowest = max(range(shapes.grid.pp), key=lambda rank: run.busy[rank] + ends[rank].total())
    seconds = run.makespan + max(each.total() for each in ends)
    parts: dict[tuple[str, str], float] = {}
    for stage in places.of_rank(stages, slowest):
        for phase, own in stage.of.items():
            for what, took in own.items():
                parts[phase, what] = parts.get((phase, what), 0.0) + took * shapes.num_microbatches
    pairs = (steps for steps in schedule.together(slowest) if len(steps) > 1)
    _hide(parts, sum(costs.saved(*(places.stage(slowest, step.chunk) for step in steps)) for steps in pairs))
    parts[ONCE, "pipeline idle"] = seconds - run.busy[slowest] - ends[slowest].total()
    parts.update({(ONCE, what): took for what, took in ends[slowest].items()})
    tokens = recipe.train.global_batch_size * recipe.data.seq_len
    flops = tokens * flops_per_token(
        recipe.model, recipe.data.seq_len, causal=True, predicted=recipe.data.predicted
    )
    return StepTime(
        seconds=seconds,
        parts={key: took for key, took in parts.items() if took > 0.0},
        bubble=run.bubble,
        tokens_per_second=tokens / seconds,
        mfu=flops / (seconds * world_size * gpu.peak(shapes.itemsize)),
    )


class _Links:
    """The links of a recipe's groups on servers of one kind of GPU."""

    def __init__(self, gpu: GPU, shapes: Shapes) -> None:
        self.gpu, self._grid, self._shapes = gpu, shapes.grid, shapes
        self._made: dict[str, Link] = {}

    def __getitem__(self, group: str) -> Link:
        if group not in self._made:
            ranks, crossing = self._grid.ranks(group)[0], None
            if self._shapes.model.moe is not None and group == self._shapes.dispatcher.exchange_group:
                crossing = partial(self._shapes.dispatcher.crossing, self._shapes.dispatch_sizes)
            self._made[group] = link(self.gpu, ranks, crossing=crossing)
        return self._made[group]

    @property
    def between_stages(self) -> Link:
        """Slowest link between neighbours of a pipeline."""
        ranks = self._grid.ranks("pp")[0]
        return min((link(self.gpu, pair) for pair in pairwise(ranks)), key=lambda each: each.bandwidth)


def _stages(recipe: Recipe, shapes: Shapes, links: _Links, kernels: Kernels) -> list[Phases]:
    """Return the time of a microbatch in each of the pipeline's stages."""
    of_kinds = {
        kind: _layer(replace(shapes, model=kind), links, kernels, recipe.parallel.recompute)
        for kind in set(recipe.model.layers)
    }
    found = []
    for kinds in stage_kinds(recipe):
        found.append(Phases())
        for kind in kinds:
            found[-1].add(of_kinds[kind])
    found[0].add(_embedding(shapes, links, kernels))
    found[-1].add(_loss(shapes, links, kernels))
    for _ in range(recipe.model.mtp_depth):
        found[-1].add(_mtp(shapes, links, kernels))
    return found


def _add_gemms(found: Phases, gpu: GPU, gemms: Sequence[Gemm], itemsize: int, adds: bool) -> None:
    """Add the seconds of GEMMs, and of the two GEMMs of the backward of each."""
    for each in gemms:
        found.of[FORWARD]["GEMMs"] += gemm_time(gpu, each, itemsize)
        found.of[INPUT]["GEMMs"] += gemm_time(gpu, each.backward_input(), itemsize)
        found.of[WEIGHT]["GEMMs"] += gemm_time(gpu, each.backward_weight(adds), itemsize)


def _layer(shapes: Shapes, links: _Links, kernels: Kernels, recompute: bool) -> Phases:
    """Return the time of a layer, of the kind that the model of `shapes` is, for one microbatch."""
    gpu, itemsize, found = links.gpu, shapes.itemsize, Phases()
    forward, repeated, inputs = (found.of[name] for name in (FORWARD, REPEATED, INPUT))
    column, row = _gemms(shapes)
    _add_gemms(found, gpu, (*column, *row), itemsize, kernels.adds)
    forward["attention"], inputs["attention"] = _attention(shapes, gpu, kernels)
    forward["other kernels"], inputs["other kernels"] = _other_kernels(shapes, gpu, kernels)
    if shapes.fp8:
        forward["quantisers"], inputs["quantisers"] = _quantisers(shapes, gpu, kernels)
    sent = traffic.layer(shapes)
    forward.add(_communication(shapes, links, sent.forward, kernels.late))
    backward = _communication(shapes, links, sent.backward, kernels.late)
    if kernels.overlap:  # with the wgrads of column-parallel layers, or with dgrads
        beside = sum(gemm_time(gpu, each.backward_weight(kernels.adds), itemsize) for each in column)
        share = 1.0
        if shapes.sequence_parallel:
            share, beside = 2 / 3, beside + inputs["GEMMs"] / 2
        backward["tp"] -= min(backward["tp"] * share, beside)
    inputs.add(backward)
    if shapes.recompute_kv:
        up = next(each for each in shapes.model.attention.projections if each.name == "kv_up")
        gemm = Gemm(shapes.tokens * shapes.grid.cp, up.outputs // shapes.grid.tp, up.inputs, fp8=shapes.fp8)
        repeated["GEMMs"] += gemm_time(gpu, gemm, itemsize)
        keys = shapes.grid.cp * shapes.tokens * shapes.heads * shapes.model.attention.query_size * itemsize
        repeated["other kernels"] += 2 * keys / _bandwidth(gpu, kernels) + LAUNCH
    if recompute:
        repeated.add(forward)
        repeated.add(_communication(shapes, links, sent.forward - sent.repeated, kernels.late), -1.0)
        if not_repeated(shapes.model):
            repeated["GEMMs"] -= gemm_time(gpu, row[-1], itemsize)
    return found


def layer_segment_costs(shapes: Shapes, gpu: GPU, kernels: Kernels = FASTMP) -> tuple[SegmentCost, ...]:
    """Return the times of a layer's communication and compute segments for one microbatch.

    They add up to the time of the layer. A layer without an exchange is one segment.
    """
    return _segment_costs(shapes, _Links(gpu, shapes), kernels)


def _segment_costs(shapes: Shapes, links: _Links, kernels: Kernels) -> tuple[SegmentCost, ...]:
    gpu, moe, itemsize = links.gpu, shapes.model.moe, shapes.itemsize
    layer = _layer(shapes, links, kernels, recompute=False)
    whole = [layer.total(name) for name in (FORWARD, INPUT, WEIGHT)]
    if moe is None or shapes.grid.ep * shapes.grid.etp == 1:
        return (_segment_cost("layer", whole),)
    sent, rate = traffic.layer(shapes), _bandwidth(gpu, kernels)
    sorted_rows = 4 * shapes.pairs * shapes.grid.etp * shapes.model.hidden_size * itemsize / rate
    travel = [_communication(shapes, links, each, kernels.late) for each in (sent.forward, sent.backward)]
    half = [(sorted_rows + sum(each[group] for group in _EXCHANGES)) / 2 for each in travel]
    first, second = (part[-1] for part in _gemms(shapes))
    ffn = shapes.pairs * moe.expert_ffn_hidden_size * itemsize / rate
    experts = [
        sum(gemm_time(gpu, each, itemsize) for each in gemms)
        for gemms in (
            (first, second),
            (first.backward_input(), second.backward_input()),
            (first.backward_weight(kernels.adds), second.backward_weight(kernels.adds)),
        )
    ]
    passes = 1 + shapes.projections, 1 + 2 * shapes.projections, 0
    experts = [time + number * ffn for time, number in zip(experts, passes, strict=True)]
    rest = [time - own - 2 * sent for time, own, sent in zip(whole, experts, (*half, 0.0), strict=True)]
    return (
        _segment_cost("attention", rest),
        _segment_cost("dispatch", (*half, 0.0), exchange=True, waits=shapes.dispatcher.host_syncs),
        _segment_cost("experts", experts),
        _segment_cost("combine", (*half, 0.0), exchange=True),
    )


def _segment_cost(
    name: str, times: Sequence[float], *, exchange: bool = False, waits: bool = False
) -> SegmentCost:
    forward, inputs, weights = times
    return SegmentCost(name, exchange, waits, forward, inputs, weights)


def _hidden(recipe: Recipe, shapes: Shapes, links: _Links, kernels: Kernels) -> list[list[float]]:
    """Return the seconds that EP communication overlap hides: [stage of a forward][stage of a backward].

    Embeddings, losses and MTP modules overlap nothing.
    """
    of_kinds = {
        kind: _segment_costs(replace(shapes, model=kind), links, kernels) for kind in set(recipe.model.layers)
    }
    layers = [recipe.model.layers[own.start : own.stop] for own in stage_ranges(recipe)]
    parts = {kinds: tuple(part for kind in kinds for part in of_kinds[kind]) for kinds in set(layers)}
    saved = {
        (first, second): hidden_by_overlap(parts[first], parts[second]) for first in parts for second in parts
    }
    return [[saved[first, second] for second in layers] for first in layers]


def hidden_by_overlap(forward: Sequence[SegmentCost], backward: Sequence[SegmentCost]) -> float:
    """Return the seconds that overlapping a forward and a backward of two chunks saves, as in training."""
    if not forward or not backward:
        return 0.0
    chains, known = (
        (forward_ops(first), backward_ops(second, defer=True))
        for first, second in ((forward, backward), (unit_cost(forward), unit_cost(backward)))
    )
    apart = sum(part.time for chain in chains for part in chain)
    return max(0.0, apart - simulate_streams([interleave(*known)], [chains]).makespan)


def _hide(parts: dict[tuple[str, str], float], seconds: float) -> None:
    """Take hidden seconds from those of exchanges, then from those of kernels that sort rows."""
    for groups in (_EXCHANGES, ("other kernels",)):
        own = [(phase, what) for what in groups for phase in (FORWARD, INPUT) if (phase, what) in parts]
        all_of_them = sum(parts[key] for key in own)
        less = min(seconds, all_of_them)
        for key in own:
            parts[key] *= 1.0 - less / all_of_them
        seconds -= less


def _gemms(shapes: Shapes) -> tuple[list[Gemm], list[Gemm]]:
    """Return the GEMMs of a layer's linear layers: (column-parallel, row-parallel)."""
    model, grid, moe = shapes.model, shapes.grid, shapes.model.moe
    h, linear = model.hidden_size, partial(Gemm, fp8=shapes.fp8)
    column, row = list[Gemm](), list[Gemm]()
    for each in model.attention.projections:
        if each.split == "rows":
            row.append(linear(shapes.tokens, each.outputs, each.inputs // grid.tp))
        elif each.split:
            column.append(linear(shapes.tokens, each.outputs // grid.tp, each.inputs))
        else:  # of this rank's hidden states
            column.append(Gemm(shapes.rows, each.outputs, each.inputs))
    width = model.ffn_size if moe is None else moe.shared_expert_ffn_hidden_size
    if width:
        column.append(linear(shapes.tokens, shapes.projections * width // grid.tp, h))
        row.append(linear(shapes.tokens, h, width // grid.tp))
    if moe is not None:
        own, expert = moe.num_experts // grid.ep, moe.expert_ffn_hidden_size // grid.etp
        rows = max(1, shapes.pairs * grid.etp // own)
        column.append(Gemm(shapes.routed, moe.num_experts, h))
        column.append(linear(rows, shapes.projections * expert, h, own))
        row.append(linear(rows, h, expert, own))
    return column, row


def _quantisers(shapes: Shapes, gpu: GPU, kernels: Kernels) -> tuple[float, float]:
    """Return the seconds in which operands of FP8 GEMMs are quantised, (forward, backward).

    Forward quantises inputs; backward quantises gradients, and dequantises inputs for wgrad.
    """
    gemms = [gemm for part in _gemms(shapes) for gemm in part if gemm.fp8]
    inputs = sum(gemm.batch * gemm.rows * gemm.sum for gemm in gemms)
    outputs = sum(gemm.batch * gemm.rows * gemm.columns for gemm in gemms)
    moved = 1 + shapes.itemsize
    rate, launches = _bandwidth(gpu, kernels), len(gemms) * LAUNCH
    return moved * inputs / rate + launches, moved * (inputs + outputs) / rate + 2 * launches


def _attention(shapes: Shapes, gpu: GPU, kernels: Kernels) -> tuple[float, float]:
    """Return the seconds of attention between its projections, (forward, backward)."""
    model, itemsize, length = shapes.model, shapes.itemsize, shapes.length * shapes.grid.cp
    if kernels.scores is None:
        _, flops = layer_flops_per_token(model, length, causal=True)
        flops *= shapes.tokens / shapes.grid.tp
        forward = flops / (ATTENTION * GEMMS * gpu.peak(itemsize))
        return LAUNCH + forward, 2 * LAUNCH + _FLASH_BACKWARD * forward
    batch = shapes.heads * shapes.tokens // shapes.length
    gemms = (
        Gemm(shapes.length, length, model.attention.query_size, batch),
        Gemm(shapes.length, model.attention.value_size, length, batch),
    )
    element = batch * shapes.length * length * itemsize / _bandwidth(gpu, kernels)
    backward = [each for of in gemms for each in (of.backward_input(), of.backward_weight())]
    of_scores, of_gradients = kernels.scores
    return (
        sum(gemm_time(gpu, each, itemsize) for each in gemms) + of_scores * element,
        sum(gemm_time(gpu, each, itemsize) for each in backward) + of_gradients * element,
    )


def _other_kernels(shapes: Shapes, gpu: GPU, kernels: Kernels) -> tuple[float, float]:
    """Return the seconds of memory-bound kernels, (forward, backward)."""
    model, moe, projections = shapes.model, shapes.model.moe, shapes.projections
    spec = model.attention
    widths = (shapes.heads + shapes.kv_heads) * spec.query_size + shapes.kv_heads * spec.value_size
    projected = shapes.tokens * widths * shapes.itemsize
    width = model.ffn_size if moe is None else moe.shared_expert_ffn_hidden_size
    ffn = shapes.tokens * width // shapes.grid.tp * shapes.itemsize
    rows = 0
    if moe is not None:  # rows are sorted and brought back
        ffn += shapes.pairs * moe.expert_ffn_hidden_size * shapes.itemsize
        rows = shapes.pairs * shapes.grid.etp * model.hidden_size * shapes.itemsize
    rate = _bandwidth(gpu, kernels)
    return tuple(  # type: ignore[return-value]
        (
            kernels.hidden[i] * shapes.hidden
            + kernels.projected[i] * projected
            + (kernels.ffn[i] + (2 * projections if i else projections) + 1) * ffn
            + 4 * rows
        )
        / rate
        + (kernels.launches[i] + (0 if moe is None else 8)) * LAUNCH
        for i in (0, 1)
    )


def _embedding(shapes: Shapes, links: _Links, kernels: Kernels) -> Phases:
    found, sent = Phases(), traffic.embedding(shapes)
    rows = 4 * shapes.hidden / _bandwidth(links.gpu, kernels) + 2 * LAUNCH  # a lookup, dropout
    found.of[FORWARD]["other kernels"] += rows
    found.of[WEIGHT]["other kernels"] += rows
    found.of[FORWARD].add(_communication(shapes, links, sent.forward))
    found.of[INPUT].add(_communication(shapes, links, sent.backward))
    return found


def _loss(shapes: Shapes, links: _Links, kernels: Kernels) -> Phases:
    """Return the time of the output layer and the loss."""
    found, gpu, itemsize, h = Phases(), links.gpu, shapes.itemsize, shapes.model.hidden_size
    gemms = [Gemm(shapes.predicted, shapes.vocab, h)]
    if shapes.model.bert is not None:  # on every tensor-parallel rank
        gemms.append(Gemm(shapes.predicted, h, h))
    _add_gemms(found, gpu, gemms, itemsize, kernels.adds)
    nbytes = shapes.predicted * shapes.vocab * kernels.logits
    found.of[FORWARD]["other kernels"] = nbytes / _bandwidth(gpu, kernels) + 8 * LAUNCH
    found.of[INPUT].add(_communication(shapes, links, traffic.loss(shapes).forward))
    return found


def _mtp(shapes: Shapes, links: _Links, kernels: Kernels) -> Phases:
    """Return the time of an MTP module without its layer: embedding, norms, projection and loss."""
    found, h, gpu = Phases(), shapes.model.hidden_size, links.gpu
    _add_gemms(found, gpu, [Gemm(shapes.rows, h, 2 * h)], shapes.itemsize, kernels.adds)
    for name, passes in ((FORWARD, 12), (INPUT, 18)):  # over hidden states: four norms, two inputs joined
        moved = passes * shapes.hidden / _bandwidth(gpu, kernels)
        found.of[name]["other kernels"] += moved + passes / 2 * LAUNCH
    found.add(_embedding(shapes, links, kernels))
    found.add(_loss(shapes, links, kernels))
    return found


def _communication(shapes: Shapes, links: _Links, sent: Mapping[str, int], late: float = 0.0) -> Seconds:
    """Return the seconds of the collectives in which a rank sends the bytes `sent` of a layer, by group."""
    found = Seconds()
    whole = shapes.tokens * shapes.model.hidden_size * shapes.itemsize
    for group, nbytes in sent.items():
        joined = links[group]
        if joined.ranks == 1 or not nbytes:
            continue
        ring = whole * (joined.ranks - 1) / joined.ranks
        if group == "tp" and not shapes.sequence_parallel:
            found[group] += nbytes / (2 * ring) * (joined.all_reduce(whole) + late * joined.last)
        elif group == "tp":
            found[group] += joined.passes(nbytes, nbytes / ring) + nbytes / ring * late * joined.last
        else:
            found[group] += joined.passes(nbytes, 1 if group == "cp" else 2)
    return found


def _end_of_step(
    recipe: Recipe, shapes: Shapes, links: _Links, kernels: Kernels, rank: int, chunks: Sequence[Phases]
) -> Seconds:
    """Return the exposed seconds of the work that a pipeline rank does once a step."""
    optimizer, gpu = recipe.optimizer, links.gpu
    facts, grad = rank_parameters(recipe, shapes, rank).values(), grad_bytes(recipe, shapes)
    sums = gathers = pieces = 0.0
    found = Seconds()
    for buffer in rank_buffers(recipe, shapes, rank):
        joined, size = links["edp" if buffer.experts else "dp-cp"], buffer.layout.size
        buckets = max(1.0, size / optimizer.bucket_size)
        pieces += buckets
        if optimizer.shard:
            sent = size * (joined.ranks - 1) / joined.ranks
            sums += joined.passes(sent * grad, buckets)
            gathers += joined.passes(sent * (1 if buffer.gathers_fp8 else shapes.itemsize), buckets)
            if buffer.gathers_fp8:  # the magnitudes of tiles, for which the step waits
                found["parameters"] += joined.all_reduce(4 * buffer.num_tiles)
        else:
            sums += buckets * joined.all_reduce(size * grad / buckets)
        moved = 2 * state_bytes(recipe, shapes, buffer.whole) + 2 * grad + shapes.itemsize + kernels.state
        found["optimizer"] += moved * size / buffer.layout.num_ranks / _bandwidth(gpu, kernels)
    if shapes.fp8:
        found["quantisers"] += _moved_by_copies(recipe, shapes, rank) / _bandwidth(gpu, kernels)
    found["optimizer"] += (4 + kernels.tensor_launches * len(facts)) * LAUNCH
    beside = {"gradients": (sums, (REPEATED, INPUT, WEIGHT)), "parameters": (gathers, (FORWARD,))}
    for what, (took, phases) in beside.items():
        hidden = sum(each.total(*phases) for each in chunks) if optimizer.overlap else 0.0
        found[what] += max(took - hidden, took / max(pieces, 1.0))
    for each in facts:
        if each.own_bucket:
            found["tied embedding"] += links["embedding"].all_reduce(each.size * grad)
    return found


def _moved_by_copies(recipe: Recipe, shapes: Shapes, rank: int) -> float:
    """Return the bytes that the making of FP8 copies of weights reads and writes in a step."""
    each, moved = shapes.itemsize, 0.0
    for buffer, sizes in fp8_buffers(recipe, shapes, rank):
        size = sum(sizes)
        if buffer.gathers_fp8:
            # Of the shard: magnitudes, two products in float32, the cast, its mask, a copy.
            moved += size / buffer.layout.num_ranks * (each + (each + 4) + 8 + 5 + 2 + 2)
            # Of all: the transposed bytes, dequantised numbers, which are copied.
            moved += size * (2 + (1 + each) + 2 * each)
        else:
            moved += size * (2 + each)
    return moved


def _bandwidth(gpu: GPU, kernels: Kernels) -> float:
    return kernels.memory * gpu.memory_bandwidth
