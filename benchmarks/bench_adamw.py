"""One AdamW step over a flat buffer: fastmp, torch's fused and foreach optimizers, torch.compile.

In bfloat16 the parameters have float32 masters: the step ends with the rounded copy. Gradients are float32.
In the small state parameters, gradients and averages are bfloat16, and a remainder keeps the masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

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


def adamw_case(num_elements: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    generator = torch.Generator(device).manual_seed(seed)
    param, grad = (torch.randn(num_elements, device=device, generator=generator) for _ in range(2))
    on_gpu = torch.device(device).type == "cuda"

    def rounded(of: Tensor) -> Tensor | None:
        return None if dtype == torch.float32 else of.to(dtype)

    # One state for all rivals, made by the first call: at 1e9 elements each of its own would be 14 GB more.

    @cache
    def state() -> tuple[Tensor, Tensor, Tensor | None]:
        return torch.zeros_like(param), torch.zeros_like(param), rounded(param)

    @cache
    def ours() -> Callable[[], tuple[Tensor, ...]]:
        m, v, out = state()
        step = torch.zeros((), dtype=torch.int64, device=device)

        def call() -> tuple[Tensor, ...]:
            adamw_(param, grad, m, v, step, low_precision_out=out, **_OPTIONS)
            return (param,) if out is None else (param, out)

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
            return (own,) if out is None else (own, out.copy_(own))

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
            return (param,) if out is None else (param, out)

        return call

    rivals = {
        OURS: lambda: ours()(),
        TORCH: lambda: with_torch(fused=True)(),
        EAGER: lambda: with_torch(foreach=True)(),
        COMPILE: lambda: with_compile()(),
    }
    step = torch.zeros(1, dtype=torch.int64, device=device)
    tensors = (param, grad, param, param, step, rounded(param))
    numbers = (_LR, _BETA1, _BETA2, _EPS, _DECAY)
    traffic = OPS["adamw_"].traffic(*tensors, *[None] * 4, *numbers, *[None] * 3, 0, None, 0)
    return Case(title("adamw", (num_elements,), dtype), (param,), grad, rivals, traffic, 0)


def adamw_small_case(num_elements: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    """Everything in 16 bits. Ours keeps masters and rounds averages at random; torch's does neither."""
    generator = torch.Generator(device).manual_seed(seed)
    param, grad = (torch.randn(num_elements, device=device, generator=generator).bfloat16() for _ in range(2))
    on_gpu = torch.device(device).type == "cuda"

    @cache
    def ours() -> Callable[[], Tensor]:
        own, m, v = param.clone(), torch.zeros_like(param), torch.zeros_like(param)
        remainder, step = (
            torch.zeros_like(param, dtype=torch.int16),
            torch.zeros_like(param[0], dtype=torch.int64),
        )

        def call() -> Tensor:
            adamw_(own, grad, m, v, step, remainder=remainder, **_OPTIONS)
            return own

        return call

    @cache
    def with_torch(**kind: bool) -> Callable[[], Tensor]:
        own = param.clone()
        own.grad = grad
        optimizer = torch.optim.AdamW([own], **_OPTIONS, **kind, capturable=on_gpu)

        def call() -> Tensor:
            optimizer.step()
            return own

        return call

    rivals = {
        OURS: lambda: ours()(),
        TORCH: lambda: with_torch(fused=True)(),
        EAGER: lambda: with_torch(foreach=True)(),
    }
    name = title("adamw small state", (num_elements,), torch.bfloat16)
    return Case(name, (param,), grad, rivals, 18 * num_elements, 0, random=True)


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
        adamw_small_case,
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
