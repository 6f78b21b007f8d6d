"""Device meshes of models with experts, see `fastmp.hf.expert_parallel`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_NAMES = (("dp_shard", "ep"), ("dp_replicate", "dp_shard", "ep"))
_DENSE = "dp_shard_ep"  # the flattened dimension


def check_mesh(mesh: Any, group: ProcessGroup | None) -> None:
    """Raise ValueError unless `mesh` is a device mesh of `fastmp.accelerate`."""
    if group is not None:
        raise ValueError("accelerate: expected a group or a mesh, got both; pass one of them")
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else repr(mesh)
    if names not in _NAMES:
        raise ValueError(
            'accelerate: expected a mesh with mesh_dim_names ("dp_shard", "ep") or ("dp_replicate", '
            f'"dp_shard", "ep"), got {names}; make one with init_device_mesh'
        )


def all_ranks(mesh: DeviceMesh) -> ProcessGroup:
    """Return the group of all ranks of a mesh."""
    if mesh.size() == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    return mesh._flatten("fastmp_mesh").get_group()


def is_first_rank(mesh: DeviceMesh) -> bool:
    """Return True on the first rank of `all_ranks(mesh)`, without communication."""
    return dist.get_rank() == int(mesh.mesh.min())


def dense_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of FSDP2 for parameters outside of experts: dp_shard and ep as one dimension.

    Args:
        mesh: of `fastmp.accelerate`. Collective: all its ranks call this.

    Returns:
        A mesh of one dimension, or of two if `mesh` has "dp_replicate", over which HSDP replicates.
    """
    flat = mesh["dp_shard", "ep"]._flatten(_DENSE)
    if not is_replicated(mesh):
        return flat
    return DeviceMesh.from_group(
        [mesh["dp_replicate"].get_group(), flat.get_group()],
        mesh.device_type,
        mesh=mesh.mesh.flatten(1),
        mesh_dim_names=("dp_replicate", _DENSE),
    )


def is_replicated(mesh: DeviceMesh) -> bool:
    """Return True if HSDP replicates parameters over a dimension of the mesh."""
    return "dp_replicate" in (mesh.mesh_dim_names or ())


def own_class(module: nn.Module) -> type[Any]:
    """Return the class of a module before `fully_shard`."""
    cls = type(module)
    return cls.__mro__[cls.__mro__.index(FSDPModule) + 1] if issubclass(cls, FSDPModule) else cls


def full_tensor(tensor: Tensor) -> Tensor:
    """Return `tensor`, gathered if `fully_shard` or a mesh has sharded it. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
