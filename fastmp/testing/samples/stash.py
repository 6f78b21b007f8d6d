"""Sample arguments of the stash family: rings that are empty, partly in use, wrapped, full and void."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastmp.ops import OPS
from fastmp.ops.stash import new_state

#   rows of the ring, columns, gap between rows of the tensor, its rows, entries (rows, released) before, rows
_CASES = (
    (64, 32, 0, 40, (), 33),
    (64, 16, 3, 40, ((20, True), (30, False)), 12),  # allocated from row 50, released at the tail
    (64, 32, 0, 40, ((30, True), (20, False)), 24),  # begins at row 0 again
    (64, 7, 0, 40, ((50, False), (10, True), (4, True)), 9),  # released at the head
    (64, 32, 16, 70, ((40, False), (20, False)), 7),  # does not fit
    (64, 8, 0, 9, ((5, False), (0, True), (7, False)), 0),
    (300, 512, 0, 256, ((7, False),), 256),
    (16, 8, 8, 4, ((3, False),), 9),  # more rows than the tensor has
)
_TICKETS = 8


def _ends(rows: int) -> Tensor:
    return torch.tensor([rows // 3, rows], dtype=torch.int32)


def samples(op: str, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple]:
    reserve, release = (OPS[f"stash_{name}"].implementations["reference"] for name in ("reserve", "release"))
    for size, columns, gap, capacity, before, rows in _CASES:
        state, ticket = new_state(_TICKETS, "cpu"), len(before)
        for number, (count, _) in enumerate(before):
            reserve(_ends(count), state, size, number)
        released = [number for number, (_, done) in enumerate(before) if done]
        if op == "stash_release":
            for number in released[:-1]:
                release(state, number)
            yield state, released[-1] if released else ticket
            continue
        for number in released:
            release(state, number)
        if op == "stash_reserve":
            yield _ends(rows), state, size, ticket
            if before:
                yield _ends(rows), state.clone(), size, 0  # perhaps in use
            continue
        entry = reserve(_ends(rows), state, size, ticket)
        ring = torch.randn(size, columns, generator=generator, dtype=torch.float64).to(dtype)
        if op == "stash_push":
            x = torch.randn(capacity, columns + gap, generator=generator, dtype=torch.float64).to(dtype)
            yield x[:, :columns], ring, *entry
        else:
            yield ring, *entry, capacity
