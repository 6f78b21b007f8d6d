"""Save a transformers model that is sharded over a mesh, from all ranks, in the layout of published files.

One parameter is gathered at a time. Each rank writes a share of the tensors: one of the ranks that hold an
expert writes it, and the other parameters go round all ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from fastmp.config.file_access import write_synced
from fastmp.distributed.collectives import gather_objects, group_rank
from fastmp.hf.mesh import all_ranks, full_tensor, is_first_rank, own_class
from fastmp.hf.mesh_tensors import file_mappings, file_names, saved_tensors
from fastmp.hf.stored import INDEX, Shape
from fastmp.hf.weight_io import json_bytes
from fastmp.training.checkpoint.tensor_files import NamedTensorSpec, write_tensors

_FILE_BYTES = 2 << 30  # that a rank collects before it writes a file


@torch.no_grad()
def save_pretrained(model: Any, directory: str | Path) -> None:
    """Write a model that is sharded over a mesh as `from_pretrained` of transformers reads it. Collective.

    Every rank writes files: its share of the tensors, one rank of each expert's replicas that expert. One
    parameter is gathered at a time; a rank collects up to 2 GiB for a file.

    Args:
        model: a model after `accelerate(model, mesh=mesh)`; `model.save_pretrained(directory)` calls this.
        directory: shared by all ranks.

    Raises:
        ValueError: on all ranks, if one of them cannot write, or the model has adapters.

    Example (needs several ranks):
        >>> save_pretrained(model, "trained")
    """
    path, mesh = Path(directory), model.mesh
    if any(".base_layer." in name for name, _ in model.named_parameters()):
        raise ValueError(
            f"save_pretrained: {own_class(model).__name__} has adapters; save them with the PEFT model"
        )
    group = all_ranks(mesh)
    writer = _Writer(path, group.rank())
    _reshard(model)
    for number, (name, tensor) in enumerate(saved_tensors(model).items()):
        # 1. Gather; experts over dp_shard only, if files have them one by one.
        by_expert = "{e}" in file_names(model, name)[1][0]
        full, first = _gathered(tensor, by_expert)
        # 2. The rank that writes: for experts one of each ep group's, for others one of all.
        if _turn(mesh, number, by_expert):
            writer.add_parameter(model, name, tuple(tensor.shape), full, first)
    # 3. Name the files by their number among those of all ranks, and write index and configuration.
    _finish(model, writer, group)


@torch.no_grad()
def save_state_dict(model: Any, directory: str | Path, state_dict: Mapping[str, Tensor]) -> None:
    """Write full tensors as `save_pretrained` does, on the first rank of the mesh; others write nothing.

    transformers' own writer gathers the parameters of a model that is sharded, whatever it is given, which
    one rank alone cannot. No rank waits for another.

    Args:
        model: a model after `accelerate(model, mesh=mesh)`.
        directory: to write.
        state_dict: of `whole_state_dict`, or some of its tensors, in any dtype. Tied parameters are written
            once, under the first of their names in the model, whichever name they have here.

    Raises:
        ValueError: a tensor is a shard, of another shape, or not of the model; the directory cannot be
            written.
    """
    parameters = model.state_dict(keep_vars=True)
    for name, tensor in state_dict.items():
        own = parameters.get(name)
        if own is None or isinstance(tensor, DTensor) or tensor.shape != own.shape:
            kind = "a shard" if isinstance(tensor, DTensor) else f"of shape {tuple(tensor.shape)}"
            wanted = f"the full tensor of shape {tuple(own.shape)}" if own is not None else "a parameter"
            raise ValueError(
                f"save_pretrained: state_dict has {name}, {kind}, expected {wanted}; pass the result of "
                "whole_state_dict(model), which all ranks call"
            )
    if not is_first_rank(model.mesh):
        return
    writer = _Writer(Path(directory), 0)
    names = {id(tensor): name for name, tensor in saved_tensors(model).items()}
    for name, tensor in state_dict.items():
        written = names[id(parameters[name])]
        if name == written or written not in state_dict:
            writer.add_parameter(model, written, tuple(tensor.shape), tensor, 0)
    _finish(model, writer, None)


@contextlib.contextmanager
def together(group: ProcessGroup | None) -> Iterator[None]:
    """Wait for all ranks of the group at the end, and raise the error of one of them on all. Collective."""
    error = None
    try:
        yield
    except Exception as found:
        error = found
    reports = gather_objects("" if error is None else f"{type(error).__name__}: {error}", group)
    for rank, report in enumerate(reports):
        if report:
            raise ValueError(f"save_pretrained: rank {rank} of the group: {report}") from error


@torch.no_grad()
def trainable_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Gather the parameters that require gradients, such as adapters, on the first rank. Collective.

    Args:
        model: a model that is sharded over a mesh, or one that holds it, such as a PEFT model.

    Returns:
        {name: full tensor on the CPU} on rank 0, an empty dict on the others.

    Example (needs several ranks):
        >>> state = trainable_state_dict(peft_model)
        >>> if dist.get_rank() == 0:
        ...     peft_model.save_pretrained("adapter", state_dict=state)
    """
    _reshard(model)
    found = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            full = full_tensor(parameter.detach())
            if dist.get_rank() == 0:
                found[name] = full.cpu()
    return found


