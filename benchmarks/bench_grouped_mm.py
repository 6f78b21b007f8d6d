"""grouped_mm and grouped_mlp_in of fastmp, loops over the experts, torch's grouped GEMM, quack, torch.bmm.

A loop needs the sizes on the host, for which it would have to wait; here it has them for free. On a GPU it
also runs over several streams, as Transformer Engine does by default. Ours reads the sizes on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import EAGER, OURS, QUACK, TORCH, Case, CpuGoal, Workload, normal, title
from benchmarks.conftest import DEVICE
from benchmarks.peers import peer
from fastmp.ops import OPS, grouped_mlp_in, grouped_mm, swiglu
from fastmp.ops.core.registry import compute_dtype

STREAMS = "loop over 4 streams"
BMM = "torch.bmm"
IN_TWO = "fastmp in two"
TOLD = "fastmp told the sizes"


def sizes_of(experts: int, rows: int, routing: str) -> list[int]:
    """Rows of each expert. "skewed": three in ten have none, the others ever fewer: shares 1, 1/2, 1/3 ..."""
    if routing == "balanced":
        return [rows // experts + (expert < rows % experts) for expert in range(experts)]
    shares = [0 if expert % 10 in (2, 5, 8) else 1 / (1 + expert) for expert in range(experts)]
    sizes = [int(rows * share / sum(shares)) for share in shares]
    sizes[0] += rows - sum(sizes)
    return sizes


class _Streams:
    """Work of a loop on a few streams in turn; on a CPU there is one."""

    def __init__(self, device: str, count: int) -> None:
        on_gpu = torch.device(device).type == "cuda" and count > 1
        self.streams = [torch.cuda.Stream(device) for _ in range(count)] if on_gpu else []

    def __enter__(self) -> _Streams:
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        return self

    def turn(self, number: int) -> contextlib.AbstractContextManager:
        if not self.streams:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.streams[number % len(self.streams)])

    def __exit__(self, *error: object) -> None:
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)


def loop(sizes: Sequence[int], device: str, streams: int = 1) -> Callable[[Tensor, Tensor], Tensor]:
    """One product of torch after another, each writing its rows of one result: nothing is joined later."""
    spans = [(e, s, t) for e, (s, t) in enumerate(pairwise(accumulate(sizes, initial=0))) if s < t]
    run = _Streams(device, streams)

    class Loop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            y = x.new_empty(len(x), w.shape[1])
            with run:
                for e, start, end in spans:
                    with run.turn(e):
                        torch.mm(x[start:end], w[e].t(), out=y[start:end])
            return y

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            dx, dw = torch.empty_like(x), torch.zeros_like(w)
            with run:
                for e, start, end in spans:
                    with run.turn(e):
                        torch.mm(grad[start:end], w[e], out=dx[start:end])
                        torch.mm(grad[start:end].t(), x[start:end], out=dw[e])
            return dx, dw

    return Loop.apply


def _operands(
    shape: tuple[int, int, int, int], routing: str, dtype: torch.dtype, device: str, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
    """x, w, offsets, a gradient of the result, sizes."""
    experts, rows, n, k = shape
    random = normal(dtype, device, seed)
    sizes = sizes_of(experts, rows, routing)
    offsets = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)
    return random(rows, k), random(experts, n, k).mul_(k**-0.5), offsets, random(rows, n), sizes


def _by_torch(x: Tensor, w: Tensor, offsets: Tensor) -> Callable[[], Tensor] | None:
    """torch's own grouped product: F.grouped_mm, before that torch._grouped_mm (bfloat16 only on a GPU)."""
    call = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))
    if call is None or (x.is_cuda and x.dtype != torch.bfloat16):
        return None
    return lambda: call(x, w.transpose(1, 2), offs=offsets)


