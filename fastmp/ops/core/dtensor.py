"""Sharding strategies of ops for `DTensor`s; importing this file registers one for every op.

Rows are independent, so every dimension of a row tensor but the last may be sharded, in all of them alike.
Parameters are replicated; their gradients are partial sums. torch redistributes whatever comes otherwise; and
`cross_entropy` flattens its logits, for which torch gathers what is sharded beyond the first dimension (or
refuses to, before 2.12).
A dropout mask depends on where in the whole tensor an element lies, so that a shard cannot draw its part of
it: with a mask `bias_dropout_add` takes replicated tensors. Ops outside `_OUTPUTS`, those that write in place
among them, say that they take local tensors.
The registry imports this file when an op first meets a DTensor, or when torch.compile traces an op in a
program that has torch.distributed.tensor: only programs with DTensors pay for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from fastmp.ops.core.registry import OPS

# Arguments whose leading dimensions are those of the rows; `stats` have one more dimension before them.
_ROWS = set("x residual up grad grad_total total y q k logits target lse grad_loss token_weight".split())
# What each op returns: rows, rows that are empty without the named argument, stats, or sums over rows.
_OUTPUTS = {
    "rms_norm": "rows residual stats",
    "rms_norm_backward": "rows sum",
    "layer_norm": "rows residual stats",
    "layer_norm_backward": "rows sum",
    "bias_gelu": "rows",
    "bias_gelu_backward": "rows sum",
    "gated_activation": "rows",
    "gated_activation_backward": "rows up sum",
    "clamped_swiglu": "rows",
    "clamped_swiglu_backward": "rows",
    "scaled_masked_softmax": "rows",
    "scaled_masked_softmax_backward": "rows",
    "rope": "rows k",
    "cross_entropy": "rows rows",
    "cross_entropy_stats": "rows",
    "cross_entropy_merge": "rows rows",
    "cross_entropy_grad": "rows",
    "bias_dropout_add": "rows",
    "bias_dropout_add_backward": "rows sum",
}


def _input(name: str, value: Any, dim: int, num_dims: int) -> Placement | None:
    """Placement of an argument where rows of `num_dims` dimensions are sharded in `dim`; None without one."""
    if not isinstance(value, DTensorSpec):
        return None
    if name in _ROWS:
        return Shard(dim)
    if name == "stats":
        return Shard(dim + 1)
    if name == "mask":  # broadcast: its last dimension is that of the rows
        own = dim - num_dims + value.ndim
    elif name in ("cos", "sin"):  # broadcast: their first dimension is that of the rows
        own = dim if dim < value.ndim - 1 else -1
    else:
        return Replicate()
    return Shard(own) if own >= 0 and value.shape[own] > 1 else Replicate()


def _is_whole(value: Any) -> bool:
    return not isinstance(value, DTensorSpec) or value.is_replicated()


def _strategy(op: str) -> Callable:
    """The placements that `op` accepts and what they give, as `register_sharding` wants them."""
    names = [argument.name for argument in OPS[op].overload._schema.arguments]
    outputs = _OUTPUTS[op].split()
    whole = 2 if op.startswith("scaled_masked_softmax") else 1  # a causal mask counts queries, too

    def strategy(*values: Any) -> list[tuple[list, list]]:
        given = dict(zip(names, values))
        num_dims = values[0].ndim - (names[0] == "stats")
        replicated = [Replicate() if isinstance(value, DTensorSpec) else None for value in values]
        accepted: list[tuple[list, list]] = [([Replicate() for _ in outputs], replicated)]
        if given.get("seed") is not None:
            if op == "bias_dropout_add" and not all(_is_whole(value) for value in values):
                raise NotImplementedError(
                    "bias_dropout_add: a shard cannot draw its part of the mask of the whole tensor: call it "
                    "on local tensors, x.to_local(), with a seed for each rank, or on replicated ones"
                )
            return accepted
        for dim in range(num_dims - whole):
            kinds = {"rows": Shard(dim), "stats": Shard(dim + 1), "sum": Partial()}
            results = [
                kinds.get(kind, Replicate() if given.get(kind) is None else Shard(dim)) for kind in outputs
            ]
            accepted.append((results, [_input(n, value, dim, num_dims) for n, value in given.items()]))
        return accepted

    return strategy


def _refusal(op: str) -> Callable:
    """A strategy that says that `op` takes no DTensors."""
    writes = " writes into its arguments and" if OPS[op].overload._schema.is_mutable else ""

    def refuse(*values: Any) -> None:
        raise NotImplementedError(f"{op}{writes} takes no DTensors: call it on local tensors, x.to_local()")

    return refuse


def _register() -> None:
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for op in OPS:
        register_sharding(OPS[op].overload)(_strategy(op) if op in _OUTPUTS else _refusal(op))
        # torch keeps what it worked out, and by itself ignores all arguments before the first int: an absent
        # tensor or a flag changes the shapes of results, so all of them count
        infos[OPS[op].overload] = RuntimeSchemaInfo(static_argnum=0)


_register()
