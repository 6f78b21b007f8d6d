"""The process environment: the only place that reads and sets environment variables. Standard library only.

It has the place that a launcher gives to this rank. torchrun and most other launchers set RANK and its kin,
and these go before all else. srun, mpirun and mpiexec number their processes in variables of their own.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Environment", "set_default_variables", "with_variables"]

DEFAULT_PORT = 6000
_PORTS = range(10000, 32768)  # above those of services, below those that Linux gives to connections

# Launchers, and their variables: rank, world size, local rank, local world size (of srun: machines). The
# first one whose variables are all there counts: mpirun and mpiexec may start daemons by srun, which then
# numbers the daemons.
_OMPI = "OMPI_COMM_WORLD_"
_LAUNCHERS = (
    ("mpirun", f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra: MPICH, Intel
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # PALS
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),
)
_BATCH_SCRIPT = ("sbatch", "SLURM_PROCID", "SLURM_NTASKS")  # it has a task's variables, and is none
_HOW_TO_SET = {
    "srun": "srun --export=ALL,MASTER_ADDR=HOST ...",
    "mpirun": "mpirun -x MASTER_ADDR=HOST ...",
    "mpiexec": "mpiexec -genv MASTER_ADDR HOST ...",
}


@dataclass(frozen=True)
class Place:
    """The place of this process in its job, and the address where the ranks meet.

    `rank` is None for a process alone, `local_rank` where nobody says it. `launcher` is "srun", "mpirun" or
    "mpiexec" where one of these gave the place. `missing` says what the user must set before the ranks can
    join, "" where nothing is missing.
    """

    rank: int | None = None
    world_size: int = 1
    local_rank: int | None = None
    master_addr: str = "localhost"
    master_port: int = DEFAULT_PORT
    launcher: str = ""
    missing: str = ""


def read_place(variables: Mapping[str, str]) -> Place:
    """Read the place from `variables`; ValueError names a variable that is no integer."""
    if "RANK" not in variables:
        for launcher, *names in _LAUNCHERS:
            if all(name in variables for name in names):
                place = _launched(variables, launcher, *names)
                return place if place.world_size > 1 else Place()
        for launcher, rank, size, *others in (*_LAUNCHERS, _BATCH_SCRIPT):
            if rank in variables and (world_size := integer(variables, size, 1)) > 1:
                missing = _not_enough(
                    launcher, world_size, [name for name in others if name not in variables]
                )
                return Place(integer(variables, rank, 0), world_size, missing=missing)
    return Place(
        rank=integer(variables, "RANK", 0) if "RANK" in variables else None,
        world_size=integer(variables, "WORLD_SIZE", 1),
        local_rank=integer(variables, "LOCAL_RANK", 0) if "LOCAL_RANK" in variables else None,
        master_addr=variables.get("MASTER_ADDR", "localhost"),
        master_port=integer(variables, "MASTER_PORT", DEFAULT_PORT),
    )


def integer(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return the variable `name` as an integer. Raises ValueError naming it."""
    text = variables.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment: {name} must be an integer, got {text!r}") from None


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list, such as "rack[1-2]node[007-099,3],login".

    ValueError where `nodes` is no such list.
    """
    first = re.match(r"(?:[^\s,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|\Z)", nodes)
    if first is None:
        raise ValueError(f"is {nodes!r}, no list of nodes")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _launched(
    variables: Mapping[str, str], launcher: str, rank: str, size: str, local_rank: str, extent: str
) -> Place:
    """Return the rank and world given by the variables of `launcher`."""
    world_size, address, missing = integer(variables, size, 1), variables.get("MASTER_ADDR", ""), ""
    one_machine = integer(variables, extent, 0) == (1 if launcher == "srun" else world_size)
    if not address and one_machine:
        address = "localhost"
    elif not address:
        nodes = variables.get("SLURM_STEP_NODELIST", "") if launcher == "srun" else ""
        try:
            address = first_host(nodes)
        except ValueError as error:
            why = f" (SLURM_STEP_NODELIST {error})" if launcher == "srun" else ""
            missing = (
                f"{launcher} started {world_size} processes on several machines{why}, and MASTER_ADDR is not "
                f"set; set it to the host of rank 0: {_HOW_TO_SET[launcher]}"
            )
    return Place(
        rank=integer(variables, rank, 0),
        world_size=world_size,
        local_rank=integer(variables, local_rank, 0),
        master_addr=address,
        master_port=integer(variables, "MASTER_PORT", _port(variables, launcher)),
        launcher=launcher,
        missing=missing,
    )


def _port(variables: Mapping[str, str], launcher: str) -> int:
    """Return a port derived from the job's name, so that two jobs on one machine use different ports."""
    if launcher == "srun":
        job = f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}"
    elif "PMIX_NAMESPACE" in variables:
        job = variables["PMIX_NAMESPACE"]
    else:
        return DEFAULT_PORT
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def _not_enough(launcher: str, world_size: int, absent: list[str]) -> str:
    if not absent:
        return (
            f"this is the batch script of a job of {world_size} tasks; start the tasks with srun, or set "
            "RANK=0 WORLD_SIZE=1 for a run that is meant to be alone"
        )
    return (
        f"{launcher} started {world_size} processes, but {' and '.join(absent)} are not set; set RANK, "
        "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each process, or start `fastmp launch` on "
        "every machine"
    )


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
