"""`python -m benchmarks.predict --device h200`: what gpu_check should measure, said before it is measured.

For every row but whole training steps: the bytes that must move, the FLOPs, the floor they set, how many
kernels are launched, and the time that is expected. Bytes, FLOPs and launches are counted: the ops run on
tensors without data, and kernels are not started. Two things are estimates: the rates in `MACHINES`, and the
shares of its floor that each kernel is expected to reach (`SHARE`, `SHARES`). Shares come from what the
compiled kernels show (tiles, registers, programs on a multiprocessor, bytes under way) and from published
times of similar ones. Those of norms and of the router, whose launches were changed after the first
measurement, come from that measurement, on an H200.

The committed files benchmarks/results/predicted_<device>.json are what the command writes with --out.
`benchmarks.report` shows them beside a measured file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from benchmarks import gpu_rows
from benchmarks.cases import is_ours
from benchmarks.gpu_rows import DTYPE, Item
from benchmarks.measure import FP8, Ceilings, multiplied_in, name_of
from fastmp.nn.moe import router
from fastmp.nn.moe.experts import GroupedExperts
from fastmp.ops import OPS, chunked_head, chunked_loss
from fastmp.ops.core import launcher
from fastmp.ops.cross_entropy_triton import loss_grad_bytes, loss_grad_prefers_cuda
from fastmp.ops.grouped_mm_tiles import gemm_tiles, overlaps_tiles, row_class, wgrad_tiles

RESULTS = Path(__file__).parent / "results"
_ARCH, _SHARED = 90, 228 << 10  # of an H100 and an H200
# Cycles of a tile of a grouped GEMM outside of its K steps, estimated from compiled code: with nothing of the
# next tile under way, and with its loads.
_EXPOSED, _OVERLAPPED = 5000, 2900
# Of a wgrad: to find the next tile, and to copy this one for the TMA unit; in float32 in two halves, of which
# the second waits until the first is read.
_STORED, _ADDED = 1500, 3000
NODE_US = 1.2  # of a small kernel within a CUDA graph; published: 1.1 to 1.3


@dataclass(frozen=True)
class Machine:
    """A GPU as `environment` names it, and its rates: those reached, not those of a data sheet."""

    device: str
    copy_gbs: float
    gemm_tflops: float

    @property
    def ceilings(self) -> Ceilings:
        # FP8 tensor cores multiply twice as fast as those of 16 bits
        rates = {DTYPE: self.gemm_tflops, FP8: 2 * self.gemm_tflops, torch.float32: FLOAT32_TFLOPS}
        return Ceilings(self.copy_gbs, {name_of(dtype): rate for dtype, rate in rates.items()})


FLOAT32_TFLOPS = 51.3  # outside of tensor cores, as an H200 measured
# Copies on an H100 were published (3.00 TB/s of 3.35). Products of random numbers run at one rate on both.
MACHINES = {"h100": Machine("NVIDIA H100", 3000.0, 788.0), "h200": Machine("NVIDIA H200", 4300.0, 788.0)}


Share = float | tuple[float, float]  # of the roofline; a pair is that of products and that of bytes


def _gemm(x: Tensor, w: Tensor, *rest: Any, gated: bool = False) -> float:
    """Return the share of grouped GEMMs, by the rows of an expert, the tile, and how long a sum is (K).

    A multiprocessor of Hopper multiplies 2048 pairs of numbers a cycle. A tile costs some cycles outside of
    its K steps, fewer where the next tile is loaded meanwhile. Few rows are bound by the bytes of weights.
    """
    rows, num_terms = len(x) / len(w), x.shape[1]
    if rows <= 16:
        return 0.84  # of the bytes of the weights
    if rows <= 256:
        return 0.72 if num_terms >= 1024 else 0.8
    columns = w.shape[1] * w.shape[2] // num_terms // (1 + gated)
    tile = gemm_tiles(row_class(len(x), len(w)), columns, num_terms, 2, _ARCH, gated)
    each_step = tile.block_m * tile.block_n * (1 + gated) * tile.block_k / 2048
    cycles = each_step * -(-num_terms // tile.block_k)
    outside = _OVERLAPPED if overlaps_tiles(_ARCH, "silu" if gated else "none", gated, False) else _EXPOSED
    return 0.84 * cycles / (cycles + outside)


def _fp8(q: Tensor, s: Tensor, w: Tensor, *rest: Any) -> float:
    """Return the share of FP8 GEMMs of the FP8 roofline.

    The sum of each 128 terms is added in FP32 registers, which costs Hopper about a third of that rate.
    """
    rows = len(q) / (len(w) if w.dim() == 3 else 1)
    return 0.4 if rows <= 256 else 0.6


def _mlp_in(x: Tensor, w: Tensor, bias: Any, offsets: Tensor, form: str, gated: bool, *rest: Any) -> float:
    return _gemm(x, w, gated=gated)


def _weight_gradient(grad: Tensor, x: Tensor, offsets: Tensor, added: bool = False) -> Share:
    """Return the shares of weight gradients: of products, by the rows of an expert; and of bytes.

    A persistent program copies a tile to shared memory between two tiles' products; the TMA unit then adds or
    stores it while the next one is multiplied: the longer of products and bytes counts, not their sum.
    """
    tile = wgrad_tiles(grad.shape[1], x.shape[1], 2, _ARCH)
    steps = max(1, -(-len(grad) // len(offsets) // tile.block_k))
    cycles = steps * tile.block_m * tile.block_n * tile.block_k / 2048
    return 0.84 * cycles / (cycles + (_ADDED if added else _STORED)), 0.9


def _loss_grad(logits: Tensor, *rest: Any) -> float:
    """Return the share of loss and gradient at once: half of what is read again comes from memory."""
    columns, itemsize = logits.shape[1], logits.element_size()
    moved = loss_grad_bytes(columns, itemsize, _SHARED)
    by = "cuda" if loss_grad_prefers_cuda(columns, itemsize, _SHARED) else "triton"
    again = moved[by] / (columns * itemsize) - 2
    return 0.9 * 2 / (2 + again / 2)


def _layer_norm(x: Tensor, *rest: Any) -> float:
    """Return the share of layer_norm, of which longer rows were measured with the wide kernel, as now."""
    return 0.85 if x.shape[-1] <= 8192 else 0.68


def _norm_backward(long: float) -> Callable[..., float]:
    """Return the share of a norm's backward pass; `long` is that of rows that are read twice.

    Both were measured, the latter with the blocks of now, before barriers were added to them.
    """
    return lambda grad, *rest: 0.84 if grad.shape[-1] <= 8192 else long


def _adamw(param: Tensor, *rest: Any) -> float:
    """The share of a step of AdamW: random bits for the small state take twice the instructions."""
    return 0.9 if param.dtype == torch.bfloat16 else 0.94


def _distillation(*arguments: Any) -> float:
    """Return the share of a divergence: that of a mixture takes as long to compute as its bytes do."""
    beta = next(argument for argument in arguments if isinstance(argument, float))
    return 0.9 if beta in (0, 1) else 0.7


SHARE = 0.9  # of the roofline, of an op that is not in SHARES
SHARES: dict[str, float | Callable[..., Share]] = {
    name: share
    for share, names in {
        0.93: "bias_dropout_add_backward bias_gelu clamped_swiglu gated_activation",
        0.92: "bias_dropout_add bias_dropout_add_into cross_entropy cross_entropy_stats log_probs_stats rope"
        " rope_ scaled_masked_softmax scaled_masked_softmax_backward",
        0.91: "bias_gelu_backward clamped_swiglu_backward gated_activation_backward stash_gate_backward_",
        0.88: "dequantize_rows",
        0.85: "few_rows_linear gated_activation_quantized quantize_rows rms_norm_quantized",
        0.84: "exchange_pull exchange_push latent_norm_rope_backward permute unpermute unpermute_add"
        " unpermute_add_into unpermute_backward unpermute_backward_into unpermute_into",
        0.8: "permute_quantized",
        0.75: "quantize_weight",  # half of what is written is transposed in shared memory
        0.5: "block_rows exchange_barrier exchange_counts exchange_places permutation stash_release"
        " stash_reserve",
        0.145: "topk_router_backward",  # 14.3 and 7.8 us, as measured
        # 33 and 21 us for 256 and 128 experts were measured while one program added all strips: less its part
        0.075: "topk_router",
        _adamw: "adamw_",
        _distillation: "distillation_grad_ distillation_sums",
        _fp8: "grouped_mlp_in_fp8 grouped_mm_fp8 linear_fp8",
        _gemm: "grouped_mm grouped_mm_bias grouped_mm_lora",
        _layer_norm: "layer_norm",
        _loss_grad: "cross_entropy_loss_grad_",
        _mlp_in: "grouped_mlp_in",
        _norm_backward(0.38): "layer_norm_backward",
        _norm_backward(0.48): "rms_norm_backward",
        _weight_gradient: "grouped_mm_wgrad",
        lambda total, *rest: _weight_gradient(*rest[:3], added=True): "grouped_mm_wgrad_",
        lambda x, w, *rest: _gemm(x, w, gated=True): "stash_mlp_in",
        lambda x, w, *rest: _gemm(x[: rest[-1]], w): "stash_mm",
        lambda grad, x, offsets, *rest: _weight_gradient(x[: rest[-1]], x, offsets): "stash_wgrad",
        lambda total, grad, x, offsets, *rest: _weight_gradient(
            x[: rest[-1]], x, offsets, added=True
        ): "stash_wgrad_",
    }.items()
    for name in names.split()
}
LEAST_US = {
    **dict.fromkeys(("cross_entropy_merge", "exchange_barrier", "stash_release", "stash_reserve"), 3.0),
    **dict.fromkeys(("block_rows", "exchange_counts", "exchange_places"), 4.0),
    "cross_entropy_promise_": 8 * NODE_US,  # by eight kernels of torch
    "permutation": 12.0,
    "topk_router": 5.0,
    "topk_router_backward": 3.0,
}
_NO_KERNEL = (
    "aten::empty", "aten::new_empty", "aten::detach", "aten::_reshape_alias", "aten::_unsafe_view",
    "aten::promote_types",
)  # fmt: skip
# The shares of what torch runs between our ops: products as the ceiling's own, attention, what moves bytes.
_PRODUCT, _ATTENTION, _OTHER = 0.95, 0.6, 0.9
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Step:
    """Cost and prediction of an op."""

    name: str
    bytes: int
    flops: int
    launches: int
    share: Share
    least_us: float
    multiplied: torch.dtype = DTYPE

    def ms(self, machine: Machine) -> float:
        products, copies = self.share if isinstance(self.share, tuple) else (self.share, self.share)
        gemm_ms, _ = machine.ceilings.floor(0, self.flops, self.multiplied)
        copy_ms, _ = machine.ceilings.floor(self.bytes, 0, self.multiplied)
        least_ms = max(self.least_us, self.launches * NODE_US) / 1e3
        return max(gemm_ms / products, copy_ms / copies, least_ms)


class Steps(TorchDispatchMode):
    """The ops that run while it is active: ours as one step each, and kernels of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("fastmp::")
        if name in OPS:
            self.found.append(op_step(name, args))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if name.startswith("aten::") and not func.is_view and not name.startswith(_NO_KERNEL):
            tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            formula, flops, share = flop_registry.get(func._overloadpacket), 0, _OTHER
            dtype = DTYPE
            if "attention" in name:
                flops, share = _attention_flops(name, args), _ATTENTION
            elif formula is not None:
                flops, share = formula(*args, **kwargs, out_val=result), _PRODUCT * _busy(result)
                dtype = next(t.dtype for t in reversed(args) if isinstance(t, Tensor))
            self.found.append(Step(name, num_bytes, flops, 1, share, 0.0, dtype))
        return result


