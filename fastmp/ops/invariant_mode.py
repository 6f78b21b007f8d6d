"""A mode in which a token's result depends on nothing else in the batch.

Libraries choose tiles, and so the order of sums, by shapes: the same token has other last bits in another
batch, with other padding, or as a decode step. Inside `batch_invariant()` GEMMs, grouped GEMMs and attention
on a CPU compute by `exact.py`, whose bits depend on no order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.ops import exact
from fastmp.ops.core.registry import OPS

__all__ = ["batch_invariant", "exactly", "is_batch_invariant", "plainly", "with_value"]

_state = threading.local()
# ops whose references multiply by torch's products, and ops that are not supported
PRODUCTS = ("few_rows_linear", "grouped_mm", "grouped_mm_bias", "grouped_mlp_in")
OTHERS = ("grouped_mm_lora", "linear_fp8", "grouped_mm_fp8", "grouped_mlp_in_fp8")


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Enter a mode in which a token's hidden states and log-probabilities depend on its own sequence alone.

    Their bits are the same in every batch, with any padding, in packed documents, with a KV cache, and at
    every tensor-parallel size. That holds for forwards on a CPU in float32, bfloat16 or float16, of a `GPT`
    and of log-probabilities by `linear_log_probs`; over tensor-parallel ranks, each expert must be on one
    rank (`etp` 1), and none be dropped. GEMMs are as accurate as those of float32, see `exact.py`, and take
    some twenty times as long. Gradients are correct, but not batch-invariant.

    Raises:
        ValueError: inside, for float64 or other devices.

    Example:
        from fastmp.ops import batch_invariant

        layer, tokens = torch.nn.Linear(64, 64), torch.randn(33, 64)
        with batch_invariant():
            assert torch.equal(layer(tokens)[:1], layer(tokens[:1]))
    """
    before = is_batch_invariant()
    _state.enabled = True
    try:
        with _Mode(), _InvariantAttention():
            yield
    finally:
        _state.enabled = before


def is_batch_invariant() -> bool:
    """Return True inside `batch_invariant`; False for a compiler, which sees no mode."""
    if torch.compiler.is_compiling():
        return False
    return getattr(_state, "enabled", False)


@contextmanager
def exactly(x: Tensor) -> Iterator[None]:
    """Enter a context for functions of `exact.py` on a tensor like x: no gradients, torch's own products.

    Raises:
        ValueError: for a dtype or a device that the mode does not support.
    """
    check_tensor(x)
    with plainly(), torch.no_grad():
        yield


@contextmanager
def plainly() -> Iterator[None]:
    """Enter a context in which torch's own products serve, for gradients."""
    before = getattr(_state, "plain", False)
    _state.plain = True
    try:
        yield
    finally:
        _state.plain = before


def with_value(make: Callable[[], Tensor], value: Tensor) -> Tensor:
    """Return `value`, with the gradient of `make()`, which is not called where no gradient is asked for."""
    if not torch.is_grad_enabled():
        return value
    result = make()
    return _WithValue.apply(result, value.to(result.dtype))


class _WithValue(Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def check_tensor(x: Tensor) -> None:
    """Raise ValueError for a dtype or a device that the mode does not support."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"batch_invariant: expected float32, bfloat16 or float16 on a CPU, got {x.dtype} on {x.device}"
        )


class _Mode(TorchDispatchMode):
    """Serves products of matrices by exact ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(_state, "plain", False):
            return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        wide = func in _ROWWISE and args[0].dtype == torch.float64  # of sampling
        if handler is not None and not wide:
            return handler(*args, **kwargs)
        name = func._schema.name.partition("::")[2] if func.namespace == "fastmp" else ""
        if name in PRODUCTS:
            check_tensor(args[0])
            with self:
                return OPS[name].implementations["reference"](*args, **kwargs)
        if name in OTHERS:
            raise ValueError(
                f"batch_invariant: {name} is not supported; expected products without FP8 and LoRA"
            )
        return func(*args, **kwargs)


def _product(a: Tensor, b: Tensor) -> Tensor:
    check_tensor(a)
    return exact.exact_product(a, b.mT)


def _mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    product = _product(a, b).to(a.dtype)
    return product if out is None else out.copy_(product)


def _addmm(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    total = (_product(a, b) * alpha + bias.double() * beta).to(a.dtype)
    return total if out is None else out.copy_(total)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_tensor(x)
    y = exact.exact_product(x.reshape(-1, x.shape[-1]), weight)
    y = y if bias is None else y + bias.double()
    return y.to(x.dtype).view(*x.shape[:-1], len(weight))


def _sigmoid(x: Tensor) -> Tensor:
    """Serve the sigmoid, of which torch computes the last elements of a tensor by another function."""
    check_tensor(x)
    small = exact.exp(-x.double().abs())
    return (small.where(x < 0, 1.0) / (1 + small)).to(x.dtype)


def _softmax(x: Tensor, dim: int, half_to_float: bool, *, logarithm: bool = False) -> Tensor:
    check_tensor(x)
    rows = x.double().movedim(dim, -1)
    top = rows.amax(-1, keepdim=True)
    below = rows - top.masked_fill(top == -torch.inf, 0)
    p = exact.exp(below)
    total = exact.exact_sum(p)[..., None]
    result = below - exact.log(total) if logarithm else p / total
    return result.movedim(-1, dim).to(torch.float32 if half_to_float else x.dtype).contiguous()


def _mv(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a, b[:, None])[:, 0]


class _InvariantAttention(TorchFunctionMode):
    """Serves `scaled_dot_product_attention`, which models of transformers call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or getattr(_state, "plain", False):
            return func(*args, **kwargs)
        value = _attention(*args, **kwargs)
        with plainly():
            return with_value(lambda: func(*args, **kwargs), value)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p > 0.0:
        raise ValueError(f"batch_invariant: attention dropout is not supported, got {dropout_p}")
    with exactly(query):
        bias = None
        if is_causal:
            seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
            bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        elif attn_mask is not None and attn_mask.dtype == torch.bool:
            bias = torch.zeros(attn_mask.shape, dtype=torch.float64).masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            hidden = attn_mask <= torch.finfo(attn_mask.dtype).min / 2
            bias = attn_mask.double().masked_fill(hidden, -torch.inf)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        repeats = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        key, value = (x.repeat_interleave(repeats, -3) if repeats > 1 else x for x in (key, value))
        return exact.attention(query, key, value, bias, None, factor).to(query.dtype)


aten = torch.ops.aten
_ROWWISE = (aten.sigmoid.default, aten._softmax.default, aten._log_softmax.default)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.mm.out: _mm,
    aten.bmm.default: _mm,
    aten.bmm.out: _mm,
    aten.linear.default: _linear,  # where autograd has not decomposed it
    aten.sigmoid.default: _sigmoid,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: partial(_softmax, logarithm=True),
    aten.mv.default: _mv,
    aten.addmm.default: _addmm,
    aten.addmm.out: _addmm,
    aten.baddbmm.default: _addmm,
}
