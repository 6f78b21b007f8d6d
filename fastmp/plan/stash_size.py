"""Activation stash: the rows of the ring buffer in which a rank keeps the activations of its experts.

A rank pushes the rows that one layer of one microbatch received, an entry of the ring, in the forward pass,
and releases it in the backward pass. The host never learns how many rows an entry has. The ring is therefore
sized by probability: the smallest one that a step overflows with at most `moe.stash_overflow`.

The rows of an entry are (tokens routed to the rank) = balanced rows x load, where the load of the busiest
rank over the mean is stated (`moe.activation_stash`) or measured in a run. Around it they spread as
independent choices do, with a binomial distribution. Standard library only.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

from fastmp.config import Recipe
from fastmp.config.dispatchers import STASH_STATE, DispatchSizes
from fastmp.config.specs import SCHEDULES
from fastmp.plan.layout import make_schedule
from fastmp.plan.parameters import expert_chunks, stage_ranges
from fastmp.plan.pipeline_time import shorter
from fastmp.plan.rank_load import Load, MeasuredLoad
from fastmp.plan.segments import stage_segment_costs
from fastmp.plan.shapes import Shapes
from fastmp.schedule.schedule import BACKWARD_INPUT, FORWARD, Schedule, Step
from fastmp.schedule.stream_schedule import SegmentCost, compute_ops, graph_orders

__all__ = [
    "LiveEntries",
    "Load",
    "MeasuredLoad",
    "Ring",
    "live_entries",
    "make_ring",
    "ring_of_rank",
    "ring_rows",
    "row_width",
]

_INT64 = 8  # bytes


class LiveEntries(NamedTuple):
    """The entries of a ring in one step of a rank.

    most: the most from the oldest live entry to the newest; holes between them count.
    peaks: how often the number of entries stops to grow.
    wraps: True if the oldest entry is released before newer ones, so that the ring is used round and round.
    """

    most: int = 0
    peaks: int = 0
    wraps: bool = False


def live_entries(order: Iterable[Step], layers: Sequence[int]) -> LiveEntries:
    """Return the entries in the ring of a rank that runs the steps of `order`.

    Entries are released at the top of the ring at once, elsewhere when all older ones have been.

    Args:
        layers: the layers with experts of each chunk. Their entries are pushed in a forward, the first layer
            first, and released in the backward, the last layer first: in that of weights, if it is split.

    Example:
        >>> from fastmp.schedule.schedule import Schedule
        >>> live_entries(Schedule(pp=2, num_microbatches=4).order(0), layers=[3])
        LiveEntries(most=6, peaks=3, wraps=True)
    """
    ring: deque[list[int]] = deque()  # [entries of a chunk, 1 if they are live], oldest first
    live: dict[tuple[int, int], list[int]] = {}
    held, most, peaks, grows, wraps = 0, 0, 0, False, False
    for kind, microbatch, chunk in order:
        if not layers[chunk]:
            continue
        if kind == FORWARD:
            live[microbatch, chunk] = [layers[chunk], 1]
            ring.append(live[microbatch, chunk])
            held, grows = held + layers[chunk], True
            most = max(most, held)
        elif kind != BACKWARD_INPUT:
            peaks, grows = peaks + grows, False
            live.pop((microbatch, chunk))[1] = 0
            while ring and not ring[-1][1]:
                held -= ring.pop()[0]
            while ring and not ring[0][1]:
                held, wraps = held - ring.popleft()[0], True
    return LiveEntries(most, peaks, wraps)


def ring_rows(
    live: LiveEntries, load: Load, *, balanced: int, capacity: int, ep: int, ranks: int, overflow: float
) -> int:
    """Return the rows of the smallest ring that a step overflows with a probability of at most `overflow`.

    Args:
        balanced: rows of an entry, if all ranks get equally many.
        capacity: the most rows of an entry.
        ep: expert-parallel ranks, among which tokens choose.
        ranks: ranks that have such a ring. Any of them overflows; all count as the busiest.

    Example:
        >>> live = LiveEntries(most=48, peaks=64)
        >>> sizes = {"balanced": 8192, "capacity": 65536, "ep": 8, "ranks": 64, "overflow": 1e-4}
        >>> ring_rows(live, Load(1.2), **sizes) / 8192 / 48
        1.20...
    """
    if not live.most:
        return 0
    # 1. Entries do not cross the end of the ring: fewer rows than the next entry has are skipped there. That
    #    entry counts twice, so its standard deviation does.
    entries, variances = live.most + live.wraps, live.most + 3 * live.wraps
    # 2. The tokens of ep ranks choose this one with probability `share`: mean and variance of all entries.
    share = min(load.mean / ep, 1.0)
    mean = balanced * ep * share
    each = max(mean * (1.0 - share), balanced**2 * load.variance)
    variance = each * variances + (entries * balanced * load.spread) ** 2
    # 3. The quantile for each time that any ring is fullest (union bound), of the normal distribution; the
    #    third term corrects it for the skewness of a binomial one (Cornish and Fisher 1938).
    chance = max(min(overflow / (ranks * live.peaks), 0.5), sys.float_info.min)
    z = -statistics.NormalDist().inv_cdf(chance)
    rows = entries * mean + z * math.sqrt(variance) + max(1.0 - 2.0 * share, 0.0) * (z * z - 1.0) / 6.0
    return min(math.ceil(rows), entries * capacity)


@dataclass(frozen=True)
class Ring:
    """The ring of a rank: `rows` of `width` numbers of `itemsize` bytes, for `entries` of a load."""

    entries: int
    rows: int
    width: int
    itemsize: int
    load: Load

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and of the state on the device."""
        return self.rows * self.width * self.itemsize + STASH_STATE * _INT64

    @property
    def nbytes_of_entry(self) -> int:
        """Bytes of a layer and microbatch: its share of the ring, rounded up."""
        return -(-self.nbytes // max(self.entries, 1))


def row_width(hidden_size: int, ffn_size: int, projections: int, deferred: bool) -> int:
    """Return the numbers of a row: what came in, the projections, their activation.

    deferred: weight gradients are computed later, and the gradient of the output is kept until then.
    """
    return hidden_size + (projections + 1) * ffn_size + hidden_size * deferred


def make_ring(
    live: LiveEntries,
    load: Load,
    sizes: DispatchSizes,
    *,
    capacity: int,
    width: int,
    ranks: int,
    overflow: float,
) -> Ring:
    """Return the ring for layers whose dispatch has the sizes `sizes`; see `ring_rows` and `row_width`."""
    balanced = sizes.choices * sizes.etp
    rows = ring_rows(
        live, load, balanced=balanced, capacity=capacity, ep=sizes.ep, ranks=ranks, overflow=overflow
    )
    return Ring(live.most, rows, width, sizes.itemsize, load)


def ring_of_rank(
    recipe: Recipe, shapes: Shapes, rank: int, measured: MeasuredLoad | None = None
) -> Ring | None:
    """Return the ring of a rank of pipeline rank `rank`, without recomputation; None without a stash.

    measured: the load; None: `moe.activation_stash`.
    """
    if recipe.model.moe is None or not shapes.stashes:
        return None
    live = _live_of_rank(recipe, shapes, rank)
    if not live.most:
        return None
    load = Load(recipe.model.moe.activation_stash) if measured is None else measured.of_rank(recipe, rank)
    return _ring(recipe, shapes, live, load)


def _live_of_rank(recipe: Recipe, shapes: Shapes, rank: int) -> LiveEntries:
    """Return the entries of a rank; those of a long step follow from a shorter one, whose ring is as full."""
    schedule = make_schedule(recipe.parallel, shapes.num_microbatches)
    layers = tuple(map(len, expert_chunks(recipe, rank)))
    parts = None
    if recipe.parallel.overlap_experts:
        stages = schedule.stages.of_rank(stage_ranges(recipe), rank)
        parts = tuple(tuple(part for _, part in stage_segment_costs(shapes, stage)) for stage in stages)
    short = shorter(schedule)
    live = _live(short, rank, layers, parts)
    if short is schedule:
        return live
    group = schedule.group_size or schedule.pp
    before = _live(replace(short, num_microbatches=short.num_microbatches - group), rank, layers, parts)
    times = (schedule.num_microbatches - short.num_microbatches) // group
    return live._replace(peaks=live.peaks + times * (live.peaks - before.peaks))


@lru_cache(maxsize=256)
def _live(
    schedule: Schedule, rank: int, layers: tuple[int, ...], parts: tuple[tuple[SegmentCost, ...], ...] | None
) -> LiveEntries:
    """Return the entries of a rank with so many layers with experts in each chunk.

    parts: the segments of each chunk where two microbatches overlap, whose entries come and go layer by
    layer; None: they do not.
    """
    if parts is None:
        return live_entries(schedule.order(rank), layers)
    return live_entries(*overlapped_entries(schedule.together(rank), parts, sum(layers)))


def overlapped_entries(
    steps: Iterable[Sequence[Step]], parts: Sequence[Sequence[SegmentCost]], layers: int
) -> tuple[list[Step], list[int]]:
    """Return the arguments of `live_entries` for a rank that overlaps two microbatches.

    MTP modules overlap nothing: they are one more op, after the forward of the last chunk and before its
    backward.

    Args:
        steps: concurrent steps, in order.
        parts: the segments of each chunk.
        layers: with experts of this rank, those of MTP modules included.
    """
    counts, order, steps = experts_of_ops(parts), list[Step](), list(steps)
    for group, ops in zip(steps, graph_orders(steps, parts), strict=True):
        after = [Step(*step[:2], len(counts)) for step in group if step.chunk == len(parts) - 1]
        order += [step for step in after if step.kind != FORWARD]
        order += ops
        order += [step for step in after if step.kind == FORWARD]
    return order, [*counts, layers - sum(counts)]


def experts_of_ops(parts: Sequence[Sequence[SegmentCost]]) -> list[int]:
    """Return 1 for each op of `graph_order` that is a layer's experts, else 0; see `compute_ops`."""
    return [int(parts[chunk][op].name.endswith(".experts")) for chunk, op in compute_ops(parts)]


def _ring(recipe: Recipe, shapes: Shapes, live: LiveEntries, load: Load) -> Ring:
    layout, moe = recipe.parallel, recipe.model.moe
    assert moe is not None
    width = row_width(
        recipe.model.hidden_size,
        moe.expert_ffn_hidden_size // shapes.grid.etp,
        shapes.projections,
        deferred=SCHEDULES[layout.schedule].splits or layout.overlap_experts,
    )
    return make_ring(
        live,
        load,
        shapes.dispatch_sizes,
        capacity=shapes.rows_at_experts,
        width=width,
        ranks=shapes.grid.world_size,
        overflow=moe.stash_overflow,
    )


def stash_facts(
    recipe: Recipe, shapes: Shapes, measured: MeasuredLoad | None = None
) -> dict[str, Any] | None:
    """Return the rings of all pipeline ranks, sizes in bytes; None without any.

    "entry_bytes" is the largest share of a layer and microbatch. "used" is False with recomputation: a layer
    that is run again keeps nothing for long.
    "activation_stash" is the value of the option that gives the largest ring, rounded up to a hundredth.
    """
    ranks = range(recipe.parallel.pp)
    rings = [ring_of_rank(recipe, shapes, rank, measured) for rank in ranks]
    found = {rank: ring for rank, ring in enumerate(rings) if ring is not None}
    if not found:
        return None
    assert recipe.model.moe is not None
    largest, stated = max(found, key=lambda rank: found[rank].nbytes), recipe.model.moe.activation_stash
    if measured is not None:
        live = _live_of_rank(recipe, shapes, largest)
        loads = (hundredth / 100 for hundredth in count(100))
        rows = found[largest].rows
        stated = next(load for load in loads if _ring(recipe, shapes, live, Load(load)).rows >= rows)
    return {
        "used": not recipe.parallel.recompute,
        "overflow": recipe.model.moe.stash_overflow,
        "file": None if measured is None else measured.file,
        "activation_stash": stated,
        "entry_bytes": max(ring.nbytes_of_entry for ring in found.values()),
        "largest": largest,
        "ranks": [
            None
            if ring is None
            else {
                "entries": ring.entries,
                "rows": ring.rows,
                "row_bytes": ring.width * ring.itemsize,
                "bytes": ring.nbytes,
                "load": ring.load.mean,
                "spread": ring.load.spread,
            }
            for ring in rings
        ],
    }


def describe_stash(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that a person reads."""
    ring = facts["ranks"][facts["largest"]]
    of = "layer and microbatch" if ring["entries"] == 1 else "layers and microbatches"
    size = f"{ring['bytes'] / 2**20:,.1f} MiB of a rank" + ", if not recomputed" * (not facts["used"])
    yield f"stash     {size}: a ring of {ring['rows']:,} rows of {ring['entries']} {of}"
    load = f"{ring['load']:.4g} is assumed"
    if facts["file"] is not None:
        load = (
            f"{ring['load']:.3f} +- {ring['spread']:.3f} in {facts['file']}, as with "
            f"model.moe.activation_stash {facts['activation_stash']:.2f}"
        )
    rate = f"{facts['overflow']:.3g}"
    yield f"          overflows in {rate} of steps; load of the busiest rank (max/mean): {load}"