def _busy(product: Tensor) -> float:
    """Return the share of multiprocessors that have a tile of a product, of 128 rows and columns each."""
    *batch, rows, columns = product.shape
    tiles = math.prod(batch) * -(-rows // 128) * -(-columns // 128)
    return min(1.0, tiles / _MULTIPROCESSORS)


def _attention_flops(name: str, args: tuple) -> int:
    """Count causal attention: half of the pairs, and backward five products in place of two."""
    backward = name.endswith("backward")
    query, key, value = (tensor.shape for tensor in args[backward : backward + 3])
    forward = sdpa_flop_count(query, key, value) // 2
    return forward * 5 // 2 if backward else forward


def op_step(op: str, arguments: tuple) -> Step:
    """Return the step of one of our ops, which has the launches of its Triton kernels and of torch's."""
    entry, share = OPS[op], SHARES.get(op, SHARE)
    share = share(*arguments) if callable(share) else share
    flops = entry.flops(*arguments) if entry.flops else 0
    num_bytes, num_launches = entry.traffic(*arguments), launches(op, arguments)
    return Step(op, num_bytes, flops, num_launches, share, LEAST_US.get(op, 0.0), multiplied_in(op, DTYPE))


def launches(op: str, arguments: tuple) -> int:
    """Count the kernels of an op: Triton's and those of torch around them; one where torch serves it."""
    if "triton" not in OPS[op].implementations:
        return 1
    around = Steps()
    with mock.patch.object(launcher, "launch") as launch, around:
        OPS[op].implementations["triton"](*arguments)
    return launch.call_count + len(around.found)


def _scaled_on_a_gpu(grad: Tensor, factor: Tensor) -> Tensor:
    """Scale gradients at once, as on a GPU; torch 2.11 cannot split a fake tensor that has no rows."""
    return grad.mul_(factor.view(1))


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors made inside have a shape and an address, but no data."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(FakeTensor, "data_ptr", lambda self: id(self) << 40),  # far from all others
        mock.patch.object(router, "_on_tensor_cores", lambda x, weight: x.dtype == weight.dtype == DTYPE),
        mock.patch.object(GroupedExperts, "_init"),  # draws a seed, whose value it reads
        mock.patch.object(chunked_loss, "WORKSPACE_CPU", chunked_head.WORKSPACE),
        mock.patch.object(chunked_loss, "scale_once", _scaled_on_a_gpu),
    ):
        yield