def by_quack(gemm: Callable[..., Tensor], offsets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return quack's GEMM over experts, tuned by quack, in both directions."""
    starts = F.pad(offsets, (1, 0))

    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return gemm(x, w.transpose(1, 2), cu_seqlens_m=starts)

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return gemm(grad, w, cu_seqlens_m=starts), gemm(grad.t(), x, cu_seqlens_k=starts)

    return Grouped.apply


def grouped_mm_case(
    experts: int, rows: int, n: int, k: int, routing: str, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    shape = experts, rows, n, k
    x, w, offsets, grad, sizes = _operands(shape, routing, dtype, device, seed)
    x.requires_grad_(), w.requires_grad_()
    one_by_one = loop(sizes, device)
    rivals: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: grouped_mm(x, w, offsets),
        EAGER: lambda: one_by_one(x, w),
    }
    if (by_torch := _by_torch(x, w, offsets)) is not None:
        rivals[TORCH] = by_torch
    if len(set(sizes)) == 1:
        rivals[BMM] = lambda: torch.bmm(x.unflatten(0, (experts, -1)), w.transpose(1, 2)).flatten(0, 1)
    if torch.device(device).type == "cuda":
        in_streams = loop(sizes, device, 4)
        rivals[STREAMS] = lambda: in_streams(x, w)
        rivals[TOLD] = lambda: grouped_mm(x, w, offsets, sizes=sizes)
    if (gemm := peer(QUACK, "quack.gemm_interface:gemm", device)) is not None:
        quack = by_quack(gemm, offsets)
        rivals[QUACK] = lambda: quack(x, w)
    product = OPS["grouped_mm"].flops(x, w, offsets, False)
    return Case(
        title("grouped_mm", (*shape, routing), dtype),
        (x, w),
        grad,
        rivals,
        OPS["grouped_mm"].traffic(x, w, offsets, False),
        OPS["grouped_mm"].traffic(grad, w, offsets, True) + OPS["grouped_mm_wgrad"].traffic(grad, x, offsets),
        flops=(product, 2 * product),
    )


def grouped_wgrad_case(
    experts: int, rows: int, n: int, k: int, routing: str, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    """grad^T x of each expert, added to a sum in float32."""
    shape = experts, rows, n, k
    x, w, offsets, grad, sizes = _operands(shape, routing, dtype, device, seed)
    totals = torch.zeros(w.shape, dtype=compute_dtype(dtype), device=device)
    spans = [(e, s, t) for e, (s, t) in enumerate(pairwise(accumulate(sizes, initial=0))) if s < t]

    def ours() -> Tensor:
        torch.ops.fastmp.grouped_mm_wgrad_(totals, grad, x, offsets)
        return totals

    def one_by_one() -> Tensor:
        for e, start, end in spans:
            totals[e] += grad[start:end].t() @ x[start:end]
        return totals

    def fused() -> Tensor:  # the product goes on from the sum in float32
        for e, start, end in spans:
            torch.ops.fastmp.accumulate_weight_grad_(totals[e], grad[start:end], x[start:end])
        return totals

    rivals: dict[str, Callable[[], Tensor]] = {OURS: ours, EAGER: one_by_one, "loop of addmm": fused}
    call = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None))
    if call is not None and not (x.is_cuda and dtype != torch.bfloat16):
        rivals[TORCH] = lambda: totals.add_(call(grad.t(), x, offs=offsets))
    if (add := peer(QUACK, "quack.gemm_interface:gemm_add_inplace", device)) is not None:
        starts = F.pad(offsets, (1, 0))
        rivals[QUACK] = lambda: (add(grad.t(), x, totals, cu_seqlens_k=starts), totals)[1]
    op = OPS["grouped_mm_wgrad_"]
    name = title("grouped_mm wgrad", (*shape, routing), dtype)
    costs = op.traffic(totals, grad, x, offsets), op.flops(totals, grad, x, offsets)
    return Case(name, (x, grad), grad, rivals, costs[0], 0, flops=(costs[1], 0))


