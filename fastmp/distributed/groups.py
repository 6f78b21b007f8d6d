"""Process groups of a `RankGrid`, and the same groups as named device meshes.

An object, not module state: a process may hold several, one per model. Every rank creates every group in
the same order, including those it is not in, which is what torch.distributed asks for. A group of one rank
is `None`: layers and collectives take `None` for "this rank alone" and communicate nothing.

Over NCCL, the groups whose collectives run beside compute kernels have streams of high priority: as
multiprocessors come free, blocks of communication are placed before those of a product launched earlier. NCCL
uses these streams for asynchronous collectives and messages; a synchronous one runs on the current stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastmp.distributed.deepep_buffer import DeepEPBuffer
from fastmp.distributed.grid import DENSE_AXES, EXPERT_AXES, RankGrid
from fastmp.distributed.runtime import CONNECTING
from fastmp.distributed.symmetric_memory import SymmetricExchange

DEFAULT_TIMEOUT = timedelta(minutes=10)
# Axes with collectives that run beside compute: reductions of buckets, tensor-parallel ones behind a product,
# the messages of pipelines, the exchange of tokens beside a shared expert.
_OVERLAPPED = (*DENSE_AXES, *EXPERT_AXES, "cp-dp")
# Groups that send tensors of the device only: gradients, parameters, norms. In a job with NCCL they have no
# gloo, whose threads and descriptors would come with each.
_DEVICE_ONLY = ("pp_backward", "edp", "dp_cp", "pp-tp", "ep-etp-pp", "ep-pp", "etp-pp")


def _priority(backends: str, timeout: timedelta) -> Any:
    """Return options for NCCL with streams of high priority; None where it is not among the backends.

    `dist.new_group` gives them to NCCL alone, also where gloo serves CPU tensors in the same group. It writes
    into them: each group needs its own.
    """
    if "nccl" not in backends:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # another than that of the group would be a warning
    return options


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's process groups; each is None where the group would have one rank.

    `tp`, `cp`, `dp`, `pp` are the dense axes, `etp`, `ep`, `edp` those of the experts. `pp_backward` has the
    ranks of `pp`: gradients travel over it, and activations over `pp`, so that neither waits behind the
    other. Buckets of gradients and parameters travel over `dp_cp`, or `edp` if they are of experts. No layer
    communicates over these two, or it would wait behind buckets. `mp` (tp-pp) is one replica of the model,
    `embedding` the first and last stage of a pipeline (None on the stages between). `expert_mp` (etp-ep-pp)
    is one replica of all experts, and `mp` itself where the ranks are the same. In an expert layer, `tp_cp`
    divides the tokens of one sequence, `tp_cp_dp` those of all microbatches that run at once, and `etp_ep`
    holds all experts. Where only one of several axes has more than one rank, its own group serves, but for
    `dp_cp`.

    `exchange` is the memory through which ranks of `etp_ep` send each other rows where the dispatcher is
    "symmetric", `deepep` the buffer for dispatcher "deepep"; None where one rank has all experts. Nothing is
    allocated before it is used.

    `mesh` has the dense axes by name and `expert_mesh` the expert axes, slowest first, axes of size one
    included; their groups are the ones above. Both are None where torch.distributed is not initialised (a
    world of one).
    """

    grid: RankGrid
    rank: int
    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    pp_backward: ProcessGroup | None = None
    etp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    edp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    mp: ProcessGroup | None = None
    expert_mp: ProcessGroup | None = None
    tp_cp: ProcessGroup | None = None
    tp_cp_dp: ProcessGroup | None = None
    etp_ep: ProcessGroup | None = None
    embedding: ProcessGroup | None = None
    exchange: SymmetricExchange | None = None
    deepep: DeepEPBuffer | None = None
    mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> ParallelGroups:
        """A copy of a layer works in the same groups."""
        return self

    @classmethod
    @cache
    def alone(cls) -> ParallelGroups:
        """The groups of a process on its own: every group is None. The same object at every call."""
        return cls(grid=RankGrid(world_size=1), rank=0)

    @property
    def norm(self) -> dict[str, ProcessGroup | None]:
        """The groups that `global_grad_norm` takes, by the names of its arguments."""
        of_experts = {"etp_group": self.etp, "expert_mp_group": self.expert_mp}
        world = dist.group.WORLD if self.grid.world_size > 1 else None
        return {"tp_group": self.tp, "mp_group": self.mp, **of_experts, "world_group": world}

    @classmethod
    def create(
        cls, grid: RankGrid, *, timeout: timedelta = DEFAULT_TIMEOUT, local_only: bool = False
    ) -> ParallelGroups:
        """Make the groups of `grid`; every rank calls this, in the same order as its other groups.

        The groups have the backends of the default group (`fastmp.init`: NCCL for CUDA tensors, gloo for
        CPU tensors) and their own `timeout`, after which a collective that some rank never joined fails.
        Beside NCCL, `pp_backward`, `edp`, `dp_cp`, `mp` and `expert_mp` have no gloo, unless the
        group of an axis serves for them. A world of one works without torch.distributed. ValueError where the
        grid and the running world differ in size.

        A rank calls `dist.new_group` once for every group of several ranks, also those of other ranks, and
        once for itself: for an axis of size n, world_size / n times. With `local_only` torch creates those of
        this rank alone: where the other ranks are pretended (backend "fake"), nobody has to agree on names.
        """
        initialised = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if initialised else 1
        if grid.world_size != world_size:
            hint = "" if initialised else " (not initialised: call fastmp.init() under torchrun first)"
            raise ValueError(f"ParallelGroups: the grid has {grid}; torch.distributed has {world_size}{hint}")
        if not initialised:
            return cls(grid=grid, rank=0)
        rank, backends = dist.get_rank(), dist.get_backend_config()
        # Gloo waits for the address of a rank that is gone as long as the group's timeout. A collective
        # fails at once where a connection has closed; behind it all ranks make groups, and within a minute.
        connecting = timeout
        if "gloo" in backends and not local_only:
            dist.all_reduce(torch.zeros(1))
            connecting = min(timeout, CONNECTING)

        def make(axes: str, name: str = "") -> ProcessGroup | None:
            own, name = None, name or axes
            backend = "nccl" if name in _DEVICE_ONLY and "nccl" in backends else None
            for ranks in grid.ranks(axes):
                if len(ranks) > 1:
                    options = _priority(backends, connecting) if axes in _OVERLAPPED else None
                    group = dist.new_group(
                        ranks, timeout=connecting, backend=backend, pg_options=options,
                        use_local_synchronization=local_only, group_desc=f"fastmp:{name}",
                    )  # fmt: skip
                    if rank in ranks:
                        own = group
                        if connecting != timeout:
                            dist.distributed_c10d._set_pg_timeout(timeout, group)
            return own

        groups = {axis: make(axis) for axis in dict.fromkeys(DENSE_AXES + EXPERT_AXES)}
        groups["pp_backward"] = make("pp", "pp_backward")

        made: dict[tuple[str, ...], ProcessGroup | None] = {}

        def join(*axes: str) -> ProcessGroup | None:
            several = tuple(sorted(axis for axis in axes if grid.size(axis) > 1))
            if len(several) < 2:
                return groups[several[0]] if several else None
            if several not in made:
                made[several] = make("-".join(several))
            return made[several]

        groups |= {
            "dp_cp": make("cp-dp", "dp_cp"),
            "mp": join("tp", "pp"),
            "tp_cp": join("tp", "cp"),
            "tp_cp_dp": join("tp", "cp", "dp"),
            "etp_ep": join("etp", "ep"),
            "embedding": make("embedding"),
        }
        exchange = deepep = None
        if (etp_ep := groups["etp_ep"]) is not None:
            exchange = SymmetricExchange(
                etp_ep,
                etp=grid.size("etp"),
                ep=grid.size("ep"),
                etp_varies_first=grid.etp_varies_first,
                timeout=timeout.total_seconds(),
            )
            deepep = DeepEPBuffer(etp_ep)
        same = grid.ranks("mp") == grid.ranks("etp-ep-pp")
        groups["expert_mp"] = groups["mp"] if same else join("etp", "ep", "pp")
        alone = dist.new_group(
            [rank], timeout=timeout, use_local_synchronization=True, group_desc="fastmp:alone"
        )
        device = "cuda" if "nccl" in backends else "cpu"

        def mesh(order: tuple[str, ...], axes: tuple[str, ...]) -> DeviceMesh:
            names = tuple(axis for axis in axes if axis not in order) + order[::-1]  # left out: size one
            ranks = torch.arange(world_size).view([grid.size(name) for name in names])
            return DeviceMesh.from_group(
                [groups[name] or alone for name in names], device, mesh=ranks, mesh_dim_names=names
            )

        return cls(
            grid=grid,
            rank=rank,
            **groups,
            exchange=exchange,
            deepep=deepep,
            mesh=mesh(grid.dense_axes, DENSE_AXES),
            expert_mesh=mesh(grid.expert_axes, EXPERT_AXES),
        )
