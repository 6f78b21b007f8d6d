"""The division of a model of transformers over a group: planned, agreed on by its ranks, made and undone.

A family's tables say which part each module gets. transformers has plans of its own for tensor parallelism;
they cover six of the ten families, and their words change from version to version. A module of which a table
does not name all parameters is refused: one that is forgotten could have a part of its gradient only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fastmp.distributed.collectives import all_reduce_
from fastmp.hf.patches import class_with
from fastmp.hf.tp_modules import (
    Divided,
    DividedModel,
    Summed,
    VocabularyColumns,
    VocabularyRows,
)
from fastmp.tensor_parallel.attributes import ParallelAttributes
from fastmp.training.replicas import checksum

# {name of a child, "" for the module itself: its part, None where it stays whole}
Table = Mapping[str, type[Divided] | None]
_RANDOM = ("attention_dropout", "jitter_noise")
_AROUND = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}  # classes, and what they hold
_LOOKED_AT = 4096  # elements of a tensor, which tell weights from others


@dataclass(frozen=True)
class Share:
    """A module and the part that it gets; `label` is its line in what `accelerate` returns."""

    module: Any
    part: type[Divided]
    name: str
    label: str


def plan_division(
    model: Any, tables: Mapping[type, Table], size: int, replaced: Mapping[nn.Module, type]
) -> list[Share]:
    """The modules that are divided, and how; `replaced`: what classes modules will have before.

    Changes nothing. ValueError for what cannot be divided.
    """
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(model.config, name, None)
        if isinstance(count, int) and count % size:
            raise ValueError(f"accelerate: {name} {count} is not divisible by the {size} ranks of the group")
    for name, module in model.named_modules():
        for attribute in _RANDOM if not isinstance(module, nn.Dropout) else ("p",):
            if value := getattr(module, attribute, 0.0):
                raise ValueError(
                    f"accelerate: {name}.{attribute} is {value}, and ranks that divide a model do not draw "
                    "random numbers alike; make the model with 0 there"
                )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"accelerate: {type(model).__name__} is on the meta device and has no weights of which ranks "
            "could keep parts; load them before"
        )
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"accelerate: {type(model).__name__} has an adapter of PEFT, which ranks do not divide"
        )
    shares = list(_shares(model, tables))
    for share in shares:
        if why := share.part.why_not(share.module):
            raise ValueError(f"accelerate: {share.name} {why}, which is not divided over ranks")
        for attribute in share.part.needs:
            if not hasattr(replaced.get(share.module, type(share.module)), attribute):
                raise ValueError(
                    f"accelerate: {share.name} is a {type(share.module).__name__} without {attribute}, which "
                    "is not divided over ranks"
                )
        _check_sizes(share, size)
    return shares


def _shares(model: Any, tables: Mapping[type, Table]) -> Iterator[Share]:
    vocabulary = {
        model.get_input_embeddings(): VocabularyRows,
        model.get_output_embeddings(): VocabularyColumns,
    }
    for name, module in model.named_modules():
        if module in vocabulary:
            yield Share(module, vocabulary[module], name, name)
        table, label = tables.get(type(module)), type(module).__name__
        if table is None:
            continue
        for child, part in {"": module, **dict(module.named_children())}.items():
            if child not in table:
                for parameter, _ in part.named_parameters(recurse=bool(child)):
                    where = f"{name}.{child}.{parameter}".replace("..", ".")
                    raise ValueError(f"accelerate: how to divide {where} over ranks is not known")
            elif (style := table[child]) is not None:
                yield Share(part, style, f"{name}.{child}".strip("."), f"{label}.{child}".strip("."))


def _check_sizes(share: Share, size: int) -> None:
    for name, marks in share.part.cut(share.module).items():
        dim, blocks = marks.partition_dim, marks.partition_stride
        length = getattr(share.module, name).shape[dim]
        if length % (size * blocks) and not share.part.padded:
            cut = f"{length} in {blocks} blocks" if blocks > 1 else str(length)
            raise ValueError(
                f"accelerate: dimension {dim} of {share.name}.{name}, {cut}, is not divisible by the {size} "
                "ranks of the group"
            )


def agree(model: nn.Module, group: ProcessGroup, error: ValueError | None) -> None:
    """Raise, on all ranks, the `error` of one, or that they do not have the same weights. Collective."""
    sums = {
        name: int(checksum(tensor.reshape(-1)[:_LOOKED_AT]))
        for name, tensor in ({} if error else model.state_dict()).items()
    }
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, (None if error is None else str(error), sums), group=group)
    if error is not None:
        raise error
    for rank, (problem, others) in enumerate(everyones):
        if problem is not None:
            raise ValueError(f"{problem} (on rank {rank} of the group)")
        for name in everyones[0][1]:
            if others.get(name) != everyones[0][1][name]:
                raise ValueError(
                    f"accelerate: {name} of rank {rank} of the group is not that of rank 0; load the same "
                    "weights on every rank, or seed all of them alike before the model is made"
                )


def divide(model: Any, shares: list[Share], group: ProcessGroup) -> None:
    """Give every module its part."""
    for share in shares:
        share.module.__class__ = class_with(type(share.module), share.part)
        share.module.divide_(group)
    model.__class__ = class_with(type(model), DividedModel)
    model.group = group


def join(model: Any) -> None:
    """Undo `divide`: gather all parts again. Collective; does nothing to a model that is not divided."""
    if isinstance(model, DividedModel):
        del model.group
        model.__class__ = type(model).original  # type: ignore[assignment]
        for module in list(model.modules()):
            if isinstance(module, Divided):
                module.join_()


def rows_of(model: nn.Module, shares: list[Share]) -> list[tuple[str, int, str | None]]:
    """What is divided: (label, number of modules, how); and the classes of what stays whole, with None."""
    cut = {id(getattr(share.module, name)) for share in shares for name in share.part.cut(share.module)}
    cut |= {id(p) for share in shares if share.part is Summed for p in share.module.parameters()}
    found = Counter((share.label, share.part.by) for share in shares if share.part.by)
    whole = Counter(
        type(module).__name__
        for module in model.modules()
        if any(id(parameter) not in cut for parameter in module.parameters(recurse=False))
    )
    return [
        *((label, count, how) for (label, how), count in found.items()),
        *((label, count, None) for label, count in whole.items()),
    ]


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """The `state_dict` of a divided model as it is undivided, on the CPU: for `save_pretrained`, for example.

    All ranks of the group call it. The first one gets the tensors, the others an empty dict; one tensor at a
    time is gathered. Names are those without DDP and torch.compile around the model. A model that is not
    divided, as with a group of one rank, is its own first rank.
    """
    while (around := _AROUND.get(type(model).__name__)) is not None:
        model = getattr(model, around)
    group, divided = group_of(model), _divided(model)
    first = group is None or group.rank() == 0
    names = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    found, gathered = dict[str, Any](), dict[int, Tensor]()
    for name, tensor in model.state_dict().items():
        key = names.get(name)
        if key in gathered:  # tied ones stay one tensor
            found[name] = gathered[key]
            continue
        whole = _unsharded(tensor)
        if key in divided:
            module, marks = divided[key]
            whole = module.whole(whole, marks)
        found[name] = whole.cpu() if first else whole.new_empty(0)
        if key is not None:
            gathered[key] = found[name]
    return found if first else {}


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of a divided model so that the 2-norm of all of them is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, which would give ranks different norms. Returns the norm before, the
    same on every rank; all ranks of the group call it. Of a model that is not divided it is torch's own norm.
    """
    group, divided = group_of(model), _divided(model)
    with_grad = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grads: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in with_grad:
        assert parameter.grad is not None
        grads[id(parameter) in divided].append(parameter.grad)
    device = next(model.parameters()).device  # where the norm of no gradients is not
    norms = (_unsharded(nn.utils.get_total_norm(grads[part])) for part in (True, False))
    squares = [norm.to(device, torch.float64).square() for norm in norms]
    if group is not None:
        all_reduce_(squares[0], group)
    norm = (squares[0] + squares[1]).sqrt()
    nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return norm


def _divided(model: nn.Module) -> dict[int, tuple[Any, ParallelAttributes]]:
    """The modules and marks of the parameters that are divided, by their ids."""
    return {
        id(getattr(module, name)): (module, marks)
        for module in model.modules()
        if isinstance(module, Divided)
        for name, marks in module.division.items()
    }


def _unsharded(tensor: Tensor) -> Tensor:
    """What `fully_shard` has divided over other ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def group_of(model: nn.Module) -> ProcessGroup | None:
    """The group over which a model is divided, or one that it holds."""
    return next((module.group for module in model.modules() if isinstance(module, DividedModel)), None)
