"""Random routings, the exchanges of an expert layer over them, and one permutation of all assignments.

The ranks are virtual: their symmetric memory lies side by side in one process, or in memory that forked ranks
share (`shared_memory`).
"""

from __future__ import annotations

import math
import mmap
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from every_op_tools import sparse
from torch import Tensor

from fastmp.ops.core.registry import compute_dtype

PATTERNS = ("any", "skewed", "all to one", "one token", "empty", "dropped", "overflow", "one rank has all")
Run = Callable[..., object]  # run(op, *arguments)
_ALIGNED = 256  # bytes: where each part of a piece begins


@dataclass(frozen=True)
class PeerViews:
    """The memory of one rank as the ops of `fastmp.ops.exchange` take it, and the rank's place among all."""

    rank: int
    epochs: Tensor
    counts: Tensor
    rows: Tensor
    peer_offsets: Tensor


def shared_memory(num_bytes: int) -> Tensor:
    """Return zeroed bytes that forked processes share."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def virtual_ranks(
    etp: int,
    ep: int,
    *,
    num_experts: int,
    capacity: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    allocate: Callable[[int], Tensor] = lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
) -> list[PeerViews]:
    """Place the symmetric memory of etp x ep ranks side by side in zeroed bytes of `allocate`.

    The peer_offsets between them are as an etp-ep group would have them, etp ranks first.
    """
    ranks = etp * ep
    parts = (
        ((ranks + 1,), torch.int32),
        ((2, ranks, num_experts), torch.int32),
        ((2, capacity, hidden), dtype),
    )
    places, size = [], 0
    for shape, kind in parts:
        places.append(size)
        size += -(-math.prod(shape) * kind.itemsize // _ALIGNED) * _ALIGNED
    memory = allocate(ranks * size + _ALIGNED)
    start = -memory.data_ptr() % _ALIGNED
    begins = torch.arange(ranks, dtype=torch.int64) * size
    found = []
    for rank in range(ranks):
        views = [
            memory[start + rank * size + place :][: math.prod(shape) * kind.itemsize].view(kind).view(shape)
            for (shape, kind), place in zip(parts, places, strict=True)
        ]
        peer_offsets = (begins - begins[rank]).view(etp, ep).to(memory.device)
        found.append(PeerViews(rank, *views, peer_offsets))
    return found


def side_by_side(run: Callable[[PeerViews], Any], ranks: Sequence[PeerViews]) -> list[Any]:
    """Call `run` with each rank's memory, all at once, on threads, for barriers wait; results by rank."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


@dataclass(frozen=True)
class Routing:
    """Inputs of an etp x ep group; a tensor for each rank.

    x (T, H), indices (T, k), probs (T, k), grad (T, H) of what comes back, outputs (C, H) of the experts and
    row_grads (C, H) of their inputs.
    """

    etp: int
    ep: int
    num_experts: int
    capacity: int
    x: list[Tensor]
    indices: list[Tensor]
    probs: list[Tensor]
    grad: list[Tensor]
    outputs: list[Tensor]
    row_grads: list[Tensor]


def routings(
    count: int, dtype: torch.dtype, *, first: int = 0, most_ranks: int = 8, hidden: int | None = None
) -> Iterator[Routing]:
    for seed in range(first, first + count):
        yield routing(seed, dtype, most_ranks, hidden)


