"""DTensor sharding strategies of all ops; importing this module registers them.

- Rows are independent: any dimension but the last may be sharded, identically in all row tensors.
- Parameters are replicated, and their gradients are partial sums. torch redistributes other placements.
- `cross_entropy` flattens its logits; torch gathers shards beyond the first dimension for that (and raises
  before 2.12).
- A dropout mask depends on an element's index in the full tensor, so `bias_dropout_add` with a seed needs
  replicated tensors.
- Ops outside `_OUTPUTS`, all in-place ops among them, raise: DTensors are not supported.

The registry imports this module when an op first gets a DTensor, or when torch.compile traces an op in a
program that has imported torch.distributed.tensor, so other programs do not pay for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from fastmp.ops.core.registry import OPS

# Arguments with the leading dimensions of the rows; `stats` have one more dimension in front.
_ROWS = set(
    "x residual up grad grad_total grad_latent grad_shared total y q k logits target merged grad_loss"
    " token_weight rstd".split()
)
# Outputs of each op: "rows", "stats", "sum" over rows, or the argument without which the output is empty.
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
    "latent_norm_rope": "rows rows rows",
    "latent_norm_rope_backward": "rows sum",
    "cross_entropy": "rows rows",
    "cross_entropy_stats": "rows",
    "cross_entropy_merge": "rows rows",
    "cross_entropy_grad": "rows",
    "bias_dropout_add": "rows",
    "bias_dropout_add_backward": "rows sum",
}


def _input(name: str, value: Any, dim: int, num_dims: int) -> Placement | None:
    """Return the placement of an argument if rows with `num_dims` dimensions are sharded along `dim`."""
    if not isinstance(value, DTensorSpec):
        return None
    if name in _ROWS:
        return Shard(dim)
    if name == "stats":
        return Shard(dim + 1)
    if name == "mask":  # broadcast, aligned to the last dimension of the rows
        mapped = dim - num_dims + value.ndim
    elif name in ("cos", "sin"):  # broadcast, aligned to the first dimension of the rows
        mapped = dim if dim < value.ndim - 1 else -1
    else:
        return Replicate()
    return Shard(mapped) if mapped >= 0 and value.shape[mapped] > 1 else Replicate()


def _is_replicated(value: Any) -> bool:
    return not isinstance(value, DTensorSpec) or value.is_replicated()


def _strategy(op: str) -> Callable:
    """Return the sharding strategy of `op` for `register_sharding`."""
    names = [argument.name for argument in OPS[op].overload._schema.arguments]
    outputs = _OUTPUTS[op].split()
    unsharded = 2 if op.startswith("scaled_masked_softmax") else 1  # a causal mask also needs all queries

    def strategy(*values: Any) -> list[tuple[list, list]]:
        inputs = dict(zip(names, values))
        num_dims = values[0].ndim - (names[0] == "stats")
        replicated = [Replicate() if isinstance(value, DTensorSpec) else None for value in values]
        accepted: list[tuple[list, list]] = [([Replicate() for _ in outputs], replicated)]
        if inputs.get("seed") is not None:
            if op == "bias_dropout_add" and not all(_is_replicated(value) for value in values):
                raise NotImplementedError(
                    "bias_dropout_add: a shard cannot draw its part of the mask of the whole tensor: call it "
                    "on local tensors, x.to_local(), with a seed for each rank, or on replicated ones"
                )
            return accepted
        for dim in range(num_dims - unsharded):
            kinds = {"rows": Shard(dim), "stats": Shard(dim + 1), "sum": Partial()}
            results = [
                kinds.get(kind, Replicate() if inputs.get(kind) is None else Shard(dim)) for kind in outputs
            ]
            accepted.append((results, [_input(n, value, dim, num_dims) for n, value in inputs.items()]))
        return accepted

    return strategy


def _unsupported(op: str) -> Callable:
    """Return a strategy that raises: `op` does not support DTensors."""
    writes = " writes into its arguments and" if OPS[op].overload._schema.is_mutable else ""

    def strategy(*values: Any) -> None:
        raise NotImplementedError(f"{op}{writes} takes no DTensors: call it on local tensors, x.to_local()")

    return strategy


def _register() -> None:
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for op in OPS:
        register_sharding(OPS[op].overload)(_strategy(op) if op in _OUTPUTS else _unsupported(op))
        # torch caches the result by its arguments, by default only those from the first int on. Here an
        # absent tensor or a flag changes the output shapes, so all arguments are part of the key.
        infos[OPS[op].overload] = RuntimeSchemaInfo(static_argnum=0)


_register()
