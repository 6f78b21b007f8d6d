"""adamw_: one AdamW step over flat buffers, in one launch that reads and writes every number once.

What varies from step to step may lie in memory of the device: the count of steps, the learning rate, the
inverse of the loss scale, the clip coefficient and whether the step is dropped. So nothing waits for the
host, and a captured CUDA graph stays right. Bytes per parameter: 28 with fp32 gradients, 30 with a 16-bit
copy of the parameters. AdamW: Loshchilov and Hutter 2019 (arXiv 1711.05101).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastmp.ops import checks, launcher
from fastmp.ops._triton import cdiv, jit, tl
from fastmp.ops.registry import register
from fastmp.profiling import traced

NUM_WARPS = 4
_VECTORS = 4  # 16-byte accesses a thread makes in each array of the main dtype
_FLOPS_PER_ELEMENT = 15
_MAIN = (torch.float64, torch.float32)
_NARROW = (torch.bfloat16, torch.float16)


def reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, *others: Any
) -> None:
    """Writes what `adamw_` says; its scalars are float64 until they meet an element."""
    low_precision_out, lr_tensor, *factors, found_inf = others[:5]
    lr, beta1, beta2, eps, weight_decay, num_decayed = others[5:]
    with torch.no_grad():
        one = torch.ones((), dtype=torch.float64, device=param.device)
        rate = lr * one if lr_tensor is None else one * lr_tensor.reshape(())
        factor = one
        for tensor in factors:
            factor = factor if tensor is None else factor * tensor.reshape(())
        count = step + 1
        logs = (count.reshape(()) * (_log(beta) * one) for beta in (beta1, beta2))
        correction1, correction2 = (-torch.expm1(log) for log in logs)
        g = grad.to(param.dtype) * factor.to(param.dtype)
        m = exp_avg + (1 - beta1) * (g - exp_avg)
        v = beta2 * exp_avg_sq + (1 - beta2) * g * g
        p = param.clone()
        p.view(-1)[:num_decayed] *= (1 - rate * weight_decay).to(p.dtype)
        denominator = v.sqrt() * correction2.rsqrt().to(v.dtype) + eps
        p -= (rate / correction1).to(p.dtype) * m / denominator
        results = [(param, p), (exp_avg, m), (exp_avg_sq, v), (step, count)]
        if low_precision_out is not None:
            results.append((low_precision_out, p.to(low_precision_out.dtype)))
        for old, new in results:
            old.copy_(new if found_inf is None else torch.where(found_inf.reshape(()) != 0, old, new))


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


@jit
def _bias_correction(count, log_beta, COMPUTE: tl.constexpr):
    """1 - beta^count = -(e^x - 1), without the cancellation that beta near one would bring."""
    x = count.to(COMPUTE) * log_beta
    series = tl.full((), 1.0, COMPUTE)
    for k in tl.static_range(15, 1, -1):
        series = 1.0 + series * (x * (1.0 / k))
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@jit
def adamw_kernel(
    param, grad, exp_avg, exp_avg_sq, step, low_precision_out, lr_tensor, inv_scale, clip_coefficient,
    found_inf, num_vectors, num_decayed, lr: tl.float64, beta1: tl.float64, beta2: tl.float64,
    log_beta1: tl.float64, log_beta2: tl.float64, eps: tl.float64, weight_decay: tl.float64,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of every array; the program that finishes last counts the step.

    The upper half of `step` is scratch: each program adds one there when it is done. The last one to do so
    writes the new count; until then nobody can see it, so all programs use the same.
    """
    COMPUTE: tl.constexpr = param.dtype.element_ty
    TICKET: tl.constexpr = 1 << 32
    # Load a block of the gradient, both averages and the parameters.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = at < tl.cast(num_vectors, tl.int64) * VECTOR - start  # a size of 2^31 is an int32 of vectors
    # Four neighbours a thread in every array: a 16-bit one must not pull the others into another layout.
    at_narrow = tl.max_contiguous(at, VECTOR)
    g = tl.load(grad + start + at_narrow, mask=inside, other=0.0).to(COMPUTE)
    m = tl.load(exp_avg + start + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + start + at, mask=inside, other=0.0)
    p = tl.load(param + start + at, mask=inside, other=0.0)

    # Scalars, all of them on the device: the step that this one is, learning rate, scale, clipping.
    done = tl.load(step)
    count = (done & (TICKET - 1)) + 1
    rate = tl.full((), lr, COMPUTE) if lr_tensor is None else tl.load(lr_tensor).to(COMPUTE)
    factor = tl.full((), 1.0, tl.float64)
    if inv_scale is not None:
        factor *= tl.load(inv_scale)
    if clip_coefficient is not None:
        factor *= tl.load(clip_coefficient)
    step_size = rate / _bias_correction(count, tl.full((), log_beta1, COMPUTE), COMPUTE)
    inv_root = 1.0 / tl.sqrt(_bias_correction(count, tl.full((), log_beta2, COMPUTE), COMPUTE))
    keep = 1.0 - rate * tl.full((), weight_decay, COMPUTE)

    # Decoupled weight decay and the update (Loshchilov and Hutter 2019).
    g *= factor.to(COMPUTE)
    m += tl.full((), 1.0 - beta1, COMPUTE) * (g - m)
    v = tl.full((), beta2, COMPUTE) * v + tl.full((), 1.0 - beta2, COMPUTE) * g * g
    p *= tl.where(at < num_decayed - start, keep, 1.0)
    p -= step_size * m / (tl.sqrt(v) * inv_root + tl.full((), eps, COMPUTE))

    # Store, unless the step is dropped, and with a copy in 16 bits where one is kept.
    wanted = True
    if found_inf is not None:  # the interpreter needs the detour over integers
        wanted = tl.where(tl.load(found_inf) == 0, 1, 0) > 0
    inside = inside & wanted
    tl.store(exp_avg + start + at, m, mask=inside)
    tl.store(exp_avg_sq + start + at, v, mask=inside)
    tl.store(param + start + at, p, mask=inside)
    if low_precision_out is not None:
        tl.store(low_precision_out + start + at_narrow, p, mask=inside)
    # Every warp has used its count before the ticket is drawn, which orders the two: no fence is needed.
    tl.debug_barrier()
    before = tl.atomic_add(step, TICKET, mask=wanted, sem="relaxed")
    tl.store(step, count, mask=wanted & (before >> 32 == tl.num_programs(0) - 1))


