"""Named GPUs in their servers: rates of data sheets, each with its source. Nothing here is measured.

A GPU stands in the server that its maker sells it in, whose switch joins all of its GPUs and whose network
cards are divided among them evenly.

A `Link` is how a group of ranks sends bytes. Times are seconds: a message of X bytes takes alpha + X / beta;
alpha is the latency of a hop, beta the bytes a second that a rank can send. Ranks of one server send over
NVLink. Between servers, what bounds a group is the door of a server to the network: a rank has its own share
of the server's cards, and the ranks that a group has in one server use theirs together, as a ring enters and
leaves each server once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

_GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """A GPU in its server. Rates are per second and in one direction; FLOPs are of dense GEMMs.

    half, single, eight: FLOP/s of GEMMs of 16-bit, of float32 and of FP8 numbers (0: none).
    memory_bandwidth, nvlink, network: bytes a second of one GPU; the last is its share of its server's
    network cards. capacity: bytes of memory, of which the driver keeps about 1%; where data sheets write GB
    of it, it has GiB.
    gemms: share of the peak that large 16-bit GEMMs of random numbers sustain at the GPU's power limit, as
    published: 257 of 312 TFLOP/s on an A100 (thonking.ai/p/strangely-matrix-multiplications), 720 of 989 on
    H100 and H200 (newsletter.semianalysis.com/p/mi300x-vs-h100-vs-h200-benchmark-part-1-training). A short
    run has 780 on an H100 (gist.github.com/Chillee/2ec89696db8b7ed1c24461159e325405). Others have 0.8.
    switch_sums: whether the switch itself adds up what the GPUs of a server send (NVLink SHARP). compared: of
    published runs on it, the least and the most of predicted over published FLOP/s, but for runs that were
    bound by their host or had other power limits (docs/studies/scaling.md).
    """

    name: str
    half: float
    single: float
    processors: int
    memory_bandwidth: float
    capacity: float
    nvlink: float
    per_server: int
    network: float
    source: str
    switch_sums: bool = False
    compared: tuple[float, float] | None = None
    eight: float = 0.0
    gemms: float = 0.8

    def peak(self, itemsize: int) -> float:
        """Return the FLOP/s of GEMMs of numbers of `itemsize` bytes."""
        return {1: self.eight, 4: self.single}.get(itemsize, self.half)


_H100 = GPU(
    "H100 SXM5 80 GB (DGX H100)",
    half=989.4e12,
    single=66.9e12,
    processors=132,
    memory_bandwidth=3352e9,
    capacity=80 * _GIB,
    nvlink=450e9,
    per_server=8,
    network=50e9,
    source="NVIDIA H100 architecture white paper; eight 400 Gbit/s cards a server: DGX H100 data sheet",
    switch_sums=True,
    eight=1979e12,
    gemms=720 / 989.4,
    compared=(0.87, 1.40),
)
GPUS = {
    "v100": GPU(
        "Tesla V100 SXM3 32 GB (DGX-2H)",
        half=130e12,
        single=16.3e12,
        processors=80,
        memory_bandwidth=900e9,
        capacity=32 * _GIB,
        nvlink=150e9,
        per_server=16,
        network=6.25e9,
        source="39 TFLOP/s are 30 % of its peak, 300 GB/s (both ways) between GPUs and 100 GB/s between "
        "servers: Shoeybi et al. 2019 (arXiv 1909.08053), section 5; memory: NVIDIA V100 data sheet",
        compared=(0.93, 1.00),
    ),
    "a100": GPU(
        "A100 SXM4 80 GB (DGX A100)",
        half=312e12,
        single=19.5e12,
        processors=108,
        memory_bandwidth=2039e9,
        capacity=80 * _GIB,
        nvlink=300e9,
        per_server=8,
        network=25e9,
        source="NVIDIA A100 data sheet; eight 200 Gbit/s cards a server: DGX A100 data sheet",
        compared=(0.93, 1.20),
    ),
    "h100": _H100,
    "h800": replace(
        _H100,
        name="H800 SXM5 80 GB",
        nvlink=200e9,
        source="H100 white paper; 400 GB/s (both ways) between GPUs, eight 400 Gbit/s cards a server: "
        "DeepSeek-AI 2025 (arXiv 2505.09343), section 4",
        switch_sums=False,
        compared=(1.06, 1.06),
    ),
    "h200": replace(
        _H100,
        name="H200 SXM5 141 GB (DGX H200)",
        memory_bandwidth=4800e9,
        capacity=141 * _GIB,
        source="NVIDIA H200 data sheet; eight 400 Gbit/s cards a server: DGX H200 data sheet",
        compared=(1.37, 1.38),
    ),
    "b200": GPU(
        "B200 SXM 180 GB (DGX B200)",
        half=2250e12,
        single=75e12,
        processors=148,
        memory_bandwidth=8000e9,
        capacity=180 * _GIB,
        nvlink=900e9,
        per_server=8,
        network=50e9,
        source="NVIDIA DGX B200 data sheet: the server's figures over its eight GPUs, eight 400 Gbit/s cards",
        switch_sums=True,
        eight=4500e12,
        compared=(1.02, 1.84),
    ),
    "gb200": GPU(
        "GB200 186 GB (GB200 NVL72)",
        half=2500e12,
        single=90e12,
        processors=152,
        memory_bandwidth=8000e9,
        capacity=186 * _GIB,
        nvlink=900e9,
        per_server=64,
        network=50e9,
        source="NVIDIA GB200 NVL72 data sheet, its figures over 72 GPUs, of which jobs of powers of two take "
        "64; TFLOP/s also at glennklockwood.com/garden/processors/B200; a 400 Gbit/s card a GPU",
        switch_sums=True,
        eight=5000e12,
        compared=(1.11, 1.65),
    ),
    "rtx4090": GPU(
        "GeForce RTX 4090 24 GB (PCIe)",
        half=165.2e12,
        single=82.6e12,
        processors=128,
        memory_bandwidth=1008e9,
        capacity=24 * _GIB,
        nvlink=32e9,
        per_server=8,
        network=3.125e9,
        source="NVIDIA Ada GPU architecture white paper: 16-bit GEMMs with float32 sums; PCIe 4.0 x16 for "
        "NVLink, which it lacks; two 100 Gbit/s cards a server of eight are assumed",
        eight=330.3e12,
    ),
}

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
