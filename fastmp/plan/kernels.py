"""Kernels: how long the parts of a layer take on one GPU, from shapes, bytes, and shares of the GPU's peaks.

Times are seconds. A GEMM is cut into tiles, one at a time on each multiprocessor. A wave of tiles
takes the time of one: its sums at `GPU.gemms` of the peak, then the writing of its result at the
multiprocessor's share of the memory's bandwidth. So few tiles, a last wave that is not full and short sums
cost what they do on a GPU. All other kernels are bound by memory: bytes over a share of its bandwidth. Every
kernel takes `LAUNCH` on top, in which its first loads and its last stores are alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from fastmp.config.dispatchers import NCCL_MULTIPROCESSORS
from fastmp.plan.hardware import GPU

# Of the peak, for large FP8 GEMMs: 1,280 of 1,979 TFLOP/s on H100 and H200 (newsletter.semianalysis.com/p/
# mi300x-vs-h100-vs-h200-benchmark-part-1-training); DeepGEMM's page has up to 0.78 on an H800.
FP8_GEMMS = 0.65
MEMORY = 0.83  # of the bandwidth: published for a V100, 750 of 900 GB/s (Jia et al. 2018, 1804.06826)
ATTENTION = 0.6  # of what GEMMs reach, by fused attention; published: 0.5 to 0.75 (Dao 2023, 2307.08691)
LAUNCH = 4e-6
# Of the host, for each launch of eager code with autograd: 730 us of a dense layer's 29 launches on a core of
# an AMD EPYC (docs/studies/graphs.md). A replay of a CUDA graph takes as long as one.
HOST = 25e-6
# (forward, backward) launches of the segments of a layer, as the study of graphs counts them
LAUNCHES = {
    "attention": (6, 10), "mlp": (5, 8), "router": (13, 8), "preprocess": (1, 0), "shared_experts": (5, 8),
    "dispatch": (1, 1), "experts": (2, 5), "combine": (2, 2),
}  # fmt: skip
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 2, 4, 8)  # multiprocessors that share a sum
_REUSE = 64  # multiply-adds for each number that a tile loads, from which on loads do not bound it


class Gemm(NamedTuple):
    """`batch` GEMMs of matrices (rows, sum) and (sum, columns).

    adds: the result is added to float32 numbers that are there. fp8: the matrices are quantised.
    """

    rows: int
    columns: int
    sum: int
    batch: int = 1
    adds: bool = False
    fp8: bool = False

    def backward_input(self) -> Gemm:
        """Return the GEMM of the gradient of the matrix (rows, sum), dgrad."""
        return Gemm(self.rows, self.sum, self.columns, self.batch, fp8=self.fp8)

    def backward_weight(self, adds: bool = False, fp8: bool = False) -> Gemm:
        """Return the GEMM of the gradient of the matrix (sum, columns), wgrad; in FP8 if this one is, too."""
        return Gemm(self.sum, self.columns, self.rows, self.batch, adds, fp8 and self.fp8)


@lru_cache(maxsize=4096)
def gemm_time(gpu: GPU, gemm: Gemm, itemsize: int) -> float:
    """Return the seconds of a GEMM of numbers of `itemsize` bytes, by the best of a few tilings."""
    m, n, k, batch, adds, fp8 = gemm
    if not m * n * k * batch:
        return 0.0
    peak = FP8_GEMMS * gpu.peak(1) if fp8 else gpu.gemms * gpu.peak(itemsize)
    bandwidth, result = MEMORY * gpu.memory_bandwidth, 8 if adds else itemsize
    rate, writes = peak / gpu.processors, bandwidth / gpu.processors
    best = math.inf
    for rows, columns in _TILES:
        tiles, area = batch * -(-m // rows) * -(-n // columns), rows * columns
        fed = min(1.0, area / (rows + columns) / _REUSE)
        for split in _SPLITS:
            waves = -(-tiles * split // gpu.processors)
            written = result if split == 1 else 4
            tile = 2 * area * -(-k // split) / (rate * fed) + area * written / writes
            joined = 0 if split == 1 else batch * m * n * (4 * split + result)
            best = min(best, waves * tile + joined / bandwidth)
    least = batch * ((m + n) * k * (1 if fp8 else itemsize) + m * n * result)
    return LAUNCH + max(best, least / bandwidth)


@dataclass(frozen=True)
class Kernels:
    """An implementation of layers, by how often its kernels read or write each kind of tensor.

    Pairs are (forward, backward). GEMMs count apart.

    hidden: passes over the hidden states between tensor-parallel regions. projected: over a rank's queries,
    keys and values. ffn: over the activations of an MLP, beyond the inputs and outputs of its activation
    function. scores: over attention's scores; None where attention is one kernel that keeps none. launches:
    kernels of a layer. logits: bytes for each logit. state: bytes that an optimizer's step moves for each
    parameter, beyond reading and writing its state, reading the gradient twice and writing the parameter.
    tensor_launches: its kernels for each tensor. memory: the share of the bandwidth that they all reach.
    overlap: True if tensor-parallel collectives of the backward overlap GEMMs. adds: True if wgrads
    accumulate in float32 gradients. fp8_wgrads: True if those of FP8 layers are in FP8. late: seconds by
    which a rank comes late to a collective of a layer, a standard deviation; all wait for the last. host:
    seconds of the host for a launch; 0: it is never late. collective: multiprocessors that a collective
    holds; 0 for the NCCL of 2019 and 2020, of which no figure was found.
    """

    hidden: tuple[float, float]
    projected: tuple[float, float]
    ffn: tuple[float, float]
    scores: tuple[float, float] | None
    launches: tuple[int, int]
    logits: float
    state: float
    tensor_launches: int = 0
    memory: float = MEMORY
    overlap: bool = False
    adds: bool = False
    fp8_wgrads: bool = False
    late: float = 0.0
    host: float = 0.0
    collective: int = 0

    def wgrad(self, gemm: Gemm) -> Gemm:
        """Return the GEMM of the weight gradient of `gemm`."""
        return gemm.backward_weight(self.adds, self.fp8_wgrads)


# fastmp's layers, op by op, without dropout: two norms (2; 3), two sums with the residual (3; 3, where
# gradients meet), rotary positions of queries and keys (4/3; 4/3), and one gradient of three projections (0;
# 2). The loss reads logits and writes their gradient. Gradients are zeroed once a step.
FASTMP = Kernels(
    hidden=(10, 12), projected=(1.33, 3.33), ffn=(0, 0), scores=None, launches=(6, 10), logits=4, state=4,
    overlap=True, adds=True, host=HOST, collective=NCCL_MULTIPROCESSORS,
)  # fmt: skip
# The same of software that multiplies in FP8 for wgrads as well, as Transformer Engine does.
FP8_WGRADS = replace(FASTMP, fp8_wgrads=True)
# Megatron-LM as published in September 2019, op by op: two norms (2; 5, as weights' gradients take passes of
# their own), and after two GEMMs a bias (2; 1), dropout with a mask of bytes (2.5; 2.5) and the sum with
# the residual (3; 3). Of projections a bias (2; 1), copies that make heads contiguous (2.67; 2.67), and one
# gradient (0; 2). Of the MLP a bias. Of scores a scale (2; 2), a mask (4; 2), softmax (2; 3) and dropout
# (2.5; 2.5). The loss works on float32 logits. The optimizer looks for overflow, copies, unscales, clips and
# updates in kernels of their own, tensor by tensor. `memory` is calibrated: with it one V100 reaches the 39
# TFLOP/s of the 1.2 B model. So is `late`: with it two GPUs are the 1.64 times as fast as one that Table 8
# has.
UNFUSED = Kernels(
    hidden=(19, 23), projected=(4.67, 5.67), ffn=(2, 1), scores=(10.5, 9.5), launches=(24, 34), logits=50,
    state=42, tensor_launches=12, memory=0.55, late=0.68e-3,
)  # fmt: skip
# Megatron-LM since 2020: bias, dropout and sum are one kernel, as are bias and GELU, and scale, mask and
# softmax; heads are not copied, and a launch of the optimizer has many tensors.
FUSED = Kernels(
    hidden=(11, 23), projected=(2.67, 3.67), ffn=(0, 1), scores=(4.5, 5.5), launches=(9, 16), logits=50,
    state=32,
)  # fmt: skip
