"""Estimate the time of a training step of a recipe on named GPUs, by phase and by consumer.

GEMMs and memory-bound kernels come from `fastmp.plan.kernels`, bytes sent from `fastmp.plan.traffic` over
the links of `fastmp.plan.hardware`, the pipeline's idle time from the simulator. Assumptions:

- All experts get equally many tokens, unless a load is given: then all ranks wait for the busiest one, whose
  experts and exchanges take as many times longer. An all-gather of tokens takes as long as before.
- The host launches eager kernels one after the other (`Kernels.host`); a layer takes as long as the slower of
  host and device. CUDA graphs leave one launch for each captured span.
- Collectives within layers stop the compute. Exceptions are those of a backward that overlap a GEMM
  (`Kernels.overlap`), and with EP communication overlap the all-to-alls, in the order of training.
- Compute beside a collective is slower by the share of multiprocessors that the collective holds. Their
  common use of the memory's bandwidth is not counted.
- Reduce-scatters of gradients overlap the last backward and all-gathers of parameters the next forward,
  except for one bucket each.
- Muon's GEMMs, the savings of `tp_overlap`, checkpoints, data and logging are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fastmp.config import GraphConfig, Recipe
from fastmp.config.sizes import flops_per_token
from fastmp.plan import traffic
from fastmp.plan.hardware import GPU
from fastmp.plan.kernels import FASTMP, LAUNCH, Kernels, gemm_time
from fastmp.plan.layer_time import (
    FORWARD,
    INPUT,
    REPEATED,
    WEIGHT,
    Links,
    Phases,
    Seconds,
    bandwidth,
    beside_compute,
    communication,
    embedding_time,
    host_work,
    layer_gemms,
    layer_time,
    loss_time,
    mtp_time,
)
from fastmp.plan.layout import make_schedule
from fastmp.plan.memory import grad_bytes, state_bytes
from fastmp.plan.parameters import fp8_buffers, rank_buffers, rank_parameters, stage_kinds, stage_ranges
from fastmp.plan.pipeline_time import pipeline_time
from fastmp.plan.shapes import Shapes, shapes_of
from fastmp.schedule.schedule import Schedule
from fastmp.schedule.simulate import Costs
from fastmp.schedule.stream_schedule import (
    SegmentCost,
    backward_ops,
    forward_ops,
    interleave,
    simulate_streams,
    unit_cost,
)

ONCE, IDLE, IMBALANCE = "once a step", "pipeline idle", "expert imbalance"
_EXCHANGES = ("ep", "etp", "etp-ep")  # groups over which rows of experts travel


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step.

    parts: {(phase, what): seconds} of the pipeline rank that works longest; they add up to `seconds`.
    pipeline: seconds until the last backward ends. bubble: of all pipeline ranks, over their work. mfu: model
    FLOPs, with the keys that a token sees, over the peak.
    """

    seconds: float
    pipeline: float
    parts: dict[tuple[str, str], float]
    bubble: float
    tokens_per_second: float
    mfu: float


@dataclass(frozen=True)
class StepModel:
    """The parts of an estimated step.

    stages: the seconds of a microbatch in each stage. ends: the exposed seconds of the work that each
    pipeline rank does once a step.
    """

    shapes: Shapes
    schedule: Schedule
    stages: Sequence[Phases]
    costs: Costs
    ends: Sequence[Seconds]

    def slowest(self, busy: Sequence[float]) -> int:
        """Return the pipeline rank that works longest, if `busy` are the seconds of its pipeline steps."""
        return max(range(len(self.ends)), key=lambda rank: busy[rank] + self.ends[rank].total())

    def seconds(self, makespan: float) -> float:
        """Return the seconds of a step whose pipeline ends after `makespan`."""
        return makespan + max(each.total() for each in self.ends)


def step_model(
    recipe: Recipe, world_size: int, gpu: GPU, kernels: Kernels = FASTMP, load: float = 1.0
) -> StepModel:
    """Return the parts of a step of `recipe`; arguments and errors as of `step_time`."""
    shapes = shapes_of(recipe, world_size)
    if shapes.fp8 and not gpu.eight:
        raise ValueError(f"{gpu.name} has no FP8: expected --train.precision dtype, or a GPU from H100 on")
    made = Links(gpu, shapes)
    stages = _stages(recipe, shapes, made, kernels, load)
    schedule = make_schedule(recipe.parallel, shapes.num_microbatches)
    costs = Costs(
        tuple(each.total(FORWARD) for each in stages),
        tuple(each.total(REPEATED, INPUT) for each in stages),
        tuple(each.total(WEIGHT) for each in stages),
        made.between_stages.message(shapes.hidden) if shapes.grid.pp > 1 else 0.0,
        _hidden(recipe, shapes, made, kernels) if recipe.parallel.overlap_experts else 0.0,
    )
    places = schedule.stages
    ends = [
        _end_of_step(recipe, shapes, made, kernels, rank, places.of_rank(stages, rank))
        for rank in range(shapes.grid.pp)
    ]
    return StepModel(shapes, schedule, stages, costs, ends)


