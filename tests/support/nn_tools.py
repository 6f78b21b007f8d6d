"""Shared by the tests of fastmp.nn: a reference on any TP, activations in plain torch, clocks of streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fastmp.config import GPTConfig
from fastmp.distributed.collectives import gather_from_group
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT, Placement
from tools.small_models import part_of


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def activation(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return activation


_gelu_tanh = partial(F.gelu, approximate="tanh")


def _clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's: gates and ups in turn, a steeper gate, and limits."""
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


PLAIN_ACTIVATIONS = {
    **{"gelu": F.gelu, "gelu_tanh": _gelu_tanh, "swiglu": _gated(F.silu), "geglu": _gated(_gelu_tanh)},
    "geglu_erf": _gated(F.gelu),
    "clamped_swiglu": _clamped_swiglu,
}


def tp_groups(tp: int, **experts: int) -> ParallelGroups:
    return ParallelGroups.create(RankGrid(world_size=tp, tp=tp, **experts))


def text(config: GPTConfig, batch: int = 3, sequence: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(config.vocab_size, (batch, sequence + 1), generator=torch.Generator().manual_seed(7))
    return ids[:, :-1], ids[:, 1:]


def sum_partial_gradients(params: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Reduce as GradBuffer does: replicated parameters that saw a part of the sequence have part of the
    gradient."""
    for param in params:
        if param.sequence_parallel and group is not None:
            dist.all_reduce(param.grad, group=group)


def assert_same_gradients(
    many: torch.nn.Module, one: torch.nn.Module, groups: ParallelGroups, gradient: str = "grad"
) -> None:
    """Each gradient ("grad" or "main_grad") of `many` is, to 1e-10, this rank's part of that of `one`."""
    for (name, whole), param in zip(one.named_parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(
            getattr(param, gradient),
            part_of(getattr(whole, gradient), param, groups),
            rtol=1e-10,
            atol=1e-10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def compare_with_reference(
    reference: dict,
    tp: int,
    dtype: torch.dtype,
    tolerance: float,
    sequence_parallel: bool = False,
    **experts: int,
) -> None:
    """Logits, loss and gradients of a GPT of reference["config"] and ["weights"], at its ["tokens"].

    A gradient is measured against the largest entry of its tensor, or 1. `experts`: ep and etp.
    """
    groups = tp_groups(tp, **experts)
    model = GPT(reference["config"], Placement(groups, sequence_parallel=sequence_parallel, dtype=dtype))
    assert (
        {name for name, _ in model.named_parameters()} == set(reference["weights"]) == set(reference["grads"])
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(part_of(reference["weights"][name], param, groups))
        logits_SBV = gather_from_group(model(reference["tokens"]), model.group)
    logits_BSV = logits_SBV[..., : model.config.vocab_size].transpose(0, 1).double()
    spread = reference["logits"].abs().max()
    assert (logits_BSV - reference["logits"]).abs().max() <= tolerance * max(spread, 1.0)
    loss = model.loss(reference["tokens"], reference["targets"])
    loss_BS = loss if model.config.moe is None else loss.tokens
    torch.testing.assert_close(loss_BS.double(), reference["loss"], rtol=tolerance, atol=tolerance)
    loss_BS.mean().backward()
    sum_partial_gradients(model.parameters(), model.group)
    for name, param in model.named_parameters():
        expected = part_of(reference["grads"][name], param, groups)
        error = (param.grad.double() - expected).abs().max()
        assert error <= tolerance * max(reference["grads"][name].abs().max(), 1.0), f"{name}: {error}"


class Clock:
    """A stream that knows how far it is behind others: work on it runs behind what it has waited for."""

    def __init__(self, name):
        self.name, self.done, self.knows = name, 0, {}

    def record_event(self):
        return {**self.knows, self.name: self.done}

    def wait_event(self, event):
        for name, done in event.items():
            self.knows[name] = max(done, self.knows.get(name, 0))

    def wait_stream(self, other):
        self.wait_event(other.record_event())