def block_size(itemsize: int) -> int:
    """Elements a program updates, of `itemsize` bytes each."""
    return 32 * NUM_WARPS * _VECTORS * 16 // itemsize


def launch(param: Tensor, *others: Any) -> None:
    *tensors, lr, beta1, beta2, eps, weight_decay, num_decayed = others
    block, vector = block_size(param.element_size()), math.gcd(16 // param.element_size(), param.numel())
    launcher.launch(
        adamw_kernel, max(1, cdiv(param.numel(), block)),
        (
            param, *tensors, param.numel() // vector, num_decayed, lr, beta1, beta2, _log(beta1), _log(beta2),
            eps, weight_decay,
        ),
        {"VECTOR": vector, "BLOCK": block, "num_warps": NUM_WARPS},
    )  # fmt: skip


_adamw_ = register(
    "adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) step, "
    "Tensor(e!)? low_precision_out, Tensor? lr_tensor, Tensor? inv_scale, Tensor? clip_coefficient, "
    "Tensor? found_inf, float lr, float beta1, float beta2, float eps, float weight_decay, int num_decayed) "
    "-> ()",
    reference=reference,
    triton=launch,
    flops=lambda param, *others: _FLOPS_PER_ELEMENT * param.numel(),
)


def _check_buffers(param: Tensor, grad: Tensor, others: dict[str, Tensor | None]) -> None:
    require = checks.require
    require(param.dtype in _MAIN, "adamw_: param must be float32 or float64, got {}", param.dtype)
    narrow = _NARROW if param.dtype == torch.float32 else ()
    known = grad.dtype in (param.dtype, *narrow)
    require(known, "adamw_: param is {} but grad is {}", param.dtype, grad.dtype)
    checks.fits("adamw_", param.shape, to=("param", param), grad=grad, **others)
    for name, tensor in {"param": param, "grad": grad, **others}.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"adamw_: {name} must be contiguous, got strides {tensor.stride()}")
    checks.same_device("adamw_", param=param, grad=grad, **others)
    out = others["low_precision_out"]
    checks.like("adamw_", param=param, exp_avg=others["exp_avg"], exp_avg_sq=others["exp_avg_sq"])
    if out is not None and out.dtype not in narrow:
        raise ValueError(f"adamw_: param is {param.dtype} but low_precision_out is {out.dtype}")


