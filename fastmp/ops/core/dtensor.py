"""DTensor sharding strategies of all ops; importing this module registers them.

- Rows are independent: any dimension but the last may be sharded, identically in all row tensors.
- Parameters are replicated, and their gradients are partial sums. torch redistributes other placements.
- `cross_entropy` flattens its logits; torch gathers shards beyond the first dimension for that (and raises
  before 2.12).
- A dropout mask depends on an element's index in the full tensor, so `bias_dropout_add` with a seed needs
  replicated tensors.
- Ops registered without `shard`, all in-place ops among them, raise: DTensors are not supported.

The `shard` of a `register` call names the arguments with the leading dimensions of the rows, and the outputs:

    x residual -> rows rows?residual +rows

    x/2       all leading dimensions but the last two may be sharded; x: all but the last one
    +stats    one more dimension in front, of an argument or an output (`+rows`)
    ~mask     broadcast to the rows from their last dimension on
    cos~      broadcast to the rows from their first dimension on
    !seed     rules out shards where it is given
    rows?up   an output that is empty without the argument `up`
    sum       an output summed over the rows
    whole     an output of replicated arguments

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


class _Rule:
    """The sharding rule of one op, from its `shard`: maps specs to the placements for `register_sharding`."""

    def __init__(self, op: str) -> None:
        schema = OPS[op].overload._schema
        left, _, right = OPS[op].shard.partition("->")
        rows = [each.partition("/") for each in left.split()]
        self.op, self.names = op, [argument.name for argument in schema.arguments]
        self.signs = {name.strip("+~!"): name for name, *_ in rows}
        self.outputs = [each.partition("?")[::2] for each in right.split()]
        self.unsharded = max((int(number or 1) for *_, number in rows), default=0)
        unknown = {*self.signs, *(name for _, name in self.outputs if name)}.difference(self.names)
        if unknown or len(self.outputs) != len(schema.returns):
            raise ValueError(f"{op}: shard={OPS[op].shard!r} does not fit {schema}")

    def __call__(self, *values: Any) -> list[tuple[list, list]]:
        inputs = dict(zip(self.names, values))
        accepted: list[tuple[list, list]] = [
            ([Replicate() for _ in self.outputs], [_replicated(value) for value in values])
        ]
        if any(sign[0] == "!" and inputs.get(name) is not None for name, sign in self.signs.items()):
            if any(isinstance(value, DTensorSpec) and not value.is_replicated() for value in values):
                raise NotImplementedError(
                    f"{self.op}: a shard cannot draw its part of the mask of the whole tensor: call it "
                    "on local tensors, x.to_local(), with a seed for each rank, or on replicated ones"
                )
            return accepted
        if not self.signs:
            return accepted
        first, sign = next(iter(self.signs.items()))
        num_dims = inputs[first].ndim - (sign[0] == "+")
        for dim in range(num_dims - self.unsharded):
            kinds = {"rows": Shard(dim), "+rows": Shard(dim + 1), "sum": Partial()}
            results = [
                Replicate() if needed and inputs.get(needed) is None else kinds[kind]
                for kind, needed in self.outputs
            ]
            accepted.append((results, [self._input(n, value, dim, num_dims) for n, value in inputs.items()]))
        return accepted

    def _input(self, name: str, value: Any, dim: int, num_dims: int) -> Placement | None:
        """Return the placement of an argument if rows with `num_dims` dimensions are sharded along `dim`."""
        sign = self.signs.get(name)
        if sign is None or not isinstance(value, DTensorSpec):
            return _replicated(value)
        if sign == name:
            return Shard(dim)
        if sign[0] == "+":
            return Shard(dim + 1)
        if sign[0] == "~":
            mapped = dim - num_dims + value.ndim
        else:
            mapped = dim if dim < value.ndim - 1 else -1
        return Shard(mapped) if mapped >= 0 and value.shape[mapped] > 1 else Replicate()


def _replicated(value: Any) -> Placement | None:
    return Replicate() if isinstance(value, DTensorSpec) else None


def _unsupported(op: str) -> Callable:
    """Return a strategy that raises: `op` does not support DTensors."""
    writes = " writes into its arguments and" if OPS[op].overload._schema.is_mutable else ""

    def strategy(*values: Any) -> None:
        raise NotImplementedError(f"{op}{writes} takes no DTensors: call it on local tensors, x.to_local()")

    return strategy


def _register() -> None:
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for op in OPS:
        register_sharding(OPS[op].overload)(_Rule(op) if OPS[op].shard else _unsupported(op))
        # torch caches the result by its arguments, by default only those from the first int on. Here an
        # absent tensor or a flag changes the output shapes, so all arguments are part of the key.
        infos[OPS[op].overload] = RuntimeSchemaInfo(static_argnum=0)


_register()