def step_time(
    recipe: Recipe, world_size: int, gpu: GPU, kernels: Kernels = FASTMP, load: float = 1.0
) -> StepTime:
    """Return the time of a step of `recipe`, which must fit `world_size` ranks, one on each GPU.

    load: rows of the busiest expert-parallel rank in a layer over those of a mean one.

    Raises:
        ValueError: the recipe multiplies in FP8, and the GPU does not.
    """
    model = step_model(recipe, world_size, gpu, kernels, load)
    shapes, schedule, stages = model.shapes, model.schedule, model.stages
    costs, ends, places = model.costs, model.ends, schedule.stages
    run = pipeline_time(schedule, costs)
    slowest, seconds = model.slowest(run.busy), model.seconds(run.makespan)
    parts: dict[tuple[str, str], float] = {}
    for stage in places.of_rank(stages, slowest):
        for phase, own in stage.of.items():
            for what, took in own.items():
                parts[phase, what] = parts.get((phase, what), 0.0) + took * shapes.num_microbatches
    if recipe.parallel.overlap_experts:
        pairs = (steps for steps in schedule.together(slowest) if len(steps) > 1)
        chunks = Counter(tuple(step.chunk for step in steps) for steps in pairs)
        hide(
            parts,
            sum(
                number * costs.saved(*(places.stage(slowest, chunk) for chunk in pair))
                for pair, number in chunks.items()
            ),
        )
    parts[ONCE, IDLE] = seconds - run.busy[slowest] - ends[slowest].total()
    parts.update({(ONCE, what): took for what, took in ends[slowest].items()})
    tokens = recipe.train.global_batch_size * recipe.data.seq_len
    flops = tokens * flops_per_token(
        recipe.model, recipe.data.seq_len, causal=True, predicted=recipe.data.predicted
    )
    return StepTime(
        seconds=seconds,
        pipeline=run.makespan,
        parts={key: took for key, took in parts.items() if took > 1e-9 * seconds},
        bubble=run.bubble,
        tokens_per_second=tokens / seconds,
        mfu=flops / (seconds * world_size * gpu.peak(shapes.itemsize)),
    )


def _stages(recipe: Recipe, shapes: Shapes, links: Links, kernels: Kernels, load: float) -> list[Phases]:
    """Return the time of a microbatch in each of the pipeline's stages."""
    of_kinds = {
        kind: layer_time(
            replace(shapes, model=kind),
            links,
            kernels,
            recipe.parallel.recompute,
            host_work(shapes, kind, recipe.graphs),
        )
        for kind in set(recipe.model.layers)
    }
    if load > 1.0:
        for kind, own in of_kinds.items():
            of_layer = replace(shapes, model=kind)
            even = _EXCHANGES if kind.moe is not None and of_layer.dispatcher.gathers_tokens else ()
            parts = _segment_costs(of_layer, links, kernels, recipe.graphs)
            for phase, times in zip((FORWARD, INPUT, WEIGHT), zip(*(part[3:] for part in parts[1:]))):
                longer = sum(times) - sum(own.of[phase][group] for group in even)
                own.of[phase][IMBALANCE] += (load - 1.0) * longer
            if recipe.parallel.recompute:
                own.of[REPEATED][IMBALANCE] += own.of[FORWARD][IMBALANCE]
    found = []
    for kinds in stage_kinds(recipe):
        found.append(Phases())
        for kind in kinds:
            found[-1].add(of_kinds[kind])
    found[0].add(embedding_time(shapes, links, kernels))
    found[-1].add(loss_time(shapes, links, kernels))
    for _ in range(recipe.model.mtp_depth):
        found[-1].add(mtp_time(shapes, links, kernels))
    return found


def layer_segment_costs(shapes: Shapes, gpu: GPU) -> tuple[SegmentCost, ...]:
    """Return the times of an eager layer's communication and compute segments for one microbatch.

    They add up to the time of the layer. A layer without an exchange is one segment.
    """
    return _segment_costs(shapes, Links(gpu, shapes), FASTMP, GraphConfig())


