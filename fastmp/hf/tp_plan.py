"""Tensor parallelism of a transformers model: plan it, check it on all ranks, apply it and undo it.

A family's `tp_plan` names the class of each module. transformers has tensor-parallel plans as well; they
cover six of the ten families, and their vocabulary changes between versions. A table must name all parameters
of its module, otherwise planning raises ValueError: a parameter left out might get a partial gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fastmp.distributed.collectives import all_reduce_, gather_objects
from fastmp.hf.families.family import TPTable
from fastmp.hf.mesh import all_ranks, full_tensor
from fastmp.hf.patches import patched_class
from fastmp.hf.tp_modules import (
    PerHeadNorm,
    TPEmbedding,
    TPHead,
    TPModel,
    TPModule,
)
from fastmp.tensor_parallel.attributes import ParallelAttributes
from fastmp.training.replicas import checksum

_RANDOM = ("attention_dropout", "jitter_noise")
_WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}  # {class: its model}
_CHECKSUM_ELEMENTS = 4096  # of a tensor, to compare the weights of ranks


@dataclass(frozen=True)
class ModulePlan:
    """A module, its name in the model, its tensor-parallel class, and its label in `Accelerated`'s table."""

    module: Any
    mixin: type[TPModule]
    name: str
    label: str


def plan_tensor_parallel(
    model: Any, tables: Mapping[type, TPTable], size: int, replaced: Mapping[nn.Module, type]
) -> list[ModulePlan]:
    """Plan the sharding of a model; the model is not modified.

    Args:
        model: the transformers model.
        tables: {class: the tensor-parallel classes of its children}.
        size: the number of ranks.
        replaced: {module: the class that `accelerate` gives it before}.

    Raises:
        ValueError: a module cannot be sharded over `size` ranks, or has no tensor-parallel plan.
    """
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(model.config, name, None)
        if isinstance(count, int) and count % size:
            raise ValueError(f"accelerate: {name} {count} is not divisible by the {size} ranks of the group")
    for name, module in model.named_modules():
        for attribute in _RANDOM if not isinstance(module, nn.Dropout) else ("p",):
            if value := getattr(module, attribute, 0.0):
                raise ValueError(
                    f"accelerate: {name}.{attribute} is {value}; dropout and jitter are not supported with a "
                    "group, whose ranks draw different random numbers; make the model with 0"
                )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"accelerate: {type(model).__name__} is on the meta device and has no weights to shard; load "
            "them first"
        )
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"accelerate: {type(model).__name__} has a PEFT adapter, which is not supported with a group"
        )
    plans = list(_module_plans(model, tables))
    for plan in plans:
        if why := plan.mixin.why_not(plan.module):
            raise ValueError(f"accelerate: {plan.name} {why}, which has no tensor-parallel form")
        for attribute in plan.mixin.needs:
            if not hasattr(replaced.get(plan.module, type(plan.module)), attribute):
                raise ValueError(
                    f"accelerate: {plan.name} is a {type(plan.module).__name__} without {attribute}, which "
                    "has no tensor-parallel form"
                )
        _check_divisible(plan, size)
    return plans


def _module_plans(model: Any, tables: Mapping[type, TPTable]) -> Iterator[ModulePlan]:
    vocabulary = {
        model.get_input_embeddings(): TPEmbedding,
        model.get_output_embeddings(): TPHead,
    }
    for name, module in model.named_modules():
        if module in vocabulary:
            yield ModulePlan(module, vocabulary[module], name, name)
        table, label = tables.get(type(module)), type(module).__name__
        if table is None:
            continue
        for child, child_module in {"": module, **dict(module.named_children())}.items():
            if child not in table:
                for parameter, _ in child_module.named_parameters(recurse=bool(child)):
                    where = f"{name}.{child}.{parameter}".replace("..", ".")
                    raise ValueError(f"accelerate: no tensor-parallel plan for {where}")
            elif (mixin := table[child]) is not None:
                path, row = (f"{prefix}.{child}".strip(".") for prefix in (name, label))
                yield ModulePlan(child_module, mixin, path, row)


def _check_divisible(plan: ModulePlan, size: int) -> None:
    for name, attributes in plan.mixin.sharding(plan.module).items():
        dim, blocks = attributes.partition_dim, attributes.partition_stride
        length = getattr(plan.module, name).shape[dim]
        if length % (size * blocks) and not plan.mixin.padded:
            sizes = f"{length} in {blocks} blocks" if blocks > 1 else str(length)
            raise ValueError(
                f"accelerate: dimension {dim} of {plan.name}.{name}, {sizes}, is not divisible by the {size} "
                "ranks of the group"
            )


def agree(model: nn.Module, group: ProcessGroup, error: ValueError | None) -> None:
    """Raise the `error` of one rank on all ranks, or an error if their weights differ. Collective."""
    sums = {
        name: int(checksum(tensor.reshape(-1)[:_CHECKSUM_ELEMENTS]))
        for name, tensor in ({} if error else model.state_dict()).items()
        if not (tensor.is_meta or isinstance(tensor, DTensor))  # not loaded yet, or sharded by fully_shard
    }
    reports = gather_objects((None if error is None else str(error), sums), group)
    if error is not None:
        raise error
    for rank, (problem, others) in enumerate(reports):
        if problem is not None:
            raise ValueError(f"{problem} (on rank {rank} of the group)")
        for name in reports[0][1]:
            if others.get(name) != reports[0][1][name]:
                raise ValueError(
                    f"accelerate: {name} of rank {rank} of the group differs from that of rank 0; load the "
                    "same weights on every rank, or seed all ranks with the same number before making the "
                    "model"
                )


