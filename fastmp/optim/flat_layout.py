"""Layout of flat buffers: parameters in buckets, and the shard of each bucket that a rank owns.

A layout depends on names and sizes alone. A buffer has parameters of one dtype whose replicas lie on the same
ranks; weights that only FP8 GEMMs read have buffers of their own. They come in reverse order of the model, so
that backward fills the buffer from its start, and each starts at a multiple of 64 elements. A bucket is
communicated at once. Its size is a multiple of 128 and of the number of ranks, each of which owns an equal
shard. Elements between parameters, and between the last one and the end of its bucket, are padding.

Where an update needs whole matrices, each parameter has an owner rank and lies in that rank's shard of its
bucket; all shards are as long as the longest.

Ranges are (first, one past the last), in elements.
Rajbhandari et al., "ZeRO", 2020 (arXiv 1910.02054), stage 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm

from fastmp.config.training import BUCKET_SIZE, BUCKET_UNIT

__all__ = [
    "Bucket", "BucketLayout", "Buffer", "ParamSpec", "Piece", "bucket_layout",
    "fill_order", "owner_ranks", "matrix_cost", "plan_buffers", "shard_ranges", "whole_layout",
]  # fmt: skip

Range = tuple[int, int]
ALIGNMENT = 64  # of parameters: 16 bytes in any dtype, 128 in 16 bits


@dataclass(frozen=True)
class Piece:
    """The elements of one parameter that one rank owns.

    Attributes:
        parameter: the index of the parameter in the order of the buffer.
        global_range: the piece in the buffer.
        shard_range: the piece among all elements that the rank owns, its shards one after another.
        param_range: the piece in the flattened parameter.
    """

    parameter: int
    global_range: Range
    shard_range: Range
    param_range: Range


@dataclass(frozen=True)
class Bucket:
    """A range of the buffer that one collective communicates, and the parameters in it."""

    start: int
    end: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class BucketLayout:
    """The places of the parameters of one buffer, in buckets sharded over `num_ranks` ranks.

    Attributes:
        num_ranks: the ranks that share the buffer.
        buckets: in the order of the buffer.
        ranges: {name: range in the buffer}, in the same order.

    Raises:
        ValueError: a parameter or bucket that does not fit; the message names it.
    """

    num_ranks: int
    buckets: tuple[Bucket, ...]
    ranges: Mapping[str, Range]

    def __post_init__(self) -> None:
        end = 0
        for number, bucket in enumerate(self.buckets):
            if bucket.start != end or (bucket.end - bucket.start) % self.num_ranks:
                raise ValueError(
                    f"BucketLayout: bucket {number} lies at {bucket.start} to {bucket.end}; it must begin at "
                    f"{end}, where the one before ends, and {self.num_ranks} ranks must divide it"
                )
            for name in bucket.names:
                first, last = self.ranges[name]
                if not end <= first <= last <= bucket.end:
                    raise ValueError(
                        f"BucketLayout: parameter {name!r} lies at {first} to {last}, behind another or "
                        f"outside of its bucket, {bucket.start} to {bucket.end}"
                    )
                end = last
            end = bucket.end

    @cached_property
    def size(self) -> int:
        """Return the elements of the buffer, padding included; a rank owns size // num_ranks of them."""
        return self.buckets[-1].end if self.buckets else 0

    def shards(self, rank: int) -> list[Range]:
        """Return the range of a rank's shard of each bucket."""
        found = []
        for bucket in self.buckets:
            each = (bucket.end - bucket.start) // self.num_ranks
            found.append((bucket.start + rank * each, bucket.start + (rank + 1) * each))
        return found

    def pieces(self, rank: int) -> dict[str, Piece]:
        """Return the piece of each parameter that a rank owns, in the order of the buffer.

        A parameter lies in one bucket, of which a rank owns one shard, so it has one piece or none.
        """
        names = list(self.ranges)
        found = _pieces(list(self.ranges.values()), self.shards(rank))
        return {names[piece.parameter]: piece for piece in found}


@dataclass(frozen=True)
class ParamSpec:
    """The properties of a parameter that select its buffer and bucket.

    Attributes:
        size: its number of elements.
        dtype: the name of its dtype, such as "bfloat16".
        experts: it belongs to experts, whose replicas lie on other ranks than those of dense parameters.
        partial: its gradient is a partial sum over tensor-parallel ranks.
        own_bucket: it has a bucket to itself.
        cost: of its update, in any unit, where one rank must own all of it; 0: it may be sharded anywhere.
        fp8: the block of its FP8 copies if only FP8 GEMMs read it; 0: others do.
    """

    size: int
    dtype: str
    experts: bool = False
    partial: bool = False
    own_bucket: bool = False
    cost: int = 0
    fp8: int = 0


