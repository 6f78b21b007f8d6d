"""Named GPUs in their servers: rates of data sheets, each with its source. Nothing here is measured.

A GPU stands in the server that its maker sells it in, whose switch joins all of its GPUs and whose network
cards are divided among them evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30
_HOPPER = 720 / 989.4


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
    "h100": GPU(
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
        gemms=_HOPPER,
        compared=(0.87, 1.40),
    ),
    "h800": GPU(
        "H800 SXM5 80 GB",
        half=989.4e12,
        single=66.9e12,
        processors=132,
        memory_bandwidth=3352e9,
        capacity=80 * _GIB,
        nvlink=200e9,
        per_server=8,
        network=50e9,
        source="H100 white paper; 400 GB/s (both ways) between GPUs, eight 400 Gbit/s cards a server: "
        "DeepSeek-AI 2025 (arXiv 2505.09343), section 4",
        eight=1979e12,
        gemms=_HOPPER,
        compared=(1.06, 1.06),
    ),
    "h200": GPU(
        "H200 SXM5 141 GB (DGX H200)",
        half=989.4e12,
        single=66.9e12,
        processors=132,
        memory_bandwidth=4800e9,
        capacity=141 * _GIB,
        nvlink=450e9,
        per_server=8,
        network=50e9,
        source="NVIDIA H200 data sheet; eight 400 Gbit/s cards a server: DGX H200 data sheet",
        switch_sums=True,
        eight=1979e12,
        gemms=_HOPPER,
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