def _check_scalars(param: Tensor, tensors: dict[str, Tensor | None], numbers: dict[str, float]) -> None:
    require = checks.require
    checks.same_device("adamw_", param=param, **tensors)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        require(tensor.numel() == 1, "adamw_: {} must hold one number, got shape {}", name, tensor.shape)
        if name == "step":
            require(tensor.dtype == torch.int64, "adamw_: step must be int64, got {}", tensor.dtype)
        elif name != "found_inf":
            known = tensor.dtype in _MAIN
            require(known, "adamw_: {} must be float32 or float64, got {}", name, tensor.dtype)
    for name, number in numbers.items():
        known = number >= 0 and (number < 1 or not name.startswith("beta"))
        require(known, "adamw_: {} must not be negative, nor a beta one or more, got {}", name, number)


@torch.no_grad()
@traced("fastmp.adamw_")
def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    low_precision_out: Tensor | None = None,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    num_decayed: int | None = None,
    inv_scale: Tensor | None = None,
    clip_coefficient: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One AdamW step in place, over any number of parameters that lie in flat buffers. As torch.optim.AdamW:

        t = step + 1;  g = grad * inv_scale * clip_coefficient
        m = m + (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
        param = param (1 - lr weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    A slice of all buffers is updated as it is in the whole, so ranks may share the work.

    Args:
        param: float32 or float64, contiguous, any shape; the master copy where training is in lower
            precision. Updated.
        grad: of the same shape, in param's dtype, or for float32 in bfloat16 or float16. Only read.
        exp_avg, exp_avg_sq: m and v, like param. Updated.
        step: int64, one number: how many updates there were. Counts this one.
        low_precision_out: bfloat16 or float16, of the same shape: gets the new parameters, rounded.
        lr: a number, or a tensor of one float32 or float64 element.
        num_decayed: only this many elements, the first ones, are decayed; None for all.
        inv_scale, clip_coefficient: factors of the gradient, tensors of one float32 or float64 element.
        found_inf: a tensor of one element; where it is not zero, everything stays bitwise as it is, `step`
            included.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, a buffer is not contiguous, or a number is out of
            range.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    others = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "low_precision_out": low_precision_out}
    _check_buffers(param, grad, others)
    lr_tensor, lr = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    tensors = {"step": step, "lr": lr_tensor, "inv_scale": inv_scale, "clip_coefficient": clip_coefficient}
    numbers = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    _check_scalars(param, {**tensors, "found_inf": found_inf}, numbers)
    if num_decayed is None:
        num_decayed = param.numel()
    elif not 0 <= num_decayed <= param.numel():
        raise ValueError(f"adamw_: num_decayed {num_decayed} is outside a buffer of {param.numel()} elements")
    _adamw_(
        param, grad, exp_avg, exp_avg_sq, step, low_precision_out, lr_tensor, inv_scale, clip_coefficient,
        found_inf, lr, *betas, eps, weight_decay, num_decayed,
    )  # fmt: skip