def steps_of(item: Item) -> Iterator[tuple[dict[str, Any], tuple[int, int], list[Step]]]:
    """Yield the rows of `predictions` for an item, without the columns that name it."""
    if item.phase == "kernels":
        step = op_step(item.name, item.module.arguments(item.name, item.shape, DTYPE, "cpu", 0))
        yield {}, (step.bytes, step.flops), [step]
        return
    case = item.work.case(item.shape, DTYPE, "cpu")
    for direction in reversed(item.work.directions):
        for rival in filter(is_ours, case.rivals):
            call = case.results(rival, direction)
            call()  # what it makes once is not counted
            with Steps() as counted:
                call()
            yield {"direction": direction, "rival": rival}, case.costs(direction), counted.found


def predictions(items: Sequence[Item]) -> Iterator[tuple[dict[str, Any], tuple[int, int], list[Step]]]:
    """Yield (columns, (bytes, FLOPs) of its floor, steps) for each row of ours."""
    for item in items:
        if item.phase == "kernels" and "triton" not in OPS[item.name].implementations:
            continue  # plain torch is not timed alone on a GPU
        if item.phase == "functions" and "step" in item.work.directions:
            continue
        if item.family == "attention":  # tensors without data are a CPU's, for which torch has other kernels
            continue
        with without_data():
            rows = [*steps_of(item)]
        for columns, costs, steps in rows:
            yield {"item": item.key, **item.what, **columns}, costs, steps


