"""Sample arguments of the exchange family: a rank all of whose peers lie at distance 0, in its own memory.

So what is written to peers is seen in the arguments, whoever copies them. Rows of different peers have
different numbers. The epochs say that the others came long ago: nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops import OPS
from fastmp.ops.core.registry import compute_dtype

#   tokens, slots, etp, ep, experts, capacity, columns, gap between rows, sequence
_CASES = (
    (33, 2, 1, 4, 4, 80, 512, 0, 6),
    (37, 6, 1, 4, 64, 300, 129, 5, 1),
    (41, 4, 2, 2, 8, 90, 40, 0, (1 << 31) - 1),
    (17, 1, 1, 1, 3, 9, 64, 0, 0),
    (9, 8, 2, 4, 16, 128, 8, 1, 3),
    (0, 8, 1, 3, 9, 16, 16, 0, 4),
    (5, 2, 1, 5, 5, 8, 24, 0, -2),
    (2, 2, 1, 2, 2, 1, 1, 0, (1 << 31) - 2),
)
_TIMEOUT = 0.05  # seconds; no rank waits


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    for tokens, slots, etp, ep, experts, capacity, columns, gap, sequence in _CASES:

        def random(*shape: int, columns: int = columns, gap: int = gap) -> Tensor:
            shape = (*shape, columns + gap)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)[..., :columns]

        ranks, rank = etp * ep, etp * ep // 2
        epochs = torch.full((ranks + 1,), 1000 + max(0, sequence), dtype=torch.int64).to(torch.int32)
        epochs[-1] = sequence
        if sequence > 1 << 30:
            epochs[:-1] = -(1 << 31) + 1000
        peer_offsets = torch.zeros(etp, ep, dtype=torch.int64)
        rows = torch.randn(2, capacity, columns, generator=generator, dtype=torch.float64).to(dtype)
        where = torch.full((tokens, slots), -1, dtype=torch.int32)
        numbers = torch.randperm(capacity, generator=generator)[: tokens * slots - 3]
        there = torch.randperm(tokens * slots, generator=generator)[: len(numbers)]
        numbers += torch.randint(ep, numbers.shape, generator=generator) * capacity
        where.view(-1)[there] = numbers[: len(there)].to(torch.int32)
        if tokens:
            where[0, 0] = ep * capacity
        probs = torch.rand(tokens, slots, generator=generator, dtype=compute_dtype(dtype))
        local = max(1, experts // ep)
        ends = torch.arange(1, local + 1, dtype=torch.int32) * (capacity + 5) // (local + 1)
        if op == "exchange_barrier":
            yield epochs, peer_offsets, rank, _TIMEOUT
        elif op == "exchange_counts":
            own, counts = (
                torch.randint(99, shape, generator=generator, dtype=torch.int32)
                for shape in ((experts,), (2, ranks, experts))
            )
            yield own, epochs, counts, peer_offsets, rank, _TIMEOUT
        elif op == "exchange_places":
            indices = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots].to(torch.int32)
            indices = indices.contiguous()
            indices.view(-1)[::7] = experts
            row_of, offsets = OPS["permutation"].implementations["reference"](indices, experts)
            matrix = torch.randint(9, (ranks, experts), generator=generator).cumsum(1).to(torch.int32)
            matrix[rank] = offsets
            yield row_of, indices, matrix, rank, ep, capacity
        elif op == "exchange_push":
            x, y = random(tokens), random(tokens, slots)
            for weights, outputs in ((probs, y), (probs, None), (None, None)):
                yield x, where, weights, outputs, epochs, rows, peer_offsets
            half = x[:, : x.shape[1] // 2]  # narrower than the rows of the buffer
            yield half, where, probs, y[..., : half.shape[1]], epochs, rows, peer_offsets
        elif op == "exchange_take":
            yield rows, epochs, ends, rows.shape[2]
            yield rows, epochs, ends, rows.shape[2] // 2
        elif op == "exchange_give":
            yield random(capacity), ends, epochs, rows
        else:
            for weights, keep in ((probs, True), (probs, False), (None, False)):
                yield rows, epochs, peer_offsets, where, weights, keep
