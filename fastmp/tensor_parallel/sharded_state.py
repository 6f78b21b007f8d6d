"""State dicts of parallel layers for torch.distributed.checkpoint (DCP), with shards as DTensors.

Parameters of parallel layers are plain tensors, which DCP takes for replicas: it would save one rank's shard
as the whole weight. Entries of their plain `state_dict()` raise in DCP (see `layers`); tensors computed from
an entry, such as a clone or a copy on another device, are not recognised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastmp.distributed.collectives import group_size
from fastmp.tensor_parallel.attributes import ParallelAttributes, parallel_attributes
from fastmp.tensor_parallel.layers import ParallelModule

__all__ = ["sharded_state_dict"]


def sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return `module.state_dict()` with DTensors, for `torch.distributed.checkpoint` to save or load in
    place.

    A shard of a tensor-parallel layer becomes a DTensor of its group, by the marks of its parameter (see
    `parallel_attributes`). A weight of several fused blocks becomes one entry per block, "qkv.weight[0]",
    "qkv.weight[1]", and so on. Replicated tensors stay plain. All share memory with the parameters:

        torch.distributed.checkpoint.save(sharded_state_dict(model), checkpoint_id=path)
        torch.distributed.checkpoint.load(sharded_state_dict(model), checkpoint_id=path)  # at any group size

    `async_save` copies whole storages, which fails for blocks of one storage; give it copies of them:

        state = {name: tensor.clone() for name, tensor in sharded_state_dict(model).items()}
        torch.distributed.checkpoint.async_save(state, checkpoint_id=path)

    Raises:
        ValueError: the module has experts, which are sharded over another grid; use
            `fastmp.training.Checkpointer` for these.
    """
    state = module.state_dict()
    meshes: dict[ProcessGroup, DeviceMesh] = {}
    groups = {  # of tied parameters as well, which other modules hold
        param: part.group
        for part in module.modules()
        if isinstance(part, ParallelModule)
        for param in part.parameters(recurse=False)
    }
    for key, param in module.named_parameters(remove_duplicate=False):
        marks = parallel_attributes(param)
        if marks.expert_parallel:
            raise ValueError(
                f"sharded_state_dict: {key} belongs to experts, which are sharded over another grid; "
                "use fastmp.training.Checkpointer"
            )
        if param not in groups or not marks.tensor_model_parallel:
            continue
        group, mesh = groups[param], None
        if group is not None and group_size(group) > 1:
            mesh = meshes[group] = meshes.get(group) or DeviceMesh.from_group(group, param.device.type)
        state.update(_blocks(key, state.pop(key), marks, mesh))
    return state


def _blocks(
    key: str, shard: torch.Tensor, marks: ParallelAttributes, mesh: DeviceMesh | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the entries of one parameter: views of its fused blocks, each of which is sharded by itself."""
    dim, stride = marks.partition_dim, marks.partition_stride
    for i, block in enumerate(shard.chunk(stride, dim)):
        name = key if stride == 1 else f"{key}[{i}]"
        yield name, block if mesh is None else DTensor.from_local(block, mesh, [Shard(dim)], run_check=False)
