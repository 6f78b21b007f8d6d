"""Shared by the tests of fastmp.nn: small models, full tensors cut to a rank's shard, ops counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.config import GPTConfig, MoEConfig
from fastmp.nn import GPT, Placement
from fastmp.parallel import attributes
from fastmp.parallel.collectives import gather_from_group, group_rank, group_size
from fastmp.parallel.grid import RankGrid
from fastmp.parallel.groups import ParallelGroups
from fastmp.parallel.rng import RngTracker

SEED = 4321
SMALL = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=96,
    vocab_size=131,
    max_seq_len=20,
    init_std=0.2,
)
QWEN = replace(  # every option that differs from GPT-2's form, heads wider than hidden_size / num_heads
    SMALL,
    head_size=6,
    norm="rmsnorm",
    position="rope",
    activation="swiglu",
    linear_bias=False,
    tie_embeddings=False,
    qk_norm=True,
)


EXPERTS = replace(
    QWEN,
    moe=MoEConfig(
        num_experts=8,
        top_k=3,
        expert_ffn_hidden_size=20,
        aux_loss=0.3,
        sequence_aux_loss=0.2,
        z_loss=0.1,
        shared_expert_ffn_hidden_size=24,
        shared_expert_gate=True,
    ),
)


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def activation(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return activation


_gelu_tanh = partial(F.gelu, approximate="tanh")
PLAIN_ACTIVATIONS = {
    **{"gelu": F.gelu, "gelu_tanh": _gelu_tanh, "swiglu": _gated(F.silu), "geglu": _gated(_gelu_tanh)},
    "geglu_erf": _gated(F.gelu),
}


def tp_groups(tp: int, **experts: int) -> ParallelGroups:
    return ParallelGroups.create(RankGrid(world_size=tp, tp=tp, **experts))


def placed(groups: ParallelGroups, **options: Any) -> tuple[Placement, dict[str, Any]]:
    """Split `options` into a placement and those that are no fields of one."""
    names = {each.name for each in fields(Placement)} & set(options)
    on = Placement(groups, **{name: options.pop(name) for name in names})
    return on, options


def make_gpt(
    config: GPTConfig, groups: ParallelGroups = ParallelGroups.alone(), dtype=torch.float64, **options
) -> GPT:
    """The model from the seed of all tests: the same weights at every TP."""
    rng = RngTracker(SEED, tp_rank=group_rank(groups.tp), cp_rank=group_rank(groups.cp))
    on, others = placed(groups, rng=rng, dtype=dtype, **options)
    return GPT(config, on, **others)


def text(config: GPTConfig, batch: int = 3, sequence: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(config.vocab_size, (batch, sequence + 1), generator=torch.Generator().manual_seed(7))
    return ids[:, :-1], ids[:, 1:]


def shard_of(full: torch.Tensor, param: torch.nn.Parameter, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's part of a full tensor; a vocabulary is padded with zeros, or cut, to the size of `param`
    first."""
    parallel, dim = param.tensor_model_parallel, param.partition_dim
    if not parallel:
        return full
    wanted = param.shape[dim] * group_size(group)
    if wanted != full.shape[dim]:
        assert dim == 0, "only the vocabulary is padded"
        full = F.pad(full, (*(0, 0) * (full.dim() - 1), 0, wanted - full.shape[0]))
    return attributes.shard_of(full, dim, param.partition_stride, group_size(group), group_rank(group))


def part_of(full: torch.Tensor, param: torch.nn.Parameter, groups: ParallelGroups) -> torch.Tensor:
    """Cut like `shard_of`, also for the parameters of experts."""
    if not getattr(param, "expert_parallel", False):
        return shard_of(full, param, groups.tp)
    return shard_of(full.chunk(group_size(groups.ep))[group_rank(groups.ep)], param, groups.etp)


def sum_partial_gradients(params: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """What GradBuffer does: replicated parameters that saw a part of the sequence have part of the
    gradient."""
    for param in params:
        if param.sequence_parallel and group is not None:
            dist.all_reduce(param.grad, group=group)


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


class Calls(TorchDispatchMode):
    """Counts the calls of torch.ops.fastmp.*, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastmp":
            self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