def shard_model(model: Any, plans: list[ModulePlan], group: ProcessGroup) -> None:
    """Give every module its tensor-parallel class and keep this rank's shards."""
    for plan in plans:
        plan.module.__class__ = patched_class(type(plan.module), plan.mixin)
        plan.module.shard_(group)
    model.__class__ = patched_class(type(model), TPModel)
    model.group = group


def unshard_model(model: Any) -> None:
    """Undo `shard_model` by gathering all shards. Collective; returns if the model is not sharded."""
    if isinstance(model, TPModel):
        del model.group
        model.__class__ = type(model).original  # type: ignore[assignment]
        for module in list(model.modules()):
            if isinstance(module, TPModule):
                module.unshard_()


def count_modules(model: nn.Module, plans: list[ModulePlan]) -> list[tuple[str, int, str | None]]:
    """Return (label, number of modules, sharded dimension); the dimension is None for replicated classes."""
    handled = {id(getattr(plan.module, name)) for plan in plans for name in plan.mixin.sharding(plan.module)}
    handled |= {id(p) for plan in plans if plan.mixin is PerHeadNorm for p in plan.module.parameters()}
    found = Counter((plan.label, plan.mixin.by) for plan in plans if plan.mixin.by)
    replicated = Counter(
        type(module).__name__
        for module in model.modules()
        if any(id(parameter) not in handled for parameter in module.parameters(recurse=False))
    )
    return [
        *((label, count, how) for (label, how), count in found.items()),
        *((label, count, None) for label, count in replicated.items()),
    ]


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Gather the `state_dict` of a sharded model on the CPU, for `save_pretrained` for example. Collective.

    One tensor is gathered at a time. A model that is not sharded is copied.

    Args:
        model: a model after `accelerate` with a group or mesh; prefixes of DDP and torch.compile are removed.

    Returns:
        Full tensors on the first rank of the group or mesh, an empty dict on the others.

    Example (needs several ranks):
        >>> state = whole_state_dict(model)  # on all ranks of the group
        >>> if runtime.rank == 0:
        ...     model.save_pretrained("trained", state_dict=state)
    """
    while (around := _WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, around)
    group, sharded = group_of(model), _sharded_parameters(model)
    over = getattr(model, "mesh", None)  # of a model that is sharded over a mesh
    ranks = group if over is None else all_ranks(over)
    first = ranks is None or ranks.rank() == 0
    names = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    found, gathered = dict[str, Any](), dict[int, Tensor]()
    for name, tensor in model.state_dict().items():
        key = names.get(name)
        if key in gathered:  # tied parameters stay one tensor
            found[name] = gathered[key]
            continue
        full = full_tensor(tensor)
        if key in sharded:
            module, attributes = sharded[key]
            full = module.gather(full, attributes)
        found[name] = full.cpu() if first else full.new_empty(0)
        if key is not None:
            gathered[key] = found[name]
    return found if first else {}


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Clip the 2-norm of a sharded model's gradients at `max_norm`. Collective.

    `torch.nn.utils.clip_grad_norm_` would compute a different norm on every rank of a group, and raises an
    error for parameters that are sharded over several meshes.

    Args:
        model: a model after `accelerate` with a group or mesh, or any other model.
        max_norm: the largest norm.

    Returns:
        The norm before clipping, the same on every rank.

    Example (needs several ranks):
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
        >>> grad_norm = clip_grad_norm_(model, 1.0)
        >>> optimizer.step()
    """
    group, sharded = group_of(model), _sharded_parameters(model)
    with_grad = [parameter for parameter in model.parameters() if parameter.grad is not None]
    # 1. Local shards of gradients by the groups over which their squares add up to the whole.
    by_groups: dict[tuple[ProcessGroup, ...], list[Tensor]] = {} if group is None else {(group,): []}
    for parameter in with_grad:
        assert parameter.grad is not None
        groups = [group] if group is not None and id(parameter) in sharded else []
        local, meshes = _local_shard(parameter.grad)
        by_groups.setdefault((*groups, *meshes), []).append(local)
    # 2. Sums of squares, all-reduced over those groups.
    device = next(model.parameters()).device  # the norm of an empty list is on the CPU
    total = torch.zeros((), dtype=torch.float64, device=device)
    for several, grads in by_groups.items():
        square = nn.utils.get_total_norm(grads).to(device, torch.float64).square()
        for each in several:
            all_reduce_(square, each)
        total += square
    # 3. Scale the shards in place.
    norm = total.sqrt()
    every = [grad for grads in by_groups.values() for grad in grads]
    if every:
        torch._foreach_mul_(every, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _local_shard(tensor: Tensor) -> tuple[Tensor, list[ProcessGroup]]:
    """Return the shard of this rank, and the groups over which a DTensor is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor, []
    sharded = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tensor.to_local(), [tensor.device_mesh.get_group(dim) for dim in sharded]


def _sharded_parameters(model: nn.Module) -> dict[int, tuple[Any, ParallelAttributes]]:
    """Return {id of a sharded parameter: (its module, its sharding)}."""
    return {
        id(getattr(module, name)): (module, attributes)
        for module in model.modules()
        if isinstance(module, TPModule)
        for name, attributes in module.shard_attributes.items()
    }


def group_of(model: nn.Module) -> ProcessGroup | None:
    """Return the group over which `model`, or a model inside it, is sharded, or None."""
    return next((module.group for module in model.modules() if isinstance(module, TPModel)), None)
