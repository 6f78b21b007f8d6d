"""Random sequences of stash operations, and a model that keeps each entry's rows in a dictionary."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from fastmp.ops.stash import HEAD, OVERFLOWED, TAIL, new_state, state_size

CAPACITY, WIDTH = 12, 8


def ends(rows: int) -> torch.Tensor:
    return torch.tensor([rows // 2, rows], dtype=torch.int32)


class Checked:
    """A ring whose every pull is compared with what was pushed; ops by name from `implementation(op)`.

    The ring is poisoned with NaN: rows that nobody pushed would show.
    """

    def __init__(self, implementation: Callable[[str], Callable], rows: int, tickets: int) -> None:
        self.reserve, self.push, self.pull, self.release = (
            implementation(f"stash_{name}") for name in ("reserve", "push", "pull", "release")
        )
        self.state = new_state(tickets, "cpu")
        assert self.state.shape == (state_size(tickets),)
        self.ring = torch.full((rows, WIDTH), torch.nan)
        self.kept: dict[int, tuple] = {}  # by ticket: the rows, and where they are
        self.void = 0

    def store(self, ticket: int, count: int, generator: torch.Generator) -> bool:
        """Reserve and push; return False if the entry is void, which the counter of overflows must tell."""
        before = int(self.state[OVERFLOWED])
        start, offsets = self.reserve(ends(count), self.state, len(self.ring), ticket)
        x = torch.randn(CAPACITY, 2 * WIDTH, generator=generator)[:, WIDTH:]
        self.push(x, self.ring, start, offsets)
        void = int(self.state[OVERFLOWED]) > before
        assert torch.equal(offsets, ends(0 if void else count))
        self.kept[ticket] = x[: 0 if void else count], start, offsets
        self.void += void
        assert 0 <= int(self.state[HEAD] - self.state[TAIL]) <= len(self.ring)
        return not void

    def load(self, ticket: int) -> None:
        """Pull, compare, and release."""
        kept, start, offsets = self.kept.pop(ticket)
        wanted = torch.zeros(CAPACITY, WIDTH)
        wanted[: len(kept)] = kept
        assert torch.equal(self.pull(self.ring, start, offsets, CAPACITY), wanted)
        self.release(self.state, ticket)

    def check_empty(self) -> None:
        assert self.state[HEAD] == self.state[TAIL] and bool((self.state[8 : 8 + 4] < 0).all())


def random_sequence(checked: Checked, seed: int, steps: int, tickets: int) -> None:
    """Entries of random sizes that are released last in, first out, first in, first out, or at random."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    order = draw.choice(("first", "last", "random"))
    live: list[int] = []
    for _ in range(steps):
        if live and (len(live) == tickets or draw.random() < 0.45):
            at = {"first": 0, "last": -1, "random": draw.randrange(len(live))}[order]
            checked.load(live.pop(at))
        else:
            ticket = draw.choice([t for t in range(tickets) if t not in live])
            checked.store(ticket, draw.choice((0, 1, 5, CAPACITY)), generator)
            live.append(ticket)
    for ticket in live:
        checked.load(ticket)
    checked.check_empty()


def squared_relu(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.relu(x if bias is None else x + bias).square()