@dataclass(frozen=True)
class Buffer:
    """A flat buffer: the kind of its parameters, as in `ParamSpec`, and their layout.

    whole: True if one rank owns each parameter, for updates that need whole matrices.
    fp8: the block of FP8 weights, whose bytes ranks gather if they share the buffer; 0: of other parameters,
        and of whole ones, which are gathered in their dtype.
    """

    dtype: str
    experts: bool
    partial: bool
    layout: BucketLayout
    whole: bool = False
    fp8: int = 0

    @property
    def gathers_fp8(self) -> bool:
        """True if ranks that share the buffer gather FP8 bytes of its parameters."""
        return self.fp8 > 0 and self.layout.num_ranks > 1

    @cached_property
    def tiles(self) -> Mapping[str, Range]:
        """Return {name: range of its tiles of block x block elements}; each starts at a multiple of 16."""
        found, end = dict[str, Range](), 0
        for name, (first, last) in self.layout.ranges.items():
            found[name] = end, end + (last - first) // self.fp8**2
            end = _up(found[name][1], 16)  # scales have a byte or four
        return found

    @property
    def num_tiles(self) -> int:
        """Return the size of a buffer for `tiles`."""
        return max((_up(last, 16) for _, last in self.tiles.values()), default=0)


def plan_buffers(
    parameters: Mapping[str, ParamSpec],
    *,
    num_ranks: int = 1,
    num_expert_ranks: int = 1,
    bucket_size: int = BUCKET_SIZE,
    unit: int = BUCKET_UNIT,
) -> tuple[Buffer, ...]:
    """Return a buffer for each kind of parameters.

    Args:
        parameters: {name: spec}, in the order of the model.
        num_ranks, num_expert_ranks: the ranks that share the buffers of dense parameters, and of experts.
        bucket_size, unit: see `bucket_layout`.

    Raises:
        ValueError: as `bucket_layout`.
    """
    kinds: dict[tuple[str, bool, bool, bool, int], dict[str, ParamSpec]] = {}
    for name, facts in parameters.items():
        whole = facts.cost > 0
        kind = facts.dtype, facts.experts, facts.partial, whole, 0 if whole else facts.fp8
        kinds.setdefault(kind, {})[name] = facts
    buffers = []
    for (dtype, experts, partial, whole, fp8), members in kinds.items():
        sizes = {name: facts.size for name, facts in members.items()}
        ranks = num_expert_ranks if experts else num_ranks
        if whole:
            costs = {name: facts.cost for name, facts in members.items()}
            layout = whole_layout(sizes, costs, ranks, bucket_size=bucket_size, unit=unit)
        else:
            own_bucket = [name for name, facts in members.items() if facts.own_bucket]
            aligned = lcm(unit, ALIGNMENT * ranks)  # so that every rank's part is, as parameters are
            layout = bucket_layout(sizes, ranks, bucket_size=bucket_size, own_bucket=own_bucket, unit=aligned)
        buffers.append(Buffer(dtype, experts, partial, layout, whole, fp8))
    return tuple(buffers)


