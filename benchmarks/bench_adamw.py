"""One AdamW step over a flat buffer: fastmp, torch's fused and foreach optimizers, torch.compile.

In bfloat16 the parameters have float32 masters: the step ends with the rounded copy. Gradients are float32.
In the small state parameters, gradients and averages are bfloat16, and a remainder keeps the masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.cases import COMPILE, EAGER, OURS, TORCH, Case, CpuGoal, Workload, compiled, title
from fastmp.ops import OPS, adamw_
from fastmp.testing.samples.optimizer_steps import adamw_arguments

_LR, _BETA1, _BETA2, _EPS, _DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1
_OPTIONS = {"lr": _LR, "betas": (_BETA1, _BETA2), "eps": _EPS, "weight_decay": _DECAY}


def _plain(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor) -> None:
    """The formula, for torch.compile to fuse."""
    step.add_(1)
    exp_avg.lerp_(grad, 1 - _BETA1)
    exp_avg_sq.mul_(_BETA2).addcmul_(grad, grad, value=1 - _BETA2)
    root = (exp_avg_sq / (1 - _BETA2**step)).sqrt_()
    param.mul_(1 - _LR * _DECAY).sub_(exp_avg / (root + _EPS) * (_LR / (1 - _BETA1**step)))


def adamw_case(
    num_elements: int, dtype: torch.dtype, device: str, seed: int = 0, *, small: bool = False
) -> Case:
    """All rivals share one state, made by the first call: at 1e9 elements each of its own is 14 GB more.

    small: everything in 16 bits. Ours keeps masters and rounds averages at random; torch's does neither.
    """
    generator = torch.Generator(device).manual_seed(seed)
    stored = torch.bfloat16 if small else torch.float32
    param, grad = (torch.randn(num_elements, device=device, generator=generator).to(stored) for _ in range(2))
    on_gpu = torch.device(device).type == "cuda"

    @cache
    def state() -> tuple[Tensor, Tensor, Tensor | None]:
        out = None if small or dtype == torch.float32 else param.to(dtype)
        return torch.zeros_like(param), torch.zeros_like(param), out

    def results(out: Tensor | None) -> tuple[Tensor, ...]:
        return (param,) if out is None else (param, out)

    @cache
    def ours() -> Callable[[], tuple[Tensor, ...]]:
        m, v, out = state()
        step = torch.zeros((), dtype=torch.int64, device=device)
        remainder = torch.zeros_like(param, dtype=torch.int16) if small else None

        def call() -> tuple[Tensor, ...]:
            adamw_(param, grad, m, v, step, low_precision_out=out, remainder=remainder, **_OPTIONS)
            return results(out)

        return call

    @cache
    def with_torch(**kind: bool) -> Callable[[], tuple[Tensor, ...]]:
        m, v, out = state()
        own = param.view_as(param)  # the same memory, with a gradient
        own.grad = grad
        optimizer = torch.optim.AdamW([own], **_OPTIONS, **kind, capturable=on_gpu)
        step = torch.zeros((), device=device if on_gpu else "cpu")
        optimizer.state[own] = {"step": step, "exp_avg": m, "exp_avg_sq": v}

        def call() -> tuple[Tensor, ...]:
            optimizer.step()
            return results(out if out is None else out.copy_(own))

        return call

    @cache
    def with_compile() -> Callable[[], tuple[Tensor, ...]]:
        m, v, out = state()
        step = torch.zeros((), device=device)

        def plain(param: Tensor, m: Tensor, v: Tensor, step: Tensor, out: Tensor | None) -> None:
            _plain(param, grad, m, v, step)
            if out is not None:
                out.copy_(param)

        function = compiled(plain)

        def call() -> tuple[Tensor, ...]:
            function(param, m, v, step, out)
            return results(out)

        return call

    rivals = {
        OURS: lambda: ours()(),
        TORCH: lambda: with_torch(fused=True)(),
        EAGER: lambda: with_torch(foreach=True)(),
    }
    if small:
        name = title("adamw small state", (num_elements,), dtype)
        return Case(name, (param,), grad, rivals, 18 * num_elements, 0, random=True)
    rivals[COMPILE] = lambda: with_compile()()
    step = torch.zeros(1, dtype=torch.int64, device=device)
    tensors = (param, grad, param, param, step, None if dtype == torch.float32 else param.to(dtype))
    numbers = (_LR, _BETA1, _BETA2, _EPS, _DECAY)
    traffic = OPS["adamw_"].traffic(*tensors, *[None] * 4, *numbers, *[None] * 3, 0, None, 0)
    return Case(title("adamw", (num_elements,), dtype), (param,), grad, rivals, traffic, 0)


WORKLOADS = (
    Workload(
        "adamw",
        adamw_case,
        cpu=((1 << 24,),),
        cuda=((100_000_000,), (1_000_000_000,)),
        rivals=(OURS, TORCH, EAGER, COMPILE),
        directions=("forward",),
        tiny=(5000,),
    ),
    Workload(
        "adamw small state",
        partial(adamw_case, small=True),
        cpu=((1 << 24,),),
        cuda=((100_000_000,), (1_000_000_000,)),
        rivals=(OURS, TORCH, EAGER),
        directions=("forward",),
        dtypes=(torch.bfloat16,),
        tiny=(5000,),
    ),
)
GOALS = (
    CpuGoal("adamw", "float32", "forward", OURS, 1.0, 1.0, over=TORCH),
    CpuGoal("adamw", "bfloat16", "forward", OURS, 1.2, 1.2, over=TORCH),
)
SHAPES = {"adamw_": ((100_000_000,),)}


def arguments(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.adamw_`; a 16-bit dtype is that of the parameters' copy."""
    generator = torch.Generator(device).manual_seed(seed)
    param, grad, *others = adamw_arguments(math.prod(shape), dtype, generator)
    return param, grad.to(param.dtype), *others
