"""Muon for hidden matrices, AdamW for the rest, on the flat buffers of `fastmp.optim.grad_buffers`.

Muon keeps a moving average of the gradients of a matrix and steps in the direction of its nearest orthogonal
matrix (`newton_schulz.py`), which needs the whole matrix. So one data-parallel rank owns each parameter, with
its state and its update (`flat_layout.whole_layout`). A step on a rank:

1. Average the gradients of this rank's shard; tensor-parallel ranks each average their own slices.
2. An all-to-all over the tensor-parallel group brings the slices of a matrix to one of its ranks.
3. Orthogonalise matrices of equal shape in batches.
4. A second all-to-all brings the slices of the updates back.
5. Update the master weights, round the parameters, and start the all-gather over data-parallel ranks.

Steps 2 and 4 are two collectives for all dense matrices together, and two more for experts over their own
tensor-parallel ranks. Fused weights are several matrices: query, key and value; gate and up; every expert
(`ParallelAttributes`).

Jordan et al., "Muon", 2024. The step of a matrix (R, C) has 0.2 sqrt(max(R, C)) times the learning rate: its
mean square is then that of AdamW, and one learning rate and decay serve both. Liu et al., "Muon is Scalable
for LLM Training", 2025 (arXiv 2502.16982).

N matrices, R rows, C columns, T tensor-parallel ranks, r and c rows and columns of a slice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fastmp.config import OPTIMIZERS, OptimizerConfig
from fastmp.distributed.collectives import all_to_all, group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.optim.adamw import AdamW, adamw_options
from fastmp.optim.flat_layout import matrix_cost, owner_ranks
from fastmp.optim.flat_params import FlatState
from fastmp.optim.grad_buffers import FlatBuffer, GradBuffer
from fastmp.optim.newton_schulz import orthogonalize
from fastmp.optim.optimizer import Optimizer, ParameterGroup, check_range, has_other_ranks
from fastmp.tensor_parallel.attributes import ParallelAttributes, parallel_attributes

__all__ = ["Muon", "is_hidden_matrix", "update_cost"]

At = tuple[int, int]  # buffer, bucket
_RMS = 0.2  # about the root mean square of an AdamW update
_BATCH = 1 << 26  # elements of a batch of matrices
_NOT_HIDDEN = re.compile(r"embed|(^|\.)(wte|wpe|lm_head|head|output_layer|classifier|router|gate)(\.|$)")


def is_hidden_matrix(name: str, param: Parameter) -> bool:
    """Return True for a matrix, or a stack of experts' matrices, between hidden states.

    Embeddings, output layers and routers are recognised by their names, tied tables of two stages by their
    marks.
    """
    marks = parallel_attributes(param)
    matrix = param.ndim == 2 + marks.expert_parallel and min(param.shape[-2:]) > 1
    return matrix and not marks.pipeline_shared and not _NOT_HIDDEN.search(name)


def update_cost(
    name: str,
    param: Parameter,
    *,
    tp_group: dist.ProcessGroup | None = None,
    etp_group: dist.ProcessGroup | None = None,
    select: Callable[[str, Parameter], bool] = is_hidden_matrix,
) -> int:
    """Return the cost of Muon's update over all tensor-parallel ranks; 0 if AdamW updates the parameter.

    It is the `cost` of a `GradBuffer`.

    Args:
        tp_group, etp_group: the group that a parameter is sharded over; etp_group for those of experts.
        select: (name, parameter) -> True if Muon updates it.

    Raises:
        ValueError: a selected parameter that is neither a matrix nor a stack of experts' matrices, or whose
            rows its `fused_rows` do not divide.
    """
    if not select(name, param):
        return 0
    marks = parallel_attributes(param)
    ranks = group_size(etp_group if marks.expert_parallel else tp_group)
    cut = _cut(marks, ranks)
    total = sum(_cost(block.shape, cut, ranks) for block in _blocks(name, param, marks))
    return total if cut else total * ranks


def _cost(shape: torch.Size, cut: int, ranks: int) -> int:
    """Return the cost of the whole matrices of which a rank has slices (N, groups, rows of a group, c)."""
    n, groups, width, columns = shape
    rows = groups * width * (ranks if cut == 1 else 1)
    return n * matrix_cost(rows, columns * (ranks if cut == 2 else 1))


def _cut(marks: ParallelAttributes, ranks: int) -> int:
    """Return the dimension of (N, R, C) that is sharded over tensor-parallel ranks; 0 if replicated."""
    if ranks == 1 or not marks.tensor_model_parallel:
        return 0
    return 1 + marks.partition_dim - marks.expert_parallel


def _blocks(name: str, tensor: Tensor, marks: ParallelAttributes) -> list[Tensor]:
    """Return the fused matrices of a parameter, as views (N, groups, rows of a group, C)."""
    if tensor.ndim != 2 + marks.expert_parallel:
        raise ValueError(
            f"Muon: parameter {name!r} of shape {tuple(tensor.shape)} is no matrix, nor a stack of experts' "
            "matrices; leave it to AdamW (select=)"
        )
    stack = tensor if marks.expert_parallel else tensor.unsqueeze(0)
    if marks.fused_rows:
        group = sum(marks.fused_rows)
        if stack.shape[1] % group:
            raise ValueError(
                f"Muon: parameter {name!r} has {stack.shape[1]} rows, which its fused_rows "
                f"{marks.fused_rows} do not divide"
            )
        return list(stack.unflatten(1, (-1, group)).split(marks.fused_rows, 2))
    dim = 1 + marks.partition_dim - marks.expert_parallel
    parts = stack.chunk(marks.partition_stride, dim) if marks.partition_stride > 1 else (stack,)
    return [part.unsqueeze(1) for part in parts]


class Muon(AdamW):
    """Muon on the parameters of a `GradBuffer` that have a cost, AdamW on the others.

    Args:
        grads: the gradients, made with `cost=update_cost`, which selects the parameters of Muon.
        tp_group, etp_group: the tensor-parallel groups of dense parameters and of experts, as passed to
            `update_cost`.
        momentum: the decay rate of the average of gradients, with Nesterov's look-ahead.
        adamw: the other arguments of `AdamW`. Learning rate, weight decay and groups apply to both. With
            small states, a bfloat16 matrix has a remainder and a float32 average: 6 bytes a parameter.

    Its state entries are "momentum" and "master" or "remainder". Matrices are orthogonalised in bfloat16 on a
    GPU, in float32 on a CPU, and in float64 if they are float64.

    Raises:
        ValueError: as `AdamW`; a momentum outside [0, 1); or, on the only rank, no parameter with a cost.

    Example:
        grads = GradBuffer(model.named_parameters(), cost=update_cost)
        optimizer = Muon(grads, lr=2e-3, momentum=0.95)
        grads.zero()
        model(x).sum().backward()
        grads.reduce()
        optimizer.step()
        grads.remove_hooks()
    """

    def __init__(
        self,
        grads: GradBuffer,
        *,
        tp_group: dist.ProcessGroup | None = None,
        etp_group: dist.ProcessGroup | None = None,
        momentum: float = 0.95,
        **adamw: Any,
    ) -> None:
        super().__init__(grads, **adamw)
        check_range(self.name, below=1.0, momentum=momentum)
        self.momentum = momentum
        teams: dict[Any, tuple[dist.ProcessGroup | None, list[At]]] = {}
        for at in self.order:
            flat = self.flats[at[0]]
            if isinstance(flat, _MuonFlat):
                group = etp_group if flat.grads.plan.experts else tp_group
                together = flat.ranks_of_slices(group)
                key = (together, flat.dtype) if together else at
                teams.setdefault(key, (group if together else None, []))[1].append(at)
        if self.parameters and not teams and not has_other_ranks():  # those may have some
            raise ValueError(
                "Muon: no parameter has a cost; make the GradBuffer with cost=update_cost, or use AdamW"
            )
        self._teams = []
        for group, places in teams.values():
            members = [(flat, j) for i, j in places if isinstance(flat := self.flats[i], _MuonFlat)]
            self._teams.append((places, _Team(members, group)))

    @classmethod
    def from_config(
        cls, grads: GradBuffer, config: OptimizerConfig, groups: ParallelGroups, **options: Any
    ) -> Optimizer:
        """Make the optimizer of a recipe; AdamW on a rank whose stages have no hidden matrices."""
        if not any(flat.plan.whole for flat in grads.flats):
            return AdamW.from_config(grads, config, groups, **options)
        tp = {"tp_group": groups.tp, "etp_group": groups.etp}
        return cls(grads, momentum=config.momentum, **tp, **adamw_options(config), **options)

    def make_state(self, grads: FlatBuffer, number: int) -> FlatState:
        if grads.plan.whole:
            return _MuonFlat(grads, self.name, self.group_of, self.states)
        return super().make_state(grads, number)

    def update(self, skip: Tensor | None, inv_scale: Tensor | None, clip_coefficient: Tensor | None) -> None:
        super().update(skip, inv_scale, clip_coefficient)
        factors = [each for each in (inv_scale, clip_coefficient) if each is not None]
        factor = math.prod(factors[1:], start=factors[0]) if factors else None
        for places, team in self._teams:
            team.step(self.lr, self.momentum, factor, skip)
            for at in places:
                self.start_gather(at)


def _orthogonal_dtype(main: torch.dtype, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if main == torch.float32 and device.type == "cuda" else main


class _MuonFlat(FlatState):
    """A flat buffer of whole matrices. dtype: of their orthogonalisation."""

    def __init__(
        self, grads: FlatBuffer, optimizer: str, group_of: Mapping[str, ParameterGroup], states: str
    ) -> None:
        super().__init__(grads, optimizer, states, OPTIMIZERS["muon"].state_of(matrix=True))
        self.dtype = _orthogonal_dtype(self.moments["momentum"].dtype, self.params.device)
        self._runs = [self._runs_of(shard, group_of) for shard in grads.shards]

    def _runs_of(
        self, shard: tuple[int, int], group_of: Mapping[str, ParameterGroup]
    ) -> list[tuple[int, int, ParameterGroup]]:
        """Return (first, end, group) of the longest ranges of a shard with one group, padding included."""
        runs: list[tuple[int, int, ParameterGroup]] = []
        for name, (first, last) in self.members(shard):
            start, group = first - shard[0], group_of[name]
            if runs and runs[-1][2] == group:
                start = runs.pop()[0]
            runs.append((start, last - shard[0], group))
        return runs

    def members(self, shard: tuple[int, int]) -> list[tuple[str, tuple[int, int]]]:
        """Return the parameters in this rank's shard of a bucket, and their ranges in the buffer."""
        pieces = self.grads.pieces.items()
        return [
            (name, piece.global_range)
            for name, piece in pieces
            if shard[0] <= piece.global_range[0] < shard[1]
        ]

    def ranks_of_slices(self, group: dist.ProcessGroup | None) -> tuple[int, ...]:
        """Return the ranks that hold slices of these matrices; () if they are replicated."""
        sliced = any(parallel_attributes(p).tensor_model_parallel for p in self.grads.parameters.values())
        if group is None or group_size(group) == 1 or not sliced:
            return ()
        return tuple(dist.get_process_group_ranks(group))

    def average(
        self, number: int, out: Tensor, momentum: float, factor: Tensor | None, skip: Tensor | None
    ) -> None:
        """Update this rank's moments of a bucket, and write the matrices to orthogonalise to `out`."""
        average = self.moments["momentum"][self.local[number]]
        grad = self.grads.grad[slice(*self.grads.shards[number])].to(average.dtype)
        grad = grad if factor is None else grad * factor
        new = average.lerp(grad, 1 - momentum)
        out.copy_(grad.lerp(new, momentum))
        average.copy_(new if skip is None else torch.where(skip, average, new))

    def apply(self, number: int, updates: Tensor, lr: float | Tensor, skip: Tensor | None) -> None:
        """Decay this rank's master weights of a bucket and subtract `updates` times the learning rate."""
        old = self.master_weights(number)
        new = old.clone()
        for start, end, group in self._runs[number]:
            rate = lr * group.lr
            new[start:end].mul_(1 - rate * group.weight_decay).sub_(updates[start:end].to(new.dtype) * rate)
        self.set_master_weights(number, new if skip is None else torch.where(skip, old, new))
        self.steps[number] += 1 if skip is None else ~skip


