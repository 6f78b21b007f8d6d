"""The state of a trainer as shards of the whole model's tensors, by the marks of parameters.

Names are those of a single-rank model: "model/layers.3.mlp.up.weight" and
"optimizer/layers.3.mlp.up.weight/exp_avg". They do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from fastmp.distributed.collectives import gather_objects, group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.optim.loss_scaler import LossScaler
from fastmp.optim.named_params import named_buffers, named_parameters
from fastmp.optim.optimizer import Optimizer
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.training.checkpoint.chunks import (
    Cut,
    TensorChunk,
    chunks_of_range,
    chunks_of_shard,
    clip,
    full_chunk,
    full_shape,
)
from fastmp.training.checkpoint.storage import ShardedTensorRef

__all__ = ["TrainingState", "optimizer_shards", "param_shards"]


class TrainingState:
    """All state that the next step of a trainer depends on, by names of the whole model.

    The arguments are those of the trainer. All ranks construct it together.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        grads: GradBuffer,
        optimizer: Optimizer,
        *,
        groups: ParallelGroups,
        scaler: LossScaler | None,
        rng: RngTracker | None,
        device: torch.device,
        placement: str = "looped",
    ) -> None:
        self._chunks, self._optimizer, self._groups = chunks, optimizer, groups
        self._scaler, self._rng, self._device = scaler, rng, device
        self._elements = {
            name: piece.param_range for flat in grads.flats for name, piece in flat.pieces.items()
        }
        self._in_pieces = frozenset(grads.gathered_in_fp8)
        named = [*named_parameters(chunks), *named_buffers(chunks)]
        self._prefix = _prefix_of_stages(named, groups.pp, placement)
        self._offered = _offered(named_parameters(chunks), groups, grads.shard)

    def to_save(self) -> dict[str, ShardedTensorRef]:
        """Return the current state; each element is on one rank, except random states, which each rank has.

        Parameters and optimizer state are not copied, everything else is.
        """
        state = self._large(self._offered)
        if group_rank(self._groups.dp_cp) == 0:  # replicas may have other buffers; those of the first count
            state |= {name: _copied(buffer) for name, buffer in self._buffers().items()}
        if self._groups.rank == 0:
            state |= {name: _copied(tensor) for name, tensor in self._small().items()}
        return state | {name: ShardedTensorRef.whole(tensor) for name, tensor in self._random().items()}

    def to_load(self) -> tuple[dict[str, ShardedTensorRef], dict[str, Tensor]]:
        """Return the tensors to read a state into, and the random states among them, which are optional."""
        random = self._random()
        small = {**self._buffers(), **self._small(), **random}
        return {
            **self._large(None),
            **{name: ShardedTensorRef.whole(tensor) for name, tensor in small.items()},
        }, random

    def loaded(self, random: Mapping[str, Tensor], step: int, *, as_saved: bool) -> None:
        """Continue from the tensors of `to_load`; random streams restart unless `as_saved`."""
        self._optimizer.loaded()
        if as_saved:
            self._restore(random)
        elif self._rng is not None:
            self._rng.restart(step)

    def _large(self, offered: Offered | None) -> dict[str, ShardedTensorRef]:
        """Return parameters and optimizer state; of replicated ones only those `offered` (None: all).

        Of a parameter that is gathered in FP8, each rank offers the piece whose numbers it has.
        """
        state, entries = dict[str, ShardedTensorRef](), self._optimizer.state_dict()["state"]
        for name, param in named_parameters(self._chunks):
            key = self._prefix + name
            if offered is not None and name in self._in_pieces:
                if name in offered.states and name in self._elements:
                    own = param.detach().view(-1)[slice(*self._elements[name])]
                    ref = optimizer_shards(param, self._groups, own, self._elements[name])
                    state[f"model/{key}"] = ref
            elif offered is None or name in offered.parameters:
                state[f"model/{key}"] = param_shards(param, self._groups)
            if offered is not None and name not in offered.states:
                continue
            for kind, tensor in entries.get(name, {}).items():
                ref = optimizer_shards(param, self._groups, tensor, self._elements[name])
                state[f"optimizer/{key}/{kind}"] = ref
        return state

    def _buffers(self) -> dict[str, Tensor]:
        return {f"model/{self._prefix}{name}": buffer for name, buffer in named_buffers(self._chunks)}

    def _small(self) -> dict[str, Tensor]:
        small = {f"counts/{name}": tensor for name, tensor in self._optimizer.counts().items()}
        if self._scaler is not None:
            small |= {f"scaler/{name}": tensor for name, tensor in self._scaler.state_dict().items()}
        return small

    def _random(self) -> dict[str, Tensor]:
        """Return copies of this rank's random states, on the CPU."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        if self._rng is not None:
            states |= {f"stream/{name}": state for name, state in self._rng.states().items()}  # type: ignore[misc]  # no graph is at work
        return {f"random/rank-{self._groups.rank}/{name}": state for name, state in states.items()}

    def _restore(self, random: Mapping[str, Tensor]) -> None:
        states = {name.split("/", 2)[2]: state for name, state in random.items()}
        torch.set_rng_state(states.pop("cpu"))
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states.pop("cuda"), self._device)
        if self._rng is not None:
            self._rng.restore({name.removeprefix("stream/"): state for name, state in states.items()})


class Offered(NamedTuple):
    """Names of the parameters and of the optimizer states saved by this rank."""

    parameters: frozenset[str]
    states: frozenset[str]


def _offered(named: Iterable[tuple[str, Parameter]], groups: ParallelGroups, shard: bool) -> Offered:
    """Return the parameters that this rank saves: each replica group balances bytes over its ranks.

    All ranks that hold a replica compute the same choice. shard: optimizer states are sharded (ZeRO-1).
    """
    parameters, states = set[str](), set[str]()
    load: dict[tuple[bool, bool], list[int]] = {}
    for name, param in named:
        marks = parallel_attributes(param)
        if marks.pipeline_replica:  # the other stage has it
            continue
        replicas = groups.edp if marks.expert_parallel else groups.dp_cp
        shards = groups.etp if marks.expert_parallel else groups.tp
        alike = group_size(shards) if not marks.tensor_model_parallel else 1
        place = group_rank(replicas) * alike + (group_rank(shards) if alike > 1 else 0)
        loads = load.setdefault((marks.expert_parallel, alike > 1), [0] * (group_size(replicas) * alike))
        writer = loads.index(min(loads))
        loads[writer] += param.nbytes
        if writer == place:
            parameters.add(name)
        if writer == place or (shard and writer % alike == place % alike):
            states.add(name)
    return Offered(frozenset(parameters), frozenset(states))


def _copied(tensor: Tensor) -> ShardedTensorRef:
    return ShardedTensorRef.whole(tensor.detach().clone())


def cuts_of(param: Tensor, groups: ParallelGroups) -> list[Cut]:
    """Return the sharding of this rank's `param` over the ep and tp (or etp) groups."""
    marks, cuts = parallel_attributes(param), list[Cut]()
    if marks.expert_parallel and group_size(groups.ep) > 1:
        cuts.append(Cut(0, 1, group_rank(groups.ep), group_size(groups.ep)))
    group = groups.etp if marks.expert_parallel else groups.tp
    if marks.tensor_model_parallel and group_size(group) > 1:
        cuts.append(Cut(marks.partition_dim, marks.partition_stride, group_rank(group), group_size(group)))
    return cuts


