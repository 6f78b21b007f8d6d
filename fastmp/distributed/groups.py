"""Process groups of a `RankGrid`, and the same groups as named device meshes.

Groups are an object, not module state: a process may hold several, one per model. As torch.distributed
requires, every rank creates every group in the same order, also groups it is not in. A group of one rank is
`None`: layers and collectives take `None` for "this rank alone" and communicate nothing.

Over NCCL, groups whose collectives overlap with compute have streams of high priority: as multiprocessors
come free, blocks of communication are placed before those of a GEMM launched earlier. NCCL uses these streams
for asynchronous collectives and messages; a synchronous collective runs on the current stream.
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
# Collectives that overlap with compute: reductions of gradient buckets, tensor-parallel collectives behind a
# GEMM, pipeline messages, the all-to-all of tokens next to a shared expert.
_OVERLAPPED = (*DENSE_AXES, *EXPERT_AXES, "cp-dp")
# Groups that send device tensors only: gradients, parameters, norms. In a job with NCCL they have no gloo,
# which would add threads and descriptors to each.
_DEVICE_ONLY = ("pp_backward", "edp", "dp_cp", "pp-tp", "ep-etp-pp", "ep-pp", "etp-pp")


def _priority(backends: str, timeout: timedelta) -> Any:
    """Return NCCL options with a high-priority stream, or None without NCCL.

    `dist.new_group` passes them to NCCL alone, also if gloo serves CPU tensors in the same group. It writes
    into them: each group needs its own.
    """
    if "nccl" not in backends:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # another than that of the group would be a warning
    return options


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's process groups; a group of one rank is None.

    | group | ranks | use |
    |---|---|---|
    | `tp`, `cp`, `dp`, `pp` | an axis of the dense grid | activations over `pp` |
    | `etp`, `ep`, `edp` | an axis of the expert grid | buckets of experts over `edp` |
    | `pp_backward` | as `pp` | gradients, so that they do not wait behind activations |
    | `dp_cp` | dp and cp | buckets of gradients and parameters |
    | `mp` | tp-pp | a model replica |
    | `expert_mp` | etp-ep-pp | a replica of all experts; is `mp` if the ranks are the same |
    | `tp_cp` | tp and cp | the tokens of one sequence |
    | `tp_cp_dp` | tp, cp and dp | the tokens of all microbatches that run at once |
    | `etp_ep` | etp and ep | all experts of a layer |
    | `embedding` | first and last stage of a pipeline | tied embeddings; None on other stages |

    No layer communicates over `dp_cp` and `edp`: it would wait behind buckets. If only one of several axes
    has more than one rank, its own group serves, except for `dp_cp`.

    Attributes:
        exchange: symmetric memory of `etp_ep` for dispatcher "symmetric"; None if one rank has all experts.
        deepep: the buffer for dispatcher "deepep", likewise. Both allocate nothing before they are used.
        mesh, expert_mesh: the axes of each grid by name, slowest first, axes of size one included, over the
            groups above; None if torch.distributed is not initialised (a world of one).

    Example:
        >>> groups = ParallelGroups.create(RankGrid(world_size=1))
        >>> groups.tp is None and groups.rank == 0
        True
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
        return self  # a copied layer has the same groups

    @classmethod
    @cache
    def alone(cls) -> ParallelGroups:
        """Return the groups of a world of one, all None: the same object at every call."""
        return cls(grid=RankGrid(world_size=1), rank=0)

    @property
    def norm(self) -> dict[str, ProcessGroup | None]:
        """Group arguments of `global_grad_norm`, by name."""
        of_experts = {"etp_group": self.etp, "expert_mp_group": self.expert_mp}
        world = dist.group.WORLD if self.grid.world_size > 1 else None
        return {"tp_group": self.tp, "mp_group": self.mp, **of_experts, "world_group": world}

    @classmethod
    def create(
        cls, grid: RankGrid, *, timeout: timedelta = DEFAULT_TIMEOUT, local_only: bool = False
    ) -> ParallelGroups:
        """Make the groups of `grid`; all ranks call this, in the same order as they make other groups.

        The groups have the backends of the default group (`fastmp.init`: NCCL for CUDA tensors, gloo for CPU
        tensors). Next to NCCL, `pp_backward`, `edp`, `dp_cp`, `mp` and `expert_mp` have no gloo, unless the
        group of an axis serves for them. A world of one works without torch.distributed.

        A rank calls `dist.new_group` once for every group of several ranks, also those of other ranks, and
        once for itself: for an axis of size n, world_size / n times.

        Args:
            timeout: after which a collective fails if a rank has not joined it.
            local_only: create the groups of this rank alone, for a pretended world (backend "fake") whose
                other ranks do not exist.

        Raises:
            ValueError: the grid and torch.distributed differ in the number of ranks.
        """
        initialised = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if initialised else 1
        if grid.world_size != world_size:
            hint = "" if initialised else " (not initialised: call fastmp.init() under torchrun first)"
            raise ValueError(f"ParallelGroups: the grid has {grid}; torch.distributed has {world_size}{hint}")
        if not initialised:
            return cls(grid=grid, rank=0)
        rank, backends = dist.get_rank(), dist.get_backend_config()
        # 1. All-reduce over the world (gloo, host): it fails at once if a rank is gone. While groups connect,
        #    gloo waits for the address of a lost rank as long as the timeout, hence `connecting`.
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

        # 2. One group for each axis, then the joined ones; axes of the same ranks share a group.
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
        # 3. Meshes over these groups; `alone` stands for axes of size one.
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