def _segment_costs(
    shapes: Shapes, links: Links, kernels: Kernels, graphs: GraphConfig
) -> tuple[SegmentCost, ...]:
    gpu, moe, itemsize = links.gpu, shapes.model.moe, shapes.itemsize
    layer = layer_time(shapes, links, kernels, recompute=False, host=host_work(shapes, shapes.model, graphs))
    whole = [layer.total(name) for name in (FORWARD, INPUT, WEIGHT)]
    if moe is None or shapes.grid.ep * shapes.grid.etp == 1:
        return (_segment_cost("layer", whole),)
    sent, rate = traffic.layer(shapes), bandwidth(gpu, kernels)
    sorted_rows = 4 * shapes.pairs * shapes.grid.etp * shapes.model.hidden_size * itemsize / rate
    travel = [communication(shapes, links, each, kernels.late) for each in (sent.forward, sent.backward)]
    half = [(sorted_rows + sum(each[group] for group in _EXCHANGES)) / 2 for each in travel]
    first, second = (part[-1] for part in layer_gemms(shapes))
    ffn = shapes.pairs * moe.expert_ffn_hidden_size * itemsize / rate
    experts = [
        sum(gemm_time(gpu, each, itemsize) for each in gemms)
        for gemms in (
            (first, second),
            (first.backward_input(), second.backward_input()),
            (kernels.wgrad(first), kernels.wgrad(second)),
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


def _hidden(recipe: Recipe, shapes: Shapes, links: Links, kernels: Kernels) -> tuple[tuple[float, ...], ...]:
    """Return the seconds that EP communication overlap hides: [stage of a forward][stage of a backward].

    Embeddings, losses and MTP modules overlap nothing.
    """
    of_kinds = {
        kind: _segment_costs(replace(shapes, model=kind), links, kernels, recipe.graphs)
        for kind in set(recipe.model.layers)
    }
    layers = [recipe.model.layers[own.start : own.stop] for own in stage_ranges(recipe)]
    alike = {kinds: number for number, kinds in enumerate(dict.fromkeys(layers))}  # stages of the same layers
    parts = [tuple(part for kind in kinds for part in of_kinds[kind]) for kinds in alike]
    share = beside_compute(links.gpu, shapes.dispatcher.multiprocessors)
    saved = [[hidden_by_overlap(first, second) * share for second in parts] for first in parts]
    numbers = [alike[kinds] for kinds in layers]
    return tuple(tuple(saved[first][second] for second in numbers) for first in numbers)


@lru_cache(maxsize=4096)
def hidden_by_overlap(forward: Sequence[SegmentCost], backward: Sequence[SegmentCost]) -> float:
    """Return the seconds saved by overlapping the forward and the backward of two chunks."""
    if not forward or not backward:
        return 0.0
    chains, known = (
        (forward_ops(first), backward_ops(second, defer=True))
        for first, second in ((forward, backward), (unit_cost(forward), unit_cost(backward)))
    )
    apart = sum(part.time for chain in chains for part in chain)
    return max(0.0, apart - simulate_streams([interleave(*known)], [chains]).makespan)


def hide(parts: dict[tuple[str, str], float], seconds: float) -> None:
    """Subtract the seconds that overlap hides, first from exchanges, then from the sorting of rows."""
    for groups in (_EXCHANGES, ("other kernels",)):
        own = [(phase, what) for what in groups for phase in (FORWARD, INPUT) if (phase, what) in parts]
        all_of_them = sum(parts[key] for key in own)
        less = min(seconds, all_of_them)
        for key in own:
            parts[key] *= 1.0 - less / all_of_them
        seconds -= less


def _end_of_step(
    recipe: Recipe, shapes: Shapes, links: Links, kernels: Kernels, rank: int, chunks: Sequence[Phases]
) -> Seconds:
    """Return the exposed seconds of a pipeline rank's work at the end of a step."""
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
        found["optimizer"] += moved * size / buffer.layout.num_ranks / bandwidth(gpu, kernels)
    if shapes.fp8:
        found["quantisers"] += _moved_by_copies(recipe, shapes, rank) / bandwidth(gpu, kernels)
    found["optimizer"] += (4 + kernels.tensor_launches * len(facts)) * LAUNCH
    beside = {"gradients": (sums, (REPEATED, INPUT, WEIGHT)), "parameters": (gathers, (FORWARD,))}
    for what, (took, phases) in beside.items():
        hidden = sum(each.total(*phases) for each in chunks) if optimizer.overlap else 0.0
        exposed = max(took - hidden, took / max(pieces, 1.0))
        found[what] += took - (took - exposed) * beside_compute(gpu, kernels.collective)
    for each in facts:
        if each.own_bucket:
            found["tied embedding"] += links["embedding"].all_reduce(each.size * grad)
    return found


def _moved_by_copies(recipe: Recipe, shapes: Shapes, rank: int) -> float:
    """Return the bytes read and written to make the FP8 copies of weights in a step."""
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