class _Unit(NamedTuple):
    """N matrices of one shape with one owner, as a view of the updates of their team.

    size, stride, offset: of the view (N, groups, rows of a group, C) of this rank's slices.
    cut: the dimension of (N, R, C) that is sharded; 0: none.
    cost: of the whole matrices.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    cut: int
    cost: int

    def of(self, updates: Tensor) -> Tensor:
        return updates.as_strided(self.size, self.stride, self.offset)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (N, r, c) of this rank's slices."""
        n, groups, width, columns = self.size
        return n, groups * width, columns


class _Team:
    """Buckets whose matrices are updated together. group: the ranks over which matrices are sharded."""

    def __init__(self, members: list[tuple[_MuonFlat, int]], group: dist.ProcessGroup | None) -> None:
        self._group, self._ranks, self._members = group, group_size(group), []
        units, end = list[_Unit](), 0
        for flat, number in members:
            shard = flat.grads.shards[number]
            for name, (first, _) in flat.members(shard):
                units += _units(name, flat.grads.parameters[name], end + first - shard[0], self._ranks)
            start, end = end, end + shard[1] - shard[0]
            self._members.append((flat, number, slice(start, end)))
        self._size = end
        self._whole = [unit for unit in units if not unit.cut]
        sliced = {str(number): unit for number, unit in enumerate(units) if unit.cut}
        owners = owner_ranks({number: unit.cost for number, unit in sliced.items()}, self._ranks)
        by_owner = [[sliced[n] for n in sliced if owners[n] == rank] for rank in range(self._ranks)]
        self._sent = [unit for of_owner in by_owner for unit in of_owner]
        self._sizes = [sum(math.prod(unit.shape) for unit in of_owner) for of_owner in by_owner]
        self._mine = by_owner[group_rank(group)]

    def step(self, lr: float | Tensor, momentum: float, factor: Tensor | None, skip: Tensor | None) -> None:
        """Update this rank's shards of all members; the numbers are those of the module's docstring."""
        # 1. Average, on the current stream as everything here.
        first = self._members[0][0]
        updates = first.params.new_empty(self._size, dtype=first.dtype)
        for flat, number, at in self._members:
            flat.average(number, updates[at], momentum, factor, skip)
        # 2. and 3. Replicated matrices stay here; slices of the others go to their owners.
        own = [unit.of(updates) for unit in self._whole]
        matrices = [view.reshape(unit.shape) for view, unit in zip(own, self._whole, strict=True)]
        results = _orthogonalize_all(matrices + self._collect(updates))
        for view, result in zip(own, results):
            view.copy_(result.reshape(view.shape))
        # 4. and 5. The updates come back as slices.
        self._return(results[len(own) :], updates)
        for flat, number, at in self._members:
            flat.apply(number, updates[at], lr, skip)

    def _collect(self, updates: Tensor) -> list[Tensor]:
        """Send slices to their owners by all-to-all; return the matrices (N, R, C) that this rank owns."""
        if not self._sent:
            return []
        slices = torch.cat([unit.of(updates).reshape(-1) for unit in self._sent])
        mine = [self._sizes[group_rank(self._group)]] * self._ranks
        arrived = all_to_all(slices, self._sizes, mine, self._group, check=False)
        found = []
        for unit, part in zip(self._mine, self._parts(arrived), strict=True):  # (T, N, r, c)
            n, r, c = unit.shape
            rows = part.transpose(0, 1).reshape(n, -1, c)
            found.append(rows if unit.cut == 1 else part.permute(1, 2, 0, 3).reshape(n, r, -1))
        return found

    def _return(self, results: Sequence[Tensor], updates: Tensor) -> None:
        """Send slices of the results (N, R, C) back by all-to-all; write this rank's to `updates`."""
        if not self._sent:
            return
        mine = [self._sizes[group_rank(self._group)]] * self._ranks
        reply = updates.new_empty(sum(mine))
        for unit, result, part in zip(self._mine, results, self._parts(reply), strict=True):
            if unit.cut == 1:
                part.copy_(result.unflatten(1, (self._ranks, -1)).transpose(0, 1))
            else:
                part.copy_(result.unflatten(2, (self._ranks, -1)).permute(2, 0, 1, 3))
        slices = all_to_all(reply, mine, self._sizes, self._group, check=False)
        parts = slices.split([math.prod(unit.shape) for unit in self._sent])
        for unit, part in zip(self._sent, parts, strict=True):
            unit.of(updates).copy_(part.view(unit.size))

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        """Return the slices (T, N, r, c) of this rank's units in a buffer that is contiguous by rank."""
        sizes = [math.prod(unit.shape) for unit in self._mine]
        parts = buffer.view(self._ranks, -1).split(sizes, 1) if sizes else ()
        return [part.unflatten(1, unit.shape) for part, unit in zip(parts, self._mine, strict=True)]