def routing(seed: int, dtype: torch.dtype, most_ranks: int, hidden: int | None) -> Routing:
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [(d, p) for d in (1, 1, 2, 3) for p in (1, 2, 3, 4, 8) if 1 < d * p <= most_ranks]
    etp, ep = source.choice(sizes)
    local, slots = source.choice((1, 2, 3)), source.choice((1, 2, 4))
    num_experts = ep * local
    slots = min(slots, num_experts)
    hidden = hidden or source.choice((1, 3, 8, 64, 130))
    pattern = PATTERNS[seed % len(PATTERNS)]
    tokens = [source.choice((1, 2, 5, 9, 16)) for _ in range(etp * ep)]
    if pattern == "empty":
        tokens = [source.choice((0, 0, 3)) for _ in tokens]
    elif pattern == "one token":
        tokens = [1 for _ in tokens]
    elif pattern == "one rank has all":
        tokens = [0 for _ in tokens]
        tokens[source.randrange(len(tokens))] = 16

    def random_rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def chosen(num_tokens: int) -> Tensor:
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        if pattern == "skewed":
            scores += torch.linspace(0, 1.5, num_experts)
        experts = scores.argsort(1, descending=True)[:, :slots].to(torch.int32).contiguous()
        if pattern == "all to one":
            experts[:] = num_experts - 1
        if pattern == "dropped":
            experts.view(-1)[:: source.choice((1, 2, 3))] = source.choice((-1, num_experts))
        return experts

    capacity = sum(tokens) * slots + 1
    if pattern == "overflow":
        capacity = max(1, sum(tokens) * slots // (2 * ep))
    wide = compute_dtype(dtype)
    return Routing(
        etp, ep, num_experts, capacity,
        x=[random_rows(t, hidden) for t in tokens],
        indices=[chosen(t) for t in tokens],
        probs=[torch.rand(t, slots, generator=generator, dtype=wide) for t in tokens],
        grad=[random_rows(t, hidden) for t in tokens],
        outputs=[random_rows(capacity, hidden) for _ in tokens],
        row_grads=[random_rows(capacity, hidden) for _ in tokens],
    )  # fmt: skip


@dataclass(frozen=True)
class Results:
    """Results of an expert layer's exchanges on a rank."""

    matrix: Tensor
    where: Tensor
    offsets: Tensor
    dropped: Tensor
    rows: Tensor  # of the dispatch
    dx: Tensor
    out: Tensor  # of the combine
    dy: Tensor
    dprobs: Tensor


def steps(
    run: Run, given: Routing, here: PeerViews, *, alone: bool = False, timeout: float = 30.0
) -> Iterator[list | None]:
    """The exchanges of a rank: dispatch, combine, and the gradients of both, in the order of a training step.

    It stops before each barrier with None, so that one process can bring all its virtual ranks there, and
    ends with the `Results` in a list.

    alone: ranks run one after the other, so that one finds everybody's counts the second time only.
    """
    rank, epochs, rows, peer_offsets = here.rank, here.epochs, here.rows, here.peer_offsets
    indices, probs = given.indices[rank], given.probs[rank]
    row_of, ends = run("permutation", indices, given.num_experts)
    yield None
    if alone:
        run("exchange_counts", ends, epochs, here.counts, peer_offsets, rank, timeout)
        epochs[-1] -= 1
        yield None
    matrix = run("exchange_counts", ends, epochs, here.counts, peer_offsets, rank, timeout)
    where, offsets, dropped = run("exchange_places", row_of, indices, matrix, rank, given.ep, given.capacity)

    def push(x: Tensor, weights: Tensor | None, y: Tensor | None) -> Iterator[None]:
        dprobs = run("exchange_push", x, where, weights, y, epochs, rows, peer_offsets)
        yield None
        run("exchange_barrier", epochs, peer_offsets, rank, timeout)
        return run("exchange_take", rows, epochs, offsets, rows.shape[2]), dprobs

    def pull(values: Tensor, weights: Tensor | None, keep: bool) -> Iterator[None]:
        run("exchange_give", values, offsets, epochs, rows)
        yield None
        run("exchange_barrier", epochs, peer_offsets, rank, timeout)
        return run("exchange_pull", rows, epochs, peer_offsets, where, weights, keep)

    arrived, _ = yield from push(given.x[rank], None, None)
    out, y = yield from pull(given.outputs[rank], probs, True)
    dy, dprobs = yield from push(given.grad[rank], probs, y)
    dx, _ = yield from pull(given.row_grads[rank], None, False)
    yield [Results(matrix, where, offsets, dropped, arrived, dx, out, dy, dprobs)]


def all_steps(run: Run, given: Routing, here: PeerViews) -> Results:
    """`steps` of a rank whose peers run elsewhere."""
    return [*steps(run, given, here)][-1][0]


def one_after_the_other(run: Run, given: Routing, ranks: list[PeerViews]) -> list[Results]:
    """`steps` of virtual ranks, whose barriers find that everybody has come."""
    programs = [steps(run, given, here, alone=True) for here in ranks]
    while True:
        found = [next(program) for program in programs]
        if found[0] is not None:
            return [each[0] for each in found]
        for here in ranks:
            here.epochs[:-1] = here.epochs[-1] + 2  # beyond the one to come


def expected(run: Run, given: Routing) -> list[Results]:
    """The same by one permutation of all ranks' assignments."""
    ranks, local, capacity = given.etp * given.ep, given.num_experts // given.ep, given.capacity
    sizes = [len(x) for x in given.x]
    row_of, ends = run("permutation", torch.cat(given.indices), given.num_experts)
    counts = [
        torch.bincount(i[(i >= 0) & (i < given.num_experts)], minlength=given.num_experts)
        for i in given.indices
    ]
    matrix = torch.stack(counts).cumsum(1)
    ends = torch.cat((ends.new_zeros(1), ends))[::local].tolist()  # where the rows of each peer begin and end
    total = ends[-1]
    experts = torch.cat(given.indices)
    peer = (experts // local).where(row_of >= 0, 0)
    within = row_of - torch.tensor(ends, dtype=torch.int32)[peer.long()]
    kept = (row_of >= 0) & (within < capacity)
    row_of = row_of.where(kept, -1)
    where = (peer * capacity + within).where(kept, -1)
    offsets = torch.bincount(
        experts[(experts >= 0) & (experts < given.num_experts)], minlength=given.num_experts
    )
    offsets = offsets.view(given.ep, local).cumsum(1).clamp(max=capacity)

    def of_peers(tensors: list[Tensor]) -> Tensor:
        """The rows of all experts, in order; sums over the ranks that have the same experts."""
        hidden, wide = tensors[0].shape[1], compute_dtype(tensors[0].dtype)
        whole = tensors[0].new_zeros(total, hidden)
        for p in range(given.ep):
            members = [tensors[d * given.ep + p] for d in range(given.etp)]
            here = whole[ends[p] : ends[p + 1]][:capacity]
            summed = members[0].to(wide)
            for member in members[1:]:
                summed = summed + member.to(wide)
            here.copy_(summed[: len(here)])
        return whole

    def at_rank(whole: Tensor, rank: int) -> Tensor:
        p = rank % given.ep
        out = whole.new_zeros(capacity, whole.shape[1])
        mine = whole[ends[p] : ends[p + 1]][:capacity]
        out[: len(mine)] = mine
        return out

    x, probs, grad = (torch.cat(part) for part in (given.x, given.probs, given.grad))
    y = of_peers(given.outputs)
    rows = run("permute", x, row_of, total)
    dx = run("unpermute", of_peers(given.row_grads), row_of, None)
    out = run("unpermute", y, row_of, probs)
    dy, dprobs = run("unpermute_backward", grad, y, row_of, probs)
    where, dx, out, dprobs, gone = (
        part.split(sizes) for part in (where, dx, out, dprobs, experts.where(kept, -1))
    )
    found = []
    for rank in range(ranks):
        valid = (given.indices[rank] >= 0) & (given.indices[rank] < given.num_experts)
        dropped = (valid & (gone[rank] < 0)).sum()
        rank_rows = at_rank(rows, rank), dx[rank], out[rank], at_rank(dy, rank), dprobs[rank]
        found.append(Results(matrix, where[rank], offsets[rank % given.ep], dropped, *rank_rows))
    return found


def assert_same(results: Results, wanted: Results, what: str) -> None:
    """Bit for bit."""
    for name, want in vars(wanted).items():
        value = getattr(results, name)
        assert value.shape == want.shape and value.is_contiguous(), (what, name)
        assert torch.equal(value, want.to(value.dtype)), (what, name, value, want)


def far_away(run: Run, capacity: int, hidden: int) -> None:
    """Rows whose elements 32 bits cannot number, pushed, given and pulled."""
    rows = sparse(2 * capacity * hidden, torch.float32).view(2, capacity, hidden)
    epochs, x = torch.zeros(2, dtype=torch.int32), torch.arange(3.0 * hidden).view(3, hidden)
    peer_offsets = torch.zeros(1, 1, dtype=torch.int64)
    where = torch.tensor([[capacity - 1], [0], [capacity // 2]], dtype=torch.int32)
    run("exchange_push", x, where, None, None, epochs, rows, peer_offsets)
    assert torch.equal(rows[1, where[:, 0].long()], x)
    epochs[-1] = 1
    out, y = run("exchange_pull", rows, epochs, peer_offsets, where, None, True)
    assert torch.equal(out, x) and torch.equal(y[:, 0], x)
