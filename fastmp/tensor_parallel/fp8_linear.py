"""FP8 linear layers: quantised operands, GEMMs in both directions, and their collectives.

    forward    quantise X; (all-gather X in FP8); GEMM with the FP8 weight
    dgrad      quantise dY; GEMM with the transposed FP8 weight; (all-reduce or reduce-scatter dX)
    wgrad      dequantise X, exactly; GEMM in the dtype of the layer, added to `main_grad`

Between forward and backward the layer keeps its input in FP8: half the memory of BF16, and the wgrad is the
gradient of the function that was computed. Blocks of an activation lie within a row, so that quantising
commutes with gathering, splitting and permuting rows, bit for bit.

T tokens (all leading dims), I this rank's inputs, O this rank's outputs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from fastmp.config.precision import Fp8Recipe
from fastmp.distributed.collectives import (
    all_gather,
    all_reduce_,
    group_size,
    reduce_scatter,
)
from fastmp.ops import dequantize_rows, linear_fp8, quantize_rows, quantize_weight
from fastmp.ops.core.fp8 import E4M3, E5M2
from fastmp.ops.core.registry import autocast
from fastmp.ops.wgrad import MainGrad, kept_operands, weight_grad
from fastmp.tensor_parallel.attributes import HookTraits, mark_hook
from fastmp.tensor_parallel.linear import gradient_of

__all__ = [
    "GRAD_DTYPES", "QuantizedWeight", "block_of", "fp8_linear", "native_block",
    "quantized", "quantized_parameters", "quantized_weights",
]  # fmt: skip

GRAD_DTYPES = {"e4m3": E4M3, "e5m2": E5M2}


def native_block(device: torch.device | str | None) -> int:
    """Return the block of the FP8 GEMMs of a device: 32 (MXFP8) on Blackwell GPUs, else 128."""
    where = torch.device("cpu" if device is None else device)
    if where.type != "cuda":
        return 128
    major, minor = torch.cuda.get_device_capability(where)
    return block_of(10 * major + minor)


def block_of(arch: int) -> int:
    """Return the block of the FP8 GEMMs of a compute capability, as one number (90 is 9.0)."""
    return 32 if arch >= 100 else 128


class Operand(NamedTuple):
    """A quantised weight in one direction: q (..., N, K) and its scales (..., N / block, K / block)."""

    q: Tensor
    scale: Tensor


class QuantizedWeight:
    """The FP8 copies of a weight, one for each direction, made again when the weight has changed.

    They keep their addresses, so that CUDA graphs read what was quantised last.

    Args:
        recipe: block and formats.

    Example:
        weight = torch.nn.Parameter(torch.randn(128, 256))
        fp8 = QuantizedWeight(Fp8Recipe())
        fp8.refresh(weight)
        fp8.forward.q.shape, fp8.dgrad.q.shape  # (128, 256), (256, 128)
    """

    def __init__(self, recipe: Fp8Recipe) -> None:
        self.recipe = recipe
        self._made: tuple[Tensor, Tensor, Tensor] | None = None
        self._seen: tuple[int, int] | None = None

    @torch.no_grad()
    def refresh(self, weight: Tensor) -> None:
        """Quantise `weight` (N, K) or (L, N, K) unless its copies are those of its present version."""
        seen = weight.data_ptr(), weight._version
        if seen == self._seen:
            return
        made = quantize_weight(weight.detach(), block=self.recipe.block)
        old = self._made
        if old is None or (old[0].shape, old[0].device) != (weight.shape, weight.device):
            self._made = made
        else:
            for copy, new in zip(old, made, strict=True):
                copy.copy_(new)
        self._seen = seen

    def place(self, q: Tensor, q_t: Tensor, scale: Tensor) -> None:
        """Keep the copies in these tensors from now on; the next `refresh` or the caller writes them."""
        self._made, self._seen = (q, q_t, scale), None

    def mark_fresh(self, weight: Tensor) -> None:
        """Take the copies, which the caller has written, for those of the present version of `weight`."""
        self._seen = weight.data_ptr(), weight._version

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, its transpose and their scales; () before they are made."""
        return self._made or ()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies and their scales."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def forward(self) -> Operand:
        """The weight (..., O, I), by which activations are multiplied."""
        assert self._made is not None, "refresh comes first"
        q, _, scale = self._made
        return Operand(q, scale)

    @property
    def dgrad(self) -> Operand:
        """The transposed weight (..., I, O), by which upstream gradients are multiplied."""
        assert self._made is not None, "refresh comes first"
        _, q_t, scale = self._made
        return Operand(q_t, scale.transpose(-1, -2))

    def quantize_grad(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise upstream gradients (T, O) in the format of the recipe."""
        return quantize_rows(grad, block=self.recipe.block, dtype=GRAD_DTYPES[self.recipe.grad])

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        return QuantizedWeight(self.recipe)

    def __reduce__(self) -> tuple[Any, ...]:
        return QuantizedWeight, (self.recipe,)


class _Refresh:
    """Forward pre-hook: quantise the weights of a module that have changed since its last forward."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        copies: Any = module.fp8
        for name in self._names:
            copies[name].refresh(getattr(module, name))


def quantized(module: nn.Module, recipe: Fp8Recipe, *names: str) -> dict[str, QuantizedWeight]:
    """Return copies of the parameters `names`, the dict `fp8` of a module, refreshed before its forwards.

    CUDA graphs of layers call the hook next to a replay; a full-iteration graph contains it.
    """
    module.register_forward_pre_hook(mark_hook(_Refresh(names), HookTraits(replayed=True, in_step=True)))
    return {name: QuantizedWeight(recipe) for name in names}


def quantized_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters inside `modules` that have FP8 copies."""
    return [param for param, _ in _pairs(modules)]


def quantized_weights(modules: Iterable[nn.Module]) -> dict[nn.Parameter, QuantizedWeight]:
    """Return the parameters inside `modules` that one module alone reads, by their FP8 copies."""
    pairs = list(_pairs(modules))
    readers = Counter(id(param) for param, _ in pairs)
    return {param: copies for param, copies in pairs if readers[id(param)] == 1}


def _pairs(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Parameter, QuantizedWeight]]:
    for module in (module for root in modules for module in root.modules()):
        copies = getattr(module, "fp8", None)
        if isinstance(copies, dict):  # other libraries have flags of this name
            for name, each in copies.items():
                yield getattr(module, name), each


@torch.compiler.disable(reason="FP8 copies of weights are no tensors of the graph")
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    fp8: QuantizedWeight,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Apply a linear layer with FP8 GEMMs: forward and dgrad in FP8, wgrad in the dtype of x.

    With a group it is column-parallel: see `column_linear`. The sequence is gathered in FP8.

    Args:
        x: (..., I), the same on every rank of `group`, or its sequence shard along dim 0.
        weight, bias: this rank's shards (O, I) and (O,).
        fp8: the quantised `weight`, refreshed.
        group: None: no communication.
        sequence_parallel: x is this rank's sequence shard; only the shard is saved, in FP8.

    Raises:
        ValueError: the block does not divide I or O.

    Example:
        weight = torch.nn.Parameter(torch.randn(128, 256))
        fp8 = QuantizedWeight(Fp8Recipe())
        fp8.refresh(weight)
        fp8_linear(torch.randn(4, 256), weight, None, fp8).sum().backward()
    """
    (x,) = autocast(x)
    leaf, main_grad, defer = gradient_of("fp8_linear", weight, weight)
    group = None if group_size(group) == 1 else group
    gathers = group is not None and sequence_parallel
    # Quantise this rank's rows; while layers run again for backward, their copy is all that is needed.
    x_TI = x.reshape(-1, x.shape[-1])
    rows = quantize_rows(x_TI.detach(), block=fp8.recipe.block)
    x_TI, kept = kept_operands(x_TI, *rows)
    y = _Fp8Linear.apply(x_TI, *rows, leaf, bias, fp8, group, gathers, kept, main_grad, defer)
    lead = (len(x) * group_size(group), *x.shape[1:-1]) if gathers else x.shape[:-1]
    return y.view(*lead, y.shape[1])


@torch.compiler.disable(reason="FP8 copies of weights are no tensors of the graph")
def _gathered(
    rows: tuple[Tensor, Tensor], group: dist.ProcessGroup, overlap: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[dist.Work | None, ...]]:
    """All-gather quantised rows and their scales as bytes, which every backend can send."""
    parts = [all_gather(part.flatten().view(torch.uint8), group, overlap) for part in rows]
    q, s = (
        joined.view(part.dtype).view(-1, part.shape[1]) for (joined, _), part in zip(parts, rows, strict=True)
    )
    return (q, s), tuple(work for _, work in parts)


class _Fp8Linear(Function):
    @staticmethod
    def forward(ctx, x_TI, q, s, weight, bias, fp8, group, gathers, kept, main_grad, defer):
        ctx.fp8, ctx.group, ctx.gathers, ctx.kept = fp8, group, gathers, kept
        ctx.main_grad, ctx.defer, ctx.dtype = main_grad, defer, x_TI.dtype
        rows = q, s
        if kept is None and ctx.needs_input_grad[3]:
            ctx.save_for_backward(*rows)
        # All-gather the rows over the group, in FP8; multiply.
        if gathers:
            rows, _ = _gathered(rows, group)
        y_TO = linear_fp8(*rows, *fp8.forward, out_dtype=x_TI.dtype)
        return y_TO if bias is None else y_TO.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TO):
        fp8, group, gathers = ctx.fp8, ctx.group, ctx.gathers
        need_x, need_weight, need_bias = (ctx.needs_input_grad[i] for i in (0, 3, 4))
        works: tuple[dist.Work | None, ...] = ()
        rows: Any = (ctx.kept or ctx).saved_tensors if need_weight else ()
        grad_work = None
        grad_x = grad_weight = grad_bias = None
        need_now = need_weight and ctx.defer is None
        # 1. All-gather the saved rows for wgrad, overlapped with the dgrad GEMM.
        if need_now and gathers:
            rows, works = _gathered(rows, group, overlap=True)
        # 2. Quantise the gradient; dgrad, and its all-reduce or reduce-scatter, overlapped with wgrad.
        if need_x:
            grad_x = linear_fp8(*fp8.quantize_grad(grad_TO), *fp8.dgrad, out_dtype=ctx.dtype)
            if gathers:
                grad_x, grad_work = reduce_scatter(grad_x, group, overlap=True)
            elif group is not None:
                grad_work = all_reduce_(grad_x, group, overlap=True)
        if need_bias:
            grad_bias = grad_TO.sum(0)
        # 3. wgrad from the dequantised rows, now or deferred.
        for work in works:
            if work is not None:
                work.wait()
        if need_now:
            grad_weight = _wgrad(grad_TO, rows, None, ctx.main_grad)
        elif need_weight:
            ctx.defer(functools.partial(_wgrad, grad_TO, rows, group if gathers else None, ctx.main_grad))
        if grad_work is not None:
            grad_work.wait()
        return grad_x, None, None, grad_weight, grad_bias, None, None, None, None, None, None


def _wgrad(
    grad_TO: Tensor,
    rows: tuple[Tensor, Tensor],
    group: dist.ProcessGroup | None,
    main_grad: MainGrad,
) -> Tensor | None:
    """Compute the weight gradient; with a group, all-gather the rows first."""
    if group is not None:
        rows, _ = _gathered(rows, group)
    return weight_grad(grad_TO, dequantize_rows(*rows, dtype=grad_TO.dtype), main_grad)