def mlp_in_case(
    experts: int, rows: int, n: int, k: int, routing: str, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    """swiglu of the first product; n counts gate and up."""
    shape = experts, rows, n, k
    x, w, offsets, grad, sizes = _operands(shape, routing, dtype, device, seed)
    grad = grad[:, : n // 2].contiguous()
    x.requires_grad_(), w.requires_grad_()
    one_by_one = loop(sizes, device)

    def activated(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up

    rivals: dict[str, Callable[[], Any]] = {
        OURS: lambda: grouped_mlp_in(x, w, offsets, form="silu", gated=True),
        IN_TWO: lambda: swiglu(grouped_mm(x, w, offsets)),
        EAGER: lambda: activated(one_by_one(x, w)),
    }
    if (by_torch := _by_torch(x, w, offsets)) is not None:
        rivals[TORCH] = lambda: activated(by_torch())
    op, product = OPS["grouped_mlp_in"], OPS["grouped_mm"].flops(x, w, offsets, False)
    return Case(
        title("grouped_mlp_in", (*shape, routing), dtype),
        (x, w),
        grad,
        rivals,
        op.traffic(x, w, None, offsets, "silu", True, False),
        OPS["grouped_mm"].traffic(x, w, offsets, False) + OPS["grouped_mm_wgrad"].traffic(grad, x, offsets),
        flops=(product, 2 * product),
    )


# Experts, rows, N, K. Large: DeepSeek-V3 over 64 ranks, Qwen3-235B over 8, Mixtral alone and one of 8 shards.
LARGE = (
    (4, 32768, 4096, 7168),
    (4, 32768, 7168, 2048),
    (16, 65536, 3072, 4096),
    (8, 16384, 28672, 4096),
    (8, 16384, 4096, 14336),
    (8, 16384, 3584, 4096),
)
# Fine-grained: Qwen3-30B, 4096 and 32768 tokens; and one token an expert, where weights are read and no more.
FINE = ((128, 32768, 1536, 2048), (128, 32768, 2048, 768), (128, 262144, 1536, 2048))
DECODE = (128, 128, 2048, 7168)
CPU = (8, 4096, 4096, 1024)


def _routed(shapes: Sequence[tuple], routing: str = "balanced") -> tuple[tuple, ...]:
    return tuple((*shape, routing) for shape in shapes)


_ALL = (*_routed(LARGE), *_routed(FINE), *_routed(FINE[:1], "skewed"), *_routed([DECODE]))
WORKLOADS = (
    Workload(
        "grouped_mm",
        grouped_mm_case,
        cpu=(*_routed([CPU]), *_routed([CPU], "skewed")),
        cuda=_ALL,
        rivals=(OURS, TOLD, EAGER, STREAMS, TORCH, QUACK, BMM),
        dtypes=(torch.bfloat16, torch.float32) if DEVICE == "cpu" else (torch.bfloat16,),
        tiny=(4, 36, 16, 8, "balanced"),
    ),
    Workload(
        "grouped_mm wgrad",
        grouped_wgrad_case,
        cpu=_routed([CPU]),
        cuda=_ALL[:-1],
        rivals=(OURS, EAGER, "loop of addmm", TORCH, QUACK),
        directions=("forward",),
        dtypes=(torch.bfloat16,),
        tiny=(4, 36, 16, 8, "balanced"),
    ),
    Workload(
        "grouped_mlp_in",
        mlp_in_case,
        cpu=_routed([CPU]),
        cuda=(*_routed(LARGE[3:4]), *_routed(FINE)),
        rivals=(OURS, IN_TWO, EAGER, TORCH),
        dtypes=(torch.bfloat16,),
        tiny=(4, 36, 16, 8, "skewed"),
    ),
)
# Where a CPU has a matrix unit (AMX), torch runs at half of its rate: there is no factor of three left.
_FACTOR = 1.0 if torch.cpu._is_amx_tile_supported() else 3.0
GOALS = (CpuGoal("grouped_mm", "bfloat16", "forward", OURS, _FACTOR, _FACTOR, over=TORCH),)
SHAPES = {
    "grouped_mm": (*LARGE, *FINE, DECODE),
    "grouped_mm_bias": (LARGE[0], FINE[0]),
    "grouped_mm_wgrad": (LARGE[0], FINE[0]),
    "grouped_mm_wgrad_": (*LARGE, *FINE),
    "grouped_mlp_in": (LARGE[3], *FINE),
}


def arguments(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`, rows spread evenly."""
    x, w, offsets, grad, _ = _operands(shape, "balanced", dtype, device, seed)
    if op == "grouped_mm":
        return x, w, offsets, False
    if op == "grouped_mm_bias":
        return x, w, w[:, :, 0].contiguous(), offsets, False
    if op == "grouped_mlp_in":
        return x, w, None, offsets, "silu", True, True
    if op == "grouped_mm_wgrad":
        return grad, x, offsets
    return torch.zeros(w.shape, dtype=compute_dtype(dtype), device=device), grad, x, offsets
