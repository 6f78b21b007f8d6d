"""Links: how long a group of ranks takes to send bytes, by the latencies and bandwidths of a GPU's server.

Times are seconds. A message of X bytes takes alpha + X / beta: alpha is the latency of a hop, beta the bytes
a second that a rank can send. Ranks of one server send over NVLink. Between servers, what bounds a group is
the door of a server to the network: a rank has its own share of the server's cards, and the ranks that a
group has in one server use theirs together, as a ring enters and leaves each server once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from fastmp.plan.hardware import GPU

NVLINK_HOP, NETWORK_HOP = 3e-6, 8e-6  # seconds, of the order of those in NCCL's own tables
START = 15e-6  # seconds of a collective of one byte, as published for NCCL: 10 to 20 us
# The share of a link's rate that large messages reach. Published for nccl-tests: 230 to 240 GB/s of the 300
# of an A100, 365 to 370 of the 450 of an H100, by rings (github.com/NVIDIA/nccl/issues/1712, 1455).
REACHED = 0.8
SUMMED = 0.6  # of a link, bytes of an all-reduce by a switch that adds: 265 to 273 GB/s of 450 (issues/1455)


@dataclass(frozen=True)
class Link:
    """The interconnect of `ranks` ranks: seconds of a hop, and bytes a second that each rank can send.

    sums: True if the switch reduces in the network.
    """

    ranks: int
    hop: float
    bandwidth: float
    sums: bool = False

    def passes(self, sent: float, number: float = 1.0) -> float:
        """Return the seconds of `number` passes around a ring, in which a rank sends `sent` bytes together.

        An all-gather or a reduce-scatter is one pass.
        """
        if self.ranks == 1 or not sent:
            return 0.0
        return number * (START + (self.ranks - 1) * self.hop) + sent / self.bandwidth

    def all_reduce(self, size: float) -> float:
        """Return the seconds in which the ranks add up `size` bytes each, by a ring, a tree or the switch.

        A ring takes 2 (n - 1) hops and sends 2 (n - 1) / n of the bytes; a double tree takes 2 log2(n) hops
        and sends them twice. By a switch that adds, the bytes themselves pass at `SUMMED` of the link.
        """
        if self.ranks == 1 or not size:
            return 0.0
        n, once = self.ranks, size / self.bandwidth
        ring = 2 * (n - 1) * self.hop + 2 * (n - 1) / n * once
        tree = 2 * math.ceil(math.log2(n)) * self.hop + 2 * once
        switch = 2 * self.hop + REACHED / SUMMED * once if self.sums else math.inf
        return START + min(ring, tree, switch)

    def message(self, size: float) -> float:
        """Return the seconds of a message of `size` bytes between two ranks."""
        return START + self.hop + size / self.bandwidth

    @property
    def last(self) -> float:
        """Expected delay of the last rank after the mean, in standard deviations (Blom 1958)."""
        return NormalDist().inv_cdf((self.ranks - 0.375) / (self.ranks + 0.25))


def link(gpu: GPU, ranks: Sequence[int], *, crossing: Callable[[int], float] | None = None) -> Link:
    """Return the interconnect of `ranks` of a job that fills one server after the other.

    crossing: for an exchange, in which each rank sends each other one bytes of its own: called with the
    number of these ranks in a server, returns the share of the bytes sent that pass its door. None: a ring.
    """
    n, inside = len(ranks), min(Counter(rank // gpu.per_server for rank in ranks).values())
    if inside == n:
        return Link(n, NVLINK_HOP, REACHED * gpu.nvlink, gpu.switch_sums and n > 2)
    door = gpu.network * (inside if crossing is None else 1.0 / crossing(inside))
    return Link(n, NETWORK_HOP, REACHED * min(door, gpu.nvlink))
