"""Launches of a layer, segment by segment, and what the host spends on them, eager and replayed.

A launch is an op that makes a kernel: one that torch dispatches and that is no view and no allocation. Some
of fastmp's ops launch two kernels, so that counts are the least there are. Host times are CPU times at the
smallest shapes, on one thread: nearly all of it is what the host does before a GPU would begin. The kernels
of these shapes are in it, the calls of CUDA's driver are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.config import GPTConfig, MoEConfig
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.nn import LayerChain, Placement, TransformerLayer
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.schedule.schedule import Schedule
from tools.silent_graphs import SilentBackend

_LAYERS, _MICROBATCHES, _ROUNDS = 3, 8, 40
_TOKENS, _HIDDEN = 8, 32
_NO_KERNEL = (
    "aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "aten::_reshape_alias",
    "aten::promote_types",
)  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts the ops that launch kernels while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func._schema.name.startswith(_NO_KERNEL))
        return func(*args, **(kwargs or {}))


def make_layer(kind: str) -> TransformerLayer:
    """Return a small layer, "dense" or "moe", with gradients accumulated in buffers."""
    moe = MoEConfig(num_experts=4, top_k=2, expert_ffn_hidden_size=32, aux_loss=0.01)
    config = GPTConfig(
        hidden_size=_HIDDEN, num_heads=4, activation="swiglu", norm="rmsnorm", position="rope",
        linear_bias=False, max_seq_len=_TOKENS, moe=moe if kind == "moe" else None,
    )  # fmt: skip
    layer = TransformerLayer(config, Placement())
    GradBuffer(layer.named_parameters())
    return layer


def count_launches(kind: str) -> dict[str, tuple[int, int]]:
    """Return {segment: (launches of its forward, of its backward)} of a layer."""
    torch.manual_seed(0)
    layer, tensors = make_layer(kind), (torch.randn(_TOKENS, 1, _HIDDEN),)
    kept: list[tuple[str, Sequence[Tensor], int]] = []
    for segment in layer.segments():
        inputs = [each.detach().requires_grad_(each.is_floating_point()) for each in tensors]
        with Launches() as forward:
            tensors = segment.run(*inputs)
        kept.append((segment.name, tensors, forward.count))
    found = {}
    for name, outputs, forward_count in reversed(kept):
        made = [each for each in outputs if each.grad_fn is not None]
        with Launches() as backward:
            torch.autograd.backward(made, [torch.ones_like(each) for each in made])
        found[name] = (forward_count, backward.count - len(made))
    return dict(reversed(found.items()))


def host_seconds(kind: str, scopes: Sequence[Sequence[str]]) -> list[float]:
    """Return the CPU seconds of a layer and microbatch, forward and backward, for each of `scopes`.

    A scope says what silent graphs hold; where it is empty, all is eager. The least of many microbatches, in
    rounds in which the scopes take turns.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = [_make_step(kind, scope) for scope in scopes]
        for step in steps:
            for _ in range(5):  # observed, captured
                step()
        rounds = [[step() for step in steps] for _ in range(_ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    return [min(own) / _LAYERS for own in zip(*rounds, strict=True)]


def _make_step(kind: str, scope: Sequence[str]) -> Callable[[], float]:
    torch.manual_seed(0)
    chain = LayerChain([make_layer(kind) for _ in range(_LAYERS)])
    order, x = Schedule(1, _MICROBATCHES).order(0), torch.randn(_TOKENS, 1, _HIDDEN, requires_grad=True)
    manager = GraphManager([chain], order, backend=SilentBackend(), scope=scope) if scope else None

    def step() -> float:
        """Run a step; return the least CPU seconds of a microbatch."""
        if manager is not None:
            manager.begin_step()
        found = []
        for _ in range(_MICROBATCHES):
            start = time.process_time()
            outputs = [each for each in chain(x) if each.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
            found.append(time.process_time() - start)
        return min(found)

    return step