def _units(name: str, param: Parameter, offset: int, ranks: int) -> list[_Unit]:
    """Return the matrices of a parameter at `offset`; stacks of experts are split over `ranks`."""
    marks = parallel_attributes(param)
    cut, units = _cut(marks, ranks), []
    place = torch.empty(offset + param.numel(), dtype=torch.uint8, device="meta")
    tensor = place.as_strided(param.shape, param.stride(), offset)
    for block in _blocks(name, tensor, marks):
        for part in block.tensor_split(min(ranks, len(block))) if cut else (block,):
            place_of_part = part.shape, part.stride(), int(part.storage_offset())
            units.append(_Unit(*place_of_part, cut, _cost(part.shape, cut, ranks)))
    return units


def _orthogonalize_all(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return the updates of the matrices in `stacks`, each (N, R, C), batched by shape."""
    shapes: dict[torch.Size, list[list[int]]] = {}
    for number, stack in enumerate(stacks):
        batches = shapes.setdefault(stack.shape[1:], [[]])
        if batches[-1] and sum(stacks[i].numel() for i in batches[-1]) + stack.numel() > _BATCH:
            batches.append([])
        batches[-1].append(number)
    results = list(stacks)
    for shape, batches in shapes.items():
        for batch in batches:
            together = orthogonalize(torch.cat([stacks[i] for i in batch])) * (_RMS * math.sqrt(max(shape)))
            for i, result in zip(batch, together.split([len(stacks[i]) for i in batch])):
                results[i] = result
    return results
