"""The process environment: the only place that reads and sets environment variables. Standard library
only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fastmp.config.launchers import Place, integer, read_place

__all__ = ["Environment", "set_default_variables", "with_variables"]


@dataclass(frozen=True)
class Environment(Place):
    """Environment variables that fastmp reads; no other module reads any.

    A `Place` is what launchers say. `agent_store` says that torchrun's agent already serves a store at
    `master_addr:master_port` (else rank 0 does). `ops` is FASTMP_OPS (which implementation serves an op),
    `debug` is FASTMP_DEBUG (full tracebacks), `profiled` FASTMP_PROFILED (this process runs under Nsight).
    `registers_segments`: NCCL registers the memory of graphs, and torch's allocator moves borders in it.
    `shares_gpus` is NCCL_MULTI_RANK_GPU_ENABLE: NCCL lets several ranks use one GPU.
    `connections` is CUDA_DEVICE_MAX_CONNECTIONS (hardware queues of a GPU) as it stands, or "";
    `ranks_per_machine` likewise PET_NPROC_PER_NODE, which torchrun takes for its option.
    """

    restart_count: int = 0
    agent_store: bool = False
    ops: str = ""
    debug: bool = False
    profiled: bool = False
    registers_segments: bool = False
    shares_gpus: bool = False
    connections: str = ""
    ranks_per_machine: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Read `environ` (the process's own by default); ValueError names a variable that is no number."""
        variables = os.environ if environ is None else environ
        allocator = variables.get("PYTORCH_CUDA_ALLOC_CONF", "") + variables.get("PYTORCH_ALLOC_CONF", "")
        return cls(
            **vars(read_place(variables)),
            restart_count=integer(variables, "TORCHELASTIC_RESTART_COUNT", 0),
            agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            ops=variables.get("FASTMP_OPS", ""),
            debug=variables.get("FASTMP_DEBUG", "0") not in ("", "0"),
            profiled=variables.get("FASTMP_PROFILED", "0") not in ("", "0"),
            registers_segments="expandable_segments:True" in allocator
            and variables.get("NCCL_GRAPH_REGISTER") != "0",
            shares_gpus=variables.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
            connections=variables.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
            ranks_per_machine=variables.get("PET_NPROC_PER_NODE", ""),
        )


def set_default_variables(**variables: str) -> None:
    """Set the `variables` of this process and its children that are not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def with_variables(**variables: str) -> dict[str, str]:
    """Return the environment of this process, overridden by `variables`, for a child process."""
    return {**os.environ, **variables}