def param_shards(param: Tensor, groups: ParallelGroups) -> ShardedTensorRef:
    """Return the shards of the full tensor that this rank's `param` is."""
    cuts = cuts_of(param, groups)
    return _shards_of(param, cuts, [(full_chunk(param.shape), param.detach())])


def optimizer_shards(
    param: Tensor, groups: ParallelGroups, state: Tensor, elements: tuple[int, int]
) -> ShardedTensorRef:
    """Return the shards of the full optimizer state that this rank holds.

    state: flat, for these `elements` of the parameter's memory; or in the parameter's shape, if complete.
    """
    if state.numel() == param.numel():
        pieces = [(full_chunk(param.shape), state.detach().reshape(param.shape))]
        return _shards_of(param, cuts_of(param, groups), pieces, state.dtype)
    memory = sorted(range(param.ndim), key=param.stride, reverse=True)  # as they lie there
    order = [memory.index(dim) for dim in range(param.ndim)]
    shape, flat, pieces = [param.shape[dim] for dim in memory], state.detach(), []
    for chunk, (start, end) in chunks_of_range(shape, *elements):
        own = TensorChunk(tuple(chunk.offsets[i] for i in order), tuple(chunk.sizes[i] for i in order))
        pieces.append((own, flat[start:end].view(chunk.sizes).permute(order)))
    return _shards_of(param, cuts_of(param, groups), pieces, state.dtype)


def _shards_of(
    param: Tensor,
    cuts: list[Cut],
    pieces: Iterable[tuple[TensorChunk, Tensor]],
    dtype: torch.dtype | None = None,
) -> ShardedTensorRef:
    """Return the chunks of the full tensor in `pieces` of a shard, without rows of padding."""
    shape = full_shape(param.shape, cuts)
    rows = parallel_attributes(param).num_valid_rows
    if rows:
        shape = (rows, *shape[1:])
    shards = list[tuple[tuple[int, ...], Tensor]]()
    if 0 in shape:
        shards.append(((0,) * len(shape), param.new_empty(shape, dtype=dtype)))
    for piece, tensor in pieces:
        for own, chunk in chunks_of_shard(param.shape, cuts, piece):
            inside = clip(chunk, shape)
            if inside is not None:
                shard = tensor
                for dim, (at, first) in enumerate(zip(own.offsets, piece.offsets)):
                    shard = shard.narrow(dim, at - first, inside.sizes[dim])
                shards.append((inside.offsets, shard))
    return ShardedTensorRef(shape, param.dtype if dtype is None else dtype, shards)


def _prefix_of_stages(
    named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None, placement: str
) -> str:
    """Return the prefix that makes names of this rank's stages names of the whole model.

    It is "" if no two pipeline ranks use the same name, except for parameters that they share. Otherwise the
    stages of each rank are a model of their own, and the prefix names the rank, and a placement other than
    "looped", which gives it other stages.
    """
    own = {name: parallel_attributes(tensor).pipeline_shared for name, tensor in named}
    alone = [
        name for names in gather_objects(own, group) for name, is_shared in names.items() if not is_shared
    ]
    if len(set(alone)) == len(alone):
        return ""
    kind = "" if placement == "looped" else f"{placement}-"
    return f"{kind}stages-{group_rank(group)}-of-{group_size(group)}."
