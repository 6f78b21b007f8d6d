"""adamw_: one AdamW step over flat buffers, in one launch that reads and writes every number once.

Everything that changes between steps may be a tensor on the device: step count, learning rate, inverse loss
scale, clip coefficient, and the flag that drops the step. So there is no host-device synchronisation, and a
captured CUDA graph stays valid. AdamW: Loshchilov and Hutter 2019 (arXiv 1711.05101).

Bytes read and written per parameter: 28 with everything in float32, 30 with a 16-bit copy of the parameters,
18 with BF16 optimizer states and gradients. BF16 states take 6 bytes of memory per parameter besides the
parameter:

- The float32 master weight is split into the bfloat16 parameter and a 16-bit remainder. As integers (the
  remainder signed), the master's bits are (param << 16) + remainder. The parameter is thus the master rounded
  to nearest, ties away from zero, which can be inverted; ties to even could not.
- Both moments are bfloat16 with stochastic rounding, so that their expectation is exact. Round-to-nearest
  would lose every update below half a unit in the last place; with beta2 = 0.999 that is nearly all of them.
  The random bits come from Philox, by seed, element position and step count.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastmp.ops.core import checks, launcher
from fastmp.ops.core._triton import cdiv, jit, tl
from fastmp.ops.core.philox import four_words, philox, word_of
from fastmp.ops.core.registry import register
from fastmp.profiling import traced

NUM_WARPS = 4
UNIT = 64  # consecutive elements that share a parameter group
_MAX_GROUPS = 256
_VECTORS = 4  # 16-byte accesses per thread and array of the main dtype
_FLOPS_PER_ELEMENT = 15
_NAN = 0x7FC00000  # bits of the only stored NaN: other payloads may vanish in bfloat16
_MAIN = (torch.float64, torch.float32)
_NARROW = (torch.bfloat16, torch.float16)


def reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, *others: Any
) -> None:
    """Update the buffers as `adamw_` documents; scalars are float64 until they meet an element."""
    low_precision_out, lr_tensor, *factors, found_inf = others[:5]
    lr, beta1, beta2, eps, weight_decay, groups, group_lr, group_decay, first, remainder, seed = others[5:]
    with torch.no_grad():
        one = torch.ones((), dtype=torch.float64, device=param.device)
        rate = lr * one if lr_tensor is None else one * lr_tensor.reshape(())
        factor = one
        for tensor in factors:
            factor = factor if tensor is None else factor * tensor.reshape(())
        count = step + 1
        logs = (count.reshape(()) * (_log(beta) * one) for beta in (beta1, beta2))
        correction1, correction2 = (-torch.expm1(log) for log in logs)
        split = remainder is not None and param.dtype == torch.bfloat16  # False if a test runs it in float64
        p = join_master(param, remainder) if split else param
        g, m, v = grad.to(p.dtype) * factor.to(p.dtype), exp_avg.to(p.dtype), exp_avg_sq.to(p.dtype)
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        if groups is not None:
            units = (first % UNIT + torch.arange(param.numel(), device=param.device)) // UNIT
            group = groups[units].long().reshape(param.shape)
            rate, weight_decay = rate * group_lr[group].double(), group_decay[group].double()
        p = p * (1 - rate * weight_decay).to(p.dtype)
        denominator = v.sqrt() * correction2.rsqrt().to(v.dtype) + eps
        p -= (rate / correction1).to(p.dtype) * m / denominator
        results = [(exp_avg, m), (exp_avg_sq, v), (step, count)]
        if exp_avg.dtype == torch.bfloat16:
            counters = torch.arange(first // 4, cdiv(first + p.numel(), 4), device=p.device)
            noise = (
                philox(seed, counters, count.reshape(())).flatten()[first % 4 :][: p.numel()].view(p.shape)
            )
            results[:2] = (exp_avg, _round(m, noise & 0xFFFF)), (exp_avg_sq, _round(v, noise >> 16))
        results += zip((param, remainder), split_master(p)) if split else ((param, p),)
        if low_precision_out is not None:
            results.append((low_precision_out, p.to(low_precision_out.dtype)))
        for old, new in results:
            old.copy_(new if found_inf is None else torch.where(found_inf.reshape(()) != 0, old, new))


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master weights of bfloat16 parameters and int16 remainders of one shape."""
    return ((param.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 master weights into bfloat16 parameters and int16 remainders; NaNs lose their payload."""
    bits = master.view(torch.int32).masked_fill(master.isnan(), _NAN)
    return _upper(bits + 0x8000), bits.to(torch.int16)


def _round(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically: add 16 random bits, the noise, to the 16 bits cut off."""
    bits = x.view(torch.int32) + noise.to(torch.int32)
    return _upper(bits.masked_fill(x.isnan(), _NAN))


def _upper(bits: Tensor) -> Tensor:
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


@jit
def _bias_correction(count, log_beta, COMPUTE: tl.constexpr):
    """Return 1 - beta^count = -expm1(count log(beta)), without cancellation for beta near one."""
    x = count.to(COMPUTE) * log_beta
    series = tl.full((), 1.0, COMPUTE)
    for k in tl.static_range(15, 1, -1):
        series = 1.0 + series * (x * (1.0 / k))
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@jit
def _bits(x):
    """Return the bits of float32 numbers as uint32, with one representation of NaN."""
    return tl.where(x == x, x.to(tl.uint32, bitcast=True), 0x7FC00000)


@jit
def _upper_half(bits):
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def _spread(x, SPAN: tl.constexpr):
    """Repeat each number SPAN times; the copies belong to one thread, so no data is exchanged."""
    return tl.broadcast_to(x[:, None], (x.shape[0], SPAN)).reshape(x.shape[0] * SPAN)


@jit
def _noise(seed, first, count, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Return a random word for each of BLOCK elements, by seed, step count and position from `first` on."""
    if SPAN == 4:  # four elements that share a Philox counter belong to one thread
        a0, a1, a2, a3 = four_words(seed, first // 4 + tl.arange(0, BLOCK // 4), count)
        return tl.join(tl.join(a0, a2), tl.join(a1, a3)).reshape(BLOCK)
    else:
        return word_of(seed, first + tl.arange(0, BLOCK), count)


@jit(dynamic="step groups first_element noise_seed", fixed="num_vectors")
def adamw_kernel(
    param, grad, exp_avg, exp_avg_sq,  # (N,), contiguous
    step,  # one int64: the count in its lower half, a ticket counter in its upper half
    low_precision_out,  # (N,), bfloat16 or float16, or None
    lr_tensor, inv_scale, clip_coefficient, found_inf,  # one number each, or None
    groups, group_lr, group_decay,  # (units,) uint8, (G,), (G,), or None
    remainder,  # (N,) int16 with a bfloat16 param, or None
    num_vectors, first_element: tl.int64,
    noise_seed: tl.int64, lr: tl.float64, beta1: tl.float64, beta2: tl.float64, log_beta1: tl.float64,
    log_beta2: tl.float64, eps: tl.float64, weight_decay: tl.float64, VECTOR: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of every array; the program that finishes last increments the step count.

    The upper half of `step` is a ticket counter: each program adds one when it is done. The last program
    writes the new count, so all programs of a launch read the same one. SPAN consecutive elements share a
    parameter group, and a call of Philox if SPAN is 4.
    """
    COMPUTE: tl.constexpr = tl.float32 if param.dtype.element_ty == tl.bfloat16 else param.dtype.element_ty
    TICKET: tl.constexpr = 1 << 32
    # 1. Load a block of the gradient, both moments and the parameters.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    left = tl.cast(num_vectors, tl.int64) * VECTOR - start  # int64: 2^31 elements are an int32 of vectors
    inside = at < left
    # Four elements per thread in every array: a 16-bit array must not impose its layout on the others.
    at = tl.max_contiguous(at, VECTOR)
    g = tl.load(grad + start + at, mask=inside, other=0.0).to(COMPUTE)
    m = tl.load(exp_avg + start + at, mask=inside, other=0.0).to(COMPUTE)
    v = tl.load(exp_avg_sq + start + at, mask=inside, other=0.0).to(COMPUTE)
    p = tl.load(param + start + at, mask=inside, other=0.0)
    if remainder is not None:  # the lower half of the master weight
        bits = p.to(tl.int16, bitcast=True).to(tl.int32) << 16
        bits += tl.load(remainder + start + at, mask=inside, other=0).to(tl.int32)
        p = bits.to(tl.float32, bitcast=True)

    # 2. Load the scalars: step count, learning rate, loss scale and clip coefficient, group tables.
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
    if groups is None:
        keep = 1.0 - rate * tl.full((), weight_decay, COMPUTE)
    else:  # look up the group of every SPAN elements
        spans = tl.arange(0, BLOCK // SPAN) * SPAN
        units = (first_element % 64).to(tl.int32) + spans
        group = tl.load(groups + start // 64 + units // 64, mask=spans < left, other=0).to(tl.int32)
        share = tl.load(group_lr + group).to(COMPUTE)
        keep = _spread(1.0 - rate * share * tl.load(group_decay + group).to(COMPUTE), SPAN)
        step_size = _spread(step_size * share, SPAN)

    # 3. Moments, decoupled weight decay, and the update (Loshchilov and Hutter 2019).
    g *= factor.to(COMPUTE)
    m += tl.full((), 1.0 - beta1, COMPUTE) * (g - m)
    v = tl.full((), beta2, COMPUTE) * v + tl.full((), 1.0 - beta2, COMPUTE) * g * g
    p *= keep
    p -= step_size * m / (tl.sqrt(v) * inv_root + tl.full((), eps, COMPUTE))

    # 4. Round and store, unless the step is dropped.
    wanted = True
    if found_inf is not None:  # via integers for Triton's interpreter
        wanted = tl.where(tl.load(found_inf) == 0, 1, 0) > 0
    inside = inside & wanted
    if exp_avg.dtype.element_ty != COMPUTE:
        noise = _noise(noise_seed, first_element + start, count, SPAN, BLOCK)
        m, v = _upper_half(_bits(m) + (noise & 0xFFFF)), _upper_half(_bits(v) + (noise >> 16))
    tl.store(exp_avg + start + at, m, mask=inside)
    tl.store(exp_avg_sq + start + at, v, mask=inside)
    if low_precision_out is not None:
        tl.store(low_precision_out + start + at, p, mask=inside)
    if remainder is not None:
        low = _bits(p)
        tl.store(remainder + start + at, low.to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)
        p = _upper_half(low + 0x8000)
    tl.store(param + start + at, p, mask=inside)
    # 5. Draw a ticket; the last program increments the count. The barrier orders all reads of the count
    # before the ticket, so no fence is needed.
    tl.debug_barrier()
    before = tl.atomic_add(step, TICKET, mask=wanted, sem="relaxed")
    tl.store(step, count, mask=wanted & (before >> 32 == tl.num_programs(0) - 1))


def block_size(itemsize: int) -> int:
    """Return the elements that a program updates, of `itemsize` bytes each."""
    return 32 * NUM_WARPS * _VECTORS * 16 // itemsize


def launch(param: Tensor, *others: Any) -> None:
    *tensors, lr, beta1, beta2, eps, weight_decay = others[:-6]
    groups, group_lr, group_decay, first, remainder, seed = others[-6:]
    itemsize = 8 if param.dtype == torch.float64 else 4  # of what is computed
    block, width = block_size(itemsize), 16 // itemsize
    vector = math.gcd(width, param.numel())
    launcher.launch(
        adamw_kernel, max(1, cdiv(param.numel(), block)),
        (
            param, *tensors, groups, group_lr, group_decay, remainder, param.numel() // vector, first, seed,
            lr, beta1, beta2, _log(beta1), _log(beta2), eps, weight_decay,
        ),
        {
            "VECTOR": vector, "SPAN": 1 if first % width else width, "BLOCK": block, "num_warps": NUM_WARPS,
        },
    )  # fmt: skip


_adamw_ = register(
    "adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) step, "
    "Tensor(e!)? low_precision_out, Tensor? lr_tensor, Tensor? inv_scale, Tensor? clip_coefficient, "
    "Tensor? found_inf, float lr, float beta1, float beta2, float eps, float weight_decay, Tensor? groups, "
    "Tensor? group_lr, Tensor? group_decay, int first, Tensor(f!)? remainder, int seed) -> ()",
    contract=(
        "remainder ? param (#P) bfloat16; no remainder ? param (#P) float32|float64; "
        "grad (#P) wide(param)|bfloat16|float16; exp_avg (#P) wide(param)|bfloat16; exp_avg_sq (#P) exp_avg; "
        "step (#1) int64; low_precision_out (#P) bfloat16|float16; lr_tensor (#1) any; inv_scale (#1) any; "
        "clip_coefficient (#1) any; found_inf (#1) any; groups (U) uint8; first % 64 + P <= 64 * U; "
        "group_lr (#G) floating; group_decay (#G) floating; 0 <= first; remainder (#P) int16"
    ),
    overwrites="low_precision_out",
    reference=reference,
    triton=launch,
    fake=lambda *arguments: None,
    flops=lambda param, *others: _FLOPS_PER_ELEMENT * param.numel(),
)


@checks.memoized
def _check(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor,
    low_precision_out: Tensor | None, lr: Tensor | None, inv_scale: Tensor | None,
    clip_coefficient: Tensor | None, found_inf: Tensor | None, betas: tuple[float, float], eps: float,
    weight_decay: float | None, groups: Tensor | None, group_lr: Tensor | None, group_decay: Tensor | None,
    first: int, remainder: Tensor | None, seed: int,
) -> None:  # fmt: skip
    require = checks.require
    buffers = {
        "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "low_precision_out": low_precision_out,
        "remainder": remainder,
    }  # fmt: skip
    _check_dtypes(param, grad, exp_avg, exp_avg_sq, low_precision_out, remainder)
    checks.check_shape("adamw_", param.shape, to=("param", param), **buffers)
    factors = {"lr": lr, "inv_scale": inv_scale, "clip_coefficient": clip_coefficient}
    tables = {"groups": groups, "group_lr": group_lr, "group_decay": group_decay}
    for name, tensor in {"step": step, **factors, "found_inf": found_inf}.items():
        if tensor is not None and tensor.numel() != 1:
            raise ValueError(f"adamw_: {name} must hold one number, got shape {tuple(tensor.shape)}")
    checks.check_same_device(
        "adamw_", param=param, **buffers, step=step, **factors, found_inf=found_inf, **tables
    )
    require(0 <= seed < 1 << 63, "adamw_: seed must lie in [0, 2^63), got {}", seed)
    require(step.dtype == torch.int64, "adamw_: step must be int64, got {}", step.dtype)
    for name, tensor in {**factors, "group_lr": group_lr, "group_decay": group_decay}.items():
        if tensor is not None and tensor.dtype not in _MAIN:
            raise ValueError(f"adamw_: {name} must be float32 or float64, got {tensor.dtype}")
    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay or 0.0}
    for name, number in numbers.items():
        known = number >= 0 and (number < 1 or not name.startswith("beta"))
        require(known, "adamw_: {} must not be negative, nor a beta one or more, got {}", name, number)
    _check_groups(param, weight_decay, first, **tables)


def _check_dtypes(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low_precision_out: Tensor | None,
    remainder: Tensor | None,
) -> None:
    require = checks.require
    if remainder is None:
        require(
            param.dtype in _MAIN, "adamw_: param must be float32 or float64, or bfloat16 with a remainder, "
            "got {}", param.dtype,
        )  # fmt: skip
    else:
        halves = param.dtype == torch.bfloat16 and remainder.dtype == torch.int16
        got = remainder.dtype, param.dtype
        require(halves, "adamw_: remainder must be int16 and its param bfloat16, got {} and {}", *got)
        require(low_precision_out is None, "adamw_: low_precision_out is given, but param itself is bfloat16")
    narrow = () if param.dtype == torch.float64 else _NARROW
    main = torch.float64 if param.dtype == torch.float64 else torch.float32
    known = {"grad": (main, *narrow), "exp_avg": (main, *narrow[:1]), "low_precision_out": narrow}
    given = {"grad": grad, "exp_avg": exp_avg, "low_precision_out": low_precision_out}
    for name, tensor in given.items():
        if tensor is not None and tensor.dtype not in known[name]:
            raise ValueError(f"adamw_: param is {param.dtype} but {name} is {tensor.dtype}")
    checks.check_same("adamw_", exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


def _check_groups(
    param: Tensor,
    weight_decay: float | None,
    first: int,
    *,
    groups: Tensor | None,
    group_lr: Tensor | None,
    group_decay: Tensor | None,
) -> None:
    require = checks.require
    require(first >= 0, "adamw_: first must not be negative, got {}", first)
    if groups is None or group_lr is None or group_decay is None:
        alone = groups is group_lr is group_decay
        require(alone, "adamw_: groups, group_lr and group_decay must be given together, or none of them")
        return
    require(weight_decay is None, "adamw_: weight_decay {} is given beside group_decay", weight_decay)
    require(groups.dtype == torch.uint8, "adamw_: groups must be uint8, got {}", groups.dtype)
    units = cdiv(first % UNIT + param.numel(), UNIT)
    enough = groups.dim() == 1 and len(groups) >= units
    require(
        enough, "adamw_: {} elements from {} on lie in {} units of {}, but groups has shape {}",
        param.numel(), first, units, UNIT, groups.shape,
    )  # fmt: skip
    fits = group_lr.shape == group_decay.shape and group_lr.dim() == 1 and 0 < len(group_lr) <= _MAX_GROUPS
    require(
        fits, "adamw_: group_lr and group_decay must have one number for each of at most {} groups, got "
        "shapes {} and {}", _MAX_GROUPS, group_lr.shape, group_decay.shape,
    )  # fmt: skip


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
    weight_decay: float | None = None,
    groups: Tensor | None = None,
    group_lr: Tensor | None = None,
    group_decay: Tensor | None = None,
    first: int = 0,
    remainder: Tensor | None = None,
    seed: int = 0,
    inv_scale: Tensor | None = None,
    clip_coefficient: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Apply one AdamW step in place to flat buffers of any number of parameters.

    As torch.optim.AdamW:

        t = step + 1;  g = grad * inv_scale * clip_coefficient
        m = m + (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
        param = param (1 - lr weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Updating a slice of all buffers gives the same bits as updating the whole, so data-parallel ranks can
    shard the work. Pass `first`, the slice's offset, with `groups` or bfloat16 moments.

    Args:
        param: float32 or float64, contiguous, any shape; the master weights in mixed-precision training. Or
            bfloat16, with a remainder. Updated.
        grad: of the same shape, float64 for float64, else float32, bfloat16 or float16. Only read.
        exp_avg, exp_avg_sq: the moments m and v, of the same shape, float64 for float64, else both float32 or
            both bfloat16 with stochastic rounding. Updated.
        step: int64, one number: the number of updates so far. Incremented.
        low_precision_out: bfloat16 or float16, of the same shape: receives the new parameters, rounded.
        lr: learning rate: a number, or a tensor of one float32 or float64 element.
        betas: decay rates of the moments, in [0, 1).
        eps: term added to the denominator (Adam epsilon).
        weight_decay: of all elements. Default: 0.01 without groups.
        groups: (units,) uint8, contiguous: the parameter group of every 64 consecutive elements of the flat
            buffer. Entry 0 belongs to the unit that contains element 0 of `param`, so element i has entry
            (first % 64 + i) // 64. Entries must be below G; a GPU does not check them.
        group_lr, group_decay: (G,), G <= 256, float32 or float64, contiguous: learning rate factor and weight
            decay of each group. Pass them together with `groups`.
        first: offset of `param` in the flat buffer.
        remainder: int16, of the same shape, with a bfloat16 `param`: the lower half of float32 master
            weights, which are updated exactly as a float32 `param` would be. As integers, the master's bits
            are (param << 16) + remainder, so `param` is the master rounded to nearest, ties away from zero.
            NaNs lose their payload. Updated.
        seed: in [0, 2^63), for the stochastic rounding of bfloat16 moments. The random bits of an element
            depend only on the seed, its offset in the flat buffer and the step count.
        inv_scale, clip_coefficient: factors of the gradient, tensors of one float32 or float64 element.
        found_inf: a tensor of one element; if it is not zero, the step is dropped: all buffers, `step`
            included, keep their bits.

    Raises:
        ValueError: shapes, dtypes or devices do not match, a buffer is not contiguous, or a number is out of
            range.

    Example:

        param, grad = torch.ones(1000), torch.full((1000,), 0.1)
        exp_avg, exp_avg_sq = torch.zeros(1000), torch.zeros(1000)
        step = torch.zeros(1, dtype=torch.int64)
        fastmp.ops.adamw_(param, grad, exp_avg, exp_avg_sq, step, lr=1e-3)
        assert step.item() == 1 and (param < 1).all()

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    lr_tensor, lr = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    checks.require(lr >= 0, "adamw_: lr must not be negative, got {}", lr)
    tensors = (
        param, grad, exp_avg, exp_avg_sq, step, low_precision_out, lr_tensor, inv_scale, clip_coefficient,
        found_inf,
    )  # fmt: skip
    others = groups, group_lr, group_decay, first, remainder, seed
    _check(*tensors, betas, eps, weight_decay, *others)
    buffers = {
        "param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq,
        "low_precision_out": low_precision_out, "groups": groups, "group_lr": group_lr,
        "group_decay": group_decay, "remainder": remainder,
    }  # fmt: skip
    for name, tensor in buffers.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"adamw_: {name} must be contiguous, got strides {tensor.stride()}")
    decay = 0.01 if weight_decay is None else weight_decay
    _adamw_(*tensors, lr, *betas, eps, decay, *others)
