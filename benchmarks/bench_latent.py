"""latent_norm_rope of fastmp, its two ops in turn, torch eager and torch.compile: DeepSeek-V3's latents."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_norm import IN_TURN
from benchmarks.cases import COMPILE, EAGER, OURS, Case, Workload, against_torch, normal, title
from fastmp.ops import OPS, latent_norm_rope, rms_norm, rope, rope_cos_sin

EPS = 1e-6


def _eager(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin are (S, 1, R) in the dtype of x, of neighbouring pairs."""
    latent, keys = x.split((len(weight), x.shape[-1] - len(weight)), -1)
    a, b = keys.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return F.rms_norm(latent, weight.shape, weight, EPS), turned


def _in_turn(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    rank = len(weight)
    return rms_norm(x[..., :rank], weight, eps=EPS), rope(x[..., rank:], cos, sin, interleaved=True)


def latent_case(tokens: int, rank: int, width: int, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    """x (tokens, 1, rank + width)."""
    backward = arguments("latent_norm_rope_backward", (tokens, rank, width), dtype, device, seed)
    *grads, x, weight, cos, sin, _, interleaved = backward
    x.requires_grad_(), weight.requires_grad_()
    wide = [t[:, None].to(dtype) for t in (cos, sin)]
    ours = partial(latent_norm_rope, x, weight, cos, sin, eps=EPS, interleaved=True)
    rivals = against_torch(ours, _eager, x, weight, *wide)
    rivals[IN_TURN] = lambda: _in_turn(x, weight, cos, sin)
    return Case(
        title("latent_norm_rope", (tokens, rank, width), dtype),
        (x, weight),
        tuple(grads),
        rivals,
        OPS["latent_norm_rope"].traffic(x, weight, cos, sin, EPS, interleaved),
        OPS["latent_norm_rope_backward"].traffic(*backward),
    )


# Tokens, width of a latent and of a shared key: those of DeepSeek-V2 and V3.
_SHAPES = ((8192, 512, 64), (32768, 512, 64))
WORKLOADS = (
    Workload(
        "latent_norm_rope",
        latent_case,
        cpu=((4096, 512, 64),),
        cuda=_SHAPES,
        rivals=(OURS, IN_TURN, EAGER, COMPILE),
        tiny=(33, 24, 8),
    ),
)
SHAPES = dict.fromkeys(("latent_norm_rope", "latent_norm_rope_backward"), _SHAPES)


def arguments(op: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str, seed: int) -> tuple:
    """Random arguments of `torch.ops.fastmp.<op>`."""
    random = normal(dtype, device, seed)
    tokens, rank, width = shape
    x, weight = random(tokens, 1, rank + width), random(rank)
    cos, sin = rope_cos_sin(tokens, width, dtype=torch.promote_types(dtype, torch.float32), device=device)
    forward = x, weight, cos, sin, EPS, True
    if op == "latent_norm_rope":
        return forward
    rstd = torch.ops.fastmp.latent_norm_rope(*forward)[2]
    return random(tokens, 1, rank), random(tokens, 1, width), x, weight, cos, sin, rstd, True