def fill_order(buffers: Sequence[Buffer], names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the buckets of all buffers in the order in which backward fills them, as (buffer, bucket).

    All ranks communicate in this order, whichever bucket is full first on one of them. Buffers of partial
    sums come last: they are all-reduced over tensor-parallel ranks first, and this must not interleave with
    the collectives of backward itself.

    Args:
        buffers: the buffers of a rank.
        names: all parameters in the order of the model.
    """
    place = {name: -number for number, name in enumerate(names)}

    def filled(at: tuple[int, int]) -> tuple[bool, int]:
        buffer = buffers[at[0]]
        return buffer.partial, max(place[name] for name in buffer.layout.buckets[at[1]].names)

    every = [(i, j) for i, buffer in enumerate(buffers) for j in range(len(buffer.layout.buckets))]
    return sorted(every, key=filled)


def shard_ranges(sizes: Sequence[int], num_ranks: int) -> list[list[Piece]]:
    """Shard parameters that lie side by side into equal parts, one a rank.

    Args:
        sizes: elements of each parameter, in the order of the buffer, which is padded to a multiple of
            num_ranks.
        num_ranks: how many ranks share it.

    Returns:
        the pieces of each rank.

    Raises:
        ValueError: a negative size, or less than one rank.
    """
    _check("shard_ranges", {str(i): size for i, size in enumerate(sizes)}, num_ranks)
    places, end = [], 0
    for size in sizes:
        places.append((end, end + size))
        end += size
    each = -(-end // num_ranks)
    return [list(_pieces(places, [(rank * each, (rank + 1) * each)])) for rank in range(num_ranks)]


def bucket_layout(
    sizes: Mapping[str, int],
    num_ranks: int,
    *,
    bucket_size: int | None = None,
    own_bucket: Collection[str] = (),
    unit: int = BUCKET_UNIT,
) -> BucketLayout:
    """Lay parameters out in a buffer.

    Args:
        sizes: {name: elements}, in the order of the model.
        num_ranks: how many ranks hold replicas of the parameters and share their buckets.
        bucket_size: the number of elements at which a bucket is full; None: one bucket, besides those of
            `own_bucket`.
        own_bucket: names of parameters with a bucket to themselves, as tied embeddings have, whose gradients
            wait for another pipeline stage.
        unit: bucket sizes are multiples of it and of num_ranks; 65536 lets NCCL use all of a wide network.

    Raises:
        ValueError: a negative size, less than one rank, a bucket_size or unit below one, or a name in
            `own_bucket` that no parameter has.
    """
    _check("bucket_layout", sizes, num_ranks, bucket_size=bucket_size, unit=unit)
    if unknown := [name for name in own_bucket if name not in sizes]:
        raise ValueError(f"bucket_layout: own_bucket names {unknown[0]!r}, which is no parameter")
    multiple = lcm(num_ranks, unit, ALIGNMENT)
    buckets: list[Bucket] = []
    ranges: dict[str, Range] = {}
    start = end = 0
    names: list[str] = []

    def close() -> None:
        nonlocal start, end, names
        if names:
            end = _up(end, multiple)
            buckets.append(Bucket(start, end, tuple(names)))
            start, names = end, []

    for name, size in reversed(list(sizes.items())):
        if name in own_bucket:
            close()
        first = _up(end, ALIGNMENT)
        end = first + size
        ranges[name] = first, end
        names.append(name)
        if name in own_bucket or (bucket_size is not None and end - start >= bucket_size):
            close()
    close()
    return BucketLayout(num_ranks, tuple(buckets), ranges)


def matrix_cost(rows: int, columns: int) -> int:
    """Return the cost of orthogonalising a matrix, in proportion to its GEMMs."""
    return max(rows, columns) * min(rows, columns) ** 2


def owner_ranks(costs: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Assign each of `costs` to an owner rank, balancing the sums of the ranks.

    The most expensive comes first, to the rank with the smallest sum: at most 4/3 of the optimum (Graham,
    "Bounds on Multiprocessing Timing Anomalies", 1969).
    """
    loads, owners = [0] * num_ranks, dict[str, int]()
    for name in sorted(costs, key=lambda name: -costs[name]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return {name: owners[name] for name in costs}


def whole_layout(
    sizes: Mapping[str, int],
    costs: Mapping[str, int],
    num_ranks: int,
    *,
    bucket_size: int = BUCKET_SIZE,
    unit: int = BUCKET_UNIT,
) -> BucketLayout:
    """Lay parameters out so that each lies in its owner's shard of a bucket.

    Owners are balanced by `costs` over all parameters. Padding is communicated, too: a bucket is full when
    it has `bucket_size` elements, its longest shard is at most 2 % above the mean, and the next parameter
    would not bring the two closer.

    Args:
        sizes, costs: {name: elements} and {name: the cost of its update}, in the order of the model.
        num_ranks, bucket_size, unit: see `bucket_layout`.

    Raises:
        ValueError: as `bucket_layout`.
    """
    _check("whole_layout", sizes, num_ranks, bucket_size=bucket_size, unit=unit)
    owners = owner_ranks(costs, num_ranks)
    multiple = lcm(ALIGNMENT, unit // gcd(unit, num_ranks))
    buckets: list[Bucket] = []
    ranges: dict[str, Range] = {}
    start = 0
    parts: list[list[str]] = [[] for _ in range(num_ranks)]
    lengths = [0] * num_ranks
    left = list(sizes)  # the last one comes first
    while left:
        name = left.pop()
        parts[owners[name]].append(name)
        lengths[owners[name]] += _up(sizes[name], ALIGNMENT)
        if left:
            longest, total, more = max(lengths), sum(lengths), _up(sizes[left[-1]], ALIGNMENT)
            then = max(longest, lengths[owners[left[-1]]] + more)
            uneven = 50 * num_ranks * longest > 51 * total or then * total < longest * (total + more)
            if total < bucket_size or uneven:
                continue
        each = _up(max(lengths), multiple)
        for rank, names in enumerate(parts):
            first = start + rank * each
            for member in names:
                ranges[member] = first, first + sizes[member]
                first += _up(sizes[member], ALIGNMENT)
        buckets.append(Bucket(start, start + num_ranks * each, tuple(n for part in parts for n in part)))
        start += num_ranks * each
        parts, lengths = [[] for _ in range(num_ranks)], [0] * num_ranks
    return BucketLayout(num_ranks, tuple(buckets), ranges)


def _check(name: str, sizes: Mapping[str, int], num_ranks: int, **positive: int | None) -> None:
    if num_ranks < 1:
        raise ValueError(f"{name}: there must be at least one rank, got {num_ranks}")
    for parameter, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name}: parameter {parameter} must not have a negative size, got {size}")
    for argument, number in positive.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}: {argument} must be at least 1, got {number}")


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _pieces(places: Sequence[Range], owned: Sequence[Range]) -> Iterator[Piece]:
    """Yield the intersections of parameters, at `places` in the buffer, with the ranges of a rank.

    Both are sorted.
    """
    before = 0  # elements that the rank owns in earlier ranges
    parameter = 0
    for start, end in owned:
        while parameter < len(places) and places[parameter][1] <= start:
            parameter += 1
        at = parameter
        while at < len(places) and places[at][0] < end:
            first, last = max(start, places[at][0]), min(end, places[at][1])
            if first < last:
                local, within = first - start + before, first - places[at][0]
                yield Piece(at, (first, last), (local, local + last - first), (within, within + last - first))
            at += 1
        before += end - start