def _reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered and keeps, as the root's parameters after a forward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _gathered(tensor: Tensor, by_expert: bool) -> tuple[Tensor, int]:
    """Return a full tensor, or all of this ep rank's experts and the number of the first. Collective."""
    if not (by_expert and isinstance(tensor, DTensor)):
        return full_tensor(tensor), 0
    kept = [Replicate()] * (tensor.device_mesh.ndim - 1)
    experts = tensor.redistribute(placements=[*kept, tensor.placements[-1]]).to_local()
    return experts, tensor.device_mesh["ep"].get_local_rank() * len(experts)


def _turn(mesh: DeviceMesh, number: int, by_expert: bool) -> bool:
    """Return True if this rank writes tensor `number`."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    *replica, shard, ep = coordinates
    ranks, experts = mesh["dp_shard"].size(), mesh["ep"].size()
    if replica and replica[0]:
        return False
    if by_expert:
        return number % ranks == shard
    return number % (ranks * experts) == shard * experts + ep


class _Writer:
    """Collects tensors on the host and writes files of about 2 GiB, under names of this rank.

    After an error, which `error` has, it takes tensors but writes nothing: other ranks wait for this one.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank, self.files = path, rank, list[tuple[str, dict[str, int]]]()
        self.waiting, self.bytes, self.error = dict[str, Tensor](), 0, ""

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, and write a file if there are enough."""
        self.waiting[name] = tensor.to("cpu", copy=True).contiguous()
        self.bytes += tensor.nbytes
        if self.bytes >= _FILE_BYTES:
            self.write()

    def add_parameter(self, model: Any, name: str, shape: Shape, tensor: Tensor, first: int) -> None:
        """Take the tensors of files of a parameter.

        Args:
            model: that has it.
            name: of the parameter.
            shape: of the parameter.
            tensor: all of it, or some of its experts, if files have these one by one.
            first: the number of the first of these experts.
        """
        for mapping in file_mappings(model, name, shape):
            if not mapping.squeezed:
                self.add(mapping.name, tensor)
                continue
            (expert, start, _), (_, rows, _) = mapping.ours
            if 0 <= expert - first < len(tensor):
                self.add(mapping.name, tensor[expert - first, start : start + rows])

    def write(self) -> None:
        """Write the tensors that were taken since the last file."""
        waiting, self.waiting, self.bytes = self.waiting, {}, 0
        if not waiting or self.error:
            return
        specs = [NamedTensorSpec(name, each.dtype, each.shape) for name, each in waiting.items()]
        file = f"rank-{self.rank}-{len(self.files)}.safetensors.part"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / file).unlink(missing_ok=True)
            write_tensors(self.path / file, specs, list(waiting.values()).__getitem__, {"format": "pt"})
        except OSError as error:
            self.error = f"{self.path}: rank {self.rank} cannot write {file} ({error.strerror})"
        self.files.append((file, {spec.name: spec.bytes for spec in specs}))


def _finish(model: Any, own: _Writer, group: ProcessGroup | None) -> None:
    """Write what waits, give the files of all ranks transformers' names, then write index and configuration.

    Collective; None: one rank alone.
    """
    own.write()
    path, rank = own.path, group_rank(group)
    reports = gather_objects((own.files, own.error), group)
    if error := next((error for _, error in reports if error), ""):
        raise ValueError(f"save_pretrained: {error}")
    all_files = [files for files, _ in reports]
    before = sum(len(files) for files in all_files[:rank])
    count = sum(len(files) for files in all_files)
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    with together(group):
        earlier = [*path.glob("model-*-of-*.safetensors"), *path.glob("model.safetensors")]
        for old in earlier if rank == 0 else ():
            old.unlink()
    with together(group):
        for number, (file, _) in enumerate(own.files):
            os.replace(path / file, path / names[before + number])
        if rank == 0:
            files = [tensors for files in all_files for _, tensors in files]
            weight_map = {name: file for file, tensors in zip(names, files) for name in tensors}
            total = sum(size for tensors in files for size in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (path / INDEX).unlink(missing_ok=True)
            write_synced(path / INDEX, json_bytes(index))
            _write_config(model, path)


def _write_config(model: Any, path: Path) -> None:
    model.config.architectures = [own_class(model).__name__]
    model.config.dtype = next(model.parameters()).dtype
    model.config.save_pretrained(path)
    if model.can_generate():
        model.generation_config.save_pretrained(path)