def _row(what: dict[str, Any], costs: tuple[int, int], steps: Sequence[Step], machine: Machine) -> dict:
    floor_ms, floor_of = machine.ceilings.floor(*costs, multiplied_in(what["item"], DTYPE))
    ms = sum(step.ms(machine) for step in steps)
    return {
        **what,
        "bytes": costs[0],
        "flops": costs[1],
        "launches": sum(step.launches for step in steps),
        "floor_ms": _short(floor_ms),
        "floor_of": floor_of,
        "ms": _short(ms),
        "of_floor": _short(floor_ms / ms),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def predicted(machines: Sequence[Machine], items: Sequence[Item]) -> list[str]:
    """Return the content of the file of each machine: a row a line."""
    rows, release = [*predictions(items)], ".".join(torch.__version__.split(".")[:2])
    texts = []
    for machine in machines:
        head = {
            "device": machine.device,
            **vars(machine.ceilings),
            "graph_node_us": NODE_US,
            "torch": release,
        }
        lines = ",\n".join(json.dumps(_row(*row, machine)) for row in rows)
        texts.append(f'{{"predicted": {json.dumps(head)},\n"rows": [\n{lines}\n]}}\n')
    return texts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predict", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--device", choices=MACHINES, nargs="+", default=[*MACHINES])
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"a folder (default {RESULTS})")
    options = parser.parse_args(arguments)
    texts = predicted([MACHINES[name] for name in options.device], gpu_rows.items())
    for name, text in zip(options.device, texts, strict=True):
        path = options.out / f"predicted_{name}.json"
        path.write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
